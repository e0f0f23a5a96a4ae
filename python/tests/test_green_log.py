"""Log messages under gevent and eventlet: the program's own thread logs them, and the program never hangs."""

from __future__ import annotations

import json

import pytest
from conftest import run_python
from test_green import EVENTLET, GEVENT

green = pytest.mark.parametrize("green", [GEVENT, EVENTLET], ids=["gevent", "eventlet"])

#: A timeout in seconds, after which the program counts as hanging.
HANGS_AFTER = 40.0

HANDLERS = {
    "stream": "handler = logging.StreamHandler(open(os.devnull, 'w'))",
    "syslog": """
import socket, logging.handlers
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind(("127.0.0.1", 0))
handler = logging.handlers.SysLogHandler(listener.getsockname())
""",
    "switches": """
class Switches(logging.Handler):
    def emit(self, record):
        sleep(0.001)
handler = Switches()
""",
}

# The whole program logs while leases are revoked, and each revocation is a warning of the library.
PROGRAM = """
import logging, os, threading
{handler}
seen, threads = [], set()
class Seen(logging.Filter):
    def filter(self, record):
        if record.name == "leasehold":
            seen.append(record.getMessage())
            threads.add(threading.get_native_id())
        return True
handler.addFilter(Seen())
logging.basicConfig(level=logging.INFO, handlers=[handler])
client = leasehold.connect(sys.argv[1])
evictions, done = int(sys.argv[2]), []

def chatter(number):
    while not done:
        logging.info("chatter %d", number)
        sleep(0)

def holds():
    for i in range(evictions):
        began = time.monotonic()
        guard = client.lock(f"evicted:{{i}}", on_lost="continue").acquire()
        client.evict(guard.name, guard.holder_id, force=True)
        guard.release()
        sleep(max(0, began + 0.05 - time.monotonic()))

talk = [spawn(chatter, number) for number in range(4)]
join([spawn(holds)])
end = time.monotonic() + 5
while len(seen) < evictions and time.monotonic() < end:
    sleep(0.01)
done.append(True)
join(talk)
print(json.dumps({{"warnings": len(seen), "by": len(threads), "main": os.getpid() in threads}}))
"""


@green
@pytest.mark.parametrize("handler", HANDLERS)
def test_twenty_evictions_a_second_while_the_program_logs(redis_url: str, green: str, handler: str, full: bool) -> None:
    evictions = 200 if full else 30
    code = green + PROGRAM.format(handler=HANDLERS[handler])
    result = json.loads(run_python(code, redis_url, str(evictions), within=HANGS_AFTER + evictions / 10))
    assert result["warnings"] >= evictions
    assert (result["by"], result["main"]) == (1, True), "another thread than the program's has called its handlers"


# The program never runs its hub, and ends right after the last message.
ENDS = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
client = leasehold.connect(sys.argv[1])
for i in range(20):
    guard = client.lock(f"evicted:{i}").acquire()
    client.evict(guard.name, guard.holder_id, force=True)
    guard.release()
"""


@green
def test_the_last_messages_are_logged_before_the_program_ends(redis_url: str, green: str) -> None:
    lines = [line for line in run_python(green + ENDS, redis_url).splitlines() if line.startswith("leasehold: ")]
    assert len(lines) >= 20


# A pool thread uses leasehold first, and never runs its hub again.
POOL_FIRST = """
import logging, os, threading
threads = []
class Seen(logging.Handler):
    def emit(self, record):
        threads.append(threading.get_native_id())
logging.getLogger("leasehold").addHandler(Seen())
client = leasehold.connect(sys.argv[1], lazy=True)

def evicted(name):
    guard = client.lock(name, on_lost="continue").acquire()
    client.evict(guard.name, guard.holder_id, force=True)
    guard.release()

def first():
    sleep(0.01)
    evicted("first")

in_pool(first)
before = len(threads)
evicted("second")
end = time.monotonic() + 5
while len(threads) == before and time.monotonic() < end:
    sleep(0.01)
print(json.dumps({"by_main": [by == os.getpid() for by in threads[before:]]}))
"""


@pytest.mark.parametrize(
    "green",
    [
        GEVENT + "in_pool = gevent.get_hub().threadpool.apply\n",
        EVENTLET + "import eventlet.tpool\nin_pool = eventlet.tpool.execute\n",
    ],
    ids=["gevent", "eventlet"],
)
def test_the_main_thread_logs_even_if_another_used_leasehold_first(redis_url: str, green: str) -> None:
    by_main = json.loads(run_python(green + POOL_FIRST, redis_url))["by_main"]
    assert by_main and all(by_main)


FORKS = """
import logging, os
logging.basicConfig(stream=sys.stdout, format="%(process)d %(message)s")
client = leasehold.connect(sys.argv[1])

def evicted(name):
    guard = client.lock(name).acquire()
    client.evict(guard.name, guard.holder_id, force=True)
    guard.release()
    sleep(0.1)

evicted("parents")
child = os.fork()
if child == 0:
    evicted("childs")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
evicted("parents-again")
sys.stdout.flush()
print(json.dumps({"parent": os.getpid(), "child": child}))
"""


def test_a_forked_child_logs_only_its_own_messages(redis_url: str) -> None:
    *lines, last = run_python(GEVENT + FORKS, redis_url).splitlines()
    pids = json.loads(last)

    def said_by(process: str) -> str:
        return "\n".join(line for line in lines if line.startswith(f"{pids[process]} "))

    assert "name=childs" in said_by("child") and "name=parents" not in said_by("child")
    assert "name=parents " in said_by("parent") and "name=parents-again" in said_by("parent")
    assert "name=childs" not in said_by("parent")


# The messages arrive when the program does not run its hub any more: before it forks, and before it ends.
QUEUED = """
import logging, os
from leasehold import _log
logging.basicConfig(stream=sys.stdout, format="%(process)d %(message)s")
client = leasehold.connect(sys.argv[1])
with client.lock("a"):
    pass
_log._on_message(logging.WARNING, "before the fork")
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(os.getpid(), flush=True)
_log._on_message(logging.WARNING, "before the end")
"""


@green
def test_queued_messages_are_logged_once_by_the_process_that_queued_them(redis_url: str, green: str) -> None:
    lines = run_python(green + QUEUED, redis_url).splitlines()
    pid = next(line for line in lines if line.isdigit())
    assert sorted(line for line in lines if line != pid) == [f"{pid} before the end", f"{pid} before the fork"]

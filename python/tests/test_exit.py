"""The end of a process whose store is unreachable: one timeout for all locks together."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Server, start_python, until
from test_green import GEVENT

import leasehold

#: 2 s for the store, plus the end of a Python on a busy machine. One timeout after the other would take 40 s.
ENDS_WITHIN = 8.0

HOLDS = """
import sys, leasehold
client = leasehold.connect(sys.argv[1])
guards = [client.lock(f"held:{i}", ttl=60).acquire() for i in range(20)]
two, three = client.pool("pool", range(3)).acquire(2).permit(), client.lock("alone", renew=False).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def is_stopped(server: Server) -> None:
    server.process.send_signal(signal.SIGSTOP)


def is_killed(server: Server) -> None:
    server.process.kill()
    server.process.wait()


@pytest.mark.parametrize("goes_away", [is_stopped, is_killed])
@pytest.mark.parametrize("program", [HOLDS, GEVENT + HOLDS], ids=["threads", "gevent"])
def test_a_process_ends_in_time_when_its_store_is_unreachable(
    own_server: Server, program: str, goes_away: Callable[[Server], None]
) -> None:
    with start_python(program, own_server.url, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None and process.stderr is not None
        assert process.stdout.readline() == "held\n"
        goes_away(own_server)
        began = time.monotonic()
        process.stdin.close()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
        took = time.monotonic() - began
        assert took < ENDS_WITHIN, f"it took {took:.1f} s:\n{process.stderr.read()}"
        assert "held:7" in process.stderr.read(), "the log does not name the locks whose release is not confirmed"


def test_all_locks_are_released_together(own_server: Server) -> None:
    with leasehold.connect(own_server.url) as client:
        with start_python(HOLDS, own_server.url, stdin=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "held\n"
            assert len(client.locks()) == 23
            process.stdin.close()
            assert process.wait(30) == 0
        assert client.locks() == []


# Another thread can acquire a lock between any two steps of the main thread's end.
BUSY = """
import sys, threading, leasehold
sys.setswitchinterval(1e-5)
client, mine = leasehold.connect(sys.argv[1]), leasehold.connect("memory:")
guards = [client.lock("held", ttl=60).acquire(), *(mine.lock(f"held:{i}").acquire() for i in range(2000))]
enough = threading.Event()

def acquires(number):
    for i in range(1_000_000):
        guards.append(mine.lock(f"{number}:{i}").acquire())
        if i == 100:
            enough.set()

for number in range(6):
    threading.Thread(target=acquires, args=[number], daemon=True).start()
enough.wait()
"""


def test_all_locks_are_released_while_a_daemon_thread_acquires_more(own_server: Server) -> None:
    with leasehold.connect(own_server.url) as client, start_python(BUSY, own_server.url) as process:
        output = process.communicate(timeout=60)
        assert process.returncode == 0 and "RuntimeError" not in output[1], output[1]
        assert client.locks() == []


class Interrupted(BaseException):
    """An exception of a signal handler, such as Ctrl-C or a time limit."""


def test_an_interrupted_release_goes_on_and_does_not_count_as_failed(own_server: Server) -> None:
    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with leasehold.connect(own_server.url, answer_within=10) as client:
            guard = client.lock("a", ttl=60).acquire()
            token = leasehold.new_token()
            client.acquire_token("b", token, ttl=60)
            own_server.process.send_signal(signal.SIGSTOP)
            for release in (guard.release, lambda: client.release_token("b", token)):
                timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()
                with pytest.raises(Interrupted):
                    release()
                timer.join()
            own_server.process.send_signal(signal.SIGCONT)
            until(lambda: client.locks() == [])
            assert client.statistics().normal_release_failures == 0
    finally:
        signal.signal(signal.SIGUSR1, before)

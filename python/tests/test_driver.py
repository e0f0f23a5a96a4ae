"""Background work continues, whether the native thread or a waiting Python thread drives the engine."""

from __future__ import annotations

import signal
import subprocess
import time

from conftest import Background, run_python, start_python, until

from leasehold import Client


def test_a_lease_is_renewed_after_the_last_waiting_thread(client: Client) -> None:
    """Threads that wait in quick succession drive; after the last of them the native thread has to take over."""
    for _ in range(100):
        with client.lock("a"):
            pass
    with client.lock("a", ttl=0.3) as guard:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sum(range(20_000_000))  # one call of C, which keeps the GIL
        assert guard.is_valid, guard.lost.reason


def test_a_dropped_guard_is_released_without_a_waiting_thread(client: Client, url: str) -> None:
    code = """
import sys, leasehold
client = leasehold.connect(sys.argv[1])
for _ in range(100):
    guard = client.lock("a").acquire()
    print("taken", flush=True)
    del guard
    sys.stdin.readline()
"""
    with start_python(code, url, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(100):
            assert process.stdout.readline() == "taken\n"
            until(lambda: not client.is_locked("a"))
            process.stdin.write("\n")
            process.stdin.flush()


def test_another_waiting_thread_takes_over_driving(client: Client, url: str) -> None:
    """The holder is another process, so only the waiting threads make calls here."""
    code = """
import sys, time, leasehold
client = leasehold.connect(sys.argv[1])
guards = {name: client.lock(name).acquire() for name in sys.argv[2:]}
print("held", flush=True)
for line in sys.stdin:
    what, name = line.split()
    if what == "release":
        guards[name].release()
    else:
        while not client.info(name).waiters:
            time.sleep(0.005)
    print("done", flush=True)
"""
    names = [f"a{i}" for i in range(8)]
    for order in (names, names[::-1]):
        with start_python(code, url, *names, stdin=subprocess.PIPE) as holder:
            assert holder.stdin is not None and holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            waiters = {}
            for name in names:
                waiters[name] = Background(lambda name=name: client.lock(name).acquire().release())  # type: ignore[misc]
                holder.stdin.write(f"await {name}\n")
                holder.stdin.flush()
                assert holder.stdout.readline() == "done\n"
            for name in order:
                holder.stdin.write(f"release {name}\n")
                holder.stdin.flush()
                waiters[name].join()
            holder.stdin.close()
    assert client.locks() == []


def test_ctrl_c_ends_the_waiting_next_to_an_event_loop(client: Client, url: str) -> None:
    """With an event loop, the native thread drives, and the waiting thread does not."""
    code = """
import asyncio, sys, threading, leasehold
client = leasehold.connect(sys.argv[1])
inside = threading.Event()

async def hold():
    async with client.lock("b"):
        inside.set()
        await asyncio.sleep(60)

threading.Thread(target=lambda: asyncio.run(hold()), daemon=True).start()
inside.wait()
client.lock("a").acquire()
"""
    with client.lock("a"), start_python(code, url) as process:
        until(lambda: len(client.info("a").waiters) == 1)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert "KeyboardInterrupt" in err, err
        until(lambda: client.info("a").waiters == ())


def test_a_thread_with_a_small_stack_can_drive(url: str) -> None:
    code = """
import sys, threading, leasehold
threading.stack_size(256 * 1024)
client = leasehold.connect(sys.argv[1])

def work():
    for _ in range(50):
        with client.lock("a"):
            pass

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(client.locks())
"""
    assert run_python(code, url) == "[]\n"

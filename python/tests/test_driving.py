"""Whichever thread drives the engine, its own or one that waits, what goes on in the background goes on."""

from __future__ import annotations

import signal
import subprocess
import time

from conftest import Background, run_python, start_python, until

from leasehold import Client


def test_a_lease_is_renewed_when_those_who_drove_are_gone(client: Client) -> None:
    """Threads that wait in quick succession drive by themselves; after the last of them nobody else would."""
    for _ in range(100):
        with client.lock("a"):
            pass
    with client.lock("a", ttl=0.3) as guard:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sum(range(20_000_000))  # one call of C, which lets nobody else run
        assert guard.is_valid, guard.lost.reason


def test_a_guard_is_given_back_by_a_program_that_waits_no_more(client: Client, url: str) -> None:
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


def test_those_who_wait_go_on_when_the_one_that_drives_is_done(client: Client, url: str) -> None:
    """The holder is another process: here nobody calls anything but those who wait."""
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
    """There the engine's own thread drives, and the one that waits does not."""
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

"""Forks: a child never uses its parent's connection or thread, and the parent keeps its leases."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Background, run_python, until

import leasehold
from leasehold import Client, LockLost

#: Timeouts in seconds: a fork is fast, a new Python is slow.
FORKS, SPAWNS, SOME_SPAWNS = 100, 100, 4


def in_child(work: Callable[[], object], within: float = 10.0) -> None:
    """Runs work in a forked child, and fails if the child hangs or fails."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"in the child: {error!r}", flush=True)
        finally:
            os._exit(code)
    end = time.monotonic() + within
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.002)


def test_fork_after_use(client: Client) -> None:
    """The child can use locks at once, and does not change its parent's leases."""
    with client.lock("parents", ttl=2) as guard:

        def work() -> None:
            began = time.monotonic()
            assert client.try_lock("parents") is None
            with client.lock("childs") as own:
                assert own.is_valid
            assert time.monotonic() - began < 2

        for _ in range(FORKS):
            in_child(work)
            assert guard.is_valid, guard.lost.reason
            assert client.is_locked("parents") and not client.is_locked("childs")
    assert not client.is_locked("parents")


def test_a_lock_object_of_the_parent_names_the_child_as_owner(client: Client) -> None:
    lock = client.lock("a", owner="worker")

    def work() -> None:
        with lock:
            holder = client.holder("a")
            assert holder is not None and holder.owner is not None
            assert holder.owner.startswith("worker@") and holder.owner.endswith(f"(pid {os.getpid()})"), holder.owner

    in_child(work)
    work()


def test_a_guard_in_a_child_belongs_to_the_parent(client: Client) -> None:
    guard = client.lock("a").acquire()
    lock = client.lock("b")

    def work() -> None:
        nonlocal guard
        assert guard.lost.is_set() and guard.lost.reason == "forked" and not guard.is_valid
        for use in (guard.release, guard.raise_if_lost, lambda: guard.extend(10)):
            with pytest.raises(LockLost, match="process"):
                use()
        assert guard.lost.wait(1)
        with guard:
            pass
        del guard
        gc.collect()
        assert client.is_locked("a")

    with lock:
        in_child(work)
    assert guard.is_valid and guard.release()


def test_a_child_in_a_with_of_its_parent_leaves_it_alone(client: Client) -> None:
    def child_leaves() -> None:
        try:
            with client.lock("a") as guard:
                in_child(lambda: None)
                if (pid := os.fork()) == 0:
                    return  # through the end of the `with`, in the child
                os.waitpid(pid, 0)
                assert guard.is_valid and client.is_locked("a")
        finally:
            if os.getpid() != parent:
                os._exit(0)

    parent = os.getpid()
    child_leaves()
    assert not client.is_locked("a")


def test_a_grandchild(client: Client) -> None:
    with client.lock("a"):
        in_child(lambda: in_child(lambda: client.lock("b").acquire().release() or exit(1)))
    assert client.locks() == []


def test_fork_while_other_threads_use_locks(client: Client, url: str) -> None:
    """The child needs nothing that other threads had locked at the fork."""
    ends = threading.Event()

    def busy(name: str) -> None:
        while not ends.is_set():
            with client.lock(name):
                pass
            with leasehold.connect(url) as other:
                other.is_locked(name)

    with client.lock("held"):
        waiter = Background(lambda: client.lock("held").acquire().release())
        threads = [Background(lambda name=name: busy(name)) for name in ("a", "b")]  # type: ignore[misc]
        try:
            for _ in range(FORKS):
                in_child(lambda: client.lock("childs").acquire().release() or exit(1))
        finally:
            ends.set()
        for thread in threads:
            thread.join()
    waiter.join()
    assert client.locks() == []


def test_parent_and_children_on_one_file_lose_nothing(tmp_path: Path) -> None:
    """What SQLite would do to a file that was open at a fork: two holders at once, and a broken file."""
    path = tmp_path / "locks.db"
    client = leasehold.connect(f"sqlite:{path}")
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        for _ in range(25):
            with client.lock("counter"):
                counter.write_text(str(int(counter.read_text()) + 1))

    count()
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                count()
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    count()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
    assert counter.read_text() == "150"
    client.close()
    # In another process: two copies of SQLite on one file in one process undo each other's locks.
    code = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('PRAGMA integrity_check').fetchone()[0])"
    assert run_python(code, str(path)) == "ok\n"


def _use(url: str, client: Client | None, told: object) -> None:
    with client or leasehold.connect(url) as client:
        assert client.try_lock("parents") is None
        with client.lock("childs"):
            pass


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(client: Client, url: str, full: bool, method: str) -> None:
    spawns = SPAWNS if full and method == "spawn" else SOME_SPAWNS
    context = multiprocessing.get_context(method)
    with client.lock("parents", ttl=2) as guard:
        for at in range(FORKS if method == "fork" else spawns):
            # With the parent's client, and with a new one.
            process = getattr(context, "Process")(target=_use, args=(url, client if at % 2 else None, None))
            process.start()
            process.join(30)
            assert process.exitcode == 0, "it hangs or failed"
            assert guard.is_valid and client.is_locked("parents")
    assert client.locks() == []


#: Locks that a child acquired and never released.
_kept: list[leasehold.Guard] = []


def _keep(url: str) -> None:
    client = leasehold.connect(url)
    _kept.append(client.lock("kept", ttl=60).acquire())
    # The child waits for its threads first, like the interpreter.
    threading.Thread(target=_keep_a_while, args=(client,)).start()


def _keep_a_while(client: Client) -> None:
    with client.lock("thread", ttl=60) as guard:
        time.sleep(0.3)
        guard.raise_if_lost()
    client.claim("done", True, lease=60)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_releases_forgotten_locks_at_its_end(client: Client, url: str, method: str) -> None:
    process = getattr(multiprocessing.get_context(method), "Process")(target=_keep, args=(url,))
    process.start()
    process.join(30)
    assert process.exitcode == 0, "it hangs or failed"
    assert client.locks() == []
    assert not client.claim("done", False, lease=60).created, "its thread was not waited for"


def test_a_pool_of_processes(client: Client, url: str) -> None:
    with client.lock("parents"), multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(_use, [(url, None, None)] * 16)
        until(lambda: [lock.name for lock in client.locks()] == ["parents"])


def test_a_fork_outside_python_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    """A fork without os.fork, so the file could not be closed before."""
    out = run_python(
        """
import ctypes, os, sys, leasehold
client = leasehold.connect(sys.argv[1])
client.lock("a").acquire().release()
pid = ctypes.CDLL(None).fork()
if pid == 0:
    try:
        client.try_lock("a")
    except leasehold.StoreUnavailable as refused:
        print(refused.kind, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(client.try_lock("a") is not None)
""",
        f"sqlite:{tmp_path / 'locks.db'}",
    )
    assert out == "forked\nTrue\n"


IMPORTING = """
import builtins, os, sys, threading, time
import leasehold
sys.path.insert(0, sys.argv[2])
builtins.go_on = threading.Event()
client = leasehold.connect(sys.argv[1])
threading.Thread(target=__import__, args=(sys.argv[3],), daemon=True).start()
while sys.argv[3] not in sys.modules:
    time.sleep(0.001)
child = os.fork()
if child == 0:
    with client.lock("childs"):
        os._exit(0)
end = time.monotonic() + 20
while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
    time.sleep(0.005)
if done == (0, 0):
    os.kill(child, 9)
    os.waitpid(child, 0)
    sys.exit("the child hangs")
go_on.set()
sys.exit(os.waitstatus_to_exitcode(done[1]))
"""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_fork_while_another_thread_imports_a_green_library(url: str, library: str, tmp_path: Path) -> None:
    """The child inherits the import lock without the thread that would release it."""
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text("go_on.wait()\n")
    run_python(IMPORTING, url, str(tmp_path), library)

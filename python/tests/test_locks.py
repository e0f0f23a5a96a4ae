"""Locks in threads."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import SOON, Background, Server, run_python, start_python, until

import leasehold
from leasehold import Client, InvalidArgument, LockLost, LockNotAcquired, StoreUnavailable


def test_a_lock_has_a_name_a_fence_a_token_and_an_end(client: Client) -> None:
    with client.lock("order:42", ttl=10) as guard:
        first = guard.fence
        assert guard.name == "order:42"
        assert first is not None and guard.is_valid and guard.is_protected
        assert len(guard.token) == 32 and guard.token not in repr(guard)
        assert 9 < guard.time_left <= 10
        assert not guard.lost and not guard.lost.is_set() and guard.lost.reason is None
        guard.raise_if_lost()
        assert leasehold.current_fence() == first
    assert not guard.is_valid and guard.time_left == 0
    assert leasehold.current_fence() is None
    with client.lock("order:42", ttl=timedelta(seconds=10)) as guard:
        assert guard.fence is not None and guard.fence > first
    with client.lock("order:42", fenced=False) as guard:
        assert guard.fence is None


def test_a_refused_request_names_the_holder(client: Client) -> None:
    with client.lock("a", owner="checkout"):
        assert client.try_lock("a") is None
        for wait in (0.0, 0.2):
            began = time.monotonic()
            with pytest.raises(LockNotAcquired) as refused:
                client.lock("a", wait=wait).acquire()
            assert wait <= time.monotonic() - began < wait + 1
            assert refused.value.name == "a"
            assert refused.value.holder is not None
            assert refused.value.holder.owner is not None and refused.value.holder.owner.startswith("checkout@")
            assert "checkout" in str(refused.value)
    guard = client.try_lock("a")
    assert guard is not None and guard.release()


def test_a_waiter_enters_when_the_holder_leaves(client: Client) -> None:
    guard = client.lock("a").acquire()
    entered: list[float] = []

    def wait() -> None:
        with client.lock("a"):
            entered.append(time.monotonic())

    waiter = Background(wait)
    until(lambda: len(client.info("a").waiters) == 1)
    assert not entered
    left = time.monotonic()
    assert guard.release()
    waiter.join()
    assert entered[0] - left < 1


def test_threads_that_share_a_lock_object_run_one_at_a_time(client: Client) -> None:
    lock = client.lock("a")
    inside, most, fences = 0, 0, []

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with lock as guard:
                inside += 1
                most = max(most, inside)
                fences.append(guard.fence or 0)
                time.sleep(0)
                inside -= 1

    for thread in [Background(work) for _ in range(8)]:
        thread.join(60)
    assert most == 1 and len(fences) == 80
    assert fences == sorted(set(fences)), "fences did not rise"
    assert client.statistics().lost_leases == 0


def test_locks_are_left_in_any_order_and_context(client: Client) -> None:
    a, b = client.lock("a"), client.lock("b")
    a.__enter__()
    inner = b.__enter__()
    a.__exit__(None, None, None)
    assert not client.is_locked("a") and client.is_locked("b")
    assert leasehold.current_fence() == inner.fence
    b.__exit__(None, None, None)
    assert leasehold.current_fence() is None
    # A web framework enters and ends a block in different contexts.
    contextvars.copy_context().run(a.__enter__)
    assert client.is_locked("a")
    contextvars.copy_context().run(a.__exit__, None, None, None)
    assert client.locks() == []
    with pytest.raises(RuntimeError, match="without __enter__"):
        a.__exit__(None, None, None)


def test_an_exception_releases_the_lock_and_is_not_swallowed(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.lock("a"):
        _ = 1 / 0
    assert not client.is_locked("a")


def test_a_late_release_does_not_affect_the_next_holder(client: Client) -> None:
    late = client.lock("a", ttl=0.1, renew=False).acquire()
    with client.lock("a", wait=5) as guard:
        assert late.lost and late.lost.is_set()
        with pytest.raises(LockLost):
            late.extend(10)
        assert not late.release()
        assert not late.release(), "nor a second time"
        holder = client.holder("a")
        assert holder is not None and holder.holder_id == guard.holder_id
    assert client.statistics().ownership_violations >= 0


def test_a_lease_is_renewed_and_extended(client: Client) -> None:
    with client.lock("a", ttl=0.3) as guard:
        time.sleep(1)
        assert guard.is_valid and client.is_locked("a")
        guard.extend(20)
        assert guard.time_left > 15
        left = client.ttl_left("a")
        assert left is not None and left > 15


def test_a_lease_is_renewed_while_python_holds_the_gil(client: Client) -> None:
    with client.lock("a", ttl=0.3) as guard:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sum(range(20_000_000))  # one call of C, which keeps the GIL
        assert guard.is_valid, guard.lost.reason


def test_a_lost_lease_is_reported(redis_client: Client, server: Server) -> None:
    with pytest.raises(LockLost) as lost, redis_client.lock("a", ttl=0.5) as guard:
        server.redis.flushall()
        assert guard.lost.wait(5)
        assert guard.lost.reason == "gone"
        with pytest.raises(LockLost):
            guard.raise_if_lost()
    assert (lost.value.name, lost.value.reason) == ("a", "gone")

    with pytest.raises(LockLost), redis_client.lock("a"):
        server.redis.flushall()  # found at the release

    with pytest.raises(ZeroDivisionError), redis_client.lock("a"):
        server.redis.flushall()
        _ = 1 / 0

    with redis_client.lock("a", on_lost="continue"):
        server.redis.flushall()


def test_waiting_for_a_loss_ends_with_the_release(client: Client) -> None:
    guard = client.lock("a").acquire()
    assert not guard.lost.wait(0.05)
    told: list[bool] = []
    waiter = Background(lambda: told.append(guard.lost.wait()))
    time.sleep(0.05)
    guard.release()
    waiter.join()
    assert told == [False]


def test_only_the_inspected_holder_is_evicted(client: Client) -> None:
    guard = client.lock("a").acquire()
    looked_at = client.info("a")
    assert client.evict("a", looked_at, reason="maintenance").outcome == "revoked"
    assert guard.lost.wait(5) and guard.lost.reason == "revoked"
    guard.release()
    assert client.evict("a", looked_at).outcome == "free"
    with client.lock("a", on_lost="continue") as guard:
        with pytest.raises(leasehold.NotEvicted) as refused:
            client.evict("a", looked_at)
        assert refused.value.holder is not None and refused.value.holder.holder_id == guard.holder_id
        assert client.evict("a", force=True).released
        assert not client.is_locked("a")
    assert client.evict("a").outcome == "free"


def test_a_holder_can_be_asked_to_finish(client: Client) -> None:
    with client.lock("a") as guard:
        assert guard.asked_to_finish is None
        assert client.ask_to_finish("a", reason="deploy at noon")
        until(lambda: guard.asked_to_finish == "deploy at noon")
        assert guard.is_valid
    assert not client.ask_to_finish("a")


def test_max_hold_ends_the_lease(client: Client) -> None:
    with pytest.raises(LockLost) as lost, client.lock("a", ttl=5, max_hold=0.2) as guard:
        assert guard.lost.wait(5)
    assert lost.value.reason == "max_hold"


def test_inspection(client: Client) -> None:
    assert client.info("a").held is False and client.holder("a") is None and client.ttl_left("a") is None
    with client.lock("a", ttl=20, owner="tts") as guard, client.lock("b"):
        info = client.info("a")
        assert info.held and info.holder_id == guard.holder_id and info.ttl_ms == 20_000
        assert info.as_dict()["owner"] == info.owner
        assert [lock.name for lock in client.locks()] == ["a", "b"]
        assert [lock.name for lock in client.locks("b")] == ["b"]
        left = client.ttl_left("a")
        assert left is not None and 15 < left <= 20
        assert client.is_locked("a")
    assert client.locks() == []


def test_statistics(client: Client) -> None:
    with client.lock("a"):
        assert client.try_lock("a") is None
    counted = client.statistics()
    assert (counted.total_locks, counted.not_acquired) == (1, 1)
    assert counted.exception_rate == counted.emergency_release_rate == 0.0
    assert counted.ownership_violations == counted.release_script_errors == counted.emergency_releases == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"ttl": 0},
        {"ttl": -1},
        {"ttl": float("nan")},
        {"wait": -1},
        {"owner": "\x1b[2J"},
        {"on_lost": "maybe"},
        {"on_unavailable": "maybe"},
    ],
)
def test_invalid_arguments_are_refused(wrong: dict[str, object]) -> None:
    with leasehold.connect("memory:") as client, pytest.raises(InvalidArgument):
        client.lock(**{"name": "a", **wrong}).acquire()  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["", "nonsense", "http://localhost", "redis:u:secret@h", "redis://[::1"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        leasehold.connect(url)
    assert isinstance(refused.value, ValueError) and "secret" not in str(refused.value)


def test_an_unreachable_store_is_not_a_held_lock(own_server: Server) -> None:
    own_server.stop()
    url = own_server.url.replace("redis://", "redis://user:secret@")
    with pytest.raises(StoreUnavailable) as away:
        leasehold.connect(url)
    assert "secret" not in str(away.value) + repr(away.value)
    assert (away.value.kind, away.value.retryable) == ("unreachable", True)
    lazy = leasehold.connect(url, lazy=True)
    assert lazy.store is None and "secret" not in repr(lazy)
    with pytest.raises(StoreUnavailable):
        lazy.try_lock("a")


def test_a_store_that_becomes_unreachable(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = leasehold.connect(own_server.url, answer_within=0.3, patience=0.3)
    own_server.stop()
    with pytest.raises(StoreUnavailable) as away:
        client.lock("a", wait=0).acquire()
    assert away.value.name == "a"
    with client.lock("a", wait=0, on_unavailable="open") as guard:
        assert not guard.is_protected and "not protected" in repr(guard)
    assert client.statistics().unprotected_runs == 1
    until(lambda: "WITHOUT the lock" in caplog.text)
    assert {record.name for record in caplog.records} == {"leasehold"}
    client.close()


def test_a_lazy_client_can_precede_its_server(own_server: Server) -> None:
    own_server.stop()
    client = leasehold.connect(own_server.url, lazy=True, answer_within=0.3, patience=0.3)
    with pytest.raises(StoreUnavailable):
        client.lock("a", wait=0).acquire()
    with client.lock("a", wait=0, on_unavailable="open") as guard:
        assert not guard.is_protected and "not protected" in repr(guard)
    own_server.start()
    until(lambda: client.holder("a") is None, unless=StoreUnavailable)
    with client.lock("a", wait=5) as guard:
        assert guard.is_protected
    client.close()


def test_a_warning_is_logged_before_the_end(own_server: Server) -> None:
    out = run_python(
        """
import logging, os, signal, sys, leasehold
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
client = leasehold.connect(sys.argv[1], answer_within=0.2, patience=0.2)
os.kill(int(sys.argv[2]), signal.SIGKILL)
with client.lock("a", wait=0, on_unavailable="open"):
    pass
""",
        own_server.url,
        str(own_server.process.pid),
    )
    assert "WARNING leasehold going on WITHOUT the lock" in out and "name=a" in out


def test_a_lease_by_its_token(client: Client) -> None:
    token = leasehold.new_token()
    fence = client.acquire_token("a", token, ttl=20, owner="ruby")
    assert fence is not None and client.acquire_token("a", token, ttl=20) == fence
    assert client.try_lock("a") is None
    client.renew_token("a", token, 40)
    left = client.ttl_left("a")
    assert left is not None and left > 30
    assert not client.release_token("a", leasehold.new_token())
    assert client.release_token("a", token) and not client.release_token("a", token)
    with pytest.raises(LockLost):
        client.renew_token("a", token)
    with pytest.raises(InvalidArgument):
        client.release_token("a", "no token")
    with client.lock("a", on_lost="continue") as guard:
        assert client.release_token("a", guard.token), "also the lock of a guard"


def test_a_client_that_was_closed(url: str) -> None:
    client = leasehold.connect(url)
    guard = client.lock("a").acquire()
    began = time.monotonic()
    threading.Timer(0.2, guard.release).start()
    client.close()
    assert time.monotonic() - began < 4
    client.close()
    for refused in (lambda: client.try_lock("a"), lambda: client.info("a")):
        with pytest.raises(leasehold.ClientClosed):
            refused()
    with leasehold.connect(url) as other:
        assert not other.is_locked("a")


def test_a_forgotten_guard_releases_its_lock(client: Client) -> None:
    guard = client.lock("a").acquire()
    assert client.is_locked("a")
    del guard
    gc.collect()
    until(lambda: not client.is_locked("a"))


def test_a_process_that_ends_leaves_nothing_behind(client: Client, url: str) -> None:
    out = run_python(
        """
import sys, threading, time, leasehold
client = leasehold.connect(sys.argv[1])
held = threading.Event()

def hold():
    guard = client.lock("a", ttl=60).acquire()
    held.set()
    time.sleep(60)

threading.Thread(target=hold, daemon=True).start()
held.wait()
print(client.is_locked("a"))
""",
        url,
    )
    assert out == "True\n"
    assert not client.is_locked("a")


def test_daemon_threads_print_nothing_at_exit(client: Client, url: str) -> None:
    """Daemon threads that use locks when the process ends print no tracebacks."""
    code = """
import asyncio, sys, threading, leasehold
client = leasehold.connect(sys.argv[1])
await_in_a_loop = lambda: asyncio.run(client.lock("a").acquire_async())
for wait in [client.lock("a").acquire, await_in_a_loop] * 4:
    threading.Thread(target=wait, daemon=True).start()
while len(client.info("a").waiters) == 0:
    pass
"""
    with client.lock("a"), start_python(code, url) as process:
        out, err = process.communicate(timeout=SOON)
    assert (process.returncode, out, err) == (0, "", "")
    until(lambda: client.info("a").waiters == ())


WAITS = """
import sys, leasehold
client = leasehold.connect(sys.argv[1])
print("waiting", flush=True)
with client.lock("a"):
    print("inside")
"""


def test_ctrl_c_ends_the_waiting(client: Client, url: str) -> None:
    with client.lock("a"), start_python(WAITS, url) as process:
        until(lambda: len(client.info("a").waiters) == 1)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert "KeyboardInterrupt" in err, err
        assert process.returncode == -signal.SIGINT
        until(lambda: client.info("a").waiters == ())
    assert not client.is_locked("a")


def test_a_killed_process_loses_its_lock_with_its_lease(client: Client, url: str) -> None:
    code = WAITS.replace('lock("a")', 'lock("a", ttl=1)').replace("print(", "import time; print(")
    with start_python(code + "    time.sleep(60)\n", url) as process:
        until(lambda: client.is_locked("a"))
        process.kill()
        with client.lock("a", wait=3):
            pass


def test_errors_and_clients_can_be_pickled(client: Client) -> None:
    with client.lock("a"):
        with pytest.raises(LockNotAcquired) as refused:
            client.lock("a", wait=0).acquire()
        again = pickle.loads(pickle.dumps(client))
        assert again.is_locked("a")
        again.close()
    for error in (
        refused.value,
        LockLost("lost", "a", "gone"),
        StoreUnavailable("away", "redis://h"),
        leasehold.OtherPayload("other", "a"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error) and copy.name == error.name


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda client: client.lock("a", ttl=0).acquire(), "ttl: 0.0 is not between 0.05 and 86400 seconds"),
        (lambda client: client.lock("a", ttl="30"), "ttl: '30' is neither a number of seconds nor a timedelta"),
        (lambda client: client.lock("a", ttl=True), "ttl: True is neither"),
        (lambda client: client.lock("a", wait=-1).acquire(), "wait: -1 is not a number of seconds, 0 or more"),
        (lambda client: client.lock("a", wait=float("nan")).acquire(), "wait: nan is not a number of seconds"),
        (lambda client: client.lock("").acquire(), 'lock name "" is empty'),
        (lambda client: client.lock(b"a"), "name: b'a' is not text: decode it"),
        (lambda client: client.lock(None), "name: None is not text"),
        (lambda client: client.lock("a\udc80"), "is not text in UTF-8"),
        (lambda client: client.pool("p", 4), "members: 4 is not several numbers, such as range"),
        (lambda client: client.pool("p", [-1]), "members: -1 is not the number of a member"),
        (lambda client: client.pool("p", [0]).acquire(-1), "k: -1 is not a number of members, 1 or more"),
        (lambda client: client.pool("p", [0]).acquire("1"), "k: '1' is not a number of members, 1 or more"),
        (lambda client: client.pool("p", [0]).acquire(owner=b"me"), "owner: b'me' is not text: decode it"),
        (lambda client: client.once(7), "id: 7 is not text"),
        (lambda client: client.once("a", owner=7), "owner: 7 is not text"),
        (lambda client: leasehold.connect("http://h"), "write sqlite, sqlite:PATH, redis://HOST:PORT"),
        (lambda client: type(client)(b"memory:", *[None] * 7), "url: b'memory:' is not text: decode it"),
        (lambda client: client.lock("a").acquire().extend("1"), "ttl: '1' is neither"),
    ],
)
def test_errors_name_the_argument(asked: Any, message: str) -> None:
    with leasehold.connect("memory:") as client, pytest.raises(InvalidArgument, match=re.escape(message)):
        asked(client)


def test_locks_and_guards_cannot_be_pickled(client: Client) -> None:
    with client.lock("a") as guard:
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="belongs to the process that acquired the lock"):
                copied(guard)
        with pytest.raises(TypeError, match="pickle the client"):
            pickle.dumps(client.lock("a"))
        assert guard.is_valid and client.is_locked("a")


def test_a_closed_client_says_so_without_its_password() -> None:
    client = leasehold.connect("redis://user:hunter2@127.0.0.1:1", lazy=True)
    assert "hunter2" not in repr(client)
    client.close()
    with pytest.raises(leasehold.ClientClosed) as closed:
        client.is_locked("a")
    assert str(closed.value) == "the client of redis://127.0.0.1:1 was closed; connect again"
    client.close()


def test_the_default_store_is_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "default.db"
    monkeypatch.setenv("LEASEHOLD_STORE", f"sqlite:{path}")
    monkeypatch.setenv("LEASEHOLD_NAMESPACE", "billing")
    with leasehold.connect() as client, client.lock("a"):
        assert client.store == f"sqlite:{path}"
        with leasehold.connect(namespace="leasehold") as other:
            assert not other.is_locked("a")

"""Migration: workers with redis-py's lock and workers with leasehold's on one server."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.lock
from conftest import SOON, Background, Server, run_python, start_python, until

import leasehold
from leasehold import compat
from leasehold.compat._store import _url

#: A worker, which counts its runs and checks that it is alone.
WORKER = """
import sys, redis
from leasehold import compat
from redis.lock import Lock
port, kind, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
client = redis.Redis(port=port)
kind = {"theirs": Lock, "ours": compat.Lock}[kind]
for _ in range(rounds):
    with kind(client, "thing", timeout=30, sleep=0.001):
        assert client.incr("inside") == 1, "two holders at once"
        count = int(client.get("count") or 0)
        assert client.decr("inside") == 0, "two holders at once"
        client.set("count", count + 1)
"""


@pytest.fixture
def raw(server: Server) -> redis.Redis:
    server.redis.flushall()
    return server.redis


def test_a_mixed_fleet_excludes_each_other(server: Server, raw: redis.Redis) -> None:
    rounds = 50
    workers = [start_python(WORKER, str(server.port), kind, str(rounds)) for kind in ["theirs", "ours"] * 2]
    for worker in workers:
        _, err = worker.communicate(timeout=60)
        assert worker.returncode == 0, err
    assert raw.get("count") == str(4 * rounds).encode()
    assert not raw.exists("thing")


@pytest.mark.parametrize("timeout", [20, None])
def test_waiting_for_redis_pys_lock_does_not_change_it(raw: redis.Redis, timeout: float | None) -> None:
    theirs = redis.lock.Lock(raw, "thing", timeout=timeout)
    assert theirs.acquire()
    value, ttl = raw.get("thing"), raw.pttl("thing")
    ours = compat.Lock(raw, "thing", timeout=10)
    waiting = Background(lambda: ours.acquire(blocking_timeout=SOON))
    until(lambda: bool(raw.exists("lh1:queue:thing")))
    time.sleep(0.3)
    assert raw.get("thing") == value
    assert raw.pttl("thing") == -1 if timeout is None else ttl - 5000 < raw.pttl("thing") <= ttl
    theirs.release()
    began = time.monotonic()
    waiting.join()
    assert time.monotonic() - began < 1.0, "the head of the line looks ten times a second"


def test_redis_pys_lock_waits_for_ours(raw: redis.Redis) -> None:
    ours = compat.Lock(raw, "thing", timeout=20)
    ours.acquire()
    theirs = redis.lock.Lock(raw, "thing", timeout=20, sleep=0.01, thread_local=False)
    assert not theirs.acquire(blocking=False) and theirs.locked() and not theirs.owned()
    waiting = Background(lambda: theirs.acquire(blocking_timeout=SOON))
    ours.release()
    waiting.join()
    assert theirs.owned()
    assert not ours.acquire(blocking=False)
    theirs.release()


def test_by_the_clients_own_method(server: Server, raw: redis.Redis) -> None:
    with raw.lock("thing", timeout=10, lock_class=compat.Lock) as lock:
        assert isinstance(lock, compat.Lock) and raw.exists("thing")

    async def work() -> None:
        async with redis.asyncio.Redis(port=server.port) as client:
            kind: Any = compat.AsyncLock
            async with client.lock("thing", timeout=10, lock_class=kind) as lock:
                assert isinstance(lock, compat.AsyncLock) and await client.exists("thing")

    asyncio.run(work())
    assert not raw.exists("thing")


def test_eight_with_one_token_are_one_at_a_time(raw: redis.Redis) -> None:
    inside: list[int] = []

    def work() -> None:
        lock = compat.Lock(raw, "thing", timeout=20, sleep=0.001)
        for _ in range(5):
            assert lock.acquire(token="the same for all")
            inside.append(1)
            assert len(inside) == 1, "two holders at once"
            inside.pop()
            lock.release()

    workers = [Background(work) for _ in range(8)]
    for worker in workers:
        worker.join(60)
    assert not raw.keys("leasehold-compat:*"), "nothing is left behind"


def test_the_same_server_database_and_login(server: Server, raw: redis.Redis) -> None:
    raw.acl_setuser("p:@r/son", enabled=True, passwords=["+s%cr:t@/ "], keys=["*"], channels=["*"], commands=["+@all"])
    try:
        for client in [
            redis.Redis(port=server.port, db=3, username="p:@r/son", password="s%cr:t@/ "),
            redis.from_url(f"redis://p%3A%40r%2Fson:s%25cr%3At%40%2F%20@127.0.0.1:{server.port}/3"),
        ]:
            with compat.Lock(client, "thing", timeout=10):
                assert client.exists("thing") and not raw.exists("thing")
        wrong = redis.Redis(port=server.port, username="p:@r/son", password="hunter2")
        with pytest.raises(redis.ConnectionError) as refused:
            compat.Lock(wrong, "thing", timeout=10).acquire()
        assert "hunter2" not in str(refused.value)
    finally:
        raw.acl_deluser("p:@r/son")


def test_by_url_and_by_client(server: Server, raw: redis.Redis) -> None:
    with compat.Lock(server.url, "thing", timeout=10):
        assert raw.exists("thing")
    with leasehold.connect(server.url, namespace="") as client, compat.Lock(client, "thing", timeout=10):
        assert raw.exists("thing")
    with leasehold.connect(server.url) as client, pytest.raises(ValueError, match='namespace=""'):
        compat.Lock(client, "thing")


def test_tls_stays_tls(server: Server) -> None:
    client = redis.Redis(port=server.port, ssl=True, ssl_ca_certs="/etc/my ca.pem", password="hunter2", socket_timeout=1)
    assert _url(client) == f"rediss://:hunter2@localhost:{server.port}/0?ca=/etc/my%20ca.pem"
    # There is no fallback to plain text for a server without TLS.
    with pytest.raises(leasehold.LeaseholdError) as refused:
        compat.Lock(redis.from_url(f"rediss://:hunter2@127.0.0.1:{server.port}"), "thing").acquire(blocking=False)
    assert "hunter2" not in str(refused.value)


def test_unsupported_clients_are_refused_at_once(server: Server) -> None:
    class Cluster:
        nodes_manager = None

    sentinels: Any = redis.sentinel.Sentinel
    sentinel = sentinels([("127.0.0.1", 1)]).master_for("main")
    provider = redis.UsernamePasswordCredentialProvider("u", "hunter2")
    for what, message in [
        (redis.Redis(unix_socket_path="/run/redis.sock"), "Unix socket"),
        (redis.Redis(credential_provider=provider), "credential provider"),
        (sentinel, "Sentinel"),
        (redis.Redis(ssl=True, ssl_certfile="mine.pem"), "ssl_certfile"),
        (redis.Redis(ssl=True, ssl_cert_reqs="none"), "certificate"),
        (Cluster(), "Cluster"),
        (object(), "neither"),
    ]:
        with pytest.raises(leasehold.InvalidArgument, match=message):
            compat.Lock(what, "thing")
    names: list[str | bytes] = ["", "two\nlines", b"\xff", "lh1:fence"]
    for name in names:
        with pytest.raises(leasehold.InvalidArgument):
            compat.Lock(server.redis, name, timeout=10).acquire()
    for timeout in [0.01, 90_000]:
        with pytest.raises(leasehold.InvalidArgument):
            compat.Lock(server.redis, "thing", timeout=timeout).acquire()


def test_errors_are_redis_pys_and_ours_and_can_be_pickled(server: Server) -> None:
    assert issubclass(compat.LockError, (redis.exceptions.LockError, ValueError))
    assert issubclass(compat.LockError, leasehold.LeaseholdError)
    assert issubclass(compat.LockNotOwnedError, redis.exceptions.LockNotOwnedError)
    for error in [compat.LockError("said", "thing"), compat.LockNotOwnedError("said", "thing")]:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.lock_name) == (type(error), "said", "thing")
    with pytest.raises(compat.LockError, match="'thing'") as unlocked:
        compat.Lock(server.redis, "thing").release()
    assert unlocked.value.lock_name == "thing"


def test_a_store_that_is_gone(own_server: Server) -> None:
    client = own_server.redis
    lock = compat.Lock(leasehold.connect(own_server.url, namespace="", patience=0.2, answer_within=0.5), "thing", timeout=9)
    lock.acquire()
    own_server.process.kill()
    own_server.process.wait()
    for work in [lock.release, lambda: lock.extend(1), lock.owned, compat.Lock(client, "other", timeout=9).acquire]:
        with pytest.raises(redis.ConnectionError) as gone:
            work()
        assert isinstance(gone.value, redis.TimeoutError) and isinstance(gone.value, leasehold.StoreUnavailable)
        again = pickle.loads(pickle.dumps(gone.value))
        assert (again.kind, again.store, str(again)) == (gone.value.kind, gone.value.store, str(gone.value))


def test_without_a_timeout_it_is_renewed(server: Server, raw: redis.Redis) -> None:
    client = leasehold.connect(server.url, namespace="", ttl=0.3)
    lock = compat.Lock(client, "thing")
    lock.acquire()
    assert 0 < raw.pttl("thing") <= 300, "no lock is without an end"
    token = lock.local.token
    del lock
    time.sleep(1.0)
    again = compat.Lock(client, "thing")
    assert not again.acquire(blocking=False), "held, though the lock was dropped"
    again.local.token = token
    assert again.owned()
    again.release()
    assert not raw.exists("thing")


ENDING = """
import sys, time, redis
from leasehold import compat
lock = compat.Lock(redis.Redis(port=int(sys.argv[1])), "thing", timeout=eval(sys.argv[2]))
lock.acquire()
"""


def test_locks_at_the_end_of_a_process(server: Server, raw: redis.Redis) -> None:
    run_python(ENDING, str(server.port), "20")
    assert raw.pttl("thing") > 10_000, "a timeout counts on, as with redis-py"
    raw.delete("thing")
    run_python(ENDING, str(server.port), "None")
    assert not raw.exists("thing"), "a lock without a timeout is released at the end of the process"
    killed = start_python(ENDING + "print('held', flush=True); time.sleep(60)", str(server.port), "None")
    assert killed.stdout is not None and killed.stdout.readline() == "held\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert 0 < raw.pttl("thing") <= 30_000, "or ends with its lease"


def test_a_forked_child_does_not_free_what_its_parent_renews(raw: redis.Redis) -> None:
    lock = compat.Lock(raw, "thing")
    lock.acquire()
    pid = os.fork()
    if pid == 0:
        try:
            lock.release()
        except compat.LockNotOwnedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert lock.owned()
    lock.release()


def test_a_lease_is_never_shortened(raw: redis.Redis) -> None:
    lock = compat.Lock(raw, "thing", timeout=60)
    lock.acquire()
    assert lock.extend(5, replace_ttl=True)
    assert raw.pttl("thing") > 50_000
    lock.release()


def test_a_cancelled_compat_call_keeps_no_lock(server: Server, raw: redis.Redis) -> None:
    async def work() -> None:
        holder = compat.AsyncLock(raw, "thing", timeout=20)
        await holder.acquire()
        waiting = [asyncio.create_task(compat.AsyncLock(raw, "thing", timeout=20).acquire()) for _ in range(20)]
        await asyncio.sleep(0.2)
        for task in waiting:
            task.cancel()
        await holder.release()
        # Some tasks are cancelled while they acquire the lock.
        for delay in [i / 5000 for i in range(30)]:
            task = asyncio.create_task(compat.AsyncLock(raw, "thing", timeout=20).acquire(blocking_timeout=SOON))
            await asyncio.sleep(delay)
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                raw.delete("thing")

    asyncio.run(work())
    until(lambda: not raw.exists("thing"))
    until(lambda: not raw.exists("lh1:queue:thing"))


def test_a_task_cancelled_at_the_last_moment_keeps_no_lock(raw: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    class Guard:
        """Blocks the loop until the lease is detached, before the task knows it."""

        def __init__(self, guard: Any) -> None:
            self._guard = guard
            self.token = guard.token

        def detach(self) -> Any:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(self._cancel, task)
            return self._guard.detach()

        def _cancel(self, task: asyncio.Task[Any]) -> None:
            time.sleep(0.2)
            assert raw.exists("thing")
            task.cancel()

    acquire_guard = compat.AsyncLock._acquire_guard

    def acquire(self: Any, *args: Any, **named: Any) -> Any:
        return Guard((yield from acquire_guard(self, *args, **named)))

    monkeypatch.setattr(compat.AsyncLock, "_acquire_guard", acquire)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(compat.AsyncLock(raw, "thing", timeout=20).acquire())
    until(lambda: not raw.exists("thing"))


def test_works_without_redis_py(server: Server, raw: redis.Redis) -> None:
    code = """
import sys
sys.modules["redis"] = None
from leasehold import compat
lock = compat.Lock(sys.argv[1], "thing", timeout=10)
with lock:
    print(lock.owned(), issubclass(compat.LockNotOwnedError, ValueError))
try:
    lock.release()
except compat.LockError as error:
    print(error.lock_name)
"""
    assert run_python(code, server.url) == "True True\nthing\n"


def test_redis_cli_shows_the_holder(server: Server, raw: redis.Redis) -> None:
    with compat.Lock(raw, "thing", timeout=10), leasehold.connect(server.url, namespace="") as client:
        info: Any = client.holder("thing")
        assert not info.foreign and str(os.getpid()) in info.owner
    with redis.lock.Lock(raw, "thing", timeout=10), leasehold.connect(server.url, namespace="") as client:
        info = client.holder("thing")
        assert info.foreign

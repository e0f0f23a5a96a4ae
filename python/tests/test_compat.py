"""redis-py's lock and leasehold's on one server: both behave the same."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.lock
import redis.lock
from conftest import Background, Server, until

import leasehold
from leasehold import compat


class Waited:
    """An asyncio lock with the methods of a lock for threads, so that each scenario is written once."""

    def __init__(self, lock: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._lock = lock
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lock, name)
        if not callable(found):
            return found

        def waited(*args: Any, **named: Any) -> Any:
            answer = found(*args, **named)
            return self._loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer

        return waited

    def __enter__(self) -> Waited:
        self._loop.run_until_complete(self._lock.__aenter__())
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._loop.run_until_complete(self._lock.__aexit__(*error))


class World:
    """One kind of lock, on one server."""

    def __init__(self, make: Callable[..., Any], server: Server) -> None:
        self._make = make
        self.raw = server.redis
        self.raw.flushall()

    def lock(self, name: str = "thing", **named: Any) -> Any:
        return self._make(name, **named)

    def gone(self, name: str = "thing") -> None:
        until(lambda: not self.raw.exists(name))

    def ttl(self, name: str = "thing") -> float:
        """Seconds left, rounded so that two runs agree."""
        return round(self.raw.pttl(name) / 1000)


def outcome(work: Callable[[], Any]) -> Any:
    """The result of a call; for an exception, its class in redis-py."""
    try:
        return work()
    except redis.exceptions.LockNotOwnedError:
        return "LockNotOwnedError"
    except redis.exceptions.LockError:
        return "LockError"


def in_thread(work: Callable[[], Any]) -> Any:
    came: list[Any] = []
    Background(lambda: came.append(outcome(work))).join()
    return came[0]


# Each scenario returns what both locks must agree on.


def plain(world: World) -> Any:
    lock = world.lock(timeout=10)
    return [
        lock.locked(), lock.owned(), lock.acquire(), lock.locked(), lock.owned(), world.ttl(),
        lock.release(), lock.locked(), lock.owned(), world.raw.exists("thing"),
    ]  # fmt: skip


def without_timeout(world: World) -> Any:
    lock = world.lock()
    return [
        lock.acquire(), lock.owned(), outcome(lambda: lock.extend(10)), outcome(lock.reacquire), lock.owned(),
        lock.release(), world.raw.exists("thing"),
    ]  # fmt: skip


def release_unlocked(world: World) -> Any:
    lock = world.lock(timeout=10)
    never = outcome(lock.release)
    lock.acquire()
    lock.release()
    return [never, outcome(lock.release)]


def not_blocking(world: World) -> Any:
    first, second = world.lock(timeout=10), world.lock(timeout=10, blocking=False)
    taken = [first.acquire(), second.acquire(), second.owned(), second.locked(), second.acquire(blocking=False)]
    first.release()
    return [*taken, second.acquire(), second.owned(), first.owned()]


def again_by_the_same(world: World) -> Any:
    lock = world.lock(timeout=10)
    return [lock.acquire(), lock.acquire(blocking=False), lock.owned(), lock.release(), outcome(lock.release)]


def waiting_too_short(world: World) -> Any:
    world.lock(timeout=10).acquire()
    began = time.monotonic()
    waits = world.lock(timeout=10, blocking_timeout=0.3, sleep=0.05)
    answers = [waits.acquire(), waits.acquire(blocking_timeout=0.2), waits.acquire(blocking_timeout=0)]
    return [answers, 0.3 < time.monotonic() - began < 5, waits.owned(), waits.acquire(blocking_timeout=-1)]


def waiting_long_enough(world: World) -> Any:
    world.lock(timeout=0.3).acquire()
    waits = world.lock(timeout=10, sleep=0.05)
    return [waits.acquire(blocking_timeout=5), waits.owned(), world.ttl()]


def waiting_without_limit(world: World) -> Any:
    world.lock(timeout=0.3).acquire()
    waits = world.lock(timeout=10, sleep=0.05)
    return [waits.acquire(), waits.owned()]


def release_after_expiry(world: World) -> Any:
    lock = world.lock(timeout=0.1)
    lock.acquire()
    world.gone()
    return [lock.owned(), lock.locked(), outcome(lock.release), outcome(lock.release)]


def release_after_a_successor(world: World) -> Any:
    late, successor = world.lock(timeout=0.1), world.lock(timeout=10)
    late.acquire()
    world.gone()
    return [successor.acquire(), outcome(late.release), successor.owned(), late.locked(), successor.release()]


def extend(world: World) -> Any:
    lock = world.lock(timeout=10)
    lock.acquire()
    return [lock.extend(20), world.ttl(), lock.extend(60, replace_ttl=True), world.ttl(), lock.extend(0.5), lock.owned()]


def extend_twice_and_release(world: World) -> Any:
    lock = world.lock(timeout=5)
    lock.acquire()
    return [lock.extend(5), lock.extend(5), world.ttl(), lock.release(), world.raw.exists("thing")]


def extend_what_is_not_held(world: World) -> Any:
    never, lock = world.lock("other", timeout=10), world.lock(timeout=0.1)
    lock.acquire()
    world.gone()
    return [
        outcome(lambda: never.extend(5)), outcome(never.reacquire), outcome(lambda: lock.extend(5)),
        outcome(lambda: lock.extend(5, replace_ttl=True)), outcome(lock.reacquire), world.raw.exists("thing"),
    ]  # fmt: skip


def extend_a_successors(world: World) -> Any:
    late, successor = world.lock(timeout=0.1), world.lock(timeout=10)
    late.acquire()
    world.gone()
    successor.acquire()
    return [outcome(lambda: late.extend(100)), outcome(late.reacquire), world.ttl(), successor.owned()]


def reacquire(world: World) -> Any:
    lock = world.lock(timeout=10)
    lock.acquire()
    world.raw.pexpire("thing", 1000)
    return [world.ttl(), lock.reacquire(), world.ttl(), lock.owned()]


def with_statement(world: World) -> Any:
    with world.lock(timeout=10) as lock:
        inside = [lock.owned(), lock.locked()]
    return [inside, world.raw.exists("thing")]


def with_statement_that_fails(world: World) -> Any:
    try:
        with world.lock(timeout=10):
            raise KeyError("mine")
    except KeyError as error:
        return [str(error), world.raw.exists("thing")]


def with_statement_not_in_time(world: World) -> Any:
    world.lock(timeout=10).acquire()

    def enter(**named: Any) -> str:
        with world.lock(timeout=10, **named):
            return "inside"

    return [outcome(lambda: enter(blocking=False)), outcome(lambda: enter(blocking_timeout=0.1, sleep=0.05))]


def with_statement_lost(world: World) -> Any:
    def late(**named: Any) -> str:
        with world.lock(timeout=0.1, **named):
            world.gone()
        return "went on"

    return [outcome(late), outcome(lambda: late(raise_on_release_error=False))]


def with_statement_released_inside(world: World) -> Any:
    def released(**named: Any) -> str:
        with world.lock(timeout=10, **named) as lock:
            lock.release()
        return "went on"

    return [outcome(released), outcome(lambda: released(raise_on_release_error=False))]


def own_token(world: World) -> Any:
    lock, same = world.lock(timeout=10), world.lock(timeout=10, blocking=False, sleep=0.05)
    taken = [lock.acquire(token="mine"), lock.owned(), lock.local.token]
    excluded = [same.acquire(token="mine"), same.acquire(token="yours"), same.acquire(), same.owned()]
    waited = same.acquire(blocking=True, blocking_timeout=0.2, token="mine")
    return [taken, excluded, waited, lock.extend(10), world.ttl(), lock.release(), world.raw.exists("thing")]


def own_token_of_bytes(world: World) -> Any:
    lock = world.lock(timeout=10)
    return [lock.acquire(token=b"\xff\x00 bytes"), lock.owned(), lock.release(), lock.locked()]


def own_token_waits(world: World) -> Any:
    world.lock(timeout=0.2).acquire()
    lock = world.lock(timeout=10, sleep=0.05)
    return [lock.acquire(token="mine"), lock.owned(), lock.release()]


def own_token_without_timeout(world: World) -> Any:
    lock = world.lock()
    return [
        lock.acquire(token="mine"), lock.owned(), world.lock(blocking=False).acquire(token="mine"), lock.release(),
        world.raw.exists("thing"),
    ]  # fmt: skip


def handed_on_by_token(world: World) -> Any:
    """As Celery users do: the producer acquires the lock, and the worker releases it."""
    answers = []
    for token in ["a task's id", uuid.uuid4().hex]:
        producer, worker, stranger = world.lock(timeout=10), world.lock(timeout=10), world.lock(timeout=10)
        producer.acquire(token=token)
        worker.local.token = token.encode()
        stranger.local.token = b"another"
        answers.append([stranger.owned(), outcome(stranger.release), worker.owned(), worker.extend(5), worker.release()])
        answers.append([outcome(producer.release), world.raw.exists("thing")])
    return answers


def handed_on_without_a_choice(world: World) -> Any:
    producer, worker = world.lock(timeout=10), world.lock(timeout=10)
    producer.acquire()
    worker.local.token = producer.local.token
    return [worker.owned(), worker.release(), outcome(producer.release)]


def without_thread_local(world: World) -> Any:
    lock = world.lock(timeout=10, thread_local=False)
    lock.acquire()
    return [in_thread(lock.owned), in_thread(lock.release), lock.owned(), outcome(lock.release)]


def with_thread_local(world: World) -> Any:
    lock = world.lock(timeout=10, thread_local=True)
    lock.acquire()

    def other() -> Any:
        lock.local.token = None
        return [lock.locked(), lock.owned(), outcome(lock.release), lock.acquire(blocking=False)]

    return [in_thread(other), lock.owned(), lock.release()]


def dropped_and_not_released(world: World) -> Any:
    """As a rate limit: once in ten seconds for all callers."""
    return [world.lock(timeout=10, blocking=False).acquire() for _ in range(3)] + [world.ttl()]


def deleted_under_its_feet(world: World) -> Any:
    lock = world.lock(timeout=10)
    lock.acquire()
    world.raw.delete("thing")
    return [lock.owned(), lock.locked(), outcome(lambda: lock.extend(1)), outcome(lock.release)]


def overwritten_by_others(world: World) -> Any:
    lock = world.lock(timeout=10, blocking=False)
    world.raw.set("thing", "somebody", px=10_000)
    held = [lock.acquire(), lock.owned(), lock.locked()]
    world.raw.delete("thing")
    lock.acquire()
    world.raw.set("thing", "somebody", px=10_000)
    return [held, lock.owned(), outcome(lambda: lock.extend(60)), outcome(lock.release), world.raw.get("thing")]


def values_that_make_no_sense(world: World) -> Any:
    def fails(**named: Any) -> str:
        try:
            world.lock(**named).acquire()
        except (ValueError, TypeError, redis.RedisError):
            return "refused"
        return "taken"

    return [fails(timeout=-1), fails(timeout="soon"), fails(timeout=0.0001), world.raw.exists("thing")]


def a_token_that_makes_no_sense(world: World) -> Any:
    try:
        world.lock(timeout=10).acquire(token=object())
    except (ValueError, TypeError, redis.RedisError):
        return ["refused", world.raw.exists("thing")]


def names_of_bytes(world: World) -> Any:
    lock = world._make(b"thing", timeout=10)
    return [lock.acquire(), world.raw.exists("thing"), lock.name, lock.release()]


def numbers(world: World) -> Any:
    """Names like the ids of tasks and orders."""
    lock = world._make(42, timeout=10)
    taken = [lock.acquire(token=7), lock.local.token, lock.owned(), world.raw.exists("42"), lock.release()]
    return [*taken, world._make(4.5, timeout=10).acquire(), world.raw.exists("4.5")]


def names_that_make_no_sense(world: World) -> Any:
    answers = []
    for name in (None, object(), True):
        try:
            answers.append(world._make(name, timeout=10).acquire())
        except (ValueError, TypeError, redis.RedisError):
            answers.append("refused")
    return answers


SCENARIOS = [
    plain, without_timeout, release_unlocked, not_blocking, again_by_the_same, waiting_too_short,
    waiting_long_enough, waiting_without_limit, release_after_expiry, release_after_a_successor, extend,
    extend_twice_and_release, extend_what_is_not_held, extend_a_successors, reacquire, with_statement,
    with_statement_that_fails, with_statement_not_in_time, with_statement_lost, with_statement_released_inside,
    own_token, own_token_of_bytes, own_token_waits, own_token_without_timeout, handed_on_by_token,
    handed_on_without_a_choice, without_thread_local, with_thread_local, dropped_and_not_released,
    deleted_under_its_feet, overwritten_by_others, values_that_make_no_sense, a_token_that_makes_no_sense,
    names_of_bytes, numbers, names_that_make_no_sense,
]  # fmt: skip
#: A loop runs in one thread.
FOR_THREADS = [without_thread_local, with_thread_local]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_as_redis_py(scenario: Callable[[World], Any], server: Server) -> None:
    theirs = scenario(World(lambda name, **named: redis.lock.Lock(server.redis, name, **named), server))
    ours = scenario(World(lambda name, **named: compat.Lock(server.redis, name, **named), server))
    assert ours == theirs


@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS if s not in FOR_THREADS], ids=lambda scenario: str(scenario.__name__)
)
def test_as_redis_py_in_asyncio(
    scenario: Callable[[World], Any], server: Server, loop: asyncio.AbstractEventLoop
) -> None:
    client = redis.asyncio.Redis(port=server.port, protocol=2)

    def make(kind: Any) -> Callable[..., Waited]:
        return lambda name, **named: Waited(kind(client, name, **named), loop)

    theirs = scenario(World(make(redis.asyncio.lock.Lock), server))
    ours = scenario(World(make(compat.AsyncLock), server))
    assert ours == theirs
    loop.run_until_complete(client.aclose())


def test_the_same_arguments_and_methods() -> None:
    def signature(of: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(of).parameters.values()
        return [(parameter.name, parameter.default) for parameter in parameters]

    for theirs, ours in [(redis.lock.Lock, compat.Lock), (redis.asyncio.lock.Lock, compat.AsyncLock)]:
        assert signature(ours) == signature(theirs)
        for method in ["acquire", "release", "extend", "reacquire", "owned", "locked"]:
            assert signature(getattr(ours, method)) == signature(getattr(theirs, method)), method


def test_a_warning_where_a_loss_is_not_raised(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.redis.flushall()
    with caplog.at_level(logging.WARNING, "leasehold.compat"):
        with compat.Lock(server.redis, "thing", timeout=10, raise_on_release_error=False):
            server.redis.delete("thing")
    assert "'thing'" in caplog.text


def test_a_thread_that_did_not_acquire_cannot_release(server: Server) -> None:
    server.redis.flushall()
    lock = compat.Lock(server.redis, "thing", timeout=10)
    lock.acquire()
    assert in_thread(lock.owned) is False
    assert in_thread(lock.release) == "LockError"
    assert threading.current_thread() is threading.main_thread() and lock.owned()
    lock.release()


def test_a_client_with_its_own_connection_class_is_refused() -> None:
    """It does not connect to the host in its settings, so locks on that host would not exclude its users."""

    class Tunnel(redis.connection.Connection):
        pass

    class TunnelAsync(redis.asyncio.connection.Connection):
        pass

    class Pool(redis.ConnectionPool):
        def make_connection(self) -> Any:
            raise AssertionError("nobody connects")

    class Subclass(redis.Redis):
        """It adds commands, and connects like every client."""

    clients: list[Any] = [
        redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Tunnel, host="db.internal")),
        redis.asyncio.Redis(connection_pool=redis.asyncio.ConnectionPool(connection_class=TunnelAsync)),
        redis.Redis(connection_pool=Pool(host="db.internal")),
    ]
    for client in clients:
        with pytest.raises(leasehold.InvalidArgument, match="its own connection class .*: pass a URL"):
            compat.Lock(client, "order:42")
    pool: Any = redis.BlockingConnectionPool(host="127.0.0.1", port=1)  # type: ignore[no-untyped-call]
    usual: list[Any] = [Subclass(port=1), redis.asyncio.Redis(port=1), redis.Redis(connection_pool=pool)]
    for client in usual:
        compat.Lock(client, "order:42")

"""Locks for tasks: one run of a task at a time, whoever starts it.

    >>> from leasehold.task_lock import configure, task_lock_context
    >>> configure("memory:")  # or sqlite:, redis://…; left out, LEASEHOLD_STORE
    >>> with task_lock_context("task_lock:6") as acquired:
    ...     acquired
    True

Keys are ``task_lock:{id}``, in Redis as they are: ``redis-cli TTL task_lock:6``. Times are seconds.

**How long.** `timeout` is how long the lock outlives a worker that was killed: 300 s for tasks of less than a
minute, 1,800 s for those of up to ten, 3,600 s (the default) for longer ones. A task that may take longer than
that says ``renew=True``: its lock is renewed for as long as its process lives, and then a short `timeout` is
enough.

**Whose.** A lock belongs to the process that acquired it. ``release_task_lock(key)`` and ``extend_task_lock(key)``
find it by its key: first what the calling thread, task or greenlet has acquired itself, so that one that is late
never frees its successor's; then what another thread of this process has. Whatever is not ours is not touched:
``False``, a warning, and ``ownership_violations`` in the statistics. A process that ends gives its locks back; a
forked child has no part in those of its parent.

**When the store is down**, tasks go on without a lock, because a store that fails must not stop all work: with a
warning and an entry in the journal (``leasehold journal``). ``configure(on_unavailable="closed")`` makes it
:class:`~leasehold.StoreUnavailable` instead.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypedDict, cast

from . import _native
from ._blocks import Block, Blocks, leaves, nobody
from ._client import Client, connect
from ._config import Path, load
from ._errors import InvalidArgument, LeaseholdError, LockLost, LockNotAcquired, NotEvicted, StoreUnavailable
from ._info import LockInfo
from ._lock import Guard, OnUnavailable
from ._times import Seconds, flag, lease, one_of, optional_text, seconds, text
from ._waiting import wait as _wait
from ._waiting import wait_async

__all__ = [
    "DEFAULT_TIMEOUT",
    "KEY_PREFIX",
    "STALE_AFTER",
    "RunResult",
    "TaskLockAcquireError",
    "TaskLockInfo",
    "acquire_task_lock",
    "check_stale_locks",
    "configure",
    "extend_task_lock",
    "force_release_task_lock",
    "get_lock_holder",
    "get_lock_info",
    "get_lock_ttl",
    "is_task_locked",
    "list_all_task_locks",
    "release_task_lock",
    "run_once",
    "run_once_async",
    "task_lock_context",
]

log = logging.getLogger("leasehold.task_lock")

#: How long a lock outlives a worker that was killed, unless said: an hour.
DEFAULT_TIMEOUT = 3600
#: What the keys of tasks begin with.
KEY_PREFIX = "task_lock:"
#: A lock that has longer to run than this is looked at by a person: two hours.
STALE_AFTER = 7200


class TaskLockAcquireError(LockNotAcquired):
    """The task is running already; :attr:`holder` says where."""


class TaskLockInfo(TypedDict):
    """A task's lock."""

    key: str
    locked: bool
    #: Who holds it, for people; what another kind of client wrote.
    holder: str | None
    #: Seconds left, as ``redis-cli TTL`` says it: -2 when it is free, -1 when it has no end.
    ttl: int
    #: Names the holder without its secret.
    holder_id: str | None
    #: When it was acquired, in milliseconds since 1970; ``None`` when that is not known.
    since_ms: int | None


class RunResult(TypedDict, total=False):
    """What came of :func:`run_once`: ``{"status": "success", "result": …}``, or ``{"status": "skipped", "reason":
    "already_processed"}``."""

    status: Literal["success", "skipped"]
    reason: Literal["already_processed"]
    result: Any


class _Settings:
    def __init__(self, client: Client, on_unavailable: OnUnavailable) -> None:
        self.client = client
        self.on_unavailable: OnUnavailable = on_unavailable


_settings: _Settings | None = None
#: A lock's guard, as long as there is one: that of a :class:`task_lock_context` is its block's alone.
_Known: TypeAlias = Callable[[], Guard | None]
#: What this process holds.
_held: dict[str, _Known] = {}
#: What the running thread, task or greenlet has acquired itself.
_mine: ContextVar[dict[str, _Known]] = ContextVar("leasehold_task_locks")


def configure(
    url: str | None = None,
    *,
    client: Client | None = None,
    namespace: str | None = None,
    owner: str | None = None,
    on_unavailable: OnUnavailable | None = None,
    config: Path | None = None,
) -> None:
    """Says where the locks of this process's tasks are; to be called before the first of them.

    :param url: as for :func:`leasehold.connect`. Left out: ``LEASEHOLD_STORE``, else the default SQLite file, which
        is for the workers of one machine. ``REDIS_URL`` is not read: workers on different stores do not exclude
        each other, so the store is always said.
    :param client: a client to use instead of a URL.
    :param on_unavailable: ``"open"`` (unless it is configured otherwise): tasks go on without a lock when the store is
        down; ``"closed"``: they get :class:`~leasehold.StoreUnavailable`.
    :param config: as for :func:`leasehold.connect`.

    >>> configure("memory:", on_unavailable="closed")
    """
    global _settings
    if on_unavailable is not None:
        one_of("on_unavailable", on_unavailable, "closed", "open")
    if client is not None and not isinstance(client, Client):
        raise InvalidArgument(f"client: {client!r} is not a leasehold.Client; a URL is named by url")
    policy = on_unavailable or cast("OnUnavailable", load(config).said("on_unavailable") or "open")
    if client is None:
        client = connect(url, namespace=namespace, owner=owner, on_unavailable=policy, config=config, lazy=True)
    _settings = _Settings(client, policy)


def acquire_task_lock(
    key: str,
    timeout: Seconds = DEFAULT_TIMEOUT,
    *,
    wait: Seconds = 0,
    renew: bool = False,
    owner: str | None = None,
) -> bool:
    """Takes a task's lock. ``False``: the task is running already, here or elsewhere.

    :param timeout: the lock ends after so many seconds, unless it is released or extended before.
    :param wait: how long to wait for it; 0, not at all.
    :param renew: renew it for as long as this process lives. It ends `timeout` after a process that was killed.
    :param owner: what people read who ask for the holder; the program's name unless said.
    :raises StoreUnavailable: when the store is down and that is not to be passed over; see :func:`configure`.

    >>> configure("memory:")
    >>> acquire_task_lock("task_lock:1", 300)
    True
    >>> acquire_task_lock("task_lock:1", 300)
    False
    >>> release_task_lock("task_lock:1")
    True
    """
    try:
        guard = Guard(_wait(_acquire(key, timeout, wait, renew, owner)), "continue")
    except LockNotAcquired:
        return False
    _remember(guard, lambda: guard)
    return True


def release_task_lock(key: str) -> bool:
    """Gives a task's lock back. ``False``: it is not ours (any more), and nothing was touched.

    When the store is down it goes on in the background, with a warning; it never raises for that, so that it hides
    no error of the task.
    """
    guard = _forget(text("key", key))
    try:
        if guard is None:
            # A token that nobody has: the store compares, counts it, and touches nothing.
            ours = bool(_wait(_native_client().release_token(key, _native.new_token())))
        else:
            ours = guard.release()
    except LockLost:
        ours = False
    except InvalidArgument:
        raise
    except LeaseholdError as problem:
        return _released_later(key, problem)
    return _released(key, ours)


def extend_task_lock(key: str, timeout: Seconds = DEFAULT_TIMEOUT) -> bool:
    """Lets a task's lock end `timeout` seconds from now. ``False``: it is not ours (any more). It is never shortened.

    :raises StoreUnavailable: when the store is down and that is not to be passed over; otherwise the answer is
        whether the lock is still ours by what is known.

    >>> configure("memory:")
    >>> acquire_task_lock("task_lock:2", 300), extend_task_lock("task_lock:2", 600), get_lock_ttl("task_lock:2")
    (True, True, 600)
    """
    guard, ttl = _find(text("key", key)), lease("timeout", timeout)
    if guard is None:
        log.warning("%s is not extended: this process does not hold it", key)
        return False
    try:
        guard.extend(ttl)
    except LockLost as lost:
        log.warning("%s is not extended: %s", key, lost)
        return False
    except StoreUnavailable as problem:
        if _configured().on_unavailable == "closed":
            raise
        log.warning("%s is not extended: %s", key, problem)
        return guard.is_valid
    return True


def is_task_locked(key: str) -> bool:
    """Whether anybody holds a task's lock. When the store is down and that is to be passed over: ``False``, with a
    warning."""
    try:
        return _client().is_locked(text("key", key))
    except StoreUnavailable as problem:
        if _configured().on_unavailable == "closed":
            raise
        log.warning("whether %s is held is not known, and it is taken for free: %s", key, problem)
        return False


def get_lock_holder(key: str) -> str | None:
    """Who holds a task's lock: what it calls itself, its machine and process; ``None`` when it is free."""
    return get_lock_info(key)["holder"]


def get_lock_ttl(key: str) -> int:
    """Seconds left of a task's lock, as ``redis-cli TTL`` says it: -2 when it is free, -1 when it has no end."""
    return get_lock_info(key)["ttl"]


def get_lock_info(key: str) -> TaskLockInfo:
    """All of it.

    >>> configure("memory:")
    >>> get_lock_info("task_lock:3")["locked"]
    False
    """
    holder = _client().holder(text("key", key))
    return _info(LockInfo(key, held=False) if holder is None else holder)


def force_release_task_lock(key: str) -> bool:
    """Takes a task's lock from whoever holds it at this moment, and from nobody who comes after: for operators who
    know that nobody works under it any more. ``False``: it is free, or has changed hands meanwhile.

    >>> configure("memory:")
    >>> acquire_task_lock("task_lock:4"), force_release_task_lock("task_lock:4"), is_task_locked("task_lock:4")
    (True, True, False)
    """
    client = _client()
    holder = client.holder(text("key", key))
    if holder is None:
        return False
    try:
        evicted = client.evict(key, holder, force=True, reason="force_release_task_lock")
    except NotEvicted as changed:
        log.warning("%s is not released by force: %s", key, changed)
        return False
    if evicted.released:
        log.warning("%s was released by force; it was held by %s", key, holder.owner)
    return evicted.released


def list_all_task_locks() -> list[TaskLockInfo]:
    """All locks whose keys begin with ``task_lock:`` and that are held, by key."""
    return [_info(lock) for lock in _client().locks(KEY_PREFIX) if lock.held]


def check_stale_locks(over: Seconds = STALE_AFTER) -> list[TaskLockInfo]:
    """The locks of tasks that have more than `over` seconds to run, or no end, each with a warning: to be called
    now and then.

    >>> configure("memory:")
    >>> acquire_task_lock("task_lock:5", timeout=10_000)
    True
    >>> [lock["key"] for lock in check_stale_locks()]
    ['task_lock:5']
    """
    most = seconds("over", over)
    stale = [lock for lock in list_all_task_locks() if lock["ttl"] > most or lock["ttl"] == -1]
    for lock in stale:
        ends = "has no end" if lock["ttl"] == -1 else f"ends only in {lock['ttl']} s"
        log.warning("%s may be stuck: it is held by %s and %s", lock["key"], lock["holder"], ends)
    return stale


class task_lock_context:  # noqa: N801: used like a function
    """A task's lock around a block, by ``with`` or ``async with``; given back at its end, whatever happens.

    The block gets ``True``. When the task is running already it is :class:`TaskLockAcquireError`; with
    ``raise_on_fail=False`` the block runs, and gets ``False``. The rest is as for :func:`acquire_task_lock`.

    >>> configure("memory:")
    >>> with task_lock_context("task_lock:7", timeout=300):
    ...     with task_lock_context("task_lock:7", raise_on_fail=False) as acquired:
    ...         acquired
    False
    """

    def __init__(
        self,
        key: str,
        timeout: Seconds = DEFAULT_TIMEOUT,
        raise_on_fail: bool = True,
        *,
        wait: Seconds = 0,
        renew: bool = False,
        owner: str | None = None,
    ) -> None:
        self._key = key
        self._raise_on_fail = flag("raise_on_fail", raise_on_fail)
        self._terms = (timeout, wait, renew, owner)
        self._blocks: Blocks[Guard | None] = Blocks()

    def __enter__(self) -> bool:
        block = self._blocks.begin()
        try:
            guard = Guard(_wait(_acquire(self._key, *self._terms)), "continue")
        except LockNotAcquired as held:
            return self._not_entered(block, held)
        return self._entered(block, guard)

    @leaves
    def __exit__(
        self,
        block: Block[Guard | None] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard = self._leave(block)
        if guard is not None:
            try:
                _released(self._key, guard.release())
            except LeaseholdError as problem:
                _released_later(self._key, problem)

    async def __aenter__(self) -> bool:
        block = self._blocks.begin()
        try:
            guard = Guard(await wait_async(_acquire(self._key, *self._terms)), "continue")
        except LockNotAcquired as held:
            return self._not_entered(block, held)
        return self._entered(block, guard)

    @leaves
    async def __aexit__(
        self,
        block: Block[Guard | None] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard = self._leave(block)
        if guard is not None:
            try:
                _released(self._key, await guard.release_async())
            except LeaseholdError as problem:
                _released_later(self._key, problem)

    def _entered(self, block: Block[Guard | None] | None, guard: Guard) -> bool:
        try:
            self._blocks.enter(block, guard)
            _remember(guard, weakref.ref(guard))
            return True
        except BaseException:
            self._blocks.forget(guard)
            _forget(self._key, guard)
            raise

    def _not_entered(self, block: Block[Guard | None] | None, held: LockNotAcquired) -> bool:
        if self._raise_on_fail:
            raise _running(held) from None
        self._blocks.enter(block, None)
        return False

    def _leave(self, block: Block[Guard | None] | None) -> Guard | None:
        guard = self._blocks.leave(block)
        if guard is None or not guard._native.is_held:
            # Not entered, or released inside, or this is a forked child.
            return None
        _forget(self._key, guard)
        return guard


def run_once(
    id: str,
    work: Callable[[], Any],
    *,
    keep: Seconds = 24 * 3600,
    wait: Seconds = 0,
    owner: str | None = None,
) -> RunResult:
    """Does work once for an id, across all workers: whoever comes later finds that it was processed, and does not do
    it again.

    What `work` returns must be JSON. What it raises is the caller's, nothing counts as processed, and the next one
    tries again; so does the next one after a worker that was killed.

    :param keep: for how long it is known that the id was processed: a day unless said.
    :param wait: how long to wait for a worker that is at it.
    :raises TaskLockAcquireError: when another worker is at it, and the time to wait is over.

    >>> configure("memory:")
    >>> run_once("record:7", lambda: 42)
    {'status': 'success', 'result': 42}
    >>> run_once("record:7", lambda: 42)
    {'status': 'skipped', 'reason': 'already_processed'}
    """
    run = _Run(id)

    def working() -> Any:
        run.began = True
        return run.did(work())

    try:
        outcome = _client().once(id, keep=keep, wait=wait, owner=owner).run(working)
    except (LockNotAcquired, StoreUnavailable) as problem:
        if not run.goes_on_without(problem):
            return run.unstored(problem)
    else:
        return run.result(outcome.fresh, outcome.value)
    # The lock that cannot be had says so in the log and in the journal.
    with task_lock_context(f"once:{id}", wait=wait, owner=owner):
        return run.result(True, work())


async def run_once_async(
    id: str,
    work: Callable[[], Awaitable[Any]],
    *,
    keep: Seconds = 24 * 3600,
    wait: Seconds = 0,
    owner: str | None = None,
) -> RunResult:
    """As :func:`run_once`, for a function that is awaited."""
    run = _Run(id)

    async def working() -> Any:
        run.began = True
        return run.did(await work())

    try:
        outcome = await _client().once(id, keep=keep, wait=wait, owner=owner).run_async(working)
    except (LockNotAcquired, StoreUnavailable) as problem:
        if not run.goes_on_without(problem):
            return run.unstored(problem)
    else:
        return run.result(outcome.fresh, outcome.value)
    async with task_lock_context(f"once:{id}", wait=wait, owner=owner):
        return run.result(True, await work())


class _Run:
    """How far work came that is done once: what the work itself raises is passed on as it is."""

    def __init__(self, id: str) -> None:
        self._id = id
        self.began = False
        self._done: list[Any] = []

    def did(self, value: Any) -> Any:
        self._done.append(value)
        return value

    def goes_on_without(self, problem: LeaseholdError) -> bool:
        """Whether the work is to be done though nobody can say whether it was done before."""
        is_down = isinstance(problem, StoreUnavailable) and not self.began
        return is_down and _configured().on_unavailable == "open"

    def unstored(self, problem: LeaseholdError) -> RunResult:
        if self._done and isinstance(problem, StoreUnavailable):
            log.warning("%r was processed, which could not be stored; it may be again: %s", self._id, problem)
            return self.result(True, self._done[0])
        if isinstance(problem, LockNotAcquired) and not self.began:
            raise _running(problem) from None
        raise problem

    @staticmethod
    def result(fresh: bool, value: Any) -> RunResult:
        if fresh:
            return {"status": "success", "result": value}
        return {"status": "skipped", "reason": "already_processed"}


def _configured() -> _Settings:
    if _settings is None:
        if os.environ.get("REDIS_URL") and load().said("store") is None:
            log.warning(
                "REDIS_URL is set, and is not read: the locks of tasks are in the default SQLite file of this machine. "
                "Set LEASEHOLD_STORE, or call leasehold.task_lock.configure(url)"
            )
        configure()
        assert _settings is not None
    return _settings


def _client() -> Client:
    return _configured().client


def _native_client() -> _native.Client:
    return _client()._native


def _acquire(key: str, timeout: Seconds, wait: Seconds, renew: bool, owner: str | None) -> _native.Call:
    settings = _configured()
    return settings.client._native.acquire(
        text("key", key),
        lease("timeout", timeout),
        seconds("wait", wait),
        flag("renew", renew),
        None,
        True,
        optional_text("owner", owner),
        settings.on_unavailable,
    )


def _remember(guard: Guard, known: _Known) -> None:
    if not guard.is_protected:
        log.warning("%s goes on WITHOUT its lock: the store is down", guard.name)
    for key, other in list(_held.items()):
        old = other()
        if old is None or old.lost:
            _held.pop(key, None)
    _held[guard.name] = known
    mine = {key: other for key, other in _mine.get({}).items() if (old := other()) is not None and old._native.is_held}
    _mine.set({**mine, guard.name: known})


def _find(key: str) -> Guard | None:
    """What the caller has acquired itself; else what its process has."""
    return _mine.get({}).get(key, nobody)() or _held.get(key, nobody)()


def _forget(key: str, guard: Guard | None = None) -> Guard | None:
    guard = guard or _find(key)
    if guard is None:
        return None
    if _held.get(key, nobody)() is guard:
        _held.pop(key, None)
    if _mine.get({}).get(key, nobody)() is guard:
        _mine.set({known: held for known, held in _mine.get().items() if known != key})
    return guard


def _released(key: str, ours: bool) -> bool:
    if not ours:
        log.warning("%s was to be released and is not ours (any more): nothing was touched", key)
    return ours


def _released_later(key: str, problem: LeaseholdError) -> bool:
    log.warning("%s is released in the background, or ends by its timeout: %s", key, problem)
    return False


def _running(held: LockNotAcquired) -> TaskLockAcquireError:
    by = "" if held.holder is None else f" by {held.holder.owner}"
    message = f"{held.name} is held{by}: the task is running already"
    return TaskLockAcquireError(message, held.name, held.holder, held.waited, held.store)


def _info(lock: LockInfo) -> TaskLockInfo:
    if not lock.held:
        ttl = -2
    elif lock.ttl_left_ms is None:
        ttl = -1
    else:
        # As Redis rounds it.
        ttl = (lock.ttl_left_ms + 500) // 1000
    return {
        "key": lock.name,
        "locked": lock.held,
        "holder": lock.owner,
        "ttl": ttl,
        "holder_id": lock.holder_id,
        "since_ms": lock.since_ms,
    }

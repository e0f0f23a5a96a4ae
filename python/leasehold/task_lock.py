"""Task locks: one run of a task at a time, across all workers.

    >>> from leasehold.task_lock import configure, task_lock_context
    >>> configure("memory:")  # or sqlite:, redis://…; default: LEASEHOLD_STORE
    >>> with task_lock_context("task_lock:6") as acquired:
    ...     acquired
    True

Keys are ``task_lock:{id}``, and the same in Redis: ``redis-cli TTL task_lock:6``. Times are in seconds.

**Timeout.** `timeout` is how long the lock outlives a worker that was killed: 300 s for tasks of less than a minute,
1,800 s for tasks of up to ten minutes, 3,600 s (the default) for longer ones. For a task that may take longer, set
``renew=True``: its lock is renewed as long as its process lives, and a short `timeout` is enough.

**Ownership.** A lock belongs to the process that acquired it. ``release_task_lock(key)`` and ``extend_task_lock(key)`` find it
by its key: first among the locks that the calling thread, task or greenlet acquired, so that a late task never releases its
successor's lock; then among those of other threads of this process. A call for a lock that the process does not hold changes
nothing: it returns ``False``, logs a warning and counts in ``ownership_violations`` of the statistics. A process that ends
releases its locks. A forked child does not share its parent's locks.

**Outages.** When the store cannot be reached, tasks run without a lock, with a warning and an entry in the journal
(``leasehold journal``), so that a failed store does not stop all work. With ``configure(on_unavailable="closed")`` they get
:class:`~leasehold.StoreUnavailable` instead.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypedDict

from . import _native
from ._arguments import Seconds, flag, lease, seconds, terms, text
from ._blocks import Block, Blocks, dead, per_block
from ._errors import InvalidArgument, LeaseholdError, LockLost, LockNotAcquired, StoreUnavailable
from ._lock import Guard
from ._task_info import (
    KEY_PREFIX,
    STALE_AFTER,
    TaskLockInfo,
    check_stale_locks,
    force_release_task_lock,
    get_lock_holder,
    get_lock_info,
    get_lock_ttl,
    is_task_locked,
    list_all_task_locks,
)
from ._task_settings import configure, task_settings
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

#: The default timeout, in seconds: an hour.
DEFAULT_TIMEOUT = 3600
#: What the keys of tasks begin with.
KEY_PREFIX = "task_lock:"
#: A lock that has longer to run than this is looked at by a person: two hours.
STALE_AFTER = 7200


class TaskLockAcquireError(LockNotAcquired):
    """The task is running already; :attr:`holder` is its lock's holder."""


class RunResult(TypedDict, total=False):
    """The result of :func:`run_once`: ``{"status": "success", "result": …}``, or ``{"status": "skipped", "reason":
    "already_processed"}``."""

    status: Literal["success", "skipped"]
    reason: Literal["already_processed"]
    result: Any


#: Returns a lock's guard, if it still exists: the guard of a :class:`task_lock_context` belongs to its block.
_GuardRef: TypeAlias = Callable[[], Guard | None]
#: The locks of this process, by key.
_held: dict[str, _GuardRef] = {}
#: The locks that the running thread, task or greenlet acquired, by key.
_mine: ContextVar[dict[str, _GuardRef]] = ContextVar("leasehold_task_locks")


def acquire_task_lock(
    key: str,
    timeout: Seconds = DEFAULT_TIMEOUT,
    *,
    wait: Seconds = 0,
    renew: bool = False,
    owner: str | None = None,
) -> bool:
    """Acquires a task's lock. Returns ``False`` if the task is running already, here or elsewhere.

    :param timeout: the lock ends after this many seconds, unless it is released or extended before.
    :param wait: how long to wait; 0 does not wait.
    :param renew: renew the lock as long as this process lives. It ends `timeout` seconds after the process was killed.
    :param owner: the name that people see for the holder. Default: the program's name.
    :raises StoreUnavailable: the store cannot be reached, and the policy is ``"closed"``; see :func:`configure`.

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
    """Releases a task's lock. Returns ``False`` if this process does not hold it (any more); then nothing is changed.

    If the store cannot be reached, it logs a warning, returns ``False``, and the release goes on in the background. It does not
    raise, so that it hides no error of the task.
    """
    guard = _forget(text("key", key))
    try:
        if guard is None:
            # A new token holds no lock: the store compares it, counts an ownership violation, and changes nothing.
            was_held = task_settings().client.release_token(key, _native.new_token())
        else:
            was_held = guard.release()
    except LockLost:
        was_held = False
    except InvalidArgument:
        raise
    except LeaseholdError as problem:
        return _released_later(key, problem)
    return _released(key, was_held)


def extend_task_lock(key: str, timeout: Seconds = DEFAULT_TIMEOUT) -> bool:
    """Extends a task's lock to `timeout` seconds from now; a lock is never shortened. Returns ``False`` if this process does not
    hold it (any more).

    :raises StoreUnavailable: the store cannot be reached, and the policy is ``"closed"``. With ``"open"`` the result is
        whether the lease is still valid.

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
        if task_settings().on_unavailable == "closed":
            raise
        log.warning("%s is not extended: %s", key, problem)
        return guard.is_valid
    return True


class task_lock_context:  # noqa: N801: used like a function
    """Holds a task's lock during a ``with`` or ``async with``.

    ``as`` gets ``True``. If the task is running already, :class:`TaskLockAcquireError` is raised; with ``raise_on_fail=False``
    the block runs and gets ``False``. The other arguments are those of :func:`acquire_task_lock`.

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
        self._arguments = (timeout, wait, renew, owner)
        self._blocks: Blocks[Guard | None] = Blocks()

    def __enter__(self) -> bool:
        block = self._blocks.begin()
        try:
            guard = Guard(_wait(_acquire(self._key, *self._arguments)), "continue")
        except LockNotAcquired as held:
            return self._not_entered(block, held)
        return self._entered(block, guard)

    @per_block
    def __exit__(
        self,
        block: Block[Guard | None] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard = self._end(block)
        if guard is not None:
            try:
                _released(self._key, guard.release())
            except LeaseholdError as problem:
                _released_later(self._key, problem)

    async def __aenter__(self) -> bool:
        block = self._blocks.begin()
        try:
            guard = Guard(await wait_async(_acquire(self._key, *self._arguments)), "continue")
        except LockNotAcquired as held:
            return self._not_entered(block, held)
        return self._entered(block, guard)

    @per_block
    async def __aexit__(
        self,
        block: Block[Guard | None] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard = self._end(block)
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

    def _end(self, block: Block[Guard | None] | None) -> Guard | None:
        guard = self._blocks.leave(block)
        if guard is None or not guard._native.is_held:
            # The lock was not acquired, or was released in the block, or this is a forked child.
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
    """Does work once for an id, across all workers. Later calls with the id skip it.

    `work` must return JSON. If it raises, the caller gets the exception, the id does not count as processed, and the next call
    does the work; the same is true after a worker was killed.

    :param keep: how long the id counts as processed. Default: a day.
    :param wait: how long to wait while another worker processes the id.
    :raises TaskLockAcquireError: another worker is still processing the id, and the time to wait is over.

    >>> configure("memory:")
    >>> run_once("record:7", lambda: 42)
    {'status': 'success', 'result': 42}
    >>> run_once("record:7", lambda: 42)
    {'status': 'skipped', 'reason': 'already_processed'}
    """
    run = _Run(id)

    def working() -> Any:
        run.started = True
        return run.finished(work())

    try:
        outcome = task_settings().client.once(id, keep=keep, wait=wait, owner=owner).run(working)
    except (LockNotAcquired, StoreUnavailable) as problem:
        if not run.goes_on_without(problem):
            return run.unstored(problem)
    else:
        return run.result(outcome.fresh, outcome.value)
    # Without the store, the work runs under a lock that is not protected, which logs a warning and writes to the journal.
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
    """:func:`run_once` for an async function."""
    run = _Run(id)

    async def working() -> Any:
        run.started = True
        return run.finished(await work())

    try:
        outcome = await task_settings().client.once(id, keep=keep, wait=wait, owner=owner).run_async(working)
    except (LockNotAcquired, StoreUnavailable) as problem:
        if not run.goes_on_without(problem):
            return run.unstored(problem)
    else:
        return run.result(outcome.fresh, outcome.value)
    async with task_lock_context(f"once:{id}", wait=wait, owner=owner):
        return run.result(True, await work())


class _Run:
    """The progress of one :func:`run_once`."""

    def __init__(self, id: str) -> None:
        self._id = id
        self.started = False
        self._done: list[Any] = []

    def finished(self, value: Any) -> Any:
        self._done.append(value)
        return value

    def goes_on_without(self, problem: LeaseholdError) -> bool:
        """Whether the work runs although it is not known if it was done before: the store is unreachable and the policy is
        ``"open"``."""
        is_down = isinstance(problem, StoreUnavailable) and not self.started
        return is_down and task_settings().on_unavailable == "open"

    def unstored(self, problem: LeaseholdError) -> RunResult:
        """The result after an error of the store or the lock, or the exception to raise."""
        if self._done and isinstance(problem, StoreUnavailable):
            log.warning("%r was processed, but this could not be stored; it may be processed again: %s", self._id, problem)
            return self.result(True, self._done[0])
        if isinstance(problem, LockNotAcquired) and not self.started:
            raise _running(problem) from None
        raise problem

    @staticmethod
    def result(fresh: bool, value: Any) -> RunResult:
        if fresh:
            return {"status": "success", "result": value}
        return {"status": "skipped", "reason": "already_processed"}


def _acquire(key: str, timeout: Seconds, wait: Seconds, renew: bool, owner: str | None) -> _native.Call:
    client, policy = task_settings()
    asked = terms(
        ttl=lease("timeout", timeout), wait=seconds("wait", wait), renew=renew, owner=owner, on_unavailable=policy
    )
    return client._native.acquire(text("key", key), asked)


def _remember(guard: Guard, known: _GuardRef) -> None:
    if not guard.is_protected:
        log.warning("%s runs WITHOUT its lock: the store cannot be reached", guard.name)
    for key, other in list(_held.items()):
        old = other()
        if old is None or old.lost:
            _held.pop(key, None)
    _held[guard.name] = known
    mine = {key: other for key, other in _mine.get({}).items() if (old := other()) is not None and old._native.is_held}
    _mine.set({**mine, guard.name: known})


def _find(key: str) -> Guard | None:
    """The lock that the caller acquired, else the one that this process holds."""
    return _mine.get({}).get(key, dead)() or _held.get(key, dead)()


def _forget(key: str, guard: Guard | None = None) -> Guard | None:
    guard = guard or _find(key)
    if guard is None:
        return None
    if _held.get(key, dead)() is guard:
        _held.pop(key, None)
    if _mine.get({}).get(key, dead)() is guard:
        _mine.set({known: held for known, held in _mine.get().items() if known != key})
    return guard


def _released(key: str, was_held: bool) -> bool:
    if not was_held:
        log.warning("%s was not released: this process does not hold it (any more), and nothing was touched", key)
    return was_held


def _released_later(key: str, problem: LeaseholdError) -> bool:
    log.warning("%s is released in the background, or ends by its timeout: %s", key, problem)
    return False


def _running(held: LockNotAcquired) -> TaskLockAcquireError:
    by = "" if held.holder is None else f" by {held.holder.owner}"
    message = f"{held.name} is held{by}: the task is running already"
    return TaskLockAcquireError(message, held.name, held.holder, held.waited, held.store)

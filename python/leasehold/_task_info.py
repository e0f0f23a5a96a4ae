"""Task locks of all workers: reading them, and releasing one by force."""

from __future__ import annotations

import logging
from typing import TypedDict

from ._arguments import Seconds, seconds, text
from ._errors import NotEvicted, StoreUnavailable
from ._info import LockInfo
from ._task_settings import configure, task_settings

__all__ = [
    "KEY_PREFIX",
    "STALE_AFTER",
    "TaskLockInfo",
    "check_stale_locks",
    "configure",
    "force_release_task_lock",
    "get_lock_holder",
    "get_lock_info",
    "get_lock_ttl",
    "is_task_locked",
    "list_all_task_locks",
]

log = logging.getLogger("leasehold.task_lock")

#: The prefix of task keys.
KEY_PREFIX = "task_lock:"
#: :func:`check_stale_locks` reports a lock that has more than this many seconds left: two hours.
STALE_AFTER = 7200


class TaskLockInfo(TypedDict):
    """A task's lock."""

    key: str
    locked: bool
    #: The holder: task, host and process id; for another kind of client the value that it wrote.
    holder: str | None
    #: Seconds left, as in ``redis-cli TTL``: -2 if the lock is free, -1 if it has no end.
    ttl: int
    #: The public id of the holder.
    holder_id: str | None
    #: When the lock was acquired, in milliseconds since 1970; ``None`` if unknown.
    since_ms: int | None


def is_task_locked(key: str) -> bool:
    """Whether a task's lock is held. If the store cannot be reached and the policy is ``"open"``, it logs a warning and returns
    ``False``."""
    client = task_settings().client
    try:
        return client.is_locked(text("key", key))
    except StoreUnavailable as problem:
        if task_settings().on_unavailable == "closed":
            raise
        log.warning("it is not known whether %s is held; it is assumed to be free: %s", key, problem)
        return False


def get_lock_holder(key: str) -> str | None:
    """The holder of a task's lock: task, host and process id; ``None`` if the lock is free."""
    return get_lock_info(key)["holder"]


def get_lock_ttl(key: str) -> int:
    """Seconds left of a task's lock, as in ``redis-cli TTL``: -2 if it is free, -1 if it has no end."""
    return get_lock_info(key)["ttl"]


def get_lock_info(key: str) -> TaskLockInfo:
    """The holder, the time left and the start of a task's lock.

    >>> configure("memory:")
    >>> get_lock_info("task_lock:3")["locked"]
    False
    """
    holder = task_settings().client.holder(text("key", key))
    return _info(LockInfo(key, held=False) if holder is None else holder)


def force_release_task_lock(key: str) -> bool:
    """Releases a task's lock whatever its holder does: for operators who know that the task does not run any more. Only the
    holder at the time of the call is evicted. Returns ``False`` if the lock is free or has another holder by now.

    >>> from leasehold.task_lock import acquire_task_lock
    >>> configure("memory:")
    >>> acquire_task_lock("task_lock:4"), force_release_task_lock("task_lock:4"), is_task_locked("task_lock:4")
    (True, True, False)
    """
    client = task_settings().client
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
    """All held locks whose keys begin with ``task_lock:``, sorted by key."""
    return [_info(lock) for lock in task_settings().client.locks(KEY_PREFIX) if lock.held]


def check_stale_locks(over: Seconds = STALE_AFTER) -> list[TaskLockInfo]:
    """The task locks that have more than `over` seconds left, or no end. A warning is logged for each. Call it from time to time.

    >>> from leasehold.task_lock import acquire_task_lock
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


def _info(lock: LockInfo) -> TaskLockInfo:
    if not lock.held:
        ttl = -2
    elif lock.ttl_left_ms is None:
        ttl = -1
    else:
        # Redis rounds the same way.
        ttl = (lock.ttl_left_ms + 500) // 1000
    return {
        "key": lock.name,
        "locked": lock.held,
        "holder": lock.owner,
        "ttl": ttl,
        "holder_id": lock.holder_id,
        "since_ms": lock.since_ms,
    }

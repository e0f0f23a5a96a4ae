"""GPU locks by task name, for services that acquire in one place and release in another."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ._client import Client
from ._errors import LeaseholdError, LockNotAcquired
from ._gpu_current import Gpu, held
from ._gpu_settings import client_of, settings
from ._info import LockInfo
from ._reentry import Entry, Guest, caller
from ._lock import Guard
from ._arguments import Seconds, seconds

log = logging.getLogger("leasehold")

#: A lock that is held for longer than this is reported. A holder that has not renewed for longer than this counts as dead.
LONG_MS = SILENT_MS = 300_000
#: The health is degraded if emergency releases are more than this share of all locks.
EMERGENCY_RATE = 0.05


@dataclass(frozen=True, eq=False)
class _Lease:
    guard: Guard
    client: Client
    #: The manager that acquired it.
    manager: Callable[[], SmartGpuLockManager | None]
    #: The thread, asyncio task or greenlet that acquired it.
    caller: Callable[[], object | None]
    #: Set if the lock was entered again; then the block that acquired it releases it.
    reentered: Entry[Gpu] | None = None
    guest: Guest | None = None

    def release(self) -> bool:
        if self.reentered is None:
            return self.guard.release()
        if self.guest is not None:
            self.reentered.leave(self.guest)
        return self.guard.is_valid


class SmartGpuLockManager:
    """Acquires and releases GPU locks by task name.

    Every manager of the same client in this process finds a lease by its task name, so another thread, or a Celery task's
    ``on_failure``, can release it. It also releases a lock that an older client wrote as the plain value
    ``locked_by_<task_name>``, compared in the same step, so that old and new services can share a GPU during a migration.

    >>> from leasehold import gpu
    >>> gpu.configure("memory:")
    >>> manager = gpu.SmartGpuLockManager()
    >>> manager.acquire_lock("transcribe-7", "gpu_lock:0")
    True
    >>> manager.release_lock("another-task", "gpu_lock:0", "normal")
    False
    >>> manager.release_lock("transcribe-7", "gpu_lock:0", "normal")
    True
    >>> manager.get_exception_statistics()["ownership_violations"]
    1
    """

    def __init__(self, client: Client | Callable[[], Client] | None = None) -> None:
        """:param client: the client to use. Default: the one configured for GPUs."""
        self._client = client

    @property
    def client(self) -> Client:
        """The client that the manager uses."""
        if isinstance(self._client, Client):
            return self._client
        return client_of() if self._client is None else self._client()

    def acquire_lock(self, task_name: str, lock_key: str, max_wait_time: Seconds | None = None) -> bool:
        """Waits for the lock, for at most `max_wait_time` (default: the configured 300 s), and acquires it for the task. Returns
        ``False`` if it is still held then. The lease is renewed until it is released. A caller that runs on that GPU already
        (:func:`leasehold.gpu.gpu_lock`) enters the lock again.

        :raises StoreUnavailable: the store did not answer, which does not mean that the lock is held.
        """
        client = self.client
        around = held.find(client, (lock_key,))
        if around is not None:
            guest = around.enter()
            self._keep(task_name, client, around.guard, around, guest)
            return True
        now = settings()
        lock = client.lock(
            lock_key,
            ttl=now.ttl,
            wait=now.max_wait_time if max_wait_time is None else seconds("max_wait_time", max_wait_time),
            renew=now.heartbeat.enabled,
            owner=task_name,
        )
        try:
            guard = lock.acquire()
        except LockNotAcquired as busy:
            log.warning("%s did not get a GPU: %s", task_name, busy)
            return False
        self._keep(task_name, client, guard)
        return True

    def release_lock(self, task_name: str, lock_key: str, reason: str = "normal") -> bool:
        """Releases the lock if the task holds it, in one step. Returns ``False`` if the task does not hold it, and then nothing
        is changed; and if the store did not answer: then the release goes on in the background, by fallbacks, and is written to
        the journal if these fail."""
        lease = self._take(task_name, lock_key)
        try:
            if lease is not None:
                released = lease.release()
            else:
                released = self.client.release_value(lock_key, _plain_value(task_name), reason=reason)
        except LeaseholdError as problem:
            log.error("%s of %s was not released (%s): %s", lock_key, task_name, reason, problem, exc_info=True)
            return False
        if released:
            log.debug("%s of %s was released (%s)", lock_key, task_name, reason)
        else:
            log.warning("%s is not held by %s: it was not released (%s)", lock_key, task_name, reason)
        return released

    def owns_here(self, task_name: str, lock_key: str) -> bool:
        """Whether the task holds the lock and this thread, asyncio task or greenlet acquired it, or an older client wrote it as
        a plain value. (Another run of the same task may hold the lock, too.)"""
        if any(
            lease.caller() is caller() and lease.guard.is_valid and lease.reentered is None
            for lease in self._found(task_name, lock_key)
        ):
            return True
        holder = self.client.holder(lock_key)
        return holder is not None and holder.foreign and holder.holder_id == _plain_holder(task_name)

    def get_statistics(self) -> dict[str, Any]:
        """The counters of this process, and in ``active_locks`` the locks that it holds with their tasks."""
        counted = asdict(self.client.statistics())
        with _process.lock:
            known = list(_process.leases)
        counted["active_locks"] = {
            key: task for task, key in known if any(lease.guard.is_valid for lease in self._found(task, key))
        }
        return counted

    def get_exception_statistics(self) -> dict[str, Any]:
        """The four counters of failed releases, and two of them divided by all locks."""
        counted = self.get_statistics()
        names = ("normal_release_failures", "emergency_releases", "release_script_errors", "ownership_violations")
        bad = {name: counted[name] for name in names}
        total = max(counted["total_locks"], 1)
        return {
            **bad,
            "exception_rate": bad["normal_release_failures"] / total,
            "emergency_release_rate": bad["emergency_releases"] / total,
        }

    def health_check(self) -> dict[str, Any]:
        """The health of the GPU locks, with the fields of ``GET /api/v1/monitoring/gpu-lock/health``. ``status`` is
        ``healthy``; ``degraded`` if there are zombies or emergency releases are more than 5 % of all locks; ``unhealthy`` if the
        store does not answer."""
        now = time.time()
        stats = self.get_exception_statistics()
        try:
            locks = self.client.locks("gpu_lock:")
        except LeaseholdError as problem:
            log.warning("the GPU locks are unhealthy: %s", problem)
            return _health("unhealthy", False, [], [], stats, now)

        def is_zombie(lock: LockInfo) -> bool:
            silent = lock.last_seen_ms is not None and now * 1000 - lock.last_seen_ms > SILENT_MS
            return lock.connected is False or silent

        zombies = [lock for lock in locks if is_zombie(lock)]
        long_held = [lock for lock in locks if (lock.held_ms or 0) > LONG_MS]
        degraded = bool(zombies) or stats["emergency_release_rate"] > EMERGENCY_RATE
        return _health("degraded" if degraded else "healthy", True, zombies, long_held, stats, now)

    def _keep(
        self, task_name: str, client: Client, guard: Guard, reentered: Entry[Gpu] | None = None, guest: Guest | None = None
    ) -> None:
        lease = _Lease(guard, client, weakref.ref(self), weakref.ref(caller()), reentered, guest)
        with _process.lock:
            _process.leases.setdefault((task_name, guard.name), []).append(lease)

    def _found(self, task_name: str, lock_key: str) -> list[_Lease]:
        """The leases of a task with this client. Leases that this manager acquired are found even after another client was
        configured."""
        client = self.client
        with _process.lock:
            leases = _process.leases.get((task_name, lock_key), ())
            return [lease for lease in leases if lease.client is client or lease.manager() is self]

    def _take(self, task_name: str, lock_key: str) -> _Lease | None:
        """Removes and returns the lease of a task. A task that was delivered twice can have two leases under one name, one of
        them lost: the caller gets the lease that it acquired itself, else the oldest."""
        found = self._found(task_name, lock_key)
        mine = [lease for lease in found if lease.caller() is caller()]
        for lease in [*reversed(mine), *found]:
            with _process.lock:
                leases = _process.leases.get((task_name, lock_key), [])
                if not any(lease is known for known in leases):
                    # Another thread took it first.
                    continue
                leases[:] = [known for known in leases if known is not lease]
                if not leases:
                    del _process.leases[(task_name, lock_key)]
                return lease
        return None


class _Process:
    """The leases of this process, by task and lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.leases: dict[tuple[str, str], list[_Lease]] = {}


_process = _Process()

# Leases of the parent belong to the parent.
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]


def _plain_value(task_name: str) -> str:
    """The value that an older client writes."""
    return f"locked_by_{task_name}"


def _plain_holder(task_name: str) -> str:
    """The holder id of that value: the first digits of its SHA-1."""
    return hashlib.sha1(_plain_value(task_name).encode(), usedforsecurity=False).hexdigest()[:12]


def _health(
    status: str,
    connected: bool,
    zombies: list[LockInfo],
    long_held: list[LockInfo],
    stats: dict[str, Any],
    now: float,
) -> dict[str, Any]:
    return {
        "status": status,
        "redis_connected": connected,
        "zombie_locks": [lock.as_dict() for lock in zombies],
        "long_held_locks": [lock.as_dict() for lock in long_held],
        "exception_stats": stats,
        "timestamp": now,
    }

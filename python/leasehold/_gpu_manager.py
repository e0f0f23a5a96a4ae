"""GPU locks by the names of tasks, for services that acquire in one place and release in another."""

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
from ._gpu_held import Gpu, held
from ._gpu_settings import client_of, settings
from ._info import LockInfo
from ._inside import Entry, Guest, here
from ._lock import Guard
from ._times import Seconds, seconds

log = logging.getLogger("leasehold")

#: Held for longer than this is worth a look; without a sign of life for so long, a holder counts as dead.
LONG_MS = SILENT_MS = 300_000
#: More emergency releases than this, of all locks, are no accident.
EMERGENCY_RATE = 0.05


@dataclass(frozen=True, eq=False)
class _Lease:
    guard: Guard
    client: Client
    #: The manager that acquired it.
    by: Callable[[], SmartGpuLockManager | None]
    #: The thread, asyncio task or greenlet that acquired it.
    where: Callable[[], object | None]
    #: The lock that was entered again: the first to enter releases it.
    inner: Entry[Gpu] | None = None
    guest: Guest | None = None

    def release(self) -> bool:
        if self.inner is None:
            return self.guard.release()
        if self.guest is not None:
            self.inner.leave(self.guest)
        return self.guard.is_valid


class SmartGpuLockManager:
    """Acquires and releases GPU locks by task name.

    A lease belongs to the process and the client: it is found by its task name, by every manager of that client. Another
    thread may release it, or a Celery task's ``on_failure``. A holder that an older client wrote as the plain value ``locked_by_<task_name>`` is released as
    well, compared in the same step, so that old and new services can share a GPU during a migration.

    >>> from leasehold import gpu
    >>> gpu.configure("memory:")
    >>> manager = gpu.SmartGpuLockManager()
    >>> manager.acquire_lock("transcribe-7", "gpu_lock:0")
    True
    >>> manager.release_lock("somebody-else", "gpu_lock:0", "normal")
    False
    >>> manager.release_lock("transcribe-7", "gpu_lock:0", "normal")
    True
    >>> manager.get_exception_statistics()["ownership_violations"]
    1
    """

    def __init__(self, client: Client | Callable[[], Client] | None = None) -> None:
        """:param client: another one than was configured for GPUs."""
        self._client = client

    @property
    def client(self) -> Client:
        """The client it uses."""
        if isinstance(self._client, Client):
            return self._client
        return client_of() if self._client is None else self._client()

    def acquire_lock(self, task_name: str, lock_key: str, max_wait_time: Seconds | None = None) -> bool:
        """Waits for the lock, at most `max_wait_time` (as configured, 300 s, unless said), and takes it for the
        task. ``False``: somebody else still holds it. It is renewed until it is released. Whoever runs on that GPU
        already (:func:`leasehold.gpu.gpu_lock`) enters once more.

        :raises StoreUnavailable: when the store did not answer, which is not the same as "held".
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
        """Gives the lock back, compared with its holder in one step. ``False``: the task does not hold it, and
        nothing was touched; or there was no answer, and the release goes on in the background (by other means,
        and in the end in the journal)."""
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
        """Whether the task holds the lock by what this very thread, asyncio task or greenlet acquired, or by an
        older client's plain value. (Another run of the same task may hold it by other means.)"""
        if any(
            lease.where() is here() and lease.guard.is_valid and lease.inner is None
            for lease in self._found(task_name, lock_key)
        ):
            return True
        holder = self.client.holder(lock_key)
        return holder is not None and holder.foreign and holder.holder_id == _plain_holder(task_name)

    def get_statistics(self) -> dict[str, Any]:
        """What this process counted, and what it holds: ``active_locks``, lock → task."""
        counted = asdict(self.client.statistics())
        with _process.lock:
            known = list(_process.leases)
        counted["active_locks"] = {
            key: task for task, key in known if any(lease.guard.is_valid for lease in self._found(task, key))
        }
        return counted

    def get_exception_statistics(self) -> dict[str, Any]:
        """The four counters of bad ends, and their rates over all locks."""
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
        """How the GPU locks are, with the fields of ``GET /api/v1/monitoring/gpu-lock/health``. ``status`` is
        ``healthy``; ``degraded``: there are zombies, or more than 5 % of all releases were emergencies;
        ``unhealthy``: the store does not answer."""
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
        self, task_name: str, client: Client, guard: Guard, inner: Entry[Gpu] | None = None, guest: Guest | None = None
    ) -> None:
        lease = _Lease(guard, client, weakref.ref(self), weakref.ref(here()), inner, guest)
        with _process.lock:
            _process.leases.setdefault((task_name, guard.name), []).append(lease)

    def _found(self, task_name: str, lock_key: str) -> list[_Lease]:
        """The leases of a task, of this client. What this very manager acquired is found also after another client was
        configured."""
        client = self.client
        with _process.lock:
            leases = _process.leases.get((task_name, lock_key), ())
            return [lease for lease in leases if lease.client is client or lease.by() is self]

    def _take(self, task_name: str, lock_key: str) -> _Lease | None:
        """A task that was delivered twice can have a lease that is over and one that lives, under one name: each
        run gets its own. A run that is not known by where it acquired is the older one."""
        found = self._found(task_name, lock_key)
        mine = [lease for lease in found if lease.where() is here()]
        for lease in [*reversed(mine), *found]:
            with _process.lock:
                leases = _process.leases.get((task_name, lock_key), [])
                if not any(lease is known for known in leases):
                    # Another thread was first.
                    continue
                leases[:] = [known for known in leases if known is not lease]
                if not leases:
                    del _process.leases[(task_name, lock_key)]
                return lease
        return None


class _Process:
    """What this process holds, by task and lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.leases: dict[tuple[str, str], list[_Lease]] = {}


_process = _Process()

# What the parent holds is the parent's.
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]


def _plain_value(task_name: str) -> str:
    """What an older client writes."""
    return f"locked_by_{task_name}"


def _plain_holder(task_name: str) -> str:
    """The holder id of such a value: the beginning of its SHA-1."""
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

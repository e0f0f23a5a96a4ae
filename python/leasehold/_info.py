"""Views of locks: the fields of ``leasehold --json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Waiter:
    """A waiter in the queue of a lock."""

    owner: str
    #: Its queue position: a lower ticket is served earlier.
    ticket: int
    waiting_ms: int


@dataclass(frozen=True)
class LockInfo:
    """The holder and the waiters of a lock. Unknown fields are ``None``; timestamps are milliseconds since 1970.

    >>> import leasehold
    >>> client = leasehold.connect("memory:")
    >>> client.info("order:42").held
    False
    """

    name: str
    #: Whether the lock is held.
    held: bool
    #: The holder: task, host and process id.
    owner: str | None = None
    #: The public id of the holder.
    holder_id: str | None = None
    fence: int | None = None
    since_ms: int | None = None
    held_ms: int | None = None
    #: The requested ttl of the lease.
    ttl_ms: int | None = None
    #: What is left of the lease, unless it is renewed.
    ttl_left_ms: int | None = None
    #: When the lease was acquired or last renewed.
    last_seen_ms: int | None = None
    #: Whether the holder's process can be reached.
    connected: bool | None = None
    #: Whether the holder was revoked: it was notified and cannot renew the lease.
    revoked: bool = False
    #: Whether another kind of client holds the lock.
    foreign: bool = False
    #: The waiters, in queue order.
    waiters: tuple[Waiter, ...] = ()

    @property
    def ttl_left(self) -> float | None:
        """What is left of the lease, in seconds."""
        return None if self.ttl_left_ms is None else self.ttl_left_ms / 1000

    def as_dict(self) -> dict[str, Any]:
        """The lock as a dictionary, with the JSON fields of the command and the API."""
        return asdict(self)

    @classmethod
    def from_dict(cls, view: dict[str, Any]) -> LockInfo:
        """Reads one lock from the JSON of ``leasehold ls --json`` or of the API."""
        fields = dict(view)
        fields["waiters"] = tuple(Waiter(**waiter) for waiter in view.get("waiters", ()))
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> LockInfo:
        """Reads one lock from JSON text."""
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True)
class Evicted:
    """The result of an eviction."""

    name: str
    #: ``"revoked"``, ``"forced"`` or ``"free"``.
    outcome: str
    #: Whether the eviction freed the lock.
    released: bool
    holder_id: str | None = None
    owner: str | None = None
    fence: int | None = None
    since_ms: int | None = None
    last_seen_ms: int | None = None


@dataclass(frozen=True)
class Statistics:
    """Counters of this process for one client."""

    #: Locks acquired.
    total_locks: int = 0
    #: Requests that ended without the lock because it was held.
    not_acquired: int = 0
    #: Releases whose first try failed.
    normal_release_failures: int = 0
    #: Releases done by a fallback.
    emergency_releases: int = 0
    #: Releases that failed because the server could not run the script.
    release_script_errors: int = 0
    #: Releases by a caller that did not hold the lock any more.
    ownership_violations: int = 0
    #: Releases that failed in every way and were written to the journal.
    journalled_releases: int = 0
    #: Leases lost.
    lost_leases: int = 0
    #: Runs without protection because the store was unreachable.
    unprotected_runs: int = 0
    #: Evictions of other holders.
    evictions: int = 0

    @property
    def exception_rate(self) -> float:
        """Releases whose first try failed, divided by all locks."""
        return self.normal_release_failures / max(self.total_locks, 1)

    @property
    def emergency_release_rate(self) -> float:
        """Emergency releases, divided by all locks."""
        return self.emergency_releases / max(self.total_locks, 1)

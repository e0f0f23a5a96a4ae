"""A lock as people and programs see it: the fields of ``leasehold --json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Waiter:
    """Somebody who waits for a lock."""

    owner: str
    #: Its place: lower is earlier.
    ticket: int
    waiting_ms: int


@dataclass(frozen=True)
class LockInfo:
    """Who holds a lock and who waits for it. What is not known is ``None``; moments are milliseconds since 1970.

    >>> import leasehold
    >>> client = leasehold.connect("memory:")
    >>> client.info("order:42").held
    False
    """

    name: str
    #: Whether anybody holds it.
    held: bool
    #: Who, for people.
    owner: str | None = None
    #: Names the holder without its secret.
    holder_id: str | None = None
    fence: int | None = None
    since_ms: int | None = None
    held_ms: int | None = None
    #: The lease that was asked for.
    ttl_ms: int | None = None
    #: What is left of it if nobody renews it.
    ttl_left_ms: int | None = None
    #: The last sign of life: when the lease was taken or last renewed.
    last_seen_ms: int | None = None
    #: Whether the holder's process can be reached.
    connected: bool | None = None
    #: Told to give the lock up.
    revoked: bool = False
    #: Held by another kind of client.
    foreign: bool = False
    #: Who waits, in order.
    waiters: tuple[Waiter, ...] = ()

    @property
    def ttl_left(self) -> float | None:
        """What is left of the lease, in seconds."""
        return None if self.ttl_left_ms is None else self.ttl_left_ms / 1000

    def as_dict(self) -> dict[str, Any]:
        """As the command and the API say it in JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, view: dict[str, Any]) -> LockInfo:
        """Reads one lock of ``leasehold ls --json``, or of the API."""
        fields = dict(view)
        fields["waiters"] = tuple(Waiter(**waiter) for waiter in view.get("waiters", ()))
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> LockInfo:
        """The same from text."""
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True)
class Evicted:
    """What an eviction did, and to whom."""

    name: str
    #: ``"revoked"``, ``"forced"`` or ``"free"``.
    outcome: str
    #: Whether the lock was freed by this.
    released: bool
    holder_id: str | None = None
    owner: str | None = None
    fence: int | None = None
    since_ms: int | None = None
    last_seen_ms: int | None = None


@dataclass(frozen=True)
class Statistics:
    """What this process counted with one client."""

    #: Locks acquired.
    total_locks: int = 0
    #: Requests that ended without the lock because somebody else had it.
    not_acquired: int = 0
    #: Releases whose first try failed.
    normal_release_failures: int = 0
    #: Releases done by other means.
    emergency_releases: int = 0
    #: Releases that failed because the server could not run the script.
    release_script_errors: int = 0
    #: Releases of a lock that was not ours any more.
    ownership_violations: int = 0
    #: Releases that failed by all means and stand in the journal.
    journalled_releases: int = 0
    #: Leases lost.
    lost_leases: int = 0
    #: Work that ran without protection because the store was unreachable.
    unprotected_runs: int = 0
    #: Locks taken away from others.
    evictions: int = 0

    @property
    def exception_rate(self) -> float:
        """Failed releases over all locks."""
        return self.normal_release_failures / max(self.total_locks, 1)

    @property
    def emergency_release_rate(self) -> float:
        """Emergency releases over all locks."""
        return self.emergency_releases / max(self.total_locks, 1)

"""Exceptions: one class per decision that the caller can take.

All of them can be pickled, so they pass through process pools and task queues.
"""

from __future__ import annotations

from typing import Any

from ._info import LockInfo


class LeaseholdError(Exception):
    """Base class of all errors. The first argument is the message."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class LockNotAcquired(LeaseholdError):
    """Another holder has the lock, and the time to wait for it is over (or was zero)."""

    def __init__(
        self,
        message: str,
        name: str,
        holder: LockInfo | None = None,
        waited: float = 0.0,
        store: str = "",
        members: tuple[tuple[int, LockInfo], ...] = (),
    ) -> None:
        super().__init__(message, name, holder, waited, store, members)
        #: The lock, or the pool.
        self.name = name
        #: The holder, if it is known.
        self.holder = holder
        #: How long the request waited, in seconds.
        self.waited = waited
        #: The URL of the store, without its password.
        self.store = store
        #: Of a pool: the number and the lock of each member.
        self.members = members


class LockLost(LeaseholdError):
    """The lease was lost during the work: another holder may have the lock by now."""

    def __init__(self, message: str, name: str, reason: str) -> None:
        super().__init__(message, name, reason)
        #: The lock.
        self.name = name
        #: ``"expired"``, ``"gone"``, ``"revoked"``, ``"max_hold"``, ``"shutdown"``, ``"displaced"``; ``"forked"`` if a child
        #: process uses a guard of its parent, ``"released"`` if a guard is used after its release.
        self.reason = reason


class StoreUnavailable(LeaseholdError):
    """The store did not answer, or answered with an error. This does not mean that the lock is held."""

    def __init__(
        self, message: str, store: str, name: str | None = None, kind: str = "other", retryable: bool = False
    ) -> None:
        super().__init__(message, store, name, kind, retryable)
        #: The URL of the store, without its password.
        self.store = store
        #: The lock of the request, if it had one.
        self.name = name
        #: The kind of error: ``"unreachable"``, ``"no_answer"``, ``"not_authenticated"``…
        self.kind = kind
        #: Whether the same call can succeed later without a change to the program or the store.
        self.retryable = retryable


class NotEvicted(LeaseholdError):
    """The lock has another holder than the one that was inspected, or its holder cannot be asked to stop."""

    def __init__(self, message: str, name: str, holder: LockInfo | None = None) -> None:
        super().__init__(message, name, holder)
        self.name = name
        #: The holder now.
        self.holder = holder


class OtherPayload(LeaseholdError):
    """The id belongs to work that was requested with another payload."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.name = name


class ClientClosed(LeaseholdError):
    """The client was closed."""


class InvalidArgument(LeaseholdError, ValueError):
    """An argument is invalid. No request was sent."""


# Called by the native module, which passes views as JSON.


def not_acquired(message: str, name: str, holder: str, waited: float, store: str) -> LockNotAcquired:
    info = LockInfo.from_json(holder)
    return LockNotAcquired(message, name, info if info.held else None, waited, store)


def pool_busy(
    message: str, name: str, members: list[tuple[int, str]], waited: float, store: str
) -> LockNotAcquired:
    infos: Any = tuple((index, LockInfo.from_json(text)) for index, text in members)
    holder = next((info for _, info in infos if info.held), None)
    return LockNotAcquired(message, name, holder, waited, store, infos)


def not_evicted(message: str, name: str, holder: str) -> NotEvicted:
    return NotEvicted(message, name, LockInfo.from_json(holder))

"""What can go wrong: one class per decision the caller can take.

All of them can be pickled, so that they come through a process pool or a task queue.
"""

from __future__ import annotations

from typing import Any

from ._info import LockInfo


class LeaseholdError(Exception):
    """Whatever went wrong with a lock. The first argument says it in a sentence."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class LockNotAcquired(LeaseholdError):
    """Somebody else holds the lock, and the time to wait for it is over (or was zero)."""

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
        #: Who holds it, as far as is known.
        self.holder = holder
        #: For how many seconds it was waited for.
        self.waited = waited
        #: Which store was asked.
        self.store = store
        #: Of a pool: every member's number, and who holds it.
        self.members = members


class LockLost(LeaseholdError):
    """The lease was lost while work was going on: somebody else may hold the lock by now."""

    def __init__(self, message: str, name: str, reason: str) -> None:
        super().__init__(message, name, reason)
        #: The lock.
        self.name = name
        #: ``"expired"``, ``"gone"``, ``"revoked"``, ``"max_hold"``, ``"shutdown"``, ``"displaced"``; ``"forked"`` where a child
        #: uses a guard of its parent's, ``"released"`` where a guard is used that was given back.
        self.reason = reason


class StoreUnavailable(LeaseholdError):
    """The store did not answer, or not as asked: not the same as "somebody else holds it"."""

    def __init__(
        self, message: str, store: str, name: str | None = None, kind: str = "other", retryable: bool = False
    ) -> None:
        super().__init__(message, store, name, kind, retryable)
        #: Which store, without its secrets.
        self.store = store
        #: The lock it was asked about, if it was one.
        self.name = name
        #: What went wrong, in a word: ``"unreachable"``, ``"no_answer"``, ``"not_authenticated"``…
        self.kind = kind
        #: Whether the same call can succeed later without anybody changing anything.
        self.retryable = retryable


class NotEvicted(LeaseholdError):
    """The lock has changed hands since it was looked at, or its holder cannot be asked to stop."""

    def __init__(self, message: str, name: str, holder: LockInfo | None = None) -> None:
        super().__init__(message, name, holder)
        self.name = name
        #: Who holds it now.
        self.holder = holder


class OtherPayload(LeaseholdError):
    """This id belongs to work that was asked for with another payload."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.name = name


class ClientClosed(LeaseholdError):
    """The client was closed."""


class InvalidArgument(LeaseholdError, ValueError):
    """A name, time, owner or URL was refused before anything was asked."""


# For the native module, which knows views as JSON.


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

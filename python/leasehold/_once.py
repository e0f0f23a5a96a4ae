"""Work that is done once, and values that are created once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from . import _native
from ._lock import Guard, work_under
from ._times import Seconds, as_json, kept, optional_lease, optional_seconds, optional_text, text
from ._waiting import wait, wait_async


@dataclass(frozen=True)
class Claim:
    """A value bound to an id."""

    #: Whether this very call bound it.
    created: bool
    value: Any


@dataclass(frozen=True)
class Outcome:
    """What came of work that is done once."""

    #: What it returned.
    value: Any
    #: Whether it was done by this very call. Otherwise it was done before, and this is its stored result.
    fresh: bool
    #: Whether the result is stored. ``False`` only for a fresh one when the store went away.
    stored: bool = True
    #: Who did it, where it was done before.
    by: str | None = None
    #: When, in milliseconds since 1970.
    at_ms: int | None = None


class Once:
    """Work that is done once for an id. Made by :meth:`Client.once`.

    It runs under the lock ``once:<id>``. A runner that crashes stores nothing, and the next one works: so work
    may be *begun* more than once; what is stored is the result of one.
    """

    def __init__(
        self,
        client: _native.Client,
        id: str,
        *,
        keep: Seconds | None,
        payload: Any,
        ttl: Seconds | None,
        wait: Seconds | None,
        owner: str | None,
    ) -> None:
        self._client = client
        self.id = text("id", id)
        # Sorted: the same payload must come out the same each time.
        asked_with = None if payload is None else as_json("payload", payload, sort_keys=True).encode()
        self._terms = (
            None if keep is None else kept("keep", keep),
            asked_with,
            optional_lease("ttl", ttl),
            optional_seconds("wait", wait),
            optional_text("owner", owner),
        )

    def run(self, work: Callable[[], Any]) -> Outcome:
        """Does the work, or gets its stored result. What it returns must be JSON. What it raises is this
        caller's alone: nothing is stored, and the next one tries again.

        :raises LockNotAcquired: when the time to wait for somebody else's work is over.
        :raises LockLost: when the lease was lost meanwhile; nothing is stored.
        :raises OtherPayload: when the id belongs to another payload.
        """
        running = wait(self._start())
        if isinstance(running, str):
            return _done(running)
        try:
            value = work()
            result = json.dumps(value).encode()
        except BaseException:
            wait(running.give_up())
            raise
        return Outcome(value, fresh=True, stored=wait(running.finish(result)))

    async def run_async(self, work: Callable[[], Awaitable[Any]]) -> Outcome:
        """As :meth:`run`, for a function that is awaited; it is cancelled when the lease is lost."""
        running = await wait_async(self._start())
        if isinstance(running, str):
            return _done(running)
        try:
            value = await work_under(Guard(running.guard), work)
            result = json.dumps(value).encode()
        except BaseException:
            await wait_async(running.give_up())
            raise
        return Outcome(value, fresh=True, stored=await wait_async(running.finish(result)))

    def result(self) -> Any:
        """The stored result, without doing anything; ``None`` when there is none (yet)."""
        return _value(wait(_native.once_result(self._client, self.id)))

    async def result_async(self) -> Any:
        """As :meth:`result`."""
        return _value(await wait_async(_native.once_result(self._client, self.id)))

    def forget(self) -> bool:
        """Forgets the stored result: whoever asks next does the work. ``False``: there is none."""
        return bool(wait(_native.once_forget(self._client, self.id)))

    async def forget_async(self) -> bool:
        """As :meth:`forget`."""
        return bool(await wait_async(_native.once_forget(self._client, self.id)))

    def _start(self) -> _native.Call:
        return _native.once(self._client, self.id, *self._terms)

    def __repr__(self) -> str:
        return f"<leasehold.Once {self.id!r}>"


def _done(text: str) -> Outcome:
    done = json.loads(text)
    return Outcome(json.loads(done["result"]), fresh=False, by=done["by"], at_ms=done["at_ms"])


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)

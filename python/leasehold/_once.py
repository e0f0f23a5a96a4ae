"""Work that is done once for an id, and values that are bound once to an id."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from . import _native
from ._lock import Guard, work_under
from ._arguments import Seconds, as_json, retention, terms, text
from ._waiting import wait, wait_async


@dataclass(frozen=True)
class Claim:
    """A value bound to an id."""

    #: Whether this call bound it.
    created: bool
    value: Any


@dataclass(frozen=True)
class Outcome:
    """The result of work that is done once."""

    #: The value that the work returned.
    value: Any
    #: Whether this call did the work. Otherwise the value is the stored result of an earlier call.
    fresh: bool
    #: Whether the result is stored. ``False`` only for a fresh result when the store became unreachable.
    stored: bool = True
    #: The owner of the earlier call that did the work.
    by: str | None = None
    #: When that call finished, in milliseconds since 1970.
    at_ms: int | None = None


class Once:
    """Work that is done once for an id. Made by :meth:`Client.once`.

    It runs under the lock ``once:<id>``. If a caller crashes during the work, nothing is stored, and the next caller does the
    work. So the work can be *started* more than once, but only one result is stored.
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
        # With sorted keys, equal payloads are equal bytes.
        self._payload = None if payload is None else as_json("payload", payload, sort_keys=True).encode()
        self._keep = None if keep is None else retention("keep", keep)
        self._terms = terms(ttl=ttl, wait=wait, owner=owner)

    def run(self, work: Callable[[], Any]) -> Outcome:
        """Does the work, or returns its stored result. The work must return JSON. If it raises, only this caller gets the
        exception: nothing is stored, and the next caller does the work.

        :raises LockNotAcquired: another caller is still doing the work, and the time to wait is over.
        :raises LockLost: the lease was lost during the work; nothing is stored.
        :raises OtherPayload: the id belongs to another payload.
        """
        running = wait(self._start())
        if isinstance(running, str):
            return _done(running)
        try:
            value = work()
            result = self._as_result(value)
        except BaseException:
            wait(running.give_up())
            raise
        return Outcome(value, fresh=True, stored=wait(running.finish(result)))

    async def run_async(self, work: Callable[[], Awaitable[Any]]) -> Outcome:
        """:meth:`run` for an async function, which is cancelled when the lease is lost."""
        running = await wait_async(self._start())
        if isinstance(running, str):
            return _done(running)
        try:
            value = await work_under(Guard(running.guard), work)
            result = self._as_result(value)
        except BaseException:
            await wait_async(running.give_up())
            raise
        return Outcome(value, fresh=True, stored=await wait_async(running.finish(result)))

    def result(self) -> Any:
        """The stored result; ``None`` if there is none (yet)."""
        return _value(wait(_native.once_result(self._client, self.id)))

    async def result_async(self) -> Any:
        """:meth:`result` for asyncio."""
        return _value(await wait_async(_native.once_result(self._client, self.id)))

    def forget(self) -> bool:
        """Deletes the stored result, so that the next caller does the work. Returns ``False`` if there is none."""
        return bool(wait(_native.once_forget(self._client, self.id)))

    async def forget_async(self) -> bool:
        """:meth:`forget` for asyncio."""
        return bool(await wait_async(_native.once_forget(self._client, self.id)))

    def _as_result(self, value: Any) -> bytes:
        try:
            return json.dumps(value).encode()
        except (TypeError, ValueError) as problem:
            kind = TypeError if isinstance(problem, TypeError) else ValueError
            raise kind(f"once {self.id!r}: the work returned a value that JSON cannot hold, so it is not stored: {problem}") from None

    def _start(self) -> _native.Call:
        return _native.once(self._client, self.id, self._keep, self._payload, self._terms)

    def __repr__(self) -> str:
        return f"<leasehold.Once {self.id!r}>"


def _done(text: str) -> Outcome:
    done = json.loads(text)
    return Outcome(json.loads(done["result"]), fresh=False, by=done["by"], at_ms=done["at_ms"])


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)

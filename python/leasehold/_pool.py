"""Pools: any of several locks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from . import _native
from ._blocks import Block, Blocks, leaves
from ._errors import InvalidArgument, LockLost
from ._info import LockInfo
from ._lock import Guard, Watch, _released
from ._times import Seconds, flag, optional_lease, optional_seconds, optional_text, text
from ._waiting import wait, wait_async


@dataclass(frozen=True)
class PoolMember:
    """One member of a pool: its number, and the lock that it is."""

    index: int
    lock: LockInfo


class Pool:
    """Locks of which any are good. Made by :meth:`Client.pool`.

    Requests are served in the order of asking, those for a member by its name among them.
    """

    def __init__(self, client: _native.Client, name: str, members: Iterable[int]) -> None:
        self._client = client
        #: What its members' names begin with.
        self.name = text("name", name)
        if not isinstance(members, Iterable) or isinstance(members, str | bytes):
            raise InvalidArgument(f"members: {members!r} is not several numbers, such as range(4)")
        #: The numbers of its members.
        self.members = tuple(members)
        for member in self.members:
            if not _is_number(member) or not 0 <= member < 2**32:
                raise InvalidArgument(f"members: {member!r} is not the number of a member, 0 or more")

    def acquire(
        self,
        k: int = 1,
        *,
        wait: Seconds | None = None,
        ttl: Seconds | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        owner: str | None = None,
    ) -> PoolRequest:
        """Asks for any `k` members, all of them or none, by ``with`` or ``async with``; the times are those of
        :meth:`Client.lock`.

        >>> import leasehold
        >>> gpus = leasehold.connect("memory:").pool("gpu_lock", range(4))
        >>> with gpus.acquire(2, wait=5) as permit:
        ...     permit.indices
        (0, 1)
        """
        return PoolRequest(self, k, wait, ttl, renew, max_hold, owner)

    def status(self) -> list[PoolMember]:
        """Who holds each member, and who waits for it."""
        return _members(wait(_native.pool_status(self._client, self.name, list(self.members))))

    async def status_async(self) -> list[PoolMember]:
        """As :meth:`status`."""
        return _members(await wait_async(_native.pool_status(self._client, self.name, list(self.members))))

    def __repr__(self) -> str:
        return f"<leasehold.Pool {self.name!r} of {len(self.members)}>"


class PoolRequest:
    """A request for members of a pool: ``with pool.acquire() as permit``, any number of times and by any number of threads
    and tasks."""

    def __init__(
        self,
        pool: Pool,
        k: int,
        wait: Seconds | None,
        ttl: Seconds | None,
        renew: bool,
        max_hold: Seconds | None,
        owner: str | None,
    ) -> None:
        if not _is_number(k) or not 1 <= k < 2**32:
            raise InvalidArgument(f"k: {k!r} is not a number of members, 1 or more")
        self._pool = pool
        self._terms = (
            k,
            optional_lease("ttl", ttl),
            optional_seconds("wait", wait),
            flag("renew", renew),
            optional_seconds("max_hold", max_hold),
            optional_text("owner", owner),
        )
        self._blocks: Blocks[_Entered] = Blocks()

    def permit(self) -> Permit:
        """Waits, as long as was said, and takes them, to be released by hand.

        :raises LockNotAcquired: when so many are not free; it says who holds which.
        """
        return Permit(wait(self._call()))

    async def permit_async(self) -> Permit:
        """As :meth:`permit`."""
        return Permit(await wait_async(self._call()))

    def __enter__(self) -> Permit:
        block = self._blocks.begin()
        entered = _Entered(self.permit(), [])
        try:
            self._blocks.enter(block, entered)
            return entered.permit
        except BaseException:
            self._blocks.forget(entered)
            raise

    @leaves
    def __exit__(
        self,
        block: Block[_Entered] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        permit, _ = self._blocks.leave(block)
        permit.__exit__(kind, error, trace)

    async def __aenter__(self) -> Permit:
        block = self._blocks.begin()
        permit = await self.permit_async()
        self._blocks.enter(block, _Entered(permit, [Watch(guard) for guard in permit.guards]))
        return permit

    @leaves
    async def __aexit__(
        self,
        block: Block[_Entered] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        permit, watches = self._blocks.leave(block)
        # All of them are stopped, whichever was the cause.
        if any([watch.stop() for watch in watches]) and isinstance(error, asyncio.CancelledError):
            try:
                await permit.__aexit__(None, None, None)
            except LockLost as lost:
                raise lost from error
        await permit.__aexit__(kind, error, trace)

    def _call(self) -> _native.Call:
        return _native.acquire_any(self._pool._client, self._pool.name, list(self._pool.members), *self._terms)


class Permit:
    """Holds members of a pool: a guard for each."""

    def __init__(self, permits: list[tuple[int, _native.Guard]]) -> None:
        #: Their numbers, in the order in which the pool names them.
        self.indices = tuple(index for index, _ in permits)
        #: Their guards.
        self.guards = tuple(Guard(guard) for _, guard in permits)

    @property
    def index(self) -> int:
        """The number of the member; of the first one where several were asked for."""
        return self.indices[0]

    @property
    def guard(self) -> Guard:
        """Its guard."""
        return self.guards[0]

    def raise_if_lost(self) -> None:
        """:raises LockLost: when any of them was lost."""
        for guard in self.guards:
            guard.raise_if_lost()

    def release(self) -> bool:
        """Gives all of them back. ``True``: all were ours until now."""
        return all([guard.release() for guard in self.guards])

    async def release_async(self) -> bool:
        """As :meth:`release`."""
        return all([await guard.release_async() for guard in self.guards])

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = [guard for guard in self.guards if guard._leave()]
        ours = [_released(guard.name, wait, guard._native) for guard in held]
        for guard, was_ours in zip(held, ours, strict=True):
            guard._left(was_ours, error)

    async def __aenter__(self) -> Permit:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = [guard for guard in self.guards if guard._leave()]
        ours = [await guard._release_on_exit() for guard in held]
        for guard, was_ours in zip(held, ours, strict=True):
            guard._left(was_ours, error)

    def __repr__(self) -> str:
        return f"<leasehold.Permit {self.indices}>"


def _is_number(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


class _Entered(NamedTuple):
    permit: Permit
    watches: list[Watch]


def _members(text: str) -> list[PoolMember]:
    return [PoolMember(index, LockInfo.from_dict(view)) for index, view in json.loads(text)]

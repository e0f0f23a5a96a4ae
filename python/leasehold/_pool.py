"""Pools: any of several locks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from . import _native
from ._blocks import Block, Blocks, per_block
from ._errors import InvalidArgument, LockLost
from ._info import LockInfo
from ._lock import Guard, Watch
from ._arguments import Seconds, terms, text
from ._waiting import wait, wait_async


@dataclass(frozen=True)
class PoolMember:
    """One member of a pool: its number and its lock."""

    index: int
    lock: LockInfo


class Pool:
    """Locks of which a request takes any. Made by :meth:`Client.pool`.

    Requests are served in the order of asking, together with requests for a single member by its name.
    """

    def __init__(self, client: _native.Client, name: str, members: Iterable[int]) -> None:
        self._client = client
        #: The prefix of its members' names.
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
        """Requests any `k` members, all of them or none, for ``with`` or ``async with``. The other arguments are those of
        :meth:`Client.lock`.

        >>> import leasehold
        >>> gpus = leasehold.connect("memory:").pool("gpu_lock", range(4))
        >>> with gpus.acquire(2, wait=5) as permit:
        ...     permit.indices
        (0, 1)
        """
        return PoolRequest(self, k, wait, ttl, renew, max_hold, owner)

    def status(self) -> list[PoolMember]:
        """The holder and the waiters of each member."""
        return _members(wait(_native.pool_status(self._client, self.name, list(self.members))))

    async def status_async(self) -> list[PoolMember]:
        """:meth:`status` for asyncio."""
        return _members(await wait_async(_native.pool_status(self._client, self.name, list(self.members))))

    def __repr__(self) -> str:
        return f"<leasehold.Pool {self.name!r} of {len(self.members)}>"


class PoolRequest:
    """A request for members of a pool: ``with pool.acquire() as permit``. It can be used many times, by many threads and
    tasks."""

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
        self._k = k
        self._terms = terms(ttl=ttl, wait=wait, renew=renew, max_hold=max_hold, owner=owner)
        self._blocks: Blocks[_Entered] = Blocks()

    def permit(self) -> Permit:
        """Waits for the members and acquires them. The caller releases the permit.

        :raises LockNotAcquired: fewer than `k` members were free in time; the exception has the holder of each.
        """
        return Permit(wait(self._call()))

    async def permit_async(self) -> Permit:
        """:meth:`permit` for asyncio."""
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

    @per_block
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

    @per_block
    async def __aexit__(
        self,
        block: Block[_Entered] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        permit, watches = self._blocks.leave(block)
        # A list, not a generator: every watch has to be stopped.
        if any([watch.stop() for watch in watches]) and isinstance(error, asyncio.CancelledError):
            try:
                await permit.__aexit__(None, None, None)
            except LockLost as lost:
                raise lost from error
        await permit.__aexit__(kind, error, trace)

    def _call(self) -> _native.Call:
        pool = self._pool
        return _native.acquire_any(pool._client, pool.name, list(pool.members), self._k, self._terms)


class Permit:
    """Holds members of a pool, with a guard for each."""

    def __init__(self, permits: list[tuple[int, _native.Guard]]) -> None:
        #: Their numbers, in the order of the pool's members.
        self.indices = tuple(index for index, _ in permits)
        #: Their guards.
        self.guards = tuple(Guard(guard) for _, guard in permits)

    @property
    def index(self) -> int:
        """The number of the member, or of the first one."""
        return self.indices[0]

    @property
    def guard(self) -> Guard:
        """The guard of the member, or of the first one."""
        return self.guards[0]

    def raise_if_lost(self) -> None:
        """Raises :class:`LockLost` if the lease on any member was lost."""
        for guard in self.guards:
            guard.raise_if_lost()

    def release(self) -> bool:
        """Releases all members. Returns ``True`` if the permit held all of them until now."""
        return all([guard.release() for guard in self.guards])

    async def release_async(self) -> bool:
        """:meth:`release` for asyncio."""
        return all([await guard.release_async() for guard in self.guards])

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = [guard for guard in self.guards if guard._end_block()]
        were_held = [guard._release_at_block_end() for guard in held]
        for guard, was_held in zip(held, were_held, strict=True):
            guard._report_loss(was_held, error)

    async def __aenter__(self) -> Permit:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = [guard for guard in self.guards if guard._end_block()]
        were_held = [await guard._release_at_block_end_async() for guard in held]
        for guard, was_held in zip(held, were_held, strict=True):
            guard._report_loss(was_held, error)

    def __repr__(self) -> str:
        return f"<leasehold.Permit {self.indices}>"


def _is_number(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


class _Entered(NamedTuple):
    permit: Permit
    watches: list[Watch]


def _members(text: str) -> list[PoolMember]:
    return [PoolMember(index, LockInfo.from_dict(view)) for index, view in json.loads(text)]

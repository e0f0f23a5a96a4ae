"""redis-py's lock for asyncio."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from .._arguments import Seconds
from ._base import BaseLock, Token
from ._errors import LockError
from ._steps import run_async


class AsyncLock(BaseLock):
    """Replaces ``redis.asyncio.lock.Lock``: :class:`Lock` for asyncio. The client may be one of ``redis.asyncio`` or of
    ``redis``.

    >>> import asyncio
    >>> from leasehold.compat import AsyncLock
    >>> async def work():
    ...     async with AsyncLock("memory:", "order:43", timeout=30, blocking_timeout=5) as lock:
    ...         return await lock.owned()
    >>> asyncio.run(work())
    True
    """

    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: Seconds | None = None,
        token: Token | None = None,
    ) -> bool:
        """:meth:`Lock.acquire` for asyncio, without `sleep`, as in redis-py. A cancelled call keeps no lock."""
        return await run_async(self._acquire(None, blocking, blocking_timeout, token))

    async def release(self) -> None:
        """:meth:`Lock.release` for asyncio."""
        await run_async(self._release())

    async def extend(self, additional_time: Seconds, replace_ttl: bool = False) -> Literal[True]:
        """:meth:`Lock.extend` for asyncio."""
        await run_async(self._extend(additional_time, replace_ttl))
        return True

    async def reacquire(self) -> Literal[True]:
        """:meth:`Lock.reacquire` for asyncio."""
        await run_async(self._reacquire())
        return True

    async def locked(self) -> bool:
        """:meth:`Lock.locked` for asyncio."""
        return await run_async(self._locked())

    async def owned(self) -> bool:
        """:meth:`Lock.owned` for asyncio."""
        return await run_async(self._owned())

    async def __aenter__(self) -> AsyncLock:
        if not await self.acquire():
            raise self._not_in_time()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except LockError as problem:
            self._report_loss(problem)

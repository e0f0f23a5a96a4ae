"""Locks, and guards that hold them."""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections.abc import Awaitable, Callable, Generator
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

from . import _log, _native
from ._blocks import Block, Blocks, held_here, per_block
from ._exit import begin_exit, block_during_exit, run_at_exit
from ._errors import LeaseholdError, LockLost
from ._arguments import Seconds, lease, one_of, optional_seconds, text
from ._waiting import LoopMailbox, wait, wait_async

OnLost: TypeAlias = Literal["cancel", "continue"]

T = TypeVar("T")

#: How long a process that ends waits for the release of its locks, in seconds.
EXIT_TIMEOUT = 2.0

log = logging.getLogger("leasehold")

_WHY = {
    "expired": "its lease ran out before a renewal was confirmed",
    "gone": "the store no longer knows the lease",
    "revoked": "it was revoked",
    "max_hold": "it was held for longer than max_hold",
    "shutdown": "the client was closed",
}


class Lost:
    """Whether a lease was lost. It can be checked, waited for by a thread, or awaited.

    >>> import leasehold
    >>> with leasehold.connect("memory:").lock("order:42") as guard:
    ...     guard.lost.is_set()
    False
    """

    __slots__ = ("_guard",)

    def __init__(self, guard: _native.Guard) -> None:
        self._guard = guard

    def is_set(self) -> bool:
        """Whether the lease was lost. ``if guard.lost:`` tests the same."""
        return self._guard.loss is not None

    __bool__ = is_set

    @property
    def reason(self) -> str | None:
        """Why the lease was lost, if it was: see :class:`LockLost`."""
        return self._guard.loss

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Waits for the loss, for at most `timeout`, and returns whether there was one. A release ends the waiting."""
        return wait(self._guard.lost(optional_seconds("timeout", timeout))) is not None

    def __await__(self) -> Generator[Any, None, str | None]:
        """Waits for the loss and returns its reason; ``None`` if the lock was released first."""
        return wait_async(self._guard.lost()).__await__()


class Guard:
    """Holds a lock until it is released or its ``with`` ends.

    The lease is renewed in the background as long as the guard lives (unless renewal was switched off). A guard that is
    garbage-collected releases its lock, and a process that ends releases all of its locks. A forked child does not share
    the guards of its parent.

    >>> import leasehold
    >>> client = leasehold.connect("memory:")
    >>> guard = client.lock("order:42").acquire()
    >>> guard.release()
    True
    """

    __slots__ = ("__weakref__", "_block_ended", "_native", "_on_lost", "_reentered")

    def __init__(self, native: _native.Guard, on_lost: OnLost = "cancel") -> None:
        self._native = native
        self._on_lost = on_lost
        #: The blocks that entered the lock again. One of them can end after the block that acquired it: see
        #: :class:`ReleaseIfLast`.
        self._reentered: tuple[weakref.ref[Any], ...] = ()
        self._block_ended = False
        _held.add(self)

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._native.name

    @property
    def fence(self) -> int | None:
        """A number that is higher than that of every earlier grant of this name: pass it to the resource that the lock
        protects. ``None`` if the lock was acquired with ``fenced=False``, or is not protected."""
        return self._native.fence

    @property
    def token(self) -> str:
        """The secret that renews and releases the lock. Never log it."""
        return self._native.token

    @property
    def holder_id(self) -> str:
        """The public id of this holder."""
        return self._native.holder_id

    @property
    def is_valid(self) -> bool:
        """Whether the lease is proven to be valid at this moment."""
        return self._native.is_valid

    @property
    def is_protected(self) -> bool:
        """``False`` if the store was unreachable and the work goes on without a lock (``on_unavailable="open"``). Another
        process may do the same work then."""
        return self._native.is_protected

    @property
    def time_left(self) -> float:
        """For how many seconds the lease is still proven to be valid. Every renewal extends it."""
        return self._native.time_left

    @property
    def valid_until(self) -> datetime:
        """The end of the lease on the system's clock, for people. A program that decides by it uses :attr:`time_left`."""
        return datetime.now(timezone.utc) + timedelta(seconds=self.time_left)

    @property
    def lost(self) -> Lost:
        """Whether the lease was lost, as an object that can be waited for."""
        return Lost(self._native)

    @property
    def asked_to_finish(self) -> str | None:
        """The reason of a request to finish soon; ``None`` if there was none. The lease stays valid."""
        return self._native.asked_to_finish

    def raise_if_lost(self) -> None:
        """Raises :class:`LockLost` if the lease was lost. Call it between the steps of long work."""
        reason = self._native.loss
        if reason is None and not self._native.is_held:
            reason = "released"
        if reason is not None:
            raise self._lost_error(reason)

    def extend(self, ttl: Seconds) -> None:
        """Extends the lease to `ttl` from now; renewals use the same ttl. A lease is never shortened.

        :raises LockLost: the lease is over.
        :raises StoreUnavailable: the store did not answer; the lease is as valid as before.
        """
        wait(self._native.extend(lease("ttl", ttl)))

    async def extend_async(self, ttl: Seconds) -> None:
        """:meth:`extend` for asyncio."""
        await wait_async(self._native.extend(lease("ttl", ttl)))

    def release(self) -> bool:
        """Releases the lock. Returns ``False`` if the guard did not hold it any more; then nothing is changed.

        :raises StoreUnavailable: the store did not answer; the release goes on in the background.
        """
        return bool(wait(self._native.release()))

    async def release_async(self) -> bool:
        """:meth:`release` for asyncio."""
        return bool(await wait_async(self._native.release()))

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._native.is_held:
            self._report_loss(self._release_at_block_end(), error)

    async def __aenter__(self) -> Guard:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._native.is_held:
            self._report_loss(await self._release_at_block_end_async(), error)

    @property
    def _is_reentered(self) -> bool:
        return any(block() is not None for block in self._reentered)

    def _end_block(self) -> bool:
        """Records that the block which acquired the lock ends. Returns whether it releases the lock: not if the lock was
        released before, or another block is still inside."""
        self._block_ended = True
        return self._native.is_held and not self._is_reentered

    def _release_at_block_end(self) -> bool:
        """Releases the lock. Returns whether the guard held it until then, as far as is known."""
        try:
            return bool(wait(self._native.release()))
        except LeaseholdError as problem:
            self._warn_of_release(problem)
            return True

    async def _release_at_block_end_async(self) -> bool:
        try:
            return bool(await wait_async(self._native.release()))
        except LeaseholdError as problem:
            self._warn_of_release(problem)
            return True

    def _warn_of_release(self, problem: LeaseholdError) -> None:
        # A warning, so that it hides no result of the block. The release goes on in the background, and is written to the
        # journal if it fails in every way.
        log.warning("%r is released in the background: %s", self.name, problem)

    def _report_loss(self, was_held: bool, error: BaseException | None) -> None:
        """Raises or logs a loss of the lease, at the end of a ``with``."""
        reason = self._native.loss or (None if was_held else "gone")
        if reason is None or not self.is_protected:
            return
        if self._on_lost == "continue":
            log.warning("the lease on %r was lost while the work went on: %s", self.name, _WHY.get(reason, reason))
        elif error is None:
            raise self._lost_error(reason)

    def _lost_error(self, reason: str) -> LockLost:
        if reason == "shutdown":
            block_during_exit()
        if reason == "forked":
            return LockLost(
                f"the lease on {self.name!r} belongs to process {self._native.pid}, from which this one was forked",
                self.name,
                reason,
            )
        if reason == "released":
            return LockLost(f"the lease on {self.name!r} was released", self.name, reason)
        return LockLost(f"the lease on {self.name!r} was lost: {_WHY.get(reason, reason)}", self.name, reason)

    def __reduce__(self) -> NoReturn:
        # A copy would release the lock of the original, and another process does not hold it.
        raise TypeError(
            "a guard belongs to the process that acquired the lock and can be neither copied nor pickled: pass on its name, "
            "or acquire the lock by a token (acquire_token)"
        )

    def __repr__(self) -> str:
        held = "held" if self._native.is_held else "not held"
        if not self.is_protected:
            held = "not protected"
        return f"<leasehold.Guard {self.name!r} {held}, holder {self.holder_id}, fence {self.fence}>"


class ReleaseIfLast:
    """Wraps a block that enters a lock again. It releases the lock if the block that acquired it has ended before (a suspended
    generator can outlive it) and no other block is inside."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def _is_last(self) -> bool:
        return self._guard._block_ended and not self._guard._is_reentered

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_last():
            self._guard.__exit__(kind, error, trace)

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_last():
            await self._guard.__aexit__(kind, error, trace)


_held: weakref.WeakSet[Guard] = weakref.WeakSet()


def _all_held() -> list[Guard]:
    while True:
        try:
            return list(_held)
        except RuntimeError:
            # A daemon thread acquired a lock meanwhile.
            continue


@run_at_exit
def release_everything() -> None:
    """Releases all locks of this process together, so that an unreachable store delays the end only once."""
    begin_exit()
    held = [guard._native for guard in _all_held() if guard._native.is_held]
    # Closing the connections also waits for background releases, such as that of an interrupted call.
    left = json.loads(_native.close_all(held, EXIT_TIMEOUT).wait())
    if left:
        names = ", ".join(repr(name) for name in sorted(left))
        log.warning("the store has not confirmed these releases; the locks end with their leases at the latest: %s", names)
    _log.end()


class Lock:
    """A request for a lock, for ``with`` or ``async with``. Made by :meth:`Client.lock`. It can be used many times, by many
    threads and tasks."""

    __slots__ = ("_blocks", "_client", "_name", "_on_lost", "_terms")

    def __init__(self, client: _native.Client, name: str, terms: _native.Terms, on_lost: OnLost = "cancel") -> None:
        one_of("on_lost", on_lost, "cancel", "continue")
        self._client = client
        self._name = text("name", name)
        self._terms = terms
        self._on_lost: OnLost = on_lost
        self._blocks: Blocks[_Entered] = Blocks()

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._name

    def acquire(self) -> Guard:
        """Waits for the lock and acquires it. Ctrl-C ends the waiting.

        :raises LockNotAcquired: the time to wait is over; the exception names the holder.
        :raises StoreUnavailable: the store did not answer.
        """
        return Guard(wait(self._call()), self._on_lost)

    async def acquire_async(self) -> Guard:
        """:meth:`acquire` for asyncio. A cancelled call keeps no lock."""
        return Guard(await wait_async(self._call()), self._on_lost)

    def __enter__(self) -> Guard:
        block = self._blocks.begin()
        entered = _Entered(self.acquire(), None)
        try:
            self._blocks.enter(block, entered)
            return entered.guard
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
        guard, _ = self._blocks.leave(block)
        if guard._end_block():
            guard._report_loss(guard._release_at_block_end(), error)

    async def __aenter__(self) -> Guard:
        block = self._blocks.begin()
        guard = await self.acquire_async()
        self._blocks.enter(block, _Entered(guard, Watch(guard) if self._on_lost == "cancel" else None))
        return guard

    @per_block
    async def __aexit__(
        self,
        block: Block[_Entered] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard, watch = self._blocks.leave(block)
        cancelled_by_loss = watch is not None and watch.stop()
        was_held = not guard._end_block() or await guard._release_at_block_end_async()
        if cancelled_by_loss and (error is None or isinstance(error, asyncio.CancelledError)):
            raise guard._lost_error(guard._native.loss or "gone") from error
        guard._report_loss(was_held, error)

    def _call(self) -> _native.Call:
        return self._client.acquire(self._name, self._terms)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lock belongs to its client and cannot be pickled: pickle the client, and call its lock() in the other process")

    def __repr__(self) -> str:
        return f"<leasehold.Lock {self._name!r}>"


class Watch:
    """Cancels the running task when a lease is lost, the way `asyncio.timeout` does at its deadline."""

    def __init__(self, guard: Guard) -> None:
        task = asyncio.current_task()
        assert task is not None, "`async with` runs in a task"
        self._task = task
        self._cancelling = _cancelling(task)
        self._fired = False
        self._is_cause = False
        self._mailbox = LoopMailbox.of(asyncio.get_running_loop())
        self._call = guard._native.lost()
        self._call_id = self._mailbox.start(self._call, _weakly(self._on_answer))

    def _on_answer(self) -> None:
        if self._call.result() is not None:
            self._fired = True
            self._task.cancel("the lease was lost")

    def stop(self) -> bool:
        """Stops watching. Returns whether the loss cancelled the task, and nothing else did."""
        self._mailbox.forget(self._call_id)
        self._call.cancel()
        if self._fired:
            self._fired = False
            uncancel = getattr(self._task, "uncancel", None)
            self._is_cause = uncancel is None or uncancel() <= self._cancelling
        return self._is_cause


async def work_under(guard: Guard, work: Callable[[], Awaitable[T]]) -> T:
    """Awaits work, and cancels it with :class:`LockLost` when the lease is lost."""
    watch = Watch(guard)
    try:
        return await work()
    except asyncio.CancelledError as error:
        if watch.stop():
            raise guard._lost_error(guard._native.loss or "gone") from error
        raise
    finally:
        watch.stop()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls a method while its object lives. The event loop must not keep the object alive, because it
    belongs to a block."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        known = reference()
        if known is not None:
            known()

    return call


def _cancelling(task: asyncio.Task[Any]) -> int:
    # Since Python 3.11.
    count = getattr(task, "cancelling", None)
    return 0 if count is None else int(count())


class _Entered(NamedTuple):
    guard: Guard
    watch: Watch | None


def current_fence() -> int | None:
    """The fence of the innermost lock that the caller runs under; ``None`` outside of any lock, and if the lock has no fence.

    >>> import leasehold
    >>> with leasehold.connect("memory:").lock("order:42") as guard:
    ...     leasehold.current_fence() == guard.fence
    True
    """
    locks = (held for held in held_here() if isinstance(held, _Entered))
    entered = next(locks, None)
    return None if entered is None else entered.guard.fence

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
from ._blocks import Block, Blocks, held_here, leaves
from ._ending import at_the_end, process_ends, stay_where_the_process_ends
from ._errors import LeaseholdError, LockLost
from ._times import Seconds, flag, lease, one_of, optional_lease, optional_seconds, optional_text, text
from ._waiting import Letters, wait, wait_async

OnLost: TypeAlias = Literal["cancel", "continue"]
OnUnavailable: TypeAlias = Literal["closed", "open"]

T = TypeVar("T")

#: A process that ends waits at most this long, in seconds, for all that it gives back.
EXIT_WITHIN = 2.0

log = logging.getLogger("leasehold")

_WHY = {
    "expired": "its lease ran out before a renewal was confirmed",
    "gone": "the store no longer knows the lease",
    "revoked": "it was taken away",
    "max_hold": "it was held for as long as its holder allowed",
    "shutdown": "the client was closed",
}


class Lost:
    """Tells that a lease was lost: looked at, waited for by a thread, or awaited.

    >>> import leasehold
    >>> with leasehold.connect("memory:").lock("order:42") as guard:
    ...     guard.lost.is_set()
    False
    """

    __slots__ = ("_guard",)

    def __init__(self, guard: _native.Guard) -> None:
        self._guard = guard

    def is_set(self) -> bool:
        """Whether the lease was lost; the same as its truth, so ``if guard.lost:`` says what it seems to say."""
        return self._guard.loss is not None

    __bool__ = is_set

    @property
    def reason(self) -> str | None:
        """Why, if it was: see :class:`LockLost`."""
        return self._guard.loss

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Waits for the loss, at most so long, and says whether there was one. A release ends the waiting."""
        return wait(self._guard.lost(optional_seconds("timeout", timeout))) is not None

    def __await__(self) -> Generator[Any, None, str | None]:
        """Waits for the loss and says why; ``None`` when the lock was released first."""
        return wait_async(self._guard.lost()).__await__()


class Guard:
    """Holds a lock, until it is released or its ``with`` ends.

    While it lives the lease is renewed in the background (unless that was switched off). A guard that is
    forgotten gives the lock back when it is garbage-collected, and a process that ends gives back all of its
    own. A child that was forked while a guard was held has no part in it.

    >>> import leasehold
    >>> client = leasehold.connect("memory:")
    >>> guard = client.lock("order:42").acquire()
    >>> guard.release()
    True
    """

    __slots__ = ("__weakref__", "_again", "_is_left", "_native", "_on_lost")

    def __init__(self, native: _native.Guard, on_lost: OnLost = "cancel") -> None:
        self._native = native
        self._on_lost = on_lost
        #: The blocks that entered the lock again. One of them can end after the block that acquired it: see :class:`Last`.
        self._again: tuple[weakref.ref[Any], ...] = ()
        self._is_left = False
        _held.add(self)

    @property
    def name(self) -> str:
        """The lock."""
        return self._native.name

    @property
    def fence(self) -> int | None:
        """Higher than that of every grant of this name before: give it to whatever the lock protects. ``None``
        for a lock that was asked for with ``fenced=False``, or is not protected."""
        return self._native.fence

    @property
    def token(self) -> str:
        """The secret that renews and releases the lock. Never log it."""
        return self._native.token

    @property
    def holder_id(self) -> str:
        """Names this holder without its secret."""
        return self._native.holder_id

    @property
    def is_valid(self) -> bool:
        """Whether the lease is proven at this moment."""
        return self._native.is_valid

    @property
    def is_protected(self) -> bool:
        """``False``: the store was unreachable, and the work goes on without a lock
        (``on_unavailable="open"``). Somebody else may be at work too."""
        return self._native.is_protected

    @property
    def time_left(self) -> float:
        """For how many seconds the lease is still proven; every renewal adds to it."""
        return self._native.time_left

    @property
    def valid_until(self) -> datetime:
        """The same as a moment, for people; programs that decide by it use :attr:`time_left`."""
        return datetime.now(timezone.utc) + timedelta(seconds=self.time_left)

    @property
    def lost(self) -> Lost:
        """Tells that the lease was lost."""
        return Lost(self._native)

    @property
    def asked_to_finish(self) -> str | None:
        """What somebody said who wants this work to come to an end soon. The lease stays valid."""
        return self._native.asked_to_finish

    def raise_if_lost(self) -> None:
        """For work that goes on step by step.

        :raises LockLost: when the lease was lost.
        """
        reason = self._native.loss
        if reason is None and not self._native.is_held:
            reason = "released"
        if reason is not None:
            raise self._lost_error(reason)

    def extend(self, ttl: Seconds) -> None:
        """Prolongs the lease to `ttl` from now, and keeps renewing to that. It never shortens it.

        :raises LockLost: when the lease is over.
        :raises StoreUnavailable: when there was no answer; the lease is as valid as before.
        """
        wait(self._native.extend(lease("ttl", ttl)))

    async def extend_async(self, ttl: Seconds) -> None:
        """As :meth:`extend`."""
        await wait_async(self._native.extend(lease("ttl", ttl)))

    def release(self) -> bool:
        """Gives the lock back. ``True``: it was ours until now. ``False``: it was not ours any more, and
        nothing was touched.

        :raises StoreUnavailable: when there was no answer; the release goes on in the background.
        """
        return bool(wait(self._native.release()))

    async def release_async(self) -> bool:
        """As :meth:`release`."""
        return bool(await wait_async(self._native.release()))

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._native.is_held:
            self._left(_released(self.name, wait, self._native), error)

    async def __aenter__(self) -> Guard:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._native.is_held:
            self._left(await self._release_on_exit(), error)

    @property
    def _is_entered_again(self) -> bool:
        return any(block() is not None for block in self._again)

    def _leave(self) -> bool:
        """The block that acquired the lock ends. Whether it releases it: it is held, and no other block is inside."""
        self._is_left = True
        return self._native.is_held and not self._is_entered_again

    async def _release_on_exit(self) -> bool:
        try:
            return bool(await wait_async(self._native.release()))
        except LeaseholdError as problem:
            _warn(self.name, problem)
            return True

    def _left(self, was_ours: bool, error: BaseException | None) -> None:
        """The lock was given back at the end of a ``with``."""
        reason = self._native.loss or (None if was_ours else "gone")
        if reason is None or not self.is_protected:
            return
        if self._on_lost == "continue":
            log.warning("the lease on %r was lost while the work went on: %s", self.name, _WHY.get(reason, reason))
        elif error is None:
            raise self._lost_error(reason)

    def _lost_error(self, reason: str) -> LockLost:
        if reason == "shutdown":
            stay_where_the_process_ends()
        if reason == "forked":
            return LockLost(
                f"the lease on {self.name!r} belongs to process {self._native.pid}, which this one was forked from",
                self.name,
                reason,
            )
        if reason == "released":
            return LockLost(f"the lease on {self.name!r} was released", self.name, reason)
        return LockLost(f"the lease on {self.name!r} was lost: {_WHY.get(reason, reason)}", self.name, reason)

    def __reduce__(self) -> NoReturn:
        # Two of them would both release it; and another process holds nothing.
        raise TypeError(
            "a guard belongs to the process that acquired the lock and is neither copied nor pickled: hand on its name, "
            "or lease it by a token (acquire_token)"
        )

    def __repr__(self) -> str:
        held = "held" if self._native.is_held else "not held"
        return f"<leasehold.Guard {self.name!r} {held}, holder {self.holder_id}, fence {self.fence}>"


class Last:
    """Around a block that enters a lock again. It releases the lock if the block that acquired it has ended, as a generator's
    can, and no other block is inside."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def _releases(self) -> bool:
        return self._guard._is_left and not self._guard._is_entered_again

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._releases():
            self._guard.__exit__(kind, error, trace)

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._releases():
            await self._guard.__aexit__(kind, error, trace)


_held: weakref.WeakSet[Guard] = weakref.WeakSet()


def _all_held() -> list[Guard]:
    while True:
        try:
            return list(_held)
        except RuntimeError:
            # A daemon thread acquired one meanwhile.
            continue


@at_the_end
def _give_everything_back() -> None:
    """A process that ends leaves no lock behind: all are released at once, and a store that is away is waited for once."""
    process_ends()
    held = [guard._native for guard in _all_held() if guard._native.is_held]
    # Also what a call that was interrupted may have got, which is given back in the background.
    left = json.loads(_native.close_all(held, EXIT_WITHIN).wait())
    if left:
        names = ", ".join(repr(name) for name in sorted(left))
        log.warning("the store has not confirmed these releases; the locks end with their leases at the latest: %s", names)
    _log.end()


def _released(name: str, how: Any, guard: _native.Guard) -> bool:
    try:
        return bool(how(guard.release()))
    except LeaseholdError as problem:
        _warn(name, problem)
        return True


def _warn(name: str, problem: LeaseholdError) -> None:
    # It hides nobody's result: the release goes on in the background, and in the end in the journal.
    log.warning("%r is released in the background: %s", name, problem)


class Lock:
    """A lock that can be asked for, in a ``with`` or an ``async with``, any number of times and by any number
    of threads and tasks. Made by :meth:`Client.lock`."""

    __slots__ = ("_blocks", "_client", "_fenced", "_max_hold", "_name", "_on_lost", "_on_unavailable", "_owner", "_renew",
                 "_ttl", "_wait")  # fmt: skip

    def __init__(
        self,
        client: _native.Client,
        name: str,
        *,
        ttl: Seconds | None = None,
        wait: Seconds | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        fenced: bool = True,
        owner: str | None = None,
        on_lost: OnLost = "cancel",
        on_unavailable: OnUnavailable | None = None,
    ) -> None:
        one_of("on_lost", on_lost, "cancel", "continue")
        if on_unavailable is not None:
            one_of("on_unavailable", on_unavailable, "closed", "open")
        self._client = client
        self._name = text("name", name)
        self._ttl = optional_lease("ttl", ttl)
        self._wait = optional_seconds("wait", wait)
        self._renew = flag("renew", renew)
        self._max_hold = optional_seconds("max_hold", max_hold)
        self._fenced = flag("fenced", fenced)
        self._owner = optional_text("owner", owner)
        self._on_lost: OnLost = on_lost
        self._on_unavailable = on_unavailable
        self._blocks: Blocks[_Entered] = Blocks()

    @property
    def name(self) -> str:
        """The lock."""
        return self._name

    def acquire(self) -> Guard:
        """Waits for the lock, as long as was said, and takes it. Ctrl-C ends the waiting.

        :raises LockNotAcquired: when the time to wait is over; it says who holds the lock.
        :raises StoreUnavailable: when the store did not answer.
        """
        return Guard(wait(self._call()), self._on_lost)

    async def acquire_async(self) -> Guard:
        """As :meth:`acquire`. Cancelled, it leaves nothing behind."""
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

    @leaves
    def __exit__(
        self,
        block: Block[_Entered] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard, _ = self._blocks.leave(block)
        if guard._leave():
            guard._left(_released(self._name, wait, guard._native), error)

    async def __aenter__(self) -> Guard:
        block = self._blocks.begin()
        guard = await self.acquire_async()
        self._blocks.enter(block, _Entered(guard, Watch(guard) if self._on_lost == "cancel" else None))
        return guard

    @leaves
    async def __aexit__(
        self,
        block: Block[_Entered] | None,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard, watch = self._blocks.leave(block)
        cancelled_by_loss = watch is not None and watch.stop()
        was_ours = not guard._leave() or await guard._release_on_exit()
        if cancelled_by_loss and (error is None or isinstance(error, asyncio.CancelledError)):
            raise guard._lost_error(guard._native.loss or "gone") from error
        guard._left(was_ours, error)

    def _call(self) -> _native.Call:
        return self._client.acquire(
            self._name,
            self._ttl,
            self._wait,
            self._renew,
            self._max_hold,
            self._fenced,
            self._owner,
            self._on_unavailable,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lock is its client's and is not pickled: pickle the client, and ask it for the lock there")

    def __repr__(self) -> str:
        return f"<leasehold.Lock {self._name!r}>"


class Watch:
    """Cancels the running task when a lease is lost, as `asyncio.timeout` does it when its time is over."""

    def __init__(self, guard: Guard) -> None:
        task = asyncio.current_task()
        assert task is not None, "`async with` runs in a task"
        self._task = task
        self._cancelling = _cancelling(task)
        self._fired = False
        self._is_cause = False
        self._letters = Letters.of(asyncio.get_running_loop())
        self._call = guard._native.lost()
        self._ticket = self._letters.ask(self._call, _weakly(self._told))

    def _told(self) -> None:
        if self._call.result() is not None:
            self._fired = True
            self._task.cancel("the lease was lost")

    def stop(self) -> bool:
        """Whether the task was cancelled by this, and by nobody else."""
        self._letters.forget(self._ticket)
        self._call.cancel()
        if self._fired:
            self._fired = False
            uncancel = getattr(self._task, "uncancel", None)
            self._is_cause = uncancel is None or uncancel() <= self._cancelling
        return self._is_cause


async def work_under(guard: Guard, work: Callable[[], Awaitable[T]]) -> T:
    """Awaits work that is cancelled, with :class:`LockLost`, when the lease is lost."""
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
    """Calls a method as long as there is its object: that of a block, which no event loop is to keep."""
    known = weakref.WeakMethod(method)

    def call() -> None:
        there = known()
        if there is not None:
            there()

    return call


def _cancelling(task: asyncio.Task[Any]) -> int:
    # Since Python 3.11.
    count = getattr(task, "cancelling", None)
    return 0 if count is None else int(count())


class _Entered(NamedTuple):
    guard: Guard
    watch: Watch | None


def current_fence() -> int | None:
    """The fence of the innermost lock that the caller runs under, however deep it was called; ``None``
    outside of any, and where the lock has no fence.

    >>> import leasehold
    >>> with leasehold.connect("memory:").lock("order:42") as guard:
    ...     leasehold.current_fence() == guard.fence
    True
    """
    locks = (held for held in held_here() if isinstance(held, _Entered))
    entered = next(locks, None)
    return None if entered is None else entered.guard.fence

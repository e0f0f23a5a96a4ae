"""Re-entry: which locks the running thread, asyncio task or greenlet has entered.

A lock that was entered belongs to one thread, task or greenlet. A context variable alone cannot identify it:
``asyncio.create_task``, ``asyncio.to_thread`` and ``gevent.spawn`` copy the context, and the copy outlives the lock. The
thread alone cannot identify it either: a thread of a pool runs other work while a generator that entered the lock is
suspended. So both the context and the thread, task or greenlet have to match.

An event loop that runs inside a lock (``with gpu.hold(0): asyncio.run(main())``) blocks the thread that holds the lock. Its
tasks may enter the thread's lock again, one at a time; such a task is a guest. A guest that is still inside when the thread
leaves is cancelled, because the loop may run again later, without the lock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from ._client import Client
from ._lock import Guard

T = TypeVar("T")


class _Thread:
    """Identifies a thread. Unlike a thread id, it is not reused after the thread has ended."""

    __slots__ = ("__weakref__",)


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()


def caller() -> object:
    """The running asyncio task, else the greenlet, else the thread."""
    task = _task()
    return _below_task() if task is None else task


def _task() -> object | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        # No event loop runs here.
        return None


def _below_task() -> object:
    """The running greenlet or thread, in which the event loop of a task runs."""
    getcurrent = getattr(sys.modules.get("greenlet"), "getcurrent", None)
    greenlet = None if getcurrent is None else getcurrent()
    # The first greenlet of a thread counts as the thread, because greenlet can be imported while the thread is inside a lock.
    return _local.thread if greenlet is None or greenlet.parent is None else greenlet


class Guest(weakref.ref[Any]):
    """A task that has entered the lock of its thread again."""

    __slots__ = ()


class Entry(Generic[T]):
    """One lock that was entered, the caller that entered it, and a value for the code inside."""

    __slots__ = ("_guest", "_owner", "by_guest", "client", "guard", "is_open", "value", "__weakref__")

    def __init__(self, client: Client, guard: Guard, value: T) -> None:
        self.client = client
        self.guard = guard
        self.value = value
        self.is_open = True
        self.by_guest = False
        self._owner: Callable[[], object | None] = weakref.ref(caller())
        self._guest: Guest | None = None

    def is_owned_by(self, *callers: object) -> bool:
        """Whether one of these callers entered the lock, in this process, and has not left it."""
        owner = self._owner()
        # A forked child continues in the thread that entered, but the lease belongs to its parent.
        return self.is_open and self.guard._native.loss != "forked" and any(one is owner for one in callers)

    def may_enter(self) -> bool:
        """Whether the caller entered the lock, or is a task of the event loop that its owner runs and no other task is a guest."""
        if self.is_owned_by(caller()):
            return True
        return self.is_owned_by(_below_task()) and (self._guest is None or self._guest() in (None, _task()))

    def enter(self) -> Guest | None:
        """Enters the lock again. Returns the guest to pass to :meth:`leave`; ``None`` if the caller is inside already."""
        if self.is_owned_by(caller()) or (self._guest is not None and self._guest() is _task()):
            return None
        self._guest = Guest(caller())
        return self._guest

    def leave(self, guest: Guest) -> None:
        """Records that the guest leaves. If its task has ended, another guest can have entered since, and stays."""
        if self._guest is guest:
            self._guest = None

    def close(self) -> None:
        """Records that the owner leaves, and cancels a guest that is still inside."""
        self.is_open = False
        guest = None if self._guest is None else self._guest()
        if isinstance(guest, asyncio.Task) and not guest.done():
            message = f"{self.guard.name!r} was released by the thread that runs this task"
            loop = guest.get_loop()
            with suppress(RuntimeError):
                # Raised if the loop is closed, and then its tasks do not run any more.
                if loop.is_running():
                    loop.call_soon_threadsafe(guest.cancel, message)
                else:
                    guest.cancel(message)


class EnteredLocks(Generic[T]):
    """The locks that each thread, task or greenlet has entered."""

    def __init__(self, name: str) -> None:
        #: Weak references, so that an entry which a signal's exception left behind keeps no lock.
        self._entered: ContextVar[tuple[weakref.ref[Entry[T]], ...]] = ContextVar(name, default=())

    def _open(self) -> list[Entry[T]]:
        """The open entries of the running context, the innermost last."""
        known = (entry() for entry in self._entered.get())
        return [entry for entry in known if entry is not None and entry.is_open]

    def innermost(self) -> T | None:
        """The value of the lock that the caller entered last; ``None`` outside of any lock."""
        callers = (caller(), _below_task())
        return next((entry.value for entry in reversed(self._open()) if entry.is_owned_by(*callers)), None)

    def find(self, client: Client, lock_names: Container[str]) -> Entry[T] | None:
        """The innermost of these locks that the caller may enter again."""
        for entry in reversed(self._open()):
            is_one = entry.client is client and entry.guard.name in lock_names and entry.guard.is_valid
            if is_one and entry.may_enter():
                return entry
        return None

    @contextmanager
    def entered(self, client: Client, guard: Guard, value: T) -> Iterator[None]:
        """Marks this ``with`` as inside the lock, which the block around it releases."""
        with self._inside(Entry(client, guard, value)):
            yield

    @contextmanager
    def entered_again(self, entry: Entry[T]) -> Iterator[T]:
        """Marks this ``with`` as inside a lock that the caller may enter again. It can end after the block that acquired the
        lock: then :class:`~leasehold._lock.ReleaseIfLast` around it releases the lock."""
        guest = entry.enter()
        try:
            mine = Entry(entry.client, entry.guard, entry.value)
            mine.by_guest = entry.by_guest or guest is not None
            guard = entry.guard
            if not mine.by_guest:
                # A guest does not keep the lock held: it is cancelled when its thread leaves.
                guard._reentered = (*guard._reentered, weakref.ref(mine))
            try:
                with self._inside(mine):
                    yield entry.value
            finally:
                guard._reentered = tuple(block for block in guard._reentered if block() not in (None, mine))
        finally:
            if guest is not None:
                entry.leave(guest)

    @contextmanager
    def _inside(self, mine: Entry[T]) -> Iterator[None]:
        self._entered.set(tuple(map(weakref.ref, (*self._open(), mine))))
        try:
            yield
        finally:
            mine.close()
            # Only this entry is removed, because a block that entered after it can still be open. In another context, in which
            # a framework ends a generator, it is not found.
            self._entered.set(tuple(weakref.ref(entry) for entry in self._open() if entry is not mine))

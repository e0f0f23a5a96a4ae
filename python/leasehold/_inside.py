"""Which locks the running thread, asyncio task or greenlet is inside of.

Being inside belongs to the thread, task or greenlet that entered. A context variable alone cannot say that:
``asyncio.create_task``, ``asyncio.to_thread`` and ``gevent.spawn`` copy the context, and the copy outlives the lock. The
owner alone cannot say it either: a thread of a pool runs other work while a generator that entered there is suspended.
So both have to match.

An event loop that runs inside a lock (``with gpu.hold(0): asyncio.run(main())``) blocks the thread that holds it. Its
tasks may enter the thread's lock again, one at a time. A task that is still inside when the thread leaves is cancelled:
the loop may run again later, without the lock.
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
    """Identifies a thread. A thread's number is reused when it ends; this is not."""

    __slots__ = ("__weakref__",)


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()


def here() -> object:
    """The asyncio task that runs, else the greenlet, else the thread."""
    task = _task()
    return _below() if task is None else task


def _task() -> object | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        # No event loop runs here.
        return None


def _below() -> object:
    """The greenlet or thread that runs, and with it the event loop of a task."""
    getcurrent = getattr(sys.modules.get("greenlet"), "getcurrent", None)
    greenlet = None if getcurrent is None else getcurrent()
    # A thread's first greenlet is the thread: the library may be loaded while the thread is inside.
    return _local.thread if greenlet is None or greenlet.parent is None else greenlet


class Guest(weakref.ref[Any]):
    """A task that has entered its thread's lock again."""

    __slots__ = ()


class Entry(Generic[T]):
    """One lock that was entered: by whom, and what is known inside."""

    __slots__ = ("_guest", "_owner", "client", "guard", "is_guests", "is_open", "value", "__weakref__")

    def __init__(self, client: Client, guard: Guard, value: T) -> None:
        self.client = client
        self.guard = guard
        self.value = value
        self.is_open = True
        self.is_guests = False
        self._owner: Callable[[], object | None] = weakref.ref(here())
        self._guest: Guest | None = None

    def is_for(self, *who: object) -> bool:
        """Whether one of these entered, in this process, and has not left."""
        owner = self._owner()
        # A forked child runs on in the thread that entered, but the lease is its parent's.
        return self.is_open and self.guard._native.loss != "forked" and any(one is owner for one in who)

    def may_enter(self) -> bool:
        """Whether the caller is inside of it, or is a task of the loop that its owner runs and the only one there."""
        return self.is_for(here()) or (self.is_for(_below()) and (self._guest is None or self._guest() in (None, _task())))

    def enter(self) -> Guest | None:
        """Enters it again. Returns the guest that has to leave; ``None`` where the caller is inside already."""
        if self.is_for(here()) or (self._guest is not None and self._guest() is _task()):
            return None
        self._guest = Guest(here())
        return self._guest

    def leave(self, guest: Guest) -> None:
        """The guest leaves. Another one may have entered since: a task that has ended is no longer inside."""
        if self._guest is guest:
            self._guest = None

    def close(self) -> None:
        """The owner leaves, and a task that is still inside is cancelled."""
        self.is_open = False
        guest = None if self._guest is None else self._guest()
        if isinstance(guest, asyncio.Task) and not guest.done():
            message = f"{self.guard.name!r} was released by the thread that runs this task"
            loop = guest.get_loop()
            with suppress(RuntimeError):
                # The loop is closed: its tasks take no further step.
                if loop.is_running():
                    loop.call_soon_threadsafe(guest.cancel, message)
                else:
                    guest.cancel(message)


class Inside(Generic[T]):
    """The locks that each thread, task or greenlet is inside of."""

    def __init__(self, name: str) -> None:
        #: Weakly: what a signal's exception left behind is not inside, and keeps no lock.
        self._entered: ContextVar[tuple[weakref.ref[Entry[T]], ...]] = ContextVar(name, default=())

    def _open(self) -> list[Entry[T]]:
        """The blocks of the running context, the innermost last."""
        known = (entry() for entry in self._entered.get())
        return [entry for entry in known if entry is not None and entry.is_open]

    def innermost(self) -> T | None:
        """What is known inside of the lock that was entered last; ``None`` outside of any."""
        who = (here(), _below())
        return next((entry.value for entry in reversed(self._open()) if entry.is_for(*who)), None)

    def find(self, client: Client, lock_names: Container[str]) -> Entry[T] | None:
        """The innermost of these locks that the caller may enter again."""
        for entry in reversed(self._open()):
            is_one = entry.client is client and entry.guard.name in lock_names and entry.guard.is_valid
            if is_one and entry.may_enter():
                return entry
        return None

    @contextmanager
    def entered(self, client: Client, guard: Guard, value: T) -> Iterator[None]:
        """What the caller runs in this ``with`` runs inside of the lock, which the block around it releases."""
        with self._inside(Entry(client, guard, value)):
            yield

    @contextmanager
    def entered_again(self, entry: Entry[T]) -> Iterator[T]:
        """What the caller runs in this ``with`` runs inside of a lock that it may enter again. It may end after the block that
        acquired the lock: then :class:`~leasehold._lock.Last` around it releases the lock."""
        guest = entry.enter()
        try:
            mine = Entry(entry.client, entry.guard, entry.value)
            mine.is_guests = entry.is_guests or guest is not None
            guard = entry.guard
            if not mine.is_guests:
                # A guest keeps no lock: it is cancelled when its thread leaves.
                guard._again = (*guard._again, weakref.ref(mine))
            try:
                with self._inside(mine):
                    yield entry.value
            finally:
                guard._again = tuple(block for block in guard._again if block() not in (None, mine))
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
            # Only this one: a block that entered after it can still be open. In another context, where frameworks end
            # generators, it is not found.
            self._entered.set(tuple(weakref.ref(entry) for entry in self._open() if entry is not mine))

"""Which locks the running thread, asyncio task or greenlet is inside of.

Being inside belongs to the thread, task or greenlet that entered. A context variable alone cannot say that:
``asyncio.create_task``, ``asyncio.to_thread`` and ``gevent.spawn`` copy the context, and the copy outlives the lock. The
owner alone cannot say it either: a thread of a pool runs other work while a generator that entered there is suspended.
So both have to match.

An event loop that runs inside a lock (``with gpu.hold(0): asyncio.run(main())``) blocks the thread that holds it. Its
tasks may enter the thread's lock again, one at a time.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
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


class Entry(Generic[T]):
    """One lock that was entered: by whom, and what is known inside."""

    __slots__ = ("_guest", "_owner", "client", "guard", "is_open", "value")

    def __init__(self, client: Client, guard: Guard, value: T) -> None:
        self.client = client
        self.guard = guard
        self.value = value
        self.is_open = True
        self._owner: Callable[[], object | None] = weakref.ref(here())
        #: The task that has entered a thread's lock again.
        self._guest: Callable[[], object | None] | None = None

    def is_for(self, *who: object) -> bool:
        """Whether one of these entered, and has not left."""
        owner = self._owner()
        return self.is_open and any(one is owner for one in who)

    def may_enter(self) -> bool:
        """Whether the caller is inside of it, or is a task of the loop that its owner runs and the only one there."""
        return self.is_for(here()) or (self.is_for(_below()) and (self._guest is None or self._guest() in (None, _task())))

    def enter(self) -> bool:
        """Enters it again. ``True``: as the guest, who says when it leaves."""
        if self.is_for(here()) or (self._guest is not None and self._guest() is _task()):
            return False
        self._guest = weakref.ref(here())
        return True

    def leave(self) -> None:
        """The guest leaves."""
        self._guest = None


class Inside(Generic[T]):
    """The locks that each thread, task or greenlet is inside of."""

    def __init__(self, name: str) -> None:
        self._entered: ContextVar[tuple[Entry[T], ...]] = ContextVar(name, default=())

    def innermost(self) -> T | None:
        """What is known inside of the lock that was entered last; ``None`` outside of any."""
        who = (here(), _below())
        return next((entry.value for entry in reversed(self._entered.get()) if entry.is_for(*who)), None)

    def find(self, client: Client, lock_names: Container[str]) -> Entry[T] | None:
        """The innermost of these locks that the caller may enter again."""
        for entry in reversed(self._entered.get()):
            is_one = entry.client is client and entry.guard.name in lock_names and entry.guard.is_valid
            if is_one and entry.may_enter():
                return entry
        return None

    @contextmanager
    def entered(self, client: Client, guard: Guard, value: T) -> Iterator[None]:
        """What the caller runs in this ``with`` runs inside of the lock."""
        mine = Entry(client, guard, value)
        # Without what was left, also what a signal's exception left behind.
        around = (entry for entry in self._entered.get() if entry.is_open and entry.guard._native.is_held)
        before = self._entered.set((*around, mine))
        try:
            yield
        finally:
            mine.is_open = False
            try:
                self._entered.reset(before)
            except ValueError:
                # A framework ends a generator in another context than it began in: that one is not inside.
                pass

    @contextmanager
    def entered_again(self, entry: Entry[T]) -> Iterator[T]:
        """The same of a lock that the caller may enter again."""
        is_guest = entry.enter()
        try:
            with self.entered(entry.client, entry.guard, entry.value):
                yield entry.value
        finally:
            if is_guest:
                entry.leave()

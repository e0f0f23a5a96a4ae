"""Waiting for an answer: in a thread, in asyncio, in a greenlet.

Native code does the work in all three, without the interpreter's lock and without running any Python code: in the
thread that waits, or in one of its own, which tells an event loop by a descriptor that becomes readable.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ._ending import stay_where_the_process_ends
from ._errors import ClientClosed
from ._log import see_to_lines
from ._native import Call, Mailbox, after_fork_in_child, after_fork_in_parent, before_fork

os.register_at_fork(
    before=before_fork,
    after_in_parent=after_fork_in_parent,
    after_in_child=after_fork_in_child,
)


def wait(call: Call) -> Any:
    """Waits in this thread; under gevent and eventlet in this greenlet, while others go on."""
    if "gevent" in sys.modules or "eventlet" in sys.modules:
        see_to_lines()
        readable = _green_wait()
        if readable is not None:
            return _wait_for_fd(call, readable)
    try:
        return call.wait()
    except ClientClosed:
        stay_where_the_process_ends()
        raise


async def wait_async(call: Call) -> Any:
    """Waits in this task. Cancelled, it keeps nothing: a lock that was granted is given back. A release goes on without
    the task."""
    loop = asyncio.get_running_loop()
    letters = Letters.of(loop)
    future = loop.create_future()

    def answered() -> None:
        if not future.done():
            future.set_result(None)

    ticket = letters.ask(call, answered)
    try:
        await future
    except BaseException:
        letters.forget(ticket)
        call.cancel()
        raise
    try:
        return call.result()
    except ClientClosed:
        stay_where_the_process_ends()
        raise


class Letters:
    """The mailbox of one event loop."""

    _of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Letters] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pid = os.getpid()
        self._mailbox = Mailbox()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._last = 0
        # The loop holds the mailbox, and not the other way round: they go together.
        loop.add_reader(self._mailbox.fileno(), self._collect)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Letters:
        letters = cls._of_loop.get(loop)
        if letters is None or letters._pid != os.getpid():
            letters = cls._of_loop[loop] = cls(loop)
        return letters

    def ask(self, call: Call, answered: Callable[[], None]) -> int:
        """Starts the call; `answered` runs in the loop when the answer is there. Returns its ticket."""
        see_to_lines()
        self._last = ticket = self._last + 1
        self._callbacks[ticket] = answered
        call.start(self._mailbox, ticket)
        return ticket

    def forget(self, ticket: int) -> None:
        """Nobody waits for it any more."""
        self._callbacks.pop(ticket, None)

    def _collect(self) -> None:
        for ticket in self._mailbox.collect():
            answered = self._callbacks.pop(ticket, None)
            if answered is not None:
                answered()


def _wait_for_fd(call: Call, readable: Callable[[int], None]) -> Any:
    mailbox = Mailbox()
    call.start(mailbox, 0)
    try:
        readable(mailbox.fileno())
    except BaseException:
        # The greenlet was killed, or its time is over.
        call.cancel()
        raise
    return call.result()


def _green_wait() -> Callable[[int], None] | None:
    """How this greenlet waits for a descriptor; ``None`` in a thread without greenlets.

    Where nothing was ever spawned there is no hub, and nobody else to let run.
    """
    if "gevent" in sys.modules:
        readable = _gevent_wait()
        if readable is not None:
            return readable
    if "eventlet" in sys.modules:
        return _eventlet_wait()
    return None


def _gevent_wait() -> Callable[[int], None] | None:
    # Nothing is imported: in a child that was forked while another thread imported it, that waits for ever.
    get_hub = getattr(sys.modules.get("gevent._hub_local"), "get_hub_if_exists", None)
    getcurrent = getattr(sys.modules.get("greenlet"), "getcurrent", None)
    if get_hub is None or getcurrent is None:
        return None
    hub = get_hub()
    if hub is None or getcurrent() is hub:
        return None

    def readable(fd: int) -> None:
        watcher = hub.loop.io(fd, 1)
        try:
            hub.wait(watcher)
        finally:
            watcher.close()

    return readable


def _eventlet_wait() -> Callable[[int], None] | None:
    hubs: Any = sys.modules.get("eventlet.hubs")
    getcurrent = getattr(sys.modules.get("greenlet"), "getcurrent", None)
    hub = getattr(getattr(hubs, "_threadlocal", None), "hub", None)
    if hub is None or getcurrent is None or getcurrent() is hub.greenlet:
        return None

    def readable(fd: int) -> None:
        hubs.trampoline(fd, read=True)

    return readable

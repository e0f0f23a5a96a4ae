"""Waiting for an answer: in a thread, in asyncio, in a greenlet.

Native code sends the request and receives the answer, without the GIL and without Python code: in the thread that waits, or in
a native thread, which notifies an event loop by a descriptor that becomes readable.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ._exit import block_during_exit
from ._errors import ClientClosed
from ._log import start_greenlet_if_needed
from ._native import Call, Mailbox, after_fork_in_child, after_fork_in_parent, before_fork

os.register_at_fork(
    before=before_fork,
    after_in_parent=after_fork_in_parent,
    after_in_child=after_fork_in_child,
)


def wait(call: Call) -> Any:
    """Waits in this thread; under gevent and eventlet in this greenlet, while other greenlets run."""
    if "gevent" in sys.modules or "eventlet" in sys.modules:
        start_greenlet_if_needed()
        readable = _green_wait()
        if readable is not None:
            return _wait_for_fd(call, readable)
    try:
        return call.wait()
    except ClientClosed:
        block_during_exit()
        raise


async def wait_async(call: Call) -> Any:
    """Waits in this task. A cancelled call keeps nothing: a granted lock is released. A release goes on even if the task is
    cancelled."""
    loop = asyncio.get_running_loop()
    mailbox = LoopMailbox.of(loop)
    future = loop.create_future()

    def answered() -> None:
        if not future.done():
            future.set_result(None)

    call_id = mailbox.start(call, answered)
    try:
        await future
    except BaseException:
        mailbox.forget(call_id)
        call.cancel()
        raise
    try:
        return call.result()
    except ClientClosed:
        block_during_exit()
        raise


class LoopMailbox:
    """The mailbox of one event loop, with a callback for each call."""

    _of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pid = os.getpid()
        self._mailbox = Mailbox()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._last = 0
        # The loop refers to the mailbox, not the other way round, so both are freed together.
        loop.add_reader(self._mailbox.fileno(), self._collect)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopMailbox:
        mailbox = cls._of_loop.get(loop)
        if mailbox is None or mailbox._pid != os.getpid():
            mailbox = cls._of_loop[loop] = cls(loop)
        return mailbox

    def start(self, call: Call, answered: Callable[[], None]) -> int:
        """Starts the call, and runs `answered` in the loop when the answer is there. Returns an id for :meth:`forget`."""
        start_greenlet_if_needed()
        self._last = call_id = self._last + 1
        self._callbacks[call_id] = answered
        call.start(self._mailbox, call_id)
        return call_id

    def forget(self, call_id: int) -> None:
        """Drops the callback of a call."""
        self._callbacks.pop(call_id, None)

    def _collect(self) -> None:
        for call_id in self._mailbox.collect():
            answered = self._callbacks.pop(call_id, None)
            if answered is not None:
                answered()


def _wait_for_fd(call: Call, readable: Callable[[int], None]) -> Any:
    mailbox = Mailbox()
    call.start(mailbox, 0)
    try:
        readable(mailbox.fileno())
    except BaseException:
        # The greenlet was killed, or a timeout ended its wait.
        call.cancel()
        raise
    return call.result()


def _green_wait() -> Callable[[int], None] | None:
    """A function with which this greenlet waits for a descriptor; ``None`` in a thread without greenlets.

    A thread that never spawned a greenlet has no hub, and no other greenlet to run meanwhile.
    """
    if "gevent" in sys.modules:
        readable = _gevent_wait()
        if readable is not None:
            return readable
    if "eventlet" in sys.modules:
        return _eventlet_wait()
    return None


def _gevent_wait() -> Callable[[int], None] | None:
    # No import: it would block for ever in a child that was forked while another thread held the import lock.
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

"""Passes the log messages of the native module to :mod:`logging`.

Without greenlets, a native thread calls ``logging`` itself. After monkey-patching it must not: the locks and sockets of the
program's handlers belong to greenlets then, and a second thread that uses them blocks the whole program. There the native
thread only queues its messages, and a greenlet of the program logs them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from typing import Any

from . import _native

log = logging.getLogger("leasehold")

#: How many messages the queue holds. Messages beyond that are counted and dropped.
MAX_QUEUED = 1000

#: Log handlers belong to greenlets if any of these modules is patched.
_PATCHED = ("thread", "threading", "_thread", "socket", "ssl", "select", "time", "os", "queue")


class _Queue:
    """The queued messages, and the greenlet that logs them."""

    def __init__(self) -> None:
        self.messages: deque[tuple[int, str]] = deque()
        self.dropped = 0
        #: Becomes readable with the first message. -1 while no greenlet waits for it.
        self.fd = -1
        self._greenlet: Any = None
        #: Identifies the greenlet that was started last.
        self._newest: object = None
        self._thread = 0

    def add(self, level: int, text: str) -> None:
        """Queues a message. It never waits, and uses nothing that monkey-patching replaces."""
        if len(self.messages) < MAX_QUEUED:
            self.messages.append((level, text))
        else:
            self.dropped += 1
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def log(self) -> None:
        """Logs the queued messages in the calling thread."""
        while True:
            try:
                level, text = self.messages.popleft()
            except IndexError:
                break
            with contextlib.suppress(Exception):
                log.log(level, "%s", text)
        dropped, self.dropped = self.dropped, 0
        if dropped:
            log.warning("%d messages were not logged: they came faster than the handlers could log them", dropped)

    def has_greenlet(self) -> bool:
        """Whether a greenlet of the right thread logs the messages. That is the main thread, once it uses leasehold: another
        thread can end, or never run its hub again."""
        if self._greenlet is None or self._greenlet.dead:
            return False
        here, main = threading.get_native_id(), os.getpid()
        if self._thread in (here, main):
            return True
        return here != main and (not self.messages or os.path.exists(f"/proc/self/task/{self._thread}"))

    def start_greenlet(self, spawn: Any, wait_readable: Any) -> None:
        """Starts the greenlet in this thread."""
        if self.fd < 0:
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

        me = object()

        def log_messages() -> None:
            self.log()
            while True:
                wait_readable(self.fd)
                if self is not _queue or self._newest is not me:
                    # This is a forked child, and its parent waits for the descriptor; or another greenlet took over.
                    return
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.fd)
                self.log()

        self._thread, self._newest = threading.get_native_id(), me
        self._greenlet = spawn(log_messages)


_queue = _Queue()
_green = False


def is_green() -> bool:
    """Whether gevent or eventlet has patched a module that log handlers use. It imports nothing, because another thread may
    hold the import lock."""
    global _green
    if not _green:
        gevent = getattr(sys.modules.get("gevent.monkey"), "is_module_patched", None)
        eventlet = getattr(sys.modules.get("eventlet.patcher"), "is_monkey_patched", None)
        _green = any(is_patched is not None and is_patched(name) for is_patched in (gevent, eventlet) for name in _PATCHED)
    return _green


def start_greenlet_if_needed() -> None:
    """Makes sure that a greenlet logs the messages after monkey-patching: in the main thread if that uses leasehold, until
    then in another thread that does and has a hub."""
    if not is_green() or _queue.has_greenlet():
        return
    is_main = threading.get_native_id() == os.getpid()
    for library in (_gevent, _eventlet):
        functions = library(create=is_main)
        if functions is not None:
            _queue.start_greenlet(*functions)
            return


def _gevent(*, create: bool) -> tuple[Any, Any] | None:
    gevent, local = sys.modules.get("gevent"), sys.modules.get("gevent._hub_local")
    spawn, get_hub = getattr(gevent, "spawn", None), getattr(local, "get_hub_if_exists", None)
    patched = getattr(sys.modules.get("gevent.monkey"), "saved", None)
    if spawn is None or get_hub is None or not patched:
        return None
    hub = get_hub() or (gevent.get_hub() if create and gevent is not None else None)
    if hub is None:
        return None

    def wait_readable(fd: int) -> None:
        # Without a reference the watcher neither keeps the program running nor hides a deadlock from gevent.
        watcher = hub.loop.io(fd, 1, ref=False)
        try:
            hub.wait(watcher)
        finally:
            watcher.close()

    return spawn, wait_readable


def _eventlet(*, create: bool) -> tuple[Any, Any] | None:
    eventlet, hubs = sys.modules.get("eventlet"), sys.modules.get("eventlet.hubs")
    spawn, trampoline = getattr(eventlet, "spawn", None), getattr(hubs, "trampoline", None)
    if hubs is None or spawn is None or trampoline is None:
        return None
    if not create and getattr(hubs._threadlocal, "hub", None) is None:
        return None
    return spawn, lambda fd: trampoline(fd, read=True)


def _on_message(level: int, text: str) -> None:
    """Logs or queues a message. The native thread calls it."""
    if is_green():
        _queue.add(level, text)
    else:
        log.log(level, "%s", text)


def end() -> None:
    """Logs the remaining messages, in the thread that ends the process."""
    _native.end_log()
    _queue.log()


def _forked() -> None:
    """Drops the parent's messages, which the parent logs."""
    global _queue
    _queue = _Queue()


os.register_at_fork(after_in_child=_forked)
_native.begin_log(_on_message)

"""What the native half has to say, passed on to :mod:`logging`.

A native thread reports it, and without greenlets that thread calls ``logging`` itself. After monkey-patching it must
not: the locks and sockets of the program's handlers belong to greenlets, and a second thread at one of them stops
the whole program. There the native thread only queues its lines, and a greenlet of the program's own thread logs them.
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

#: As many lines wait for the program's thread at most; the rest is counted.
MOST_LINES = 1000

#: A module of these that is patched makes a handler one for greenlets.
_PATCHED = ("thread", "threading", "_thread", "socket", "ssl", "select", "time", "os", "queue")


class _Lines:
    """The lines that wait, and the greenlet that logs them."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, str]] = deque()
        self.lost = 0
        #: Becomes readable with the first line. -1 while no greenlet waits for it.
        self.fd = -1
        self._pump: Any = None
        #: Identifies the greenlet that was started last.
        self._newest: object = None
        self._thread = 0

    def add(self, level: int, text: str) -> None:
        """Never waits, and uses nothing that monkey-patching replaces."""
        if len(self.waiting) < MOST_LINES:
            self.waiting.append((level, text))
        else:
            self.lost += 1
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def log(self) -> None:
        """Logs them, in the calling thread."""
        while True:
            try:
                level, text = self.waiting.popleft()
            except IndexError:
                break
            with contextlib.suppress(Exception):
                log.log(level, "%s", text)
        lost, self.lost = self.lost, 0
        if lost:
            log.warning("%d lines were not logged: they came faster than the handlers took them", lost)

    def is_seen_to(self) -> bool:
        """Whether the right greenlet waits for them. That is one of the main thread, once the main thread uses leasehold:
        any other thread may end, or never run its hub again."""
        if self._pump is None or self._pump.dead:
            return False
        here, main = threading.get_native_id(), os.getpid()
        if self._thread in (here, main):
            return True
        return here != main and (not self.waiting or os.path.exists(f"/proc/self/task/{self._thread}"))

    def begin(self, spawn: Any, readable: Any) -> None:
        """Starts that greenlet in this thread."""
        if self.fd < 0:
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

        me = object()

        def pump() -> None:
            self.log()
            while True:
                readable(self.fd)
                if self is not _lines or self._newest is not me:
                    # A forked child, whose parent waits for this descriptor; or another thread does by now.
                    return
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.fd)
                self.log()

        self._thread, self._newest = threading.get_native_id(), me
        self._pump = spawn(pump)


_lines = _Lines()
_green = False


def is_green() -> bool:
    """Whether gevent or eventlet has patched what handlers use. Nothing is imported: another thread may be at it."""
    global _green
    if not _green:
        gevent = getattr(sys.modules.get("gevent.monkey"), "is_module_patched", None)
        eventlet = getattr(sys.modules.get("eventlet.patcher"), "is_monkey_patched", None)
        _green = any(is_patched is not None and is_patched(name) for is_patched in (gevent, eventlet) for name in _PATCHED)
    return _green


def see_to_lines() -> None:
    """Makes sure that a greenlet logs the lines, where handlers are for greenlets: in the main thread if it uses leasehold,
    until then in another one with a hub that does."""
    if not is_green() or _lines.is_seen_to():
        return
    is_main = threading.get_native_id() == os.getpid()
    for how in (_gevent, _eventlet):
        found = how(create=is_main)
        if found is not None:
            _lines.begin(*found)
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

    def readable(fd: int) -> None:
        # It keeps no program from ending, and hides no deadlock.
        watcher = hub.loop.io(fd, 1, ref=False)
        try:
            hub.wait(watcher)
        finally:
            watcher.close()

    return spawn, readable


def _eventlet(*, create: bool) -> tuple[Any, Any] | None:
    eventlet, hubs = sys.modules.get("eventlet"), sys.modules.get("eventlet.hubs")
    spawn, trampoline = getattr(eventlet, "spawn", None), getattr(hubs, "trampoline", None)
    if hubs is None or spawn is None or trampoline is None:
        return None
    if not create and getattr(hubs._threadlocal, "hub", None) is None:
        return None
    return spawn, lambda fd: trampoline(fd, read=True)


def _say(level: int, text: str) -> None:
    """Called by the native thread."""
    if is_green():
        _lines.add(level, text)
    else:
        log.log(level, "%s", text)


def end() -> None:
    """Logs what is left: this process is about to end, and the calling thread ends it."""
    _native.end_log()
    _lines.log()


def _forked() -> None:
    """What the parent has to say, the parent says."""
    global _lines
    _lines = _Lines()


os.register_at_fork(after_in_child=_forked)
_native.begin_log(_say)

"""Locked tasks in the main process of a worker, which outlives its pool processes."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import Any

from celery.worker.request import Request

log = logging.getLogger("leasehold")

#: How long to wait for a process that was told to end, in seconds. After that its lock ends with its lease.
EXIT_TIMEOUT = 60.0
#: How often to check whether a process has ended, in seconds, on systems without pidfds.
POLL_INTERVAL = 0.05
#: The highest process id. Pools of greenlets use higher numbers.
MAX_PID = 2**31 - 1


class LockedRequest(Request):  # type: ignore[misc]
    """A delivery of a locked task. When its pool process has ended (killed, out of memory, hard time limit), the locks that it
    held for the task are released; not before, because it may still be working."""

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        # A task that failed normally has released its lock itself, and is reported with `return_ok`.
        if not return_ok:
            try:
                self._release_lock()
            except Exception as problem:
                log.error("the lock of %s[%s] ends with its lease: %s", self.name, self.id, problem, exc_info=True)
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def _release_lock(self) -> None:
        pid = self.worker_pid
        if pid is None or pid > MAX_PID or pid == os.getpid():
            return
        if wait_until_gone(pid, 0):
            # Not in a thread: the message may be delivered again as soon as this returns.
            self._release(pid)
        else:
            threading.Thread(target=self._release_when_gone, args=(pid,), daemon=True).start()

    def _release_when_gone(self, pid: int) -> None:
        if wait_until_gone(pid, EXIT_TIMEOUT):
            self._release(pid)

    def _release(self, pid: int) -> None:
        try:
            self.task.release_after_death(pid, self.id, tuple(self.args), self.kwargs)
        except Exception as problem:
            log.warning("the lock of %s[%s] ends with its lease: %s", self.name, self.id, problem)


def wait_until_gone(pid: int, within: float) -> bool:
    """Waits until a child has ended, for at most `within` seconds, and returns whether it has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return _poll_until_gone(pid, within)
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(within * 1000))
    finally:
        os.close(process)


def _poll_until_gone(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_INTERVAL)

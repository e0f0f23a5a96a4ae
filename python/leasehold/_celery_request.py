"""The worker's side of locked tasks: its main process, which outlives those of the pool."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import Any

from celery.worker.request import Request

log = logging.getLogger("leasehold")

#: A process that was told to end and has not after so long is left to its lease.
GONE_WITHIN = 60.0
#: Where the system cannot tell when a process is gone, it is asked this often.
ASK_EVERY = 0.05
#: What is no process id: pools of greenlets number theirs otherwise.
MAX_PID = 2**31 - 1


class LockedRequest(Request):  # type: ignore[misc]
    """A delivery of a locked task. When its pool process is gone (killed, out of memory, over a hard time limit),
    what it held for the task is given back: not before, because until then it may be at work."""

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        # A task that failed by itself has given everything back by itself: `return_ok` tells them apart.
        if not return_ok:
            try:
                self._give_back()
            except Exception as problem:
                log.error("the lock of %s[%s] is left to its lease: %s", self.name, self.id, problem, exc_info=True)
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def _give_back(self) -> None:
        pid = self.worker_pid
        if pid is None or pid > MAX_PID or pid == os.getpid():
            return
        if wait_until_gone(pid, 0):
            # At once: the message may be delivered again before this returns.
            self._release(pid)
        else:
            threading.Thread(target=self._release_when_gone, args=(pid,), daemon=True).start()

    def _release_when_gone(self, pid: int) -> None:
        if wait_until_gone(pid, GONE_WITHIN):
            self._release(pid)

    def _release(self, pid: int) -> None:
        try:
            self.task.release_after_death(pid, self.id, tuple(self.args), self.kwargs)
        except Exception as problem:
            log.warning("the lock of %s[%s] is left to its lease: %s", self.name, self.id, problem)


def wait_until_gone(pid: int, within: float) -> bool:
    """Whether a child has ended, at the latest after so many seconds."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return _ask_until_gone(pid, within)
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(within * 1000))
    finally:
        os.close(process)


def _ask_until_gone(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(ASK_EVERY)

"""The end of a process: what is done last, and what becomes of threads that are still at it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

#: The thread that ends this process, once one does.
_ending: int | None = None


def at_the_end(give_back: Callable[[], None]) -> Callable[[], None]:
    """Calls a function when this process ends, also where that is a child of :mod:`multiprocessing`, which knows nothing of
    `atexit`."""
    told: list[object] = []

    def tell_multiprocessing() -> None:
        util = sys.modules.get("multiprocessing.util")
        if util is not None and util not in told:
            told.append(util)
            util.register_after_fork(give_back, in_child)

    def in_child(_: object) -> None:
        # The least of all priorities: after whatever else the child leaves to its end.
        sys.modules["multiprocessing.util"].Finalize(None, after_its_threads, exitpriority=-1000)

    def after_its_threads() -> None:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        give_back()

    atexit.register(give_back)
    # A forkserver's child has forked already; in others it may be imported between now and then.
    tell_multiprocessing()
    os.register_at_fork(before=tell_multiprocessing)
    return give_back


def process_ends() -> None:
    """The calling thread is about to end it: of the others only daemons are left."""
    global _ending
    _ending = threading.get_ident()


def stay_where_the_process_ends() -> None:
    """A daemon thread whose call is over because its process is goes no further, as it would anywhere else in Python. What
    it were to raise, nobody waits for: it would only be printed."""
    while _ending is not None and _ending != threading.get_ident():
        time.sleep(1)

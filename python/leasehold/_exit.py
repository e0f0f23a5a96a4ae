"""The end of a process: the function that runs last, and daemon threads that are still in a call."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

#: The thread that ends this process; ``None`` until it does.
_exiting_thread: int | None = None


def run_at_exit(clean_up: Callable[[], None]) -> Callable[[], None]:
    """Calls a function when this process ends, including children of :mod:`multiprocessing`, which do not run `atexit`."""
    registered: list[object] = []

    def register_with_multiprocessing() -> None:
        util = sys.modules.get("multiprocessing.util")
        if util is not None and util not in registered:
            registered.append(util)
            util.register_after_fork(clean_up, in_child)

    def in_child(_: object) -> None:
        # The lowest priority: after every other finalizer of the child.
        sys.modules["multiprocessing.util"].Finalize(None, after_other_threads, exitpriority=-1000)

    def after_other_threads() -> None:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        clean_up()

    atexit.register(clean_up)
    # A child of a forkserver has forked already. Other programs may import multiprocessing later, but before they fork.
    register_with_multiprocessing()
    os.register_at_fork(before=register_with_multiprocessing)
    return clean_up


def begin_exit() -> None:
    """Records that the calling thread is ending the process. The only other threads left are daemons."""
    global _exiting_thread
    _exiting_thread = threading.get_ident()


def block_during_exit() -> None:
    """Blocks a daemon thread whose call failed because its process is ending, as Python does with daemon threads. An exception
    would only be printed: no code is left to catch it."""
    while _exiting_thread is not None and _exiting_thread != threading.get_ident():
        time.sleep(1)

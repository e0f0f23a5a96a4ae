"""Blocks: many share one object, they end in any order, and signals arrive at their edges."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import SOON, until

import leasehold
from leasehold import Client, _task_settings, gpu, task_lock
from leasehold._gpu_settings import _configured
from leasehold.task_lock import task_lock_context


class Interrupted(KeyboardInterrupt):
    """An exception of a signal handler, such as Ctrl-C or the time limit of a task."""


class Interrupting:
    """Raises before a line of the package, or after one of its ``__enter__`` has returned."""

    def __init__(self, step: int) -> None:
        self.left = step
        self._package = str(Path(leasehold.__file__).parent)

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        sys.settrace(None)
        return isinstance(error, Interrupted)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        entered = event == "return" and frame.f_code.co_name in ("__enter__", "__aenter__")
        if frame.f_code.co_filename.startswith(self._package) and (entered or event in ("call", "line")):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise Interrupted
        return self._trace


def every_block(client: Client) -> dict[str, Callable[[], Any]]:
    """All kinds of objects for a ``with``, made for each block or shared by all."""

    @contextmanager
    def gpu_again() -> Iterator[None]:
        with gpu.hold(0, max_wait_time=SOON), gpu.hold(0, max_wait_time=SOON):
            yield

    anew: dict[str, Callable[[], Any]] = {
        "lock": lambda: client.lock("a", wait=SOON),
        "pool": lambda: client.pool("a", [0]).acquire(wait=SOON),
        "task": lambda: task_lock_context("task_lock:a", wait=SOON),
        "gpu": lambda: gpu.hold(0, max_wait_time=SOON),
        "gpu again": gpu_again,
    }
    lock, pool, task = anew["lock"](), anew["pool"](), anew["task"]()
    return {**anew, "one lock": lambda: lock, "one pool": lambda: pool, "one task": lambda: task}


@pytest.fixture
def own_client() -> Iterator[Client]:
    """A client that task locks and GPU locks use, too."""
    with leasehold.connect("memory:") as client:
        gpu.configure(client)
        task_lock.configure(client=client)
        yield client
    _configured.__init__()  # type: ignore[misc]
    _task_settings._settings = None


# Python swallows an exception that is raised while it closes a generator.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("block", ["lock", "pool", "task", "gpu", "gpu again", "one lock", "one pool", "one task"])
def test_a_signal_between_any_two_lines_leaves_no_lock_behind(own_client: Client, block: str) -> None:
    enter = every_block(own_client)[block]

    def interrupted_at(step: int) -> bool:
        interrupting = Interrupting(step)
        with enter():
            pass
        with interrupting:
            with enter():
                pass
        return interrupting.left < 0

    step = 0
    while interrupted_at(step):
        until(lambda: own_client.locks() == [])
        assert leasehold.current_fence() is None
        step += 1
    assert step > 20, "it was interrupted where it matters"


@pytest.mark.parametrize("block", ["lock", "one lock", "one pool", "one task"])
def test_a_signal_in_a_task_leaves_no_lock_behind(own_client: Client, block: str) -> None:
    enter = every_block(own_client)[block]

    async def work() -> None:
        async with enter():
            pass

    def interrupted_at(step: int) -> bool:
        interrupting = Interrupting(step)
        with interrupting:
            asyncio.run(work())
        return interrupting.left < 0

    step = 0
    while interrupted_at(step):
        # The task and its exception refer to each other.
        gc.collect()
        until(lambda: own_client.locks() == [])
        step += 1
    assert step > 20, "it was interrupted where it matters"


def test_each_with_ends_its_own_block(client: Client) -> None:
    lock = client.pool("a", range(9)).acquire()

    def entered() -> Iterator[int]:
        with lock as permit:
            yield permit.index

    first, second = entered(), entered()
    assert (next(first), next(second)) == (0, 1)
    assert next(first, None) is None
    assert [member.lock.held for member in client.pool("a", range(2)).status()] == [False, True]
    assert next(second, None) is None
    assert client.locks() == []


def test_blocks_work_without_a_with(client: Client) -> None:
    lock = client.lock("a", wait=0)
    for leave in (lock.__exit__, partial(type(lock).__exit__, lock), None):
        guard = lock.__enter__()
        assert leasehold.current_fence() == guard.fence
        (leave or lock.__exit__)(None, None, None)
        assert leasehold.current_fence() is None and client.locks() == []
        with pytest.raises(RuntimeError, match="without __enter__"):
            lock.__exit__(None, None, None)
    with ExitStack() as stack:
        guard = stack.enter_context(lock)
        assert leasehold.current_fence() == guard.fence
        with client.lock("b") as inner:
            assert leasehold.current_fence() == inner.fence
        assert leasehold.current_fence() == guard.fence
    assert client.locks() == []
    # Entered in one context and ended in another, as frameworks do.
    contextvars.copy_context().run(lock.__enter__)
    assert client.is_locked("a")
    lock.__exit__(None, None, None)
    assert client.locks() == []


def test_a_block_that_an_exception_keeps_alive_has_ended(client: Client) -> None:
    lock = client.lock("a", wait=0)
    with pytest.raises(ZeroDivisionError) as kept:
        with lock:
            raise ZeroDivisionError
    assert kept.value.__traceback__ is not None
    assert client.locks() == [] and leasehold.current_fence() is None

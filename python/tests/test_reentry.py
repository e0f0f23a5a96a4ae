"""Re-entry: called functions enter a lock again, started tasks and threads do not."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from conftest import run_python

import leasehold
from leasehold import gpu
from leasehold._gpu_settings import _configured
from leasehold.celery import locked_task
from leasehold.gpu import SmartGpuLockManager


@pytest.fixture(autouse=True)
def configured(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[leasehold.Client]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with leasehold.connect(redis_url) as client:
        gpu.configure(client)
        yield client
    _configured.__init__()  # type: ignore[misc]


def enters(wait: float = 0.0) -> bool:
    """Whether the caller can enter the lock of GPU 0."""
    try:
        with gpu.hold(0, max_wait_time=wait):
            return True
    except leasehold.LockNotAcquired:
        return False


async def enters_async(wait: float = 0.0) -> bool:
    try:
        async with gpu.hold_async(0, max_wait_time=wait):
            return True
    except leasehold.LockNotAcquired:
        return False


def acquires_by_name() -> bool:
    return SmartGpuLockManager().acquire_lock("child", "gpu_lock:0", 0)


async def in_a_task(ask: Callable[[], bool]) -> bool:
    async def child() -> bool:
        return ask()

    return await asyncio.create_task(child())


async def in_a_thread(ask: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(ask)


async def in_a_callback(ask: Callable[[], bool]) -> bool:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(lambda: done.set_result(ask()))
    return bool(await done)


@pytest.mark.parametrize("ask", [enters, acquires_by_name, lambda: gpu.current() is not None])
@pytest.mark.parametrize("start", [in_a_task, in_a_thread, in_a_callback])
def test_started_work_is_not_inside(
    start: Callable[[Callable[[], bool]], Coroutine[Any, Any, bool]], ask: Callable[[], bool]
) -> None:
    async def parent() -> bool:
        async with gpu.hold_async(0):
            return await start(ask)

    assert not asyncio.run(parent())


def test_a_task_started_inside_waits_until_its_parent_has_left() -> None:
    inside: list[str] = []

    async def work(who: str) -> None:
        async with gpu.hold_async(0, max_wait_time=10):
            inside.append(who)
            assert inside == [who], "two on one GPU"
            await asyncio.sleep(0.05)
            inside.remove(who)

    async def parent() -> None:
        async with gpu.hold_async(0):
            inside.append("parent")
            children = [asyncio.create_task(work(f"child {i}")) for i in range(3)]
            await asyncio.sleep(0.05)
            inside.remove("parent")
        await asyncio.gather(*children)

    asyncio.run(parent())


def test_called_work_enters_again(configured: leasehold.Client) -> None:
    def steps() -> Iterator[bool]:
        yield enters()
        with gpu.hold(0):
            yield gpu.current() is not None

    async def steps_async() -> AsyncIterator[bool]:
        yield enters()
        yield await enters_async()

    async def called() -> bool:
        return enters() and await enters_async() and all(steps()) and all([step async for step in steps_async()])

    async def parent() -> bool:
        async with gpu.hold_async(0):
            return await called() and await asyncio.wait_for(asyncio.shield(asyncio.sleep(0, True)), 5) and enters()

    assert asyncio.run(parent())
    with gpu.hold(0):
        assert enters() and all(steps())
        assert contextvars.copy_context().run(enters)
        assert acquires_by_name()
    assert not configured.is_locked("gpu_lock:0")


def test_one_task_at_a_time_enters_the_lock_of_its_thread() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def sibling() -> None:
        async with gpu.hold_async(0):
            entered.set()
            await leave.wait()

    async def main() -> tuple[bool, bool, bool]:
        assert gpu.current() is not None
        first = await enters_async()
        other = asyncio.create_task(sibling())
        await entered.wait()
        beside = await enters_async()
        leave.set()
        await other
        return first, beside, await enters_async()

    with gpu.hold(0):
        assert asyncio.run(main()) == (True, False, True)
        assert enters()


def test_a_guest_is_cancelled_when_its_thread_leaves(configured: leasehold.Client) -> None:
    """Each job runs one long-lived loop, so a task that a job left behind continues in the next job."""
    steps: list[str] = []

    async def left_behind(go_on: asyncio.Event) -> None:
        async with gpu.hold_async(0):
            steps.append("inside")
            await go_on.wait()
            steps.append("inside without a lock")

    async def job() -> tuple[asyncio.Task[None], asyncio.Event]:
        go_on = asyncio.Event()
        child = asyncio.create_task(left_behind(go_on))
        while not steps:
            await asyncio.sleep(0)
        return child, go_on

    loop = asyncio.new_event_loop()
    try:
        with gpu.hold(0):
            child, go_on = loop.run_until_complete(job())
            # The next step of the task is due already.
            go_on.set()
        assert not configured.is_locked("gpu_lock:0")
        with pytest.raises(asyncio.CancelledError, match="'gpu_lock:0' was released"):
            loop.run_until_complete(child)
        assert steps == ["inside"]
        steps.clear()
        with gpu.hold(0):
            loop.run_until_complete(job())
            loop.close()
        assert steps == ["inside"]
    finally:
        loop.close()


def test_an_ended_task_does_not_end_another_guest() -> None:
    manager = SmartGpuLockManager()

    async def ends() -> None:
        assert manager.acquire_lock("first", "gpu_lock:0", 0)

    async def main() -> bool:
        await asyncio.create_task(ends())
        gc.collect()
        entered, leave = asyncio.Event(), asyncio.Event()

        async def second() -> None:
            async with gpu.hold_async(0, max_wait_time=0):
                entered.set()
                await leave.wait()

        inside = asyncio.create_task(second())
        await entered.wait()
        assert manager.release_lock("first", "gpu_lock:0")
        beside = await asyncio.create_task(enters_async())
        leave.set()
        await inside
        return beside

    with gpu.hold(0):
        assert not asyncio.run(main()), "two on one GPU"


def test_a_forked_child_is_not_inside() -> None:
    with gpu.hold(0):
        child = os.fork()
        if child == 0:
            os._exit(0 if gpu.current() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert gpu.current() is not None


def test_a_suspended_generator_does_not_put_its_thread_inside() -> None:
    """Web frameworks run dependencies this way: each step in a thread of a pool, in a copy of the context."""

    def dependency() -> Iterator[gpu.Gpu]:
        with gpu.hold(0) as mine:
            yield mine

    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(1) as others:
        run = dependency()
        mine = threads.submit(contextvars.copy_context().run, next, run).result()
        assert not threads.submit(contextvars.copy_context().run, enters).result()
        assert mine.guard.is_valid
        # It ends in another thread and context than it started in.
        assert others.submit(contextvars.copy_context().run, lambda: list(run)).result() == []
        assert not mine.guard.is_valid
        assert threads.submit(enters).result()


def is_held_elsewhere(client: leasehold.Client) -> bool:
    """Whether the lock is held, and the caller is inside."""
    mine = gpu.current()
    return client.is_locked("gpu_lock:0") and mine is not None and mine.guard.is_valid and enters()


@pytest.mark.parametrize("gpu_id", [0, None])
def test_the_last_block_that_leaves_releases_the_lock(configured: leasehold.Client, gpu_id: int | None) -> None:
    """A generator in its caller's context can enter first, and end first or last."""

    def dependency() -> Generator[None, None, None]:
        with gpu.hold(gpu_id, gpus=1):
            yield

    first = dependency()
    next(first)
    with gpu.hold(gpu_id, gpus=1):
        with gpu.hold(0):
            first.close()
            assert is_held_elsewhere(configured)
        assert is_held_elsewhere(configured)
    assert not configured.is_locked("gpu_lock:0") and gpu.current() is None

    with gpu.hold(gpu_id, gpus=1):
        last = dependency()
        next(last)
    assert is_held_elsewhere(configured)
    last.close()
    assert not configured.is_locked("gpu_lock:0") and gpu.current() is None

    # A generator that is freed ends its block.
    with gpu.hold(gpu_id, gpus=1):
        last = dependency()
        next(last)
    del last
    gc.collect()
    assert not configured.is_locked("gpu_lock:0") and gpu.current() is None


@pytest.mark.parametrize("gpu_id", [0, None])
def test_the_last_async_block_that_leaves_releases_the_lock(configured: leasehold.Client, gpu_id: int | None) -> None:
    async def dependency() -> AsyncIterator[None]:
        async with gpu.hold_async(gpu_id, gpus=1):
            yield

    async def main() -> None:
        first: Any = dependency()
        await anext(first)
        async with gpu.hold_async(gpu_id, gpus=1):
            await first.aclose()
            assert is_held_elsewhere(configured)
        assert not configured.is_locked("gpu_lock:0") and gpu.current() is None
        first = dependency()
        await anext(first)
        with gpu.hold(gpu_id, gpus=1):
            await first.aclose()
            assert is_held_elsewhere(configured)
        assert not configured.is_locked("gpu_lock:0") and gpu.current() is None

    asyncio.run(main())


def test_the_last_block_reports_a_lost_lease(configured: leasehold.Client) -> None:
    def dependency() -> Generator[None, None, None]:
        with gpu.hold(0):
            yield

    first = dependency()
    next(first)
    with pytest.raises(leasehold.LockLost), gpu.hold(0) as mine:
        first.close()
        configured.evict("gpu_lock:0", mine.guard.holder_id, force=True)
        assert mine.guard.lost.wait(5)


def test_a_reused_thread_id_is_another_thread() -> None:
    contexts: list[contextvars.Context] = []
    held: list[Any] = []

    def enter() -> None:
        run = gpu.hold(0)
        run.__enter__()
        held.append(run)
        contexts.append(contextvars.copy_context())

    first = threading.Thread(target=enter)
    first.start()
    first.join()
    answers: list[bool] = []
    for _ in range(5):
        later = threading.Thread(target=lambda: answers.append(contexts[0].copy().run(enters)))
        later.start()
        later.join()
    assert answers == [False] * 5
    held[0].__exit__(None, None, None)
    assert enters()


def test_the_same_gpu_in_another_store_is_another(configured: leasehold.Client) -> None:
    with leasehold.connect("memory:") as other, gpu.hold(0):
        manager = SmartGpuLockManager(other)
        assert manager.acquire_lock("elsewhere", "gpu_lock:0", 0)
        assert other.is_locked("gpu_lock:0")
        assert manager.release_lock("elsewhere", "gpu_lock:0")


GREEN = """
import sys, leasehold
from leasehold import gpu
gpu.configure(sys.argv[1])

def enters():
    try:
        with gpu.hold(0, max_wait_time=0):
            return True
    except leasehold.LockNotAcquired:
        return False

def work():
    with gpu.hold(0):
        child = spawn(enters)
        assert enters()
        return wait(child), enters()

# In the first greenlet of the thread, and in a spawned one.
print(work(), wait(spawn(work)))
"""


@pytest.mark.parametrize(
    "library",
    [
        "import gevent.monkey; gevent.monkey.patch_all()\nfrom gevent import spawn\nwait = lambda one: one.get()\n",
        # As libraries do that copy the context into greenlets.
        "import gevent.monkey; gevent.monkey.patch_all()\nimport contextvars, gevent\nwait = lambda one: one.get()\n"
        "def spawn(f): return gevent.spawn(contextvars.copy_context().run, f)\n",
        # Without monkey-patching, greenlets share the thread-locals of their thread.
        "import contextvars, gevent\nwait = lambda one: one.get()\n"
        "def spawn(f): return gevent.spawn(contextvars.copy_context().run, f)\n",
        "import warnings; warnings.simplefilter('ignore')\nimport eventlet; eventlet.monkey_patch()\nimport contextvars\n"
        "wait = lambda one: one.wait()\ndef spawn(f): return eventlet.spawn(contextvars.copy_context().run, f)\n",
    ],
    ids=["gevent", "gevent-context", "gevent-unpatched", "eventlet-context"],
)
def test_a_greenlet_that_is_spawned_inside_is_not_inside(redis_url: str, library: str) -> None:
    assert run_python(library + GREEN, redis_url) == "(False, True) (False, True)\n"


# Celery tasks.


@contextmanager
def celery_app(redis_url: str) -> Iterator[Celery]:
    app = Celery("inside", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, leasehold_store=redis_url)
    yield app


def test_a_celery_task_called_by_started_work_is_not_inside(redis_url: str) -> None:
    with celery_app(redis_url) as app:

        @locked_task(key="order:{order_id}", app=app)
        def refund(order_id: int) -> str:
            return "refunded"

        @locked_task(key="order:{order_id}", app=app, bind=True)
        def pay(self: Any, order_id: int) -> list[Any]:
            async def later() -> Any:
                return await asyncio.to_thread(refund, order_id)

            async def now() -> Any:
                return refund(order_id)

            assert self.guard is not None
            return [refund(order_id), asyncio.run(now()), asyncio.run(later())["status"]]

        assert pay.apply(args=[7]).get() == ["refunded", "refunded", "skipped"]

"""Locks in asyncio."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from conftest import Background, Server

import leasehold
from leasehold import Client, LockLost, LockNotAcquired


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main(), 60)

    return asyncio.run(bounded())


def test_the_same_lock_by_with_and_by_async_with(client: Client) -> None:
    lock = client.lock("a", wait=5)

    async def main() -> None:
        async with lock as guard:
            assert guard.is_valid and await client.is_locked_async("a")
            assert await client.try_lock_async("a") is None
            assert (await client.info_async("a")).holder_id == guard.holder_id
            await guard.extend_async(60)
            assert guard.time_left > 50
        assert not await client.is_locked_async("a")
        with pytest.raises(ZeroDivisionError):
            async with lock:
                _ = 1 / 0
        assert not await client.is_locked_async("a")

    run(main)
    run(main)
    with lock:
        pass


def test_a_refused_request_names_the_holder(client: Client) -> None:
    async def main() -> None:
        async with client.lock("a", owner="checkout"):
            with pytest.raises(LockNotAcquired, match="checkout"):
                await client.lock("a", wait=0.1).acquire_async()

    run(main)


def test_a_thousand_tasks_wait_in_one_loop(client: Client) -> None:
    inside, fences = 0, []

    async def work(lock: leasehold.Lock) -> None:
        nonlocal inside
        async with lock as guard:
            inside += 1
            assert inside == 1, "two holders at once"
            fences.append(guard.fence or 0)
            await asyncio.sleep(0)
            inside -= 1

    async def main() -> None:
        async with client.lock("a"):
            lock = client.lock("a")
            tasks = [asyncio.create_task(work(lock)) for _ in range(1000)]
            # The waiting tasks do not block the loop.
            began = time.monotonic()
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert time.monotonic() - began < 5
            assert not fences
        await asyncio.gather(*tasks)

    run(main)
    assert len(fences) == 1000 and fences == sorted(set(fences))
    assert client.locks() == []


def test_a_cancelled_task_keeps_no_lock(client: Client, url: str, server: Server) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    done = 0

    async def work() -> None:
        nonlocal done
        async with client.lock("a"):
            await asyncio.sleep(0)
            done += 1

    async def main() -> None:
        async with client.lock("a"):
            tasks = [asyncio.create_task(work()) for _ in range(1000)]
            for _ in range(10):
                await asyncio.sleep(0.01)
                for task in chance.sample(tasks, 30):
                    task.cancel()
        # Some tasks are cancelled while they acquire or release.
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            chance.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        # A task that is cancelled during its release has done its work.
        assert 0 < sum(result is None for result in results) <= done
        # At once, because no lock that was granted to a cancelled task is still held.
        async with client.lock("a", wait=5):
            pass
        info = await client.info_async("a")
        assert not info.held and not info.waiters

    run(main)
    assert client.locks() == []
    if url == server.url:
        assert [key for key in server.redis.keys() if b"lock:a" in key] == []


def test_a_task_cancelled_during_its_release_counts_no_failure(client: Client) -> None:
    left = 0

    async def work() -> None:
        nonlocal left
        async with client.lock("a"):
            left += 1
        left += 1

    async def main() -> None:
        # Repeated until some tasks were cancelled between the end of the work and the end of the block.
        cancelled = 0
        while cancelled < 20:
            before, task = left, asyncio.create_task(work())
            while left == before:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            cancelled += left == before + 1
            async with client.lock("a", wait=5):
                pass

    run(main)
    assert client.statistics().normal_release_failures == 0
    assert client.locks() == []


def test_a_lost_lease_cancels_the_task(client: Client) -> None:
    went_on = False

    async def main() -> None:
        nonlocal went_on
        async with client.lock("a"):
            await client.evict_async("a")
            await asyncio.sleep(30)
            went_on = True

    async def outer() -> None:
        task = asyncio.current_task()
        with pytest.raises(LockLost) as lost:
            await main()
        assert lost.value.reason == "revoked"
        if sys.version_info >= (3, 11):
            assert task is not None and task.cancelling() == 0, "the task goes on as if nothing had been"
        await asyncio.sleep(0)

    began = time.monotonic()
    run(outer)
    assert not went_on and time.monotonic() - began < 5


def test_a_lost_lease_does_not_cancel_work_with_on_lost_continue(client: Client) -> None:
    async def main() -> str | None:
        async with client.lock("a", on_lost="continue") as guard:
            await client.evict_async("a")
            reason = await guard.lost
            await asyncio.sleep(0.05)
            assert guard.lost.is_set()
            return reason

    assert run(main) == "revoked"


def test_a_loss_is_raised_even_if_the_work_swallows_the_cancellation(client: Client) -> None:
    async def main() -> None:
        async with client.lock("a"):
            await client.evict_async("a")
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                pass

    with pytest.raises(LockLost):
        run(main)


def test_another_cancellation_stays_a_cancellation(client: Client) -> None:
    async def hold() -> None:
        async with client.lock("a"):
            await asyncio.sleep(30)

    async def main() -> None:
        task = asyncio.create_task(hold())
        while not await client.is_locked_async("a"):
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await client.is_locked_async("a")
        with pytest.raises(asyncio.TimeoutError):
            async with client.lock("a"):
                await asyncio.wait_for(client.lock("a").acquire_async(), 0.1)
        assert not (await client.info_async("a")).held

    run(main)


def test_waiting_for_a_loss_ends_with_the_release(client: Client) -> None:
    async def main() -> str | None:
        guard = await client.lock("a").acquire_async()

        async def wait() -> str | None:
            return await guard.lost

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        assert await guard.release_async()
        return await waiting

    assert run(main) is None


def test_two_loops_and_threads_share_a_client(client: Client) -> None:
    inside = 0

    async def work() -> None:
        nonlocal inside
        for _ in range(20):
            async with client.lock("a"):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1

    def threads() -> None:
        nonlocal inside
        for _ in range(20):
            with client.lock("a"):
                inside += 1
                assert inside == 1
                time.sleep(0)
                inside -= 1

    for thread in [Background(lambda: run(work)), Background(lambda: run(work)), Background(threads)]:
        thread.join(60)


def test_connecting_does_not_block_the_loop(url: str) -> None:
    async def main() -> None:
        async with await leasehold.connect_async(url) as client:
            async with client.lock("a"):
                assert [lock.name for lock in await client.locks_async()] == ["a"]
        with pytest.raises(leasehold.ClientClosed):
            await client.is_locked_async("a")

    run(main)

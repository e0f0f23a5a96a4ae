"""GPU locks: the decorator, the manager, and old clients beside them."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from celery import Celery
from conftest import SOON, Background, Server, until

import leasehold
from leasehold import gpu
from leasehold._gpu_manager import _process
from leasehold._gpu_settings import _configured
from leasehold.celery import GpuTask
from leasehold.gpu import SmartGpuLockManager, gpu_lock


@pytest.fixture(autouse=True)
def configured(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[leasehold.Client]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with leasehold.connect(redis_url) as client:
        gpu.configure(client)
        yield client
    _configured.__init__()  # type: ignore[misc]


@pytest.fixture
def raw(server: Server, redis_url: str) -> Any:
    """The Redis client of the test server."""
    return server.redis


@pytest.fixture
def manager() -> SmartGpuLockManager:
    return SmartGpuLockManager()


# The decorator.


def test_an_exception_in_the_locked_function_frees_the_lock(raw: Any) -> None:
    @gpu_lock(gpu_id=0)
    def crashing_task() -> None:
        assert raw.exists("gpu_lock:0")
        raise RuntimeError("simulated crash")

    with pytest.raises(RuntimeError, match="simulated crash"):
        crashing_task()
    assert not raw.exists("gpu_lock:0")


def test_ten_threads_on_one_gpu() -> None:
    inside, ran, late = 0, [], []

    @gpu_lock(gpu_id=0, max_wait_time=5)
    def task(number: int) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1, "two on one GPU"
        ran.append(number)
        time.sleep(2)
        inside -= 1

    def attempt(number: int) -> None:
        try:
            task(number)
        except leasehold.LockNotAcquired as error:
            assert error.waited == pytest.approx(5, abs=1) and "gpu_lock:0" in str(error)
            late.append(number)

    threads = [Background(lambda number=n: attempt(number)) for n in range(10)]  # type: ignore[misc]
    for thread in threads:
        thread.join(30)
    # Three threads get the GPU, at 0, 2 and 4 seconds; the time of the others is over.
    assert len(ran) == len(set(ran)) == 3
    assert sorted(ran + late) == list(range(10))


def test_the_lease_has_the_configured_ttl(raw: Any) -> None:
    with gpu.hold(0):
        assert 290_000 < raw.pttl("gpu_lock:0") <= 300_000, "the heartbeat's time-out, and renewed"
    gpu.configure(heartbeat=False)
    with gpu.hold(0):
        assert 590_000 < raw.pttl("gpu_lock:0") <= 600_000, "the lock's own, and not renewed"
    gpu.configure(lock_timeout=60)
    with gpu.hold(0, lock_timeout=10):
        assert raw.pttl("gpu_lock:0") <= 10_000
    gpu.configure(scope="host")
    with gpu.hold(0) as mine:
        assert mine.guard.name.startswith("gpu_lock:") and mine.guard.name.count(":") == 2


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(leasehold.InvalidArgument, match="with arguments"):
        gpu_lock(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(leasehold.InvalidArgument, match="no parameter 'device'"):
        gpu_lock("device")(lambda: None)
    with pytest.raises(leasehold.InvalidArgument, match='is not "any"'):
        gpu_lock(gpu="two")  # type: ignore[arg-type]
    with pytest.raises(leasehold.InvalidArgument, match="pass gpus=N"):
        gpu_lock(gpu="any")(lambda: None)()
    with pytest.raises(leasehold.InvalidArgument, match="gpus: '2' is not a number of GPUs"):
        gpu_lock(gpu="any", gpus="2")(lambda: None)()  # type: ignore[arg-type]
    for gpu_id in (-1, 1.5, None):
        with pytest.raises(leasehold.InvalidArgument, match="is not the number of a GPU"):
            gpu_lock(gpu_id=gpu_id)  # type: ignore[arg-type]
    with pytest.raises(leasehold.InvalidArgument, match="'cuda:1' is not the number of a GPU"):
        gpu_lock(gpu_id="device")(lambda device: device)("cuda:1")
    with pytest.raises(leasehold.InvalidArgument, match="is not the number of a GPU"):
        with gpu.hold(-1):
            pass
    with pytest.raises(leasehold.InvalidArgument, match="gpu_lock.heartbeat.beat is not known"):
        gpu.configure(heartbeat={"beat": 1})
    with pytest.raises(leasehold.InvalidArgument, match="max_wait_time"):
        gpu.configure(max_wait_time=-1)


def test_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @gpu_lock(gpu="any", gpus=2, max_wait_time=0.1)
    def on_any(gpu_id: int = -1) -> int:
        return gpu_id

    with gpu.hold(0):
        assert in_a_thread(on_any) == 1
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,0,5")
        with gpu.hold(None) as mine:
            assert mine.id == 0, "it is on that one already"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with gpu.hold(None) as mine:
        assert (mine.id, mine.device, mine.guard.name) == (4, 0, "gpu_lock:4")


def in_a_thread(work: Any) -> Any:
    """Runs in a new thread, which holds no GPU."""
    results: list[Any] = []
    Background(lambda: results.append(work())).join()
    return results[0]


def test_called_functions_enter_again() -> None:
    @gpu_lock(gpu_id="device", max_wait_time=0.1)
    def inner(device: int) -> int:
        mine = gpu.current()
        assert mine is not None
        return mine.id

    @gpu_lock(gpu_id=1, max_wait_time=0.1)
    def outer() -> int:
        assert in_a_thread(lambda: refused(1)), "another thread may not"
        assert inner(2) == 2
        return inner(1)

    def refused(device: int) -> bool:
        with pytest.raises(leasehold.LockNotAcquired):
            inner(device)
        return True

    assert outer() == 1 and gpu.current() is None


def test_async_functions(raw: Any) -> None:
    cleaned = []

    async def clean_up() -> None:
        assert raw.exists("gpu_lock:0")
        cleaned.append(gpu.current())

    @gpu_lock(gpu_id=0, max_wait_time=5, cleanup=clean_up)
    async def work(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return time.monotonic()

    async def both() -> tuple[float, float]:
        return await asyncio.gather(work(0.2), work(0.2))

    first, second = sorted(asyncio.run(both()))
    assert second - first >= 0.2 and len(cleaned) == 2 and None not in cleaned
    assert not raw.exists("gpu_lock:0")


def test_a_generator_is_refused() -> None:
    def frames() -> Iterator[int]:
        yield 1

    async def frames_async() -> AsyncIterator[int]:
        yield 1

    for generator in (frames, frames_async):
        with pytest.raises(leasehold.InvalidArgument, match="frames.* is a generator"):
            gpu_lock()(generator)


def test_any_callable_can_be_decorated(raw: Any) -> None:
    class Model:
        def __call__(self, name: str) -> tuple[str, int]:
            return name, raw.exists("gpu_lock:0")

    class AsyncModel:
        async def __call__(self, name: str) -> tuple[str, int]:
            return name, raw.exists("gpu_lock:0")

    assert gpu_lock()(Model())("model") == ("model", 1)
    assert gpu_lock()(functools.partial(Model(), "partial"))() == ("partial", 1)
    assert asyncio.run(gpu_lock()(AsyncModel())("async")) == ("async", 1)


def test_the_memory_is_freed_before_the_gpu_is(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_initialized=lambda: True, empty_cache=lambda: held.append(bool(raw.exists("gpu_lock:0")))
    )
    with gpu.hold(0):
        assert "torch" not in sys.modules
    assert "torch" not in sys.modules, "torch must not be imported"
    monkeypatch.setitem(sys.modules, "torch", torch)
    with gpu.hold(0):
        pass
    assert held == [True], "emptied while the lock was held"
    # Not every module of this name has `is_initialized`.
    del torch.cuda.is_initialized
    with gpu.hold(0):
        pass
    assert held == [True, True]


def test_a_clean_up_that_fails_only_warns(raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise OSError("driver is gone")

    @gpu_lock(gpu_id=0, cleanup=fails)
    def work(problem: Exception | None) -> str:
        if problem is not None:
            raise problem
        return "done"

    assert work(None) == "done"
    with pytest.raises(KeyError, match="its own"):
        work(KeyError("its own"))
    assert "driver is gone" in caplog.text and not raw.exists("gpu_lock:0")


# The manager.


def test_acquire_and_release_by_task_name(manager: SmartGpuLockManager, raw: Any) -> None:
    assert manager.acquire_lock("task-1", "gpu_lock:0")
    assert not manager.acquire_lock("task-2", "gpu_lock:0", max_wait_time=0)
    assert manager.get_statistics()["active_locks"] == {"gpu_lock:0": "task-1"}
    assert in_a_thread(lambda: manager.release_lock("task-1", "gpu_lock:0", "normal")) is True
    assert not raw.exists("gpu_lock:0") and manager.get_statistics()["active_locks"] == {}
    assert manager.get_exception_statistics() == {
        "normal_release_failures": 0,
        "emergency_releases": 0,
        "release_script_errors": 0,
        "ownership_violations": 0,
        "exception_rate": 0.0,
        "emergency_release_rate": 0.0,
    }


def test_another_manager_of_the_same_client_releases_by_task_name(
    manager: SmartGpuLockManager, configured: leasehold.Client, redis_url: str, raw: Any
) -> None:
    assert manager.acquire_lock("task-1", "gpu_lock:0")
    other = SmartGpuLockManager()
    assert other.get_statistics()["active_locks"] == {"gpu_lock:0": "task-1"}
    with leasehold.connect(redis_url) as elsewhere:
        # Another client can have another store, so it does not release this lock.
        assert not SmartGpuLockManager(elsewhere).release_lock("task-1", "gpu_lock:0")
    assert in_a_thread(lambda: other.release_lock("task-1", "gpu_lock:0")) is True
    assert not raw.exists("gpu_lock:0")
    assert not manager.release_lock("task-1", "gpu_lock:0")
    # The manager was freed, as that of a Celery task can be, but the lease still exists.
    assert SmartGpuLockManager(configured).acquire_lock("task-2", "gpu_lock:0")
    gc.collect()
    assert raw.exists("gpu_lock:0") and SmartGpuLockManager(lambda: configured).release_lock("task-2", "gpu_lock:0")
    assert not raw.exists("gpu_lock:0")


def test_a_managers_own_lease_is_released_after_another_client_was_configured(
    manager: SmartGpuLockManager, raw: Any
) -> None:
    assert manager.acquire_lock("task-1", "gpu_lock:0")
    gpu.configure("memory:")
    assert manager.release_lock("task-1", "gpu_lock:0")
    assert not raw.exists("gpu_lock:0")


def test_a_script_that_may_not_run_is_counted_as_a_script_error(server: Server, raw: Any) -> None:
    raw.set("gpu_lock:0", "locked_by_old_task", ex=600)
    raw.execute_command("ACL", "SETUSER", "noscripts", "on", ">secret", "~*", "&*", "+@all")
    try:
        with leasehold.connect(f"redis://noscripts:secret@127.0.0.1:{server.port}") as client:
            manager = SmartGpuLockManager(client)
            raw.execute_command("ACL", "SETUSER", "noscripts", "-@scripting")
            assert not manager.release_lock("old_task", "gpu_lock:0")
            counted = manager.get_exception_statistics()
            assert (counted["release_script_errors"], counted["normal_release_failures"]) == (1, 1)
    finally:
        raw.execute_command("ACL", "DELUSER", "noscripts")


def test_not_the_owner(manager: SmartGpuLockManager, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert manager.acquire_lock("task-a", "gpu_lock:0")
    before = raw.get("gpu_lock:0")
    assert manager.release_lock("task-b", "gpu_lock:0", "malicious") is False
    assert raw.get("gpu_lock:0") == before
    assert manager.get_exception_statistics()["ownership_violations"] == 1
    assert "gpu_lock:0 is not held by task-b" in caplog.text
    assert manager.release_lock("task-a", "gpu_lock:0") is True
    assert manager.release_lock("task-a", "gpu_lock:0") is False, "it was released before"


def test_an_older_clients_lock_is_released_compared(manager: SmartGpuLockManager, raw: Any) -> None:
    raw.set("gpu_lock:0", "locked_by_task_a", ex=600)
    assert manager.release_lock("task_b", "gpu_lock:0", "malicious") is False
    assert raw.get("gpu_lock:0") == b"locked_by_task_a"
    assert manager.release_lock("task_a", "gpu_lock:0", "normal") is True
    assert not raw.exists("gpu_lock:0")


def test_a_waiter_gets_an_older_clients_lock_at_once(manager: SmartGpuLockManager, raw: Any) -> None:
    raw.set("gpu_lock:0", "locked_by_old", ex=600)
    waiting = Background(lambda: manager.acquire_lock("new", "gpu_lock:0", max_wait_time=SOON))
    until(lambda: bool(manager.client.info("gpu_lock:0").waiters))
    assert manager.release_lock("old", "gpu_lock:0", "normal") is True
    assert manager.client.is_locked("gpu_lock:0"), "passed on in the same step"
    waiting.join()
    assert in_a_thread(lambda: manager.release_lock("new", "gpu_lock:0")) is True


def test_a_record_is_not_released_as_a_plain_value(manager: SmartGpuLockManager, raw: Any) -> None:
    assert manager.acquire_lock("task-1", "gpu_lock:0")
    record = raw.get("gpu_lock:0").decode()
    assert manager.client.release_value("gpu_lock:0", record) is False and raw.exists("gpu_lock:0")
    raw.rpush("gpu_lock:1", "no string at all")
    assert manager.client.release_value("gpu_lock:1", "locked_by_task-1") is False and raw.exists("gpu_lock:1")
    assert manager.release_lock("task-1", "gpu_lock:0") is True


def test_owner_and_stranger_at_once(manager: SmartGpuLockManager, raw: Any) -> None:
    for _ in range(20):
        raw.set("gpu_lock:0", "locked_by_task_a", ex=600)
        results: dict[str, bool] = {}

        def release(name: str, results: dict[str, bool] = results) -> None:
            results[name] = manager.release_lock(name, "gpu_lock:0")

        threads = [threading.Thread(target=release, args=(name,)) for name in ("task_a", "task_b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {"task_a": True, "task_b": False} and not raw.exists("gpu_lock:0")


def test_old_and_new_services_share_a_gpu(manager: SmartGpuLockManager, raw: Any) -> None:
    raw.set("gpu_lock:0", "locked_by_old", px=300, nx=True)
    assert manager.acquire_lock("new", "gpu_lock:0", max_wait_time=5), "it waits for the old one's end"
    assert raw.set("gpu_lock:0", "locked_by_old", px=300, nx=True) is None, "the old client waits for the new one"
    assert manager.release_lock("new", "gpu_lock:0")


def test_a_late_release_leaves_the_successors_lock_alone(manager: SmartGpuLockManager, raw: Any) -> None:
    gpu.configure(lock_timeout=0.2, heartbeat=False)
    assert manager.acquire_lock("task-7", "gpu_lock:0")
    gpu.configure()

    def redelivered() -> None:
        assert manager.acquire_lock("task-7", "gpu_lock:0", max_wait_time=5)

    # A second run of the same task, in another thread.
    Background(redelivered).join()
    before = raw.get("gpu_lock:0")
    assert manager.release_lock("task-7", "gpu_lock:0") is False
    assert raw.get("gpu_lock:0") == before
    assert in_a_thread(lambda: manager.release_lock("task-7", "gpu_lock:0")) is True
    assert not raw.exists("gpu_lock:0")


def test_each_run_of_a_task_releases_its_own_lock(manager: SmartGpuLockManager, raw: Any) -> None:
    gpu.configure(lock_timeout=0.2, heartbeat=False)
    assert manager.acquire_lock("task-7", "gpu_lock:0")
    gpu.configure()

    def redelivered() -> None:
        assert manager.acquire_lock("task-7", "gpu_lock:0", max_wait_time=5)
        assert manager.release_lock("task-7", "gpu_lock:0") is True, "its own, not the one that is over"

    Background(redelivered).join()
    assert not raw.exists("gpu_lock:0")
    assert manager.release_lock("task-7", "gpu_lock:0") is False


def test_a_forked_child_does_not_release_its_parents_lock(manager: SmartGpuLockManager, raw: Any) -> None:
    assert manager.acquire_lock("task-1", "gpu_lock:0")
    # As if another thread held the mutex.
    with _process.lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(SOON))
            mine = manager.get_statistics()["active_locks"]
            released = manager.release_lock("task-1", "gpu_lock:0"), manager.acquire_lock("task-2", "gpu_lock:1")
            os._exit(0 if mine == {} and released == (False, True) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert manager.get_statistics()["active_locks"] == {"gpu_lock:0": "task-1"}
    assert manager.release_lock("task-1", "gpu_lock:0") is True


def test_health(manager: SmartGpuLockManager, raw: Any) -> None:
    assert manager.acquire_lock("task-1", "gpu_lock:0")
    health = manager.health_check()
    assert list(health) == [
        "status",
        "redis_connected",
        "zombie_locks",
        "long_held_locks",
        "exception_stats",
        "timestamp",
    ]
    assert health["status"] == "healthy" and health["redis_connected"] is True
    assert health["zombie_locks"] == [] and health["exception_stats"] == manager.get_exception_statistics()
    manager.release_lock("task-1", "gpu_lock:0")


def test_without_a_store(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = leasehold.connect(own_server.url, answer_within=0.2, patience=0.2)
    manager = SmartGpuLockManager(client)
    assert manager.acquire_lock("task-1", "gpu_lock:0")
    own_server.stop()
    with caplog.at_level(logging.ERROR):
        assert manager.release_lock("task-1", "gpu_lock:0") is False, "it is not known to be free"
    assert "gpu_lock:0 of task-1 was not released" in caplog.text
    assert manager.health_check()["status"] == "unhealthy"
    with pytest.raises(leasehold.StoreUnavailable):
        manager.acquire_lock("task-2", "gpu_lock:0", max_wait_time=0)
    until(lambda: manager.get_exception_statistics()["normal_release_failures"] == 1)


# The failure of a Celery task.


class IndexTTSTask(GpuTask):
    app = Celery("tests", broker="memory://")


def test_indextts_task_failure_releases_lock(raw: Any) -> None:
    task = IndexTTSTask()
    raw.set("gpu_lock:0", "locked_by_test_task", ex=600)
    task.on_failure(exc=Exception("Test failure"), task_id="test_task", args=(), kwargs={"gpu_id": 0}, einfo=None)
    assert not raw.exists("gpu_lock:0")


def test_on_failure_frees_what_the_task_acquired_and_nothing_else(raw: Any) -> None:
    task = IndexTTSTask()
    assert task.gpu_lock_manager.acquire_lock("test_task", "gpu_lock:0")
    raw.set("gpu_lock:1", "locked_by_other_task", ex=600)
    for gpu_id in (1, 0):
        task.on_failure(Exception(), "test_task", (), {"gpu_id": gpu_id}, None)
    assert not raw.exists("gpu_lock:0") and raw.get("gpu_lock:1") == b"locked_by_other_task"
    assert task.gpu_lock_manager.get_exception_statistics()["ownership_violations"] == 0


def test_a_failure_inside_on_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def release_lock(self, task_name: str, lock_key: str, reason: str) -> bool:
            assert (task_name, lock_key, reason) == ("test_task", "gpu_lock:0", "task_failure")
            raise OSError("the network is gone")

    task = IndexTTSTask()
    task.gpu_lock_manager = Broken()
    task.on_failure(Exception("Test failure"), "test_task", (), {}, None)
    assert "the network is gone" in caplog.text

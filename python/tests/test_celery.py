"""Locked tasks in real Celery workers."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, until

import leasehold

HERE = Path(__file__).parent
#: Celery's own machinery takes its time, on a machine that is busy.
ANSWER = 20.0


class Worker:
    """A Celery worker in a process of its own."""

    def __init__(self, server: Server, directory: Path, pool: str, concurrency: int, **environment: str) -> None:
        self.log = directory / f"{pool}.log"
        command = [sys.executable, "-m", "celery", "-A", "celery_app", "worker", "--pool", pool]
        command += ["-c", str(concurrency), "-n", f"{pool}@test", "-l", "INFO", "--without-gossip"]
        command += ["--without-mingle", "--without-heartbeat", "-Q", pool]
        env = {**os.environ, "LEASEHOLD_TEST_BROKER": server.url, "C_FORCE_ROOT": "1", **environment}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=HERE)
        self.wait_for(" ready.")

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.said() or self.process.poll() is not None, within=30)
        assert text in self.said(), self.said()

    def said(self) -> str:
        return self.log.read_text()

    def stop(self) -> None:
        """A warm shutdown: what runs is finished."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the worker hangs:\n{self.said()}") from None


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("broker"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tasks(broker: Server) -> Any:
    """The tasks, to be sent from here."""
    os.environ["LEASEHOLD_TEST_BROKER"] = broker.url
    return importlib.import_module("celery_app")


@pytest.fixture(scope="module")
def store(broker: Server) -> Iterator[leasehold.Client]:
    with leasehold.connect(broker.url) as client:
        yield client


def worker_of(pool: str, concurrency: int, **environment: str) -> Any:
    @pytest.fixture(scope="module", name=pool)
    def start(broker: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
        worker = Worker(broker, tmp_path_factory.mktemp("worker"), pool, concurrency, **environment)
        yield worker
        worker.stop()

    return start


prefork = worker_of("prefork", 4)
threads = worker_of("threads", 4, LEASEHOLD_TEST_VISIBILITY="1")
gevent = worker_of("gevent", 20)
solo = worker_of("solo", 1)


def send(task: Any, *args: Any, to: str = "prefork", **options: Any) -> Any:
    return task.apply_async(args=args, queue=to, **options)


def began(broker: Server, place: str, times: int = 1) -> int:
    """Waits for a task to be inside, and says in which process."""
    until(lambda: broker.redis.llen(f"began:{place}") >= times, within=ANSWER)
    return int(broker.redis.lindex(f"began:{place}", -1))


def is_free(broker: Server, key: str) -> Callable[[], bool]:
    return lambda: not broker.redis.exists(key)


# Prefork: four processes.


def test_forty_tasks_on_two_gpus(prefork: Worker, tasks: Any, broker: Server) -> None:
    sent = [send(tasks.on_gpu, n, kwargs={"gpu_id": n % 2}) for n in range(30)]
    sent += [send(tasks.on_any_gpu, 0.05) for _ in range(10)]
    results = [result.get(timeout=60) for result in sent]
    assert results[:30] == list(range(30)) and set(results[30:]) <= {0, 1}
    assert sorted(int(n) for n in broker.redis.lrange("done", 0, -1)) == list(range(30)), "all, and each of them once"
    assert not broker.redis.exists("overlaps"), "two on one GPU"
    assert not broker.redis.exists("gpu_lock:0", "gpu_lock:1")


def test_a_killed_pool_process_leaves_the_lock_free(prefork: Worker, tasks: Any, broker: Server) -> None:
    result = send(tasks.hold, "killed", 60)
    pid = began(broker, "killed")
    assert broker.redis.pttl("task_lock:killed") > 40_000
    os.kill(pid, signal.SIGKILL)
    # Its worker sees to it, long before the lease is over.
    until(is_free(broker, "task_lock:killed"), within=ANSWER)
    with pytest.raises(Exception, match="Worker exited prematurely"):
        result.get(timeout=ANSWER)
    assert "task_lock:killed is free" in prefork.said()


def test_revoked_and_terminated(prefork: Worker, tasks: Any, broker: Server) -> None:
    for how in ("SIGTERM", "SIGKILL"):
        result = send(tasks.hold, how, 60)
        began(broker, how)
        tasks.app.control.revoke(result.id, terminate=True, signal=how)
        until(is_free(broker, f"task_lock:{how}"), within=ANSWER)


def test_a_soft_time_limit(prefork: Worker, tasks: Any, broker: Server) -> None:
    result = send(tasks.hold, "soft", 60, soft_time_limit=1)
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        result.get(timeout=ANSWER)
    assert is_free(broker, "task_lock:soft")()


def test_a_hard_time_limit(prefork: Worker, tasks: Any, broker: Server) -> None:
    task = send(tasks.hold, "hard", 60, time_limit=1)
    gpu = send(tasks.on_gpu, 100, kwargs={"gpu_id": 7, "seconds": 60}, time_limit=1)
    began(broker, "hard")
    began(broker, "gpu7")
    until(is_free(broker, "task_lock:hard"), within=ANSWER)
    until(is_free(broker, "gpu_lock:7"), within=ANSWER)
    for result in (task, gpu):
        with pytest.raises(Exception, match="TimeLimitExceeded"):
            result.get(timeout=ANSWER)
    assert "is not held by" not in prefork.said(), "no violation was counted for it"


def test_a_failing_gpu_task_frees_its_lock(prefork: Worker, tasks: Any, broker: Server) -> None:
    result = send(tasks.fails_on_gpu, kwargs={"gpu_id": 3})
    with pytest.raises(RuntimeError, match="no memory left"):
        result.get(timeout=ANSWER)
    assert is_free(broker, "gpu_lock:3")()


def test_held_is_skipped_waited_for_or_tried_again(prefork: Worker, tasks: Any, store: leasehold.Client) -> None:
    with store.lock("task_lock:held", owner="somebody"):
        skipped = send(tasks.hold, "held", 0).get(timeout=ANSWER)
        assert skipped["status"] == "skipped" and skipped["reason"] == "already_running"
        assert skipped["lock"] == "task_lock:held" and skipped["holder"].startswith("somebody@")
        with pytest.raises(leasehold.LockNotAcquired, match="somebody"):
            send(tasks.waits_shortly, "held").get(timeout=ANSWER)
        waiting, again = send(tasks.waits, "held"), send(tasks.comes_again, "held")
        until(lambda: bool(store.info("task_lock:held").waiters), within=ANSWER)
        until(lambda: again.state == "RETRY", within=ANSWER)
    assert waiting.get(timeout=ANSWER) and again.get(timeout=ANSWER) == "held is done"


def test_the_next_try_is_not_kept_out_by_the_last(prefork: Worker, tasks: Any) -> None:
    results = [send(tasks.fails_once, f"retried-{n}") for n in range(10)]
    assert [result.get(timeout=ANSWER) for result in results] == [f"retried-{n} is done" for n in range(10)]


def test_a_warm_shutdown(tasks: Any, broker: Server, tmp_path: Path) -> None:
    worker = Worker(broker, tmp_path, "prefork", 1)
    result = send(tasks.hold, "shutdown", 1)
    began(broker, "shutdown")
    worker.stop()
    assert is_free(broker, "task_lock:shutdown")()
    assert result.get(timeout=ANSWER) == "shutdown is done"

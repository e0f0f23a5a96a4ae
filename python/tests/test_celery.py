"""Locked tasks in real Celery workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import celery_app
import pytest
from conftest import Server, start_python, until
from test_docs import ROOT, example

import leasehold
from leasehold._celery_request import LockedRequest

HERE = Path(__file__).parent
#: A timeout in seconds: Celery is slow on a busy machine.
ANSWER = 20.0


class Worker:
    """A Celery worker in its own process."""

    def __init__(
        self,
        server: Server,
        directory: Path,
        pool: str,
        concurrency: int,
        queue: str | None = None,
        app: Path = HERE / "celery_app.py",
        visibility: str = "",
    ) -> None:
        self.log = directory / "worker.log"
        queue = queue or pool
        command = [sys.executable, "-m", "celery", "-A", app.stem, "worker", "--pool", pool]
        command += ["-c", str(concurrency), "-n", f"{queue}@test", "-l", "INFO", "--without-gossip"]
        command += ["--without-mingle", "--without-heartbeat", "-Q", queue]
        told = {"LEASEHOLD_TEST_BROKER": server.url, "LEASEHOLD_TEST_VISIBILITY": visibility, "C_FORCE_ROOT": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **told}, cwd=app.parent)
        self.wait_for(" ready.")

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.output() or self.process.poll() is not None, within=30)
        assert text in self.output(), self.output()

    def output(self) -> str:
        return self.log.read_text()

    def stop(self) -> None:
        """A warm shutdown: running tasks are finished."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the worker hangs:\n{self.output()}") from None


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("broker"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tasks(broker: Server) -> Any:
    """The tasks, which the tests send."""
    celery_app.app.conf.update(broker_url=broker.url, result_backend=broker.url)
    return celery_app


@pytest.fixture(scope="module")
def store(broker: Server) -> Iterator[leasehold.Client]:
    with leasehold.connect(broker.url) as client:
        yield client


def worker_of(pool: str, concurrency: int) -> Any:
    @pytest.fixture(scope="module", name=pool)
    def start(broker: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
        worker = Worker(broker, tmp_path_factory.mktemp("worker"), pool, concurrency)
        yield worker
        worker.stop()

    return start


prefork = worker_of("prefork", 4)
threads = worker_of("threads", 4)
gevent = worker_of("gevent", 20)
solo = worker_of("solo", 1)


def send(task: Any, *args: Any, to: str = "prefork", **options: Any) -> Any:
    return task.apply_async(args=args, queue=to, **options)


def began(broker: Server, place: str, times: int = 1) -> int:
    """Waits until a task is inside, and returns its process id."""
    until(lambda: broker.redis.llen(f"began:{place}") >= times, within=ANSWER)
    last: Any = broker.redis.lindex(f"began:{place}", -1)
    return int(last)


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


def test_the_lock_of_a_killed_pool_process_is_released(prefork: Worker, tasks: Any, broker: Server) -> None:
    result = send(tasks.hold, "killed", 60)
    pid = began(broker, "killed")
    assert broker.redis.pttl("task_lock:killed") > 40_000
    os.kill(pid, signal.SIGKILL)
    # The worker releases the lock long before the lease expires.
    until(is_free(broker, "task_lock:killed"), within=ANSWER)
    with pytest.raises(Exception, match="Worker exited prematurely"):
        result.get(timeout=ANSWER)
    assert "task_lock:killed is free" in prefork.output()


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
    assert "is not held by" not in prefork.output(), "no violation was counted for it"


def test_a_failing_gpu_task_frees_its_lock(prefork: Worker, tasks: Any, broker: Server) -> None:
    result = send(tasks.fails_on_gpu, kwargs={"gpu_id": 3})
    with pytest.raises(RuntimeError, match="no memory left"):
        result.get(timeout=ANSWER)
    assert is_free(broker, "gpu_lock:3")()


def test_a_held_lock_is_skipped_waited_for_or_retried(prefork: Worker, tasks: Any, store: leasehold.Client) -> None:
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


def test_a_retry_is_not_blocked_by_the_try_before(prefork: Worker, tasks: Any) -> None:
    results = [send(tasks.fails_once, f"retried-{n}") for n in range(2)]
    assert [result.get(timeout=ANSWER) for result in results] == [f"retried-{n} is done" for n in range(2)]


DIES_WITH_A_LOCK = """
import os, signal, sys, leasehold
guard = leasehold.connect(sys.argv[1]).lock(sys.argv[3], ttl=60, owner=sys.argv[2]).acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_the_locks_of_the_dead_process_are_released(tasks: Any, broker: Server, store: leasehold.Client) -> None:
    task, owner = tasks.hold, "celery_app.hold[id-1]"
    with start_python(DIES_WITH_A_LOCK, broker.url, owner, "task_lock:dead") as process:
        process.wait(ANSWER)
    assert store.is_locked("task_lock:dead")
    for other in ((process.pid + 1, "id-1"), (process.pid, "id-2")):
        task.release_after_death(*other, ("dead", 0), {})
        assert store.is_locked("task_lock:dead"), "another's"
    task.release_after_death(process.pid, "id-1", ("dead", 0), {})
    assert not store.is_locked("task_lock:dead")
    with store.lock("task_lock:dead", owner=owner) as successor:
        task.release_after_death(process.pid, "id-1", ("dead", 0), {})
        assert store.holder("task_lock:dead") is not None and successor.is_valid


def test_a_dead_process_may_have_held_any_gpu(tasks: Any, broker: Server, store: leasehold.Client) -> None:
    with start_python(DIES_WITH_A_LOCK, broker.url, "celery_app.on_any_gpu[id-1]", "gpu_lock:1") as process:
        process.wait(ANSWER)
    with store.lock("gpu_lock:0", wait=ANSWER):
        tasks.on_any_gpu.release_after_death(process.pid, "id-1", (60,), {})
        assert store.is_locked("gpu_lock:0") and not store.is_locked("gpu_lock:1")


def test_the_lock_of_a_live_process_is_not_released() -> None:
    released: list[int] = []

    class Delivery:
        _release_lock: Any = LockedRequest._release_lock
        _release_when_gone: Any = LockedRequest._release_when_gone

        def __init__(self, pid: int | None) -> None:
            self.worker_pid = pid

        def _release(self, pid: int) -> None:
            released.append(pid)

    with start_python("import time; time.sleep(60)") as process:
        Delivery(process.pid)._release_lock()
        time.sleep(0.2)
        assert released == [], "it may be at work"
        process.kill()
        until(lambda: released == [process.pid])
    # This process is not a pool process, and the number of a greenlet is not a process id.
    for pid in (None, os.getpid(), 2**40):
        Delivery(pid)._release_lock()
    assert released == [process.pid]


def test_a_pool_process_releases_forgotten_locks_at_its_end(tasks: Any, broker: Server, tmp_path: Path) -> None:
    worker = Worker(broker, tmp_path, "prefork", 1, queue="forgets")
    send(tasks.keeps, "task_lock:kept", to="forgets").get(timeout=ANSWER)
    assert broker.redis.pttl("task_lock:kept") > 40_000
    worker.stop()
    assert is_free(broker, "task_lock:kept")()


def test_a_pool_process_ends_in_time_when_its_store_is_unreachable(
    tasks: Any, broker: Server, own_server: Server, tmp_path: Path
) -> None:
    worker = Worker(broker, tmp_path, "prefork", 2, queue="away")
    send(tasks.keeps_many, own_server.url, 20, to="away").get(timeout=ANSWER)
    own_server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    worker.stop()
    # 2 s for all locks together, plus Celery's shutdown. One lock after the other took 42 s.
    took = time.monotonic() - began
    assert took < 12, f"it took {took:.1f} s:\n{worker.output()}"


def test_a_warm_shutdown(tasks: Any, broker: Server, tmp_path: Path) -> None:
    worker = Worker(broker, tmp_path, "prefork", 1, queue="shutdown")
    result = send(tasks.hold, "shutdown", 1, to="shutdown")
    began(broker, "shutdown")
    worker.stop()
    assert is_free(broker, "task_lock:shutdown")()
    assert result.get(timeout=ANSWER) == "shutdown is done"


def test_a_killed_worker_loses_its_lock_with_its_lease(tasks: Any, broker: Server, tmp_path: Path) -> None:
    worker = Worker(broker, tmp_path, "prefork", 1, queue="killed")
    send(tasks.hold_shortly, "all-killed", 60, to="killed")
    pid = began(broker, "all-killed")
    worker.process.kill()
    worker.process.wait()
    # Its children are killed with it, so no process is left that could release the lock.
    until(lambda: not Path(f"/proc/{pid}").exists(), within=ANSWER)
    assert 0 < broker.redis.pttl("task_lock:all-killed") <= 2_000
    until(is_free(broker, "task_lock:all-killed"), within=3)


def test_the_examples_of_the_guide(tasks: Any, broker: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs/celery.md").read_text()
    assert "# shop.py" in page
    shop = example(ROOT / "docs/celery.md", tmp_path).rename(tmp_path / "shop.py")
    shop.write_text(shop.read_text().replace("redis://cache-1:6379/0", broker.url))
    worker = Worker(broker, tmp_path, "prefork", 2, queue="guide", app=shop)

    def run(task: str, *args: Any, **kwargs: Any) -> Any:
        sent = tasks.app.send_task(f"shop.{task}", args=args, kwargs=kwargs, queue="guide")
        return sent.get(timeout=ANSWER)

    assert run("pay", 42) == "order 42 is paid"
    assert run("transcribe", "talk.wav", gpu_id=1) == "talk.wav on GPU 1"
    assert run("train", "model") in [f"model on GPU {n}" for n in range(4)]
    with leasehold.connect(broker.url) as client, client.lock("task_lock:43", owner="somebody"):
        assert run("pay", 43)["status"] == "skipped"
    worker.stop()


# Threads.


def test_redelivery_of_a_running_task_is_ignored(tasks: Any, broker: Server, tmp_path: Path) -> None:
    # The transport delivers a message again if it is not acknowledged within a second.
    worker = Worker(broker, tmp_path, "threads", 2, queue="redelivery", visibility="1")
    result = send(tasks.delivered_twice, 5, to="redelivery")
    began(broker, "twice")
    holder = f"celery_app.delivered_twice[{result.id}]"
    worker.wait_for(f"{holder} is running already, by {holder}@")
    assert result.state == "PENDING", "it has no result yet"
    assert result.get(timeout=ANSWER) == "done"
    assert broker.redis.llen("began:twice") == 1 and not broker.redis.exists("overlaps")
    worker.stop()


def test_a_task_that_ends_late_does_not_free_its_successors_lock(threads: Worker, tasks: Any, broker: Server) -> None:
    late = send(tasks.ends_late, "late", 2.5, to="threads")
    began(broker, "late")
    successor = send(tasks.waits, "late", 3, to="threads")
    began(broker, "late", times=2)
    held = broker.redis.get("task_lock:late")
    with pytest.raises(leasehold.LockLost, match="ran out"):
        late.get(timeout=ANSWER)
    assert broker.redis.get("task_lock:late") == held, "it is the successor's"
    successor.get(timeout=ANSWER)
    assert is_free(broker, "task_lock:late")()
    # The runs overlapped, because the lease is not renewed.
    broker.redis.delete("overlaps")


def test_gpu_tasks_in_threads(threads: Worker, tasks: Any, broker: Server) -> None:
    sent = [send(tasks.on_any_gpu, 0.05, to="threads") for _ in range(12)]
    assert {result.get(timeout=ANSWER) for result in sent} == {0, 1}
    assert not broker.redis.exists("overlaps")
    with pytest.raises(RuntimeError, match="no memory left"):
        send(tasks.acquires_by_itself, to="threads").get(timeout=ANSWER)
    assert is_free(broker, "gpu_lock:9")()


# Greenlets.


def test_a_task_that_blocks_the_loop_keeps_its_lock(
    gevent: Worker, tasks: Any, broker: Server, store: leasehold.Client
) -> None:
    result = send(tasks.hogs, "hogged", 4, to="gevent")
    began(broker, "hogged")
    holder, end = store.holder("task_lock:hogged"), time.monotonic() + 3
    assert holder is not None
    while time.monotonic() < end:
        # The lease lasts one second, and would have expired without renewals.
        now = store.holder("task_lock:hogged")
        assert now is not None and now.holder_id == holder.holder_id
        time.sleep(0.05)
    assert result.get(timeout=ANSWER) is None
    assert is_free(broker, "task_lock:hogged")()


def test_two_greenlets_on_one_lock(gevent: Worker, tasks: Any, broker: Server) -> None:
    counting = send(tasks.ticks, "counted", to="gevent")
    holder = send(tasks.waits, "green", 1, to="gevent")
    began(broker, "green")
    waiter = send(tasks.waits, "green", to="gevent")
    waited = waiter.get(timeout=ANSWER) - holder.get(timeout=ANSWER)
    broker.redis.set("counted", 1)
    assert 1.0 <= waited < 1.2
    assert counting.get(timeout=ANSWER) > 20
    assert not broker.redis.exists("overlaps")


def test_greenlets_that_are_revoked_or_exceed_their_time(gevent: Worker, tasks: Any, broker: Server) -> None:
    revoked = send(tasks.hold, "green-revoked", 60, to="gevent")
    limited = send(tasks.hold, "green-limited", 60, to="gevent", time_limit=1)
    began(broker, "green-revoked")
    began(broker, "green-limited")
    tasks.app.control.revoke(revoked.id, terminate=True)
    until(is_free(broker, "task_lock:green-revoked"), within=ANSWER)
    until(is_free(broker, "task_lock:green-limited"), within=ANSWER)
    with pytest.raises(Exception, match="TimeLimitExceeded"):
        limited.get(timeout=ANSWER)


# One process, one task at a time.


def test_the_solo_pool(solo: Worker, tasks: Any, broker: Server) -> None:
    sent = [send(tasks.on_gpu, 200 + n, to="solo") for n in range(3)]
    assert [result.get(timeout=ANSWER) for result in sent] == [200, 201, 202]
    assert send(tasks.fails_once, "solo", to="solo").get(timeout=ANSWER) == "solo is done"
    with pytest.raises(RuntimeError):
        send(tasks.fails_on_gpu, to="solo").get(timeout=ANSWER)
    assert is_free(broker, "gpu_lock:0")() and is_free(broker, "task_lock:solo")()

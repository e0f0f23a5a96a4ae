# mypy: disable-error-code="untyped-decorator"
"""The tasks of the Celery tests: the tests send them, and real workers run them."""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery
from celery.exceptions import Retry

import leasehold
from leasehold.celery import GpuTask, locked_task

# The tests, which send the tasks, tell theirs later.
broker = os.environ.get("LEASEHOLD_TEST_BROKER", "memory://")
app = Celery("tests", broker=broker, backend=None if broker == "memory://" else broker)
app.conf.update(
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    result_expires=600,
)
visibility = os.environ.get("LEASEHOLD_TEST_VISIBILITY")
if visibility:
    # And it is looked at every second.
    app.conf.broker_transport_options = {
        "visibility_timeout": float(visibility),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }


def seen() -> Any:
    """The Redis in which tasks record what happens. Each task connects, because pools fork."""
    return redis.Redis.from_url(broker, protocol=2)


def inside(place: str, seconds: float) -> None:
    """Records that a task is inside, which one, and whether it is alone."""
    with seen() as store:
        if store.incr(f"inside:{place}") != 1:
            store.rpush("overlaps", place)
        store.rpush(f"began:{place}", os.getpid())
        time.sleep(seconds)
        store.decr(f"inside:{place}")


@app.task(base=GpuTask)
def on_gpu(number: int, gpu_id: int = 0, seconds: float = 0.05) -> int:
    inside(f"gpu{gpu_id}", seconds)
    with seen() as store:
        store.rpush("done", number)
    return number


@app.task(base=GpuTask, gpu="any", gpus=2)
def on_any_gpu(seconds: float, gpu_id: int = -1) -> int:
    inside(f"gpu{gpu_id}", seconds)
    return gpu_id


@app.task(base=GpuTask)
def fails_on_gpu(gpu_id: int = 0) -> None:
    raise RuntimeError("no memory left")


@app.task(base=GpuTask, bind=True)
def acquires_by_itself(self: Any, gpu_id: int = 9) -> None:
    """Acquires the lock itself, as older tasks did, and forgets to release it."""
    assert self.gpu_lock_manager.acquire_lock(self.request.id, f"gpu_lock:{gpu_id}", max_wait_time=5)
    raise RuntimeError("no memory left")


@locked_task(key="task_lock:{name}", app=app, ttl=60)
def hold(name: str, seconds: float) -> str:
    inside(name, seconds)
    return f"{name} is done"


@locked_task(key="task_lock:{name}", app=app, ttl=2)
def hold_shortly(name: str, seconds: float) -> str:
    inside(name, seconds)
    return f"{name} is done"


@locked_task(key="task_lock:{name}", app=app, ttl=1, renew=False)
def ends_late(name: str, seconds: float) -> str:
    inside(name, seconds)
    return f"{name} is done"


@locked_task(key="task_lock:{name}", app=app, when_held="wait", wait=10)
def waits(name: str, seconds: float = 0) -> float:
    entered = time.time()
    inside(name, seconds)
    return entered


@locked_task(key="task_lock:{name}", app=app, when_held="wait", wait=0.2)
def waits_shortly(name: str) -> None:
    raise AssertionError("it is held")


@locked_task(key="task_lock:{name}", app=app, when_held="retry", countdown=0.3, max_retries=50)
def comes_again(name: str) -> str:
    return f"{name} is done"


@locked_task(key="task_lock:{name}", app=app, bind=True, max_retries=1)
def fails_once(self: Any, name: str) -> str:
    if self.request.retries == 0:
        try:
            self.retry(countdown=0)
        except Retry:
            # The next try begins meanwhile, where there is a process for it.
            time.sleep(0.5)
            raise
    return f"{name} is done"


#: Locks that a task acquired and never released.
kept: list[Any] = []


@app.task
def keeps(name: str) -> None:
    """Acquires a lock and forgets it."""
    kept.append(leasehold.connect(broker).lock(name, ttl=60).acquire())


@app.task
def keeps_many(store: str, count: int) -> None:
    """Acquires many locks in another store and forgets them."""
    client = leasehold.connect(store)
    kept.extend(client.lock(f"kept:{i}", ttl=60).acquire() for i in range(count))


@locked_task(key="task_lock:{task_id}", app=app, acks_late=True, ttl=60)
def delivered_twice(seconds: float) -> str:
    inside("twice", seconds)
    return "done"


@locked_task(key="task_lock:{name}", app=app, ttl=1)
def hogs(name: str, seconds: float) -> None:
    """Blocks, so that no other greenlet runs."""
    with seen() as store:
        store.rpush(f"began:{name}", os.getpid())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@app.task
def ticks(until: str) -> int:
    """Counts while other greenlets let it run."""
    counted = 0
    with seen() as store:
        while not store.exists(until):
            counted += 1
            time.sleep(0.02)
    return counted

"""Locked tasks without a worker: options that are refused at registration, and tasks called as functions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

import leasehold
from leasehold import gpu
from leasehold._gpu_settings import _configured
from leasehold.celery import GpuTask, LockedTask, locked_task


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    app = Celery("calls", broker="memory://", set_as_current=False)
    app.conf.leasehold_store = redis_url
    gpu.configure(redis_url)
    yield app
    _configured.__init__()  # type: ignore[misc]


@pytest.fixture
def store(redis_url: str) -> Iterator[leasehold.Client]:
    with leasehold.connect(redis_url) as client:
        yield client


def made(app: Any, **options: Any) -> Any:
    """Registers a task, with all checks of its options."""

    def run(order: int = 0, gpu_id: int | None = None, **more: Any) -> int | None:
        return gpu_id

    return app.task(run, name="made", lazy=False, **{"base": LockedTask, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when_held": "later"}, "made: when_held: 'later' is not 'skip' or 'wait' or 'retry'"),
        ({"lock_on_lost": "stop"}, "made: lock_on_lost: 'stop' is not 'cancel' or 'continue'"),
        ({"lock_on_unavailable": True}, "made: lock_on_unavailable: True is not 'closed' or 'open'"),
        ({"lock_ttl": "30s"}, "made: lock_ttl: '30s' is neither a number of seconds nor a timedelta"),
        ({"lock_wait": "5"}, "made: lock_wait: '5' is neither"),
        ({"lock_countdown": [1]}, "made: lock_countdown: .1. is neither"),
        # Refused even if the task accepts any keyword argument.
        ({"lock_key": "order:{order"}, "lock_key"),
        ({"lock_key": "order:{order!r}"}, "a field must be the name of an argument"),
        ({"base": GpuTask, "gpu": 1}, "made: gpu: 1 is not None or 'any'"),
        ({"base": GpuTask, "max_wait_time": "1800"}, "made: max_wait_time: '1800' is neither"),
        ({"base": GpuTask, "lock_ttl": 60}, "made: lock_ttl is not for tasks on a GPU"),
        ({"base": GpuTask, "lock_key": "order:{order}"}, "made: lock_key is not for tasks on a GPU"),
    ],
)
def test_invalid_options_are_refused_at_registration(app: Celery, options: dict[str, Any], message: str) -> None:
    with pytest.raises(leasehold.InvalidArgument, match=message):
        made(app, **options)


def test_a_task_calls_others_of_the_same_lock(app: Celery, store: leasehold.Client) -> None:
    @locked_task(key="order:{order}", app=app, name="refund", when_held="wait", wait=5)
    def refund(order: int) -> bool:
        return store.is_locked(f"order:{order}")

    @locked_task(key="log:{order}", app=app, name="note")
    def note(order: int) -> bool:
        return bool(refund(order))

    @locked_task(key="order:{order}", app=app, name="pay", bind=True)
    def pay(self: LockedTask, order: int) -> list[bool]:
        assert self.guard is not None
        before = self.guard.fence
        called = [refund(order), note(order), pay(order) if order > 0 else True]
        return [*called, self.guard.fence == before, self.guard.is_valid]

    assert pay.apply(args=[0]).get() == [True] * 5
    assert not store.is_locked("order:0") and not store.is_locked("log:0")
    with store.lock("order:0", owner="somebody"):
        assert pay.apply(args=[0]).get()["status"] == "skipped"


def test_a_task_that_calls_itself_is_not_a_second_delivery(app: Celery) -> None:
    @locked_task(app=app, name="countdown")
    def countdown(n: int) -> int:
        return 0 if n == 0 else int(countdown(n - 1)) + 1

    assert countdown.apply(args=[2]).get() == 2


@pytest.mark.parametrize(("gpu_id", "lock"), [(None, "gpu_lock:0"), ("3", "gpu_lock:3"), (2, "gpu_lock:2")])
def test_which_gpu(app: Celery, gpu_id: Any, lock: str) -> None:
    task = made(app, base=GpuTask)
    assert task.lock_name("id", (), {"gpu_id": gpu_id}) == lock
    assert task.apply(kwargs={"gpu_id": gpu_id}).get() == gpu_id


@pytest.mark.parametrize("gpu_id", [-1, "cuda:1", 1.5])
def test_no_gpu(app: Celery, gpu_id: Any) -> None:
    with pytest.raises(leasehold.InvalidArgument, match="is not the number of a GPU"):
        made(app, base=GpuTask).apply(kwargs={"gpu_id": gpu_id}).get()


def test_a_failure_on_any_gpu_releases_the_lock_that_the_task_acquired(
    app: Celery, store: leasehold.Client, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(base=GpuTask, bind=True, gpu="any", gpus=3, name="fails")  # type: ignore[untyped-decorator]
    def fails(self: Any, gpu_id: int | None = None) -> None:
        others = [n for n in range(3) if n != gpu_id]
        assert self.gpu_lock_manager.acquire_lock(self.request.id, f"gpu_lock:{others[-1]}", max_wait_time=1)
        raise RuntimeError("no memory left")

    with pytest.raises(RuntimeError, match="no memory left"):
        fails.apply().get()
    assert [lock.name for lock in store.locks("gpu_lock:")] == []
    assert "was not released" not in caplog.text


def test_a_failed_clean_up_does_not_hide_a_retry(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(GpuTask):
        def clean_up(self) -> None:
            raise OSError("driver is gone")

    @app.task(base=Broken, bind=True, when_held="skip", name="again", max_retries=1)  # type: ignore[untyped-decorator]
    def again(self: Any) -> None:
        raise self.retry(countdown=0)

    with caplog.at_level(logging.WARNING, "leasehold"):
        again.push_request(id="id-1", called_directly=False, is_eager=False, retries=0, args=(), kwargs={})
        try:
            with pytest.raises(Retry):
                again()
        finally:
            again.pop_request()
    assert "driver is gone" in caplog.text

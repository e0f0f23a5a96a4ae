"""Task locks by key, with a store that is reachable and with one that is not."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import SOON, Background, Server, run_python, start_python, until

import leasehold
from leasehold import _task_settings, task_lock
from leasehold.task_lock import (
    TaskLockAcquireError,
    acquire_task_lock,
    check_stale_locks,
    configure,
    extend_task_lock,
    force_release_task_lock,
    get_lock_holder,
    get_lock_info,
    get_lock_ttl,
    is_task_locked,
    list_all_task_locks,
    release_task_lock,
    run_once,
    run_once_async,
    task_lock_context,
)

KEY = "task_lock:6"


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    yield
    task_lock._held.clear()
    task_lock._mine.set({})
    _task_settings._settings = None


@pytest.fixture
def store(url: str) -> str:
    configure(url)
    return url


@pytest.fixture
def raw(server: Server, redis_url: str) -> redis.Redis:
    configure(redis_url)
    return server.redis


def violations() -> int:
    assert _task_settings._settings is not None
    return _task_settings._settings.client.statistics().ownership_violations


def in_thread(work: Any) -> Any:
    came: list[Any] = []
    Background(lambda: came.append(work())).join()
    return came[0]


def journal() -> list[dict[str, Any]]:
    directory = Path(os.environ["XDG_STATE_HOME"]) / "leasehold" / "journal"
    return [json.loads(file.read_text()) for file in sorted(directory.glob("*.json"))]


def test_one_at_a_time(store: str) -> None:
    assert not is_task_locked(KEY)
    assert acquire_task_lock(KEY)
    assert is_task_locked(KEY)
    assert not acquire_task_lock(KEY)
    assert release_task_lock(KEY)
    assert not is_task_locked(KEY)
    assert acquire_task_lock(KEY, 300) and release_task_lock(KEY)


def test_another_holders_lock_is_not_changed(store: str, caplog: pytest.LogCaptureFixture) -> None:
    with leasehold.connect(store) as other, other.lock(KEY, owner="somebody") as guard:
        before = violations()
        with caplog.at_level(logging.WARNING, "leasehold.task_lock"):
            assert release_task_lock(KEY) is False
        assert KEY in caplog.text and "nothing was touched" in caplog.text
        assert violations() == before + 1
        assert extend_task_lock(KEY) is False
        assert guard.is_valid and other.is_locked(KEY)
        assert not acquire_task_lock(KEY)


def test_a_process_without_a_lock_releases_nothing(store: str) -> None:
    code = f"""
from leasehold.task_lock import *
configure({store!r})
print(acquire_task_lock({KEY!r}), release_task_lock({KEY!r}), extend_task_lock({KEY!r}), release_task_lock("task_lock:free"))
"""
    assert acquire_task_lock(KEY)
    assert run_python(code) == "False False False False\n"
    assert in_thread(lambda: release_task_lock("task_lock:free")) is False
    assert is_task_locked(KEY)


def test_a_late_task_does_not_release_its_successors_lock(store: str) -> None:
    assert acquire_task_lock(KEY, 0.1)
    until(lambda: not is_task_locked(KEY))
    released: list[bool] = []

    def successor() -> None:
        assert acquire_task_lock(KEY, 300)
        until(lambda: bool(released))
        assert is_task_locked(KEY)
        assert release_task_lock(KEY)

    working = Background(successor)
    until(lambda: is_task_locked(KEY))
    before = violations()
    assert extend_task_lock(KEY) is False
    released.append(release_task_lock(KEY))
    working.join()
    assert released == [False] and violations() == before + 1


def test_another_thread_of_the_process_may_release(store: str) -> None:
    assert acquire_task_lock(KEY)
    assert in_thread(lambda: extend_task_lock(KEY, 7000))
    assert get_lock_ttl(KEY) > 6000
    assert in_thread(lambda: release_task_lock(KEY))
    assert not release_task_lock(KEY)


def test_only_a_held_lock_is_extended(store: str) -> None:
    assert acquire_task_lock(KEY, 300) and get_lock_ttl(KEY) in (299, 300)
    assert extend_task_lock(KEY, 900) and get_lock_ttl(KEY) in (899, 900)
    assert extend_task_lock(KEY) and get_lock_ttl(KEY) in (3599, 3600)
    assert release_task_lock(KEY)
    assert not extend_task_lock(KEY)


def test_renews_itself_where_asked(store: str) -> None:
    assert acquire_task_lock(KEY, 0.3, renew=True)
    assert acquire_task_lock("task_lock:7", 0.3)
    time.sleep(1.0)
    assert is_task_locked(KEY) and not is_task_locked("task_lock:7")
    assert release_task_lock(KEY) and not release_task_lock("task_lock:7")


def test_waits_if_asked(store: str) -> None:
    assert acquire_task_lock(KEY, 0.2)
    assert not acquire_task_lock(KEY, wait=0.05)
    assert acquire_task_lock(KEY, wait=10)


def test_a_block(store: str) -> None:
    with task_lock_context(KEY) as acquired:
        assert acquired is True and get_lock_ttl(KEY) in (3599, 3600)
        assert extend_task_lock(KEY, 7000) and get_lock_ttl(KEY) > 6000
        with pytest.raises(TaskLockAcquireError, match=KEY) as held, task_lock_context(KEY):
            pytest.fail("two at once")
        assert isinstance(held.value, leasehold.LockNotAcquired) and held.value.holder is not None
        assert str(os.getpid()) in str(held.value)
        again = pickle.loads(pickle.dumps(held.value))
        assert str(again) == str(held.value) and again.holder == held.value.holder
        with task_lock_context(KEY, raise_on_fail=False) as acquired:
            assert acquired is False
        assert is_task_locked(KEY), "a block that did not get it frees nothing"
    assert not is_task_locked(KEY)


def test_one_object_for_all_blocks(store: str) -> None:
    block = task_lock_context(KEY, raise_on_fail=False)

    def refused() -> bool:
        with block as acquired:
            return acquired

    with block as acquired:
        assert acquired and not refused() and not in_thread(refused)
        assert is_task_locked(KEY), "a block that did not get it frees nothing"
    assert not is_task_locked(KEY)
    # Frameworks end a block in another context than they entered it in.
    assert contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)
    assert not is_task_locked(KEY)

    waiting, inside = task_lock_context(KEY, wait=SOON), []

    def work() -> None:
        with waiting:
            inside.append("in")
            assert is_task_locked(KEY)
            inside.append("out")

    for thread in [Background(work) for _ in range(8)]:
        thread.join()
    assert inside == ["in", "out"] * 8 and not is_task_locked(KEY)


def test_one_object_for_all_blocks_of_asyncio(store: str) -> None:
    block = task_lock_context(KEY, raise_on_fail=False)

    async def refused() -> bool:
        async with block as acquired:
            return acquired

    async def work() -> None:
        async with block as acquired:
            assert acquired and not any(await asyncio.gather(refused(), refused()))
            assert is_task_locked(KEY)

    asyncio.run(work())
    assert not is_task_locked(KEY)


def test_a_block_that_fails_frees_its_lock(store: str) -> None:
    with pytest.raises(KeyError), task_lock_context(KEY, 300):
        raise KeyError("mine")
    assert acquire_task_lock(KEY)


def test_a_block_whose_lock_was_released_inside(store: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "leasehold.task_lock"), task_lock_context(KEY):
        assert release_task_lock(KEY)
        assert in_thread(lambda: acquire_task_lock(KEY))
    # Log messages about locks of earlier tests can arrive late.
    assert KEY not in caplog.text
    assert is_task_locked(KEY), "the end of the block frees no successor's"


def test_a_late_block(store: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "leasehold.task_lock"), task_lock_context(KEY, 0.1):
        until(lambda: in_thread(lambda: acquire_task_lock(KEY)))
    assert "does not hold it" in caplog.text
    assert is_task_locked(KEY)


def test_a_block_of_asyncio(store: str) -> None:
    async def work() -> None:
        async with task_lock_context(KEY) as acquired:
            assert acquired is True
            with pytest.raises(TaskLockAcquireError):
                async with task_lock_context(KEY):
                    pytest.fail("two at once")
            async with task_lock_context(KEY, raise_on_fail=False) as acquired:
                assert acquired is False
        with pytest.raises(KeyError):
            async with task_lock_context(KEY):
                raise KeyError("mine")

    asyncio.run(work())
    assert not is_task_locked(KEY)


def test_lock_info(raw: redis.Redis) -> None:
    assert get_lock_holder(KEY) is None and get_lock_ttl(KEY) == -2
    assert get_lock_info(KEY)["locked"] is False and list_all_task_locks() == []
    assert acquire_task_lock(KEY, owner="nightly")
    assert raw.ttl(KEY) in (3599, 3600), "the key as it is"
    value: Any = raw.get(KEY)
    assert b"nightly" in value
    holder = get_lock_holder(KEY)
    assert holder is not None and holder.startswith("nightly@") and str(os.getpid()) in holder
    info = get_lock_info(KEY)
    assert info["locked"] and info["key"] == KEY and info["holder"] == holder and info["ttl"] in (3599, 3600)
    assert value.split()[2].decode() not in json.dumps(info), "the token is a secret"
    with leasehold.connect(str(_task_settings.task_settings().client.store)) as other, other.lock("no task's"):
        assert list_all_task_locks() == [info] or list_all_task_locks()[0]["holder"] == holder
        assert [lock["key"] for lock in list_all_task_locks()] == [KEY]


def test_an_older_worker_is_respected(raw: redis.Redis) -> None:
    raw.set(KEY, "worker-1", nx=True, ex=600)
    assert not acquire_task_lock(KEY) and not release_task_lock(KEY) and raw.get(KEY) == b"worker-1"
    assert get_lock_holder(KEY) == "worker-1" and get_lock_ttl(KEY) in (599, 600)
    assert list_all_task_locks()[0]["holder"] == "worker-1"
    assert force_release_task_lock(KEY) and not raw.exists(KEY)


def test_force(store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert force_release_task_lock(KEY) is False
    assert acquire_task_lock(KEY)
    assert force_release_task_lock(KEY) is True and not is_task_locked(KEY)
    assert not release_task_lock(KEY)
    # The lock changes hands between the inspection and the eviction.
    assert acquire_task_lock(KEY)
    client = _task_settings.task_settings().client
    look = client.holder

    def look_and_pass_on(name: str) -> Any:
        seen = look(name)
        assert release_task_lock(KEY) and acquire_task_lock(KEY)
        return seen

    monkeypatch.setattr(client, "holder", look_and_pass_on)
    with caplog.at_level(logging.WARNING, "leasehold.task_lock"):
        assert force_release_task_lock(KEY) is False
    assert "changed hands" in caplog.text
    monkeypatch.undo()
    assert is_task_locked(KEY) and release_task_lock(KEY)


def test_stale_locks(raw: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    raw.set("task_lock:old", "worker-1")
    for id, timeout in [("a", 7100), ("b", 7300), ("c", 80_000)]:
        assert acquire_task_lock(f"task_lock:{id}", timeout)
    with caplog.at_level(logging.WARNING, "leasehold.task_lock"):
        stale = check_stale_locks()
    assert [(lock["key"], lock["ttl"] > 7200) for lock in stale] == [
        ("task_lock:b", True), ("task_lock:c", True), ("task_lock:old", False),
    ]  # fmt: skip
    assert len(caplog.records) == 3 and "task_lock:old may be stuck: it is held by worker-1 and has no end" in caplog.text
    assert [lock["key"] for lock in check_stale_locks(over=10_000)] == ["task_lock:c", "task_lock:old"]


HOLDING = """
import sys, time
from leasehold.task_lock import acquire_task_lock, configure
configure(sys.argv[1])
assert acquire_task_lock("task_lock:6", float(sys.argv[2]))
print("held", flush=True)
"""


def test_other_processes(store: str) -> None:
    with start_python(HOLDING + "time.sleep(60)", store, "300") as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "held\n"
        assert not acquire_task_lock(KEY)
        assert not release_task_lock(KEY)
        assert str(worker.pid) in str(get_lock_holder(KEY))
        worker.send_signal(signal.SIGKILL)
    if store.startswith("redis"):
        assert is_task_locked(KEY), "a killed worker's lock ends by its timeout"
        assert force_release_task_lock(KEY)
    run_python(HOLDING, store, "300")
    assert not is_task_locked(KEY), "a process that ends gives it back"
    with start_python(HOLDING + "time.sleep(60)", store, "0.5") as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "held\n"
        worker.send_signal(signal.SIGKILL)
    until(lambda: acquire_task_lock(KEY))


def test_a_forked_child_does_not_share_locks(store: str) -> None:
    assert acquire_task_lock(KEY)
    pid = os.fork()
    if pid == 0:
        answers = [release_task_lock(KEY), extend_task_lock(KEY), acquire_task_lock(KEY), is_task_locked(KEY)]
        os._exit(7 if answers == [False, False, False, True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert is_task_locked(KEY) and release_task_lock(KEY)


def hasty(url: str) -> leasehold.Client:
    """Short timeouts, so that the tests do not wait long for a store that does not answer."""
    return leasehold.connect(url, answer_within=0.3, lazy=True)


def unused_url() -> str:
    """The URL of a port without a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"redis://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("was_there", [True, False])
def test_a_store_that_is_down_stops_no_task(
    was_there: bool, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    if was_there:
        server = request.getfixturevalue("own_server")
        configure(client=hasty(server.url))
        assert not is_task_locked(KEY)
        server.process.kill()
        server.process.wait()
    else:
        configure(client=hasty(unused_url()))
    before = len(journal())
    with caplog.at_level(logging.WARNING, "leasehold.task_lock"):
        with task_lock_context(KEY) as acquired:
            assert acquired is True
            assert extend_task_lock(KEY) is True
    assert f"{KEY} runs WITHOUT its lock" in caplog.text
    assert acquire_task_lock(KEY) is True
    entries = journal()[before:]
    assert [(entry["kind"], entry["name"]) for entry in entries] == [("unprotected", KEY)] * 2
    release_task_lock(KEY)
    assert is_task_locked(KEY) is False
    assert run_once("record:1", lambda: 42) == {"status": "success", "result": 42}
    assert journal()[-1]["name"] == "once:record:1"


def test_closed_policy_stops_all_tasks(own_server: Server) -> None:
    configure(client=hasty(own_server.url), on_unavailable="closed")
    assert acquire_task_lock(KEY)
    own_server.process.kill()
    own_server.process.wait()
    ran: list[int] = []
    calls: list[Callable[[], object]] = [
        lambda: acquire_task_lock("task_lock:7"),
        lambda: task_lock_context("task_lock:7").__enter__(),
        lambda: extend_task_lock(KEY),
        lambda: is_task_locked(KEY),
        lambda: get_lock_info(KEY),
        lambda: run_once("record:1", lambda: ran.append(1)),
    ]
    for work in calls:
        with pytest.raises(leasehold.StoreUnavailable):
            work()
    assert not ran
    assert release_task_lock(KEY) is False, "it hides no error of the task"


def test_done_once(store: str) -> None:
    ran: list[str] = []

    def work() -> dict[str, int]:
        ran.append("")
        return {"rows": 7}

    assert run_once("record:7", work) == {"status": "success", "result": {"rows": 7}}
    assert run_once("record:7", work) == {"status": "skipped", "reason": "already_processed"}
    assert in_thread(lambda: run_once("record:7", work)) == {"status": "skipped", "reason": "already_processed"}
    assert len(ran) == 1

    async def also() -> Any:
        async def work() -> int:
            return 8

        return [await run_once_async("record:8", work), await run_once_async("record:8", work)]

    assert asyncio.run(also()) == [
        {"status": "success", "result": 8}, {"status": "skipped", "reason": "already_processed"},
    ]  # fmt: skip


def test_done_once_by_one_at_a_time(store: str) -> None:
    def work() -> str:
        with pytest.raises(TaskLockAcquireError):
            run_once("record:7", lambda: pytest.fail("two at once"))
        return "done"

    assert run_once("record:7", work)["status"] == "success"


def test_an_exception_of_the_work_is_the_callers(store: str) -> None:
    for error in [KeyError("mine"), leasehold.StoreUnavailable("mine", "x"), leasehold.LockNotAcquired("mine", "x")]:
        ran: list[int] = []

        def work(error: Exception = error, ran: list[int] = ran) -> None:
            ran.append(1)
            raise error

        with pytest.raises(type(error)) as raised:
            run_once("record:7", work)
        assert raised.value is error and len(ran) == 1
    assert run_once("record:7", lambda: 1)["status"] == "success", "nothing counts as processed"


def test_the_configured_store(server: Server, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import logging
logging.basicConfig()
from leasehold.task_lock import acquire_task_lock
print(acquire_task_lock("task_lock:6", 300))
import os; os._exit(0)
"""
    monkeypatch.setenv("REDIS_URL", redis_url)
    with start_python(code) as worker:
        out, err = worker.communicate()
    assert out == "True\n" and "REDIS_URL is set, but it is not read" in err
    assert not server.redis.exists(KEY)
    monkeypatch.setenv("LEASEHOLD_STORE", redis_url)
    with start_python(code) as worker:
        out, err = worker.communicate()
    assert out == "True\n" and "REDIS_URL" not in err
    assert server.redis.exists(KEY)


def test_bad_values_are_refused(store: str) -> None:
    for key, timeout in [("", 300), ("two\nlines", 300), (KEY, 0), (KEY, -1), (KEY, 90_000)]:
        with pytest.raises(leasehold.InvalidArgument):
            acquire_task_lock(key, timeout)
    assert not is_task_locked(KEY)
    bad: list[Any] = ["", b"task_lock:1", 1, None]
    for key in bad:
        for ask in (release_task_lock, extend_task_lock, is_task_locked, get_lock_info, force_release_task_lock):
            if key != "" or ask is not extend_task_lock:
                with pytest.raises(leasehold.InvalidArgument):
                    ask(key)

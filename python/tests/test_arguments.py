"""Invalid arguments are refused before a request is sent, with an error that names the argument."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import leasehold
from leasehold import InvalidArgument, _task_settings, compat, gpu, new_token, task_lock

client = leasehold.connect("memory:")

TIMES: list[Any] = [-1, -0.001, math.nan, "5", b"5", True, [], 10**400, timedelta(seconds=-1)]
LEASES: list[Any] = [*TIMES, 0, 0.049, 86_401, math.inf, 1e300]
KEEPS: list[Any] = [*TIMES, 0, 0.9, 401 * 86_400, math.inf]
TEXTS: list[Any] = [1, b"a", "\ud800", [], True]
NAMES: list[Any] = [*TEXTS, None, "", "x" * 513, "a\nb"]
FLAGS: list[Any] = [1, 0, None, "yes", []]
POLICIES: list[Any] = [1, b"open", "shut", "", True]
HOLDERS: list[Any] = [1, b"x", "", "nobody", True]
TOKENS: list[Any] = [*TEXTS, None, "", "short"]
JSON: list[Any] = [object(), {1, 2}, b"x"]


def enter(block: Any) -> None:
    with block:
        pass


def connect(**given: Any) -> None:
    leasehold.connect(**{"url": "memory:", "lazy": True, **given})


def lock(**given: Any) -> None:
    enter(client.lock(**{"name": "a", **given}))


def pool(name: Any = "p", members: Any = range(2), **given: Any) -> None:
    enter(client.pool(name, members).acquire(**given))


def once(**given: Any) -> None:
    client.once(**{"id": "a", **given}).run(lambda: 1)


def extend(ttl: Any) -> None:
    with client.lock("a") as guard:
        guard.extend(ttl)


def lost(timeout: Any) -> None:
    with client.lock("a") as guard:
        guard.lost.wait(timeout)


def task_lock_context(**given: Any) -> None:
    enter(task_lock.task_lock_context(**{"key": "task_lock:a", **given}))


def hold(**given: Any) -> None:
    enter(gpu.hold(**given))


def compat_lock(**given: Any) -> None:
    enter(compat.Lock(**{"redis": "memory:", "name": "a", "timeout": 5, **given}))


def of(function: Callable[..., Any], **usual: Any) -> Callable[..., Any]:
    """A function with the usual values of its other arguments."""

    def call(**given: Any) -> Any:
        answer = function(**{**usual, **given})
        return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer

    call.__name__ = function.__name__
    return call


NAME: dict[str, Any] = {"name": "a"}
TOKEN: dict[str, Any] = {**NAME, "token": new_token()}
HOLDER: dict[str, Any] = {**NAME, "holder": "0123456789ab"}
LOCK: dict[str, list[Any]] = {"ttl": LEASES, "renew": FLAGS, "max_hold": TIMES, "owner": TEXTS}
TASK: dict[str, list[Any]] = {"key": NAMES, "timeout": [*LEASES, None], "wait": [*TIMES, None], "renew": FLAGS, "owner": TEXTS}

REFUSED: list[tuple[Callable[..., Any], dict[str, list[Any]]]] = [
    (connect, {"url": TEXTS, "namespace": [*TEXTS, "a\nb"], "owner": [*TEXTS, ""], "ttl": LEASES, "patience": TIMES}),
    (connect, {"answer_within": TIMES, "on_unavailable": POLICIES, "config": [1, b"x", []]}),
    (leasehold.configure, {"file": [1, b"x", []]}),
    (lock, {"name": NAMES, "wait": TIMES, "fenced": FLAGS, **LOCK}),
    (lock, {"on_lost": [None, 1, b"cancel", "stop"], "on_unavailable": POLICIES}),
    (of(client.try_lock, **NAME), {"name": NAMES, "fenced": FLAGS, **LOCK}),
    (of(client.try_lock_async, **NAME), {"name": NAMES, "fenced": FLAGS, **LOCK}),
    (extend, {"ttl": [*LEASES, None]}),
    (lost, {"timeout": TIMES}),
    (of(client.acquire_token, **TOKEN), {"name": NAMES, "token": TOKENS, "ttl": LEASES, "wait": TIMES, "fenced": FLAGS, "owner": TEXTS}),
    (of(client.acquire_token_async, **TOKEN), {"name": NAMES, "token": TOKENS, "ttl": LEASES}),
    (of(client.renew_token, **TOKEN), {"name": NAMES, "token": TOKENS, "ttl": LEASES}),
    (of(client.renew_token_async, **TOKEN), {"name": NAMES, "token": TOKENS, "ttl": LEASES}),
    (of(client.release_token, **TOKEN), {"name": NAMES, "token": TOKENS}),
    (of(client.release_token_async, **TOKEN), {"name": NAMES, "token": TOKENS}),
    (of(client.release_value, **NAME, value="v"), {"name": NAMES, "value": TEXTS, "reason": TEXTS}),
    (of(client.release_value_async, **NAME, value="v"), {"name": NAMES, "value": TEXTS, "reason": TEXTS}),
    (client.info, {"name": NAMES}),
    (of(client.info_async), {"name": NAMES}),
    (client.locks, {"prefix": [*TEXTS, None]}),
    (of(client.locks_async), {"prefix": [*TEXTS, None]}),
    (client.holder, {"name": NAMES}),
    (client.is_locked, {"name": NAMES}),
    (client.ttl_left, {"name": NAMES}),
    (of(client.evict, **HOLDER), {"name": NAMES, "holder": HOLDERS, "force": FLAGS, "reason": [*TEXTS, None]}),
    (of(client.evict_async, **HOLDER), {"name": NAMES, "holder": HOLDERS, "force": FLAGS, "reason": [*TEXTS, None]}),
    (of(client.ask_to_finish, **HOLDER), {"name": NAMES, "holder": HOLDERS, "reason": [*TEXTS, None]}),
    (of(client.ask_to_finish_async, **HOLDER), {"name": NAMES, "holder": HOLDERS, "reason": [*TEXTS, None]}),
    (pool, {"name": NAMES, "members": [None, 4, "ab", b"ab", [], [-1], [2**32], [True], [1.5], [0, 0]], "wait": TIMES, **LOCK}),
    (pool, {"k": [0, -1, None, "1", 1.5, True, 3, 2**70]}),
    (once, {"id": NAMES, "keep": KEEPS, "payload": JSON, "ttl": LEASES, "wait": TIMES, "owner": TEXTS}),
    (of(client.claim, id="a", value=1, lease=60), {"id": NAMES, "value": JSON, "lease": [*KEEPS, None]}),
    (of(client.claim_async, id="a", value=1, lease=60), {"id": NAMES, "value": JSON, "lease": [*KEEPS, None]}),
    (task_lock.configure, {"url": TEXTS, "client": [1, "memory:"], "on_unavailable": POLICIES[:3], "config": [1, b"x"]}),
    (of(task_lock.acquire_task_lock, key="task_lock:a"), TASK),
    (task_lock_context, {**TASK, "raise_on_fail": FLAGS}),
    (of(task_lock.extend_task_lock, key="task_lock:a"), {"key": TEXTS, "timeout": [*LEASES, None]}),
    (task_lock.release_task_lock, {"key": NAMES}),
    (task_lock.is_task_locked, {"key": NAMES}),
    (task_lock.get_lock_info, {"key": NAMES}),
    (task_lock.force_release_task_lock, {"key": NAMES}),
    (task_lock.check_stale_locks, {"over": [*TIMES, None]}),
    (of(task_lock.run_once, id="a", work=int), {"id": NAMES, "keep": KEEPS, "wait": TIMES, "owner": TEXTS}),
    (hold, {"gpu_id": [-1, "x", 1.5, True, b"0"], "max_wait_time": TIMES, "lock_timeout": LEASES}),
    (gpu.gpu_lock, {"gpu_id": [-1, 1.5, True, b"0"], "max_wait_time": TIMES, "lock_timeout": LEASES}),
    (compat_lock, {"timeout": [-1, math.nan, "5", 0.01, 86_401], "sleep": TIMES, "blocking_timeout": TIMES[2:-1]}),
]  # fmt: skip

#: How messages of the library begin if it refuses the content of a text.
CALLED = {"name": "lock name ", "key": "lock name ", "config": "configuration file: ", "file": "configuration file: ", "k": 'pool "p" ',
          "members": 'pool "p" ', "id": "request id "}  # fmt: skip


@pytest.fixture(autouse=True)
def here() -> Any:
    task_lock.configure(client=client)
    gpu.configure(client)
    yield
    _task_settings._settings = None
    gpu.configure("memory:")


@pytest.mark.parametrize(("function", "given"), REFUSED, ids=lambda one: getattr(one, "__name__", "of"))
def test_an_invalid_argument_is_refused_by_its_name(function: Callable[..., Any], given: dict[str, list[Any]]) -> None:
    for argument, values in given.items():
        for value in values:
            with pytest.raises(InvalidArgument) as refused:
                function(**{argument: value})
                pytest.fail(f"{argument}={value!r} was taken")
            message = str(refused.value)
            assert message.startswith((f"{argument}: ", CALLED.get(argument, f"{argument} "))), message
            assert "\n" not in message and len(message) < 700, message
    assert client.locks() == []


def test_times_are_in_seconds() -> None:
    for ttl, message in ((0, "ttl: 0.0 is not between 0.05 and 86400 seconds"), (math.nan, "ttl: nan is not a number of seconds, 0 or more")):
        with pytest.raises(InvalidArgument) as refused:
            client.lock("a", ttl=ttl)
        assert str(refused.value) == message


def test_the_bounds_are_accepted() -> None:
    for ttl in (0.05, 86_400, timedelta(days=1)):
        lock(ttl=ttl)
    for wait in (0, math.inf, 1e300, timedelta(days=999_999)):
        lock(wait=wait)
    for keep in (1, 400 * 86_400):
        assert client.once(f"keep:{keep}", keep=keep).run(lambda: 1).fresh

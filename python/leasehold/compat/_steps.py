"""The operations of a lock as generators that yield what to wait for, so that threads and asyncio share them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

from .. import _errors
from .._native import Call
from .._waiting import wait, wait_async
from ._errors import StoreUnavailable

T = TypeVar("T")

#: Yields a call and receives its answer, or yields a number of seconds to sleep.
Steps: TypeAlias = Generator[Call | float, Any, T]


def run(steps: Steps[T]) -> T:
    """Runs the steps in this thread or greenlet."""
    try:
        step = next(steps)
        while True:
            try:
                answer: Any = None
                if isinstance(step, float):
                    time.sleep(step)
                else:
                    answer = wait(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except _errors.StoreUnavailable as error:
        raise StoreUnavailable(*error.args) from error


async def run_async(steps: Steps[T]) -> T:
    """Runs the steps in this task."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await (asyncio.sleep(step) if isinstance(step, float) else wait_async(step))
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except _errors.StoreUnavailable as error:
        raise StoreUnavailable(*error.args) from error

"""GPU locks: one task at a time on each GPU, and a task that dies loses its GPU.

    >>> from leasehold import gpu
    >>> gpu.configure("memory:")  # or redis://…; the default is this machine's SQLite file
    >>> @gpu.gpu_lock(gpu_id=0, max_wait_time=1800)
    ... def transcribe(file):
    ...     return f"{file} on GPU {gpu.current().id}"
    >>> transcribe("talk.wav")
    'talk.wav on GPU 0'

The lock of a GPU is ``gpu_lock:<id>``, an ordinary lock that can be inspected and waited for. Its lease (300 s by default) is
renewed as long as the task lives: an hour of work keeps its GPU, and a process that was killed loses it after five minutes.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar, cast

from ._errors import InvalidArgument
from ._gpu_current import Gpu, current, held
from ._gpu_manager import SmartGpuLockManager
from ._gpu_settings import Heartbeat, Settings, client_of, configure, gpu_number, settings, visible_devices
from ._reentry import Entry
from ._lock import Guard, ReleaseIfLast
from ._pool import Permit
from ._arguments import Seconds, lease, optional_lease, optional_seconds, seconds

__all__ = [
    "Gpu",
    "Heartbeat",
    "Settings",
    "SmartGpuLockManager",
    "configure",
    "current",
    "empty_torch_cache",
    "gpu_lock",
    "hold",
    "hold_async",
    "settings",
]

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("leasehold")


def empty_torch_cache() -> None:
    """Frees PyTorch's cached GPU memory. This is the default clean-up. It does nothing if PyTorch is not loaded or has not used a
    GPU; it never loads PyTorch."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and getattr(cuda, "is_initialized", lambda: True)():
        gc.collect()
        cuda.empty_cache()


def gpu_lock(
    gpu_id: int | str = 0,
    max_wait_time: Seconds | None = None,
    *,
    gpu: Literal["any"] | None = None,
    gpus: int | None = None,
    lock_timeout: Seconds | None = None,
    cleanup: Callable[[], Any] | None = empty_torch_cache,
    task_name: str | None = None,
) -> Callable[[F], F]:
    """Decorates a function, ``def`` or ``async def``, which then runs alone on a GPU. Functions that it calls may enter the lock
    again. A task or thread that it starts takes its own GPU, or waits for one.

    :param gpu_id: the number of the GPU, or the name of the function's parameter that has it.
    :param max_wait_time: how many seconds to wait before :class:`~leasehold.LockNotAcquired`, which names the holder.
        Default: the configured time (300 s).
    :param gpu: ``"any"`` for any free GPU. The function gets its number as the parameter ``gpu_id``, if it has one, and by
        :func:`current`.
    :param gpus: with ``gpu="any"``: the number of GPUs, which are 0 to N-1. Default: the configured number, else the GPUs
        in ``CUDA_VISIBLE_DEVICES``.
    :param lock_timeout: the ttl of the lease. Default: the configured one.
    :param cleanup: a function that runs before the GPU is released, even after an exception; for ``async def`` it may be
        async, too. If it fails, a warning is logged and the GPU is released. ``None`` for no clean-up.
    :param task_name: the name that people see for the holder. Default: the function's name.

    >>> configure("memory:")
    >>> @gpu_lock(gpu="any", gpus=2)
    ... def train(gpu_id):
    ...     return gpu_id
    >>> train()
    0
    """
    if callable(gpu_id):
        raise InvalidArgument("gpu_lock is a decorator with arguments: write @gpu_lock() or @gpu_lock(gpu_id=0)")
    if gpu not in (None, "any"):
        raise InvalidArgument(f'gpu: {gpu!r} is not "any"; name a certain GPU with gpu_id')
    if not isinstance(gpu_id, str):
        gpu_number(gpu_id)
    wait = optional_seconds("max_wait_time", max_wait_time)
    ttl = optional_lease("lock_timeout", lock_timeout)

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        owner = task_name or _name_of(function)
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            # The call only makes the generator, whose body would run after the release of the GPU.
            raise InvalidArgument(f"gpu_lock: {owner} is a generator: hold the GPU inside it, `with gpu.hold(0):`")
        if inspect.iscoroutinefunction(cleanup) and not is_async:
            raise InvalidArgument(f"cleanup of {owner}: an async cleanup needs an async function")
        if isinstance(gpu_id, str) and gpu_id not in signature.parameters:
            raise InvalidArgument(f"gpu_id: {owner} has no parameter {gpu_id!r}")
        passes_id = gpu == "any" and "gpu_id" in signature.parameters

        def which(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
            if gpu == "any":
                return None
            if not isinstance(gpu_id, str):
                return gpu_id
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return gpu_number(bound.arguments[gpu_id])

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with hold(which(args, kwargs), gpus=gpus, max_wait_time=wait, lock_timeout=ttl, cleanup=cleanup,
                      task_name=owner) as mine:  # fmt: skip
                return function(*args, **({**kwargs, "gpu_id": mine.id} if passes_id else kwargs))

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            async with hold_async(which(args, kwargs), gpus=gpus, max_wait_time=wait, lock_timeout=ttl,
                                  cleanup=cleanup, task_name=owner) as mine:  # fmt: skip
                return await function(*args, **({**kwargs, "gpu_id": mine.id} if passes_id else kwargs))

        return cast(F, run_async if is_async else run)

    return decorate


@contextmanager
def hold(
    gpu_id: int | None = 0,
    *,
    gpus: int | None = None,
    max_wait_time: float | None = None,
    lock_timeout: float | None = None,
    cleanup: Callable[[], Any] | None = empty_torch_cache,
    task_name: str | None = None,
) -> Iterator[Gpu]:
    """Holds a GPU during a ``with``; ``None`` stands for any GPU. The other arguments are those of :func:`gpu_lock`.

    >>> configure("memory:")
    >>> with hold(1) as mine:
    ...     mine.guard.name
    'gpu_lock:1'
    """
    again = _entered(gpu_id, gpus)
    if again is not None:
        with ReleaseIfLast(again.guard), held.entered_again(again) as mine:
            yield mine
        return
    request = _Request(gpu_id, gpus, max_wait_time, lock_timeout, task_name)
    with request.lock as permit:
        mine = request.granted(permit)
        with held.entered(request.client, mine.guard, mine):
            try:
                yield mine
            finally:
                with only_warn(mine.guard.name):
                    if cleanup is not None:
                        cleanup()


@asynccontextmanager
async def hold_async(
    gpu_id: int | None = 0,
    *,
    gpus: int | None = None,
    max_wait_time: float | None = None,
    lock_timeout: float | None = None,
    cleanup: Callable[[], Any] | None = empty_torch_cache,
    task_name: str | None = None,
) -> AsyncIterator[Gpu]:
    """:func:`hold` for ``async with``. When the lease is lost, the work is cancelled with :class:`~leasehold.LockLost`."""
    again = _entered(gpu_id, gpus)
    if again is not None:
        async with ReleaseIfLast(again.guard):
            with held.entered_again(again) as mine:
                yield mine
        return
    request = _Request(gpu_id, gpus, max_wait_time, lock_timeout, task_name)
    async with request.lock as permit:
        mine = request.granted(permit)
        with held.entered(request.client, mine.guard, mine):
            try:
                yield mine
            finally:
                with only_warn(mine.guard.name):
                    if cleanup is not None:
                        cleaned = cleanup()
                        if inspect.isawaitable(cleaned):
                            await cleaned


class _Request:
    """One request for a GPU, with the configured settings."""

    def __init__(
        self,
        gpu_id: int | None,
        gpus: int | None,
        max_wait_time: float | None,
        lock_timeout: float | None,
        task_name: str | None,
    ) -> None:
        now = settings()
        self._gpu_id = gpu_id
        self.client = client_of()
        wait = now.max_wait_time if max_wait_time is None else seconds("max_wait_time", max_wait_time)
        ttl = now.ttl if lock_timeout is None else lease("lock_timeout", lock_timeout)
        if gpu_id is None:
            pool = self.client.pool(now.pool_name, now.members(gpus))
            self.lock: Any = pool.acquire(wait=wait, ttl=ttl, renew=now.heartbeat.enabled, owner=task_name)
        else:
            name = now.lock_name(gpu_id)
            self.lock = self.client.lock(name, wait=wait, ttl=ttl, renew=now.heartbeat.enabled, owner=task_name)

    def granted(self, granted: Permit | Guard) -> Gpu:
        if isinstance(granted, Permit):
            return _gpu(granted.index, granted.guard)
        assert self._gpu_id is not None
        return _gpu(self._gpu_id, granted)


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function; for a callable object, the name of its class."""
    named = getattr(function, "func", function)
    return str(getattr(named, "__qualname__", type(named).__qualname__))[-256:]


def _gpu(gpu_id: int, guard: Guard) -> Gpu:
    visible = visible_devices()
    return Gpu(gpu_id, visible.index(gpu_id) if gpu_id in visible else gpu_id, guard)


def _entered(gpu_id: int | None, gpus: int | None) -> Entry[Gpu] | None:
    """The lock of the GPU, if the caller has entered it already."""
    now = settings()
    ids = now.members(gpus) if gpu_id is None else (gpu_id,)
    return held.find(client_of(), [now.lock_name(gpu_id) for gpu_id in ids])


@contextmanager
def only_warn(lock_name: str) -> Iterator[None]:
    """Logs a failed clean-up as a warning, so that it neither keeps the GPU nor hides an error of the task."""
    try:
        yield
    except Exception as problem:
        log.warning("the clean-up failed; %s is released anyway: %r", lock_name, problem)

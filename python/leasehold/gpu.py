"""GPUs: one task at a time on each, and a dead one is rid of it.

    >>> from leasehold import gpu
    >>> gpu.configure("memory:")  # or redis://…; the default is this machine's SQLite file
    >>> @gpu.gpu_lock(gpu_id=0, max_wait_time=1800)
    ... def transcribe(file):
    ...     return f"{file} on GPU {gpu.current().id}"
    >>> transcribe("talk.wav")
    'talk.wav on GPU 0'

The lock of a GPU is ``gpu_lock:<id>``, an ordinary lock that people can see and wait for. Its lease (300 s unless
configured otherwise) is renewed for as long as the task lives: an hour of work keeps its GPU, a process that was
killed is rid of it in five minutes.
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
from ._gpu_held import Gpu, current, held
from ._gpu_manager import SmartGpuLockManager
from ._gpu_settings import Heartbeat, Settings, client_of, configure, gpu_number, settings, visible_devices
from ._inside import Entry
from ._lock import Guard, Last
from ._pool import Permit
from ._times import Seconds, lease, optional_lease, optional_seconds, seconds

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
    """Gives PyTorch's cached GPU memory back to the device: the clean-up unless another one is named. It does
    nothing where PyTorch is not loaded, or has not used a GPU; it never loads it."""
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
    """Runs a function, ``def`` or ``async def``, on a GPU of its own. What it calls may enter it again. A task or thread
    that it starts takes a GPU of its own, or waits for one.

    :param gpu_id: which GPU; a text names the parameter that says it.
    :param max_wait_time: at most so many seconds, then :class:`~leasehold.LockNotAcquired`, which says who holds
        it. As configured (300 s) unless said.
    :param gpu: ``"any"``: any one that is free. The function learns which by a parameter ``gpu_id``, if it has
        one, or by :func:`current`.
    :param gpus: with ``gpu="any"``: there are so many, 0 to N-1; otherwise as configured, or as
        ``CUDA_VISIBLE_DEVICES`` says.
    :param lock_timeout: another lease than the configured one.
    :param cleanup: runs before the GPU is given back, whatever happened; with ``async def`` it may be one, too.
        When it fails, that is a warning, and the GPU is given back all the same. ``None``: nothing.
    :param task_name: what people read who ask for the holder; the function's name unless said.

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
        raise InvalidArgument(f'gpu: {gpu!r} is not "any"; a certain one is named by gpu_id')
    if not isinstance(gpu_id, str):
        gpu_number(gpu_id)
    wait = optional_seconds("max_wait_time", max_wait_time)
    ttl = optional_lease("lock_timeout", lock_timeout)

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        owner = task_name or _name_of(function)
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            # Calling it only makes the generator: what it does would be done after the GPU was given back.
            raise InvalidArgument(f"gpu_lock: {owner} is a generator: hold the GPU inside of it, `with gpu.hold(0):`")
        if inspect.iscoroutinefunction(cleanup) and not is_async:
            raise InvalidArgument(f"cleanup of {owner}: an async one needs an async function")
        if isinstance(gpu_id, str) and gpu_id not in signature.parameters:
            raise InvalidArgument(f"gpu_id: {owner} has no parameter {gpu_id!r}")
        tell = gpu == "any" and "gpu_id" in signature.parameters

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
                return function(*args, **({**kwargs, "gpu_id": mine.id} if tell else kwargs))

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            async with hold_async(which(args, kwargs), gpus=gpus, max_wait_time=wait, lock_timeout=ttl,
                                  cleanup=cleanup, task_name=owner) as mine:  # fmt: skip
                return await function(*args, **({**kwargs, "gpu_id": mine.id} if tell else kwargs))

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
    """Holds a GPU for the length of a ``with``; ``None`` is any. The rest is as for :func:`gpu_lock`.

    >>> configure("memory:")
    >>> with hold(1) as mine:
    ...     mine.guard.name
    'gpu_lock:1'
    """
    again = _entered(gpu_id, gpus)
    if again is not None:
        with Last(again.guard), held.entered_again(again) as mine:
            yield mine
        return
    request = _Request(gpu_id, gpus, max_wait_time, lock_timeout, task_name)
    with request.asked() as permit:
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
    """As :func:`hold`, for ``async with``. When the lease is lost, the work is cancelled with
    :class:`~leasehold.LockLost`."""
    again = _entered(gpu_id, gpus)
    if again is not None:
        async with Last(again.guard):
            with held.entered_again(again) as mine:
                yield mine
        return
    request = _Request(gpu_id, gpus, max_wait_time, lock_timeout, task_name)
    async with request.asked() as permit:
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
    """One request for a GPU, as the settings say it."""

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
            self._asked: Any = pool.acquire(wait=wait, ttl=ttl, renew=now.heartbeat.enabled, owner=task_name)
        else:
            name = now.lock_name(gpu_id)
            self._asked = self.client.lock(name, wait=wait, ttl=ttl, renew=now.heartbeat.enabled, owner=task_name)

    def asked(self) -> Any:
        return self._asked

    def granted(self, granted: Permit | Guard) -> Gpu:
        if isinstance(granted, Permit):
            return _gpu(granted.index, granted.guard)
        assert self._gpu_id is not None
        return _gpu(self._gpu_id, granted)


def _name_of(function: Callable[..., Any]) -> str:
    """What people call it; an object that is called like a function has its class's name."""
    named = getattr(function, "func", function)
    return str(getattr(named, "__qualname__", type(named).__qualname__))[-256:]


def _gpu(gpu_id: int, guard: Guard) -> Gpu:
    visible = visible_devices()
    return Gpu(gpu_id, visible.index(gpu_id) if gpu_id in visible else gpu_id, guard)


def _entered(gpu_id: int | None, gpus: int | None) -> Entry[Gpu] | None:
    """The lock of the GPU, if the caller is inside of it already."""
    now = settings()
    ids = now.members(gpus) if gpu_id is None else (gpu_id,)
    return held.find(client_of(), [now.lock_name(gpu_id) for gpu_id in ids])


@contextmanager
def only_warn(lock_name: str) -> Iterator[None]:
    """A clean-up that fails keeps nobody's GPU, and hides nobody's error."""
    try:
        yield
    except Exception as problem:
        log.warning("the clean-up failed, %s is given back all the same: %r", lock_name, problem)

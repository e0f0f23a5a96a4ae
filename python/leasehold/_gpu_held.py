"""Which GPUs the caller runs on."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ._lock import Guard


@dataclass(frozen=True)
class Gpu:
    """A GPU that is ours for now."""

    #: Its number, as its lock names it.
    id: int
    #: Its number for this process: its place in ``CUDA_VISIBLE_DEVICES`` where that names it. For ``cuda:<device>``.
    device: int
    #: Holds its lock: fence, ``lost``, ``raise_if_lost()``.
    guard: Guard


#: What the running thread, task or greenlet is inside of, the innermost last.
_held: ContextVar[tuple[Gpu, ...]] = ContextVar("leasehold_gpus", default=())


def current() -> Gpu | None:
    """The GPU that the caller runs on, however deep it was called; ``None`` outside of any."""
    held = _held.get()
    return held[-1] if held else None


def inside(lock_names: Container[str]) -> Gpu | None:
    """The GPU of one of these locks, if the caller is inside of it already."""
    held = [mine for mine in _held.get() if mine.guard.name in lock_names and mine.guard.is_valid]
    return held[-1] if held else None


@contextmanager
def as_current(mine: Gpu) -> Iterator[None]:
    """What runs in this ``with`` runs on that GPU."""
    # Without what a signal's exception left behind.
    held = (known for known in _held.get() if known.guard._native.is_held)
    before = _held.set((*held, mine))
    try:
        yield
    finally:
        _held.reset(before)

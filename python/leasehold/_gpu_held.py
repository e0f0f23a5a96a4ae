"""Which GPUs the caller runs on."""

from __future__ import annotations

from dataclasses import dataclass

from ._inside import Inside
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


held: Inside[Gpu] = Inside("leasehold_gpus")


def current() -> Gpu | None:
    """The GPU that the calling thread, asyncio task or greenlet holds, however deep it was called; ``None`` outside of
    any. A task or thread that was started inside holds none of its own: hand it the :class:`Gpu`."""
    return held.innermost()

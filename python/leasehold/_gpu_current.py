"""The GPUs that the caller holds."""

from __future__ import annotations

from dataclasses import dataclass

from ._reentry import EnteredLocks
from ._lock import Guard


@dataclass(frozen=True)
class Gpu:
    """A GPU that the caller holds."""

    #: Its number, as its lock names it.
    id: int
    #: Its number in this process, for ``cuda:<device>``: its place in ``CUDA_VISIBLE_DEVICES``, if that lists it.
    device: int
    #: The guard of its lock, with ``fence``, ``lost`` and ``raise_if_lost()``.
    guard: Guard


held: EnteredLocks[Gpu] = EnteredLocks("leasehold_gpus")


def current() -> Gpu | None:
    """The GPU that the calling thread, asyncio task or greenlet holds; ``None`` outside of any. A task or thread that was
    started under the lock holds no GPU itself: pass it the :class:`Gpu`."""
    return held.innermost()

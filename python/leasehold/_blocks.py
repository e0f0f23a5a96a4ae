"""What each ``with`` block of an object holds. Many threads and tasks can enter one object, also inside its own block.

A signal's exception can arrive between any two steps, also between the end of a block and the first line of ``__exit__``. Then
``__exit__`` never runs, and a long-lived object that holds the guard would hold its lock for ever. So the guard belongs to the
``with`` alone. The interpreter looks up ``__exit__`` before it calls ``__enter__``, and keeps the result until the block has
ended or is unwound. :func:`per_block` gives each ``with`` an ``__exit__`` of its own, which refers to what ``__enter__``
acquired (:meth:`Blocks.begin`). When the ``with`` ends in any way, this ``__exit__`` is freed, the guard with it, and a freed
guard releases its lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")

_NOTHING: Any = object()


class Block(Generic[T]):
    """One block of an object, and what it holds while it is open."""

    __slots__ = ("__weakref__", "held", "of")

    def __init__(self, of: Blocks[T]) -> None:
        self.of = of
        self.held: T = _NOTHING


class Blocks(Generic[T]):
    """The blocks of one object, which keeps them in its attribute ``_blocks``."""

    __slots__ = ("_by_hand",)

    def __init__(self) -> None:
        #: The blocks that were entered without a ``with``, by ``lock.__enter__()`` or an ``ExitStack``: by identity, in the order
        #: of entering. Threads share it, because each operation on a dict is atomic.
        self._by_hand: dict[int, Block[T]] = {}

    def begin(self) -> Block[T] | None:
        """The block of the ``with`` that is calling ``__enter__``; ``None`` without a ``with``. ``__enter__`` calls it first."""
        block, _next.block = _next.block(), dead
        return block if block is not None and block.of is self else None

    def enter(self, block: Block[T] | None, held: T) -> None:
        """Starts the block, which holds `held`."""
        if block is None:
            block = Block(self)
            self._by_hand[id(block)] = block
        block.held = held
        _entered.set((*(known for known in _entered.get() if known() is not None), weakref.ref(block)))

    def leave(self, block: Block[T] | None) -> T:
        """Ends a block and returns what it holds. Without a ``with`` it is the innermost block of this thread, task or
        greenlet; if a framework ends a block in another context than it entered it in, it is the block entered last."""
        if block is None or block.held is _NOTHING:
            mine = [known for known in _open_here() if known.of is self] or [*self._by_hand.values()][::-1]
            if not mine:
                raise RuntimeError("__exit__ was called without __enter__")
            block = mine[0]
        self._by_hand.pop(id(block), None)
        held, block.held = block.held, _NOTHING
        return held

    def forget(self, held: T) -> None:
        """Undoes :meth:`enter`, after a signal's exception arrived before the first line of the block."""
        for block in [*_open_here(), *self._by_hand.values()]:
            if block.held is held:
                self._by_hand.pop(id(block), None)
                block.held = _NOTHING


def per_block(
    leave: Callable[Concatenate[S, Block[T] | None, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Makes an ``__exit__`` or ``__aexit__`` that gets the block it ends as its first argument; ``None`` if it is called on the
    class."""
    return cast("Callable[Concatenate[S, P], R]", _PerBlock(leave))


class _PerBlock:
    def __init__(self, leave: Callable[..., Any]) -> None:
        def by_hand(self: Any, kind: Any, error: Any, trace: Any) -> Any:
            return leave(self, None, kind, error, trace)

        by_hand.__name__, by_hand.__qualname__ = leave.__name__, leave.__qualname__
        self._leave, self._by_hand = leave, by_hand

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., Any]:
        if instance is None:
            return self._by_hand
        block: Block[Any] = Block(instance._blocks)
        _next.block = weakref.ref(block)
        return partial(self._leave, instance, block)


def dead() -> None:
    """A weak reference to nothing."""
    return None


class _Next(threading.local):
    """The block that the running thread is about to enter."""

    def __init__(self) -> None:
        self.block: Callable[[], Block[Any] | None] = dead


_next = _Next()

#: The blocks of the running thread, task or greenlet, the innermost last.
_entered: ContextVar[tuple[weakref.ref[Block[Any]], ...]] = ContextVar("leasehold_blocks", default=())


def _open_here() -> list[Block[Any]]:
    """The open blocks that the caller runs in, the innermost first."""
    blocks = (known() for known in reversed(_entered.get()))
    return [block for block in blocks if block is not None and block.held is not _NOTHING]


def held_here() -> list[Any]:
    """What the open blocks of the caller hold, the innermost first."""
    return [block.held for block in _open_here()]

"""What the blocks of one object hold: a ``with`` may be entered by many threads and tasks, and inside itself.

A signal's exception can come between any two steps, also between a block and the first line of ``__exit__``. Nobody leaves
the block then, and an object that lives on would hold its lock for ever. So what a block holds belongs to its ``with``
alone: the interpreter looks ``__exit__`` up before it calls ``__enter__``, and keeps what it found until the block was left
or unwound. Each ``with`` finds one of its own (:func:`leaves`), which holds what ``__enter__`` got (:meth:`Blocks.begin`). It
goes with the ``with``, the guard goes with it, and a guard that goes gives its lock back.
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
    """One block: whose it is, and what it holds while it is open."""

    __slots__ = ("__weakref__", "held", "of")

    def __init__(self, of: Blocks[T]) -> None:
        self.of = of
        self.held: T = _NOTHING


class Blocks(Generic[T]):
    """The blocks of one object, which is the ``_blocks`` of that object."""

    __slots__ = ("_by_hand",)

    def __init__(self) -> None:
        #: Those that were entered without a ``with``: ``lock.__enter__()``, an ``ExitStack``. By identity, in the order of
        #: entering. Threads share it: each step is one that the interpreter does at once.
        self._by_hand: dict[int, Block[T]] = {}

    def begin(self) -> Block[T] | None:
        """The block of the ``with`` that is about to be entered, if it is by one: the first thing that ``__enter__`` does."""
        block, _about.block = _about.block(), nobody
        return block if block is not None and block.of is self else None

    def enter(self, block: Block[T] | None, held: T) -> None:
        """The block begins, and holds this."""
        if block is None:
            block = Block(self)
            self._by_hand[id(block)] = block
        block.held = held
        _inside.set((*(known for known in _inside.get() if known() is not None), weakref.ref(block)))

    def leave(self, block: Block[T] | None) -> T:
        """What the block holds that ends now. Without a ``with`` it is the innermost of this thread, task or greenlet;
        frameworks that end it in another context than it began in get what anybody entered last."""
        if block is None or block.held is _NOTHING:
            mine = [known for known in _open_here() if known.of is self] or [*self._by_hand.values()][::-1]
            if not mine:
                raise RuntimeError("a block is left that was not entered")
            block = mine[0]
        self._by_hand.pop(id(block), None)
        held, block.held = block.held, _NOTHING
        return held

    def forget(self, held: T) -> None:
        """The block was not entered after all: a signal came before its first line."""
        for block in [*_open_here(), *self._by_hand.values()]:
            if block.held is held:
                self._by_hand.pop(id(block), None)
                block.held = _NOTHING


def leaves(
    leave: Callable[Concatenate[S, Block[T] | None, P], R],
) -> Callable[Concatenate[S, P], R]:
    """An ``__exit__`` or ``__aexit__`` that is told which block it leaves; ``None`` where it is called on the class."""
    return cast("Callable[Concatenate[S, P], R]", _Leaves(leave))


class _Leaves:
    def __init__(self, leave: Callable[..., Any]) -> None:
        def by_hand(self: Any, kind: Any, error: Any, trace: Any) -> Any:
            return leave(self, None, kind, error, trace)

        by_hand.__name__, by_hand.__qualname__ = leave.__name__, leave.__qualname__
        self._leave, self._by_hand = leave, by_hand

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., Any]:
        if instance is None:
            return self._by_hand
        block: Block[Any] = Block(instance._blocks)
        _about.block = weakref.ref(block)
        return partial(self._leave, instance, block)


def nobody() -> None:
    """What a weak reference to nothing answers."""
    return None


class _About(threading.local):
    """The block that the running thread is about to enter."""

    def __init__(self) -> None:
        self.block: Callable[[], Block[Any] | None] = nobody


_about = _About()

#: What the running thread, task or greenlet is in, the innermost last.
_inside: ContextVar[tuple[weakref.ref[Block[Any]], ...]] = ContextVar("leasehold_blocks", default=())


def _open_here() -> list[Block[Any]]:
    """The blocks that the caller runs in, the innermost first."""
    blocks = (known() for known in reversed(_inside.get()))
    return [block for block in blocks if block is not None and block.held is not _NOTHING]


def held_here() -> list[Any]:
    """What they hold."""
    return [block.held for block in _open_here()]

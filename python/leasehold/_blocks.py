"""What the blocks of one object hold: a ``with`` may be entered by many threads and tasks, and inside itself."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Blocks(Generic[T]):
    """The blocks of one object that were entered and not left yet.

    A signal's exception can come between any two steps. So what a block holds belongs to the object of the ``with`` alone:
    where nobody leaves the block any more, it goes with the object, and a guard that goes gives its lock back.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        #: By identity, in the order of entering. Threads share it: each step is one that the interpreter does at once.
        self._open: dict[int, _Block[T]] = {}

    def enter(self, held: T) -> None:
        """A block begins, and holds this."""
        block = _Block(held)
        self._open[id(block)] = block
        _inside.set((*(known for known in _inside.get() if known() is not None), weakref.ref(block)))

    def leave(self) -> T:
        """What the block that ends now holds: the innermost of this thread, task or greenlet. Frameworks that end it in
        another context than it began in get what anybody entered last."""
        inside = _inside.get()
        for at in reversed(range(len(inside))):
            block = self._open.pop(id(inside[at]()), None)
            if block is not None:
                _inside.set(inside[:at] + inside[at + 1 :])
                return block.held
        if not self._open:
            raise RuntimeError("a block is left that was not entered")
        return self._open.popitem()[1].held

    def forget(self, held: T) -> None:
        """The block was not entered after all: a signal came before its first line."""
        for known, block in list(self._open.items()):
            if block.held is held:
                self._open.pop(known, None)


class _Block(Generic[T]):
    __slots__ = ("__weakref__", "held")

    def __init__(self, held: T) -> None:
        self.held = held


#: What the running thread, task or greenlet is in, the innermost last.
_inside: ContextVar[tuple[weakref.ref[_Block[Any]], ...]] = ContextVar("leasehold_blocks", default=())


def held_here() -> list[Any]:
    """What the blocks hold that the caller runs in, the innermost first."""
    blocks = (known() for known in reversed(_inside.get()))
    return [block.held for block in blocks if block is not None]

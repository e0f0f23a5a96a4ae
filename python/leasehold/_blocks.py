"""What the blocks of one object hold: a ``with`` may be entered by many threads and tasks, and inside itself."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar, cast

T = TypeVar("T")


class Blocks(Generic[T]):
    """The blocks of one object that were entered and not left yet."""

    def __init__(self) -> None:
        #: By identity, in the order of entering. Threads share it: each step is one that the interpreter does at once.
        self._open: dict[int, _Block] = {}

    def enter(self, held: T) -> None:
        """A block begins, and holds this."""
        block = _Block(self, held)
        self._open[id(block)] = block
        _inside.set((*_inside.get(), block))

    def leave(self) -> T:
        """What the block that ends now holds: the innermost of this thread, task or greenlet. Frameworks that end it in
        another context than it began in get what anybody entered last."""
        inside = _inside.get()
        for at in reversed(range(len(inside))):
            if inside[at].of is self:
                _inside.set(inside[:at] + inside[at + 1 :])
                # One that was left elsewhere is not there any more.
                if self._open.pop(id(inside[at]), None) is not None:
                    return cast(T, inside[at].held)
        return cast(T, self._open.popitem()[1].held)


class _Block(NamedTuple):
    of: Blocks[Any]
    held: Any


#: What the running thread, task or greenlet is in.
_inside: ContextVar[tuple[_Block, ...]] = ContextVar("leasehold_blocks", default=())

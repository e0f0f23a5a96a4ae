"""redis-py's lock, for threads and greenlets."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from .._times import Seconds
from ._base import BaseLock, Token
from ._errors import LockError
from ._steps import run


class Lock(BaseLock):
    """As ``redis.lock.Lock``, with the same arguments and methods, on the same key.

    :param redis: a redis-py client, whose server, database and login are used on a connection of our own; a
        :class:`leasehold.Client` with ``namespace=""``; or a URL.
    :param name: the lock, and its key.
    :param timeout: the lock ends after so many seconds, from 0.05 s to 24 h, unless it is released or extended
        before. ``None``: it is renewed until it is released or this process ends; a process that is killed
        keeps it for 30 s.
    :param sleep: the pause between two tries for a lock that is taken with a `token` of one's own. Otherwise a
        waiter is woken when it is its turn.
    :param blocking: whether ``acquire`` waits.
    :param blocking_timeout: how many seconds at most; ``None`` without limit.
    :param thread_local: whether what is held is known to the thread alone that acquired it.
    :param raise_on_release_error: whether a ``with`` whose lock was not ours any more at its end raises
        :class:`LockNotOwnedError`; otherwise a warning is logged.

    What is different from redis-py:

    - Waiters are served in the order of asking, and woken at once. Behind a lock of redis-py's, which
      tells nobody of its end, the first in line looks ten times a second.
    - The value of the key is a record (``redis-cli GET`` shows who holds it), not the bare token.
    - There is no lock without an end: see `timeout`.
    - A lease is never shortened: ``extend(5, replace_ttl=True)`` leaves a lock that has 60 s left as it is.
    - A thread that is new to a lock with ``thread_local`` gets a :class:`LockError` from ``release``, where
      redis-py fails with an ``AttributeError``.

    >>> from leasehold.compat import Lock
    >>> lock = Lock("memory:", "order:42", timeout=30)
    >>> lock.acquire(blocking=False)
    True
    >>> Lock("memory:", "order:42", timeout=30).acquire(blocking=False)
    False
    >>> lock.extend(60)
    True
    >>> lock.release()
    >>> lock.locked()
    False
    """

    def acquire(
        self,
        sleep: Seconds | None = None,
        blocking: bool | None = None,
        blocking_timeout: Seconds | None = None,
        token: Token | None = None,
    ) -> bool:
        """Takes the lock; what is left out is as the constructor was told. ``False``: it is somebody else's.

        :param token: what the lock is held by, instead of a random one. Whoever knows it can release and extend
            the lock, in any process, by setting ``lock.local.token``; make it as hard to guess as a UUID.
        :raises StoreUnavailable: when there was no answer.
        """
        return run(self._acquire(sleep, blocking, blocking_timeout, token))

    def release(self) -> None:
        """Gives the lock back.

        :raises LockNotOwnedError: when it was not ours any more; nothing was touched.
        :raises LockError: when nothing is held by this lock.
        """
        run(self._release())

    def extend(self, additional_time: Seconds, replace_ttl: bool = False) -> Literal[True]:
        """Adds so many seconds to what the lock has left; with `replace_ttl`, so many from now.

        :raises LockNotOwnedError: when it is not ours any more.
        :raises LockError: when nothing is held by this lock, or without a timeout.
        """
        run(self._extend(additional_time, replace_ttl))
        return True

    def reacquire(self) -> Literal[True]:
        """Lets the timeout begin anew. Raises as :meth:`extend`."""
        run(self._reacquire())
        return True

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return run(self._locked())

    def owned(self) -> bool:
        """Whether it is this lock that holds it."""
        return run(self._owned())

    def __enter__(self) -> Lock:
        if not self.acquire():
            raise self._not_in_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except LockError as problem:
            self._left(problem)

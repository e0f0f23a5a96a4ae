"""redis-py's lock for threads and greenlets."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from .._arguments import Seconds
from ._base import BaseLock, Token
from ._errors import LockError
from ._steps import run


class Lock(BaseLock):
    """Replaces ``redis.lock.Lock``, with the same arguments and methods, on the same key.

    :param redis: a redis-py client, whose server, database and login are used for a separate connection; a
        :class:`leasehold.Client` with ``namespace=""``; or a URL.
    :param name: the name of the lock, which is its key.
    :param timeout: the lock ends after this many seconds, from 0.05 s to 24 h, unless it is released or extended
        before. ``None``: it is renewed until it is released or this process ends; after a process was killed it ends
        within 30 s.
    :param sleep: the pause between two tries of an ``acquire`` with a `token`. Without a token, a waiter is woken when it gets
        the lock.
    :param blocking: whether ``acquire`` waits.
    :param blocking_timeout: how many seconds it waits; ``None`` waits without limit.
    :param thread_local: whether only the thread that acquired the lock can release it.
    :param raise_on_release_error: whether a ``with`` whose lock was lost before its end raises
        :class:`LockNotOwnedError`; otherwise a warning is logged.

    Differences from redis-py:

    - Waiters are served in the order of asking, and woken at once. A lock that redis-py holds announces no release, so the
      first waiter polls it ten times a second.
    - The value of the key is a record (``redis-cli GET`` shows the holder), not only the token.
    - Every lock ends: see `timeout`.
    - A lease is never shortened: ``extend(5, replace_ttl=True)`` does not change a lock that has 60 s left.
    - With ``thread_local``, ``release`` in a thread that has not used the lock raises :class:`LockError`; redis-py raises
      ``AttributeError``.

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
        """Acquires the lock. Returns ``False`` if another holder has it. Arguments that are left out have the values given to
        the constructor.

        :param token: the token that holds the lock, instead of a random one. Any process that knows it can release and extend
            the lock by setting ``lock.local.token``; make it as hard to guess as a UUID.
        :raises StoreUnavailable: the store did not answer.
        """
        return run(self._acquire(sleep, blocking, blocking_timeout, token))

    def release(self) -> None:
        """Releases the lock.

        :raises LockNotOwnedError: this object does not hold the lock any more; nothing was changed.
        :raises LockError: this object holds no lock.
        """
        run(self._release())

    def extend(self, additional_time: Seconds, replace_ttl: bool = False) -> Literal[True]:
        """Adds `additional_time` seconds to the time that the lock has left; with `replace_ttl`, the lock ends that many seconds
        from now.

        :raises LockNotOwnedError: this object does not hold the lock any more.
        :raises LockError: this object holds no lock, or it has no timeout.
        """
        run(self._extend(additional_time, replace_ttl))
        return True

    def reacquire(self) -> Literal[True]:
        """Restarts the timeout. It raises what :meth:`extend` raises."""
        run(self._reacquire())
        return True

    def locked(self) -> bool:
        """Whether the lock is held."""
        return run(self._locked())

    def owned(self) -> bool:
        """Whether this object holds the lock."""
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
            self._report_loss(problem)

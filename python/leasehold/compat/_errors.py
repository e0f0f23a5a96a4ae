"""Exceptions that are both redis-py's and leasehold's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _errors

if TYPE_CHECKING:
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import LockError as RedisLockError
    from redis.exceptions import LockNotOwnedError as RedisLockNotOwnedError
    from redis.exceptions import TimeoutError as RedisTimeoutError
else:
    try:
        from redis.exceptions import ConnectionError as RedisConnectionError
        from redis.exceptions import LockError as RedisLockError
        from redis.exceptions import LockNotOwnedError as RedisLockNotOwnedError
        from redis.exceptions import TimeoutError as RedisTimeoutError
    except ImportError:
        # A lock on a URL works without redis-py, and then no code catches redis-py's exceptions.

        class RedisConnectionError(Exception):
            pass

        class RedisTimeoutError(Exception):
            pass

        class RedisLockError(ValueError):
            def __init__(self, message=None, lock_name=None):
                super().__init__(message)
                self.message = message
                self.lock_name = lock_name

        class RedisLockNotOwnedError(RedisLockError):
            pass


class LockError(_errors.LeaseholdError, RedisLockError):
    """The call is invalid in the state of the lock, or the lock was not acquired in time. Also redis-py's ``LockError``, if
    redis-py is installed."""

    def __init__(self, message: str | None = None, lock_name: str | None = None) -> None:
        super().__init__(message, lock_name)


class LockNotOwnedError(LockError, RedisLockNotOwnedError):
    """The lock object does not hold the lock (any more). Also redis-py's ``LockNotOwnedError``."""


class StoreUnavailable(_errors.StoreUnavailable, RedisConnectionError, RedisTimeoutError):
    """The store did not answer. Also redis-py's ``ConnectionError`` and ``TimeoutError``."""

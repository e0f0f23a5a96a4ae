"""redis-py's locks on leases: the same arguments, methods, exceptions and keys.

    >>> from leasehold.compat import Lock
    >>> with Lock("memory:", "order:42", timeout=30, blocking_timeout=5) as lock:
    ...     lock.owned()
    True

Where a program has ``redis_client.lock(name, …)``, it says ``redis_client.lock(name, …, lock_class=Lock)`` (or
``AsyncLock`` for ``redis.asyncio``), or makes a :class:`Lock` of the same client. Workers that use redis-py's
lock and workers that use this one exclude each other, so they can be moved one at a time.

What is different stands in :class:`Lock`.
"""

from ._aio import AsyncLock
from ._errors import LockError, LockNotOwnedError, StoreUnavailable
from ._sync import Lock

__all__ = ["AsyncLock", "Lock", "LockError", "LockNotOwnedError", "StoreUnavailable"]

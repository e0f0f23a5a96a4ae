"""redis-py's locks on leases: the same arguments, methods, exceptions and keys.

    >>> from leasehold.compat import Lock
    >>> with Lock("memory:", "order:42", timeout=30, blocking_timeout=5) as lock:
    ...     lock.owned()
    True

Replace ``redis_client.lock(name, …)`` by ``redis_client.lock(name, …, lock_class=Lock)`` (``AsyncLock`` for
``redis.asyncio``), or make a :class:`Lock` with the same client. Workers with redis-py's lock and workers with this one exclude
each other, so they can be migrated one at a time.

:class:`Lock` lists the differences.
"""

from ._aio import AsyncLock
from ._errors import LockError, LockNotOwnedError, StoreUnavailable
from ._sync import Lock

__all__ = ["AsyncLock", "Lock", "LockError", "LockNotOwnedError", "StoreUnavailable"]

"""Locks that people can hold, see and trust.

    >>> import leasehold
    >>> client = leasehold.connect("memory:")  # or sqlite:, redis://…
    >>> with client.lock("order:42", ttl=30, wait=5) as guard:
    ...     guard.fence > 0
    True

The same object works in asyncio::

    async with client.lock("order:42", ttl=30, wait=5) as guard:
        ...

A client is for the whole process: threads, event loops and greenlets share it, and a forked child connects again. A native
thread renews leases and waits, even while Python code holds the GIL.

``leasehold.gpu`` is for GPUs, ``leasehold.celery`` for Celery tasks, ``leasehold.task_lock`` for task functions with a lock per
key, ``leasehold.compat`` for programs with redis-py's locks. :func:`configure` sets the configuration file.
``leasehold.__version__`` is the version.
"""

from ._client import Client, connect, connect_async
from ._config import configure
from ._errors import (
    ClientClosed,
    InvalidArgument,
    LeaseholdError,
    LockLost,
    LockNotAcquired,
    NotEvicted,
    OtherPayload,
    StoreUnavailable,
)
from ._info import Evicted, LockInfo, Statistics, Waiter
from ._lock import Guard, Lock, Lost, current_fence
from ._native import __version__, new_token
from ._once import Claim, Once, Outcome
from ._pool import Permit, Pool, PoolMember, PoolRequest

__all__ = [
    "Claim",
    "Client",
    "ClientClosed",
    "Evicted",
    "Guard",
    "InvalidArgument",
    "LeaseholdError",
    "Lock",
    "LockInfo",
    "LockLost",
    "LockNotAcquired",
    "Lost",
    "NotEvicted",
    "Once",
    "OtherPayload",
    "Outcome",
    "Permit",
    "Pool",
    "PoolMember",
    "PoolRequest",
    "Statistics",
    "StoreUnavailable",
    "Waiter",
    "__version__",
    "configure",
    "connect",
    "connect_async",
    "current_fence",
    "new_token",
]

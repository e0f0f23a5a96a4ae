"""Clients: each has the locks of one store."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from . import _native
from ._config import Path, load, this_file
from ._errors import LockNotAcquired
from ._info import Evicted, LockInfo, Statistics
from ._lock import Guard, Lock, OnLost
from ._once import Claim, Once
from ._pool import Pool
from ._arguments import (
    OnUnavailable,
    Seconds,
    as_exact_json,
    flag,
    one_of,
    optional_lease,
    optional_seconds,
    optional_text,
    retention,
    terms,
    text,
)
from ._waiting import wait as _wait
from ._waiting import wait_async

#: How long ``close`` waits for the release of the client's locks, in seconds.
CLOSE_TIMEOUT = 5.0


def connect(
    url: str | None = None,
    *,
    namespace: str | None = None,
    owner: str | None = None,
    ttl: Seconds | None = None,
    on_unavailable: OnUnavailable | None = None,
    answer_within: Seconds | None = None,
    patience: Seconds | None = None,
    config: Path | None = None,
    lazy: bool = False,
) -> Client:
    """Connects to a store. An argument that is left out comes from the environment (``LEASEHOLD_…``), then from the
    configuration file, then from the defaults below.

    :param url: ``sqlite:`` (the default file), ``sqlite:PATH``, ``redis://[user:password@]host[:port][/db]``,
        ``rediss://…`` (TLS) or ``memory:``. Default: ``LEASEHOLD_STORE``, else the default SQLite file, which the command
        uses, too.
    :param namespace: separates the names of this client from those of others. Default: ``leasehold``. Names that begin
        with ``gpu_lock:`` or ``task_lock:`` are the same in all namespaces.
    :param owner: the name that people see for the holder. Default: the program's name. Host and process id are added.
    :param ttl: the ttl of locks that set none. Default: 30 s.
    :param on_unavailable: what happens when the store cannot be reached: with ``"closed"`` the work fails; with
        ``"open"`` it runs without protection, with a warning and an entry in the journal.
    :param answer_within: the timeout of one request. Default: 2 s.
    :param patience: how long a waiter keeps waiting while the store cannot be reached. Default: 10 s.
    :param config: a YAML file with these and more settings. Default: the file of :func:`leasehold.configure`, else the
        one that ``LEASEHOLD_CONFIG`` names.
    :param lazy: connect with the first call, not now: for a client that is made before its server is reachable. Until
        then, calls raise :class:`StoreUnavailable`, or run without protection if `on_unavailable` is ``"open"``.
    :raises StoreUnavailable: the store cannot be reached or used.
    :raises InvalidArgument: the URL, namespace, owner or a time is invalid.

    >>> with connect("memory:") as client:
    ...     client.is_locked("order:42")
    False
    """
    client = Client(url, namespace, owner, ttl, on_unavailable, answer_within, patience, this_file(config))
    if not lazy:
        _wait(client._native.connect())
    return client


async def connect_async(
    url: str | None = None,
    *,
    namespace: str | None = None,
    owner: str | None = None,
    ttl: Seconds | None = None,
    on_unavailable: OnUnavailable | None = None,
    answer_within: Seconds | None = None,
    patience: Seconds | None = None,
    config: Path | None = None,
) -> Client:
    """:func:`connect` for asyncio."""
    client = Client(url, namespace, owner, ttl, on_unavailable, answer_within, patience, this_file(config))
    await wait_async(client._native.connect())
    return client


class Client:
    """The locks of one store, for a whole process. Made by :func:`connect`.

    All threads, tasks and greenlets share one connection, one renewal task and one place in every queue. Every method that
    waits has a version for asyncio, whose name ends with ``_async``.

    In a forked child a client connects again with the first call. Locks of the parent stay with the parent.
    """

    def __init__(
        self,
        url: str | None,
        namespace: str | None,
        owner: str | None,
        ttl: Seconds | None,
        on_unavailable: OnUnavailable | None,
        answer_within: Seconds | None,
        patience: Seconds | None,
        config: str | None,
        gpu: bool = False,
        keys: tuple[tuple[str, str], ...] = (),
    ) -> None:
        if on_unavailable is not None:
            one_of("on_unavailable", on_unavailable, "closed", "open")
        read = load(config, keys)
        #: The arguments with which another process makes the same client.
        self._arguments = (
            optional_text("url", url),
            optional_text("namespace", namespace),
            text("owner", owner) if owner is not None else read.value_set("owner") or _this_program(),
            optional_lease("ttl", ttl),
            on_unavailable,
            optional_seconds("answer_within", answer_within),
            optional_seconds("patience", patience),
            config,
            gpu,
            keys,
        )
        self._native = _native.Client(read, gpu, *self._arguments[:7])

    @property
    def store(self) -> str | None:
        """The URL of the store, without its password; ``None`` before the first connection."""
        return self._native.store

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        wait: Seconds | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        fenced: bool = True,
        owner: str | None = None,
        on_lost: OnLost = "cancel",
        on_unavailable: OnUnavailable | None = None,
    ) -> Lock:
        """A lock, for ``with``, ``async with`` or :meth:`Lock.acquire`. No request is sent yet.

        :param ttl: how long the store keeps the lease unless it is renewed. Default: the client's ttl.
        :param wait: how long to wait before :class:`LockNotAcquired`; ``None`` waits without limit, 0 does not wait.
        :param renew: renew the lease while the guard lives; otherwise it ends after `ttl`.
        :param max_hold: the longest time to hold the lock, renewals included; after that the lease counts as lost.
        :param fenced: give every grant a fence, a rising number that a resource can check.
        :param owner: the name that people see for the holder. Default: the client's owner.
        :param on_lost: what happens when the lease is lost. ``"cancel"``: the task in an ``async with`` is cancelled with
            :class:`LockLost`, and a ``with`` raises it at its end. ``"continue"``: the work goes on, and a warning is logged.
        :param on_unavailable: what happens when the store cannot be reached: ``"closed"`` or ``"open"``, as for
            :func:`connect`. Default: the client's setting.

        >>> client = connect("memory:")
        >>> with client.lock("order:42", ttl=30, wait=5) as guard:
        ...     guard.name
        'order:42'
        """
        asked = terms(
            ttl=ttl,
            wait=wait,
            renew=renew,
            max_hold=max_hold,
            fenced=fenced,
            owner=owner,
            on_unavailable=on_unavailable,
        )
        return Lock(self._native, name, asked, on_lost)

    def try_lock(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        fenced: bool = True,
        owner: str | None = None,
    ) -> Guard | None:
        """Acquires the lock if it is free, and returns ``None`` if it is held.

        >>> client = connect("memory:")
        >>> with client.lock("order:42"):
        ...     client.try_lock("order:42") is None
        True
        """
        lock = self.lock(name, ttl=ttl, wait=0, renew=renew, max_hold=max_hold, fenced=fenced, owner=owner)
        try:
            return lock.acquire()
        except LockNotAcquired:
            return None

    async def try_lock_async(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        fenced: bool = True,
        owner: str | None = None,
    ) -> Guard | None:
        """:meth:`try_lock` for asyncio."""
        lock = self.lock(name, ttl=ttl, wait=0, renew=renew, max_hold=max_hold, fenced=fenced, owner=owner)
        try:
            return await lock.acquire_async()
        except LockNotAcquired:
            return None

    def acquire_token(
        self,
        name: str,
        token: str,
        *,
        ttl: Seconds | None = None,
        wait: Seconds | None = None,
        fenced: bool = True,
        owner: str | None = None,
    ) -> int | None:
        """Acquires a lock under a token, without a guard, and returns its fence. The lease belongs to no process and is not
        renewed: the token renews and releases it, in any process. :func:`new_token` makes one.

        A second call with the same token returns the same lease with its full ttl, so a call whose answer was lost can be
        repeated.

        >>> client = connect("memory:")
        >>> token = _native.new_token()
        >>> client.acquire_token("deploy", token, ttl=60) is not None
        True
        >>> client.release_token("deploy", token)
        True
        """
        fence: int | None = _wait(self._acquire_token(name, token, ttl, wait, fenced, owner))
        return fence

    async def acquire_token_async(
        self,
        name: str,
        token: str,
        *,
        ttl: Seconds | None = None,
        wait: Seconds | None = None,
        fenced: bool = True,
        owner: str | None = None,
    ) -> int | None:
        """:meth:`acquire_token` for asyncio."""
        fence: int | None = await wait_async(self._acquire_token(name, token, ttl, wait, fenced, owner))
        return fence

    def _acquire_token(
        self, name: str, token: str, ttl: Seconds | None, wait: Seconds | None, fenced: bool, owner: str | None
    ) -> _native.Call:
        asked = terms(ttl=ttl, wait=wait, fenced=fenced, owner=owner)
        return self._native.acquire_token(text("name", name), text("token", token), asked)

    def renew_token(self, name: str, token: str, ttl: Seconds | None = None) -> None:
        """Renews a lease by its token. A `ttl` replaces the ttl that the lease has.

        :raises LockLost: the token does not hold the lock (any more).
        """
        _wait(self._native.renew_token(text("name", name), text("token", token), optional_lease("ttl", ttl)))

    async def renew_token_async(self, name: str, token: str, ttl: Seconds | None = None) -> None:
        """:meth:`renew_token` for asyncio."""
        await wait_async(self._native.renew_token(text("name", name), text("token", token), optional_lease("ttl", ttl)))

    def release_token(self, name: str, token: str) -> bool:
        """Releases a lock by its token, in any process. Returns ``False`` if the token does not hold the lock (any more);
        then nothing is changed."""
        return bool(_wait(self._native.release_token(text("name", name), text("token", token))))

    async def release_token_async(self, name: str, token: str) -> bool:
        """:meth:`release_token` for asyncio."""
        return bool(await wait_async(self._native.release_token(text("name", name), text("token", token))))

    def release_value(self, name: str, value: str, *, reason: str = "normal") -> bool:
        """Releases a lock that another kind of client wrote into Redis as a plain value, such as ``locked_by_<task>``. The
        value is compared and the lock passed to the first waiter in one step. Returns ``False`` if the value does not hold
        the lock (any more); then nothing is changed.

        For services that share a lock with older services during a migration. The name is the key if the namespace is ``""``
        or the name begins with ``gpu_lock:`` or ``task_lock:``."""
        return bool(_wait(self._native.release_value(*_texts(name=name, value=value, reason=reason))))

    async def release_value_async(self, name: str, value: str, *, reason: str = "normal") -> bool:
        """:meth:`release_value` for asyncio."""
        return bool(await wait_async(self._native.release_value(*_texts(name=name, value=value, reason=reason))))

    def info(self, name: str) -> LockInfo:
        """The holder and the waiters of a lock."""
        return LockInfo.from_json(_wait(self._native.info(text("name", name))))

    async def info_async(self, name: str) -> LockInfo:
        """:meth:`info` for asyncio."""
        return LockInfo.from_json(await wait_async(self._native.info(text("name", name))))

    def locks(self, prefix: str = "") -> list[LockInfo]:
        """The held locks whose names begin with `prefix`, sorted by name."""
        return _infos(_wait(self._native.locks(text("prefix", prefix))))

    async def locks_async(self, prefix: str = "") -> list[LockInfo]:
        """:meth:`locks` for asyncio."""
        return _infos(await wait_async(self._native.locks(text("prefix", prefix))))

    def holder(self, name: str) -> LockInfo | None:
        """The holder of a lock; ``None`` if the lock is free. Cheaper than :meth:`info`, because the waiters are not read."""
        return _info(_wait(self._native.holder(text("name", name))))

    async def holder_async(self, name: str) -> LockInfo | None:
        """:meth:`holder` for asyncio."""
        return _info(await wait_async(self._native.holder(text("name", name))))

    def is_locked(self, name: str) -> bool:
        """Whether a lock is held."""
        return self.holder(name) is not None

    async def is_locked_async(self, name: str) -> bool:
        """:meth:`is_locked` for asyncio."""
        return await self.holder_async(name) is not None

    def ttl_left(self, name: str) -> float | None:
        """How many seconds are left of a lock's lease; ``None`` if the lock is free or its lease has no end."""
        holder = self.holder(name)
        return None if holder is None else holder.ttl_left

    async def ttl_left_async(self, name: str) -> float | None:
        """:meth:`ttl_left` for asyncio."""
        holder = await self.holder_async(name)
        return None if holder is None else holder.ttl_left

    def evict(
        self, name: str, holder: LockInfo | str | None = None, *, force: bool = False, reason: str = ""
    ) -> Evicted:
        """Evicts the holder of a lock that was inspected before, and no other holder.

        :param holder: the result of :meth:`info` or :meth:`holder`, or a holder id. Default: the holder now.
        :param force: free the lock at once, even if its holder still works. Otherwise the holder is notified and cannot renew
            its lease; the lock is free when it releases it or the lease ends.
        :raises NotEvicted: the lock has another holder by now; nothing was done.
        """
        holder_id = _holder_id(holder if holder is not None else self.holder(name))
        if holder_id is None:
            return Evicted(name, "free", False)
        return Evicted(**json.loads(_wait(self._evict(name, holder_id, force, reason))))

    async def evict_async(
        self, name: str, holder: LockInfo | str | None = None, *, force: bool = False, reason: str = ""
    ) -> Evicted:
        """:meth:`evict` for asyncio."""
        holder_id = _holder_id(holder if holder is not None else await self.holder_async(name))
        if holder_id is None:
            return Evicted(name, "free", False)
        return Evicted(**json.loads(await wait_async(self._evict(name, holder_id, force, reason))))

    def _evict(self, name: str, holder_id: str, force: bool, reason: str) -> _native.Call:
        return self._native.evict(text("name", name), text("holder", holder_id), flag("force", force), text("reason", reason))

    def ask_to_finish(self, name: str, holder: LockInfo | str | None = None, *, reason: str = "") -> bool:
        """Asks the holder of a lock to finish soon; it keeps the lock until then. Returns whether it was notified."""
        holder_id = _holder_id(holder if holder is not None else self.holder(name))
        return holder_id is not None and bool(_wait(self._native.ask_to_finish(*_texts(name=name, holder=holder_id, reason=reason))))

    async def ask_to_finish_async(self, name: str, holder: LockInfo | str | None = None, *, reason: str = "") -> bool:
        """:meth:`ask_to_finish` for asyncio."""
        holder_id = _holder_id(holder if holder is not None else await self.holder_async(name))
        return holder_id is not None and bool(await wait_async(self._native.ask_to_finish(*_texts(name=name, holder=holder_id, reason=reason))))

    def pool(self, name: str, members: Iterable[int]) -> Pool:
        """The pool of the locks ``<name>:<member>``, such as ``pool("gpu_lock", range(4))``.

        >>> gpus = connect("memory:").pool("gpu_lock", range(4))
        >>> with gpus.acquire() as permit:
        ...     permit.index
        0
        """
        return Pool(self._native, name, members)

    def once(
        self,
        id: str,
        *,
        keep: Seconds | None = None,
        payload: Any = None,
        ttl: Seconds | None = None,
        wait: Seconds | None = None,
        owner: str | None = None,
    ) -> Once:
        """Work that is done once for an id, across all processes: one caller does it, all others get its result.

        :param keep: how long the result is kept. Default: 24 h.
        :param payload: the input of the work, as JSON. Another payload for the same id is refused with
            :class:`OtherPayload`.
        :param ttl: how long the lock outlives a caller that crashed. Default: the client's ttl.
        :param wait: how long to wait while another caller does the work; ``None`` waits without limit, 0 does not wait.

        >>> client = connect("memory:")
        >>> client.once("payment-7").run(lambda: {"paid": 999}).value
        {'paid': 999}
        >>> again = client.once("payment-7").run(lambda: {"paid": 0})
        >>> (again.value, again.fresh)
        ({'paid': 999}, False)
        """
        return Once(self._native, id, keep=keep, payload=payload, ttl=ttl, wait=wait, owner=owner)

    def claim(self, id: str, value: Any, *, lease: Seconds) -> Claim:
        """Binds a value (JSON) to an id unless a value is bound already, in one step, without a lock and without waiting. All
        callers get the same value until the lease ends. An integer of more than 64 bits is refused.

        >>> client = connect("memory:")
        >>> client.claim("req-1", "job-a", lease=60)
        Claim(created=True, value='job-a')
        >>> client.claim("req-1", "job-b", lease=60)
        Claim(created=False, value='job-a')
        """
        return Claim(**json.loads(_wait(self._claim(id, value, lease))))

    async def claim_async(self, id: str, value: Any, *, lease: Seconds) -> Claim:
        """:meth:`claim` for asyncio."""
        return Claim(**json.loads(await wait_async(self._claim(id, value, lease))))

    def _claim(self, id: str, value: Any, lease: Seconds) -> _native.Call:
        return _native.claim(self._native, text("id", id), as_exact_json("value", value), retention("lease", lease))

    def statistics(self) -> Statistics:
        """The counters of this process for this client."""
        counted = self._native.statistics()
        return Statistics() if counted is None else Statistics(**json.loads(counted))

    def close(self) -> None:
        """Ends the client: new calls fail, all guards are lost, and all locks are released."""
        _wait(self._native.close(CLOSE_TIMEOUT))

    async def close_async(self) -> None:
        """:meth:`close` for asyncio."""
        await wait_async(self._native.close(CLOSE_TIMEOUT))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()

    def __reduce__(self) -> tuple[Any, ...]:
        # For spawned processes, which connect on their own.
        return (Client, self._arguments)

    def __repr__(self) -> str:
        return f"<leasehold.Client of {self.store or 'a store that is not connected'}>"


def _info(text: str | None) -> LockInfo | None:
    return None if text is None else LockInfo.from_json(text)


def _infos(text: str) -> list[LockInfo]:
    return [LockInfo.from_dict(view) for view in json.loads(text)]


def _holder_id(holder: LockInfo | str | None) -> str | None:
    return holder.holder_id if isinstance(holder, LockInfo) else holder


def _texts(**given: str) -> list[str]:
    return [text(what, one) for what, one in given.items()]


def _this_program() -> str:
    """The name of this program: that of its script, or of the module that was run with ``-m``."""
    path = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m") else ""
    directory, name = os.path.split(path)
    if name == "__main__.py":
        name = os.path.basename(directory)
    kept = "".join(c for c in name if c.isprintable())[:64]
    return kept or "python"

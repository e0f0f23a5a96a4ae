"""The way to locks in one store."""

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
from ._lock import Guard, Lock, OnLost, OnUnavailable
from ._once import Claim, Once
from ._pool import Pool
from ._times import Seconds, as_exact_json, flag, kept, one_of, optional_lease, optional_seconds, optional_text, text
from ._waiting import wait as _wait
from ._waiting import wait_async

#: A client that is closed waits so long for what is under way.
CLOSE_WITHIN = 5.0


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
    """Opens a store. What is left out is as configured: by ``LEASEHOLD_…`` in the environment, else by a file, else
    as said here.

    :param url: ``sqlite:`` (the default file), ``sqlite:PATH``, ``redis://[user:password@]host[:port][/db]``,
        ``rediss://…`` (TLS) or ``memory:``. Left out: ``LEASEHOLD_STORE``, else the default SQLite file, as the command
        does it.
    :param namespace: sets names apart from those of others; ``leasehold`` by default. Names that begin with
        ``gpu_lock:`` or ``task_lock:`` are the same in all of them.
    :param owner: what people read who ask for the holder; the program's name by default.
    :param ttl: the lease of a lock that names none: 30 s by default.
    :param on_unavailable: what happens to work when the store cannot be reached: ``"closed"``, it fails;
        ``"open"``, it goes on without protection, with a warning and an entry in the journal.
    :param answer_within: how long one request may go unanswered: 2 s by default.
    :param patience: how long a waiter goes on while the store cannot be reached: 10 s by default.
    :param config: a YAML file with any of these and more; left out, the one of :func:`leasehold.configure`, else the one
        that ``LEASEHOLD_CONFIG`` names.
    :param lazy: connect with the first call, not now: for a client that is made before its server is there. Until
        it is, calls raise :class:`StoreUnavailable`, or go on as `on_unavailable` says.
    :raises StoreUnavailable: when the store cannot be used.
    :raises InvalidArgument: for a URL, namespace, owner or time that makes no sense.

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
    """As :func:`connect`, without holding up the event loop."""
    client = Client(url, namespace, owner, ttl, on_unavailable, answer_within, patience, this_file(config))
    await wait_async(client._native.connect())
    return client


class Client:
    """The way to locks in one store, for a whole process. Made by :func:`connect`.

    All threads, tasks and greenlets share one connection, one renewal pass and one place in every queue. Every
    method that waits has a twin for asyncio, whose name ends with ``_async``.

    In a forked child a client makes a connection of its own with the first call; what the parent holds stays
    the parent's.
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
        said: tuple[tuple[str, str], ...] = (),
    ) -> None:
        if on_unavailable is not None:
            one_of("on_unavailable", on_unavailable, "closed", "open")
        read = load(config, said)
        #: What another process needs to make the same.
        self._terms = (
            optional_text("url", url),
            optional_text("namespace", namespace),
            text("owner", owner) if owner is not None else read.said("owner") or _this_program(),
            optional_lease("ttl", ttl),
            on_unavailable,
            optional_seconds("answer_within", answer_within),
            optional_seconds("patience", patience),
            config,
            gpu,
            said,
        )
        self._native = _native.Client(read, gpu, *self._terms[:7])

    @property
    def store(self) -> str | None:
        """Which store this is, without its secrets; ``None`` while it is not connected."""
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
        """A lock, to be entered by ``with`` or ``async with``, or acquired. Nothing is asked yet.

        :param ttl: how long the store keeps the lease when nobody renews it; the client's own unless said.
        :param wait: at most so long, then :class:`LockNotAcquired`; ``None`` waits without limit, 0 not at all.
        :param renew: renew the lease while the guard lives; otherwise it ends after `ttl`.
        :param max_hold: with `renew`: at most so long; after that the lease counts as lost.
        :param fenced: give every grant a number that a resource can check.
        :param owner: what people read who ask for the holder; the client's own unless said.
        :param on_lost: ``"cancel"``: when the lease is lost, the task in an ``async with`` is cancelled and gets
            :class:`LockLost`; a ``with`` raises it at its end. ``"continue"``: the work goes on, and a warning
            is logged.
        :param on_unavailable: when the store cannot be reached, ``"closed"`` or ``"open"``; the client's own
            unless said.

        >>> client = connect("memory:")
        >>> with client.lock("order:42", ttl=30, wait=5) as guard:
        ...     guard.name
        'order:42'
        """
        return Lock(
            self._native,
            name,
            ttl=ttl,
            wait=wait,
            renew=renew,
            max_hold=max_hold,
            fenced=fenced,
            owner=owner,
            on_lost=on_lost,
            on_unavailable=on_unavailable,
        )

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
        """Takes the lock if it is free: ``None`` when somebody else holds it.

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
        """As :meth:`try_lock`."""
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
        """Takes a lock for somebody else, without a guard, and returns its fence: a lease that belongs to no
        process, is not renewed, and which its token alone renews and releases. Make one by :func:`new_token`.

        Asked again with the same token it answers with the same lease, counted anew: whoever lost the answer
        asks again.

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
        """As :meth:`acquire_token`."""
        fence: int | None = await wait_async(self._acquire_token(name, token, ttl, wait, fenced, owner))
        return fence

    def _acquire_token(
        self, name: str, token: str, ttl: Seconds | None, wait: Seconds | None, fenced: bool, owner: str | None
    ) -> _native.Call:
        return self._native.acquire_token(
            text("name", name),
            text("token", token),
            optional_lease("ttl", ttl),
            optional_seconds("wait", wait),
            flag("fenced", fenced),
            optional_text("owner", owner),
        )

    def renew_token(self, name: str, token: str, ttl: Seconds | None = None) -> None:
        """Renews a lease by its token: to another ttl, which becomes its own, or to the one it was taken with.

        :raises LockLost: when it is not that token's (any more).
        """
        _wait(self._native.renew_token(text("name", name), text("token", token), optional_lease("ttl", ttl)))

    async def renew_token_async(self, name: str, token: str, ttl: Seconds | None = None) -> None:
        """As :meth:`renew_token`."""
        await wait_async(self._native.renew_token(text("name", name), text("token", token), optional_lease("ttl", ttl)))

    def release_token(self, name: str, token: str) -> bool:
        """Releases a lock by its token, wherever it was taken. ``False``: it is not that token's (any more), and
        nothing was touched."""
        return bool(_wait(self._native.release_token(text("name", name), text("token", token))))

    async def release_token_async(self, name: str, token: str) -> bool:
        """As :meth:`release_token`."""
        return bool(await wait_async(self._native.release_token(text("name", name), text("token", token))))

    def release_value(self, name: str, value: str, *, reason: str = "normal") -> bool:
        """Gives back a lock that another kind of client wrote into Redis as a plain value, such as
        ``locked_by_<task>``: compared with the whole value and done in one step, and whoever waits gets it. ``False``:
        it is not held by that value (any more), and nothing was touched.

        For services that share a lock with older ones during a migration; its name is the key where the namespace is
        ``""`` or the name begins with ``gpu_lock:`` or ``task_lock:``."""
        return bool(_wait(self._native.release_value(*_texts(name=name, value=value, reason=reason))))

    async def release_value_async(self, name: str, value: str, *, reason: str = "normal") -> bool:
        """As :meth:`release_value`."""
        return bool(await wait_async(self._native.release_value(*_texts(name=name, value=value, reason=reason))))

    def info(self, name: str) -> LockInfo:
        """Who holds a lock and who waits for it."""
        return LockInfo.from_json(_wait(self._native.info(text("name", name))))

    async def info_async(self, name: str) -> LockInfo:
        """As :meth:`info`."""
        return LockInfo.from_json(await wait_async(self._native.info(text("name", name))))

    def locks(self, prefix: str = "") -> list[LockInfo]:
        """All locks that are held and whose names begin with `prefix`, by name."""
        return _infos(_wait(self._native.locks(text("prefix", prefix))))

    async def locks_async(self, prefix: str = "") -> list[LockInfo]:
        """As :meth:`locks`."""
        return _infos(await wait_async(self._native.locks(text("prefix", prefix))))

    def holder(self, name: str) -> LockInfo | None:
        """Who holds a lock; ``None`` when it is free. Cheaper than :meth:`info`: who waits is not looked at."""
        return _info(_wait(self._native.holder(text("name", name))))

    async def holder_async(self, name: str) -> LockInfo | None:
        """As :meth:`holder`."""
        return _info(await wait_async(self._native.holder(text("name", name))))

    def is_locked(self, name: str) -> bool:
        """Whether anybody holds a lock."""
        return self.holder(name) is not None

    async def is_locked_async(self, name: str) -> bool:
        """As :meth:`is_locked`."""
        return await self.holder_async(name) is not None

    def ttl_left(self, name: str) -> float | None:
        """How many seconds a lock's lease still runs; ``None`` when it is free or has no end."""
        holder = self.holder(name)
        return None if holder is None else holder.ttl_left

    async def ttl_left_async(self, name: str) -> float | None:
        """As :meth:`ttl_left`."""
        holder = await self.holder_async(name)
        return None if holder is None else holder.ttl_left

    def evict(
        self, name: str, holder: LockInfo | str | None = None, *, force: bool = False, reason: str = ""
    ) -> Evicted:
        """Takes a lock away from the holder that was looked at, and from nobody else.

        :param holder: whom, as :meth:`info` or :meth:`holder` told it, or its holder id; left out, whoever
            holds it now.
        :param force: free the lock at once, whatever its holder believes. Otherwise the holder is told to stop,
            and the lock passes on when it does or its lease ends.
        :raises NotEvicted: when the lock has changed hands meanwhile: nothing was done.
        """
        holder_id = _holder_id(holder if holder is not None else self.holder(name))
        if holder_id is None:
            return Evicted(name, "free", False)
        return Evicted(**json.loads(_wait(self._evict(name, holder_id, force, reason))))

    async def evict_async(
        self, name: str, holder: LockInfo | str | None = None, *, force: bool = False, reason: str = ""
    ) -> Evicted:
        """As :meth:`evict`."""
        holder_id = _holder_id(holder if holder is not None else await self.holder_async(name))
        if holder_id is None:
            return Evicted(name, "free", False)
        return Evicted(**json.loads(await wait_async(self._evict(name, holder_id, force, reason))))

    def _evict(self, name: str, holder_id: str, force: bool, reason: str) -> _native.Call:
        return self._native.evict(text("name", name), text("holder", holder_id), flag("force", force), text("reason", reason))

    def ask_to_finish(self, name: str, holder: LockInfo | str | None = None, *, reason: str = "") -> bool:
        """Asks a lock's holder to come to an end soon; it keeps the lock until it does. Whether it was told."""
        holder_id = _holder_id(holder if holder is not None else self.holder(name))
        return holder_id is not None and bool(_wait(self._native.ask_to_finish(*_texts(name=name, holder=holder_id, reason=reason))))

    async def ask_to_finish_async(self, name: str, holder: LockInfo | str | None = None, *, reason: str = "") -> bool:
        """As :meth:`ask_to_finish`."""
        holder_id = _holder_id(holder if holder is not None else await self.holder_async(name))
        return holder_id is not None and bool(await wait_async(self._native.ask_to_finish(*_texts(name=name, holder=holder_id, reason=reason))))

    def pool(self, name: str, members: Iterable[int]) -> Pool:
        """The locks ``<name>:<member>``, of which any are good: ``pool("gpu_lock", range(4))``.

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
        """Work that is done once for an id, across all processes: one runs it, everybody else gets its result.

        :param keep: how long the result is kept: 24 h unless said.
        :param payload: what the work is asked with, as JSON: another one under the same id is refused with
            :class:`OtherPayload`.
        :param ttl: how long the lock outlives a runner that crashed.
        :param wait: at most so long for somebody else's work; ``None`` without limit, 0 not at all.

        >>> client = connect("memory:")
        >>> client.once("payment-7").run(lambda: {"paid": 999}).value
        {'paid': 999}
        >>> again = client.once("payment-7").run(lambda: {"paid": 0})
        >>> (again.value, again.fresh)
        ({'paid': 999}, False)
        """
        return Once(self._native, id, keep=keep, payload=payload, ttl=ttl, wait=wait, owner=owner)

    def claim(self, id: str, value: Any, *, lease: Seconds) -> Claim:
        """Binds a value (JSON) to an id unless one is bound already: one step, no lock, no wait. Everybody gets
        the same value, until the lease is over. An integer of more than 64 bits is refused.

        >>> client = connect("memory:")
        >>> client.claim("req-1", "job-a", lease=60)
        Claim(created=True, value='job-a')
        >>> client.claim("req-1", "job-b", lease=60)
        Claim(created=False, value='job-a')
        """
        return Claim(**json.loads(_wait(self._claim(id, value, lease))))

    async def claim_async(self, id: str, value: Any, *, lease: Seconds) -> Claim:
        """As :meth:`claim`."""
        return Claim(**json.loads(await wait_async(self._claim(id, value, lease))))

    def _claim(self, id: str, value: Any, lease: Seconds) -> _native.Call:
        return _native.claim(self._native, text("id", id), as_exact_json("value", value), kept("lease", lease))

    def statistics(self) -> Statistics:
        """What this process counted with this client."""
        counted = self._native.statistics()
        return Statistics() if counted is None else Statistics(**json.loads(counted))

    def close(self) -> None:
        """Lets nothing new begin, tells every holder that its lease is over, and gives everything back."""
        _wait(self._native.close(CLOSE_WITHIN))

    async def close_async(self) -> None:
        """As :meth:`close`."""
        await wait_async(self._native.close(CLOSE_WITHIN))

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
        # For a process that is spawned: it connects by itself.
        return (Client, self._terms)

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
    """What people call this program: its script, or what was run with ``-m``."""
    path = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m") else ""
    directory, name = os.path.split(path)
    if name == "__main__.py":
        name = os.path.basename(directory)
    kept = "".join(c for c in name if c.isprintable())[:64]
    return kept or "python"

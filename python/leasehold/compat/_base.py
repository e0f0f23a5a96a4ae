"""What both locks share: the lease, and the token that identifies it."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import threading
import time
from types import SimpleNamespace
from typing import Any, TypeAlias

from .. import _native
from .._client import Client
from .._errors import InvalidArgument, LockLost, LockNotAcquired
from .._info import LockInfo
from .._lock import Guard
from .._native import Mailbox
from .._arguments import Seconds, lease, optional_seconds, seconds, terms, text
from ._errors import LockError, LockNotOwnedError
from ._steps import Steps
from ._store import raw_client

log = logging.getLogger("leasehold.compat")

#: The types that redis-py accepts.
Name: TypeAlias = str | bytes | memoryview | int | float
Token: TypeAlias = str | bytes | memoryview | int | float

#: A token with the form of leasehold's tokens, such as the hex digits of a UUID.
_NATIVE_TOKEN = re.compile(rb"[A-Za-z0-9_-]{32}")

#: Locks without a timeout, which are renewed until they are released or this process ends, by client, name and token.
_renewed: dict[tuple[Client, str, bytes], Guard] = {}


class BaseLock:
    """See :class:`leasehold.compat.Lock`."""

    def __init__(
        self,
        redis: Any,
        name: Name,
        timeout: Seconds | None = None,
        sleep: Seconds = 0.1,
        blocking: bool = True,
        blocking_timeout: Seconds | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
    ) -> None:
        self.redis = redis
        self.name = name
        self.timeout = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        #: Its attribute ``token`` is the token of the lock that is held; ``None`` if none is.
        self.local: Any = threading.local() if self.thread_local else SimpleNamespace()
        self.local.token = None
        self._client = raw_client(redis)
        self._key = _text(name)

    def _token(self) -> bytes | None:
        # In a thread that has not used the thread-local yet, the attribute is missing.
        token = getattr(self.local, "token", None)
        return None if token is None else _bytes("token", token)

    def _guard(self, token: bytes) -> Guard | None:
        return _renewed.get((self._client, self._key, token))

    def _acquire(
        self, sleep: Seconds | None, blocking: bool | None, blocking_timeout: Seconds | None, token: Token | None
    ) -> Steps[bool]:
        pause = seconds("sleep", self.sleep if sleep is None else sleep)
        given = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        if isinstance(given, int | float) and given < 0:
            # As in redis-py: the time is over already.
            given = 0
        limit = optional_seconds("blocking_timeout", given) if (self.blocking if blocking is None else blocking) else 0.0
        wait = _Wait(limit, pause)
        chosen = None if token is None else _bytes("token", token)
        if not self.timeout:
            taken = yield from self._take_renewed(wait, chosen)
        elif chosen is None:
            taken = yield from self._take(wait, lease("timeout", self.timeout))
        else:
            taken = yield from self._take_by(wait, lease("timeout", self.timeout), chosen)
        if taken is None:
            return False
        self.local.token = taken
        return True

    def _take_renewed(self, wait: _Wait, chosen: bytes | None) -> Steps[bytes | None]:
        """Acquires a lock without a timeout: its lease is renewed while this process lives."""
        native = yield from self._acquire_guard(wait, None, renew=True)
        if native is None:
            return None
        token = native.token.encode() if chosen is None else chosen
        for known in [known for known, guard in _renewed.items() if guard.lost.is_set()]:
            _renewed.pop(known, None)
        _renewed[self._client, self._key, token] = Guard(native)
        return token

    def _take(self, wait: _Wait, ttl: float) -> Steps[bytes | None]:
        """Acquires a lock with a timeout: its lease ends then, even if this process still runs."""
        while True:
            native = yield from self._acquire_guard(wait, ttl, renew=False)
            if native is None:
                return None
            token = native.token
            try:
                yield native.detach()
            except LockLost:
                # The lease ended before it was detached, because it is short or the store is slow.
                if wait.is_over():
                    return None
            except BaseException:
                # Interrupted, perhaps after the lease was detached.
                self._client._native.release_token(self._key, token).start(Mailbox(), 0)
                raise
            else:
                return token.encode()

    def _acquire_guard(self, wait: _Wait, ttl: float | None, renew: bool) -> Steps[_native.Guard | None]:
        native = self._client._native
        try:
            asked = terms(ttl=ttl, wait=wait.left(), renew=renew, on_unavailable="closed")
            guard: _native.Guard = yield native.acquire(self._key, asked)
        except LockNotAcquired:
            return None
        return guard

    def _take_by(self, wait: _Wait, ttl: float, chosen: bytes) -> Steps[bytes | None]:
        """Acquires a lock with a timeout under a token of the caller's choice, which other processes can know.

        The store cannot distinguish two tries with one token from one try that was sent twice. So tries with the same token
        run one after the other, and each first checks whether the token holds the lock already.
        """
        token = _native_token(self._key, chosen)
        gate = "leasehold-compat:" + _holder_id(token)
        native = self._client._native
        while True:
            if (yield native.holder(self._key)) is None:
                gate_guard: _native.Guard = yield native.acquire(gate, terms(on_unavailable="closed"))
                try:
                    if (yield native.holder(self._key)) is None:
                        yield native.acquire_token(self._key, token, terms(ttl=ttl, wait=0))
                        return chosen
                except LockNotAcquired:
                    pass
                finally:
                    gate_guard.drop()
            if wait.is_over_after_a_pause():
                return None
            yield wait.pause

    def _locked(self) -> Steps[bool]:
        return (yield self._client._native.holder(self._key)) is not None

    def _owned(self) -> Steps[bool]:
        token = self._token()
        if token is None:
            return False
        guard = self._guard(token)
        holder_id = _holder_id(_native_token(self._key, token)) if guard is None else guard.holder_id
        view = yield self._client._native.holder(self._key)
        holder = None if view is None else LockInfo.from_json(view)
        return holder is not None and not holder.foreign and holder.holder_id == holder_id

    def _release(self) -> Steps[None]:
        token = self._token()
        if token is None:
            raise self._error("nothing to release: it is not held by this lock, or was released already")
        guard = self._guard(token)
        try:
            if guard is None:
                was_held = yield self._client._native.release_token(self._key, _native_token(self._key, token))
            else:
                was_held = yield guard._native.release()
        except LockLost:
            # This is a forked child of the holder.
            was_held = False
        self.local.token = None
        _renewed.pop((self._client, self._key, token), None)
        if not was_held:
            raise self._not_owned("released")

    def _extend(self, additional_time: Seconds, replace_ttl: bool) -> Steps[bool]:
        token = self._timed("extend")
        ttl = seconds("additional_time", additional_time)
        if not replace_ttl:
            view = yield self._client._native.holder(self._key)
            left = None if view is None else json.loads(view)["ttl_left_ms"]
            if left is None:
                raise self._not_owned("extended")
            ttl += left / 1000
        yield from self._renew(token, ttl, "extended")
        return True

    def _reacquire(self) -> Steps[bool]:
        token = self._timed("reacquire")
        assert self.timeout is not None
        yield from self._renew(token, lease("timeout", self.timeout), "reacquired")
        return True

    def _timed(self, verb: str) -> bytes:
        token = self._token()
        if token is None:
            raise self._error(f"cannot {verb} it: it is not held by this lock")
        if not self.timeout:
            raise self._error(f"cannot {verb} it: it has no timeout, and is renewed until it is released")
        return token

    def _renew(self, token: bytes, ttl: float, done: str) -> Steps[None]:
        try:
            yield self._client._native.renew_token(self._key, _native_token(self._key, token), ttl)
        except LockLost as error:
            raise self._not_owned(done) from error

    def _report_loss(self, error: LockError) -> None:
        """Raises or logs that the lock was lost before the end of its ``with``."""
        if self.raise_on_release_error:
            raise error
        log.warning("%s", error)

    def _not_in_time(self) -> LockError:
        return self._error("it could not be acquired in the given time")

    def _error(self, what: str) -> LockError:
        return LockError(f"lock {self._key!r}: {what}", self._key)

    def _not_owned(self, done: str) -> LockNotOwnedError:
        return LockNotOwnedError(
            f"lock {self._key!r} cannot be {done}: this lock does not hold it any more; nothing was changed",
            self._key,
        )

    def __repr__(self) -> str:
        return f"<leasehold.compat.{type(self).__name__} {self._key!r}>"


class _Wait:
    """The time limit of a wait; ``None`` stands for no limit."""

    def __init__(self, limit: float | None, pause: float) -> None:
        self._end = None if limit is None else time.monotonic() + limit
        self.pause = pause

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        return self.left() == 0.0

    def is_over_after_a_pause(self) -> bool:
        left = self.left()
        return left is not None and left < self.pause


def _text(name: Name) -> str:
    try:
        return _bytes("name", name).decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"name: {name!r} is not text in UTF-8") from None


def _bytes(what: str, given: Name | Token) -> bytes:
    """The bytes that redis-py sends."""
    if isinstance(given, str):
        return text(what, given).encode()
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, int | float) and not isinstance(given, bool):
        return repr(given).encode()
    raise InvalidArgument(f"{what}: a {type(given).__name__} is neither bytes, nor text, nor a number")


def _native_token(key: str, token: bytes) -> str:
    """The token as the store has it. A token of another form is hashed into one."""
    if _NATIVE_TOKEN.fullmatch(token):
        return token.decode()
    made = hashlib.sha256(key.encode() + b"\0" + token).digest()
    return base64.urlsafe_b64encode(made[:24]).decode()


def _holder_id(token: str) -> str:
    return hashlib.sha1(token.encode()).hexdigest()[:12]

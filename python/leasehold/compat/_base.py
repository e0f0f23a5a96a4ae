"""What both locks do: the lease, and the token it is remembered by."""

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
from .._times import Seconds, lease, optional_seconds, seconds, text
from ._errors import LockError, LockNotOwnedError
from ._steps import Steps
from ._store import raw_client

log = logging.getLogger("leasehold.compat")

#: As redis-py takes names and tokens.
Name: TypeAlias = str | bytes | memoryview | int | float
Token: TypeAlias = str | bytes | memoryview | int | float

#: A token that is one of ours as it is: its own, or for example the hex digits of a UUID.
_OURS = re.compile(rb"[A-Za-z0-9_-]{32}")

#: Locks without a timeout, which are renewed until they are released or this process ends: by whose client,
#: name and token.
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
        #: The token of the lock that is held, in its attribute ``token``; ``None`` when none is.
        self.local: Any = threading.local() if self.thread_local else SimpleNamespace()
        self.local.token = None
        self._client = raw_client(redis)
        self._key = _text(name)

    def _token(self) -> bytes | None:
        # A thread that is new to a thread-local has no such attribute.
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
            # As redis-py takes it: the time is over already.
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
        """A lock without a timeout: on a lease that is renewed for as long as this process lives."""
        native = yield from self._stand_in_line(wait, None, renew=True)
        if native is None:
            return None
        token = native.token.encode() if chosen is None else chosen
        for known in [known for known, guard in _renewed.items() if guard.lost.is_set()]:
            _renewed.pop(known, None)
        _renewed[self._client, self._key, token] = Guard(native)
        return token

    def _take(self, wait: _Wait, ttl: float) -> Steps[bytes | None]:
        """A lock that ends by its timeout and by nothing else, whatever becomes of this process."""
        while True:
            native = yield from self._stand_in_line(wait, ttl, renew=False)
            if native is None:
                return None
            token = native.token
            try:
                yield native.keep()
            except LockLost:
                # Over before it was ours for good: so short is the lease, or so slow the store.
                if wait.is_over():
                    return None
            except BaseException:
                # Interrupted, perhaps just after it was kept.
                self._client._native.release_token(self._key, token).start(Mailbox(), 0)
                raise
            else:
                return token.encode()

    def _stand_in_line(self, wait: _Wait, ttl: float | None, renew: bool) -> Steps[_native.Guard | None]:
        native = self._client._native
        try:
            guard: _native.Guard = yield native.acquire(
                self._key, ttl, wait.left(), renew, None, True, None, "closed"
            )
        except LockNotAcquired:
            return None
        return guard

    def _take_by(self, wait: _Wait, ttl: float, chosen: bytes) -> Steps[bytes | None]:
        """The same under the caller's own token, which another process may know.

        The store takes two tries with one token for one try that was sent twice. So those who try with the
        same token do it one after the other, and look first whether it has the lock already.
        """
        token = _ours(self._key, chosen)
        gate = "leasehold-compat:" + _holder_id(token)
        native = self._client._native
        while True:
            if (yield native.holder(self._key)) is None:
                turn: _native.Guard = yield native.acquire(gate, None, None, True, None, True, None, "closed")
                try:
                    if (yield native.holder(self._key)) is None:
                        yield native.acquire_token(self._key, token, ttl, 0.0, True, None)
                        return chosen
                except LockNotAcquired:
                    pass
                finally:
                    turn.drop()
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
        holder_id = _holder_id(_ours(self._key, token)) if guard is None else guard.holder_id
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
                ours = yield self._client._native.release_token(self._key, _ours(self._key, token))
            else:
                ours = yield guard._native.release()
        except LockLost:
            # A child that was forked off the holder.
            ours = False
        self.local.token = None
        _renewed.pop((self._client, self._key, token), None)
        if not ours:
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
            raise self._error(f"cannot {verb} it: it has no timeout, and is renewed by itself")
        return token

    def _renew(self, token: bytes, ttl: float, done: str) -> Steps[None]:
        try:
            yield self._client._native.renew_token(self._key, _ours(self._key, token), ttl)
        except LockLost as error:
            raise self._not_owned(done) from error

    def _left(self, error: LockError) -> None:
        """The lock was not ours any more at the end of a ``with``."""
        if self.raise_on_release_error:
            raise error
        log.warning("%s", error)

    def _not_in_time(self) -> LockError:
        return self._error("it could not be acquired in the time given")

    def _error(self, what: str) -> LockError:
        return LockError(f"lock {self._key!r}: {what}", self._key)

    def _not_owned(self, done: str) -> LockNotOwnedError:
        return LockNotOwnedError(
            f"lock {self._key!r} cannot be {done}: it is not held by this lock any more, and nothing was touched",
            self._key,
        )

    def __repr__(self) -> str:
        return f"<leasehold.compat.{type(self).__name__} {self._key!r}>"


class _Wait:
    """How long is left of a wait: ``None`` without limit."""

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
    """As redis-py sends it."""
    if isinstance(given, str):
        return text(what, given).encode()
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, int | float) and not isinstance(given, bool):
        return repr(given).encode()
    raise InvalidArgument(f"{what}: a {type(given).__name__} is neither bytes, nor text, nor a number")


def _ours(key: str, token: bytes) -> str:
    """The token as the store has it. One of another form is taken for the secret that it is made of."""
    if _OURS.fullmatch(token):
        return token.decode()
    made = hashlib.sha256(key.encode() + b"\0" + token).digest()
    return base64.urlsafe_b64encode(made[:24]).decode()


def _holder_id(token: str) -> str:
    return hashlib.sha1(token.encode()).hexdigest()[:12]

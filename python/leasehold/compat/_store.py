"""From what a lock of redis-py is given to a client of ours."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from .._client import Client, connect
from .._errors import InvalidArgument

#: One for each store, for the whole process: programs make a lock per use. Never taken out, and few.
_clients: dict[str, Client] = {}


def raw_client(redis: Any) -> Client:
    """The client on the raw keys of what was given: a redis-py client, one of ours, or a URL."""
    if isinstance(redis, Client):
        if redis._terms[1] != "":
            raise InvalidArgument(
                "a lock that excludes redis-py's is on its name as the key, without a namespace: give it a client "
                'that was made by connect(…, namespace="")'
            )
        return redis
    url = redis if isinstance(redis, str) else _url(redis)
    client = _clients.get(url)
    if client is None:
        # Atomic, unlike a lock never held at a fork. Not connected yet, so a second one costs nothing.
        client = _clients.setdefault(url, connect(url, namespace="", lazy=True))
    return client


def _url(redis: Any) -> str:
    """Where a redis-py client connects to."""
    pool = getattr(redis, "connection_pool", None)
    if hasattr(redis, "nodes_manager"):
        raise _unusable("a client of Redis Cluster, which leasehold does not support")
    if pool is None or not hasattr(pool, "connection_kwargs"):
        raise InvalidArgument(
            f"redis: {type(redis).__name__} is neither a client of redis-py, nor one of leasehold, nor a URL"
        )
    if hasattr(pool, "sentinel_manager"):
        raise _unusable("a client that finds its server by Sentinel")
    settings: dict[str, Any] = pool.connection_kwargs
    if "path" in settings:
        raise _unusable("a client on a Unix socket; leasehold connects by TCP")
    if settings.get("credential_provider") is not None:
        raise _unusable("a client with a credential provider")
    scheme = "rediss" if "SSL" in pool.connection_class.__name__ else "redis"
    host = str(settings.get("host") or "localhost")
    place = f"[{host}]" if ":" in host else host
    user, password = settings.get("username") or "", settings.get("password") or ""
    login = f"{_quoted(user)}:{_quoted(password)}@" if user or password else ""
    return f"{scheme}://{login}{place}:{settings.get('port') or 6379}/{settings.get('db') or 0}"


def _quoted(text: str | bytes) -> str:
    return quote(text, safe="")


def _unusable(what: str) -> InvalidArgument:
    return InvalidArgument(f"redis: {what}: give the lock a URL such as redis://user:password@host:6379/0 instead")

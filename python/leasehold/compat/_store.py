"""From what a lock of redis-py is given to a client of ours."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import quote

from .._client import Client, connect
from .._errors import InvalidArgument

#: One for each store, for the whole process: programs make a lock per use. Never taken out, and few.
_clients: dict[str, Client] = {}


#: Whose connections go by TCP or TLS to the host and port of their settings.
_CONNECTS = ("redis.connection", "redis.asyncio.connection", "valkey.connection", "valkey.asyncio.connection")


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
    for part in (type(pool), pool.connection_class):
        if part.__module__ not in _CONNECTS:
            # A fake, a tunnel, a proxy: the host in its settings is not where it goes.
            raise _unusable(f"a client that connects in its own way ({part.__module__}.{part.__qualname__})")
    settings: dict[str, Any] = pool.connection_kwargs
    if "path" in settings:
        raise _unusable("a client on a Unix socket; leasehold connects by TCP")
    if settings.get("credential_provider") is not None:
        raise _unusable("a client with a credential provider")
    scheme, query = ("rediss", _trust(settings)) if "SSL" in pool.connection_class.__name__ else ("redis", "")
    host = str(settings.get("host") or "localhost")
    place = f"[{host}]" if ":" in host else host
    user, password = settings.get("username") or "", settings.get("password") or ""
    login = f"{_quoted(user)}:{_quoted(password)}@" if user or password else ""
    return f"{scheme}://{login}{place}:{settings.get('port') or 6379}/{settings.get('db') or 0}{query}"


def _trust(settings: dict[str, Any]) -> str:
    """Whose certificates are believed: the machine's authorities, or those of a file."""
    for setting in ("ssl_certfile", "ssl_keyfile", "ssl_ca_path", "ssl_ca_data"):
        if settings.get(setting):
            raise _unusable(f"a client with {setting}")
    if settings.get("ssl_cert_reqs", "required") not in ("required", ssl.CERT_REQUIRED, None):
        raise _unusable("a client that does not check who its server is; leasehold always does")
    file = settings.get("ssl_ca_certs")
    return f"?ca={quote(str(file), safe='/')}" if file else ""


def _quoted(text: str | bytes) -> str:
    return quote(text, safe="")


def _unusable(what: str) -> InvalidArgument:
    return InvalidArgument(f"redis: {what}: give the lock a URL such as redis://user:password@host:6379/0 instead")

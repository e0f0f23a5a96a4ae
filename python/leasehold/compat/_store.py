"""Makes a leasehold client from the client that a redis-py lock gets."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import quote

from .._client import Client, connect
from .._errors import InvalidArgument

#: One client per URL for the whole process, because programs make a new lock for each use. Entries are few and never removed.
_clients: dict[str, Client] = {}

#: Modules whose connections go by TCP or TLS to the host and port in their settings.
_CONNECTS = ("redis.connection", "redis.asyncio.connection", "valkey.connection", "valkey.asyncio.connection")


def raw_client(redis: Any) -> Client:
    """A client that uses names as keys, for a redis-py client, a leasehold client, or a URL."""
    if isinstance(redis, Client):
        if redis._arguments[1] != "":
            raise InvalidArgument(
                "a lock that excludes redis-py's locks uses its name as the key, without a namespace: pass a client "
                'that was made by connect(…, namespace="")'
            )
        return redis
    url = redis if isinstance(redis, str) else _url(redis)
    client = _clients.get(url)
    if client is None:
        # `setdefault` is atomic, and needs no lock that could be held at a fork. A client that is made in vain is not connected.
        client = _clients.setdefault(url, connect(url, namespace="", lazy=True))
    return client


def _url(redis: Any) -> str:
    """The URL to which a redis-py client connects."""
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
            # A fake, a tunnel, a proxy: it does not connect to the host in its settings.
            raise _unusable(f"a client with its own connection class ({part.__module__}.{part.__qualname__})")
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
    """The query that names the trusted CA certificates: the system's, or those of a file."""
    for setting in ("ssl_certfile", "ssl_keyfile", "ssl_ca_path", "ssl_ca_data"):
        if settings.get(setting):
            raise _unusable(f"a client with {setting}")
    if settings.get("ssl_cert_reqs", "required") not in ("required", ssl.CERT_REQUIRED, None):
        raise _unusable("a client that does not verify the server's certificate; leasehold always does")
    file = settings.get("ssl_ca_certs")
    return f"?ca={quote(str(file), safe='/')}" if file else ""


def _quoted(text: str | bytes) -> str:
    return quote(text, safe="")


def _unusable(what: str) -> InvalidArgument:
    return InvalidArgument(f"redis: {what}: pass a URL such as redis://user:password@host:6379/0 instead")

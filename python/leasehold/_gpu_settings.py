"""How GPU locks behave unless a call says otherwise, and in which store they are kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

from ._client import Client, connect
from ._errors import InvalidArgument
from ._times import Seconds, seconds

Scope: TypeAlias = Literal["shared", "host"]


@dataclass(frozen=True)
class Heartbeat:
    """Leases are renewed while their holder lives."""

    #: Off: a lease lasts ``lock_timeout``, whatever its holder does.
    enabled: bool = True
    #: No renewing lease is longer than this: a holder that died is rid of its GPU by then.
    timeout: float = 300.0


@dataclass(frozen=True)
class Settings:
    """The section ``gpu_lock`` of the configuration, as far as it is Python's."""

    #: How long a request waits; a long task says more in its own call.
    max_wait_time: float = 300.0
    #: The lease of a holder without a heartbeat.
    lock_timeout: float = 600.0
    heartbeat: Heartbeat = Heartbeat()
    #: Whose the number of a GPU is: everybody's on this store, or this host's.
    scope: Scope = "shared"
    #: How many GPUs there are; ``None``: as ``CUDA_VISIBLE_DEVICES`` says.
    gpus: int | None = None

    @property
    def ttl(self) -> float:
        """The lease: a living holder's goes on for as long as it lives, a dead one's is over by this."""
        return min(self.lock_timeout, self.heartbeat.timeout) if self.heartbeat.enabled else self.lock_timeout

    def lock_name(self, gpu_id: int) -> str:
        """The lock of a GPU."""
        return f"{self.pool_name}:{gpu_id}"

    @property
    def pool_name(self) -> str:
        """What the names of all of them begin with."""
        return "gpu_lock" if self.scope == "shared" else f"gpu_lock:{this_host()}"

    def members(self, gpus: int | None = None) -> tuple[int, ...]:
        """The numbers of the GPUs there are."""
        count = gpus if gpus is not None else self.gpus
        if count is not None:
            if count < 1:
                raise InvalidArgument(f"gpus: {count} is not a number of GPUs, 1 or more")
            return tuple(range(count))
        visible = visible_devices()
        if not visible:
            raise InvalidArgument(
                'gpu="any": it is not known which GPUs there are: say gpus=N, or set CUDA_VISIBLE_DEVICES to numbers'
            )
        return visible


def visible_devices() -> tuple[int, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` names by numbers; nothing where it names them otherwise, or none."""
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(int(part) for part in named) if all(part.isdecimal() for part in named) else ()


def this_host() -> str:
    """As the store says it of holders."""
    return "".join(c for c in os.uname().nodename if c.isprintable() and c != "@")[:64]


class _Configured:
    """What was configured, once for the process. A client finds its way across forks by itself."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.settings: Settings | None = None
        self.client: Client | None = None


_configured = _Configured()
os.register_at_fork(after_in_child=lambda: setattr(_configured, "lock", threading.Lock()))


def configure(
    client: Client | str | None = None,
    *,
    max_wait_time: Seconds | None = None,
    lock_timeout: Seconds | None = None,
    heartbeat: Mapping[str, Any] | bool | None = None,
    scope: Scope | None = None,
    gpus: int | None = None,
) -> None:
    """Says, once at the start, in which store GPU locks are kept and how they behave by default.

    :param client: a client, or the URL of a store. Left out: ``LEASEHOLD_STORE``, else the default SQLite file
        of this machine.
    :param max_wait_time: how long a request waits: 300 s unless said. A long task says more in its own call.
    :param lock_timeout: the lease of a holder without a heartbeat: 600 s unless said.
    :param heartbeat: ``{"enabled": True, "timeout": 300}``; ``False`` switches it off. With one, the lease is
        at most the time-out and renewed for as long as the holder lives.
    :param scope: ``"shared"``: GPU 0 is ``gpu_lock:0`` for everybody who uses the store. ``"host"``: it is
        ``gpu_lock:<host>:0``, for fleets in which every machine has a GPU 0 of its own.
    :param gpus: how many GPUs there are, for ``gpu="any"``.
    :raises InvalidArgument: for what makes no sense.

    >>> configure("memory:", max_wait_time=60, gpus=2)
    """
    new = _from_environment()
    if max_wait_time is not None:
        new = replace(new, max_wait_time=_at_least("max_wait_time", seconds(max_wait_time), 0))
    if lock_timeout is not None:
        new = replace(new, lock_timeout=_at_least("lock_timeout", seconds(lock_timeout), 0.05))
    if heartbeat is not None:
        new = replace(new, heartbeat=_heartbeat(heartbeat))
    if scope is not None:
        new = replace(new, scope=_scope(scope))
    if gpus is not None:
        new.members(gpus)
        new = replace(new, gpus=gpus)
    with _configured.lock:
        _configured.settings = new
        if client is not None:
            _configured.client = client if isinstance(client, Client) else connect(client, lazy=True)


def settings() -> Settings:
    """What was configured, or else the defaults."""
    if _configured.settings is None:
        _configured.settings = _from_environment()
    return _configured.settings


def client_of(store: Callable[[], str] | None = None) -> Client:
    """The client that was configured; where none was, one of this store from now on."""
    if _configured.client is None:
        with _configured.lock:
            if _configured.client is None:
                _configured.client = connect(None if store is None else store(), lazy=True)
    return _configured.client


def _from_environment() -> Settings:
    scope = os.environ.get("LEASEHOLD_GPU_SCOPE")
    return Settings(scope=_scope(scope)) if scope else Settings()


def _heartbeat(given: Mapping[str, Any] | bool) -> Heartbeat:
    if isinstance(given, bool):
        return Heartbeat(enabled=given)
    unknown = set(given) - {"enabled", "timeout"}
    if unknown:
        raise InvalidArgument(f"heartbeat: {sorted(unknown)[0]!r} is not known: there are 'enabled' and 'timeout'")
    timeout = _at_least("heartbeat.timeout", seconds(given.get("timeout", Heartbeat.timeout)), 0.05)
    return Heartbeat(bool(given.get("enabled", True)), timeout)


def _scope(given: str) -> Scope:
    if given in ("shared", "host"):
        return cast(Scope, given)
    raise InvalidArgument(f'scope: {given!r} is neither "shared" nor "host"')


def _at_least(what: str, given: float, least: float) -> float:
    if not given >= least:
        raise InvalidArgument(f"{what}: {given} is not a number of seconds, {least} or more")
    return given

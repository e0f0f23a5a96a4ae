"""How GPU locks behave unless a call says otherwise, and in which store they are kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from typing import Any, Literal, TypeAlias, cast

from . import _native
from ._client import Client
from ._config import Path, load, this_file, when_configured
from ._errors import InvalidArgument
from ._times import Seconds, lease, seconds

Scope: TypeAlias = Literal["shared", "host"]


@dataclass(frozen=True)
class Heartbeat:
    """Leases are renewed while their holder lives."""

    #: Off: a lease lasts ``lock_timeout``, whatever its holder does.
    enabled: bool = True
    #: A lease is renewed at least this often.
    interval: float = 60.0
    #: No renewing lease is longer than this: a holder that died is rid of its GPU by then.
    timeout: float = 300.0


@dataclass(frozen=True)
class Settings:
    """The section ``gpu_lock`` of the configuration, as far as a request goes by it. The rest of it is the client's:
    how it polls, renews and releases."""

    #: How long a request waits; a long task says more in its own call.
    max_wait_time: float = 300.0
    #: The lease of a holder without a heartbeat.
    lock_timeout: float = 600.0
    heartbeat: Heartbeat = Heartbeat()
    #: Whose the number of a GPU is: everybody's on this store, or this host's.
    scope: Scope = "shared"
    #: How many GPUs there are; ``None``: as ``CUDA_VISIBLE_DEVICES`` says.
    gpus: int | None = None

    @classmethod
    def of(cls, config: _native.Config, gpus: int | None) -> Settings:
        """As configured."""
        heartbeat = Heartbeat(config.gpu_heartbeat_enabled, config.gpu_heartbeat_interval, config.gpu_heartbeat_timeout)
        scope = cast(Scope, config.gpu_scope)
        return cls(config.gpu_max_wait_time, config.gpu_lock_timeout, heartbeat, scope, gpus)

    @property
    def ttl(self) -> float:
        """The lease: a living holder's goes on for as long as it lives, a dead one's is over by this."""
        return min(self.lock_timeout, self.heartbeat.timeout) if self.heartbeat.enabled else self.lock_timeout

    def lock_name(self, gpu_id: int) -> str:
        """The lock of a GPU."""
        return f"{self.pool_name}:{gpu_number(gpu_id)}"

    @property
    def pool_name(self) -> str:
        """What the names of all of them begin with."""
        return "gpu_lock" if self.scope == "shared" else f"gpu_lock:{this_host()}"

    def members(self, gpus: int | None = None) -> tuple[int, ...]:
        """The numbers of the GPUs there are."""
        count = gpus if gpus is not None else self.gpus
        if count is not None:
            if not isinstance(count, int) or count < 1:
                raise InvalidArgument(f"gpus: {count!r} is not a number of GPUs, 1 or more")
            return tuple(range(count))
        visible = visible_devices()
        if not visible:
            raise InvalidArgument(
                'gpu="any": it is not known which GPUs there are: say gpus=N, or set CUDA_VISIBLE_DEVICES to numbers'
            )
        return visible


def gpu_number(given: Any) -> int:
    """A GPU as callers name it: by its number, of which a message may have made a text."""
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    if isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 0:
        return int(number)
    raise InvalidArgument(f"gpu_id: {given!r} is not the number of a GPU, 0 or more")


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
        #: The program named it.
        self.client_is_given = False
        self.file: str | None = None
        self.said: tuple[tuple[str, str], ...] = ()
        self.gpus: int | None = None

    def forget(self) -> None:
        """Another file is this process's now."""
        with self.lock:
            self.settings = None
            if not self.client_is_given:
                self.client = None


_configured = _Configured()
when_configured(_configured.forget)
os.register_at_fork(after_in_child=lambda: setattr(_configured, "lock", threading.Lock()))


def configure(
    client: Client | str | None = None,
    *,
    config: Path | None = None,
    max_wait_time: Seconds | None = None,
    lock_timeout: Seconds | None = None,
    heartbeat: Mapping[str, Any] | bool | None = None,
    scope: Scope | None = None,
    gpus: int | None = None,
) -> None:
    """Says, once at the start, in which store GPU locks are kept and how they behave by default. What is left out is
    as the section ``gpu_lock`` of the configuration has it: ``LEASEHOLD_GPU_LOCK_…`` in the environment, else the
    file, else as said here.

    :param client: a client, or the URL of a store. Left out: ``LEASEHOLD_STORE``, else the default SQLite file
        of this machine. A client goes on as it was made: how GPU locks poll, renew and are released
        (``poll_interval``, ``exception_handling``…) is for one that is made here, of a URL.
    :param config: a YAML file; left out, the one of :func:`leasehold.configure`, else the one that
        ``LEASEHOLD_CONFIG`` names.
    :param max_wait_time: how long a request waits: 300 s unless said. A long task says more in its own call.
    :param lock_timeout: the lease of a holder without a heartbeat: 600 s unless said.
    :param heartbeat: ``{"enabled": True, "interval": 60, "timeout": 300}``; ``False`` switches it off. With one, the
        lease is at most the time-out and renewed for as long as the holder lives.
    :param scope: ``"shared"``: GPU 0 is ``gpu_lock:0`` for everybody who uses the store. ``"host"``: it is
        ``gpu_lock:<host>:0``, for fleets in which every machine has a GPU 0 of its own.
    :param gpus: how many GPUs there are, for ``gpu="any"``.
    :raises InvalidArgument: for what makes no sense.

    >>> configure("memory:", max_wait_time=60, gpus=2)
    """
    said: list[tuple[str, str]] = []
    if max_wait_time is not None:
        said.append(("gpu_lock.max_wait_time", repr(seconds("max_wait_time", max_wait_time))))
    if lock_timeout is not None:
        said.append(("gpu_lock.lock_timeout", repr(lease("lock_timeout", lock_timeout))))
    if heartbeat is not None:
        given = {"enabled": heartbeat} if isinstance(heartbeat, bool) else heartbeat
        said.extend((f"gpu_lock.heartbeat.{key}", _written(value)) for key, value in given.items())
    if scope is not None:
        said.append(("gpu_scope", scope))
    new = Settings.of(load(config, said), gpus)
    if gpus is not None:
        new.members(gpus)
    with _configured.lock:
        _configured.settings = new
        _configured.file, _configured.said, _configured.gpus = this_file(config), tuple(said), gpus
        if client is not None:
            _configured.client = client if isinstance(client, Client) else _connect(client)
            _configured.client_is_given = True
        elif not _configured.client_is_given:
            _configured.client = None


def settings() -> Settings:
    """What was configured, or else the defaults."""
    if _configured.settings is None:
        _configured.settings = Settings.of(load(_configured.file, _configured.said), _configured.gpus)
    return _configured.settings


def client_of(store: Callable[[], str] | None = None) -> Client:
    """The client that was configured; where none was, one of this store from now on."""
    if _configured.client is None:
        with _configured.lock:
            if _configured.client is None:
                _configured.client = _connect(None if store is None else store())
    return _configured.client


def _connect(url: str | None) -> Client:
    """A client on the terms of GPU locks, which connects with its first call."""
    file, said = _configured.file or this_file(), _configured.said
    return Client(url, None, None, None, None, None, None, file, True, said)


def _written(value: Any) -> str:
    """As the file would have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value.total_seconds()) if isinstance(value, timedelta) else str(value)

"""The defaults of GPU locks, and the store that has them."""

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
from ._config import Path, load, on_configure, this_file
from ._errors import InvalidArgument
from ._arguments import Seconds, lease, seconds

Scope: TypeAlias = Literal["shared", "host"]


@dataclass(frozen=True)
class Heartbeat:
    """The renewal of leases while their holder lives."""

    #: If ``False``, a lease ends after ``lock_timeout`` and is not renewed.
    enabled: bool = True
    #: The longest time between two renewals, in seconds.
    interval: float = 60.0
    #: The longest ttl of a renewed lease, in seconds: a holder that died loses its GPU within this time.
    timeout: float = 300.0


@dataclass(frozen=True)
class Settings:
    """The settings of the configuration's section ``gpu_lock`` that requests use. The client uses the others: polling,
    renewal and release."""

    #: How long a request waits, in seconds, unless the call sets a time.
    max_wait_time: float = 300.0
    #: The ttl of a lease without a heartbeat, in seconds.
    lock_timeout: float = 600.0
    heartbeat: Heartbeat = Heartbeat()
    #: Whether GPU numbers are shared by all hosts that use the store, or belong to each host.
    scope: Scope = "shared"
    #: The number of GPUs; ``None`` for those in ``CUDA_VISIBLE_DEVICES``.
    gpus: int | None = None

    @classmethod
    def of(cls, config: _native.Config, gpus: int | None) -> Settings:
        """The settings of a configuration."""
        heartbeat = Heartbeat(config.gpu_heartbeat_enabled, config.gpu_heartbeat_interval, config.gpu_heartbeat_timeout)
        scope = cast(Scope, config.gpu_scope)
        return cls(config.gpu_max_wait_time, config.gpu_lock_timeout, heartbeat, scope, gpus)

    @property
    def ttl(self) -> float:
        """The ttl of a lease, in seconds: how long it outlives a holder that died."""
        return min(self.lock_timeout, self.heartbeat.timeout) if self.heartbeat.enabled else self.lock_timeout

    def lock_name(self, gpu_id: int) -> str:
        """The name of a GPU's lock."""
        return f"{self.pool_name}:{gpu_number(gpu_id)}"

    @property
    def pool_name(self) -> str:
        """The name of the pool of all GPUs, with which the names of their locks begin."""
        return "gpu_lock" if self.scope == "shared" else f"gpu_lock:{this_host()}"

    def members(self, gpus: int | None = None) -> tuple[int, ...]:
        """The numbers of the GPUs."""
        count = gpus if gpus is not None else self.gpus
        if count is not None:
            if not isinstance(count, int) or count < 1:
                raise InvalidArgument(f"gpus: {count!r} is not a number of GPUs, 1 or more")
            return tuple(range(count))
        visible = visible_devices()
        if not visible:
            raise InvalidArgument(
                'gpu="any": it is not known which GPUs there are: pass gpus=N, or set CUDA_VISIBLE_DEVICES to numbers'
            )
        return visible


def gpu_number(given: Any) -> int:
    """The number of a GPU. A number written as text is accepted, because messages may carry it that way."""
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    if isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 0:
        return int(number)
    raise InvalidArgument(f"gpu_id: {given!r} is not the number of a GPU, 0 or more")


def visible_devices() -> tuple[int, ...]:
    """The numbers in ``CUDA_VISIBLE_DEVICES``; empty if it is unset or lists GPUs by other names."""
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(int(part) for part in named) if all(part.isdecimal() for part in named) else ()


def this_host() -> str:
    """The name of this host, as it appears in owners."""
    return "".join(c for c in os.uname().nodename if c.isprintable() and c != "@")[:64]


class _Configured:
    """The configuration of this process. A forked child keeps it, and its client connects again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.settings: Settings | None = None
        self.client: Client | None = None
        #: Whether the program passed the client to :func:`configure`.
        self.client_is_given = False
        self.file: str | None = None
        self.keys: tuple[tuple[str, str], ...] = ()
        self.gpus: int | None = None

    def forget(self) -> None:
        """Drops what was read from the previous configuration file."""
        with self.lock:
            self.settings = None
            if not self.client_is_given:
                self.client = None


_configured = _Configured()
on_configure(_configured.forget)
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
    """Sets the store and the defaults of GPU locks. Call it once, at the start. A setting that is left out comes from the
    environment (``LEASEHOLD_GPU_LOCK_…``), then from the section ``gpu_lock`` of the configuration file, then from the
    defaults below.

    :param client: a client, or the URL of a store. Default: ``LEASEHOLD_STORE``, else the default SQLite file of this
        machine. The section's settings for polling, renewal and release (``poll_interval``, ``exception_handling``…) apply
        to a client that is made here from a URL; a client that is passed in keeps its own.
    :param config: a YAML file. Default: the file of :func:`leasehold.configure`, else the one that ``LEASEHOLD_CONFIG``
        names.
    :param max_wait_time: how long a request waits, unless the call sets a time. Default: 300 s.
    :param lock_timeout: the ttl of a lease without a heartbeat. Default: 600 s.
    :param heartbeat: ``{"enabled": True, "interval": 60, "timeout": 300}``; ``False`` switches it off. With a heartbeat the
        lease is renewed as long as its holder lives, and its ttl is at most the timeout.
    :param scope: ``"shared"``: GPU 0 is ``gpu_lock:0`` for all users of the store. ``"host"``: it is ``gpu_lock:<host>:0``,
        for fleets in which each machine has its own GPU 0.
    :param gpus: the number of GPUs, for ``gpu="any"``.
    :raises InvalidArgument: an argument or the configuration is invalid.

    >>> configure("memory:", max_wait_time=60, gpus=2)
    """
    keys: list[tuple[str, str]] = []
    if max_wait_time is not None:
        keys.append(("gpu_lock.max_wait_time", repr(seconds("max_wait_time", max_wait_time))))
    if lock_timeout is not None:
        keys.append(("gpu_lock.lock_timeout", repr(lease("lock_timeout", lock_timeout))))
    if heartbeat is not None:
        given = {"enabled": heartbeat} if isinstance(heartbeat, bool) else heartbeat
        keys.extend((f"gpu_lock.heartbeat.{key}", _config_value(value)) for key, value in given.items())
    if scope is not None:
        keys.append(("gpu_scope", scope))
    new = Settings.of(load(config, keys), gpus)
    if gpus is not None:
        new.members(gpus)
    with _configured.lock:
        _configured.settings = new
        _configured.file, _configured.keys, _configured.gpus = this_file(config), tuple(keys), gpus
        if client is not None:
            _configured.client = client if isinstance(client, Client) else _connect(client)
            _configured.client_is_given = True
        elif not _configured.client_is_given:
            _configured.client = None


def settings() -> Settings:
    """The settings of this process."""
    if _configured.settings is None:
        _configured.settings = Settings.of(load(_configured.file, _configured.keys), _configured.gpus)
    return _configured.settings


def client_of(store: Callable[[], str] | None = None) -> Client:
    """The configured client. If there is none, a client of this store becomes it."""
    if _configured.client is None:
        with _configured.lock:
            if _configured.client is None:
                _configured.client = _connect(None if store is None else store())
    return _configured.client


def _connect(url: str | None) -> Client:
    """A client with the settings of GPU locks, which connects with its first call."""
    file = _configured.file or this_file()
    return Client(url, None, None, None, None, None, None, file, True, _configured.keys)


def _config_value(value: Any) -> str:
    """A value as a configuration file would have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value.total_seconds()) if isinstance(value, timedelta) else str(value)

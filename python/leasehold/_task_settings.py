"""The store of task locks, and what happens when it cannot be reached."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple, cast

from ._arguments import OnUnavailable, one_of
from ._client import Client, connect
from ._config import Path, load
from ._errors import InvalidArgument

log = logging.getLogger("leasehold.task_lock")


class TaskSettings(NamedTuple):
    """The client of task locks, and what happens when its store cannot be reached."""

    client: Client
    on_unavailable: OnUnavailable


#: ``None`` until they are configured or first used.
_settings: TaskSettings | None = None


def configure(
    url: str | None = None,
    *,
    client: Client | None = None,
    namespace: str | None = None,
    owner: str | None = None,
    on_unavailable: OnUnavailable | None = None,
    config: Path | None = None,
) -> None:
    """Sets the store of this process's task locks. Call it before the first of them.

    :param url: as for :func:`leasehold.connect`. Default: ``LEASEHOLD_STORE``, else the default SQLite file, which
        serves the workers of one machine. ``REDIS_URL`` is not read: workers with different stores do not exclude each
        other, so the store has to be set on purpose.
    :param client: a client to use instead of a URL.
    :param on_unavailable: what happens when the store cannot be reached: with ``"open"`` (the default, unless configured
        otherwise) tasks run without a lock; with ``"closed"`` they get :class:`~leasehold.StoreUnavailable`.
    :param config: as for :func:`leasehold.connect`.

    >>> configure("memory:", on_unavailable="closed")
    """
    global _settings
    if on_unavailable is not None:
        one_of("on_unavailable", on_unavailable, "closed", "open")
    if client is not None and not isinstance(client, Client):
        raise InvalidArgument(f"client: {client!r} is not a leasehold.Client; pass a URL as url")
    policy = on_unavailable or cast("OnUnavailable", load(config).value_set("on_unavailable") or "open")
    if client is None:
        client = connect(url, namespace=namespace, owner=owner, on_unavailable=policy, config=config, lazy=True)
    _settings = TaskSettings(client, policy)


def task_settings() -> TaskSettings:
    """The settings of task locks. The first use configures the defaults."""
    if _settings is None:
        if os.environ.get("REDIS_URL") and load().value_set("store") is None:
            log.warning(
                "REDIS_URL is set, but it is not read: task locks are in the default SQLite file of this machine. Set "
                "LEASEHOLD_STORE, or call leasehold.task_lock.configure(url)"
            )
        configure()
        assert _settings is not None
    return _settings

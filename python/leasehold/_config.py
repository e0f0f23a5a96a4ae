"""The configuration: a file, the environment, and keys that the program sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeAlias

from . import _native
from ._errors import InvalidArgument
from ._arguments import text

Path: TypeAlias = str | os.PathLike[str]

#: The configuration file of this process, if :func:`configure` named one.
_file: str | None = None
#: Called when that file changes.
_on_change: list[Callable[[], None]] = []


def configure(file: Path | None = None) -> None:
    """Sets the YAML configuration file of this process. Call it once, at the start.

    The file applies to every client that is made later without a `config` of its own, and to :mod:`leasehold.gpu`,
    :mod:`leasehold.task_lock` and :mod:`leasehold.celery`. Arguments of a call override the environment
    (``LEASEHOLD_…``), which overrides the file. If this is not called, the file is the one that ``LEASEHOLD_CONFIG``
    names. ``docs/configuration.md`` lists the keys.

    :raises InvalidArgument: the file has errors; the message lists all of them with their places.
    """
    global _file
    path = absolute(file)
    _native.Config(path, [])
    _file = path
    for forget in _on_change:
        forget()


def load(file: Path | None = None, keys: Iterable[tuple[str, str]] = ()) -> _native.Config:
    """Reads a file, or the one of this process; then the environment; then the keys that the program sets."""
    return _native.Config(absolute(file) or _file, list(keys))


def absolute(file: Path | None) -> str | None:
    """The absolute path of a file."""
    if file is None:
        return None
    if not isinstance(file, str | os.PathLike):
        raise InvalidArgument(f"configuration file: {file!r} is not a path")
    return text("configuration file", os.path.abspath(os.fspath(file)))


def this_file(file: Path | None = None) -> str | None:
    """The path of a file, or of this process's file, as another process can use it."""
    return absolute(file) or _file


def on_configure(forget: Callable[[], None]) -> None:
    """Registers a function that drops what was read from the previous file."""
    _on_change.append(forget)

"""The configuration: a file, the environment, and what the program says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeAlias

from . import _native
from ._errors import InvalidArgument
from ._times import text

Path: TypeAlias = str | os.PathLike[str]

#: The file of this process, if it named one.
_file: str | None = None
#: To be called when that changes.
_forget: list[Callable[[], None]] = []


def configure(file: Path | None = None) -> None:
    """Makes a YAML file the configuration of this process: of every client that is made after this and not told
    otherwise, of :mod:`leasehold.gpu`, :mod:`leasehold.task_lock` and :mod:`leasehold.celery`. To be called once, at
    the start.

    What a program says in a call wins over the environment (``LEASEHOLD_…``), which wins over the file. Without a call
    it is the file that ``LEASEHOLD_CONFIG`` names, if that is set. ``docs/configuration.md`` lists the keys.

    :raises InvalidArgument: everything that is wrong with it, each with its place.
    """
    global _file
    path = absolute(file)
    _native.Config(path, [])
    _file = path
    for forget in _forget:
        forget()


def load(file: Path | None = None, said: Iterable[tuple[str, str]] = ()) -> _native.Config:
    """A file, or the one of this process; the environment; and keys that are said outright."""
    return _native.Config(absolute(file) or _file, list(said))


def absolute(file: Path | None) -> str | None:
    if file is None:
        return None
    if not isinstance(file, str | os.PathLike):
        raise InvalidArgument(f"configuration file: {file!r} is not a path")
    return text("configuration file", os.path.abspath(os.fspath(file)))


def this_file(file: Path | None = None) -> str | None:
    """Which file that is, for another process."""
    return absolute(file) or _file


def when_configured(forget: Callable[[], None]) -> None:
    """Forgets what was read from another file before."""
    _forget.append(forget)

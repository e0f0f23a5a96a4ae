"""Times and texts as Python says them: what cannot be meant is refused, and the error names the argument."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real
from typing import Any, TypeAlias

from ._errors import InvalidArgument

#: A number of seconds, or a ``timedelta``.
Seconds: TypeAlias = float | timedelta


def seconds(what: str, time: Seconds) -> float:
    """As a number."""
    if isinstance(time, timedelta):
        return time.total_seconds()
    given: Any = time
    if isinstance(given, Real) and not isinstance(given, bool):
        return float(given)
    raise InvalidArgument(f"{what}: {given!r} is neither a number of seconds nor a timedelta")


def optional_seconds(what: str, time: Seconds | None) -> float | None:
    """The same of a time that may be left out."""
    return None if time is None else seconds(what, time)


def text(what: str, given: str) -> str:
    """A name, an owner, a URL: never bytes, which two programs may read differently."""
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"{what}: {given!r} is not text in UTF-8") from None
        return given
    hint = ": decode it" if isinstance(given, bytes | bytearray) else ""
    raise InvalidArgument(f"{what}: {given!r} is not text{hint}")


def optional_text(what: str, given: str | None) -> str | None:
    """The same of a text that may be left out."""
    return None if given is None else text(what, given)

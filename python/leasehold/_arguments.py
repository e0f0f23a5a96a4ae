"""Checks of arguments: times, texts, choices, and the terms of a request. Each error names the argument."""

from __future__ import annotations

import json
from datetime import timedelta
from numbers import Real
from typing import Any, Literal, TypeAlias

from . import _native
from ._errors import InvalidArgument

#: A number of seconds, or a ``timedelta``.
Seconds: TypeAlias = float | timedelta
OnUnavailable: TypeAlias = Literal["closed", "open"]


def terms(
    *,
    ttl: Seconds | None = None,
    wait: Seconds | None = None,
    renew: bool = True,
    max_hold: Seconds | None = None,
    fenced: bool = True,
    owner: str | None = None,
    on_unavailable: OnUnavailable | None = None,
) -> _native.Terms:
    """The terms of a request. ``None`` stands for the client's default."""
    if on_unavailable is not None:
        one_of("on_unavailable", on_unavailable, "closed", "open")
    return _native.Terms(
        ttl=optional_lease("ttl", ttl),
        wait=optional_seconds("wait", wait),
        renew=flag("renew", renew),
        max_hold=optional_seconds("max_hold", max_hold),
        fenced=flag("fenced", fenced),
        owner=optional_text("owner", owner),
        on_unavailable=on_unavailable,
    )


def seconds(what: str, time: Seconds) -> float:
    """A time as a number of seconds, 0 or more."""
    if isinstance(time, timedelta):
        number = time.total_seconds()
    else:
        given: Any = time
        if not isinstance(given, Real) or isinstance(given, bool):
            raise InvalidArgument(f"{what}: {given!r} is neither a number of seconds nor a timedelta")
        try:
            number = float(given)
        except OverflowError:
            raise InvalidArgument(f"{what}: the number of seconds is too large for a float") from None
    # Written this way because NaN compares false, too.
    if not number >= 0:
        raise InvalidArgument(f"{what}: {time!r} is not a number of seconds, 0 or more")
    return number


def optional_seconds(what: str, time: Seconds | None) -> float | None:
    """:func:`seconds` of a time that may be left out."""
    return None if time is None else seconds(what, time)


def lease(what: str, time: Seconds) -> float:
    """The ttl of a lease in seconds, within the bounds of a store."""
    number = seconds(what, time)
    _native.check_ttl(what, number)
    return number


def optional_lease(what: str, time: Seconds | None) -> float | None:
    """:func:`lease` of a ttl that may be left out."""
    return None if time is None else lease(what, time)


def retention(what: str, time: Seconds) -> float:
    """For how long a store keeps a result or a value, in seconds and within its bounds."""
    number = seconds(what, time)
    _native.check_retention(what, number)
    return number


def text(what: str, given: str) -> str:
    """A name, an owner or a URL. Bytes are refused, because two programs may decode them differently."""
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"{what}: {given!r} is not text in UTF-8") from None
        return given
    hint = ": decode it" if isinstance(given, bytes | bytearray) else ""
    raise InvalidArgument(f"{what}: {given!r} is not text{hint}")


def optional_text(what: str, given: str | None) -> str | None:
    """:func:`text` of an argument that may be left out."""
    return None if given is None else text(what, given)


def flag(what: str, given: bool) -> bool:
    """``True`` or ``False``. Other values that Python counts as true or false are refused."""
    if isinstance(given, bool):
        return given
    raise InvalidArgument(f"{what}: {given!r} is neither True nor False")


def one_of(what: str, given: Any, first: str, second: str) -> None:
    """Refuses everything but one of two words."""
    if not isinstance(given, str) or given not in (first, second):
        raise InvalidArgument(f'{what}: {given!r} is neither "{first}" nor "{second}"')


def as_json(what: str, given: Any, *, sort_keys: bool = False) -> str:
    """A value written as JSON."""
    try:
        return json.dumps(given, sort_keys=sort_keys)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidArgument(f"{what}: it cannot be written as JSON: {problem}") from None


def as_exact_json(what: str, given: Any) -> str:
    """A value written as JSON for programs in other languages: integers of more than 64 bits are refused, because some of
    these programs would read another number."""
    written = as_json(what, given)

    def exact(digits: str) -> int:
        number = int(digits)
        if -(2**63) <= number < 2**64:
            return number
        raise InvalidArgument(f"{what}: {digits[:40]} has more than 64 bits, and other programs may read another number: write it as text")

    json.loads(written, parse_int=exact)
    return written

"""Times, texts and choices as Python says them: what cannot be meant is refused, and the error names the argument."""

from __future__ import annotations

import json
from datetime import timedelta
from numbers import Real
from typing import Any, TypeAlias

from . import _native
from ._errors import InvalidArgument

#: A number of seconds, or a ``timedelta``.
Seconds: TypeAlias = float | timedelta


def seconds(what: str, time: Seconds) -> float:
    """As a number."""
    if isinstance(time, timedelta):
        number = time.total_seconds()
    else:
        given: Any = time
        if not isinstance(given, Real) or isinstance(given, bool):
            raise InvalidArgument(f"{what}: {given!r} is neither a number of seconds nor a timedelta")
        try:
            number = float(given)
        except OverflowError:
            raise InvalidArgument(f"{what}: so many seconds cannot be counted") from None
    # Not less than 0: NaN is neither.
    if not number >= 0:
        raise InvalidArgument(f"{what}: {time!r} is not a number of seconds, 0 or more")
    return number


def optional_seconds(what: str, time: Seconds | None) -> float | None:
    """The same of a time that may be left out."""
    return None if time is None else seconds(what, time)


def lease(what: str, time: Seconds) -> float:
    """The same of how long a store keeps a lease that nobody renews."""
    number = seconds(what, time)
    _native.check_lease(what, number)
    return number


def optional_lease(what: str, time: Seconds | None) -> float | None:
    """The same of one that may be left out."""
    return None if time is None else lease(what, time)


def kept(what: str, time: Seconds) -> float:
    """The same of how long a store keeps a result or a value."""
    number = seconds(what, time)
    _native.check_kept(what, number)
    return number


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


def flag(what: str, given: bool) -> bool:
    """Yes or no, and nothing that may be meant as one of them."""
    if isinstance(given, bool):
        return given
    raise InvalidArgument(f"{what}: {given!r} is neither True nor False")


def one_of(what: str, given: Any, first: str, second: str) -> None:
    """One of two words."""
    if not isinstance(given, str) or given not in (first, second):
        raise InvalidArgument(f'{what}: {given!r} is neither "{first}" nor "{second}"')


def as_json(what: str, given: Any, *, sort_keys: bool = False) -> str:
    """Whatever JSON can say."""
    try:
        return json.dumps(given, sort_keys=sort_keys)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InvalidArgument(f"{what}: it cannot be written as JSON: {problem}") from None


def as_exact_json(what: str, given: Any) -> str:
    """The same of a value that programs in other languages read: without integers that only some of them know."""
    written = as_json(what, given)

    def exact(digits: str) -> int:
        number = int(digits)
        if -(2**63) <= number < 2**64:
            return number
        raise InvalidArgument(f"{what}: {digits[:40]} has more than 64 bits, and would not be the same for everybody: write it as text")

    json.loads(written, parse_int=exact)
    return written

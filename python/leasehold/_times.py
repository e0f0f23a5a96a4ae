"""Times as Python says them."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias

#: A number of seconds, or a ``timedelta``.
Seconds: TypeAlias = float | timedelta


def seconds(time: Seconds) -> float:
    """As a number."""
    return time.total_seconds() if isinstance(time, timedelta) else float(time)


def optional_seconds(time: Seconds | None) -> float | None:
    """The same of a time that may be left out."""
    return None if time is None else seconds(time)

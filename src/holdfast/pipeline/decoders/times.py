"""Times in payloads: numbers since 1970 in whatever unit, and ISO 8601."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any, Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

_SECONDS_BELOW: Final = 100_000_000_000
"""As seconds the year 5138, as milliseconds 1973."""
_MILLISECONDS_BELOW: Final = _SECONDS_BELOW * 1000
_MICROSECONDS_BELOW: Final = _MILLISECONDS_BELOW * 1000
_NANOSECONDS_BELOW: Final = _MICROSECONDS_BELOW * 1000
_TEXT_LENGTH_MAX: Final = 40


def parse_time(value: Any) -> int | None:
    """Microseconds since 1970 UTC, None where it is no time.

    The size of a number tells its unit: seconds (also with a fraction) below 1e11, then
    milliseconds, microseconds below 1e17, nanoseconds. A text is ISO 8601, UTC unless it says
    otherwise, or such a number.
    """
    kind = type(value)
    if kind is int or kind is float:
        return _from_number(value)
    if kind is str and 0 < len(value) <= _TEXT_LENGTH_MAX:
        return _from_text(value.strip())
    return None


def _from_number(value: int | float) -> int | None:
    if not 0 <= value < _NANOSECONDS_BELOW:
        return None
    if isinstance(value, int):
        if value < _SECONDS_BELOW:
            return value * 1_000_000
        if value < _MILLISECONDS_BELOW:
            return value * 1000
        return value if value < _MICROSECONDS_BELOW else value // 1000
    if not math.isfinite(value):
        return None
    if value < _SECONDS_BELOW:
        return round(value * 1_000_000)
    if value < _MILLISECONDS_BELOW:
        return round(value * 1000)
    return round(value if value < _MICROSECONDS_BELOW else value / 1000)


def _from_text(text: str) -> int | None:
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return _from_number(float(text) if "." in text else int(text))
    if len(text) < len("2026-01-01T00") or text[4] != "-":
        return None  # what datetime would take as well: a date alone, week dates
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return (found - _EPOCH) // _MICROSECOND

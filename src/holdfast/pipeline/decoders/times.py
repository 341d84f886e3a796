"""The times in payloads: numbers since 1970 in several units, and ISO 8601."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

_SECONDS_BELOW: Final = 100_000_000_000
"""The bound of numbers that are seconds. It is the year 5138 in seconds, and 1973 in
milliseconds."""
_MILLISECONDS_BELOW: Final = _SECONDS_BELOW * 1000
_MICROSECONDS_BELOW: Final = _MILLISECONDS_BELOW * 1000
_NANOSECONDS_BELOW: Final = _MICROSECONDS_BELOW * 1000
_TEXT_LENGTH_MAX: Final = 40
"""The most characters of a text that may be a time."""


def parse_time(value: Any) -> int | None:
    """Return microseconds since 1970 UTC, or None for a value that is no time.

    The size of a number determines its unit: seconds (also with a fraction) below 1e11, then
    milliseconds, microseconds below 1e17, nanoseconds. A text is ISO 8601, UTC unless it names a
    zone, or such a number.
    """
    kind = type(value)
    if kind is int or kind is float:
        return _from_number(value)
    if kind is str and 0 < len(value) <= _TEXT_LENGTH_MAX:
        return _from_text(value.strip())
    return None


def parse_times(values: Sequence[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Apply `parse_time` to each value. The second array says which values are times."""
    kinds = set(map(type, values))
    try:
        if kinds == {int}:
            return _from_integers(np.array(values, np.int64))
    except OverflowError:
        pass  # nanoseconds may be beyond 64 bits: one by one
    if kinds == {float}:
        return _from_floats(np.array(values, np.float64))
    found = [parse_time(value) for value in values]
    there = np.array([time is not None for time in found], np.bool_)
    return np.array([time or 0 for time in found], np.int64), there


def _from_integers(
    numbers: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    there = numbers >= 0
    numbers = np.where(there, numbers, 0)
    seconds, milliseconds = numbers < _SECONDS_BELOW, numbers < _MILLISECONDS_BELOW
    unit = np.where(seconds, 1_000_000, np.where(milliseconds, 1000, 1))
    small = np.where(numbers < _MICROSECONDS_BELOW, numbers, 0)
    return np.where(numbers < _MICROSECONDS_BELOW, small * unit, numbers // 1000), there


def _from_floats(
    numbers: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    there = (numbers >= 0) & (numbers < _NANOSECONDS_BELOW)  # no NaN, no infinity
    numbers = np.where(there, numbers, 0.0)
    seconds, milliseconds = numbers < _SECONDS_BELOW, numbers < _MILLISECONDS_BELOW
    scaled = np.where(
        seconds,
        numbers * 1_000_000,
        np.where(
            milliseconds,
            numbers * 1000,
            np.where(numbers < _MICROSECONDS_BELOW, numbers, numbers / 1000),
        ),
    )
    return np.rint(scaled).astype(np.int64), there


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

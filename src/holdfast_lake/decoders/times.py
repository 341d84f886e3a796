"""Parses times in payloads: numbers since 1970 in several units, ISO 8601 and other texts."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from email.utils import parsedate_to_datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The range of UTC times that Python and Spark can show, the years 1 to 9999. A text with an offset
or a second 60 may be beyond it, and a program that reads such a row would stop."""
_SECONDS_BELOW: Final = 100_000_000_000
"""The bound of numbers that are seconds. It is the year 5138 in seconds, and 1973 in
milliseconds."""
_MILLISECONDS_BELOW: Final = _SECONDS_BELOW * 1000
_MICROSECONDS_BELOW: Final = _MILLISECONDS_BELOW * 1000
_NANOSECONDS_BELOW: Final = _MICROSECONDS_BELOW * 1000
_TEXT_LENGTH_MAX: Final = 64
"""The most characters of a text that may be a time."""
AHEAD_US: Final = 300_000_000
"""The microseconds by which a device's clock may be ahead of the broker's."""
_BASIC: Final = re.compile(r"\d{8}T\d{4}(\d\d([.,]\d+)?)?(Z|[+-]\d\d:?\d\d)?")
_DATE: Final = re.compile(
    r"(?:(\d\d?)\.(\d\d?)\.(\d{4})|(\d{4})/(\d\d?)/(\d\d?))[ T](\d\d:\d\d(?::\d\d.*)?)"
)
"""A date of which the order is certain: 28.11.2026 or 2026/11/28. 3/4/2026 has two meanings."""
_DIGITS: Final = re.compile(r"20\d{12}")
"""A date without separators: 20261130110531."""
_DIGITS_FROM, _DIGITS_END = 20_000_101_000_000, 21_000_000_000_000
"""The range of such dates as numbers. They would be milliseconds of the years 2603 to 2635."""
_DSMR: Final = re.compile(r"(\d{12})([WS])")
"""A time of a Dutch smart meter: 261130114000W, of winter or summer in central Europe."""
_ASP_DATE: Final = re.compile(r"/Date\((\d+)(?:[+-]\d{4})?\)/")
_SEASONS: Final = {"W": timezone(timedelta(hours=1)), "S": timezone(timedelta(hours=2))}
_ODD_SECONDS: Final = re.compile(r"^(.{11})(24:00:00|23:59:60|\d\d:\d\d:60)(.*)$")


def parse_time(
    value: Any, zone: tzinfo | None = None, near_us: int = 0, time_format: str | None = None
) -> int | None:
    """Returns microseconds since 1970 UTC, or None for a value that is no time.

    The size of a number determines its unit: seconds (also with a fraction) below 1e11, then
    milliseconds, microseconds below 1e17, nanoseconds. A text is such a number, ISO 8601, or
    another format that means one time only. Without a zone in the text it is of `zone`, or UTC. If
    the zone has that hour twice, it is the last one that is not after `near_us`.
    """
    kind = type(value)
    if kind is int and _DIGITS_FROM <= value < _DIGITS_END:
        return _from_text(str(value), zone, near_us)
    if kind is int or kind is float:
        return _from_number(value)
    if kind is str and 0 < len(value) <= _TEXT_LENGTH_MAX:
        text = value.strip()
        try:
            time_us = _from_text(text, zone, near_us) if time_format is None else _microseconds(
                datetime.strptime(text, time_format), zone, near_us
            )  # fmt: skip
        except (ValueError, OverflowError):
            return None
        return time_us if time_us is not None and _FIRST_US <= time_us <= _LAST_US else None
    if kind is dict and len(value) == 1:  # MongoDB's JSON
        ((key, inner),) = value.items()
        if key in ("$date", "$numberLong") and type(inner) is not dict:
            return parse_time(inner)
        return parse_time(inner) if key == "$date" and "$numberLong" in inner else None
    return None


def parse_times(values: Sequence[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Applies `parse_time` to each value. The second array says which values are times."""
    kinds = set(map(type, values))
    try:
        if kinds == {int}:
            numbers = np.array(values, np.int64)
            if not np.any((numbers >= _DIGITS_FROM) & (numbers < _DIGITS_END)):
                return _from_integers(numbers)
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


def _from_text(text: str, zone: tzinfo | None, near_us: int) -> int | None:
    if text.isascii() and text.replace(".", "", 1).isdigit():
        if _DIGITS.fullmatch(text):  # as milliseconds it would be of the year 2600
            with suppress(ValueError):
                return _microseconds(datetime.strptime(text, "%Y%m%d%H%M%S"), zone, near_us)
        return _from_number(float(text) if "." in text else int(text))
    dsmr = _DSMR.fullmatch(text)
    if dsmr is not None:
        with suppress(ValueError):
            local = datetime.strptime(dsmr[1], "%y%m%d%H%M%S")
            return _microseconds(local, zone or _SEASONS[dsmr[2]], near_us)
    seconds = 0
    if len(text) < len("2026-01-01T00") or text[4] != "-":
        # A date alone and week dates, which datetime would accept as well, are no times.
        text = _as_iso(text)
    elif not text[-1].isdigit():
        text = _with_offset(text)
    match = _ODD_SECONDS.search(text)
    if match is not None:  # the end of a day, and a leap second
        text = match[1] + ("00:00:00" if match[2] == "24:00:00" else match[2][:6] + "59") + match[3]
        seconds = 86_400 if match[2] == "24:00:00" else 1
    return _microseconds(datetime.fromisoformat(text), zone, near_us) + seconds * 1_000_000


def _as_iso(text: str) -> str:
    """Returns a time of another format as ISO 8601, or an empty text."""
    if _BASIC.fullmatch(text):
        return text
    match = _DATE.fullmatch(text)
    if match is not None:
        year, month, day = (match[3], match[2], match[1]) if match[3] else match.group(4, 5, 6)
        return _with_offset(f"{year}-{int(month):02}-{int(day):02}T{match[7]}")
    match = _ASP_DATE.fullmatch(text)
    if match is not None:  # its offset is that of the text's author, and changes nothing
        found_us = _from_number(int(match[1]))
        return "" if found_us is None else (_EPOCH + found_us * _MICROSECOND).isoformat()
    if text[:1].isalpha():
        try:
            # RFC 2822, and the ctime of C.
            found = (
                parsedate_to_datetime(text)
                if "," in text
                else datetime.strptime(text, "%a %b %d %H:%M:%S %Y")
            )
        except (ValueError, TypeError, OverflowError):
            return ""
        return found.isoformat()
    return ""


def _with_offset(text: str) -> str:
    """Returns a time without the name of a zone: `Z[UTC]`, ` UTC`, ` GMT`."""
    text = text.split("[", 1)[0]
    for name in (" UTC", " GMT"):
        if text.endswith(name):
            return f"{text.removesuffix(name)}+00:00"
    return text


def _microseconds(found: datetime, zone: tzinfo | None, near_us: int) -> int:
    """Returns the time of a datetime, which is of `zone` or UTC if it has no zone itself."""
    if found.tzinfo is not None:
        return (found - _EPOCH) // _MICROSECOND
    if zone is None:
        return (found.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
    first, second = (
        (found.replace(tzinfo=zone, fold=fold) - _EPOCH) // _MICROSECOND for fold in (0, 1)
    )
    # In the hour that summer time leaves out, the second is the earlier one, and the clock of the
    # device was not set yet.
    return second if first < second <= near_us + AHEAD_US else first

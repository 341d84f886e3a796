"""Durations as Go writes them: `10s`, `1m30s`, `1.5h`, `300ms`."""

import re
from typing import Final

_UNITS_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "μs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_NS_MAX: Final = (1 << 63) - 1
"""Bounds of Go's time.Duration."""


def duration_ns(text: str) -> int:
    """The nanoseconds of a duration like `1h30m`. Raises ValueError unless it is above zero."""
    total = 0
    at = 0
    for part in _PART.finditer(text):
        if part.start() != at:
            break
        at = part.end()
        whole, _, fraction = part[1].partition(".")
        unit = _UNITS_NS[part[2]]
        total += int(whole or "0") * unit
        total += int(fraction or "0") * unit // 10 ** len(fraction)
    if not at or at != len(text):
        raise ValueError(f"{text!r} is no duration: write a number and a unit, as 10s or 1m30s")
    if not 0 < total <= _NS_MAX:
        raise ValueError(f"{text!r} is out of range: it must be above 0 and at most 292 years")
    return total

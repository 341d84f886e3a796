"""Limits log lines: their rate per event, and their length.

Peers cause log lines, so an event has at most 20 lines a second at one level. A summary with the
number of suppressed lines follows 10 s after the first of them. No event is silent: each has its 20
lines, and critical lines are not limited.
"""

import logging
from dataclasses import dataclass
from typing import Final

LINES_PER_S: Final = 20
LINES_BURST: Final = 40
SUMMARY_S: Final = 10.0
"""The delay in seconds from the first suppressed line to the summary."""
EVENTS_MAX: Final = 1000
"""The most events with a bucket of their own. All others share one."""
EVENT_CHARACTERS_MAX: Final = 64
VALUE_CHARACTERS_MAX: Final = 256
CRITICAL_CHARACTERS_MAX: Final = 2048
"""The most characters of a value of a critical line, which tells an operator what to do."""
LINE_CHARACTERS_MAX: Final = 4096
TRACEBACK_CHARACTERS_MAX: Final = 16_384
OTHERS: Final = "other_events"


@dataclass
class _Bucket:
    tokens: float
    filled_at: float
    left_out: int = 0
    since: float = 0.0
    """The time of the first suppressed line."""


@dataclass(frozen=True)
class Summary:
    """The number of suppressed lines of one event and level."""

    event: str
    level: int
    lines: int
    seconds: float


class LineRate:
    """A token bucket for each event and level. `now`: seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, int], _Bucket] = {}

    def admit(self, event: str, level: int, now: float) -> bool:
        """Returns whether the line may be written."""
        if level >= logging.CRITICAL:
            return True
        if self.suppresses(event, level, now):
            return False
        self._bucket(event, level, now).tokens -= 1
        return True

    def suppresses(self, event: str, level: int, now: float) -> bool:
        """Returns whether the line may not be written, and counts it then."""
        if level >= logging.CRITICAL:
            return False
        bucket = self._bucket(event, level, now)
        bucket.tokens = min(LINES_BURST, bucket.tokens + (now - bucket.filled_at) * LINES_PER_S)
        bucket.filled_at = now
        if bucket.tokens >= 1:
            return False
        if not bucket.left_out:
            bucket.since = now
        bucket.left_out += 1
        return True

    def summaries(self, now: float) -> list[Summary]:
        """Returns summaries of the lines suppressed since the last call."""
        found = []
        for (event, level), bucket in self._buckets.items():
            if bucket.left_out:
                found.append(Summary(event, level, bucket.left_out, now - bucket.since))
                bucket.left_out = 0
        return found

    def _bucket(self, event: str, level: int, now: float) -> _Bucket:
        bucket = self._buckets.get((event, level))
        if bucket is not None:
            return bucket
        if len(self._buckets) >= EVENTS_MAX:
            self._forget_quiet(now)
        key = (event if len(self._buckets) < EVENTS_MAX else OTHERS, level)
        return self._buckets.setdefault(key, _Bucket(LINES_BURST, now))

    def _forget_quiet(self, now: float) -> None:
        """Removes full buckets, because a new bucket is equal to a full one."""
        quiet_s = LINES_BURST / LINES_PER_S
        self._buckets = {
            key: bucket
            for key, bucket in self._buckets.items()
            if bucket.left_out or now - bucket.filled_at < quiet_s
        }


def event_of(message: str) -> str:
    """Returns the first word of a line's format, before its values are inserted."""
    return message[: EVENT_CHARACTERS_MAX + 1].partition(" ")[0][:EVENT_CHARACTERS_MAX]


def cut(text: str, characters_max: int) -> str:
    """Returns the text, with "..." instead of the part beyond the limit."""
    return text if len(text) <= characters_max else f"{text[:characters_max]}..."


def cut_value(value: object, characters_max: int = VALUE_CHARACTERS_MAX) -> object:
    """Limits a value of a line, because a peer may have chosen it."""
    if isinstance(value, str):
        return cut(value, characters_max)
    if isinstance(value, bytes) and len(value) > characters_max:
        return value[:characters_max] + b"..."
    if isinstance(value, BaseException):
        return cut(str(value), characters_max)
    return value


def one_line(text: str) -> str:
    """Escapes all unprintable characters.

    These are line ends, control sequences, and marks that change the direction of writing.
    """
    text = cut(text, LINE_CHARACTERS_MAX)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)

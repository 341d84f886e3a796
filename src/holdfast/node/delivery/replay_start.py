"""Parses where a subscription in the past starts, as a client writes it.

A client of MQTT 5 names it in the user property `stream-offset` of SUBSCRIBE. Any client can name
it in the filter: `$stream/@START/filter`. `$stream/filter` is the filter itself.

| start | the subscription begins with |
|---|---|
| `earliest` | the oldest record that the log has |
| `latest` | the next message, as without a start |
| `-15m`, `-90s`, `-2h`, `-1d` | the first record of that time span before now |
| `1764000000`, `1764000000123` | a Unix time in seconds, or in milliseconds from 10^11 on |
| `2026-01-31T12:00:00Z` | a time, in UTC if it has no offset |
| `last:10` | the last 10 records of each topic |
| `offsets:0:4711,3:42` | these offsets of these partitions, and the next message of the others |
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from holdfast.node.session.additions import END_WISH, PLACE_WISH
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.mqtt.properties import USER_PROPERTY
from holdfast.protocol.topics.names import QUEUE_PREFIX, queue_key

START_PROPERTY: Final = "stream-offset"
STREAM_PREFIX: Final = "$stream/"
SPECIAL_PREFIXES: Final = (STREAM_PREFIX, QUEUE_PREFIX)
"""The beginnings of filters that are not those of the subscription."""
PLACE_ASKED: Final = ("hf-offset", "?1")
"""The wish for the place and time of each message."""
END_ASKED: Final = ("hf-end", "?1")
"""The wish for a message at the end of the past."""
END_TOPIC: Final = b"$stream/end"
"""The topic of that message. Its payload is the filter."""
LAST_MAX: Final = 10_000
"""The most records of a topic that `last:N` asks for."""
OFFSETS_MAX: Final = 65_536
"""The most partitions that `offsets:` names."""
TEXT_MAX: Final = 4096
"""The most characters of a start."""
_SPAN_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SPAN: Final = re.compile(r"-(\d{1,9})([smhd])")
_UNIX: Final = re.compile(r"\d{1,16}(\.\d{1,6})?")
_MILLISECONDS_FROM: Final = 100_000_000_000
_ALLOWED: Final = (
    "use 'earliest', 'latest', a time span like '-15m', a Unix time, a time like"
    " '2026-01-31T12:00:00Z', 'last:N' or 'offsets:PARTITION:OFFSET,...'"
)


class InvalidStart(ValueError):
    """The error of a start that is none. Its text says what is allowed."""


class ReplayStart:
    """A start as the client asked for it. At most one field is set; without any it is `latest`."""

    def __init__(
        self,
        *,
        is_earliest: bool = False,
        since_us: int | None = None,
        last: int = 0,
        offsets: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.is_earliest = is_earliest
        # The wall clock in microseconds.
        self.since_us = since_us
        # The number of records of each topic; 0: not asked for.
        self.last = last
        # (partition, offset)
        self.offsets = list(offsets)

    @property
    def is_latest(self) -> bool:
        """Whether the subscription begins with the next message."""
        return not (self.is_earliest or self.since_us is not None or self.last or self.offsets)


def split_start(filter: str) -> tuple[str, str]:
    """The filter without a start, that of a queue as its key, and the start that it names or "".
    `InvalidStart`: there is no filter behind the start."""
    if not filter.startswith(STREAM_PREFIX):
        return queue_key(filter), ""
    rest = filter[len(STREAM_PREFIX) :]
    if not rest.startswith("@"):
        return queue_key(rest), ""
    start, separator, plain = rest[1:].partition("/")
    if not separator or not plain or not start:
        raise InvalidStart("a filter with a start is '$stream/@START/filter'")
    return queue_key(plain), start


def start_prefix(filter: str) -> str:
    """The part before the filter, "" if there is no start."""
    if not filter.startswith(STREAM_PREFIX):
        return ""
    rest = filter[len(STREAM_PREFIX) :]
    if not rest.startswith("@"):
        return STREAM_PREFIX
    start, separator, plain = rest.partition("/")
    if not separator or not plain or start == "@":
        return ""
    return f"{STREAM_PREFIX}{start}/"


def plain_filter(filter: str) -> str:
    """The filter without a start, as a subscription has it, for UNSUBSCRIBE."""
    try:
        return split_start(filter)[0]
    except InvalidStart:
        return filter


def property_start(properties: Properties) -> str:
    """The start in the user properties of a SUBSCRIBE, or "". The last one counts."""
    pairs = properties.get(USER_PROPERTY)
    start = ""
    if isinstance(pairs, list):
        for pair in pairs:
            if isinstance(pair, tuple) and pair[0] == START_PROPERTY:
                start = pair[1] or "earliest"
    return start


def wishes(properties: Properties) -> int:
    """The wishes of a SUBSCRIBE: PLACE_WISH and END_WISH, or 0."""
    pairs = properties.get(USER_PROPERTY) if properties else None
    wished = 0
    if isinstance(pairs, list):
        for wish, tell in ((PLACE_ASKED, PLACE_WISH), (END_ASKED, END_WISH)):
            if wish in pairs:
                wished |= tell
    return wished


def parse_start(text: str, wall_us: int) -> ReplayStart:
    """Reads a start. `wall_us`: the wall clock now. Raises `InvalidStart`."""
    if len(text) > TEXT_MAX:
        raise InvalidStart(f"a start has at most {TEXT_MAX} characters, found {len(text)}")
    if text == "earliest":
        return ReplayStart(is_earliest=True)
    if text == "latest":
        return ReplayStart()
    kind, separator, value = text.partition(":")
    if separator and kind == "last":
        return ReplayStart(last=_number(value, 1, LAST_MAX, "last:N needs N"))
    if separator and kind == "offsets":
        return ReplayStart(offsets=_offsets(value))
    span = _SPAN.fullmatch(text)
    if span is not None:
        seconds = int(span[1]) * _SPAN_UNITS_S[span[2]]
        return ReplayStart(since_us=max(0, wall_us - seconds * 1_000_000))
    since_us = _time(text)
    if since_us > wall_us:
        raise InvalidStart(f"the start {text[:40]} is in the future")
    return ReplayStart(since_us=since_us)


def _number(text: str, low: int, high: int, what: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
        raise InvalidStart(f"{what} from {low} to {high}, found {text[:40]!r}")
    return int(text)


def _offsets(text: str) -> list[tuple[int, int]]:
    found: dict[int, int] = {}
    for each in text.split(","):
        partition, separator, offset = each.partition(":")
        if not separator:
            raise InvalidStart(f"offsets are PARTITION:OFFSET,..., found {each[:40]!r}")
        number = _number(partition, 0, OFFSETS_MAX - 1, "a partition is a number")
        found[number] = _number(offset, 0, (1 << 62) - 1, "an offset is a number")
    return sorted(found.items())


def _time(text: str) -> int:
    """A Unix or ISO time in microseconds."""
    if _UNIX.fullmatch(text):
        whole, _, part = text.partition(".")
        number = int(whole)
        if number >= _MILLISECONDS_FROM:
            return number * 1000
        return number * 1_000_000 + int(part.ljust(6, "0") or 0)
    try:
        when = datetime.fromisoformat(text)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return int(when.timestamp() * 1_000_000)
    except (ValueError, OverflowError):
        raise InvalidStart(f"the start {text[:40]!r} is not one: {_ALLOWED}") from None

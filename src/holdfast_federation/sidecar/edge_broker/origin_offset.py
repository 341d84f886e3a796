"""Adds a message's offset in its origin's log, as a property.

A broker may crash after it has handed a message to the federation and before its log has recorded
that. After the restart it hands the message over again, under another id. The offset is unchanged,
so a Holdfast destination recognises the duplicate by it. The offset travels as a user property.
Only the origin sets it, and a destination that understands it removes it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.protocol.mqtt.fields import string_field
from holdfast.protocol.mqtt.properties import USER_PROPERTY, user_property_at

STARTS_MAX: Final = 64
"""The most starts that are kept. Records from before them have the log's name without a start."""
LogStart = tuple[int, list[int]]
"""The epoch of a start, and the end of each partition at that time."""


def next_starts(starts: Sequence[LogStart], epoch: int, ends: Sequence[int]) -> list[LogStart]:
    """Returns all starts with this one, the newest last. It replaces the last one if no record was
    appended since."""
    kept = starts[:-1] if starts and starts[-1][1] == list(ends) else starts
    return [*kept, (epoch, list(ends))][-STARTS_MAX:]


def decode_starts(data: bytes) -> list[LogStart]:
    """Decodes the starts. Raises `ValueError` for damaged data."""
    try:
        return msgspec.json.decode(data, type=list[LogStart])
    except msgspec.DecodeError as error:
        raise ValueError(f"the starts of the log: {error}") from None


def start_of(starts: Sequence[LogStart], partition: int, offset: int) -> int:
    """Returns the start in which a record was appended; 0: before all of them."""
    for epoch, ends in reversed(starts):
        if ends[partition] <= offset:
            return epoch
    return 0


NAME: Final = "hf-place"
LOG_BYTES_MAX: Final = 16
_HEAD: Final = bytes((USER_PROPERTY,)) + string_field(NAME)


class LogPlace(NamedTuple):
    """The offset of a record, with the log and the member that it belongs to."""

    node: bytes
    """The id of the member whose log it is."""
    log: str
    """The name of the log. A member that lost its directory begins a log with another name."""
    partition: int
    offset: int


def with_offset(properties: bytes, place: LogPlace) -> bytes:
    """Returns the properties with this place in front, and without any other."""
    value = f"{place.node.hex()}:{place.log}:{place.partition}:{place.offset}"
    return _HEAD + string_field(value) + without_offset(properties)


def without_offset(properties: bytes) -> bytes:
    at = user_property_at(properties, _HEAD, 0)
    while at >= 0:
        properties = properties[:at] + properties[_end(properties, at) :]
        at = user_property_at(properties, _HEAD, at)
    return properties


def offset_in(properties: bytes) -> LogPlace | None:
    """Reads the place. None: there is none, or it is not in the form that members write."""
    at = user_property_at(properties, _HEAD, 0)
    if at < 0:
        return None
    try:
        value = properties[at + len(_HEAD) + 2 : _end(properties, at)].decode("ascii")
        node, log, partition, offset = value.split(":")
        place = LogPlace(bytes.fromhex(node), log, int(partition), int(offset))
    except ValueError:
        return None
    is_sane = 0 <= place.partition < 1 << 16 and 0 <= place.offset < (1 << 63) - 1
    return place if is_sane and len(log) <= LOG_BYTES_MAX else None


def _end(properties: bytes, at: int) -> int:
    start = at + len(_HEAD) + 2
    return start + (properties[start - 2] << 8 | properties[start - 1])

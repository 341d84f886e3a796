"""Where a message lies in its origin's log, told to the members that get it.

A broker that crashes between handing a message to the federation and noting so in its log hands it
over again, under another id. The place in the log is the same: by it a Holdfast destination finds
that it has the message. It travels as a user property, which the origin alone sets, and which is
taken off where it is understood.
"""

from typing import Final, NamedTuple

from holdfast.protocol.mqtt.fields import string_field
from holdfast.protocol.mqtt.properties import USER_PROPERTY, user_property_at

NAME: Final = "hf-place"
LOG_BYTES_MAX: Final = 16
_HEAD: Final = bytes((USER_PROPERTY,)) + string_field(NAME)


class LogPlace(NamedTuple):
    node: bytes
    """The member whose log it is."""
    log: str
    """Which of its logs: a member whose directory was lost begins another one."""
    partition: int
    offset: int


def with_place(properties: bytes, place: LogPlace) -> bytes:
    """The block with the place in front, and no other one."""
    value = f"{place.node.hex()}:{place.log}:{place.partition}:{place.offset}"
    return _HEAD + string_field(value) + without_place(properties)


def without_place(properties: bytes) -> bytes:
    at = user_property_at(properties, _HEAD, 0)
    while at >= 0:
        properties = properties[:at] + properties[_end(properties, at) :]
        at = user_property_at(properties, _HEAD, at)
    return properties


def place_in(properties: bytes) -> LogPlace | None:
    """None: there is none, or one that nobody of us has written."""
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

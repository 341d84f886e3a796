"""MQTT 5 properties: their ids, the packets that each may be in, and their encoding.

MQTT 5.0, section 2.2.2. A block is the encoded properties without their length prefix. A Publish
and a log record contain properties in that form.
"""

from typing import Final

from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.fields import (
    binary_field,
    read_binary,
    read_four,
    read_string,
    read_two,
    read_varint,
    string_field,
    varint,
)
from holdfast.protocol.mqtt.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    TYPE_NAMES,
    UNSUBACK,
    UNSUBSCRIBE,
)
from holdfast.protocol.mqtt.packets import Properties as Properties
from holdfast.protocol.mqtt.packets import PropertyValue as PropertyValue
from holdfast.protocol.mqtt.reasons import PROTOCOL_ERROR, QUOTA_EXCEEDED, TOPIC_ALIAS_INVALID

PAYLOAD_FORMAT_INDICATOR: Final = 0x01
MESSAGE_EXPIRY_INTERVAL: Final = 0x02
CONTENT_TYPE: Final = 0x03
RESPONSE_TOPIC: Final = 0x08
CORRELATION_DATA: Final = 0x09
SUBSCRIPTION_IDENTIFIER: Final = 0x0B
SESSION_EXPIRY_INTERVAL: Final = 0x11
ASSIGNED_CLIENT_IDENTIFIER: Final = 0x12
SERVER_KEEP_ALIVE: Final = 0x13
AUTHENTICATION_METHOD: Final = 0x15
AUTHENTICATION_DATA: Final = 0x16
REQUEST_PROBLEM_INFORMATION: Final = 0x17
WILL_DELAY_INTERVAL: Final = 0x18
REQUEST_RESPONSE_INFORMATION: Final = 0x19
RESPONSE_INFORMATION: Final = 0x1A
SERVER_REFERENCE: Final = 0x1C
REASON_STRING: Final = 0x1F
RECEIVE_MAXIMUM: Final = 0x21
TOPIC_ALIAS_MAXIMUM: Final = 0x22
TOPIC_ALIAS: Final = 0x23
MAXIMUM_QOS: Final = 0x24
RETAIN_AVAILABLE: Final = 0x25
USER_PROPERTY: Final = 0x26
MAXIMUM_PACKET_SIZE: Final = 0x27
WILDCARD_SUBSCRIPTION_AVAILABLE: Final = 0x28
SUBSCRIPTION_IDENTIFIER_AVAILABLE: Final = 0x29
SHARED_SUBSCRIPTION_AVAILABLE: Final = 0x2A

WILL: Final = 0
"""The packet type that stands for the will properties of CONNECT."""

# The encodings of a value.
BYTE: Final = 1
"""One byte. Each property of one byte is a flag: 0 or 1."""
TWO_BYTES: Final = 2
FOUR_BYTES: Final = 3
VARIABLE: Final = 4
"""A variable byte integer of one to four bytes."""
STRING: Final = 5
BINARY: Final = 6
STRING_PAIR: Final = 7

REPEATS_MAX: Final = 10_000
"""The most user properties or subscription identifiers in one packet. A decoded one takes many
times the memory that it takes on the wire."""


class PropertyInfo:
    """The name and encoding of a property, and the packet types it may be in (WILL for will
    properties)."""

    def __init__(self, name: str, encoding: int, packet_types: tuple[int, ...]) -> None:
        self.name = name
        self.encoding = encoding
        self.packet_types = packet_types


_REASON_PACKETS: Final = (
    CONNACK,
    PUBACK,
    PUBREC,
    PUBREL,
    PUBCOMP,
    SUBACK,
    UNSUBACK,
    DISCONNECT,
    AUTH,
)
_MESSAGE: Final = (PUBLISH, WILL)
_AUTHENTICATION: Final = (CONNECT, CONNACK, AUTH)

TABLE: Final[dict[int, PropertyInfo]] = {
    PAYLOAD_FORMAT_INDICATOR: PropertyInfo("payload-format-indicator", BYTE, _MESSAGE),
    MESSAGE_EXPIRY_INTERVAL: PropertyInfo("message-expiry-interval", FOUR_BYTES, _MESSAGE),
    CONTENT_TYPE: PropertyInfo("content-type", STRING, _MESSAGE),
    RESPONSE_TOPIC: PropertyInfo("response-topic", STRING, _MESSAGE),
    CORRELATION_DATA: PropertyInfo("correlation-data", BINARY, _MESSAGE),
    SUBSCRIPTION_IDENTIFIER: PropertyInfo(
        "subscription-identifier", VARIABLE, (PUBLISH, SUBSCRIBE)
    ),
    SESSION_EXPIRY_INTERVAL: PropertyInfo(
        "session-expiry-interval", FOUR_BYTES, (CONNECT, CONNACK, DISCONNECT)
    ),
    ASSIGNED_CLIENT_IDENTIFIER: PropertyInfo("assigned-client-identifier", STRING, (CONNACK,)),
    SERVER_KEEP_ALIVE: PropertyInfo("server-keep-alive", TWO_BYTES, (CONNACK,)),
    AUTHENTICATION_METHOD: PropertyInfo("authentication-method", STRING, _AUTHENTICATION),
    AUTHENTICATION_DATA: PropertyInfo("authentication-data", BINARY, _AUTHENTICATION),
    REQUEST_PROBLEM_INFORMATION: PropertyInfo("request-problem-information", BYTE, (CONNECT,)),
    WILL_DELAY_INTERVAL: PropertyInfo("will-delay-interval", FOUR_BYTES, (WILL,)),
    REQUEST_RESPONSE_INFORMATION: PropertyInfo("request-response-information", BYTE, (CONNECT,)),
    RESPONSE_INFORMATION: PropertyInfo("response-information", STRING, (CONNACK,)),
    SERVER_REFERENCE: PropertyInfo("server-reference", STRING, (CONNACK, DISCONNECT)),
    REASON_STRING: PropertyInfo("reason-string", STRING, _REASON_PACKETS),
    RECEIVE_MAXIMUM: PropertyInfo("receive-maximum", TWO_BYTES, (CONNECT, CONNACK)),
    TOPIC_ALIAS_MAXIMUM: PropertyInfo("topic-alias-maximum", TWO_BYTES, (CONNECT, CONNACK)),
    TOPIC_ALIAS: PropertyInfo("topic-alias", TWO_BYTES, (PUBLISH,)),
    MAXIMUM_QOS: PropertyInfo("maximum-qos", BYTE, (CONNACK,)),
    RETAIN_AVAILABLE: PropertyInfo("retain-available", BYTE, (CONNACK,)),
    USER_PROPERTY: PropertyInfo(
        "user-property",
        STRING_PAIR,
        (*_REASON_PACKETS, CONNECT, PUBLISH, WILL, SUBSCRIBE, UNSUBSCRIBE),
    ),
    MAXIMUM_PACKET_SIZE: PropertyInfo("maximum-packet-size", FOUR_BYTES, (CONNECT, CONNACK)),
    WILDCARD_SUBSCRIPTION_AVAILABLE: PropertyInfo(
        "wildcard-subscription-available", BYTE, (CONNACK,)
    ),
    SUBSCRIPTION_IDENTIFIER_AVAILABLE: PropertyInfo(
        "subscription-identifier-available", BYTE, (CONNACK,)
    ),
    SHARED_SUBSCRIPTION_AVAILABLE: PropertyInfo("shared-subscription-available", BYTE, (CONNACK,)),
}
"""All properties by id. Only the user property, and in PUBLISH the subscription identifier, may
occur more than once in a packet."""


def decode_properties(
    buf: bytes, position: int, end: int, packet_type: int
) -> tuple[Properties, int]:
    """The properties whose length prefix is at `position`, and the position after them.

    `end` bounds the packet. Invalid properties raise `ProtocolViolation`.
    """
    length, start = read_varint(buf, position, end)
    after = start + length
    if after > end:
        raise MalformedPacket(f"properties of {length} bytes, {end - start} are left")
    if not length:
        return {}, after
    return decode_block(buf, start, after, packet_type), after


def decode_block(buf: bytes, position: int, end: int, packet_type: int) -> Properties:
    """The properties in buf[position:end]. Invalid ones raise `ProtocolViolation`."""
    properties: Properties = {}
    while position < end:
        identifier, position = read_varint(buf, position, end)
        info = _info(identifier, packet_type)
        encoding = info.encoding
        if encoding == STRING_PAIR:
            # [MQTT-1.5.7-1]
            key, position = read_string(buf, position, end)
            value, position = read_string(buf, position, end)
            pairs = properties.get(identifier)
            if isinstance(pairs, list):
                check_repeats(len(pairs))
                pairs.append((key, value))  # type: ignore[arg-type]
            else:
                properties[identifier] = [(key, value)]
            continue
        if encoding == VARIABLE:
            number, position = read_varint(buf, position, end)
            check_number(identifier, number)
            numbers = properties.get(identifier)
            if packet_type == PUBLISH and isinstance(numbers, list):
                check_repeats(len(numbers))
                numbers.append(number)  # type: ignore[arg-type]
                continue
            _refuse_second(properties, identifier, info)
            properties[identifier] = [number]
            continue
        _refuse_second(properties, identifier, info)
        if encoding == STRING:
            text, position = read_string(buf, position, end)
            if identifier == RESPONSE_TOPIC:
                check_response_topic(text)
            properties[identifier] = text
        elif encoding == BINARY:
            data, position = read_binary(buf, position, end)
            properties[identifier] = data
        else:
            number, position = read_number(buf, position, end, encoding)
            check_number(identifier, number)
            properties[identifier] = number
    return properties


def encode_properties(properties: Properties) -> bytes:
    """The properties after their length. [MQTT-2.2.2-1] Invalid ones raise `ValueError`."""
    if not properties:
        return b"\0"
    block = encode_block(properties)
    return varint(len(block)) + block


def encode_block(properties: Properties) -> bytes:
    """The properties without the length prefix, in the order of the dict. A list becomes one
    property per element. An unknown id or a value of the wrong type or range raises
    `ValueError`."""
    parts: list[bytes] = []
    for identifier, value in properties.items():
        info = TABLE.get(identifier)
        if info is None:
            raise ValueError(f"there is no property {identifier:#04x}")
        parts.extend(_encode(identifier, info, value))
    return b"".join(parts)


def number_of(properties: Properties, identifier: int, default: int) -> int:
    """The value of a property that is an integer."""
    value = properties.get(identifier, default)
    assert isinstance(value, int)
    return value


def _encode(identifier: int, info: PropertyInfo, value: PropertyValue) -> list[bytes]:
    """The encoded property; ids are below 128, so each is a single byte."""
    first = bytes((identifier,))
    encoding = info.encoding
    if isinstance(value, list):
        parts: list[bytes] = []
        for item in value:
            if isinstance(item, tuple) and encoding == STRING_PAIR:
                parts.append(first + string_field(item[0]) + string_field(item[1]))
            elif isinstance(item, int) and encoding == VARIABLE:
                parts.append(first + varint(item))
            else:
                raise ValueError(f"{info.name} cannot be {item!r}")
        return parts
    if isinstance(value, str) and encoding == STRING:
        return [first + string_field(value)]
    if isinstance(value, bytes) and encoding == BINARY:
        return [first + binary_field(value)]
    if isinstance(value, int):
        return [first + _encode_number(info, encoding, value)]
    raise ValueError(f"{info.name} cannot be {value!r}")


def _encode_number(info: PropertyInfo, encoding: int, value: int) -> bytes:
    """An encoded number; out of range it raises `ValueError`."""
    if encoding == VARIABLE:
        return varint(value)
    size = 4 if encoding == FOUR_BYTES else 2 if encoding == TWO_BYTES else 1
    if encoding > FOUR_BYTES or not 0 <= value < 1 << 8 * size:
        raise ValueError(f"{info.name} cannot be {value}")
    return value.to_bytes(size, "big")


def expiry_of(block: bytes) -> int:
    """The message expiry interval in a block, in seconds, or -1. Raises `MalformedPacket` for a
    block that is not a sequence of whole properties."""
    expiry_s = -1
    position = 0
    while position < len(block):
        if expiry_s < 0 and block[position] == MESSAGE_EXPIRY_INTERVAL:
            expiry_s = read_four(block, position + 1, len(block))
        position = _skip(block, position, len(block))
    # A string that is longer than the rest leads beyond the end.
    if position != len(block):
        raise MalformedPacket("the properties end within one")
    return expiry_s


def expiry_position(block: bytes) -> int:
    """The position of the four bytes of the message expiry interval, or -1."""
    position = 0
    end = len(block)
    while position < end:
        # The id alone does not suffice: the same byte may be part of a user property before it.
        if block[position] == MESSAGE_EXPIRY_INTERVAL:
            return position + 1
        position = _skip(block, position, end)
    return -1


def user_property_at(block: bytes, head: bytes, position: int) -> int:
    """The position in a checked block of the next user property that begins with `head`, or -1.
    `head` is the identifier and the name after its length. A property must begin at `position`."""
    found = block.find(head, position)
    end = len(block)
    while found >= 0:
        # The same bytes may be part of another property's value.
        while position < found:
            if block[position] == USER_PROPERTY:
                # Most properties before it are user properties too.
                position += 3 + (block[position + 1] << 8 | block[position + 2])
                position += 2 + (block[position] << 8 | block[position + 1])
            else:
                position = _skip(block, position, end)
        if position == found:
            return found
        found = block.find(head, position)
    return -1


def without_user_properties(block: bytes, start: bytes) -> bytes:
    """A checked block without the user properties whose names begin with `start`."""
    if start not in block:
        return block
    kept: list[bytes] = []
    position = 0
    end = len(block)
    while position < end:
        behind = _skip(block, position, end)
        # The identifier has one byte, the length of the name two.
        if block[position] != USER_PROPERTY or not block.startswith(start, position + 3):
            kept.append(block[position:behind])
        position = behind
    return b"".join(kept)


def _skip(block: bytes, position: int, end: int) -> int:
    """The position after the property at `position`."""
    identifier, position = read_varint(block, position, end)
    info = TABLE.get(identifier)
    if info is None:
        raise MalformedPacket(f"unknown property {identifier:#04x}")
    encoding = info.encoding
    if encoding == BYTE:
        return position + 1
    if encoding == TWO_BYTES:
        return position + 2
    if encoding == FOUR_BYTES:
        return position + 4
    if encoding == VARIABLE:
        return read_varint(block, position, end)[1]
    if encoding == STRING_PAIR:
        position += 2 + read_two(block, position, end)
    return position + 2 + read_two(block, position, end)


def _info(identifier: int, packet_type: int) -> PropertyInfo:
    """The property's entry in TABLE. Raises `MalformedPacket` if it may not be in this packet."""
    info = TABLE.get(identifier)
    if info is None:
        raise MalformedPacket(f"unknown property {identifier:#04x}")
    if packet_type not in info.packet_types:
        where = "will properties" if packet_type == WILL else TYPE_NAMES[packet_type]
        raise MalformedPacket(f"property {info.name} does not belong in {where}")
    return info


def read_number(buf: bytes, position: int, end: int, encoding: int) -> tuple[int, int]:
    """A number of one, two or four bytes, and the position after it."""
    if encoding == FOUR_BYTES:
        return read_four(buf, position, end), position + 4
    if encoding == TWO_BYTES:
        return read_two(buf, position, end), position + 2
    if position >= end:
        raise MalformedPacket("the packet ends within a property")
    return buf[position], position + 1


def check_number(identifier: int, number: int) -> None:
    """Raises `ProtocolViolation` for a number that this property must not have."""
    if number == 0:
        if identifier == TOPIC_ALIAS:
            # [MQTT-3.3.2-8]
            raise ProtocolViolation(TOPIC_ALIAS_INVALID, "topic alias 0")
        if identifier in (RECEIVE_MAXIMUM, MAXIMUM_PACKET_SIZE, SUBSCRIPTION_IDENTIFIER):
            raise ProtocolViolation(PROTOCOL_ERROR, f"{TABLE[identifier].name} is 0")
    elif number > 1 and TABLE[identifier].encoding == BYTE:
        raise ProtocolViolation(
            PROTOCOL_ERROR, f"{TABLE[identifier].name} is {number}, it can be 0 or 1"
        )


def check_response_topic(topic: str) -> None:
    """Raises `ProtocolViolation` if this is no topic name. [MQTT-3.3.2-14]"""
    if "+" in topic or "#" in topic:
        raise ProtocolViolation(PROTOCOL_ERROR, "a response topic with wildcards")
    if not topic:
        # [MQTT-4.7.3-1]
        raise ProtocolViolation(PROTOCOL_ERROR, "an empty response topic")


def check_repeats(count: int) -> None:
    """Raises `ProtocolViolation` if a packet has `count` properties of one kind already."""
    if count >= REPEATS_MAX:
        raise ProtocolViolation(QUOTA_EXCEEDED, f"over {REPEATS_MAX} properties of one kind")


def _refuse_second(properties: Properties, identifier: int, info: PropertyInfo) -> None:
    """Raises `ProtocolViolation` if the packet has the property already."""
    if identifier in properties:
        raise ProtocolViolation(PROTOCOL_ERROR, f"property {info.name} twice in a packet")

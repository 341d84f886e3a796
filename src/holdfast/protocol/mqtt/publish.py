"""PUBLISH, in a module of its own because it is the hot path.

decode_publish makes one object per message and, without properties, reads only the lengths. It
leaves the topic's UTF-8 to the broker, which remembers checked topics by their bytes. MQTT 5.0,
section 3.3.
"""

from typing import Final

from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.fields import (
    FIELD_BYTES_MAX,
    read_binary,
    read_four,
    read_two,
    read_varint,
    text_of,
    varint,
)
from holdfast.protocol.mqtt.packets import Publish as Publish
from holdfast.protocol.mqtt.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY_INTERVAL,
    PAYLOAD_FORMAT_INDICATOR,
    RESPONSE_TOPIC,
    SUBSCRIPTION_IDENTIFIER,
    TABLE,
    TOPIC_ALIAS,
    USER_PROPERTY,
    check_number,
    check_repeats,
    check_response_topic,
    expiry_position,
    read_number,
)
from holdfast.protocol.mqtt.reasons import PROTOCOL_ERROR

FIRST_BYTE: Final = 0x30


def decode_publish(
    buf: bytes, first: int, start: int, end: int, version: int, from_client: bool
) -> Publish:
    """The PUBLISH with the fixed header's byte `first` and the body buf[start:end].

    An invalid one raises `ProtocolViolation`. The topic may be empty even without a topic alias.
    """
    position = start + 2
    if position > end:
        raise MalformedPacket("PUBLISH ends within its topic's length")
    topic_end = position + (buf[start] << 8 | buf[start + 1])
    if topic_end > end:
        raise MalformedPacket("PUBLISH ends within its topic")
    # [MQTT-3.3.2-1]
    topic = buf[position:topic_end]
    position = topic_end
    qos = first >> 1 & 3
    packet_id = 0
    if qos:
        # [MQTT-3.3.1-4]
        if qos == 3:
            raise MalformedPacket("PUBLISH with QoS 3")
        position += 2
        if position > end:
            raise MalformedPacket("PUBLISH ends within its packet id")
        packet_id = buf[topic_end] << 8 | buf[topic_end + 1]
        if packet_id == 0:
            # [MQTT-2.2.1-3] [MQTT-2.2.1-4]
            raise ProtocolViolation(PROTOCOL_ERROR, "PUBLISH with packet id 0")
    elif first & 8:
        # [MQTT-3.3.1-2]
        if version > 3:
            raise MalformedPacket("PUBLISH with DUP and QoS 0")
        # MQTT 3.1 gives DUP no meaning without acknowledgement, and does not forbid it.
        first &= 0xF7
    if version >= 5:
        # Most messages have no properties. They take this way, without another call.
        if position < end and buf[position] == 0:
            position += 1
        else:
            return _decode_with_properties(buf, first, topic, packet_id, position, end, from_client)
    return Publish(
        topic, buf[position:end], qos, first & 1 != 0, first & 8 != 0, packet_id, b"", 0, -1
    )


def _decode_with_properties(
    buf: bytes,
    first: int,
    topic: bytes,
    packet_id: int,
    position: int,
    end: int,
    from_client: bool,
) -> Publish:
    """A PUBLISH with properties. The payload is known before they are read, so they are checked and
    stored as one slice."""
    length, position = read_varint(buf, position, end)
    payload_start = position + length
    if payload_start > end:
        raise MalformedPacket(f"PUBLISH properties of {length} bytes, {end - position} are left")
    publish = Publish(
        topic,
        buf[payload_start:end],
        first >> 1 & 3,
        first & 1 != 0,
        first & 8 != 0,
        packet_id,
        b"",
        0,
        -1,
    )
    publish.properties = _read_properties(publish, buf, position, payload_start, from_client)
    return publish


def _read_properties(
    publish: Publish, buf: bytes, position: int, end: int, from_client: bool
) -> bytes:
    """Checks each property, sets the fields of a Publish, and returns the other properties.

    They are not decoded into a dict: the broker forwards them unchanged and in order
    [MQTT-3.3.2-17] [MQTT-3.3.2-18], and needs only those with a field of their own.
    """
    kept: list[bytes] = []
    kept_start = position
    seen = 0
    while position < end:
        property_start = position
        identifier, position = read_varint(buf, position, end)
        if identifier == USER_PROPERTY:
            # [MQTT-1.5.7-1] [MQTT-3.3.2-17] [MQTT-3.3.2-18]
            key, position = read_binary(buf, position, end)
            value, position = read_binary(buf, position, end)
            text_of(key)
            text_of(value)
            continue
        if identifier == SUBSCRIPTION_IDENTIFIER:
            number, position = read_varint(buf, position, end)
            _add_subscription_id(publish, number, from_client)
        else:
            # Ids above 0x2A are unknown; _read_property refuses them.
            bit = 1 << (identifier & 63)
            if seen & bit:
                _refuse_second(identifier)
            seen |= bit
            position = _read_property(publish, identifier, buf, position, end)
            if identifier != TOPIC_ALIAS:
                continue
        # This property has a field of its own, so it is cut out. Without one the block stays a
        # single slice.
        if kept_start < property_start:
            kept.append(buf[kept_start:property_start])
        kept_start = position
    rest = buf[kept_start:end]
    if not kept:
        return rest
    kept.append(rest)
    return b"".join(kept)


def _read_property(publish: Publish, identifier: int, buf: bytes, position: int, end: int) -> int:
    """Checks a property that may occur once; returns the position after it."""
    if identifier == MESSAGE_EXPIRY_INTERVAL:
        publish.expiry_s = read_four(buf, position, end)
        return position + 4
    if identifier == TOPIC_ALIAS:
        publish.topic_alias = read_two(buf, position, end)
        check_number(TOPIC_ALIAS, publish.topic_alias)
        return position + 2
    if identifier == PAYLOAD_FORMAT_INDICATOR:
        number, position = read_number(buf, position, end, TABLE[identifier].encoding)
        check_number(identifier, number)
        return position
    if identifier == CORRELATION_DATA:
        # [MQTT-3.3.2-16]
        return read_binary(buf, position, end)[1]
    if identifier == RESPONSE_TOPIC:
        data, position = read_binary(buf, position, end)
        # [MQTT-3.3.2-13] [MQTT-3.3.2-14]
        check_response_topic(text_of(data))
        return position
    if identifier == CONTENT_TYPE:
        data, position = read_binary(buf, position, end)
        # [MQTT-3.3.2-19]
        text_of(data)
        return position
    info = TABLE.get(identifier)
    if info is None:
        raise MalformedPacket(f"unknown property {identifier:#04x}")
    raise MalformedPacket(f"property {info.name} does not belong in PUBLISH")


def _add_subscription_id(publish: Publish, number: int, from_client: bool) -> None:
    """Adds a subscription identifier, which only a server may send."""
    if from_client:
        # [MQTT-3.3.4-6]
        raise ProtocolViolation(PROTOCOL_ERROR, "a subscription identifier from a client")
    check_number(SUBSCRIPTION_IDENTIFIER, number)
    if publish.subscription_ids is None:
        publish.subscription_ids = []
    check_repeats(len(publish.subscription_ids))
    publish.subscription_ids.append(number)


def _refuse_second(identifier: int) -> None:
    """Refuses a second property of a kind. An unknown id may share a bit of `seen` with a known
    one; `_read_property` refuses it with a better text."""
    info = TABLE.get(identifier)
    if info is not None:
        raise ProtocolViolation(PROTOCOL_ERROR, f"property {info.name} twice in PUBLISH")


def topic_field(topic: bytes) -> bytes:
    """The topic after its two-byte length. A longer one raises `ValueError`."""
    length = len(topic)
    if length > FIELD_BYTES_MAX:
        raise ValueError(f"a topic of {length} bytes, the maximum is {FIELD_BYTES_MAX}")
    return length.to_bytes(2, "big") + topic


def encode_publish(
    topic: bytes,
    payload: bytes,
    qos: int,
    retain: bool,
    dup: bool,
    packet_id: int,
    properties: bytes,
    version: int,
) -> bytes:
    """The bytes of a PUBLISH. `properties` is the complete block to send; MQTT 3 has none.

    A message without encoding raises `ValueError`. The caller is responsible for the topic's UTF-8.
    """
    if not 0 <= qos <= 2:
        raise ValueError(f"QoS {qos}")
    parts = [topic_field(topic)]
    if qos:
        # [MQTT-2.2.1-2] [MQTT-2.2.1-3] [MQTT-2.2.1-4]
        if not 0 < packet_id < 65_536:
            raise ValueError(f"packet id {packet_id} with QoS {qos}")
        parts.append(packet_id.to_bytes(2, "big"))
    elif dup:
        # [MQTT-3.3.1-2]
        raise ValueError("DUP with QoS 0")
    if version >= 5:
        parts.append(varint(len(properties)))
        parts.append(properties)
    parts.append(payload)
    # The body is joined before the header, because the header contains its length.
    body = b"".join(parts)
    first = FIRST_BYTE | (8 if dup else 0) | qos << 1 | (1 if retain else 0)
    return b"".join((first.to_bytes(1, "big"), varint(len(body)), body))


def splice_properties(
    properties: bytes, expiry_s: int, subscription_ids: tuple[int, ...], topic_alias: int
) -> bytes:
    """The block to send for a received one. It has `expiry_s` as message expiry interval (unless
    -1), the subscription identifiers, and the topic alias (unless 0).

    The expiry is replaced where it is, so that one slice on each side is copied, whatever their
    number.
    """
    parts: list[bytes] = []
    if expiry_s >= 0:
        # [MQTT-3.3.2-6]
        seconds = expiry_s.to_bytes(4, "big")
        position = expiry_position(properties)
        if position >= 0:
            parts.append(properties[:position])
            parts.append(seconds)
            parts.append(properties[position + 4 :])
        else:
            parts.append(MESSAGE_EXPIRY_INTERVAL.to_bytes(1, "big"))
            parts.append(seconds)
            parts.append(properties)
    else:
        parts.append(properties)
    # [MQTT-3.3.4-3] [MQTT-3.3.4-4]
    for subscription_id in subscription_ids:
        parts.append(SUBSCRIPTION_IDENTIFIER.to_bytes(1, "big"))
        parts.append(varint(subscription_id))
    if topic_alias:
        if not 0 < topic_alias < 65_536:
            raise ValueError(f"topic alias {topic_alias}")
        parts.append((TOPIC_ALIAS << 16 | topic_alias).to_bytes(3, "big"))
    return b"".join(parts)

"""Encodes packets to bytes, for both ends of a connection.

Encoders leave out the fields that a version does not have and translate reasons into its return
codes. They check only what would otherwise be decoded as another packet (`ValueError`). The caller
decides whether the receiver may get the packet now.
"""

from typing import Final

from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.fields import binary_field, string_field
from holdfast.protocol.mqtt.framing import frame
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.mqtt.properties import (
    REASON_STRING,
    RESPONSE_INFORMATION,
    USER_PROPERTY,
    encode_properties,
)
from holdfast.protocol.mqtt.publish import encode_publish, splice_properties
from holdfast.protocol.mqtt.reasons import connack_return_code, suback_return_code

PINGREQ_BYTES: Final = b"\xc0\x00"
PINGRESP_BYTES: Final = b"\xd0\x00"
"""Both are complete packets, which have no variable part."""

# PUBREL, SUBSCRIBE and UNSUBSCRIBE have reserved flags of 0010, the others of 0000.
# [MQTT-2.1.3-1] [MQTT-3.6.1-1] [MQTT-3.8.1-1] [MQTT-3.10.1-1] [MQTT-3.14.1-1] [MQTT-3.15.1-1]
FLAGGED_TYPES: Final = 1 << m.PUBREL | 1 << m.SUBSCRIBE | 1 << m.UNSUBSCRIBE


# The properties that a receiver can do without, the least useful first.
OMITTED_FIRST: Final = (REASON_STRING, RESPONSE_INFORMATION, USER_PROPERTY)


def first_byte(packet_type: int) -> int:
    """The fixed header's first byte of any packet except PUBLISH."""
    return packet_type << 4 | (2 if FLAGGED_TYPES >> packet_type & 1 else 0)


def encode(packet: m.Packet, version: int) -> bytes:
    """The complete packet. `version` is ignored for CONNECT, which has its own. A packet without
    encoding raises `ValueError`."""
    if isinstance(packet, m.Publish):
        return _encode_publish(packet, version)
    if isinstance(packet, m.Ack):
        return _encode_ack(packet, version)
    if isinstance(packet, m.Connect):
        return _encode_connect(packet)
    if isinstance(packet, m.Connack):
        return _encode_connack(packet, version)
    if isinstance(packet, m.Subscribe):
        return _encode_subscribe(packet, version)
    if isinstance(packet, m.Suback):
        return _encode_suback(packet, version)
    if isinstance(packet, m.Unsubscribe):
        return _encode_unsubscribe(packet, version)
    if isinstance(packet, m.Unsuback):
        return _encode_unsuback(packet, version)
    if isinstance(packet, m.Disconnect):
        return _encode_ending(m.DISCONNECT, packet.reason, packet.properties, version)
    if isinstance(packet, m.Auth):
        if version < 5:
            raise ValueError("MQTT 3 has no AUTH")
        return _encode_ending(m.AUTH, packet.reason, packet.properties, version)
    return PINGREQ_BYTES if isinstance(packet, m.Pingreq) else PINGRESP_BYTES


def encode_within(packet: m.Answer, version: int, bytes_max: int) -> bytes:
    """The packet in its largest form of at most `bytes_max` bytes, or b"".

    The forms are: complete, without reason string, then also without response information, then
    also without user properties. [MQTT-3.2.2-19] [MQTT-3.2.2-20] [MQTT-3.14.2-3]
    """
    properties = packet.properties
    for key in OMITTED_FIRST:
        data = _try_encode(packet, version)
        if data and len(data) <= bytes_max:
            return data
        # A new dict, because the caller's may be shared with other packets.
        if key in properties:
            properties = {each: value for each, value in properties.items() if each != key}
            packet.properties = properties
    data = _try_encode(packet, version)
    return data if len(data) <= bytes_max else b""


def _try_encode(packet: m.Answer, version: int) -> bytes:
    """The packet, or b"" if a string or its properties are too long to be sent."""
    try:
        return encode(packet, version)
    except ValueError:
        return b""


def encode_ack(packet_type: int, packet_id: int, reason: int, version: int) -> bytes:
    """PUBACK, PUBREC, PUBREL or PUBCOMP without properties; in MQTT 3 also without reason."""
    if not 0 < packet_id < 65_536:
        raise ValueError(f"packet id {packet_id}")
    first = packet_type << 4 | (2 if packet_type == m.PUBREL else 0)
    # The whole packet is one integer, so the most frequent one needs no list of parts.
    # [MQTT-2.2.1-5]
    if reason == 0 or version < 5:
        return (first << 24 | 2 << 16 | packet_id).to_bytes(4, "big")
    if not 0 <= reason < 256:
        raise ValueError(f"reason code {reason}")
    return (first << 32 | 3 << 24 | packet_id << 8 | reason).to_bytes(5, "big")


def _encode_publish(packet: m.Publish, version: int) -> bytes:
    """A PUBLISH as a packet object. The broker's hot path calls `encode_publish` itself."""
    properties = packet.properties
    if packet.topic_alias or packet.subscription_ids:
        ids = packet.subscription_ids
        properties = splice_properties(
            properties, -1, () if ids is None else tuple(ids), packet.topic_alias
        )
    return encode_publish(
        packet.topic,
        packet.payload,
        packet.qos,
        packet.retain,
        packet.dup,
        packet.packet_id,
        properties,
        version,
    )


def _encode_ack(packet: m.Ack, version: int) -> bytes:
    """An acknowledgement with properties, or else `encode_ack`."""
    if not packet.properties or version < 5:
        return encode_ack(packet.kind, packet.packet_id, packet.reason, version)
    body = (
        _packet_id(packet.packet_id)
        + bytes((packet.reason,))
        + encode_properties(packet.properties)
    )
    return frame(first_byte(packet.kind), body)


def _encode_connect(packet: m.Connect) -> bytes:
    level = packet.protocol_level
    if not 3 <= level <= 5:
        raise ValueError(f"protocol level {level}, it can be 3, 4 or 5")
    if packet.is_bridge and level > 4:
        raise ValueError("only MQTT 3 has a mark for bridges")
    if packet.password is not None and packet.username is None and level < 5:
        # [MQTT3-3.1.2-22]
        raise ValueError("MQTT 3 has no password without a user name")
    if not 0 <= packet.keep_alive_s < 65_536:
        raise ValueError(f"keep alive of {packet.keep_alive_s} s, the maximum is 65535")
    will = packet.will
    flags = 2 if packet.clean_start else 0
    if will is not None:
        # [MQTT-3.1.2-12]
        if not 0 <= will.qos <= 2:
            raise ValueError(f"will QoS {will.qos}")
        flags |= 4 | will.qos << 3 | (32 if will.retain else 0)
    # [MQTT-3.1.2-16] [MQTT-3.1.2-17] [MQTT-3.1.2-18] [MQTT-3.1.2-19]
    if packet.username is not None:
        flags |= 128
    if packet.password is not None:
        flags |= 64
    # [MQTT-3.1.2-1] [MQTT-3.1.2-2]
    parts = [
        string_field("MQIsdp" if level == 3 else "MQTT"),
        bytes((level | 0x80 if packet.is_bridge else level, flags)),
        packet.keep_alive_s.to_bytes(2, "big"),
    ]
    if level >= 5:
        parts.append(encode_properties(packet.properties))
    # [MQTT-3.1.3-1] [MQTT-3.1.3-3] [MQTT-3.1.3-4]
    parts.append(string_field(packet.client_id))
    if will is not None:
        # [MQTT-3.1.2-9]
        if level >= 5:
            parts.append(encode_properties(will.properties))
        parts.append(string_field(will.topic))
        parts.append(binary_field(will.payload))
    if packet.username is not None:
        parts.append(string_field(packet.username))
    if packet.password is not None:
        parts.append(binary_field(packet.password))
    return frame(first_byte(m.CONNECT), b"".join(parts))


def _encode_connack(packet: m.Connack, version: int) -> bytes:
    """A CONNACK. An error never comes with session present."""
    # [MQTT-3.2.2-1] [MQTT-3.2.2-6] [MQTT3-3.2.2-4]; in MQTT 3.1 the byte is reserved
    present = 1 if packet.session_present and packet.reason == 0 and version > 3 else 0
    if version < 5:
        return bytes((m.CONNACK << 4, 2, present, connack_return_code(packet.reason)))
    body = bytes((present, packet.reason)) + encode_properties(packet.properties)
    return frame(m.CONNACK << 4, body)


def _encode_subscribe(packet: m.Subscribe, version: int) -> bytes:
    # [MQTT-3.8.3-2]
    if not packet.subscriptions:
        raise ValueError("SUBSCRIBE without a filter")
    parts = _head(packet.packet_id, packet.properties, version)
    for request in packet.subscriptions:
        if not (0 <= request.qos <= 2 and 0 <= request.retain_handling <= 2):
            raise ValueError(
                f"subscription with QoS {request.qos}, retain handling {request.retain_handling}"
            )
        options = request.qos
        if version >= 5:
            options |= (
                (4 if request.no_local else 0)
                | (8 if request.retain_as_published else 0)
                | request.retain_handling << 4
            )
        # [MQTT-3.8.3-1]
        parts.append(string_field(request.filter))
        parts.append(bytes((options,)))
    return frame(first_byte(m.SUBSCRIBE), b"".join(parts))


def _encode_suback(packet: m.Suback, version: int) -> bytes:
    """A SUBACK. MQTT 3 has one code for all refusals."""
    parts = _head(packet.packet_id, packet.properties, version)
    # [MQTT-3.9.3-1]
    codes = packet.reasons
    if version < 5:
        codes = [suback_return_code(code) for code in codes]
    parts.append(bytes(codes))
    return frame(m.SUBACK << 4, b"".join(parts))


def _encode_unsubscribe(packet: m.Unsubscribe, version: int) -> bytes:
    # [MQTT-3.10.3-2]
    if not packet.filters:
        raise ValueError("UNSUBSCRIBE without a filter")
    parts = _head(packet.packet_id, packet.properties, version)
    for filter in packet.filters:
        # [MQTT-3.10.3-1]
        parts.append(string_field(filter))
    return frame(first_byte(m.UNSUBSCRIBE), b"".join(parts))


def _encode_unsuback(packet: m.Unsuback, version: int) -> bytes:
    """An UNSUBACK. In MQTT 3 it has no codes."""
    parts = _head(packet.packet_id, packet.properties, version)
    if version >= 5:
        # [MQTT-3.11.3-1]
        parts.append(bytes(packet.reasons))
    return frame(m.UNSUBACK << 4, b"".join(parts))


def _encode_ending(packet_type: int, reason: int, properties: Properties, version: int) -> bytes:
    """DISCONNECT or AUTH, without reason and properties if both have their defaults."""
    first = packet_type << 4
    if version < 5 or (reason == 0 and not properties):
        return bytes((first, 0))
    if not properties:
        # DISCONNECT may end here, AUTH (section 3.15.2.2.1) only together with the reason.
        return (
            bytes((first, 1, reason))
            if packet_type == m.DISCONNECT
            else bytes((first, 2, reason, 0))
        )
    return frame(first, bytes((reason,)) + encode_properties(properties))


def _head(packet_id: int, properties: Properties, version: int) -> list[bytes]:
    """The packet id, and the properties that MQTT 5 has behind it."""
    if version < 5:
        return [_packet_id(packet_id)]
    return [_packet_id(packet_id), encode_properties(properties)]


def _packet_id(packet_id: int) -> bytes:
    """A packet id, which is never 0."""
    # [MQTT-2.2.1-3] [MQTT-2.2.1-4]
    if not 0 < packet_id < 65_536:
        raise ValueError(f"packet id {packet_id}")
    return packet_id.to_bytes(2, "big")

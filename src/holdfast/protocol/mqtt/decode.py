"""Decodes bytes to packets, for both ends of a connection.

Each decoder gets the fixed header's first byte and the body buf[start:end]. It checks everything
that a single packet can be checked for, and consumes exactly the body. The caller checks what
depends on the connection's state, for example whether the packet may come now. Decoders raise
`ProtocolViolation` and no other error. MQTT 5.0, section 3.
"""

from typing import Final

from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import first_byte
from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.fields import read_binary, read_string, read_two
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.mqtt.properties import (
    AUTHENTICATION_DATA,
    AUTHENTICATION_METHOD,
    SESSION_EXPIRY_INTERVAL,
    WILL,
    decode_properties,
)
from holdfast.protocol.mqtt.publish import decode_publish
from holdfast.protocol.mqtt.reasons import (
    ALLOWED,
    PROTOCOL_ERROR,
    QUOTA_EXCEEDED,
    UNSPECIFIED_ERROR,
    UNSUPPORTED_PROTOCOL_VERSION,
    connack_reason,
)

FILTERS_MAX: Final = 5000
"""The most filters in one SUBSCRIBE or UNSUBSCRIBE. The broker processes such a packet at once, so
more filters, above all shared ones, would block the event loop."""

# One bit per packet type. DISCONNECT from a server and AUTH came with MQTT 5.
_FROM_CLIENT: Final = (
    1 << m.CONNECT
    | 1 << m.PUBLISH
    | 1 << m.PUBACK
    | 1 << m.PUBREC
    | 1 << m.PUBREL
    | 1 << m.PUBCOMP
    | 1 << m.SUBSCRIBE
    | 1 << m.UNSUBSCRIBE
    | 1 << m.PINGREQ
    | 1 << m.DISCONNECT
)
_FROM_SERVER: Final = (
    1 << m.CONNACK
    | 1 << m.PUBLISH
    | 1 << m.PUBACK
    | 1 << m.PUBREC
    | 1 << m.PUBREL
    | 1 << m.PUBCOMP
    | 1 << m.SUBACK
    | 1 << m.UNSUBACK
    | 1 << m.PINGRESP
)


def decode(
    buf: bytes, first: int, start: int, end: int, version: int, from_client: bool
) -> m.Packet:
    """The packet in buf[start:end]. `version` is ignored for CONNECT, which has its own."""
    packet_type = first >> 4
    if packet_type == m.PUBLISH:
        return decode_publish(buf, first, start, end, version, from_client)
    _check_direction(packet_type, version, from_client)
    if packet_type == m.CONNECT:
        return decode_connect(buf, first, start, end)
    if m.PUBACK <= packet_type <= m.PUBCOMP:
        return decode_ack(buf, first, start, end, version)
    _check_flags(first, version)
    if packet_type == m.SUBSCRIBE:
        return _decode_subscribe(buf, start, end, version)
    if packet_type == m.UNSUBSCRIBE:
        return _decode_unsubscribe(buf, start, end, version)
    if packet_type == m.DISCONNECT:
        return _decode_disconnect(buf, start, end, version, from_client)
    if packet_type == m.AUTH:
        return _decode_auth(buf, start, end)
    if packet_type == m.CONNACK:
        return _decode_connack(buf, start, end, version)
    if packet_type == m.SUBACK:
        return _decode_suback(buf, start, end, version)
    if packet_type == m.UNSUBACK:
        return _decode_unsuback(buf, start, end, version)
    if start != end:
        raise MalformedPacket(f"{m.TYPE_NAMES[packet_type]} with {end - start} bytes after it")
    return m.Pingreq() if packet_type == m.PINGREQ else m.Pingresp()


def decode_ack(buf: bytes, first: int, start: int, end: int, version: int) -> m.Ack:
    """PUBACK, PUBREC, PUBREL or PUBCOMP."""
    _check_flags(first, version)
    kind = first >> 4
    length = end - start
    if length < 2 or (length > 2 and version < 5):
        raise MalformedPacket(f"{m.TYPE_NAMES[kind]} of {length} bytes")
    packet_id = _read_packet_id(buf, start, end, kind)
    if length == 2:
        return m.Ack(kind, packet_id, 0)
    reason = _read_reason(buf, start + 2, end, kind)
    if length == 3:
        return m.Ack(kind, packet_id, reason)
    properties, after = decode_properties(buf, start + 3, end, kind)
    _check_end(after, end, kind)
    return m.Ack(kind, packet_id, reason, properties)


def decode_connect(buf: bytes, first: int, start: int, end: int) -> m.Connect:
    """The CONNECT in buf[start:end]. Anything but MQTT 3.1, 3.1.1 and 5.0 raises
    `ProtocolViolation` with UNSUPPORTED_PROTOCOL_VERSION at once, because the rest may have any
    form."""
    name, position = read_string(buf, start, end)
    level = _read_byte(buf, position, end, "protocol level")
    # Mosquitto's bridges set the highest bit of MQTT 3 levels, as a private extension.
    is_bridge = level in (0x83, 0x84)
    if is_bridge:
        level &= 0x7F
    if not ((name == "MQTT" and 4 <= level <= 5) or (name == "MQIsdp" and level == 3)):
        # [MQTT-3.1.2-1] [MQTT-3.1.2-2] [MQTT3-3.1.2-1] [MQTT3-3.1.2-2]
        raise ProtocolViolation(
            UNSUPPORTED_PROTOCOL_VERSION,
            f"protocol {name[:20]!r} level {level}; MQTT 3.1, 3.1.1 and 5.0 are supported",
        )
    _check_flags(first, level)
    flags = _read_byte(buf, position + 1, end, "connect flags")
    _check_connect_flags(flags, level)
    keep_alive_s = read_two(buf, position + 2, end)
    position += 4
    properties: Properties = {}
    if level >= 5:
        properties, position = decode_properties(buf, position, end, m.CONNECT)
        _check_authentication(properties, m.CONNECT)
    # [MQTT-3.1.3-1] [MQTT-3.1.3-3] [MQTT-3.1.3-4]. MQTT 3.1 allows 1 to 23 characters. Longer ones
    # are accepted, as other brokers do [MQTT-3.1.3-5]; the caller decides on an empty one.
    client_id, position = read_string(buf, position, end)
    will: m.Will | None = None
    if flags & 4:
        will, position = _read_will(buf, position, end, flags, level)
    username: str | None = None
    password: bytes | None = None
    # In MQTT 3.1 these are absent if the packet is too short for them, whatever the flags.
    if flags & 128 and not (level == 3 and position == end):
        # [MQTT-3.1.2-17] [MQTT-3.1.3-12]
        username, position = read_string(buf, position, end)
    if flags & 64 and not (level == 3 and position == end):
        # [MQTT-3.1.2-19]
        password, position = read_binary(buf, position, end)
    # [MQTT-3.1.2-16] [MQTT-3.1.2-18] [MQTT-3.1.4-1]
    _check_end(position, end, m.CONNECT)
    return m.Connect(
        level,
        flags & 2 != 0,
        keep_alive_s,
        client_id,
        will,
        username,
        password,
        properties,
        is_bridge,
    )


def _check_connect_flags(flags: int, level: int) -> None:
    # [MQTT-3.1.2-3]; MQTT 3.1 does not define the reserved bit
    if flags & 1 and level > 3:
        raise MalformedPacket("CONNECT with its reserved flag set")
    if flags & 4:
        # [MQTT-3.1.2-12]
        if flags & 0x18 == 0x18:
            raise MalformedPacket("CONNECT with will QoS 3")
    elif flags & 0x38 and level > 3:
        # [MQTT-3.1.2-11] [MQTT-3.1.2-13]
        raise MalformedPacket("CONNECT with will QoS or will retain and without a will")
    # [MQTT3-3.1.2-22]
    if flags & 0xC0 == 0x40 and level < 5:
        raise MalformedPacket("CONNECT with a password and without a user name")


def _read_will(buf: bytes, position: int, end: int, flags: int, level: int) -> tuple[m.Will, int]:
    """The will behind the client id. [MQTT-3.1.2-9]"""
    properties: Properties = {}
    if level >= 5:
        properties, position = decode_properties(buf, position, end, WILL)
    # [MQTT-3.1.3-11]
    topic, position = read_string(buf, position, end)
    payload, position = read_binary(buf, position, end)
    return m.Will(topic, payload, flags >> 3 & 3, flags & 32 != 0, properties), position


def _decode_connack(buf: bytes, start: int, end: int, version: int) -> m.Connack:
    flags = _read_byte(buf, start, end, "connect acknowledge flags")
    code = _read_byte(buf, start + 1, end, "return code")
    # A server of an older version refuses an MQTT 5 client in its own format.
    foreign = version >= 5 and end - start == 2 and code == 1
    if version < 5 or foreign:
        _check_end(start + 2, end, m.CONNACK)
        reason = connack_reason(code)
        if reason < 0:
            raise ProtocolViolation(PROTOCOL_ERROR, f"CONNACK with return code {code}")
    else:
        reason = _read_reason(buf, start + 1, end, m.CONNACK)
    if version == 3:
        return m.Connack(False, reason)
    # [MQTT-3.2.2-1]
    if flags & 0xFE:
        raise MalformedPacket("CONNACK with reserved flags set")
    # [MQTT-3.2.2-6]
    if flags and reason:
        raise ProtocolViolation(PROTOCOL_ERROR, "CONNACK with session present and an error")
    if version < 5 or foreign:
        return m.Connack(flags == 1, reason)
    properties, position = decode_properties(buf, start + 2, end, m.CONNACK)
    _check_end(position, end, m.CONNACK)
    _check_authentication(properties, m.CONNACK)
    return m.Connack(flags == 1, reason, properties)


def _decode_subscribe(buf: bytes, start: int, end: int, version: int) -> m.Subscribe:
    packet_id, properties, position = _read_head(buf, start, end, version, m.SUBSCRIBE)
    subscriptions: list[m.SubscriptionRequest] = []
    while position < end:
        _check_filters(len(subscriptions))
        # [MQTT-3.8.3-1]
        filter, position = read_string(buf, position, end)
        options = _read_byte(buf, position, end, "subscription options")
        position += 1
        subscriptions.append(_subscription_request(filter, options, version))
    # [MQTT-3.8.3-2]
    if not subscriptions:
        raise ProtocolViolation(PROTOCOL_ERROR, "SUBSCRIBE without a filter")
    return m.Subscribe(packet_id, subscriptions, properties)


def _subscription_request(filter: str, options: int, version: int) -> m.SubscriptionRequest:
    qos = options & 3
    if version < 5:
        # [MQTT3-3.8.3-4]
        if options > 2:
            raise MalformedPacket(f"SUBSCRIBE with a requested QoS byte of {options:#04x}")
        return m.SubscriptionRequest(filter, qos)
    # [MQTT-3.8.3-5]
    if options & 0xC0:
        raise MalformedPacket("SUBSCRIBE with reserved subscription options set")
    retain_handling = options >> 4 & 3
    if qos == 3 or retain_handling == 3:
        raise ProtocolViolation(
            PROTOCOL_ERROR, f"SUBSCRIBE with QoS {qos} and retain handling {retain_handling}"
        )
    return m.SubscriptionRequest(filter, qos, options & 4 != 0, options & 8 != 0, retain_handling)


def _decode_unsubscribe(buf: bytes, start: int, end: int, version: int) -> m.Unsubscribe:
    packet_id, properties, position = _read_head(buf, start, end, version, m.UNSUBSCRIBE)
    filters: list[str] = []
    while position < end:
        _check_filters(len(filters))
        # [MQTT-3.10.3-1]
        filter, position = read_string(buf, position, end)
        filters.append(filter)
    # [MQTT-3.10.3-2]
    if not filters:
        raise ProtocolViolation(PROTOCOL_ERROR, "UNSUBSCRIBE without a filter")
    return m.Unsubscribe(packet_id, filters, properties)


def _decode_suback(buf: bytes, start: int, end: int, version: int) -> m.Suback:
    packet_id, properties, position = _read_head(buf, start, end, version, m.SUBACK)
    codes = _read_reasons(buf, position, end, m.SUBACK)
    if version < 5:
        for code in codes:
            # [MQTT3-3.9.3-2]
            if code > 2 and code != UNSPECIFIED_ERROR:
                raise ProtocolViolation(PROTOCOL_ERROR, f"SUBACK with return code {code:#04x}")
    return m.Suback(packet_id, codes, properties)


def _decode_unsuback(buf: bytes, start: int, end: int, version: int) -> m.Unsuback:
    packet_id, properties, position = _read_head(buf, start, end, version, m.UNSUBACK)
    if version < 5:
        _check_end(position, end, m.UNSUBACK)
        return m.Unsuback(packet_id, [], properties)
    return m.Unsuback(packet_id, _read_reasons(buf, position, end, m.UNSUBACK), properties)


def _decode_disconnect(
    buf: bytes, start: int, end: int, version: int, from_client: bool
) -> m.Disconnect:
    if start == end:
        return m.Disconnect()
    if version < 5:
        raise MalformedPacket(f"DISCONNECT with {end - start} bytes after it")
    reason = _read_reason(buf, start, end, m.DISCONNECT)
    if start + 1 == end:
        return m.Disconnect(reason)
    properties, position = decode_properties(buf, start + 1, end, m.DISCONNECT)
    _check_end(position, end, m.DISCONNECT)
    # [MQTT-3.14.2-2]
    if not from_client and SESSION_EXPIRY_INTERVAL in properties:
        raise ProtocolViolation(PROTOCOL_ERROR, "session expiry in a server's DISCONNECT")
    return m.Disconnect(reason, properties)


def _decode_auth(buf: bytes, start: int, end: int) -> m.Auth:
    if start == end:
        return m.Auth()
    reason = _read_reason(buf, start, end, m.AUTH)
    properties, position = decode_properties(buf, start + 1, end, m.AUTH)
    _check_end(position, end, m.AUTH)
    if AUTHENTICATION_METHOD not in properties:
        raise ProtocolViolation(PROTOCOL_ERROR, "AUTH without authentication method")
    return m.Auth(reason, properties)


def _check_direction(packet_type: int, version: int, from_client: bool) -> None:
    known = _FROM_CLIENT if from_client else _FROM_SERVER
    if version >= 5:
        known |= 1 << m.AUTH | 1 << m.DISCONNECT
    if known >> packet_type & 1:
        return
    if packet_type == 0 or (packet_type == m.AUTH and version < 5):
        raise MalformedPacket(f"reserved packet type {packet_type}")
    sender = "client" if from_client else "server"
    raise ProtocolViolation(PROTOCOL_ERROR, f"{m.TYPE_NAMES[packet_type]} from a {sender}")


def _check_flags(first: int, version: int) -> None:
    """Checks the four reserved flags of every packet except PUBLISH. [MQTT-2.1.3-1] [MQTT3-2.2.2-2]
    MQTT 3.1 leaves them unused or sets DUP, so they are not checked there."""
    if first != first_byte(first >> 4) and version > 3:
        raise MalformedPacket(f"{m.TYPE_NAMES[first >> 4]} with flags {first & 15:04b}")


def _check_authentication(properties: Properties, packet_type: int) -> None:
    if AUTHENTICATION_DATA in properties and AUTHENTICATION_METHOD not in properties:
        raise ProtocolViolation(
            PROTOCOL_ERROR,
            f"{m.TYPE_NAMES[packet_type]} with authentication data and without a method",
        )


def _check_filters(count: int) -> None:
    if count >= FILTERS_MAX:
        raise ProtocolViolation(
            QUOTA_EXCEEDED, f"more than {FILTERS_MAX} filters in one packet: send several"
        )


def _check_end(position: int, end: int, packet_type: int) -> None:
    if position != end:
        raise MalformedPacket(
            f"{m.TYPE_NAMES[packet_type]} with {end - position} bytes after its last field"
        )


def _read_head(
    buf: bytes, start: int, end: int, version: int, packet_type: int
) -> tuple[int, Properties, int]:
    """The packet id and (MQTT 5) the properties with which four packets begin."""
    packet_id = _read_packet_id(buf, start, end, packet_type)
    if version < 5:
        return packet_id, {}, start + 2
    properties, position = decode_properties(buf, start + 2, end, packet_type)
    return packet_id, properties, position


def _read_packet_id(buf: bytes, start: int, end: int, packet_type: int) -> int:
    packet_id = read_two(buf, start, end)
    # [MQTT-2.2.1-3] [MQTT-2.2.1-4]
    if packet_id == 0:
        raise ProtocolViolation(PROTOCOL_ERROR, f"{m.TYPE_NAMES[packet_type]} with packet id 0")
    return packet_id


def _read_byte(buf: bytes, position: int, end: int, what: str) -> int:
    if position >= end:
        raise MalformedPacket(f"the packet ends before its {what}")
    return buf[position]


def _read_reason(buf: bytes, position: int, end: int, packet_type: int) -> int:
    reason = _read_byte(buf, position, end, "reason code")
    if reason not in ALLOWED[packet_type]:
        raise ProtocolViolation(
            PROTOCOL_ERROR, f"{m.TYPE_NAMES[packet_type]} with reason code {reason:#04x}"
        )
    return reason


def _read_reasons(buf: bytes, position: int, end: int, packet_type: int) -> list[int]:
    if position == end:
        raise ProtocolViolation(
            PROTOCOL_ERROR, f"{m.TYPE_NAMES[packet_type]} without a reason code"
        )
    return [_read_reason(buf, at, end, packet_type) for at in range(position, end)]

"""A minimal MQTT 3.1.1 and 5.0 client on a blocking socket, for tests that watch a broker.

Written apart from `holdfast.mqtt` and `holdfast.client` so that a mistake there cannot hide
itself. It checks nothing it is not asked about: tests use it to send packets that are wrong.
"""

import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15

MESSAGE_EXPIRY: Final = 0x02
SUBSCRIPTION_ID: Final = 0x0B
SESSION_EXPIRY: Final = 0x11
ASSIGNED_CLIENT_ID: Final = 0x12
WILL_DELAY: Final = 0x18
RECEIVE_MAXIMUM: Final = 0x21
TOPIC_ALIAS_MAXIMUM: Final = 0x22
TOPIC_ALIAS: Final = 0x23
USER_PROPERTY: Final = 0x26
MAXIMUM_PACKET_SIZE: Final = 0x27

PropertyValue = int | str | bytes | tuple[str, str]
PropertyList = Sequence[tuple[int, PropertyValue]]

_BYTE: Final = {0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A}
_TWO: Final = {0x13, 0x21, 0x22, 0x23}
_FOUR: Final = {0x02, 0x11, 0x18, 0x27}
_TEXT: Final = {0x03, 0x08, 0x12, 0x15, 0x1A, 0x1C, 0x1F}
_BINARY: Final = {0x09, 0x16}


class Closed(Exception):
    """The broker closed the connection."""


def varint(value: int) -> bytes:
    encoded = bytearray()
    while True:
        value, low = divmod(value, 128)
        encoded.append(low | (0x80 if value else 0))
        if not value:
            return bytes(encoded)


def text(value: str | bytes) -> bytes:
    """A two-byte length and the bytes: MQTT's strings and binary data."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack(">H", len(data)) + data


def packet(first: int, body: bytes = b"") -> bytes:
    return bytes([first]) + varint(len(body)) + body


def properties(values: PropertyList) -> bytes:
    """Encoded with the length before them."""
    encoded = b""
    for identifier, value in values:
        encoded += varint(identifier)
        if isinstance(value, tuple):
            encoded += text(value[0]) + text(value[1])
        elif not isinstance(value, int):
            encoded += text(value)
        elif identifier in _BYTE:
            encoded += bytes([value])
        elif identifier in _TWO:
            encoded += struct.pack(">H", value)
        elif identifier in _FOUR:
            encoded += struct.pack(">I", value)
        else:
            encoded += varint(value)
    return varint(len(encoded)) + encoded


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _read_text(data: bytes, position: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from(">H", data, position)
    return data[position + 2 : position + 2 + length], position + 2 + length


def read_properties(data: bytes, position: int) -> tuple[list[tuple[int, PropertyValue]], int]:
    length, position = read_varint(data, position)
    end = position + length
    found: list[tuple[int, PropertyValue]] = []
    while position < end:
        identifier, position = read_varint(data, position)
        value: PropertyValue
        if identifier == USER_PROPERTY:
            name, position = _read_text(data, position)
            content, position = _read_text(data, position)
            value = (name.decode(), content.decode())
        elif identifier in _TEXT or identifier in _BINARY:
            raw, position = _read_text(data, position)
            value = raw.decode() if identifier in _TEXT else raw
        elif identifier == SUBSCRIPTION_ID:
            value, position = read_varint(data, position)
        else:
            width = 1 if identifier in _BYTE else 2 if identifier in _TWO else 4
            value = int.from_bytes(data[position : position + width], "big")
            position += width
        found.append((identifier, value))
    return found, end


@dataclass(frozen=True)
class Will:
    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: PropertyList = ()


def connect(
    client_id: str,
    version: int = 5,
    clean: bool = True,
    keep_alive_s: int = 0,
    will: Will | None = None,
    props: PropertyList = (),
    username: str | None = None,
    password: bytes | None = None,
) -> bytes:
    flags = 0x02 if clean else 0
    payload = text(client_id)
    if will is not None:
        flags |= 0x04 | will.qos << 3 | (0x20 if will.retain else 0)
        if version == 5:
            payload += properties(will.properties)
        payload += text(will.topic) + text(will.payload)
    if username is not None:
        flags |= 0x80
        payload += text(username)
    if password is not None:
        flags |= 0x40
        payload += text(password)
    name = "MQIsdp" if version == 3 else "MQTT"
    head = text(name) + bytes([version, flags]) + struct.pack(">H", keep_alive_s)
    if version == 5:
        head += properties(props)
    return packet(CONNECT << 4, head + payload)


def publish(
    topic: str,
    payload: bytes,
    qos: int = 0,
    packet_id: int = 0,
    version: int = 5,
    retain: bool = False,
    dup: bool = False,
    props: PropertyList = (),
) -> bytes:
    body = text(topic)
    if qos:
        body += struct.pack(">H", packet_id)
    if version == 5:
        body += properties(props)
    return packet(PUBLISH << 4 | dup << 3 | qos << 1 | retain, body + payload)


def ack(kind: int, packet_id: int, reason: int = 0) -> bytes:
    """PUBACK, PUBREC, PUBREL or PUBCOMP; a reason other than 0 only in MQTT 5."""
    body = struct.pack(">H", packet_id) + (bytes([reason]) if reason else b"")
    return packet(kind << 4 | (2 if kind == PUBREL else 0), body)


def subscribe(
    packet_id: int,
    filters: Iterable[tuple[str, int]],
    version: int = 5,
    props: PropertyList = (),
) -> bytes:
    """`filters`: pairs of a filter and its options byte (its QoS, in MQTT 3)."""
    body = struct.pack(">H", packet_id) + (properties(props) if version == 5 else b"")
    for name, options in filters:
        body += text(name) + bytes([options])
    return packet(SUBSCRIBE << 4 | 2, body)


def unsubscribe(packet_id: int, filters: Iterable[str], version: int = 5) -> bytes:
    body = struct.pack(">H", packet_id) + (b"\0" if version == 5 else b"")
    return packet(UNSUBSCRIBE << 4 | 2, body + b"".join(text(name) for name in filters))


def disconnect(reason: int = 0, props: PropertyList = (), version: int = 5) -> bytes:
    if version != 5 or (reason == 0 and not props):
        return packet(DISCONNECT << 4)
    return packet(DISCONNECT << 4, bytes([reason]) + properties(props))


@dataclass(frozen=True)
class Frame:
    """One packet as it came: the fixed header's first byte and the rest after the length."""

    first: int
    body: bytes

    @property
    def kind(self) -> int:
        return self.first >> 4

    @property
    def packet_id(self) -> int:
        return int.from_bytes(self.body[:2], "big")

    @property
    def reason(self) -> int:
        """Of an acknowledgement or an MQTT 5 DISCONNECT; 0 where it is left out."""
        at = 0 if self.kind == DISCONNECT else 2
        return self.body[at] if len(self.body) > at else 0


class Frames:
    """Bytes as they arrive, in any pieces, to frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        buffer = self._buffer
        buffer += data
        found = []
        start = 0
        while True:
            position, length, shift = start + 1, 0, 0
            while position < len(buffer):
                byte = buffer[position]
                position += 1
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            else:
                break
            if len(buffer) - position < length:
                break
            found.append(Frame(buffer[start], bytes(buffer[position : position + length])))
            start = position + length
        del buffer[:start]
        return found


@dataclass(frozen=True)
class Message:
    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: list[tuple[int, PropertyValue]] = field(default_factory=list)

    def values(self, identifier: int) -> list[PropertyValue]:
        return [value for name, value in self.properties if name == identifier]


def read_publish(frame: Frame, version: int) -> Message:
    qos = frame.first >> 1 & 3
    topic, position = _read_text(frame.body, 0)
    packet_id = 0
    if qos:
        (packet_id,) = struct.unpack_from(">H", frame.body, position)
        position += 2
    props: list[tuple[int, PropertyValue]] = []
    if version == 5:
        props, position = read_properties(frame.body, position)
    payload = frame.body[position:]
    retain, dup = bool(frame.first & 1), bool(frame.first & 8)
    return Message(topic.decode(), payload, qos, retain, dup, packet_id, props)


@dataclass(frozen=True)
class Connack:
    session_present: bool
    reason: int
    properties: list[tuple[int, PropertyValue]]

    def value(self, identifier: int) -> PropertyValue | None:
        return next((value for name, value in self.properties if name == identifier), None)


def read_connack(frame: Frame, version: int) -> Connack:
    props = read_properties(frame.body, 2)[0] if version == 5 else []
    return Connack(bool(frame.body[0] & 1), frame.body[1], props)


class Wire:
    """One connection. Frames that a call was not waiting for stay, in order, for later calls."""

    def __init__(self, port: int, version: int = 5, timeout_s: float = 10.0) -> None:
        self.version = version
        self.timeout_s = timeout_s
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.inbox: list[Frame] = []
        self._frames = Frames()
        self._packet_id = 0

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def _fill(self, timeout_s: float | None) -> None:
        """Wait for some bytes. Raises Closed or TimeoutError."""
        self.socket.settimeout(self.timeout_s if timeout_s is None else timeout_s)
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("the broker closed the connection")
        self.inbox += self._frames.feed(data)

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame, whatever it is. Raises Closed or TimeoutError."""
        while not self.inbox:
            self._fill(timeout_s)
        return self.inbox.pop(0)

    def expect(self, kind: int, timeout_s: float | None = None) -> Frame:
        """The next frame of that kind; the others keep their places. Raises as `receive`."""
        seen = 0
        while True:
            for index in range(seen, len(self.inbox)):
                if self.inbox[index].kind == kind:
                    return self.inbox.pop(index)
            seen = len(self.inbox)
            self._fill(timeout_s)

    def next_packet_id(self) -> int:
        self._packet_id = self._packet_id % 65535 + 1
        return self._packet_id

    def connect(
        self,
        client_id: str = "",
        clean: bool = True,
        expiry_s: int = 0,
        props: PropertyList = (),
        will: Will | None = None,
        keep_alive_s: int = 0,
    ) -> Connack:
        """`expiry_s`: the session expiry interval, MQTT 5 only."""
        if self.version == 5 and expiry_s:
            props = [(SESSION_EXPIRY, expiry_s), *props]
        self.send(connect(client_id, self.version, clean, keep_alive_s, will, props))
        return read_connack(self.expect(CONNACK), self.version)

    def subscribe(self, *filters: tuple[str, int], props: PropertyList = ()) -> list[int]:
        self.send(subscribe(self.next_packet_id(), filters, self.version, props))
        body = self.expect(SUBACK).body
        start = read_properties(body, 2)[1] if self.version == 5 else 2
        return list(body[start:])

    def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        retain: bool = False,
        props: PropertyList = (),
    ) -> int:
        """Publish and wait until the broker has answered in full. Returns its reason code."""
        packet_id = self.next_packet_id() if qos else 0
        self.send(publish(topic, payload, qos, packet_id, self.version, retain, False, props))
        if qos == 0:
            return 0
        answer = self.expect(PUBACK if qos == 1 else PUBREC)
        if answer.kind == PUBREC and answer.reason < 0x80:
            self.send(ack(PUBREL, packet_id))
            self.expect(PUBCOMP)
        return answer.reason

    def message(self, timeout_s: float | None = None) -> Message:
        """The next message, acknowledged in full. Raises as `receive`."""
        message = read_publish(self.expect(PUBLISH, timeout_s), self.version)
        if message.qos == 1:
            self.send(ack(PUBACK, message.packet_id))
        elif message.qos == 2:
            self.send(ack(PUBREC, message.packet_id))
            self.expect(PUBREL)
            self.send(ack(PUBCOMP, message.packet_id))
        return message

    def ping(self, timeout_s: float | None = None) -> None:
        self.send(packet(PINGREQ << 4))
        self.expect(PINGRESP, timeout_s)

    def disconnect(self, reason: int = 0, props: PropertyList = ()) -> None:
        self.send(disconnect(reason, props, self.version))
        self.socket.close()

    def abort(self) -> None:
        """Reset the connection: the broker sees an error, not an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def wait_closed(self, timeout_s: float = 5.0) -> list[Frame]:
        """What the broker still sent before it closed. Raises TimeoutError when it does not."""
        while True:
            try:
                self._fill(timeout_s)
            except Closed:
                rest, self.inbox = self.inbox, []
                return rest

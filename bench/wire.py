"""The few MQTT 3.1.1 packets the generator needs, encoded and decoded many at a time.

Packet ids travel through the generator as two byte strings, all high bytes and all low bytes:
frames of one size lie at a constant stride, so `frames[at::size]` reads or writes the ids of a
whole batch in one slice operation.
"""

import struct
from typing import NamedTuple

CONNACK_ACCEPTED = b"\x20\x02\x00\x00"
PUBACK = 0x40
PUBREC = 0x50
PUBREL = 0x62
PUBCOMP = 0x70
ACK_BYTES = 4
DISCONNECT = b"\xe0\x00"


class Ids(NamedTuple):
    """Packet ids in order: high bytes and low bytes, equally long."""

    high: bytes
    low: bytes

    @classmethod
    def count_from_one(cls, count: int) -> "Ids":
        packed = b"".join(struct.pack("!H", number) for number in range(1, count + 1))
        return cls(packed[0::2], packed[1::2])

    def __add__(self, other: object) -> "Ids":
        if not isinstance(other, Ids):
            return NotImplemented
        return Ids(self.high + other.high, self.low + other.low)

    def split(self, count: int) -> "tuple[Ids, Ids]":
        return (
            Ids(self.high[:count], self.low[:count]),
            Ids(self.high[count:], self.low[count:]),
        )


def remaining_length(value: int) -> bytes:
    out = bytearray()
    while True:
        value, digit = divmod(value, 128)
        out.append(digit | (0x80 if value else 0))
        if not value:
            return bytes(out)


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("!H", len(encoded)) + encoded


def connect(client_id: str, keep_alive_s: int = 0, *, clean: bool = True) -> bytes:
    """A CONNECT without will and identity."""
    flags = b"\x02" if clean else b"\x00"
    body = text("MQTT") + b"\x04" + flags + struct.pack("!H", keep_alive_s) + text(client_id)
    return b"\x10" + remaining_length(len(body)) + body


def subscribe(topic_filter: str, qos: int) -> bytes:
    return subscribe_all([topic_filter], qos)


def suback(qos: int) -> bytes:
    return suback_all(1, qos)


def subscribe_all(topic_filters: list[str], qos: int) -> bytes:
    body = b"\x00\x01" + b"".join(text(each) + bytes([qos]) for each in topic_filters)
    return b"\x82" + remaining_length(len(body)) + body


def suback_all(count: int, qos: int) -> bytes:
    body = b"\x00\x01" + bytes([qos]) * count
    return b"\x90" + remaining_length(len(body)) + body


class Frame:
    """The PUBLISH of one topic, QoS and payload size; only packet id and payload vary."""

    def __init__(self, topic: str, qos: int, payload_bytes: int) -> None:
        name = text(topic)
        packet_id = b"\x00\x00" if qos else b""
        body_bytes = len(name) + len(packet_id) + payload_bytes
        head = bytes([0x30 | qos << 1]) + remaining_length(body_bytes) + name
        self.qos = qos
        self.first_byte = head[0]
        self.id_at = len(head)
        self.payload_at = len(head) + len(packet_id)
        self.blank = head + packet_id + b"x" * payload_bytes
        """The whole packet with packet id 0."""
        self.bytes = len(self.blank)

    def batch(self, ids: Ids) -> bytearray:
        """One PUBLISH for each id, QoS above 0."""
        out = bytearray(self.blank * len(ids.high))
        out[self.id_at :: self.bytes] = ids.high
        out[self.id_at + 1 :: self.bytes] = ids.low
        return out

    def ids_of(self, frames: bytes) -> Ids:
        """The packet ids of whole frames; ValueError if they differ from ours in anything else."""
        count = len(frames) // self.bytes
        ids = Ids(frames[self.id_at :: self.bytes], frames[self.id_at + 1 :: self.bytes])
        if self.batch(ids) != frames or len(ids.high) != count:
            raise ValueError(f"not the frames that were published: {frames[:80]!r}")
        return ids


def acks(first_byte: int, ids: Ids) -> bytearray:
    """PUBACK, PUBREC, PUBREL or PUBCOMP, one for each id."""
    out = bytearray(bytes([first_byte, 2, 0, 0]) * len(ids.high))
    out[2::ACK_BYTES] = ids.high
    out[3::ACK_BYTES] = ids.low
    return out


def acked_ids(packets: bytes, first_byte: int) -> Ids:
    """The ids of whole acknowledgements that are all of one type; ValueError if they are not."""
    ids = Ids(packets[2::ACK_BYTES], packets[3::ACK_BYTES])
    if acks(first_byte, ids) != packets:
        raise ValueError(f"expected packets of type 0x{first_byte:02x}: {packets[:80]!r}")
    return ids


def split_acks(packets: bytes, first_byte: int, second_byte: int) -> tuple[Ids, Ids]:
    """The ids of whole acknowledgements of two types, as two lists in their order."""
    types = packets[0::ACK_BYTES]
    if types.count(first_byte) == len(types):
        return acked_ids(packets, first_byte), Ids(b"", b"")
    if types.count(second_byte) == len(types):
        return Ids(b"", b""), acked_ids(packets, second_byte)
    first, second = bytearray(), bytearray()
    for at in range(0, len(packets), ACK_BYTES):
        packet = packets[at : at + ACK_BYTES]
        (first if packet[0] == first_byte else second).extend(packet)
    return acked_ids(bytes(first), first_byte), acked_ids(bytes(second), second_byte)

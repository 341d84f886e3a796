"""A published message on its way through the node, and the frames made of it.

One object serves the whole way from the publisher's packet to every outbox. Receivers that need the
same bytes share them, so fan-out costs one encoding per (protocol, QoS, retain).

A form larger than MQTT's largest packet has no frame: the result is b"", and the message is dropped
for that receiver as if it exceeded the receiver's Maximum Packet Size. For example, a message that
an MQTT 3 client sent in 268,435,455 bytes is one byte too large for MQTT 5.
"""

from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.session.additions import Additions
from holdfast.node.session.audience import Audience, encode_audience, encode_user
from holdfast.protocol.mqtt.errors import MalformedPacket
from holdfast.protocol.mqtt.fields import VARINT_MAX, string_field, varint
from holdfast.protocol.mqtt.properties import USER_PROPERTY, expiry_of, without_user_properties
from holdfast.protocol.mqtt.publish import splice_properties, topic_field

NO_EXPIRY: Final = -1
OWN_NAMES: Final = b"hf-"
"""The beginning of the names of the broker's user properties."""


class Message:
    """One application message. `partition` is -1 if it is not in the log (QoS 0, unless logged)."""

    def __init__(
        self,
        topic: bytes,
        payload: bytes,
        qos: int,
        retain: bool,
        properties: bytes,
        expiry_s: int,
        timestamp_us: int,
        publisher: bytes,
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        self.properties = properties
        self.expiry_s = expiry_s
        self.timestamp_us = timestamp_us
        self.publisher = publisher
        self.partition = -1
        self.offset = -1
        # None: all subscribers.
        self.audience: Audience | None = None
        # The user whose share of the retained store it needs; b"": its client has one.
        self.user = b""
        # Shared frames for receivers with no subscription id, alias or expiry of their own.
        self._frame_v3: bytes | None = None
        self._frame_v5: bytes | None = None
        self._head_v3: bytes | None = None
        self._tail_v3: bytes = b""
        self._head_v5: bytes | None = None
        self._tail_v5: bytes = b""

    def adopt_frame(self, version: int, frame: bytes) -> None:
        """Reuses the frame in which the message arrived, for receivers of the same version. `frame`
        must be a QoS 0 PUBLISH without DUP, RETAIN and properties."""
        if version < 5:
            self._frame_v3 = frame
        else:
            self._frame_v5 = frame

    def drop_frames(self) -> None:
        """Drops the shared frames of a message that is delivered and stays in memory: see
        `without_frames`."""
        self._frame_v3 = None
        self._frame_v5 = None
        self._head_v3 = None
        self._tail_v3 = b""
        self._head_v5 = None
        self._tail_v5 = b""

    def without_frames(self) -> "Message":
        """A copy for the retained store. The shared frames contain the payload a second time, so
        they are left out."""
        kept = Message(
            self.topic,
            self.payload,
            self.qos,
            self.retain,
            self.properties,
            self.expiry_s,
            self.timestamp_us,
            self.publisher,
        )
        kept.partition = self.partition
        kept.offset = self.offset
        kept.user = self.user
        return kept

    def audience_field(self) -> bytes:
        """The field `audience` of its record; b"": it has none."""
        if self.audience is not None:
            return encode_audience(self.audience)
        return encode_user(self.user) if self.user else b""

    def is_expired(self, wall_us: int) -> bool:
        """Whether the message has waited for its expiry interval."""
        return self.expiry_s >= 0 and wall_us - self.timestamp_us >= self.expiry_s * 1_000_000

    def remaining_expiry_s(self, wall_us: int) -> int:
        """Seconds left, at least 0, or NO_EXPIRY. [MQTT-3.3.2-6]"""
        if self.expiry_s < 0:
            return NO_EXPIRY
        waited_s = (wall_us - self.timestamp_us) // 1_000_000
        return max(0, self.expiry_s - max(0, waited_s))

    def frame_qos0(self, version: int, retain: bool) -> bytes:
        """A QoS 0 PUBLISH without receiver-specific properties."""
        if retain:
            return self._encode_qos0(version, True)
        if version < 5:
            if self._frame_v3 is None:
                self._frame_v3 = self._encode_qos0(3, False)
            return self._frame_v3
        if self._frame_v5 is None:
            self._frame_v5 = self._encode_qos0(5, False)
        return self._frame_v5

    def _encode_qos0(self, version: int, retain: bool) -> bytes:
        head = topic_field(self.topic)
        if version >= 5:
            head += varint(len(self.properties)) + self.properties
        size_bytes = len(head) + len(self.payload)
        if size_bytes > VARINT_MAX:
            return b""
        first = b"\x31" if retain else b"\x30"
        return b"".join((first, varint(size_bytes), head, self.payload))

    def frame(self, version: int, qos: int, retain: bool, packet_id: int) -> bytes:
        """A first-time QoS 1 or 2 PUBLISH without receiver-specific properties."""
        if version < 5:
            if self._head_v3 is None:
                field = topic_field(self.topic)
                size_bytes = len(field) + 2 + len(self.payload)
                if size_bytes > VARINT_MAX:
                    return b""
                self._tail_v3 = self.payload
                self._head_v3 = varint(size_bytes) + field
            head = self._head_v3
            tail = self._tail_v3
        else:
            if self._head_v5 is None:
                field = topic_field(self.topic)
                block = varint(len(self.properties)) + self.properties
                size_bytes = len(field) + 2 + len(block) + len(self.payload)
                if size_bytes > VARINT_MAX:
                    return b""
                self._tail_v5 = block + self.payload
                self._head_v5 = varint(size_bytes) + field
            head = self._head_v5
            tail = self._tail_v5
        first = FIRST_BYTES[qos << 1 | (1 if retain else 0)]
        return b"".join((first, head, packet_id.to_bytes(2, "big"), tail))

    def frame_special(
        self,
        version: int,
        qos: int,
        retain: bool,
        dup: bool,
        packet_id: int,
        wall_us: int,
        additions: Additions | None,
        topic: bytes,
        topic_alias: int,
    ) -> bytes:
        """Any PUBLISH: with its own expiry, additions, or alias (then `topic` is empty or
        complete)."""
        head = topic_field(topic)
        if qos:
            head += packet_id.to_bytes(2, "big")
        if version >= 5:
            properties = self.properties
            ids = () if additions is None else additions.ids
            if self.expiry_s >= 0 or ids or topic_alias:
                properties = splice_properties(
                    properties, self.remaining_expiry_s(wall_us), ids, topic_alias
                )
            if additions is not None and additions.tells_place:
                # Properties of the publisher with these names would pass for the broker's.
                properties = self._place(additions) + without_user_properties(properties, OWN_NAMES)
            if len(properties) > VARINT_MAX:
                return b""
            head += varint(len(properties)) + properties
        size_bytes = len(head) + len(self.payload)
        if size_bytes > VARINT_MAX:
            return b""
        first = 0x30 | (8 if dup else 0) | qos << 1 | (1 if retain else 0)
        return b"".join((bytes((first,)), varint(size_bytes), head, self.payload))

    def _place(self, additions: Additions) -> bytes:
        """The user properties that tell a client the place and the time of the message."""
        block = _user_property("hf-time", self.timestamp_us)
        if self.partition >= 0:
            block += _user_property("hf-partition", self.partition)
            block += _user_property("hf-offset", self.offset)
        if additions.is_past:
            block += _user_property("hf-past", 1)
        if additions.lost:
            block += _user_property("hf-lost", additions.lost)
        return block


def _user_property(name: str, value: int) -> bytes:
    return bytes((USER_PROPERTY,)) + string_field(name) + string_field(str(value))


RETAINED_OVERHEAD_BYTES: Final = 800
"""The memory in bytes of a retained message beside its content: objects, and slots of four tables,
two of them by owner."""


def retained_size(entry: Message) -> int:
    """The memory in bytes of a message in the retained store. Its topic counts twice, as bytes and
    text."""
    return (
        RETAINED_OVERHEAD_BYTES
        + 2 * len(entry.topic)
        + len(entry.payload)
        + len(entry.properties)
        + len(entry.publisher)
        + len(entry.user)
    )


QUEUED_OVERHEAD_BYTES: Final = 200
"""The memory in bytes of a queued message beside its content."""


def queued_size(message: Message) -> int:
    """The memory in bytes of a message in a queue. Without its properties a queue would have no
    bound: an empty message may have a packet full of them."""
    return (
        QUEUED_OVERHEAD_BYTES + len(message.topic) + len(message.payload) + len(message.properties)
    )


FIRST_BYTES: Final = [bytes((0x30 | flags,)) for flags in range(8)]


def stored_message(record: Record, qos: int, timestamp_us: int) -> Message:
    """The message of a record from the log or from another node.

    Properties that are none are left out. Nobody checks a record again when it comes from another
    node, and an error here would stop every node that delivers the message.
    """
    properties = record.properties
    expiry_s = NO_EXPIRY
    if properties:
        try:
            expiry_s = expiry_of(properties)
        except MalformedPacket:
            properties = b""
    return Message(
        record.topic,
        record.payload,
        qos,
        record.flags & log_record.FLAG_RETAIN != 0,
        properties,
        expiry_s,
        timestamp_us,
        record.client_id,
    )

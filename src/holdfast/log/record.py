"""Records of the log: their kinds and flags, and a record's fields in memory."""

from typing import Final

MESSAGE: Final = 1
"""A published message; with FLAG_RETAIN it also sets (or, empty, clears) its retained topic."""
RETAINED: Final = 2
"""Sets or clears a retained topic without being a message (a QoS 0 publish that is not logged).
With a `sequence` it clears the topic only if its message is that of the offset before."""
SESSION: Final = 3
"""A session opened, changed its subscriptions, disconnected or ended (payload: JSON)."""
CURSOR: Final = 4
"""A session's or shared group's read positions and inflight packet ids (payload: packed)."""
RELEASE: Final = 5
"""An inbound QoS 2 packet id is free again (client id, sequence = packet id)."""
WILL: Final = 6
"""A will was fired or dropped (client id)."""
CONTROL: Final = 7
"""A record about the log itself; readers that do not know it skip it."""
PRODUCER: Final = 8
"""A producer id is bound to a user (producer, client id = user name; empty: unbound)."""
BAN: Final = 9
"""A ban (client id: scope and name; payload: JSON); without a payload: it is lifted."""

DELAYED: Final = 10
"""The delayed message at offset `sequence` of the partition is over without a publication."""

FORGOTTEN: Final = 11
"""The position of a producer in the partition is forgotten (producer, its epoch and sequence,
payload: packed). Earlier versions pass it, and keep what their own limits allow."""

FEDERATION: Final = 12
"""A value of this broker's member of a federation (client id: key; payload: value, empty: removed;
`sequence`: the member's start): see node.state.member_values."""

FLAG_QOS_MASK: Final = 0x03
FLAG_RETAIN: Final = 0x04
FLAG_PACKET_ID: Final = 0x08
"""`sequence` is the QoS 2 packet id under which `client_id` sent the message, `producer_epoch` the
epoch of its session, and `producer`, if set, the epoch in which the session's life began, in
decimal digits."""
FLAG_PRODUCER: Final = 0x10
"""`producer`, `producer_epoch` and `sequence` identify the message at its producer."""
FLAG_WILL: Final = 0x20
"""The message is the will of `client_id` for its session epoch `sequence`."""
FLAG_AUDIENCE: Final = 0x40
"""The message is not for all subscribers, or a user retains it; `audience` says which, see
session.audience. Readers that know no audiences treat it as a message for all."""

FLAG_DELAYED: Final = 0x80
"""The message waits for its time, or with another topic than `$delayed/...` is the publication of
the one at offset `sequence`: see broker.publish.delayed_table."""

STATE_FLAGS: Final = FLAG_RETAIN | FLAG_PACKET_ID | FLAG_PRODUCER | FLAG_WILL | FLAG_DELAYED
"""The flags of messages that recovery must apply."""


class Record:
    """One record, to be appended or read from the log. `topic` is UTF-8. `properties`: as the
    publisher sent them, encoded, without length prefix and topic alias."""

    content: object | None = None
    """The decoded payload, if this process made the record and it changes state. It is never
    modified. None: the payload is to be decoded."""

    def __init__(
        self,
        partition: int,
        kind: int,
        flags: int = 0,
        timestamp_us: int = 0,
        topic: bytes = b"",
        client_id: bytes = b"",
        properties: bytes = b"",
        payload: bytes = b"",
        *,
        producer: bytes = b"",
        producer_epoch: int = 0,
        sequence: int = 0,
        ticket: int = 0,
        offset: int = -1,
        audience: bytes = b"",
    ) -> None:
        self.partition = partition
        self.kind = kind
        self.flags = flags
        self.timestamp_us = timestamp_us
        self.topic = topic
        self.client_id = client_id
        self.producer = producer
        self.producer_epoch = producer_epoch
        self.sequence = sequence
        self.properties = properties
        self.payload = payload
        # It is set with FLAG_AUDIENCE only.
        self.audience = audience
        # The number by which the client's node recognises its record; 0: none.
        self.ticket = ticket
        # The offset, set by the append; -1 before.
        self.offset = offset

    def is_state(self) -> bool:
        """True if recovery must apply the record."""
        if self.kind == MESSAGE:
            return self.flags & STATE_FLAGS != 0
        return self.kind != CONTROL

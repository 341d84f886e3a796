"""Messages of a publish queue, their checks, and the queue's errors.

`client.errors.QueueFull` is the error that callers normally handle.
"""

import time
from dataclasses import dataclass
from typing import Final

from holdfast.client.errors import ClientError
from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.client.pubqueue.format import Format
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBLISH, Properties
from holdfast.protocol.topics.names import decode_topic


class QueueClosed(ClientError):
    """A message for a queue that is not open yet, or closed."""


class ProducerFenced(ClientError):
    """A refusal of the producer, not of a message. The broker has a newer epoch (a second writer
    uses the identity, or the queue's file is an old copy), or the producer belongs to another user.
    The queue has stopped and keeps its messages."""


class MessageExpired(ClientError):
    """A message that was not sent within its `expiry_s`."""


class MessagesLeft(ClientError):
    """The close of a queue in memory with unconfirmed messages; `count` of them are lost."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} messages were not confirmed: close with more time, or use a SqliteStore, "
            "which keeps them"
        )
        self.count = count


class StoreError(ClientError):
    """A failure of the queue's file. The text has the reason and a remedy."""


class StoreFull(StoreError):
    """A full disk. No message was stored, and later attempts may succeed."""


ENTRY_OVERHEAD_BYTES: Final = 64
"""The bytes that a message counts in `bytes_max` beyond its own."""


@dataclass(slots=True, eq=False, repr=False)
class QueueEntry:
    """A message of a publish queue. `sequence` orders a queue's messages and with `epoch`
    identifies them to the broker. Times are seconds since 1970; `expires_at` 0: never."""

    sequence: int
    epoch: int
    topic: str
    payload: bytes
    properties: Properties | None
    retain: bool
    put_at: float
    expires_at: float
    size: int
    """The bytes that it counts in the queue's limit."""
    attempts: int = 0
    """The number of times it was passed to the client since the queue was opened."""

    def __repr__(self) -> str:
        return f"Entry({self.epoch}:{self.sequence} {self.topic!r}, {len(self.payload)} bytes)"


@dataclass
class Failed:
    """A message that left the queue without delivery. `reason` is the server's reason code, or -1
    if it never reached a server."""

    entry: QueueEntry
    reason: int
    text: str
    failed_at: float
    """Seconds since 1970."""


def entry_size(topic: str, payload: bytes, block: bytes) -> int:
    """The bytes that a message with the encoded properties `block` counts in the queue's limit."""
    return len(topic.encode()) + len(payload) + len(block) + ENTRY_OVERHEAD_BYTES


PACKET_BYTES_MAX: Final = 268_435_455
_PACKET_OVERHEAD_BYTES: Final = 256
"""The bytes of a PUBLISH beside topic, payload, its properties and the identity, at most."""


def checked_entry(
    form: Format,
    topic: str,
    payload: bytes | str,
    retain: bool,
    properties: Properties | None,
    expiry_s: float,
) -> QueueEntry:
    """The message without sequence and epoch. One that no server could accept raises
    `ValueError`."""
    data = payload.encode() if isinstance(payload, str) else bytes(payload)
    decode_topic(topic.encode())  # [MQTT-3.3.2-2]
    form.check(data)
    block = checked_block(properties) if properties else b""
    size = entry_size(topic, data, block)
    if size + _PACKET_OVERHEAD_BYTES > PACKET_BYTES_MAX:
        raise ValueError(f"a message of {size} bytes: MQTT allows {PACKET_BYTES_MAX}")
    put_at = time.time()
    expires_at = put_at + expiry_s if expiry_s > 0 else 0.0
    return QueueEntry(0, 0, topic, data, properties or None, retain, put_at, expires_at, size)


def checked_block(properties: Properties) -> bytes:
    """The encoded properties of a message. Invalid ones raise `ValueError`."""
    for name in (pr.TOPIC_ALIAS, pr.SUBSCRIPTION_IDENTIFIER):
        if name in properties:
            raise ValueError(f"{pr.TABLE[name].name} does not belong in a queued message")
    block = pr.encode_block(properties)
    try:
        decoded = pr.decode_block(block, 0, len(block), PUBLISH)
    except ProtocolViolation as violation:
        raise ValueError(str(violation)) from None
    pairs = decoded.get(pr.USER_PROPERTY)
    if isinstance(pairs, list) and any(
        isinstance(pair, tuple) and pair[0] == IDENTITY_PROPERTY for pair in pairs
    ):
        raise ValueError(f"the user property {IDENTITY_PROPERTY} is set by the queue")
    return block

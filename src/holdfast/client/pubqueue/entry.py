"""A message in a publish queue."""

from dataclasses import dataclass
from typing import Final

from holdfast.protocol.mqtt.packets import Properties

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

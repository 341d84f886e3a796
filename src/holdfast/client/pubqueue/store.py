"""Interface of a publish queue's store, and the store in memory."""

from collections import deque
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Final, Protocol

from holdfast.client.identity import check_producer
from holdfast.client.pubqueue.messages import Failed, QueueEntry

FAILED_MAX: Final = 10_000
"""The most failed messages kept in a file. Older ones are deleted (each was reported when it
failed)."""
FAILED_IN_MEMORY_MAX: Final = 100
"""The most failed messages kept in memory."""


@dataclass
class Opened:
    """The content of a store when it was opened. New messages get `epoch` and sequences after
    `last_sequence`."""

    producer: str
    epoch: int
    last_sequence: int
    count: int = 0
    size: int = 0
    """Sum of the entries' sizes."""


@dataclass
class QueueChange:
    """Changes that become durable together."""

    added: list[QueueEntry] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    """Sequences of confirmed messages."""
    failed: list[Failed] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Whether there is no change."""
        return not (self.added or self.removed or self.failed)


class QueueStore(Protocol):
    """A store of messages. `blocking`: its calls take time, so they run in a thread, one after
    another. All may raise `StoreError`. After `StoreFull` nothing has changed, and the store can be
    used further."""

    blocking: bool

    def open(self, form: str, clock: float) -> Opened:
        """Opens the store. `form`: the name of the queue's format. `clock`: seconds since 1970."""

    def apply(self, change: QueueChange) -> None:
        """Applies all of the change or nothing. It is durable on return."""

    def read(self, after: int, count: int, size: int) -> list[QueueEntry]:
        """Messages with greater sequences, ascending: at most `count`, and no more once their sizes
        reach `size`."""

    def renew(self, epoch: int) -> None:
        """Gives every message this epoch, durably."""

    def list_failed(self) -> list[Failed]:
        """The failed messages, oldest first."""

    def forget_failed(self) -> int:
        """Removes all failed messages and returns their number."""

    def close(self) -> None:
        """Releases the store. Nothing may be called afterwards."""


class MemoryStore:
    """A store whose messages live as long as the queue. The producer id is random unless given."""

    blocking: bool = False

    def __init__(self, producer: str | None = None) -> None:
        if producer is not None:
            check_producer(producer)
        self._producer = producer
        self._failed: deque[Failed] = deque(maxlen=FAILED_IN_MEMORY_MAX)

    def open(self, form: str, clock: float) -> Opened:
        """Implements `QueueStore.open`."""
        if self._producer is None:
            return Opened(token_hex(8), 0, 0)
        # Its sequences begin again in each life, so each life needs an epoch of its own.
        return Opened(self._producer, int(clock), 0)

    def apply(self, change: QueueChange) -> None:
        """Keeps the failed messages; the queue has the others in memory."""
        self._failed.extend(change.failed)

    def read(self, after: int, count: int, size: int) -> list[QueueEntry]:
        """No messages, because the queue has all of them in memory."""
        return []

    def renew(self, epoch: int) -> None:
        """Does nothing: an epoch in memory ends with the process."""

    def list_failed(self) -> list[Failed]:
        """Implements `QueueStore.list_failed`."""
        return list(self._failed)

    def forget_failed(self) -> int:
        """Implements `QueueStore.forget_failed`."""
        count = len(self._failed)
        self._failed.clear()
        return count

    def close(self) -> None:
        """Does nothing: the messages end with the process."""

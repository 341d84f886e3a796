"""Where a publish queue keeps its messages: what a store does, and the store in memory."""

from collections import deque
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Final, Protocol

from holdfast.client.identity import check_producer
from holdfast.client.pubqueue.entry import Failed, QueueEntry

FAILED_MAX: Final = 10_000
"""Failed messages kept in a file; older ones make room (each was reported when it failed)."""
FAILED_IN_MEMORY_MAX: Final = 100


@dataclass
class Opened:
    """What a store had when it was opened. New messages get `epoch` and sequences after
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
        return not (self.added or self.removed or self.failed)


class QueueStore(Protocol):
    """`blocking`: its calls take time and are made in a thread, one after another. All raise
    StoreError; after StoreFull nothing has changed and the store goes on."""

    blocking: bool

    def open(self, form: str, clock: float) -> Opened:
        """`form`: the name of the queue's format. `clock`: seconds since 1970."""

    def apply(self, change: QueueChange) -> None:
        """All of it or nothing, durable on return."""

    def read(self, after: int, count: int, size: int) -> list[QueueEntry]:
        """Messages with greater sequences, ascending: at most `count`, and no more once their
        sizes reach `size`."""

    def renew(self, epoch: int) -> None:
        """Give every message this epoch, durably."""

    def list_failed(self) -> list[Failed]:
        """Oldest first."""

    def forget_failed(self) -> int:
        """Remove all failed messages; returns how many there were."""

    def close(self) -> None: ...


class MemoryStore:
    """Messages live as long as the queue. The producer id is random unless given."""

    blocking: bool = False

    def __init__(self, producer: str | None = None) -> None:
        if producer is not None:
            check_producer(producer)
        self._producer = producer
        self._failed: deque[Failed] = deque(maxlen=FAILED_IN_MEMORY_MAX)

    def open(self, form: str, clock: float) -> Opened:
        if self._producer is None:
            return Opened(token_hex(8), 0, 0)
        # Its sequences begin anew with each life.
        return Opened(self._producer, int(clock), 0)

    def apply(self, change: QueueChange) -> None:
        self._failed.extend(change.failed)

    def read(self, after: int, count: int, size: int) -> list[QueueEntry]:
        return []

    def renew(self, epoch: int) -> None:
        pass

    def list_failed(self) -> list[Failed]:
        return list(self._failed)

    def forget_failed(self) -> int:
        count = len(self._failed)
        self._failed.clear()
        return count

    def close(self) -> None:
        pass

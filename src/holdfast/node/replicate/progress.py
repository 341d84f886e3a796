"""Tracks a leader's partitions and their followers."""

from bisect import bisect_left
from collections import deque
from typing import Final

from holdfast.node.metadata.model import PartitionInfo
from holdfast.node.replicate.codec import EPOCH

IDLE: Final = 0
"""The follower has not asked under this epoch, or must ask again."""
CATCHING_UP: Final = 1
"""The follower is behind and receives older batches, piece by piece."""
NEVER: Final = float("-inf")
LIVE: Final = 2
"""The follower was sent everything, and gets each new batch when it is closed."""


class Peer:
    """The link to another node, as the leader of some partitions sees it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.is_connected = False
        # As its last FOLLOW named it.
        self.incarnation = ""
        # Bytes of batches on this link. Invariant: received_bytes <= sent_bytes.
        self.sent_bytes = 0
        self.received_bytes = 0
        # Contents of the next REPLICATE frame.
        self.epochs: list[bytes] = []
        self.batches: list[bytes] = []
        # The followers that wait for their turn to be fed.
        self.queue: deque[Progress] = deque()
        # The reads under way for it, those of a former link included.
        self.reads = 0
        # When the last two REPLICATE frames were made.
        self.replicated_at = self.replicated_before = NEVER
        # The partitions whose commit waits for the next frame, the oldest since `held_at`.
        self.held: dict[int, LedPartition] = {}
        self.held_at = NEVER
        # Partition -> the log end up to which the node waits for commits.
        self.awaited: dict[int, int] = {}

    def restart(self, is_connected: bool) -> None:
        """Forgets everything about the old link. The counters begin at 0 on each link."""
        self.is_connected = is_connected
        self.incarnation = ""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.epochs = []
        self.batches = []
        self.replicated_at = self.replicated_before = NEVER
        self.held = {}
        self.awaited = {}
        for progress in self.queue:
            progress.is_queued = False
        self.queue.clear()

    def outstanding_bytes(self) -> int:
        """The bytes of batches on the way: sent, and not reported as received."""
        return self.sent_bytes - self.received_bytes

    def add(self, epoch: bytes, batch: bytes) -> None:
        self.epochs.append(epoch)
        self.batches.append(batch)
        self.sent_bytes += len(batch)


class Progress:
    """The progress of one follower in one partition under one epoch."""

    def __init__(self, peer: Peer, led: "LedPartition", now: float) -> None:
        self.peer = peer
        self.led = led
        self.state = IDLE
        # The next offset to send. Invariant: matched <= sent <= led.end; equal to led.end if LIVE.
        self.sent = 0
        # The follower's durable end, in a log that was compared with the leader's.
        self.matched = 0
        # The high watermark waits for this follower: it is in sync, or was proposed.
        self.is_counted = False
        # When it last made progress, or began to be behind.
        self.acknowledged_at = now
        # It is in sync and has been behind for too long.
        self.is_silent = False
        # It is in sync and lacks committed records: its disk was lost.
        self.is_lost = False
        self.is_queued = False
        # The number of the read that is under way for it; 0: none.
        self.reading = 0

    def stop(self) -> None:
        """Sends nothing more until the follower asks again."""
        self.state = IDLE
        self.reading = 0

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        if self.state == IDLE:
            return
        assert 0 <= self.matched <= self.sent <= self.led.end, "matched <= sent <= end"
        assert self.state != LIVE or self.sent == self.led.end, "a live follower was sent less"


class LedPartition:
    """A partition that this node leads, under one epoch."""

    def __init__(self, partition: int, info: PartitionInfo, end: int) -> None:
        self.partition = partition
        self.epoch = info.epoch
        self.epoch_bytes = EPOCH.pack(info.epoch)
        self.info = info
        # The end of the log when this epoch began, and the end of the batches closed since.
        # Invariant: start <= end.
        self.start = end
        self.end = end
        self.followers: dict[str, Progress] = {}
        # The followers that the high watermark waits for.
        self.counted: list[Progress] = []
        # Replicas in sync that are not silent, this node included.
        self.alive = len(info.in_sync)
        # The in-sync set proposed last at the present version of the metadata, and when.
        self.proposal: tuple[str, ...] | None = None
        self.proposed_at = 0.0
        # The high watermark must be computed again when more is durable.
        self.is_dirty = False
        self.is_led = True
        self._recent: list[bytes] = []
        self._bases: list[int] = []
        # The number of dropped batches at the front of the lists. They are cut off together,
        # because a `del` for each would move the whole list.
        self._dropped = 0

    def is_compared(self) -> bool:
        """True if all replicas in sync follow this leader: their logs were compared with its own,
        and have no more than it."""
        return all(each.state != IDLE for each in self.counted)

    def add_recent(self, base: int, batch: bytes) -> None:
        """Keeps a batch in memory for followers that are slightly behind."""
        self._recent.append(batch)
        self._bases.append(base)

    def drop_recent(self) -> None:
        """Drops all batches in memory."""
        self._recent = []
        self._bases = []
        self._dropped = 0

    def drop_oldest(self) -> int:
        """Drops the oldest batch in memory. Returns its size in bytes."""
        size = len(self._recent[self._dropped])
        assert size, "a batch is dropped twice"
        self._recent[self._dropped] = b""
        self._dropped += 1
        if self._dropped * 2 >= len(self._recent):
            del self._recent[: self._dropped]
            del self._bases[: self._dropped]
            self._dropped = 0
        return size

    def oldest_end(self) -> int:
        """The offset at which the oldest batch in memory ends."""
        following = self._dropped + 1
        return self._bases[following] if following < len(self._bases) else self.end

    def recent_bytes(self) -> int:
        """The size of the batches in memory."""
        return sum(map(len, self._recent))

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        assert self.start <= self.end, "the epoch ends before it begins"
        assert 1 <= self.alive <= len(self.counted) + 1, "more replicas live than are counted"
        for progress in self.followers.values():
            progress.check()
            assert progress.is_counted == (progress in self.counted), "the counted followers"

    def recent(self, start: int, bytes_max: int) -> list[bytes]:
        """The batches in memory from `start` on; none if no batch there begins at `start`."""
        at = bisect_left(self._bases, start, self._dropped)
        if at == len(self._bases) or self._bases[at] != start:
            return []
        found: list[bytes] = []
        size = 0
        while at < len(self._recent) and size < bytes_max:
            found.append(self._recent[at])
            size += len(self._recent[at])
            at += 1
        return found

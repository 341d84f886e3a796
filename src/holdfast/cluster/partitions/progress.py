"""What a leader knows about its partition and about those who follow it."""

from bisect import bisect_left
from collections import deque
from typing import Final

from holdfast.cluster.metadata.model import PartitionInfo
from holdfast.cluster.partitions.codec import EPOCH

IDLE: Final = 0
"""Has not asked under this epoch, or must ask again."""
CATCHING_UP: Final = 1
LIVE: Final = 2
"""Was sent everything; gets each batch when it is closed."""


class Peer:
    """The link to another node, as the leader of some partitions sees it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.is_connected = False
        # As its FOLLOW said.
        self.incarnation = ""
        # Bytes of batches on this link.
        self.sent_bytes = 0
        self.received_bytes = 0
        # Of the next REPLICATE frame.
        self.epochs: list[bytes] = []
        self.batches: list[bytes] = []
        # Those who wait for their turn to be fed.
        self.queue: deque[Progress] = deque()
        self.reads = 0

    def restart(self, is_connected: bool) -> None:
        self.is_connected = is_connected
        self.incarnation = ""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.epochs = []
        self.batches = []
        for progress in self.queue:
            progress.is_queued = False
        self.queue.clear()

    def outstanding_bytes(self) -> int:
        return self.sent_bytes - self.received_bytes

    def add(self, epoch: bytes, batch: bytes) -> None:
        self.epochs.append(epoch)
        self.batches.append(batch)
        self.sent_bytes += len(batch)


class Progress:
    """Of one follower in one partition under one epoch."""

    def __init__(self, peer: Peer, led: "LedPartition", now: float) -> None:
        self.peer = peer
        self.led = led
        self.state = IDLE
        # The next offset to send.
        self.sent = 0
        # The end of what it has durably, of the same log as the leader's.
        self.matched = 0
        # The high watermark waits for it: it is in sync, or that was proposed.
        self.is_counted = False
        # When it last showed that it gets on, or began to be behind.
        self.heard_at = now
        # In sync and behind for too long.
        self.is_silent = False
        # In sync without having all that is committed: its disk was lost.
        self.is_lost = False
        self.is_queued = False
        # The read that is under way for it; 0: none.
        self.reading = 0

    def stop(self) -> None:
        self.state = IDLE
        self.reading = 0


class LedPartition:
    """A partition that this node leads, under one epoch."""

    def __init__(self, partition: int, info: PartitionInfo, end: int) -> None:
        self.partition = partition
        self.epoch = info.epoch
        self.epoch_bytes = EPOCH.pack(info.epoch)
        self.info = info
        # Where the log ended when this epoch began, and the end of what was closed since.
        self.start = end
        self.end = end
        self.followers: dict[str, Progress] = {}
        # Those of them that the high watermark waits for.
        self.counted: list[Progress] = []
        # Replicas in sync that are not silent, this node included.
        self.alive = len(info.in_sync)
        # The in-sync set proposed last at the present version of the metadata, and when.
        self.proposal: tuple[str, ...] | None = None
        self.proposed_at = 0.0
        # Among those whose high watermark is to be looked at when more is durable.
        self.is_dirty = False
        self.is_led = True
        self._recent: list[bytes] = []
        self._bases: list[int] = []
        # Those of them that are gone already; cut off now and then.
        self._dropped = 0

    def keep(self, base: int, batch: bytes) -> None:
        self._recent.append(batch)
        self._bases.append(base)

    def drop_oldest(self) -> int:
        """Forget the oldest batch in memory; returns its size."""
        size = len(self._recent[self._dropped])
        self._recent[self._dropped] = b""
        self._dropped += 1
        if self._dropped * 2 >= len(self._recent):
            del self._recent[: self._dropped]
            del self._bases[: self._dropped]
            self._dropped = 0
        return size

    def oldest_end(self) -> int:
        """Where the oldest batch in memory ends."""
        following = self._dropped + 1
        return self._bases[following] if following < len(self._bases) else self.end

    def recent(self, start: int, bytes_max: int) -> list[bytes]:
        """Batches in memory, the first one beginning at `start`; none if that is not there."""
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

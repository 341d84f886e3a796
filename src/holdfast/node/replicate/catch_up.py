"""Feeds followers that are behind: from memory if the batches are still there, else by reads.

The partitions of a node take turns, each with a bounded piece. No piece is sent more than a window
ahead of the node's acknowledgements. Followers that the high watermark waits for come first, and
without a limit of bytes per second. That limit keeps the other followers from starving live
traffic.
"""

from collections import deque
from typing import Final

from holdfast.node.frame_kinds import REPLICATE
from holdfast.node.replicate.codec import range_of, replicate_parts
from holdfast.node.replicate.effects import ReadBatches, Send
from holdfast.node.replicate.progress import CATCHING_UP, LIVE, LedPartition, Peer, Progress
from holdfast.node.replicate.state import ReplicaState

READ_AGAIN_S: Final = 0.1
"""The seconds after a useless read before the next one. Its batches are not in the file yet, or are
damaged. Also the seconds between two looks whether a paused replica may go on."""


class CatchUp:
    """The queues and reads of all followers that are behind, for the partitions led here."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._config = state.config
        self._requests = 0
        self._reads: dict[int, Progress] = {}
        self._tokens = state.read_tokens
        # Nodes whose next read waits for tokens.
        self._blocked: list[Peer] = []
        # (time, follower) after a read that found nothing, or while it is paused.
        self._later: deque[tuple[float, Progress]] = deque()

    def enqueue(self, progress: Progress) -> None:
        """Queues the follower; before the others if commits wait for it."""
        if progress.is_queued:
            return
        progress.is_queued = True
        if progress.is_counted:
            progress.peer.queue.appendleft(progress)
        else:
            progress.peer.queue.append(progress)

    def pump(self, peer: Peer, now: float) -> None:
        """Feeds the node until its window is full."""
        window = self._config.catch_up_window_bytes
        queue = peer.queue
        while queue and peer.outstanding_bytes() < window:
            progress = queue[0]
            if progress.state == CATCHING_UP and self._is_paused(progress):
                queue.popleft()
                progress.is_queued = False
                self._later.append((now + READ_AGAIN_S, progress))
                continue
            if progress.state == CATCHING_UP and not self._feed(progress, now):
                break
            queue.popleft()
            progress.is_queued = False
            if progress.state == CATCHING_UP and not progress.reading:
                self.enqueue(progress)
        flush(self._state, peer)

    def _is_paused(self, progress: Progress) -> bool:
        """Whether the follower is a replica being added, and an operator has paused moves."""
        metadata = self._state.metadata
        adding = progress.led.info.adding
        return metadata is not None and metadata.is_paused and progress.peer.node in adding

    def _feed(self, progress: Progress, now: float) -> bool:
        """Sends one piece from memory, or starts the read of one. Returns False if the follower has
        to wait."""
        led = progress.led
        batches = led.recent(progress.sent, self._config.read_bytes)
        if batches:
            self._send(progress, batches)
            return True
        peer = progress.peer
        if peer.reads >= self._config.reads_max:
            return False
        if not progress.is_counted and not self._tokens.may_read(now):
            if peer not in self._blocked:
                self._blocked.append(peer)
            return False
        self._requests += 1
        self._reads[self._requests] = progress
        progress.reading = self._requests
        peer.reads += 1
        self._state.effects.append(
            ReadBatches(
                self._requests, peer.node, led.partition, progress.sent, self._config.read_bytes
            )
        )
        return True

    def handle_batches(self, request: int, batches: list[bytes], now: float) -> Progress | None:
        """Sends the batches of a finished read. Returns the follower if the log no longer has its
        next batch."""
        progress = self._reads.pop(request, None)
        if progress is None:
            return None
        progress.peer.reads -= 1
        assert progress.peer.reads >= 0, "a read ends twice"
        if progress.reading == request:
            progress.reading = 0
            if not progress.is_counted:
                self._tokens.charge(sum(map(len, batches)))
            if self._send(progress, batches):
                self.enqueue_if_behind(progress)
            elif progress.sent < self._state.log.start_offsets[progress.led.partition]:
                return progress
            else:
                self._later.append((now + READ_AGAIN_S, progress))
        self.pump(progress.peer, now)
        return None

    def enqueue_if_behind(self, progress: Progress) -> None:
        if progress.state == CATCHING_UP:
            self.enqueue(progress)

    def _send(self, progress: Progress, batches: list[bytes]) -> bool:
        """Sends the batches that continue where the follower is. Returns False if none does."""
        led = progress.led
        peer = progress.peer
        start = progress.sent
        for batch in batches:
            _, base, end, _ = range_of(batch)
            # A gap in a read means that the batch is damaged, or was deleted meanwhile.
            if base != progress.sent or not base < end <= led.end:
                break
            peer.add(led.epoch_bytes, batch)
            progress.sent = end
        progress.check()
        if progress.sent == led.end:
            progress.state = LIVE
        return progress.sent > start

    def timer(self) -> float | None:
        due = self._later[0][0] if self._later else None
        if self._blocked:
            at = self._tokens.timer()
            due = at if due is None else min(at, due)
        return due

    def handle_timers(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            progress = self._later.popleft()[1]
            if progress.state == CATCHING_UP and not progress.reading:
                self.enqueue(progress)
                self.pump(progress.peer, now)
        if self._blocked and self._tokens.may_read(now):
            blocked, self._blocked = self._blocked, []
            for peer in blocked:
                self.pump(peer, now)


class RecentBatches:
    """The limit on the memory for recent batches of all partitions. A batch that is not durable
    here stays, because it cannot be read from the disk yet."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._order: deque[LedPartition] = deque()
        self.size_bytes = 0

    def clear(self) -> None:
        """Drops all batches."""
        for led in self._order:
            led.drop_recent()
        self._order.clear()
        self.size_bytes = 0

    def add(self, led: LedPartition, base: int, batch: bytes) -> None:
        """Keeps a batch, and drops the oldest ones above the limit."""
        led.add_recent(base, batch)
        self._order.append(led)
        self.size_bytes += len(batch)
        durable = self._state.log.durable_offset
        while self.size_bytes > self._state.config.recent_bytes_max:
            oldest = self._order[0]
            if oldest.is_led and oldest.oldest_end() > durable[oldest.partition]:
                break
            self._order.popleft()
            self.size_bytes -= oldest.drop_oldest()
        assert self.size_bytes >= 0, "fewer bytes of recent batches than none"

    def check(self) -> None:
        """Raises `AssertionError` unless `size_bytes` is the sum over all batches in memory."""
        assert self.size_bytes == sum(led.recent_bytes() for led in set(self._order))


def flush(state: ReplicaState, peer: Peer) -> None:
    """Sends the batches collected for the node, in one frame unless that gets too large."""
    batches = peer.batches
    if not batches:
        return
    epochs = peer.epochs
    peer.epochs = []
    peer.batches = []
    largest = state.config.frame_bytes
    start = 0
    size = 0
    for at, batch in enumerate(batches):
        if size and size + len(batch) > largest:
            parts = replicate_parts(epochs[start:at], batches[start:at])
            state.effects.append(Send(peer.node, REPLICATE, parts))
            start = at
            size = 0
        size += len(batch)
    if start:
        epochs = epochs[start:]
        batches = batches[start:]
    state.effects.append(Send(peer.node, REPLICATE, replicate_parts(epochs, batches)))

"""Aligns this node's log with the leader of each partition, before it sends records there.

A record sent earlier may be in the leader's log, or lost with the leader or the link. So after each
change of the leader, its epoch or the link, records wait. They leave once this node's own log has
everything that the leader's log had when it received the request for its end. The request takes the
same link as the records, behind them.

Counter-example: the link breaks after a FORWARD, and the records are sent again at once. The leader
has stored them already, and plain QoS 1 messages are stored twice.

So a reply counts only if its question was sent after the partition was lost. Counter-example: this
node begins to store a partition that the same leader leads in the same epoch. The reply to a
question about another partition, sent before the FORWARD, arrives then, with an end before it.

Nor does such a record leave before all replicas in sync follow the leader, so that none of them has
more than it. Counter-example: n2 has appended a message and is deposed. n3 leads, has not received
it, and refuses it because its disk is full. n2, in sync, leads again and commits it. The client
sends it once more as another message.

Where no pending record was sent before, there is nothing to find, and records leave at once.

A partition that this node does not store is aligned by its feed (`feeds`).
"""

from collections.abc import Callable
from typing import Final

from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import BARRIER, BARRIER_RESULT
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.reads.read_barrier import (
    ALIGNMENT,
    barrier_request,
    decode_barrier,
    encode_log_ends,
    is_alignment,
)
from holdfast.node.replicate.replication import Replication

ASK_AGAIN_S: Final = 0.03
"""The interval in seconds between requests: the next leader may apply the metadata later than this
node."""


class LeaderSync:
    """The partitions whose leader may not receive records yet, and the log ends that leaders
    reported."""

    def __init__(
        self, context: ClusterContext, forwarding: RecordForwarder, replication: Replication
    ) -> None:
        self._context = context
        self._forwarding = forwarding
        self._replication = replication
        self._waiting: set[int] = set(range(context.journal.partitions)) - context.unstored
        # Called with a partition that is not stored here: its next feed aligns it.
        self.on_lost: Callable[[int], None] = lambda partition: None
        self._question = ALIGNMENT
        # Per partition the first question whose reply counts.
        self._counts_from = [ALIGNMENT] * context.journal.partitions
        # Per partition the reply of its leader: leader, epoch, end of its log.
        self._ends: dict[int, tuple[str, int, int]] = {}
        self._asked_at = -1.0
        # The nodes that this leader has not told all of its ends, and their newest requests.
        self._untold: dict[str, bytes] = {}

    def lose(self, partition: int) -> None:
        """Stops sending to the partition: its leader, the epoch or the link has changed."""
        self._forwarding.stop(partition)
        self._ends.pop(partition, None)
        self._counts_from[partition] = self._question + 1
        if not self._context.is_stored(partition):
            self._waiting.discard(partition)
            self.on_lost(partition)
            return
        self._waiting.add(partition)
        self._asked_at = -1.0

    def lose_node(self, node: str) -> None:
        """Stops sending to the partitions that `node` leads."""
        self._untold.pop(node, None)
        for partition in range(len(self._context.leading)):
            if self._context.leader(partition) == node:
                self.lose(partition)

    def lead(self, partition: int) -> bool:
        """Begins with a partition that this node leads now. True if its records need not wait."""
        self._waiting.discard(partition)
        self._ends.pop(partition, None)
        self._forwarding.stop(partition)
        return not self._forwarding.has_doubt(partition)

    def compare(self) -> list[int]:
        """Returns the led partitions whose replicas in sync all follow now, for the first time in
        this epoch, and tells their ends to the nodes that have asked."""
        uncompared = self._context.uncompared
        found: list[int] = []
        for partition in sorted(uncompared):
            led = self._replication.leading.led[partition]
            if led is not None and led.is_compared():
                found.append(partition)
        uncompared.difference_update(found)
        if found:
            for node, request in sorted(self._untold.items()):
                self.tell(node, request)
        return found

    def tell(self, node: str, request: bytes) -> None:
        """Replies to a BARRIER of another node. Raises BadFrame when it is malformed."""
        ends = encode_log_ends(self._context, request)
        self._context.send(node, BARRIER_RESULT, ends)
        if not self._context.uncompared:
            self._untold.pop(node, None)
        elif is_alignment(decode_barrier(request)[0]):
            self._untold[node] = request

    def answered(self, node: str, question: int, entries: list[tuple[int, int, int]]) -> None:
        """Takes the log ends of the partitions that `node` leads."""
        for partition, epoch, end in entries:
            if partition in self._waiting and question >= self._counts_from[partition]:
                self._ends[partition] = (node, epoch, end)

    def take_aligned(self) -> list[tuple[int, str, int]]:
        """Returns (partition, leader, epoch) of the partitions that are aligned now."""
        if not self._waiting:
            return []
        found: list[tuple[int, str, int]] = []
        journal = self._context.journal
        for partition in list(self._waiting):
            leader, epoch = self._context.leader(partition), self._context.epoch(partition)
            if self._replication.followed_epoch(partition) != epoch or not epoch:
                continue
            told, epoch_told, end = self._ends.get(partition, ("", 0, 0))
            has_end = (told, epoch_told) == (leader, epoch) and journal.next_offset[
                partition
            ] >= end
            if has_end or not self._forwarding.has_doubt(partition):
                self._waiting.discard(partition)
                self._ends.pop(partition, None)
                found.append((partition, leader, epoch))
        return found

    def ask(self, now: float) -> None:
        """Requests the log ends from leaders that have not reported one for the present epoch."""
        if not self._waiting or now < self._asked_at + ASK_AGAIN_S:
            return
        leaders: set[str] = set()
        for partition in self._waiting:
            leader = self._context.leader(partition)
            answer = self._ends.get(partition)
            if answer is not None and answer[:2] == (leader, self._context.epoch(partition)):
                continue
            if leader in self._context.connected and self._replication.followed_epoch(partition):
                leaders.add(leader)
        # Without a connected leader the next event, not a timer, triggers the request.
        self._asked_at = now if leaders else -1.0
        self._question += bool(leaders)
        for leader in sorted(leaders):
            self._context.send(leader, BARRIER, barrier_request(self._question))

    def timer(self) -> float | None:
        return self._asked_at + ASK_AGAIN_S if self._waiting and self._asked_at >= 0 else None

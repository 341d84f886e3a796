"""Waits until this node has applied everything that was committed anywhere before.

This node requests the log ends from the leaders of all partitions, and applies records up to those
ends. A deposed leader that does not know of its successor would report too low an end. So the
metadata is read as well (`read_index`). A reply counts only if its epoch is not below the one that
the metadata then has. A node that is cut off from the majority together with such a leader waits.

The end that counts is that of the log, not the high watermark, because a new leader does not know
yet which of its records were committed before it. Counter-example: A commits record 11, which
acknowledges a PUBREL, and dies. B leads with a high watermark of 10. A session that is resumed
after a barrier at 10 has the packet id again. The price: a barrier also waits for records that are
not committed yet, at most as long as their publishers do. Records that the next leader does not
have are waited for no longer, because its epoch replaces the reply.

This is the read index of Raft (thesis, section 6.4), for partitions that do not use Raft.
"""

import struct
from collections.abc import Callable
from typing import Final

from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import BARRIER, BadFrame
from holdfast.node.node_state import NodeState
from holdfast.node.reads.read_index import NOTHING, MetadataReads

ASK_AGAIN_S: Final = 0.1
"""The interval in seconds between requests to leaders that have not replied."""
BEHIND_S: Final = 2.0
"""The time in seconds after which a node that has not passed a barrier counts as behind others."""
ASKING_MAX: Final = 8
"""The most barriers for which requests are under way. A barrier that begins later waits for one of
them."""
ALIGNMENT: Final = 1 << 63
"""The number from which LeaderSync counts its questions. Version 0.1 sent 0 for all of them."""

_REQUEST: Final = struct.Struct("<Q")
_RESULT: Final = struct.Struct("<HIQ")


class Barrier:
    """One read barrier and the replies of the leaders so far."""

    def __init__(self, number: int, partitions: int) -> None:
        self.number = number
        # Replies to questions and reads from these numbers on count, because they began after the
        # barrier, at this time. NOTHING: none began.
        self.question = NOTHING
        self.read = NOTHING
        self.asked_at = 0.0
        # Per partition the epoch and the log end that its leader reported; an end of -1: no reply.
        self.epochs = [0] * partitions
        self.ends = [-1] * partitions

    def add_log_end(self, partition: int, epoch: int, end: int) -> None:
        """Takes a reported log end, unless one of a higher epoch is known."""
        if self.ends[partition] < 0 or epoch > self.epochs[partition]:
            self.epochs[partition] = epoch
            self.ends[partition] = end


class Barriers:
    """The read barriers of this node that are not passed yet.

    Invariant: a reply counts for a barrier only if its request was sent after the barrier began.
    Counter-example: a leader reports end 10, commits record 10, a barrier begins and takes that
    reply. The node passes it without record 10.
    """

    def __init__(self, state: NodeState, context: ClusterContext, reads: MetadataReads) -> None:
        self._state = state
        self._context = context
        self.reads = reads
        self._number = 0
        self._question = 0
        self._sent_at = 0.0
        # The barriers that are not passed, oldest first. Their numbers and questions ascend.
        self.waiting: dict[int, Barrier] = {}
        self.fed_since: Callable[[int], float] = lambda partition: 0.0
        """When the feed of a partition was requested, or lost. Parts sets it."""

    def begin(self) -> int:
        """Returns the number of a barrier that begins now. All barriers of one turn are one."""
        newest = next(reversed(self.waiting.values()), None)
        if newest is not None and newest.question == NOTHING:
            return newest.number
        self._number += 1
        barrier = Barrier(self._number, len(self._context.leading))
        self.waiting[barrier.number] = barrier
        return barrier.number

    def has_passed(self, number: int) -> bool:
        """True if the barrier is passed: every partition was reached.

        There is no time-out. A barrier waits for a partition without a reachable leader for as long
        as that lasts, because what follows it cannot be undone. Counter-example with a time-out: a
        coordinator that does not reach the leader of a session's home ends the group of that
        session.
        """
        return number not in self.waiting

    def lacking(self, number: int) -> set[int]:
        """Returns the partitions that a barrier has not reached, or none before it has read the
        metadata. A part of the node that does without them permits only what can be undone."""
        barrier = self.waiting.get(number)
        if barrier is None or barrier.read == NOTHING or not self.reads.has_passed(barrier.read):
            return set()
        return {each for each in range(len(barrier.ends)) if not self._is_reached(barrier, each)}

    def nodes_ahead(self) -> list[str]:
        """Returns the nodes that have what the oldest barrier has waited for here for `BEHIND_S`.

        Empty unless the partitions that it lacks commit records without this node. Only then can
        another node pass a barrier that this one cannot. Empty while one of them has a new feed:
        its leader has just come, and every node that it feeds waits for it.
        """
        oldest = next(iter(self.waiting.values()), None)
        if oldest is None or self._state.now < oldest.asked_at + BEHIND_S:
            return []
        lacking = self.lacking(oldest.number)
        if any(self._state.now < self.fed_since(each) + BEHIND_S for each in lacking):
            return []
        ahead = [set(self._context.nodes_ahead(each)) for each in lacking]
        return sorted(set.intersection(*ahead)) if ahead else []

    def handle_reply(self, question: int, entries: list[tuple[int, int, int]]) -> None:
        """Takes the log ends in a reply to `question`."""
        for barrier in self.waiting.values():
            if NOTHING != barrier.question <= question:
                for partition, epoch, end in entries:
                    if partition < len(barrier.ends):
                        barrier.add_log_end(partition, epoch, end)

    def advance(self) -> bool:
        """Sends due requests at the end of a turn. Returns True if a barrier was passed."""
        if not self.waiting:
            return False
        self._send_question()
        passed = False
        for barrier in list(self.waiting.values()):
            if self._is_passed(barrier):
                del self.waiting[barrier.number]
                passed = True
        return passed

    def check(self) -> None:
        """Raises `AssertionError` unless the barriers are in the order in which they began."""
        asked = [each.question for each in self.waiting.values() if each.question != NOTHING]
        assert asked == sorted(asked), "a later barrier asked earlier"
        assert list(self.waiting) == sorted(self.waiting), "the barriers are out of order"

    def _is_passed(self, barrier: Barrier) -> bool:
        if barrier.read == NOTHING or not self.reads.has_passed(barrier.read):
            return False
        return self._context.is_whole and all(
            self._is_reached(barrier, partition) for partition in range(len(barrier.ends))
        )

    def _is_reached(self, barrier: Barrier, partition: int) -> bool:
        reached = self._state.delivered[partition]
        return 0 <= barrier.ends[partition] <= reached and not self._is_outdated(barrier, partition)

    def _is_outdated(self, barrier: Barrier, partition: int) -> bool:
        """True if the reply came from a leader with a lower epoch than the metadata has."""
        return barrier.epochs[partition] < self._context.epoch(partition)

    def _send_question(self) -> None:
        """Sends one question for all barriers: at once for new ones, repeated every
        `ASK_AGAIN_S`."""
        asking = list(self.waiting.values())[:ASKING_MAX]
        is_begun = asking[-1].question == NOTHING
        if not is_begun and self._state.now < self._sent_at + ASK_AGAIN_S:
            return
        self._sent_at = self._state.now
        self._question += 1
        leaders: dict[str, None] = {}
        for barrier in asking:
            if barrier.question == NOTHING:
                barrier.question = self._question
                barrier.asked_at = self._state.now
                barrier.read = self.reads.begin()
            for partition, end in enumerate(barrier.ends):
                if end < 0 or self._is_outdated(barrier, partition):
                    self._question_leader(barrier, partition, leaders)
        for leader in leaders:
            self._context.send(leader, BARRIER, barrier_request(self._question))

    def _question_leader(self, barrier: Barrier, partition: int, leaders: dict[str, None]) -> None:
        if self._context.leads(partition):
            end = self._context.journal.next_offset[partition]
            barrier.add_log_end(partition, self._context.leading[partition], end)
        else:
            leaders[self._context.leader(partition)] = None

    def timer(self) -> float | None:
        """Returns the time of the next request, or None if no barrier waits."""
        return self._sent_at + ASK_AGAIN_S if self.waiting else None


def barrier_request(question: int) -> bytes:
    return _REQUEST.pack(question)


def is_alignment(question: int) -> bool:
    """True if the question is one of LeaderSync."""
    return question >= ALIGNMENT or not question


def encode_log_ends(context: ClusterContext, payload: bytes) -> bytes:
    """Encodes the log ends of the partitions that this node leads, or that it has compared if the
    question is for an alignment. Raises BadFrame when the request is malformed."""
    if len(payload) != _REQUEST.size:
        raise BadFrame(f"barrier of {len(payload)} bytes")
    parts = [payload]
    left = context.uncompared if is_alignment(*_REQUEST.unpack(payload)) else ()
    for partition, epoch in enumerate(context.leading):
        if epoch and partition not in left:
            parts.append(_RESULT.pack(partition, epoch, context.journal.next_offset[partition]))
    return b"".join(parts)


def decode_barrier(payload: bytes) -> tuple[int, list[tuple[int, int, int]]]:
    """Returns the question, and (partition, epoch, end) of each partition. Raises BadFrame when the
    reply is malformed."""
    try:
        (question,) = _REQUEST.unpack_from(payload)
        return question, list(_RESULT.iter_unpack(payload[_REQUEST.size :]))
    except struct.error as error:
        raise BadFrame(f"answer to a barrier: {error}") from None

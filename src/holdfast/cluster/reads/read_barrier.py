"""Waiting until this node has applied everything that was committed anywhere before.

The leaders of all partitions are asked where their logs end, and this node applies them up to
there. A node that leads no longer and does not know it yet would leave out what was committed
without it: so the metadata is read as well (`metadata_reads`), and an answer counts only if its
epoch is not below the one that is known then. Whoever is cut off from the majority together with
such a leader waits.
"""

import struct
from typing import Final

from holdfast.broker.state import NodeState
from holdfast.cluster.context import ClusterContext
from holdfast.cluster.frame_kinds import BARRIER, BadFrame
from holdfast.cluster.reads.read_index import NOTHING, MetadataReads

ASK_AGAIN_S: Final = 0.1
WAIT_S: Final = 5.0
"""How long after the metadata is read an impatient barrier waits for what nobody leads."""
ASKING_MAX: Final = 8
"""Barriers that are under way; what begins meanwhile is one more, and waits for them."""
ALIGNMENT: Final = 0
"""The number of questions that are asked by alignment.Alignment."""

_REQUEST: Final = struct.Struct("<Q")
_RESULT: Final = struct.Struct("<HIQ")


class Barrier:
    def __init__(self, number: int, partitions: int, is_patient: bool) -> None:
        self.number = number
        self.is_patient = is_patient
        # Questions and reads from these on were asked after it began; NOTHING: none was.
        self.question = NOTHING
        self.read = NOTHING
        # Of one that is not patient, once the metadata is read.
        self.deadline = 0.0
        # Per partition, under which epoch its leader has said that its log ends where; -1: it has
        # not.
        self.epochs = [0] * partitions
        self.ends = [-1] * partitions

    def answer(self, partition: int, epoch: int, end: int) -> None:
        if self.ends[partition] < 0 or epoch > self.epochs[partition]:
            self.epochs[partition] = epoch
            self.ends[partition] = end


class Barriers:
    def __init__(self, state: NodeState, fabric: ClusterContext, reads: MetadataReads) -> None:
        self._state = state
        self._fabric = fabric
        self._reads = reads
        self._number = 0
        self._question = ALIGNMENT
        self._asked_at = 0.0
        # Those that are not passed, oldest first.
        self._waiting: dict[int, Barrier] = {}

    def begin_at(self, question: int) -> None:
        """Questions are numbered after this one, so that an answer to an earlier process of this
        node is not taken for one to this."""
        self._question = question

    def begin(self, *, is_patient: bool = False) -> int:
        """What is begun in one turn is one barrier. Patient: a partition that nobody leads, or that
        cannot be reached, stops it for as long as that lasts."""
        for barrier in reversed(self._waiting.values()):
            if barrier.question != NOTHING:
                break
            if barrier.is_patient == is_patient:
                return barrier.number
        self._number += 1
        barrier = Barrier(self._number, len(self._fabric.leading), is_patient)
        self._waiting[barrier.number] = barrier
        return barrier.number

    def has_passed(self, number: int) -> bool:
        return number not in self._waiting

    def lacking(self, number: int) -> set[int]:
        """Partitions that a barrier waits for, once it knows who leads them; before that none."""
        barrier = self._waiting.get(number)
        if barrier is None or barrier.read == NOTHING or not self._reads.has_passed(barrier.read):
            return set()
        return {each for each in range(len(barrier.ends)) if not self._has_come(barrier, each)}

    def answered(self, question: int, entries: list[tuple[int, int, int]]) -> None:
        for barrier in self._waiting.values():
            if NOTHING != barrier.question <= question:
                for partition, epoch, end in entries:
                    if partition < len(barrier.ends):
                        barrier.answer(partition, epoch, end)

    def advance(self) -> bool:
        """End of a turn: ask whom there is to ask; True if a barrier was passed."""
        if not self._waiting:
            return False
        self._ask()
        passed = False
        for barrier in list(self._waiting.values()):
            if self._is_passed(barrier):
                del self._waiting[barrier.number]
                passed = True
        return passed

    def _is_passed(self, barrier: Barrier) -> bool:
        if barrier.read == NOTHING or not self._reads.has_passed(barrier.read):
            return False
        if not barrier.is_patient:
            if not barrier.deadline:
                barrier.deadline = self._state.now + WAIT_S
            elif barrier.deadline <= self._state.now:
                return True
        return self._fabric.is_whole and all(
            self._has_come(barrier, partition) for partition in range(len(barrier.ends))
        )

    def _has_come(self, barrier: Barrier, partition: int) -> bool:
        reached = self._state.delivered[partition]
        return 0 <= barrier.ends[partition] <= reached and not self._is_outdated(barrier, partition)

    def _is_outdated(self, barrier: Barrier, partition: int) -> bool:
        """Was it answered by a leader that was not the last that is known here?"""
        return barrier.epochs[partition] < self._fabric.epoch(partition)

    def _ask(self) -> None:
        """Newly begun ones at once, the others now and then; one question for all of them."""
        asking = list(self._waiting.values())[:ASKING_MAX]
        is_begun = asking[-1].question == NOTHING
        if not is_begun and self._state.now < self._asked_at + ASK_AGAIN_S:
            return
        self._asked_at = self._state.now
        self._question += 1
        leaders: dict[str, None] = {}
        for barrier in asking:
            if barrier.question == NOTHING:
                barrier.question = self._question
                barrier.read = self._reads.begin()
            for partition, end in enumerate(barrier.ends):
                if end < 0 or self._is_outdated(barrier, partition):
                    self._ask_leader(barrier, partition, leaders)
        for leader in leaders:
            self._fabric.send(leader, BARRIER, barrier_request(self._question))

    def _ask_leader(self, barrier: Barrier, partition: int, leaders: dict[str, None]) -> None:
        if self._fabric.leads(partition):
            end = self._fabric.journal.next_offset[partition]
            barrier.answer(partition, self._fabric.leading[partition], end)
        else:
            leaders[self._fabric.leader(partition)] = None

    def timer(self) -> float | None:
        return self._asked_at + ASK_AGAIN_S if self._waiting else None


def barrier_request(question: int) -> bytes:
    return _REQUEST.pack(question)


def barrier_answer(fabric: ClusterContext, payload: bytes) -> bytes:
    """Where the partitions end that this node leads. Raises BadFrame."""
    if len(payload) != _REQUEST.size:
        raise BadFrame(f"barrier of {len(payload)} bytes")
    parts = [payload]
    for partition, epoch in enumerate(fabric.leading):
        if epoch:
            parts.append(_RESULT.pack(partition, epoch, fabric.journal.next_offset[partition]))
    return b"".join(parts)


def decode_barrier(payload: bytes) -> tuple[int, list[tuple[int, int, int]]]:
    """The question, and (partition, epoch, end) each. Raises BadFrame."""
    try:
        (question,) = _REQUEST.unpack_from(payload)
        return question, list(_RESULT.iter_unpack(payload[_REQUEST.size :]))
    except struct.error as error:
        raise BadFrame(f"answer to a barrier: {error}") from None

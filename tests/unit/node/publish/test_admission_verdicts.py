"""The uncommitted and the committed state of a leader say the same about each record: wherever the
commit is, and whether this node led when the earlier records were appended."""

import random
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import pytest

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.record import Record
from tests.unit.node.publish.test_admission import EPOCH, NUMBERED, QOS_2, Bench

WAITING = log_record.FLAG_DELAYED | 1
WILL = log_record.FLAG_WILL | 1
NOTHING, COMMIT, LEAD, LEAD_BETWEEN = range(4)
"""Before a record. LEAD_BETWEEN: this node leads once half of the waiting records are applied.
That half may end within a batch."""


class Input(NamedTuple):
    """The fields of a record: see `Record`."""

    sequence: int
    epoch: int = 0
    flags: int = 0
    producer: bytes = b""
    kind: int = log_record.MESSAGE
    topic: bytes = b"t"
    payload: bytes = b""


def message(packet_id: int, epoch: int, life: int) -> Input:
    return Input(packet_id, epoch, QOS_2, b"%d" % life)


def release(packet_id: int, epoch: int) -> Input:
    return Input(packet_id, epoch, kind=log_record.RELEASE)


def retained(topic: bytes, payload: bytes = b"x", kind: int = log_record.MESSAGE) -> Input:
    return Input(0, 0, 1 | log_record.FLAG_RETAIN, kind=kind, topic=topic, payload=payload)


def forgotten(sequence: int, epoch: int) -> Input:
    return Input(sequence, epoch, 0, b"p", log_record.FORGOTTEN, payload=bytes(8))


DELAYED = Input(0, 0, WAITING, topic=b"$delayed/5/t")
INPUTS = {
    # The session begins with epoch 2, is resumed with 3, and is new with 5.
    "packet ids": [
        message(1, 2, 2),
        message(1, 3, 2),
        message(2, 3, 2),
        message(1, 5, 5),
        release(1, 2),
        release(1, 3),
        release(1, 5),
    ],
    "producers": [
        *(Input(number, epoch, NUMBERED, b"p") for epoch in (1, 2) for number in (1, 2)),
        forgotten(2, 1),
        forgotten(1, 2),
    ],
    "wills": [
        *(Input(epoch, 0, WILL) for epoch in (1, 2, 3)),
        *(Input(epoch, kind=log_record.WILL) for epoch in (1, 2)),
    ],
    # There is room for two topics.
    "retained": [
        retained(b"a"),
        retained(b"b", b"x" * 600),
        retained(b"c", b"x", log_record.RETAINED),
        retained(b"a", b""),
    ],
    "delayed": [
        DELAYED,
        Input(0, 0, WAITING),
        Input(0, kind=log_record.DELAYED),
        Input(1, 0, WAITING),
        Input(1, kind=log_record.DELAYED),
    ],
}


class Leader(Bench):
    """This node, and what its log has."""

    def __init__(self) -> None:
        super().__init__()
        config = self.images.state.config
        config.retained_max = 2
        config.retained_bytes_max = 1000
        self.uncommitted: list[Batch] = []
        self.verdicts: list[object] = []
        # A delayed message is committed before a record can name it.
        for _ in range(2):
            self.take(DELAYED)
        self.prepare(COMMIT)
        self.verdicts = []

    def prepare(self, step: int) -> None:
        if step == NOTHING:
            return
        group = self.journal.close_write_group()
        if group is not None:
            self.journal.wrote(group)
            self.journal.commit(group)
            self.uncommitted += group.built
        if step == COMMIT:
            self.apply(self.stored())
            self.admission.committed(0, self.stored())
            self.answers()
        else:
            self.admission.stop_leading(0)
            if step == LEAD_BETWEEN:
                self.apply((self.state.delivered[0] + self.stored() + 1) // 2)
            self.admission.start_leading(0, self.uncommitted)
        self.admission.check()

    def apply(self, end: int) -> None:
        """Commit and apply the records below `end`."""
        self.journal.advance(0, end)
        for batch in self.uncommitted:
            for record in batch.records():
                if self.state.delivered[0] <= record.offset < end:
                    self.images.apply(record)
        self.uncommitted = [batch for batch in self.uncommitted if batch.end_offset > end]
        self.state.delivered[0] = end

    def take(self, each: Input) -> None:
        """Notes whether the record is stored, or why not."""
        before = self.stored()
        builder = BatchBuilder(0, 0)
        self.ticket += 1
        builder.add(
            Record(
                0,
                each.kind,
                each.flags,
                topic=each.topic,
                client_id=b"c",
                producer=each.producer,
                producer_epoch=each.epoch,
                sequence=each.sequence,
                payload=each.payload,
                ticket=self.ticket,
            )
        )
        self.admission.forwarded("n2", EPOCH, 0, Batch(builder.build(0)))
        refused = [reason for _, reason in self.answers() if reason]
        self.verdicts.append(refused or self.stored() - before)


def verdicts(inputs: Sequence[Input], steps: Sequence[int]) -> list[object]:
    leader = Leader()
    for each, step in zip(inputs, steps, strict=True):
        leader.prepare(step)
        leader.take(each)
    return leader.verdicts


@pytest.mark.parametrize("field", INPUTS)
def test_verdicts_do_not_depend_on_the_commit(field: str) -> None:
    """Every sequence of three records."""
    for inputs in product(INPUTS[field], repeat=3):
        wanted = verdicts(inputs, [COMMIT] * 3)
        for steps in product((NOTHING, COMMIT, LEAD, LEAD_BETWEEN), repeat=2):
            assert verdicts(inputs, [NOTHING, *steps]) == wanted, (inputs, steps)


@pytest.mark.parametrize("seed", range(40))
def test_verdicts_of_long_sequences_do_not_depend_on_the_commit(seed: int) -> None:
    chance = random.Random(seed)
    every = [each for inputs in INPUTS.values() for each in inputs]
    for _ in range(10):
        inputs = chance.choices(every, k=12)
        wanted = verdicts(inputs, [COMMIT] * 12)
        for _ in range(5):
            steps = chance.choices((NOTHING, NOTHING, COMMIT, LEAD, LEAD_BETWEEN), k=12)
            assert verdicts(inputs, steps) == wanted, (inputs, steps)

"""Committed records are applied in slices: once each, in order, never above the high watermark."""

import random

import pytest

from holdfast.log.batch import Batch
from holdfast.log.journal.journal import Journal
from holdfast.log.record import MESSAGE, SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.node_state import STEPS_PER_TURN
from holdfast.node.publish.apply import (
    BACKLOG_SHARE,
    RECORDS_PER_TURN,
    SLICE_MAX,
    STATE_STEPS,
    Applier,
    ApplyingLog,
)
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from tests.support.journal_port import new_state

PARTITIONS = 3
TURN = RECORDS_PER_TURN + STEPS_PER_TURN


class Images(ReplicatedState):
    """Notes what is applied."""

    def __init__(self, state: RecordedState) -> None:
        super().__init__(state)
        self.applied: list[tuple[int, int]] = []

    def apply(self, record: Record) -> None:
        self.applied.append((record.partition, record.offset))


class Bench:
    """A leader of all partitions, with one record of a session after the other."""

    def __init__(self) -> None:
        self.journal = Journal(PARTITIONS, replicated=True)
        config = NodeConfig(partitions=PARTITIONS)
        self.state = new_state(config, self.journal)
        self.images = Images(RecordedState(config, self.journal))
        self.log = ApplyingLog(self.journal)
        self.settled: list[int] = []
        self.seen: list[tuple[int, int]] = []
        self.pending: dict[int, object] = {}
        self.applier = Applier(
            self.state,
            self.images,
            self.log,
            self.pending,
            lambda ticket, partition, client: self.settled.append(ticket),
            lambda record: None,
            lambda record: None,
        )
        self.applier.on_applied = self._applied
        for partition in range(PARTITIONS):
            self.journal.lead(partition, 1)

    def _applied(self, partition: int) -> None:
        self.seen.append((partition, self.state.delivered[partition]))

    def append(self, partition: int, count: int) -> None:
        for _ in range(count):
            ticket = len(self.pending) + 1
            self.pending[ticket] = None
            self.journal.append(Record(partition, SESSION, client_id=b"c", ticket=ticket))
        group = self.journal.close_write_group()
        assert group is not None
        self.journal.wrote(group)
        self.journal.commit(group)
        for batch in group.built:
            self.log.built(batch)

    def commit(self, partition: int, offset: int) -> None:
        self.log.advance(partition, offset)
        self.applier.apply_to(partition, offset)

    def turn(self) -> int:
        """Returns the number of records that it applied, those of the commits before included."""
        before = len(self.images.applied)
        self.state.run_work()
        self.applier.end_turn()
        for partition in range(PARTITIONS):
            assert self.state.delivered[partition] <= self.journal.high_watermark[partition]
        return len(self.images.applied) - before


def test_a_commit_of_many_records_is_applied_in_several_turns() -> None:
    bench = Bench()
    counts = [2 * TURN, 1, TURN]
    for partition, count in enumerate(counts):
        bench.append(partition, count)
    for partition, count in enumerate(counts):
        bench.commit(partition, count)
    at_once = RECORDS_PER_TURN // STATE_STEPS
    assert len(bench.images.applied) == at_once
    assert bench.state.delivered == [at_once, 0, 0]
    turns = 0
    while bench.state.work:
        assert bench.turn() <= STEPS_PER_TURN // STATE_STEPS + sum(counts) // BACKLOG_SHARE
        turns += 1
    assert turns >= sum(counts) // STEPS_PER_TURN - 1
    assert bench.state.delivered == counts
    assert sorted(bench.settled) == list(range(1, sum(counts) + 1))
    # What waits for a partition is informed of the last slice of it.
    assert {(partition, count) for partition, count in enumerate(counts)} <= set(bench.seen)
    assert not any(bench.log.uncommitted)


def test_a_backlog_that_grows_is_applied_in_larger_slices() -> None:
    """Otherwise its memory has no bound."""
    bench = Bench()
    for _ in range(100):
        bench.append(0, 1200)
        bench.append(1, 1200)
        for partition in range(2):
            bench.commit(partition, bench.journal.next_offset[partition])
        bench.turn()
    waiting = sum(bench.journal.high_watermark) - sum(bench.state.delivered)
    assert waiting < BACKLOG_SHARE * 2400
    bench.append(2, BACKLOG_SHARE * SLICE_MAX)
    bench.commit(2, BACKLOG_SHARE * SLICE_MAX)
    assert bench.turn() <= (SLICE_MAX + STEPS_PER_TURN) // STATE_STEPS


@pytest.mark.parametrize("seed", range(20))
def test_slices_apply_each_record_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench()
    for _ in range(60):
        partition = chance.randrange(PARTITIONS)
        step = chance.randrange(4)
        watermark = bench.journal.high_watermark[partition]
        end = bench.journal.next_offset[partition]
        if step == 0:
            bench.append(partition, chance.randint(1, 1500))
        elif step == 1 and watermark < end:
            bench.commit(partition, chance.randint(watermark + 1, end))
        elif step == 2:
            # A log is cut only where a batch begins.
            begins = [batch.base_offset for batch in bench.log.uncommitted[partition]]
            bench.log.truncate(partition, next((at for at in begins if at >= watermark), end))
        else:
            bench.turn()
    while bench.state.work:
        bench.turn()
    assert bench.state.delivered == bench.journal.high_watermark
    for partition, end in enumerate(bench.journal.high_watermark):
        applied = [offset for each, offset in bench.images.applied if each == partition]
        assert applied == list(range(end))
    assert len(bench.settled) == len(set(bench.settled)) == len(bench.images.applied)


def test_a_log_that_was_reset_below_a_commit_applies_nothing_uncommitted() -> None:
    bench = Bench()
    bench.append(0, 2 * TURN)
    bench.commit(0, 2 * TURN)
    bench.log.reset(0, 10)
    bench.state.delivered[0] = 10
    bench.append(0, 20)
    before = len(bench.images.applied)
    while bench.state.work:
        bench.turn()
    assert len(bench.images.applied) == before
    bench.commit(0, 15)
    assert [offset for _, offset in bench.images.applied[before:]] == [10, 11, 12, 13, 14]


def test_a_batch_can_be_applied_in_parts() -> None:
    bench = Bench()
    bench.append(0, TURN)
    assert isinstance(bench.log.uncommitted[0][0], Batch)
    for offset in (1, 1, 700, TURN):
        bench.commit(0, offset)
        while bench.state.work:
            bench.turn()
        bench.applier.check()
        assert bench.applier.tickets(0) == {(each + 1, b"c") for each in range(offset, TURN)}
    assert [offset for _, offset in bench.images.applied] == list(range(TURN))


def test_a_record_in_memory_is_as_the_log_has_it() -> None:
    """The clock of the leader steps back within a batch, and a follower reads that batch."""
    journal = Journal(1, replicated=True)
    log = ApplyingLog(journal)
    records = [Record(0, MESSAGE, timestamp_us=time_us, topic=b"t") for time_us in (9, 5, 12)]
    for record in records:
        journal.append(record)
    group = journal.close_write_group()
    assert group is not None
    (batch,) = group.built
    log.built(batch)
    assert batch.known == records
    read = Batch(batch.data).records()
    assert [each.timestamp_us for each in records] == [each.timestamp_us for each in read]
    assert [each.offset for each in records] == [each.offset for each in read]

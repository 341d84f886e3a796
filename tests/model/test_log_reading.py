"""The journal against a list: whatever is appended, rolled, removed and reopened, every read gives
what a naive filter over all records gives, in the same order."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.log.batch import Batch
from holdfast.log.partition import partition_of
from holdfast.log.reading import interest as interest_module
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import MESSAGE, SESSION, Record
from holdfast.protocol.topics.names import matches
from tests.sim.disk import SimDisk
from tests.support.log_bench import TIME_US, LogBench

PARTITIONS = 3
LEVELS = ["a", "b", "a-x", "é", ""]
topics = st.lists(st.sampled_from(LEVELS), min_size=1, max_size=3).map("/".join).filter(bool)
filters = st.one_of(
    topics,
    st.sampled_from(["#", "+", "a/#", "+/b", "a/+/b", "a/b/#", "+/+/#", "é/#", "/#", "b/+", "/+"]),
)
offsets = st.integers(0, 60)
vectors = st.lists(offsets, min_size=PARTITIONS, max_size=PARTITIONS)


@dataclass(frozen=True)
class Known:
    partition: int
    offset: int
    kind: int
    topic: str
    payload: bytes
    timestamp_us: int


def place(record: Record | Known) -> tuple[int, int]:
    return record.partition, record.offset


class LogAgainstList(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 30), groups=st.integers(0, 40))
    def create(self, seed: int, groups: int) -> None:
        self.disk = SimDisk()
        self.bench = LogBench(self.disk, PARTITIONS, 2048)
        self.pending: list[Known] = []
        self.known: list[Known] = []
        """Written, in journal order; what was removed too."""
        chance = random.Random(seed)
        for _ in range(groups):
            self.append_records(
                [
                    (
                        "/".join(chance.choices(LEVELS[:4], k=chance.randint(1, 3))),
                        chance.randint(0, 300),
                        chance.choice([MESSAGE, MESSAGE, SESSION]),
                    )
                    for _ in range(chance.randint(1, 5))
                ]
            )
            self.write_group()

    @rule(
        chosen=st.lists(
            st.tuples(topics, st.integers(0, 300), st.sampled_from([MESSAGE, MESSAGE, SESSION])),
            min_size=1,
            max_size=12,
        )
    )
    def append(self, chosen: list[tuple[str, int, int]]) -> None:
        self.append_records(chosen)

    def append_records(self, chosen: list[tuple[str, int, int]]) -> None:
        bench = self.bench
        for topic, size, kind in chosen:
            timestamp_us = TIME_US + len(self.known) + len(self.pending)
            partition, offset = bench.append(
                topic, bytes(size), kind=kind, timestamp_us=timestamp_us
            )
            known = Known(partition, offset, kind, topic, bytes(size), timestamp_us)
            self.pending.append(known)

    @rule()
    def write(self) -> None:
        self.write_group()

    def write_group(self) -> None:
        self.bench.write()
        # A group's batches lie in the order of their first records.
        order = list(dict.fromkeys(each.partition for each in self.pending))
        self.known += sorted(self.pending, key=lambda each: order.index(each.partition))
        self.pending = []

    @precondition(lambda self: not self.pending)
    @rule()
    def reopen(self) -> None:
        self.bench = LogBench(self.disk.copy(), PARTITIONS, 2048)
        self.disk = self.bench.directory.files  # type: ignore[assignment]

    @precondition(lambda self: len(self.bench.journal.segments) > 2)
    @rule()
    def remove_oldest(self) -> None:
        removed = self.bench.journal.segments[0].sequence
        self.bench.remove_oldest(1)
        self.bench.reader.forget_segment(removed)

    @rule(
        positions=vectors,
        limits=vectors,
        chosen=st.lists(st.tuples(filters, st.none() | vectors), max_size=4),
        records_max=st.integers(1, 20),
        merged_max=st.sampled_from([0, 2, 512]),
    )
    def read(
        self,
        positions: list[int],
        limits: list[int],
        chosen: list[tuple[str, list[int] | None]],
        records_max: int,
        merged_max: int,
    ) -> None:
        journal = self.bench.journal
        interests = [ReadInterest(filter, start) for filter, start in chosen]
        ends = [min(pair) for pair in zip(limits, journal.written, strict=True)]
        starts = journal.start_offsets
        expected = [
            each
            for each in self.known
            if each.kind == MESSAGE
            and max(positions[each.partition], starts[each.partition]) <= each.offset
            and each.offset < ends[each.partition]
            and any(
                matches(filter, each.topic)
                and (start is None or each.offset >= start[each.partition])
                for filter, start in chosen
            )
        ]
        lost = sum(max(0, min(starts[p], ends[p]) - positions[p]) for p in range(PARTITIONS))
        before = interest_module.TOPICS_MERGED_MAX
        interest_module.TOPICS_MERGED_MAX = merged_max  # type: ignore[misc]
        try:
            found, lost_found = self.read_all(positions, ends, interests, records_max)
        finally:
            interest_module.TOPICS_MERGED_MAX = before  # type: ignore[misc]
        assert [place(each) for each in found] == [place(each) for each in expected]
        assert [each.payload for each in found] == [each.payload for each in expected]
        assert lost_found == lost

    def read_all(
        self, positions: list[int], ends: list[int], interests: list[ReadInterest], records_max: int
    ) -> tuple[list[Record], int]:
        found: list[Record] = []
        lost = 0
        reader = self.bench.reader
        while True:
            result = reader.read(positions, ends, interests, records_max, 1 << 20)
            assert len(result.records) <= records_max
            found += result.records
            lost += result.lost
            assert all(a <= b for a, b in zip(positions, result.positions, strict=True))
            for position, before, end in zip(result.positions, positions, ends, strict=True):
                assert position <= max(before, end)
            for record in result.records:
                assert result.positions[record.partition] > record.offset
            if result.done:
                return found, lost
            assert result.positions != positions
            positions = result.positions

    @rule(partition=st.integers(0, PARTITIONS - 1), offset=offsets)
    def fetch(self, partition: int, offset: int) -> None:
        found = self.bench.reader.fetch(partition, offset)
        expected = [
            each
            for each in self.known
            if place(each) == (partition, offset)
            and each.kind == MESSAGE
            and offset >= self.bench.journal.start_offsets[partition]
        ]
        assert ([place(found)] if found else []) == [place(each) for each in expected]

    @rule(
        partition=st.integers(0, PARTITIONS - 1),
        start=offsets,
        end=offsets,
        bytes_max=st.integers(1, 5000),
    )
    def read_batches(self, partition: int, start: int, end: int, bytes_max: int) -> None:
        batches = self.bench.reader.read_batches(partition, start, end, bytes_max)
        offsets = [record.offset for data in batches for record in Batch(data).records()]
        floor = self.bench.journal.start_offsets[partition]
        wanted = [
            each.offset
            for each in self.known
            if each.partition == partition and max(start, floor) <= each.offset < end
        ]
        assert bool(offsets) == bool(wanted)
        if wanted:
            # Whole batches, from the one that has the first, without a hole.
            assert offsets[0] <= wanted[0] <= offsets[-1]
            assert offsets == list(range(offsets[0], offsets[-1] + 1))
            assert Batch(batches[-1]).base_offset < end
            assert sum(map(len, batches[:-1])) < bytes_max

    @rule(topic=topics, before=offsets)
    def topic_history(self, topic: str, before: int) -> None:
        partition = partition_of(topic.encode(), PARTITIONS)
        history = self.bench.reader.topic_history(topic.encode(), partition, before)
        floor = self.bench.journal.start_offsets[partition]
        wanted = [
            each.offset
            for each in self.known
            if each.topic == topic and each.kind == MESSAGE and floor <= each.offset < before
        ]
        while not history.is_done():
            history.step()
            later = [each for each in wanted if each >= history.searched]
            assert [each for each in history.offsets if each >= history.searched] == later[::-1]
        assert history.offsets == wanted[::-1]

    @rule(filter=filters, buckets=st.integers(1, 20), after=st.integers(-1, 100))
    def histogram(self, filter: str, buckets: int, after: int) -> None:
        bounds_us = (TIME_US + after, TIME_US + 10_000)
        found = self.bench.reader.starts.histogram(filter, bounds_us, buckets)
        while not found.is_done():
            found.step()
        assert found.complete_from_us == bounds_us[0]
        assert found.width_us * buckets >= bounds_us[1] - bounds_us[0]
        wanted = [0] * buckets
        for each, time_us in self.batch_times():
            if time_us >= bounds_us[0] and matches(filter, each.topic):
                wanted[(time_us - bounds_us[0]) // found.width_us] += 1
        assert found.counts == wanted

    def batch_times(self) -> Iterator[tuple[Known, int]]:
        """The messages that are still in the log, each with the time of its batch."""
        reader, journal = self.bench.reader, self.bench.journal
        by_place = {place(each): each for each in self.known}
        for partition in range(PARTITIONS):
            for data in reader.read_batches(partition, 0, journal.written[partition], 1 << 30):
                batch = [place(record) for record in Batch(data).records()]
                for each in map(by_place.__getitem__, batch):
                    if each.kind == MESSAGE:
                        yield each, by_place[batch[0]].timestamp_us

    @rule(partition=st.integers(0, PARTITIONS - 1), after=st.integers(-1, 200))
    def offset_for_time(self, partition: int, after: int) -> None:
        found = self.bench.reader.offset_for_time(partition, TIME_US + after)
        floor = self.bench.journal.start_offsets[partition]
        later = [
            each.offset
            for each in self.known
            if each.partition == partition
            and each.offset >= floor
            and each.timestamp_us >= TIME_US + after
        ]
        assert found == min(later, default=self.bench.journal.written[partition])

    @invariant()
    def offsets_are_dense(self) -> None:
        if not hasattr(self, "bench"):
            return
        journal = self.bench.journal
        for partition in range(PARTITIONS):
            count = sum(each.partition == partition for each in self.known + self.pending)
            assert journal.next_offset[partition] == count
        assert journal.sequence == len(self.known) + len(self.pending)


TestLogAgainstList = LogAgainstList.TestCase
TestLogAgainstList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

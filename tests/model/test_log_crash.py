"""Crashes and damage at every place of a small journal: what was acknowledged is there again, in
its place and order, and the journal goes on."""

import random
from collections.abc import Iterator

import pytest

from holdfast.log.batch import ATTRIBUTE_MORE, Batch
from holdfast.log.record import FLAG_RETAIN
from tests.sim.disk import Crash, SimContent, SimDisk
from tests.support.log_bench import LogBench, contents

TOPICS = [f"plant/{number}/temp" for number in range(7)]
Content = tuple[int, int, bytes, bytes]


class Workload:
    """Appends groups of numbered records, removes old segments now and then, until power goes."""

    def __init__(self, disk: SimDisk, seed: int, groups: int, *, durable: bool = True) -> None:
        self.disk = disk
        self.chance = random.Random(seed)
        self.groups = groups
        self.durable = durable
        self.appended: list[Content] = []
        self.acked = 0
        self.removed_below: list[int] = []
        # Where in `appended` each write group ends.
        self.group_ends: list[int] = []

    def run(self) -> bool:
        """False if it was cut short by a crash."""
        try:
            bench = LogBench(self.disk, segment_bytes=4096, durable=self.durable)
            for group in range(self.groups):
                self.append_some(bench)
                self.group_ends.append(len(self.appended))
                bench.write()
                self.acked = len(self.appended)
                if group % 9 == 8 and len(bench.journal.segments) > 3:
                    self.removed_below = bench.journal.segments[1].start_offsets()
                    bench.remove_oldest(1)
            bench.writer.close()
        except Crash:
            return False
        return True

    def append_some(self, bench: LogBench) -> None:
        for _ in range(self.chance.randint(1, 4)):
            topic = self.chance.choice(TOPICS)
            payload = b"%d " % len(self.appended) + b"x" * self.chance.randint(0, 700)
            flags = 1 | FLAG_RETAIN if self.chance.random() < 0.2 else 1
            partition, offset = bench.append(topic, payload, flags=flags)
            self.appended.append((partition, offset, topic.encode(), payload))

    def must_be_there(self) -> list[Content]:
        """Acknowledged, and not given up by retention."""
        below = self.removed_below or [0, 0, 0]
        return [each for each in self.appended[: self.acked] if each[1] >= below[each[0]]]


def check_survivors(bench: LogBench, workload: Workload) -> None:
    found = contents(bench.records())
    assert set(workload.must_be_there()) <= set(found)
    assert set(found) <= set(workload.appended)
    if workload.durable:
        assert not bench.opened.damage
        check_whole_groups(found, workload)
    for partition in range(bench.journal.partitions):
        offsets = [each[1] for each in found if each[0] == partition]
        assert offsets == sorted(set(offsets))
        assert bench.journal.next_offset[partition] > max(offsets, default=-1)


def check_whole_groups(found: list[Content], workload: Workload) -> None:
    there = set(found)
    start = 0
    for end in workload.group_ends:
        kept = [each in there for each in workload.appended[start:end]]
        assert all(kept) or not any(kept), f"{sum(kept)} of {len(kept)} records of a group"
        start = end


def check_goes_on(disk: SimDisk, bench: LogBench) -> None:
    """New records get places of their own and survive another opening."""
    before = contents(bench.records())
    added = []
    for topic in TOPICS:
        partition, offset = bench.append(topic, b"after")
        added.append((partition, offset, topic.encode(), b"after"))
    bench.write()
    again = LogBench(disk.copy(), segment_bytes=4096)
    found = contents(again.records())
    assert found[: len(before)] == before
    assert sorted(found[len(before) :]) == sorted(added)
    assert again.opened.truncated is None


@pytest.mark.parametrize("survival", ["none", "all", "torn", "sectors"])
def test_power_cut_at_every_step(survival: str) -> None:
    whole = Workload(SimDisk(), 1, 30)
    assert whole.run()
    assert len(whole.appended) > 60
    for crash_at in range(1, whole.disk.steps + 1):
        disk = SimDisk()
        disk.crash_at = crash_at
        workload = Workload(disk, 1, 30)
        assert not workload.run()
        left = disk.after_crash(survival, crash_at)
        bench = LogBench(left, segment_bytes=4096)
        check_survivors(bench, workload)
        check_goes_on(left, bench)


def test_power_cut_while_recovering() -> None:
    """Recovery itself is cut short at every one of its steps, and recovers from that."""
    disk = SimDisk()
    disk.crash_at = 70
    workload = Workload(disk, 2, 40)
    assert not workload.run()
    left = disk.after_crash("torn", 5)
    counting = left.copy()
    LogBench(counting, segment_bytes=4096)
    assert counting.steps > 0
    for crash_at in range(1, counting.steps + 1):
        twice = left.copy()
        twice.crash_at = crash_at
        with pytest.raises(Crash):
            LogBench(twice, segment_bytes=4096)
        final = twice.after_crash("none", crash_at)
        check_survivors(LogBench(final, segment_bytes=4096), workload)


def test_power_cut_after_a_restart() -> None:
    """What a killed process had not synced counts as committed once the next one has read it."""
    for crash_at in range(10, 60, 3):
        disk = SimDisk()
        disk.crash_at = crash_at
        workload = Workload(disk, 3, 40, durable=False)
        assert not workload.run()
        found = contents(LogBench(disk.after_kill(), segment_bytes=4096).records())
        left = disk.after_crash("none", crash_at)
        assert contents(LogBench(left, segment_bytes=4096).records()) == found


def test_memory_durability_loses_only_the_end() -> None:
    for crash_at in range(10, 60, 3):
        disk = SimDisk()
        disk.crash_at = crash_at
        workload = Workload(disk, 3, 40, durable=False)
        assert not workload.run()
        left = disk.after_crash("torn", crash_at)
        bench = LogBench(left, segment_bytes=4096)
        found = contents(bench.records())
        below = workload.removed_below or [0, 0, 0]
        for partition in range(3):
            all_of_it = [each for each in workload.appended if each[0] == partition]
            mine = [each for each in found if each[0] == partition]
            start = mine[0][1] if mine else 0
            assert start <= below[partition]
            assert mine == all_of_it[start : start + len(mine)]


def test_every_truncation_of_the_last_segment() -> None:
    workload = Workload(SimDisk(), 4, 25)
    assert workload.run()
    disk = workload.disk
    last = sorted(name for name in disk.files if name.endswith(".log"))[-1]
    content = bytes(disk.files[last].now)
    ends = list(group_ends(content))
    everything = contents(LogBench(disk.copy(), segment_bytes=4096).records())
    for length in range(len(content)):
        cut = disk.copy()
        cut.files[last] = SimContent(content[:length])
        bench = LogBench(cut, segment_bytes=4096)
        kept = [end for end in ends if end <= length]
        found = contents(bench.records())
        assert found == everything[: len(found)]
        assert len(cut.files[last].now) == (kept[-1] if kept else 0)
        assert (bench.opened.truncated is None) == (length == (kept[-1] if kept else 0))
        assert not bench.opened.damage


def group_ends(content: bytes) -> Iterator[int]:
    position = 0
    while position < len(content):
        batch = Batch(content, position)
        position += batch.length
        if not batch.attributes & ATTRIBUTE_MORE:
            yield position


def batch_ends(content: bytes) -> Iterator[int]:
    position = 0
    while position < len(content):
        position += Batch(content, position).length
        yield position


@pytest.mark.parametrize("file", ["last", "sealed", "sealed without index"])
def test_every_flipped_byte(file: str) -> None:
    """What is lost is at most the batch with the flipped byte, and its offsets stay empty."""
    workload = Workload(SimDisk(), 6, 12)
    assert workload.run()
    disk = workload.disk
    names = sorted(name for name in disk.files if name.endswith(".log"))
    assert len(names) >= 3
    name = names[-1] if file == "last" else names[1]
    content = bytes(disk.files[name].now)
    if file == "sealed without index":
        del disk.files[name.replace(".log", ".idx")]
    everything = contents(LogBench(disk.copy(), segment_bytes=4096).records())
    ends = list(batch_ends(content))
    for position in range(0, len(content), 3):
        damaged = disk.copy()
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        damaged.files[name] = SimContent(bytes(changed))
        bench = LogBench(damaged, segment_bytes=4096)
        found = contents(bench.records())
        start, end = batch_around(ends, position)
        batch = Batch(content, start)
        lost = [
            each
            for each in everything
            if each[0] == batch.partition and batch.base_offset <= each[1] < batch.end_offset
        ]
        assert found == [each for each in everything if each not in lost]
        if end == len(content) and file == "last":
            assert bench.opened.truncated is not None
        else:
            assert bench.journal.next_offset[batch.partition] >= batch.end_offset
            assert any("quarantine" in each for each in damaged.files)
        if position % 30 == 0:
            check_goes_on(damaged, bench)


def batch_around(ends: list[int], position: int) -> tuple[int, int]:
    start = max((end for end in ends if end <= position), default=0)
    return start, min(end for end in ends if end > position)


def test_every_flipped_byte_of_an_index() -> None:
    """The index is made anew where it matters; records never change."""
    workload = Workload(SimDisk(), 7, 12)
    assert workload.run()
    disk = workload.disk
    everything = contents(LogBench(disk.copy(), segment_bytes=4096).records())
    name = min(name for name in disk.files if name.endswith(".idx"))
    content = bytes(disk.files[name].now)
    for position in range(len(content)):
        damaged = disk.copy()
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        damaged.files[name] = SimContent(bytes(changed))
        bench = LogBench(damaged, segment_bytes=4096)
        assert contents(bench.records()) == everything
        assert bytes(damaged.files[name].now) == content

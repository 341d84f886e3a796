"""A sync fails, and the system takes what it should have written for written: it is in the page
cache alone, and no later sync writes it. The node stops, starts again, and then the power goes."""

import random

import pytest

from holdfast.io.disk.raft_files import RaftFiles
from holdfast.log.journal.recovery import last_group_start
from holdfast.node.raft.node import Write
from tests.sim.disk import SimDisk
from tests.support.log_bench import LogBench, contents
from tests.support.replica_bench import ReplicaBench

SURVIVALS = ["none", "all", "torn", "sectors"]


def fill(bench: LogBench, chance: random.Random, groups: int) -> None:
    for _ in range(groups):
        for _ in range(chance.randint(1, 5)):
            bench.append(f"t/{chance.randint(0, 9)}", chance.randbytes(chance.randint(0, 200)))
        bench.write()


@pytest.mark.parametrize("survival", SURVIVALS)
def test_what_counts_after_a_restart_is_on_the_disk(survival: str) -> None:
    cached = 0
    for seed in range(20):
        chance = random.Random(seed)
        disk = SimDisk()
        bench = LogBench(disk, segment_bytes=2000)
        fill(bench, chance, chance.randint(0, 12))
        acknowledged = contents(bench.records())
        disk.fail_sync = True
        with pytest.raises(OSError, match="error"):
            fill(bench, chance, 1)
        disk.fail_sync = False
        again = LogBench(disk, segment_bytes=2000)
        committed = contents(again.records())
        assert set(acknowledged) <= set(committed)
        # None if it was the sync of a segment that is full, before the next one is begun.
        cached += len(committed) > len(acknowledged)
        last = LogBench(disk.after_crash(survival, seed), segment_bytes=2000)
        assert contents(last.records()) == committed
        assert last.opened.damage == []
    assert cached > 10


@pytest.mark.parametrize("survival", SURVIVALS)
def test_a_replica_vouches_for_what_is_on_the_disk(survival: str) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        disk = SimDisk()
        bench = ReplicaBench(disk, 2, segment_bytes=1 << 14)
        bench.journal.lead(0, 1)
        bench.journal.lead(1, 1)
        for number in range(chance.randint(0, 6)):
            bench.append(number % 2, chance.randbytes(50))
            bench.flush()
            if chance.random() < 0.5:
                bench.directory.write_watermarks(bench.journal.checkpoint())
        disk.fail_sync = True
        bench.append(0, b"cached")
        with pytest.raises(OSError, match="error"):
            bench.flush()
        disk.fail_sync = False
        again = ReplicaBench(disk, 2)
        vouched = list(again.journal.durable_offset)
        assert sum(vouched) == sum(bench.journal.next_offset)
        last = ReplicaBench(disk.after_crash(survival, seed), 2)
        assert last.journal.next_offset == vouched
        assert not last.journal.damaged


@pytest.mark.parametrize("survival", SURVIVALS)
def test_a_vote_that_is_remembered_is_on_the_disk(survival: str) -> None:
    disk = SimDisk()
    files = RaftFiles(disk, "n1", is_new=True)
    files.write(Write(1, "n1", 0, [], must_sync=True))
    disk.fail_sync = True
    with pytest.raises(OSError, match="error"):
        files.write(Write(2, "n2", 0, [], must_sync=True))
    disk.fail_sync = False
    again = RaftFiles(disk, "n1", is_new=False)
    assert (again.state.term, again.state.vote) == (2, "n2")
    last = RaftFiles(disk.after_crash(survival, 1), "n1", is_new=False)
    assert (last.state.term, last.state.vote) == (2, "n2")


def test_a_start_writes_the_last_group_again_and_no_more() -> None:
    disk = SimDisk()
    bench = LogBench(disk, segment_bytes=1 << 20)
    chance = random.Random(1)
    fill(bench, chance, 30)
    before = bench.journal.segments[-1].size_bytes
    fill(bench, chance, 1)
    again = LogBench(disk, segment_bytes=1 << 20)
    last = again.journal.segments[-1]
    assert again.opened.rewritten_bytes == last.size_bytes - before > 0
    assert last_group_start(again.directory, last, again.journal.tag) == before

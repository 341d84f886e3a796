"""The bytes of forgotten partitions come back: segments of which more than half is dead are
rewritten, while records are appended and read."""

import asyncio
import errno
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.cli.main import main
from holdfast.config.schema import Config
from holdfast.io.disk import maintenance
from holdfast.io.disk.maintenance import Maintenance
from holdfast.io.disk.storage import Storage
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.retention import RetentionDecision, RetentionPolicy, decide
from holdfast.log.journal.segment_list import partition_bytes
from holdfast.log.reading.cursor import LogReader
from holdfast.node.state.maintenance_plan import MaintenancePlan
from tests.sim.disk import Crash, SimDisk
from tests.support.replica_bench import RandomReplica, ReplicaBench

SEGMENT_BYTES = 8000
MINE, MOVED = 0, 1


class Node:
    """A node whose maintenance runs, over a directory that a bench writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bench = ReplicaBench(OsFileSystem(path), 2, SEGMENT_BYTES)
        self.bench.journal.is_alone = False
        directory = self.bench.directory
        self.storage = Storage(path, directory, cast(Any, None), self.bench.opened)
        self.reader: LogReader = self.storage.reader
        self.journal: Journal = self.bench.journal
        recorded = SimpleNamespace(delivered=self.journal.high_watermark)
        state = SimpleNamespace(journal=self.journal, wall_us=0, has_stopped_partition=False)
        self.drained = 0
        self.broker: Any = SimpleNamespace(
            runtime=SimpleNamespace(
                state=state, reserve_bytes=0, recorded_state=lambda: recorded, writer=None
            ),
            drain_journal=self._drain,
            reads=SimpleNamespace(in_thread=self._in_thread),
        )
        self.maintenance = Maintenance(self.broker, self.storage, Config())
        self.broker.runtime.reserve_bytes = 0

    async def _drain(self) -> None:
        self.drained += 1
        self.bench.flush()

    async def _in_thread(self, work: Any) -> Any:
        return work()

    def fill(self, count: int) -> None:
        """Appends records: one of each three is of the partition that stays."""
        for number in range(count):
            partition = MINE if number % 3 == 0 else MOVED
            self.bench.append(partition, b"%d " % number + b"x" * 100)
            if number % 20 == 19:
                self.flush()
        self.flush()

    def flush(self) -> None:
        self.bench.flush()
        for partition in (MINE, MOVED):
            self.journal.advance(partition, self.journal.durable_offset[partition])
        self.bench.directory.write_watermarks(self.journal.checkpoint())

    def reclaim(self) -> None:
        async def run() -> None:
            try:
                await self.maintenance._reclaim()
            finally:
                await self.maintenance.stop()

        asyncio.run(run())

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.glob("journal/*.log"))

    def mine(self) -> list[bytes]:
        end = self.journal.written[MINE]
        return [payload for _, payload in self.bench.contents(MINE, 0, end)]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(maintenance, "RECLAIM_BYTES_PER_S", 1 << 40)
    node = Node(tmp_path)
    node.fill(600)
    return node


def test_a_partition_that_moves_away_gives_its_bytes_back(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    before = node.mine()
    size_bytes = node.stored_bytes()
    sequence = node.journal.sequence
    node.journal.forget(MOVED)
    node.journal.place(MOVED, 5000)
    # The mark is not taken yet, so nothing is known to be dead.
    node.reclaim()
    assert (node.stored_bytes(), node.drained) == (size_bytes, 0)
    node.bench.append(MINE, b"later")
    node.flush()
    node.reclaim()
    assert node.drained == 1
    assert node.stored_bytes() < 0.45 * size_bytes
    assert node.maintenance.reclaimed_bytes > 0.55 * size_bytes
    assert node.journal.size_bytes() == node.stored_bytes()
    assert node.mine() == [*before, b"later"]
    node.journal.check()
    assert main(["log", "verify", str(node.path)]) == 0, capsys.readouterr().out
    assert "5000" not in capsys.readouterr().out

    again = Node(node.path)
    assert again.bench.opened.rebuilt == []
    assert not again.bench.opened.damage
    assert not again.bench.opened.damaged
    assert again.journal.sequence == sequence + 2
    again.journal.check()
    assert again.mine() == [*before, b"later"]
    # After a start the heads say that there is something dead, and the batches that there is not.
    again.reclaim()
    assert again.stored_bytes() == node.stored_bytes()
    assert sum(each.dead_bytes for each in again.journal.segments[:-1]) == 0


def test_a_lost_index_of_a_rewritten_segment_is_no_damage(node: Node) -> None:
    before = node.mine()
    node.journal.forget(MOVED)
    node.flush()
    node.reclaim()
    for path in node.path.glob("journal/*.idx"):
        path.unlink()
    node.bench.reader.forget_segment(0)
    assert node.mine() == before
    again = Node(node.path)
    assert len(again.bench.opened.rebuilt) > 3
    assert not again.bench.opened.damage
    assert not again.bench.opened.damaged
    again.journal.check()
    assert again.mine() == before


def test_a_partition_that_comes_back_keeps_its_new_records(node: Node) -> None:
    node.journal.forget(MOVED)
    node.flush()
    node.journal.reset(MOVED, 7)
    for number in range(50):
        node.bench.append(MOVED, b"new %d" % number)
    node.flush()
    node.reclaim()
    assert node.maintenance.reclaimed_bytes
    again = Node(node.path)
    found = [payload for _, payload in again.bench.contents(MOVED, 7, 57)]
    assert found == [b"new %d" % number for number in range(50)]
    assert not again.bench.opened.damaged


def test_segments_that_are_mostly_alive_stay(node: Node) -> None:
    size_bytes = node.stored_bytes()
    node.journal.forget(MINE)
    node.flush()
    node.reclaim()
    assert node.stored_bytes() == size_bytes + 48
    dead = sum(each.dead_bytes for each in node.journal.segments)
    assert 0.25 * size_bytes < dead < 0.45 * size_bytes


def test_a_segment_with_a_cut_gives_its_bytes_back(node: Node) -> None:
    """The new leader's records begin below the first one that the segment has of the partition. So
    the start in its index is below that, too, and no record is missing."""
    journal, end = node.journal, node.journal.next_offset[MINE]
    node.bench.append(MINE, b"uncommitted")
    node.bench.flush()
    journal.start_segment()
    node.bench.append(MINE, b"uncommitted too")
    node.bench.flush()
    journal.truncate(MINE, end)
    node.fill(30)
    cut = journal.segments[-1]
    assert cut.head.start_offsets[MINE] == end
    node.bench.reader = node.reader
    before = node.mine()
    size_bytes = cut.size_bytes
    journal.start_segment()
    journal.forget(MOVED)
    node.flush()
    node.reclaim()
    (new,) = [each for each in journal.segments if each.sequence == cut.sequence]
    assert new.size_bytes < size_bytes / 2
    assert node.mine() == before
    assert Node(node.path).mine() == before


def test_removed_segments_give_their_bytes_back_after_a_full_disk(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has dropped them when the disk refuses its new start."""
    last = node.journal.segments[-1]
    decision = RetentionDecision(len(node.journal.segments) - 1, 0, 0, 0)

    def full(self: object, *content: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run(work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            await node.maintenance.stop()

    with monkeypatch.context() as patched:
        patched.setattr(node.bench.directory, "write_start", full)
        with pytest.raises(OSError, match="No space"):
            asyncio.run(run(node.maintenance._remove(decision)))
    assert node.journal.segments == [last]
    assert node.stored_bytes() > last.size_bytes
    asyncio.run(run(node.maintenance._retain()))
    assert node.stored_bytes() == last.size_bytes
    again = Node(node.path).journal
    assert again.start_offsets == node.journal.start_offsets
    assert again.next_offset == node.journal.next_offset


def test_the_bytes_of_each_partition_are_estimated(node: Node) -> None:
    mine, moved = partition_bytes(node.journal.segments, 2)
    assert 0.99 * node.stored_bytes() <= mine + moved <= node.stored_bytes()
    assert 1.8 * mine < moved < 2.2 * mine, "it has two of each three records"


def test_retention_counts_live_bytes(node: Node) -> None:
    node.journal.forget(MOVED)
    node.flush()
    plan = cast(MaintenancePlan, node.maintenance._plan)

    def removable() -> int:
        policy = RetentionPolicy(bytes_max=node.stored_bytes() // 2)
        summaries = plan.summaries()
        starts = node.journal.start_offsets
        return decide(summaries, starts, policy, node.journal.sequence, [], 0).remove

    assert removable() > 0
    # The forgotten partition goes first, and then nothing has to.
    node.maintenance._note_forgotten()
    assert removable() == 0


def test_the_last_segment_ends_early_if_it_is_mostly_dead(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "RECLAIM_BYTES", 1000)
    node.journal.segment_bytes = 1 << 20
    node.fill(90)
    last = node.journal.segments[-1].sequence
    before = node.journal.segments[-1].size_bytes
    node.journal.forget(MOVED)
    node.flush()
    node.reclaim()
    node.bench.append(MINE, b"in a new segment")
    node.flush()
    assert node.journal.segments[-1].sequence > last
    node.reclaim()
    assert node.journal.segments[-2].sequence == last
    assert node.journal.segments[-2].size_bytes < before / 2


def test_nothing_is_rewritten_that_may_still_be_the_last_segment(node: Node) -> None:
    checkpoint = node.bench.directory.read_checkpoint()
    node.journal.forget(MOVED)
    node.flush()
    size_bytes = node.stored_bytes()
    early = type(checkpoint)(checkpoint.offsets, 0, checkpoint.position)
    node.bench.directory.write_watermarks(early)
    node.reclaim()
    assert node.stored_bytes() == size_bytes
    assert not list(node.path.glob("journal/*.tmp"))


def test_a_full_disk_stops_it_without_harm(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    before = node.mine()
    node.journal.forget(MOVED)
    node.flush()
    size_bytes = node.stored_bytes()
    files = node.bench.directory.files
    monkeypatch.setattr(files, "free_bytes", lambda: 1000)
    with pytest.raises(OSError, match="no room"):
        node.reclaim()
    assert node.stored_bytes() == size_bytes
    monkeypatch.undo()

    def full(self: object, pieces: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("holdfast.log.files.filesystem.TemporaryFile.write", full)
    with pytest.raises(OSError, match="No space"):
        node.reclaim()
    monkeypatch.undo()
    assert not list(node.path.glob("journal/*.tmp"))
    assert node.stored_bytes() == size_bytes
    assert node.mine() == before
    monkeypatch.setattr(maintenance, "RECLAIM_BYTES_PER_S", 1 << 40)
    node.reclaim()
    assert node.stored_bytes() < size_bytes / 2


def test_an_index_that_cannot_be_written_costs_no_record(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is in its place then, and the journal still has the size of the old one."""
    before = node.mine()
    read = [node.reader.fetch(MINE, offset) for offset in range(0, 200, 10)]
    node.journal.forget(MOVED)
    node.flush()

    def full(sequence: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node.bench.directory, "write_index", full)
    with pytest.raises(OSError, match="No space"):
        node.reclaim()
    again = [node.reader.fetch(MINE, offset) for offset in range(0, 200, 10)]
    assert [each and each.payload for each in again] == [each and each.payload for each in read]
    monkeypatch.undo()
    node.bench.reader = node.reader
    assert node.mine() == before
    assert not list(node.path.glob("quarantine/*"))


def test_a_read_between_the_new_file_and_the_journal(node: Node) -> None:
    """A thread that reads the log may come before the loop has the new segment."""
    before = node.mine()
    node.journal.forget(MOVED)
    node.flush()
    journal = node.journal
    replace = journal.replace_segment
    reads = 0

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(journal, name)

        def replace_segment(self, segment: Any) -> None:
            nonlocal reads
            reads += 1
            node.bench.reader = node.reader
            assert node.mine() == before
            replace(segment)

    node.storage.journal = cast(Any, Watched())
    node.reclaim()
    assert reads > 3
    assert not list(node.path.glob("quarantine/*"))


def test_every_crash_while_a_segment_is_rewritten() -> None:
    """At each step of the file system, whatever of the unsynced writes survives."""
    disk = SimDisk()
    replica = RandomReplica(ReplicaBench(disk, 2, 1500), 1)
    bench = replica.bench
    for number in range(60):
        bench.append(number % 3 > 0, b"%d " % number + b"x" * 60)
        if number % 6 == 5:
            bench.flush()
    for partition in (MINE, MOVED):
        bench.journal.advance(partition, bench.journal.durable_offset[partition])
    bench.journal.forget(MOVED)
    bench.flush()
    expected = bench.contents(MINE, 0, 20)
    assert len(expected) == 20
    start = disk.copy()
    begun_at = disk.steps
    replica.chance.random = lambda: 1.0  # type: ignore[method-assign]
    replica.reclaim(0)
    assert replica.reclaimed_bytes > 2000
    steps = disk.steps - begun_at
    assert steps > 20
    for at in range(1, steps + 1):
        for survival in ("none", "all", "torn", "sectors"):
            crashed = _crashed(start, at, survival)
            again = ReplicaBench(crashed, 2, 1500)
            assert again.contents(MINE, 0, 20) == expected
            assert not again.opened.damage
            assert not again.opened.damaged
            # A forgotten partition is empty.
            assert again.journal.next_offset == [20, 0]
            again.journal.check()
            assert not [name for name in crashed.list("journal") if name.endswith(".tmp")]


def _crashed(start: SimDisk, at: int, survival: str) -> SimDisk:
    disk = start.copy()
    replica = RandomReplica(ReplicaBench(disk, 2, 1500), 1)
    replica.chance.random = lambda: 1.0  # type: ignore[method-assign]
    disk.crash_at = disk.steps + at
    with pytest.raises(Crash):
        replica.reclaim(0)
    return disk.after_crash(survival, at)

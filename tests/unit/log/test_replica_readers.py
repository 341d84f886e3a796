"""Who reads a replica's directory from outside sees what counts and is committed, and nothing that
was cut off: `holdfast log`."""

import json
import random
from pathlib import Path

import pytest

from holdfast.cli.log.records import ReplicaJournal
from holdfast.cli.main import main
from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.client.log.reading.scan import Coverage
from holdfast.log.batch import Batch
from holdfast.log.columns.chunk import Chunk
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.reading.segment_reader import SegmentReader
from holdfast.log.record import Record
from tests.support.replica_bench import PartitionModel, RandomReplica, ReplicaBench, build_batch

Capture = pytest.CaptureFixture[str]
Shown = dict[int, list[bytes]]


@pytest.fixture
def bench(tmp_path: Path) -> ReplicaBench:
    return ReplicaBench(OsFileSystem(tmp_path), segment_bytes=1500)


def committed(models: list[PartitionModel], watermarks: list[int]) -> Shown:
    return {
        partition: [each[1] for each in model.between(model.start, watermarks[partition])]
        for partition, model in enumerate(models)
    }


def dumped(path: Path, capsys: Capture) -> Shown:
    capsys.readouterr()
    assert main(["log", "dump", "--json", str(path)]) == 0
    shown: Shown = {0: [], 1: [], 2: []}
    for line in capsys.readouterr().out.splitlines():
        record = json.loads(line)
        shown[record["partition"]].append(record["payload"].encode())
    return shown


def sent(bench: ReplicaBench, watermarks: list[int], chance: random.Random) -> Shown:
    """As the admin port sends it to a task, answer by answer."""
    ranges = [
        OffsetRange(p, bench.journal.start_offsets[p], end)
        for p, end in enumerate(watermarks)
        if bench.journal.start_offsets[p] < end
    ]
    shown: Shown = {0: [], 1: [], 2: []}
    coverage = Coverage(ranges, fail_on_data_loss=True)
    while not coverage.done:
        wanted = [(p, coverage.next[p], end) for p, end in coverage.end.items()]
        plan = bench.reader.extents().plan(wanted, chance.choice((1, 500, 3000)))
        data = b"".join(each.file.read(each.position, each.length) for each in plan.extents)
        chunk = Chunk(data)
        before = dict(coverage.next)
        stop = coverage.scan(chunk, 0, len(data), limits=plan.next, stop_at_holes=True)
        assert (stop.position, stop.damage) == (len(data), "")
        assert coverage.next == plan.next
        assert coverage.next != before
        for position, first, end in zip(chunk.positions, chunk.starts, chunk.ends, strict=True):
            batch = Batch(data, position)
            shown[batch.partition] += [
                batch.record(offset - batch.base_offset).payload for offset in range(first, end)
            ]
    return shown


@pytest.mark.parametrize("seed", range(12))
def test_what_is_sent_over_the_network_agrees(bench: ReplicaBench, seed: int) -> None:
    chance = random.Random(seed)
    replica = RandomReplica(bench, seed)
    seen = 0
    for _ in range(12):
        for _ in range(30):
            replica.step()
        bench.writes_indexes = chance.random() < 0.7
        watermarks = [
            min(pair)
            for pair in zip(bench.journal.high_watermark, bench.journal.written, strict=True)
        ]
        expected = committed(replica.models, watermarks)
        assert sent(bench, watermarks, chance) == expected
        seen += sum(map(len, expected.values()))
    assert seen > 50


@pytest.mark.parametrize("seed", range(4))
def test_every_reader_agrees(
    bench: ReplicaBench, tmp_path: Path, capsys: Capture, seed: int
) -> None:
    chance = random.Random(seed)
    replica = RandomReplica(bench, seed)
    seen = 0
    for _ in range(12):
        for _ in range(30):
            replica.step()
        bench.writes_indexes = chance.random() < 0.7
        if not all(model.is_stored for model in replica.models):
            # Until the mark is in the file, its readers have the forgotten log.
            bench.flush()
            replica.open_base.clear()
        checkpoint = bench.journal.checkpoint()
        known = [
            offset if model.is_stored else 0
            for offset, model in zip(checkpoint.offsets, replica.models, strict=True)
        ]
        bench.directory.write_watermarks(checkpoint)
        seen += sum(map(len, committed(replica.models, known).values()))
    assert seen > 50
    expected = committed(replica.models, known)
    assert dumped(tmp_path, capsys) == expected
    check_verify(tmp_path, capsys)
    assert main(["log", "inspect", str(tmp_path)]) == 0
    for index in (tmp_path / "journal").glob("*.idx"):
        index.unlink()
    assert dumped(tmp_path, capsys) == expected
    check_verify(tmp_path, capsys)


def check_verify(path: Path, capsys: Capture) -> None:
    """All that is wrong is that there are no snapshots."""
    capsys.readouterr()
    main(["log", "verify", "--json", str(path)])
    found = json.loads(capsys.readouterr().out)
    assert [problem for problem in found["problems"] if "needs a snapshot" not in problem] == []


class Follower:
    """A reader of a replica's directory that goes on as `holdfast log tail --follow` does."""

    def __init__(self, bench: ReplicaBench) -> None:
        self.bench = bench
        self.log = ReplicaJournal(bench.directory, _no_damage)
        self.first = list(self.log.records())
        reader = self.log.reader()
        assert reader is not None
        self.reader = reader

    def arrived(self) -> list[Record]:
        directory = self.bench.directory
        checkpoint = directory.read_checkpoint()
        while True:
            newer = [each for each in directory.segments() if each > self.reader.sequence]
            for item in self.reader.read(newest=not newer):
                assert isinstance(item, Batch)
                self.log.add(item, self.reader.sequence, self.reader.position - item.length)
            if not newer:
                return list(self.log.committed(checkpoint))
            self.reader = SegmentReader(directory, newer[0])


class NewLeaders(RandomReplica):
    """A log that begins again is that of a new leader, so its records are others."""

    def follow(self, partition: int) -> None:
        if not self.models[partition].last_epoch:
            self.leads[partition] = True
        super().follow(partition)


@pytest.mark.parametrize("seed", range(4))
def test_follow_shows_each_record_once(bench: ReplicaBench, seed: int) -> None:
    chance = random.Random(seed)
    replica = NewLeaders(bench, seed)
    for _ in range(60):
        replica.step()
    bench.flush()
    replica.open_base.clear()
    bench.directory.write_watermarks(bench.journal.checkpoint())
    follower = Follower(bench)
    shown = {record.payload for record in follower.first}
    for _ in range(20):
        for _ in range(15):
            replica.step()
        bench.flush()
        replica.open_base.clear()
        is_known = chance.random() < 0.7
        if is_known:
            bench.directory.write_watermarks(bench.journal.checkpoint())
        now = committed(replica.models, bench.journal.checkpoint().offsets)
        for record in follower.arrived():
            assert record.payload not in shown
            shown.add(record.payload)
            at = record.offset - replica.models[record.partition].start
            assert at < 0 or now[record.partition][at] == record.payload
        if is_known:
            for payloads in now.values():
                assert shown.issuperset(payloads)


def test_follow_shows_other_records_below_those_that_it_has_shown(bench: ReplicaBench) -> None:
    """The partition begins again at 0, first with the same records and then without the third."""
    journal = bench.journal
    first, second = [
        build_batch(0, n, n + 1, [each, each * 2]) for n, each in ((0, b"a"), (2, b"b"))
    ]
    journal.append_batch(first)
    journal.append_batch(second)
    bench.flush()
    journal.advance(0, 4)
    bench.directory.write_watermarks(journal.checkpoint())
    follower = Follower(bench)
    assert [each.payload for each in follower.first] == [b"a", b"aa", b"b", b"bb"]
    journal.reset(0, 0)
    journal.append_batch(first)
    journal.append_batch(second)
    bench.flush()
    journal.advance(0, 4)
    bench.directory.write_watermarks(journal.checkpoint())
    assert not follower.arrived()
    journal.reset(0, 0)
    journal.append_batch(first)
    journal.append_batch(build_batch(0, 2, 7, [b"x", b"y", b"z"]))
    bench.flush()
    # The checkpoint is of the log before.
    assert not follower.arrived()
    assert not Follower(bench).arrived()
    journal.advance(0, 3)
    bench.directory.write_watermarks(journal.checkpoint())
    assert [each.payload for each in follower.arrived()] == [b"x"]
    journal.advance(0, 5)
    bench.directory.write_watermarks(journal.checkpoint())
    assert [each.payload for each in follower.arrived()] == [b"y", b"z"]


def _no_damage(damage: object) -> None:
    raise AssertionError(damage)


def test_tail_shows_the_newest_committed(
    bench: ReplicaBench, tmp_path: Path, capsys: Capture
) -> None:
    journal = bench.journal
    for number in range(40):
        journal.append_batch(build_batch(0, number, 1, [b"%d" % number]))
        bench.flush()
    journal.advance(0, 30)
    journal.truncate(0, 35)
    journal.append_batch(build_batch(0, 35, 2, [b"other"]))
    bench.flush()
    bench.directory.write_watermarks(journal.checkpoint())
    assert main(["log", "tail", "--json", "-n", "12", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["payload"] for line in lines] == [str(n) for n in range(18, 30)]
    journal.advance(0, 36)
    bench.directory.write_watermarks(journal.checkpoint())
    assert main(["log", "tail", "--json", "-n", "3", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["payload"] for line in lines] == ["33", "34", "other"]


def test_verify_reports_no_segment_that_is_removed(
    bench: ReplicaBench, tmp_path: Path, capsys: Capture
) -> None:
    """Retention stopped before it had removed the oldest file, and the next one began behind it."""
    journal = bench.journal
    for number in range(4):
        journal.append_batch(build_batch(0, number, 1, [b"%d" % number]))
        bench.flush()
        journal.start_segment()
    bench.flush()
    third = journal.segments[2]
    bench.directory.write_start(third.sequence, third.head.start_offsets, [(0, 1, 2)])
    bench.directory.remove_segment(journal.segments[1].sequence)

    def missing() -> list[str]:
        main(["log", "verify", "--json", str(tmp_path)])
        problems = json.loads(capsys.readouterr().out)["problems"]
        return [each for each in problems if "are missing" in each]

    assert not missing()
    bench.directory.remove_segment(third.sequence)
    assert "1 records before it are missing" in missing()[0]


def test_verify_says_by_which_epoch(bench: ReplicaBench, tmp_path: Path, capsys: Capture) -> None:
    journal = bench.journal
    journal.append_batch(build_batch(0, 0, 3, [b"a", b"b"]))
    journal.append_batch(build_batch(0, 2, 3, [b"c", b"d"]))
    bench.flush()
    journal.truncate(0, 2)
    journal.append_batch(build_batch(0, 2, 4, [b"e"]))
    journal.reset(1, 70)
    bench.flush()
    assert main(["log", "verify", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["problems"]
    supersedes, anew = found["notes"]
    assert "offsets 2 to 4 of partition 0 before it are superseded by epoch 4" in supersedes
    assert "partition 1 begins again at offset 70" in anew
    assert main(["log", "inspect", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["partitions"]["0"] == {"start": 0, "end": 3, "records": 3}
    assert found["segments"][0]["superseded"] == 2


def test_what_is_committed_but_not_in_the_file_is_not_shown(
    bench: ReplicaBench, tmp_path: Path, capsys: Capture
) -> None:
    """The file still holds what was cut off there."""
    journal = bench.journal
    journal.append_batch(build_batch(0, 0, 1, [b"kept"]))
    journal.append_batch(build_batch(0, 1, 1, [b"cut off"]))
    bench.flush()
    journal.advance(0, 1)
    journal.truncate(0, 1)
    journal.append_batch(build_batch(0, 1, 2, [b"in its place"]))
    journal.advance(0, 2)
    assert journal.high_watermark[0] == 2
    bench.directory.write_watermarks(journal.checkpoint())
    expected: Shown = {0: [b"kept"], 1: [], 2: []}
    assert dumped(tmp_path, capsys) == expected
    opened = ReplicaBench(bench.directory.files)
    assert opened.journal.high_watermark[0] == 1


@pytest.mark.parametrize("segment_bytes", [1500, 1])
def test_an_older_checkpoint_commits_nothing_of_a_log_that_began_again(
    tmp_path: Path, capsys: Capture, segment_bytes: int
) -> None:
    """Committed up to 3, begun again at 1, and the records 1 and 2 may be cut off still."""
    bench = ReplicaBench(OsFileSystem(tmp_path), segment_bytes=segment_bytes)
    journal = bench.journal
    journal.append_batch(build_batch(0, 0, 1, [b"a", b"b", b"c"]))
    bench.flush()
    journal.advance(0, 3)
    bench.directory.write_watermarks(journal.checkpoint())
    assert dumped(tmp_path, capsys)[0] == [b"a", b"b", b"c"]
    journal.reset(0, 1)
    journal.append_batch(build_batch(0, 1, 2, [b"x", b"y"]))
    bench.flush()
    expected: Shown = {0: [], 1: [], 2: []}
    assert dumped(tmp_path, capsys) == expected
    journal.advance(0, 2)
    bench.directory.write_watermarks(journal.checkpoint())
    expected[0] = [b"x"]
    assert dumped(tmp_path, capsys) == expected

"""What a replica's journal does beyond a single node's, step by step."""

from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.cli.main import main
from holdfast.io.disk.storage import Storage, StorageError
from holdfast.log.batch import ATTRIBUTE_RESET, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import DataDirectoryError, create_or_open, open_to_read
from holdfast.log.files.filesystem import SECTOR_BYTES, OsFileSystem
from holdfast.log.files.layout import snapshot_name
from holdfast.log.journal.epoch_table import EpochTable
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.retention import RetentionPolicy
from holdfast.log.journal.segment import Segment, WriteGroup
from holdfast.log.journal.watermarks import Checkpoint, decode_checkpoint, encode_checkpoint
from holdfast.log.record import Record
from holdfast.log.snapshot import SnapshotEncoder
from tests.sim.disk import Crash, SimContent, SimDisk
from tests.support.replica_bench import ReplicaBench, build_batch


def follow(journal: Journal, partition: int, epoch: int, *payloads: bytes) -> None:
    base = journal.next_offset[partition]
    journal.append_batch(build_batch(partition, base, epoch, list(payloads)))


def append(journal: Journal, partition: int, payload: bytes = b"p") -> int:
    return journal.append(
        Record(partition, 1, flags=1, timestamp_us=1, topic=b"t", client_id=b"c", payload=payload)
    )


def take(journal: Journal) -> WriteGroup:
    group = journal.close_write_group()
    assert group is not None
    return group


def finish(journal: Journal, group: WriteGroup) -> None:
    journal.wrote(group)
    journal.commit(group)


def remove_files(bench: ReplicaBench, removed: list[Segment]) -> None:
    Storage(Path(), bench.directory, cast(Any, None), bench.opened).remove_segments(removed)


def batches(group: WriteGroup) -> list[tuple[int, int, int, int]]:
    parsed = [Batch(data) for data in group.data]
    return [(each.partition, each.base_offset, each.count, each.epoch) for each in parsed]


def test_group_tells_what_was_built_here() -> None:
    journal = Journal(3, replicated=True)
    journal.lead(0, 7)
    append(journal, 0)
    follow(journal, 1, 5, b"a", b"b")
    append(journal, 0)
    group = take(journal)
    assert batches(group) == [(0, 0, 2, 7), (1, 0, 2, 5)]
    (built,) = group.built
    assert (built.partition, built.base_offset, built.end_offset) == (0, 0, 2)
    assert built.data == group.data[0]
    assert built.topics() == Batch(built.data).topics()
    assert group.size_bytes == sum(map(len, group.data))
    assert group.end_offsets == [2, 2, 0]
    assert journal.sequence == group.end_sequence == 4


def test_a_single_node_keeps_no_list_of_what_it_built() -> None:
    journal = Journal(1)
    append(journal, 0)
    group = take(journal)
    assert group.built == []
    finish(journal, group)
    assert journal.high_watermark == journal.durable_offset == [1]


def test_a_leaders_batch_stays_byte_for_byte() -> None:
    journal = Journal(1, replicated=True)
    batch = build_batch(0, 0, 3, [b"x", b"y"])
    journal.append_batch(batch)
    group = take(journal)
    assert group.data == [batch.data[8:-4]]


def test_only_a_batch_that_continues_the_partition_is_taken() -> None:
    journal = Journal(2, replicated=True)
    follow(journal, 0, 1, b"a")
    for wrong in (build_batch(0, 0, 1, [b"b"]), build_batch(0, 2, 1, [b"b"])):
        with pytest.raises(ValueError, match="partition 0, which ends at 1"):
            journal.append_batch(wrong)
    with pytest.raises(ValueError, match="partition 2, the journal has 2"):
        journal.append_batch(build_batch(2, 0, 1, [b"b"]))
    mark = BatchBuilder(1, 0)
    mark.attributes = ATTRIBUTE_RESET
    with pytest.raises(ValueError, match="0 records"):
        journal.append_batch(Batch(mark.build(1)))
    assert batches(take(journal)) == [(0, 0, 1, 1)]


def test_a_new_epoch_begins_a_batch() -> None:
    journal = Journal(1, replicated=True)
    journal.lead(0, 1)
    append(journal, 0)
    journal.lead(0, 1)
    append(journal, 0)
    journal.lead(0, 2)
    append(journal, 0)
    assert batches(take(journal)) == [(0, 0, 2, 1), (0, 2, 1, 2)]


def test_leading_after_following_in_one_group() -> None:
    journal = Journal(1, replicated=True)
    journal.lead(0, 1)
    append(journal, 0)
    follow(journal, 0, 2, b"a")
    journal.lead(0, 3)
    append(journal, 0)
    group = take(journal)
    assert batches(group) == [(0, 0, 1, 1), (0, 1, 1, 2), (0, 2, 1, 3)]
    assert [(each.base_offset, each.end_offset) for each in group.built] == [(0, 1), (2, 3)]


def test_durable_is_not_committed() -> None:
    journal = Journal(1, replicated=True)
    follow(journal, 0, 1, b"a", b"b", b"c")
    journal.advance(0, 2)
    assert (journal.high_watermark, journal.durable_offset) == ([2], [0])
    assert journal.checkpoint().offsets == [0]
    finish(journal, take(journal))
    assert (journal.high_watermark, journal.durable_offset, journal.written) == ([2], [3], [3])
    assert journal.checkpoint().offsets == [2]
    journal.advance(0, 1)
    assert journal.high_watermark == [2]
    journal.advance(0, 9)
    assert journal.high_watermark == [3]


def test_truncate_drops_what_is_pending() -> None:
    journal = Journal(2, replicated=True)
    follow(journal, 0, 1, b"a")
    follow(journal, 1, 1, b"b")
    follow(journal, 0, 1, b"c", b"d")
    bytes_before = journal.pending_bytes
    journal.truncate(0, 1)
    assert journal.next_offset == [1, 1]
    assert journal.sequence == 2
    assert 0 < journal.pending_bytes < bytes_before
    follow(journal, 0, 2, b"e")
    assert batches(take(journal)) == [(0, 0, 1, 1), (1, 0, 1, 1), (0, 1, 1, 2)]


def test_truncate_while_groups_are_with_the_writer() -> None:
    journal = Journal(1, replicated=True)
    follow(journal, 0, 1, b"a")
    follow(journal, 0, 1, b"b", b"c")
    first = take(journal)
    follow(journal, 0, 1, b"d")
    second = take(journal)
    journal.truncate(0, 1)
    follow(journal, 0, 2, b"e", b"f")
    third = take(journal)
    finish(journal, first)
    assert (journal.durable_offset, journal.written) == ([1], [1])
    finish(journal, second)
    assert (journal.durable_offset, journal.written) == ([1], [1])
    finish(journal, third)
    assert (journal.durable_offset, journal.written) == ([3], [3])


def test_what_cannot_be_cut() -> None:
    journal = Journal(1, replicated=True)
    follow(journal, 0, 1, b"a")
    follow(journal, 0, 1, b"b", b"c")
    journal.advance(0, 1)
    with pytest.raises(ValueError, match="committed to 1 and ends at 3"):
        journal.truncate(0, 0)
    with pytest.raises(ValueError, match="committed to 1 and ends at 3"):
        journal.truncate(0, 4)
    with pytest.raises(ValueError, match="no batch begins at 2"):
        journal.truncate(0, 2)
    journal.truncate(0, 3)
    assert journal.next_offset == [3]


def test_reset_is_durable_only_with_its_mark() -> None:
    journal = Journal(2, replicated=True)
    follow(journal, 0, 1, b"a", b"b")
    group = take(journal)
    journal.reset(0, 50)
    assert (journal.start_offsets[0], journal.next_offset[0], journal.high_watermark[0]) == (
        50,
        50,
        50,
    )
    assert journal.last_epoch(0) == 0
    finish(journal, group)
    assert (journal.durable_offset[0], journal.checkpoint().offsets[0]) == (0, 0)
    assert journal.pending_bytes > 0
    follow(journal, 0, 4, b"c")
    group = take(journal)
    assert batches(group) == [(0, 50, 0, 0), (0, 50, 1, 4)]
    finish(journal, group)
    assert (journal.durable_offset[0], journal.checkpoint().offsets[0]) == (51, 50)


def test_a_cut_after_a_reset_keeps_the_mark() -> None:
    journal = Journal(1, replicated=True)
    follow(journal, 0, 1, b"a")
    journal.reset(0, 20)
    follow(journal, 0, 2, b"b")
    journal.truncate(0, 20)
    assert batches(take(journal)) == [(0, 20, 0, 0)]


def test_a_segment_of_nothing_but_a_mark_has_a_name_of_its_own() -> None:
    bench = ReplicaBench(SimDisk(), 1, segment_bytes=60)
    for offset in (10, 20, 30):
        bench.journal.reset(0, offset)
        bench.flush()
    follow(bench.journal, 0, 1, b"a")
    bench.flush()
    assert bench.directory.segments() == [0, 1, 2, 3]
    assert ReplicaBench(bench.directory.files).contents(0, 30, 31) == [(1, b"a")]


def test_epoch_ends() -> None:
    journal = Journal(1, replicated=True)
    assert (journal.last_epoch(0), journal.epoch_end(0, 5)) == (0, (0, 0))
    for epoch, payloads in ((2, b"ab"), (3, b"c"), (7, b"de")):
        follow(journal, 0, epoch, *(bytes([each]) for each in payloads))
    follow(journal, 0, 7, b"f")
    assert journal.last_epoch(0) == 7
    assert journal._history._tables[0].entries() == [(2, 0), (3, 2), (7, 3)]
    ends = {epoch: journal.epoch_end(0, epoch) for epoch in range(1, 9)}
    assert ends == {
        1: (0, 0),
        2: (2, 2),
        3: (3, 3),
        4: (3, 3),
        5: (3, 3),
        6: (3, 3),
        7: (7, 6),
        8: (7, 6),
    }
    journal.truncate(0, 3)
    assert (journal.last_epoch(0), journal.epoch_end(0, 9)) == (3, (3, 3))


def test_epoch_table_forgets_what_ended_before() -> None:
    table = EpochTable()
    for epoch, start in ((1, 0), (2, 5), (4, 9)):
        table.add(epoch, start)
    table.forget_before(5)
    assert table.entries() == [(1, 0), (2, 5), (4, 9)]
    table.forget_before(6)
    assert table.entries() == [(2, 5), (4, 9)]
    assert table.end_of(1, 20) == (0, 5)
    table.add(3, 7)
    assert table.entries() == [(2, 5), (3, 7)]


def test_epochs_outlive_the_records() -> None:
    """Retention has removed everything of a partition; a restart still knows its last epoch."""
    disk = SimDisk()
    bench = ReplicaBench(disk, 2, segment_bytes=300)
    follow(bench.journal, 0, 3, b"a", b"b")
    bench.flush()
    for number in range(5):
        follow(bench.journal, 1, 4, b"%d" % number * 200)
        bench.flush()
    for partition in (0, 1):
        bench.journal.advance(partition, bench.journal.next_offset[partition])
    removed = bench.journal.remove_oldest(3)
    assert len(removed) == 3
    oldest = bench.journal.segments[0]
    bench.directory.write_start(
        oldest.sequence, oldest.head.start_offsets, bench.journal.start_epochs()
    )
    assert bench.directory.read_start_epochs()[0] == (0, 3, 0)
    journal = ReplicaBench(disk.copy(), 2).journal
    assert journal.start_offsets[0] == journal.next_offset[0] == 2
    assert (journal.last_epoch(0), journal.epoch_end(0, 3)) == (3, (3, 2))


def test_retention_stops_at_what_is_committed() -> None:
    bench = ReplicaBench(SimDisk(), 1, segment_bytes=300)
    for number in range(5):
        follow(bench.journal, 0, 1, b"%d" % number * 200)
        bench.flush()
    bench.journal.advance(0, 2)
    assert [segment.sequence for segment in bench.journal.remove_oldest(4)] == [0, 1]
    assert bench.journal.start_offsets == [2]


def test_settled_sequence() -> None:
    bench = ReplicaBench(SimDisk(), 2, segment_bytes=300)
    journal = bench.journal
    assert journal.snapshot_sequence([0, 0]) == 0
    for number in range(4):
        follow(journal, number % 2, 1, b"%d" % number * 200)
        bench.flush()
    assert [segment.sequence for segment in journal.segments] == [0, 1, 2, 3]
    assert journal.snapshot_sequence([0, 0]) == 0
    assert journal.snapshot_sequence([1, 0]) == 1
    assert journal.snapshot_sequence([2, 1]) == 3
    assert journal.snapshot_sequence([2, 2]) == 4
    follow(journal, 0, 1, b"pending")
    assert journal.snapshot_sequence([2, 2]) == 3


def test_checkpoint_file_is_whole_or_nothing() -> None:
    checkpoint = Checkpoint([1, 0, 1 << 40], 77, 4096)
    data = encode_checkpoint(checkpoint)
    assert decode_checkpoint(data, 3) == checkpoint
    assert decode_checkpoint(data, 2) is None
    assert decode_checkpoint(data + b"\0", 3) is None
    for at in range(len(data)):
        assert decode_checkpoint(data[:at], 3) is None
        changed = bytearray(data)
        changed[at] ^= 1
        assert decode_checkpoint(bytes(changed), 3) is None


def test_a_lost_checkpoint_says_that_nothing_is_committed() -> None:
    bench = ReplicaBench(SimDisk())
    assert bench.directory.read_watermarks() == [0, 0, 0]
    bench.directory.files.files["watermarks"] = SimContent(b"HFLW")  # type: ignore[attr-defined]
    assert bench.directory.read_watermarks() == [0, 0, 0]


def test_a_checkpoint_older_than_the_journal_commits_nothing() -> None:
    """A removed segment may have the mark with which a partition began again below it."""
    bench = ReplicaBench(SimDisk(), 2)
    journal = bench.journal
    follow(journal, 0, 1, *[b"old"] * 7)
    bench.flush()
    journal.advance(0, 7)
    bench.directory.write_watermarks(journal.checkpoint())
    journal.start_segment()
    journal.reset(0, 3)
    follow(journal, 0, 2, b"committed")
    bench.flush()
    journal.advance(0, 4)
    journal.start_segment()
    follow(journal, 0, 2, b"uncommitted")
    bench.flush()
    removed = journal.remove_oldest(2)
    assert len(removed) == 2
    before = ReplicaBench(bench.directory.files.copy()).journal  # type: ignore[attr-defined]
    assert (before.high_watermark, before.next_offset) == ([3, 0], [5, 0])
    remove_files(bench, removed)
    again = ReplicaBench(bench.directory.files).journal
    assert (again.start_offsets, again.next_offset) == ([4, 0], [5, 0])
    assert again.high_watermark == [4, 0]
    again.truncate(0, 4)


@pytest.mark.parametrize("survival", ["none", "all", "torn", "sectors"])
def test_a_power_cut_leaves_a_checkpoint_that_was_written(survival: str) -> None:
    """Not an empty or a missing file, whatever of the replacement has reached the disk."""
    for crash_at in range(1, 40):
        disk = SimDisk()
        bench = ReplicaBench(disk, 1, segment_bytes=1 << 20)
        written = [Checkpoint([0], 0, 0)]
        disk.steps, disk.crash_at = 0, crash_at
        is_whole = False
        try:
            for number in range(3):
                follow(bench.journal, 0, 1, b"%d" % number)
                bench.flush()
                bench.journal.advance(0, number + 1)
                written.append(bench.journal.checkpoint())
                is_whole = False
                bench.directory.write_watermarks(written[-1])
                is_whole = True
        except Crash:
            pass
        for seed in range(4):
            again = ReplicaBench(disk.after_crash(survival, seed), 1)
            last = again.directory.read_checkpoint()
            assert last in (written[-1:] if is_whole else written[-2:])


def test_a_damaged_replica_stays_unsure_until_it_is_made_good() -> None:
    disk = SimDisk()
    bench = ReplicaBench(disk, 2, segment_bytes=1 << 20)
    for number in range(6):
        follow(bench.journal, number % 2, 1, b"%d" % number)
        bench.flush()
        bench.journal.advance(number % 2, number // 2 + 1)
    bench.directory.write_watermarks(bench.journal.checkpoint())
    content = disk.files[f"journal/{0:020d}.log"]
    # The last batch but one: of partition 0, at offset 2.
    length = len(content.now) // 6
    content.now[4 * length + 60] ^= 1
    again = ReplicaBench(disk)
    assert again.opened.damaged == again.journal.damaged
    assert set(again.journal.damaged) == {0, 1}
    follow(again.journal, 1, 1, b"more")
    again.flush()
    again.directory.write_watermarks(again.journal.checkpoint())
    again = ReplicaBench(disk)
    assert set(again.journal.damaged) == {0, 1}
    for partition in (0, 1):
        again.journal.reset(partition, 0)
        for number in range(3):
            follow(again.journal, partition, 1, b"%d" % number)
    assert again.journal.damaged == {}
    again.flush()
    again.directory.write_watermarks(again.journal.checkpoint())
    again = ReplicaBench(disk)
    assert again.journal.damaged == {}
    assert again.contents(0, 0, 3) == [(1, b"0"), (1, b"1"), (1, b"2")]


def test_synced_data_that_was_cut_off_is_missed() -> None:
    disk = SimDisk()
    bench = ReplicaBench(disk, 1, segment_bytes=1 << 20)
    for number in range(3):
        follow(bench.journal, 0, 1, b"%d" % number)
        bench.flush()
    bench.directory.write_watermarks(bench.journal.checkpoint())
    name = f"journal/{0:020d}.log"
    whole = bytes(disk.files[name].now)
    disk.files[name] = SimContent(whole[: len(whole) * 2 // 3])
    assert set(ReplicaBench(disk).journal.damaged) == {0}
    # Behind the checkpoint it is what a crash leaves.
    disk.files[name] = SimContent(whole + whole[:40])
    assert ReplicaBench(disk).journal.damaged == {}


def _with_a_last_batch() -> tuple[SimDisk, SimContent, int, int]:
    """A disk with one batch behind the checkpoint, the segment, and the place of that batch."""
    disk = SimDisk()
    bench = ReplicaBench(disk, 2, segment_bytes=1 << 20)
    for number in range(5):
        follow(bench.journal, 1, 1, b"%d" % number * 20)
        bench.flush()
    bench.directory.write_watermarks(bench.journal.checkpoint())
    begin = bench.journal.segments[-1].size_bytes
    follow(bench.journal, 0, 1, b"acknowledged" * 200)
    bench.flush()
    return disk, disk.files[f"journal/{0:020d}.log"], begin, bench.journal.segments[-1].size_bytes


def test_a_changed_end_is_not_taken_for_a_torn_one() -> None:
    """Its records may have been acknowledged, and the other replicas have them. Also the openings
    after the one that has cut it off know that."""
    _, _, begin, end = _with_a_last_batch()
    for at in (*range(begin, begin + 64), *range(begin + 64, end - 8, 61)):
        disk, content, _, _ = _with_a_last_batch()
        content.now[at] ^= 1 << at % 8
        for _ in range(2):
            opened = ReplicaBench(disk)
            assert set(opened.journal.damaged) == {0, 1}, at
            assert opened.journal.next_offset == [0, 5]


def test_a_torn_end_is_no_damage() -> None:
    _, _, begin, end = _with_a_last_batch()
    sectors = range(begin // SECTOR_BYTES + 1, end // SECTOR_BYTES)
    cuts = [(kept, b"") for kept in range(begin, end, 7)]
    # Preallocated space, of which a part was written.
    cuts += [(kept, bytes(end - kept)) for kept in range(begin, end - 8, 7)]
    cuts += [(each * SECTOR_BYTES, bytes(SECTOR_BYTES)) for each in sectors]
    for kept, zeros in cuts:
        disk, content, _, _ = _with_a_last_batch()
        whole = bytes(content.now)
        rest = whole[kept + len(zeros) :] if zeros else b""
        disk.files[f"journal/{0:020d}.log"] = SimContent(whole[:kept] + zeros + rest)
        opened = ReplicaBench(disk)
        assert (opened.journal.damaged, opened.journal.next_offset) == ({}, [0, 5]), kept
    assert len(sectors) > 2


def test_a_directory_is_of_one_sort(tmp_path: Path) -> None:
    directory, lock = create_or_open(tmp_path / "c", "n1", 4, "now", "abcd")
    assert directory.manifest.is_replica
    assert directory.manifest.cluster_id == ""
    directory.join_cluster("cluster-1")
    lock.release()
    manifest = open_to_read(tmp_path / "c").manifest
    assert (manifest.cluster_id, manifest.incarnation) == ("cluster-1", "abcd")
    assert (manifest.node_id, manifest.partitions, manifest.created) == ("n1", 4, "now")
    # Another start draws another incarnation; the directory's stays.
    directory, lock = create_or_open(tmp_path / "c", "n1", 4, "later", "other")
    assert directory.manifest == manifest
    lock.release()
    with pytest.raises(DataDirectoryError, match="is a cluster node's: start it with"):
        create_or_open(tmp_path / "c", "n1", 4, "later")
    create_or_open(tmp_path / "single", "n1", 4, "now")[1].release()
    with pytest.raises(DataDirectoryError, match="made by a node without a cluster"):
        create_or_open(tmp_path / "single", "n1", 4, "now", "abcd")
    with pytest.raises(StorageError, match="made by a node without a cluster"):
        Storage.open(tmp_path / "single", "n1", 4, 1 << 20, "abcd")
    text = (tmp_path / "single" / "manifest.json").read_text()
    assert "incarnation" not in text


def test_per_topic_last_counts_what_is_committed(tmp_path: Path) -> None:
    """Of five messages three are committed, and one is void: the two newest that count stay."""
    bench = ReplicaBench(OsFileSystem(tmp_path), 1, segment_bytes=250)
    journal = bench.journal
    for number in range(5):
        follow(journal, 0, 1, b"%d" % number * 100)
        bench.flush()
    journal.truncate(0, 4)
    follow(journal, 0, 2, b"x" * 100)
    bench.flush()
    journal.advance(0, 3)
    storage = Storage(tmp_path, bench.directory, _NoLock(), bench.opened)
    assert storage.superseded(RetentionPolicy(per_topic_last=2)) == 1
    journal.advance(0, 5)
    assert storage.superseded(RetentionPolicy(per_topic_last=2)) == 3


class _NoLock:
    def release(self) -> None:
        return None


def test_opening_believes_a_snapshot_over_an_older_checkpoint(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path, "n1", 1, 1 << 20, "abcd")
    bench = ReplicaBench(OsFileSystem(tmp_path), 1)
    for number in range(4):
        follow(bench.journal, 0, 1, b"%d" % number)
    bench.flush()
    encoder = SnapshotEncoder(0, [3], 0)
    bench.directory.replace_file(snapshot_name(0), encoder.finish())
    storage.close()
    storage = Storage.open(tmp_path, "n1", 1, 1 << 20, "abcd")
    assert storage.journal.high_watermark == [3]
    assert storage.journal.next_offset == [4]
    storage.close()


def test_records_before_a_mark_are_not_missing_at_the_next_start() -> None:
    """A log that begins with marks has the same sequences when its indexes are read. The offsets
    before the marks counted as records of the first segment, so the next one seemed to be lost."""
    bench = ReplicaBench(SimDisk(), 2, segment_bytes=200)
    bench.journal.reset(0, 10)
    bench.journal.reset(1, 20)
    bench.flush()
    for number in range(4):
        follow(bench.journal, 0, 1, b"%d" % number * 60)
        bench.flush()
    assert len(bench.journal.segments) > 2
    bench.journal.check()
    again = ReplicaBench(bench.directory.files).journal
    again.check()
    sequences = [(each.sequence, each.end_sequence()) for each in bench.journal.segments[:-1]]
    assert [(each.sequence, each.end_sequence()) for each in again.segments[:-1]] == sequences
    assert not any(segment.gaps() for segment in again.segments)


@pytest.mark.parametrize("has_later", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
def test_void_records_at_the_start_of_the_journal_are_not_missing(
    tmp_path: Path, has_later: bool, has_index: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal begins as low as the lowest batch of its oldest segment. So the first batch of a
    partition may lie above that, without a record missing before it."""
    bench = ReplicaBench(OsFileSystem(tmp_path), 2)
    journal = bench.journal
    for partition in (0, 1):
        follow(journal, partition, 1, b"a", b"b", b"c", b"d")
    bench.flush()
    journal.advance(0, 2)
    journal.start_segment()
    for partition in (0, 1):
        follow(journal, partition, 1, b"e")
    bench.flush()
    journal.truncate(0, 2)
    follow(journal, 0, 2, b"f")
    journal.forget(1)
    bench.flush()
    removed = journal.remove_oldest(1)
    remove_files(bench, removed)
    snapshot = SnapshotEncoder(journal.sequence, journal.next_offset, 0)
    bench.directory.replace_file(snapshot_name(journal.sequence), snapshot.finish())
    assert (journal.start_offsets, journal.next_offset) == ([2, 0], [3, 0])
    if has_later:
        journal.start_segment()
        follow(journal, 0, 2, b"g")
        bench.flush()
    for _ in range(2):
        if not has_index:
            for path in tmp_path.glob("journal/*.idx"):
                path.unlink()
        again = ReplicaBench(bench.directory.files)
        assert again.journal.sequence == journal.sequence
        assert [each.head.missing for each in again.journal.segments] == [0] * (1 + has_later)
        again.journal.check()
        journal = again.journal
        journal.start_segment()
        has_later += 1
        follow(journal, 0, 2, b"h")
        again.flush()
    assert main(["log", "verify", str(tmp_path)]) == 0, capsys.readouterr().out


def test_positions_of_a_partition_that_is_not_stored_are_in_memory_alone() -> None:
    bench = ReplicaBench(SimDisk(), 2, segment_bytes=200)
    journal = bench.journal
    for number in range(8):
        journal.place(0, 100 * number)
        follow(journal, 1, 1, b"%d" % number * 60)
        assert bench.write()
        # A group that is with the writer does not bring earlier positions back.
        journal.place(0, 100 * number + 50)
        bench.finish()
        journal.check()
    positions = [journal.start_offsets, journal.next_offset, journal.high_watermark]
    positions += [journal.written, journal.durable_offset]
    assert [each[0] for each in positions] == [750] * 5
    assert journal.checkpoint().offsets == [0, 0]
    assert not bench.reader.read_batches(0, 0, 750, 1 << 20)
    assert len(journal.segments) > 2
    journal.advance(1, 8)
    assert journal.remove_oldest(2)
    assert journal.start_offsets[0] == 750
    bench.directory.write_watermarks(journal.checkpoint())
    again = ReplicaBench(bench.directory.files)
    assert (again.journal.next_offset, again.opened.damaged) == ([0, 8], {})
    assert not any(segment.gaps() for segment in again.journal.segments)
    again.journal.place(0, 750)
    again.journal.check()


def test_no_record_of_a_partition_that_is_not_stored_is_taken() -> None:
    journal = Journal(1, replicated=True)
    follow(journal, 0, 1, b"a")
    with pytest.raises(AssertionError):
        journal.place(0, 7)
    journal.forget(0)
    journal.place(0, 7)
    with pytest.raises(AssertionError):
        follow(journal, 0, 1, b"b")
    with pytest.raises(AssertionError):
        append(journal, 0)
    journal.reset(0, 3)
    follow(journal, 0, 1, b"b")
    assert journal.next_offset == [4]


def test_a_forgotten_log_is_there_until_its_mark_is_on_the_disk() -> None:
    bench = ReplicaBench(SimDisk(), 2)
    journal = bench.journal
    follow(journal, 0, 3, b"a", b"b", b"uncommitted")
    follow(journal, 1, 3, b"c")
    bench.flush()
    journal.advance(0, 2)
    bench.directory.write_watermarks(journal.checkpoint())
    journal.forget(0)
    journal.forget(0)
    assert journal.logged(journal.high_watermark) == [0, 0]
    assert journal.high_watermark == [2, 0]
    # Before the mark is on the disk, the log is there as before.
    before = ReplicaBench(bench.directory.files.copy()).journal  # type: ignore[attr-defined]
    assert (before.start_offsets, before.next_offset) == ([0, 0], [3, 1])
    assert batches(take(journal)) == [(0, 0, 0, 0)]


def test_a_forgotten_partition_is_neither_lost_nor_damaged_after_a_start() -> None:
    bench = ReplicaBench(SimDisk(), 2)
    journal = bench.journal
    follow(journal, 0, 3, b"a", b"b")
    follow(journal, 1, 3, b"c")
    bench.flush()
    journal.advance(0, 2)
    journal.forget(0)
    journal.place(0, 900)
    bench.flush()
    bench.directory.write_watermarks(journal.checkpoint())
    again = ReplicaBench(bench.directory.files)
    journal = again.journal
    assert (journal.start_offsets[0], journal.next_offset[0]) == (0, 0)
    assert (journal.high_watermark[0], journal.last_epoch(0)) == (0, 0)
    assert not again.opened.damaged
    assert not again.opened.damage
    journal.place(0, 1)
    follow(journal, 1, 3, b"d" * 60)
    again.flush()
    journal.start_segment()
    follow(journal, 1, 3, b"e" * 60)
    again.flush()
    assert journal.segments[-1].start_offsets() == [0, 2]
    # Its leader's log begins before.
    journal.reset(0, 0)
    follow(journal, 0, 1, b"a", b"b", b"f")
    again.flush()
    once_more = ReplicaBench(again.directory.files)
    assert once_more.contents(0, 0, 3) == [(1, b"a"), (1, b"b"), (1, b"f")]
    assert not once_more.opened.damaged


def test_damage_costs_no_trust_in_a_partition_that_is_not_stored() -> None:
    bench = ReplicaBench(SimDisk(), 2)
    journal = bench.journal
    follow(journal, 1, 3, b"c")
    bench.flush()
    bench.directory.write_watermarks(Checkpoint([0, 1], 0, 1 << 20))
    again = ReplicaBench(bench.directory.files)
    assert again.opened.damaged == {0: 0, 1: 0}
    again.journal.place(0, 500)
    assert again.journal.damaged == {1: 0}

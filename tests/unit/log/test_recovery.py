"""Opening a journal after what can happen to its files. Every crash point and every flipped byte
are in tests/model/test_log_crash.py."""

import pytest

from holdfast.log.batch import Batch
from holdfast.log.files.layout import snapshot_name
from holdfast.log.journal.recovery import open_journal, replay
from holdfast.log.record import CONTROL, SESSION
from holdfast.log.snapshot import SnapshotEncoder
from tests.sim.disk import SimContent, SimDisk
from tests.support.log_bench import LogBench, contents


def filled(disk: SimDisk, groups: int = 20, segment_bytes: int = 2000) -> LogBench:
    bench = LogBench(disk, segment_bytes=segment_bytes)
    for number in range(groups):
        bench.append(f"t/{number % 5}", b"x" * 300)
        bench.append("home", b"", kind=SESSION if number % 4 == 0 else CONTROL)
        bench.write()
    bench.writer.close()
    return bench


def logs(disk: SimDisk) -> list[str]:
    return sorted(name for name in disk.files if name.endswith(".log"))


def test_an_empty_directory() -> None:
    bench = LogBench(SimDisk())
    assert bench.records() == []
    assert bench.journal.next_offset == [0, 0, 0]


def test_sealed_segments_are_not_read() -> None:
    disk = SimDisk()
    before = filled(disk)
    assert len(before.journal.segments) > 3
    again = LogBench(disk, segment_bytes=2000)
    last = len(disk.files[logs(disk)[-1]].now)
    assert again.opened.scanned_bytes == last
    assert again.journal.next_offset == before.journal.next_offset
    assert again.journal.sequence == before.journal.sequence
    assert contents(again.records()) == contents(before.records())


def test_missing_index_is_made_anew() -> None:
    disk = SimDisk()
    before = contents(filled(disk).records())
    name = logs(disk)[1].replace(".log", ".idx")
    content = bytes(disk.files.pop(name).now)
    again = LogBench(disk, segment_bytes=2000)
    assert len(again.opened.rebuilt) == 1
    assert bytes(disk.files[name].now) == content
    assert contents(again.records()) == before
    assert LogBench(disk, segment_bytes=2000).opened.rebuilt == []


def test_going_on_in_the_last_segment() -> None:
    disk = SimDisk()
    filled(disk, groups=1)
    again = LogBench(disk, segment_bytes=2000)
    again.append("t/0", b"more")
    group = again.write()
    assert group is not None
    assert not group.starts_segment
    assert group.position > 0
    assert len(logs(disk)) == 1


def test_torn_end_is_cut_off_and_kept_in_quarantine() -> None:
    disk = SimDisk()
    before = contents(filled(disk).records())
    last = logs(disk)[-1]
    whole = bytes(disk.files[last].now)
    disk.files[last] = SimContent(whole + b"HFLB half a batch")
    again = LogBench(disk, segment_bytes=2000)
    assert again.opened.truncated is not None
    assert again.opened.truncated.length == 17
    assert bytes(disk.files[last].now) == whole
    assert contents(again.records()) == before
    copies = [name for name in disk.files if name.startswith("quarantine/")]
    assert [bytes(disk.files[name].now) for name in copies] == [b"HFLB half a batch"]


def test_damage_is_reported_once_it_is_in_an_index() -> None:
    disk = SimDisk()
    before = filled(disk)
    name = logs(disk)[0]
    before_damage = bytes(disk.files[name].now)
    content = bytearray(before_damage)
    content[100] ^= 1
    disk.files[name] = SimContent(bytes(content))
    del disk.files[name.replace(".log", ".idx")]
    again = LogBench(disk, segment_bytes=2000)
    assert len(again.opened.damage) == 1
    assert disk.files[name].now == content
    third = LogBench(disk, segment_bytes=2000)
    assert third.opened.damage == []
    gaps = [gap for segment in third.journal.segments for gap in segment.gaps()]
    assert sum(gap.end - gap.start for gap in gaps) == Batch(before_damage).count
    assert third.journal.next_offset == before.journal.next_offset


def test_missing_segment_leaves_a_gap() -> None:
    disk = SimDisk()
    before = filled(disk)
    removed = before.journal.segments[1]
    for ending in (".log", ".idx"):
        del disk.files[f"journal/{removed.sequence:020d}{ending}"]
    again = LogBench(disk, segment_bytes=2000)
    assert again.journal.next_offset == before.journal.next_offset
    lost = [gap.end - gap.start for segment in again.journal.segments for gap in segment.gaps()]
    assert sum(lost) == removed.end_sequence() - removed.sequence


@pytest.mark.parametrize("start_file", [True, False])
def test_offsets_survive_the_removal_of_all_old_segments(start_file: bool) -> None:
    disk = SimDisk()
    bench = filled(disk)
    for _ in range(40):
        bench.append("one", b"x" * 300)
        bench.write()
    expected = list(bench.journal.next_offset)
    bench.remove_oldest(len(bench.journal.segments) - 2)
    bench.writer.close()
    if not start_file:
        # The indexes know it too.
        del disk.files["journal/start.json"]
    again = LogBench(disk, segment_bytes=2000)
    assert again.journal.next_offset == expected
    assert again.journal.start_offsets == bench.journal.start_offsets


def test_interrupted_removal_is_finished() -> None:
    disk = SimDisk()
    bench = filled(disk)
    second = bench.journal.segments[1]
    bench.directory.write_start(second.sequence, second.start_offsets())
    again = LogBench(disk, segment_bytes=2000)
    assert again.opened.removed == [0]
    assert again.journal.start_offsets == second.start_offsets()
    assert f"journal/{0:020d}.log" not in disk.files


def test_index_without_a_segment_is_removed() -> None:
    disk = SimDisk()
    bench = filled(disk)
    bench.directory.write_index(5, b"left behind")
    LogBench(disk, segment_bytes=2000)
    assert 5 not in bench.directory.indexes()


def test_replay_of_state_reads_only_what_it_must() -> None:
    disk = SimDisk()
    bench = filled(disk)
    found = contents(bench.records(state_only=True))
    everything = contents(bench.records())
    assert set(found) < set(everything)
    # Records that came into a batch with one that matters are there as well.
    assert sum(topic == b"home" for _, _, topic, _ in found) == 5
    assert len(found) <= 10


def test_replay_from_offsets() -> None:
    disk = SimDisk()
    bench = filled(disk)
    first = [offset // 2 for offset in bench.journal.next_offset]
    found = contents(list(replay(bench.opened, first, state_only=False)))
    assert found == [each for each in contents(bench.records()) if each[1] >= first[each[0]]]
    assert list(replay(bench.opened, bench.journal.next_offset)) == []


def test_reading_only_changes_nothing() -> None:
    disk = SimDisk()
    bench = filled(disk)
    last = logs(disk)[-1]
    disk.files[last] = SimContent(bytes(disk.files[last].now) + b"half")
    del disk.files[logs(disk)[0].replace(".log", ".idx")]
    before = {name: bytes(content.now) for name, content in disk.files.items()}
    opened = open_journal(bench.directory, writes=False)
    assert opened.journal.next_offset == bench.journal.next_offset
    assert opened.truncated is not None
    assert {name: bytes(content.now) for name, content in disk.files.items()} == before


def write_snapshot(bench: LogBench) -> None:
    """As of now; nothing in it but what it vouches for."""
    sequence = bench.journal.committed_sequence
    encoder = SnapshotEncoder(sequence, bench.journal.high_watermark, 0)
    bench.directory.replace_file(snapshot_name(sequence), encoder.finish())


@pytest.mark.parametrize("how", ["flipped", "cut", "zeros", "gone"])
def test_an_end_below_the_newest_snapshot_is_damage(how: str) -> None:
    disk = SimDisk()
    bench = LogBench(disk)
    for number in range(5):
        bench.append("t", b"%d" % number)
        bench.write()
    (name,) = (name for name in disk.files if name.endswith(".log"))
    bench.writer.close()
    before = len(disk.files[name].now)
    write_snapshot(bench)
    bench.append("t", b"later")
    bench.write()
    bench.writer.close()
    content = bytearray(disk.files[name].now)
    end = len(content)
    if how == "flipped":
        content[before - 3] ^= 1
        # What came after the snapshot is lost as well: a crash may have torn it.
        del content[before:]
    elif how == "cut":
        del content[before - 3 :]
    elif how == "zeros":
        content[before - 96 :] = bytes(end - before + 96)
    if how == "gone":
        del disk.files[name]
    else:
        disk.files[name] = SimContent(bytes(content))
    expected = list(bench.journal.next_offset)
    partition = expected.index(6)
    again = LogBench(disk)
    assert again.journal.next_offset[partition] >= 5
    if how != "gone":
        assert again.opened.truncated is None
        assert len(again.opened.damage) == 1
        assert "snapshot" in again.opened.damage[0].reason
        gaps = again.journal.segments[-1].gaps()
        assert (partition, 4) in [(gap.partition, gap.start) for gap in gaps]
    _, offset = again.append("t", b"next")
    assert offset >= 5
    again.write()
    again.writer.close()
    third = LogBench(disk)
    assert third.opened.damage == []
    assert third.journal.next_offset[partition] == offset + 1
    assert third.records()[-1].payload == b"next"


def test_a_torn_end_behind_the_newest_snapshot_is_none() -> None:
    disk = SimDisk()
    bench = LogBench(disk)
    bench.append("t", b"0")
    bench.write()
    write_snapshot(bench)
    bench.append("t", b"1")
    bench.write()
    bench.writer.close()
    (name,) = (name for name in disk.files if name.endswith(".log"))
    content = bytes(disk.files[name].now)
    disk.files[name] = SimContent(content[:-3])
    again = LogBench(disk)
    assert again.opened.damage == []
    assert again.opened.truncated is not None
    assert sum(again.journal.next_offset) == 1

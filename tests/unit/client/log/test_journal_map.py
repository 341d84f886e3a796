import random
from pathlib import Path
from typing import Any

import pytest

import holdfast.client.log.reading.reader_path as reader_path
import holdfast.client.log.reading.segment_index as segment_map
from holdfast.client.log.reading.journal_index import JournalMap
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange, PartitionBounds
from holdfast.client.log.reading.reader_path import read_pieces
from holdfast.client.log.reading.scan import Coverage
from holdfast.log.columns.decode import decode_rows
from holdfast.log.files.data_directory import DataDirectoryError
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.record import CONTROL, MESSAGE, SESSION, Record
from tests.support.journal_files import TIME_US, Journal, batches_of, build, record


@pytest.fixture(params=["as shipped", "small", "no indexes"])
def journal(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Journal:
    """Everything also with marks and reads so small that each batch crosses them, and with a
    journal that has lost its indexes."""
    if request.param == "small":
        monkeypatch.setattr(segment_map, "MARK_BYTES", 300)
        monkeypatch.setattr(segment_map, "WINDOW_BYTES", 64)
        monkeypatch.setattr(segment_map, "CHUNK_BYTES", 104)
        monkeypatch.setattr(reader_path, "CHUNK_BYTES", 104)
    indexed = request.param != "no indexes"
    return Journal(tmp_path / "data", partitions=3, segment_bytes=2000, indexed=indexed)


def fill(journal: Journal, batches: int, seed: int = 1) -> None:
    chance = random.Random(seed)
    for _ in range(batches):
        number = len(journal.batches)
        records = [
            record(
                f"t/{number}",
                bytes(chance.randrange(120)),
                timestamp_us=TIME_US + number * 1000 + index,
            )
            for index in range(chance.randrange(1, 5))
        ]
        journal.append(chance.randrange(journal.partitions), records)


def mapped(journal: Journal) -> JournalMap:
    found = JournalMap(str(journal.directory))
    found.refresh()
    return found


def ends(found: JournalMap) -> list[int]:
    bounds = found.bounds()
    return [bounds[partition].end for partition in sorted(bounds)]


def read(
    found: JournalMap, ranges: list[OffsetRange], *, loss: bool = False
) -> tuple[list[tuple[int, int]], int]:
    """(partition, offset) of the rows, and how many offsets were skipped."""
    coverage = Coverage(ranges, fail_on_data_loss=not loss)
    rows: list[dict[str, Any]] = []
    for chunk in read_pieces(found.pieces(ranges), coverage):
        for batch in decode_rows(chunk):
            rows += batch.to_pylist()
    return [(row["partition"], row["offset"]) for row in rows], coverage.skipped


def whole(found: JournalMap) -> list[OffsetRange]:
    return [OffsetRange(p, bound.first, bound.end) for p, bound in found.bounds().items()]


def keys(records: list[Record]) -> list[tuple[int, int]]:
    return [(item.partition, item.offset) for item in records]


def test_reads_everything_in_journal_order(journal: Journal) -> None:
    fill(journal, 60)
    assert len(journal.segments()) > 3
    found = mapped(journal)
    assert ends(found) == journal.next_offset
    assert read(found, whole(found)) == (keys(journal.records()), 0)


def test_any_range_is_exact(journal: Journal) -> None:
    fill(journal, 60)
    found = mapped(journal)
    chance = random.Random(2)
    for _ in range(60):
        ranges = []
        for partition in chance.sample(range(3), chance.randrange(1, 4)):
            start = chance.randrange(journal.next_offset[partition])
            end = chance.randrange(start + 1, journal.next_offset[partition] + 1)
            ranges.append(OffsetRange(partition, start, end))
        wanted = {(r.partition, offset) for r in ranges for offset in range(r.start, r.end)}
        assert read(found, ranges)[0] == [k for k in keys(journal.records()) if k in wanted]


def test_small_ranges_do_not_read_the_whole_journal(journal: Journal) -> None:
    fill(journal, 200)
    found = mapped(journal)
    ranges = [OffsetRange(0, journal.next_offset[0] // 2, journal.next_offset[0] // 2 + 1)]
    assert len(found.pieces(ranges)) == 1


def test_follows_a_journal_that_grows(journal: Journal) -> None:
    found = mapped(journal)
    assert found.bounds() == dict.fromkeys(range(3), PartitionBounds(0, 0))
    for step in range(30):
        before = ends(found)
        fill(journal, 3, seed=step)
        found.refresh()
        assert ends(found) == journal.next_offset
        ranges = [OffsetRange(p, before[p], ends(found)[p]) for p in range(3)]
        rows, _ = read(found, [item for item in ranges if item.records])
        assert rows == keys(journal.records())[-len(rows) :]


def test_every_torn_tail_ends_at_the_last_whole_batch(journal: Journal) -> None:
    fill(journal, 3)
    before = list(journal.next_offset)
    size = journal.segment.stat().st_size
    fill(journal, 1, seed=9)
    data = journal.segment.read_bytes()
    found = mapped(journal)
    for length in range(size, len(data)):
        journal.segment.write_bytes(data[:length])
        # A new map, and one that knew more.
        for each in (mapped(journal), found):
            each.refresh()
            assert ends(each) == before
    journal.segment.write_bytes(data)
    found.refresh()
    assert ends(found) == journal.next_offset


def test_space_allocated_in_advance_is_the_end(journal: Journal) -> None:
    fill(journal, 2)
    found = mapped(journal)
    data = journal.segment.read_bytes()
    journal.segment.write_bytes(data + bytes(4096))
    found.refresh()
    assert ends(found) == ends(mapped(journal)) == journal.next_offset
    more = build(0, journal.next_offset[0], [record()] * 2)
    journal.segment.write_bytes(data + more + bytes(4096 - len(more)))
    found.refresh()
    assert ends(found)[0] == ends(mapped(journal))[0] == journal.next_offset[0] + 2


@pytest.mark.parametrize("sealed", [False, True])
def test_damage_in_the_middle_loses_only_what_it_hit(journal: Journal, sealed: bool) -> None:
    for index in range(3):
        journal.append(0, [record(f"t/{index}", bytes(20))] * 2)
    data = journal.segment.read_bytes()
    third = len(data) // 3
    if sealed:
        journal.segment_bytes = 1
        journal.append(1, [record()])
    first = journal.segments()[0]
    for index in range(0, third, 4):
        damaged = bytearray(data)
        damaged[third + index] ^= 0x10
        first.write_bytes(damaged)
        found = mapped(journal)
        assert ends(found) == journal.next_offset
        ranges = [OffsetRange(0, 0, 6)]
        assert read(found, ranges, loss=True) == ([(0, 0), (0, 1), (0, 4), (0, 5)], 2)
        with pytest.raises(DataLossError, match="offsets 2 to 4 of partition 0"):
            read(found, ranges)


def test_retention(journal: Journal) -> None:
    fill(journal, 60)
    found = mapped(journal)
    everything = whole(found)
    pieces = found.pieces(everything)
    journal.remove_first_segment()
    found.refresh()
    for each in (found, mapped(journal)):
        firsts = [bound.first for _, bound in sorted(each.bounds().items())]
        assert firsts == journal.first_offset
        assert ends(each) == journal.next_offset
        assert read(each, whole(each)) == (keys(journal.records()), 0)
    # Planned before it, run after it.
    with pytest.raises(DataLossError, match="removed by retention, or"):
        list(read_pieces(pieces, Coverage(everything, fail_on_data_loss=True)))


def test_a_partition_of_which_nothing_is_left(journal: Journal) -> None:
    journal.segment_bytes = 1
    journal.append(0, [record()])
    journal.append(1, [record()])
    journal.append(1, [record()])
    journal.remove_first_segment()
    expected = {0: PartitionBounds(1, 1), 1: PartitionBounds(0, 2), 2: PartitionBounds(0, 0)}
    assert mapped(journal).bounds() == expected
    (journal.folder / "start.json").unlink()
    # Without that file the index of the first segment tells; without both nobody does.
    assert mapped(journal).bounds() == (expected if journal.indexed else {1: PartitionBounds(0, 2)})


def test_a_segment_that_retention_was_about_to_remove(journal: Journal) -> None:
    fill(journal, 60)
    first = journal.segments()[0]
    data = first.read_bytes()
    journal.remove_first_segment()
    first.write_bytes(data)
    found = mapped(journal)
    assert read(found, whole(found)) == (keys(journal.records()), 0)


def empty_out(journal: Journal, segment: Path) -> None:
    """Replace a segment by one that has kept its offsets but lost most of its messages."""
    batches = []
    for batch in batches_of(segment.read_bytes()):
        emptied = [record("", kind=CONTROL)] * (batch.count - 1) + batch.records()[-1:]
        batches.append(build(batch.partition, batch.base_offset, emptied))
    segment.with_suffix(".tmp").write_bytes(b"".join(batches))
    segment.with_suffix(".tmp").rename(segment)
    segment.with_suffix(".idx").unlink(missing_ok=True)
    journal.batches = batches + journal.batches[len(batches) :]


def test_a_segment_whose_messages_were_emptied(journal: Journal) -> None:
    fill(journal, 60)
    found = mapped(journal)
    ranges = [OffsetRange(p, bound.first + 5, bound.end - 5) for p, bound in found.bounds().items()]
    pieces = found.pieces(ranges)
    before, _ = read(found, ranges)
    empty_out(journal, journal.segments()[0])
    left = [
        (item.partition, item.offset)
        for item in journal.records()
        if item.kind == MESSAGE and (item.partition, item.offset) in before
    ]
    assert len(left) < len(before)
    for each in (found, mapped(journal)):
        assert read(each, ranges) == (left, 0)
    # Planned before it, run after it.
    coverage = Coverage(ranges, fail_on_data_loss=True)
    assert sum(chunk.records for chunk in read_pieces(pieces, coverage)) == len(before)


@pytest.mark.parametrize("damage", ["head", "log bytes", "gone"])
def test_an_index_that_cannot_be_used(journal: Journal, damage: str) -> None:
    fill(journal, 60)
    for index in journal.folder.glob("*.idx"):
        if damage == "gone":
            index.unlink()
        elif damage == "head":
            index.write_bytes(b"x" + index.read_bytes()[1:])
        else:
            index.write_bytes(ActiveIndex(int(index.stem), [7, 7, 7]).encode())
    found = mapped(journal)
    assert read(found, whole(found)) == (keys(journal.records()), 0)


def test_other_kinds_have_offsets_but_no_rows(journal: Journal) -> None:
    journal.append(0, [record(), record(kind=SESSION), record()])
    found = mapped(journal)
    assert read(found, whole(found)) == ([(0, 0), (0, 2)], 0)


def test_offsets_at_a_time(journal: Journal) -> None:
    fill(journal, 60)
    found = mapped(journal)
    records = journal.records()
    for time_us in range(TIME_US - 500, TIME_US + 61_000, 700):
        expected = list(journal.next_offset)
        for item in reversed(records):
            if item.timestamp_us >= time_us:
                expected[item.partition] = item.offset
        assert found.offsets_at(time_us) == dict(enumerate(expected))


def test_offsets_at_a_time_hours_apart(journal: Journal) -> None:
    for hour in range(30):
        journal.append(0, [record("t", bytes(90), timestamp_us=TIME_US + hour * 3_600_000_000)])
    found = mapped(journal)
    for hour in range(30):
        offsets = found.offsets_at(TIME_US + hour * 3_600_000_000 - 5)
        assert offsets == {0: hour, 1: 0, 2: 0}


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        (None, "no manifest.json"),
        ("{", "damaged"),
        ("{}", "damaged"),
        ("[]", "damaged"),
        ('{"format": 1, "node_id": "n", "created": "", "partitions": 0}', "allowed 1 to"),
        ('{"format": 3, "node_id": "n", "created": "", "partitions": 1}', "format 3"),
    ],
)
def test_not_a_data_directory(tmp_path: Path, manifest: str | None, text: str) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(DataDirectoryError, match=text):
        JournalMap(str(tmp_path))


def test_damage_at_the_very_beginning_is_not_taken_for_retention(journal: Journal) -> None:
    fill(journal, 60)
    first = journal.segments()[0]
    data = bytearray(first.read_bytes())
    data[60] ^= 1
    first.write_bytes(data)
    found = mapped(journal)
    assert [bound.first for bound in found.bounds().values()] == [0, 0, 0]
    with pytest.raises(DataLossError, match="offsets 0 to"):
        read(found, whole(found))
    lost = journal.records()[0]
    assert all(
        key != (lost.partition, lost.offset) for key in read(found, whole(found), loss=True)[0]
    )

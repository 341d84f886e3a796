"""Reading: what tests/model/test_log_reading.py, which compares every read with a naive one, does
not reach: damage, retention under a reader's feet, limits of work, caches."""

import errno

import pytest

from holdfast.log.batch import Batch
from holdfast.log.reading import cache, interest
from holdfast.log.reading.cursor import LogReader, ReadResult
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.segment_reader import Damage
from holdfast.log.reading.segment_store import SegmentStore
from holdfast.log.record import SESSION
from tests.sim.disk import SimContent, SimDisk
from tests.support.log_bench import LogBench

MEGABYTE = 1 << 20


@pytest.fixture
def bench() -> LogBench:
    """60 messages of 6 topics in segments of about 6."""
    bench = LogBench(SimDisk(), segment_bytes=2000)
    fill(bench, 60)
    return bench


def fill(bench: LogBench, count: int) -> None:
    for number in range(count):
        bench.append(f"t/{number % 6}", b"%d" % number + bytes(200))
        bench.write()


def read(
    bench: LogBench,
    *filters: str,
    positions: list[int] | None = None,
    limits: list[int] | None = None,
    records_max: int = 1000,
    bytes_max: int = MEGABYTE,
) -> ReadResult:
    return bench.reader.read(
        positions or [0, 0, 0],
        limits or bench.journal.next_offset,
        [ReadInterest(filter, None) for filter in filters],
        records_max,
        bytes_max,
    )


def read_to_end(bench: LogBench, *filters: str) -> tuple[list[int], int]:
    """The numbers of the messages, and how many were lost."""
    numbers: list[int] = []
    lost = 0
    positions = [0, 0, 0]
    while True:
        result = read(bench, *filters, positions=positions)
        numbers += [int(record.payload.rstrip(b"\0")) for record in result.records]
        lost += result.lost
        positions = result.positions
        if result.done:
            return numbers, lost


def damage_segment(bench: LogBench, number: int) -> None:
    """Changes a byte in the payload of the second batch of a segment."""
    disk = bench.directory.files
    assert isinstance(disk, SimDisk)
    name = f"journal/{bench.journal.segments[number].sequence:020d}.log"
    content = bytearray(disk.files[name].now)
    content[500] ^= 1
    disk.files[name] = SimContent(bytes(content))


def test_no_interest_reads_nothing_but_gets_there(bench: LogBench) -> None:
    assert read_to_end(bench) == ([], 0)


def test_a_read_is_bounded_by_records_and_bytes(bench: LogBench) -> None:
    assert len(read(bench, "#", records_max=7).records) == 7
    assert len(read(bench, "t/1", records_max=3).records) == 3
    by_bytes = read(bench, "#", bytes_max=1000).records
    assert 4 <= len(by_bytes) <= 6
    for nothing in (0, -1):
        assert len(read(bench, "#", records_max=nothing, bytes_max=nothing).records) == 1


def test_a_read_that_finds_nothing_is_bounded_too(bench: LogBench) -> None:
    result = read(bench, "nothing/here")
    assert not result.done
    assert result.records == []
    assert sum(result.positions) > 0
    assert read_to_end(bench, "nothing/here") == ([], 0)


def test_what_is_not_written_is_not_read(bench: LogBench) -> None:
    bench.append("t/0", b"60")
    assert read_to_end_of_file(bench) == 60
    result = read(bench, "#", positions=bench.journal.written)
    assert (result.records, result.done) == ([], False)
    bench.write()
    assert read_to_end_of_file(bench) == 61


def test_reading_on_a_full_disk(bench: LogBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes have to be made anew, and there is no space to keep them."""
    tried: list[int] = []

    def no_space(sequence: int, data: bytes) -> None:
        tried.append(sequence)
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = bench.directory.files
    assert isinstance(disk, SimDisk)
    lost = [f"journal/{each.sequence:020d}.idx" for each in bench.journal.segments[:3]]
    for name in lost:
        disk.remove(name)
    monkeypatch.setattr(bench.directory, "write_index", no_space)
    reader = LogReader(bench.journal, SegmentStore(bench.directory, writes=True))
    found = reader.read(
        [0, 0, 0], bench.journal.next_offset, [ReadInterest("#", None)], 1000, MEGABYTE
    )
    numbers = [int(record.payload.rstrip(b"\0")) for record in found.records]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > sum(segment.head.records for segment in bench.journal.segments[:3])
    assert tried == [segment.sequence for segment in bench.journal.segments[:3]]


def read_to_end_of_file(bench: LogBench) -> int:
    count = 0
    positions = [0, 0, 0]
    while positions != bench.journal.written:
        result = read(bench, "#", positions=positions)
        count += len(result.records)
        positions = result.positions
    return count


def test_a_topic_that_appears_after_a_wildcard_was_matched(bench: LogBench) -> None:
    assert len(read_to_end(bench, "+/9")[0]) == 0
    bench.append("t/9", b"60")
    bench.write()
    assert read_to_end(bench, "+/9") == ([60], 0)


def test_dollar_topics_match_no_leading_wildcard() -> None:
    """[MQTT-4.7.2-1]"""
    bench = LogBench(SimDisk())
    bench.append("$SYS/x", b"1")
    bench.append("x", b"2")
    bench.write()
    assert read_to_end(bench, "#") == ([2], 0)
    assert read_to_end(bench, "+/x") == ([], 0)
    assert read_to_end(bench, "$SYS/#") == ([1], 0)


def test_removed_segments_are_counted_as_lost(bench: LogBench) -> None:
    removed = sum(segment.head.records for segment in bench.journal.segments[:3])
    bench.remove_oldest(3)
    numbers, lost = read_to_end(bench, "#")
    assert lost == removed
    assert numbers == list(range(removed, 60))
    assert bench.reader.fetch(*place_of(bench, 59)) is not None


def place_of(bench: LogBench, number: int) -> tuple[int, int]:
    for record in bench.records():
        if record.payload.startswith(b"%d\0" % number):
            return record.partition, record.offset
    raise AssertionError(number)


@pytest.mark.parametrize("filters", [("#",), ("t/0", "t/1", "t/2", "t/3", "t/4", "t/5")])
def test_a_file_that_vanishes_under_the_reader(bench: LogBench, filters: tuple[str, ...]) -> None:
    segments = bench.journal.segments
    bench.directory.remove_segment(segments[2].sequence)
    numbers, lost = read_to_end(bench, *filters)
    assert lost == segments[2].head.records
    assert len(numbers) + lost == 60
    start = segments[2].start_offsets()
    for partition in range(3):
        if segments[2].end_offsets()[partition] > start[partition]:
            assert bench.reader.fetch(partition, start[partition]) is None
            assert bench.reader.read_batches(partition, start[partition], 99, MEGABYTE) != []


@pytest.mark.parametrize("merged_max", [0, 512])
def test_damage_is_counted_reported_and_passed(
    bench: LogBench, merged_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interest, "TOPICS_MERGED_MAX", merged_max)
    found: list[Damage] = []
    store = SegmentStore(bench.directory, writes=True, on_damage=found.append)
    bench.reader = LogReader(bench.journal, store)
    damage_segment(bench, 1)
    for _ in range(2):
        numbers, lost = read_to_end(bench, "#")
        assert (len(numbers), lost) == (59, 1)
    assert [each.segment for each in found] == [bench.journal.segments[1].sequence]
    assert len(bench.directory.files.list("quarantine")) == 1
    missing = (set(range(60)) - set(numbers)).pop()
    everything = [
        record.offset
        for partition in range(3)
        for data in bench.reader.read_batches(partition, 0, 60, MEGABYTE)
        for record in Batch(data).records()
    ]
    assert len(everything) == 59
    assert missing in range(6, 12)


def test_fetch(bench: LogBench) -> None:
    partition, offset = place_of(bench, 30)
    for _ in range(2):
        record = bench.reader.fetch(partition, offset)
        assert record is not None
        assert record.payload.startswith(b"30\0")
    assert bench.reader.fetch(partition, 1000) is None
    _, offset = bench.append("home", b"", kind=SESSION)
    bench.append("t/1", b"not written")
    written = bench.journal.written
    assert bench.reader.fetch(partition, written[partition]) is None
    bench.write()
    for partition in range(3):
        last = bench.reader.fetch(partition, bench.journal.written[partition] - 1)
        assert last is None or last.topic != b"home"


def test_damaged_index_does_not_stop_a_reader(bench: LogBench) -> None:
    disk = bench.directory.files
    assert isinstance(disk, SimDisk)
    name = f"journal/{bench.journal.segments[1].sequence:020d}.idx"
    content = bytes(disk.files[name].now)
    disk.files[name] = SimContent(content[:-1] + b"?")
    assert read_to_end(bench, "#") == (list(range(60)), 0)
    assert bytes(disk.files[name].now) == content


def test_caches_are_bounded(bench: LogBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "INDEX_CACHE_BYTES", 1000)
    monkeypatch.setattr(cache, "BATCH_CACHE_BYTES", 1000)
    monkeypatch.setattr(cache, "OPEN_FILES_MAX", 2)
    for _ in range(3):
        assert read_to_end(bench, "t/0", "t/1")[0] == [
            number for number in range(60) if number % 6 < 2
        ]
        assert read_to_end(bench, "#")[0] == list(range(60))


def test_forget_segment_reads_the_file_anew(bench: LogBench) -> None:
    sequence = bench.journal.segments[1].sequence
    assert read_to_end(bench, "t/0", "t/1", "t/2", "t/3", "t/4", "t/5")[1] == 0
    damage_segment(bench, 1)
    assert read_to_end(bench, "t/0", "t/1", "t/2", "t/3", "t/4", "t/5")[1] == 0
    bench.reader.forget_segment(sequence)
    assert read_to_end(bench, "t/0", "t/1", "t/2", "t/3", "t/4", "t/5")[1] == 1


def test_offset_for_time_by_record_not_by_batch() -> None:
    bench = LogBench(SimDisk(), partitions=1)
    for number in range(5):
        bench.append("t", b"", timestamp_us=1000 + 10 * number)
    bench.write()
    assert [bench.reader.offset_for_time(0, at) for at in (0, 1000, 1001, 1040, 1041)] == [
        0,
        0,
        1,
        4,
        5,
    ]

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.log.reading import scan
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange
from holdfast.client.log.reading.scan import Coverage, ScanStop, find_batch_in
from holdfast.log.batch import HEADER_BYTES
from holdfast.log.columns.chunk import Chunk
from tests.support.journal_files import build, record

ONE = [record("t", b"payload")]
DATA = build(0, 10, ONE) + build(1, 20, ONE * 3) + build(0, 11, ONE * 2)


def cover(*ranges: tuple[int, int, int], loss: bool = False) -> Coverage:
    return Coverage([OffsetRange(*item) for item in ranges], fail_on_data_loss=not loss)


def test_trims_the_first_and_the_last_batch() -> None:
    chunk, coverage = Chunk(DATA), cover((1, 21, 22), (0, 10, 12))
    stop = coverage.scan(chunk, 0, len(DATA))
    assert (stop.position, stop.damage) == (len(DATA), "")
    assert (chunk.starts, chunk.ends, chunk.records) == ([10, 21, 11], [11, 22, 12], 3)
    assert coverage.done


def test_a_hole_is_an_error() -> None:
    coverage = cover((0, 8, 12))
    with pytest.raises(DataLossError, match="offsets 8 to 10 of partition 0"):
        coverage.scan(Chunk(DATA), 0, len(DATA))


def test_a_hole_can_be_skipped_and_is_counted() -> None:
    chunk, coverage = Chunk(DATA), cover((0, 8, 15), loss=True)
    coverage.scan(chunk, 0, len(DATA))
    coverage.finish("in a test")
    assert (chunk.starts, chunk.ends, coverage.skipped) == ([10, 11], [11, 13], 4)


def test_a_missing_end_is_an_error() -> None:
    coverage = cover((0, 10, 14))
    coverage.scan(Chunk(DATA), 0, len(DATA))
    assert not coverage.done
    with pytest.raises(DataLossError, match="offsets 13 to 14 of partition 0"):
        coverage.finish("in a test")


def test_offsets_that_come_twice_count_once() -> None:
    chunk, coverage = Chunk(DATA + DATA), cover((0, 10, 13))
    coverage.scan(chunk, 0, len(chunk.data))
    assert chunk.records == 3


@pytest.mark.parametrize("length", range(len(DATA)))
def test_stops_before_a_batch_that_is_not_whole(length: int) -> None:
    chunk, coverage = Chunk(DATA[:length]), cover((0, 10, 13), (1, 20, 23))
    stop = coverage.scan(chunk, 0, length)
    assert stop.damage == ""
    assert stop.position <= length
    if stop.needed_bytes:
        assert stop.position + stop.needed_bytes > length
    else:
        assert length - stop.position < HEADER_BYTES


def test_every_flipped_byte_is_noticed() -> None:
    data = build(0, 0, ONE)
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 0x20
        chunk, coverage = Chunk(bytes(damaged)), cover((0, 0, 1))
        stop = coverage.scan(chunk, 0, len(data))
        assert chunk.positions == []
        # A changed partition looks like a batch that nobody wants; then the offset is missing.
        assert stop.damage or not coverage.done


def one_by_one(data: bytes, *ranges: tuple[int, int, int]) -> tuple[Chunk, Coverage, ScanStop]:
    chunk, coverage = Chunk(data), cover(*ranges, loss=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "scan_stretch", None)
        return chunk, coverage, coverage.scan(chunk, 0, len(data))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_many_at_once_are_scanned_as_one_by_one(data: st.DataObject) -> None:
    ends = [data.draw(st.integers(0, 50)) for _ in range(4)]
    starts = list(ends)
    pieces = []
    for _ in range(data.draw(st.integers(8, 25))):
        partition = data.draw(st.integers(0, 3))
        if data.draw(st.integers(0, 30)) == 0:
            ends[partition] += 1  # lost
        if data.draw(st.integers(0, 30)) == 0:
            ends[partition] = max(0, ends[partition] - 2)  # again
        count = data.draw(st.integers(1, 4))
        pieces.append(build(partition, ends[partition], [record("t", bytes(count))] * count))
        ends[partition] += count
    raw = bytearray(b"".join(pieces))
    for _ in range(data.draw(st.integers(0, 2))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    ranges = []
    for partition in data.draw(st.sets(st.integers(0, 3), min_size=1)):
        start = data.draw(st.integers(0, starts[partition] + 8))
        ranges.append((partition, start, data.draw(st.integers(start, start + 40))))
    length = data.draw(st.sampled_from([len(raw), len(raw) - 5, len(raw) // 2]))
    expected, expected_coverage, expected_stop = one_by_one(bytes(raw[:length]), *ranges)
    chunk, coverage = Chunk(bytes(raw[:length])), cover(*ranges, loss=True)
    stop = coverage.scan(chunk, 0, length)
    assert (chunk.positions, chunk.starts, chunk.ends, chunk.records) == (
        expected.positions,
        expected.starts,
        expected.ends,
        expected.records,
    )
    assert stop == expected_stop
    assert (coverage.next, coverage.skipped) == (expected_coverage.next, expected_coverage.skipped)


def test_offsets_that_were_passed_are_not_missing() -> None:
    chunk, coverage = Chunk(DATA), cover((0, 5, 15))
    coverage.note_passed([(0, 5, 8), (0, 8, 10), (0, 13, 15)])
    stop = coverage.scan(chunk, 0, len(DATA), stop_at_holes=True)
    assert (stop.position, stop.damage) == (len(DATA), "")
    coverage.finish("in a test")
    assert coverage.done
    assert coverage.skipped == 0
    coverage = cover((0, 5, 15))
    coverage.note_passed([(0, 6, 10)])
    with pytest.raises(DataLossError, match="offsets 5 to 10"):
        coverage.scan(Chunk(DATA), 0, len(DATA))


def test_a_later_batch_of_an_answer_overrides_an_earlier_one() -> None:
    data = build(0, 10, ONE * 5) + build(0, 12, ONE * 2) + build(0, 14, ONE * 9)
    chunk, coverage = Chunk(data), cover((0, 11, 30))
    coverage.scan(chunk, 0, len(data), limits={0: 16})
    assert (chunk.starts, chunk.ends, chunk.records) == ([11, 12, 14], [12, 14, 16], 5)
    assert coverage.next == {0: 16}


def test_the_format_of_a_later_version_is_named() -> None:
    data = bytearray(build(0, 0, ONE))
    data[12] = 2
    coverage = cover((0, 0, 1))
    stop = coverage.scan(Chunk(bytes(data)), 0, len(data))
    assert stop.damage == "batch format 2, this program reads 1"
    with pytest.raises(DataLossError, match=r"offsets 0 to 1 of partition 0 .*batch format 2"):
        coverage.finish("in a test")


def test_a_batch_is_found_behind_damage() -> None:
    data = b"HFLB" * 6 + DATA + bytes(80)
    assert find_batch_in(memoryview(data), 0) == 24
    assert find_batch_in(memoryview(data), 32) == 24 + len(build(0, 10, ONE))
    assert find_batch_in(memoryview(data[: 24 + 30]), 0) is None

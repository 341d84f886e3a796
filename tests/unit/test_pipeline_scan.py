import pytest

from holdfast.log.record import HEADER_BYTES
from holdfast.pipeline.offsets import DataLossError, OffsetRange
from holdfast.pipeline.scan import Chunk, Coverage
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

"""Scanning a segment that is larger than the window it is read through."""

import pytest

from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.reading.scan import WINDOW_BYTES, scan_segment
from holdfast.log.record import MESSAGE, Record


class Memory:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, position: int, length: int) -> bytes:
        return self.data[position : position + length]

    def size(self) -> int:
        return len(self.data)


@pytest.mark.parametrize("payload_bytes", [70_000, 262_000])
def test_no_batch_is_lost_where_a_window_ends(payload_bytes: int) -> None:
    batches: list[bytes] = []
    size_bytes = 0
    while size_bytes < 3 * WINDOW_BYTES:
        builder = BatchBuilder(0, len(batches))
        builder.add(
            Record(
                builder.partition,
                MESSAGE,
                flags=1,
                timestamp_us=1,
                topic=b"t",
                client_id=b"c",
                payload=bytes(payload_bytes),
            )
        )
        batches.append(builder.build(0))
        size_bytes += len(batches[-1])
    scan = scan_segment(Memory(b"".join(batches)), 0, [0])
    assert scan.damage == []
    assert scan.torn is None
    assert scan.index.batch_count() == len(batches)
    assert scan.index.head.end_offsets == [len(batches)]


def batch(partition: int, base_offset: int, payload: bytes = b"p", count: int = 1) -> bytes:
    builder = BatchBuilder(partition, base_offset)
    for _ in range(count):
        builder.add(
            Record(
                builder.partition,
                MESSAGE,
                flags=1,
                timestamp_us=1,
                topic=b"t",
                client_id=b"c",
                payload=payload,
            )
        )
    return builder.build(0)


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_zeros_at_the_end_are_no_damage() -> None:
    data = batch(0, 0)
    scan = scan_segment(Memory(data + bytes(10_000)), 0, [0])
    assert (scan.end, scan.torn, scan.damage) == (len(data), None, [])


def test_a_few_bytes_at_the_end_are_torn() -> None:
    data = batch(0, 0)
    scan = scan_segment(Memory(data + b"HFLB"), 0, [0])
    assert scan.torn is not None
    assert (scan.torn.position, scan.torn.length) == (len(data), 4)


def test_a_damaged_header_is_passed_by_looking_for_the_next_batch() -> None:
    first, second, third = batch(0, 0), batch(1, 0), batch(0, 1)
    scan = scan_segment(Memory(first + flipped(second, 5) + third), 9, [0, 0])
    assert [(each.segment, each.position, each.length) for each in scan.damage] == [
        (9, len(first), len(second))
    ]
    assert scan.index.head.end_offsets == [2, 0]
    # Partition 0 has gone on, so nothing of it is missing.
    assert scan.uncertain == {1: len(second) // 40}


def test_a_damaged_body_tells_which_offsets_it_held() -> None:
    first, second, third = batch(0, 0), batch(1, 0, count=3), batch(0, 1)
    scan = scan_segment(Memory(first + flipped(second, 90) + third), 0, [0, 0])
    assert len(scan.damage) == 1
    assert scan.uncertain == {}
    assert scan.index.head.end_offsets == [2, 3]
    gaps = [(gap.partition, gap.start, gap.end) for gap in scan.index.head.gaps]
    assert gaps == [(1, 0, 3)]


def test_a_batch_in_a_payload_is_not_taken_for_one() -> None:
    """Neither when the batch around it is damaged, nor when it is cut off."""
    forged = batch(0, 1, b"forged")
    for padding in range(8):
        carrier = batch(0, 0, bytes(padding) + forged)
        following = batch(0, 1, b"true")
        scan = scan_segment(Memory(flipped(carrier, 95) + following), 0, [0])
        assert scan.index.positions.tolist() == [len(carrier)]
        scan = scan_segment(Memory(carrier[:-8]), 0, [0])
        assert scan.index.batch_count() == 0
        assert scan.torn is not None


def test_a_batch_far_from_where_the_partition_stands_is_not_believed_after_damage() -> None:
    first = batch(0, 0)
    forged = batch(0, 1_000_000, b"forged")
    noise = b"\xa5" * 64
    scan = scan_segment(Memory(first + noise + forged), 0, [0])
    assert scan.index.head.end_offsets == [1]
    assert scan.torn is not None


def test_a_valid_batch_that_cannot_be_there_is_damage() -> None:
    first, again, unknown, last = batch(0, 0), batch(0, 0), batch(7, 0), batch(0, 1)
    scan = scan_segment(Memory(first + again + unknown + last), 0, [0])
    # One after the other, both are passed at once.
    assert sum(each.length for each in scan.damage) == len(again) + len(unknown)
    assert "after" in scan.damage[0].reason
    assert scan.index.head.end_offsets == [2]


def test_unknown_start_is_taken_from_the_first_batches() -> None:
    data = batch(0, 500) + batch(0, 501) + batch(1, 7)
    scan = scan_segment(Memory(data), 0, [0, 0, 0], known_start=False)
    assert scan.index.head.start_offsets == [500, 7, 0]
    assert scan.index.head.end_offsets == [502, 8, 0]
    assert scan.index.head.gaps == []

"""Snapshots: what was added comes back, and no damaged or unfinished one is believed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.log.snapshot import (
    CHUNK_BYTES,
    FOOTER_BYTES,
    CorruptSnapshot,
    ReadAt,
    Snapshot,
    SnapshotEncoder,
)

Entries = list[tuple[int, bytes]]


def encoded(entries: Entries, sequence: int = 7, offsets: tuple[int, ...] = (3, 0, 4)) -> bytes:
    encoder = SnapshotEncoder(sequence, offsets, created_us=1_700_000_000_000_000)
    pieces: list[bytes] = []
    for kind, data in entries:
        pieces += encoder.add(kind, data)
    pieces += encoder.finish()
    data = b"".join(pieces)
    assert encoder.size_bytes == len(data)
    assert encoder.entries == len(entries)
    return data


def reading(data: bytes) -> ReadAt:
    return lambda position, length: data[position : position + length]


def opened(data: bytes) -> Snapshot:
    return Snapshot(reading(data), len(data))


def test_header_and_entries_come_back() -> None:
    entries = [(1, b"session"), (2, b""), (70_000, b"\0" * 1000)]
    snapshot = opened(encoded(entries, sequence=1 << 40, offsets=(5, 1 << 50, 0)))
    snapshot.check()
    assert snapshot.sequence == 1 << 40
    assert snapshot.offsets == [5, 1 << 50, 0]
    assert snapshot.created_us == 1_700_000_000_000_000
    assert snapshot.entry_count == 3
    assert list(snapshot.entries()) == entries


def test_empty_state_is_a_valid_snapshot() -> None:
    snapshot = opened(encoded([]))
    snapshot.check()
    assert list(snapshot.entries()) == []


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 0xFFFFFFFF),
            st.integers(0, CHUNK_BYTES + 10).map(lambda length: b"x" * length),
        ),
        max_size=20,
    )
)
def test_any_entries_come_back_in_order(entries: Entries) -> None:
    assert list(opened(encoded(entries)).entries()) == entries


def test_bytes_are_handed_out_as_chunks_fill() -> None:
    encoder = SnapshotEncoder(0, [0], created_us=0)
    assert encoder.add(1, b"small") == []
    ready = encoder.add(1, bytes(CHUNK_BYTES))
    assert sum(map(len, ready)) > CHUNK_BYTES
    assert encoder.add(1, b"small") == []


def test_reader_holds_one_chunk_at_a_time() -> None:
    data = encoded([(1, bytes(1000))] * 2000)
    lengths: list[int] = []

    def read_at(position: int, length: int) -> bytes:
        lengths.append(length)
        return data[position : position + length]

    Snapshot(read_at, len(data)).check()
    assert max(lengths) < CHUNK_BYTES + 2000
    assert sum(lengths) <= len(data) + FOOTER_BYTES


def test_every_truncated_prefix_is_refused() -> None:
    data = encoded([(1, b"a"), (2, b"bcd")])
    for length in range(len(data)):
        with pytest.raises(CorruptSnapshot):
            opened(data[:length])


def test_every_flipped_bit_is_found() -> None:
    data = encoded([(1, b"a"), (2, b"bcd")])
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptSnapshot):
                opened(bytes(damaged)).check()


def test_a_missing_or_repeated_chunk_is_found() -> None:
    entries = [(1, bytes(CHUNK_BYTES)), (2, bytes(CHUNK_BYTES)), (3, b"")]
    data = encoded(entries)
    first = data.index(b"HFSC")
    second = data.index(b"HFSC", first + 4)
    third = data.index(b"HFSC", second + 4)
    for damaged in (
        data[:first] + data[second:],
        data[:third] + data[second:],
        data[:first] + data[second:third] + data[second:third] + data[third:],
    ):
        with pytest.raises(CorruptSnapshot):
            opened(damaged).check()


def test_the_text_says_what_is_wrong() -> None:
    data = encoded([(1, b"a")])
    with pytest.raises(CorruptSnapshot, match="no footer at"):
        opened(data[:-1])
    with pytest.raises(CorruptSnapshot, match="3 bytes are too few"):
        opened(data[:3])
    position = data.index(b"HFSC") + 20
    damaged = data[:position] + b"\xff" + data[position + 1 :]
    with pytest.raises(CorruptSnapshot, match=f"chunk at {position - 20}: checksum"):
        opened(damaged).check()

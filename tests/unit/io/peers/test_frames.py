"""Frames out of a stream that arrives in any pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.io.peers.link import (
    HEADER,
    KEPT_BYTES,
    READ_BYTES,
    FrameTooLong,
    PeerFrameReader,
)

SIZES = st.one_of(
    st.integers(0, 40),
    st.integers(READ_BYTES - 10, READ_BYTES + 10),
    st.integers(0, 3 * READ_BYTES),
)


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


def read(reader: PeerFrameReader, stream: bytes, sizes: list[int]) -> list[tuple[int, bytes]]:
    """As a socket would: as much as there is, as fits and as it happens to give at a time."""
    found: list[tuple[int, bytes]] = []
    at = turn = 0
    while at < len(stream):
        buffer = reader.buffer()
        assert len(buffer) > 0
        count = min(len(buffer), len(stream) - at, sizes[turn % len(sizes)])
        buffer[:count] = stream[at : at + count]
        found += reader.filled(count)
        at += count
        turn += 1
    return found


@given(
    st.lists(st.tuples(st.integers(0, 255), SIZES), max_size=12),
    st.lists(st.integers(1, 2 * READ_BYTES), min_size=1, max_size=6),
)
def test_whatever_the_pieces(frames: list[tuple[int, int]], pieces: list[int]) -> None:
    payloads = [(kind, bytes((kind ^ size & 0xFF,)) * size) for kind, size in frames]
    stream = b"".join(frame(kind, payload) for kind, payload in payloads)
    sizes = [max(piece, len(stream) // 2000) for piece in pieces]
    assert read(PeerFrameReader(1 << 30), stream, sizes) == payloads


def test_byte_by_byte() -> None:
    payloads = [(1, b""), (2, b"x"), (255, b"hello"), (0, b"")]
    stream = b"".join(frame(kind, payload) for kind, payload in payloads)
    assert read(PeerFrameReader(5), stream, [1]) == payloads


def test_a_buffer_that_grew_for_one_frame_is_given_back() -> None:
    reader = PeerFrameReader(1 << 30)
    large = b"x" * (2 * KEPT_BYTES)
    stream = frame(1, large) + frame(2, b"small")
    assert read(reader, stream, [READ_BYTES]) == [(1, large), (2, b"small")]
    assert len(reader.buffer()) == READ_BYTES
    assert read(reader, frame(3, b"after"), [3]) == [(3, b"after")]


def test_buffer_in_use_is_never_resized() -> None:
    """Event loops keep the buffer they were given until after `filled`."""
    reader = PeerFrameReader(1 << 30)
    held = [reader.buffer()]
    held[0][:5] = HEADER.pack(2 * READ_BYTES, 7)
    assert reader.filled(5) == []
    held.append(reader.buffer())
    assert len(held[1]) == 2 * READ_BYTES
    held[1][:] = b"y" * (2 * READ_BYTES)
    assert reader.filled(2 * READ_BYTES) == [(7, b"y" * (2 * READ_BYTES))]


def test_too_long() -> None:
    reader = PeerFrameReader(100)
    assert read(reader, frame(1, b"x" * 100), [1000]) == [(1, b"x" * 100)]
    with pytest.raises(FrameTooLong, match="frame of kind 9 with 101 bytes, more than 100"):
        read(reader, HEADER.pack(101, 9), [5])

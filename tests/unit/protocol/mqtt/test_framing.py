"""FrameReader: any split of the stream gives the same frames, at linear cost."""

import gc
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.fields import varint
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader, frame

Frames = list[tuple[int, bytes]]


def read_all(reader: FrameReader) -> Frames:
    frames = []
    while reader.next():
        frames.append((reader.first, reader.buffer[reader.start : reader.end]))
    return frames


STREAM: Frames = [
    (0xC0, b""),
    (0x30, b"\x00\x01ax"),
    (0x32, b"y" * 127),
    (0x30, b"z" * 128),
    (0xD0, b""),
]
STREAM_BYTES = b"".join(frame(first, body) for first, body in STREAM)


def test_one_read() -> None:
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(STREAM_BYTES)
    assert read_all(reader) == STREAM
    assert not reader.next()


def test_every_split_in_two() -> None:
    for cut in range(len(STREAM_BYTES) + 1):
        reader = FrameReader(PACKET_BYTES_MAX)
        reader.feed(STREAM_BYTES[:cut])
        frames = read_all(reader)
        reader.feed(STREAM_BYTES[cut:])
        assert frames + read_all(reader) == STREAM


def test_every_split_in_three() -> None:
    data = STREAM_BYTES[:8] + frame(0x30, b"z" * 130)[:5]
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            reader = FrameReader(PACKET_BYTES_MAX)
            frames = []
            for piece in (data[:first], data[first:second], data[second:]):
                reader.feed(piece)
                frames += read_all(reader)
            assert frames == STREAM[:2]


def test_byte_by_byte() -> None:
    reader = FrameReader(PACKET_BYTES_MAX)
    frames: Frames = []
    for byte in STREAM_BYTES:
        reader.feed(bytes((byte,)))
        frames += read_all(reader)
    assert frames == STREAM


@given(
    bodies=st.lists(st.binary(max_size=300), max_size=8),
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=8),
    greedy=st.lists(st.booleans(), min_size=1, max_size=8),
)
def test_any_split_read_or_not(bodies: list[bytes], sizes: list[int], greedy: list[bool]) -> None:
    """Feeding goes on while frames are unread, as when a node does not want input for now."""
    expected = [(0x30 | index & 15, body) for index, body in enumerate(bodies)]
    data = b"".join(frame(first, body) for first, body in expected)
    reader = FrameReader(PACKET_BYTES_MAX)
    frames: Frames = []
    position = turn = 0
    while position < len(data):
        size = max(1, sizes[turn % len(sizes)])
        reader.feed(data[position : position + size])
        position += size
        if greedy[turn % len(greedy)]:
            frames += read_all(reader)
        elif reader.next():
            frames.append((reader.first, reader.buffer[reader.start : reader.end]))
        turn += 1
    assert frames + read_all(reader) == expected


@pytest.mark.parametrize("length", [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_each_size_of_length(length: int) -> None:
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(b"\x30" + varint(length) + bytes(length))
    assert reader.next()
    assert reader.end - reader.start == length
    assert reader.start == 1 + len(varint(length))
    assert reader.end == len(reader.buffer)


@pytest.mark.parametrize(
    "header",
    [
        b"\x30\x80\x00",
        b"\x30\xff\x80\x00",
        b"\x30\x80\x80\x80\x00",
        b"\x30\x80\x80\x80\x80",
        b"\x30\xff\xff\xff\xff\x01",
    ],
)
def test_bad_length(header: bytes) -> None:
    """[MQTT-1.5.5-1]"""
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(header)
    with pytest.raises(MalformedPacket):
        reader.next()


def test_too_large_is_known_from_the_header() -> None:
    reader = FrameReader(100)
    reader.feed(b"\x30\x62" + bytes(98))
    assert reader.next()
    for header in (b"\x30\x63", b"\x30\xff\xff\xff\x7f"):
        reader = FrameReader(100)
        reader.feed(header)
        with pytest.raises(ProtocolViolation) as raised:
            reader.next()
        assert raised.value.reason == 0x95
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(b"\x30\xff\xff\xff\x7f")
    assert not reader.next()


def test_no_copy_where_a_read_ends_with_a_packet() -> None:
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(STREAM_BYTES)
    assert reader.next()
    assert reader.buffer is STREAM_BYTES


def test_nothing_is_kept_once_all_is_read() -> None:
    reader = FrameReader(PACKET_BYTES_MAX)
    data = frame(0x30, bytes(60_000))
    reader.feed(data)
    assert read_all(reader) != []
    assert reader.buffer == b""
    reader.feed(data + b"\xc0")
    assert len(read_all(reader)) == 1
    assert reader.buffer == b"\xc0"


def test_memory_follows_what_has_arrived() -> None:
    """Tiny pieces of a large packet take hardly more than their bytes."""
    reader = FrameReader(PACKET_BYTES_MAX)
    piece = b"ab"
    reader.feed(b"\x30\xff\xff\xff\x7f")
    assert not reader.next()
    tracemalloc.start()
    try:
        for _ in range(20_000):
            reader.feed(piece)
            assert not reader.next()
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 80_000


def test_idle_reader_is_small() -> None:
    reader = FrameReader(PACKET_BYTES_MAX)
    size = sys.getsizeof(reader) + sys.getsizeof(getattr(reader, "__dict__", None))
    assert size < 600


def test_pieces_are_joined_once() -> None:
    """Joining at each read would copy a packet of 256 MB some 4,000 times. Each piece is added to
    the same array, and what came before stays where it is."""
    piece = bytes(4096)
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(b"\x30" + varint(8000 * len(piece)))
    assert not reader.next()
    head = reader.buffer
    reader.feed(piece)
    array = reader._more
    assert array is not None
    for count in range(2, 8000):
        assert not reader.next()
        reader.feed(piece)
        assert reader._more is array
        assert len(array) == count * len(piece)
        assert reader.buffer is head
    assert not reader.next()
    reader.feed(piece)
    assert reader.next()
    assert reader.end - reader.start == 8000 * len(piece)

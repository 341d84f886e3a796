"""The frame decoder against that of `websockets`, and where the two differ on purpose."""

import random
import sys
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, SERVER, Protocol, Side

from holdfast.protocol.mqtt.fields import varint
from holdfast.protocol.websocket.frames import (
    BINARY,
    CLOSE,
    INVALID_DATA,
    NO_STATUS,
    PING,
    PROTOCOL_ERROR,
    UNSUPPORTED_DATA,
    FrameDecoder,
    close_payload,
    frame,
)
from holdfast.protocol.websocket.stream import PacketEnds
from tests.e2e import websocket_wire as by_hand

LENGTHS = (0, 1, 2, 3, 4, 5, 125, 126, 127, 65_535, 65_536, 70_000)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Pieces of these sizes in turn."""
    pieces = []
    position = turn = 0
    while position < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(data[position : position + size])
        position += size
        turn += 1
    return pieces


def decoded(decoder: FrameDecoder, pieces: list[bytes]) -> bytes:
    return b"".join(decoder.feed(piece) for piece in pieces)


@given(
    st.lists(st.sampled_from([0, 1, 5, 127, 128, 300, 20_000]), max_size=20),
    st.lists(st.integers(1, 400), min_size=1, max_size=9),
)
def test_the_ends_of_packets_in_any_pieces(bodies: list[int], sizes: list[int]) -> None:
    packets = [b"\x30" + varint(size) + bytes(size) for size in bodies]
    ends = PacketEnds()
    offset = 0
    found: set[int] = set()
    for piece in cut(b"".join(packets), sizes):
        start = 0
        while start < len(piece):
            start = ends.next(piece, start, len(piece))
            found.add(offset + start)
        offset += len(piece)
    assert found.issuperset(accumulate(map(len, packets)))
    pieces = {end for end in range(0, offset, 1) if end in found}
    assert len(pieces) <= len(packets) + len(cut(bytes(offset), sizes))


FRAMES = st.tuples(
    st.sampled_from([0] * 8 + [2] * 8 + [9, 9, 10, 10, 8] + [1, 3, 15]),
    st.one_of(
        st.binary(max_size=130),
        st.sampled_from([b"\x03\xe8", b"\x03\xe8bye", b"\x03\xed", b"\x03", b"\x03\xe8\xff"]),
        st.sampled_from([125, 126, 127, 300]).map(bytes),
    ),
    st.booleans(),
    st.integers(0, 40).map(bool),
    st.sampled_from([0] * 60 + [1, 4]),
)
"""Opcode, payload, FIN, whether it is masked as it must be, reserved bits."""


@settings(max_examples=200, deadline=None)
@given(
    st.lists(FRAMES, max_size=12),
    st.lists(st.sampled_from([1, 2, 3, 7, 64, 1 << 17]), min_size=1, max_size=4),
    st.sampled_from([SERVER, CLIENT]),
)
def test_same_as_the_library(
    frames: list[tuple[int, bytes, bool, bool, int]], sizes: list[int], side: Side
) -> None:
    data = b"".join(
        by_hand.frame(opcode, payload, fin, right == (side is SERVER), reserved)
        for opcode, payload, fin, right, reserved in frames
    )
    decoder = FrameDecoder(masked=side is SERVER)
    library = Protocol(side, max_size=None)
    payload = decoded(decoder, cut(data, sizes))
    library.receive_data(data)

    expected = b""
    ping = None
    text = False
    for one in library.events_received():
        assert isinstance(one, Frame)
        text = text or one.opcode is Opcode.TEXT
        if not text and one.opcode in (Opcode.BINARY, Opcode.CONT):
            expected += one.data
        elif not text and one.opcode is Opcode.PING:
            ping = bytes(one.data)
    if text:
        assert decoder.code == UNSUPPORTED_DATA
        assert payload == expected
    elif library.parser_exc is None:
        assert payload == expected
        assert decoder.ping == ping
        assert decoder.ended == (library.close_rcvd is not None)
        if library.close_rcvd is not None:
            assert (decoder.code, decoder.reason) == (
                library.close_rcvd.code,
                library.close_rcvd.reason,
            )
    elif decoder.failed and decoder.code == UNSUPPORTED_DATA:
        # The library read the text frame to its end, and found the next fault first.
        assert b"\x01" in data or b"\x81" in data
    else:
        assert payload.startswith(expected)
        # A close frame inside a fragmented message ends it all the same.
        ends = str(library.parser_exc) == "incomplete fragmented message"
        assert decoder.failed != ends
        assert ends or decoder.code in (PROTOCOL_ERROR, INVALID_DATA)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("masked", [False, True])
def test_frames_are_read_by_the_library_and_by_ourselves(length: int, masked: bool) -> None:
    payload = random.Random(length).randbytes(length)
    data = frame(BINARY, payload, b"\x01\xfe\x80\x7f" if masked else b"")
    library = Protocol(SERVER if masked else CLIENT, max_size=None)
    library.receive_data(data)
    (one,) = library.events_received()
    assert isinstance(one, Frame)
    assert (one.opcode, bytes(one.data), one.fin) == (Opcode.BINARY, payload, True)
    decoder = FrameDecoder(masked)
    assert decoded(decoder, cut(data, [1 + length // 7])) == payload


def test_a_frame_is_handed_on_as_it_comes() -> None:
    """[MQTT-6.0.0-2] Whatever length it announces, nothing is held back."""
    decoder = FrameDecoder(masked=False)
    assert decoder.feed(b"\x82\x7f" + (1 << 62).to_bytes(8, "big")) == b""
    chunk = bytes(65_536)
    for _ in range(100):
        assert decoder.feed(chunk) == chunk
    held = sum(sys.getsizeof(getattr(decoder, name)) for name in ("_head", "_control", "_key"))
    assert held < 1000
    assert not decoder.ended


def test_the_library_gathers_a_frame() -> None:
    """Why the decoder is our own: this one holds what it is sent, up to its limit."""
    library = Protocol(CLIENT, max_size=1 << 20)
    library.receive_data(b"\x82\x7f" + (1 << 20).to_bytes(8, "big") + bytes(1 << 19))
    assert library.events_received() == []
    library = Protocol(CLIENT, max_size=1 << 20)
    library.receive_data(b"\x82\x7f" + (1 << 21).to_bytes(8, "big"))
    assert isinstance(library.parser_exc, PayloadTooBig)


def test_what_came_before_a_fault_is_delivered_and_nothing_after() -> None:
    decoder = FrameDecoder(masked=True)
    good = by_hand.frame(BINARY, b"good")
    bad = by_hand.frame(3, b"bad")
    assert decoder.feed(good + bad + good) == b"good"
    assert decoder.failed
    assert decoder.feed(good) == b""


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (by_hand.frame(1, b"text"), UNSUPPORTED_DATA),
        (by_hand.frame(BINARY, b"x", masked=False), PROTOCOL_ERROR),
        (by_hand.frame(BINARY, b"x", reserved=4), PROTOCOL_ERROR),
        (by_hand.frame(0, b"x"), PROTOCOL_ERROR),
        (by_hand.frame(BINARY, b"x", fin=False) + by_hand.frame(BINARY), PROTOCOL_ERROR),
        (by_hand.frame(PING, b"x", fin=False), PROTOCOL_ERROR),
        (by_hand.frame(PING, bytes(126)), PROTOCOL_ERROR),
        (by_hand.frame(11), PROTOCOL_ERROR),
        (by_hand.frame(CLOSE, b"\x03"), PROTOCOL_ERROR),
        (by_hand.frame(CLOSE, b"\x03\xed"), PROTOCOL_ERROR),
        (by_hand.frame(CLOSE, b"\x03\xe8\xff\xfe"), INVALID_DATA),
        (b"\x82\xff" + b"\x80" + bytes(7), PROTOCOL_ERROR),
    ],
)
def test_faults(data: bytes, code: int) -> None:
    """[MQTT-6.0.0-1]"""
    for size in (1, len(data)):
        decoder = FrameDecoder(masked=True)
        decoded(decoder, cut(data, [size]))
        assert (decoder.ended, decoder.failed, decoder.code) == (True, True, code)
        assert decoder.reason


def test_only_the_last_ping_waits_for_an_answer() -> None:
    decoder = FrameDecoder(masked=True)
    data = b"".join(by_hand.frame(PING, b"%d" % number) for number in range(1000))
    assert decoder.feed(data) == b""
    assert decoder.ping == b"999"


def test_control_frames_between_fragments() -> None:
    decoder = FrameDecoder(masked=True)
    data = b"".join(
        [
            by_hand.frame(BINARY, b"one", fin=False),
            by_hand.frame(PING, b"?"),
            by_hand.frame(0, b"two", fin=False),
            by_hand.frame(10, b"unasked"),
            by_hand.frame(0, b""),
            by_hand.frame(BINARY, b"three"),
        ]
    )
    assert decoded(decoder, cut(data, [1])) == b"onetwothree"
    assert decoder.ping == b"?"
    assert not decoder.ended


def test_close_payloads() -> None:
    assert close_payload(NO_STATUS, "ignored") == b""
    assert close_payload(1000, "") == b"\x03\xe8"
    assert len(close_payload(1002, "x" * 200)) == 125
    cut_between_bytes = close_payload(1002, "x" * 122 + "é")
    assert cut_between_bytes[2:].decode() == "x" * 122

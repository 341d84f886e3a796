import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.mqtt.errors import MalformedPacket
from holdfast.protocol.mqtt.fields import (
    VARINT_MAX,
    binary_field,
    read_binary,
    read_four,
    read_string,
    read_two,
    read_varint,
    string_field,
    text_of,
    varint,
)

# MQTT 5.0, table 1-1: the ends of each size.
VARINTS = [
    (0, b"\x00"),
    (127, b"\x7f"),
    (128, b"\x80\x01"),
    (16_383, b"\xff\x7f"),
    (16_384, b"\x80\x80\x01"),
    (2_097_151, b"\xff\xff\x7f"),
    (2_097_152, b"\x80\x80\x80\x01"),
    (268_435_455, b"\xff\xff\xff\x7f"),
]


@pytest.mark.parametrize(("value", "encoded"), VARINTS)
def test_varint(value: int, encoded: bytes) -> None:
    """[MQTT-1.5.5-1]"""
    assert varint(value) == encoded
    assert read_varint(b"?" + encoded + b"?", 1, 1 + len(encoded)) == (value, 1 + len(encoded))


@given(st.integers(0, VARINT_MAX))
def test_varint_round_trip(value: int) -> None:
    encoded = varint(value)
    assert read_varint(encoded, 0, len(encoded)) == (value, len(encoded))


@pytest.mark.parametrize("value", [-1, VARINT_MAX + 1])
def test_varint_out_of_range(value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        varint(value)


@pytest.mark.parametrize(
    "encoded", [b"", b"\x80", b"\xff\xff\xff", b"\x80\x00", b"\xff\x80\x00", b"\x80" * 4 + b"\x01"]
)
def test_bad_varint(encoded: bytes) -> None:
    """[MQTT-1.5.5-1] too long, or it ends too early whatever follows"""
    with pytest.raises(MalformedPacket):
        read_varint(encoded + b"\x01", 0, len(encoded))


def test_integers() -> None:
    data = b"?\x01\x02\x03\x04"
    assert read_two(data, 1, 5) == 0x0102
    assert read_four(data, 1, 5) == 0x01020304
    with pytest.raises(MalformedPacket):
        read_two(data, 4, 5)
    with pytest.raises(MalformedPacket):
        read_four(data, 1, 4)


@given(st.binary(max_size=300))
def test_binary_round_trip(data: bytes) -> None:
    encoded = binary_field(data)
    assert read_binary(encoded + b"?", 0, len(encoded)) == (data, len(encoded))
    for end in range(len(encoded)):
        with pytest.raises(MalformedPacket):
            read_binary(encoded, 0, end)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_string_round_trip(text: str) -> None:
    """[MQTT-1.5.4-3] holds for every text, one with a byte order mark included."""
    encoded = string_field(text)
    assert read_string(encoded, 0, len(encoded)) == (text, len(encoded))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"\xc0\x80",  # U+0000 in two bytes
        b"\xe0\x80\xaf",  # "/" in three bytes
        b"\xed\xa0\x80",  # U+D800
        b"\xed\xbf\xbf",  # U+DFFF
        b"\xf4\x90\x80\x80",  # above U+10FFFF
        b"\xe2\x82",  # half a character
        b"a\x00b",
    ],
)
def test_bad_text(data: bytes) -> None:
    """[MQTT-1.5.4-1] [MQTT-1.5.4-2]"""
    with pytest.raises(MalformedPacket):
        text_of(data)


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * 65_536])
def test_text_without_encoding(text: str) -> None:
    """[MQTT-1.5.4-1] [MQTT-1.5.4-2]"""
    with pytest.raises(ValueError):
        string_field(text)


def test_longest_string() -> None:
    assert string_field("x" * 65_535)[:2] == b"\xff\xff"

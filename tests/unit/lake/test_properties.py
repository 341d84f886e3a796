import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_lake.properties import PROPERTIES_TYPE, decode_array


def text(value: str) -> bytes:
    return len(value.encode()).to_bytes(2, "big") + value.encode()


EVERYTHING = (
    b"\x01\x01"
    + b"\x02\x00\x00\x01\x00"
    + b"\x03"
    + text("application/json")
    + b"\x08"
    + text("reply/to")
    + b"\x09\x00\x02\x00\xff"
    + b"\x0b\x80\x01"
    + b"\x23\x00\x07"
    + b"\x26"
    + text("a")
    + text("1")
    + b"\x26"
    + text("a")
    + text("2")
)


def test_every_property() -> None:
    assert decode_array(pa.array([EVERYTHING])).to_pylist() == [
        {
            "payload_is_text": True,
            "message_expiry_s": 256,
            "content_type": "application/json",
            "response_topic": "reply/to",
            "correlation_data": b"\x00\xff",
            "user": [{"key": "a", "value": "1"}, {"key": "a", "value": "2"}],
        }
    ]


@given(st.binary(max_size=40))
def test_anything_else_is_null(block: bytes) -> None:
    assert len(decode_array(pa.array([block]))) == 1


@pytest.mark.parametrize("block", [b"\x11\x00", b"\x02\x00", b"\x26\x00\x01a", b"\x03\x00\x01\xff"])
def test_damage(block: bytes) -> None:
    assert decode_array(pa.array([block])).to_pylist() == [None]


def test_column() -> None:
    found = decode_array(pa.array([None, b"", b"\x26" + text("k") + text("v"), b"\x7f"]))
    assert found.type == PROPERTIES_TYPE
    rows = found.to_pylist()
    assert [row is None for row in rows] == [True, True, False, True]
    assert rows[2]["user"] == [{"key": "k", "value": "v"}]
    assert rows[2]["content_type"] is None

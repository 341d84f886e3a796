"""The batch layout: what goes in comes out, and no changed byte goes unnoticed."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.log.record import (
    ATTRIBUTE_STATE,
    BATCH_BYTES_MAX,
    CURSOR,
    HEAD_BYTES,
    HEADER_BYTES,
    MESSAGE,
    Batch,
    BatchBuilder,
    CorruptBatch,
)

TIME_US = 1_700_000_000_000_000

fields = st.tuples(
    st.sampled_from([MESSAGE, CURSOR]),
    st.integers(0, 255),
    st.integers(-10, 10_000_000_000),
    st.binary(max_size=20),
    st.binary(max_size=20),
    st.binary(max_size=20),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=20),
    st.binary(max_size=50),
    st.booleans(),
)
Fields = tuple[int, int, int, bytes, bytes, bytes, int, int, bytes, bytes, bool]


def built(*records: Fields, partition: int = 3, base_offset: int = 7) -> bytes:
    builder = BatchBuilder(partition, base_offset)
    for kind, flags, delta_us, *rest in records:
        builder.add(kind, flags, TIME_US + delta_us, *rest)  # type: ignore[arg-type]
    assert builder.size_bytes == len(builder.build(5))
    return builder.build(5)


def simple(payload: bytes = b"p", *, topic: bytes = b"t", kind: int = MESSAGE) -> Fields:
    return kind, 1, 0, topic, b"c", b"", 0, 0, b"", payload, False


@given(st.lists(fields, min_size=1, max_size=8))
def test_round_trip(records: list[Fields]) -> None:
    batch = Batch(b"before" + built(*records) + b"after", 6)
    assert (batch.partition, batch.base_offset, batch.epoch) == (3, 7, 5)
    assert batch.end_offset == 7 + len(records)
    assert batch.length % 8 == 0
    assert bool(batch.attributes & ATTRIBUTE_STATE) == any(each[10] for each in records)
    first_us = TIME_US + records[0][2]
    for index, (record, expected) in enumerate(zip(batch.records(), records, strict=True)):
        assert record.offset == 7 + index
        assert record.timestamp_us == min(
            max(TIME_US + expected[2], first_us), first_us + 0xFFFFFFFF
        )
        assert (
            record.kind,
            record.flags,
            record.topic,
            record.client_id,
            record.producer,
            record.producer_epoch,
            record.sequence,
            record.properties,
            record.payload,
        ) == (expected[0], expected[1], *expected[3:10])
        assert batch.topic(index) == (expected[3] if expected[0] == MESSAGE else b"")
    topics, newest_us = batch.topics()
    assert topics == [batch.topic(index) for index in range(batch.count)]
    assert first_us + newest_us == max(each.timestamp_us for each in batch.records())


def test_layout() -> None:
    """The bytes are a contract with every reader."""
    data = built(simple(b"payload"))
    assert data[:4] == b"HFLB"
    assert struct.unpack_from("<I", data, 4) == (len(data),)
    assert data[12] == 1
    assert struct.unpack_from("<H", data, 14) == (3,)
    assert struct.unpack_from("<QII", data, 16) == (7, 5, 1)
    assert struct.unpack_from("<q", data, 32) == (TIME_US,)
    body = HEADER_BYTES + HEAD_BYTES
    assert data[body : body + 9] == b"tcpayload"


def test_every_changed_byte_is_noticed() -> None:
    data = built(simple(b"one"), simple(b"two", topic=b"u"))
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(CorruptBatch):
                Batch(bytes(changed))


def test_every_truncation_is_noticed() -> None:
    data = built(simple(b"one"), simple(b"two"))
    for length in range(len(data)):
        with pytest.raises(CorruptBatch):
            Batch(data[:length])


def test_absurd_length() -> None:
    data = bytearray(built(simple()))
    data[4:8] = (BATCH_BYTES_MAX + 8).to_bytes(4, "little")
    with pytest.raises(CorruptBatch, match="length"):
        Batch(bytes(data))


def test_builder_says_what_the_index_needs() -> None:
    builder = BatchBuilder(0, 0)
    for delta_us, topic, kind in ((0, b"a", MESSAGE), (9, b"b", CURSOR), (5, b"a", MESSAGE)):
        builder.add(kind, 0, TIME_US + delta_us, topic, b"", b"", 0, 0, b"", b"", False)
    assert Batch(builder.build(0)).topics() == (builder.topics, builder.last_delta_us)
    assert builder.topics == [b"a", b"", b"a"]
    assert builder.last_delta_us == 9

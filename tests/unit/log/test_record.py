"""The batch layout: what goes in comes out, and no changed byte goes unnoticed."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.log.batch import (
    ATTRIBUTE_STATE,
    BATCH_BYTES_MAX,
    HEAD_BYTES,
    HEADER_BYTES,
    Batch,
    CorruptBatch,
)
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.record import (
    CONTROL,
    CURSOR,
    FLAG_AUDIENCE,
    FLAG_PACKET_ID,
    FLAG_PRODUCER,
    FLAG_RETAIN,
    FLAG_WILL,
    MESSAGE,
    Record,
)

TIME_US = 1_700_000_000_000_000
FIELDS = (
    *("partition", "offset", "kind", "flags", "timestamp_us", "topic", "client_id", "producer"),
    *("producer_epoch", "sequence", "properties", "payload", "ticket", "audience"),
)
MAX_US = 0xFFFFFFFF
"""After the first record of a batch."""


def record_of(kind: int, flags: int, audience: bytes, **fields: Any) -> Record:
    if not flags & FLAG_AUDIENCE:
        audience = b""
    return Record(3, kind, flags, audience=audience, **fields)


records_of_all_sorts = st.builds(
    record_of,
    st.sampled_from([MESSAGE, CURSOR]),
    st.integers(0, 255),
    st.binary(max_size=20),
    timestamp_us=st.integers(TIME_US - 10, TIME_US + 10_000_000_000),
    topic=st.binary(max_size=20),
    client_id=st.binary(max_size=20),
    producer=st.binary(max_size=20),
    producer_epoch=st.integers(0, (1 << 32) - 1),
    sequence=st.integers(0, (1 << 64) - 1),
    properties=st.binary(max_size=20),
    payload=st.binary(max_size=50),
    ticket=st.integers(0, (1 << 32) - 1),
)


def built(*records: Record, partition: int = 3, base_offset: int = 7) -> bytes:
    builder = BatchBuilder(partition, base_offset)
    for record in records:
        builder.add(record)
    assert builder.size_bytes == len(builder.build(5))
    return builder.build(5)


def simple(payload: bytes = b"p", *, topic: bytes = b"t", kind: int = MESSAGE) -> Record:
    return Record(
        3, kind, flags=1, timestamp_us=TIME_US, topic=topic, client_id=b"c", payload=payload
    )


@given(st.lists(records_of_all_sorts, min_size=1, max_size=8))
def test_round_trip(records: list[Record]) -> None:
    batch = Batch(b"before" + built(*records) + b"after", 6)
    assert (batch.partition, batch.base_offset, batch.epoch) == (3, 7, 5)
    assert batch.end_offset == 7 + len(records)
    assert batch.length % 8 == 0
    first_us = records[0].timestamp_us
    for index, (record, expected) in enumerate(zip(batch.records(), records, strict=True)):
        assert record.offset == expected.offset == 7 + index
        assert record.timestamp_us == min(max(expected.timestamp_us, first_us), first_us + MAX_US)
        expected.timestamp_us = record.timestamp_us
        for name in FIELDS:
            assert getattr(record, name) == getattr(expected, name), name
        assert batch.topic(index) == (expected.topic if expected.kind == MESSAGE else b"")
    topics, newest_us = batch.topics()
    assert topics == [batch.topic(index) for index in range(batch.count)]
    assert first_us + newest_us == max(each.timestamp_us for each in batch.records())


@pytest.mark.parametrize(
    ("kind", "flags", "is_state"),
    [
        (MESSAGE, 2, False),
        (MESSAGE, FLAG_RETAIN, True),
        (MESSAGE, 2 | FLAG_PACKET_ID, True),
        (MESSAGE, 1 | FLAG_PRODUCER, True),
        (MESSAGE, FLAG_WILL, True),
        (CURSOR, 0, True),
        (CONTROL, 0, False),
    ],
)
def test_a_batch_says_whether_recovery_needs_it(kind: int, flags: int, is_state: bool) -> None:
    plain = Record(3, MESSAGE, flags=1)
    batch = Batch(built(plain, Record(3, kind, flags=flags), plain))
    assert batch.attributes == (ATTRIBUTE_STATE if is_state else 0)


@given(st.lists(st.lists(records_of_all_sorts, min_size=1, max_size=4), min_size=1, max_size=4))
def test_batches_are_joined_as_if_their_records_were_added(parts: list[list[Record]]) -> None:
    joined = BatchBuilder(3, 100)
    added = BatchBuilder(3, 100)
    for number, records in enumerate(parts):
        batch = Batch(b"frame" + built(*records) + b"rest", 5)
        offset = 100 + sum(map(len, parts[:number]))
        assert joined.extend(batch) == offset
        for record in batch.records():
            added.add(record)
    assert joined.build(5) == added.build(5)
    assert (joined.topics, joined.last_delta_us) == (added.topics, added.last_delta_us)
    assert (joined.count, joined.size_bytes) == (added.count, added.size_bytes)


def test_a_batch_that_was_built_is_parsed_without_looking() -> None:
    builder = BatchBuilder(3, 7)
    for record in (simple(b"one"), simple(topic=b"u"), simple(kind=CURSOR)):
        builder.add(record)
    data = builder.build(5)
    assert builder.parsed(data).topics() == Batch(data).topics()


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
        builder.add(Record(builder.partition, kind, timestamp_us=TIME_US + delta_us, topic=topic))
    assert Batch(builder.build(0)).topics() == (builder.topics, builder.last_delta_us)
    assert builder.topics == [b"a", b"", b"a"]
    assert builder.last_delta_us == 9

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.client.log.reading.scan import Coverage
from holdfast.log.batch import Batch
from holdfast.log.columns.chunk import Chunk
from holdfast.log.columns.decode import ROWS_MAX, SCHEMA, decode, decode_rows, select
from holdfast.log.record import FLAG_PRODUCER, FLAG_RETAIN, MESSAGE, SESSION, Record
from tests.support.journal_files import TIME_US, build, record

RECORDS = st.builds(
    record,
    st.text(max_size=30),
    st.binary(max_size=40),
    kind=st.sampled_from([MESSAGE, MESSAGE, MESSAGE, SESSION]),
    flags=st.integers(0, 2).flatmap(
        lambda qos: st.sampled_from([qos, qos | FLAG_RETAIN, qos | FLAG_PRODUCER])
    ),
    timestamp_us=st.integers(TIME_US - 1000, TIME_US + 1000),
    client_id=st.text(max_size=14),
    producer=st.text(max_size=14),
    producer_epoch=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**63 - 1),
    properties=st.binary(max_size=20),
    audience=st.binary(max_size=20),
)


def row(item: Record) -> dict[str, Any]:
    """A record as the table has it, decoded the plain way."""
    producer = None
    if item.flags & FLAG_PRODUCER:
        producer = {
            "id": item.producer.decode(),
            "epoch": item.producer_epoch,
            "sequence": item.sequence,
        }
    return {
        "topic": item.topic.decode(),
        "payload": item.payload,
        "partition": item.partition,
        "offset": item.offset,
        "timestamp": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=item.timestamp_us),
        "qos": item.flags & 3,
        "retain": bool(item.flags & FLAG_RETAIN),
        "properties": item.properties,
        "client_id": item.client_id.decode(),
        "producer": producer,
    }


def scan(data: bytes, *ranges: OffsetRange) -> Chunk:
    chunk = Chunk(data)
    coverage = Coverage(ranges, fail_on_data_loss=True)
    coverage.scan(chunk, 0, len(data))
    coverage.finish("in a test")
    return chunk


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_same_as_the_plain_decoding(data: st.DataObject) -> None:
    next_offset = [data.draw(st.integers(0, 2**40)) for _ in range(3)]
    first = list(next_offset)
    batches = []
    for records in data.draw(st.lists(st.lists(RECORDS, min_size=1, max_size=6), max_size=6)):
        partition = data.draw(st.integers(0, 2))
        batches.append(build(partition, next_offset[partition], records))
        next_offset[partition] += len(records)
    ranges = []
    for partition in data.draw(st.sets(st.integers(0, 2))):
        start = data.draw(st.integers(first[partition], next_offset[partition]))
        end = data.draw(st.integers(start, next_offset[partition]))
        ranges.append(OffsetRange(partition, start, end))
    wanted = {item.partition: item for item in ranges}
    expected = [
        row(item)
        for batch in batches
        for item in Batch(batch).records()
        if item.kind == MESSAGE
        and item.partition in wanted
        and wanted[item.partition].start <= item.offset < wanted[item.partition].end
    ]
    rows = [
        found
        for part in decode_rows(scan(b"".join(batches), *ranges))
        for found in part.to_pylist()
    ]
    assert rows == expected


def test_arrays_are_valid_arrow() -> None:
    data = build(1, 7, [record("a/b", bytes(100)), record("long/topic/name/abc", b"", flags=0x11)])
    batch = decode(scan(data, OffsetRange(1, 7, 9)))
    batch.validate(full=True)
    assert batch.schema == SCHEMA


def test_some_columns_in_another_order() -> None:
    data = build(1, 7, [record("a/b", b"x")])
    batch = decode(scan(data, OffsetRange(1, 7, 8)), select(["offset", "topic"]))
    assert batch.to_pylist() == [{"offset": 7, "topic": "a/b"}]
    assert list(batch.to_pylist()[0]) == ["offset", "topic"]


def test_long_batches_are_cut_into_slices() -> None:
    count = ROWS_MAX + 10
    data = build(0, 0, [record("t", b"%d" % index) for index in range(count)])
    parts = list(decode_rows(scan(data, OffsetRange(0, 0, count))))
    assert [part.num_rows for part in parts] == [ROWS_MAX, 10]
    payloads = pa.Table.from_batches(parts).column("payload").to_pylist()
    assert payloads == [b"%d" % index for index in range(count)]


def test_a_batch_without_messages_gives_no_rows() -> None:
    data = build(0, 0, [record(kind=SESSION)])
    assert list(decode_rows(scan(data, OffsetRange(0, 0, 1)))) == []


def test_nothing_found_gives_no_rows() -> None:
    assert list(decode_rows(Chunk(b""))) == []

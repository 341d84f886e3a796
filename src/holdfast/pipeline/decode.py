"""Record batches to Arrow without a Python loop per record.

numpy gathers the fixed-size record heads of all batches of a chunk at once; Arrow copies the
variable parts, which it is given as views (`binary_view`: buffer, position, length). About
10 to 40 ns a field, so that reading the log is as fast as reading Parquet. Knows no Spark.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.log.record import (
    FLAG_PRODUCER,
    FLAG_QOS_MASK,
    FLAG_RETAIN,
    HEAD_BYTES,
    HEAD_FIELDS,
    HEADER_BYTES,
    MESSAGE,
)
from holdfast.pipeline.scan import Chunk

Integers = npt.NDArray[np.int64]

HEAD_DTYPE: Final = np.dtype(HEAD_FIELDS)
ROWS_MAX: Final = 32_768
"""Rows in one Arrow batch: between 10,000 and 50,000 Spark reads fastest."""
VIEW_INLINE_BYTES: Final = 12
"""A binary view of up to this many bytes carries the bytes themselves (Arrow's format)."""

PRODUCER_TYPE: Final = pa.struct(
    [("id", pa.string()), ("epoch", pa.int64()), ("sequence", pa.int64())]
)
SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("payload", pa.binary()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("qos", pa.int8()),
        ("retain", pa.bool_()),
        ("properties", pa.binary()),
        ("client_id", pa.string()),
        ("producer", PRODUCER_TYPE),
    ]
)
"""Every column there is. `properties` is the raw MQTT 5 property block (see properties.py), empty
if there is none; `producer` is null for a message without a producer sequence; `qos` and
`retain` are as published."""


def select(columns: Sequence[str]) -> pa.Schema:
    """The schema of some of the columns, in the order given."""
    return pa.schema([SCHEMA.field(name) for name in columns])


class Heads:
    """The heads of the messages of one chunk as arrays, one element a message, in the order of the
    bytes. Records of other kinds and offsets that do not count are left out."""

    def __init__(self, chunk: Chunk) -> None:
        self.buffer = pa.py_buffer(chunk.data)
        words = np.frombuffer(chunk.data, "<u8", len(chunk.data) // 8)
        batches = np.array(chunk.positions, np.int64)
        # Batches are padded to 8 bytes and headers and heads are multiples of 8 long, so all of
        # them are gathered as 8-byte words.
        header_words = words[(batches >> 3)[:, None] + np.arange(HEADER_BYTES // 8)]
        headers = np.ascontiguousarray(header_words)
        partitions = (headers[:, 1] >> np.uint64(48)).astype(np.int32)
        base_offsets = headers[:, 2].astype(np.int64)
        counts = (headers[:, 3] >> np.uint64(32)).astype(np.int64)
        base_times = headers[:, 4].view(np.int64)

        skipped = np.array(chunk.starts, np.int64) - base_offsets
        wanted = np.array(chunk.ends, np.int64) - np.array(chunk.starts, np.int64)
        batch_of = np.repeat(np.arange(len(batches)), wanted)
        before = np.cumsum(wanted) - wanted
        index = np.arange(len(batch_of)) - (before - skipped)[batch_of]
        heads_start = batches + HEADER_BYTES
        head_word = (heads_start[batch_of] + index * HEAD_BYTES) >> 3
        head_words = words[head_word[:, None] + np.arange(HEAD_BYTES // 8)]
        heads = np.ascontiguousarray(head_words).view(HEAD_DTYPE).reshape(-1)
        messages = heads["kind"] == MESSAGE
        if not messages.all():
            heads, batch_of, index = heads[messages], batch_of[messages], index[messages]

        self.count = len(heads)
        self.flags: npt.NDArray[np.uint8] = heads["flags"]
        self.partition: npt.NDArray[np.int32] = partitions[batch_of]
        self.offset: Integers = base_offsets[batch_of] + index
        self.timestamp_us: Integers = base_times[batch_of] + heads["timestamp_delta_us"]
        self.producer_epoch: Integers = heads["producer_epoch"].astype(np.int64)
        self.sequence: Integers = heads["sequence"].astype(np.int64)
        self.topic_len: Integers = heads["topic_len"].astype(np.int64)
        self.client_id_len: Integers = heads["client_id_len"].astype(np.int64)
        self.producer_len: Integers = heads["producer_len"].astype(np.int64)
        self.properties_len: Integers = heads["properties_len"].astype(np.int64)
        self.payload_len: Integers = heads["payload_len"].astype(np.int64)
        body = (heads_start + counts * HEAD_BYTES)[batch_of]
        self.topic_start: Integers = body + heads["body_start"]
        self.client_id_start = self.topic_start + self.topic_len
        self.producer_start = self.client_id_start + self.client_id_len
        self.properties_start = self.producer_start + self.producer_len
        self.payload_start = self.properties_start + self.properties_len


def decode(chunk: Chunk, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """The messages of a chunk, with the columns of `schema` (some of SCHEMA's, by name)."""
    heads = Heads(chunk)
    arrays = [_COLUMNS[field.name](heads) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def decode_rows(chunk: Chunk, schema: pa.Schema = SCHEMA) -> Iterator[pa.RecordBatch]:
    """As `decode`, in slices of at most ROWS_MAX rows."""
    if not chunk.positions:
        return
    batch = decode(chunk, schema)
    for start in range(0, batch.num_rows, ROWS_MAX):
        yield batch.slice(start, ROWS_MAX)


def gather(buffer: pa.Buffer, starts: Integers, lengths: Integers) -> pa.Array:
    """The byte strings at `starts` with `lengths` as one Arrow binary array."""
    count = len(starts)
    views = np.zeros((count, 4), np.uint32)
    views[:, 0] = lengths
    # A long view holds length, first 4 bytes (only comparisons read them, so they stay zero),
    # buffer number and position.
    views[:, 3] = starts
    short = np.flatnonzero(lengths <= VIEW_INLINE_BYTES)
    if len(short):
        data = np.frombuffer(buffer, np.uint8)
        inside = np.arange(VIEW_INLINE_BYTES)
        # Past the end of the data there is nothing to read: those bytes are blanked anyway.
        places = np.minimum(starts[short][:, None] + inside, len(data) - 1)
        inline = data[places]
        inline[inside >= lengths[short][:, None]] = 0
        views.view(np.uint8).reshape(count, 16)[short, 4:] = inline
    array = pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views), buffer])
    return array.cast(pa.binary())


def _text(buffer: pa.Buffer, starts: Integers, lengths: Integers) -> pa.Array:
    # The broker has verified that these are UTF-8, the checksum that they still are the same.
    return gather(buffer, starts, lengths).view(pa.string())


def _producer(heads: Heads) -> pa.Array:
    has_producer = (heads.flags & FLAG_PRODUCER) != 0
    if not has_producer.any():
        return pa.nulls(heads.count, PRODUCER_TYPE)
    return pa.StructArray.from_arrays(
        [
            _text(heads.buffer, heads.producer_start, heads.producer_len),
            pa.array(heads.producer_epoch),
            pa.array(heads.sequence),
        ],
        fields=list(PRODUCER_TYPE),
        mask=pa.array(~has_producer),
    )


_COLUMNS: Final[dict[str, Callable[[Heads], Any]]] = {
    "topic": lambda heads: _text(heads.buffer, heads.topic_start, heads.topic_len),
    "payload": lambda heads: gather(heads.buffer, heads.payload_start, heads.payload_len),
    "partition": lambda heads: pa.array(heads.partition),
    "offset": lambda heads: pa.array(heads.offset),
    "timestamp": lambda heads: pa.array(heads.timestamp_us).view(pa.timestamp("us", tz="UTC")),
    "qos": lambda heads: pa.array((heads.flags & FLAG_QOS_MASK).astype(np.int8)),
    "retain": lambda heads: pa.array((heads.flags & FLAG_RETAIN) != 0),
    "properties": lambda heads: gather(heads.buffer, heads.properties_start, heads.properties_len),
    "client_id": lambda heads: _text(heads.buffer, heads.client_id_start, heads.client_id_len),
    "producer": _producer,
}

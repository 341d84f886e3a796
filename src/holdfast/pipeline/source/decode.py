"""Record batches to Arrow without a Python loop per record.

numpy gathers the fixed-size record heads of all batches of a chunk at once; Arrow copies the
variable parts, which it is given as views (`binary_view`: buffer, position, length). About
100 ns a record, so that reading the log is as fast as reading Parquet. Knows no Spark.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.pipeline.source.scan import Chunk, headers_at
from holdfast.pipeline.source.topic_filter import TopicFilter
from holdfast.storage.record import (
    FLAG_PRODUCER,
    FLAG_QOS_MASK,
    FLAG_RETAIN,
    HEAD_BYTES,
    HEAD_FIELDS,
    HEADER_BYTES,
    MESSAGE,
)

Places = npt.NDArray[np.int32]
"""Positions in a chunk, whose data is never 2 GiB."""

HEAD_DTYPE: Final = np.dtype(HEAD_FIELDS)
ROWS_MAX: Final = 32_768
"""Rows in one Arrow batch: between 10,000 and 50,000 Spark reads fastest."""
PARTS: Final = ("topic", "client_id", "producer", "properties", "payload")
"""Of a record's body, in order."""
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
    """The messages of one chunk, in the order of the bytes. Records of other kinds and offsets that
    do not count are left out. Fields are made when asked for: what is in use at a time should fit
    the processor's cache."""

    def __init__(self, chunk: Chunk) -> None:
        data = chunk.data
        self.buffer = pa.py_buffer(data)
        self._batches = np.array(chunk.positions, np.int64)
        self._headers = headers_at(data, self._batches)
        self._starts = np.array(chunk.starts, np.int64)
        self._wanted = np.array(chunk.ends, np.int64) - self._starts
        # Of each batch: how many messages are before its own.
        self._before = np.cumsum(self._wanted) - self._wanted
        self._mask: npt.NDArray[np.bool_] | None = None
        skipped = self._starts - self._headers["base_offset"]
        first = (self._batches + HEADER_BYTES + skipped * HEAD_BYTES) >> 3
        words = HEAD_BYTES >> 3
        place = np.repeat(first - self._before * words, self._wanted)
        place += np.arange(0, len(place) * words, words)
        # Batches are padded to 8 bytes, headers and heads are multiples of 8 long: seen as an
        # array with a head at every eighth byte, one step gathers all.
        room = max(0, (len(data) - HEAD_BYTES) // 8 + 1)
        anywhere: npt.NDArray[np.void] = np.ndarray((room,), f"V{HEAD_BYTES}", data, 0, (8,))
        self._heads = anywhere[place].view(HEAD_DTYPE)
        messages = self._heads["kind"] == MESSAGE
        if not messages.all():
            self.keep(messages)

    @property
    def count(self) -> int:
        return len(self._heads)

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        """Only these messages, of those that are left."""
        if self._mask is None:
            self._mask = mask
        else:
            self._mask[self._mask] = mask
        self._heads = self._heads[mask]

    def field(self, name: str) -> npt.NDArray[Any]:
        """Of the heads, see HEAD_FIELDS."""
        values: npt.NDArray[Any] = self._heads[name]
        return values

    def partition(self) -> npt.NDArray[np.int32]:
        return self._of_batch(self._headers["partition"].astype(np.int32))

    def offset(self) -> npt.NDArray[np.int64]:
        values = np.repeat(self._starts - self._before, self._wanted)
        values += np.arange(len(values))
        return values if self._mask is None else values[self._mask]

    def timestamp_us(self) -> npt.NDArray[np.int64]:
        values = self._of_batch(self._headers["base_timestamp_us"])
        values += self.field("timestamp_delta_us")
        return values

    def part(self, name: str) -> tuple[Places, Places]:
        """Where the bytes of a part of the body begin, ascending, and how many there are."""
        body = self._batches + HEADER_BYTES + self._headers["count"].astype(np.int64) * HEAD_BYTES
        start = self._of_batch(body.astype(np.int32))
        start += self.field("body_start").astype(np.int32)
        for each in PARTS:
            length = self.field(f"{each}_len").astype(np.int32)
            if each == name:
                break
            start += length
        return start, length

    def _of_batch(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """For each message what its batch has."""
        repeated = np.repeat(values, self._wanted)
        return repeated if self._mask is None else repeated[self._mask]


def decode(
    chunk: Chunk, schema: pa.Schema = SCHEMA, topics: TopicFilter | None = None
) -> pa.RecordBatch:
    """The messages of a chunk, with the columns of `schema` (some of SCHEMA's, by name); those that
    the filter matches, if one is given."""
    heads = Heads(chunk)
    if topics and heads.count:
        mask = topics.mask(_text(heads, "topic"))
        heads.keep(mask.to_numpy(zero_copy_only=False))
    arrays = [_COLUMNS[field.name](heads) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def decode_rows(
    chunk: Chunk, schema: pa.Schema = SCHEMA, topics: TopicFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """As `decode`, in slices of at most ROWS_MAX rows."""
    if not chunk.positions:
        return
    batch = decode(chunk, schema, topics)
    for start in range(0, batch.num_rows, ROWS_MAX):
        yield batch.slice(start, ROWS_MAX)


def gather(buffer: pa.Buffer, starts: Places, lengths: Places) -> pa.Array:
    """The byte strings at `starts`, which ascend, with `lengths` as one Arrow binary array."""
    count = len(starts)
    if not lengths.any():
        offsets = np.zeros(count + 1, np.int32)
        return pa.Array.from_buffers(
            pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(b"")]
        )
    if int(lengths.min()) <= VIEW_INLINE_BYTES:
        # As every other one of strings that lie side by side: each, and what follows it.
        offsets = np.empty(2 * count + 1, np.int32)
        offsets[:-1:2] = starts
        offsets[1::2] = starts + lengths
        offsets[-1] = offsets[-2]
        array = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), buffer])
        return array.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))
    views = np.zeros((count, 4), np.uint32)
    views[:, 0] = lengths
    # A long view holds length, first 4 bytes (only comparisons read them, so they stay zero),
    # buffer number and position.
    views[:, 3] = starts
    array = pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views), buffer])
    return array.cast(pa.binary())


def _bytes(heads: Heads, part: str) -> pa.Array:
    return gather(heads.buffer, *heads.part(part))


def _text(heads: Heads, part: str) -> pa.Array:
    # The broker has verified that these are UTF-8, the checksum that they still are the same.
    return _bytes(heads, part).view(pa.string())


def _producer(heads: Heads) -> pa.Array:
    has_producer = (heads.field("flags") & FLAG_PRODUCER) != 0
    if not has_producer.any():
        return pa.nulls(heads.count, PRODUCER_TYPE)
    return pa.StructArray.from_arrays(
        [
            _text(heads, "producer"),
            pa.array(heads.field("producer_epoch").astype(np.int64)),
            pa.array(heads.field("sequence").astype(np.int64)),
        ],
        fields=list(PRODUCER_TYPE),
        mask=pa.array(~has_producer),
    )


_COLUMNS: Final[dict[str, Callable[[Heads], Any]]] = {
    "topic": lambda heads: _text(heads, "topic"),
    "payload": lambda heads: _bytes(heads, "payload"),
    "partition": lambda heads: pa.array(heads.partition()),
    "offset": lambda heads: pa.array(heads.offset()),
    "timestamp": lambda heads: pa.array(heads.timestamp_us()).view(pa.timestamp("us", tz="UTC")),
    "qos": lambda heads: pa.array((heads.field("flags") & FLAG_QOS_MASK).astype(np.int8)),
    "retain": lambda heads: pa.array((heads.field("flags") & FLAG_RETAIN) != 0),
    "properties": lambda heads: _bytes(heads, "properties"),
    "client_id": lambda heads: _text(heads, "client_id"),
    "producer": _producer,
}

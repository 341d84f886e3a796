"""Decodes record batches to Arrow, without a Python loop per record.

numpy gathers the fixed-size record heads of all batches of a chunk at once. Arrow copies the
variable parts from views (`binary_view`: buffer, position, length). A record takes about 100 ns, so
reading the log is as fast as reading Parquet. The module imports no Spark.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.log.batch import HEAD_BYTES, HEAD_FIELDS, HEADER_BYTES
from holdfast.log.columns.chunk import Chunk
from holdfast.log.columns.headers import headers_at
from holdfast.log.reading.topic_filter import TopicFilter
from holdfast.log.record import FLAG_PRODUCER, FLAG_QOS_MASK, FLAG_RETAIN, MESSAGE

Places = npt.NDArray[np.int32]
"""Byte positions in a chunk. 32 bits are enough, because a chunk is always smaller than 2 GiB."""

HEAD_DTYPE: Final = np.dtype(HEAD_FIELDS)
ROWS_MAX: Final = 32_768
"""The most rows in one Arrow batch. Spark reads fastest between 10,000 and 50,000."""
PARTS: Final = ("topic", "client_id", "producer", "properties", "payload")
"""The variable parts of a record's body, in order."""
VIEW_INLINE_BYTES: Final = 12
"""The most bytes that a binary view carries itself instead of a position (Arrow's format)."""

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
"""Every column of the source.

`properties` is the raw MQTT 5 property block (see properties.py), empty if there is none.
`producer` is null for a message without a producer sequence. `qos` and `retain` are as published.
"""


def select(columns: Sequence[str]) -> pa.Schema:
    """Returns the schema of some columns, in the given order."""
    return pa.schema([SCHEMA.field(name) for name in columns])


class Heads:
    """The record heads of the messages of one chunk, in byte order.

    Records of other kinds and offsets that do not count are left out. Fields are computed on
    request, so that the data in use at one time fits the processor's cache.
    """

    def __init__(self, chunk: Chunk) -> None:
        data = chunk.data
        self.buffer = pa.py_buffer(data)
        self._batches = np.array(chunk.positions, np.int64)
        self._headers = headers_at(data, self._batches)
        self._starts = np.array(chunk.starts, np.int64)
        self._wanted = np.array(chunk.ends, np.int64) - self._starts
        # For each batch, the number of messages before its first one.
        self._before = np.cumsum(self._wanted) - self._wanted
        self._mask: npt.NDArray[np.bool_] | None = None
        skipped = self._starts - self._headers["base_offset"]
        first = (self._batches + HEADER_BYTES + skipped * HEAD_BYTES) >> 3
        words = HEAD_BYTES >> 3
        place = np.repeat(first - self._before * words, self._wanted)
        place += np.arange(0, len(place) * words, words)
        # Batches are padded to 8 bytes, and headers and heads have lengths that are multiples of 8.
        # So an array with one overlapping head at every eighth byte can be indexed once for all
        # heads.
        room = max(0, (len(data) - HEAD_BYTES) // 8 + 1)
        anywhere: npt.NDArray[np.void] = np.ndarray((room,), f"V{HEAD_BYTES}", data, 0, (8,))
        self._heads = anywhere[place].view(HEAD_DTYPE)
        messages = self._heads["kind"] == MESSAGE
        if not messages.all():
            self.keep(messages)

    @property
    def count(self) -> int:
        """The number of messages that are left."""
        return len(self._heads)

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        """Keeps only the messages of the mask. The mask has one value per message that is left."""
        if self._mask is None:
            self._mask = mask
        else:
            self._mask[self._mask] = mask
        self._heads = self._heads[mask]

    def field(self, name: str) -> npt.NDArray[Any]:
        """Returns a fixed-size field of the heads, see HEAD_FIELDS."""
        values: npt.NDArray[Any] = self._heads[name]
        return values

    def partition(self) -> npt.NDArray[np.int32]:
        """Returns the partition of each message."""
        return self._of_batch(self._headers["partition"].astype(np.int32))

    def offset(self) -> npt.NDArray[np.int64]:
        """Returns the offset of each message."""
        values = np.repeat(self._starts - self._before, self._wanted)
        values += np.arange(len(values))
        return values if self._mask is None else values[self._mask]

    def timestamp_us(self) -> npt.NDArray[np.int64]:
        """Returns the timestamp of each message, in microseconds since 1970."""
        values = self._of_batch(self._headers["base_timestamp_us"])
        values += self.field("timestamp_delta_us")
        return values

    def part(self, name: str) -> tuple[Places, Places]:
        """Returns the byte positions, ascending, and the lengths of one variable part of each
        message."""
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
        """Repeats a value per batch for each of its messages."""
        repeated = np.repeat(values, self._wanted)
        return repeated if self._mask is None else repeated[self._mask]


def decode(
    chunk: Chunk, schema: pa.Schema = SCHEMA, topics: TopicFilter | None = None
) -> pa.RecordBatch:
    """Decodes the messages of a chunk that the filter matches.

    The columns are those of `schema`, a selection of SCHEMA by name.
    """
    heads = Heads(chunk)
    if topics and heads.count:
        mask = topic_mask(topics, _text(heads, "topic"))
        heads.keep(mask.to_numpy(zero_copy_only=False))
    arrays = [_COLUMNS[field.name](heads) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def topic_mask(topics: TopicFilter, column: pa.Array) -> pa.Array:
    """Returns for an array of topics which of them match."""
    encoded = column.dictionary_encode()
    hits = pa.array([topics.matches(topic) for topic in encoded.dictionary.to_pylist()], pa.bool_())
    return hits.take(encoded.indices)


def decode_rows(
    chunk: Chunk, schema: pa.Schema = SCHEMA, topics: TopicFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """Decodes a chunk like `decode`, in slices of at most ROWS_MAX rows."""
    if not chunk.positions:
        return
    batch = decode(chunk, schema, topics)
    for start in range(0, batch.num_rows, ROWS_MAX):
        yield batch.slice(start, ROWS_MAX)


def gather(buffer: pa.Buffer, starts: Places, lengths: Places) -> pa.Array:
    """Returns the byte strings at `starts`, which ascend, as one Arrow binary array."""
    count = len(starts)
    if not lengths.any():
        offsets = np.zeros(count + 1, np.int32)
        return pa.Array.from_buffers(
            pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(b"")]
        )
    if int(lengths.min()) <= VIEW_INLINE_BYTES:
        # A view of a short string would have to carry its bytes. Instead this builds one array of
        # strings that alternate with the gaps between them, and takes every other one.
        offsets = np.empty(2 * count + 1, np.int32)
        offsets[:-1:2] = starts
        offsets[1::2] = starts + lengths
        offsets[-1] = offsets[-2]
        array = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), buffer])
        return array.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))
    views = np.zeros((count, 4), np.uint32)
    views[:, 0] = lengths
    # A long view has length, first 4 bytes, buffer number and position. Only comparisons read the
    # first bytes, so they stay zero.
    views[:, 3] = starts
    array = pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views), buffer])
    return array.cast(pa.binary())


def _bytes(heads: Heads, part: str) -> pa.Array:
    return gather(heads.buffer, *heads.part(part))


def _text(heads: Heads, part: str) -> pa.Array:
    # The broker has verified that these are UTF-8, and the checksum proves that they are unchanged.
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

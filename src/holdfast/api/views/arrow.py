"""Messages of the log as an Arrow IPC stream, written slice by slice.

The columns are those of the Spark source. A response has the messages of one range of offsets per
partition, decided before its first byte. So its size is bounded, and its header can name the cursor
of the next one.
"""

import io
from collections.abc import Sequence

from pyarrow import ipc

from holdfast.log.batch import Batch
from holdfast.log.columns.chunk import Chunk
from holdfast.log.columns.decode import decode_rows, select
from holdfast.log.reading.topic_filter import Clause, TopicFilter


class MissingRecords(Exception):
    """A part of the range cannot be read at this node."""


class ArrowStream:
    """The writer of one response. A thread may call it, one at a time."""

    def __init__(self, columns: Sequence[str], filter: str) -> None:
        """`columns`: some of the Spark source. `filter`: an MQTT filter; empty: all topics."""
        self._topics = TopicFilter((Clause((filter,)),)) if filter else TopicFilter()
        self._schema = select(columns)
        self._sink = io.BytesIO()
        self._writer = ipc.new_stream(self._sink, self._schema)

    def write(self, batches: list[bytes], start: int, end: int) -> bytes:
        """Returns the bytes of a slice: the messages from `start` to at most `end` of whole
        batches. Those of the first slice begin with the head of the stream. Raises `MissingRecords`
        if the batches leave out an offset."""
        for batch in decode_rows(_chunk_of(batches, start, end), self._schema, self._topics):
            if batch.num_rows:
                self._writer.write_batch(batch)
        return self._taken()

    def end(self) -> bytes:
        """Returns the last bytes of the stream."""
        self._writer.close()
        return self._taken()

    def _taken(self) -> bytes:
        data = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return data


def _chunk_of(batches: list[bytes], start: int, end: int) -> Chunk:
    if not batches:
        raise MissingRecords(f"offsets {start} to {end} cannot be read here")
    chunk = Chunk(b"".join(batches))
    position = 0
    for data in batches:
        batch = Batch(data, check=False)
        if batch.base_offset > start:
            raise MissingRecords(f"offsets {start} to {batch.base_offset} cannot be read here")
        chunk.positions.append(position)
        chunk.starts.append(start)
        start = min(batch.end_offset, end)
        chunk.ends.append(start)
        position += len(data)
    return chunk

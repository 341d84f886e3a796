"""Silver `readings`: one row per device, metric and time, made from the records.

All messages of a stream in a step go to one task, in order, with the state that the last step has
left. There `fold.Folder` decodes and marks them in one pass.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.decoders.decoded import PAYLOAD_BYTES_MAX
from holdfast.pipeline.lake.files.commits import ROWS, STATE
from holdfast.pipeline.lake.files.parquet import with_date
from holdfast.pipeline.lake.table import RECORDS, Column, Emptied, Expectation, Table
from holdfast.pipeline.tables.columns import (
    INPUT,
    QUARANTINED_BYTES_MAX,
    STATES,
    Names,
    Piece,
    names_of,
)
from holdfast.pipeline.tables.fold import Folder
from holdfast.pipeline.tables.rules import Rule, with_defaults
from holdfast.pipeline.tables.stream import IDLE_US_MAX
from holdfast.pipeline.tables.topics import Topic, Topics, client_stream

COLUMNS: Final = (
    Column("device", "string", "what the reading is of: by the rule, else the topic"),
    Column("metric", "string", "what was read; nested names with dots; $online: whether the device "
           "is there"),
    Column("event_time", "timestamp", "when it was read: by the payload, else store_time"),
    Column("value_double", "double", "the value if it is a number"),
    Column("value_string", "string", "the value if it is a text; the word of a boolean such as "
           "`off`; of an integer beyond 2^53, which a double cannot hold, its digits"),
    Column("value_boolean", "boolean", "the value if it is true or false; all three null: null"),
    Column("store_time", "timestamp", "when the broker stored the message"),
    Column("sent_time", "timestamp", "when it was published, by the payload, which may have only "
           "its event time; null without any"),
    Column("claimed_time", "timestamp", "the payload's event time if it was not believed: before "
           "2000 or too far ahead of store_time, which then is the event_time"),
    Column("topic", "string", "topic of the message"),
    Column("partition", "int", "log partition"),
    Column("offset", "bigint", "offset in the log partition"),
    Column("position", "int", "number of the reading in its message, from 0"),
    Column("message_id", "string", "the payload's id, if a rule names one"),
    Column("stream", "string", "the stream whose messages have one count: the topic, the device, "
           "or the Sparkplug edge node"),
    Column("run", "bigint", "the run of the stream: another one when its numbers begin again; "
           "null without numbers"),
    Column("sequence", "bigint", "the message's number in the run (Sparkplug: counted on beyond "
           "255)"),
    Column("gap_before", "bigint", "numbers missing before this one when it came; null without "
           "numbers"),
    Column("gap_opened_at", "timestamp", "of a message behind a gap its store_time; of one that "
           "was missing, when that was found; else null"),
    Column("is_late", "boolean", "the event time is older than the device's newest by more than "
           "the rule's lateness"),
    Column("is_historical", "boolean", "Sparkplug: sent as a value of the past"),
    Column("quality", "int", "the quality that the device reports (Sparkplug, OPC UA): 192 good, "
           "64 uncertain, 0 bad, 500 stale; a bad or stale value is null; null without a report"),
    Column("date", "date", "day of store_time, UTC"),
)  # fmt: skip

STATE_COLUMNS: Final = (
    Column("stream", "string", "the stream"),
    Column("state", "string", "what is remembered of it, as JSON"),
    Column("last_time", "timestamp", "store_time of its last message"),
)

REMOVED: Final = "$quarantined"
"""The metric of a message's first reading if an expectation has moved it to the quarantine."""
BATCH_ROWS: Final = 8192
"""The most messages that are read together."""
BATCH_BYTES: Final = 32 << 20
"""The most bytes of their payloads. A longer payload is read alone."""
SLICE_BYTES: Final = 64 << 20
"""The bytes of payloads, client ids and producers that are sorted together, in memory."""
_MESSAGE: Final = (
    "topic", "payload", "bytes", "partition", "offset", "timestamp", "client_id", "producer",
)  # fmt: skip

Integers = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]


def readings_table(
    rules: Sequence[Rule] = (), name: str = "readings", expectations: Sequence[Expectation] = ()
) -> Table:
    """Returns the table with some rules before the default ones, and with expectations."""
    return Table(
        name=name,
        layer="silver",
        source=RECORDS,
        build=ReadingsFold(with_defaults(rules)),
        columns=COLUMNS,
        description="Decoded readings, each message once; gaps, late and unbelievable times marked",
        keys=("device", "metric", "event_time", "partition", "offset", "position"),
        partition_by=("date",),
        date_of_source=True,
        state=STATE_COLUMNS,
        expectations=tuple(expectations),
        emptied=Emptied("position = 0", (("metric", REMOVED), ("value_double", None),
                        ("value_string", None), ("value_boolean", None))),
    )  # fmt: skip


@dataclass(frozen=True)
class ReadingsFold:
    """The StreamFold (see lake/table.py) of the table `readings`."""

    rules: Sequence[Rule]
    """All rules, the default ones included."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns of `records` that the fold needs."""
        return ("topic", "payload", "partition", "offset", "timestamp", "client_id", "producer")

    def __getstate__(self) -> dict[str, Any]:
        return {"rules": self.rules}

    @cached_property
    def _topics(self) -> Topics:
        return Topics(self.rules)

    def spread(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Integers]:
        """Returns the messages with something to read, and a number for each that is equal within a
        stream."""
        sizes = pc.binary_length(rows.column("payload")).fill_null(0)
        rows = rows.append_column("bytes", sizes.cast(pa.int64())).select(_MESSAGE)
        names = names_of(rows.column("topic"))
        topics = [self._topics[name] for name in names.names]
        # An empty payload clears a retained message. It is no statement of the device.
        wanted = np.array([self._is_wanted(name, topic) for name, topic
                           in zip(names.names, topics, strict=True)], np.bool_)  # fmt: skip
        chosen = wanted[names.codes] & (sizes.to_numpy() > 0)
        if not chosen.all():
            rows = rows.filter(pa.array(chosen))
            names = Names(names.names, names.codes[chosen])
        streams = _streams(names, topics, rows.column("client_id"))
        hashes = np.array([crc32(name.encode()) for name in streams.names], np.int64)
        return _with_short_payloads(rows), hashes[streams.codes]

    def _is_wanted(self, name: str, topic: Topic) -> bool:
        # No wildcard matches a topic that begins with $.
        return topic.reader is not None and (self._topics.with_dollar or not name.startswith("$"))

    def spread_states(self, states: pa.RecordBatch) -> Integers:
        """Returns the number of the stream of each state."""
        return np.array([crc32(name.encode()) for name in states["stream"].to_pylist()], np.int64)

    def fold(self, rows: pa.Table, states: pa.Table, oldest_us: int | None) -> Iterator[Piece]:
        """Folds the messages of some streams.

        `oldest_us` is the time of the oldest message in the step, over all tasks.
        """
        states = _recent_states(states, oldest_us)
        if not rows.num_rows:
            yield from _unchanged(states)
            return
        names = names_of(_encoded(rows["topic"]))
        topics = [self._topics[name] for name in names.names]
        streams = _streams(names, topics, _encoded(rows["client_id"]))
        touched = pc.is_in(states["stream"], pa.array(streams.names, pa.string()))
        yield from _unchanged(states.filter(pc.invert(touched)))
        states = states.filter(touched)
        last_us = states["last_time"].cast(pa.int64()).to_pylist()
        texts = zip(states["state"].to_pylist(), last_us, strict=True)
        known = dict(zip(states["stream"].to_pylist(), texts, strict=True))
        messages = _in_order(rows, names, topics, streams)
        for output, batch in Folder(self.rules).fold(messages, known):
            yield output, with_date(batch, "store_time") if output == ROWS else batch


def _streams(names: Names, topics: Sequence[Topic], clients: pa.Array) -> Names:
    """Returns the stream of each row. `topics` has the Topic of each name."""
    found = [topic.stream for topic in topics]
    if None not in found:
        return _named(found, names.codes)  # type: ignore[arg-type]
    of_row = [
        client_stream(client) if found[code] is None else found[code]
        for code, client in zip(names.codes.tolist(), clients.to_pylist(), strict=True)
    ]
    return names_of(pa.array(of_row, pa.string()))


def _named(streams: Sequence[str], codes: npt.NDArray[np.int32]) -> Names:
    of_topic = names_of(pa.array(streams, pa.string()))
    return Names(of_topic.names, of_topic.codes[codes])


def _with_short_payloads(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Cuts payloads that are too long to decode to the part that the quarantine keeps."""
    too_long = pc.greater(rows["bytes"], PAYLOAD_BYTES_MAX)
    if not pc.any(too_long).as_py():
        return rows
    cut = pc.binary_slice(rows["payload"], 0, QUARANTINED_BYTES_MAX)
    return rows.set_column(1, "payload", pc.if_else(too_long, cut, rows["payload"]))


def _recent_states(states: pa.Table, oldest_us: int | None) -> pa.Table:
    """Returns the states without those that are too old for every message of the step."""
    if oldest_us is None:
        return states
    least = pa.scalar(oldest_us - IDLE_US_MAX)
    return states.filter(pc.greater_equal(states["last_time"].cast(pa.int64()), least))


def _unchanged(states: pa.Table) -> Iterator[Piece]:
    for batch in states.select(STATES.names).cast(STATES).to_batches():
        if batch.num_rows:
            yield STATE, batch


def _encoded(texts: pa.ChunkedArray) -> pa.Array:
    """Returns texts as a dictionary in one chunk. The texts together may be too long for one
    chunk."""
    found = texts.dictionary_encode().combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) else found


def _in_order(
    rows: pa.Table, names: Names, topics: Sequence[Topic], streams: Names
) -> Iterator[pa.RecordBatch]:
    """Yields batches of INPUT, stream by stream, with the messages of each in order.

    The payloads may be in memory-mapped files. Only those of one slice are in memory.
    """
    store_us = rows["timestamp"].cast(pa.int64()).to_numpy()
    partitions, offsets = rows["partition"].to_numpy(), rows["offset"].to_numpy()
    by_clock = np.array([topic.by_clock for topic in topics])[names.codes]
    ranks = np.array([topic.rank for topic in topics], np.int32)[names.codes]
    keys = [offsets, partitions]
    if by_clock.any():
        clock = _clock(store_us, streams.codes, partitions, offsets)
        keys += [ranks, np.where(by_clock, clock, 0)]
    order = np.lexsort([*keys, streams.codes])
    sizes = rows["bytes"].to_numpy()[order]
    wanted = rows.select(["payload", "client_id", "producer"])
    found = [pa.array(each.names, pa.string()) for each in (streams, names)]
    for cuts in _slices(_cuts(sizes, streams.codes[order]), _weights(rows)[order]):
        first = cuts[0][0]
        taken = _copy_rows(wanted, order[first : cuts[-1][1]])
        for begin, end in cuts:
            part = taken.slice(begin - first, end - begin)
            at = order[begin:end]
            of_stream, of_topic = (
                pa.DictionaryArray.from_arrays(pa.array(each.codes[at]), texts)
                for each, texts in zip((streams, names), found, strict=True)
            )
            arrays = [
                of_stream, of_topic, part["payload"], pa.array(sizes[begin:end]),
                *(pa.array(each[at]) for each in (partitions, offsets, store_us)),
                part["client_id"], *part["producer"].flatten(), pa.array(ranks[at]),
            ]  # fmt: skip
            yield pa.RecordBatch.from_arrays(arrays, names=list(INPUT))


def _clock(store_us: Integers, streams: Codes, partitions: Codes, offsets: Integers) -> Integers:
    """Returns the time at which each message was stored, made monotonic per stream and partition.

    The broker's clock may be set back. Offsets decide the order within a partition, so a message
    does not get a time before that of its predecessor.
    """
    order = np.lexsort((offsets, partitions, streams))
    times, parts = store_us[order], (streams[order], partitions[order])
    ends = np.logical_or(*(part[1:] != part[:-1] for part in parts))
    if not np.any(~ends & (times[1:] < times[:-1])):
        return store_us
    for part in np.split(times, np.flatnonzero(ends) + 1):
        np.maximum.accumulate(part, out=part)
    found = np.empty_like(store_us)
    found[order] = times
    return found


def _weights(rows: pa.Table) -> Integers:
    """Returns the bytes that each row needs in a slice."""
    weights: Integers = rows["bytes"].to_numpy()
    for texts in (rows["client_id"], pc.struct_field(rows["producer"], "id")):
        weights = weights + pc.fill_null(pc.binary_length(texts), 0).to_numpy()
    return weights


def _slices(cuts: Iterable[tuple[int, int]], sizes: Integers) -> Iterator[list[tuple[int, int]]]:
    """Yields consecutive batches that fit in memory together."""
    found: list[tuple[int, int]] = []
    total = 0
    for begin, end in cuts:
        size = int(sizes[begin:end].sum())
        if found and total + size > SLICE_BYTES:
            yield found
            found, total = [], 0
        found.append((begin, end))
        total += size
    if found:
        yield found


def _copy_rows(rows: pa.Table, wanted: Integers) -> pa.RecordBatch:
    """Returns some rows in some order, copied.

    Rows are taken chunk by chunk, because all rows together may be more than one array can have.
    """
    place = np.argsort(wanted, kind="stable")
    ascending = wanted[place]
    parts = []
    begin = 0
    for batch in rows.to_batches():
        low, high = np.searchsorted(ascending, (begin, begin + len(batch)))
        if high - low == len(batch):
            parts.append(batch)
        elif high > low:
            parts.append(batch.take(pa.array(ascending[low:high] - begin)))
        begin += len(batch)
    back = np.empty_like(place)
    back[place] = np.arange(len(place))
    (found,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
    return found.take(pa.array(back))


def _cuts(sizes: Integers, streams: Codes) -> Iterator[tuple[int, int]]:
    """Yields the begin and end of each batch, within the bounds and between two streams where
    possible.

    A batch that ends between two streams keeps their readings apart.
    """
    total = np.cumsum(sizes)
    ends = np.append(np.flatnonzero(streams[1:] != streams[:-1]) + 1, len(streams))
    begin = 0
    while begin < len(sizes):
        before = total[begin - 1] if begin else 0
        fitting = int(np.searchsorted(total, before + BATCH_BYTES, "right"))
        end = min(max(fitting, begin + 1), begin + BATCH_ROWS)
        last = int(np.searchsorted(ends, end, "right"))
        if last and ends[last - 1] > begin:
            end = int(ends[last - 1])
        yield begin, end
        begin = end

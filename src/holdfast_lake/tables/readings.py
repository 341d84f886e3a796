"""Silver `readings`: one row per device, metric and time, made from the records.

All messages of a stream in a step go to one task, in order, with the state that the last step has
left. There the Folder decodes and marks them in one pass. It gets Arrow batches of INPUT, sorted by
stream and by message order, and the states of the streams. It returns readings, quarantine and the
new states.

If many messages of a stream have the same fields, they are read together, by columns (alike.py).
All others are read one by one. Invariant: both ways give the same rows and the same state.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Final
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.client.log.lake.commits import COUNTS, ROWS, STATE
from holdfast.client.log.lake.parquet import with_date
from holdfast_lake.decoders.decoded import PAYLOAD_BYTES_MAX, Decoded, DecodeError
from holdfast_lake.lake.table import RECORDS, Emptied, Expectation, Table
from holdfast_lake.tables.alike import EARLIEST_US, SPAN_MIN, ColumnBatch
from holdfast_lake.tables.columns import (
    COLUMNS,
    INPUT,
    QUARANTINED_BYTES_MAX,
    STATE_COLUMNS,
    STATES,
    Names,
    Output,
    OwnTime,
    Piece,
    Rows,
    TableMessage,
    names_of,
)
from holdfast_lake.tables.parse import FieldGroup, read_flat
from holdfast_lake.tables.rules import Rule, with_defaults
from holdfast_lake.tables.stream import (
    IDLE_US_MAX,
    NOISE_MAX,
    NOWHERE,
    REPEATED,
    Emission,
    StreamPosition,
    StreamState,
    count_error,
    distance,
    edge_device,
    follow,
    is_late,
    is_repeated,
    is_repetition,
    note_content,
    note_newest,
    producer_key,
    read_edge,
    was_seen,
)
from holdfast_lake.tables.topics import Reader, Topic, Topics, client_stream

REPETITIONS: Final = "repetitions"
"""The name of the count of repetitions."""
NOISE: Final = "errors that are only counted"
"""The name of the count of messages that are not in the quarantine because it has enough like
them."""
SEQUENCE: Final = "$sequence"
"""The metric of a numbered message that has no other."""
EMPTY: Final = "$empty"
"""The metric of another message that has none, such as `{}`. Its device is there."""


class Folder:
    """The fold of one task."""

    def __init__(
        self, rules: Sequence[Rule], *, together: bool = True, is_scaled: bool = True
    ) -> None:
        """Prepares the rules. With `together`, messages with the same fields may be read together.

        A test compares the rows of both ways. For `is_scaled` see ReadingsFold.
        """
        self.topics = Topics(rules, is_scaled=is_scaled)
        self.together = together
        self.output = Output()
        self.states: Mapping[str, tuple[str, int]] = {}
        self.stream: str | None = None
        self.text: str | None = None
        """The stream's state as it came. It is decoded when a message needs it."""
        self.state: StreamState | None = None
        self.last_us = 0
        self.counts: Counter[str] = Counter()

    def fold(
        self, batches: Iterator[pa.RecordBatch], states: Mapping[str, tuple[str, int]]
    ) -> Iterator[Piece]:
        """Folds the batches, and yields readings, quarantine and states.

        `states` has the text and the time of the last message per stream. States of streams without
        a message in the batches are not returned.
        """
        self.states = states
        for batch in batches:
            yield from self._batch(Rows(batch))
            yield from self.output.batches(least=False)
        self._end_stream()
        yield from self.output.batches(least=True)
        if self.counts:
            names, counts = list(self.counts), list(self.counts.values())
            yield COUNTS, pa.RecordBatch.from_pydict({"name": names, "count": counts})

    def _batch(self, rows: Rows) -> Iterator[Piece]:
        alike = ColumnBatch(rows, self._groups(rows) if self.together else [], self.topics)
        for begin, end in alike.spans():
            self._begin_stream(rows.streams.names[rows.streams.codes[begin]])
            if self.output.is_full():
                yield from self.output.batches(least=False)
            store_us = alike.marks.store_us[begin:end]
            self._drop_old_state(int(store_us[0]))
            self.last_us = max(self.last_us, int(store_us.max()))
            if alike.is_group(begin):
                yield from self._read_together(alike, begin, end)
            else:
                yield from self._read_one_by_one(rows, begin, end)
        for batch in alike.readings():
            yield ROWS, batch

    def _read_one_by_one(self, rows: Rows, begin: int, end: int) -> Iterator[Piece]:
        messages = map(rows.message, range(begin, end))
        for _, same_time in groupby(messages, lambda message: message.store_us):
            for message in self._by_number(list(same_time)):
                self._read_message(message)
                if self.output.is_full():
                    yield from self.output.batches(least=False)

    def _by_number(self, messages: list[TableMessage]) -> list[TableMessage]:
        """Orders messages of one microsecond and stream by Sparkplug's numbers: the births of a
        node are in several partitions, and by these 2 may come before 1."""
        reader = self.topics[messages[0].topic].reader
        if len(messages) == 1 or reader is None or reader.rule.decode != "sparkplug":
            return messages
        first = 0 if messages[0].rank == 0 else self._loaded_state().raw
        return sorted(messages, key=lambda each: (each.rank > 0, distance(each.payload, first)))

    def _read_together(self, alike: ColumnBatch, begin: int, end: int) -> Iterator[Piece]:
        """Reads a span together where nothing special happens, and one by one around exceptions.

        After each exception twice as many messages are read alone, so that a span with many
        exceptions costs few useless looks.
        """
        alone = 1
        while end - begin >= SPAN_MIN:
            length = alike.length_in_order(self._loaded_state(), begin, end)
            if length >= SPAN_MIN:
                alike.mark(self._loaded_state(), begin, begin + length)
                begin += length
                alone = 1
            next_look = min(end, begin + alone)
            yield from self._read_one_by_one(alike.rows, begin, next_look)
            begin = next_look
            alone *= 2
        yield from self._read_one_by_one(alike.rows, begin, end)

    def _groups(self, rows: Rows) -> list[FieldGroup]:
        if len(rows.streams.names) * SPAN_MIN > rows.count:
            return []
        ways = [self.topics[topic].way for topic in rows.topics.names]
        of_row = [ways[code] for code in rows.topics.codes.tolist()]
        for row in np.flatnonzero(rows.integers("bytes") > PAYLOAD_BYTES_MAX).tolist():
            of_row[row] = None
        return read_flat(rows.payloads, of_row)

    def _begin_stream(self, stream: str) -> None:
        if stream == self.stream:
            return
        self._end_stream()
        self.stream = stream
        self.text, self.last_us = self.states.get(stream, (None, 0))

    def _drop_old_state(self, store_us: int) -> None:
        """Drops a state that is too old for a message stored at `store_us`.

        A step without messages of the stream may have dropped it already, or not. Dropping it here
        makes the rows independent of the steps.
        """
        if self.last_us and store_us - self.last_us > IDLE_US_MAX:
            self.text = self.state = None

    def _end_stream(self) -> None:
        """Outputs the state of the stream."""
        if self.stream is not None:
            text = self.text
            if self.state is not None:
                text = msgspec.json.encode(self.state).decode()
            if text is not None and text != "{}":
                self.output.add_state(self.stream, text, self.last_us)
        self.stream = self.text = self.state = None
        self.last_us = 0

    def _loaded_state(self) -> StreamState:
        if self.state is None:
            if self.text is not None:
                self.state = msgspec.json.decode(self.text, type=StreamState)
            else:
                self.state = StreamState()
        return self.state

    def _read_message(self, message: TableMessage) -> None:
        """Reads one message, unless its producer sequence shows that it is a repetition."""
        reader = self.topics[message.topic].reader
        if reader is None:
            return
        if self._was_sent_before(message):
            self._note_repetition(message, reader)
            return
        try:
            emissions, place = self._read(message, reader)
        except DecodeError as error:
            self._quarantine(message, str(error), error.code)
            return
        if emissions and not emissions[0].decoded.names:
            # Without this reading no row would show that the number, or the message, has come.
            if place.sequence is not None:
                emissions[0].decoded.add_only(SEQUENCE, place.sequence)
            elif emissions[0].decoded.errors is None:
                emissions[0].decoded.add(EMPTY, None)
        first = 0
        for emission in emissions:
            decoded = emission.decoded
            if decoded.names == [REPEATED]:
                self.counts[REPETITIONS] += 1
            if decoded.errors is not None:
                self._quarantine(message, decoded.reason() or "", decoded.code)
            self._emit(message, reader, emission, place, first)
            first += len(decoded.names)

    def _quarantine(self, message: TableMessage, reason: str, code: str) -> None:
        """Puts a message into the quarantine, unless the day has many of its stream and code."""
        count = count_error(self._loaded_state(), code, message.store_us)
        if count == NOISE_MAX:
            reason = f"{reason} (the {count}th of this day: more of this code are only counted)"
        if count <= NOISE_MAX:
            self.output.quarantine(message, reason, code)
        else:
            self.counts[NOISE] += 1

    def _was_sent_before(self, message: TableMessage) -> bool:
        producer_id = message.producer_id
        if producer_id is None:
            return False
        is_topic = message.stream == message.topic
        producer = producer_key(producer_id, message.partition, is_topic=is_topic)
        return is_repetition(
            self._loaded_state(), producer, message.producer_epoch, message.producer_sequence
        )

    def _read(self, message: TableMessage, reader: Reader) -> tuple[list[Emission], StreamPosition]:
        """Reads one message. A repetition gives nothing. Raises DecodeError."""
        payload = message.payload
        if payload is None or message.bytes > PAYLOAD_BYTES_MAX:
            raise DecodeError(
                f"a payload of {message.bytes} bytes, {PAYLOAD_BYTES_MAX} are decoded at most",
                "limit",
            )
        if reader.rule.decode == "sparkplug":
            at = (message.store_us, message.rank, message.partition, message.offset)
            return read_edge(self._loaded_state(), message.topic, payload, at)
        emission = reader.read(message, payload, self._loaded_state().scaled)
        decoded = emission.decoded
        if reader.units is not None and reader.units.has_last:
            reader.units.follow(decoded, emission.device, self._loaded_state().units)
        number, checksum = decoded.sequence, None
        if decoded.id is not None:
            content = None if "id" in reader.fields.required else crc32(payload)
            if was_seen(self._loaded_state(), decoded.id, content):
                return [_repetition(emission.device)], NOWHERE
        elif number is not None and message.producer_id is None:
            checksum, has_time = crc32(payload), decoded.time_us is not None
            if is_repeated(self._loaded_state(), number, checksum, has_time=has_time):
                return [_repetition(emission.device)], NOWHERE
        if number is None:
            return [emission], NOWHERE
        # An offset identifies a run of one topic. Offsets of several partitions may be equal, so
        # streams of several topics use the time.
        begun = message.offset if message.stream == message.topic else message.store_us
        place = follow(self._loaded_state(), number, begun, message.store_us)
        if checksum is not None:
            note_content(self._loaded_state(), number, checksum)
        return [emission], place

    def _note_repetition(self, message: TableMessage, reader: Reader) -> None:
        """Outputs the reading that stands for a message of a producer that came before."""
        device: str | None = message.topic
        with suppress(DecodeError):  # the first one is in the quarantine
            if reader.rule.decode == "sparkplug":
                device = edge_device(message.topic)
            elif reader.device_of is not None:
                device = reader.device_of(message.topic, message.client_id or "")
            elif message.payload is not None and message.bytes <= PAYLOAD_BYTES_MAX:
                device = reader.read(message, message.payload).device
        if device is not None:
            self.counts[REPETITIONS] += 1
            self._emit(message, reader, _repetition(device), NOWHERE, 0)

    def _emit(
        self,
        message: TableMessage,
        reader: Reader,
        emission: Emission,
        place: StreamPosition,
        first: int,
    ) -> None:
        """Outputs the readings of one device in a message, with their marks."""
        decoded = emission.decoded
        store_us, time_us = message.store_us, decoded.time_us
        event_us, claimed_us = _believed(time_us, store_us, reader.future_us)
        believed = time_us is not None and claimed_us is None
        before_us = None
        if decoded.times is not None:
            before_us = self._loaded_state().latest.get(emission.device)
        late = believed and is_late(
            self._loaded_state(), emission.device, event_us, reader.lateness_us
        )
        head = (
            message.stream, message.topic, message.partition, message.offset, store_us,
            decoded.id, place.run, place.sequence, place.gap_before, place.gap_opened_us,
            time_us if decoded.sent_us is None else decoded.sent_us,
            emission.device, first, event_us, claimed_us, late,
        )  # fmt: skip
        own = None
        if decoded.times is not None:
            of_message = (event_us, claimed_us, late)
            own = self._own_times(emission, of_message, before_us, store_us, reader)
        self.output.add(head, decoded, own, message.bytes)

    def _own_times(
        self,
        emission: Emission,
        of_message: OwnTime,
        before_us: int | None,
        store_us: int,
        reader: Reader,
    ) -> list[OwnTime]:
        """Returns the times of readings that have their own.

        Each is compared with the newest time before the message, so that a list which begins with
        its newest reading makes no other of its own late.
        """
        found = []
        newest_us = None
        for own_us in emission.decoded.times or ():
            if own_us is None:
                found.append(of_message)
                continue
            event_us, claimed_us = _believed(own_us, store_us, reader.future_us)
            late = False
            if claimed_us is None:
                late = before_us is not None and event_us < before_us - reader.lateness_us
                newest_us = event_us if newest_us is None else max(newest_us, event_us)
            found.append((event_us, claimed_us, late))
        if newest_us is not None:
            note_newest(self._loaded_state(), emission.device, newest_us)
        return found


def _repetition(device: str) -> Emission:
    decoded = Decoded()
    decoded.add(REPEATED, None)
    return Emission(device, decoded)


def _believed(time_us: int | None, store_us: int, future_us: int) -> tuple[int, int | None]:
    """Returns the event time, and the claimed time if it is not plausible."""
    if time_us is None:
        return store_us, None
    if EARLIEST_US <= time_us <= store_us + future_us:
        return time_us, None
    return store_us, time_us


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
                        ("value_string", None), ("value_boolean", None), ("unit", None))),
    )  # fmt: skip


@dataclass(frozen=True)
class ReadingsFold:
    """The StreamFold (see lake/table.py) of the table `readings`."""

    rules: Sequence[Rule]
    """All rules, the default ones included."""
    is_scaled: bool = True
    """False in a lake whose rows an earlier version has made, which did not multiply numbers by the
    scales beside them (decoders/scales.py)."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns of `records` that the fold needs."""
        return ("topic", "payload", "partition", "offset", "timestamp", "client_id", "producer")

    def unscaled(self) -> "ReadingsFold":
        """Returns the fold without `is_scaled`."""
        return replace(self, is_scaled=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"rules": self.rules, "is_scaled": self.is_scaled}

    @cached_property
    def _topics(self) -> Topics:
        return Topics(self.rules, is_scaled=self.is_scaled)

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
        folder = Folder(self.rules, is_scaled=self.is_scaled)
        for output, batch in folder.fold(messages, known):
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

"""Marks and emits many messages at a time: a batch, with the groups that are read together.

The marks are equal to those of stream.py one by one. A span is marked together as long as its
numbers only grow: no repetition, no number that comes late or begins a new run. The message at
which that ends is left to stream.py. Readings of messages with the same fields are one batch, in
the table's order.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast_lake.tables.columns import READINGS, TIME, TIME_END_US, Names, Rows
from holdfast_lake.tables.parse import (
    NUMBER,
    TEXT,
    TRUTH,
    FieldGroup,
    Integers,
    Values,
)
from holdfast_lake.tables.stream import (
    DEVICES_MAX,
    GAPS_MAX,
    IDLE_US_MAX,
    JUMP_MAX,
    PRODUCERS_MAX,
    SEEN_MAX,
    StreamState,
    producer_key,
)
from holdfast_lake.tables.topics import Reader, Topics

Codes = npt.NDArray[np.int32]

NONE: Final = np.iinfo(np.int64).min
"""The value that stands for null in an array of marks."""


class Marks:
    """The marks of the messages of a batch: one element each, NONE for null."""

    def __init__(self, store_us: Integers) -> None:
        count = len(store_us)
        self.store_us = store_us
        self.event_us = store_us.copy()
        self.claimed_us = np.full(count, NONE, np.int64)
        self.sent_us = np.full(count, NONE, np.int64)
        self.runs = np.full(count, NONE, np.int64)
        self.sequences = np.full(count, NONE, np.int64)
        self.gaps_before = np.full(count, NONE, np.int64)
        self.gaps_opened_us = np.full(count, NONE, np.int64)
        self.late = np.zeros(count, np.bool_)
        self.marked = np.zeros(count, np.bool_)
        """True for messages that become readings: their marks are known, and they are no
        repetitions."""


def readings(rows: Rows, devices: Names, marks: Marks, group: FieldGroup) -> pa.RecordBatch | None:
    """Returns the readings of the marked messages of a group, or None if there are none."""
    places = np.flatnonzero(marks.marked[group.rows])
    if not len(places):
        return None
    offsets, partitions = rows.integers("offset"), rows.integers("partition")
    keys = (offsets, partitions, marks.event_us, devices.codes)
    places = places[np.lexsort([key[group.rows[places]] for key in keys])]
    chosen = group.rows[places]
    cell, metric = _cells(devices.codes[chosen], _ranks(group.names))
    of = chosen[cell]
    columns: dict[str, pa.Array] = {
        "device": devices.array(of),
        "metric": pa.DictionaryArray.from_arrays(
            pa.array(metric), pa.array(group.names, pa.string())
        ),
        "event_time": _optional(marks.event_us, of).cast(TIME),
        "store_time": _optional(marks.store_us, of).cast(TIME),
        "sent_time": _optional(marks.sent_us, of).cast(TIME),
        "claimed_time": _optional(np.minimum(marks.claimed_us, TIME_END_US - 1), of).cast(TIME),
        "topic": rows.topics.array(of),
        "partition": pa.array(partitions[of]),
        "offset": pa.array(offsets[of]),
        "position": pa.array(metric),
        "message_id": _ids(group, places, cell),
        "stream": rows.streams.array(of),
        "run": _optional(marks.runs, of),
        "sequence": _optional(marks.sequences, of),
        "gap_before": _optional(marks.gaps_before, of),
        "gap_opened_at": _optional(marks.gaps_opened_us, of).cast(TIME),
        "is_late": pa.array(marks.late[of]),
        "is_historical": pa.array(np.zeros(len(of), np.bool_)),
        "quality": pa.nulls(len(of), pa.int32()),
    }
    at = np.where(metric == group.measured, places[cell], -1)
    columns["unit"] = _texts(
        [] if group.units is None else [pa.array(group.units, pa.string())], at
    )
    columns |= _values(group.values, places, cell, metric)
    return pa.RecordBatch.from_arrays([columns[name] for name in READINGS.names], schema=READINGS)


def _ids(group: FieldGroup, places: Integers, cell: Integers) -> pa.Array:
    if group.ids is None:
        return pa.nulls(len(cell), pa.string())
    ids = pa.array([group.ids[place] for place in places.tolist()], pa.string())
    return ids.take(pa.array(cell))


def _ranks(names: Sequence[str]) -> Integers:
    """Returns the rank of each name."""
    ranks = np.empty(len(names), np.int64)
    # Names are compared by bytes, as Spark and Arrow compare texts.
    ranks[sorted(range(len(names)), key=lambda index: names[index].encode())] = np.arange(
        len(names)
    )
    return ranks


def _cells(devices: Codes, ranks: Integers) -> tuple[Integers, Codes]:
    """Returns the message and the metric of each reading, as indexes.

    The order is device by device, metric by metric, message by message.
    """
    count, width = len(devices), len(ranks)
    begins = np.flatnonzero(np.diff(devices, prepend=devices[0] - 1))
    lengths = np.diff(begins, append=count)
    begin, length = np.repeat(begins, lengths), np.repeat(lengths, lengths)
    within = np.arange(count) - begin
    places = begin * width + within + ranks[:, None] * length
    message = np.empty(count * width, np.int64)
    metric = np.empty(count * width, np.int32)
    message[places] = np.arange(count)
    metric[places] = np.arange(width, dtype=np.int32)[:, None]
    return message, metric


def _optional(values: Integers, rows: Integers) -> pa.Array:
    found = values[rows]
    missing = found == NONE
    if missing.all():
        return pa.nulls(len(found), pa.int64())
    return pa.array(found, mask=missing) if missing.any() else pa.array(found)


def _values(
    values: Sequence[Values], places: Integers, cell: Integers, metric: Codes
) -> dict[str, pa.Array]:
    """Returns the value columns.

    `places` are the indexes of the messages in the group. `cell` and `metric` come from `_cells`.
    """
    count = len(cell)
    doubles, no_double = np.zeros(count), np.ones(count, np.bool_)
    truths, no_truth = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    texts: list[pa.Array] = []
    text_at = np.full(count, -1, np.int64)
    for number, each in enumerate(values):
        at = np.flatnonzero(metric == number)
        of = places[cell[at]]
        for kind in (NUMBER, TRUTH, TEXT):
            chosen = each.of_kind(kind)
            if chosen is False:
                continue
            some = slice(None) if chosen is True else chosen[of]
            if kind == NUMBER and each.doubles is not None:
                doubles[at[some]] = each.doubles[of[some]]
                no_double[at[some]] = False
            elif kind == TRUTH and each.truths is not None:
                truths[at[some]] = each.truths[of[some]]
                no_truth[at[some]] = False
            elif kind == TEXT and each.texts is not None:
                text_at[at[some]] = sum(map(len, texts)) + of[some]
                texts.append(pa.array(each.texts, pa.string()))
                if each.words is not None:
                    words = each.words[of[some]]
                    places_of = at[some][words >= 0]
                    truths[places_of] = words[words >= 0]
                    no_truth[places_of] = False
    return {
        "value_double": pa.array(doubles, mask=no_double),
        "value_boolean": pa.array(truths, mask=no_truth),
        "value_string": _texts(texts, text_at),
    }


def _texts(texts: Sequence[pa.Array], at: Integers) -> pa.Array:
    if not texts:
        return pa.DictionaryArray.from_arrays(
            pa.nulls(len(at), pa.int32()), pa.array([], pa.string())
        )
    encoded = pa.concat_arrays(texts).dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy()[at]
    missing = (at < 0) | (codes < 0)
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=missing), encoded.dictionary)


SPAN_MIN: Final = 8
"""The fewest messages for which the check of all together pays off."""

Mask = npt.NDArray[np.bool_]
_Key = TypeVar("_Key")


class MarkedProducer(NamedTuple):
    """The producer of a span, and the sequences of its messages."""

    id: str
    epoch: int
    sequences: Integers


class Places(NamedTuple):
    """The positions (stream.StreamPosition) of messages that all have numbers."""

    run: int
    gaps_before: Integers


def length_in_order(
    state: StreamState,
    producer: MarkedProducer | None,
    ids: Sequence[str] | None,
    numbers: Integers | None,
    length: int,
) -> int:
    """Returns how many of `length` messages, from the first on, can be marked together.

    Their producer's sequences, ids and numbers must be new, and the numbers must be in order.
    """
    if producer is not None:
        length = min(length, _new_sequences(state, producer))
    if numbers is not None:
        length = min(length, _growing(state, numbers))
        if ids is None and producer is None and length >= SPAN_MIN and state.contents:
            known = np.array(list(state.contents), np.int64)
            length = _until(~np.isin(numbers[:length], known))
    if ids is not None and length >= SPAN_MIN:
        length = _new_ids(state, ids[:length])
    return length


def _new_sequences(state: StreamState, producer: MarkedProducer) -> int:
    sequences = producer.sequences
    last = state.producers.get(producer.id)
    if last is not None and (producer.epoch, int(sequences[0])) <= last:
        return 0
    return _until(sequences[1:] > sequences[:-1]) + 1


def _new_ids(state: StreamState, ids: Sequence[str]) -> int:
    new: set[str] = set()
    for index, id in enumerate(ids):
        if id in state.seen or id in new:
            return index
        new.add(id)
    return len(ids)


def _growing(state: StreamState, numbers: Integers) -> int:
    steps = np.diff(numbers, prepend=_before(state, numbers))
    return _until((steps > 0) & (steps <= JUMP_MAX + 1))


def _before(state: StreamState, numbers: Integers) -> int:
    """Returns the number before the first one. If the run begins here, no number is missing between
    them."""
    return state.high if state.run is not None else int(numbers[0]) - 1


def _until(fine: Mask) -> int:
    """Returns the index of the first element that is false."""
    if fine.all():
        return len(fine)
    return int(fine.argmin())


def remember(
    state: StreamState,
    producer: MarkedProducer | None,
    ids: Sequence[str] | None,
    numbers: Integers | None,
    payloads: Sequence[bytes],
    *,
    any_content: bool,
) -> None:
    """Notes that these messages have come. `length_in_order` must hold for all of them.

    With `any_content` a repeated id is a repetition whatever the payload.
    """
    if producer is not None:
        state.producers.pop(producer.id, None)
        state.producers[producer.id] = (producer.epoch, int(producer.sequences[-1]))
        _trim(state.producers, PRODUCERS_MAX)
    if ids is not None:
        last_ids = ids[-SEEN_MAX:]
        if any_content:
            state.seen.update(dict.fromkeys(last_ids, True))
        else:
            state.seen.update(zip(last_ids, map(crc32, payloads[-SEEN_MAX:]), strict=True))
        _trim(state.seen, SEEN_MAX)
    elif numbers is not None and producer is None:
        last = numbers[-SEEN_MAX:].tolist()
        state.contents.update(zip(last, map(crc32, payloads[-SEEN_MAX:]), strict=True))
        _trim(state.contents, SEEN_MAX)


def follow_all(state: StreamState, numbers: Integers, begun: int, store_us: Integers) -> Places:
    """Applies `stream.follow` to each number in turn. `begun` names the run if it begins one."""
    gaps = np.diff(numbers, prepend=_before(state, numbers)) - 1
    if state.run is None:
        state.run, state.raw, state.gaps = begun, 0, []
    state.high = int(numbers[-1])
    for at in np.flatnonzero(gaps)[-GAPS_MAX:].tolist():
        number = int(numbers[at])
        state.gaps.append((number - int(gaps[at]), number - 1, int(store_us[at])))
    del state.gaps[:-GAPS_MAX]
    return Places(state.run, gaps)


def mark_late(state: StreamState, device: str, event_us: Integers, lateness_us: int) -> Mask:
    """Applies `stream.is_late` to each event time of a device in turn."""
    newest = state.latest.get(device)
    least = np.iinfo(np.int64).min
    # The newest event time before each message.
    before = np.maximum.accumulate(
        np.concatenate(([least if newest is None else newest], event_us))
    )
    highest = int(before[-1])
    if newest is None or highest > newest:
        state.latest.pop(device, None)
        state.latest[device] = highest
        _trim(state.latest, DEVICES_MAX)
    before = before[:-1]
    return (before > least) & (event_us < before - lateness_us)


def _trim(known: dict[_Key, Any], most: int) -> None:
    """Removes the oldest entries."""
    while len(known) > most:
        del known[next(iter(known))]


EARLIEST_US: Final = 946_684_800_000_000
"""The year 2000 in microseconds since 1970. An earlier event time comes from a clock that was never
set."""


class ColumnBatch:
    """The messages of `rows` in groups.

    Spans of a group are marked one after the other. Then `readings` yields the readings of the
    marked messages.
    """

    def __init__(self, rows: Rows, groups: Sequence[FieldGroup], topics: Topics) -> None:
        self.rows = rows
        self.groups = groups
        self._group = np.full(rows.count, -1, np.int32)
        self._position = np.zeros(rows.count, np.int64)
        """The index of each message in its group."""
        self._readers: list[Reader] = []
        self.marks = Marks(rows.integers("store_us"))
        for number, group in enumerate(groups):
            self._group[group.rows] = number
            self._position[group.rows] = np.arange(len(group.rows))
            reader = topics[rows.topics.names[rows.topics.codes[group.rows[0]]]].reader
            assert reader is not None
            self._readers.append(reader)
            self._extract_times(group, reader)
        if groups:
            self._devices = self._find_devices(topics)
            self._epochs = rows.integers("producer_epoch")
            self._sequences = rows.integers("producer_sequence")
            self._offsets = rows.integers("offset")
            self._partitions = rows.integers("partition")

    def _extract_times(self, group: FieldGroup, reader: Reader) -> None:
        marks = self.marks
        time_us, sent_us = group.time_us, group.sent_us
        if time_us is not None:
            store_us = marks.store_us[group.rows]
            believed = (time_us >= EARLIEST_US) & (time_us <= store_us + reader.future_us)
            marks.event_us[group.rows] = np.where(believed, time_us, store_us)
            marks.claimed_us[group.rows] = np.where(believed, NONE, time_us)
        sent_us = time_us if sent_us is None else sent_us
        if sent_us is not None:
            marks.sent_us[group.rows] = sent_us

    def _find_devices(self, topics: Topics) -> Names:
        rows = self.rows
        of_topic = [topics[name].device for name in rows.topics.names]
        if None not in of_topic:
            return _renamed(rows.topics, of_topic)  # type: ignore[arg-type]
        names: list[str] = [of_topic[code] or "" for code in rows.topics.codes.tolist()]
        clients = [rows.clients.names[code] if code >= 0 else ""
                   for code in rows.clients.codes.tolist()]  # fmt: skip
        for group, reader in zip(self.groups, self._readers, strict=True):
            if group.devices is not None:
                for row, device in zip(group.rows.tolist(), group.devices, strict=True):
                    names[row] = device
            elif reader.rule.device == "client":
                for row in group.rows.tolist():
                    names[row] = clients[row]
        found = sorted(set(names), key=str.encode)
        codes = {name: code for code, name in enumerate(found)}
        return Names(found, np.array([codes[name] for name in names], np.int32))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields the begin and end of consecutive messages of one stream.

        A span has one group, topic, device, producer and epoch, or only messages of no group. No
        message in it was stored so long after the one before that the state would be dropped
        between them.
        """
        rows = self.rows
        changes = _changes(rows.streams.codes)
        changes[1:] |= np.diff(self.marks.store_us) > IDLE_US_MAX
        if self.groups:
            changes |= _changes(self._group)
            inner = _changes(rows.topics.codes) | _changes(self._devices.codes)
            inner |= _changes(rows.producers.codes) | _changes(self._epochs)
            changes |= inner & (self._group >= 0)
        begins = [*np.flatnonzero(changes).tolist(), rows.count]
        return pairwise(begins)

    def is_group(self, row: int) -> bool:
        """Returns whether a message is in a group."""
        return bool(self._group[row] >= 0)

    def length_in_order(self, state: StreamState, begin: int, end: int) -> int:
        """Returns how many messages of a span, from `begin` on, can be marked together."""
        if state.scaled:
            return 0  # a number may have come without its scale
        producer, ids, numbers = self._numbers(begin, end)
        return length_in_order(state, producer, ids, numbers, end - begin)

    def mark(self, state: StreamState, begin: int, end: int) -> None:
        """Marks messages for which `length_in_order` holds."""
        group = self.groups[self._group[begin]]
        producer, ids, numbers = self._numbers(begin, end)
        payloads = self.rows.payloads[begin:end]
        any_content = "id" in self._readers[self._group[begin]].fields.required
        remember(state, producer, ids, numbers, payloads, any_content=any_content)  # type: ignore[arg-type]
        marks = self.marks
        store_us = marks.store_us[begin:end]
        if numbers is not None:
            is_topic = self._is_topic(begin)
            # An offset identifies a run of one topic. Offsets of several partitions may be equal,
            # so streams of several topics use the time.
            begun = int(self._offsets[begin] if is_topic else store_us[0])
            places = follow_all(state, numbers, begun, store_us)
            marks.runs[begin:end] = places.run
            marks.sequences[begin:end] = numbers
            marks.gaps_before[begin:end] = places.gaps_before
            marks.gaps_opened_us[begin:end] = np.where(places.gaps_before > 0, store_us, NONE)
        if group.time_us is not None:
            self._mark_late(state, begin, end)
        marks.marked[begin:end] = True

    def _is_topic(self, row: int) -> bool:
        """Returns whether the stream of a message is its topic."""
        stream, topic = self.rows.streams, self.rows.topics
        return bool(stream.names[stream.codes[row]] == topic.names[topic.codes[row]])

    def _mark_late(self, state: StreamState, begin: int, end: int) -> None:
        marks = self.marks
        believed = begin + np.flatnonzero(marks.claimed_us[begin:end] == NONE)
        if len(believed):
            device = self._devices.names[self._devices.codes[begin]]
            lateness_us = self._readers[self._group[begin]].lateness_us
            marks.late[believed] = mark_late(state, device, marks.event_us[believed], lateness_us)

    def _numbers(
        self, begin: int, end: int
    ) -> tuple[MarkedProducer | None, Sequence[str] | None, Integers | None]:
        """Returns the producer, ids and numbers of messages of a span."""
        group = self.groups[self._group[begin]]
        at = slice(int(self._position[begin]), int(self._position[end - 1]) + 1)
        producers = self.rows.producers
        producer = None
        if producers.codes[begin] >= 0:
            name = producers.names[producers.codes[begin]]
            partition, is_topic = int(self._partitions[begin]), self._is_topic(begin)
            producer = MarkedProducer(
                producer_key(name, partition, is_topic=is_topic),
                int(self._epochs[begin]),
                self._sequences[begin:end],
            )
        return (
            producer,
            None if group.ids is None else group.ids[at],
            None if group.sequences is None else group.sequences[at],
        )

    def readings(self) -> Iterator[pa.RecordBatch]:
        """Yields the readings of the marked messages, one batch per group."""
        for group in self.groups:
            found = readings(self.rows, self._devices, self.marks, group)
            if found is not None:
                yield found


def _changes(codes: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Returns where an element differs from the one before. The first element counts as
    different."""
    changes = np.ones(len(codes), np.bool_)
    np.not_equal(codes[1:], codes[:-1], out=changes[1:])
    return changes


def _renamed(old: Names, names: Sequence[str]) -> Names:
    """Replaces each name of a column by another. Several names may become one."""
    found = sorted(set(names), key=str.encode)
    codes = {name: code for code, name in enumerate(found)}
    return Names(found, np.array([codes[name] for name in names], np.int32)[old.codes])

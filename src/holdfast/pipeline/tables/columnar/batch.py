"""A batch of messages, with the groups that are read and marked together."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.pipeline.tables.columnar.emit import NONE, Marks, readings
from holdfast.pipeline.tables.columnar.marks import (
    MarkedProducer,
    follow_all,
    length_in_order,
    mark_late,
    remember,
)
from holdfast.pipeline.tables.columnar.parse import FieldGroup, Integers
from holdfast.pipeline.tables.messages import Names, Rows
from holdfast.pipeline.tables.stream import IDLE_US_MAX, StreamState, producer_key
from holdfast.pipeline.tables.topics import Reader, Topics

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

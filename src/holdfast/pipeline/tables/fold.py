"""Folds messages to readings, one stream after the other. It runs in Spark's tasks and imports no
Spark.

`Folder.fold` gets Arrow batches of INPUT, sorted by stream and by message order, and the states of
the streams. It returns readings, quarantine and the new states.

If many messages of a stream have the same fields, they are read together, by columns (columnar/).
All others are read one by one. Invariant: both ways give the same rows and the same state.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.pipeline.decoders.decoded import PAYLOAD_BYTES_MAX, Decoded, DecodeError
from holdfast.pipeline.lake.files.commits import COUNTS, ROWS
from holdfast.pipeline.tables.alike import EARLIEST_US, SPAN_MIN, ColumnBatch
from holdfast.pipeline.tables.columns import Output, OwnTime, Piece, Rows, TableMessage
from holdfast.pipeline.tables.parse import FieldGroup, read_flat
from holdfast.pipeline.tables.rules import Rule
from holdfast.pipeline.tables.stream import (
    IDLE_US_MAX,
    NOISE_MAX,
    NOWHERE,
    REPEATED,
    Emission,
    StreamPosition,
    StreamState,
    count_error,
    edge_device,
    follow,
    is_late,
    is_repeated,
    is_repetition,
    note_newest,
    producer_key,
    read_edge,
    was_seen,
)
from holdfast.pipeline.tables.topics import Reader, Topics

REPETITIONS: Final = "repetitions"
"""The name of the count of repetitions."""
NOISE: Final = "errors that are only counted"
"""The name of the count of messages that are not in the quarantine because it has enough like
them."""
SEQUENCE: Final = "$sequence"
"""The metric of a numbered message that has no other."""


class Folder:
    """The fold of one task."""

    def __init__(self, rules: Sequence[Rule], *, together: bool = True) -> None:
        """Prepares the rules. With `together`, messages with the same fields may be read together.

        A test compares the rows of both ways.
        """
        self.topics = Topics(rules)
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
        for row in range(begin, end):
            self._read_message(rows.message(row))
            if self.output.is_full():
                yield from self.output.batches(least=False)

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
        if place.sequence is not None and emissions and not emissions[0].decoded.names:
            # Without this reading no row would show that the number has come.
            emissions[0].decoded.add_only(SEQUENCE, place.sequence)
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
        emission = reader.read(message, payload)
        decoded = emission.decoded
        number = decoded.sequence
        if decoded.id is not None:
            content = None if "id" in reader.fields.required else crc32(payload)
            if was_seen(self._loaded_state(), decoded.id, content):
                return [_repetition(emission.device)], NOWHERE
        elif (
            number is not None
            and message.producer_id is None
            and is_repeated(self._loaded_state(), number, crc32(payload))
        ):
            return [_repetition(emission.device)], NOWHERE
        if number is None:
            return [emission], NOWHERE
        # An offset identifies a run of one topic. Offsets of several partitions may be equal, so
        # streams of several topics use the time.
        begun = message.offset if message.stream == message.topic else message.store_us
        return [emission], follow(self._loaded_state(), number, begun, message.store_us)

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

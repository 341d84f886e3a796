"""Messages to readings, one stream after the other: runs in Spark's tasks, knows no Spark.

`Folder.feed` gets Arrow batches of INPUT, sorted by stream and, within it, the state first and then
the messages in order. It returns batches of OUTPUT: readings, quarantine, and the next state.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa

from holdfast.pipeline.decoders.csv_payload import decode_csv
from holdfast.pipeline.decoders.decoded import PAYLOAD_BYTES_MAX, DecodeError
from holdfast.pipeline.decoders.json_payload import decode_json
from holdfast.pipeline.decoders.text_payload import (
    decode_any,
    decode_number,
    decode_status,
    decode_text,
)
from holdfast.pipeline.tables.columns import Output
from holdfast.pipeline.tables.edge import Emission, read_edge
from holdfast.pipeline.tables.rules import Rule
from holdfast.pipeline.tables.stream import (
    NOWHERE,
    Place,
    State,
    follow,
    is_late,
    is_repetition,
    was_said,
    was_seen,
)

SEQUENCE: Final = "$sequence"
"""The metric of a numbered message that has no other."""
EARLIEST_US: Final = 946_684_800_000_000
"""The year 2000: an event time before it is a clock that was never set."""
INPUT: Final = (
    "stream", "state", "topic", "payload", "bytes", "partition", "offset", "store_us",
    "client_id", "producer_id", "producer_epoch", "producer_sequence", "rank",
)  # fmt: skip
TOPICS_KNOWN_MAX: Final = 10_000
"""Topics whose rule and device are remembered."""


class Message(NamedTuple):
    """One row of INPUT. A state has only the stream, the state, and as `store_us` the time of the
    stream's last message."""

    stream: str
    state: str | None
    topic: str
    payload: bytes | None
    bytes: int
    partition: int
    offset: int
    store_us: int
    client_id: str | None
    producer_id: str | None
    producer_epoch: int
    producer_sequence: int
    rank: int


class Reader:
    """A rule made ready: payload to Decoded, with the device."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.matches = re.compile(rule.pattern()).match
        self.fields = rule.fields()
        self.device_of = None if self.fields.device else rule.device_of()
        self.metric_of = rule.metric_of()
        self.lateness_us = round(rule.lateness_s * 1_000_000)
        self.future_us = round(rule.future_s * 1_000_000)

    def read(self, message: Message, payload: bytes) -> Emission:
        """Raises DecodeError."""
        decode = self.rule.decode
        if decode == "json":
            decoded = decode_json(payload, self.fields)
        elif decode == "auto":
            decoded = decode_any(payload, self.fields, self.metric_of(message.topic))
        elif decode == "csv":
            decoded = decode_csv(payload, self.rule.columns, self.fields, self.rule.delimiter)
        elif decode == "number":
            decoded = decode_number(payload, self.metric_of(message.topic))
        elif decode == "text":
            decoded = decode_text(payload, self.metric_of(message.topic))
        else:
            decoded = decode_status(payload, self.fields)
        if self.device_of is not None:
            return Emission(self.device_of(message.topic, message.client_id or ""), decoded)
        if decoded.device is None:
            raise DecodeError(f"no device: the payload has no {self.fields.device[0]}")
        return Emission(decoded.device, decoded)


class Folder:
    """Streams to readings; one for each task."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.readers = [Reader(rule) for rule in rules]
        self.of_topic: dict[str, Reader | None] = {}
        self.output = Output()
        self.stream: str | None = None
        self.text: str | None = None
        """The stream's state as it came; stays so until a message needs it."""
        self.state: State | None = None
        self.last_us = 0

    def fold(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [batch.column(name).to_pylist() for name in INPUT]
            for message in map(Message._make, zip(*columns, strict=True)):
                if message.stream != self.stream:
                    self._end_stream()
                    self.stream = message.stream
                self.last_us = max(self.last_us, message.store_us)
                if message.state is not None:
                    self.text = message.state
                    continue
                self._take(message)
                if self.output.is_full():
                    yield from self.output.batches(least=False)
            yield from self.output.batches(least=False)
        self._end_stream()
        yield from self.output.batches(least=True)

    def _end_stream(self) -> None:
        """Writes the state of the stream."""
        if self.stream is not None:
            text = self.text
            if self.state is not None:
                text = msgspec.json.encode(self.state).decode()
            if text is not None and text != "{}":
                self.output.add_state(self.stream, text, self.last_us)
        self.stream = self.text = self.state = None
        self.last_us = 0

    def _known(self) -> State:
        if self.state is None:
            if self.text is not None:
                self.state = msgspec.json.decode(self.text, type=State)
            else:
                self.state = State()
        return self.state

    def _reader(self, topic: str) -> Reader | None:
        """By the first rule that matches; None where there is nothing to read."""
        if topic in self.of_topic:
            return self.of_topic[topic]
        if len(self.of_topic) >= TOPICS_KNOWN_MAX:
            self.of_topic.clear()
        found = next((reader for reader in self.readers if reader.matches(topic)), None)
        if found is not None and found.rule.decode == "ignore":
            found = None
        self.of_topic[topic] = found
        return found

    def _take(self, message: Message) -> None:
        reader = self._reader(message.topic)
        if reader is None or self._was_sent_before(message):
            return
        try:
            emissions, place = self._read(message, reader)
        except DecodeError as error:
            self.output.quarantine(message, str(error))
            return
        if place.sequence is not None and emissions and not emissions[0].decoded.names:
            # Else nothing would tell that this number has come.
            emissions[0].decoded.add_only(SEQUENCE, place.sequence)
        first = 0
        for emission in emissions:
            decoded = emission.decoded
            if decoded.errors is not None:
                self.output.quarantine(message, decoded.reason() or "")
            self._emit(message, reader, emission, place, first)
            first += len(decoded.names)

    def _was_sent_before(self, message: Message) -> bool:
        producer_id = message.producer_id
        return producer_id is not None and is_repetition(
            self._known(), producer_id, message.producer_epoch, message.producer_sequence
        )

    def _read(self, message: Message, reader: Reader) -> tuple[list[Emission], Place]:
        """Nothing for a repetition. Raises DecodeError."""
        payload = message.payload
        if payload is None or message.bytes > PAYLOAD_BYTES_MAX:
            raise DecodeError(
                f"a payload of {message.bytes} bytes, {PAYLOAD_BYTES_MAX} are decoded at most"
            )
        if reader.rule.decode == "sparkplug":
            at = (message.store_us, message.rank, message.partition, message.offset)
            return read_edge(self._known(), message.topic, payload, at)
        emission = reader.read(message, payload)
        decoded = emission.decoded
        number = decoded.sequence
        if decoded.id is not None:
            if was_seen(self._known(), decoded.id):
                return [], NOWHERE
        elif (
            number is not None
            and message.producer_id is None
            and was_said(self._known(), number, crc32(payload))
        ):
            return [], NOWHERE
        if number is None:
            return [emission], NOWHERE
        # An offset tells the runs of a topic apart, but not those of several.
        begun = message.offset if message.stream == message.topic else message.store_us
        return [emission], follow(self._known(), number, begun, message.store_us)

    def _emit(
        self, message: Message, reader: Reader, emission: Emission, place: Place, first: int
    ) -> None:
        decoded = emission.decoded
        store_us, time_us = message.store_us, decoded.time_us
        event_us, claimed_us = _believed(time_us, store_us, reader.future_us)
        believed = time_us is not None and claimed_us is None
        late = believed and is_late(self._known(), emission.device, event_us, reader.lateness_us)
        head = (
            message.stream, message.topic, message.partition, message.offset, store_us,
            decoded.id, place.run, place.sequence, place.gap_before, place.gap_opened_us,
            time_us if decoded.sent_us is None else decoded.sent_us,
            emission.device, first, event_us, claimed_us, late,
        )  # fmt: skip
        own = None
        if decoded.times is not None:
            own = [
                (event_us, claimed_us)
                if own_us is None
                else _believed(own_us, store_us, reader.future_us)
                for own_us in decoded.times
            ]
        self.output.add(head, decoded, own)


def _believed(time_us: int | None, store_us: int, future_us: int) -> tuple[int, int | None]:
    """The event time, and the time claimed where that is not believed."""
    if time_us is None:
        return store_us, None
    if EARLIEST_US <= time_us <= store_us + future_us:
        return time_us, None
    return store_us, time_us

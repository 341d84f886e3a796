"""Messages as the fold receives them, and readings, quarantine and state as Arrow batches.

Values that all readings of a message share are kept once, and Arrow repeats them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.client.log.lake.commits import QUARANTINED, ROWS, STATE
from holdfast_lake.decoders.decoded import Decoded
from holdfast_lake.lake.table import Column

INPUT: Final = (
    "stream", "topic", "payload", "bytes", "partition", "offset", "store_us", "client_id",
    "producer_id", "producer_epoch", "producer_sequence", "rank",
)  # fmt: skip

Codes = npt.NDArray[np.int32]


class TableMessage(NamedTuple):
    """One row of INPUT."""

    stream: str
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


@dataclass
class Names:
    """A column of texts, most of which repeat."""

    names: Sequence[str]
    """The distinct texts, sorted by their bytes."""
    codes: Codes
    """The index of each row's text, -1 for null."""

    def array(self, rows: npt.NDArray[np.int64]) -> pa.Array:
        """Returns some rows, which have no nulls, as a dictionary array."""
        return pa.DictionaryArray.from_arrays(
            pa.array(self.codes[rows]), pa.array(self.names, pa.string())
        )


def names_of(column: pa.Array) -> Names:
    """Returns a column of texts, or of a dictionary of texts, as Names."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    codes = column.indices.fill_null(-1).to_numpy()
    # Most texts of a slice's dictionary may be used in other slices only.
    used = np.unique(codes[codes >= 0])
    names = column.dictionary.take(pa.array(used)).to_pylist()
    order = sorted(range(len(names)), key=lambda index: names[index].encode())
    place = np.full(len(column.dictionary) + 1, -1, np.int32)
    place[used[order]] = np.arange(len(names), dtype=np.int32)
    return Names([names[index] for index in order], place[codes])


class Rows:
    """A batch of INPUT. Each column is converted to Python or numpy when it is first needed."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.count = batch.num_rows

    def message(self, row: int) -> TableMessage:
        """Returns one message."""
        return self._messages[row]

    @cached_property
    def _messages(self) -> list[TableMessage]:
        columns = [
            self.payloads if name == "payload" else self.batch.column(name).to_pylist()
            for name in INPUT
        ]
        return list(map(TableMessage._make, zip(*columns, strict=True)))

    @cached_property
    def payloads(self) -> list[bytes | None]:
        """The payload of each message."""
        payloads: list[bytes | None] = self.batch.column("payload").to_pylist()
        return payloads

    @cached_property
    def streams(self) -> Names:
        """The stream of each message."""
        return names_of(self.batch.column("stream"))

    @cached_property
    def topics(self) -> Names:
        """The topic of each message."""
        return names_of(self.batch.column("topic"))

    @cached_property
    def clients(self) -> Names:
        """The client id of each message."""
        return names_of(self.batch.column("client_id"))

    @cached_property
    def producers(self) -> Names:
        """The producer id of each message."""
        return names_of(self.batch.column("producer_id"))

    def integers(self, name: str) -> npt.NDArray[Any]:
        """Returns a column of integers. Nulls are 0."""
        column = self.batch.column(name)
        found: npt.NDArray[Any] = (column.fill_null(0) if column.null_count else column).to_numpy()
        return found


READINGS_PER_BATCH: Final = 50_000
BYTES_PER_BATCH: Final = 32 << 20
"""The bytes of payloads, or of states, in one batch."""
QUARANTINED_BYTES_MAX: Final = 4096
"""The most bytes of a payload in the quarantine. The table `records` has all of it."""
REASON_LENGTH_MAX: Final = 2000
"""The most characters of a reason. It may quote a text as long as the payload."""
QUARANTINED_PER_BATCH: Final = 5_000
STATES_PER_BATCH: Final = 50_000
TIME_END_US: Final = 253_402_300_800_000_000
"""The year 10000 in microseconds since 1970. Spark shows no later time."""

TIME: Final = pa.timestamp("us", tz="UTC")
NAME: Final = pa.dictionary(pa.int32(), pa.string())
READINGS: Final = pa.schema(
    [
        ("device", NAME),
        ("metric", NAME),
        ("event_time", TIME),
        ("value_double", pa.float64()),
        ("value_string", NAME),
        ("value_boolean", pa.bool_()),
        ("unit", NAME),
        ("store_time", TIME),
        ("sent_time", TIME),
        ("claimed_time", TIME),
        ("topic", NAME),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("position", pa.int32()),
        ("message_id", pa.string()),
        ("stream", NAME),
        ("run", pa.int64()),
        ("sequence", pa.int64()),
        ("gap_before", pa.int64()),
        ("gap_opened_at", TIME),
        ("is_late", pa.bool_()),
        ("is_historical", pa.bool_()),
        ("quality", pa.int32()),
    ]
)
"""The columns of the table `readings` without its partition column."""
UNREADABLE: Final = pa.schema(
    [
        ("reason", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", TIME),
        ("payload", pa.binary()),
        ("client_id", pa.string()),
        ("code", pa.string()),
    ]
)
STATES: Final = pa.schema([("stream", pa.string()), ("state", pa.string()), ("last_time", TIME)])
Piece = tuple[str, pa.RecordBatch]
"""An output and its batch: ROWS with READINGS, QUARANTINED with UNREADABLE, or STATE with
STATES."""


HEAD: Final = (
    "stream", "topic", "partition", "offset", "store_time", "message_id", "run", "sequence",
    "gap_before", "gap_opened_at", "sent_time", "device", "first", "event_us", "claimed_us",
    "is_late",
)  # fmt: skip
"""The values that all readings of one message and device share.

They are columns of READINGS, the position of the first reading in the message, its event time, and
the claimed time. Times are integers, in microseconds since 1970.
"""
_REPEATED: Final = tuple(name for name in HEAD if name in READINGS.names and name != "is_late")
OwnTime = tuple[int, int | None, bool]
"""The event time and the claimed time of a reading, and whether it is late."""


class Output:
    """The collector of readings, quarantine and states, which turns them into Arrow batches."""

    def __init__(self) -> None:
        self._states: list[tuple[str, str, int]] = []
        self._state_bytes = 0
        self._bad: list[tuple[Any, ...]] = []
        self._clear()

    def _clear(self) -> None:
        self.heads: list[tuple[Any, ...]] = []
        """The values of HEAD per message."""
        self.counts: list[int] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.exact: list[tuple[int, str]] = []
        self.own: list[tuple[int, OwnTime]] = []
        """The indexes of the readings with their own times, and these."""
        self.qualities: list[tuple[int, int]] = []
        self.units: list[tuple[int, str]] = []
        self.historical: list[int] = []
        self._bytes = 0

    def add(
        self,
        head: tuple[Any, ...],
        decoded: Decoded,
        own: list[OwnTime] | None,
        payload_bytes: int,
    ) -> None:
        """Adds the readings of a message. `own` has the times of each reading with its own time."""
        if not decoded.names:
            return
        at = len(self.names)
        self._bytes += payload_bytes
        self.heads.append(head)
        self.counts.append(len(decoded.names))
        self.names += decoded.names
        self.values += decoded.values
        if decoded.exact is not None:
            self.exact += [(at + index, digits) for index, digits in decoded.exact.items()]
        if own is not None:
            self.own += [(at + index, times) for index, times in enumerate(own)]
        if decoded.qualities is not None:
            self.qualities += [(at + index, code) for index, code in decoded.qualities.items()]
        if decoded.units is not None:
            self.units += [(at + index, unit) for index, unit in decoded.units.items()]
        if decoded.historical is not None:
            self.historical += [
                at + index for index, is_it in enumerate(decoded.historical) if is_it
            ]

    def quarantine(self, message: Any, reason: str, code: str) -> None:
        """Adds a message that could not be read, with the reason and its code."""
        payload = message.payload
        if len(reason) > REASON_LENGTH_MAX:
            reason = f"{reason[:REASON_LENGTH_MAX]}..."
        self._bad.append(
            (
                reason, message.topic, message.partition, message.offset, message.store_us,
                None if payload is None else payload[:QUARANTINED_BYTES_MAX], message.client_id,
                code,
            )
        )  # fmt: skip

    def add_state(self, stream: str, text: str, last_us: int) -> None:
        """Adds the state of a stream. `last_us`: the time at which its last message was stored."""
        self._states.append((stream, text, last_us))
        self._state_bytes += len(text)

    def is_full(self) -> bool:
        """Returns whether `batches` has a batch of the full size."""
        return self._has_readings() or self._has_bad() or self._has_states()

    def _has_readings(self) -> bool:
        return len(self.names) >= READINGS_PER_BATCH or self._bytes >= BYTES_PER_BATCH

    def _has_bad(self) -> bool:
        return len(self._bad) >= QUARANTINED_PER_BATCH

    def _has_states(self) -> bool:
        return len(self._states) >= STATES_PER_BATCH or self._state_bytes >= BYTES_PER_BATCH

    def batches(self, least: bool) -> Iterator[Piece]:
        """Yields the collected data. Unless `least`, yield only full batches."""
        if self.names and (least or self._has_readings()):
            yield ROWS, self._readings()
            self._clear()
        if self._bad and (least or self._has_bad()):
            yield QUARANTINED, _batch(UNREADABLE, self._bad)
            self._bad = []
        if self._states and (least or self._has_states()):
            yield STATE, _batch(STATES, self._states)
            self._states, self._state_bytes = [], 0

    def _readings(self) -> pa.RecordBatch:
        counts = np.array(self.counts, np.int64)
        total = len(self.names)
        of_head = np.repeat(np.arange(len(counts)), counts)
        columns: dict[str, pa.Array] = {}
        fields = dict(zip(HEAD, zip(*self.heads, strict=True), strict=True))
        index = pa.array(of_head)
        for name in _REPEATED:
            columns[name] = _array(name, fields[name]).take(index)
        before = np.cumsum(counts) - counts
        first = np.array(fields["first"], np.int64)
        positions = np.arange(total) - (before - first)[of_head]
        columns["position"] = pa.array(positions.astype(np.int32))
        columns["metric"] = _array("metric", self.names)
        columns |= self._times(fields, of_head)
        for name, some in (("quality", self.qualities), ("unit", self.units)):
            of_reading: list[Any] = [None] * total
            for at, value in some:
                of_reading[at] = value
            columns[name] = _array(name, of_reading)
        columns |= self._values()
        historical = np.zeros(total, np.bool_)
        historical[self.historical] = True
        columns["is_historical"] = pa.array(historical)
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in READINGS.names], schema=READINGS
        )

    def _times(self, fields: dict[str, Any], of_head: npt.NDArray[np.int64]) -> dict[str, pa.Array]:
        events = np.array(fields["event_us"], np.int64)[of_head]
        late = np.array(fields["is_late"], np.bool_)[of_head]
        claimed: Any = [None if time is None else min(time, TIME_END_US - 1)
                        for time in fields["claimed_us"]]  # fmt: skip
        claims = _array("claimed_time", claimed).take(pa.array(of_head))
        if self.own:
            listed = claims.cast(pa.int64()).to_pylist()
            for index, (event_us, claimed_us, is_late) in self.own:
                events[index], late[index] = event_us, is_late
                listed[index] = None if claimed_us is None else min(claimed_us, TIME_END_US - 1)
            claims = _array("claimed_time", listed)
        return {
            "event_time": pa.array(events).cast(TIME),
            "claimed_time": claims,
            "is_late": pa.array(late),
        }

    def _values(self) -> dict[str, pa.Array]:
        values = self.values
        texts = [value if type(value) is str else None for value in values]
        for index, digits in self.exact:
            texts[index] = digits
        return {
            "value_double": pa.array(
                [value if type(value) is float else None for value in values], pa.float64()
            ),
            "value_string": _array("value_string", texts),
            "value_boolean": pa.array(
                [value if type(value) is bool else None for value in values], pa.bool_()
            ),
        }


def _array(name: str, values: Any) -> pa.Array:
    return typed_array(values, READINGS.field(name).type)


def typed_array(values: Any, kind: pa.DataType) -> pa.Array:
    """Returns an Arrow array. Times are given in microseconds."""
    return pa.array(values, pa.int64()).cast(kind) if kind == TIME else pa.array(values, kind)


def _batch(schema: pa.Schema, rows: list[Any]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [typed_array(values, kind) for values, kind in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


COLUMNS: Final = (
    Column("device", "string", "what the reading is of: by the rule, else the topic"),
    Column("metric", "string", "what was read; nested names with dots; $online: whether the device "
           "is there"),
    Column("event_time", "timestamp", "when it was read: by the payload, else store_time"),
    Column("value_double", "double", "the value if it is a number"),
    Column("value_string", "string", "the value if it is a text; the word of a boolean such as "
           "`off`; of an integer beyond 2^53, which a double cannot hold, its digits; of a number "
           "with a scale beside it, what was sent: `523e-2`"),
    Column("value_boolean", "boolean", "the value if it is true or false; all three null: null"),
    Column("unit", "string", "the unit of the number, as the device or a rule says it; null if "
           "neither does"),
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

"""Readings, quarantine and state as Arrow batches. What is the same for all readings of a message
is kept once and repeated by Arrow."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.pipeline.decoders.decoded import Decoded

READINGS_PER_BATCH: Final = 50_000
QUARANTINED_BYTES_MAX: Final = 4096
"""Of a payload in the quarantine; the records have all of it."""
QUARANTINED_PER_BATCH: Final = 5_000
TIME_END_US: Final = 253_402_300_800_000_000
"""The year 10000: Spark shows nothing beyond it."""

READING, QUARANTINE, STATE = 0, 1, 2

_TIME: Final = pa.timestamp("us", tz="UTC")
OUTPUT: Final = pa.schema(
    [
        ("kind", pa.int8()),
        ("stream", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("store_time", _TIME),
        ("message_id", pa.string()),
        ("run", pa.int64()),
        ("sequence", pa.int64()),
        ("gap_before", pa.int64()),
        ("gap_opened_at", _TIME),
        ("sent_time", _TIME),
        ("device", pa.string()),
        ("position", pa.int32()),
        ("metric", pa.string()),
        ("event_time", _TIME),
        ("claimed_time", _TIME),
        ("value_double", pa.float64()),
        ("value_string", pa.string()),
        ("value_boolean", pa.bool_()),
        ("is_late", pa.bool_()),
        ("is_historical", pa.bool_()),
        ("reason", pa.string()),
        ("payload", pa.binary()),
        ("state", pa.string()),
    ]
)
"""Which columns of it have values depends on `kind`."""


HEAD: Final = (
    "stream", "topic", "partition", "offset", "store_time", "message_id", "run", "sequence",
    "gap_before", "gap_opened_at", "sent_time", "device", "first", "event_us", "claimed_us",
    "is_late",
)  # fmt: skip
"""What the readings of one message and device have in common: columns of OUTPUT, and the position
of the first reading in the message, its event time, and the time claimed. Times are integers,
microseconds."""
_REPEATED: Final = tuple(name for name in HEAD if name in OUTPUT.names)


class Output:
    def __init__(self) -> None:
        self._states: list[tuple[str, str, int]] = []
        self._bad: list[tuple[str, str, int, int, int, bytes | None]] = []
        self._clear()

    def _clear(self) -> None:
        self.heads: list[tuple[Any, ...]] = []
        """Values of HEAD."""
        self.counts: list[int] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.exact: list[tuple[int, str]] = []
        self.own: list[tuple[int, int, int | None]] = []
        """Index of a reading with a time of its own; event time, claimed time."""
        self.historical: list[int] = []

    def add(
        self,
        head: tuple[Any, ...],
        decoded: Decoded,
        own: list[tuple[int, int | None]] | None = None,
    ) -> None:
        """`own`: event and claimed time of each reading, where those differ."""
        at = len(self.names)
        self.heads.append(head)
        self.counts.append(len(decoded.names))
        self.names += decoded.names
        self.values += decoded.values
        if decoded.exact is not None:
            self.exact += [(at + index, digits) for index, digits in decoded.exact.items()]
        if own is not None:
            self.own += [(at + index, *times) for index, times in enumerate(own)]
        if decoded.historical is not None:
            self.historical += [
                at + index for index, is_it in enumerate(decoded.historical) if is_it
            ]

    def quarantine(self, message: Any, reason: str) -> None:
        payload = message.payload
        self._bad.append(
            (
                reason, message.topic, message.partition, message.offset, message.store_us,
                None if payload is None else payload[:QUARANTINED_BYTES_MAX],
            )
        )  # fmt: skip

    def add_state(self, stream: str, text: str, last_us: int) -> None:
        """`last_us`: when the stream's last message was stored."""
        self._states.append((stream, text, last_us))

    def is_full(self) -> bool:
        """Whether `batches` has something already."""
        return len(self.names) >= READINGS_PER_BATCH or len(self._bad) >= QUARANTINED_PER_BATCH

    def batches(self, least: bool) -> Iterator[pa.RecordBatch]:
        """What has gathered; unless `least`, only what is worth a batch."""
        if self.names and (least or len(self.names) >= READINGS_PER_BATCH):
            yield self._readings()
            self._clear()
        if self._bad and (least or len(self._bad) >= QUARANTINED_PER_BATCH):
            names = ("reason", "topic", "partition", "offset", "store_time", "payload")
            yield _batch(QUARANTINE, names, self._bad)
            self._bad = []
        if self._states and (least or len(self._states) >= READINGS_PER_BATCH):
            yield _batch(STATE, ("stream", "state", "store_time"), self._states)
            self._states = []

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
        columns["metric"] = pa.array(self.names, pa.string())
        columns |= self._times(fields, of_head)
        columns |= self._values()
        historical = np.zeros(total, np.bool_)
        historical[self.historical] = True
        columns["is_historical"] = pa.array(historical)
        columns["kind"] = pa.array(np.full(total, READING, np.int8))
        return _filled(columns, total)

    def _times(self, fields: dict[str, Any], of_head: npt.NDArray[np.int64]) -> dict[str, pa.Array]:
        events = np.array(fields["event_us"], np.int64)[of_head]
        claimed: Any = [None if time is None else min(time, TIME_END_US - 1)
                        for time in fields["claimed_us"]]  # fmt: skip
        claims = _array("claimed_time", claimed).take(pa.array(of_head))
        if self.own:
            listed = claims.cast(pa.int64()).to_pylist()
            for index, event_us, claimed_us in self.own:
                events[index] = event_us
                listed[index] = None if claimed_us is None else min(claimed_us, TIME_END_US - 1)
            claims = _array("claimed_time", listed)
        return {"event_time": pa.array(events).cast(_TIME), "claimed_time": claims}

    def _values(self) -> dict[str, pa.Array]:
        values = self.values
        texts = [value if type(value) is str else None for value in values]
        for index, digits in self.exact:
            texts[index] = digits
        return {
            "value_double": pa.array(
                [value if type(value) is float else None for value in values], pa.float64()
            ),
            "value_string": pa.array(texts, pa.string()),
            "value_boolean": pa.array(
                [value if type(value) is bool else None for value in values], pa.bool_()
            ),
        }


def _array(name: str, values: Any) -> pa.Array:
    kind = OUTPUT.field(name).type
    return pa.array(values, pa.int64()).cast(kind) if kind == _TIME else pa.array(values, kind)


def _filled(columns: dict[str, pa.Array], rows: int) -> pa.RecordBatch:
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
        for field in OUTPUT
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=OUTPUT)


def _batch(kind: int, names: tuple[str, ...], rows: list[Any]) -> pa.RecordBatch:
    columns = {
        name: _array(name, values)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
    columns["kind"] = pa.array(np.full(len(rows), kind, np.int8))
    return _filled(columns, len(rows))

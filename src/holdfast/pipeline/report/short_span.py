"""Counts rows of a lake whose messages span at most an hour, in steps of seconds.

The gold tables have a row for each minute, which is a point or two for a short test. So the report
counts the rows of `records` and `readings` themselves, at most ROWS_MAX of each.
"""

from typing import Final

import numpy as np
import pyarrow
import pyarrow.compute as pc

from holdfast.pipeline.lake.table import RECORDS
from holdfast.pipeline.report.axis import Line, TimeAxis, gaps_of
from holdfast.pipeline.report.data import Stored
from holdfast.pipeline.report.grain import SECOND_US, STEPS_MAX, Integers, grain_of, time_of
from holdfast.pipeline.tables.stream import REPEATED

ROWS_MAX: Final = 1_000_000
"""The most rows of a table that are counted by seconds. With more the report has minutes."""
READINGS: Final = "readings"
COLUMNS: Final = (
    "device", "metric", "event_time", "value_double", "store_time", "sent_time", "claimed_time",
    "position", "gap_before", "gap_opened_at", "is_late", "is_historical",
)  # fmt: skip
"""The columns of `readings` that the report needs."""
SPAN_US_MAX: Final = STEPS_MAX * 15 * SECOND_US
"""The longest span whose steps are shorter than a minute."""
_LATENCY_US: Final = (-300_000_000, 86_400_000_000)
"""The latencies that are believed, as in the table `latency`."""


class ShortSpan:
    """The rows of a lake, and the steps of its time axes."""

    def __init__(self, stored_us: Integers, readings: pyarrow.Table) -> None:
        """`stored_us`: the time at which the broker stored each message, in µs since 1970, sorted;
        not empty."""
        self.stored_us = stored_us
        self.readings = readings
        begin_us, end_us = int(stored_us[0]), int(stored_us[-1])
        grain = grain_of([time_of(begin_us), time_of(end_us)], 1)
        self.axis = TimeAxis(begin_us, end_us, grain, gaps_of(stored_us))

    def rates(self) -> Line:
        """Returns the messages a second of each step. A step without any in a gap has none. Neither
        have the first and the last step, of which only a part was observed."""
        axis = self.axis
        counts = np.bincount(axis.places(self.stored_us), minlength=axis.count)
        found: Line = (counts / axis.grain.seconds).tolist()
        begins = axis.begins_us
        for gap in axis.gaps:
            inside = (begins >= gap.from_us) & (begins + axis.grain.us <= gap.to_us)
            for at in np.flatnonzero(inside).tolist():
                found[at] = None
        if len(found) > 2:
            found[0] = found[-1] = None
        return found

    def messages(self) -> pyarrow.Table:
        """Returns one row of `readings` for each message and device, without repetitions."""
        first = pc.equal(self.readings["position"], 0)
        is_new = pc.not_equal(self.readings["metric"], REPEATED)
        return self.readings.filter(pc.and_(first, is_new))

    def quality(self) -> pyarrow.Table:
        """Returns one row for each message and device, with the counts of the table `quality`."""
        rows = self.readings.filter(pc.equal(self.readings["position"], 0))
        missing = pc.fill_null(rows["gap_before"], 0)
        was_missing = pc.and_(pc.is_valid(rows["gap_opened_at"]), pc.equal(missing, 0))
        found = {
            "repetitions": pc.equal(rows["metric"], REPEATED),
            "late": pc.fill_null(rows["is_late"], False),
            "missing": missing,
            "filled": was_missing,
            "wrong_clock": pc.is_valid(rows["claimed_time"]),
        }
        counts = {name: values.cast(pyarrow.int64()) for name, values in found.items()}
        return pyarrow.table({"window_start": rows["store_time"], **counts})

    def latencies(self) -> pyarrow.Table:
        """Returns the messages that say when they were published, with `latency_us`."""
        rows = self.messages()
        rows = rows.filter(pc.and_(
            pc.and_(pc.is_valid(rows["sent_time"]), pc.is_null(rows["claimed_time"])),
            pc.invert(pc.fill_null(rows["is_historical"], False)),
        ))  # fmt: skip
        stored, sent = (rows[name].cast(pyarrow.int64()) for name in ("store_time", "sent_time"))
        rows = rows.append_column("latency_us", pc.subtract(stored, sent))
        least, most = _LATENCY_US
        return rows.filter(pc.and_(pc.greater_equal(rows["latency_us"], least),
                                   pc.less_equal(rows["latency_us"], most)))  # fmt: skip


def read_short_span(stored: Stored) -> ShortSpan | None:
    """Returns the rows of a lake whose messages span little. None: they span more, there are too
    many, or the tables are not there. Raises LakeError."""
    if READINGS not in stored.tables:
        return None
    span = stored.span(RECORDS, "timestamp")
    if span is None or span[1] - span[0] >= SPAN_US_MAX:
        return None
    readings = stored.rows(READINGS, COLUMNS, ROWS_MAX)
    if readings is None:
        return None
    if stored.devices is not None:
        first = readings.filter(pc.equal(readings["position"], 0))
        times = first["store_time"]
    else:
        records = stored.rows(RECORDS, ["timestamp"], ROWS_MAX)
        if records is None:
            return None
        times = records["timestamp"]
    stored_us = np.sort(times.cast(pyarrow.int64()).to_numpy())
    return ShortSpan(stored_us, readings) if len(stored_us) else None

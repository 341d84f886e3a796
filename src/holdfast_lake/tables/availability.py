"""Gold `outages` and `availability`: the times at which a device was down, by the broker's clock.

A device is down if it says so, if its will says so, or if it is silent for too long. Silence
counts only for a device whose own intervals are even. A door contact publishes on events, and its
intervals say nothing about the next one. A day is computed from its rows and those of the day
before, in which an outage may have begun. So an outage is cut at midnight, and each day has its
part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from holdfast.client.log.lake.commits import ROWS
from holdfast.client.log.lake.parquet import Integers
from holdfast_lake.decoders.text_payload import ONLINE
from holdfast_lake.lake.table import Column, Grain, Table
from holdfast_lake.tables.statistics import GroupedRows, text_hashes
from holdfast_lake.tables.stream import REPEATED

SILENCE_FACTOR: Final = 5
"""The usual intervals of silence that make an outage."""
SILENCE_MIN_US: Final = 10_000_000
"""The shortest silence in microseconds that is an outage."""
USUAL_SHARE: Final = 0.9
"""The share of intervals that are not longer than the usual one."""
BURST_GAP_US: Final = SILENCE_MIN_US // SILENCE_FACTOR
"""Messages closer than this in microseconds are one burst. An interval within it does not count for
the usual one, and alone it would be no reason for an outage.

Counter-example: a meter sends 14 topics each 10 s. 13 of 14 intervals are some microseconds, and
each other one would be an outage.
"""
BURST_MAX_US: Final = SILENCE_MIN_US
"""The longest burst in microseconds. The interval after it counts, however short, so a device that
sends each 0.1 s has a usual interval."""
INTERVALS_MIN: Final = 8
"""The fewest intervals of about the usual length, from which a usual one is computed."""
SPREAD_MAX: Final = 2.5
"""The most times that the long intervals of a device may be longer than its short ones, see
`_expectation`. It is 4 for messages at random times, and 2 for a device that is in time and loses
one message in seven."""
SILENCES_MIN: Final = 3
SILENCES_OF: Final = 20
"""More silences than SILENCES_MIN and than one in SILENCES_OF intervals are usual themselves."""
DAY_US: Final = 86_400_000_000
Flags: TypeAlias = npt.NDArray[np.bool_]
_TIMES: Final = ("day_us", "first_us", "heard_us", "gone_us", "again_us", "messages", "as_of_us")
"""The columns of a span that are whole numbers: microseconds since 1970, except `messages`."""

_OUTAGE_COLUMNS: Final = (
    Column("device", "string", "the device"),
    Column("window_start", "timestamp", "the day, UTC"),
    Column("outage_from", "timestamp", "the last message before the outage, or its report as "
           "offline; midnight if the outage began the day before"),
    Column("outage_to", "timestamp", "the first message after the outage; without one, the end "
           "of the day or the last message of any device"),
    Column("duration_s", "double", "seconds between the two"),
    Column("cause", "string", "`offline`: it was reported as offline; `silence`: longer than "
           f"{SILENCE_FACTOR} usual intervals"),
    Column("began_before", "boolean", "it began on the day before"),
    Column("is_open", "boolean", "it did not end on this day"),
)  # fmt: skip

_AVAILABILITY_COLUMNS: Final = (
    Column("device", "string", "the device"),
    Column("window_start", "timestamp", "the day, UTC"),
    Column("messages", "bigint", "messages of the device on this day"),
    Column("observed_s", "double", "seconds from midnight, or from its first message if that is "
           "newer, to the last message of any device on this day"),
    Column("up_s", "double", "of them not in an outage"),
    Column("down_s", "double", "of them in an outage"),
    Column("availability", "double", "up_s / observed_s; null if nothing was observed, or if "
           "nothing would show an outage: no silence, and no report of online or offline"),
    Column("outages", "bigint", "outages on this day"),
    Column("longest_s", "double", "the longest part of one on this day"),
    Column("usual_interval_s", "double", "nine of ten intervals between messages are not longer. "
           "Messages less than 2 s apart are one, for up to 10 s. Null if silence is no outage"),
    Column("silence", "string", "`outage`: a silence is one after "
           f"{SILENCE_FACTOR} usual intervals; `uneven`: it is none, because the device publishes "
           f"when something happens; `few`: it is none, because fewer than {INTERVALS_MIN} "
           "intervals of its usual length are known; null in rows of older versions"),
    Column("interval_spread", "double", "how many times longer its long intervals are than its "
           f"short ones; above {SPREAD_MAX} they are uneven"),
)  # fmt: skip


@dataclass(frozen=True)
class PresenceFold:
    """The GrainFold of both tables: messages of a device to spans that may be outages.

    A span goes from a message to the next one that does not say that the device is gone. A day's
    other spans are in the row of its last one: their messages, and the first time.
    """

    finish: Callable[[DataFrame], DataFrame]

    @property
    def columns(self) -> Sequence[str]:
        """The columns of `readings` that the fold needs."""
        return ("device", "metric", "value_boolean", "store_time", "partition", "offset",
                "position")  # fmt: skip

    @property
    def folded(self) -> Sequence[tuple[str, str]]:
        """The columns of a span."""
        return (
            ("device", "string"),
            *((name, "bigint") for name in _TIMES),
            ("usual_us", "double"),
            ("spread", "double"),
            ("reports", "boolean"),
        )

    def spread(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Any]:
        """Returns a row for each message, and a number for each that is equal within a device."""
        metric = rows["metric"]
        online = pc.equal(metric, ONLINE)
        first = pc.and_(pc.equal(rows["position"], 0), pc.not_equal(metric, REPEATED))
        wanted = pc.and_(pc.or_(first, online), pc.is_valid(rows["store_time"]))
        gone = pc.and_(online, pc.invert(rows["value_boolean"].fill_null(True)))
        numbers = text_hashes(rows["device"])
        found = pa.RecordBatch.from_arrays(
            [rows["device"], rows["store_time"].cast(pa.int64()), rows["partition"],
             rows["offset"], gone, online],
            names=["device", "at_us", "partition", "offset", "gone", "reports"],
        )  # fmt: skip
        return found.filter(wanted), numbers[wanted.to_numpy(zero_copy_only=False)]

    def fold(
        self, rows: pa.Table, states: pa.Table, oldest_us: int | None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Folds the messages of some devices."""
        if not rows.num_rows:
            return
        # A message may have two rows: its first one, and that of its state.
        messages = GroupedRows(rows, ("device", "at_us", "partition", "offset"))
        at = messages.key("at_us").to_numpy()
        gone = messages.count(messages.rows["gone"]).to_numpy() > 0
        reports = messages.count(messages.rows["reports"]).to_numpy() > 0
        devices = GroupedRows(pa.table({"device": messages.key("device")}), ("device",))
        names = devices.key("device").to_pylist()
        for name, begin, end in zip(names, devices.begins, devices.ends, strict=True):
            part = slice(begin, end)
            yield from self._of_device(name, at[part], gone[part], reports[part])

    def _of_device(
        self, device: str, at: Integers, gone: Flags, reports: Flags
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        own = np.unique(at - at % DAY_US)
        for day_us in np.union1d(own, own + DAY_US).tolist():
            low, high = np.searchsorted(at, (day_us - DAY_US, day_us + DAY_US))
            columns = _spans(at[low:high], gone[low:high], day_us)
            devices = pa.repeat(pa.scalar(device, pa.string()), len(columns[0]))
            columns.append(pa.repeat(pa.scalar(bool(reports[low:high].any())), len(columns[0])))
            names = [name for name, _ in self.folded]
            yield ROWS, pa.RecordBatch.from_arrays([devices, *columns], names=names)


def _spans(at: Integers, gone: Flags, day_us: int) -> list[pa.Array]:
    """Returns the spans of a device that may be outages, and the last one, with the columns
    `_TIMES`, `usual_us` and `spread`.

    The messages are those of a day and the one before, in order; there is at least one.
    """
    heard = ~gone
    usual_us, spread = _expectation(_between_bursts(at[heard]))
    is_start = heard.copy()
    is_start[0] = True
    starts = np.flatnonzero(is_start)
    ends = np.append(starts[1:], len(at))
    # The first message that says so is the second of its span, unless no message was before it.
    first_gone = starts + heard[starts]
    has_gone = first_gone < ends
    again = np.append(at[starts[1:]], 0)
    is_last = np.zeros(len(starts), np.bool_)
    is_last[-1] = True
    kept = has_gone | is_last
    if usual_us is not None:
        kept |= again - at[starts] > _longest_us(usual_us)
    messages = np.add.reduceat((at >= day_us).astype(np.int64), starts)
    messages[-1] += messages[~kept].sum()
    first = at[starts]
    first[-1] = at[0]
    as_of = at[-1] if at[-1] >= day_us else None
    count = int(kept.sum())
    return [
        pa.repeat(pa.scalar(day_us, pa.int64()), count),
        pa.array(first[kept]),
        pa.array(at[starts][kept], mask=gone[starts][kept]),
        pa.array(at[np.minimum(first_gone, len(at) - 1)][kept], mask=~has_gone[kept]),
        pa.array(again[kept], mask=is_last[kept]),
        pa.array(messages[kept]),
        pa.repeat(pa.scalar(as_of, pa.int64()), count),
        pa.repeat(pa.scalar(usual_us, pa.float64()), count),
        pa.repeat(pa.scalar(spread, pa.float64()), count),
    ]


def _between_bursts(at: Integers) -> Integers:
    """Returns the intervals between messages in order, without those inside of bursts."""
    intervals = np.diff(at)
    counts = intervals >= BURST_GAP_US
    begins = np.flatnonzero(np.concatenate(([True], counts)))
    ends = np.append(begins[1:], len(at))
    long = at[ends - 1] - at[begins] >= BURST_MAX_US if len(at) else np.zeros(0, np.bool_)
    for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
        while (
            begin := begin + int(np.searchsorted(at[begin:end], at[begin] + BURST_MAX_US))
        ) < end:
            counts[begin - 1] = True
    return intervals[counts]


def _longest_us(usual_us: float) -> float:
    """Returns the longest interval that is no silence."""
    return max(usual_us * SILENCE_FACTOR, float(SILENCE_MIN_US))


def _expectation(intervals: Integers) -> tuple[float | None, float | None]:
    """Returns the usual interval, and the spread of the intervals that are no silences.

    The usual interval is the one that a share of all, USUAL_SHARE, is not longer than. It is None
    unless the intervals are even. The spread is None for too few.

    A quarter of the time passes in intervals up to the short one, and nine tenths in those up to
    the long one. Time counts, and not the number of intervals. Counter-example: a motion sensor
    reports each motion and, 90 s later, its end. Half of its intervals are equal, and the others
    are minutes or nights.
    """
    if len(intervals) < INTERVALS_MIN:
        return None, None
    rank = (len(intervals) - 1) * USUAL_SHARE
    below = int(rank)
    part = rank - below
    ordered = np.sort(intervals)
    low, high = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    usual_us = low if part == 0 else low * (1 - part) + high * part
    normal = ordered[: np.searchsorted(ordered, _longest_us(usual_us), "right")]
    passed = np.cumsum(normal)
    short, long = (normal[np.searchsorted(passed * of, passed[-1] * share)]
                   for share, of in ((1, 4), (9, 10)))  # fmt: skip
    if np.count_nonzero(2 * normal >= short) < INTERVALS_MIN:
        return None, None
    spread = float(long) / float(short)
    silences = len(ordered) - len(normal)
    are_few = silences <= max(SILENCES_MIN, len(ordered) // SILENCES_OF)
    is_even = spread <= SPREAD_MAX and are_few
    return usual_us if is_even else None, spread


def finish_outages(spans: DataFrame) -> DataFrame:
    """Makes the outages of each device and day from its spans."""
    return (
        _with_down_time(spans)
        .where(F.col("down_us") > 0)
        .select(
            "device",
            F.timestamp_micros("day_us").alias("window_start"),
            F.timestamp_micros("from_us").alias("outage_from"),
            F.timestamp_micros("to_us").alias("outage_to"),
            (F.col("down_us") / 1_000_000.0).alias("duration_s"),
            F.when(F.col("gone_us").isNotNull(), "offline").otherwise("silence").alias("cause"),
            (F.col("begin_us") < F.col("day_us")).alias("began_before"),
            F.col("again_us").isNull().alias("is_open"),
        )
    )


def finish_availability(spans: DataFrame) -> DataFrame:
    """Makes the availability of each device and day from its spans."""
    none = F.lit(0).cast(LongType())
    days = (
        _with_down_time(spans)
        .groupBy("day_us", "device")
        .agg(
            F.greatest(F.min("first_us"), F.col("day_us")).alias("begin_us"),
            F.max("as_of_us").alias("as_of_us"),
            F.max("usual_us").alias("usual_us"),
            F.max("spread").alias("spread"),
            F.max("reports").alias("reports"),
            F.sum("messages").alias("messages"),
            F.count_if(F.col("down_us") > 0).alias("outages"),
            F.sum("down_us").alias("down_us"),
            F.max("down_us").alias("longest_us"),
        )
        .withColumn("observed_us", F.greatest(F.col("as_of_us") - F.col("begin_us"), none))
        .withColumn("up_us", F.col("observed_us") - F.col("down_us"))
    )
    is_even = F.col("usual_us").isNotNull()
    is_known = (F.col("observed_us") > 0) & (is_even | F.col("reports"))
    return days.select(
        "device",
        F.timestamp_micros("day_us").alias("window_start"),
        "messages",
        *(
            (F.col(f"{name}_us") / 1_000_000.0).alias(f"{name}_s")
            for name in ("observed", "up", "down", "longest")
        ),
        F.when(is_known, F.col("up_us") / F.col("observed_us")).alias("availability"),
        "outages",
        (F.col("usual_us") / 1_000_000.0).alias("usual_interval_s"),
        F.when(is_even, "outage")
        .when(F.col("spread").isNotNull(), "uneven")
        .otherwise("few")
        .alias("silence"),
        F.col("spread").alias("interval_spread"),
    )


def _with_down_time(spans: DataFrame) -> DataFrame:
    """Adds to spans their down time (`down_us`, from `from_us` to `to_us`).

    A device is down if it said so, or if the next message came too late. A day ends with the last
    message of any device.
    """
    limit_us = F.greatest(F.col("usual_us") * SILENCE_FACTOR, F.lit(float(SILENCE_MIN_US)))
    silent = F.col("usual_us").isNotNull() & (F.col("end_us") - F.col("heard_us") > limit_us)
    length_us = F.col("to_us") - F.col("from_us")
    of_day = Window.partitionBy("day_us")
    return (
        spans.withColumn("as_of_us", F.max("as_of_us").over(of_day))
        .where(F.col("as_of_us").isNotNull())
        .withColumn("end_us", F.coalesce("again_us", "as_of_us"))
        .withColumn("begin_us", F.when(silent, F.col("heard_us")).otherwise(F.col("gone_us")))
        .withColumn("from_us", F.greatest("begin_us", "day_us"))
        .withColumn("to_us", F.least("end_us", "as_of_us"))
        # It is 0 if no outage began, or if it ended the day before: that day has it then.
        .withColumn(
            "down_us",
            F.when(F.col("begin_us").isNotNull() & (length_us > 0), length_us).otherwise(0),
        )
    )


OUTAGES: Final = Table(
    name="outages",
    layer="gold",
    source="readings",
    build=PresenceFold(finish_outages),
    columns=_OUTAGE_COLUMNS,
    description="When each device was not there, by day",
    keys=("window_start", "device", "outage_from"),
    grain=Grain.days(source_time="store_time", before=1),
)
AVAILABILITY: Final = Table(
    name="availability",
    layer="gold",
    source="readings",
    build=PresenceFold(finish_availability),
    columns=_AVAILABILITY_COLUMNS,
    description="Up and down time of each device and day",
    keys=("window_start", "device"),
    grain=Grain.days(source_time="store_time", before=1),
)

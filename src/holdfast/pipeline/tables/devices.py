"""Gold `device_minutes` and `device_hours`: statistics per device and metric."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.lake.table import Column, Grain, Table
from holdfast.pipeline.tables.statistics import (
    ArrowColumns,
    GroupedRows,
    Results,
    WindowFold,
    percentile,
    put_moments,
)

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
READING_ORDER: Final = ("event_time", "partition", "offset", "position")
"""The columns that identify a reading among those of a device and metric."""
_INPUT: Final = (
    "device", "metric", "value_double", "value_string", "value_boolean", "is_late", *READING_ORDER,
)  # fmt: skip


def _columns(unit: str) -> tuple[Column, ...]:
    return (
        Column("device", "string", "the device"),
        Column("metric", "string", "what was read"),
        Column("window_start", "timestamp", f"begin of the {unit}, by the event time, UTC"),
        Column("readings", "bigint", "readings of any type, null as well"),
        Column(
            "rate",
            "double",
            f"readings per second of the observed part of the {unit}; null if that is under 10 s",
        ),
        Column("late", "bigint", "of them late"),
        Column("numbers", "bigint", "of them numbers; what follows is about these"),
        Column("min", "double", "least"),
        Column("max", "double", "greatest"),
        Column("mean", "double", "mean, within min and max; null if the sum is beyond double"),
        Column("stddev", "double", "standard deviation of the sample; null for one number"),
        Column("first", "double", "by the event time"),
        Column("last", "double", "by the event time"),
        *(
            Column(name, "double", f"exact percentile {share * 100:g}, linear between two values")
            for name, share in SHARES.items()
        ),
        Column("trues", "bigint", "readings that are true"),
        Column("falses", "bigint", "readings that are false"),
        Column("last_string", "string", "the last text, by the event time"),
    )


def prepare_readings(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the readings of devices, without what the pipeline adds, such as `$online`."""
    return rows.filter(pc.invert(pc.starts_with(rows["metric"], "$")))


def aggregate_readings(groups: GroupedRows) -> ArrowColumns:
    """Computes the statistics of readings."""
    numbers = groups.present("value_double")
    found = Results(len(groups.begins))
    for each, values in numbers.sorted():
        found.put("min", each, values[:, 0])
        found.put("max", each, values[:, -1])
        put_moments(found, each, values)
        for name, share in SHARES.items():
            found.put(name, each, percentile(values, share))
    truth = groups.rows["value_boolean"]
    return {
        "readings": groups.size(),
        "late": groups.count(groups.rows["is_late"]),
        "numbers": numbers.size(),
        **{name: found.array(name) for name in ("min", "max", "mean", "stddev", *SHARES)},
        "first": numbers.first(),
        "last": numbers.last(),
        "trues": groups.count(truth),
        "falses": groups.count(pc.invert(truth)),
        "last_string": groups.present("value_string").last(),
    }


def _table(name: str, unit: str) -> Table:
    return Table(
        name=name,
        layer="gold",
        source="readings",
        build=WindowFold(
            table=_columns(unit),
            columns=_INPUT,
            prepare=prepare_readings,
            aggregate=aggregate_readings,
            keys=("device", "metric"),
            time="event_time",
            unit=unit,
            order=READING_ORDER,
            rates={"rate": "readings"},
        ),
        columns=_columns(unit),
        description=f"Statistics of each device and metric, for each {unit}",
        keys=("window_start", "device", "metric"),
        grain=Grain.hours(),
    )


DEVICE_MINUTES: Final = _table("device_minutes", "minute")
DEVICE_HOURS: Final = _table("device_hours", "hour")

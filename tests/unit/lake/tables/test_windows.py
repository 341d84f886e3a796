"""The folds to rows per window: what they keep, and groups without values.
tests/spark/test_tables_gold.py compares the tables with plain Python."""

from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

import pyarrow as pa

from holdfast_lake.lake.fold_tasks import Grains
from holdfast_lake.tables import TABLES
from holdfast_lake.tables.columns import TIME
from holdfast_lake.tables.statistics import UNIT_US, WindowFold

HOUR_US = UNIT_US["hour"]
TOPICS = pa.schema(
    [
        ("topic", pa.string()),
        ("timestamp", TIME),
        ("payload", pa.binary()),
        ("retain", pa.bool_()),
        ("client_id", pa.string()),
    ]
)
READINGS = pa.schema(
    [
        ("device", pa.string()),
        ("metric", pa.string()),
        ("event_time", TIME),
        ("value_double", pa.float64()),
        ("value_string", pa.string()),
        ("value_boolean", pa.bool_()),
        ("unit", pa.string()),
        ("is_late", pa.bool_()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("position", pa.int32()),
    ]
)


def fold_of(name: str) -> WindowFold:
    (table,) = (each for each in TABLES if each.name == name)
    assert isinstance(table.build, WindowFold)
    return table.build


def folded(name: str, schema: pa.Schema, rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(each, kind) for each, kind in zip(columns, schema.types, strict=True)]
    fold = fold_of(name)
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema).select(list(fold.columns))
    kept, numbers = fold.spread(batch)
    assert len(numbers) == kept.num_rows
    found = fold.fold(pa.Table.from_batches([kept]), pa.table({}), None)
    return [row for _, each in found for row in each.to_pylist()]


def reading(
    at_us: int, value: float | None, text: str | None = None, unit: str | None = None
) -> tuple[Any, ...]:
    return ("d", "v", at_us, value, text, None, unit, False, 0, at_us, 0)


def test_only_rows_of_wanted_grains_are_folded() -> None:
    times = [-1, 0, HOUR_US - 1, HOUR_US, None, 2 * HOUR_US]
    rows = pa.RecordBatch.from_arrays([pa.array(times, TIME)], ["at"])
    kept = Grains("at", HOUR_US, [-1, 1]).rows_in(rows)
    assert kept["at"].cast(pa.int64()).to_pylist() == [-1, HOUR_US]
    assert Grains("at", HOUR_US, [0]).rows_in(kept).num_rows == 0


def test_a_window_without_numbers_has_no_statistics() -> None:
    found = folded("device_minutes", READINGS, [reading(1, None, "a"), reading(0, None, "b")])
    (row,) = found
    assert (row["readings"], row["numbers"], row["last_string"]) == (2, 0, "a")
    names = ("min", "max", "mean", "stddev", "first", "last", "p50", "p99")
    assert [row[name] for name in names] == [None] * len(names)


def test_windows_with_and_without_numbers_stay_apart() -> None:
    minute_us = UNIT_US["minute"]
    rows = [reading(0, 2.0), reading(minute_us, None), reading(2 * minute_us, -0.0)]
    found = folded("device_minutes", READINGS, [*rows, reading(1, 4.0)])
    assert [row["mean"] for row in found] == [3.0, None, 0.0]
    assert [row["stddev"] for row in found] == [2**0.5, None, None]
    assert [row["last"] for row in found] == [4.0, None, 0.0]


def test_numbers_of_several_units_have_no_statistics() -> None:
    minute_us = UNIT_US["minute"]
    units = [["°C", None, "°C"], ["°F", "°C"], [None], list("edcba")]
    rows = [reading(at * minute_us + number, 20.0 + number, unit=unit)
            for at, some in enumerate(units) for number, unit in enumerate(some)]  # fmt: skip
    found = folded("device_minutes", READINGS, rows)
    assert [row["unit"] for row in found] == ["°C", "°C, °F", None, "a, b, c, d"]
    assert [row["numbers"] for row in found] == [3, 2, 1, 5]
    names = ("min", "max", "mean", "first", "last", "p50", "p90", "p99")
    for name in names:
        assert [row[name] is None for row in found] == [False, True, False, True]
    assert [row["stddev"] is None for row in found] == [False, True, True, True]


def test_a_clock_that_is_centuries_ahead_stops_no_latency() -> None:
    schema = pa.schema([("device", pa.string()), ("position", pa.int32()),
                        *((name, pa.timestamp("us", "UTC"))
                          for name in ("store_time", "sent_time", "claimed_time")),
                        ("is_historical", pa.bool_())])  # fmt: skip
    ahead_us = 18_465_093_378_086_827
    rows = [("d", 0, 5, 5 + ahead_us, 5 + ahead_us, False), ("d", 0, 5, 4, None, False)]
    (row,) = folded("latency", schema, rows)
    assert (row["messages"], row["wrong_clock"], row["max_ms"]) == (2, 1, 0.001)
    assert row["offset_min_ms"] == -ahead_us / 1000


def test_each_client_of_a_topic_counts_once() -> None:
    clients = ["b", "a", None, "b", "a"]
    rows = [("t", 0, b"x" * size, False, client) for size, client in enumerate(clients)]
    (row,) = folded("topics", TOPICS, rows)
    assert (row["messages"], row["clients"]) == (5, 2)
    assert (row["bytes"], row["bytes_min"], row["bytes_max"]) == (10, 0, 4)

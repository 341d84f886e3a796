"""The fold of `outages` and `availability`: messages of a device to the spans that may be outages.
tests/spark/test_tables_gold.py compares the tables with plain Python."""

from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

import pyarrow as pa

from holdfast.pipeline.tables.availability import (
    AVAILABILITY,
    DAY_US,
    SILENCE_MIN_US,
    PresenceFold,
)

SECOND_US = 1_000_000
SCHEMA = pa.schema(
    [
        ("device", pa.string()),
        ("metric", pa.string()),
        ("value_boolean", pa.bool_()),
        ("store_time", pa.timestamp("us", "UTC")),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("position", pa.int32()),
    ]
)


def fold_of(table: Any) -> PresenceFold:
    assert isinstance(table.build, PresenceFold)
    return table.build


def spans(rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows are (device, metric, value, time in microseconds, offset, position)."""
    fold = fold_of(AVAILABILITY)
    columns = [list(each) for each in zip(*rows, strict=True)]
    device, metric, value, at, offset, position = columns
    arrays = [device, metric, value, at, [0] * len(rows), offset, position]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(each, kind) for each, kind in zip(arrays, SCHEMA.types, strict=True)],
        schema=SCHEMA,
    )
    kept, numbers = fold.spread(batch)
    assert len(numbers) == kept.num_rows
    found = fold.fold(pa.Table.from_batches([kept]), pa.table({}), None)
    return [row for _, each in found for row in each.to_pylist()]


def test_a_bucket_without_rows_has_no_spans() -> None:
    fold = fold_of(AVAILABILITY)
    assert list(fold.fold(SCHEMA.empty_table(), pa.table({}), None)) == []


def test_a_steady_device_has_one_span_a_day() -> None:
    rows = [("d", "v", None, number * SECOND_US, number, 0) for number in range(3600)]
    first, second = spans(rows)
    assert (first["day_us"], second["day_us"]) == (0, DAY_US)
    assert (first["messages"], second["messages"]) == (3600, 0)
    assert (first["first_us"], first["heard_us"]) == (0, 3599 * SECOND_US)
    assert (first["as_of_us"], second["as_of_us"]) == (3599 * SECOND_US, None)
    assert first["usual_us"] == SECOND_US


def test_a_long_silence_has_a_span_of_its_own() -> None:
    late = SILENCE_MIN_US + 1
    times = [number * SECOND_US for number in range(100)]
    times += [times[-1] + late + number * SECOND_US for number in range(100)]
    found = spans([("d", "v", None, at, number, 0) for number, at in enumerate(times)])
    today = [row for row in found if row["day_us"] == 0]
    assert [(row["heard_us"], row["again_us"]) for row in today] == [
        (times[99], times[100]),
        (times[-1], None),
    ]
    assert sum(row["messages"] for row in today) == 200


def test_a_burst_of_many_topics_is_one_message_of_the_usual_interval() -> None:
    """A meter that publishes 14 topics each 11 s is not down between two telegrams."""
    times = [burst * 11 * SECOND_US + 990_000 + topic * 1000
             for burst in range(18) for topic in range(14)]  # fmt: skip
    times.append(times[-1] + 120 * SECOND_US)
    found = spans([("d", "v", None, at, number, 0) for number, at in enumerate(times)])
    today = [row for row in found if row["day_us"] == 0]
    assert [row["heard_us"] for row in today] == times[-2:]
    assert today[0]["usual_us"] == pytest.approx(11 * SECOND_US, rel=0.01)


def test_a_message_of_two_rows_counts_once_and_may_say_that_the_device_is_gone() -> None:
    rows = [
        ("d", "v", None, 0, 0, 0),
        ("d", "v", None, 1, 1, 0),
        ("d", "$online", False, 1, 1, 1),
        ("e", "$online", False, 5, 2, 0),
    ]
    today = {row["device"]: row for row in spans(rows) if row["day_us"] == 0}
    assert today["d"]["messages"] == 2
    assert (today["d"]["heard_us"], today["d"]["gone_us"]) == (0, 1)
    assert (today["e"]["heard_us"], today["e"]["gone_us"]) == (None, 5)


def test_rows_in_another_order_make_the_same_spans() -> None:
    rows = [("d", "v", None, number * SECOND_US, number, 0) for number in range(50)]
    rows += [("d", "$online", False, 200 * SECOND_US, 50, 0)]
    rows += [("c", "v", None, DAY_US + number, 100 + number, 0) for number in range(20)]
    assert spans(rows) == spans(rows[::-1])

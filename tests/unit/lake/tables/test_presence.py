"""The fold of `outages` and `availability`: messages of a device to the spans that may be outages.
tests/spark/test_tables_gold.py compares the tables with plain Python."""

import random
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

import pyarrow as pa

from holdfast_lake.tables.availability import (
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


def usual_us(times: list[int]) -> float | None:
    first, *_ = spans([("d", "v", None, at, number, 0) for number, at in enumerate(times)])
    found: float | None = first["usual_us"]
    return found


def silences(times: list[int]) -> int:
    found = spans([("d", "v", None, at, number, 0) for number, at in enumerate(times)])
    return sum(row["day_us"] == 0 and row["again_us"] is not None for row in found)


def bursts(topics: int, period_us: int, count: int, apart_us: int) -> list[int]:
    """Bursts of messages. None is exactly in time, as the telegrams of a meter."""
    chance = random.Random(topics)
    return [
        number * period_us + chance.randrange(period_us // 50) + topic * apart_us
        for number in range(count)
        for topic in range(topics)
    ]


@pytest.mark.parametrize("topics", [1, 9, 14, 100])
@pytest.mark.parametrize("apart_us", [0, 9_000, 70_000])
@pytest.mark.parametrize("period_s", [10, 60])
def test_messages_of_a_burst_do_not_shorten_the_usual_interval(
    topics: int, apart_us: int, period_s: int
) -> None:
    if topics * apart_us >= SECOND_US * period_s // 2:
        topics //= 10
    times = sorted(bursts(topics, period_s * SECOND_US, 20, apart_us))
    usual = usual_us(times)
    assert usual is not None
    assert 0.4 * period_s < usual / SECOND_US < 1.1 * period_s
    assert silences(times) == 0
    missing = [at for at in times if not 100 < at / SECOND_US < 100 + 7 * period_s]
    assert silences(missing) == 1


def test_a_device_that_never_pauses_has_its_own_usual_interval() -> None:
    for pace_us in (1, 1000, 100_000, 999_999, 1_000_000, 1_999_999, 2_000_000, 2_500_000):
        times = [number * pace_us for number in range(80 * SECOND_US // max(pace_us, 1000))]
        if times[-1] < 60 * SECOND_US:
            assert usual_us(times) is None, "no evidence of what comes after the burst"
            continue
        times += [times[-1] + 30 * SECOND_US + at for at in times]
        assert usual_us(times) == pace_us
        assert silences(times) == 1


def test_a_slow_round_of_many_registers_is_one_burst() -> None:
    times = [each * 600 * SECOND_US + at * 1_500_000 for each in range(20) for at in range(30)]
    assert silences(times) == 0
    assert (usual_us(times) or 0) > 500 * SECOND_US


def test_sensors_with_own_periods_are_one_device() -> None:
    chance = random.Random(4)
    times = [
        number * period_us + chance.randrange(SECOND_US)
        for period_us in (7 * SECOND_US, 60 * SECOND_US, 61 * SECOND_US, 300 * SECOND_US)
        for number in range(3600 * SECOND_US // period_us)
    ]
    times += [1800 * SECOND_US] * 500  # a backlog that comes at once
    assert silences(sorted(times)) == 0
    assert silences(sorted(at for at in times if not 900 < at / SECOND_US < 990)) == 1


DAYS_S = 2 * 86_400.0


def is_awake(at_s: float, chance: random.Random) -> bool:
    """Nobody comes at night, with few exceptions."""
    return 7 <= at_s / 3600 % 24 < 23 or chance.random() < 0.02


def visits(chance: random.Random, mean_s: float) -> list[float]:
    found, at = [], 0.0
    while (at := at + chance.expovariate(1 / mean_s)) < DAYS_S:
        if is_awake(at, chance):
            found.append(at)
    return found


def door(chance: random.Random) -> list[float]:
    """Opened and closed by each visitor."""
    found = visits(chance, 1500)
    return found + [at + chance.lognormvariate(2.3, 1) for at in found]


def motion(chance: random.Random) -> list[float]:
    """Motion, and its end 90 s after the last one: half of the intervals are equal."""
    found: list[float] = []
    for at in visits(chance, 600):
        if not found or at > found[-1]:
            stays = 1 + int(chance.lognormvariate(4.5, 1.5) / 90)
            found += [at + 90 * number for number in range(stays + 1)]
    return found


def button(chance: random.Random) -> list[float]:
    return visits(chance, 5000)


def steady(chance: random.Random) -> list[float]:
    """Every 60 s. One message in twenty is lost."""
    return [number * 60 + chance.random() for number in range(2880) if chance.random() > 0.05]


def changes(chance: random.Random) -> list[float]:
    """A change of the value, or after an hour without one."""
    found = [0.0]
    while found[-1] < DAYS_S:
        found.append(found[-1] + min(3600.0, chance.expovariate(1 / 3600)))
    return found


def slow(chance: random.Random) -> list[float]:
    return [number * 7200 + chance.random() * 60 for number in range(24)]


def without(times_s: list[float], begin_s: float, length_s: float) -> list[int]:
    left = [at for at in times_s if not begin_s <= at < begin_s + length_s and at < DAYS_S]
    return [int(at * SECOND_US) for at in sorted(left)]


def of_second_day(times: list[int]) -> list[dict[str, Any]]:
    """The spans by the messages of both days. The last one is open."""
    found = spans([("d", "v", None, at, number, 0) for number, at in enumerate(times)])
    return [row for row in found if row["day_us"] == DAY_US]


@pytest.mark.parametrize("device", [door, motion, button])
def test_a_device_that_publishes_on_events_is_not_silent(device: Any) -> None:
    """By chance alone, one in thirty looks regular for two days."""
    found = [of_second_day(without(device(random.Random(seed)), 0, 0)) for seed in range(60)]
    assert sum(len(rows) > 1 for rows in found) <= 2
    assert sum(rows[-1]["usual_us"] is None for rows in found) >= 54
    if device is not button:
        assert sum(rows[-1]["spread"] is not None for rows in found) >= 54, "the reason is there"


@pytest.mark.parametrize(("device", "outage_s"), [(steady, 600), (changes, 18_500), (slow, 50_000)])
def test_the_silence_of_a_regular_device_is_found(device: Any, outage_s: float) -> None:
    times = [device(random.Random(seed)) for seed in range(40)]
    found = [len(of_second_day(without(each, 20_000, outage_s))) for each in times]
    assert found.count(2) >= 39
    assert len(of_second_day(without(times[0], 0, 0))) == 1


def test_many_silences_are_the_way_of_the_device() -> None:
    """12 messages of each hour are in time, and then none comes."""
    hours = [hour * 3600.0 + at * 60 for hour in range(48) for at in range(12)]
    assert len(of_second_day(without(hours, 0, 0))) == 1
    minutes = [float(at) for at in range(0, int(DAYS_S), 60) if at % 40_000 > 3000]
    assert len(of_second_day(without(minutes, 0, 0))) == 1 + 4


def test_presence_is_reported_or_not() -> None:
    quiet = spans([("d", "v", None, number * SECOND_US, number, 0) for number in range(4)])
    told = spans([("d", "$online", True, number * SECOND_US, number, 0) for number in range(4)])
    assert {row["reports"] for row in quiet} == {False}
    assert {row["reports"] for row in told} == {True}

"""Gold tables against plain Python, over random readings of many devices at once; and the same
bits whatever the order and the partitions of the rows."""

import math
import random
import struct
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

pyspark_sql = pytest.importorskip("pyspark.sql")

import pyarrow as pa  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402
from pyspark.sql import functions as F  # noqa: E402

from holdfast_lake.lake.table import GrainFold, Table  # noqa: E402
from holdfast_lake.tables import TABLES  # noqa: E402
from holdfast_lake.tables.availability import (  # noqa: E402
    BURST_GAP_US,
    SILENCE_FACTOR,
    SILENCE_MIN_US,
)
from holdfast_lake.tables.columns import COLUMNS  # noqa: E402
from tests.support.plant_oracle import (  # noqa: E402
    FUTURE_US,
    Observed,
    Row,
    expectation_of,
    mean_of,
    micros,
    moment,
    percentile,
)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    # What Spark's own modules warn of when pandas and others are newer than they are.
    pytest.mark.filterwarnings("default"),
]

BY_NAME: dict[str, Table] = {table.name: table for table in TABLES}
READINGS = ", ".join(f"{column.name} {column.type}" for column in COLUMNS)
BEGIN = datetime(2026, 11, 20, 22, 0, tzinfo=UTC)
DAY_US = 86_400_000_000


def reading(device: str, at: datetime, offset: int, **more: Any) -> Row:
    row: Row = dict.fromkeys(column.name for column in COLUMNS)
    row |= {
        "device": device, "metric": "v", "event_time": at, "store_time": at, "topic": device,
        "partition": 0, "offset": offset, "position": 0, "stream": device, "is_late": False,
        "is_historical": False, "date": date(2026, 11, 20),
    }  # fmt: skip
    row |= more
    return row


def random_readings(seed: int) -> list[Row]:
    chance = random.Random(seed)
    rows = []
    for number in range(1500):
        at = BEGIN + timedelta(microseconds=chance.randrange(3 * 3_600_000_000))
        kind = chance.randrange(6)
        exponent = chance.choice((0, 0, 10, -10, 300))
        rows.append(
            reading(
                f"d{chance.randrange(6)}",
                at,
                number,
                metric=chance.choice(("a", "b", "$online")),
                value_double=chance.uniform(-1, 1) * 10**exponent if kind < 4 else None,
                value_string=chance.choice("xyz") if kind == 4 else None,
                value_boolean=chance.random() < 0.5 if kind == 5 else None,
                position=chance.randrange(2),
                is_late=chance.random() < 0.1,
                sent_time=at - timedelta(microseconds=int(chance.gauss(50_000, 40_000)))
                if chance.random() < 0.8
                else at - timedelta(days=3),
            )
        )
    return rows


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame([tuple(row.values()) for row in rows], READINGS)


def folded(fold: GrainFold, rows: DataFrame) -> DataFrame:
    """The rows that the tasks make, without their files: two shares of the streams."""
    shares: dict[int, list[pa.RecordBatch]] = {0: [], 1: []}
    for batch in rows.select(*fold.columns).toArrow().to_batches(max_chunksize=100):
        kept, numbers = fold.spread(batch)
        for share, parts in shares.items():
            parts.append(kept.filter(pa.array(numbers % 2 == share)))
    found = []
    for parts in shares.values():
        outputs = fold.fold(pa.Table.from_batches(parts), pa.table({}), None)
        found += [batch for _, batch in outputs]
    kinds = ", ".join(f"{column} {kind}" for column, kind in fold.folded)
    return rows.sparkSession.createDataFrame(pa.Table.from_batches(found), kinds)


def collected(name: str, rows: DataFrame) -> dict[tuple[Any, ...], Row]:
    """The table's rows by its keys."""
    table = BY_NAME[name]
    if isinstance(table.build, GrainFold):
        built = table.build.finish(folded(table.build, rows))
    else:
        built = table.build(rows)
    assert isinstance(built, DataFrame)
    columns = [F.col(column.name).cast(column.type) for column in table.columns]
    result: dict[tuple[Any, ...], Row] = {}
    for row in built.select(columns).collect():
        # Spark gives times as they are in this process's time zone, without saying so.
        values = {
            name: value.astimezone(UTC) if isinstance(value, datetime) else value
            for name, value in row.asDict().items()
        }
        key = tuple(values[each] for each in table.keys)
        assert key not in result
        result[key] = values
    return result


# Statistics


def expected_window(rows: list[Row]) -> Row:
    rows = sorted(rows, key=lambda r: (r["event_time"], r["partition"], r["offset"], r["position"]))
    numbers = [row["value_double"] for row in rows if row["value_double"] is not None]
    values = sorted(numbers)
    texts = [row["value_string"] for row in rows if row["value_string"] is not None]
    mean = mean_of(values)
    squares = 0.0
    for value in values:
        squares += (value - (mean or 0.0)) * (value - (mean or 0.0))
    enough = len(values) > 1 and math.isfinite(squares)
    return {
        "readings": len(rows),
        "late": sum(row["is_late"] for row in rows),
        "numbers": len(values),
        "unit": None,
        "min": values[0] if values else None,
        "max": values[-1] if values else None,
        "mean": mean,
        "stddev": math.sqrt(squares / (len(values) - 1)) if enough else None,
        "first": numbers[0] if numbers else None,
        "last": numbers[-1] if numbers else None,
        "p50": percentile(values, 0.5) if values else None,
        "p90": percentile(values, 0.9) if values else None,
        "p99": percentile(values, 0.99) if values else None,
        "trues": sum(row["value_boolean"] is True for row in rows),
        "falses": sum(row["value_boolean"] is False for row in rows),
        "last_string": texts[-1] if texts else None,
    }


@pytest.mark.parametrize(("name", "seconds"), [("device_minutes", 60), ("device_hours", 3600)])
def test_statistics_of_windows(spark: SparkSession, name: str, seconds: int) -> None:
    rows = random_readings(1)
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if not row["metric"].startswith("$"):
            time_us = micros(row["event_time"])
            start = moment(time_us - time_us % (seconds * 1_000_000))
            groups[start, row["device"], row["metric"]].append(row)
    found = collected(name, frame(spark, rows))
    assert set(found) == set(groups)
    observed = Observed(groups, "event_time", seconds)
    for key, members in groups.items():
        expected = expected_window(members) | {"rate": observed.rate(len(members), key[0])}
        assert {column: found[key][column] for column in expected} == expected, key


@pytest.mark.parametrize("value", [10.7, 0.1, 1e-310, 123456.789])
def test_the_mean_of_equal_values_is_that_value(spark: SparkSession, value: float) -> None:
    """33 times 10.7, added and divided, is 10.699999999999994."""
    rows = [reading("d", BEGIN, number, value_double=value) for number in range(33)]
    (found,) = collected("device_hours", frame(spark, rows)).values()
    assert (found["mean"], found["stddev"]) == (value, 0.0)


def test_a_minute_that_is_not_over_is_not_divided_by_sixty(spark: SparkSession) -> None:
    """43 a second from 17 s before the end of a minute to 20 s after the begin of the next but
    one."""
    begin = BEGIN + timedelta(seconds=43)
    rows = [
        reading("d", begin + timedelta(seconds=number / 4), number, value_double=1.0)
        for number in range(4 * 97)
    ]
    found = collected("device_minutes", frame(spark, rows))
    assert [round(found[key]["rate"], 1) for key in sorted(found)] == [4.0, 4.0, 4.1]
    (hour,) = collected("device_hours", frame(spark, rows)).values()
    assert round(hour["rate"], 1) == 4.0
    (alone,) = collected("device_minutes", frame(spark, rows[:2])).values()
    assert alone["rate"] is None


def test_sums_beyond_double_have_no_mean(spark: SparkSession) -> None:
    rows = [
        reading("d", BEGIN, number, value_double=value)
        for number, value in enumerate((1.7e308, 1.7e308, -1.7e308, -1.7e308))
    ]
    (found,) = collected("device_hours", frame(spark, rows)).values()
    assert (found["min"], found["max"], found["p50"]) == (-1.7e308, 1.7e308, 0.0)
    assert (found["mean"], found["stddev"]) == (None, None)


def test_the_same_bits_from_rows_in_any_order(spark: SparkSession) -> None:
    rows = random_readings(2)

    def bits(found: dict[tuple[Any, ...], Row]) -> set[Any]:
        return {
            tuple(struct.pack("<d", v) if type(v) is float else v for v in row.values())
            for row in found.values()
        }

    once = bits(collected("device_minutes", frame(spark, rows).coalesce(1)))
    random.Random(3).shuffle(rows)
    spark.conf.set("spark.sql.shuffle.partitions", 4)
    try:
        assert bits(collected("device_minutes", frame(spark, rows).repartition(5))) == once
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", 1)


# Latency and traffic


def test_latency(spark: SparkSession) -> None:
    rows = random_readings(4)
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["position"] == 0:
            start = row["store_time"].replace(second=0, microsecond=0)
            groups[start, row["device"]].append(row)
    found = collected("latency", frame(spark, rows).repartition(3))
    assert set(found) == set(groups)
    for key, members in groups.items():
        all_us = [micros(row["store_time"]) - micros(row["sent_time"]) for row in members]
        values = sorted(each for each in all_us if -FUTURE_US <= each <= DAY_US)
        row = found[key]
        assert row["messages"] == len(members)
        assert row["wrong_clock"] == len(members) - len(values)
        assert row["ahead"] == sum(each < 0 for each in values)
        if values:
            assert row["min_ms"] == values[0] / 1000
            assert row["max_ms"] == values[-1] / 1000
            assert row["p90_ms"] == percentile(values, 0.9) / 1000
            assert row["mean_ms"] == sum(values) / len(values) / 1000
        else:
            assert row["p50_ms"] is row["mean_ms"] is None


def test_a_clock_ahead_is_told_the_same_by_latency_and_quality(spark: SparkSession) -> None:
    ahead = BEGIN + timedelta(hours=1)
    rows = [
        reading("d", BEGIN, 1, sent_time=BEGIN - timedelta(seconds=1)),
        reading("d", BEGIN, 2, sent_time=ahead, claimed_time=ahead),
        reading("only sent", BEGIN, 3, sent_time=ahead),
        reading("d", BEGIN, 4, metric="$repeated"),
    ]
    latency = {key[1]: row for key, row in collected("latency", frame(spark, rows)).items()}
    assert (latency["d"]["wrong_clock"], latency["d"]["ahead"]) == (1, 0)
    assert (latency["d"]["p50_ms"], latency["only sent"]["wrong_clock"]) == (1000.0, 1)
    quality = {key[1]: row for key, row in collected("quality", frame(spark, rows)).items()}
    assert quality["d"] == {
        "device": "d", "window_start": BEGIN, "messages": 2, "repetitions": 1, "late": 0,
        "wrong_clock": 1, "missing": 0, "filled": 0,
    }  # fmt: skip


def test_topics(spark: SparkSession) -> None:
    rows = [
        ("t", b"x" * size, BEGIN + timedelta(seconds=at), retain, client)
        for size, at, retain, client in (
            (3, 1, True, "a"),
            (5, 59, False, "b"),
            (0, 60, False, "a"),
        )
    ]
    names = "topic string, payload binary, timestamp timestamp, retain boolean, client_id string"
    found = collected("topics", spark.createDataFrame(rows, names))
    first, second = (found[key] for key in sorted(found))
    assert (first["messages"], first["bytes"], first["bytes_min"], first["bytes_max"]) == (
        2,
        8,
        3,
        5,
    )
    assert (first["retained"], first["clients"], first["rate"]) == (1, 2, 2 / 59)
    assert (second["bytes"], second["bytes_rate"]) == (0, None)


# Missing numbers


def test_gaps_and_what_is_left_of_them(spark: SparkSession) -> None:
    """Random streams with losses, and some of what was lost coming later."""
    chance = random.Random(5)
    rows = []
    left: dict[str, set[int]] = {}
    for stream in (f"s{number}" for number in range(40)):
        at, high = BEGIN, 0
        opened: dict[int, datetime] = {}
        numbers = [n for n in range(1, 60) if chance.random() < 0.6]
        lost = [n for n in range(1, 60) if n not in numbers]
        late = [n for n in lost if chance.random() < 0.5]
        left[stream] = {n for n in lost if n not in late and n < max(numbers)}
        late = [n for n in late if n < max(numbers)]
        chance.shuffle(late)
        for offset, number in enumerate([*numbers, *late]):
            at += timedelta(hours=chance.randrange(4))
            row = reading(stream, at, offset, sequence=number, run=1, gap_before=0)
            if number > high:
                row["gap_before"] = number - high - 1
                if row["gap_before"]:
                    row["gap_opened_at"] = at
                opened |= dict.fromkeys(range(high + 1, number), at)
                high = number
            else:
                row["gap_opened_at"] = opened[number]
            rows += [row, row | {"position": 1}]
    gaps = BY_NAME["gaps"].build(frame(spark, rows))
    assert isinstance(gaps, DataFrame)
    found = collected("missing", gaps.persist())
    result: dict[str, set[int]] = defaultdict(set)
    for row in found.values():
        range_ = set(range(row["first"], row["last"] + 1))
        assert len(range_) == row["count"] > 0
        assert not result[row["stream"]] & range_
        result[row["stream"]] |= range_
        assert row["window_start"].date() == row["opened_at"].date()
    assert {stream: result[stream] for stream in left} == left


# Availability


def presence_readings(seed: int) -> list[Row]:
    """Devices that send at their own pace, fall silent, say goodbye, and come back."""
    chance = random.Random(seed)
    rows: list[Row] = []
    for number in range(25):
        device = f"d{number}"
        pace_s = chance.choice((2, 30, 600))
        speaks_when_it_wants = number % 5 == 4
        at = BEGIN + timedelta(seconds=chance.randrange(3600))
        for offset in range(chance.choice((1, 4, 60, 200))):
            at += timedelta(seconds=pace_s, microseconds=chance.randrange(1000))
            if speaks_when_it_wants:
                at += timedelta(seconds=pace_s * chance.expovariate(0.5) ** 2)
            if chance.random() < 0.05:
                at += timedelta(seconds=pace_s * chance.randrange(200))
            if at > BEGIN + timedelta(days=3):
                break
            rows.append(reading(device, at, offset))
            if chance.random() < 0.06:
                at += timedelta(seconds=chance.randrange(1, 60))
                offline = {"metric": "$online", "value_boolean": False}
                rows.append(reading(device, at, 1000 + offset, **offline))
    return rows


def expected_day(
    messages: list[tuple[int, bool]], day_us: int, as_of_us: int
) -> tuple[list[Row], tuple[float | None, float | None]]:
    """Outages of one device on a day, by its messages of that day and the one before: (time, it
    says goodbye). And the usual interval with the spread."""
    heard = [at for at, gone in messages if not gone]
    intervals = sorted(b - a for a, b in pairwise(heard))
    assert not intervals or intervals[0] >= BURST_GAP_US, "test_presence.py has bursts"
    usual, spread = expectation_of(intervals)
    limit = SILENCE_MIN_US if usual is None else max(usual * SILENCE_FACTOR, SILENCE_MIN_US)
    outages = []
    last, gone_us = None, None
    for at, gone in [*messages, (None, False)]:
        if gone:
            gone_us = at if gone_us is None else gone_us
            continue
        end = as_of_us if at is None else at
        begin = gone_us
        if last is not None and usual is not None and end - last > limit:
            begin = last
        if begin is not None and min(end, as_of_us) > max(begin, day_us):
            outages.append(
                {
                    "outage_from": max(begin, day_us), "outage_to": min(end, as_of_us),
                    "cause": "silence" if gone_us is None else "offline",
                    "began_before": begin < day_us, "is_open": at is None,
                }
            )  # fmt: skip
        last, gone_us = at, None
    return outages, (usual, spread)


@pytest.fixture(scope="module")
def presence() -> list[Row]:
    return presence_readings(6)


def days_of(rows: list[Row]) -> dict[int, int]:
    """The days with messages, and the last message of each."""
    last: dict[int, int] = {}
    for row in rows:
        at = micros(row["store_time"])
        last[at - at % DAY_US] = max(at, last.get(at - at % DAY_US, 0))
    return last


def expected_days(rows: list[Row]) -> dict[tuple[int, str], tuple[list[Row], Any, list[int]]]:
    result = {}
    for day_us, as_of_us in days_of(rows).items():
        for device in sorted({row["device"] for row in rows}):
            messages = sorted(
                (micros(row["store_time"]), row["metric"] == "$online")
                for row in rows
                if row["device"] == device
                and day_us - DAY_US <= micros(row["store_time"]) < day_us + DAY_US
            )
            if messages:
                outages, usual = expected_day(messages, day_us, as_of_us)
                result[day_us, device] = (outages, usual, [at for at, _ in messages])
    return result


def test_outages(spark: SparkSession, presence: list[Row]) -> None:
    found = collected("outages", frame(spark, presence))
    expected = {
        (moment(day_us), device, moment(each["outage_from"])): each
        for (day_us, device), (outages, _, _) in expected_days(presence).items()
        for each in outages
    }
    assert set(found) == set(expected)
    assert {each["cause"] for each in expected.values()} == {"silence", "offline"}
    assert {each["began_before"] for each in expected.values()} == {True, False}
    for key, each in expected.items():
        row = found[key]
        assert row["outage_to"] == moment(each["outage_to"])
        assert row["duration_s"] == (each["outage_to"] - each["outage_from"]) / 1e6
        for name in ("cause", "began_before", "is_open"):
            assert row[name] == each[name], (key, name)


def test_availability(spark: SparkSession, presence: list[Row]) -> None:
    shuffled = random.Random(8).sample(presence, len(presence))
    found = collected("availability", frame(spark, shuffled).repartition(3))
    expected = expected_days(presence)
    as_of = days_of(presence)

    def reports(device: str, day_us: int) -> bool:
        times = [micros(row["store_time"]) for row in presence
                 if row["device"] == device and row["metric"] == "$online"]  # fmt: skip
        return any(day_us - DAY_US <= at < day_us + DAY_US for at in times)

    assert len(found) == len(expected)
    kinds = set()
    for (day_us, device), (outages, (usual, spread), times) in expected.items():
        row = found[moment(day_us), device]
        lengths = [each["outage_to"] - each["outage_from"] for each in outages]
        observed = max(as_of[day_us] - max(min(times), day_us), 0)
        assert row["messages"] == sum(at >= day_us for at in times)
        assert row["observed_s"] == observed / 1e6
        assert row["down_s"] == sum(lengths) / 1e6
        assert row["up_s"] == (observed - sum(lengths)) / 1e6
        assert row["up_s"] >= 0
        assert row["outages"] == len(lengths)
        assert row["longest_s"] == max(lengths, default=0) / 1e6
        assert row["usual_interval_s"] == (None if usual is None else usual / 1e6)
        assert (row["silence"], row["interval_spread"]) == (
            "outage" if usual else "uneven" if spread else "few", spread
        )  # fmt: skip
        kinds.add(row["silence"])
        known = observed and (usual or reports(device, day_us))
        assert row["availability"] == ((observed - sum(lengths)) / observed if known else None)
    assert kinds == {"outage", "uneven", "few"}


def test_a_day_is_judged_by_itself_and_the_day_before(
    spark: SparkSession, presence: list[Row]
) -> None:
    """What else a step happens to read changes nothing."""
    all_days = collected("availability", frame(spark, presence))
    last = max(days_of(presence))
    some = [row for row in presence if micros(row["store_time"]) >= last - DAY_US]
    alone = collected("availability", frame(spark, some))
    start = moment(last)
    assert {key: row for key, row in alone.items() if key[0] == start} == {
        key: row for key, row in all_days.items() if key[0] == start
    }

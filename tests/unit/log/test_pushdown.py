import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.log.columns.decode import SCHEMA
from holdfast.log.partition import partition_of
from holdfast.log.reading.topic_filter import Clause, TopicFilter
from holdfast_lake.source.options import parse
from holdfast_lake.source.pushdown import PushedFilters
from holdfast_lake.source.source import HoldfastReader

PARTITIONS = 8
ALL = [OffsetRange(p, 10, 20) for p in range(PARTITIONS)]


def narrowed(*filters: Filter) -> PushedFilters:
    found = PushedFilters()
    found.add(filters)
    return found


def ranges(*filters: Filter) -> list[OffsetRange]:
    found = narrowed(*filters)
    return found.ranges(ALL, PARTITIONS, TopicFilter(tuple(found.topics)))


def test_a_topic_is_in_one_partition() -> None:
    at = partition_of(b"a/b", PARTITIONS)
    assert ranges(EqualTo(("topic",), "a/b")) == [ALL[at]]
    both = {at, partition_of(b"a/c", PARTITIONS)}
    assert ranges(In(("topic",), ("a/b", "a/c"))) == [ALL[p] for p in sorted(both)]
    assert ranges(EqualTo(("topic",), "a/b"), EqualTo(("partition",), (at + 1) % 8)) == []
    assert ranges(StringStartsWith(("topic",), "a/")) == ALL


def test_what_no_topic_can_be_matches_nothing() -> None:
    assert ranges(EqualTo(("topic",), "a/+")) == []
    assert ranges(EqualTo(("topic",), "")) == []
    assert ranges(In(("topic",), ("#",))) == []


@pytest.mark.parametrize(
    ("filters", "start", "end"),
    [
        ([GreaterThan(("offset",), 12)], 13, 20),
        ([GreaterThanOrEqual(("offset",), 12), LessThan(("offset",), 15)], 12, 15),
        ([LessThanOrEqual(("offset",), 15)], 10, 16),
        ([EqualTo(("offset",), 15)], 15, 16),
        ([EqualTo(("offset",), 15), EqualTo(("offset",), 16)], 0, 0),
    ],
)
def test_offsets(filters: list[Filter], start: int, end: int) -> None:
    expected = [OffsetRange(p, start, end) for p in range(PARTITIONS)] if end else []
    assert ranges(*filters) == expected


@pytest.mark.parametrize(
    "item",
    [
        Not(EqualTo(("topic",), "a")),
        Not(EqualTo(("partition",), 3)),
        IsNotNull(("topic",)),
        StringContains(("topic",), "a"),
        EqualTo(("payload",), b"a"),
        EqualTo(("producer", "id"), "a"),
        EqualTo(("topic",), None),
        LessThan(("timestamp",), datetime(2026, 1, 1, tzinfo=UTC)),
        GreaterThan(("timestamp",), datetime(2026, 1, 1)),
    ],
)
def test_what_says_nothing_about_places(item: Filter) -> None:
    found = narrowed(item)
    assert ranges(item) == ALL
    assert found.starting_timestamp_us is None
    assert found.topics == []


def test_the_beginning_of_a_time() -> None:
    zone = timezone(timedelta(hours=2))
    found = narrowed(
        GreaterThan(("timestamp",), datetime(1970, 1, 1, 2, 0, 1, 5, tzinfo=zone)),
        GreaterThanOrEqual(("timestamp",), datetime(1970, 1, 1, tzinfo=UTC)),
    )
    assert found.starting_timestamp_us == 1_000_005


def test_filters_are_pushed_whatever_the_setting_says() -> None:
    reader = HoldfastReader(parse({"servers": "a:1", "pushFilters": "true"}), SCHEMA)
    # What Spark looks at where pushing is off.
    assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters
    filters: list[Any] = [EqualTo(("topic",), "x/y"), IsNotNull(("topic",))]
    assert list(reader.pushFilters(filters)) == filters
    sent = pickle.loads(pickle.dumps(reader))
    assert sent.narrowing.topics == [Clause(("x/y",))]

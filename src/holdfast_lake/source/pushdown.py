"""Limits a read by Spark's filters: partitions, offsets, times and topics.

The source only reads less. Spark applies all filters itself as well, so the rows are the same
whatever this module understands.

Pushdown is an option because of a fault of Spark (4.3). Spark keeps the reader into which it pushed
the filters of one query with the DataFrame. A second query of that DataFrame without filters gets
the same reader, and would miss rows. The option `topics` has no such fault.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.log.reading.topic_filter import Clause, TopicFilter

OFFSET_MAX: Final = (1 << 63) - 1
"""The largest offset, which stands for no upper bound."""


@dataclass
class PushedFilters:
    """The bounds that Spark's filters put on a read. They select a superset of the rows that
    pass."""

    topics: list[Clause] = field(default_factory=list)
    partitions: set[int] | None = None
    """The partitions that may have such rows. None: all."""
    start: int = 0
    end: int = OFFSET_MAX
    """The offsets from `start` (included) to `end` (excluded), in every partition."""
    starting_timestamp_us: int | None = None
    """The earliest timestamp, in microseconds since 1970.

    Only a lower bound limits the offsets, because clocks may be set back. All records before the
    first one of that time are older. Behind the last record of a time there may still be older
    ones.
    """

    def add(self, filters: Iterable[Filter]) -> None:
        """Applies the filters that are understood, and ignores the others."""
        for each in filters:
            attribute = getattr(each, "attribute", None)
            if isinstance(attribute, tuple) and len(attribute) == 1:
                _ADDERS.get(attribute[0], _ignore)(self, each, getattr(each, "value", None))

    def ranges(
        self, ranges: Iterable[OffsetRange], partitions: int, topics: TopicFilter
    ) -> list[OffsetRange]:
        """Returns the parts of the ranges that may hold rows of these filters and of `topics`."""
        wanted = topics.partitions(partitions)
        if self.partitions is not None:
            wanted &= self.partitions
        narrowed = (
            OffsetRange(item.partition, max(item.start, self.start), min(item.end, self.end))
            for item in ranges
            if item.partition in wanted
        )
        return [item for item in narrowed if item.start < item.end]


def _ignore(found: PushedFilters, item: Filter, value: Any) -> None:
    return


def _topic(found: PushedFilters, item: Filter, value: Any) -> None:
    if isinstance(item, EqualTo | EqualNullSafe) and isinstance(value, str):
        found.topics.append(_exact([value]))
    elif isinstance(item, In) and all(isinstance(each, str) for each in value):
        found.topics.append(_exact(value))
    elif isinstance(item, StringStartsWith) and isinstance(value, str) and value:
        found.topics.append(Clause(prefixes=(value,)))


def _exact(topics: Iterable[str]) -> Clause:
    # A topic contains neither `+` nor `#`. In an MQTT filter they are wildcards and would match
    # more than Spark's equality.
    return Clause(tuple(each for each in topics if each and "+" not in each and "#" not in each))


def _partition(found: PushedFilters, item: Filter, value: Any) -> None:
    if isinstance(item, EqualTo | EqualNullSafe) and isinstance(value, int):
        wanted = {value}
    elif isinstance(item, In) and all(isinstance(each, int) for each in value):
        wanted = set(value)
    else:
        return
    found.partitions = wanted if found.partitions is None else found.partitions & wanted


def _offset(found: PushedFilters, item: Filter, value: Any) -> None:
    if not isinstance(value, int):
        return
    if isinstance(item, EqualTo | EqualNullSafe | GreaterThanOrEqual):
        found.start = max(found.start, value)
    elif isinstance(item, GreaterThan):
        found.start = max(found.start, value + 1)
    if isinstance(item, EqualTo | EqualNullSafe | LessThanOrEqual):
        found.end = min(found.end, value + 1)
    elif isinstance(item, LessThan):
        found.end = min(found.end, value)


def _timestamp(found: PushedFilters, item: Filter, value: Any) -> None:
    wanted = isinstance(item, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual)
    if not (wanted and isinstance(value, datetime)):
        return
    if value.tzinfo is None:
        return  # only Spark knows its time zone
    elapsed = value - datetime(1970, 1, 1, tzinfo=UTC)
    start = (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds
    if start >= 0:
        found.starting_timestamp_us = max(start, found.starting_timestamp_us or 0)


_ADDERS: Final[dict[str, Callable[[PushedFilters, Filter, Any], None]]] = {
    "topic": _topic,
    "partition": _partition,
    "offset": _offset,
    "timestamp": _timestamp,
}


class PushFilters:
    """The method `pushFilters` of one reader, whether or not filterPushdown is enabled in Spark.

    Spark rejects a reader whose class defines that method while
    `spark.sql.python.filterPushdown.enabled` is off, which is the default. The code that makes the
    reader cannot read that setting. Spark compares the method's `__func__`, so this object carries
    the one of the base class.
    """

    def __init__(self, found: PushedFilters) -> None:
        self.found = found
        # An attribute of the object, not of the class: a class attribute would be bound, and the
        # bound method is another object than the one Spark compares with.
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Notes the filters, and returns all of them, so that Spark applies them as well."""
        self.found.add(filters)
        return filters

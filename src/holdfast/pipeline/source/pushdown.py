"""What Spark's filters say about where to look: partitions, offsets, times and topics.

The source only reads less; all filters are left to Spark as well, so that the rows are the same
whatever is understood here. But Spark (4.3) keeps the reader that one query's filters were pushed
into with the DataFrame, and another query of it, whose filters say nothing, gets the same reader.
So all this is an option; the option `topics` has no such trap.
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

from holdfast.pipeline.source.offsets import OffsetRange
from holdfast.pipeline.source.topic_filter import Clause, TopicFilter

OFFSET_MAX: Final = (1 << 63) - 1


@dataclass
class PushedFilters:
    """Of all rows those that may pass the filters: a superset."""

    topics: list[Clause] = field(default_factory=list)
    partitions: set[int] | None = None
    """None: all."""
    start: int = 0
    end: int = OFFSET_MAX
    """Offsets, of every partition."""
    starting_timestamp_us: int | None = None
    """Clocks may step back, so only the beginning of a time says anything about offsets: before
    the first record of that time all are older, but behind the last one some may be, too."""

    def add(self, filters: Iterable[Filter]) -> None:
        for each in filters:
            attribute = getattr(each, "attribute", None)
            if isinstance(attribute, tuple) and len(attribute) == 1:
                _ADDERS.get(attribute[0], _ignore)(self, each, getattr(each, "value", None))

    def ranges(
        self, ranges: Iterable[OffsetRange], partitions: int, topics: TopicFilter
    ) -> list[OffsetRange]:
        """The parts of the ranges that may hold such rows, and what the filter matches."""
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
    # A topic has neither of these characters, and a filter would take them for more.
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
        return  # in whose time it is only Spark knows
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
    """`pushFilters` of a reader, whether `spark.sql.python.filterPushdown.enabled` is on or off.

    Spark refuses a reader whose class defines that method while the setting is off, which is its
    default, and where it makes the reader nobody can ask for the setting. What it looks at is the
    method's `__func__`.
    """

    def __init__(self, found: PushedFilters) -> None:
        self.found = found
        # Of the object: as an attribute of the class it would be bound, and so another one.
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """All are left to Spark as well."""
        self.found.add(filters)
        return filters

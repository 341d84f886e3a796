"""Selects a read's topics by the option `topics` and the topics that Spark pushes down.

A filter is a conjunction of clauses. A topic meets a clause if it matches one of its MQTT filters
or begins with one of its prefixes. A scan may return other rows as well, because Spark filters
again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.log.partition import partition_of
from holdfast.protocol.topics.names import has_wildcard, matches


@dataclass(frozen=True)
class Clause:
    """A disjunction of MQTT filters and topic prefixes."""

    filters: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    def matches(self, topic: str) -> bool:
        """Returns whether the topic meets the clause."""
        return topic.startswith(self.prefixes) or any(matches(f, topic) for f in self.filters)

    @property
    def is_exact(self) -> bool:
        """True if the clause names whole topics only, without wildcards and prefixes."""
        return not self.prefixes and not any(has_wildcard(each) for each in self.filters)


@dataclass(frozen=True)
class TopicFilter:
    """A conjunction of clauses. Without clauses it matches every topic."""

    clauses: tuple[Clause, ...] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.clauses)

    def plus(self, clauses: Iterable[Clause]) -> "TopicFilter":
        """Returns this filter with further clauses."""
        return TopicFilter((*self.clauses, *clauses))

    def matches(self, topic: str) -> bool:
        """Returns whether the topic meets all clauses."""
        return all(clause.matches(topic) for clause in self.clauses)

    def partitions(self, count: int) -> set[int]:
        """Returns the partitions, out of `count`, that can have such topics."""
        found = set(range(count))
        for clause in self.clauses:
            if clause.is_exact:
                found &= {partition_of(topic.encode(), count) for topic in clause.filters}
        return found

    def narrowest(self) -> Clause:
        """Returns the most selective clause, for an interface that takes only one."""
        return min(
            self.clauses, key=lambda each: (not each.is_exact, len(each.filters + each.prefixes))
        )

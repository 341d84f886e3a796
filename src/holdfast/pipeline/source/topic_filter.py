"""Which topics a read is about: the option `topics`, and what Spark pushes down.

A filter is a conjunction of clauses; a clause is met by what any of its MQTT filters matches, or
begins with any of its prefixes. Other rows may still come out of a scan: Spark filters again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from holdfast.protocol.topics.names import has_wildcard, matches
from holdfast.storage.partition import partition_of


@dataclass(frozen=True)
class Clause:
    filters: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    def matches(self, topic: str) -> bool:
        return topic.startswith(self.prefixes) or any(matches(f, topic) for f in self.filters)

    @property
    def is_exact(self) -> bool:
        return not self.prefixes and not any(has_wildcard(each) for each in self.filters)


@dataclass(frozen=True)
class TopicFilter:
    clauses: tuple[Clause, ...] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.clauses)

    def plus(self, clauses: Iterable[Clause]) -> "TopicFilter":
        return TopicFilter((*self.clauses, *clauses))

    def matches(self, topic: str) -> bool:
        return all(clause.matches(topic) for clause in self.clauses)

    def partitions(self, count: int) -> set[int]:
        """Of so many partitions those that can have such topics."""
        found = set(range(count))
        for clause in self.clauses:
            if clause.is_exact:
                found &= {partition_of(topic.encode(), count) for topic in clause.filters}
        return found

    def narrowest(self) -> Clause:
        """The clause that says most, for who takes only one."""
        return min(
            self.clauses, key=lambda each: (not each.is_exact, len(each.filters + each.prefixes))
        )

    def mask(self, topics: pa.Array) -> pa.Array:
        """Of an array of topics, which match."""
        encoded = topics.dictionary_encode()
        hits = pa.array(
            [self.matches(topic) for topic in encoded.dictionary.to_pylist()], pa.bool_()
        )
        return hits.take(encoded.indices)

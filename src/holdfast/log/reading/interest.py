"""Finds the topics of a segment that the filters of a session's read match."""

from collections.abc import Collection, Sequence
from typing import Final

from holdfast.log.reading.index import (
    MATCHED_FILTERS_MAX,
    TOPICS_BETWEEN_PAUSES,
    FilterMatch,
    SegmentIndex,
)
from holdfast.log.reading.segment_store import SegmentStore
from holdfast.protocol.topics.names import has_wildcard, matches
from holdfast.protocol.topics.trie import SubscriptionTrie

TOPICS_MERGED_MAX: Final = 512
"""The most matching topics of a segment that are merged; beyond it, its batches are read one after
the other."""
WILD_MAX: Final = 64
"""The most filters with wildcards that are matched one by one."""
EXACT_MAX: Final = 1000
"""The most filters without wildcards, as WILD_MAX is of those with. Beyond either, a segment's
topics are matched with all filters at once."""
KNOWN_TOPICS_MAX: Final = 10_000
"""The most topics whose interests a matcher keeps."""


class ReadInterest:
    """A topic filter, and per partition the offset from which it counts (None: always)."""

    def __init__(self, filter: str, start: Sequence[int] | None) -> None:
        self.filter = filter
        self.start = start


class Matcher:
    """The interests of one reader, by topic. A few filters with wildcards are matched one by one;
    many are in a trie. `store` is paused regularly, because a reader may have 100,000 filters."""

    def __init__(self, interests: list[ReadInterest], store: SegmentStore) -> None:
        self.exact: dict[bytes, list[ReadInterest]] = {}
        self.wild: list[ReadInterest] = []
        self.trie: SubscriptionTrie | None = None
        self._store = store
        self._steps = 0
        self._cache: dict[bytes, list[ReadInterest]] = {}
        # The matches of many filters in the segment read last.
        self._index: SegmentIndex | None = None
        self._match = FilterMatch()
        for interest in interests:
            self._step(1)
            if has_wildcard(interest.filter):
                self.wild.append(interest)
            else:
                self.exact.setdefault(interest.filter.encode(), []).append(interest)
        if len(self.wild) > WILD_MAX:
            self.trie = SubscriptionTrie()
            for interest in self.wild:
                self._step(1)
                self.trie.add(interest.filter, interest, interest)

    def is_many(self) -> bool:
        """True if looking up each filter in a segment's topics costs too much."""
        return self.trie is not None or len(self.exact) > EXACT_MAX

    def matching(self, topic: bytes) -> list[ReadInterest]:
        """The interests that match the topic."""
        found = self._cache.get(topic)
        if found is None:
            found = list(self.exact.get(topic, ()))
            if self.trie is not None:
                for value in self.trie.match(topic.decode("utf-8", "replace")):
                    assert isinstance(value, ReadInterest)
                    found.append(value)
            elif self.wild:
                text = topic.decode("utf-8", "replace")
                for interest in self.wild:
                    if matches(interest.filter, text):
                        found.append(interest)
            self._step(1 + len(found))
            if len(self._cache) >= KNOWN_TOPICS_MAX:
                self._cache.clear()
            self._cache[topic] = found
        return found

    def wants(self, topic: bytes, partition: int, offset: int) -> bool:
        """True if an interest matches the topic and covers the offset."""
        for interest in self.matching(topic):
            start = interest.start
            if start is None or offset >= start[partition]:
                return True
        return False

    def topics_of(self, index: SegmentIndex) -> FilterMatch:
        """The topics of the index that any filter matches, like _match_filter for one. A growing
        index has further topics later, so the search continues where it stopped."""
        if self._index is not index:
            self._index = index
            self._match = FilterMatch()
        match = self._match
        count = index.topic_count()
        while match.seen < count and not match.overflow:
            if self.matching(index.topic(match.seen)):
                match.topics.append(match.seen)
                match.overflow = len(match.topics) > TOPICS_MERGED_MAX
            match.seen += 1
        return match

    def _step(self, steps: int) -> None:
        self._steps += steps
        if self._steps >= TOPICS_BETWEEN_PAUSES:
            self._steps = 0
            self._store.pause()


def matching_topics(index: SegmentIndex, matcher: Matcher, store: SegmentStore) -> list[int] | None:
    """The numbers of the segment's topics that an interest matches; None if they are too many, or
    have half of its records: then reading the batches one after the other costs less."""
    if matcher.is_many():
        match = matcher.topics_of(index)
        return None if match.overflow else _unless_most(index, match.topics)
    found: set[int] = set()
    for topic in matcher.exact:
        number = index.find_topic(topic)
        if number >= 0:
            found.add(number)
    for interest in matcher.wild:
        match = _match_filter(index, interest.filter, store)
        if match.overflow:
            return None
        found.update(match.topics)
        if len(found) > TOPICS_MERGED_MAX:
            return None
    return _unless_most(index, found) if len(found) <= TOPICS_MERGED_MAX else None


def _unless_most(index: SegmentIndex, topics: Collection[int]) -> list[int] | None:
    """The topics; None if they have half of the segment's records, or more."""
    count = 0
    for number in topics:
        count += index.posting_count(number)
    return None if 2 * count >= index.head.records else list(topics)


def topics_of_filter(index: SegmentIndex, filter: str, store: SegmentStore) -> list[int]:
    """The numbers of all topics of the segment that a filter matches."""
    if not has_wildcard(filter):
        number = index.find_topic(filter.encode())
        return [number] if number >= 0 else []
    match = _match_filter(index, filter, store)
    if not match.overflow:
        return list(match.topics)
    found: list[int] = []
    start, end = index.topic_range(_literal_prefix(filter))
    for number in range(start, end):
        if number % TOPICS_BETWEEN_PAUSES == 0:
            store.pause()
        if matches(filter, index.topic(number).decode("utf-8", "replace")):
            found.append(number)
    return found


def _match_filter(index: SegmentIndex, filter: str, store: SegmentStore) -> FilterMatch:
    """The topics of the index that a filter matches, kept with the index: every reader with this
    filter uses them. With too many of them it stops, and the caller reads the batches instead."""
    match = index.matched.get(filter)
    start, end = index.topic_range(_literal_prefix(filter))
    if match is None:
        match = FilterMatch()
        match.seen = start
        if len(index.matched) >= MATCHED_FILTERS_MAX:
            index.matched.clear()
        index.matched[filter] = match
    while match.seen < end and not match.overflow:
        if match.seen % TOPICS_BETWEEN_PAUSES == 0:
            store.pause()
        if matches(filter, index.topic(match.seen).decode("utf-8", "replace")):
            match.topics.append(match.seen)
            match.overflow = len(match.topics) > TOPICS_MERGED_MAX
        match.seen += 1
    return match


def _literal_prefix(filter: str) -> bytes:
    """The common beginning of all topics that the filter matches. In a finished segment the topics
    are sorted, so only those with this beginning are compared."""
    end = len(filter)
    plus = filter.find("+")
    if plus >= 0:
        end = plus
    elif filter.endswith("#"):
        # `a/#` matches `a` too.
        end -= 2
    return filter[: max(0, end)].encode()

"""What a session's read looks for: the filters, and which topics of a segment they match."""

from collections.abc import Sequence
from typing import Final

from holdfast.log.index import (
    MATCHED_FILTERS_MAX,
    TOPICS_BETWEEN_PAUSES,
    FilterMatch,
    SegmentIndex,
)
from holdfast.log.store import SegmentStore
from holdfast.topics.names import has_wildcard, matches

TOPICS_MERGED_MAX: Final = 512
"""With more matching topics than this in a segment, its batches are read one after the other."""


class Interest:
    """A topic filter, and per partition the offset from which it counts (None: always)."""

    def __init__(self, filter: str, start: Sequence[int] | None) -> None:
        self.filter = filter
        self.start = start


class Matcher:
    """The interests of one read, by topic."""

    def __init__(self, interests: list[Interest]) -> None:
        self.exact: dict[bytes, list[Interest]] = {}
        self.wild: list[Interest] = []
        self._known: dict[bytes, list[Interest]] = {}
        for interest in interests:
            if has_wildcard(interest.filter):
                self.wild.append(interest)
            else:
                self.exact.setdefault(interest.filter.encode(), []).append(interest)

    def matching(self, topic: bytes) -> list[Interest]:
        found = self._known.get(topic)
        if found is None:
            found = list(self.exact.get(topic, ()))
            if self.wild:
                text = topic.decode("utf-8", "replace")
                for interest in self.wild:
                    if matches(interest.filter, text):
                        found.append(interest)
            self._known[topic] = found
        return found

    def wants(self, topic: bytes, partition: int, offset: int) -> bool:
        for interest in self.matching(topic):
            start = interest.start
            if start is None or offset >= start[partition]:
                return True
        return False


def matching_topics(index: SegmentIndex, matcher: Matcher, store: SegmentStore) -> list[int] | None:
    """Numbers of the topics of a segment that some interest matches; None if they are many."""
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
    return list(found) if len(found) <= TOPICS_MERGED_MAX else None


def _match_filter(index: SegmentIndex, filter: str, store: SegmentStore) -> FilterMatch:
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
    """What every topic that the filter matches begins with."""
    end = len(filter)
    plus = filter.find("+")
    if plus >= 0:
        end = plus
    elif filter.endswith("#"):
        # `a/#` matches `a` too.
        end -= 2
    return filter[: max(0, end)].encode()

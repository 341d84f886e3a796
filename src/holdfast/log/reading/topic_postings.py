"""Finds the batches of a segment that contain some topics, by the segment's index."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from holdfast.log.journal.segment import Segment
from holdfast.log.reading.index import INDEX_BITS, SegmentIndex
from holdfast.protocol.topics.names import has_wildcard, matches

TOPICS_MAX: Final = 512
"""The most matching topics of a segment. With more, all its batches are taken."""
POSTINGS_MAX: Final = 20_000
"""The most messages of those topics. With more, most batches have one."""
SEGMENTS_KNOWN_MAX: Final = 64
"""The most finished segments whose result is kept."""
TOPICS_BETWEEN_PAUSES: Final = 200
"""The topics that are compared between two pauses."""


class TopicChoice:
    """The topics that match one of the MQTT filters, or begin with one of the prefixes. One thread
    at a time uses it. It remembers its results for finished segments."""

    def __init__(
        self, filters: Sequence[str], prefixes: Sequence[str], pause: Callable[[], object]
    ) -> None:
        """Chooses by these filters and prefixes. `pause` is called every few hundred microseconds,
        to let other threads run."""
        self.exact = [each.encode() for each in filters if not has_wildcard(each)]
        self.wild = [each for each in filters if has_wildcard(each)]
        self.prefixes = [each.encode() for each in prefixes]
        self._pause = pause
        self._cache: OrderedDict[tuple[int, int], list[int] | None] = OrderedDict()

    def batches(self, segment: Segment, index: SegmentIndex) -> list[int] | None:
        """The numbers of the batches with such topics, ascending; None if selecting them costs too
        much."""
        if segment.index is not None:
            return self.find(index)  # it still grows
        # With the size, because compaction rewrites a segment under the same sequence.
        key = (segment.sequence, segment.size_bytes)
        if key not in self._cache:
            self._cache[key] = self.find(index)
            if len(self._cache) > SEGMENTS_KNOWN_MAX:
                self._cache.popitem(last=False)
        return self._cache[key]

    def find(self, index: SegmentIndex) -> list[int] | None:
        """The same for an index that the caller has, without remembering it."""
        topics = self._topics(index)
        if topics is None:
            return None
        total = 0
        found: set[int] = set()
        for topic in topics:
            self._pause()
            postings = index.postings(topic)
            total += len(postings)
            if total > POSTINGS_MAX:
                return None
            found.update(posting >> INDEX_BITS for posting in postings)
        return sorted(found)

    def _topics(self, index: SegmentIndex) -> set[int] | None:
        """The numbers of the matching topics; None if there are too many."""
        found = {number for topic in self.exact if (number := index.find_topic(topic)) >= 0}
        for prefix in self.prefixes:
            for number in self._range(index, prefix):
                if index.topic(number).startswith(prefix):
                    found.add(number)
                    if len(found) > TOPICS_MAX:
                        return None
        for each in self.wild:
            for number in self._range(index, literal_prefix(each)):
                if matches(each, index.topic(number).decode("utf-8", "replace")):
                    found.add(number)
                    if len(found) > TOPICS_MAX:
                        return None
        return found

    def _range(self, index: SegmentIndex, prefix: bytes) -> Iterator[int]:
        """The topics that may begin with the prefix, with pauses."""
        start, end = index.topic_range(prefix)
        for number in range(start, end):
            if number % TOPICS_BETWEEN_PAUSES == 0:
                self._pause()
            yield number


def literal_prefix(filter: str) -> bytes:
    """The common beginning of all topics that the filter matches."""
    end = len(filter)
    plus = filter.find("+")
    if plus >= 0:
        end = plus
    elif filter.endswith("#"):
        end -= 2  # `a/#` matches `a` too
    return filter[: max(0, end)].encode()

"""Topics that have a retained message, found by name or, page by page, by filter.

All topics are in one sorted sequence, which is a trie without its nodes: the topics below `a/` are
one range of it, and binary search skips a subtree. A topic costs a slot in a dict and one in a
list. A scan remembers only the string at which it continues. So no change between two of its pages
can confuse it, and an abandoned scan costs nothing.

Order is plain string order, in which `a-b` comes between `a` and `a/b`: the topics below `a` are
one range, but `a` itself is not beside them.
"""

from bisect import bisect_left, insort
from typing import Final, Generic, TypeVar

from holdfast.protocol.topics.names import has_wildcard

CHUNK_TOPICS_MAX: Final = 1024
"""The most topics of a chunk; a larger one is split."""
_CHUNK_TOPICS_MIN: Final = 256
_AHEAD_MAX: Final = 64
VISITS_PER_RESULT: Final = 4
"""The most topics that a page visits for each topic that it may return."""
_VISIT_BITS: Final = 6
"""The shift from the characters of a topic to its extra visits. Each 64 characters cost one,
because the topic is split, joined and compared."""
# The character after "/". So p + _AFTER_SLASH is the first string after all below p + "/".
_AFTER_SLASH: Final = "0"
# The first string after all that begin with "$".
_AFTER_DOLLAR: Final = "%"
# s + _NEXT is the first string after s; no topic contains U+0000.
_NEXT: Final = "\0"


T = TypeVar("T")


class RetainedTrie(Generic[T]):
    """The entries of all topics with a retained message.

    Invariant: the chunks, joined, are the keys of `entries` in string order.
    """

    def __init__(self) -> None:
        # topic -> entry; read only, for scans
        self.entries: dict[str, T] = {}
        # The same topics, sorted, cut into chunks so that an insertion moves few of them.
        self._chunks: list[list[str]] = []
        # The last topic of each chunk.
        self._lasts: list[str] = []

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, topic: str) -> T | None:
        """The entry of a topic, or None."""
        return self.entries.get(topic)

    def set(self, topic: str, entry: T) -> None:
        """Adds or replaces the entry of a topic."""
        if topic not in self.entries:
            self._insert(topic)
        self.entries[topic] = entry

    def remove(self, topic: str) -> T | None:
        """Removes the entry of a topic and returns it, or None."""
        entry = self.entries.pop(topic, None)
        if entry is not None:
            self._cut(topic)
        return entry

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        topics = [topic for chunk in self._chunks for topic in chunk]
        assert topics == sorted(self.entries), "the chunks are not the topics in order"
        assert self._lasts == [chunk[-1] for chunk in self._chunks], "the ends of the chunks"

    def scan(self, filter: str, after: str = "") -> "RetainedScan[T]":
        """All entries whose topic a valid plain filter matches. With wildcards, only topics behind
        `after`."""
        return RetainedScan(self, filter, False, after)

    def scan_all(self) -> "RetainedScan[T]":
        """All entries, also those of `$` topics."""
        return RetainedScan(self, "#", True, "")

    def page(self, seek: str, count: int) -> list[str]:
        """Up to `count` topics in order, from the first that is not less than `seek`.

        A page may be short although there are more topics; only an empty one is the end.
        """
        index = bisect_left(self._lasts, seek)
        if index == len(self._lasts):
            return []
        chunk = self._chunks[index]
        start = bisect_left(chunk, seek)
        return chunk[start : start + count]

    def _insert(self, topic: str) -> None:
        lasts = self._lasts
        if not lasts:
            lasts.append(topic)
            self._chunks.append([topic])
            return
        index = bisect_left(lasts, topic)
        if index == len(lasts):
            index -= 1
            lasts[index] = topic
        chunk = self._chunks[index]
        insort(chunk, topic)
        if len(chunk) > CHUNK_TOPICS_MAX:
            half = len(chunk) // 2
            self._chunks.insert(index, chunk[:half])
            lasts.insert(index, chunk[half - 1])
            del chunk[:half]

    def _cut(self, topic: str) -> None:
        lasts = self._lasts
        chunks = self._chunks
        index = bisect_left(lasts, topic)
        chunk = chunks[index]
        del chunk[bisect_left(chunk, topic)]
        if not chunk:
            del chunks[index]
            del lasts[index]
            return
        lasts[index] = chunk[-1]
        # Small neighbours are merged. Otherwise a store that shrinks to one topic per chunk would
        # keep all its chunks.
        if len(chunk) < _CHUNK_TOPICS_MIN and index > 0:
            before = chunks[index - 1]
            if len(before) < _CHUNK_TOPICS_MIN:
                before.extend(chunk)
                lasts[index - 1] = before[-1]
                del chunks[index]
                del lasts[index]


class RetainedScan(Generic[T]):
    """The matches of a filter in string order, page by page, each topic at most once.

    A change between pages at a topic that the scan has passed is not returned. A topic that stays
    set through the whole scan is.
    """

    def __init__(
        self, retained: RetainedTrie[T], filter: str, with_dollar: bool, after: str
    ) -> None:
        self.done = False
        # The cost of the last page in visits. A visit of a long topic counts for more than one.
        self.visits = 0
        self._retained = retained
        self._filter = filter
        self._levels = filter.split("/")
        # The scan has passed the topics below this.
        self._seek = max("/".join(_literal_levels(self._levels)), after + _NEXT if after else "")
        # [MQTT-4.7.2-1]
        self._skips_dollar = not with_dollar and self._levels[0] in ("+", "#")

    def next(self, limit: int, visits_max: int = 0) -> list[tuple[str, T]]:
        """At most `limit` (> 0) further matches.

        An empty page is the end only when `done` is set: a page also ends after `visits_max` visits
        of topics (0: VISITS_PER_RESULT * limit).
        """
        found: list[tuple[str, T]] = []
        self.visits = 1
        if self.done:
            return found
        entries = self._retained.entries
        if not has_wildcard(self._filter):
            self.done = True
            if self._filter in entries:
                found.append((self._filter, entries[self._filter]))
            return found
        visits_max = visits_max or VISITS_PER_RESULT * limit
        visits = visits_max
        # Topics fetched at once: one while the scan jumps, more while topics match.
        ahead = 1
        while visits > 0 and not self.done and len(found) < limit:
            topics = self._retained.page(self._seek, min(ahead, visits, limit - len(found)))
            ahead = min(2 * ahead, _AHEAD_MAX)
            if not topics:
                self.done = True
            for topic in topics:
                visits -= 1 + (len(topic) >> _VISIT_BITS)
                seek = self._next_candidate(topic)
                if seek == topic:
                    found.append((topic, entries[topic]))
                    self._seek = topic + _NEXT
                    continue
                if seek is None:
                    self.done = True
                else:
                    self._seek = seek
                ahead = 1
                break
        self.visits = max(1, visits_max - visits)
        return found

    def _next_candidate(self, topic: str) -> str | None:
        """The first string not before `topic` that may match. It is `topic` itself if it matches,
        and None if no further one can."""
        if self._skips_dollar and topic.startswith("$"):
            return _AFTER_DOLLAR
        levels = topic.split("/")
        count = len(levels)
        plus = -1
        index = 0
        for level in self._levels:
            if level == "#":
                return topic
            if index == count:
                return topic + _NEXT
            if level == "+":
                plus = index
            elif level != levels[index]:
                return self._after_mismatch(topic, levels, index, plus)
            index += 1
        if index == count:
            return topic
        return "/".join(levels[:index]) + _AFTER_SLASH

    def _after_mismatch(self, topic: str, levels: list[str], index: int, plus: int) -> str | None:
        """The next string that may match after a mismatch. `index`: the first level that differs
        from a literal one of the filter; `plus`: the last "+" before it, or -1."""
        target = "/".join([*levels[:index], self._levels[index]])
        if topic < target:
            return target
        # Strings between `a` and `a/` (`a-b`, for example) separate them.
        if index + 1 < len(self._levels) and topic < target + "/":
            return target + "/"
        if plus < 0:
            return None
        return "/".join(levels[: plus + 1]) + _AFTER_SLASH


def _literal_levels(levels: list[str]) -> list[str]:
    """The levels before the first wildcard."""
    for index in range(len(levels)):
        if levels[index] in ("+", "#"):
            return levels[:index]
    return levels

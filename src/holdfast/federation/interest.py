"""Which filters this member's clients have, and which members want a topic.

Filters are plain ones, counted: a filter is announced with its first subscriber and withdrawn with
its last. Of more than `filters_max`, what is announced is cut to fewer levels, with `#` below: then
too much comes, and the member drops what nobody wants.
"""

from collections.abc import Iterable
from typing import Final

from holdfast.federation.frames import CHUNKS_MAX, FILTERS_MAX
from holdfast.topics.trie import SubscriptionTrie

ANNOUNCED_MAX: Final = FILTERS_MAX * CHUNKS_MAX
MEMO_TOPICS_MAX: Final = 16_384


def may_leave(topic: str) -> bool:
    """Topics of the broker itself and of federators stay where they are."""
    return not topic.startswith("$") and topic != "federator" and not topic.startswith("federator/")


def generalised(filters: Iterable[str], filters_max: int) -> set[str]:
    """At most `filters_max` (>= 1) filters that match all that `filters` match, `$` topics aside.

    All are cut at the same level, the deepest that gives few enough.
    """
    all = set(filters)
    if len(all) <= filters_max:
        return all
    split = [filter.split("/") for filter in all]
    for depth in range(max(len(levels) for levels in split) - 1, 0, -1):
        cut = {
            "/".join(levels) if len(levels) <= depth else "/".join([*levels[:depth], "#"])
            for levels in split
        }
        if len(cut) <= filters_max:
            return cut
    return {"#"}


class LocalInterest:
    def __init__(self, filters_max: int = ANNOUNCED_MAX) -> None:
        self._filters_max = min(filters_max, ANNOUNCED_MAX)
        self._counts: dict[str, int] = {}
        self._trie = SubscriptionTrie()

    def __len__(self) -> int:
        return len(self._counts)

    def change(self, added: Iterable[str], removed: Iterable[str]) -> bool:
        """Did the set of filters change? Raises KeyError for a removed filter nobody has."""
        version = self._trie.version
        for filter in added:
            self._counts[filter] = self._counts.get(filter, 0) + 1
            if self._counts[filter] == 1:
                self._trie.add(filter, None, True)
        for filter in removed:
            self._counts[filter] -= 1
            if not self._counts[filter]:
                del self._counts[filter]
                self._trie.remove(filter, None)
        return self._trie.version != version

    def announced(self) -> set[str]:
        return generalised(self._counts, self._filters_max)

    def wants(self, topic: str) -> bool:
        return bool(self._trie.match(topic))


class RemoteInterest:
    """Of all other members."""

    def __init__(self) -> None:
        self._trie = SubscriptionTrie()
        self._memo: dict[str, tuple[bytes, ...]] = {}
        self._memo_version = 0

    def change(self, node: bytes, added: Iterable[str], removed: Iterable[str]) -> None:
        for filter in removed:
            self._trie.remove(filter, node)
        for filter in added:
            self._trie.add(filter, node, node)

    def members(self, topic: str) -> tuple[bytes, ...]:
        """Who wants it, in order of ids."""
        trie = self._trie
        if self._memo_version != trie.version or len(self._memo) >= MEMO_TOPICS_MAX:
            self._memo.clear()
            self._memo_version = trie.version
        found = self._memo.get(topic)
        if found is None:
            nodes = {node for node in trie.match(topic) if isinstance(node, bytes)}
            found = tuple(sorted(nodes))
            self._memo[topic] = found
        return found

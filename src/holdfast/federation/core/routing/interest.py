"""Which filters this member's clients have, and which members want a topic.

Filters are counted: one is announced with its first subscriber and withdrawn with its last, that of
a shared subscription with its group, as `$share/group/filter`. Of more than `filters_max`, what is
announced is cut to fewer levels, with `#` below: then too much comes, and the member drops what
nobody wants.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.federation.core.frames import CHUNKS_MAX, FILTERS_MAX
from holdfast.protocol.topics.names import is_shared, split_shared
from holdfast.protocol.topics.trie import SubscriptionTrie

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
        # Values: the filter as it is subscribed to, with its group.
        self._trie = SubscriptionTrie()

    def __len__(self) -> int:
        return len(self._counts)

    def change(self, added: Iterable[str], removed: Iterable[str]) -> bool:
        """Did the set of filters change? Raises KeyError for a removed filter nobody has."""
        version = self._trie.version
        for filter in added:
            self._counts[filter] = self._counts.get(filter, 0) + 1
            if self._counts[filter] == 1:
                self._trie.add(plain_of(filter), filter, filter)
        for filter in removed:
            self._counts[filter] -= 1
            if not self._counts[filter]:
                del self._counts[filter]
                self._trie.remove(plain_of(filter), filter)
        return self._trie.version != version

    def announced(self) -> set[str]:
        if self.announces_groups():
            return set(self._counts)
        return generalised(map(plain_of, self._counts), self._filters_max)

    def matches(self, topic: str) -> bool:
        return bool(self._trie.match(topic))

    def has(self, filter: str) -> bool:
        return filter in self._counts

    def announces_groups(self) -> bool:
        """Where there are too many filters to announce them all, groups are taken for plain
        subscribers, so a group gets messages at several members."""
        return len(self._counts) <= self._filters_max


class TopicInterest(NamedTuple):
    """A topic."""

    members: tuple[bytes, ...]
    """With plain subscribers, in order of ids."""
    groups: dict[str, tuple[bytes, ...]]
    """Group and filter, and the members that have the group, in order of ids."""


class RemoteInterest:
    """Of all members, by what they announce."""

    def __init__(self) -> None:
        # Keys: (member, group), values: (member, filter with its group, or None).
        self._trie = SubscriptionTrie()
        self._memo: dict[str, TopicInterest] = {}
        self._memo_version = 0

    @property
    def version(self) -> int:
        return self._trie.version

    def change(self, node: bytes, added: Iterable[str], removed: Iterable[str]) -> None:
        for filter in removed:
            self._trie.remove(plain_of(filter), (node, filter))
        for filter in added:
            share = filter if is_shared(filter) else None
            self._trie.add(plain_of(filter), (node, filter), (node, share))

    def wanting(self, topic: str) -> TopicInterest:
        trie = self._trie
        if self._memo_version != trie.version or len(self._memo) >= MEMO_TOPICS_MAX:
            self._memo.clear()
            self._memo_version = trie.version
        found = self._memo.get(topic)
        if found is None:
            found = self._find_topic(topic)
            self._memo[topic] = found
        return found

    def members(self, topic: str) -> tuple[bytes, ...]:
        """Who wants it, groups aside, in order of ids."""
        return self.wanting(topic).members

    def _find_topic(self, topic: str) -> TopicInterest:
        plain: set[bytes] = set()
        shares: dict[str, set[bytes]] = {}
        for value in self._trie.match(topic):
            assert isinstance(value, tuple)
            node, share = value
            if share is None:
                plain.add(node)
            else:
                shares.setdefault(share, set()).add(node)
        return TopicInterest(
            tuple(sorted(plain)),
            {share: tuple(sorted(nodes)) for share, nodes in sorted(shares.items())},
        )


def plain_of(filter: str) -> str:
    return split_shared(filter)[1] if is_shared(filter) else filter

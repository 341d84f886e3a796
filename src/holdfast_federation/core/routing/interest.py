"""Counts the filters of this member's clients, and finds the members interested in a topic.

Filters are counted. One is announced with its first subscriber and withdrawn with its last. That of
a shared subscription is announced with its group, as `$share/group/filter`. More than `filters_max`
filters are announced with fewer levels and `#` below. Then too many messages arrive, and the member
drops those without a subscriber.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.protocol.topics.names import is_shared, split_shared
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast_federation.core.frames import CHUNKS_MAX, FILTERS_MAX

ANNOUNCED_MAX: Final = FILTERS_MAX * CHUNKS_MAX
"""The most filters that a member announces."""
MEMO_TOPICS_MAX: Final = 16_384
"""The most topics whose interested members are kept."""


def may_leave(topic: str) -> bool:
    """True if messages of the topic may leave this member. Topics of the broker and of federators
    may not."""
    return not topic.startswith("$") and topic != "federator" and not topic.startswith("federator/")


def generalised(filters: Iterable[str], filters_max: int) -> set[str]:
    """Returns at most `filters_max` (>= 1) filters that match everything that `filters` match,
    except topics that begin with `$`.

    All are cut at the same level, the deepest one that gives few enough.
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
    """The filters of this member's clients, each with the number of its subscribers."""

    def __init__(self, filters_max: int = ANNOUNCED_MAX) -> None:
        self._filters_max = min(filters_max, ANNOUNCED_MAX)
        self._counts: dict[str, int] = {}
        # Values: the filter as it is subscribed to, with its group.
        self._trie = SubscriptionTrie()

    def __len__(self) -> int:
        return len(self._counts)

    def change(self, added: Iterable[str], removed: Iterable[str]) -> bool:
        """Counts added and removed filters. Returns True if the set of filters has changed. Raises
        KeyError for a removed filter without a subscriber."""
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
        """Returns the filters to announce."""
        if self.announces_groups():
            return set(self._counts)
        return generalised(map(plain_of, self._counts), self._filters_max)

    def matches(self, topic: str) -> bool:
        return bool(self._trie.match(topic))

    def has(self, filter: str) -> bool:
        return filter in self._counts

    def announces_groups(self) -> bool:
        """True if groups are announced as such. With too many filters they count as plain
        subscribers, so a group gets its messages at several members."""
        return len(self._counts) <= self._filters_max


class TopicInterest(NamedTuple):
    """The members that are interested in a topic."""

    members: tuple[bytes, ...]
    """The members with plain subscribers, in order of ids."""
    groups: dict[str, tuple[bytes, ...]]
    """By group and filter, the members that have the group, in order of ids."""


class RemoteInterest:
    """The filters of all members as they announce them.

    A filter is young until the driver reports that it is remembered. The driver stores the memory
    no later than a message of a topic that a young filter matches, and hands that message over as
    not repeatable.
    """

    def __init__(self) -> None:
        # Keys: (member, group), values: (member, filter with its group, or None).
        self._trie = SubscriptionTrie()
        self._memo: dict[str, TopicInterest] = {}
        self._memo_version = 0
        # The filters that a member has added and that are not remembered, with the version after.
        self._young: dict[str, int] = {}
        self._young_trie = SubscriptionTrie()

    @property
    def version(self) -> int:
        return self._trie.version

    def change(self, node: bytes, added: Iterable[str], removed: Iterable[str]) -> None:
        for filter in removed:
            self._trie.remove(plain_of(filter), (node, filter))
        for filter in added:
            plain, share = plain_of(filter), filter if is_shared(filter) else None
            self._trie.add(plain, (node, filter), (node, share))
            self._young_trie.add(plain, plain, None)
            self._young[plain] = self._trie.version

    def remembered(self, version: int) -> None:
        """Notes that a crash leaves all interest up to a version."""
        for plain in [each for each, since in self._young.items() if since <= version]:
            del self._young[plain]
            self._young_trie.remove(plain, plain)

    def is_young(self, topic: str) -> bool:
        """True if a member is interested in the topic by a filter that a crash may take."""
        return bool(self._young) and bool(self._young_trie.match(topic))

    def wanting(self, topic: str) -> TopicInterest:
        """Returns the members that are interested in a topic."""
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
        """Returns the members with plain subscribers of a topic, in order of ids."""
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
    """Returns the filter without its group."""
    return split_shared(filter)[1] if is_shared(filter) else filter

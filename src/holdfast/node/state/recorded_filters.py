"""Filters of all recorded sessions, connected or away."""

from collections import Counter
from collections.abc import Iterable

from holdfast.node.session.session import Session
from holdfast.protocol.topics.names import has_wildcard, is_shared
from holdfast.protocol.topics.trie import SubscriptionTrie


class RecordedFilters:
    """The filters that sessions have, shared ones left out. Each costs one entry."""

    def __init__(self) -> None:
        # The number of sessions with each filter. Those with wildcards are also in the trie.
        self._counts: dict[str, int] = {}
        self._wildcards = SubscriptionTrie()

    def change(self, filter: str, sessions: int) -> None:
        """Notes that so many sessions more, or fewer, have the filter."""
        if is_shared(filter):
            return
        count = self._counts.pop(filter, 0) + sessions
        if count:
            self._counts[filter] = count
        if has_wildcard(filter) and count:
            self._wildcards.add(filter, None, count)
        elif has_wildcard(filter):
            self._wildcards.remove(filter, None)

    def match(self, topic: str) -> bool:
        """Whether a session has a filter that matches."""
        return topic in self._counts or len(self._wildcards.match(topic)) > 0

    def check(self, sessions: Iterable[Session]) -> None:
        """Raises `AssertionError` unless these are the recorded sessions."""
        plain = [each for one in sessions for each in one.subscriptions if not is_shared(each)]
        assert self._counts == Counter(plain), "the filters of the recorded sessions"
        assert len(self._wildcards) == sum(map(has_wildcard, self._counts)), "those in the trie"

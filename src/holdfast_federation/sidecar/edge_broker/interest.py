"""Counts the subscriptions of a broker's clients by filter.

The federation learns of a filter with the first session that has it, and of its end with the last.
Every report of a beginning is followed by exactly one of the end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from holdfast.protocol.topics.names import is_shared, split_shared
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast_federation.sidecar.edge_mqtt.subscriptions import within


class BrokerInterest:
    """The number of sessions per filter, and the changes not reported yet."""

    def __init__(self, import_filters: Sequence[str], ends: Callable[[], list[int]]) -> None:
        """`ends`: returns the end of each partition now."""
        self._imports = import_filters
        self._ends = ends
        # Shared filters by what they match, with the ends when the first session got one. None: it
        # is older than this interest.
        self._groups = SubscriptionTrie()
        self._begun: dict[str, list[int]] = {}
        self._sessions: Counter[str] = Counter()
        # Filters whose count reached or left 0 since the last report; then those reported as
        # wanted.
        self._changed: set[str] = set()
        self._reported: set[str] = set()

    def __len__(self) -> int:
        return len(self._reported)

    def load(self, filters: Iterable[str]) -> None:
        """Counts the filters of a session that exists at the start."""
        for filter in filters:
            self.note(filter, True)
            self._begun.pop(filter, None)

    def note(self, filter: str, has_begun: bool) -> bool:
        """Counts a session's new or ended filter. Returns whether there is a change to report."""
        count = self._sessions[filter] + (1 if has_begun else -1)
        assert count >= 0, f"{filter!r} ended and had not begun"
        if count:
            self._sessions[filter] = count
        else:
            del self._sessions[filter]
        if count == (1 if has_begun else 0):
            self._changed.add(filter)
            if is_shared(filter):
                self._note_group(filter, has_begun)
            return True
        return False

    def _note_group(self, filter: str, has_begun: bool) -> None:
        inner = split_shared(filter)[1]
        if has_begun:
            self._groups.add(inner, filter, filter)
            self._begun[filter] = self._ends()
        else:
            self._groups.remove(inner, filter)
            self._begun.pop(filter, None)

    def groups(self, topic: str) -> list[str]:
        """Returns the keys of the groups at any node that want the topic."""
        return sorted(str(key) for key in self._groups.match(topic))

    def is_younger(self, group: str, partition: int, offset: int) -> bool:
        """Returns whether the group was seen to begin after the record."""
        begun = self._begun.get(group)
        return begun is not None and offset < begun[partition]

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Returns the filters that began and ended since the last call, limited to allowed ones."""
        changed, self._changed = self._changed, set()
        added = [one for one in changed if one in self._sessions and one not in self._reported]
        removed = [one for one in changed if one not in self._sessions and one in self._reported]
        self._reported.update(added)
        self._reported.difference_update(removed)
        return self._importable(added), self._importable(removed)

    def _importable(self, filters: list[str]) -> list[str]:
        """Applies the import filters. Equal input gives equal output, so begin and end match."""
        return [one for filter in filters for one in importable(filter, self._imports)]


def importable(filter: str, import_filters: Sequence[str]) -> list[str]:
    """Returns the part of a filter, shared or not, that the import filters admit, in order.

    If they admit only a part of a shared group's filter, the part gets another group name.
    Otherwise it would be merged with a group of that name elsewhere that has the part as its whole
    filter.
    """
    if not is_shared(filter):
        return sorted(within([filter], import_filters))
    group, plain = split_shared(filter)
    part = f"{group}~{blake2b(plain.encode(), digest_size=6).hexdigest()}"
    return [
        f"$share/{group if one == plain else part}/{one}"
        for one in sorted(within([plain], import_filters))
    ]

"""The subscriptions of a broker's clients, counted by filter.

The federation learns of a filter with the first session that has it, and of its end with the last.
Every report of a beginning is followed by exactly one of the end.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from holdfast.federation.sidecar.edge_mqtt.subscription_set import within
from holdfast.protocol.topics.names import is_shared, split_shared


class BrokerInterest:
    """The number of sessions per filter, and the changes not reported yet."""

    def __init__(self, import_filters: Sequence[str]) -> None:
        self._imports = import_filters
        self._sessions: Counter[str] = Counter()
        # Filters whose count reached or left 0 since the last report; then those reported as
        # wanted.
        self._changed: set[str] = set()
        self._reported: set[str] = set()

    def __len__(self) -> int:
        return len(self._reported)

    def load(self, filters: Iterable[str]) -> None:
        """Count the filters of a session that exists at the start."""
        for filter in filters:
            self.note(filter, True)

    def note(self, filter: str, has_begun: bool) -> bool:
        """Count a session's new or ended filter. Returns whether there is a change to report."""
        count = self._sessions[filter] + (1 if has_begun else -1)
        assert count >= 0, f"{filter!r} ended and had not begun"
        if count:
            self._sessions[filter] = count
        else:
            del self._sessions[filter]
        if count == (1 if has_begun else 0):
            self._changed.add(filter)
            return True
        return False

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Return the filters that began and ended since the last call, limited to allowed ones."""
        changed, self._changed = self._changed, set()
        added = [one for one in changed if one in self._sessions and one not in self._reported]
        removed = [one for one in changed if one not in self._sessions and one in self._reported]
        self._reported.update(added)
        self._reported.difference_update(removed)
        return self._importable(added), self._importable(removed)

    def _importable(self, filters: list[str]) -> list[str]:
        """Apply the import filters. Equal input gives equal output, so begin and end match."""
        return [one for filter in filters for one in importable(filter, self._imports)]


def importable(filter: str, import_filters: Sequence[str]) -> list[str]:
    """Return the part of a filter, shared or not, that the import filters admit, in order.

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

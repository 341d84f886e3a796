"""What the clients of a broker want, counted filter by filter.

The federation is told of a filter with the first session that has it and with the last that had
it, each as often as the other.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from holdfast.federation.sidecar.edge_mqtt.subscription_set import within
from holdfast.protocol.topics.names import is_shared, split_shared


class BrokerInterest:
    def __init__(self, import_filters: Sequence[str]) -> None:
        self._imports = import_filters
        self._sessions: Counter[str] = Counter()
        # Those whose count has become 0 or has been 0, and those the federation was told.
        self._changed: set[str] = set()
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._told)

    def begin(self, filters: Iterable[str]) -> None:
        """Of a session that there is already."""
        for filter in filters:
            self.note(filter, True)

    def note(self, filter: str, has_begun: bool) -> bool:
        """A session has it, or has it no more. Is there something to tell?"""
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
        """Filters that began and ended since the last call, as far as they may come in."""
        changed, self._changed = self._changed, set()
        added = [one for one in changed if one in self._sessions and one not in self._told]
        removed = [one for one in changed if one not in self._sessions and one in self._told]
        self._told.update(added)
        self._told.difference_update(removed)
        return self._importable(added), self._importable(removed)

    def _importable(self, filters: list[str]) -> list[str]:
        """The same each time."""
        return [one for filter in filters for one in importable(filter, self._imports)]


def importable(filter: str, import_filters: Sequence[str]) -> list[str]:
    """What of a filter, shared or not, may come in, in order. A group of which that is a part gets
    a name of its own: another one of that name may have just this filter."""
    if not is_shared(filter):
        return sorted(within([filter], import_filters))
    group, plain = split_shared(filter)
    part = f"{group}~{blake2b(plain.encode(), digest_size=6).hexdigest()}"
    return [
        f"$share/{group if one == plain else part}/{one}"
        for one in sorted(within([plain], import_filters))
    ]

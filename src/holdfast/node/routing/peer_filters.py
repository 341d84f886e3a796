"""Applies the filters that the peers of this node announce.

A peer may have hundreds of thousands of filters, so a change is applied in slices. The changes of
one peer are applied in order, those of several peers in turn.

Invariant: a change is acknowledged once all of it is applied, over the link that brought it.
Counter-example: the peer restarts, and its filters get numbers from 1 again. An acknowledgement of
the number 1000 of the process before covers filters that it has not announced yet.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.node.node_state import NodeState, Work
from holdfast.node.routing.interest_frames import Interest
from holdfast.protocol.topics.names import is_shared, split_shared
from holdfast.protocol.topics.trie import SubscriptionTrie

FILTERS_PER_STEP: Final = 4
"""The filters that are added or removed in one step of a large job. One takes about 1 µs."""


class _Change:
    """A change of a peer's filters, and how much of it is applied. `number`: -1 if the link is
    lost, which is not acknowledged."""

    def __init__(self, node: str, interest: Interest) -> None:
        self.node = node
        self.number = interest.number
        self.is_whole = interest.whole
        self.removed = [] if interest.whole else interest.removed
        self.added = interest.added
        # The part of `removed` and then of `added` that is applied.
        self.at = 0
        self.named: set[str] = set()


class PeerFilters(Work):
    """The filters of each peer, and the shared ones of this node, found by topic."""

    def __init__(
        self,
        state: NodeState,
        acknowledge: Callable[[str, int], None],
        changed: Callable[[list[str]], None],
    ) -> None:
        """`acknowledge(node, number)`: a change is applied. `changed`: receives the plain filters
        of each slice."""
        super().__init__()
        self._state = state
        self._acknowledge = acknowledge
        self._changed = changed
        # Plain filters, with the node as key and value.
        self.plain: SubscriptionTrie = SubscriptionTrie()
        # Filters of shared subscriptions: (whole filter, node).
        self.groups: SubscriptionTrie = SubscriptionTrie()
        self._of_peer: dict[str, set[str]] = {}
        # Called with a filter of a peer that begins (True) or ends.
        self.watch: Callable[[str, bool], None] | None = None
        # Per peer, in order.
        self._changes: dict[str, deque[_Change]] = {}

    def connected(self, node: str) -> None:
        """Drops the changes that came over the link before: the new link brings all filters."""
        changes = self._changes.get(node)
        while changes and changes[-1].number >= 0:
            changes.pop()

    def is_applying(self, node: str) -> bool:
        """Whether changes of a node wait."""
        return node in self._changes

    def disconnected(self, node: str) -> None:
        """Removes all filters of a node."""
        self.connected(node)
        if self._of_peer.get(node):
            self._add(_Change(node, Interest(-1, True, [], [])))

    def change(self, node: str, interest: Interest) -> None:
        """Changes the filters of a node. Raises InvalidFilter when one is malformed."""
        for filter in interest.added:
            if is_shared(filter):
                split_shared(filter)
        self._add(_Change(node, interest))

    def _add(self, change: _Change) -> None:
        node = change.node
        changes = self._changes.setdefault(node, deque())
        changes.append(change)
        if len(changes) == 1:
            self._apply(node, self._state.steps_at_once * FILTERS_PER_STEP)
        self.has_more = bool(self._changes)
        if self.has_more:
            self._state.start_work(self)

    def step(self, state: NodeState, steps: int) -> int:
        """Applies some of the changes of one peer. The next slice is another peer's."""
        done = 0
        if self._changes:
            node = next(iter(self._changes))
            self._changes[node] = self._changes.pop(node)
            done = self._apply(node, steps * FILTERS_PER_STEP)
        self.has_more = bool(self._changes)
        return done // FILTERS_PER_STEP + 1

    def _apply(self, node: str, count_max: int) -> int:
        """Applies about `count_max` changed filters of a peer. Returns their number."""
        changes = self._changes[node]
        known = self._of_peer.setdefault(node, set())
        done = 0
        changed: list[str] = []
        while changes and done <= count_max:
            change = changes[0]
            done += 1 + self._apply_some(change, known, count_max - done, changed)
            if change.at < len(change.removed) + len(change.added):
                break
            if change.is_whole:
                # What the announcement lacks is removed after the rest of it was added.
                change.is_whole = False
                change.removed = list(known)
                change.added = []
                change.at = 0
                continue
            changes.popleft()
            if change.number >= 0:
                self._acknowledge(node, change.number)
        if not changes:
            del self._changes[node]
        if not known:
            del self._of_peer[node]
        if changed:
            self._changed(changed)
        return done

    def _apply_some(
        self, change: _Change, known: set[str], count_max: int, changed: list[str]
    ) -> int:
        node = change.node
        begin = change.at
        removals = len(change.removed)
        end = min(begin + max(0, count_max), removals + len(change.added))
        for index in range(begin, end):
            if index < removals:
                filter = change.removed[index]
                if filter in known and filter not in change.named:
                    known.discard(filter)
                    changed.append(self._learn_of_peer(filter, node, False))
                continue
            filter = change.added[index - removals]
            if change.is_whole:
                change.named.add(filter)
            if filter not in known:
                changed.append(self._learn_of_peer(filter, node, True))
                known.add(filter)
        change.at = end
        return end - begin

    def of_peers(self) -> list[str]:
        """The filters of all peers, each once for each of them."""
        return [filter for known in self._of_peer.values() for filter in known]

    def _learn_of_peer(self, filter: str, node: str, wanted: bool) -> str:
        if self.watch is not None:
            self.watch(filter, wanted)
        return self.learn(filter, node, wanted)

    def learn(self, filter: str, node: str, wanted: bool) -> str:
        """Adds or removes a filter of a node. Returns the plain filter."""
        if is_shared(filter):
            _, inner = split_shared(filter)
            if wanted:
                self.groups.add(inner, (filter, node), (filter, node))
            else:
                self.groups.remove(inner, (filter, node))
            return inner
        if wanted:
            self.plain.add(filter, node, node)
        else:
            self.plain.remove(filter, node)
        return filter

"""Reclaims assigned records from nodes that are down.

A QoS 2 record that a session there has kept stays with the session. The replicated state shows it
when two conditions are met:
- Everything committed is applied here (Barriers).
- The sessions of that node are closed. Until then cursor records of the node may still be
  committed, and count (`state.replicated`).

Counter-example: the record is assigned to n2 at once, and then a cursor record of n1 is committed.
Two sessions in the log have the QoS 2 record now.

A node that is connected again reports for itself.
"""

from collections.abc import Callable
from typing import Final

from holdfast.node.context import NEVER
from holdfast.node.groups.control_frames import Place
from holdfast.node.groups.group_state import Coordination
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.state.groups import GroupPositions

LOOK_AGAIN_S: Final = 0.02
"""The interval in seconds between checks while sessions at a node that is down are not closed."""


class Reclaimer:
    """The records of nodes that are down, until it is known which sessions have kept them.

    Invariant: a reclaimed record is assigned again only when no session in the log keeps it.
    """

    def __init__(
        self,
        replicated: GroupPositions,
        barriers: Barriers,
        has_told: Callable[[Coordination, str], bool],
    ) -> None:
        """`has_told(group, node)`: the node has reported, and has not been down since."""
        self._replicated = replicated
        self._barriers = barriers
        self._has_reported = has_told
        self._pending: set[int] = set()
        self._doubtful: dict[Coordination, None] = {}
        self._review_at = 0.0

    def reclaim(self, lost: dict[Coordination, list[Place]], node: str) -> None:
        """Reclaims the records `lost` from a node that is down or has reported without them."""
        if not any(lost.values()):
            return
        barrier = self._barriers.begin()
        self._pending.add(barrier)
        for coordination, places in lost.items():
            if places:
                coordination.mark_doubtful(places, barrier, node)
                self._doubtful[coordination] = None

    def forget(self, coordination: Coordination) -> None:
        """Forgets a group that this node does not coordinate any more."""
        self._doubtful.pop(coordination, None)

    def may_keep_more(self, coordination: Coordination, node: str) -> bool:
        """True if the node has sessions that may have kept QoS 2 records that the log does not have
        yet."""
        is_owner = self._replicated.is_owned_at(coordination.key, node)
        return is_owner and not self._has_reported(coordination, node)

    def is_waiting(self) -> bool:
        """Whether there are doubtful records, or barriers that have to pass for some."""
        return bool(self._pending) or bool(self._doubtful)

    def review(self, now: float) -> list[Coordination]:
        """Resolves doubtful records where possible. Returns the groups that have changed."""
        passed = {each for each in self._pending if self._barriers.has_passed(each)}
        if not passed and (self._review_at > now or not self._doubtful):
            return []
        self._pending -= passed
        self._review_at = now + LOOK_AGAIN_S
        return [each for each in list(self._doubtful) if self._resolve(each)]

    def _resolve(self, coordination: Coordination) -> bool:
        known = {
            (barrier, node)
            for node, barrier in {
                each for d in coordination.holders.doubtful.values() for each in d.items()
            }
            if barrier not in self._pending and not self.may_keep_more(coordination, node)
        }
        if known:
            kept = self._replicated.kept_by_sessions(coordination.key)
            coordination.resolve_doubtful(known, kept)
        if not coordination.holders.doubtful:
            del self._doubtful[coordination]
        return len(known) > 0

    def timer(self) -> float:
        """Returns the time of the next check."""
        return self._review_at if self._doubtful and not self._pending else NEVER

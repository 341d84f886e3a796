"""What a coordinator of shared groups takes back from a lost node, until it is known who has it.

QoS 2 records that a session there has kept stay with it. They are in the images once everything
committed is applied (Barriers), and the sessions are closed: until then what the node says of them
may still come into the log, and counts (images.Images). A node that is back tells itself.
"""

from collections.abc import Callable
from typing import Final

from holdfast.cluster.reads.read_barrier import Barriers
from holdfast.cluster.shared_groups.codec import Place
from holdfast.cluster.shared_groups.group_state import Coordination
from holdfast.cluster.state.groups import GroupPositions

LOOK_AGAIN_S: Final = 0.02
"""While sessions at a lost node are not closed."""


class Reclaimer:
    def __init__(
        self,
        images: GroupPositions,
        barriers: Barriers,
        has_told: Callable[[Coordination, str], bool],
    ) -> None:
        """`has_told(group, node)`: the node has told what it has, and was not lost since."""
        self._images = images
        self._barriers = barriers
        self._has_told = has_told
        self._pending: set[int] = set()
        self._doubtful: dict[Coordination, None] = {}
        self._look_at = 0.0
        # Records.
        self.count = 0

    def take(self, lost: dict[Coordination, list[Place]], node: str) -> None:
        """`node`: that is lost; "" if it has told what it has."""
        if not any(lost.values()):
            return
        barrier = self._barriers.begin()
        self._pending.add(barrier)
        for coordination, places in lost.items():
            if places:
                coordination.doubt(places, barrier, node)
                self._doubtful[coordination] = None
                self.count += len(places)

    def forget(self, coordination: Coordination) -> None:
        self._doubtful.pop(coordination, None)

    def may_keep_more(self, coordination: Coordination, node: str) -> bool:
        """Has the node sessions that may have kept QoS 2 records without the log knowing it yet?"""
        is_owner = self._images.is_owned_at(coordination.key, node)
        return is_owner and not self._has_told(coordination, node)

    def look(self, now: float) -> list[Coordination]:
        """Groups of which more is known than before."""
        passed = {each for each in self._pending if self._barriers.has_passed(each)}
        if not passed and (self._look_at > now or not self._doubtful):
            return []
        self._pending -= passed
        self._look_at = now + LOOK_AGAIN_S
        return [each for each in list(self._doubtful) if self._settle(each)]

    def _settle(self, coordination: Coordination) -> bool:
        known = {
            (barrier, node)
            for barrier, node in set(coordination.doubtful.values())
            if barrier not in self._pending
            and not (node and self.may_keep_more(coordination, node))
        }
        if known:
            kept = self._images.kept_by_members(coordination.key)
            coordination.settle_doubts(known, kept)
        if not coordination.doubtful:
            del self._doubtful[coordination]
        return len(known) > 0

    def timer(self) -> float | None:
        return self._look_at if self._doubtful and not self._pending else None

"""Whether this node still knows whose its sessions are.

The others may give them away when they have not heard this node for `held_s`: it was stopped, held
up or cut off. So a node takes itself for the owner only for so long after it has sent a heartbeat
that has demonstrably come, at every other node that is not down. After a longer gap with any of
them it is *in doubt*: it hands no message at QoS 1 or 2 to its clients (`NodeState.is_unsure`)
before it is heard by all of them again and has then applied everything that was decided and
committed anywhere (`barriers`). What was given away is closed by that, and no session that a record
tells of is begun before (`opening`).

The same goes for a node that others hear, and yet take for down, because of its disk.

One node that is neither down nor heard does not matter as long as it decides nothing: it leads no
partition, nor the metadata. If nothing helps for `GIVE_UP_S`, though a majority is there, the
clients are sent away: other nodes may serve them better.
"""

from collections.abc import Callable
from typing import Final

from holdfast.broker.connections.close import close_connection
from holdfast.broker.delivery.acknowledgements import proceed
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState
from holdfast.cluster.context import ClusterContext
from holdfast.cluster.reads.read_barrier import Barriers
from holdfast.protocol.mqtt import reasons
from holdfast.storage.partition import partition_of

NOTHING: Final = -1
FOREVER: Final = float("inf")
LEADERLESS_S: Final = 5.0
"""So long in doubt a node waits for leaders of partitions; then the sessions whose homes have none
are closed, and the others go on."""
GIVE_UP_S: Final = 15.0
IDLE_MAX: Final = 1
"""Nodes that are neither down nor heard, and do not matter. Two of them could find each other."""


class OwnershipLease:
    def __init__(
        self,
        state: NodeState,
        fabric: ClusterContext,
        barriers: Barriers,
        acknowledged_at: Callable[[str], float],
        metadata_leader: Callable[[], str],
        is_asking: Callable[[], bool],
        held_s: float,
        now: float,
    ) -> None:
        """`acknowledged_at(node)`: see Detector. `is_asking`: clients wait for their sessions."""
        self._state = state
        self._fabric = fabric
        self._barriers = barriers
        self._acknowledged_at = acknowledged_at
        self._metadata_leader = metadata_leader
        self._is_asking = is_asking
        self._held_s = held_s
        self._ticked_at = now
        # The newest doubt, or the start; the others are heard out from then on.
        self._began_at = now
        self._doubted_at = now
        self._sure_until = FOREVER
        self._counted: frozenset[str] = frozenset()
        self._idle: set[str] = set()
        self._barrier = NOTHING
        # The gap goes on: what could be learned now would be too old when it ends.
        self._is_cut_off = False
        self._is_ill = False
        self.count = 0

    def tick(self, now: float) -> None:
        """The clock is set, before anything that came meanwhile is looked at."""
        is_unnoticed = self._is_ill and not self._state.is_unsure
        if is_unnoticed or now > self._sure_until or now > self._ticked_at + self._held_s:
            self._lose(now)
        self._ticked_at = now

    def _lose(self, now: float) -> None:
        if not self._state.sessions and not self._is_asking():
            return
        if not self._state.is_unsure:
            self.count += 1
            self._doubted_at = now
            self._state.is_unsure = True
        self._began_at = now
        self._barrier = NOTHING
        self._is_cut_off = True
        self._sure_until = FOREVER

    def set_ill(self, is_ill: bool, now: float) -> None:
        """The others may give away what this node has, though they hear it, because of its disk; or
        they have no reason to any more."""
        if is_ill != self._is_ill:
            self._is_ill = is_ill
            self._lose(now)

    def renew(self) -> None:
        """Somebody was heard, or the metadata has changed."""
        if not self._is_cut_off and self._fabric.is_gone(self._fabric.node_id):
            self._lose(self._state.now)
        present = self._members()
        # Who comes has decided nothing before.
        self._idle.update(node for node in present - self._counted if not self._decides(node))
        self._counted = present
        self._idle.intersection_update(present)
        if any(self._decides(node) or self._is_heard(node) for node in self._idle):
            self._idle = {
                node for node in self._idle if not (self._decides(node) or self._is_heard(node))
            }
        if not self._is_cut_off:
            self._sure_until = self._heard_until()

    def _members(self) -> frozenset[str]:
        metadata = self._fabric.metadata
        if metadata is None:
            return frozenset()
        own = self._fabric.node_id
        return frozenset(
            node for node in metadata.nodes if node != own and not self._fabric.is_gone(node)
        )

    def _decides(self, node: str) -> bool:
        metadata = self._fabric.metadata
        return node == self._metadata_leader() or (
            metadata is not None and any(info.leader == node for info in metadata.partitions)
        )

    def _is_heard(self, node: str) -> bool:
        return self._acknowledged_at(node) + self._held_s > self._state.now

    def _heard_until(self) -> float:
        until = FOREVER
        for node in self._counted:
            if node not in self._idle:
                heard_at = max(self._acknowledged_at(node), self._began_at)
                until = min(until, heard_at + self._held_s)
        return until

    def ask(self) -> None:
        """End of a turn, before barriers advance: once everybody who matters hears this node again,
        learn what was decided."""
        if not self._is_cut_off or self._is_ill or self._fabric.is_gone(self._fabric.node_id):
            return
        silent = {node for node in self._counted if not self._is_heard(node)}
        if silent and (len(silent) > IDLE_MAX or any(self._decides(node) for node in silent)):
            return
        self._idle = silent
        self._is_cut_off = False
        self._began_at = self._state.now
        self._barrier = self._barriers.begin(is_patient=True)
        self._sure_until = self._heard_until()

    def advance(self) -> bool:
        """End of a turn, after that. True if the doubt is over by it."""
        if not self._state.is_unsure:
            return False
        now = self._state.now
        if now >= self._doubted_at + GIVE_UP_S and self._fabric.has_majority(now):
            self._send_away(None, "this node cannot tell who owns the session")
            self._end()
            return True
        if self._is_cut_off:
            return False
        if not self._barriers.has_passed(self._barrier) and not self._do_without_leaders(now):
            return False
        if any(
            node not in self._idle and self._acknowledged_at(node) < self._began_at
            for node in self._counted
        ):
            return False
        self._end()
        return True

    def _do_without_leaders(self, now: float) -> bool:
        """Nobody decides anything in partitions that nobody leads, but somebody may have."""
        if now < self._began_at + LEADERLESS_S:
            return False
        lacking = self._barriers.lacking(self._barrier)
        if not lacking or any(self._fabric.leader(partition) for partition in lacking):
            return False
        self._send_away(lacking, "the session's partition has no leader")
        return True

    def _send_away(self, homes: set[int] | None, text: str) -> None:
        """`homes`: the clients of these; None: of all."""
        state = self._state
        for session in list(state.sessions.values()):
            if homes is None or self._home(session) in homes:
                connection = session.connection
                if connection is not None:
                    close_connection(state, connection, reasons.SERVER_BUSY, text)

    def _home(self, session: Session) -> int:
        return partition_of(session.client_id.encode(), self._state.config.partitions)

    def _end(self) -> None:
        self._barrier = NOTHING
        self._is_cut_off = False
        state = self._state
        state.is_unsure = False
        self._sure_until = self._heard_until()
        for session in list(state.sessions.values()):
            if session.connection is not None:
                proceed(state, session)

    def timer(self) -> float | None:
        """While in doubt: when to call `advance`, if nothing else happens."""
        return self._state.now + self._held_s if self._state.is_unsure else None

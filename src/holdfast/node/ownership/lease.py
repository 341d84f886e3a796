"""The ownership lease: it decides whether this node may still act as owner of its sessions.

The other nodes may reassign the sessions of this node after they have received no heartbeat from it
for some time. The node may have been stopped or cut off. So it acts as owner until the first moment
at which they may have done so. From then on it is *unsure of ownership*: it delivers no message of
QoS 1 or 2 (`NodeState.is_ownership_expired`), and begins no recorded session (`acquisition`).

A node that is not down confirms each heartbeat. These are the decisions that can follow after it
has confirmed none since one that was sent at `t`:

- Two nodes that do not receive this one count it as down (`failure.detector`), at `t` of the second
  one plus `held_s` at the earliest.
- One node alone may lead the home of a session. It reassigns the session when an order to release
  it has waited for `Releases.wait_s`, which is at least twice `held_s`. So one silent node counts
  from `ALONE` times `held_s` on. Before that a link through a third node replaces the lost one
  (`runtime.relayed_links`), and no client of either node notices the loss.

If less than three nodes vote, or the cluster has no third node that is not down, one may decide
alone. It then counts from `held_s` on, too.

The lease counts from when the heartbeat was sent, not from its confirmation. Counter-example: a
confirmation is delayed by 3 s, and the other nodes' time for this node began 3 s earlier.

The state ends when all of those nodes confirm heartbeats again, and this node has then passed a
read barrier (`reads.read_barrier`). Sessions that were reassigned meanwhile are closed by the
records that the barrier waits for.

The same holds for a node that the others receive, and yet count as down because of its disk.

One silent node that is not marked down does not matter while it decides nothing: it leads neither a
partition nor the metadata. If the state lasts for `GIVE_UP_S` although a majority is connected, the
node disconnects its clients: other nodes may serve them better.
"""

from collections.abc import Callable
from typing import Final

from holdfast.log.partition import partition_of
from holdfast.node.connections.close import CLOSE_STEPS, close_connection
from holdfast.node.context import ClusterContext
from holdfast.node.delivery.acknowledgements import proceed
from holdfast.node.node_state import NodeState
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.session.session import Session
from holdfast.node.sweep import Sweep
from holdfast.protocol.mqtt import reasons

NOTHING: Final = -1
FOREVER: Final = float("inf")
LEADERLESS_S: Final = 5.0
"""The time in seconds that an unsure node waits for leaders of partitions. After it the node closes
the sessions whose home partitions have no leader, and resumes the others."""
GIVE_UP_S: Final = 15.0
"""The time in seconds after which an unsure node that reaches a majority disconnects all its
clients."""
IDLE_MAX: Final = 1
"""The most silent nodes, not marked down, that are ignored. Two of them could decide together
without this node: B and C of three."""

ALONE: Final = 1.8
"""The times `held_s` until one silent node may have reassigned a session alone. It is below 2 by
what clocks and turns may differ."""

PROCEED_STEPS: Final = 2
"""The steps of one session that continues."""


class OwnershipLease:
    """The time until which this node may act as owner, and the way back when that time has passed.

    Invariant: while `NodeState.is_ownership_expired` is False, a recorded session of this node is
    reassigned only after this node has released it.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        barriers: Barriers,
        acknowledged_at: Callable[[str], float],
        metadata_leader: Callable[[], str],
        is_asking: Callable[[], bool],
        held_s: float,
        now: float,
    ) -> None:
        """`acknowledged_at(node)`: see Detector. `is_asking`: do clients wait for their
        sessions?"""
        self._state = state
        self._context = context
        self._barriers = barriers
        self._acknowledged_at = acknowledged_at
        self._metadata_leader = metadata_leader
        self._is_asking = is_asking
        self._held_s = held_s
        self._ticked_at = now
        # The begin of the present lease: the start of the node, or the last time that it became
        # unsure. Only confirmations from then on count.
        self._began_at = now
        self._doubted_at = now
        self._sure_until = FOREVER
        self._counted: set[str] = set()
        self._idle: set[str] = set()
        self._barrier = NOTHING
        # True while some node does not confirm. A read barrier that began now would be too old at
        # the end of the gap.
        self.is_cut_off = False
        self._is_ill = False
        self.count = 0
        # The home partitions whose clients were sent away since this node is unsure.
        self._sent_away: set[int] = set()
        self._departures: Sweep[Session] = Sweep(state)
        self._resumed: Sweep[Session] = Sweep(state)

    def tick(self, now: float) -> None:
        """Checks the lease, before anything that has arrived meanwhile is processed.

        Counter-example: the process was stopped for 10 s. If it first processed a client's packets,
        it would deliver messages of a session that has another owner.
        """
        is_unnoticed = self._is_ill and not self._state.is_ownership_expired
        # While this node is alone, no other one can have taken a session.
        was_stopped = now > self._ticked_at + self._held_s and not self._context.is_alone
        if is_unnoticed or now > self._sure_until or was_stopped:
            self._lose(now)
        self._ticked_at = now

    def _lose(self, now: float) -> None:
        if not self._state.sessions and not self._is_asking():
            return
        if not self._state.is_ownership_expired:
            self.count += 1
            self._doubted_at = now
            self._state.is_ownership_expired = True
            self._sent_away = set()
        self._began_at = now
        self._barrier = NOTHING
        self.is_cut_off = True
        self._sure_until = FOREVER

    def set_unhealthy(self, is_unhealthy: bool, now: float) -> None:
        """Notes whether the other nodes count this node's disk as unhealthy, and may reassign its
        sessions."""
        if is_unhealthy != self._is_ill:
            self._is_ill = is_unhealthy
            self._lose(now)

    def renew(self) -> None:
        """Extends the lease after a heartbeat has arrived or the metadata has changed."""
        if not self.is_cut_off and self._context.is_gone(self._context.node_id):
            self._lose(self._state.now)
        present = self._members()
        # A node that has just joined has decided nothing before.
        self._idle.update(node for node in present - self._counted if not self._decides(node))
        self._counted = present
        self._idle.intersection_update(present)
        if any(self._decides(node) or self._is_heard(node) for node in self._idle):
            self._idle = {
                node for node in self._idle if not (self._decides(node) or self._is_heard(node))
            }
        if not self.is_cut_off:
            self._sure_until = self._heard_until()

    def _members(self) -> set[str]:
        metadata = self._context.metadata
        if metadata is None:
            return set()
        own = self._context.node_id
        return {node for node in metadata.nodes if node != own and not self._context.is_gone(node)}

    def _decides(self, node: str) -> bool:
        metadata = self._context.metadata
        return node == self._metadata_leader() or (
            metadata is not None and any(info.leader == node for info in metadata.partitions)
        )

    def _is_heard(self, node: str) -> bool:
        return self._acknowledged_at(node) + self._held_s > self._state.now

    def _heard_until(self) -> float:
        """The first moment at which other nodes may have reassigned a session of this one."""
        heard = sorted(
            max(self._acknowledged_at(node), self._began_at) for node in self._counted - self._idle
        )
        if not heard:
            return FOREVER
        metadata = self._context.metadata
        takes_two = metadata is not None and len(metadata.voters) > 2 and not self._idle
        if len(heard) == 1 or not takes_two:
            return heard[0] + self._held_s
        return min(heard[0] + ALONE * self._held_s, heard[1] + self._held_s)

    def ask(self) -> None:
        """Begins the read barrier once every node that matters confirms heartbeats again.

        It runs at the end of a turn, before the barriers advance.
        """
        if not self.is_cut_off or self._is_ill or self._context.is_gone(self._context.node_id):
            return
        silent = {node for node in self._counted if not self._is_heard(node)}
        if silent and (len(silent) > IDLE_MAX or any(self._decides(node) for node in silent)):
            return
        self._idle = silent
        self.is_cut_off = False
        self._began_at = self._state.now
        self._barrier = self._barriers.begin()
        self._sure_until = self._heard_until()

    def advance(self) -> bool:
        """Ends the unsure state if everything is confirmed, and returns True if it did.

        It runs at the end of a turn, after the barriers have advanced.
        """
        if not self._state.is_ownership_expired:
            return False
        now = self._state.now
        if now >= self._doubted_at + GIVE_UP_S and self._context.has_majority(now):
            homes = set(range(self._state.config.partitions))
            if not self._send_away(homes, "this node does not know the owner of the session"):
                return False
            self._end()
            return True
        if self.is_cut_off:
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
        """Closes the sessions of partitions without a leader, and returns True if nothing else is
        missing.

        A partition without a leader decides nothing now, but an earlier leader may have reassigned
        its sessions.
        """
        if now < self._began_at + LEADERLESS_S:
            return False
        lacking = self._barriers.lacking(self._barrier)
        if not lacking or any(self._context.leader(partition) for partition in lacking):
            return False
        return self._send_away(lacking, "the session's partition has no leader")

    def _send_away(self, homes: set[int], text: str) -> bool:
        """Disconnects the clients of these home partitions, in slices. Returns True once none of
        them is connected: until then this node stays unsure, and delivers nothing to them."""
        if not homes <= self._sent_away:
            self._sent_away |= homes
            sent_away = frozenset(homes)

            def leave(session: Session) -> int:
                connection = session.connection
                if connection is None or self._home(session) not in sent_away:
                    return 1
                close_connection(self._state, connection, reasons.SERVER_BUSY, text)
                return CLOSE_STEPS

            self._departures.begin(self._state.list_sessions(), leave)
        return not self._departures.has_more

    def _home(self, session: Session) -> int:
        return partition_of(session.client_id.encode(), self._state.config.partitions)

    def _end(self) -> None:
        self._barrier = NOTHING
        self.is_cut_off = False
        state = self._state
        state.is_ownership_expired = False
        self._sure_until = self._heard_until()
        self._sent_away = set()
        self._resumed.begin(state.list_sessions(), self._proceed)

    def _proceed(self, session: Session) -> int:
        """Sends what has waited in the session. Until its slice new messages wait behind it, as
        behind a full window."""
        if session.connection is None or self._state.is_ownership_expired:
            return 1
        proceed(self._state, session)
        return PROCEED_STEPS

    def unsure_s(self) -> float:
        """Returns the seconds for which this node has been unable to begin recorded sessions, 0 if
        it can.

        It counts also without a session or a client that waits for one, when no state is kept.
        Counter-example: a load balancer finds an empty node ready, and each client that it sends
        there is refused.
        """
        now = self._state.now
        since = self._doubted_at if self._state.is_ownership_expired else self._sure_until
        return max(0.0, now - since)

    def timer(self) -> float | None:
        """Returns the time of the next call of `advance` while this node is unsure, or None."""
        return self._state.now + self._held_s if self._state.is_ownership_expired else None

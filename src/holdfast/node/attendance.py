"""Starts a Raft peer whose disk may lack votes and entries: full attendance.

Such a peer must not be a majority with others like it, or alone. Smallest counter-example: n1 alone
votes, and n2 follows. They agree on entries 17 and 18. The disk of n1 is put back to entry 16. n1
elects itself and writes another entry 17. n2 has 18 committed entries, and its log is the one that
does not fit.

So the peer is *held*: it neither votes nor stands nor confirms anything, and waits until every
member by the newest metadata that any of them has is connected and has reported its term and the
end of its log (LOG_END). Logs of one history are ordered, so the longest one has at least
everything that any of the disks saw agreed. The peer goes on under a later term than all of them,
and is released with that end as its *floor*: until its log reaches it, it votes only for a peer
that has that much.

Two kinds of peers are held:

- A disk that an operator has accepted. It waits without a time limit, except for members that the
  operator has given up.
- The only voter of a cluster, at each start, because no other vote confirms that its disk is the
  newest. It waits for the members that its metadata does not name as down, at most
  `start_alone_after_s`. For the others it waits `first_contact_s`.

A member whose own disk stands apart is not waited for, because it has lost the same. A node of an
older version reports nothing. It counts as soon as it is connected.
"""

from collections.abc import Collection
from typing import Final

from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import LOG_END
from holdfast.node.frames import LOG_END as DECODER
from holdfast.node.frames import LogEndFrame, decode_frame
from holdfast.node.metadata.model import NodePhase
from holdfast.node.metadata.state_machine import node_of, peer_id
from holdfast.node.metadata.store import MetaStore
from holdfast.node.node_state import NodeState

FEATURE: Final = "log-end"
"""The feature in the handshake of a node that understands the frame LOG_END."""
RECOVERS: Final = "recovers"
"""The feature of a node whose process began with an accepted disk. The others expect no more of it
than it claims, because the accepted disk has less than the one that they remember."""


class Attendance:
    """The wait of this node's Raft peer for the other members, and its report to theirs."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        meta: MetaStore,
        incarnation: str,
        first_contact_s: float,
        start_alone_after_s: float,
        now: float,
    ) -> None:
        self._state = state
        self._context = context
        self._meta = meta
        self._present_at = now + first_contact_s
        self._alone_at = now + start_alone_after_s
        self._reports: dict[str, LogEndFrame] = {}
        self._apart: set[str] = set()
        self._refused: set[str] = set()
        self._given_up: frozenset[str] = frozenset()
        self._is_noted = False
        self._floor = (0, 0)
        self._term = 0
        self.is_recovering = False
        """Whether the disk of this node has lost votes or entries, and they are not there again.
        The mark of the disk (`io.disk.older_copy`) stays until then."""
        membership = meta.membership
        own = peer_id(meta.node_id, incarnation)
        self.is_held = membership.voters == (own,) != membership.members
        if self.is_held:
            meta.hold()

    def recover(self, given_up: Collection[str]) -> None:
        """Waits for all members except these, because the disk has lost votes and entries. To be
        called before any input."""
        self.is_recovering = True
        self._given_up = frozenset(given_up)
        if not self.is_held:
            self.is_held = True
            self._meta.hold()

    def connected(self, node: str) -> None:
        """Reports to `node` the log that is on the disk here."""
        self._apart.discard(node)
        if self._context.understands(node, FEATURE):
            term, _ = self._meta.durable
            frame = LogEndFrame(term, self._meta.log_end, self._members())
            self._context.send_frame(node, LOG_END, frame)

    def disconnected(self, node: str) -> None:
        self._reports.pop(node, None)

    def refused(self, node: str) -> None:
        """Notes that nothing listens at the address of `node`."""
        self._refused.add(node)

    def lacks_disk(self, node: str) -> None:
        """Notes that the disk of `node` is an older copy or another one, and it gets no link."""
        self._apart.add(node)

    def handle(self, node: str, payload: bytes) -> None:
        """Takes the report of `node`. Raises BadFrame when it is malformed."""
        self._reports[node] = decode_frame(DECODER, payload)

    def _members(self) -> list[str]:
        """The members but those that were removed, because a removed disk gets no link any more.
        Counter-example: the only voter is killed after a removal, before the entry that takes the
        node out of the membership. It would wait for the node at its start."""
        metadata = self._context.metadata
        removed = set() if metadata is None else {peer_id(*each) for each in metadata.removed}
        return sorted(
            {node_of(each) for each in self._meta.membership.members if each not in removed}
        )

    def missing(self, now: float) -> list[str]:
        """The members that this node waits for."""
        if not self.is_held:
            return []
        context, metadata = self._context, self._context.metadata
        members = max(
            [(self._meta.log_end, self._members())]
            + [(each.end, each.members) for each in self._reports.values()]
        )[1]
        found = []
        for node in members:
            if node == self._meta.node_id or node in self._reports or node in self._apart:
                continue
            if node in context.connected and not context.understands(node, FEATURE):
                continue
            if self.is_recovering:
                is_awaited = node not in self._given_up
            else:
                info = None if metadata is None else metadata.nodes.get(node)
                is_down = info is not None and info.state == NodePhase.DOWN
                until = self._present_at if is_down else self._alone_at
                is_awaited = now < until and not (is_down and node in self._refused)
            if is_awaited:
                found.append(node)
        return found

    def step(self, now: float) -> None:
        """Releases the peer when nobody is missing, and notes when its log is as long as theirs."""
        missing = self.missing(now)
        if missing and not self._is_noted and now >= self._present_at:
            self._is_noted = True
            text = "this node decides nothing before it is connected to them"
            self._state.note("warning", "awaits_nodes", {"nodes": missing, "text": text})
        if self.is_held and not missing:
            self.is_held = False
            reports = self._reports.values()
            self._floor = max([(0, 0), *(each.end for each in reports)])
            self._meta.release(max([0, *(each.term for each in reports)]), self._floor, now)
            self._term = self._meta.term
        elif self.is_recovering and not self.is_held:
            is_stored = self._meta.durable[0] >= self._term
            self.is_recovering = not is_stored or self._meta.log_end < self._floor

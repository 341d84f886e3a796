"""Keeps the agreed cluster metadata on one node, and changes it from any node.

Raft (one peer per node and disk) orders the commands, and `state_machine` applies them. A follower
sends its proposals to the leader, and learns the outcome when it applies the entry itself. The
leader also keeps the set of voters in order (`voters`).

Inputs take `now`. After an input the caller takes `effects` and carries them out in order. It may
continue while a Persist is being written; `persisted` reports them in the same order.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from holdfast.node.frame_kinds import PROPOSAL, PROPOSAL_RESULT, RAFT, BadFrame
from holdfast.node.metadata.codec import decode_command, encode_command
from holdfast.node.metadata.commands import Command, InitCluster, PutNode, RemoveNode, apply
from holdfast.node.metadata.effects import (
    LeaderChanged,
    MetadataChanged,
    MetaEffect,
    Persist,
    ProposalDone,
    Send,
)
from holdfast.node.metadata.model import (
    GATEWAY,
    VOTERS_MAX,
    WITNESS,
    ClusterMetadata,
    NodeInfo,
    NodePhase,
)
from holdfast.node.metadata.requests import Proposals, RequestRefused, Unknown
from holdfast.node.metadata.state_machine import (
    MetaState,
    changed_since,
    decode_request,
    encode_request,
    node_of,
    peer_id,
)
from holdfast.node.raft.codec import decode_message, encode_message
from holdfast.node.raft.log import EntryKind, LogEntry, Membership, RaftState
from holdfast.node.raft.node import RaftFailure, RaftNode, RaftTiming, Ready
from holdfast.node.raft.state import Addressed, RaftDiverged


class HandOver(Struct, frozen=True):
    """The decision that another peer shall lead."""

    peer: str


def plan(
    own: str,
    membership: Membership,
    nodes: Mapping[str, NodeInfo],
    leaving: Collection[str],
    is_live: Callable[[str], bool],
) -> Membership | HandOver | None:
    """The next step; None if the membership is right or nothing can be done now.

    `own` is the leader's peer id. `leaving` are nodes to be removed, which must stop voting even
    without a replacement. `is_live` is true for a peer that replies and has every committed entry.

    There are one, three or five voters. An even number needs one more live voter and tolerates no
    more failures. So a cluster of two has one voter: with two, neither would survive alone. It gets
    three when a third node, or a witness, is there. Between two odd numbers there is an even one
    until a change is committed. Every other node is a learner, ready to replace a voter that is
    down. A gateway never votes.
    """
    wanted = {peer_id(node.node_id, node.incarnation): node for node in nodes.values()}
    membership_now = _with_learners(membership, wanted)
    if membership_now != membership:
        return membership_now
    voters = membership.voters
    bad = [voter for voter in voters if not _is_good(voter, own, wanted, leaving)]
    if own in bad:
        heirs = [voter for voter in voters if voter not in bad and is_live(voter)]
        if heirs:
            return HandOver(heirs[0])
    spares = [
        member
        for member in membership.learners
        if _is_good(member, own, wanted, leaving) and is_live(member)
    ]
    spares.sort(key=lambda member: (wanted[member].role != WITNESS, member))
    # A node with another disk replaces its old peer. A peer whose node is removed has no such
    # replacement.
    going = {voter for voter in bad if node_of(voter) in leaving or node_of(voter) not in nodes}
    step = _step(own, membership, bad, spares, going, is_live)
    if step is not None and _has_live_majority(own, step, is_live):
        return step
    return None


def _with_learners(membership: Membership, wanted: Collection[str]) -> Membership:
    for learner in membership.learners:
        if learner not in wanted:
            membership = membership.without(learner)
    for member in sorted(wanted):
        if member not in membership.members:
            membership = membership.with_learner(member)
    return membership


def _is_good(
    member: str, own: str, wanted: Mapping[str, NodeInfo], leaving: Collection[str]
) -> bool:
    node = wanted.get(member)
    if node is None or node.node_id in leaving or node.state == NodePhase.DRAINING:
        return False
    if node.role == GATEWAY:
        return False
    # This node runs, whatever the metadata says.
    return node.state == NodePhase.UP or member == own


def _step(
    own: str,
    membership: Membership,
    bad: list[str],
    spares: list[str],
    going: Collection[str],
    is_live: Callable[[str], bool],
) -> Membership | None:
    count = len(membership.voters)
    others = [voter for voter in bad if voter != own]
    # Peers that do not reply come first.
    others.sort(key=lambda voter: (voter not in going, is_live(voter), voter))
    if count % 2 == 0:
        if others:
            return membership.with_learner(others[0])
        if spares:
            return membership.with_voter(spares[0])
        rest = sorted(
            (voter for voter in membership.voters if voter != own),
            key=lambda voter: (not is_live(voter), voter),
        )
        return membership.with_learner(rest[-1])
    if bad and spares:
        return membership.with_voter(spares[0])
    if others and (others[0] in going or (len(bad) >= 2 and count >= VOTERS_MAX)):
        return membership.with_learner(others[0])
    if not bad and len(spares) >= 2 and count + 2 <= VOTERS_MAX:
        return membership.with_voter(spares[0])
    return None


def _has_live_majority(own: str, membership: Membership, is_live: Callable[[str], bool]) -> bool:
    """True if the membership's majority is live. A change that fails this test could not be
    committed and would block the next one."""
    live = sum(1 for voter in membership.voters if voter == own or is_live(voter))
    return live >= membership.majority


COMPACT_ENTRIES: Final = 1024
"""The number of entries after which a snapshot is taken."""
COMPACT_BYTES: Final = 4 << 20
"""The bytes of entries after which a snapshot is taken."""
UNWRITTEN_MAX: Final = 256
"""The most unwritten outputs; Raft messages are dropped while the disk is further behind."""
REMOVALS_MAX: Final = 64
"""The most removals that wait for their node to stop voting."""


class MetaStore:
    """The metadata of one node with its Raft peer. Any input may raise `RaftFailure`: stop the
    node."""

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        state: RaftState,
        *,
        nonce: str,
        random: Callable[[], float],
        now: float,
        timing: RaftTiming | None = None,
    ) -> None:
        """Starts with `state`, as loaded from the disk; it is empty for a new node. `nonce` is a
        random text that differs for each start of the process."""
        self.node_id = node_id
        self.effects: list[MetaEffect] = []
        self._raft = RaftNode(peer_id(node_id, incarnation), state, random, now, timing)
        self._state = MetaState()
        if state.snapshot is not None:
            self._state = _restored(state.snapshot.data)
        self._known = self._state.metadata
        self._done: list[ProposalDone] = []
        self._proposals = Proposals(node_id, nonce)
        self._unwritten: list[Ready] = []
        self._in_log: set[str] = set()
        """The requests in the log that are not applied yet, while this node leads."""
        self._removals: dict[str, tuple[str, bytes]] = {}
        """The request and command of unapplied removals by node, while this node leads."""
        self._reported_leader = LeaderChanged("", False)
        self._entries_since_snapshot = 0
        self._bytes_since_snapshot = 0
        self._due = now
        self._is_stalled = False
        self.diverged = ""
        """The committed change that the others no longer have, as text. This node must start again
        as another Raft peer. "" while there is none."""
        # The number of attempts to hand over. The first of the other voters may be unable to lead
        # too.
        self._handed_over = 0
        self._drain(now)

    # What is known

    @property
    def metadata(self) -> ClusterMetadata | None:
        """The metadata applied last; None: this node belongs to no cluster that it knows of."""
        return self._state.metadata

    @property
    def is_leader(self) -> bool:
        return self._raft.is_leader

    @property
    def leader_id(self) -> str:
        """The leader's node id; "" if it is not known."""
        return node_of(self._raft.leader)

    @property
    def term(self) -> int:
        return self._raft.term

    @property
    def membership(self) -> Membership:
        """The Raft membership; a peer is a node with its disk."""
        return self._raft.membership

    @property
    def durable(self) -> tuple[int, int]:
        """The Raft term and the last committed entry on the disk of this node."""
        return self._raft.durable

    @property
    def log_end(self) -> tuple[int, int]:
        """The term and index of the last entry on the disk of this node, committed or not."""
        return self._raft.log_end

    def has_majority(self, now: float) -> bool:
        """True if changes can be agreed, as far as this node can tell."""
        return self._raft.has_majority(now)

    # Inputs

    def create_cluster(
        self,
        cluster_id: str,
        partitions: int,
        replication_factor: int,
        min_insync: int,
        node: NodeInfo,
        now: float,
    ) -> int:
        """Founds a cluster of this node alone and returns the request. Other nodes are admitted
        later. Raises `ValueError` if this node already belongs to a cluster."""
        if not self._raft.is_new:
            raise ValueError("this node belongs to a cluster already")
        command = InitCluster(cluster_id, partitions, replication_factor, min_insync, node)
        request = self._proposals.next_request()
        # A refused command must not leave a cluster without metadata.
        error = apply(None, command).error
        if error:
            self.effects.append(ProposalDone(request, RequestRefused(error)))
            return request
        self._proposals.add(request, encode_command(command), now)
        (pending,) = self._proposals.pop_due(now)
        self._raft.bootstrap(encode_request(pending.request_id, pending.command), now)
        self._raft.handle_timers(now)
        self._drain(now)
        return request

    def propose(self, command: Command, now: float) -> int:
        """Proposes a command and returns the request. A ProposalDone names it within TIMEOUT_S."""
        request = self._proposals.next_request()
        if self._proposals.is_full():
            refused = RequestRefused("too many changes are under way on this node")
            self.effects.append(ProposalDone(request, refused))
            return request
        self._proposals.add(request, encode_command(command), now)
        self._send_due(now)
        self._drain(now)
        return request

    def admit(self, info: NodeInfo, now: float) -> int | None:
        """Enters a node that asks to join, or has come back, perhaps with other addresses. Returns
        None if nothing is to be done. A known node with another disk is left to the controller."""
        if self.metadata is None:
            return None
        known = self.metadata.nodes.get(info.node_id)
        if known is None:
            return self.propose(PutNode(info, 0), now)
        wanted = replace(info, state=known.state, version=known.version)
        if wanted == known or wanted.incarnation != known.incarnation:
            return None
        return self.propose(PutNode(wanted, known.version), now)

    def remove(self, node_id: str, now: float) -> int:
        """Removes a node that stores nothing; a voter stops voting first."""
        known = self.metadata.nodes.get(node_id) if self.metadata is not None else None
        return self.propose(RemoveNode(node_id, known.version if known else 0), now)

    def transfer_leadership(self, now: float) -> bool:
        """Lets another voter lead. Returns False if that is impossible."""
        raft = self._raft
        live = [
            voter
            for voter in raft.membership.voters
            if voter != raft.peer and raft.is_caught_up(voter, now)
        ]
        done = bool(live) and raft.transfer(live[self._handed_over % len(live)], now)
        self._handed_over += done
        self._drain(now)
        return done

    def set_stalled(self, is_stalled: bool, now: float) -> None:
        """Notes whether the disk of this node responds. While it does not, another node must lead,
        because this one's heartbeats would hide that it confirms nothing."""
        self._is_stalled = is_stalled
        self._raft.set_may_lead(not is_stalled)
        if is_stalled:
            self.transfer_leadership(now)

    def hold(self) -> None:
        """Takes part in nothing until `release`. To be called before any input."""
        self._raft.hold()

    def release(self, term: int, floor: tuple[int, int], now: float) -> None:
        """Takes part under a later term than `term`, with no less than the log that ends at
        `floor`."""
        self._raft.release(term, floor, now)
        self._drain(now)

    def stand_apart(self, now: float) -> None:
        """Decides nothing more. The only voter of a cluster would agree with itself alone."""
        self._raft.resign(now)
        self._drain(now)

    def leader_down(self, node_id: str, now: float) -> None:
        """Elects early: that node's process is dead, because its address refuses connections."""
        if node_id == self.leader_id and not self.is_leader:
            self._raft.leader_down(now)
            self._drain(now)

    def handle_frame(self, node_id: str, kind: int, payload: bytes, now: float) -> None:
        """Processes a frame of the metadata. Raises `BadFrame` if the payload is invalid."""
        if kind == RAFT:
            sender, receiver, message = decode_message(payload)
            if node_of(sender) != node_id:
                raise BadFrame(f"a Raft message of {sender} from node {node_id}")
            if receiver == self._raft.peer and len(self._unwritten) < UNWRITTEN_MAX:
                try:
                    self._raft.handle_message(sender, message, now)
                except RaftDiverged as error:
                    self.diverged = str(error)
                    self._raft.resign(now)
        elif kind == PROPOSAL:
            request_id, command = decode_request(payload)
            if not self._append_request(request_id, command, now):
                self.effects.append(Send(node_id, PROPOSAL_RESULT, request_id.encode()))
        elif kind == PROPOSAL_RESULT:
            # The receiver does not lead, or could not take the request.
            self._proposals.retry_soon(payload.decode("ascii", "replace"), now)
        else:
            raise BadFrame(f"a frame of kind {kind} is none for the metadata")
        self._drain(now)

    def handle_timers(self, now: float, *, beats: bool = False) -> None:
        """`beats`: the node sends heartbeats, and those of a Raft leader leave with them."""
        if beats or now >= self._raft.timer():
            self._raft.handle_timers(now, beats=beats)
            if self._is_stalled:
                self.transfer_leadership(now)
            self._maintain_voters(now)
        for request in self._proposals.pop_expired(now):
            unknown = Unknown("no majority of the cluster has confirmed the change in time")
            self.effects.append(ProposalDone(request, unknown))
        self._send_due(now)
        self._drain(now)

    def timer(self) -> float:
        return self._due

    def persisted(self, now: float) -> None:
        """Notes that the oldest Persist is done, and sends the messages that waited for it."""
        ready = self._unwritten.pop(0)
        self._send_messages(ready.messages_after)
        self._raft.persisted(ready, now)
        while self._unwritten and self._unwritten[0].write is None:
            self._send_messages(self._unwritten.pop(0).messages_after)
        self._drain(now)

    # Inside

    def _send_due(self, now: float) -> None:
        leader = self.leader_id
        if not leader:
            # The requests are sent when a leader is known; see _tell_leader.
            return
        for pending in self._proposals.pop_due(now):
            if not self.is_leader:
                payload = encode_request(pending.request_id, pending.command)
                self.effects.append(Send(leader, PROPOSAL, payload))
            elif not self._append_request(pending.request_id, pending.command, now):
                self._proposals.retry_soon(pending.request_id, now)

    def _append_request(self, request_id: str, encoded: bytes, now: float) -> bool:
        """Appends the request as the leader. Returns False if this node cannot."""
        command = decode_command(encoded)
        if not self.is_leader:
            return False
        if request_id in self._in_log or self._state.outcome(request_id) is not None:
            return True
        if isinstance(command, RemoveNode):
            # From now on the node may not begin to vote: the removal would be agreed on, and what
            # made it a voter not yet. If its disk is wiped then, nothing is ever agreed on again.
            if command.node_id not in self._removals and len(self._removals) >= REMOVALS_MAX:
                return True
            self._removals[command.node_id] = (request_id, encoded)
            if self._votes(command.node_id):
                return True
        data = encode_request(request_id, encoded)
        if len(self._unwritten) >= UNWRITTEN_MAX or self._raft.propose(data, now) is None:
            return False
        self._in_log.add(request_id)
        return True

    def _votes(self, node_id: str) -> bool:
        return any(node_of(voter) == node_id for voter in self._raft.membership.voters)

    def _maintain_voters(self, now: float) -> None:
        raft, metadata = self._raft, self.metadata
        if metadata is None or not raft.may_change_members or raft.is_transferring:
            return
        for request_id, encoded in list(self._removals.values()):
            self._append_request(request_id, encoded, now)
        is_live = partial(raft.is_caught_up, now=now)
        step = plan(raft.peer, raft.membership, metadata.nodes, self._removals, is_live)
        if isinstance(step, HandOver):
            raft.transfer(step.peer, now)
        elif step is not None:
            raft.change_members(step, now)

    def _drain(self, now: float) -> None:
        while (ready := self._raft.take_ready(now)) is not None:
            self._send_messages(ready.messages)
            if ready.installed is not None:
                self._state = _restored(ready.installed.data)
                self._entries_since_snapshot = self._bytes_since_snapshot = 0
                # The snapshot may cover the entries of some requests.
                for request_id in self._proposals.request_ids():
                    self._finish(request_id)
            for entry in ready.committed:
                self._apply(entry)
            if ready.write is not None:
                self._unwritten.append(ready)
                self.effects.append(Persist(ready.write))
            elif self._unwritten:
                self._unwritten.append(ready)
            else:
                self._send_messages(ready.messages_after)
            self._compact()
        self._report_metadata()
        self._report_leader(now)
        # Every input ends here, and timers are read far more often, so the time is kept.
        proposals = self._proposals
        when = proposals.timer() if self._raft.leader else proposals.expiry()
        self._due = min(self._raft.timer(), when)

    def _send_messages(self, messages: tuple[Addressed, ...]) -> None:
        for member, message in messages:
            payload = encode_message(self._raft.peer, member, message)
            self.effects.append(Send(node_of(member), RAFT, payload))

    def _apply(self, entry: LogEntry) -> None:
        self._entries_since_snapshot += 1
        self._bytes_since_snapshot += len(entry.data)
        if entry.kind == EntryKind.MEMBERS:
            self._state.set_voters(Membership.decode(entry.data).voters)
        if entry.kind != EntryKind.COMMAND:
            return
        try:
            request_id = self._state.apply(entry.data)
        except BadFrame as error:
            raise RaftFailure(
                f"entry {entry.index} of the metadata log is none that this version knows: {error}"
            ) from error
        self._in_log.discard(request_id)
        self._removals = {
            node_id: removal
            for node_id, removal in self._removals.items()
            if removal[0] != request_id
        }
        self._finish(request_id)

    def _finish(self, request_id: str) -> None:
        outcome = self._state.outcome(request_id)
        if outcome is not None:
            request = self._proposals.finish(request_id)
            if request is not None:
                self._done.append(ProposalDone(request, outcome))

    def _compact(self) -> None:
        if (
            self._entries_since_snapshot >= COMPACT_ENTRIES
            or self._bytes_since_snapshot >= COMPACT_BYTES
        ):
            self._entries_since_snapshot = self._bytes_since_snapshot = 0
            self._raft.compact(self._state.encode())

    def _report_metadata(self) -> None:
        metadata = self._state.metadata
        if metadata is not None and metadata is not self._known:
            self.effects.append(MetadataChanged(metadata, changed_since(self._known, metadata)))
            self._known = metadata
        # The metadata comes first, so a caller that is told "accepted" finds its change in it.
        self.effects += self._done
        self._done = []

    def _report_leader(self, now: float) -> None:
        told = LeaderChanged(self.leader_id, self.is_leader)
        if told == self._reported_leader:
            return
        self._reported_leader = told
        self._in_log.clear()
        self._removals.clear()
        self.effects.append(told)
        self._proposals.retry_all(now)
        if told.leader_id:
            self._send_due(now)
            self._drain(now)


def _restored(data: bytes) -> MetaState:
    try:
        return MetaState.decode(data)
    except BadFrame as error:
        raise RaftFailure(
            f"the metadata snapshot is none that this version knows: {error}"
        ) from error

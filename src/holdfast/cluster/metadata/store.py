"""The cluster metadata on one node: what was agreed, and a way to change it from anywhere.

Raft (one member per node and disk) orders the commands, `metastate` applies them. A node that does
not lead sends its proposals to the one that does, and learns what came of them when it applies the
entry itself. The leader also keeps the set of voters in order (`voters`).

Inputs take `now`; afterwards the caller takes `effects` and carries them out in their order. It may
go on while a Persist is being written; `persisted` reports them in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from holdfast.cluster.frame_kinds import PROPOSAL, PROPOSAL_RESULT, RAFT, BadFrame
from holdfast.cluster.metadata.codec import decode_command, encode_command
from holdfast.cluster.metadata.commands import Command, InitCluster, PutNode, RemoveNode, apply
from holdfast.cluster.metadata.model import ClusterMetadata, NodeInfo
from holdfast.cluster.metadata.requests import Outcome, Proposals, RequestRefused, Unknown
from holdfast.cluster.metadata.state_machine import (
    MetaState,
    changed_since,
    decode_request,
    encode_request,
    member_id,
    node_of,
)
from holdfast.cluster.metadata.voters import HandOver, plan
from holdfast.cluster.raft.codec import decode_message, encode_message
from holdfast.cluster.raft.log import EntryKind, LogEntry, Membership, RaftState
from holdfast.cluster.raft.node import RaftFailure, RaftNode, RaftTiming, Ready, Write
from holdfast.cluster.raft.state import Addressed, RaftDiverged

COMPACT_ENTRIES: Final = 1024
COMPACT_BYTES: Final = 4 << 20
"""A snapshot is taken after so many entries, or bytes of them."""
UNWRITTEN_MAX: Final = 256
"""A disk that is so far behind: Raft messages are dropped until it has caught up."""
REMOVALS_MAX: Final = 64
"""Removals that wait for their node to stop voting."""


@dataclass(frozen=True)
class Send:
    node_id: str
    kind: int
    payload: bytes


@dataclass(frozen=True)
class Persist:
    """To be written; then call `persisted`."""

    write: Write


@dataclass(frozen=True)
class MetadataChanged:
    metadata: ClusterMetadata
    changed_partitions: tuple[int, ...]
    """Since the last one."""


@dataclass(frozen=True)
class LeaderChanged:
    leader_id: str
    """"" if none is known."""
    is_leader: bool
    """It is this node."""


@dataclass(frozen=True)
class ProposalDone:
    request: int
    outcome: Outcome


MetaEffect = Send | Persist | MetadataChanged | LeaderChanged | ProposalDone


@dataclass
class Removal:
    """A request to remove a node that voted when it came."""

    request_id: str
    command: bytes
    is_in_log: bool = False


class MetaStore:
    """Raises RaftFailure from any input if the node must stop."""

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
        """`state`: as loaded from the disk, empty for a node that was never in a cluster. `nonce`:
        a random text, another one for each start of the process."""
        self.node_id = node_id
        self.effects: list[MetaEffect] = []
        self._raft = RaftNode(member_id(node_id, incarnation), state, random, now, timing)
        self._state = MetaState()
        if state.snapshot is not None:
            self._state = _restored(state.snapshot.data)
        self._known = self._state.metadata
        self._done: list[ProposalDone] = []
        self._proposals = Proposals(node_id, nonce)
        self._unwritten: list[Ready] = []
        self._in_log: set[str] = set()
        """As leader: requests that are in the log and not applied yet."""
        self._removals: dict[str, Removal] = {}
        """As leader: by node, until they are applied."""
        self._told = LeaderChanged("", False)
        self._entries_since_snapshot = 0
        self._bytes_since_snapshot = 0
        self._due = now
        self._is_stalled = False
        self.diverged = ""
        """What the others have gone on without although it was agreed; this node must begin anew,
        as another member."""
        # Attempts to hand over: the first of the others may not be able to lead, either.
        self._handed_over = 0
        self._drain(now)

    # What is known

    @property
    def metadata(self) -> ClusterMetadata | None:
        """The last that was applied; None: this node is in no cluster, as far as it knows."""
        return self._state.metadata

    @property
    def is_leader(self) -> bool:
        return self._raft.is_leader

    @property
    def leader_id(self) -> str:
        """ "" if none is known."""
        return node_of(self._raft.leader)

    @property
    def term(self) -> int:
        return self._raft.term

    @property
    def membership(self) -> Membership:
        """Of members: a node and its disk."""
        return self._raft.membership

    @property
    def durable(self) -> tuple[int, int]:
        """The Raft term, and the last committed entry, on the disk here."""
        return self._raft.durable

    @property
    def durable_end(self) -> tuple[int, int]:
        """The same with the last entry, committed or not."""
        return self._raft.durable_end

    def has_majority(self, now: float) -> bool:
        """Changes can be agreed, as far as this node can tell."""
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
        """Found a cluster of this node alone; others are admitted later. Returns the request.
        Raises ValueError if this node belongs to one already."""
        if not self._raft.is_new:
            raise ValueError("this node belongs to a cluster already")
        command = InitCluster(cluster_id, partitions, replication_factor, min_insync, node)
        request = self._proposals.next_request()
        # What would be refused must not leave a cluster without metadata behind.
        error = apply(None, command).error
        if error:
            self.effects.append(ProposalDone(request, RequestRefused(error)))
            return request
        self._proposals.add(request, encode_command(command), now)
        (pending,) = self._proposals.take_due(now)
        self._raft.bootstrap(encode_request(pending.request_id, pending.command), now)
        self._raft.handle_timers(now)
        self._drain(now)
        return request

    def propose(self, command: Command, now: float) -> int:
        """Returns the request that ProposalDone will name, within TIMEOUT_S."""
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
        """A node asks to join, or has come back, maybe with other addresses: enter it. The leader
        makes it a member by itself. None if there is nothing to do, or it is the controller's:
        a known node with another disk."""
        metadata = self.metadata
        if metadata is None:
            return None
        known = metadata.nodes.get(info.node_id)
        if known is None:
            return self.propose(PutNode(info, 0), now)
        wanted = replace(info, state=known.state, version=known.version)
        if wanted == known or wanted.incarnation != known.incarnation:
            return None
        return self.propose(PutNode(wanted, known.version), now)

    def remove(self, node_id: str, now: float) -> int:
        """Remove a node that holds nothing; one that votes stops doing so first."""
        known = self.metadata.nodes.get(node_id) if self.metadata is not None else None
        version = known.version if known is not None else 0
        return self.propose(RemoveNode(node_id, version), now)

    def hand_over(self, now: float) -> bool:
        """Let another voter lead, before this node stops. False if it does not lead, or there is
        nobody."""
        raft = self._raft
        others = [voter for voter in raft.membership.voters if voter != raft.member]
        live = [voter for voter in others if raft.is_caught_up(voter, now)]
        done = bool(live) and raft.transfer(live[self._handed_over % len(live)], now)
        self._handed_over += done
        self._drain(now)
        return done

    def set_stalled(self, is_stalled: bool, now: float) -> None:
        """The disk of this node does not answer, or does so again. While it does not, this node
        lets another one lead: its own heartbeats would hide that it confirms nothing."""
        self._is_stalled = is_stalled
        self._raft.set_may_lead(not is_stalled)
        if is_stalled:
            self.hand_over(now)

    def leader_gone(self, node_id: str, now: float) -> None:
        """The failure detector is sure that the process of that node is dead: its socket is closed
        and nobody listens there."""
        if node_id == self.leader_id and not self.is_leader:
            self._raft.leader_gone(now)
            self._drain(now)

    def handle_frame(self, node_id: str, kind: int, payload: bytes, now: float) -> None:
        """Raises BadFrame."""
        if kind == RAFT:
            sender, receiver, message = decode_message(payload)
            if node_of(sender) != node_id:
                raise BadFrame(f"a Raft message of {sender} from node {node_id}")
            if receiver == self._raft.member and len(self._unwritten) < UNWRITTEN_MAX:
                try:
                    self._raft.handle_message(sender, message, now)
                except RaftDiverged as error:
                    self.diverged = str(error)
                    self._raft.set_may_lead(False)
        elif kind == PROPOSAL:
            request_id, command = decode_request(payload)
            if not self._take_request(request_id, command, now):
                self.effects.append(Send(node_id, PROPOSAL_RESULT, request_id.encode()))
        elif kind == PROPOSAL_RESULT:
            # It does not lead, or could not take it.
            self._proposals.retry_soon(payload.decode("ascii", "replace"), now)
        else:
            raise BadFrame(f"a frame of kind {kind} is none for the metadata")
        self._drain(now)

    def handle_timers(self, now: float) -> None:
        if now >= self._raft.timer():
            self._raft.handle_timers(now)
            if self._is_stalled:
                self.hand_over(now)
            self._tend_members(now)
        for request in self._proposals.take_expired(now):
            unknown = Unknown("no majority of the cluster has confirmed the change in time")
            self.effects.append(ProposalDone(request, unknown))
        self._send_due(now)
        self._drain(now)

    def timer(self) -> float:
        """When to call handle_timers."""
        return self._due

    def persisted(self, now: float) -> None:
        """The oldest Persist that was not reported yet is done."""
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
            # As soon as there is one: see _tell_leader.
            return
        for pending in self._proposals.take_due(now):
            if not self.is_leader:
                payload = encode_request(pending.request_id, pending.command)
                self.effects.append(Send(leader, PROPOSAL, payload))
            elif not self._take_request(pending.request_id, pending.command, now):
                self._proposals.retry_soon(pending.request_id, now)

    def _take_request(self, request_id: str, encoded: bytes, now: float) -> bool:
        """As leader, append it. False: this node cannot, now. Raises BadFrame."""
        command = decode_command(encoded)
        if not self.is_leader:
            return False
        if request_id in self._in_log or self._state.outcome(request_id) is not None:
            return True
        data = encode_request(request_id, encoded)
        if isinstance(command, RemoveNode) and self._votes(command.node_id):
            if len(self._removals) < REMOVALS_MAX:
                self._removals[command.node_id] = Removal(request_id, encoded)
            return True
        if len(self._unwritten) >= UNWRITTEN_MAX or self._raft.propose(data, now) is None:
            return False
        self._in_log.add(request_id)
        return True

    def _votes(self, node_id: str) -> bool:
        return any(node_of(voter) == node_id for voter in self._raft.membership.voters)

    def _tend_members(self, now: float) -> None:
        raft, metadata = self._raft, self.metadata
        if metadata is None or not raft.may_change_members or raft.is_transferring:
            return
        for node_id, removal in self._removals.items():
            if not removal.is_in_log and not self._votes(node_id):
                removal.is_in_log = self._take_request(removal.request_id, removal.command, now)
        step = plan(
            raft.member,
            raft.membership,
            metadata.nodes,
            self._removals,
            partial(self._is_live, now),
        )
        if isinstance(step, HandOver):
            raft.transfer(step.member, now)
        elif step is not None:
            raft.change_members(step, now)

    def _is_live(self, now: float, member: str) -> bool:
        return self._raft.is_caught_up(member, now)

    def _drain(self, now: float) -> None:
        while (ready := self._raft.take_ready(now)) is not None:
            self._send_messages(ready.messages)
            if ready.installed is not None:
                self._state = _restored(ready.installed.data)
                self._entries_since_snapshot = self._bytes_since_snapshot = 0
                # Requests whose entries the snapshot covers.
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
        self._tell_metadata()
        self._tell_leader(now)
        # Everything that comes in ends here, and timers are asked for far more often.
        proposals = self._proposals
        when = proposals.timer() if self._raft.leader else proposals.expiry()
        self._due = min(self._raft.timer(), when)

    def _send_messages(self, messages: tuple[Addressed, ...]) -> None:
        for member, message in messages:
            payload = encode_message(self._raft.member, member, message)
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
            if removal.request_id != request_id
        }
        self._finish(request_id)

    def _finish(self, request_id: str) -> None:
        outcome = self._state.outcome(request_id)
        if outcome is not None:
            request = self._proposals.take(request_id)
            if request is not None:
                self._done.append(ProposalDone(request, outcome))

    def _compact(self) -> None:
        if (
            self._entries_since_snapshot >= COMPACT_ENTRIES
            or self._bytes_since_snapshot >= COMPACT_BYTES
        ):
            self._entries_since_snapshot = self._bytes_since_snapshot = 0
            self._raft.compact(self._state.encode())

    def _tell_metadata(self) -> None:
        metadata = self._state.metadata
        if metadata is not None and metadata is not self._known:
            self.effects.append(MetadataChanged(metadata, changed_since(self._known, metadata)))
            self._known = metadata
        # Whoever learns that its change was accepted finds it in the metadata.
        self.effects += self._done
        self._done = []

    def _tell_leader(self, now: float) -> None:
        told = LeaderChanged(self.leader_id, self.is_leader)
        if told == self._told:
            return
        self._told = told
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

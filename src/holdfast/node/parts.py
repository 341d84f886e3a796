"""Makes and connects the parts of a cluster node."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.admission.control import UserSessions
from holdfast.node.context import ClusterContext
from holdfast.node.disk_full import DiskSpace
from holdfast.node.failure.cluster_clock import ClusterClock
from holdfast.node.failure.detector import Detector, DetectorConfig
from holdfast.node.failure.health import Presence
from holdfast.node.feeds.feeds import Feeds
from holdfast.node.feeds.stored_partitions import StoredPartitions
from holdfast.node.groups.assignments import AgentContext
from holdfast.node.groups.groups import Groups
from holdfast.node.metadata.commands import ChangePartitions
from holdfast.node.metadata.history import ClusterHistory
from holdfast.node.metadata.model import DATA
from holdfast.node.metadata.store import MetaStore
from holdfast.node.node import Node
from holdfast.node.node_state import NodeState
from holdfast.node.older_copies import OlderCopies
from holdfast.node.ownership.acquisition import SessionAcquisition
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.lease import OwnershipLease
from holdfast.node.placement.controller import ControllerConfig
from holdfast.node.publish.admission import Admission
from holdfast.node.publish.apply import Applier, ApplyingLog
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.leader_sync import LeaderSync
from holdfast.node.publish.local_commit import LocalCommit
from holdfast.node.publish.retained_updates import RetainedUpdates
from holdfast.node.reads.fetch_server import FetchServer
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import NOTHING, MetadataReads
from holdfast.node.reads.remote_reads import RemoteReads
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.disk_position import DiskMemory
from holdfast.node.replicate.replication import Replication
from holdfast.node.routing.qos0_routing import Qos0Routing
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.transfer import Transfer
from holdfast.protocol.topics.names import QUEUE_SHARE

_QUEUE: Final = QUEUE_SHARE.encode()


@dataclass(frozen=True)
class ClusterNodeConfig:
    """The configuration of the parts of a cluster node."""

    detector: DetectorConfig
    controller: ControllerConfig
    replication: ReplicationConfig
    role: str = DATA
    """The role of the node in the metadata."""
    drain_clients_per_s: float = 0.0
    """The clients a second that a node sends to others when it is drained or stops; 0: all at
    once."""


class Parts:
    """The parts of a cluster node. The constructor creates and connects them; ClusterNode drives
    them."""

    def __init__(
        self,
        node: Node,
        replicated: ReplicatedState,
        meta: MetaStore,
        presence: Presence,
        config: ClusterNodeConfig,
        random: Callable[[], float],
        now: float,
        *,
        lacking: Iterable[int] = (),
        unstored: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`node`: the broker's core, without sessions. `replicated`: the replicated state,
        recovered up to the journal's high watermarks except for the partitions `lacking`. `random`
        returns from 0 to below 1. `unstored`: the partitions whose log does not reach the state
        here, or is forgotten, and the first record that the state lacks."""
        self.node = node
        self.state: NodeState = node.state
        self.replicated = replicated
        self.meta = meta
        self.history = ClusterHistory()
        self.disk_memory, self.clock = DiskMemory(), ClusterClock(meta.node_id)
        self.presence, self.config = presence, config
        self.log = ApplyingLog(node.state.journal)
        self.context = ClusterContext(meta.node_id, node.state.journal, config.role)
        self.context.unstored.update(unstored)
        self.context.reaches_majority, self.context.majority_at = meta.has_majority, now
        replication = replace(config.replication, suspends_restarted=True)
        self.replication = Replication(meta.node_id, self.log, replication)
        self.detector = Detector(meta.node_id, presence, config.detector, now)
        state, context = self.state, self.context
        self.admission = Admission(state, context, replicated, self.replication.may_append)
        self.forwarding = RecordForwarder(state, context, self.admission)
        self.admission.forwarding = self.forwarding
        self.alignment = LeaderSync(context, self.forwarding, self.replication)
        self.metadata_reads = MetadataReads(self._propose_nothing)
        self.older_copies = OlderCopies(self.metadata_reads)
        self.barriers = Barriers(state, context, self.metadata_reads)
        changes = self.admission.changes_session
        sessions = SessionCoordinator(state, context, replicated, self.barriers, changes)
        self.session_coordinator = sessions
        self.acquisition = SessionAcquisition(state, context, sessions, self.barriers)
        updates = self.retained_updates = RetainedUpdates(state)
        self.interest = Qos0Routing(state, context, updates, self.forwarding.promises)
        agents = AgentContext(state, context, self.forwarding, replicated, self._after_newest)
        self.groups = Groups(agents, self.barriers)
        suspect_s = config.detector.suspect_s
        sessions.releases.wait_s = max(sessions.releases.wait_s, 2 * suspect_s)
        self.ownership = OwnershipLease(
            state,
            context,
            self.barriers,
            self.detector.acknowledged_at,
            lambda: meta.leader_id,
            lambda: bool(self.acquisition.asking),
            suspect_s,
            now,
        )
        self.applier = Applier(
            state,
            replicated,
            self.log,
            self.forwarding.pending,
            self.forwarding.settle,
            self._session_applied,
            updates.applied,
        )
        self.local = LocalCommit(state, self.admission, self.forwarding, self.applier)
        self.transfer = Transfer(state, context, replicated, self.applier)
        self.space = DiskSpace(context, self.replication, self.transfer)
        self.feeds = Feeds(state, context, self.log, self.applier, self.forwarding, self.interest)
        self._share_state()
        self.stored_partitions = self._begin_storing(unstored)
        self._lack(lacking if context.has_data else range(len(context.leading)))
        self._seed_numbers(random)
        self._start(now)

    def _begin_storing(self, unstored: Mapping[int, int]) -> StoredPartitions:
        """Goes on with the partitions that the log here does not have up to their state."""
        stored = StoredPartitions(
            self.context,
            self.applier,
            self.replication,
            self.alignment,
            self.transfer,
            self.space,
            self.feeds,
        )
        homes = self.groups.coordinator.homes
        homes.announce = self.feeds.announce_group
        stored.announce_groups = homes.announce_all
        self.context.copied = self.log.fed
        stored.begin(unstored)
        return stored

    def _lack(self, partitions: Iterable[int]) -> None:
        """Waits for the replicated state of these partitions."""
        for partition in partitions:
            self.replication.suspend(partition)
            self.transfer.missing.add(partition)
        self.context.is_whole = self.transfer.is_whole

    def _start(self, now: float) -> None:
        """The first step of the class that drives the parts, once they are connected."""

    def _seed_numbers(self, random: Callable[[], float]) -> None:
        """Begins the tickets and request numbers at random, apart from those of an earlier process
        of this node."""
        self.forwarding.begin_at(int(random() * (1 << 31)))
        self.acquisition.seed_ids_at(int(random() * (1 << 52)))
        self.remote_reads.seed_ids_at(int(random() * (1 << 52)))

    def _share_state(self) -> None:
        """Lets the broker's core and the replicated state use the same objects."""
        reads = self.remote_reads = RemoteReads(self.node, self.context, self._has_log)
        self.state.has_whole_log = self.remote_reads.has_whole_log
        self.state.lake_wait = lambda session: reads.lake.wait_of((session, session.connection))
        tokens = self.replication.read_tokens
        self.fetch_server = FetchServer(
            self.state, self.context, tokens, self.transfer, self._has_log
        )
        self.feeds.connect(self.alignment, self.acquisition, self.transfer)
        self.barriers.fed_since = self.feeds.receiver.since
        self.applier.followed = self.interest.followers
        self.applier.release_followers = self.interest.release_followers
        recorded = self.state.recorded = self.replicated.state
        self.state.retained = recorded.retained
        self.state.producers = recorded.producers
        recorded.bans.watch = self.state.bans.watch
        self.state.bans = recorded.bans
        self.state.delayed = recorded.delayed
        recorded.stats = self.state.stats
        recorded.repeats = self.state.repeats
        recorded.delivered = self.state.delivered

    def _has_log(self, partition: int) -> bool:
        """Whether the log here has all records that are applied. One that is copied has not yet."""
        return self.context.is_stored(partition) and partition not in self.log.fed

    def _after_newest(self, partition: int, do: Callable[[], None]) -> None:
        if self.context.is_alone:
            self.local.after_newest(partition, do)
        else:
            self.forwarding.after_newest(partition, do)

    def _propose_nothing(self, now: float) -> int:
        return self.meta.propose(ChangePartitions(()), now) if self.meta.leader_id else NOTHING

    def _count_session(self, users: UserSessions, client_id: str) -> None:
        """Counts a session for its user that is connected nowhere, or elsewhere."""
        recorded = self.replicated.state
        session = recorded.sessions.get(client_id)
        if client_id not in self.state.sessions and client_id not in recorded.queues:
            users.assign(client_id, None if session is None else session.username)

    def _session_applied(self, record: Record) -> None:
        """Passes on an applied SESSION record or will. A cursor concerns its session alone."""
        if record.kind == log_record.SESSION:
            self.session_coordinator.applied(record)
            self.acquisition.live.session_changed(record)
            if record.client_id.startswith(_QUEUE):
                self.groups.coordinator.queue_changed(record.client_id.decode())
            if self.state.admission.users is not None:
                self._count_session(self.state.admission.users, record.client_id.decode())
        elif record.kind != log_record.CURSOR:
            self.session_coordinator.will_applied(record)

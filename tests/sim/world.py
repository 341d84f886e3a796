"""A run: a cluster is made, clients work with it while things go wrong, everything is well again,
and in the end nothing may be missing."""

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.node.config import NodeConfig
from holdfast.node.failure.cluster_clock import TOLERANCE_S
from holdfast.node.metadata.model import DATA, GATEWAY, WITNESS, ClusterMetadata
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.metadata.store import MetaStore
from tests.sim.casts import LOG, parties
from tests.sim.checks import Checks
from tests.sim.faults import LAG, RESIZE, SEVER, SKEW, SKEW_MAX_S, WRONG_CLOCK, Faults
from tests.sim.host import Host
from tests.sim.invariants import check_invariants
from tests.sim.network import Network
from tests.sim.schedule import Schedule, Violation
from tests.sim.watching import ImagesWatch, OwnersWatch
from tests.sim.workload import Publisher

QUIET_S = 1.5
"""So long nothing goes wrong and nothing changes, so that everything sent must arrive."""
ARRIVE_S = 0.5
"""Then everything has arrived."""
ARRIVE_GATHERED_S = 2.0
"""The same where records wait for others: a group delivers a window of messages in two such waits,
so what is published in the quiet is a backlog at its end."""
ALONE_S = 1.0
"""So long clients publish while one node is away."""
GOES_ON_S = 10.0
"""Then all of it is acknowledged."""
HANGS_S = 60.0
SLOW_S = 0.1
"""No disk that is well takes so long."""
"""Longer than that."""

Missing = Callable[[], str]
"""What is still to come; "": nothing."""


@dataclass(frozen=True)
class Settings:
    nodes: int = 3
    partitions: int = 4
    replication_factor: int = 3
    min_insync: int = 2
    has_witness: bool = False
    """The last node has no data, but votes."""
    gateways: int = 0
    """Further nodes, which have clients and no data."""
    zones: int = 0
    """So many zones, which the nodes are in by turns; 0: no node has a zone."""
    casts: tuple[str, ...] = (LOG,)
    """What the clients do; see `casts`."""
    faults: tuple[str, ...] = ()
    mean_s: float = 1.0
    """Between two faults."""
    duration_s: float = 6.0
    """Of the work, with faults."""
    ready_within_s: float = 10.0
    settled_within_s: float = 30.0
    """After everything is well again: liveness."""
    turn_s: float = 0.001
    """What arrives so long after the first is dealt with in one turn, at most."""
    segment_bytes: int = 64 << 10
    allocate_bytes: int = 0
    snapshot_s: float = 3.0
    reserve_bytes: int = 0
    """Of each disk, below which QoS 1 and 2 are refused."""
    retention_bytes: int = 0
    """Of the log on each disk, looked at after a snapshot; 0: everything stays."""
    outbox_messages: int = 30
    replace_after_s: float = 10.0
    disk_stall_s: float = 1.0
    skew_s: float = 1.0
    """Of the nodes' wall clocks from the true time, at most."""
    slice_steps: int = 0
    """The most that is applied, closed or looked up in one turn; 0: as in production."""
    loses_one: bool = False
    """In the end, all being well, one node or its disk goes, and the others must go on."""
    durable: bool = True
    """A record is on disk before it counts. Otherwise it counts once it is in the file."""
    gathers: bool = False
    """Records may wait for others before a sync, on leaders and followers (`GATHER_S`)."""
    reads_remotely: bool = False
    """Each node reads a part of the partitions at other nodes, as if it did not store them."""
    begins_alone: bool = False
    """Only the first node runs when the work begins. The others join during it."""

    def role_of(self, number: int) -> str:
        """The role of the node with this number, from 0."""
        if number >= self.nodes:
            return GATEWAY
        return WITNESS if self.has_witness and number == self.nodes - 1 else DATA

    @property
    def is_resized(self) -> bool:
        """Whether an operator changes the replication."""
        return RESIZE in self.faults

    def replication(self, data_nodes: int) -> tuple[int, int]:
        """The replication factor and `min_insync` of a cluster with so many data nodes."""
        factor = min(self.replication_factor, data_nodes)
        return factor, min(self.min_insync, factor)


def _term(meta: MetaStore) -> int:
    return meta.term


class World:
    def __init__(self, seed: int, settings: Settings, schedule: Schedule | None = None) -> None:
        self.settings = settings
        self.cpu_clock: Callable[[], float] | None = None
        """The CPU time so far, in seconds, which is charged as simulated time of the host that used
        it. The run then depends on the machine, and its seed does not repeat it exactly."""
        self.schedule = schedule or Schedule(seed)
        self.client_chance = self.schedule.chance("clients")
        self.checks = self._new_checks()
        self.images_watch = ImagesWatch(self)
        self.owners_watch = OwnersWatch(self)
        self.network = Network(self.schedule)
        self.hosts: dict[str, Host] = {}
        for number in range(settings.nodes + settings.gateways):
            role = settings.role_of(number)
            name = f"n{number + 1}" if role != GATEWAY else f"g{number - settings.nodes + 1}"
            host = self._new_host(name, number == 0, role)
            self.hosts[host.name] = host
            self.network.add(host)
        self.faults = Faults(self, settings.faults, settings.mean_s)
        self.is_quiet = False
        self.parties = parties(self)

    def _new_checks(self) -> Checks:
        return Checks(self, self.settings.partitions)

    def _new_host(self, name: str, creates_cluster: bool, role: str) -> Host:
        return Host(self, name, creates_cluster, role)

    def node_config(self, name: str) -> NodeConfig:
        return NodeConfig(
            node_id=name,
            partitions=self.settings.partitions,
            sys_interval_s=0,
            outbox_messages=self.settings.outbox_messages,
            inflight_max=8,
        )

    @property
    def skew_s(self) -> float:
        """How far two wall clocks may ever have been apart."""
        faults = self.settings.faults
        if WRONG_CLOCK in faults:
            # Only by what the nodes do not agree on.
            return self.settings.skew_s * 2 + 2 * TOLERANCE_S
        return SKEW_MAX_S * 2 if SKEW in faults else self.settings.skew_s * 2

    @property
    def data_hosts(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.role == DATA]

    @property
    def client_hosts(self) -> list[Host]:
        return [host for host in self.hosts.values() if not host.is_witness]

    def run(self) -> None:
        """Raises Violation, or whatever a node raised."""
        settings = self.settings
        late = [*self.hosts.values()][1:] if settings.begins_alone else []
        for host in self.hosts.values():
            if host not in late:
                self.schedule.after(host.chance.random() * 0.3, host.start)
        self._wait(settings.ready_within_s, self._not_ready, "not ready")
        for host in late:
            self.schedule.after(host.chance.random() * settings.duration_s, host.start)
        self.schedule.note("world", "ready")
        for party in self.parties:
            party.is_active = True
        self.owners_watch.begin()
        self.faults.begin()
        self.schedule.run(settings.duration_s)
        self._calm()
        self.faults.end()
        for party in self.parties:
            party.is_active = False
        self._wait(settings.settled_within_s, self._not_settled, "not settled")
        self._be_quiet()
        if settings.loses_one:
            self._lose_one()
        for host in self.hosts.values():
            if host.process is not None:
                check_invariants(host.process)
        self.checks.same_images()
        self.checks.same_sessions()
        self.checks.sessions.check(self.skew_s)
        for party in self.parties:
            party.check()
        self.schedule.note("world", "done")

    def _calm(self) -> None:
        """While faults last, and all else is well, everything published is acknowledged.

        Of two nodes with data, one that lags leaves one replica, and the lost link of two nodes
        leaves no majority. What is published meanwhile waits then, and a client may wait for its
        session.
        """
        settings = self.settings
        lasting = {SEVER, LAG} & {*settings.faults}
        if not lasting:
            return
        self.faults.calm()
        publishers = [party for party in self.parties if isinstance(party, Publisher)]
        for publisher in publishers:
            publisher.is_active = False

        def unsettled() -> str:
            return next(filter(None, (each.unsettled() for each in publishers)), "")

        follow = len(self.data_hosts) - (LAG in lasting)
        is_split = SEVER in lasting and len(self.hosts) == 2
        if follow >= settings.min_insync and not is_split:
            self._wait(GOES_ON_S, unsettled, "not settled while a fault lasts")
        else:
            self.schedule.run(GOES_ON_S)

    def _be_quiet(self) -> None:
        self.schedule.note("world", "quiet")
        self.is_quiet = True
        self.schedule.run(QUIET_S)
        self.is_quiet = False
        self.schedule.run(ARRIVE_GATHERED_S if self.settings.gathers else ARRIVE_S)
        for party in self.parties:
            party.check_quiet()
        self._wait(self.settings.settled_within_s, self._not_settled, "not settled after the quiet")

    def _lose_one(self) -> None:
        chance = self.schedule.chance("loses")
        host = chance.choice(list(self.hosts.values()))
        if chance.random() < 0.4:
            host.hang(HANGS_S)
        else:
            host.kill(power=chance.random() < 0.5)
        publishers = [party for party in self.parties if isinstance(party, Publisher)]
        for publisher in publishers:
            publisher.is_active = True
        self.schedule.run(ALONE_S)
        for publisher in publishers:
            publisher.is_active = False

        def unsettled() -> str:
            return next(filter(None, (each.unsettled() for each in publishers)), "")

        self._wait(GOES_ON_S, unsettled, f"not settled without {host.name}")
        host.unhang()
        host.start()
        self._wait(self.settings.settled_within_s, self._not_settled, "not settled again")

    def _wait(self, limit_s: float, what_is_missing: Missing, name: str) -> None:
        deadline = self.schedule.now + limit_s
        while True:
            self.schedule.run(0.25)
            missing = what_is_missing()
            if not missing:
                return
            if self.schedule.now > deadline:
                raise Violation(f"{name} after {limit_s} s: {missing}")

    def _not_ready(self) -> str:
        alone = self.settings.begins_alone
        for host in [*self.hosts.values()][: 1 if alone else None]:
            if host.process is None or not host.process.is_ready:
                return f"{host.name} is not ready"
            if not alone and len(host.process.links) < len(self.hosts) - 1:
                return f"{host.name} has links to {list(host.process.links)} only"
        for party in self.parties:
            if not party.is_ready():
                return f"{party.client.name} has not subscribed"
        return "" if alone or self.is_in_sync() else "replicas are not in sync"

    def _not_settled(self) -> str:
        for party in self.parties:
            waiting = party.unsettled()
            if waiting:
                return waiting
        for host in self.hosts.values():
            if host.process is None or len(host.process.links) < len(self.hosts) - 1:
                return f"{host.name} is not connected with all others"
            if not host.process.cluster_node.meta.has_majority(host.process.state.now):
                return f"{host.name} reaches no majority"
            if host.busy_until > self.schedule.now + SLOW_S:
                return f"the disk of {host.name} still does what it began while it was slow"
        metadata = self.newest_metadata()
        if self.settings.is_resized and metadata is not None:
            in_force = (metadata.replication_factor, metadata.min_insync)
            if in_force != self.settings.replication(len(self.data_hosts)):
                return f"the replication is {in_force}, wanted {metadata.wanted_replication}"
            if not self.is_in_sync():
                return "replicas are not in sync"
        return self.checks.at_rest()

    def check_voters_without(self, gone: Host) -> None:
        """When a node gives up its Raft peer by a decision of its own. Counter-example: the leader
        has just made it a fourth voter, another one's disk is gone too, and two are no majority."""
        members = [
            host.process.cluster_node.meta
            for host in self.hosts.values()
            if host.process is not None and host is not gone
        ]
        leader = max((meta for meta in members if meta.is_leader), key=_term, default=None)
        if leader is None:
            return
        membership = leader.membership
        left = {
            peer_id(host.name, host.incarnation) for host in self.hosts.values() if host is not gone
        }
        if len(left.intersection(membership.voters)) < membership.majority:
            self.checks.fail(f"{gone.name} begins anew, and of {membership.voters} {left} are left")

    def is_in_sync(self) -> bool:
        """Every partition has all its replicas in sync, by the newest metadata of any node."""
        newest = self.newest_metadata()
        if newest is None or any(host.process is None for host in self.hosts.values()):
            return False
        factor = min(self.settings.replication_factor, len(self.data_hosts))
        return all(info.leader and len(info.in_sync) >= factor for info in newest.partitions)

    def newest_metadata(self) -> ClusterMetadata | None:
        """That any running node knows."""
        newest = None
        for host in self.hosts.values():
            if host.process is None:
                continue
            metadata = host.process.cluster_node.context.metadata
            if metadata is not None and (newest is None or metadata.version > newest.version):
                newest = metadata
        return newest

"""A run: a cluster is made, clients work with it while things go wrong, everything is well again,
and in the end nothing may be missing."""

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.sim.checks import Checks
from holdfast.sim.faults import Faults
from holdfast.sim.host import Host
from holdfast.sim.network import Network
from holdfast.sim.schedule import Schedule, Violation
from holdfast.sim.workload import Retainer, parties

Missing = Callable[[], str]
"""What is still to come; "": nothing."""


@dataclass(frozen=True)
class Settings:
    nodes: int = 3
    partitions: int = 4
    replication_factor: int = 3
    min_insync: int = 2
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
    retention_bytes: int = 0
    """Of the log on each disk, looked at after a snapshot; 0: everything stays."""
    outbox_messages: int = 30
    replace_after_s: float = 10.0


class World:
    def __init__(self, seed: int, settings: Settings) -> None:
        self.settings = settings
        self.schedule = Schedule(seed)
        self.client_chance = self.schedule.chance("clients")
        self.checks = Checks(self, settings.partitions)
        self.network = Network(self.schedule)
        self.hosts: dict[str, Host] = {}
        for number in range(settings.nodes):
            host = Host(self, f"n{number + 1}", number == 0)
            self.hosts[host.name] = host
            self.network.add(host)
        self.faults = Faults(self, settings.faults, settings.mean_s)
        self.parties = parties(self)

    def run(self) -> None:
        """Raises Violation, or whatever a node raised."""
        settings = self.settings
        for host in self.hosts.values():
            self.schedule.after(host.chance.random() * 0.3, host.start)
        self._wait(settings.ready_within_s, self._not_ready, "not ready")
        self.schedule.note("world", "ready")
        for party in self.parties:
            party.is_active = True
        self.faults.begin()
        self.schedule.run(self.schedule.now + settings.duration_s)
        self.faults.end()
        for party in self.parties:
            party.is_active = False
        self._wait(settings.settled_within_s, self._not_settled, "not settled")
        self.checks.same_images()
        self.checks.same_sessions()
        for party in self.parties:
            if isinstance(party, Retainer):
                party.check()
        self.schedule.note("world", "done")

    def _wait(self, limit_s: float, what_is_missing: Missing, name: str) -> None:
        deadline = self.schedule.now + limit_s
        while True:
            self.schedule.run(self.schedule.now + 0.25)
            missing = what_is_missing()
            if not missing:
                return
            if self.schedule.now > deadline:
                raise Violation(f"{name} after {limit_s} s: {missing}")

    def _not_ready(self) -> str:
        for host in self.hosts.values():
            if host.process is None or not host.process.is_ready:
                return f"{host.name} is not ready"
        for party in self.parties:
            if not party.client.is_subscribed:
                return f"{party.client.name} has not subscribed"
        return "" if self.is_in_sync() else "replicas are not in sync"

    def _not_settled(self) -> str:
        for party in self.parties:
            waiting = party.unsettled()
            if waiting:
                return waiting
        return self.checks.at_rest()

    def is_in_sync(self) -> bool:
        """Every partition has all its replicas in sync, by the newest metadata of any node."""
        newest = None
        for host in self.hosts.values():
            if host.process is None:
                return False
            metadata = host.process.member.fabric.metadata
            if metadata is not None and (newest is None or metadata.version > newest.version):
                newest = metadata
        if newest is None:
            return False
        factor = min(self.settings.replication_factor, len(self.hosts))
        return all(info.leader and len(info.in_sync) >= factor for info in newest.partitions)

"""A node of tests/support/sim_replication.py: the production's core, its disk, its turns."""

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Protocol

from msgspec.structs import replace

from holdfast.node.frame_kinds import BadFrame
from holdfast.node.metadata.model import ClusterMetadata
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.effects import (
    BecameLeader,
    Broken,
    Committed,
    Diverged,
    ProposeInSync,
    ReadBatches,
    ReplicationEffect,
    Send,
)
from holdfast.node.replicate.replication import Replication
from tests.sim.schedule import Wrong
from tests.support.sim_replica_links import Link
from tests.support.sim_replica_log import ReplicaDisk, SimReplicaLog


class Surroundings(Protocol):
    """The world, as a node needs it."""

    random: Random
    config: ReplicationConfig
    history: list[ClusterMetadata]
    now: float
    seen: Counter[str]

    def after(self, delay_s: float, work: Callable[[], object]) -> None: ...
    def link(self, one: str, other: str) -> Link: ...
    def propose(self, node: "SimNode", effect: ProposeInSync) -> None: ...
    def committed(self, node: "SimNode", partition: int, offset: int) -> None: ...
    def became_leader(self, node: "SimNode", partition: int, epoch: int) -> None: ...


class SimNode:
    def __init__(self, world: Surroundings, name: str, partitions: int) -> None:
        self.world = world
        self.name = name
        self.disk = ReplicaDisk(partitions)
        self.incarnation = f"{name}x0"
        self.life = 0
        self.is_alive = False
        self.is_paused = False
        self.is_isolated = False
        self.is_registered = True
        self.sync_s = 0.002
        self.seen = 0

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.is_alive = True
        self.is_paused = False
        self.held: deque[Callable[[], None]] = deque()
        self.log = SimReplicaLog(self.disk)
        config = replace(world.config, incarnation=self.incarnation)
        self.core = Replication(self.name, self.log, config)
        self.is_syncing = False
        self.timer_at: float | None = None
        latest = len(world.history) - 1
        self.current_from = latest
        self.is_current = False
        self.seen = max(0, latest - world.random.choice((0, 0, 1, 3, 10)))
        self.do(lambda: self.core.handle_metadata(world.history[self.seen], (), world.now))
        self.poll()

    def stop(self) -> None:
        self.is_alive = False
        self.life += 1

    def do(self, step: Callable[[], None]) -> None:
        """One turn of the node's loop."""
        if not self.is_alive:
            return
        if self.is_paused:
            self.held.append(step)
            return
        step()
        self._carry_out()
        built = self.log.take()
        if built:
            self.core.handle_taken(built, self.world.now)
            self._carry_out()
        self._sync()
        self._arm()
        self.core.check()

    def later(self, delay: float, step: Callable[[], None]) -> None:
        life = self.life

        def run() -> None:
            if self.life == life:
                self.do(step)

        self.world.after(delay, run)

    def resume(self) -> None:
        self.is_paused = False
        held, self.held = self.held, deque()
        for step in held:
            self.do(step)

    def poll(self) -> None:
        """See newer metadata now and then."""
        world = self.world
        life = self.life

        def look() -> None:
            if self.life != life:
                return
            latest = len(world.history) - 1
            if not self.is_isolated and self.seen < latest:
                version = world.random.randint(self.seen + 1, latest)
                self.do(lambda: self._see(version))
            if not self.is_current and self.seen >= self.current_from:
                self.is_current = True
                self.do(lambda: self.core.handle_current(world.now))
            self.poll()

        world.after(world.random.choice((0.005, 0.02, 0.1)), look)

    def _see(self, version: int) -> None:
        if version <= self.seen:
            return
        before = self.world.history[self.seen].partitions
        metadata = self.world.history[version]
        self.seen = version
        changed = [n for n, info in enumerate(metadata.partitions) if info != before[n]]
        self.core.handle_metadata(metadata, changed, self.world.now)

    def connected(self, other: str) -> None:
        self.core.handle_connected(other, self.world.now)

    def disconnected(self, other: str) -> None:
        self.core.handle_disconnected(other, self.world.now)

    def received(self, other: str, kind: int, payload: bytes) -> None:
        try:
            self.core.handle_frame(other, kind, payload, self.world.now)
        except BadFrame as error:
            raise Wrong(f"{self.name} refuses a frame of {other}: {error}") from error

    def _sync(self) -> None:
        count = len(self.disk.entries)
        if self.is_syncing or self.disk.synced == count:
            return
        self.is_syncing = True

        def synced() -> None:
            self.is_syncing = False
            self.log.synced(count)
            self.core.handle_durable(self.world.now)

        self.later(self.sync_s * self.world.random.uniform(0.5, 2.0), synced)

    def _arm(self) -> None:
        due = self.core.timer()
        if due is None or (self.timer_at is not None and self.timer_at <= due):
            return
        self.timer_at = due

        def fire() -> None:
            self.timer_at = None
            self.core.handle_timers(self.world.now)

        self.later(max(0.0, due - self.world.now) + 0.001, fire)

    def _carry_out(self) -> None:
        while self.core.effects:
            effects, self.core.effects = self.core.effects, []
            for effect in effects:
                self._effect(effect)

    def _effect(self, effect: ReplicationEffect) -> None:
        world = self.world
        world.seen[type(effect).__name__] += 1
        if isinstance(effect, Send):
            payload = effect.payload
            data = payload if isinstance(payload, bytes) else b"".join(payload)
            world.link(self.name, effect.node).send(self.name, effect.kind, data, world.now)
        elif isinstance(effect, ReadBatches):
            read = effect

            def answer() -> None:
                found = self.log.read(read.partition, read.start, read.bytes_max)
                self.core.handle_batches(read.request, found, world.now)

            self.later(world.random.choice((0.001, 0.01)), answer)
        elif isinstance(effect, ProposeInSync):
            world.propose(self, effect)
        elif isinstance(effect, Committed):
            world.committed(self, effect.partition, effect.offset)
        elif isinstance(effect, BecameLeader):
            world.became_leader(self, effect.partition, effect.epoch)
        elif isinstance(effect, (Broken, Diverged)):
            raise Wrong(f"{self.name}: partition {effect.partition} {effect.text}")

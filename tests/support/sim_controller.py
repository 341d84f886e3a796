"""A cluster seen from its controller: real metadata and real commands; the nodes are truth tables.

Nodes die, come back, lose their disks, join, drain and are removed. Partition leaders bring
followers into their in-sync sets and shrink them; proposals take time, get lost, come twice and
come in another order. What a controller sees of the nodes comes late, and may be wrong for a while.

`have` counts the records of a partition on each disk, `committed` how many of them were promised:
an in-sync set that does its work keeps every promise through any of this.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec.structs import replace

from holdfast.node.failure.health import Health, Presence
from holdfast.node.metadata import operations
from holdfast.node.metadata.commands import (
    ChangePartitions,
    Command,
    InitCluster,
    PutNode,
    PutPlacement,
    SetReplication,
    apply,
)
from holdfast.node.metadata.model import (
    DATA,
    NOT_PLACED,
    WITNESS,
    ClusterMetadata,
    NodeInfo,
    NodePhase,
    NodeTraits,
    PartitionInfo,
)
from holdfast.node.placement.controller import Controller, ControllerConfig
from holdfast.node.placement.shares import NodeShares
from tests.sim.schedule import Wrong

CONFIG: Final = ControllerConfig(
    replace_after_s=4.0, balance_after_s=1.0, moves_max=6, leader_moves_max=3
)
TICK_S: Final = 0.1


def node_info(node: str, incarnation: str = "i1", role: str = DATA) -> NodeInfo:
    return NodeInfo(node, incarnation, f"{node}:1", f"{node}:2", f"{node}:3", role)


@dataclass
class SimNode:
    info: NodeInfo
    is_alive: bool = True
    incarnation: str = "i1"
    is_leaving: bool = False
    is_stalled: bool = False
    """Its disk does not answer, and it says so."""
    is_damaged: bool = False
    """And likewise that its log is."""

    def presence(self) -> Presence:
        info = self.info
        return Presence(
            self.incarnation, info.peer_address, info.client_address, info.admin_address
        )


@dataclass(order=True)
class Flight:
    at: float
    order: int
    command: Command = field(compare=False)
    done: Callable[[float], None] | None = field(compare=False, default=None)


class ControllerWorld:
    def __init__(
        self,
        seed: int,
        partitions: int = 12,
        replication_factor: int = 3,
        min_insync: int = 1,
        config: ControllerConfig = CONFIG,
        delay_max_s: float = 0.25,
        loss: float = 0.1,
    ) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.now = 0.0
        self.delay_max_s = delay_max_s
        self.loss = loss
        self.nodes = {"n1": SimNode(node_info("n1"))}
        self.witnesses: set[str] = set()
        init = InitCluster("c", partitions, replication_factor, min_insync, node_info("n1"))
        made = apply(None, init).metadata
        assert made is not None
        self.metadata: ClusterMetadata = made
        self.have = [Counter({"n1": 1}) for _ in range(partitions)]
        self.committed = [1] * partitions
        self.counting: dict[tuple[int, int], set[str]] = {}
        """By partition and version of its entry: who was proposed to be in sync there. Everything
        waits for them as if they were, since the proposal may still come through."""
        self.leaders: dict[tuple[int, int], str] = {
            (number, 1): "n1" for number in range(partitions)
        }
        self.controllers = [Controller("n1", config)]
        """The last one is the Raft leader's; others do not know yet that they are deposed."""
        self.stale: list[ClusterMetadata] = []
        self.health = Health({"n1": self.nodes["n1"].presence()})
        self.flights: list[Flight] = []
        self.order = 0
        self.is_rough = True
        self.is_resized = seed % 2 == 0
        """Whether operators change its replication."""
        self.zones = random.Random(f"zones/{seed}").choice((0, 0, 2, 3, 4))
        """The number of zones of the nodes; 0: none has one."""
        self.added = 0
        """Replicas that began to be added."""
        self.leader_changes = 0
        self.refused: Counter[str] = Counter()
        self.commands: list[Command] = []
        self.trace: list[str] = []

    # What happens to nodes.

    def join(self, node: str, role: str = DATA) -> None:
        self.nodes[node] = SimNode(node_info(node, role=role))
        if role == WITNESS:
            self.witnesses.add(node)
        self.propose(PutNode(self.nodes[node].info, 0), is_safe=True)
        self.trace.append(f"{self.now:.1f} join {node}")

    def kill(self, node: str) -> None:
        self.nodes[node].is_alive = False
        self.trace.append(f"{self.now:.1f} kill {node}")

    def hang(self, node: str) -> None:
        """Its disk."""
        self.nodes[node].is_stalled = True
        self.trace.append(f"{self.now:.1f} hang {node}")

    def start(self, node: str) -> None:
        self.nodes[node].is_alive = True
        self.nodes[node].is_leaving = False
        self.trace.append(f"{self.now:.1f} start {node}")

    def wipe(self, node: str) -> None:
        """Restarted with an empty disk."""
        sim = self.nodes[node]
        sim.is_alive = True
        sim.incarnation = f"i{int(sim.incarnation[1:]) + 1}"
        for have in self.have:
            have.pop(node, None)
        self.trace.append(f"{self.now:.1f} wipe {node}")

    def depose(self, is_noticed: bool) -> None:
        """Another Raft leader, with a controller of its own."""
        if is_noticed:
            self.controllers.clear()
            self.stale.clear()
        else:
            self.stale.append(self.metadata)
        self.controllers.append(Controller("other", self.config))
        del self.controllers[:-2]
        del self.stale[:-1]

    def operate(
        self, operation: Callable[[ClusterMetadata, str], Command | None], node: str
    ) -> bool:
        try:
            command = operation(self.metadata, node)
        except operations.OperationError:
            return False
        if command is not None:
            self.propose(command, is_safe=True)
            self.trace.append(f"{self.now:.1f} {operation.__name__} {node}")
        return command is not None

    def resize(self) -> None:
        """To some other replication that the cluster can have, or one that follows its nodes."""
        factor = self.random.randrange(5)
        least = self.random.randrange(factor + 1)
        is_automatic = self.random.random() < 0.4
        wanted = (0, 0) if is_automatic else (factor, least)
        try:
            command = operations.resize(self.metadata, *wanted, is_automatic=is_automatic)
        except operations.OperationError:
            return
        if command is not None:
            self.propose(command, is_safe=True)
            self.trace.append(f"{self.now:.1f} resize {wanted}")

    def announce(self) -> None:
        """The zones of all nodes become agreed, as the Raft leader proposes them."""
        if not self.zones:
            return
        found = tuple(
            NodeTraits(node, f"z{int(node[1:]) % self.zones}")
            for node in sorted(self.metadata.nodes)
            if node not in self.witnesses
        )
        placed = self.metadata.placement or NOT_PLACED
        if found != placed.traits:
            self.carry_out(PutPlacement(placed.version, found, placed.is_paused))

    # Time.

    def run(self, duration_s: float) -> None:
        end = self.now + duration_s
        while self.now < end:
            self.tick()

    def tick(self) -> None:
        self.now += TICK_S
        self.land()
        self.announce()
        self.replicate()
        self.look()
        for index, controller in enumerate(self.controllers):
            is_current = index == len(self.controllers) - 1
            metadata = self.metadata if is_current else self.stale[index]
            for command in controller.step(metadata, self.health, self.now):
                if is_current:
                    self.commands.append(command)
                    self.check_copies(command)
                    self.check_pause(command)
                self.propose(command, partial(controller.note_outcome, command))

    def propose(
        self,
        command: Command,
        done: Callable[[float], None] | None = None,
        is_safe: bool = False,
    ) -> None:
        copies = 1
        if self.is_rough and not is_safe and self.random.random() < self.loss:
            copies = self.random.choice([0, 2])
        for _ in range(copies):
            delay = self.random.uniform(0, self.delay_max_s) if self.is_rough else 0.0
            self.order += 1
            self.flights.append(Flight(self.now + delay, self.order, command, done))

    def land(self) -> None:
        due = sorted(flight for flight in self.flights if flight.at <= self.now)
        self.flights = [flight for flight in self.flights if flight.at > self.now]
        for flight in due:
            self.carry_out(flight.command)
            if flight.done is not None:
                flight.done(self.now)

    def carry_out(self, command: Command) -> None:
        before = self.metadata
        applied = apply(before, command)
        if applied.error:
            self.refused["late" if "at version" in applied.error else applied.error] += 1
            return
        assert applied.metadata is not None
        self.metadata = applied.metadata
        if isinstance(command, SetReplication) and self.metadata.min_insync > before.min_insync:
            least = self.metadata.min_insync
            if any(len(info.in_sync) < least for info in self.metadata.partitions):
                raise Wrong(f"min_insync {least} is refused where it is not met")
        is_forced = isinstance(command, ChangePartitions) and command.accept_loss
        for number in applied.changed_partitions:
            self.check(
                number, before.partitions[number], self.metadata.partitions[number], is_forced
            )

    def check(self, number: int, old: PartitionInfo, new: PartitionInfo, is_forced: bool) -> None:
        self.added += len(set(new.members) - set(old.members))
        if not new.leader:
            return
        if new.leader not in new.in_sync:
            raise Wrong(f"partition {number}: leader {new.leader} is not in sync: {new}")
        if self.leaders.setdefault((number, new.epoch), new.leader) != new.leader:
            raise Wrong(f"partition {number}: two leaders of epoch {new.epoch}")
        if self.witnesses.intersection(new.members):
            raise Wrong(f"partition {number}: a witness holds it: {new}")
        if is_forced:
            self.committed[number] = self.have[number][new.leader]
        for node in new.in_sync:
            # A node with another disk than the metadata knows takes no part until it says so.
            if self.nodes[node].incarnation != self.metadata.nodes[node].incarnation:
                continue
            if self.have[number][node] < self.committed[number]:
                raise Wrong(f"partition {number}: {node} is in sync and lacks records: {new}")
        if new.leader != old.leader:
            self.leader_changes += 1

    def check_copies(self, command: Command) -> None:
        """No move takes a live copy away before the new one is there."""
        if isinstance(command, SetReplication):
            self.check_step(command)
            return
        assert isinstance(command, ChangePartitions)
        present = self.health.present
        enough = min(self.metadata.replication_factor, len(self.eligible()))
        for number, _, new in command.changes:
            old = self.metadata.partitions[number]
            gone = {
                node
                for node in old.in_sync
                if node not in new.in_sync
                and node in present
                and node not in self.health.dead | self.health.stalled | self.health.damaged
                and present[node].incarnation == self.metadata.nodes[node].incarnation
            }
            if gone and len(new.in_sync) < enough:
                raise Wrong(f"partition {number}: {gone} leave too early: {old} to {new}")
            health = self.health
            absent = health.dead | health.stalled | health.full
            whole = {
                node
                for node in absent - health.damaged - set(new.in_sync)
                if node in old.in_sync
                and self.metadata.nodes[node].state != NodePhase.DRAINING
                and self.is_seen_with_its_disk(node)
            }
            if whole and len(new.in_sync) < self.metadata.min_insync:
                raise Wrong(f"partition {number}: {whole} may have the last copy: {old} to {new}")

    def check_pause(self, command: Command) -> None:
        """No copy begins while an operator has paused them."""
        if self.metadata.is_paused and isinstance(command, ChangePartitions):
            for number, _, new in command.changes:
                more = set(new.members) - set(self.metadata.partitions[number].members)
                if more:
                    raise Wrong(f"partition {number}: {more} begin while moves are paused")

    def check_step(self, command: SetReplication) -> None:
        """A step goes towards the wanted settings, copies first."""
        (factor, least), (new_factor, new_least) = command.expected, command.settings
        wanted_factor, wanted_least = self.metadata.wanted_replication
        copies = min(len(info.in_sync) for info in self.metadata.partitions)
        if least < new_least and (new_factor < factor or copies < wanted_factor):
            raise Wrong(f"min_insync rises before the copies are there: {command}, {copies}")
        if new_factor < factor and least > wanted_least:
            raise Wrong(f"copies are given up under the higher min_insync: {command}")
        for old, new, wanted in (
            (factor, new_factor, wanted_factor),
            (least, new_least, wanted_least),
        ):
            if new not in (old, wanted):
                raise Wrong(f"a step to nowhere: {command}")

    def replicate(self) -> None:
        """What the partitions' leaders do: write, commit, and say who is in sync."""
        if self.is_rough:
            chosen = [n for n in range(len(self.have)) if self.random.random() < 0.5]
        else:
            chosen = list(range(len(self.have)))
        # Nothing changes it before the next tick.
        serving = {node for node in self.nodes if self.is_serving(node)}
        for number in chosen:
            info = self.metadata.partitions[number]
            if info.leader not in serving:
                continue
            self.write(number, info, serving)
            alive = [node for node in info.members if node in serving]
            in_sync = [node for node in info.in_sync if node in alive]
            if len(in_sync) < self.metadata.min_insync:
                # As partitions.in_sync: of these only who has another disk leaves.
                in_sync = [node for node in info.in_sync if self.has_its_disk(node)]
            in_sync += [node for node in alive if node not in in_sync]
            if set(in_sync) != set(info.in_sync):
                counting = self.counting.setdefault((number, info.version), set())
                for node in set(in_sync) - set(info.in_sync) - counting:
                    counting.add(node)
                    self.have[number][node] = self.have[number][info.leader]
                changed = replace(info, in_sync=tuple(in_sync))
                self.propose(ChangePartitions(((number, info.version, changed),)))

    def has_its_disk(self, node: str) -> bool:
        """As far as anybody knows."""
        sim = self.nodes[node]
        return not sim.is_alive or sim.incarnation == self.metadata.nodes[node].incarnation

    def is_seen_with_its_disk(self, node: str) -> bool:
        """True if the controllers know of no other disk of the node. One that has just died with
        another disk may still be present to them."""
        seen = self.health.present.get(node)
        if seen is None:
            return self.has_its_disk(node)
        return seen.incarnation == self.metadata.nodes[node].incarnation

    def is_serving(self, node: str) -> bool:
        """Alive with the disk that the metadata knows, and that does what it should."""
        sim = self.nodes.get(node)
        info = self.metadata.nodes.get(node)
        return (
            sim is not None
            and info is not None
            and sim.is_alive
            and not sim.is_stalled
            and not sim.is_damaged
            and sim.incarnation == info.incarnation
        )

    def write(self, number: int, info: PartitionInfo, serving: set[str]) -> None:
        have = self.have[number]
        have[info.leader] += 1
        end = have[info.leader]
        awaited = {*info.in_sync, *self.counting.get((number, info.version), ())}
        for node in awaited:
            if node in serving:
                have[node] = end
        if len(info.in_sync) < self.metadata.min_insync:
            return
        stored = end if awaited <= serving else min(have[node] for node in awaited)
        self.committed[number] = max(self.committed[number], stored)

    def look(self) -> None:
        """What the controllers see of the nodes, sometimes."""
        if self.is_rough and self.random.random() < 0.6:
            return
        seen = {node: sim for node, sim in self.nodes.items() if sim.is_alive}
        dead = {node for node in self.nodes if node not in seen}
        if self.is_rough and self.random.random() < 0.05:
            # Everybody mistakes a pause for a death.
            dead.add(self.random.choice(sorted(self.nodes)))
        health = Health(
            {node: sim.presence() for node, sim in seen.items() if node not in dead},
            frozenset(dead),
            frozenset(dead),
            frozenset(node for node, sim in seen.items() if sim.is_leaving),
            frozenset(node for node, sim in seen.items() if sim.is_stalled),
            frozenset(node for node, sim in seen.items() if sim.is_damaged),
        )
        if health != self.health:
            self.health = health

    # How it ends.

    def heal(self, duration_s: float = 60.0) -> None:
        """Everybody is back, nothing is lost or late any more: it must become as it should be."""
        self.is_rough = False
        for node in self.nodes:
            if not self.nodes[node].is_alive:
                self.start(node)
            self.nodes[node].is_leaving = False
            self.nodes[node].is_stalled = False
        self.depose(is_noticed=True)
        self.run(2 * self.config.proposal_timeout_s)
        self.recover_lost()
        if self.metadata.is_paused:
            self.operate(switch_moves, "")
        self.run(duration_s)

    def recover_lost(self) -> None:
        replaced = [
            name
            for name, info in self.metadata.nodes.items()
            if self.nodes[name].is_alive and self.nodes[name].incarnation != info.incarnation
        ]
        for number in operations.lost_partitions(self.metadata, replaced):
            up = [name for name in self.eligible() if self.is_serving(name)]
            if not up:
                # Its old disk is given up, so that it is let in with the new one.
                self.propose(operations.unsafe_recover(self.metadata, replaced[0], None, replaced))
                self.run(2.0)
                self.recover_lost()
                return
            members = self.metadata.partitions[number].members
            node = next((name for name in up if name in members), up[0])
            self.propose(operations.unsafe_recover(self.metadata, node, [number]))
        self.run(1.0)

    def eligible(self) -> list[str]:
        return [
            node
            for node, info in self.metadata.nodes.items()
            if info.role == DATA and info.state == NodePhase.UP
        ]

    def require_perfect(self) -> None:
        """Raises Wrong. Where fewer nodes than `min_insync` may take copies, those that are to
        leave keep theirs: the partition would commit nothing without them."""
        eligible = self.eligible()
        wanted = self.metadata.wanted_replication
        in_force = (self.metadata.replication_factor, self.metadata.min_insync)
        if in_force != wanted and (len(eligible) >= wanted[0] or in_force[1] > wanted[1]):
            raise Wrong(f"the replication is {in_force}, wanted {wanted}, of {sorted(eligible)}")
        copies = min(self.metadata.replication_factor, len(eligible))
        for number, info in enumerate(self.metadata.partitions):
            is_whole = (
                len(info.replicas) == copies
                and set(info.replicas) <= set(eligible)
                and sorted(info.in_sync) == sorted(info.replicas)
                and not info.adding
                and info.leader == info.replicas[0]
            )
            keeps_more = (
                len(eligible) < self.metadata.min_insync
                and info.leader in eligible
                and len(info.in_sync) >= self.metadata.min_insync
            )
            if not is_whole and not keeps_more:
                raise Wrong(f"partition {number} of {sorted(eligible)} stays {info}")
        self._require_even(eligible)
        count = len(self.commands)
        self.run(10.0)
        if len(self.commands) > count:
            raise Wrong(f"it comes to no rest: {self.commands[-1]}")

    def _require_even(self, eligible: Sequence[str]) -> None:
        """No zone has more replicas of a partition than it must, and no node more than its
        share."""
        partitions = self.metadata.partitions
        factor = min(self.metadata.replication_factor, len(eligible))
        shares = NodeShares(eligible, len(partitions), factor, self.metadata.traits)
        for number, info in enumerate(partitions):
            zones = Counter(shares.zones.get(node, node) for node in info.replicas)
            if max(zones.values()) > shares.zone_limit:
                raise Wrong(f"partition {number} is twice in one zone: {info}")
        for node, load in zip(eligible, self.held(), strict=True):
            if not shares.least[node] <= load <= shares.most[node]:
                raise Wrong(f"replicas are not even: {self.held()} of {eligible}")
        if max(self.led()) - min(self.led()) > 1:
            raise Wrong(f"leaders are not even: {self.led()}")

    def led(self) -> Sequence[int]:
        counts = Counter(info.leader for info in self.metadata.partitions)
        return [counts[node] for node in self.eligible()]

    def held(self) -> Sequence[int]:
        counts = Counter(node for info in self.metadata.partitions for node in info.replicas)
        return [counts[node] for node in self.eligible()]


def switch_moves(metadata: ClusterMetadata, node: str) -> Command | None:
    """Pauses the moves of replicas, or resumes them."""
    return operations.pause(metadata, not metadata.is_paused)


def life(seed: int, steps: int = 60) -> ControllerWorld:
    """A world in which `steps` things happen, which then becomes quiet. Raises Wrong."""
    world = ControllerWorld(
        seed,
        partitions=8 + seed % 9,
        replication_factor=1 + seed % 3 if seed % 5 == 0 else 3,
        min_insync=1 + seed % 2 if seed % 5 else 1,
    )
    names = iter(f"n{number}" for number in range(2, steps + 10))
    for _ in range(world.random.randrange(1, 4)):
        world.join(next(names))
    if world.random.random() < 0.3:
        world.join("w1", WITNESS)
    world.run(2)
    for _ in range(steps):
        happen(world, names)
        world.run(world.random.uniform(0.1, 1.5))
    world.heal()
    world.require_perfect()
    return world


def happen(world: ControllerWorld, names: Iterator[str]) -> None:
    generator = world.random
    alive = [node for node, sim in world.nodes.items() if sim.is_alive]
    dead = [node for node in world.nodes if node not in alive]
    known = [node for node in world.metadata.nodes if node not in world.witnesses]
    what = generator.random()
    if what < 0.22 and alive:
        world.kill(generator.choice(alive))
    elif what < 0.5 and dead:
        world.start(generator.choice(dead))
    elif what < 0.56:
        world.wipe(generator.choice(list(world.nodes)))
    elif what < 0.62 and len(world.nodes) < 8:
        world.join(next(names))
    elif what < 0.68:
        world.operate(operations.drain, generator.choice(known))
    elif what < 0.74:
        world.operate(operations.undrain, generator.choice(known))
    elif what < 0.78:
        world.depose(is_noticed=generator.random() < 0.5)
    elif what < 0.82 and alive:
        world.nodes[generator.choice(alive)].is_leaving = True
    elif what < 0.86:
        world.operate(operations.remove, generator.choice(known))
    elif what < 0.91 and alive:
        world.hang(generator.choice(alive))
    elif what < 0.93:
        world.operate(switch_moves, "")
    elif what < 0.95:
        for node in world.nodes:
            world.nodes[node].is_stalled = False
    elif world.is_resized:
        world.resize()

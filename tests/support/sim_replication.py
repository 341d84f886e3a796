"""Nodes that replicate a few partitions over simulated links and disks, what happens to them, and
what must hold whatever happens.

- What anybody says is committed is what everybody has at these offsets below its own watermark.
- Every node of the true in-sync set has everything that was ever committed, durably.
- An epoch has one leader, in one life of its process.
- When all is well again every node has everything, and every replica is in sync.

The metadata is one linearizable object, changed by the production's commands. What nodes see of it
is late, and starts anew from somewhere in the past when they restart. Some of what they propose is
lost, late or comes twice.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from msgspec.structs import replace

from holdfast.node.metadata.commands import ChangePartitions, apply
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.effects import ProposeInSync
from tests.sim.schedule import VirtualTime, Wrong
from tests.support.sim_replica_ledger import Ledger
from tests.support.sim_replica_links import Link
from tests.support.sim_replica_log import ReplicaDisk
from tests.support.sim_replica_node import SimNode

PARTITIONS = 2


@dataclass(frozen=True)
class Faults:
    """How a world is: how often what happens, and how many nodes there are."""

    kinds: dict[str, float]
    every_s: float = 0.15
    nodes: tuple[int, ...] = (3, 5)
    min_insync: tuple[int, ...] = (1, 2)
    seconds: float = 6.0


MIXED = Faults(
    {
        "kill": 3.0,
        "power": 3.0,
        "power all": 0.5,
        "wipe": 0.6,
        "pause": 1.5,
        "one way": 1.5,
        "cut": 1.5,
        "tear": 2.0,
        "isolate": 1.5,
        "slow disk": 1.0,
        "move leader": 4.0,
        "move replica": 2.0,
        "retain": 1.0,
        "heal": 3.0,
    }
)


class World(VirtualTime):
    def __init__(self, seed: int, faults: Faults = MIXED) -> None:
        super().__init__()
        self.random = Random(seed)
        self.faults = faults
        self.trace: list[str] = []
        self.config = ReplicationConfig(
            follow_retry_s=0.3,
            proposal_retry_s=0.3,
            silent_s=self.random.choice((0.2, 1.0)),
            read_bytes=self.random.choice((200, 2000)),
            recent_bytes_max=self.random.choice((0, 1000, 100_000)),
            catch_up_window_bytes=self.random.choice((500, 5000)),
            push_window_bytes=self.random.choice((2000, 100_000)),
            catch_up_bytes_per_s=self.random.choice((20_000, 1_000_000)),
        )
        names = [f"n{number}" for number in range(1, self.random.choice(faults.nodes) + 1)]
        self.nodes = {name: SimNode(self, name, PARTITIONS) for name in names}
        self.links = {
            frozenset(pair): Link(
                (self.nodes[pair[0]], self.nodes[pair[1]]), self.random, self.after
            )
            for pair in itertools.combinations(names, 2)
        }
        self.history = [self._first_metadata(names)]
        self.ledger = Ledger(PARTITIONS)
        self.numbers = itertools.count(1)
        # How often each kind of effect was carried out.
        self.seen: Counter[str] = Counter()
        self.is_rough = True

    def _first_metadata(self, names: list[str]) -> ClusterMetadata:
        replicas = tuple(names[:3])
        info = PartitionInfo(replicas, (), names[0], 1, replicas, 1)
        nodes = {
            name: NodeInfo(name, f"{name}x0", f"{name}:1", "", "", version=1) for name in names
        }
        min_insync = self.random.choice(self.faults.min_insync)
        return ClusterMetadata("c", 3, min_insync, nodes, (info,) * PARTITIONS, 1)

    def link(self, one: str, other: str) -> Link:
        return self.links[frozenset((one, other))]

    @property
    def metadata(self) -> ClusterMetadata:
        return self.history[-1]

    def play(self) -> None:
        for node in self.nodes.values():
            node.start()
        self.every(lambda: self.random.uniform(0.002, 0.04), self.append_some)
        self.every(lambda: self.random.uniform(0.02, 0.3), self.reconnect)
        self.every(lambda: self.random.uniform(0.05, 0.4), self.control)
        self.every(lambda: 0.5, self.checkpoint)
        self.every(lambda: self.random.expovariate(1 / self.faults.every_s), self.fault)
        self._run_until(self.faults.seconds, lambda: False)
        self.is_rough = False
        self.heal()
        limit = self.now + 30.0
        self._run_until(limit, self.has_converged)
        if not self.has_converged():
            raise Wrong(f"no peace {self.describe()}")

    def _run_until(self, limit: float, is_done: Callable[[], bool]) -> None:
        check_at = 0.0
        while self.step(limit):
            if self.now > check_at:
                check_at = self.now + 0.1
                if is_done():
                    return

    def every(self, interval: Callable[[], float], action: Callable[[], None]) -> None:
        def repeat() -> None:
            action()
            self.after(interval(), repeat)

        self.after(interval(), repeat)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:8.4f} {text}")

    # What clients and the cluster's other parts do.

    def append_some(self) -> None:
        if not self.is_rough:
            return
        partition = self.random.randrange(PARTITIONS)
        count = self.random.choice((1, 1, 3, 10))
        for node in self.nodes.values():
            if node.is_alive and not node.is_paused and node.core.may_append(partition):
                node.do(partial(self._append, node, partition, count))

    def _append(self, node: SimNode, partition: int, count: int) -> None:
        for _ in range(count):
            node.log.append(partition, next(self.numbers))

    def reconnect(self) -> None:
        for link in self.links.values():
            link.connect(self.now)

    def checkpoint(self) -> None:
        for node in self.nodes.values():
            if node.is_alive and self.random.random() < 0.5:
                node.log.checkpoint()

    def propose(self, node: SimNode, effect: ProposeInSync) -> None:
        if node.is_isolated or (self.is_rough and self.random.random() < 0.1):
            return
        change = (effect.partition, effect.expected_version, effect.info)
        incarnation = node.incarnation

        def arrive() -> None:
            # To lose the disk of a leader while it shuts the others out is one fault too many.
            if node.incarnation == incarnation:
                self.change(node.name, (change,))

        copies = 2 if self.is_rough and self.random.random() < 0.1 else 1
        for _ in range(copies):
            delay = self.random.choice((0.001, 0.01, 0.01, 0.5 if self.is_rough else 0.01))
            self.after(delay, arrive)

    def change(
        self,
        who: str,
        changes: tuple[tuple[int, int, PartitionInfo], ...],
        nodes: tuple[tuple[int, NodeInfo], ...] = (),
    ) -> bool:
        applied = apply(self.metadata, ChangePartitions(changes, nodes))
        if applied.error or applied.metadata is None:
            return False
        self.history.append(applied.metadata)
        for number, _, info in changes:
            self.note(
                f"{who}: partition {number} leader {info.leader} epoch {info.epoch} in sync "
                f"{info.in_sync} replicas {info.replicas} adding {info.adding}"
            )
            self.check_in_sync(number)
        return True

    def control(self) -> None:
        """A controller that sees at once who is dead, and takes its time."""
        for number, info in enumerate(self.metadata.partitions):
            leader = self.nodes.get(info.leader)
            if leader is None or not leader.is_alive:
                self.elect(number, info, None)
            elif leader.is_isolated or leader.is_paused:
                if self.random.random() < 0.3:
                    self.elect(number, info, info.leader)
            elif set(info.adding) & set(info.in_sync):
                self.finish_move(number, info)

    def elect(self, number: int, info: PartitionInfo, without: str | None) -> None:
        able = [
            name
            for name in info.members
            if name in info.in_sync
            and name != without
            and self.nodes[name].is_alive
            and self.nodes[name].is_registered
        ]
        replicas = [name for name in able if name in info.replicas]
        if not replicas:
            # As placement.planning: the last copies that were being added are replicas now.
            replicas = able
            adding = tuple(name for name in info.adding if name not in able)
            info = replace(info, replicas=(*info.replicas, *able), adding=adding)
        if replicas:
            name = self.random.choice(replicas)
            made = replace(info, leader=name, epoch=info.epoch + 1)
            self.change("controller", ((number, info.version, made),))

    def finish_move(self, number: int, info: PartitionInfo) -> None:
        new = next(name for name in info.adding if name in info.in_sync)
        gone = [name for name in info.replicas if name != info.leader]
        old = self.random.choice(gone)
        replicas = tuple(name for name in info.replicas if name != old)
        made = replace(
            info,
            replicas=(*replicas, new),
            adding=tuple(name for name in info.adding if name != new),
            in_sync=tuple(name for name in info.in_sync if name != old),
        )
        self.change("controller", ((number, info.version, made),))

    # What goes wrong.

    def fault(self) -> None:
        if not self.is_rough:
            return
        kinds = self.faults.kinds
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        node = self.random.choice(list(self.nodes.values()))
        link = self.random.choice(list(self.links.values()))
        self.note(f"fault: {kind} {node.name}")
        if kind == "kill":
            self.crash(node, self.random.uniform(0.01, 1.5), power=False)
        elif kind == "power":
            self.crash(node, self.random.uniform(0.01, 1.5), power=True)
        elif kind == "power all":
            for each in self.nodes.values():
                self.crash(each, self.random.uniform(0.01, 1.0), power=True)
        elif kind == "wipe":
            self.wipe(node)
        elif kind == "pause":
            self.pause(node)
        elif kind in ("one way", "cut"):
            for side in (0, 1) if kind == "cut" else (self.random.randint(0, 1),):
                link.block(side)
            self.after(self.random.uniform(0.1, 1.0), lambda: link.tear(self.now))
            self.after(self.random.uniform(0.05, 2.0), lambda: link.unblock(self.now))
        elif kind == "tear":
            link.tear(self.now)
        elif kind == "isolate":
            node.is_isolated = True
            self.after(self.random.uniform(0.1, 2.0), lambda: self.join(node))
        elif kind == "slow disk":
            node.sync_s = self.random.choice((0.02, 0.2, 2.0))
        elif kind == "heal":
            self.heal()
        else:
            self.disturb(kind)

    def disturb(self, kind: str) -> None:
        number = self.random.randrange(PARTITIONS)
        info = self.metadata.partitions[number]
        if kind == "move leader":
            self.elect(number, info, info.leader)
        elif kind == "move replica":
            others = [name for name in self.nodes if name not in info.members]
            if others and not info.adding:
                made = replace(info, adding=(self.random.choice(others),))
                self.change("controller", ((number, info.version, made),))
        elif kind == "retain":
            for node in self.nodes.values():
                if node.is_alive:
                    node.log.retain(number, self.ledger.ends[number] - self.random.randint(0, 30))

    def join(self, node: SimNode) -> None:
        node.is_isolated = False

    def crash(self, node: SimNode, away_s: float, power: bool) -> None:
        if not node.is_alive:
            return
        node.stop()
        for link in self.links_of(node):
            link.tear(self.now)
            link.forget(node.name)
        if power:
            node.disk.crash(self.random)
        self.after(away_s, lambda: self.restart(node))

    def links_of(self, node: SimNode) -> list[Link]:
        return [link for names, link in self.links.items() if node.name in names]

    def restart(self, node: SimNode) -> None:
        if not node.is_alive:
            # A killed process's writes are in the page cache; opening syncs them.
            node.disk.synced = len(node.disk.entries)
            self.note(f"{node.name} starts")
            node.start()

    def wipe(self, node: SimNode) -> None:
        alone = any(set(info.in_sync) <= {node.name} for info in self.metadata.partitions)
        if alone or not all(other.is_registered for other in self.nodes.values()):
            return
        if node.is_alive:
            self.crash(node, self.random.uniform(0.01, 1.0), power=True)
        node.disk = ReplicaDisk(PARTITIONS)
        node.incarnation = f"{node.name}x{node.life}"
        node.is_registered = False
        self.after(self.random.uniform(0.0, 1.0), lambda: self.register(node))

    def register(self, node: SimNode) -> None:
        changes = []
        for number, info in enumerate(self.metadata.partitions):
            if node.name in info.in_sync:
                in_sync = tuple(name for name in info.in_sync if name != node.name)
                leader = "" if info.leader == node.name else info.leader
                changes.append(
                    (number, info.version, replace(info, leader=leader, in_sync=in_sync))
                )
        known = self.metadata.nodes[node.name]
        made = replace(known, incarnation=node.incarnation)
        node.is_registered = True
        if not self.change(node.name, tuple(changes), ((known.version, made),)):
            raise AssertionError("the new disk was not registered")

    def pause(self, node: SimNode) -> None:
        if node.is_alive and not node.is_paused:
            node.is_paused = True
            life = node.life

            def resume() -> None:
                if node.life == life and node.is_paused:
                    node.resume()

            self.after(self.random.uniform(0.05, 2.0), resume)

    def heal(self) -> None:
        for link in self.links.values():
            link.unblock(self.now)
        for node in self.nodes.values():
            node.is_isolated = False
            node.sync_s = 0.002
            if not self.is_rough:
                if node.is_alive and node.is_paused:
                    node.resume()
                self.restart(node)

    # How it is.

    def committed(self, node: SimNode, partition: int, offset: int) -> None:
        if self.ledger.commit(node, partition, offset):
            self.check_in_sync(partition)

    def became_leader(self, node: SimNode, partition: int, epoch: int) -> None:
        self.note(f"{node.name} leads partition {partition} under epoch {epoch}")
        self.ledger.lead(node, partition, epoch)

    def check_in_sync(self, partition: int) -> None:
        for name in self.metadata.partitions[partition].in_sync:
            self.ledger.check_durable(self.nodes[name], partition)

    def has_converged(self) -> bool:
        for number, info in enumerate(self.metadata.partitions):
            leader = self.nodes.get(info.leader)
            if leader is None or not leader.is_alive or not leader.core.may_append(number):
                return False
            if info.adding or set(info.in_sync) != set(info.replicas):
                return False
            end = leader.log.next_offset[number]
            for node in self.nodes.values():
                if not node.is_alive or node.log.high_watermark[number] != end:
                    return False
        return True

    def describe(self) -> str:
        lines = []
        for number, info in enumerate(self.metadata.partitions):
            lines.append(f"\npartition {number}: {info}")
            for node in self.nodes.values():
                if node.is_alive:
                    log = node.log
                    lines.append(
                        f"{node.name}: {log.start_offsets[number]} to {log.next_offset[number]}, "
                        f"durable {log.durable_offset[number]}, "
                        f"committed {log.high_watermark[number]}, "
                        f"leads {node.core.leads(number)}"
                    )
        return "\n".join(lines)

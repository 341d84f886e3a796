"""A few replication cores joined by hand: frames arrive when the test says so, disks sync when it
says so, and the metadata is what it says."""

from collections import deque
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.node.frame_kinds import REPLICATE
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.effects import ProposeInSync, ReadBatches, ReplicationEffect, Send
from holdfast.node.replicate.replication import Replication
from tests.support.sim_replica_log import ReplicaDisk, SimReplicaLog

EffectT = TypeVar("EffectT", bound=ReplicationEffect)


class Core:
    def __init__(self, name: str, config: ReplicationConfig, disk: ReplicaDisk) -> None:
        self.name = name
        self.disk = disk
        self.log = SimReplicaLog(disk)
        self.core = Replication(name, self.log, msgspec.structs.replace(config, incarnation=name))
        # Effects but for frames, as they came.
        self.effects: list[ReplicationEffect] = []
        self.frames: deque[Send] = deque()

    def collect(self) -> None:
        self.core.check()
        effects, self.core.effects = self.core.effects, []
        for effect in effects:
            if isinstance(effect, Send):
                self.frames.append(effect)
            else:
                self.effects.append(effect)

    def of(self, kind: type[EffectT]) -> list[EffectT]:
        """Effects of this class, which are forgotten."""
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, kind)]
        return found


class Cores:
    """`a`, `b` and so on; `a` leads every partition under epoch 1 and is current."""

    def __init__(
        self,
        count: int = 3,
        partitions: int = 1,
        min_insync: int = 1,
        config: ReplicationConfig | None = None,
        replicas: int | None = None,
    ) -> None:
        self.now = 100.0
        self.config = config or ReplicationConfig()
        names = [chr(ord("a") + number) for number in range(count)]
        self.nodes = {name: Core(name, self.config, ReplicaDisk(partitions)) for name in names}
        members = tuple(names[:replicas])
        info = PartitionInfo(members, (), "a", 1, members, 1)
        infos = {name: NodeInfo(name, name, f"{name}:1", "", "", version=1) for name in names}
        self.metadata = ClusterMetadata("c", 3, min_insync, infos, (info,) * partitions, 1)
        self.links: set[frozenset[str]] = set()
        for node in self.nodes.values():
            node.core.handle_current(self.now)
        self.tell()
        self.connect()

    def __getitem__(self, name: str) -> Core:
        return self.nodes[name]

    def change(self, partition: int = 0, **fields: object) -> None:
        """Change the metadata of a partition and tell nobody."""
        version = self.metadata.version + 1
        partitions = list(self.metadata.partitions)
        partitions[partition] = replace(
            partitions[partition],
            version=version,
            **fields,  # type: ignore[arg-type]
        )
        self.metadata = replace(self.metadata, partitions=tuple(partitions), version=version)

    def tell(self, *names: str) -> None:
        """These (none: all) see the metadata."""
        everything = range(len(self.metadata.partitions))
        for name in names or tuple(self.nodes):
            self.nodes[name].core.handle_metadata(self.metadata, everything, self.now)
            self.nodes[name].collect()

    def connect(self, *pairs: str) -> None:
        """Each pair is two names; none: everybody with everybody."""
        names = list(self.nodes)
        for pair in pairs or [x + y for x in names for y in names if x < y]:
            one, other = pair[0], pair[1]
            self.links.add(frozenset((one, other)))
            for here, there in ((one, other), (other, one)):
                self.nodes[here].core.handle_connected(there, self.now)
                self.nodes[here].collect()
        self.run()

    def cut(self, one: str, other: str) -> None:
        self.links.discard(frozenset((one, other)))
        for here, there in ((one, other), (other, one)):
            self.nodes[here].core.handle_disconnected(there, self.now)
            self.nodes[here].collect()

    def restart(self, name: str) -> None:
        """Of its log what was synced is there; it is not current, and knows the newest metadata."""
        for other in self.nodes:
            if frozenset((name, other)) in self.links:
                self.links.discard(frozenset((name, other)))
                self.nodes[other].core.handle_disconnected(name, self.now)
                self.nodes[other].collect()
        disk = self.nodes[name].disk
        del disk.entries[disk.synced :]
        self.nodes[name] = Core(name, self.config, disk)
        self.tell(name)

    def run(self) -> None:
        """Deliver frames until there are none."""
        while any(node.frames for node in self.nodes.values()):
            for node in self.nodes.values():
                while node.frames:
                    self.deliver(node.name, node.frames.popleft())

    def deliver(self, sender: str, frame: Send) -> None:
        if frozenset((sender, frame.node)) in self.links:
            data = frame.payload if isinstance(frame.payload, bytes) else b"".join(frame.payload)
            target = self.nodes[frame.node]
            target.core.handle_frame(sender, frame.kind, data, self.now)
            target.collect()

    def append(self, name: str, *numbers: int, partition: int = 0) -> None:
        """As one batch, which leaves for the followers, undelivered."""
        node = self.nodes[name]
        for number in numbers:
            node.log.append(partition, number)
        node.core.handle_taken(node.log.take(), self.now)
        node.collect()

    def sync(self, *names: str) -> None:
        """The disks of these (none: all) have everything."""
        for name in names or tuple(self.nodes):
            node = self.nodes[name]
            node.log.synced(len(node.disk.entries))
            node.core.handle_durable(self.now)
            node.collect()

    def write(self, name: str, *numbers: int, partition: int = 0) -> None:
        """Append, and let it get everywhere."""
        self.append(name, *numbers, partition=partition)
        self.settle()

    def settle(self) -> None:
        for _ in range(4):
            self.run()
            self.sync()
            for name in self.nodes:
                self.read(name)
        self.run()

    def wait(self, seconds: float) -> None:
        """Time passes, with timers when they are due."""
        end = self.now + seconds
        while True:
            timers = [(node.core.timer(), node.name) for node in self.nodes.values()]
            due = [(when, name) for when, name in timers if when is not None and when <= end]
            if not due:
                break
            when, name = min(due)
            self.now = max(self.now, when)
            self.nodes[name].core.handle_timers(self.now)
            self.nodes[name].collect()
            self.run()
        self.now = end

    def read(self, name: str) -> int:
        """Answer what the node has asked its disk for; returns how much that was."""
        asked = self.nodes[name].of(ReadBatches)
        for read in asked:
            node = self.nodes[name]
            found = node.log.read(read.partition, read.start, read.bytes_max)
            node.core.handle_batches(read.request, found, self.now)
            node.collect()
        return len(asked)

    def proposed(self, name: str) -> list[tuple[int, tuple[str, ...]]]:
        """(partition, in-sync set) proposed since the last call."""
        return [
            (effect.partition, effect.info.in_sync) for effect in self.nodes[name].of(ProposeInSync)
        ]

    def numbers(self, name: str, partition: int = 0) -> list[int]:
        return list(self.nodes[name].log.numbers(partition).values())

    def watermark(self, name: str, partition: int = 0) -> int:
        return self.nodes[name].log.high_watermark[partition]

    def batches_for(self, name: str, other: str) -> int:
        """Frames with batches that wait to be delivered."""
        return sum(
            1
            for frame in self.nodes[name].frames
            if frame.node == other and frame.kind == REPLICATE
        )

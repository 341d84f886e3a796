"""What agreeing on who leads and holds what costs, to 100 nodes and 4,096 partitions.

    python -m bench.metadata [--json PATH] [--shapes 3x64,100x4096]

The controller, the commands and the metadata are the product's, in one process and without a
network: this counts commands and their bytes as they would go into the metadata log, and the CPU of
the one node that decides and of each node that applies. Partition leaders answer at once, each
with one command for all that changed. Heartbeats are what each node sends and hears whatever the
load. Interpreted Python unless `make compile` was run. About 20 s.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec.structs import replace

from bench.options import new_parser, write_json
from holdfast.node.failure.detector import (
    Beat,
    Detector,
    DetectorConfig,
    Heartbeat,
    encode_heartbeat,
)
from holdfast.node.failure.health import Health, Presence
from holdfast.node.metadata import operations
from holdfast.node.metadata.codec import encode_command, encode_metadata
from holdfast.node.metadata.commands import (
    ChangePartitions,
    Command,
    InitCluster,
    PutNode,
    apply,
)
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.node.placement.controller import Controller, ControllerConfig
from holdfast.node.placement.ring import placement

SHAPES: Final = "3x64,5x64,5x512,5x4096,20x1024,50x2048,100x64,100x4096"
COPIES: Final = 3
ROUNDS_MAX: Final = 10_000
SAMPLES: Final = 50
Figures = dict[str, float]


def node_info(node: str) -> NodeInfo:
    return NodeInfo(node, "0123456789abcdef", f"{node}:7000", f"{node}:1883", f"{node}:18083")


def presence_of(node: str) -> Presence:
    info = node_info(node)
    return Presence(info.incarnation, info.peer_address, info.client_address, info.admin_address)


@dataclass
class Cost:
    commands: int = 0
    bytes: int = 0
    changes: int = 0
    decide_s: float = 0.0
    """The controller's CPU."""
    longest_s: float = 0.0
    """Of the longest step: the event loop stands still for it."""
    apply_s: float = 0.0
    """The CPU of every node."""

    def figures(self, name: str) -> Figures:
        return {
            f"{name}_commands": self.commands,
            f"{name}_kb": round(self.bytes / 1e3, 1),
            f"{name}_changes": self.changes,
            f"{name}_decide_ms": round(self.decide_s * 1e3, 1),
            f"{name}_longest_ms": round(self.longest_s * 1e3, 1),
            f"{name}_apply_ms": round(self.apply_s * 1e3, 1),
        }


@dataclass
class Cluster:
    metadata: ClusterMetadata
    controller: Controller = field(
        default_factory=lambda: Controller("n0", ControllerConfig(balance_after_s=0.0))
    )
    dead: set[str] = field(default_factory=set)
    now: float = 0.0
    cost: Cost = field(default_factory=Cost)

    def health(self) -> Health:
        present = {node: presence_of(node) for node in self.metadata.nodes if node not in self.dead}
        dead = frozenset(self.dead)
        return Health(present, dead, dead)

    def carry_out(self, command: Command) -> None:
        data = encode_command(command)
        start = time.process_time()
        applied = apply(self.metadata, command)
        self.cost.apply_s += time.process_time() - start
        if applied.error or applied.metadata is None:
            raise AssertionError(applied.error)
        self.metadata = applied.metadata
        self.cost.commands += 1
        self.cost.bytes += len(data)
        self.cost.changes += len(applied.changed_partitions)

    def step(self, health: Health) -> int:
        start = time.process_time()
        commands = self.controller.step(self.metadata, health, self.now)
        took_s = time.process_time() - start
        self.cost.decide_s += took_s
        self.cost.longest_s = max(self.cost.longest_s, took_s)
        for command in commands:
            self.carry_out(command)
            self.controller.note_outcome(command, self.now)
        return len(commands)

    def lead(self) -> int:
        """Every partition leader brings its followers into the in-sync set."""
        changes: dict[str, list[tuple[int, int, PartitionInfo]]] = {}
        for number, info in enumerate(self.metadata.partitions):
            if info.leader and len(info.in_sync) < len(info.members):
                missing = [
                    node
                    for node in info.members
                    if node not in info.in_sync and node not in self.dead
                ]
                if missing:
                    changed = replace(info, in_sync=(*info.in_sync, *missing))
                    changes.setdefault(info.leader, []).append((number, info.version, changed))
        for mine in changes.values():
            self.carry_out(ChangePartitions(tuple(mine)))
        return len(changes)

    def settle(self) -> Cost:
        """Until nothing more is to be done; returns what that cost."""
        self.cost = Cost()
        health = self.health()
        quiet = 0
        for _ in range(ROUNDS_MAX):
            self.now += 0.1
            quiet = 0 if self.step(health) + self.lead() else quiet + 1
            # Leaders are given back with pauses between them.
            if quiet > 5:
                return self.cost
        raise AssertionError("it comes to no rest")


def placed_cluster(nodes: int, partitions: int) -> Cluster:
    """As it is in the end, without the way there."""
    names = [f"n{number}" for number in range(nodes)]
    command = InitCluster("bench", partitions, COPIES, min(2, nodes), node_info(names[0]))
    metadata = apply(None, command).metadata
    for name in names[1:]:
        metadata = apply(metadata, PutNode(node_info(name), 0)).metadata
    assert metadata is not None
    infos = tuple(
        PartitionInfo(replicas, (), replicas[0], 1, replicas, metadata.version)
        for replicas in placement(names, partitions, COPIES)
    )
    cluster = Cluster(replace(metadata, partitions=infos))
    cost = cluster.settle()
    assert cost.commands == 0
    return cluster


def best_us(call: Callable[[], object], samples: int = SAMPLES) -> float:
    times = []
    for _ in range(samples):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return round(statistics.median(times) * 1e6, 1)


def standing_costs(cluster: Cluster, nodes: int, partitions: int) -> Figures:
    metadata = cluster.metadata
    names = list(metadata.nodes)
    health = cluster.health()
    controller = cluster.controller
    controller.step(metadata, health, cluster.now)

    def look() -> None:
        # Another object, with the same in it: everything is looked at.
        controller.step(metadata, msgspec.structs.replace(health), cluster.now)

    info = metadata.partitions[partitions // 2]
    shrunk = replace(info, in_sync=info.in_sync[:-1])
    command = ChangePartitions(((partitions // 2, info.version, shrunk),))
    return {
        "metadata_kb": round(len(encode_metadata(metadata)) / 1e3, 1),
        "encode_all_ms": round(best_us(lambda: encode_metadata(metadata), 5) / 1e3, 2),
        "place_all_ms": round(best_us(lambda: placement(names, partitions, COPIES), 3) / 1e3, 2),
        "apply_one_us": best_us(lambda: apply(metadata, command)),
        "command_of_one_bytes": len(encode_command(command)),
        "step_unchanged_us": best_us(lambda: controller.step(metadata, health, cluster.now)),
        "step_looking_us": best_us(look),
        **heartbeat_costs(nodes),
    }


def heartbeat_costs(nodes: int) -> Figures:
    """Of one node: what it sends to all others and hears from them."""
    config = DetectorConfig()
    names = [f"n{number}" for number in range(nodes)]
    detector = Detector(names[0], presence_of(names[0]), config, 0.0)
    detector.set_members(names, 0.0)
    for name in names[1:]:
        detector.connected(name, presence_of(name), 0.0)
    rounds = 20
    start = time.process_time()
    for number in range(1, rounds + 1):
        now = number * config.heartbeat_s * 1.001
        payload = encode_heartbeat(Heartbeat(number))
        for name in names[1:]:
            detector.handle_heartbeat(name, payload, now)
        detector.handle_timers(now)
        detector.health(now)
    took_s = (time.process_time() - start) / rounds
    beats = [effect for effect in detector.effects if isinstance(effect, Beat)]
    assert len(beats) == rounds
    return {
        "heartbeats_per_s": round((nodes - 1) / config.heartbeat_s),
        "heartbeat_payload_bytes_per_s": round((nodes - 1) * len(payload) / config.heartbeat_s),
        "heartbeat_cpu_percent": round(took_s / config.heartbeat_s * 100, 2),
    }


def measure(nodes: int, partitions: int) -> Figures:
    cluster = placed_cluster(nodes, partitions)
    figures = standing_costs(cluster, nodes, partitions)
    cluster.dead = {"n1"}
    figures |= cluster.settle().figures("death")
    cluster.now += ControllerConfig().replace_after_s
    figures |= cluster.settle().figures("replace")
    cluster.dead = set()
    figures |= cluster.settle().figures("return")
    cluster = placed_cluster(nodes, partitions)
    cluster.carry_out(PutNode(node_info("joins"), 0))
    figures |= cluster.settle().figures("join")
    drain = operations.drain(cluster.metadata, "n1")
    assert drain is not None
    cluster.carry_out(drain)
    figures |= cluster.settle().figures("drain")
    assert operations.partitions_held(cluster.metadata, "n1") == 0
    return figures


def print_table(results: dict[str, Figures]) -> None:
    print(f"  {'nodes x partitions':32}" + "".join(f"{shape:>12}" for shape in results))
    for name in next(iter(results.values())):
        row = "".join(f"{figures[name]:>12,}" for figures in results.values())
        print(f"  {name:32}{row}")


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.metadata", __doc__)
    parser.add_argument("--shapes", default=SHAPES, help=f"nodes x partitions (default {SHAPES})")
    arguments = parser.parse_args(argv)
    results = {}
    for shape in arguments.shapes.split(","):
        nodes, _, partitions = shape.partition("x")
        if not (nodes.isdigit() and partitions.isdigit() and int(nodes) >= 3 and int(partitions)):
            parser.error(f"--shapes {shape}: needed is <nodes, 3 or more>x<partitions>")
        results[shape] = measure(int(nodes), int(partitions))
    print_table(results)
    write_json(arguments.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

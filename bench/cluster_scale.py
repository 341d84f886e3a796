"""The cost of a message by the number of nodes, and what a node that joins moves.

Each shape is a new cluster with three replicas of 64 partitions. 20 publishers at QoS 1, ten
messages under way each, send to a subscriber at the next node: first as fast as the nodes allow,
then 1,000 messages a second in all. With gateways, all clients are at them. The counts come from
/metrics and from the kernel, so they depend little on other work of the machine.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from bench.connection import Loop
from bench.generator import drive, open_flows, settle
from bench.measurement import OTHERS_BUSY_MAX, Measurement
from bench.process import cpu_s, machine_busy_s
from bench.scenarios import Figure, Scenario
from holdfast_lab.targets.target import TargetError
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until

SHAPES: Final = ((1, 0), (3, 0), (5, 0), (7, 0), (3, 2))
"""Data nodes and gateways."""
REPLICAS: Final = 3
RATES: Final = (0.0, 1000.0)
PAIRS: Final = 20
WINDOW: Final = 10
WARM_UP_S: Final = 1.0
ADDED_US: Final = 8.0
"""The most CPU a message that two more data nodes may cost each."""
UNEVEN: Final = 0.2
"""The most by which a disk may have more than its even share."""
MOVES_S: Final = 120.0


@dataclass
class Counts:
    """The counters of all nodes together, or the difference of two moments."""

    cpu_s: float
    wake_ups: float
    syncs: float
    frames: float
    sent_bytes: float
    stored_bytes: float

    def since(self, before: "Counts") -> "Counts":
        return Counts(
            *(a - b for a, b in zip(vars(self).values(), vars(before).values(), strict=True))
        )


@dataclass
class Cost:
    """The cost of a message under one load, of all nodes together."""

    nodes: int
    gateways: int
    rate: float
    """Messages a second."""
    is_paced: bool
    cpu_us: float
    wake_ups: float
    syncs: float
    frames: float
    sent_bytes: float
    stored_bytes: float
    missing: int
    others_busy: float
    """Cores kept busy by anything but nodes and generator."""


@dataclass
class Join:
    """A data node joins `nodes` others."""

    nodes: int
    moved_bytes: float
    """In the log of the new node."""
    even_bytes: float
    """Its even share of all that is stored."""
    largest_share: float
    """The replicas of the fullest node after it, by the even share."""


@dataclass
class Scale:
    costs: list[Cost]
    join: Join

    def is_disturbed(self) -> bool:
        """Whether other processes took the CPU. Then messages share less of a turn, and each costs
        more: the CPU is shown and not judged."""
        return any(each.others_busy > OTHERS_BUSY_MAX for each in self.costs)

    def faults(self) -> list[str]:
        """Returns in words the figures that are out of line."""
        found = [f"{each.missing} messages are missing" for each in self.costs if each.missing]
        full = [each for each in self.costs if not each.is_paced and not each.gateways]
        for fewer, more in pairwise(full):
            added_us = (more.cpu_us - fewer.cpu_us) / (more.nodes - fewer.nodes)
            is_judged = fewer.nodes >= REPLICAS and not self.is_disturbed()
            if is_judged and added_us >= ADDED_US:
                text = f"each node from {fewer.nodes} to {more.nodes} costs {added_us:.1f} µs"
                found.append(f"{text}, target < {ADDED_US:g} µs")
        least = {each.is_paced: each.stored_bytes for each in self.costs if each.nodes == 1}
        for each in self.costs:
            limit = REPLICAS * least[each.is_paced] * (1 + UNEVEN)
            if each.nodes > 1 and each.stored_bytes > limit:
                found.append(f"{each.nodes} nodes store {each.stored_bytes:.0f} bytes a message")
        join = self.join
        if abs(join.moved_bytes / join.even_bytes - 1) > UNEVEN:
            found.append(f"a join moved {join.moved_bytes / join.even_bytes:.2f} of an even share")
        if join.largest_share > 1 + UNEVEN:
            found.append(f"the fullest node has {join.largest_share:.2f} of an even share")
        return found

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "faults": self.faults()}


def metric(text: str, name: str) -> float:
    """The sum of a metric's samples."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def wake_ups(pid: int) -> int:
    """How often the event loop has waited: the voluntary switches of the first thread."""
    for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "voluntary_ctxt_switches":
            return int(value)
    raise TargetError(f"no switches of process {pid}")


def counts(nodes: list[ClusterNode]) -> Counts:
    pids = [node.process.pid for node in nodes if node.process]
    texts = [node.admin("/metrics")[1] for node in nodes]
    names = ("fdatasync_seconds_count", "peer_frames_sent_total", "peer_bytes_sent_total")
    sums = [sum(metric(text, f"holdfast_{name}") for text in texts) for name in names]
    stored = sum(metric(text, "holdfast_log_bytes") for text in texts)
    return Counts(sum(map(cpu_s, pids)), sum(map(wake_ups, pids)), *sums, stored)


def is_settled(cluster: ClusterProcesses) -> bool:
    """Each partition is led by its preferred node, and stored by its replicas alone."""
    partitions = cluster.status().get("partitions") or []
    for node in cluster.running:
        wanted = sum(node.node_id in each["replicas"] for each in partitions)
        if metric(node.admin("/metrics")[1], "holdfast_partitions_stored") != wanted:
            return False
    return bool(partitions) and not any(
        each["adding"] or each["leader"] != each["replicas"][0] for each in partitions
    )


def settled(cluster: ClusterProcesses) -> None:
    cluster.wait_healthy()
    until(lambda: is_settled(cluster), "each node stores what it replicates", MOVES_S)


def load(cluster: ClusterProcesses, rate: float, measure_s: float) -> Cost:
    nodes = list(cluster.nodes.values())
    gateways = [node for node in nodes if node.is_gateway]
    window, lag_max = (100, 900) if rate else (WINDOW, 50)
    scenario = Scenario(
        "scale", "", Figure.CPU, 0.0, 1, PAIRS, lag_max=lag_max, window=window, batch=bool(rate)
    )
    loop = Loop()
    made = open_flows(scenario, [node.port for node in gateways or nodes], loop)
    drive(made, loop, WARM_UP_S, rate)

    def now() -> tuple[Counts, int, float, float, float]:
        delivered = sum(flow.delivered() for flow in made)
        return counts(nodes), delivered, time.process_time(), machine_busy_s(), time.monotonic()

    before, sent, own_s, busy_s, began = now()
    drive(made, loop, measure_s, rate)
    after, delivered, own_later_s, busy_later_s, ended = now()
    messages, spent = delivered - sent, after.since(before)
    missing = settle(Measurement(messages), made, loop).missing
    others_s = busy_later_s - busy_s - spent.cpu_s - (own_later_s - own_s)
    return Cost(
        len(nodes) - len(gateways),
        len(gateways),
        messages / (ended - began),
        bool(rate),
        spent.cpu_s / messages * 1e6,
        *(getattr(spent, each) / messages for each in list(vars(spent))[1:]),
        missing,
        max(0.0, others_s / (ended - began)),
    )


def join(cluster: ClusterProcesses) -> Join:
    """Adds a node behind the loads, and waits until it has its share."""
    nodes = [node for node in cluster.nodes.values() if node.has_data]
    joined = cluster.add_node()
    even = REPLICAS * len(cluster.status()["partitions"]) / (len(nodes) + 1)
    until(
        lambda: replicas(cluster)[joined.node_id] >= int(even), "its share of partitions", MOVES_S
    )
    settled(cluster)
    stored = [metric(each.admin("/metrics")[1], "holdfast_log_bytes") for each in [*nodes, joined]]
    return Join(
        len(nodes), stored[-1], sum(stored) / len(stored), max(replicas(cluster).values()) / even
    )


def replicas(cluster: ClusterProcesses) -> dict[str, int]:
    """The partitions of which each node is a replica."""
    partitions = cluster.status()["partitions"]
    return {name: sum(name in each["replicas"] for each in partitions) for name in cluster.nodes}


def measure(directory: Path, measure_s: float, report: Callable[[Cost], None]) -> Scale:
    costs = []
    joined = None
    for data, gateways in SHAPES:
        factor = min(data, REPLICAS)
        settings = {"cluster": {"replication_factor": factor, "min_insync": (factor + 1) // 2}}
        count = data + gateways
        names = [f"n{number}" for number in range(data + 1, count + 1)]
        where = directory / f"{data}-{gateways}"
        with ClusterProcesses(where, count, settings, gateways=names) as cluster:
            settled(cluster)
            for rate in RATES:
                costs.append(load(cluster, rate, measure_s))
                report(costs[-1])
            if data == 5:
                joined = join(cluster)
    assert joined is not None
    return Scale(costs, joined)


def print_heading() -> None:
    print(
        "| nodes | messages/s | CPU | wake-ups | fdatasyncs | frames | bytes sent | bytes stored |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)


def print_cost(cost: Cost) -> None:
    nodes = f"{cost.nodes} and {cost.gateways} gateways" if cost.gateways else f"{cost.nodes}"
    print(
        f"| {nodes} | {cost.rate:,.0f} | {cost.cpu_us:.1f} µs | {cost.wake_ups:.2f}"
        f" | {cost.syncs:.2f} | {cost.frames:.2f} | {cost.sent_bytes:.0f}"
        f" | {cost.stored_bytes:.0f} |",
        flush=True,
    )


def print_verdict(found: Scale) -> None:
    one = found.join
    print(
        f"a node that joins {one.nodes} others received {one.moved_bytes / 1e6:.1f} MB, an even"
        f" share is {one.even_bytes / 1e6:.1f} MB; the fullest node then has"
        f" {one.largest_share:.2f} of an even share of replicas"
    )
    faults = found.faults()
    judged = ", CPU not judged: other processes were at work" * found.is_disturbed()
    print((f"MISS: {'; '.join(faults)}" if faults else "pass") + judged)

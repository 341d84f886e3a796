"""What nodes of an idle cluster say to one another, by nodes and partitions.

Each node has a network of its own, whose interface the kernel counts: every byte and packet that a
node sends, headers and acknowledgements included. Nobody else speaks to them meanwhile.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.process import cpu_s
from tests.e2e.chaos_site import SETTINGS, cluster_site

SETTLE_S: Final = 3.0
COLUMNS: Final = "{:>6} {:>11} {:>12} {:>14} {:>16} {:>11}"


@dataclass
class Idle:
    """Sums over all nodes; CPU in percent of one core, of the average node."""

    nodes: int
    partitions: int
    packets_per_s: float
    bytes_per_s: float
    cpu_percent: float


def _sent(pid: int) -> tuple[int, int]:
    """Bytes and packets that the host of this process has sent."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            fields = counters.split()
            return int(fields[8]), int(fields[9])
    raise ValueError(f"process {pid} has no eth0")


def measure(directory: Path, nodes: int, partitions: int, measure_s: float) -> Idle:
    settings = {**SETTINGS, "cluster": {"partitions": partitions}}
    with cluster_site(directory, nodes, settings, is_watched=False) as site:
        pids = [node.process.pid for node in site.nodes.values() if node.process]
        time.sleep(SETTLE_S)
        before, cpu_before_s = [_sent(pid) for pid in pids], sum(map(cpu_s, pids))
        began = time.monotonic()
        time.sleep(measure_s)
        took_s = time.monotonic() - began
        after, cpu_after_s = [_sent(pid) for pid in pids], sum(map(cpu_s, pids))
    sent = [
        sum(new[field] - old[field] for new, old in zip(after, before, strict=True))
        for field in (0, 1)
    ]
    return Idle(
        nodes,
        partitions,
        sent[1] / took_s,
        sent[0] / took_s,
        (cpu_after_s - cpu_before_s) / took_s / nodes * 100,
    )


def print_heading() -> None:
    titles = ["nodes", "partitions", "packets/s", "bytes/s", "bytes/s a node", "CPU % each"]
    print(COLUMNS.format(*titles), flush=True)


def print_idle(found: Idle) -> None:
    print(
        COLUMNS.format(
            found.nodes,
            f"{found.partitions:,}",
            f"{found.packets_per_s:,.0f}",
            f"{found.bytes_per_s:,.0f}",
            f"{found.bytes_per_s / found.nodes:,.0f}",
            f"{found.cpu_percent:.1f}",
        ),
        flush=True,
    )

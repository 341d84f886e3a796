"""A cluster of three beside a single node: latency at a fixed rate, and CPU a message."""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.measurement import OTHERS_BUSY_MAX, percentile
from bench.paced import Probe
from bench.process import cpu_s, machine_busy_s
from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import ClusterProcesses

RATES: Final = (1000.0, 3000.0)
TOPICS: Final = 24
"""In as many partitions, nearly: so that every node leads some."""
WARM_UP_S: Final = 1.0
LATENCY_TARGET_MS: Final = 5.0
"""99 % of PUBACKs, at the first rate."""
CPU_RATIO_TARGET: Final = 4.0
COLUMNS: Final = "{:<10} {:>8} {:>20} {:>20} {:>12} {:>10}"


@dataclass
class Speed:
    """One run. Times in ms; CPU of all broker processes together, a delivered message."""

    rate: float
    puback_p50_ms: float
    puback_p99_ms: float
    delivery_p50_ms: float
    delivery_p99_ms: float
    cpu_us: float
    late_p99_ms: float
    """By how much the generator itself was behind the clock."""
    missing: int
    others_busy: float
    """Cores kept busy by anything but brokers and generator."""


def measure(port: int, sink_port: int, pids: list[int], rate: float, measure_s: float) -> Speed:
    probe = Probe(port, rate, sink_port=sink_port, topics=TOPICS)
    try:
        probe.run_for(WARM_UP_S)
        sent, acked, delivered = probe.sent, probe.acked, len(probe.delivery_ms)
        brokers_s, own_s, busy_s = sum(map(cpu_s, pids)), time.process_time(), machine_busy_s()
        began = time.monotonic()
        probe.run_for(measure_s)
        took_s = time.monotonic() - began
        brokers_s = sum(map(cpu_s, pids)) - brokers_s
        own_s, busy_s = time.process_time() - own_s, machine_busy_s() - busy_s
        delivered = len(probe.delivery_ms) - delivered
        probe.drain()
    finally:
        probe.sink.close()
        probe.source.close()
    pubacks, deliveries = sorted(probe.puback_ms[acked:]), sorted(probe.delivery_ms[sent:])
    return Speed(
        rate,
        percentile(pubacks, 0.5),
        percentile(pubacks, 0.99),
        percentile(deliveries, 0.5),
        percentile(deliveries, 0.99),
        brokers_s / delivered * 1e6,
        percentile(sorted(probe.late_ms[sent:]), 0.99),
        probe.sent - min(probe.acked, len(probe.delivery_ms)),
        max(0.0, (busy_s - brokers_s - own_s) / took_s),
    )


@dataclass
class Comparison:
    single: dict[float, list[Speed]]
    cluster: dict[float, list[Speed]]

    def latency_ms(self) -> float:
        return median(self.cluster[RATES[0]], lambda speed: speed.puback_p99_ms)

    def cpu_ratio(self, rate: float) -> float:
        pairs = zip(self.cluster[rate], self.single[rate], strict=True)
        return statistics.median(one.cpu_us / other.cpu_us for one, other in pairs)

    def missing(self) -> int:
        runs = [*self.single.values(), *self.cluster.values()]
        return sum(speed.missing for speeds in runs for speed in speeds)

    def is_met(self) -> bool:
        ratios = [self.cpu_ratio(rate) for rate in RATES]
        is_fast = self.latency_ms() < LATENCY_TARGET_MS
        return is_fast and max(ratios) <= CPU_RATIO_TARGET and not self.missing()

    def as_json(self) -> dict[str, object]:
        def runs(of: dict[float, list[Speed]]) -> list[dict[str, object]]:
            return [asdict(speed) for speeds in of.values() for speed in speeds]

        return {"single": runs(self.single), "cluster": runs(self.cluster), "met": self.is_met()}


def median(speeds: list[Speed], figure: Callable[[Speed], float]) -> float:
    return statistics.median(figure(speed) for speed in speeds)


def compare(directory: Path, rounds: int, measure_s: float) -> Comparison:
    """In alternating rounds; the cluster's publisher and subscriber are at two of its nodes."""
    found = Comparison({rate: [] for rate in RATES}, {rate: [] for rate in RATES})
    with ExitStack() as stack:
        (directory / "single").mkdir()
        single = Holdfast(directory / "single", {"log": {"partitions": 64}})
        stack.callback(single.kill)
        single.start()
        cluster = stack.enter_context(ClusterProcesses(directory / "cluster", 3))
        first, second, _ = cluster.nodes.values()
        pids = [node.process.pid for node in cluster.nodes.values() if node.process]
        assert single.process is not None
        for _ in range(rounds):
            for rate in RATES:
                speed = measure(single.port, single.port, [single.process.pid], rate, measure_s)
                found.single[rate].append(speed)
                speed = measure(first.port, second.port, pids, rate, measure_s)
                found.cluster[rate].append(speed)
    return found


def print_comparison(found: Comparison) -> None:
    titles = ["", "rate/s", "PUBACK p50, p99 ms", "delivery p50, p99", "CPU µs", "x single"]
    print(COLUMNS.format(*titles))
    for name, runs in (("single", found.single), ("cluster", found.cluster)):
        for rate, speeds in runs.items():
            pubacks = [
                median(speeds, lambda one: one.puback_p50_ms),
                median(speeds, lambda one: one.puback_p99_ms),
            ]
            deliveries = [
                median(speeds, lambda one: one.delivery_p50_ms),
                median(speeds, lambda one: one.delivery_p99_ms),
            ]
            ratio = f"{found.cpu_ratio(rate):.2f}" if name == "cluster" else ""
            cpu_us = median(speeds, lambda one: one.cpu_us)
            disturbed = sum(one.others_busy > OTHERS_BUSY_MAX for one in speeds)
            line = COLUMNS.format(
                name,
                f"{rate:,.0f}",
                "{:.2f}, {:.2f}".format(*pubacks),
                "{:.2f}, {:.2f}".format(*deliveries),
                f"{cpu_us:.1f}",
                ratio,
            )
            print(line + (f"  {disturbed} of {len(speeds)} disturbed" if disturbed else ""))
    print(
        f"targets: PUBACK p99 < {LATENCY_TARGET_MS:g} ms at {RATES[0]:,.0f}/s, CPU at most"
        f" {CPU_RATIO_TARGET:g} times a single node's, none missing ({found.missing()}):"
        f" {'pass' if found.is_met() else 'MISS'}"
    )

"""The CPU of a message and the memory of a connection with several processes.

    python -m bench.processes [--quick] [--only tcp|tls] [--pace full|even] [--processes N]
        [--json PATH]

100 publishers send to one subscriber each at QoS 0; another form has 50 at QoS 1. They send as fast
as the broker allows ("full"), and at a rate that one process carries ("even"). Each form runs with
one process, and with 2, 4, ... up to `--processes` (by default the cores of the machine). The
generator has one process, and runs on the same machine.

The first table has the sum of all processes of the broker: CPU, waits of the event loops and frames
between processes, a message. The latencies are the 99th percentiles of QoS 1 messages beside the
load, to the PUBACK and to the delivery. The second table has the figures of each process, and its
share of the client connections.

The last table is a model for machines with more cores. With N processes, a publisher and its
subscriber are at different ones with a probability of (N - 1) / N. So a message costs
`one + x * (N - 1) / N`, where x follows from the figures of two processes. N cores carry
`N / cost / uneven` messages a second, where `uneven` is the CPU of the busiest of the most
processes that were measured, by an even share. The model assumes that the cores share no other
limit: memory, disk and network carry it all.
"""

import argparse
import os
import re
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

from bench import brokers
from bench.cluster_scale import metric, wake_ups
from bench.connection import Connection, Loop
from bench.flows import Flow
from bench.generator import drive, open_flows, settle
from bench.measurement import Measurement, percentile
from bench.options import new_parser, write_json
from bench.paced import Probe
from bench.process import process_cpu_s, rss_bytes
from bench.scenarios import by_name
from holdfast_lab.targets.target import free_port

MODELLED: Final = (1, 2, 4, 8, 16, 32)
IDLE: Final = 2000
"""The idle connections whose memory is measured."""
READY_S: Final = 120.0
STARTED: Final = re.compile(r"process_started process=(\d+) pid=(\d+)")
SCENARIOS: Final = {
    "tcp": ("qos0-100to100", "qos1-50to50"),
    "tls": ("tls-qos0-100to100", "tls-qos1-50to50"),
}
EVEN: Final = {"tcp": (30_000.0, 12_000.0), "tls": (5_000.0, 2_000.0)}
"""Messages a second by transport and QoS."""
WARM_UP_S: Final = 1.0
PROBES: Final = 8
"""The pairs of clients whose messages are timed. By chance, a pair is at one process or at two."""
PROBED_S: Final = 0.02
"""The time between two messages of a pair."""


@dataclass
class Share:
    """One process: CPU in microseconds, waits and frames a message of all processes."""

    cpu_us: float
    waits: float
    frames: float
    connections: float


@dataclass
class Cost:
    transport: str
    qos: int
    pace: str
    processes: int
    rate: float
    """Messages a second."""
    shares: list[Share]
    puback_p99_ms: float
    delivery_p99_ms: float
    connection_bytes: int
    missing: int

    @property
    def cpu_us(self) -> float:
        return sum(each.cpu_us for each in self.shares)

    @property
    def uneven(self) -> float:
        """The CPU of the busiest process, by an even share."""
        return max(each.cpu_us for each in self.shares) * self.processes / self.cpu_us

    def cells(self) -> list[str]:
        sums = [sum(getattr(each, name) for each in self.shares) for name in ("waits", "frames")]
        return [
            f"{self.transport} QoS {self.qos}, {self.pace}",
            f"{self.processes}",
            f"{self.rate:,.0f}",
            f"{self.cpu_us:.1f} µs",
            *(f"{each:.2f}" for each in sums),
            f"{self.puback_p99_ms:.1f}, {self.delivery_p99_ms:.1f} ms",
            f"{self.uneven:.2f}",
            f"{self.connection_bytes:,}",
        ]


HEADS: Final = (
    "traffic", "processes", "messages/s", "CPU", "waits", "frames", "p99", "uneven",
    "bytes a connection",
)  # fmt: skip
OF_EACH: Final = ("traffic", "process", "CPU", "waits", "frames", "connections")


class Served:
    """A broker of one or several processes, and the counters of each."""

    def __init__(self, broker: brokers.Broker, processes: int, admin_port: int) -> None:
        self.broker = broker
        self.pids = await_ready(broker, processes)
        self._url = f"http://127.0.0.1:{admin_port}/metrics"

    def shares(self) -> list[Share]:
        with urllib.request.urlopen(self._url) as reply:
            lines = reply.read().decode().splitlines()
        found = []
        for number, pid in enumerate(self.pids):
            own = [line for line in lines if len(self.pids) == 1 or f'process="{number}"' in line]
            names = ("peer_frames_sent_total", "connections")
            values = [metric("\n".join(own), f"holdfast_{name}") for name in names]
            found.append(Share(process_cpu_s(pid) * 1e6, wake_ups(pid), *values))
        return found


class Timed:
    """A load with timed messages beside it."""

    def __init__(self, made: list[Flow], loop: Loop, port: int, transport: str) -> None:
        self._flows = made
        self._loop = loop
        self.probes = [
            Probe(port, 0, name=f"probe-{number}", transport=transport) for number in range(PROBES)
        ]
        for probe in self.probes:
            loop.add(probe.sink, probe.handle_delivery)
            loop.add(probe.source, probe.handle_puback)

    def run(self, duration_s: float, rate: float) -> None:
        """Each part begins with another flow, because it is not long enough for all of them."""
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            for probe in self.probes:
                probe.publish(time.monotonic_ns())
            drive(self._flows, self._loop, PROBED_S, rate)
            begin = int(rate * PROBED_S) % len(self._flows)
            self._flows = self._flows[begin:] + self._flows[:begin]

    def delivered(self) -> int:
        flows = sum(flow.delivered() for flow in self._flows)
        return flows + sum(len(probe.delivery_ms) for probe in self.probes)

    def p99_ms(self, name: str) -> float:
        """That of the times with this name, of all probes."""
        times = [each for probe in self.probes for each in getattr(probe, name)]
        return percentile(sorted(times), 0.99)


def await_ready(broker: brokers.Broker, processes: int) -> list[int]:
    """Waits until all processes serve. Returns their ids."""
    if processes == 1:
        return [broker.pid]
    deadline = time.monotonic() + READY_S
    while True:
        broker.check_running()
        log = "\n".join(broker.log_lines())
        found = {int(number): int(pid) for number, pid in STARTED.findall(log)}
        if "processes_ready" in log and len(found) == processes:
            return [found[number] for number in sorted(found)]
        if time.monotonic() > deadline:
            raise TimeoutError("the processes are not ready in time")
        time.sleep(0.05)


def measure(
    parent: Path, transport: str, qos: int, pace: str, processes: int, duration_s: float
) -> Cost:
    rate = EVEN[transport][qos] if pace == "even" else 0.0
    scenario = by_name(SCENARIOS[transport][qos])
    if rate:
        scenario = replace(scenario, batch=1, lag_max=900)
    feature = f"processes-{processes}" if processes > 1 else ""
    admin_port = free_port()
    broker = brokers.start_holdfast(
        parent, "memory", transport=transport, feature=feature, admin_port=admin_port
    )
    try:
        served = Served(broker, processes, admin_port)
        memory_bytes = sum(map(rss_bytes, served.pids))
        idle = [Connection(broker.port, f"idle-{index}", transport) for index in range(IDLE)]
        connection_bytes = (sum(map(rss_bytes, served.pids)) - memory_bytes) // IDLE
        for each in idle:
            each.socket.close()
        loop = Loop()
        made = open_flows(scenario, [broker.port], loop)
        load = Timed(made, loop, broker.port, transport)
        load.run(WARM_UP_S, rate)
        before, delivered, began = served.shares(), load.delivered(), time.monotonic()
        load.run(duration_s, rate)
        after, messages = served.shares(), load.delivered() - delivered
        took_s = time.monotonic() - began
        connections = sum(each.connections for each in after)
        shares = [
            Share(
                (later.cpu_us - earlier.cpu_us) / messages,
                (later.waits - earlier.waits) / messages,
                (later.frames - earlier.frames) / messages,
                later.connections / connections,
            )
            for earlier, later in zip(before, after, strict=True)
        ]
        missing = settle(Measurement(messages), made, loop).missing
        return Cost(
            transport,
            qos,
            pace,
            processes,
            messages / took_s,
            shares,
            load.p99_ms("puback_ms"),
            load.p99_ms("delivery_ms"),
            connection_bytes,
            missing,
        )
    finally:
        broker.stop()


def model(one_us: float, two_us: float, uneven: float) -> list[float]:
    """The messages a second on the cores of MODELLED."""
    crossing_us = 2 * (two_us - one_us)
    return [
        cores * 1e6 / (one_us + crossing_us * (cores - 1) / cores) / (uneven if cores > 1 else 1)
        for cores in MODELLED
    ]


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def head(*cells: str) -> None:
    row(*cells)
    row(*("---",) * len(cells))


def print_each(costs: list[Cost]) -> None:
    head(*OF_EACH)
    for cost in costs:
        for number, each in enumerate(cost.shares):
            name = f"{cost.transport} QoS {cost.qos}, {cost.pace}"
            figures = [f"{each.cpu_us:.1f} µs", f"{each.waits:.2f}", f"{each.frames:.2f}"]
            row(name, f"{number} of {cost.processes}", *figures, f"{each.connections:.0%}")


def print_model(costs: list[Cost]) -> None:
    head("messages/s on N cores", *map(str, MODELLED))
    for one in (each for each in costs if each.processes == 1):
        key = (one.transport, one.qos, one.pace)
        same = [each for each in costs if (each.transport, each.qos, each.pace) == key]
        if len(same) > 1:
            found = model(one.cpu_us, same[1].cpu_us, same[-1].uneven)
            row(one.cells()[0], *(f"{each / 1000:,.0f}k" for each in found))


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.processes", __doc__, "--quick")
    parser.add_argument("--only", choices=sorted(SCENARIOS), help="one transport")
    parser.add_argument("--pace", choices=("full", "even"), help="one of the two loads")
    parser.add_argument("--processes", type=int, default=max(2, os.cpu_count() or 1))
    options: argparse.Namespace = parser.parse_args(argv)
    counts = [1, *(each for each in MODELLED if 1 < each <= options.processes)]
    transports = [options.only] if options.only else sorted(SCENARIOS)
    paces = [options.pace] if options.pace else ["full", "even"]
    costs: list[Cost] = []
    head(*HEADS)
    with tempfile.TemporaryDirectory() as directory:
        for transport, qos, pace, count in product(transports, (0, 1), paces, counts):
            duration_s = 2.0 if options.quick else 10.0
            cost = measure(Path(directory), transport, qos, pace, count, duration_s)
            costs.append(cost)
            row(*cost.cells())
    print()
    print_each(costs)
    print()
    print_model(costs)
    write_json(options.json, [asdict(cost) for cost in costs])
    return 1 if any(cost.missing for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The CPU of a message and the memory of a connection with several processes.

    python -m bench.processes [--quick] [--only tcp|tls] [--times N] [--processes N] [--json PATH]

100 publishers send to one subscriber each at a fixed rate, QoS 0; another form has 50 at QoS 1.
Each form runs with one process, and with 2, 4, ... up to `--processes` (by default the cores of the
machine). The figures are the CPU time of all processes of the broker, a message, and that of the
busiest one. The generator has one process, and runs on the same machine.

The last table is a model for machines with more cores. With N processes, a publisher and its
subscriber are at different ones with a probability of (N - 1) / N. So a message costs
`one + x * (N - 1) / N`, where x follows from the figures of two processes, and N cores carry
`N / cost` messages a second. The model assumes that the cores share no other limit: memory, disk
and network carry it all, and connections are divided evenly.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import brokers
from bench.connection import Connection, Loop
from bench.flows import Publisher, Qos1Publisher, Qos1Subscriber, Subscriber
from bench.options import new_parser, write_json
from bench.process import process_cpu_s, rss_bytes
from bench.scenarios import PAYLOAD_BYTES
from bench.wire import Frame

MODELLED: Final = (1, 2, 4, 8, 16, 32)
IDLE: Final = 2000
"""The idle connections whose memory is measured."""
READY_S: Final = 120.0
STARTED: Final = re.compile(r"process_started process=(\d+) pid=(\d+)")
RATES: Final = {"tcp": {0: 10_000, 1: 4_000}, "tls": {0: 5_000, 1: 2_000}}
"""Messages a second by transport and QoS, which the generator keeps up with."""
PAIRS: Final = {0: 100, 1: 50}
WARM_UP_S: Final = 1.0
WINDOW: Final = 2000


@dataclass
class Cost:
    """CPU in microseconds a message, and memory in bytes a connection."""

    transport: str
    qos: int
    processes: int
    rate: int
    sum_us: float
    busiest_us: float
    connection_bytes: int
    missing: int


class Traffic:
    """Pairs of a publisher and its subscriber."""

    def __init__(self, port: int, transport: str, qos: int) -> None:
        self.loop = Loop()
        self.sent = 0
        self.sinks: list[Subscriber] = []
        self.sources: list[Publisher] = []
        for index in range(PAIRS[qos]):
            frame = Frame(f"bench/{index:04}", qos, PAYLOAD_BYTES)
            sink = Connection(port, f"sub-{index:04}", transport)
            sink.subscribe(f"bench/{index:04}", qos)
            self.sinks.append(Qos1Subscriber(sink, frame) if qos else Subscriber(sink, frame))
            self.loop.add(sink, self.sinks[-1].handle)
            connection = Connection(port, f"pub-{index:04}", transport)
            source = Publisher(connection, frame)
            if qos:
                source = Qos1Publisher(connection, frame, WINDOW)
            self.loop.add(connection, source.handle)
            self.sources.append(source)

    def run(self, rate: int, duration_s: float) -> None:
        """Send at this rate."""
        start = time.monotonic()
        sent = 0
        while (now := time.monotonic()) < start + duration_s:
            while sent < (now - start) * rate:
                self._send()
                sent += 1
            self.loop.run_once(0.0005)

    def _send(self) -> None:
        self.sources[self.sent % len(self.sources)].publish(1)
        self.sent += 1

    def received(self) -> int:
        return sum(sink.received for sink in self.sinks)

    def drain(self) -> int:
        """Wait for what is on its way, at most 5 s. The messages that are missing."""
        deadline = time.monotonic() + 5
        while self.received() < self.sent and time.monotonic() < deadline:
            self.loop.run_once(0.05)
        return self.sent - self.received()


def await_ready(broker: brokers.Broker, processes: int) -> list[int]:
    """Waits until all processes serve. Returns their ids."""
    if processes == 1:
        return [broker.pid]
    deadline = time.monotonic() + READY_S
    while True:
        broker.check_running()
        log = "\n".join(broker.log_lines())
        found = dict(STARTED.findall(log))
        nodes = [int(pid) for pid in found.values()]
        if "processes_ready" in log and len(nodes) == processes:
            return nodes
        if time.monotonic() > deadline:
            raise TimeoutError("the processes are not ready in time")
        time.sleep(0.05)


def measure(
    parent: Path, transport: str, qos: int, processes: int, rate: int, duration_s: float
) -> Cost:
    feature = f"processes-{processes}" if processes > 1 else ""
    broker = brokers.start_holdfast(parent, "memory", transport=transport, feature=feature)
    try:
        nodes = await_ready(broker, processes)
        memory_bytes = sum(map(rss_bytes, nodes))
        idle = [Connection(broker.port, f"idle-{index}", transport) for index in range(IDLE)]
        connection_bytes = (sum(map(rss_bytes, nodes)) - memory_bytes) // IDLE
        traffic = Traffic(broker.port, transport, qos)
        traffic.run(rate, WARM_UP_S)
        before = [process_cpu_s(each) for each in nodes]
        received = traffic.received()
        traffic.run(rate, duration_s)
        spent = [process_cpu_s(each) - was for each, was in zip(nodes, before, strict=True)]
        messages = traffic.received() - received
        missing = traffic.drain()
        traffic.loop.close()
        for each in idle:
            each.socket.close()
        return Cost(
            transport,
            qos,
            processes,
            rate,
            sum(spent) / messages * 1e6,
            max(spent) / messages * 1e6,
            connection_bytes,
            missing,
        )
    finally:
        broker.stop()


def model(one_us: float, two_us: float) -> list[float]:
    """The messages a second on the cores of MODELLED."""
    crossing_us = 2 * (two_us - one_us)
    return [cores * 1e6 / (one_us + crossing_us * (cores - 1) / cores) for cores in MODELLED]


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.processes", __doc__, "--quick")
    parser.add_argument("--only", choices=sorted(RATES), help="one transport")
    parser.add_argument("--times", type=float, default=3.0, help="so many times the usual rates")
    parser.add_argument("--processes", type=int, default=max(2, os.cpu_count() or 1))
    options: argparse.Namespace = parser.parse_args(argv)
    counts = [1, *(each for each in MODELLED if 1 < each <= options.processes)]
    costs: list[Cost] = []
    print("| traffic | processes | rate | sum, µs | busiest, µs | bytes a connection |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for transport in [options.only] if options.only else sorted(RATES):
            for qos in PAIRS:
                for count in counts:
                    rate = int(RATES[transport][qos] * options.times)
                    duration_s = 2.0 if options.quick else 10.0
                    cost = measure(Path(directory), transport, qos, count, rate, duration_s)
                    costs.append(cost)
                    print(
                        f"| {transport} QoS {qos} | {count} | {rate} | {cost.sum_us:.1f}"
                        f" | {cost.busiest_us:.1f} | {cost.connection_bytes} |",
                        flush=True,
                    )
    print(f"\n| messages/s on N cores | {' | '.join(map(str, MODELLED))} |")
    print("|---" * (len(MODELLED) + 1) + "|")
    for one in (each for each in costs if each.processes == 1):
        same = (each for each in costs if (each.transport, each.qos) == (one.transport, one.qos))
        two = next(each for each in same if each.processes == 2)
        found = model(one.sum_us, two.sum_us)
        cells = " | ".join(f"{each / 1000:.0f}k" for each in found)
        print(f"| {one.transport} QoS {one.qos} | {cells} |")
    write_json(options.json, [asdict(cost) for cost in costs])
    return 1 if any(cost.missing for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main())

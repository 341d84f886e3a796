"""The CPU of the broker's process and of its I/O workers, a message.

    python -m bench.io_workers [--quick] [--only tcp|tls] [--times N] [--json PATH]

100 publishers send to one subscriber each, at a fixed rate in all, QoS 0 and each message in a
write of its own. Another form has 50 at QoS 1, in memory. Each form runs with 0, 1 and 2 workers,
and with TLS. What is measured is CPU time, of the broker's own process, of its workers, and their
sum; the generator and all processes share the machine.
"""

import argparse
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
from bench.process import descendants, process_cpu_s
from bench.scenarios import PAYLOAD_BYTES
from bench.wire import Frame

WORKERS: Final = (0, 1, 2)
RATES: Final = {"tcp": {0: 10_000, 1: 4_000}, "tls": {0: 5_000, 1: 2_000}}
"""Messages a second by transport and QoS, which the generator keeps up with."""
PAIRS: Final = {0: 100, 1: 50}
WARM_UP_S: Final = 1.0
WINDOW: Final = 2000


@dataclass
class Cost:
    """CPU in microseconds a message."""

    transport: str
    qos: int
    workers: int
    messages: int
    broker_us: float
    workers_us: float
    missing: int
    rate: int

    @property
    def sum_us(self) -> float:
        return self.broker_us + self.workers_us


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


def measure(
    parent: Path, transport: str, qos: int, workers: int, rate: int, duration_s: float
) -> Cost:
    feature = f"io-workers-{workers}" if workers else ""
    broker = brokers.start_holdfast(parent, "memory", transport=transport, feature=feature)
    try:
        traffic = Traffic(broker.port, transport, qos)
        traffic.run(rate, WARM_UP_S)
        others = [each for each in descendants(broker.pid) if each != broker.pid]
        before = process_cpu_s(broker.pid), sum(map(process_cpu_s, others)), traffic.received()
        traffic.run(rate, duration_s)
        after = process_cpu_s(broker.pid), sum(map(process_cpu_s, others)), traffic.received()
        messages = after[2] - before[2]
        missing = traffic.drain()
        traffic.loop.close()
        return Cost(
            transport,
            qos,
            workers,
            messages,
            (after[0] - before[0]) / messages * 1e6,
            (after[1] - before[1]) / messages * 1e6,
            missing,
            rate,
        )
    finally:
        broker.stop()


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.io_workers", __doc__, "--quick")
    parser.add_argument("--only", choices=sorted(RATES), help="one transport")
    parser.add_argument("--times", type=float, default=1.0, help="so many times the usual rates")
    options: argparse.Namespace = parser.parse_args(argv)
    costs: list[Cost] = []
    print("form        workers  broker, us  workers, us  sum, us  missing")
    with tempfile.TemporaryDirectory() as directory:
        for transport in [options.only] if options.only else sorted(RATES):
            for qos in PAIRS:
                rate = int(RATES[transport][qos] * options.times)
                for workers in WORKERS:
                    duration_s = 2.0 if options.quick else 6.0
                    cost = measure(Path(directory), transport, qos, workers, rate, duration_s)
                    costs.append(cost)
                    print(
                        f"{transport} QoS {qos}   {workers:7}  {cost.broker_us:10.1f}"
                        f"  {cost.workers_us:11.1f}  {cost.sum_us:7.1f}  {cost.missing:7}",
                        flush=True,
                    )
    write_json(options.json, [asdict(cost) | {"sum_us": cost.sum_us} for cost in costs])
    return 1 if any(cost.missing for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main())

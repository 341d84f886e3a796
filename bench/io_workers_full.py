"""The CPU of the broker's process and of its I/O worker, a message, at full speed.

    python -m bench.io_workers_full [--quick] [--json PATH]

The traffic is that of the scenarios of `python -m bench` with the same names: each message in a
write of its own, as fast as the scenario's bounds allow. A broker without workers and one with one
worker run in alternating rounds, and the generator takes its share of the same cores. The figures
are medians over the rounds, with the lowest and the highest. `bench.io_workers` measures the same
at fixed rates.

TLS is compared at one rate for both transports. At full speed it carries fewer messages, so its
batches between the processes are smaller, and each message costs the broker's process more.
"""

import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from bench import brokers, process
from bench.comparison import Settings, generate_undisturbed
from bench.io_workers import Cost
from bench.io_workers import measure as measure_pace
from bench.measurement import Measurement
from bench.options import new_parser, write_json
from bench.scenarios import by_name

QOS_0, QOS_1, TLS = "qos0-100to100", "qos1-50to50-single", "tls-qos0-100to100"
WORKERS: Final = (0, 1)
OPEN_FILES: Final = 2000
GOALS: Final = (
    ("broker's process, QoS 0, µs", QOS_0, "core_us", 2.5),
    ("all processes, QoS 0, µs", QOS_0, "cpu_us", 12.0),
    ("broker's process, QoS 1, µs", QOS_1, "core_us", 7.0),
)
"""The goals with one worker: text, scenario, figure, and the most that it may be."""
TLS_MOST: Final = 1.05
"""The most CPU of the broker's process with TLS, over that without."""
TLS_RATE: Final = 15_000
"""The messages a second, QoS 0, at which both are measured."""


@dataclass
class Rounds:
    """The rounds of one scenario with one number of workers."""

    scenario: str
    workers: int
    measurements: list[Measurement] = field(default_factory=list)

    def figures(self, name: str) -> list[float]:
        return [getattr(each, name) for each in self.measurements]

    def median(self, name: str) -> float:
        return statistics.median(self.figures(name))

    def line(self) -> str:
        columns = [f"{self.scenario:18} {self.workers:7} {self.median('rate'):12,.0f}"]
        for name in ("core_us", "others_us", "cpu_us"):
            found = self.figures(name)
            columns.append(f"{self.median(name):6.2f} ({min(found):.2f}..{max(found):.2f})")
        return "  ".join(columns)


def measure(name: str, settings: Settings) -> list[Rounds]:
    """All rounds of a scenario."""
    scenario = by_name(name)
    found = [Rounds(name, workers) for workers in WORKERS]
    running = []
    try:
        for each in found:
            feature = f"io-workers-{each.workers}" if each.workers else ""
            running.append(
                brokers.start_holdfast(
                    settings.directory,
                    scenario.durability,
                    transport=scenario.transport,
                    feature=feature,
                )
            )
        for _ in range(settings.rounds):
            for each, broker in zip(found, running, strict=True):
                each.measurements.append(generate_undisturbed(scenario, broker, settings))
    finally:
        for broker in running:
            broker.stop()
    return found


def measure_tls(settings: Settings) -> list[Cost]:
    """Rounds of TCP and TLS in turn, at one rate and with one worker."""
    duration_s = 2 * settings.measure_s
    return [
        measure_pace(settings.directory, transport, 0, 1, TLS_RATE, duration_s)
        for _ in range(settings.rounds)
        for transport in ("tcp", "tls")
    ]


def print_goals(found: dict[tuple[str, int], Rounds], paced: list[Cost]) -> None:
    goals = [(text, found[name, 1].median(figure), most) for text, name, figure, most in GOALS]
    of = {
        transport: statistics.median(c.broker_us for c in paced if c.transport == transport)
        for transport in ("tcp", "tls")
    }
    print(f"\nbroker's process at {TLS_RATE:,}/s, µs: TCP {of['tcp']:.2f}, TLS {of['tls']:.2f}")
    goals.append(("broker's process with TLS, over that without", of["tls"] / of["tcp"], TLS_MOST))
    print("\ngoal with one worker                             measured  at most")
    for text, value, most in goals:
        result = "reached" if value <= most else "missed"
        print(f"{text:48} {value:8.2f} {most:8.2f}  {result}", flush=True)


def main(argv: list[str] | None = None) -> int:
    options = new_parser("bench.io_workers_full", __doc__, "--quick").parse_args(argv)
    process.raise_open_files_limit(OPEN_FILES)
    found: dict[tuple[str, int], Rounds] = {}
    print(
        "scenario           workers   messages/s  broker, µs           workers, µs          sum, µs"
    )
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(
            directory=Path(directory),
            rounds=2 if options.quick else 5,
            warm_up_s=0.3 if options.quick else 0.5,
            measure_s=1.0 if options.quick else 2.0,
            python=sys.executable,
            reference=None,
            candidate="holdfast",
        )
        for name in (QOS_0, QOS_1, TLS):
            for each in measure(name, settings):
                found[name, each.workers] = each
                print(each.line(), flush=True)
        paced = measure_tls(settings)
    print_goals(found, paced)
    rounds = [asdict(each) for each in found.values()]
    write_json(options.json, {"rounds": rounds, "tls": [asdict(each) for each in paced]})
    missing = [each.missing for one in found.values() for each in one.measurements]
    return 1 if any([*missing, *(each.missing for each in paced)]) else 0


if __name__ == "__main__":
    sys.exit(main())

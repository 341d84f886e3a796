"""The ceiling of one node by cores, from the CPU times that `bench.io_workers` measured.

    python -m bench.io_workers --json build/io-workers.json
    python -m bench.ceiling build/io-workers.json

The model knows three parts of a message: `alone`, the CPU time of a broker without workers; `core`,
that of the broker's process with them; and `workers`, that of all workers together. The broker's
process has one core, and each worker has one. So N cores carry, in messages a second,

    max(1 / alone, min(1 / core, (N - 1) / workers))

The universal scalability law describes the same node by C(N) = N / (1 + s (N - 1) + k N (N - 1)):
`s` is the serial share, core / (core + workers), and `k` the cost of agreement between the cores.
Workers share no state, so `k` is 0 here. It is an assumption: on two cores it cannot be measured.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CORES: Final = (1, 2, 3, 4, 8, 16)
SINGLE: Final = 1


@dataclass(frozen=True)
class Form:
    """The CPU times of a message in microseconds, in one form of traffic."""

    transport: str
    qos: int
    alone_us: float
    core_us: float
    workers_us: float

    def ceiling(self, cores: int) -> float:
        """The messages a second that so many cores carry."""
        without = 1e6 / self.alone_us
        if cores == SINGLE:
            return without
        return max(without, min(1e6 / self.core_us, (cores - 1) * 1e6 / self.workers_us))

    def scaled(self, cores: int) -> float:
        """The messages a second by the universal scalability law, without agreement."""
        each = 1e6 / (self.core_us + self.workers_us)
        return each * cores / (1 + self.serial_share() * (cores - 1))

    def serial_share(self) -> float:
        return self.core_us / (self.core_us + self.workers_us)

    def cores_at_limit(self) -> int:
        """The fewest cores at which the broker's process is the limit."""
        cores = 2
        while (cores - 1) * self.core_us < self.workers_us:
            cores += 1
        return cores


def forms(rows: list[dict[str, float | int | str]]) -> list[Form]:
    """The forms in the figures of `bench.io_workers`, with those of one worker."""
    by_key = {(str(row["transport"]), int(row["qos"]), int(row["workers"])): row for row in rows}
    found = []
    for transport, qos, workers in by_key:
        if workers == 1 and (transport, qos, 0) in by_key:
            one, none = by_key[transport, qos, 1], by_key[transport, qos, 0]
            parts = float(none["broker_us"]), float(one["broker_us"]), float(one["workers_us"])
            found.append(Form(transport, qos, *parts))
    return found


def render(rows: list[dict[str, float | int | str]]) -> str:
    """The tables as Markdown: the parts, and the ceiling by cores."""
    lines = [
        "| traffic | broker alone | broker's process | workers | serial share | limit from |",
        "|---|---|---|---|---|---|",
    ]
    found = forms(rows)
    for each in found:
        lines.append(
            f"| {each.transport.upper()}, QoS {each.qos} | {each.alone_us:.1f} µs"
            f" | {each.core_us:.1f} µs | {each.workers_us:.1f} µs"
            f" | {each.serial_share():.2f} | {each.cores_at_limit()} cores |"
        )
    lines += [
        "",
        f"| messages a second on N cores | {' | '.join(map(str, CORES))} |",
        f"|---|{'---|' * len(CORES)}",
    ]
    for each in found:
        for name, of in (("parts", each.ceiling), ("law", each.scaled)):
            cells = " | ".join(f"{of(cores) / 1000:,.0f}k" for cores in CORES)
            lines.append(f"| {each.transport.upper()}, QoS {each.qos}, {name} | {cells} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ceiling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", type=Path, help="what bench.io_workers --json wrote")
    options = parser.parse_args(argv)
    print(render(json.loads(options.figures.read_text())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

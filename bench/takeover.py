"""Whether the time a standby needs to take over grows with what there is to take over.

    python -m bench.takeover [--quick] [--json PATH] [--sessions 1,10000] [--journal 1MB,5GB]

A pair of nodes serves a publisher, the holder is killed with kill -9; the time is from the last
message confirmed by the one to the first confirmed by the other. With few and with many durable
sessions (one subscription each, all away), with a small and with a large journal. The journal is
filled through the broker, once; it needs its size in free disk space. In full about 5 minutes.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import brokers, process
from bench.durable_data import add_sessions, fill, journal_bytes
from bench.failover_run import ClientFailed, Plan, Round, Traffic, play
from bench.ledger import median_and_worst
from bench.options import new_parser, write_json
from bench.pair import Fault, Pair

SESSIONS: Final = "1,10000"
JOURNAL: Final = "1MB,5GB"
ROUNDS: Final = 5
QUICK_SESSIONS: Final = "1,1000"
QUICK_JOURNAL: Final = "1MB,100MB"
QUICK_ROUNDS: Final = 1
UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
SPACE_FACTOR: Final = 1.3
"""Free space asked for, of the largest journal: indexes, snapshots, and a reserve."""
RATIO_MAX: Final = 2.0
"""Of the medians with the most and with the least to take over; above it, time grows."""
NOISE_S: Final = 0.1
"""A median that is higher by less is not taken for growth."""
COLUMNS: Final = "{:>10} {:>12} {:>8} {:>10} {:>10} {:>14}"


@dataclass
class Stage:
    """One amount of data and its rounds."""

    sessions: int
    journal_bytes: int
    rounds: list[Round]

    def median_and_worst_s(self) -> tuple[float, float]:
        return median_and_worst([each.downtime_s for each in self.rounds])


def size_of(text: str) -> int:
    """Bytes of "5GB" and the like. Raises ValueError."""
    number, unit = text[:-2], text[-2:].upper()
    if not number.isdecimal() or unit not in UNITS or not int(number):
        raise ValueError(f"{text!r}: give a whole number and one of {', '.join(UNITS)}, e.g. 5GB")
    return int(number) * UNITS[unit]


def text_of(size: int) -> str:
    unit = next((unit for unit in ("GB", "MB") if size >= UNITS[unit]), "KB")
    return f"{size / UNITS[unit]:.1f} {unit}"


def order_of_stages(sessions: list[int], sizes: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Directories, each with the stages (sessions, journal bytes) it goes through. A journal can
    only grow and sessions are only added, so the first directory grows to the largest journal
    with the fewest sessions and then takes the rest of them; every other number of sessions
    starts at the smaller journals in a directory of its own. Thus the largest one is filled once.
    """
    first, *more = sorted(sessions)
    *small, large = sorted(sizes)
    yield [*((first, size) for size in [*small, large]), *((count, large) for count in more)]
    if small:
        yield from ([(count, size) for size in small] for count in more)


def run_directory(
    stages: list[tuple[int, int]], rounds: int, parent: Path, python: str
) -> Iterator[Stage]:
    """Raises ClientFailed, BrokerFailed."""
    rng = random.Random(len(stages))
    with tempfile.TemporaryDirectory(prefix="takeover-", dir=parent) as directory:
        data = Path(directory) / "data"
        sessions = 0
        for wanted, size in stages:
            missing = size - journal_bytes(data)
            with Pair(parent, python=python, data=data) as pair:
                port = pair.holder().port
                add_sessions(port, sessions, wanted)
                sessions = wanted
                fill(port, max(0, missing))
            filled = journal_bytes(data)
            # Started anew, so that what is measured is not warm from filling.
            with (
                Pair(parent, python=python, data=data) as pair,
                Traffic(Plan("holdfast"), pair.servers, pair.directory) as traffic,
            ):
                played = [play(pair, traffic, Fault.KILL, rng) for _ in range(rounds)]
                broken = traffic.finish().violations(exactly_once=False)
                if broken:
                    raise brokers.BrokerFailed(f"broken promise: {', '.join(broken)}")
            yield Stage(wanted, filled, played)


def print_stage(stage: Stage) -> None:
    median_s, worst_s = stage.median_and_worst_s()
    ready_s, _ = median_and_worst([each.ready_s for each in stage.rounds])
    print(
        COLUMNS.format(
            f"{stage.sessions:,}",
            text_of(stage.journal_bytes),
            len(stage.rounds),
            f"{median_s:.3f}",
            f"{worst_s:.3f}",
            f"{ready_s:.3f}",
        ),
        flush=True,
    )


def grows(stages: list[Stage]) -> bool:
    """Whether the slowest median is clearly above the fastest."""
    medians_s = [stage.median_and_worst_s()[0] for stage in stages]
    low_s, high_s = min(medians_s), max(medians_s)
    return high_s > low_s * RATIO_MAX and high_s > low_s + NOISE_S


def check_space(directory: Path, largest: int) -> None:
    """Raises SystemExit when the largest journal would not fit."""
    free = shutil.disk_usage(directory).free
    wanted = int(largest * SPACE_FACTOR)
    if free < wanted:
        raise SystemExit(
            f"{directory} has {text_of(free)} free, a journal of {text_of(largest)} needs "
            f"{text_of(wanted)}: give another --directory or a smaller --journal"
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser("bench.takeover", __doc__, "--quick", "--directory", "--python")
    parser.add_argument("--sessions", help=f"numbers (default {SESSIONS})")
    parser.add_argument("--journal", help=f"sizes (default {JOURNAL})")
    parser.add_argument("--rounds", type=int, help=f"of each size (default {ROUNDS})")
    arguments = parser.parse_args(argv)
    sessions = arguments.sessions or (QUICK_SESSIONS if arguments.quick else SESSIONS)
    journal = arguments.journal or (QUICK_JOURNAL if arguments.quick else JOURNAL)
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    try:
        arguments.sessions = sorted({int(each) for each in sessions.split(",")})
        arguments.journal = sorted({size_of(each) for each in journal.split(",")})
    except ValueError as error:
        parser.error(str(error))
    if arguments.sessions[0] < 1:
        parser.error("--sessions: allowed is 1 and more")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    check_space(arguments.directory, arguments.journal[-1])
    print(process.describe_disk(arguments.directory) + "\n")
    print(COLUMNS.format("sessions", "journal", "rounds", "median s", "worst s", "other ready s"))
    stages: list[Stage] = []
    try:
        for planned in order_of_stages(arguments.sessions, arguments.journal):
            for stage in run_directory(
                planned, arguments.rounds, arguments.directory, arguments.python
            ):
                stages.append(stage)
                print_stage(stage)
    except (ClientFailed, brokers.BrokerFailed) as error:
        print(f"FAILED: {error}")
        return 1
    print("takeover time grows with the data" if grows(stages) else "no growth")
    figures = {"stages": [asdict(each) for each in stages], "grows": grows(stages)}
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

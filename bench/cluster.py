"""What a cluster costs, and how long it is without service when it is hurt.

    python -m bench.cluster [--quick] [--only speed] [--json PATH] [--rounds FAULT=COUNT]
    python -m bench.cluster --only steady [--minutes 20] [--load 0.7]

speed: three nodes with every message on all of them, fsync everywhere, beside a single node: QoS 1
latency and CPU a message. faults: kill -9, SIGSTOP, partition and loss of a host under the load of
`make chaos`: the time without a confirmed publish on a partition whose leader was hurt, at nodes
that were not; and whether anything acknowledged was lost, repeated at QoS 2, or out of order.
idle: control traffic by nodes and partitions. These two need root, for network namespaces. steady:
three nodes under a part of the load that the machine sustains: what changes meanwhile, though
nobody has done anything to them. scale: the cost of a message at 1, 3, 5 and 7 nodes and with
gateways, and what a join moves. In full about 50 minutes.
"""

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench import cluster_scale, cluster_steady, process
from bench.cluster_idle import measure, print_heading, print_idle
from bench.cluster_speed import compare, print_comparison
from bench.connection import ConnectionLost
from bench.options import add_faults, new_parser, write_json
from holdfast_lab.targets.namespaces import missing
from tests.e2e.chaos_campaign import Outcome, play
from tests.e2e.chaos_faults import OF_A_CLUSTER, plan
from tests.e2e.chaos_site import NEED_DISKS, cluster_site

COUNTS: Final = {"kill -9 leader": 100, "SIGSTOP": 20, "partition": 20, "host lost": 20}
QUICK_COUNTS: Final = {"kill -9 leader": 4, "SIGSTOP": 2, "partition": 2}
TARGETS_S: Final[dict[str, tuple[float | None, float]]] = {
    "kill -9 leader": (0.3, 1.0),
    "SIGSTOP": (None, 1.5),
    "partition": (None, 1.5),
    "host lost": (None, 1.5),
}
"""Median and 99th percentile of the stalls."""
SHAPES: Final = [(nodes, partitions) for nodes in (3, 5) for partitions in (64, 256, 1024)]
QUICK_SHAPES: Final = [(3, 64), (3, 1024)]
SEED: Final = 1


def run_speed(arguments: argparse.Namespace, directory: Path) -> tuple[object, bool]:
    rounds, measure_s = (1, 3.0) if arguments.quick else (5, 8.0)
    found = compare(directory, rounds, measure_s)
    print_comparison(found)
    return found.as_json(), found.is_met()


def misses(outcome: Outcome) -> list[str]:
    """Targets that were not met, in words."""
    found = []
    for kind, (median_target_s, p99_target_s) in TARGETS_S.items():
        stalls = outcome.stalls(kind)
        if not stalls:
            continue
        median_s, p99_s = stalls[len(stalls) // 2], stalls[int(len(stalls) * 0.99)]
        if median_target_s is not None and median_s >= median_target_s:
            found.append(f"{kind}: median {median_s:.3f} s, target < {median_target_s:g} s")
        if p99_s >= p99_target_s:
            found.append(f"{kind}: p99 {p99_s:.3f} s, target < {p99_target_s:g} s")
    return found


def run_faults(arguments: argparse.Namespace, directory: Path) -> tuple[object, bool]:
    kinds = [kind for kind, count in arguments.counts.items() for _ in range(count)]
    random.Random(SEED).shuffle(kinds)
    with cluster_site(directory, 3, has_disks=bool(NEED_DISKS.intersection(kinds))) as site:
        outcome = play(site, plan(kinds, OF_A_CLUSTER, SEED), SEED, directory)
    print(outcome.report())
    missed = misses(outcome)
    if outcome.violations:
        print("FAILED: a promise was broken")
    else:
        print(f"MISS: {'; '.join(missed)}" if missed else "pass")
    figures = {
        "rounds": [asdict(each) for each in outcome.rounds],
        "violations": [asdict(each) for each in outcome.violations],
        "acknowledged": outcome.acknowledged,
        "missed": missed,
    }
    return figures, not missed and not outcome.violations


def run_idle(arguments: argparse.Namespace, directory: Path) -> tuple[object, bool]:
    print_heading()
    figures = []
    for nodes, partitions in QUICK_SHAPES if arguments.quick else SHAPES:
        where = directory / f"{nodes}x{partitions}"
        found = measure(where, nodes, partitions, 3.0 if arguments.quick else 10.0)
        print_idle(found)
        figures.append(asdict(found))
    return figures, True


def run_steady(arguments: argparse.Namespace, directory: Path) -> tuple[object, bool]:
    found = cluster_steady.measure(
        directory,
        arguments.minutes,
        arguments.load,
        arguments.rate,
        cluster_steady.print_stretch,
        cluster_steady.print_heading,
    )
    print(found.verdict())
    return found.as_json(), found.is_met()


def run_scale(arguments: argparse.Namespace, directory: Path) -> tuple[object, bool]:
    cluster_scale.print_heading()
    found = cluster_scale.measure(
        directory, 3.0 if arguments.quick else 10.0, cluster_scale.print_cost
    )
    cluster_scale.print_verdict(found)
    return found.as_json(), not found.faults()


PARTS: Final[dict[str, Callable[[argparse.Namespace, Path], tuple[object, bool]]]] = {
    "speed": run_speed,
    "faults": run_faults,
    "idle": run_idle,
    "steady": run_steady,
    "scale": run_scale,
}
NEED_ROOT: Final = ("faults", "idle")
STEADY_MINUTES: Final = 20.0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser("bench.cluster", __doc__, "--quick", "--directory")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be repeated")
    add_faults(parser, "--rounds", OF_A_CLUSTER)
    parser.add_argument(
        "--minutes",
        type=_positive,
        metavar="N",
        help=f"of steady (default {STEADY_MINUTES:g}, with --quick 1)",
    )
    parser.add_argument(
        "--load",
        type=_positive,
        default=0.7,
        metavar="SHARE",
        help="of steady: the part of what is sustained (default 0.7)",
    )
    parser.add_argument(
        "--rate",
        type=_positive,
        metavar="N",
        help="of steady: messages a second that count as sustained, instead of a ramp",
    )
    arguments = parser.parse_args(argv)
    arguments.counts = dict(arguments.rounds or (QUICK_COUNTS if arguments.quick else COUNTS))
    if arguments.minutes is None:
        arguments.minutes = 1.0 if arguments.quick else STEADY_MINUTES
    return arguments


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return value


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    print(process.describe_disk(arguments.directory))
    figures: dict[str, object] = {}
    is_well = True
    for name in arguments.only or PARTS:
        print(f"\n{name}", flush=True)
        if name in NEED_ROOT and missing():
            print(f"left out: {missing()}")
            continue
        with tempfile.TemporaryDirectory(prefix="cluster-", dir=arguments.directory) as directory:
            try:
                figures[name], is_met = PARTS[name](arguments, Path(directory))
            except (AssertionError, ConnectionLost, OSError, RuntimeError) as error:
                notes = "\n".join(getattr(error, "__notes__", []))
                print(f"FAILED: {error}\n{notes}")
                is_met = False
        is_well = is_well and is_met
    write_json(arguments.json, figures)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())

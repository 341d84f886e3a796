"""`python -m tests.sim`: simulated runs of whole clusters, with seeds that nobody has seen yet.

`--seed N` runs that one, and prints its last events if it goes wrong; `-v` prints all of them.
Without it the first seed is drawn from the system's randomness and printed, so that the whole run
can be repeated. Runs use all cores; one that goes wrong does not stop the others.
"""

import argparse
import multiprocessing
import os
import secrets
import sys
import time
from functools import partial

from tests.sim.casts import ALL_CASTS
from tests.sim.faults import ALL, DECAY, HOSTILE
from tests.sim.invariants import check_each_turn
from tests.sim.running import Result, run

FRESH_SEEDS = 100
"""Without `--seed` and `--seeds`."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    parser.add_argument("--seeds", type=int, help="so many, from --seed on; default: 1, or 100")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--nodes", type=int, default=0, help="default: 2, 3 or 5, by the seed")
    parser.add_argument(
        "--faults",
        default="",
        help=f"of {','.join(dict.fromkeys(ALL + DECAY + HOSTILE))}; none; default: by seed",
    )
    parser.add_argument("--casts", default="", help=f"of {','.join(ALL_CASTS)}; default: by seed")
    parser.add_argument(
        "--gateways", type=int, help="nodes without data, besides; default: by seed"
    )
    parser.add_argument("--duration", type=float, default=6.0, help="of the faults, in seconds")
    parser.add_argument(
        "--charge-cpu", action="store_true", help="CPU time passes; not the same run every time"
    )
    parser.add_argument("-v", action="store_true", help="print every event; one seed at a time")
    options = parser.parse_args()
    first = options.seed
    count = options.seeds
    if first is None:
        first = secrets.randbelow(1 << 32)
        count = FRESH_SEEDS if count is None else count
    elif count is None:
        count = 1
    if count == 1 or options.v:
        check_each_turn()
        results = [run(options, seed, is_told=True) for seed in range(first, first + count)]
        return 0 if all(result.is_well for result in results) else 1
    return _run_many(options, first, count)


def _run_many(options: argparse.Namespace, first: int, count: int) -> int:
    print(f"seeds {first} to {first + count - 1}, {options.jobs} at a time", flush=True)
    started = time.monotonic()
    results: list[Result] = []
    # Each process begins anew: a run is to depend on its seed alone.
    context = multiprocessing.get_context("spawn")
    with context.Pool(max(1, min(options.jobs, count))) as pool:
        try:
            for result in pool.imap_unordered(partial(run, options), range(first, first + count)):
                results.append(result)
                print(result.text, flush=True)
        except KeyboardInterrupt:
            pool.terminate()
    return summarize(options, results, count, time.monotonic() - started)


def summarize(
    options: argparse.Namespace, results: list[Result], count: int, seconds: float
) -> int:
    """Prints what came of `count` runs; the exit status."""
    wrong = sorted((each for each in results if not each.is_well), key=lambda each: each.seed)
    print(
        f"{len(results)} of {count} seeds: {len(results) - len(wrong)} well, {len(wrong)} wrong,"
        f" {seconds:.0f} s"
    )
    for result in wrong:
        print(f"  {_command(options, result.seed)}    {result.text.partition(': ')[2]}")
    return 1 if wrong or len(results) < count else 0


def _command(options: argparse.Namespace, seed: int) -> str:
    """That repeats the run."""
    parts = [f"python -m tests.sim --seed {seed}"]
    if options.nodes:
        parts.append(f"--nodes {options.nodes}")
    if options.gateways is not None:
        parts.append(f"--gateways {options.gateways}")
    if options.faults:
        parts.append(f"--faults {options.faults}")
    if options.casts:
        parts.append(f"--casts {options.casts}")
    if options.charge_cpu:
        parts.append("--charge-cpu")
    if options.duration != 6.0:
        parts.append(f"--duration {options.duration}")
    return " ".join(parts)


if __name__ == "__main__":
    sys.exit(main())

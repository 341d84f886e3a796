"""`python -m holdfast.sim --seed N --nodes 3 -v`: one simulated run, with its schedule."""

import argparse
import logging
import sys
import traceback

from holdfast.sim.casts import CASTS
from holdfast.sim.faults import ALL
from holdfast.sim.plans import settings_for
from holdfast.sim.schedule import Violation
from holdfast.sim.world import Settings, World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.sim")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="so many, from --seed on")
    parser.add_argument("--nodes", type=int, default=0, help="default: 3 or 5, by the seed")
    parser.add_argument("--faults", default="", help=f"of {','.join(ALL)}; none; default: by seed")
    parser.add_argument("--casts", default="", help=f"of {','.join(CASTS)}; default: by seed")
    parser.add_argument("--duration", type=float, default=6.0, help="of the faults, in seconds")
    parser.add_argument("-v", action="store_true", help="print every event")
    options = parser.parse_args()
    logging.getLogger("holdfast").setLevel(logging.CRITICAL + 1)
    failures = 0
    for seed in range(options.seed, options.seed + options.seeds):
        faults: tuple[str, ...] | None = None
        if options.faults:
            faults = () if options.faults == "none" else tuple(options.faults.split(","))
        casts = tuple(options.casts.split(",")) if options.casts else None
        settings = settings_for(seed, options.nodes, faults, options.duration, casts)
        failures += not run(seed, settings, options.v)
    return 1 if failures else 0


def run(seed: int, settings: Settings, verbose: bool) -> bool:
    """Prints what came of it; False: a violation."""
    world = World(seed, settings)
    if verbose:
        world.schedule.on_trace = print
    try:
        world.run()
    except Exception as error:  # noqa: BLE001
        if not verbose:
            print("\n".join(world.schedule.trace))
        if not isinstance(error, Violation):
            traceback.print_exc()
        print(f"seed {seed}: {type(error).__name__}: {error}")
        return False
    checks = world.checks
    print(
        f"seed {seed}: well; {world.settings.nodes} nodes, {world.faults.count} faults,"
        f" {checks.acknowledged} acknowledged, {checks.records} records, {len(checks.wills)} wills,"
        f" {world.schedule.now:.1f} s, {world.schedule.steps} steps, {world.schedule.digest:08x}"
    )
    return True


if __name__ == "__main__":
    sys.exit(main())

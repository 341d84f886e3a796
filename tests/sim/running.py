"""One simulated run, as `python -m tests.sim` asks for it. The processes that share the runs
import this module: they cannot import the one that was started with `-m`."""

import argparse
import logging
import time
import traceback
from dataclasses import dataclass

from tests.sim.plans import settings_for, widened
from tests.sim.schedule import Violation
from tests.sim.world import World


@dataclass(frozen=True)
class Result:
    seed: int
    is_well: bool
    text: str


def run(options: argparse.Namespace, seed: int, *, is_told: bool = False) -> Result:
    """`is_told`: print what happens if it is asked for or goes wrong, and the result."""
    logging.getLogger("holdfast").setLevel(logging.CRITICAL + 1)
    faults: tuple[str, ...] | None = None
    if options.faults:
        faults = () if options.faults == "none" else tuple(options.faults.split(","))
    casts = tuple(options.casts.split(",")) if options.casts else None
    gateways = options.gateways
    settings = settings_for(seed, options.nodes, faults, options.duration, casts, gateways or 0)
    if gateways is None and casts is None and not options.nodes:
        settings = widened(seed, settings)
    world = World(seed, settings)
    if options.charge_cpu:
        world.cpu_clock = time.thread_time
    if options.v:
        world.schedule.on_trace = print
    try:
        world.run()
    except Exception as error:  # noqa: BLE001
        text = f"seed {seed}: {type(error).__name__}: {error}"
        if is_told:
            if not options.v:
                print("\n".join(world.schedule.trace))
            if not isinstance(error, Violation):
                traceback.print_exc()
            print(text)
        return Result(seed, False, text)
    checks = world.checks
    text = (
        f"seed {seed}: well; {world.settings.nodes} nodes, {world.faults.count} faults,"
        f" {checks.acknowledged} acknowledged, {checks.records} records, {len(checks.wills)} wills,"
        f" {world.schedule.now:.1f} s, {world.schedule.steps} steps, {world.schedule.digest:08x}"
    )
    if is_told:
        print(text)
    return Result(seed, True, text)

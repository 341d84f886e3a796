"""Whole clusters of the production cores against everything that goes wrong at once: no promise to
a client is broken, and when all is well again nothing is missing. See tests.sim for what is
simulated and what is checked.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.__main__ import summarize
from tests.sim.casts import LOG
from tests.sim.faults import KILL, LAG, NETWORK, PAUSE, PROCESSES, RESET, SEVER
from tests.sim.plans import settings_for
from tests.sim.running import Result
from tests.sim.schedule import Violation
from tests.sim.world import World
from tests.support.seeds import block_of_seeds

SEEDS = 12
"""How many runs; `tests.sim` has more. A failure names its seed: python -m tests.sim --seed N"""
BLOCKS = 4
GATEWAY_SEEDS = 4
GATEWAY_FAULTS = (PROCESSES, NETWORK, (KILL, RESET), (LAG, KILL), (SEVER, KILL), (PAUSE,))
DURATION_S = 2.5
"""Of faults, in each."""
SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_promise_is_broken(block: int) -> None:
    for seed in block_of_seeds(block, BLOCKS, SEEDS):
        world = World(seed, settings_for(seed, duration_s=DURATION_S))
        try:
            world.run()
        except Exception as error:
            trace = "\n".join(world.schedule.trace)
            raise AssertionError(f"seed {seed}, {DURATION_S} s: {error}\n{trace}") from error


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_gateways_break_no_promise(block: int) -> None:
    """One or two nodes without data, whose reads of the log find it at another node."""
    for seed in block_of_seeds(block, BLOCKS, GATEWAY_SEEDS):
        chance = random.Random(f"gateways/{seed}")
        faults = chance.choice(GATEWAY_FAULTS)
        settings = settings_for(seed, 3, faults, DURATION_S, gateways=chance.choice((1, 2)))
        world = World(seed, settings)
        try:
            world.run()
        except Exception as error:
            trace = "\n".join(world.schedule.trace)
            raise AssertionError(f"seed {seed}, {DURATION_S} s: {error}\n{trace}") from error


def test_work_gets_done() -> None:
    """A run in which nothing happens shows nothing."""
    world = World(1, settings_for(1, 3, (), duration_s=1.5))
    world.run()
    checks = world.checks
    assert checks.acknowledged > 80
    assert checks.wills
    assert checks.retained


def test_cpu_time_passes_if_it_is_charged() -> None:
    """Work that arrives meanwhile waits, in order."""
    world = World(1, settings_for(1, 3, ()))
    world.cpu_clock = time.thread_time
    host = world.hosts["n1"]
    host.start()
    world.schedule.run(0.5)
    begun = world.schedule.now
    done: list[tuple[int, float]] = []

    def work() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    host.post(work)
    for number in range(3):
        host.post(lambda number=number: done.append((number, world.schedule.now)))  # type: ignore[misc]
    assert done == []
    world.schedule.run(1.0)
    assert [number for number, _ in done] == [0, 1, 2]
    assert done[0][1] >= begun + 0.05


@pytest.mark.parametrize("restarts", [False, True])
def test_a_disk_goes_back_while_all_others_have_what_was_agreed(restarts: bool) -> None:
    """No cluster survives it otherwise. n3 is down while n1 and n2 agree on a change of the
    metadata, and starts again. n1 goes back to before it while n2 is cut off: neither n1 nor n3
    knows of the change, and they agree on another one."""
    settings = replace(settings_for(2, 3, (), casts=(LOG,)), has_witness=True, min_insync=2)
    world = World(2, settings)
    n1, n3 = world.hosts["n1"], world.hosts["n3"]
    for host in world.hosts.values():
        host.start()
    world.schedule.advance(5.0)
    assert n1.process is not None
    assert len(n1.process.links) == 2
    for party in world.parties:
        party.is_active = True
    world.faults._go_back(n1)
    if restarts:
        n3.kill(power=False)
        world.schedule.run(0.1)
        for name in ("n1", "n2"):
            world.network.cut(name, "n3")
            world.network.cut("n3", name)
        n3.start()
    world.schedule.run(3.0)
    went_back = any("put back" in line for line in world.schedule.trace)
    assert went_back is not restarts


@pytest.mark.parametrize(
    "plan",
    [
        "--seed 7 --duration 1 --nodes 3",
        # One change of a session in a turn, so that the order of sessions shows.
        "--seed 13 --duration 2.5",
    ],
)
def test_a_seed_says_everything(plan: str) -> None:
    """The same run in another process, with other hash seeds and addresses."""
    command = [sys.executable, "-m", "tests.sim", *plan.split()]
    outputs = {
        subprocess.run(
            command,
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONMALLOC": allocator,
                "PYTHONPATH": str(SOURCE),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed, allocator in (("1", "pymalloc"), ("2", "malloc"))
    }
    assert len(outputs) == 1
    assert "well" in outputs.pop()


def test_fresh_seeds_on_several_cores() -> None:
    command = [
        sys.executable, "-m", "tests.sim", "--seeds", "3", "--jobs", "2", "--duration", "0.2",
        "--casts", "qos0", "--faults", "none",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 of 3 seeds: 3 well, 0 wrong" in done.stdout, done.stdout + done.stderr
    first = int(done.stdout.split()[1])
    assert all(f"seed {seed}: well" in done.stdout for seed in range(first, first + 3))


def test_a_wrong_run_is_told_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(
        nodes=3,
        faults="none",
        casts="log",
        duration=0.5,
        v=False,
        jobs=1,
        seed=5,
        seeds=2,
        charge_cpu=False,
        gateways=None,
    )
    results = [Result(5, True, "seed 5: well"), Result(6, False, "seed 6: Violation: no")]
    assert summarize(options, results, 2, 9.0) == 1
    text = capsys.readouterr().out
    assert "2 of 2 seeds: 1 well, 1 wrong, 9 s" in text
    command = "python -m tests.sim --seed 6 --nodes 3 --faults none --casts log --duration 0.5"
    assert command in text


def test_a_node_that_the_others_went_on_without_is_a_finding() -> None:
    """Without this the run would go on until nothing moves any more, and say nothing of why."""
    world = World(1, settings_for(1, 3, (), casts=(LOG,)))
    for host in world.hosts.values():
        host.start()
    world.schedule.advance(5.0)
    process = world.hosts["n2"].process
    assert process is not None
    process.cluster_node.meta.diverged = "the others have another change 33"
    with pytest.raises(Violation, match="n2: the others have another change 33"):
        world.schedule.run(1.0)


def test_a_node_with_a_damaged_disk_fetches_everything_anew() -> None:
    settings = replace(settings_for(1, 3, (), casts=(LOG,)), segment_bytes=8 << 10, snapshot_s=1e3)
    world = World(1, settings)
    for host in world.hosts.values():
        host.start()
    world._wait(10.0, world._not_ready, "not ready")
    for party in world.parties:
        party.is_active = True
    host = world.hosts["n2"]
    world._wait(20.0, lambda: "" if host.damage() else "one segment", "no complete segment")
    for party in world.parties:
        party.is_active = False
    world._wait(20.0, world._not_settled, "not settled")
    # It is read at the next start.
    host.kill(power=False)
    host.start()
    world._wait(10.0, lambda: "" if host.incarnations == 2 else "one disk", "not put aside")
    assert host.aside
    world._wait(30.0, world._not_settled, "not settled")
    world._wait(5.0, lambda: host.aside, "still put aside")
    world.checks.same_images()


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_whose_machines_all_lose_power_goes_on(seed: int) -> None:
    """Records count before they are synced. What was acknowledged a second ago is on disk."""
    settings = replace(settings_for(seed, 3, (), casts=(LOG,)), durable=False, min_insync=2)
    world = World(seed, replace(settings, has_witness=False, loses_one=False, duration_s=1.0))
    begin, chance = world.faults.begin, world.schedule.chance("outage")

    def lose_power() -> None:
        for party in world.parties:
            party.is_active = False
        world.schedule.after(2.0, kill_all)

    def kill_all() -> None:
        for host in world.hosts.values():
            host.kill(power=True)
            world.schedule.after(chance.random(), host.start)

    def begin_and_lose_power() -> None:
        begin()
        world.schedule.after(0.7, lose_power)

    world.faults.begin = begin_and_lose_power  # type: ignore[method-assign]
    world.settings = replace(world.settings, duration_s=5.0)
    world.run()
    assert all(host.boots == 1 and not host.is_incomplete for host in world.hosts.values())
    assert sum("is complete" in line for line in world.schedule.trace) >= 3

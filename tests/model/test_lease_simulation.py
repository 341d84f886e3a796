"""Nodes on one shared directory against stalls, pauses, crashes, power cuts, a full, failing,
read-only or vanishing directory, and clocks of their own: no promise is broken, and somebody
serves when all is well again. See tests/support/sim_world.py for what is checked.
"""

import pytest

from tests.support.seeds import block_of_seeds, run_worlds
from tests.support.sim_schedule import Owner, ThreadSchedule
from tests.support.sim_world import World

SEEDS = 24
"""How many worlds; a failure names its seed; `tests.model` runs more."""
BLOCKS = 8


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_promise_is_broken(block: int) -> None:
    run_worlds(block_of_seeds(block, BLOCKS, SEEDS), World)


def test_a_seed_says_everything() -> None:
    """What failed once can be looked at."""
    worlds = [World(5), World(5)]
    for world in worlds:
        world.play()
    assert worlds[0].trace == worlds[1].trace
    assert worlds[0].promised == worlds[1].promised


def test_the_worlds_are_rough() -> None:
    """Takeovers happen in them, and promises; a world where nothing happens shows nothing."""
    worlds = [World(seed) for seed in range(10)]
    for world in worlds:
        world.play()
    assert sum(world.takeovers for world in worlds) > 20
    assert sum(len(world.promised) for world in worlds) > 1000


def test_a_task_begins_when_another_has_ended() -> None:
    schedule = ThreadSchedule(0)
    done = []

    def first() -> None:
        schedule.spawn(owner, lambda: done.append("second"))
        done.append("first")

    owner = Owner()
    schedule.spawn(owner, first)
    schedule.run(1.0)
    assert done == ["first", "second"]

"""A shared group whose clients go from member to member, while messages are on their way to those
that leave. Each message that is acknowledged comes to the group: mostly once, and twice where those
who left had it and their member could not confirm that in time."""

import random
from dataclasses import replace

import pytest

from tests.support.seeds import block_of_seeds, run_seeds
from tests.support.sim_federation import World, random_edges, random_weather
from tests.support.sim_groups import QUICK, settle

SEEDS = 12
"""How many worlds; a failure names its seed."""
BLOCKS = 4
GROUP = "$share/m/a/#"


def moving_world(seed: int, duration_s: float = 15.0) -> World:
    rng = random.Random(seed)
    count = rng.choice((3, 4, 6))
    at = rng.randrange(count)
    subscriptions = {rng.randrange(count): ["a/#"]}
    subscriptions.setdefault(at, []).append(GROUP)
    weather = random_weather(rng)
    config = replace(QUICK, redundancy=rng.choice((1, 1, 2, 3)))
    world = World(count, random_edges(count, rng), seed, weather, config, subscriptions)
    world.run_until(world.is_stable, 60.0)
    end = world.now + duration_s
    serial = 0
    while world.now < end:
        for _ in range(rng.choice((1, 1, 5))):
            serial += 1
            topic = rng.choice(("a/1", "a/2"))
            world.publish(rng.randrange(count), topic, rng.choice((1, 2)), b"%d" % serial)
        if rng.random() < 0.1:
            before, at = at, rng.randrange(count)
            if at != before:
                world.run(rng.choice((0.0, 0.001, 0.01, 0.1)))
                if rng.random() < 0.5:
                    world.members[before].unsubscribe(GROUP)
                    world.members[at].subscribe(GROUP)
                else:
                    world.members[at].subscribe(GROUP)
                    world.members[before].unsubscribe(GROUP)
                # What is published before it is known where the group is now is for nobody. Where
                # frames are lost, that may take longer.
                world.run(3.0)
                world.run_until(world.is_agreed, 30.0)
        world.run(rng.choice((0.002, 0.05, 0.2)))
    settle(world, {GROUP: at}, 40.0)
    return world


def move_a_group(seed: int) -> None:
    world = moving_world(seed)
    assert any(group == GROUP for _, group in world.group_arrivals)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_group_loses_nothing_on_its_way(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), move_a_group)

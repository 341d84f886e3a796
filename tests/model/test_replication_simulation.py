"""Replicated partitions under crashes, power cuts, lost disks, cut and one-way links, stalls and
leaders that move at any time: see tests/support/sim_replication.py for what is checked."""

from collections import Counter

import pytest
from msgspec.structs import replace

from tests.support.seeds import block_of_seeds, run_worlds
from tests.support.sim_replication import World

SEEDS = 16
"""How many worlds; A failure names its seed; `tests.model` runs more."""
BLOCKS = 4


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_is_committed_stays(block: int) -> None:
    run_worlds(block_of_seeds(block, BLOCKS, SEEDS), World)


def test_a_seed_says_everything() -> None:
    """What failed once can be looked at."""
    worlds = [World(5), World(5)]
    for world in worlds:
        world.play()
    assert worlds[0].trace == worlds[1].trace
    assert worlds[0].ledger.ends == worlds[1].ledger.ends


def test_the_last_copy_that_was_being_added_may_lead() -> None:
    """As the production's controller lets it: only its disk has all that is committed."""
    world = World(3)
    info = world.metadata.partitions[0]
    lone = replace(info, replicas=("n1", "n2"), adding=("n3",), leader="", in_sync=("n3",))
    world.nodes["n3"].start()
    world.elect(0, lone, None)
    led = world.metadata.partitions[0]
    assert (led.leader, led.replicas, led.adding) == ("n3", ("n1", "n2", "n3"), ())


def test_the_worlds_are_rough() -> None:
    """Leaders change in them, logs are cut and begun anew, and still much is committed."""
    worlds = [World(seed) for seed in range(5)]
    for world in worlds:
        world.play()
    counts = Counter(name for world in worlds for name in world.seen.elements())
    assert sum(sum(world.ledger.ends) for world in worlds) > 1000
    assert counts["BecameLeader"] > 30
    cuts = [len(node.disk.cuts) for world in worlds for node in world.nodes.values()]
    assert sum(cuts) > 10
    assert counts["Restarted"] > 0
    assert counts["ReadBatches"] > 100

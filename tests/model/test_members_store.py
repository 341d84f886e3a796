"""Lives of five nodes that store only the partitions of which they are replicas, three each. The
others are fed to them, and a node that becomes a replica copies the log.

`python -m tests.sim --nodes 5` plays more of them.
"""

import pytest

from tests.sim.plans import settings_for
from tests.sim.world import World


@pytest.mark.parametrize(
    ("seed", "casts", "faults"),
    [(1, ("log",), ()), (12, ("groups",), ("kill", "leave"))],
)
def test_a_life(seed: int, casts: tuple[str, ...], faults: tuple[str, ...]) -> None:
    settings = settings_for(seed, 5, faults, 6.0, casts, 0)
    world = World(seed, settings)
    world.run()
    stored = {
        host.name: [
            partition
            for partition in range(settings.partitions)
            if host.process is not None and host.process.cluster_node.context.is_stored(partition)
        ]
        for host in world.data_hosts
    }
    copies = sum(map(len, stored.values()))
    assert copies == settings.partitions * settings.replication_factor, stored


@pytest.mark.parametrize(
    "seed",
    [
        33,
        42,
    ],
    ids=[
        "a node follows before its leader knows that it was added",
        "offsets before a segment are missing",
    ],
)
def test_devices(seed: int) -> None:
    """Lives that were wrong once: a node was sent nothing of a partition that it copies, and a
    segment without its gap ended before the next one."""
    World(seed, settings_for(seed, casts=("devices",))).run()


def test_a_log_that_begins_later() -> None:
    """A node is killed before its first snapshot, and is no replica of a partition whose log no
    longer begins at 0. It asked for its feed from 0 for ever, beside the empty log."""
    World(3000005, settings_for(3000005)).run()

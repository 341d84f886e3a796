"""Disks are lost and logs are shortened at the same time: what a log no longer tells comes from the
images of other nodes. See holdfast.node.state.transfer."""

from dataclasses import replace

import pytest

from holdfast.node.state.transfer import Transfer
from tests.sim.casts import LOG
from tests.sim.faults import KILL, PAUSE, POWER, WIPE
from tests.sim.plans import settings_for
from tests.sim.world import World

FAULTS = (WIPE, KILL, POWER, PAUSE)
SEEDS = (11, 16, 4, 27)
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "seed", [*SEEDS[:2], *(pytest.param(each, marks=LONG) for each in SEEDS[2:])]
)
def test_images_of_a_lost_disk_come_back(seed: int) -> None:
    """In the end every node has the same sessions, retained messages and so on."""
    settings = replace(
        settings_for(seed, 3, FAULTS, duration_s=3.0),
        snapshot_s=0.4,
        segment_bytes=4096,
        retention_bytes=4096,
    )
    world = World(seed, settings)
    try:
        world.run()
    except Exception as error:
        trace = "\n".join(world.schedule.trace)
        raise AssertionError(f"seed {seed}: {error}\n{trace}") from error


@pytest.mark.parametrize("seed", [3, pytest.param(5, marks=LONG)])
def test_a_gateway_that_was_away_gets_the_state(seed: int) -> None:
    """Its mark is below the start of the leaders' logs when it is back."""
    settings = replace(
        settings_for(seed, 3, (), duration_s=4.0, casts=(LOG,), gateways=1),
        snapshot_s=0.3,
        segment_bytes=2048,
        retention_bytes=2048,
        loses_one=False,
    )
    world = World(seed, settings)
    network, nodes = world.network, ("n1", "n2", "n3")
    begun: list[int] = []

    def cut() -> None:
        process = world.hosts["g1"].process
        assert process is not None
        effects = process.cluster_node.effects
        restart = effects.restart

        def note(partition: int, offset: int) -> None:
            begun.append(partition)
            restart(partition, offset)

        process.cluster_node.feeds.receiver.on_begins = note
        for node in nodes:
            network.cut("g1", node)
            network.cut(node, "g1")

    world.schedule.after(1.5, cut)
    world.schedule.after(3.5, network.heal)
    try:
        world.run()
    except Exception as error:
        trace = "\n".join(world.schedule.trace)
        raise AssertionError(f"seed {seed}: {error}\n{trace}") from error
    assert begun


def test_a_log_that_begins_later_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the nodes differ: so the runs above show something."""
    monkeypatch.setattr(Transfer, "restarted", _forgetful)
    for seed in SEEDS:
        try:
            test_images_of_a_lost_disk_come_back(seed)
        except AssertionError as error:
            if "differs" in str(error) or "retained on" in str(error):
                return
    pytest.fail("nobody missed them")


def _forgetful(self: Transfer, partition: int, offset: int) -> None:
    self._state.delivered[partition] = offset
    self.released.append(partition)

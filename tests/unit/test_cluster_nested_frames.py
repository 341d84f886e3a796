"""Frames between nodes whose JSON is nested so deeply that no parser follows it: the link is
closed, and the node goes on."""

import pytest

from holdfast.cluster import frame_kinds as kinds
from holdfast.cluster.frame_kinds import BadFrame
from tests.sim.world import Settings, World

NESTED = b"[" * 100_000
KINDS = sorted(
    number for name, number in vars(kinds).items() if name.isupper() and isinstance(number, int)
)


@pytest.fixture(scope="module")
def world() -> World:
    world = World(1, Settings())
    for host in world.hosts.values():
        host.start()
    while not world.is_in_sync():
        assert world.schedule.now < 60
        world.schedule.run(world.schedule.now + 0.1)
    return world


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_survives(kind: int, world: World) -> None:
    process = world.hosts["n1"].process
    assert process is not None
    for prefix in (b"", *(bytes((number,)) for number in range(8))):
        try:
            process.member.handle_frame("n2", kind, prefix + NESTED, world.schedule.now)
        except BadFrame:
            continue

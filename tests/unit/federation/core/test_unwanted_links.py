"""What becomes of a link that the topology manager wants no longer."""

from functools import partial

from holdfast_federation.core.member import FederationMember
from tests.support.sim_federation import World

RING = [(0, 1), (1, 2), (2, 3), (0, 3)]


def linked(world: World, one: int, other: int) -> bool:
    a, b = world.members[one], world.members[other]
    return b.node in a.member.links and a.node in b.member.links


def want(world: World, edges: list[tuple[int, int]]) -> None:
    """Tell every member, as a manager does."""
    for member in world.members:
        near = {a if b == member.number else b for a, b in edges if member.number in (a, b)}
        member.desired = {world.members[each].node: f"mqtt://{each}" for each in near}
        member.call(partial(_tell, member.desired))


def _tell(desired: dict[bytes, str], core: FederationMember, now: float) -> None:
    core.desired_topology(desired, now)


def test_it_is_closed_once_those_that_are_wanted_are_up() -> None:
    world = World(4, [*RING, (0, 2)], 1)
    world.run_until(world.is_stable, 60.0)
    assert linked(world, 0, 2)
    want(world, [*RING, (1, 3)])
    world.run_until(lambda: linked(world, 1, 3), 10.0)
    world.run_until(lambda: not linked(world, 0, 2), 60.0)
    world.run(60.0)
    assert not linked(world, 0, 2)
    assert all(linked(world, one, other) for one, other in [*RING, (1, 3)])

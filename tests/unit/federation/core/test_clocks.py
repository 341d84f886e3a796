"""Clocks that are wrong by years: what is retained is the same everywhere soon, and it is said."""

import pytest

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.frames import Clock, encode
from holdfast_federation.core.retained.clock import HybridClock
from tests.support.sim_federation import World, Wrong
from tests.support.sim_federation_member import WALL_S, node_id

YEAR_S = 365 * 86_400.0
QUICK = FederationConfig(retained_check_s=2.0)


def world_with(skews: dict[int, float], is_linked: bool = True) -> World:
    """Three members, all of which want everything."""
    everything = {number: ["#"] for number in range(3)}
    world = World(3, [(0, 1), (1, 2), (0, 2)], 1, config=QUICK, subscriptions=everything)
    if not is_linked:
        world.cut.update({(node_id(0), node_id(2)), (node_id(1), node_id(2))})
    for number in range(3):
        world.members[number].skew_s = skews.get(number, 0.0)
        world.crash(number)
        world.restart(number)
    return world


def brokers(world: World) -> list[dict[str, bytes]]:
    return [member.broker for member in world.members]


def are_alike(world: World) -> bool:
    return all(broker == brokers(world)[0] for broker in brokers(world)) and bool(brokers(world)[0])


@pytest.mark.parametrize("skew_s", [-WALL_S, 10 * YEAR_S], ids=["1970", "ten years ahead"])
def test_a_member_whose_clock_is_wrong_agrees_with_the_others(skew_s: float) -> None:
    world = world_with({2: skew_s})
    world.run_until(world.is_stable, 30.0)
    world.run(1.0)
    assert world.members[2].member.retained.clock.is_wrong
    for number in (0, 1, 2, 0, 2, 1, 2):
        world.publish(number, "t", 1, b"%d" % number, is_retained=True)
        world.run(1.0)
    world.run_until(lambda: are_alike(world), 10.0)
    # The last one, though the clock there is the one that is wrong.
    assert brokers(world)[0] == {"t": b"2"}


@pytest.mark.parametrize("skew_s", [-WALL_S, 10 * YEAR_S], ids=["1970", "ten years ahead"])
def test_what_was_published_alone_with_a_wrong_clock_counts_when_it_was(skew_s: float) -> None:
    world = world_with({2: skew_s}, is_linked=False)
    world.run(5.0)
    world.publish(0, "older", 1, b"theirs", is_retained=True)
    world.publish(2, "newer", 1, b"apart", is_retained=True)
    world.run(50.0)
    world.publish(2, "older", 1, b"ours", is_retained=True)
    world.publish(0, "newer", 1, b"theirs", is_retained=True)
    world.run(5.0)
    assert not are_alike(world)
    world.heal()
    world.run_until(lambda: are_alike(world), 30.0)
    assert brokers(world)[0] == {"older": b"ours", "newer": b"theirs"}


def test_clocks_that_are_right_change_nothing() -> None:
    world = world_with({0: -30.0, 1: 30.0})
    world.run_until(world.is_stable, 30.0)
    clocks = [member.member.retained.clock for member in world.members]
    assert not any(clock.is_wrong or clock.is_disputed for clock in clocks)
    assert clocks[0].ahead_s == pytest.approx(-60.0, abs=31.0)


def test_a_single_linked_member_does_not_decide_what_time_it_is() -> None:
    """Both say that they differ, and nobody knows who is wrong."""
    clock = HybridClock(WALL_S, 0.0)
    assert clock.set_peer(node_id(1), WALL_S + YEAR_S, 0.0) == 0.0
    assert not clock.is_wrong
    assert clock.is_disputed
    assert clock.stamp(0.0) == int(WALL_S * 1e6)
    # Two that contradict each other, neither; two that agree do.
    assert clock.set_peer(node_id(2), WALL_S + 3 * YEAR_S, 0.0) == 0.0
    assert clock.set_peer(node_id(3), WALL_S + YEAR_S + 5.0, 0.0) > 0.9 * YEAR_S
    assert clock.is_wrong
    # Set right, it is believed again, and what is stamped follows.
    clock.set_peer(node_id(1), WALL_S + 60.0, 60.0)
    clock.set_peer(node_id(3), WALL_S + 60.0, 60.0)
    assert not clock.is_wrong
    assert clock.stamp(60.0) < (WALL_S + 61.0) * 1e6


def test_a_member_that_makes_up_the_time_moves_no_stamps() -> None:
    world = world_with({})
    world.run_until(world.is_stable, 30.0)
    member = world.members[0].member
    for wall_s in (0.0, WALL_S + YEAR_S, 1e12, -1e12):
        member.frame(node_id(2), encode(Clock(wall_s)), world.now)
        assert not member.retained.clock.is_wrong
        assert member.retained.clock.stamp(world.now) < (WALL_S + 100.0) * 1e6
    with pytest.raises(Wrong):
        world.run_until(lambda: member.retained.clock.is_wrong, 1.0)

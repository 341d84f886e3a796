"""A member that is away for days keeps its queue; one that is gone is forgotten by all for good."""

from dataclasses import replace

import pytest

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import Dropped, Message
from holdfast_federation.core.frames import Announcement, Announcements, Voucher, Vouchers, encode
from holdfast_federation.core.identity import Identity
from holdfast_federation.core.member import FederationMember
from tests.support.sim_federation import World
from tests.support.sim_federation_member import node_id

A, B, C = node_id(1), node_id(2), node_id(3)
FORGET_S = 400.0
QUICK = FederationConfig(refresh_s=20.0, forget_s=FORGET_S)


def knowing(world: World, node: bytes) -> list[int]:
    return [
        member.number
        for member in world.members
        if member.core is not None and node in member.core.database.entries
    ]


@pytest.mark.parametrize("restarts", [[], [0], [0, 1, 2], [0, 1, 2, 0, 1, 2]])
def test_a_member_that_is_gone_is_forgotten_whoever_restarts(restarts: list[int]) -> None:
    """Each restart gives a member its memory back, in which the dead one is."""
    world = World(4, [(0, 1), (1, 2), (0, 2), (2, 3), (1, 3)], 1, config=QUICK)
    world.run_until(world.is_stable, 30.0)
    dead = node_id(3)
    world.crash(3)
    for number in restarts:
        world.run(0.9 * FORGET_S / len(restarts))
        world.crash(number)
        world.run(1.0)
        world.restart(number)
    world.run(FORGET_S + 5.0)
    assert knowing(world, dead) == []
    world.run(2 * FORGET_S)
    assert knowing(world, dead) == []
    # A newer start of it is another matter.
    world.restart(3)
    world.run(30.0)
    assert knowing(world, dead) == [0, 1, 2, 3]


def test_one_nodes_stale_memory_does_not_bring_it_back() -> None:
    """Member 0 was off for longer than it takes to forget, and remembers the dead one."""
    world = World(4, [(0, 1), (1, 2), (0, 2), (2, 3), (1, 3)], 1, config=QUICK)
    world.run_until(world.is_stable, 30.0)
    world.crash(3)
    world.crash(0)
    world.run(1.5 * FORGET_S)
    assert knowing(world, node_id(3)) == []
    world.restart(0)
    world.run(10.0)
    assert knowing(world, node_id(3)) in ([], [0])
    world.run(FORGET_S)
    assert knowing(world, node_id(3)) == []


def test_a_newcomer_hears_how_old_news_is() -> None:
    """So it does not keep the dead for as long as if it had heard of them today."""
    member = FederationMember(Identity(A, 1), "", QUICK, 0.0)
    member.link_up(B, 0.0)
    own = Announcement(B, 1, 1, 0, [A], "", False, [], [])
    dead = Announcement(C, 1, 1, 0, [], "", False, ["t"], [])
    member.frame(B, encode(Vouchers([Voucher(C, 1, 1, 0.9 * FORGET_S)])), 1.0)
    member.frame(B, encode(Announcements([own, dead])), 1.0)
    member.handle_timers(1.0 + 0.6 * FORGET_S)
    assert C not in member.database.entries
    # What others say of its age is not enough to forget it at once.
    again = FederationMember(Identity(A, 1), "", QUICK, 0.0)
    again.link_up(B, 0.0)
    again.frame(B, encode(Vouchers([Voucher(C, 1, 1, 1e9)])), 1.0)
    again.frame(B, encode(Announcements([own, dead])), 1.0)
    again.handle_timers(0.4 * FORGET_S)
    assert C in again.database.entries


@pytest.mark.parametrize("wall_s", [0.0, 4e9])
def test_a_wrong_clock_at_the_start_forgets_nobody(wall_s: float) -> None:
    """The machine was off, or its clock was set: members that live say so within the hour."""
    config = replace(QUICK, refresh_s=1800.0, forget_s=86_400.0)
    member = FederationMember(Identity(A, 1), "", config, 0.0)
    member.link_up(B, 0.0)
    member.frame(B, encode(Announcements([Announcement(B, 1, 1, 0, [A], "", False, [], [])])), 0.1)
    memory = member.memory(10.0, 1.7e9)
    again = FederationMember(*(Identity(A, 2), "", config, 0.0), remembered=memory, wall_s=wall_s)
    again.handle_timers(3000.0)
    assert B in again.database.entries


def test_what_waits_for_a_member_that_is_away_stays_for_its_own_bounds() -> None:
    """Away for three days, as an edge site may be; by default the queue keeps a day."""
    config = FederationConfig(queue_age_max_s=4 * 86_400.0)
    member = FederationMember(Identity(A, 1), "", config, 0.0)
    member.link_up(B, 0.0)
    member.frame(B, encode(Announcements([Announcement(B, 1, 1, 0, [A], "", False, ["t"], [])])), 0)
    member.link_down(B, 1.0)
    assert member.local_publish(Message("t", b"", 1), 2.0)
    for hour in range(1, 72):
        member.handle_timers(3600.0 * hour)
    assert member.custody.queued(B) == 1
    member.take_effects()
    member.handle_timers(4.1 * 86_400.0)
    assert [each.reason for each in member.take_effects() if isinstance(each, Dropped)] == [
        "too old"
    ]
    assert B in member.database.entries
    member.handle_timers(7.1 * 86_400.0)
    assert B not in member.database.entries

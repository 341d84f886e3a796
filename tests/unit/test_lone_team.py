"""A shared group that begins during a simulated run: what the simulator says that it owes."""

from tests.sim.casts import LEAVERS
from tests.sim.checks import Message
from tests.sim.plans import settings_for
from tests.sim.teams import Absentee, LoneTeam
from tests.sim.world import World

SUBACK_AT = 6.0


def world_with_lone_team() -> tuple[World, LoneTeam]:
    """The SUBSCRIBE finds 10 records in partition 0. Offsets 9, 10 and 12 are stored before the
    SUBACK, and 14 after it."""
    world = World(0, settings_for(0, faults=(), casts=(LEAVERS,)))
    team = next(each.team for each in world.parties if isinstance(each, Absentee))
    assert isinstance(team, LoneTeam)
    checks = world.checks
    for offset, sent_at in ((9, 1.0), (10, 2.0), (12, 3.0), (14, SUBACK_AT + 1)):
        message = Message(f"at {offset}", "publisher", "s/0", offset, 1)
        message.sent_at = sent_at
        checks.published(message)
        checks.stored[message.text] = 1
        checks.places[message.text] = (0, offset)
    return world, team


def subscribe(world: World, team: LoneTeam) -> None:
    start = [10, *[0] * (world.settings.partitions - 1)]
    world.checks.sessions.starts["absentee"] = {team.filter: start}


def test_nothing_is_owed_before_the_subscribe() -> None:
    _, team = world_with_lone_team()
    assert team.missing() == []


def test_what_is_stored_between_subscribe_and_suback_is_a_backlog() -> None:
    world, team = world_with_lone_team()
    subscribe(world, team)
    assert team.missing() == ["at 10", "at 12", "at 14"]
    team.acknowledged_at = SUBACK_AT
    assert team.missing() == ["at 10", "at 12", "at 14"]


def test_a_group_may_begin_as_late_as_the_suback() -> None:
    world, team = world_with_lone_team()
    subscribe(world, team)
    team.acknowledged_at = SUBACK_AT
    world.checks.group_begins[team.filter] = {0: 12}
    assert team.missing() == ["at 12", "at 14"]
    world.checks.group_begins[team.filter] = {0: 15}
    assert team.missing() == ["at 14"]


def test_a_message_that_has_come_shows_where_the_group_begins() -> None:
    """Its first positions are logged when that one is finished."""
    world, team = world_with_lone_team()
    subscribe(world, team)
    team.acknowledged_at = SUBACK_AT
    world.checks.group_begins[team.filter] = {0: 15}
    team.receipts["at 10"] = []
    assert team.missing() == ["at 12", "at 14"]

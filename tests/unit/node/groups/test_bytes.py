"""The bytes of a shared group's records in memory: those assigned to a node, and those that come
back."""

import pytest

from tests.sim.client import Client
from tests.unit.node.groups.test_groups import FILTER, Member, Stage, leave

GROUPS = "holdfast.node.groups"
WINDOW = 8
"""The inflight window of a member."""


def test_the_bytes_of_a_node_count_until_its_members_receive_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the coordinator's node, whose memory has no payload of a record that was sent. At another
    node they count until their records are finished, and the last record may exceed the limit."""
    monkeypatch.setattr(f"{GROUPS}.next_node.LOAD_BYTES_MAX", 0)
    stage = Stage(monkeypatch, "cb", quiet=2)
    stage.publish(4 * WINDOW)
    stage.until(lambda: stage.count(0) == WINDOW)
    stage.run(1.0)
    assert stage.count(0) == WINDOW
    assert stage.count(1) == 1
    # What the members have not acknowledged is assigned again, once they leave.
    for member in stage.team.members:
        leave(member)
    stage.run(1.0)
    for host in stage.world.hosts.values():
        assert host.process is not None
        host.process.cluster_node.groups.coordinator.check()


@pytest.mark.parametrize("other", ["a", "c"])
def test_records_that_come_back_are_read_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A read stops at the limit, and goes on once its records are assigned."""
    monkeypatch.setattr(f"{GROUPS}.group_state.RETURNED_BYTES_MAX", 1)
    monkeypatch.setattr(f"{GROUPS}.group_state.READ_RECORDS_MAX", 2)
    stage = Stage(monkeypatch, "b" + other, quiet=2)
    stage.publish(2 * WINDOW)
    stage.until(lambda: stage.count(0, 1) == 2 * WINDOW)
    process = stage.world.hosts[stage.coordinator].process
    assert process is not None
    (coordination,) = [
        group
        for home in process.cluster_node.groups.coordinator.homes.led.values()
        for group in home.groups.values()
    ]
    leave(stage.team.members[0])
    # The other member has no room, so one read is in memory and the rest in the log.
    stage.until(lambda: bool(coordination.to_assign) and bool(coordination.cursor.returned))
    stage.run(1.0)
    assert len(coordination.cursor.returned) <= 2
    assert len(coordination.unheld()) == WINDOW
    client = Client(stage.world, "m2", 5, clean=True, filters=((FILTER, 1),))
    Member(stage.world, stage.team, client, stage.coordinator).wanders = False
    stage.until(lambda: stage.count(2) == WINDOW)
    coordination.check()

"""A shared group of a node that serves alone, when other nodes join."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.node.metadata.model import ClusterMetadata
from tests.sim.client import Client
from tests.sim.faults import KILL
from tests.sim.host import Host
from tests.sim.process import Process
from tests.sim.workload import Party, Publisher
from tests.sim.world import Settings, World
from tests.unit.node.groups.test_groups import (
    FILTER,
    Member,
    QuietClient,
    Team,
    is_ready,
    leave,
    member,
    play,
    publishers,
)

MESSAGES = 30


class Alone:
    """A node that serves alone, with members of a group; the first one acknowledges nothing."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, qos: int = 1, *, outbox_messages: int = 1000
    ) -> None:
        self.team = Team()
        self.clients: list[QuietClient] = []

        def parties(world: World) -> list[Party]:
            return [Publisher(world, Client(world, "pub", 5))]

        monkeypatch.setattr("tests.sim.world.parties", parties)
        settings = Settings(
            min_insync=1, replication_factor=2, begins_alone=True, outbox_messages=outbox_messages
        )
        self.world = World(7, settings)
        self.host = self.world.hosts["n1"]
        self.host.start()
        self.until(lambda: is_ready(self.host))
        for number in range(3):
            client = QuietClient(self.world, f"m{number}", 5, clean=True, filters=((FILTER, qos),))
            client.is_quiet = number == 0
            self.clients.append(client)
            Member(self.world, self.team, client, "n1").wanders = False
            self.until(partial(getattr, client, "is_subscribed"))
        publisher = self.world.parties[0]
        assert isinstance(publisher, Publisher)
        self.publisher = publisher
        publisher.wanders = False
        publisher.client.connect(self.host)
        self.until(lambda: publisher.client.is_connected)
        assert self.node.context.is_alone

    @property
    def node(self) -> Any:
        process: Process | None = self.host.process
        assert process is not None
        return process.cluster_node

    def until(self, condition: Callable[[], bool], within_s: float = 20.0) -> None:
        deadline = self.world.schedule.now + within_s
        while not condition():
            assert self.world.schedule.now < deadline, [each.count for each in self.team.members]
            self.world.schedule.run(0.001)

    def publish(self, count: int = MESSAGES, qos: int = 1) -> None:
        for number in range(count):
            self.until(lambda: len(self.publisher.client.outgoing) < MESSAGES)
            self.publisher.client.publish(self.publisher.message(f"t/{number % 3}", qos))
        self.until(lambda: not self.publisher.client.outgoing)

    def total(self) -> int:
        return sum(self.team.received.values())

    def listed(self) -> tuple[set[Any], int]:
        """The assigned records, and the number of those in no table."""
        share = self.node.groups.agent.assignments[FILTER]
        return set(share.assigned), sum(map(len, share.sent.offsets.values()))

    def grow(self) -> None:
        for host in self.world.hosts.values():
            host.start()
        self.until(self.world.is_in_sync)
        assert not self.node.context.is_alone

    def metadata(self, host: Host) -> ClusterMetadata:
        assert host.process is not None
        metadata = host.process.cluster_node.context.metadata
        assert metadata is not None
        return metadata


def test_a_record_that_a_member_received_is_in_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(monkeypatch)
    alone.publish()
    alone.until(lambda: alone.total() == MESSAGES)
    assigned, in_no_table = alone.listed()
    assert not assigned
    assert in_no_table >= alone.team.members[0].count > 5
    # What is finished is forgotten once the log has it.
    alone.world.schedule.run(2.0)
    share = alone.node.groups.agent.assignments[FILTER]
    assert sum(map(len, share.sent.offsets.values())) == alone.team.members[0].count
    assert not share.sent.unlogged
    assert not share.finished


def test_progress_is_logged_after_a_record_that_the_group_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is finished before any record was sent without a table."""
    alone = Alone(monkeypatch)
    share = alone.node.groups.agent.assignments[FILTER]
    alone.node.groups.finished(share.group, 0, 1 << 20)
    alone.world.schedule.run(2.0)
    alone.clients[0].is_quiet = False
    alone.publish(6)
    alone.until(lambda: alone.total() == 6)
    alone.world.schedule.run(2.0)
    assert share.sent.is_empty()


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("wait_s", [0.0, 2.0])
def test_every_other_coordinator_knows_who_has_what(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, qos: int
) -> None:
    """Whether the log says it or not: nothing is lost, and nothing comes again."""
    alone = Alone(monkeypatch, qos)
    alone.publish(qos=qos)
    alone.until(lambda: alone.total() == MESSAGES)
    alone.world.schedule.run(wait_s)
    had = alone.team.members[0].count
    alone.grow()
    assigned, in_no_table = alone.listed()
    assert len(assigned) == had
    assert not in_no_table
    home = alone.node.groups.agent.assignments[FILTER].home
    alone.until(lambda: alone.metadata(alone.host).partitions[home].leader != "n1")
    alone.publish(qos=qos)
    alone.until(lambda: alone.total() == 2 * MESSAGES)
    alone.world.schedule.run(3.0)
    assert alone.team.received == Counter(alone.world.checks.stored)
    # The records of a member that leaves go to the others.
    had = alone.team.members[0].count
    leave(alone.team.members[0])
    if qos == 1:
        alone.until(lambda: alone.total() == 2 * MESSAGES + had)
    alone.world.schedule.run(3.0)
    assert set(alone.team.received) == set(alone.world.checks.stored)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("wait_s", [0.0, 0.05, 1.0])
def test_kill_9_while_it_grows_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, leaves: bool
) -> None:
    """Before and after the other nodes have the records, also with records that a member has just
    returned."""
    alone = Alone(monkeypatch)
    alone.publish()
    if leaves:
        leave(alone.team.members[0])
    for host in alone.world.hosts.values():
        host.start()
    alone.world.schedule.run(wait_s)
    alone.host.kill(power=False)
    alone.world.schedule.run(0.5)
    alone.host.start()
    alone.until(lambda: all(map(is_ready, alone.world.hosts.values())))
    alone.until(lambda: not alone.publisher.client.outgoing)
    alone.until(lambda: not alone.team.missing(alone.world))


def test_a_member_that_leaves_returns_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(monkeypatch)
    alone.publish()
    alone.until(lambda: alone.total() == MESSAGES)
    had = alone.team.members[0].count
    leave(alone.team.members[0])
    alone.until(lambda: alone.total() == MESSAGES + had)
    for each in alone.team.members[1:]:
        leave(each)
    # The group ends with its last member.
    alone.until(lambda: not alone.node.groups.is_used())


def test_a_backlog_is_sent_without_a_table_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of the members are closed, and the group reads the log."""
    alone = Alone(monkeypatch, outbox_messages=10)
    for client in alone.clients:
        client.is_quiet = True
    alone.publish(100)
    alone.world.schedule.run(1.0)
    assert alone.total() == sum(each.count for each in alone.team.members) < 30
    assigned, in_no_table = alone.listed()
    assert in_no_table == alone.total()
    assert not assigned
    leave(alone.team.members[0])
    leave(alone.team.members[1])
    for client in alone.clients:
        client.is_quiet = False
    client = QuietClient(alone.world, "m3", 5, clean=True, filters=((FILTER, 1),))
    Member(alone.world, alone.team, client, "n1").wanders = False
    alone.until(lambda: not alone.team.missing(alone.world))
    alone.until(lambda: alone.listed() == (set(), 0) or alone.listed()[1] <= 8)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    team = Team()

    def parties(world: World) -> list[Party]:
        members = [
            member(world, team, "d1", 1, wanders=True),
            member(world, team, "d2", 2, wanders=True),
            member(world, team, "c1", 1, clean=True),
            member(world, team, "c2", 1, clean=True, wanders=True),
        ]
        return [*members, *publishers(world)]

    settings = Settings(
        min_insync=1, begins_alone=True, faults=(KILL,) if seed % 2 else (), duration_s=4.0
    )
    world = play(monkeypatch, seed, settings, parties)
    if not settings.faults:
        repeated = [text for text, count in team.qos2.items() if count > 1]
        assert not repeated
    assert not team.missing(world)

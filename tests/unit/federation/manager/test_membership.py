"""Joins, leaves and deaths of a manager on a real file, with brokers that answer
as the test says. The published manager's defects are named where they are met."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast_federation.manager.graph.graph import structure_of
from holdfast_federation.manager.graph.health import MemberState
from holdfast_federation.manager.manager import Manager, NoSuchMember
from holdfast_federation.manager.messages import JoinAnswer, JoinRequest, LinkReport, Report
from holdfast_federation.manager.server import Rounds
from holdfast_federation.manager.settings import ManagerSettings
from holdfast_federation.manager.state.federation_state import (
    ChangeRefused,
    rules_of,
)
from holdfast_federation.manager.state.store import StateStore, StateStoreError
from tests.support.topology_brokers import FakeBrokers


class Site:
    def __init__(self, file: Path, **settings: Any) -> None:
        self.file = file
        self.settings = ManagerSettings(**settings)
        self.brokers = FakeBrokers()
        self.now = 1000.0
        self.store = StateStore(file)
        self._begin()

    def _begin(self) -> None:
        self.manager = Manager(self.settings, self.store, self.brokers, clock=lambda: self.now)
        self.rounds = Rounds(self.manager)

    def open(self) -> Manager:
        """As after a kill: nothing of the manager before is told, and its connection is gone."""
        self.store.close()
        self.store = StateStore(self.file)
        self._begin()
        return self.manager

    def execute(self, sql: str) -> None:
        """From beside the manager."""
        with closing(sqlite3.connect(self.file)) as connection, connection:
            connection.execute(sql)

    async def join(self, number: int, **more: Any) -> JoinAnswer:
        return await self.manager.join(
            JoinRequest(ip=f"tcp://10.0.0.{number}:1883", **more), "test"
        )

    async def grow(self, members: int) -> None:
        for number in range(members):
            await self.join(number, uuid=f"uuid-000{number}")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "topology.db")
    yield site
    site.store.close()


def in_loop(test: Callable[[Site], Coroutine[Any, Any, None]]) -> Callable[[Site], None]:
    def run(site: Site) -> None:
        asyncio.run(test(site))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@in_loop
async def test_concurrent_joins_get_ids_of_their_own(site: Site) -> None:
    """Two that join the published manager at the same time get one id."""
    answers = await asyncio.gather(*(site.join(number) for number in range(30)))
    assert sorted(answer.id for answer in answers) == list(range(30))
    assert structure_of(site.manager.state.graph()).is_two_connected


@in_loop
async def test_the_id_of_a_removed_member_is_not_given_again(site: Site) -> None:
    await site.grow(4)
    await site.manager.leave(3, "test")
    site.open()
    assert (await site.join(9)).id == 4


@in_loop
async def test_a_member_that_comes_back_keeps_its_id_and_links(site: Site) -> None:
    """With the published manager it becomes a second member beside its own ghost."""
    await site.grow(5)
    links = site.manager.state.links
    moved = await site.manager.join(
        JoinRequest(ip="tcp://10.9.9.9:1883", uuid="uuid-0002", epoch=1), "test"
    )
    assert moved.id == 2
    by_address = await site.join(3)
    assert by_address.id == 3
    assert len(site.manager.state.members) == 5
    assert site.manager.state.links == links
    assert site.manager.state.members[2].ip == "tcp://10.9.9.9:1883"


@in_loop
async def test_the_same_address_is_found_however_it_is_written(site: Site) -> None:
    await site.grow(3)
    again = await site.manager.join(JoinRequest(ip="MQTT://10.0.0.1"), "test")
    assert again.id == 1


@in_loop
async def test_a_ghost_gives_its_address_up_to_a_member_that_has_moved_there(site: Site) -> None:
    await site.grow(4)
    answer = await site.join(1, uuid="uuid-0003", epoch=2)
    assert answer.id == 3
    assert sorted(site.manager.state.members) == [0, 2, 3]
    assert site.manager.state.members[3].ip == "tcp://10.0.0.1:1883"
    assert structure_of(site.manager.state.graph()).is_two_connected
    site.open()
    assert sorted(site.manager.state.members) == [0, 2, 3]


@in_loop
async def test_an_old_copy_of_a_member_is_refused(site: Site) -> None:
    await site.join(0, uuid="uuid-0000", epoch=5)
    with pytest.raises(ChangeRefused, match="old copy"):
        await site.join(0, uuid="uuid-0000", epoch=4)
    with pytest.raises(ChangeRefused, match="join again"):
        await site.manager.report(0, Report(epoch=4))


@in_loop
async def test_a_capacity_below_two_is_refused(site: Site) -> None:
    with pytest.raises(ValueError, match="room for 2 neighbours"):
        await site.join(0, capacity=1)
    await site.grow(6)
    answer = await site.join(6, capacity=2)
    for number in range(7, 15):
        await site.join(number)
    assert len(site.manager.neighbors(answer.id)) == 2


@in_loop
async def test_everything_is_there_after_a_kill(site: Site) -> None:
    await site.grow(6)
    await site.manager.set_rules(rules_of([(0, 5, "pin"), (1, 4, "forbid")]), "test")
    await site.join(7)
    await site.manager.leave(2, "test")
    await site.manager.new_join_token(60, "test")
    before = site.manager.state
    assert before.links
    assert site.open().state == before
    actions = [line.action for line in site.store.audit(10)]
    assert actions[:4] == ["join-token", "leave", "join", "links"]


@in_loop
async def test_a_change_that_cannot_be_stored_has_not_happened(site: Site) -> None:
    await site.grow(3)
    before = site.manager.state
    site.execute("UPDATE meta SET value = value + 1 WHERE name = 'revision'")
    with pytest.raises(StateStoreError, match="another manager"):
        await site.manager.leave(1, "test")
    assert site.manager.state is before
    with pytest.raises(StateStoreError, match="another manager"):
        await site.join(8)


@in_loop
async def test_a_database_of_another_version_is_left_alone(site: Site) -> None:
    site.execute("PRAGMA user_version = 99")
    with pytest.raises(StateStoreError, match="another version"):
        site.open()


def test_something_else_than_a_database(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, " * 100)
    with pytest.raises(StateStoreError, match="text"):
        StateStore(text)


@in_loop
async def test_a_lower_limit_takes_effect_at_the_start(site: Site) -> None:
    await site.grow(12)
    site.settings = ManagerSettings(degree_max=3)
    await site.open().repair()
    graph = site.manager.state.graph()
    assert max(len(others) for others in graph.values()) <= 3
    assert structure_of(graph).is_two_connected


@in_loop
async def test_a_dead_member_is_removed_and_the_hole_repaired(site: Site) -> None:
    """The published manager repairs for members without any link only."""
    await site.grow(8)
    dead = max(site.manager.state.graph().items(), key=lambda item: len(item[1]))[0]
    site.brokers.round_trips[f"tcp://10.0.0.{dead}:1883"] = None
    await site.rounds.probe_all()
    assert site.manager.verdict().states[dead] is MemberState.SUSPECT
    await site.rounds.probe_all()
    assert dead not in site.manager.state.members
    assert structure_of(site.manager.state.graph()).is_two_connected


@in_loop
async def test_a_neighbour_that_still_hears_it_keeps_a_member(site: Site) -> None:
    await site.grow(5)
    site.brokers.round_trips["tcp://10.0.0.1:1883"] = None
    neighbour = site.manager.state.neighbours(1)[0]
    for _ in range(4):
        await site.manager.report(
            neighbour, Report(links=[LinkReport(peer=1, up=True, rtt_ms=2.0)])
        )
        await site.rounds.probe_all()
        site.now += 5
    assert site.manager.verdict().states[1] is MemberState.UNKNOWN
    await site.manager.report(neighbour, Report(links=[LinkReport(peer=1, up=False)]))
    await site.rounds.probe_all()
    assert 1 not in site.manager.state.members


@in_loop
async def test_the_word_of_who_is_no_neighbour_does_not_count(site: Site) -> None:
    await site.grow(8)
    stranger = next(
        node for node in range(8) if node != 1 and node not in site.manager.state.neighbours(1)
    )
    await site.manager.report(stranger, Report(links=[LinkReport(peer=1, up=True)]))
    assert not site.manager.reports.is_up(1, site.manager.state.neighbours(1))


@in_loop
async def test_a_broker_that_lives_without_its_federator_is_found(site: Site) -> None:
    """The published probe asks the broker only."""
    await site.grow(5)
    await site.manager.report(2, Report())
    await site.rounds.probe_all()
    assert site.manager.verdict().states[2] is MemberState.HEALTHY
    site.now += 3600
    await site.rounds.probe_all()
    await site.rounds.probe_all()
    assert 2 not in site.manager.state.members


@in_loop
async def test_a_manager_that_is_cut_off_removes_nobody(site: Site) -> None:
    await site.grow(5)
    for number in range(3):
        site.brokers.round_trips[f"tcp://10.0.0.{number}:1883"] = None
    for _ in range(5):
        await site.rounds.probe_all()
    assert len(site.manager.state.members) == 5
    assert site.manager.verdict().is_frozen


@in_loop
async def test_a_member_that_comes_back_while_it_is_probed_is_judged_anew(site: Site) -> None:
    await site.grow(5)
    address = "tcp://10.0.0.1:1883"
    site.brokers.round_trips[address] = None
    await site.rounds.probe_all()
    rejoins: list[JoinAnswer] = []

    async def rejoin(ip: str) -> None:
        if ip == address:
            site.brokers.on_probe = None
            rejoins.append(await site.join(1, uuid="uuid-0001", epoch=7))

    site.brokers.on_probe = rejoin
    await site.rounds.probe_all()
    assert rejoins[0].id == 1
    assert site.manager.verdict().states[1] is MemberState.NEW


@in_loop
async def test_a_watcher_wakes_at_the_next_change(site: Site) -> None:
    await site.grow(3)
    revision = site.manager.state.revision
    assert not await site.manager.changed_since(revision, 0.01)
    watching = asyncio.ensure_future(site.manager.changed_since(revision, 60))
    await asyncio.sleep(0)
    await site.manager.leave(0, "test")
    assert await watching
    # A known revision of the future: the state was restored from an older copy.
    assert await site.manager.changed_since(revision + 100, 60)


@in_loop
async def test_rules_that_cannot_be_kept_change_nothing(site: Site) -> None:
    await site.grow(4)
    before = site.manager.state
    with pytest.raises(ChangeRefused, match="forbidden"):
        await site.manager.set_rules(
            rules_of([(0, 1, "forbid"), (0, 2, "forbid"), (0, 3, "forbid")]), "test"
        )
    with pytest.raises(ChangeRefused, match="no member 9"):
        await site.manager.set_rules(rules_of([(0, 9, "pin")]), "test")
    assert site.manager.state is before
    with pytest.raises(ValueError, match="both"):
        rules_of([(0, 1, "pin"), (1, 0, "forbid")])
    with pytest.raises(ValueError, match="two ends"):
        rules_of([(3, 3, "pin")])


@in_loop
async def test_more_pins_than_the_limit_are_refused(site: Site) -> None:
    await site.grow(8)
    with pytest.raises(ChangeRefused, match="more pinned links than its limit of 5"):
        await site.manager.set_rules(rules_of([(0, each, "pin") for each in range(1, 7)]), "test")


@in_loop
async def test_who_left_is_unknown(site: Site) -> None:
    await site.grow(3)
    await site.manager.leave(1, "test")
    with pytest.raises(NoSuchMember, match="member 1"):
        await site.manager.leave(1, "test")
    with pytest.raises(NoSuchMember):
        await site.manager.report(1, Report())

"""The sessions of a node that is down, too many to close in one turn of the event loop."""

import random

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.log.record import SESSION, Record
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.node_state import STEPS_PER_TURN, NodeState
from holdfast.node.ownership import closings
from holdfast.node.ownership.closings import CLOSE_STEPS
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import (
    CloseRecord,
    EndRecord,
    SessionRecord,
    encode_session,
    open_record,
)
from tests.sim.world import Settings, World
from tests.support.journal_port import new_state

PARTITIONS = 4
SLICE = STEPS_PER_TURN // CLOSE_STEPS


class Context(ClusterContext):
    """The nodes in `down` are down by the metadata."""

    def __init__(self, journal: Journal) -> None:
        super().__init__("n1", journal)
        self.down: set[str] = set()

    def is_gone(self, node: str) -> bool:
        return node in self.down


class Bench:
    """n1 leads all home partitions. What it closes is applied at the end of each turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        journal = Journal(PARTITIONS, replicated=True)
        config = NodeConfig(node_id="n1", partitions=PARTITIONS)
        self.state = new_state(config, journal)
        self.images = ReplicatedState(RecordedState(config, journal))
        self.context = Context(journal)
        barriers = Barriers(self.state, self.context, MetadataReads(lambda now: 1))
        self.homes = SessionCoordinator(
            self.state, self.context, self.images, barriers, lambda *_: False
        )
        for partition in range(PARTITIONS):
            self.lead(partition)
        self.closed: list[tuple[str, int]] = []
        self._begun: list[Session] = []
        monkeypatch.setattr(closings, "log_close", self._close)

    def lead(self, partition: int) -> None:
        self.context.leading[partition] = 1
        self.homes.start_leading(partition)

    def lose(self, partition: int) -> None:
        self.context.leading[partition] = 0
        self.homes.stop_leading(partition)

    def _close(self, state: NodeState, session: Session, *, maybe_sent: bool) -> None:
        assert session.owner in self.context.down
        assert self.context.leading[self.images.home(session.client_id)]
        self._begun.append(session)

    def apply(self, change: SessionRecord, epoch: int) -> None:
        key = change.client.encode()
        home = self.images.home(change.client)
        payload = encode_session(change)
        record = Record(home, SESSION, client_id=key, sequence=epoch, payload=payload)
        self.images.apply(record)
        self.homes.applied(record)

    def open(self, client_id: str, epoch: int, owner: str) -> None:
        session = Session(client_id)
        session.epoch = epoch
        session.expiry_s = 3600
        self.apply(open_record(session, False, owner), epoch)

    def close(self, client_id: str, epoch: int) -> None:
        self.apply(CloseRecord(client_id, 3600, False, False), epoch)

    def turn(self) -> int:
        """Returns the number of sessions that were closed."""
        self.state.run_work()
        begun, self._begun = self._begun, []
        for session in begun:
            self.closed.append((session.client_id, session.epoch))
            self.close(session.client_id, session.epoch)
        return len(begun)

    def finish(self) -> list[int]:
        """Returns the numbers of sessions that the turns closed."""
        counts = []
        while self.state.work:
            counts.append(self.turn())
        return counts

    def owners(self) -> dict[str, str]:
        return {name: each.owner for name, each in self.images.state.sessions.items()}


def test_a_turn_closes_a_bounded_number_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for number in range(3 * SLICE):
        bench.open(f"c{number}", 1, "n2")
        bench.open(f"other{number}", 1, "n3")
    bench.context.down.add("n2")
    bench.homes.node_gone("n2")
    assert bench.closed == []
    counts = bench.finish()
    assert max(counts) <= SLICE
    assert sorted(bench.closed) == sorted((f"c{number}", 1) for number in range(3 * SLICE))
    bench.homes.node_gone("n2")
    assert bench.finish() == []


def test_the_next_leader_closes_what_the_one_before_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    for number in range(4 * SLICE):
        bench.open(f"c{number}", 1, "n2")
    bench.context.down.add("n2")
    bench.homes.node_gone("n2")
    bench.turn()
    for partition in range(PARTITIONS):
        bench.lose(partition)
    assert sum(bench.finish()) == 0
    assert "n2" in bench.owners().values()
    for partition in range(PARTITIONS):
        bench.lead(partition)
    assert max(bench.finish()) <= SLICE
    assert set(bench.owners().values()) == {""}
    assert len(bench.closed) == len(set(bench.closed)) == 4 * SLICE


@pytest.mark.parametrize("seed", range(10))
def test_slices_between_other_inputs_close_the_same_sessions(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    bench = Bench(monkeypatch)
    names = [f"c{number}" for number in range(2 * SLICE)]
    epochs = dict.fromkeys(names, 1)
    for name in names:
        bench.open(name, 1, chance.choice(("n2", "n2", "n3", "n4")))
    bench.context.down.add("n2")
    bench.homes.node_gone("n2")
    while bench.state.work or chance.random() < 0.5:
        for name in chance.sample(names, 100):
            epochs[name] += 1
            step = chance.randrange(4)
            if step == 0:
                bench.close(name, epochs[name] - 1)
            elif step == 1:
                bench.apply(EndRecord(name), epochs[name])
            else:
                bench.open(name, epochs[name], chance.choice(("n3", "n4")))
        if chance.random() < 0.2 and "n4" not in bench.context.down:
            bench.context.down.add("n4")
            bench.homes.node_gone("n4")
        partition = chance.randrange(PARTITIONS)
        if not bench.context.leading[partition]:
            bench.lead(partition)
        elif chance.random() < 0.3:
            bench.lose(partition)
        bench.turn()
    for partition in range(PARTITIONS):
        if not bench.context.leading[partition]:
            bench.lead(partition)
    bench.finish()
    for name, owner in bench.owners().items():
        assert owner not in bench.context.down
        session = bench.images.state.sessions[name]
        assert bench.images.open_sessions.has(session) == (owner != "")
    indexed = [
        session
        for owner in bench.images.open_sessions.owners()
        for home in bench.images.open_sessions.homes(owner)
        for session in bench.images.open_sessions.of(owner, home)
    ]
    sessions = bench.images.state.sessions.values()
    assert set(indexed) == {each for each in sessions if each.owner}
    assert len(indexed) == len(set(indexed))


def test_partitions_that_are_won_in_one_turn_make_one_report() -> None:
    """Each report is a pass over all sessions of the node."""
    world = World(1, Settings(casts=(), partitions=16, snapshot_s=1e6))
    for host in world.hosts.values():
        host.start()
    world._wait(10.0, world._not_ready, "not ready")
    world.schedule.run(1.0)
    process = world.hosts["n1"].process
    assert process is not None
    node: ClusterNode = process.cluster_node
    led = [(each, epoch) for each, epoch in enumerate(node.context.leading) if epoch]
    assert len(led) > 1
    reported: list[list[int]] = []
    begin = node.acquisition.reports.begin

    def note(leader: str, partitions: list[int], asking: list[str]) -> None:
        if leader == "n1":
            reported.append(partitions)
        begin(leader, partitions, asking)

    node.acquisition.reports.begin = note  # type: ignore[method-assign]
    for partition, epoch in led:
        node.leadership.stop_leading(partition)
        node.leadership.lead(partition, epoch)
    process.touch()
    world.schedule.run(0.1)
    assert reported == [[partition for partition, _ in led]]

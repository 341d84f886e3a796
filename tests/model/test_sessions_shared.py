"""Durable members of a shared group against crashes that tear what is being written, and against
snapshots that take a while: no acknowledged message is lost to the group, and none of QoS 2 is
delivered twice."""

import random
from collections.abc import Iterator

import pytest

from holdfast.node.session.session import Session
from holdfast.node.session.state import encode_cursor
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import SessionEntry
from tests.model.test_sessions import TOPICS, Subscriber, World
from tests.support.planted import is_found
from tests.support.seeds import block_of_seeds, run_seeds

SEEDS = 32
PLANTED_SEEDS = 150
GROUP = "$share/g/#"


class GroupWorld(World):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.members = [
            Subscriber(self, "member-5", GROUP, 2),
            Subscriber(self, "member-4", GROUP, 2),
            Subscriber(self, "member-3", GROUP, 1),
        ]
        self.parties += self.members
        for member in self.members:
            member.connect()
        self.settle()
        self.offsets: list[int] = []
        # A snapshot that is being made: where it begins, the rest, and what it has so far.
        self.begun: tuple[list[int], Iterator[tuple[int, bytes]]] | None = None
        self.entries: list[tuple[int, bytes]] = []
        self.snapshot = None

    def step(self) -> None:
        super().step()
        dice = self.random.random()
        if dice < 0.25:
            self.random.choice(self.members).answer(self.random.randint(1, 3))
        elif dice < 0.45:
            self.go_on_with_snapshot()
        elif dice < 0.48:
            self.crash_torn()
        elif dice < 0.55:
            for publisher in self.publishers:
                publisher.publish(self.random.choice(TOPICS))

    def go_on_with_snapshot(self) -> None:
        """As Maintenance.take_snapshot does."""
        bench = self.bench
        if self.begun is None:
            replicated = bench.core.cluster.replicated
            self.begun = (list(bench.node.state.delivered), replicated.snapshot())
            self.entries = []
        for _ in range(self.random.randint(1, 4)):
            entry = next(self.begun[1], None)
            if entry is None:
                bench.commit()
                bench.run()
                self.snapshot = self.entries
                self.offsets = self.begun[0]
                self.begun = None
                if self.random.random() < 0.3:
                    self.crash(keep=False)
                return
            self.entries.append(entry)

    def crash(self, keep: bool) -> None:
        self.crash_with(keep_uncommitted=keep)

    def crash_torn(self) -> None:
        if self.random.random() < 0.7:
            # What the progress of groups and sessions is written with.
            self.bench.advance(0.06)
        self.crash_with(torn=self.random)

    def crash_with(
        self, *, keep_uncommitted: bool = False, torn: random.Random | None = None
    ) -> None:
        for party in self.parties:
            party.read()
        self.begun = None
        self.bench.crash(
            keep_uncommitted=keep_uncommitted,
            torn=torn,
            snapshot=self.snapshot,
            offsets=self.offsets,
        )
        for party in self.parties:
            if party.peer is not None:
                party.peer.closed = True
            party.lose()

    def drain(self) -> None:
        self.bench.delay_reads = False
        for party in self.parties:
            party.lose()
            party.connect()
        for _ in range(300):
            self.settle()
            for subscriber in [*self.subscribers, *self.members]:
                subscriber.answer(100)
        for publisher in self.publishers:
            assert publisher.inflight == {}

    def check(self) -> None:
        super().check()
        count: dict[bytes, int] = {}
        for member in self.members:
            for _, payload, qos in member.seen:
                count[payload] = count.get(payload, 0) + 1
                assert qos < 2 or count[payload] == 1, f"{member.name}: {payload!r} twice"
        for publisher in self.publishers:
            for _, payload in publisher.acknowledged:
                assert payload in count, f"{GROUP}: {payload!r} lost"


def run(seed: int) -> None:
    world = GroupWorld(seed)
    for _ in range(250):
        world.step()
    world.drain()
    world.check()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(8))
def test_a_group_loses_nothing(block: int) -> None:
    run_seeds(block_of_seeds(block, 8, SEEDS), run)


def test_a_position_that_moves_back_brings_no_finished_record_again() -> None:
    """A durable member had an older record of QoS 1 inflight when the group logged a position, and
    left. A record of QoS 2 between, which another member had finished, was forgotten by then."""
    run(4134650219)


def test_a_snapshot_without_packet_ids_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's inflight messages of QoS 2 are lost, and so are their packet ids."""
    real = ReplicatedState.entry

    def planted(replicated: ReplicatedState, session: Session) -> SessionEntry:
        entry = real(replicated, session)
        entry.cursor = encode_cursor(list(enumerate(session.positions or [])), {}, [])
        return entry

    monkeypatch.setattr(ReplicatedState, "entry", planted)
    assert is_found(run, range(PLANTED_SEEDS))

"""Queues in the worlds of `test_sessions`: random publishes, acknowledgements, cuts, crashes of the
node with and without a snapshot, and delayed reads.

All members have sessions that end with their connection, and often none is connected. What was
acknowledged to a publisher comes to a member. They have QoS 1: what a session had with QoS 2 ends
with it. [MQTT-4.8.2-5]
"""

import pytest

from holdfast.broker.queues import changes
from holdfast.broker.recorded_state import RecordedState
from holdfast.broker.recovery import snapshot_entries as entries
from holdfast.broker.session.session import Group
from tests.model.test_sessions import Subscriber, World

SEEDS = 12
QUEUE = "$stream/@earliest/$queue/#"


class Member(Subscriber):
    """A client without a durable session that comes and goes."""

    def connect(self) -> None:
        self.started = self.subscribed = False
        self.held.clear()
        self.peer = self.world.bench.connect(self.name, properties={33: 4})


class QueueWorld(World):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.members = [Member(self, f"m-{number}", QUEUE, 1) for number in range(3)]
        self.parties += self.members
        self.members[0].connect()
        self.settle()

    def step(self) -> None:
        super().step()
        dice = self.random.random()
        member = self.random.choice(self.members)
        if dice < 0.25:
            member.answer(self.random.randint(1, 3))
        elif dice < 0.35 and self.members[0].started:
            for each in self.members:
                each.lose()
        elif dice < 0.37:
            snapshot = self.bench.snapshot()
            self.bench.commit()
            self.bench.run()
            for party in self.parties:
                party.read()
            self.bench.crash(snapshot=snapshot)
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
        seen = {payload for member in self.members for _, payload, _ in member.seen}
        for publisher in self.publishers:
            for _, payload in publisher.acknowledged:
                assert payload in seen, f"{payload!r} lost"


def run(seed: int) -> None:
    world = QueueWorld(seed)
    for _ in range(250):
        world.step()
    world.drain()
    world.check()


def _fails(seeds: int = 40) -> bool:
    for seed in range(seeds):
        try:
            run(seed)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("block", range(2))
def test_a_queue_loses_nothing(block: int) -> None:
    for seed in range(block, SEEDS, 2):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_planted_no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue has no keeper: its group ends with its last member."""
    monkeypatch.setattr(changes, "create_queue", lambda *arguments: None)
    assert _fails()


def test_planted_snapshot_without_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot leaves out the groups whose members have no durable session."""

    def planted(group: Group) -> bool:
        return any(
            session.expiry_s > 0 and not session.client_id.startswith("$")
            for session in group.members
        )

    monkeypatch.setattr(entries, "is_durable_group", planted)
    assert _fails()


def test_planted_keeper_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot leaves out the keepers."""
    real = entries.snapshot_entries

    def planted(state: RecordedState) -> object:
        for key in state.queues:
            state.sessions[key].recorded = False
        return real(state)

    from tests.support import node_bench

    monkeypatch.setattr(node_bench, "snapshot_entries", planted)
    assert _fails()

"""Queues in the worlds of `test_sessions`: random publishes, acknowledgements, cuts, crashes of the
node with and without a snapshot, and delayed reads.

All members have sessions that end with their connection, and often none is connected. What was
acknowledged to a publisher comes to a member. They have QoS 1: what a session had with QoS 2 ends
with it. [MQTT-4.8.2-5]
"""

import pytest

from tests.model.test_sessions import Subscriber, World
from tests.support.seeds import block_of_seeds, run_seeds

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
        self.offsets: list[int] | None = None
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
            # Of the records that the snapshot covers none or all are applied over it.
            self.offsets = list(self.bench.journal.high_watermark) if dice < 0.36 else None
            self.snapshot = self.bench.snapshot()
            self.bench.commit()
            self.bench.run()
            self.crash(keep=False)

    def crash(self, keep: bool) -> None:
        for party in self.parties:
            party.read()
        self.bench.crash(keep_uncommitted=keep, snapshot=self.snapshot, offsets=self.offsets)
        assert self.bench.recorded().queues, "the queue has ended"
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


@pytest.mark.parametrize("block", range(2))
def test_a_queue_loses_nothing(block: int) -> None:
    run_seeds(block_of_seeds(block, 2, SEEDS), run)

"""Subscriptions that begin in the past, in the worlds of `test_sessions`: random publishes,
acknowledgements, cuts, crashes of the node and delayed reads.

A traveller subscribes to each topic once, at a moment of its own and with a start of its own. It
must get what one got who was there from the start: everything from there on, QoS 2 messages exactly
once, in the order of all others.
"""

import pytest

from holdfast.protocol.mqtt import packets as m
from tests.model.test_sessions import TOPICS, Subscriber, World
from tests.support.seeds import block_of_seeds, run_seeds

USER_PROPERTY = 0x26
STARTS = ("earliest", "-1h", "last:1", "last:3", "-1s")


class Traveller(Subscriber):
    """A durable session whose subscriptions begin in the past."""

    def __init__(self, world: "ReplayWorld", name: str, qos: int) -> None:
        super().__init__(world, name, "", qos)
        self.left = list(TOPICS)
        world.random.shuffle(self.left)
        # By topic: its start; and the topic of a SUBSCRIBE without a SUBACK.
        self.starts: dict[str, str] = {}
        self.asked = ""

    def subscribe(self) -> None:
        """Subscribe to the next topic, or again if the SUBACK was lost."""
        if self.peer is None or not self.started or not (self.asked or self.left):
            return
        topic = self.asked or self.left.pop()
        if topic not in self.starts:
            self.starts[topic] = self.world.random.choice(STARTS)
        if self.asked and topic in self._subscribed():
            # The log has it. A second SUBSCRIBE would begin a second replay.
            self.asked = ""
            return
        self.asked = topic
        fields = {USER_PROPERTY: [("stream-offset", self.starts[topic])]}
        self.peer.send(m.Subscribe(1, [m.SubscriptionRequest(topic, self.qos)], fields))

    def _subscribed(self) -> dict[str, object]:
        session = self.world.bench.node.state.sessions.get(self.name)
        return {} if session is None else dict(session.subscriptions)

    def read(self) -> None:
        self.subscribed = True
        if self.peer is not None:
            for packet in self.peer.take(m.Suback):
                assert isinstance(packet, m.Suback)
                assert packet.reasons == [self.qos], packet
                self.asked = ""
        super().read()


class Companion(Traveller):
    """A durable session that reads one topic live and then begins to replay others. It gets every
    message of the live topic, like one that only reads that."""

    LIVE = "b/1"

    def __init__(self, world: "ReplayWorld", name: str, qos: int) -> None:
        super().__init__(world, name, qos)
        self.left.remove(self.LIVE)
        self.starts[self.LIVE] = "latest"
        """Before the first message."""
        self.asked = self.LIVE


class ReplayWorld(World):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.travellers = [
            Traveller(self, "t-2", 2),
            Traveller(self, "t-1", 1),
            Companion(self, "c-2", 2),
            Companion(self, "c-1", 1),
        ]
        self.parties += self.travellers
        for traveller in self.travellers:
            traveller.connect()
        self.settle()
        for traveller in self.travellers[2:]:
            traveller.subscribe()
        self.settle()

    def step(self) -> None:
        if self.random.random() < 0.02:
            self.random.choice(self.travellers).subscribe()
        if self.random.random() < 0.2:
            self.random.choice(self.travellers).answer(self.random.randint(1, 3))
        super().step()

    def drain(self) -> None:
        self.bench.delay_reads = False
        for party in self.parties:
            party.lose()
            party.connect()
        for _ in range(300):
            self.settle()
            for subscriber in [*self.subscribers, *self.travellers]:
                subscriber.answer(100)
            for traveller in self.travellers:
                traveller.subscribe()
        for publisher in self.publishers:
            assert publisher.inflight == {}

    def check(self) -> None:
        super().check()
        known = first_arrivals(self.subscribers[0])
        stored: dict[str, list[bytes]] = {}
        for record in self.bench.messages():
            stored.setdefault(record.topic.decode(), []).append(record.payload)
        for traveller in self.travellers:
            assert not traveller.left
            assert not traveller.asked
            orders = first_arrivals(traveller)
            counts: dict[bytes, int] = {}
            for _, payload, qos in traveller.seen:
                counts[payload] = counts.get(payload, 0) + 1
                assert qos < 2 or counts[payload] == 1, f"{traveller.name}: {payload!r} twice"
            for topic in TOPICS:
                order = orders.get(topic, [])
                every = stored.get(topic, [])
                assert set(known.get(topic, [])) <= set(every)
                start = traveller.starts[topic]
                what = f"{traveller.name}: {topic} from {start}: {order} of {every}"
                # A publish of QoS 1 that was sent again is in the log twice.
                begins = [at for at in range(len(every) + 1) if unique(every[at:]) == order]
                assert begins, f"{what}: not the log's end"
                if start in ("earliest", "-1h", "latest"):
                    assert begins[0] == 0, f"{what}: incomplete"
                elif start.startswith("last:"):
                    assert begins[0] <= max(0, len(every) - int(start[5:])), f"{what}: too few"


def unique(payloads: list[bytes]) -> list[bytes]:
    return list(dict.fromkeys(payloads))


def first_arrivals(subscriber: Subscriber) -> dict[str, list[bytes]]:
    orders: dict[str, dict[bytes, None]] = {}
    for topic, payload, _ in subscriber.seen:
        orders.setdefault(topic, {})[payload] = None
    return {topic: list(order) for topic, order in orders.items()}


def run(seed: int) -> None:
    world = ReplayWorld(seed)
    for _ in range(250):
        world.step()
    world.drain()
    world.check()


SEEDS = 96
BLOCKS = 8


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_as_one_who_was_there(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), run)

"""Subscriptions that begin in the past, in the worlds of `test_sessions`: random publishes,
acknowledgements, cuts, crashes of the node and delayed reads.

A traveller subscribes to each topic once, at a moment of its own and with a start of its own. It
must get what one got who was there from the start: everything from there on, QoS 2 messages exactly
once, in the order of all others.
"""

import pytest

from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.model.test_sessions import TOPICS, Subscriber, World
from tests.support.node_bench import Peer
from tests.support.seeds import block_of_seeds, run_seeds

USER_PROPERTY = 0x26
STARTS = ("earliest", "-1h", "last:1", "last:3", "-1s")


QOS0_TOPIC = "a/1"
"""The topic whose messages of QoS 0 the log has, too."""
QOS0_MARK = b"z:"


class Qos0Publisher:
    """A client that publishes at QoS 0. Those who read the log get what it has of it."""

    def __init__(self, world: "ReplayWorld") -> None:
        self.world = world
        self.peer: Peer | None = None
        self.number = 0

    def publish(self) -> None:
        if self.peer is None or self.peer.closed:
            self.peer = self.world.bench.connect("z")
        self.number += 1
        payload = QOS0_MARK + b"%d" % self.number
        self.peer.send(Publish(QOS0_TOPIC.encode(), payload, 0, False, False, 0, b"", 0, -1))


class Traveller(Subscriber):
    """A durable session whose subscriptions begin in the past."""

    def __init__(self, world: "ReplayWorld", name: str, qos: int) -> None:
        super().__init__(world, name, "", qos)
        self.left = list(TOPICS)
        world.random.shuffle(self.left)
        # A crash took messages of QoS 0 that waited for the packet id of an earlier QoS 2 message.
        self.has_lost = False
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

    def lose(self) -> None:
        # A message of QoS 0 that is on the way to the client would be lost, also one that waits
        # for the packet id of an earlier QoS 2 message.
        session = self.world.bench.node.state.sessions.get(self.name)
        if session is not None and session.promised_sends:
            self.world.bench.settle()
        self.read()
        super().lose()

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
        self.bench.config.qos0_logged.append(QOS0_TOPIC)
        self.bench.node.state.routes.clear()
        self.qos0_publisher = Qos0Publisher(self)
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
        if self.random.random() < 0.05:
            self.qos0_publisher.publish()
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

    def crash(self, keep: bool) -> None:
        for traveller in self.travellers:
            session = self.bench.node.state.sessions.get(traveller.name)
            if session is not None and session.promised_sends:
                traveller.has_lost = True
        super().crash(keep)
        if self.qos0_publisher.peer is not None:
            self.qos0_publisher.peer.closed = True

    def check(self) -> None:
        for subscriber in self.subscribers:
            # These come before their commit, so in an order of their own.
            subscriber.seen = [
                each for each in subscriber.seen if not each[1].startswith(QOS0_MARK)
            ]
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
                if traveller.has_lost:
                    order = [each for each in order if not each.startswith(QOS0_MARK)]
                    every = [each for each in every if not each.startswith(QOS0_MARK)]
                start = traveller.starts[topic]
                what = f"{traveller.name}: {topic} from {start}: {order} of {every}"
                # A publish of QoS 1 that was sent again is in the log twice.
                begins = [at for at in range(len(every) + 1) if unique(every[at:]) == order]
                assert begins, f"{what}: not the log's end"
                if start in ("earliest", "-1h", "latest"):
                    assert begins[0] == 0, f"{what}: incomplete"
                elif start.startswith("last:") and not traveller.has_lost:
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


SEEDS = 48
BLOCKS = 8


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_as_one_who_was_there(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), run)

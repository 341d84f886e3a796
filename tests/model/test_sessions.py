"""Durable sessions against random publishes, acknowledgements, cuts and crashes of a whole node.

The disk, the log's reader and the network are the test's, and it interleaves them by a seed. At
the end everyone connects and drains; then every acknowledged message must have reached every
durable subscriber, QoS 2 ones exactly once, and every topic in one order for all.
"""

import random

import pytest

from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer, check_routing
from tests.support.seeds import block_of_seeds, run_seeds

TOPICS = ["a/1", "a/2", "b/1"]


class Subscriber:
    def __init__(self, world: "World", name: str, filter: str, qos: int) -> None:
        self.world = world
        self.name = name
        self.filter = filter
        self.qos = qos
        self.peer: Peer | None = None
        self.subscribed = False
        self.started = False
        # Answers not sent yet.
        self.todo: list[m.Ack] = []
        # QoS 2 ids received and not released.
        self.held: set[int] = set()
        self.seen: list[tuple[str, bytes, int]] = []

    def connect(self) -> None:
        self.peer = self.world.bench.connect(
            self.name, clean=not self.started, expiry_s=10_000, properties={33: 4}
        )

    def lose(self) -> None:
        if self.peer is not None and not self.peer.closed:
            self.peer.lose()
        self.peer = None
        self.todo = []

    def read(self) -> None:
        if self.peer is None:
            return
        for packet in self.peer.take():
            if isinstance(packet, m.Connack):
                assert packet.reason == 0
                assert packet.session_present == self.started, self.name
                self.started = True
                if not self.subscribed:
                    request = m.SubscriptionRequest(self.filter, self.qos)
                    self.peer.send(m.Subscribe(1, [request]))
            elif isinstance(packet, m.Suback):
                self.subscribed = True
            elif isinstance(packet, Publish):
                self._receive(packet)
            elif isinstance(packet, m.Ack):
                assert packet.kind == m.PUBREL
                self.held.discard(packet.packet_id)
                self.todo.append(m.Ack(m.PUBCOMP, packet.packet_id))
            else:
                raise AssertionError(packet)

    def _receive(self, packet: Publish) -> None:
        if packet.qos == 2:
            if packet.packet_id not in self.held:
                self.held.add(packet.packet_id)
                self.seen.append((packet.topic.decode(), packet.payload, 2))
            else:
                assert packet.dup, f"{self.name}: id {packet.packet_id} used again"
            self.todo.append(m.Ack(m.PUBREC, packet.packet_id))
        else:
            self.seen.append((packet.topic.decode(), packet.payload, packet.qos))
            if packet.qos:
                self.todo.append(m.Ack(m.PUBACK, packet.packet_id))

    def answer(self, count: int) -> None:
        now, self.todo = self.todo[:count], self.todo[count:]
        if self.peer is not None and now:
            self.peer.send(*now)


class Publisher:
    """QoS 1 or 2 with a durable session of its own; sends again what was not finished."""

    def __init__(self, world: "World", name: str, qos: int) -> None:
        self.world = world
        self.name = name
        self.qos = qos
        self.peer: Peer | None = None
        self.started = False
        self.ready = False
        self.number = 0
        self.packet_id = 0
        self.inflight: dict[int, tuple[str, bytes]] = {}
        self.released: set[int] = set()
        self.acknowledged: list[tuple[str, bytes]] = []

    def connect(self) -> None:
        self.ready = False
        self.peer = self.world.bench.connect(self.name, clean=not self.started, expiry_s=10_000)

    def lose(self) -> None:
        if self.peer is not None and not self.peer.closed:
            self.peer.lose()
        self.peer = None
        self.ready = False

    def _packet(self, packet_id: int, dup: bool) -> Publish:
        topic, payload = self.inflight[packet_id]
        return Publish(topic.encode(), payload, self.qos, False, dup, packet_id, b"", 0, -1)

    def publish(self, topic: str) -> None:
        if self.peer is None or not self.ready or len(self.inflight) >= 5:
            return
        self.number += 1
        self.packet_id = self.packet_id % 7 + 1
        while self.packet_id in self.inflight:
            self.packet_id = self.packet_id % 7 + 1
        self.inflight[self.packet_id] = (topic, f"{self.name}:{self.number}".encode())
        self.peer.send(self._packet(self.packet_id, False))

    def read(self) -> None:
        if self.peer is None:
            return
        for packet in self.peer.take():
            if isinstance(packet, m.Connack):
                assert packet.session_present == self.started, self.name
                self.started = True
                self.ready = True
                again: list[object] = [
                    m.Ack(m.PUBREL, packet_id)
                    if packet_id in self.released
                    else self._packet(packet_id, True)
                    for packet_id in self.inflight
                ]
                if again:
                    self.peer.send(*again)
            elif isinstance(packet, m.Ack):
                if packet.kind == m.PUBREC:
                    if packet.packet_id not in self.released:
                        self.acknowledged.append(self.inflight[packet.packet_id])
                    self.released.add(packet.packet_id)
                    self.peer.send(m.Ack(m.PUBREL, packet.packet_id))
                elif packet.kind == m.PUBACK:
                    self.acknowledged.append(self.inflight.pop(packet.packet_id))
                else:
                    self.released.discard(packet.packet_id)
                    del self.inflight[packet.packet_id]
            else:
                raise AssertionError(packet)


class Visitor:
    """A client that opens, changes and ends its session in one segment as often as not; nobody
    waits for what it gets."""

    FILTERS = ("a/1", "a/#", "+/1", "$share/g/a/#", "$share/h/b/1")

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.peer: Peer | None = None

    def lose(self) -> None:
        if self.peer is not None and not self.peer.closed:
            self.peer.lose()
        self.peer = None

    def connect(self) -> None:
        dice = self.world.random
        clean = dice.random() < 0.5
        expiry_s = dice.choice((0, 5, 10_000))
        # A connection that is still there is taken over.
        self.peer = self.world.bench.connect(self.name, clean=clean, expiry_s=expiry_s)

    def act(self) -> None:
        """One or two packets in one segment."""
        if self.peer is None or self.peer.closed:
            self.connect()
            return
        dice = self.world.random
        answers = [
            m.Ack(m.PUBACK if each.qos == 1 else m.PUBREC, each.packet_id)
            for each in self.peer.publishes()
            if each.qos and dice.random() < 0.7
        ]
        packets: list[object] = list(answers)
        filters = dice.sample(self.FILTERS, dice.randint(1, 3))
        if dice.random() < 0.6:
            packets.append(m.Subscribe(1, [m.SubscriptionRequest(f, 1) for f in filters]))
        else:
            packets.append(m.Unsubscribe(2, filters))
        if dice.random() < 0.4 and self.peer.connection.session is not None:
            fields = {17: 0} if dice.random() < 0.7 else {}
            packets.append(m.Disconnect(0, fields))  # type: ignore[arg-type]
        self.peer.send(*packets)

    def read(self) -> None:
        pass


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        config = NodeConfig(partitions=2, sys_interval_s=0, outbox_messages=3, inflight_max=4)
        self.bench = NodeBench(config, auto_commit=False)
        self.snapshot: list[tuple[int, bytes]] | None = None
        self.subscribers = [
            Subscriber(self, "s-all-2", "#", 2),
            Subscriber(self, "s-all-1", "#", 1),
            Subscriber(self, "s-a-2", "a/+", 2),
            Subscriber(self, "s-exact", "b/1", 2),
        ]
        self.publishers = [Publisher(self, "p1", 1), Publisher(self, "p2", 2)]
        self.visitors = [Visitor(self, f"v{number}") for number in range(3)]
        self.parties: list[Subscriber | Publisher | Visitor] = [
            *self.subscribers,
            *self.publishers,
            *self.visitors,
        ]
        for subscriber in self.subscribers:
            subscriber.connect()
        self.settle()
        for publisher in self.publishers:
            publisher.connect()
        self.settle()

    def settle(self) -> None:
        for _ in range(6):
            self.bench.settle()
            for party in self.parties:
                party.read()

    def crash(self, keep: bool) -> None:
        for party in self.parties:
            party.read()
        self.bench.crash(keep_uncommitted=keep)
        for party in self.parties:
            if party.peer is not None:
                party.peer.closed = True
            party.lose()

    def step(self) -> None:
        if self.random.random() < 0.15:
            self.random.choice(self.visitors).act()
        dice = self.random.random()
        if dice < 0.35:
            self.random.choice(self.publishers).publish(self.random.choice(TOPICS))
        elif dice < 0.55:
            self.random.choice(self.subscribers).answer(self.random.randint(1, 3))
        elif dice < 0.70:
            self.bench.commit()
            self.bench.run()
        elif dice < 0.78:
            self.bench.delay_reads = not self.bench.delay_reads
            self.bench.run()
        elif dice < 0.82:
            self.bench.advance(0.06)
        elif dice < 0.90:
            self.random.choice(self.parties).lose()
        elif dice < 0.985:
            party = self.random.choice(self.parties)
            if party.peer is None:
                party.connect()
        else:
            self.crash(self.random.random() < 0.5)
        for party in self.parties:
            if self.random.random() < 0.7:
                party.read()
        check_routing(self.bench.node.state)

    def drain(self) -> None:
        self.bench.delay_reads = False
        for party in self.parties:
            party.lose()
            party.connect()
        for _ in range(300):
            self.settle()
            for subscriber in self.subscribers:
                subscriber.answer(100)
        for publisher in self.publishers:
            assert publisher.inflight == {}

    def check(self) -> None:
        orders: dict[str, list[bytes]] = {}
        for subscriber in self.subscribers:
            firsts: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
            count: dict[bytes, int] = {}
            for topic, payload, qos in subscriber.seen:
                count[payload] = count.get(payload, 0) + 1
                if count[payload] == 1:
                    firsts[topic].append(payload)
                assert qos < 2 or count[payload] == 1, f"{subscriber.name}: {payload!r} twice"
            for publisher in self.publishers:
                for topic, payload in publisher.acknowledged:
                    wanted = subscriber.filter == "#" or topic.startswith(subscriber.filter[0])
                    assert not wanted or payload in count, f"{subscriber.name}: {payload!r} lost"
            for topic, order in firsts.items():
                if not order:
                    continue
                known = orders.setdefault(topic, order)
                assert order == known, f"{subscriber.name}: another order of {topic}"


def run(seed: int) -> None:
    world = World(seed)
    for _ in range(250):
        world.step()
    world.drain()
    world.check()


SEEDS = 48
"""How many worlds; A failure names its seed; `tests.model` runs more."""
BLOCKS = 8


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_nothing_lost_nothing_twice_one_order(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), run)

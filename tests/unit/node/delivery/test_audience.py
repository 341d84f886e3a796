"""Messages for some of a broker's clients: live, from the log, after a crash at any moment."""

import random
from collections import Counter

import pytest

from holdfast.node import federation_session as federating
from holdfast.node.config import NodeConfig
from holdfast.node.session.audience import Audience
from holdfast.node.session.message import Message
from holdfast.node.session.session import FEDERATION
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import PUBACK, PUBCOMP, PUBREC, PUBREL, Ack
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_publish import publish, subscribe

G, H = "$share/g/t/#", "$share/h/t/+"
PLAIN = Audience(True, ())
TO_G = Audience(False, [G])
TO_ALL_BUT_H = Audience(True, [G])


class Arrivals:
    """Publishes as the federation does."""

    def __init__(self, bench: NodeBench) -> None:
        self.bench = bench
        self.sequence = 0

    def publish(
        self, payload: bytes, audience: Audience | None, qos: int = 1, retain: bool = False
    ) -> None:
        state = self.bench.node.state
        self.sequence += 1
        message = Message(b"t/1", payload, qos, retain, b"", -1, state.wall_us, FEDERATION.encode())
        message.audience = audience
        assert federating.publish(state, message, b"$fed:o", 1, self.sequence, lambda _: None)
        self.bench.run()


def acknowledge(peer: Peer, received: list[Publish]) -> None:
    for each in received:
        if each.qos == 1:
            peer.send(Ack(PUBACK, each.packet_id, reasons.SUCCESS, {}))
        elif each.qos == 2:
            peer.send(Ack(PUBREC, each.packet_id, reasons.SUCCESS, {}))
    for each in peer.take(Ack):
        if isinstance(each, Ack) and each.kind == PUBREL:
            peer.send(Ack(PUBCOMP, each.packet_id, reasons.SUCCESS, {}))


def consume(peer: Peer) -> list[bytes]:
    """Everything that comes, acknowledged."""
    found: list[bytes] = []
    while received := peer.publishes():
        found += [each.payload for each in received]
        acknowledge(peer, received)
    return found


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_only_those_whom_it_is_for_get_it(qos: int) -> None:
    bench = NodeBench()
    plain, one, other = bench.connect("plain"), bench.connect("g"), bench.connect("h")
    plain.send(subscribe("t/#", 2))
    one.send(subscribe(G, 2))
    other.send(subscribe(H, 2))
    arrivals = Arrivals(bench)
    arrivals.publish(b"plain", PLAIN, qos)
    arrivals.publish(b"g", TO_G, qos)
    arrivals.publish(b"not h", TO_ALL_BUT_H, qos)
    arrivals.publish(b"all", None, qos)
    arrivals.publish(b"nobody", Audience(False, ["$share/g/other"]), qos)
    assert plain.payloads() == [b"plain", b"not h", b"all"]
    assert one.payloads() == [b"g", b"not h", b"all"]
    assert other.payloads() == [b"all"]


def test_a_message_that_is_published_here_is_for_everybody() -> None:
    bench = NodeBench()
    peer = bench.connect("g")
    peer.send(subscribe(G, 1), subscribe("t/1", 1))
    bench.connect("p").send(publish("t/1", b"1", 1, 1))
    assert peer.payloads() == [b"1", b"1"]
    assert [record.audience for record in bench.messages()] == [b""]


@pytest.mark.parametrize("crashes", [False, True])
def test_who_was_away_reads_the_same_from_the_log(crashes: bool) -> None:
    bench = NodeBench()
    names = {"plain": "t/#", "g": G, "h": H}
    for name, filter in names.items():
        peer = bench.connect(name, expiry_s=1000)
        peer.send(subscribe(filter, 2))
        peer.lose()
    arrivals = Arrivals(bench)
    for number, audience in enumerate((PLAIN, TO_G, TO_ALL_BUT_H, None)):
        arrivals.publish(b"%d" % number, audience, 1 + number % 2)
    if crashes:
        bench.crash()
    found = {}
    for name in names:
        found[name] = consume(bench.connect(name, clean=False, expiry_s=1000))
    assert found == {"plain": [b"0", b"2", b"3"], "g": [b"1", b"2", b"3"], "h": [b"3"]}


def test_a_group_that_begins_before_the_commit_does_not_get_it() -> None:
    """It was not there when the message was given to other members' clients."""
    bench = NodeBench(auto_commit=False)
    peer = bench.connect("g")
    arrivals = Arrivals(bench)
    arrivals.publish(b"before", PLAIN)
    peer.send(subscribe(G, 1))
    bench.settle()
    arrivals.publish(b"after", TO_G)
    bench.settle()
    assert consume(peer) == [b"after"]


def test_what_is_retained_is_retained_for_all_plain_subscribers() -> None:
    bench = NodeBench()
    arrivals = Arrivals(bench)
    arrivals.publish(b"kept", PLAIN, 1, retain=True)
    for snapshot in (None, bench.snapshot()):
        late = bench.connect("late")
        late.send(subscribe("t/#", 1), subscribe(G, 1))
        assert [(each.payload, each.retain) for each in late.publishes()] == [(b"kept", True)]
        bench.crash(snapshot=snapshot)


def test_readers_that_fall_behind_get_no_more_than_those_that_do_not() -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, outbox_messages=3, receive_maximum=5)
    bench = NodeBench(config)
    names = {"plain": "t/#", "g": G, "h": H}
    peers = {}
    for name, filter in names.items():
        peers[name] = bench.connect(name, properties={33: 2})
        peers[name].send(subscribe(filter, 1))
    arrivals = Arrivals(bench)
    audiences = [PLAIN, TO_G, TO_ALL_BUT_H, None, TO_G]
    for number in range(60):
        arrivals.publish(b"%d" % number, audiences[number % 5])
    assert bench.node.state.stats.readers_fell_behind
    for name, mine in (("plain", {0, 2, 3}), ("g", {1, 2, 3, 4}), ("h", {3})):
        expected = [b"%d" % number for number in range(60) if number % 5 in mine]
        assert consume(peers[name]) == expected


FILTERS = {"plain": ["t/#"], "g1": [G], "g2": [G], "both": ["t/1", H]}
"""Of each client."""


class World:
    """Durable clients of a broker that come, go and crash with it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        config = NodeConfig(partitions=4, sys_interval_s=0, outbox_messages=4)
        self.bench = NodeBench(config, auto_commit=False)
        self.peers: dict[str, Peer] = {}
        self.arrivals = Arrivals(self.bench)
        self.expected: Counter[tuple[str, bytes]] = Counter()
        self.seen: Counter[tuple[str, bytes]] = Counter()
        self.unstored: list[tuple[int, Audience, int]] = []

    def come(self, name: str, *, is_new: bool = False) -> None:
        if name in self.peers:
            return
        peer = self.bench.connect(name, clean=is_new, expiry_s=10_000, properties={33: 3})
        self.peers[name] = peer
        self.bench.settle()
        if is_new:
            peer.send(*(subscribe(filter, 2) for filter in FILTERS[name]))
            self.bench.settle()

    def go(self, name: str) -> None:
        if name in self.peers:
            self.peers.pop(name).lose()
            self.bench.settle()

    def publish(self) -> None:
        audience = self.rng.choice([PLAIN, TO_G, TO_ALL_BUT_H, Audience(False, [G, H])])
        payload = b"%d" % self.arrivals.sequence
        self.arrivals.publish(payload, audience, self.rng.choice((1, 2)))
        # What is not in the log when it crashes comes again: it is not what is tested here.
        self.bench.settle()
        if audience.is_plain:
            self.expected["plain", payload] += 1
            self.expected["both", payload] += 1
        for group in audience.groups:
            self.expected[group, payload] += 1

    def consume(self, name: str) -> None:
        peer = self.peers.get(name)
        while peer is not None:
            received = peer.publishes()
            acknowledge(peer, received)
            self.bench.settle()
            acknowledge(peer, [])
            self.bench.settle()
            for each in received:
                self._note(name, each)
            if not received:
                return

    def _note(self, name: str, publish: Publish) -> None:
        group = {"g1": G, "g2": G}.get(name, "")
        if group:
            self.seen[group, publish.payload] += 1
        else:
            # Overlapping plain and shared subscriptions of one client: told apart by no number.
            self.seen[name, publish.payload] += 1

    def crash(self) -> None:
        self.bench.advance(1.0)
        self.bench.settle()
        self.peers.clear()
        snapshot = self.bench.snapshot() if self.rng.random() < 0.5 else None
        self.bench.crash(snapshot=snapshot)


@pytest.mark.parametrize("seed", range(25))
def test_in_any_order_of_events_each_gets_what_is_for_it(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    for name in FILTERS:
        world.come(name, is_new=True)
    for _ in range(80):
        step = rng.random()
        name = rng.choice(list(FILTERS))
        if step < 0.45:
            world.publish()
        elif step < 0.7:
            world.consume(name)
        elif step < 0.82:
            world.consume(name)
            world.go(name)
        elif step < 0.95:
            world.come(name)
        else:
            # What is on its way to a client may come again after a crash.
            for each in list(world.peers):
                world.consume(each)
            world.crash()
    for name in FILTERS:
        world.come(name)
    for _ in range(3):
        for name in FILTERS:
            world.consume(name)
    expected = Counter(world.expected)
    for (name, payload), count in world.expected.items():
        if name == H:
            # Its one member has a plain subscription, too.
            del expected[H, payload]
            expected["both", payload] += count
    assert world.seen == expected

"""A publisher that mixes QoS 0, 1 and 2, with and without RETAIN: each subscriber gets the messages
of a topic in the order in which they were published, and what is retained is the newest of them."""

import random

import pytest

from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.support.seeds import block_of_seeds, run_seeds
from tests.unit.node.test_publish import publish, subscribe

SEEDS = 80
"""The number of histories; a failure names its seed."""
BLOCKS = 4
TOPICS = ["a", "b"]


class Subscriber:
    def __init__(self, bench: NodeBench, name: str, qos: int, expiry_s: int = 0) -> None:
        self.peer: Peer = bench.connect(name, expiry_s=expiry_s)
        bench.settle()
        self.peer.send(subscribe("#", qos))
        self.got: dict[str, list[int]] = {topic: [] for topic in TOPICS}

    def read(self) -> None:
        while packets := self.peer.take():
            for packet in packets:
                if isinstance(packet, Publish):
                    self.got[packet.topic.decode()].append(int(packet.payload))
                    if packet.qos:
                        kind = m.PUBACK if packet.qos == 1 else m.PUBREC
                        self.peer.send(m.Ack(kind, packet.packet_id, 0, {}))
                elif isinstance(packet, m.Ack) and packet.kind == m.PUBREL:
                    self.peer.send(m.Ack(m.PUBCOMP, packet.packet_id, 0, {}))


def mix(seed: int) -> None:
    chance = random.Random(seed)
    config = NodeConfig(partitions=2, sys_interval_s=0)
    if chance.random() < 0.3:
        config.qos0_logged = ["#"]
    bench = NodeBench(config, auto_commit=False)
    publisher = bench.connect("pub")
    subscribers = [
        Subscriber(bench, f"sub-{qos}-{expiry_s}", qos, expiry_s)
        for qos in range(3)
        for expiry_s in (0, 60)
    ]
    bench.settle()
    published: dict[str, list[int]] = {topic: [] for topic in TOPICS}
    retained: dict[str, int] = {}
    for number in range(1, 60):
        topic = chance.choice(TOPICS)
        match chance.choice(["publish", "publish", "publish", "commit"]):
            case "commit":
                bench.settle()
                for each in subscribers:
                    each.read()
            case _:
                qos = chance.randrange(3)
                retain = chance.random() < 0.4
                packet_id = number if qos else 0
                publisher.send(publish(topic, b"%d" % number, qos, packet_id, retain=retain))
                published[topic].append(number)
                if retain:
                    retained[topic] = number
    bench.settle()
    for each in subscribers:
        each.read()
        bench.settle()
        each.read()
        assert each.got == published
    for crashed in (False, True):
        if crashed:
            bench.crash()
        newcomer = Subscriber(bench, "new", 0)
        newcomer.read()
        assert {topic: got[-1] for topic, got in newcomer.got.items() if got} == retained
        newcomer.peer.lose()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_messages_of_a_topic_keep_their_order(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), mix)


class Repeated(Subscriber):
    """A durable subscriber that acknowledges some messages, and checks the order on each of its
    connections: a repetition never comes behind a later message of its topic. [MQTT-4.6.0-1]"""

    def __init__(self, bench: NodeBench, chance: random.Random) -> None:
        super().__init__(bench, "sub", 2, expiry_s=60)
        self.chance = chance
        self.bench = bench
        self.newest = dict.fromkeys(TOPICS, 0)

    def come_back(self) -> None:
        self.peer = self.bench.connect("sub", expiry_s=60, clean=False)
        self.newest = dict.fromkeys(TOPICS, 0)

    def read(self, share: float = 0.5) -> None:
        for packet in self.peer.take():
            if isinstance(packet, Publish):
                topic, number = packet.topic.decode(), int(packet.payload)
                assert number > self.newest[topic], "a repetition behind a later message"
                self.newest[topic] = number
                seen = self.got[topic]
                assert packet.qos < 2 or packet.dup or number not in seen, "QoS 2 without DUP"
                seen.append(number)
                kind = m.PUBACK if packet.qos == 1 else m.PUBREC
            elif isinstance(packet, m.Ack) and packet.kind == m.PUBREL:
                kind = m.PUBCOMP
            else:
                continue
            if self.chance.random() < share:
                self.peer.send(m.Ack(kind, packet.packet_id, 0, {}))


def repeat(seed: int) -> None:
    chance = random.Random(seed)
    config = NodeConfig(partitions=2, sys_interval_s=0)
    config.inflight_max = chance.choice([3, 10, 100])
    config.outbox_messages = chance.choice([2, 1000])
    bench = NodeBench(config, auto_commit=False)
    publisher = bench.connect("pub")
    bench.settle()
    subscriber = Repeated(bench, chance)
    bench.settle()
    subscriber.peer.take()
    published: dict[str, list[int]] = {topic: [] for topic in TOPICS}
    for number in range(1, 60):
        match chance.choice([*["publish"] * 6, "commit", "read", "progress", "lose", "crash"]):
            case "publish":
                topic = chance.choice(TOPICS)
                publisher.send(publish(topic, b"%d" % number, chance.choice([1, 2]), number))
                published[topic].append(number)
            case "commit":
                bench.settle()
            case "read":
                subscriber.read()
            case "progress":
                bench.advance(1.0)
            case "lose":
                subscriber.peer.lose()
                subscriber.come_back()
            case _:
                bench.settle()
                bench.crash()
                publisher = bench.connect("pub")
                subscriber.come_back()
    bench.settle()
    subscriber.peer.lose()
    subscriber.come_back()
    for _ in range(200):
        bench.settle()
        subscriber.read(1.0)
    for topic, numbers in published.items():
        assert sorted(set(subscriber.got[topic])) == numbers
    session = bench.session("sub")
    assert not session.inflight
    assert session.rare.inflight_ahead is None


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_repetition_keeps_its_place_in_its_topic(block: int) -> None:
    """A crash keeps the packet ids of QoS 2, and loses those of QoS 1 before them."""
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), repeat)

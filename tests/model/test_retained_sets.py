"""The retained set of a subscription against lost connections and crashes: a durable session gets
the rest of it after each, in the order of the versions, and nothing of QoS 2 twice."""

import random

import pytest

from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.support.seeds import block_of_seeds, run_seeds
from tests.unit.node.test_publish import publish, subscribe

SEEDS = 200
"""The number of histories; a failure names its seed."""
BLOCKS = 4
TOPICS = [f"t/{number}" for number in range(9)]


class Receiver:
    """A client with a durable session. It acknowledges when told to, and keeps what it got."""

    def __init__(self, bench: NodeBench, window: int) -> None:
        self.bench = bench
        self.window = window
        self.unreleased: set[int] = set()
        self.replies: list[m.Ack] = []
        # Per topic, the versions in the order of their arrival.
        self.got: dict[str, list[int]] = {}
        self.peer: Peer | None = None

    def connect(self) -> None:
        self.replies = []
        self.peer = self.bench.connect(
            "sub",
            clean=False,
            properties={p.RECEIVE_MAXIMUM: self.window, p.SESSION_EXPIRY_INTERVAL: 3600},
        )

    def read(self) -> None:
        assert self.peer is not None
        for packet in self.peer.take():
            if isinstance(packet, Publish):
                self._take(packet)
            elif isinstance(packet, m.Ack) and packet.kind == m.PUBREL:
                self.unreleased.discard(packet.packet_id)
                self.replies.append(m.Ack(m.PUBCOMP, packet.packet_id, 0, {}))

    def _take(self, packet: Publish) -> None:
        if packet.qos == 2:
            self.replies.append(m.Ack(m.PUBREC, packet.packet_id, 0, {}))
            if packet.packet_id in self.unreleased:
                return
            self.unreleased.add(packet.packet_id)
        elif packet.qos == 1:
            self.replies.append(m.Ack(m.PUBACK, packet.packet_id, 0, {}))
        self.got.setdefault(packet.topic.decode(), []).append(int(packet.payload))

    def acknowledge(self, count: int) -> None:
        self.read()
        assert self.peer is not None
        for _ in range(min(count, len(self.replies))):
            self.peer.send(self.replies.pop(0))
        self.read()


class History:
    """One broker, a publisher of retained messages, and a receiver that is interrupted."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0), auto_commit=False)
        self.publisher = self.bench.connect("pub")
        self.published = 0
        self.snapshot: list[tuple[int, bytes]] | None = None
        self.offsets: list[int] | None = None
        self.versions = dict.fromkeys(TOPICS, 0)
        self.qos = {topic: self.chance.randrange(3) for topic in TOPICS}
        for topic in TOPICS:
            self.publish(topic, self.qos[topic])
        self.bench.settle()
        self.granted = self.chance.randrange(3)
        self.receiver = Receiver(self.bench, self.chance.randint(1, 4))

    def publish(self, topic: str, qos: int) -> None:
        self.published += 1
        packet_id = self.published if qos else 0
        payload = b"%d" % self.versions[topic]
        self.publisher.send(publish(topic, payload, qos, packet_id, retain=True))
        self.publisher.take()

    def run(self) -> None:
        receiver = self.receiver
        receiver.connect()
        self.bench.settle()
        assert receiver.peer is not None
        receiver.peer.send(subscribe("t/#", self.granted))
        self.bench.settle()
        for _ in range(self.chance.randrange(30)):
            self.step()
        for _ in range(200):
            self.bench.settle()
            receiver.acknowledge(3)
        self.check()

    def step(self) -> None:
        receiver = self.receiver
        match self.chance.choice(["ack", "ack", "settle", "progress", "lose", "crash", "update"]):
            case "ack":
                receiver.acknowledge(self.chance.randint(1, 3))
            case "settle":
                self.bench.settle()
            case "progress":
                self.bench.advance(1.0)
                self.bench.settle()
            case "lose":
                receiver.read()
                assert receiver.peer is not None
                receiver.peer.lose()
                receiver.connect()
                self.bench.settle()
            case "crash":
                receiver.read()
                if self.chance.random() < 0.3:
                    # The records that are not committed yet are applied over the snapshot.
                    self.offsets = list(self.bench.journal.high_watermark)
                    self.snapshot = self.bench.snapshot()
                    self.bench.settle()
                self.bench.crash(
                    keep_uncommitted=self.chance.random() < 0.5,
                    snapshot=self.snapshot,
                    offsets=self.offsets,
                )
                self.publisher = self.bench.connect("pub")
                receiver.connect()
                self.bench.settle()
            case "update":
                topic = self.chance.choice(TOPICS)
                self.versions[topic] += 1
                self.publish(topic, max(1, self.qos[topic]))
                self.bench.settle()

    def check(self) -> None:
        for topic in TOPICS:
            got = self.receiver.got.get(topic, [])
            assert got, f"nothing of {topic}"
            newest = self.versions[topic]
            first = list(dict.fromkeys(got))
            assert first == sorted(first), f"{topic}: {got}"
            if self.granted:
                assert got[-1] == newest, f"{topic}: {got}, the newest is {newest}"
            if self.granted == 2 and self.qos[topic] == 2:
                assert got == first, f"{topic}, QoS 2: {got}"


def interrupt(seed: int) -> None:
    History(seed).run()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_an_interrupted_retained_set_is_completed(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), interrupt)

"""A replay in which messages of QoS 0 go out as frames and those of QoS 1 as deliveries: random
windows, full sockets, reconnects, small reads, and live messages meanwhile.

Each topic keeps the order of the log. What goes out at QoS 0 comes at most once, and exactly once
on a connection that stays. A message of QoS 1 comes at least once.
"""

import random

import pytest

from holdfast.broker.config import NodeConfig
from holdfast.broker.effects import ReadLog
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer

TOPICS = ("a", "b")
RECEIVE_MAXIMUM, TOPIC_ALIAS_MAXIMUM = 0x21, 0x22


class SmallReads(NodeBench):
    def _read(self, effect: ReadLog) -> None:
        effect.records_max = 7
        super()._read(effect)


class MixedWorld:
    """A publisher of both QoS, and one session that reads everything from the start."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = SmallReads(
            NodeConfig(partitions=2, sys_interval_s=0, qos0_logged=["#"], outbox_bytes=4096)
        )
        self.publisher = self.bench.connect("p")
        # By topic, the payloads and what they were published with.
        self.sent: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
        self.seen: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
        self.qos: dict[bytes, int] = {}
        self.unacknowledged: list[int] = []
        self.loses = self.random.random() < 0.5
        self.wanted_qos = self.random.choice((0, 1))
        self.publish(self.random.randint(5, 40), (0, 0, 0, 1))
        self.reader = self.connect(clean=True)
        filter = m.SubscriptionRequest("$stream/@earliest/#", self.wanted_qos)
        self.bench.delay_reads = True
        self.reader.send(m.Subscribe(1, [filter]))

    def connect(self, *, clean: bool) -> Peer:
        properties: dict[int, object] = {RECEIVE_MAXIMUM: self.random.randint(1, 4)}
        if self.random.random() < 0.2:
            properties[TOPIC_ALIAS_MAXIMUM] = 1
        version = self.random.choice((4, 5)) if clean else self.reader.version
        return self.bench.connect(
            "r", version, clean=clean and version == 5, expiry_s=1000, properties=properties
        )

    def publish(self, count: int, qos_choice: tuple[int, ...]) -> None:
        for _ in range(count):
            topic, qos = self.random.choice(TOPICS), self.random.choice(qos_choice)
            size_bytes = self.random.choice((0, 0, 1500))
            payload = b"%d " % len(self.qos) + bytes(size_bytes)
            self.qos[payload] = qos
            self.sent[topic].append(payload)
            expiry = b"" if self.random.random() < 0.9 else b"\x02\x00\x01\x00\x00"
            packet = Publish(topic.encode(), payload, qos, False, False, qos, expiry, 0, -1)
            self.publisher.send(packet)
        self.publisher.take()

    def read(self) -> None:
        for packet in self.reader.publishes():
            self.seen[self.topic_of(packet)].append(packet.payload)
            if packet.qos:
                self.unacknowledged.append(packet.packet_id)
        self.reader.take()

    def topic_of(self, packet: Publish) -> str:
        if packet.topic:
            return packet.topic.decode()
        # It has an alias.
        return next(topic for topic in TOPICS if packet.payload in self.sent[topic])

    def acknowledge(self) -> None:
        if self.unacknowledged:
            self.reader.send(m.Ack(m.PUBACK, self.unacknowledged.pop(0)))

    def relieve(self) -> None:
        connection = self.reader.connection
        connection.congested = False
        if not connection.dirty:
            connection.dirty = True
            self.bench.node.state.dirty.append(connection)
        self.bench.run()
        self.bench.node.handle_writable(connection)
        self.bench.run()

    def lose(self) -> None:
        self.read()
        self.unacknowledged.clear()
        self.reader.lose()
        self.reader = self.connect(clean=False)

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.15:
            # Live messages of QoS 0 do not wait behind the replay.
            self.publish(1, (1,))
        elif draw < 0.5:
            self.acknowledge()
        elif draw < 0.7:
            self.bench.delay_reads = not self.bench.delay_reads
            self.bench.run()
        elif draw < 0.8:
            self.reader.connection.congested = True
        elif draw < 0.97:
            self.relieve()
        elif self.loses:
            self.lose()
        self.read()

    def drain(self) -> None:
        self.bench.delay_reads = False
        self.relieve()
        for _ in range(200):
            self.read()
            self.acknowledge()

    def check(self) -> None:
        for topic in TOPICS:
            seen, sent = self.seen[topic], self.sent[topic]
            first = list(dict.fromkeys(seen))
            what = f"{topic}: {[each[:4] for each in seen]} of {[each[:4] for each in sent]}"
            assert first == [each for each in sent if each in set(seen)], f"order of {what}"
            for payload in sent:
                count = seen.count(payload)
                qos = min(self.qos[payload], self.wanted_qos)
                assert qos or count <= 1, f"{payload[:4]!r} twice, {what}"
                assert count or (self.loses and not qos), f"{payload[:4]!r} missing, {what}"


def run(seed: int) -> None:
    try:
        world = MixedWorld(seed)
        for _ in range(60):
            world.step()
        world.drain()
        world.check()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("block", range(2))
def test_order_and_counts(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        run(seed)

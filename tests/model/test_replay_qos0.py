"""A replay in which messages of QoS 0 go out as frames and those of QoS 1 as deliveries: random
windows, full sockets, reconnects, small reads, late commits, and live messages meanwhile.

Topics `a` and `b` are logged. Each keeps the order of the log. What goes out at QoS 0 comes at most
once, and exactly once on a connection that stays. A message of QoS 1 comes at least once.

Of topic `c` the log has no QoS 0. A message that arrives during the replay keeps the order in which
a live subscriber got it. It comes at most once. On a connection that stays it comes, or it counts
as dropped.
"""

import random

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.effects import ReadLog
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer

TOPICS = ("a", "b", "c")
OUTBOX_BYTES = 4096
READ_RECORDS = 7
OUTPUT_BYTES_MAX = OUTBOX_BYTES + READ_RECORDS * 1600
"""One read of frames may exceed the limit of the output."""
RECEIVE_MAXIMUM, TOPIC_ALIAS_MAXIMUM = 0x21, 0x22


class SmallReads(NodeBench):
    def _read(self, effect: ReadLog) -> None:
        effect.records_max = READ_RECORDS
        super()._read(effect)


class MixedWorld:
    """A publisher of both QoS, and one session that reads everything from the start."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = SmallReads(
            NodeConfig(
                partitions=2, sys_interval_s=0, qos0_logged=["a", "b"], outbox_bytes=OUTBOX_BYTES
            )
        )
        self.publisher = self.bench.connect("p")
        self.witness = self.bench.connect("w")
        self.witness.send(m.Subscribe(1, [m.SubscriptionRequest("c", 1)]))
        self.witnessed: list[bytes] = []
        # The QoS 0 messages of `c` that arrived during the replay, and those since its start.
        self.during: set[bytes] = set()
        self.since: set[bytes] = set()
        # Those before it that the replay may meet, because they wait for messages of QoS 1.
        self.early: set[bytes] = set()
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
        self.bench.auto_commit = self.random.random() < 0.5
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
            session = self.bench.node.state.sessions.get("r")
            if topic == "c" and qos == 0 and session is not None:
                (self.since if "#" in session.subscriptions else self.early).add(payload)
            self.publisher.send(packet)
            self.watch()
        self.publisher.take()

    def watch(self) -> None:
        session = self.bench.node.state.sessions.get("r")
        for packet in self.witness.publishes():
            self.witnessed.append(packet.payload)
            # It may have waited for messages of QoS 1 before it, and the replay ended meanwhile.
            if packet.payload in self.since and session is not None and session.has_starts:
                self.during.add(packet.payload)
            if packet.qos:
                self.witness.send(m.Ack(m.PUBACK, packet.packet_id))

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
        self.bench.auto_commit = True
        self.bench.run()
        if "#" not in self.bench.node.state.sessions["r"].subscriptions:
            # The client does not know what it would get if it left before SUBACK.
            return
        self.reader.lose()
        self.reader = self.connect(clean=False)

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.1:
            self.publish(self.random.randint(1, 4), (0, 0, 1))
        elif draw < 0.15:
            self.bench.auto_commit = not self.bench.auto_commit
            self.bench.run()
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
        assert self.reader.connection.out_bytes <= OUTPUT_BYTES_MAX, "the output has a bound"
        self.read()
        self.watch()

    def drain(self) -> None:
        self.bench.delay_reads = False
        self.bench.auto_commit = True
        self.relieve()
        for _ in range(200):
            self.read()
            self.acknowledge()

    def check(self) -> None:
        self.watch()
        missing = 0
        for topic in TOPICS:
            seen = self.seen[topic]
            sent = [each.payload for each in self.bench.messages() if each.topic.decode() == topic]
            order = list(dict.fromkeys(seen))
            wanted = sent
            if topic == "c":
                wanted = self.witnessed
                order = [each for each in order if self.qos[each] or each in self.during]
                sent += self.since
            what = f"{topic}: {[each[:4] for each in seen]} of {[each[:4] for each in wanted]}"
            assert order == [each for each in wanted if each in set(order)], f"order of {what}"
            for payload in sent:
                count = seen.count(payload)
                qos = min(self.qos[payload], self.wanted_qos)
                assert qos or count <= 1, f"{payload[:4]!r} twice, {what}"
                if payload in self.since:
                    missing += not count
                else:
                    assert count or (self.loses and not qos), f"{payload[:4]!r} missing, {what}"
        if not self.loses:
            # Not those of the witness, which has an outbox with a bound, too.
            dropped = self.bench.node.state.sessions["r"].dropped
            unsure = len(self.early.difference(self.seen["c"]))
            assert missing <= dropped <= missing + unsure, f"{missing} missing, {dropped} counted"


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

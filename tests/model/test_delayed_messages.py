"""Delayed messages on a node that crashes at any moment, with and without a snapshot: each one that
the log has is published exactly once, and not before its time."""

import random

from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.publish.delayed_table import is_due, is_waiting
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.support.seeds import run_seeds

SEEDS = 40


class DelayedWorld:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        config = NodeConfig(partitions=2, sys_interval_s=0)
        self.bench = NodeBench(config, auto_commit=False)
        self.peer: Peer | None = None
        self.number = 0
        self.sent: dict[int, tuple[str, int]] = {}
        self.acknowledged: set[str] = set()
        self.begun: list[int] = []
        self.snapshot: list[tuple[int, bytes]] | None = None
        self.offsets: list[int] = []

    def step(self) -> None:
        dice = self.random.random()
        if dice < 0.35:
            self.publish()
        elif dice < 0.6:
            self.bench.advance(self.random.choice((0.1, 0.5, 2.0)))
        elif dice < 0.85:
            self.bench.commit()
            self.bench.run()
        elif dice < 0.93:
            # A snapshot counts once everything up to its end is committed.
            offsets = list(self.bench.journal.high_watermark)
            snapshot = self.bench.snapshot()
            if self.random.random() < 0.3:
                self.bench.crash(keep_uncommitted=True, snapshot=snapshot, offsets=offsets)
                self.peer = None
            else:
                self.bench.commit()
                self.bench.run()
            self.snapshot, self.offsets = snapshot, offsets
        else:
            self.bench.crash(
                keep_uncommitted=self.random.random() < 0.5,
                torn=self.random if self.random.random() < 0.5 else None,
                snapshot=self.snapshot,
                offsets=self.offsets or None,
            )
            self.peer = None
        self.read()

    def publish(self) -> None:
        if self.peer is None:
            self.peer = self.bench.connect("p")
            self.bench.commit()
            self.bench.run()
            self.sent = {}
        self.number += 1
        packet_id = self.number % 60_000 + 1
        delay_s = self.random.choice((1, 1, 2, 3, 7))
        topic = f"$delayed/{delay_s}/t/{self.random.randint(0, 3)}"
        qos = self.random.choice((1, 2))
        self.sent[packet_id] = (str(self.number), delay_s)
        self.peer.send(
            Publish(
                topic.encode(), str(self.number).encode(), qos, False, False, packet_id, b"", 0, -1
            )
        )

    def read(self) -> None:
        for packet in [] if self.peer is None else self.peer.take(m.Ack):
            assert isinstance(packet, m.Ack)
            if packet.kind in (m.PUBACK, m.PUBREC) and packet.reason == 0:
                self.acknowledged.add(self.sent[packet.packet_id][0])
            if packet.kind == m.PUBREC and self.peer is not None:
                self.peer.send(m.Ack(m.PUBREL, packet.packet_id))

    def check(self) -> None:
        self.bench.auto_commit = True
        for _ in range(20):
            self.bench.advance(1.0)
            self.bench.settle()
        self.read()
        waiting: dict[tuple[int, int], Record] = {}
        published: dict[tuple[int, int], int] = {}
        for record in self.bench.messages():
            if is_waiting(record):
                waiting[record.partition, record.offset] = record
            elif is_due(record):
                place = (record.partition, record.sequence)
                published[place] = published.get(place, 0) + 1
                first = waiting[place]
                assert record.payload == first.payload
                delay_s = int(first.topic.split(b"/")[1])
                assert record.timestamp_us >= first.timestamp_us + delay_s * 1_000_000, "early"
        assert published == dict.fromkeys(waiting, 1)
        stored = {record.payload.decode() for record in waiting.values()}
        assert self.acknowledged <= stored
        assert len(self.bench.node.state.delayed) == 0
        assert self.bench.node.state.delayed.bytes.total == 0


def run(seed: int) -> None:
    world = DelayedWorld(seed)
    for _ in range(80):
        world.step()
    world.check()


def test_each_is_published_once() -> None:
    run_seeds(range(SEEDS), run)

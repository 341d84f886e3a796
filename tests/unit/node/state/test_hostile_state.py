"""Records and entries of replicated state that another node made up or that a disk damaged.

A record that cannot be understood is counted and skipped, and an entry is refused with the errors
that its reader declares. Whatever of them was accepted can be written to a snapshot.
"""

import json
import random
import struct
from collections import defaultdict
from collections.abc import Iterator

import pytest

from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.record import MESSAGE, Record
from holdfast.node.delivery.delivery import deliver
from holdfast.node.delivery.log_replay import message_of
from holdfast.node.routing.routing import find_route
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.replicated import (
    SNAPSHOT_EPOCHS,
    SNAPSHOT_INBOUND,
    ReplicatedState,
)
from holdfast.node.state.transfer import entries, take
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.topics.names import InvalidTopic
from tests.fuzz.mutation import damage
from tests.sim.casts import GROUPS, LOG, MOVERS, TIMED, TRAVELLERS
from tests.sim.process import Process
from tests.sim.world import Settings, World
from tests.support.node_bench import NodeBench

ROUNDS = 4_000
FIELDS = ("client_id", "topic", "payload", "properties", "producer")
VALUES: tuple[object, ...] = (
    None, True, -1, 1.5, 1 << 70, "x", "\ud800", [], [[]], [1], ["x"], [[9, 1]], [[-1, [3]]],
    [0, 0, 0], {}, [["#/a", 1, True, True, 1, 0]], [["a", 1, True, True, 1, 0, [1, 2, 3]]],
)  # fmt: skip
PARTITIONS = range(4)


def committed(process: Process) -> Iterator[Record]:
    """The committed records in the log of a node."""
    for partition, end in enumerate(process.journal.high_watermark):
        start = process.journal.start_offsets[partition]
        while start < end:
            reader = process.cores.storage.reader
            for data in reader.read_batches(partition, start, end, 1 << 20):
                batch = Batch(data)
                start = batch.end_offset
                yield from batch.records()


class Life:
    """A node's state after a life of clients, with the records and entries that made it."""

    def __init__(self) -> None:
        world = World(3, Settings(casts=(LOG, TIMED, GROUPS, MOVERS, TRAVELLERS), duration_s=2.0))
        world.run()
        process = world.hosts["n1"].process
        assert process is not None
        self.records: list[Record] = list(committed(process))
        self.state = process.images
        # The world compares the state of its nodes, and only this one gets what follows.
        process.cores.applied.on_applied = None
        self.entries: dict[int, list[bytes]] = defaultdict(list)
        for entry in entries(self.state, PARTITIONS):
            if entry is not None:
                self.entries[entry[1]].append(entry[2])
        for kind, data in self.state.snapshot():
            self.entries[kind].append(data)


@pytest.fixture(scope="module")
def life() -> Life:
    return Life()


def hostile_record(rng: random.Random, life: Life) -> Record:
    """A record as a batch contains it, with a right checksum."""
    known = rng.choice(life.records)
    record = Record(
        known.partition,
        rng.choice((known.kind, known.kind, rng.choice(life.records).kind)),
        flags=rng.choice((known.flags, rng.randrange(256))),
        timestamp_us=known.timestamp_us,
        topic=known.topic,
        client_id=known.client_id,
        sequence=rng.choice((known.sequence, 0, 1 << 31, (1 << 64) - 1)),
        payload=known.payload,
        properties=known.properties,
        producer=known.producer,
        producer_epoch=rng.choice((known.producer_epoch, (1 << 32) - 1)),
    )
    for name in rng.sample(FIELDS, 2):
        others = [getattr(other, name) for other in rng.sample(life.records, 4)]
        setattr(record, name, damage(rng, getattr(record, name), [*others, b"$share/g/a/#"]))
    if known.payload.startswith(b"{") and rng.random() < 0.5:
        record.payload = with_another_value(rng, known.payload)
    builder = BatchBuilder(record.partition, known.offset)
    builder.add(record)
    return Batch(builder.build(0)).record(0)


def with_another_value(rng: random.Random, data: bytes) -> bytes:
    content = json.loads(data)
    value = rng.choice(VALUES)
    if isinstance(content, dict):
        content[rng.choice(list(content))] = value
    else:
        content = rng.choice(([value], value))
    return json.dumps(content).encode()


def hostile_entry(rng: random.Random, known: list[bytes]) -> bytes:
    data = rng.choice(known)
    if rng.random() < 0.01:
        return b"[" * 100_000
    if data[:1] in (b"{", b"[") and rng.random() < 0.5:
        return with_another_value(rng, data)
    return damage(rng, data, known)


def test_records_are_skipped(life: Life) -> None:
    rng = random.Random(1)
    state = life.state
    damaged = state.damaged
    for _ in range(ROUNDS):
        state.apply(hostile_record(rng, life))
    assert state.damaged - damaged > ROUNDS / 20
    check_that_it_can_be_kept(state)


def test_entries_are_refused(life: Life) -> None:
    rng = random.Random(2)
    state = life.state
    refused = 0
    for _ in range(ROUNDS):
        kind = rng.choice(list(life.entries))
        data = hostile_entry(rng, life.entries[kind])
        try:
            if kind in (SNAPSHOT_EPOCHS, SNAPSHOT_INBOUND):
                state.apply_snapshot_entry(kind, data)
            else:
                take(state, rng.choice(PARTITIONS), kind, data)
        except (struct.error, ValueError, CorruptBatch):
            refused += 1
    assert refused > ROUNDS / 4
    check_that_it_can_be_kept(state)


def check_that_it_can_be_kept(state: ReplicatedState) -> None:
    """The next snapshot, the entries for another node, and a recovery."""
    state.arm_some_timers(1 << 20)
    for _ in entries(state, PARTITIONS):
        pass
    assert isinstance(state, Recovery)
    for kind, data in list(state.snapshot()):
        state.apply_snapshot_entry(kind, data)


PROPERTIES = (
    b"",
    b"\x01\x01\x02\x00\x00\x00\x3c",
    b"\x02\x00\x00\x00\x3c\x26\x00\x01k\x00\x01v",
    b"\x03\x00\x04text\x08\x00\x05reply\x09\x00\x02id",
)


def hostile_message(rng: random.Random) -> Record:
    record = Record(
        0,
        MESSAGE,
        flags=rng.choice((0, 1, 2, 1 << 2, rng.randrange(256))),
        timestamp_us=1_700_000_000_000_000,
        topic=damage(rng, b"plant/a/b", [b"#", b"+/\x00", b"\xff\xfe"]),
        client_id=damage(rng, b"someone", [b"\xff"]),
        sequence=rng.choice((0, 1, 1 << 31, (1 << 64) - 1)),
        payload=damage(rng, b"21.5", [b""]),
        properties=damage(rng, rng.choice(PROPERTIES), PROPERTIES),
        producer=damage(rng, b"p", [b"\xff"]),
        producer_epoch=rng.choice((0, (1 << 32) - 1)),
        audience=damage(rng, b"\x01$share/g/#", [b"\xff"]),
    )
    builder = BatchBuilder(0, 0)
    builder.add(record)
    return Batch(builder.build(0)).record(0)


def test_messages_are_delivered_or_left_out() -> None:
    """Live, and from the log: to clients of both versions, groups and retained messages."""
    rng = random.Random(3)
    bench = NodeBench()
    peers = []
    for version in (4, 5):
        peer = bench.connect(f"sub{version}", version=version)
        peer.send(m.Subscribe(1, [m.SubscriptionRequest("#", 0)]))
        peer.send(m.Subscribe(2, [m.SubscriptionRequest(f"$share/g{version}/#", 0)]))
        peer.deliver = lambda data: None  # type: ignore[method-assign]
        peers.append(peer)
    state = bench.node.state
    known = 0
    for _ in range(ROUNDS):
        message = message_of(hostile_message(rng))
        try:
            route = find_route(state, message.topic)
        except InvalidTopic:
            continue
        known += deliver(state, route, message) > 0
        bench.run()
    assert known > ROUNDS / 4
    assert all(peer.connection.transport is peer for peer in peers)

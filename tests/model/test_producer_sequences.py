"""Numbered publishers against random refusals, cuts, crashes, fuzzy snapshots and retention.

The publishers keep to docs/producers.md: several in flight, back to the first refused one, a new
epoch with each life, while packets of the one before may still be on their way. At the end every
message must be in the log exactly once, each producer's in order, and after each crash the table
must be what the log says.
"""

import random
from collections.abc import Iterator

import pytest

from holdfast.log.batch import ATTRIBUTE_STATE, Batch
from holdfast.log.partition import partition_of
from holdfast.log.record import FLAG_PRODUCER, MESSAGE, Record
from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.properties import USER_PROPERTY, encode_block
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.support.seeds import block_of_seeds, run_seeds

PARTITIONS = 3
TOPICS = ["a/1", "a/2", "b/1", "b/2", "c"]


class Entry:
    def __init__(self, producer: str, epoch: int, sequence: int, topic: str) -> None:
        self.epoch = epoch
        self.sequence = sequence
        self.topic = topic
        self.value = f"{producer}:{epoch}:{sequence}"
        self.properties = encode_block({USER_PROPERTY: [("hf-seq", self.value)]})


class Writer:
    """One life of a producer. It has its own view of what is confirmed."""

    def __init__(self, world: "World", producer: str, epoch: int, entries: list[Entry]) -> None:
        self.world = world
        self.producer = producer
        self.epoch = epoch
        self.entries = entries
        self.window = world.random.choice([1, 2, 5])
        self.peer: Peer | None = None
        self.ready = False
        self.inflight: dict[int, Entry] = {}
        # Sent, and not yet at the broker.
        self.network: list[Publish] = []
        self.packet_id = 0
        # Lowest sequence refused since everything was in flight anew.
        self.refused = 0
        self.stopped = False

    def connect(self) -> None:
        self.ready = False
        name = f"{self.producer}-{self.epoch}"
        self.peer = self.world.bench.connect(name, properties={33: 100})

    def lose(self) -> None:
        if self.peer is not None and not self.peer.closed:
            self.peer.lose()
        self.peer = None
        self.inflight = {}
        self.network = []
        self.refused = 0

    def send(self) -> None:
        """As much as the window has room for. A new epoch waits for the end of the one before."""
        if self.peer is None or not self.ready or self.stopped or self.refused:
            return
        if self.world.is_old(self):
            return
        waiting = [entry for entry in self.entries if entry not in self.inflight.values()]
        for entry in waiting[: self.window - len(self.inflight)]:
            if any(other.epoch != entry.epoch for other in self.inflight.values()):
                break
            self.packet_id = self.packet_id % 60_000 + 1
            self.inflight[self.packet_id] = entry
            topic = entry.topic.encode()
            retain = self.world.random.random() < 0.2
            self.network.append(
                Publish(
                    topic, entry.value.encode(), 1, retain, False, self.packet_id,
                    entry.properties, 0, -1,
                )
            )  # fmt: skip

    def arrive(self, count: int) -> None:
        packets, self.network = self.network[:count], self.network[count:]
        if self.peer is not None and packets:
            self.peer.send(*packets)

    def read(self) -> None:
        if self.peer is None:
            return
        for packet in self.peer.take():
            if isinstance(packet, m.Connack):
                assert packet.reason == 0
                self.ready = True
                continue
            assert isinstance(packet, m.Ack), packet
            assert next(iter(self.inflight)) == packet.packet_id, "answers out of order"
            self._answered(self.inflight.pop(packet.packet_id), packet.reason)
        if not self.inflight:
            self.refused = 0

    def _answered(self, entry: Entry, reason: int) -> None:
        if reason == 0x97:
            self.refused = self.refused or entry.sequence
        elif reason == 0x83:
            assert self.world.is_old(self), f"{entry.value} fenced"
            self.stopped = True
        else:
            assert reason in (0, 0x10), hex(reason)
            assert not self.refused, f"{entry.value} stored after {self.refused} was refused"
            self.entries.remove(entry)
            self.world.confirmed.add(entry.value)


class Bench(NodeBench):
    def __init__(self) -> None:
        self.floor = [0] * PARTITIONS
        super().__init__(NodeConfig(partitions=PARTITIONS, sys_interval_s=0), auto_commit=False)

    def records(self) -> list[Record]:
        """What recovery reads of what retention has left."""
        batches = [batch for batch in map(Batch, self.log) if batch.attributes & ATTRIBUTE_STATE]
        records = [record for batch in batches for record in batch.records()]
        return [each for each in records if each.offset >= self.floor[each.partition]]


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = Bench()
        self.confirmed: set[str] = set()
        self.sequences = {"p": 0, "q": 0}
        self.topics = {name: self.random.sample(TOPICS, 3) for name in self.sequences}
        self.writers: dict[str, list[Writer]] = {
            name: [Writer(self, name, 1, [])] for name in self.sequences
        }
        self.put: list[Entry] = []
        # A finished snapshot and the offsets it begins at; one that is being taken.
        self.snapshot: list[tuple[int, bytes]] | None = None
        self.covered = list(self.bench.floor)
        self.taking: Iterator[tuple[int, bytes]] | None = None
        self.taken: list[tuple[int, bytes]] = []
        self.begun = list(self.bench.floor)

    def all_writers(self) -> list[Writer]:
        return [writer for writers in self.writers.values() for writer in writers]

    def is_old(self, writer: Writer) -> bool:
        return self.writers[writer.producer][-1] is not writer

    def add(self) -> None:
        name = self.random.choice(list(self.writers))
        writer = self.writers[name][-1]
        self.sequences[name] += self.random.choice([1, 1, 1, 7])
        topic = self.random.choice(self.topics[name])
        entry = Entry(name, writer.epoch, self.sequences[name], topic)
        writer.entries.append(entry)
        self.put.append(entry)

    def reopen(self) -> None:
        """A new life takes over what is unconfirmed; the old one does not know."""
        name = self.random.choice(list(self.writers))
        old = self.writers[name][-1]
        self.writers[name].append(Writer(self, name, old.epoch + 1, list(old.entries)))

    def save(self) -> None:
        """A piece of a snapshot; the disk has everything before it counts."""
        if self.taking is None:
            self.begun = list(self.bench.node.state.delivered)
            self.taking = self.bench.core.cluster.replicated.snapshot()
            self.taken = []
        entry = next(self.taking, None)
        if entry is not None:
            self.taken.append(entry)
            return
        self.bench.commit()
        self.bench.run()
        self.snapshot, self.covered, self.taking = self.taken, self.begun, None

    def crash(self) -> None:
        for writer in self.all_writers():
            writer.read()
        if self.random.random() < 0.5:
            self.bench.floor = list(self.covered)
        self.bench.crash(keep_uncommitted=self.random.random() < 0.5, snapshot=self.snapshot)
        self.taking = None
        for writer in self.all_writers():
            if writer.peer is not None:
                writer.peer.closed = True
            writer.lose()
        self.check_table()

    def check_table(self) -> None:
        """Of each producer and partition, the newest record there is, or ever was."""
        expected: dict[tuple[bytes, int], tuple[int, int]] = {}
        for record in NodeBench.records(self.bench):
            if record.flags & FLAG_PRODUCER:
                place = (record.producer, record.partition)
                expected[place] = (record.producer_epoch, record.sequence)
        table = self.bench.node.state.producers
        found = {
            (name, place.partition): (place.epoch, place.sequence)
            for name, producer in table.by_id.items()
            for place in producer.positions()
        }
        assert found == expected
        assert table.position_count == len(found)

    def step(self) -> None:
        dice = self.random.random()
        state = self.bench.node.state
        if dice < 0.25:
            self.add()
        elif dice < 0.40:
            self.random.choice(self.all_writers()).send()
        elif dice < 0.50:
            self.random.choice(self.all_writers()).arrive(self.random.randint(1, 5))
        elif dice < 0.65:
            self.bench.commit()
            self.bench.run()
        elif dice < 0.70:
            state.disk_full = not state.disk_full
        elif dice < 0.80:
            self.save()
        elif dice < 0.86:
            self.random.choice(self.all_writers()).lose()
        elif dice < 0.97:
            writer = self.random.choice(self.all_writers())
            if writer.peer is None:
                writer.connect()
        elif dice < 0.98:
            self.reopen()
        else:
            self.crash()
        for writer in self.all_writers():
            if self.random.random() < 0.6:
                writer.read()

    def drain(self) -> None:
        """The newest life of each producer brings everything to an end."""
        self.bench.node.state.disk_full = False
        for writers in self.writers.values():
            for writer in writers[:-1]:
                writer.lose()
            writers[-1].lose()
            writers[-1].connect()
        for _ in range(5 + 2 * len(self.put)):
            self.bench.settle()
            for writers in self.writers.values():
                writers[-1].read()
                writers[-1].send()
                writers[-1].arrive(100)
        for writers in self.writers.values():
            assert writers[-1].entries == [], writers[-1].entries[0].value

    def check(self) -> None:
        stored: list[tuple[str, str, int]] = []
        for record in NodeBench.records(self.bench):
            if record.kind == MESSAGE:
                assert record.flags & FLAG_PRODUCER
                assert record.partition == partition_of(record.topic, PARTITIONS)
                stored.append((record.payload.decode(), record.topic.decode(), record.partition))
        values = [value for value, _, _ in stored]
        assert len(values) == len(set(values)), "stored twice"
        assert set(values) == {entry.value for entry in self.put} >= self.confirmed
        numbers = {entry.value: (entry.epoch, entry.sequence) for entry in self.put}
        newest: dict[tuple[str, int], tuple[int, int]] = {}
        for value, _, partition in stored:
            line = (value[0], partition)
            assert newest.get(line, (0, 0)) < numbers[value], f"{value} out of order"
            newest[line] = numbers[value]


def run(seed: int) -> None:
    world = World(seed)
    for _ in range(300):
        world.step()
    world.drain()
    world.check()
    world.crash()
    world.check()


SEEDS = 80
"""How many worlds; A failure names its seed; `tests.model` runs more."""
BLOCKS = 4


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_message_once_and_in_order(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), run)

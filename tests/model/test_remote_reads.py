"""Reads at other nodes against a list: whatever is cut, behind, damaged or deleted by retention,
each reader receives what its filters match, once and in order, and passes nothing that an in-sync
replica has.
"""

import random
from collections import deque
from collections.abc import Callable

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.starts import FoundStart, StartQuery
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.effects import FetchInflight, FindStarts, Found, ReadLog
from holdfast.node.features import FEEDS
from holdfast.node.frame_kinds import FETCH, FETCHED
from holdfast.node.metadata.model import GATEWAY, ClusterMetadata, PartitionInfo
from holdfast.node.node import Node
from holdfast.node.reads import fetch_frames, read_jobs, remote_reads
from holdfast.node.reads.fetch_frames import FetchFrame, ReadRange, encode_fetch
from holdfast.node.reads.fetch_server import FetchServer
from holdfast.node.reads.remote_reads import ANSWER_S, RemoteReads
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.state import ReadTokens
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Group
from holdfast.protocol.topics.names import matches
from tests.sim.disk import SimDisk
from tests.sim.world import Settings
from tests.sim.world import World as SimWorld
from tests.support.journal_port import new_state
from tests.support.log_bench import LogBench

PARTITIONS = 4
TOPICS = [f"{first}/{second}" for first in "abc" for second in "xyz"]
FILTERS = ["#", "a/#", "+/x", "b/y", "c/+", "a/x", "nothing/#"]
Planted = Callable[[pytest.MonkeyPatch], None]


class Transfers:
    """The part of `Transfer` that a server asks."""

    may_serve = True


class Replica:
    """A node with a log, whose applied offsets the test moves."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.bench = LogBench(SimDisk(), PARTITIONS, 2048)
        self.state = new_state(NodeConfig(partitions=PARTITIONS), self.bench.journal)
        self.state.delivered[:] = [0] * PARTITIONS
        self.context = ClusterContext(name, self.bench.journal)
        self.context.connected = {"gateway"}
        self.context.metadata = world.metadata
        self.transfer = Transfers()
        tokens = ReadTokens(ReplicationConfig(read_bytes=1 << 30))
        self.members: set[int] = set()
        self.server = FetchServer(
            self.state,
            self.context,
            tokens,
            self.transfer,
            self.members.__contains__,  # type: ignore[arg-type]
        )
        self.inbox: deque[bytes] = deque()
        self.is_linked = True

    def turn(self) -> None:
        """Handles a request, and does some of the reads."""
        if self.inbox and self.is_linked:
            self.server.handle("gateway", self.inbox.popleft())
        self.server.advance(self.state.now)
        self.server.check()
        effects, self.state.effects = self.state.effects, []
        reader = self.bench.reader
        for effect in effects:
            if isinstance(effect, ReadLog):
                assert effect.done is not None
                result = reader.read(
                    effect.positions, effect.limits, effect.interests, effect.records_max,
                    effect.bytes_max,
                )  # fmt: skip
                effect.done(result if self.transfer.may_serve else None)
            elif isinstance(effect, FetchInflight):
                assert effect.done is not None
                found: Found = []
                for number, partition, offset in effect.wanted:
                    found.append((number, reader.fetch(partition, offset)))
                    if self.world.chance.random() < 0.1:
                        break
                effect.done(found if self.transfer.may_serve else None)
            else:
                assert isinstance(effect, FindStarts)
                assert effect.done is not None
                effect.done([reader.starts.find(each, effect.limits) for each in effect.wanted])


class Reader(Node):
    """The gateway's core, which only collects results."""

    def __init__(self, config: NodeConfig, journal: Journal) -> None:
        super().__init__(config, journal)
        self.reads: dict[ReadLog, tuple[list[Record], list[int], bool, int]] = {}
        self.fetched: dict[FetchInflight, Found] = {}

    def handle_read(
        self, effect: ReadLog, records: list[Record], positions: list[int], done: bool, lost: int
    ) -> None:
        assert effect not in self.reads
        self.reads[effect] = records, positions, done, lost

    def handle_fetched(self, effect: FetchInflight, found: Found) -> None:
        assert effect not in self.fetched
        self.fetched[effect] = found


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        names = ["n1", "n2", "n3"]
        members = [tuple(chance.sample(names, 2)) for _ in range(PARTITIONS)]
        self.in_sync = [each if chance.random() < 0.8 else each[:1] for each in members]
        self.metadata = ClusterMetadata(
            "c", 2, 1, {},
            tuple(
                PartitionInfo(each, leader=each[0], epoch=1, in_sync=synced)
                for each, synced in zip(members, self.in_sync, strict=True)
            ),
            1,
        )  # fmt: skip
        self.replicas = {name: Replica(self, name) for name in names}
        for replica in self.replicas.values():
            replica.members.update(
                p for p, names_of in enumerate(members) if replica.name in names_of
            )
        journal = Journal(PARTITIONS, replicated=True)
        self.node = Reader(NodeConfig(partitions=PARTITIONS), journal)
        self.state = self.node.state
        self.context = ClusterContext("gateway", journal, GATEWAY)
        self.context.metadata = self.metadata
        self.context.connected = set(names)
        self.context.features = dict.fromkeys(names, FEEDS)
        self.reads = RemoteReads(self.node, self.context, self.context.is_stored)
        self.starts: dict[FindStarts, list[FoundStart]] = {}
        self.answers: deque[tuple[str, bytes]] = deque()
        self.log: list[list[Record]] = [[] for _ in range(PARTITIONS)]
        self.asked: list[ReadLog | FetchInflight | FindStarts] = []
        self.append(chance.randrange(40, 200))
        self.state.delivered[:] = [len(each) for each in self.log]

    # The replicas

    def append(self, count: int) -> None:
        """Every replica has all records; those of which it is no member are never asked for."""
        for _ in range(count):
            topic = self.chance.choice(TOPICS)
            payload = bytes(self.chance.randrange(200))
            for replica in self.replicas.values():
                replica.bench.append(topic, payload)
            partition = partition_of(topic.encode(), PARTITIONS)
            record = Record(partition, 1, topic=topic.encode(), payload=payload)
            record.offset = len(self.log[partition])
            self.log[partition].append(record)
            if self.chance.random() < 0.3:
                for replica in self.replicas.values():
                    replica.bench.write()
        for replica in self.replicas.values():
            replica.bench.write()

    def apply(self, replica: Replica, *, everything: bool = False) -> None:
        for partition, records in enumerate(self.log):
            at = replica.state.delivered[partition]
            end = len(records)
            replica.state.delivered[partition] = end if everything else self.chance.randint(at, end)

    def link(self, replica: Replica, *, up: bool) -> None:
        if replica.is_linked == up:
            return
        replica.is_linked = up
        replica.inbox.clear()
        self.answers = deque(each for each in self.answers if each[0] != replica.name)
        replica.context.outgoing.clear()
        if up:
            self.context.connected.add(replica.name)
            self.reads.nodes_changed()
        else:
            self.context.connected.discard(replica.name)
            self.reads.disconnected(replica.name)

    # The readers

    def ask(self) -> None:
        chance = self.chance
        ends = self.state.delivered
        kind = chance.random()
        effect: ReadLog | FetchInflight | FindStarts
        if kind < 0.7:
            group = Group(f"g{len(self.asked)}", "#")
            group.start_read()
            near = chance.random() < 0.6
            positions = [0 if near else chance.randint(0, end) for end in ends]
            interests = [
                ReadInterest(
                    filter,
                    None if chance.random() < 0.6 else [chance.randint(0, end) for end in ends],
                )
                for filter in chance.sample(FILTERS, chance.randint(1, 3))
            ]
            limits = [chance.randint(at, end) for at, end in zip(positions, ends, strict=True)]
            effect = ReadLog(
                group, None, positions, limits, interests, chance.choice((1, 5, 500)), 1 << 14
            )
        elif kind < 0.9:
            wanted = []
            for number in range(chance.randint(1, 6)):
                partition = chance.randrange(PARTITIONS)
                if ends[partition]:
                    wanted.append((number, partition, chance.randrange(ends[partition])))
            if not wanted:
                return
            effect = FetchInflight(Group("g", "#"), None, wanted, 1 << 12)
        else:
            connection = Connection(1 << 20, "", ListenerRules("main"))
            connection.state = OPEN
            queries = [
                StartQuery(chance.choice(FILTERS), 0, chance.choice((0, 2)))
                for _ in range(chance.randint(1, 2))
            ]
            effect = FindStarts(connection, None, queries, list(ends))
        self.asked.append(effect)
        if not self.reads.take(effect):
            assert isinstance(effect, ReadLog)
            assert effect.positions == effect.limits
            self.node.handle_read(effect, [], effect.positions, True, 0)

    def turn(self, seconds: float = 0.01) -> None:
        self.state.now += seconds
        self.state.steps_left = 10
        for replica in self.replicas.values():
            replica.state.now = self.state.now
        if self.answers and self.chance.random() < 0.8:
            name, payload = self.answers.popleft()
            self.reads.handle(name, payload)
        self.reads.advance(self.state.now)
        self.reads.check()
        for node, kind, payload in self.context.outgoing:
            assert kind == FETCH
            assert isinstance(payload, bytes)
            self.replicas[node].inbox.append(payload)
        self.context.outgoing.clear()
        for replica in self.replicas.values():
            if self.chance.random() < 0.7:
                replica.turn()
            for _, kind, payload in replica.context.outgoing:
                assert kind == FETCHED
                assert isinstance(payload, bytes)
                if replica.is_linked:
                    self.answers.append((replica.name, payload))
            replica.context.outgoing.clear()
        self.check_answers()

    # The oracle

    def is_lost(self, partition: int, offset: int) -> bool:
        """Whether no in-sync replica has the record any more."""
        return all(
            self.replicas[name].bench.journal.start_offsets[partition] > offset
            for name in self.in_sync[partition]
        )

    def check_answers(self) -> None:
        for effect, (records, positions, is_done, lost) in self.node.reads.items():
            self.check_read(effect, records, positions, is_done, lost)
        for fetched, found in self.node.fetched.items():
            assert found, "a read of records without any"
            for (number, partition, offset), (at, record) in zip(
                fetched.wanted, found, strict=False
            ):
                assert number == at
                if record is None:
                    assert self.is_lost(partition, offset), "a record that a replica has is absent"
                else:
                    assert (record.partition, record.offset) == (partition, offset)
                    assert record.payload == self.log[partition][offset].payload
        for searched, starts in self.starts.items():
            self.check_starts(searched, starts)
        self.asked = [
            each
            for each in self.asked
            if each not in self.node.reads
            and each not in self.node.fetched
            and each not in self.starts
        ]
        self.node.reads.clear()
        self.node.fetched.clear()
        self.starts.clear()

    def check_read(
        self, effect: ReadLog, records: list[Record], positions: list[int], is_done: bool, lost: int
    ) -> None:
        got = {(each.partition, each.offset): each for each in records}
        assert len(got) == len(records), "a record twice"
        assert is_done == (positions == effect.limits)
        gone = 0
        for partition, (begin, end) in enumerate(zip(effect.positions, positions, strict=True)):
            assert begin <= end <= effect.limits[partition]
            offsets = [each.offset for each in records if each.partition == partition]
            assert offsets == sorted(offsets), "out of order"
            assert all(begin <= offset < end for offset in offsets)
            for record in self.log[partition][begin:end]:
                place = partition, record.offset
                is_wanted = any(
                    matches(each.filter, record.topic.decode())
                    and (each.start is None or each.start[partition] <= record.offset)
                    for each in effect.interests
                )
                if place in got:
                    assert is_wanted
                    assert got[place].payload == record.payload
                    assert got[place].topic == record.topic
                elif self.is_lost(partition, record.offset):
                    gone += 1
                else:
                    assert not is_wanted, f"{place} is passed and not sent"
        assert lost <= gone
        assert len(records) <= effect.records_max + 1

    def check_starts(self, effect: FindStarts, starts: list[FoundStart]) -> None:
        for query, start in zip(effect.wanted, starts, strict=True):
            assert not start.error
            for partition, limit in enumerate(effect.limits):
                at = start.offsets[partition]
                assert at <= limit
                if query.last:
                    found = [
                        topic
                        for topic, floor in start.floors.items()
                        if partition_of(topic, PARTITIONS) == partition and floor >= at
                    ]
                    assert at == limit or found
                    self.check_floors(query, partition, limit, start)
                else:
                    replicas = self.in_sync[partition]
                    begins = [
                        self.replicas[name].bench.journal.start_offsets[partition]
                        for name in replicas
                    ]
                    assert at <= min(limit, max(begins))

    def check_floors(
        self, query: StartQuery, partition: int, limit: int, start: FoundStart
    ) -> None:
        begin = max(
            self.replicas[name].bench.journal.start_offsets[partition]
            for name in self.in_sync[partition]
        )
        newest: dict[bytes, list[int]] = {}
        for record in self.log[partition][begin:limit]:
            if matches(query.filter, record.topic.decode()):
                newest.setdefault(record.topic, []).append(record.offset)
        for topic, offsets in newest.items():
            assert start.floors[topic] <= offsets[-query.last :][0]

    # A life

    def run(self) -> None:
        chance = self.chance
        for _ in range(150):
            event = chance.random()
            replica = chance.choice(list(self.replicas.values()))
            if event < 0.3:
                for _ in range(chance.choice((1, 1, 3, 30))):
                    self.ask()
            elif event < 0.4:
                self.apply(replica)
            elif event < 0.5:
                self.link(replica, up=not replica.is_linked)
            elif event < 0.53 and len(replica.bench.journal.segments) > 3:
                replica.bench.remove_oldest(1)
            elif event < 0.56:
                replica.transfer.may_serve = not replica.transfer.may_serve
            elif event < 0.6:
                self.append(chance.randrange(20))
                self.state.delivered[:] = [len(each) for each in self.log]
            elif event < 0.62:
                self.state.now += ANSWER_S
            self.turn()
        for replica in self.replicas.values():
            self.link(replica, up=True)
            replica.transfer.may_serve = True
            self.apply(replica, everything=True)
        for _ in range(4000):
            if not self.asked:
                break
            self.turn(0.05)
        assert not self.asked, "a reader waits for ever"
        assert not self.reads.unreachable or not self.reads._parked


@pytest.fixture(autouse=True)
def _worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_frames, "FETCHED_BYTES", 2000)


def run_world(seed: int, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(seed)

    def collect(state: object, effect: FindStarts, found: list[FoundStart]) -> None:
        world.starts[effect] = found

    monkeypatch.setattr(remote_reads, "handle_starts", collect)
    try:
        world.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return world


@pytest.mark.parametrize("block", range(4))
def test_readers_receive_what_a_whole_log_would_give(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = shared = 0
    for seed in range(block * 6, block * 6 + 6):
        world = run_world(seed, monkeypatch)
        fetches += world.state.stats.log_fetches
        shared += world.reads.shared
    assert fetches > 100
    assert shared > 100


def _above_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lagging replica says that it has read everything."""
    read = FetchServer._was_read

    def lie(self: FetchServer, node: str, frame: object, refused: object, result: object) -> None:
        if result is not None:
            for each in frame.ranges:  # type: ignore[attr-defined]
                result.positions[each.partition] = each.end  # type: ignore[attr-defined]
        read(self, node, frame, refused, result)  # type: ignore[arg-type]

    monkeypatch.setattr(FetchServer, "_was_read", lie)


def _first_loss_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica without the records is enough to count them as lost."""
    monkeypatch.setattr(
        RemoteReads, "_oldest", lambda self, p: max(self._begins.get(p, {}).values(), default=0)
    )


def _shared_without_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that shares a read is moved as far as the read, without its own budget."""
    monkeypatch.setattr(
        read_jobs.ReadJob, "move", lambda self, positions, stops: self.positions.__setitem__(
            slice(None), [max(at, positions.get(p, at)) for p, at in enumerate(self.positions)]
        )
    )  # fmt: skip


@pytest.mark.parametrize("plant", [_above_applied, _first_loss_counts, _shared_without_ranges])
def test_planted_bugs_are_found(plant: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        for seed in range(60):
            run_world(seed, monkeypatch)

    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()


def test_a_thousand_sessions_share_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart all sessions are behind at the same place."""
    world = World(1)
    for replica in world.replicas.values():
        world.apply(replica, everything=True)
    limits = list(world.state.delivered)
    for number in range(1000):
        group = Group(f"g{number}", "#")
        group.start_read()
        interests = [ReadInterest(TOPICS[number % len(TOPICS)], None)]
        effect = ReadLog(group, None, [0] * PARTITIONS, limits, interests, 500, 1 << 20)
        world.asked.append(effect)
        assert world.reads.take(effect)
    for _ in range(4000):
        if not world.asked:
            break
        world.turn()
    assert not world.asked
    assert world.state.stats.log_fetches < 1000 / 10


def test_a_reader_waits_for_the_only_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others continue, and the log says which partition is waited for."""
    world = World(3)
    world.in_sync[:] = [("n1",), ("n2",), ("n2",), ("n2",)]
    world.metadata = world.context.metadata = ClusterMetadata(
        "c", 2, 1, {},
        tuple(PartitionInfo(each, leader=each[0], epoch=1, in_sync=each) for each in world.in_sync),
        2,
    )  # fmt: skip
    for replica in world.replicas.values():
        replica.members.update(range(PARTITIONS))
        world.apply(replica, everything=True)
    world.link(world.replicas["n1"], up=False)
    group = Group("g", "#")
    group.start_read()
    limits = list(world.state.delivered)
    effect = ReadLog(group, None, [0] * PARTITIONS, limits, [ReadInterest("#", None)], 500, 1 << 20)
    positions = effect.positions
    read = world.node.handle_read
    results: list[tuple[list[int], bool]] = []

    def handle_read(
        effect: ReadLog, records: list[Record], positions: list[int], done: bool, lost: int
    ) -> None:
        results.append((positions, done))
        read(effect, records, positions, done, lost)

    monkeypatch.setattr(world.node, "handle_read", handle_read)
    world.reads.take(effect)
    while not results:
        world.turn()
    positions, is_done = results.pop()
    assert not is_done
    assert positions == [0, *limits[1:]]
    again = ReadLog(group, None, positions, limits, effect.interests, 500, 1 << 20)
    world.reads.take(again)
    for _ in range(50):
        world.turn()
    assert not results
    assert list(world.reads.unreachable) == [0]
    world.append(20)
    world.state.delivered[:] = [len(each) for each in world.log]
    for replica in world.replicas.values():
        world.apply(replica, everything=True)
    for _ in range(50):
        world.turn()
    # It asks again, so that it receives what is new in the other partitions.
    assert results == [(positions, False)]
    results.clear()
    limits = list(world.state.delivered)
    world.reads.take(ReadLog(group, None, positions, limits, effect.interests, 500, 1 << 20))
    world.link(world.replicas["n1"], up=True)
    for _ in range(50):
        world.turn()
    assert results == [(limits, True)]
    assert not world.reads.unreachable


def test_a_replica_that_has_copied_the_log_again_is_asked() -> None:
    """Its log began later before. The metadata has changed since, because it left and came back."""
    world = World(3)
    world.in_sync[:] = [("n1",)] * PARTITIONS
    world.metadata = world.context.metadata = ClusterMetadata(
        "c", 2, 1, {},
        tuple(PartitionInfo(each, leader=each[0], epoch=1, in_sync=each) for each in world.in_sync),
        2,
    )  # fmt: skip
    replica = world.replicas["n1"]
    replica.members.update(range(PARTITIONS))
    world.apply(replica, everything=True)
    group = Group("g", "#")
    limits = list(world.state.delivered)
    begin = replica.bench.journal.start_offsets[0]
    for start in (begin + 3, begin):
        replica.bench.journal.start_offsets[0] = start
        world.reads.nodes_changed()
        group.start_read()
        positions = [0, *limits[1:]]
        read = ReadLog(group, None, positions, limits, [ReadInterest("#", None)], 500, 1 << 20)
        world.asked.append(read)
        world.reads.take(read)
        while world.asked:
            world.turn()


def test_a_log_that_is_copied_is_read_elsewhere() -> None:
    """Its state is ahead of its records: a read here would wait for them, or end too early."""
    world = SimWorld(1, Settings())
    for host in world.hosts.values():
        host.start()
    while not world.is_in_sync():
        assert world.schedule.now < 60
        world.schedule.run(world.schedule.now + 0.1)
    process = world.hosts["n1"].process
    assert process is not None
    node = process.cluster_node
    assert node.remote_reads.has_whole_log()
    node.log.fed[2] = 100
    node.state.delivered[2] = 100
    group = Group("g", "#")
    group.start_read()
    limits = list(node.state.delivered)
    positions = [*limits[:2], 0, *limits[3:]]
    read = ReadLog(group, None, positions, limits, [ReadInterest("#", None)], 500, 1 << 20)
    assert node.remote_reads.take(read)
    frame = FetchFrame(number=1, ranges=[ReadRange(2, 0, 100)], filters=[("#", -1)])
    node.context.outgoing.clear()
    node.fetch_server.handle("n2", encode_fetch(frame))
    for effect in node.state.effects:
        assert isinstance(effect, ReadLog)
        assert effect.done is not None
        effect.done(ReadResult([], list(effect.positions), True, 0))
    answers = [payload for to, kind, payload in node.context.outgoing if kind == FETCHED]
    assert isinstance(answers[0], bytes)
    head = fetch_frames.decode_fetched(answers[0])[0]
    assert head.refused == [(2, fetch_frames.NOT_STORED, 0)]
    assert head.positions == [0]

"""Reads below the start of the log against a list: whatever retention removes during a read, and
however often the lake is away, each reader receives what its filters match, once and in order.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.log.partition import partition_of
from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.starts import FoundStart, StartQuery
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.effects import FetchInflight, FindStarts, Found, Note, ReadLog
from holdfast.node.metadata.model import ClusterMetadata, PartitionInfo
from holdfast.node.node import Node
from holdfast.node.reads import fetch_frames, remote_reads
from holdfast.node.reads.fetch_frames import (
    NOWHERE,
    FetchedFrame,
    FetchFrame,
    StartEntry,
    decode_fetch,
    encode_fetched,
)
from holdfast.node.reads.lake_source import LAKE, LAKE_WAIT_S
from holdfast.node.reads.read_jobs import ReadJob
from holdfast.node.reads.remote_reads import RemoteReads
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Group, Session
from holdfast.protocol.topics.names import matches
from tests.sim.disk import SimDisk
from tests.support.log_bench import LogBench

PARTITIONS = 4
TOPICS = [f"{first}/{second}" for first in "abc" for second in "xyz"]
FILTERS = ["#", "a/#", "+/x", "b/y", "a/x", "nothing/#"]
Effect = ReadLog | FetchInflight | FindStarts
Planted = Callable[[pytest.MonkeyPatch], None]


class Reader(Node):
    """The node's core, which only collects results."""

    def handle_read(
        self, effect: ReadLog, records: list[Record], positions: list[int], done: bool, lost: int
    ) -> None:
        self.results[effect] = records, positions, lost

    def handle_fetched(self, effect: FetchInflight, found: Found) -> None:
        self.results[effect] = found

    results: dict[Effect, Any]


class World:
    """One node with a log, whose oldest segments go, and a lake that has them before."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bench = LogBench(SimDisk(), PARTITIONS, 2048)
        self.journal = self.bench.journal
        self.node = Reader(NodeConfig(partitions=PARTITIONS), self.journal)
        self.node.results = {}
        self.state = self.node.state
        self.context = ClusterContext("n1", self.journal)
        info = PartitionInfo(("n1",), leader="n1", epoch=1, in_sync=("n1",))
        self.context.metadata = ClusterMetadata("c", 1, 1, {}, (info,) * PARTITIONS, 1)
        self.reads = RemoteReads(self.node, self.context, lambda _: True)
        self.requests: list[bytes] = []
        self.reads.lake.ask = self.requests.append
        self.log: list[list[Record]] = [[] for _ in range(PARTITIONS)]
        # What the lake has, and the offsets that it lacks.
        self.lake = [0] * PARTITIONS
        self.gaps: set[tuple[int, int]] = set()
        self.is_away = False
        self.effects: list[Effect] = []
        self.asked: list[Effect] = []
        self.answers = self.starts_checked = 0
        # The number of gaps when a search began.
        self.gaps_at: dict[Effect, int] = {}
        self.notes: list[str] = []
        self.append(self.chance.randrange(40, 200))

    def append(self, count: int) -> None:
        for _ in range(count):
            topic, payload = self.chance.choice(TOPICS), bytes(self.chance.randrange(200))
            partition, offset = self.bench.append(topic, payload)
            record = Record(partition, 1, topic=topic.encode(), payload=payload, offset=offset)
            self.log[partition].append(record)
            if self.chance.random() < 0.3:
                self.bench.write()
        self.bench.write()
        self.state.delivered[:] = [len(each) for each in self.log]

    def remove_oldest(self) -> None:
        """Retention waits for the lake, or does not."""
        if len(self.journal.segments) < 3:
            return
        self.bench.remove_oldest(1)
        for p, start in enumerate(self.journal.start_offsets):
            at = self.lake[p]
            if self.chance.random() < 0.1 and at < start:
                self.gaps.update((p, offset) for offset in range(at, start))
            self.lake[p] = max(at, start)

    # The lake

    def answer_lake(self) -> None:
        payload = self.requests.pop(0)
        if self.is_away:
            self.reads.lake_failed("the store is away")
            return
        frame = decode_fetch(payload, PARTITIONS)
        assert frame.log == "c"
        self.answers += 1
        if frame.queries:
            pieces = self.find(frame)
        elif frame.wanted:
            found = [
                self.log[p][offset] for p, offset in frame.wanted if (p, offset) not in self.gaps
            ]
            head = FetchedFrame(number=frame.number, looked_at=len(frame.wanted))
            assert all(offset < self.lake[p] for p, offset in frame.wanted)
            pieces = encode_fetched(head, found)
        else:
            pieces = self.read(frame)
        for piece in pieces:
            self.reads.handle(LAKE, piece)

    def read(self, frame: FetchFrame) -> list[bytes]:
        records: list[Record] = []
        positions, lost = [], 0
        for number, each in enumerate(frame.ranges):
            assert each.end <= self.lake[each.partition], "more than retention has removed"
            at = each.start
            while at < each.end and len(records) < frame.records_max:
                if (each.partition, at) in self.gaps:
                    lost += 1
                elif any(
                    matches(filter, self.log[each.partition][at].topic.decode())
                    and (index < 0 or frame.starts[index][number] <= at)
                    for filter, index in frame.filters
                ):
                    records.append(self.log[each.partition][at])
                at += 1
                if at > each.start and self.chance.random() < 0.05:
                    break
            positions.append(at)
        head = FetchedFrame(number=frame.number, positions=positions, lost=lost)
        return encode_fetched(head, records)

    def find(self, frame: FetchFrame) -> list[bytes]:
        entries = []
        for (filter, _, last, offsets), left in zip(frame.queries, frame.left, strict=True):
            entry = StartEntry([NOWHERE] * len(frame.ranges), [], "")
            for number, each in enumerate(frame.ranges):
                end = min(each.end, self.lake[each.partition])
                own = self.log[each.partition][:end]
                own = [each for each in own if (each.partition, each.offset) not in self.gaps]
                if not last and not offsets and own:
                    entry.offsets[number] = own[0].offset
                for topic in {each.topic.decode() for each in own} if last else ():
                    count = left.get(topic, last)
                    if matches(filter, topic) and count:
                        places = [each.offset for each in own if each.topic.decode() == topic]
                        entry.floors.append((topic, places[-count:][0]))
            entries.append(entry)
        return encode_fetched(FetchedFrame(number=frame.number, starts=entries), [])

    # The readers

    def ask(self) -> None:
        chance, ends = self.chance, self.state.delivered
        kind = chance.random()
        effect: Effect
        if kind < 0.6:
            group = Group(f"g{len(self.asked)}", "#")
            group.start_read()
            positions = [0 if chance.random() < 0.6 else chance.randint(0, end) for end in ends]
            interests = [
                ReadInterest(
                    filter,
                    None if chance.random() < 0.6 else [chance.randint(0, end) for end in ends],
                )
                for filter in chance.sample(FILTERS, chance.randint(1, 3))
            ]
            count = chance.choice((1, 5, 500))
            effect = ReadLog(group, None, positions, list(ends), interests, count, 1 << 14)
        elif kind < 0.8:
            wanted = [
                (number, partition, chance.randrange(ends[partition]))
                for number in range(chance.randint(1, 6))
                if ends[partition := chance.randrange(PARTITIONS)]
            ]
            if not wanted:
                return
            effect = FetchInflight(Group("g", "#"), None, wanted, 1 << 12)
        else:
            connection = Connection(1 << 20, "", ListenerRules("main"))
            connection.state = OPEN
            query = StartQuery(chance.choice(FILTERS), 0, chance.choice((0, 1, 4)))
            effect = FindStarts(connection, None, [query], list(ends))
        self.asked.append(effect)
        self.gaps_at[effect] = len(self.gaps)
        self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        """The runtime: `Runtime._carry_out`."""
        if effect.done is not None or not self.reads.take(effect):
            self.effects.append(effect)

    def read_here(self) -> None:
        """The reading thread, and what the runtime does with its result."""
        effect = self.effects.pop(0)
        reader = self.bench.reader
        if isinstance(effect, ReadLog):
            result: ReadResult = reader.read(
                effect.positions, effect.limits, effect.interests, effect.records_max,
                effect.bytes_max,
            )  # fmt: skip
            if effect.done is not None:
                effect.done(result)
            elif not (result.lost and self.reads.take(effect)):
                places = result.records, result.positions, result.lost
                self.node.handle_read(effect, places[0], places[1], result.done, places[2])
        elif isinstance(effect, FetchInflight):
            found: Found = [(n, reader.fetch(p, offset)) for n, p, offset in effect.wanted]
            if effect.done is not None:
                effect.done(found)
            elif not (any(each is None for _, each in found) and self.reads.take(effect)):
                self.node.handle_fetched(effect, found)
        else:
            starts = [reader.starts.find(each, effect.limits) for each in effect.wanted]
            if effect.done is not None:
                effect.done(starts)
            elif not self.reads.take(effect):
                self.node.results[effect] = starts

    def turn(self, seconds: float = 0.01) -> None:
        self.state.now += seconds
        self.state.steps_left = 10
        if self.requests and self.chance.random() < 0.8:
            self.answer_lake()
        self.reads.advance(self.state.now)
        self.reads.check()
        effects, self.state.effects = self.state.effects, []
        for effect in effects:
            if isinstance(effect, Note):
                self.notes.append(effect.event)
            else:
                assert isinstance(effect, ReadLog | FetchInflight | FindStarts)
                self.carry_out(effect)
        # Retention may come between a request and its read.
        if self.effects and self.chance.random() < 0.8:
            self.read_here()
        for effect, result in self.node.results.items():
            self.check(effect, result)
            self.asked.remove(effect)
        self.node.results.clear()

    # The oracle

    def check(self, effect: Effect, result: Any) -> None:
        if isinstance(effect, ReadLog):
            records, positions, lost = result
            self.check_read(effect, records, positions, lost)
        elif isinstance(effect, FetchInflight):
            assert result, "a read of records without any"
            for (_, p, offset), (_, record) in zip(effect.wanted, result, strict=False):
                if record is None:
                    assert (p, offset) in self.gaps, "a record that the lake has is absent"
                else:
                    assert (record.partition, record.offset) == (p, offset)
                    assert record.payload == self.log[p][offset].payload
        else:
            (start,) = result
            self.check_start(effect, start)

    def check_read(
        self, effect: ReadLog, records: list[Record], positions: list[int], lost: int
    ) -> None:
        got = {(each.partition, each.offset): each for each in records}
        assert len(got) == len(records), "a record twice"
        gone = 0
        for p, (begin, end) in enumerate(zip(effect.positions, positions, strict=True)):
            assert begin <= end <= effect.limits[p]
            offsets = [each.offset for each in records if each.partition == p]
            assert offsets == sorted(offsets), "out of order"
            for record in self.log[p][begin:end]:
                is_wanted = any(
                    matches(each.filter, record.topic.decode())
                    and (each.start is None or each.start[p] <= record.offset)
                    for each in effect.interests
                )
                if (p, record.offset) in self.gaps:
                    gone += (p, record.offset) not in got
                else:
                    assert ((p, record.offset) in got) == is_wanted, (p, record.offset)
        # Those that became a gap during the read may have been read before.
        is_exact = self.gaps_at[effect] == len(self.gaps)
        assert lost == gone if is_exact else lost <= gone, "what is lost is counted"
        assert len(records) <= effect.records_max + 1

    def check_start(self, effect: FindStarts, start: FoundStart) -> None:
        (query,) = effect.wanted
        assert not start.error
        if self.gaps_at[effect] != len(self.gaps):
            return  # Records were lost after they were found.
        self.starts_checked += 1
        for p, limit in enumerate(effect.limits):
            there = [each for each in self.log[p][:limit] if (p, each.offset) not in self.gaps]
            if not query.last:
                assert start.offsets[p] == (there[0].offset if there else limit)
                continue
            newest: dict[bytes, list[int]] = {}
            for record in there:
                if matches(query.filter, record.topic.decode()):
                    newest.setdefault(record.topic, []).append(record.offset)
            floors = {topic: own[-query.last :][0] for topic, own in newest.items()}
            own = {t: at for t, at in start.floors.items() if partition_of(t, PARTITIONS) == p}
            assert own == floors
            assert start.offsets[p] == min(floors.values(), default=limit)

    # A life

    def run(self) -> None:
        chance = self.chance
        for _ in range(300):
            event = chance.random()
            if event < 0.3:
                for _ in range(chance.choice((1, 1, 3))):
                    self.ask()
            elif event < 0.4:
                self.remove_oldest()
            elif event < 0.5:
                self.append(chance.randrange(10))
            elif event < 0.55:
                self.is_away = not self.is_away
            elif event < 0.58:
                self.reads.lake_failed("its process ended")
                self.requests.clear()
            self.turn()
        self.is_away = False
        for _ in range(4000):
            if not self.asked:
                break
            self.turn(0.05)
        assert not self.asked, "a reader waits for ever"
        assert self.reads.lake.given_up == 0


def run_world(seed: int, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(seed)

    def collect(state: object, effect: FindStarts, found: list[FoundStart]) -> None:
        world.node.results[effect] = found

    monkeypatch.setattr(remote_reads, "handle_starts", collect)
    monkeypatch.setattr(fetch_frames, "FETCHED_BYTES", 2000)
    try:
        world.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return world


@pytest.mark.parametrize("block", range(2))
def test_readers_receive_what_an_endless_log_would_give(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = [run_world(seed, monkeypatch) for seed in range(block * 8, block * 8 + 8)]
    assert sum(each.answers for each in worlds) > 250
    assert sum(each.reads.shared for each in worlds) > 10
    assert sum(each.starts_checked for each in worlds) > 40
    assert any(each.gaps for each in worlds)


def _overtaken_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the log that retention has overtaken is taken as it is."""
    past = RemoteReads._is_past
    here = RemoteReads._was_read_here

    def read(self: RemoteReads, job: object, parts: object, result: object) -> None:
        monkeypatch.setattr(RemoteReads, "_is_past", lambda *_: False)
        here(self, job, parts, result)  # type: ignore[arg-type]
        monkeypatch.setattr(RemoteReads, "_is_past", past)

    monkeypatch.setattr(RemoteReads, "_was_read_here", read)


def _log_fetches_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single records of one partition are read together, in the log and below its start."""
    monkeypatch.setattr(
        RemoteReads,
        "_is_past",
        lambda self, job, p, offset: (
            not isinstance(job.effect, FetchInflight) and offset < self._begin_of(p)
        ),
    )


def _search_is_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention moves the start of the log between the two parts of a search."""

    here = RemoteReads._was_read_here

    def take(self: RemoteReads, job: ReadJob, parts: list[int], result: Any) -> None:
        if isinstance(job.effect, FindStarts):
            job.add_starts(job.partitions, result)
            self._assign(job)
        else:
            here(self, job, parts, result)

    monkeypatch.setattr(RemoteReads, "_was_read_here", take)


@pytest.mark.parametrize(
    "plant", [_overtaken_counts_as_lost, _log_fetches_the_past, _search_is_overtaken]
)
def test_planted_bugs_are_found(plant: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        for seed in range(60):
            run_world(seed, monkeypatch)

    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()


def waiting_world() -> tuple[World, ReadLog]:
    """A node whose lake is away, and a reader that needs it."""
    world = World(2)
    for _ in range(3):
        world.append(60)
        world.remove_oldest()
    world.gaps.clear()
    assert any(world.journal.start_offsets)
    world.is_away = True
    session = Session("s")
    session.start_read()
    limits = list(world.journal.start_offsets)
    interests = [ReadInterest("#", None)]
    effect = ReadLog(session, None, [0] * PARTITIONS, limits, interests, 5000, 1 << 20)
    world.asked.append(effect)
    world.gaps_at[effect] = 0
    world.carry_out(effect)
    return world, effect


def test_a_reader_goes_on_without_a_lake_that_is_away_too_long() -> None:
    world, effect = waiting_world()
    found: list[tuple[list[Record], list[int], int]] = []
    world.check = lambda _, result: found.append(result)  # type: ignore[assignment,method-assign]
    for _ in range(40):
        world.turn(1.0)
    assert world.reads.lake.error == "the store is away"
    assert world.reads.lake.waiting == 1
    assert world.notes == ["lake_away"]
    assert isinstance(effect.cursor, Session)
    assert world.reads.lake.wait_of((effect.cursor, None)) == "the store is away"
    assert not found
    for _ in range(int(LAKE_WAIT_S)):
        world.turn(1.0)
    ((records, positions, lost),) = found
    assert lost == sum(effect.limits)
    assert positions == effect.limits
    assert not records
    assert world.reads.lake.given_up == 1


def test_a_lake_that_was_refused_is_read_again() -> None:
    world, effect = waiting_world()
    found: list[tuple[list[Record], list[int], int]] = []
    world.check = lambda _, result: found.append(result)  # type: ignore[assignment,method-assign]
    answer = world.answer_lake

    def refuse() -> None:
        world.requests.clear()
        world.reads.lake_failed("the lake of another log", is_final=True)

    world.answer_lake = refuse  # type: ignore[method-assign]
    while not found:
        world.turn(1.0)
    assert found[0][2] == sum(effect.limits)
    # Another lake is in its place, and is checked.
    world.answer_lake, world.is_away = answer, False  # type: ignore[method-assign]
    world.reads.handle(LAKE, encode_fetched(FetchedFrame(number=0), [])[0])
    world.asked.append(effect)
    world.gaps_at[effect] = 0
    world.carry_out(effect)
    while len(found) < 2:
        world.turn(1.0)
    assert found[1][2] == 0
    assert found[1][0]
    assert world.notes == ["lake_refused", "lake_is_back"]


def test_the_first_records_do_not_wait_for_the_rest_of_the_budget() -> None:
    """The lake answers with what it has found soon, however far the next match is."""
    world, effect = waiting_world()
    world.is_away = False
    found: list[list[Record]] = []
    world.check = lambda _, result: found.append(result[0])  # type: ignore[assignment,method-assign]
    world.read = lambda frame: encode_fetched(  # type: ignore[method-assign]
        FetchedFrame(number=frame.number, positions=[each.start + 1 for each in frame.ranges]),
        [world.log[each.partition][each.start] for each in frame.ranges],
    )
    while not found:
        world.turn(0.05)
    assert world.answers == 1
    assert [each.offset for each in found[0]] == [0] * PARTITIONS
    assert max(effect.limits) > 1


def test_a_reader_of_a_damaged_file_goes_on_though_the_lake_answers_others() -> None:
    world, effect = waiting_world()
    found: list[tuple[list[Record], list[int], int]] = []
    world.check = lambda _, result: found.append(result)  # type: ignore[assignment,method-assign]
    check = encode_fetched(FetchedFrame(number=0), [])
    for _ in range(int(LAKE_WAIT_S) + 20):
        assert not found or world.reads.lake.given_up
        for piece in check:
            world.reads.handle(LAKE, piece)
        world.turn(1.0)
    ((records, positions, lost),) = found
    assert not records
    assert positions == effect.limits
    assert lost == sum(effect.limits)
    assert world.reads.lake.given_up == 1


def test_nobody_waits_for_the_lake_of_another_log() -> None:
    world, effect = waiting_world()
    assert isinstance(effect.cursor, Session)
    assert world.reads.lake.wait_of((effect.cursor, None)) == ""
    world.reads.lake_failed("another log", is_final=True)
    found: list[tuple[list[Record], list[int], int]] = []
    world.check = lambda _, result: found.append(result)  # type: ignore[assignment,method-assign]
    while not found:
        world.turn(0.05)
    assert found[0][2] == sum(world.journal.start_offsets)
    assert not world.requests

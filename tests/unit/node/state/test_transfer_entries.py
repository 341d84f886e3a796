"""The images of some partitions, taken from one node to another."""

import json
import random
from collections.abc import Callable, Iterator

import pytest

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.session.session import RECEIVED, SENT, Inflight, Session, Will, tag_of
from holdfast.node.session.state import encode_cursor
from holdfast.node.state import transfer as image_entries
from holdfast.node.state.ban_records import ban_key
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import encode_session, open_record
from holdfast.node.state.snapshot_entries import SNAPSHOT_SESSION
from tests.support.folded_state import sessions_and_groups

PARTITIONS = 8
CLIENTS = [f"client-{number}" for number in range(40)]
FILTERS = [f"f/{number}" for number in range(4)]
QUEUES = [f"$share/$queue/q/{number}" for number in range(4)]
GROUPS = [f"$share/g{number}/f/1" for number in range(6)]


def new_images() -> ReplicatedState:
    state = RecordedState(
        NodeConfig(node_id="n", partitions=PARTITIONS), Journal(PARTITIONS, replicated=True)
    )
    state.now = 1000.0
    state.wall_us = 1_700_000_000_000_000
    return ReplicatedState(state)


class Log:
    """Records by partition, as a leader would have appended them; `order` is that of all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.offsets = [0] * PARTITIONS
        self.order: list[Record] = []
        self.epochs = dict.fromkeys(CLIENTS, 0)
        # A cursor falls only where its session begins in the past.
        self.positions = {client_id: [0] * PARTITIONS for client_id in CLIENTS}

    def add(
        self,
        partition: int,
        kind: int,
        flags: int = 0,
        topic: str = "",
        client_id: str = "",
        producer: bytes = b"",
        epoch: int = 0,
        sequence: int = 0,
        payload: bytes = b"",
    ) -> None:
        builder = BatchBuilder(partition, self.offsets[partition])
        builder.add(
            Record(
                partition,
                kind,
                flags=flags,
                timestamp_us=1_699_999_999_000_000,
                topic=topic.encode(),
                client_id=client_id.encode(),
                producer=producer,
                producer_epoch=epoch,
                sequence=sequence,
                payload=payload,
            )
        )
        self.offsets[partition] += 1
        self.order.append(Batch(builder.build(1)).record(0))

    def session(self, client_id: str, payload: bytes) -> None:
        home = partition_of(client_id.encode(), PARTITIONS)
        epoch = self.epochs[client_id]
        self.add(home, log_record.SESSION, client_id=client_id, sequence=epoch, payload=payload)

    def cursor(self, key: str, sequence: int, payload: bytes) -> None:
        home = partition_of(key.encode(), PARTITIONS)
        self.add(home, log_record.CURSOR, client_id=key, sequence=sequence, payload=payload)

    def something(self) -> None:
        chance = self.random
        client_id = chance.choice(CLIENTS)
        place = chance.randrange(PARTITIONS)
        things: list[Callable[[], None]] = [
            lambda: self.open(client_id),
            lambda: self.change(client_id),
            lambda: self.move(client_id),
            lambda: self.retain(place),
            lambda: self.receive(client_id, place),
            lambda: self.produce(place),
            self.group,
            lambda: self.queue(chance.choice(QUEUES)),
            lambda: self.member(client_id),
            self.ban,
        ]
        chance.choice(things)()

    def open(self, client_id: str) -> None:
        chance = self.random
        self.epochs[client_id] += 1
        session = Session(client_id)
        session.epoch = self.epochs[client_id]
        session.expiry_s = chance.choice([60, 3600])
        session.username = chance.choice([None, "alice", "bob"])
        session.is_owned = session.username is not None and chance.random() < 0.5
        if chance.random() < 0.5:
            topic = f"will/{client_id}".encode()
            session.will = Will(topic, b"gone", 1, False, b"", 0, 30)
        clean = chance.random() < 0.3
        if clean:
            self.positions[client_id] = [0] * PARTITIONS
        request = chance.randrange(1 << 20)
        opened = open_record(session, clean, chance.choice(["n1", "n2"]), request)
        opened.generation = chance.randrange(3)
        self.session(client_id, encode_session(opened))

    def change(self, client_id: str) -> None:
        chance = self.random
        filter = chance.choice([*FILTERS, *FILTERS, *GROUPS, *QUEUES])
        row = [filter, chance.randrange(3), False, False, chance.randrange(2), chance.randrange(3)]
        subscribe = {"op": "subscribe", "start": list(self.offsets), "subscriptions": [row]}
        owed: dict[str, object] = {"owed": [filter]} if filter in FILTERS else {}
        sent = chance.choice([None, f"f/topic-{chance.randrange(9)}"])
        changes: list[dict[str, object]] = [
            subscribe | owed,
            self.replay(client_id, chance.choice(FILTERS)),
            {"op": "retained", "sent": {chance.choice(FILTERS): sent}, "seam": self.offsets},
            {"op": "unsubscribe", "filters": [filter]},
            {"op": "close", "expiry_s": 3600, "will": True, "maybe_sent": chance.random() < 0.5},
            {"op": "end"},
        ]
        change = chance.choices(changes, (6, 1, 1, 2, 3, 1))[0]
        if change["op"] == "end":
            self.positions[client_id] = [0] * PARTITIONS
        self.session(client_id, json.dumps({"client": client_id, **change}).encode())

    def replay(self, client_id: str, filter: str) -> dict[str, object]:
        """A subscription that begins in the past. Its session goes back with the next cursor."""
        start = [self.random.randrange(each + 1) for each in self.offsets]
        again = [(0, self.random.randrange(100))]
        entry = {"start": start, "seam": self.offsets, "floors": {"f/1": 2}, "again": again}
        return {
            "op": "subscribe",
            "start": self.offsets,
            "subscriptions": [[filter, 1, False, False, 0, 0]],
            "replays": {filter: entry},
            "positions": self.positions[client_id],
        }

    def move(self, client_id: str) -> None:
        chance = self.random
        qos, partition = chance.choice([1, 2]), chance.randrange(PARTITIONS)
        entry = Inflight(partition, chance.randrange(100), qos, chance.random() < 0.2)
        entry.state = chance.choice([SENT, RECEIVED])
        if not entry.is_retained and chance.random() < 0.5:
            entry.group_tag = tag_of(chance.choice([*GROUPS, *QUEUES]))
        partition = chance.randrange(PARTITIONS)
        position = self.positions[client_id][partition] + chance.randrange(30)
        self.positions[client_id][partition] = position
        changes = {chance.randrange(1, 6): chance.choice([entry, None])}
        done = [(partition, position + 2)] if chance.random() < 0.3 else []
        payload = encode_cursor([(partition, position)], changes, done)
        self.cursor(client_id, self.epochs[client_id], payload)

    def group(self) -> None:
        chance = self.random
        key = chance.choice([*GROUPS, *QUEUES])
        positions = [(number, chance.randrange(100)) for number in range(PARTITIONS)]
        done = [(chance.randrange(PARTITIONS), chance.randrange(150))]
        if chance.random() < 0.1:
            # The group ends, unless it has a durable member.
            positions, done = [], []
        self.cursor(key, 1, encode_cursor(positions, {}, done))

    def queue(self, key: str) -> None:
        chance = self.random
        home = partition_of(key.encode(), PARTITIONS)
        change: dict[str, object] = {"op": "end"}
        if chance.random() < 0.8:
            change = {"op": "queue", "start": self.offsets, "creator": "c"}
            change |= {"owner": chance.choice(["", "alice"]), "past": chance.random() < 0.5}
        payload = json.dumps({"client": key, **change}).encode()
        self.add(home, log_record.SESSION, client_id=key, payload=payload)

    def member(self, client_id: str) -> None:
        key = self.random.choice([*GROUPS, *QUEUES])
        home = partition_of(key.encode(), PARTITIONS)
        change: dict[str, object] = {"op": "member", "client": key, "member": client_id}
        change["left"] = self.random.random() < 0.4
        if self.random.random() < 0.05:
            change = {"op": "members", "client": ""}
        payload = json.dumps(change).encode()
        epoch = self.epochs[client_id]
        self.add(home, log_record.SESSION, client_id=key, sequence=epoch, payload=payload)

    def ban(self) -> None:
        key = ban_key("client", f"c{self.random.randrange(20)}")
        payload = self.random.choice([b"", b'{"until_us":0,"reason":"%d"}' % len(self.order)])
        home = partition_of(key, PARTITIONS)
        self.add(home, log_record.BAN, client_id=key.decode(), payload=payload)

    def retain(self, partition: int) -> None:
        # A topic has one partition.
        topic = f"r/{partition}/{self.random.randrange(6)}"
        payload = self.random.choice([b"", b"value-%d" % self.offsets[partition]])
        flags = 1 | log_record.FLAG_RETAIN
        self.add(partition, log_record.MESSAGE, flags, topic, payload=payload)

    def receive(self, client_id: str, partition: int) -> None:
        packet_id = self.random.randrange(1, 5)
        epoch = self.epochs[client_id]
        if not epoch:
            return
        kind = self.random.choice([log_record.MESSAGE, log_record.RELEASE, log_record.WILL])
        flags = 2 | log_record.FLAG_PACKET_ID if kind == log_record.MESSAGE else 0
        number = epoch if kind == log_record.WILL else packet_id
        if kind == log_record.WILL:
            partition = partition_of(client_id.encode(), PARTITIONS)
        self.add(partition, kind, flags, "q", client_id, epoch=epoch, sequence=number)

    def produce(self, partition: int) -> None:
        name = b"producer-%d" % self.random.randrange(10)
        sequence = self.offsets[partition] + 1
        flags = 1 | log_record.FLAG_PRODUCER
        self.add(partition, log_record.MESSAGE, flags, "p", "", name, 1, sequence)


def ended_epoch(images: ReplicatedState, client_id: str) -> int:
    return images.ended[images.home(client_id)].epoch(client_id)


def content(images: ReplicatedState) -> dict[str, object]:
    """What the images say, in an order of its own, without what does not count: packet ids of
    earlier lives of a session."""
    state = images.state
    sessions: dict[str, object] = {}
    for client_id, session in sorted(state.sessions.items()):
        entry = images.entry(session)
        entry.subscriptions.sort()
        sessions[client_id] = entry
    born = {client_id: session.life for client_id, session in state.sessions.items()}
    return {
        **sessions_and_groups(images),
        "sessions": sessions,
        "open": sorted(
            each.client_id for each in state.sessions.values() if images.open_sessions.has(each)
        ),
        "born": born,
        "inbound": sorted(
            (client_id, place)
            for client_id, ids in images.inbound.items()
            for place in ids
            if images.inbound_at(client_id, *place)
            >= born.get(client_id, max(0, ended_epoch(images, client_id)) + 1)
        ),
        "groups": {key: images.groups.entry(key) for key in images.group_positions},
        "newest epochs": images.newest_epochs,
        "ended": [sorted(ended.items()) for ended in images.ended],
        "fired": {partition: sorted(fired.items()) for partition, fired in images.fired.items()},
        "retained": {
            topic: (entry.payload, entry.partition, entry.offset)  # type: ignore[attr-defined]
            for topic, entry in state.retained.entries.items()
        },
        "producers": {
            name: sorted(
                (place.partition, place.epoch, place.sequence, place.stored_us, producer.owner)
                for place in producer.positions()
            )
            for name, producer in state.producers.by_id.items()
        },
        "places": state.producers.position_count,
        "bans": {name: state.bans.get(*name) for name in state.bans.names()},
    }


def exhaust(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def check_equal(one: ReplicatedState, other: ReplicatedState) -> None:
    expected, found = content(other), content(one)
    for name, value in expected.items():
        assert found.pop(name) == value, name
    assert not found
    one.check()
    other.check()


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_and_the_records_behind_it_are_the_state(seed: int) -> None:
    """The snapshot is written while further records are applied, and those come again."""
    log = Log(seed)
    running = new_images()
    for _ in range(900):
        log.something()
    for record in log.order:
        running.apply(record)
    known = len(log.order)
    restarted = new_images()
    applied = known
    for kind, data in running.snapshot():
        if log.random.random() < 0.3:
            log.something()
            for record in log.order[applied:]:
                running.apply(record)
            applied = len(log.order)
        restarted.apply_snapshot_entry(kind, data)
    for record in log.order[known:]:
        restarted.apply(record)
    check_equal(restarted, running)
    assert applied > known


@pytest.mark.parametrize("seed", range(6))
def test_what_was_lost_comes_back(seed: int) -> None:
    """One node has applied everything. Another has, too, but its images of some partitions are of
    long ago; they come while the first moves on, and then the records from there."""
    log = Log(seed)
    partitions = frozenset(log.random.sample(range(PARTITIONS), 3))
    for _ in range(1200):
        log.something()
    whole = new_images()
    behind = new_images()
    for number, record in enumerate(log.order):
        whole.apply(record)
        if number < 400 or record.partition not in partitions:
            behind.apply(record)
    known = len(log.order)
    starts = list(log.offsets)
    exhaust(image_entries.drop(behind, partitions))
    for entry in image_entries.entries(whole, partitions):
        if log.random.random() < 0.05:
            # The first node goes on meanwhile, the other one where it can.
            log.something()
            for record in log.order[known:]:
                whole.apply(record)
                if record.partition not in partitions:
                    behind.apply(record)
            known = len(log.order)
        if entry is not None:
            image_entries.take(behind, *entry)
    for record in log.order:
        if record.partition in partitions and record.offset >= starts[record.partition]:
            behind.apply(record)
    check_equal(behind, whole)
    assert len(whole.state.sessions) > 10
    assert whole.state.queues
    assert len(whole.state.retained) > 5
    assert len(whole.state.bans) > 3


def test_dropping_leaves_the_rest_alone() -> None:
    log = Log(1)
    for _ in range(800):
        log.something()
    whole = new_images()
    rest = new_images()
    for record in log.order:
        whole.apply(record)
        if record.partition != 3:
            rest.apply(record)
    exhaust(image_entries.drop(whole, frozenset([3])))
    for session in whole.state.sessions.values():
        assert partition_of(session.key, PARTITIONS) != 3
    left, expected = content(whole), content(rest)
    for name in ("open", "ended", "fired", "groups", "retained", "producers", "places", "bans"):
        assert left[name] == expected[name], name
    assert sorted(left["sessions"]) == sorted(expected["sessions"])  # type: ignore[call-overload]
    exhaust(image_entries.drop(whole, range(PARTITIONS)))
    empty = content(whole)
    assert not any(empty.pop("ended"))  # type: ignore[call-overload]
    assert empty.pop("tables") == content(new_images())["tables"]
    assert all(empty.pop("newest epochs"))  # type: ignore[call-overload]
    assert not any(empty.values())
    assert not whole.touched
    assert not whole.state.groups


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (SNAPSHOT_SESSION, b"{}"),
        (SNAPSHOT_SESSION, b"["),
        (image_entries.INBOUND, b'{"client":"c","ids":[1]}'),
        (image_entries.FIRED, b"[1]"),
        (99, b""),
    ],
)
def test_entries_that_are_none(kind: int, data: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AssertionError)):
        image_entries.take(new_images(), 0, kind, data)

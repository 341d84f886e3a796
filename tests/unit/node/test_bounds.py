"""The replicated state is a function of the records, at every bound.

Nodes apply the partitions in their own order, have their own settings and clocks, begin with their
own snapshots and lead other partitions. None of that may decide what they keep.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from msgspec import UNSET

from holdfast.log import record as log_record
from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.session.session import Session
from holdfast.node.state.client_epochs import ClientEpochs
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import encode_session, open_record
from holdfast.protocol.mqtt import packets as m
from tests.sim.checks import Message
from tests.sim.process import Process
from tests.unit.node.publish.test_producers import user_property
from tests.unit.node.state.test_transfer_entries import CLIENTS, PARTITIONS, Log, content
from tests.unit.node.test_rights_cluster import Peer, Stage

DAY_US: Final = 86_400 * 1_000_000


class Busy(Log):
    """More names than any bound below, over more days than a producer is remembered."""

    def retained(self) -> None:
        topic = f"r/{self.random.randrange(60)}"
        payload = self.random.choice([b"", b"x" * 2, b"x" * 200])
        partition = partition_of(topic.encode(), PARTITIONS)
        kind = self.random.choice([log_record.MESSAGE, log_record.RETAINED])
        self.add(partition, kind, 1 | log_record.FLAG_RETAIN, topic, payload=payload)

    def producers(self) -> None:
        partition = self.random.randrange(PARTITIONS)
        name = b"producer-%d" % self.random.randrange(30)
        client_id = f"client-{self.random.randrange(4)}"
        sequence = self.offsets[partition] + 1
        if self.random.random() < 0.3:
            user = self.random.choice(["", "alice", "bob"])
            flags = log_record.FLAG_PRODUCER
            self.add(partition, log_record.PRODUCER, flags, "", user, name, 1, sequence)
        else:
            flags = 1 | log_record.FLAG_PRODUCER
            self.add(partition, log_record.MESSAGE, flags, "p", client_id, name, 1, sequence)
        self.order[-1].timestamp_us += len(self.order) * DAY_US // 20

    def ends(self) -> None:
        client_id = self.random.choice([*self.epochs])
        self.random.choice([self.open, self.change])(client_id)

    def wills(self) -> None:
        client_id = self.random.choice([*self.epochs])
        if self.random.random() < 0.4:
            self.open(client_id)
        elif self.epochs[client_id]:
            topic = f"will/{client_id}"
            epoch = self.epochs[client_id] - self.random.randrange(2)
            partition = partition_of(topic.encode(), PARTITIONS)
            flags = 1 | log_record.FLAG_WILL
            self.add(partition, log_record.MESSAGE, flags, topic, client_id, sequence=epoch)

    def everything(self) -> None:
        kinds = [self.retained, self.producers, self.ends, self.wills, self.something]
        self.random.choice(kinds)()


FIELDS: Final[dict[str, Callable[[Busy], None]]] = {
    "retained": Busy.retained,
    "producers": Busy.producers,
    "ends": Busy.ends,
    "wills": Busy.wills,
    "everything": Busy.everything,
}


def new_state(chance: random.Random, fired_max: int = 6) -> ReplicatedState:
    config = NodeConfig(
        node_id="n",
        partitions=PARTITIONS,
        retained_max=chance.choice([3, 10, 30]),
        retained_bytes_max=chance.choice([2_000, 20_000]),
        producers_max=chance.choice([5, 50]),
        producer_expiry_s=chance.choice([1, 7]) * 86_400,
    )
    state = RecordedState(config, Journal(PARTITIONS, replicated=True))
    state.now = 1000.0
    state.wall_us = 1_700_000_000_000_000 + chance.randrange(30) * DAY_US
    replicated = ReplicatedState(state)
    replicated.ended = [ClientEpochs(6) for _ in range(PARTITIONS)]
    replicated.fired_max = fired_max
    return replicated


def own_order(chance: random.Random, records: list[Record]) -> Iterator[Record]:
    """Those of one partition in their order."""
    queues: list[deque[Record]] = [deque() for _ in range(PARTITIONS)]
    for record in records:
        queues[record.partition].append(record)
    # Some partitions far behind others, as after a transfer.
    weights = [chance.choice([1, 1, 30]) for _ in queues]
    while any(queues):
        (queue,) = chance.choices(queues, weights)
        for _ in range(min(len(queue), chance.randrange(1, 40))):
            yield queue.popleft()


def recovered(chance: random.Random, records: list[Record], fired_max: int) -> ReplicatedState:
    """A node that begins with a snapshot, during which records were applied, and its log from the
    offsets at which the snapshot began."""
    before = new_state(chance, fired_max)
    order = list(own_order(chance, records))
    count = chance.randrange(len(order))
    for record in order[:count]:
        before.apply(record)
    offsets = [0] * PARTITIONS
    for record in order[:count]:
        offsets[record.partition] = record.offset + 1
    rest = iter(order[count:])
    after = new_state(chance, fired_max)
    for kind, data in before.snapshot():
        after.apply_snapshot_entry(kind, data)
        for _ in range(chance.choice([0, 0, 1, 5])):
            if (record_during := next(rest, None)) is not None:
                before.apply(record_during)
    for record in own_order(chance, records):
        if record.offset >= offsets[record.partition]:
            after.apply(record)
    return after


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("seed", range(12))
def test_the_state_is_a_function_of_the_records(field: str, seed: int) -> None:
    # Sessions have no will once it is published. A node that applies the record of the will long
    # before that of the session knows it from this table. So it is compared with room for all.
    fired_max = 6 if field == "wills" else 5000
    log = Busy(seed)
    for _ in range(600):
        FIELDS[field](log)
    chance = random.Random(seed)
    first = new_state(chance, fired_max)
    for record in log.order:
        first.apply(record)
    expected = kept(first, with_wills=fired_max > 6)
    for _ in range(2):
        other = new_state(chance, fired_max)
        for record in own_order(chance, log.order):
            other.apply(record)
        for each in (other, recovered(chance, log.order, fired_max)):
            found = kept(each, with_wills=fired_max > 6)
            for name, value in expected.items():
                assert found[name] == value, name


def kept(replicated: ReplicatedState, *, with_wills: bool) -> dict[str, object]:
    found = content(replicated)
    sessions = found["sessions"]
    assert isinstance(sessions, dict)
    for entry in sessions.values():
        # Earlier ones are of a session that began again while the snapshot was made.
        del entry.requests[:-1]
        if not with_wills:
            entry.will = UNSET
    return found


def test_a_session_that_begins_while_a_snapshot_is_made_is_recovered() -> None:
    """Twice, the second time with Clean Start."""
    log = Log(1)
    for client_id, is_clean in ((CLIENTS[1], False), (CLIENTS[0], False), (CLIENTS[0], True)):
        log.epochs[client_id] += 1
        session = Session(client_id)
        session.epoch = log.epochs[client_id]
        session.expiry_s = 3600
        log.session(client_id, encode_session(open_record(session, is_clean, "n1")))
    before = new_state(log.random)
    before.apply(log.order[0])
    after = new_state(log.random)
    records = log.order[1:]
    for kind, data in before.snapshot():
        after.apply_snapshot_entry(kind, data)
        while records:
            before.apply(records.pop(0))
    for record in log.order[1:]:
        after.apply(record)
    assert sorted(after.state.sessions) == sorted(before.state.sessions) == sorted(CLIENTS[:2])


class Cluster:
    """Three nodes, each with limits of its own."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.nodes = list(map(self._process, self.stage.world.hosts))
        for number, process in enumerate(self.nodes):
            process.state.config.retained_max = 4 + 3 * number
            process.state.producers.positions_max = 4 + 3 * number

    def _process(self, name: str) -> Process:
        process = self.stage.world.hosts[name].process
        assert process is not None
        return process

    def send(self, peer: Peer, topic: str, value: str = "", *, retain: bool = False) -> None:
        message = Message(f"{topic} {value}", peer.client_id, topic, 0, 1)
        self.stage.world.checks.published(message)
        block = user_property("hf-seq", value) if value else b""
        payload = message.text.encode()
        peer.send(m.Publish(topic.encode(), payload, 1, retain, False, 1, block, 0, -1))
        peer.answer(m.Ack)

    def agrees(self) -> dict[str, object]:
        """The state that all nodes have."""
        self.stage.run(1.0)
        first, *others = [content(process.images) for process in self.nodes]
        for other in others:
            for name in ("retained", "producers"):
                assert other[name] == first[name], name
        return first


def test_a_cluster_keeps_the_same_retained_messages() -> None:
    cluster = Cluster()
    peers = [cluster.stage.login(node, "alice", node) for node in "abc"]
    for number in range(40):
        cluster.send(peers[number % 3], f"public/{number}", retain=True)
    retained = cluster.agrees()["retained"]
    assert isinstance(retained, dict)
    # A leader with the highest limit, and what $SYS has, decide.
    assert 4 <= len([topic for topic in retained if topic.startswith("public/")]) <= 10
    assert sum(process.state.stats.refused_quota for process in cluster.nodes) >= 30


def test_a_cluster_forgets_the_same_producers() -> None:
    cluster = Cluster()
    peers = [cluster.stage.login(node, "alice", node) for node in "abc"]
    for number in range(40):
        cluster.send(peers[number % 3], f"public/{number}", f"p{number}:0:1")
    cluster.agrees()
    leading = [process for process in cluster.nodes if process.cluster_node.context.leading[0]]
    (decides,) = leading
    table = decides.state.producers
    assert table.position_count == table.positions_max
    assert table.leaving_count == 0
    assert b"p39" in table.by_id

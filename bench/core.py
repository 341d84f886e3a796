"""The cost of a message in the core alone: no socket, no file, one thread.

    python -m bench.core [--rows qos1,shared] [--forms one,three] [--rounds 300]

Each row runs in every form at once, in alternation: `one` is a cluster of one node, `three` a
cluster of three nodes whose clients are spread over them. `processes` is one of two nodes that
store half of the partitions each, as `holdfast serve --processes 2`; half of the subscribers are at
the other node than their publisher. Every round
publishes 20 messages of 64 bytes from each publisher, and ends when all of them are delivered and
acknowledged. A round of a row of connects disconnects each subscriber and connects it again, which
counts as a message. The clock advances by 10 ms a round.

The processor's time of this thread counts, of all nodes together, and of all rounds the shortest:
other work on the machine makes a round longer and never shorter, so two versions can be compared at
any load. The command prints microseconds, turns, write groups, appended records and frames for each
published message, and the ratio to the first form. Counts do not depend on the machine.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.io.event_loop.loop import spare_the_collector
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.reading.cursor import ReadResult
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.config import NodeConfig
from holdfast.node.effects import Effect, ReadLog, ResumeInput
from holdfast.node.failure.detector import DetectorConfig
from holdfast.node.failure.health import Presence
from holdfast.node.features import RECORD_FEATURES
from holdfast.node.metadata.model import NodeInfo
from holdfast.node.metadata.store import MetaStore
from holdfast.node.node import Node
from holdfast.node.ownership import releases
from holdfast.node.parts import ClusterNodeConfig
from holdfast.node.placement.controller import ControllerConfig
from holdfast.node.raft.log import RaftState
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.runtime.ports import RuntimePorts
from holdfast.node.runtime.replacement import Replacement
from holdfast.node.runtime.runtime import Runtime
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.publish import Publish
from holdfast.security.peer_identity import PeerIdentity, level_word

PARTITIONS: Final = 16
MESSAGES: Final = 20
PAYLOAD: Final = b"x" * 64
WARM_ROUNDS: Final = 50
LEVEL: Final = 4
NOW_S: Final = 1000.0
ROUND_S: Final = 0.01
AWAY_S: Final = 0.1
"""The time in which a client is away."""
START_S: Final = 5.0
"""The time in which a cluster must have begun to serve."""
WALL_US: Final = 1_700_000_000_000_000
FORMS: Final = {"one": (1, 1), "three": (3, 3), "processes": (2, 1)}
"""The nodes of each form, and the replicas of a partition."""
REPLIES: Final = {m.PUBREC: b"\x62\x02", m.PUBREL: b"\x70\x02"}


@dataclass(frozen=True)
class Row:
    """A pattern of clients. Each topic has one publisher."""

    qos: int
    """The QoS of publishers and subscribers."""
    topics: int = 20
    subscribers: int = 1
    """The subscribers of each topic."""
    is_durable: bool = False
    is_shared: bool = False
    """All subscribers form one shared group of all topics."""
    messages: int = MESSAGES
    """That each publisher sends in a round; 0: the subscribers connect again."""


ROWS: Final = {
    "qos0": Row(0),
    "qos0-fanout": Row(0, 2, 20),
    "qos1": Row(1),
    "qos1-fanout": Row(1, 2, 20),
    "qos1-paced": Row(1, 1, messages=1),
    "qos2": Row(2),
    "qos2-fanout": Row(2, 2, 20),
    "durable-qos1": Row(1, is_durable=True),
    "durable-qos2": Row(2, is_durable=True),
    "shared-qos1": Row(1, is_shared=True),
    "shared-durable-qos1": Row(1, is_durable=True, is_shared=True),
    "connects": Row(1, messages=0),
    "durable-connects": Row(1, is_durable=True, messages=0),
}


class Disk:
    """Takes each group and keeps none."""

    is_full = False
    free_bytes = 1 << 40

    def __init__(self) -> None:
        self.group: WriteGroup | None = None

    def submit(self, group: WriteGroup) -> None:
        self.group = group

    def set_awaited(self, *, is_awaited: bool) -> bool:
        """Every group is reported."""
        return False

    def take_written(self) -> WriteGroup | None:
        return None

    def space(self) -> int:
        return self.free_bytes


class Reads:
    """The log before the first message. Later only a client that connects reads, and finds none."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine

    def read_log(self, effect: ReadLog, done: Callable[[ReadLog, ReadResult], None]) -> None:
        core = self._machine.core
        assert not (core.has_begun and core.row.messages), "a subscriber is behind"
        result = ReadResult([], list(effect.limits), True, 0)
        self._machine.results.append(partial(done, effect, result))

    def fetch(self, effect: object, done: object) -> None:
        raise AssertionError("a delivery is sent again")

    def find_starts(self, effect: object, done: object) -> None:
        raise AssertionError("a subscription begins in the past")

    def read_batches(self, effect: object, end: int, done: object) -> None:
        raise AssertionError("a replica is behind")


class Machine:
    """One node with the ports of its runtime: disk, clients, links, Raft's files and process."""

    is_full = False

    def __init__(self, core: "Core", name: str) -> None:
        self.core = core
        self.name = name
        journal = Journal(PARTITIONS, replicated=True)
        journal.continue_at([0] * PARTITIONS, 0)
        config = NodeConfig(node_id=name, partitions=PARTITIONS, sys_interval_s=0)
        self.node = Node(config, journal)
        self.disk = Disk()
        self.sent: dict[Connection, bytes] = {}
        self.input: dict[Connection, bytes] = {}
        self.frames: deque[tuple[str, int, bytes]] = deque()
        self.raft_writes = 0
        self.results: list[Callable[[], None]] = []
        self.is_touched = False
        self.is_ready = False
        self.turns = 0
        self.groups = 0
        self.group_bytes = 0
        self.node.tick(core.now, WALL_US)
        self.runtime = self._join()

    def _join(self) -> Runtime:
        """Make this machine a node of the cluster, and return its runtime. The first one founds
        the cluster."""
        node, core, name = self.node, self.core, self.name
        features = ",".join((*RECORD_FEATURES, releases.FEATURE, level_word()))
        self.identity = PeerIdentity(
            name, name, peer_address=f"{name}:1", client_address=f"{name}:2", features=features
        )
        self.presence = Presence(name, f"{name}:1", f"{name}:2", "", features)
        meta = MetaStore(name, name, RaftState(), nonce=name, random=lambda: 0.5, now=core.now)
        cluster_node = ClusterNode(
            node,
            ReplicatedState(RecordedState(node.state.config, node.state.journal)),
            meta,
            self.presence,
            ClusterNodeConfig(DetectorConfig(), ControllerConfig(), ReplicationConfig(name)),
            lambda: 0.5 + len(core.machines) / 16,
            core.now,
        )
        ports = RuntimePorts(self.disk, Reads(self), self, _Raft(self), _Links(self), self)
        replacement = Replacement(name, node.state, "")
        runtime = Runtime(cluster_node, ports, replacement, 1.0)
        runtime.begin(core.now, WALL_US)
        if not core.machines:
            info = NodeInfo(name, name, f"{name}:1", f"{name}:2", "")
            replicas = core.replicas
            meta.create_cluster("bench", PARTITIONS, replicas, min(replicas, 2), info, core.now)
        self.is_touched = True
        return runtime

    def connect_to(self, other: "Machine") -> None:
        """Handle the link to another node."""
        self.runtime.links.link_up(other.identity)

    # The ports

    def touch(self) -> None:
        if not self.is_touched:
            self.is_touched = True
            self.runtime.begin(self.core.now, WALL_US + int(self.core.now * 1e6))

    def flush(self, dirty: list[Connection]) -> None:
        for connection in dirty:
            connection.dirty = False
            data = b"".join(connection.out)
            connection.out.clear()
            connection.out_bytes = 0
            self.sent[connection] = self.sent.get(connection, b"") + data

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, ResumeInput):
            self.node.handle_resumed(effect.connection)

    def write_watermarks(self, watermarks: object) -> None:
        """Nothing is kept."""

    def take_nodes(self, metadata: object) -> None:
        """All nodes are connected."""

    def proposals_done(self, outcomes: object) -> None:
        """No operator waits."""

    def became_ready(self) -> None:
        self.is_ready = True
        self.node.start()

    # The event loop

    def step(self) -> bool:
        """Run one iteration of the event loop; returns whether there was anything to do."""
        runtime = self.runtime
        group = self.disk.group
        when = runtime.timer()
        is_due = when is not None and when <= self.core.now
        is_busy = group or self.input or self.frames or self.raft_writes or self.results
        if not (is_busy or is_due or self.is_touched):
            return False
        self.touch()
        if group is not None:
            self.disk.group = None
            self.groups += 1
            self.group_bytes += group.size_bytes
            runtime.group_written(group)
        for _ in range(len(self.frames)):
            name, kind, data = self.frames.popleft()
            runtime.links.handle_frame(name, kind, data, self.core.now)
        while self.raft_writes:
            self.raft_writes -= 1
            runtime.raft_written()
        results, self.results = self.results, []
        for result in results:
            result()
        if self.input:
            given, self.input = self.input, {}
            for connection, data in given.items():
                self.node.handle_data(connection, data)
        self.is_touched = False
        runtime.turn()
        self.turns += 1
        return True


class _Raft:
    """Raft's files, which keep nothing."""

    is_full = False

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def submit(self, write: object) -> None:
        self._machine.raft_writes += 1


class _Links:
    """The links of a machine, which are never lost."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def send(self, node_id: str, kind: int, payload: bytes | Sequence[bytes]) -> bool:
        data = payload if isinstance(payload, bytes) else b"".join(payload)
        core = self._machine.core
        core.frames += 1
        core.frame_bytes += len(data)
        core.machine(node_id).frames.append((self._machine.name, kind, data))
        return True

    def pending_bytes(self, node_id: str) -> int:
        return 0

    def close(self, node_id: str, text: str) -> None:
        """No link is closed."""

    def flush(self) -> None:
        """Everything has left already."""

    def review(self) -> None:
        """All links are allowed."""


class _Client:
    """A client, which acknowledges all that it receives."""

    def __init__(self, core: "Core", number: int, client_id: str, is_durable: bool) -> None:
        self.machine = core.machines[number % len(core.machines)]
        rules = ListenerRules("bench")
        self.machine.touch()
        self.connection = self.machine.node.handle_connected("127.0.0.1:1", rules)
        self.connection.transport = self
        connect = m.Connect(LEVEL, not is_durable, 0, client_id, None, None, None, {})
        self.send(encode(connect, LEVEL))

    def send(self, data: bytes) -> None:
        self.machine.input[self.connection] = data


class Core:
    """A broker in one of the forms, with the clients of a row."""

    def __init__(self, row: Row, form: str = "one") -> None:
        self.row = row
        self.now = NOW_S
        self.nodes, self.replicas = FORMS[form]
        self.has_begun = False
        self.took_ns = 0
        self.frames = 0
        self.frame_bytes = 0
        self.machines: list[Machine] = []
        for number in range(self.nodes):
            self.machines.append(Machine(self, f"n{number + 1}"))
        self._wait(lambda: self.machines[0].is_ready)
        for machine in self.machines[1:]:
            for other in self.machines[: self.machines.index(machine)]:
                machine.connect_to(other)
                other.connect_to(machine)
        self._wait(self._is_settled)
        numbers = range(row.topics)
        members = range(row.topics * row.subscribers)
        self.publishers = [_Client(self, each, f"p{each}", row.is_durable) for each in numbers]
        self.subscribers = [self._subscriber(each) for each in members]
        self._settle()
        for each, subscriber in enumerate(self.subscribers):
            filter = "$share/g/bench/#" if row.is_shared else f"bench/{each // row.subscribers}"
            request = m.SubscriptionRequest(filter, row.qos)
            subscriber.send(encode(m.Subscribe(1, [request]), LEVEL))
        self._settle()
        self._advance(1.0)
        packets = range(row.messages)
        self.blocks = [b"".join(_packet(each, at, row.qos) for at in packets) for each in numbers]
        self.messages = row.topics * (row.messages or row.subscribers)
        self.deliveries = self.messages if row.is_shared else self.messages * row.subscribers
        self.received = 0
        self.frames = self.frame_bytes = 0

    def _subscriber(self, number: int) -> _Client:
        """Connect it. Where there are replicas, it is at another node than the publisher of its
        topic, otherwise every other time."""
        at = 1 + number if self.replicas > 1 else number // self.nodes
        return _Client(self, at, f"s{number}", self.row.is_durable)

    def machine(self, name: str) -> Machine:
        return self.machines[int(name[1:]) - 1]

    def _is_settled(self) -> bool:
        """Whether every node serves, and every partition has all its replicas in sync."""
        metadata = self.machines[0].runtime.cluster_node.context.metadata
        assert metadata is not None
        leaders = {info.leader for info in metadata.partitions}
        is_spread = len(leaders) == self.nodes
        return (
            is_spread
            and all(machine.is_ready for machine in self.machines)
            and all(len(info.in_sync) == self.replicas for info in metadata.partitions)
        )

    def _wait(self, is_done: Callable[[], bool]) -> None:
        until = self.now + 60 * START_S
        while not is_done():
            assert self.now < until
            self._advance(ROUND_S)

    def _advance(self, time_s: float) -> None:
        until = self.now + time_s
        while self.now < until - 1e-9:
            self.now += ROUND_S
            self._settle()

    def _settle(self) -> None:
        """Let the nodes and clients work until nothing is left to do."""
        is_busy = True
        while is_busy:
            is_busy = False
            for machine in self.machines:
                began_ns = time.thread_time_ns()
                is_busy = machine.step() or is_busy
                self.took_ns += time.thread_time_ns() - began_ns
                sent, machine.sent = machine.sent, {}
                for connection, data in sent.items():
                    replies = self._replies(data)
                    if replies:
                        machine.input[connection] = replies

    def _replies(self, data: bytes) -> bytes:
        """The answers of a client to these packets, each of less than 128 bytes."""
        at = 0
        replies = []
        while at < len(data):
            kind = data[at] >> 4
            if kind == m.PUBLISH:
                self.received += 1
                qos = data[at] >> 1 & 3
                if qos:
                    start = at + 4 + (data[at + 2] << 8 | data[at + 3])
                    head = b"\x40\x02" if qos == 1 else b"\x50\x02"
                    replies.append(head + data[start : start + 2])
            elif kind in REPLIES:
                replies.append(REPLIES[kind] + data[at + 2 : at + 4])
            at += 2 + data[at + 1]
        return b"".join(replies)

    def round(self) -> int:
        """Publish, deliver and acknowledge all messages. Return the nanoseconds of the nodes."""
        self.has_begun = True
        self.took_ns = 0
        self.received = 0
        self.now += ROUND_S
        if not self.row.messages:
            self._connect_again()
            return self.took_ns
        for publisher, block in zip(self.publishers, self.blocks, strict=True):
            publisher.send(block)
        self._settle()
        assert self.received == self.deliveries
        return self.took_ns

    def _connect_again(self) -> None:
        """Disconnect each subscriber, log its progress, and connect it."""
        for subscriber in self.subscribers:
            subscriber.send(encode(m.Disconnect(0, {}), LEVEL))
        self._advance(AWAY_S)
        for number, subscriber in enumerate(self.subscribers):
            subscriber.machine.touch()
            subscriber.machine.node.handle_disconnected(subscriber.connection)
            self.subscribers[number] = self._subscriber(number)
        self._settle()
        self._wait(lambda: all(each.connection.state == OPEN for each in self.subscribers))

    def counts(self) -> list[int]:
        """Turns, write groups, appended records, journal bytes, frames and their bytes so far."""
        machines = self.machines
        records = sum(machine.node.state.journal.sequence for machine in machines)
        return [
            sum(machine.turns for machine in machines),
            sum(machine.groups for machine in machines),
            records,
            sum(machine.group_bytes for machine in machines),
            self.frames,
            self.frame_bytes,
        ]


def _packet(number: int, packet_id: int, qos: int) -> bytes:
    topic = f"bench/{number}".encode()
    packet_id = packet_id + 1 if qos else 0
    return encode(Publish(topic, PAYLOAD, qos, False, False, packet_id, b"", 0, -1), LEVEL)


@dataclass
class Figures:
    """The cost of a published message in one form."""

    cpu_us: float
    """CPU of the shortest round."""
    counts: list[float]
    """See `Core.counts`."""


def measure(row: Row, forms: Sequence[str], rounds: int) -> dict[str, Figures]:
    """Run the row in all forms, round by round in alternation."""
    cores = {form: Core(row, form) for form in forms}
    for core in cores.values():
        for _ in range(min(WARM_ROUNDS, rounds)):
            core.round()
    before = {form: core.counts() for form, core in cores.items()}
    shortest_ns = dict.fromkeys(forms, 1 << 62)
    for _ in range(rounds):
        for form, core in cores.items():
            shortest_ns[form] = min(shortest_ns[form], core.round())
    return {
        form: Figures(
            shortest_ns[form] / 1000 / core.messages,
            [
                (after - start) / rounds / core.messages
                for after, start in zip(core.counts(), before[form], strict=True)
            ],
        )
        for form, core in cores.items()
    }


def _names(known: dict[str, object], text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name}: known are {', '.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.core")
    parser.add_argument("--rows", type=partial(_names, {**ROWS}), default=[*ROWS])
    parser.add_argument("--forms", type=partial(_names, {**FORMS}), default=[*FORMS])
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    # As a server does: with Python's limits, objects that live for a turn cost full collections.
    spare_the_collector()
    columns = "{:<20} {:<7} {:>8} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}"
    titles = ["row", "form", "µs", "ratio", "turns", "groups", "records", "bytes", "frames"]
    print(columns.format(*titles, "fr bytes"))
    for name in options.rows:
        found = measure(ROWS[name], options.forms, options.rounds)
        first = found[options.forms[0]].cpu_us
        for form, figures in found.items():
            ratio = f"{figures.cpu_us / first:.2f}"
            counts = [f"{each:.4g}" for each in figures.counts]
            print(columns.format(name, form, f"{figures.cpu_us:.3f}", ratio, *counts), flush=True)


if __name__ == "__main__":
    main()

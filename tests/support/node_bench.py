"""Drives a cluster of one node without sockets, threads or files: the test decides when the disk is
done, when it crashes, and what survives. Reads are answered by naive scans over the written
batches."""

import random
from collections.abc import Callable, Iterable

from holdfast.log.batch import Batch
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.reading.scan import scan_segment
from holdfast.log.reading.starts import FoundStart, bytes_from
from holdfast.log.record import MESSAGE, Record
from holdfast.node.cluster_node import BrokerPort
from holdfast.node.config import NodeConfig
from holdfast.node.delivery.subscribe import handle_starts
from holdfast.node.effects import (
    AskRights,
    AskSources,
    AskTopics,
    CheckPassword,
    Cut,
    FetchInflight,
    FindStarts,
    Note,
    ReadLog,
    ResumeInput,
    RunCommands,
)
from holdfast.node.node import Node
from holdfast.node.node_state import NodeState
from holdfast.node.publish.control import finish_commands
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Group, Session
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.topic_rights.questions import handle_topics
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.publish import Publish, decode_publish
from holdfast.protocol.topics.names import is_shared, matches
from holdfast.security.acl import ClientRules
from holdfast.security.identity.identity import Answer
from tests.sim.disk import SimContent, SimReadFile
from tests.support.bench_cores import ClusterOfOne

PACKET_BYTES_MAX = 268_435_460
CHECKED_MAX = 100
"""Above so many sessions, retained messages or producers the sums over them are not compared."""


class Peer:
    """A client's end of one connection: sends packets, keeps what it received."""

    def __init__(
        self,
        bench: "NodeBench",
        version: int,
        rules: ListenerRules | None = None,
        address: str = "test",
    ) -> None:
        self.bench = bench
        self.version = version
        self.connection: Connection = bench.node.handle_connected(
            f"{address}:1", rules or ListenerRules("test")
        )
        self.connection.transport = self
        self.reader = FrameReader(PACKET_BYTES_MAX)
        self.received: list[object] = []
        self.closed = False

    def send(self, *packets: object) -> "Peer":
        self.send_bytes(b"".join(encode(packet, self.version) for packet in packets))  # type: ignore[arg-type]
        return self

    def send_bytes(self, data: bytes) -> None:
        self.bench.node.handle_data(self.connection, data)
        self.bench.run()

    def deliver(self, data: bytes) -> None:
        reader = self.reader
        reader.feed(data)
        while reader.next():
            if reader.first >> 4 == m.PUBLISH:
                packet: object = decode_publish(
                    reader.buffer, reader.first, reader.start, reader.end, self.version, False
                )
            else:
                packet = decode(
                    reader.buffer, reader.first, reader.start, reader.end, self.version, False
                )
            self.received.append(packet)

    def take(self, kind: type | None = None) -> list[object]:
        """What has arrived (of a class) since the last take."""
        taken = [p for p in self.received if kind is None or isinstance(p, kind)]
        self.received = [p for p in self.received if not (kind is None or isinstance(p, kind))]
        return taken

    def publishes(self) -> list[Publish]:
        return [p for p in self.take(Publish) if isinstance(p, Publish)]

    def payloads(self) -> list[bytes]:
        return [publish.payload for publish in self.publishes()]

    def lose(self) -> None:
        """The network connection breaks."""
        self.closed = True
        self.connection.transport = None
        self.bench.node.handle_disconnected(self.connection)
        self.bench.run()


class NodeBench:
    def __init__(self, config: NodeConfig | None = None, *, auto_commit: bool = True) -> None:
        self.config = config or NodeConfig(partitions=4, sys_interval_s=0)
        self.auto_commit = auto_commit
        self.now = 1000.0
        self.wall_us = 1_700_000_000_000_000
        self.groups: list[WriteGroup] = []
        self.in_flight: list[WriteGroup] = []
        self.notes: list[Note] = []
        # The connections that the node has cut off.
        self.cut: list[Connection] = []
        self.valid_passwords: dict[str, bytes] = {}
        # The messages with commands that clients have sent. Each has the same response.
        self.commands: list[bytes] = []
        # The replies of the sources of identity, and of the hooks that give rights.
        self.identity: Answer = None
        self.rights: ClientRules | None = None
        # The questions about topics, and their answers; None: they come by `answer`.
        self.questions: list[AskTopics] = []
        self.verdicts: Callable[[str, str], str] | None = None
        # Reads of the log are answered once this is false again.
        self.delay_reads = False
        self.delayed: list[FetchInflight | FindStarts | ReadLog] = []
        # The records that the next read of the log finds lost.
        self.lost = 0
        self.log: list[bytes] = []
        # The log and its length for which `_stored` has the messages.
        self._parsed: tuple[list[bytes], int, list[Record]] = (self.log, 0, [])
        self.core = ClusterOfOne(self)
        self._boot([])

    @property
    def node(self) -> Node:
        return self.core.node

    @property
    def journal(self) -> Journal:
        return self.core.node.state.journal

    def _boot(
        self,
        batches: Iterable[bytes],
        snapshot: list[tuple[int, bytes]] | None = None,
        offsets: list[int] | None = None,
    ) -> None:
        self.log = list(batches)
        self.in_flight = []
        self.delayed = []
        self.core.boot(snapshot or [], offsets or [0] * self.config.partitions)
        self.node.start()
        self.run()

    def prepare(self) -> None:
        """Change a new node before anything is recovered. For subclasses."""

    def records(self) -> list[Record]:
        return [record for data in self.log for record in Batch(data).records()]

    def messages(self) -> list[Record]:
        return [record for record in self.records() if record.kind == MESSAGE]

    def _stored(self) -> list[Record]:
        """The messages of the log, of which each batch is parsed once."""
        log, count, found = self._parsed
        if log is not self.log or count > len(self.log):
            count, found = 0, []
        for data in self.log[count:]:
            found += [record for record in Batch(data).records() if record.kind == MESSAGE]
        self._parsed = (self.log, len(self.log), found)
        return found

    def snapshot(self) -> list[tuple[int, bytes]]:
        return list(self.core.cluster.replicated.snapshot())

    def recorded(self) -> RecordedState:
        """The state that the committed records define."""
        return self.node.state.recorded

    def find_session(self, client_id: str) -> Session | None:
        """The session of a client, connected or not, or None."""
        state = self.node.state
        return state.sessions.get(client_id) or state.recorded.sessions.get(client_id)

    def session(self, client_id: str) -> Session:
        """The session of a client, connected or not."""
        session = self.find_session(client_id)
        assert session is not None
        return session

    def crash(
        self,
        *,
        keep_uncommitted: bool = False,
        torn: random.Random | None = None,
        snapshot: list[tuple[int, bytes]] | None = None,
        offsets: list[int] | None = None,
    ) -> None:
        """All memory is lost; what was committed (or, as after a kill, all that was written)
        survives. `torn`: of what was being written, any sectors or any bytes at the beginning; the
        journal's own recovery says what is left. `offsets`: where the records after the snapshot
        begin; None: all are applied over it."""
        if keep_uncommitted or torn is not None:
            self.take()
        if torn is not None:
            self.log = survivors(self.log, self.in_flight, self.config.partitions, torn)
        elif keep_uncommitted:
            for group in self.in_flight:
                self.log.extend(split(group_bytes(group)))
        self._boot(self.log, snapshot, offsets)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.wall_us += int(seconds * 1_000_000)
        self.core.tick()
        self.core.handle_timers()
        self.run()

    def take(self) -> None:
        group = self.journal.close_write_group()
        if group is not None:
            self.in_flight.append(group)
            self.core.taken(group)

    def commit(self) -> None:
        """The disk is done with everything appended so far."""
        self.take()
        groups, self.in_flight = self.in_flight, []
        for group in groups:
            self.log.extend(split(group_bytes(group)))
            self.journal.wrote(group)
            self.journal.commit(group)
            self.core.durable()
        self.node.state.resume_inputs()

    def settle(self) -> None:
        """Commit and run until nothing waits for the disk."""
        self.run()
        while self.core.waits():
            self.commit()
            self.run()

    def run(self) -> None:
        """Carry out effects and commits until nothing is left to do."""
        state = self.node.state
        if not self.delay_reads:
            delayed, self.delayed = self.delayed, []
            for effect in delayed:
                self._look_up(effect)
        while True:
            if self.auto_commit and self.core.waits():
                self.commit()
            progress = self.core.end_turn()
            effects, state.effects = state.effects, []
            for effect in effects:
                progress = True
                self._carry_out(effect)
            dirty, state.dirty = state.dirty, []
            for connection in dirty:
                progress = True
                connection.dirty = False
                peer = connection.transport
                if peer is None or connection.congested:
                    continue
                data = b"".join(connection.out or ())
                connection.out = None
                was_full = connection.out_bytes > self.config.outbox_bytes
                connection.out_bytes = 0
                assert isinstance(peer, Peer)
                peer.deliver(data)
                if was_full:
                    self.node.handle_writable(connection)
                if connection.closing:
                    peer.closed = True
                    connection.transport = None
                    self.node.handle_disconnected(connection)
            if not progress and not (self.auto_commit and self.core.waits()):
                if not state.work:
                    self._check()
                    return
                # As in the next turn of an event loop: what is large goes on in slices.
                self.core.tick()
                self.node.handle_timers()

    def _check(self) -> None:
        """The invariants over all tables, unless those are large."""
        state = self.node.state
        if max(len(state.sessions), len(state.retained), len(state.producers)) < CHECKED_MAX:
            state.check()
            self.journal.check()

    def answer(self, verdicts: Callable[[str, str], str]) -> list[tuple[str, str]]:
        """Answer the open questions about topics, for 60 seconds. Returns them."""
        asked: list[tuple[str, str]] = []
        while self.questions:
            effect = self.questions.pop(0)
            asked += [(effect.action, topic) for topic in effect.topics]
            answers = [(verdicts(effect.action, topic), 60.0) for topic in effect.topics]
            handle_topics(self.node.state, effect, answers)
        return asked

    def _carry_out(self, effect: object) -> None:
        if isinstance(effect, ResumeInput):
            if effect.connection.transport is not None:
                self.node.handle_resumed(effect.connection)
        elif isinstance(effect, Note):
            self.notes.append(effect)
        elif isinstance(effect, Cut):
            self.cut.append(effect.connection)
        elif isinstance(effect, AskSources):
            self.node.handle_answer(effect.connection, self.identity)
        elif isinstance(effect, AskRights):
            self.node.handle_rights(effect, self.rights)
        elif isinstance(effect, AskTopics):
            self.questions.append(effect)
            if self.verdicts is not None:
                self.answer(self.verdicts)
        elif isinstance(effect, RunCommands):
            self.commands.append(effect.payload)
            finish_commands(self.node.state, effect, b"the response")
        elif isinstance(effect, CheckPassword):
            valid = self.valid_passwords.get(effect.username) == effect.password
            self.node.handle_password_checked(effect.connection, valid)
        elif isinstance(effect, FetchInflight | FindStarts | ReadLog):
            if self.delay_reads:
                self.delayed.append(effect)
            else:
                self._look_up(effect)

    def _look_up(self, effect: FetchInflight | FindStarts | ReadLog) -> None:
        if isinstance(effect, FetchInflight):
            self._fetch(effect)
        elif isinstance(effect, FindStarts):
            self._find(effect)
        else:
            self._read(effect)

    def _fetch(self, effect: FetchInflight) -> None:
        by_place = {(r.partition, r.offset): r for r in self.records()}
        found = []
        size_bytes = 0
        for pid, p, o in effect.wanted:
            record = by_place.get((p, o))
            found.append((pid, record))
            size_bytes += len(record.payload) if record is not None else 0
            if size_bytes >= effect.bytes_max:
                break
        self.node.handle_fetched(effect, found)

    def _find(self, effect: FindStarts) -> None:
        found: list[FoundStart] = []
        for query in effect.wanted:
            offsets = list(effect.limits)
            floors: dict[bytes, int] = {}
            counts: dict[bytes, int] = {}
            for record in reversed(self.messages()):
                partition = record.partition
                if record.offset >= effect.limits[partition]:
                    continue
                if query.last:
                    counts[record.topic] = counts.get(record.topic, 0) + 1
                    counts_here = counts[record.topic] <= query.last
                    if not counts_here or not matches(query.filter, record.topic.decode()):
                        continue
                    floors[record.topic] = record.offset
                elif record.timestamp_us < query.since_us:
                    continue
                offsets[partition] = min(offsets[partition], record.offset)
            start = FoundStart(offsets, floors)
            start.size_bytes = bytes_from(self.node.state.journal.segments, offsets)
            found.append(start)
        handle_starts(self.node.state, effect, found)

    def _read(self, effect: ReadLog) -> None:
        positions = list(effect.positions)
        found: list[Record] = []
        size_bytes = 0
        done = True
        for record in self._stored():
            partition = record.partition
            if not positions[partition] <= record.offset < effect.limits[partition]:
                continue
            if len(found) >= effect.records_max or size_bytes >= effect.bytes_max:
                done = False
                break
            topic = record.topic.decode()
            for interest in effect.interests:
                start = interest.start
                if matches(interest.filter, topic) and (
                    start is None or record.offset >= start[partition]
                ):
                    found.append(record)
                    size_bytes += len(record.payload)
                    break
            positions[partition] = record.offset + 1
        if done:
            positions = [max(a, b) for a, b in zip(positions, effect.limits, strict=True)]
        self.node.handle_read(effect, found, positions, done, self.lost)
        self.lost = 0

    def peer(self, version: int = 5, rules: ListenerRules | None = None) -> Peer:
        return Peer(self, version, rules)

    def connect(
        self,
        client_id: str,
        version: int = 5,
        *,
        clean: bool = True,
        expiry_s: int = 0,
        properties: dict[int, object] | None = None,
        will: object = None,
        keep_alive_s: int = 0,
        commits: bool = True,
    ) -> Peer:
        """A connected peer; its CONNACK is the first of `received` unless commits are manual.
        Everything appended is committed until the session is open, if `commits`."""
        peer = self.peer(version)
        fields: dict[int, object] = dict(properties or {})
        if version >= 5 and expiry_s:
            fields[17] = expiry_s
        packet = m.Connect(version, clean, keep_alive_s, client_id, will, None, None, fields)  # type: ignore[arg-type]
        peer.send(packet)
        while commits and peer.connection.session is None and self.core.waits():
            # The session begins in the log before its CONNACK.
            self.commit()
            self.run()
        return peer


def check_routing(state: NodeState) -> None:
    """A subscription is in the routing exactly while its session is in the table, and a group
    exists exactly while it has a member. A coordinator has cursors of its own."""
    cursors: set[object] = set()
    if isinstance(state.cluster, BrokerPort):
        for home in state.cluster.groups.coordinator.homes.led.values():
            cursors.update(each.cursor for each in home.groups.values())
    routed = {
        (filter, key): value
        for filter in state.subscriptions.filters()
        for key, value in state.subscriptions.subscribers(filter).items()
        if key not in cursors
    }
    wanted: dict[tuple[str, object], object] = {}
    members: dict[str, set[Session]] = {}
    for session in state.sessions.values():
        for filter, subscription in session.subscriptions.items():
            assert subscription.session is session
            if is_shared(filter):
                members.setdefault(filter, set()).add(session)
                group = state.groups[filter]
                assert group.members[session] is subscription
                wanted[group.filter, group] = group
            else:
                wanted[filter, session] = subscription
        of_session = {group.key for group in session.groups or () if isinstance(group, Group)}
        assert of_session == {filter for filter in session.subscriptions if is_shared(filter)}
    assert routed == wanted
    assert {key: set(group.members) for key, group in state.groups.items()} == members
    for group in state.groups.values():
        assert [member.slot for member in group.connected] == list(range(len(group.connected)))
        for member in group.connected:
            assert group.members[member.session] is member
            blocked = member.session.blocked
            assert (member.slot >= group.ready) == (blocked is not None and member in blocked)
        present = {member.session for member in group.connected}
        if not state.work:
            states = {each: each.connection for each in group.members}
            open_ones = {s for s, c in states.items() if c is not None and c.state == OPEN}
            # From its UNSUBSCRIBE on, a durable member is given nothing.
            assert present <= open_ones
            assert all(each.subscribes_awaited for each in open_ones - present)
    clients = [session for session in state.sessions.values() if not session.is_internal]
    assert state.subscription_count == sum(len(each.subscriptions) for each in clients)


def group_bytes(group: WriteGroup) -> bytes:
    return b"".join(group.data)


def survivors(
    log: list[bytes], in_flight: list[WriteGroup], partitions: int, chance: random.Random
) -> list[bytes]:
    """The batches that the recovery of a replica finds. Of the groups only one is being written."""
    written = [group_bytes(group) for group in in_flight]
    complete = chance.randint(0, len(written))
    content = SimContent(b"".join([*log, *written[:complete]]))
    synced_bytes = len(content.now)
    if complete < len(written):
        content.write(len(content.now), written[complete])
    left = content.surviving(chance.choice(["torn", "sectors"]), chance)
    file = SimContent(left)
    scan = scan_segment(
        SimReadFile(file), 0, [0] * partitions, replica=True, synced_bytes=synced_bytes
    )
    assert not scan.damage
    return split(left[: scan.end])


def split(data: bytes) -> list[bytes]:
    batches = []
    at = 0
    while at < len(data):
        batch = Batch(data, at)
        batches.append(data[at : at + batch.length])
        at += batch.length
    return batches

"""Shared subscriptions over the nodes of a simulated cluster."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import CURSOR, Record
from holdfast.node.config import NodeConfig
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.groups.codec import (
    AgentReport,
    Assign,
    decode_assign,
    decode_report,
    encode_assign,
    encode_report,
)
from holdfast.node.groups.control_frames import (
    FullReport,
    NodeCapacity,
    Place,
    decode_full_report,
    decode_report_ack,
    decode_report_request,
    encode_full_report,
    encode_report_ack,
    encode_report_request,
)
from holdfast.node.session.message import Message as StoredMessage
from holdfast.node.session.state import encode_cursor
from holdfast.node.state.groups import GroupPositions
from holdfast.node.state.offset_ranges import OffsetRanges
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.session_records import decode_group, encode_session
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.packets import Publish
from tests.sim.client import Client
from tests.sim.faults import ALL, NETWORK, PROCESSES
from tests.sim.host import Host
from tests.sim.plans import settings_for
from tests.sim.workload import Party, Publisher
from tests.sim.world import Settings, World

FILTER = "$share/g/t/#"
Parties = Callable[[World], list[Party]]


class Team:
    """What the members of a group have received, together."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.qos2: Counter[str] = Counter()
        self.members: list[Member] = []

    def missing(self, world: World) -> list[str]:
        stored = world.checks.stored
        return [text for text in stored if not self.received[text]]


class Member(Party):
    """`home`: the node that it always goes to."""

    def __init__(self, world: World, team: Team, client: Client, home: str = "") -> None:
        super().__init__(world, client)
        self.team = team
        self.home = home
        self.count = 0
        self._newest: dict[tuple[str, str], int] = {}
        self.disorder: list[str] = []
        client.on_message = self._arrived
        team.members.append(self)

    def _connect(self) -> None:
        host: Host | None = self.world.hosts.get(self.home)
        if host is None:
            super()._connect()
        elif host.process is not None and host.process.is_ready:
            self.client.connect(host)

    def _arrived(self, packet: Publish) -> None:
        text = packet.payload.decode()
        assert self.world.checks.stored.get(text), f"{text} is not committed"
        self.count += 1
        self.team.received[text] += 1
        if packet.qos == 2:
            self.team.qos2[text] += 1
        message = self.world.checks.messages[text]
        key = (message.publisher, message.topic)
        if not packet.dup and self._newest.get(key, -1) > message.number:
            self.disorder.append(text)
        self._newest[key] = max(message.number, self._newest.get(key, -1))

    def unsettled(self) -> str:
        missing = self.team.missing(self.world)
        return f"nobody has received {missing[:5]} ({len(missing)})" if missing else ""


def member(
    world: World,
    team: Team,
    name: str,
    qos: int = 1,
    *,
    clean: bool = False,
    home: str = "",
    wanders: bool = False,
) -> Member:
    client = Client(world, name, 5, clean=clean, filters=((FILTER, qos),))
    found = Member(world, team, client, home)
    found.wanders = wanders
    if clean:
        # Its subscription ends with its connection.
        client.on_connected = client._subscribe
    return found


def publishers(world: World) -> list[Party]:
    return [Publisher(world, Client(world, "pub5", 5)), Publisher(world, Client(world, "pub4", 4))]


def leave(party: Party) -> None:
    """For good."""
    party.is_wanted = lambda: False  # type: ignore[method-assign]
    party.client.disconnect()


def play(monkeypatch: pytest.MonkeyPatch, seed: int, settings: Settings, parties: Parties) -> World:
    monkeypatch.setattr("tests.sim.world.parties", parties)
    world = World(seed, settings)
    world.run()
    assert len(world.checks.stored) > 50
    return world


@pytest.mark.parametrize(("qos", "clean"), [(1, False), (1, True), (2, False)])
def test_each_record_goes_to_one_member(
    monkeypatch: pytest.MonkeyPatch, qos: int, clean: bool
) -> None:
    team = Team()

    def parties(world: World) -> list[Party]:
        members = [
            member(world, team, f"m{number}", qos, clean=clean, home=f"n{number % 3 + 1}")
            for number in range(4)
        ]
        return [*members, *publishers(world)]

    world = play(monkeypatch, qos, Settings(duration_s=2.0), parties)
    assert team.received == Counter(world.checks.stored)
    counts = [each.count for each in team.members]
    assert min(counts) > len(world.checks.stored) / 8, counts


@pytest.mark.parametrize("qos", [1, 2])
def test_each_record_goes_to_one_member_though_links_break(
    monkeypatch: pytest.MonkeyPatch, qos: int
) -> None:
    team = Team()

    def parties(world: World) -> list[Party]:
        members = [
            member(world, team, f"m{number}", qos, home=f"n{number % 3 + 1}") for number in range(4)
        ]
        return [*members, *publishers(world)]

    settings = Settings(duration_s=4.0, faults=("reset",), mean_s=0.3)
    world = play(monkeypatch, qos, settings, parties)
    assert team.received == Counter(world.checks.stored)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_whatever_fails(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    team = Team()

    def parties(world: World) -> list[Party]:
        members = [
            member(world, team, "d1", 1, wanders=True),
            member(world, team, "d2", 2, wanders=True),
            member(world, team, "c1", 1, clean=True),
            member(world, team, "c2", 1, clean=True, wanders=True),
        ]
        return [*members, *publishers(world)]

    faults = (ALL, PROCESSES, NETWORK)[seed % 3]
    settings = replace(settings_for(seed, 3, faults), mean_s=0.8)
    play(monkeypatch, seed, settings, parties)


class QuietClient(Client):
    """Acknowledges nothing while it is quiet."""

    is_quiet = False

    def _reply(self, kind: int, packet_id: int) -> None:
        if not self.is_quiet:
            self._write(encode_ack(kind, packet_id, 0, self.version))


class Stage:
    """A cluster that is ready, with members that stay where they are: `nodes`, in order of the
    members. The first of "c", "a", "b" coordinates the group, the others do not."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        nodes: str,
        qos: int = 1,
        *,
        clean: bool = True,
        quiet: int = 0,
        publisher: str = "",
    ) -> None:
        """The first `quiet` members acknowledge nothing."""
        self.team = Team()
        self.clients: list[QuietClient] = []

        def parties(world: World) -> list[Party]:
            publisher = Publisher(world, Client(world, "pub", 5))
            publisher.wanders = False
            return [publisher]

        monkeypatch.setattr("tests.sim.world.parties", parties)
        self.world = World(7, Settings(outbox_messages=1000))
        for host in self.world.hosts.values():
            host.start()
        self.until(lambda: all(map(is_ready, self.world.hosts.values())))
        self.until(self.world.is_in_sync)
        home = partition_of(FILTER.encode(), self.world.settings.partitions)
        process = self.world.hosts["n1"].process
        assert process is not None
        metadata = process.cluster_node.context.metadata
        assert metadata is not None
        self.coordinator = metadata.partitions[home].leader
        others = [name for name in self.world.hosts if name != self.coordinator]
        self.names = dict(zip("cab", [self.coordinator, *others], strict=True))
        for number, letter in enumerate(nodes):
            client = QuietClient(self.world, f"m{number}", 5, clean=clean, filters=((FILTER, qos),))
            client.is_quiet = number < quiet
            self.clients.append(client)
            party = Member(self.world, self.team, client, self.names[letter])
            party.wanders = False
            self.until(partial(getattr, client, "is_subscribed"))
        self.publisher = self.world.parties[0]
        if publisher:
            self.publisher.client.connect(self.world.hosts[self.names[publisher]])
        assert isinstance(self.publisher, Publisher)
        self.until(lambda: self.publisher.client.is_connected)

    def until(self, condition: Callable[[], bool], within_s: float = 20.0) -> None:
        deadline = self.world.schedule.now + within_s
        while not condition():
            assert self.world.schedule.now < deadline, [each.count for each in self.team.members]
            self.run(0.001)

    def run(self, seconds: float) -> None:
        self.world.schedule.run(seconds)

    def publish(self, count: int, qos: int = 1) -> list[str]:
        assert isinstance(self.publisher, Publisher)
        self.until(lambda: self.publisher.client.is_connected)
        texts: list[str] = []
        for number in range(count):
            message = self.publisher.message(f"t/{number % 3}", qos)
            texts.append(message.text)
            self.publisher.client.publish(message)
        self.until(lambda: not self.publisher.client.outgoing)
        return texts

    def kill(self, letter: str) -> None:
        self.world.hosts[self.names[letter]].kill(power=False)

    def count(self, *numbers: int) -> int:
        return sum(self.team.members[number].count for number in numbers)


def is_ready(host: Host) -> bool:
    return host.process is not None and host.process.is_ready


def test_what_a_lost_node_had_goes_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, "bc", quiet=1)
    texts = stage.publish(20)
    stage.until(lambda: stage.count(0, 1) == 20)
    held = stage.count(0)
    assert held > 5
    stage.team.members[0].home = stage.names["c"]
    stage.clients[0].filters = ()
    stage.kill("b")
    stage.until(lambda: stage.count(1) == 20)
    assert stage.team.received.keys() == set(texts)


def test_what_a_member_has_not_acknowledged_goes_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, "ab", quiet=1)
    texts = stage.publish(20)
    stage.until(lambda: stage.count(0, 1) == 20)
    held = stage.count(0)
    assert held > 5
    leave(stage.team.members[0])
    stage.until(lambda: stage.count(1) == 20)
    stage.run(1.0)
    assert stage.team.received.keys() == set(texts)
    assert stage.count(1) == 20


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_the_next_coordinator_knows_who_has_what(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """Whether the log says it or not."""
    stage = Stage(monkeypatch, "ab", quiet=1)
    stage.publish(20)
    stage.until(lambda: stage.count(0, 1) == 20)
    stage.run(wait_s)
    stage.kill("c")
    stage.run(3.0)
    texts = stage.publish(10)
    stage.until(lambda: all(stage.team.received[text] for text in texts))
    stage.run(1.0)
    assert stage.team.received == Counter(stage.world.checks.stored)
    # And what the quiet one has is still its own.
    stage.clients[0].is_quiet = False
    leave(stage.team.members[0])
    stage.until(lambda: stage.count(1) == 30)


def test_qos2_stays_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, "bc", 2, clean=False, quiet=1)
    texts = stage.publish(20, 2)
    stage.until(lambda: stage.count(0, 1) == 20)
    held = stage.count(0)
    assert held > 5
    stage.clients[0].is_quiet = False
    stage.team.members[0].home = stage.names["a"]
    stage.kill("b")
    stage.until(lambda: stage.clients[0].is_connected and stage.clients[0].connects > 1)
    stage.run(3.0)
    assert stage.team.received.keys() == set(texts)
    # The first member's were sent again, to itself.
    assert stage.count(1) == 20 - held


@pytest.mark.parametrize("cut_s", [3.0, 9.0])
def test_a_group_waits_for_members_behind_a_partition(
    monkeypatch: pytest.MonkeyPatch, cut_s: float
) -> None:
    stage = Stage(monkeypatch, "b", publisher="a")
    first = stage.publish(10)
    stage.until(lambda: stage.count(0) == 10)
    stage.run(0.5)
    for letter in "ca":
        stage.world.network.cut(stage.names[letter], stage.names["b"])
        stage.world.network.cut(stage.names["b"], stage.names[letter])
    texts = stage.publish(10)
    stage.run(cut_s)
    stage.world.network.heal()
    stage.until(lambda: stage.team.received.keys() == {*first, *texts})
    assert stage.clients[0].connects == 1


def test_a_node_without_a_link_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, "ab", quiet=1)
    stage.publish(20)
    stage.until(lambda: stage.count(0, 1) == 20)
    process = stage.world.hosts[stage.coordinator].process
    assert process is not None
    homes = process.cluster_node.groups.coordinator.homes.led.values()
    stage.world.network.reset(stage.coordinator, stage.names["a"])
    for _ in range(500):
        stage.run(0.001)
        # None is reclaimed, not even for the time of a read barrier.
        assert not any(each.holders.doubtful for home in homes for each in home.groups.values())
    texts = stage.publish(20)
    stage.until(lambda: all(stage.team.received[text] for text in texts))
    stage.run(1.0)
    assert stage.team.received == Counter(stage.world.checks.stored)


def test_what_the_coordinators_own_node_had_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, "cb", quiet=1)
    texts = stage.publish(20)
    stage.until(lambda: stage.count(0, 1) == 20)
    stage.run(0.5)
    stage.team.members[0].is_wanted = lambda: False  # type: ignore[method-assign]
    stage.kill("c")
    stage.until(lambda: stage.count(1) == 20)
    assert stage.team.received.keys() == set(texts)


def test_what_is_finished_above_the_positions_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, "ac", quiet=1)
    stage.publish(20)
    stage.until(lambda: stage.count(0, 1) == 20)
    stage.run(0.5)
    party = stage.team.members[1]
    party.home = stage.names["b"]
    party.client.on_connected = party.client._subscribe
    stage.kill("c")
    stage.run(3.0)
    texts = stage.publish(5)
    stage.until(lambda: all(stage.team.received[text] for text in texts))
    stage.run(1.0)
    assert stage.team.received == Counter(stage.world.checks.stored)


def test_nothing_is_taken_from_before_the_last_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, "a")
    process = stage.world.hosts[stage.names["a"]].process
    assert process is not None
    shares = process.cluster_node.groups.agent
    home = partition_of(FILTER.encode(), 4)
    leader, epoch, number = shares._reported[home]
    message = StoredMessage(b"t/0", b"x", 1, False, b"", -1, 0, b"pub")
    message.partition, message.offset = 0, 99
    for wrong in ((epoch, number - 1), (epoch - 1, number)):
        shares.assigned(leader, Assign(home, *wrong, FILTER, [message]))
    shares.assigned(stage.names["b"], Assign(home, epoch, number, FILTER, [message]))
    assert not shares.assignments[FILTER].assigned
    shares.assigned(leader, Assign(home, epoch, number, FILTER, [message]))
    assert list(shares.assignments[FILTER].assigned) == [(0, 99)]


def test_what_no_record_of_its_session_tells_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another node had the session when the record came."""
    stage = Stage(monkeypatch, "a", 2, clean=False)
    process = stage.world.hosts[stage.names["a"]].process
    assert process is not None
    shares = process.cluster_node.groups.agent
    share = shares.assignments[FILTER]
    share.assigned[(0, 99)] = None
    shares.note_session_record(FILTER, process.state.sessions["m0"], (0, 99))
    stage.run(0.1)
    assert (0, 99) not in share.assigned
    assert (0, 99) not in share.finished


def test_order_for_the_only_member(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team()

    def parties(world: World) -> list[Party]:
        return [member(world, team, "m", 1), *publishers(world)]

    play(monkeypatch, 1, Settings(duration_s=3.0), parties)
    assert not team.members[0].disorder


def cursor(key: str, epoch: int, positions: list[tuple[int, int]], *done: Place) -> Record:
    payload = encode_cursor(positions, {}, list(done))
    return Record(0, CURSOR, client_id=key.encode(), sequence=epoch, payload=payload, offset=0)


def test_where_groups_stand_by_the_log() -> None:
    images = GroupPositions(
        RecordedState(NodeConfig(partitions=2), Journal(2, replicated=True)), {}
    )
    images.apply(cursor(FILTER, 3, [(0, 5), (1, 7)], (0, 6), (0, 9)))
    assert images.positions == {FILTER: [5, 7]}
    finished = [offset for offset in range(12) if images.is_finished(FILTER, 0, offset)]
    assert finished == [0, 1, 2, 3, 4, 6, 9]
    # Of a coordinator before: nothing.
    images.apply(cursor(FILTER, 2, [(0, 8)], (1, 7)))
    images.apply(cursor(FILTER, 2, []))
    assert images.positions == {FILTER: [5, 7]}
    assert not images.is_finished(FILTER, 1, 7)
    images.apply(cursor(FILTER, 4, [(0, 7)]))
    state = RecordedState(NodeConfig(partitions=2), Journal(2, replicated=True))
    again = GroupPositions(state, {FILTER: [7, 7]})
    again.restore(decode_group(encode_session(images.entry(FILTER)), 2))
    assert again.done == images.done
    assert images.done[FILTER].items() == [(0, OffsetRanges([9]))]
    assert again.epochs == images.epochs == {FILTER: 4}
    images.apply(cursor(FILTER, 4, []))
    assert not images.positions


def stored(text: bytes, partition: int, offset: int) -> StoredMessage:
    message = StoredMessage(b"t/0", text, 2, True, b"\x02\0\0\0\x09", 9, 1234 - offset % 7, b"pub")
    message.partition, message.offset = partition, offset
    return message


def test_frames_between_nodes() -> None:
    stock = NodeCapacity("$share/ä/#", 3, 1, 100, [(1, 2)], [(3, 1 << 40)], [5, 6])
    tell = FullReport(7, [(4, 5)], [stock, NodeCapacity("$share/b/#", 0, 0, 0)])
    assert decode_full_report(encode_full_report(tell)) == tell
    assert decode_report_ack(encode_report_ack(7, [(4, 5)])) == (7, [(4, 5)])
    report = AgentReport(4, 5, 7, "$share/ä/#", 3, 1, 100, [(1, 2)], [(3, 4), (3, 5)], [5, 6])
    assert decode_report(encode_report(report)) == report
    messages = [stored(b"x", 1, 2), stored(b"", 3, 1 << 40)]
    assign = Assign(4, 5, 7, "$share/ä/#", messages)
    found = decode_assign(encode_assign(assign))
    for ours, theirs in zip(messages, found.messages, strict=True):
        for name in ("topic", "payload", "qos", "properties", "publisher", "partition", "offset"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert replace(found, messages=messages) == assign


def test_frames_in_the_bytes_of_earlier_versions() -> None:
    """The bytes are those of the encoder that commit 704ebb7 has."""
    stock = NodeCapacity("$share/ä/#", 3, 1, 100, [(1, 2)], [(3, 1 << 40)], [5, 6])
    tell = FullReport(7, [(4, 5)], [stock, NodeCapacity("$share/b/#", 0, 0, 0)])
    written = (
        b'\x01{"number":7,"homes":[[4,5]],"groups":[{"key":"$share/\xc3\xa4/#","members":3,'
        b'"durable":1,"limit":100,"held":[[1,2]],"finished":[[3,1099511627776]],"start":[5,6]},'
        b'{"key":"$share/b/#","members":0,"durable":0,"limit":0,"held":[],"finished":[],'
        b'"start":null}]}'
    )
    assert encode_full_report(tell) == written
    assert decode_full_report(written) == tell
    written = b'\x02{"number": 7, "homes": [[4, 5], [6, 7]]}'
    assert decode_report_ack(written) == (7, [(4, 5), (6, 7)])
    assert json.loads(encode_report_ack(7, [(4, 5), (6, 7)])[1:]) == json.loads(written[1:])
    written = b'\x05{"homes": [[4, 5], [6, 7]]}'
    assert decode_report_request(written) == [(4, 5), (6, 7)]
    assert json.loads(encode_report_request([(4, 5), (6, 7)])[1:]) == json.loads(written[1:])


@pytest.mark.parametrize("length", range(0, 60, 7))
def test_frames_that_are_none(length: int) -> None:
    stock = NodeCapacity("$share/a/#", 3, 1, 100, [(1, 2)], [(3, 4)], [5, 6])
    report = AgentReport(4, 5, 7, "$share/a/#", 3, 1, 100, [(1, 2)], [(3, 4)], [5, 6])
    assign = Assign(4, 5, 7, "$share/a/#", [stored(b"x", 1, 2)])
    frames: list[tuple[Callable[[bytes], object], bytes]] = [
        (decode_full_report, encode_full_report(FullReport(7, [(4, 5)], [stock]))),
        (decode_report_ack, encode_report_ack(7, [(4, 5)])),
        (decode_report, encode_report(report)),
        (decode_assign, encode_assign(assign)),
    ]
    for decode, frame in frames:
        with pytest.raises(BadFrame):
            decode(frame[: min(length, len(frame) - 1)])


def test_places_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, "a")
    process = stage.world.hosts["n1"].process
    assert process is not None
    groups = process.cluster_node.groups
    stock = NodeCapacity(FILTER, 1, 0, 9, [(4, 0)])
    assign = Assign(0, 1, 1, FILTER, [stored(b"x", 4, 0)])
    for frame in (
        encode_full_report(FullReport(1, [(0, 1)], [stock])),
        encode_assign(assign),
        b"",
        b"\x09",
        b"\x01[]",
        b"\x01" + b"[" * 100_000,
    ):
        with pytest.raises(BadFrame):
            groups.handle_frame("n2", frame)

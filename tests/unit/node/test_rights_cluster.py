"""Rights over the nodes of a simulated cluster; the ways on one node are in test_rights.py."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.log.partition import partition_of
from holdfast.log.record import MESSAGE
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.groups.codec import AgentReport, decode_report, encode_report
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode, encode_ack
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.publish import Publish, decode_publish
from holdfast.security.acl import AclFile
from tests.sim.checks import Message
from tests.sim.client import Client
from tests.sim.cores import Cores
from tests.sim.faults import ALL, NETWORK, PROCESSES
from tests.sim.host import Host
from tests.sim.plans import settings_for
from tests.sim.sockets import ClientSocket
from tests.sim.teams import Member, Team, TeamPublisher
from tests.sim.workload import Party
from tests.sim.world import Settings, World

RULES = """\
topic readwrite public/#
user alice
topic readwrite #
user bob
topic readwrite #
user mallory
topic readwrite public/#
"""
NOT_AUTHORIZED = 0x87
ID_NOT_VALID = 0x85
GROUP = "$share/g/#"
LONG_S = 100_000


class Socket(ClientSocket):
    """Of a client that proves its name by certificate."""

    def __init__(self, user: "Peer", host: Host) -> None:
        self.name = user.user
        super().__init__(user, host)

    def _accept(self) -> None:
        super()._accept()
        if self._connection is not None:
            self._connection.certificate_name = self.name


class Peer:
    def __init__(self, stage: "Stage", node: str, user: str, client_id: str) -> None:
        self.stage = stage
        self.user = user
        self.client_id = client_id
        self.reader = FrameReader(1 << 20)
        self.packets: list[object] = []
        self.payloads: list[str] = []
        self.is_closed = False
        self.acknowledges = True
        self.socket = Socket(self, stage.world.hosts[stage.names.get(node, node)])

    def send(self, packet: object) -> None:
        self.socket.write(encode(packet, 5))  # type: ignore[arg-type]

    def received(self, socket: ClientSocket, data: bytes) -> None:
        reader = self.reader
        reader.feed(data)
        while reader.next():
            if reader.first >> 4 == m.PUBLISH:
                publish = decode_publish(
                    reader.buffer, reader.first, reader.start, reader.end, 5, False
                )
                self._arrived(publish)
            else:
                packet = decode(reader.buffer, reader.first, reader.start, reader.end, 5, False)
                if isinstance(packet, m.Ack) and packet.kind == m.PUBREL:
                    self.socket.write(encode_ack(m.PUBCOMP, packet.packet_id, 0, 5))
                else:
                    self.packets.append(packet)

    def _arrived(self, publish: Publish) -> None:
        self.payloads.append(publish.payload.decode())
        if publish.qos and self.acknowledges:
            kind = m.PUBACK if publish.qos == 1 else m.PUBREC
            self.socket.write(encode_ack(kind, publish.packet_id, 0, 5))

    def closed(self, socket: ClientSocket) -> None:
        self.is_closed = True

    def refused(self, packet_id: int) -> None:
        pass

    def answer(self, kind: type) -> object:
        self.stage.until(lambda: any(isinstance(each, kind) for each in self.packets))
        found = next(each for each in self.packets if isinstance(each, kind))
        self.packets.remove(found)
        return found

    def leave(self) -> None:
        self.send(m.Disconnect(0))
        self.socket.close()

    def lose(self) -> None:
        self.socket.close()


class Stage:
    """A cluster that is ready. Node "c" coordinates the group, "a", "b" and the others do not."""

    def __init__(self, nodes: int = 3, replicas: int = 3) -> None:
        settings = Settings(
            nodes=nodes,
            replication_factor=replicas,
            min_insync=min(2, replicas),
            outbox_messages=1000,
            casts=(),
        )
        self.world = World(7, settings)
        for host in self.world.hosts.values():
            host.start()
        self.names: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self.until(lambda: all(each.process is not None for each in self.world.hosts.values()))
        self.change(RULES)
        self.until(
            lambda: all(
                each.process is not None and each.process.is_ready
                for each in self.world.hosts.values()
            )
        )
        self.until(self.world.is_in_sync)
        coordinator = self.leader(GROUP)
        others = [name for name in self.world.hosts if name != coordinator]
        self.names = dict(zip("cabde", [coordinator, *others], strict=False))

    def leader(self, key: str) -> str:
        metadata = self.world.newest_metadata()
        assert metadata is not None
        home = partition_of(key.encode(), self.world.settings.partitions)
        return metadata.partitions[home].leader

    def change(self, rules: str) -> None:
        for host in self.world.hosts.values():
            assert host.process is not None
            host.process.state.acl = AclFile.parse(rules, "acl")
            host.process.state.config.authenticates_users = True

    def until(self, condition: Callable[[], bool], within_s: float = 20.0) -> None:
        deadline = self.world.schedule.now + within_s
        while not condition():
            assert self.world.schedule.now < deadline
            self.run(0.002)

    def run(self, seconds: float) -> None:
        self.world.schedule.run(seconds)

    def login(
        self,
        node: str,
        user: str,
        client_id: str = "",
        *,
        clean: bool = True,
        expiry_s: int = 0,
        will: m.Will | None = None,
        reason: int = 0,
    ) -> Peer:
        peer = Peer(self, node, user, client_id or user)
        fields: dict[int, object] = {17: expiry_s} if expiry_s else {}
        peer.send(m.Connect(5, clean, 0, peer.client_id, will, None, None, fields))  # type: ignore[arg-type]
        connack = peer.answer(m.Connack)
        assert isinstance(connack, m.Connack)
        assert connack.reason == reason, hex(connack.reason)
        return peer

    def subscribe(self, peer: Peer, filter: str, qos: int = 2) -> Peer:
        peer.send(m.Subscribe(9, [m.SubscriptionRequest(filter, qos)]))
        peer.answer(m.Suback)
        self.run(0.1)
        return peer

    def publish(self, peer: Peer, topic: str, count: int, qos: int) -> list[str]:
        texts = []
        for _ in range(count):
            number = next(self._numbers)
            message = Message(f"#{number}", peer.client_id, topic, number, qos)
            message.times_sent = 1
            self.world.checks.published(message)
            texts.append(message.text)
            packet_id = number if qos else 0
            peer.send(
                m.Publish(
                    topic.encode(), message.text.encode(), qos, False, False, packet_id, b"", 0, -1
                )
            )
            if qos == 2:
                peer.answer(m.Ack)
                peer.socket.write(encode_ack(m.PUBREL, packet_id, 0, 5))
        return texts

    def total(self, name: str) -> int:
        return sum(
            getattr(host.process.state.stats, name)
            for host in self.world.hosts.values()
            if host.process is not None
        )

    def has_finished(self, texts: list[str]) -> bool:
        """Does the log say that the group has finished with these?"""
        process = self.world.hosts["n1"].process
        assert process is not None
        groups = process.images.groups
        places = {
            record.payload.decode(): (record.partition, record.offset)
            for batches in self.world.checks.committed
            for batch in batches
            for record in batch.records()
            if record.kind == MESSAGE
        }
        return all(groups.is_finished(GROUP, *places[text]) for text in texts)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.mark.parametrize("qos", [0, 1])
def test_a_client_of_a_cluster_gets_only_what_it_may_read(stage: Stage, qos: int) -> None:
    reader = stage.subscribe(stage.login("a", "mallory"), "#")
    source = stage.login("b", "bob")
    stage.publish(source, "secret/x", 5, qos)
    texts = stage.publish(source, "public/x", 5, qos)
    stage.until(lambda: len(reader.payloads) >= 5)
    stage.run(0.5)
    assert reader.payloads == texts


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("nodes", ["ca", "ac", "ab", "aa"])
def test_a_group_over_nodes_gives_each_record_to_a_member_that_may_read_it(
    stage: Stage, nodes: str, qos: int
) -> None:
    alice = stage.subscribe(stage.login(nodes[0], "alice", expiry_s=LONG_S), GROUP)
    mallory = stage.subscribe(stage.login(nodes[1], "mallory", expiry_s=LONG_S), GROUP)
    source = stage.login("b", "bob")
    secret, public = [], []
    for _ in range(10):
        secret += stage.publish(source, "secret/x", 2, qos)
        public += stage.publish(source, "public/x", 2, qos)
    stage.until(lambda: len(alice.payloads) + len(mallory.payloads) >= 40)
    stage.run(2.0)
    assert sorted(alice.payloads + mallory.payloads) == sorted(secret + public)
    assert not set(mallory.payloads) & set(secret)
    assert mallory.payloads
    assert stage.total("dropped_unreadable") == 0


@pytest.mark.parametrize("nodes", ["c", "a", "ab", "cab"])
def test_a_group_over_nodes_does_not_stand_still_for_what_nobody_may_read(
    stage: Stage, nodes: str
) -> None:
    members = [
        stage.subscribe(stage.login(node, "mallory", f"m{number}", expiry_s=LONG_S), GROUP)
        for number, node in enumerate(nodes)
    ]
    source = stage.login("b", "bob")
    secret = stage.publish(source, "secret/x", 30, 1)
    texts = stage.publish(source, "public/x", 5, 1)
    stage.until(lambda: sum(len(each.payloads) for each in members) >= 5)
    stage.run(1.0)
    assert sorted(text for each in members for text in each.payloads) == texts
    assert stage.total("dropped_unreadable") == 30
    # Finished, in the log too; each node was asked once.
    assert stage.has_finished(secret)
    frames = stage.total("log_reads")
    stage.run(5.0)
    assert stage.total("log_reads") == frames


@pytest.mark.parametrize("node", ["c", "a"])
def test_members_that_may_not_read_take_nothing_from_one_that_is_away(
    stage: Stage, node: str
) -> None:
    alice = stage.subscribe(stage.login("b", "alice", expiry_s=LONG_S), GROUP)
    alice.lose()
    mallory = stage.subscribe(stage.login(node, "mallory", expiry_s=LONG_S), GROUP)
    source = stage.login("b", "bob")
    secret = stage.publish(source, "secret/x", 30, 1)
    public = stage.publish(source, "public/x", 5, 1)
    stage.until(lambda: len(mallory.payloads) >= 5)
    stage.run(2.0)
    assert mallory.payloads == public
    reads = stage.total("log_reads")
    stage.run(5.0)
    assert stage.total("log_reads") == reads
    alice = stage.login("a", "alice", clean=False, expiry_s=LONG_S)
    stage.until(lambda: len(alice.payloads) >= 30)
    stage.run(1.0)
    assert sorted(alice.payloads) == sorted(secret)
    assert stage.total("dropped_unreadable") == 0
    stage.until(lambda: stage.has_finished(secret))


def test_what_is_aside_ends_with_the_session_that_it_is_for(stage: Stage) -> None:
    alice = stage.subscribe(stage.login("b", "alice", expiry_s=LONG_S), GROUP)
    alice.lose()
    stage.subscribe(stage.login("a", "mallory", expiry_s=LONG_S), GROUP)
    secret = stage.publish(stage.login("b", "bob"), "secret/x", 30, 1)
    stage.run(2.0)
    assert stage.total("dropped_unreadable") == 0
    assert not any(stage.has_finished([text]) for text in secret)
    stage.login("a", "alice")
    stage.until(lambda: stage.total("dropped_unreadable") == 30)
    stage.until(lambda: stage.has_finished(secret))


def test_another_coordinator_keeps_to_the_rights_too(stage: Stage) -> None:
    alice = stage.subscribe(stage.login("b", "alice", expiry_s=LONG_S), GROUP)
    alice.lose()
    mallory = stage.subscribe(stage.login("a", "mallory", expiry_s=LONG_S), GROUP)
    secret = stage.publish(stage.login("b", "bob"), "secret/x", 30, 1)
    stage.run(2.0)
    stage.world.hosts[stage.names["c"]].kill(power=False)
    stage.run(8.0)
    assert not mallory.payloads
    alice = stage.login("b", "alice", clean=False, expiry_s=LONG_S)
    stage.until(lambda: len(alice.payloads) >= 30)
    assert sorted(alice.payloads) == sorted(secret)


def test_a_reader_that_acknowledges_nothing_does_not_stop_the_others(stage: Stage) -> None:
    alice = stage.subscribe(stage.login("a", "alice", expiry_s=LONG_S), GROUP)
    alice.acknowledges = False
    mallory = stage.subscribe(stage.login("b", "mallory", expiry_s=LONG_S), GROUP)
    source = stage.login("b", "bob")
    stage.publish(source, "secret/x", 60, 1)
    public = stage.publish(source, "public/x", 5, 1)
    stage.until(lambda: len(mallory.payloads) + len(set(alice.payloads) & set(public)) >= 5)
    assert not set(mallory.payloads) - set(public)
    assert stage.total("dropped_unreadable") == 0


def test_a_coordinator_of_an_older_version_is_not_kept_busy(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what a node denies for given back, and assigns it again at once."""
    monkeypatch.setattr("holdfast.node.groups.group_state.Coordination.deny", lambda *_: None)
    mallory = stage.subscribe(stage.login("a", "mallory", expiry_s=LONG_S), GROUP)
    source = stage.login("b", "bob")
    stage.publish(source, "secret/x", 5, 1)
    public = stage.publish(source, "public/x", 5, 1)
    stage.until(lambda: len(mallory.payloads) >= 5)
    reads = stage.total("log_reads")
    stage.run(5.0)
    assert stage.total("log_reads") - reads < 60
    assert mallory.payloads == public


def test_reports_are_read_by_older_versions_and_read_theirs() -> None:
    plain = AgentReport(3, 4, 5, GROUP, 1, 1, 8, [(0, 1)], [(1, 2)], [7, 8])
    data = encode_report(plain)
    told = replace(plain, denied=[(1, 2)], has_changed=True)
    assert encode_report(told).startswith(data)
    assert decode_report(data) == plain
    assert decode_report(encode_report(told)) == told
    for cut in range(1, len(encode_report(told)) - len(data)):
        with pytest.raises(BadFrame):
            decode_report(encode_report(told)[:-cut])


@pytest.mark.parametrize("nodes", ["ab", "ba", "aa", "ca"])
def test_qos_0_of_a_group_goes_on_to_a_node_with_a_member_that_may_read_it(
    stage: Stage, nodes: str
) -> None:
    alice = stage.subscribe(stage.login(nodes[0], "alice"), GROUP)
    mallory = stage.subscribe(stage.login(nodes[1], "mallory"), GROUP)
    watcher = stage.subscribe(stage.login("c", "bob", "watcher"), "#")
    texts = stage.publish(stage.login("b", "bob"), "secret/x", 10, 0)
    stage.until(lambda: len(watcher.payloads) >= 10)
    stage.run(0.5)
    assert sorted(alice.payloads) == sorted(texts)
    assert not mallory.payloads
    # No plain subscriber gets it once more on the way.
    assert watcher.payloads == texts
    alice.leave()
    stage.run(0.5)
    stage.publish(stage.login("b", "bob", "other"), "secret/x", 10, 0)
    stage.run(1.0)
    assert not mallory.payloads
    assert stage.total("dropped_unreadable") == 10


@pytest.mark.parametrize("node", ["a", "b", "c"])
def test_a_will_of_a_client_of_a_cluster_is_asked_for_again(stage: Stage, node: str) -> None:
    """Whichever node leads the home of the session."""
    reader = stage.subscribe(stage.login("b", "bob"), "#")
    will = m.Will("secret/x", b"will", 1, True)
    stage.login(node, "mallory", will=will, reason=NOT_AUTHORIZED)
    alice = stage.login(node, "alice", will=will)
    stage.change(RULES.replace("user alice\ntopic readwrite #\n", ""))
    alice.lose()
    stage.until(lambda: stage.total("wills_denied") == 2)
    stage.run(3.0)
    assert stage.total("wills_denied") == 2
    assert not reader.payloads
    stage.until(lambda: all("alice" not in images(host) for host in stage.world.hosts.values()))


def images(host: Host) -> dict[str, object]:
    assert host.process is not None
    return dict(host.process.images.state.sessions)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("other", ["mallory", ""])
@pytest.mark.parametrize("node", ["a", "b", "c"])
def test_a_session_of_a_cluster_is_its_users(
    stage: Stage, node: str, other: str, recorded: bool
) -> None:
    expiry_s = LONG_S if recorded else 0
    alice = stage.subscribe(stage.login("a", "alice", "dev1", expiry_s=expiry_s), "public/#")
    for clean in (False, True):
        stage.login(node, other, "dev1", clean=clean, expiry_s=expiry_s, reason=ID_NOT_VALID)
    assert stage.total("sessions_denied") == 2
    assert not alice.is_closed
    texts = stage.publish(stage.login("b", "bob"), "public/x", 3, 1)
    stage.until(lambda: alice.payloads == texts)
    if recorded:
        alice.lose()
        stage.run(1.0)
        stage.login(node, other, "dev1", expiry_s=expiry_s, reason=ID_NOT_VALID)
    # Its user goes on with it, anywhere.
    stage.login("b", "alice", "dev1", clean=False, expiry_s=expiry_s)
    stage.until(lambda: alice.is_closed or recorded)


def test_another_leader_knows_whose_sessions_are(stage: Stage) -> None:
    """Also of those that no record tells of."""
    stage.login("a", "alice", "dev1")
    stage.login("a", "alice", "dev2", expiry_s=LONG_S)
    # Until all nodes vote.
    stage.run(3.0)
    stage.world.hosts[stage.names["c"]].kill(power=False)
    stage.run(8.0)
    stage.login("b", "mallory", "dev1", reason=ID_NOT_VALID)
    stage.login("b", "mallory", "dev2", reason=ID_NOT_VALID)


def test_a_connect_of_another_user_does_not_end_one_under_way(stage: Stage) -> None:
    alice = Peer(stage, "a", "alice", "dev1")
    mallory = Peer(stage, "a", "mallory", "dev1")
    for peer in (alice, mallory):
        fields: dict[int, object] = {17: LONG_S}
        peer.send(m.Connect(5, True, 0, "dev1", None, None, None, fields))  # type: ignore[arg-type]
    reasons = []
    for peer in (alice, mallory):
        connack = peer.answer(m.Connack)
        assert isinstance(connack, m.Connack)
        reasons.append(connack.reason)
    assert sorted(reasons) == [0, ID_NOT_VALID]


# For clients with an "s" in their ids.
SIM_RULES = "topic readwrite #\ntopic deny s/1\n"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_a_group_loses_nothing_that_a_member_may_read(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Members that come and go, nodes and links that fail; the checks are those of the simulator's
    cast of groups, with members that may read a half of it only."""
    begin = Cores.__init__

    def with_rules(self: Cores, *arguments: object) -> None:
        begin(self, *arguments)  # type: ignore[arg-type]
        self.state.acl = AclFile.parse(SIM_RULES, "acl")

    monkeypatch.setattr(Cores, "__init__", with_rules)
    readers = AclFile.parse("topic readwrite #\n", "acl")
    for_client = AclFile.for_client

    def by_name(self: AclFile, username: str | None, client_id: str) -> object:
        return for_client(readers if "s" not in client_id else self, username, client_id)

    monkeypatch.setattr(AclFile, "for_client", by_name)
    strangers: list[Member] = []

    def play(world: World) -> list[Party]:
        team = Team(world, "$share/g/s/#", 1 + seed % 2)
        found: list[Party] = [
            Member(world, team, "r1", 5),
            Member(world, team, "r2", 4),
            Member(world, team, "s1", 5),
            Member(world, team, "s2", 4, clean=True),
        ]
        for each in found[2:]:
            assert isinstance(each, Member)
            strangers.append(each)
        received = team.received

        def check(member: Member, packet: m.Publish) -> None:
            if member in strangers and packet.topic == b"s/1":
                world.checks.fail(f"{member.client.name} has received {packet.payload!r}")
            received(member, packet)

        monkeypatch.setattr(team, "received", check)
        return [*found, TeamPublisher(world, Client(world, "p5", 5))]

    monkeypatch.setattr("tests.sim.world.parties", play)
    faults = (ALL, PROCESSES, NETWORK)[seed % 3]
    world = World(seed, replace(settings_for(seed, 3, faults), mean_s=0.8))
    world.run()
    assert len(world.checks.stored) > 50
    for host in world.hosts.values():
        assert host.process is not None
        assert host.process.state.stats.dropped_unreadable == 0


QUEUE = "$share/$queue/public/#"


@pytest.mark.parametrize("home", ["alice", "bob", ""])
def test_the_first_record_of_a_queue_decides_whether_its_members_need_history(home: str) -> None:
    """The user at the leader of the queue's home partition begins it. If neither is there, one of
    them does."""
    stage = Stage()
    stage.change(RULES.replace("user bob", "topic history public/#\nuser bob"))
    leader = stage.leader(QUEUE)
    others = [name for name in stage.world.hosts if name != leader]
    nodes = {each: leader if each == home else others.pop() for each in ("alice", "bob")}
    peers = {user: stage.login(node, user) for user, node in nodes.items()}
    stage.publish(stage.login(leader, "mallory"), "public/x", 5, 1)
    stage.run(1.0)
    start = {0x26: [("stream-offset", "earliest")]}
    request = m.SubscriptionRequest("$queue/public/#", 1)
    packets = {
        "bob": m.Subscribe(1, [request]),
        "alice": m.Subscribe(1, [request], start),  # type: ignore[arg-type]
    }
    # The way of a packet takes another time with each seed.
    if home:
        peers[home].send(packets.pop(home))
        stage.run(0.01)
    for user, packet in packets.items():
        peers[user].send(packet)
    answers = {user: peer.answer(m.Suback) for user, peer in peers.items()}
    stage.run(2.0)
    process = stage.world.hosts[leader].process
    assert process is not None
    is_past = process.state.recorded.queues[QUEUE].is_past
    if home:
        assert is_past == (home == "alice")
    assert answers["alice"] == m.Suback(1, [1])
    assert answers["bob"] == m.Suback(1, [NOT_AUTHORIZED if is_past else 1])
    assert peers["bob"].payloads == []
    assert len(peers["alice"].payloads) == (5 if is_past else 0)

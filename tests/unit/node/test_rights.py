"""Every way by which a message comes to a client, or from one into the log, with a client that may
not. `tests/unit/test_rights_gate.py` keeps the list of ways complete."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.log import record as log_record
from holdfast.log.batch_builder import BatchBuilder
from holdfast.node import federation_session as federating
from holdfast.node.admission.client_rights import TOPIC_BYTES, TOPICS_BYTES_MAX, Rights
from holdfast.node.admission.explanation import explain, known_rights
from holdfast.node.config import NodeConfig
from holdfast.node.connections.reauthorize import STEPS_PER_CLOSE, Reauthorization
from holdfast.node.delivery.retained import send_late_retained
from holdfast.node.effects import ReadLog
from holdfast.node.groups.groups import Groups
from holdfast.node.node_state import STEPS_AT_ONCE
from holdfast.node.rights import replace_rules
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.message import Message
from holdfast.node.sys_topics import publish_own
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.topics.names import matches
from holdfast.security.acl import READ, AclFile
from holdfast.security.filter_verdict import verdict_on_filter
from tests.support.node_bench import NodeBench, Peer

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
WEEK_S = 7 * 86400


class Bench(NodeBench):
    """Users prove their names by certificate. `rules` are for processes to come, too."""

    def __init__(
        self, rules: str = RULES, *, proves: bool = True, qos0_logged: list[str] | None = None
    ) -> None:
        self.rules = rules
        config = NodeConfig(
            partitions=4,
            sys_interval_s=0,
            authenticates_users=proves,
            qos0_logged=qos0_logged or [],
        )
        super().__init__(config)

    def prepare(self) -> None:
        self.change(self.rules)

    def change(self, rules: str) -> None:
        self.rules = rules
        self.node.state.acl = AclFile.parse(rules, "acl")

    def login(
        self,
        user: str,
        client_id: str = "",
        version: int = 5,
        *,
        clean: bool = True,
        expiry_s: int = 0,
        window: int = 0,
        will: m.Will | None = None,
    ) -> Peer:
        peer = self.peer(version)
        peer.connection.certificate_name = user
        fields: dict[int, object] = {17: expiry_s} if version >= 5 and expiry_s else {}
        if window:
            fields[33] = window
        packet = m.Connect(version, clean, 0, client_id or user, will, None, None, fields)  # type: ignore[arg-type]
        peer.send(packet)
        return peer

    def restart(self, rules: str) -> None:
        """All memory is lost, and the rules are others."""
        self.rules = rules
        self.crash()


def connack(peer: Peer) -> m.Connack:
    (found,) = peer.take(m.Connack)
    assert isinstance(found, m.Connack)
    return found


def publication(
    topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, packet_id: int = 1
) -> m.Publish:
    return m.Publish(topic.encode(), payload, qos, retain, False, packet_id * (qos > 0), b"", 0, -1)


def subscribe(peer: Peer, *filters: str, qos: int = 2) -> None:
    peer.send(m.Subscribe(9, [m.SubscriptionRequest(each, qos) for each in filters]))
    assert peer.take(m.Suback)


def subscribe_from(peer: Peer, filter: str, qos: int) -> None:
    peer.send(m.Subscribe(9, [m.SubscriptionRequest(f"$stream/@earliest/{filter}", qos)]))


def acknowledge(peer: Peer) -> None:
    """Everything of QoS 1 that has arrived."""
    for each in peer.received:
        if isinstance(each, m.Publish) and each.qos == 1:
            peer.send_bytes(encode_ack(m.PUBACK, each.packet_id, 0, peer.version))


def payloads(peer: Peer) -> list[bytes]:
    acknowledge(peer)
    return peer.payloads()


# ------------------------------------------------------------------------------------------- reads


def live(bench: Bench, user: str, filter: str, qos: int) -> list[bytes]:
    reader = bench.login(user)
    subscribe(reader, filter)
    bench.login("alice", "source").send(
        publication("secret/x", b"secret", qos),
        publication("public/x", b"public", qos, packet_id=2),
    )
    bench.settle()
    return payloads(reader)


def from_the_log(bench: Bench, user: str, filter: str, qos: int) -> list[bytes]:
    reader = bench.login(user, expiry_s=WEEK_S)
    subscribe(reader, filter)
    reader.lose()
    bench.login("alice", "source").send(
        publication("secret/x", b"secret", qos),
        publication("public/x", b"public", qos, packet_id=2),
    )
    bench.settle()
    reader = bench.login(user, clean=False, expiry_s=WEEK_S)
    bench.settle()
    return payloads(reader)


def from_the_log_after_a_crash(bench: Bench, user: str, filter: str, qos: int) -> list[bytes]:
    reader = bench.login(user, expiry_s=WEEK_S)
    subscribe(reader, filter)
    reader.lose()
    bench.login("alice", "source").send(
        publication("secret/x", b"secret", qos),
        publication("public/x", b"public", qos, packet_id=2),
    )
    bench.settle()
    bench.restart(bench.rules)
    reader = bench.login(user, clean=False, expiry_s=WEEK_S)
    bench.settle()
    return payloads(reader)


def retained(bench: Bench, user: str, filter: str, qos: int) -> list[bytes]:
    bench.login("alice", "source").send(
        publication("secret/x", b"secret", qos, retain=True),
        publication("public/x", b"public", qos, retain=True, packet_id=2),
    )
    bench.settle()
    reader = bench.login(user)
    subscribe(reader, filter)
    return sorted(payloads(reader), reverse=True)


def retained_late(bench: Bench, user: str, filter: str, qos: int) -> list[bytes]:
    reader = bench.login(user)
    subscribe(reader, filter)
    for topic, payload in (("secret/x", b"secret"), ("public/x", b"public")):
        message = Message(topic.encode(), payload, qos, True, b"", -1, bench.wall_us, b"")
        message.partition = message.offset = 0
        send_late_retained(bench.node.state, topic, message)
    bench.run()
    return payloads(reader)


def federated(bench: Bench, user: str, filter: str, qos: int) -> list[bytes]:
    reader = bench.login(user)
    subscribe(reader, filter)
    state = bench.node.state
    for number, name in enumerate(("secret", "public"), 1):
        message = Message(f"{name}/x".encode(), name.encode(), qos, False, b"", -1, 0, b"f")
        assert federating.publish(state, message, b"f", 0, number, lambda _: None)
    bench.settle()
    return payloads(reader)


def by_a_will(bench: Bench, user: str, filter: str, qos: int) -> list[bytes]:
    reader = bench.login(user)
    subscribe(reader, filter)
    for name in ("secret", "public"):
        will = m.Will(f"{name}/x", name.encode(), qos, False)
        bench.login("alice", "source", will=will).lose()
    bench.settle()
    return payloads(reader)


def of_the_broker(bench: Bench, user: str, filter: str, qos: int) -> list[bytes]:
    reader = bench.login(user)
    subscribe(reader, filter)
    publish_own(bench.node.state, b"secret/x", b"secret", False)
    publish_own(bench.node.state, b"public/x", b"public", False)
    bench.run()
    return payloads(reader)


Way = Callable[[Any, str, str, int], list[bytes]]
WAYS: list[Way] = [live, retained, retained_late, federated, by_a_will, of_the_broker]
SHARED_WAYS: list[Way] = [live, federated, by_a_will, of_the_broker]


LOG_WAYS: list[Way] = [from_the_log, from_the_log_after_a_crash]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_gets_only_what_it_may_read(way: Way, qos: int) -> None:
    assert way(Bench(), "alice", "#", qos) == [b"secret", b"public"]
    bench = Bench()
    assert way(bench, "mallory", "#", qos) == [b"public"]
    assert bench.node.state.stats.reads_denied == 1
    assert way(Bench(), "mallory", "secret/#", qos) == []


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("way", SHARED_WAYS)
def test_a_member_of_a_group_gets_only_what_it_may_read(way: Way, qos: int) -> None:
    assert way(Bench(), "alice", "$share/g/#", qos) == [b"secret", b"public"]
    assert way(Bench(), "mallory", "$share/g/#", qos) == [b"public"]
    assert way(Bench(), "mallory", "$share/g/secret/#", qos) == []


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("way", LOG_WAYS)
@pytest.mark.parametrize("share", ["", "$share/g/"])
def test_a_client_gets_from_the_log_only_what_it_may_read(way: Way, share: str, qos: int) -> None:
    assert way(Bench(), "alice", f"{share}#", qos) == [b"secret", b"public"]
    assert way(Bench(), "mallory", f"{share}#", qos) == [b"public"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_replay_brings_only_what_the_client_may_read(qos: int) -> None:
    """The past is a right of its own: `history`, for what the client may read."""
    rules = RULES + "user mallory\ntopic history public/#\ntopic history secret/#\n"
    bench = Bench()
    bench.restart(rules)
    source = bench.login("alice", "source")
    for name in ("secret", "public"):
        source.send(publication(f"{name}/x", name.encode(), 1, packet_id=1))
        bench.settle()
    reader = bench.login("mallory")
    subscribe_from(reader, "public/#", qos)
    subscribe_from(reader, "secret/#", qos)
    bench.settle()
    assert [each.reasons for each in reader.take(m.Suback)] == [[qos], [qos]]
    assert payloads(reader) == [b"public"]
    assert bench.node.state.stats.reads_denied == 1
    for filter in ("#", "+/x"):
        subscribe_from(reader, filter, qos)
        assert [each.reasons for each in reader.take(m.Suback)] == [[0x87]]
    other = bench.login("alice")
    subscribe_from(other, "public/#", qos)
    assert [each.reasons for each in other.take(m.Suback)] == [[0x87]]


@pytest.mark.parametrize("logged", [[], ["#"]])
@pytest.mark.parametrize("is_past", [False, True], ids=["at the tail", "behind a replay"])
def test_a_replaying_client_gets_live_qos0_only_of_what_it_may_read(
    logged: list[str], is_past: bool
) -> None:
    rules = RULES + "user mallory\ntopic history public/#\ntopic history secret/#\n"
    bench = Bench(rules, qos0_logged=logged)
    source = bench.login("alice", "source")
    reader = bench.login("mallory")
    if is_past:
        source.send(*(publication("public/x", b"past", 1, packet_id=1 + each) for each in range(9)))
        bench.settle()
    subscribe_from(reader, "public/#", 0)
    subscribe_from(reader, "secret/#", 0)
    if not is_past:
        bench.settle()
    source.send(*(publication(f"{name}/x", name.encode(), 0) for name in ("secret", "public")))
    bench.settle()
    assert payloads(reader) == [b"past"] * 9 * is_past + [b"public"]
    assert bench.node.state.stats.reads_denied > 0


@pytest.mark.parametrize("crashes", [False, True])
def test_what_is_inflight_is_asked_for_again(crashes: bool) -> None:
    """QoS 1: the id is free. QoS 2: the client may have it under this id, so PUBREL frees it."""
    bench = Bench()
    reader = bench.login("alice", expiry_s=WEEK_S)
    subscribe(reader, "#")
    bench.login("bob").send(
        publication("secret/a", b"one", 1, packet_id=1),
        publication("secret/b", b"two", 2, packet_id=2),
        publication("public/c", b"three", 1, packet_id=3),
    )
    bench.settle()
    sent = {each.payload: each.packet_id for each in reader.publishes()}
    assert set(sent) == {b"one", b"two", b"three"}
    rules = RULES.replace("user alice\ntopic readwrite #", "user alice\ntopic readwrite public/#")
    reader.lose()
    bench.settle()
    if crashes:
        bench.restart(rules)
    else:
        bench.change(rules)
    reader = bench.login("alice", clean=False, expiry_s=WEEK_S)
    bench.settle()
    assert connack(reader).session_present
    assert [each.payload for each in reader.publishes()] == [b"three"]
    session = bench.session("alice")
    assert sorted(session.inflight) == sorted((sent[b"two"], sent[b"three"]))
    (pubrel,) = reader.take(m.Ack)
    assert isinstance(pubrel, m.Ack)
    assert (pubrel.kind, pubrel.packet_id) == (m.PUBREL, sent[b"two"])
    reader.send_bytes(encode_ack(m.PUBCOMP, sent[b"two"], 0x92, 5))
    reader.send_bytes(encode_ack(m.PUBACK, sent[b"three"], 0, 5))
    assert not session.inflight
    # The state in the log is the same.
    bench.advance(1)
    bench.crash()
    assert not bench.session("alice").inflight


# ------------------------------------------------------------------------------------------ writes


@pytest.mark.parametrize("topic", ["secret/x", "$SYS", "$SYS/broker/version"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_client_publishes_only_where_it_may(topic: str, qos: int) -> None:
    bench = Bench()
    reader = bench.login("alice")
    subscribe(reader, "#", "$SYS/#")
    writer = bench.login("mallory")
    writer.send(publication(topic, b"x", qos, retain=True))
    bench.settle()
    assert not reader.publishes()
    assert not bench.messages()
    assert bench.node.state.stats.authorizations_denied == 1


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("topic", ["secret/x", "$SYS", "$SYS/broker/version"])
def test_a_will_is_left_only_where_the_client_may_publish(topic: str, version: int) -> None:
    bench = Bench()
    will = m.Will(topic, b"x", 1, True)
    peer = bench.login("mallory", version=version, will=will)
    # The decoder makes this of MQTT 3's return code 5, too.
    assert connack(peer).reason == NOT_AUTHORIZED
    assert peer.connection.closing
    assert bench.find_session("mallory") is None
    assert bench.node.state.stats.wills_denied == 1
    assert any(each.event == "connection_refused" for each in bench.notes)
    if not topic.startswith("$"):
        assert connack(bench.login("alice", will=will)).reason == 0


def test_nobody_leaves_a_will_to_the_brokers_topics_without_rules_either() -> None:
    bench = NodeBench()
    will = m.Will("$SYS/broker/version", b"x", 0, True)
    assert connack(bench.connect("c", will=will)).reason == NOT_AUTHORIZED
    assert connack(bench.connect("c", will=m.Will("t", b"x", 0, True))).reason == 0


def test_a_bridge_comes_in_without_its_will() -> None:
    bench = Bench()
    topic = "$SYS/broker/connection/bridge/state"
    for version in (4, 5):
        bridge = bench.login("alice", version=version, will=m.Will(topic, b"0", 1, True))
        assert connack(bridge).reason == 0
        bridge.lose()
    bench.settle()
    assert bench.node.state.retained.get(topic) is None
    stats = bench.node.state.stats
    assert (stats.wills_denied, stats.wills_published) == (2, 0)


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("delay_s", [0, 10])
def test_a_will_is_asked_for_again_when_it_is_published(delay_s: int, qos: int) -> None:
    """The broker dies with the client, and starts with other rules."""
    bench = Bench()
    will = m.Will("secret/x", b"x", qos, True, {24: delay_s} if delay_s else {})
    bench.login("alice", expiry_s=WEEK_S if delay_s else 0, will=will)
    bench.settle()
    bench.restart(RULES.replace("user alice\ntopic readwrite #\n", ""))
    reader = bench.login("bob")
    subscribe(reader, "#")
    bench.advance(delay_s + 1)
    bench.settle()
    state = bench.node.state
    assert not reader.publishes()
    assert state.retained.get("secret/x") is None
    assert (state.stats.wills_denied, state.stats.wills_published) == (1, 0)
    assert [each.event for each in bench.notes].count("will_denied") == 1
    # Once: it is done in the log as well.
    assert [each.kind for each in bench.records()].count(log_record.WILL) == 1
    bench.restart(RULES)
    bench.advance(delay_s + 1)
    assert bench.node.state.retained.get("secret/x") is None


def test_what_the_federation_brings_under_sys_is_refused() -> None:
    bench = Bench()
    reader = bench.login("alice")
    subscribe(reader, "$SYS/#")
    done: list[bool] = []
    state = bench.node.state
    for qos in (0, 1):
        message = Message(b"$SYS/broker/version", b"fake", qos, True, b"", -1, 0, b"f")
        assert federating.publish(state, message, b"f", 0, 1, lambda _: done.append(True))
        assert federating.retain(state, message, lambda _: done.append(True))
    bench.settle()
    assert done == [True] * 4
    assert not reader.publishes()
    assert state.retained.get("$SYS/broker/version") is None


def test_what_is_remembered_of_a_client_is_bounded() -> None:
    rights = Rights(AclFile.parse("topic read a/#", "acl").for_client(None, "c"), b"")
    for number in range(3000):
        topic = f"a/{number}/" + "x" * 1000
        assert rights.learn_read(topic.encode())
        assert not rights.learn_write(topic.encode(), topic)
        for known in (rights.reads, rights.writes):
            assert known is not None
            assert sum(map(len, known)) + TOPIC_BYTES * len(known) <= TOPICS_BYTES_MAX
    assert rights.reads is not None
    assert len(rights.reads) > 100


# ------------------------------------------------------------------------------------------- names


def test_a_name_that_nobody_can_prove_is_none() -> None:
    """Without authentication the client is an anonymous one."""
    bench = Bench(proves=False)
    reader = bench.login("")
    subscribe(reader, "#")
    peer = bench.peer()
    peer.send(m.Connect(5, True, 0, "c", None, "alice", b"x", {}))
    assert connack(peer).reason == 0
    peer.send(publication("secret/x", b"x"), publication("public/x", b"y", packet_id=2))
    bench.settle()
    assert [each.topic for each in bench.messages()] == [b"public/x"]


def test_a_name_that_is_not_proved_is_refused_where_names_can_be() -> None:
    for bench in (Bench(), Bench(proves=False)):
        listener = ListenerRules("test")
        if bench.config.authenticates_users:
            listener.authentication = ("certificate", "scram")
        else:
            bench.node.state.admission.authenticators["SCRAM-SHA-256"] = lambda: None  # type: ignore[assignment,return-value]
        for name in ("", "device"):
            peer = bench.peer(5, listener)
            peer.connection.certificate_name = name
            peer.send(m.Connect(5, True, 0, "c", None, "alice", b"x", {}))
            assert connack(peer).reason == NOT_AUTHORIZED
            assert not bench.recorded().sessions


def test_a_certificate_proves_its_own_name() -> None:
    bench = Bench()
    for username in (None, "alice"):
        peer = bench.peer()
        peer.connection.certificate_name = "alice"
        peer.send(m.Connect(5, True, 0, "c", None, username, None, {}))
        assert connack(peer).reason == 0
        assert bench.session("c").username == "alice"


# ---------------------------------------------------------------------------------------- sessions


@pytest.mark.parametrize("state", ["connected", "away", "restarted", "from a snapshot"])
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("other", ["mallory", ""])
def test_a_session_is_its_users(state: str, clean: bool, other: str) -> None:
    bench = Bench()
    watcher = bench.login("bob")
    subscribe(watcher, "wills")
    will = m.Will("wills", b"gone", 0, False, {24: 1000})
    alice = bench.login("alice", "dev1", expiry_s=WEEK_S, will=will)
    subscribe(alice, "#")
    bench.settle()
    if state != "connected":
        alice.lose()
        bench.settle()
    if state == "restarted":
        bench.crash()
    elif state == "from a snapshot":
        bench.crash(snapshot=bench.snapshot())
    for version in (5, 4):
        thief = bench.login(other, "dev1", version, clean=clean)
        # The decoder makes this of MQTT 3's return code 2, too.
        assert connack(thief).reason == ID_NOT_VALID
        assert thief.connection.closing
    assert bench.node.state.stats.sessions_denied == 2
    assert bench.node.state.stats.wills_published == 0
    if state == "connected":
        assert not alice.connection.closing
    alice = bench.login("alice", "dev1", clean=False, expiry_s=WEEK_S)
    assert connack(alice).session_present
    assert "#" in bench.session("dev1").subscriptions


def test_a_session_without_an_owner_is_anybodys_and_then_its_users() -> None:
    bench = Bench()
    for user in ("", "", "alice"):
        assert connack(bench.login(user, "dev1", clean=False, expiry_s=WEEK_S)).reason == 0
    for user in ("mallory", ""):
        assert connack(bench.login(user, "dev1", expiry_s=WEEK_S)).reason == ID_NOT_VALID
    # It ends, and the id is free.
    bench.login("alice", "dev1").lose()
    assert connack(bench.login("mallory", "dev1")).reason == 0


def test_a_session_that_an_older_version_wrote_has_no_owner() -> None:
    """It also recorded names that nobody had proved, and does not say which."""
    bench = Bench()
    bench.login("alice", "dev1", expiry_s=WEEK_S).lose()
    bench.settle()
    records = bench.records()
    bench.log = []
    for record in records:
        builder = BatchBuilder(record.partition, record.offset)
        record.payload = record.payload.replace(b',"proved":true', b"")
        builder.add(record)
        bench.log.append(builder.build(0))
    bench.crash()
    assert connack(bench.login("bob", "dev1", clean=False, expiry_s=WEEK_S)).session_present
    assert connack(bench.login("alice", "dev1", clean=False)).reason == ID_NOT_VALID


def test_without_authentication_a_session_is_nobodys() -> None:
    bench = Bench()
    bench.login("alice", "dev1", expiry_s=WEEK_S).lose()
    bench.settle()
    bench.config.authenticates_users = False
    bench.restart(RULES)
    assert connack(bench.login("", "dev1", clean=False)).session_present


# -------------------------------------------------------------------------------------- the groups


def team(bench: Bench, *users: str, expiry_s: int = 0) -> list[Peer]:
    members = [bench.login(user, expiry_s=expiry_s) for user in users]
    for member in members:
        subscribe(member, "$share/g/#")
    return members


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_group_gives_each_record_to_a_member_that_may_read_it(qos: int) -> None:
    bench = Bench()
    alice, mallory = team(bench, "alice", "mallory")
    source = bench.login("bob")
    for number in range(1, 9):
        topic = "secret/x" if number % 2 else "public/x"
        source.send(publication(topic, b"%d" % number, qos, packet_id=number))
    bench.settle()
    got, other = payloads(alice), payloads(mallory)
    assert sorted(got + other) == [b"%d" % number for number in range(1, 9)]
    assert all(int(each) % 2 == 0 for each in other)
    assert other


def test_a_group_does_not_stand_still_for_what_nobody_may_read() -> None:
    bench = Bench()
    (mallory,) = team(bench, "mallory")
    source = bench.login("bob")
    for number in range(1, 2000):
        source.send(publication("secret/x", b"x", packet_id=number))
    source.send(publication("public/x", b"end", packet_id=2000))
    bench.settle()
    assert payloads(mallory) == [b"end"]
    bench.advance(0.3)
    bench.settle()
    assert bench.node.state.stats.dropped_unreadable == 1999


@pytest.mark.parametrize("qos", [0, 1])
def test_many_members_without_rights_are_looked_up_once(qos: int) -> None:
    """And again once a member has come that may read."""
    bench = Bench()
    team(bench, "mallory")
    strangers = [bench.login("mallory", f"m{number}") for number in range(40)]
    for stranger in strangers:
        subscribe(stranger, "$share/g/#")
    source = bench.login("bob")
    source.send(publication("secret/x", b"1", qos))
    bench.settle()
    group = bench.node.state.groups["$share/g/#"]
    assert group.readable == {b"secret/x": False}
    assert group.readable_at == group.changes
    (alice,) = team(bench, "alice")
    source.send(publication("secret/x", b"2", qos, packet_id=2))
    bench.settle()
    assert payloads(alice) == [b"2"]
    assert not any(payloads(stranger) for stranger in strangers)


def test_a_member_that_may_not_read_takes_nothing_from_those_that_are_away() -> None:
    """Not even if more records wait than the coordinator keeps aside. Those aside come last."""
    bench = Bench()
    alice, mallory = team(bench, "alice", "mallory", expiry_s=WEEK_S)
    alice.lose()
    source = bench.login("bob")
    count = 3 * bench.config.outbox_messages
    source.send(publication("public/x", b"first"))
    for number in range(count):
        source.send(publication("secret/x", b"%d" % number, packet_id=number % 1000 + 1))
        if number == 500:
            source.send(publication("public/x", b"second", packet_id=1001))
    bench.settle()
    assert payloads(mallory) == [b"first", b"second"]
    alice = bench.login("alice", clean=False, expiry_s=WEEK_S)
    got: list[bytes] = []
    for _ in range(count):
        before = len(got)
        got += payloads(alice)
        bench.settle()
        bench.advance(0.3)
        if len(got) == before:
            break
    assert sorted(map(int, got)) == list(range(count))
    assert bench.node.state.stats.dropped_unreadable == 0


def test_a_reader_whose_window_is_full_does_not_stop_the_others() -> None:
    bench = Bench()
    alice, mallory = team(bench, "alice", "mallory")
    window = bench.config.inflight_max
    source = bench.login("bob")
    for number in range(1, window + 11):
        source.send(publication("secret/x", b"%d" % number, packet_id=number))
    source.send(publication("public/x", b"end", packet_id=9999))
    bench.settle()
    assert payloads(mallory) == [b"end"]
    assert [int(each) for each in payloads(alice) + payloads(alice)] == [
        *range(1, window + 11),
    ]


def test_what_is_aside_survives_a_crash_and_ends_with_its_last_reader() -> None:
    bench = Bench()
    alice, mallory = team(bench, "alice", "mallory", expiry_s=WEEK_S)
    alice.lose()
    source = bench.login("bob")
    source.send(publication("secret/x", b"secret"), publication("public/x", b"y", packet_id=2))
    bench.settle()
    assert payloads(mallory) == [b"y"]
    bench.advance(1)
    bench.restart(RULES)
    mallory = bench.login("mallory", clean=False, expiry_s=WEEK_S)
    bench.settle()
    payloads(mallory)
    stats = bench.node.state.stats
    bench.advance(1)
    assert stats.dropped_unreadable == 0
    bench.login("alice")
    bench.settle()
    for _ in range(3):
        bench.advance(1)
    assert stats.dropped_unreadable == 1


def test_a_groups_record_that_its_member_may_not_read_any_more_goes_to_another() -> None:
    bench = Bench()
    alice, _ = team(bench, "alice", "bob", expiry_s=WEEK_S)
    bob = bench.session("bob").connection
    assert bob is not None
    source = bench.login("alice", "source")
    source.send(publication("secret/x", b"1"), publication("secret/x", b"2", packet_id=2))
    bench.settle()
    assert len(alice.publishes()) == 1
    bench.advance(1)
    bench.restart(RULES.replace("user alice\ntopic readwrite #", "user alice\ntopic write #"))
    second = bench.login("alice", clean=False, expiry_s=WEEK_S)
    bench.settle()
    assert not second.publishes()
    heir = bench.login("bob", clean=False, expiry_s=WEEK_S)
    bench.settle()
    bench.advance(0.3)
    assert sorted(payloads(heir)) == [b"1", b"2"]


# ------------------------------------------------------------------------------------- other rules

OPEN_RULES = "user alice\ntopic readwrite #\nuser mallory\ntopic readwrite #\n"


def publish_both(bench: Bench, source: Peer, number: int) -> None:
    source.send(
        publication("secret/x", b"secret %d" % number, 1, packet_id=2 * number),
        publication("public/x", b"public %d" % number, 1, packet_id=2 * number + 1),
    )
    bench.settle()


@pytest.mark.parametrize("shared", [False, True])
def test_other_rules_apply_to_subscriptions_that_are_there(shared: bool) -> None:
    bench = Bench(OPEN_RULES)
    reader, source = bench.login("mallory"), bench.login("alice")
    subscribe(reader, "$share/g/#" if shared else "#")
    publish_both(bench, source, 1)
    assert payloads(reader) == [b"secret 1", b"public 1"]
    replace_rules(bench.node.state, AclFile.parse(RULES, "acl"), ())
    bench.settle()
    publish_both(bench, source, 2)
    assert payloads(reader) == [b"public 2"]
    replace_rules(bench.node.state, None, ())
    bench.settle()
    publish_both(bench, source, 3)
    assert payloads(reader)[-2:] == [b"secret 3", b"public 3"]
    replace_rules(bench.node.state, AclFile.parse(RULES, "acl"), ())
    bench.settle()
    publish_both(bench, source, 4)
    assert payloads(reader) == [b"public 4"]


def in_the_outbox(bench: Bench, source: Peer) -> Peer:
    """The window is full."""
    reader = bench.login("mallory", window=1)
    subscribe(reader, "#")
    source.send(publication("public/x", b"first", 1))
    return reader


def behind_a_read(bench: Bench, source: Peer) -> Peer:
    """Live messages that came during a read of the log."""
    reader = bench.login("mallory", window=1)
    source.send(publication("public/x", b"first", 1))
    bench.settle()
    bench.delay_reads = True
    subscribe_from(reader, "#", 1)
    return reader


def of_a_read(bench: Bench, source: Peer) -> Peer:
    """Records that were read, and wait for the window."""
    reader = bench.login("mallory", expiry_s=WEEK_S, window=1)
    subscribe(reader, "#")
    reader.lose()
    source.send(publication("public/x", b"first", 1))
    publish_both(bench, source, 1)
    reader = bench.login("mallory", clean=False, expiry_s=WEEK_S, window=1)
    bench.settle()
    return reader


def in_the_lane(bench: Bench, source: Peer) -> Peer:
    """Live messages beside a replay."""
    source.send(publication("past/x", b"first", 1))
    bench.settle()
    reader = bench.login("mallory", window=1)
    subscribe(reader, "secret/#", "public/#")
    subscribe_from(reader, "past/#", 1)
    bench.settle()
    return reader


def of_qos0(bench: Bench, source: Peer) -> Peer:
    """Messages of QoS 0 that the log does not have wait for a replay."""
    source.send(publication("public/x", b"first", 1), publication("public/x", b"more", 1))
    bench.settle()
    reader = bench.login("mallory", window=1)
    subscribe_from(reader, "#", 1)
    bench.settle()
    source.send(publication("secret/x", b"secret 0", 0), publication("public/x", b"public 0", 0))
    return reader


def inflight(bench: Bench, source: Peer) -> Peer:
    """They were read from the log again, and wait for the window of the new connection."""
    reader = bench.login("mallory", expiry_s=WEEK_S)
    subscribe(reader, "#")
    source.send(publication("public/x", b"first", 1))
    publish_both(bench, source, 1)
    reader.lose()
    reader = bench.login("mallory", clean=False, expiry_s=WEEK_S, window=1)
    bench.settle()
    return reader


def of_a_group(bench: Bench, source: Peer) -> Peer:
    reader = bench.login("mallory", window=1)
    subscribe(reader, "$share/g/#")
    source.send(publication("public/x", b"first", 1))
    return reader


def returned_to_a_group(bench: Bench, source: Peer) -> Peer:
    reader = bench.login("mallory", window=1)
    subscribe(reader, "$share/g/#")
    source.send(publication("public/x", b"first", 1))
    other = bench.login("bob")
    subscribe(other, "$share/g/#")
    publish_both(bench, source, 1)
    other.lose()
    return reader


def retained_page(bench: Bench, source: Peer) -> Peer:
    for name in ("public/first", "secret/x", "public/x"):
        source.send(publication(name, name.encode().replace(b"/", b" "), 1, retain=True))
        bench.settle()
    reader = bench.login("mallory", window=1)
    subscribe(reader, "#", qos=1)
    return reader


Waits = Callable[[Bench, Peer], Peer]
WAITS: list[Waits] = [
    in_the_outbox,
    behind_a_read,
    of_a_read,
    in_the_lane,
    of_qos0,
    inflight,
    of_a_group,
    returned_to_a_group,
    retained_page,
]


@pytest.mark.parametrize("narrows", [True, False])
@pytest.mark.parametrize("waits", WAITS)
def test_what_waits_is_asked_for_again_when_the_rules_change(waits: Waits, narrows: bool) -> None:
    """However the messages wait: what the client may not read any more is not sent."""
    bench = Bench(OPEN_RULES + "user mallory\ntopic history #\n")
    source = bench.login("alice", "source")
    reader = waits(bench, source)
    publish_both(bench, source, 2)
    bench.advance(0.1)
    state = bench.node.state
    if narrows:
        rules = RULES + "user mallory\ntopic read past/#\ntopic history past/#\n"
        replace_rules(state, AclFile.parse(rules, "acl"), ())
        bench.settle()
    bench.delay_reads = False
    for effect in bench.delayed:
        bench._carry_out(effect)
    found: list[bytes] = []
    for _ in range(20):
        found += payloads(reader)
        bench.settle()
    secret = [each for each in found if each.startswith(b"secret")]
    assert bool(secret) != narrows, found
    assert b"public 2" in found
    assert not state.sessions["mallory"].inflight


def test_frames_of_a_read_wait_between_two_slices() -> None:
    """The rules change after the packets of the first records are made."""
    bench = Bench(OPEN_RULES + "user mallory\ntopic history #\n")
    source = bench.login("alice", "source")
    for number in range(1, 300):
        publish_both(bench, source, number)
    reader = bench.login("mallory")
    for number in range(9):
        subscribe(reader, f"secret/{'+' if number % 2 else 'x'}{'/#' * (number > 1)}", qos=0)
    bench.delay_reads = True
    subscribe_from(reader, "#", 0)
    bench.delay_reads = False
    (effect,) = bench.delayed
    assert isinstance(effect, ReadLog)
    bench._carry_out(effect)
    assert bench.node.state.work
    assert not reader.publishes()
    rules = RULES + "user mallory\ntopic history public/#\n"
    replace_rules(bench.node.state, AclFile.parse(rules, "acl"), ())
    bench.settle()
    assert {each.split()[0] for each in payloads(reader)} == {b"public"}


@pytest.mark.parametrize("narrows", [True, False])
def test_what_is_aside_in_a_group_is_asked_for_again_when_the_rules_change(narrows: bool) -> None:
    bench = Bench()
    alice, mallory = team(bench, "alice", "mallory", expiry_s=WEEK_S)
    alice.lose()
    bench.login("bob").send(publication("secret/x", b"secret"))
    bench.settle()
    assert payloads(mallory) == []
    state = bench.node.state
    rules = "topic readwrite public/#\n" if narrows else OPEN_RULES
    recorded = list(bench.recorded().sessions.values())
    replace_rules(state, AclFile.parse(rules, "acl"), recorded)
    bench.settle()
    for _ in range(2):
        bench.advance(0.3)
    assert payloads(mallory) == [b"secret"] * (not narrows)
    assert not state.groups["$share/g/#"].deferred
    assert state.stats.dropped_unreadable == narrows


@pytest.mark.parametrize("narrows", [True, False])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_packets_that_wait_for_the_disk_are_asked_for_again(
    shared: bool, qos: int, narrows: bool
) -> None:
    """The packet id of a QoS 2 message must be in the log first, and later messages wait behind it.
    A disk may take long."""
    bench = Bench(OPEN_RULES + "user mallory\ntopic history #\n")
    source = bench.login("alice", "source")
    reader = bench.login("mallory", expiry_s=WEEK_S)
    subscribe(reader, "public/#")
    if qos:
        subscribe(reader, "$share/g/secret/#" if shared else "secret/#")
    else:
        subscribe_from(reader, "secret/#", 0)
    if shared:
        other = bench.login("bob", expiry_s=WEEK_S)
        subscribe(other, "$share/g/secret/#")
        other.lose()
    bench.auto_commit = False
    source.send(
        publication("public/x", b"public", 2, packet_id=1),
        publication("secret/x", b"secret", max(qos, 1), packet_id=2),
    )
    bench.commit()
    bench.run()
    assert not reader.publishes()
    state = bench.node.state
    if narrows:
        replace_rules(state, AclFile.parse(RULES, "acl"), ())
        bench.run()
    bench.auto_commit = True
    bench.settle()
    bench.advance(0.1)
    found = reader.publishes()
    assert [each.payload for each in found] == [b"public"] + [b"secret"] * (not narrows)
    for each in found:
        kind = m.PUBACK if each.qos == 1 else m.PUBREC
        if each.qos:
            reader.send_bytes(encode_ack(kind, each.packet_id, 0, 5))
    for ack in reader.take(m.Ack):
        assert isinstance(ack, m.Ack)
        reader.send_bytes(encode_ack(m.PUBCOMP, ack.packet_id, 0, 5))
    assert not state.sessions["mallory"].inflight
    assert state.stats.reads_denied == narrows
    if shared and qos:
        other = bench.login("bob", clean=False, expiry_s=WEEK_S)
        bench.settle()
        bench.advance(0.3)
        # At QoS 2 it stays with the session that it was given to.
        assert other.payloads() == [b"secret"] * (narrows and qos == 1)


@pytest.mark.parametrize("event", ["unsubscribes", "may read again", "leaves"])
def test_a_groups_message_that_is_withheld_is_not_forgotten(event: str) -> None:
    """It waits behind a QoS 2 message when the rules change. Its member leaves the group,
    or may read it again, before the message has gone back."""
    bench = Bench(OPEN_RULES)
    source = bench.login("alice", "source")
    reader = bench.login("mallory", expiry_s=WEEK_S)
    subscribe(reader, "public/#")
    subscribe(reader, "$share/g/secret/#", qos=1)
    other = bench.login("bob", expiry_s=WEEK_S)
    subscribe(other, "$share/g/secret/#", qos=1)
    other.lose()
    bench.auto_commit = False
    source.send(
        publication("public/x", b"public", 2, packet_id=1),
        publication("secret/x", b"secret", 1, packet_id=2),
    )
    bench.commit()
    bench.run()
    state = bench.node.state
    replace_rules(state, AclFile.parse(RULES, "acl"), ())
    bench.run()
    bench.auto_commit = True
    bench.settle()
    assert bench.session("mallory").unsent
    if event == "unsubscribes":
        reader.send(m.Unsubscribe(9, ["$share/g/secret/#"]))
    elif event == "leaves":
        reader.lose()
    else:
        replace_rules(state, AclFile.parse(OPEN_RULES, "acl"), ())
    bench.settle()
    bench.advance(0.1)
    if event != "leaves":
        acknowledge(reader)
    bench.advance(0.3)
    other = bench.login("bob", clean=False, expiry_s=WEEK_S)
    bench.settle()
    bench.advance(0.3)
    assert payloads(other) == [b"secret"] * (event != "may read again")
    bench.advance(0.3)
    groups = state.cluster.groups
    assert isinstance(groups, Groups)
    (coordination,) = [
        each for home in groups.coordinator.homes.led.values() for each in home.groups.values()
    ]
    assert not coordination.holders.assigned


def test_other_rules_reach_a_client_that_is_away() -> None:
    bench = Bench(OPEN_RULES)
    reader = bench.login("mallory", expiry_s=WEEK_S)
    subscribe(reader, "#")
    reader.lose()
    replace_rules(bench.node.state, AclFile.parse(RULES, "acl"), ())
    publish_both(bench, bench.login("alice"), 1)
    reader = bench.login("mallory", clean=False, expiry_s=WEEK_S)
    bench.settle()
    assert payloads(reader) == [b"public 1"]


def test_more_sessions_than_one_slice_get_other_rules() -> None:
    bench = Bench(OPEN_RULES)
    readers = [bench.login("mallory", f"reader-{number}") for number in range(STEPS_AT_ONCE + 50)]
    for reader in readers:
        subscribe(reader, "#")
    replace_rules(bench.node.state, AclFile.parse(RULES, "acl"), ())
    # It connects while the job is at work.
    late = bench.login("mallory", "late")
    subscribe(late, "#")
    bench.settle()
    publish_both(bench, bench.login("alice"), 1)
    assert [payloads(reader) for reader in (*readers, late)] == [[b"public 1"]] * (len(readers) + 1)


def test_who_may_not_connect_any_more_leaves() -> None:
    bench = Bench(OPEN_RULES)
    mallory, alice = bench.login("mallory"), bench.login("alice")
    mallory.connection.certificate_name = ""
    counts: list[int] = []
    state = bench.node.state
    state.start_work(Reauthorization(state, lambda username, listener: False, counts.append))
    bench.settle()
    assert counts == [1]
    (packet,) = mallory.take(m.Disconnect)
    assert isinstance(packet, m.Disconnect)
    assert packet.reason == NOT_AUTHORIZED
    assert not alice.take(m.Disconnect)


def test_more_clients_leave_than_one_slice_holds() -> None:
    """Each slice is a turn of the event loop, in which the others go on."""
    bench = Bench(OPEN_RULES)
    many = [bench.login("mallory", f"client-{number}") for number in range(STEPS_AT_ONCE)]
    for each in many:
        each.connection.certificate_name = ""
    alice = bench.login("alice")
    counts: list[int] = []
    state = bench.node.state
    work = Reauthorization(state, lambda username, listener: username == "alice", counts.append)
    done = work.step(state, STEPS_AT_ONCE)
    assert work.has_more
    assert done <= STEPS_AT_ONCE + STEPS_PER_CLOSE
    assert work.count <= STEPS_AT_ONCE // STEPS_PER_CLOSE
    assert counts == []
    state.start_work(work)
    bench.settle()
    assert counts == [len(many)]
    assert not alice.take(m.Disconnect)


EXPLAINED = """topic read public
user alice
topic readwrite plant/#
topic deny plant/safety/#
pattern write devices/%c/#
"""


def explained(bench: Bench, topic: str, action: str, client: str = "alice") -> tuple[str, str]:
    found = explain(known_rights(bench.node.state, client, "alice"), action, topic)
    return found.verdict, found.reason


def test_a_right_is_explained_by_rule_and_line() -> None:
    bench = Bench(EXPLAINED)
    assert explained(bench, "plant/x", "publish") == ("allowed", "acl:3: topic readwrite plant/#")
    assert explained(bench, "plant/safety/x", "subscribe") == (
        "denied",
        "acl:4: topic deny plant/safety/#",
    )
    assert explained(bench, "devices/c9/x", "publish", "c9") == (
        "allowed",
        "acl:5: pattern write devices/%c/#",
    )
    assert explained(bench, "other", "subscribe") == ("denied", "no rule allows it")
    assert explained(bench, "$SYS/x", "publish") == ("denied", "$SYS is the broker's")
    assert explained(bench, "$delayed/5/plant/x", "publish")[1].startswith("acl:3")
    assert explained(bench, "$delayed/x", "publish")[0] == "denied"
    assert explained(bench, "plant/x", "history") == ("denied", "the past: no rule allows it")
    bench.login("bob", "bob")
    asked = known_rights(bench.node.state, "bob", None)
    assert (asked.username, asked.is_connected) == ("bob", True)
    assert explain(asked, "publish", "plant/x").reason == "no rule allows it"
    bench.node.state.acl = None
    assert explained(bench, "x", "publish", "nobody") == ("allowed", "there are no rules")


@pytest.mark.parametrize(
    ("filter", "verdict", "lines"),
    [
        ("plant/#", "partly", [4, 3]),
        ("plant/1/+", "allowed", [3]),
        ("plant/safety/+", "denied", [4]),
        ("$share/g/plant/1/+", "allowed", [3]),
        ("$stream/@earliest/plant/1/+", "denied", []),
        ("public/+", "denied", []),
        ("#", "partly", [4, 3, 5]),
        ("$SYS/#", "denied", []),
        ("devices/+/x", "partly", [5]),
        ("devices/alice/#", "allowed", [5]),
    ],
)
def test_a_filter_is_allowed_denied_or_partly(filter: str, verdict: str, lines: list[int]) -> None:
    bench = Bench(EXPLAINED.replace("pattern write", "pattern read"))
    found = explain(known_rights(bench.node.state, "alice", "alice"), "subscribe", filter)
    assert (found.verdict, [rule.line for rule in found.rules]) == (verdict, lines)


ACCESS = st.sampled_from(["read", "deny"])
LEVELS = st.lists(st.sampled_from(["a", "b", "+"]), min_size=1, max_size=3)
FILTERS = st.builds(
    lambda levels, end: "/".join([*levels, *end]), LEVELS, st.sampled_from([[], [], ["#"]])
)
TOPICS = [
    "/".join(levels) for count in (1, 2, 3, 4) for levels in itertools.product("abc", repeat=count)
]


@given(
    own=st.lists(st.tuples(ACCESS, FILTERS), max_size=5),
    patterns=st.lists(st.tuples(ACCESS, FILTERS), max_size=3),
    filter=FILTERS,
)
def test_the_verdict_on_a_filter_is_that_on_its_topics(
    own: list[tuple[str, str]], patterns: list[tuple[str, str]], filter: str
) -> None:
    """`partly` may be said of a whole, if only several rules together decide it."""
    lines = ["user u", *(f"topic {access} {each}" for access, each in own)]
    lines += [f"pattern {access} {each}" for access, each in patterns]
    rules = AclFile.parse("\n".join(lines), "acl").for_client("u", "c")
    found = verdict_on_filter(rules.in_order(READ, filter), filter)
    decided = {rules.can_read(topic) for topic in TOPICS if matches(filter, topic)}
    if found.verdict != "partly":
        assert decided == {found.verdict == "allowed"}


def test_a_decision_is_what_the_explanation_says() -> None:
    bench = Bench(EXPLAINED)
    peer = bench.login("alice", "c1")
    for topic in ("plant/x", "plant/safety/x", "devices/c1/x", "devices/c2/x", "public"):
        peer.send(publication(topic, b""))
        (ack,) = peer.take(m.Ack)
        assert isinstance(ack, m.Ack)
        asked = known_rights(bench.node.state, "c1", None)
        expected = explain(asked, "publish", topic).verdict == "allowed"
        assert (ack.reason < 0x80) == expected

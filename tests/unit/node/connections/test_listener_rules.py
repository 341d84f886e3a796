"""The rules of a listener: who may connect, the size of packets, and the topics that are seen."""

from typing import Any

import pytest

from holdfast.addresses import plain_address, server_reference
from holdfast.config.listener import Listener
from holdfast.config.schema import Config, Node
from holdfast.io.settings.addresses import client_addresses
from holdfast.node.config import NodeConfig
from holdfast.node.connections.reauthorize import Reauthorization
from holdfast.node.rights import may_read, replace_rules
from holdfast.node.session.connection import CLOSED
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.topics.names import mounted_filter
from holdfast.security.acl import AclFile
from holdfast.security.passwords import PasswordFile
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_publish import publish, subscribe

WEEK_S = 604_800


def rules_of(mount: str = "", **values: object) -> ListenerRules:
    rules = ListenerRules("test")
    rules.mount = mount.encode()
    for name, value in values.items():
        setattr(rules, name, value)
    return rules


A, B = rules_of("a/"), rules_of("b/")


def bench() -> NodeBench:
    return NodeBench(NodeConfig(partitions=4, sys_interval_s=0, has_listener_rights=True))


def connect(
    world: NodeBench,
    client_id: str,
    rules: ListenerRules | None,
    version: int = 5,
    *,
    clean: bool = True,
    expiry_s: int = 0,
    will: m.Will | None = None,
    properties: dict[int, object] | None = None,
    name: str | None = None,
) -> Peer:
    peer = world.peer(version, rules)
    fields = dict(properties or {})
    if expiry_s and version >= 5:
        fields[p.SESSION_EXPIRY_INTERVAL] = expiry_s
    secret = b"x" if name else None
    peer.send(m.Connect(version, clean, 0, client_id, will, name, secret, fields))  # type: ignore[arg-type]
    return peer


def topics_of(peer: Peer) -> list[bytes]:
    return [each.topic for each in peer.publishes()]


def reason(peer: Peer) -> int:
    (packet,) = peer.take(m.Connack)
    assert isinstance(packet, m.Connack)
    return packet.reason


def received(peer: Peer) -> list[tuple[str, bytes]]:
    return [(each.topic.decode(), each.payload) for each in peer.publishes()]


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_clients_of_a_mount_see_their_own_topics_only(version: int, qos: int) -> None:
    world = bench()
    inside = connect(world, "in", A, version)
    other = connect(world, "other", B, version)
    outside = connect(world, "out", None, version)
    for peer in (inside, other, outside):
        peer.send(subscribe("#", qos))
    writer = connect(world, "w", A, version)
    writer.send(publish("t/1", b"from a", qos, 1))
    outside.send(publish("b/t/1", b"from outside", qos, 1))
    outside.send(publish("elsewhere", b"nobody's", qos, 2))
    if qos == 2:
        writer.send_bytes(encode_ack(m.PUBREL, 1, 0, version))
    assert received(inside) == [("t/1", b"from a")]
    assert received(other) == [("t/1", b"from outside")]
    assert sorted(received(outside)) == [
        ("a/t/1", b"from a"),
        ("b/t/1", b"from outside"),
        ("elsewhere", b"nobody's"),
    ]


def test_the_topic_of_the_mount_itself_is_outside() -> None:
    """`a/#` matches `a` too, which is no topic below the mount."""
    world = bench()
    inside = connect(world, "in", A)
    inside.send(subscribe("#", 1))
    connect(world, "out", None).send(publish("a", b"x", 1, 1))
    assert received(inside) == []


@pytest.mark.parametrize(
    ("topic", "seen"), [("a/", ""), ("a/$SYS/broker/version", "$SYS/broker/version")]
)
@pytest.mark.parametrize("retain", [False, True])
def test_no_topic_without_a_name_or_of_the_broker_in_a_mount(
    topic: str, seen: str, retain: bool
) -> None:
    """Clients end the connection at an empty topic name [MQTT-4.7.3-1]. `#` does not match a topic
    that begins with `$` in their eyes [MQTT-4.7.2-1]."""
    world = bench()
    inside = connect(world, "in", A)
    outside = connect(world, "out", None)
    if not retain:
        inside.send(subscribe("#", 1))
    outside.send(publish(topic, b"x", 1, 1, retain=retain))
    if retain:
        inside.send(subscribe("#", 1))
    assert received(inside) == []
    if seen:
        inside.send(publish(seen, b"forged", 1, 2))
        (reply,) = inside.take(m.Ack)
        assert isinstance(reply, m.Ack)
        assert reply.reason == reasons.NOT_AUTHORIZED


@pytest.mark.parametrize("qos", [0, 1])
def test_retained_messages_and_unsubscribe(qos: int) -> None:
    world = bench()
    connect(world, "w", A).send(publish("t", b"kept", qos, 1, retain=True))
    connect(world, "o", None).send(publish("t", b"other", qos, 1, retain=True))
    reader = connect(world, "r", A)
    reader.send(subscribe("+", qos))
    assert received(reader) == [("t", b"kept")]
    reader.send(m.Unsubscribe(7, ["+"], {}))
    (reply,) = reader.take(m.Unsuback)
    assert isinstance(reply, m.Unsuback)
    assert reply.reasons == [reasons.SUCCESS]
    connect(world, "w2", A).send(publish("t", b"later", qos, 1))
    assert received(reader) == []


def test_topic_aliases_are_of_the_topics_that_the_client_sees() -> None:
    world = bench()
    reader = connect(world, "r", A, properties={p.TOPIC_ALIAS_MAXIMUM: 5})
    reader.send(subscribe("#", 0))
    writer = connect(world, "w", A)
    for topic in ("long/topic", ""):
        writer.send(m.Publish(topic.encode(), b"x", 0, False, False, 0, b"", 3, -1))
    first, second = reader.publishes()
    assert (first.topic, second.topic) == (b"long/topic", b"")
    assert first.topic_alias == second.topic_alias == 1


def test_wills_are_below_the_mount() -> None:
    world = bench()
    watcher = connect(world, "watch", None)
    watcher.send(subscribe("#", 1))
    dying = connect(world, "d", A, will=m.Will("gone", b"x", 1, False))
    dying.lose()
    assert received(watcher) == [("a/gone", b"x")]
    for topic in ("", "t/" * 199 + "t"):
        refused = connect(world, "e", A, will=m.Will(topic, b"x", 1, False))
        assert reason(refused) == reasons.TOPIC_NAME_INVALID


def test_a_shared_group_of_a_mount() -> None:
    world = bench()
    members = [connect(world, f"m{number}", A) for number in range(2)]
    for member in members:
        member.send(subscribe("$share/g/t/#", 1))
    stranger = connect(world, "s", B)
    stranger.send(subscribe("$share/g/t/#", 1))
    writer = connect(world, "w", A)
    for number in range(4):
        writer.send(publish("t/x", b"%d" % number, 1, number + 1))
    assert sorted(found for member in members for found in received(member)) == [
        ("t/x", b"%d" % number) for number in range(4)
    ]
    assert received(stranger) == []


def test_inflight_and_waiting_messages_are_sent_again_below_the_mount() -> None:
    world = bench()
    reader = connect(world, "r", A, expiry_s=WEEK_S)
    reader.send(subscribe("#", 1))
    writer = connect(world, "w", A)
    writer.send(publish("t", b"inflight", 1, 1))
    assert received(reader) == [("t", b"inflight")]
    reader.lose()
    writer.send(publish("t", b"waiting", 1, 2))
    world.crash()
    again = connect(world, "r", A, clean=False, expiry_s=WEEK_S)
    assert received(again) == [("t", b"inflight"), ("t", b"waiting")]


def test_a_session_that_comes_to_another_mount_gets_nothing_of_the_former() -> None:
    world = bench()
    reader = connect(world, "r", A, expiry_s=WEEK_S)
    reader.send(subscribe("#", 1))
    writer = connect(world, "w", A)
    writer.send(publish("t", b"inflight", 1, 1))
    reader.lose()
    writer.send(publish("t", b"waiting", 1, 2))
    moved = connect(world, "r", B, clean=False, expiry_s=WEEK_S)
    writer.send(publish("t", b"live", 1, 3))
    assert received(moved) == []
    moved.lose()
    # On a listener without a mount the filters mean what they say.
    whole = connect(world, "r", None, clean=False, expiry_s=WEEK_S)
    writer.send(publish("t", b"last", 1, 4))
    assert ("a/t", b"last") in received(whole)


def test_the_rules_of_a_user_are_about_whole_topics() -> None:
    world = bench()
    reader = connect(world, "r", A)
    reader.send(subscribe("#", 1))
    acl = AclFile.parse("topic write #\ntopic read a/open/#\n", "acl")
    replace_rules(world.node.state, acl, ())
    world.run()
    writer = connect(world, "w", A)
    writer.send(publish("open/1", b"x", 1, 1), publish("closed/1", b"x", 1, 2))
    assert received(reader) == [("open/1", b"x")]


@pytest.mark.parametrize(
    ("filter", "mounted"),
    [
        ("#", "m/#"),
        ("/t", "m//t"),
        ("$SYS/#", "m/$SYS/#"),
        ("$share/g/+/t", "$share/g/m/+/t"),
        ("", ""),
        ("a#", "a#"),
        ("$share/g", "$share/g"),
        ("$share//t", "$share//t"),
    ],
)
def test_filters_of_a_mount(filter: str, mounted: str) -> None:
    assert mounted_filter("m/", filter) == mounted


def test_anonymous_clients_by_listener() -> None:
    world = NodeBench(NodeConfig(partitions=2, sys_interval_s=0, allow_anonymous=False))
    assert reason(connect(world, "a", None)) == reasons.NOT_AUTHORIZED
    open_door = rules_of(allow_anonymous=True)
    guest = connect(world, "b", open_door)
    assert reason(guest) == reasons.SUCCESS
    world.node.state.config.allow_anonymous = True
    assert reason(connect(world, "c", rules_of(allow_anonymous=False))) == reasons.NOT_AUTHORIZED
    # A reload that closes the listener to guests.
    open_door.allow_anonymous = False
    state = world.node.state
    counts: list[int] = []
    state.start_work(Reauthorization(state, lambda username, listener: False, counts.append))
    world.run()
    world.advance(1)
    assert counts == [1]
    assert guest.connection.state == CLOSED


def test_ways_to_prove_a_name_by_listener() -> None:
    config = NodeConfig(
        partitions=2, sys_interval_s=0, allow_anonymous=False, authenticates_users=True
    )
    world = NodeBench(config)
    world.node.state.admission.checks_passwords = True
    world.node.state.admission.authenticators = {"SCRAM-SHA-256": lambda: None}  # type: ignore[dict-item, return-value]
    by_certificate = rules_of(authentication=("certificate",))
    by_password = rules_of(authentication=("password",))
    no_password = connect(world, "a", by_certificate, name="alice")
    assert reason(no_password) == reasons.NOT_AUTHORIZED
    scram = connect(world, "b", by_password, properties={p.AUTHENTICATION_METHOD: "SCRAM-SHA-256"})
    assert reason(scram) == reasons.BAD_AUTHENTICATION_METHOD
    for rules, expected in (
        (by_certificate, reasons.SUCCESS),
        (by_password, reasons.NOT_AUTHORIZED),
    ):
        peer = world.peer(5, rules)
        peer.connection.certificate_name = "alice"
        peer.send(m.Connect(5, True, 0, "c", None, None, None, {}))
        assert reason(peer) == expected


def test_a_name_that_no_client_can_prove_at_a_listener_is_ignored_there() -> None:
    """Another listener's password file does not matter, as in Mosquitto: devices that send some
    name everywhere stay anonymous at the open listener."""
    world = NodeBench(NodeConfig(partitions=2, sys_interval_s=0, authenticates_users=True))
    state = world.node.state
    open_listener = rules_of(allow_anonymous=True)
    peer = connect(world, "a", open_listener, name="device7")
    assert reason(peer) == reasons.SUCCESS
    assert peer.connection.username is None
    closed = rules_of(allow_anonymous=False)
    assert reason(connect(world, "b", closed, name="device7")) == reasons.NOT_AUTHORIZED
    certifying = rules_of(allow_anonymous=True, authentication=("certificate",))
    assert reason(connect(world, "c", certifying, name="device7")) == reasons.NOT_AUTHORIZED
    certified = world.peer(5, open_listener)
    certified.connection.certificate_name = "alice"
    certified.send(m.Connect(5, True, 0, "d", None, "bob", None, {}))
    assert reason(certified) == reasons.NOT_AUTHORIZED
    state.admission.authenticators = {"SCRAM-SHA-256": lambda: None}  # type: ignore[dict-item, return-value]
    assert reason(connect(world, "e", open_listener, name="device7")) == reasons.NOT_AUTHORIZED


def test_rights_by_listener() -> None:
    world = bench()
    state = world.node.state
    state.acl = AclFile.parse("topic readwrite open\n", "acl")
    open_door, own = rules_of(), rules_of()
    own.acl = AclFile.parse("topic readwrite secret\n", "own")
    plain = connect(world, "plain", open_door)
    inside = connect(world, "inside", own, expiry_s=WEEK_S)
    for peer in (plain, inside):
        assert reason(peer) == reasons.SUCCESS
        peer.send(subscribe("#"))
        peer.take()
    for peer in (plain, inside):
        peer.send(publish("open", b"x"), publish("secret", b"x"))
    assert [topics_of(peer) for peer in (plain, inside)] == [[b"open"], [b"secret"]]
    # A will counts by the listener's rules: at CONNECT, and when it is published.
    for topic, expected in (("open", reasons.NOT_AUTHORIZED), ("secret", reasons.SUCCESS)):
        will = m.Will(topic, b"gone", 1, False)
        assert reason(connect(world, f"w-{topic}", own, will=will)) == expected
    leaver = connect(world, "w-leaver", own, will=m.Will("secret", b"gone", 1, False))
    leaver.lose()
    world.run()
    assert topics_of(inside) == [b"secret"]
    # A session that is away keeps the listener of its last connection over a reload.
    inside.lose()
    session = state.sessions.get("inside")
    if session is None:
        # A node of a cluster reads for it when its client is connected again.
        return
    own.acl = AclFile.parse("topic readwrite other\n", "own")
    replace_rules(state, state.acl, ())
    world.run()
    assert [may_read(session, topic) for topic in (b"other", b"secret", b"open")] == [
        True,
        False,
        False,
    ]


def test_users_by_listener() -> None:
    """A file of the listener alone checks passwords, also if the broker has none."""
    config = NodeConfig(
        partitions=2, sys_interval_s=0, allow_anonymous=False, authenticates_users=True
    )
    world = NodeBench(config)
    world.valid_passwords["alice"] = b"x"
    own = rules_of(passwords=PasswordFile.parse("", "own"))
    assert reason(connect(world, "a", own, name="alice")) == reasons.SUCCESS
    bad = reasons.BAD_USER_NAME_OR_PASSWORD
    assert reason(connect(world, "b", own, name="bob")) == bad
    assert reason(connect(world, "c", rules_of(), name="alice")) == reasons.NOT_AUTHORIZED


def test_the_size_of_packets_by_listener() -> None:
    world = bench()
    peer = connect(world, "c", rules_of(packet_bytes_max=2000))
    (packet,) = peer.take(m.Connack)
    assert isinstance(packet, m.Connack)
    assert packet.properties[p.MAXIMUM_PACKET_SIZE] == 2000
    peer.send(publish("t", b"x" * 1900))
    assert not peer.closed
    peer.send(publish("t", b"x" * 2000))
    (left,) = peer.take(m.Disconnect)
    assert isinstance(left, m.Disconnect)
    assert left.reason == reasons.PACKET_TOO_LARGE


@pytest.mark.parametrize(
    ("nodes", "kind", "expected"),
    [
        ("h:1883", "tls", "h:1883"),
        ("h:1883 tcp=h:1883 tls=h:8883", "tls", "h:8883"),
        ("h:1883 tcp=h:1883 tls=h:8883", "tcp", "h:1883"),
        ("h:1883 tcp=h:1883", "wss", ""),
        ("h:1883 tcp=h:1883,old:1883,n:1 tls=n:2", "tls", "old:1883 n:2"),
        ("a:1 tls=a:1,b:1 tls=b:1", "", "a:1 b:1"),
        ("", "tls", ""),
        ("a:1 tcp=a:1 tcp+proxy=lb:1,b:1 tcp=b:1 tcp+proxy=lb:1", "tcp+proxy", "lb:1"),
        ("a:1 tcp=a:1 tcp+proxy=lb:1,b:1 tcp=b:1 tcp+proxy=lb:1", "tcp", "a:1 b:1"),
        ("inside:1 tcp+proxy=", "tcp+proxy", ""),
        ("inside:1 tcp+proxy=", "tcp", ""),
        ("inside:1", "tls+proxy@01234567", ""),
    ],
)
def test_a_server_reference_names_listeners_of_the_same_kind(
    nodes: str, kind: str, expected: str
) -> None:
    assert server_reference(nodes, kind) == expected
    assert plain_address(nodes) == nodes.partition(" ")[0]


@pytest.mark.parametrize(
    ("node", "listeners", "announced"),
    [
        ("", [{}], "10.0.0.1:1883 tcp=10.0.0.1:1883"),
        ("", [{"advertise": "n1:1"}], "n1:1 tcp=n1:1"),
        (
            "",
            [{}, {"port": 1884, "proxies": ["10.0.0.9"], "advertise": "lb:1883"}],
            "10.0.0.1:1883 tcp=10.0.0.1:1883 tcp+proxy=lb:1883",
        ),
        ("", [{"proxies": ["10.0.0.9"]}], "10.0.0.1:1883 tcp+proxy="),
        ("lb:1883", [{"proxies": ["10.0.0.9"]}], "lb:1883 tcp+proxy=lb:1883"),
        (
            "",
            [{"proxies": ["10.0.0.9"]}, {"proxies": ["10.0.0.8"], "advertise": "lb:8"}],
            "10.0.0.1:1883 tcp+proxy=lb:8",
        ),
    ],
)
def test_a_listener_behind_a_proxy_announces_only_the_proxy(
    node: str, listeners: list[dict[str, Any]], announced: str
) -> None:
    """The inside address of such a listener is of no use to clients of the proxy."""
    config = Config(
        node=Node(advertise=node),
        listeners=[Listener(**{"bind": "10.0.0.1", **each}) for each in listeners],
    )
    assert client_addresses(config) == announced


def test_clients_are_sent_to_their_own_kind() -> None:
    world = bench()
    plain, secure = (connect(world, kind, rules_of(kind=kind)) for kind in ("tcp", "tls"))
    world.node.shut_down("h:1883 tcp=h:1883 tls=h:8883")
    world.run()
    for peer, address in ((plain, "h:1883"), (secure, "h:8883")):
        (left,) = peer.take(m.Disconnect)
        assert isinstance(left, m.Disconnect)
        assert left.properties[p.SERVER_REFERENCE] == address

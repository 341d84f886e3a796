"""Maximal and odd packets, in all states of a connection: the core answers, drops or closes, and
raises nothing. What cannot be encoded whole is sent in a smaller form, or not at all."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.node.config import NodeConfig
from holdfast.node.session.additions import Additions, additions_of
from holdfast.node.session.connection import ALIAS_TOPIC_BYTES_MAX
from holdfast.node.session.message import Message
from holdfast.node.session.session import Inflight
from holdfast.node.state.state_records import log_cursor
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode, encode_within
from holdfast.protocol.mqtt.fields import FIELD_BYTES_MAX, VARINT_MAX
from holdfast.protocol.mqtt.publish import Publish
from holdfast.security.enhanced_authentication import ScramAuthenticator
from holdfast.security.scram_file import METHOD, make_credentials
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_publish import acks, publish, subscribe

ANY_SIZE = 268_435_460
LONGEST = "x" * FIELD_BYTES_MAX
TOO_LONG = "x" * (FIELD_BYTES_MAX + 1)
ODD_TEXTS = st.sampled_from(
    ["", "a", "a/b", "x" * 60_000, LONGEST, "é" * 32_767, "\x01" * FIELD_BYTES_MAX, "\ufeff"]
)
ANSWERS: list[m.Answer] = [
    m.Connack(True, 0, {}),
    m.Ack(m.PUBACK, 1, 0x97, {}),
    m.Ack(m.PUBREC, 65_535, 0x97, {}),
    m.Ack(m.PUBREL, 1, 0x92, {}),
    m.Ack(m.PUBCOMP, 1, 0x92, {}),
    m.Suback(65_535, [2] * 100_000, {}),
    m.Unsuback(65_535, [0x11] * 100_000, {}),
    m.Disconnect(0x95, {}),
    m.Auth(0x18, {p.AUTHENTICATION_METHOD: METHOD, p.AUTHENTICATION_DATA: bytes(65_535)}),
]


@pytest.mark.parametrize("packet", ANSWERS, ids=lambda packet: type(packet).__name__)
@pytest.mark.parametrize("version", [4, 5])
def test_an_answer_that_has_no_encoding_is_sent_without_what_makes_it_too_long(
    packet: m.Answer, version: int
) -> None:
    if isinstance(packet, m.Auth) and version < 5:
        return
    packet = replace(packet, properties=dict(packet.properties))
    bare = encode(packet, version)
    packet.properties = {
        **packet.properties,
        p.REASON_STRING: TOO_LONG,
        p.USER_PROPERTY: [(TOO_LONG, LONGEST)],
    }
    assert encode_within(packet, version, ANY_SIZE) == bare


@pytest.mark.parametrize("packet", ANSWERS, ids=lambda packet: type(packet).__name__)
def test_an_answer_fits_or_is_not_sent(packet: m.Answer) -> None:
    """[MQTT-3.1.2-24]"""
    packet = replace(packet, properties=dict(packet.properties))
    for bytes_max in (1, 2, 3, 4, 5, 10, 100, 200_000):
        packet.properties = {**packet.properties, p.REASON_STRING: "why " * 20}
        assert len(encode_within(packet, 5, bytes_max)) <= bytes_max


def test_reason_string_goes_before_user_properties() -> None:
    properties: m.Properties = {p.REASON_STRING: "x" * 50, p.USER_PROPERTY: [("a", "b")]}
    data = encode_within(m.Disconnect(0x95, properties), 5, 20)
    assert data == encode(m.Disconnect(0x95, {p.USER_PROPERTY: [("a", "b")]}), 5)


def messages() -> list[Message]:
    """Around the largest remaining length, for a topic of one byte. The payload costs nothing: the
    system has not given it its pages."""
    found = []
    for spare in range(12):
        payload = bytes(VARINT_MAX - spare)
        found.append(Message(b"t", payload, 1, False, b"", -1, 0, b""))
    return found


def test_a_form_beyond_the_largest_packet_has_no_frame() -> None:
    """The largest message of an MQTT 3 client is one byte too large for MQTT 5."""
    for message in messages():
        rest = VARINT_MAX - len(message.payload)
        for version, fixed in ((4, 5), (5, 6)):
            if rest < fixed:
                assert message.frame(version, 1, False, 1) == b""
            if rest < fixed - 2:
                assert message.frame_qos0(version, False) == b""
                assert message.frame_qos0(version, True) == b""
        if rest < 6 + 6 + 3:
            additions = additions_of(VARINT_MAX)
            special = message.frame_special(5, 1, False, True, 1, 0, additions, b"t", 65_535)
            assert special == b""
    many = Additions(tuple(range(VARINT_MAX - 10, VARINT_MAX)), False, False)
    topic = LONGEST.encode()
    small = Message(topic, b"x", 2, True, b"", 0xFFFFFFFF, 0, b"")
    assert small.frame_special(5, 2, True, True, 65_535, 0, many, topic, 65_535)


def test_what_the_log_has_and_a_client_does_not_take_holds_nothing_up() -> None:
    bench = NodeBench(auto_commit=False)
    away = bench.connect("away", clean=False, expiry_s=1000)
    bench.settle()
    away.send(subscribe("t", 1))
    bench.settle()
    away.lose()
    publisher = bench.connect("pub")
    bench.settle()
    publisher.send(publish("t", b"big" * 100, 1, 1), publish("t", b"small", 1, 2))
    bench.settle()
    assert len(acks(publisher)) == 2
    smaller = {p.MAXIMUM_PACKET_SIZE: 100}
    back = bench.connect("away", clean=False, expiry_s=1000, properties=smaller)
    bench.settle()
    assert back.payloads() == [b"small"]
    assert bench.node.state.stats.dropped_too_large == 1
    assert back.connection.session.tailing


def test_resuming_does_not_keep_the_id_of_what_cannot_be_sent_again() -> None:
    bench = NodeBench()
    peer = bench.connect("c", clean=False, expiry_s=1000, properties={p.RECEIVE_MAXIMUM: 1})
    peer.send(subscribe("t", 1))
    bench.connect("pub").send(publish("t", b"x" * 500, 1, 1), publish("t", b"y", 1, 2))
    assert peer.payloads() == [b"x" * 500]
    peer.lose()
    smaller = {p.RECEIVE_MAXIMUM: 1, p.MAXIMUM_PACKET_SIZE: 100}
    back = bench.connect("c", clean=False, expiry_s=1000, properties=smaller)
    assert back.payloads() == [b"y"]


def test_client_id_too_long_for_a_response_topic() -> None:
    bench = NodeBench(NodeConfig(client_id_bytes=65_535))
    peer = bench.peer()
    asked: m.Properties = {p.REQUEST_RESPONSE_INFORMATION: 1}
    peer.send(m.Connect(5, True, 0, "x" * 65_530, None, None, None, asked))
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason == 0
    assert p.RESPONSE_INFORMATION not in connack.properties


@pytest.mark.parametrize("bytes_max", [1, 4, 5, 12])
def test_a_client_that_takes_no_connack(bytes_max: int) -> None:
    bench = NodeBench()
    peer = bench.connect("c", properties={p.MAXIMUM_PACKET_SIZE: bytes_max})
    answers = peer.take(m.Connack)
    assert peer.closed
    if bytes_max >= 5:
        assert isinstance(answers[0], m.Connack)
        assert answers[0].reason == reasons.PACKET_TOO_LARGE
    else:
        assert answers == []
    assert not bench.node.state.sessions


def test_suback_larger_than_the_client_takes_closes() -> None:
    bench = NodeBench()
    peer = bench.connect("c", properties={p.MAXIMUM_PACKET_SIZE: 64})
    requests = [m.SubscriptionRequest(f"t/{number}", 0) for number in range(100)]
    peer.send(m.Subscribe(1, requests))
    (last,) = peer.take(m.Disconnect)
    assert isinstance(last, m.Disconnect)
    assert last.reason == reasons.PACKET_TOO_LARGE
    assert peer.closed


def test_unknown_method_too_long_for_the_reason() -> None:
    bench = NodeBench()
    properties: m.Properties = {p.AUTHENTICATION_METHOD: "\x01" * 65_535}
    peer = bench.peer()
    peer.send(m.Connect(5, True, 0, "c", None, None, None, properties))
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason == reasons.BAD_AUTHENTICATION_METHOD
    assert peer.closed


def test_nothing_of_connect_is_kept() -> None:
    bench = NodeBench()
    pairs: m.Properties = {p.USER_PROPERTY: [("a", "b")] * 1000}
    peer = bench.peer()
    peer.send(m.Connect(5, True, 0, "c", None, None, None, pairs))
    assert peer.connection.connect is None
    refused = bench.peer()
    refused.send(m.Connect(5, True, 0, "$federation", None, None, None, pairs))
    assert refused.connection.connect is None


def test_an_alias_is_not_used_before_the_client_has_learnt_it() -> None:
    bench = NodeBench(auto_commit=False)
    peer = bench.connect("c", clean=False, expiry_s=1000, properties={p.TOPIC_ALIAS_MAXIMUM: 10})
    bench.settle()
    peer.send(subscribe("t", 2))
    bench.settle()
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"two", 2, 1))
    # Committed; its PUBLISH waits until its packet id is, and those of QoS 0 follow it.
    bench.commit()
    bench.run()
    publisher.send(publish("t", b"one"), publish("t", b"zero"))
    assert peer.publishes() == []
    bench.settle()
    publisher.send(publish("t", b"later"), publish("t", b"last"))
    received = [(each.payload, each.topic) for each in peer.publishes()]
    without_alias = [(each, b"t") for each in (b"two", b"one", b"zero", b"later")]
    assert received == [*without_alias, (b"last", b"")]


def test_a_dropped_message_teaches_no_alias() -> None:
    bench = NodeBench()
    limits: dict[int, object] = {p.TOPIC_ALIAS_MAXIMUM: 10, p.MAXIMUM_PACKET_SIZE: 100}
    peer = bench.connect("c", properties=limits)
    peer.send(subscribe("t"))
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"x" * 200), publish("t", b"y"))
    (received,) = peer.publishes()
    assert received.topic == b"t"


def test_topics_with_an_alias_are_bounded_in_bytes() -> None:
    bench = NodeBench()
    peer = bench.connect("c", properties={p.TOPIC_ALIAS_MAXIMUM: 65_535})
    peer.send(subscribe("#"))
    publisher = bench.connect("pub")
    for number in range(100):
        publisher.send(publish(f"{number}/" + "x" * 5000, b""))
    assert len(peer.publishes()) == 100
    aliases = peer.connection.aliases_out
    assert aliases is not None
    assert 0 < sum(map(len, aliases.by_topic)) == aliases.topic_bytes <= ALIAS_TOPIC_BYTES_MAX


def test_the_cursor_of_a_session_with_all_packet_ids_in_use() -> None:
    """A CURSOR payload has room for 65,535 entries."""
    bench = NodeBench(auto_commit=False)
    bench.connect("c", clean=False, expiry_s=1000)
    bench.settle()
    session = bench.session("c")
    offsets = [(0, offset) for offset in range(70_000, 220_000)]
    for packet_id in range(1, 65_536):
        entry = Inflight(0, packet_id, 1, False)
        session.add_inflight(packet_id, entry)
        session.note_change(packet_id, entry)
    for partition, offset in offsets:
        session.note_done(partition, offset)
    snapshot = bench.snapshot()
    log_cursor(bench.node.state, session, [(0, 65_536)])
    bench.settle()
    for taken in (None, snapshot):
        bench.crash(snapshot=taken)
        found = bench.session("c")
        assert len(found.inflight) == 65_535
        assert found.done == set(offsets)


# Everything, in any order.

IDS = st.integers(1, 3) | st.just(65_535)
FILTERS = st.sampled_from(
    ["#", "+/b", "a/b", LONGEST, "$share/g/#", "$share/g/" + "x" * 65_526, "$SYS/#", "a//b", "a#"]
)
USER_PROPERTIES = st.sampled_from(
    [[], [("", "")], [(LONGEST, LONGEST)] * 2, [("hf-seq", "?")], [("k", "v")] * 1000]
)
RAW_PROPERTIES = st.sampled_from(
    [
        b"",
        b"\x02\xff\xff\xff\xff",
        b"\x02\x00\x00\x00\x00",
        b"\x26\xff\xff" + LONGEST.encode() + b"\xff\xff" + LONGEST.encode(),
        b"\x26\x00\x06hf-seq\x00\x05p:0:1",
        b"\x26\x00\x06hf-seq\x00\x02::",
        b"\x09\xff\xff" + bytes(65_535),
    ]
)


@st.composite
def connects(draw: st.DrawFn) -> m.Connect:
    level = draw(st.sampled_from([3, 4, 5]))
    client_id = draw(st.sampled_from(["", "c", "d", "x" * 65_530, LONGEST, "$share/g/#"]))
    will = None
    if draw(st.booleans()):
        will = m.Will(draw(ODD_TEXTS), draw(st.sampled_from([b"", bytes(65_535)])), 1, True, {})
    properties: m.Properties = {}
    if level == 5:
        for key, values in (
            (p.SESSION_EXPIRY_INTERVAL, [1, 0xFFFFFFFF]),
            (p.RECEIVE_MAXIMUM, [1, 65_535]),
            (p.MAXIMUM_PACKET_SIZE, [1, 5, 20, 100, 70_000]),
            (p.TOPIC_ALIAS_MAXIMUM, [1, 65_535]),
            (p.REQUEST_RESPONSE_INFORMATION, [1]),
            (p.REQUEST_PROBLEM_INFORMATION, [0]),
            (p.AUTHENTICATION_METHOD, [METHOD, LONGEST, "\x01" * 60_000]),
        ):
            if draw(st.integers(0, 3)) == 0:
                properties[key] = draw(st.sampled_from(values))
        if p.AUTHENTICATION_METHOD in properties:
            properties[p.AUTHENTICATION_DATA] = draw(
                st.sampled_from([b"n,,n=u,r=" + b"x" * 65_000, b"n,,n=u,r=abc", bytes(65_535), b""])
            )
        properties[p.USER_PROPERTY] = draw(USER_PROPERTIES)
    username = draw(st.none() | ODD_TEXTS)
    password = draw(st.sampled_from([b"", bytes(65_535)])) if username is not None else None
    clean = draw(st.booleans())
    return m.Connect(level, clean, 65_535, client_id, will, username, password, properties)


@st.composite
def openings(draw: st.DrawFn) -> m.Connect:
    """A CONNECT that is accepted."""
    level = draw(st.sampled_from([4, 5]))
    properties: m.Properties = {}
    if level == 5:
        properties[p.SESSION_EXPIRY_INTERVAL] = draw(st.sampled_from([0, 1, 0xFFFFFFFF]))
        properties[p.MAXIMUM_PACKET_SIZE] = draw(st.sampled_from([100, 70_000, ANY_SIZE]))
        properties[p.TOPIC_ALIAS_MAXIMUM] = draw(st.sampled_from([0, 1, 65_535]))
        properties[p.RECEIVE_MAXIMUM] = draw(st.sampled_from([1, 65_535]))
        if draw(st.booleans()):
            properties[p.AUTHENTICATION_METHOD] = METHOD
    client_id = draw(st.sampled_from(["c", "d", "x" * 65_530]))
    will = draw(st.none() | st.just(m.Will(LONGEST, bytes(65_535), 1, True, {})))
    return m.Connect(level, draw(st.booleans()), 0, client_id, will, None, None, properties)


@st.composite
def publishes(draw: st.DrawFn) -> Publish:
    topic = draw(st.sampled_from(["a/b", "", LONGEST, "é" * 32_767, "$SYS/x", "a/#", "q"]))
    qos = draw(st.integers(0, 2))
    payload = draw(st.sampled_from([b"", b"x", bytes(100_000)]))
    return publish(
        topic,
        payload,
        qos,
        draw(IDS) if qos else 0,
        retain=draw(st.booleans()),
        dup=qos > 0 and draw(st.booleans()),
        properties=draw(RAW_PROPERTIES),
        alias=draw(st.sampled_from([0, 0, 1, 64, 65_535])),
    )


REQUESTS = st.builds(
    m.SubscriptionRequest, FILTERS, st.integers(0, 2), st.booleans(), st.booleans(), st.just(0)
)
PACKETS: st.SearchStrategy[object] = st.one_of(
    publishes(),
    publishes(),
    st.builds(
        m.Subscribe,
        IDS,
        st.lists(REQUESTS, min_size=1, max_size=3),
        st.sampled_from([{}, {p.SUBSCRIPTION_IDENTIFIER: [VARINT_MAX]}]),
    ),
    st.builds(m.Unsubscribe, IDS, st.lists(FILTERS, min_size=1, max_size=3)),
    st.builds(m.Ack, st.sampled_from([4, 5, 6, 7]), IDS, st.sampled_from([0, 0x92, 0x97])),
    st.builds(
        m.Auth,
        st.sampled_from([0x18, 0x19]),
        st.sampled_from(
            [
                {},
                {p.AUTHENTICATION_METHOD: METHOD},
                {p.AUTHENTICATION_METHOD: METHOD, p.AUTHENTICATION_DATA: bytes(65_535)},
            ]
        ),
    ),
    st.just(m.Pingreq()),
    st.builds(m.Disconnect, st.sampled_from([0, 4]), st.just({})),
    connects(),
)
STEPS = st.tuples(
    st.integers(0, 2),
    st.one_of(
        PACKETS,
        PACKETS,
        PACKETS,
        st.binary(max_size=20),
        st.sampled_from(["lose", "commit", "congest", "retention", "time"]),
    ),
)


def new_bench(auto_commit: bool) -> NodeBench:
    config = NodeConfig(
        partitions=2, sys_interval_s=0, outbox_bytes=4096, outbox_messages=3, inflight_max=2
    )
    bench = NodeBench(config, auto_commit=auto_commit)
    credentials = make_credentials("secret", salt=b"salt")
    bench.node.state.admission.authenticators[METHOD] = lambda: ScramAuthenticator(
        lambda user: credentials
    )
    return bench


@settings(max_examples=200)
@given(connects(), st.lists(PACKETS, max_size=2))
def test_no_connect_raises(connect: m.Connect, then: list[object]) -> None:
    bench = new_bench(True)
    peer = bench.peer(connect.protocol_level)
    peer.send(connect)
    send_encodable(peer, then)


def send_encodable(peer: Peer, packets: list[object]) -> None:
    for packet in packets:
        try:
            data = encode(packet, peer.version)  # type: ignore[arg-type]
        except ValueError:
            continue
        if not peer.closed:
            peer.send_bytes(data)


@settings(max_examples=120)
@given(
    st.tuples(openings(), openings(), openings()),
    st.lists(STEPS, min_size=8, max_size=40),
    st.booleans(),
)
def test_nothing_a_client_sends_raises(
    opened: tuple[m.Connect, m.Connect, m.Connect],
    steps: list[tuple[int, object]],
    auto_commit: bool,
) -> None:
    bench = new_bench(auto_commit)
    state = bench.node.state
    peers: list[Peer] = []
    for opening in opened:
        peer = bench.peer(opening.protocol_level)
        peers.append(peer)
        peer.send(opening)
    bench.settle()
    for number, step in steps:
        peer = peers[number]
        if peer.closed:
            peers[number] = peer = bench.peer(opened[number].protocol_level)
            peer.send(opened[number])
        if peer.closed:
            continue
        if step == "lose":
            peer.lose()
        elif step == "commit":
            bench.commit()
            bench.run()
        elif step == "congest":
            peer.connection.congested = not peer.connection.congested
            if not peer.connection.congested:
                state.dirty.append(peer.connection)
                bench.node.handle_writable(peer.connection)
                bench.run()
        elif step == "retention":
            bench.log = []
        elif step == "time":
            bench.advance(5)
        elif isinstance(step, bytes):
            peer.send_bytes(step)
        else:
            send_encodable(peer, [step])
    for each in peers:
        if not each.closed:
            each.lose()
    bench.settle()

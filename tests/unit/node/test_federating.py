"""The broker's own session: what the federation reads from a node and publishes into it, over
crashes at any moment."""

from collections import Counter

from holdfast.node import federation_session as federating
from holdfast.node.config import NodeConfig
from holdfast.node.delivery.acknowledgements import handle_puback, handle_pubcomp, handle_pubrec
from holdfast.node.session.message import Message
from holdfast.node.session.session import FEDERATION, NEVER_EXPIRES, Session
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.mqtt.properties import CONTENT_TYPE, USER_PROPERTY, encode_block
from holdfast.security.acl import AclFile
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_publish import publish, subscribe


class FederationPeer(Peer):
    """The other end of the broker's own session."""

    def __init__(self, bench: NodeBench, *filters: str) -> None:
        self.bench = bench
        self.version = 5
        self.reader = FrameReader(PACKET_BYTES_MAX)
        self.received: list[object] = []
        self.closed = False
        self.connection = federating.connect(bench.node.state, self)
        bench.run()
        if filters:
            federating.subscribe(bench.node.state, self.connection, list(filters))
            bench.run()

    @property
    def session(self) -> Session:
        return self.bench.node.state.sessions[FEDERATION]

    def acknowledge(self, packet_id: int) -> None:
        handle_puback(self.bench.node.state, self.session, packet_id)
        self.bench.run()

    def receive(self, packet_id: int) -> None:
        handle_pubrec(self.bench.node.state, self.connection, self.session, packet_id, 0)
        self.bench.run()

    def complete(self, packet_id: int) -> None:
        handle_pubcomp(self.bench.node.state, self.session, packet_id)
        self.bench.run()


class Arrivals:
    """Publishes as the federation does."""

    def __init__(self, bench: NodeBench) -> None:
        self.bench = bench
        self.done: list[bytes] = []

    def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int,
        sequence: int,
        *,
        epoch: int = 1,
        producer: bytes = b"$fed:o",
        retain: bool = False,
    ) -> bool:
        state = self.bench.node.state
        message = Message(
            topic.encode(), payload, qos, retain, b"", -1, state.wall_us, FEDERATION.encode()
        )
        is_taken = federating.publish(
            state, message, producer, epoch, sequence, lambda _: self.done.append(payload)
        )
        self.bench.run()
        return is_taken


# Out


def test_what_was_acknowledged_to_a_publisher_is_handed_over_after_a_crash() -> None:
    bench = NodeBench()
    FederationPeer(bench, "a/#")
    publisher = bench.connect("p")
    for number in range(1, 31):
        publisher.send(publish(f"a/{number % 4}", b"%d" % number, 1 + number % 2, number))
    bench.crash()
    again = FederationPeer(bench)
    received = []
    while found := again.publishes():
        for each in found:
            received.append((each.topic, each.payload, each.qos))
            (again.receive if each.qos == 2 else again.acknowledge)(each.packet_id)
    for topic in range(4):
        mine = [payload for name, payload, _ in received if name == b"a/%d" % topic]
        assert mine == [b"%d" % number for number in range(1, 31) if number % 4 == topic]
    assert {qos for _, _, qos in received} == {1, 2}
    assert len(received) == 30


def test_what_was_acknowledged_is_not_handed_over_again() -> None:
    bench = NodeBench()
    peer = FederationPeer(bench, "#")
    publisher = bench.connect("p")
    publisher.send(publish("a", b"1", 1, 1), publish("a", b"2", 2, 2), publish("a", b"3", 1, 3))
    one, two, three = peer.publishes()
    peer.acknowledge(one.packet_id)
    peer.receive(two.packet_id)
    bench.advance(1)
    bench.crash()
    again = FederationPeer(bench)
    # PUBREL of the one that was received; the other is sent again.
    assert [each.payload for each in again.publishes()] == [b"3"]
    again.complete(two.packet_id)
    again.acknowledge(three.packet_id)
    bench.advance(1)
    bench.crash()
    assert FederationPeer(bench).publishes() == []


def test_retain_flag_properties_and_quality_go_along() -> None:
    bench = NodeBench()
    peer = FederationPeer(bench, "#")
    fields: Properties = {CONTENT_TYPE: "text/plain", USER_PROPERTY: [("k", "v"), ("k", "w")]}
    properties = encode_block(fields)
    bench.connect("p").send(
        publish("a", b"0", 0, 0, properties=properties),
        publish("a", b"1", 1, 1, properties=properties, retain=True),
        publish("a", b"2", 2, 2, properties=properties),
    )
    found = peer.publishes()
    assert [(each.qos, each.retain) for each in found] == [(0, False), (1, True), (2, False)]
    assert {each.properties for each in found} == {properties}
    # What is retained already is no new publication.
    bench.crash()
    again = FederationPeer(bench, "a")
    assert {each.payload for each in again.publishes()} <= {b"1", b"2"}


def test_own_messages_never_come_out_live_or_from_the_log() -> None:
    bench = NodeBench()
    peer = FederationPeer(bench, "#")
    arrivals = Arrivals(bench)
    for qos in range(3):
        assert arrivals.publish("a", b"%d" % qos, qos, qos + 1)
    assert peer.publishes() == []
    bench.crash()
    again = FederationPeer(bench)
    assert again.publishes() == []
    bench.connect("p").send(publish("a", b"mine", 1, 1))
    assert [each.payload for each in again.publishes()] == [b"mine"]


def test_a_client_gets_neither_the_client_id_nor_the_session() -> None:
    bench = NodeBench()
    peer = FederationPeer(bench, "#")
    thief = bench.connect(FEDERATION, clean=False, expiry_s=100)
    (answer,) = thief.take(m.Connack)
    assert isinstance(answer, m.Connack)
    assert answer.reason == reasons.CLIENT_IDENTIFIER_NOT_VALID
    assert thief.closed
    assert not peer.closed
    bench.connect("p").send(publish("a", b"1", 1, 1))
    assert peer.payloads() == [b"1"]


def test_it_counts_for_no_client() -> None:
    bench = NodeBench()
    state = bench.node.state
    FederationPeer(bench, "#", "a/b")
    values = bench.node.sys_topics.values()
    assert values["clients/total"] == values["clients/connected"] == "0"
    assert values["subscriptions/count"] == values["clients/maximum"] == "0"
    assert state.stats.connections_opened == 0
    assert state.client_sessions() == 0
    federating.unsubscribe(state, state.sessions[FEDERATION].connection, ["#"])  # type: ignore[arg-type]
    bench.run()
    assert state.subscription_count == 0
    bench.connect("c")
    assert state.client_sessions() == 1


def test_limits_for_clients_do_not_apply() -> None:
    config = NodeConfig(
        partitions=4,
        sys_interval_s=0,
        allow_anonymous=False,
        session_expiry_s_max=10,
        keep_alive_s_max=10,
        wildcard_available=False,
        subscriptions_per_session=1,
    )
    bench = NodeBench(config)
    bench.node.state.acl = AclFile.parse("user nobody\ntopic read x\n", "acl")
    peer = FederationPeer(bench, "#", "a/b", "a/+")
    assert peer.session.expiry_s == NEVER_EXPIRES
    assert len(peer.session.subscriptions) == 3
    bench.advance(1000)
    assert not peer.closed
    bench.crash()
    bench.advance(1000)
    assert FEDERATION in bench.node.state.recorded.sessions


def test_end_forgets_what_an_earlier_run_has_left() -> None:
    bench = NodeBench()
    FederationPeer(bench, "#")
    bench.connect("p").send(publish("a", b"1", 1, 1))
    bench.crash()
    assert federating.has_session(bench.node.state)
    federating.end(bench.node.state)
    bench.run()
    assert not federating.has_session(bench.node.state)
    bench.crash()
    assert FEDERATION not in bench.node.state.recorded.sessions


# In


def test_a_message_that_comes_again_is_stored_once_at_both_qualities() -> None:
    bench = NodeBench()
    subscriber = bench.connect("s")
    subscriber.send(subscribe("a", 2))
    arrivals = Arrivals(bench)
    for sequence, qos in ((1, 1), (2, 2), (3, 2)):
        assert arrivals.publish("a", b"%d" % sequence, qos, sequence)
    bench.crash()
    subscriber = bench.connect("s")
    subscriber.send(subscribe("a", 2))
    # As after a crash: from the first that was not confirmed on.
    for sequence, qos in ((2, 2), (3, 2), (4, 1)):
        assert arrivals.publish("a", b"%d" % sequence, qos, sequence)
    assert subscriber.payloads() == [b"4"]
    assert [record.payload for record in bench.messages()] == [b"1", b"2", b"3", b"4"]
    assert arrivals.done == [b"1", b"2", b"3", b"2", b"3", b"4"]
    # An older life says nothing new, a newer one begins anew.
    assert arrivals.publish("a", b"old", 1, 9, epoch=0)
    assert arrivals.publish("a", b"new", 1, 1, epoch=2)
    assert subscriber.payloads() == [b"new"]


def test_done_waits_for_the_disk() -> None:
    bench = NodeBench(auto_commit=False)
    arrivals = Arrivals(bench)
    assert arrivals.publish("a", b"1", 1, 1)
    assert arrivals.publish("a", b"1 again", 1, 1)
    assert arrivals.done == []
    bench.commit()
    assert arrivals.done == [b"1", b"1 again"]


def test_what_the_disk_did_not_have_comes_in_again() -> None:
    bench = NodeBench(auto_commit=False)
    arrivals = Arrivals(bench)
    assert arrivals.publish("a", b"1", 2, 1)
    bench.crash()
    assert arrivals.publish("a", b"1", 2, 1)
    bench.settle()
    assert [record.payload for record in bench.messages()] == [b"1"]
    assert arrivals.done == [b"1"]


def test_without_space_nothing_is_taken_and_nothing_is_lost() -> None:
    bench = NodeBench()
    arrivals = Arrivals(bench)
    bench.node.state.disk_full = True
    assert not arrivals.publish("a", b"1", 1, 1)
    assert arrivals.publish("a", b"0", 0, 0)
    bench.node.state.disk_full = False
    assert arrivals.publish("a", b"1", 1, 1)
    assert arrivals.done == [b"0", b"1"]


def test_retained_state_of_another_member_is_set_and_cleared() -> None:
    bench = NodeBench()
    arrivals = Arrivals(bench)
    arrivals.publish("a", b"1", 1, 1, retain=True)
    arrivals.publish("b", b"2", 0, 0, retain=True)
    bench.crash()
    state = bench.node.state
    assert state.retained.get("a") is not None
    assert state.retained.get("b") is not None
    arrivals.publish("a", b"", 1, 2, retain=True)
    assert state.retained.get("a") is None


def test_a_broker_without_retained_messages_or_quality_takes_what_it_can() -> None:
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, retain_available=False, qos_max=1))
    subscriber = bench.connect("s")
    subscriber.send(subscribe("a", 1))
    Arrivals(bench).publish("a", b"1", 2, 1, retain=True)
    (found,) = subscriber.publishes()
    assert (found.qos, found.retain) == (1, False)
    assert bench.node.state.retained.get("a") is None


# Interest


def test_interest_begins_and_ends_with_sessions_and_their_subscriptions() -> None:
    bench = NodeBench()
    counts: Counter[str] = Counter()

    def watch(filter: str, has_begun: bool) -> None:
        counts[filter] += 1 if has_begun else -1

    def wanted() -> list[str]:
        return sorted(filter for filter, count in counts.items() if count)

    state = bench.node.state
    state.watch_interest = state.recorded.watch_interest = watch
    FederationPeer(bench, "#")
    assert wanted() == []
    peer = bench.connect("c", expiry_s=10)
    peer.send(subscribe("a/+", 1), subscribe("$share/g/b", 1), subscribe("a/+", 0))
    assert wanted() == ["$share/g/b", "a/+"]
    peer.send(m.Unsubscribe(9, ["a/+"], {}))
    assert wanted() == ["$share/g/b"]
    peer.lose()
    assert wanted() == ["$share/g/b"]
    bench.advance(30)
    assert wanted() == []


# Retained elsewhere


class Retained(Arrivals):
    def retain(self, topic: str, payload: bytes, qos: int = 1) -> bool:
        state = self.bench.node.state
        message = Message(
            topic.encode(), payload, qos, True, b"", -1, state.wall_us, FEDERATION.encode()
        )
        is_taken = federating.retain(state, message, lambda _: self.done.append(payload))
        self.bench.run()
        return is_taken


def test_what_is_retained_elsewhere_is_retained_here_and_is_no_publication() -> None:
    bench = NodeBench()
    peer = FederationPeer(bench, "#")
    early = bench.connect("early")
    early.send(subscribe("a/+", 1), subscribe("a/#", 2))
    handled = bench.connect("handled")
    handled.send(subscribe("a/+", 1, retain_handling=2))
    retained = Retained(bench)
    assert retained.retain("a/1", b"1", 2)
    # Who subscribed before there was anything gets it, once, as retained.
    (message,) = early.publishes()
    assert (message.payload, message.retain) == (b"1", True)
    assert handled.publishes() == []
    # A newer version is for those to come.
    assert retained.retain("a/1", b"2", 1)
    assert early.publishes() == []
    late = bench.connect("late")
    late.send(subscribe("a/+", 1))
    assert [(one.payload, one.retain) for one in late.publishes()] == [(b"2", True)]
    assert peer.publishes() == []
    assert retained.done == [b"1", b"2"]
    bench.crash()
    found = bench.node.state.retained.get("a/1")
    assert isinstance(found, Message)
    assert (found.payload, found.qos) == (b"2", 1)
    assert Retained(bench).retain("a/1", b"")
    bench.crash()
    assert bench.node.state.retained.get("a/1") is None
    assert bench.messages() == []


def test_retaining_what_is_retained_writes_nothing_and_is_done_when_that_is_durable() -> None:
    bench = NodeBench(auto_commit=False)
    retained = Retained(bench)
    assert retained.retain("a", b"1")
    bench.commit()
    before = len(bench.records())
    assert retained.retain("a", b"1")
    assert retained.retain("b", b"")
    bench.settle()
    assert len(bench.records()) == before
    assert retained.done == [b"1", b"1", b""]
    bench.node.state.disk_full = True
    assert not retained.retain("a", b"2")

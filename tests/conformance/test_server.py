"""What MQTT 5.0 demands of a server, statement by statement, seen on the wire.

What other tests show as a matter of course (QoS flows, retained messages, wills, sessions) is in
tests/interop and tests/e2e; here are the rules that nobody meets by accident.
"""

import pytest

from tests.e2e import wire
from tests.e2e.brokers import Broker, Mosquitto

REASON_STRING = 0x1F
RESPONSE_INFORMATION = 0x1A
REQUEST_RESPONSE_INFORMATION = 0x19
REQUEST_PROBLEM_INFORMATION = 0x17
AUTHENTICATION_METHOD = 0x15
QUIET_S = 0.3
"""How long a test watches for what must not come, after a PINGRESP that came in its place."""


def join(broker: Broker, name: str, **more: object) -> wire.Wire:
    client = wire.Wire(broker.port)
    assert client.connect(name, **more).reason == 0  # type: ignore[arg-type]
    return client


def assert_quiet(client: wire.Wire) -> None:
    client.ping()
    assert client.inbox == []
    with pytest.raises(TimeoutError):
        client.receive(QUIET_S)


def skip_mosquitto(broker: Broker, why: str) -> None:
    if isinstance(broker, Mosquitto):
        pytest.skip(why)


@pytest.mark.parametrize("version", [3, 4, 5])
def test_connack_comes_first_and_once(broker: Broker, unique: str, version: int) -> None:
    """Packets right behind CONNECT are processed after CONNACK. [MQTT-3.1.4-5] [MQTT-3.2.0-1]
    [MQTT-3.2.0-2]"""
    with wire.Wire(broker.port, version) as client:
        client.send(
            wire.connect(unique[:23], version)
            + wire.subscribe(7, [(unique, 1)], version)
            + wire.publish(unique, b"early", 1, 8, version)
            + wire.packet(wire.PINGREQ << 4)
        )
        frames = [client.receive() for _ in range(5)]
        assert frames[0].kind == wire.CONNACK
        assert {frame.kind for frame in frames[1:]} == {
            *(wire.SUBACK, wire.PUBACK, wire.PUBLISH, wire.PINGRESP)
        }


def test_refused_connect(broker: Broker, unique: str) -> None:
    """Nothing behind it is processed, session present is 0, the connection ends.
    [MQTT-3.1.4-6] [MQTT-3.2.2-6] [MQTT-3.2.2-7] [MQTT-3.1.2-2] [MQTT-3.2.2-8]"""
    with join(broker, f"{unique}-watch") as watcher, wire.Wire(broker.port) as refused:
        watcher.subscribe((unique, 1))
        bad = wire.packet(0x10, wire.text("MQTT") + b"\x07\x02\0\0\0" + wire.text("c"))
        refused.send(bad + wire.publish(unique, b"from a refused client"))
        frames = refused.wait_closed()
        if frames:
            (connack,) = frames
            assert (connack.kind, connack.body[0]) == (wire.CONNACK, 0)
            assert connack.body[1] in (0x01, 0x84)
        assert_quiet(watcher)


def test_refused_client_id(broker: Broker) -> None:
    """MQTT 3.1.1: no client id and a durable session cannot go together. [MQTT-3.1.3-8]
    [MQTT3-3.1.3-8] [MQTT3-3.1.3-9]"""
    with wire.Wire(broker.port, 4) as client:
        client.send(wire.connect("", 4, clean=False))
        (connack,) = client.wait_closed()
        assert connack.body == b"\0\x02"


@pytest.mark.parametrize("length", [1, 23])
def test_plain_client_ids(broker: Broker, length: int) -> None:
    """[MQTT-3.1.3-5]"""
    letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for start in range(0, len(letters), length):
        join(broker, letters[start : start + length]).disconnect()


def test_sessions_belong_to_client_ids(broker: Broker, unique: str) -> None:
    """[MQTT-3.1.3-2] [MQTT-3.1.2-6] [MQTT-3.1.4-4] [MQTT-3.1.2-4] [MQTT-3.2.2-2]"""
    one = wire.Wire(broker.port)
    assert not one.connect(f"{unique}-1", clean=False, expiry_s=60).session_present
    one.subscribe((unique, 1))
    one.disconnect()
    with wire.Wire(broker.port) as two:
        assert not two.connect(f"{unique}-2", clean=False).session_present
        two.publish(unique, b"for the first", 1)
        assert_quiet(two)
    one = wire.Wire(broker.port)
    assert not one.connect(f"{unique}-1", clean=True).session_present
    assert_quiet(one)
    one.disconnect()


def test_the_session_lasts_as_long_as_the_connection(broker: Broker, unique: str) -> None:
    """Its expiry interval counts from the end of the connection. [MQTT-4.1.0-1]"""
    with join(broker, unique, expiry_s=1) as client, join(broker, f"{unique}-2") as other:
        client.subscribe((unique, 1))
        with pytest.raises(TimeoutError):
            client.receive(2.2)
        other.publish(unique, b"still subscribed", 1)
        assert client.message().payload == b"still subscribed"


def test_keep_alive_of_the_client_counts(broker: Broker, unique: str) -> None:
    """[MQTT-3.1.2-22] [MQTT-3.2.2-22]"""
    will = wire.Will(unique, b"silent", 1)
    with join(broker, f"{unique}-w") as watcher, wire.Wire(broker.port) as client:
        watcher.subscribe((unique, 1))
        connack = client.connect(unique, keep_alive_s=1, will=will)
        if connack.value(0x13) is None:
            assert watcher.message(10).payload == b"silent"
            client.wait_closed()


def test_takeover_ends_the_older_connection(broker: Broker, unique: str) -> None:
    """DISCONNECT is the last packet, the connection is closed. [MQTT-3.1.4-3] [MQTT-3.14.4-1]
    [MQTT-3.14.4-2] [MQTT-3.14.2-2] [MQTT-4.13.2-1] [MQTT-3.14.2-1]"""
    skip_mosquitto(broker, "2.0.11 closes without the DISCONNECT")
    older = join(broker, unique)
    older.subscribe((unique, 1))
    with join(broker, unique) as newer:
        newer.publish(unique, b"not for the older one", 1)
        (goodbye,) = older.wait_closed()
        assert (goodbye.kind, goodbye.reason) == (wire.DISCONNECT, 0x8E)
        if len(goodbye.body) > 1:
            names = [name for name, _ in wire.read_properties(goodbye.body, 1)[0]]
            assert wire.SESSION_EXPIRY not in names


def test_subscribe_and_unsubscribe_answers(broker: Broker, unique: str) -> None:
    """Packet ids repeated, one code for each filter, in order. [MQTT-2.2.1-6] [MQTT-3.8.4-1]
    [MQTT-3.8.4-2] [MQTT-3.8.4-5] [MQTT-3.8.4-6] [MQTT-3.8.4-7] [MQTT-3.9.3-1] [MQTT-3.9.3-2]
    [MQTT-3.10.4-4] [MQTT-3.10.4-5] [MQTT-3.10.4-6] [MQTT-3.11.3-1] [MQTT-3.11.3-2]"""
    with join(broker, unique) as client:
        filters = [(f"{unique}/{n}", n % 3) for n in range(7)]
        client.send(wire.subscribe(4711, filters))
        suback = client.expect(wire.SUBACK)
        assert suback.packet_id == 4711
        assert list(suback.body[3:]) == [qos for _, qos in filters]
        names = [filters[3][0], f"{unique}/unknown", filters[5][0]]
        client.send(wire.unsubscribe(815, names))
        unsuback = client.expect(wire.UNSUBACK)
        assert unsuback.packet_id == 815
        assert list(unsuback.body[3:]) == [0x00, 0x11, 0x00]
        client.send(wire.unsubscribe(816, names))
        assert list(client.expect(wire.UNSUBACK).body[3:]) == [0x11] * 3
        for name in names:
            client.publish(name, b"unsubscribed", 1)
        client.publish(filters[1][0], b"subscribed", 1)
        assert client.message().payload == b"subscribed"


def test_unsubscribe_compares_characters(broker: Broker, unique: str) -> None:
    """[MQTT-3.10.4-1] [MQTT-4.7.3-4]"""
    with join(broker, unique) as client:
        client.subscribe((f"{unique}/+", 1), (f"{unique}/Ä", 1))
        # The second looks the same: A with a combining diaeresis.
        client.send(wire.unsubscribe(9, [f"{unique}/a", f"{unique}/A\u0308", f"{unique}/#"]))
        assert list(client.expect(wire.UNSUBACK).body[3:]) == [0x11] * 3


def test_unsubscribe_completes_what_is_under_way(broker: Broker, unique: str) -> None:
    """[MQTT-3.10.4-2] [MQTT-3.10.4-3]"""
    with join(broker, unique) as client:
        client.subscribe((unique, 2))
        client.publish(unique, b"under way", 2)
        message = wire.read_publish(client.expect(wire.PUBLISH), 5)
        client.send(wire.unsubscribe(9, [unique]))
        client.expect(wire.UNSUBACK)
        client.send(wire.ack(wire.PUBREC, message.packet_id))
        assert client.expect(wire.PUBREL).packet_id == message.packet_id
        client.send(wire.ack(wire.PUBCOMP, message.packet_id))
        client.publish(unique, b"after", 2)
        assert_quiet(client)


def test_dup_is_not_passed_on(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.1-3] [MQTT-4.3.2-2] [MQTT-4.3.3-2] [MQTT-3.3.1-2]"""
    with join(broker, unique) as client:
        client.subscribe((unique, 2))
        for qos in (1, 2):
            client.send(wire.publish(unique, b"repeated", qos, 30 + qos, dup=True))
            client.expect(wire.PUBACK if qos == 1 else wire.PUBREC)
            if qos == 2:
                client.send(wire.ack(wire.PUBREL, 32))
                client.expect(wire.PUBCOMP)
            message = client.message()
            assert (message.dup, message.qos) == (False, qos)


def test_packet_ids_in_use_differ(broker: Broker, unique: str) -> None:
    """[MQTT-2.2.1-4] [MQTT-4.3.2-1] [MQTT-4.3.3-1]"""
    with join(broker, unique) as client, join(broker, f"{unique}-p") as publisher:
        client.subscribe((unique, 2))
        for number in range(20):
            publisher.publish(unique, b"", 1 + number % 2)
        found = [wire.read_publish(client.expect(wire.PUBLISH), 5) for _ in range(20)]
        ids = {message.packet_id for message in found}
        assert len(ids) == 20
        assert 0 not in ids
        # Half of them come free; the ids of the others stay taken.
        taken = ids - {message.packet_id for message in found if message.qos == 1}
        for message in found:
            if message.qos == 1:
                client.send(wire.ack(wire.PUBACK, message.packet_id))
        for _ in range(10):
            publisher.publish(unique, b"", 1)
        assert not taken & {client.message().packet_id for _ in range(10)}


def test_repeated_qos_2_publish(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.4-1] [MQTT-4.3.3-8] [MQTT-4.3.3-10] [MQTT-4.3.3-11] [MQTT-2.2.1-5]"""
    skip_mosquitto(broker, "2.0.11 closes on the second repetition")
    with join(broker, f"{unique}-s") as subscriber, join(broker, unique) as client:
        subscriber.subscribe((unique, 2))
        for dup in (False, True, True):
            client.send(wire.publish(unique, b"once", 2, 77, dup=dup))
            answer = client.expect(wire.PUBREC)
            assert answer.packet_id == 77
            assert answer.reason < 0x80
        for expected in (0x00, 0x92):
            client.send(wire.ack(wire.PUBREL, 77))
            answer = client.expect(wire.PUBCOMP)
            assert answer.packet_id == 77
            assert answer.reason == expected
        assert subscriber.message().payload == b"once"
        assert_quiet(subscriber)


@pytest.mark.parametrize("qos", [1, 2])
def test_a_refusing_receiver(broker: Broker, unique: str, qos: int) -> None:
    """A message that the client refuses is done with, and so is its place in the window.
    [MQTT-4.4.0-2] [MQTT-4.3.3-9] [MQTT-4.9.0-2]"""
    props = [(wire.RECEIVE_MAXIMUM, 1)]
    client = join(broker, unique, expiry_s=60, props=props)
    client.subscribe((unique, qos))
    with join(broker, f"{unique}-p") as publisher:
        publisher.publish(unique, b"refused", qos)
        publisher.publish(unique, b"wanted", qos)
    message = wire.read_publish(client.expect(wire.PUBLISH), 5)
    assert message.payload == b"refused"
    client.send(wire.ack(wire.PUBACK if qos == 1 else wire.PUBREC, message.packet_id, 0x83))
    assert client.message().payload == b"wanted"
    assert_quiet(client)
    client.disconnect()
    with join(broker, unique, clean=False, expiry_s=0) as again:
        assert_quiet(again)


def test_expiry_does_not_stop_a_handshake(broker: Broker, unique: str) -> None:
    """[MQTT-4.3.3-7] [MQTT-4.3.3-13]"""
    client = join(broker, unique, expiry_s=60)
    client.subscribe((unique, 2))
    client.publish(unique, b"brief", 2, props=[(wire.MESSAGE_EXPIRY, 1)])
    message = wire.read_publish(client.expect(wire.PUBLISH), 5)
    with pytest.raises(TimeoutError):
        client.receive(1.3)
    if not isinstance(broker, Mosquitto):  # 2.0.11 forgets it
        client.abort()
        client = join(broker, unique, clean=False, expiry_s=60)
        again = wire.read_publish(client.expect(wire.PUBLISH), 5)
        assert (again.packet_id, again.dup) == (message.packet_id, True)
    client.send(wire.ack(wire.PUBREC, message.packet_id))
    assert client.expect(wire.PUBREL).packet_id == message.packet_id
    client.send(wire.ack(wire.PUBCOMP, message.packet_id))
    client.disconnect()


def test_a_full_window_delays_nothing_else(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.4-10] [MQTT-4.9.0-3] [MQTT-3.3.4-9] [MQTT-4.9.0-1]"""
    with join(broker, unique, props=[(wire.RECEIVE_MAXIMUM, 1)]) as client:
        client.subscribe((unique, 2))
        for payload in (b"1", b"2"):
            client.publish(unique, payload, 1)
        first = wire.read_publish(client.expect(wire.PUBLISH), 5)
        client.ping()
        assert client.subscribe((f"{unique}/other", 0)) == [0]
        client.publish(f"{unique}/other", b"qos 0 needs no window")
        assert wire.read_publish(client.expect(wire.PUBLISH), 5).qos == 0
        assert_quiet(client)
        client.send(wire.ack(wire.PUBACK, first.packet_id))
        assert client.message().payload == b"2"


@pytest.mark.parametrize("maximum", [0, 2])
def test_topic_aliases_of_the_server(broker: Broker, unique: str, maximum: int) -> None:
    """[MQTT-3.1.2-26] [MQTT-3.1.2-27] [MQTT-3.3.2-11] [MQTT-3.3.2-8] [MQTT-3.3.2-3]"""
    props = [(wire.TOPIC_ALIAS_MAXIMUM, maximum)] if maximum else []
    with join(broker, unique, props=props) as client:
        client.subscribe((f"{unique}/#", 0))
        known: dict[object, str] = {}
        for number in range(12):
            client.publish(f"{unique}/{number % 4}", b"%d" % (number % 4))
            message = client.message()
            aliases = message.values(wire.TOPIC_ALIAS)
            assert all(isinstance(one, int) and 1 <= one <= maximum for one in aliases)
            topic = message.topic
            if aliases and topic:
                known[aliases[0]] = topic
            elif aliases:
                topic = known[aliases[0]]
            assert topic == f"{unique}/{message.payload.decode()}"


def test_topic_aliases_end_with_the_connection(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.2-7]"""
    client = join(broker, unique, expiry_s=60)
    client.publish(unique, b"set", props=[(wire.TOPIC_ALIAS, 1)])
    client.ping()
    client.disconnect()
    client = join(broker, unique, clean=False, expiry_s=0)
    client.send(wire.publish("", b"use", props=[(wire.TOPIC_ALIAS, 1)]))
    for answer in client.wait_closed():
        assert (answer.kind, answer.reason) == (wire.DISCONNECT, 0x82)


def test_response_information_only_on_request(broker: Broker, unique: str) -> None:
    """[MQTT-3.1.2-28]"""
    for props in ([], [(REQUEST_RESPONSE_INFORMATION, 0)]):
        with wire.Wire(broker.port) as client:
            assert client.connect(unique, props=props).value(RESPONSE_INFORMATION) is None


def test_no_problem_information(broker: Broker, unique: str) -> None:
    """Reason strings and user properties stay away from other packets. [MQTT-3.1.2-29]"""
    with join(broker, unique, props=[(REQUEST_PROBLEM_INFORMATION, 0)]) as client:
        client.send(wire.subscribe(1, [(f"{unique}/x", 1)]))
        client.send(wire.unsubscribe(2, [f"{unique}/unknown"]))
        client.send(wire.publish(f"{unique}/nobody", b"", 1, 3))
        client.send(wire.ack(wire.PUBREL, 999))
        places = {wire.SUBACK: 2, wire.UNSUBACK: 2, wire.PUBACK: 3, wire.PUBCOMP: 3}
        for kind, place in places.items():
            body = client.expect(kind).body
            if len(body) > place:
                assert wire.read_properties(body, place)[0] == [], kind


def test_acknowledgements_fit_the_maximum_packet_size(broker: Broker, unique: str) -> None:
    """[MQTT-3.4.2-2] [MQTT-3.4.2-3] [MQTT-3.5.2-2] [MQTT-3.5.2-3] [MQTT-3.6.2-2] [MQTT-3.6.2-3]
    [MQTT-3.7.2-2] [MQTT-3.7.2-3] [MQTT-3.9.2-1] [MQTT-3.9.2-2] [MQTT-3.11.2-1] [MQTT-3.11.2-2]"""
    with wire.Wire(broker.port) as client:
        client.send(wire.connect(unique, props=[(wire.MAXIMUM_PACKET_SIZE, 80)]))
        client.expect(wire.CONNACK)
        client.send(wire.subscribe(1, [(f"{unique}/x", 1), ("$share/g/x", 1)]))
        client.send(wire.unsubscribe(2, ["nothing here", f"{unique}/x"]))
        client.send(wire.publish("nobody", b"", 1, 3) + wire.publish("nobody", b"", 2, 4))
        client.send(wire.ack(wire.PUBREL, 999) + wire.ack(wire.PUBREC, 998))
        for kind in (wire.SUBACK, wire.UNSUBACK, wire.PUBACK, wire.PUBREC, wire.PUBCOMP):
            assert len(client.expect(kind).body) + 2 <= 80
        if not isinstance(broker, Mosquitto):  # says nothing to an unknown PUBREC
            assert client.expect(wire.PUBREL).reason == 0x92


@pytest.mark.parametrize("limit", [12, 40])
def test_answers_fit_the_maximum_packet_size(broker: Broker, unique: str, limit: int) -> None:
    """Reason strings are left out where they would not fit. [MQTT-3.1.2-24] [MQTT-3.14.2-3]
    [MQTT-3.14.2-4] [MQTT-3.2.2-19] [MQTT-3.2.2-20]"""
    with wire.Wire(broker.port) as client:
        method = (AUTHENTICATION_METHOD, "no such method")
        client.send(wire.connect(unique, props=[(wire.MAXIMUM_PACKET_SIZE, limit), method]))
        for frame in client.wait_closed():
            assert frame.kind == wire.CONNACK
            assert len(frame.body) + 2 <= limit
    with wire.Wire(broker.port) as client:
        client.send(wire.connect(unique, props=[(wire.MAXIMUM_PACKET_SIZE, limit)]))
        client.send(wire.publish("wrong/#/topic", b""))
        for frame in client.wait_closed():
            assert len(frame.body) + 2 <= limit, frame.kind


def test_unknown_authentication_method(broker: Broker, unique: str) -> None:
    """[MQTT-4.12.0-1]"""
    with wire.Wire(broker.port) as client:
        client.send(wire.connect(unique, props=[(AUTHENTICATION_METHOD, "rot13")]))
        (connack,) = client.wait_closed()
        assert wire.read_connack(connack, 5).reason in (0x8C, 0x87)


def test_no_authentication_method_unasked(broker: Broker, unique: str) -> None:
    """[MQTT-4.12.0-6] [MQTT-4.12.0-7]"""
    with wire.Wire(broker.port) as client:
        assert client.connect(unique).value(AUTHENTICATION_METHOD) is None
        client.send(wire.packet(0xF0, b"\x19" + wire.properties([(AUTHENTICATION_METHOD, "x")])))
        for frame in client.wait_closed():
            assert frame.kind == wire.DISCONNECT
            assert frame.reason >= 0x80


def test_will_is_stored_with_its_properties(broker: Broker, unique: str) -> None:
    """[MQTT-3.1.2-7] [MQTT-3.1.3-10] [MQTT-3.1.2-9]"""
    pairs: list[tuple[int, wire.PropertyValue]] = [
        (wire.USER_PROPERTY, ("b", "1")),
        (wire.USER_PROPERTY, ("a", "2")),
        (wire.USER_PROPERTY, ("b", "1")),
        (0x03, "text/plain"),
    ]
    with join(broker, f"{unique}-w") as watcher:
        watcher.subscribe((unique, 1))
        join(broker, unique, will=wire.Will(unique, b"gone", 1, properties=pairs)).abort()
        message = watcher.message()
        assert message.values(wire.USER_PROPERTY) == [("b", "1"), ("a", "2"), ("b", "1")]
        assert message.values(0x03) == ["text/plain"]


@pytest.mark.parametrize("reason", [0x00, 0x04, 0x80, 0x93])
def test_only_a_normal_disconnect_withdraws_the_will(
    broker: Broker, unique: str, reason: int
) -> None:
    """[MQTT-3.1.2-8] [MQTT-3.1.2-10] [MQTT-3.14.4-3]"""
    if reason >= 0x80:
        skip_mosquitto(broker, "2.0.11 withdraws it with every reason but 0x04")
    with join(broker, f"{unique}-w") as watcher:
        watcher.subscribe((unique, 1))
        join(broker, unique, will=wire.Will(unique, b"fired", 1)).disconnect(reason)
        if reason:
            assert watcher.message().payload == b"fired"
        assert_quiet(watcher)


class TestSharedSubscriptions:
    """Two durable members of a group; the first message goes to one of them."""

    @pytest.fixture
    def members(self, broker: Broker, unique: str) -> list[wire.Wire]:
        found = []
        for number in range(2):
            member = join(broker, f"{unique}-{number}", expiry_s=60)
            assert member.subscribe((f"$share/g/{unique}", 2)) == [2]
            found.append(member)
        return found

    def publish(self, broker: Broker, unique: str, payload: bytes) -> None:
        with join(broker, f"{unique}-p") as publisher:
            publisher.publish(unique, payload, 2)

    def chosen(self, members: list[wire.Wire]) -> tuple[wire.Wire, wire.Wire, wire.Message]:
        """The member that got the next message, the other one, and the message."""
        for _ in range(100):
            for index, member in enumerate(members):
                try:
                    frame = member.expect(wire.PUBLISH, 0.05)
                except TimeoutError:
                    continue
                return member, members[1 - index], wire.read_publish(frame, 5)
        raise AssertionError("nobody got the message")

    def test_a_refused_message(self, broker: Broker, unique: str, members: list[wire.Wire]) -> None:
        """[MQTT-4.8.2-6]"""
        self.publish(broker, unique, b"refused")
        chosen, other, message = self.chosen(members)
        chosen.send(wire.ack(wire.PUBREC, message.packet_id, 0x83))
        assert_quiet(chosen)
        assert_quiet(other)

    def test_a_broken_connection(
        self, broker: Broker, unique: str, members: list[wire.Wire]
    ) -> None:
        """QoS 2: finished with the client it was begun with. [MQTT-4.8.2-4]"""
        self.publish(broker, unique, b"begun")
        chosen, other, message = self.chosen(members)
        name = f"{unique}-{members.index(chosen)}"
        chosen.abort()
        assert_quiet(other)
        with join(broker, name, clean=False, expiry_s=60) as again:
            repeated = again.message()
            assert (repeated.payload, repeated.dup) == (b"begun", True)
            assert repeated.packet_id == message.packet_id
        assert_quiet(other)

    def test_a_session_that_ends(
        self, broker: Broker, unique: str, members: list[wire.Wire]
    ) -> None:
        """QoS 2: a delivery that was begun goes to nobody else. [MQTT-4.8.2-5]"""
        self.publish(broker, unique, b"begun")
        chosen, other, _ = self.chosen(members)
        chosen.disconnect(props=[(wire.SESSION_EXPIRY, 0)])
        assert_quiet(other)

    def test_granted_qos(self, broker: Broker, unique: str) -> None:
        """[MQTT-4.8.2-3]"""
        with join(broker, unique) as member:
            member.subscribe((f"$share/g/{unique}", 1))
            self.publish(broker, unique, b"published with QoS 2")
            assert member.message().qos == 1


@pytest.mark.parametrize(
    "filter_", ["$share/g", "$share//t", "$share/g+/t", "$share/g#/t", "$share/g/", "$share/"]
)
def test_bad_shared_filters(broker: Broker, unique: str, filter_: str) -> None:
    """Refused in SUBACK or by closing, never taken. [MQTT-4.8.2-1] [MQTT-4.8.2-2]"""
    skip_mosquitto(broker, "2.0.11 takes some of them")
    with join(broker, unique) as client:
        client.send(wire.subscribe(1, [(filter_, 1)]))
        frame = client.receive()
        if frame.kind == wire.SUBACK:
            assert frame.body[-1] >= 0x80
        else:
            assert (frame.kind, frame.reason >= 0x80) == (wire.DISCONNECT, True)


def test_no_local_on_a_shared_subscription(broker: Broker, unique: str) -> None:
    """[MQTT-3.8.3-4]"""
    skip_mosquitto(broker, "2.0.11 takes it")
    with join(broker, unique) as client:
        client.send(wire.subscribe(1, [(f"$share/g/{unique}", 1 | 0x04)]))
        for frame in client.wait_closed():
            assert (frame.kind, frame.reason) == (wire.DISCONNECT, 0x82)

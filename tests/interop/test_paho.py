"""paho-mqtt, 3.1.1 and 5.0, against Holdfast and, as the second opinion, Mosquitto."""

import time

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.e2e.brokers import Broker, Mosquitto
from tests.interop.paho_client import Paho, props, publish_props

VERSIONS = pytest.mark.parametrize("version", [3, 4, 5])
"""paho's numbers: MQTT 3.1, 3.1.1, 5.0."""
DURABLE = pytest.mark.parametrize("version", [4, 5])


def skip_mosquitto(broker: Broker, why: str) -> None:
    """Where Debian's Mosquitto is known not to do what the specification says."""
    if isinstance(broker, Mosquitto):
        pytest.skip(why)


@VERSIONS
@pytest.mark.parametrize("sub_qos", [0, 1, 2])
@pytest.mark.parametrize("pub_qos", [0, 1, 2])
def test_every_qos(broker: Broker, unique: str, version: int, pub_qos: int, sub_qos: int) -> None:
    """[MQTT-3.8.4-8] [MQTT-4.3.1-1] [MQTT-4.3.2-4] [MQTT-4.3.3-8]"""
    topic = f"{unique}/topic"
    with Paho(broker.port, f"{unique}-s"[:23], version) as subscriber:
        assert subscriber.subscribe(topic, sub_qos) == sub_qos
        with Paho(broker.port, f"p-{unique}"[:23], version) as publisher:
            for number in range(20):
                assert publisher.publish(topic, b"%d" % number, pub_qos) < 0x80
        found = [subscriber.message() for _ in range(20)]
    assert [message.payload for message in found] == [b"%d" % n for n in range(20)]
    assert {message.qos for message in found} == {min(pub_qos, sub_qos)}
    assert not any(message.retain or message.dup for message in found)


@DURABLE
def test_wildcards(broker: Broker, unique: str, version: int) -> None:
    """[MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.7.2-1]"""
    topics = ["a", "a/b", "a/b/c", "a//c", "b/b/c", "/a"]
    cases = {
        "a/#": ["a", "a/b", "a/b/c", "a//c"],
        "a/+": ["a/b"],
        "+/b/+": ["a/b/c", "b/b/c"],
        "a/+/c": ["a/b/c", "a//c"],
        "+/+": ["a/b"],
    }
    for filter_, expected in cases.items():
        with Paho(broker.port, unique, version) as client:
            client.subscribe(f"{unique}/{filter_}", 1)
            for topic in topics:
                client.publish(f"{unique}/{topic}", topic.encode(), 1)
            wanted = list(expected)
            if filter_ == "+/+":
                wanted = ["a/b", "/a"]
            assert client.payloads(len(wanted)) == [one.encode() for one in wanted], filter_
            client.assert_nothing_more()


@DURABLE
def test_retained(broker: Broker, unique: str, version: int) -> None:
    """[MQTT-3.3.1-5] [MQTT-3.3.1-6] [MQTT-3.3.1-8] [MQTT-3.3.1-9] [MQTT-3.3.1-12]"""
    topic = f"{unique}/r"
    with Paho(broker.port, unique, version) as client:
        client.publish(topic, b"first", 1, retain=True)
        client.publish(topic, b"second", 1, retain=True)
        client.publish(topic, b"not retained", 1)
        client.subscribe(f"{unique}/#", 1)
        message = client.message()
        assert (message.payload, message.retain, message.qos) == (b"second", True, 1)
        client.publish(topic, b"live", 1, retain=True)
        message = client.message()
        assert (message.payload, message.retain) == (b"live", False)
        # Subscribing again delivers it again.
        client.subscribe(f"{unique}/#", 0)
        message = client.message()
        assert (message.payload, message.retain, message.qos) == (b"live", True, 0)
        client.publish(topic, b"", 1, retain=True)
        assert client.message().payload == b""
    with Paho(broker.port, unique, version) as client:
        client.subscribe(topic, 1)
        client.assert_nothing_more()


def test_retain_handling(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.1-10] [MQTT-3.3.1-11] [MQTT-3.3.1-13]"""
    topic = f"{unique}/r"
    with Paho(broker.port, unique) as client:
        client.publish(topic, b"kept", 1, retain=True)
        client.subscribe(topic, options=SubscribeOptions(qos=1, retainHandling=2))
        client.assert_nothing_more()
        client.subscribe(topic, options=SubscribeOptions(qos=1, retainHandling=1))
        client.assert_nothing_more()
        client.unsubscribe(topic)
        client.subscribe(topic, options=SubscribeOptions(qos=1, retainHandling=1))
        assert client.message().payload == b"kept"
        client.unsubscribe(topic)
        client.subscribe(topic, options=SubscribeOptions(qos=1, retainAsPublished=True))
        assert client.message().retain
        client.publish(topic, b"live", 1, retain=True)
        message = client.message()
        assert (message.payload, message.retain) == (b"live", True)
        client.publish(topic, b"", 1, retain=True)


def test_subscribing_again_replaces(broker: Broker, unique: str) -> None:
    """[MQTT-3.8.4-3] [MQTT-3.8.4-4]"""
    skip_mosquitto(broker, "2.0.11 keeps the old retain as published")
    with Paho(broker.port, unique) as client:
        client.subscribe(unique, options=SubscribeOptions(qos=1))
        client.subscribe(unique, options=SubscribeOptions(qos=0, retainAsPublished=True))
        client.publish(unique, b"x", 1, retain=True)
        message = client.message()
        assert (message.qos, message.retain) == (0, True)
        client.assert_nothing_more()
        client.publish(unique, b"", 1, retain=True)


@DURABLE
@pytest.mark.parametrize("retain", [False, True])
def test_will(broker: Broker, unique: str, version: int, retain: bool) -> None:
    """[MQTT-3.1.2-8] [MQTT-3.1.2-14] [MQTT-3.1.2-15] [MQTT-3.14.4-3]"""
    topic = f"{unique}/will"
    with Paho(broker.port, f"{unique}-watch", version) as watcher:
        watcher.subscribe(topic, 2)
        polite = Paho(broker.port, f"{unique}-1", version, will=(topic, b"polite", 1, retain))
        polite.close()
        Paho(broker.port, f"{unique}-2", version, will=(topic, b"gone", 2, retain)).vanish()
        message = watcher.message()
        assert (message.payload, message.qos, message.retain) == (b"gone", 2, False)
        watcher.assert_nothing_more()
    with Paho(broker.port, f"{unique}-late", version) as late:
        late.subscribe(topic, 1)
        if retain:
            assert late.message().payload == b"gone"
            late.publish(topic, b"", 1, retain=True)
        else:
            late.assert_nothing_more()


def test_will_delay(broker: Broker, unique: str) -> None:
    """[MQTT-3.1.2-8] [MQTT-3.1.3-9]"""
    topic = f"{unique}/will"
    delay = props(PacketTypes.WILLMESSAGE, WillDelayInterval=1)
    will = (topic, b"late", 1, False)
    with Paho(broker.port, f"{unique}-watch") as watcher:
        watcher.subscribe(topic, 1)
        Paho(broker.port, unique, expiry_s=60, will=will, will_props=delay).vanish()
        again = Paho(broker.port, unique, clean=False, expiry_s=60, will=will, will_props=delay)
        assert again.flags.session_present
        watcher.assert_nothing_more()
        vanished = time.monotonic()
        again.vanish()
        assert watcher.message().payload == b"late"
        assert time.monotonic() - vanished > 0.8
        watcher.assert_nothing_more()


def test_will_on_request(broker: Broker, unique: str) -> None:
    """DISCONNECT with reason 0x04 publishes the will. [MQTT-3.1.2-10]"""
    topic = f"{unique}/will"
    with Paho(broker.port, f"{unique}-watch") as watcher:
        watcher.subscribe(topic, 1)
        client = Paho(broker.port, unique, will=(topic, b"wanted", 1, False))
        client.close(reason=ReasonCode(PacketTypes.DISCONNECT, identifier=4))
        assert watcher.message().payload == b"wanted"


@DURABLE
def test_session_resumes(broker: Broker, unique: str, version: int) -> None:
    """[MQTT-3.1.2-5] [MQTT-3.2.2-3] [MQTT-4.5.0-1]"""
    first = Paho(broker.port, unique, version, clean=False, expiry_s=60)
    assert not first.flags.session_present
    first.subscribe(f"{unique}/+", 2)
    first.close()
    with Paho(broker.port, f"{unique}-p", version) as publisher:
        for number in range(30):
            publisher.publish(f"{unique}/t", b"%d" % number, number % 3)
    with Paho(broker.port, unique, version, clean=False, expiry_s=60) as again:
        assert again.flags.session_present
        wanted = {b"%d" % number for number in range(30) if number % 3}
        found = [again.message() for _ in wanted]
        # QoS 0 messages may be kept for a session that is away, or not.
        kept = [message.payload for message in found if message.qos]
        while len(kept) < len(wanted):
            message = again.message()
            if message.qos:
                kept.append(message.payload)
        assert sorted(kept) == sorted(wanted)
        for qos in (1, 2):  # paho hands out QoS 2 later, with PUBREL
            numbers = [int(one) for one in kept if int(one) % 3 == qos]
            assert numbers == sorted(numbers)
    with Paho(broker.port, unique, version, clean=True) as fresh:
        assert not fresh.flags.session_present


def test_session_expiry(broker: Broker, unique: str) -> None:
    """[MQTT-4.1.0-2]"""
    Paho(broker.port, unique, expiry_s=1).close()
    with Paho(broker.port, unique, clean=False, expiry_s=1) as client:
        assert client.flags.session_present
    time.sleep(2.5)  # the expiry interval; Mosquitto looks once a second
    with Paho(broker.port, unique, clean=False) as client:
        assert not client.flags.session_present


def test_expiry_changed_by_disconnect(broker: Broker, unique: str) -> None:
    Paho(broker.port, unique, expiry_s=60).close(
        properties=props(PacketTypes.DISCONNECT, SessionExpiryInterval=0)
    )
    with Paho(broker.port, unique, clean=False) as client:
        assert not client.flags.session_present


def test_message_expiry(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.2-5] [MQTT-3.3.2-6]"""
    client = Paho(broker.port, unique, expiry_s=60)
    client.subscribe(unique, 1)
    client.close()
    with Paho(broker.port, f"{unique}-p") as publisher:
        publisher.publish(unique, b"short", 1, properties=publish_props(MessageExpiryInterval=1))
        publisher.publish(unique, b"long", 1, properties=publish_props(MessageExpiryInterval=60))
        time.sleep(2.2)  # the expiry interval; Mosquitto counts whole seconds
        with Paho(broker.port, unique, clean=False) as again:
            message = again.message()
            assert message.payload == b"long"
            assert 50 <= message.properties.MessageExpiryInterval <= 58
            again.assert_nothing_more()


@DURABLE
def test_takeover(broker: Broker, unique: str, version: int) -> None:
    """[MQTT-3.1.4-3]"""
    if version == 5:
        skip_mosquitto(broker, "2.0.11 closes without the DISCONNECT")
    first = Paho(broker.port, unique, version)
    first.client.on_connect = None
    second = Paho(broker.port, unique, version)
    reason = first.disconnected.get(timeout=10)
    if version == 5:
        assert reason.value == 0x8E
    first.client.loop_stop()
    second.close()


def test_shared_subscription(broker: Broker, unique: str) -> None:
    """[MQTT-4.8.2-3]"""
    shared = f"$share/group/{unique}/+"
    members = [Paho(broker.port, f"{unique}-{n}") for n in range(3)]
    for member in members:
        assert member.subscribe(shared, 1) == 1
    with Paho(broker.port, f"{unique}-all") as everything:
        everything.subscribe(f"{unique}/#", 1)
        for number in range(60):
            everything.publish(f"{unique}/t", b"%d" % number, 1)
        everything.payloads(60)
    shares: list[list[int]] = []
    for member in members:
        share = []
        while not member.messages.empty():
            share.append(int(member.message().payload))
        shares.append(share)
    deadline = time.monotonic() + 5
    while sum(map(len, shares)) < 60 and time.monotonic() < deadline:
        for member, share in zip(members, shares, strict=True):
            while not member.messages.empty():
                share.append(int(member.message().payload))
        time.sleep(0.01)
    assert sorted(number for share in shares for number in share) == list(range(60))
    assert all(share for share in shares), "somebody gets nothing"
    for member in members:
        member.close()


def test_shared_and_plain(broker: Broker, unique: str) -> None:
    """One client in a group and with a subscription of its own gets both."""
    with Paho(broker.port, unique) as client:
        client.subscribe(f"$share/g/{unique}", 1)
        client.subscribe(unique, 1)
        client.publish(unique, b"once each", 1)
        assert client.payloads(2) == [b"once each"] * 2
        client.assert_nothing_more()


def test_no_local(broker: Broker, unique: str) -> None:
    """[MQTT-3.8.3-3]"""
    with Paho(broker.port, unique) as client, Paho(broker.port, f"{unique}-2") as other:
        client.subscribe(unique, options=SubscribeOptions(qos=1, noLocal=True))
        client.publish(unique, b"mine", 1)
        other.publish(unique, b"theirs", 1)
        assert client.message().payload == b"theirs"
        client.assert_nothing_more()


def test_properties_pass_through(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.2-4] [MQTT-3.3.2-15] [MQTT-3.3.2-16] [MQTT-3.3.2-17] [MQTT-3.3.2-18]
    [MQTT-3.3.2-20]"""
    pairs = [("b", "1"), ("a", "2"), ("b", "3"), ("", "")]
    sent = publish_props(
        PayloadFormatIndicator=1,
        ContentType="text/plain",
        ResponseTopic=f"{unique}/answers",
        CorrelationData=b"\x00\x01\xff",
        UserProperty=pairs,
    )
    with Paho(broker.port, unique) as client:
        client.subscribe(unique, 2)
        client.publish(unique, "grüße".encode(), 2, properties=sent)
        got = client.message().properties
    assert got.PayloadFormatIndicator == 1
    assert got.ContentType == "text/plain"
    assert got.ResponseTopic == f"{unique}/answers"
    assert got.CorrelationData == b"\x00\x01\xff"
    assert got.UserProperty == pairs


def test_subscription_identifiers(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.4-3] [MQTT-3.3.4-4]"""
    with Paho(broker.port, unique) as client:
        for filter_, identifier in ((f"{unique}/#", 1), (f"{unique}/+", 268_435_455)):
            chosen = props(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=identifier)
            client.subscribe(filter_, 1, properties=chosen)
        client.publish(f"{unique}/t", b"x", 1)
        found = list(client.message().properties.SubscriptionIdentifier)
        if len(found) == 1:
            found += client.message().properties.SubscriptionIdentifier
        assert sorted(found) == [1, 268_435_455]


def test_overlapping_subscriptions(broker: Broker, unique: str) -> None:
    """The highest QoS of those that match. [MQTT-3.3.4-2]"""
    skip_mosquitto(broker, "2.0.11 delivers with the QoS of the first that matches")
    with Paho(broker.port, unique) as client:
        client.subscribe(f"{unique}/#", 0)
        client.subscribe(f"{unique}/+", 2)
        client.publish(f"{unique}/t", b"x", 2)
        qos = {client.message().qos}
        while not client.messages.empty():
            qos.add(client.message().qos)
        assert 2 in qos


def test_topic_alias_of_the_client(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.2-12]"""
    with Paho(broker.port, unique) as client:
        client.subscribe(f"{unique}/#", 1)
        client.publish(f"{unique}/t", b"1", 1, properties=publish_props(TopicAlias=1))
        client.client.publish("", b"2", 1, properties=publish_props(TopicAlias=1))
        first, second = client.message(), client.message()
        assert (first.topic, first.payload) == (f"{unique}/t", b"1")
        assert (second.topic, second.payload) == (f"{unique}/t", b"2")


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 70_000, 2_000_000])
@DURABLE
def test_payload_sizes(broker: Broker, unique: str, version: int, size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with Paho(broker.port, unique, version) as client:
        for qos in range(3):
            client.subscribe(f"{unique}/{qos}", qos)
            client.publish(f"{unique}/{qos}", payload, qos)
            assert client.message().payload == payload


def test_maximum_packet_size_of_the_client(broker: Broker, unique: str) -> None:
    """[MQTT-3.1.2-24] [MQTT-3.1.2-25]"""
    with (
        Paho(broker.port, unique, connect_props={"MaximumPacketSize": 200}) as small,
        Paho(broker.port, f"{unique}-2") as other,
    ):
        small.subscribe(unique, 1)
        other.publish(unique, b"x" * 300, 1)
        other.publish(unique, b"fits", 1)
        assert small.message().payload == b"fits"
        small.assert_nothing_more()


def test_receive_maximum_of_the_client(broker: Broker, unique: str) -> None:
    """[MQTT-3.3.4-9] [MQTT-4.9.0-2]"""
    skip_mosquitto(broker, "2.0.11 sends more after the first acknowledgements")
    with (
        Paho(broker.port, unique, connect_props={"ReceiveMaximum": 2}, manual_ack=True) as narrow,
        Paho(broker.port, f"{unique}-2") as other,
    ):
        narrow.subscribe(unique, 1)
        for number in range(6):
            other.publish(unique, b"%d" % number, 1)
        for number in range(0, 6, 2):
            pair = [narrow.message(), narrow.message()]
            assert [message.payload for message in pair] == [b"%d" % number, b"%d" % (number + 1)]
            narrow.assert_nothing_more()
            for message in pair:
                narrow.client.ack(message.mid, message.qos)


def test_assigned_client_id(broker: Broker) -> None:
    """[MQTT-3.1.3-6] [MQTT-3.1.3-7] [MQTT-3.2.2-16]"""
    with Paho(broker.port, "") as one, Paho(broker.port, "") as two:
        names = [client.properties.AssignedClientIdentifier for client in (one, two)]
        assert all(names)
        assert len(set(names)) == 2


@DURABLE
def test_keep_alive(broker: Broker, unique: str, version: int) -> None:
    """paho pings on an idle connection and is answered. [MQTT-3.12.4-1]"""
    with Paho(broker.port, unique, version, keep_alive_s=1) as client:
        client.subscribe(unique, 1)
        time.sleep(2.5)  # more than one and a half keep alives without a message
        assert client.disconnected.empty()
        client.publish(unique, b"still here", 1)
        assert client.message().payload == b"still here"


@DURABLE
def test_unsubscribe(broker: Broker, unique: str, version: int) -> None:
    """[MQTT-3.10.4-1] [MQTT-3.10.4-4]"""
    with Paho(broker.port, unique, version) as client:
        client.subscribe(f"{unique}/+", 1)
        client.subscribe(f"{unique}/#", 1)
        client.unsubscribe(f"{unique}/+")
        client.publish(f"{unique}/a", b"by the other one", 1)
        assert client.payloads(1) == [b"by the other one"]
        client.unsubscribe(f"{unique}/#")
        client.publish(f"{unique}/a", b"by none", 1)
        client.assert_nothing_more()


@DURABLE
def test_many_in_flight(broker: Broker, unique: str, version: int) -> None:
    """A burst from paho's own window, both ways, at QoS 2. [MQTT-4.6.0-5] [MQTT-4.6.0-6]"""
    with (
        Paho(broker.port, f"{unique}-s", version) as subscriber,
        Paho(broker.port, unique, version, window=50) as publisher,
    ):
        subscriber.subscribe(unique, 2)
        for number in range(500):
            publisher.client.publish(unique, b"%d" % number, 2)
        assert [int(one) for one in subscriber.payloads(500)] == list(range(500))

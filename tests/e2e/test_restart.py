"""A restart, clean or by kill -9: sessions come back as they were, packet ids included."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e import wire
from tests.e2e.brokers import PROCESSES, Holdfast
from tests.support.api_client import Api
from tests.support.waiting import until

DAY_S = 86_400
VERSIONS = pytest.mark.parametrize("version", [4, 5])


def clean_stop(broker: Holdfast) -> None:
    assert broker.stop() == 0


WAYS = pytest.mark.parametrize("end", [clean_stop, Holdfast.kill], ids=["SIGTERM", "SIGKILL"])
RECORDED_S = 0.4
"""By then a session's progress, recorded lazily, is on disk."""
End = Callable[[Holdfast], None]


def join(
    broker: Holdfast, name: str, version: int = 5, clean: bool = False, **more: Any
) -> tuple[wire.Wire, wire.Connack]:
    """A client with a durable session."""
    client = wire.Wire(broker.port, version)
    return client, client.connect(name, clean=clean, expiry_s=DAY_S, **more)


def publish_all(broker: Holdfast, *messages: tuple[str, bytes, int]) -> None:
    with wire.Wire(broker.port) as publisher:
        publisher.connect("publisher")
        for topic, payload, qos in messages:
            assert publisher.publish(topic, payload, qos) < 0x80


def test_clients_are_told(broker: Holdfast) -> None:
    """A clean shutdown: MQTT 5 clients get DISCONNECT with 0x8B, everyone an end of stream."""
    new, _ = join(broker, "new")
    old, _ = join(broker, "old", version=4)
    assert broker.stop() == 0
    (goodbye,) = new.wait_closed()
    assert (goodbye.kind, goodbye.reason) == (wire.DISCONNECT, 0x8B)
    assert old.wait_closed() == []


@WAYS
@VERSIONS
def test_outbound_in_flight(broker: Holdfast, version: int, end: End) -> None:
    """Unacknowledged PUBLISH and PUBREL come again with their ids, in order.

    [MQTT-4.4.0-1] [MQTT-3.3.1-1] [MQTT-4.3.3-6] [MQTT-3.2.2-3]"""
    reader, connack = join(broker, "reader", version)
    assert not connack.session_present
    reader.subscribe(("one", 1), ("two", 2), ("done", 1))
    publish_all(
        broker,
        ("done", b"acknowledged", 1),
        ("one", b"open 1", 1),
        ("two", b"open 2", 2),
        ("two", b"received", 2),
        ("one", b"open 3", 1),
    )
    first = [wire.read_publish(reader.expect(wire.PUBLISH), version) for _ in range(5)]
    by_payload = {message.payload: message.packet_id for message in first}
    assert len(set(by_payload.values())) == 5
    assert not any(message.dup for message in first)
    reader.send(wire.ack(wire.PUBREC, by_payload[b"received"]))
    assert reader.expect(wire.PUBREL).packet_id == by_payload[b"received"]
    reader.send(wire.ack(wire.PUBACK, by_payload[b"acknowledged"]))
    reader.ping()
    time.sleep(RECORDED_S)
    reader.abort()
    end(broker)

    broker.start()
    reader, connack = join(broker, "reader", version)
    assert connack.session_present
    publish_all(broker, ("one", b"new", 1))
    again: list[wire.Message] = []
    released: list[int] = []
    while not again or again[-1].payload != b"new":
        frame = reader.receive()
        if frame.kind == wire.PUBREL:
            released.append(frame.packet_id)
        else:
            assert frame.kind == wire.PUBLISH
            again.append(wire.read_publish(frame, version))
    assert released == [by_payload[b"received"]]
    new = again.pop()
    assert not new.dup
    assert new.packet_id not in by_payload.values()
    assert sorted(message.payload for message in again) == [b"open 1", b"open 2", b"open 3"]
    assert [m.payload for m in again if m.topic == "one"] == [b"open 1", b"open 3"]
    assert all(message.dup for message in again)
    assert [message.packet_id for message in again] == [by_payload[m.payload] for m in again]


@WAYS
@VERSIONS
def test_inbound_qos2_in_flight(broker: Holdfast, version: int, end: End) -> None:
    """A QoS 2 message received but not released is not published again after the restart.

    [MQTT-4.3.3-10] [MQTT-4.3.3-11] [MQTT-4.3.3-12]"""
    reader, _ = join(broker, "reader", version)
    reader.subscribe(("t", 2))
    publisher, _ = join(broker, "publisher", version)
    for packet_id, payload in ((7, b"seven"), (9, b"nine")):
        publisher.send(wire.publish("t", payload, 2, packet_id, version))
        assert publisher.expect(wire.PUBREC).packet_id == packet_id
    publisher.send(wire.ack(wire.PUBREL, 9))
    publisher.expect(wire.PUBCOMP)
    end(broker)

    broker.start()
    publisher, connack = join(broker, "publisher", version)
    assert connack.session_present
    reader, _ = join(broker, "reader", version)
    publisher.send(wire.publish("t", b"seven", 2, 7, version, dup=True))
    assert publisher.expect(wire.PUBREC).reason < 0x80
    publisher.send(wire.ack(wire.PUBREL, 7))
    assert publisher.expect(wire.PUBCOMP).reason == 0
    # The id is free: the same bytes are a new message now.
    publisher.send(wire.publish("t", b"after", 2, 7, version))
    publisher.expect(wire.PUBREC)
    publisher.send(wire.ack(wire.PUBREL, 7))
    publisher.expect(wire.PUBCOMP)
    found: list[bytes] = []
    while not found or found[-1] != b"after":
        found.append(reader.message().payload)
    assert sorted(found) == [b"after", b"nine", b"seven"]


@WAYS
def test_retained(broker: Holdfast, end: End) -> None:
    """Set, replaced and cleared, at every QoS. [MQTT-3.3.1-5] [MQTT-3.3.1-6] [MQTT-3.3.1-7]"""
    with wire.Wire(broker.port) as publisher:
        publisher.connect("publisher")
        for qos in range(3):
            props: list[tuple[int, wire.PropertyValue]] = [(wire.USER_PROPERTY, ("k", "v"))]
            publisher.publish(f"r/{qos}", b"old", qos, retain=True)
            publisher.publish(f"r/{qos}", b"kept", qos, retain=True, props=props)
            publisher.publish(f"r/cleared/{qos}", b"gone", qos, retain=True)
            publisher.publish(f"r/cleared/{qos}", b"", qos, retain=True)
        publisher.publish("r/plain", b"not retained", 1)
        publisher.publish("r/last", b"", 1)
    end(broker)
    broker.start()
    with wire.Wire(broker.port) as reader:
        reader.connect("reader")
        reader.subscribe(("r/#", 2))
        found = [reader.message() for _ in range(3)]
        reader.ping()
        assert not reader.inbox
    assert {(one.topic, one.payload, one.qos) for one in found} == {
        (f"r/{qos}", b"kept", qos) for qos in range(3)
    }
    assert all(one.retain for one in found)
    assert all(one.values(wire.USER_PROPERTY) == [("k", "v")] for one in found)


@WAYS
def test_subscriptions_and_their_options(broker: Holdfast, end: End) -> None:
    """[MQTT-3.1.2-5] [MQTT-3.8.3-3] [MQTT-3.3.1-13] [MQTT-3.3.4-3] [MQTT-3.10.4-2]"""
    no_local, retain_as_published = 0x04, 0x08
    client, _ = join(broker, "client")
    client.subscribe(("own", 1 | no_local), ("left", 1))
    client.subscribe(("sensor/+", 2 | retain_as_published), props=[(wire.SUBSCRIPTION_ID, 300)])
    client.send(wire.unsubscribe(50, ["left"]))
    client.expect(wire.UNSUBACK)
    end(broker)

    broker.start()
    client, connack = join(broker, "client")
    assert connack.session_present
    client.publish("own", b"from myself", 1)
    with wire.Wire(broker.port) as publisher:
        publisher.connect("publisher")
        publisher.publish("left", b"unsubscribed", 1)
        publisher.publish("own", b"from another", 1)
        publisher.publish("sensor/1", b"value", 2, retain=True)
    first, second = client.message(), client.message()
    assert first.payload == b"from another"
    assert (second.payload, second.qos, second.retain) == (b"value", 2, True)
    assert second.values(wire.SUBSCRIPTION_ID) == [300]


@WAYS
@VERSIONS
def test_messages_for_a_session_that_is_away(broker: Holdfast, version: int, end: End) -> None:
    """[MQTT-4.5.0-1] [MQTT-3.1.2-23]"""
    client, _ = join(broker, "client", version)
    client.subscribe(("a/+", 1), ("b/#", 2))
    client.disconnect()
    publish_all(broker, *[("a/x", b"%d" % n, 1) for n in range(20)])
    publish_all(broker, *[("b/y/z", b"%d" % n, 2) for n in range(20)])
    end(broker)
    broker.start()
    client, connack = join(broker, "client", version)
    assert connack.session_present
    found = [client.message() for _ in range(40)]
    for topic, qos in (("a/x", 1), ("b/y/z", 2)):
        mine = [message for message in found if message.topic == topic]
        assert [message.payload for message in mine] == [b"%d" % n for n in range(20)]
        assert {message.qos for message in mine} == {qos}
    client.ping()
    assert not client.inbox


@WAYS
def test_sessions_that_should_not_come_back(broker: Holdfast, end: End) -> None:
    """[MQTT-3.1.2-4] [MQTT-4.1.0-2]"""
    short, _ = join(broker, "ended")
    short.disconnect()
    wire.Wire(broker.port).connect("ended", clean=True)
    brief = wire.Wire(broker.port)
    brief.connect("brief", expiry_s=1)
    brief.subscribe(("t", 1))
    brief.disconnect()
    _stays, _ = join(broker, "stays", version=4)
    if PROCESSES > 1:
        # The end of the connection is in the log of another process a moment later. If that one
        # dies before, the interval begins with its next start.
        api = Api(broker.admin_port)
        until(lambda: not api.get("session", client="brief")["session"]["connected"], "the end")
    end(broker)
    time.sleep(1.2)  # the expiry interval itself
    broker.start()
    for name, expected in (("ended", False), ("brief", False), ("stays", True)):
        assert join(broker, name)[1].session_present is expected, name


@WAYS
def test_message_expiry_counts_on(broker: Holdfast, end: End) -> None:
    """[MQTT-3.3.2-5] [MQTT-3.3.2-6]"""
    client, _ = join(broker, "client")
    client.subscribe(("t", 1))
    client.disconnect()
    with wire.Wire(broker.port) as publisher:
        publisher.connect("publisher")
        publisher.publish("t", b"short", 1, props=[(wire.MESSAGE_EXPIRY, 1)])
        publisher.publish("t", b"long", 1, props=[(wire.MESSAGE_EXPIRY, 100)])
    end(broker)
    time.sleep(1.2)  # the expiry interval itself
    broker.start()
    client, _ = join(broker, "client")
    message = client.message()
    assert message.payload == b"long"
    (left,) = message.values(wire.MESSAGE_EXPIRY)
    assert isinstance(left, int)
    assert 80 <= left <= 99


@WAYS
def test_delayed_will(broker: Holdfast, end: End) -> None:
    """A will whose delay runs while the broker is down is published afterwards, once.

    [MQTT-3.1.2-8] [MQTT-3.1.2-10]"""
    watcher, _ = join(broker, "watcher")
    watcher.subscribe(("wills", 1))
    will = wire.Will("wills", b"delayed", 1, properties=[(wire.WILL_DELAY, 2)])
    mortal, _ = join(broker, "mortal", will=will)
    mortal.abort()
    watcher.ping()
    end(broker)
    broker.start()
    watcher, connack = join(broker, "watcher")
    assert connack.session_present
    assert watcher.message(10).payload == b"delayed"
    publish_all(broker, ("wills", b"last", 1))
    assert watcher.message().payload == b"last"


@WAYS
def test_will_of_a_client_connected_at_the_end(broker: Holdfast, end: End) -> None:
    """The network connection ended without DISCONNECT: the will is due. [MQTT-3.1.2-8]"""
    watcher, _ = join(broker, "watcher")
    watcher.subscribe(("wills", 1))
    _mortal, _ = join(broker, "mortal", will=wire.Will("wills", b"fired", 1))
    careful, _ = join(broker, "careful", will=wire.Will("wills", b"withdrawn", 1))
    careful.disconnect()
    publish_all(broker, ("wills", b"before", 1))
    assert watcher.message().payload == b"before"
    end(broker)
    broker.start()
    watcher, _ = join(broker, "watcher")
    message = watcher.message(10)
    if message.payload == b"before":  # its PUBACK was not yet recorded
        message = watcher.message(10)
    assert message.payload == b"fired"
    publish_all(broker, ("wills", b"last", 1))
    assert watcher.message().payload == b"last"


@WAYS
def test_shared_group(broker: Holdfast, end: End) -> None:
    """Each message goes to one member, none is lost over the restart. [MQTT-4.8.2-3]"""
    names = ("member-1", "member-2")
    for name in names:
        member, _ = join(broker, name)
        member.subscribe(("$share/group/work", 1))
        member.disconnect()
    publish_all(broker, *[("work", b"%d" % n, 1) for n in range(30)])
    end(broker)
    broker.start()
    members = [join(broker, name)[0] for name in names]
    publish_all(broker, *[("work", b"%d" % n, 1) for n in range(30, 60)])
    found: list[int] = []
    deadline = time.monotonic() + 10
    while len(found) < 60 and time.monotonic() < deadline:
        for member in members:
            try:
                found.append(int(member.message(0.1).payload))
            except TimeoutError:
                continue
    assert sorted(found) == list(range(60))


def test_nothing_grows_with_idle_restarts(broker: Holdfast) -> None:
    """Ten restarts without traffic leave the journal and the sessions as they were."""
    client, _ = join(broker, "client")
    client.subscribe(("t", 1))
    client.disconnect()
    for _ in range(10):
        clean_stop(broker)
        broker.start()
    ranges = json.loads(broker.admin("/api/v1/log")[1])["ranges"]
    assert sum(end - start for start, end in ranges) < 100
    publish_all(broker, ("t", b"still there", 1))
    client, connack = join(broker, "client")
    assert connack.session_present
    assert client.message().payload == b"still there"


def test_the_first_start_may_end_between_metadata_and_manifest(broker: Holdfast) -> None:
    """The cluster is in the log of the metadata, not known as committed, and the manifest does not
    have its id yet. The node elects itself, and creates no second one."""
    assert broker.stop() == 0
    manifest = broker.data / "manifest.json"
    content = json.loads(manifest.read_text())
    cluster_id = content.pop("cluster_id")
    manifest.write_text(json.dumps(content))
    log = broker.data / "raft" / "log"
    first, creation = [found.start() for found in re.finditer(b"HFRG", log.read_bytes())][1:3]
    assert first < creation
    log.write_bytes(log.read_bytes()[:creation])
    broker.start()
    publish_all(broker, ("a", b"1", 1))
    assert json.loads(manifest.read_text())["cluster_id"] == cluster_id
    assert "Traceback" not in broker.log_text()

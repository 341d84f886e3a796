"""Publishing and delivery through a whole node, with the disk in the test's hands."""

import pytest

from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer


def publish(
    topic: str, payload: bytes, qos: int = 0, packet_id: int = 0, **fields: object
) -> Publish:
    return Publish(
        topic.encode(),
        payload,
        qos,
        bool(fields.get("retain", False)),
        bool(fields.get("dup", False)),
        packet_id,
        fields.get("properties", b""),  # type: ignore[arg-type]
        int(str(fields.get("alias", 0))),
        int(str(fields.get("expiry_s", -1))),
    )


def subscribe(filter: str, qos: int = 0, packet_id: int = 1, **fields: object) -> m.Subscribe:
    request = m.SubscriptionRequest(
        filter,
        qos,
        bool(fields.get("no_local", False)),
        bool(fields.get("retain_as_published", False)),
        int(str(fields.get("retain_handling", 0))),
    )
    properties = {11: [fields["identifier"]]} if "identifier" in fields else {}
    return m.Subscribe(packet_id, [request], properties)  # type: ignore[arg-type]


def acks(peer: Peer) -> list[tuple[int, int, int]]:
    return [(a.kind, a.packet_id, a.reason) for a in peer.take(m.Ack) if isinstance(a, m.Ack)]


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("sub_qos", [0, 1, 2])
@pytest.mark.parametrize("pub_qos", [0, 1, 2])
def test_delivered_at_the_lower_qos(version: int, sub_qos: int, pub_qos: int) -> None:
    """[MQTT-3.8.4-8]"""
    bench = NodeBench()
    subscriber = bench.connect("sub", version)
    subscriber.send(subscribe("a/+", sub_qos))
    subscriber.take()
    publisher = bench.connect("pub", version)
    publisher.take()
    publisher.send(publish("a/b", b"x", pub_qos, 7 if pub_qos else 0))
    (received,) = subscriber.publishes()
    assert received.topic == b"a/b"
    assert received.payload == b"x"
    assert received.qos == min(sub_qos, pub_qos)
    assert acks(publisher) == (
        [] if pub_qos == 0 else [(m.PUBACK if pub_qos == 1 else m.PUBREC, 7, 0)]
    )


def test_puback_waits_for_the_disk() -> None:
    """[MQTT-4.3.2-4] The promise leaves only when the record is committed."""
    bench = NodeBench(auto_commit=False)
    subscriber = bench.connect("sub")
    subscriber.send(subscribe("t", 1))
    subscriber.take()
    publisher = bench.connect("pub")
    publisher.take()
    publisher.send(publish("t", b"x", 1, 5))
    assert publisher.received == []
    assert subscriber.received == []
    bench.commit()
    bench.run()
    assert acks(publisher) == [(m.PUBACK, 5, 0)]
    assert subscriber.payloads() == [b"x"]


def test_acknowledgements_leave_in_order() -> None:
    """[MQTT-4.6.0-2] also when a later publish needs no disk."""
    config = NodeConfig(partitions=4, sys_interval_s=0)
    bench = NodeBench(config, auto_commit=False)
    publisher = bench.connect("pub")
    publisher.take()
    publisher.send(
        publish("t", b"1", 1, 1), publish("$SYS/x", b"2", 1, 2), publish("u", b"3", 1, 3)
    )
    assert publisher.received == []
    bench.commit()
    bench.run()
    assert acks(publisher) == [
        (m.PUBACK, 1, reasons.NO_MATCHING_SUBSCRIBERS),
        (m.PUBACK, 2, reasons.NOT_AUTHORIZED),
        (m.PUBACK, 3, reasons.NO_MATCHING_SUBSCRIBERS),
    ]


def test_qos2_publish_repeated_before_pubrel_is_stored_once() -> None:
    """[MQTT-4.3.3-10]"""
    bench = NodeBench()
    publisher = bench.connect("pub", expiry_s=100)
    publisher.send(publish("t", b"x", 2, 9), publish("t", b"x", 2, 9, dup=True))
    publisher.take(m.Connack)
    assert [a[:2] for a in acks(publisher)] == [(m.PUBREC, 9), (m.PUBREC, 9)]
    assert len(bench.messages()) == 1
    publisher.send(m.Ack(m.PUBREL, 9, 0, {}))
    assert acks(publisher) == [(m.PUBCOMP, 9, 0)]
    publisher.send(publish("t", b"y", 2, 9))
    assert len(bench.messages()) == 2


def test_qos2_id_survives_a_crash_until_released() -> None:
    """A repetition after the restart is still a repetition."""
    bench = NodeBench()
    publisher = bench.connect("pub", expiry_s=100)
    publisher.send(publish("t", b"x", 2, 9))
    bench.crash()
    again = bench.connect("pub", clean=False, expiry_s=100)
    connack = again.take(m.Connack)[0]
    assert isinstance(connack, m.Connack)
    assert connack.session_present
    again.send(publish("t", b"x", 2, 9, dup=True))
    assert len(bench.messages()) == 1
    again.send(m.Ack(m.PUBREL, 9, 0, {}))
    bench.crash()
    third = bench.connect("pub", clean=False, expiry_s=100)
    third.send(publish("t", b"new", 2, 9))
    assert [r.payload for r in bench.messages()] == [b"x", b"new"]


def test_unknown_pubrel_is_answered() -> None:
    """[MQTT-3.7.2-1] PUBCOMP 0x92."""
    bench = NodeBench()
    peer = bench.connect("c")
    peer.take()
    peer.send(m.Ack(m.PUBREL, 3, 0, {}))
    assert acks(peer) == [(m.PUBCOMP, 3, reasons.PACKET_IDENTIFIER_NOT_FOUND)]


def test_no_local_and_retain_as_published() -> None:
    """[MQTT-3.8.3-3] [MQTT-3.3.1-12] [MQTT-3.3.1-13]"""
    bench = NodeBench()
    peer = bench.connect("c")
    peer.send(subscribe("t", 1, no_local=True))
    other = bench.connect("d")
    other.send(subscribe("t", 1, retain_as_published=True))
    peer.take()
    other.take()
    peer.send(publish("t", b"x", 1, 1, retain=True))
    assert peer.publishes() == []
    (received,) = other.publishes()
    assert received.retain
    other.send(publish("t", b"y", 1, 1, retain=True))
    (received,) = peer.publishes()
    assert not received.retain


def test_overlapping_subscriptions_give_one_copy_with_all_identifiers() -> None:
    """[MQTT-3.3.4-2] [MQTT-3.3.4-3] [MQTT-3.3.4-4]"""
    bench = NodeBench()
    peer = bench.connect("c")
    peer.send(subscribe("a/#", 0, 1, identifier=7), subscribe("a/+", 2, 2, identifier=9))
    peer.take()
    bench.connect("p").send(publish("a/b", b"x", 2, 1))
    (received,) = peer.publishes()
    assert received.qos == 2
    assert sorted(received.subscription_ids or []) == [7, 9]


def test_window_closes_and_opens() -> None:
    """[MQTT-3.3.4-9] never more unacknowledged than the client's receive maximum."""
    bench = NodeBench()
    peer = bench.connect("c", properties={33: 2})
    peer.send(subscribe("t", 1))
    peer.take()
    publisher = bench.connect("p")
    for number in range(1, 6):
        publisher.send(publish("t", b"%d" % number, 1, number))
    first = peer.publishes()
    assert [p.payload for p in first] == [b"1", b"2"]
    peer.send(m.Ack(m.PUBACK, first[0].packet_id, 0, {}))
    second = peer.publishes()
    assert [p.payload for p in second] == [b"3"]
    peer.send(
        m.Ack(m.PUBACK, first[1].packet_id, 0, {}), m.Ack(m.PUBACK, second[0].packet_id, 0, {})
    )
    assert peer.payloads() == [b"4", b"5"]


def test_slow_reader_falls_behind_and_catches_up_from_the_log() -> None:
    """An outbox that overflows is dropped; nothing is lost, nothing comes twice, order is kept."""
    config = NodeConfig(partitions=4, sys_interval_s=0, outbox_messages=5, inflight_max=2)
    bench = NodeBench(config)
    peer = bench.connect("c")
    peer.send(subscribe("#", 1))
    peer.take()
    publisher = bench.connect("p")
    for number in range(1, 41):
        publisher.send(publish(f"t/{number % 3}", b"%d" % number, 1, number))
    assert bench.node.state.stats.readers_fell_behind == 1
    seen: list[bytes] = []
    for _ in range(100):
        for received in peer.publishes():
            seen.append(received.payload)
            peer.send(m.Ack(m.PUBACK, received.packet_id, 0, {}))
            if len(seen) == 20:
                publisher.send(publish("t/0", b"41", 1, 41))
    assert seen == [b"%d" % number for number in range(1, 42)]
    publisher.send(publish("t/0", b"42", 1, 42))
    assert peer.payloads() == [b"42"]


def test_qos0_to_a_full_socket_is_dropped_and_counted() -> None:
    config = NodeConfig(partitions=1, sys_interval_s=0, outbox_bytes=100)
    bench = NodeBench(config)
    peer = bench.connect("c")
    peer.send(subscribe("t"))
    peer.take()
    peer.connection.congested = True
    publisher = bench.connect("p")
    for _ in range(10):
        publisher.send(publish("t", b"x" * 30))
    assert bench.node.state.stats.dropped_qos0_slow > 0
    assert peer.connection.out_bytes < 200


@pytest.mark.parametrize("most", [0, 1])
def test_fewer_topic_aliases_than_the_client_allows(most: int) -> None:
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, outgoing_topic_alias_max=most))
    subscriber = bench.connect("sub", properties={34: 5})
    subscriber.send(subscribe("#"))
    for topic in ("one", "two"):
        bench.connect("pub").send(publish(topic, b""))
    assert [each.topic_alias for each in subscriber.publishes()] == [most, 0]


def test_topic_alias_both_ways() -> None:
    """[MQTT-3.3.2-8] [MQTT-3.1.2-26]"""
    bench = NodeBench()
    peer = bench.connect("c", properties={34: 1})
    peer.send(subscribe("#"))
    peer.take()
    publisher = bench.connect("p")
    publisher.send(publish("long/topic", b"1", alias=3))
    publisher.send_bytes(bytes.fromhex("300700000323000332"))
    first, second = peer.publishes()
    assert (first.topic, first.topic_alias, first.payload) == (b"long/topic", 1, b"1")
    assert (second.topic, second.topic_alias, second.payload) == (b"", 1, b"2")


def test_message_expiry() -> None:
    """[MQTT-3.3.2-5] [MQTT-3.3.2-6]"""
    bench = NodeBench()
    sub = bench.connect("c", expiry_s=1000)
    sub.send(subscribe("t", 1))
    sub.lose()
    publisher = bench.connect("p")
    expiry = bytes.fromhex("020000000a")
    long_expiry = bytes.fromhex("0200000064")
    publisher.send(
        publish("t", b"short", 1, 1, properties=expiry, expiry_s=10),
        publish("t", b"long", 1, 2, properties=long_expiry, expiry_s=100),
    )
    bench.advance(20)
    again = bench.connect("c", clean=False, expiry_s=1000)
    (received,) = again.publishes()
    assert received.payload == b"long"
    assert received.expiry_s == 80


def test_receive_maximum_exceeded_closes() -> None:
    """[MQTT-3.3.4-8]"""
    config = NodeConfig(partitions=1, sys_interval_s=0, receive_maximum=2)
    bench = NodeBench(config, auto_commit=False)
    peer = bench.connect("c")
    peer.take()
    peer.send(*(publish("t", b"x", 1, number) for number in (1, 2, 3)))
    (packet,) = peer.take(m.Disconnect)
    assert isinstance(packet, m.Disconnect)
    assert packet.reason == reasons.RECEIVE_MAXIMUM_EXCEEDED
    assert peer.closed


def test_disk_full_refuses_and_recovers() -> None:
    bench = NodeBench()
    peer = bench.connect("c")
    old = bench.connect("old", 4)
    peer.take()
    bench.node.state.disk_full = True
    peer.send(publish("t", b"x", 1, 1), publish("t", b"x", 2, 2))
    assert acks(peer) == [
        (m.PUBACK, 1, reasons.QUOTA_EXCEEDED),
        (m.PUBREC, 2, reasons.QUOTA_EXCEEDED),
    ]
    old.send(publish("t", b"x", 1, 1))
    assert old.closed
    bench.node.state.disk_full = False
    peer.send(publish("t", b"x", 1, 1))
    assert acks(peer) == [(m.PUBACK, 1, reasons.NO_MATCHING_SUBSCRIBERS)]
    assert bench.node.state.stats.refused_disk_full == 3


@pytest.mark.parametrize("publisher_version", [3, 4, 5])
def test_qos0_reaches_receivers_of_every_version(publisher_version: int) -> None:
    bench = NodeBench()
    receivers = [bench.connect(f"s{version}", version) for version in (3, 4, 5)]
    for receiver in receivers:
        receiver.send(subscribe("t"))
        receiver.take()
    publisher = bench.connect("p", publisher_version)
    publisher.send(publish("t", b"x"), publish("t", b"", retain=True), publish("t", b"z" * 200))
    for receiver in receivers:
        assert [(p.topic, p.payload, p.retain) for p in receiver.publishes()] == [
            (b"t", b"x", False),
            (b"t", b"", False),
            (b"t", b"z" * 200, False),
        ]


def test_client_that_does_not_read_its_answers_is_not_read() -> None:
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0, outbox_bytes=100))
    peer = bench.connect("c")
    peer.take()
    peer.connection.congested = True
    peer.send(*(m.Pingreq() for _ in range(1000)))
    assert peer.connection.out_bytes <= 110
    answered = 0
    while peer.connection.input_paused:
        peer.connection.congested = False
        bench.node.state.dirty.append(peer.connection)
        bench.node.handle_writable(peer.connection)
        bench.run()
        answered += len(peer.take(m.Pingresp))
    assert answered == 1000


@pytest.mark.parametrize("granted", [0, 1])
@pytest.mark.parametrize("logged", [False, True])
def test_qos_0_does_not_overtake_an_earlier_message_of_its_topic(
    granted: int, *, logged: bool
) -> None:
    """[MQTT-4.6.0-6]"""
    config = NodeConfig(partitions=4, sys_interval_s=0, qos0_logged=["#"] if logged else [])
    bench = NodeBench(config, auto_commit=False)
    subscriber = bench.connect("sub")
    subscriber.send(subscribe("t", granted), subscribe("other", 0, 2))
    publisher = bench.connect("pub")
    publisher.send(
        publish("t", b"1", 1, 1, retain=True),
        publish("t", b"2", retain=True),
        publish("other", b"-"),
        publish("t", b"3", 1, 2, retain=True),
        publish("t", b"4", retain=True),
        publish("t", b"5"),
    )
    assert subscriber.payloads() == [b"-"]
    bench.settle()
    assert subscriber.payloads() == [b"1", b"2", b"3", b"4", b"5"]
    late = bench.connect("late")
    late.send(subscribe("t", 1))
    assert late.payloads() == [b"4"]
    assert bench.node.state.promise_bytes == 0
    publisher.send(publish("t", b"6"))
    assert subscriber.payloads() == [b"6"]


def test_a_publisher_whose_qos_0_waits_is_not_read_while_too_much_is_pending() -> None:
    bench = NodeBench(
        NodeConfig(partitions=4, sys_interval_s=0, pending_bytes_max=100_000), auto_commit=False
    )
    subscriber = bench.connect("sub")
    subscriber.send(subscribe("t"))
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"first", 1, 1))
    for _ in range(50):
        publisher.send(publish("t", bytes(10_000)))
    assert publisher.connection.input_paused
    assert bench.node.state.promise_bytes < 120_000
    bench.settle()
    assert len(subscriber.payloads()) == 51

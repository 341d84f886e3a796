"""Sessions through a whole node: resume, takeover, expiry, wills, retained, shared groups, and
what a crash at the worst moment leaves."""

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.delivery.retained import SessionScans
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, check_routing
from tests.unit.node.test_publish import acks, publish, subscribe


def will(
    topic: str, payload: bytes, qos: int = 1, delay_s: int = 0, retain: bool = False
) -> m.Will:
    properties: dict[int, object] = {24: delay_s} if delay_s else {}
    return m.Will(topic, payload, qos, retain, properties)  # type: ignore[arg-type]


def test_offline_session_gets_everything_in_order_after_a_crash() -> None:
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=1000)
    peer.send(subscribe("a/#", 1))
    peer.lose()
    publisher = bench.connect("p")
    for number in range(1, 31):
        publisher.send(publish(f"a/{number % 4}", b"%d" % number, 1, number))
    bench.crash()
    again = bench.connect("c", clean=False, expiry_s=1000)
    assert again.payloads() == [b"%d" % number for number in range(1, 31)]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_inflight_ids_survive_a_crash(qos: int, with_snapshot: bool) -> None:
    """[MQTT-4.4.0-1] sent again with the original packet id and DUP."""
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=1000)
    peer.send(subscribe("t", qos))
    bench.connect("p").send(publish("t", b"x", qos, 1))
    (first,) = peer.publishes()
    bench.advance(1)
    snapshot = bench.snapshot() if with_snapshot else None
    bench.crash(snapshot=snapshot)
    again = bench.connect("c", clean=False, expiry_s=1000)
    (second,) = again.publishes()
    assert (second.packet_id, second.payload, second.dup) == (first.packet_id, b"x", True)


def test_what_may_have_been_sent_before_a_crash_carries_dup() -> None:
    """[MQTT-3.3.1-1] QoS 1 progress is logged a little later: what is sent again says that it
    might be, what came after the crash does not."""
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=1000)
    peer.send(subscribe("t", 1))
    bench.connect("p").send(publish("t", b"1", 1, 1), publish("t", b"2", 1, 2))
    for sent in peer.publishes():
        assert not sent.dup
        peer.send(m.Ack(m.PUBACK, sent.packet_id, 0, {}))
    bench.crash()
    again = bench.connect("c", clean=False, expiry_s=1000)
    bench.connect("p").send(publish("t", b"3", 1, 1))
    received = again.publishes()
    assert [(each.payload, each.dup) for each in received] == [
        (b"1", True),
        (b"2", True),
        (b"3", False),
    ]
    # One that was away at the crash has been sent nothing.
    for each in received:
        again.send(m.Ack(m.PUBACK, each.packet_id, 0, {}))
    bench.advance(1)
    again.lose()
    bench.connect("p").send(publish("t", b"4", 1, 1))
    bench.crash()
    third = bench.connect("c", clean=False, expiry_s=1000)
    assert [(each.payload, each.dup) for each in third.publishes()] == [(b"4", False)]


def test_qos2_received_before_a_crash_is_not_sent_again() -> None:
    """[MQTT-4.3.3-7] after PUBREC only PUBREL may be repeated."""
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=1000)
    peer.send(subscribe("t", 2))
    bench.connect("p").send(publish("t", b"x", 2, 1))
    (first,) = peer.publishes()
    peer.send(m.Ack(m.PUBREC, first.packet_id, 0, {}))
    peer.take()
    bench.crash()
    again = bench.connect("c", clean=False, expiry_s=1000)
    assert again.publishes() == []
    assert acks(again) == [(m.PUBREL, first.packet_id, 0)]
    again.send(m.Ack(m.PUBCOMP, first.packet_id, 0, {}))
    bench.advance(1)
    bench.crash()
    third = bench.connect("c", clean=False, expiry_s=1000)
    assert third.publishes() == []
    assert acks(third) == []


def test_pubcomp_before_pubrec_finishes_nothing() -> None:
    """[MQTT-4.3.3-3] The packet id is in use until the PUBCOMP of its PUBREL."""
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=1000)
    peer.send(subscribe("t", 2))
    bench.connect("p").send(publish("t", b"x", 2, 1))
    (first,) = peer.publishes()
    peer.send(m.Ack(m.PUBCOMP, first.packet_id, 0, {}))
    peer.send(m.Ack(m.PUBREC, first.packet_id, 0, {}))
    assert acks(peer) == [(m.PUBREL, first.packet_id, 0)]
    peer.lose()
    again = bench.connect("c", clean=False, expiry_s=1000)
    assert acks(again) == [(m.PUBREL, first.packet_id, 0)]


def test_pubrel_waits_for_the_disk() -> None:
    bench = NodeBench(auto_commit=False)
    peer = bench.connect("c", expiry_s=1000)
    bench.commit()
    bench.run()
    peer.send(subscribe("t", 2))
    bench.commit()
    bench.run()
    peer.take()
    bench.connect("p").send(publish("t", b"x", 2, 1))
    bench.commit()
    bench.run()
    assert peer.received == []
    bench.commit()
    bench.run()
    (first,) = peer.publishes()
    peer.send(m.Ack(m.PUBREC, first.packet_id, 0, {}))
    assert acks(peer) == []
    bench.commit()
    bench.run()
    assert acks(peer) == [(m.PUBREL, first.packet_id, 0)]


def test_takeover_tells_the_older_connection() -> None:
    """[MQTT-3.1.4-3]"""
    bench = NodeBench()
    old = bench.connect("c", expiry_s=100)
    old.send(subscribe("t", 1))
    old.take()
    new = bench.connect("c", clean=False, expiry_s=100)
    (goodbye,) = old.take(m.Disconnect)
    assert isinstance(goodbye, m.Disconnect)
    assert goodbye.reason == reasons.SESSION_TAKEN_OVER
    assert old.closed
    (connack,) = new.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.session_present
    bench.connect("p").send(publish("t", b"x", 1, 1))
    assert new.payloads() == [b"x"]


def test_session_expires_and_its_will_with_it() -> None:
    """[MQTT-3.1.2-23] [MQTT-3.1.3-9]"""
    bench = NodeBench()
    watcher = bench.connect("w")
    watcher.send(subscribe("wills", 1))
    watcher.take()
    peer = bench.connect("c", expiry_s=10, will=will("wills", b"gone", delay_s=60))
    peer.lose()
    bench.advance(9)
    assert watcher.payloads() == []
    bench.advance(2)
    assert watcher.payloads() == [b"gone"]
    assert bench.find_session("c") is None


def test_will_delay_is_cancelled_by_the_return() -> None:
    """[MQTT-3.1.3-9]"""
    bench = NodeBench()
    watcher = bench.connect("w")
    watcher.send(subscribe("wills", 1))
    watcher.take()
    peer = bench.connect("c", expiry_s=100, will=will("wills", b"gone", delay_s=5))
    peer.lose()
    bench.advance(3)
    bench.connect("c", clean=False, expiry_s=100)
    bench.advance(10)
    assert watcher.payloads() == []


def test_will_of_a_client_connected_at_the_crash_is_published_once() -> None:
    bench = NodeBench()
    watcher = bench.connect("w", expiry_s=1000)
    watcher.send(subscribe("wills", 1))
    bench.connect("plain", will=will("wills", b"plain"))
    bench.connect("durable", expiry_s=100, will=will("wills", b"durable", delay_s=1))
    bench.crash()
    bench.advance(2)
    again = bench.connect("w", clean=False, expiry_s=1000)
    received = again.publishes()
    assert sorted(p.payload for p in received) == [b"durable", b"plain"]
    for each in received:
        again.send(m.Ack(m.PUBACK, each.packet_id, 0, {}))
    bench.advance(1)
    bench.crash()
    third = bench.connect("w", clean=False, expiry_s=1000)
    assert third.payloads() == []


def test_clean_disconnect_drops_the_will() -> None:
    """[MQTT-3.1.2-10] [MQTT-3.14.4-3]"""
    bench = NodeBench()
    watcher = bench.connect("w")
    watcher.send(subscribe("wills"))
    watcher.take()
    peer = bench.connect("c", will=will("wills", b"gone"))
    peer.send(m.Disconnect(0, {}))
    assert watcher.payloads() == []
    other = bench.connect("d", will=will("wills", b"asked for"))
    other.send(m.Disconnect(reasons.DISCONNECT_WITH_WILL_MESSAGE, {}))
    assert watcher.payloads() == [b"asked for"]


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("qos", [0, 1])
def test_retained_message_for_a_new_subscription(qos: int, crash: bool) -> None:
    """[MQTT-3.3.1-5] [MQTT-3.3.1-6] [MQTT-3.3.1-8] [MQTT-3.3.1-9]"""
    bench = NodeBench()
    publisher = bench.connect("p")
    publisher.send(
        publish("r/a", b"1", qos, qos, retain=True),
        publish("r/a", b"2", qos, qos, retain=True),
        publish("r/b", b"3", qos, qos, retain=True),
        publish("r/b", b"", qos, qos, retain=True),
    )
    if crash:
        bench.crash()
    peer = bench.connect("c")
    peer.send(subscribe("r/#", 1))
    (received,) = peer.publishes()
    assert (received.topic, received.payload, received.retain) == (b"r/a", b"2", True)
    peer.send(subscribe("r/#", 1, 2, retain_handling=1))
    assert peer.publishes() == []
    peer.send(subscribe("r/#", 1, 3, retain_handling=2))
    assert peer.publishes() == []


def test_many_retained_messages_respect_the_window() -> None:
    bench = NodeBench()
    publisher = bench.connect("p")
    for number in range(250):
        publisher.send(publish(f"r/{number}", b"x", 1, number + 1, retain=True))
    peer = bench.connect("c", properties={33: 10})
    peer.send(subscribe("r/#", 1))
    got = 0
    while True:
        page = peer.publishes()
        if not page:
            break
        assert len(page) <= 10
        got += len(page)
        peer.send(*(m.Ack(m.PUBACK, p.packet_id, 0, {}) for p in page))
    assert got == 250


def test_shared_group_gives_each_record_to_one_member() -> None:
    """[MQTT-4.8.2-1]"""
    bench = NodeBench()
    members = [bench.connect(f"m{number}") for number in range(3)]
    for member in members:
        member.send(subscribe("$share/g/t", 1))
        member.take()
    publisher = bench.connect("p")
    for number in range(1, 10):
        publisher.send(publish("t", b"%d" % number, 1, number))
    received = [member.payloads() for member in members]
    assert [len(each) for each in received] == [3, 3, 3]
    assert sorted(int(p) for each in received for p in each) == list(range(1, 10))


def test_shared_group_takes_back_what_a_member_did_not_acknowledge() -> None:
    """[MQTT-4.8.2-5]"""
    bench = NodeBench()
    first = bench.connect("m1")
    first.send(subscribe("$share/g/t", 1))
    publisher = bench.connect("p")
    publisher.send(publish("t", b"1", 1, 1), publish("t", b"2", 1, 2))
    assert first.payloads() == [b"1", b"2"]
    second = bench.connect("m2")
    second.send(subscribe("$share/g/t", 1))
    first.lose()
    assert second.payloads() == [b"1", b"2"]


def test_a_groups_record_does_not_stand_for_the_sessions_own_copy() -> None:
    """A subscription of its own matches as well, and is read from the log later."""
    bench = NodeBench()
    away = bench.connect("c", expiry_s=1000)
    away.send(subscribe("t", 2), subscribe("$share/g/t", 2))
    away.lose()
    busy = bench.connect("m", properties={33: 1})
    busy.send(subscribe("$share/g/t", 2))
    bench.connect("p").send(publish("t", b"1", 1, 1), publish("t", b"2", 1, 2))
    assert busy.payloads() == [b"1"]
    bench.delay_reads = True
    back = bench.connect("c", clean=False, expiry_s=1000)
    assert back.payloads() == [b"2"]
    bench.delay_reads = False
    bench.run()
    assert back.payloads() == [b"1", b"2"]


def test_durable_shared_group_survives_absence_and_crash() -> None:
    bench = NodeBench()
    first = bench.connect("m1", expiry_s=1000)
    first.send(subscribe("$share/g/t/#", 1))
    publisher = bench.connect("p")
    publisher.send(publish("t/1", b"1", 1, 1))
    (one,) = first.publishes()
    first.send(m.Ack(m.PUBACK, one.packet_id, 0, {}))
    bench.advance(1)
    first.lose()
    publisher.send(publish("t/2", b"2", 1, 2), publish("t/3", b"3", 1, 3))
    bench.advance(1)
    bench.crash()
    again = bench.connect("m1", clean=False, expiry_s=1000)
    assert again.payloads() == [b"2", b"3"]


def test_a_record_that_a_shared_group_has_back_is_not_logged_as_finished() -> None:
    """No other member has room for it, and then the node crashes."""
    bench = NodeBench()
    durable = bench.connect("m1", expiry_s=1000, properties={33: 1})
    durable.send(subscribe("$share/g/t", 1))
    publisher = bench.connect("p")
    publisher.send(publish("t", b"1", 1, 1))
    assert durable.payloads() == [b"1"]
    other = bench.connect("m2")
    other.send(subscribe("$share/g/t", 1))
    publisher.send(publish("t", b"2", 1, 2))
    assert other.payloads() == [b"2"]
    other.lose()
    bench.advance(1)
    bench.crash()
    again = bench.connect("m1", clean=False, expiry_s=1000)
    assert sorted(again.payloads()) == [b"1", b"2"]


def test_suback_waits_for_the_disk_of_a_durable_session() -> None:
    bench = NodeBench(auto_commit=False)
    peer = bench.connect("c", expiry_s=100, commits=False)
    assert peer.received == []
    bench.commit()
    bench.run()
    assert len(peer.take(m.Connack)) == 1
    peer.send(subscribe("t", 1))
    assert peer.received == []
    bench.commit()
    bench.run()
    assert len(peer.take(m.Suback)) == 1


def test_unsubscribe_is_durable() -> None:
    """[MQTT-3.10.4-1]"""
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=100)
    peer.send(subscribe("t", 1), m.Unsubscribe(2, ["t", "u"], {}))
    (unsuback,) = peer.take(m.Unsuback)
    assert isinstance(unsuback, m.Unsuback)
    assert unsuback.reasons == [0, reasons.NO_SUBSCRIPTION_EXISTED]
    bench.crash()
    again = bench.connect("c", clean=False, expiry_s=100)
    again.take()
    bench.connect("p").send(publish("t", b"x", 1, 1))
    assert again.publishes() == []


def test_keep_alive() -> None:
    """[MQTT-3.1.2-22]"""
    bench = NodeBench()
    peer = bench.connect("c", keep_alive_s=10)
    bench.advance(14)
    assert not peer.closed
    peer.send(m.Pingreq())
    bench.advance(14)
    assert not peer.closed
    bench.advance(2)
    assert peer.closed
    (packet,) = peer.take(m.Disconnect)
    assert isinstance(packet, m.Disconnect)
    assert packet.reason == reasons.KEEP_ALIVE_TIMEOUT


def test_bytes_one_by_one_are_no_sign_of_life() -> None:
    """[MQTT-3.1.2-22] Control packets count, and a packet that does not end is none."""
    bench = NodeBench()
    peer = bench.connect("c", keep_alive_s=10)
    peer.send_bytes(b"\x30\xff\xff\x03\x00\x01t")
    for _ in range(20):
        if not peer.closed:
            peer.send_bytes(b"x")
            bench.advance(1)
    assert peer.closed
    (packet,) = peer.take(m.Disconnect)
    assert isinstance(packet, m.Disconnect)
    assert packet.reason == reasons.KEEP_ALIVE_TIMEOUT


def test_a_large_packet_may_take_longer_than_the_keep_alive() -> None:
    bench = NodeBench()
    subscriber = bench.connect("s")
    subscriber.send(subscribe("t", 0))
    subscriber.take()
    peer = bench.connect("c", keep_alive_s=2)
    payload = bytes(20_000)
    data = encode(publish("t", payload, 0), 5)
    for at in range(0, len(data), 500):
        peer.send_bytes(data[at : at + 500])
        bench.advance(1)
        assert not peer.closed
    assert subscriber.payloads() == [payload]
    # And then it is as silent as any other.
    bench.advance(4)
    assert peer.closed


def test_connect_timeout() -> None:
    """[MQTT-3.1.4-1]"""
    bench = NodeBench()
    peer = bench.peer()
    bench.advance(bench.config.connect_timeout_s + 1)
    assert peer.closed


def test_resume_respects_a_smaller_receive_maximum() -> None:
    """[MQTT-3.3.4-9]"""
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=100)
    peer.send(subscribe("t", 1))
    publisher = bench.connect("p")
    for number in range(1, 6):
        publisher.send(publish("t", b"%d" % number, 1, number))
    assert len(peer.publishes()) == 5
    peer.lose()
    again = bench.connect("c", clean=False, expiry_s=100, properties={33: 2})
    seen: list[bytes] = []
    while page := again.publishes():
        assert len(page) <= 2
        seen.extend(p.payload for p in page)
        again.send(*(m.Ack(m.PUBACK, p.packet_id, 0, {}) for p in page))
    assert seen == [b"1", b"2", b"3", b"4", b"5"]


def test_assigned_client_id_and_empty_id_rules() -> None:
    """[MQTT-3.1.3-6] [MQTT-3.2.2-16] [MQTT3-3.1.3-8]"""
    bench = NodeBench()
    peer = bench.connect("")
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert 18 in connack.properties
    old = bench.connect("", 4, clean=False)
    (refused,) = old.take(m.Connack)
    assert isinstance(refused, m.Connack)
    assert refused.reason == reasons.CLIENT_IDENTIFIER_NOT_VALID
    assert old.closed


def test_password_is_checked_before_anything_else_is_read() -> None:
    config = NodeConfig(partitions=2, sys_interval_s=0, allow_anonymous=False)
    bench = NodeBench(config)
    bench.node.state.admission.checks_passwords = True
    bench.valid_passwords = {"u": b"right"}
    good = bench.peer()
    good.send(m.Connect(5, True, 0, "c", None, "u", b"right", {}), subscribe("t", 1), m.Pingreq())
    assert [type(p) for p in good.received] == [m.Connack, m.Suback, m.Pingresp]
    bad = bench.peer()
    bad.send(m.Connect(5, True, 0, "d", None, "u", b"wrong", {}))
    (refused,) = bad.take(m.Connack)
    assert isinstance(refused, m.Connack)
    assert refused.reason == reasons.BAD_USER_NAME_OR_PASSWORD
    anonymous = bench.connect("e")
    (refused,) = anonymous.take(m.Connack)
    assert isinstance(refused, m.Connack)
    assert refused.reason == reasons.NOT_AUTHORIZED


@pytest.mark.parametrize("version", [4, 5])
def test_a_name_that_nobody_checks_proves_nothing(version: int) -> None:
    """Only a certificate of that name does, where there are no passwords: with SCRAM alone, or
    with certificates alone."""
    config = NodeConfig(partitions=2, sys_interval_s=0, allow_anonymous=False)
    bench = NodeBench(config)
    for certificate, name, allowed in (
        ("", "u", False),
        ("u", "u", True),
        ("v", "u", False),
        ("v", None, True),
    ):
        peer = bench.peer(version)
        peer.connection.certificate_name = certificate
        peer.send(m.Connect(version, True, 0, "c", None, name, b"x" if name else None, {}))
        (connack,) = peer.take(m.Connack)
        assert isinstance(connack, m.Connack)
        assert connack.reason == (reasons.SUCCESS if allowed else reasons.NOT_AUTHORIZED)
        assert peer.closed is not allowed


def test_clients_that_come_and_go_leave_no_timers() -> None:
    bench = NodeBench()
    for number in range(5000):
        peer = bench.connect(f"c{number}", keep_alive_s=60_000)
        peer.send(m.Disconnect(0, {}))
    assert len(bench.node.state.timers) < 3000
    assert bench.node.state.connections == 0


def test_inflight_is_sent_again_in_its_order_after_a_crash() -> None:
    """[MQTT-4.6.0-1] although the log knows QoS 2 ids earlier than QoS 1 ids."""
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=1000)
    peer.send(subscribe("t", 2))
    bench.session("c").next_packet_id = 65534
    publisher = bench.connect("p")
    for number, qos in enumerate((1, 2, 1, 2), 1):
        publisher.send(publish("t", b"%d" % number, qos, number))
    sent = [(p.packet_id, p.payload) for p in peer.publishes()]
    assert [packet_id for packet_id, _ in sent] == [65534, 65535, 1, 2]
    bench.advance(1)
    bench.crash()
    again = bench.connect("c", clean=False, expiry_s=1000)
    assert [(p.packet_id, p.payload) for p in again.publishes()] == sent


def test_a_new_durable_group_is_known_before_suback() -> None:
    """Also if the crash comes before any progress was logged."""
    bench = NodeBench()
    first = bench.connect("m1", expiry_s=1000)
    first.send(subscribe("$share/g/t", 1))
    first.lose()
    bench.connect("p").send(publish("t", b"1", 1, 1))
    bench.crash()
    again = bench.connect("m1", clean=False, expiry_s=1000)
    assert again.payloads() == [b"1"]


@pytest.mark.parametrize("crashes", [1, 2])
def test_qos2_finished_after_a_crash_is_not_read_again(crashes: int) -> None:
    """The logged position lies below an offset that is inflight; the client finishes it before
    the log is read up to there, and then the broker may crash once more."""
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=1000)
    peer.send(subscribe("t", 2))
    bench.connect("p").send(*(publish("t", b"%d" % n, 2, n) for n in range(1, 6)))
    sent = peer.publishes()
    assert len(sent) == 5
    peer.send(*(m.Ack(m.PUBREC, each.packet_id, 0, {}) for each in sent))
    bench.crash()
    for _ in range(crashes):
        bench.delay_reads = True
        peer = bench.connect("c", clean=False, expiry_s=1000)
        released = acks(peer)
        peer.send(*(m.Ack(m.PUBCOMP, packet_id, 0, {}) for _, packet_id, _ in released))
        bench.advance(1)
        if crashes == 2:
            bench.crash()
            peer = bench.connect("c", clean=False, expiry_s=1000)
        bench.delay_reads = False
        bench.run()
        assert peer.publishes() == []
    bench.connect("q").send(publish("t", b"6", 2, 1))
    assert peer.payloads() == [b"6"]


def test_order_of_a_topic_holds_across_qos() -> None:
    """A QoS 1 message does not overtake a QoS 2 one that waits for the log."""
    bench = NodeBench(auto_commit=False)
    peer = bench.connect("c", expiry_s=1000)
    bench.settle()
    peer.send(subscribe("t", 2))
    bench.settle()
    peer.take()
    publisher = bench.connect("p")
    publisher.send(publish("t", b"1", 2, 1), publish("t", b"2", 1, 2))
    bench.commit()
    bench.run()
    assert peer.payloads() == []
    bench.commit()
    bench.run()
    assert peer.payloads() == [b"1", b"2"]


def test_clean_start_over_a_durable_session_waits_for_the_disk() -> None:
    bench = NodeBench(auto_commit=False)
    bench.connect("c", expiry_s=1000)
    bench.settle()
    again = bench.connect("c", commits=False)
    assert again.take(m.Connack) == []
    bench.settle()
    assert len(again.take(m.Connack)) == 1
    bench.crash()
    third = bench.connect("c", clean=False, expiry_s=1000)
    bench.settle()
    (connack,) = third.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert not connack.session_present


def test_repeated_subscribe_keeps_one_retained_scan() -> None:
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0, outbox_bytes=4096))
    publisher = bench.connect("p")
    for number in range(50):
        publisher.send(publish(f"r/{number}", bytes(500), 0, retain=True))
    peer = bench.connect("c")
    peer.connection.congested = True
    for packet_id in range(1, 30):
        peer.connection.out_bytes = 0
        peer.send(subscribe("r/#", 0, packet_id))
    session = bench.session("c")
    assert isinstance(session.retained_scans, SessionScans)
    assert len(session.retained_scans.by_filter) == len(session.retained_scans.order) == 1


@pytest.mark.parametrize("filter", ["a/#", "$share/g/a/#"])
def test_a_session_that_ends_before_its_suback_leaves_no_subscription(filter: str) -> None:
    bench = NodeBench(auto_commit=False)
    peer = bench.connect("ghost", expiry_s=100)
    bench.settle()
    peer.send(m.Subscribe(1, [m.SubscriptionRequest(filter, 1)]), m.Disconnect(0, {17: 0}))
    bench.settle()
    check_routing(bench.node.state)
    publisher = bench.connect("p")
    publisher.send(Publish(b"a/1", b"before", 1, False, False, 1, b"", 0, -1))
    bench.settle()
    # 0x10: no matching subscribers
    assert [each.reason for each in publisher.take(m.Ack) if isinstance(each, m.Ack)] == [0x10]
    member = bench.connect("member")
    member.send(m.Subscribe(1, [m.SubscriptionRequest(filter, 1)]))
    bench.settle()
    assert member.payloads() == []


def test_packets_right_behind_a_connect_with_a_password_wait_for_connack() -> None:
    bench = NodeBench(auto_commit=False)
    bench.node.state.admission.checks_passwords = True
    bench.valid_passwords["u"] = b"right"
    peer = bench.peer()
    connect = m.Connect(5, True, 0, "c", None, "u", b"right", {17: 1000})
    subscribe = m.Subscribe(1, [m.SubscriptionRequest("t", 1)])
    peer.send_bytes(encode(connect, 5) + encode(subscribe, 5))
    assert peer.received == []
    bench.settle()
    assert [type(each) for each in peer.received] == [m.Connack, m.Suback]


# A subscription that replaces one of a higher QoS


@pytest.mark.parametrize("way", ["away", "slow", "crash", "back"])
def test_replacing_a_subscription_loses_nothing_that_waits(way: str) -> None:
    """[MQTT-3.8.4-4] Many clients subscribe again after CONNACK, some with QoS 0."""
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, inflight_max=5))
    peer = bench.connect("c", expiry_s=1000)
    peer.send(subscribe("a/#", 1))
    peer.take()
    if way != "slow":
        peer.lose()
    publisher = bench.connect("p")
    for number in range(1, 2001):
        publisher.send(publish("a/b", b"%d" % number, 1, number % 100 + 1))
    if way != "slow":
        peer = bench.connect("c", clean=False, expiry_s=1000)
    more = received = peer.publishes()
    peer.send(subscribe("a/#", 0, 2))
    if way == "crash":
        bench.crash()
        peer = bench.connect("c", clean=False, expiry_s=1000)
    if way == "back":
        peer.send(subscribe("a/#", 1, 3))
    if way == "crash":
        more = received = peer.publishes()  # the first ones again
    while more:
        for each in more:
            if each.qos:
                peer.send(m.Ack(m.PUBACK, each.packet_id, 0, {}))
        more = peer.publishes()
        received = received + more
    payloads = [each.payload for each in received]
    assert payloads == [b"%d" % number for number in range(1, 2001)]
    session = bench.session("c")
    assert not session.has_drains
    # From now on it is one of QoS 0: nothing waits for a client that is away.
    if way == "back":
        return
    for is_away in (False, True):
        if is_away:
            peer.lose()
        publisher.send(publish("a/b", b"later", 1, 1))
        if is_away:
            bench.crash()
            peer = bench.connect("c", clean=False, expiry_s=1000)
        assert [(each.payload, each.qos) for each in peer.publishes()] == (
            [] if is_away else [(b"later", 0)]
        )


def test_an_unsubscribe_on_its_way_to_the_log_is_not_undone() -> None:
    """The record of a subscription that has drained would come behind it."""
    bench = NodeBench(auto_commit=False)
    peer = bench.connect("c", expiry_s=1000)
    bench.settle()
    peer.send(subscribe("a", 1))
    bench.settle()
    peer.send(subscribe("a", 0, 2), m.Unsubscribe(3, ["a"], {}))
    bench.settle()
    assert not bench.session("c").subscriptions
    bench.crash()
    assert not bench.session("c").subscriptions


def test_a_session_that_expired_during_a_stop_is_gone_at_the_start() -> None:
    bench = NodeBench()
    bench.connect("c", expiry_s=1).lose()
    bench.connect("stays", expiry_s=100).lose()
    bench.now += 5
    bench.wall_us += 5_000_000
    bench.crash()
    for client_id, expected in (("c", False), ("stays", True)):
        (connack, *_) = bench.connect(client_id, clean=False, expiry_s=1).received
        assert isinstance(connack, m.Connack)
        assert connack.session_present is expected

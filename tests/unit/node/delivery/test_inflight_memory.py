"""Unfinished deliveries cost their packet ids, not their payloads: these are in the log, and are
fetched piece by piece as window, socket and `outbox_bytes` allow."""

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.delivery.transmission import READ_BYTES_MAX
from holdfast.node.session.connection import Connection
from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_publish import publish, subscribe

PAYLOAD_BYTES = 100_000
COUNT = 150
OUTBOX_BYTES = 1 << 20
CONFIG = NodeConfig(partitions=2, sys_interval_s=0, outbox_bytes=OUTBOX_BYTES)


def fill(bench: NodeBench, count: int = COUNT) -> None:
    publisher = bench.connect("pub", 4)
    for number in range(1, count + 1):
        publisher.send(publish("t", payload(number), 1, number))


def payload(number: int) -> bytes:
    return b"%d." % number + bytes(PAYLOAD_BYTES)


def numbers(peer: Peer) -> list[int]:
    return [int(each.split(b".")[0]) for each in peer.payloads()]


def session_of(bench: NodeBench, name: str) -> Session:
    return bench.node.state.sessions[name]


def kept_bytes(session: Session) -> int:
    """Of messages that the session keeps in memory."""
    messages = [entry.message for entry in session.inflight.values()]
    messages += [delivery.message for delivery in session.outbox or ()]
    return sum(len(each.payload) for each in messages if each is not None)


def let_read(bench: NodeBench, connection: Connection) -> None:
    """The client reads what was sent; the socket takes data again."""
    connection.congested = False
    if not connection.dirty:
        connection.dirty = True
        bench.node.state.dirty.append(connection)
    bench.run()
    bench.node.handle_writable(connection)
    bench.run()


@pytest.mark.parametrize("filter", ["t", "$share/g/t"])
@pytest.mark.parametrize("qos", [1, 2])
def test_resuming_is_bounded_by_the_outbox(filter: str, qos: int) -> None:
    bench = NodeBench(CONFIG)
    peer = bench.connect("c", clean=False, expiry_s=1000)
    peer.send(subscribe(filter, qos))
    publisher = bench.connect("pub")
    for number in range(1, COUNT + 1):
        publisher.send(publish("t", payload(number), qos, number))
    session = session_of(bench, "c")
    assert len(session.inflight) == COUNT
    assert kept_bytes(session) == 0
    assert numbers(peer) == list(range(1, COUNT + 1))
    peer.lose()
    assert kept_bytes(session) == 0

    back = bench.peer()
    back.connection.congested = True
    properties: m.Properties = {p.SESSION_EXPIRY_INTERVAL: 1000}
    back.send(m.Connect(5, False, 0, "c", None, None, None, properties))
    connection = back.connection
    received: list[int] = []
    largest = 0
    for _ in range(COUNT + 1):
        largest = max(largest, connection.out_bytes + kept_bytes(session))
        let_read(bench, connection)
        received += numbers(back)
        if len(received) == COUNT:
            break
        connection.congested = True
        bench.node.handle_writable(connection)
        bench.run()
    assert received == list(range(1, COUNT + 1))
    assert largest < OUTBOX_BYTES + READ_BYTES_MAX + 3 * PAYLOAD_BYTES
    assert session.unsent is None
    if qos == 1:
        back.send(*[m.Ack(m.PUBACK, packet_id) for packet_id in list(session.inflight)])
        assert not session.inflight


def test_new_messages_come_after_unfinished_ones_that_are_fetched_in_pieces() -> None:
    """[MQTT-4.6.0-1]"""
    bench = NodeBench(CONFIG)
    peer = bench.connect("c", clean=False, expiry_s=1000)
    peer.send(subscribe("t", 1))
    fill(bench, 30)
    assert numbers(peer) == list(range(1, 31))
    peer.lose()
    back = bench.connect("c", clean=False, expiry_s=1000, properties={p.RECEIVE_MAXIMUM: 5})
    publisher = bench.connect("late", 4)
    waiting = list(range(31, 41))
    received: list[int] = []
    while page := back.publishes():
        received += [int(each.payload.split(b".")[0]) for each in page]
        bench.delay_reads = True
        back.send(*[m.Ack(m.PUBACK, each.packet_id) for each in page])
        if waiting:
            publisher.send(publish("t", b"%d." % waiting[0], 1, waiting.pop(0)))
        bench.delay_reads = False
        bench.run()
    assert received == list(range(1, 41))


def test_a_lost_connection_keeps_nothing_that_was_fetched() -> None:
    bench = NodeBench(CONFIG)
    peer = bench.connect("c", clean=False, expiry_s=1000)
    peer.send(subscribe("t", 1))
    fill(bench)
    peer.lose()
    back = bench.connect("c", clean=False, expiry_s=1000, properties={p.RECEIVE_MAXIMUM: 2})
    session = session_of(bench, "c")
    assert kept_bytes(session) > 0
    back.lose()
    assert kept_bytes(session) == 0


@pytest.mark.parametrize("expiry_s", [0, 1000])
def test_another_member_gets_what_one_has_left_from_the_log(expiry_s: int) -> None:
    bench = NodeBench(CONFIG)
    first = bench.connect("first", clean=False, expiry_s=expiry_s)
    first.send(subscribe("$share/g/t", 1))
    fill(bench)
    assert kept_bytes(session_of(bench, "first")) == 0
    assert len(numbers(first)) == COUNT
    second = bench.connect("second", properties={p.RECEIVE_MAXIMUM: 1000})
    second.send(subscribe("$share/g/t", 1))
    first.lose()
    assert numbers(second) == list(range(1, COUNT + 1))
    assert kept_bytes(session_of(bench, "second")) == 0
    (group,) = bench.node.state.groups.values()
    assert not group.returned


def test_what_retention_took_meanwhile_holds_no_group_up() -> None:
    bench = NodeBench(CONFIG)
    first = bench.connect("first")
    first.send(subscribe("$share/g/t", 1))
    fill(bench, 3)
    second = bench.connect("second")
    second.send(subscribe("$share/g/t", 1))
    bench.log = []
    first.lose()
    bench.connect("late", 4).send(publish("t", payload(9), 1, 9))
    assert numbers(second) == [9]
    assert bench.node.state.stats.dropped_lost == 3


def test_pubrec_before_the_message_is_sent_again() -> None:
    """The client had it, and says so at once."""
    bench = NodeBench(CONFIG)
    peer = bench.connect("c", clean=False, expiry_s=1000)
    peer.send(subscribe("t", 2))
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"1", 2, 1), publish("t", b"2", 2, 2))
    first, second = (each.packet_id for each in peer.publishes())
    peer.lose()
    back = bench.connect("c", clean=False, expiry_s=1000, properties={p.RECEIVE_MAXIMUM: 1})
    assert back.payloads() == [b"1"]
    back.send(m.Ack(m.PUBREC, second, 0))
    back.send(m.Ack(m.PUBREC, first, 0), m.Ack(m.PUBCOMP, first, 0), m.Ack(m.PUBCOMP, second, 0))
    assert not session_of(bench, "c").inflight
    assert session_of(bench, "c").unsent is None


def test_reading_behind_stops_when_enough_bytes_wait() -> None:
    bench = NodeBench(CONFIG)
    peer = bench.connect("c", clean=False, expiry_s=1000)
    peer.send(subscribe("t", 1))
    peer.lose()
    fill(bench)
    back = bench.connect("c", clean=False, expiry_s=1000, properties={p.RECEIVE_MAXIMUM: 1})
    session = session_of(bench, "c")
    assert kept_bytes(session) < 3 * READ_BYTES_MAX
    received: list[int] = []
    while len(received) < COUNT:
        for publish_packet in back.publishes():
            received.append(int(publish_packet.payload.split(b".")[0]))
            back.send(m.Ack(m.PUBACK, publish_packet.packet_id))
        assert kept_bytes(session) < 3 * READ_BYTES_MAX
    assert received == list(range(1, COUNT + 1))

"""A client that makes the log's backlog grow is paused, whatever it sends, until the disk has
caught up."""

from collections.abc import Iterator

import pytest

from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_publish import publish, subscribe

PENDING_BYTES_MAX = 1 << 16
CONFIG = NodeConfig(
    partitions=2,
    sys_interval_s=0,
    pending_bytes_max=PENDING_BYTES_MAX,
    qos0_logged=["logged/#"],
    receive_maximum=65_535,
)


def retained() -> Iterator[object]:
    while True:
        yield publish("t", b"x" * 1000, retain=True)


def logged() -> Iterator[object]:
    while True:
        yield publish("logged/t", b"x" * 1000)


def stored(qos: int) -> Iterator[object]:
    for number in range(1, 65_536):
        yield publish("t", b"x" * 1000, qos, number)


def subscribes() -> Iterator[object]:
    for number in range(1, 65_536):
        yield subscribe(f"{number}/" + "x" * 100, packet_id=number)


def shared_subscribes() -> Iterator[object]:
    for number in range(1, 65_536):
        yield subscribe(f"$share/{number}/" + "x" * 100, packet_id=number)


def unsubscribes() -> Iterator[object]:
    # One that changes nothing appends nothing.
    for number in range(1, 65_536):
        yield subscribe("x" * 100, packet_id=number)
        yield m.Unsubscribe(number, ["x" * 100])


def turns() -> Iterator[object]:
    """QoS 2 ids in use and free again."""
    while True:
        yield publish("t", b"", 2, 1)
        yield m.Ack(m.PUBREL, 1, 0)


FLOODS = {
    "retained": retained,
    "logged": logged,
    "QoS 1": lambda: stored(1),
    "QoS 2": lambda: stored(2),
    "SUBSCRIBE": subscribes,
    "shared SUBSCRIBE": shared_subscribes,
    "UNSUBSCRIBE": unsubscribes,
    "PUBREL": turns,
}


def durable(bench: NodeBench) -> Peer:
    peer = bench.connect("flood", clean=False, expiry_s=1000)
    bench.settle()
    return peer


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_paused(flood: str) -> None:
    bench = NodeBench(CONFIG, auto_commit=False)
    state = bench.node.state
    peer = durable(bench)
    packets = FLOODS[flood]()
    for packet in packets:
        peer.send(packet)
        if peer.connection.input_paused:
            break
        assert state.appended < 5000
    assert state.journal.pending_bytes < PENDING_BYTES_MAX + 2000
    before = state.appended
    peer.send(next(packets))
    assert state.appended == before
    bench.settle()
    assert not peer.connection.input_paused
    assert state.appended > before
    assert state.promise_bytes == 0


def test_a_new_client_waits_while_the_log_is_behind() -> None:
    bench = NodeBench(CONFIG, auto_commit=False)
    flood = durable(bench)
    while not flood.connection.input_paused:
        flood.send(publish("t", b"x" * 1000, retain=True))
    late = bench.connect("late", clean=False, expiry_s=1000, commits=False)
    assert "late" not in bench.node.state.sessions
    bench.settle()
    (connack,) = late.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason == 0


def test_who_appends_nothing_is_not_paused() -> None:
    bench = NodeBench(CONFIG, auto_commit=False)
    flood = durable(bench)
    other = bench.connect("other")
    receiver = bench.connect("receiver")
    receiver.send(subscribe("q"))
    while not flood.connection.input_paused:
        flood.send(publish("t", b"x" * 1000, retain=True))
    other.send(publish("q", b"live"), m.Pingreq())
    assert receiver.payloads() == [b"live"]
    assert not other.connection.input_paused
    assert len(other.take(m.Pingresp)) == 1


def test_memory_of_small_packets_counts() -> None:
    """What waits for a filter or a message is many times the bytes of its record."""
    bench = NodeBench(CONFIG, auto_commit=False)
    peer = durable(bench)
    requests = [m.SubscriptionRequest(f"{number}", 0) for number in range(200)]
    peer.send(m.Subscribe(1, requests))
    assert peer.connection.input_paused
    bench.settle()
    assert not peer.connection.input_paused

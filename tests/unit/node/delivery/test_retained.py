"""Retained messages follow the log, within a bound in bytes."""

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.publish.retained_updates import UPDATE_S
from holdfast.node.session.message import Message
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_publish import publish, subscribe

# Retained as the log says


def test_qos0_is_retained_when_the_log_has_it() -> None:
    """A client that subscribes between the delivery and the commit receives it at the commit."""
    bench = NodeBench(auto_commit=False)
    subscriber = bench.connect("sub")
    subscriber.send(subscribe("t"))
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"v", retain=True))
    assert subscriber.payloads() == [b"v"]
    newcomer = bench.connect("new")
    newcomer.send(subscribe("t"))
    subscriber.send(m.Unsubscribe(2, ["t"]), subscribe("t", packet_id=3))
    assert subscriber.payloads() == newcomer.payloads() == []
    bench.settle()
    for peer in (subscriber, newcomer):
        (received,) = peer.publishes()
        assert (received.payload, received.retain) == (b"v", True)


def retained(bench: NodeBench, name: str, topic: str = "t") -> list[bytes]:
    peer = bench.connect(name)
    peer.send(subscribe(topic))
    return peer.payloads()


@pytest.mark.parametrize("last", [b"new", b""])
def test_a_record_committed_later_does_not_undo_a_newer_retained_message(last: bytes) -> None:
    """The log has QoS 1 before QoS 0, and so has a restart."""
    bench = NodeBench(auto_commit=False)
    publisher, early = bench.connect("pub"), bench.connect("a")
    publisher.send(publish("t", b"old", 1, 1, retain=True))
    publisher.send(publish("t", last, retain=True))
    expected = [last] if last else []
    # It follows the record, as it does to the subscribers.
    early.send(subscribe("t"))
    assert early.payloads() == []
    bench.settle()
    assert early.payloads()[-1:] == [last]
    assert retained(bench, "b") == expected
    publisher.send(publish("t", b"newest", 1, 2, retain=True))
    bench.settle()
    assert retained(bench, "c") == [b"newest"]
    publisher.send(publish("t", last, retain=True))
    bench.settle()
    bench.crash()
    assert retained(bench, "d") == expected


def test_a_crash_before_the_log_has_it_loses_a_qos0_update() -> None:
    bench = NodeBench(auto_commit=False)
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"durable", 1, 1, retain=True))
    bench.settle()
    publisher.send(publish("t", b"lost", retain=True))
    bench.crash()
    assert retained(bench, "b") == [b"durable"]


def test_a_full_disk_delivers_qos0_and_keeps_the_retained_message() -> None:
    """A new subscriber receives the older one, after the wait for a record of the newer one."""
    bench = NodeBench(auto_commit=False)
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"older", 1, 1, retain=True))
    bench.settle()
    subscriber = bench.connect("sub")
    subscriber.send(subscribe("t"))
    assert subscriber.payloads() == [b"older"]
    bench.node.state.disk_full = True
    publisher.send(publish("t", b"newer", retain=True))
    bench.settle()
    assert subscriber.payloads() == [b"newer"]
    assert retained(bench, "a") == []
    bench.advance(UPDATE_S + 1)
    assert retained(bench, "b") == [b"older"]


# A retained set that waits for the receiver's window

WAITING = 30


def waiting(qos: int = 1, window: int = 5) -> tuple[NodeBench, Peer, Peer]:
    """A subscriber to whom the rest of the retained set waits for its window, and the publisher."""
    bench = NodeBench()
    publisher = bench.connect("pub")
    for number in range(WAITING):
        publisher.send(publish(f"t/{number:02}", b"old", qos, 1, retain=True))
    subscriber = bench.connect("sub", properties={p.RECEIVE_MAXIMUM: window})
    subscriber.send(subscribe("t/#", 1, 1))
    publisher.take()
    return bench, subscriber, publisher


def drain(peer: Peer) -> list[Publish]:
    """Everything that the peer receives when it acknowledges what it gets."""
    received: list[Publish] = []
    while publishes := peer.publishes():
        received.extend(publishes)
        for each in publishes:
            if each.qos:
                peer.send(m.Ack(m.PUBACK, each.packet_id, 0, {}))
    return received


@pytest.mark.parametrize("qos", [0, 1])
def test_a_retained_message_that_waits_is_not_older_than_a_live_one(qos: int) -> None:
    """The live QoS 0 message does not wait for the window. With a copy in the waiting page, the
    subscriber received "new", and then "old"."""
    _, subscriber, publisher = waiting()
    topics = [f"t/{number:02}" for number in range(WAITING)]
    for topic in topics:
        publisher.send(publish(topic, b"new", qos, 2, retain=True))
    last: dict[bytes, bytes] = {}
    copies = 0
    for each in drain(subscriber):
        last[each.topic] = each.payload
        copies += each.payload == b"new"
    assert last == {topic.encode(): b"new" for topic in topics}
    if qos:
        assert copies == WAITING  # once: live


def test_a_retained_message_that_is_deleted_while_it_waits_is_not_sent() -> None:
    _, subscriber, publisher = waiting()
    for number in range(5, WAITING):
        publisher.send(publish(f"t/{number:02}", b"", 0, retain=True))
    received = [each.topic for each in drain(subscriber) if each.payload]
    assert received == [f"t/{number:02}".encode() for number in range(5)]


def test_unsubscribing_ends_the_retained_set() -> None:
    """[MQTT-3.10.4-2] Without that, even messages from after UNSUBACK come."""
    bench, subscriber, publisher = waiting()
    subscriber.send(m.Unsubscribe(2, ["t/#"], {}))
    publisher.send(publish("t/29", b"after", 1, 3, retain=True))
    assert len(drain(subscriber)) == 5
    assert bench.node.state.sessions["sub"].retained_scans is None


@pytest.mark.parametrize("handling", [1, 2])
def test_a_replaced_subscription_gets_the_rest_of_the_retained_set(handling: int) -> None:
    """[MQTT-3.8.4-4], with the identifier and QoS of the new one."""
    _, subscriber, _ = waiting()
    subscriber.send(subscribe("t/#", 0, 2, identifier=7, retain_handling=handling))
    received = drain(subscriber)
    assert [each.topic for each in received] == [
        f"t/{number:02}".encode() for number in range(WAITING)
    ]
    assert {each.qos for each in received[5:]} == {0}


# Bytes of the retained store


def test_retained_store_is_bounded_in_bytes() -> None:
    config = NodeConfig(partitions=2, sys_interval_s=0, retained_bytes_max=200_000)
    bench = NodeBench(config)
    state = bench.node.state
    publisher = bench.connect("pub")
    for number in range(20):
        publisher.send(publish(f"t/{number}", b"x" * 10_000, number % 2, number, retain=True))
    assert len(state.retained) == 9
    assert state.retained.bytes.total <= 100_000
    assert state.stats.refused_quota == 11
    assert len([note for note in bench.notes if note.event == "retained_limit"]) == 1
    # One that does not fit in place of another: that one is out of date.
    publisher.send(publish("t/1", b"x" * 50_000, retain=True))
    assert retained(bench, "a", "t/1") == []
    for number in range(20):
        publisher.send(publish(f"t/{number}", b"", retain=True))
    assert (len(state.retained), state.retained.bytes.total) == (0, 0)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1])
def test_a_retained_message_has_its_payload_once(version: int, qos: int) -> None:
    bench = NodeBench()
    subscriber = bench.connect("sub", version)
    subscriber.send(subscribe("t", 1))
    publisher = bench.connect("pub", version)
    payload = b"x" * 1000
    publisher.send(publish("t", payload, qos, qos, retain=True))
    subscriber.send(subscribe("t", 1, 2))
    entry = bench.node.state.retained.get("t")
    assert isinstance(entry, Message)
    for name in ("_frame_v3", "_frame_v5", "_tail_v3", "_tail_v5"):
        assert not getattr(entry, name)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("qos", [0, 1])
def test_a_restart_has_the_same_retained_messages(qos: int, commits: bool) -> None:
    """Whatever its limits are, and though the log has the messages that found no room."""
    config = NodeConfig(partitions=2, sys_interval_s=0, retained_max=6)
    bench = NodeBench(config, auto_commit=commits)
    publisher = bench.connect("pub")
    numbers = [0, 1, 2, 3, 4, 1, 3]
    for packet_id, number in enumerate(numbers):
        payload = b"%d" % packet_id
        publisher.send(publish(f"t/{number}", payload, qos, packet_id + 1, retain=True))
    for topic in ("t/0", "t/4"):
        publisher.send(publish(topic, b"", qos, 90, retain=True))
    publisher.send(publish("t/4", b"4", qos, 91, retain=True))
    bench.settle()
    expected = retained(bench, "a", "t/#")
    assert expected == [b"5", b"2", b"4"]
    config.retained_max = 1
    for snapshot in (None, bench.snapshot()):
        bench.crash(snapshot=snapshot)
        assert retained(bench, "a", "t/#") == expected

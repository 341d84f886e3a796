"""What is retained, and when: in one step with the delivery, and within a bound in bytes."""

import pytest

from holdfast.broker.config import NodeConfig
from holdfast.broker.session.message import Message
from holdfast.protocol.mqtt import packets as m
from tests.support.node_bench import NodeBench
from tests.unit.test_node_publish import publish, subscribe

# Delivered and retained in one step


def test_qos0_is_retained_with_its_delivery() -> None:
    """Unsubscribe and subscribe right after the live copy, and the retained one is there."""
    bench = NodeBench(auto_commit=False)
    subscriber = bench.connect("sub")
    subscriber.send(subscribe("t"))
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"v", retain=True))
    assert subscriber.payloads() == [b"v"]
    newcomer = bench.connect("new")
    newcomer.send(subscribe("t"))
    subscriber.send(m.Unsubscribe(2, ["t"]), subscribe("t", packet_id=3))
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
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"old", 1, 1, retain=True))
    publisher.send(publish("t", last, retain=True))
    expected = [last] if last else []
    assert retained(bench, "a") == expected
    bench.settle()
    assert retained(bench, "b") == expected
    assert not bench.node.state.retained_ahead
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
    assert retained(bench, "a") == [b"lost"]
    bench.crash()
    assert retained(bench, "b") == [b"durable"]


def test_a_full_disk_does_not_part_delivery_and_retained_update() -> None:
    bench = NodeBench(auto_commit=False)
    publisher = bench.connect("pub")
    publisher.send(publish("t", b"older", 1, 1, retain=True))
    bench.node.state.disk_full = True
    publisher.send(publish("t", b"newer", retain=True))
    assert retained(bench, "a") == [b"newer"]
    bench.settle()
    assert retained(bench, "b") == [b"newer"]


# Bytes of the retained store


def test_retained_store_is_bounded_in_bytes() -> None:
    config = NodeConfig(partitions=2, sys_interval_s=0, retained_bytes_max=100_000)
    bench = NodeBench(config)
    state = bench.node.state
    publisher = bench.connect("pub")
    for number in range(20):
        publisher.send(publish(f"t/{number}", b"x" * 10_000, number % 2, number, retain=True))
    assert len(state.retained) == 9
    assert state.retained.size_bytes <= 100_000
    assert state.stats.refused_quota == 11
    assert len([note for note in bench.notes if note.event == "retained_limit"]) == 1
    # One that does not fit in place of another: that one is out of date.
    publisher.send(publish("t/1", b"x" * 50_000, retain=True))
    assert retained(bench, "a", "t/1") == []
    for number in range(20):
        publisher.send(publish(f"t/{number}", b"", retain=True))
    assert (len(state.retained), state.retained.size_bytes) == (0, 0)


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

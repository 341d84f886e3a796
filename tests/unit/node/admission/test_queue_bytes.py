"""The queues of a slow client are bounded in bytes. An empty message may have a packet full of user
properties, so these count, too."""

import struct
from collections.abc import Iterable

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.session.cursor import Delivery
from tests.support.node_bench import NodeBench
from tests.unit.node.delivery.test_replay import subscribe as subscribe_replay
from tests.unit.node.test_publish import publish as packet
from tests.unit.node.test_publish import subscribe as subscribe_packet

VALUE = b"v" * 65_000


def user_properties(count: int) -> bytes:
    one = b"\x26" + struct.pack(">H", 1) + b"k" + struct.pack(">H", len(VALUE)) + VALUE
    return one * count


def held(queue: Iterable[Delivery]) -> int:
    """The bytes of the messages in a queue."""
    messages = [each.message for each in queue]
    return sum(len(each.topic) + len(each.payload) + len(each.properties) for each in messages)


@pytest.mark.parametrize("qos", [1, 2])
def test_an_outbox_is_bounded_in_bytes(qos: int) -> None:
    """The subscriber reads its socket and acknowledges nothing; its window is one message."""
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0))
    slow = bench.connect("slow", properties={33: 1})
    slow.send(subscribe_packet("t", qos=1))
    publisher = bench.connect("p")
    for number in range(1, 101):
        publisher.send(packet("t", b"", 1, number, properties=user_properties(10)))
    session = bench.node.state.sessions["slow"]
    outbox = session.outbox or ()
    # 650 kB each, so without the properties they would be limited by their count only.
    assert held(outbox) <= bench.config.outbox_bytes + 2_097_152


def test_waiting_qos0_is_bounded_in_bytes() -> None:
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0))
    publisher = bench.connect("p")
    for number in range(1, 4):
        publisher.send(packet("t", b"old", 1, number))
    reader = bench.connect("r", properties={33: 1})
    subscribe_replay(reader, "t", "earliest")
    for _ in range(100):
        publisher.send(packet("t", b"", 0, 0, properties=user_properties(10)))
    waiting = bench.node.state.sessions["r"].waiting_qos0
    assert waiting is not None
    deliveries = [each for queue in waiting.by_partition.values() for _, each in queue]
    assert held(deliveries) <= bench.config.outbox_bytes + 2_097_152

"""Numbered messages that are refused by a rate or a bound are stored when they come again."""

import pytest

from holdfast.node.admission.limits import AdmissionLimits, RateLimits
from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.publish.test_producers import hf_seq


def numbered(peer: Peer, value: str, topic: str = "t", qos: int = 1, packet_id: int = 1) -> int:
    """The reason code of the reply."""
    peer.take()
    block = hf_seq(value)
    peer.send(Publish(topic.encode(), b"x", qos, False, False, packet_id, block, 0, -1))
    [ack] = peer.take(m.Ack)
    assert isinstance(ack, m.Ack)
    return ack.reason if ack.reason >= 0x80 else reasons.SUCCESS


def test_a_rate_loses_no_numbered_message() -> None:
    """A sequence above the rate is not in the table, and a later one waits for it."""
    limits = AdmissionLimits(client=RateLimits(messages_per_s=1))
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, admission=limits))
    peer = bench.connect("c")
    assert numbered(peer, "p:0:1") == reasons.SUCCESS
    assert numbered(peer, "p:0:2") == reasons.QUOTA_EXCEEDED
    bench.advance(10)
    assert numbered(peer, "p:0:3") == reasons.QUOTA_EXCEEDED
    bench.advance(10)
    assert numbered(peer, "p:0:2") == reasons.SUCCESS
    bench.advance(10)
    assert numbered(peer, "p:0:3") == reasons.SUCCESS
    assert [each.sequence for each in bench.messages()] == [1, 2, 3]
    # One that is stored is acknowledged again, whatever the rate.
    assert numbered(peer, "p:0:3") == reasons.SUCCESS
    assert len(bench.messages()) == 3


@pytest.mark.parametrize("delayed", ["$delayed/60/t", "$delayed/5/t"])
def test_a_bound_loses_no_numbered_delayed_message(delayed: str) -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, delayed_messages_max=1)
    bench = NodeBench(config)
    peer = bench.connect("c")
    assert numbered(peer, "p:0:1", "$delayed/5/t") == reasons.SUCCESS
    assert numbered(peer, "p:0:2", delayed) == reasons.QUOTA_EXCEEDED
    bench.advance(6)
    assert numbered(peer, "p:0:2", delayed) == reasons.SUCCESS
    assert len(bench.node.state.delayed) == 1


@pytest.mark.parametrize("qos", [1, 2])
def test_a_rate_counts_delayed_messages(qos: int) -> None:
    limits = AdmissionLimits(client=RateLimits(messages_per_s=1))
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, admission=limits))
    peer = bench.connect("c")
    for packet_id, reason in ((1, reasons.SUCCESS), (2, reasons.QUOTA_EXCEEDED)):
        topic = b"$delayed/5/t"
        peer.send(Publish(topic, b"x", qos, False, False, packet_id, b"", 0, -1))
        [ack] = peer.take(m.Ack)
        assert isinstance(ack, m.Ack)
        assert ack.reason == reason
    assert len(bench.node.state.delayed) == 1


def test_a_delayed_message_of_qos_2_is_recognised_by_its_number() -> None:
    bench = NodeBench()
    peer = bench.connect("c")
    peer.connection.numbers_qos2 = True
    assert numbered(peer, "p:0:1", "$delayed/5/t", 2) == reasons.SUCCESS
    peer.lose()
    peer = bench.connect("c")
    peer.connection.numbers_qos2 = True
    assert numbered(peer, "p:0:1", "$delayed/5/t", 2, packet_id=2) == reasons.SUCCESS
    assert len(bench.node.state.delayed) == 1

"""What is remembered to be quick is bounded in bytes, and a refused topic is not remembered."""

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.routing import routing
from holdfast.node.session.connection import ALIASES_IN_BYTES_MAX
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.security.acl import AclFile
from tests.support.node_bench import NodeBench
from tests.unit.node.test_publish import publish, subscribe


def test_routes_are_bounded_in_bytes() -> None:
    bench = NodeBench()
    state = bench.node.state
    topics = [b"%d/" % number + b"x" * 60_000 for number in range(1500)]
    for topic in topics:
        routing.find_route(state, topic)
        assert state.routes_bytes <= routing.ROUTES_BYTES_MAX
    assert len(state.routes) < len(topics)
    assert state.routes_bytes == sum(route.size_bytes for route in state.routes.values())
    assert state.routes_bytes >= sum(2 * len(topic) for topic in state.routes)


def test_receivers_count() -> None:
    bench = NodeBench()
    state = bench.node.state
    alone = routing.find_route(state, b"t").size_bytes
    for number in range(100):
        bench.connect(f"c{number}").send(subscribe("#"))
    assert routing.find_route(state, b"t").size_bytes >= alone + 800
    assert state.routes_bytes == sum(route.size_bytes for route in state.routes.values())


def test_nothing_is_remembered_of_a_refused_topic() -> None:
    bench = NodeBench()
    state = bench.node.state
    state.acl = AclFile.parse("topic read #\n", "acl")
    peer = bench.connect("c")
    before = len(state.routes)
    for number in range(20):
        peer.send(publish(f"refused/{number}", b"", number % 2, number))
    peer.send(publish("$SYS/x", b""))
    assert len(state.routes) == before


@pytest.mark.parametrize("version", [5])
def test_aliases_of_a_client_are_bounded_in_bytes(version: int) -> None:
    config = NodeConfig(partitions=2, sys_interval_s=0, topic_alias_max=65_535)
    bench = NodeBench(config)
    peer = bench.connect("c", version)
    topic = "x" * 50_000
    for number in range(1, ALIASES_IN_BYTES_MAX // 50_000 + 1):
        peer.send(publish(topic, b"", alias=number))
    # The same alias anew costs nothing.
    peer.send(publish(topic, b"", alias=1), publish("", b"", alias=1))
    assert not peer.closed
    peer.send(publish(topic, b"", alias=65_535))
    (last,) = peer.take(m.Disconnect)
    assert isinstance(last, m.Disconnect)
    assert last.reason == reasons.QUOTA_EXCEEDED
    assert p.REASON_STRING in last.properties

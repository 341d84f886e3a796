"""The rights of delayed messages: when they are published, and when they are due."""

from holdfast.security.acl import AclFile
from tests.support.node_bench import NodeBench
from tests.unit.test_delayed import delay
from tests.unit.test_node_replay import drain, subscribe


def test_a_delayed_message_is_refused_when_it_is_published() -> None:
    bench = NodeBench()
    bench.node.state.acl = AclFile.parse("topic write b\ntopic read #\n", "acl")
    publisher, reader = bench.connect("p"), bench.connect("r")
    subscribe(reader, "#")
    for qos in (0, 1, 2):
        delay(publisher, "$delayed/5/a", "x", qos)
    delay(publisher, "$delayed/5/b", "y", packet_id=2)
    assert len(bench.node.state.delayed) == 1
    bench.advance(5)
    assert drain(reader) == ["y"]


def test_a_delayed_message_is_dropped_when_it_is_due() -> None:
    bench = NodeBench()
    publisher, reader = bench.connect("p"), bench.connect("r")
    subscribe(reader, "#")
    delay(publisher, "$delayed/5/a", "x")
    delay(publisher, "$delayed/5/b", "y", packet_id=2)
    bench.node.state.acl = AclFile.parse("topic readwrite b\ntopic read #\n", "acl")
    bench.advance(5)
    assert drain(reader) == ["y"]
    assert len(bench.node.state.delayed) == 0
    assert bench.node.state.stats.delayed_denied == 1
    bench.crash()
    assert len(bench.node.state.delayed) == 0

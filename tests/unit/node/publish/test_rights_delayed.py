"""The rights of delayed messages: when they are published, and when they are due."""

import pytest

from holdfast.node.admission.bans import Ban
from holdfast.node.state.ban_records import record_ban
from holdfast.security.acl import AclFile
from tests.support.node_bench import NodeBench
from tests.unit.node.delivery.test_replay import drain, subscribe
from tests.unit.node.publish.test_delayed import delay


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


@pytest.mark.parametrize("name", ["p", "other"])
def test_a_delayed_message_of_a_banned_client_is_dropped(name: str) -> None:
    bench = NodeBench()
    publisher, reader = bench.connect("p"), bench.connect("r")
    subscribe(reader, "#")
    delay(publisher, "$delayed/5/a", "x")
    record_ban(bench.node.state, Ban("client", name, 0, "too loud", "user amy", 1), print)
    bench.run()
    bench.advance(5)
    assert drain(reader) == ([] if name == "p" else ["x"])
    assert len(bench.node.state.delayed) == 0
    assert bench.node.state.stats.delayed_denied == (name == "p")


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

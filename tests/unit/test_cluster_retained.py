"""A QoS 0 message with RETAIN in a simulated cluster: a client that subscribes, on any node,
between its delivery and the commit of its record gets it as retained."""

import pytest

from holdfast.broker.config import NodeConfig
from holdfast.broker.effects import Note
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Session, Subscription
from holdfast.cluster.publish.retained_updates import UPDATE_S, UPDATES_MAX, RetainedUpdates
from holdfast.protocol.mqtt import packets as m
from holdfast.storage.record import FLAG_RETAIN, RETAINED, SESSION, Record
from tests.support.node_bench import NodeBench
from tests.unit.test_rights_cluster import Peer, Stage


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    found = Stage(monkeypatch)
    for host in found.world.hosts.values():
        assert host.process is not None
        host.process.state.acl = None
    return found


def retain(peer: Peer, payload: bytes) -> None:
    peer.send(m.Publish(b"public/t", payload, 0, True, False, 0, b"", 0, -1))


@pytest.mark.parametrize("node", ["a", "b", "c"])
def test_a_subscriber_in_between_gets_it(stage: Stage, node: str) -> None:
    publisher = stage.login("a", "alice")
    witness = stage.subscribe(stage.login("a", "bob", "witness"), "public/+")
    # So the other nodes know the filter already, and SUBACK waits for none of them.
    stage.subscribe(stage.login(node, "bob", "resident"), "public/+")
    newcomers = [stage.login(node, "bob", f"new-{number}") for number in range(20)]
    retain(publisher, b"old")
    stage.until(lambda: "old" in witness.payloads)
    stage.run(1.0)
    retain(publisher, b"new")
    while "new" not in witness.payloads:
        stage.run(0.0001)
    process = stage.world.hosts[stage.names[node]].process
    assert process is not None
    assert node != "a" or len(process.cluster_node.retained_updates) == 1
    # From before the commit until long after it.
    for newcomer in newcomers:
        newcomer.send(m.Subscribe(9, [m.SubscriptionRequest("public/+", 0)]))
        stage.run(0.0003)
    stage.run(1.0)
    for newcomer in newcomers:
        assert newcomer.payloads[-1] == "new", newcomer.payloads
        assert node != "a" or newcomer.payloads == ["new"]
    assert len(process.cluster_node.retained_updates) == 0


def test_a_record_that_cannot_be_applied_is_reported(stage: Stage) -> None:
    """Every node logs it, and counts what it refuses, though the record changes only the
    replicated state."""
    process = stage.world.hosts[stage.names["a"]].process
    assert process is not None
    process.cluster_node.replicated.apply(Record(0, SESSION, payload=b"["))
    assert process.cluster_node.replicated.damaged == 1
    process.cluster_node.handle_timers(process.state.now + 1.0)
    notes = [each.event for each in process.state.effects if isinstance(each, Note)]
    assert "record_not_understood" in notes
    process.cluster_node.replicated.state.stats.refused_quota += 1
    assert process.state.stats.refused_quota == 1


def message(payload: bytes, publisher: bytes = b"p") -> Message:
    return Message(b"t", payload, 0, True, b"", -1, 1, publisher)


def record(payload: bytes, publisher: bytes = b"p") -> Record:
    return Record(0, RETAINED, FLAG_RETAIN, 1, b"t", publisher, b"", payload)


def updates() -> tuple[RetainedUpdates, NodeBench, Subscription]:
    bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0))
    found = RetainedUpdates(bench.node.state)
    return found, bench, Subscription(Session("c"), "+", 0, False, False, 0, 0)


def test_records_of_others_and_earlier_ones_are_not_taken_for_it() -> None:
    found, _, subscription = updates()
    found.delivered("t", message(b"2"))
    found.wanted([subscription])
    for other in (record(b"1"), record(b"2", b"q")):
        found.applied(other)
        assert len(found) == 1
    found.applied(record(b"2"))
    assert len(found) == 0


@pytest.mark.parametrize("commits", [True, False])
def test_a_subscription_that_waits_for_an_update_receives_one_in_the_end(commits: bool) -> None:
    """Left out of its scan, it gets the new message, or the old one if the record never comes."""
    bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0))
    state = bench.node.state
    subscriber = bench.connect("sub")
    state.set_retained("t", message(b"old"))
    found = RetainedUpdates(state)
    found.delivered("t", message(b"new"))
    subscriber.send(m.Subscribe(1, [m.SubscriptionRequest("t", 0, False, False, 2)], {}))
    subscription = state.sessions["sub"].subscriptions["t"]
    assert found.is_behind("t", subscription)
    if commits:
        state.set_retained("t", message(b"new"))
        found.applied(record(b"new"))
    else:
        state.now += UPDATE_S + 1
        assert not found.is_behind("t", subscription)
        found.forget_overdue()
    bench.run()
    assert subscriber.payloads() == [b"new" if commits else b"old"]


def test_updates_are_bounded_in_number_and_time() -> None:
    found, bench, subscription = updates()
    for number in range(UPDATES_MAX + 10):
        found.delivered(f"t/{number}", message(b""))
    assert len(found) == UPDATES_MAX
    bench.node.state.now += UPDATE_S + 1
    found.wanted([subscription])
    assert len(found) == 0

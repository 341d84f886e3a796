"""A QoS 0 message with RETAIN in a simulated cluster: a client that subscribes, on any node,
between its delivery and the commit of its record gets it as retained."""

import pytest

from holdfast.log.record import FLAG_RETAIN, RETAINED, SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.effects import Note
from holdfast.node.publish.retained_updates import UPDATE_S, UPDATES_MAX, RetainedUpdates
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session, Subscription
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.sim.checks import Message as SimMessage
from tests.support.node_bench import NodeBench
from tests.unit.node.test_rights_cluster import Peer, Stage


@pytest.fixture
def stage() -> Stage:
    found = Stage()
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


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_qos_0_follows_qos_1_to_subscribers_of_all_nodes(
    stage: Stage, *, awaited: bool, retain: bool
) -> None:
    """[MQTT-4.6.0-6] Two messages of QoS 0 follow each one of QoS 1: before its commit, or right
    after its PUBACK, when other nodes may not have applied it. Before the commit, the order holds
    for the clients of the publisher's node."""
    publisher = stage.login("a", "alice")
    readers = [
        stage.subscribe(stage.login(node, "bob", f"{node}-{qos}"), "public/t", qos)
        for node in "abc"
        for qos in (0, 1)
    ]
    expected = []
    for number in range(1, 30):
        texts = [f"#{number}", f"#{number}-0", f"#{number}-00"]
        expected += texts
        for text, qos in zip(texts, (1, 0, 0), strict=True):
            message = SimMessage(text, publisher.client_id, "public/t", number, qos)
            message.times_sent = 1
            stage.world.checks.published(message)
            packet_id = number if qos else 0
            keeps = retain and text.endswith("-0")
            publisher.send(
                m.Publish(b"public/t", text.encode(), qos, keeps, False, packet_id, b"", 0, -1)
            )
            if qos and awaited:
                publisher.answer(m.Ack)
        stage.run(0.002 * (number % 4))
    stage.until(lambda: all(len(each.payloads) == len(expected) for each in readers))
    stage.run(0.5)
    for each in readers if awaited else readers[:2]:
        assert each.payloads == expected
    for host in stage.world.hosts.values():
        assert host.process is not None
        assert not host.process.cluster_node.interest.followers
        assert len(host.process.cluster_node.retained_updates) == 0
        assert host.process.state.promise_bytes == 0
    newcomer = stage.subscribe(stage.login("c", "bob", "new"), "public/t", 0)
    assert newcomer.payloads == (["#29-0"] if retain else [])


KEPT = [f"public/kept/{number:02}" for number in range(30)]


class Slow(Peer):
    """The client of a durable session with a window of 4. It acknowledges so many messages."""

    def __init__(self, stage: Stage, node: str, acknowledged: int) -> None:
        self.left = acknowledged
        super().__init__(stage, node, "bob", "reader")
        fields: dict[int, object] = {17: 3600, 33: 4}
        self.send(m.Connect(5, False, 0, "reader", None, None, None, fields))  # type: ignore[arg-type]
        assert isinstance(self.answer(m.Connack), m.Connack)

    def _arrived(self, publish: Publish) -> None:
        self.acknowledges = self.left > 0
        self.left -= 1
        super()._arrived(publish)


@pytest.mark.parametrize("ending", ["lost", "taken over", "killed"])
def test_a_retained_set_is_completed_at_another_node(stage: Stage, ending: str) -> None:
    """The connection ends twice in the middle of the set."""
    publisher = stage.login("c", "alice")
    for number, topic in enumerate(KEPT):
        message = SimMessage(f"#{number}", "alice", topic, number, 1 + number % 2)
        message.times_sent = 1
        stage.world.checks.published(message)
        publisher.send(
            m.Publish(
                topic.encode(),
                message.text.encode(),
                message.qos,
                True,
                False,
                number + 1,
                b"",
                0,
                -1,
            )
        )
        publisher.answer(m.Ack)
    stage.run(1.0)
    peers: list[Peer] = [stage.subscribe(Slow(stage, "a", 6), "public/kept/+")]
    for node, before in (("b", "a"), ("c", "b")):
        stage.run(0.5)
        if ending == "killed":
            stage.world.hosts[stage.names[before]].kill(power=False)
        elif ending == "lost":
            peers[-1].lose()
        assert 6 <= len(peers[-1].payloads) <= 10
        peers.append(Slow(stage, node, 6 if node == "b" else 1000))
        if ending == "killed":
            host = stage.world.hosts[stage.names[before]]
            host.start()
            stage.until(lambda host=host: host.process is not None and host.process.is_ready)
    stage.run(5.0)
    got = [payload for peer in peers for payload in peer.payloads]
    assert set(got) == {f"#{number}" for number in range(len(KEPT))}
    # What was in the window comes again, and after a crash also what no record has.
    assert len(got) <= len(KEPT) + (8 if ending != "killed" else 20)

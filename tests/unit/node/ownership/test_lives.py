"""A client whose session begins again gets a new one, whatever the nodes know of each other at that
time: its QoS 2 messages are not taken for those of its session before, and Session Present is not
that of the session before."""

import pytest

from holdfast.log.partition import partition_of
from holdfast.log.record import MESSAGE
from holdfast.node.groups.queue_changes import delete_queue
from holdfast.node.state.recorded_state import filter_memory
from holdfast.protocol.mqtt import packets as m
from tests.sim.checks import Message
from tests.sim.process import Process
from tests.unit.node.test_rights_cluster import LONG_S, Peer, Stage

PACKET_ID = 1


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.until(lambda: len(leaders(stage)) == 3)
    stage.run(1.0)
    return stage


def leaders(stage: Stage) -> list[str]:
    metadata = stage.world.newest_metadata()
    assert metadata is not None
    return sorted({each.leader for each in metadata.partitions})


def leader(stage: Stage, key: str) -> str:
    metadata = stage.world.newest_metadata()
    assert metadata is not None
    return metadata.partitions[partition_of(key.encode(), stage.world.settings.partitions)].leader


def nodes(stage: Stage) -> tuple[str, str, str]:
    """The last one leads Raft. So a lost link between the others keeps no partition from going
    on."""
    third = process_of(stage, "n1").cluster_node.meta.leader_id
    one, two = (name for name in stage.world.hosts if name != third)
    return one, two, third


def led_by(stage: Stage, node: str) -> str:
    """A topic, or a client id, whose partition this node leads."""
    return next(name for name in map("k{}".format, range(100)) if leader(stage, name) == node)


def process_of(stage: Stage, node: str) -> Process:
    process = stage.world.hosts[node].process
    assert process is not None
    return process


def recorded_life(stage: Stage, node: str, client_id: str) -> int:
    """The epoch in which the session began, as far as the node has applied its records."""
    return process_of(stage, node).images.state.sessions[client_id].life


def send(stage: Stage, peer: Peer, topic: str, text: str, *, dup: bool = False) -> None:
    message = Message(text, peer.client_id, topic, len(stage.world.checks.messages), 2)
    message.times_sent = 1
    if not dup:
        stage.world.checks.published(message)
    payload = text.encode()
    packet = m.Publish(topic.encode(), payload, 2, False, dup, PACKET_ID, b"", 0, -1)
    peer.send(packet)


def stored(stage: Stage) -> list[str]:
    return [
        record.payload.decode()
        for batches in stage.world.checks.committed
        for batch in batches
        for record in batch.records()
        if record.kind == MESSAGE
    ]


def cut(stage: Stage, one: str, other: str) -> None:
    """Cuts a link, also through the third node."""
    for name in (one, other):
        process = stage.world.hosts[name].process
        assert process is not None
        process.runtime.links.relayed.objection = None
    stage.world.network.cut(one, other)
    stage.world.network.cut(other, one)


def test_a_message_that_is_not_committed_is_of_the_session_before(stage: Stage) -> None:
    home, topic_node, follower = nodes(stage)
    client_id = led_by(stage, home)
    topic = led_by(stage, topic_node)
    old = stage.login(home, "alice", client_id, expiry_s=LONG_S)
    cut(stage, topic_node, follower)
    send(stage, old, topic, "old")
    stage.run(0.05)
    assert stored(stage) == []
    new = stage.login(home, "alice", client_id, expiry_s=LONG_S)
    send(stage, new, topic, "new")
    stage.run(0.05)
    assert stored(stage) == []
    stage.world.network.heal()
    new.answer(m.Ack)
    assert stored(stage) == ["old", "new"]


def test_a_leader_that_lags_behind_the_home_knows_a_new_session(stage: Stage) -> None:
    """Hours later, if its copy of the home partition is large."""
    home, topic_node, other = nodes(stage)
    client_id = led_by(stage, home)
    topic = led_by(stage, topic_node)
    old = stage.login(other, "alice", client_id, expiry_s=LONG_S)
    send(stage, old, topic, "old")
    old.answer(m.Ack)
    old.lose()
    lagging = process_of(stage, topic_node).cluster_node.replication
    lagging.suspend(partition_of(client_id.encode(), stage.world.settings.partitions))
    stage.run(5.0)
    new = stage.login(other, "alice", client_id, expiry_s=LONG_S)
    born = recorded_life(stage, topic_node, client_id)
    assert recorded_life(stage, other, client_id) > born
    send(stage, new, topic, "new")
    new.answer(m.Ack)
    assert stored(stage) == ["old", "new"]
    # The life goes on: its own message is not stored again.
    new.lose()
    stage.run(0.1)
    again = stage.login(other, "alice", client_id, clean=False, expiry_s=LONG_S)
    send(stage, again, topic, "new", dup=True)
    again.answer(m.Ack)
    assert stored(stage) == ["old", "new"]


def test_session_present_at_the_moment_of_expiry(stage: Stage) -> None:
    """One client after the other connects, each a little later before its session expires."""
    expiry_s = 1
    clients = [f"d{number}" for number in range(40)]

    def sessions(stage: Stage) -> dict[str, list[str]]:
        found = process_of(stage, leader(stage, "pilot")).images.state.sessions
        return {name: list(session.subscriptions) for name, session in found.items()}

    peers = {}
    for name in ["pilot", *clients]:
        peers[name] = stage.login("n1", "alice", name, expiry_s=expiry_s)
        stage.subscribe(peers[name], "public/#")
    schedule = stage.world.schedule
    left_at = schedule.now
    peers["pilot"].leave()
    stage.until(lambda: "pilot" not in sessions(stage))
    lasts_s = schedule.now - left_at
    left_at = schedule.now
    for name in clients:
        peers[name].leave()
    presents = set()
    for number, name in enumerate(clients):
        schedule.advance(left_at + lasts_s - 0.012 + number * 0.0004)
        peers[name] = connect(stage, name, expiry_s)
    stage.run(1.0)
    for name in clients:
        connack = peers[name].answer(m.Connack)
        assert isinstance(connack, m.Connack)
        assert connack.session_present == (sessions(stage)[name] != []), name
        presents.add(connack.session_present)
    assert presents == {False, True}


def connect(stage: Stage, client_id: str, expiry_s: int) -> Peer:
    peer = Peer(stage, "n1", "alice", client_id)
    peer.send(m.Connect(5, False, 0, client_id, None, None, None, {17: expiry_s}))
    return peer


def test_a_queue_that_is_deleted_elsewhere_begins_again(stage: Stage) -> None:
    """At a node that has not applied its end."""
    home, subscriber_node, other = nodes(stage)
    key = "$share/$queue/" + next(
        name
        for name in map("k{}/#".format, range(100))
        if leader(stage, "$share/$queue/" + name) == home
    )
    filter = key.removeprefix("$share/")

    def have_it() -> list[bool]:
        return [key in process_of(stage, node).images.state.queues for node in (home, other)]

    stage.subscribe(stage.login(other, "alice", "first"), filter).leave()
    stage.until(lambda: key in process_of(stage, subscriber_node).images.state.queues)
    lagging = process_of(stage, subscriber_node)
    partition = partition_of(key.encode(), stage.world.settings.partitions)
    lagging.cluster_node.replication.suspend(partition)
    stage.run(5.0)
    outcomes: list[object] = []
    delete_queue(process_of(stage, other).state, key, lambda *outcome: outcomes.append(outcome))
    process_of(stage, other).touch()
    stage.until(lambda: bool(outcomes) and have_it() == [False, False])
    assert key in lagging.images.state.queues
    peer = stage.login(subscriber_node, "alice", led_by(stage, other))
    peer.send(m.Subscribe(9, [m.SubscriptionRequest(filter, 1)]))
    stage.run(1.0)
    lagging.cluster_node.replication.resume(partition, lagging.state.now)
    peer.answer(m.Suback)
    stage.run(0.1)
    assert have_it() == [True, True]


def test_the_filters_of_all_nodes_leave_room_for_others(stage: Stage) -> None:
    """Each node counts the durable sessions of all nodes, and its own others."""
    one, two, _ = nodes(stage)
    cost = filter_memory("f/00")
    for node in stage.world.hosts:
        process_of(stage, node).state.config.filter_bytes_max = 16 * cost

    def granted(node: str, user: str, client_id: str, expiry_s: int) -> int:
        peer = stage.login(node, user, client_id, expiry_s=expiry_s)
        requests = [m.SubscriptionRequest(f"f/{number:02}", 1) for number in range(12)]
        peer.send(m.Subscribe(9, requests))
        answer = peer.answer(m.Suback)
        assert isinstance(answer, m.Suback)
        stage.run(0.5)
        return answer.reasons.count(1)

    assert granted(one, "alice", "a1", LONG_S) == 8
    assert granted(two, "alice", "a2", LONG_S) == 0
    assert granted(two, "bob", "b2", LONG_S) == 4
    # This one is not in the log: it counts at its own node, where two has bob's alone.
    assert granted(two, "alice", "a3", 0) == 6
    for node in stage.world.hosts:
        replicated = process_of(stage, node).images.state.filters
        assert (replicated.of("alice"), replicated.of("bob")) == (8 * cost, 4 * cost)
        replicated.check()

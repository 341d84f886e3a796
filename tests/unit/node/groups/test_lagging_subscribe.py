"""A SUBSCRIBE or PUBLISH whose record is not applied at the client's node, because it lags."""

import pytest

from holdfast.log.partition import partition_of
from holdfast.node.publish.forwarding import COMMIT_WAIT_S
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.properties import SERVER_REFERENCE
from holdfast.protocol.topics.names import queue_key
from tests.unit.node.feeds.test_given_up import begin, process_at


def named(form: str, home: int) -> str:
    """A name of this form, of a session or a group with this home partition of four."""
    names = (form.format(f"x{number}") for number in range(99))
    return next(each for each in names if partition_of(queue_key(each).encode(), 4) == home)


@pytest.mark.parametrize("form", ["$share/{}/a", "$queue/{}", "plain"])
def test_its_client_is_disconnected(form: str) -> None:
    """The node lags in the home of the group, the queue, or the session. The record may be stored,
    so the client goes on with the session at another node."""
    stage, leader, _, third, _ = begin(3)
    filter = form if form == "plain" else named(form, 0)
    client = named("{}", 0 if form == "plain" else 1)
    reader = stage.login(third, "alice", client, expiry_s=6000)
    process_at(stage, third).cluster_node.replication.suspend(0)
    stage.run(0.5)
    reader.send(m.Subscribe(9, [m.SubscriptionRequest(filter, 1)]))
    stage.run(COMMIT_WAIT_S - 1.0)
    assert not reader.is_closed
    assert not reader.packets
    stage.until(lambda: reader.is_closed)
    last = reader.packets[-1]
    assert isinstance(last, m.Disconnect)
    assert last.reason == reasons.SERVER_BUSY
    reader = stage.login(leader, "alice", client, clean=False, expiry_s=6000)
    stage.subscribe(reader, filter, 1)


def test_a_publisher_is_sent_to_a_replica_in_sync() -> None:
    """The leader has committed the record, and the node of the publisher does not follow it."""
    stage, leader, _, third, topic = begin(3)
    client = named("{}", 1)
    writer = stage.login(third, "alice", client, expiry_s=6000)
    process_at(stage, third).cluster_node.replication.suspend(0)
    stage.run(0.5)
    stage.publish(writer, topic, 1, 1)
    stage.run(COMMIT_WAIT_S - 1.0)
    assert not writer.is_closed
    assert not writer.packets
    stage.until(lambda: writer.is_closed)
    last = writer.packets[-1]
    assert isinstance(last, m.Disconnect)
    assert last.reason == reasons.USE_ANOTHER_SERVER
    assert last.properties[SERVER_REFERENCE]
    writer = stage.login(leader, "alice", client, clean=False, expiry_s=6000)
    stage.publish(writer, topic, 1, 1)
    assert isinstance(writer.answer(m.Ack), m.Ack)

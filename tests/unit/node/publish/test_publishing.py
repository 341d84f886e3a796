"""A QoS 2 message that comes again while the first one is on its way in the cluster."""

import pytest

from holdfast.log import record as log_record
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.cluster_node import BrokerPort
from holdfast.node.config import NodeConfig
from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.connections.session_open import finish_open
from holdfast.node.context import UNAVAILABLE_S, ClusterContext
from holdfast.node.effects import Note
from holdfast.node.node import Node
from holdfast.node.node_state import ClusterPort, NodeState, Promise, ReplyPromise
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Session
from tests.e2e.wire import connect, publish


class Refusing(ClusterPort):
    """A cluster that takes nothing."""

    def __init__(self, state: NodeState) -> None:
        self.state = state
        self.replies = 0

    def open_session(
        self, connection: Connection, client_id: str, opening: AcceptedConnect
    ) -> None:
        session = Session(client_id)
        session.epoch = 1
        finish_open(self.state, connection, session, False, opening)

    def has_room(self, client_id: str) -> bool:
        return True

    def append(self, record: Record) -> None:
        raise AssertionError("it is refused")

    def publish(self, record: Record, promise: Promise) -> None:
        raise AssertionError("it is refused")

    def promise(self, promise: Promise) -> None:
        self.replies += 1

    def refusal(self, connection: Connection, record: Record) -> Rejection:
        return Rejection("this node reaches no majority of the cluster")

    def is_congested(self, part: int) -> bool:
        return False

    def session_detached(self, session: Session) -> None:
        """Nobody asks."""


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("dup", [False, True])
def test_a_repetition_that_cannot_be_taken_is_not_refused(version: int, dup: bool) -> None:
    """The first one may be stored yet: to refuse the second would say that it was not. Without an
    answer the client sends it once more."""
    node = Node(NodeConfig(node_id="n1", partitions=1), Journal(1, replicated=True))
    cluster = node.state.cluster = Refusing(node.state)
    node.state.recorded = node.state
    connection = node.handle_connected("remote", ListenerRules("listener"))
    node.handle_data(connection, connect("c", version))
    node.handle_resumed(connection)
    assert not connection.closing
    node.handle_data(connection, publish("t", b"x", 2, 7, version, dup=dup))
    is_told = version == 5 and not dup
    assert cluster.replies == is_told
    assert connection.closing == (not is_told)


@pytest.mark.parametrize("version", [4, 5])
def test_the_client_gets_the_true_reason(version: int) -> None:
    node = Node(NodeConfig(node_id="n1", partitions=1), Journal(1, replicated=True))
    cluster = Refusing(node.state)
    replies: list[Promise] = []
    cluster.promise = replies.append  # type: ignore[method-assign]
    node.state.cluster, node.state.recorded = cluster, node.state
    connection = node.handle_connected("remote", ListenerRules("listener"))
    node.handle_data(connection, connect("c", version))
    node.handle_resumed(connection)
    node.state.effects = []
    node.handle_data(connection, publish("t", b"x", 1, 7, version))
    if version == 5:
        (reply,) = replies
        assert isinstance(reply, ReplyPromise)
        assert b"this node reaches no majority of the cluster" in reply.data
    else:
        notes = [each for each in node.state.effects if isinstance(each, Note)]
        assert any("reaches no majority" in str(note.fields) for note in notes), notes


def test_the_majority_is_looked_at_when_it_is_needed() -> None:
    """A node that looks now and then goes on refusing when the majority is back."""
    node = Node(NodeConfig(node_id="n1", partitions=1), Journal(1, replicated=True))
    side = BrokerPort.__new__(BrokerPort)
    context = ClusterContext("n1", Journal(1, replicated=True))
    side._state = node.state
    side._context = context
    connection = Connection(1 << 20, "", ListenerRules(""))
    record = Record(0, log_record.MESSAGE)
    node.state.now = UNAVAILABLE_S + 1
    assert side.refusal(connection, record)
    context.reaches_majority = lambda now: True
    assert not side.refusal(connection, record)
    context.reaches_majority = lambda now: False
    node.state.now += UNAVAILABLE_S
    assert not side.refusal(connection, record)
    node.state.now += 0.1
    assert side.refusal(connection, record)

"""A node that was held up hands nothing out before it knows whose its sessions are."""

from holdfast.cluster.barriers import Barriers
from holdfast.cluster.doubt import Doubt
from holdfast.cluster.fabric import Fabric
from holdfast.log.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.delivery import can_send
from holdfast.node.state import NodeState
from holdfast.replication.commands import CHANGES_NOTHING
from holdfast.replication.proposals import Refused
from holdfast.session.connection import OPEN, Connection
from holdfast.session.cursor import Delivery
from holdfast.session.message import Message
from holdfast.session.session import Session

HELD_UP_S = 0.5
KNOWN = Refused(CHANGES_NOTHING)


class Bench:
    """A node that leads the one partition, with one client."""

    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        self.state = NodeState(NodeConfig(partitions=1), journal)
        fabric = Fabric("n1", journal)
        fabric.leading[0] = 1
        self.barriers = Barriers(self.state, fabric)
        self.requests = 0
        self.doubt = Doubt(self.state, self.barriers, self.propose_nothing, HELD_UP_S, 0.0)
        self.connection = Connection(1 << 20, "", "")
        self.connection.state = OPEN
        self.session = Session("c", b"c")
        self.session.connection = self.connection
        self.session.inflight_max = 10
        self.connection.session = self.session
        self.state.sessions["c"] = self.session

    def propose_nothing(self, now: float) -> int:
        self.requests += 1
        return self.requests

    def go_on_at(self, now: float) -> None:
        self.state.now = now
        self.doubt.tick(now)
        self.doubt.ask(now)
        self.end_turn()

    def end_turn(self) -> None:
        self.barriers.advance()
        self.doubt.advance()

    def can_send(self) -> bool:
        return can_send(self.state, self.session)


def test_messages_wait_until_everything_before_is_known() -> None:
    bench = Bench()
    bench.go_on_at(HELD_UP_S)
    assert bench.can_send()
    bench.go_on_at(3.0)
    assert not bench.can_send()
    message = Message(b"t", b"payload", 1, False, b"", -1, 0, b"p")
    message.partition = 0
    bench.session.push(Delivery(message, 1, False, ()))
    assert not bench.doubt.proposal_done(bench.requests + 1, KNOWN)
    assert bench.doubt.proposal_done(bench.requests, KNOWN)
    bench.end_turn()
    assert bench.can_send()
    assert bench.connection.out
    assert len(bench.session.inflight) == 1


def test_it_asks_until_it_is_answered() -> None:
    bench = Bench()
    bench.go_on_at(3.0)
    assert bench.doubt.proposal_done(1, Refused("nobody leads"))
    bench.go_on_at(3.2)
    assert bench.requests == 2
    bench.go_on_at(3.4)
    assert bench.requests == 2
    assert not bench.can_send()
    bench.doubt.proposal_done(2, KNOWN)
    bench.end_turn()
    assert bench.can_send()


def test_an_answer_from_before_tells_nothing() -> None:
    bench = Bench()
    bench.go_on_at(3.0)
    bench.go_on_at(6.0)
    assert not bench.doubt.proposal_done(1, KNOWN)
    bench.end_turn()
    assert not bench.can_send()
    bench.doubt.proposal_done(2, KNOWN)
    bench.end_turn()
    assert bench.can_send()


def test_a_node_without_clients_has_no_doubt() -> None:
    bench = Bench()
    bench.state.sessions.clear()
    bench.go_on_at(3.0)
    assert bench.requests == 0
    assert not bench.state.is_unsure

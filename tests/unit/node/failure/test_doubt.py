"""A node that was held up hands nothing out before it knows whose its sessions are."""

import pytest
from msgspec.structs import replace

from holdfast.log.journal.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.delivery.transmission import can_send
from holdfast.node.metadata.commands import CHANGES_NOTHING
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, NodePhase, PartitionInfo
from holdfast.node.metadata.requests import Outcome, RequestRefused
from holdfast.node.ownership.lease import ALONE, GIVE_UP_S, LEADERLESS_S, OwnershipLease
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.session.connection import CLOSED, OPEN, Connection
from holdfast.node.session.cursor import Delivery
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session
from tests.support.journal_port import new_state

HELD_UP_S = 0.5
KNOWN = RequestRefused(CHANGES_NOTHING)


def metadata_of(leader: str, **states: str) -> ClusterMetadata:
    nodes = {
        node: NodeInfo(node, "i1", f"{node}:1", "", "", state=state)
        for node, state in {"n1": NodePhase.UP, **states}.items()
    }
    partition = PartitionInfo(tuple(nodes), (), leader, 1, tuple(nodes))
    return ClusterMetadata("c", len(nodes), 1, nodes, (partition,), 1, tuple(nodes))


class Bench:
    """n1, which leads the one partition, with one client."""

    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        self.state = new_state(NodeConfig(partitions=1), journal)
        self.context = ClusterContext("n1", journal)
        self.context.leading[0] = 1
        self.reads = MetadataReads(self.propose_nothing)
        self.barriers = Barriers(self.state, self.context, self.reads)
        self.requests = 0
        self.acknowledged_at: dict[str, float] = {}
        self.metadata_leader = "n1"
        self.is_asking = False
        self.doubt = OwnershipLease(
            self.state,
            self.context,
            self.barriers,
            lambda node: self.acknowledged_at.get(node, float("-inf")),
            lambda: self.metadata_leader,
            lambda: self.is_asking,
            HELD_UP_S,
            0.0,
        )
        self.connection = Connection(1 << 20, "", ListenerRules(""))
        self.connection.state = OPEN
        self.session = Session("c")
        self.session.connection = self.connection
        self.session.inflight_max = 10
        self.connection.session = self.session
        self.state.sessions["c"] = self.session

    def agree(self, metadata: ClusterMetadata) -> None:
        self.context.metadata = metadata
        self.doubt.renew()

    def run(self, until: float, *heard_by: str) -> None:
        """In turns of 0.1 s; each of them hears what was sent in the one before."""
        while self.state.now < until - 0.01:
            for node in heard_by:
                self.acknowledged_at[node] = self.state.now
            self.state.now += 0.1
            self.doubt.tick(self.state.now)
            self.doubt.renew()
            self.end_turn()

    def know(self) -> None:
        """Everything decided so far."""
        self.proposal_done(self.requests, KNOWN)

    def propose_nothing(self, now: float) -> int:
        self.requests += 1
        return self.requests

    def go_on_at(self, now: float) -> None:
        self.state.now = now
        self.doubt.tick(now)
        self.end_turn()

    def proposal_done(self, request: int, outcome: Outcome) -> None:
        self.reads.proposal_done(request, outcome, self.state.now)
        self.end_turn()

    def end_turn(self) -> None:
        self.doubt.ask()
        self.barriers.advance()
        self.reads.advance(self.state.now)
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
    bench.session.push(Delivery(message, 1, False, None))
    bench.proposal_done(bench.requests + 1, KNOWN)
    assert not bench.can_send()
    bench.proposal_done(bench.requests, KNOWN)
    assert bench.can_send()
    assert bench.connection.out
    assert len(bench.session.inflight) == 1


def test_it_asks_until_it_is_answered() -> None:
    bench = Bench()
    bench.go_on_at(3.0)
    bench.proposal_done(1, RequestRefused("nobody leads"))
    bench.go_on_at(3.2)
    assert bench.requests == 2
    bench.go_on_at(3.4)
    assert bench.requests == 2
    assert not bench.can_send()
    bench.proposal_done(2, KNOWN)
    assert bench.can_send()


def test_an_answer_from_before_tells_nothing() -> None:
    bench = Bench()
    bench.go_on_at(3.0)
    bench.go_on_at(6.0)
    bench.proposal_done(1, KNOWN)
    assert not bench.can_send()
    bench.proposal_done(2, KNOWN)
    assert bench.can_send()


def test_a_node_without_clients_has_no_doubt() -> None:
    bench = Bench()
    bench.state.sessions.clear()
    bench.go_on_at(3.0)
    assert bench.requests == 0
    assert not bench.state.is_ownership_expired


def test_clients_that_wait_for_their_sessions_are_clients() -> None:
    bench = Bench()
    bench.state.sessions.clear()
    bench.is_asking = True
    bench.go_on_at(3.0)
    assert bench.state.is_ownership_expired


def test_who_comes_to_a_node_that_is_ill_finds_it_in_doubt() -> None:
    bench = Bench()
    bench.state.sessions.clear()
    bench.doubt.set_unhealthy(True, 0.1)
    bench.go_on_at(0.2)
    assert not bench.state.is_ownership_expired
    bench.is_asking = True
    bench.go_on_at(0.3)
    assert bench.state.is_ownership_expired
    bench.know()
    bench.go_on_at(0.4)
    assert bench.state.is_ownership_expired
    bench.doubt.set_unhealthy(False, 0.5)
    bench.go_on_at(0.6)
    bench.know()
    assert not bench.state.is_ownership_expired


def test_a_node_that_is_not_heard_by_one_that_decides_is_in_doubt() -> None:
    bench = Bench()
    bench.agree(metadata_of("n2", n2=NodePhase.UP, n3=NodePhase.UP))
    bench.run(5.0, "n2", "n3")
    assert bench.doubt.count == 0
    # It reassigns nothing alone before the order to release a session has waited twice as long.
    bench.run(4.8 + ALONE * HELD_UP_S, "n3")
    assert bench.can_send()
    bench.run(5.0 + ALONE * HELD_UP_S, "n3")
    assert not bench.can_send()
    # Nothing that is learned before it is heard again would help.
    assert bench.requests == 0
    bench.run(6.1, "n2", "n3")
    assert bench.requests == 1
    assert not bench.can_send()
    bench.know()
    assert bench.can_send()
    assert bench.doubt.count == 1


def test_what_is_learned_counts_only_if_nobody_was_deaf_meanwhile() -> None:
    bench = Bench()
    bench.agree(metadata_of("n2", n2=NodePhase.UP, n3=NodePhase.UP))
    bench.run(1.0)
    bench.run(1.2, "n2", "n3")
    assert bench.requests == 1
    bench.run(1.3 + ALONE * HELD_UP_S, "n3")
    bench.know()
    assert not bench.can_send()
    bench.run(2.5, "n2", "n3")
    assert bench.requests == 2
    bench.know()
    assert bench.can_send()


def test_a_node_that_is_down_or_decides_nothing_does_not_matter() -> None:
    bench = Bench()
    bench.agree(metadata_of("n1", n2=NodePhase.UP, n3=NodePhase.UP))
    bench.run(1.0, "n2", "n3")
    bench.run(1.0 + ALONE * HELD_UP_S, "n2")
    # It may have decided something when it was heard last.
    assert not bench.can_send()
    bench.run(2.1, "n2")
    bench.know()
    assert bench.can_send()
    bench.run(4.0, "n2")
    assert bench.can_send()
    # Now it decides.
    bench.agree(metadata_of("n3", n2=NodePhase.UP, n3=NodePhase.UP))
    bench.run(4.1, "n2")
    assert not bench.can_send()
    bench.agree(metadata_of("n1", n2=NodePhase.UP, n3=NodePhase.DOWN))
    bench.run(4.4, "n2")
    bench.know()
    assert bench.can_send()


def test_two_that_do_not_hear_it_may_decide_together() -> None:
    bench = Bench()
    states = dict.fromkeys(("n2", "n3", "n4", "n5"), NodePhase.UP)
    bench.agree(metadata_of("n1", **states))
    bench.run(1.0, "n2", "n3", "n4", "n5")
    bench.run(0.8 + HELD_UP_S, "n2", "n3")
    assert bench.can_send()
    bench.run(1.0 + HELD_UP_S, "n2", "n3")
    assert not bench.can_send()
    bench.run(3.0, "n2", "n3")
    assert bench.requests == 0
    assert not bench.can_send()


@pytest.mark.parametrize(
    ("third", "voters"), [(NodePhase.UP, ("n2",)), (NodePhase.DOWN, ("n1", "n2", "n3"))]
)
def test_one_may_decide_alone_in_a_small_cluster(third: str, voters: tuple[str, ...]) -> None:
    """n2 needs no other vote to count this node as down, or is the only other one."""
    bench = Bench()
    bench.agree(replace(metadata_of("n2", n2=NodePhase.UP, n3=third), voters=voters))
    bench.run(1.0, "n2", "n3")
    bench.run(0.8 + HELD_UP_S, "n3")
    assert bench.can_send()
    bench.run(1.0 + HELD_UP_S, "n3")
    assert not bench.can_send()


def test_clients_are_sent_away_if_nothing_helps() -> None:
    bench = Bench()
    bench.agree(metadata_of("n2", n2=NodePhase.UP, n3=NodePhase.UP))
    bench.run(GIVE_UP_S + 5, "n3")
    assert bench.connection.state == OPEN
    bench.context.reaches_majority = lambda now: True
    bench.run(GIVE_UP_S + 5.2, "n3")
    assert bench.connection.state == CLOSED


def test_a_session_is_closed_whose_partition_nobody_leads() -> None:
    bench = Bench()
    bench.context.leading[0] = 0
    bench.agree(metadata_of("", n2=NodePhase.UP, n3=NodePhase.UP))
    bench.run(0.9, "n2", "n3")
    bench.go_on_at(3.0)
    bench.run(3.3, "n2", "n3")
    bench.know()
    bench.run(3.0 + LEADERLESS_S, "n2", "n3")
    assert bench.connection.state == OPEN
    assert not bench.can_send()
    bench.run(3.5 + LEADERLESS_S, "n2", "n3")
    assert bench.connection.state == CLOSED
    assert not bench.state.is_ownership_expired


def test_a_node_without_clients_is_unsure_too() -> None:
    """The link to n2 is cut, which n3 hears: n2 does not become down. Without a client nothing is
    kept of it, and the clients that come are refused all the same."""
    bench = Bench()
    bench.state.sessions.clear()
    bench.context.reaches_majority = lambda now: True
    bench.agree(metadata_of("n2", n2=NodePhase.UP, n3=NodePhase.UP))
    bench.run(2.0, "n2", "n3")
    assert bench.doubt.unsure_s() == 0
    bench.run(1.8 + HELD_UP_S, "n3")
    assert bench.doubt.unsure_s() == 0
    bench.run(10.0, "n3")
    assert not bench.state.is_ownership_expired
    assert bench.doubt.unsure_s() == pytest.approx(10.0 - 1.9 - ALONE * HELD_UP_S)
    bench.is_asking = True
    bench.run(11.0, "n3")
    assert bench.state.is_ownership_expired
    bench.is_asking = False
    bench.run(11.0 + 2 * GIVE_UP_S, "n3")
    assert not bench.state.is_ownership_expired
    assert bench.doubt.unsure_s() > GIVE_UP_S
    bench.run(60.0, "n2", "n3")
    assert bench.doubt.unsure_s() == 0

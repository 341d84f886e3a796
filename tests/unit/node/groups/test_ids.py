"""A member keeps the packet id of a shared group's QoS 2 record until the log says that the group
has finished with it: PUBREL waits for that."""

from holdfast.log.journal.journal import Journal
from holdfast.log.record import CURSOR, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.groups.assignments import AgentContext
from holdfast.node.groups.node_agent import NodeAgent
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.pending_records import Appender
from holdfast.node.session import session as session_module
from holdfast.node.session.connection import CLOSED, OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Group, Inflight, Session, tag_of
from holdfast.node.session.state import encode_cursor
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from tests.support.journal_port import new_state

KEY = "$share/g/t/#"
PLACE = (1, 7)


class Pubrel(Promise):
    is_sent = False

    def release(self, state: NodeState) -> None:
        self.is_sent = True


def of_groups(session: Session, *names: str) -> dict[object, session_module.GroupMember]:
    groups = [Group(name, "t/#") for name in names]
    return {
        group: session_module.GroupMember(session, group.key, 2, False, False, 0, 0)
        for group in groups
    }


class Member:
    def __init__(self) -> None:
        journal = Journal(2, replicated=True)
        config = NodeConfig(partitions=2)
        self.state = new_state(config, journal)
        self.images = ReplicatedState(RecordedState(config, journal))
        context = ClusterContext("n1", journal)
        forwarding = RecordForwarder(self.state, context, Appender())
        self.promises = forwarding.promises
        self.shares = NodeAgent(
            AgentContext(self.state, context, forwarding, self.images),
            lambda *_: None,
            lambda *_: None,
            lambda *_: None,
        )
        self.session = Session("c")
        self.session.groups = of_groups(self.session, "g")
        self.entry = Inflight(*PLACE, 2, False)
        self.entry.group_tag = tag_of(KEY)
        self.connection = Connection(1 << 20, "", ListenerRules(""))
        self.connection.state = OPEN
        self.pubrel = Pubrel(self.connection)

    def wait(self) -> None:
        self.shares.waits.wait(self.session, self.entry, self.pubrel)
        self.promises.add(self.pubrel)

    def log(self, positions: list[tuple[int, int]], *done: tuple[int, int]) -> None:
        payload = encode_cursor(positions, {}, list(done))
        record = Record(0, CURSOR, client_id=KEY.encode(), sequence=3, payload=payload)
        self.images.groups.apply(record)
        self.shares.flush()


def test_it_waits_for_the_log() -> None:
    member = Member()
    member.wait()
    member.log([(0, 5), (1, 5)], (1, 6))
    assert not member.pubrel.is_sent
    member.log([], PLACE)
    assert member.pubrel.is_sent


def test_positions_behind_it_do_as_well() -> None:
    member = Member()
    member.wait()
    member.log([(1, 8)])
    assert member.pubrel.is_sent


def test_what_the_log_says_already_is_not_waited_for() -> None:
    member = Member()
    member.log([(1, 5)], PLACE)
    assert member.shares.waits.unfinished(member.session, member.entry) == []


def test_it_waits_for_as_long_as_the_group_has_no_coordinator() -> None:
    """The packet id is all that tells the next one: let go of, the record would go to another."""
    member = Member()
    member.log([(0, 5), (1, 5)])
    member.wait()
    member.state.now += 3600
    member.shares.tidy()
    assert not member.pubrel.is_sent
    member.log([], PLACE)
    assert member.pubrel.is_sent


def test_a_group_that_has_ended_is_not_waited_for() -> None:
    member = Member()
    member.log([(0, 5), (1, 5)])
    member.wait()
    member.log([])
    assert member.pubrel.is_sent


def test_a_group_that_was_never_logged_ends_without_a_word() -> None:
    member = Member()
    member.wait()
    member.shares.tidy()
    assert not member.pubrel.is_sent
    member.session.groups = None
    member.shares.tidy()
    assert member.pubrel.is_sent


def test_a_member_that_has_left_a_group_keeps_the_id_while_that_lasts() -> None:
    member = Member()
    member.log([(0, 5), (1, 5)])
    member.wait()
    member.session.groups = None
    member.shares.tidy()
    assert not member.pubrel.is_sent


def test_nothing_is_kept_for_a_connection_that_is_gone() -> None:
    member = Member()
    member.wait()
    member.connection.state = CLOSED
    member.shares.tidy()
    assert not member.shares.waits


def test_only_the_group_that_gave_it_is_waited_for() -> None:
    """The other one may get to it late: a member there is away."""
    member = Member()
    member.session.groups = of_groups(member.session, "other", "g")
    member.wait()
    member.log([], PLACE)
    assert member.pubrel.is_sent

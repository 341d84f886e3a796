"""A node that may have been taken for lost hands no records of shared groups to its members: others
may have them by then. [MQTT-4.8.2-4]"""

from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.delivery.subscriptions import leave_groups
from holdfast.node.groups.assignments import AgentContext
from holdfast.node.groups.codec import AgentReport, Assign
from holdfast.node.groups.control_frames import FullReport
from holdfast.node.groups.node_agent import NodeAgent
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.pending_records import Appender
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, GroupMember, Session
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from tests.support.journal_port import new_state

PARTITIONS = 2


class Node:
    """Leads the home of its group itself."""

    def __init__(self, qos: int = 2) -> None:
        journal = Journal(PARTITIONS, replicated=True)
        config = NodeConfig(node_id="n1", partitions=PARTITIONS)
        self.state = new_state(config, journal)
        images = ReplicatedState(RecordedState(config, journal))
        context = LedHere("n1", journal)
        self.reports: list[AgentReport] = []
        self.tells: list[FullReport] = []
        self.shares = NodeAgent(
            AgentContext(
                self.state, context, RecordForwarder(self.state, context, Appender()), images
            ),
            lambda _, tell: self.tells.append(tell),
            lambda _, report: self.reports.append(report),
            lambda *_: None,
        )
        self.group = Group("g", "t")
        self.session = self.join("c", qos)
        self.home = partition_of(self.group.key.encode(), PARTITIONS)
        self.shares.flush()
        self.shares.handle_report_ack("n1", self.tells[-1].number, self.tells[-1].homes)
        self.shares.flush()

    def join(self, client_id: str, qos: int) -> Session:
        """A client with capacity for one message subscribes."""
        session = Session(client_id)
        session.inflight_max = 1
        session.connection = Connection(1 << 20, "", ListenerRules(""))
        session.connection.state = OPEN
        member = GroupMember(session, self.group.key, qos, False, False, 0, 0)
        self.group.members[session] = member
        session.groups = {self.group: member}
        self.group.attach(member)
        self.shares.changed(self.group)
        return session

    def assign(self, *offsets: int) -> None:
        messages = []
        for offset in offsets:
            message = Message(b"t", b"%d" % offset, 2, False, b"", -1, 0, b"p")
            message.partition = 0
            message.offset = offset
            messages.append(message)
        number = self.tells[-1].number
        self.shares.assigned("n1", Assign(self.home, 1, number, self.group.key, messages))

    def returned(self) -> list[tuple[int, int]]:
        self.shares.flush()
        places = [place for report in self.reports for place in report.returned]
        self.reports.clear()
        return places


class LedHere(ClusterContext):
    def leader(self, partition: int) -> str:
        return self.node_id

    def epoch(self, partition: int) -> int:
        return 1


def test_what_waits_for_a_member_goes_back() -> None:
    node = Node()
    node.assign(5, 6, 7)
    assert len(node.session.inflight) == 1
    assert node.returned() == []
    node.state.is_ownership_expired = True
    assert node.returned() == [(0, 6), (0, 7)]


def test_what_is_assigned_meanwhile_goes_back_unseen() -> None:
    """It may have been on its way since before."""
    node = Node()
    node.state.is_ownership_expired = True
    node.assign(5)
    node.state.is_ownership_expired = False
    assert node.returned() == [(0, 5)]
    assert not node.session.inflight


def test_the_coordinator_learns_what_members_can_take() -> None:
    node = Node()
    limits = []
    for is_unsure in (True, False):
        node.state.is_ownership_expired = is_unsure
        node.shares.flush()
        limits.append(node.reports[-1].limit)
    assert limits == [0, 1]
    node.assign(5)
    assert len(node.session.inflight) == 1


def test_records_of_the_last_member_go_back_when_another_joins_in_the_same_turn() -> None:
    """Its group has ended then, and another one begins. No member has the records."""
    node = Node(qos=1)
    node.assign(5, 6)
    assert len(node.session.inflight) == 1
    assert node.returned() == []
    leave_groups(node.state, node.session, [node.group])
    node.group.members.clear()
    node.shares.changed(node.group)
    node.group = Group("g", "t")
    node.join("d", 1)
    assert node.returned() == [(0, 5), (0, 6)]

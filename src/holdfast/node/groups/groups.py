"""Connects the shared groups' coordinator of a node's homes with the agent of its members.

The coordinator gives each record to one node, weighted by the number of members there, up to the
capacity that the node has reported. The node gives it to one of its members. Then it reports the
record as finished, or returns it (`node_agent`). A record is with exactly one of: the coordinator,
one node, finished. The frames are in `codec`.

Within one node the two sides call each other directly.
"""

from typing import Final

from holdfast.log.record import Record
from holdfast.node.delivery.delivery import ready_member, send_unlisted
from holdfast.node.frame_kinds import GROUP, BadFrame
from holdfast.node.groups.assignments import AgentContext
from holdfast.node.groups.codec import (
    AgentReport,
    Assign,
    decode_assign,
    decode_report,
    encode_assign,
    encode_report,
)
from holdfast.node.groups.control_frames import (
    ASK,
    ASSIGN,
    HEARD,
    REPORT,
    TELL,
    FullReport,
    Place,
    decode_full_report,
    decode_report_ack,
    decode_report_request,
    encode_full_report,
    encode_report_ack,
    encode_report_request,
)
from holdfast.node.groups.coordinator import Coordinator
from holdfast.node.groups.durable_members import log_join, log_leave
from holdfast.node.groups.group_state import Coordination
from holdfast.node.groups.node_agent import NodeAgent
from holdfast.node.node_state import GroupPort, Promise
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.session.connection import Connection
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, Inflight, Session

ROUNDS_MAX: Final = 8
"""The most exchanges per turn between the two sides of one node. Further ones wait for the next
turn."""


class Groups(GroupPort):
    """The coordinator and the agent of one node, and the frames between those of several nodes."""

    def __init__(
        self,
        context: AgentContext,
        barriers: Barriers,
    ) -> None:
        self._context = context.cluster
        self._state = context.state
        self._replicated = context.replicated
        self.coordinator = Coordinator(
            context, barriers, self._send_ack, self._send_assign, self._send_report_request
        )
        self.agent = NodeAgent(
            context, self._send_full_report, self._send_report, self.coordinator.list_sent
        )

    def changed(self, group: Group) -> None:
        self.agent.changed(group)

    def sent(self, group: Group, message: Message) -> None:
        share = self.agent.assignments.get(group.key)
        place = (message.partition, message.offset)
        if share is not None and place in share.assigned:
            is_listed = message.qos == 2 or not self._context.is_alone
            self.coordinator.note_sent(share, place, is_listed=is_listed)

    def finished(self, group: Group, partition: int, offset: int) -> None:
        if self._context.is_alone:
            share = self.agent.assignments.get(group.key)
            if share is not None and (
                not share.assigned or (partition, offset) not in share.assigned
            ):
                self.coordinator.note_progress(share)
                return
        self.agent.finished(group.key, (partition, offset))

    def received(self, group: Group, entry: Inflight) -> None:
        self.agent.finished(group.key, (entry.partition, entry.offset))

    def denied(self, group: Group, partition: int, offset: int) -> None:
        self.agent.denied(group.key, (partition, offset))

    def move_record(self, group: Group, session: Session, entry: Inflight) -> None:
        entry.group = None
        self.agent.note_session_record(group.key, session, (entry.partition, entry.offset))

    def await_finish(self, promise: Promise, session: Session, entry: Inflight) -> None:
        self.agent.waits.wait(session, entry, promise)

    def joining(self, connection: Connection, session: Session, filter: str) -> None:
        client_id = session.client_id
        is_recorded = self._replicated.group_members.is_recorded(filter, client_id)
        # A member that subscribes again has its record.
        if not is_recorded or filter not in session.subscriptions:
            log_join(self._state, filter, client_id, session.epoch, Promise(connection))

    def left(self, session: Session, filter: str) -> None:
        """Removes the member record once the log has the end of the subscription.

        It stays if the session subscribes again: its newer member record is in the log before this
        removal would be. It stays too if another node owns the session now, where this
        UNSUBSCRIBE had no effect.
        """
        recorded = self._replicated.state.sessions.get(session.client_id)
        if recorded is None or recorded.epoch != session.epoch or session.subscribes_awaited:
            return
        if filter not in recorded.subscriptions:
            log_leave(self._state, filter, session.client_id, session.epoch)

    def record(self, group: Group, message: Message) -> None:
        if not (self._context.is_alone and message.qos == 1 and self._pass(group, message)):
            self.coordinator.record(group, message)

    def _pass(self, cursor: Group, message: Message) -> bool:
        """Sends a record that was just committed to a member, unless others wait for one."""
        coordination = cursor.coordination
        assert isinstance(coordination, Coordination)
        if (
            not coordination.is_open
            or not cursor.tailing
            or cursor.reading
            or cursor.outbox
            or cursor.returned
            or coordination.is_full
        ):
            return False
        share = coordination.share
        if share is None or share.group is None:
            share = coordination.share = self.agent.assignments.get(cursor.key)
            if share is None or share.group is None:
                return False
        group = share.group
        if group.returned or group.deferred:
            return False
        member = ready_member(self._state, group, message.topic)
        if member is None:
            # The capacity is measured before the coordinator assigns the record.
            self.agent.changed(group)
            return False
        share.sent.add(message.partition, message.offset)
        send_unlisted(self._state, group, member, message)
        self.coordinator.note_progress(share)
        return True

    def handle_read(
        self, group: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        self.coordinator.handle_read(group, records, positions, done)

    def _is_self(self, node: str) -> bool:
        return node == self._context.node_id

    def _send_full_report(self, node: str, tell: FullReport) -> None:
        if self._is_self(node):
            self.coordinator.handle_full_report(node, tell)
        else:
            self._context.send(node, GROUP, encode_full_report(tell))

    def _send_ack(self, node: str, number: int, homes: list[tuple[int, int]]) -> None:
        if self._is_self(node):
            self.agent.handle_report_ack(node, number, homes)
        else:
            self._context.send(node, GROUP, encode_report_ack(number, homes))

    def _send_report(self, node: str, report: AgentReport) -> None:
        if self._is_self(node):
            self.coordinator.report(node, report)
        else:
            self._context.send(node, GROUP, encode_report(report))

    def _send_assign(self, node: str, assign: Assign) -> None:
        if self._is_self(node):
            self.agent.assigned(node, assign)
        else:
            self._context.send(node, GROUP, encode_assign(assign))

    def _send_report_request(self, node: str, homes: list[tuple[int, int]]) -> None:
        if self._is_self(node):
            self.agent.handle_report_request(node, homes)
        else:
            self._context.send(node, GROUP, encode_report_request(homes))

    def handle_frame(self, node: str, payload: bytes) -> None:
        """Takes a GROUP frame. Raises BadFrame when it is malformed."""
        operation = payload[0] if payload else 0
        if operation == TELL:
            tell = decode_full_report(payload)
            for stock in tell.capacities:
                self._check(stock.assigned + stock.finished)
            self.coordinator.handle_full_report(node, tell)
        elif operation == HEARD:
            number, homes = decode_report_ack(payload)
            self.agent.handle_report_ack(node, number, homes)
        elif operation == REPORT:
            self.coordinator.report(node, decode_report(payload))
        elif operation == ASSIGN:
            assign = decode_assign(payload)
            self._check([(message.partition, message.offset) for message in assign.messages])
            self.agent.assigned(node, assign)
        elif operation == ASK:
            self.agent.handle_report_request(node, decode_report_request(payload))
        else:
            raise BadFrame(f"an operation {operation} on groups, which this version does not know")

    def _check(self, places: list[Place]) -> None:
        partitions = len(self._context.leading)
        for partition, _ in places:
            if not 0 <= partition < partitions:
                raise BadFrame(f"a record in partition {partition} of {partitions}")

    def start_leading(self, partition: int, epoch: int) -> None:
        """Begins to coordinate a home partition. The own agent reports to it like every other."""
        self.coordinator.start_leading(partition, epoch)
        self.agent.lose(partition)

    def stop_leading(self, partition: int) -> None:
        """Ends the coordination of a home partition."""
        self.coordinator.stop_leading(partition)

    def disconnected(self, node: str) -> None:
        """Handles the loss of the link to `node`, on both sides."""
        self.agent.lose_node(node)
        self.coordinator.disconnected(node)

    def flush(self) -> None:
        """Exchanges reports and assignments at the end of a turn."""
        for _ in range(ROUNDS_MAX):
            self.agent.flush()
            self.coordinator.flush(is_awaited=self._context.is_alone and bool(self.agent.waits))
            if not self.agent.is_touched and not self.coordinator.is_dirty:
                return

    def is_used(self) -> bool:
        """Whether there are groups to check: with members here, or coordinated here."""
        return bool(self.agent.assignments) or self.coordinator.has_groups()

    def tidy(self) -> None:
        """Runs the periodic checks of both sides."""
        self.agent.tidy()
        self.coordinator.tidy()

    def timer(self) -> float:
        """Returns the time of the next `flush`."""
        return min(self.agent.timer(), self.coordinator.timer())

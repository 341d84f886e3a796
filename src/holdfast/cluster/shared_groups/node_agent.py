"""The agent of a node in shared groups.

It reports to the coordinator of each group the capacity of the members here, and gives them the
assigned records.

Invariant: a record stays in `assigned` until it is finished (a member has it) or returned. The next
report informs the coordinator which of the two happened. If the coordinator or the link changes
first, the next full report (TELL) does. Counter-example: a member finishes a record, and the report
is lost with the link. Without `finished` in the TELL, a new coordinator assigns the record again.
"""

from collections.abc import Callable
from typing import Final

from holdfast.broker.delivery.delivery import note_blocked, note_room, pump_group
from holdfast.broker.delivery.transmission import can_send
from holdfast.broker.promise import Promise
from holdfast.broker.session.connection import CLOSED, OPEN
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Group, Inflight, Session, tag_of
from holdfast.broker.state import NodeState
from holdfast.cluster.context import ClusterContext
from holdfast.cluster.frame_kinds import BadFrame
from holdfast.cluster.publish.forwarding import RecordForwarder
from holdfast.cluster.shared_groups.codec import AgentReport, Assign
from holdfast.cluster.shared_groups.control_frames import FullReport, NodeCapacity, Place
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.storage.partition import partition_of

LIMIT_MAX: Final = 2000
"""The most records of one group at one node, whatever the capacity of its members."""
FINISHED_MAX: Final = 100_000
"""The most finished records of one group that the log does not have as finished. A new coordinator
may assign the oldest ones again if there are more."""
QUEUE_WAIT_S: Final = 0.5
"""The longest time in seconds that an assigned record waits for a member with capacity. Then it is
returned."""
KEPT_WAIT_S: Final = 60.0
"""The longest time in seconds that a QoS 2 record waits for the record of the session that has kept
it. It applies while the home partition of that session has no leader.

Then it is given to another member, unless the log has it as kept. It may arrive twice if the lost
leader returns with the session's record. That is better than a record that never arrives.
"""
ASK_AGAIN_S: Final = 0.1
"""The interval in seconds after which a TELL without HEARD is repeated. The next leader may apply
the metadata later than this node."""


class FinishWait:
    """A promise that waits until `group` has finished, by the log, with the record that it gave to
    `session`."""

    def __init__(self, group: Group, session: Session, place: Place, promise: Promise) -> None:
        self.group = group
        self.session = session
        self.place = place
        self.promise = promise


class NodeAssignments:
    """The records of one group that are assigned to this node, and what the coordinator knows of
    them."""

    def __init__(self, key: str, home: int) -> None:
        self.key = key
        self.home = home
        # None: no client here has subscribed.
        self.group: Group | None = None
        self.assigned: dict[Place, None] = {}
        self.finished: dict[Place, None] = {}
        # The finished and the returned records that are not reported yet.
        self.done: list[Place] = []
        self.returned: list[Place] = []
        # Those of `returned` that no member here may read.
        self.denied: list[Place] = []
        # The records denied since members last joined or left, and those assigned again since.
        self.refused: dict[Place, None] = {}
        self.again: dict[Place, None] = {}
        # `Group.changes` when the coordinator was last informed of joined or left members.
        self.changes = 0
        # The start of the group, if it begins at this node, until the log has its positions.
        self.start: list[int] | None = None
        self.announces_start = False
        # The capacity as last reported to the coordinator.
        self.members = 0
        self.durable = 0
        self.limit = 0
        self.queued_at = -1.0


class NodeAgent:
    """The shared groups of this node's members.

    Invariant: nothing is taken from a coordinator that has not confirmed the present TELL with
    HEARD. Its assignments may be older than what that TELL says.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        forwarding: RecordForwarder,
        replicated: ReplicatedState,
        send_tell: Callable[[str, FullReport], None],
        send_report: Callable[[str, AgentReport], None],
    ) -> None:
        self._state = state
        self._context = context
        self._forwarding = forwarding
        self._replicated = replicated
        self._send_full_report = send_tell
        self._send_report = send_report
        self.assignments: dict[str, NodeAssignments] = {}
        self._touched: dict[NodeAssignments, None] = {}
        # The groups with something for `tidy`.
        self._untidy: dict[NodeAssignments, None] = {}
        self._waiting: list[FinishWait] = []
        # QoS 2 records that sessions may have kept: client id and time, oldest first.
        self._session_records: dict[tuple[NodeAssignments, Place], tuple[str, float]] = {}
        # The version of the group positions at the last check of `_waiting`.
        self._version = 0
        self._number = 0
        self._was_ownership_expired = False
        # Per home partition: leader, epoch and number of the last TELL. `_untold`: those without
        # HEARD.
        self._reported: dict[int, tuple[str, int, int]] = {}
        self._untold: dict[int, None] = dict.fromkeys(range(len(context.leading)))
        self._report_at = -1.0

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def is_touched(self) -> bool:
        return bool(self._touched)

    def _assignments(self, key: str) -> NodeAssignments:
        share = self.assignments.get(key)
        if share is None:
            share = NodeAssignments(key, partition_of(key.encode(), self._state.config.partitions))
            self.assignments[key] = share
        return share

    def changed(self, group: Group) -> None:
        """Notes that members of a group, or their capacity, may have changed."""
        share = self.assignments.get(group.key)
        if share is None:
            if not group.members:
                return
            share = self._assignments(group.key)
        if group.members and share.group is not group:
            if share.group is not None:
                # Its last member left in this turn: nothing gives its returned records to members.
                self._drain(share, share.group)
            share.group = group
            share.changes = 0
            share.start = self._replicated.groups.queue_start(group.key, self._state.delivered)
            share.announces_start = True
        self._touched[share] = None

    def finished(self, key: str, place: Place) -> None:
        """Marks a record as finished: a member has it, or it cannot be sent to any."""
        share = self.assignments.get(key)
        if share is not None and place in share.assigned:
            self._finish(share, place)

    def _finish(self, share: NodeAssignments, place: Place) -> None:
        del share.assigned[place]
        share.done.append(place)
        share.finished[place] = None
        if len(share.finished) > FINISHED_MAX:
            del share.finished[next(iter(share.finished))]
        self._touched[share] = None
        self._untidy[share] = None

    def unfinished(self, session: Session, entry: Inflight) -> list[Group]:
        """Returns the groups of the session that may have given it the record and have not finished
        it in the log.

        There is more than one only when the tags of two groups are equal by chance.
        """
        groups = self._replicated.groups
        found: list[Group] = []
        for group in session.groups or ():
            is_its = group.tag == entry.group_tag
            if is_its and not groups.is_finished(group.key, entry.partition, entry.offset):
                found.append(group)
        return found

    def wait(self, session: Session, entry: Inflight, promise: Promise) -> None:
        """Makes the promise wait until the log has the record as finished by its group, or the
        group ends.

        Without a coordinator the packet id is all that shows the next one which session has the
        record.
        """
        for group in self.unfinished(session, entry):
            promise.waiting += 1
            place = (entry.partition, entry.offset)
            self._waiting.append(FinishWait(group, session, place, promise))

    def _resolve_waiting(self) -> None:
        groups = self._replicated.groups
        self._version = groups.version
        dropped = groups.pop_dropped()
        waiting = self._waiting
        self._waiting = []
        for each in waiting:
            if each.group.key in dropped or self._is_over(each):
                self._forwarding.promises.settle(each.promise)
            else:
                self._waiting.append(each)

    def _is_over(self, waiting: FinishWait) -> bool:
        groups = self._replicated.groups
        key = waiting.group.key
        connection = waiting.promise.connection
        if connection is None or connection.state == CLOSED:
            return True
        if groups.is_finished(key, *waiting.place) or groups.is_full(key):
            return True
        # A group without a logged position ends without a record, once its members have left.
        return key not in groups.positions and waiting.group not in (waiting.session.groups or ())

    def denied(self, key: str, place: Place) -> None:
        """Returns a record that no member here may read."""
        share = self.assignments.get(key)
        if share is None or place not in share.assigned:
            return
        if place in share.refused:
            # The coordinator has an older version without access rights, and has assigned the
            # record again. `tidy` returns it; an immediate return would circulate it as fast as the
            # nodes can.
            share.again[place] = None
            self._untidy[share] = None
            return
        self._deny(share, place)

    def _deny(self, share: NodeAssignments, place: Place) -> None:
        self._return(share, place)
        share.denied.append(place)
        share.refused[place] = None
        if len(share.refused) > FINISHED_MAX:
            del share.refused[next(iter(share.refused))]

    def note_session_record(self, key: str, session: Session, place: Place) -> None:
        """Handles a QoS 2 record that the session of a leaving member keeps."""
        share = self.assignments.get(key)
        if share is None or place not in share.assigned:
            return
        if not session.is_durable():
            # [MQTT-4.8.2-5]
            self._finish(share, place)
            return
        home = partition_of(session.key, self._state.config.partitions)
        client_id = session.client_id
        self._session_records.pop((share, place), None)
        self._session_records[(share, place)] = (client_id, self._state.now)
        self._forwarding.after_newest(home, lambda: self._resolve_kept(share, client_id, place))

    def _resolve_kept(self, share: NodeAssignments, client_id: str, place: Place) -> None:
        """Finishes or returns a kept record, once the session's record that contains it is applied.

        That record is ignored if another node owned the session by then, and the place is returned.
        The exception is a record that the group has finished. The session may have completed it at
        the other node, so that its packet id is free again.
        """
        if self._session_records.get((share, place), ("", 0.0))[0] != client_id:
            # The record has waited too long, and another session has it now.
            return
        del self._session_records[(share, place)]
        if place not in share.assigned:
            return
        is_finished = self._replicated.groups.is_finished(share.key, *place)
        if is_finished or self._replicated.has_inflight(client_id, tag_of(share.key), place):
            self._finish(share, place)
        else:
            self._return(share, place)

    def assigned(self, node: str, assign: Assign) -> None:
        """Takes assigned records.

        Those of an earlier coordinator, or from before the last TELL, are ignored. The coordinator
        sees from that TELL that they were not taken.
        """
        told = self._reported.get(assign.home)
        if told != (node, assign.epoch, assign.number) or assign.home in self._untold:
            return
        share = self._assignments(assign.key)
        group = share.group
        self._touched[share] = None
        for message in assign.messages:
            place = (message.partition, message.offset)
            if place in share.assigned:
                continue
            if group is None or not group.members or self._state.is_ownership_expired:
                share.returned.append(place)
            else:
                share.assigned[place] = None
                group.returned.append(message)
        if group is not None and group.members:
            pump_group(self._state, group)

    def _return_waiting(self) -> None:
        """Returns all waiting records when this node is unsure of its ownership.

        The other nodes may have counted it as down and reassigned its records. Records that a
        coordinator assigns later come from one that has this node's new report, or are returned
        too.
        """
        self._was_ownership_expired = self._state.is_ownership_expired
        for share in self.assignments.values():
            self._touched[share] = None
            if self._was_ownership_expired and share.group is not None:
                self._drain(share, share.group)

    # Reports to the coordinator

    def lose(self, home: int) -> None:
        """Marks a home for a new TELL: its leader, the epoch or the link has changed."""
        self._untold[home] = None
        self._report_at = -1.0

    def lose_node(self, node: str) -> None:
        for home in range(len(self._context.leading)):
            if self._context.leader(home) == node:
                self.lose(home)

    def lose_all(self) -> None:
        for home in range(len(self._context.leading)):
            self.lose(home)

    def handle_report_request(self, node: str, homes: list[tuple[int, int]]) -> None:
        """Marks these homes for a new TELL because their coordinator requests it."""
        for home, epoch in homes:
            if not 0 <= home < len(self._context.leading):
                raise BadFrame(f"home partition {home} of {len(self._context.leading)}")
            if self._context.leader(home) == node and self._context.epoch(home) == epoch:
                self.lose(home)

    def handle_report_ack(self, node: str, number: int, homes: list[tuple[int, int]]) -> None:
        """Takes the coordinator's confirmation of a TELL. Reports may follow now."""
        for home, epoch in homes:
            if self._reported.get(home) == (node, epoch, number) and home in self._untold:
                del self._untold[home]
        for share in self.assignments.values():
            if share.home not in self._untold:
                self._touched[share] = None

    def _report_fully(self) -> None:
        self._report_at = self._state.now + ASK_AGAIN_S
        leaders: dict[str, list[tuple[int, int]]] = {}
        for home in self._untold:
            leader = self._context.leader(home)
            if leader in self._context.connected or leader == self._context.node_id:
                leaders.setdefault(leader, []).append((home, self._context.epoch(home)))
        for leader, homes in leaders.items():
            self._number += 1
            for home, epoch in homes:
                self._reported[home] = (leader, epoch, self._number)
            wanted = {home for home, _ in homes}
            groups = self.assignments.values()
            stocks = [self._capacity(each) for each in groups if each.home in wanted]
            self._send_full_report(leader, FullReport(self._number, homes, stocks))

    def _capacity(self, share: NodeAssignments) -> NodeCapacity:
        self._drain_if_deserted(share)
        share.done, share.returned, share.denied = [], [], []
        share.announces_start = False
        self._measure(share)
        if share.group is not None:
            share.changes = share.group.changes
        known = self._replicated.group_positions.get(share.key)
        if share.members and share.start is None and known is not None:
            # A coordinator without contact to this node for long may have ended the group.
            share.start = list(known)
            self._untidy[share] = None
        return NodeCapacity(
            share.key,
            share.members,
            share.durable,
            share.limit,
            list(share.assigned),
            list(share.finished),
            share.start,
        )

    def _measure(self, share: NodeAssignments) -> bool:
        """Measures the capacity of the members here. Returns False if it has not changed."""
        members = 0
        durable = 0
        limit = len(share.assigned)
        group = share.group
        if group is not None:
            for member in list(group.connected):
                session = member.session
                connection = session.connection
                if connection is None or connection.state != OPEN:
                    continue
                members += 1
                durable += session.is_durable()
                if group.returned:
                    continue
                if can_send(self._state, session):
                    note_room(group, member)
                    limit += session.inflight_max - len(session.inflight)
                else:
                    # The group is measured again when the session has capacity.
                    note_blocked(self._state, group, member)
        limit = min(limit, LIMIT_MAX)
        if (members, durable, limit) == (share.members, share.durable, share.limit):
            return False
        share.members = members
        share.durable = durable
        share.limit = limit
        return True

    def _drain_if_deserted(self, share: NodeAssignments) -> None:
        group = share.group
        if group is None or group.connected:
            return
        self._drain(share, group)
        if not group.members:
            share.group = None
            share.start = None

    def _drain(self, share: NodeAssignments, group: Group) -> None:
        """Returns the records that wait for a member."""
        share.queued_at = -1.0
        waiting: list[Message | Inflight] = list(group.returned)
        group.returned.clear()
        for topic in list(group.deferred):
            while topic in group.deferred:
                waiting.append(group.pop_deferred(topic))
        for message in waiting:
            place = (message.partition, message.offset)
            if place in share.assigned:
                self._return(share, place)

    def _return(self, share: NodeAssignments, place: Place) -> None:
        del share.assigned[place]
        share.returned.append(place)
        self._touched[share] = None

    def flush(self) -> None:
        """Sends TELLs and reports of what has changed."""
        if self._version != self._replicated.groups.version:
            self._resolve_waiting()
        if self._was_ownership_expired != self._state.is_ownership_expired:
            self._return_waiting()
        if self._untold and self._report_at <= self._state.now:
            self._report_fully()
        touched = self._touched
        self._touched = {}
        for share in touched:
            self._drain_if_deserted(share)
            group = share.group
            if group is not None and (group.returned or group.deferred):
                if share.queued_at < 0:
                    share.queued_at = self._state.now
                self._untidy[share] = None
            else:
                share.queued_at = -1.0
            if share.home in self._untold:
                continue
            is_changed = group is not None and group.changes != share.changes
            if (
                self._measure(share)
                or share.done
                or share.returned
                or share.announces_start
                or is_changed
            ):
                self._report(share)
            if not share.members and not share.assigned:
                self._untidy[share] = None

    def _report(self, share: NodeAssignments) -> None:
        leader, epoch, number = self._reported[share.home]
        start = share.start if share.announces_start else None
        group = share.group
        has_changed = group is not None and group.changes != share.changes
        if has_changed and group is not None:
            share.changes = group.changes
            share.refused = {}
        report = AgentReport(
            share.home,
            epoch,
            number,
            share.key,
            share.members,
            share.durable,
            share.limit,
            share.done,
            share.returned,
            start or [],
            share.denied,
            has_changed,
        )
        share.done = []
        share.returned = []
        share.denied = []
        share.announces_start = False
        self._send_report(leader, report)

    def _drop_session_records(self) -> None:
        limit = self._state.now - KEPT_WAIT_S
        for (share, place), (client_id, since) in list(self._session_records.items()):
            if since > limit:
                return
            home = partition_of(client_id.encode(), self._state.config.partitions)
            if place not in share.assigned:
                del self._session_records[(share, place)]
            elif not self._context.leader(home):
                self._resolve_kept(share, client_id, place)
                fields = {"group": share.key, "partition": place[0], "offset": place[1]}
                self._state.note("warning", "kept_record_settled", {"client": client_id, **fields})

    def tidy(self) -> None:
        """Returns records that have waited too long and forgets what the log has, every
        `node.TIDY_S`."""
        if self._session_records:
            self._drop_session_records()
        if self._waiting:
            self._resolve_waiting()
        untidy = self._untidy
        self._untidy = {}
        for share in untidy:
            group = share.group
            if (
                group is not None
                and share.queued_at >= 0
                and share.queued_at + QUEUE_WAIT_S <= self._state.now
            ):
                self._drain(share, group)
                self._touched[share] = None
            for place in share.again:
                if place in share.assigned:
                    self._deny(share, place)
            share.again = {}
            self._forget_logged(share)
            if share.group is None and not (
                share.assigned or share.finished or share.done or share.returned or share.members
            ):
                self.assignments.pop(share.key, None)
            elif share.finished or share.queued_at >= 0 or share.start is not None:
                self._untidy[share] = None

    def _forget_logged(self, share: NodeAssignments) -> None:
        """Forgets finished records that the log has: no coordinator needs a report of them."""
        groups = self._replicated.groups
        if share.key not in groups.positions:
            if share.group is None:
                # The group has ended.
                share.finished = {}
            return
        if not share.announces_start:
            share.start = None
        share.finished = {
            place: None for place in share.finished if not groups.is_finished(share.key, *place)
        }

    def timer(self) -> float | None:
        if self._touched:
            return self._state.now
        if self._untold and self._report_at >= 0:
            return self._report_at
        return None

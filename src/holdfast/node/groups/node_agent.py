"""Represents a node's members in shared groups.

It reports to the coordinator of each group the capacity of the members here, and gives them the
assigned records.

Invariant: a record stays in `assigned` until it is finished (a member has it) or returned. The next
report informs the coordinator which of the two happened. If the coordinator or the link changes
first, the next full report (TELL) does. Counter-example: a member finishes a record, and the report
is lost with the link. Without `finished` in the TELL, a new coordinator assigns the record again.
"""

from collections.abc import Callable
from typing import Final

from holdfast.log.partition import partition_of
from holdfast.node.context import NEVER
from holdfast.node.delivery.delivery import pump_group
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.groups.assignments import AgentContext, NodeAssignments
from holdfast.node.groups.codec import AgentReport, Assign
from holdfast.node.groups.control_frames import FullReport, NodeCapacity, Place
from holdfast.node.node_state import Promise
from holdfast.node.publish.promises import PromiseQueues
from holdfast.node.session.connection import CLOSED
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, Inflight, Session, tag_of
from holdfast.node.state.replicated import ReplicatedState


class KeptRecords:
    """The records whose session's own record is on its way to the log.

    Once that record is applied, the log shows whether the session has kept the record.
    """

    def __init__(
        self,
        context: AgentContext,
        finish: Callable[[NodeAssignments, Place], None],
        return_record: Callable[[NodeAssignments, Place], None],
    ) -> None:
        self._state = context.state
        self._after_newest = context.after_newest
        self._replicated = context.replicated
        self._finish = finish
        self._return = return_record
        # The client ids.
        self.records: dict[tuple[NodeAssignments, Place], str] = {}

    def add(self, share: NodeAssignments, session: Session, place: Place) -> None:
        """Handles a QoS 2 record that the session of a leaving member keeps."""
        home = partition_of(session.key, self._state.config.partitions)
        client_id = session.client_id
        self.records[(share, place)] = client_id
        self._after_newest(home, lambda: self._resolve(share, client_id, place))

    def _resolve(self, share: NodeAssignments, client_id: str, place: Place) -> None:
        """Finishes or returns a kept record, once the session's record that contains it is applied.

        That record is ignored if another node owned the session by then, and the place is returned.
        The exception is a record that the group has finished. The session may have completed it at
        the other node, so that its packet id is free again.
        """
        if self.records.get((share, place)) != client_id:
            # Another session has it now.
            return
        del self.records[(share, place)]
        if place not in share.assigned:
            return
        is_finished = self._replicated.groups.is_finished(share.key, *place)
        if is_finished or self._replicated.has_inflight(client_id, tag_of(share.key), place):
            self._finish(share, place)
        else:
            self._return(share, place)

    def tidy(self) -> None:
        """Forgets the records that are resolved otherwise, every `node.TIDY_S`.

        The others wait for the record of the session for as long as its home has no leader.
        Counter-example with a time-out: the record is given to another member, the lost leader
        returns with the session's record, and two sessions have the QoS 2 record.
        """
        for share, place in list(self.records):
            if place not in share.assigned:
                del self.records[(share, place)]


class FinishWait:
    """A promise that waits until the group `key` has finished, by the log, with the record that it
    gave to `session`."""

    def __init__(self, key: str, session: Session, place: Place, promise: Promise) -> None:
        self.key = key
        self.session = session
        self.place = place
        self.promise = promise


class FinishWaits:
    """The promises of this node's sessions that wait for the groups of their records."""

    def __init__(
        self,
        replicated: ReplicatedState,
        promises: PromiseQueues,
        unlogged: Callable[[int, Place], list[str]],
    ) -> None:
        """`unlogged(tag, place)`: the groups with this tag whose record is with this node, and not
        finished in the log."""
        self._replicated = replicated
        self._unlogged = unlogged
        self._promises = promises
        self._waiting: list[FinishWait] = []
        # The version of the group positions at the last check of `_waiting`.
        self._version = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_due(self) -> bool:
        """True if the group positions have changed since the last check."""
        return self._version != self._replicated.groups.version

    def unfinished(self, session: Session, entry: Inflight) -> list[str]:
        """Returns the groups that may have given the record to the session and have not finished it
        in the log. The session may have left its group.

        There is more than one only when the tags of two groups are equal by chance.
        """
        groups = self._replicated.groups
        tag, place = entry.group_tag, (entry.partition, entry.offset)
        keys = {group.key for group in session.groups or () if group.tag == tag}
        if not keys:
            keys = groups.keys_of(tag).union(self._unlogged(tag, place))
        return [key for key in keys if not groups.is_finished(key, *place)]

    def wait(self, session: Session, entry: Inflight, promise: Promise) -> None:
        """Makes the promise wait until the log has the record as finished by its group, or the
        group ends.

        Without a coordinator the packet id is all that shows the next one which session has the
        record.
        """
        for key in self.unfinished(session, entry):
            promise.waiting += 1
            place = (entry.partition, entry.offset)
            self._waiting.append(FinishWait(key, session, place, promise))

    def resolve(self) -> None:
        groups = self._replicated.groups
        self._version = groups.version
        dropped = groups.pop_dropped()
        waiting = self._waiting
        self._waiting = []
        for each in waiting:
            if each.key in dropped or self._is_over(each):
                self._promises.settle(each.promise)
            else:
                self._waiting.append(each)

    def _is_over(self, waiting: FinishWait) -> bool:
        groups = self._replicated.groups
        key = waiting.key
        connection = waiting.promise.connection
        if connection is None or connection.state == CLOSED:
            return True
        if groups.is_finished(key, *waiting.place):
            return True
        if key in groups.positions or key in self._unlogged(tag_of(key), waiting.place):
            return False
        # A group without a logged position ends without a record, once its members have left.
        return all(group.key != key for group in waiting.session.groups or ())


QUEUE_WAIT_S: Final = 0.5
"""The longest time in seconds that an assigned record waits for a member with capacity. Then it is
returned."""
ASK_AGAIN_S: Final = 0.1
"""The interval in seconds after which a TELL without HEARD is repeated. The next leader may apply
the metadata later than this node."""


class NodeAgent:
    """The shared groups of this node's members.

    Invariant: nothing is taken from a coordinator that has not confirmed the present TELL with
    HEARD. Its assignments may be older than what that TELL says.
    """

    def __init__(
        self,
        context: AgentContext,
        send_tell: Callable[[str, FullReport], None],
        send_report: Callable[[str, AgentReport], None],
        list_sent: Callable[[NodeAssignments], None],
    ) -> None:
        """`list_sent` enters the records in the tables that are in none (`sent_records`)."""
        self._state = context.state
        self._context = context.cluster
        self._replicated = context.replicated
        self._send_full_report = send_tell
        self._send_report = send_report
        self._list_sent = list_sent
        self.assignments: dict[str, NodeAssignments] = {}
        # The keys of `assignments` by tag.
        self._keys: dict[int, set[str]] = {}
        self._touched: dict[NodeAssignments, None] = {}
        # The groups with something for `tidy`.
        self._untidy: dict[NodeAssignments, None] = {}
        self.waits = FinishWaits(context.replicated, context.forwarding.promises, self._unlogged)
        self.kept = KeptRecords(context, self._finish, self._return)
        self._number = 0
        self._was_ownership_expired = False
        # Per home partition: leader, epoch and number of the last TELL. `_untold`: those without
        # HEARD.
        self._reported: dict[int, tuple[str, int, int]] = {}
        self.untold: dict[int, None] = dict.fromkeys(range(len(context.cluster.leading)))
        self._report_at = -1.0

    @property
    def is_touched(self) -> bool:
        return bool(self._touched)

    def _assignments(self, key: str) -> NodeAssignments:
        share = self.assignments.get(key)
        if share is None:
            share = NodeAssignments(key, partition_of(key.encode(), self._state.config.partitions))
            self.assignments[key] = share
            self._keys.setdefault(tag_of(key), set()).add(key)
        return share

    def _forget(self, share: NodeAssignments) -> None:
        """Forgets a group without members here, unless it has begun again since."""
        key = share.key
        if self.assignments.get(key) is not share:
            return
        del self.assignments[key]
        keys = self._keys[tag_of(key)]
        keys.discard(key)
        if not keys:
            del self._keys[tag_of(key)]

    def _unlogged(self, tag: int, place: Place) -> list[str]:
        """Returns the groups with this tag whose record is here, and not finished in the log as far
        as this node knows."""
        shares = [self.assignments[key] for key in self._keys.get(tag, ())]
        return [each.key for each in shares if place in each.assigned or place in each.finished]

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
        if share is None:
            return
        if place in share.assigned:
            self._finish(share, place)
        self._touched[share] = None

    def _finish(self, share: NodeAssignments, place: Place) -> None:
        share.finish(place)
        self._touched[share] = None
        self._untidy[share] = None

    def _return(self, share: NodeAssignments, place: Place) -> None:
        share.return_record(place)
        self._touched[share] = None

    def denied(self, key: str, place: Place) -> None:
        """Returns a record that no member here may read."""
        share = self.assignments.get(key)
        if share is None:
            return
        self._list(share)
        if place not in share.assigned:
            return
        if place in share.refused:
            # The coordinator has an older version without access rights, and has assigned the
            # record again. `tidy` returns it; an immediate return would circulate it as fast as the
            # nodes can.
            share.again[place] = None
            self._untidy[share] = None
            return
        share.deny(place)
        self._touched[share] = None

    def note_session_record(self, key: str, session: Session, place: Place) -> None:
        """Handles a QoS 2 record that the session of a leaving member keeps."""
        share = self.assignments.get(key)
        if share is None or place not in share.assigned:
            return
        if session.is_durable():
            self.kept.add(share, session, place)
        else:
            # [MQTT-4.8.2-5]
            self._finish(share, place)

    def told(self, home: int) -> tuple[str, int, int] | None:
        """Returns the leader, epoch and number of the last TELL of a home, once it is confirmed."""
        return None if home in self.untold else self._reported.get(home)

    def assigned(self, node: str, assign: Assign) -> None:
        """Takes assigned records.

        Those of an earlier coordinator, or from before the last TELL, are ignored. The coordinator
        sees from that TELL that they were not taken.
        """
        if self.told(assign.home) != (node, assign.epoch, assign.number):
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
        self.untold[home] = None
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
            if self._reported.get(home) == (node, epoch, number) and home in self.untold:
                del self.untold[home]
        for share in self.assignments.values():
            if share.home not in self.untold:
                self._touched[share] = None

    def _report_fully(self) -> None:
        self._report_at = self._state.now + ASK_AGAIN_S
        leaders: dict[str, list[tuple[int, int]]] = {}
        for home in self.untold:
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

    def _list(self, share: NodeAssignments) -> None:
        if not share.sent.is_empty():
            self._list_sent(share)
            self._touched[share] = None
            self._untidy[share] = None

    def list_all(self) -> None:
        """Enters the records of all groups in the tables that are in none.

        Invariant: while this node is not alone, each record that it has is assigned or finished.
        """
        for share in self.assignments.values():
            self._list(share)

    def _capacity(self, share: NodeAssignments) -> NodeCapacity:
        self._list(share)
        self._drain_if_deserted(share)
        share.done, share.returned, share.denied = [], [], []
        share.announces_start = False
        share.measure(self._state)
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
        self._list(share)
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

    def flush(self) -> None:
        """Sends TELLs and reports of what has changed."""
        if self.waits.is_due:
            self.waits.resolve()
        if self._was_ownership_expired != self._state.is_ownership_expired:
            self._return_waiting()
        if self.untold and self._report_at <= self._state.now:
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
            if share.home in self.untold:
                continue
            is_changed = group is not None and group.changes != share.changes
            if (
                share.measure(self._state)
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

    def tidy(self) -> None:
        """Returns records that have waited too long and forgets what the log has, every
        `node.TIDY_S`."""
        self.kept.tidy()
        if self.waits:
            self.waits.resolve()
        untidy = self._untidy
        self._untidy = {}
        for share in untidy:
            group = share.group
            if (
                group is not None
                and not self._context.is_alone
                and share.queued_at >= 0
                and share.queued_at + QUEUE_WAIT_S <= self._state.now
            ):
                self._drain(share, group)
                self._touched[share] = None
            for place in share.again:
                if place in share.assigned:
                    share.deny(place)
                    self._touched[share] = None
            share.again = {}
            self._forget_logged(share)
            if share.group is None and not (
                share.assigned or share.finished or share.done or share.returned or share.members
            ):
                self._forget(share)
            elif share.finished or share.queued_at >= 0 or share.start is not None:
                self._untidy[share] = None

    def _forget_logged(self, share: NodeAssignments) -> None:
        """Forgets finished records that the log has: no coordinator needs a report of them."""
        groups = self._replicated.groups
        if share.key not in groups.positions:
            if share.group is None:
                # The group has ended.
                share.finished = {}
                share.done = []
            return
        if not share.announces_start:
            share.start = None
        share.finished = {
            place: None for place in share.finished if not groups.is_finished(share.key, *place)
        }
        # Those of a home without a leader wait here.
        share.done = [place for place in share.done if place in share.finished]
        if share.members and not share.limit:
            self._touched[share] = None

    def timer(self) -> float:
        is_expired = self._state.is_ownership_expired
        if self._touched or self.waits.is_due or is_expired != self._was_ownership_expired:
            return self._state.now
        return self._report_at if self.untold else NEVER

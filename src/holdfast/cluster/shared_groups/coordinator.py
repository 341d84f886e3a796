"""The coordinator of shared groups, at the leader of their home partition (the hash of the group's
key).

A new leader begins at the positions that the log has. It assigns no record before two conditions
are met:
- It has applied everything that was committed anywhere.
- The nodes have reported the records that their members have and have finished.

Only then it knows what earlier coordinators have assigned. Counter-example: n1 has record 7 from
the previous coordinator. The new one assigns it to n2 before the report of n1, and two members
receive it. A node that does not reply is waited for START_WAIT_S.

The records of a node that is down go to other nodes, except QoS 2 records that a session has kept
(`reclaim`). A group with such sessions at a node without a report stays closed: the previous
coordinator may have assigned records to that node.
"""

from collections.abc import Callable
from typing import Final

from holdfast.broker.recovery.state_records import append_state, changed_positions
from holdfast.broker.rights import may_read_later
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Group
from holdfast.broker.session.state import encode_cursor
from holdfast.broker.state import NodeState
from holdfast.cluster.context import ClusterContext
from holdfast.cluster.metadata.model import DATA
from holdfast.cluster.reads.read_barrier import Barriers
from holdfast.cluster.shared_groups.codec import AgentReport, Assign
from holdfast.cluster.shared_groups.control_frames import FullReport, NodeCapacity, Place
from holdfast.cluster.shared_groups.group_state import Coordination, NodeLoad
from holdfast.cluster.shared_groups.reclaim import LOOK_AGAIN_S, Reclaimer
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.protocol.topics.names import InvalidFilter, split_shared
from holdfast.storage import record as log_record
from holdfast.storage.partition import partition_of
from holdfast.storage.record import Record

START_WAIT_S: Final = 2.0
"""The longest time in seconds that a new coordinator waits for the reports of the nodes."""
LOST_WAIT_S: Final = 5.0
"""The time in seconds after which the records of a node without a link are reclaimed, although the
cluster does not count it as down."""
TAILED_MAX: Final = 200
"""The most records of a group that wait for the end of a turn."""
DONE_IN_RECORD: Final = 10_000
"""The most finished offsets in one CURSOR record, below the limit of its count field."""


class Home:
    """A home partition that this node leads.

    `begins_at`: the log end when the leadership began. The records of earlier coordinators are
    below it.
    """

    def __init__(
        self, partition: int, epoch: int, since: float, barrier: int, begins_at: int
    ) -> None:
        self.partition = partition
        self.begins_at = begins_at
        self.epoch = epoch
        self.since = since
        self.barrier = barrier
        # The nodes that have reported, with the number of their TELL.
        self.reported: dict[str, int] = {}
        self.is_open = False
        self.groups: dict[str, Coordination] = {}
        # The groups that this coordinator has ended. The replicated state may still have them.
        self.ended: set[str] = set()


class Coordinator:
    """The shared groups of all home partitions that this node leads.

    Invariant: this coordinator assigns a record again only after the node that had it returned it,
    reported without it, or is down. A node without a link for LOST_WAIT_S counts as down here.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        barriers: Barriers,
        send_heard: Callable[[str, int, list[tuple[int, int]]], None],
        send_assign: Callable[[str, Assign], None],
        send_ask: Callable[[str, list[tuple[int, int]]], None],
    ) -> None:
        self._state = state
        self._context = context
        self._replicated = replicated
        self._barriers = barriers
        self._send_ack = send_heard
        self._send_assign = send_assign
        self._send_report_request = send_ask
        self.homes: dict[int, Home] = {}
        self._loads: dict[str, NodeLoad] = {}
        self._dirty: dict[Coordination, None] = {}
        # The groups whose progress is to be logged, and the time for it.
        self._due: dict[Coordination, None] = {}
        self._due_at = -1.0
        self._opening: dict[Home, None] = {}
        self._reclaimer = Reclaimer(replicated.groups, barriers, self._has_reported)
        # The groups that are still closed although their home is open.
        self._unopened: dict[Coordination, None] = {}
        self._open_at = 0.0
        # The groups without members. After their barrier this node knows whether they have ended.
        self._deserted: dict[Coordination, None] = {}
        # The nodes without a link, and the time of its loss.
        self._unreachable_since: dict[str, float] = {}

    @property
    def reclaimed(self) -> int:
        """The number of records reclaimed from nodes that are down."""
        return self._reclaimer.count

    @property
    def is_dirty(self) -> bool:
        return bool(self._dirty)

    # Leading

    def start_leading(self, partition: int, epoch: int) -> None:
        """Begins to coordinate the groups of a home partition, closed at first."""
        self.stop_leading(partition)
        begins_at = self._context.journal.next_offset[partition]
        home = Home(partition, epoch, self._state.now, self._barriers.begin(), begins_at)
        self.homes[partition] = home
        self._opening[home] = None

    def stop_leading(self, partition: int) -> None:
        """Drops the groups of a home partition. The log and the nodes' reports have their state."""
        home = self.homes.pop(partition, None)
        if home is None:
            return
        self._opening.pop(home, None)
        for coordination in home.groups.values():
            self._forget(coordination)

    def _forget(self, coordination: Coordination) -> None:
        cursor = coordination.cursor
        self._state.subscriptions.remove(cursor.filter, cursor)
        self._state.change_routes()
        cursor.is_coordinating = False
        self._dirty.pop(coordination, None)
        self._due.pop(coordination, None)
        self._deserted.pop(coordination, None)
        self._unopened.pop(coordination, None)
        self._reclaimer.forget(coordination)
        for stake in coordination.stakes.values():
            for node, size_bytes in coordination.assigned.values():
                if node == stake.node:
                    stake.load.size_bytes -= size_bytes

    def _coordination(self, home: Home, key: str) -> Coordination:
        coordination = home.groups.get(key)
        if coordination is None:
            coordination = Coordination(key, home.partition, home.epoch, self._state)
            home.groups[key] = coordination
            cursor = coordination.cursor
            self._state.subscriptions.add(cursor.filter, cursor, cursor)
            self._state.change_routes()
        return coordination

    def _coordination_of(self, cursor: Group) -> Coordination | None:
        home = self.homes.get(self._home_of(cursor.key))
        return None if home is None else home.groups.get(cursor.key)

    def _home_of(self, key: str) -> int:
        return partition_of(key.encode(), self._state.config.partitions)

    def _open_homes(self) -> None:
        for home in list(self._opening):
            is_applied = self._state.delivered[home.partition] >= home.begins_at
            if is_applied and self._barriers.has_passed(home.barrier) and self._may_start(home):
                del self._opening[home]
                self._open(home)

    def _has_reported(self, coordination: Coordination, node: str) -> bool:
        return node in self.homes[coordination.home].reported

    def _may_start(self, home: Home) -> bool:
        """True if every data node that is not down has reported, or START_WAIT_S has passed."""
        metadata = self._context.metadata
        if metadata is None:
            return False
        if self._state.now >= home.since + START_WAIT_S:
            return True
        return all(
            node in home.reported or info.role != DATA or self._context.is_gone(node)
            for node, info in metadata.nodes.items()
        )

    def _open(self, home: Home) -> None:
        home.is_open = True
        images = self._replicated
        for key in [*images.group_positions, *images.state.groups]:
            if self._home_of(key) == home.partition:
                self._coordination(home, key)
        for coordination in home.groups.values():
            self._open_group(home, coordination)

    def _open_group(self, home: Home, coordination: Coordination) -> None:
        metadata = self._context.metadata
        nodes = () if metadata is None else metadata.nodes
        if any(self._reclaimer.may_keep_more(coordination, node) for node in nodes):
            self._unopened[coordination] = None
            return
        self._unopened.pop(coordination, None)
        positions = None
        if coordination.key not in home.ended:
            positions = self._replicated.group_positions.get(coordination.key)
        coordination.open(positions, self._replicated.groups)
        if self._replicated.groups.is_durable(coordination.key):
            coordination.was_durable = True
        self._note_change(coordination)

    # Reports of the nodes

    def handle_full_report(self, node: str, tell: FullReport) -> None:
        """Takes a node's complete report of the groups of some homes."""
        accepted: dict[int, Home] = {}
        for partition, epoch in tell.homes:
            home = self.homes.get(partition)
            if home is not None and home.epoch == epoch:
                home.reported[node] = tell.number
                accepted[partition] = home
        if not accepted:
            return
        self._unreachable_since.pop(node, None)
        lost: dict[Coordination, list[Place]] = {}
        mentioned: set[str] = set()
        for stock in tell.capacities:
            found = accepted.get(self._home_of(stock.key))
            if found is not None and _is_group(stock.key):
                mentioned.add(stock.key)
                coordination = self._coordination(found, stock.key)
                lost[coordination] = self._apply_capacity(found, coordination, node, stock)
        for home in accepted.values():
            for key, coordination in home.groups.items():
                if key not in mentioned:
                    lost[coordination] = coordination.lose(node)
                    self._dirty[coordination] = None
        self._reclaimer.reclaim(lost, "")
        self._send_ack(node, tell.number, [(h.partition, h.epoch) for h in accepted.values()])

    def _apply_capacity(
        self, home: Home, coordination: Coordination, node: str, stock: NodeCapacity
    ) -> list[Place]:
        if stock.start is not None and len(stock.start) == len(self._state.delivered):
            coordination.set_start(stock.start)
        stake = coordination.node_weight(node, self._load(node))
        lost = coordination.apply(stake, stock, self._replicated.groups)
        coordination.allow(node)
        if home.is_open and not coordination.is_open:
            self._open_group(home, coordination)
        self._note_change(coordination)
        return lost

    def _load(self, node: str) -> NodeLoad:
        return self._loads.setdefault(node, NodeLoad())

    def report(self, node: str, report: AgentReport) -> None:
        """Takes the changes of one group at a node. A report without the present TELL number is
        ignored."""
        home = self.homes.get(report.home)
        if (
            home is None
            or home.epoch != report.epoch
            or home.reported.get(node) != report.number
            or self._home_of(report.key) != report.home
            or not _is_group(report.key)
        ):
            return
        if not report.members and report.key not in home.groups:
            return
        coordination = self._coordination(home, report.key)
        if len(report.start) == len(self._state.delivered):
            coordination.set_start(report.start)
        stake = coordination.node_weight(node, self._load(node))
        coordination.measured(stake, report.members, report.durable, report.limit)
        for place in report.done:
            coordination.finish(node, place)
        for place in report.denied:
            coordination.deny(node, place)
        for place in report.returned:
            coordination.return_record(node, place)
        if report.has_changed:
            coordination.allow(node)
        elif coordination.deferred:
            coordination.retry_at(stake)
        if home.is_open and not coordination.is_open:
            self._open_group(home, coordination)
        self._note_change(coordination)
        load = stake.load
        if load.is_full:
            load.is_full = False
            self._touch_all()

    def _touch_all(self) -> None:
        for home in self.homes.values():
            self._dirty.update(dict.fromkeys(home.groups.values()))

    def disconnected(self, node: str) -> None:
        """Suspends assignments to a node whose link is lost.

        Its members may still finish what they have. The node reports again when it is connected.
        """
        self._unreachable_since.setdefault(node, self._state.now)
        for home in self.homes.values():
            home.reported.pop(node, None)
            for coordination in home.groups.values():
                stake = coordination.stakes.get(node)
                if stake is not None:
                    stake.is_connected = False

    def node_down(self, node: str) -> None:
        """Reclaims the records of a node that is down by the metadata, or without a link for too
        long."""
        self._unreachable_since.pop(node, None)
        lost: dict[Coordination, list[Place]] = {}
        for home in self.homes.values():
            home.reported.pop(node, None)
            for coordination in home.groups.values():
                lost[coordination] = coordination.lose(node)
                self._dirty[coordination] = None
        self._reclaimer.reclaim(lost, node)

    def _reassign(self) -> None:
        """Assigns reclaimed records again where it is known now which ones sessions have kept."""
        now = self._state.now
        for coordination in self._reclaimer.review(now):
            self._note_change(coordination)
        if self._unopened and self._open_at <= now:
            self._open_at = now + LOOK_AGAIN_S
            for coordination in list(self._unopened):
                self._open_group(self.homes[coordination.home], coordination)

    # Records

    def record(self, group: Group, message: Message) -> None:
        coordination = self._coordination_of(group)
        if coordination is None or not coordination.is_open:
            return
        coordination.tail(message)
        self._note_change(coordination)
        if group.outbox_count() > TAILED_MAX:
            self._assign(coordination)

    def handle_read(
        self, group: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        coordination = self._coordination_of(group)
        if coordination is not None:
            coordination.handle_read(group, records, positions, done)
            self._note_change(coordination)

    def _assign(self, coordination: Coordination) -> None:
        home = self.homes[coordination.home]
        for stake, messages in coordination.assign(self._may_any_read).items():
            number = home.reported[stake.node]
            assign = Assign(home.partition, home.epoch, number, coordination.key, messages)
            self._send_assign(stake.node, assign)

    def _may_any_read(self, key: str, topic: bytes) -> bool:
        """See `rights.may_any_read`, of the members in the log."""
        state = self._replicated.state
        members = state.groups[key].members if key in state.groups else {}
        readable = (may_read_later(self._state, each, topic) for each in members)
        return key in state.queues or any(readable)

    def _retry_deferred(self, coordination: Coordination) -> None:
        """Tries the records aside again when members in the log have changed.

        The member that a record waited for may have left for good.
        """
        group = self._replicated.state.groups.get(coordination.key)
        changes = -1 if group is None else group.changes
        if coordination.deferred and (coordination.retries or changes != coordination.changes):
            coordination.retry()
            self._dirty[coordination] = None
        coordination.changes = changes

    def flush(self) -> None:
        """Opens groups, assigns records and logs progress, at the end of a turn."""
        if self._opening:
            self._open_homes()
        self._reassign()
        for coordination in list(self._deserted):
            if self._barriers.has_passed(coordination.barrier):
                del self._deserted[coordination]
                self._dirty[coordination] = None
        dirty = self._dirty
        self._dirty = {}
        for coordination in dirty:
            if not coordination.is_open or coordination.home not in self.homes:
                continue
            if coordination.member_count():
                self._assign(coordination)
                coordination.read()
            elif not self._end_if_over(coordination):
                coordination.park()
        if self._due and self._due_at <= self._state.now:
            self._log_progress()

    def _end_if_over(self, coordination: Coordination) -> bool:
        """Ends a group that has no member here or in the log and no assigned record. Returns True
        if it did.

        The barrier comes first because a session that has just left may have subscribed in a record
        that is not applied here yet.
        """
        key = coordination.key
        if coordination.was_durable:
            if coordination.barrier < 0:
                coordination.barrier = self._barriers.begin()
                self._deserted[coordination] = None
            if not self._barriers.has_passed(coordination.barrier):
                return False
        is_durable = self._replicated.groups.is_durable(key)
        if coordination.assigned or coordination.doubtful or is_durable:
            return False
        home = self.homes[coordination.home]
        del home.groups[key]
        self._forget(coordination)
        if coordination.logged is not None:
            home.ended.add(key)
            append_state(
                self._state,
                log_record.CURSOR,
                key.encode(),
                encode_cursor([], {}, []),
                coordination.epoch,
            )
        return True

    # Progress

    def _note_change(self, coordination: Coordination) -> None:
        self._dirty[coordination] = None
        if not self._due:
            self._due_at = self._state.now + self._state.config.progress_interval_s
        self._due[coordination] = None

    def _log_progress(self) -> None:
        due = self._due
        self._due = {}
        for coordination in due:
            if coordination.is_open:
                self._log(coordination)

    def _log(self, coordination: Coordination) -> None:
        positions = coordination.positions()
        changed = changed_positions(coordination.logged, positions)
        done = [place for place in coordination.finished if place[1] >= positions[place[0]]]
        coordination.finished = []
        coordination.logged = positions
        while changed or done:
            append_state(
                self._state,
                log_record.CURSOR,
                coordination.key.encode(),
                encode_cursor(changed, {}, done[:DONE_IN_RECORD]),
                coordination.epoch,
            )
            changed = []
            done = done[DONE_IN_RECORD:]

    def tidy(self) -> None:
        """Reclaims from nodes without a link, requests missing reports and ends groups, every
        `node.TIDY_S`."""
        now = self._state.now
        for node, since in list(self._unreachable_since.items()):
            if since + LOST_WAIT_S <= now:
                self.node_down(node)
        self._request_reports()
        for home in self.homes.values():
            home.ended.intersection_update(self._replicated.group_positions)
            for coordination in list(home.groups.values()):
                self._retry_deferred(coordination)
                if coordination.is_open and not coordination.member_count():
                    self._end_if_over(coordination)

    def _request_reports(self) -> None:
        """Requests a report from every connected data node without a current one.

        A node reports as soon as it is up again. This node may apply the metadata that had it as
        down only after that report, and then drops the report.
        """
        metadata = self._context.metadata
        if metadata is None:
            return
        for node in (self._context.node_id, *sorted(self._context.connected)):
            info = metadata.nodes.get(node)
            if info is None or info.role != DATA or self._context.is_gone(node):
                continue
            homes = [
                (home.partition, home.epoch)
                for home in self.homes.values()
                if node not in home.reported
            ]
            if homes:
                self._send_report_request(node, homes)

    def timer(self) -> float | None:
        times: list[float] = []
        if self._dirty:
            times.append(self._state.now)
        if self._due:
            times.append(self._due_at)
        if self._unopened:
            times.append(self._open_at)
        look_at = self._reclaimer.timer()
        if look_at is not None:
            times.append(look_at)
        return min(times) if times else None


def _is_group(key: str) -> bool:
    try:
        split_shared(key)
    except InvalidFilter:
        return False
    return True

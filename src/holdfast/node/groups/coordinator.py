"""Coordinates shared groups at the leader of their home partition (the hash of the group's key).

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

from holdfast.log.record import Record
from holdfast.node.context import NEVER
from holdfast.node.groups.assignments import AgentContext, NodeAssignments
from holdfast.node.groups.codec import AgentReport, Assign
from holdfast.node.groups.control_frames import FullReport, NodeCapacity, Place
from holdfast.node.groups.durable_members import DurableMembers
from holdfast.node.groups.group_state import BARRIER_PASSED, Coordination
from holdfast.node.groups.homes import Home, LedHomes, is_group
from holdfast.node.groups.next_node import NodeLoad
from holdfast.node.groups.progress import ProgressLog, collect_sent
from holdfast.node.groups.sent_records import SENT_MAX, Offsets
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.rights import may_read_later
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group
from holdfast.node.state.groups import GroupPositions

LOOK_AGAIN_S: Final = 0.02
"""The interval in seconds between checks while sessions at a node that is down are not closed."""


class Reclaimer:
    """The records of nodes that are down, until it is known which sessions have kept them.

    Invariant: a reclaimed record is assigned again only when no session in the log keeps it.

    A QoS 2 record that a session there has kept stays with the session. The replicated state
    shows it when two conditions are met:
    - Everything committed is applied here (Barriers).
    - The sessions of that node are closed. Until then cursor records of the node may still be
      committed, and count (`state.replicated`).

    Counter-example: the record is assigned to n2 at once, and then a cursor record of n1 is
    committed. Two sessions in the log have the QoS 2 record now.

    A node that is connected again reports for itself.
    """

    def __init__(
        self,
        replicated: GroupPositions,
        barriers: Barriers,
        has_told: Callable[[Coordination, str], bool],
    ) -> None:
        """`has_told(group, node)`: the node has reported, and has not been down since."""
        self._replicated = replicated
        self._barriers = barriers
        self._has_reported = has_told
        self._pending: set[int] = set()
        self._doubtful: dict[Coordination, None] = {}
        self._review_at = 0.0

    def reclaim(self, lost: dict[Coordination, list[Place]], node: str) -> None:
        """Reclaims the records `lost` from a node that is down or has reported without them."""
        if not any(lost.values()):
            return
        barrier = self._barriers.begin()
        self._pending.add(barrier)
        for coordination, places in lost.items():
            if places:
                coordination.mark_doubtful(places, barrier, node)
                self._doubtful[coordination] = None

    def forget(self, coordination: Coordination) -> None:
        """Forgets a group that this node does not coordinate any more."""
        self._doubtful.pop(coordination, None)

    def may_keep_more(self, coordination: Coordination, node: str) -> bool:
        """True if the node has sessions that may have kept QoS 2 records that the log does not have
        yet."""
        is_owner = self._replicated.is_owned_at(coordination.key, node)
        return is_owner and not self._has_reported(coordination, node)

    def is_waiting(self) -> bool:
        """Whether there are doubtful records, or barriers that have to pass for some."""
        return bool(self._pending) or bool(self._doubtful)

    def review(self, now: float) -> list[Coordination]:
        """Resolves doubtful records where possible. Returns the groups that have changed."""
        passed = {each for each in self._pending if self._barriers.has_passed(each)}
        if not passed and (self._review_at > now or not self._doubtful):
            return []
        self._pending -= passed
        self._review_at = now + LOOK_AGAIN_S
        return [each for each in list(self._doubtful) if self._resolve(each)]

    def _resolve(self, coordination: Coordination) -> bool:
        known = {
            (barrier, node)
            for node, barrier in {
                each for d in coordination.holders.doubtful.values() for each in d.items()
            }
            if barrier not in self._pending and not self.may_keep_more(coordination, node)
        }
        if known:
            kept = self._replicated.kept_by_sessions(coordination.key)
            coordination.resolve_doubtful(known, kept)
        if not coordination.holders.doubtful:
            del self._doubtful[coordination]
        return len(known) > 0

    def timer(self) -> float:
        """Returns the time of the next check."""
        return self._review_at if self._doubtful and not self._pending else NEVER


LOST_WAIT_S: Final = 5.0
"""The time in seconds after which the records of a node without a link are reclaimed, although the
cluster does not count it as down."""
TAILED_MAX: Final = 200
"""The most records of a group that wait for the end of a turn."""


class Coordinator:
    """The shared groups of all home partitions that this node leads.

    Invariant: this coordinator assigns a record again only after the node that had it returned it,
    reported without it, or is down. A node without a link for LOST_WAIT_S counts as down here.
    """

    def __init__(
        self,
        context: AgentContext,
        barriers: Barriers,
        send_heard: Callable[[str, int, list[tuple[int, int]]], None],
        send_assign: Callable[[str, Assign], None],
        send_ask: Callable[[str, list[tuple[int, int]]], None],
    ) -> None:
        state = self._state = context.state
        cluster = self._context = context.cluster
        replicated = self._replicated = context.replicated
        self._barriers = barriers
        self._send_ack = send_heard
        self._send_assign = send_assign
        self._send_report_request = send_ask
        self.homes = LedHomes(state, cluster)
        self._loads: dict[str, NodeLoad] = {}
        self._dirty: dict[Coordination, None] = {}
        self._progress = ProgressLog(state, context.after_newest)
        self._members = DurableMembers(state, cluster, replicated, barriers, self.homes)
        self._reclaimer = Reclaimer(replicated.groups, barriers, self.homes.has_reported)
        # The groups that are still closed although their home is open.
        self._unopened: dict[Coordination, None] = {}
        self._open_at = 0.0
        # The nodes without a link, and the time of its loss.
        self._unreachable_since: dict[str, float] = {}

    @property
    def is_dirty(self) -> bool:
        return bool(self._dirty)

    # Leading

    def start_leading(self, partition: int, epoch: int) -> None:
        """Begins to coordinate the groups of a home partition, closed at first."""
        self.stop_leading(partition)
        begins_at = self._context.journal.next_offset[partition]
        home = Home(partition, epoch, self._state.now, self._barriers.begin(), begins_at)
        self.homes.led[partition] = home
        self.homes.count_again()
        self.homes.opening[home] = None

    def stop_leading(self, partition: int) -> None:
        """Drops the groups of a home partition. The log and the nodes' reports have their state."""
        home = self.homes.led.pop(partition, None)
        self.homes.count_again()
        if home is None:
            return
        self.homes.opening.pop(home, None)
        self._replicated.group_members.unwatch(partition)
        for coordination in home.groups.values():
            self._forget(coordination)

    def _forget(self, coordination: Coordination) -> None:
        cursor = coordination.cursor
        self._state.subscriptions.remove(cursor.filter, cursor)
        self._state.change_routes()
        cursor.coordination = None
        share = coordination.share
        if share is not None:
            share.is_in_progress = False
            assert not share.sent.offsets, "a coordinator forgets records in no table"
        self._dirty.pop(coordination, None)
        self._progress.forget(coordination)
        self._unopened.pop(coordination, None)
        self._reclaimer.forget(coordination)
        for stake in coordination.weights.nodes.values():
            for node, size_bytes in coordination.holders.assigned.values():
                if node == stake.node:
                    stake.load.size_bytes -= size_bytes

    def _open(self, home: Home) -> None:
        home.is_open = True
        self._replicated.group_members.watch(home.partition)
        images = self._replicated
        for key in [*images.group_positions, *images.state.groups]:
            if self.homes.home_of(key) == home.partition:
                self.homes.coordination(home, key)
        for coordination in home.groups.values():
            self._open_group(home, coordination)

    def _open_group(self, home: Home, coordination: Coordination) -> None:
        metadata = self._context.metadata
        nodes = () if metadata is None else metadata.nodes
        home.is_certain = home.is_certain or self._barriers.has_passed(home.barrier)
        is_certain = home.is_certain and not any(
            self._reclaimer.may_keep_more(coordination, node) for node in nodes
        )
        if is_certain:
            self._unopened.pop(coordination, None)
        else:
            self._unopened[coordination] = None
        logged = self._replicated.groups
        if coordination.is_open:
            if is_certain:
                coordination.make_certain(logged)
        elif coordination.key in home.ended or not coordination.has_filter():
            self._unopened[coordination] = None
            return
        elif is_certain or not home.is_certain:
            positions = logged.positions.get(coordination.key)
            if positions is not None:
                # Positions below the start of the queue are those of an earlier one.
                positions = list(
                    map(max, positions, logged.queue_start(coordination.key, positions))
                )
            coordination.open(positions, logged)
            coordination.is_certain = is_certain
        else:
            return
        self._note_change(coordination)

    # Reports of the nodes

    def handle_full_report(self, node: str, tell: FullReport) -> None:
        """Takes a node's complete report of the groups of some homes."""
        accepted: dict[int, Home] = {}
        for partition, epoch in tell.homes:
            home = self.homes.led.get(partition)
            if home is not None and home.epoch == epoch:
                home.reported[node] = tell.number
                accepted[partition] = home
        if not accepted:
            return
        self._unreachable_since.pop(node, None)
        lost: dict[Coordination, list[Place]] = {}
        mentioned: set[str] = set()
        for stock in tell.capacities:
            found = accepted.get(self.homes.home_of(stock.key))
            if found is not None and is_group(stock.key):
                mentioned.add(stock.key)
                coordination = self.homes.coordination(found, stock.key)
                lost[coordination] = self._apply_capacity(found, coordination, node, stock)
        for home in accepted.values():
            for key, coordination in home.groups.items():
                if key not in mentioned:
                    lost[coordination] = coordination.lose(node)
                    self._dirty[coordination] = None
        self._reclaimer.reclaim(lost, node)
        self._send_ack(node, tell.number, [(h.partition, h.epoch) for h in accepted.values()])

    def _apply_capacity(
        self, home: Home, coordination: Coordination, node: str, stock: NodeCapacity
    ) -> list[Place]:
        if stock.start is not None and len(stock.start) == len(self._state.delivered):
            coordination.set_start(stock.start)
        stake = coordination.weights.of(node, self.load(node))
        lost = coordination.apply(stake, stock, self._replicated.groups)
        coordination.allow(node)
        if home.is_open and not coordination.is_open:
            self._open_group(home, coordination)
        self._note_change(coordination)
        return lost

    def load(self, node: str) -> NodeLoad:
        return self._loads.setdefault(node, NodeLoad())

    def report(self, node: str, report: AgentReport) -> None:
        """Takes the changes of one group at a node. A report without the present TELL number is
        ignored."""
        home = self.homes.led.get(report.home)
        if (
            home is None
            or home.epoch != report.epoch
            or home.reported.get(node) != report.number
            or self.homes.home_of(report.key) != report.home
            or not is_group(report.key)
        ):
            return
        if not report.members and report.key not in home.groups:
            return
        coordination = self.homes.coordination(home, report.key)
        if len(report.start) == len(self._state.delivered):
            coordination.set_start(report.start)
        stake = coordination.weights.of(node, self.load(node))
        coordination.measured(stake, report.members, report.limit)
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
        self._retry_full(stake.load)

    def _retry_full(self, load: NodeLoad) -> None:
        """Assigns records again to a node that had too many bytes."""
        if not load.is_full:
            return
        load.is_full = False
        for home in self.homes.led.values():
            self._dirty.update(dict.fromkeys(home.groups.values()))

    def disconnected(self, node: str) -> None:
        """Suspends assignments to a node whose link is lost.

        Its members may still finish what they have. The node reports again when it is connected.
        """
        self._unreachable_since.setdefault(node, self._state.now)
        for home in self.homes.led.values():
            home.reported.pop(node, None)
            for coordination in home.groups.values():
                stake = coordination.weights.nodes.get(node)
                if stake is not None:
                    stake.is_connected = False

    def node_down(self, node: str) -> None:
        """Reclaims the records of a node that is down by the metadata, or without a link for too
        long."""
        self._unreachable_since.pop(node, None)
        lost: dict[Coordination, list[Place]] = {}
        for home in self.homes.led.values():
            home.reported.pop(node, None)
            for coordination in home.groups.values():
                lost[coordination] = coordination.lose(node)
                self._dirty[coordination] = None
        self._reclaimer.reclaim(lost, node)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        sizes = dict.fromkeys(self._loads, 0)
        for home in self.homes.led.values():
            for coordination in home.groups.values():
                coordination.check()
                for node, size_bytes in coordination.holders.assigned.values():
                    sizes[node] += size_bytes
        for node, load in self._loads.items():
            assert load.size_bytes == sizes[node], "the bytes of the records at a node"

    def _reassign(self) -> None:
        """Assigns reclaimed records again where it is known now which ones sessions have kept."""
        now = self._state.now
        if self._reclaimer.is_waiting():
            for coordination in self._reclaimer.review(now):
                self._note_change(coordination)
        if self._unopened and self._open_at <= now:
            self._open_at = now + LOOK_AGAIN_S
            for coordination in list(self._unopened):
                self._open_group(self.homes.led[coordination.home], coordination)

    # Records

    def record(self, group: Group, message: Message) -> None:
        coordination = group.coordination
        assert isinstance(coordination, Coordination)
        if not coordination.is_open:
            return
        coordination.tail(message)
        self._note_change(coordination)
        if group.outbox_count() > TAILED_MAX:
            self._assign(coordination)

    def handle_read(
        self, group: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        coordination = self.homes.find(group.key)
        if coordination is not None:
            coordination.handle_read(group, records, positions, done)
            self._note_change(coordination)

    def _assign(self, coordination: Coordination) -> None:
        home = self.homes.led[coordination.home]
        for stake, messages in coordination.assign(self._may_any_read).items():
            number = home.reported[stake.node]
            assign = Assign(home.partition, home.epoch, number, coordination.key, messages)
            self._send_assign(stake.node, assign)

    def _may_any_read(self, coordination: Coordination, message: Message) -> bool:
        """See `rights.may_any_read`, of the members in the log. A member whose subscription is not
        applied here may read everything: a record that nobody may read is dropped.

        Invariant: a record is dropped only after every subscription is applied here whose SUBACK
        was sent before the record came. Complete member records show that. Without them a read
        barrier does that begins now. So a record waits for a barrier at most, also while a node of
        an older version keeps the member records from being complete.
        """
        key = coordination.key
        state = self._replicated.state
        members = state.groups[key].members if key in state.groups else {}
        if key in state.queues or any(
            may_read_later(self._state, each, message.topic) for each in members
        ):
            return True
        place = (message.partition, message.offset)
        if not self._context.is_whole:
            # A partition is loaded from another node, and its subscriptions are not here.
            coordination.unsure[place] = self._barriers.begin()
            return True
        is_complete = self._members.is_complete(self.homes.led[coordination.home])
        if is_complete and not self._replicated.group_members.has_unapplied(key):
            return False
        barrier = coordination.unsure.get(place)
        if barrier is None:
            barrier = coordination.unsure[place] = self._barriers.begin()
        return barrier != BARRIER_PASSED and not self._barriers.has_passed(barrier)

    def _retry_deferred(self, coordination: Coordination) -> None:
        """Tries the records aside again when members in the log have changed, and when it is
        certain which members there are.

        The member that a record waited for may have left for good, or there was none.
        """
        group = self._replicated.state.groups.get(coordination.key)
        changes = -1 if group is None else group.changes
        if coordination.retry(changes, self._barriers.has_passed):
            self._dirty[coordination] = None

    def flush(self, *, is_awaited: bool = False) -> None:
        """Opens groups, assigns records and logs progress, at the end of a turn. `is_awaited`: a
        client waits for the progress, and has its window full of QoS 2 records perhaps."""
        for key in self._replicated.groups.pop_applied_ends() or ():
            led = self.homes.led.get(self.homes.home_of(key))
            if led is not None:
                led.ended.discard(key)
        if self.homes.opening:
            for home in self.homes.pop_ready(self._barriers):
                self._open(home)
        self._reassign()
        dirty = self._dirty
        if dirty:
            self._dirty = {}
        for coordination in dirty:
            if not coordination.is_open or coordination.home not in self.homes.led:
                continue
            if coordination.weights.member_count():
                self._assign(coordination)
                coordination.read()
            elif not self._end_if_over(coordination):
                coordination.park()
        if is_awaited:
            self._progress.hasten()
        self._progress.flush()

    def _end_if_over(self, coordination: Coordination) -> bool:
        """Ends a group that has no member, here or in the log, and no assigned record. Returns True
        if it did.

        A node that is not down and has not reported may have members. The member records of the
        group's home show whether a member is away (`DurableMembers`).
        """
        key = coordination.key
        home = self.homes.led[coordination.home]
        holders = coordination.holders
        share = coordination.share
        if share is not None and share.sent.offsets:
            return False
        if holders.assigned or holders.doubtful or self._replicated.group_members.has_any(key):
            return False
        if not self.homes.all_reported(home) or self._may_have_older_members(home, coordination):
            return False
        self._end(coordination)
        return True

    def _end(self, coordination: Coordination) -> None:
        home = self.homes.led[coordination.home]
        self.homes.remove(home, coordination.key)
        self._forget(coordination)
        if coordination.logged is not None:
            home.ended.add(coordination.key)
            self._progress.log_end(coordination)

    def _may_have_older_members(self, home: Home, coordination: Coordination) -> bool:
        """True if the group may have a durable member without a member record.

        The barrier comes first, because a session that has just left may have subscribed in a
        record that is not applied here yet.
        """
        if self._members.is_complete(home):
            return False
        if coordination.barrier < 0:
            coordination.barrier = self._barriers.begin()
        is_durable = self._replicated.groups.is_durable(coordination.key)
        return is_durable or not self._barriers.has_passed(coordination.barrier)

    def queue_changed(self, key: str) -> None:
        """Lets a group whose queue has ended end in this turn. Counter-example of an end that waits
        for `tidy`: the queue begins again before, and goes on at its old position.

        A queue that begins ends the group of an earlier one, unless that has members. It is there
        after a crash between the records of both ends.
        """
        coordination = self.homes.find(key)
        if coordination is None:
            return
        is_kept = key in self._replicated.state.queues
        is_new = is_kept and not coordination.is_kept
        coordination.is_kept = is_kept
        if not is_kept:
            self._dirty[coordination] = None
        elif is_new and key not in self._replicated.group_members.recorded:
            holders = coordination.holders
            if not (coordination.weights.member_count() or holders.assigned or holders.doubtful):
                self._end(coordination)

    # Progress

    def _note_change(self, coordination: Coordination) -> None:
        self._dirty[coordination] = None
        self._progress.add(coordination)

    def note_progress(self, share: NodeAssignments) -> None:
        """Notes that records in no table were sent or finished, unless that is noted already."""
        if share.sent.count >= SENT_MAX:
            self._progress.hasten()
        elif not share.is_in_progress:
            coordination = self.homes.find(share.key)
            if coordination is not None:
                coordination.share = share
                share.is_in_progress = True
                self._progress.add(coordination)

    def note_sent(self, share: NodeAssignments, place: Place, *, is_listed: bool) -> None:
        """Notes that a member at this node receives an assigned record. Unless it stays
        `is_listed`, it is in no table from now on."""
        coordination = self.homes.find(share.key)
        if coordination is None:
            return
        node = self._context.node_id
        if coordination.holders.note_sent(node, place, is_listed=is_listed):
            del share.assigned[place]
            coordination.share = share
            share.sent.add(*place)
            self._note_change(coordination)
        self._retry_full(self.load(node))

    def list_sent(self, share: NodeAssignments) -> None:
        """Enters the group's records that are in no table: members here have them, or have finished
        them."""
        coordination = self.homes.find(share.key)
        if coordination is not None and coordination.share is share:
            collect_sent(coordination)
        sent = share.sent
        for finished in sent.unlogged:
            share.finished.update(_places(finished))
        sent.unlogged = []
        if not sent.offsets:
            return
        assert coordination is not None, "records of no group"
        assert coordination.share is share, "records of another group"
        node = coordination.weights.of(self._context.node_id, self.load(self._context.node_id))
        for place in _places(sent.offsets):
            share.assigned[place] = None
            coordination.holders.hold(node, place, 0)
        sent.offsets = {}
        self._note_change(coordination)

    def tidy(self) -> None:
        """Reclaims from nodes without a link, requests missing reports and ends groups, every
        `node.TIDY_S`."""
        now = self._state.now
        for node, since in list(self._unreachable_since.items()):
            if since + LOST_WAIT_S <= now:
                self.node_down(node)
        for node, homes in self.homes.unreported().items():
            self._send_report_request(node, homes)
        self._members.tidy()
        for home in self.homes.led.values():
            for coordination in list(home.groups.values()):
                self._retry_deferred(coordination)
                if coordination.is_full:
                    self._dirty[coordination] = None
                if coordination.is_open and not coordination.weights.member_count():
                    self._end_if_over(coordination)

    def has_groups(self) -> bool:
        """Whether a home that this node leads has groups."""
        return self.homes.group_count > 0

    def timer(self) -> float:
        if self._dirty:
            return self._state.now
        due = min(self._progress.timer(), self._reclaimer.timer())
        return min(due, self._open_at) if self._unopened else due


def _places(of_partitions: Offsets) -> dict[Place, None]:
    return {(partition, each): None for partition, of in of_partitions.items() for each in of}

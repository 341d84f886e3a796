"""State of one shared group at its coordinator: one cursor over all records, and their owners.

Invariant: a matching record is in exactly one of these:
- the cursor (its outbox, or the log ahead of it);
- `to_assign` or `returned`, if it was returned and is to be assigned again;
- `doubtful` and not assigned, if the last node that had it has lost it (`next_node`);
- `deferred`, if no present node can give it to a member that may read it;
- `uncertain`, if it is of QoS 2 and a session may have kept it that is not known here yet;
- `assigned`, if it is assigned to a node;
- with a member here and in no table, while this node is alone (`sent_records`);
- finished.

Positions in the log stay at or below all of them except finished records.

A node denies a record if none of its members may read it. It does not receive the record again
before members there have joined or left. So a record goes to each node at most once per such
change, and does not circulate. A record without a node that can take it now waits aside, and the
group continues. It waits for a node without capacity, or for an absent member in the log that may
read it. If there is neither, the record is finished without being sent, and counted. With ASIDE_MAX
records aside the group waits.

A finished record never returns to another of these states, whichever coordinator finished it.
Counter-example: a node that was cut off still has a record that its session has finished elsewhere.
A new coordinator that accepted the node's report would log a position below that record. When the
node returns the record, it would be assigned again.
"""

from collections.abc import Callable
from typing import Final

from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import Record
from holdfast.node.delivery.log_replay import READ_RECORDS_MAX, message_of
from holdfast.node.delivery.transmission import READ_BYTES_MAX, fall_behind, has_room
from holdfast.node.effects import ReadLog
from holdfast.node.groups.assignments import NodeAssignments
from holdfast.node.groups.control_frames import NodeCapacity, Place
from holdfast.node.groups.next_node import NodeWeight, NodeWeights, RecordHolders
from holdfast.node.node_state import NodeState
from holdfast.node.session.cursor import Delivery
from holdfast.node.session.message import Message, queued_size
from holdfast.node.session.session import Group
from holdfast.node.state.groups import GroupPositions
from holdfast.node.state.offset_ranges import FinishedOffsets
from holdfast.protocol.topics.names import split_shared

FETCH_SPAN: Final = 1000
"""The distance in offsets within which returned records of a partition are read together."""


def request_read(
    state: NodeState, reader: Group, filter_: str, positions: list[int], limits: list[int]
) -> None:
    """Requests a read of the records that match `filter_`, for `reader`."""
    state.stats.log_reads += 1
    interests = [ReadInterest(filter_, None)]
    effect = ReadLog(reader, None, positions, limits, interests, READ_RECORDS_MAX, READ_BYTES_MAX)
    state.effects.append(effect)


class RecordFetch:
    """The read of returned records, which have left the coordinator's memory."""

    def __init__(self, state: NodeState, name: str, filter_: str) -> None:
        self._state = state
        self._name = name
        self._filter = filter_
        self._reader: Group | None = None
        self._limits: list[int] = []
        # The records that are not read yet.
        self.places: dict[Place, None] = {}

    @property
    def is_reading(self) -> bool:
        return self._reader is not None

    def is_by(self, reader: Group) -> bool:
        """True if the result for `reader` belongs to this read."""
        return self._reader is reader

    def start(self, to_assign: dict[Place, None]) -> None:
        """Takes the first records of each partition out of `to_assign` and reads them."""
        positions = list(self._state.delivered)
        limits = list(positions)
        first: dict[int, int] = {}
        for partition, offset in sorted(to_assign):
            begin = first.setdefault(partition, offset)
            if offset < begin + FETCH_SPAN:
                del to_assign[(partition, offset)]
                self.places[(partition, offset)] = None
                positions[partition] = begin
                limits[partition] = offset + 1
        self._limits = limits
        self._reader = Group(self._name, self._filter)
        self._reader.start_read()
        request_read(self._state, self._reader, self._filter, positions, limits)

    def take(self, records: list[Record]) -> list[Message]:
        """Returns the wanted ones of the records that were read."""
        found: list[Message] = []
        for record in records:
            if self.places.pop((record.partition, record.offset), 0) is None:
                found.append(message_of(record))
        return found

    def pause(self) -> dict[Place, None]:
        """Ends the read. Returns the records that are not read."""
        self._reader = None
        places = self.places
        self.places = {}
        return places

    def finish(self, positions: list[int], done: bool) -> list[Place]:
        """Reads on, or ends the read. Returns the records that retention has deleted."""
        reader = self._reader
        if self.places and not done and reader is not None:
            request_read(self._state, reader, self._filter, positions, self._limits)
            return []
        lost = list(self.pause())
        self._state.stats.dropped_lost += len(lost)
        return lost


ASIDE_MAX: Final = 1000
"""The most records of one group that wait for a node or a member that may read them."""
BARRIER_PASSED: Final = 0
"""In place of the number of a read barrier, which is above 0."""
RETURNED_BYTES_MAX: Final = 8 << 20
"""The size in bytes of the returned records of one group in memory. The last read may exceed it."""
RANGES_MAX: Final = 100_000
"""The most ranges of finished offsets of one group above its positions. With them the group waits
for the records behind them: the next coordinator must know each finished record."""


def _has_filter() -> bool:
    """A node that stores all partitions needs no feed."""
    return True


class Coordination:
    """The assignment of the records of one shared group; the module states its invariant."""

    def __init__(self, key: str, home: int, epoch: int, state: NodeState) -> None:
        self.key = key
        self.home = home
        self.epoch = epoch
        self._state = state
        name, inner = split_shared(key)
        self.cursor = Group(name, inner)
        self.cursor.coordination = self
        self.cursor.tailing = False
        self.is_open = False
        # Whether it is the group of a queue that has not been deleted.
        self.is_kept = False
        # Whether every partition that is fed to this node is fed with the filter of the group.
        self.has_filter: Callable[[], bool] = _has_filter
        # False while sessions may have kept QoS 2 records that the log here does not show.
        self.is_certain = False
        # QoS 2 records that wait until that is certain.
        self.uncertain: dict[Place, None] = {}
        # The read barrier that began when the last member left, without member records. Once it is
        # passed, earlier subscriptions are applied here. -1: none.
        self.barrier = -1
        self.weights = NodeWeights()
        self.holders = RecordHolders(self.weights)
        # Places ahead of the cursor that are not assigned again, because they are given.
        self.skipped: set[Place] = set()
        self.to_assign: dict[Place, None] = {}
        # The size of `cursor.returned`.
        self.returned_bytes = 0
        # The records of this node, while it is alone and sends records without assigning them.
        self.share: NodeAssignments | None = None
        # Place -> nodes none of whose members may read the record.
        self.denied: dict[Place, set[str]] = {}
        self.deferred: dict[Place, None] = {}
        # Place -> the read barrier that began when no member known here might read the record and
        # others could be on their way. BARRIER_PASSED: they are known now.
        self.unsure: dict[Place, int] = {}
        # True if the records aside are to be tried again by the next `tidy`.
        self.retries = False
        # `Group.changes` of the members in the log at the last try of the records aside.
        self.changes = -1
        self._fetch = RecordFetch(state, name, inner)
        self.starts: list[int] | None = None
        # The offsets below which records are finished, or were published before the group existed.
        # A coordinator that lags has not applied all of them yet. Invariant: none is assigned.
        self._floor: list[int] = [0] * len(state.delivered)
        # The places finished since progress was last logged.
        self.finished: list[Place] = []
        # All finished places at or above the positions that were logged last.
        self.finished_offsets = FinishedOffsets()
        # True if the group waits because of RANGES_MAX.
        self.is_full = False
        self.logged: list[int] | None = None

    # Members and nodes

    def set_start(self, start: list[int]) -> None:
        """Takes the start of a group that the log does not have. The earliest of several counts."""
        if self.starts is None:
            self.starts = list(start)
        else:
            self.starts = list(map(min, self.starts, start))

    def measured(self, stake: NodeWeight, members: int, limit: int) -> None:
        stake.is_connected = True
        stake.members = members
        stake.limit = limit
        if members:
            self.barrier = -1

    def apply(self, node: NodeWeight, state: NodeCapacity, logged: GroupPositions) -> list[Place]:
        """Takes a node's complete report of this group. Returns the records that the node has lost.

        A reported record counts only if it is not finished in the log.
        """
        self.measured(node, state.members, state.limit)
        lost = dict.fromkeys(self.holders.at(node.node))
        ahead = self.cursor.resume_positions(self._state.delivered) if self.is_open else None
        for place in (*state.assigned, *state.finished):
            if place in lost:
                del lost[place]
            elif not logged.is_finished(self.key, *place):
                self._claim(node, place, ahead)
        for place in state.finished:
            self.finish(node.node, place)
        return list(lost)

    def _claim(self, node: NodeWeight, place: Place, ahead: list[int] | None) -> None:
        """Gives a reported record to the node, unless the group has finished it."""
        holders = self.holders
        if holders.has(node.node, place):
            return
        if place in holders.assigned:
            holders.claim(node.node, place)
        elif self._take_waiting(place, ahead):
            holders.hold(node, place, 0)
        holders.end_doubt(node.node, place)

    def _take_waiting(self, place: Place, ahead: list[int] | None) -> bool:
        """Takes a record out of those that no node holds. Returns False if it is finished."""
        if place in self.holders.doubtful:
            return True
        if place in self.uncertain:
            del self.uncertain[place]
            return True
        if place in self.to_assign or place in self._fetch.places or place in self.deferred:
            self.to_assign.pop(place, None)
            self._fetch.places.pop(place, None)
            self.deferred.pop(place, None)
            return True
        for message in self.cursor.returned:
            if (message.partition, message.offset) == place:
                self.cursor.returned.remove(message)
                assert isinstance(message, Message)
                self.returned_bytes -= queued_size(message)
                return True
        is_ahead = ahead is None or place[1] >= ahead[place[0]]
        if is_ahead and place not in self.skipped and place not in self.finished_offsets:
            self.skipped.add(place)
            return True
        return False

    def lose(self, node: str) -> list[Place]:
        """Removes the capacity of a node. Returns the records that it holds or claims."""
        stake = self.weights.nodes.get(node)
        if stake is not None:
            stake.members = 0
            stake.limit = 0
        return self.holders.at(node)

    def mark_doubtful(self, places: list[Place], barrier: int, node: str) -> None:
        """Takes records from a node that has lost them. They are doubtful until `barrier` is
        passed."""
        for place in places:
            self.holders.take_in_doubt(node, place, barrier)

    def resolve_doubtful(self, known: set[tuple[int, str]], kept: set[Place]) -> None:
        """Resolves doubts: records in `kept` are finished, others that no node holds are assigned
        again.

        `known`: the pairs of barrier and node whose doubt is resolved.
        """
        holders = self.holders
        for place, doubts in list(holders.doubtful.items()):
            resolved = [node for node, barrier in doubts.items() if (barrier, node) in known]
            if resolved and place in kept:
                self._finish_held(place)
                continue
            for node in resolved:
                holders.end_doubt(node, place)
            if holders.is_unheld(place):
                self.to_assign[place] = None

    def finish(self, node: str, place: Place) -> None:
        if self.holders.has(node, place):
            self._finish_held(place)

    def _finish_held(self, place: Place) -> None:
        """Finishes a record, whichever nodes still have it."""
        self.holders.forget(place)
        self._finish(place)

    def _finish(self, place: Place) -> None:
        self.denied.pop(place, None)
        self.unsure.pop(place, None)
        self._note_finished(place)

    def _note_finished(self, place: Place) -> None:
        self.finished.append(place)
        self.finished_offsets.add(place[0], place[1], place[1] + 1)

    def deny(self, node: str, place: Place) -> None:
        """Notes that no member at the node may read the record. `return_record` follows."""
        if self.holders.holds(node, place):
            self.denied.setdefault(place, set()).add(node)

    def allow(self, node: str) -> None:
        """Permits records again that the node has denied, because its members have changed."""
        for place, nodes in list(self.denied.items()):
            nodes.discard(node)
            if not nodes:
                del self.denied[place]
        # The records aside are tried again by the next `tidy`, not now. Members that join and leave
        # all the time would otherwise cause a read of all of them each time.
        self.retries = True

    def retry(self, changes: int, has_passed: Callable[[int], bool]) -> bool:
        """Tries the records aside again: all when members have changed, and otherwise those whose
        barrier is passed. Returns True if there are any.

        A barrier causes one try. A record that waits for another reason is not read all the time.
        """
        passed = [place for place, each in self.unsure.items() if each and has_passed(each)]
        self.unsure.update(dict.fromkeys(passed, BARRIER_PASSED))
        due = passed
        if self.retries or changes != self.changes:
            due = [*passed, *self.deferred]
        self.retries = False
        self.changes = changes
        for place in due:
            if place in self.deferred:
                del self.deferred[place]
                self.to_assign[place] = None
        return bool(due)

    def retry_at(self, stake: NodeWeight) -> None:
        """Assigns records aside to a node that has capacity again and has not denied them."""
        room = stake.limit - stake.count
        for place in list(self.deferred):
            if room <= 0:
                return
            if stake.node not in self.denied.get(place, ()):
                del self.deferred[place]
                self.to_assign[place] = None
                room -= 1

    def return_record(self, node: str, place: Place) -> None:
        if self.holders.has(node, place):
            self.holders.take(node, place)
            if self.holders.is_unheld(place):
                self.to_assign[place] = None

    # Records from the log

    def open(self, positions: list[int] | None, logged: GroupPositions) -> None:
        """Begins to assign records. `positions`: those in the log; None: the group is new."""
        state = self._state
        self.is_open = True
        if positions is None:
            starts = logged.starts(self.key) + ([self.starts] if self.starts else [])
            # The node that subscribed may have applied more than this one.
            self._floor = list(map(min, *starts, starts[0])) if starts else list(state.delivered)
            begin = list(map(min, self._floor, state.delivered))
            self.cursor.start = list(begin)
        else:
            # Records that nodes have reported may be finished by log records applied later.
            for place in list(self.holders.assigned):
                if logged.is_finished(self.key, *place):
                    self.holders.forget(place)
            begin = list(positions)
            self._floor = list(positions)
            self.logged = list(positions)
            if self.key in logged.done:
                self.finished_offsets = logged.done[self.key].copy()
                for partition, offset in self.finished:
                    self.finished_offsets.add(partition, offset, offset + 1)
        self._finish_kept(logged)
        self.skipped = {place for place in self.skipped if place[1] >= begin[place[0]]}
        self.starts = None
        cursor = self.cursor
        if begin == state.delivered:
            cursor.tailing = True
        else:
            cursor.positions = begin

    def _finish_kept(self, logged: GroupPositions) -> None:
        """Finishes the records that sessions keep. Those in doubt are in doubt no more.
        Counter-example: a lost node may have record 7, and a session keeps it. The session finishes
        the record before the doubt ends. Then no session keeps it, and it is assigned again."""
        for place in logged.kept_by_sessions(self.key):
            if place not in self.holders.assigned and place not in self.finished_offsets:
                self.to_assign.pop(place, None)
                self.deferred.pop(place, None)
                self._finish_held(place)

    def make_certain(self, logged: GroupPositions) -> None:
        """Assigns the uncertain records, except those that sessions have kept.

        Counter-example without the wait: the home of a session is not reached, and its record 7 is
        assigned to another one.
        """
        self.is_certain = True
        self._finish_kept(logged)
        waiting = [place for place in self.uncertain if place not in self.finished_offsets]
        self.to_assign.update(dict.fromkeys(waiting))
        self.uncertain = {}

    def tail(self, message: Message) -> None:
        """Takes a committed record, if the cursor is at the end of the log."""
        cursor = self.cursor
        if not cursor.tailing:
            return
        if message.offset < self._floor[message.partition]:
            return
        if not has_room(self._state, cursor.outbox_count(), cursor.outbox_bytes):
            fall_behind(self._state, cursor, message)
            return
        cursor.push(Delivery(message, message.qos, message.retain, None))

    def park(self) -> None:
        """Frees the memory of a group without members; its records remain in the log."""
        cursor = self.cursor
        while cursor.returned:
            message = cursor.returned.popleft()
            self.to_assign[(message.partition, message.offset)] = None
        self.returned_bytes = 0
        if not cursor.reading and (cursor.tailing or cursor.outbox):
            cursor.fall_behind(self._state.delivered)

    def read(self) -> None:
        """Requests the next records from the log if the cursor is behind."""
        has_room = self.returned_bytes < RETURNED_BYTES_MAX
        if self.to_assign and has_room and not self._fetch.is_reading:
            self._fetch.start(self.to_assign)
        cursor = self.cursor
        if cursor.reading or cursor.tailing or cursor.outbox_count() > READ_RECORDS_MAX // 2:
            return
        positions = cursor.positions
        assert positions is not None
        cursor.start_read()
        limits = list(self._state.delivered)
        request_read(self._state, cursor, self.cursor.filter, list(positions), limits)

    def handle_read(
        self, reader: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        if self._fetch.is_by(reader):
            found = self._fetch.take(records)
            self.cursor.returned.extend(found)
            self.returned_bytes += sum(map(queued_size, found))
            if not done and self.returned_bytes >= RETURNED_BYTES_MAX:
                self.to_assign.update(self._fetch.pause())
                return
            for place in self._fetch.finish(positions, done):
                self._finish(place)
            return
        if reader is not self.cursor:
            return
        cursor = self.cursor
        # These records come before those that `tail` has added during the read.
        cursor.reading = False
        for record in records:
            if record.offset < self._floor[record.partition]:
                continue
            message = message_of(record)
            audience = message.audience
            if message.qos and (audience is None or self.key in audience.groups):
                cursor.push(Delivery(message, message.qos, message.retain, None))
        cursor.reading = True
        cursor.finish_read(positions, done)

    # Records to the nodes

    def assign(
        self, may_any_read: Callable[["Coordination", Message], bool]
    ) -> dict[NodeWeight, list[Message]]:
        """Returns the records to assign now, by node.

        `may_any_read`: may a member in the log, connected or not, read the record of this group?
        """
        found: dict[NodeWeight, list[Message]] = {}
        self.is_full = len(self.finished_offsets) >= RANGES_MAX
        while not self.is_full:
            message = self._head()
            if message is None:
                return found
            place = (message.partition, message.offset)
            if message.qos == 2 and not self.is_certain:
                if len(self.uncertain) >= ASIDE_MAX:
                    return found
                self._pop()
                self.uncertain[place] = None
                continue
            denied = self.denied.get(place) if self.denied else None
            stake = self.weights.next(denied)
            if stake is None:
                if denied is None:
                    return found
                is_awaited = self.weights.is_awaited(denied) or may_any_read(self, message)
                if is_awaited and len(self.deferred) >= ASIDE_MAX:
                    return found
                self._pop()
                if is_awaited:
                    self.deferred[place] = None
                else:
                    self._state.stats.dropped_unreadable += 1
                    self._finish(place)
                continue
            self._pop()
            self.holders.hold(stake, place, queued_size(message))
            found.setdefault(stake, []).append(message)
        return found

    def _pop(self) -> None:
        if self.cursor.returned:
            message = self.cursor.returned.popleft()
            assert isinstance(message, Message)
            self.returned_bytes -= queued_size(message)
        else:
            self.cursor.pop()

    def _head(self) -> Message | None:
        """Returns the next record to assign, returned ones first. Expired ones are finished."""
        cursor = self.cursor
        while cursor.returned or cursor.outbox:
            if cursor.returned:
                message = cursor.returned[0]
                assert isinstance(message, Message)
            else:
                assert cursor.outbox is not None
                message = cursor.outbox[0].message
                place = (message.partition, message.offset)
                if place in self.skipped or place in self.finished_offsets:
                    self.skipped.discard(place)
                    cursor.pop()
                    continue
            if not message.is_expired(self._state.wall_us):
                return message
            self._state.stats.dropped_expired += 1
            self._finish((message.partition, message.offset))
            self._pop()
        return None

    def check(self) -> None:
        """Raises `AssertionError` for a record in two of the states, or a finished one in any."""
        holders = self.holders
        holders.check()
        assert self.returned_bytes == sum(
            queued_size(each) for each in self.cursor.returned if isinstance(each, Message)
        ), "the bytes of the returned records"
        returned = [(message.partition, message.offset) for message in self.cursor.returned]
        waiting = [*returned, *self.to_assign, *self._fetch.places, *self.deferred, *self.uncertain]
        known = set(waiting)
        assert len(known) == len(waiting), "a record waits twice"
        assert not known.intersection(holders.assigned), "an assigned record waits"
        assert not known.intersection(holders.doubtful), "a doubtful record waits"
        if self.is_open:
            for place in (*waiting, *holders.assigned, *holders.doubtful):
                assert place not in self.finished_offsets, "a finished record is not over"
        assert len(self.deferred) <= ASIDE_MAX, "too many records aside"
        assert len(self.uncertain) <= ASIDE_MAX, "too many uncertain records"

    def unheld(self) -> set[Place]:
        """Returns the records outside the cursor that are to be assigned."""
        returned = {(message.partition, message.offset) for message in self.cursor.returned}
        return returned.union(self.to_assign, self._fetch.places, self.deferred, self.uncertain)

    def positions(self) -> list[int]:
        """Returns the first unfinished offset per partition."""
        positions = self.cursor.resume_positions(self._state.delivered)
        positions = list(map(max, positions, self._floor))
        for places in (self.holders.assigned, self.holders.doubtful, self.unheld()):
            for partition, offset in places:
                if offset < positions[partition]:
                    positions[partition] = offset
        if self.share is not None:
            for partition, offsets in self.share.sent.offsets.items():
                positions[partition] = min(positions[partition], min(offsets))
        return positions

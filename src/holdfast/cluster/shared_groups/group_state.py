"""One shared group at its coordinator: a cursor over all records, and who has which of them.

Invariant: a record that matches is with exactly one of: the cursor (its outbox or the log),
`wanted` or `returned` (given back, to be handed out again), `doubtful` (a lost node had it),
`aside`, `given` (to one node), finished. Positions in the log stay at or below all of them but the
last.

Of a record that members may not read, this is the rule. A node none of whose members may read it
denies it, and is not given it again before members there have come or gone. So a record goes to
each node at most once for each such change, and never round and round. When no node that takes
records now is left for it, it waits aside, and the group goes on: for a node that has no room yet,
or for a member that is away and may read it, as the log knows that. If there is neither, the record
is finished without having been sent, and counted. With ASIDE_MAX aside the group waits.

A finished record never becomes another one of these, whoever finished it: this coordinator or one
before, in whose time the log says so. Counter-example: a node that was cut off still has a record
that its session has finished elsewhere. A new coordinator that believed the node would log a
position below that record, and hand the record out again when the node gives it back.
"""

from collections.abc import Callable
from typing import Final

from holdfast.broker.delivery.delivery import READ_BYTES_MAX, fall_behind, has_room
from holdfast.broker.delivery.log_replay import READ_RECORDS_MAX, message_of
from holdfast.broker.effects import ReadLog
from holdfast.broker.session.cursor import Delivery
from holdfast.broker.session.message import Message
from holdfast.broker.state import Group, NodeState
from holdfast.cluster.shared_groups.codec import NodeCapacity, Place
from holdfast.cluster.state.groups import GroupPositions
from holdfast.protocol.topics.names import split_shared
from holdfast.storage.reading.interest import ReadInterest
from holdfast.storage.record import Record

LOAD_BYTES_MAX: Final = 8 << 20
"""Given to one node and not finished, of all groups; one record more may go above it."""
ASIDE_MAX: Final = 1000
"""Records of one group that wait for a node or a member that may read them."""
FETCH_SPAN: Final = 1000
"""Returned records that lie so near one another in a partition are read together."""


class NodeLoad:
    """Of one node, over all groups of this coordinator."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.is_full = False


class NodeWeight:
    """What a node's members of the group take."""

    def __init__(self, node: str, load: NodeLoad) -> None:
        self.node = node
        self.load = load
        self.members = 0
        self.limit = 0
        self.count = 0
        # Of the weighted round robin: who has waited longest for its share comes next.
        self.credit = 0
        # False: the link is lost, or it has to tell anew.
        self.is_here = False


class Coordination:
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
        # A node or the log has told of members whose sessions outlive their connections.
        self.was_durable = False
        # Since nobody is there: what was subscribed before is known here once it is passed.
        self.barrier = -1
        self.stakes: dict[str, NodeWeight] = {}
        # Place -> node, bytes.
        self.given: dict[Place, tuple[str, int]] = {}
        # Places ahead of the cursor that are not to be handed out: given already, or finished.
        self.skipped: set[Place] = set()
        # Place -> number of the barrier after which it is known whether a session has kept it, and
        # the node that had it, if that is lost.
        self.doubtful: dict[Place, tuple[int, str]] = {}
        self.wanted: dict[Place, None] = {}
        # Place -> nodes none of whose members may read the record.
        self.denied: dict[Place, set[str]] = {}
        self.aside: dict[Place, None] = {}
        # It is to be looked at again, now and then.
        self.retries = False
        # Of the members that the log knows, `Group.changes` when what is aside was last looked at.
        self.changes = -1
        self._fetch: Group | None = None
        self._fetch_limits: list[int] = []
        self._fetching: dict[Place, None] = {}
        self.starts: list[int] | None = None
        # Of a new group: what lies before was published before it.
        self._floor: list[int] | None = None
        # Finished since the last record of progress.
        self.finished: list[Place] = []
        self.logged: list[int] | None = None

    # Who is there

    def stake(self, node: str, load: NodeLoad) -> NodeWeight:
        stake = self.stakes.get(node)
        if stake is None:
            stake = NodeWeight(node, load)
            self.stakes[node] = stake
        return stake

    def member_count(self) -> int:
        return sum(stake.members for stake in self.stakes.values())

    def begin_at(self, start: list[int]) -> None:
        """A node knows a group's beginning; the earliest counts, if nobody knows more."""
        if self.starts is None:
            self.starts = list(start)
        else:
            self.starts = list(map(min, self.starts, start))

    def measured(self, stake: NodeWeight, members: int, durable: int, limit: int) -> None:
        stake.is_here = True
        stake.members = members
        stake.limit = limit
        if members:
            self.barrier = -1
        if durable:
            self.was_durable = True

    def told(self, stake: NodeWeight, stock: NodeCapacity, images: GroupPositions) -> list[Place]:
        """Everything that a node has. Returns what was given to it and is lost."""
        self.measured(stake, stock.members, stock.durable, stock.limit)
        lost = {place: None for place, given in self.given.items() if given[0] == stake.node}
        ahead = self.cursor.resume_positions(self._state.delivered) if self.is_open else None
        for place in stock.held:
            if place in lost:
                del lost[place]
            elif not images.is_finished(self.key, *place) and self._claim(place, ahead):
                self.given[place] = (stake.node, 0)
                stake.count += 1
        for place in stock.finished:
            if place in lost:
                del lost[place]
                self.finish(stake.node, place)
            elif not images.is_finished(self.key, *place) and self._claim(place, ahead):
                self._finish(place)
        return list(lost)

    def _claim(self, place: Place, ahead: list[int] | None) -> bool:
        """Was it not handed out by this coordinator? Then it need not be."""
        if place in self.given or place in self.skipped:
            return False
        if self.doubtful.pop(place, None) is not None:
            return True
        if place in self.wanted or place in self._fetching or place in self.aside:
            self.wanted.pop(place, None)
            self._fetching.pop(place, None)
            self.aside.pop(place, None)
            return True
        for message in self.cursor.returned:
            assert isinstance(message, Message)
            if (message.partition, message.offset) == place:
                self.cursor.returned.remove(message)
                return True
        if ahead is None or place[1] >= ahead[place[0]]:
            self.skipped.add(place)
            return True
        return False

    def lose(self, node: str) -> list[Place]:
        """A node has nothing of the group any more. Returns what it had."""
        stake = self.stakes.get(node)
        if stake is not None:
            stake.members = 0
            stake.limit = 0
        return [place for place, given in self.given.items() if given[0] == node]

    def doubt(self, places: list[Place], barrier: int, node: str) -> None:
        """`node`: that is lost; "" if it has told what it has."""
        for place in places:
            self._take(place)
            self.doubtful[place] = (barrier, node)

    def settle_doubts(self, known: set[tuple[int, str]], kept: set[Place]) -> None:
        """`known`: barriers and nodes after which it is known."""
        for place, doubt in list(self.doubtful.items()):
            if doubt in known:
                del self.doubtful[place]
                if place in kept:
                    self._finish(place)
                else:
                    self.wanted[place] = None

    def finish(self, node: str, place: Place) -> None:
        if self.given.get(place, ("", 0))[0] == node:
            self._take(place)
            self._finish(place)

    def _finish(self, place: Place) -> None:
        self.denied.pop(place, None)
        self.finished.append(place)

    def deny(self, node: str, place: Place) -> None:
        """No member at the node may read the record. `give_back` follows."""
        if self.given.get(place, ("", 0))[0] == node:
            self.denied.setdefault(place, set()).add(node)

    def allow(self, node: str) -> None:
        """Members at the node have come or gone: it may be given again what it has denied."""
        for place, nodes in list(self.denied.items()):
            nodes.discard(node)
            if not nodes:
                del self.denied[place]
        # Not at once: members that come and go all the time would have it all read each time.
        self.retries = True

    def retry(self) -> None:
        """Hand out again what is aside, or finish it."""
        self.retries = False
        self.wanted.update(self.aside)
        self.aside = {}

    def retry_at(self, stake: NodeWeight) -> None:
        """The node takes records: it may be one that what is aside waits for."""
        room = stake.limit - stake.count
        for place in list(self.aside):
            if room <= 0:
                return
            if stake.node not in self.denied.get(place, ()):
                del self.aside[place]
                self.wanted[place] = None
                room -= 1

    def give_back(self, node: str, place: Place) -> None:
        if self.given.get(place, ("", 0))[0] == node:
            self._take(place)
            self.wanted[place] = None

    def _take(self, place: Place) -> None:
        node, size_bytes = self.given.pop(place)
        stake = self.stakes.get(node)
        if stake is not None:
            stake.count -= 1
            stake.load.size_bytes -= size_bytes

    # Records in

    def open(self, positions: list[int] | None, images: GroupPositions) -> None:
        """Begin to hand out. `positions`: of the log; None: the group is new."""
        state = self._state
        self.is_open = True
        if positions is None:
            starts = images.starts(self.key) + ([self.starts] if self.starts else [])
            # The node that subscribed may be ahead of this one.
            self._floor = list(map(min, *starts, starts[0])) if starts else list(state.delivered)
            begin = list(map(min, self._floor, state.delivered))
        else:
            # What nodes have told before may have been finished by records that came later.
            for place in [each for each in self.given if images.is_finished(self.key, *each)]:
                self._take(place)
            begin = list(positions)
            self.logged = list(positions)
            for partition, offsets in images.done.get(self.key, {}).items():
                self.skipped.update((partition, offset) for offset in offsets)
        for place in images.kept_by_members(self.key):
            if place not in self.given and place not in self.skipped:
                self.skipped.add(place)
                self.finished.append(place)
        self.skipped = {place for place in self.skipped if place[1] >= begin[place[0]]}
        self.starts = None
        cursor = self.cursor
        if begin == state.delivered:
            cursor.tailing = True
        else:
            cursor.positions = begin

    def tail(self, message: Message) -> None:
        cursor = self.cursor
        if not cursor.tailing:
            return
        if self._floor is not None and message.offset < self._floor[message.partition]:
            return
        if not has_room(self._state, cursor.outbox_count(), cursor.outbox_bytes):
            fall_behind(self._state, cursor, message)
            return
        cursor.push(Delivery(message, message.qos, message.retain, ()))

    def park(self) -> None:
        """Nobody is there: memory goes, the log keeps it."""
        cursor = self.cursor
        while cursor.returned:
            message = cursor.returned.popleft()
            assert isinstance(message, Message)
            self.wanted[(message.partition, message.offset)] = None
        if not cursor.reading and (cursor.tailing or cursor.outbox):
            cursor.fall_behind(self._state.delivered)

    def read(self) -> None:
        """Ask for what comes next from the log, if something does."""
        if self.wanted and self._fetch is None:
            self._fetch_some()
        cursor = self.cursor
        if cursor.reading or cursor.tailing or cursor.outbox_count() > READ_RECORDS_MAX // 2:
            return
        positions = cursor.positions
        assert positions is not None
        cursor.start_read()
        self._ask(cursor, list(positions), list(self._state.delivered))

    def _ask(self, reader: Group, positions: list[int], limits: list[int]) -> None:
        self._state.stats.log_reads += 1
        self._state.effects.append(
            ReadLog(
                reader,
                None,
                positions,
                limits,
                [ReadInterest(self.cursor.filter, None)],
                READ_RECORDS_MAX,
                READ_BYTES_MAX,
            )
        )

    def _fetch_some(self) -> None:
        positions = list(self._state.delivered)
        limits = list(positions)
        first: dict[int, int] = {}
        for partition, offset in sorted(self.wanted):
            begin = first.setdefault(partition, offset)
            if offset < begin + FETCH_SPAN:
                del self.wanted[(partition, offset)]
                self._fetching[(partition, offset)] = None
                positions[partition] = begin
                limits[partition] = offset + 1
        reader = Group(self.cursor.name, self.cursor.filter)
        reader.coordination = self
        self._fetch = reader
        self._fetch_limits = limits
        reader.start_read()
        self._ask(reader, positions, limits)

    def handle_read(
        self, reader: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        if reader is self._fetch:
            self._handle_fetched(reader, records, positions, done)
            return
        if reader is not self.cursor:
            return
        cursor = self.cursor
        # Before whatever was tailed while the read was under way.
        cursor.reading = False
        for record in records:
            message = message_of(record)
            if message.qos:
                cursor.push(Delivery(message, message.qos, message.retain, ()))
        cursor.reading = True
        cursor.finish_read(positions, done)

    def _handle_fetched(
        self, reader: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        for record in records:
            if self._fetching.pop((record.partition, record.offset), 0) is None:
                self.cursor.returned.append(message_of(record))
        if self._fetching and not done:
            self._ask(reader, positions, self._fetch_limits)
            return
        self._fetch = None
        # Retention took them.
        self._state.stats.dropped_lost += len(self._fetching)
        for place in self._fetching:
            self._finish(place)
        self._fetching = {}

    # Records out

    def hand_out(
        self, may_any_read: Callable[[str, bytes], bool]
    ) -> dict[NodeWeight, list[Message]]:
        """What goes to whom now, as far as there is somebody to take it. `may_any_read(key,
        topic)`: may a member that the log knows, connected or not, read a topic?"""
        found: dict[NodeWeight, list[Message]] = {}
        while True:
            message = self._head()
            if message is None:
                return found
            place = (message.partition, message.offset)
            denied = self.denied.get(place) if self.denied else None
            stake = self._next_stake(denied)
            if stake is None:
                if denied is None:
                    return found
                is_awaited = self._is_awaited(denied) or may_any_read(self.key, message.topic)
                if is_awaited and len(self.aside) >= ASIDE_MAX:
                    return found
                self._pop()
                if is_awaited:
                    self.aside[place] = None
                else:
                    self._state.stats.dropped_unreadable += 1
                    self._finish(place)
                continue
            self._pop()
            size_bytes = len(message.payload) + 200
            stake.count += 1
            stake.load.size_bytes += size_bytes
            self.given[place] = (stake.node, size_bytes)
            found.setdefault(stake, []).append(message)

    def _pop(self) -> None:
        if self.cursor.returned:
            self.cursor.returned.popleft()
        else:
            self.cursor.pop()

    def _head(self) -> Message | None:
        """The next one to be handed out; returned ones first."""
        cursor = self.cursor
        while cursor.returned or cursor.outbox:
            if cursor.returned:
                message = cursor.returned[0]
                assert isinstance(message, Message)
            else:
                assert cursor.outbox is not None
                message = cursor.outbox[0].message
                place = (message.partition, message.offset)
                if place in self.skipped:
                    self.skipped.discard(place)
                    cursor.pop()
                    continue
            if not message.is_expired(self._state.wall_us):
                return message
            self._state.stats.dropped_expired += 1
            self._finish((message.partition, message.offset))
            self._pop()
        return None

    def _is_awaited(self, denied: set[str]) -> bool:
        """Is there a node with members that was not given the record since they are there?"""
        return any(stake.members and stake.node not in denied for stake in self.stakes.values())

    def _next_stake(self, denied: set[str] | None) -> NodeWeight | None:
        """Weighted by members, of the nodes that take another record, and this one."""
        best: NodeWeight | None = None
        total = 0
        for stake in self.stakes.values():
            if not stake.is_here or stake.count >= stake.limit:
                continue
            if denied is not None and stake.node in denied:
                continue
            if stake.load.size_bytes > LOAD_BYTES_MAX:
                stake.load.is_full = True
                continue
            stake.credit += stake.members
            total += stake.members
            if best is None or stake.credit > best.credit:
                best = stake
        if best is not None:
            best.credit -= total
        return best

    def positions(self) -> list[int]:
        """First unfinished offset per partition."""
        positions = self.cursor.resume_positions(self._state.delivered)
        for places in (self.given, self.doubtful, self.wanted, self._fetching, self.aside):
            for partition, offset in places:
                if offset < positions[partition]:
                    positions[partition] = offset
        for message in self.cursor.returned:
            assert isinstance(message, Message)
            if message.offset < positions[message.partition]:
                positions[message.partition] = message.offset
        return positions

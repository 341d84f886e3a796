"""Positions of shared groups as the log defines them, on every node.

The coordinator of a group writes its CURSOR records, in the epoch of the group's home partition. A
record of a deposed coordinator is ignored because of its lower epoch. An empty record ends the
group, unless the log has a durable member before it: the coordinator appended the record before it
knew of that member. Every record sets values, as `node.state.recovery` explains.

Invariant: until a group ends, its positions never decrease. A position says that everything below
it is finished, and nothing else stores that. Counter-example: a position falls from 100 to 50. The
next coordinator hands out the records from 50 again, QoS 2 records included.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from msgspec.json import encode

from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.session.session import Inflight, Session, tag_of
from holdfast.node.session.state import cursor_in
from holdfast.node.state.fields import MEMBERS, MembersEntry
from holdfast.node.state.offset_ranges import FinishedOffsets
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.session_records import GroupEntry, MemberRecord, MembersRecord, decode_json
from holdfast.protocol.topics.names import is_shared

MEMBERS_MAX: Final = 500
"""The most members in one entry of a snapshot or a transfer."""


class GroupMembers:
    """The member records of all shared groups, and their differences from the subscriptions.

    A member's session is in another partition, which a coordinator may not have applied. So the
    session appends a member record to the home of the group beside its subscription, and the SUBACK
    waits for both. A group ends by these records alone. Counter-example without them: the
    coordinator does not reach the leader of the session's home, does not find the session, and ends
    the group of a member that is away. What was published meanwhile is lost.

    A member record may be there without a subscription: after a crash between the two, or while the
    subscription is under way. Such a record only keeps the group. The coordinator removes it when
    that is certain (`node.groups.durable_members`).

    Logs of older versions have no member records. A MEMBERS record in a home partition says that
    all durable members of its groups have one.
    """

    def __init__(self, state: RecordedState) -> None:
        self._state = state
        # By group and client id, the session epoch of the newest member record.
        self.recorded: dict[str, dict[str, int]] = {}
        # Per home partition: True once all durable members of its groups have a record.
        self.is_complete: list[bool] = [False] * state.config.partitions
        # The home partitions whose differences are noted.
        self.watched: set[int] = set()
        # The (group, client id) of subscriptions without a member record, and of member records
        # without a subscription, both as far as records are applied here.
        self.unrecorded: dict[tuple[str, str], None] = {}
        self.departed: dict[tuple[str, str], None] = {}

    def _home(self, key: str) -> int:
        return partition_of(key.encode(), self._state.config.partitions)

    def has_any(self, key: str) -> bool:
        """True if the group has a durable member, or is a queue."""
        return key in self.recorded or key in self._state.queues

    def has_unapplied(self, key: str) -> bool:
        """True if a member of a watched group has a member record and no subscription yet."""
        return any(each[0] == key for each in self.departed)

    def is_recorded(self, key: str, client_id: str) -> bool:
        return client_id in self.recorded.get(key, ())

    def apply(self, record: Record, change: MemberRecord | MembersRecord) -> None:
        """Applies a member record. A removal applies to its epoch and those before."""
        if isinstance(change, MembersRecord):
            self.is_complete[record.partition] = True
            return
        key, client_id = change.client, change.member
        if not is_shared(key) or self._home(key) != record.partition:
            raise ValueError("a member record of a group with another home")
        epoch = self.recorded.get(key, {}).get(client_id, -1)
        if not change.left:
            self._set(key, client_id, record.sequence)
        elif 0 <= epoch <= record.sequence:
            self._remove(key, client_id)
        self.review(key, client_id)

    def _set(self, key: str, client_id: str, epoch: int) -> None:
        members = self.recorded.setdefault(key, {})
        members[client_id] = max(epoch, members.get(client_id, -1))

    def _remove(self, key: str, client_id: str) -> None:
        members = self.recorded[key]
        del members[client_id]
        if not members:
            del self.recorded[key]

    def review(self, key: str, client_id: str) -> None:
        """Notes whether the subscription and the member record of a session differ."""
        if client_id == key or self._home(key) not in self.watched:
            return
        session = self._state.sessions.get(client_id)
        subscribes = session is not None and key in session.subscriptions
        pair = (key, client_id)
        self.unrecorded.pop(pair, None)
        self.departed.pop(pair, None)
        if subscribes != self.is_recorded(key, client_id):
            differing = self.unrecorded if subscribes else self.departed
            differing[pair] = None

    def watch(self, home: int) -> None:
        """Begins to note differences, with those that there are."""
        self.watched.add(home)
        for key, members in self.recorded.items():
            if self._home(key) == home:
                for client_id in members:
                    self.review(key, client_id)
        for key, group in self._state.groups.items():
            if self._home(key) == home:
                for session in group.members:
                    self.review(key, session.client_id)

    def unwatch(self, home: int) -> None:
        """Ends `watch`."""
        self.watched.discard(home)
        for differing in (self.unrecorded, self.departed):
            for pair in [each for each in differing if self._home(each[0]) == home]:
                del differing[pair]

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Yields (home, entry) of all groups and homes. The state may change between two of
        them."""
        for key in list(self.recorded):
            home = self._home(key)
            members = list(self.recorded.get(key, {}).items())
            for start in range(0, len(members), MEMBERS_MAX):
                yield home, encode(MembersEntry(home, key, members[start : start + MEMBERS_MAX]))
        for home, is_complete in enumerate(self.is_complete):
            if is_complete:
                yield home, encode(MembersEntry(home))

    def restore(self, data: bytes) -> None:
        """Loads an entry. Raises ValueError when it is malformed."""
        entry = decode_json(MEMBERS, data, "members of a group")
        if not 0 <= entry.home < len(self.is_complete):
            raise ValueError(f"members of groups with the home {entry.home}")
        if not entry.group:
            self.is_complete[entry.home] = True
        elif is_shared(entry.group) and self._home(entry.group) == entry.home:
            for client_id, epoch in entry.members:
                self._set(entry.group, client_id, epoch)
                self.review(entry.group, client_id)

    def drop(self, home: int) -> None:
        """Removes the records of a home partition, before they are loaded from another node."""
        self.unwatch(home)
        self.is_complete[home] = False
        for key in [each for each in self.recorded if self._home(each) == home]:
            del self.recorded[key]


OFFSETS_MAX: Final = 100_000
"""The most finished offsets of one group that an entry has one by one, where older versions read
them. Further ones are in its ranges."""


class GroupPositions:
    """The positions, finished offsets and epochs of all shared groups of the broker."""

    def __init__(self, state: RecordedState, positions: dict[str, list[int]]) -> None:
        """`positions`: the first unfinished offset per partition, by group. This class changes
        it."""
        self._state = state
        # Called with each position. ReplicatedState sets it.
        self.note_position: Callable[[int, int], None] = lambda partition, offset: None
        self.members = GroupMembers(state)
        self.positions = positions
        # By group, the finished offsets at or above the positions. None is left out, because each
        # is a record that the next coordinator would hand out again. The coordinator bounds them
        # (`group_state.RANGES_MAX`).
        self.done: dict[str, FinishedOffsets] = {}
        self.epochs: dict[str, int] = {}
        # By tag, the groups with positions.
        self._keys: dict[int, set[str]] = {}
        # By tag of a group, the sessions that keep QoS 2 records of it, with their number.
        self._keepers: dict[int, dict[Session, int]] = {}
        # A counter of applied records, from which readers see a change.
        self.version = 0
        # Groups that have ended since the last call of `pop_dropped`.
        self._dropped: set[str] = set()
        # Groups whose end was applied or ignored since the last call of `pop_applied_ends`.
        self.applied_ends: set[str] = set()

    def apply(self, record: Record) -> None:
        """Applies a CURSOR record of a group."""
        self.version += 1
        key = record.client_id.decode()
        if record.sequence < self.epochs.get(key, 0):
            return
        cursor = cursor_in(record, self._state.config.partitions)
        if not cursor.positions and not cursor.done:
            self.applied_ends.add(key)
            if key not in self.members.recorded:
                self.drop(key)
                self._dropped.add(key)
            return
        self.epochs[key] = record.sequence
        positions = self.positions.setdefault(key, [0] * self._state.config.partitions)
        self._keys.setdefault(tag_of(key), set()).add(key)
        done = self.done.setdefault(key, FinishedOffsets())
        for partition, offset in cursor.positions:
            self.note_position(partition, offset)
            offset = max(offset, positions[partition])
            positions[partition] = offset
            done.drop_below(partition, offset)
        for partition, offset in cursor.done:
            self.note_position(partition, offset + 1)
            if offset >= positions[partition]:
                done.add(partition, offset, offset + 1)
        self.set_cursor(key)

    def is_finished(self, key: str, partition: int, offset: int) -> bool:
        """True if the log says that the group has finished the record."""
        positions = self.positions.get(key)
        if positions is None:
            return False
        if offset < positions[partition]:
            return True
        return key in self.done and (partition, offset) in self.done[key]

    def pop_dropped(self) -> set[str]:
        """Returns the groups that have ended since the last call."""
        dropped = self._dropped
        self._dropped = set()
        return dropped

    def pop_applied_ends(self) -> set[str] | None:
        """Returns the groups with an applied record of their end since the last call, None if there
        is none."""
        ends = self.applied_ends
        if not ends:
            return None
        self.applied_ends = set()
        return ends

    def is_owned_at(self, key: str, node: str) -> bool:
        """True if the node owns a durable session that may keep QoS 2 records of the group under
        packet ids.

        Such a session may append further packet ids until it is closed.
        """
        group = self._state.groups.get(key)
        return group is not None and any(
            session.owner == node and subscription.qos == 2 and _outlives_connection(session)
            for session, subscription in group.members.items()
        )

    def note_inflight(self, session: Session, entry: Inflight | None, count: int) -> None:
        """Counts a packet id of a session that came into use (1) or is free again (-1)."""
        if entry is None or entry.qos < 2 or not entry.group_tag:
            return
        sessions = self._keepers.setdefault(entry.group_tag, {})
        left = sessions.get(session, 0) + count
        assert left >= 0, "a packet id is free twice"
        if left:
            sessions[session] = left
        else:
            sessions.pop(session, None)
            if not sessions:
                del self._keepers[entry.group_tag]

    def kept_by_sessions(self, key: str) -> set[tuple[int, int]]:
        """Returns the (partition, offset) of QoS 2 records of the group that sessions keep under a
        packet id.

        No other session may receive them. [MQTT-4.8.2-4] [MQTT-4.8.2-5] A session that has left the
        group is one of them. Counter-example without it: a member unsubscribes with a record
        inflight and its node fails. Another member receives the record, and the first one receives
        it again when it is back.
        """
        tag = tag_of(key)
        return {
            (entry.partition, entry.offset)
            for session in self._keepers.get(tag, ())
            for entry in session.inflight.values()
            if entry.qos == 2 and entry.group_tag == tag
        }

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        keepers: dict[int, dict[Session, int]] = {}
        for session in self._state.sessions.values():
            for entry in session.inflight.values():
                if entry.qos == 2 and entry.group_tag:
                    of_tag = keepers.setdefault(entry.group_tag, {})
                    of_tag[session] = of_tag.get(session, 0) + 1
        assert keepers == self._keepers, "the sessions that keep records of groups"
        assert {key for keys in self._keys.values() for key in keys} == self.positions.keys()
        for key, done in self.done.items():
            positions = self.positions[key]
            for partition, ranges in done.items():
                ranges.check()
                assert ranges.ranges()[0][0] >= positions[partition], "finished below the position"

    def keys_of(self, tag: int) -> set[str]:
        """Returns the groups with this tag that have positions in the log."""
        return self._keys.get(tag, set())

    def starts(self, key: str) -> list[list[int]]:
        """Returns the start positions of the members in the log."""
        group = self._state.groups.get(key)
        if group is None:
            return []
        return [each.start for each in group.members.values() if each.start is not None]

    def queue_start(self, key: str, delivered: list[int]) -> list[int]:
        """Returns the start of a group that begins at a node: a queue may begin in the past."""
        keeper = self._state.queues.get(key)
        start = None if keeper is None else keeper.subscriptions[key].start
        return list(start or delivered)

    def is_durable(self, key: str) -> bool:
        """True if a member in the log has a session that outlives its connection."""
        group = self._state.groups.get(key)
        return group is not None and any(map(_outlives_connection, group.members))

    def set_cursor(self, key: str) -> None:
        """Sets the group's cursor to its positions, so that retention keeps the records it has not
        finished."""
        group = self._state.groups.get(key)
        positions = self.positions.get(key)
        if group is not None and positions is not None:
            group.tailing = False
            group.positions = list(positions)

    def entry(self, key: str) -> GroupEntry:
        """Returns the group as a SNAPSHOT_GROUP entry."""
        entry = GroupEntry(key, self.positions[key], epoch=self.epochs.get(key, 0))
        room = OFFSETS_MAX
        for partition, ranges in self.done.get(key, FinishedOffsets()).items():
            offsets = list(islice(ranges.offsets(), room))
            room -= len(offsets)
            if offsets:
                entry.done.append((partition, offsets))
            if not room:
                entry.ranges.append((partition, ranges.ranges()))
        return entry

    def restore(self, entry: GroupEntry) -> None:
        """Loads a SNAPSHOT_GROUP entry whose positions are loaded already."""
        for partition, offset in enumerate(entry.positions):
            self.note_position(partition, offset)
        done = self.done[entry.key] = FinishedOffsets()
        for partition, offsets in entry.done:
            for offset in offsets:
                done.add(partition, offset, offset + 1)
        for partition, ranges in entry.ranges:
            for start, end in ranges:
                done.add(partition, start, end)
        for partition, finished in done.items():
            self.note_position(partition, finished.ranges()[-1][1])
        self.epochs[entry.key] = entry.epoch
        self._keys.setdefault(tag_of(entry.key), set()).add(entry.key)
        self.set_cursor(entry.key)

    def drop(self, key: str) -> None:
        self.positions.pop(key, None)
        self.done.pop(key, None)
        self.epochs.pop(key, None)
        keys = self._keys.get(tag_of(key), set())
        keys.discard(key)
        if not keys:
            self._keys.pop(tag_of(key), None)
        group = self._state.groups.get(key)
        if group is not None:
            group.tailing = True
            group.positions = None


def _outlives_connection(session: Session) -> bool:
    return session.expiry_s > 0

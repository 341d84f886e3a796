"""State that the committed records define: sessions, retained messages, producers.

Every node has all of it, equal at equal offsets, because only committed records change it. The node
that owns a session has the state of its connection. What that node appends is applied here.

Records of one partition are applied in order, those of several partitions are not. QoS 2 packet ids
(`packet_ids`) and wills have records in the partitions of their messages, so they are stored with
the session epoch.

Invariant: the state of a session or a group is a function of the records of its home partition. A
session's cursor has no positions before a record sets them. Counter-example: each node fills them
in from what it has delivered so far. After a failover the session resumes at another offset than
before.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import gt
from typing import Final

from msgspec import UNSET
from msgspec.json import encode

from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.failure.cluster_clock import TOLERANCE_S
from holdfast.node.session.rare_fields import NOT_TRUSTED
from holdfast.node.session.session import Inflight, Session, Subscription
from holdfast.node.session.state import CursorState, complete_inflight
from holdfast.node.state.client_epochs import ClientEpochs
from holdfast.node.state.fields import EPOCHS, INBOUND, WILLS, PublishedWills, StoredEpochs
from holdfast.node.state.groups import GroupPositions
from holdfast.node.state.packet_ids import ReplicatedPacketIds
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.session_records import (
    CloseRecord,
    EndRecord,
    MemberRecord,
    MembersRecord,
    OpenRecord,
    SessionEntry,
    SessionRecord,
    SubscriptionRow,
    decode_group,
    decode_json,
    encode_session,
)
from holdfast.node.state.snapshot_entries import (
    SNAPSHOT_GROUP,
    SNAPSHOT_SESSION,
    first_starts,
    message_entries,
    session_entry,
)
from holdfast.protocol.topics.names import has_wildcard, is_shared
from holdfast.protocol.topics.trie import SubscriptionTrie


class RecordedFilters:
    """The filters that sessions have, shared ones left out. Each costs one entry."""

    def __init__(self) -> None:
        # The number of sessions with each filter. Those with wildcards are also in the trie.
        self._counts: dict[str, int] = {}
        self._wildcards = SubscriptionTrie()

    def change(self, filter: str, sessions: int) -> None:
        """Notes that so many sessions more, or fewer, have the filter."""
        if is_shared(filter):
            return
        count = self._counts.pop(filter, 0) + sessions
        if count:
            self._counts[filter] = count
        if has_wildcard(filter) and count:
            self._wildcards.add(filter, None, count)
        elif has_wildcard(filter):
            self._wildcards.remove(filter, None)

    def match(self, topic: str) -> bool:
        """Whether a session has a filter that matches."""
        return topic in self._counts or len(self._wildcards.match(topic)) > 0

    def check(self, sessions: Iterable[Session]) -> None:
        """Raises `AssertionError` unless these are the recorded sessions."""
        plain = [each for one in sessions for each in one.subscriptions if not is_shared(each)]
        assert self._counts == Counter(plain), "the filters of the recorded sessions"
        assert len(self._wildcards) == sum(map(has_wildcard, self._counts)), "those in the trie"


class OpenSessions:
    """The open sessions of each node, and those without a connection.

    Invariant: a session is in one bucket, that of its owner and home. One without a connection has
    the owner "". A node that goes down then costs a walk over its own sessions. Without the index
    it costs one over all sessions: with 1,000,000 of them the event loop stops for longer than
    `suspect_s`. A snapshot lists one home at a time, because a list of all sessions takes 70 ms.
    """

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        # In the order of opening. That of a set of sessions differs from one process to the next.
        self._of: dict[str, dict[int, dict[Session, None]]] = {}
        # The number of clients' open sessions of each owner that has had one.
        self.counts: dict[str, int] = {}

    def add(self, session: Session) -> None:
        """Adds a session for its present owner, if it has one."""
        home = partition_of(session.key, self._partitions)
        self._of.setdefault(session.owner, {}).setdefault(home, {})[session] = None
        if session.owner:
            counts = self.counts
            counts[session.owner] = counts.get(session.owner, 0) + (not session.is_internal)

    def discard(self, session: Session) -> None:
        """Removes a session from its present owner, if it is there."""
        homes = self._of.get(session.owner)
        home = partition_of(session.key, self._partitions)
        sessions = None if homes is None else homes.get(home)
        if homes is None or sessions is None or session not in sessions:
            return
        del sessions[session]
        if session.owner:
            self.counts[session.owner] -= not session.is_internal
        if not sessions:
            del homes[home]
            if not homes:
                del self._of[session.owner]

    def check(self, sessions: Iterable[Session]) -> None:
        """Raises `AssertionError` unless these sessions, which are all, are in the buckets of their
        owners."""
        known = list(sessions)
        assert all(map(self._is_known, known)), "a session is missing"
        count = len(known)
        for owner, homes in self._of.items():
            clients = [not each.is_internal for bucket in homes.values() for each in bucket]
            assert not owner or self.counts[owner] == sum(clients), "the number of the open"
            for bucket in homes.values():
                count -= len(bucket)
                assert bucket, "an empty bucket"
                assert all(session.owner == owner for session in bucket), "another's session"
        assert count == 0, "a session that has ended is here"

    def owners(self) -> list[str]:
        """Returns the nodes with open sessions."""
        return [owner for owner in self._of if owner]

    def homes(self, owner: str) -> list[int]:
        """Returns the home partitions of the open sessions of a node."""
        return list(self._of.get(owner, ()))

    def has(self, session: Session) -> bool:
        """True if the session is open, and belongs to its owner therefore."""
        return session.owner != "" and self._is_known(session)

    def _is_known(self, session: Session) -> bool:
        home = partition_of(session.key, self._partitions)
        return session in self._of.get(session.owner, {}).get(home, ())

    def of(self, owner: str, home: int) -> list[Session]:
        """Returns a copy of the open sessions of a node with one home partition."""
        return list(self._of.get(owner, {}).get(home, ()))

    def all_of(self, home: int) -> list[Session]:
        """Returns a copy of all sessions with one home partition."""
        return [session for homes in self._of.values() for session in homes.get(home, ())]


FIRED_MAX: Final = 5_000
"""The most published wills that are stored for the records of one partition. No node publishes an
older one again."""
ENDED_MAX: Final = 5_000
"""The most ended sessions of one home partition that are stored: those with the highest epochs. No
record that would open one with a lower epoch is still under way."""
OLD_REQUESTS_MAX: Final = 20_000
"""The most ended sessions whose requests this process knows."""
ANY_PARTITION: Final = -1
"""In place of the partition of a will's record, which older versions do not store."""
CLOCK_SLACK_S: Final = 2 * TOLERANCE_S
"""The difference in seconds that the clocks of two nodes may have.

A session that was closed less than this ago counts as closed now, because an interval must not end
early. The clock of the node that closed it may be behind that of the node that ends it.
"""
NOBODY: Final = ""
"""A client id that no client has."""
REQUESTS_MAX: Final = 8
"""The most request numbers stored for one session. A node repeats a request within one second, to
the leader of that time."""
SNAPSHOT_EPOCHS: Final = 100
"""The kind of a JSON entry with `fired` and `ended`."""
SNAPSHOT_INBOUND: Final = 101
"""The kind of a JSON entry with a client's part of `ReplicatedState.inbound`, with epochs. It is
not a part of the session entry: a later record may open that session."""
SNAPSHOT_MEMBERS: Final = 102
"""The kind of a JSON entry with durable members of a shared group."""
SNAPSHOT_WILLS: Final = 103
"""The kind of a JSON entry with published wills of one partition, and the offsets of their
records."""
EPOCHS_ENTRY_MAX: Final = 500
"""The most clients in one entry."""


class ReplicatedState(ReplicatedPacketIds):
    """The replicated state of all partitions, and what recovery needs to rebuild it.

    Invariant: two nodes that have applied the same offsets of a home partition have equal sessions
    and groups of it. No clock, no local delivery and no limit of this node may enter them.

    Invariant: only `apply`, a snapshot or a transfer changes a session here, and it has no part of
    a connection (`check`). The node that owns it has a live session, which alone has an outbox and
    packet ids that no record has, and which is dropped with the connection. Counter-example: a
    client acknowledges a message, and its packet id is freed here before that is in the log. Two
    nodes then differ, and the next owner reads the message again.
    """

    def __init__(self, state: RecordedState) -> None:
        super().__init__(state)
        self.clock_slack_us = int(CLOCK_SLACK_S * 1e6)
        self.open_sessions = OpenSessions(state.config.partitions)
        # For each listing under way: the sessions that have begun since.
        self._later: list[dict[Session, None]] = []
        # The requests of ended sessions, as far as this process knows them.
        self._old_requests: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        # Per partition of the record: the newest session epochs with a published will. The record
        # is in the partition of the will's topic, or in the client's home.
        self.fired: dict[int, ClientEpochs] = {}
        self.fired_max = FIRED_MAX
        # Per home partition: the epochs of the newest ended sessions.
        self.ended = [ClientEpochs(ENDED_MAX) for _ in range(state.config.partitions)]
        # Per home partition: the newest epoch of its sessions so far, or the newest reserved one if
        # that is higher. A session that is not stored any more had no later epoch.
        self.newest_epochs = [0] * state.config.partitions
        # Per partition: the highest position in it that was recorded, of a session or a group. It
        # never falls.
        self.farthest = [0] * state.config.partitions
        self.ahead: set[int] = set()
        """The partitions with a position beyond the end of the log here. `OffsetVoider` empties
        it."""
        self.groups = GroupPositions(state, self.group_positions)
        self.groups.note_position = self.note_position
        self.group_members = self.groups.members
        self.filters = RecordedFilters()
        # The argument of the last call of `home`, and its result. A decision needs it ten times.
        self._home_asked: str | None = None
        self._home = 0
        # The number of subscriptions of all clients' sessions without an owner.
        self.subscriptions_away = 0

    def apply_snapshot_entry(self, kind: int, data: bytes) -> None:
        """Loads an entry of a snapshot."""
        if kind == SNAPSHOT_EPOCHS:
            epochs = decode_json(EPOCHS, data, "epochs of sessions")
            for client_id, epoch in epochs.fired:
                self.note_fired(client_id, epoch)
            for client_id, epoch in epochs.ended:
                self.note_ended(client_id, epoch)
            newest_of = epochs.newest_of or [epochs.newest] * len(self.newest_epochs)
            for home, epoch in enumerate(newest_of[: len(self.newest_epochs)]):
                self.note_epoch(home, epoch)
        elif kind == SNAPSHOT_INBOUND:
            entry = decode_json(INBOUND, data, "packet ids")
            self.inbound[entry.client] = {(each[0], each[1]): each[2] for each in entry.ids}
        elif kind == SNAPSHOT_MEMBERS:
            self.group_members.restore(data)
        elif kind == SNAPSHOT_WILLS:
            self.restore_wills(data)
        else:
            super().apply_snapshot_entry(kind, data)
            if kind == SNAPSHOT_GROUP:
                self.groups.restore(decode_group(data, self.state.config.partitions))

    def note_position(self, partition: int, offset: int) -> None:
        """Notes a position that a record or an entry names."""
        if offset > self.farthest[partition]:
            self.farthest[partition] = offset
            if offset > self.state.journal.next_offset[partition]:
                self.ahead.add(partition)

    def _note_positions(self, offsets: list[int] | None) -> None:
        if offsets and any(map(gt, offsets, self.farthest)):
            for partition, offset in enumerate(offsets):
                self.note_position(partition, offset)

    def _set_cursor(self, session: Session, cursor: CursorState) -> None:
        for partition, offset in cursor.positions:
            self.note_position(partition, offset)
        for _, entry in cursor.inflight:
            if entry is not None:
                self.note_position(entry.partition, entry.offset + 1)
        super()._set_cursor(session, cursor)

    def _owe(self, session: Session, filter: str, after: str, seam: list[int] | None) -> None:
        super()._owe(session, filter, after, seam)
        self._note_positions(seam)

    def _move_group(self, key: str, record: Record) -> None:
        self.groups.apply(record)

    def _advance(self, session: Session, cursor: CursorState) -> None:
        """Applies a cursor record.

        The last cursor record of a failed node counts even after its session is closed, so that
        less is sent again. The exception is a QoS 2 record of a shared group that the session did
        not have before. The coordinator may have given it to another session. The failed node has
        not sent it: it would do so only after applying this record, and the close before it.
        """
        if not session.owner:
            known = session.inflight
            cursor.inflight = [
                (packet_id, None if _is_new_of_group(known.get(packet_id), entry) else entry)
                for packet_id, entry in cursor.inflight
            ]
        super()._advance(session, cursor)
        if session.has_starts and session.positions is not None:
            # With 64 partitions each would take 600 bytes.
            for each in session.subscriptions.values():
                if each.is_begun(session.positions):
                    each.start = None
            session.has_starts = any(each.start for each in session.subscriptions.values())

    def _set_inflight(self, session: Session, packet_id: int, entry: Inflight | None) -> None:
        self.groups.note_inflight(session, session.inflight.get(packet_id), -1)
        super()._set_inflight(session, packet_id, entry)
        self.groups.note_inflight(session, entry, 1)

    def _unlogged_positions(self, session: Session) -> list[int]:
        if any(each.start is not None for each in session.subscriptions.values()):
            return first_starts(self.state, session)
        return super()._unlogged_positions(session)

    def _complete_session(self, session: Session) -> None:
        """Leaves positions that no record sets empty: the node that resumes the session sets them
        (`take_over`)."""
        complete_inflight(session)

    def _subscribe(self, session: Session, row: SubscriptionRow, start: list[int] | None) -> None:
        super()._subscribe(session, row, start)
        if is_shared(row[0]):
            self.group_members.review(row[0], session.client_id)

    def _add_subscription(self, subscription: Subscription) -> None:
        if subscription.filter not in subscription.session.subscriptions:
            self.filters.change(subscription.filter, 1)
            self._count_away(subscription.session, 1)
        super()._add_subscription(subscription)
        self._note_positions(subscription.start)
        self.groups.set_cursor(subscription.filter)

    def _remove_subscription(self, session: Session, filter: str) -> None:
        if filter in session.subscriptions:
            self.filters.change(filter, -1)
            self._count_away(session, -1)
        super()._remove_subscription(session, filter)
        if is_shared(filter):
            self.group_members.review(filter, session.client_id)

    def _drop_session(self, session: Session) -> None:
        keys = [group.key for group in session.groups or ()]
        for entry in session.inflight.values():
            self.groups.note_inflight(session, entry, -1)
        for filter in session.subscriptions:
            self.filters.change(filter, -1)
        self._count_away(session, -len(session.subscriptions))
        self.open_sessions.discard(session)
        for later in self._later:
            later.pop(session, None)
        super()._drop_session(session)
        for key in keys:
            self.group_members.review(key, session.client_id)

    def _new_session(self, client_id: str, epoch: int, is_past: bool = False) -> Session:
        session = super()._new_session(client_id, epoch, is_past)
        self.open_sessions.add(session)
        for later in self._later:
            later[session] = None
        return session

    def _set_open(self, session: Session, owner: str) -> None:
        self.open_sessions.discard(session)
        if not session.owner:
            self._count_away(session, -len(session.subscriptions))
        session.owner = owner
        if owner != self.state.config.node_id:
            session.own_rare().replays_over = False
        self.open_sessions.add(session)

    def _set_closed(self, session: Session) -> None:
        if session.owner:
            self.open_sessions.discard(session)
            session.owner = ""
            self.open_sessions.add(session)
            self._count_away(session, len(session.subscriptions))

    def _count_away(self, session: Session, more: int) -> None:
        if not session.owner and not session.is_internal:
            self.subscriptions_away += more

    def _note_member(self, record: Record, change: MemberRecord | MembersRecord) -> None:
        self.group_members.apply(record, change)

    def requests(self, client_id: str) -> tuple[int, ...]:
        """Returns the requests that opened the client's session, the newest last."""
        session = self.state.sessions.get(client_id)
        requests = () if session is None else session.rare.requests
        return self._old_requests.get(client_id, ()) + requests

    def _note_will(self, record: Record) -> None:
        super()._note_will(record)
        self._fired_in(record.partition).note(
            record.client_id.decode(), record.sequence, record.offset
        )

    def _fired_in(self, partition: int) -> ClientEpochs:
        return self.fired.setdefault(partition, ClientEpochs(self.fired_max))

    def has_fired(self, client_id: str, epoch: int, topic: bytes) -> bool:
        """True if the will of the client's session with this epoch, or a later one, was published
        to this topic, or dropped."""
        partitions = self.home(client_id), partition_of(topic, len(self.ended)), ANY_PARTITION
        return any(
            partition in self.fired and self.fired[partition].epoch(client_id) >= epoch
            for partition in partitions
        )

    def fired_epoch(self, client_id: str) -> int:
        """Returns the newest session epoch of the client with a published will, or -1."""
        newest = -1
        for each in self.fired.values():
            newest = max(newest, each.epoch(client_id))
        return newest

    def _change_session(self, change: SessionRecord, timestamp_us: int, epoch: int) -> None:
        client_id = change.client
        before = self.state.sessions.get(client_id)
        if isinstance(change, OpenRecord):
            home = self.home(client_id)
            known = self.ended[home].epoch(client_id) if before is None else before.epoch
            if epoch <= known:
                # The record is of an earlier leader that did not know the decision of its
                # successor.
                return
            self.note_epoch(home, epoch)
        self._note_sent(before, change, epoch)
        super()._change_session(change, timestamp_us, epoch)
        after = self.state.sessions.get(client_id)
        if after is not None and self._has_fired(after):
            # The record of the will is in another partition, and was applied before this one.
            after.will = None
        if isinstance(change, EndRecord):
            # Also without a session, because a snapshot may be ahead of this record. A Clean Start
            # does not count. Counter-example: client c has no session when the sessions of a
            # snapshot are written. It begins one, begins again with Clean Start, and subscribes,
            # and then the ended sessions are written. A recovery would ignore both openings, and c
            # would have no session.
            self.note_ended(client_id, epoch)
        if before is not None and after is not before:
            old = self._old_requests.get(client_id, ()) + before.rare.requests
            self._old_requests[client_id] = old[-REQUESTS_MAX:]
            if len(self._old_requests) > OLD_REQUESTS_MAX:
                self._old_requests.popitem(last=False)
        if after is None:
            self._forget_inbound(client_id, epoch)
        elif isinstance(change, OpenRecord):
            # Those that the node of an earlier connection knew.
            after.rights = None
            rare = after.own_rare()
            rare.requests = (*rare.requests, change.request)[-REQUESTS_MAX:]
            if rare.trusted[0] != change.generation:
                rare.trusted = (change.generation, epoch)

    def _has_fired(self, session: Session) -> bool:
        will = session.will
        return will is not None and self.has_fired(session.client_id, session.epoch, will.topic)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two records."""
        self.open_sessions.check(self.state.sessions.values())
        self.groups.check()
        sessions = self.state.sessions.values()
        self.filters.check(sessions)
        away = [
            len(each.subscriptions) for each in sessions if not (each.owner or each.is_internal)
        ]
        assert self.subscriptions_away == sum(away), "the subscriptions of sessions that are away"
        for client_id, session in self.state.sessions.items():
            live = session.connection, session.outbox, session.changes
            assert live == (None, None, None), "a part of a live session"
            assert all(each.logged for each in session.inflight.values()), "not in the log"
            assert bool(session.life) == bool(session.epoch), "a session that began in no epoch"
            assert session.epoch <= self.newest_epochs[self.home(client_id)], "an unknown epoch"

    def note_epoch(self, home: int, epoch: int) -> None:
        if epoch > self.newest_epochs[home]:
            self.newest_epochs[home] = epoch

    def home(self, client_id: str) -> int:
        """The home partition of a session, or of the group with this key."""
        if client_id is not self._home_asked:
            self._home_asked = client_id
            self._home = partition_of(client_id.encode(), self.state.config.partitions)
        return self._home

    def _note_sent(self, before: Session | None, change: SessionRecord, epoch: int) -> None:
        if before is None or epoch < before.epoch:
            return
        if isinstance(change, OpenRecord) and before.owner:
            before.own_rare().lacks_sent = True
        elif isinstance(change, CloseRecord) and not change.maybe_sent:
            before.own_rare().lacks_sent = False
        elif isinstance(change, CloseRecord) and before.owner:
            # If the session has no owner, its node has closed it already, and knew more than the
            # coordinator that closes it in the node's place.
            before.own_rare().lacks_sent = True

    def _begin_life(self, session: Session, epoch: int) -> None:
        super()._begin_life(session, epoch)
        self.note_epoch(self.home(session.client_id), epoch)

    def _restore_session(self, entry: SessionEntry) -> Session:
        session = super()._restore_session(entry)
        if entry.born is not UNSET:
            session.life = entry.born
        rare = session.own_rare()
        rare.requests = () if entry.requests is UNSET else tuple(entry.requests)
        rare.trusted = NOT_TRUSTED if entry.trusted is UNSET else entry.trusted
        rare.lacks_sent = entry.may_be_sent
        return session

    def drop(self, session: Session) -> None:
        """Removes a session that will be loaded again from another node. It does not count as
        ended."""
        self._forget(session)

    def restore(self, entry: SessionEntry) -> Session:
        """Loads a session from another node. Raises ValueError or struct.error when its cursor is
        malformed."""
        session = self._restore_session(entry)
        if self._has_fired(session):
            session.will = None
        return session

    def arm_some_timers(self, count_max: int) -> list[Session]:
        """Arms the timers of some sessions without a connection. Returns those that have
        expired."""
        touched = sorted(islice(self.touched, count_max), key=lambda session: session.client_id)
        return [session for session in touched if not self.arm_timers(session)]

    def note_fired(self, client_id: str, epoch: int) -> None:
        """Notes a published will that an older version reports. With NOBODY: the newest epoch of
        all partitions, which those versions need."""
        if client_id != NOBODY:
            self._will_done(client_id, epoch)
            self._fired_in(ANY_PARTITION).note(client_id, epoch, epoch)

    def restore_wills(self, data: bytes) -> None:
        """Loads an entry of `wills`. Raises ValueError when it is malformed."""
        entry = decode_json(WILLS, data, "published wills")
        if not ANY_PARTITION <= entry.partition < len(self.ended):
            raise ValueError(f"wills of partition {entry.partition}")
        for client_id, epoch, offset in entry.wills:
            self._will_done(client_id, epoch)
            self._fired_in(entry.partition).note(client_id, epoch, offset)

    def wills(self) -> Iterator[tuple[int, bytes]]:
        """Yields (partition, entry) of all published wills. The state may change between two of
        them."""
        for partition, fired in list(self.fired.items()):
            wills = fired.items()
            for start in range(0, len(wills), EPOCHS_ENTRY_MAX):
                some = wills[start : start + EPOCHS_ENTRY_MAX]
                yield partition, encode(PublishedWills(partition, some))

    def note_ended(self, client_id: str, epoch: int) -> None:
        """Notes that a session has ended, as the log or another node says."""
        home = self.home(client_id)
        self.note_epoch(home, epoch)
        self.ended[home].note(client_id, epoch, epoch)

    def has_inflight(self, client_id: str, group_tag: int, place: tuple[int, int]) -> bool:
        """True if the session keeps the group's record (partition, offset) under a packet id."""
        session = self.state.sessions.get(client_id)
        return session is not None and any(
            (entry.partition, entry.offset) == place and entry.group_tag == group_tag
            for entry in session.inflight.values()
        )

    def arm_timers(self, session: Session) -> bool:
        """Arms the timers of a changed session. Returns False if it has no connection and has
        expired."""
        if session not in self.touched:
            return True
        del self.touched[session]
        self._complete_session(session)
        return self.open_sessions.has(session) or self._rearm(session)

    def entry(self, session: Session) -> SessionEntry:
        """Returns the session as a snapshot entry, without the packet ids of its own messages."""
        if session in self.touched:
            self._complete_session(session)
        entry = session_entry(self.state, session)
        rare = session.rare
        entry.born = session.life
        entry.requests = list(rare.requests)
        entry.maybe_sent = rare.lacks_sent
        entry.trusted = UNSET if rare.trusted == NOT_TRUSTED else rare.trusted
        return entry

    def present_sessions(self, homes: Iterable[int]) -> Iterator[Session]:
        """Yields the sessions with these home partitions that are here from now until their turn
        comes. The state may change between two of them.

        They are listed home by home, because a list of all of them takes 70 ms. One that begins
        meanwhile is left out. Counter-example: it is in a snapshot, ends, and its epoch is pushed
        out of `ended`. The log behind the snapshot would begin and end earlier ones of its client.
        """
        later: dict[Session, None] = {}
        self._later.append(later)
        try:
            for home in homes:
                for session in self.open_sessions.all_of(home):
                    known = self.state.sessions.get(session.client_id)
                    if known is session and session not in later:
                        yield session
        finally:
            self._later = [each for each in self._later if each is not later]

    def all_sessions(self) -> Iterator[Session]:
        """Yields the sessions of all homes, as `present_sessions`."""
        return self.present_sessions(range(self.state.config.partitions))

    def snapshot(self) -> Iterator[tuple[int, bytes]]:
        """Yields the entries of a snapshot file. The state may change between two of them."""
        for session in self.all_sessions():
            yield SNAPSHOT_SESSION, encode_session(self.entry(session))
        for client_id in list(self.inbound):
            known = self.inbound.get(client_id)
            if known:
                ids = [[*place, epoch] for place, epoch in known.items()]
                inbound = {"client": client_id, "ids": ids}
                data = json.dumps(inbound, ensure_ascii=False, separators=(",", ":"))
                yield SNAPSHOT_INBOUND, data.encode()
        for key in list(self.group_positions):
            if key in self.group_positions:
                yield SNAPSHOT_GROUP, encode_session(self.groups.entry(key))
        for _, members in self.group_members.entries():
            yield SNAPSHOT_MEMBERS, members
        yield from message_entries(self.state)
        for _, wills in self.wills():
            yield SNAPSHOT_WILLS, wills
        ended = [(name, epoch) for home in self.ended for name, epoch, _ in home.items()]
        newest = self.newest_epochs
        yield SNAPSHOT_EPOCHS, encode(StoredEpochs([], ended, max(newest), newest))


def _is_new_of_group(known: Inflight | None, entry: Inflight | None) -> bool:
    if entry is None or entry.qos < 2 or not entry.group_tag:
        return False
    return known is None or (known.partition, known.offset) != (entry.partition, entry.offset)

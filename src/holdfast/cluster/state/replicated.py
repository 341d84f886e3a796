"""The state that the committed records define: sessions, retained messages, producers.

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
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final

from msgspec import UNSET
from msgspec.json import encode

from holdfast.broker.recorded_state import RecordedState
from holdfast.broker.recovery.session_records import (
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
from holdfast.broker.recovery.snapshot_entries import (
    SNAPSHOT_GROUP,
    SNAPSHOT_SESSION,
    first_starts,
    session_entry,
    snapshot_entries,
)
from holdfast.broker.session.session import Inflight, Session
from holdfast.broker.session.state import CursorState
from holdfast.cluster.failure.cluster_clock import TOLERANCE_S
from holdfast.cluster.state.fields import EPOCHS, INBOUND, StoredEpochs
from holdfast.cluster.state.groups import GroupPositions
from holdfast.cluster.state.open_sessions import OpenSessions
from holdfast.cluster.state.packet_ids import ReplicatedPacketIds
from holdfast.protocol.topics.names import is_shared
from holdfast.storage.partition import partition_of
from holdfast.storage.record import Record

FIRED_MAX: Final = 20_000
"""The most published wills that are stored. No node publishes an older one again."""
ENDED_MAX: Final = 20_000
"""The most ended sessions that are stored. No record of an older one is still under way."""
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


class ReplicatedState(ReplicatedPacketIds):
    """The replicated state of all partitions, and what recovery needs to rebuild it.

    Invariant: two nodes that have applied the same offsets of a home partition have equal sessions
    and groups of it. No clock and no local delivery may enter them.
    """

    def __init__(self, state: RecordedState) -> None:
        super().__init__(state)
        self.clock_slack_us = int(CLOCK_SLACK_S * 1e6)
        self.open_sessions = OpenSessions(state.config.partitions)
        # Per session: the newest requests that opened it, that of its owner last. `_old_requests`:
        # those of ended sessions, as far as this process knows them.
        self._requests: dict[str, list[int]] = {}
        self._old_requests: OrderedDict[str, list[int]] = OrderedDict()
        # Clients whose node failed during or before their newest connection. Their cursor may lack
        # messages that the node had sent last.
        self.maybe_sent: set[str] = set()
        # Per client id the newest session epoch with a published will.
        self.fired: OrderedDict[str, int] = OrderedDict()
        # Per client id the epoch of its newest ended session.
        self.ended: OrderedDict[str, int] = OrderedDict()
        # Per home partition: the newest epoch of its sessions so far, or the newest reserved one if
        # that is higher. A session that is not stored any more had no later epoch.
        self.newest_epochs = [0] * state.config.partitions
        self.groups = GroupPositions(state, self.group_positions)
        self.group_members = self.groups.members

    def apply_snapshot_entry(self, kind: int, data: bytes) -> None:
        """Loads an entry of a snapshot."""
        if kind == SNAPSHOT_EPOCHS:
            epochs = decode_json(EPOCHS, data, "epochs of sessions")
            self.fired = OrderedDict(epochs.fired)
            self.ended = OrderedDict(epochs.ended)
            newest_of = epochs.newest_of or [epochs.newest] * len(self.newest_epochs)
            for home, epoch in enumerate(newest_of[: len(self.newest_epochs)]):
                self.note_epoch(home, epoch)
        elif kind == SNAPSHOT_INBOUND:
            entry = decode_json(INBOUND, data, "packet ids")
            self.inbound[entry.client] = {(each[0], each[1]): each[2] for each in entry.ids}
        elif kind == SNAPSHOT_MEMBERS:
            self.group_members.restore(data)
        else:
            super().apply_snapshot_entry(kind, data)
            if kind == SNAPSHOT_GROUP:
                self.groups.restore(decode_group(data, self.state.config.partitions))

    def _move_cursor(self, record: Record) -> None:
        if not is_shared(record.client_id.decode()):
            super()._move_cursor(record)
        elif not self._is_of_misnamed(record):
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
        self._complete_inflight(session)

    def _subscribe(self, session: Session, row: SubscriptionRow, start: list[int] | None) -> None:
        super()._subscribe(session, row, start)
        self.groups.set_cursor(row[0])
        if is_shared(row[0]):
            self.group_members.review(row[0], session.client_id)

    def _remove_subscription(self, session: Session, filter: str) -> None:
        super()._remove_subscription(session, filter)
        if is_shared(filter):
            self.group_members.review(filter, session.client_id)

    def _drop_session(self, session: Session) -> None:
        keys = [group.key for group in session.groups or ()]
        for entry in session.inflight.values():
            self.groups.note_inflight(session, entry, -1)
        super()._drop_session(session)
        for key in keys:
            self.group_members.review(key, session.client_id)

    def _set_open(self, session: Session, owner: str) -> None:
        self.open_sessions.discard(session)
        super()._set_open(session, owner)
        self.open_sessions.add(session)

    def _set_closed(self, session: Session) -> None:
        self.open_sessions.discard(session)
        super()._set_closed(session)

    def _note_member(self, record: Record, change: MemberRecord | MembersRecord) -> None:
        self.group_members.apply(record, change)

    def requests(self, client_id: str) -> list[int]:
        """Returns the requests that opened the client's session, the newest last."""
        return self._old_requests.get(client_id, []) + self._requests.get(client_id, [])

    def _note_request(self, client_id: str, request: int) -> None:
        known = self._requests.setdefault(client_id, [])
        known.append(request)
        del known[:-REQUESTS_MAX]

    def _will_done(self, client_id: str, epoch: int) -> None:
        super()._will_done(client_id, epoch)
        _remember(self.fired, client_id, epoch, FIRED_MAX)

    def has_fired(self, client_id: str, epoch: int) -> bool:
        """True if the will of the client's session with this epoch, or a later one, was
        published."""
        return self.fired.get(client_id, -1) >= epoch

    def _change_session(self, change: SessionRecord, timestamp_us: int, epoch: int) -> None:
        client_id = change.client
        before = self.state.sessions.get(client_id)
        if isinstance(change, OpenRecord):
            known = self.ended.get(client_id, 0) if before is None else before.epoch
            if epoch <= known:
                # The record is of an earlier leader that did not know the decision of its
                # successor.
                return
            self._note_request(client_id, change.request)
            self._note_opened(change, epoch)
            self.note_epoch(self.home(client_id), epoch)
        self._note_sent(before, change, epoch)
        super()._change_session(change, timestamp_us, epoch)
        after = self.state.sessions.get(client_id)
        if after is not None and self.has_fired(client_id, after.epoch):
            # The record of the will is in another partition, and was applied before this one.
            after.will = None
        if after is before:
            return
        if before is not None:
            # Not the epoch of the next session. Counter-example: a snapshot is being taken, and the
            # session begins again after it has been passed. A start loads `ended`, and would ignore
            # the record of the session that is there.
            _remember(self.ended, client_id, before.epoch, ENDED_MAX)
            self._note_ended_requests(client_id, 0 if after is None else 1)
        if after is None:
            self.born.pop(client_id, None)
            self.trusted.pop(client_id, None)
            self._forget_inbound(client_id, epoch)
        else:
            self.born[client_id] = after.epoch

    def _note_ended_requests(self, client_id: str, later: int) -> None:
        """Separates the requests of an ended session from the newest `later` ones."""
        requests = self.requests(client_id)
        at = len(requests) - later
        self._old_requests[client_id] = requests[:at][-REQUESTS_MAX:]
        self._requests[client_id] = requests[at:]
        if not later:
            del self._requests[client_id]
        if len(self._old_requests) > ENDED_MAX:
            self._old_requests.popitem(last=False)

    def note_epoch(self, home: int, epoch: int) -> None:
        if epoch > self.newest_epochs[home]:
            self.newest_epochs[home] = epoch

    def home(self, client_id: str) -> int:
        """The home partition of a session, or of the group with this key."""
        return partition_of(client_id.encode(), self.state.config.partitions)

    def _note_sent(self, before: Session | None, change: SessionRecord, epoch: int) -> None:
        if before is None or epoch < before.epoch:
            return
        client_id = before.client_id
        if isinstance(change, EndRecord) or (isinstance(change, OpenRecord) and change.clean):
            self.maybe_sent.discard(client_id)
        elif isinstance(change, OpenRecord) and before.owner:
            self.maybe_sent.add(client_id)
        elif isinstance(change, CloseRecord) and not change.maybe_sent:
            self.maybe_sent.discard(client_id)
        elif isinstance(change, CloseRecord) and before.owner:
            # If the session has no owner, its node has closed it already, and knew more than the
            # coordinator that closes it in the node's place.
            self.maybe_sent.add(client_id)

    def _restore_session(self, entry: SessionEntry) -> Session:
        session = super()._restore_session(entry)
        self.born[session.client_id] = session.epoch if entry.born is UNSET else entry.born
        self.note_epoch(self.home(session.client_id), session.epoch)
        self._requests[session.client_id] = [] if entry.requests is UNSET else list(entry.requests)
        if entry.trusted is not UNSET:
            self.trusted[session.client_id] = entry.trusted
        if entry.may_be_sent:
            self.maybe_sent.add(session.client_id)
        return session

    def drop(self, session: Session) -> None:
        """Removes a session that will be loaded again from another node. It does not count as
        ended."""
        self._forget(session)
        self.born.pop(session.client_id, None)
        self.trusted.pop(session.client_id, None)
        self._requests.pop(session.client_id, None)
        self.maybe_sent.discard(session.client_id)

    def restore(self, entry: SessionEntry) -> Session:
        """Loads a session from another node. Raises ValueError or struct.error when its cursor is
        malformed."""
        session = self._restore_session(entry)
        if self.has_fired(session.client_id, session.epoch):
            session.will = None
        return session

    def arm_some_timers(self, count_max: int) -> list[Session]:
        """Arms the timers of some sessions without a connection. Returns those that have
        expired."""
        touched = sorted(islice(self.touched, count_max), key=lambda session: session.client_id)
        return [session for session in touched if not self.arm_timers(session)]

    def note_fired(self, client_id: str, epoch: int) -> None:
        """Notes a published will that another node reports. With NOBODY: the newest epoch of all
        partitions, which older versions need."""
        if client_id != NOBODY:
            self._will_done(client_id, epoch)

    def note_ended(self, client_id: str, epoch: int) -> None:
        """Notes an ended session that another node reports."""
        self.note_epoch(self.home(client_id), epoch)
        _remember(self.ended, client_id, epoch, ENDED_MAX)

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
        self.touched.discard(session)
        self._complete_session(session)
        return session in self.open or self._rearm(session)

    def entry(self, session: Session) -> SessionEntry:
        """Returns the session as a snapshot entry, without the packet ids of its own messages."""
        if session in self.touched:
            self._complete_session(session)
        entry = session_entry(self.state, session)
        entry.born = self.born.get(session.client_id, session.epoch)
        entry.requests = list(self._requests.get(session.client_id, ()))
        entry.maybe_sent = session.client_id in self.maybe_sent
        entry.trusted = self.trusted.get(session.client_id, UNSET)
        return entry

    def snapshot(self) -> Iterator[tuple[int, bytes]]:
        """Yields the entries of a snapshot file. The state may change between two of them."""
        for session in list(self.state.sessions.values()):
            if self.state.sessions.get(session.client_id) is session:
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
        for kind, entry in snapshot_entries(self.state):
            if kind not in (SNAPSHOT_SESSION, SNAPSHOT_GROUP):
                yield kind, entry
        newest = self.newest_epochs
        epochs = StoredEpochs([*self.fired.items()], [*self.ended.items()], max(newest), newest)
        yield SNAPSHOT_EPOCHS, encode(epochs)


def _is_new_of_group(known: Inflight | None, entry: Inflight | None) -> bool:
    if entry is None or entry.qos < 2 or not entry.group_tag:
        return False
    return known is None or (known.partition, known.offset) != (entry.partition, entry.offset)


def _remember(epochs: OrderedDict[str, int], client_id: str, epoch: int, count_max: int) -> None:
    if epoch > epochs.get(client_id, -1):
        epochs[client_id] = epoch
        epochs.move_to_end(client_id)
        if len(epochs) > count_max:
            epochs.popitem(last=False)

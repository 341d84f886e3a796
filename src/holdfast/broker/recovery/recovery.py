"""Derived state from the log: sessions, retained messages, QoS 2 ids, wills, producers.

A snapshot has the state at some sequence or a little later, because the state changes while it is
taken. The records from its sequence on are applied over it. Every record sets keys to values, so a
record whose effect the snapshot already contains changes nothing in the end.
"""

import json
import struct
from collections.abc import Iterator

from msgspec import UNSET

from holdfast.broker.connections.close import drop_session, end_session
from holdfast.broker.delivery.log_replay import message_of
from holdfast.broker.delivery.subscriptions import (
    add_subscription,
    remove_subscription,
)
from holdfast.broker.publish.completion import set_retained
from holdfast.broker.recovery.session_records import (
    CloseRecord,
    EndRecord,
    OpenRecord,
    SessionEntry,
    SessionRecord,
    SubscribeRecord,
    SubscriptionRow,
    UnsubscribeRecord,
    decode_entry,
    decode_record,
    encode_session,
    subscription_row,
    will_entry,
)
from holdfast.broker.recovery.state_records import (
    group_positions,
    is_durable_group,
    retained_entry,
)
from holdfast.broker.rights import forget
from holdfast.broker.session.session import (
    NEVER_EXPIRES,
    Group,
    Inflight,
    Session,
    new_subscription,
)
from holdfast.broker.session.state import ENTRIES_MAX, CursorState, decode_cursor, encode_cursor
from holdfast.broker.state import SESSION_EXPIRY, WILL_DUE, NodeState
from holdfast.protocol.topics.names import InvalidTopic, decode_topic, is_shared
from holdfast.storage import record as log_record
from holdfast.storage.record import Batch, Record

EARLY_MAX = 10_000
"""The most clients with packet ids of sessions not opened yet: more than a write group has."""

SNAPSHOT_SESSION = 1
"""The kind of an entry with one complete session, as JSON."""
SNAPSHOT_RETAINED = 2
"""The kind of an entry with a batch of the one record that set the retained topic."""
SNAPSHOT_GROUP = 3
"""The kind of an entry with key and positions of a shared group, as JSON."""
SNAPSHOT_PRODUCER = 4
"""The kind of an entry with one producer and its positions, packed: see
broker.publish.producers.encode_producer."""


class Recovery:
    """The rebuilding of a NodeState: it applies snapshot entries and records to an empty one, then
    finishes it.

    A standby applies for days before it finishes, and then has little time. So `precompute` does in
    advance, session by session, the work of `finish`. A record that touches a settled session
    undoes that.
    """

    def __init__(self, state: NodeState) -> None:
        self.state = state
        self.group_positions: dict[str, list[int]] = {}
        self.group_assigned: dict[str, set[tuple[int, int]]] = {}
        # Sessions changed since they were settled.
        self.touched: set[Session] = set()
        # Settled sessions that have expired since; `finish` logs their end.
        self.expired: set[Session] = set()
        # Sessions that had a connection when the log ended.
        self.open: set[Session] = set()
        # Per client id, the lowest epoch whose packet ids belong to its session. For a session of a
        # snapshot it is the snapshot's: earlier ids are in the snapshot, or were released.
        self._first_epochs: dict[str, int] = {}
        # Per client id, the packet ids (with partition and epoch) of a session whose opening is not
        # applied yet: it is in a later batch of the same write group.
        self._early_ids: dict[str, dict[int, tuple[int, int]]] = {}
        # The newest epoch of sessions with the name of a shared group, by that name.
        self._misnamed: dict[str, int] = {}
        self.damaged = 0
        # The most microseconds by which the clock of a session's close may be behind this node's.
        self.clock_slack_us = 0

    def apply_snapshot_entry(self, kind: int, data: bytes) -> None:
        """Apply one entry of a snapshot."""
        if kind == SNAPSHOT_RETAINED:
            record = Batch(data).record(0)
            self._set_retained(record)
        elif kind == SNAPSHOT_SESSION:
            entry = decode_entry(data)
            if not self._is_misnamed(entry.client, entry.epoch):
                self._restore_session(entry)
        elif kind == SNAPSHOT_GROUP:
            fields = json.loads(data)
            self.group_positions[fields["key"]] = list(fields["positions"])
            given = fields.get("given")
            if given:
                self.group_assigned[fields["key"]] = {(place[0], place[1]) for place in given}
        elif kind == SNAPSHOT_PRODUCER:
            self.state.producers.restore(data)

    def apply(self, record: Record) -> None:
        """Apply a record, in journal order. One that cannot be decoded is counted and skipped."""
        try:
            self._apply(record)
        except (ValueError, KeyError, TypeError, struct.error, AttributeError):
            self.damaged += 1
            self.state.note(
                "error",
                "record_not_understood",
                {
                    "partition": record.partition,
                    "offset": record.offset,
                    "kind": log_record.KIND_NAMES.get(record.kind, str(record.kind)),
                },
            )

    def _apply(self, record: Record) -> None:
        kind = record.kind
        if kind == log_record.MESSAGE:
            if record.flags & log_record.FLAG_RETAIN:
                self._set_retained(record)
            if record.flags & log_record.FLAG_WILL:
                self._will_done(record.client_id.decode(), record.sequence)
            elif record.flags & log_record.FLAG_PACKET_ID:
                self._note_inbound(record)
            elif record.flags & log_record.FLAG_PRODUCER:
                self.state.producers.store(
                    record.producer,
                    record.partition,
                    record.producer_epoch,
                    record.sequence,
                    record.timestamp_us,
                    record.client_id,
                )
        elif kind == log_record.RETAINED:
            self._set_retained(record)
        elif kind == log_record.RELEASE:
            self._release_inbound(record)
        elif kind == log_record.WILL:
            self._will_done(record.client_id.decode(), record.sequence)
        elif kind == log_record.CURSOR:
            self._move_cursor(record)
        elif kind == log_record.PRODUCER:
            self.state.producers.bind(
                record.producer, record.partition, record.client_id.decode(), record.timestamp_us
            )
        elif kind == log_record.SESSION:
            change = decode_record(record.payload)
            epoch = change.epoch if isinstance(change, OpenRecord) else -1
            if not self._is_misnamed(change.client, epoch):
                self._change_session(change, record.timestamp_us, record.sequence)

    def _is_misnamed(self, client_id: str, epoch: int) -> bool:
        """Whether a session has the name of a shared group, which older versions allowed. The
        group's positions are under that name, so the session is left out. `epoch`: -1 if the record
        has none."""
        if not is_shared(client_id):
            return False
        if epoch >= 0:
            self._misnamed[client_id] = epoch
            self.state.note("warning", "session_with_the_name_of_a_group", {"client": client_id})
        return True

    def _note_inbound(self, record: Record) -> None:
        """Record the packet id of a QoS 2 message. Records without an epoch (0, older versions)
        count."""
        client_id = record.client_id.decode()
        epoch = record.producer_epoch
        session = self.state.sessions.get(client_id)
        if epoch and (session is None or epoch > session.epoch):
            if client_id not in self._early_ids and len(self._early_ids) >= EARLY_MAX:
                del self._early_ids[next(iter(self._early_ids))]
            ids = self._early_ids.setdefault(client_id, {})
            ids[record.sequence] = (record.partition, epoch)
        elif session is not None and not 0 < epoch < self._first_epochs.get(client_id, 0):
            if session.inbound is None:
                session.inbound = {}
            session.inbound[record.sequence] = record.partition

    def _apply_early_ids(self, session: Session) -> None:
        """Give a session that was just opened the packet ids that were used since."""
        for packet_id, (partition, epoch) in self._early_ids.pop(session.client_id, {}).items():
            if epoch >= session.epoch:
                if session.inbound is None:
                    session.inbound = {}
                session.inbound[packet_id] = partition

    def _release_inbound(self, record: Record) -> None:
        client_id = record.client_id.decode()
        session = self.state.sessions.get(client_id)
        if session is None or session.inbound is None:
            return
        if 0 < record.producer_epoch < self._first_epochs.get(client_id, 0):
            return
        # The id may have been used again since, for a message of another partition.
        if session.inbound.get(record.sequence) == record.partition:
            del session.inbound[record.sequence]

    def _set_retained(self, record: Record) -> None:
        try:
            topic = decode_topic(record.topic)
        except InvalidTopic:
            return
        set_retained(self.state, topic, message_of(record))

    def _touch(self, session: Session) -> None:
        self.expired.discard(session)
        if session not in self.touched:
            self.touched.add(session)
            self.state.cancel(session.will_timer)
            self.state.cancel(session.expiry_timer)
            session.will_timer = None
            session.expiry_timer = None

    def _will_done(self, client_id: str, epoch: int) -> None:
        session = self.state.sessions.get(client_id)
        if session is not None and session.epoch <= epoch:
            self._touch(session)
            session.will = None

    def _move_cursor(self, record: Record) -> None:
        cursor = decode_cursor(record.payload)
        key = record.client_id.decode()
        if is_shared(key):
            if not self._is_of_misnamed(record):
                self._move_group(key, cursor)
            return
        session = self.state.sessions.get(key)
        if session is None:
            return
        # A record with a lower epoch is from a node that has lost the session since.
        if not record.sequence or record.sequence >= session.epoch:
            self._advance(session, cursor)

    def _is_of_misnamed(self, record: Record) -> bool:
        """Whether a CURSOR record under the name of a group is a session's. In a cluster a group's
        record may look the same. Skipping that one delivers messages again, and loses none."""
        if not self.state.journal.replicated:
            return record.sequence != 0
        return record.sequence == self._misnamed.get(record.client_id.decode(), -1)

    def _move_group(self, key: str, cursor: CursorState) -> None:
        known = self.group_positions.setdefault(key, [0] * self.state.config.partitions)
        for partition, offset in cursor.positions:
            known[partition] = offset
        given = self.group_assigned.pop(key, set()).union(cursor.done)
        ahead = {place for place in given if place[1] >= known[place[0]]}
        if ahead:
            self.group_assigned[key] = ahead

    def _advance(self, session: Session, cursor: CursorState) -> None:
        """Apply a record of the session's progress."""
        self._set_cursor(session, cursor)

    def _set_cursor(self, session: Session, cursor: CursorState) -> None:
        self._touch(session)
        if cursor.positions and session.positions is None:
            session.positions = self._unlogged_positions(session)
        for partition, offset in cursor.positions:
            assert session.positions is not None
            session.positions[partition] = offset
        for packet_id, entry in cursor.inflight:
            if entry is None:
                session.inflight.pop(packet_id, None)
            else:
                session.inflight[packet_id] = entry
        if cursor.done:
            if session.done is None:
                session.done = set()
            session.done.update(cursor.done)

    def _unlogged_positions(self, session: Session) -> list[int]:
        """The positions before the first record of the session's cursor."""
        return [0] * self.state.config.partitions

    def _change_session(self, change: SessionRecord, timestamp_us: int, epoch: int) -> None:
        client_id = change.client
        session = self.state.sessions.get(client_id)
        if session is not None and epoch and epoch < session.epoch:
            return
        if isinstance(change, OpenRecord):
            if session is not None and change.clean:
                self._forget(session)
                session = None
            if session is None:
                session = self._new_session(client_id)
                self._first_epochs[client_id] = change.epoch
            self.open.add(session)
            session.epoch = change.epoch
            self._apply_early_ids(session)
            session.expiry_s = change.expiry_s
            session.username = change.username
            session.is_owned = change.proved
            forget(session)
            session.owner = change.owner
            session.will = None if change.will is None else change.will.will()
            self._touch(session)
        elif session is not None:
            self._touch(session)
            self._change_known_session(session, change, timestamp_us)

    def _change_known_session(
        self, session: Session, change: SessionRecord, timestamp_us: int
    ) -> None:
        if isinstance(change, CloseRecord):
            self.open.discard(session)
            session.owner = ""
            session.disconnected_us = timestamp_us
            session.expiry_s = change.expiry_s
            if not change.will:
                session.will = None
        elif isinstance(change, EndRecord):
            self._forget(session)
        elif isinstance(change, SubscribeRecord):
            for row in change.subscriptions:
                self._subscribe(session, row, change.start)
        elif isinstance(change, UnsubscribeRecord):
            for filter in change.filters:
                remove_subscription(self.state, session, filter)

    def _new_session(self, client_id: str) -> Session:
        session = Session(client_id, client_id.encode())
        session.recorded = True
        session.tailing = False
        self.state.sessions[client_id] = session
        return session

    def _forget(self, session: Session) -> None:
        self._touch(session)
        self.touched.discard(session)
        self.open.discard(session)
        self._first_epochs.pop(session.client_id, None)
        drop_session(self.state, session, in_slices=False)

    def _subscribe(self, session: Session, row: SubscriptionRow, start: list[int] | None) -> None:
        subscription = new_subscription(session, *row)
        old = session.subscriptions.get(subscription.filter)
        if old is not None:
            subscription.start = old.start
        else:
            subscription.start = list(start) if start else None
        add_subscription(self.state, subscription)

    def take_over(self, entry: SessionEntry) -> Session:
        """The session of a snapshot entry, ready to be resumed here, in a cluster. An invalid
        cursor raises `ValueError` or `struct.error`."""
        session = self._restore_session(entry)
        is_cursor_logged = session.positions is not None
        self._complete_session(session)
        if not is_cursor_logged:
            # The first record must name all positions, because the replicated state has none.
            session.logged_positions = None
        if entry.may_be_sent:
            session.maybe_sent = list(self.state.delivered)
        return session

    def _restore_session(self, entry: SessionEntry) -> Session:
        session = self._new_session(entry.client)
        session.epoch = entry.epoch
        self._first_epochs[entry.client] = session.epoch
        session.expiry_s = entry.expiry_s
        session.disconnected_us = entry.disconnected_us
        session.username = entry.username
        session.is_owned = entry.proved
        session.owner = entry.owner
        if entry.will is not UNSET:
            session.will = entry.will.will()
        if entry.open:
            self.open.add(session)
        for row in entry.subscriptions:
            self._subscribe(session, row[:6], row[6])
        if entry.inbound:
            session.inbound = dict(entry.inbound)
        cursor = decode_cursor(entry.cursor)
        if entry.done is not UNSET:
            cursor.done += entry.done
        self._set_cursor(session, cursor)
        return session

    def precompute(self, sessions_max: int) -> None:
        """Do some of the work of `finish` in advance. The state's clock is set."""
        for _ in range(min(sessions_max, len(self.touched))):
            session = self.touched.pop()
            self._complete_session(session)
            if session not in self.open and not self._rearm(session):
                self.expired.add(session)

    def finish(self) -> None:
        """Finish the state after the last record. Earlier connections are closed, so their wills
        and expiries run from now."""
        state = self.state
        expired = list(self.expired)
        for session in self.touched:
            self._complete_session(session)
            if session not in self.open and not self._rearm(session):
                expired.append(session)
        for session in self.open:
            session.disconnected_us = state.wall_us
            # The log does not contain the last messages that it was sent.
            session.maybe_sent = list(state.delivered)
            if not self._rearm(session):
                expired.append(session)
        for session in expired:
            end_session(state, session)
        for group in state.groups.values():
            group.start = None
            group.tailing = False
            group.positions = self.group_positions.get(group.key)
            if group.positions is None:
                group.positions = list(state.delivered)
            group.positions = _clamped(state, group.positions)
            group.logged_positions = list(group.positions)
            for partition, offset in self.group_assigned.pop(group.key, ()):
                group.note_assigned(partition, offset)
            group.assigned_changes = []
            if not state.journal.replicated:
                _note_inflight(group, group.positions)
        self.group_positions = {}
        self.group_assigned = {}

    def _complete_session(self, session: Session) -> None:
        state = self.state
        if session.positions is None:
            session.positions = first_starts(state, session)
        session.positions = _clamped(state, session.positions)
        session.logged_positions = list(session.positions)
        self._complete_inflight(session)

    def _complete_inflight(self, session: Session) -> None:
        session.inflight = in_sending_order(session.inflight)
        for packet_id, entry in session.inflight.items():
            entry.logged = True
            session.next_packet_id = packet_id + 1 if packet_id < 65535 else 1
        session.replaying = bool(session.inflight or session.done)

    def _rearm(self, session: Session) -> bool:
        """Start the timers of will and expiry. False: the session has expired."""
        state = self.state
        gone_us = state.wall_us - session.disconnected_us - self.clock_slack_us
        gone_s = max(0, gone_us) / 1_000_000
        # A timer that was armed since the session was touched must not fire beside the new one.
        state.cancel(session.will_timer)
        state.cancel(session.expiry_timer)
        will = session.will
        if will is not None and session.expiry_s > 0:
            due_s = min(will.delay_s, session.expiry_s) - gone_s
            session.will_due_at = state.now + max(0.0, due_s)
            session.will_timer = state.arm(session.will_due_at, WILL_DUE, session)
        if session.expiry_s == NEVER_EXPIRES:
            return True
        left_s = session.expiry_s - gone_s
        if left_s <= 0:
            return False
        session.expires_at = state.now + left_s
        session.expiry_timer = state.arm(session.expires_at, SESSION_EXPIRY, session)
        return True


def _note_inflight(group: Group, positions: list[int]) -> None:
    """Add the QoS 2 records that members have inflight to the group's `assigned`. A QoS 2 packet id
    is logged at once, the group's position later."""
    for session in group.members:
        tags = [other.tag for other in session.groups or () if isinstance(other, Group)]
        if tags.count(group.tag) > 1:
            continue  # it may be the other group's record: twice is better than never
        for entry in session.inflight.values():
            is_given = entry.qos == 2 and entry.group_tag == group.tag
            if is_given and entry.offset >= positions[entry.partition]:
                group.note_assigned(entry.partition, entry.offset)


def in_sending_order(inflight: dict[int, Inflight]) -> dict[int, Inflight]:
    """The entries in the order in which they were sent.

    QoS 2 ids are logged at once and QoS 1 ids later, so the log has another order. Ids are assigned
    in sequence, starting over at 1, so the oldest follows the widest gap in the circle.
    [MQTT-4.6.0-1]
    """
    ids = sorted(inflight)
    if len(ids) < 2:
        return inflight
    oldest = 0
    widest = 0
    for index, packet_id in enumerate(ids):
        gap = (packet_id - ids[index - 1]) % 65535
        if gap > widest:
            widest = gap
            oldest = index
    return {packet_id: inflight[packet_id] for packet_id in ids[oldest:] + ids[:oldest]}


def _clamped(state: NodeState, positions: list[int]) -> list[int]:
    """The positions, cut off at the end of the log.

    With durability "memory" a crash may lose records that a snapshot covers. A position beyond the
    log's end would then skip the records written there next. A replica keeps such positions: they
    are committed, and their records have not arrived yet.
    """
    if state.journal.replicated:
        return positions
    return list(map(min, positions, state.journal.next_offset))


def first_starts(state: NodeState, session: Session) -> list[int]:
    """The positions of a session that never logged its cursor: the start of its subscriptions."""
    positions = list(state.delivered)
    starts = [each.start for each in session.subscriptions.values() if each.start is not None]
    if state.journal.replicated and starts:
        # Nodes differ in what they have delivered, so the subscriptions alone decide.
        positions = list(starts[0])
    for start in starts:
        positions = list(map(min, positions, start))
    return positions


def snapshot_entries(state: NodeState) -> Iterator[tuple[int, bytes]]:
    """The derived state, entry by entry. The state may change between two entries: see the module's
    docstring. Each entry has the positions of the moment it is made."""
    for session in list(state.sessions.values()):
        if session.recorded and state.sessions.get(session.client_id) is session:
            yield SNAPSHOT_SESSION, encode_session(session_entry(state, session))
    for group in list(state.groups.values()):
        if is_durable_group(group):
            place = {
                "key": group.key,
                "positions": group_positions(state, group),
                "given": sorted(group.assigned or ()),
            }
            yield SNAPSHOT_GROUP, json.dumps(place, separators=(",", ":")).encode()
    for entry in state.producers.snapshot(state.wall_us):
        yield SNAPSHOT_PRODUCER, entry
    scan = state.retained.scan_all()
    while not scan.done:
        for topic, message in scan.next(100):
            if message.partition >= 0 and state.retained.get(topic) is message:
                yield SNAPSHOT_RETAINED, retained_entry(message)


def session_entry(state: NodeState, session: Session) -> SessionEntry:
    """The content of a SNAPSHOT_SESSION entry."""
    positions = list(enumerate(session.resume_positions(state.delivered)))
    if session.positions is None and state.journal.replicated:
        # No record has a cursor yet, see ReplicatedState.
        positions = []
    inflight: dict[int, Inflight | None] = dict(session.inflight)
    done = sorted(session.done or ())
    # Offsets beyond the room of one payload go into a field of their own.
    is_beside = len(inflight) + len(done) > ENTRIES_MAX
    return SessionEntry(
        client=session.client_id,
        epoch=session.epoch,
        expiry_s=session.expiry_s,
        username=session.username,
        proved=session.is_owned,
        disconnected_us=session.disconnected_us,
        open=session.connection is not None or session.owner != "",
        owner=session.owner,
        subscriptions=[
            (*subscription_row(each), each.start) for each in session.subscriptions.values()
        ],
        inbound=list((session.inbound or {}).items()),
        cursor=encode_cursor(positions, inflight, [] if is_beside else done),
        done=done if is_beside else UNSET,
        will=UNSET if session.will is None else will_entry(session.will),
    )

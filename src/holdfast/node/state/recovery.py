"""Derived state from the log: sessions, retained messages, QoS 2 ids, wills, producers.

A snapshot has the state at some sequence or a little later, because the state changes while it is
taken. The records from its sequence on are applied over it. Every record sets keys to values, so a
record whose effect the snapshot already contains changes nothing in the end.
"""

import struct
from typing import Final, cast

from msgspec import UNSET

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.kinds import KIND_NAMES
from holdfast.log.record import Record
from holdfast.node.delivery.log_replay import message_of
from holdfast.node.groups.queue_keeper import (
    KEEPER_EPOCH,
    check_queue,
    keeper_subscription,
    make_keeper,
)
from holdfast.node.publish.delayed_table import is_waiting
from holdfast.node.publish.producers import ID_BYTES_MAX
from holdfast.node.rights import forget
from holdfast.node.session.rare_fields import OwedRetained
from holdfast.node.session.session import (
    NEVER_EXPIRES,
    Inflight,
    Session,
    Subscription,
    new_subscription,
)
from holdfast.node.session.state import CursorState, cursor_in
from holdfast.node.state.ban_records import apply_ban, restore_ban
from holdfast.node.state.inbound_ids import SenderPacketIds
from holdfast.node.state.recorded_state import SESSION_EXPIRY, WILL_DUE, RecordedState
from holdfast.node.state.session_records import (
    CloseRecord,
    EndRecord,
    MemberRecord,
    MembersRecord,
    OpenRecord,
    QueueRecord,
    ReserveRecord,
    RetainedRecord,
    SessionEntry,
    SessionRecord,
    SubscribeRecord,
    SubscriptionRow,
    UnsubscribeRecord,
    cursor_of,
    decode_entry,
    decode_group,
    decode_record,
    restore_replays,
)
from holdfast.node.state.snapshot_entries import (
    SNAPSHOT_BAN,
    SNAPSHOT_DELAYED,
    SNAPSHOT_GROUP,
    SNAPSHOT_MEMBER,
    SNAPSHOT_PRODUCER,
    SNAPSHOT_RETAINED,
    SNAPSHOT_SESSION,
)
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.topics.names import (
    InvalidTopic,
    decode_topic,
    is_delayed_filter,
    is_queue,
    is_shared,
)

ASSIGNED_MAX: Final = 10_000
"""The most entries of one group in `group_assigned`. Beyond them a crash may deliver a message
twice."""


class Recovery(SenderPacketIds):
    """The rebuilding of a `RecordedState` from snapshot entries and records.

    `node.state.replicated` is the recovery of the replicated state, which never ends.
    """

    def __init__(self, state: RecordedState) -> None:
        super().__init__(state)
        self.group_positions: dict[str, list[int]] = {}
        self.group_assigned: dict[str, set[tuple[int, int]]] = {}
        # Sessions changed since their timers were armed. In order, unlike a set of sessions, whose
        # order differs from one process to the next.
        self.touched: dict[Session, None] = {}
        # Sessions that had a connection when the log ended.
        self.open: dict[Session, None] = {}
        # The newest epoch of sessions with the name of a shared group, by that name.
        self._misnamed: dict[str, int] = {}
        self.damaged = 0
        # The most microseconds by which a session's close may be behind this node's clock.
        self.clock_slack_us = 0
        # Per partition, the offset that a session was given last: an object, as `_shared` says.
        self._offsets: list[object] = [0] * state.config.partitions

    def apply_snapshot_entry(self, kind: int, data: bytes) -> None:
        """Applies one entry of a snapshot."""
        if kind == SNAPSHOT_RETAINED:
            self._set_retained(Batch(data).record(0))
        elif kind == SNAPSHOT_SESSION:
            entry = decode_entry(data)
            if not self._is_misnamed(entry.client, entry.epoch):
                self._restore_session(entry)
        elif kind == SNAPSHOT_GROUP:
            group = decode_group(data, self.state.config.partitions)
            self.group_positions[group.key] = group.positions
            if group.given:
                self.group_assigned[group.key] = set(group.given)
        elif kind == SNAPSHOT_DELAYED:
            self._apply_delayed(Batch(data).record(0))
        elif kind == SNAPSHOT_PRODUCER:
            self.state.producers.restore(data)
        elif kind == SNAPSHOT_BAN:
            restore_ban(self.state, data)
        elif kind == SNAPSHOT_MEMBER:
            self.state.member.restore(data)

    def apply(self, record: Record) -> None:
        """Applies a record, in journal order. One that cannot be decoded is counted and skipped."""
        try:
            self._apply(record)
        except (ValueError, LookupError, TypeError, struct.error, ProtocolViolation):
            self.damaged += 1
            fields: dict[str, object] = {
                "partition": record.partition,
                "offset": record.offset,
                "kind": KIND_NAMES.get(record.kind, str(record.kind)),
            }
            self.state.note("error", "record_not_understood", fields)

    def _apply(self, record: Record) -> None:
        kind = record.kind
        if len(record.producer) > ID_BYTES_MAX:
            raise ValueError("no snapshot has room for the producer id")
        if kind == log_record.MESSAGE:
            if record.flags & log_record.FLAG_DELAYED:
                self._apply_delayed(record)
            if record.flags & log_record.FLAG_RETAIN and not is_waiting(record):
                self._set_retained(record)
            if record.flags & log_record.FLAG_WILL:
                self._note_will(record)
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
        elif kind == log_record.DELAYED:
            self._apply_delayed(record)
        elif kind == log_record.RETAINED:
            self._set_retained(record)
        elif kind == log_record.RELEASE:
            self._release_inbound(record)
        elif kind == log_record.WILL:
            self._note_will(record)
        elif kind == log_record.CURSOR:
            self._move_cursor(record)
        elif kind == log_record.PRODUCER:
            self.state.producers.bind(
                record.producer, record.partition, record.client_id.decode(), record.timestamp_us
            )
        elif kind == log_record.FORGOTTEN:
            self.state.producers.forget(record)
        elif kind == log_record.BAN:
            apply_ban(self.state, record)
        elif kind == log_record.FEDERATION:
            self.state.member.apply(record)
        elif kind == log_record.SESSION:
            content = record.content
            change = (
                content if isinstance(content, SessionRecord) else decode_record(record.payload)
            )
            epoch = change.epoch if isinstance(change, OpenRecord) else -1
            if isinstance(change, ReserveRecord):
                self.note_epoch(record.partition, record.sequence)
            elif isinstance(change, (MemberRecord, MembersRecord)):
                self._note_member(record, change)
            elif not self._is_misnamed(change.client, epoch):
                self._change_session(change, record.timestamp_us, record.sequence)

    def note_epoch(self, home: int, epoch: int) -> None:
        """Notes an epoch of a session with this home partition, or a reserved one. One node alone
        needs none of them."""

    def _note_member(self, record: Record, change: MemberRecord | MembersRecord) -> None:
        """Notes a member of a shared group. One node alone knows it from the member's session."""

    def _is_misnamed(self, client_id: str, epoch: int) -> bool:
        """Whether a session has the name of a shared group, which older versions allowed. The
        group's positions are under that name, so the session is left out. `epoch`: -1 if the record
        has none."""
        if not is_shared(client_id) or is_queue(client_id):
            return False
        if epoch >= 0:
            self._misnamed[client_id] = epoch
            self.state.note("warning", "session_with_the_name_of_a_group", {"client": client_id})
        return True

    def _apply_delayed(self, record: Record) -> None:
        self.state.delayed.apply(record)
        self.state.arm_delayed()

    def _set_retained(self, record: Record) -> None:
        try:
            topic = decode_topic(record.topic)
        except InvalidTopic:
            return
        if record.kind == log_record.RETAINED and record.sequence:
            # `completion.removal`, unless it was of an older message.
            known = self.state.retained.get(topic)
            if known is not None and known.offset == record.sequence - 1:
                self.state.retained.remove(topic)
            return
        self.state.set_retained(topic, message_of(record))

    def _touch(self, session: Session) -> None:
        """Notes that the session has changed. Its timers are armed again after the last record."""
        if session not in self.touched:
            self.touched[session] = None
            self.state.cancel(session.rare.will_timer)
            self.state.cancel(session.rare.expiry_timer)
            rare = session.own_rare()
            rare.will_timer = rare.expiry_timer = None

    def _note_will(self, record: Record) -> None:
        """Notes that a will was published or dropped."""
        self._will_done(record.client_id.decode(), record.sequence)

    def _will_done(self, client_id: str, epoch: int) -> None:
        session = self.state.sessions.get(client_id)
        if session is not None and session.epoch <= epoch:
            self._touch(session)
            session.will = None

    def _move_cursor(self, record: Record) -> None:
        key = record.client_id.decode()
        if is_shared(key):
            if not self._is_of_misnamed(record):
                self._move_group(key, record)
            return
        cursor = cursor_in(record, self.state.config.partitions)
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

    def _move_group(self, key: str, record: Record) -> None:
        cursor = cursor_in(record, self.state.config.partitions)
        known = self.group_positions.setdefault(key, [0] * self.state.config.partitions)
        for partition, offset in cursor.positions:
            known[partition] = offset
        if cursor.done:
            given = self.group_assigned.setdefault(key, set())
            given.update(cursor.done)
            if len(given) > ASSIGNED_MAX:
                self.group_assigned[key] = {each for each in given if each[1] >= known[each[0]]}

    def _advance(self, session: Session, cursor: CursorState) -> None:
        """Applies a record of the session's progress."""
        self._set_cursor(session, cursor)

    def _set_cursor(self, session: Session, cursor: CursorState) -> None:
        self._touch(session)
        if cursor.positions and session.positions is None:
            session.positions = self._unlogged_positions(session)
        for partition, offset in cursor.positions:
            positions = cast("list[object]", session.positions)
            positions[partition] = self._shared(partition, offset)
        for packet_id, entry in cursor.inflight:
            self._set_inflight(session, packet_id, entry)
        if cursor.done:
            session.add_done(cursor.done)

    def _shared(self, partition: int, offset: object) -> object:
        """The offset, as the object that the session before has if it has the same. Sessions that
        close one after the other are at the same offsets, and one of 64 partitions would have
        2 kB of its own. A compiled function makes a new object of each `int` that it stores."""
        if self._offsets[partition] != offset:
            self._offsets[partition] = offset
        return self._offsets[partition]

    def _set_inflight(self, session: Session, packet_id: int, entry: Inflight | None) -> None:
        if entry is None:
            session.inflight.pop(packet_id, None)
        else:
            session.add_inflight(packet_id, entry)
            rare = session.rare
            if entry.is_retained and rare.owed:
                rare.owed_inflight = rare.owed_inflight or set()
                rare.owed_inflight.add((entry.partition, entry.offset))

    def _unlogged_positions(self, session: Session) -> list[int]:
        """The positions before the first record of the session's cursor."""
        return [0] * self.state.config.partitions

    def _change_session(self, change: SessionRecord, timestamp_us: int, epoch: int) -> None:
        client_id = change.client
        session = self.state.sessions.get(client_id)
        if session is not None and epoch and epoch < session.epoch:
            return
        if isinstance(change, OpenRecord):
            # [MQTT-3.1.2-4]
            if session is not None and change.clean:
                self._forget(session)
                session = None
            if session is None:
                session = self._new_session(client_id, change.epoch)
            self._set_open(session, change.owner)
            session.renew(change.epoch)
            self._apply_early_ids(session)
            session.expiry_s = change.expiry_s
            session.username = change.username
            session.is_owned = change.proved
            forget(session)
            session.will = None if change.will is None else change.will.will()
            self._touch(session)
        elif isinstance(change, QueueRecord):
            if session is None:
                check_queue(client_id, change.start, self.state.config.partitions)
                session = self._new_session(client_id, KEEPER_EPOCH, is_past=change.past)
                session.username = change.owner or None
                self._touch(session)
                self._add_subscription(keeper_subscription(session, change.start))
        elif session is not None:
            self._touch(session)
            self._change_known_session(session, change, timestamp_us)

    def _change_known_session(
        self, session: Session, change: SessionRecord, timestamp_us: int
    ) -> None:
        if isinstance(change, CloseRecord):
            self._set_closed(session)
            session.owner = ""
            session.own_rare().disconnected_us = timestamp_us
            session.expiry_s = change.expiry_s
            if not change.will:
                session.will = None
        elif isinstance(change, EndRecord):
            self._forget(session)
        elif isinstance(change, SubscribeRecord):
            owed = set(change.owed or ())
            for row in change.subscriptions:
                # [MQTT-3.3.1-10]
                if row[0] in owed and row[4] == 1 and row[0] in session.subscriptions:
                    owed.discard(row[0])
                self._subscribe(session, row, change.start)
                if row[0] in owed:
                    self._owe(session, row[0], "", None)
            restore_replays(session, change.replays, self.state.config.partitions, change.positions)
        elif isinstance(change, RetainedRecord):
            session.own_rare().owed_inflight = None
            for filter, after in change.sent.items():
                if after is None:
                    session.forget_owed(filter)
                else:
                    self._owe(session, filter, after, change.seam or None)
        elif isinstance(change, UnsubscribeRecord):
            for filter in change.filters:
                self._remove_subscription(session, filter)

    def _set_open(self, session: Session, owner: str) -> None:
        self.open[session] = None
        session.owner = owner

    def _set_closed(self, session: Session) -> None:
        self.open.pop(session, None)

    def _new_session(self, client_id: str, epoch: int, is_past: bool = False) -> Session:
        session = Session(client_id)
        if is_queue(client_id):
            session = keeper = make_keeper(client_id, None, is_past)
            self.state.queues[client_id] = keeper
        session.epoch = epoch
        self._begin_life(session, epoch)
        session.recorded = True
        session.tailing = False
        self.state.sessions[client_id] = session
        return session

    def _forget(self, session: Session) -> None:
        self._touch(session)
        self.touched.pop(session, None)
        self._set_closed(session)
        self._first_epochs.pop(session.client_id, None)
        if is_queue(session.client_id) and not self.state.journal.replicated:
            self.group_positions.pop(session.client_id, None)
            self.group_assigned.pop(session.client_id, None)
        self._drop_session(session)

    def _drop_session(self, session: Session) -> None:
        self.state.pop_session(session)
        for filter in list(session.subscriptions):
            self.state.pop_subscription(session, filter)

    def _add_subscription(self, subscription: Subscription) -> None:
        self.state.set_subscription(subscription)

    def _remove_subscription(self, session: Session, filter: str) -> None:
        self.state.pop_subscription(session, filter)

    def _subscribe(self, session: Session, row: SubscriptionRow, start: list[int] | None) -> None:
        if start and len(start) != self.state.config.partitions:
            raise ValueError(f"a subscription that starts at {len(start)} offsets")
        if is_delayed_filter(row[0]):
            # Older versions allowed it. From the log it would get messages before they are due.
            fields: dict[str, object] = {"client": session.client_id, "filter": row[0]}
            self.state.note("warning", "delayed_subscription_dropped", fields)
            return
        subscription = new_subscription(session, *row)
        old = session.subscriptions.get(subscription.filter)
        if old is not None:
            subscription.start = old.start
        else:
            shared = map(self._shared, range(len(start)), start) if start else ()
            subscription.start = cast("list[int]", list(shared)) or None
        self._add_subscription(subscription)

    def _owe(self, session: Session, filter: str, after: str, seam: list[int] | None) -> None:
        """Sets how far a retained set was sent. `seam` None: as before."""
        if seam is not None and len(seam) != self.state.config.partitions:
            raise ValueError(f"a retained set with a seam of {len(seam)} offsets")
        if filter not in session.subscriptions:
            return
        before = (session.rare.owed or {}).get(filter)
        if seam is None and after and before is not None:
            seam = before.seam
        owed = OwedRetained(after, seam)
        owed.is_logged = True
        owed.is_seam_logged = seam is not None
        session.owe(filter, owed)

    def _restore_session(self, entry: SessionEntry) -> Session:
        cursor = cursor_of(entry, self.state.config.partitions)
        session = self._new_session(entry.client, entry.epoch, is_past=entry.past is True)
        session.expiry_s = entry.expiry_s
        session.own_rare().disconnected_us = entry.disconnected_us
        session.username = entry.username
        session.is_owned = entry.proved
        if entry.will is not UNSET:
            session.will = entry.will.will()
        if entry.open:
            self._set_open(session, entry.owner)
        for row in entry.subscriptions:
            self._subscribe(session, row[:6], row[6])
        restore_replays(session, entry.replays, self.state.config.partitions)
        for filter, (after, seam) in (entry.owed or {}).items():
            self._owe(session, filter, after, seam)
        if entry.inbound:
            session.inbound = dict(entry.inbound)
            if entry.doubtful is not UNSET:
                session.own_rare().doubtful = set(entry.doubtful)
        self._set_cursor(session, cursor)
        session.own_rare().owed_inflight = set(entry.passed or ()) or None
        return session

    def _rearm(self, session: Session) -> bool:
        """Starts the timers of will and expiry of a session without a connection. False: it has
        expired.

        The interval of a session or will began when its connection was lost, by the clock of the
        log. What is left of it goes on from now.
        """
        state = self.state
        gone_us = state.wall_us - session.rare.disconnected_us - self.clock_slack_us
        gone_s = max(0, gone_us) / 1_000_000
        # A timer that was armed since the session was touched must not fire beside the new one.
        state.cancel(session.rare.will_timer)
        state.cancel(session.rare.expiry_timer)
        will = session.will
        if will is not None and session.expiry_s > 0:
            due_s = min(will.delay_s, session.expiry_s) - gone_s
            will_timer = state.arm(state.now + max(0.0, due_s), WILL_DUE, session)
            session.own_rare().will_timer = will_timer
        if session.expiry_s == NEVER_EXPIRES:
            return True
        left_s = session.expiry_s - gone_s
        if left_s <= 0:
            return False
        session.own_rare().expiry_timer = state.arm(state.now + left_s, SESSION_EXPIRY, session)
        return True

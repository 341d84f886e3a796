"""Records of derived state: the part of sessions and groups that recovery rebuilds from the log.

Every record sets keys to values. It says where a cursor is and not how far it has moved, so a
record that a snapshot already contains changes nothing when it is applied again.
"""

from msgspec import UNSET

from holdfast.log import record as log_record
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.session.message import Message
from holdfast.node.session.session import Inflight, Session
from holdfast.node.session.state import ENTRIES_MAX, cursor_state, encode_cursor
from holdfast.node.state.session_records import (
    QueueRecord,
    RetainedRecord,
    SessionRecord,
    SubscribeRecord,
    encode_session,
)


def changed_positions(logged: list[int] | None, now: list[int]) -> list[tuple[int, int]]:
    """The (partition, position) pairs that differ from the logged ones."""
    changed: list[tuple[int, int]] = []
    for partition in range(len(now)):
        if logged is None or logged[partition] != now[partition]:
            changed.append((partition, now[partition]))
    return changed


def log_progress(state: NodeState, steps: int = 1 << 60) -> None:
    """Appends the cursors that moved since the last call, about `steps` of them. The rest follows
    in the next pass of the timers."""
    state.progress_armed = False
    sessions = state.sessions_in_progress
    while sessions and steps > 0:
        session = sessions.popleft()
        steps -= 1
        if session.progress_due:
            log_session(state, session)
    if sessions:
        state.arm_progress(0.0)


def log_session(state: NodeState, session: Session) -> None:
    """Appends the cursor of a durable session, and the packet ids that changed with it."""
    session.progress_due = False
    if session.expiry_s == 0 or state.sessions.get(session.client_id) is not session:
        return
    if not _log_owed(state, session):
        return
    positions = session.resume_positions(state.delivered)
    log_cursor(state, session, changed_positions(session.logged_positions, positions))
    session.logged_positions = positions
    if session.done is not None:
        _forget_passed(session, positions)


def _log_owed(state: NodeState, session: Session) -> bool:
    """Appends how far retained sets were sent. False: the log may not have more of the cursor yet
    than its ids in use, which are appended.

    The order in the log is: ids in use, how far the sets were sent, freed ids and positions. A
    crash after freed ids alone would send a message of QoS 2 again, under another id. A crash after
    a set alone would lose the messages whose ids were not in the log. After a crash between the
    first two, the resumed set passes the messages that have an id, before it is logged again.

    A set is not logged while a SUBSCRIBE or UNSUBSCRIBE waits for the log. Behind that record it
    would count for the new subscription.
    """
    if session.rare.owed_changes is None and not session.rare.owed_inflight:
        return True
    log_changes(state, session, None)
    if session.rare.owed_inflight or session.subscribes_awaited:
        return False
    seams: dict[int, RetainedRecord] = {}
    for filter, owed in session.pop_owed_changes().items():
        if owed.is_complete and not owed.is_logged:
            continue
        # The sets of one SUBSCRIBE share their seam, so a record has it once.
        names_seam = not (owed.is_complete or owed.is_seam_logged)
        record = seams.setdefault(
            id(owed.seam) if names_seam else 0, RetainedRecord(session.client_id, {})
        )
        if names_seam and owed.seam is not None:
            record.seam = owed.seam
        record.sent[filter] = None if owed.is_complete else owed.after
        owed.is_logged = not owed.is_complete
        owed.is_seam_logged = owed.is_logged
    for record in seams.values():
        append_change(state, session.key, record, session.epoch)
    return True


def _forget_passed(session: Session, positions: list[int]) -> None:
    """Drops the finished offsets that the logged positions have passed."""
    if session.done is not None:
        session.done = {place for place in session.done if place[1] >= positions[place[0]]}
    if session.positions is None and not session.outbox and session.lane is None:
        session.replaying = False
        session.done = None


def note_progress(state: NodeState, session: Session) -> None:
    """Logs the cursor of a durable session, which has moved, within `progress_interval_s`."""
    if not session.progress_due:
        session.progress_due = True
        state.sessions_in_progress.append(session)
        state.arm_progress(state.config.progress_interval_s)


def log_changes(state: NodeState, session: Session, promise: Promise | None) -> None:
    """Logs the packet ids that came into use or changed their state, with a promise if there is
    one.

    It logs all of them: a later QoS 2 id that is in the log before an earlier QoS 1 id would be
    sent again first. It does not log freed ids. Those go with the positions that have passed their
    offsets, or after a crash in between the offsets would be read again. `FREED` ids are logged.
    """
    changes = session.changes
    freed = {} if changes is None else changes.freed
    if changes is not None and freed:
        changes.freed = {}
    log_cursor(state, session, [], promise)
    if changes is not None and freed:
        changes.used = {}
        changes.freed = freed
        session.changes = changes


def log_cursor(
    state: NodeState,
    session: Session,
    positions: list[tuple[int, int]],
    promise: Promise | None = None,
) -> None:
    """Appends the session's changes and these positions, in one CURSOR record or several. They are
    in one partition, so a promise waits for the last one."""
    changes: dict[int, Inflight | None] = {}
    if session.changes is not None:
        changes.update(session.changes.freed)
        changes.update(session.changes.used)
    done = session.done_changes
    session.changes = None
    session.done_changes = None
    if not positions and not changes and not done:
        if promise is not None:
            state.promise(promise)
        return
    for entry in changes.values():
        if entry is not None:
            entry.logged = True
    if done is None:
        done = []
    if len(changes) + len(done) > ENTRIES_MAX:
        # The positions come last. A crash before them sends a message twice. If they came first, a
        # crash behind them, before the ids of what they have passed, would lose it.
        append_cursor(state, session.key, [], changes, [], session.epoch)
        changes = {}
        while len(done) > ENTRIES_MAX:
            append_cursor(state, session.key, [], changes, done[:ENTRIES_MAX], session.epoch)
            done = done[ENTRIES_MAX:]
    append_cursor(state, session.key, positions, changes, done, session.epoch, promise)


def append_cursor(
    state: NodeState,
    key: bytes,
    positions: list[tuple[int, int]],
    changes: dict[int, Inflight | None],
    done: list[tuple[int, int]],
    epoch: int = 0,
    promise: Promise | None = None,
) -> None:
    """Appends a CURSOR record, as `append_state`. The lists are not changed any more."""
    payload = encode_cursor(positions, changes, done)
    content = cursor_state(positions, changes, done)
    append_state(state, log_record.CURSOR, key, payload, epoch, promise, content)


def append_change(
    state: NodeState,
    key: bytes,
    change: SessionRecord,
    epoch: int = 0,
    promise: Promise | None = None,
) -> None:
    """Appends a SESSION record, as `append_state`. The change is not changed any more, but its
    lists of positions may be those of the node, which go on."""
    payload = encode_session(change)
    content: object | None = change
    if isinstance(change, SubscribeRecord):
        if change.replays is UNSET:
            change.start = list(change.start)
        else:
            content = None
    elif isinstance(change, (QueueRecord, RetainedRecord)):
        content = None
    append_state(state, log_record.SESSION, key, payload, epoch, promise, content)


def append_state(
    state: NodeState,
    kind: int,
    key: bytes,
    payload: bytes,
    epoch: int = 0,
    promise: Promise | None = None,
    content: object | None = None,
) -> None:
    """Appends a record of derived state, with a promise if there is one, in the home partition of
    `key` (client id or group key). All records of a session or group are in one partition, so they
    are applied in the order in which they were appended. `epoch` is the session's: readers ignore a
    record with a lower one than the newest. `content`: see `Record`."""
    record = Record(
        partition_of(key, state.config.partitions),
        kind,
        timestamp_us=state.wall_us,
        client_id=key,
        sequence=epoch,
        payload=payload,
    )
    record.content = content
    if promise is None:
        state.append(record)
    else:
        state.publish(record, promise)


def retained_entry(message: Message) -> bytes:
    """The content of a SNAPSHOT_RETAINED entry."""
    builder = BatchBuilder(message.partition, message.offset)
    audience = message.audience_field()
    flags = message.qos | log_record.FLAG_RETAIN
    builder.add(
        Record(
            builder.partition,
            log_record.MESSAGE,
            flags=flags | log_record.FLAG_AUDIENCE if audience else flags,
            timestamp_us=message.timestamp_us,
            topic=message.topic,
            client_id=message.publisher,
            properties=message.properties,
            payload=message.payload,
            audience=audience,
        )
    )
    return builder.build(0)

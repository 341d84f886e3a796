"""Makes a snapshot's entries: sessions, groups, retained messages, producers and bans.

The state may change between two entries. Each entry has the positions of the moment it is made:
`recovery` explains why that is enough.
"""

from collections.abc import Iterator

from msgspec import UNSET

from holdfast.log.batch_builder import BatchBuilder
from holdfast.node.publish.delayed_table import Delayed
from holdfast.node.session.session import Inflight, Session
from holdfast.node.session.state import ENTRIES_MAX, encode_cursor
from holdfast.node.state.ban_records import ban_entry, present_bans
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.session_records import (
    SessionEntry,
    replay_entries,
    subscription_row,
    will_entry,
)
from holdfast.node.state.state_records import retained_entry

SNAPSHOT_SESSION = 1
"""The kind of an entry with one complete session, as JSON."""
SNAPSHOT_RETAINED = 2
"""The kind of an entry with a batch of the one record that set the retained topic."""
SNAPSHOT_GROUP = 3
"""The kind of an entry with key and positions of a shared group, as JSON."""
SNAPSHOT_PRODUCER = 4
"""The kind of an entry with one producer and its positions, packed: see
broker.publish.producers.encode_producer."""
SNAPSHOT_BAN = 8
"""The kind of an entry with one ban, as JSON."""

SNAPSHOT_DELAYED = 9
"""The kind of an entry with a batch of the first record of a delayed message."""

SNAPSHOT_MEMBER = 10
"""The kind of an entry with one value of the federation's member, packed: see
node.state.member_values."""


def first_starts(state: RecordedState, session: Session) -> list[int]:
    """The positions of a session that never logged its cursor: the start of its subscriptions."""
    positions = list(state.delivered)
    starts = [each.start for each in session.subscriptions.values() if each.start is not None]
    if state.journal.replicated and starts:
        # Nodes differ in what they have delivered, so the subscriptions alone decide.
        positions = list(starts[0])
    for start in starts:
        positions = list(map(min, positions, start))
    return positions


def message_entries(state: RecordedState) -> Iterator[tuple[int, bytes]]:
    """The entries of the state without its sessions and groups."""
    for message in list(state.delayed.by_place.values()):
        if message.place in state.delayed.by_place:
            yield SNAPSHOT_DELAYED, delayed_entry(message)
    for entry in state.producers.snapshot():
        yield SNAPSHOT_PRODUCER, entry
    for ban in present_bans(state):
        if ban is not None:
            yield SNAPSHOT_BAN, ban_entry(ban)
    for value in state.member.entries():
        if value is not None:
            yield SNAPSHOT_MEMBER, value
    scan = state.retained.scan_all()
    while not scan.done:
        for topic, retained in scan.next(100):
            if retained.partition >= 0 and state.retained.get(topic) is retained:
                yield SNAPSHOT_RETAINED, retained_entry(retained)


def delayed_entry(message: Delayed) -> bytes:
    """The content of a SNAPSHOT_DELAYED entry."""
    builder = BatchBuilder(*message.place)
    builder.add(message.record)
    return builder.build(0)


def session_entry(state: RecordedState, session: Session) -> SessionEntry:
    """The content of a SNAPSHOT_SESSION entry."""
    positions = list(enumerate(session.resume_positions(state.delivered)))
    if session.positions is None and state.journal.replicated:
        # No record has a cursor yet, see ReplicatedState.
        positions = []
    keeper = state.queues.get(session.client_id)
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
        disconnected_us=session.rare.disconnected_us,
        open=session.connection is not None or session.owner != "",
        owner=session.owner,
        subscriptions=[
            (*subscription_row(each), each.start) for each in session.subscriptions.values()
        ],
        inbound=list((session.inbound or {}).items()),
        cursor=encode_cursor(positions, inflight, [] if is_beside else done),
        done=done if is_beside else UNSET,
        will=UNSET if session.will is None else will_entry(session.will),
        replays=replay_entries(session),
        doubtful=sorted((session.inbound or {}).keys() & session.rare.doubtful)
        if session.rare.doubtful
        else UNSET,
        owed={filter: (each.after, each.seam) for filter, each in (session.rare.owed or {}).items()}
        or UNSET,
        passed=sorted(session.rare.owed_inflight or ()) or UNSET,
        past=UNSET if keeper is None or not keeper.is_past else True,
    )

"""Subscriptions that begin in the past.

A replay uses the session's one cursor. SUBSCRIBE puts the session behind: its position goes back to
the start, and its other subscriptions apply from where the session was. Then it reads the log like
any session that was away, until it has caught up (`log_replay`).

Invariants
- A record is sent for a subscription exactly if its offset is at or above the subscription's start.
  So nothing is missing or sent twice at the seam to the live messages, because there is no seam:
  the same reader goes on.
- The messages of a topic come in one order, also if subscriptions overlap. Live messages of topics
  that no replayed filter matches may overtake the replay (`session.cursor.LiveLane`).
- A start of a queue is that of its group, and of no session. It counts if the SUBSCRIBE begins the
  queue.
- The session reads nothing between the append of its SUBSCRIBE record and the release of its
  promise (`Session.replays_awaited`). Otherwise a crash in between would leave a CURSOR record
  behind the SUBSCRIBE record whose position is above the start.
"""

from typing import Final

from holdfast.log.reading.starts import (
    FLOORS_BYTES_MAX,
    FoundStart,
    StartQuery,
    bytes_from,
    floors_bytes,
)
from holdfast.node.delivery.live_lane import open_lane_behind
from holdfast.node.delivery.replay_start import (
    SPECIAL_PREFIXES,
    InvalidStart,
    ReplayStart,
    parse_start,
    property_start,
    split_start,
)
from holdfast.node.effects import FindStarts
from holdfast.node.node_state import NodeState
from holdfast.node.rights import may_replay
from holdfast.node.session.connection import Connection
from holdfast.node.session.session import Replay, Session, Subscription
from holdfast.node.state.session_records import (
    ReplayEntry,
    SubscribeRecord,
    go_back,
    replay_entry,
)
from holdfast.node.state.state_records import log_session
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Subscribe
from holdfast.protocol.topics.names import (
    InvalidFilter,
    check_filter,
    is_queue,
    is_shared,
    split_shared,
)

SUBSCRIPTIONS_MAX: Final = 1000
"""The most subscriptions of a session that begins a replay: it changes the start of each."""
SEARCHES_MAX: Final = 20
"""The most starts of one SUBSCRIBE that are searched for: other sessions' reads wait meanwhile."""


class GrantedStart:
    """A start that was granted: the offset per partition, and the rest of it."""

    def __init__(self, start: list[int], replay: Replay) -> None:
        self.start = start
        self.replay = replay


class StartPlan:
    """The starts of one SUBSCRIBE: per subscription a start that is known, a question for the log,
    or the reason and text of a refusal."""

    def __init__(self, packet: Subscribe) -> None:
        self.packet = packet
        count = len(packet.subscriptions)
        self.granted: list[GrantedStart | None] = [None] * count
        self.refused: list[int] = [0] * count
        self.error = ""
        self.wanted: list[StartQuery] = []
        # The subscription of each question.
        self.asking: list[int] = []
        # Its queues are in the replicated state.
        self.has_queues = False

    def refuse(self, index: int, reason: int, error: str) -> None:
        """Refuses the subscription. The first error is the one that the client is told."""
        self.refused[index] = reason
        self.error = self.error or error


def asks_for_past(packet: Subscribe) -> bool:
    """Whether a SUBSCRIBE has the form of one with a start, or of a queue."""
    if packet.properties and property_start(packet.properties):
        return True
    return any(each.filter.startswith(SPECIAL_PREFIXES) for each in packet.subscriptions)


def plan_starts(state: NodeState, session: Session, packet: Subscribe) -> StartPlan:
    """Reads the starts of a SUBSCRIBE, and gives its requests their plain filters."""
    plan = StartPlan(packet)
    common = property_start(packet.properties)
    for index, request in enumerate(packet.subscriptions):
        try:
            request.filter, text = split_start(request.filter)
            start = parse_start(text or common or "latest", state.wall_us)
        except InvalidStart as error:
            plan.refuse(index, reasons.IMPLEMENTATION_SPECIFIC_ERROR, str(error))
            continue
        if not start.is_latest:
            _plan_start(state, session, plan, index, start)
    return plan


def _plan_start(
    state: NodeState, session: Session, plan: StartPlan, index: int, start: ReplayStart
) -> None:
    filter = plan.packet.subscriptions[index].filter
    if is_shared(filter) and not is_queue(filter):
        error = "a shared subscription has no start: its group goes on where it was"
        plan.refuse(index, reasons.IMPLEMENTATION_SPECIFIC_ERROR, error)
        return
    try:
        check_filter(filter)
    except InvalidFilter as invalid:
        plan.refuse(index, reasons.TOPIC_FILTER_INVALID, str(invalid))
        return
    if is_queue(filter):
        if filter in state.recorded.queues:
            return
        if start.last:
            error = (
                "a queue begins at a time or at offsets, not with the last records of each topic"
            )
            plan.refuse(index, reasons.IMPLEMENTATION_SPECIFIC_ERROR, error)
            return
        filter = split_shared(filter)[1]
    if session.is_internal or not state.config.replay_available:
        error = "replay is switched off: messages of the past are not available"
        plan.refuse(index, reasons.NOT_AUTHORIZED, error)
    elif not may_replay(session, filter):
        error = "no rule gives the right 'history' to this filter"
        plan.refuse(index, reasons.NOT_AUTHORIZED, error)
    elif len(session.subscriptions) > SUBSCRIPTIONS_MAX:
        error = f"a session with more than {SUBSCRIPTIONS_MAX} subscriptions has no replay"
        plan.refuse(index, reasons.QUOTA_EXCEEDED, error)
    elif len(plan.wanted) >= SEARCHES_MAX and (start.last or start.since_us is not None):
        error = f"a SUBSCRIBE has at most {SEARCHES_MAX} starts that are times or 'last:N'"
        plan.refuse(index, reasons.QUOTA_EXCEEDED, error)
    else:
        _ask(state, plan, index, start)


def _ask(state: NodeState, plan: StartPlan, index: int, start: ReplayStart) -> None:
    """Grants a start that needs no search, or plans the search."""
    offsets: list[int] = []
    if start.is_earliest:
        offsets = list(state.journal.start_offsets)
    elif start.offsets:
        offsets = list(state.delivered)
    for partition, offset in start.offsets:
        if partition >= len(offsets):
            error = f"there is no partition {partition}, the log has {len(offsets)}"
            plan.refuse(index, reasons.IMPLEMENTATION_SPECIFIC_ERROR, error)
            return
        if offset > offsets[partition]:
            error = (
                f"offset {offset} of partition {partition} is beyond the log's end"
                f" {offsets[partition]}"
            )
            plan.refuse(index, reasons.IMPLEMENTATION_SPECIFIC_ERROR, error)
            return
        offsets[partition] = offset
    if offsets and state.has_whole_log():
        size_bytes = bytes_from(state.journal.segments, offsets)
        _grant(state, plan, index, offsets, {}, size_bytes)
        return
    # Where the log begins, and how much it is from there on, is known where it is stored.
    offsets = [] if start.is_earliest else offsets
    filter = plan.packet.subscriptions[index].filter
    plan.wanted.append(StartQuery(filter, start.since_us or 0, start.last, offsets))
    plan.asking.append(index)


def _grant(
    state: NodeState,
    plan: StartPlan,
    index: int,
    start: list[int],
    floors: dict[bytes, int],
    size_bytes: int,
) -> None:
    """Grants a start, unless the session would keep too much of the log from retention, which are
    `size_bytes`."""
    bytes_max = state.config.replay_pin_bytes
    if bytes_max and size_bytes > bytes_max:
        error = f"a replay may need {bytes_max} bytes of the log, this start needs {size_bytes}"
        plan.refuse(index, reasons.QUOTA_EXCEEDED, error)
    else:
        plan.granted[index] = GrantedStart(start, Replay([], floors))


def search_starts(state: NodeState, connection: Connection, plan: StartPlan) -> None:
    """Searches the log for the starts that are not known. The client's next packets wait."""
    connection.pause_behind_subscribe()
    state.effects.append(FindStarts(connection, plan, plan.wanted, list(state.delivered)))


def take_found(
    state: NodeState, session: Session, plan: StartPlan, found: list[FoundStart]
) -> None:
    """Grants or refuses what was searched for. All floors of a session have one bound."""
    size_bytes = 0
    for subscription in session.subscriptions.values():
        if subscription.replay is not None:
            size_bytes += floors_bytes(subscription.replay.floors)
    for index, start in zip(plan.asking, found, strict=True):
        if start.error:
            plan.refuse(index, reasons.QUOTA_EXCEEDED, start.error)
            continue
        size_bytes += floors_bytes(start.floors)
        if size_bytes > FLOORS_BYTES_MAX:
            error = f"the session's starts of topics need more than {FLOORS_BYTES_MAX} bytes"
            plan.refuse(index, reasons.QUOTA_EXCEEDED, error)
            continue
        _grant(state, plan, index, start.offsets, start.floors, start.size_bytes)


def begin_replay(
    state: NodeState, session: Session, accepted: list[Subscription], record: SubscribeRecord
) -> None:
    """Puts the session back to the starts, and into the record what recovery needs for that. The
    packet ids of what it was sent go into the log first: the positions of the record pass them."""
    filters = [each.filter for each in accepted if each.replay is not None]
    if session.lane is not None:
        session.lane.add_filters(filters)
    elif session.positions is None and session.tailing:
        session.open_lane(filters)
    if session.reading:
        session.cancel_read()
    if session.is_durable():
        log_session(state, session)
    positions = session.resume_positions(state.delivered)
    replays: dict[str, ReplayEntry] = {}
    starts: list[list[int]] = []
    for each in accepted:
        if each.replay is not None and each.start is not None:
            # The queues of the SUBSCRIBE may have waited for the log since the start was granted.
            each.replay.seam = list(state.delivered)
            each.replay.again = None if session.done is None else set(session.done)
            replays[each.filter] = replay_entry(each.start, each.replay)
            starts.append(each.start)
    go_back(session, positions, starts)
    open_lane_behind(session, filters)
    state.interests.pop(session, None)
    session.replays_awaited += 1
    if session.is_durable():
        record.positions = positions
        record.replays = replays
        session.logged_positions = list(session.positions or positions)

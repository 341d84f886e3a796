"""Reconstructs what happened to one message from the log and the present state.

The log has the message with its publisher, its offset and its time. A session's cursor says which
records it has been sent. The log has neither acknowledgements of publishers, nor deliveries at QoS
0, nor sessions that end with their connection, nor who was in sync at the time. Each reply says so
where it matters.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

from msgspec import Struct

from holdfast.api.views.pages import AbsentNode
from holdfast.api.views.records import LogRecord
from holdfast.api.views.sessions import is_hidden
from holdfast.api.views.slices import ITEMS
from holdfast.log.record import FLAG_QOS_MASK, Record
from holdfast.node.node_state import NodeState
from holdfast.node.rights import may_read_later
from holdfast.node.session.connection import Connection
from holdfast.node.session.message import NO_EXPIRY, stored_message
from holdfast.node.session.session import RECEIVED, Session
from holdfast.protocol.topics.names import is_shared, matches, split_shared

Status = Literal[
    "delivered",
    "sent",
    "waiting",
    "expired",
    "too_large",
    "moved",
    "ended",
    "shared",
    "not_permitted",
    "not_subscribed",
    "qos0",
    "unknown",
]
NO_LOCAL: Final = "it published the message itself, and subscribes with No Local"
SESSIONS_MAX: Final = 1000
"""The most sessions that one trace lists."""


class TraceStep(Struct):
    """One step on the way of a message."""

    step: str
    """publisher, append, replicas, commit, acknowledge or lake."""
    known: bool
    """Whether the log or the state proves it."""
    text: str
    at_us: int = 0


class SessionTrace(Struct):
    """Fate of a message for one session."""

    client: str
    status: Status
    text: str
    filter: str = ""
    node: str = ""


GroupStatus = Literal["finished", "waiting", "unknown"]


class GroupTrace(Struct):
    """Fate of a message for one shared group."""

    group: str
    status: GroupStatus


class MessageTrace(Struct):
    """The way of one message."""

    record: LogRecord
    steps: list[TraceStep]
    sessions: list[SessionTrace]
    """At most 1000 sessions that outlive their connections and subscribe to the topic now."""
    groups: list[GroupTrace]
    counts: dict[str, int]
    """The sessions by status, also of those that are not listed."""
    unknown: list[str]
    """Limits of the log's account of this message."""
    missing: list[AbsentNode] = []


class TracedMessage:
    """A message in question, with its expiry."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.topic = record.topic.decode("utf-8", "replace")
        expiry_s = stored_message(record, 0, 0).expiry_s
        self.expires_us = 0
        if expiry_s != NO_EXPIRY:
            self.expires_us = record.timestamp_us + expiry_s * 1_000_000

    def packet_bytes(self, connection: Connection, qos: int) -> int:
        """The size of the PUBLISH for a client, without subscription identifiers and aliases."""
        record = self.record
        frame = stored_message(record, record.partition, record.offset).frame(
            connection.version, qos, False, 1
        )
        return len(frame) - len(connection.mount)


def session_trace(
    state: NodeState, session: Session, message: TracedMessage, positions: list[int] | None
) -> SessionTrace | None:
    """Returns a message's fate for a session; None if it does not subscribe to the topic now.

    `positions`: the first offsets that the session has not been sent; None: unknown.
    """
    record = message.record
    matching = [
        each
        for filter, each in session.subscriptions.items()
        if not is_shared(filter) and matches(filter, message.topic)
    ]
    if not matching:
        return None
    is_own = session.key == record.client_id
    chosen = [each for each in matching if not (is_own and each.no_local)]
    if not chosen:
        found = SessionTrace(session.client_id, "not_subscribed", NO_LOCAL, matching[0].filter)
        found.node = session.owner
        return found
    best = max(chosen, key=lambda each: each.qos)
    found = SessionTrace(session.client_id, "unknown", "", best.filter, session.owner)
    partition, offset = record.partition, record.offset
    if not may_read_later(state, session, record.topic):
        found.status, found.text = "not_permitted", "it may not read the topic"
    elif all(each.start is not None and offset < each.start[partition] for each in chosen):
        found.status, found.text = "not_subscribed", "it subscribed after the message"
    elif best.qos == 0 or not record.flags & 3:
        found.status = "qos0"
        found.text = "a delivery at QoS 0, which leaves no trace"
    elif positions is None:
        found.text = "its node has not logged a position yet"
    elif offset >= positions[partition] and not _is_done(session, partition, offset):
        _waiting(state, session, message, found)
    else:
        _passed(session, message, best.qos, found)
    return found


def member_trace(session: Session, message: TracedMessage) -> SessionTrace | None:
    """The trace of a message for a member of shared groups, or None if no group matches."""
    groups = [
        filter
        for filter in session.subscriptions
        if is_shared(filter) and matches(split_shared(filter)[1], message.topic)
    ]
    if not groups:
        return None
    found = SessionTrace(session.client_id, "shared", "", groups[0], session.owner)
    _find_inflight(session, message.record.partition, message.record.offset, found)
    return found


def _waiting(
    state: NodeState, session: Session, message: TracedMessage, found: SessionTrace
) -> None:
    if message.expires_us and state.wall_us >= message.expires_us:
        found.status, found.text = "expired", "it expired before the session was sent it"
    else:
        found.status = "waiting"
        found.text = "it waits in the log for the session"
        if session.connection is None and not session.owner:
            found.text += ", whose client is away"
        lake_error = state.lake_wait(session)
        if lake_error:
            found.text += f", which waits for the lake: {lake_error}"


def _passed(session: Session, message: TracedMessage, qos: int, found: SessionTrace) -> None:
    record = message.record
    if _find_inflight(session, record.partition, record.offset, found):
        return
    connection = session.connection
    if connection is not None:
        size = message.packet_bytes(connection, min(qos, record.flags & FLAG_QOS_MASK))
        if size > connection.packet_bytes_max:
            most = connection.packet_bytes_max
            found.status = "too_large"
            found.text = f"its packet has {size} bytes, and the client takes at most {most}"
            return
    found.status = "delivered"
    found.text = "the session has passed it, and it is not inflight"


def _find_inflight(session: Session, partition: int, offset: int, found: SessionTrace) -> bool:
    for packet_id, entry in session.inflight.items():
        if (entry.partition, entry.offset) == (partition, offset):
            found.status = "sent"
            found.text = f"it was sent with packet id {packet_id}, and is not acknowledged"
            if entry.state == RECEIVED:
                found.status = "delivered"
                found.text = "the client has received it (PUBREC), and PUBCOMP is missing"
            return True
    return False


def _is_done(session: Session, partition: int, offset: int) -> bool:
    if any((each.partition, each.offset) == (partition, offset)
           for each in session.inflight.values()):  # fmt: skip
        return True
    return session.done is not None and (partition, offset) in session.done


class TraceScan:
    """The sessions that subscribe to a message's topic, found slice by slice. It empties the given
    list."""

    def __init__(self, state: NodeState, sessions: list[Session], message: TracedMessage) -> None:
        self._state = state
        self._sessions = sessions
        self._message = message
        self.sessions: list[SessionTrace] = []
        self.counts: Counter[str] = Counter()

    def steps(self) -> Iterator[None]:
        """Looks at all sessions, some at a time."""
        sessions, looked = self._sessions, 0
        while sessions:
            session = sessions.pop()
            looked += 1 + len(session.subscriptions) // 4
            if looked >= ITEMS:
                looked = 0
                yield
            if is_hidden(session) or session.expiry_s == 0:
                continue
            here, positions = self._as_here(session)
            found = session_trace(self._state, here, self._message, positions)
            if found is not None:
                self.counts[found.status] += 1
                if len(self.sessions) < SESSIONS_MAX:
                    self.sessions.append(found)

    def _as_here(self, session: Session) -> tuple[Session, list[int] | None]:
        """A session as this node has it, with the first offsets that it has not been sent; None:
        they are unknown."""
        here = self._state.sessions.get(session.client_id)
        if here is None:
            return session, session.positions
        return here, here.resume_positions(self._state.delivered)


def matching_groups(groups: list[str], topic: str) -> list[str]:
    """The keys of the shared groups that want a topic."""
    return sorted(key for key in groups if matches(split_shared(key)[1], topic))

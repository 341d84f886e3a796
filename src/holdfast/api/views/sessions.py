"""Sessions and clients: rows, pages of rows, and one session in full."""

from collections.abc import Callable, Iterator
from operator import gt
from typing import Final

from msgspec import Struct

from holdfast.api.views.pages import AbsentNode, BestRows, Place, SortKey
from holdfast.api.views.slices import ITEMS
from holdfast.node.connections.connect import API_PREFIX
from holdfast.node.node_state import NodeState
from holdfast.node.session.additions import identifier_of
from holdfast.node.session.connection import OPEN
from holdfast.node.session.session import NEVER_EXPIRES, Session
from holdfast.node.state.retention_pins import needed_positions
from holdfast.protocol.topics.names import is_shared

SUBSCRIPTIONS_MAX: Final = 1000
INFLIGHT_MAX: Final = 1000
"""The most subscriptions, and packet ids, of one session in a reply."""
VERSIONS: Final = {3: "3.1", 4: "3.1.1", 5: "5"}


class SessionRow(Struct, kw_only=True):
    """A session, and its client if one is connected."""

    client: str
    user: str
    node: str
    """The node with the client's connection. Of a session away: the node that was asked."""
    connected: bool
    address: str = ""
    listener: str = ""
    protocol: str = ""
    certificate: str = ""
    keep_alive_s: float = 0
    idle_s: float = 0
    """The time since the client's last packet."""
    expiry_s: int = 0
    """The session expiry interval; 4294967295: never."""
    away_since_us: int = 0
    """Time at which the client left, in microseconds since 1970; 0 while it is connected."""
    expires_at_us: int = 0
    """Time at which a session away ends; 0: never, or the client is connected."""
    subscriptions: int = 0
    queued: int = 0
    """Messages in memory that wait to be sent."""
    inflight: int = 0
    """Messages of QoS 1 and 2 that the client has not acknowledged."""
    log_lag: int = 0
    """Records of all topics between the session's position in the log and its end; 0: live."""
    dropped: int = 0
    """Messages of QoS 0 dropped since the connection's session was made."""
    has_will: bool = False


class SubscriptionOfSession(Struct):
    """One filter of a session."""

    filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int
    subscription_id: int


class InflightMessage(Struct):
    """A message that a client has not acknowledged."""

    packet_id: int
    partition: int
    offset: int
    qos: int
    released: bool
    """Whether the client has received it at QoS 2, and only PUBCOMP is missing."""
    at_us: int = 0
    """When a node took the message, in microseconds since 1970, for the 50 oldest; 0: not known
    here."""


class SessionDetail(Struct, kw_only=True):
    """One session in full."""

    session: SessionRow
    subscriptions: list[SubscriptionOfSession]
    """At most 1000; `session.subscriptions` is their number."""
    inflight: list[InflightMessage]
    """At most 1000; `session.inflight` is their number."""
    positions: list[int]
    """Per partition, the first offset that the session has not been sent."""
    ends: list[int]
    """Per partition, the end of the committed log."""
    needed_bytes: int = 0
    """The bytes of the segments with records that the session still needs. Retention keeps at most
    `log.retention.session_bytes` of them for it."""
    will_topic: str = ""


class SessionQuery(Struct, frozen=True, omit_defaults=True):
    """The choice of a page of sessions."""

    which: str = "all"
    """all, connected or away."""
    search: str = ""
    """A part of client id, user or address, whatever its case."""
    user: str = ""
    sort: str = "client"
    descending: bool = False
    limit: int = 100
    after: Place | None = None


class SessionPage(Struct):
    """A page of sessions."""

    sessions: list[SessionRow]
    matched: int
    """The sessions that match, those of other pages included."""
    next: str = ""
    """The cursor of the next page; empty on the last one."""
    missing: list[AbsentNode] = []
    """The nodes whose clients are not in this reply."""


def _user_of(state: NodeState, session: Session) -> str:
    return session.username or ""


def _address_of(state: NodeState, session: Session) -> str:
    return "" if session.connection is None else session.connection.remote


SORTS: Final[dict[str, Callable[[NodeState, Session], SortKey]]] = {
    "client": lambda state, session: session.client_id,
    "user": _user_of,
    "address": _address_of,
    "queued": lambda state, session: session.outbox_count(),
    "inflight": lambda state, session: len(session.inflight),
    "subscriptions": lambda state, session: len(session.subscriptions),
    "log_lag": lambda state, session: log_lag(state, session),
    "dropped": lambda state, session: session.dropped,
}
"""The sort keys of a list of sessions. Each is a field of SessionRow."""


def is_hidden(session: Session) -> bool:
    """Whether the session belongs to the broker itself."""
    client_id = session.client_id
    return session.is_internal or client_id.startswith(API_PREFIX) or is_shared(client_id)


def is_connected(session: Session) -> bool:
    """Whether a client uses the session here."""
    connection = session.connection
    return connection is not None and connection.state == OPEN


def log_lag(state: NodeState, session: Session) -> int:
    """The records between the session's position and the end of the log; 0: it is live, or there
    is nothing that it could be sent."""
    positions = session.positions
    if positions is None or not session.subscriptions:
        return 0
    return max(0, sum(state.delivered) - sum(positions))


def session_row(state: NodeState, session: Session, node: str) -> SessionRow:
    """The row of a session. `state`: the node's own, for its clock and its log."""
    row = SessionRow(
        client=session.client_id,
        user=session.username or "",
        node=node,
        connected=False,
        expiry_s=session.expiry_s,
        subscriptions=len(session.subscriptions),
        queued=session.outbox_count(),
        inflight=len(session.inflight),
        log_lag=log_lag(state, session),
        dropped=session.dropped,
        has_will=session.will is not None,
    )
    connection = session.connection
    if connection is None or connection.state != OPEN:
        row.away_since_us = session.rare.disconnected_us
        if session.rare.disconnected_us and 0 < session.expiry_s < NEVER_EXPIRES:
            row.expires_at_us = session.rare.disconnected_us + session.expiry_s * 1_000_000
        return row
    row.connected = True
    row.address = connection.remote
    row.listener = connection.listener.name
    row.protocol = VERSIONS.get(connection.version, str(connection.version))
    row.certificate = connection.certificate_name
    row.keep_alive_s = float(connection.keep_alive_s)
    row.idle_s = round(max(0.0, state.now - connection.last_received), 1)
    return row


def session_detail(state: NodeState, session: Session, node: str) -> SessionDetail:
    """One session in full."""
    subscriptions = list(session.subscriptions.values())[:SUBSCRIPTIONS_MAX]
    inflight = list(session.inflight.items())[:INFLIGHT_MAX]
    return SessionDetail(
        session=session_row(state, session, node),
        subscriptions=[
            SubscriptionOfSession(
                each.filter,
                each.qos,
                each.no_local,
                each.retain_as_published,
                each.retain_handling,
                identifier_of(each.additions),
            )
            for each in subscriptions
        ],
        inflight=[
            InflightMessage(packet_id, each.partition, each.offset, each.qos, each.state == 2)
            for packet_id, each in inflight
        ],
        positions=session.resume_positions(state.delivered),
        ends=list(state.delivered),
        needed_bytes=needed_bytes(state, session),
        will_topic="" if session.will is None else session.will.topic.decode("utf-8", "replace"),
    )


def needed_bytes(state: NodeState, session: Session) -> int:
    """The bytes of the segments with records that a session still needs. 0: it is at the end, or
    does not outlive its connection."""
    if not session.subscriptions or not session.expiry_s:
        return 0
    positions = needed_positions(state, session)
    total = 0
    for segment in reversed(state.journal.segments):
        # A live session has been sent what is delivered, and nothing else.
        ends = map(min, segment.end_offsets(), state.delivered)
        if not any(map(gt, ends, positions)):
            break
        total += segment.size_bytes
    return total


class SessionScan:
    """The page of a query over some sessions, found slice by slice. It empties the given list."""

    def __init__(
        self,
        state: NodeState,
        sessions: list[Session],
        query: SessionQuery,
        node: str,
        is_chosen: Callable[[Session], bool],
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._query = query
        self._node = node
        self._is_chosen = is_chosen
        self.rows: list[SessionRow] = []
        """The rows of the page, in order."""
        self.matched = 0
        """The sessions that match, those of other pages included."""

    def steps(self) -> Iterator[None]:
        """Looks at all sessions, some at a time."""
        query, state = self._query, self._state
        best: BestRows[Session] = BestRows(query.limit, query.after, descending=query.descending)
        key_of = SORTS[query.sort]
        search = query.search.casefold()
        sessions, number = self._sessions, 0
        while sessions:
            number += 1
            if number % ITEMS == 0:
                yield
            # The list becomes empty as it is read: to free 100,000 entries at once takes 3 ms.
            session = sessions.pop()
            if not self._is_chosen(session) or is_hidden(session):
                continue
            if query.user and session.username != query.user:
                continue
            if search and not self._has(session, search):
                continue
            best.add((key_of(state, session), session.client_id), session)
        self.matched = best.matched
        yield
        for session in best.page():
            self.rows.append(session_row(state, session, self._node))
            if len(self.rows) % ITEMS == 0:
                yield

    def _has(self, session: Session, search: str) -> bool:
        return (
            search in session.client_id.casefold()
            or search in _user_of(self._state, session).casefold()
            or search in _address_of(self._state, session)
        )

"""Subscriptions of all sessions, and shared groups with their members."""

from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct

from holdfast.api.views.pages import AbsentNode, BestRows, Place
from holdfast.api.views.sessions import is_connected, is_hidden
from holdfast.api.views.slices import ITEMS
from holdfast.node.session.additions import identifier_of
from holdfast.node.session.session import Group, Session
from holdfast.node.state.recorded_state import RecordedState
from holdfast.protocol.topics.names import is_queue, is_shared, matches, split_shared

MEMBERS_MAX: Final = 1000
"""The most members of one group in a reply of one node."""


class SubscriptionRow(Struct):
    """One filter of one session."""

    filter: str
    client: str
    user: str
    node: str
    connected: bool
    qos: int
    no_local: bool
    retain_as_published: bool
    subscription_id: int


class SubscriptionQuery(Struct, frozen=True, omit_defaults=True):
    """The choice of a page of subscriptions."""

    search: str = ""
    """A part of the filter, whatever its case."""
    topic: str = ""
    """A topic that the filter matches."""
    client: str = ""
    limit: int = 100
    after: Place | None = None


class SubscriptionPage(Struct):
    """A page of subscriptions, in the order of filter and client."""

    subscriptions: list[SubscriptionRow]
    matched: int
    next: str = ""
    missing: list[AbsentNode] = []


class SubscriptionScan:
    """The page of a query over the subscriptions of some sessions. It empties the given list."""

    def __init__(
        self,
        sessions: list[Session],
        query: SubscriptionQuery,
        node: str,
        is_chosen: Callable[[Session], bool],
    ) -> None:
        self._sessions = sessions
        self._query = query
        self._node = node
        self._is_chosen = is_chosen
        self.rows: list[SubscriptionRow] = []
        self.matched = 0

    def steps(self) -> Iterator[None]:
        """Looks at all subscriptions, some at a time."""
        query = self._query
        best: BestRows[tuple[Session, str]] = BestRows(query.limit, query.after, descending=False)
        search = query.search.casefold()
        sessions, number = self._sessions, 0
        while sessions:
            session = sessions.pop()
            number += 1
            if number % ITEMS == 0:
                yield
            if not self._is_chosen(session) or is_hidden(session):
                continue
            if query.client and session.client_id != query.client:
                continue
            for filter in list(session.subscriptions):
                number += 1
                if number % ITEMS == 0:
                    yield
                if search and search not in filter.casefold():
                    continue
                if query.topic and not _reaches(filter, query.topic):
                    continue
                best.add((filter, session.client_id), (session, filter))
        self.matched = best.matched
        yield
        for session, filter in best.page():
            row = self._row(session, filter)
            if row is not None:
                self.rows.append(row)

    def _row(self, session: Session, filter: str) -> SubscriptionRow | None:
        subscription = session.subscriptions.get(filter)
        if subscription is None:
            # It was removed between two slices.
            return None
        return SubscriptionRow(
            filter,
            session.client_id,
            session.username or "",
            session.owner or self._node,
            is_connected(session),
            subscription.qos,
            subscription.no_local,
            subscription.retain_as_published,
            identifier_of(subscription.additions),
        )


def _reaches(filter: str, topic: str) -> bool:
    return matches(split_shared(filter)[1] if is_shared(filter) else filter, topic)


class GroupMemberRow(Struct):
    """A member of a shared group."""

    client: str
    user: str
    node: str
    connected: bool
    qos: int
    inflight: int
    """Messages of the group that the member has not acknowledged."""


class OldestMessage(Struct):
    """The oldest message that a group has not finished."""

    partition: int
    offset: int
    topic: str
    at_us: int
    publisher: str


class GroupRow(Struct, kw_only=True):
    """A shared group."""

    group: str
    """The key: $share/name/filter."""
    name: str
    filter: str
    coordinator: str
    """The node with the group's cursor; empty without a leader of its partition."""
    member_count: int
    connected_count: int
    is_queue: bool = False
    """Whether it outlives its members, until it is deleted."""
    log_lag: int = -1
    """Records of all topics between the group's position and the end of the log; -1: only the
    coordinator knows, because no member's session outlives its connection."""
    positions: list[int] = []
    """Per partition, the first unfinished offset."""


class GroupPage(Struct):
    """A page of shared groups, by key."""

    groups: list[GroupRow]
    matched: int
    next: str = ""
    missing: list[AbsentNode] = []


class GroupDetail(Struct):
    """One shared group in full."""

    group: GroupRow
    members: list[GroupMemberRow]
    """At most 1000 of each node; `group.member_count` is their number."""
    oldest: OldestMessage | None
    """None: everything is finished, or it was not found within the scan budget."""
    oldest_is_known: bool
    missing: list[AbsentNode] = []


class GroupPart(Struct):
    """The members of one group at one node."""

    group: str
    members: list[GroupMemberRow]
    connected_count: int


def group_part(group: Group, node: str, is_chosen: Callable[[Session], bool]) -> GroupPart:
    """The chosen members of a group."""
    rows: list[GroupMemberRow] = []
    connected = 0
    for session, subscription in list(group.members.items()):
        if not is_chosen(session) or is_queue(session.client_id):
            continue
        here = is_connected(session)
        connected += here
        if len(rows) < MEMBERS_MAX:
            inflight = sum(each.group_tag == group.tag for each in session.inflight.values())
            rows.append(
                GroupMemberRow(
                    session.client_id,
                    session.username or "",
                    session.owner or node,
                    here,
                    subscription.qos,
                    inflight,
                )
            )
    return GroupPart(group.key, rows, connected)


def log_lag_of(state: RecordedState, positions: list[int]) -> int:
    """The records between these positions and the end of the log."""
    return max(0, sum(state.delivered) - sum(positions))

"""Subscriptions and shared groups.

Each node lists the subscriptions of its connected clients, and the node that was asked
adds those of the sessions away. A group's position is in the log, so every node knows it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.routes.session_routes import Choice, has_no_owner
from holdfast.api.views.pages import AFTER, LIMIT, AbsentNode, BestRows, Place, place_after
from holdfast.api.views.sessions import is_connected, is_hidden
from holdfast.api.views.slices import ITEMS
from holdfast.log.partition import partition_of
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import FLAG_QOS_MASK
from holdfast.node.groups.queue_changes import delete_queue
from holdfast.node.session.additions import identifier_of
from holdfast.node.session.session import Group, Session
from holdfast.node.state.offset_ranges import FinishedOffsets
from holdfast.node.state.recorded_state import RecordedState
from holdfast.protocol.topics.names import is_queue, is_shared, matches, queue_key, split_shared
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

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


SEARCH: Final = Text("search", "a part of the filter", most=1024)
TOPIC: Final = Text("topic", "a topic that the filter matches", most=65_535)
CLIENT: Final = Text("client", "subscriptions of this client only", most=65_535)
GROUP: Final = Text(
    "group", "the key: $share/name/filter, or $queue/filter", required=True, most=65_535
)
OLDEST_READS_MAX: Final = 16
"""The most reads of the log that look for a group's oldest message. Each reads at most 16 MiB."""


class GroupQuestion(Struct):
    """The groups that a node is asked about: one, or, without a name, the keys of all."""

    group: str = ""


class GroupKeys(Struct):
    """The keys of the groups of a node's connected clients, with the members connected."""

    members: dict[str, int]


class SubscriptionRoutes:
    """The routes of subscriptions and shared groups."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        everywhere.offer("subscriptions", SubscriptionQuery, self._connected_here)
        everywhere.offer("group", GroupQuestion, self._part_here)
        everywhere.offer("groups", GroupQuestion, self._keys_here)

    def endpoints(self) -> list[Endpoint]:
        v1, viewer = "/api/v1", Scope.VIEWER
        return [
            Endpoint("GET", f"{v1}/subscriptions", viewer, "the subscriptions, page by page",
                     self._list, SubscriptionPage, (SEARCH, TOPIC, CLIENT, LIMIT, AFTER),
                     refusals=(503,)),
            Endpoint("GET", f"{v1}/groups", viewer, "the shared groups, page by page",
                     self._groups, GroupPage, (SEARCH, LIMIT, AFTER), refusals=(503,)),
            Endpoint("GET", f"{v1}/group", viewer,
                     "one shared group: members, oldest unfinished message", self._group,
                     GroupDetail, (GROUP,), refusals=(404, 503)),
            Endpoint("DELETE", f"{v1}/group", Scope.OPERATOR,
                     "delete a queue without members, with its unfinished messages", self._delete,
                     GroupRow, (GROUP,), refusals=(404, 409, 503)),
        ]  # fmt: skip

    async def _list(self, call: Call) -> SubscriptionPage:
        query = SubscriptionQuery(
            call.get(SEARCH) or "",
            call.get(TOPIC) or "",
            call.get(CLIENT) or "",
            call[LIMIT],
            place_after(call),
        )
        node = self._node
        answers, missing = await self._everywhere.ask_others(
            "subscriptions", query, SubscriptionPage
        )
        recorded = list(node.recorded.sessions.values())
        away = await self._scan(recorded, query, has_no_owner)
        return _cut(query, [await self._connected_here(query), *answers, away], missing)

    async def _connected_here(self, query: SubscriptionQuery) -> SubscriptionPage:
        sessions = list(self._node.state.sessions.values())
        return await self._scan(sessions, query, is_connected)

    async def _scan(
        self, sessions: list[Session], query: SubscriptionQuery, is_chosen: Choice
    ) -> SubscriptionPage:
        scan = SubscriptionScan(sessions, query, self._node.node_id, is_chosen)
        await self._node.slices.run(scan.steps())
        return SubscriptionPage(scan.rows, scan.matched)

    # Groups

    async def _groups(self, call: Call) -> GroupPage:
        search = (call.get(SEARCH) or "").casefold()
        node = self._node
        connected = dict((await self._keys_here(GroupQuestion())).members)
        answers, missing = await self._everywhere.ask_others("groups", GroupQuestion(), GroupKeys)
        for answer in answers:
            for key, count in answer.members.items():
                connected[key] = connected.get(key, 0) + count
        best: BestRows[str] = BestRows(call[LIMIT], place_after(call), descending=False)
        keys = [*connected, *(key for key in list(node.recorded.groups) if key not in connected)]

        def choose() -> Iterator[None]:
            for number, key in enumerate(keys):
                if number % ITEMS == ITEMS - 1:
                    yield
                if search in key.casefold():
                    best.add((key, ""), key)

        await node.slices.run(choose())
        rows = [self._row(key, connected.get(key, 0)) for key in best.page()]
        return GroupPage(rows, best.matched, best.following(), missing)

    async def _keys_here(self, question: GroupQuestion) -> GroupKeys:
        groups = list(self._node.state.groups.values())
        return GroupKeys({group.key: len(group.connected) for group in groups if group.connected})

    def _row(self, key: str, connected_count: int) -> GroupRow:
        node = self._node
        name, filter = split_shared(key)
        recorded = node.recorded.groups.get(key)
        queues = node.state.recorded.queues
        members = 0 if recorded is None else len(recorded.members) - (key in queues)
        row = GroupRow(
            group=key,
            name=name,
            filter=filter,
            coordinator=self._coordinator(key),
            member_count=max(members, connected_count),
            connected_count=connected_count,
            is_queue=key in queues,
        )
        positions = self._positions(key)
        if positions is not None:
            row.positions = positions
            row.log_lag = log_lag_of(node.state, positions)
        return row

    def _coordinator(self, key: str) -> str:
        partition = partition_of(key.encode(), self._node.state.config.partitions)
        return self._node.cluster_node.context.leader(partition)

    def _positions(self, key: str) -> list[int] | None:
        """The first unfinished offsets of a group, or None if this node does not know them."""
        known = self._node.cluster_node.replicated.groups.positions.get(key)
        return None if known is None else list(known)

    async def _group(self, call: Call) -> GroupDetail:
        return await self._detail(queue_key(call[GROUP]))

    async def _detail(self, key: str) -> GroupDetail:
        node = self._node
        recorded = node.recorded.groups.get(key)
        members: dict[str, GroupMemberRow] = {}
        if recorded is not None:
            part = group_part(recorded, node.node_id, _anyone)
            members = {each.client: each for each in part.members}
        question = GroupQuestion(key)
        answers, missing = await self._everywhere.ask_others("group", question, GroupPart)
        for answer in [await self._part_here(question), *answers]:
            members.update((each.client, each) for each in answer.members)
        if not members and recorded is None:
            raise ApiRefusal(404, f"there is no shared group {shown(key)}")
        row = self._row(key, sum(each.connected for each in members.values()))
        row.member_count = max(row.member_count, len(members))
        oldest, is_known = await self._oldest(row)
        if is_known and oldest is None:
            # The log goes on behind the group's position, with records that are not for it.
            row.log_lag = 0
        rows = sorted(members.values(), key=lambda each: each.client)
        return GroupDetail(row, rows, oldest, is_known, missing)

    async def _delete(self, call: Call) -> GroupRow:
        key = queue_key(call[GROUP])
        node = self._node
        found = await self._detail(key)
        call.before = row = found.group
        if key not in node.state.recorded.queues:
            text = "it is no queue and ends with its last member"
            raise ApiRefusal(409, f"the group {shown(key)} was not deleted: {text}")
        if found.missing:
            absent = ", ".join(each.node for each in found.missing)
            raise ApiRefusal(503, f"the members at {absent} are not known")
        if row.member_count:
            text = f"it has {row.member_count} members, so end their sessions first"
            raise ApiRefusal(409, f"the queue {shown(key)} was not deleted: {text}")
        await node.commit(
            partial(delete_queue, node.state, key), f"the deletion of the queue {shown(key)}"
        )
        return row

    async def _part_here(self, question: GroupQuestion) -> GroupPart:
        group = self._node.state.groups.get(question.group)
        if group is None:
            return GroupPart(question.group, [], 0)
        return group_part(group, self._node.node_id, is_connected)

    async def _oldest(self, row: GroupRow) -> tuple[OldestMessage | None, bool]:
        """Finds the oldest unfinished message. False: it is not known."""
        if row.log_lag < 0:
            return None, False
        log, state = await self._node.log(), self._node.state
        done = self._node.cluster_node.replicated.groups.done.get(row.group, FinishedOffsets())
        interests = [ReadInterest(row.filter, None)]
        positions, limits = row.positions, list(state.delivered)
        for _ in range(OLDEST_READS_MAX):
            work = partial(log.read, positions, limits, interests, 100, 1 << 20)
            result = await log.in_thread(work)
            for record in result.records:
                if not record.flags & FLAG_QOS_MASK:
                    continue
                if (record.partition, record.offset) not in done:
                    topic = record.topic.decode("utf-8", "replace")
                    publisher = record.client_id.decode("utf-8", "replace")
                    return OldestMessage(record.partition, record.offset, topic,
                                         record.timestamp_us, publisher), True  # fmt: skip
            positions = result.positions
            if result.done:
                return None, True
        return None, False


def _anyone(session: Session) -> bool:
    return True


def _cut(
    query: SubscriptionQuery, parts: list[SubscriptionPage], missing: list[AbsentNode]
) -> SubscriptionPage:
    best: BestRows[SubscriptionRow] = BestRows(query.limit, None, descending=False)
    for part in parts:
        for row in part.subscriptions:
            best.add((row.filter, row.client), row)
    matched = sum(part.matched for part in parts)
    return SubscriptionPage(best.page(), matched, best.following(), missing)

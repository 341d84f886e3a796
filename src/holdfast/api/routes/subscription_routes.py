"""Subscriptions and shared groups.

Each node lists the subscriptions of its connected clients, and the node that was asked
adds those of the sessions away. A group's position is in the log, so every node knows it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.routes.session_routes import Choice, has_no_owner
from holdfast.api.views.pages import AFTER, LIMIT, AbsentNode, BestRows, place_after
from holdfast.api.views.sessions import is_connected
from holdfast.api.views.slices import ITEMS
from holdfast.api.views.subscriptions import (
    GroupDetail,
    GroupMemberRow,
    GroupPage,
    GroupPart,
    GroupRow,
    OldestMessage,
    SubscriptionPage,
    SubscriptionQuery,
    SubscriptionRow,
    SubscriptionScan,
    group_part,
    log_lag_of,
)
from holdfast.log.partition import partition_of
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import FLAG_QOS_MASK
from holdfast.node.groups.queue_changes import delete_queue
from holdfast.node.session.session import Session
from holdfast.node.state.offset_ranges import FinishedOffsets
from holdfast.protocol.topics.names import queue_key, split_shared
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

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

"""Sessions and clients: lists, one session, and what an operator does with one.

A client id is a parameter of the query, because it may contain any character. In a cluster a node
lists the clients connected to it, and the node that was asked adds the sessions away, which every
node knows from the log.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Flag, Text, bad_request
from holdfast.api.log.session_history import AGES_MAX, times_of
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.loopback import LoopbackClient, LoopbackRefusal
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.pages import AFTER, LIMIT, PAGE_MAX, AbsentNode, BestRows, place_after
from holdfast.api.views.sessions import (
    SORTS,
    SessionDetail,
    SessionPage,
    SessionQuery,
    SessionRow,
    SessionScan,
    is_connected,
    is_hidden,
    session_detail,
)
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import FLAG_QOS_MASK, Record
from holdfast.node.connections.operations import disconnect_client, move_session
from holdfast.node.delivery.replay import SUBSCRIPTIONS_MAX
from holdfast.node.routing.routing import subscription_to
from holdfast.node.session.session import Session, Subscription
from holdfast.protocol.topics.names import matches
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

COUNT_READS_MAX: Final = 64
"""The most reads of the log that count the messages of a move. Each reads at most 16 MiB."""
COUNT_RECORDS: Final = 1000
"""The most messages of one such read."""
AWAY_S: Final = 5.0
"""The time in seconds in which a disconnected session must be released by its node."""
POLL_S: Final = 0.02


class ClientQuestion(Struct):
    """A question about one client's session."""

    client: str
    reason: str = ""


class Disconnected(Struct):
    """The end of a client's connection."""

    client: str
    node: str


class MovePlan(Struct, forbid_unknown_fields=True):
    """A new position in the log."""

    to: Literal["start", "end", "time", "offsets"]
    """The oldest records that the log has, its end, the first record of a time, or `offsets`."""
    time_us: int = 0
    """With `time`: microseconds since 1970."""
    offsets: list[int] = []
    """With `offsets`: the next offset of each partition."""
    dry_run: bool = False
    """Whether only the counts are wanted."""


class Moved(Struct):
    """The result of a move, or of its dry run."""

    client: str
    before: list[int]
    positions: list[int]
    skipped: int
    """The messages of its subscriptions that the session is not sent any more."""
    repeated: int
    """The messages of its subscriptions that the session is sent again."""
    exact: bool
    """Whether the counts are complete; otherwise they are at least so high."""
    dry_run: bool


class SessionChanges:
    """The changes of sessions, carried out at the node that has to."""

    def __init__(self, view: OwnNode, everywhere: Everywhere) -> None:
        self._view = view
        self._everywhere = everywhere

    def disconnect(self, client: str, text: str) -> None:
        """Disconnects a client of this node. Raises `ApiRefusal` (404)."""
        view = self._view
        session = view.state.sessions.get(client)
        view.broker.touch()
        if session is None or not disconnect_client(
            view.state, session, text or "disconnected by the operator"
        ):
            raise ApiRefusal(404, f"client {shown(client)} is not connected any more")

    async def end(self, row: SessionRow) -> None:
        """Ends a session: a clean start under its client id, and a disconnect. Raises `ApiRefusal`.

        A takeover works wherever the session is, and its will is published as MQTT says.
        """
        broker = self._view.broker
        user = row.user or None
        try:
            async with LoopbackClient(broker, row.client, client_id=row.client, username=user):
                pass
        except LoopbackRefusal as error:
            raise ApiRefusal(409, f"the session was not ended: {error}") from None

    async def move(self, found: SessionDetail, plan: MovePlan) -> Moved:
        """Moves a durable session. Its client is disconnected first. Raises `ApiRefusal`."""
        row = found.session
        if row.expiry_s == 0:
            text = "its session ends with the connection and has no position in the log"
            raise ApiRefusal(409, f"client {shown(row.client)}: {text}")
        wanted = await self._wanted(plan)
        session = self._view.find_session(row.client)
        if session is None:
            raise ApiRefusal(404, f"there is no session {shown(row.client)}")
        before = found.positions
        if not row.connected and session.owner:
            # The end of its connection is not committed yet.
            session = await self._until_away(row.client)
        elif row.connected and not plan.dry_run:
            session = await self._released(row)
        if session.positions is not None and not (row.connected and plan.dry_run):
            before = list(session.positions)
        epoch = session.epoch
        skipped, is_exact = await self._count(session, before, wanted)
        repeated, is_complete = await self._count(session, wanted, before)
        if not plan.dry_run:
            await self._append(session, wanted, epoch)
        exact = is_exact and is_complete
        return Moved(row.client, before, wanted, skipped, repeated, exact, plan.dry_run)

    async def _wanted(self, plan: MovePlan) -> list[int]:
        """The positions of a plan, within what the log has. Raises `ApiRefusal` (400)."""
        log, state = await self._view.log(), self._view.state
        partitions = range(state.config.partitions)
        first = [log.first_offset(partition) for partition in partitions]
        if plan.to == "start":
            return first
        if plan.to == "end":
            return list(state.delivered)
        if plan.to == "offsets":
            if len(plan.offsets) != len(first):
                raise bad_request(f"offsets: {len(plan.offsets)} given, one of each of the"
                                  f" {len(first)} partitions is needed")  # fmt: skip
            given = plan.offsets
        else:
            given = []
            for partition in partitions:
                work = partial(log.offset_for_time, partition, plan.time_us)
                given.append(await log.in_thread(work))
        return [
            min(max(offset, first[partition]), state.delivered[partition])
            for partition, offset in enumerate(given)
        ]

    async def _released(self, row: SessionRow) -> Session:
        """Disconnects the client, and returns its session once no node owns it."""
        text = "the session is moved in the log"
        if row.node == self._view.node_id:
            self.disconnect(row.client, text)
        else:
            question = ClientQuestion(row.client, text)
            await self._everywhere.ask(row.node, "disconnect", question, Disconnected)
        return await self._until_away(row.client)

    async def _until_away(self, client: str) -> Session:
        view = self._view
        deadline = view.broker.loop.time() + AWAY_S
        while True:
            session = view.recorded.sessions.get(client)
            if session is None:
                raise ApiRefusal(404, f"the session {shown(client)} has ended")
            if not session.owner and not is_connected(session):
                return session
            if view.broker.loop.time() >= deadline:
                text = "its client has connected again, or its node has not released it"
                raise ApiRefusal(409, f"the session {shown(client)} was not moved: {text}")
            await asyncio.sleep(POLL_S)

    async def _count(self, session: Session, start: list[int], end: list[int]) -> tuple[int, bool]:
        """Counts the messages of a session's subscriptions from `start` to `end`, where that is
        later. False: there are more."""
        subscriptions = [
            each
            for each in session.subscriptions.values()
            if each.group is None and (each.qos > 0 or each.replay is not None)
        ]
        interests = [ReadInterest(each.filter, each.start) for each in subscriptions]
        limits = [max(one, other) for one, other in zip(start, end, strict=True)]
        if not interests or limits == start:
            return 0, True
        log = await self._view.log()
        positions, count = start, 0
        for _ in range(COUNT_READS_MAX):
            work = partial(log.read, positions, limits, interests, COUNT_RECORDS, 1 << 20)
            result = await log.in_thread(work)
            count += _count_sent(session, subscriptions, result.records)
            positions = result.positions
            if result.done:
                return count, True
        return count, False

    async def _append(self, session: Session, wanted: list[int], epoch: int) -> None:
        view = self._view
        if is_connected(session) or session.owner:
            text = "its client has connected again"
            raise ApiRefusal(409, f"the session {shown(session.client_id)} was not moved: {text}")
        await view.commit(
            lambda done: move_session(view.state, session, wanted, epoch, done), "the move"
        )


def _count_sent(session: Session, subscriptions: list[Subscription], records: list[Record]) -> int:
    """The number of records that the session is sent when it reads them. That is not each one that
    matches: replays have starts by topic, and finished records above the position are passed."""
    if len(subscriptions) > SUBSCRIPTIONS_MAX:
        # Too many to compare each topic with. Such a session has no replay.
        return sum(record.flags & FLAG_QOS_MASK != 0 for record in records)
    matching: dict[bytes, list[Subscription]] = {}
    count = 0
    for record in records:
        found = matching.get(record.topic)
        if found is None:
            topic = record.topic.decode("utf-8", "replace")
            found = [each for each in subscriptions if matches(each.filter, topic)]
            matching[record.topic] = found
        count += subscription_to(found, record, session.done) is not None
    return count


SEARCH: Final = Text("search", "a part of the client id, the user or the address", most=256)
USER: Final = Text("user", "sessions of this user only")
WHICH: Final = Text(
    "state", "sessions with or without a client", choices=("all", "connected", "away"),
    default="all",
)  # fmt: skip
SORT: Final = Text("sort", "the order", choices=tuple(SORTS), default="client")
DESCENDING: Final = Flag("descending", "the largest first", default=False)
CLIENT: Final = Text("client", "the client id", required=True, most=65_535)
REASON: Final = Text("reason", "a text for the client (MQTT 5)", most=200)
LIST: Final = (SEARCH, USER, SORT, DESCENDING, LIMIT, AFTER)
NUMBERS: Final = ("queued", "inflight", "subscriptions", "log_lag", "dropped")
"""The sort keys that are numbers."""

Choice = Callable[[Session], bool]


def has_no_owner(session: Session) -> bool:
    return not session.owner


class FoundSession(Struct):
    """The session of a client at one node, or None."""

    found: SessionDetail | None = None


class SessionRoutes:
    """The routes of sessions and clients."""

    def __init__(self, view: OwnNode, everywhere: Everywhere) -> None:
        self._view = view
        self._everywhere = everywhere
        self._changes = SessionChanges(view, everywhere)
        everywhere.offer("sessions", SessionQuery, self._connected_here)
        everywhere.offer("session", ClientQuestion, self._connected_one)
        everywhere.offer("disconnect", ClientQuestion, self._disconnect_here)

    def endpoints(self) -> list[Endpoint]:
        v1, viewer, operator = "/api/v1", Scope.VIEWER, Scope.OPERATOR
        return [
            Endpoint("GET", f"{v1}/sessions", viewer, "the sessions, page by page", self._list,
                     SessionPage, (WHICH, *LIST), refusals=(503,)),
            Endpoint("GET", f"{v1}/clients", viewer, "the connected clients, page by page",
                     self._clients, SessionPage, LIST, refusals=(503,)),
            Endpoint("GET", f"{v1}/session", viewer, "one session", self._one, SessionDetail,
                     (CLIENT,), refusals=(404, 503)),
            Endpoint("DELETE", f"{v1}/session", operator,
                     "end a session and forget its messages", self._end, SessionRow, (CLIENT,),
                     refusals=(404, 409, 503)),
            Endpoint("POST", f"{v1}/session/disconnect", operator,
                     "disconnect a client; its session stays", self._disconnect, Disconnected,
                     (CLIENT, REASON), refusals=(404, 503)),
            Endpoint("POST", f"{v1}/session/move", operator,
                     "move a session in the log: skip messages, or send them again",
                     self._move, Moved, (CLIENT,), body=MovePlan,
                     audited=("to", "time_us", "offsets", "dry_run"), refusals=(404, 409, 503)),
        ]  # fmt: skip

    # Lists

    async def _list(self, call: Call) -> SessionPage:
        return await self._page(_query(call, call[WHICH]))

    async def _clients(self, call: Call) -> SessionPage:
        return await self._page(_query(call, "connected"))

    async def _page(self, query: SessionQuery) -> SessionPage:
        view = self._view
        parts: list[SessionPage] = []
        missing: list[AbsentNode] = []
        if query.which != "away":
            answers, missing = await self._everywhere.ask_others("sessions", query, SessionPage)
            parts += [await self._connected_here(query), *answers]
        if query.which != "connected":
            recorded = list(view.recorded.sessions.values())
            parts.append(await self._scan(recorded, query, has_no_owner))
        page = _cut(query, parts)
        page.missing = missing
        return page

    async def _connected_here(self, query: SessionQuery) -> SessionPage:
        if query.sort not in SORTS or not 0 < query.limit <= PAGE_MAX:
            raise ApiRefusal(400, "a question of another version")
        return await self._scan(list(self._view.state.sessions.values()), query, is_connected)

    async def _scan(
        self, sessions: list[Session], query: SessionQuery, is_chosen: Choice
    ) -> SessionPage:
        view = self._view
        scan = SessionScan(view.state, sessions, query, view.node_id, is_chosen)
        await view.slices.run(scan.steps())
        return SessionPage(scan.rows, scan.matched)

    # One session

    async def _one(self, call: Call) -> SessionDetail:
        return await self._find(call[CLIENT])

    async def _detail(self, session: Session, node: str) -> SessionDetail:
        """One session, with the times of its oldest inflight messages."""
        view = self._view
        found = session_detail(view.state, session, node)
        oldest = found.inflight[:AGES_MAX]
        if oldest and view.broker.runtime.believes_disk:
            places = [(each.partition, each.offset) for each in oldest]
            log = await view.log({partition for partition, _ in places})
            times = await log.in_thread(partial(times_of, log, places))
            for each, at_us in zip(oldest, times, strict=True):
                each.at_us = at_us
        return found

    async def _find(self, client: str) -> SessionDetail:
        """The session of a client, wherever it is. Raises `ApiRefusal` (404)."""
        view = self._view
        session = view.state.sessions.get(client)
        if session is not None and is_connected(session):
            return await self._detail(session, view.node_id)
        question = ClientQuestion(client)
        answers, missing = await self._everywhere.ask_others("session", question, FoundSession)
        for answer in answers:
            if answer.found is not None:
                return answer.found
        recorded = view.recorded.sessions.get(client)
        if recorded is not None:
            return await self._detail(recorded, recorded.owner or view.node_id)
        if missing:
            text = ", ".join(f"{each.node} ({each.reason})" for each in missing)
            raise ApiRefusal(503, f"no session {shown(client)} here, and not asked: {text}")
        raise ApiRefusal(404, f"there is no session {shown(client)}")

    async def _connected_one(self, question: ClientQuestion) -> FoundSession:
        view = self._view
        session = view.state.sessions.get(question.client)
        if session is None or not is_connected(session) or is_hidden(session):
            return FoundSession()
        return FoundSession(await self._detail(session, view.node_id))

    # Changes

    async def _disconnect(self, call: Call) -> Disconnected:
        client = call[CLIENT]
        row = (await self._find(client)).session
        if not row.connected:
            raise ApiRefusal(404, f"client {shown(client)} is not connected")
        call.before = {"address": row.address, "node": row.node, "user": row.user}
        question = ClientQuestion(client, call.get(REASON) or "")
        if row.node == self._view.node_id:
            return await self._disconnect_here(question)
        return await self._everywhere.ask(row.node, "disconnect", question, Disconnected)

    async def _disconnect_here(self, question: ClientQuestion) -> Disconnected:
        self._changes.disconnect(question.client, question.reason)
        return Disconnected(question.client, self._view.node_id)

    async def _end(self, call: Call) -> SessionRow:
        row = (await self._find(call[CLIENT])).session
        call.before = row
        await self._changes.end(row)
        return row

    async def _move(self, call: Call) -> Moved:
        found = await self._find(call[CLIENT])
        moved = await self._changes.move(found, call.body(MovePlan))
        call.before, call.after = found.positions, moved
        return moved


def _query(call: Call, which: str) -> SessionQuery:
    sort = call[SORT]
    return SessionQuery(
        which,
        call.get(SEARCH) or "",
        call.get(USER) or "",
        sort,
        call[DESCENDING],
        call[LIMIT],
        place_after(call, is_number=sort in NUMBERS),
    )


def _cut(query: SessionQuery, parts: list[SessionPage]) -> SessionPage:
    """The page of the parts of all nodes. A client that has just moved counts at one node only."""
    best: BestRows[SessionRow] = BestRows(query.limit, None, descending=query.descending)
    known: set[str] = set()
    matched = sum(part.matched for part in parts)
    for part in parts:
        for row in part.sessions:
            if row.client in known:
                matched -= 1
                continue
            known.add(row.client)
            best.add((getattr(row, query.sort), row.client), row)
    return SessionPage(best.page(), matched, best.following())

"""Sessions and clients: lists, one session, and what an operator does with one.

A client id is a parameter of the query, because it may contain any character. In a cluster a node
lists the clients connected to it, and the node that was asked adds the sessions away, which every
node knows from the log.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Flag, Text
from holdfast.api.log.session_history import AGES_MAX, times_of
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.routes.session_changes import (
    ClientQuestion,
    Disconnected,
    Moved,
    MovePlan,
    SessionChanges,
)
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
from holdfast.node.session.session import Session
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

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

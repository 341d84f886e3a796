"""Bans by hand, and the lock-outs of all nodes: list, set, lift.

A ban is a record in the log. The reply to a change comes after its commit, and each node of a
cluster applies the record, so a node that was away or joins later has the ban too. A lock-out is in
the memory of one node. Lifting a name ends its ban and its lock-outs at all nodes that reply.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Final

from msgspec import Meta, Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, bad_request
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.pages import (
    AFTER,
    LIMIT,
    PAGE_MAX,
    AbsentNode,
    BestRows,
    Place,
    place_after,
)
from holdfast.api.views.slices import ITEMS
from holdfast.node.admission.bans import BANS_MAX, BadBanName, Ban, ban_address
from holdfast.node.admission.limits import ADDRESS, CLIENT, USER
from holdfast.node.admission.lockouts import LockedName
from holdfast.node.admission.meters import bounded_name
from holdfast.node.node_state import NodeState
from holdfast.node.state.ban_records import present_bans, record_ban, record_lift
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

WAIT_S: Final = 5.0
"""The most seconds that the reply to a change waits for its record."""
DURATION_S_MAX: Final = 10 * 365 * 86_400
NAME_CHARACTERS_MAX: Final = 65_535
REASON_CHARACTERS_MAX: Final = 200
BAN: Final = "ban"
LOCKOUT: Final = "lockout"

Name = Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)]


class NewBan(Struct, forbid_unknown_fields=True):
    """A ban to set: of a `client` id, a `user`, or an `address`."""

    client: Name = ""
    user: Name = ""
    address: Annotated[str, Meta(max_length=64)] = ""
    """An IP address or a network like 192.0.2.0/24. An IPv6 address stands for its /64."""
    duration_s: Annotated[int, Meta(ge=0, le=DURATION_S_MAX)] = 0
    """0: until it is lifted."""
    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)] = ""
    """A text for the client and the log."""


class BanRow(Struct):
    """A ban or a lock-out. Times are in microseconds since 1970."""

    scope: str
    """client, user or address."""
    name: str
    """The name; of one with more than 200 characters the beginning and a digest."""
    kind: str
    """ban, or lockout after failed authentications."""
    until_us: int
    """The end; 0: when it is lifted."""
    reason: str = ""
    since_us: int = 0
    """The time of the ban; 0: a lock-out."""
    by: str = ""
    """The operator who set the ban."""
    node: str = ""
    """The node with the lock-out; empty: a ban, which is on every node."""


class BanQuery(Struct, frozen=True, omit_defaults=True):
    """The choice of a page of bans and lock-outs."""

    scope: str = ""
    kind: str = ""
    search: str = ""
    limit: int = 100
    after: Place | None = None


class BanPage(Struct):
    """A page of bans and lock-outs, in the order of their names."""

    bans: list[BanRow]
    matched: int
    """Those that match, those of other pages included."""
    next: str = ""
    """The cursor of the next page; empty on the last one."""
    missing: list[AbsentNode] = []
    """The nodes whose lock-outs are not in this reply."""


class LockoutQuestion(Struct):
    """The lock-out of a name, to be ended."""

    scope: str
    name: str


class LiftedLockout(Struct):
    """Whether a node had a lock-out and has ended it."""

    node: str
    is_lifted: bool


class Lifted(Struct):
    """A name that may connect again."""

    scope: str
    name: str
    was_banned: bool
    lockouts: list[str]
    """The nodes at which it was locked out."""
    missing: list[AbsentNode] = []
    """The nodes that were not asked about their lock-outs."""


CLIENT_ID: Final = Text("client", "a client id", most=NAME_CHARACTERS_MAX)
USER_NAME: Final = Text("user", "a user", most=NAME_CHARACTERS_MAX)
IP_ADDRESS: Final = Text("address", "an IP address or a network", most=64)
SCOPE: Final = Text("scope", "of this scope only", choices=(CLIENT, USER, ADDRESS))
KIND: Final = Text("kind", "of this kind only", choices=(BAN, LOCKOUT))
SEARCH: Final = Text("search", "a part of the name or the reason", most=256)


class BanRoutes:
    """The routes of bans and lock-outs."""

    def __init__(self, view: OwnNode, everywhere: Everywhere) -> None:
        self._view = view
        self._everywhere = everywhere
        everywhere.offer("lockouts", BanQuery, self._lockouts_here)
        everywhere.offer("lift-lockout", LockoutQuestion, self._lift_lockout_here)

    def endpoints(self) -> list[Endpoint]:
        v1 = "/api/v1"
        return [
            Endpoint("GET", f"{v1}/bans", Scope.VIEWER, "bans and lock-outs, page by page",
                     self._list, BanPage, (SCOPE, KIND, SEARCH, LIMIT, AFTER), refusals=(503,)),
            Endpoint("POST", f"{v1}/ban", Scope.OPERATOR,
                     "ban a client id, a user, or an address, and end its connections",
                     self._ban, BanRow, body=NewBan,
                     audited=("client", "user", "address", "duration_s", "reason"),
                     refusals=(409, 503)),
            Endpoint("DELETE", f"{v1}/ban", Scope.OPERATOR,
                     "lift the ban and the lock-outs of a name", self._lift, Lifted,
                     (CLIENT_ID, USER_NAME, IP_ADDRESS), refusals=(404, 503)),
        ]  # fmt: skip

    # List

    async def _list(self, call: Call) -> BanPage:
        query = BanQuery(
            call.get(SCOPE) or "",
            call.get(KIND) or "",
            call.get(SEARCH) or "",
            call[LIMIT],
            place_after(call),
        )
        parts: list[BanPage] = []
        missing: list[AbsentNode] = []
        if query.kind != LOCKOUT:
            state = self._view.state
            bans = (None if ban is None else _ban_row(ban) for ban in present_bans(state))
            parts.append(await self._scan(query, bans))
        if query.kind != BAN:
            answers, missing = await self._everywhere.ask_others("lockouts", query, BanPage)
            parts += [await self._lockouts_here(query), *answers]
        best: BestRows[BanRow] = BestRows(query.limit, None, descending=False)
        for part in parts:
            for row in part.bans:
                best.add(_place(row), row)
        matched = sum(part.matched for part in parts)
        return BanPage(best.page(), matched, best.following(), missing)

    async def _lockouts_here(self, query: BanQuery) -> BanPage:
        if not 0 < query.limit <= PAGE_MAX:
            raise ApiRefusal(400, "a question of another version")
        return await self._scan(query, self._lockout_rows())

    def _lockout_rows(self) -> Iterator[BanRow | None]:
        state = self._view.state
        table = state.admission.lockouts
        for scope, name in table.names():
            found = table.get(scope, name)
            if found is None or found.until <= state.now:
                yield None
            else:
                yield _lockout_row(found, state, self._view.node_id)

    async def _scan(self, query: BanQuery, rows: Iterator[BanRow | None]) -> BanPage:
        best: BestRows[BanRow] = BestRows(query.limit, query.after, descending=False)
        search = query.search.casefold()

        def steps() -> Iterator[None]:
            for number, row in enumerate(rows):
                if number % ITEMS == 0:
                    yield
                if row is None or (query.scope and row.scope != query.scope):
                    continue
                if not search or search in f"{row.name}\n{row.reason}".casefold():
                    best.add(_place(row), row)

        await self._view.slices.run(steps())
        return BanPage(best.page(), best.matched)

    # Changes

    async def _ban(self, call: Call) -> BanRow:
        wanted = call.body(NewBan)
        scope, name = _target(wanted.client, wanted.user, wanted.address)
        state = self._view.state
        before = state.bans.get(scope, name)
        if before is None:
            await self._make_room()
            state = self._view.state
        now_us = state.wall_us
        until_us = now_us + wanted.duration_s * 1_000_000 if wanted.duration_s else 0
        ban = Ban(scope, name, until_us, wanted.reason, call.caller.name, now_us)
        call.before = None if before is None else _ban_row(before)
        call.after = row = _ban_row(ban)
        await self._recorded(partial(record_ban, state, ban))
        fields: dict[str, object] = {
            "scope": scope,
            "name": name,
            "duration_s": wanted.duration_s,
            "reason": wanted.reason,
            "by": ban.by,
        }
        state.note("warning", "banned", fields)
        return row

    async def _make_room(self) -> None:
        """Drops the bans that have ended, if there is no room for one more. Raises `ApiRefusal`."""
        bans = self._view.state.bans
        if len(bans) < BANS_MAX:
            return
        await self._view.slices.run(_ended(self._view.state))
        if len(bans) >= BANS_MAX:
            raise ApiRefusal(409, f"there are {BANS_MAX} bans, which is the limit: lift others")

    async def _lift(self, call: Call) -> Lifted:
        scope, name = self._listed(call)
        state = self._view.state
        ban = state.bans.get(scope, name)
        was_banned = ban is not None and not ban.is_over(state.wall_us)
        if ban is not None:
            call.before = _ban_row(ban)
        # Also without a ban: one may be on its way to the log, or this node may lag behind the node
        # that has banned the name. The ban would stay.
        await self._recorded(partial(record_lift, state, scope, name))
        question = LockoutQuestion(scope, name)
        others, missing = await self._everywhere.ask_others("lift-lockout", question, LiftedLockout)
        answers = [await self._lift_lockout_here(question), *others]
        nodes = [each.node for each in answers if each.is_lifted]
        if not was_banned and not nodes:
            if missing:
                text = ", ".join(f"{each.node} ({each.reason})" for each in missing)
                raise ApiRefusal(503, f"{scope} {shown(name)} has no ban; not asked: {text}")
            raise ApiRefusal(404, f"{scope} {shown(name)} has no ban and is not locked out")
        call.after = lifted = Lifted(scope, name, was_banned, nodes, missing)
        self._view.state.note(
            "info", "ban_lifted", {"scope": scope, "name": name, "by": call.caller.name}
        )
        return lifted

    def _listed(self, call: Call) -> tuple[str, str]:
        """The scope and name of a request, which may be as the list shows it."""
        state = self._view.state
        given = (call.get(CLIENT_ID) or "", call.get(USER_NAME) or "", call.get(IP_ADDRESS) or "")
        named = [each for each in zip((CLIENT, USER, ADDRESS), given, strict=True) if each[1]]
        if len(named) == 1:
            for table in (state.bans, state.admission.lockouts):
                if table.get(*named[0]) is not None:
                    return named[0]
        return _target(*given)

    async def _lift_lockout_here(self, question: LockoutQuestion) -> LiftedLockout:
        lockouts = self._view.state.admission.lockouts
        is_lifted = lockouts.lift(question.scope, question.name)
        return LiftedLockout(self._view.node_id, is_lifted)

    async def _recorded(self, change: Callable[[Callable[[str], None]], None]) -> None:
        """Appends a record and waits for its commit. Raises `ApiRefusal` (503)."""
        await self._view.commit(change, "the bans", WAIT_S)
        self._view.broker.touch()


def _target(client: str, user: str, address: str) -> tuple[str, str]:
    """The scope and name of a ban. Raises `ApiRefusal` (400)."""
    if sum(map(bool, (client, user, address))) != 1:
        raise bad_request("give one of client, user and address")
    if not address:
        return (CLIENT, bounded_name(client)) if client else (USER, bounded_name(user))
    try:
        return ADDRESS, ban_address(address)
    except BadBanName as error:
        raise bad_request(f"address: {error}") from None


def _ended(state: NodeState) -> Iterator[None]:
    """The removal of the bans that have ended."""
    for number, (scope, name) in enumerate(state.bans.names()):
        if number % ITEMS == 0:
            yield
        ban = state.bans.get(scope, name)
        if ban is not None and ban.is_over(state.wall_us):
            state.bans.lift(scope, name)


def _ban_row(ban: Ban) -> BanRow:
    return BanRow(ban.scope, ban.name, BAN, ban.until_us, ban.reason, ban.since_us, ban.by)


def _lockout_row(lockout: LockedName, state: NodeState, node: str) -> BanRow:
    until_us = state.wall_us + round((lockout.until - state.now) * 1e6)
    return BanRow(lockout.scope, lockout.name, LOCKOUT, until_us, lockout.reason, node=node)


def _place(row: BanRow) -> Place:
    return row.name, f"{row.scope} {row.kind} {row.node}"

"""Endpoints of access: login, users, tokens and the audit."""

import asyncio
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from holdfast.api.access.audit import AuditAnswer, AuditEntry, AuditLog, AuditQuestion
from holdfast.api.access.gate import CredentialGate, cookie_of
from holdfast.api.endpoints import (
    ApiRefusal,
    Call,
    Caller,
    Endpoint,
    Text,
    Whole,
    bad_request,
)
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.views.pages import AbsentNode, BadCursor, decode_place, encode_place
from holdfast.security.access import changes
from holdfast.security.access.access_file import NAME, AccessError, StoredToken
from holdfast.security.access.changes import Change
from holdfast.security.access.credentials import Unauthenticated
from holdfast.security.access.scopes import ROLES, Scope
from holdfast.security.access.sessions import COOKIE, SESSION_S
from holdfast.security.http.requests import shown

T = TypeVar("T")
logger = logging.getLogger("holdfast")

HASHES_MAX: Final = 8
"""The most passwords that are hashed or wait for it. One thread hashes them, with 19 MiB."""
AUDIT_LINES_MAX: Final = 500

RoleName = Annotated[
    str,
    Meta(description="viewer, reader, operator or admin", extra_json_schema={"enum": list(ROLES)}),
]
Password = Annotated[str, Meta(max_length=changes.PASSWORD_BYTES_MAX)]


class Login(Struct, forbid_unknown_fields=True):
    """The credentials of a user, or a token."""

    user: Annotated[str, Meta(max_length=64)] = ""
    password: Password = ""
    token: Annotated[str, Meta(max_length=256)] = ""
    """Instead of user and password. The session has the role of the token, and ends with it."""


class NewUser(Struct, forbid_unknown_fields=True):
    """A user to add."""

    name: str
    role: RoleName
    password: Password


class UserChange(Struct, forbid_unknown_fields=True):
    """The new role or password of a user; empty: no change."""

    role: Annotated[str, Meta(extra_json_schema={"enum": [*ROLES, ""]})] = ""
    password: Password = ""


class NewToken(Struct, forbid_unknown_fields=True):
    """A token to make. `valid_s` 0: it does not expire."""

    role: RoleName
    valid_s: Annotated[int, Meta(ge=0, le=changes.VALID_S_MAX)] = 0
    note: str = ""


class WhoView(Struct):
    """The caller of a request."""

    name: str
    role: str
    """The role, or "admin" for local processes while access is not set up."""


class UserView(Struct):
    """A user. Times are in seconds since 1970; 0: never."""

    name: str
    role: str
    created_s: int
    used_s: int = 0


class TokenInfo(Struct):
    """A token without its secret. Times are in seconds since 1970; 0: never."""

    id: str
    role: str
    note: str
    created_s: int
    created_by: str
    expires_s: int
    used_s: int = 0


class MadeToken(Struct):
    """A new token. Nothing shows its text again."""

    id: str
    token: str
    expires_s: int


class AuditPage(Struct):
    """A page of the audit of all nodes, the newest entry first. `next` continues it, if there are
    more. The entries of the `missing` nodes are not in it."""

    entries: list[AuditEntry]
    next: str | None
    missing: list[AbsentNode]


USER_NAME: Final = Text("name", "the name of the user", in_path=True, most=64)
TOKEN_ID: Final = Text("id", "the id of the token", in_path=True, most=64)
LIMIT: Final = Whole("limit", "the most entries", least=1, most=AUDIT_LINES_MAX, default=100)
BEFORE: Final = Text("before", "`next` of the page before", most=1000)


class AccessRoutes:
    """The endpoints of the login, of users, of tokens and of the audit."""

    def __init__(self, gate: CredentialGate, audit: AuditLog) -> None:
        self._gate = gate
        self._audit = audit
        self._credentials = gate.credentials
        self._threads = ThreadPoolExecutor(1, "admin-password")
        self._hashes = 0
        self._everywhere: Everywhere | None = None

    def share(self, everywhere: Everywhere) -> None:
        """Answers the questions of the other nodes about this node's audit, and asks them."""
        self._everywhere = everywhere
        everywhere.offer("audit", AuditQuestion, self._audit.page)
        self._audit.ask = everywhere.ask

    def close(self) -> None:
        """Ends the thread that hashes passwords."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def endpoints(self) -> list[Endpoint]:
        v1, admin = "/api/v1", Scope.ADMIN
        return [
            Endpoint("POST", f"{v1}/login", Scope.OPEN, "log in, for a session cookie",
                     self._login, WhoView, body=Login, audited=("user",), refusals=(401, 409, 429)),
            Endpoint("GET", f"{v1}/login", Scope.VIEWER, "the name and role of the caller",
                     self._who, WhoView),
            Endpoint("DELETE", f"{v1}/login", Scope.OPEN, "log out", self._logout),
            Endpoint("GET", f"{v1}/users", admin, "all users", self._users, list[UserView]),
            Endpoint("POST", f"{v1}/users", admin, "add a user", self._add_user, UserView,
                     body=NewUser, audited=("name", "role"), refusals=(409, 429, 503)),
            Endpoint("PUT", f"{v1}/users/{{name}}", admin, "change the role or password of a user",
                     self._change_user, UserView, (USER_NAME,), UserChange, audited=("role",),
                     refusals=(404, 409, 429, 503)),
            Endpoint("DELETE", f"{v1}/users/{{name}}", admin, "remove a user", self._remove_user,
                     None, (USER_NAME,), refusals=(404, 409, 503)),
            Endpoint("GET", f"{v1}/tokens", admin, "all tokens", self._tokens, list[TokenInfo]),
            Endpoint("POST", f"{v1}/tokens", admin, "make a token", self._add_token, MadeToken,
                     body=NewToken, audited=("role", "valid_s", "note"), refusals=(409, 503)),
            Endpoint("DELETE", f"{v1}/tokens/{{id}}", admin, "remove a token", self._remove_token,
                     None, (TOKEN_ID,), refusals=(404, 409, 503)),
            Endpoint("GET", f"{v1}/audit", admin, "the changes over the port, newest first",
                     self._list_audit, AuditPage, (LIMIT, BEFORE), refusals=(503,)),
        ]  # fmt: skip

    async def _login(self, call: Call) -> Response:
        login = call.body(Login)
        credentials, remote = self._credentials, call.caller.remote
        if login.token:
            return await self._login_by_token(login, call)
        if not credentials.data.users:
            raise ApiRefusal(409, "there are no users: `holdfast access user add` makes one")
        wait_s = credentials.throttle.begin(remote, login.user, time.monotonic())
        if wait_s:
            headers = {"Retry-After": str(math.ceil(wait_s))}
            raise ApiRefusal(429, "too many attempts to log in: try again later", headers)
        hashed = await self._in_thread(credentials.verify, login.user, login.password)
        if not hashed:
            logger.warning("login_failed user=%r remote=%r", login.user, remote)
            raise ApiRefusal(401, "user or password is wrong")
        credentials.throttle.succeeded(remote, login.user, time.monotonic())
        user = credentials.data.users.get(login.user)
        if user is None:
            raise ApiRefusal(401, "user or password is wrong")
        secret = credentials.begin_session(login.user, hashed)
        return self._logged_in(WhoView(f"user {login.user}", user.role), secret, call)

    async def _login_by_token(self, login: Login, call: Call) -> Response:
        """Exchanges a token for a session, so that a page need not keep the token."""
        if login.user or login.password:
            raise bad_request("give user and password, or token")
        credentials, remote = self._credentials, call.caller.remote
        try:
            try:
                owner, secret = credentials.begin_token_session(login.token)
            except Unauthenticated:
                # The token may be newer than the last look at the file, also the first one.
                if not credentials.may_look():
                    raise
                await asyncio.to_thread(credentials.refresh)
                owner, secret = credentials.begin_token_session(login.token)
        except Unauthenticated as error:
            logger.warning("login_failed token='' remote=%r", remote)
            raise ApiRefusal(401, str(error)) from None
        return self._logged_in(WhoView(owner.name, owner.scope.role), secret, call)

    def _logged_in(self, who: WhoView, secret: str, call: Call) -> Response:
        call.caller = Caller(who.name, Scope.OPEN, call.caller.remote)
        # A login of a browser that has a session replaces it.
        self._credentials.sessions.end(cookie_of(call.request))
        response = Response(msgspec.json.encode(who), media_type="application/json")
        _set_cookie(response, secret, SESSION_S, call)
        return response

    async def _logout(self, call: Call) -> Response:
        secret = cookie_of(call.request)
        session = self._credentials.session_of(secret)
        if session is not None:
            call.caller = Caller(session.owner, Scope.OPEN, call.caller.remote)
        self._credentials.sessions.end(secret)
        response = Response(b"{}", media_type="application/json")
        _set_cookie(response, "", 0, call)
        return response

    async def _who(self, call: Call) -> WhoView:
        return WhoView(call.caller.name, call.caller.scope.role)

    async def _users(self, call: Call) -> list[UserView]:
        return [self._user_view(name) for name in sorted(self._credentials.data.users)]

    def _user_view(self, name: str) -> UserView:
        user = self._credentials.data.users[name]
        used_s = self._credentials.last_use_s(f"user {name}")
        return UserView(name, user.role, user.created_s, used_s)

    async def _add_user(self, call: Call) -> UserView:
        wanted = call.body(NewUser)
        _check_role(wanted.role)
        self._check_own(wanted.name)
        if not NAME.fullmatch(wanted.name):
            raise bad_request("name: 1 to 64 of A-Z a-z 0-9 . _ @ -")
        hashed = await self._hashed(wanted.password)
        now_s = int(time.time())
        await self._change(changes.add_user(wanted.name, wanted.role, hashed, now_s))
        call.after = {"name": wanted.name, "role": wanted.role}
        return self._user_view(wanted.name)

    async def _change_user(self, call: Call) -> UserView:
        name, wanted = call[USER_NAME], call.body(UserChange)
        if wanted.role:
            _check_role(wanted.role)
        before = self._present_role(name)
        self._check_own(name)
        hashed = await self._hashed(wanted.password) if wanted.password else ""
        await self._change(changes.change_user(name, wanted.role, hashed))
        call.before = {"name": name, "role": before}
        call.after = {"name": name, "role": wanted.role or before, "password": bool(hashed)}
        return self._user_view(name)

    async def _remove_user(self, call: Call) -> None:
        name = call[USER_NAME]
        call.before = {"name": name, "role": self._present_role(name)}
        self._check_own(name)
        await self._change(changes.remove_user(name))

    def _check_own(self, name: str) -> None:
        """Refuses the change of a user or token of the configuration. Raises `ApiRefusal` (409)."""
        given = self._credentials.given
        if name in given.users or name in given.tokens:
            raise ApiRefusal(409, f"{name!r} is in the file of admin.access_file: change it there")

    def _present_role(self, name: str) -> str:
        """The role of a user. Raises `ApiRefusal` (404)."""
        user = self._credentials.data.users.get(name)
        if user is None:
            raise ApiRefusal(404, f"there is no user {name!r}")
        return user.role

    async def _tokens(self, call: Call) -> list[TokenInfo]:
        tokens = self._credentials.data.tokens.items()
        return [self._token_info(id, token) for id, token in tokens]

    def _token_info(self, id: str, token: StoredToken) -> TokenInfo:
        return TokenInfo(
            id,
            token.role,
            token.note,
            token.created_s,
            token.created_by,
            token.expires_s,
            self._credentials.last_use_s(f"token {id}"),
        )

    async def _add_token(self, call: Call) -> MadeToken:
        wanted = call.body(NewToken)
        _check_role(wanted.role)
        now_s = int(time.time())
        make = changes.add_token(wanted.role, now_s, wanted.valid_s, wanted.note, call.caller.name)
        id, token = await self._change(make)
        made = self._credentials.data.tokens[id]
        call.after = self._token_info(id, made)
        return MadeToken(id, token, made.expires_s)

    async def _remove_token(self, call: Call) -> None:
        id = call[TOKEN_ID]
        token = self._credentials.data.tokens.get(id)
        if token is None:
            raise ApiRefusal(404, f"there is no token {id!r}")
        call.before = self._token_info(id, token)
        self._check_own(id)
        await self._change(changes.remove_token(id))

    async def _list_audit(self, call: Call) -> AuditPage:
        before, limit = call.get(BEFORE), call[LIMIT]
        question = AuditQuestion(None if before is None else _audit_key(before), limit)
        answers = [await self._audit.page(question)]
        missing: list[AbsentNode] = []
        if self._everywhere is not None:
            others, missing = await self._everywhere.ask_others("audit", question, AuditAnswer)
            answers += others
        entries = [entry for answer in answers for entry in answer.entries]
        entries.sort(key=lambda entry: (entry.time_us, entry.node), reverse=True)
        has_more = len(entries) > limit or any(answer.has_more for answer in answers)
        entries = entries[:limit]
        following = None
        if has_more and entries:
            following = encode_place((entries[-1].time_us, entries[-1].node))
        return AuditPage(entries, following, missing)

    async def _hashed(self, password: str) -> str:
        try:
            return await self._in_thread(changes.hash_admin_password, password)
        except AccessError as error:
            raise bad_request(str(error)) from None

    async def _change(self, make: Change[T]) -> T:
        """Carries out a change. Raises `ApiRefusal` (409, 503)."""
        credentials, agreed = self._credentials, self._gate.agreed
        try:
            make = changes.kept_admin(make, time.time(), credentials.given)
            if agreed is not None:
                return await agreed.change(make)
            return await asyncio.to_thread(self._credentials.change, make)
        except AccessError as error:
            raise ApiRefusal(409, str(error)) from None

    async def _in_thread(self, work: Any, *arguments: str) -> str:
        """Hashes in the thread. Raises `ApiRefusal` (429) when too many wait."""
        if self._hashes >= HASHES_MAX:
            raise ApiRefusal(429, "too many passwords are checked: try again", {"Retry-After": "1"})
        self._hashes += 1
        try:
            loop = asyncio.get_running_loop()
            result: str = await loop.run_in_executor(self._threads, work, *arguments)
            return result
        finally:
            self._hashes -= 1


def _audit_key(text: str) -> tuple[int, str]:
    """The key in `next` of a page. Raises `ApiRefusal` (400)."""
    try:
        time_us, node = decode_place(text)
    except BadCursor as error:
        raise bad_request(f"before={shown(text)}: {error}") from None
    if not isinstance(time_us, int):
        raise bad_request(f"before={shown(text)}: a cursor is the `next` of an earlier page")
    return time_us, node


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise bad_request(f"role {shown(role)}: one of {', '.join(ROLES)}")


def _set_cookie(response: Response, secret: str, age_s: float, call: Call) -> None:
    """Sets the cookie of the session, or removes it. Scripts cannot read it, and the browser sends
    it with requests of this port's own pages only."""
    response.set_cookie(
        COOKIE,
        secret,
        max_age=int(age_s),
        secure=call.request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    response.headers["Cache-Control"] = "no-store"

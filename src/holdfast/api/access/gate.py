"""Guards a broker's admin port: decides who may call which endpoint, and records changes.

Without users and tokens the port serves processes of this machine only, with every scope, as the
data directory is theirs anyway. Requests from other machines then receive 403, except for the
scopes in `admin.open`. With users or tokens every request needs credentials, whatever its address.
In a cluster the nodes agree on them (`agreed`), and a new node serves nobody before it knows them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Final

from msgspec import Struct
from starlette.requests import Request

from holdfast.api.access.agreed import AgreedAccess
from holdfast.api.access.audit import AuditLog
from holdfast.api.dispatch import AccessGate, remote_of
from holdfast.api.endpoints import ApiRefusal, Call, Caller, Endpoint
from holdfast.security.access.access_file import AccessError
from holdfast.security.access.credentials import AdminCredentials, Unauthenticated
from holdfast.security.access.scopes import Scope
from holdfast.security.access.sessions import COOKIE
from holdfast.security.access.throttle import Buckets
from holdfast.security.http.connections import note_proof

logger = logging.getLogger("holdfast")

REFRESH_S: Final = 1.0
"""The seconds between two looks at the file of users and tokens."""
NOT_SET_UP: Final = (
    "without users and tokens this port serves processes of its own machine only: make a token"
    " there with `holdfast access token create --data DIR --role admin`"
)
NOT_KNOWN: Final = (
    "this node does not know the users and tokens of its cluster yet: wait, ask another node, or"
    " give it some with `holdfast access` and --data on its machine"
)
ANYBODY: Final = "anybody"
"""The caller of a route that is open, until a login proves another one."""
LOGINS_RECORDED: Final = 60
"""The logins and logouts of one caller that the audit records at once."""
LOGINS_REGAIN_S: Final = 10.0
"""The seconds after which one more is recorded."""
COOKIE_BYTES_MAX: Final = 8192
FORWARDED: Final = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""The headers by which a proxy announces itself."""
OpenScopes = Callable[[], frozenset[Scope]]


class ShownCredentials(Struct, frozen=True):
    """The headers of a request by which its author is identified, and the address."""

    authorization: str
    cookie: str
    """The secret in the session cookie, or ""."""
    remote: str
    is_forwarded: bool
    """Whether a proxy has sent the request. Its own address then proves nothing about the author:
    a proxy on this machine has a loopback address for everybody."""


def shown_credentials(header: Callable[[str], str | None], remote: str) -> ShownCredentials:
    """The credentials of a request. `header` returns the value of a header, or None."""
    return ShownCredentials(
        header("Authorization") or "",
        session_secret(header("Cookie") or ""),
        remote,
        any(header(name) is not None for name in FORWARDED),
    )


class CredentialGate(AccessGate):
    """The gate of one admin port. `decide` reads memory only, and any thread may call it."""

    def __init__(
        self,
        credentials: AdminCredentials,
        open_scopes: OpenScopes,
        audit: AuditLog,
        agreed: AgreedAccess | None = None,
    ) -> None:
        """`open_scopes`: the scopes that need no credentials, besides `Scope.OPEN`. `agreed`: the
        agreement of the cluster's nodes; None: this node's file alone counts."""
        self.credentials = credentials
        self.agreed = agreed
        self._open_scopes = open_scopes
        self._audit = audit
        self._logins = Buckets(LOGINS_RECORDED, LOGINS_REGAIN_S)

    async def admit(self, request: Request, endpoint: Endpoint) -> Caller:
        shown = _shown_by(request)
        try:
            caller = self.decide(shown, endpoint.scope, is_early=endpoint.before_users)
        except ApiRefusal as error:
            if error.status != 401 or not (shown.authorization or shown.cookie):
                raise
            # The token may be newer than the last look at the file.
            caller = await asyncio.to_thread(self.decide_now, shown, endpoint.scope)
        if caller.name != ANYBODY:
            note_proof(request)
        return caller

    def still_admits(self, request: Request, endpoint: Endpoint) -> bool:
        try:
            self.decide(_shown_by(request), endpoint.scope, is_use=False)
        except ApiRefusal:
            return False
        return True

    def decide_now(self, shown: ShownCredentials, scope: Scope) -> Caller:
        """`decide`, after another look at the file for unknown credentials. It may block."""
        try:
            return self.decide(shown, scope)
        except ApiRefusal as error:
            if error.status != 401 or not self.credentials.may_look():
                raise
        self.credentials.refresh()
        return self.decide(shown, scope)

    def decide(
        self, shown: ShownCredentials, scope: Scope, *, is_use: bool = True, is_early: bool = False
    ) -> Caller:
        """The caller with these credentials. `is_early`: see `Endpoint.before_users`. Raises
        `ApiRefusal` (401, 403, 503)."""
        if scope is Scope.OPEN or scope in self._open_scopes():
            return Caller(ANYBODY, scope, shown.remote)
        if not self.credentials.is_set_up:
            if shown.is_forwarded or not is_loopback_address(shown.remote):
                raise ApiRefusal(403, NOT_SET_UP)
            if not is_early and self.agreed is not None and self.agreed.is_locked():
                raise ApiRefusal(503, NOT_KNOWN)
            return Caller("local", Scope.ADMIN, shown.remote)
        try:
            identity = self.credentials.identify(shown.authorization, shown.cookie, is_use=is_use)
        except Unauthenticated as error:
            raise ApiRefusal(401, str(error), {"WWW-Authenticate": "Bearer"}) from None
        if identity.scope < scope:
            role = identity.scope.role
            raise ApiRefusal(403, f"this needs the role {scope.role}, {identity.name} has {role}")
        return Caller(identity.name, identity.scope, shown.remote)

    async def record(self, call: Call, status: int, error: str) -> None:
        if call.endpoint.scope is Scope.OPEN:
            # Failed logins, and logouts without a session, would let strangers fill the log. A
            # failed login has a line of its own.
            if status >= 400 or call.caller.name == ANYBODY:
                return
            # So would a role that may change nothing.
            if not self._logins.take(call.caller.name, time.monotonic()):
                logger.warning("audit_logins_not_recorded who=%r", call.caller.name)
                return
        await self._audit.append(call, status, error)

    async def watch(self) -> None:
        """Reads the file of users again whenever it changes, and follows what the nodes of the
        cluster agree on, until cancelled."""
        changed = asyncio.Event()
        if self.agreed is not None:
            self.agreed.call_on_change(changed.set)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await changed.wait()
            changed.clear()
            try:
                # A directory that hangs delays this loop only.
                await asyncio.to_thread(self._look)
            except AccessError as error:
                logger.error("access_use_not_saved error=%r", str(error))
            if self.agreed is not None:
                await self.agreed.follow()

    def close(self) -> None:
        """Writes the times of last use. Called in a thread, at the end."""
        try:
            self.credentials.save_uses(at_once=True)
        except AccessError as error:
            logger.error("access_use_not_saved error=%r", str(error))

    def _look(self) -> None:
        self.credentials.refresh()
        self.credentials.save_uses()


def _shown_by(request: Request) -> ShownCredentials:
    return shown_credentials(request.headers.get, remote_of(request))


def cookie_of(request: Request) -> str:
    """The secret in the session cookie, or ""."""
    return session_secret(request.headers.get("cookie", ""))


def session_secret(header: str) -> str:
    """The secret of the session in a Cookie header, or ""."""
    if COOKIE not in header or len(header) > COOKIE_BYTES_MAX:
        return ""
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def is_loopback_address(remote: str) -> bool:
    """Whether the address of a client is on this machine. IPv6 may contain one of IPv4."""
    try:
        address = ip_address(remote.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback

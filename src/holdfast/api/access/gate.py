"""The gate of a broker's admin port: who may call which endpoint, and the record of changes.

Without users and tokens the port serves processes of this machine only, with every scope, as the
data directory is theirs anyway. Requests from other machines then receive 403, except for the
scopes in `admin.open`. With users or tokens every request needs credentials, whatever its address.
"""

import asyncio
import logging
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Final

from starlette.requests import Request

from holdfast.api.access.audit import AuditLog
from holdfast.api.dispatch import AccessGate, remote_of
from holdfast.api.endpoints import ApiRefusal, Call, Caller, Endpoint
from holdfast.security.access.access_file import AccessError
from holdfast.security.access.credentials import AdminCredentials, Unauthenticated
from holdfast.security.access.scopes import Scope
from holdfast.security.access.sessions import COOKIE

logger = logging.getLogger("holdfast")

REFRESH_S: Final = 1.0
"""The seconds between two looks at the file of users and tokens."""
NOT_SET_UP: Final = (
    "without users and tokens this port serves processes of its own machine only: make a token"
    " there with `holdfast access token create --data DIR --role admin`"
)
COOKIE_BYTES_MAX: Final = 8192
OpenScopes = Callable[[], frozenset[Scope]]


class CredentialGate(AccessGate):
    """The gate of one admin port. `decide` reads memory only, and any thread may call it."""

    def __init__(
        self, credentials: AdminCredentials, open_scopes: OpenScopes, audit: AuditLog
    ) -> None:
        """`open_scopes`: the scopes that need no credentials, besides `Scope.OPEN`."""
        self.credentials = credentials
        self._open_scopes = open_scopes
        self._audit = audit

    async def admit(self, request: Request, endpoint: Endpoint) -> Caller:
        authorization = request.headers.get("authorization", "")
        cookie = cookie_of(request)
        remote = remote_of(request)
        arguments = (authorization, cookie, remote, endpoint.scope)
        try:
            return self.decide(*arguments)
        except ApiRefusal as error:
            if error.status != 401 or not (authorization or cookie):
                raise
        # The token may be newer than the last look at the file.
        return await asyncio.to_thread(self.decide_now, *arguments)

    def decide_now(self, authorization: str, cookie: str, remote: str, scope: Scope) -> Caller:
        """`decide`, after another look at the file for unknown credentials. It may block."""
        try:
            return self.decide(authorization, cookie, remote, scope)
        except ApiRefusal as error:
            if error.status != 401 or not self.credentials.may_look():
                raise
        self.credentials.refresh()
        return self.decide(authorization, cookie, remote, scope)

    def decide(self, authorization: str, cookie: str, remote: str, scope: Scope) -> Caller:
        """The caller with these credentials. Raises `ApiRefusal` (401, 403)."""
        if scope is Scope.OPEN or scope in self._open_scopes():
            return Caller("anybody", scope, remote)
        if not self.credentials.is_set_up:
            if not is_loopback_address(remote):
                raise ApiRefusal(403, NOT_SET_UP)
            return Caller("local", Scope.ADMIN, remote)
        try:
            identity = self.credentials.identify(authorization, cookie)
        except Unauthenticated as error:
            raise ApiRefusal(401, str(error), {"WWW-Authenticate": "Bearer"}) from None
        if identity.scope < scope:
            role = identity.scope.role
            raise ApiRefusal(403, f"this needs the role {scope.role}, {identity.name} has {role}")
        return Caller(identity.name, identity.scope, remote)

    async def record(self, call: Call, status: int, error: str) -> None:
        # Failed logins would let strangers fill the log; they have a line of their own.
        if call.endpoint.scope is Scope.OPEN and status >= 400:
            return
        await self._audit.append(call, status, error)

    async def watch(self) -> None:
        """Read the file of users again whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                # A directory that hangs delays this loop only.
                await asyncio.to_thread(self._look)
            except AccessError as error:
                logger.error("access_use_not_saved error=%r", str(error))

    def close(self) -> None:
        """Write the times of last use. Called in a thread, at the end."""
        try:
            self.credentials.save_uses(at_once=True)
        except AccessError as error:
            logger.error("access_use_not_saved error=%r", str(error))

    def _look(self) -> None:
        self.credentials.refresh()
        self.credentials.save_uses()


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

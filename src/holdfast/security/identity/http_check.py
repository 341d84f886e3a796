"""An HTTP service as a source of identity: one POST for each CONNECT says who the client is and
what it may do.

The request is JSON with the members of `LoginRequest`. The reply is status 200 with JSON::

    {"result": "allow", "username": "alice", "publish": ["plant/#"], "subscribe": ["plant/#"],
     "lasts_s": 3600}

`result` is allow, deny or ignore ("not mine"). All other members are optional. Status 401 and 403
mean deny. Everything else (another status, no JSON, no reply in time) refuses the client with 0x88.
"""

import asyncio
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.security.acl import AclError, given_rules
from holdfast.security.identity.identity import (
    HTTP,
    NOT_AUTHORIZED,
    UNAVAILABLE,
    Answer,
    ClientIdentity,
    LoginRefusal,
    LoginRequest,
)

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("holdfast")

REPLY_BYTES_MAX: Final = 65_536
"""The most bytes of a reply."""
REMEMBERED_MAX: Final = 10_000
"""The most accepted logins that are remembered."""
FAILURE_LINE_S: Final = 10.0
"""The least seconds between two log lines about a service that fails."""
_UNAVAILABLE: Final = LoginRefusal(UNAVAILABLE, "the authentication service does not reply")


class HttpReply(msgspec.Struct):
    """The reply of the service. Unknown members are ignored."""

    result: Literal["allow", "deny", "ignore"]
    username: str | None = None
    publish: list[str] | None = None
    subscribe: list[str] | None = None
    lasts_s: float | None = None
    """The seconds after which the connection ends; None: it does not."""
    reason: str = ""


class HttpSource:
    """The source of identity that asks a service. Its connections are pooled."""

    method = HTTP

    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str],
        timeout_s: float,
        connections: int,
        remember_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`remember_s`: for how long an accepted login is accepted again without a request."""
        self._url = url
        self._headers = headers
        self._timeout_s = timeout_s
        self._connections = connections
        self._remember_s = remember_s
        self._clock = clock
        self._client: httpx.AsyncClient | None = None
        self._is_started = asyncio.Event()
        self._secret = secrets.token_bytes(32)
        # By keyed digest of the request: (the identity, until when it counts). The oldest first.
        self._remembered: dict[bytes, tuple[ClientIdentity, float]] = {}
        self._noted_at = float("-inf")

    async def start(self) -> None:
        import httpx

        limits = httpx.Limits(
            max_connections=self._connections, max_keepalive_connections=self._connections
        )
        # Importing certificates takes milliseconds.
        self._client = await asyncio.to_thread(
            lambda: httpx.AsyncClient(
                limits=limits, timeout=self._timeout_s, follow_redirects=False, trust_env=False
            )
        )
        self._is_started.set()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def authenticate(self, request: LoginRequest) -> Answer:
        key = self._key(request)
        now = self._clock()
        known = self._remembered.get(key)
        if known is not None:
            if now < known[1]:
                return known[0]
            del self._remembered[key]
        answer = await self._ask(request, now)
        if isinstance(answer, ClientIdentity) and self._remember_s > 0:
            until = now + self._remember_s
            if answer.expires_s:
                until = min(until, answer.expires_s)
            if len(self._remembered) >= REMEMBERED_MAX:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[key] = (answer, until)
        return answer

    def _key(self, request: LoginRequest) -> bytes:
        """A digest that nobody can compute from a leaked table. The port of the client's address
        changes with each connection."""
        address = request.address.rpartition(":")[0]
        parts = msgspec.json.encode(
            [
                request.client_id,
                request.username,
                request.password,
                request.certificate_name,
                address,
                request.listener,
            ]
        )
        return hashlib.blake2b(parts, key=self._secret, digest_size=32).digest()

    async def _ask(self, request: LoginRequest, now: float) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                # The first clients come while the library is loaded.
                await self._is_started.wait()
                assert self._client is not None
                status, body = await self._post(self._client, encode_request(request))
            return read_reply(status, body, request, now)
        except Exception as error:  # noqa: BLE001
            # Errors of httpx, of sockets and of the reply: nothing is known about the client.
            self._note(error)
            return _UNAVAILABLE

    async def _post(self, client: "httpx.AsyncClient", content: bytes) -> tuple[int, bytes]:
        async with client.stream(
            "POST", self._url, content=content, headers=self._headers
        ) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > REPLY_BYTES_MAX:
                    raise ValueError(f"a reply of more than {REPLY_BYTES_MAX} bytes")
            return response.status_code, bytes(body)

    def _note(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._noted_at >= FAILURE_LINE_S:
            self._noted_at = now
            text = str(error) or type(error).__name__
            logger.error("http_check_failed url=%r error=%r", self._url, text)


def encode_request(request: LoginRequest) -> bytes:
    """The body of a request. A password that is no UTF-8 is replaced in part, and so refused."""
    password = request.password
    return msgspec.json.encode(
        {
            "client_id": request.client_id,
            "username": request.username,
            "password": None if password is None else password.decode("utf-8", "replace"),
            "certificate_name": request.certificate_name,
            "address": request.address.rpartition(":")[0],
            "listener": request.listener,
        }
    )


def read_reply(status: int, body: bytes, request: LoginRequest, now: float) -> Answer:
    """The meaning of a reply at a time in seconds of Unix time. Raises `ValueError`."""
    if status in (401, 403):
        return LoginRefusal(NOT_AUTHORIZED, "the authentication service refuses the client")
    if status != 200:
        raise ValueError(f"status {status}")
    try:
        reply = msgspec.json.decode(body, type=HttpReply)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the reply: {error}") from None
    if reply.result == "ignore":
        return None
    if reply.result == "deny":
        text = reply.reason[:200] or "the authentication service refuses the client"
        return LoginRefusal(NOT_AUTHORIZED, text)
    username = request.username if reply.username is None else reply.username or None
    expires_s = 0.0
    if reply.lasts_s is not None:
        if not math.isfinite(reply.lasts_s) or not 0 < reply.lasts_s < 1e10:
            raise ValueError("the reply: lasts_s must be a number of seconds above 0")
        expires_s = now + reply.lasts_s
    if reply.publish is None and reply.subscribe is None:
        return ClientIdentity(username, "http", None, expires_s)
    try:
        rules = given_rules(
            "http", reply.publish or [], reply.subscribe or [], username, request.client_id
        )
    except AclError as error:
        raise ValueError(f"the reply: {error}") from None
    return ClientIdentity(username, "http", rules, expires_s)

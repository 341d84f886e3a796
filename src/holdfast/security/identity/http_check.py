"""An HTTP service as a source of identity: one POST for each CONNECT says who the client is and
what it may do.

The request is JSON with the members of `LoginRequest`. The reply is status 200 with JSON::

    {"result": "allow", "username": "alice", "publish": ["plant/#"], "subscribe": ["plant/#"],
     "lasts_s": 3600}

`result` is allow, deny or ignore ("not mine"). All other members are optional. Status 401 and 403
mean deny. Everything else (another status, no JSON, no reply in time) refuses the client with 0x88.
"""

import hashlib
import math
import secrets
import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from holdfast.security.acl import AclError, given_rules
from holdfast.security.identity.http_service import HttpService
from holdfast.security.identity.identity import (
    HTTP,
    NOT_AUTHORIZED,
    UNAVAILABLE,
    Answer,
    ClientIdentity,
    LoginRefusal,
    LoginRequest,
)
from holdfast.security.identity.topic_check import TopicCheck

REMEMBERED_MAX: Final = 10_000
"""The most accepted logins that are remembered."""
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
    """The source of identity that asks a service. Its connections are pooled, and shared
    with the check of topics."""

    method = HTTP

    def __init__(
        self,
        url: str,
        service: HttpService,
        *,
        remember_s: float,
        topics: TopicCheck | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`url` "": the service is not asked who a client is. `remember_s`: for how long an
        accepted login is accepted again without a request. `topics`: the check of topics."""
        self.topics = topics
        self.authenticates = bool(url)
        self.authorises = topics is not None
        self._url = url
        self._service = service
        self._remember_s = remember_s
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        # By keyed digest of the request: (the identity, until when it counts). The oldest first.
        self._remembered: dict[bytes, tuple[ClientIdentity, float]] = {}

    async def start(self) -> None:
        await self._service.start()

    async def close(self) -> None:
        await self._service.close()

    async def authenticate(self, request: LoginRequest) -> Answer:
        if not self._url:
            return None
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
            status, body = await self._service.post(self._url, encode_request(request))
            return parse_reply(body, status, request, now)
        except Exception as error:  # noqa: BLE001
            # Errors of httpx, of sockets and of the reply: nothing is known about the client.
            self._service.note(self._url, error)
            return _UNAVAILABLE


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


def parse_reply(body: bytes, status: int, request: LoginRequest, now: float) -> Answer:
    """The meaning of a reply at a time in seconds of Unix time. Raises `ValueError`."""
    if status in (401, 403):
        return LoginRefusal(NOT_AUTHORIZED, "the authentication service refuses the client")
    if status != 200:
        raise ValueError(f"status {status}")
    try:
        reply = msgspec.json.decode(body, type=HttpReply)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the reply: {error}") from None
    if reply.result == "ignore":
        return None
    if reply.result == "deny":
        text = reply.reason[:200] or "the authentication service refuses the client"
        return LoginRefusal(NOT_AUTHORIZED, text)
    username = request.username if reply.username is None else reply.username or None
    if username is not None and "\0" in username:
        raise ValueError("the reply: username must be a text without NUL")
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

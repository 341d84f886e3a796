"""An HTTP service that decides about topics: one POST for each client, topic and action.

The request is JSON. Names that services for other brokers expect are in it twice::

    {"client_id": "dev-1", "username": "alice", "address": "10.0.0.7", "listener": "l",
     "action": "publish", "topic": "plant/7", "clientid": "dev-1", "acc": 2}

| reply | meaning |
|---|---|
| 200, `{"result": "allow"}`, "deny" or "ignore" | that |
| 200, `{"ok": true}` or false; the name in any case | allow, deny |
| 200 with the text `ok` or without a body; 204 | allow |
| 401, 403 | deny |
| anything else, or none in time | failed: the packet is refused for now |
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.security.identity.asked_rules import (
    ALLOW,
    DENIED,
    FAILED,
    IGNORE,
    SUBSCRIBE,
)
from holdfast.security.identity.http_service import HttpService

REMEMBERED_MAX: Final = 50_000
"""The most decisions that are remembered for all clients, some 200 bytes each."""
ACCESS_WRITE: Final = 2
ACCESS_SUBSCRIBE: Final = 4
"""The values of "acc", which are those of Mosquitto's plugins."""


class TopicQuestion(Struct, frozen=True):
    """A client, an action and a topic, or a filter without `$share/GROUP/`."""

    client_id: str
    username: str | None
    address: str
    listener: str
    action: str
    topic: str


class TopicCheck:
    """The decisions of a service, remembered for a time."""

    def __init__(
        self,
        url: str,
        service: HttpService,
        remember_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._service = service
        self._remember_s = remember_s
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        # By keyed digest of the question: (the verdict, until when it counts). The oldest first.
        self._remembered: dict[bytes, tuple[str, float]] = {}

    @property
    def timeout_s(self) -> float:
        """The most seconds of one question."""
        return self._service.timeout_s

    async def decide(self, question: TopicQuestion) -> tuple[str, float]:
        """The verdict, and for how many seconds it counts. FAILED is not remembered."""
        content = encode_question(question)
        key = hashlib.blake2b(content, key=self._secret, digest_size=16).digest()
        now = self._clock()
        known = self._remembered.get(key)
        if known is not None:
            if now < known[1]:
                return known[0], known[1] - now
            del self._remembered[key]
        try:
            status, body = await self._service.post(self._url, content)
            verdict = parse_verdict(body, status)
        except Exception as error:  # noqa: BLE001
            # Errors of httpx, of sockets and of the reply: nothing is known about the topic.
            self._service.note(self._url, error)
            return FAILED, 0.0
        if len(self._remembered) >= REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]
        self._remembered.pop(key, None)
        self._remembered[key] = (verdict, now + self._remember_s)
        # What the reply took counts, too.
        return verdict, max(0.0, now + self._remember_s - self._clock())


def encode_question(question: TopicQuestion) -> bytes:
    """The body of a request."""
    return msgspec.json.encode(
        {
            "client_id": question.client_id,
            "username": question.username,
            "address": question.address,
            "listener": question.listener,
            "action": question.action,
            "topic": question.topic,
            "clientid": question.client_id,
            "acc": ACCESS_SUBSCRIBE if question.action == SUBSCRIBE else ACCESS_WRITE,
        }
    )


def parse_verdict(body: bytes, status: int) -> str:
    """The verdict of a reply. Raises `ValueError`."""
    if status in (401, 403):
        return DENIED
    if status not in (200, 204):
        raise ValueError(f"status {status}")
    text = body.strip()
    if not text or text == b"ok":
        return ALLOW
    try:
        reply = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the reply: {error}") from None
    members = {name.lower(): value for name, value in reply.items()}
    result, ok = members.get("result"), members.get("ok")
    if result in (ALLOW, DENIED, IGNORE) and isinstance(result, str):
        return result
    if result is None and isinstance(ok, bool):
        return ALLOW if ok else DENIED
    raise ValueError("the reply: 'result' must be allow, deny or ignore")

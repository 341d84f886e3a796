"""Refuses requests of web pages, in front of an ASGI application."""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from holdfast.security.http.requests import Hosts, page_refusal

logger = logging.getLogger("holdfast")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def refusal_body(text: str) -> object:
    """The JSON of a refusal by default."""
    return {"error": text}


class Guard:
    """The gate of an application. Every request passes it, also one without a route."""

    def __init__(
        self,
        application: Application,
        hosts: Hosts | None,
        body: Callable[[str], object] = refusal_body,
        pages: str = "",
    ) -> None:
        """`hosts` None allows any name. `body` makes the JSON of a refusal. `pages`: the beginning
        of the paths of public pages, to which any site may have a link; "": there are none."""
        self._application = application
        self._hosts = hosts
        self._body = body
        self._pages = pages

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        text = self._refusal(scope) if scope["type"] == "http" else ""
        if not text:
            await self._application(scope, receive, send)
            return
        logger.warning("http_refused path=%r error=%r", scope["path"], text)
        data = json.dumps(self._body(text)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
        ]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    def _refusal(self, scope: Message) -> str:
        def sent(name: bytes) -> list[str]:
            return [value.decode("latin-1") for key, value in scope["headers"] if key == name]

        hosts = sent(b"host")
        own = [each for each in hosts if self._hosts is not None and self._hosts.knows(each)]
        text = ""
        if not (self._pages and self._is_link(scope, sent(b"sec-fetch-dest"))):
            text = page_refusal(sent(b"origin"), sent(b"sec-fetch-site"), own)
        if not text and self._hosts is not None:
            text = self._hosts.refusal(hosts)
        return text

    def _is_link(self, scope: Message, kinds: list[str]) -> bool:
        """Whether a browser opens a page as its document, and so shows it to its user only."""
        is_page = scope["method"] == "GET" and scope["path"].startswith(self._pages)
        return is_page and kinds == ["document"]

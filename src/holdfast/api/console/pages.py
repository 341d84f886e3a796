"""Serves the files of the console.

The files are public, like the login: everything that a page shows comes from the admin API, which
checks the credentials of each request. The files are read and compressed in a thread at the first
request, so a console that nobody opens costs nothing.
"""

import asyncio
import gzip
import re
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from holdfast.config.listener import Listener

PREFIX: Final = "/console/"
INDEX: Final = "index.html"
MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""The endings of the files that are served, and their media types."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'{};"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy: nothing from elsewhere, no inline script and no inline style. `{}`
is for the WebSocket listeners of this broker, to which a page may be an MQTT client."""
HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Each load asks whether the files have changed, so an upgraded broker has its own console.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


HOST: Final = re.compile(r"[A-Za-z0-9.-]{1,253}")

COMMENTS: Final = re.compile(r"/\*\*.*?\*/[ \t]*|^[ \t]*//[^\n]*$", re.DOTALL | re.MULTILINE)
"""The comments of the console's own modules: types and explanations, a third of their size. No
string of theirs contains the begin of one, or one of SPACES."""
INDENTS: Final = re.compile(r"^[ \t]+", re.MULTILINE)
SPACES: Final = re.compile(r" (=>|={1,3}|!==|&&|\|\||\?\?|[<>]=) |(?<={) | (?=})")
"""The spaces of operators and braces, which separate nothing: 6 kB."""
STYLE_SPACES: Final = re.compile(r"\s*([{};,])\s*|(?<=:)\s+")
"""The spaces of the style that separate nothing: no selector has one behind a colon."""


class PageFile(Struct, frozen=True):
    """A file of the console, as it is sent."""

    media_type: str
    data: bytes
    compressed: bytes
    tag: str
    """The entity tag: with it, a browser asks for a file that it has."""


def console_routes(listeners: Callable[[], Sequence[Listener]]) -> list[BaseRoute]:
    """The routes of the console, and of the way to it from the port's root. `listeners`: those of
    MQTT, as they are now."""

    async def respond(request: Request) -> Response:
        response = await _respond(request)
        policy = policy_for(request.url.hostname or "", listeners())
        response.headers["Content-Security-Policy"] = policy
        return response

    to_console = RedirectResponse("console/", 307, HEADERS)
    return [
        Route("/", to_console, methods=["GET"]),
        Route("/console", to_console, methods=["GET"]),
        Route(PREFIX + "{name:path}", respond, methods=["GET"]),
    ]


def policy_for(host: str, listeners: Sequence[Listener]) -> str:
    """The policy of a page at this host. A policy cannot name IPv6 addresses."""
    if not HOST.fullmatch(host):
        return POLICY.format("")
    return POLICY.format(
        "".join(
            f" {'wss' if each.certificate else 'ws'}://{host}:{each.port}"
            for each in listeners
            if each.transport == "websocket" and each.port
        )
    )


async def _respond(request: Request) -> Response:
    files = await asyncio.to_thread(page_files)
    file = files.get(request.path_params["name"] or INDEX)
    if file is None:
        text = f"the console has no such file: it begins at {PREFIX}\n"
        return Response(text, 404, HEADERS, "text/plain; charset=utf-8")
    headers = {**HEADERS, "ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(file.compressed, 200, headers, file.media_type)
    return Response(file.data, 200, headers, file.media_type)


@cache
def page_files() -> dict[str, PageFile]:
    """The files by path below `/console/`. Reads and compresses about 200 kB."""
    found: dict[str, PageFile] = {}
    _gather(resources.files("holdfast.api.console") / "site", "", found)
    return found


def _gather(directory: Traversable, prefix: str, found: dict[str, PageFile]) -> None:
    for entry in directory.iterdir():
        media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if entry.is_dir():
            _gather(entry, f"{prefix}{entry.name}/", found)
        elif media_type is not None:
            data = entry.read_bytes()
            if not prefix.startswith("vendor"):
                text = without_comments(data.decode())
                if entry.name.endswith(".css"):
                    text = STYLE_SPACES.sub(lambda match: match[1] or "", text)
                elif entry.name.endswith(".js"):
                    text = SPACES.sub(lambda match: match[1] or "", text)
                data = text.encode()
            tag = f'"{sha256(data).hexdigest()[:16]}"'
            compressed = gzip.compress(data, 6, mtime=0)
            found[prefix + entry.name] = PageFile(media_type, data, compressed, tag)


def without_comments(text: str) -> str:
    """The text of a file without comments and indents. Lines keep their numbers, for errors."""
    return INDENTS.sub("", COMMENTS.sub(lambda match: "\n" * match[0].count("\n"), text))

"""One HTTP request in the event loop, where a long poll can be cancelled at any moment."""

import asyncio
import io
import json
import ssl
from http.client import HTTPException, HTTPResponse
from typing import Any, Final, cast
from urllib.parse import urlsplit

from holdfast.security.tls import client_context, explained

ANSWER_BYTES_MAX: Final = 32 << 20
"""The most bytes of a response: enough for all MEMBERS_MAX members of a federation."""


class ManagerUnreachable(Exception):
    """The manager gives no usable response now. A later request may succeed."""


class ManagerRefuses(Exception):
    """The manager rejects the request. `status` is 4xx, the text is the manager's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Received:
    """A stand-in for the socket that `http.client` reads a response from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


class ManagerHttp:
    """Sends requests to one manager, each on a connection of its own."""

    def __init__(self, url: str, ca: str = "", certificate: str = "", key: str = "") -> None:
        """Read the PEM files for https, see `client_context`. Raises `TlsError` if that fails."""
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._host = parts.hostname or ""
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = client_context(ca, certificate, key)
        self._port = parts.port or (443 if self._tls else 80)
        self._authority = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/")

    async def ask(self, method: str, path: str, body: object, token: str, timeout_s: float) -> Any:
        """Send a request and return the data of the response's envelope.

        Raises `ManagerUnreachable` without a usable response, `ManagerRefuses` on 4xx.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(self._request(method, path, body, token))
        except TimeoutError:
            raise ManagerUnreachable(f"{self.url} gives no answer in {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            reason = explained(error) if isinstance(error, OSError) else str(error)
            raise ManagerUnreachable(f"{self.url}: {reason}") from error
        status, text = self._parsed(answer)
        try:
            envelope = json.loads(text)
            data, description = envelope["data"], str(envelope["description"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ManagerUnreachable(
                f"{self.url} answers {status} and is no topology manager"
            ) from None
        if status == 200:
            return data
        if 400 <= status < 500 and status not in (408, 429):
            raise ManagerRefuses(status, description)
        raise ManagerUnreachable(f"{self.url} answers {status}: {description}")

    def _request(self, method: str, path: str, body: object, token: str) -> bytes:
        payload = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._authority}",
            "Connection: close",
            f"Content-Length: {len(payload)}",
        ]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        return "\r\n".join([*lines, "", ""]).encode() + payload

    async def _exchange(self, request: bytes) -> bytes:
        name = self._host if self._tls else None
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, server_hostname=name
        )
        try:
            writer.write(request)
            await writer.drain()
            answer = bytearray()
            while data := await reader.read(1 << 16):
                answer += data
                if len(answer) > ANSWER_BYTES_MAX:
                    raise ManagerUnreachable(f"{self.url} answers more than it may")
            return bytes(answer)
        finally:
            writer.close()

    def _parsed(self, answer: bytes) -> tuple[int, bytes]:
        # `HTTPResponse` calls no other method of a socket.
        response = HTTPResponse(cast(Any, _Received(answer)))
        try:
            response.begin()
            return response.status, response.read()
        except (HTTPException, OSError, ValueError) as error:
            raise ManagerUnreachable(f"{self.url} answers no HTTP: {error!r}") from error

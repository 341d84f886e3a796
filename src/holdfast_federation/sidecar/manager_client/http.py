"""One HTTP request in the event loop, where a long poll can be cancelled at any moment."""

import asyncio
import json
import ssl
from typing import Any, Final
from urllib.parse import urlsplit

import h11

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


class ManagerHttp:
    """Sends requests to one manager, each on a connection of its own."""

    def __init__(self, url: str, ca: str = "", certificate: str = "", key: str = "") -> None:
        """Reads the PEM files for https, see `client_context`. Raises `TlsError` if that fails."""
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._host = parts.hostname or ""
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = client_context(ca, certificate, key)
        self._port = parts.port or (443 if self._tls else 80)
        self._authority = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/")

    async def request(
        self, method: str, path: str, body: object, token: str, timeout_s: float
    ) -> Any:
        """Sends a request and returns the data of the response's envelope.

        Raises `ManagerUnreachable` without a usable response, `ManagerRefuses` on 4xx.
        """
        return self._data(*await self._request(method, path, body, token, timeout_s))

    async def text(self, path: str, token: str, timeout_s: float) -> str:
        """Returns the text at a path. Raises as `ask`."""
        status, text = await self._request("GET", path, None, token, timeout_s)
        return text.decode() if status == 200 else str(self._data(status, text))

    def _data(self, status: int, text: bytes) -> Any:
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

    async def _request(
        self, method: str, path: str, body: object, token: str, timeout_s: float
    ) -> tuple[int, bytes]:
        payload = b"" if body is None else json.dumps(body).encode()
        headers = [
            ("Host", self._authority),
            ("Connection", "close"),
            ("Content-Length", str(len(payload))),
        ]
        if token:
            headers.append(("Authorization", f"Bearer {token}"))
        try:
            async with asyncio.timeout(timeout_s):
                request = h11.Request(method=method, target=self._path + path, headers=headers)
                return await self._exchange(request, payload)
        except TimeoutError:
            raise ManagerUnreachable(f"{self.url} gives no answer in {timeout_s:g} s") from None
        except OSError as error:
            raise ManagerUnreachable(f"{self.url} cannot be asked: {explained(error)}") from error
        except h11.ProtocolError as error:
            raise ManagerUnreachable(f"{self.url} answers no HTTP: {error!r}") from error

    async def _exchange(self, request: h11.Request, payload: bytes) -> tuple[int, bytes]:
        name = self._host if self._tls else None
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, server_hostname=name
        )
        http = h11.Connection(h11.CLIENT)
        status, text = 0, bytearray()
        try:
            for part in (request, h11.Data(data=payload), h11.EndOfMessage()):
                writer.write(http.send(part) or b"")
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(1 << 16))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    text += event.data
                    if len(text) >= ANSWER_BYTES_MAX:
                        raise ManagerUnreachable(f"{self.url} answers more than it may")
            return status, bytes(text)
        finally:
            writer.close()

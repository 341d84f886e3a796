"""A kept-alive connection to one node's admin port; `holdfast.api.log_routes` has the interface."""

import json
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Final

Server = tuple[str, int]
"""Host and admin port."""

TIMEOUT_S: Final = 15.0
"""For connecting and for every read of the socket."""
ANSWER_BYTES_MAX: Final = 16 << 20
"""Of what is no data."""
ERROR_TEXT_BYTES: Final = 500


class ServerError(Exception):
    """No server gave a usable answer. The text says which server said what."""


class ConnectionFailed(Exception):
    """This server does not answer now; another one, or the same one later, may."""


class AdminConnection:
    def __init__(self, server: Server) -> None:
        self.server = server
        self._connection: HTTPConnection | None = None

    @property
    def name(self) -> str:
        return f"{self.server[0]}:{self.server[1]}"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, path: str) -> dict[str, Any]:
        """A JSON object. Raises ConnectionFailed, or ServerError for what will not get better."""
        is_used = self._connection is not None
        try:
            self.ask("GET", path)
            response = self.answer()
        except ConnectionFailed:
            if not is_used:
                raise
            # Servers close connections that are idle for some seconds.
            self.ask("GET", path)
            response = self.answer()
        body = self.text_of(response)
        if response.status != 200:
            raise ServerError(self.complaint(path, response.status, body))
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ServerError(f"{self.name}: the answer to {path} is no JSON object")
        return found

    def ask(self, method: str, path: str, body: bytes | None = None) -> None:
        """Send a request. Raises ConnectionFailed."""
        try:
            if self._connection is None:
                self._connection = HTTPConnection(*self.server, timeout=TIMEOUT_S)
            self._connection.request(method, path, body)
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error

    def answer(self) -> HTTPResponse:
        """To what was asked: with a status below 500. Raises ConnectionFailed."""
        assert self._connection is not None
        try:
            response = self._connection.getresponse()
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error
        if response.status >= 500:
            text = self.complaint("the request", response.status, self.text_of(response))
            self.close()
            raise ConnectionFailed(text)
        return response

    def text_of(self, response: HTTPResponse) -> bytes:
        """Raises ConnectionFailed."""
        try:
            # Of an answer in chunks nobody knows the length before its end.
            text = response.read(ANSWER_BYTES_MAX + 1)
            if len(text) > ANSWER_BYTES_MAX:
                raise HTTPException(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
            return text
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error

    def read_into(self, response: HTTPResponse, buffer: memoryview) -> None:
        """All of `buffer`. Raises ConnectionFailed."""
        done = 0
        try:
            while done < len(buffer):
                count = response.readinto(buffer[done:])
                if not count:
                    raise HTTPException(f"the answer ends after {done} bytes of {len(buffer)}")
                done += count
            # Also so that http.client knows that this answer is over.
            if response.read(1):
                raise HTTPException(
                    f"the answer is longer than the {len(buffer)} bytes it announced"
                )
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error

    def complaint(self, path: str, status: int, body: bytes) -> str:
        text = body[:ERROR_TEXT_BYTES].decode(errors="replace").strip()
        return f"{self.name}: {status} to {path}: {text}"

    def _failed(self, error: Exception) -> ConnectionFailed:
        self.close()
        return ConnectionFailed(f"{self.name}: {error or type(error).__name__}")

"""A kept-alive connection to the admin port of one node. `holdfast.api.log_routes` has the
interface."""

import json
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Final

Server = tuple[str, int]
"""The host and admin port of a node."""

TIMEOUT_S: Final = 15.0
"""The timeout in seconds for connecting and for every read of the socket."""
ANSWER_BYTES_MAX: Final = 16 << 20
"""The most bytes of a response that is no log data."""
ERROR_TEXT_BYTES: Final = 500
"""The most bytes of an error response that an error text quotes."""


class ServerError(Exception):
    """No server gave a usable response. The text says which server replied what."""


class ConnectionFailed(Exception):
    """This server does not respond now. Another one may, or the same one later."""


class AdminConnection:
    """One connection, opened when first used and again after a failure."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._connection: HTTPConnection | None = None

    @property
    def name(self) -> str:
        """The address of the server, for error texts."""
        return f"{self.server[0]}:{self.server[1]}"

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path.

        Raises ConnectionFailed, or ServerError for a failure that a later attempt will not fix.
        """
        is_used = self._connection is not None
        try:
            self.send_request("GET", path)
            response = self.receive_response()
        except ConnectionFailed:
            if not is_used:
                raise
            # Servers close connections that are idle for some seconds. So a used connection gets a
            # second attempt.
            self.send_request("GET", path)
            response = self.receive_response()
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

    def send_request(self, method: str, path: str, body: bytes | None = None) -> None:
        """Send a request. Raises ConnectionFailed."""
        try:
            if self._connection is None:
                self._connection = HTTPConnection(*self.server, timeout=TIMEOUT_S)
            self._connection.request(method, path, body)
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error

    def receive_response(self) -> HTTPResponse:
        """Receive the response to the last request, with a status below 500. Raises
        ConnectionFailed."""
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
        """Read the body of a response that is no log data. Raises ConnectionFailed."""
        try:
            # A chunked response does not announce its length, so the limit applies while reading.
            text = response.read(ANSWER_BYTES_MAX + 1)
            if len(text) > ANSWER_BYTES_MAX:
                raise HTTPException(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
            return text
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error

    def read_into(self, response: HTTPResponse, buffer: memoryview) -> None:
        """Fill all of `buffer` from the response. Raises ConnectionFailed."""
        done = 0
        try:
            while done < len(buffer):
                count = response.readinto(buffer[done:])
                if not count:
                    raise HTTPException(f"the answer ends after {done} bytes of {len(buffer)}")
                done += count
            # Reading past the end also makes http.client mark this response as complete.
            if response.read(1):
                raise HTTPException(
                    f"the answer is longer than the {len(buffer)} bytes it announced"
                )
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error

    def complaint(self, path: str, status: int, body: bytes) -> str:
        """Return the error text for a response with another status."""
        text = body[:ERROR_TEXT_BYTES].decode(errors="replace").strip()
        return f"{self.name}: {status} to {path}: {text}"

    def _failed(self, error: Exception) -> ConnectionFailed:
        self.close()
        return ConnectionFailed(f"{self.name}: {error or type(error).__name__}")

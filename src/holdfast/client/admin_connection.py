"""A blocking connection to the admin port of one node, kept alive between requests.

`holdfast.api` has the interface of the port.
"""

from contextlib import suppress
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from socket import SHUT_RDWR
from ssl import SSLError
from typing import IO, Final, TypeVar

from msgspec import MsgspecError, json

from holdfast.addresses import split_address
from holdfast.client.admin_access import NO_ACCESS, AdminAccess, AdminAccessError
from holdfast.security.tls import explained

T = TypeVar("T")

Server = tuple[str, int]
"""The host and admin port of a node."""

TIMEOUT_S: Final = 15.0
"""The timeout in seconds for connecting and for every read of the socket."""
ANSWER_BYTES_MAX: Final = 16 << 20
"""The most bytes of a response that is no log data."""
MISDIRECTED: Final = 421
"""The status of a node that does not store the log."""
LOG_SERVERS: Final = "Holdfast-Log-Servers"
"""The header of such a response with the admin ports of nodes that do."""
PIECE_BYTES: Final = 1 << 20
"""The bytes of a download that are in memory at a time."""
ERROR_TEXT_BYTES: Final = 500
"""The most bytes of an error response that an error text quotes."""


class AdminError(Exception):
    """A request failed. The text says why and what to do."""


class NoAnswer(AdminError):
    """No usable response was received. A later request may succeed, or one to another node."""


class Unanswered(NoAnswer):
    """The request may have been received, and may be carried out."""


class NoHttp(NoAnswer):
    """The response is no HTTP."""


class Misdirected(AdminError):
    """The node does not store the log. `servers` are the nodes that do."""

    def __init__(self, text: str, servers: list[Server]) -> None:
        super().__init__(text)
        self.servers = servers


class Busy(NoAnswer):
    """The server has no room for another connection now. It gets room when others end."""


class AdminConnection:
    """One connection, opened when first used and again after a failure."""

    def __init__(
        self,
        server: Server,
        timeout_s: float | None = None,
        access: AdminAccess = NO_ACCESS,
    ) -> None:
        self.server = server
        self._access = access
        self._timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._connection: HTTPConnection | None = None
        self._is_interrupted = False

    @property
    def name(self) -> str:
        """The address of the server, for error texts."""
        return f"{self.server[0]}:{self.server[1]}"

    def close(self) -> None:
        """Closes the connection. The next request opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """Ends the present request from another thread. It and all later ones raise NoAnswer."""
        self._is_interrupted = True
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            # The thread that uses the connection may close it at the same time.
            with suppress(OSError):
                sock.shutdown(SHUT_RDWR)

    def get(self, path: str, kind: type[T]) -> T:
        """Returns the JSON at a path.

        Raises NoAnswer, or AdminError for a failure that a later attempt will not fix.
        """
        return self.exchange("GET", path, None, kind)

    def exchange(self, method: str, path: str, body_sent: object, kind: type[T]) -> T:
        """Sends a request that may be repeated, with a JSON body unless that is None, and returns
        the JSON of its response. Raises like `get`."""
        data = None if body_sent is None else json.encode(body_sent)
        body = self.text_of(self._receive(method, path, data))
        try:
            return json.decode(body, type=kind)
        except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise AdminError(f"{self.name}: the answer to {path} is not usable: {error}") from None

    def download(self, path: str, file: IO[bytes], bytes_max: int) -> None:
        """Writes the body of a response to a file, from its beginning. Raises like `get`."""
        response = self._receive("GET", path, None)
        file.seek(0)
        file.truncate()
        size = 0
        while True:
            try:
                piece = response.read(PIECE_BYTES)
            except (OSError, HTTPException) as error:
                raise self._failed(error) from error
            if not piece:
                break
            size += len(piece)
            if size > bytes_max:
                raise self._unusable(f"an answer of more than {bytes_max} bytes")
            file.write(piece)
        if response.length:
            raise self._unusable(f"the answer ends {response.length} bytes early")

    def _receive(self, method: str, path: str, data: bytes | None) -> HTTPResponse:
        """Sends a request that may be repeated, and receives its response with status 200. Raises
        like `get`."""
        is_used = self._connection is not None
        try:
            self.send_request(method, path, data)
            response = self.receive_usable()
        except NoAnswer:
            if not is_used:
                raise
            # Servers close connections that are idle for some seconds. So a used connection gets a
            # second attempt.
            self.send_request(method, path, data)
            response = self.receive_usable()
        if response.status == 200:
            return response
        text = self.complaint(path, response.status, self.text_of(response))
        if response.status == MISDIRECTED:
            raise Misdirected(text, addresses_in(response.headers.get(LOG_SERVERS, "")))
        raise AdminError(text)

    def send_request(self, method: str, path: str, body: bytes | None = None) -> None:
        """Sends a request. Raises NoAnswer."""
        if self._is_interrupted:
            raise NoAnswer(f"{self.name}: the connection was closed here")
        try:
            if self._connection is None:
                self._connection = self._open()
                self._connection.connect()
        except AdminAccessError as error:
            raise AdminError(str(error)) from None
        except ConnectionRefusedError:
            self.close()
            raise NoAnswer(
                f"nothing listens on {self.name}: is the node running, and is that its --admin?"
            ) from None
        except OSError as error:
            self.close()
            text = explained(error) if isinstance(error, SSLError) else error.strerror or error
            raise NoAnswer(f"cannot reach {self.name}: {text}") from error
        try:
            self._connection.request(method, path, body, self._access.headers())
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error

    def _open(self) -> HTTPConnection:
        """The connection, not connected yet. Raises `AdminAccessError`."""
        context = self._access.context()
        if context is None:
            return HTTPConnection(*self.server, timeout=self._timeout_s)
        return HTTPSConnection(*self.server, timeout=self._timeout_s, context=context)

    def receive_response(self) -> HTTPResponse:
        """Receives the response to the last request. Raises NoAnswer."""
        assert self._connection is not None
        try:
            return self._connection.getresponse()
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error

    def receive_usable(self) -> HTTPResponse:
        """Receives a response with a status below 500. Raises NoAnswer."""
        response = self.receive_response()
        if response.status >= 500:
            body = self.text_of(response)
            text = self.complaint("the request", response.status, body)
            self.close()
            is_busy = response.status == 503 and not body and "Retry-After" in response.headers
            raise Busy(text) if is_busy else NoAnswer(text)
        return response

    def text_of(self, response: HTTPResponse) -> bytes:
        """Reads the body of a response that is no log data. Raises NoAnswer."""
        try:
            # A chunked response does not announce its length, so the limit applies while reading.
            text = response.read(ANSWER_BYTES_MAX + 1)
            if response.length and len(text) <= ANSWER_BYTES_MAX:
                # With a limit, http.client does not report a response that was cut short.
                raise IncompleteRead(text, response.length)
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error
        if len(text) > ANSWER_BYTES_MAX:
            raise self._unusable(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        return text

    def read_into(self, response: HTTPResponse, buffer: memoryview) -> None:
        """Fills all of `buffer` from the response. Raises NoAnswer."""
        done = 0
        try:
            while done < len(buffer):
                count = response.readinto(buffer[done:])
                if not count:
                    raise self._unusable(f"the answer ends after {done} bytes of {len(buffer)}")
                done += count
            # Reading past the end also makes http.client mark this response as complete.
            is_longer = response.read(1)
        except (OSError, HTTPException) as error:
            raise self._failed(error) from error
        if is_longer:
            raise self._unusable(f"the answer is longer than the {done} bytes it announced")

    def complaint(self, path: str, status: int, body: bytes) -> str:
        """Returns the error text for a response with another status."""
        text = body[:ERROR_TEXT_BYTES].decode(errors="replace").strip()
        more = "" if status != 401 else (
            ". Give a token: --token-file FILE, the option tokenFile, or the variable "
            "HOLDFAST_TOKEN"
        )  # fmt: skip
        return f"{self.name}: {status} to {path}: {text}{more}"

    def _unusable(self, text: str) -> NoAnswer:
        self.close()
        return NoAnswer(f"{self.name}: {text}")

    def _failed(self, error: OSError | HTTPException) -> NoAnswer:
        self.close()
        if isinstance(error, TimeoutError):
            return Unanswered(f"{self.name} does not answer within {self._timeout_s:g} s")
        if isinstance(error, OSError | IncompleteRead):
            return Unanswered(f"{self.name} has closed the connection: {error}")
        return NoHttp(f"{self.name} speaks no HTTP: {error!r}")


def addresses_in(text: str) -> list[Server]:
    """The addresses in a header. One that is none is left out: the text of the refusal has it."""
    found: list[Server] = []
    for each in text.split():
        with suppress(ValueError):
            found.append(split_address(each))
    return found

"""Frames that the broker and an I/O worker exchange over a stream of bytes.

A frame is a kind, the number of a connection, a length, and so many bytes. Numbers are chosen by
the worker. Frames of one connection arrive in the order in which they were sent.

| kind | from | content |
|---|---|---|
| OPENED | worker | a new connection: see `ClientArrival` |
| DATA | both | bytes from the client, or for it |
| CREDIT | both | the number of bytes that the receiver is done with: 0 for announcements |
| UPGRADING | worker | the number of bytes of an HTTP request that are buffered so far |
| ENDED | worker | the socket is closed: the last frame of a number |
| CLOSE | broker | close the socket after the bytes sent |
| CUT | broker | close the socket at once |
| NOTE | worker | a failure for the broker's log: see `FailureNote` |
| PING, PONG | broker, worker | the worker runs, and has sent all that it had received |
"""

from struct import Struct
from struct import error as StructError
from typing import Final

OPENED: Final = 1
DATA: Final = 2
CREDIT: Final = 3
UPGRADING: Final = 4
ENDED: Final = 5
CLOSE: Final = 6
CUT: Final = 7
NOTE: Final = 8
PING: Final = 9
PONG: Final = 10

PAYLOAD_BYTES_MAX: Final = 262_144
"""The most bytes of one frame's content. Longer data travels in several frames, so that a part of a
frame that waits for its rest is joined a few times only."""

_HEADER: Final = Struct("<BII")
_COUNT: Final = Struct("<I")
_OPENED: Final = Struct("<HH")
HEADER_BYTES: Final = _HEADER.size


class RelayError(Exception):
    """Bytes that are no frames. The other process is not the program that it should be."""


class RelayReader:
    """A cutter of one stream into frames: feed() the input, then call next() until it returns
    False. After a True, and until the next call, `kind` and `number` are the frame's, and
    buffer[start:end] its content."""

    def __init__(self) -> None:
        self.buffer = b""
        self.kind = 0
        self.number = 0
        self.start = 0
        self.end = 0
        self._position = 0

    def feed(self, data: bytes) -> None:
        """Adds input."""
        rest = len(self.buffer) - self._position
        self.buffer = self.buffer[self._position :] + data if rest else data
        self._position = 0

    def next(self) -> bool:
        """Whether a complete frame is there. Raises `RelayError`."""
        position = self._position
        start = position + HEADER_BYTES
        size = len(self.buffer)
        if start > size:
            return False
        kind, number, length = _HEADER.unpack_from(self.buffer, position)
        if not OPENED <= kind <= PONG or length > PAYLOAD_BYTES_MAX:
            raise RelayError(f"a frame of kind {kind} with {length} bytes")
        if start + length > size:
            return False
        self.kind = kind
        self.number = number
        self.start = start
        self.end = self._position = start + length
        return True

    def content(self) -> bytes:
        """The content of the frame."""
        return self.buffer[self.start : self.end]

    def count(self) -> int:
        """The content as a count of bytes. Raises `RelayError`."""
        if self.end - self.start != _COUNT.size:
            raise RelayError(f"a count of {self.end - self.start} bytes")
        (value,) = _COUNT.unpack_from(self.buffer, self.start)
        return int(value)


def frame(kind: int, number: int, content: bytes = b"") -> bytes:
    """A frame with at most PAYLOAD_BYTES_MAX bytes of content."""
    return _HEADER.pack(kind, number, len(content)) + content


def count_frame(kind: int, number: int, count: int) -> bytes:
    """A frame whose content is a count of bytes."""
    return _HEADER.pack(kind, number, _COUNT.size) + _COUNT.pack(count)


def add_data(out: list[bytes], number: int, data: bytes) -> int:
    """Appends the DATA frames for `data` to `out`. Returns their bytes, headers included."""
    size = len(data)
    if size <= PAYLOAD_BYTES_MAX:
        out.append(_HEADER.pack(DATA, number, size))
        out.append(data)
        return HEADER_BYTES + size
    total = 0
    for start in range(0, size, PAYLOAD_BYTES_MAX):
        part = data[start : start + PAYLOAD_BYTES_MAX]
        out.append(_HEADER.pack(DATA, number, len(part)))
        out.append(part)
        total += HEADER_BYTES + len(part)
    return total


class ClientArrival:
    """The content of OPENED: the listener's number, the client's host:port, and the user name in
    its certificate or ""."""

    def __init__(self, listener: int, remote: str, certificate_name: str) -> None:
        self.listener = listener
        self.remote = remote
        self.certificate_name = certificate_name

    def encode(self) -> bytes:
        remote = self.remote.encode()
        return _OPENED.pack(self.listener, len(remote)) + remote + self.certificate_name.encode()


def decode_arrival(content: bytes) -> ClientArrival:
    """Decodes the arrival of a client. Raises `RelayError` when it is malformed."""
    try:
        listener, length = _OPENED.unpack_from(content)
        names = content[_OPENED.size :]
        if length > len(names):
            raise RelayError(f"an address of {length} bytes in {len(names)}")
        return ClientArrival(listener, names[:length].decode(), names[length:].decode())
    except ValueError as error:
        raise RelayError(f"a connection without an address: {error}") from error
    except StructError as error:
        raise RelayError(f"a connection of {len(content)} bytes") from error

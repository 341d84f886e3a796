"""Limits for the HTTP connections of one port: their number, and their time without progress.

uvicorn has a timeout only after a response. A connection that sends nothing, sends a request byte
by byte, or does not read its response, would stay for ever.
"""

import asyncio
import logging
from typing import Any, Final

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("holdfast")

REQUEST_S: Final = 10.0
"""The seconds from the connection, or the response before, to the complete head of a request."""
BODY_S: Final = 30.0
"""The seconds from a request's head to the end of its body."""
UNREAD_S: Final = 30.0
"""The seconds that a response may wait for its reader to take 48 KiB, and its end to be taken."""
SWEEP_S: Final = 1.0
"""The seconds between two checks of the connections."""
BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)
"""The response to a connection without room."""

INVALID: Final = "this is no HTTP request, or its first line and headers have more than 64 KiB"


class ConnectionBounds:
    """The connections of one port, the oldest first."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self._connections: dict[BoundedConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def enter(self, connection: "BoundedConnection") -> bool:
        """Add a connection. The oldest one without a complete request is closed if there is no
        room. False: all of them have one.

        Counter-example without the bodies: strangers who send the body of a login byte by byte
        keep everybody else away for BODY_S."""
        if len(self._connections) >= self.connections_max:
            oldest = next((one for one in self._connections if one.is_incomplete), None)
            if oldest is None:
                logger.warning("http_connections_full connections=%d", self.connections_max)
                return False
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[connection] = None
        if self._timer is None:
            self._timer = connection.loop.call_later(SWEEP_S, self._sweep, connection.loop)
        return True

    def leave(self, connection: "BoundedConnection") -> None:
        """Remove a connection."""
        self._connections.pop(connection, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for connection in list(self._connections):
            connection.check(now)
        if self._connections:
            self._timer = loop.call_later(SWEEP_S, self._sweep, loop)


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP connection within `ConnectionBounds`. A subclass made with the port sets
    `bounds`."""

    bounds: ConnectionBounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._since = self.loop.time()
        """The start of the present state: waiting for a request, serving it, or closing."""
        self._paused_at: float | None = None
        super().connection_made(transport)
        if not self.bounds.enter(self):
            transport.write(BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.leave(self)
        super().connection_lost(exc)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_incomplete(self) -> bool:
        """Whether the client has yet to send a request, or the rest of one."""
        return not self.is_busy or self.cycle.more_body

    def handle_events(self) -> None:
        was_busy = self.is_busy
        super().handle_events()
        if self.is_busy and not was_busy:
            self._since = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, or a head above h11's 64 KiB."""
        logger.info("http_invalid remote=%r", self.client)
        body = msgspec.json.encode({"error": INVALID})
        head = h11.Response(
            status_code=400,
            headers=[
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ],
        )
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(each) or b"" for each in events))
        self.transport.close()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._paused_at = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._paused_at = None
        super().resume_writing()

    def check(self, now: float) -> None:
        """Abort the connection if it has made no progress for too long."""
        since_s = now - self._since
        if self._paused_at is not None:
            is_over = now - self._paused_at > UNREAD_S
        elif self.is_busy:
            is_over = self.cycle.more_body and since_s > BODY_S
        elif self.transport.get_write_buffer_size():
            is_over = since_s > UNREAD_S
        else:
            is_over = since_s > REQUEST_S
        if is_over:
            logger.info("http_connection_cut remote=%r seconds=%.0f", self.client, since_s)
            self.transport.abort()


def bounded(kind: type[BoundedConnection], connections_max: int, **more: Any) -> Any:
    """The protocol class for uvicorn: `kind` with limits of its own, and with `more` attributes."""
    return type(kind.__name__, (kind,), {"bounds": ConnectionBounds(connections_max), **more})

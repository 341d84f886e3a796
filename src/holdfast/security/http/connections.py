"""Limits for the HTTP connections of one port: their number, and their time without progress.

uvicorn has a timeout only after a response. A connection that sends nothing, sends a request byte
by byte, or does not read its response, would stay for ever.

Invariant: a connection whose present request has shown no valid credentials gives way to a newer
one in every state. Counter-example with an exception for responses: a stranger requests a page
over all connections and reads nothing, and everybody else waits for `UNREAD_S`. Health checks have
places of their own.
"""

import asyncio
import logging
from functools import partial
from typing import Any, Final

import h11
import msgspec
from starlette.requests import Request
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

HEALTH_PLACES: Final = 2
"""The connections of a port, within its limit, that are for HEALTH_PATHS only."""
HEALTH_PATHS: Final = ("/healthz", "/readyz")
PROVED: Final = "is_proved"
"""The member of a request's state that is set once its credentials are valid."""

INVALID: Final = "this is no HTTP request, or its first line and headers have more than 64 KiB"


def note_proof(request: Request) -> None:
    """Notes that a request has shown valid credentials, so that its connection keeps its place."""
    setattr(request.state, PROVED, True)


class ConnectionBounds:
    """The connections of one port, the oldest first."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self._general_max = max(1, connections_max - HEALTH_PLACES)
        self._connections: dict[BoundedConnection, None] = {}
        self._for_health: dict[BoundedConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections) + len(self._for_health)

    def enter(self, connection: "BoundedConnection") -> bool:
        """Adds a connection. Without room, the oldest one that gives way is closed. False: none
        does, so the connection takes a place for health checks, from the oldest one there.

        The order is that of the arrivals. In the order of the progress, a stranger with busy
        connections and one that returns again and again would displace each newcomer at once."""
        table = self._connections
        is_general = True
        if len(table) >= self._general_max:
            oldest = next((one for one in table if one.gives_way), None)
            if oldest is None:
                logger.warning("http_connections_full connections=%d", self.connections_max)
                is_general = False
                table = self._for_health
                oldest = next(iter(table)) if len(table) >= HEALTH_PLACES else None
            if oldest is not None:
                del table[oldest]
                oldest.transport.abort()
        table[connection] = None
        if self._timer is None:
            self._timer = connection.loop.call_later(SWEEP_S, self._sweep, connection.loop)
        return is_general

    def leave(self, connection: "BoundedConnection") -> None:
        """Removes a connection."""
        self._connections.pop(connection, None)
        self._for_health.pop(connection, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for connection in [*self._connections, *self._for_health]:
            connection.check(now)
        if len(self):
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
            self.app = partial(_serve_health, self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.leave(self)
        super().connection_lost(exc)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def gives_way(self) -> bool:
        """Whether a newer connection may displace this one."""
        if not self.is_busy and not self.transport.get_write_buffer_size():
            return True
        return self.scope is None or PROVED not in self.scope["state"]

    def handle_events(self) -> None:
        was_busy = self.is_busy
        super().handle_events()
        if self.is_busy and not was_busy:
            self._since = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are no request, or a head above h11's 64 KiB."""
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
        """Aborts the connection if it has made no progress for too long."""
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


async def _serve_health(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Serves HEALTH_PATHS. Replies 503 to other requests, and closes their connection."""
    if scope["type"] != "http" or scope["path"] in HEALTH_PATHS:
        await app(scope, receive, send)
        return
    headers = [(b"retry-after", b"1"), (b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def bounded(kind: type[BoundedConnection], connections_max: int, **more: Any) -> Any:
    """The protocol class for uvicorn: `kind` with limits of its own, and with `more` attributes."""
    return type(kind.__name__, (kind,), {"bounds": ConnectionBounds(connections_max), **more})

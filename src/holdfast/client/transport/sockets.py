"""Drives a Dialer with asyncio: opens sockets, aborts them and runs its timer."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.client.errors import ClientError, ConnectionLost, TimedOut
from holdfast.client.reconnect import Reconnect
from holdfast.client.servers import Server
from holdfast.client.transport.dialer import Action, Dialer, Drop, GiveUp, Open, Start
from holdfast.client.transport.transport import CLOSE_TIMEOUT_S, ClientSocket

TransportFactory = Callable[[Callable[[], None], Callable[[ClientError], None]], ClientSocket]
"""The maker of a transport from its `on_opened` and `on_failed`."""


@dataclass(eq=False)
class SocketEndpoint:
    """The settings for opening sockets, the same for all servers."""

    tls: ssl.SSLContext | None
    server_hostname: str | None
    local_address: tuple[str, int] | None
    connect_timeout_s: float

    async def open(self, server: Server, protocol: ClientSocket) -> None:
        """Opens a socket. Raises `ConnectionLost` or `TimedOut`."""
        secure = server.is_secure
        if secure and self.tls is None:
            self.tls = ssl.create_default_context()
        inner: asyncio.Protocol = protocol
        if server.is_websocket:
            from holdfast.client.transport.websocket import websocket_protocol_factory

            inner = websocket_protocol_factory(protocol, server.host, server.port, server.path)
        timeout_s = self.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: inner,
                    server.host,
                    server.port,
                    ssl=self.tls if secure else None,
                    server_hostname=self.server_hostname if secure else None,
                    ssl_shutdown_timeout=CLOSE_TIMEOUT_S if secure else None,
                    local_addr=self.local_address,
                )
                await protocol.opened.wait()
        except TimeoutError:
            raise TimedOut(f"{server.address}: no connection in {timeout_s:g} s") from None
        except OSError as error:
            text = error.strerror or str(error)
            raise ConnectionLost(f"{server.address}: {text}") from error


class SocketDialer:
    """The driver of one Dialer, with a socket for each attempt."""

    def __init__(
        self,
        dialer: Dialer,
        endpoint: SocketEndpoint,
        new_transport: TransportFactory,
        on_failed: Callable[[Server, ClientError], None],
        on_given_up: Callable[[ClientError], None],
    ) -> None:
        self.dialer = dialer
        self._endpoint = endpoint
        self._new_transport = new_transport
        self._on_failed = on_failed
        self._on_given_up = on_given_up
        self._attempts: dict[Server, _Attempt] = {}
        self._candidate: _Attempt | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy = False

    def start(self, policy: Reconnect | None) -> None:
        """Starts to dial. `policy` is for this time only."""
        self.dialer.start(_now(), policy)
        self._carry_out()

    def stop(self) -> None:
        """Aborts all attempts."""
        self.dialer.stop()
        self._carry_out()

    @property
    def is_asking(self) -> bool:
        """Whether a CONNECT waits for its CONNACK."""
        return self._candidate is not None

    def connected(self) -> ClientSocket:
        """Notes that CONNACK has come. Returns its transport."""
        attempt = self._candidate
        assert attempt is not None
        self._candidate = None
        del self._attempts[attempt.server]
        self.dialer.connected(attempt.server, _now())
        self._carry_out()
        return attempt.transport

    def refused(self, error: ClientError) -> None:
        """Notes that the connection ended before CONNACK."""
        attempt = self._candidate
        assert attempt is not None
        self._candidate = None
        self._failed(attempt, error)

    def note_lost(self, error: ClientError) -> None:
        """Notes that the connection of `connected` ended."""
        self.dialer.note_lost(error, _now())
        self._carry_out()

    def _opened(self, attempt: "_Attempt") -> None:
        self.dialer.opened(attempt.server, _now())
        self._carry_out()

    def _failed(self, attempt: "_Attempt", error: ClientError) -> None:
        if self._attempts.get(attempt.server) is not attempt:
            return
        del self._attempts[attempt.server]
        attempt.abandon()
        self._on_failed(attempt.server, error)
        self.dialer.failed(attempt.server, error, _now())
        self._carry_out()

    def _carry_out(self) -> None:
        if self._is_busy:
            # The results of an action come after the actions decided before it.
            return
        self._is_busy = True
        try:
            while actions := self.dialer.actions():
                for action in actions:
                    self._act(action)
        finally:
            self._is_busy = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self.dialer.timer()
        if when is not None:
            self._timer = asyncio.get_running_loop().call_at(when, self._fire)

    def _act(self, action: Action) -> None:
        match action:
            case Open(server):
                self._open(server)
            case Start(server):
                self._candidate = self._attempts[server]
                self._candidate.transport.start()
            case Drop(server):
                attempt = self._attempts.pop(server)
                if attempt is self._candidate:
                    self._candidate = None
                attempt.abandon()
            case GiveUp(error):
                self._on_given_up(error)

    def _fire(self) -> None:
        self._timer = None
        self.dialer.handle_timer(_now())
        self._carry_out()

    def _open(self, server: Server) -> None:
        attempt = _Attempt(server)
        attempt.transport = self._new_transport(
            lambda: self._opened(attempt),
            lambda error: self._failed(attempt, _named(server, error)),
        )
        self._attempts[server] = attempt
        task = asyncio.get_running_loop().create_task(
            self._endpoint.open(server, attempt.transport)
        )
        attempt.task = task
        task.add_done_callback(lambda done: self._finished(attempt, done))

    def _finished(self, attempt: "_Attempt", task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            if not isinstance(error, ClientError):
                # A host name that cannot be encoded, a TLS context that cannot be used.
                error = ConnectionLost(f"{attempt.server.address}: {error}")
            self._failed(attempt, error)


class _Attempt:
    transport: ClientSocket
    task: "asyncio.Task[None]"

    def __init__(self, server: Server) -> None:
        self.server: Final = server

    def abandon(self) -> None:
        self.task.cancel()
        self.transport.abandon()


def _named(server: Server, error: ClientError) -> ClientError:
    named = type(error)(f"{server.address}: {error}", error.reason)
    named.__cause__ = error.__cause__
    return named


def _now() -> float:
    return asyncio.get_running_loop().time()

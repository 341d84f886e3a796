"""Connects the asyncio client: dials, detects loss, reconnects, carries out the core's effects."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from secrets import token_hex
from typing import Final, TypeAlias

from holdfast.client.errors import (
    ClientError,
    ConnectionLost,
    NotConnected,
    PublishRefused,
    reason_text,
)
from holdfast.client.options import LEVEL_31, Options
from holdfast.client.protocol.core import ClientProtocol
from holdfast.client.protocol.effects import (
    Acknowledged,
    Closed,
    Connected,
    Effect,
    Message,
    Reauthenticated,
    Received,
    Subscribed,
    Traced,
)
from holdfast.client.protocol.negotiation import reason_string
from holdfast.client.protocol.sender import CONNECTED
from holdfast.client.reconnect import ONCE, Reconnect
from holdfast.client.servers import Server, servers_of
from holdfast.client.transport.deadline import fail
from holdfast.client.transport.dialer import Dialer
from holdfast.client.transport.sockets import SocketDialer, SocketEndpoint
from holdfast.client.transport.transport import ClientSocket
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Packet, Properties

_NO_CONNECTION: Final = "there is no connection"


@dataclass
class PublishResult:
    """The outcome of a published message. `reason` is SUCCESS or NO_MATCHING_SUBSCRIBERS (at QoS 0
    always SUCCESS)."""

    reason: int
    properties: Properties


Outcome: TypeAlias = PublishResult | ClientError


class ConnectionManager:
    """The connection of one session with one server at a time. `holdfast.client.client.Client` adds
    the calls of the application."""

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        *,
        servers: Sequence[str | Server] = (),
        reconnect: Reconnect | None = None,
        options: Options | None = None,
        client_id: str | None = None,
        tls: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        local_address: tuple[str, int] | None = None,
        messages_max: int = 1000,
        request_timeout_s: float = 30.0,
        on_message: Callable[[Message], None] | None = None,
        on_connect: Callable[[bool, Server], None] | None = None,
        on_connect_failed: Callable[[ClientError, Server], None] | None = None,
        on_connection_lost: Callable[[ClientError], None] | None = None,
        on_trace: Callable[[bool, Packet], None] | None = None,
    ) -> None:
        """Either `host` (`port`: by default 1883, or 8883 with `tls`) or `servers` names the
        servers. `servers` is a list like "mqtt://a:1883", "mqtts://b", "wss://c/mqtt", "d:1883";
        the client uses the first that replies. Servers reached by TLS need no `tls` if the system's
        certificates suffice.

        `client_id` overrides the one of `options`; an MQTT 3.1 client without one gets a random
        one. `server_hostname` is the name in the certificate if not the host. `messages_max` bounds
        the queue of received messages (one read of the socket may exceed it). `request_timeout_s`
        bounds the wait for the reply to SUBSCRIBE, UNSUBSCRIBE and AUTH on a live connection.

        Callbacks: `on_message` takes each message as it arrives, instead of the queue. `on_connect`
        receives whether the server had the session, `on_connect_failed` each attempt that failed,
        `on_connection_lost` each loss of a connection. `on_trace` receives each packet that leaves
        (true) or arrives (false). Invalid arguments raise `ValueError`.
        """
        options = options if options is not None else Options()
        if client_id is not None:
            options = replace(options, client_id=client_id)
        if on_trace is not None:
            options = replace(options, trace=True)
        if not options.client_id and options.level == LEVEL_31:
            options = replace(options, client_id=f"holdfast-{token_hex(7)}")
        self.servers = servers_of(host, port, servers, tls is not None)
        self.core = ClientProtocol(options, resubscribe=reconnect is not None)
        self.connack_properties: Properties = {}
        self.connections = 0
        """The number of times that a server has accepted the client."""
        self._reconnects = reconnect is not None
        self._dialing = SocketDialer(
            Dialer(self.servers, reconnect or ONCE, options.connect_timeout_s, Random().random),
            SocketEndpoint(tls, server_hostname, local_address, options.connect_timeout_s),
            self._new_transport,
            self._failed,
            self._end,
        )
        self._messages_max = messages_max
        self._request_timeout_s = request_timeout_s
        self._on_message = on_message
        self._on_connect = on_connect
        self._on_connect_failed = on_connect_failed
        self._on_connection_lost = on_connection_lost
        self._on_trace = on_trace
        self._transport: ClientSocket | None = None
        self._connected: asyncio.Future[bool] | None = None
        self._error: ClientError | None = None
        # Set while there is a connection, and when none is coming any more.
        self._is_drained = asyncio.Event()
        self._is_drained.set()
        self._is_over = asyncio.Event()
        self._is_over.set()
        self._received: deque[Message] = deque()
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        self._publishes: dict[int, asyncio.Future[PublishResult]] = {}
        self._batched: dict[int, Callable[[Outcome], None]] = {}
        # A result of None: the connection was lost, so the request is sent again.
        self._requests: dict[int, asyncio.Future[Subscribed | None]] = {}
        self._reauthenticated: asyncio.Future[None] | None = None
        # Acknowledgements wait for the end of this turn.
        self._is_acknowledging = False

    @property
    def client_id(self) -> str:
        """The client id, as assigned by the server if it was empty."""
        return self.core.client_id

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection with a session."""
        return self.core.state == CONNECTED

    @property
    def server(self) -> Server | None:
        """The server of the connection, None without one."""
        return self._dialing.dialer.server

    async def connect(self, policy: Reconnect | None = None) -> bool:
        """Connects and returns whether the server still had the session.

        `policy` limits the attempts of this call; by default `reconnect` does (without it, each
        server is tried once). Raises `ConnectionRefused`, `ConnectionLost`, `TimedOut`,
        `ProtocolError` or `AuthenticationFailed`. If several servers failed differently it raises
        `ConnectionLost`. Cancelling ends the attempt.
        """
        if not self._is_over.is_set():
            raise ValueError("already connected")
        self._error = None
        self._is_over.clear()
        self._is_drained.clear()
        self._connected = asyncio.get_running_loop().create_future()
        self._dialing.start(policy)
        try:
            return await self._connected
        except asyncio.CancelledError:
            self._leave(reasons.SUCCESS, None)
            raise

    async def disconnect(
        self, reason: int = reasons.SUCCESS, properties: Properties | None = None
    ) -> None:
        """Sends DISCONNECT and closes the socket. Unacknowledged messages stay queued for the next
        `connect`; their futures fail."""
        self._leave(reason, properties)
        if self._transport is not None:
            await self._transport.closed.wait()

    def abort(self) -> None:
        """Aborts the connection or the attempt to make one, without DISCONNECT, so the server
        publishes the will. Otherwise as `disconnect`."""
        if self._transport is not None:
            self._transport.abandon()
        if not self._is_over.is_set():
            self._end(None)

    def _leave(self, reason: int, properties: Properties | None) -> None:
        if self.is_connected:
            transport = self._require()
            self.core.disconnect(transport.now, reason, properties)
            transport.pump()
        elif not self._is_over.is_set():
            self._dialing.stop()
            self._end(None)

    async def wait_closed(self) -> ClientError | None:
        """Waits until the connection is over permanently. Returns its error, or None after
        `disconnect`."""
        await self._is_over.wait()
        if self._transport is not None:
            await self._transport.closed.wait()
        return self._error

    # The transport

    def _new_transport(
        self, on_opened: Callable[[], None], on_failed: Callable[[ClientError], None]
    ) -> ClientSocket:
        return ClientSocket(self.core, self._handle, on_opened, on_failed)

    def _failed(self, server: Server, error: ClientError) -> None:
        self._notify(self._on_connect_failed, error, server)

    def _is_reconnecting(self) -> bool:
        return self._reconnects and not self.is_connected and not self._is_over.is_set()

    def _require(self) -> ClientSocket:
        if self._transport is None or not self.is_connected:
            if self._error is not None:
                raise self._error
            raise NotConnected(_NO_CONNECTION)
        return self._transport

    async def _ready(self) -> ClientSocket:
        """The connection. Waits for it while the client reconnects."""
        while self._is_reconnecting():
            await self._is_drained.wait()
        return self._require()

    # Effects

    def _handle(self, effect: Effect) -> None:
        match effect:
            case Received(message):
                self._arrived(message)
            case Acknowledged():
                self._resolve(effect)
            case Subscribed(packet_id):
                request = self._requests.pop(packet_id, None)
                if request is not None and not request.done():
                    request.set_result(effect)
            case Connected(session_present, properties):
                self._accepted(session_present, properties)
            case Reauthenticated():
                if self._reauthenticated is not None and not self._reauthenticated.done():
                    self._reauthenticated.set_result(None)
            case Traced(sent, packet):
                if self._on_trace is not None:
                    self._on_trace(sent, packet)
            case Closed(error):
                self._closed(error)

    def _accepted(self, session_present: bool, properties: Properties) -> None:
        self.connack_properties = properties
        self.connections += 1
        self._transport = self._dialing.connected()
        self._is_drained.set()
        self._room.set()
        if self._connected is not None and not self._connected.done():
            self._connected.set_result(session_present)
        assert self.server is not None
        self._notify(self._on_connect, session_present, self.server)

    def _arrived(self, message: Message) -> None:
        message.connection = self.connections
        if self._on_message is not None:
            self._on_message(message)
            return
        self._received.append(message)
        self._arrival.set()
        if len(self._received) >= self._messages_max and self._transport is not None:
            self._transport.pause_reading()

    def _resolve(self, effect: Acknowledged) -> None:
        self._room.set()
        if effect.reason < 0x80:
            outcome: Outcome = PublishResult(effect.reason, effect.properties)
        else:
            text = f"message refused: {reason_text(effect.reason)}"
            outcome = PublishRefused(text, effect.reason, reason_string(effect.properties))
        if effect.handle in self._batched:
            self._resolve_batched(self._batched.pop(effect.handle), outcome)
            return
        future = self._publishes.pop(effect.handle, None)
        if future is None or future.done():
            return
        if isinstance(outcome, PublishResult):
            future.set_result(outcome)
        else:
            fail(future, outcome)

    def _resolve_batched(self, on_settled: Callable[[Outcome], None], outcome: Outcome) -> None:
        try:
            on_settled(outcome)
        except Exception as error:  # noqa: BLE001
            # As for any callback, the loop reports the error, and the connection continues.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "on_settled of submit_batch failed", "exception": error}
            )

    def _closed(self, error: ClientError | None) -> None:
        if self._dialing.is_asking:
            self._dialing.refused(error or ConnectionLost("disconnected"))
            return
        if error is not None:
            self._notify(self._on_connection_lost, error)
        if error is None or not self._reconnects:
            self._end(error)
        else:
            self._is_drained.clear()
            self._room.set()
            for request in self._requests.values():
                if not request.done():
                    request.set_result(None)
            self._requests.clear()
            if self._reauthenticated is not None:
                fail(self._reauthenticated, error)
            self._dialing.note_lost(error)

    def _end(self, error: ClientError | None) -> None:
        """Fails everything that waits: there is no connection and none will follow."""
        self._error = error
        self._dialing.stop()
        self._is_over.set()
        self._is_drained.set()
        self._arrival.set()
        self._room.set()
        failure = error if error is not None else NotConnected("disconnected")
        for publish in self._publishes.values():
            fail(publish, failure)
        for request in self._requests.values():
            fail(request, failure)
        self._publishes.clear()
        self._requests.clear()
        batched = list(self._batched.values())
        self._batched.clear()
        for on_settled in batched:
            self._resolve_batched(on_settled, failure)
        if self._connected is not None:
            fail(self._connected, failure)
        if self._reauthenticated is not None:
            fail(self._reauthenticated, failure)

    def _notify(self, callback: Callable[..., None] | None, *arguments: object) -> None:
        """Schedules a callback. The loop reports an error in it, and the connection continues."""
        if callback is not None:
            asyncio.get_running_loop().call_soon(callback, *arguments)

"""The asyncio MQTT client.

    async with Client("localhost", client_id="meter") as client:
        await client.subscribe(("commands/#", 1))
        await client.publish("power", b"42", qos=1)      # returns when the server has it
        async for message in client.messages():
            ...

Received messages wait in a bounded queue; when it is full the socket is not read, so a slow
application slows the server down instead of growing. After ConnectionLost the session's state is
kept: call `connect` again to go on, and what was unacknowledged is sent again.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from types import TracebackType
from typing import Any, Final, TypeAlias

from holdfast.client.answers import reason_string
from holdfast.client.effects import (
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
from holdfast.client.errors import (
    ClientError,
    ConnectionLost,
    NotConnected,
    PublishRefused,
    SubscribeRefused,
    TimedOut,
    reason_text,
)
from holdfast.client.options import LEVEL_31, Options
from holdfast.client.protocol import CONNECTED, ClientProtocol
from holdfast.client.transport import CLOSE_TIMEOUT_S, ClientTransport
from holdfast.mqtt import properties as pr
from holdfast.mqtt import reasons
from holdfast.mqtt.packets import Packet, Properties, SubscriptionRequest

PORT: Final = 1883
PORT_TLS: Final = 8883

Filter: TypeAlias = str | tuple[str, int] | SubscriptionRequest
"""A topic filter (QoS 0), a filter with its QoS, or all subscription options."""


@dataclass
class PublishResult:
    """`reason` is SUCCESS or NO_MATCHING_SUBSCRIBERS (and always SUCCESS for QoS 0)."""

    reason: int
    properties: Properties


class Client:
    """One session with one server. Not thread-safe: use it from its event loop."""

    def __init__(
        self,
        host: str,
        port: int | None = None,
        *,
        options: Options | None = None,
        client_id: str | None = None,
        tls: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        local_address: tuple[str, int] | None = None,
        messages_max: int = 1000,
        request_timeout_s: float = 30.0,
        on_message: Callable[[Message], None] | None = None,
        on_trace: Callable[[bool, Packet], None] | None = None,
    ) -> None:
        """`port`: by default 1883, or 8883 with `tls`. `client_id` overrides the one of `options`;
        an MQTT 3.1 client without one gets a random one. `server_hostname` is what the
        certificate must name if not `host`. `messages_max` bounds the queue of received messages
        (one read of the socket may pass it), `request_timeout_s` the wait for an answer to
        SUBSCRIBE, UNSUBSCRIBE and AUTH. `on_message` takes each message as it arrives, instead of
        the queue; `on_trace` sees each packet that leaves (true) or arrives (false)."""
        options = options if options is not None else Options()
        if client_id is not None:
            options = replace(options, client_id=client_id)
        if on_trace is not None:
            options = replace(options, trace=True)
        if not options.client_id and options.level == LEVEL_31:
            options = replace(options, client_id=f"holdfast-{token_hex(7)}")
        self.host = host
        self.port = port if port is not None else (PORT if tls is None else PORT_TLS)
        self.core = ClientProtocol(options)
        self.connack_properties: Properties = {}
        self._tls = tls
        self._server_hostname = server_hostname
        self._local_address = local_address
        self._messages_max = messages_max
        self._request_timeout_s = request_timeout_s
        self._on_message = on_message
        self._on_trace = on_trace
        self._transport: ClientTransport | None = None
        self._connected: asyncio.Future[bool] | None = None
        self._error: ClientError | None = None
        self._received: deque[Message] = deque()
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        self._publishes: dict[int, asyncio.Future[PublishResult]] = {}
        self._requests: dict[int, asyncio.Future[Subscribed]] = {}
        self._reauthenticated: asyncio.Future[None] | None = None

    @property
    def client_id(self) -> str:
        return self.core.client_id

    @property
    def is_connected(self) -> bool:
        return self.core.state == CONNECTED

    async def __aenter__(self) -> "Client":
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.disconnect()

    async def connect(self) -> bool:
        """Connect; whether the server still had our session. Raises ConnectionRefused,
        ConnectionLost, TimedOut, ProtocolError, AuthenticationFailed."""
        if self._transport is not None and not self._transport.lost.is_set():
            raise ValueError("already connected")
        loop = asyncio.get_running_loop()
        self._error = None
        self._connected = loop.create_future()
        timeout_s = self.core.options.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    self._new_transport,
                    self.host,
                    self.port,
                    ssl=self._tls,
                    server_hostname=self._server_hostname if self._tls is not None else None,
                    ssl_shutdown_timeout=CLOSE_TIMEOUT_S if self._tls is not None else None,
                    local_addr=self._local_address,
                )
        except TimeoutError:
            raise TimedOut(f"{self.host}:{self.port}: no connection in {timeout_s:g} s") from None
        except OSError as error:
            text = error.strerror or str(error)
            raise ConnectionLost(f"{self.host}:{self.port}: {text}") from error
        try:
            return await self._connected
        finally:
            if not self.is_connected and self._transport is not None:
                self._transport.abort()

    def _new_transport(self) -> ClientTransport:
        self._transport = ClientTransport(self.core, self._handle)
        return self._transport

    async def disconnect(
        self, reason: int = reasons.SUCCESS, properties: Properties | None = None
    ) -> None:
        """Say goodbye and close the socket. What was published and is not acknowledged stays
        queued for the next `connect`; its futures fail."""
        transport = self._transport
        if transport is None:
            return
        self.core.disconnect(transport.now, reason, properties)
        transport.pump()
        await transport.lost.wait()

    async def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        qos: int = 0,
        retain: bool = False,
        properties: Properties | None = None,
        topic_alias: int = 0,
    ) -> PublishResult:
        """Publish and wait for the acknowledgement (QoS 0: until the socket takes it). Raises
        PublishRefused with the server's reason, ConnectionLost, NotConnected.

        Cancelling stops the wait, not the message.
        """
        future = await self.submit(
            topic, payload, qos=qos, retain=retain, properties=properties, topic_alias=topic_alias
        )
        return await asyncio.shield(future)

    async def submit(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        qos: int = 0,
        retain: bool = False,
        properties: Properties | None = None,
        topic_alias: int = 0,
    ) -> asyncio.Future[PublishResult]:
        """Publish without waiting for the acknowledgement: the future has it. Waits while the
        socket is congested or the queue is full, so calls in a row keep the window filled."""
        transport = self._require()
        await transport.writable()
        while qos and self.core.outgoing.is_full():
            self._room.clear()
            await self._room.wait()
        transport = self._require()
        data = payload.encode() if isinstance(payload, str) else payload
        future: asyncio.Future[PublishResult] = asyncio.get_running_loop().create_future()
        handle = self.core.publish(topic, data, qos, retain, transport.now, properties, topic_alias)
        if qos:
            self._publishes[handle] = future
        else:
            future.set_result(PublishResult(reasons.SUCCESS, {}))
        transport.pump()
        return future

    async def flush(self) -> None:
        """Wait until everything published is acknowledged. Raises ConnectionLost, NotConnected."""
        while len(self.core.outgoing):
            self._require()
            self._room.clear()
            await self._room.wait()

    async def wait_closed(self) -> ClientError | None:
        """Wait until the connection is over; its error, None after `disconnect`."""
        if self._transport is not None:
            await self._transport.lost.wait()
        return self._error

    async def subscribe(
        self,
        *filters: Filter,
        properties: Properties | None = None,
        subscription_id: int = 0,
    ) -> list[int]:
        """Subscribe; the granted QoS of each filter. Raises SubscribeRefused if the server refused
        any of them (the others are in effect), TimedOut, ConnectionLost, NotConnected."""
        requests = [_request_of(one) for one in filters]
        if subscription_id:
            properties = {**(properties or {}), pr.SUBSCRIPTION_IDENTIFIER: [subscription_id]}
        transport = self._require()
        packet_id = self.core.subscribe(requests, transport.now, properties)
        answer = await self._answer(packet_id, "SUBACK")
        _check_answer(answer, [one.filter for one in requests], "subscribe to")
        return answer.reasons

    async def unsubscribe(self, *filters: str, properties: Properties | None = None) -> list[int]:
        """Unsubscribe; a reason code per filter (none with MQTT 3). Raises as `subscribe`."""
        transport = self._require()
        packet_id = self.core.unsubscribe(list(filters), transport.now, properties)
        answer = await self._answer(packet_id, "UNSUBACK")
        _check_answer(answer, list(filters), "unsubscribe from")
        return answer.reasons

    async def messages(self) -> AsyncIterator[Message]:
        """Received messages, until `disconnect` (ends) or a lost connection (raises)."""
        while True:
            message = await self.receive()
            if message is None:
                return
            yield message

    async def receive(self) -> Message | None:
        """The next message; None after `disconnect`. What was received before the connection was
        lost comes first, then its error is raised. Cancelling loses no message."""
        while not self._received:
            if not self.is_connected:
                if self._error is not None:
                    raise self._error
                return None
            self._arrival.clear()
            await self._arrival.wait()
        message = self._received.popleft()
        if self._transport is not None and len(self._received) <= self._messages_max // 2:
            self._transport.resume_reading()
        return message

    def acknowledge(self, message: Message) -> None:
        """With `Options.manual_acknowledge`: done with a message of QoS 1 or 2."""
        transport = self._require()
        self.core.acknowledge(message.packet_id, transport.now)
        transport.pump()

    async def reauthenticate(self) -> None:
        """Repeat the enhanced authentication. Raises what `connect` raises."""
        transport = self._require()
        self._reauthenticated = asyncio.get_running_loop().create_future()
        self.core.reauthenticate(transport.now)
        transport.pump()
        async with self._deadline("AUTH"):
            await self._reauthenticated

    # Effects

    def _handle(self, effect: Effect) -> None:
        match effect:
            case Received(message):
                self._arrived(message)
            case Acknowledged():
                self._settle(effect)
            case Subscribed(packet_id):
                request = self._requests.pop(packet_id, None)
                if request is not None and not request.done():
                    request.set_result(effect)
            case Connected(session_present, properties):
                self.connack_properties = properties
                if self._connected is not None and not self._connected.done():
                    self._connected.set_result(session_present)
            case Reauthenticated():
                if self._reauthenticated is not None and not self._reauthenticated.done():
                    self._reauthenticated.set_result(None)
            case Traced(sent, packet):
                if self._on_trace is not None:
                    self._on_trace(sent, packet)
            case Closed(error):
                self._ended(error)

    def _arrived(self, message: Message) -> None:
        if self._on_message is not None:
            self._on_message(message)
            return
        self._received.append(message)
        self._arrival.set()
        if len(self._received) >= self._messages_max and self._transport is not None:
            self._transport.pause_reading()

    def _settle(self, effect: Acknowledged) -> None:
        self._room.set()
        future = self._publishes.pop(effect.handle, None)
        if future is None or future.done():
            return
        if effect.reason < 0x80:
            future.set_result(PublishResult(effect.reason, effect.properties))
            return
        text = f"message refused: {reason_text(effect.reason)}"
        _fail(future, PublishRefused(text, effect.reason, reason_string(effect.properties)))

    def _ended(self, error: ClientError | None) -> None:
        self._error = error
        self._arrival.set()
        self._room.set()
        failure = error if error is not None else NotConnected("disconnected")
        for publish in self._publishes.values():
            _fail(publish, failure)
        for request in self._requests.values():
            _fail(request, failure)
        self._publishes.clear()
        self._requests.clear()
        if self._connected is not None:
            _fail(self._connected, failure)
        if self._reauthenticated is not None:
            _fail(self._reauthenticated, failure)

    # Helpers

    def _require(self) -> ClientTransport:
        if self._transport is None or not self.is_connected:
            if self._error is not None:
                raise self._error
            raise NotConnected("there is no connection")
        return self._transport

    async def _answer(self, packet_id: int, name: str) -> Subscribed:
        transport = self._require()
        future: asyncio.Future[Subscribed] = asyncio.get_running_loop().create_future()
        self._requests[packet_id] = future
        transport.pump()
        try:
            async with self._deadline(name):
                return await future
        finally:
            self._requests.pop(packet_id, None)

    def _deadline(self, name: str) -> "_Deadline":
        return _Deadline(self._request_timeout_s, name)


class _Deadline:
    """`async with`: TimedOut instead of TimeoutError."""

    def __init__(self, timeout_s: float, name: str) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._text = f"no {name} within {timeout_s:g} s"

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise TimedOut(self._text) from None


def _fail(future: "asyncio.Future[Any]", error: ClientError) -> None:
    if not future.done():
        future.set_exception(error)
        # Nobody may be waiting (a submitted message): that is no unhandled error.
        future.exception()


def _request_of(filter: Filter) -> SubscriptionRequest:
    if isinstance(filter, str):
        return SubscriptionRequest(filter, 0)
    if isinstance(filter, tuple):
        return SubscriptionRequest(filter[0], filter[1])
    return filter


def _check_answer(answer: Subscribed, filters: Sequence[str], verb: str) -> None:
    for filter, reason in zip(filters, answer.reasons, strict=False):
        if reason >= 0x80:
            raise SubscribeRefused(
                f"cannot {verb} {filter!r}: {reason_text(reason)}",
                reason,
                reason_string(answer.properties),
                answer.reasons,
            )

"""A client of the broker inside its own process, for publishes over the admin port.

It is an MQTT 5 client without a socket. So its messages pass the same checks, limits and promises
as those of every other client.
"""

import asyncio
import secrets
from typing import Any, Final

from holdfast.io.event_loop.broker import Broker
from holdfast.io.sockets.loopback_transport import InProcessTransport
from holdfast.node.connections.close import handle_connection_lost, handle_disconnect
from holdfast.node.connections.connect import API_PREFIX, OPERATOR_PREFIX
from holdfast.node.connections.session_open import open_session
from holdfast.node.rights import attach_rights_of
from holdfast.node.session.connection import CLOSED, OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import PUBREC, PUBREL, Ack, Connack, Connect, Disconnect
from holdfast.protocol.mqtt.properties import REASON_STRING
from holdfast.protocol.mqtt.publish import encode_publish

ADDRESS: Final = "admin"
"""The address and the listener of such a client in lists and log lines."""
TIMEOUT_S: Final = 10.0
"""The time in seconds that the broker has for a session, or for one acknowledgement."""


class LoopbackRefusal(Exception):
    """The broker has refused a packet. `reason` is the reason code, or 0 without one."""

    def __init__(self, reason: int, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class LoopbackClient:
    """One connection inside the process. `async with` opens and ends it and its session."""

    def __init__(
        self,
        broker: Broker,
        caller: str,
        identity: tuple[str | None, str] | None = None,
        *,
        client_id: str = "",
        username: str | None = None,
    ) -> None:
        """`caller`: the caller of the admin port. `identity`: see `attach_rights_of`.
        `client_id`: an existing session, which is ended; by default a new one."""
        self._broker = broker
        self.publisher = client_id or OPERATOR_PREFIX + caller
        """The name in the log."""
        self._identity = identity
        # The audit of a command reads the caller from it (`api.access.audit`).
        self._client_id = client_id or f"{API_PREFIX}{secrets.token_hex(8)} {caller}"
        self._username = username
        self._reader = FrameReader(PACKET_BYTES_MAX)
        self._packet_id = 0
        self._opened: asyncio.Future[None] = broker.loop.create_future()
        self._acks: dict[int, asyncio.Future[int]] = {}
        self._failure: LoopbackRefusal | None = None
        self._connection = Connection(
            broker.node.state.config.packet_bytes_max, ADDRESS, ListenerRules(ADDRESS)
        )

    async def __aenter__(self) -> "LoopbackClient":
        broker, connection = self._broker, self._connection
        connection.transport = InProcessTransport(self._received, self._closed)
        connection.version = 5
        connection.username = self._username
        connection.connect = Connect(5, True, 0, self._client_id)
        broker.touch()
        open_session(broker.node.state, connection)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._opened
        except TimeoutError:
            self._end()
            raise LoopbackRefusal(0, "the broker has opened no session in time") from None
        except LoopbackRefusal:
            self._end()
            raise
        session = connection.session
        if session is None:
            raise LoopbackRefusal(0, "the broker has closed the session")
        # The record names the publisher, and not this connection.
        session.key = self.publisher.encode()
        text = attach_rights_of(broker.node.state, session, connection, self._identity)
        if text:
            self._end()
            raise LoopbackRefusal(reasons.IMPLEMENTATION_SPECIFIC_ERROR, text)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._broker.touch()
        session = self._connection.session
        state = self._broker.node.state
        if session is not None:
            session.key = session.client_id.encode()
            handle_disconnect(state, self._connection, session, Disconnect(reasons.SUCCESS))
        elif self._connection.state != CLOSED:
            handle_connection_lost(state, self._connection)

    async def publish(
        self, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes = b""
    ) -> int:
        """Publishes a message and returns the reason code of its acknowledgement; 0 at QoS 0.

        Raises `LoopbackRefusal` if it is refused, or cannot be encoded.
        """
        self._packet_id = self._packet_id % 65_535 + 1
        packet_id = self._packet_id if qos else 0
        try:
            data = encode_publish(topic, payload, qos, retain, False, packet_id, properties, 5)
        except ValueError as error:
            raise LoopbackRefusal(reasons.TOPIC_NAME_INVALID, str(error)) from None
        broker = self._broker
        future: asyncio.Future[int] = broker.loop.create_future()
        if qos:
            self._acks[packet_id] = future
        broker.touch()
        denied = broker.node.state.stats.authorizations_denied
        broker.node.handle_data(self._connection, data)
        if self._connection.state != OPEN:
            raise self._failure or LoopbackRefusal(0, "the broker has closed the connection")
        if not qos:
            # QoS 0 has no acknowledgement, so the counter says whether it was refused.
            if broker.node.state.stats.authorizations_denied != denied:
                raise LoopbackRefusal(reasons.NOT_AUTHORIZED, "not authorised")
            return 0
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await future
        except TimeoutError:
            text = "no acknowledgement in time: it may still be stored"
            raise LoopbackRefusal(0, text) from None
        finally:
            self._acks.pop(packet_id, None)

    # InProcessTransport

    def _received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        while reader.next():
            packet = decode(reader.buffer, reader.first, reader.start, reader.end, 5, False)
            if isinstance(packet, Connack):
                if packet.reason:
                    self._fail(packet.reason, str(packet.properties.get(REASON_STRING, "")))
                elif not self._opened.done():
                    self._opened.set_result(None)
            elif isinstance(packet, Ack):
                self._acknowledged(packet)
            elif isinstance(packet, Disconnect):
                self._fail(packet.reason, str(packet.properties.get(REASON_STRING, "")))

    def _acknowledged(self, packet: Ack) -> None:
        if packet.kind == PUBREC and packet.reason < 0x80:
            # Called within a turn, so the next packet waits for the next one.
            release = encode_ack(PUBREL, packet.packet_id, 0, 5)
            self._broker.loop.call_soon(self._send, release)
        future = self._acks.get(packet.packet_id)
        if future is None or future.done():
            return
        if packet.reason >= 0x80:
            text = str(packet.properties.get(REASON_STRING, ""))
            name = reasons.NAMES.get(packet.reason, hex(packet.reason))
            future.set_exception(LoopbackRefusal(packet.reason, text or name))
        else:
            future.set_result(packet.reason)

    def _send(self, data: bytes) -> None:
        if self._connection.state == OPEN:
            self._broker.touch()
            self._broker.node.handle_data(self._connection, data)

    def _closed(self) -> None:
        self._fail(0, "the broker has closed the connection")

    def _fail(self, reason: int, text: str) -> None:
        name = reasons.NAMES.get(reason, hex(reason)) if reason else "closed"
        failure = LoopbackRefusal(reason, text or name)
        if self._failure is None:
            self._failure = failure
        waiting: list[asyncio.Future[Any]] = [self._opened, *self._acks.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(failure)
                # A future that nobody awaits any more must not be reported as a failure.
                future.exception()

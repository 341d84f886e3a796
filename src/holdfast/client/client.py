"""The asyncio MQTT client.

    async with Client("localhost", client_id="meter") as client:
        await client.subscribe(("commands/#", 1))
        await client.publish("power", b"42", qos=1)      # returns when the server has it
        async for message in client.messages():
            ...

Received messages wait in a bounded queue. While it is full the client does not read the socket, so
a slow application slows the server down and its memory does not grow. The client reads no
acknowledgements then, either: a program that subscribes must receive while it waits for publishes.

With `reconnect=Reconnect()` the client replaces a lost connection by one to any server of the list:

- Publishes with QoS 1 and 2 are queued meanwhile (up to `Options.queue_messages_max`, then `submit`
  waits). Their futures stay open and get the acknowledgement of the next connection.
- All other calls that need the server wait for it.
- A server without the session receives the subscriptions again, before any message.
- Unacknowledged messages are sent again in order. If the server kept the session
  (`Options.session_expiry_s`, or `clean_start=False` with MQTT 3) they are the same messages, which
  makes QoS 2 exactly once. If it did not, they are new ones.
- Reconnecting ends with `disconnect`, with a permanent failure (see `reconnect.TRANSIENT`), or by
  the policy's limits.

Without `reconnect` a lost connection is final: every waiting call raises ConnectionLost. The
session's state is kept: call `connect` again, and unacknowledged messages are sent again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from holdfast.client.connection import ConnectionManager, Outcome, PublishResult
from holdfast.client.errors import ClientError, PublishRefused
from holdfast.client.protocol.effects import Message, Subscribed
from holdfast.client.protocol.negotiation import check_reason_codes
from holdfast.client.transport.deadline import Filter, deadline, request_of
from holdfast.client.transport.transport import ClientSocket
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Properties


class Client(ConnectionManager):
    """One session with one server at a time. Not thread-safe: use it from its event loop
    (`holdfast.client.blocking.Client` is for threads)."""

    async def __aenter__(self) -> "Client":
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.disconnect()

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
        """Publishes and waits for the acknowledgement (QoS 0: until the socket takes it). Raises
        `PublishRefused` with the server's reason, `ConnectionLost` or `NotConnected`.

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
        """Publishes without waiting for the acknowledgement, which the future receives. Waits while
        the socket is congested or the queue is full, so calls in a row keep the window filled."""
        transport = self._transport
        is_congested = transport is None or not transport.is_writable
        if is_congested or not self.is_connected or (qos and self.core.outgoing.is_full()):
            transport = await self._room_for(qos)
        data = payload.encode() if isinstance(payload, str) else payload
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PublishResult] = loop.create_future()
        handle = self.core.publish(topic, data, qos, retain, loop.time(), properties, topic_alias)
        if qos:
            self._publishes[handle] = future
        else:
            future.set_result(PublishResult(reasons.SUCCESS, {}))
        if transport is not None:
            transport.pump()
        return future

    @property
    def is_ready(self) -> bool:
        """Whether `submit` would not wait."""
        transport = self._transport
        return (
            transport is not None
            and transport.is_writable
            and self.is_connected
            and not self.core.outgoing.is_full()
        )

    async def until_ready(self) -> None:
        """Waits until `is_ready`, also while the client reconnects. Raises `ConnectionLost` or
        `NotConnected`."""
        while not self.is_ready:
            transport = await self._ready()
            if not transport.is_writable:
                await transport.writable()
            elif self.core.outgoing.is_full():
                self._room.clear()
                await self._room.wait()

    def submit_batch(
        self,
        messages: Sequence[tuple[str, bytes, bool, Properties | None]],
        on_settled: Callable[[int, Outcome], None],
        qos: int = 1,
    ) -> None:
        """Publishes (topic, payload, retain, properties) with one write of the socket.

        `on_settled` is called once for each message, with its index and the outcome that `submit`'s
        future would have. That is when the acknowledgement is read, or before this returns: at QoS
        0 and for a message that cannot be sent. It does not wait: check `is_ready` first. Raises
        `ConnectionLost` or `NotConnected` if nothing was sent.
        """
        transport = self._require()
        now = asyncio.get_running_loop().time()
        settled: list[tuple[int, Outcome]] = []
        for index, (topic, payload, retain, properties) in enumerate(messages):
            try:
                handle = self.core.publish(topic, payload, qos, retain, now, properties)
            except ClientError as error:
                settled.append((index, error))
            except ValueError as error:
                settled.append((index, PublishRefused(str(error))))
            else:
                if qos:
                    self._batched[handle] = partial(on_settled, index)
                else:
                    settled.append((index, PublishResult(reasons.SUCCESS, {})))
        transport.pump()
        for index, outcome in settled:
            self._resolve_batched(partial(on_settled, index), outcome)

    async def _room_for(self, qos: int) -> ClientSocket | None:
        """Waits until a message may be published. None: the client is reconnecting, and the message
        is queued for the next connection."""
        while True:
            if not self.is_connected:
                if not self._is_reconnecting():
                    return self._require()
                if not qos:
                    await self._is_drained.wait()
                    continue
            elif not self._require().is_writable:
                await self._require().writable()
                continue
            if not qos or not self.core.outgoing.is_full():
                return self._require() if self.is_connected else None
            self._room.clear()
            await self._room.wait()

    async def flush(self) -> None:
        """Waits until all published messages are acknowledged. Raises `ConnectionLost` or
        `NotConnected`."""
        while len(self.core.outgoing):
            if not self._is_reconnecting():
                self._require()
            self._room.clear()
            await self._room.wait()

    async def subscribe(
        self,
        *filters: Filter,
        properties: Properties | None = None,
        subscription_id: int = 0,
    ) -> list[int]:
        """Subscribes and returns the granted QoS of each filter. Raises `SubscribeRefused` if the
        server refused a filter (the others are in effect), `TimedOut`, `ConnectionLost` or
        `NotConnected`."""
        requests = [request_of(one) for one in filters]
        if subscription_id:
            properties = {**(properties or {}), pr.SUBSCRIPTION_IDENTIFIER: [subscription_id]}
        answer = await self._request(
            "SUBACK", lambda now: self.core.subscribe(requests, now, properties)
        )
        names = [one.filter for one in requests]
        check_reason_codes(answer.properties, answer.reasons, names, "subscribe to")
        return answer.reasons

    async def unsubscribe(self, *filters: str, properties: Properties | None = None) -> list[int]:
        """Unsubscribes and returns a reason code per filter (none with MQTT 3). Raises as
        `subscribe`."""
        names = list(filters)
        answer = await self._request(
            "UNSUBACK", lambda now: self.core.unsubscribe(names, now, properties)
        )
        check_reason_codes(answer.properties, answer.reasons, names, "unsubscribe from")
        return answer.reasons

    async def messages(self) -> AsyncIterator[Message]:
        """Received messages, until `disconnect` (then it ends) or a permanent loss of the
        connection (then it raises)."""
        while True:
            message = await self.receive()
            if message is None:
                return
            yield message

    async def receive(self) -> Message | None:
        """The next message, or None after `disconnect`. After a permanent loss of the connection
        the messages received before come first, then its error is raised. Cancelling loses no
        message."""
        while not self._received:
            if self._is_over.is_set():
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
        """Acknowledges a message of QoS 1 or 2, with `Options.manual_acknowledge`. A message of an
        earlier connection is ignored, because the server sends it again. The acknowledgements of
        one turn of the loop go out at its end, in one write."""
        if self._is_reconnecting():
            return
        transport = self._require()
        if message.connection == self.connections:
            self.core.acknowledge(message.packet_id, transport.now)
            if not self._is_acknowledging:
                self._is_acknowledging = True
                asyncio.get_running_loop().call_soon(self._send_acknowledgements)

    def _send_acknowledgements(self) -> None:
        self._is_acknowledging = False
        if self._transport is not None:
            self._transport.pump()

    async def reauthenticate(self) -> None:
        """Repeats the enhanced authentication. Raises as `connect`."""
        transport = await self._ready()
        self._reauthenticated = asyncio.get_running_loop().create_future()
        self.core.reauthenticate(transport.now)
        transport.pump()
        async with deadline(self._request_timeout_s, "AUTH"):
            await self._reauthenticated

    async def _request(self, name: str, send: Callable[[float], int]) -> Subscribed:
        """Sends a request and returns the reply. If the connection is lost, send it again on the
        next one."""
        while True:
            transport = await self._ready()
            packet_id = send(transport.now)
            future: asyncio.Future[Subscribed | None] = asyncio.get_running_loop().create_future()
            self._requests[packet_id] = future
            transport.pump()
            try:
                async with deadline(self._request_timeout_s, name):
                    answer = await future
            finally:
                if self._requests.get(packet_id) is future:
                    del self._requests[packet_id]
            if answer is not None:
                return answer

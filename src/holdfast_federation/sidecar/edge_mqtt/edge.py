"""Connects any MQTT broker, as a client with a session.

The edge subscribes at QoS 2 to the filters of other members, and acknowledges a message when the
federator is done with it. It publishes the messages of the federation. The broker must not return
those: MQTT 5 has No Local for that, and over 3.1.1 the edge connects as a bridge. The edge first
tests with a message to its own topic whether the broker complies. If nothing distinguishes its
messages from others, it refuses to export and import the same topic.

Invariants:

- The edge acknowledges only publications that the federator is done with. A broker that keeps the
  session repeats all others.
- After a start no message leaves or is acknowledged before the host has reported the filters of
  other members. No time-out ends this: the broker keeps the messages, and an acknowledged one that
  somebody wants is lost.
- A client's interest is on disk before the host learns of it. Otherwise other members would send
  its messages, and after a crash they would stop.
- Between `edge_up` and `edge_down`, deliveries reach the broker in order.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Final

from holdfast.client.client import Client
from holdfast.client.errors import (
    ClientError,
    ConnectionLost,
    ConnectionRefused,
    NotConnected,
    SubscribeRefused,
    TimedOut,
)
from holdfast.client.options import LEVEL_5
from holdfast.client.protocol.effects import Message as Received
from holdfast.client.servers import Server
from holdfast.io.peers.complaints import Complaints
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import SubscriptionRequest
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.frames import PROPERTIES_BYTES_MAX
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.routing.interest import may_leave
from holdfast_federation.sidecar.edge import EdgeHost, ReadingDone, RetainedFound
from holdfast_federation.sidecar.edge_mqtt.delivery import ImportDelivery
from holdfast_federation.sidecar.edge_mqtt.exports import Exports, Replays
from holdfast_federation.sidecar.edge_mqtt.imports import Imports
from holdfast_federation.sidecar.edge_mqtt.interest_sources import BadWord, InterestSources
from holdfast_federation.sidecar.edge_mqtt.loop_marker import outbound
from holdfast_federation.sidecar.edge_mqtt.loopback_probe import (
    PREFIX,
    EdgeRefused,
    OwnTopic,
    check_echo,
)
from holdfast_federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast_federation.sidecar.edge_mqtt.state import EdgeMemory
from holdfast_federation.sidecar.edge_mqtt.subscriptions import EdgeSubscriptions

MESSAGES_MAX: Final = 100_000
BYTES_MAX: Final = 64 << 20
"""The limits of one reading. Messages beyond either are left out, and that is logged."""
READINGS_MAX: Final = 16
"""The most readings in progress or waiting. A further one fails, and is logged."""

END_AGAIN_S: Final = 1.0
"""The interval in seconds in which the message that marks the end is repeated."""


class RetainedReader:
    """Reads retained messages, one reading at a time, each on a new connection."""

    def __init__(self, settings: EdgeSettings, client_id: str) -> None:
        self._settings = settings
        self._client_id = client_id
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def tasks(self) -> set[asyncio.Task[None]]:
        return set(self._tasks)

    def read(self, filters: frozenset[str], done: ReadingDone) -> None:
        """Starts a reading."""
        loop = asyncio.get_running_loop()
        if not filters or len(self._tasks) >= READINGS_MAX:
            if filters:
                logger.warning("federation_retained_busy readings=%d", READINGS_MAX)
            loop.call_soon(done, None if filters else RetainedFound([]))
            return
        task = loop.create_task(self._read(filters, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, filters: frozenset[str], done: ReadingDone) -> None:
        found = None
        async with self._turn:
            try:
                found = await self._found(filters)
            except ClientError as error:
                logger.warning("federation_retained_unread error=%r", str(error))
        done(found)

    async def _await_end(
        self, client: Client, topic: str, end: bytes, is_over: asyncio.Event
    ) -> None:
        """Waits until the broker has delivered the end marker behind all retained messages.

        Raises `TimedOut` if it does not come back, `ClientError` if it cannot be sent.
        """
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await client.publish(topic, end, qos=1)
                while not await _is_set(is_over, END_AGAIN_S):
                    # A broker drops the marker, too, if its queue for this client is full.
                    await client.publish(topic, end, qos=1)
        except TimeoutError:
            raise TimedOut(f"nothing comes back on {topic}") from None

    async def _found(self, filters: frozenset[str]) -> RetainedFound:
        # By topic, because overlapping filters repeat messages.
        found: dict[str, Message] = {}
        size = 0
        unreadable: list[str] = []
        own_topic = f"{PREFIX}{self._client_id}"
        end = secrets.token_hex(8).encode()
        is_over = asyncio.Event()

        def take(received: Received) -> None:
            nonlocal size
            if received.topic == own_topic and received.payload == end:
                is_over.set()
            elif received.retain and may_leave(received.topic) and received.topic not in found:
                message = outbound(received)
                size += len(received.topic) + len(received.payload) + len(message.properties)
                if len(message.properties) > PROPERTIES_BYTES_MAX:
                    unreadable.append(f"{len(message.properties)} bytes of properties")
                elif len(found) < MESSAGES_MAX and size <= BYTES_MAX:
                    found[received.topic] = message

        settings = self._settings
        async with Client(
            servers=settings.servers,
            options=settings.options(self._client_id, False, False, unreadable.append),
            tls=settings.tls,
            request_timeout_s=settings.wait_s,
            on_message=take,
        ) as client:
            await client.subscribe((own_topic, 1))
            is_5 = settings.level == LEVEL_5
            for filter in sorted(filters):
                try:
                    await client.subscribe(SubscriptionRequest(filter, 2, retain_as_published=is_5))
                except SubscribeRefused as error:
                    logger.warning("federation_retained_refused error=%r", str(error))
            await self._await_end(client, own_topic, end, is_over)
        if unreadable:
            logger.warning(
                "federation_retained_left_out messages=%d error=%r", len(unreadable), unreadable[0]
            )
        is_full = len(found) >= MESSAGES_MAX or size > BYTES_MAX
        if is_full:
            logger.warning("federation_retained_too_many messages=%d bytes=%d", len(found), size)
        return RetainedFound(list(found.values()), not is_full)


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


logger = logging.getLogger("holdfast.federator")

CONTROL_RETRY_S: Final = 5.0
"""The delay in seconds after a permanent refusal by the broker."""


class ControlConnection:
    """Keeps one sessionless client connected and subscribed to the sources of interest."""

    def __init__(
        self,
        settings: EdgeSettings,
        client_id: str,
        sources: InterestSources,
        complain: Complaints,
        on_word: Callable[[], None],
    ) -> None:
        """`on_word`: called after `sources` has received a statement of interest."""
        self._settings = settings
        self._client_id = client_id
        self._sources = sources
        self._complain = complain
        self._on_message = on_word
        self._client: Client | None = None
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_listening = False
        """Whether every source of interest that the broker permits is subscribed to."""

    def start(self) -> "asyncio.Task[None]":
        """Starts the task that runs until `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def publish(self, topic: str, payload: bytes) -> None:
        """Publishes at QoS 1, waiting for a connection and the acknowledgement.

        Raises `ClientError` when the broker refuses the message or the connection ends for good.
        """
        while True:
            await self._up.wait()
            client = self._client
            if client is not None:
                await client.publish(topic, payload, qos=1)
                return

    async def _run(self) -> None:
        while True:
            client = Client(
                servers=self._settings.servers,
                reconnect=self._settings.reconnect,
                options=self._settings.options(self._client_id, False, False, self._unreadable),
                tls=self._settings.tls,
                request_timeout_s=self._settings.wait_s,
                on_message=self._handle_message,
                on_connect=self._connected,
            )
            try:
                await client.connect()
                self._client = client
                self._up.set()
                await self._subscribe(client)
                self.is_listening = True
                error = await client.wait_closed()
            except ClientError as failure:
                error = failure
            finally:
                self._up.clear()
                self.is_listening = False
                self._client = None
                client.abort()
            self._complain.say("control", str(error), f"receives no interest: {error}")
            await asyncio.sleep(CONTROL_RETRY_S)

    async def _subscribe(self, client: Client) -> None:
        for topic in self._sources.topics():
            try:
                await client.subscribe(SubscriptionRequest(topic, 0))
            except SubscribeRefused as error:
                logger.warning(
                    "federation_interest_refused topic=%r error=%r text='allow it in the access"
                    " list of the broker, or leave this source out'", topic, str(error),
                )  # fmt: skip

    def _connected(self, session_present: bool, server: Server) -> None:
        self._complain.forget("control")

    def _unreadable(self, text: str) -> None:
        self._complain.say("unreadable", "", f"passed over what it cannot read: {text}")

    def _handle_message(self, message: Received) -> None:
        now = asyncio.get_running_loop().time()
        try:
            self._sources.handle(message.topic, message.payload, now)
        except BadWord as error:
            self._complain.say("word", "", f"refused a message on {message.topic[:200]!r}: {error}")
        else:
            self._on_message()


RETRY_S: Final = 2.0
"""The delay in seconds before a new client, and before an unanswered step is repeated. A new client
follows a permanent refusal of the one before."""
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0
"""The first pause in seconds before deliveries to a busy broker; doubles to PAUSE_MAX_S."""
DRAIN_S: Final = 3.0
"""The time in seconds that `stop` waits for messages in flight, checked each DRAIN_STEP_S."""
DRAIN_STEP_S: Final = 0.01
INTEREST_EVERY_S: Final = 0.1
"""The shortest interval in seconds between two writes of clients' interest."""
TICK_S: Final = 1.0
"""The interval in seconds of checks for expired interest."""
BRIDGE_REFUSALS: Final = 2
"""The number of refused connections with the bridge bit before the edge omits it."""


class MqttEdge:
    """The `Edge` of `holdfast_federation.sidecar.edge` that uses an MQTT client."""

    def __init__(self, settings: EdgeSettings) -> None:
        """Checks the settings. Raises `ValueError` or `InvalidFilter` if they are bad."""
        self._settings = settings
        self._complain = Complaints(lambda: asyncio.get_running_loop().time(), "federation_edge")
        self._memory = EdgeMemory(settings, self._complain)
        self._is_bridge = settings.level < LEVEL_5
        self._bridge_refusals = 0
        self._client: Client | None = None
        self._delivery: ImportDelivery | None = None
        self._is_connected = False
        self._is_probed = False
        self._is_ready = False
        # True while the subscriptions at the broker differ from the wanted ones.
        self._is_running = True
        self._is_paused = False
        self._pause_s = PAUSE_S
        self._is_up = False
        self._imports = Imports()
        self._exports = Exports(self._publish, self._acknowledge, self._replays())
        # Set when `_maintain` has work, and when interest may have changed.
        self._wake = asyncio.Event()
        self._interest_stated = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop
        self._host: EdgeHost
        self._own: OwnTopic
        self._subscriptions: EdgeSubscriptions
        self._control: ControlConnection
        self._reader: RetainedReader
        self._failure: asyncio.Future[Exception]

    @property
    def client_id(self) -> str:
        """The client id at the broker, available after `start`."""
        return self._memory.client_id

    async def failed(self) -> Exception:
        """Waits until the edge has given up. The caller still has to call `stop`."""
        return await asyncio.shield(self._failure)

    # Edge

    async def start(self, host: EdgeHost) -> None:
        """Loads the state and begins to connect. Raises `BadState` or `OSError`."""
        self._host = host
        settings = self._settings
        self._loop = loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        memory = self._memory
        await memory.load(loop.time())
        await self._report_interest()
        self._reader = RetainedReader(settings, memory.reader_id)
        self._control = ControlConnection(
            settings, memory.control_id, memory.sources, self._complain, self._interest_stated.set
        )
        self._own = OwnTopic(self.client_id, settings.wait_s, self._control.publish)
        self._subscriptions = EdgeSubscriptions(
            memory.subscribed,
            settings.export_filters,
            self._exports,
            self._own.fence,
            memory.save_subscriptions,
        )
        # Whatever the state file says: the broker may have subscriptions that it lacks.
        self._exports.suspend()
        work = (self._run(), self._tick(), self._report_changes())
        self._tasks = [loop.create_task(each) for each in work]
        for task in (*self._tasks, self._control.start()):
            task.add_done_callback(self._ended)

    def set_wanted_filters(self, filters: frozenset[str]) -> None:
        self._subscriptions.set_wanted_filters(filters)
        self._exports.resume()
        self._wake.set()

    def deliver(self, delivery: DeliverLocally, done: Callable[[], None]) -> None:
        self._deliver(delivery.id, delivery.message, delivery.place, done, False)

    async def stop(self) -> None:
        """Finishes what is in flight, for at most DRAIN_S, and disconnects."""
        if not self._tasks:
            return
        await self._drain()
        self._is_ready = False
        self._report_down("the federator stops")
        tasks = [*self._tasks, *self._reader.tasks()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._control.stop()
        await self._memory.save()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Fails the edge if one of its tasks ends: without it the edge would only seem to work."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            logger.critical("federation_edge_failed error=%r", str(error), exc_info=error)
            self._failure.set_result(RuntimeError(f"the edge has failed: {error!r}"))

    async def _drain(self) -> None:
        delivery = self._delivery
        if delivery is None or not self._is_up:
            return
        delivery.end()
        self._exports.suspend()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DRAIN_S
        while (delivery.in_flight or len(self._exports)) and self._is_up:
            if loop.time() >= deadline:
                logger.warning("federation_not_drained text='the broker sends the rest again'")
                return
            await asyncio.sleep(DRAIN_STEP_S)

    def status(self) -> dict[str, object]:
        server = self._client.server if self._client is not None else None
        counts = self._exports.counts + self._imports.counts
        counts.update(
            {f"refused {name}": one for name, one in self._memory.sources.refused.items()}
        )
        return {
            "broker": str(server) if server is not None else None,
            "client_id": self.client_id,
            "is_connected": self._is_connected,
            "is_up": self._is_up,
            "is_settled": self._is_up
            and self._control.is_listening
            and not self._wake.is_set()
            and not self._is_running,
            "interest_filters": self._memory.sources.filter_count,
            "export_filters": self._subscriptions.subscribed(),
            "refused_filters": sorted(self._subscriptions.refused),
            "waiting_for_interest": self._exports.held,
            "waiting_for_custody": len(self._exports),
            "waiting_for_broker": len(self._imports),
            "counts": dict(sorted(counts.items())),
        }

    # Clients, one after another

    async def _run(self) -> None:
        while True:
            try:
                error = await self._live()
            except ClientError as failure:
                error = failure
            except EdgeRefused as refusal:
                logger.error("federation_edge_refused error=%r", str(refusal))
                self._lost(str(refusal))
                if not self._failure.done():
                    self._failure.set_result(refusal)
                return
            self._lost(str(error))
            self._complain.say("broker", str(error), f"lost its broker: {error}")
            await asyncio.sleep(RETRY_S)

    async def _live(self) -> ClientError:
        """Runs one client until it accepts no further connection, and returns the reason."""
        client = self._new_client()
        delivery = ImportDelivery(
            client, self._imports, f"fed-{self._memory.token}", self._pause, self._complain
        )
        self._client, self._delivery = client, delivery
        self._exports.replays = self._replays()
        self._exports.new_client()
        self._subscriptions.new_client()
        self._imports.forget()
        self._is_probed = False
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        closed: asyncio.Task[ClientError | None] | None = None
        try:
            await client.connect()
            tasks = {loop.create_task(delivery.run()), loop.create_task(self._maintain(client))}
            closed = loop.create_task(client.wait_closed())
            await asyncio.wait({*tasks, closed}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            return await closed or NotConnected("disconnected")
        finally:
            ending = [*tasks, closed] if closed is not None else [*tasks]
            for one in ending:
                one.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            if client.is_connected:
                await client.disconnect()
            else:
                client.abort()

    def _new_client(self) -> Client:
        settings = self._settings
        return Client(
            servers=settings.servers,
            reconnect=settings.reconnect,
            options=settings.options(self.client_id, True, self._is_bridge, self._unreadable),
            tls=settings.tls,
            request_timeout_s=settings.wait_s,
            on_message=self._arrived,
            on_connect=self._connected,
            on_connect_failed=self._connect_failed,
            on_connection_lost=self._connection_lost,
        )

    def _replays(self) -> Replays:
        if self._settings.level == LEVEL_5:
            return Replays.NONE
        return Replays.AT_FIRST if self._is_bridge else Replays.FLAGGED

    async def _maintain(self, client: Client) -> None:
        """Prepares each new connection, then keeps its subscriptions as wanted. Raises
        `EdgeRefused` if the broker's behaviour and the settings would cause loops."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._is_connected:
                continue
            connections = client.connections
            self._is_running = True
            try:
                await self._prepare(client)
                if client.connections == connections and self._is_connected:
                    self._is_ready = True
                    self._report_up()
                    await self._subscriptions.update(client)
            except (ConnectionLost, NotConnected, TimedOut) as error:
                if self._is_connected:
                    self._complain.say("tend", str(error), f"gets no answer: {error}")
                asyncio.get_running_loop().call_later(RETRY_S, self._wake.set)
            else:
                self._is_running = False

    async def _prepare(self, client: Client) -> None:
        if not self._is_probed:
            check_echo(await self._own.try_echo(client), self._settings)
            self._is_probed = True
        if self._exports.is_settling:
            await self._own.fence()
            self._exports.is_settling = False

    # Callbacks of the client

    def _connected(self, session_present: bool, server: Server) -> None:
        logger.info(
            "federation_edge_connected server=%s client=%r session_present=%s",
            server, self.client_id, session_present,
        )  # fmt: skip
        self._complain.forget("broker")
        self._bridge_refusals = 0
        self._is_connected = True
        self._is_ready = False
        if not session_present:
            self._exports.forget_session()
            self._exports.is_settling = True
        self._subscriptions.connected(session_present)
        self._wake.set()

    def _connection_lost(self, error: ClientError) -> None:
        self._complain.say("broker", str(error), f"lost its broker: {error}")
        self._lost(str(error))

    def _lost(self, reason: str) -> None:
        self._is_connected = False
        self._is_ready = False
        self._report_down(reason)

    def _connect_failed(self, error: ClientError, server: Server) -> None:
        self._complain.say("broker", str(error), f"cannot reach its broker: {error}")
        if not self._is_bridge:
            return
        if isinstance(error, ConnectionRefused):
            is_answer = error.reason == reasons.UNSUPPORTED_PROTOCOL_VERSION
        else:
            is_answer = "closed by the server" in str(error)
        self._bridge_refusals = self._bridge_refusals + 1 if is_answer else 0
        if self._bridge_refusals >= BRIDGE_REFUSALS and self._client is not None:
            logger.warning("federation_edge_no_bridge server=%s", server)
            self._is_bridge = False
            self._client.abort()

    def _arrived(self, received: Received) -> None:
        if received.topic != self._own.name:
            self._exports.handle(received)
            return
        if self._own.arrived(received):
            self._exports.fence()
        if received.qos:
            self._acknowledge(received)

    def _unreadable(self, text: str) -> None:
        self._exports.counts["unreadable"] += 1
        self._complain.say("unreadable", "", f"passed over what it cannot read: {text}")

    def _publish(self, message: Message, done: Callable[[], None]) -> None:
        self._host.publish(message, done)

    def _acknowledge(self, received: Received) -> bool:
        client = self._client
        if client is None or not client.is_connected or received.connection != client.connections:
            return False
        client.acknowledge(received)
        return True

    def _deliver(
        self,
        id: MessageId,
        message: Message,
        place: int,
        done: Callable[[], None],
        is_setting: bool,
    ) -> None:
        now = self._loop.time()
        now_done = self._imports.deliver(id, message, place, done, now, is_setting)
        if now_done is not None:
            self._loop.call_soon(now_done)
        if self._delivery is not None:
            self._delivery.wake()

    # Up and down

    def _report_up(self) -> None:
        if self._is_ready and not self._is_paused and not self._is_up:
            self._is_up = True
            self._host.edge_up()

    def _report_down(self, reason: str) -> None:
        if self._is_up:
            self._is_up = False
            self._imports.down()
            self._host.edge_down(reason)

    def _pause(self, reason: str) -> None:
        """Stops deliveries for a while. They resume with the first message the broker refused."""
        if self._is_paused:
            return
        self._is_paused = True
        self._report_down(reason)
        asyncio.get_running_loop().call_later(self._pause_s, self._go_on)
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    def _go_on(self) -> None:
        self._is_paused = False
        self._report_up()

    # Interest of clients

    async def _report_changes(self) -> None:
        while True:
            await self._interest_stated.wait()
            self._interest_stated.clear()
            await self._report_interest()
            await asyncio.sleep(INTEREST_EVERY_S)

    async def _report_interest(self) -> None:
        added, removed = await self._memory.take_interest()
        if added or removed:
            self._host.change_interest(added, removed)

    async def _tick(self) -> None:
        imported = 0
        while True:
            await asyncio.sleep(TICK_S)
            self._memory.sources.expire(asyncio.get_running_loop().time())
            self._interest_stated.set()
            if self._exports.held and self._subscriptions.is_waiting:
                text = "keeps its broker's messages until it learns what other members want"
                self._complain.say("held", "", text)
            if self._imports.counts["imported"] > imported and not self._is_paused:
                imported = self._imports.counts["imported"]
                self._pause_s = PAUSE_S

"""Reads a broker's retained messages with a client of its own."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Final

from holdfast.client.client import Client
from holdfast.client.errors import ClientError, SubscribeRefused, TimedOut
from holdfast.client.options import LEVEL_5
from holdfast.client.protocol.effects import Message as Received
from holdfast.federation.core.effects import Message
from holdfast.federation.core.frames import PROPERTIES_BYTES_MAX
from holdfast.federation.core.routing.interest import may_leave
from holdfast.federation.sidecar.edge_mqtt.loop_marker import outbound
from holdfast.federation.sidecar.edge_mqtt.loopback_probe import PREFIX
from holdfast.federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast.protocol.mqtt.packets import SubscriptionRequest

logger = logging.getLogger("holdfast.federator")

MESSAGES_MAX: Final = 100_000
BYTES_MAX: Final = 64 << 20
"""The limits of one reading. Messages beyond either are left out, and that is logged."""
READINGS_MAX: Final = 16
"""The most readings in progress or waiting. A further one finds nothing, and is logged."""

END_AGAIN_S: Final = 1.0
"""The interval in seconds in which the message that marks the end is repeated."""

Done = Callable[[list[Message]], None]


class RetainedReader:
    """Reads retained messages, one reading at a time, each on a new connection."""

    def __init__(self, settings: EdgeSettings, client_id: str) -> None:
        self._settings = settings
        self._client_id = client_id
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def tasks(self) -> set[asyncio.Task[None]]:
        return set(self._tasks)

    def read(self, filters: frozenset[str], done: Done) -> None:
        """Starts a reading. `done` is called later, with an empty list if the reading failed."""
        loop = asyncio.get_running_loop()
        if not filters or len(self._tasks) >= READINGS_MAX:
            if filters:
                logger.warning("federation_retained_busy readings=%d", READINGS_MAX)
            loop.call_soon(done, [])
            return
        task = loop.create_task(self._read(filters, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, filters: frozenset[str], done: Done) -> None:
        found: dict[str, Message] = {}
        async with self._turn:
            try:
                found = await self._found(filters)
            except ClientError as error:
                logger.warning("federation_retained_unread error=%r", str(error))
        done(list(found.values()))

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

    async def _found(self, filters: frozenset[str]) -> dict[str, Message]:
        """Reads into a dictionary by topic, because overlapping filters repeat messages."""
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
        if len(found) >= MESSAGES_MAX or size > BYTES_MAX:
            logger.warning("federation_retained_too_many messages=%d bytes=%d", len(found), size)
        return found


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()

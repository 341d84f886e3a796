"""The federator's own topic, which it publishes and subscribes to.

It shows that all earlier messages have arrived, and whether the broker returns the federator's own
publications.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.client.client import Client
from holdfast.client.errors import TimedOut
from holdfast.client.options import LEVEL_5
from holdfast.client.protocol.effects import Message as Received
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import Properties, SubscriptionRequest
from holdfast_federation.sidecar.edge_mqtt.loop_marker import MARK, is_marked
from holdfast_federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast_federation.sidecar.edge_mqtt.subscriptions import overlaps

logger = logging.getLogger("holdfast.federator")

PREFIX: Final = "federator/edge/"

NO_ECHO: Final = 0
MARKED_ECHO: Final = 1
"""The broker returns the message and keeps the mark on it."""
ECHO: Final = 2


class EdgeRefused(Exception):
    """The settings would cause loops at this broker. The text says what to do."""


class OwnTopic:
    """The loopback topic of the connection with the session; `publish` uses the other one."""

    def __init__(
        self, client_id: str, wait_s: float, publish: Callable[[str, bytes], Awaitable[None]]
    ) -> None:
        self.name = f"{PREFIX}{client_id}"
        self._wait_s = wait_s
        self._publish = publish
        self._fences: dict[bytes, asyncio.Future[None]] = {}
        self._probe = b""
        self._echo: Received | None = None

    def arrived(self, received: Received) -> bool:
        """Processes a message on this topic and returns whether it was a fence."""
        if self._probe and received.payload == self._probe:
            self._echo = received
        future = self._fences.pop(received.payload, None)
        if future is None or future.done():
            return False
        future.set_result(None)
        return True

    async def fence(self) -> None:
        """Waits until all messages that the broker had for the edge at the call have arrived.

        Raises `TimedOut` if the fence does not come back, `ClientError` if it cannot be sent.
        """
        payload = b"fence " + secrets.token_hex(8).encode()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fences[payload] = future
        try:
            async with asyncio.timeout(self._wait_s):
                await self._publish(self.name, payload)
                await future
        except TimeoutError:
            raise TimedOut(
                f"nothing comes back on {self.name}: the broker's access list must allow us to"
                " publish and to subscribe to federator/#"
            ) from None
        finally:
            self._fences.pop(payload, None)

    async def try_echo(self, client: Client) -> int:
        """Tests the broker and returns NO_ECHO, MARKED_ECHO or ECHO. Raises as `fence`."""
        is_5 = client.core.options.level == LEVEL_5
        await client.subscribe(SubscriptionRequest(self.name, 1, no_local=is_5))
        self._probe = b"probe " + secrets.token_hex(8).encode()
        self._echo = None
        properties: Properties | None = {pr.USER_PROPERTY: [(MARK, "probe")]} if is_5 else None
        await client.publish(self.name, self._probe, qos=1, properties=properties)
        # The fence is published later by another connection, so it arrives after any echo.
        await self.fence()
        echo, self._echo, self._probe = self._echo, None, b""
        if echo is None:
            return NO_ECHO
        return MARKED_ECHO if is_marked(echo) else ECHO


def check_echo(echo: int, settings: EdgeSettings) -> None:
    """Raises `EdgeRefused` if an unmarked echo and the filters would cause loops."""
    if echo == MARKED_ECHO:
        logger.warning(
            "federation_edge_echo text='the broker ignores no local: each message that the"
            " federator publishes returns and is dropped by its mark'"
        )
    if echo != ECHO:
        return
    meeting = [
        f"{one!r} out and {other!r} in"
        for one in settings.export_filters
        for other in settings.import_filters
        if overlaps(one, other)
    ]
    if meeting:
        raise EdgeRefused(
            "the broker sends back what we publish, and nothing tells it from what its clients"
            " publish: messages would go round in circles. Use MQTT 5 (--protocol 5), or let"
            f" no topic go both ways (--export, --import); now {', '.join(meeting)}"
        )

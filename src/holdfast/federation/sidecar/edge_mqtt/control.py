"""Second connection to the broker, for interest and for fences.

It receives the sources of interest, and sends messages that must come from another client than the
one with the session. It has no session, so no old message waits for it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from holdfast.client.client import Client
from holdfast.client.errors import ClientError, SubscribeRefused
from holdfast.client.protocol.effects import Message
from holdfast.client.servers import Server
from holdfast.federation.sidecar.edge_mqtt.interest_sources import BadWord, InterestSources
from holdfast.federation.sidecar.edge_mqtt.settings import EdgeSettings
from holdfast.io.peers.complaints import Complaints
from holdfast.protocol.mqtt.packets import SubscriptionRequest

logger = logging.getLogger("holdfast.federator")

RETRY_S: Final = 5.0
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
            await asyncio.sleep(RETRY_S)

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

    def _handle_message(self, message: Message) -> None:
        now = asyncio.get_running_loop().time()
        try:
            self._sources.handle(message.topic, message.payload, now)
        except BadWord as error:
            self._complain.say("word", "", f"refused a message on {message.topic[:200]!r}: {error}")
        else:
            self._on_message()

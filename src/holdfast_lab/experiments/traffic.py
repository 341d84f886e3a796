"""A publisher and a durable subscriber of one topic, whose events are recorded.

A message is due one interval after the one before it, whatever the broker does, up to a window of
unconfirmed messages. After an outage the publisher goes on at its rate, and does not send at once
what the outage held back.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

from holdfast.client import Client, ClientError, Options, Reconnect
from holdfast.protocol.mqtt.publish import Publish
from holdfast_lab.log import ExperimentLog

PAYLOAD_BYTES: Final = 26
RESPONSE_S: Final = 0.5
"""The silence of a server that owes a reply, after which a client looks for another one."""
SESSION_EXPIRY_S: Final = 600
WINDOW: Final = 32
DRAIN_S: Final = 15.0
PUBLISHER: Final = "publisher"
SUBSCRIBER: Final = "subscriber"


def new_client(
    servers: list[str],
    client_id: str,
    log: ExperimentLog,
    name: str,
    on_connect: Callable[[], None],
    on_trace: Callable[[bool, object], None] | None = None,
) -> Client:
    """A client with a session of its own, that finds another server within a second. Its
    connections are events of the log."""

    def connected(session_present: bool, server: object) -> None:
        """Record a connection."""
        log.write("connected", client=name)
        on_connect()

    def disconnected(error: object) -> None:
        """Record the end of a connection."""
        log.write("disconnected", client=name)

    return Client(
        servers=servers,
        on_trace=on_trace,
        on_connect=connected,
        on_connection_lost=disconnected,
        reconnect=Reconnect(first_delay_s=0.02, delay_max_s=0.2),
        options=Options(
            client_id=client_id,
            clean_start=False,
            session_expiry_s=SESSION_EXPIRY_S,
            connect_timeout_s=RESPONSE_S,
            response_timeout_s=RESPONSE_S,
            ping_interval_s=RESPONSE_S / 2,
        ),
    )


def payload_of(sequence: int) -> bytes:
    """The payload of a message: its number first."""
    return b"%08d" % sequence + b"." * (PAYLOAD_BYTES - 8)


@dataclass
class Observed:
    """The observations of the two clients, with times of the monotonic clock in seconds."""

    published: dict[int, float] = field(default_factory=dict)
    confirmed: dict[int, float] = field(default_factory=dict)
    refused: int = 0
    delivered: dict[int, float] = field(default_factory=dict)
    """The first delivery of each message."""
    repeated: int = 0
    reordered: int = 0

    def lost(self) -> list[int]:
        """The confirmed messages that never arrived."""
        return sorted(self.confirmed.keys() - self.delivered.keys())

    def not_delivered(self) -> list[int]:
        """The messages that never arrived, confirmed or not."""
        return sorted(self.published.keys() - self.delivered.keys())

    def silence_s(self, from_s: float, until_s: float) -> float | None:
        """The longest time without a confirmation that touches the span; None if there was no
        confirmation after its beginning."""
        times = sorted(self.confirmed.values())
        longest: float | None = None
        for before_s, after_s in pairwise(times):
            if after_s >= from_s and before_s <= until_s:
                longest = max(longest or 0.0, after_s - before_s)
        return longest


class Traffic:
    """`async with Traffic(...)`: the subscriber is subscribed, and the publisher publishes."""

    def __init__(
        self,
        servers: list[str],
        topic: str,
        log: ExperimentLog,
        *,
        interval_s: float,
        count: int = 0,
    ) -> None:
        """`count` messages, one every `interval_s`; 0: until `finish`."""
        self.topic = topic
        self.observed = Observed()
        self._log = log
        self._interval_s = interval_s
        self._count = count
        self._connections = 0
        self._subscriber = new_client(
            servers, f"{log.run}-sub", log, SUBSCRIBER, self._subscriber_connected
        )
        self._publisher = new_client(
            servers, f"{log.run}-pub", log, PUBLISHER, lambda: None, self._sent
        )
        self._window = asyncio.Semaphore(WINDOW)
        self._is_over = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._newest = 0

    async def __aenter__(self) -> "Traffic":
        """Raises `ClientError` if the broker does not serve."""
        log = self._log
        log.write("client", client=SUBSCRIBER)
        await self._subscriber.connect()
        filters = [{"filter": self.topic, "qos": 1}]
        log.write("subscribing", client=SUBSCRIBER, filters=filters)
        await self._subscriber.subscribe((self.topic, 1))
        log.write("subscribed", client=SUBSCRIBER)
        await self._publisher.connect()
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._publish()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in (self._publisher, self._subscriber):
            with contextlib.suppress(ClientError, OSError, TimeoutError):
                await asyncio.wait_for(client.disconnect(), RESPONSE_S)

    async def _publish(self) -> None:
        due_s = time.monotonic()
        sequence = 0
        while not self._is_over.is_set() and (not self._count or sequence < self._count):
            sequence += 1
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._window.acquire()
            due_s = max(due_s + self._interval_s, time.monotonic())
            self.observed.published[sequence] = time.monotonic()
            future = await self._publisher.submit(self.topic, payload_of(sequence), qos=1)
            future.add_done_callback(partial(self._settled, sequence))

    def _subscriber_connected(self) -> None:
        self._connections += 1

    def _sent(self, is_sent: bool, packet: object) -> None:
        """Record each PUBLISH that leaves the publisher, repetitions too."""
        if is_sent and isinstance(packet, Publish):
            self._log.write(
                "published", publisher=PUBLISHER, topic=self.topic, qos=1,
                sequence=int(packet.payload[:8]), bytes=len(packet.payload),
            )  # fmt: skip

    def _settled(self, sequence: int, future: "asyncio.Future[object]") -> None:
        self._window.release()
        if future.cancelled() or future.exception() is not None:
            self.observed.refused += 1
            return
        self.observed.confirmed[sequence] = time.monotonic()
        self._log.write("confirmed", publisher=PUBLISHER, topic=self.topic, sequence=sequence)
        self._changed.set()

    async def _receive(self) -> None:
        observed = self.observed
        async for message in self._subscriber.messages():
            sequence = int(message.payload[:8])
            if sequence in observed.delivered:
                observed.repeated += 1
            else:
                observed.reordered += sequence < self._newest
                observed.delivered[sequence] = time.monotonic()
            self._newest = max(self._newest, sequence)
            self._log.write(
                "delivered", client=SUBSCRIBER, publisher=PUBLISHER, topic=self.topic,
                sequence=sequence, connection=self._connections, dup=message.dup,
                bytes=len(message.payload),
            )  # fmt: skip
            self._changed.set()

    async def confirmations(self, count: int, timeout_s: float) -> bool:
        """Wait for so many more confirmations. Returns whether they came in time."""
        wanted = len(self.observed.confirmed) + count
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.observed.confirmed) < wanted:
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    async def finish(self) -> Observed:
        """Publish no more, and wait for the rest, at most `DRAIN_S` without any progress. Raises
        the error that has ended a client."""
        observed = self.observed
        publishing = self._tasks[1]
        if not self._count:
            self._is_over.set()
        # A broker that confirms nothing more leaves the window full.
        progress = -1
        while not publishing.done() and len(observed.confirmed) > progress:
            progress = len(observed.confirmed)
            await asyncio.wait([publishing], timeout=DRAIN_S)
        publishing.cancel()
        while (
            len(observed.confirmed) + observed.refused < len(observed.published) or observed.lost()
        ):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), DRAIN_S)
            except TimeoutError:
                break
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        return observed

"""A publisher and durable subscribers of one topic, whose events are recorded.

A message is due one interval after the one before it, whatever the broker does, up to a window of
unconfirmed messages. After an outage the publisher goes on at its rate, and does not send at once
what the outage held back.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final
from zlib import crc32

from holdfast.client import Client, ClientError, Options, Reconnect
from holdfast.client.options import LEVEL_5
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
SERVE_S: Final = 60.0
"""The longest wait until all clients are connected and a message finds all subscribers."""


def new_client(
    servers: list[str],
    client_id: str,
    log: ExperimentLog,
    name: str,
    on_change: Callable[[bool], None],
    on_trace: Callable[[bool, object], None] | None = None,
    level: int = 5,
    *,
    user: str = "",
) -> Client:
    """A client with a session of its own, that finds another server within a second.

    Its connections and their ends are events of the log, and `on_change` is called with whether it
    is connected now.
    """

    def connected(session_present: bool, server: object) -> None:
        """Records a connection."""
        log.write("connected", client=name)
        on_change(True)

    def disconnected(error: object) -> None:
        """Records the end of a connection."""
        log.write("disconnected", client=name)
        on_change(False)

    return Client(
        servers=servers,
        on_trace=on_trace,
        on_connect=connected,
        on_connection_lost=disconnected,
        reconnect=Reconnect(first_delay_s=0.02, delay_max_s=0.2),
        options=Options(
            level=level,
            client_id=client_id,
            username=user or None,
            password=user.encode() or None,
            clean_start=False,
            session_expiry_s=SESSION_EXPIRY_S if level == LEVEL_5 else 0,
            connect_timeout_s=RESPONSE_S,
            response_timeout_s=RESPONSE_S,
            ping_interval_s=RESPONSE_S / 2,
        ),
    )


def payload_of(sequence: int, tag: bytes, size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """The payload of a message: its number, then the tag of its publisher."""
    return (b"%08d" % sequence + tag).ljust(size_bytes, b".")


@dataclass
class ObservedDeliveries:
    """The deliveries to one subscriber, with times of the monotonic clock in seconds."""

    delivered: dict[int, float] = field(default_factory=dict)
    """The first delivery of each message."""
    repeated: int = 0
    reordered: int = 0
    probes: int = 0
    newest: int = 0

    def take(self, sequence: int) -> None:
        """Counts a delivery."""
        if sequence in self.delivered:
            self.repeated += 1
        else:
            self.reordered += sequence < self.newest
            self.delivered[sequence] = time.monotonic()
        self.newest = max(self.newest, sequence)


@dataclass
class Observed:
    """The observations of all clients, with times of the monotonic clock in seconds."""

    due: dict[int, float] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)
    confirmed: dict[int, float] = field(default_factory=dict)
    refused: int = 0
    links: list[tuple[float, str, bool]] = field(default_factory=list)
    """Times, clients, and whether the client was connected or disconnected then."""
    arrivals: dict[str, ObservedDeliveries] = field(
        default_factory=lambda: {SUBSCRIBER: ObservedDeliveries()}
    )
    """By subscriber."""

    @property
    def repeated(self) -> int:
        """The deliveries after the first one."""
        return sum(each.repeated for each in self.arrivals.values())

    @property
    def reordered(self) -> int:
        """The first deliveries that came after a later message."""
        return sum(each.reordered for each in self.arrivals.values())

    def delivered(self) -> set[int]:
        """The messages that every subscriber has."""
        return set.intersection(*(set(each.delivered) for each in self.arrivals.values()))

    def lost(self) -> list[int]:
        """The confirmed messages that did not arrive at every subscriber."""
        return sorted(self.confirmed.keys() - self.delivered())

    def not_delivered(self) -> list[int]:
        """The messages that did not arrive at every subscriber, confirmed or not."""
        return sorted(self.published.keys() - self.delivered())

    def latencies_ms(self, subscriber: str) -> list[float]:
        """The times from when each message was due until it arrived, in the order of arrival."""
        arrived = self.arrivals[subscriber].delivered
        return [(at_s - self.due[number]) * 1000 for number, at_s in arrived.items()]

    def gap_s(self, subscriber: str, from_s: float, until_s: float) -> float | None:
        """The longest time without a delivery that touches the span; see `silence_s`."""
        gap = longest_gap(self.arrivals[subscriber].delivered.values(), from_s, until_s)
        return None if gap is None else length_of(gap)

    def silence_s(self, from_s: float, until_s: float) -> float | None:
        """The longest time without a confirmation that touches the span; None if there was no
        confirmation after its beginning."""
        gap = longest_gap(self.confirmed.values(), from_s, until_s)
        return None if gap is None else length_of(gap)


def longest_gap(
    times_s: Iterable[float], from_s: float, until_s: float
) -> tuple[float, float] | None:
    """The longest gap between two of these times that touches the span, by its ends. None if none
    of them ends after the span's beginning."""
    found: tuple[float, float] | None = None
    for before_s, after_s in pairwise(sorted(times_s)):
        if after_s >= from_s and before_s <= until_s:
            gap = (before_s, after_s)
            found = gap if found is None else max(found, gap, key=length_of)
    return found


def length_of(gap: tuple[float, float]) -> float:
    """The seconds of a gap."""
    return gap[1] - gap[0]


class Traffic:
    """`async with Traffic(...)`: all subscribers are subscribed, and the publisher publishes."""

    def __init__(
        self,
        servers: list[str],
        topic: str,
        log: ExperimentLog,
        *,
        interval_s: float,
        count: int = 0,
        subscribers: Mapping[str, list[str]] | None = None,
        window: int = WINDOW,
        size_bytes: int = PAYLOAD_BYTES,
        level: int = 5,
        user: str = "",
    ) -> None:
        """`count` messages, one every `interval_s`; 0: until `finish`.

        `servers` are those of the publisher, and of the only subscriber unless `subscribers` has
        the servers of each one by its name. Several servers or members may need time until a
        message finds all subscribers: nothing is counted before `probe` has seen one there.
        """
        self.topic = topic
        placed = subscribers or {SUBSCRIBER: servers}
        self.observed = Observed(arrivals={name: ObservedDeliveries() for name in placed})
        self._log = log
        self._interval_s = interval_s
        self._count = count
        self._size_bytes = size_bytes
        # Two publishers of one topic count alike.
        self._tag = b"%08x" % crc32(log.run.encode())
        self._is_probing = subscribers is not None
        self._connections = dict.fromkeys((*placed, PUBLISHER), 0)
        self._subscribers = {
            name: new_client(
                where,
                f"{log.run}-{name}",
                log,
                name,
                partial(self._changed_link, name),
                None,
                level,
                user=user,
            )
            for name, where in placed.items()
        }
        self._publisher = new_client(
            servers,
            f"{log.run}-pub",
            log,
            PUBLISHER,
            partial(self._changed_link, PUBLISHER),
            self._sent,
            level,
            user=user,
        )
        self._window = asyncio.Semaphore(window)
        self._is_over = asyncio.Event()
        self._changed = asyncio.Event()
        self._receiving: list[asyncio.Task[None]] = []
        self._publishing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Traffic":
        """Raises `ClientError` if the broker does not serve within `SERVE_S`."""
        try:
            async with asyncio.timeout(SERVE_S):
                await self._connect()
        except TimeoutError:
            await self.__aexit__()
            raise ClientError(f"the broker does not serve within {SERVE_S:g} s") from None
        self._publishing = asyncio.create_task(self._publish())
        return self

    async def _connect(self) -> None:
        log = self._log
        for name, client in self._subscribers.items():
            log.write("client", client=name)
            await client.connect()
            await client.subscribe((self.topic, 1))
            self._receiving.append(asyncio.create_task(self._receive(name, client)))
        await self._publisher.connect()
        if self._is_probing:
            await self._probe()
        for name in self._subscribers:
            # Members of a federation owe nothing before they know the subscription.
            filters = [{"filter": self.topic, "qos": 1}]
            log.write("subscribing", client=name, filters=filters)
            log.write("subscribed", client=name)

    async def _probe(self) -> None:
        """Publishes messages that do not count until each subscriber has one."""
        while not all(each.probes for each in self.observed.arrivals.values()):
            await (await self._publisher.submit(self.topic, payload_of(0, self._tag), qos=1))
            with contextlib.suppress(TimeoutError):
                self._changed.clear()
                await asyncio.wait_for(self._changed.wait(), RESPONSE_S)

    async def __aexit__(self, *_: object) -> None:
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (self._publisher, *self._subscribers.values()):
            with contextlib.suppress(ClientError, OSError, TimeoutError):
                await asyncio.wait_for(client.disconnect(), RESPONSE_S)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._receiving, *([self._publishing] if self._publishing else [])]

    async def _publish(self) -> None:
        due_s = time.monotonic()
        sequence = 0
        while not self._is_over.is_set() and (not self._count or sequence < self._count):
            sequence += 1
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.observed.due[sequence] = due_s
            await self._window.acquire()
            due_s = max(due_s + self._interval_s, time.monotonic())
            self.observed.published[sequence] = time.monotonic()
            payload = payload_of(sequence, self._tag, self._size_bytes)
            future = await self._publisher.submit(self.topic, payload, qos=1)
            future.add_done_callback(partial(self._settled, sequence))

    def _changed_link(self, name: str, is_connected: bool) -> None:
        self._connections[name] += is_connected
        self.observed.links.append((time.monotonic(), name, is_connected))

    def _sent(self, is_sent: bool, packet: object) -> None:
        """Records each PUBLISH that leaves the publisher, repetitions too."""
        if is_sent and isinstance(packet, Publish) and int(packet.payload[:8]):
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

    async def _receive(self, name: str, client: Client) -> None:
        arrivals = self.observed.arrivals[name]
        async for message in client.messages():
            if message.payload[8:16] != self._tag:
                continue
            sequence = int(message.payload[:8])
            self._changed.set()
            if not sequence:
                arrivals.probes += 1
                continue
            arrivals.take(sequence)
            self._log.write(
                "delivered", client=name, publisher=PUBLISHER, topic=self.topic,
                sequence=sequence, connection=self._connections[name], dup=message.dup,
                bytes=len(message.payload),
            )  # fmt: skip

    async def deliveries(self, name: str, count: int, timeout_s: float) -> bool:
        """Waits for so many more deliveries to a subscriber. Returns whether they came in time."""
        delivered = self.observed.arrivals[name].delivered
        return await self._wait_for(lambda: len(delivered), count, timeout_s)

    async def confirmations(self, count: int, timeout_s: float) -> bool:
        """Waits for so many more confirmations. Returns whether they came in time."""
        return await self._wait_for(lambda: len(self.observed.confirmed), count, timeout_s)

    async def _wait_for(self, number: Callable[[], int], count: int, timeout_s: float) -> bool:
        wanted = number() + count
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while number() < wanted:
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    async def finish(self, drain_s: float | None = None) -> Observed:
        """Publishes no more, and waits for the rest, at most `drain_s` (else `DRAIN_S`) without any
        progress. Raises the error that has ended a client."""
        drain_s = DRAIN_S if drain_s is None else drain_s
        observed = self.observed
        publishing = self._publishing
        assert publishing is not None
        if not self._count:
            self._is_over.set()
        # A broker that confirms nothing more leaves the window full.
        progress = -1
        while not publishing.done() and len(observed.confirmed) > progress:
            progress = len(observed.confirmed)
            await asyncio.wait([publishing], timeout=drain_s)
        publishing.cancel()
        while (
            len(observed.confirmed) + observed.refused < len(observed.published) or observed.lost()
        ):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), drain_s)
            except TimeoutError:
                break
        for task in self._tasks():
            if task.done() and not task.cancelled():
                task.result()
        return observed

"""Publishes for a federator of the published protocol on one broker.

The broker is its own or a neighbour's. A full queue drops its oldest messages and counts them. So
no message is late for long, and a broker that hangs delays only its own messages.
"""

import asyncio
from collections import Counter, deque
from typing import Final

from holdfast.client import Client, ClientError, Options, PublishResult, QueueFull, Reconnect
from holdfast.client.errors import ConnectionLost, NotConnected
from holdfast.client.servers import parse_server
from holdfast.io.event_loop.failures import watched
from holdfast.io.peers.complaints import Complaints

QUEUE_MESSAGES_MAX: Final = 10_000
QUEUE_BYTES_MAX: Final = 16 << 20
INFLIGHT_MAX: Final = 100
"""The most unacknowledged messages; the client queues as many again while it reconnects."""
STALE_S: Final = 5.0
"""The time in seconds of an interruption after which unacknowledged messages are not repeated."""
PAUSE_S: Final = 1.0
"""The pause in seconds before connecting again, after STALE_S of attempts or a refusal."""
KEEP_ALIVE_S: Final = 10
STOP_S: Final = 2.0

Item = tuple[str, bytes, int]
"""A topic, a payload and a QoS."""


def options(client_id: str, username: str | None, password: bytes | None) -> Options:
    """Makes the options of a client without a session, so that no message waits at the broker."""
    return Options(
        client_id=client_id,
        username=username,
        password=password,
        keep_alive_s=KEEP_ALIVE_S,
        inflight_max=INFLIGHT_MAX,
        queue_messages_max=INFLIGHT_MAX,
    )


class Outlet:
    """The queue of messages to one broker, in order."""

    def __init__(self, counts: Counter[str], complaints: Complaints, name: str) -> None:
        """`counts`: receives lost messages by reason. `name`: the broker's name for the log."""
        self._counts = counts
        self._complaints = complaints
        self._name = name
        self._queue: deque[Item] = deque()
        self._queue_bytes = 0
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, item: Item) -> None:
        self._queue.append(item)
        self._queue_bytes += len(item[1])
        while len(self._queue) > QUEUE_MESSAGES_MAX or self._queue_bytes > QUEUE_BYTES_MAX:
            self._queue_bytes -= len(self._queue.popleft()[1])
            self._counts["queue full"] += 1
        self._arrival.set()

    def clear(self) -> None:
        """Drops all messages, because there is no connection and none is expected soon."""
        self._counts["broker away"] += len(self._queue)
        self._queue.clear()
        self._queue_bytes = 0

    async def pump(self, client: Client) -> None:
        """Publishes queued messages until the connection ends."""
        while True:
            while not self._queue:
                self._arrival.clear()
                await self._arrival.wait()
            topic, payload, qos = self._queue.popleft()
            self._queue_bytes -= len(payload)
            try:
                future = await client.submit(topic, payload, qos=qos)
            except (ConnectionLost, NotConnected):
                self._counts["broker away"] += 1
                return
            except ClientError as error:
                # For example QueueFull, or a message larger than the broker accepts.
                self._connection_lost(error)
            else:
                future.add_done_callback(self._resolved)

    def _resolved(self, future: asyncio.Future[PublishResult]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, ConnectionLost | NotConnected):
            self._counts["broker away"] += 1
        elif isinstance(error, ClientError):
            self._connection_lost(error)

    def _connection_lost(self, error: ClientError) -> None:
        reason = "queue full" if isinstance(error, QueueFull) else "refused by the broker"
        self._counts[reason] += 1
        self._complaints.say(f"{self._name} publish", reason, f"{self._name}: {error}")


class NeighbourLink:
    """The connection to a neighbour's broker, used only to publish there."""

    def __init__(
        self,
        id: int,
        address: str,
        options: Options,
        counts: Counter[str],
        complaints: Complaints,
    ) -> None:
        """Begins to connect at once. Raises `ValueError` if the address is malformed."""
        self.id = id
        self.address = address
        self.is_up = False
        self._counts = counts
        self._complaints = complaints
        self._name = f"neighbour {id} at {address}"
        self._outlet = Outlet(counts, complaints, self._name)
        self._options = options
        parse_server(address)
        self._task = watched(self._run())

    @property
    def queued(self) -> int:
        return len(self._outlet)

    def enqueue(self, item: Item) -> None:
        if self.is_up:
            self._outlet.enqueue(item)
        else:
            self._counts["broker away"] += 1

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            client = Client(
                servers=[self.address],
                reconnect=Reconnect(give_up_after_s=STALE_S),
                options=self._options,
            )
            try:
                await client.connect()
                self.is_up = True
                self._complaints.forget(self._name)
                await serve(client, self._outlet)
            except ClientError as error:
                self._complaints.say(self._name, type(error).__name__, f"{self._name}: {error}")
            finally:
                self.is_up = False
                self._outlet.clear()
                await close(client)
            await asyncio.sleep(PAUSE_S)


async def serve(client: Client, outlet: Outlet) -> None:
    """Publishes until the connection ends for good. Raises the `ClientError` that ended it."""
    pumping = watched(outlet.pump(client))
    try:
        error = await client.wait_closed()
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
    if error is not None:
        raise error


async def close(client: Client) -> None:
    """Sends DISCONNECT and closes, or aborts after STOP_S."""
    try:
        async with asyncio.timeout(STOP_S):
            await client.disconnect()
    except TimeoutError:
        client.abort()

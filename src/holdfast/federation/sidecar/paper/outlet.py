"""What a federator of the published protocol publishes on one broker: its own, or a neighbour's.

Nobody waits for a broker: what does not fit goes, the oldest first, and is counted. So no message
comes late for long, and a broker that hangs holds up nothing but what is for it.
"""

import asyncio
from collections import Counter, deque
from typing import Final

from holdfast.client import Client, ClientError, Options, PublishResult, QueueFull, Reconnect
from holdfast.client.errors import ConnectionLost, NotConnected
from holdfast.client.servers import parse_server
from holdfast.server.event_loop.failures import watched
from holdfast.server.peers.complaints import Complaints

QUEUE_MESSAGES_MAX: Final = 10_000
QUEUE_BYTES_MAX: Final = 16 << 20
INFLIGHT_MAX: Final = 100
"""Without an acknowledgement, and as many again in the client while it reconnects."""
STALE_S: Final = 5.0
"""What was sent and not acknowledged is sent again to a broker that is back within so long."""
PAUSE_S: Final = 1.0
"""Between attempts to connect, after STALE_S of them, and after a refusal."""
KEEP_ALIVE_S: Final = 10
STOP_S: Final = 2.0

Item = tuple[str, bytes, int]
"""Topic, payload, QoS."""


def options(client_id: str, username: str | None, password: bytes | None) -> Options:
    """A client that begins anew with each connection: nothing waits for it at the broker."""
    return Options(
        client_id=client_id,
        username=username,
        password=password,
        keep_alive_s=KEEP_ALIVE_S,
        inflight_max=INFLIGHT_MAX,
        queue_messages_max=INFLIGHT_MAX,
    )


class Outlet:
    """Messages on their way to a broker, in order."""

    def __init__(self, counts: Counter[str], complaints: Complaints, name: str) -> None:
        """`counts`: of what is lost, by reason. `name`: of the broker, for the log."""
        self._counts = counts
        self._complaints = complaints
        self._name = name
        self._queue: deque[Item] = deque()
        self._queue_bytes = 0
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: Item) -> None:
        self._queue.append(item)
        self._queue_bytes += len(item[1])
        while len(self._queue) > QUEUE_MESSAGES_MAX or self._queue_bytes > QUEUE_BYTES_MAX:
            self._queue_bytes -= len(self._queue.popleft()[1])
            self._counts["queue full"] += 1
        self._arrival.set()

    def clear(self) -> None:
        """There is no connection, and none is coming soon."""
        self._counts["broker away"] += len(self._queue)
        self._queue.clear()
        self._queue_bytes = 0

    async def pump(self, client: Client) -> None:
        """Publish what is put here, until the connection is over."""
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
                # As QueueFull, or more than the broker takes.
                self._lost(error)
            else:
                future.add_done_callback(self._settled)

    def _settled(self, future: asyncio.Future[PublishResult]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, ConnectionLost | NotConnected):
            self._counts["broker away"] += 1
        elif isinstance(error, ClientError):
            self._lost(error)

    def _lost(self, error: ClientError) -> None:
        reason = "queue full" if isinstance(error, QueueFull) else "refused by the broker"
        self._counts[reason] += 1
        self._complaints.say(f"{self._name} publish", reason, f"{self._name}: {error}")


class NeighbourLink:
    """The connection to a neighbour's broker: only for publishing there."""

    def __init__(
        self,
        id: int,
        address: str,
        options: Options,
        counts: Counter[str],
        complaints: Complaints,
    ) -> None:
        """Starts at once. Raises ValueError: that is no address."""
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

    def put(self, item: Item) -> None:
        if self.is_up:
            self._outlet.put(item)
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
    """Until the connection is over for good. Raises its ClientError."""
    pumping = watched(outlet.pump(client))
    try:
        error = await client.wait_closed()
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
    if error is not None:
        raise error


async def close(client: Client) -> None:
    """Says goodbye, if the broker takes it."""
    try:
        async with asyncio.timeout(STOP_S):
            await client.disconnect()
    except TimeoutError:
        client.abort()

"""The client processes of the failover benchmarks; started by `failover` and `takeover`.

    python -m bench.failover_clients publish --library queue --server 127.0.0.1:1883 ...
    python -m bench.failover_clients subscribe --server 127.0.0.1:1883 ...

Each writes what it sees to a trace. The publisher sends until a line or the end arrives on its
standard input (or until --count), then waits for what is unconfirmed. The subscriber's line says
which sequence to wait for at most --drain-s; then it ends.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from bench.failover_paho import publish_with_paho
from bench.failover_sending import TOPIC, Line, Pace, payload_of, sequence_of
from bench.trace import Event, TraceWriter
from holdfast.client.client import Client
from holdfast.client.errors import ClientError
from holdfast.client.options import Options
from holdfast.client.protocol.effects import Message
from holdfast.client.pubqueue.ordered import ordered_messages
from holdfast.client.pubqueue.queue import PublishQueue
from holdfast.client.reconnect import Reconnect
from holdfast.protocol.mqtt import properties as pr

SESSION_EXPIRY_S: Final = 3600
RESPONSE_TIMEOUT_S: Final = 0.5
"""After so long without any byte from a server that owes an answer our client looks elsewhere."""
CONNECT_TIMEOUT_S: Final = 0.5
PING_INTERVAL_S: Final = 0.2
"""The subscriber is owed nothing: it has to ask whether its server lives."""


def _client(servers: list[str], client_id: str, *, inflight_max: int) -> Client:
    return Client(
        servers=servers,
        reconnect=Reconnect(first_delay_s=0.02, delay_max_s=0.2),
        options=Options(
            client_id=client_id,
            clean_start=False,
            session_expiry_s=SESSION_EXPIRY_S,
            inflight_max=inflight_max,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            response_timeout_s=RESPONSE_TIMEOUT_S,
            ping_interval_s=PING_INTERVAL_S,
        ),
    )


async def _forget(client: Client) -> None:
    """Leaves and lets the server drop the session."""
    await client.disconnect(properties={pr.SESSION_EXPIRY_INTERVAL: 0})


async def publish_with_client(
    arguments: argparse.Namespace, pace: Pace, trace: TraceWriter
) -> None:
    window = asyncio.Semaphore(arguments.window)

    def settled(sequence: int, future: "asyncio.Future[object]") -> None:
        window.release()
        failed = future.cancelled() or future.exception() is not None
        trace.write(Event.FAILED if failed else Event.CONFIRMED, sequence)

    client = _client(arguments.server, arguments.client_id, inflight_max=arguments.window)
    async with client:
        while not pace.is_over():
            await asyncio.sleep(pace.wait_s())
            await window.acquire()
            sequence = pace.next()
            trace.write(Event.SENT, sequence)
            future = await client.submit(TOPIC, payload_of(sequence), qos=1)
            future.add_done_callback(partial(settled, sequence))
        async with asyncio.timeout(arguments.drain_s):
            await client.flush()
        await _forget(client)


async def publish_with_queue(arguments: argparse.Namespace, pace: Pace, trace: TraceWriter) -> None:
    client = _client(arguments.server, arguments.client_id, inflight_max=arguments.window)
    async with (
        client,
        PublishQueue(
            client,
            window=arguments.window,
            messages_max=arguments.window,
            on_delivered=lambda entry, _: trace.write(Event.CONFIRMED, sequence_of(entry.payload)),
            on_failed=lambda entry, _: trace.write(Event.FAILED, sequence_of(entry.payload)),
        ) as queue,
    ):
        while not pace.is_over():
            await asyncio.sleep(pace.wait_s())
            sequence = pace.next()
            trace.write(Event.SENT, sequence)
            await queue.put(TOPIC, payload_of(sequence))
        async with asyncio.timeout(arguments.drain_s):
            await queue.flush()


class Follower:
    """What the durable subscriber receives, until it has seen a given sequence. `ordered`: as the
    Publish Queue's subscriber side hands it on, by the messages' identity."""

    def __init__(self, client: Client, trace: TraceWriter, *, ordered: bool) -> None:
        self._client = client
        self._trace = trace
        self._ordered = ordered
        self._newest = 0
        self._wanted = sys.maxsize
        self._reached = asyncio.Event()
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        messages = (
            ordered_messages(self._client, on_late=self._take)
            if self._ordered
            else self._client.messages()
        )
        async for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        sequence = sequence_of(message.payload)
        self._trace.write(Event.REDELIVERED if message.dup else Event.DELIVERED, sequence)
        self._newest = max(self._newest, sequence)
        if self._newest >= self._wanted:
            self._reached.set()

    async def finish(self, wanted: int, timeout_s: float) -> None:
        """Waits for `wanted`, not longer than `timeout_s`: what is missing is for the ledger to
        say. Raises what ended the reception earlier."""
        self._wanted = wanted
        if self._newest < wanted:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reached.wait(), timeout_s)
        if self._task.done():
            self._task.result()
        self._task.cancel()


async def subscribe(arguments: argparse.Namespace, line: Line, trace: TraceWriter) -> None:
    async with _client(arguments.server, arguments.client_id, inflight_max=100) as client:
        await client.subscribe((TOPIC, 1))
        trace.write(Event.SUBSCRIBED, 0)
        follower = Follower(client, trace, ordered=arguments.library == "queue")
        await asyncio.to_thread(line.arrived.wait)
        await follower.finish(int(line.text or 0), arguments.drain_s)
        await _forget(client)


LIBRARIES: Final[dict[str, Callable[[argparse.Namespace, Pace, TraceWriter], None]]] = {
    "holdfast": lambda *each: asyncio.run(publish_with_client(*each)),
    "queue": lambda *each: asyncio.run(publish_with_queue(*each)),
    "paho": publish_with_paho,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.failover_clients")
    parser.add_argument("role", choices=["publish", "subscribe"])
    parser.add_argument("--server", action="append", required=True, metavar="HOST:PORT")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--client-id", required=True)
    parser.add_argument("--library", choices=LIBRARIES, default="holdfast")
    parser.add_argument("--interval-s", type=float, default=0.002)
    parser.add_argument("--count", type=int, default=0, help="0: until told to end")
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--drain-s", type=float, default=30.0)
    parser.add_argument("--paho-delay-s", type=float, default=0.05)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    line = Line()
    trace = TraceWriter(arguments.trace)
    try:
        if arguments.role == "subscribe":
            asyncio.run(subscribe(arguments, line, trace))
        else:
            pace = Pace(arguments.interval_s, arguments.count, line)
            LIBRARIES[arguments.library](arguments, pace, trace)
    except TimeoutError:
        print(f"unconfirmed after {arguments.drain_s:g} s", file=sys.stderr)
        return 1
    except ClientError as error:
        print(f"{arguments.role}: {error}", file=sys.stderr)
        return 1
    finally:
        trace.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

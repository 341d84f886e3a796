"""The publisher process of the Publish Queue benchmark: one variant, timed, as JSON.

Started as `python -m bench.pubqueue_clients VARIANT PORT TOPIC MESSAGES DIRECTORY`. A message is
26 bytes, its number in front. The time is from handing over number 1 until the last one is
confirmed; messages numbered 0 go before, END after it.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeAlias

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from bench.pubqueue_variants import Variant, by_name
from holdfast.client.client import Client
from holdfast.client.options import Options
from holdfast.client.pubqueue.queue import PublishQueue
from holdfast.client.pubqueue.sqlite import SqliteStore
from holdfast.client.pubqueue.store import MemoryStore

PAYLOAD_BYTES: Final = 26
WARM_UP_MESSAGES: Final = 100
WARM_UP: Final = 0
END: Final = 9999
CONFIRM_TIMEOUT_S: Final = 60.0
SESSION_EXPIRY_S: Final = 3600

Send: TypeAlias = Callable[[list[bytes]], Awaitable[None]]
"""Sends the payloads in order and returns when the last one is confirmed."""


def payload_of(number: int) -> bytes:
    return b"%04d" % number + b"abcdefghijklmnopqrstuv"


def payloads(count: int) -> list[bytes]:
    return [payload_of(number) for number in range(1, count + 1)]


async def timed(send: Send, count: int) -> dict[str, float]:
    await send([payload_of(WARM_UP)] * WARM_UP_MESSAGES)
    messages = payloads(count)
    cpu_s, start_s = time.process_time(), time.perf_counter()
    await send(messages)
    figures = {"time_s": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s}
    await send([payload_of(END)])
    return figures


def client_id_of(variant: Variant) -> str:
    return f"bench-{variant.name}"


def options_of(variant: Variant) -> Options:
    return Options(
        client_id=client_id_of(variant),
        inflight_max=variant.window,
        session_expiry_s=SESSION_EXPIRY_S if variant.keeps_session else 0,
    )


@asynccontextmanager
async def client_sender(variant: Variant, port: int, topic: str) -> AsyncIterator[Send]:
    """The client library by itself: it sends the next message as soon as its window has room."""

    async def send(messages: list[bytes]) -> None:
        for message in messages:
            await client.submit(topic, message, qos=variant.qos)
        await client.flush()

    async with Client("127.0.0.1", port, options=options_of(variant)) as client:
        yield send


@asynccontextmanager
async def queue_sender(
    variant: Variant, port: int, topic: str, directory: Path
) -> AsyncIterator[Send]:
    async def send(messages: list[bytes]) -> None:
        if variant.together:
            await asyncio.gather(*(queue.put(topic, message) for message in messages))
        else:
            for message in messages:
                await queue.put(topic, message)
        await queue.flush()

    store = SqliteStore(directory / "queue.sqlite") if variant.store == "sqlite" else MemoryStore()
    async with (
        Client("127.0.0.1", port, options=options_of(variant)) as client,
        PublishQueue(client, store=store, window=variant.window) as queue,
    ):
        yield send


@asynccontextmanager
async def paho_sender(variant: Variant, port: int, topic: str) -> AsyncIterator[Send]:
    """As the paper's program: the next message goes out when the last one is delivered."""

    async def send(messages: list[bytes]) -> None:
        for message in messages:
            client.publish(topic, message, qos=variant.qos).wait_for_publish(CONFIRM_TIMEOUT_S)

    client = paho.Client(
        CallbackAPIVersion.VERSION2,
        client_id=client_id_of(variant),
        clean_session=not variant.keeps_session,
    )
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        yield send
    finally:
        client.disconnect()
        client.loop_stop()


async def run(variant: Variant, port: int, topic: str, count: int, directory: Path) -> None:
    if variant.library == "paho":
        sender = paho_sender(variant, port, topic)
    elif variant.library == "queue":
        sender = queue_sender(variant, port, topic, directory)
    else:
        sender = client_sender(variant, port, topic)
    async with sender as send:
        print(json.dumps(await timed(send, count)))


def main() -> None:
    name, port, topic, count, directory = sys.argv[1:]
    asyncio.run(run(by_name(name), int(port), topic, int(count), Path(directory)))


if __name__ == "__main__":
    main()

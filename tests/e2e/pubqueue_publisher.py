"""A publisher to be killed: puts numbered messages into a publish queue on disk and prints each
number once its put has returned.

    python pubqueue_publisher.py PORT FILE WINDOW FIRST COUNT

Messages FIRST, FIRST + 1, ... go to the topics q/0, q/1 and q/2 in turn, 8 puts at a time, COUNT
in all (0: without end). With a COUNT it leaves when all are confirmed.
"""

import asyncio
import sys

from holdfast.client.client import Client
from holdfast.client.options import Options
from holdfast.client.pubqueue.queue import PublishQueue
from holdfast.client.pubqueue.sqlite import SqliteStore
from holdfast.client.reconnect import Reconnect

TOPICS = 3
TOGETHER = 8


async def put(queue: PublishQueue, number: int) -> None:
    await queue.put(f"q/{number % TOPICS}", str(number))
    print(number, flush=True)


async def publish(port: int, path: str, window: int, first: int, count: int) -> None:
    client = Client(
        servers=[f"127.0.0.1:{port}"],
        reconnect=Reconnect(delay_max_s=0.2),
        options=Options(connect_timeout_s=5.0),
    )
    queue = PublishQueue(client, SqliteStore(path), window=window, messages_max=200)
    async with client, queue:
        number = first
        while not count or number < first + count:
            group = range(number, number + TOGETHER)
            await asyncio.gather(*(put(queue, one) for one in group))
            number = group.stop
        await queue.flush()
    print("done", flush=True)


if __name__ == "__main__":
    port, path, window, first, count = sys.argv[1:]
    asyncio.run(publish(int(port), path, int(window), int(first), int(count)))

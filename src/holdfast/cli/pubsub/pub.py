"""`holdfast pub`: publishes messages, with the options and exit codes of mosquitto_pub.

Intended differences: a last line without a newline is published too (-l). Bytes after a zero byte
are kept. A message beyond the server's announced limits, and an empty topic, exit with 1 instead of
0. --help exits with 0.
"""

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from holdfast.cli.pubsub import run as client_run
from holdfast.cli.pubsub.options import EXIT_FAILED, ClientParser, number, option, topic
from holdfast.client.client import Client
from holdfast.client.connection import PublishResult
from holdfast.client.errors import ClientError, PublishRefused, reason_text
from holdfast.protocol.mqtt import properties as pr

READ_BYTES: Final = 65_536
PAYLOAD_BYTES_MAX: Final = 268_435_455
REPEAT_DELAY_S_MAX: Final = 1e9


def new_parser() -> ClientParser:
    return ClientParser(
        "pub",
        "Publish messages. A lost connection is made again, to any of the servers; what was not"
        " acknowledged is sent again.",
        _OPTIONS,
        "exit codes: 0 published; 1 wrong use or no connection; 7 connection lost; 8 TLS failed;"
        " the CONNACK\ncode if the server refused the connection.",
    )


def _delay(text: str) -> float:
    delay_s = float(text)
    if not 0 <= delay_s < REPEAT_DELAY_S_MAX:
        raise argparse.ArgumentTypeError(f"{text}: give seconds, 0 or more")
    return delay_s


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the options. Exits for wrong use."""
    parser = new_parser()
    args = parser.parse(arguments)
    sources = (args.message is not None, args.file is not None, args.null_message,
               args.stdin_line, args.stdin_file)  # fmt: skip
    if not args.topics or not any(sources):
        parser.error("Both topic and message must be supplied.")
    if sum(sources) > 1:
        parser.error("Only one type of message can be sent at once.")
    return args


_OPTIONS: Final = (
    option("-t", "--topic", type=topic, action="append", metavar="TOPIC",
           help="topic to publish to; the last one counts"),
    option("-m", "--message", type=os.fsencode, metavar="TEXT", help="the message"),
    option("-f", "--file", type=Path, metavar="FILE", help="... is the content of a file"),
    option("-l", "--stdin-line", action="store_true", help="... each line of standard input"),
    option("-s", "--stdin-file", action="store_true", help="... the whole standard input"),
    option("-n", "--null-message", action="store_true",
           help="... is empty (with -r: clears a retained message)"),
    option("-r", "--retain", action="store_true", help="retain the message"),
    option("--repeat", type=number(1, 1 << 62), default=1, metavar="COUNT",
           help="publish so many times (not with -l)"),
    option("--repeat-delay", type=_delay, default=0.0, metavar="SECONDS", help="between them"),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if text := read_payload(args):
        print(f"Error: {text}", file=sys.stderr)
        return EXIT_FAILED
    return asyncio.run(_run(args))


def read_payload(args: argparse.Namespace) -> str:
    """Reads the payload into `message`. Returns what is wrong with it, "" if nothing is."""
    try:
        if args.stdin_file:
            args.message = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1)
        elif args.file is not None:
            with args.file.open("rb") as file:
                args.message = file.read(PAYLOAD_BYTES_MAX + 1)
    except OSError as error:
        return f'Unable to open file "{error.filename}": {error.strerror}.'
    if args.message is not None and len(args.message) > PAYLOAD_BYTES_MAX:
        return "Message payload is too large."
    if args.stdin_file and not args.message:
        return "Zero length input."
    return ""


async def _run(args: argparse.Namespace) -> int:
    try:
        again = client_run.AGAIN if args.stdin_line else client_run.AGAIN_BOUNDED
        client = client_run.new_client(args, again)
    except ValueError as error:
        client_run.complain(args, f"Error: {error}")
        return EXIT_FAILED
    publisher = CommandPublisher(args, client)
    try:
        await client.connect(client_run.first_policy(client))
        if args.stdin_line:
            await publisher.publish_lines(stdin_chunks())
        else:
            await publisher.publish_repeatedly(args.message or b"")
        await client.disconnect(properties=args.properties.get("disconnect"))
    except ClientError as error:
        return client_run.failed(error, args)
    return 0


class CommandPublisher:
    """Publishes the payload or the lines with one client, and reports refusals."""

    def __init__(self, args: argparse.Namespace, client: Client) -> None:
        self._args = args
        self._client = client
        self._count = 0
        properties = dict(args.properties.get("publish", {}))
        alias = properties.pop(pr.TOPIC_ALIAS, 0)
        self._topic_alias = alias if isinstance(alias, int) else 0
        self._properties = properties

    async def publish_repeatedly(self, payload: bytes) -> None:
        """Publishes the payload repeatedly. Each message waits for the one before it."""
        for index in range(self._args.repeat):
            if index:
                await asyncio.sleep(self._args.repeat_delay)
            future = await self._submit(payload)
            await asyncio.wait([future])
            error = future.exception()
            if error is not None and not isinstance(error, PublishRefused):
                raise error

    async def publish_lines(self, chunks: AsyncIterator[bytes]) -> None:
        """Publishes a message per line, and keeps the client's window full."""
        rest = b""
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                await self._submit(line)
        if rest:
            await self._submit(rest)
        await self._client.flush()

    async def _submit(self, payload: bytes) -> "asyncio.Future[PublishResult]":
        args = self._args
        self._count += 1
        number = self._count
        future = await self._client.submit(
            args.topics[-1],
            payload,
            qos=args.qos,
            retain=args.retain,
            properties=self._properties,
            topic_alias=self._topic_alias,
        )

        def done(finished: "asyncio.Future[PublishResult]") -> None:
            error = finished.exception()
            if isinstance(error, PublishRefused):
                text = reason_text(error.reason)
                client_run.complain(args, f"Warning: Publish {number} failed: {text}.")

        future.add_done_callback(done)
        return future


async def stdin_chunks() -> AsyncIterator[bytes]:
    """Yields the chunks of standard input, one of them read ahead.

    A thread reads it, because an event loop cannot watch a file. The thread is a daemon, so the
    program can end without waiting for more input.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes] = asyncio.Queue(1)

    def read() -> None:
        while True:
            chunk = os.read(0, READ_BYTES)
            try:
                asyncio.run_coroutine_threadsafe(queue.put(chunk), loop).result()
            except RuntimeError:
                return  # The loop is closed: the program ends.
            if not chunk:
                return

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while chunk := await queue.get():
        yield chunk

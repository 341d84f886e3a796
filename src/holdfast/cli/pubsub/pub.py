"""`holdfast pub`: publish, with the options, output and exit codes of mosquitto_pub.

Intended differences: a last line without a newline is published too (-l). Bytes after a zero byte
are kept. A message beyond the server's announced limits, and an empty topic, exit with 1 instead of
0. --help exits with 0.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from holdfast.cli.pubsub import run as client_run
from holdfast.cli.pubsub.help import PUB_USAGE
from holdfast.cli.pubsub.options import ClientOptions, UsageError, check_topic
from holdfast.client.client import Client
from holdfast.client.connection import PublishResult
from holdfast.client.errors import ClientError, PublishRefused, reason_text
from holdfast.protocol.mqtt import properties as pr

READ_BYTES: Final = 65_536
PAYLOAD_BYTES_MAX: Final = 268_435_455


class PubOptions(ClientOptions):
    """The options of `holdfast pub`."""

    def __init__(self) -> None:
        super().__init__()
        self.payload: bytes | None = None
        self.mode = ""
        """The source of the payload: lines, null, stdin, file or message."""
        self.retain = False
        self.repeat = 1
        self.repeat_delay_s = 0.0
        self._file = ""
        self.add_flag(partial(self._set_mode, "lines"), "-l", "--stdin-line")
        self.add_flag(self._set_null, "-n", "--null-message")
        self.add_switch("retain", "-r", "--retain")
        self.add_flag(partial(self._set_mode, "stdin"), "-s", "--stdin-file")
        self.add_value("file", self._set_file, "-f", "--file")
        self.add_value("message", self._set_message, "-m", "--message")
        wrong = "--repeat argument must be >0."
        self.add_number("count", "repeat", (1, 1 << 62), wrong, "--repeat")
        self.add_value("time", self._set_repeat_delay, "--repeat-delay")

    @property
    def topic(self) -> str:
        """The topic. The last one given counts, the same as in mosquitto_pub."""
        return self.topics[-1]

    def _check(self) -> None:
        super()._check()
        if not self.topics or not self.mode:
            raise UsageError("Both topic and message must be supplied.")
        check_topic(self.topic, "publish topic")

    def read_payload(self) -> None:
        """Reads the payload, after all options were checked. Raises `OSError`."""
        if self.mode == "stdin":
            self.payload = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1)
        elif self.mode == "file":
            with open(self._file, "rb") as file:
                self.payload = file.read(PAYLOAD_BYTES_MAX + 1)

    def _set_mode(self, mode: str) -> None:
        if self.mode:
            raise UsageError("Only one type of message can be sent at once.")
        self.mode = mode

    def _set_null(self) -> None:
        self._set_mode("null")
        self.payload = b""

    def _set_file(self, text: str) -> None:
        self._set_mode("file")
        self._file = text

    def _set_message(self, text: str) -> None:
        self._set_mode("message")
        self.payload = os.fsencode(text)

    def _set_repeat_delay(self, text: str) -> None:
        try:
            self.repeat_delay_s = float(text)
        except ValueError:
            self.repeat_delay_s = -1.0
        if not 0 <= self.repeat_delay_s < 1e9:
            raise UsageError("--repeat-delay argument must be >=0.0.")


def main(arguments: list[str]) -> int:
    options = PubOptions()
    code = client_run.parse(options, arguments, "pub", PUB_USAGE)
    if code is not None:
        return code
    text = _read_payload(options)
    if text:
        print(f"Error: {text}", file=sys.stderr)
        return client_run.EXIT_FAILED
    return asyncio.run(_run(options))


def _read_payload(options: PubOptions) -> str:
    """Reads the payload and returns what is wrong with it, "" if nothing is."""
    try:
        options.read_payload()
    except OSError as error:
        return f'Unable to open file "{error.filename}": {error.strerror}.'
    if options.payload is not None and len(options.payload) > PAYLOAD_BYTES_MAX:
        return "Message payload is too large."
    if options.mode == "stdin" and not options.payload:
        return "Zero length input."
    return ""


async def _run(options: PubOptions) -> int:
    try:
        has_more = options.mode == "lines"
        again = client_run.AGAIN if has_more else client_run.AGAIN_BOUNDED
        client = client_run.new_client(options, again)
    except (client_run.TlsProblem, ValueError) as error:
        client_run.complain(options, f"Error: {error}")
        return client_run.EXIT_FAILED
    publisher = CommandPublisher(options, client)
    try:
        await client.connect(client_run.first_policy(client))
        if options.mode == "lines":
            await publisher.publish_lines(stdin_chunks())
        else:
            await publisher.publish_repeatedly(options.payload or b"")
        await client.disconnect(properties=options.properties.get("disconnect"))
    except ClientError as error:
        client_run.complain(options, client_run.error_line(error, options))
        return client_run.exit_code(error, options)
    return 0


class CommandPublisher:
    """Publishes the payload or the lines with one client, and reports refusals."""

    def __init__(self, options: PubOptions, client: Client) -> None:
        self._options = options
        self._client = client
        self._count = 0
        properties = dict(options.properties.get("publish", {}))
        alias = properties.pop(pr.TOPIC_ALIAS, 0)
        self._topic_alias = alias if isinstance(alias, int) else 0
        self._properties = properties

    async def publish_repeatedly(self, payload: bytes) -> None:
        """Publishes the payload repeatedly. Each message waits for the one before it."""
        for index in range(self._options.repeat):
            if index:
                await asyncio.sleep(self._options.repeat_delay_s)
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
        options = self._options
        self._count += 1
        number = self._count
        future = await self._client.submit(
            options.topic,
            payload,
            qos=options.qos,
            retain=options.retain,
            properties=self._properties,
            topic_alias=self._topic_alias,
        )

        def done(finished: "asyncio.Future[PublishResult]") -> None:
            error = finished.exception()
            if isinstance(error, PublishRefused):
                text = reason_text(error.reason)
                client_run.complain(options, f"Warning: Publish {number} failed: {text}.")

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

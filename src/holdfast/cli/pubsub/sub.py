"""`holdfast sub`: subscribe and print, with the options, output and exit codes of mosquitto_sub.

Intended differences: the time zone of %j and %J has no stray Z before it. JSON contains the whole
of a payload with a zero byte or without UTF-8 (replacement characters). %x pads the whole
hexadecimal text. An invalid shared filter is refused at once. --help exits with 0.
"""

import asyncio
import os
import random
import signal
import sys
import time
from typing import Final

from holdfast.cli.pubsub import run as client_run
from holdfast.cli.pubsub.help import SUB_USAGE
from holdfast.cli.pubsub.message_format import (
    FormatError,
    Part,
    PayloadNotJson,
    Printer,
    compile_format,
)
from holdfast.cli.pubsub.options import ClientOptions, UsageError
from holdfast.client.client import Client
from holdfast.client.errors import ClientError, ConnectionLost, SubscribeRefused
from holdfast.client.options import LEVEL_5
from holdfast.client.protocol.effects import Message
from holdfast.node.delivery.replay_start import (
    END_ASKED,
    END_TOPIC,
    PLACE_ASKED,
    STREAM_PREFIX,
    InvalidStart,
    ReplayStart,
    parse_start,
)
from holdfast.protocol.mqtt.packets import Properties, SubscriptionRequest
from holdfast.protocol.mqtt.properties import USER_PROPERTY
from holdfast.protocol.topics.names import (
    InvalidFilter,
    check_filter,
    is_shared,
    matches,
    split_shared,
)

EXIT_PIPE: Final = 141
RETAIN_HANDLING: Final = {"always": 0, "new": 1, "never": 2}


class SubOptions(ClientOptions):
    """The options of `holdfast sub`."""

    def __init__(self) -> None:
        super().__init__()
        self.filters_out: list[str] = []
        self.unsubscribe: list[str] = []
        self.count = 0
        """The number of messages after which to exit, 0 without a limit."""
        self.timeout_s = 0
        """The time in seconds after which to exit, 0 without a limit."""
        self.exit_subscribed = False
        self.verbose = False
        self.newline = True
        self.no_retained = False
        self.retained_only = False
        self.remove_retained = False
        self.retain_as_published = False
        self.retain_handling = 0
        self.random_percent = 100.0
        self.start = ""
        """Start of the subscription in the past, or ""."""
        self.until_us: int | None = None
        """The wall clock in microseconds at which to exit; None: not before being told."""
        self.format: list[Part] | None = None
        self._format_text: str | None = None
        self._pretty = False
        self._add_output_options()

    def _add_output_options(self) -> None:
        for attribute, names in (
            ("exit_subscribed", ("-E",)),
            ("verbose", ("-v", "--verbose")),
            ("no_retained", ("-R",)),
            ("retained_only", ("--retained-only",)),
            ("remove_retained", ("--remove-retained",)),
            ("retain_as_published", ("--retain-as-published",)),
            ("_pretty", ("--pretty",)),
        ):
            self.add_switch(attribute, *names)
        self.add_switch("newline", "-N", value=False)
        self.add_number("count", "count", (1, 1 << 62), 'Invalid message count "{}".', "-C")
        self.add_text("format", "_format_text", "-F")
        self.add_value("filter", self._add_filter_out, "-T", "--filter-out")
        self.add_value("topic", self._add_unsubscribe, "-U", "--unsubscribe")
        self.add_value("start", self._set_start, "--since")
        self.add_value("count", self._set_last, "--last")
        self.add_value("time", self._set_until, "--until")
        self.add_number("timeout", "timeout_s", (1, 1 << 31), 'Invalid timeout "{}".', "-W")
        self.add_value("chance", self._set_random, "--random-filter")
        self.add_value("behavior", self._set_retain_handling, "--retain-handling")

    def _check(self) -> None:
        super()._check()
        if not self.topics:
            raise UsageError("You must specify a topic to subscribe to.")
        for filter in self.topics:
            _check_filter(filter, "subscription")
        if self.no_retained and self.retained_only:
            raise UsageError("Combining '-R' and '--retained-only' makes no sense.")
        if self.until_us is not None:
            # Only MQTT 5 tells the time of a message and the end of the past.
            self.level = LEVEL_5
            self.start = self.start or "earliest"
        if self._format_text is not None:
            try:
                self.format = compile_format(self._format_text, self._pretty)
            except FormatError as error:
                raise UsageError(str(error)) from None

    def requests(self) -> list[SubscriptionRequest]:
        prefix = f"{STREAM_PREFIX}@{self.start}/" if self.start else ""
        return [
            SubscriptionRequest(
                prefix + filter, self.qos, False, self.retain_as_published, self.retain_handling
            )
            for filter in self.topics
        ]

    def subscribe_properties(self) -> Properties:
        """The properties of SUBSCRIBE."""
        properties = dict(self.properties.get("subscribe") or {})
        if self.until_us is not None:
            wishes = [PLACE_ASKED, END_ASKED]
            for pair in properties.get(USER_PROPERTY) or ():  # type: ignore[union-attr]
                if isinstance(pair, tuple):
                    wishes.append(pair)
            properties[USER_PROPERTY] = wishes
        return properties

    def _set_start(self, text: str) -> None:
        if self.start:
            raise UsageError("Use '--since' or '--last' once.")
        _read_start(text)
        self.start = text

    def _set_last(self, text: str) -> None:
        self._set_start(f"last:{text}")

    def _set_until(self, text: str) -> None:
        start = _read_start(text) if text != "now" else None
        if start is not None and start.since_us is None:
            raise UsageError("'--until' takes a time or 'now'.")
        self.until_us = time.time_ns() // 1000 if start is None else start.since_us

    def _add_filter_out(self, text: str) -> None:
        _check_filter(text, "filter")
        self.filters_out.append(text)

    def _add_unsubscribe(self, text: str) -> None:
        _check_filter(text, "unsubscribe")
        self.unsubscribe.append(text)

    def _set_random(self, text: str) -> None:
        try:
            self.random_percent = float(text)
        except ValueError:
            self.random_percent = 0.0
        if not 0.1 <= self.random_percent <= 100:
            raise UsageError("--random-filter chance must be between 0.1-100.0")

    def _set_retain_handling(self, text: str) -> None:
        if text not in RETAIN_HANDLING:
            raise UsageError(f"Invalid retain handling '{text}': always, new or never.")
        self.retain_handling = RETAIN_HANDLING[text]


def _read_start(text: str) -> ReplayStart:
    """The start. A '/' would end it, a '+' would be a wildcard."""
    try:
        if any(each in text for each in "/+#"):
            raise InvalidStart("write the time with Z at its end")
        return parse_start(text, time.time_ns() // 1000)
    except InvalidStart as error:
        raise UsageError(f"Invalid start: {error}.") from None


def _check_filter(filter: str, what: str) -> None:
    try:
        check_filter(filter)
        if is_shared(filter):
            split_shared(filter)
    except InvalidFilter:
        raise UsageError(
            f"Invalid {what} topic '{filter}', are all '+' and '#' wildcards correct?"
        ) from None


def main(arguments: list[str]) -> int:
    options = SubOptions()
    code = client_run.parse(options, arguments, "sub", SUB_USAGE)
    return code if code is not None else asyncio.run(Subscriber(options).run())


class Subscriber:
    """Prints received messages until an exit code is decided."""

    def __init__(self, options: SubOptions) -> None:
        self._options = options
        self._printer = Printer(options.format, options.verbose, options.newline)
        self._random = random.Random()
        self._printed = 0
        self._flush_scheduled = False
        self._removals: set[asyncio.Task[None]] = set()
        # The filters whose past is over.
        self._ended: set[bytes] = set()
        self._client: Client | None = None
        # Set once `_exit_code` is decided.
        self._stop = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Connects, subscribes and prints. Returns the exit code."""
        options = self._options
        try:
            client = client_run.new_client(options, client_run.AGAIN, self._receive)
        except (client_run.TlsProblem, ValueError) as error:
            client_run.complain(options, f"Error: {error}")
            return client_run.EXIT_FAILED
        self._client = client
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._finish, 0)
        try:
            await self._connect(client)
            if options.timeout_s:
                loop.call_later(options.timeout_s, self._time_out)
            await self._serve(client)
            await client.disconnect(properties=options.properties.get("disconnect"))
        except ClientError as error:
            client_run.complain(options, client_run.error_line(error, options))
            return client_run.exit_code(error, options)
        finally:
            self._flush()
        return self._exit_code

    async def _connect(self, client: Client) -> None:
        """Connects, or returns without a connection when an exit code is decided first."""
        connecting = asyncio.create_task(client.connect(client_run.first_policy(client)))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({connecting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                connecting.result()
        finally:
            connecting.cancel()
            stop.cancel()

    async def _serve(self, client: Client) -> None:
        """Subscribes and prints until an exit code is decided.

        The client restores a lost connection. Raises the error that ended it for good.
        """
        work = asyncio.create_task(self._subscribe(client))
        stop = asyncio.create_task(self._stop.wait())
        closed = asyncio.create_task(client.wait_closed())
        waiting: set[asyncio.Task[object]] = {work, stop, closed}
        try:
            while not (stop.done() or closed.done()):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if work in done:
                    work.result()
            if not stop.done():
                raise closed.result() or ConnectionLost("disconnected")
        finally:
            for task in (work, stop, closed):
                task.cancel()

    async def _subscribe(self, client: Client) -> None:
        options = self._options
        properties = options.properties
        waiting = [client.subscribe(*options.requests(), properties=options.subscribe_properties())]
        if options.unsubscribe:
            waiting.append(
                client.unsubscribe(*options.unsubscribe, properties=properties.get("unsubscribe"))
            )
        # Both requests are sent at once. The response to the first one decides.
        tasks = [asyncio.create_task(one) for one in waiting]
        try:
            await tasks[0]
            if options.exit_subscribed:
                self._finish(0)
            await asyncio.gather(*tasks)
        except SubscribeRefused as error:
            if all(reason >= 0x80 for reason in error.reasons):
                client_run.complain(options, "All subscription requests were denied.")
                self._finish(0)
        except ConnectionLost:
            return  # The task that waits for the end reports it.
        finally:
            for task in tasks:
                task.cancel()

    # Messages

    def _receive(self, message: Message) -> None:
        options = self._options
        if self._stop.is_set():
            return
        if options.until_us is not None and self._is_after_end(message, options.until_us):
            return
        if options.retained_only and not message.retain:
            self._finish(0)
            return
        if any(matches(filter, message.topic) for filter in options.filters_out):
            return
        if options.remove_retained and message.retain and message.payload:
            task = asyncio.get_running_loop().create_task(self._remove(message.topic))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)
        if options.no_retained and message.retain:
            return
        if options.random_percent < 100 and self._random.uniform(0, 100) > options.random_percent:
            return
        self._print(message)
        self._printed += 1
        if self._printed == options.count:
            self._finish(0)

    def _is_after_end(self, message: Message, until_us: int) -> bool:
        """Whether the message is not to be printed because the span of time is over. The past ends
        once for each filter."""
        if message.topic.encode() == END_TOPIC:
            self._ended.add(bytes(message.payload))
            if len(self._ended) == len(set(self._options.topics)):
                self._finish(0)
            return True
        pairs = message.properties.get(USER_PROPERTY)
        told = dict(pairs) if isinstance(pairs, list) else {}  # type: ignore[arg-type]
        return int(told.get("hf-time", 0)) > until_us

    async def _remove(self, topic: str) -> None:
        assert self._client is not None
        try:
            await self._client.publish(topic, b"", retain=True)
        except ClientError as error:
            client_run.complain(self._options, f"Error: {topic} not removed: {error}")

    def _print(self, message: Message) -> None:
        try:
            data = self._printer.render(message, time.time_ns())
        except PayloadNotJson as error:
            client_run.complain(self._options, str(error))
            data = self._printer.end()
        try:
            sys.stdout.buffer.write(data)
            if self._options.debug:
                sys.stdout.flush()
        except BrokenPipeError:
            self._broken_pipe()
        if not self._flush_scheduled:
            # Flushed once for all messages of one read of the socket.
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            self._broken_pipe()

    def _broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self._finish(EXIT_PIPE)

    def _time_out(self) -> None:
        if not self._stop.is_set():
            client_run.complain(self._options, "Timed out")
            self._finish(client_run.EXIT_TIMED_OUT)

    def _finish(self, code: int) -> None:
        if not self._stop.is_set():
            self._exit_code = code
            self._stop.set()

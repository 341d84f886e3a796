"""`holdfast sub`: subscribes and prints, with the options, output and exit codes of mosquitto_sub.

Intended differences: the time zone of %j and %J has no stray Z before it. JSON contains the whole
of a payload with a zero byte or without UTF-8 (replacement characters). %x pads the whole
hexadecimal text. An invalid shared filter is refused at once. --help exits with 0.

A format is compiled once into a list of functions. `%` begins a part of the message (with flags,
width and precision as in printf), `@` a part of the time, a backslash a character.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final, TypeAlias

from holdfast.cli.pubsub import run as client_run
from holdfast.cli.pubsub.options import EXIT_FAILED, ClientParser, number, option
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
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import Properties, SubscriptionRequest
from holdfast.protocol.mqtt.properties import USER_PROPERTY
from holdfast.protocol.topics.names import (
    InvalidFilter,
    check_filter,
    is_shared,
    matches,
    split_shared,
)

Part: TypeAlias = Callable[[Message, int], bytes]
"""A function that formats one part of a message received at a wall clock time in ns."""

_ESCAPES: Final = {
    "\\": b"\\",
    "0": b"\0",
    "a": b"\a",
    "e": b"\x1b",
    "n": b"\n",
    "r": b"\r",
    "t": b"\t",
    "v": b"\v",
}
_TOKEN: Final = re.compile(
    r"(?P<text>[^%@\\]+)|(?P<double>%%|@@)|\\(?P<escape>.)|@(?P<time>.)"
    r"|%(?P<flags>[0-]*)(?P<width>\d*)(?:\.(?P<precision>\d+))?(?P<letter>.)",
    re.DOTALL,
)
_ZERO_PADDED: Final = "AEFlmSxX"
_TRUNCATED: Final = "CIRt"
_PADDED: Final = "ACEFIlmpRStxX"
FIELD_WIDTH_MAX: Final = 10_000
FORMAT_HELP: Final = """\
format: %t topic, %p payload, %x %X payload in hex, %l payload length, %q QoS, %r retain, %m packet
id, %j JSON, %J JSON with a JSON payload, %I ISO time, %U Unix time, %A topic alias, %C content
type, %D correlation data, %E message expiry, %F payload format, %P user properties, %R response
topic, %S subscription identifier, %% percent; @X strftime's %X, @N nanoseconds, @@ at;
\\\\ \\0 \\a \\e \\n \\r \\t \\v. Width and flags as in printf: %-10t, %05l, %.3t.
"""


class FormatError(ValueError):
    """A format string is invalid. The text says why."""


def compile_format(text: str, pretty: bool) -> list[Part]:
    """Compiles a format string. `pretty`: indent the JSON of %j and %J.

    Raises `FormatError` if the format is invalid.
    """
    parts: list[Part] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise FormatError(f"{text[position:]!r} is incomplete.")
        position = found.end()
        literal = found["text"] or (found["double"] or "")[:1]
        if found["escape"] is not None:
            if found["escape"] not in _ESCAPES:
                raise FormatError(f"Invalid escape specifier '{found['escape']}'.")
            parts.append(_literal(_ESCAPES[found["escape"]]))
        elif literal:
            parts.append(_literal(literal.encode("utf-8", "surrogateescape")))
        elif found["time"] is not None:
            parts.append(_time_part(found["time"]))
        else:
            parts.append(_message_part(found, pretty))
    return parts


def _literal(data: bytes) -> Part:
    return lambda message, now_ns: data


def _time_part(letter: str) -> Part:
    if letter == "N":
        return lambda message, now_ns: b"%09d" % (now_ns % 1_000_000_000)
    return lambda message, now_ns: time.strftime(
        "%" + letter, time.localtime(now_ns // 1_000_000_000)
    ).encode()


def _message_part(found: re.Match[str], pretty: bool) -> Part:
    flags, letter, width = found["flags"], found["letter"], int(found["width"] or 0)
    if letter in "jJ":
        return _json_part(letter == "J", pretty)
    value = _VALUES.get(letter)
    if value is None:
        raise FormatError(f"Invalid format specifier '{letter}'.")
    if width > FIELD_WIDTH_MAX:
        raise FormatError(f"Field width {width}, the maximum is {FIELD_WIDTH_MAX}.")
    if letter not in _PADDED:
        return value
    most = int(found["precision"]) if found["precision"] and letter in _TRUNCATED else None
    fill = b"0" if "0" in flags and letter in _ZERO_PADDED else b" "

    def part(message: Message, now_ns: int) -> bytes:
        data = value(message, now_ns)[:most]
        return data.ljust(width) if "-" in flags else data.rjust(width, fill)

    return part


def _property(identifier: int) -> Part:
    """Returns a function that formats a property, with "" if the message has none."""

    def part(message: Message, now_ns: int) -> bytes:
        value = message.properties.get(identifier)
        if value is None:
            return b""
        if isinstance(value, bytes):
            return value
        if isinstance(value, list):
            value = value[0]  # type: ignore[assignment]
        return str(value).encode()

    return part


def _user_properties(message: Message, now_ns: int) -> bytes:
    pairs = message.properties.get(pr.USER_PROPERTY, [])
    assert isinstance(pairs, list)
    return " ".join(f"{key}:{value}" for key, value in pairs).encode()  # type: ignore[misc]


def _iso_time(now_ns: int, fraction: bool) -> str:
    moment = datetime.fromtimestamp(now_ns // 1_000_000_000).astimezone()
    micros = f".{now_ns // 1000 % 1_000_000:06d}" if fraction else ""
    return f"{moment:%Y-%m-%dT%H:%M:%S}{micros}{moment:%z}"


_VALUES: Final[dict[str, Part]] = {
    "A": _property(pr.TOPIC_ALIAS),
    "C": _property(pr.CONTENT_TYPE),
    "D": _property(pr.CORRELATION_DATA),
    "E": _property(pr.MESSAGE_EXPIRY_INTERVAL),
    "F": _property(pr.PAYLOAD_FORMAT_INDICATOR),
    "I": lambda message, now_ns: _iso_time(now_ns, False).encode(),
    "l": lambda message, now_ns: b"%d" % len(message.payload),
    "m": lambda message, now_ns: b"%d" % message.packet_id,
    "P": _user_properties,
    "p": lambda message, now_ns: message.payload,
    "q": lambda message, now_ns: b"%d" % message.qos,
    "R": _property(pr.RESPONSE_TOPIC),
    "r": lambda message, now_ns: b"%d" % message.retain,
    "S": _property(pr.SUBSCRIPTION_IDENTIFIER),
    "t": lambda message, now_ns: message.topic.encode(),
    "U": lambda message, now_ns: b"%d.%09d" % divmod(now_ns, 1_000_000_000),
    "x": lambda message, now_ns: message.payload.hex().encode(),
    "X": lambda message, now_ns: message.payload.hex().upper().encode(),
}


class PayloadNotJson(Exception):
    """The payload for %J is no JSON document."""


def _json_part(payload_is_json: bool, pretty: bool) -> Part:
    def part(message: Message, now_ns: int) -> bytes:
        document = _document(message, now_ns, payload_is_json)
        indent, separators = (2, None) if pretty else (None, (",", ":"))
        text = json.dumps(document, ensure_ascii=False, indent=indent, separators=separators)
        return text.encode("utf-8", "replace")

    return part


class _Pairs(dict[str, str]):
    """A JSON object that may repeat a key, as user properties may."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        super().__init__(pairs)
        self._pairs = pairs

    def items(self) -> list[tuple[str, str]]:  # type: ignore[override]
        return self._pairs


def _document(message: Message, now_ns: int, payload_is_json: bool) -> dict[str, object]:
    document: dict[str, object] = {
        "tst": _iso_time(now_ns, True),
        "topic": message.topic,
        "qos": message.qos,
        "retain": int(message.retain),
        "payloadlen": len(message.payload),
    }
    if message.qos:
        document["mid"] = message.packet_id
    properties = _json_properties(message)
    if properties:
        document["properties"] = properties
    text = message.payload.decode("utf-8", "replace")
    if not payload_is_json:
        document["payload"] = text
        return document
    try:
        document["payload"] = json.loads(message.payload, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise PayloadNotJson(
            f"Error: Message payload is not valid JSON on topic {message.topic}."
        ) from None
    return document


def _json_properties(message: Message) -> dict[str, object]:
    found: dict[str, object] = {}
    for identifier, value in message.properties.items():
        name = pr.TABLE[identifier].name
        if identifier == pr.USER_PROPERTY:
            found["user-properties"] = _Pairs(value)  # type: ignore[arg-type]
        elif isinstance(value, bytes):
            found[name] = value.decode("utf-8", "replace")
        elif isinstance(value, list):
            found[name] = value[0] if len(value) == 1 else value
        else:
            found[name] = value
    return found


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


class Printer:
    """Formats messages as the options require."""

    def __init__(self, format: list[Part] | None, verbose: bool, newline: bool) -> None:
        self._format = format
        self._verbose = verbose
        self._end = b"\n" if newline else b""

    def render(self, message: Message, now_ns: int) -> bytes:
        """Returns the output for a message. Raises `PayloadNotJson` if %J has no JSON."""
        if self._format is not None:
            return b"".join([part(message, now_ns) for part in self._format]) + self._end
        if self._verbose:
            topic = message.topic.encode()
            return topic + b" " + (message.payload or b"(null)") + self._end
        return message.payload + self._end if message.payload else b""

    def end(self) -> bytes:
        return self._end


EXIT_PIPE: Final = 141
RETAIN_HANDLING: Final = {"always": 0, "new": 1, "never": 2}


def new_parser() -> ClientParser:
    return ClientParser(
        "sub",
        "Subscribe and print messages. A lost connection is made again, to any of the servers.",
        _OPTIONS,
        f"{FORMAT_HELP}\nexit codes: 0 done; 1 wrong use or no connection; 8 TLS failed; 27 timed"
        " out (-W); the CONNACK\ncode if the server refused the connection.",
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the options. Exits for wrong use."""
    parser = new_parser()
    args = parser.parse(arguments)
    if not args.topics:
        parser.error("You must specify a topic to subscribe to.")
    if args.no_retained and args.retained_only:
        parser.error("Combining '-R' and '--retained-only' makes no sense.")
    if args.start and args.last:
        parser.error("Use '--since' or '--last' once.")
    args.start = args.start or args.last
    if args.until_us is not None:
        # Only MQTT 5 tells the time of a message and the end of the past.
        args.level = LEVEL_5
        args.start = args.start or "earliest"
    return args


def requests(args: argparse.Namespace) -> list[SubscriptionRequest]:
    """Returns the subscriptions."""
    prefix = f"{STREAM_PREFIX}@{args.start}/" if args.start else ""
    handling = RETAIN_HANDLING[args.retain_handling]
    return [
        SubscriptionRequest(prefix + filter, args.qos, False, args.retain_as_published, handling)
        for filter in args.topics
    ]


def _subscribe_properties(args: argparse.Namespace) -> Properties:
    properties: Properties = dict(args.properties.get("subscribe", {}))
    if args.until_us is not None:
        wishes = properties.get(USER_PROPERTY, [])
        properties[USER_PROPERTY] = [PLACE_ASKED, END_ASKED, *wishes]  # type: ignore[misc]
    return properties


def _read_start(text: str) -> ReplayStart:
    """The start. A '/' would end it, a '+' would be a wildcard."""
    try:
        if any(each in text for each in "/+#"):
            raise InvalidStart("write the time with Z at its end")
        return parse_start(text, time.time_ns() // 1000)
    except InvalidStart as error:
        raise argparse.ArgumentTypeError(f"{error}.") from None


def _start(text: str) -> str:
    _read_start(text)
    return text


def _end(text: str) -> int:
    if text == "now":
        return time.time_ns() // 1000
    end_us = _read_start(text).since_us
    if end_us is None:
        raise argparse.ArgumentTypeError("give a time, or now.")
    return end_us


def _format(text: str) -> str:
    try:
        compile_format(text, False)
    except FormatError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _percent(text: str) -> float:
    percent = float(text)
    if not 0.1 <= percent <= 100:
        raise argparse.ArgumentTypeError(f"{text}: give a number, 0.1 to 100")
    return percent


def _filter(text: str) -> str:
    try:
        check_filter(text)
        if is_shared(text):
            split_shared(text)
    except InvalidFilter:
        wrong = f"invalid filter {text!r}: are all '+' and '#' correct?"
        raise argparse.ArgumentTypeError(wrong) from None
    return text


_OPTIONS: Final = (
    option("-t", "--topic", type=_filter, action="append", metavar="FILTER",
           help="topic filter; may be repeated"),
    option("-T", "--filter-out", type=_filter, action="append", default=[], metavar="FILTER",
           help="do not print what matches; may be repeated"),
    option("-U", "--unsubscribe", type=_filter, action="append", default=[], metavar="FILTER",
           help="unsubscribe after subscribing; may be repeated"),
    option("-C", dest="count", type=number(1, 1 << 62), default=0, metavar="COUNT",
           help="exit after so many messages"),
    option("-W", dest="timeout_s", type=number(1, 1 << 31), default=0, metavar="SECONDS",
           help="exit with 27 after this time"),
    option("--since", dest="start", type=_start, metavar="START",
           help="begin in the past: earliest, -15m, a Unix time, 2026-01-31T12:00:00Z, last:N,"
           " offsets:PARTITION:OFFSET,..."),
    option("--last", type=lambda text: _start(f"last:{text}"), metavar="N",
           help="begin with the last N messages of each topic"),
    option("--until", dest="until_us", type=_end, metavar="TIME",
           help="print messages up to this time, or now, and exit (MQTT 5); from the earliest one"
           " on without --since"),
    option("-E", dest="exit_subscribed", action="store_true", help="exit once subscribed"),
    option("-v", "--verbose", action="store_true", help="print the topic before the message"),
    option("-F", dest="format", type=_format, metavar="FORMAT",
           help="print each message in this form (below)"),
    option("-N", dest="no_newline", action="store_true", help="no newline after a message"),
    option("--pretty", action="store_true", help="indent the JSON of %%j and %%J"),
    option("-R", dest="no_retained", action="store_true", help="do not print retained messages"),
    option("--retained-only", action="store_true",
           help="print only retained messages, exit at the first other one"),
    option("--remove-retained", action="store_true",
           help="clear the retained messages that are received"),
    option("--retain-as-published", action="store_true",
           help="keep the publisher's retain flag (MQTT 5)"),
    option("--retain-handling", choices=RETAIN_HANDLING, default="always", metavar="WHEN",
           help="retained messages are sent: always, new (subscriptions), never (MQTT 5)"),
    option("--random-filter", type=_percent, default=100.0, metavar="PERCENT",
           help="print only this part of the messages, 0.1 to 100"),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    return asyncio.run(Subscriber(parse(arguments)).run())


class Subscriber:
    """Prints received messages until an exit code is decided."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        parts = None if args.format is None else compile_format(args.format, args.pretty)
        self._printer = Printer(parts, args.verbose, not args.no_newline)
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
        args = self._args
        try:
            client = client_run.new_client(args, client_run.AGAIN, self._receive)
        except ValueError as error:
            client_run.complain(args, f"Error: {error}")
            return EXIT_FAILED
        self._client = client
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._finish, 0)
        try:
            await self._connect(client)
            if args.timeout_s:
                loop.call_later(args.timeout_s, self._time_out)
            await self._serve(client)
            await client.disconnect(properties=args.properties.get("disconnect"))
        except ClientError as error:
            return client_run.failed(error, args)
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
        args = self._args
        waiting = [client.subscribe(*requests(args), properties=_subscribe_properties(args))]
        if args.unsubscribe:
            properties = args.properties.get("unsubscribe")
            waiting.append(client.unsubscribe(*args.unsubscribe, properties=properties))
        # Both requests are sent at once. The response to the first one decides.
        tasks = [asyncio.create_task(one) for one in waiting]
        try:
            await tasks[0]
            if args.exit_subscribed:
                self._finish(0)
            await asyncio.gather(*tasks)
        except SubscribeRefused as error:
            if all(reason >= 0x80 for reason in error.reasons):
                client_run.complain(args, "All subscription requests were denied.")
                self._finish(0)
        except ConnectionLost:
            return  # The task that waits for the end reports it.
        finally:
            for task in tasks:
                task.cancel()

    # Messages

    def _receive(self, message: Message) -> None:
        args = self._args
        if self._stop.is_set():
            return
        if args.until_us is not None and self._is_after_end(message, args.until_us):
            return
        if args.retained_only and not message.retain:
            self._finish(0)
            return
        if any(matches(filter, message.topic) for filter in args.filter_out):
            return
        if args.remove_retained and message.retain and message.payload:
            task = asyncio.get_running_loop().create_task(self._remove(message.topic))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)
        if args.no_retained and message.retain:
            return
        if args.random_filter < 100 and self._random.uniform(0, 100) > args.random_filter:
            return
        self._print(message)
        self._printed += 1
        if self._printed == args.count:
            self._finish(0)

    def _is_after_end(self, message: Message, until_us: int) -> bool:
        """Whether the message is not to be printed because the span of time is over. The past ends
        once for each filter."""
        if message.topic.encode() == END_TOPIC:
            self._ended.add(bytes(message.payload))
            if len(self._ended) == len(set(self._args.topics)):
                self._finish(0)
            return True
        told = dict(message.properties.get(USER_PROPERTY, ()))  # type: ignore[arg-type]
        return int(told.get("hf-time", 0)) > until_us

    async def _remove(self, topic: str) -> None:
        assert self._client is not None
        try:
            await self._client.publish(topic, b"", retain=True)
        except ClientError as error:
            client_run.complain(self._args, f"Error: {topic} not removed: {error}")

    def _print(self, message: Message) -> None:
        try:
            data = self._printer.render(message, time.time_ns())
        except PayloadNotJson as error:
            client_run.complain(self._args, str(error))
            data = self._printer.end()
        try:
            sys.stdout.buffer.write(data)
            if self._args.debug:
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
            client_run.complain(self._args, "Timed out")
            self._finish(client_run.EXIT_TIMED_OUT)

    def _finish(self, code: int) -> None:
        if not self._stop.is_set():
            self._exit_code = code
            self._stop.set()

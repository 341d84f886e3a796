"""Formats messages for `holdfast sub`: payload, topic and payload, or a -F format string.

A format is compiled once into a list of functions. `%` begins a part of the message (with flags,
width and precision as in printf), `@` a part of the time, a backslash a character.
"""

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final, TypeAlias

from holdfast.client.protocol.effects import Message
from holdfast.protocol.mqtt import properties as pr

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

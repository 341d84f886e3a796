"""The decoders of payloads that are one value: a number, a boolean, a text, online or offline."""

import re
from typing import Final

from holdfast.pipeline.decoders.decoded import Decoded, DecodeError, utf8
from holdfast.pipeline.decoders.json_payload import (
    VALUE,
    Fields,
    decode_json,
    extract_fields,
    parse_json,
)

ONLINE: Final = "$online"
"""The metric that says whether a device is online: true or false."""
TEXT_LENGTH_MAX: Final = 4096
"""The most characters of a text or number."""

_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_INTEGER: Final = re.compile(r"[+-]?\d{1,400}", re.ASCII)
_TRUE: Final = frozenset({"true", "on", "yes"})
_FALSE: Final = frozenset({"false", "off", "no"})
_ONLINE: Final = frozenset({"online", "connected", "alive", "up", "ready", "1"}) | _TRUE
_OFFLINE: Final = (
    frozenset({"offline", "disconnected", "lost", "dead", "down", "sleeping", "0"}) | _FALSE
)
_STATUS_FIELDS: Final = ("online", "connected", "status", "state", "availability")


def number(text: str) -> float | int | None:
    """Parse a decimal number. Hexadecimal digits, underscores and NaN are not accepted."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def boolean(text: str) -> bool | None:
    """Parse a word for true or false."""
    folded = text.lower()
    return True if folded in _TRUE else False if folded in _FALSE else None


def decode_number(payload: bytes, metric: str = VALUE) -> Decoded:
    """Decode a number or a boolean. Raises DecodeError."""
    text = utf8(payload).strip()
    if len(text) > TEXT_LENGTH_MAX:
        raise DecodeError(f"a number of {len(text)} characters, the maximum is {TEXT_LENGTH_MAX}")
    value: float | int | bool | None = number(text)
    if value is None:
        value = boolean(text)
    if value is None:
        raise DecodeError(f"neither a number nor a boolean: {text[:40]!r}")
    decoded = Decoded()
    decoded.add(metric, value)
    return decoded


def decode_text(payload: bytes, metric: str = VALUE) -> Decoded:
    """Decode a number, a boolean, or a text of printable characters. Raises DecodeError."""
    text = utf8(payload).strip()
    value: float | int | bool | str | None = number(text)
    if value is None:
        value = boolean(text)
    if value is None:
        if len(text) > TEXT_LENGTH_MAX:
            raise DecodeError(f"a text of {len(text)} characters, the maximum is {TEXT_LENGTH_MAX}")
        if any(character < " " and character not in "\t\r\n" for character in text):
            raise DecodeError("a text with control characters")
        value = text
    decoded = Decoded()
    decoded.add(metric, value)
    return decoded


def decode_any(payload: bytes, fields: Fields, metric: str = VALUE) -> Decoded:
    """Decode a payload by its look: JSON if it begins like JSON, else a text. Raises
    DecodeError."""
    if payload.lstrip(b" \t\r\n")[:1] in (b"{", b"["):
        return decode_json(payload, fields)
    return decode_text(payload, metric)


def decode_status(payload: bytes, fields: Fields) -> Decoded:
    """Decode online or offline: a word, a number, or a field of a JSON object.

    Any other payload is decoded like `auto`. Raises DecodeError.
    """
    if payload[:1] == b"{":
        document = parse_json(payload)
        decoded = Decoded()
        if type(document) is dict:
            extract_fields(document, fields, decoded)
            for name in _STATUS_FIELDS:
                state = presence(str(document.get(name, "")))
                if state is not None:
                    decoded.add(ONLINE, state)
                    return decoded
        return decode_json(payload, fields)
    state = presence(utf8(payload[:64]).strip()) if len(payload) <= 64 else None
    if state is None:
        return decode_any(payload, fields)
    decoded = Decoded()
    decoded.add(ONLINE, state)
    return decoded


def presence(text: str) -> bool | None:
    """Parse a word for online or offline."""
    folded = text.lower()
    return True if folded in _ONLINE else False if folded in _OFFLINE else None

"""Decodes payloads of text that is no JSON.

They are one value (a number, a boolean, a text, online or offline), or CSV: one line or several,
with the columns of a rule or of the first line. A column named `_` is left out.
"""

import csv
import io
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote_plus

from holdfast_lake.decoders.decoded import Decoded, DecodeError, own_name, utf8
from holdfast_lake.decoders.json_payload import (
    NUMBERS,
    VALUE,
    Fields,
    decode_document,
    decode_json,
    decode_parsed,
    extract_fields,
    parse_json,
)
from holdfast_lake.decoders.units import measured_value, with_point

ONLINE: Final = "$online"
"""The metric that says whether a device is online: true or false."""
TEXT_LENGTH_MAX: Final = 4096
"""The most characters of a text or number."""

_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_INTEGER: Final = re.compile(r"[+-]?\d{1,400}", re.ASCII)
_IDENTIFIER: Final = re.compile(r"\+?0\d+|\d+[eE]\d+", re.ASCII)
"""Digits that may be a name: the code of a card, 0004567890, is another one than 4567890."""
_TRUE: Final = frozenset({"true", "on", "yes"})
_FALSE: Final = frozenset({"false", "off", "no"})
_JSON_TRUTHS: Final = frozenset({"true", "false"})
_PRESENT: Final = frozenset({"online", "connected", "alive"})
_ABSENT: Final = frozenset({"offline", "disconnected", "lost", "dead"})
_ONLINE: Final = frozenset({"up", "available", "ready", "1", "verbunden", "en ligne", "connecté",
                            "conectado", "connesso", "verbonden",
                            "在线"}) | _PRESENT | _TRUE  # fmt: skip
_OFFLINE: Final = frozenset({"down", "unavailable", "sleeping", "0", "getrennt", "hors ligne",
                             "déconnecté", "desconectado", "disconnesso",
                             "离线"}) | _ABSENT | _FALSE  # fmt: skip
_STATUS_FIELDS: Final = ("online", "connected", "status", "state", "availability")
_PRESENCE_FIELDS: Final = {"online": True, "connected": True, "status": False,
                           "availability": False}  # fmt: skip
"""The fields of a message that may say whether the device is online. True: any word does."""


def number(text: str) -> float | int | None:
    """Parses a decimal number. Hexadecimal digits, underscores and NaN are not accepted."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def boolean(text: str) -> bool | None:
    """Parses a word for true or false."""
    folded = text.lower()
    return True if folded in _TRUE else False if folded in _FALSE else None


def decode_number(payload: bytes, metric: str = VALUE, decimal: str = "") -> Decoded:
    """Decodes a number or a boolean. Raises DecodeError."""
    text = utf8(payload).strip()
    if len(text) > TEXT_LENGTH_MAX:
        raise DecodeError(
            f"a number of {len(text)} characters, the maximum is {TEXT_LENGTH_MAX}", "limit"
        )
    value: float | int | bool | None = number(with_point(text, decimal) or "")
    unit = None
    if value is None:
        value, unit = measured_value(text, by_rule=True, decimal=decimal) or (boolean(text), None)
    if value is None:
        raise DecodeError(f"neither a number nor a boolean: {text[:40]!r}", "value")
    decoded = Decoded()
    decoded.add(metric, value)
    if decoded.names:
        decoded.set_unit(0, unit)
        if has_other_form(value, text, decimal):
            decoded.add_text_of(text)
    return decoded


def decode_text(
    payload: bytes, metric: str = VALUE, *, keeps_text: bool = True, decimal: str = ""
) -> Decoded:
    """Decodes a text of printable characters, which may also be a number or a boolean.

    The text is kept in each case with `keeps_text`, and otherwise where the value has less: a word
    such as `off`, and a number with its unit, so that one topic's texts stay texts. Raises
    DecodeError.
    """
    text = utf8(payload).strip()
    decoded = Decoded()
    add_text(decoded, metric, text, keeps_text=keeps_text, decimal=decimal)
    return decoded


def add_text(
    decoded: Decoded, metric: str, text: str, *, keeps_text: bool = False, decimal: str = ""
) -> None:
    """Adds the value of a text, see `decode_text`. Raises DecodeError."""
    value: float | int | bool | str | None = plain_value(text, decimal)
    if value is None:
        if len(text) > TEXT_LENGTH_MAX:
            raise DecodeError(
                f"a text of {len(text)} characters, the maximum is {TEXT_LENGTH_MAX}", "limit"
            )
        if any(character < " " and character not in "\t\r\n" for character in text):
            raise DecodeError("a text with control characters", "value")
        add_other_text(decoded, metric, text, decimal)
        return
    before = len(decoded.names)
    decoded.add(metric, value)
    keeps_text = keeps_text or has_other_form(value, text, decimal)
    if keeps_text and len(decoded.names) > before:
        decoded.add_text_of(text)


def add_other_text(decoded: Decoded, metric: str, text: str, decimal: str = "") -> None:
    """Adds a text that is no plain value, with its number if it is one with a unit."""
    value, unit = measured_value(text, decimal=decimal) or (text, None)
    before = len(decoded.names)
    decoded.add(metric, value)
    if unit is not None and len(decoded.names) > before:
        decoded.set_unit(before, unit)
        decoded.add_text_of(text)


def plain_value(text: str, decimal: str = "") -> float | int | bool | None:
    """Parses a number or a word for true or false. None: the text is neither, or may be a name."""
    found = with_point(text, decimal) or ""
    value = None if _IDENTIFIER.fullmatch(found) else number(found)
    return boolean(text) if value is None else value


def has_other_form(value: object, text: str, decimal: str) -> bool:
    """Returns whether a value has less than its text: it is from a word such as `off`, which may
    have others beside it, or a number with a decimal comma."""
    if type(value) is bool:
        return text.lower() not in _JSON_TRUTHS
    return type(value) in NUMBERS and with_point(text, decimal) != text


def parse_texts(decoded: Decoded, decimal: str) -> None:
    """Parses the words and the numbers with units among the texts of an object, as `decode_text`
    does alone, and keeps the text beside. A plug says `OFF` and `{"POWER": "OFF"}`."""
    for at, value in enumerate(decoded.values):
        if type(value) is not str:
            continue
        found, unit = worded_value(value, decimal)
        if found is None:
            continue
        if unit is None:
            decoded.values[at] = found
        else:
            decoded.set_number(at, found)
            decoded.set_unit(at, unit)
        if type(decoded.values[at]) is not str:
            decoded.exact = decoded.exact or {}
            decoded.exact[at] = value


def worded_value(text: str, decimal: str = "") -> tuple[float | int | bool | None, str | None]:
    """Returns the boolean of a word, or the number and unit of a text such as `21.5 °C`."""
    text = text.strip()
    return measured_value(text, decimal=decimal) or (boolean(text), None)


def decode_any(payload: bytes, fields: Fields, metric: str = VALUE) -> Decoded:
    """Decodes a payload by its look: JSON if it begins like an object, a list or a text of JSON,
    else a text. Raises DecodeError."""
    begin = payload.lstrip(b" \t\r\n")[:1]
    if begin in (b"{", b"["):
        return decode_json(payload, fields)
    if begin == b'"':
        with suppress(DecodeError):  # a text that only begins with a quotation mark
            decoded = Decoded()
            decoded.add(metric, parse_json(payload))
            return decoded
    return decode_text(payload, metric, keeps_text=False, decimal=fields.decimal)


def decode_status(
    payload: bytes,
    fields: Fields,
    metric: str = VALUE,
    *,
    any_word: bool = True,
    value: str | None = None,
) -> Decoded:
    """Decodes online or offline: a word, a number, or a field of a JSON object, whose other fields
    are readings.

    Without `any_word`, only words that mean nothing else count: a heat pump that is `off` is
    online. `value` is the field that a rule names. Any other payload is decoded like `auto`. Raises
    DecodeError.
    """
    if payload[:1] == b"{":
        document = parse_json(payload)
        if type(document) is dict:
            name, state = _presence_in(document, any_word, value)
            if name:
                del document[name]
            decoded = decode_parsed(payload, document, fields)
            if state is not None:
                decoded.add(ONLINE, state)
            return decoded
        return decode_json(payload, fields)
    found = presence(utf8(payload[:64]).strip(), any_word) if len(payload) <= 64 else None
    if found is None:
        return decode_any(payload, fields, metric)
    decoded = Decoded()
    decoded.add(ONLINE, found)
    return decoded


def _presence_in(
    document: dict[str, Any], any_word: bool, value: str | None
) -> tuple[str, bool | None]:
    """Returns the field that says whether the device is online, and the state."""
    if document.get("_type") == "lwt":  # the will of OwnTracks
        return "_type", False
    names = _STATUS_FIELDS if any_word else _PRESENCE_FIELDS
    for name in names if value is None else (value,):
        is_any = any_word or _PRESENCE_FIELDS.get(name, False)
        state = presence(str(document.get(name, "")), is_any)
        if state is not None:
            return name, state
    return "", None


def presence(text: str, any_word: bool = True) -> bool | None:
    """Parses a word for online or offline."""
    folded = text.lower()
    if folded in (_ONLINE if any_word else _PRESENT):
        return True
    return False if folded in (_OFFLINE if any_word else _ABSENT) else None


SKIPPED: Final = "_"
"""The name of a column to leave out."""
LINES_MAX: Final = 10_000
"""The most lines of one message."""
CELLS_MAX: Final = 1_000_000
"""The most cells of one message."""


def decode_form(payload: bytes, fields: Fields) -> Decoded:
    """Decodes named values as a form sends them, `tempf=49.2&humidity=88`, or with a comma or a
    semicolon between them. Raises DecodeError."""
    text = utf8(payload).strip()
    pairs = [part.partition("=") for part in re.split("&" if "&" in text else "[,;]", text)]
    if not all(name and sign for name, sign, _ in pairs):
        raise DecodeError("no form: a part is not name=value")
    values = {}
    for name, _, value in pairs:
        if "&" in text:
            name, value = unquote_plus(name), unquote_plus(value)
        found = plain_value(value)
        values[name] = found if type(found) in NUMBERS else value
    decoded = decode_document(values, fields)
    for name, count in Counter(name for name, *_ in pairs).items():
        if count > 1:
            decoded.refuse_repeated(repr(name), count)
    return decoded


def decode_csv(
    payload: bytes, columns: tuple[str, ...], fields: Fields, delimiter: str = ","
) -> Decoded:
    """Decodes a CSV payload. Bad lines become errors of their own, and the others are read.

    Raises DecodeError if no line can be read.
    """
    lines = _lines(utf8(payload), delimiter)
    if not columns:
        columns, lines = tuple(name.strip() for name in lines[0]), lines[1:]
        if len(set(columns)) != len(columns) or not all(columns):
            raise DecodeError(f"the first line names columns twice or not at all: {columns}")
    if len(lines) > 1:  # sequence, id and sent time of one line are not those of the message
        fields = replace(fields, sent=(), sequence=(), id=())
    decoded = Decoded()
    times: list[int | None] = []
    is_first = True
    for at, line in enumerate(lines, 1):
        if len(line) != len(columns):
            decoded.refuse(f"line {at} has {len(line)} columns instead of {len(columns)}", "format")
            continue
        cells = {
            name: text.strip() for name, text in zip(columns, line, strict=True) if name != SKIPPED
        }
        row = {name: _value(text, fields.decimal) for name, text in cells.items()}
        of_line = Decoded()
        try:
            extract_fields(row, fields, of_line)
        except DecodeError as error:
            decoded.refuse(f"line {at}: {error}", error.code)
            continue
        if is_first:
            decoded.sequence, decoded.id = of_line.sequence, of_line.id
            decoded.device, decoded.sent_us = of_line.device, of_line.sent_us
            decoded.time_us = of_line.time_us
            is_first = False
        elif of_line.device != decoded.device:
            decoded.refuse(
                f"line {at} is of {of_line.device}, the lines before of {decoded.device}",
                "device",
            )
            continue
        for reason in of_line.errors or ():
            decoded.refuse(f"line {at}: {reason}", of_line.code)
        for name, value in row.items():
            if type(value) is str:
                add_other_text(decoded, own_name(name), value, fields.decimal)
                continue
            decoded.add(own_name(name), value)
            if has_other_form(value, cells[name], fields.decimal):
                decoded.add_text_of(cells[name])
        times.extend([of_line.time_us] * (len(decoded.names) - len(times)))
    if not decoded.names and decoded.errors:
        raise DecodeError(decoded.reason() or "", decoded.code)
    decoded.times = times
    return decoded


def _lines(text: str, delimiter: str) -> list[list[str]]:
    lines: list[list[str]] = []
    if text.count(delimiter) >= CELLS_MAX:
        raise DecodeError(f"more than {CELLS_MAX} cells", "limit")
    try:
        for line in csv.reader(io.StringIO(text), delimiter=delimiter, strict=True):
            if len(lines) >= LINES_MAX:
                raise DecodeError(f"more than {LINES_MAX} lines", "limit")
            if line:
                lines.append(line)
    except csv.Error as error:
        raise DecodeError(f"no CSV: {error} in line {len(lines) + 1}") from None
    if not lines:
        raise DecodeError("no line with values")
    return lines


def _value(text: str, decimal: str) -> float | int | bool | str | None:
    value = plain_value(text, decimal) if text else None
    return value if value is not None else text or None

"""The CSV decoder: one line or several, with the columns of a rule or of the first line.

A column named `_` is left out.
"""

import csv
import io
from dataclasses import replace
from typing import Final

from holdfast.pipeline.decoders.decoded import Decoded, DecodeError, own_name, utf8
from holdfast.pipeline.decoders.json_payload import Fields, extract_fields
from holdfast.pipeline.decoders.text_payload import is_word, plain_value

SKIPPED: Final = "_"
"""The name of a column to leave out."""
LINES_MAX: Final = 10_000
"""The most lines of one message."""
CELLS_MAX: Final = 1_000_000
"""The most cells of one message."""


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
        row = {name: _value(text) for name, text in cells.items()}
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
            decoded.add(own_name(name), value)
            if is_word(value, cells[name]):
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


def _value(text: str) -> float | int | bool | str | None:
    value = plain_value(text) if text else None
    return value if value is not None else text or None

"""Reads the rows of a file (JSON lines, a JSON list, CSV or Parquet), and makes messages of them.

A file is read as a stream: one row, or a batch of Parquet, is in memory at a time.
"""

import csv
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from gzip import GzipFile
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.decoders.times import parse_time
from holdfast.pipeline.parquet_pages import BATCH_BYTES, batch_rows
from holdfast.pipeline.tables.rules import TIME_FIELDS
from holdfast.protocol.topics.names import InvalidTopic, decode_topic


class ImportFailed(Exception):
    """The import cannot go on. The text says where, what is wrong, and what was imported."""


class BadRow(ValueError):
    """A row of a file that can be no message. The text says why."""


READ_CHARACTERS: Final = 1 << 18
"""The characters that are read at a time."""
CUT_MAX: Final = 16
"""The characters before the end of a text among which the parser fails because the text goes on.
An unterminated string is the exception: it fails at its begin."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_PARSER: Final = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)
"""A parser that finds the end of an item. Its values are not used: the reader of lines decodes the
item again, so that a list and lines have the same bad rows."""


class BadList(ValueError):
    """A text that is no JSON list. The text says where it is wrong."""


class JsonList:
    """A JSON list that is read as a stream."""

    def __init__(self, file: TextIOWrapper, characters_max: int) -> None:
        """`characters_max`: the longest item."""
        self._file = file
        self._characters_max = characters_max
        self._text = ""
        self._at = 0

    def items(self) -> Iterator[str]:
        """Yields the JSON text of each item. Raises BadList."""
        number = 0
        self._skip("[", number)
        is_empty = self._next() == "]"
        while not is_empty:
            number += 1
            yield self._item(number)
            if self._next() == "]":
                break
            self._skip(",", number)
        self._skip("]", number)
        if self._next():
            raise BadList("text follows the list")

    def _item(self, number: int) -> str:
        self._next()
        while True:
            end, error = self._end()
            if (len(self._text) if end is None else end) - self._at > self._characters_max:
                raise BadList(f"{number}: an item of more than {self._characters_max} characters")
            # A number may go on behind the end of the text.
            if end is not None and end < len(self._text):
                break
            is_cut = error is None or error.msg.startswith("Unterminated string")
            is_cut = is_cut or (error is not None and error.pos > len(self._text) - CUT_MAX)
            if not is_cut or not self._more():
                raise BadList(f"{number}: {error.msg if error else 'it has no end'}")
        begin, self._at = self._at, end
        return self._text[begin:end]

    def _end(self) -> tuple[int | None, json.JSONDecodeError | None]:
        try:
            return _PARSER.raw_decode(self._text, self._at)[1], None
        except json.JSONDecodeError as error:
            return None, error
        except RecursionError:
            raise BadList("an item has too many levels") from None

    def _skip(self, character: str, number: int) -> None:
        found = self._next()
        if found != character:
            raise BadList(f"{found or 'the end'} in place of {character} after item {number}")
        self._at += 1

    def _next(self) -> str:
        """Returns the next character that is no space. Empty: the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match is not None else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Reads as much again as is in memory, so that a long item is parsed few times."""
        rest = self._text[self._at :]
        part = self._file.read(max(READ_CHARACTERS, len(rest)))
        self._text, self._at = rest + part, 0
        return bool(part)


BLANKS_BYTES: Final = 1 << 16
LINE_BYTES_MAX: Final = 8 << 20
"""The most bytes of a line of JSON, and the most characters of an item of a JSON list."""
CSV_ROW_MAX: Final = 8 << 20
"""The most characters of a row of CSV, which may have several lines."""
PARQUET_ROW_MAX: Final = 16 << 20
"""The most bytes of a row of Parquet."""
NUMBER: Final = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d{1,17})?([eE][+-]?\d{1,3})?")
"""A field of CSV that is a number. `007` and `+1` stay texts, because they may be names."""
VALUES: Final = (ValueError, OverflowError)
"""The errors for a value of Parquet that Python cannot express, such as a day after the year 9999
or a text that is no UTF-8."""
WORDS: Final = {"": None, "true": True, "True": True, "false": False, "False": False}

Row = dict[str, Any]
NumberedRow = tuple[int, Row | BadRow]
"""The line of a text or the row of a Parquet file, from 1, and the row or what is wrong with it."""


def read_rows(path: Path, kind: str) -> Iterator[NumberedRow]:
    """Yields the rows of a file. Raises ImportFailed if it cannot be read."""
    try:
        yield from READERS[kind](path)
    except (OSError, EOFError, zlib.error, pa.ArrowException, *VALUES) as error:
        text = str(error).strip().splitlines()
        raise ImportFailed(f"{path} cannot be read: {text[0] if text else repr(error)}") from None


def kind_of(path: Path) -> str:
    """Returns the kind of a file by its name. Raises ImportFailed."""
    suffixes = [each.lower() for each in path.suffixes if each.lower() != ".gz"]
    kind = KINDS.get(suffixes[-1] if suffixes else "")
    if kind is None:
        raise ImportFailed(
            f"{path}: its name tells no format; there are {', '.join(KINDS)}, texts also with .gz. "
            f"Or give --format {', '.join(READERS)}"
        )
    return kind


def _json(path: Path) -> Iterator[NumberedRow]:
    with _opened(path) as file:
        # In pieces: byte by byte, a small .gz of blanks takes minutes.
        begin = b""
        while not begin and (piece := file.read(BLANKS_BYTES)):
            begin = piece.lstrip(b" \t\r\n")[:1]
    if begin == b"[":
        yield from _json_list(path)
        return
    with _opened(path) as file:
        number = 0
        while line := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            if len(line) > LINE_BYTES_MAX:
                raise ImportFailed(f"{path}:{number}: a line of more than {LINE_BYTES_MAX} bytes")
            if line.strip():
                yield number, _object(line)


def _json_list(path: Path) -> Iterator[NumberedRow]:
    with _opened(path) as file:
        text = TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        items = JsonList(text, LINE_BYTES_MAX).items()
        try:
            for number, item in enumerate(items, 1):
                yield number, _object(item.encode("utf-8", "surrogateescape"))
        except BadList as error:
            raise ImportFailed(f"{path} is no JSON: {error}") from None


def _object(text: bytes) -> Row | BadRow:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow(f"no JSON: {error}")
    return found if isinstance(found, dict) else BadRow("it is no JSON object")


def _csv(path: Path) -> Iterator[NumberedRow]:
    with _opened(path) as file:
        text = TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        source = CsvLines(text, path)
        lines = csv.reader(source, strict=True)
        try:
            names = next(lines, [])
        except csv.Error as error:
            raise ImportFailed(f"{path}:1: {error}") from None
        if len(set(names)) != len(names) or not all(names):
            raise ImportFailed(f"{path}:1: the first line must name each column once: {names}")
        while True:
            source.characters = 0
            try:
                values = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                yield lines.line_num, BadRow(str(error))
                continue
            if not values:
                continue  # an empty line
            if len(values) != len(names):
                yield (
                    lines.line_num,
                    BadRow(f"{len(values)} fields, the first line has {len(names)}"),
                )
            elif not "".join(values).isascii() and not _is_utf8(values):
                yield lines.line_num, BadRow("it is no UTF-8")
            else:
                yield lines.line_num, dict(zip(names, map(csv_value, values), strict=True))


class CsvLines:
    """The lines of a CSV text, with a bound for those of one row: a quoted field, or a file that is
    no CSV, may have no end."""

    def __init__(self, text: TextIOWrapper, path: Path) -> None:
        self.characters = 0
        """The characters of the row. The reader sets it to 0 before each row."""
        self._text = text
        self._path = path

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        line = self._text.readline(CSV_ROW_MAX + 1)
        self.characters += len(line)
        if self.characters > CSV_ROW_MAX:
            raise ImportFailed(f"{self._path}: a row of more than {CSV_ROW_MAX} characters")
        if not line:
            raise StopIteration
        return line


def _is_utf8(values: list[str]) -> bool:
    return not any("\ud800" <= one <= "\udfff" for value in values for one in value)


def csv_value(text: str) -> Any:
    """Returns a field of CSV as a number, a truth value, null if it is empty, or a text."""
    if text in WORDS:
        return WORDS[text]
    match = NUMBER.fullmatch(text)
    if match is None:
        return text
    return int(text) if match[2] is match[3] is None else float(text)


def _parquet(path: Path) -> Iterator[NumberedRow]:
    with (
        open(path, "rb") as pages,
        pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file,
    ):
        number = 0
        for at in range(file.num_row_groups):
            rows = batch_rows(pages, file, at)
            for batch in file.iter_batches(rows, row_groups=[at]):
                for part in _parts(batch):
                    if part.nbytes > PARQUET_ROW_MAX:
                        raise ImportFailed(
                            f"{path}:{number + 1}: a row of more than {PARQUET_ROW_MAX} bytes"
                        )
                    for row in part.to_pylist():
                        number += 1
                        yield number, row


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields a batch of the usual size as it is, and another one row by row: lists may be longer
    than in the mean."""
    if batch.num_rows <= 1 or batch.nbytes <= BATCH_BYTES:
        yield batch
        return
    for at in range(batch.num_rows):
        yield batch.slice(at, 1)


def _opened(path: Path) -> GzipFile | BufferedReader:
    return GzipFile(path) if path.suffix.lower() == ".gz" else open(path, "rb")


def plain(value: Any) -> Any:
    """Returns a value as JSON has it. Raises BadRow for bytes and durations."""
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        raise BadRow("a column is binary: name it with --payload, or leave it out")
    if value is None or isinstance(value, str | int | float):
        return value
    raise BadRow(f"a column has values of type {type(value).__name__}: leave it out")


def iso(at: datetime) -> str:
    """Returns a time in UTC to the microsecond. A time without a zone is UTC."""
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    return at.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


READERS: Final[dict[str, Callable[[Path], Iterator[NumberedRow]]]] = {
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
}
KINDS: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}


NOW: Final = "now"
"""The value of --time for rows that happen when they are imported."""
TIME: Final = TIME_FIELDS[0]
"""The field of a payload in which an import writes the time of a row."""
VALUE: Final = "value"
"""The field of a payload that was only a number, beside its time."""
_FIELD: Final = re.compile(r"\{([^{}]+)\}")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class ImportRule:
    """The rule by which rows become messages. Raises ImportFailed for one that cannot work."""

    topic: str
    """The topic; `{name}` stands for the field of the row."""
    payload: str | None = None
    """The field that is the payload. None: a JSON object of the fields not in the topic."""
    time: str | None = None
    """The field with the time, which the payload gets as `ts`. NOW: none. None: it has one."""

    def __post_init__(self) -> None:
        sample = _FIELD.sub("x", self.topic)
        try:
            decode_topic(sample.encode())
        except (InvalidTopic, UnicodeEncodeError) as error:
            raise ImportFailed(f"--topic {self.topic}: {error}") from None
        if "{" in sample or "}" in sample:
            raise ImportFailed(f"--topic {self.topic}: a field is written as {{name}}")

    def message(self, row: Row) -> tuple[str, bytes]:
        """Returns the topic and payload of a row. Raises BadRow."""
        return self._topic(row), self._payload(row)

    def _fields(self) -> Iterator[str]:
        yield from _FIELD.findall(self.topic)

    def _topic(self, row: Row) -> str:
        is_all = _FIELD.fullmatch(self.topic) is not None

        def level(match: re.Match[str]) -> str:
            """Returns the levels of the topic that one field gives."""
            value = _value(row, match[1])
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise BadRow(f"{match[1]} is {_shown(value)}, which is no part of a topic")
            text = str(value)
            if "/" in text and not is_all:
                raise BadRow(f"{match[1]} is {_shown(value)}, which would be several levels")
            return text

        topic = _FIELD.sub(level, self.topic)
        try:
            decode_topic(topic.encode())
        except (InvalidTopic, UnicodeEncodeError) as error:
            raise BadRow(f"topic {_shown(topic)}: {error}") from None
        return topic

    def _payload(self, row: Row) -> bytes:
        if self.payload is None:
            left = {*self._fields(), self.time}
            fields = {name: plain(each) for name, each in row.items() if name not in left}
            return self._with_time(row, {n: each for n, each in fields.items() if each is not None})
        value = _value(row, self.payload)
        try:
            raw = value.encode() if isinstance(value, str) else value
        except UnicodeEncodeError:
            raise BadRow(f"the payload {self.payload} is no Unicode") from None
        raw = raw if isinstance(raw, bytes) else None
        if raw is not None and self.time == NOW:
            return raw
        if raw is not None:
            try:
                value = msgspec.json.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                value = None
            if isinstance(value, dict) and self.time is None and not TIMES.isdisjoint(value):
                return raw  # as it came
        if isinstance(value, int | float):
            value = {VALUE: value}
        if not isinstance(value, dict):
            raise BadRow(
                f"the payload {self.payload} is no JSON object and no number, so it cannot have "
                "the time of the row; --time now imports it without"
            )
        return self._with_time(row, plain(value))

    def _with_time(self, row: Row, fields: dict[str, Any]) -> bytes:
        if self.time is not None and self.time != NOW:
            value = _value(row, self.time)
            time_us = None if isinstance(value, bool) else parse_time(plain(value))
            if time_us is None:
                raise BadRow(f"{self.time} is {_shown(value)}, which is no time")
            try:
                at = _EPOCH + timedelta(microseconds=time_us)
            except OverflowError:
                raise BadRow(f"{self.time} is {_shown(value)}, beyond the year 9999") from None
            if TIME in fields:
                raise BadRow(f"it has a field {TIME} beside the time {self.time}")
            fields = {TIME: iso(at), **fields}
        elif self.time is None and TIMES.isdisjoint(fields):
            raise BadRow(
                f"it has no time ({', '.join(TIME_FIELDS)}): name its field with --time, or give "
                "--time now"
            )
        try:
            return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            raise BadRow("a field is NaN, infinity or no Unicode, which JSON has not") from None


TIMES: Final = frozenset(TIME_FIELDS)


def _value(row: Row, name: str) -> Any:
    if name not in row:
        raise BadRow(f"it has no field {name}; it has {', '.join(row)[:200]}")
    return row[name]


def _shown(value: Any) -> str:
    return repr(value)[:80]

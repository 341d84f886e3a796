"""Reads the rows of a file (JSON lines, a JSON list, CSV or Parquet), and makes messages of them.

A file is read as a stream: one row, or a batch of Parquet, is in memory at a time.
"""

import csv
import json
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from gzip import GzipFile
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.protocol.topics.names import InvalidTopic, decode_topic
from holdfast_lake.decoders.times import parse_time
from holdfast_lake.parquet_pages import BATCH_BYTES, batch_rows
from holdfast_lake.tables.rules import TIME_FIELDS


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
DELIMITERS: Final = (",", ";", "\t", "|")
"""The delimiters of CSV of which the first line may show one."""
NUMBER: Final = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d{1,17})?([eE][+-]?\d{1,3})?")
"""A field of CSV that is a number. `007` and `+1` stay texts, because they may be names."""
VALUES: Final = (ValueError, OverflowError)
"""The errors for a value of Parquet that Python cannot express, such as a day after the year 9999
or a text that is no UTF-8."""
WORDS: Final = {"": None, "true": True, "True": True, "false": False, "False": False}

NO_UTF8: Final = (
    "it is no UTF-8. If it is Latin-1, make UTF-8 of it: iconv -f LATIN1 -t UTF-8 OLD > NEW"
)
INFLUX: Final = (
    "it is annotated CSV of InfluxDB. Make one table of it: awk "
    "'/^,/ { sub(/^,/, \"\"); if (!/^result,table,/ || !n++) print }' OLD.csv > NEW.csv"
)

Row = dict[str, Any]
NumberedRow = tuple[int, Row | BadRow]
"""The line of a text or the row of a Parquet file, from 1, and the row or what is wrong with it."""


@dataclass(frozen=True)
class CsvFormat:
    """The way in which a CSV file is written, as far as the command says it."""

    delimiter: str = ""
    """Empty: the one of the first line, if that is certain, or a comma."""
    decimal: str = ""
    """`,` or `.` in numbers. Empty: a point, and between other delimiters than a comma a number
    with a comma is a bad row, because it would become a text."""


CSV_FORMAT: Final = CsvFormat()


def read_rows(path: Path, kind: str, form: CsvFormat = CSV_FORMAT) -> Iterator[NumberedRow]:
    """Yields the rows of a file. Raises ImportFailed if it cannot be read."""
    try:
        yield from READERS[kind](path, form)
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


def _utf16(path: Path) -> ImportFailed:
    return ImportFailed(
        f"{path} is UTF-16. Make UTF-8 of it: iconv -f UTF-16 -t UTF-8 {path} > utf8-{path.name}"
    )


def _json(path: Path, _: CsvFormat) -> Iterator[NumberedRow]:
    with _opened(path) as file:
        # In pieces: byte by byte, a small .gz of blanks takes minutes.
        begin = b""
        while not begin and (piece := file.read(BLANKS_BYTES)):
            begin = piece.lstrip(b" \t\r\n")[:1]
    if begin in (BOM_UTF16_BE[:1], BOM_UTF16_LE[:1]):
        raise _utf16(path)
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


def _csv(path: Path, form: CsvFormat) -> Iterator[NumberedRow]:
    with _opened(path) as file:
        text = TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        source = CsvLines(text, path)
        first = source.first()
        if first[:2].encode("utf-8", "surrogateescape") in (BOM_UTF16_BE, BOM_UTF16_LE):
            raise _utf16(path)
        delimiter = form.delimiter or _delimiter(first)
        decimal = form.decimal or ("." if delimiter == "," else "")
        lines = csv.reader(source, delimiter=delimiter, strict=True)
        try:
            names = next(lines, [])
        except csv.Error as error:
            raise ImportFailed(f"{path}:1: {error}") from None
        if names and names[0] in ("#group", "#datatype", "#default"):
            raise ImportFailed(f"{path}:1: {INFLUX}")
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
            row: Row | BadRow
            if len(values) != len(names):
                row = BadRow(
                    f"{len(values)} fields between {delimiter!r}, the first line has {len(names)} "
                    "(--delimiter gives another one)"
                )
            elif not "".join(values).isascii() and not _is_utf8(values):
                row = BadRow(NO_UTF8)
            else:
                try:
                    row = {n: csv_value(v, decimal) for n, v in zip(names, values, strict=True)}
                except BadRow as error:
                    row = error
            yield lines.line_num, row


def _delimiter(line: str) -> str:
    """Returns the one delimiter by which the first line has several columns, or a comma."""
    with suppress(csv.Error):
        found = [each for each in DELIMITERS if len(next(csv.reader([line], delimiter=each))) > 1]
        if len(found) == 1:
            return found[0]
    return ","


class CsvLines:
    """The lines of a CSV text, with a bound for those of one row: a quoted field, or a file that is
    no CSV, may have no end."""

    def __init__(self, text: TextIOWrapper, path: Path) -> None:
        self.characters = 0
        """The characters of the row. The reader sets it to 0 before each row."""
        self._text = text
        self._path = path
        self._first = ""

    def first(self) -> str:
        """Returns the first line, which stays the next one."""
        self._first = self._text.readline(CSV_ROW_MAX + 1)
        return self._first

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        line, self._first = self._first or self._text.readline(CSV_ROW_MAX + 1), ""
        self.characters += len(line)
        if self.characters > CSV_ROW_MAX:
            raise ImportFailed(f"{self._path}: a row of more than {CSV_ROW_MAX} characters")
        if not line:
            raise StopIteration
        return line


def _is_utf8(values: list[str]) -> bool:
    return not any("\ud800" <= one <= "\udfff" for value in values for one in value)


def csv_value(text: str, decimal: str = ".") -> Any:
    """Returns a field of CSV as a number, a truth value, null if it is empty, or a text. Raises
    BadRow."""
    if text in WORDS:
        return WORDS[text]
    comma = decimal != "." and text.count(",") == 1
    match = NUMBER.fullmatch(text.replace(",", ".") if comma else text)
    if match is None or (decimal == "," and "." in text):
        return text  # also 1.234 beside decimal commas, which may be thousands
    if comma and not decimal:
        raise BadRow(
            f"{text!r} may be a number with a decimal comma: --decimal , makes numbers of these, "
            "--decimal . leaves them texts"
        )
    return int(match[0]) if match[2] is match[3] is None else float(match[0])


def _parquet(path: Path, _: CsvFormat) -> Iterator[NumberedRow]:
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


READERS: Final = {"json": _json, "csv": _csv, "parquet": _parquet}
KINDS: Final = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv",
                ".parquet": "parquet"}  # fmt: skip
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
    """The field with the time, which the payload gets as `ts`. It may be in the payload. NOW: none.
    None: the payload has a field of TIME_FIELDS."""
    zone: str | None = field(default=None, repr=False)
    """The zone of times that name none. None: UTC."""
    time_format: str | None = field(default=None, repr=False)
    """The format of times as texts, like %d/%m/%Y %H:%M:%S."""

    def __post_init__(self) -> None:
        if (self.zone or self.time_format) and self.time in (None, NOW):
            raise ImportFailed("--zone and --time-format are for the times of --time FIELD")
        self._zone()
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

    def is_newly_good(self, row: Row) -> bool:
        """Returns whether 0.1 made no message of a row that is one now. Its imports with --skip-bad
        numbered the rows without it, so the numbers of its producer mean other rows."""
        if self.payload is None or self.time in (None, NOW):
            return False
        return self.time not in row or not isinstance(self._document(row)[1], dict | int | float)

    def names_no_zone(self, row: Row) -> bool:
        """Returns whether the time of a row is a text without a zone, which is taken as UTC."""
        value = row.get(self.time or "")
        if self.zone is not None or not isinstance(value, str):
            return False
        return self._time_us(value, None) != self._time_us(value, timezone(timedelta(hours=9)))

    def _time_us(self, value: Any, zone: tzinfo | None) -> int | None:
        """Returns microseconds since 1970, or None for a value that is no time. Raises BadRow."""
        if isinstance(value, bool):
            return None
        is_local = isinstance(value, datetime) and value.tzinfo is None
        text = value.isoformat() if is_local else plain(value)
        return parse_time(text, zone, time_format=self.time_format)

    def _zone(self) -> ZoneInfo | None:
        try:
            return None if self.zone is None else ZoneInfo(self.zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ImportFailed(
                f"--zone {self.zone} is not known; a name such as Europe/Berlin (where no zone is "
                "known: pip install tzdata)"
            ) from None

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
        raw, value = self._document(row)
        if raw is not None and self.time == NOW:
            return raw
        if isinstance(value, dict) and raw and self.time is None and not TIMES.isdisjoint(value):
            return raw  # as it came
        if isinstance(value, bytes | list) or (self.time == NOW and value is None):
            raise BadRow(
                f"the payload {self.payload} is {_shown(value)}, which cannot have the time of the "
                "row; --time now leaves texts and bytes unchanged, without that time"
            )
        return self._with_time(row, plain(value if isinstance(value, dict) else {VALUE: value}))

    def _document(self, row: Row) -> tuple[bytes | None, Any]:
        """Returns the bytes of a payload that is a text or binary, and its value: that of the JSON,
        or the text. Raises BadRow."""
        value = _value(row, self.payload or "")
        try:
            raw = value.encode() if isinstance(value, str) else value
        except UnicodeEncodeError:
            raise BadRow(f"the payload {self.payload} is no Unicode") from None
        if not isinstance(raw, bytes):
            return None, value
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return raw, msgspec.json.decode(raw)
        with suppress(UnicodeDecodeError):
            return raw, raw.decode()
        return raw, raw

    def _with_time(self, row: Row, fields: dict[str, Any]) -> bytes:
        if self.time is not None and self.time != NOW:
            is_inside = self.time not in row and self.time in fields
            value = _value(fields if is_inside else row, self.time)
            time_us = self._time_us(value, self._zone())
            if time_us is None:
                raise BadRow(
                    f"{self.time} is {_shown(value)}, which is no time (--time-format names the "
                    "format of texts, such as %d/%m/%Y %H:%M:%S)"
                )
            try:
                at = _EPOCH + timedelta(microseconds=time_us)
            except OverflowError:
                raise BadRow(f"{self.time} is {_shown(value)}, beyond the year 9999") from None
            if TIME in fields and not (is_inside and self.time == TIME):
                raise BadRow(f"it has a field {TIME} beside the time {self.time}")
            fields = {TIME: None, **fields} | {TIME: iso(at)}
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

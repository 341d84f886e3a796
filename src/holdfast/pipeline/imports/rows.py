"""Reads the rows of a file: JSON lines, a JSON list, CSV or Parquet, each with its number.

A file is read as a stream: one row, or a batch of Parquet, is in memory at a time.
"""

import csv
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from gzip import GzipFile
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.imports.errors import BadRow, ImportFailed
from holdfast.pipeline.imports.json_list import BadList, JsonList
from holdfast.pipeline.parquet_pages import BATCH_BYTES, batch_rows

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

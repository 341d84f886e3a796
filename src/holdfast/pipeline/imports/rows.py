"""The rows of a file: JSON lines, a JSON list, CSV or Parquet, each with its number.

A file is read as a stream, except for a JSON list, which is read at once (JSON_BYTES_MAX).
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

LINE_BYTES_MAX: Final = 64 << 20
"""The most bytes of a line of JSON."""
JSON_BYTES_MAX: Final = 256 << 20
"""The most bytes of a file that is a JSON list."""
PARQUET_ROWS: Final = 8192
"""The rows of a Parquet file that are in memory at a time."""
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
    """Yield the rows of a file. Raises ImportFailed if it cannot be read."""
    try:
        yield from READERS[kind](path)
    except (OSError, EOFError, zlib.error, pa.ArrowException, *VALUES) as error:
        text = str(error).strip().splitlines()
        raise ImportFailed(f"{path} cannot be read: {text[0] if text else repr(error)}") from None


def kind_of(path: Path) -> str:
    """Return the kind of a file by its name. Raises ImportFailed."""
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
        begin = file.read(1)
        while begin and begin in b" \t\r\n":
            begin = file.read(1)
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
        text = file.read(JSON_BYTES_MAX + 1)
    if len(text) > JSON_BYTES_MAX:
        raise ImportFailed(
            f"{path} is a JSON list of more than {JSON_BYTES_MAX} bytes: write lines"
        )
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ImportFailed(f"{path} is no JSON: {error}") from None
    for number, item in enumerate(items, 1):
        yield number, _object(bytes(item))


def _object(text: bytes) -> Row | BadRow:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow(f"no JSON: {error}")
    return found if isinstance(found, dict) else BadRow("it is no JSON object")


def _csv(path: Path) -> Iterator[NumberedRow]:
    with _opened(path) as file:
        text = TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        lines = csv.reader(text, strict=True)
        try:
            names = next(lines, [])
        except csv.Error as error:
            raise ImportFailed(f"{path}:1: {error}") from None
        if len(set(names)) != len(names) or not all(names):
            raise ImportFailed(f"{path}:1: the first line must name each column once: {names}")
        while True:
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


def _is_utf8(values: list[str]) -> bool:
    return not any("\ud800" <= one <= "\udfff" for value in values for one in value)


def csv_value(text: str) -> Any:
    """Return a field of CSV as a number, a truth value, null if it is empty, or a text."""
    if text in WORDS:
        return WORDS[text]
    match = NUMBER.fullmatch(text)
    if match is None:
        return text
    return int(text) if match[2] is match[3] is None else float(text)


def _parquet(path: Path) -> Iterator[NumberedRow]:
    with pq.ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _opened(path: Path) -> GzipFile | BufferedReader:
    return GzipFile(path) if path.suffix.lower() == ".gz" else open(path, "rb")


def plain(value: Any) -> Any:
    """Return a value as JSON has it. Raises BadRow for bytes and durations."""
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
    """Return a time in UTC to the microsecond. A time without a zone is UTC."""
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

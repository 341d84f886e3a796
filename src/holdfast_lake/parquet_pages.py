"""Computes a Parquet row group's memory from the headers of its pages.

Arrow allocates what a page header says. The sizes in the footer are those after encoding: a value
of 1 MB that a dictionary has once may be in each row.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as parquet

ROWS_MAX: Final = 8192
"""The most rows of a batch."""
BATCH_BYTES: Final = 16 << 20
"""The bytes of a batch, unless it has only one row."""
BYTES_MAX: Final = 512 << 20
"""The most bytes of the pages, the lists and the batch that are in memory at the same time."""
VALUE_BYTES: Final = 64
"""The bytes of a value beside its text, as an object of Python."""
LIST_VALUE_BYTES: Final = 24
"""The bytes of a value in a list beside its text, with its levels, as Arrow has it."""

DATA: Final = 0
DICTIONARY: Final = 2
DATA_V2: Final = 3
"""The types of pages. Others are skipped."""
DICTIONARIES: Final = (2, 8)
DELTA_BYTE_ARRAY: Final = 7
"""The encodings in which the bytes of a value are not all in its page or not alone for it."""
VARINT_BYTES_MAX: Final = 10


class PagesTooLarge(ValueError):
    """A row group that needs more memory than BYTES_MAX. The text says how much."""


@dataclass
class _Column:
    """A column of a row group."""

    page: int = 0
    """The bytes of its dictionary and its largest page."""
    value: int = 0
    """The most bytes that a value has in the mean of a page."""
    values: int = 0
    expanded: int = 0
    """The most bytes of all its values in Arrow."""


def batch_rows(
    file: BinaryIO, opened: parquet.ParquetFile, group: int, names: Collection[str] = ()
) -> int:
    """Returns the number of rows of a batch of a row group, of which no batch takes more than
    BATCH_BYTES or one row. `names`: the columns at the top that are read; empty: all.

    Raises PagesTooLarge, and ValueError for headers that are none.
    """
    found = opened.metadata.row_group(group)
    pages = lists = row = 0
    for at in range(found.num_columns):
        chunk = found.column(at)
        if names and chunk.path_in_schema.split(".")[0] not in names:
            continue
        schema = opened.schema.column(at)
        try:
            column = _measure(file, chunk, schema)
        except RecursionError:
            raise ValueError("a page header has too many levels") from None
        pages += column.page
        if schema.max_repetition_level:
            lists += column.expanded
            row += column.expanded // max(found.num_rows, 1)
        else:
            row += column.value
    rows = min(ROWS_MAX, max(BATCH_BYTES // max(row, 1), 1))
    needed = pages + lists + min(rows, found.num_rows) * row
    if needed > BYTES_MAX:
        raise PagesTooLarge(
            f"row group {group} could take {needed >> 20} MiB of memory, and at most "
            f"{BYTES_MAX >> 20} are allowed: write the file with smaller row groups and pages"
        )
    return rows


def _measure(file: BinaryIO, chunk: Any, schema: Any) -> _Column:
    """Reads the headers of the pages that Arrow would read."""
    begin = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < begin:
        begin = chunk.dictionary_page_offset
    end = begin + chunk.total_compressed_size
    column = _Column()
    longest = dictionary = largest = 0
    file.seek(begin)
    while column.values < chunk.num_values and file.tell() < end:
        header = _struct(file)
        kind, uncompressed, compressed = (_count(header, each) for each in (1, 2, 3))
        after = file.tell() + compressed
        if kind == DICTIONARY:
            dictionary = max(dictionary, compressed + uncompressed)
            longest = max(longest, _longest(file, chunk, schema, uncompressed, compressed))
        elif kind in (DATA, DATA_V2):
            data = header.get(5 if kind == DATA else 8)
            data = data if isinstance(data, dict) else {}
            values, encoding = _count(data, 1), _count(data, 2 if kind == DATA else 4)
            # A decoder has the lengths of all values of a page.
            largest = max(largest, compressed + uncompressed + 4 * values)
            bytes_of_all = uncompressed
            if encoding in DICTIONARIES:
                bytes_of_all = values * longest
            elif encoding == DELTA_BYTE_ARRAY:
                bytes_of_all = values * uncompressed
            column.values += values
            column.expanded += bytes_of_all + values * LIST_VALUE_BYTES
            column.value = max(column.value, VALUE_BYTES + bytes_of_all // max(values, 1))
        file.seek(after)
    column.page = dictionary + largest
    return column


def _longest(file: BinaryIO, chunk: Any, schema: Any, uncompressed: int, compressed: int) -> int:
    """Returns the most bytes of a value of a dictionary. A dictionary that cannot be read, and one
    that is too large, counts as one value."""
    if schema.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(schema.length)
    if schema.physical_type != "BYTE_ARRAY":
        return 0
    if uncompressed > BATCH_BYTES or compressed > BATCH_BYTES:
        return uncompressed
    page = file.read(compressed)
    if chunk.compression != "UNCOMPRESSED":
        try:
            # The footer's LZ4 is also an older format, whose dictionaries count as one value.
            codec = {"LZ4": "lz4_raw"}.get(chunk.compression, chunk.compression.lower())
            page = pa.decompress(page, uncompressed, codec, asbytes=True)
        except (pa.ArrowException, ValueError, OSError):
            return uncompressed
    at = longest = 0
    while at + 4 <= len(page):
        length = int.from_bytes(page[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return min(longest, uncompressed)


# Thrift's compact protocol, of which only integers and structures are kept.


def _count(fields: dict[int, Any], number: int) -> int:
    value = fields.get(number)
    if not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"a page header has no count in field {number}")
    return value


def _struct(file: BinaryIO) -> dict[int, Any]:
    fields: dict[int, Any] = {}
    number = 0
    while head := _byte(file):
        number = number + (head >> 4) if head >> 4 else _integer(file)
        fields[number] = _value(file, head & 15)
    return fields


def _value(file: BinaryIO, kind: int, in_list: bool = False) -> Any:
    if kind in (1, 2):
        return _byte(file) if in_list else kind == 1
    if kind == 3:
        return _byte(file)
    if kind in (4, 5, 6):
        return _integer(file)
    if kind in (7, 8):
        file.seek(8 if kind == 7 else _varint(file), 1)
    elif kind in (9, 10):
        head = _byte(file)
        for _ in range(_varint(file) if head >> 4 == 15 else head >> 4):
            _value(file, head & 15, True)
    elif kind == 12:
        return _struct(file)
    else:
        raise ValueError(f"a page header has a field of type {kind}")
    return None


def _integer(file: BinaryIO) -> int:
    value = _varint(file)
    return value >> 1 ^ -(value & 1)


def _varint(file: BinaryIO) -> int:
    value = 0
    for at in range(VARINT_BYTES_MAX):
        byte = _byte(file)
        value |= (byte & 127) << 7 * at
        if byte < 128:
            return value
    raise ValueError("a page header has an integer that is too long")


def _byte(file: BinaryIO) -> int:
    found = file.read(1)
    if not found:
        raise ValueError("a page header is cut")
    return found[0]

"""Sparkplug B payloads from Python values, written without the code under test."""

import struct
from typing import Any

INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64 = range(1, 9)
FLOAT, DOUBLE, BOOLEAN, STRING, DATETIME, TEXT, UUID, DATASET, BYTES, FILE, TEMPLATE = range(9, 20)


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def integer(field: int, number: int) -> bytes:
    return varint(field << 3) + varint(number)


def block(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def value(datatype: int, content: Any, base: int = 10) -> bytes:
    """The value of a metric (base 10), of a template's parameter (3) or a data set's cell (1)."""
    if datatype in (INT64, UINT64, DATETIME):
        return integer(base + 1, content & (1 << 64) - 1)
    if datatype == FLOAT:
        return varint((base + 2) << 3 | 5) + struct.pack("<f", content)
    if datatype == DOUBLE:
        return varint((base + 3) << 3 | 1) + struct.pack("<d", content)
    if datatype == BOOLEAN:
        return integer(base + 4, int(content))
    if datatype in (STRING, TEXT, UUID):
        return block(base + 5, content.encode())
    if datatype in (BYTES, FILE) or datatype > TEMPLATE:
        return block(base + 6, content)
    if datatype == DATASET:
        return block(base + 7, content)
    if datatype == TEMPLATE:
        return block(base + 8, content)
    return integer(base, content & 0xFFFFFFFF)


def metric(
    content: Any = None,
    datatype: int = 0,
    *,
    name: str | None = None,
    alias: int | None = None,
    time_ms: int | None = None,
    typed: bool = True,
    historical: bool = False,
    null: bool = False,
) -> bytes:
    """`typed`: whether the datatype is written, as births do."""
    out = b"" if name is None else block(1, name.encode())
    out += b"" if alias is None else integer(2, alias)
    out += b"" if time_ms is None else integer(3, time_ms)
    out += integer(4, datatype) if typed else b""
    out += integer(5, 1) if historical else b""
    out += integer(7, 1) if null else b""
    return out if content is None else out + value(datatype, content)


def unit(text: str) -> bytes:
    """The property of a metric with its unit."""
    value = integer(1, STRING) + block(8, text.encode())
    return block(9, block(1, b"engUnit") + block(2, value))


def payload(*metrics: bytes, time_ms: int | None = None, seq: int | None = None) -> bytes:
    out = b"" if time_ms is None else integer(1, time_ms)
    out += b"".join(block(2, each) for each in metrics)
    return out if seq is None else out + integer(3, seq)


def dataset(columns: list[str], types: list[int], rows: list[list[Any]]) -> bytes:
    out = integer(1, len(columns))
    out += b"".join(block(2, name.encode()) for name in columns)
    out += b"".join(integer(3, each) for each in types)
    for row in rows:
        cells = [
            block(1, b"" if cell is None else value(kind, cell, base=1))
            for kind, cell in zip(types, row, strict=True)
        ]
        out += block(4, b"".join(cells))
    return out

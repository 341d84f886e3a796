"""Decodes Sparkplug B payloads.

Births give aliases their names and metrics their types. A metric has a value only when its datatype
is known, so `parse_payload` reads, and `add_metric` later turns one metric into readings.

Six message types of protocol buffers must only be read. So `fields` replaces the library: it is
bounded, reports the position of damage, and the tasks need no generated classes.

Source: sparkplug_b.proto of Eclipse Tahu, and the Sparkplug 3.0 specification.
"""

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast_lake.decoders.decoded import (
    DEPTH_MAX,
    READINGS_MAX,
    Decoded,
    DecodeError,
    own_name,
)
from holdfast_lake.decoders.documents import inflated
from holdfast_lake.decoders.units import named_unit

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

_UINT64_MASK: Final = (1 << 64) - 1
_FLOAT: Final = struct.Struct("<f")
_DOUBLE: Final = struct.Struct("<d")

Field = tuple[int, int, int | bytes]
"""A field: number, wire type and value, an int for VARINT and bytes otherwise."""


def fields(data: bytes, base: int = 0) -> Iterator[tuple[int, int, int | bytes, int]]:
    """Yields (number, wire type, value, position) of each field in order. Positions count from
    `base`.

    Raises DecodeError.
    """
    position, end = 0, len(data)
    while position < end:
        start = position
        key, position = varint(data, position, base)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise DecodeError(f"no protocol buffer: field 0 at byte {base + start}")
        if wire == VARINT:
            value, position = varint(data, position, base)
            yield number, wire, value, base + start
            continue
        if wire == BYTES:
            length, position = varint(data, position, base)
        elif wire == FIXED64:
            length = 8
        elif wire == FIXED32:
            length = 4
        else:
            raise DecodeError(f"no protocol buffer: wire type {wire} at byte {base + start}")
        if position + length > end:
            raise DecodeError(
                f"truncated: the field at byte {base + start} wants {length} bytes, "
                f"{end - position} are left"
            )
        yield number, wire, data[position : position + length], base + position
        position += length


def varint(data: bytes, position: int, base: int = 0) -> tuple[int, int]:
    """Returns an unsigned integer and the position after it. Raises DecodeError."""
    start, result, shift = position, 0, 0
    while True:
        if position >= len(data):
            raise DecodeError(f"truncated: in the number at byte {base + start}")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & _UINT64_MASK, position
        shift += 7
        if shift > 63:
            raise DecodeError(f"no protocol buffer: a number too long at byte {base + start}")


def float32(value: bytes) -> float:
    """Decodes a FIXED32 value as a float."""
    found: float = _FLOAT.unpack(value)[0]
    return found


def float64(value: bytes) -> float:
    """Decodes a FIXED64 value as a double."""
    found: float = _DOUBLE.unpack(value)[0]
    return found


INT8, INT16, INT32, INT64 = 1, 2, 3, 4
DATETIME: Final = 13
FIRST_ARRAY: Final = 22
_SIGNED_BITS: Final = {INT8: 8, INT16: 16, INT32: 32, INT64: 64}
_ARRAYS: Final = {22: "b", 23: "h", 24: "i", 25: "q", 26: "B", 27: "H", 28: "I", 29: "Q", 30: "f",
                  31: "d", 34: "q"}  # fmt: skip
_BOOLEAN_ARRAY: Final = 32
_STRING_ARRAY: Final = 33
INT_VALUE, LONG_VALUE, FLOAT_VALUE, DOUBLE_VALUE, BOOLEAN_VALUE = 10, 11, 12, 13, 14
STRING_VALUE, BYTES_VALUE, DATASET_VALUE, TEMPLATE_VALUE, EXTENSION_VALUE = 15, 16, 17, 18, 19
_WIRES: Final = {
    INT_VALUE: VARINT, LONG_VALUE: VARINT, FLOAT_VALUE: FIXED32, DOUBLE_VALUE: FIXED64,
    BOOLEAN_VALUE: VARINT, STRING_VALUE: BYTES, BYTES_VALUE: BYTES, DATASET_VALUE: BYTES,
    TEMPLATE_VALUE: BYTES, EXTENSION_VALUE: BYTES,
}  # fmt: skip
COMPRESSED: Final = "SPBV1.0_COMPRESSED"
"""The format of a body that is another payload, compressed."""
QUALITY: Final = "Quality"
"""The property of a metric that says whether its value is good."""
UNIT: Final = "engUnit"
"""The property with the unit of a metric. Edge nodes send it in births."""
CELLS_MAX: Final = 100_000
"""The most cells of a data set, or values of an array."""


@dataclass(slots=True)
class Metric:
    """A metric as it is on the wire. `kind` is the number of the value's field, 0 without a
    value."""

    name: str | None = None
    alias: int | None = None
    time_ms: int | None = None
    datatype: int | None = None
    is_historical: bool = False
    is_null: bool = False
    kind: int = 0
    raw: int | bytes = 0
    position: int = 0
    """The position of the value in the payload."""
    quality: int | None = None
    """The property QUALITY."""
    unit: str | None = None
    """The property UNIT."""


@dataclass(slots=True)
class Payload:
    """A payload as it is on the wire."""

    time_ms: int | None = None
    sequence: int | None = None
    metrics: list[Metric] = field(default_factory=list)
    format: str = ""
    """The format of the body."""
    body: bytes = b""


def parse_payload(data: bytes) -> Payload:
    """Parses a payload, also one that Tahu has compressed. Raises DecodeError."""
    payload = _parse_fields(data)
    if payload.format == COMPRESSED:
        inner = _parse_fields(inflated(payload.body, "Sparkplug B"))
        if inner.sequence is None:
            inner.sequence = payload.sequence
        if inner.time_ms is None:
            inner.time_ms = payload.time_ms
        return inner
    return payload


def _parse_fields(data: bytes) -> Payload:
    payload = Payload()
    for number, wire, value, position in fields(data):
        if number == 1 and wire == VARINT:
            payload.time_ms = _integer(value)
        elif number == 2 and wire == BYTES:
            if len(payload.metrics) >= READINGS_MAX:
                raise DecodeError(f"more than {READINGS_MAX} metrics", "limit")
            payload.metrics.append(_parse_metric(_data(value), position))
        elif number == 3 and wire == VARINT:
            payload.sequence = _integer(value)
        elif number == 4 and wire == BYTES:
            payload.format = _text(value, position)
        elif number == 5 and wire == BYTES:
            payload.body = _data(value)
        elif number <= 3:
            raise DecodeError(f"no Sparkplug B: field {number} is of wire type {wire}")
    return payload


def _parse_metric(data: bytes, base: int) -> Metric:
    metric = Metric()
    for number, wire, value, position in fields(data, base):
        if number in _WIRES:
            if wire != _WIRES[number]:
                raise DecodeError(f"no Sparkplug B: a value of wire type {wire} at byte {position}")
            metric.kind, metric.raw, metric.position = number, value, position
        elif number == 1 and wire == BYTES:
            metric.name = _text(value, position)
        elif number == 9 and wire == BYTES:
            _read_properties(_data(value), position, metric)
        elif 2 <= number <= 7 and wire == VARINT:
            flag = _integer(value)
            if number == 2:
                metric.alias = flag
            elif number == 3:
                metric.time_ms = flag
            elif number == 4:
                metric.datatype = flag
            elif number == 5:
                metric.is_historical = bool(flag)
            elif number == 7:
                metric.is_null = bool(flag)
        elif number <= 7:
            raise DecodeError(
                f"no Sparkplug B: a metric's field {number} is of wire type {wire} "
                f"at byte {position}"
            )
    return metric


def _read_properties(properties: bytes, base: int, metric: Metric) -> None:
    """Sets the quality and the unit of a metric by its set of properties."""
    names: list[str] = []
    values: list[int | str | None] = []
    for number, wire, value, position in fields(properties, base):
        if number == 1 and wire == BYTES:
            names.append(_text(value, position))
        elif number == 2 and wire == BYTES:
            found: int | str | None = None
            for part, kind, each, place in fields(_data(value), position):
                if part in (3, 4) and kind == VARINT:
                    found = _integer(each)
                elif part == 8 and kind == BYTES:
                    found = _text(each, place)
            values.append(found)
    known = dict(zip(names, values, strict=False))
    quality = known.get(QUALITY)
    metric.quality = quality if isinstance(quality, int) else None
    metric.unit = named_unit(known.get(UNIT))


def is_bad(quality: int) -> bool:
    """Returns whether a value of this quality is none: 0 is bad, 64 uncertain, 192 good, 500
    stale."""
    return not 64 <= quality < 256


def add_metric(decoded: Decoded, name: str, metric: Metric, datatype: int, depth: int = 1) -> None:
    """Adds the readings of one metric, several for a template. Raises DecodeError."""
    name = own_name(name)
    first = len(decoded.names)
    if metric.is_null or metric.kind == 0:
        decoded.add(name, None)
    elif metric.quality is not None and is_bad(metric.quality):
        decoded.refuse(f"{name} is of quality {metric.quality}, so its value is left out", "bad")
        decoded.add(name, None)
    elif metric.kind == TEMPLATE_VALUE:
        _add_template(decoded, name, metric, depth)
    else:
        decoded.add(name, value_of(metric, datatype))
        if len(decoded.names) > first:
            decoded.set_unit(first, metric.unit)
    if metric.quality is not None and len(decoded.names) > first:
        decoded.rate(range(first, len(decoded.names)), metric.quality)


def value_of(metric: Metric, datatype: int) -> float | int | str | bool:
    """Returns the value of a metric that is not null and no template. Raises DecodeError."""
    kind, raw = metric.kind, metric.raw
    if kind == BOOLEAN_VALUE:
        return bool(raw)
    if kind in (INT_VALUE, LONG_VALUE):
        number = _integer(raw)
        if datatype == 0 and number >> (31 if kind == INT_VALUE else 63):
            raise DecodeError(
                f"{number} may be negative: no birth of this edge node before has its type", "name"
            )
        return signed(number, datatype)
    data = _data(raw)
    if kind == FLOAT_VALUE:
        return float32(data)
    if kind == DOUBLE_VALUE:
        return float64(data)
    if kind == STRING_VALUE:
        return _text(data, metric.position)
    if kind == DATASET_VALUE:
        return dataset_text(data, metric.position)
    if kind == BYTES_VALUE:
        if datatype >= FIRST_ARRAY:
            return array_text(data, datatype)
        return base64.b64encode(data).decode()
    raise DecodeError("a value of an extension, which is not in the specification")


def signed(raw: int, datatype: int) -> int:
    """Returns a signed value. On the wire it is an unsigned number of 32 or 64 bits, or of its own
    width."""
    bits = _SIGNED_BITS.get(datatype)
    if bits is None:
        return raw
    raw &= (1 << bits) - 1
    return raw - (1 << bits) if raw >> (bits - 1) else raw


def _add_template(decoded: Decoded, name: str, metric: Metric, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise DecodeError(f"templates nested more than {DEPTH_MAX} deep, at {name[:80]}", "limit")
    parts = list(fields(_data(metric.raw), metric.position))
    if any(number == 5 and wire == VARINT and value for number, wire, value, _ in parts):
        return  # the definition of a type has no values, only defaults
    for number, wire, value, position in parts:
        if number == 2 and wire == BYTES:
            member = _parse_metric(_data(value), position)
            if member.name is None:
                raise DecodeError(f"a member of the template {name} has no name")
            add_metric(decoded, f"{name}/{member.name}", member, member.datatype or 0, depth + 1)
        elif number == 3 and wire == BYTES:
            parameter_name, parameter = _parse_parameter(_data(value), position)
            add_metric(
                decoded, f"{name}/{parameter_name}", parameter, parameter.datatype or 0, depth + 1
            )


def _parse_parameter(data: bytes, base: int) -> tuple[str, Metric]:
    name, parameter = "", Metric()
    for number, wire, value, position in fields(data, base):
        if number == 1 and wire == BYTES:
            name = _text(value, position)
        elif number == 2 and wire == VARINT:
            parameter.datatype = _integer(value)
        elif 3 <= number <= 8 and wire == _WIRES[number + 7]:
            parameter.kind, parameter.raw, parameter.position = number + 7, value, position
    return name, parameter


def dataset_text(data: bytes, base: int = 0) -> str:
    """Returns a data set as JSON: {"columns": [...], "rows": [[...], ...]}. Raises DecodeError."""
    columns: list[str] = []
    types: list[int] = []
    rows: list[list[Any]] = []
    cells = 0
    for number, wire, value, position in fields(data, base):
        if number == 2 and wire == BYTES:
            columns.append(_text(value, position))
        elif number == 3 and wire == VARINT:
            types.append(_integer(value))
        elif number == 3 and wire == BYTES:
            types.extend(_packed(_data(value), position))
        elif number == 4 and wire == BYTES:
            row = _row(_data(value), position, types)
            cells += len(row)
            if cells > CELLS_MAX or len(columns) > CELLS_MAX:
                raise DecodeError(f"a data set of more than {CELLS_MAX} cells", "limit")
            if len(row) != len(columns):
                raise DecodeError(
                    f"row {len(rows)} of a data set has {len(row)} of {len(columns)} columns"
                )
            rows.append(row)
    return json.dumps({"columns": columns, "rows": rows}, separators=(",", ":"))


def _row(data: bytes, base: int, types: list[int]) -> list[Any]:
    row: list[Any] = []
    for number, wire, value, position in fields(data, base):
        if number != 1 or wire != BYTES:
            continue
        datatype = types[len(row)] if len(row) < len(types) else 0
        cell = Metric()
        for part, part_wire, part_value, part_position in fields(_data(value), position):
            if 1 <= part <= 6 and part_wire == _WIRES[part + 9]:
                cell.kind, cell.raw, cell.position = part + 9, part_value, part_position
        found: Any = None if cell.kind == 0 else value_of(cell, datatype)
        # JSON has no NaN.
        row.append(str(found) if found != found or found in (_INF, -_INF) else found)
    return row


_INF: Final = float("inf")


def array_text(data: bytes, datatype: int) -> str:
    """Returns the bytes of an array type (little-endian, packed) as a JSON list. Raises
    DecodeError."""
    code = _ARRAYS.get(datatype)
    if code is not None:
        size = struct.calcsize("<" + code)
        _check_length(len(data) // size)
        if len(data) % size:
            raise DecodeError(f"an array of {len(data)} bytes, which are no {size}-byte values")
        items: list[Any] = list(struct.unpack(f"<{len(data) // size}{code}", data))
        items = [str(item) if item != item or item in (_INF, -_INF) else item for item in items]
    elif datatype == _STRING_ARRAY:
        _check_length(data.count(b"\0"))
        items = [part.decode("utf-8", "replace") for part in data.split(b"\0")[:-1]]
    elif datatype == _BOOLEAN_ARRAY:
        count = int.from_bytes(data[:4], "little")
        if count > (len(data) - 4) * 8:
            raise DecodeError(f"an array of {count} booleans in {len(data)} bytes")
        _check_length(count)
        items = [bool(data[4 + at // 8] >> (7 - at % 8) & 1) for at in range(count)]
    else:
        raise DecodeError(f"datatype {datatype} is none of Sparkplug B")
    return json.dumps(items, separators=(",", ":"))


def _check_length(count: int) -> None:
    """Checks the number of values. As text a value may be forty times as long as in the payload.

    Raises DecodeError.
    """
    if count > CELLS_MAX:
        raise DecodeError(f"an array of {count} values, the maximum is {CELLS_MAX}", "limit")


def _packed(data: bytes, base: int) -> list[int]:
    numbers, position = [], 0
    while position < len(data):
        number, position = varint(data, position, base)
        numbers.append(number)
    return numbers


def _integer(value: int | bytes) -> int:
    assert isinstance(value, int)
    return value


def _data(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value


def _text(value: int | bytes, position: int) -> str:
    try:
        return _data(value).decode()
    except UnicodeDecodeError as error:
        raise DecodeError(
            f"not UTF-8: {error.reason} at byte {position + error.start}", "encoding"
        ) from None

"""A reader of the protocol buffers wire format, as far as Sparkplug B needs it.

Six message types must only be read. So this module replaces the library: it is bounded, reports the
position of damage, and the tasks need no generated classes.
"""

import struct
from collections.abc import Iterator
from typing import Final

from holdfast.pipeline.decoders.decoded import DecodeError

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

"""How far each partition of a replica's journal is committed, as of a moment ago.

The file `watermarks`, little-endian: magic b"HFLW" · crc u32 (of the rest) · format u32 ·
partitions u32 · u64 per partition. It is replaced whole. After a crash it may be behind, by as
much as was committed since it was written; it is never ahead of what is committed and on the disk.
A file that is missing or damaged says that nothing is known to be committed.
"""

import struct
from collections.abc import Sequence
from typing import Final
from zlib import crc32

NAME: Final = "watermarks"
MAGIC: Final = b"HFLW"
FORMAT: Final = 1

_PREFIX: Final = struct.Struct("<4sI")
_FIELDS: Final = struct.Struct("<II")


def encode_watermarks(offsets: Sequence[int]) -> bytes:
    rest = _FIELDS.pack(FORMAT, len(offsets)) + struct.pack(f"<{len(offsets)}Q", *offsets)
    return _PREFIX.pack(MAGIC, crc32(rest)) + rest


def decode_watermarks(data: bytes, partitions: int) -> list[int] | None:
    """None if it is not whole, or of another number of partitions."""
    if len(data) != _PREFIX.size + _FIELDS.size + 8 * partitions:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC or crc != crc32(memoryview(data)[_PREFIX.size :]):
        return None
    if _FIELDS.unpack_from(data, _PREFIX.size) != (FORMAT, partitions):
        return None
    return list(struct.unpack_from(f"<{partitions}Q", data, _PREFIX.size + _FIELDS.size))

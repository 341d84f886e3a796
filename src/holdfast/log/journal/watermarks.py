"""A recent checkpoint of a replica's journal: the committed offset of each partition, and the
durable position of its file.

The file `watermarks`, little-endian: magic b"HFLW" · crc u32 (of the rest) · format u32 ·
partitions u32 · segment u64 · position u64 · u64 per partition. It is replaced atomically. After a
crash it may be behind, by the records committed since it was written. It is never ahead of what is
committed and on the disk. A missing or damaged file counts as no checkpoint.
"""

import struct
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

NAME: Final = "watermarks"
MAGIC: Final = b"HFLW"
FORMAT: Final = 1

_PREFIX: Final = struct.Struct("<4sI")
_FIELDS: Final = struct.Struct("<IIQQ")


@dataclass(frozen=True)
class Checkpoint:
    """The content of the file."""

    offsets: list[int]
    """Per partition the first offset that is not known to be committed."""
    segment: int
    """The bytes before `position` of this segment were durable."""
    position: int
    sequence: int = field(default=0, compare=False)
    """Every record before it was durable. The file does not have it."""


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    offsets = checkpoint.offsets
    rest = _FIELDS.pack(FORMAT, len(offsets), checkpoint.segment, checkpoint.position)
    rest += struct.pack(f"<{len(offsets)}Q", *offsets)
    return _PREFIX.pack(MAGIC, crc32(rest)) + rest


def decode_checkpoint(data: bytes, partitions: int) -> Checkpoint | None:
    """The checkpoint; None if it is damaged, or has another number of partitions."""
    if len(data) != _PREFIX.size + _FIELDS.size + 8 * partitions:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC or crc != crc32(memoryview(data)[_PREFIX.size :]):
        return None
    format, count, segment, position = _FIELDS.unpack_from(data, _PREFIX.size)
    if (format, count) != (FORMAT, partitions):
        return None
    offsets = struct.unpack_from(f"<{partitions}Q", data, _PREFIX.size + _FIELDS.size)
    return Checkpoint(list(offsets), segment, position)

"""Reads a Spark task's files, for `option("path", DIR)`.

The reader takes no lock. The driver's journal_index.py plans the stretches. If bytes are no
valid batch, the reader searches for the next one, and `Coverage` then determines which offsets are
missing.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from zlib import crc32

from holdfast.client.log.reading.scan import Coverage
from holdfast.log.batch import HEADER, HEADER_BYTES, MAGIC, header_damage
from holdfast.log.columns.chunk import Chunk
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import JOURNAL
from holdfast.log.journal.epoch_folders import EPOCHS, newest_epoch

CHUNK_BYTES: Final = 4 << 20
"""The bytes that are read and decoded at a time. A longer batch is read whole."""


@dataclass(frozen=True)
class Piece:
    """The bytes `start` to `end` of a segment file. A batch begins at `start`."""

    path: str
    inode: int
    """The inode of the file that the positions belong to. Retention may replace the file by a
    shorter one."""
    start: int
    end: int
    cuts: tuple[tuple[int, int, int], ...] = ()
    """The cuts of a replica (partition, byte position, offset): a batch of the partition that
    begins before the position counts only below the offset."""
    passed: tuple[tuple[int, int, int], ...] = ()
    """The ranges (partition, start, end) that hold nothing of the wanted topics and are in no
    piece."""


def read_pieces(pieces: Sequence[Piece], coverage: Coverage) -> Iterator[Chunk]:
    """Reads the wanted batches of the pieces.

    The data of a chunk is valid until the next chunk is requested. Missing records raise
    DataLossError.
    """
    buffer = bytearray(CHUNK_BYTES)
    for piece in pieces:
        coverage.note_passed(piece.passed)
    for piece in pieces:
        if coverage.done:
            break
        try:
            descriptor = _open(piece.path)
        except FileNotFoundError:
            continue  # removed by retention: `finish` reports the missing offsets
        try:
            state = os.fstat(descriptor)
            if state.st_ino != piece.inode:
                # Retention replaced the file, so the positions are void. It replaces only files
                # without cuts.
                piece = replace(piece, start=0, end=state.st_size, cuts=())
            yield from _read_piece(descriptor, piece, coverage, buffer)
        finally:
            os.close(descriptor)
    coverage.finish("their segment was removed by retention, or is damaged there")


def _open(path: str) -> int:
    """Opens a segment, even if it was moved: in a shared directory it moves with the epoch.

    Raises FileNotFoundError.
    """
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        folder = Path(path).parent.parent
        root = folder.parent.parent if folder.parent.name == EPOCHS else folder
        newest = newest_epoch(OsFileSystem(root))
        return os.open(root / newest.folder / JOURNAL / Path(path).name, os.O_RDONLY)


def _read_piece(
    descriptor: int, piece: Piece, coverage: Coverage, buffer: bytearray
) -> Iterator[Chunk]:
    """Reads the wanted batches of one piece, chunk by chunk."""
    position = piece.start
    wanted = CHUNK_BYTES
    while position + HEADER_BYTES <= piece.end and not coverage.done:
        length = min(wanted, piece.end - position)
        # The buffer is reused, because fresh memory costs more than the data that is read into it.
        data = memoryview(buffer if length <= len(buffer) else bytearray(length))[:length]
        chunk = Chunk(data[: os.preadv(descriptor, [data], position)])
        stop = coverage.scan(chunk, 0, len(chunk.data), piece.cuts, position)
        if chunk.positions:
            yield chunk
        position += stop.position
        wanted = max(CHUNK_BYTES, stop.needed_bytes)
        stuck = stop.position == 0 and stop.needed_bytes <= len(chunk.data)
        if stop.damage or stuck or position + stop.needed_bytes > piece.end:
            following = find_batch(descriptor, position + 8, piece.end)
            if following is None:
                return
            position = following


def find_batch(descriptor: int, position: int, end: int) -> int | None:
    """Returns the position of the first valid batch at or after `position`, a multiple of 8.

    The batch must end at `end` or before. Returns None if there is none.
    """
    while position + HEADER_BYTES <= end:
        window = os.pread(descriptor, min(CHUNK_BYTES, end - position), position)
        inside = window.find(MAGIC)
        while inside >= 0:
            if inside % 8 == 0 and is_batch(descriptor, position + inside, end):
                return position + inside
            inside = window.find(MAGIC, inside + 1)
        # Batches begin at multiples of 8, so none begins across the end of the window.
        position += max(8, len(window) & ~7)
    return None


def is_batch(descriptor: int, position: int, end: int) -> bool:
    """Returns whether a valid batch begins at `position` and ends at `end` or before."""
    header = os.pread(descriptor, HEADER_BYTES, position)
    if len(header) < HEADER_BYTES:
        return False
    magic, length, crc, layout, _, _, _, _, count, _, body, _ = HEADER.unpack(header)
    if header_damage(magic, length, layout, count, body) or position + length > end:
        return False
    return bool(crc32(os.pread(descriptor, length - 12, position + 12)) == crc)

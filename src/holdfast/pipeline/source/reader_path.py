"""Reading stretches of segment files: what a Spark task does with `option("path", DIR)`.

Only reads, takes no lock. The stretches come from the driver's journal_map.py. Bytes that are no
valid batch are passed by looking for the next one; `Coverage` then knows what they cost.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from zlib import crc32

from holdfast.pipeline.source.scan import Chunk, Coverage, header_damage
from holdfast.storage.files.filesystem import OsFileSystem
from holdfast.storage.files.layout import JOURNAL
from holdfast.storage.journal.epoch_folders import EPOCHS, newest_epoch
from holdfast.storage.record import HEADER, HEADER_BYTES, MAGIC

CHUNK_BYTES: Final = 4 << 20
"""Read and decoded at a time; a longer batch is read whole."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` of a segment file; `start` is where a batch begins."""

    path: str
    inode: int
    """Of the file that the positions are of: retention may put a shorter one in its place."""
    start: int
    end: int
    cuts: tuple[tuple[int, int, int], ...] = ()
    """Of a replica: (partition, place, offset): batches of the partition that begin before the
    place count below the offset only."""
    passed: tuple[tuple[int, int, int], ...] = ()
    """(partition, start, end): offsets that hold nothing of the wanted topics, and are in none of
    the pieces."""


def read_pieces(pieces: Sequence[Piece], coverage: Coverage) -> Iterator[Chunk]:
    """The wanted batches in the pieces. A chunk's data is valid until the next one is asked for.
    Raises DataLossError when some are missing."""
    buffer = bytearray(CHUNK_BYTES)
    for piece in pieces:
        coverage.note_passed(piece.passed)
    for piece in pieces:
        if coverage.done:
            break
        try:
            descriptor = _open(piece.path)
        except FileNotFoundError:
            continue  # removed by retention: `finish` tells what is missing
        try:
            state = os.fstat(descriptor)
            if state.st_ino != piece.inode:
                # Only where nothing was cut.
                piece = replace(piece, start=0, end=state.st_size, cuts=())
            yield from _read_piece(descriptor, piece, coverage, buffer)
        finally:
            os.close(descriptor)
    coverage.finish("their segment was removed by retention, or is damaged there")


def _open(path: str) -> int:
    """A segment, wherever it is by now: in a shared directory it moves with the epoch. Raises
    FileNotFoundError."""
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
    position = piece.start
    wanted = CHUNK_BYTES
    while position + HEADER_BYTES <= piece.end and not coverage.done:
        length = min(wanted, piece.end - position)
        # Again and again the same memory: fresh one costs more than what is read into it.
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
    """Where the first valid batch at or after `position` (a multiple of 8) begins, if there is
    one that ends at `end` at most."""
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
    """Whether a valid batch begins at `position` and ends at `end` at most."""
    header = os.pread(descriptor, HEADER_BYTES, position)
    if len(header) < HEADER_BYTES:
        return False
    magic, length, crc, layout, _, _, _, _, count, _, body, _ = HEADER.unpack(header)
    if header_damage(magic, length, layout, count, body) or position + length > end:
        return False
    return bool(crc32(os.pread(descriptor, length - 12, position + 12)) == crc)

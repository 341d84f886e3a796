"""Reads batches of segment files from outside, whether a broker writes them or not.

The broker's recovery (scan.py) shares no reading code with this module. So `holdfast log verify` is
a second opinion on recovery.

Bytes are written in order. So bytes that are no valid batch are *damage* if a valid batch or a
newer segment follows. Otherwise they are an *unfinished tail*: the write may still be under way.

A write group is written at once and counts completely or not at all. In the newest segment only
complete groups are read, and valid batches of an incomplete one belong to the unfinished tail.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from holdfast.log.batch import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    GROUP_MASK,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Batch,
    CorruptBatch,
    header_damage,
)
from holdfast.log.files.filesystem import ReadFile
from holdfast.log.files.layout import DataDirectory

CHUNK_BYTES: Final = 4 << 20
"""The bytes of one read; a longer batch is read as a whole."""
ALIGNMENT: Final = 8
"""The alignment of batches in bytes."""


class Damage(Struct, frozen=True):
    """Bytes of a segment that are no valid batch although one follows, or that were cut off."""

    segment: int
    position: int
    length: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.segment:020d}.log at {self.position}: {self.length} bytes of damage:"
            f" {self.reason}"
        )


class SegmentReader:
    """A reader of one segment's batches; `read` may be called again after the segment has grown."""

    def __init__(self, directory: DataDirectory, sequence: int, tag: int | None = None) -> None:
        """Opens the segment. `tag` is the journal's (`log.journal.journal`), if it is known.

        Raises `FileNotFoundError` if retention has removed the segment.
        """
        self.sequence = sequence
        self.file = directory.open_segment(sequence)
        self.position = 0
        """The position up to which batches were returned."""
        self.unfinished_bytes = 0
        """The bytes after the last complete group; their write may still be under way."""
        self.tag = tag
        self._empty_at = -1
        # The position of the last pass's first invalid batch. In an open group it is behind
        # `position`.
        self._valid_to = 0
        # True if a group begins at `position`.
        self._is_group_start = True

    def read(self, *, newest: bool) -> Iterator[Batch | Damage]:
        """The batches and damage that are there now, in order; `position` is right behind each one.

        With `newest` there is no newer segment, so the last bytes may be unfinished.
        """
        size = self.file.size()
        # The broker cuts off a tail that a crash or a full disk left unfinished.
        self.position = min(self.position, size)
        self.unfinished_bytes = 0
        while True:
            yield from self._batches(size, whole_groups=newest)
            damaged_at = self._valid_to
            if damaged_at > self.position:
                if not is_later_group(self.file, self.tag, damaged_at, size):
                    self.unfinished_bytes = size - self.position
                    return
                yield from self._batches(size, whole_groups=False)
            position = self.position
            if position == size or self._is_still_empty():
                return
            if is_zero(self.file, position, size):
                self._empty_at = position
                return
            following = _find_batch(self.file, position, size)
            if (
                newest
                and following is not None
                and not is_later_group(self.file, self.tag, position, size)
            ):
                following = None
            # The batch may be valid now, because it and the next were written since the first read.
            if _damage_at(self.file, position, size) is None:
                continue
            if following is None:
                if newest:
                    self.unfinished_bytes = size - position
                    self._empty_at = -1
                    return
                following = size
            reason = _damage_at(self.file, position, size) or "it changed while it was read"
            self.position = following
            self._is_group_start = False
            yield Damage(self.sequence, position, following - position, reason)

    def read_complete(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Batch]:
        """The complete groups that are there now, up to the first invalid place, whatever its
        cause. It is cheaper than `read` while the segment is being written. `chunk_bytes` is the
        size of one read."""
        yield from self._batches(self.file.size(), chunk_bytes, whole_groups=True)

    def read_batch(self, position: int) -> Batch:
        """The batch at a position.

        Raises `CorruptBatch` if there is none.
        """
        header = self.file.read(position, HEADER_BYTES)
        return Batch(self.file.read(position, max(_batch_length(header, 0), HEADER_BYTES)))

    def _batches(
        self, size: int, chunk_bytes: int = CHUNK_BYTES, *, whole_groups: bool
    ) -> Iterator[Batch]:
        """The valid batches from `position` up to the first invalid bytes. With `whole_groups`, a
        group's batches follow only when its last one is there."""
        wanted = chunk_bytes
        waiting: list[Batch] = []
        is_group_start = self._is_group_start
        self._valid_to = self.position
        while self._valid_to + HEADER_BYTES <= size:
            start = self._valid_to
            data = self.file.read(start, min(wanted, size - start))
            inside = 0
            length = 0
            while inside + HEADER_BYTES <= len(data):
                length = _batch_length(data, inside)
                if length == 0 or start + inside + length > size:
                    return
                if inside + length > len(data):
                    break
                try:
                    batch = Batch(data, inside)
                except CorruptBatch:
                    return
                inside += length
                self._valid_to = start + inside
                if is_group_start and batch.attributes & ATTRIBUTE_GROUPED:
                    self.tag = batch.group
                is_group_start = not batch.attributes & ATTRIBUTE_MORE
                waiting.append(batch)
                if whole_groups and not is_group_start:
                    continue
                self._is_group_start = is_group_start
                complete, waiting = waiting, []
                for batch in complete:
                    self.position += batch.length
                    yield batch
            if inside == 0 and length <= wanted:
                return  # the file became shorter
            wanted = max(chunk_bytes, length)

    def _is_still_empty(self) -> bool:
        """True if only zeros were found up to the end of the file, and nothing is written there
        yet."""
        return self.position == self._empty_at and not any(
            self.file.read(self.position, HEADER_BYTES)
        )


def is_later_group(file: ReadFile, tag: int | None, damaged_at: int, size: int) -> bool:
    """True if a write group begins behind the damage: then the damaged one was synced. A batch of
    the damaged group itself proves nothing. `tag` is the journal's, if it is known."""
    at = _find_batch(file, damaged_at, size)
    while at is not None:
        group = group_field(file.read(at, HEADER_BYTES))
        if group is None:
            return True
        if tag is None:
            tag = group_field(file.read(damaged_at, HEADER_BYTES))
        if tag is None:
            tag = (group - (at - damaged_at)) & GROUP_MASK
        if at - ((group - tag) & GROUP_MASK) > damaged_at:
            return True
        at = _find_batch(file, at, size)
    return False


def is_zero(file: ReadFile, start: int, end: int) -> bool:
    """True if there are only zeros: space that was preallocated."""
    while start < end:
        data = file.read(start, min(CHUNK_BYTES, end - start))
        if not data:
            break  # the file became shorter
        if data != bytes(len(data)):
            return False
        start += len(data)
    return True


def group_field(header: bytes) -> int | None:
    """The group field of the batch with this header; None if it is no header, or has no such
    field."""
    if _batch_length(header, 0) == 0:
        return None
    fields = HEADER.unpack(header)
    return int(fields[11]) if fields[4] & ATTRIBUTE_GROUPED else None


def _batch_length(data: bytes, start: int) -> int:
    """The length in the header at `start`; 0 if it is no batch header."""
    if len(data) - start < HEADER_BYTES:
        return 0
    magic, length, _, layout, _, _, _, _, count, _, body_bytes, _ = HEADER.unpack_from(data, start)
    return 0 if header_damage(magic, length, layout, count, body_bytes) else int(length)


def _damage_at(file: ReadFile, position: int, size: int) -> str | None:
    """The reason why no valid batch is at `position` that ends at `size` at most; None if there is
    one."""
    header = file.read(position, min(HEADER_BYTES, size - position))
    length = max(_batch_length(header, 0), HEADER_BYTES)
    try:
        Batch(file.read(position, min(length, size - position)))
    except CorruptBatch as error:
        return str(error)
    return None


def _find_batch(file: ReadFile, position: int, size: int) -> int | None:
    """The position of the next valid batch after the damage at `position`; None without one."""
    # Consistent headers are followed by their lengths. A search for the magic inside a damaged body
    # could find a batch that a client published as a payload.
    length = _batch_length(file.read(position, HEADER_BYTES), 0)
    while length:
        position += length
        if position >= size:
            return None
        if _damage_at(file, position, size) is None:
            return position
        length = _batch_length(file.read(position, HEADER_BYTES), 0)
    position += ALIGNMENT
    while position + HEADER_BYTES <= size:
        window = file.read(position, min(CHUNK_BYTES, size - position))
        inside = window.find(MAGIC)
        while inside >= 0:
            if inside % ALIGNMENT == 0 and _damage_at(file, position + inside, size) is None:
                return position + inside
            inside = window.find(MAGIC, inside + 1)
        # Being aligned, no magic lies across the end of a window whose length is a multiple.
        position += max(ALIGNMENT, len(window) // ALIGNMENT * ALIGNMENT)
    return None

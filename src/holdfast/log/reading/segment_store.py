"""Opens the segments and indexes that a LogReader reads, by sequence. Uses os, through files.

A missing or damaged index is built again from its segment whenever that is noticed.
"""

import contextlib
from collections.abc import Callable

from holdfast.log.files.filesystem import ReadFile
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.index import SegmentIndex
from holdfast.log.reading.index_file import CorruptIndex, SealedIndex, decode
from holdfast.log.reading.scan import scan_segment
from holdfast.log.reading.segment_reader import Damage

OnDamage = Callable[[Damage], None]
"""A function that is called for each damage, in any thread."""


class SegmentStore:
    """Opens segments and loads their indexes."""

    def __init__(
        self, directory: DataDirectory, *, writes: bool, on_damage: OnDamage | None = None
    ) -> None:
        """Uses this directory. With `writes`, indexes that were built again are written to their
        files."""
        self._directory = directory
        self._writes = writes
        self.on_damage = on_damage

    def open_segment(self, sequence: int) -> ReadFile:
        """Opens a segment.

        Raises `FileNotFoundError` if retention has removed it, and other `OSError`s.
        """
        return self._directory.open_segment(sequence)

    def load_index(self, segment: Segment) -> SegmentIndex:
        """Loads or builds the index of a segment.

        Raises `FileNotFoundError` if retention has removed it, and other `OSError`s.
        """
        data = self._directory.read_index(segment.sequence)
        if data is not None:
            try:
                index: SealedIndex = decode(data)
                if index.head.log_bytes == segment.size_bytes:
                    # The segment's head may know more than was known when the index was written.
                    index.head = segment.head
                    return index
                if index.head.log_bytes == self.open_segment(segment.sequence).size():
                    # The file was rewritten, and the journal learns of it next.
                    return index
            except CorruptIndex:
                pass
        return self._scan(segment)

    def note_damage(self, segment: Segment, position: int, length: int, reason: str) -> None:
        """Keeps a copy of an unreadable batch, and reports it."""
        damage = Damage(segment.sequence, position, length, reason)
        if self._writes:
            quarantine(self._directory, damage)
        if self.on_damage is not None:
            self.on_damage(damage)

    def pause(self) -> None:
        """Lets other threads run: entering a function that is not compiled is enough."""

    def _scan(self, segment: Segment) -> SegmentIndex:
        file = self._directory.open_segment(segment.sequence)
        scan = scan_segment(
            file,
            segment.sequence,
            segment.head.start_offsets,
            segment.size_bytes,
            replica=self._directory.manifest.is_replica,
        )
        index = scan.index
        for partition, end in enumerate(segment.head.end_offsets):
            index.add_gap(partition, end)
        if self._writes and not scan.blind:
            # If this fails, on a full disk for example, the index is built again next time.
            with contextlib.suppress(OSError):
                self._directory.write_index(segment.sequence, index.encode(self.pause))
        return index


def quarantine(directory: DataDirectory, damage: Damage) -> str:
    """Keeps a copy of a damaged place. Returns its name, or the reason why there is none."""
    try:
        file = directory.open_segment(damage.segment)
        pieces = []
        position = damage.position
        end = damage.position + damage.length
        while position < end:
            piece = file.read(position, min(1 << 20, end - position))
            if not piece:
                break
            pieces.append(piece)
            position += len(piece)
        return directory.quarantine(damage.segment, damage.position, pieces)
    except OSError as error:
        return f"not copied: {error.strerror}"

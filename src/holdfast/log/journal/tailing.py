"""Following a journal that another process writes. A standby does so, so that a takeover need not
replay. The module uses os, through files.

The follower updates the journal's bookkeeping (offsets, segments, indexes) batch by batch, as if it
had appended them. It takes a write group as soon as all of it is in the file, before its writer may
promise it. That is safe because a node that takes the journal over makes its end durable first.

Everything else raises FollowError: damage, a hole, an end that was sealed before our position. The
follower is then useless, and the journal must be opened again.
"""

from collections.abc import Iterator
from typing import Final

from holdfast.log.batch import ATTRIBUTE_MORE, HEADER_BYTES, MAGIC, Batch
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import OpenedJournal
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.segment_reader import Damage, SegmentReader

CHUNK_BYTES: Final = 256 << 10
"""The bytes of one read at the end of the journal, where little is new."""
POLL_BYTES: Final = 8 << 20
"""The bytes after which one poll ends, at the next end of a group."""


class FollowError(Exception):
    """The journal does not continue the part that was followed; the text says why."""


class JournalFollower:
    """A reader of another process's journal, with the journal's bookkeeping up to its position."""

    def __init__(self, directory: DataDirectory, opened: OpenedJournal) -> None:
        """Follows from the end of `opened`, which was opened for reading only."""
        self.directory = directory
        self.journal: Journal = opened.journal
        self._reader: SegmentReader | None = None
        # The newest batch followed: its segment, its position there, and its header.
        self._newest: tuple[int, int, bytes] | None = None
        if self.journal.segments:
            self._reader = self._open(self.journal.segments[-1], opened.tag)
            self._newest = self._newest_in(self.journal.segments[-1], self._reader)

    def poll(self) -> Iterator[Batch]:
        """The new batches, entered into the journal as they are returned: complete groups, about
        POLL_BYTES at most.

        Raises `FollowError` if the journal does not continue, and `OSError`.
        """
        followed_bytes = 0
        for batch in self._batches(at_end=False):
            yield batch
            followed_bytes += batch.length
            if followed_bytes >= POLL_BYTES and not batch.attributes & ATTRIBUTE_MORE:
                return

    def finish(self) -> Iterator[Batch]:
        """All remaining batches up to the end; later bytes never count. Call it only when no
        process may promise records that are not there yet."""
        yield from self._batches(at_end=True)

    @property
    def position(self) -> int:
        """The position in the last segment, in bytes."""
        return 0 if self._reader is None else self._reader.position

    def switch(self, directory: DataDirectory) -> None:
        """Continues in another folder with the same journal: that of a newer epoch, or our own.

        Raises `FollowError` if the followed batches are not in it.
        """
        self.directory = directory
        if self.journal.segments:
            position = self.position
            segment = self.journal.segments[-1]
            try:
                reader = self._open(segment)
            except FileNotFoundError:
                raise FollowError(f"segment {segment.sequence:020d} is gone") from None
            if reader.file.size() < position:
                raise FollowError(
                    f"segment {segment.sequence:020d} ends at {reader.file.size()}, we have"
                    f" followed it to {position}"
                )
            self._require_newest()
            self._reader = reader

    def forget_removed(self) -> None:
        """Drops the segments that retention has removed, and indexes that are in files now."""
        start = self.directory.read_start()
        segments = self.journal.segments
        if start is not None and start[0] > self.journal.sequence:
            raise FollowError(f"what is before {start[0]} was removed, we have come to less")
        if start is not None:
            gone = sum(segment.sequence < start[0] for segment in segments[:-1])
            self.journal.remove_oldest(gone)
        for segment in segments[:-1]:
            if segment.index is not None:
                head = self.directory.read_index_head(segment.sequence)
                if head is not None and head.log_bytes == segment.size_bytes:
                    segment.index = None

    def refresh(self) -> None:
        """Takes over the changes of compaction to sealed segments."""
        for segment in self.journal.segments[:-1]:
            size_bytes = self.directory.open_segment(segment.sequence).size()
            if size_bytes != segment.size_bytes:
                head = self.directory.read_index_head(segment.sequence)
                if head is None or head.log_bytes != size_bytes:
                    raise FollowError(f"segment {segment.sequence:020d} and its index differ")
                self.journal.replace_segment(Segment(segment.sequence, head, None, size_bytes))

    def _newest_in(self, segment: Segment, reader: SegmentReader) -> tuple[int, int, bytes] | None:
        index = segment.index
        if index is None or not segment.head.records:
            return None
        position = index.positions[-1]
        return segment.sequence, position, reader.file.read(position, HEADER_BYTES)

    def _require_newest(self) -> None:
        """Checks that the newest followed batch is in this folder. A deposed holder and the new one
        may both have begun a segment of the same name. The epoch and the checksum in a batch's
        header distinguish them."""
        if self._newest is None:
            raise FollowError("nothing was followed that tells one journal from another")
        sequence, position, header = self._newest
        try:
            found = self.directory.open_segment(sequence).read(position, HEADER_BYTES)
        except FileNotFoundError:
            raise FollowError(f"segment {sequence:020d} is gone") from None
        if found != header:
            raise FollowError(f"segment {sequence:020d} at {position}: another batch than followed")

    def _open(self, segment: Segment, tag: int | None = None) -> SegmentReader:
        if self._reader is not None:
            tag = self._reader.tag
        reader = SegmentReader(self.directory, segment.sequence, tag)
        reader.position = segment.size_bytes
        return reader

    def _batches(self, *, at_end: bool) -> Iterator[Batch]:
        while True:
            before = self.journal.sequence
            # The check for a next segment comes before the read to the end: the segment before is
            # complete then. In the other order, batches written in between would be missed.
            is_newest = not self._next_exists()
            reader = self._reader
            if is_newest and not at_end:
                # More batches may arrive at any time, so bytes behind the complete ones mean
                # nothing yet. One round is enough, or a busy writer would keep us here.
                if reader is None or not _is_batch_there(reader):
                    return
                yield from self._follow(reader, reader.read_complete(CHUNK_BYTES))
                was_empty = before == reader.sequence
                if not was_empty or self.journal.sequence == before:
                    return
                continue  # only now is it known what the next one is called
            if reader is not None:
                yield from self._follow(reader, reader.read(newest=is_newest))
            if self.journal.sequence != before:
                continue  # the next segment has another name than was looked for
            if is_newest:
                return
            self._reader = self._open(self.journal.follow_segment())

    def _next_exists(self) -> bool:
        """True if there is a segment after the present one. Its name is the number of records
        before it."""
        segments = self.journal.segments
        sequence = self.journal.sequence
        if not segments:
            there = self.directory.segments()
            if there and there[0] != sequence:
                raise FollowError(f"the journal begins at {there[0]}, nothing is known before")
            return bool(there)
        if segments[-1].sequence == sequence:
            return False  # ours is still empty
        try:
            self.directory.open_segment(sequence)
        except FileNotFoundError:
            return False
        return True

    def _follow(
        self, reader: SegmentReader, read: Iterator[Batch | Damage] | Iterator[Batch]
    ) -> Iterator[Batch]:
        ends = self.journal.next_offset
        if reader.file.size() < reader.position:
            raise FollowError(f"segment {reader.sequence:020d} became shorter")
        for found in read:
            if isinstance(found, Damage):
                raise FollowError(str(found))
            if found.partition >= len(ends) or found.base_offset != ends[found.partition]:
                raise FollowError(
                    f"segment {reader.sequence:020d} at {reader.position - found.length}: offset"
                    f" {found.base_offset} of partition {found.partition}, which does not follow"
                )
            position = reader.position - found.length
            self.journal.follow(found, position)
            header = bytes(found.data[found.start : found.start + HEADER_BYTES])
            self._newest = (reader.sequence, position, header)
            yield found


def _is_batch_there(reader: SegmentReader) -> bool:
    """True if a batch begins at the position. The check is cheap, because most polls find nothing
    new."""
    return reader.file.read(reader.position, HEADER_BYTES)[: len(MAGIC)] == MAGIC

"""Writes the new data directory: its log, snapshot and watermarks."""

from collections.abc import Iterable
from typing import Final

from holdfast.io.conversion.definitions import FIRST_EPOCH
from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.log.batch import Batch
from holdfast.log.files.filesystem import TemporaryFile
from holdfast.log.files.layout import (
    JOURNAL,
    QUARANTINE,
    SNAPSHOTS,
    DataDirectory,
    snapshot_name,
)
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.record import Record
from holdfast.log.snapshot import SnapshotEncoder

GROUP_BYTES: Final = 8 << 20
"""The bytes that are written at a time. They bound the memory of a conversion, beside the state."""


class NewLog:
    """A new data directory without its manifest, which comes last."""

    def __init__(
        self, directory: DataDirectory, starts: list[int], sequence: int, segment_bytes: int
    ) -> None:
        """`starts`: the offset per partition at which the log begins. `sequence`: the number of
        records that were removed before."""
        self.directory = directory
        files = directory.files
        for folder in (JOURNAL, SNAPSHOTS, QUARANTINE):
            files.make_folder(folder)
        epochs = [(each, FIRST_EPOCH, start) for each, start in enumerate(starts) if start]
        self.journal = Journal(
            directory.manifest.partitions,
            segment_bytes,
            replicated=True,
            start_epochs=epochs,
        )
        self.journal.epochs = [FIRST_EPOCH] * directory.manifest.partitions
        if any(starts):
            self.journal.continue_at(starts, sequence)
            directory.write_start(sequence, starts, self.journal.start_epochs())
        self._group_bytes = min(GROUP_BYTES, segment_bytes // 4)
        self._writer = GroupWriter(directory, durable=False)

    def copy(self, batches: Iterable[Batch]) -> None:
        """Appends batches. Raises `ValueError` if records are missing between two of them."""
        for batch in batches:
            self.journal.append_batch(batch)
            self._write(self._group_bytes)
        self._write(0)

    def append(self, records: Iterable[Record]) -> list[Record]:
        """Appends records behind the log, and returns them with their offsets."""
        appended = []
        for record in records:
            self.journal.append(record)
            appended.append(record)
            self._write(self._group_bytes)
        self._write(0)
        return appended

    def finish(self, entries: Iterable[tuple[int, bytes]], now_us: int) -> None:
        """Writes a snapshot for everything, and makes all of it durable."""
        self._writer.close()
        journal, directory = self.journal, self.directory
        directory.sync_names()
        for partition, end in enumerate(journal.next_offset):
            journal.advance(partition, end)
        directory.write_watermarks(journal.checkpoint())
        encoder = SnapshotEncoder(journal.sequence, journal.next_offset, now_us)
        file = TemporaryFile(directory.files, snapshot_name(journal.sequence))
        for kind, data in entries:
            file.write(encoder.add(kind, data))
        file.write(encoder.finish())
        file.finish()

    def _write(self, bytes_min: int) -> None:
        """Writes what was appended, if it is as much."""
        if self.journal.pending_bytes < bytes_min:
            return
        group = self.journal.close_write_group()
        if group is not None:
            self._writer.write(group)
            self.journal.wrote(group)
            self.journal.commit(group)
            self._write_index(group)

    def _write_index(self, group: WriteGroup) -> None:
        """Writes the index of a segment that has ended, so the first start need not read it."""
        sealed = group.sealed
        if sealed is not None and isinstance(sealed.index, ActiveIndex):
            data = sealed.index.encode(lambda: None)
            self.directory.write_index(sealed.sequence, data)
            sealed.index = None

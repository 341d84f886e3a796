"""A journal that a test drives step by step over any file system."""

from collections.abc import Sequence
from pathlib import Path

from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.log.files.data_directory import create, read_manifest
from holdfast.log.files.filesystem import FileSystem
from holdfast.log.files.layout import DataDirectory, Manifest
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import OpenedJournal, open_journal, replay
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.partition import partition_of
from holdfast.log.reading.cursor import LogReader
from holdfast.log.record import MESSAGE, Record

TIME_US = 1_700_000_000_000_000


class LogBench:
    """Opens (or creates) what is on `files` and appends to it."""

    def __init__(
        self,
        files: FileSystem,
        partitions: int = 3,
        segment_bytes: int = 1 << 16,
        *,
        durable: bool = True,
    ) -> None:
        if "manifest.json" not in files.list(""):
            create(files, Manifest("n1", partitions, "2026-01-01T00:00:00Z"))
        self.directory = DataDirectory(files, read_manifest(files, Path("/data")))
        self.opened: OpenedJournal = open_journal(self.directory, segment_bytes)
        self.journal: Journal = self.opened.journal
        self.reader = LogReader(self.journal, self.opened.store)
        self.writer = GroupWriter(self.directory, durable=durable, allocate_bytes=1024)
        self.count = 0

    def append(
        self,
        topic: str,
        payload: bytes = b"",
        *,
        kind: int = MESSAGE,
        flags: int = 1,
        timestamp_us: int = 0,
    ) -> tuple[int, int]:
        """(partition, offset)"""
        raw = topic.encode()
        partition = partition_of(raw, self.journal.partitions)
        self.count += 1
        offset = self.journal.append(
            Record(
                partition,
                kind,
                flags=flags,
                timestamp_us=timestamp_us or TIME_US + self.count,
                topic=raw,
                client_id=b"client",
                payload=payload,
            )
        )
        return partition, offset

    def write(self) -> WriteGroup | None:
        """Take, write, commit what was appended; the index of a sealed segment too."""
        group = self.journal.close_write_group()
        if group is None:
            return None
        self.writer.write(group)
        self.journal.wrote(group)
        self.journal.commit(group)
        sealed = group.sealed
        if sealed is not None:
            index = sealed.index
            assert isinstance(index, ActiveIndex)
            self.directory.write_index(sealed.sequence, index.encode(self.opened.store.pause))
            sealed.index = None
        return group

    def remove_oldest(self, count: int) -> None:
        """As retention does."""
        removed = self.journal.remove_oldest(count)
        self.directory.write_start(
            self.journal.segments[0].sequence, self.journal.segments[0].start_offsets()
        )
        for segment in removed:
            self.directory.remove_segment(segment.sequence)
        self.directory.sync_journal()

    def records(self, *, state_only: bool = False) -> list[Record]:
        return list(replay(self.opened, state_only=state_only))


def contents(records: Sequence[Record]) -> list[tuple[int, int, bytes, bytes]]:
    return [(each.partition, each.offset, each.topic, each.payload) for each in records]

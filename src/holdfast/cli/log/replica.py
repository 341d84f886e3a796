"""Reads the journal of a cluster's replica from outside: valid and committed records.

Truncated records are recognised in the same way as by the node when it opens the directory. Only
records below its checkpoint of the high watermarks are shown, which a node writes about once a
second.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from holdfast.cli.log.records import Selection
from holdfast.log.batch import Batch
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.recovery import OpenedJournal, open_journal, replay
from holdfast.log.reading.cursor import LogReader
from holdfast.log.reading.segment_reader import Damage, SegmentReader
from holdfast.log.record import Record

UNCOMMITTED_BYTES_MAX: Final = 64 << 20
"""The most uncommitted bytes read per partition.

A leader without replicas stops accepting records long before that.
"""


class ReplicaJournal:
    """Reads the committed records of a replica, and those that become committed."""

    def __init__(self, directory: DataDirectory, on_damage: Callable[[Damage], None]) -> None:
        """`on_damage`: called once for each damaged range."""
        self._directory = directory
        self._on_damage = on_damage
        self._told: set[tuple[int, int]] = set()
        self._opened = self._open()
        self._shown = list(self._opened.journal.high_watermark)
        """Per partition the end of the records that `records` and `newest` return."""
        self._waiting: dict[int, list[Batch]] = {}
        """Per partition the batches that are not known to be committed."""

    def records(self) -> Iterator[Record]:
        """Yields all records in journal order. Raises `OSError`."""
        return replay(self._opened, limits=self._shown, state_only=False)

    def newest(self, count: int, selection: Selection) -> list[Record]:
        """Returns the newest chosen records, oldest first. Raises `OSError`.

        Segments are read from the last one back, until there are enough.
        """
        found: list[Record] = []
        for segment in reversed(self._opened.journal.segments):
            if len(found) >= count:
                break
            limits = [min(p) for p in zip(segment.end_offsets(), self._shown, strict=True)]
            here = [
                record
                for record in replay(
                    self._opened, segment.start_offsets(), limits=limits, state_only=False
                )
                if selection.has(record)
            ]
            found = here[max(0, len(here) - (count - len(found))) :] + found
        return found

    def reader(self) -> SegmentReader | None:
        """Returns the reader of later records, or None without segments.

        Raises `FileNotFoundError` if retention removed the last segment.
        """
        journal = self._opened.journal
        if not journal.segments:
            return None
        last = journal.segments[-1]
        reader = SegmentReader(self._directory, last.sequence)
        reader.position = last.size_bytes
        log = LogReader(journal, self._opened.store)
        for partition, end in enumerate(journal.next_offset):
            shown = self._shown[partition]
            batches = log.read_batches(partition, shown, end, UNCOMMITTED_BYTES_MAX)
            self._waiting[partition] = [Batch(data) for data in batches]
        return reader

    def add(self, batch: Batch) -> None:
        """Adds the next batch of the files. It replaces batches from its base offset on."""
        waiting = self._waiting.get(batch.partition, [])
        if batch.count:
            kept = [each for each in waiting if each.base_offset < batch.base_offset]
            self._waiting[batch.partition] = [*kept, batch]
        else:
            self._waiting.pop(batch.partition, None)

    def committed(self, watermarks: Sequence[int]) -> Iterator[Record]:
        """Yields the added records that are committed and were not yielded before.

        `watermarks`: read before the last batch was added. Later ones could commit a record that
        replaced an added one and was not read yet.
        """
        for partition, waiting in self._waiting.items():
            end = watermarks[partition]
            start = self._shown[partition]
            for batch in waiting:
                for record in batch.records():
                    if start <= record.offset < end:
                        yield record
            self._waiting[partition] = [each for each in waiting if each.end_offset > end]
            self._shown[partition] = max(start, end)

    def _open(self) -> OpenedJournal:
        opened = open_journal(self._directory, writes=False, on_damage=self._tell)
        for damage in opened.damage:
            self._tell(damage)
        return opened

    def _tell(self, damage: Damage) -> None:
        place = (damage.segment, damage.position)
        if place not in self._told:
            self._told.add(place)
            self._on_damage(damage)

"""An opened data directory: recovers the journal and replays the node's state."""

import errno
import logging
import os
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from holdfast.log.files.data_directory import DataDirectoryError, create_or_open
from holdfast.log.files.filesystem import Lock
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.compaction import (
    ForgottenBatches,
    SegmentRewrite,
    compact_segment,
    is_worthwhile,
)
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import OpenedJournal, open_journal, replay
from holdfast.log.journal.retention import RetentionPolicy, count_superseded, messages_beyond
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.cursor import LogReader
from holdfast.log.reading.index import SegmentIndex
from holdfast.log.reading.segment_reader import Damage
from holdfast.log.snapshot import CorruptSnapshot, Snapshot
from holdfast.node.state.recovery import Recovery

logger = logging.getLogger("holdfast")

SNAPSHOTS_KEPT = 2
"""The number of snapshots kept. If the newest is unreadable, the one before it serves.

The log keeps the records that the older one needs.
"""


class StorageError(Exception):
    """The data directory cannot be used. The text says why and what to do."""


def now_text() -> str:
    """Returns the current time in ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def report_damage(damage: Damage) -> None:
    logger.error(
        "journal_damaged segment=%020d position=%d bytes=%d error=%r kept_in=quarantine",
        damage.segment,
        damage.position,
        damage.length,
        damage.reason,
    )


def usable_snapshot(directory: DataDirectory, sequence: int) -> Snapshot | None:
    """Reads a snapshot. If it is damaged or unreadable, logs that and returns None."""
    try:
        return whole_snapshot(directory, sequence)
    except FileNotFoundError:
        # A newer snapshot has replaced it.
        return None
    except OSError as error:
        logger.error("snapshot_unreadable sequence=%020d error=%r", sequence, str(error))
        return None


def whole_snapshot(directory: DataDirectory, sequence: int) -> Snapshot | None:
    """Reads a snapshot. If it is damaged, logs that and returns None. Raises `OSError`."""
    file = directory.open_snapshot(sequence)
    try:
        snapshot = Snapshot(file.read, file.size())
        snapshot.check()
    except CorruptSnapshot as error:
        logger.error("snapshot_unreadable sequence=%020d error=%r", sequence, str(error))
        return None
    return snapshot


class Storage:
    """The locked data directory of a running node, with its journal and readers."""

    def __init__(
        self, path: Path, directory: DataDirectory, lock: Lock, opened: OpenedJournal
    ) -> None:
        """`lock`: released by `close`."""
        self._path = path
        self.directory = directory
        self.opened = opened
        self.journal: Journal = opened.journal
        self.reader = LogReader(opened.journal, opened.store, threading.Lock())
        # The sequences of the snapshots that recovery relies on, oldest first.
        self.snapshots: list[int] = []
        # The newest snapshot. It is read at opening, because it proves what is committed.
        self._snapshot: Snapshot | None = None
        # Per partition, the first offset that was replayed over the snapshot.
        self.replayed_from: list[int] = [0] * opened.journal.partitions
        self._lock = lock

    @classmethod
    def open(
        cls, path: Path, node_id: str, partitions: int, segment_bytes: int, incarnation: str = ""
    ) -> "Storage":
        """Locks, opens and repairs a data directory. Raises `StorageError` if that fails.

        `incarnation`: for a cluster node's new directory; "" for a node without a cluster.
        """
        try:
            directory, lock = create_or_open(path, node_id, partitions, now_text(), incarnation)
        except DataDirectoryError as error:
            raise StorageError(str(error)) from error
        try:
            return cls.recover(path, directory, lock, segment_bytes)
        except OSError as error:
            lock.release()
            raise StorageError(f"{path}: {error}") from error

    @classmethod
    def recover(
        cls, path: Path, directory: DataDirectory, lock: Lock, segment_bytes: int
    ) -> "Storage":
        """Opens and repairs a locked directory. Raises `OSError`."""
        started = time.monotonic()
        tag = secrets.randbits(32)
        opened = open_journal(directory, segment_bytes, on_damage=report_damage, tag=tag)
        for damage in opened.damage:
            report_damage(damage)
        if opened.truncated is not None:
            torn = opened.truncated
            logger.warning(
                "journal_tail_truncated segment=%020d position=%d bytes=%d error=%r",
                torn.segment,
                torn.position,
                torn.length,
                torn.reason,
            )
        logger.info(
            "journal_opened segments=%d bytes=%d records=%d scanned_bytes=%d rewritten_bytes=%d"
            " seconds=%.3f",
            len(opened.journal.segments),
            opened.journal.size_bytes(),
            opened.journal.sequence,
            opened.scanned_bytes,
            opened.rewritten_bytes,
            time.monotonic() - started,
        )
        storage = cls(path, directory, lock, opened)
        storage._advance_to_snapshot()
        return storage

    def _advance_to_snapshot(self) -> None:
        """Raises the high watermarks to the newest snapshot.

        A snapshot contains only committed records, and the checkpoint of the watermarks may be
        older.
        """
        snapshot = self._snapshot = self._newest_snapshot()
        if snapshot is not None:
            for partition, offset in enumerate(snapshot.offsets):
                # A snapshot that is ahead of the log was fed. It says nothing of these records.
                if offset <= self.journal.next_offset[partition]:
                    self.journal.advance(partition, offset)

    def replay_into(self, recovery: Recovery) -> None:
        """Applies the newest snapshot and the records after it that are known to be committed:
        those below the high watermarks."""
        started = time.monotonic()
        state = recovery.state
        snapshot, self._snapshot = self._snapshot, None
        offsets = None
        if snapshot is not None:
            for kind, data in snapshot.entries():
                recovery.apply_snapshot_entry(kind, data)
            offsets = snapshot.offsets
            self.replayed_from = offsets
        for record in replay(self.opened, offsets, limits=self.journal.high_watermark):
            recovery.apply(record)
        logger.info(
            "state_recovered sessions=%d retained=%d snapshot=%s seconds=%.3f",
            len(state.sessions) - len(state.queues),
            len(state.retained),
            "none" if snapshot is None else f"{snapshot.sequence:020d}",
            time.monotonic() - started,
        )

    def lacking(self) -> list[int]:
        """Returns the partitions whose log begins behind the snapshot.

        The state derived from the records in between is unknown. Call it after `replay_into`.
        """
        pairs = zip(self.replayed_from, self.journal.start_offsets, strict=True)
        return [partition for partition, (known, start) in enumerate(pairs) if known < start]

    def unstored(self) -> dict[int, int]:
        """Returns the partitions whose log ends below the state here, because they were fed, with
        the first record that the state lacks. Call it after `replay_into`."""
        ends = self.journal.next_offset
        return {
            partition: known
            for partition, known in enumerate(self.replayed_from)
            if known > ends[partition] and partition not in self.opened.damaged
        }

    def _newest_snapshot(self) -> Snapshot | None:
        found: Snapshot | None = None
        for sequence in reversed(self.directory.snapshots()):
            snapshot = usable_snapshot(self.directory, sequence)
            if snapshot is None:
                continue
            self.snapshots.insert(0, sequence)
            if found is None:
                found = snapshot
        return found

    def total_bytes(self) -> int:
        """Returns the size in bytes of the file system with the data directory."""
        usage = os.statvfs(self._path)
        return usage.f_blocks * usage.f_frsize

    def superseded(self, policy: RetentionPolicy) -> int:
        """Counts the oldest segments whose messages all have `per_topic_last` newer ones.

        Newer messages count per topic. The function reads indexes, so it must not run in the loop.
        """
        if policy.per_topic_last is None:
            return 0
        newest_first = reversed(list(self.journal.segments))
        counts = [self._message_counts(segment) for segment in newest_first]
        return count_superseded(counts, policy.per_topic_last)

    def compact_next(self, settled: int, per_topic_last: int) -> tuple[Segment, Segment] | None:
        """Compacts the oldest worthwhile segment among the first `settled` ones.

        Compaction empties messages beyond `per_topic_last`. Returns (old, new) for exchange in the
        journal, or None. Runs in the reader's thread.
        """
        segments = list(self.journal.segments)
        counts = [self._message_counts(segment) for segment in reversed(segments)]
        beyond = list(messages_beyond(counts, per_topic_last))
        counts.reverse()
        beyond.reverse()
        for number, segment in enumerate(segments[: min(settled, len(segments) - 1)]):
            if segment.index is not None or segment.has_void():
                continue
            if not is_worthwhile(counts[number], beyond[number]):
                continue
            if beyond[number]:
                compacted = compact_segment(self.directory, segment, beyond[number])
                self.reader.forget_segment(segment.sequence)
                if compacted is not None:
                    return segment, compacted
        return None

    def begin_reclaiming(self, segment: Segment, reserve_bytes: int) -> SegmentRewrite | None:
        """Begins to rewrite a sealed segment without the batches of forgotten partitions. Returns
        None if they are less than half of it, if offsets are missing in it or before it, or if the
        disk may not have all that follows it.

        Blocks, and raises `OSError`, also when the disk has no room for the rest of the segment and
        half of `reserve_bytes`. The marks that `Segment.note_forgotten` was given last must be on
        the disk.
        """
        is_missing = segment.head.missing or segment.gaps()
        if is_missing or self.directory.read_checkpoint().segment <= segment.sequence:
            # Counter-example: a crash leaves no later segment. Then this one seems cut off.
            return None
        index = self.opened.store.load_index(segment)
        dead = ForgottenBatches(index, segment.marks)
        segment.dead_bytes = dead.bytes_freed
        if not segment.is_mostly_dead():
            return None
        needed_bytes = segment.size_bytes - segment.dead_bytes + reserve_bytes // 2
        if self.directory.files.free_bytes() < needed_bytes:
            raise OSError(errno.ENOSPC, "no room to rewrite a segment of forgotten partitions")
        return SegmentRewrite(self.directory, segment, dead.rewrite)

    def finish_reclaiming(self, rewrite: SegmentRewrite) -> Segment:
        """Puts the new file in place. Runs in the reader's thread."""
        try:
            return rewrite.finish()
        finally:
            self.reader.forget_segment(rewrite.sequence)

    def _message_counts(self, segment: Segment) -> dict[bytes, int]:
        """Counts a segment's committed messages per topic."""
        index = self._index(segment)
        journal = self.journal
        ends = [
            min(pair) for pair in zip(segment.end_offsets(), journal.high_watermark, strict=True)
        ]
        return index.message_counts(journal.start_offsets, ends)

    def _index(self, segment: Segment) -> SegmentIndex:
        index = segment.index
        return self.opened.store.load_index(segment) if index is None else index

    def remove_segments(self, removed: list[Segment]) -> None:
        """Removes the files of segments that the journal has dropped.

        The new start is made durable first. In the opposite order, a crash would leave a log with
        missing segments.
        """
        oldest = self.journal.segments[0]
        # The segment's own epochs: a later segment that overrides them contains its own.
        self.directory.write_start(
            oldest.sequence, oldest.head.start_offsets, self.journal.start_epochs()
        )
        for segment in removed:
            self.directory.remove_segment(segment.sequence)
            self.reader.forget_segment(segment.sequence)
        self.directory.sync_journal()

    def close(self) -> None:
        self._lock.release()

"""A standby's warm state: the followed journal and the state rebuilt from it.

The state grows with the journal, so a takeover has only the last few batches to apply. One thread
uses this module.

Invariant: the state is that which a start of the same directory rebuilds. Only records of the
journal and a snapshot's entries change it, each record once.
"""

import logging
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from holdfast.io.disk.storage import (
    Storage,
    report_damage,
    usable_snapshot,
    whole_snapshot,
)
from holdfast.log.batch import ATTRIBUTE_STATE, Batch
from holdfast.log.files.data_directory import open_epoch
from holdfast.log.files.filesystem import FileSystem, Lock
from holdfast.log.files.layout import DataDirectory, segment_name
from holdfast.log.journal.epoch_folders import Epoch
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import (
    OpenedJournal,
    open_journal,
    replay,
    write_again,
)
from holdfast.log.journal.tailing import FollowError, JournalFollower
from holdfast.log.reading.segment_store import SegmentStore, quarantine
from holdfast.log.record import CONTROL
from holdfast.node.config import NodeConfig
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState

logger = logging.getLogger("holdfast")

TIDY_INTERVAL_S = 2.0
"""The interval in seconds of checks for removed segments and new snapshots."""


class Standby:
    """The state of one directory, following one epoch at a time.

    After `load` or `follow` has raised, either may be called again.
    """

    def __init__(
        self, root: FileSystem, path: Path, segment_bytes: int, config: NodeConfig
    ) -> None:
        """`config`: of the node whose directory it is."""
        self._root = root
        self._path = path
        self._segment_bytes = segment_bytes
        self._config = config
        self.epoch = Epoch(0)
        self.records_followed = 0
        self._images: ReplicatedState | None = None
        self._follower: JournalFollower | None = None
        # Per partition, the first record that the loaded snapshot does not contain.
        self._covered: list[int] = []
        # The partitions that lack records between the snapshot and the journal.
        self._lacking: list[int] = []
        # Readable snapshots, oldest first.
        self._snapshots: list[int] = []
        self._tidied_at = 0.0

    @property
    def is_loaded(self) -> bool:
        return self._follower is not None

    def load(self, epoch: Epoch) -> None:
        """Rebuilds everything from an epoch's files. Does nothing while they are those of a single
        broker, which the next takeover adopts.

        Raises `OSError`, and `FileNotFoundError` if retention removed a file meanwhile. The caller
        then tries again.
        """
        directory = open_epoch(self._root, self._path, epoch)
        if directory.manifest.is_replica:
            self._load(epoch, directory)

    def _load(self, epoch: Epoch, directory: DataDirectory) -> OpenedJournal:
        started = time.monotonic()
        self._follower = None
        opened = open_journal(
            directory,
            self._segment_bytes,
            writes=False,
            on_damage=report_damage,
            tag=secrets.randbits(32),
        )
        for damage in opened.damage:
            report_damage(damage)
        journal = opened.journal
        assert journal.replicated, "the log of a single broker"
        for partition, end in enumerate(journal.next_offset):
            if partition not in journal.damaged:
                # The only node of a cluster commits all that it has.
                journal.advance(partition, end)
        images = ReplicatedState(RecordedState(self._config, journal))
        self._settle(images)
        self._snapshots = []
        offsets = None
        failure: OSError | None = None
        first = journal.segments[0].sequence if journal.segments else 0
        for sequence in reversed(directory.snapshots()):
            try:
                snapshot = whole_snapshot(directory, sequence)
            except OSError as error:
                failure = error
                continue
            if snapshot is None:
                continue
            self._snapshots.insert(0, sequence)
            if offsets is None:
                for kind, data in snapshot.entries():
                    images.apply_snapshot_entry(kind, data)
                offsets = snapshot.offsets
        if failure is not None and max(self._snapshots, default=0) < first:
            # The journal begins behind the newest readable snapshot, so records would be missing. A
            # later attempt may read the newer snapshot.
            raise failure
        for record in replay(opened, offsets):
            images.apply(record)
        self._covered = offsets or [0] * journal.partitions
        pairs = zip(self._covered, journal.start_offsets, strict=True)
        self._lacking = [
            partition for partition, (known, start) in enumerate(pairs) if known < start
        ]
        self.epoch = epoch
        self._images = images
        self._follower = JournalFollower(directory, opened)
        logger.info(
            "standby_loaded epoch=%d segments=%d bytes=%d records=%d seconds=%.3f",
            epoch.number,
            len(journal.segments),
            journal.size_bytes(),
            journal.sequence,
            time.monotonic() - started,
        )
        return opened

    def follow(self, epoch: Epoch) -> None:
        """Applies a bounded number of new records. `epoch`: the newest valid one.

        Raises `FollowError` or `OSError`, after which the caller must load again.
        """
        follower = self._follower
        assert follower is not None
        if epoch.number != self.epoch.number:
            follower.switch(open_epoch(self._root, self._path, epoch))
            self.epoch = epoch
        self._apply(follower.poll())
        assert self._images is not None
        self._settle(self._images)
        now = time.monotonic()
        if now - self._tidied_at > TIDY_INTERVAL_S:
            self._tidied_at = now
            follower.forget_removed()
            self._check_snapshots(follower.directory)

    def _settle(self, images: ReplicatedState) -> None:
        """Continues at the present time, and at the end of the journal so far."""
        state = images.state
        state.now = time.monotonic()
        state.wall_us = time.time_ns() // 1000
        state.delivered[:] = state.journal.high_watermark
        # The holder has logged them.
        state.pop_effects()

    def _check_snapshots(self, directory: DataDirectory) -> None:
        present = directory.snapshots()
        self._snapshots = [sequence for sequence in self._snapshots if sequence in present]
        for sequence in present:
            newest = self._snapshots[-1] if self._snapshots else -1
            if sequence > newest and usable_snapshot(directory, sequence) is not None:
                self._snapshots.append(sequence)

    def _apply(self, batches: Iterable[Batch]) -> None:
        """Applies records. Raises `FollowError` if compaction has emptied some before.

        Counter-example: a standby that was held up reads a segment that the holder has compacted
        meanwhile. The newest retained message of a topic is in the holder's snapshot alone if later
        messages of the topic were not retained, so the standby would keep an older one.
        """
        images, covered = self._images, self._covered
        assert images is not None
        for batch in batches:
            self.records_followed += batch.count
            if batch.attributes & ATTRIBUTE_STATE:
                for record in batch.records():
                    if record.kind == CONTROL and not record.topic and not record.payload:
                        # The follower has passed the emptied records, so it would go on behind
                        # them if the next load fails.
                        self._follower = None
                        raise FollowError("compaction has emptied records that were not followed")
                    if record.offset >= covered[record.partition]:
                        images.apply(record)

    def take_over(self, old: Epoch, directory: DataDirectory, lock: Lock) -> Storage:
        """Applies the rest of the old epoch's journal, which is linked into this node's folder.

        Nothing is appended to it any more. Raises `OSError` if it cannot be read.
        """
        follower = self._follower
        if follower is not None:
            try:
                follower.switch(directory)
                self._apply(follower.finish())
                follower.forget_removed()
                follower.refresh()
            except FollowError as error:
                logger.warning("standby_reloads reason=%r", str(error))
                follower = None
        if follower is None:
            opened = self._load(old, directory)
            for damage in opened.damage:
                quarantine(directory, damage)
            follower = self._follower
            assert follower is not None
            self._apply(follower.finish())
        journal = follower.journal
        self._drop_empty_segment(journal, directory)
        if journal.segments:
            # The old holder's last sync may have failed. The kernel then counts the pages as clean
            # and never writes them again, so they are written again here.
            write_again(directory, journal.segments[-1], self._synced_bytes(journal, directory))
        # What is here counts as committed from the seal on.
        directory.write_watermarks(journal.checkpoint())
        opened = OpenedJournal(
            journal, SegmentStore(directory, writes=True, on_damage=report_damage)
        )
        storage = Storage(self._path, directory, lock, opened)
        storage.snapshots = [
            sequence for sequence in self._snapshots if sequence in directory.snapshots()
        ]
        storage.replayed_from = [
            0 if partition in self._lacking else start
            for partition, start in enumerate(journal.start_offsets)
        ]
        return storage

    def _synced_bytes(self, journal: Journal, directory: DataDirectory) -> int:
        """The bytes of the last segment that the old holder is known to have synced."""
        last = journal.segments[-1]
        checkpoint = directory.read_checkpoint()
        return checkpoint.position if checkpoint.segment == last.sequence else 0

    def _drop_empty_segment(self, journal: Journal, directory: DataDirectory) -> None:
        """Removes the segment that the old holder began and left empty.

        This node's first segment would have the same name.
        """
        if journal.segments and not journal.segments[-1].head.records:
            directory.files.remove(segment_name(journal.segments[-1].sequence))
            directory.sync_journal()
            journal.segments.pop()

    def forget(self) -> None:
        """Drops the state after a failed takeover, which may have changed part of it."""
        self._follower = None

    def finish(self) -> ReplicatedState:
        """Returns the state after the last record, ready to serve."""
        images = self._images
        assert images is not None
        self._settle(images)
        journal = images.state.journal
        assert journal.damaged or journal.high_watermark == journal.next_offset
        return images

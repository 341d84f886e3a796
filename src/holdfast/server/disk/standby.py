"""A standby's warm state: the followed journal and the node's state rebuilt from it.

The state grows with the journal, so a takeover has only the last few batches to apply. One thread
uses this module.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.broker.node import Node
from holdfast.broker.recovery.node_recovery import NodeRecovery
from holdfast.server.disk.storage import Storage, report_damage, usable_snapshot, whole_snapshot
from holdfast.storage.batch import ATTRIBUTE_STATE, Batch
from holdfast.storage.files.filesystem import FileSystem, Lock
from holdfast.storage.files.layout import DataDirectory, Manifest, segment_name
from holdfast.storage.journal.epoch_folders import Epoch
from holdfast.storage.journal.journal import Journal
from holdfast.storage.journal.recovery import (
    OpenedJournal,
    last_group_start,
    open_journal,
    replay,
    write_again,
)
from holdfast.storage.journal.tailing import FollowError, JournalFollower
from holdfast.storage.reading.segment_store import SegmentStore, quarantine
from holdfast.storage.record import CONTROL

logger = logging.getLogger("holdfast")

SETTLE_SESSIONS = 1000
"""The sessions made ready between two polls of the journal: some milliseconds of work."""
TIDY_INTERVAL_S = 2.0
"""The interval in seconds of checks for removed segments and new snapshots."""


class Standby:
    """The state of one node, following one epoch at a time.

    After `load` or `follow` has raised, either may be called again.
    """

    def __init__(
        self,
        root: FileSystem,
        path: Path,
        manifest: Manifest,
        segment_bytes: int,
        new_node: Callable[[Journal], Node],
    ) -> None:
        """`new_node`: makes a configured node over a journal, with its clock set."""
        self._root = root
        self._path = path
        self._manifest = manifest
        self._segment_bytes = segment_bytes
        self._new_node = new_node
        self.epoch = Epoch(0)
        self.node: Node | None = None
        self.records_followed = 0
        self._recovery: NodeRecovery | None = None
        self._follower: JournalFollower | None = None
        # Readable snapshots, oldest first.
        self._snapshots: list[int] = []
        self._tidied_at = 0.0

    @property
    def is_loaded(self) -> bool:
        return self._follower is not None

    def load(self, epoch: Epoch) -> None:
        """Rebuild everything from an epoch's files.

        Raises `OSError`, and `FileNotFoundError` if retention removed a file meanwhile. The caller
        then tries again.
        """
        self._load(epoch, DataDirectory(epoch.files(self._root), self._manifest, epoch))

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
        node = self._new_node(opened.journal)
        recovery = NodeRecovery(node.state)
        self._snapshots = []
        offsets = None
        failure: OSError | None = None
        first = opened.journal.segments[0].sequence if opened.journal.segments else 0
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
                    recovery.apply_snapshot_entry(kind, data)
                offsets = snapshot.offsets
        if failure is not None and max(self._snapshots, default=0) < first:
            # The journal begins behind the newest readable snapshot, so records would be missing. A
            # later attempt may read the newer snapshot.
            raise failure
        if self._manifest.former:
            recovery.note_put_back(self._manifest.former[-1][1], offsets)
        for record in replay(opened, offsets):
            recovery.apply(record)
        self.epoch = epoch
        self.node = node
        self._recovery = recovery
        self._follower = JournalFollower(directory, opened)
        logger.info(
            "standby_loaded epoch=%d segments=%d bytes=%d records=%d seconds=%.3f",
            epoch.number,
            len(opened.journal.segments),
            opened.journal.size_bytes(),
            opened.journal.sequence,
            time.monotonic() - started,
        )
        return opened

    def follow(self, epoch: Epoch) -> None:
        """Apply a bounded number of new records. `epoch`: the newest valid one.

        Raises `FollowError` or `OSError`, after which the caller must load again.
        """
        follower = self._follower
        assert follower is not None
        if epoch.number != self.epoch.number:
            follower.switch(DataDirectory(epoch.files(self._root), self._manifest, epoch))
            self.epoch = epoch
        self._apply(follower.poll())
        self._settle()
        now = time.monotonic()
        if now - self._tidied_at > TIDY_INTERVAL_S:
            self._tidied_at = now
            follower.forget_removed()
            self._check_snapshots(follower.directory)

    def _settle(self) -> None:
        node = self.node
        recovery = self._recovery
        if node is not None and recovery is not None and recovery.touched:
            node.tick(time.monotonic(), time.time_ns() // 1000)
            # The same values that a takeover would set.
            node.state.delivered[:] = node.state.journal.high_watermark
            recovery.precompute(SETTLE_SESSIONS)

    def _check_snapshots(self, directory: DataDirectory) -> None:
        present = directory.snapshots()
        self._snapshots = [sequence for sequence in self._snapshots if sequence in present]
        for sequence in present:
            newest = self._snapshots[-1] if self._snapshots else -1
            if sequence > newest and usable_snapshot(directory, sequence) is not None:
                self._snapshots.append(sequence)

    def _apply(self, batches: Iterable[Batch]) -> None:
        """Apply records. Raises `FollowError` if compaction has emptied some before.

        Counter-example: a standby that was held up reads a segment that the holder has compacted
        meanwhile. The newest retained message of a topic is in the holder's snapshot alone if later
        messages of the topic were not retained, so the standby would keep an older one.
        """
        recovery = self._recovery
        assert recovery is not None
        for batch in batches:
            self.records_followed += batch.count
            if batch.attributes & ATTRIBUTE_STATE:
                for record in batch.records():
                    if record.kind == CONTROL and not record.topic and not record.payload:
                        # The follower has passed the emptied records, so it would go on behind
                        # them if the next load fails.
                        self._follower = None
                        raise FollowError("compaction has emptied records that were not followed")
                    recovery.apply(record)

    def take_over(self, old: Epoch, directory: DataDirectory, lock: Lock) -> Storage:
        """Apply the rest of the old epoch's journal, which is linked into this node's folder.

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
            last = journal.segments[-1]
            write_again(directory, last, last_group_start(directory, last, journal.tag))
        opened = OpenedJournal(
            journal, SegmentStore(directory, writes=True, on_damage=report_damage)
        )
        storage = Storage(self._path, directory, lock, opened)
        storage.snapshots = [
            sequence for sequence in self._snapshots if sequence in directory.snapshots()
        ]
        return storage

    def _drop_empty_segment(self, journal: Journal, directory: DataDirectory) -> None:
        """Remove the segment that the old holder began and left empty.

        This node's first segment would have the same name.
        """
        if journal.segments and not journal.segments[-1].head.records:
            directory.files.remove(segment_name(journal.segments[-1].sequence))
            directory.sync_journal()
            journal.segments.pop()

    def forget(self) -> None:
        """Drop the state after a failed takeover, which may have changed part of it."""
        self._follower = None

    def finish(self) -> Node:
        """Return the node, ready to serve."""
        node = self.node
        recovery = self._recovery
        assert node is not None
        assert recovery is not None
        node.tick(time.monotonic(), time.time_ns() // 1000)
        node.state.delivered[:] = node.state.journal.high_watermark
        recovery.finish()
        return node

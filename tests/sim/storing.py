"""A process' disk: the journal's groups, the metadata's writes, watermarks, snapshots, retention;
what `server.disk.journal_writer`, `server.disk.raft_writer` and `server.maintenance` do, without
their threads.

While the host's disk hangs nothing of it goes on; what was begun is done when it is well again.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.broker.effects import Effect
from holdfast.broker.recovery.retention_pins import pins_of
from holdfast.cluster.failure.disk_watch import DiskWatch
from holdfast.cluster.raft.node import Write
from holdfast.server.disk.journal_writer import SPACE_POLL_S, DiskFullError, GroupWriter
from holdfast.server.disk.storage import SNAPSHOTS_KEPT
from holdfast.storage.files.filesystem import TemporaryFile
from holdfast.storage.files.layout import snapshot_name
from holdfast.storage.journal.active_index import ActiveIndex
from holdfast.storage.journal.retention import RetentionPolicy, SegmentSummary, decide
from holdfast.storage.journal.segment import Segment, WriteGroup
from holdfast.storage.journal.watermarks import Checkpoint
from holdfast.storage.snapshot import SnapshotEncoder

if TYPE_CHECKING:
    from tests.sim.process import Process

WATERMARKS_S: Final = 1.0
SPACE_S: Final = 0.5
HANG_POLL_S: Final = 0.02
FINISH_S: Final = 0.01
"""Until a snapshot is looked at again."""


class ProcessDisk:
    def __init__(self, process: "Process") -> None:
        cores = process.cores
        self._process = process
        self._host = process.host
        self._settings = process.host.world.settings
        self._state = cores.state
        self._member = cores.member
        self._images = cores.images
        self._storage = cores.storage
        self._directory = cores.directory
        self._journal = cores.journal
        self._raft_files = cores.raft_files
        self._writer = GroupWriter(
            cores.directory, durable=True, allocate_bytes=self._settings.allocate_bytes
        )
        self.watch = DiskWatch(self._settings.disk_stall_s)
        # The journal's group and the metadata's writes that are under way.
        self.group: WriteGroup | None = None
        self.raft_writes: deque[Write] = deque()
        # Reads of what is not written yet.
        self.deferred: list[Effect] = []
        self._is_full = False
        self._is_metadata_full = False
        self._watermarks_at = 0.0
        self._written_watermarks: Checkpoint | None = None
        self._unfinished_snapshot: tuple[TemporaryFile, int, dict[int, int]] | None = None

    def begin(self) -> None:
        """What is done now and then."""
        schedule = self._process.schedule
        schedule.after(SPACE_S, self._watch_space)
        schedule.after(self._snapshot_s(), self._maybe_snapshot)

    def handle_timers(self, now: float) -> None:
        watch = self.watch
        if self._is_full:
            watch.journal.waits_for_space(now)
        if self._is_metadata_full:
            watch.metadata.waits_for_space(now)
        if watch.handle_timers(now):
            self._tell_disk()

    def _tell_disk(self) -> None:
        is_stalled = self.watch.is_stalled
        text = "disk is stalled" if is_stalled else "disk goes on"
        self._process.schedule.note(self._host.name, text)
        self._member.handle_disk(is_stalled, self._state.now)
        self._process.redirect()

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """When the disk answers."""
        self._process.later(delay_s, lambda: self._when_well(work))

    def _when_well(self, work: Callable[[], None]) -> None:
        if self._host.hangs_for_s():
            self.later(HANG_POLL_S, work)
        else:
            work()

    def break_writes(self) -> None:
        """The process ends: what was under way may be done, or half done. Raises Crash or
        DiskFullError."""
        chance = self._host.chance
        if self.group is not None and chance.random() < 0.7:
            self._writer.write(self.group)
        if self.raft_writes and chance.random() < 0.7:
            self._raft_files.write(self.raft_writes[0])

    # The journal

    def write_journal(self) -> None:
        if self.group is not None:
            return
        group = self._journal.close_write_group()
        if group is None:
            return
        self.group = group
        self.watch.journal.began(self._state.now)
        self._member.handle_taken(group, self._state.now)
        self.later(self._host.sync_s(), self._write_group)

    def _write_group(self) -> None:
        group = self.group
        assert group is not None
        try:
            self._writer.write(group)
        except DiskFullError:
            if not self._is_full:
                self._is_full = True
                self._process.touch()
                self._state.disk_full = True
                self._member.handle_space(True, self._state.now)
                self._process.schedule.note(self._host.name, "disk full")
            self.later(SPACE_POLL_S, self._write_group)
            return
        self._is_full = False
        self._host.mirror.wrote(group)
        self._process.touch()
        self.group = None
        self._journal.wrote(group)
        self._journal.commit(group)
        self._state.release_committed()
        self._state.resume_inputs()
        self._state.effects.extend(self.deferred)
        self.deferred.clear()
        if self.watch.ended(self.watch.journal, self._state.now):
            self._tell_disk()
        self._member.handle_durable(self._state.now)
        if group.sealed is not None:
            self._write_index(group.sealed)

    def _write_index(self, segment: Segment) -> None:
        index = segment.index
        if not isinstance(index, ActiveIndex):
            return
        try:
            self._directory.write_index(segment.sequence, index.encode(lambda: None))
        except OSError:
            return
        segment.index = None

    def _watch_space(self) -> None:
        if self._process.is_over:
            return
        self._process.schedule.after(SPACE_S, self._watch_space)
        if self._state.disk_full and not self._is_full and self._host.disk.free_bytes() > 0:
            self._process.touch()
            self._state.disk_full = False
            self._member.handle_space(False, self._state.now)

    # The metadata

    def write_raft(self, write: Write) -> None:
        self.raft_writes.append(write)
        self.watch.metadata.began(self._state.now)
        if len(self.raft_writes) == 1:
            self._begin_raft_write()

    def _begin_raft_write(self) -> None:
        self.later(self._host.sync_s(), self._write_raft)

    def _write_raft(self) -> None:
        try:
            self._raft_files.write(self.raft_writes[0])
        except DiskFullError:
            self._is_metadata_full = True
            self.later(SPACE_POLL_S, self._write_raft)
            return
        self.raft_writes.popleft()
        self._is_metadata_full = False
        self._process.touch()
        if self.watch.ended(self.watch.metadata, self._state.now):
            self._tell_disk()
        self._member.handle_persisted(self._state.now)
        if self.raft_writes:
            self._begin_raft_write()

    # Watermarks and snapshots

    def checkpoint(self) -> None:
        now = self._state.now
        if now < self._watermarks_at + WATERMARKS_S or self._host.hangs_for_s():
            return
        watermarks = self._journal.checkpoint()
        if watermarks != self._written_watermarks:
            self._watermarks_at = now
            self._written_watermarks = watermarks
            try:
                self._directory.write_watermarks(watermarks)
            except OSError:
                return

    def _snapshot_s(self) -> float:
        return self._settings.snapshot_s * (0.5 + self._process.chance.random())

    def _maybe_snapshot(self) -> None:
        """As server/maintenance.py does it, but for the slices."""
        process = self._process
        if process.is_over:
            return
        process.schedule.after(self._snapshot_s(), self._maybe_snapshot)
        if process.is_ready and not self._host.is_witness:
            process.post(self.take_snapshot)

    def take_snapshot(self) -> None:
        if self._unfinished_snapshot is not None or self._host.hangs_for_s():
            return
        transfer = self._member.transfer
        covered = transfer.begin_save()
        known = self._storage.snapshots
        settled = self._journal.snapshot_sequence(self._journal.high_watermark)
        sequence = max(known[-1] if known else -1, settled)
        encoder = SnapshotEncoder(sequence, transfer.offsets(), self._state.wall_us)
        try:
            file = TemporaryFile(self._directory.files, snapshot_name(sequence))
            for kind, data in self._images.snapshot():
                file.write(encoder.add(kind, data))
            file.write(encoder.finish())
        except OSError:
            return
        self._unfinished_snapshot = (file, sequence, covered)
        self._process.schedule.note(self._host.name, f"snapshot {sequence}")
        self.later(FINISH_S, self._finish_snapshot)

    def _finish_snapshot(self) -> None:
        assert self._unfinished_snapshot is not None
        if self.group is not None or self._journal.pending_bytes:
            self.later(FINISH_S, self._finish_snapshot)
            return
        file, sequence, covered = self._unfinished_snapshot
        self._unfinished_snapshot = None
        file.finish()
        self._process.touch()
        self._member.transfer.saved(covered)
        known = self._storage.snapshots
        if not known or known[-1] != sequence:
            known.append(sequence)
        while len(known) > SNAPSHOTS_KEPT:
            self._directory.remove_snapshot(known.pop(0))
        if self._settings.retention_bytes:
            self._retain(self._settings.retention_bytes)

    def _retain(self, bytes_max: int) -> None:
        """As server/maintenance.py does it; no session loses anything."""
        journal = self._journal
        summaries = [
            SegmentSummary(
                segment.sequence,
                segment.size_bytes,
                segment.last_timestamp_us(),
                segment.end_offsets(),
            )
            for segment in journal.segments
        ]
        decision = decide(
            summaries,
            journal.start_offsets,
            RetentionPolicy(None, bytes_max, None),
            self._storage.snapshots[0],
            pins_of(self._images.state, None),
            self._state.wall_us,
        )
        if decision.remove:
            removed = journal.remove_oldest(decision.remove)
            self._host.mirror.begin(journal.start_offsets)
            with contextlib.suppress(OSError):
                self._storage.remove_segments(removed)

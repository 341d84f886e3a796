"""A process' disk: the journal's groups, the metadata's writes, watermarks, snapshots, retention;
what `io.disk.journal_writer`, `io.disk.raft_files` and `io.disk.maintenance` do, without
their threads. What is done when is decided by `Runtime` and `MaintenancePlan`.

While the host's disk hangs nothing of it goes on; what was begun is done when it is well again.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.io.disk.journal_writer import (
    SPACE_POLL_S,
    DiskFullError,
    GroupWriter,
    sync_newest,
)
from holdfast.io.disk.storage import SNAPSHOTS_KEPT
from holdfast.log.files.filesystem import TemporaryFile
from holdfast.log.files.layout import DataDirectory, snapshot_name
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.retention import RetentionPolicy
from holdfast.log.journal.segment import Segment, WriteGroup
from holdfast.log.journal.segment_list import forgotten
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.snapshot import SnapshotEncoder
from holdfast.node.raft.node import Write
from holdfast.node.state.maintenance_plan import MaintenanceLimits, MaintenancePlan

if TYPE_CHECKING:
    from tests.sim.loop import EventLoop
    from tests.sim.process import Process

SPACE_S: Final = 0.5
HANG_POLL_S: Final = 0.02
SLICE_ENTRIES: Final = 20
"""Of a snapshot, between two turns, at most."""
SLICE_S: Final = 0.003
SAVE_AGAIN_S: Final = 1.0
"""The pause after a snapshot that could not be written."""


class SimDiskThread:
    """A thread that does things with the disk of the host."""

    def __init__(self, process: "EventLoop") -> None:
        self._loop = process
        self._host = process.host
        self._settings = process.host.world.settings

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """When the disk answers."""
        self._loop.later(delay_s, lambda: self._when_well(work))

    def _when_well(self, work: Callable[[], None]) -> None:
        if self._host.hangs_for_s():
            self.later(HANG_POLL_S, work)
        else:
            work()


class RaftDisk(SimDiskThread):
    """A `RaftPort`."""

    def __init__(self, process: "Process") -> None:
        super().__init__(process)
        self._process = process
        self._files = process.cores.raft_files
        self.is_full = False
        # Under way.
        self.writes: deque[Write] = deque()

    def submit(self, write: Write) -> None:
        self.writes.append(write)
        if len(self.writes) == 1:
            self._begin()

    def _begin(self) -> None:
        self.later(self._host.sync_s(), self._write)

    def _write(self) -> None:
        try:
            self._files.write(self.writes[0])
        except DiskFullError:
            self.is_full = True
            self.later(SPACE_POLL_S, self._write)
            return
        self.is_full = False
        self._written()

    def _written(self) -> None:
        self.writes.popleft()
        self._process.runtime.raft_written()
        if self.writes:
            self._begin()

    def break_write(self) -> None:
        """The process ends. Raises Crash or DiskFullError."""
        if self.writes and self._host.chance.random() < 0.7:
            self._files.write(self.writes[0])


class JournalDisk(SimDiskThread):
    """A `JournalPort`."""

    def __init__(self, process: "EventLoop", directory: DataDirectory) -> None:
        super().__init__(process)
        self._directory = directory
        self._writer = GroupWriter(
            directory,
            durable=self._settings.durable,
            allocate_bytes=self._settings.allocate_bytes,
        )
        # The journal's group that is under way.
        self.group: WriteGroup | None = None
        # Written, and not reported.
        self._written: WriteGroup | None = None
        self._is_awaited = True
        self.is_full = False

    def break_writes(self) -> None:
        """The process ends: what was under way may be done, or half done. Raises Crash or
        DiskFullError."""
        if self.group is not None and self._host.chance.random() < 0.7:
            self._writer.write(self.group)

    @property
    def free_bytes(self) -> int:
        return self.space()

    def space(self) -> int:
        return self._host.disk.free_bytes()

    def submit(self, group: WriteGroup) -> None:
        assert self.group is None
        assert self._written is None
        self._is_awaited = True
        self.group = group
        self._host.mirror.on_begin(group)
        self.later(self._host.sync_s(), self._write_group)

    def _write_group(self) -> None:
        group = self.group
        assert group is not None
        try:
            self._writer.write(group)
        except DiskFullError:
            if not self.is_full:
                self.is_full = True
                self._loop.runtime.writer_full()
            self.later(SPACE_POLL_S, self._write_group)
            return
        self.is_full = False
        self._host.mirror.wrote(group)
        self.group = None
        if self._is_awaited:
            self._loop.runtime.group_written(group)
        else:
            self._written = group
        if group.sealed is not None:
            self._write_index(group.sealed)

    def set_awaited(self, *, is_awaited: bool) -> bool:
        self._is_awaited = is_awaited
        return is_awaited and self._written is not None

    def take_written(self) -> WriteGroup | None:
        group = self._written
        if group is not None:
            self._written = None
        return group

    def _write_index(self, segment: Segment) -> None:
        index = segment.index
        if not isinstance(index, ActiveIndex):
            return
        try:
            self._directory.write_index(segment.sequence, index.encode(lambda: None))
        except OSError:
            return
        segment.index = None


class ProcessDisk(JournalDisk):
    """The disk of a cluster's process, with the maintenance."""

    def __init__(self, process: "Process") -> None:
        super().__init__(process, process.cores.directory)
        self._process = process
        self.raft = RaftDisk(process)

    def begin(self) -> None:
        """The work that is done now and then."""
        self.snapshots = Snapshots(self._process)
        self._process.runtime.reserve_bytes = self._settings.reserve_bytes
        self._process.schedule.after(SPACE_S, self._watch_space)

    def break_writes(self) -> None:
        super().break_writes()
        self.raft.break_write()

    def _watch_space(self) -> None:
        if not self._process.is_over:
            self._process.schedule.after(SPACE_S, self._watch_space)
            self._process.runtime.check_space(self.space())

    def write_watermarks(self, watermarks: Checkpoint) -> None:
        self.sync()
        with contextlib.suppress(OSError):
            self._directory.write_watermarks(watermarks)
        self._process.runtime.watermarks_written(watermarks)

    def sync(self) -> None:
        """Sync what was written before."""
        if not self._settings.durable:
            segments = self._process.journal.segments[-2:]
            sync_newest(self._directory, [segment.sequence for segment in segments])


@dataclass
class UnfinishedSnapshot:
    encoder: SnapshotEncoder
    offsets: list[int]
    file: TemporaryFile
    entries: Iterator[tuple[int, bytes]]
    sequence: int
    grown_bytes: int
    covered: dict[int, int] | None
    """Of state that was received from other nodes."""


class Snapshots(SimDiskThread):
    """The snapshots and the retention, one snapshot at a time."""

    def __init__(self, process: "Process") -> None:
        super().__init__(process)
        self._process = process
        cores = process.cores
        self._storage = cores.storage
        self._directory = cores.directory
        self._runtime = process.runtime
        self._transfer = cores.cluster_node.transfer
        # The schedule says when a snapshot is due, not the growth.
        limits = MaintenanceLimits(
            RetentionPolicy(None, self._settings.retention_bytes or None, None), 0, None, 0
        )
        self._plan = MaintenancePlan(process.runtime, self._storage.snapshots, limits)
        self._unfinished: UnfinishedSnapshot | None = None
        # Those of the newest snapshot on the disk.
        self.offsets = list(self._storage.replayed_from)
        process.schedule.after(self._pause_s(), self._maybe_take)

    def _pause_s(self) -> float:
        return self._settings.snapshot_s * (0.5 + self._process.chance.random())

    def _maybe_take(self) -> None:
        process = self._process
        if process.is_over:
            return
        process.schedule.after(self._pause_s(), self._maybe_take)
        if process.is_ready and not self._host.is_witness:
            process.post(lambda: self.take(received=False))

    def take(self, *, received: bool) -> None:
        """`received`: the state has come from other nodes, and counts once it is durable."""
        if self._unfinished is not None or self._host.hangs_for_s():
            return
        grown_bytes = self._plan.grown_bytes()
        covered = dict(self._transfer.unsaved) if received else None
        sequence = self._plan.snapshot_sequence(always=received)
        if sequence is None:
            return
        offsets, entries = self._transfer.begin_snapshot()
        encoder = SnapshotEncoder(sequence, offsets, self._runtime.state.wall_us)
        try:
            file = TemporaryFile(self._directory.files, snapshot_name(sequence))
        except OSError:
            return
        self._unfinished = UnfinishedSnapshot(
            encoder, offsets, file, entries, sequence, grown_bytes, covered
        )
        self._process.schedule.note(self._host.name, f"snapshot {sequence}")
        self._write_slice()

    def _write_slice(self) -> None:
        """Some entries, with turns of the event loop between."""
        job = self._unfinished
        assert job is not None
        try:
            for _ in range(self._process.chance.randint(1, SLICE_ENTRIES)):
                entry = next(job.entries, None)
                if entry is None:
                    job.file.write(job.encoder.finish())
                    break
                job.file.write(job.encoder.add(*entry))
            else:
                self.later(SLICE_S, self._write_slice)
                return
        except OSError:
            self._failed(job)
            return
        # The snapshot must not contain state whose records the journal could still lose.
        self._runtime.when_written(lambda: self.later(SLICE_S, self._finish))

    def _failed(self, job: UnfinishedSnapshot) -> None:
        job.file.discard()
        if job.covered is None:
            self._unfinished = None
        else:
            # Until then none is begun, as in `ClusterMembership`.
            self._process.later(SAVE_AGAIN_S, self._may_try_again)

    def _may_try_again(self) -> None:
        self._unfinished = None
        self._process.touch()

    def _finish(self) -> None:
        job = self._unfinished
        assert job is not None
        try:
            self._process.disk.sync()
            job.file.finish()
        except OSError:
            self._failed(job)
            return
        self._unfinished = None
        self.offsets = job.offsets
        self._plan.snapshot_written(job.sequence, job.grown_bytes)
        known = self._storage.snapshots
        while len(known) > SNAPSHOTS_KEPT:
            self._directory.remove_snapshot(known.pop(0))
        if job.covered is not None:
            self._process.touch()
            self._transfer.saved(job.covered)
        if self._settings.retention_bytes:
            self._retain()
        self._reclaim()

    def _reclaim(self) -> None:
        """Rewrites the segments that are mostly dead because a partition began again, once the
        marks of that are on the disk."""
        journal = self._runtime.state.journal
        if self._runtime.group_in_flight or journal.pending_bytes:
            return
        self._process.disk.sync()
        marks = forgotten(journal.segments)
        for segment in journal.segments[:-1]:
            segment.note_forgotten(marks)
            if segment.index is not None or not segment.is_mostly_dead():
                continue
            with contextlib.suppress(OSError):
                rewrite = self._storage.begin_reclaiming(segment, 0)
                if rewrite is None:
                    continue
                try:
                    while rewrite.step():
                        pass
                except OSError:
                    rewrite.discard()
                    continue
                journal.replace_segment(self._storage.finish_reclaiming(rewrite))
                self._process.schedule.note(self._host.name, f"reclaimed {segment.sequence}")

    def _retain(self) -> None:
        """No session loses anything."""
        journal = self._runtime.state.journal
        decision, _ = self._plan.retention(self._plan.summaries(), 0, [])
        if decision.remove:
            removed = journal.remove_oldest(decision.remove)
            self._host.mirror.begin(journal.start_offsets)
            with contextlib.suppress(OSError):
                self._storage.remove_segments(removed)

"""Checks free space, writes snapshots and applies retention, in the background.

Each task is done in small pieces, so that no client waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from holdfast.config.schema import Config
from holdfast.io.disk.journal_writer import Worker
from holdfast.io.disk.storage import SNAPSHOTS_KEPT, Storage
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.failures import watched
from holdfast.io.event_loop.threads import run_in, run_in_thread
from holdfast.log.files.filesystem import TEMPORARY, ReadFile, TemporaryFile
from holdfast.log.files.layout import SNAPSHOTS, snapshot_name
from holdfast.log.journal.compaction import WRITE_BYTES, SegmentRewrite
from holdfast.log.journal.retention import Pin, RetentionDecision, RetentionPolicy
from holdfast.log.journal.segment import Segment
from holdfast.log.journal.segment_list import forgotten
from holdfast.log.snapshot import SnapshotEncoder
from holdfast.node.state.log_groups import LAKE, LakePins, scan_groups
from holdfast.node.state.maintenance_plan import MaintenanceLimits, MaintenancePlan

T = TypeVar("T")

logger = logging.getLogger("holdfast")

SPACE_INTERVAL_S = 0.5
RETENTION_INTERVAL_S = 5.0
RESERVE_BYTES_MAX = 256 << 20
RECLAIM_BYTES_PER_S = 32 << 20
"""The rate at which segments are read that are rewritten without forgotten partitions."""
RECLAIM_BYTES = 1 << 20
"""The size of the last segment from which it is ended early so that it can be rewritten."""
STATE_AGE_S = 60.0
"""The seconds for which a snapshot is kept for readers of the state."""
STATE_NAME = f"{SNAPSHOTS}/state{TEMPORARY}"
"""The name of that snapshot for a moment. A start removes what a crash has left."""
END_S = 2.0
"""The longest wait in seconds at the end for a file operation, which a directory that hangs may
never end."""
SLICE_ENTRIES = 200
"""The snapshot entries made between two turns of the loop."""


class Maintenance:
    """Runs the periodic work of one node.

    A failure of this work never stops the node: it is logged, kept in `failing` and tried again.
    Files are touched in threads only, so a directory that hangs stops this work and nothing else.
    """

    def __init__(self, broker: Broker, storage: Storage, config: Config) -> None:
        self._broker = broker
        self._storage = storage
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        broker.runtime.reserve_bytes = config.log.reserve_bytes or self._automatic_reserve()
        self._snapshot_lock = asyncio.Lock()
        self._state: ReadFile | None = None
        self._state_at_s = 0.0
        self.failing: dict[str, str] = {}
        """The error of each kind of work that failed at its last attempt."""
        self._plan = MaintenancePlan(broker.runtime, storage.snapshots, _limits_of(config))
        self._held_back = False
        self.lake_lost_records = 0
        """The records that retention has removed before a registered lake had read them."""
        self.reclaimed_bytes = 0
        """The bytes of forgotten partitions that this process has given back to the disk."""
        # The segments that the journal has dropped, until their files are removed.
        self._dropped: list[Segment] = []
        # Rewriting a segment must not meet its removal.
        self._segments_lock = asyncio.Lock()
        self._files: Worker | None = None

    def reload(self, config: Config) -> None:
        """Uses other rules of retention, from the next round on."""
        self._config = config
        self._plan.limits = _limits_of(config)

    def pinned_bytes(self) -> int:
        """Returns the bytes of the log that the worst session or shared group needs."""
        return self._plan.pinned_bytes

    def lake_pinned_bytes(self) -> int:
        """Returns the bytes of the log that the worst registered lake needs."""
        return self._plan.lake_pinned_bytes

    def start_watching(self) -> None:
        """Starts only the checks of free space: a cluster node stores records before it serves."""
        self._tasks.append(watched(self._repeat(self._watch_space, SPACE_INTERVAL_S)))

    def start(self) -> None:
        if not self._tasks:
            self.start_watching()
        for work, interval_s in (
            (self._maybe_snapshot, RETENTION_INTERVAL_S),
            (self._retain, RETENTION_INTERVAL_S),
            (self._reclaim, RETENTION_INTERVAL_S),
        ):
            self._tasks.append(watched(self._repeat(work, interval_s)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        files, self._files = self._files, None
        if files is not None:
            await asyncio.wait([run_in_thread("maintenance-end", files.close)], timeout=END_S)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Works on the files of this class in one thread, in order. So a file that is discarded is
        closed after its last write. Counter-example: another thread closes it during the write,
        and the rest of the write goes to the file that gets its descriptor."""
        if self._files is None:
            self._files = Worker("maintenance", asyncio.get_running_loop().call_soon_threadsafe)
        return await run_in(self._files, work)

    async def _repeat(self, work: Callable[[], object], interval_s: float) -> None:
        while True:
            await self.attempt(work)
            await asyncio.sleep(interval_s)

    async def attempt(self, work: Callable[[], object]) -> None:
        """Does a piece of work, and keeps its failure in `failing` until it succeeds.

        The incomplete result is discarded, and serving does not depend on it. The failure must be
        visible all the same: without retention a disk fills, and without snapshots a restart takes
        long.
        """
        name = work.__name__.strip("_")
        try:
            result = work()
            if asyncio.iscoroutine(result):
                await result
        except Exception as error:
            # OSError is mostly a full disk. Any other error is logged with its traceback.
            trace = None if isinstance(error, OSError) else error
            logger.error("maintenance_failed work=%s error=%r", name, str(error), exc_info=trace)
            self.failing[name] = str(error) or type(error).__name__
        else:
            if self.failing.pop(name, None) is not None:
                logger.warning("maintenance_goes_on work=%s", name)

    async def _watch_space(self) -> None:
        # In a thread of its own: a snapshot on a slow disk must not delay it.
        free_bytes = await run_in_thread("disk-space", self._broker.writer.measure_space)
        self._broker.runtime.check_space(free_bytes)

    def _automatic_reserve(self) -> int:
        """Returns a twentieth of the disk, at most RESERVE_BYTES_MAX.

        State records, indexes and the group in progress need that room.
        """
        return min(RESERVE_BYTES_MAX, self._storage.total_bytes() // 20)

    async def _maybe_snapshot(self) -> None:
        self._drop_old_state()
        if self._plan.is_snapshot_due():
            await self.take_snapshot()

    async def take_snapshot(self, *, always: bool = False) -> None:
        """Writes a snapshot of the derived state in slices, while the state changes.

        See `holdfast.node.state.recovery`. `always`: write it even if one exists for all
        records, because the state contains more than they define.
        """
        async with self._snapshot_lock:
            grown_bytes = self._plan.grown_bytes()
            sequence = self._plan.snapshot_sequence(always=always)
            if sequence is None:
                return
            encoder = await self._write_snapshot(sequence, snapshot_name(sequence))
            self._plan.snapshot_written(sequence, grown_bytes)
            while len(self._storage.snapshots) > SNAPSHOTS_KEPT:
                old = self._storage.snapshots.pop(0)
                await self._in_thread(partial(self._storage.directory.remove_snapshot, old))
            logger.info(
                "snapshot sequence=%020d entries=%d bytes=%d",
                sequence,
                encoder.entries,
                encoder.size_bytes,
            )

    async def _write_snapshot(self, sequence: int, name: str) -> SnapshotEncoder:
        """Writes the derived state to a file, which has its name when it is complete."""
        broker = self._broker
        offsets, entries = broker.runtime.cluster_node.transfer.begin_snapshot()
        encoder = SnapshotEncoder(sequence, offsets, broker.node.state.wall_us)
        opening = partial(TemporaryFile, self._storage.directory.files, name)
        file = await self._in_thread(opening)
        try:
            for count, (kind, data) in enumerate(entries, 1):
                pieces = encoder.add(kind, data)
                if pieces:
                    await self._in_thread(partial(file.write, pieces))
                elif count % SLICE_ENTRIES == 0:
                    await asyncio.sleep(0)
            await self._in_thread(partial(file.write, encoder.finish()))
            # The snapshot must not contain state whose records the journal could still lose.
            await broker.drain_journal()
            await self._in_thread(file.finish)
        except BaseException:
            self._discard(file)
            raise
        return encoder

    async def open_state(self) -> ReadFile | None:
        """Opens a snapshot that is at most STATE_AGE_S old, for a reader elsewhere. It has no name
        and is not among those of this node: retention keeps the log behind the oldest of these.
        None: the state here is incomplete or wrong."""
        runtime = self._broker.runtime
        if runtime.state.has_stopped_partition or not runtime.cluster_node.transfer.is_whole:
            return None
        async with self._snapshot_lock:
            self._drop_old_state()
            if self._state is None:
                await self._write_snapshot(0, STATE_NAME)
                self._state = await self._in_thread(self._open_unnamed)
                self._state_at_s = time.monotonic()
            return self._state

    def _open_unnamed(self) -> ReadFile:
        files = self._storage.directory.files
        file = files.open_read(STATE_NAME)
        files.remove(STATE_NAME)
        return file

    def _drop_old_state(self) -> None:
        if time.monotonic() - self._state_at_s > STATE_AGE_S:
            self._state = None

    def _discard(self, file: TemporaryFile | SegmentRewrite) -> None:
        """Removes an incomplete file, after what is being written to it."""
        if self._files is None:
            file.discard()
        else:
            self._files.submit(file.discard)

    async def _retain(self) -> None:
        journal = self._storage.journal
        if self._dropped:
            await self._remove_files()
        if len(journal.segments) < 2:
            return
        summaries = self._plan.summaries()
        superseded = await self._broker.reads.in_thread(
            lambda: self._storage.superseded(self._plan.limits.policy)
        )
        decision, settled = self._plan.retention(summaries, superseded, await self._lakes())
        if (decision.bytes_pinned > 0) != self._held_back:
            self._held_back = decision.bytes_pinned > 0
            logger.info("retention_held_back bytes=%d", decision.bytes_pinned)
        if decision.bytes_unsaved:
            # Only the age of the newest snapshot prevents further removal.
            await self.take_snapshot()
        if decision.remove:
            await self._remove(decision)
        elif self._plan.limits.policy.per_topic_last is not None:
            await self._compact(settled, self._plan.limits.policy.per_topic_last)

    async def _lakes(self) -> list[Pin]:
        """Returns the pins of the registered lakes. A scan takes many turns of the loop."""
        state = self._broker.node.state
        found = LakePins(state.config.partitions)
        if self._plan.limits.lake_bytes:
            for step in scan_groups(state.retained):
                found.add(step)
                await asyncio.sleep(0)
        return found.pins(self._plan.limits.lake_bytes)

    async def _compact(self, settled: int, per_topic_last: int) -> None:
        """Compacts one segment at a time, so that readers wait for at most one."""
        while True:
            found = await self._broker.reads.in_thread(
                lambda: self._storage.compact_next(settled, per_topic_last)
            )
            if found is None:
                return
            old, new = found
            self._storage.journal.replace_segment(new)
            self._plan.removed(old.size_bytes - new.size_bytes)
            logger.info(
                "compacted segment=%020d bytes=%d freed=%d",
                new.sequence,
                new.size_bytes,
                old.size_bytes - new.size_bytes,
            )

    async def _remove(self, decision: RetentionDecision) -> None:
        for loss in decision.losses:
            if loss.name.startswith(LAKE):
                self.lake_lost_records += loss.records
                logger.error("retention_overtook_lake lake=%r records=%d", loss.name, loss.records)
                continue
            logger.warning("retention_overtook reader=%r records=%d", loss.name, loss.records)
        async with self._segments_lock:
            removed = self._storage.journal.remove_oldest(decision.remove)
            self._plan.removed(sum(segment.size_bytes for segment in removed))
            self._dropped += removed
        await self._remove_files()
        logger.info("retention segments=%d bytes=%d", len(removed), decision.bytes_freed)

    async def _remove_files(self) -> None:
        """Removes the files of dropped segments. Those of an attempt that failed are removed by the
        next one: a full disk may refuse the new start of the journal, and needs their room."""
        async with self._segments_lock:
            dropped = self._dropped
            await self._in_thread(partial(self._storage.remove_segments, dropped))
            self._dropped = []

    async def _reclaim(self) -> None:
        """Rewrites the segments of which more than half are batches of forgotten partitions."""
        journal = self._storage.journal
        self._note_forgotten()
        worthwhile = [each for each in journal.segments if each.is_mostly_dead()]
        if not worthwhile:
            return
        if worthwhile[-1] is journal.segments[-1] and worthwhile[-1].size_bytes >= RECLAIM_BYTES:
            journal.start_segment()
        # The marks must be on the disk before batches go that are dead because of them.
        await self._broker.drain_journal()
        for segment in worthwhile:
            if segment.index is None:
                await self._reclaim_segment(segment)

    def _note_forgotten(self) -> None:
        segments = self._storage.journal.segments
        marks = forgotten(segments)
        for segment in segments:
            segment.note_forgotten(marks)

    async def _reclaim_segment(self, old: Segment) -> None:
        """Rewrites one segment at RECLAIM_BYTES_PER_S."""
        reserve_bytes = self._broker.runtime.reserve_bytes
        begin = partial(self._storage.begin_reclaiming, old, reserve_bytes)
        rewrite = await self._in_thread(begin)
        if rewrite is None:
            return
        try:
            has_more = True
            while has_more:
                has_more = await self._in_thread(rewrite.step)
                # A slow pace, so that clients and the journal have the disk.
                await asyncio.sleep(WRITE_BYTES / RECLAIM_BYTES_PER_S)
        except BaseException:
            self._discard(rewrite)
            raise
        async with self._segments_lock:
            if not rewrite.is_complete or old not in self._storage.journal.segments:
                self._discard(rewrite)
                return
            finish = partial(self._storage.finish_reclaiming, rewrite)
            new = await self._broker.reads.in_thread(finish)
            self._storage.journal.replace_segment(new)
        freed_bytes = old.size_bytes - new.size_bytes
        self._plan.removed(freed_bytes)
        self.reclaimed_bytes += freed_bytes
        logger.info(
            "reclaimed segment=%020d bytes=%d freed=%d", new.sequence, new.size_bytes, freed_bytes
        )


def _limits_of(config: Config) -> MaintenanceLimits:
    log = config.log
    retention = log.retention
    policy = RetentionPolicy(
        retention.age_s or None, retention.bytes or None, retention.per_topic_last or None
    )
    return MaintenanceLimits(
        policy, log.snapshot_bytes, retention.session_bytes or None, retention.keep_until_lake
    )

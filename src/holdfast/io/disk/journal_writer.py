"""Runs the journal's threads: one writes groups, a worker does the rest.

`JournalWriter` writes one group after the other. With durability "fsync" it reports a group only
after fdatasync. Work that a group must not wait for (indexes, reads) runs in a `Worker`. Callbacks
run in the event loop.
"""

import errno
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

from holdfast.log.files.filesystem import WriteFile, is_scarce
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.segment import Segment, WriteGroup
from holdfast.node.durations import Durations

logger = logging.getLogger("holdfast")

SPACE_POLL_S: Final = 0.2
"""The interval in seconds at which a full disk is checked."""
CLOSE_TIMEOUT_S: Final = 30.0
ALLOCATE_BYTES: Final = 4 << 20
"""The bytes allocated in advance at a time. They count as used, so the number is small."""
MEASURE_BYTES: Final = 256 << 10
"""The bytes written after which the free space is measured again. A call for each small group would
be a seventh of the writer's work."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)

CallSoon = Callable[..., object]
"""The function `loop.call_soon_threadsafe`."""
Work = Callable[[], object]
Done = Callable[[object, BaseException | None], None]


class DiskFullError(Exception):
    """The disk is full. The file contains nothing of the group, so it may be written again."""


class NoDescriptorError(Exception):
    """No file descriptor is free. The file contains nothing of the group."""


class GroupWriter:
    """Executes write groups in order, in the calling thread."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        durable: bool,
        shared: bool = False,
        allocate_bytes: int = ALLOCATE_BYTES,
    ) -> None:
        """`shared`: another node may have taken over unnoticed, so the file is never truncated.

        Counter-example: this node fails to write a group, the next holder seals the journal behind
        its part, and a truncation here would cut off sealed bytes.
        """
        self._directory = directory
        self._durable = durable
        self._shared = shared
        self._allocate_bytes = allocate_bytes
        self.synced = Durations()
        """The durations of fdatasync."""
        self._file: WriteFile | None = None
        self._segment = -1
        # The end of the groups in the file, and the end of the space allocated in advance.
        self._end = 0
        self._allocated = 0

    def write(self, group: WriteGroup) -> None:
        """Writes a group; it is durable on return if configured so.

        Raises `DiskFullError` or `NoDescriptorError`, after which the group may be written again.
        After another `OSError` the state of the file is unknown.
        """
        try:
            file = self._file_for(group)
        except OSError as error:
            if error.errno in _FULL:
                raise DiskFullError from error
            if is_scarce(error):
                raise NoDescriptorError from error
            raise
        end = group.position + group.size_bytes
        if self._durable and self._allocate_bytes and end > self._allocated:
            self._allocate(file, end)
        try:
            file.write(group.position, group.data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if not self._shared:
                file.truncate(group.position)
            # In a shared directory the partial group stays, so `close` must not truncate either.
            self._allocated = 0
            raise DiskFullError from error
        self._end = end
        if self._durable:
            began = time.perf_counter()
            file.sync()
            self.synced.observe(time.perf_counter() - began)

    def close(self) -> None:
        """Syncs and closes the file. Raises `OSError`."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            # Only with allocated space: no other holder can have appended records there.
            if self._allocated > self._end:
                file.truncate(self._end)
            file.sync()
        finally:
            file.close()

    def _allocate(self, file: WriteFile, end: int) -> None:
        """Extends the file, because a sync that keeps its size takes a fifth less time."""
        try:
            file.allocate(end + self._allocate_bytes)
        except OSError:
            # The disk is too full or the file system cannot allocate. The write itself reports it.
            self._allocated = sys.maxsize
            return
        self._allocated = end + self._allocate_bytes

    def _file_for(self, group: WriteGroup) -> WriteFile:
        if self._file is not None and self._segment == group.segment:
            return self._file
        # Synced with any durability: recovery accepts a torn end only in the last segment.
        self.close()
        if group.starts_segment:
            try:
                file = self._directory.create_segment(group.segment)
            except FileExistsError:
                # An earlier attempt created it and found no space for the group.
                self._directory.sync_journal()
                file = self._directory.append_to_segment(group.segment)
        else:
            file = self._directory.append_to_segment(group.segment)
        self._file = file
        self._segment = group.segment
        self._end = group.position
        self._allocated = 0
        return file


def sync_newest(directory: DataDirectory, segments: Sequence[int]) -> None:
    """Syncs the files of the journal's last two segments, as far as they are there. Earlier ones
    were synced when the next one began. Raises `OSError`."""
    for sequence in segments:
        try:
            file = directory.append_to_segment(sequence)
        except FileNotFoundError:
            # Its first group is not written yet.
            continue
        try:
            file.sync()
        finally:
            file.close()


class Worker:
    """One thread that does work in the order of submission.

    Callers bound the queue: each reader has one read in progress.
    """

    def __init__(self, name: str, call_soon: CallSoon) -> None:
        self._call_soon = call_soon
        self._queue: SimpleQueue[tuple[Work, Done | None] | None] = SimpleQueue()
        self._runs_in = threading.Thread(target=self._run, name=name, daemon=True)
        self._runs_in.start()

    def submit(self, work: Work, done: Done | None = None) -> None:
        """Calls `work` in the thread, then `done(result, error)` in the loop."""
        self._queue.put((work, done))

    def close(self) -> None:
        """Waits until all submitted work has run, at most CLOSE_TIMEOUT_S."""
        self._queue.put(None)
        self._runs_in.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            work, done = item
            result: object = None
            error: BaseException | None = None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001
                error = raised
            if done is not None:
                _report(self._call_soon, done, result, error)
            elif error is not None:
                logger.error("work_failed error=%r", str(error), exc_info=error)
            # Releases memory while the thread waits for the next item.
            del item, work, done, result, error


class LogReadPool(Worker):
    """The worker for `LogReader` calls."""

    def __init__(self, call_soon: CallSoon) -> None:
        super().__init__("log-reader", call_soon)


class JournalWriter:
    """The thread that writes the journal's groups in order, and its housekeeping worker.

    It reports a group only after all earlier groups. After an error it writes nothing more: the
    node must stop.
    """

    def __init__(
        self,
        directory: DataDirectory,
        call_soon: CallSoon,
        *,
        durable: bool,
        confirm: Callable[[], None] | None = None,
        on_written: Callable[[WriteGroup], None],
        on_failed: Callable[[BaseException], None],
        on_full: Callable[[], None],
        on_space: Callable[[], None],
    ) -> None:
        """`confirm`: in a shared directory, returns when durable records may be promised, or
        raises.

        `on_written`: called when the group is in the file, and on disk if `durable`. `on_failed`:
        called when no group will be written any more. `on_full`, `on_space`: called when a full
        disk makes groups wait, and when it does no longer.
        """
        self._directory = directory
        self._call_soon = call_soon
        self._on_written = on_written
        self._on_failed = on_failed
        self._on_full = on_full
        self._on_space = on_space
        self._confirm = confirm
        self._writer = GroupWriter(directory, durable=durable, shared=confirm is not None)
        self.synced = self._writer.synced
        self._unmeasured_bytes = 0
        self.free_bytes = self.measure_space()
        """The free bytes when last measured, without those allocated in advance."""
        self._groups: SimpleQueue[WriteGroup | None] = SimpleQueue()
        # The group that is written, until it is taken in the loop.
        self._written: WriteGroup | None = None
        self._is_awaited = True
        self._closing = threading.Event()
        self.is_full = False
        """Whether a group waits for space."""
        self.is_synced = False
        """Whether the writer has ended, and everything that it has written is synced."""
        self.housekeeping = Worker("journal-keeper", call_soon)
        self._runs_in = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._runs_in.start()

    def submit(self, group: WriteGroup) -> None:
        """Queues a group.

        The caller submits a group only after the report of the one before, so the queue is bounded,
        and one written group at most waits to be taken.
        """
        assert self._written is None, "the group before was not taken"
        self._is_awaited = True
        self._groups.put(group)

    def set_awaited(self, *, is_awaited: bool) -> bool:
        """Whether the end of the present group is reported. Returns True if it is over and was not.

        The loop sets the mark and then looks for the group, and the thread does both in the other
        order. So one of them finds what the other has done.
        """
        self._is_awaited = is_awaited
        return is_awaited and self._written is not None

    def take_written(self) -> WriteGroup | None:
        """Returns the group that is written and was not reported."""
        group = self._written
        if group is not None:
            self._written = None
        return group

    def _report_written(self) -> None:
        group = self.take_written()
        if group is not None:
            self._on_written(group)

    def space(self) -> int:
        """Returns the bytes that could still be written when they were last measured."""
        return self.free_bytes

    def measure_space(self) -> int:
        """Returns the bytes that may still be written now. A directory that hangs blocks it."""
        self._unmeasured_bytes = 0
        self.free_bytes = self._directory.files.free_bytes()
        return self.free_bytes

    def close(self) -> None:
        """Writes all submitted groups durably and stops. Groups that wait for space are dropped."""
        self._closing.set()
        self._groups.put(None)
        self._runs_in.join(CLOSE_TIMEOUT_S)
        self.housekeeping.close()

    def _run(self) -> None:
        try:
            while True:
                group = self._groups.get()
                if group is None:
                    break
                if not self._write(group):
                    continue
                # After the sync, because only a lease that was valid then protects the group.
                # Counter-example: the lease expires during the sync, and the next holder seals the
                # journal without the group.
                if self._confirm is not None:
                    self._confirm()
                self._unmeasured_bytes += group.size_bytes
                if self._unmeasured_bytes >= MEASURE_BYTES:
                    # At full speed a small disk is full within a moment.
                    self.measure_space()
                self._written = group
                if self._is_awaited:
                    _report(self._call_soon, self._report_written)
                if group.sealed is not None:
                    self.housekeeping.submit(partial(self._write_index, group.sealed))
            self._writer.close()
            self.is_synced = True
        except Exception as error:  # noqa: BLE001
            # Never retried: a failed fsync may have dropped the pages it should have written.
            _report(self._call_soon, self._on_failed, error)

    def _write(self, group: WriteGroup) -> bool:
        """Writes a group, waiting for space if needed. Returns False if `close` came first."""
        while True:
            try:
                self._writer.write(group)
            except DiskFullError:
                if not self.is_full:
                    self.is_full = True
                    _report(self._call_soon, self._on_full)
                if self._closing.wait(SPACE_POLL_S):
                    return False
                continue
            except NoDescriptorError as error:
                # Promises wait, and limits.pending_bytes_max makes publishers wait too.
                logger.error("journal_waits_for_descriptor error=%r", str(error.__cause__))
                if self._closing.wait(SPACE_POLL_S):
                    return False
                continue
            if self.is_full:
                self.is_full = False
                _report(self._call_soon, self._on_space)
            return True

    def _write_index(self, segment: Segment) -> None:
        index = segment.index
        if not isinstance(index, ActiveIndex):
            return
        try:
            self._directory.write_index(segment.sequence, index.encode(_let_others_run))
        except OSError as error:
            # A missing index is built again when it is needed.
            logger.warning("index_not_written segment=%d error=%r", segment.sequence, str(error))
            return
        # From here on readers load the parts of the index that they need.
        segment.index = None


def _let_others_run() -> None:
    """Does nothing; `ActiveIndex.encode` calls it so that other threads may run."""


def _report(call_soon: CallSoon, callback: Callable[..., object], *args: object) -> None:
    try:
        call_soon(callback, *args)
    except RuntimeError:
        # The loop is closed, so there is no receiver for the report.
        return

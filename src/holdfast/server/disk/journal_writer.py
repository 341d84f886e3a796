"""The disk's side of the journal: the thread that writes groups, and the worker for the rest.

`JournalWriter` writes one group after the other and, with durability "fsync", reports each only
after fdatasync. What a group should not wait for (indexes, reading) runs in a `Worker`. Callbacks
run on the event loop.
"""

import errno
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Final

from holdfast.storage.files.filesystem import WriteFile, is_scarce
from holdfast.storage.files.layout import DataDirectory
from holdfast.storage.journal.active_index import ActiveIndex
from holdfast.storage.journal.segment import Segment, WriteGroup

logger = logging.getLogger("holdfast")

SPACE_POLL_S: Final = 0.2
"""How often a full disk is looked at again."""
CLOSE_TIMEOUT_S: Final = 30.0
ALLOCATE_BYTES: Final = 4 << 20
"""Space allocated in advance at a time. It counts as used, so it is not much."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)

CallSoon = Callable[..., object]
"""loop.call_soon_threadsafe"""
Work = Callable[[], object]
Done = Callable[[object, BaseException | None], None]


class DiskFullError(Exception):
    """Nothing of the group is in the file; it may be written again when there is space."""


class NoDescriptorError(Exception):
    """The same, for want of a file descriptor: the disk is as it was."""


class GroupWriter:
    """Executes write groups, in the order they were taken; in whatever thread calls."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        durable: bool,
        shared: bool = False,
        allocate_bytes: int = ALLOCATE_BYTES,
    ) -> None:
        """`shared`: another node may have taken over without our knowledge, and what is in the
        file then counts as it is: what was written of a group is never cut off."""
        self._directory = directory
        self._durable = durable
        self._shared = shared
        self._allocate_bytes = allocate_bytes
        self._file: WriteFile | None = None
        self._segment = -1
        # Where in the file the groups end, and the space allocated in advance.
        self._end = 0
        self._allocated = 0

    def write(self, group: WriteGroup) -> None:
        """Raises DiskFullError, NoDescriptorError, or OSError: then the file's state is unknown."""
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
            # What was written of the group stays, whatever comes: see `close`.
            self._allocated = 0
            raise DiskFullError from error
        self._end = end
        if self._durable:
            file.sync()

    def close(self) -> None:
        """Syncs too. Raises OSError."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            # Only space that was allocated: nobody can have taken that for records.
            if self._allocated > self._end:
                file.truncate(self._end)
            file.sync()
        finally:
            file.close()

    def _allocate(self, file: WriteFile, end: int) -> None:
        """A sync that need not change the size of the file takes a fifth less time."""
        try:
            file.allocate(end + self._allocate_bytes)
        except OSError:
            # Too full, or a file system that cannot: the write itself will tell.
            self._allocated = sys.maxsize
            return
        self._allocated = end + self._allocate_bytes

    def _file_for(self, group: WriteGroup) -> WriteFile:
        if self._file is not None and self._segment == group.segment:
            return self._file
        # Durable whatever the durability: only the last segment may have a torn end.
        self.close()
        if group.starts_segment:
            try:
                file = self._directory.create_segment(group.segment)
            except FileExistsError:
                # Created by an attempt that found no space for the rest.
                self._directory.sync_journal()
                file = self._directory.append_to_segment(group.segment)
        else:
            file = self._directory.append_to_segment(group.segment)
        self._file = file
        self._segment = group.segment
        self._end = group.position
        self._allocated = 0
        return file


class Worker:
    """One thread that does work in the order it is given. Whoever submits bounds the queue: each
    reader has one read under way."""

    def __init__(self, name: str, call_soon: CallSoon) -> None:
        self._call_soon = call_soon
        self._queue: SimpleQueue[tuple[Work, Done | None] | None] = SimpleQueue()
        self._runs_in = threading.Thread(target=self._run, name=name, daemon=True)
        self._runs_in.start()

    def submit(self, work: Work, done: Done | None = None) -> None:
        """Call `work` in the thread, then `done(result, error)` on the loop."""
        self._queue.put((work, done))

    def close(self) -> None:
        """Return when everything submitted has run."""
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
            # Not kept while waiting for the next.
            del item, work, done, result, error


class LogReadPool(Worker):
    """The worker for LogReader calls."""

    def __init__(self, call_soon: CallSoon) -> None:
        super().__init__("log-reader", call_soon)


class JournalWriter:
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
        """`confirm`, for a shared directory: returns when what is durable by now may be promised,
        or raises. `on_written`: the group is in the file, and if `durable` on the disk.
        `on_failed`: nothing more will be written; the node must stop. `on_full`, `on_space`: the
        disk is full, groups wait; it is not any more."""
        self._directory = directory
        self._call_soon = call_soon
        self._on_written = on_written
        self._on_failed = on_failed
        self._on_full = on_full
        self._on_space = on_space
        self._confirm = confirm
        self._writer = GroupWriter(directory, durable=durable, shared=confirm is not None)
        self.free_bytes = self.space()
        """After the last group; what is allocated in advance is not counted as free."""
        self._groups: SimpleQueue[WriteGroup | None] = SimpleQueue()
        self._closing = threading.Event()
        self.is_full = False
        """A group waits for space."""
        self.housekeeping = Worker("journal-keeper", call_soon)
        self._runs_in = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._runs_in.start()

    def submit(self, group: WriteGroup) -> None:
        """Groups are written in this order. The caller takes a group only when the one before is
        reported, so the queue needs no bound of its own."""
        self._groups.put(group)

    def space(self) -> int:
        """Bytes that may still be written, now."""
        return self._directory.files.free_bytes()

    def close(self) -> None:
        """Return when everything submitted is written and durable; groups that wait for space are
        given up."""
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
                if self._confirm is not None:
                    self._confirm()
                # Looked at for every group: at full speed a small disk is full in no time.
                self.free_bytes = self.space()
                _report(self._call_soon, self._on_written, group)
                if group.sealed is not None:
                    self.housekeeping.submit(partial(self._write_index, group.sealed))
            self._writer.close()
        except Exception as error:  # noqa: BLE001
            # An fsync that failed may have dropped what it should have written: never retried.
            _report(self._call_soon, self._on_failed, error)

    def _write(self, group: WriteGroup) -> bool:
        """Waits for space if need be; False when closing came first."""
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
                # Promises wait, and publishers with them (limits.pending_bytes_max).
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
            # It is made anew when it is missed.
            logger.warning("index_not_written segment=%d error=%r", segment.sequence, str(error))
            return
        # From here on readers load what they need of it.
        segment.index = None


def _let_others_run() -> None:
    """See ActiveIndex.encode."""


def _report(call_soon: CallSoon, callback: Callable[..., object], *args: object) -> None:
    try:
        call_soon(callback, *args)
    except RuntimeError:
        # The loop is closed: nobody is left to tell.
        return

"""Writes Raft's files in a thread.

`MetaStore` bounds its queue: it accepts no input while too many writes are in progress.
"""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from holdfast.io.disk.journal_writer import SPACE_POLL_S, CallSoon, DiskFullError
from holdfast.io.disk.raft_files import RaftFiles
from holdfast.node.raft.node import Write

logger = logging.getLogger("holdfast")

CLOSE_TIMEOUT_S: Final = 30.0


class RaftWriter:
    """Writes in the order of submission and reports each write once.

    A message of Raft that depends on a write waits for the report. Otherwise a crash could undo a
    vote that others have counted.
    """

    def __init__(
        self,
        files: RaftFiles,
        call_soon: CallSoon,
        *,
        confirm: Callable[[], None] | None = None,
        on_written: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """`confirm`: as for `JournalWriter`. `on_written`: called when the oldest unreported write
        is done.

        `on_failed`: called when nothing will be written any more; the node must stop. Both run in
        the loop (`call_soon_threadsafe`). While the disk is full, writes wait: the node neither
        votes nor acknowledges, and the others continue without it.
        """
        self._files = files
        self._call_soon = call_soon
        self._confirm = confirm
        self._on_written = on_written
        self._on_failed = on_failed
        self._writes: SimpleQueue[Write | None] = SimpleQueue()
        self._closing = threading.Event()
        self.is_full = False
        """Whether a write waits for space."""
        self._thread = threading.Thread(target=self._run, name="raft-writer", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> None:
        self._writes.put(write)

    def close(self) -> None:
        """Writes everything submitted and stops. Writes that wait for space are dropped."""
        self._closing.set()
        self._writes.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (write := self._writes.get()) is not None:
                if not self._write(write):
                    break
                if self._confirm is not None:
                    self._confirm()
                self._report(self._on_written)
            self._files.close()
        except Exception as error:  # noqa: BLE001
            # Never retried: a failed fsync may have dropped the pages it should have written.
            self._report(self._on_failed, error)

    def _write(self, write: Write) -> bool:
        """Writes, waiting for space if needed. Returns False if `close` came first."""
        while True:
            try:
                self._files.write(write)
            except DiskFullError:
                if not self.is_full:
                    self.is_full = True
                    logger.warning("raft_disk_full")
                if self._closing.wait(SPACE_POLL_S):
                    return False
                continue
            self.is_full = False
            return True

    def _report(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._call_soon(callback, *args)
        except RuntimeError:
            # The loop is closed, so there is no receiver for the report.
            return

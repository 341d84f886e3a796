"""The thread that writes the metadata's Raft. MetaStore bounds the queue: it takes nothing more in
when too many writes are under way."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from holdfast.cluster.raft.node import Write
from holdfast.server.disk.journal_writer import SPACE_POLL_S, CallSoon, DiskFullError
from holdfast.server.disk.raft_files import RaftFiles

logger = logging.getLogger("holdfast")

CLOSE_TIMEOUT_S: Final = 30.0


class RaftWriter:
    def __init__(
        self,
        files: RaftFiles,
        call_soon: CallSoon,
        *,
        on_written: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """`on_written`: the oldest write that was not reported is done. `on_failed`: nothing more
        will be written; the node must stop. Both run on the loop (`call_soon_threadsafe`). While
        the disk is full, writes wait: the node has no voice, and the others go on without it."""
        self._files = files
        self._call_soon = call_soon
        self._on_written = on_written
        self._on_failed = on_failed
        self._writes: SimpleQueue[Write | None] = SimpleQueue()
        self._closing = threading.Event()
        self.is_full = False
        """A write waits for space."""
        self._thread = threading.Thread(target=self._run, name="raft-writer", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> None:
        self._writes.put(write)

    def close(self) -> None:
        """Return when everything submitted is written; what waits for space is given up."""
        self._closing.set()
        self._writes.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (write := self._writes.get()) is not None:
                if not self._write(write):
                    break
                self._report(self._on_written)
            self._files.close()
        except Exception as error:  # noqa: BLE001
            # An fsync that failed may have dropped what it should have written: never retried.
            self._report(self._on_failed, error)

    def _write(self, write: Write) -> bool:
        """Waits for space if need be; False when closing came first."""
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
            # The loop is closed: nobody is left to tell.
            return

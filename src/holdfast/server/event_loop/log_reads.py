"""The reads of the log, in a thread of their own."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final, TypeVar, cast

from holdfast.broker.effects import FetchInflight, FindStarts, ReadLog
from holdfast.broker.runtime import Found
from holdfast.cluster.partitions.effects import ReadBatches
from holdfast.server.disk.journal_writer import LogReadPool
from holdfast.server.event_loop.threads import run_in
from holdfast.storage.files.filesystem import is_scarce
from holdfast.storage.reading.cursor import LogReader, ReadResult
from holdfast.storage.reading.starts import FoundStart

RESULTS_S: Final = 0.002
"""The time in seconds after which further results wait for the next iteration of the loop: 1,000
clients may begin a replay at once, and live messages must not wait for all of them."""

logger = logging.getLogger("holdfast")

T = TypeVar("T")


class LogReads:
    """The `ReplicaReadPort` of a node's turns. Reads are done in the order of their requests."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reader: LogReader,
        touch: Callable[[], None],
        on_failed: Callable[[str, BaseException], None],
    ) -> None:
        """`touch`: see `Broker.touch`. `on_failed`: called with an event for the log."""
        self._loop = loop
        self._reader = reader
        self._touch = touch
        self._on_failed = on_failed
        self._pool = LogReadPool(loop.call_soon_threadsafe)
        # Results that wait for a later iteration of the loop, the oldest first.
        self._waiting: deque[Callable[[], None]] = deque()
        # Of the first result in this iteration; 0.0: there was none.
        self._began_at = 0.0

    def read_log(self, effect: ReadLog, done: Callable[[ReadLog, ReadResult], None]) -> None:
        """Read the records that `effect` asks for."""
        work = partial(
            self._reader.read,
            effect.positions,
            effect.limits,
            effect.interests,
            effect.records_max,
            effect.bytes_max,
        )
        self._submit(work, partial(done, effect))

    def fetch(self, effect: FetchInflight, done: Callable[[FetchInflight, Found], None]) -> None:
        """Read the records of unfinished deliveries."""
        self._submit(partial(self._fetched, effect), partial(done, effect))

    def find_starts(
        self, effect: FindStarts, done: Callable[[FindStarts, list[FoundStart]], None]
    ) -> None:
        """Find the offsets at which subscriptions begin."""
        self._submit(partial(self._found, effect), partial(done, effect))

    def _found(self, effect: FindStarts) -> list[FoundStart]:
        """Search in the thread."""
        return [self._reader.starts.find(query, effect.limits) for query in effect.wanted]

    def _fetched(self, effect: FetchInflight) -> Found:
        """Read in the thread."""
        found: Found = []
        size_bytes = 0
        for packet_id, partition, offset in effect.wanted:
            record = self._reader.fetch(partition, offset)
            found.append((packet_id, record))
            if record is not None:
                size_bytes += len(record.payload) + len(record.properties)
            if size_bytes >= effect.bytes_max:
                break
        return found

    def read_batches(
        self, effect: ReadBatches, end: int, done: Callable[[ReadBatches, list[bytes]], None]
    ) -> None:
        """Read whole batches below the offset `end`."""
        work = partial(
            self._reader.read_batches, effect.partition, effect.start, end, effect.bytes_max
        )
        self._submit(work, partial(done, effect))

    def _submit(self, work: Callable[[], T], handle: Callable[[T], None]) -> None:
        """Read in the thread and pass the result to `handle` in the loop. A read without a free
        descriptor is done again, because that says nothing of the disk."""

        def done(result: object, error: BaseException | None) -> None:
            self._take(partial(handled, result, error))

        def handled(result: object, error: BaseException | None) -> None:
            self._touch()
            if error is None:
                handle(cast(T, result))
            elif is_scarce(error):
                logger.error("log_read_waits_for_descriptor error=%r", str(error))
                self._submit(work, handle)
            else:
                self._on_failed("log_read_failed", error)

        self._pool.submit(work, done)

    def _take(self, result: Callable[[], None]) -> None:
        """Handle a result now, or in a later iteration if those of this one took their time."""
        if self._waiting:
            self._waiting.append(result)
            return
        if not self._began_at:
            self._began_at = monotonic()
            self._loop.call_soon(self._go_on)
        elif monotonic() - self._began_at > RESULTS_S:
            self._waiting.append(result)
            return
        result()

    def _go_on(self) -> None:
        """Handle what waits, in the next iteration."""
        self._began_at = 0.0
        waiting = self._waiting
        if not waiting:
            return
        self._began_at = monotonic()
        self._loop.call_soon(self._go_on)
        while waiting:
            waiting.popleft()()
            if monotonic() - self._began_at > RESULTS_S:
                return

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread, so that no read runs at the same time."""
        return await run_in(self._pool, work)

    def close(self) -> None:
        """Finish the submitted reads and stop the thread."""
        self._pool.close()

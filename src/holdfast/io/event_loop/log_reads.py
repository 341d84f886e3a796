"""Reads the log in a thread of its own."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final, TypeVar, cast

from holdfast.io.disk.journal_writer import LogReadPool
from holdfast.io.event_loop.threads import run_in
from holdfast.log.files.filesystem import is_scarce
from holdfast.log.reading.cursor import LogReader, ReadResult
from holdfast.log.reading.starts import FoundStart
from holdfast.node.delivery.log_replay import READ_RECORDS_MAX
from holdfast.node.effects import FetchInflight, FindStarts, Found, ReadLog
from holdfast.node.replicate.effects import ReadBatches
from holdfast.node.session.session import Session

PAUSE_S: Final = 0.002
"""The time in seconds between two turns. The event loop's timers have a resolution of 1 ms."""
TURN_RECORDS: Final = 64
"""The records of a turn, unless more are needed to reach the end of the log."""
TURN_BYTES: Final = 65_536
"""The bytes after which the read of a turn stops."""
LARGE_RECORDS: Final = 32
"""The records from which a result is large. Smaller ones, like those of `last:10`, never wait."""
LARGE_BYTES: Final = 32_768
"""The bytes of payload from which a result is large."""
WAITING_MAX: Final = 128
"""The most results that wait for a turn; the next ones come without a pause. Each is one read of
TURN_BYTES and one larger record. Without it, 6,000 replays beside 10 publishes/s would have
400 MB."""
WINDOW_S: Final = 0.1
"""The least time in seconds over which the rate of publishes is measured."""
LIVE_PER_S: Final = 10.0
"""The rate of publishes from which replays take turns: one in each window."""
GAIN: Final = 4.0
"""The least records that a replay reads for each record that is appended meanwhile. Counter-example
of turns without it: 40 replays share turns of 64 records in 2 ms, 32,000 records/s. So at 2,000
publishes/s none would reach the end of the log."""


class ReplayTurns:
    """The size of a replay's reads, and the pauses between them, at the current rate of
    publishes.

    A read of 500 records keeps the interpreter busy for about a millisecond, and a replay at full
    speed leaves no gap between two reads. Each live publish then waits for the interpreter three
    times: when it arrives, when its group is on disk, and when the loop releases its
    acknowledgement. So while clients publish, a read of a replay is small, and a pause precedes the
    delivery of its result.
    """

    def __init__(self, now: float, appended: int) -> None:
        """`now`, here and below: of the monotonic clock, in seconds. `appended`: see `observe`."""
        # Publishes of clients and records of the log per second.
        self._published_per_s = 0.0
        self._appended_per_s = 0.0
        # The begin of the window, and the counts then.
        self._began_at = now
        self._published = 0
        self._appended = appended
        # The earliest time of the next turn.
        self._opens_at = now

    def observe(self, now: float, published: int, appended: int) -> None:
        """Measures the rates. `published`: the publishes of clients since the start. `appended`:
        the records in the log, with those of other nodes."""
        elapsed_s = now - self._began_at
        if elapsed_s < WINDOW_S:
            return
        self._published_per_s = (published - self._published) / elapsed_s
        self._appended_per_s = (appended - self._appended) / elapsed_s
        self._began_at = now
        self._published = published
        self._appended = appended

    def records(self, waiting: int) -> int:
        """Returns the records of the next turn, while `waiting` replays wait for theirs. With
        `READ_RECORDS_MAX` there are no turns: replays read at full speed."""
        if self._published_per_s < LIVE_PER_S:
            return READ_RECORDS_MAX
        return min(READ_RECORDS_MAX, max(TURN_RECORDS, self._needed(waiting)))

    def wait_s(self, now: float, waiting: int) -> float:
        """Returns the time until the next turn, 0.0 if it may begin now."""
        if waiting >= WAITING_MAX or self.records(waiting) == READ_RECORDS_MAX:
            return 0.0
        return max(0.0, self._opens_at - now)

    def takes_turn(self, result: ReadResult) -> bool:
        """Whether a result waits for its turn. A small one does not, nor one that its bytes have
        cut below the records that a replay needs."""
        records = result.records
        count = len(records)
        if count < LARGE_RECORDS and sum(len(each.payload) for each in records) < LARGE_BYTES:
            return False
        return count >= self._needed(0)

    def _needed(self, waiting: int) -> int:
        """The records of a turn with which a replay reaches the end of the log."""
        return int(GAIN * self._appended_per_s * PAUSE_S * (waiting + 1))

    def begin(self, now: float) -> None:
        """Begins a turn."""
        self._opens_at = now + PAUSE_S


RESULTS_S: Final = 0.002
"""The time in seconds after which further results wait for the next iteration of the loop: 1,000
clients may begin a replay at once, and live messages must not wait for all of them."""

logger = logging.getLogger("holdfast")

T = TypeVar("T")


class LogReads:
    """The `ReadPort` of a node's turns. Reads are done in the order of their requests. The
    large results of replays take turns: see `ReplayTurns`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reader: LogReader,
        touch: Callable[[], None],
        on_failed: Callable[[str, BaseException], None],
        counts: Callable[[], tuple[int, int]],
    ) -> None:
        """`touch`: see `Broker.touch`. `on_failed`: called with an event for the log. `counts`: see
        `Broker.counts`."""
        self._loop = loop
        self._reader = reader
        self._touch = touch
        self._on_failed = on_failed
        self._pool = LogReadPool(loop.call_soon_threadsafe)
        # Results that wait for a later iteration of the loop, the oldest first.
        self._waiting: deque[Callable[[], None]] = deque()
        # Of the first result in this iteration; 0.0: there was none.
        self._began_at = 0.0
        self._counts = counts
        self._turns = ReplayTurns(monotonic(), counts()[1])
        # Large results of replays, each of another session, in the order of their turns.
        self._replays: deque[Callable[[], None]] = deque()
        self._next_turn: asyncio.TimerHandle | None = None

    def read_log(self, effect: ReadLog, done: Callable[[ReadLog, ReadResult], None]) -> None:
        """Reads the records that `effect` asks for."""
        handle = partial(done, effect)
        records_max = effect.records_max
        bytes_max = effect.bytes_max
        reader = effect.cursor
        if isinstance(reader, Session) and reader.has_starts and effect.lane is None:
            handle = partial(self._await_turn, handle)
            self._turns.observe(monotonic(), *self._counts())
            turn_records = self._turns.records(len(self._replays))
            if turn_records < records_max:
                records_max = turn_records
                bytes_max = min(bytes_max, TURN_BYTES)
        work = partial(
            self._reader.read,
            effect.positions,
            effect.limits,
            effect.interests,
            records_max,
            bytes_max,
        )
        self._submit(work, handle)

    def _await_turn(self, handle: Callable[[ReadResult], None], result: ReadResult) -> None:
        """Handles the result of a replay's read now, or in its turn."""
        now = monotonic()
        if not self._turns.takes_turn(result):
            handle(result)
        elif self._replays or self._turns.wait_s(now, 0) > 0.0:
            self._replays.append(partial(handle, result))
            self._arm(now)
        else:
            self._turns.begin(now)
            handle(result)

    def _arm(self, now: float) -> None:
        """Sets the timer of the next turn."""
        if self._next_turn is None:
            wait_s = self._turns.wait_s(now, len(self._replays) - 1)
            self._next_turn = self._loop.call_later(wait_s, self._take_turns)

    def _take_turns(self) -> None:
        """Hands over the first result that waits, or all if they need no turns any more."""
        self._next_turn = None
        now = monotonic()
        self._turns.observe(now, *self._counts())
        replays = self._replays
        while replays and self._turns.wait_s(now, len(replays) - 1) == 0.0:
            self._turns.begin(now)
            self._take(partial(self._hand_over, replays.popleft()))
        if replays:
            self._arm(now)

    def _hand_over(self, handle: Callable[[], None]) -> None:
        """Handles a result that has waited."""
        self._touch()
        handle()

    def fetch(self, effect: FetchInflight, done: Callable[[FetchInflight, Found], None]) -> None:
        """Reads the records of unfinished deliveries."""
        self._submit(partial(self._fetched, effect), partial(done, effect))

    def find_starts(
        self, effect: FindStarts, done: Callable[[FindStarts, list[FoundStart]], None]
    ) -> None:
        """Finds the offsets at which subscriptions begin."""
        self._submit(partial(self._found, effect), partial(done, effect))

    def _found(self, effect: FindStarts) -> list[FoundStart]:
        """Searches in the thread."""
        return [self._reader.starts.find(query, effect.limits) for query in effect.wanted]

    def _fetched(self, effect: FetchInflight) -> Found:
        """Reads in the thread."""
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
        """Reads whole batches below the offset `end`."""
        work = partial(
            self._reader.read_batches, effect.partition, effect.start, end, effect.bytes_max
        )
        self._submit(work, partial(done, effect))

    def _submit(self, work: Callable[[], T], handle: Callable[[T], None]) -> None:
        """Reads in the thread and passes the result to `handle` in the loop."""
        self._pool.submit(work, partial(self._done, work, handle))

    def _done(
        self,
        work: Callable[[], T],
        handle: Callable[[T], None],
        result: object,
        error: BaseException | None,
    ) -> None:
        self._take(partial(self._handle, work, handle, result, error))

    def _handle(
        self,
        work: Callable[[], T],
        handle: Callable[[T], None],
        result: object,
        error: BaseException | None,
    ) -> None:
        """Handles the end of a read. One without a free descriptor is done again, because that says
        nothing of the disk."""
        self._touch()
        if error is None:
            handle(cast(T, result))
        elif is_scarce(error):
            logger.error("log_read_waits_for_descriptor error=%r", str(error))
            self._submit(work, handle)
        else:
            self._on_failed("log_read_failed", error)

    def _take(self, result: Callable[[], None]) -> None:
        """Handles a result now, or in a later iteration if those of this one took their time."""
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
        """Handles what waits, in the next iteration."""
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
        """Runs `work` in the thread, so that no read runs at the same time."""
        return await run_in(self._pool, work)

    def close(self) -> None:
        """Finishes the submitted reads and stops the thread."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._pool.close()

"""Paces replays beside live messages.

A read of 500 records keeps the interpreter busy for about a millisecond, and a replay at full speed
leaves no gap between two reads. Each live publish then waits for the interpreter three times: when
it arrives, when its group is on disk, and when the loop releases its acknowledgement. So while
clients publish, a read of a replay is small, and a pause precedes the delivery of its result.
"""

from typing import Final

from holdfast.log.reading.cursor import ReadResult
from holdfast.node.delivery.log_replay import READ_RECORDS_MAX

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
    publishes."""

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

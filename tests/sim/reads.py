"""The reader of a process' log: `io.event_loop.log_reads` without its thread."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.log.reading.cursor import LogReader, ReadResult
from holdfast.log.reading.starts import FoundStart
from holdfast.node.effects import FetchInflight, FindStarts, Found, ReadLog
from holdfast.node.replicate.effects import ReadBatches

if TYPE_CHECKING:
    from tests.sim.loop import EventLoop
    from tests.sim.storing import SimDiskThread

READ_S: Final = 0.002
"""The longest read."""


class SimReads:
    def __init__(self, process: "EventLoop", disk: "SimDiskThread", reader: LogReader) -> None:
        self._process = process
        self._disk = disk
        self._reader = reader
        self._chance = process.chance

    def _read(self, work: Callable[[], None]) -> None:
        """Not before the disk answers."""
        self._disk.later(self._chance.random() * READ_S, work)

    def read_log(self, effect: ReadLog, done: Callable[[ReadLog, ReadResult], None]) -> None:
        def work() -> None:
            result = self._reader.read(
                effect.positions,
                effect.limits,
                effect.interests,
                effect.records_max,
                effect.bytes_max,
            )
            self._process.touch()
            done(effect, result)

        self._read(work)

    def fetch(self, effect: FetchInflight, done: Callable[[FetchInflight, Found], None]) -> None:
        def work() -> None:
            found: Found = []
            for packet_id, partition, offset in effect.wanted:
                found.append((packet_id, self._reader.fetch(partition, offset)))
                # A driver may leave out the rest.
                if self._chance.random() < 0.1:
                    break
            self._process.touch()
            done(effect, found)

        self._read(work)

    def find_starts(
        self, effect: FindStarts, done: Callable[[FindStarts, list[FoundStart]], None]
    ) -> None:
        def work() -> None:
            found = [self._reader.starts.find(query, effect.limits) for query in effect.wanted]
            self._process.touch()
            done(effect, found)

        self._read(work)

    def read_batches(
        self, effect: ReadBatches, end: int, done: Callable[[ReadBatches, list[bytes]], None]
    ) -> None:
        def work() -> None:
            found = self._reader.read_batches(effect.partition, effect.start, end, effect.bytes_max)
            self._process.touch()
            done(effect, found)

        self._read(work)

"""The reader of a process' log: `io.event_loop.log_reads` without its thread."""

from collections.abc import Callable, Sequence
from operator import le
from typing import TYPE_CHECKING, Final

from holdfast.log.reading.cursor import LogReader, ReadResult
from holdfast.log.reading.starts import FoundStart
from holdfast.node.effects import FetchInflight, FindStarts, ReadLog
from holdfast.node.metadata.model import DATA
from holdfast.node.replicate.effects import ReadBatches
from holdfast.node.runtime.ports import Found

if TYPE_CHECKING:
    from tests.sim.loop import EventLoop
    from tests.sim.storing import SimDiskThread

READ_S: Final = 0.002
"""The longest read."""


class SimReads:
    def __init__(self, process: "EventLoop", disk: "SimDiskThread", reader: LogReader) -> None:
        self._process = process
        self._disk = disk
        self._own = reader
        self._chance = process.chance

    def _read(self, limits: Sequence[int], work: Callable[[LogReader], None]) -> None:
        """Not before the disk answers, and not before a log has the records below `limits`."""

        def look() -> None:
            reader = self._reader(limits)
            if reader is None:
                self._disk.later(READ_S, look)
            else:
                work(reader)

        self._disk.later(self._chance.random() * READ_S, look)

    def _reader(self, limits: Sequence[int]) -> LogReader | None:
        """The reader of this node's log, or of another node's for one that stores none."""
        host = self._process.host
        if host.role == DATA:
            return self._own
        for other in host.world.data_hosts:
            process = other.process
            if process is not None and all(map(le, limits, process.journal.written)):
                return process.cores.storage.reader
        return None

    def read_log(self, effect: ReadLog, done: Callable[[ReadLog, ReadResult], None]) -> None:
        def work(reader: LogReader) -> None:
            result = reader.read(
                effect.positions,
                effect.limits,
                effect.interests,
                effect.records_max,
                effect.bytes_max,
            )
            self._process.touch()
            done(effect, result)

        self._read(effect.limits, work)

    def fetch(self, effect: FetchInflight, done: Callable[[FetchInflight, Found], None]) -> None:
        def work(reader: LogReader) -> None:
            found: Found = []
            for packet_id, partition, offset in effect.wanted:
                found.append((packet_id, reader.fetch(partition, offset)))
                # A driver may leave out the rest.
                if self._chance.random() < 0.1:
                    break
            self._process.touch()
            done(effect, found)

        limits = [0] * self._process.host.world.settings.partitions
        for _, partition, offset in effect.wanted:
            limits[partition] = max(limits[partition], offset + 1)
        self._read(limits, work)

    def find_starts(
        self, effect: FindStarts, done: Callable[[FindStarts, list[FoundStart]], None]
    ) -> None:
        def work(reader: LogReader) -> None:
            found = [reader.starts.find(query, effect.limits) for query in effect.wanted]
            self._process.touch()
            done(effect, found)

        self._read(effect.limits, work)

    def read_batches(
        self, effect: ReadBatches, end: int, done: Callable[[ReadBatches, list[bytes]], None]
    ) -> None:
        def work(reader: LogReader) -> None:
            found = reader.read_batches(effect.partition, effect.start, end, effect.bytes_max)
            self._process.touch()
            done(effect, found)

        self._read((), work)

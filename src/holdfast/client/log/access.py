"""Reads a log at the admin ports of its nodes."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from holdfast.client.admin_access import AdminAccess
from holdfast.client.admin_connection import NoAnswer, Server
from holdfast.client.log.errors import LogClosed
from holdfast.client.log.reading.offsets import (
    LogGeneration,
    OffsetRange,
    Offsets,
    PartitionBounds,
)
from holdfast.client.log.reading.reader_http import RangeReader
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.servers import Servers
from holdfast.log.columns.chunk import Chunk
from holdfast.log.reading.topic_filter import TopicFilter

if TYPE_CHECKING:
    from holdfast.client.log.lake.records import LakeRows

WAIT_S: Final = 5.0
"""The longest wait at one server for new records. Then all servers are asked, because that one may
have lost the others."""

T = TypeVar("T")
PAUSE_MAX_S: Final = 1.0
"""The longest pause in seconds between two attempts to reach a server."""
Bounds = dict[int, PartitionBounds]


class ReadableLog(Protocol):
    """The log as one cursor reads it."""

    def bounds(self, at_least: Mapping[int, int] | None = None) -> Bounds:
        """Returns the offsets that each partition has. `at_least`: ends seen before."""
        ...

    def generation(self) -> LogGeneration:
        """Returns the generation of the log, as of the last `bounds` or `wait`."""
        ...

    def identity(self) -> str:
        """Returns the identity of the log (`offsets.log_identity`), as of the last `bounds`."""
        ...

    def partitions(self) -> int:
        """Returns the number of partitions of the log, as of the last `bounds`."""
        ...

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """Returns per partition the first offset that is not older than the time."""
        ...

    def read(
        self,
        ranges: Sequence[OffsetRange],
        coverage: Coverage,
        topics: TopicFilter,
        columns: Sequence[str] | None = None,
    ) -> "Iterator[Chunk | LakeRows]":
        """Reads ranges. A chunk is valid until the next one is requested. Rows of a lake have only
        these columns, in their order."""
        ...

    def wait(self, ends: Mapping[int, int], timeout_s: float) -> Bounds | None:
        """Waits until the log has more than these ends of all partitions. None: until the timeout
        no server had news."""
        ...

    def pause(self, seconds: float) -> None:
        """Waits. Raises LogClosed."""
        ...

    def close(self) -> None:
        """Closes the connections."""
        ...

    def interrupt(self) -> None:
        """Ends the read in progress from another thread, which then raises LogClosed."""
        ...


class ServedLog:
    """The log at the admin ports of one broker, or of the nodes of one cluster."""

    def __init__(self, servers: Sequence[Server], access: AdminAccess, wait_s: float) -> None:
        """`wait_s`: the seconds for which a request waits for servers that are away."""
        self._closed = threading.Event()
        self.servers = Servers(servers, access, wait_s, self.pause, PAUSE_MAX_S)
        self._access = access
        self._wait_s = wait_s
        self._reading: RangeReader | None = None

    def bounds(self, at_least: Mapping[int, int] | None = None) -> Bounds:
        """See ReadableLog. Raises AdminError."""
        return self._unless_closed(lambda: self.servers.bounds(at_least))

    def generation(self) -> LogGeneration:
        """See ReadableLog."""
        return self.servers.generation

    def identity(self) -> str:
        """See ReadableLog."""
        return self.servers.identity()

    def partitions(self) -> int:
        """See ReadableLog."""
        return self.servers.partitions

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """See ReadableLog. Raises AdminError."""
        return self._unless_closed(lambda: self.servers.offsets_at(timestamp_us))

    def read(
        self,
        ranges: Sequence[OffsetRange],
        coverage: Coverage,
        topics: TopicFilter,
        columns: Sequence[str] | None = None,
    ) -> Iterator[Chunk]:
        """See ReadableLog. A cursor always passes the same topics. Raises AdminError."""
        if self._reading is None:
            self._reading = RangeReader(
                self.servers.with_log(), topics, self._access, self._wait_s, self.pause
            )
        chunks = self._reading.chunks(ranges, coverage, self.servers.generation.number)
        while True:
            chunk = self._unless_closed(lambda: next(chunks, None))
            if chunk is None:
                return
            yield chunk

    def wait(self, ends: Mapping[int, int], timeout_s: float) -> Bounds | None:
        """See ReadableLog. The server is the one that is read from, so it has the records that it
        announces."""
        server = self.servers.with_log()[0] if self._reading is None else self._reading.server
        known = [ends[partition] for partition in sorted(ends)]
        try:
            found = self._unless_closed(
                lambda: self.servers.bounds_after(known, server, min(timeout_s, WAIT_S))
            )
        except NoAnswer:
            return None
        return found if any(found[p].end > end for p, end in ends.items()) else None

    def close(self) -> None:
        """Closes the connections."""
        self.servers.close()
        if self._reading is not None:
            self._reading.close()

    def interrupt(self) -> None:
        """See ReadableLog."""
        self._closed.set()
        self.servers.interrupt()
        if self._reading is not None:
            self._reading.interrupt()

    def pause(self, seconds: float) -> None:
        """See ReadableLog."""
        if self._closed.wait(seconds):
            raise LogClosed("the cursor was closed")

    def _unless_closed(self, work: Callable[[], T]) -> T:
        """Does a request. Raises LogClosed in place of its failure if the cursor was closed."""
        if self._closed.is_set():
            raise LogClosed("the cursor was closed")
        try:
            return work()
        except NoAnswer:
            if self._closed.is_set():
                raise LogClosed("the cursor was closed") from None
            raise

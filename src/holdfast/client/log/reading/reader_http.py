"""Reads a Spark task's ranges from nodes, for `option("servers", ...)`.

It reads from one node. If that node dies, lags or lacks the wanted records, it continues
at another one, at the exact offset. A node that stores none of the wanted partitions names others,
and these are read, too. The interface is `holdfast.api.log_sender`. The next response
is already under way while one is decoded.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Final

from holdfast.client.admin_access import NO_ACCESS, AdminAccess
from holdfast.client.admin_connection import (
    LOG_SERVERS,
    MISDIRECTED,
    AdminConnection,
    AdminError,
    Busy,
    Misdirected,
    NoAnswer,
    Server,
    addresses_in,
)
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange
from holdfast.client.log.reading.scan import Coverage, find_batch_in
from holdfast.client.log.reading.servers import SERVERS_MAX
from holdfast.log.batch import BATCH_BYTES_MAX
from holdfast.log.columns.chunk import Chunk
from holdfast.log.reading.topic_filter import TopicFilter

PATH: Final = "/api/v1/log/read"
FETCH_BYTES: Final = 4 << 20
"""The bytes that one request asks for. They are about 20,000 rows, the size that Spark reads
fastest, and fit the processor's cache."""
PATIENCE_S: Final = 30.0
"""The least seconds without progress at any server after which the read fails."""
PAUSE_S: Final = 0.05
"""The first pause in seconds after a round over all servers. It doubles up to PAUSE_MAX_S."""
PAUSE_MAX_S: Final = 1.0


@dataclass(frozen=True)
class ReadResponse:
    """One response of a server. Its data is valid until the next response is read."""

    data: memoryview
    next: dict[int, int]
    """The offset per partition up to which this response is complete."""
    passed: list[tuple[int, int, int]]
    """The ranges (partition, start, end) that hold nothing of the wanted topics."""


class LogMovedError(Exception):
    """The server replied 410: its log begins only at these offsets."""

    def __init__(self, first_offsets: dict[int, int]) -> None:
        super().__init__("records were removed by retention")
        self.first_offsets = first_offsets


class LogStream:
    """The responses of one server. It sends a request ahead as soon as it knows where the last
    response ends."""

    def __init__(
        self, server: Server, topics: TopicFilter, access: AdminAccess = NO_ACCESS
    ) -> None:
        self._connection = AdminConnection(server, access=access)
        self._clause = topics.narrowest() if topics else None
        self._requested: list[tuple[int, int, int]] | None = None
        self._generation: int | None = None
        self._buffer = bytearray()

    @property
    def name(self) -> str:
        """The address of the server, for error texts."""
        return self._connection.name

    def close(self) -> None:
        """Closes the connection and forgets the request that was sent ahead."""
        self._connection.close()
        self._requested = None

    def interrupt(self) -> None:
        """Ends the request in progress from another thread."""
        self._connection.interrupt()

    def read(
        self, wanted: list[tuple[int, int, int]], generation: int | None = None
    ) -> ReadResponse:
        """Reads the next response for the wanted ranges (partition, start, end) of a generation.

        If the request sent ahead does not fit them, the connection is closed, because its response
        would come first. Raises NoAnswer, LogMovedError, DataLossError if the log has another
        generation, or AdminError.
        """
        if generation != self._generation:
            self.close()
            self._generation = generation
        if self._requested != wanted:
            if self._requested is not None:
                self.close()
            self._request(wanted)
        self._requested = None
        response = self._connection.receive_usable()
        if response.status != 200:
            raise self._refusal(response)
        length = response.length
        if length is None:
            raise AdminError(f"{self.name}: an answer that does not say how long it is")
        told, passed = self._parse_log_header(response)
        if length > BATCH_BYTES_MAX + FETCH_BYTES:
            raise AdminError(f"{self.name}: an answer of {length} bytes is longer than any batch")
        if len(self._buffer) < length or len(self._buffer) > max(8 * FETCH_BYTES, 4 * length):
            self._buffer = bytearray(max(length, FETCH_BYTES))
        data = memoryview(self._buffer)[:length]
        self._connection.read_into(response, data)
        ahead = [(p, max(start, told.get(p, start)), end) for p, start, end in wanted]
        ahead = [item for item in ahead if item[1] < item[2]]
        if length and ahead:
            self._request(ahead)
        return ReadResponse(data, told, passed)

    def _request(self, wanted: list[tuple[int, int, int]]) -> None:
        request: dict[str, object] = {"ranges": wanted, "bytes": FETCH_BYTES}
        if self._clause is not None:
            request["filters"] = self._clause.filters
            request["prefixes"] = self._clause.prefixes
        if self._generation is not None:
            request["generation"] = self._generation
        self._connection.send_request("POST", PATH, json.dumps(request).encode())
        self._requested = wanted

    def _parse_log_header(
        self, response: HTTPResponse
    ) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        try:
            told = json.loads(response.headers["holdfast-log"])
            following = {int(p): int(offset) for p, offset in told["next"]}
            return following, [(int(p), int(a), int(b)) for p, a, b in told["passed"]]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise AdminError(f"{self.name}: the response has no end offset") from None

    def _refusal(self, response: HTTPResponse) -> Exception:
        body = self._connection.text_of(response)
        if response.status == MISDIRECTED:
            text = self._connection.complaint(PATH, response.status, body)
            return Misdirected(text, addresses_in(response.headers.get(LOG_SERVERS, "")))
        if response.status == 410:
            try:
                return LogMovedError({int(p): int(o) for p, o in json.loads(body)["first_offsets"]})
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
                return AdminError(f"{self.name}: 410 without first_offsets")
        if response.status == 409:
            return DataLossError(
                f"{self.name} was restored during the read, and its log has another generation:"
                " begin the read again"
            )
        return AdminError(self._connection.complaint(PATH, response.status, body))


def read_ranges(
    servers: Sequence[Server],
    ranges: Sequence[OffsetRange],
    coverage: Coverage,
    topics: TopicFilter = TopicFilter(),  # noqa: B008
    access: AdminAccess = NO_ACCESS,
    wait_s: float = 0.0,
    generation: int | None = None,
) -> Iterator[Chunk]:
    """Reads the wanted batches of a generation from the servers.

    The data of a chunk is valid until the next chunk is requested. Missing records raise
    DataLossError, unusable servers AdminError.
    """
    reading = RangeReader(servers, topics, access, wait_s)
    try:
        yield from reading.chunks(ranges, coverage, generation)
    finally:
        reading.close()


class RangeReader:
    """The reads of one task or program: the current server with its connection, and the servers
    that lack the next records."""

    def __init__(
        self,
        servers: Sequence[Server],
        topics: TopicFilter,
        access: AdminAccess = NO_ACCESS,
        wait_s: float = 0.0,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`wait_s`: the seconds without progress after which a read fails, at least PATIENCE_S.
        `pause` waits between two attempts."""
        self._access = access
        self._patience_s = max(PATIENCE_S, wait_s)
        self._pause = pause
        self._servers = list(servers)
        self._partitions: list[int] = []
        self._coverage = Coverage((), fail_on_data_loss=True)
        self._topics = topics
        self._generation: int | None = None
        self._at = 0
        # The indexes of the servers that lack the next records, with the reason.
        self._refused: dict[int, str] = {}
        self._moved: dict[int, int] = {}
        self._pause_s = PAUSE_S
        self._silent_since = time.monotonic()
        self._stream: LogStream | None = None

    def close(self) -> None:
        """Closes the connection. The next read opens another one."""
        if self._stream is not None:
            self._stream.close()

    def interrupt(self) -> None:
        """Ends the request in progress from another thread."""
        stream = self._stream
        if stream is not None:
            stream.interrupt()

    @property
    def server(self) -> Server:
        """The server that is read from."""
        return self._servers[self._at]

    def chunks(
        self, ranges: Sequence[OffsetRange], coverage: Coverage, generation: int | None = None
    ) -> Iterator[Chunk]:
        """Yields the wanted batches until all are found. `generation`: that of the log of which
        they are, or None for a server that does not know it.

        Any progress makes all servers eligible again: a server that lacked one record may have the
        next. The errors are those of `read_ranges`.
        """
        self._partitions = [item.partition for item in ranges]
        self._coverage = coverage
        self._generation = generation
        self._refused.clear()
        self._moved.clear()
        self._silent_since = time.monotonic()
        while not coverage.done:
            before = dict(coverage.next)
            try:
                chunk = self._next()
            except NoAnswer as error:
                if isinstance(error, Busy):
                    # Other readers have the permits of this server. They get done, so waiting for
                    # one has no end, and a job with many tasks does not fail.
                    self._silent_since = time.monotonic()
                self._turn(str(error))
                continue
            except Misdirected as error:
                # Counter-example: the nodes that store the partition now joined after the reader
                # had begun.
                new = [each for each in error.servers if each not in self._servers]
                new = new[: max(0, SERVERS_MAX - len(self._servers))]
                if new:
                    self._servers += new
                    self._silent_since = time.monotonic()
                self._refused[self._at] = str(error)
                self._turn(str(error))
                continue
            if coverage.next != before:
                self._refused.clear()
                self._moved.clear()
                self._pause_s = PAUSE_S
                self._silent_since = time.monotonic()
            if chunk is not None:
                if chunk.positions:
                    yield chunk
                # The consumer of the rows may take long. That time does not count as silence of the
                # servers.
                self._silent_since = time.monotonic()

    def _next(self) -> Chunk | None:
        """Reads one response and returns its wanted batches. Raises NoAnswer, DataLossError
        or AdminError."""
        coverage = self._coverage
        if self._stream is None:
            self._stream = LogStream(self._servers[self._at], self._topics, self._access)
        wanted = [
            (p, coverage.next[p], coverage.end[p])
            for p in self._partitions
            if coverage.next[p] < coverage.end[p]
        ]
        try:
            answer = self._stream.read(wanted, self._generation)
        except LogMovedError as error:
            self._note_moved(error)
            return None
        chunk = Chunk(answer.data)
        coverage.note_passed(answer.passed)
        is_last_word = len(self._refused) == len(self._servers)
        damage = self._scan(chunk, answer, is_last_word=is_last_word)
        progress = any(coverage.next[p] > start for p, start, _ in wanted)
        coverage.forget_passed()
        if progress:
            return chunk
        if damage:
            self._refuse(damage)
        elif all(answer.next.get(p, start) <= start for p, start, _ in wanted):
            behind = ", ".join(f"{end} of partition {p}" for p, _, end in wanted[:5])
            self._turn(
                f"{self._stream.name} has nothing for what was committed before, up to offset "
                f"{behind}"
            )
        else:
            raise AdminError(f"{self._stream.name}: the answer does not contain what it tells")
        return None

    def _scan(self, chunk: Chunk, answer: ReadResponse, *, is_last_word: bool) -> str:
        """Scans a response, and returns its fault, or "" if it has none.

        `is_last_word` means that all servers have refused. Then the records that are missing here
        are lost.
        """
        coverage = self._coverage
        position, length = 0, len(answer.data)
        while True:
            stop = coverage.scan(
                chunk, position, length, limits=answer.next, stop_at_holes=not is_last_word
            )
            whole = stop.position == length
            damage = stop.damage or ("" if whole else "it ends in the middle of a batch")
            if not damage:
                break
            if not is_last_word:
                return f"damaged at {stop.position} of {length} bytes: {damage}"
            following = find_batch_in(answer.data, stop.position + 8)
            if following is None:
                break
            position = following
        for partition, reached in answer.next.items():
            if partition not in coverage.next:
                continue
            coverage.pass_to(partition, reached)
            if coverage.next[partition] < min(reached, coverage.end[partition]):
                if not is_last_word:
                    return f"offset {coverage.next[partition]} of partition {partition} is missing"
                coverage.skip_to(partition, reached, "damaged on every server")
        return ""

    def _note_moved(self, error: LogMovedError) -> None:
        """Notes the offsets that one server has deleted. They are lost only if every server
        refuses, because another server may still have them."""
        coverage = self._coverage
        assert self._stream is not None
        if not any(coverage.next.get(p, o) < o for p, o in error.first_offsets.items()):
            raise AdminError(f"{self._stream.name}: 410 for offsets that it says it has")
        for partition, first in error.first_offsets.items():
            self._moved[partition] = min(first, self._moved.get(partition, first))
        self._refuse("removed by retention")
        if len(self._refused) == len(self._servers):
            for partition, first in self._moved.items():
                if partition in coverage.next:
                    coverage.skip_to(partition, first, "removed by retention")

    def _refuse(self, reason: str) -> None:
        self._refused[self._at] = reason
        if len(self._servers) > 1:
            self._leave()

    def _leave(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._at = (self._at + 1) % len(self._servers)

    def _turn(self, failure: str) -> None:
        """Switches to the next server, with a pause after each round. Raises AdminError after
        the patience without progress."""
        self._leave()
        waited_s = time.monotonic() - self._silent_since
        if waited_s > self._patience_s:
            listing = ", ".join(f"{host}:{port}" for host, port in self._servers)
            raise AdminError(
                f"nothing from {listing} for {waited_s:.0f} s; the last error: {failure}"
            )
        if self._at == 0:
            self._pause(self._pause_s)
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

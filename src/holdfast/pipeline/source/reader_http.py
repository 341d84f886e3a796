"""What a Spark task does with `option("servers", ...)`: reads its ranges from one node, and goes on
at another one, at the exact offset, when that one dies, lags, or has lost what is wanted.

The interface is `holdfast.api.log_sender`. While an answer is decoded the next one is under way.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Final

from holdfast.pipeline.admin_connection import (
    AdminConnection,
    ConnectionFailed,
    Server,
    ServerError,
)
from holdfast.pipeline.source.offsets import OffsetRange
from holdfast.pipeline.source.scan import Chunk, Coverage, find_in
from holdfast.pipeline.source.topic_filter import TopicFilter
from holdfast.storage.record import BATCH_BYTES_MAX

PATH: Final = "/api/v1/log/read"
FETCH_BYTES: Final = 4 << 20
"""Asked for at a time: some 20,000 rows, as Spark reads fastest, and it fits the processor's
cache."""
PATIENCE_S: Final = 30.0
"""So long nothing may come from any server before the read fails."""
PAUSE_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0

Positions = list[tuple[int, int]]


@dataclass(frozen=True)
class ReadResponse:
    """The data is valid until the next answer is taken."""

    data: memoryview
    next: dict[int, int]
    passed: list[tuple[int, int, int]]


class LogMovedError(Exception):
    """410: the log of this server begins at these offsets."""

    def __init__(self, first_offsets: dict[int, int]) -> None:
        super().__init__("records were removed by retention")
        self.first_offsets = first_offsets


class LogStream:
    """The ranges from one server. A request is sent ahead as soon as it is known where the answer
    before ends."""

    def __init__(self, server: Server, topics: TopicFilter) -> None:
        self._connection = AdminConnection(server)
        self._clause = topics.narrowest() if topics else None
        self._asked: list[tuple[int, int, int]] | None = None
        self._buffer = bytearray()

    @property
    def name(self) -> str:
        return self._connection.name

    def close(self) -> None:
        self._connection.close()
        self._asked = None

    def read(self, wanted: list[tuple[int, int, int]]) -> ReadResponse:
        """Raises ConnectionFailed, LogMovedError, ServerError."""
        if self._asked != wanted:
            if self._asked is not None:
                self.close()
            self._ask(wanted)
        self._asked = None
        response = self._connection.answer()
        if response.status != 200:
            raise self._refusal(response)
        length = response.length
        if length is None:
            raise ServerError(f"{self.name}: an answer that does not say how long it is")
        told, passed = self._told(response)
        if length > BATCH_BYTES_MAX + FETCH_BYTES:
            raise ServerError(f"{self.name}: an answer of {length} bytes is longer than any batch")
        if len(self._buffer) < length or len(self._buffer) > max(8 * FETCH_BYTES, 4 * length):
            self._buffer = bytearray(max(length, FETCH_BYTES))
        data = memoryview(self._buffer)[:length]
        self._connection.read_into(response, data)
        ahead = [(p, max(start, told.get(p, start)), end) for p, start, end in wanted]
        ahead = [item for item in ahead if item[1] < item[2]]
        if length and ahead:
            self._ask(ahead)
        return ReadResponse(data, told, passed)

    def _ask(self, wanted: list[tuple[int, int, int]]) -> None:
        request: dict[str, object] = {"ranges": wanted, "bytes": FETCH_BYTES}
        if self._clause is not None:
            request["filters"] = self._clause.filters
            request["prefixes"] = self._clause.prefixes
        self._connection.ask("POST", PATH, json.dumps(request).encode())
        self._asked = wanted

    def _told(self, response: HTTPResponse) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        try:
            told = json.loads(response.headers["holdfast-log"])
            following = {int(p): int(offset) for p, offset in told["next"]}
            return following, [(int(p), int(a), int(b)) for p, a, b in told["passed"]]
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{self.name}: the answer does not tell how far it goes") from None

    def _refusal(self, response: HTTPResponse) -> Exception:
        body = self._connection.text_of(response)
        if response.status == 410:
            try:
                return LogMovedError({int(p): int(o) for p, o in json.loads(body)["first_offsets"]})
            except (KeyError, TypeError, ValueError):
                return ServerError(f"{self.name}: 410 without first_offsets")
        return ServerError(self._connection.complaint(PATH, response.status, body))


def read_ranges(
    servers: Sequence[Server],
    ranges: Sequence[OffsetRange],
    coverage: Coverage,
    topics: TopicFilter = TopicFilter(),  # noqa: B008
) -> Iterator[Chunk]:
    """The wanted batches. A chunk's data is valid until the next one is asked for. Raises
    DataLossError when some are missing, ServerError."""
    return _Reading(servers, ranges, coverage, topics).chunks()


class _Reading:
    def __init__(
        self,
        servers: Sequence[Server],
        ranges: Sequence[OffsetRange],
        coverage: Coverage,
        topics: TopicFilter,
    ) -> None:
        self._servers = list(servers)
        self._partitions = [item.partition for item in ranges]
        self._coverage = coverage
        self._topics = topics
        self._at = 0
        # Places of servers that do not have what comes next, and why.
        self._refused: dict[int, str] = {}
        self._moved: dict[int, int] = {}
        self._pause_s = PAUSE_S
        self._silent_since = time.monotonic()
        self._stream: LogStream | None = None

    def chunks(self) -> Iterator[Chunk]:
        try:
            while not self._coverage.done:
                before = dict(self._coverage.next)
                try:
                    chunk = self._next()
                except ConnectionFailed as error:
                    self._turn(str(error))
                    continue
                if self._coverage.next != before:
                    self._refused.clear()
                    self._moved.clear()
                    self._pause_s = PAUSE_S
                    self._silent_since = time.monotonic()
                if chunk is not None and chunk.positions:
                    yield chunk
                    # What is done with the rows may take its time.
                    self._silent_since = time.monotonic()
        finally:
            if self._stream is not None:
                self._stream.close()

    def _next(self) -> Chunk | None:
        """Raises ConnectionFailed, DataLossError, ServerError."""
        coverage = self._coverage
        if self._stream is None:
            self._stream = LogStream(self._servers[self._at], self._topics)
        wanted = [
            (p, coverage.next[p], coverage.end[p])
            for p in self._partitions
            if coverage.next[p] < coverage.end[p]
        ]
        try:
            answer = self._stream.read(wanted)
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
            raise ServerError(f"{self._stream.name}: the answer does not contain what it tells")
        return None

    def _scan(self, chunk: Chunk, answer: ReadResponse, *, is_last_word: bool) -> str:
        """Returns what is wrong with the answer; "" if nothing is. `is_last_word`: all servers
        have refused, so what is missing here is lost."""
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
            following = find_in(answer.data, stop.position + 8)
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
        """What one server has removed another one may have still."""
        coverage = self._coverage
        assert self._stream is not None
        if not any(coverage.next.get(p, o) < o for p, o in error.first_offsets.items()):
            raise ServerError(f"{self._stream.name}: 410 for offsets that it says it has")
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
        """To the next server; after all of them, with a pause. Raises ServerError."""
        self._leave()
        waited_s = time.monotonic() - self._silent_since
        if waited_s > PATIENCE_S:
            listing = ", ".join(f"{host}:{port}" for host, port in self._servers)
            raise ServerError(
                f"nothing from {listing} for {waited_s:.0f} s; the last error: {failure}"
            )
        if self._at == 0:
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

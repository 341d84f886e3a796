"""Reading a node's log over its admin port: `option("servers", "host:adminport[,host:adminport]")`.

The interface, of which this is the client (offsets are half-open, JSON is UTF-8)::

    GET /api/v1/log
        {"node": id, "partitions": N, "ranges": [[first_offset, high_watermark], ...]}
    GET /api/v1/log/{partition}?start=A&end=B&bytes=M
        200 application/octet-stream: whole raw batches in order that cover the offsets from A up
        to at most B. The first may begin before A, the last may end after B; at least one if
        A < B; about M bytes at most (default 4 MiB)
        410 {"first_offset": X} when A < X: retention has removed the records before X
    GET /api/v1/log/{partition}/offset?timestamp_us=T
        {"offset": O}: the first offset whose record is not older than T

Only committed records are served. A server that does not answer or answers 5xx is passed over for
the next of the list; after ROUNDS rounds over the list the last error is raised.
"""

import json
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any, Final

from holdfast.log.record import BATCH_BYTES_MAX
from holdfast.pipeline.offsets import Bounds, OffsetRange, Offsets
from holdfast.pipeline.scan import Chunk, Coverage

FETCH_BYTES: Final = 4 << 20
"""Asked for at a time."""
CHUNK_BYTES: Final = 4 << 20
CHUNK_RECORDS: Final = 20_000
"""Answers are put together until a chunk has either: small ones would make small Arrow batches."""
TIMEOUT_S: Final = 30.0
"""For connecting and for every read of the socket."""
ROUNDS: Final = 5
PAUSE_S: Final = 0.2
"""Between the first two rounds; it doubles each time."""
ERROR_TEXT_BYTES: Final = 500


class ServerError(Exception):
    """No server gave a usable answer. The text says which server said what."""


class LogMovedError(Exception):
    """410: the log has nothing before `first_offset`."""

    def __init__(self, first_offset: int) -> None:
        super().__init__(f"the log begins at offset {first_offset}")
        self.first_offset = first_offset


class HttpLog:
    """The log of a node, through one kept-alive connection to the first server that works."""

    def __init__(self, servers: Sequence[tuple[str, int]]) -> None:
        self.servers = list(servers)
        self._index = 0
        self._connection: HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def bounds(self) -> dict[int, Bounds]:
        answer = self._get_json("/api/v1/log")
        try:
            return {
                partition: Bounds(int(first), int(end))
                for partition, (first, end) in enumerate(answer["ranges"])
            }
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{self._server()}: /api/v1/log has no usable ranges") from None

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """Per partition the first offset whose record is not older than the time."""
        result: Offsets = {}
        for partition in self.bounds():
            path = f"/api/v1/log/{partition}/offset?timestamp_us={timestamp_us}"
            try:
                result[partition] = int(self._get_json(path)["offset"])
            except (KeyError, TypeError, ValueError):
                raise ServerError(f"{self._server()}: no usable offset at {path}") from None
        return result

    def fetch(self, partition: int, start: int, end: int) -> bytes:
        """Whole batches from the one with `start` on; empty if the server has none in the range.
        Raises LogMovedError, ServerError."""
        path = f"/api/v1/log/{partition}?start={start}&end={end}&bytes={FETCH_BYTES}"
        status, body = self._get(path)
        if status == 410:
            try:
                raise LogMovedError(int(json.loads(body)["first_offset"]))
            except (KeyError, TypeError, ValueError):
                raise ServerError(f"{self._server()}: 410 without first_offset") from None
        if status != 200:
            raise ServerError(self._complaint(path, status, body))
        return body

    def _get_json(self, path: str) -> dict[str, Any]:
        status, body = self._get(path)
        if status != 200:
            raise ServerError(self._complaint(path, status, body))
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerError(f"{self._server()}: the answer to {path} is no JSON object")
        return answer

    def _get(self, path: str) -> tuple[int, bytes]:
        """Status below 500 and body, from the first server that gives one."""
        failure = ""
        pause_s = PAUSE_S
        for round_number in range(ROUNDS):
            if round_number:
                time.sleep(pause_s)
                pause_s *= 2
            for _ in self.servers:
                try:
                    status, body = self._request(path)
                except (OSError, HTTPException) as error:
                    failure = f"{self._server()}: {error or type(error).__name__}"
                else:
                    if status < 500:
                        return status, body
                    failure = self._complaint(path, status, body)
                self.close()
                self._index = (self._index + 1) % len(self.servers)
        raise ServerError(
            f"no answer from {self._listing()} in {ROUNDS} rounds; the last error: {failure}. Is "
            "it the admin port (`holdfast serve --admin ADDR:PORT`), and is it reachable from here?"
        )

    def _request(self, path: str) -> tuple[int, bytes]:
        connection = self._connection
        if connection is None:
            host, port = self.servers[self._index]
            connection = self._connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
        connection.request("GET", path)
        response = connection.getresponse()
        declared = response.length
        if declared is not None and declared > BATCH_BYTES_MAX + FETCH_BYTES:
            raise HTTPException(f"an answer of {declared} bytes is longer than any batch")
        return response.status, response.read()

    def _complaint(self, path: str, status: int, body: bytes) -> str:
        text = body[:ERROR_TEXT_BYTES].decode(errors="replace").strip()
        return f"{self._server()}: {status} to {path}: {text}"

    def _server(self) -> str:
        host, port = self.servers[self._index]
        return f"{host}:{port}"

    def _listing(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.servers)


def read_ranges(
    servers: Sequence[tuple[str, int]], ranges: Sequence[OffsetRange], coverage: Coverage
) -> Iterator[Chunk]:
    """The wanted batches. Raises DataLossError when some are missing, ServerError."""
    log = HttpLog(servers)
    try:
        chunk = Chunk(b"")
        parts: list[bytes] = []
        parts_bytes = 0
        for item in ranges:
            while coverage.next[item.partition] < item.end:
                answer = _fetch(log, item, coverage)
                if not answer:
                    break
                found = Chunk(answer)
                _scan(found, coverage, item)
                chunk.positions.extend(position + parts_bytes for position in found.positions)
                chunk.starts.extend(found.starts)
                chunk.ends.extend(found.ends)
                chunk.records += found.records
                parts.append(answer)
                parts_bytes += len(answer)
                if parts_bytes >= CHUNK_BYTES or chunk.records >= CHUNK_RECORDS:
                    chunk.data = parts[0] if len(parts) == 1 else b"".join(parts)
                    yield chunk
                    chunk, parts, parts_bytes = Chunk(b""), [], 0
        if parts:
            chunk.data = b"".join(parts)
            yield chunk
    finally:
        log.close()


def _fetch(log: HttpLog, item: OffsetRange, coverage: Coverage) -> bytes:
    """The next batches of a range; empty when the log has lost the rest of it."""
    while coverage.next[item.partition] < item.end:
        start = coverage.next[item.partition]
        try:
            answer = log.fetch(item.partition, start, item.end)
        except LogMovedError as error:
            if error.first_offset <= start:
                raise ServerError(f"410 for offset {start}, yet {error}") from None
            coverage.skip_to(item.partition, error.first_offset, "removed by retention")
            continue
        if answer:
            return answer
        # Nothing there: damaged, or this server has not come as far as the one that was asked
        # for the range. Only the former may be skipped.
        bound = log.bounds().get(item.partition)
        if bound is None or bound.end < item.end:
            raise ServerError(
                f"the server has partition {item.partition} up to offset "
                f"{bound.end if bound else 0} only, {item.end} was committed before"
            )
        coverage.skip_to(item.partition, item.end, "damaged on the server")
    return b""


def _scan(chunk: Chunk, coverage: Coverage, item: OffsetRange) -> None:
    before = coverage.next[item.partition]
    stop = coverage.scan(chunk, 0, len(chunk.data))
    if stop.damage or stop.position != len(chunk.data):
        reason = stop.damage or "it ends in the middle of a batch"
        raise ServerError(f"damaged answer for partition {item.partition}: {reason}")
    if coverage.next[item.partition] == before:
        raise ServerError(
            f"the answer for offset {before} of partition {item.partition} does not contain it"
        )

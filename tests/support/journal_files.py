"""A journal in real files, and a real HTTP server over it, for the tests of the pipeline."""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.log.batch import HEADER, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import create, open_to_read
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import Manifest
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.partition import partition_of
from holdfast.log.record import FLAG_AUDIENCE, MESSAGE, Record

TIME_US = 1_790_000_000_000_000
_SERVERS: list[AbstractContextManager["Server"]] = []
"""The servers of `Journal.address`."""


def record(
    topic: str = "t",
    payload: bytes = b"",
    *,
    kind: int = MESSAGE,
    flags: int = 1,
    timestamp_us: int = TIME_US,
    client_id: str = "c",
    producer: str = "",
    producer_epoch: int = 0,
    sequence: int = 0,
    properties: bytes = b"",
    audience: bytes = b"",
) -> Record:
    """A record without partition and offset."""
    return Record(
        0,
        kind,
        flags=flags | FLAG_AUDIENCE if audience else flags,
        timestamp_us=timestamp_us,
        topic=topic.encode(),
        client_id=client_id.encode(),
        producer=producer.encode(),
        producer_epoch=producer_epoch,
        sequence=sequence,
        properties=properties,
        payload=payload,
        audience=audience,
    )


def build(partition: int, base_offset: int, records: Iterable[Record]) -> bytes:
    return builder_of(partition, base_offset, records).build(1)


def builder_of(partition: int, base_offset: int, records: Iterable[Record]) -> BatchBuilder:
    builder = BatchBuilder(partition, base_offset)
    for item in records:
        builder.add(item)
    return builder


@dataclass
class Journal:
    """A data directory as a node writes it, without its lock and snapshots."""

    directory: Path
    partitions: int = 4
    segment_bytes: int = 1 << 20
    indexed: bool = True
    """Write the index of a finished segment."""
    next_offset: list[int] = field(default_factory=list)
    first_offset: list[int] = field(default_factory=list)
    batches: list[bytes] = field(default_factory=list)
    """All that were ever written, in order."""
    sequence: int = 0
    server: "Server | None" = None
    """The server of `address`."""

    def __post_init__(self) -> None:
        self.next_offset = [0] * self.partitions
        self.first_offset = [0] * self.partitions
        self.folder = self.directory / "journal"
        self.folder.mkdir(parents=True)
        self.files = create(OsFileSystem(self.directory), Manifest("n1", self.partitions, ""))
        self.segment = self.folder / f"{0:020d}.log"
        self.segment.touch()
        self.index = ActiveIndex(0, self.next_offset)

    def append(self, partition: int, records: Iterable[Record]) -> bytes:
        if self.segment.stat().st_size >= self.segment_bytes:
            self._start_segment()
        builder = builder_of(partition, self.next_offset[partition], records)
        data = builder.build(1)
        self.index.add_built(self.segment.stat().st_size, len(data), builder)
        with self.segment.open("ab") as file:
            file.write(data)
        self.batches.append(data)
        self.next_offset[partition] += builder.count
        self.sequence += builder.count
        return data

    def _start_segment(self) -> None:
        if self.indexed:
            self.files.write_index(self.index.head.sequence, self.index.encode())
        self.segment = self.folder / f"{self.sequence:020d}.log"
        self.segment.touch()
        self.index = ActiveIndex(self.sequence, self.next_offset)

    def publish(self, topic: str, payload: bytes, **fields: object) -> None:
        """One message in a batch of its own, in the partition of its topic."""
        partition = partition_of(topic.encode(), self.partitions)
        self.append(partition, [record(topic, payload, **fields)])  # type: ignore[arg-type]

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    @property
    def address(self) -> str:
        """The admin port of a server of this journal, which runs until the end of the process."""
        if self.server is None:
            server = serving(self)
            self.server = server.__enter__()
            _SERVERS.append(server)
        return f"127.0.0.1:{self.server.port}"

    def remove_first_segment(self) -> None:
        """What retention does."""
        segment, following = self.segments()[:2]
        for batch in batches_of(segment.read_bytes()):
            self.first_offset[batch.partition] = batch.end_offset
        self.files.write_start(int(following.stem), self.first_offset)
        self.files.remove_segment(int(segment.stem))

    def records(self) -> list[Record]:
        """All that the journal still has, in order, decoded the plain way."""
        return [
            item
            for data in self.batches
            for item in Batch(data).records()
            if item.offset >= self.first_offset[item.partition]
        ]


def batches_of(data: bytes) -> Iterator[Batch]:
    position = 0
    while position < len(data):
        batch = Batch(data, position)
        yield batch
        position += batch.length


@dataclass
class Server:
    """The log part of a node's admin interface. The counters and knobs are for tests."""

    journal: Journal
    port: int = 0
    requests: int = 0
    fail_next: int = 0
    """So many requests are answered 503."""
    batches_per_answer: int = 1_000_000
    node: str = "n1"
    log: str = "n1"
    leads: list[int] = field(default_factory=list)
    sends_to: list[int] = field(default_factory=list)
    """A gateway: the ports of the nodes with the log."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def answer(self, target: str, body: bytes = b"") -> tuple[int, bytes, dict[str, str]]:
        """Status, body, headers."""
        self.requests += 1
        if self.fail_next:
            self.fail_next -= 1
            return 503, b"not ready", {}
        if self.sends_to:
            named = " ".join(f"127.0.0.1:{port}" for port in self.sends_to)
            text = f"this node does not store the log: ask {named}"
            return 421, text.encode(), {"Holdfast-Log-Servers": f"{named} nonsense"}
        url = urlsplit(target)
        journal = self.journal
        if url.path == "/api/v1/log":
            ranges = [
                [first, end]
                for first, end in zip(journal.first_offset, journal.next_offset, strict=True)
            ]
            manifest = open_to_read(journal.directory).manifest
            told = {
                "node": self.node,
                "log": self.log,
                "partitions": journal.partitions,
                "ranges": ranges,
                "leads": self.leads,
                "created": manifest.created or "at first",
                "generation": manifest.log_generation,
                "former": manifest.former,
            }
            return 200, json.dumps(told).encode(), {}
        if url.path == "/api/v1/log/offsets":
            time_us = int(parse_qs(url.query)["timestamp_us"][0])
            offsets = [
                min(
                    (
                        item.offset
                        for item in journal.records()
                        if item.partition == partition and item.timestamp_us >= time_us
                    ),
                    default=journal.next_offset[partition],
                )
                for partition in range(journal.partitions)
            ]
            return 200, json.dumps({"offsets": offsets}).encode(), {}
        if url.path == "/api/v1/log/wait":
            wanted = json.loads(body)
            deadline = time.monotonic() + wanted["wait_ms"] / 1000
            ends = wanted["ends"]
            while not any(map(int.__gt__, journal.next_offset, ends)):
                if self.stopping.wait(0.002) or time.monotonic() > deadline:
                    break
            return self.answer("/api/v1/log")
        if url.path == "/api/v1/pipeline":
            return 200, b"{}", {}
        if url.path == "/api/v1/log/read":
            return self._read(json.loads(body))
        return 404, b"no such page", {}

    def _read(self, request: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        """Only wanted batches, one by one: what a node does where they are rare."""
        journal = self.journal
        starts = {p: start for p, start, _ in request["ranges"]}
        ends = {p: min(end, journal.next_offset[p]) for p, _, end in request["ranges"]}
        first = [[p, journal.first_offset[p]] for p in starts]
        if any(starts[p] < offset for p, offset in first):
            return 410, json.dumps({"first_offsets": first}).encode(), {}
        chosen: list[bytes] = []
        following = dict(starts)
        for data in journal.batches:
            # A node sends damaged batches as they are.
            _, _, _, _, _, p, base, _, count, *_ = HEADER.unpack_from(data)
            if p in starts and base + count > starts[p] and base < ends[p]:
                full = sum(map(len, chosen)) + len(data) > request["bytes"]
                if (chosen and full) or len(chosen) == self.batches_per_answer:
                    break
                chosen.append(data)
                following[p] = min(base + count, ends[p])
        else:
            following = {p: max(starts[p], end) for p, end in ends.items()}
        told = {"next": sorted(following.items()), "passed": []}
        return 200, b"".join(chosen), {"Holdfast-Log": json.dumps(told)}


@contextmanager
def serving(journal: Journal) -> Iterator[Server]:
    server = Server(journal)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body are two writes; without this each answer waits for a delayed ACK.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            status, body, headers = server.answer(self.path, self.rfile.read(length))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.port = http.server_port
    http.daemon_threads = True
    thread = threading.Thread(
        target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        http.shutdown()
        thread.join()
        http.server_close()

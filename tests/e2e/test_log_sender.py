"""Reading the log of a running node over its admin port, as a Spark task does."""

import json
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import holdfast.client.log.reading.reader_http as reader_http
from holdfast.api import log_sender
from holdfast.api.log_plan import Pace
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.servers import Servers
from holdfast.log.columns.decode import decode_rows
from holdfast.log.reading.byte_ranges import Extent
from holdfast.log.reading.topic_filter import Clause, TopicFilter
from holdfast.log.record import MESSAGE, SESSION, Record
from tests.e2e.brokers import Holdfast, one_process
from tests.e2e.conftest import StartHoldfast
from tests.support.journal_files import TIME_US, Journal, record

SETTINGS: dict[str, dict[str, Any]] = {
    "log": {"partitions": 4},
    "log.retention": {"age_s": 0},
}
Row = tuple[int, int, str, bytes]


def fill(journal: Journal, batches: int, seed: int = 1) -> None:
    draw = random.Random(seed)
    for number in range(batches):
        journal.append(
            draw.randrange(journal.partitions),
            [
                record(
                    f"site/{draw.randrange(40)}/{draw.choice('ab')}",
                    b"%d" % number + bytes(draw.randrange(60)),
                    kind=MESSAGE if draw.random() < 0.9 else SESSION,
                    timestamp_us=TIME_US + number,
                )
                for _ in range(draw.randrange(1, 6))
            ],
        )


def filled(directory: Path) -> Journal:
    found = Journal(directory, partitions=4, segment_bytes=20_000)
    fill(found, 600)
    return found


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    return filled(tmp_path_factory.mktemp("journal") / "data")


@pytest.fixture(scope="module")
def node(journal: Journal) -> Iterator[Holdfast]:
    found = Holdfast(journal.directory.parent, SETTINGS, journal.directory)
    found.start()
    yield found
    found.kill()
    assert "Traceback" not in found.log_text(), found.log_text()[-6000:]


def rows(items: list[Record]) -> list[Row]:
    return [
        (item.partition, item.offset, item.topic.decode(), item.payload)
        for item in items
        if item.kind == MESSAGE
    ]


def read(
    ports: list[int],
    ranges: list[OffsetRange],
    topics: TopicFilter = TopicFilter(),  # noqa: B008
    *,
    loss: bool = False,
) -> tuple[list[Row], Coverage]:
    coverage = Coverage(ranges, fail_on_data_loss=not loss)
    found: list[Row] = []
    for chunk in reader_http.read_ranges(
        [("127.0.0.1", port) for port in ports], ranges, coverage, topics
    ):
        for batch in decode_rows(chunk, topics=topics):
            found += [
                (row["partition"], row["offset"], row["topic"], row["payload"])
                for row in batch.to_pylist()
            ]
    assert coverage.done
    return sorted(found), coverage


def everything(journal: Journal) -> list[OffsetRange]:
    return [
        OffsetRange(p, journal.first_offset[p], end) for p, end in enumerate(journal.next_offset)
    ]


@pytest.fixture
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_http, "FETCH_BYTES", 3000)
    monkeypatch.setattr(reader_http, "PAUSE_S", 0.001)


@pytest.mark.usefixtures("small_answers")
def test_every_record_once(journal: Journal, node: Holdfast) -> None:
    expected = sorted(rows(journal.records()))
    assert read([node.admin_port], everything(journal))[0] == expected
    servers = Servers([("127.0.0.1", node.admin_port)])
    bounds = servers.bounds()
    # The node has added records of its own.
    assert all(bounds[p].end >= end for p, end in enumerate(journal.next_offset))
    times = servers.offsets_at(TIME_US + 300)
    servers.close()
    for partition, offset in times.items():
        late = [r for r in journal.records() if r.partition == partition]
        assert offset == min(r.offset for r in late if r.timestamp_us >= TIME_US + 300)
    draw = random.Random(3)
    for _ in range(20):
        ranges = []
        for partition in draw.sample(range(4), draw.randrange(1, 5)):
            start = draw.randrange(journal.next_offset[partition])
            end = draw.randrange(start, journal.next_offset[partition] + 1)
            ranges.append(OffsetRange(partition, start, end))
        wanted = {item.partition: item for item in ranges}
        assert read([node.admin_port], ranges)[0] == [
            row
            for row in expected
            if row[0] in wanted and wanted[row[0]].start <= row[1] < wanted[row[0]].end
        ]


CLAUSES = [
    Clause(("site/7/a",)),
    Clause(("site/7/a", "site/8/b", "no/such")),
    Clause(("site/+/a",)),
    Clause(("site/9/#", "+/1/b")),
    Clause(("#",)),
    Clause(prefixes=("site/1",)),
    Clause(("site/3/a",), ("site/39/",)),
    Clause(("nothing/#",)),
    Clause((), ("x",)),
    Clause(),
]


@pytest.mark.usefixtures("small_answers")
@pytest.mark.parametrize("clause", CLAUSES, ids=str)
def test_the_same_rows_as_filtering_after(journal: Journal, node: Holdfast, clause: Clause) -> None:
    topics = TopicFilter((clause,))
    expected = [row for row in sorted(rows(journal.records())) if clause.matches(row[2])]
    assert read([node.admin_port], everything(journal), topics)[0] == expected
    both = topics.plus([Clause(("site/+/b",))])
    assert read([node.admin_port], everything(journal), both)[0] == [
        row for row in expected if row[2].endswith("/b")
    ]


def test_few_topics_cost_few_bytes(tmp_path: Path, start_holdfast: StartHoldfast) -> None:
    # Batches that are near each other are sent together: these are far between.
    journal = Journal(tmp_path / "sparse", partitions=4, segment_bytes=200_000)
    for _ in range(4):
        journal.publish("rare/topic", b"x")
        for number in range(40):
            journal.append(number % 4, [record(f"common/{number}", bytes(2000))])
    node = start_holdfast(SETTINGS, journal.directory)

    def size_of(topics: TopicFilter) -> int:
        ranges = everything(journal)
        coverage = Coverage(ranges, fail_on_data_loss=True)
        servers = [("127.0.0.1", node.admin_port)]
        return sum(
            len(chunk.data) for chunk in reader_http.read_ranges(servers, ranges, coverage, topics)
        )

    assert size_of(TopicFilter()) > 4 * 40 * 2000
    for clause in (Clause(("rare/topic",)), Clause(("rare/#",)), Clause(prefixes=("rar",))):
        assert size_of(TopicFilter((clause,))) < 4 * 8 * 2000


def test_damage_is_found_and_another_server_helps(
    tmp_path: Path, start_holdfast: StartHoldfast
) -> None:
    journal = filled(tmp_path / "data")
    expected = sorted(rows(journal.records()))
    ranges = everything(journal)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in sorted(journal.directory.rglob("*")):
        target = copy / path.relative_to(journal.directory)
        if path.is_dir():
            target.mkdir()
        else:
            target.write_bytes(path.read_bytes())
    sound = start_holdfast(SETTINGS, copy)
    node = start_holdfast(SETTINGS, journal.directory)
    # Behind its back: it does not look again at what is finished.
    segment = journal.segments()[3]
    data = bytearray(segment.read_bytes())
    data[data.index(b"site/", len(data) // 2)] ^= 0x40
    with segment.open("r+b") as file:
        file.write(data)
    with pytest.raises(DataLossError, match=r"offsets \d+ to \d+ .*: .*wrong checksum"):
        read([node.admin_port], ranges)
    left, coverage = read([node.admin_port], ranges, loss=True)
    assert 0 < coverage.skipped <= 5
    assert set(left) < set(expected)
    assert len(left) >= len(expected) - coverage.skipped
    assert read([node.admin_port, sound.admin_port], ranges)[0] == expected


def test_a_node_that_comes_back(journal: Journal, node: Holdfast) -> None:
    ranges = everything(journal)
    chunks = reader_http.read_ranges(
        [("127.0.0.1", node.admin_port)],
        ranges,
        coverage := Coverage(ranges, fail_on_data_loss=True),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_http, "FETCH_BYTES", 2000)
        records = next(chunks).records
        node.kill()
        node.start()
        records += sum(chunk.records for chunk in chunks)
    assert records == sum(item.records for item in ranges)
    assert coverage.done


def ask(node: Holdfast, body: bytes, *, cut: int = 0) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer; `cut`: the request comes in two pieces."""
    request = (
        f"POST {log_sender.PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    with socket.create_connection(("127.0.0.1", node.admin_port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if cut:
            connection.sendall(request[:cut])
        connection.sendall(request[cut:])
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, data = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(data) if b"json" in head else {"bytes": len(data)}


BAD = [
    b"",
    b"[]",
    b"{}",
    b'{"ranges": 3}',
    b'{"ranges": [[0, 0]]}',
    b'{"ranges": [["0", 0, 1]]}',
    b'{"ranges": [[9, 0, 1]]}',
    b'{"ranges": [[0, -1, 1]]}',
    b'{"ranges": [[0, 0, 1], [0, 1, 2]]}',
    b'{"ranges": [[0, 0, 1]], "bytes": -1}',
    b'{"ranges": [[0, 0, 1]], "filters": ["a/#/b"]}',
    b'{"ranges": [[0, 0, 1]], "prefixes": "a"}',
]


@one_process("the partition has to be at the one with the port")
def test_requests_that_make_no_sense(node: Holdfast) -> None:
    for body in BAD:
        status, answer = ask(node, body)
        assert status == 400, body
        assert answer["error"]
    assert ask(node, b'{"ranges": [[0, 0, 1]]}')[0] == 200
    assert ask(node, b'{"ranges": []}') == (200, {"bytes": 0})


@one_process("the partition has to be at the one with the port")
def test_the_request_may_come_in_pieces(node: Holdfast) -> None:
    body = b'{"ranges": [[0, 0, 10]]}'
    whole = ask(node, body)
    assert whole[0] == 200
    for cut in (1, 7, len(log_sender.FIRST_BYTES), 60, 100):
        assert ask(node, body, cut=cut) == whole


def test_other_requests_go_where_they_went(node: Holdfast) -> None:
    for path in ("/healthz", "/api/v1/log", "/api/v1/log/0?start=0&bytes=100"):
        with urllib.request.urlopen(f"http://127.0.0.1:{node.admin_port}{path}") as answer:
            assert answer.status == 200


def test_a_bound_on_readers(node: Holdfast) -> None:
    def reader() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", node.admin_port), timeout=20)
        connection.sendall(log_sender.FIRST_BYTES)
        return connection

    connections = [reader() for _ in range(log_sender.READERS_MAX + 1)]
    try:
        # One that has sent no whole request makes room, the oldest first.
        connections[0].settimeout(20)
        assert connections[0].recv(100) == b""
    finally:
        for each in connections:
            each.close()


def open_reader(node: Holdfast, *, busy: bool) -> socket.socket:
    """A reader that has had one response. A busy one takes the next response slowly."""
    connection = socket.create_connection(("127.0.0.1", node.admin_port), timeout=20)
    if busy:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    size_bytes = 1 << 26 if busy else 1
    body = json.dumps({"ranges": [[0, 0, 1 << 40]], "bytes": size_bytes}).encode()
    connection.sendall(
        log_sender.FIRST_BYTES + b"HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        b"%d\r\n\r\n" % len(body) + body
    )
    if busy:
        assert connection.recv(1) == b"H"  # It has shown its credentials.
    else:
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        left = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while left:
            left -= len(connection.recv(min(left, 1 << 16)))
    return connection


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Holdfast]:
    """A log that does not fit the buffers of a connection."""
    found = Journal(tmp_path / "data", partitions=4, segment_bytes=1 << 20)
    for number in range(800):
        found.append(number % 4, [record("a", bytes(10_000)) for _ in range(2)])
    node = Holdfast(tmp_path, SETTINGS, found.directory)
    node.start()
    yield node
    node.kill()


@one_process("the permits are those of one")
def test_a_task_waits_for_a_permit(large: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have all of them for longer than a reader waits for a server that is away."""
    monkeypatch.setattr(reader_http, "PATIENCE_S", 0.5)
    ranges = [OffsetRange(p, 0, 400) for p in range(4)]
    others = [open_reader(large, busy=True) for _ in range(log_sender.READERS_MAX)]
    found: list[int] = []

    def task() -> None:
        coverage = Coverage(ranges, fail_on_data_loss=True)
        servers = [("127.0.0.1", large.admin_port)]
        for chunk in reader_http.read_ranges(servers, ranges, coverage):
            found.append(chunk.records)

    thread = threading.Thread(target=task)
    thread.start()
    try:
        thread.join(4)
        assert thread.is_alive()
        assert not found
        others.pop().close()
        thread.join(30)
        assert not thread.is_alive()
        assert sum(found) == 1600
    finally:
        for each in others:
            each.close()


def test_an_idle_reader_makes_room(large: Holdfast) -> None:
    others = [open_reader(large, busy=number > 0) for number in range(log_sender.READERS_MAX)]
    ranges = [OffsetRange(0, 0, 400)]
    try:
        coverage = Coverage(ranges, fail_on_data_loss=True)
        servers = [("127.0.0.1", large.admin_port)]
        chunks = reader_http.read_ranges(servers, ranges, coverage)
        assert sum(chunk.records for chunk in chunks) == 400
        assert others[0].recv(1) == b""
    finally:
        for each in others:
            each.close()


def test_readers_share_a_rate(tmp_path: Path) -> None:
    """Two readers of 8 MB each at 8 MB/s, of which the first 4 MB are not waited for."""
    found = Journal(tmp_path / "data", partitions=4, segment_bytes=1 << 20)
    for number in range(400):
        found.append(number % 4, [record("a", bytes(10_000)) for _ in range(2)])
    settings = {**SETTINGS, "log": {"partitions": 4, "read_bytes_per_s": 8_000_000}}
    node = Holdfast(tmp_path, settings, found.directory)
    node.start()
    try:
        began = time.monotonic()
        ranges = [OffsetRange(p, 0, 200) for p in range(4)]

        def task() -> None:
            coverage = Coverage(ranges, fail_on_data_loss=True)
            servers = [("127.0.0.1", node.admin_port)]
            assert sum(c.records for c in reader_http.read_ranges(servers, ranges, coverage)) == 800

        threads = [threading.Thread(target=task) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert time.monotonic() - began > 1.2
    finally:
        node.kill()


@pytest.mark.parametrize("is_cold", [True, False])
def test_old_segments_leave_the_cache_once_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cold: bool
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(range(256)) * 400)
    dropped: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        log_sender.os, "posix_fadvise", lambda _, at, size, how: dropped.append((at, size, how))
    )
    here, there = socket.socketpair()
    turn = log_sender.Turn()
    with here, there, path.open("rb") as file, turn:
        pace = Pace(lambda: 0)
        extent = Extent(file, 1000, 50_000, is_cold)  # type: ignore[arg-type]
        limits = log_sender.SendLimits(pace, log_sender.OldReads(turn), turn)
        assert log_sender._send(here, extent, time.monotonic() + 10, limits) == 0.0
        here.close()
        data = b"".join(iter(lambda: there.recv(1 << 16), b""))
    assert data == path.read_bytes()[1000:51_000]
    unread = (1000, 50_000, log_sender.os.POSIX_FADV_DONTNEED)
    ahead = [
        (0, 0, how) for how in (log_sender.os.POSIX_FADV_RANDOM, log_sender.os.POSIX_FADV_NORMAL)
    ]
    assert dropped == ([*ahead, unread] if is_cold else [])


def test_old_segments_are_read_in_pieces_by_one_reader_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an fdatasync waits for as much as the kernel reads ahead for each reader."""
    path = tmp_path / "segment"
    path.write_bytes(random.Random(1).randbytes(3_000_000))
    inside = most = 0
    reads: list[tuple[int, int]] = []
    preadv = log_sender.os.preadv

    def read_part(descriptor: int, buffers: list[memoryview], position: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        size = preadv(descriptor, buffers, position)
        reads.append((position, size))
        inside -= 1
        return size

    monkeypatch.setattr(log_sender.os, "preadv", read_part)
    turn = log_sender.Turn()
    limits = log_sender.SendLimits(Pace(lambda: 0), log_sender.OldReads(turn), turn)
    received: dict[int, bytes] = {}

    def send(start: int) -> None:
        here, there = socket.socketpair()
        with there, path.open("rb") as file:
            taking = threading.Thread(
                target=lambda: received.update(
                    {start: b"".join(iter(lambda: there.recv(1 << 16), b""))}
                )
            )
            taking.start()
            extent = Extent(file, start, 2_000_000, is_cold=True)  # type: ignore[arg-type]
            with here, turn:
                log_sender._send(here, extent, time.monotonic() + 60, limits)
            taking.join()

    starts = [0, 200_000, 1_000_000]
    threads = [threading.Thread(target=send, args=(start,)) for start in starts]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    data = path.read_bytes()
    assert received == {start: data[start : start + 2_000_000] for start in starts}
    assert most == 1
    piece = log_sender.OLD_PIECE_BYTES
    assert sorted(reads) == sorted(
        (at, min(piece, start + 2_000_000 - at))
        for start in starts
        for at in range(start, start + 2_000_000, piece)
    )


def test_one_thread_at_a_time_runs_python() -> None:
    """Those that begin together, and one whose request never ends, which keeps none of them."""
    inside = most = 0

    def find_broker() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        inside -= 1

    checks: Any = SimpleNamespace(check=lambda headers, remote: None)
    sender = log_sender.LogSender(find_broker, checks)
    head = log_sender.FIRST_BYTES + b"HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
    clients: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            for received in (head, *[head + b"{}"] * 20):
                clients.append(socket.create_connection(server.getsockname(), timeout=20))
                sender.take_over(server.accept()[0], received)
            for client in clients[1:]:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 503")
        finally:
            sender.close()
            for client in clients:
                client.close()
    assert most == 1


def test_a_rate_is_shared_in_turns() -> None:
    rate = 1000
    pace = Pace(lambda: rate)
    waits = [pace.take(500) for _ in range(4)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert 1.4 < waits[-1] <= 1.5
    rate = 0
    assert pace.take(1 << 40) == 0.0

"""Reading the log of a running node over its admin port, as a Spark task does."""

import json
import random
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import holdfast.client.log.reading.reader_http as reader_http
from holdfast.api import log_sender
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.servers import Servers
from holdfast.log.columns.decode import decode_rows
from holdfast.log.reading.topic_filter import Clause, TopicFilter
from holdfast.log.record import MESSAGE, SESSION, Record
from tests.e2e.brokers import Holdfast
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


def test_requests_that_make_no_sense(node: Holdfast) -> None:
    for body in BAD:
        status, answer = ask(node, body)
        assert status == 400, body
        assert answer["error"]
    assert ask(node, b'{"ranges": [[0, 0, 1]]}')[0] == 200
    assert ask(node, b'{"ranges": []}') == (200, {"bytes": 0})


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

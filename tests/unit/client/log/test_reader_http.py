import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import holdfast.client.admin_connection as admin_connection
import holdfast.client.log.reading.reader_http as reader_http
import holdfast.client.log.reading.servers as servers
from holdfast.client.admin_connection import AdminConnection, AdminError, NoAnswer
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange, PartitionBounds
from holdfast.client.log.reading.reader_http import read_ranges
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.servers import Servers
from holdfast.log.columns.decode import decode_rows
from tests.support.journal_files import TIME_US, Journal, Server, record, serving
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_http, "PAUSE_S", 0.001)
    monkeypatch.setattr(reader_http, "PATIENCE_S", 0.05)
    monkeypatch.setattr(servers, "PAUSE_S", 0.001)
    monkeypatch.setattr(servers, "LAG_WAIT_S", 0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    journal = Journal(tmp_path / "data", partitions=2)
    for index in range(30):
        records = [record("t", b"%d" % index, timestamp_us=TIME_US + index)] * 3
        journal.append(index % 2, records)
    with serving(journal) as found:
        yield found


def unused_port() -> int:
    return free_port()


def read(server: Server, *ranges: OffsetRange, loss: bool = False) -> list[tuple[int, int]]:
    coverage = Coverage(ranges, fail_on_data_loss=not loss)
    rows: list[dict[str, Any]] = []
    for chunk in read_ranges([("127.0.0.1", server.port)], ranges, coverage):
        for batch in decode_rows(chunk):
            rows += batch.to_pylist()
    found = [(row["partition"], row["offset"]) for row in rows]
    in_order = sorted(found)
    # Partitions come mixed, as in the journal, but each in order.
    assert sorted(found, key=lambda place: place[0]) == in_order
    return in_order


@pytest.fixture
def log(server: Server) -> Iterator[Servers]:
    found = Servers([("127.0.0.1", server.port)])
    yield found
    found.close()


def test_bounds_and_times(log: Servers) -> None:
    assert log.bounds() == {0: PartitionBounds(0, 45), 1: PartitionBounds(0, 45)}
    assert log.offsets_at(TIME_US + 10) == {0: 15, 1: 15}
    assert log.offsets_at(TIME_US + 11) == {0: 18, 1: 15}
    assert log.offsets_at(TIME_US + 99) == {0: 45, 1: 45}


@pytest.mark.parametrize("batches_per_answer", [1, 2, 100])
def test_ranges_are_exact(server: Server, batches_per_answer: int) -> None:
    server.batches_per_answer = batches_per_answer
    rows = read(server, OffsetRange(0, 4, 31), OffsetRange(1, 0, 45))
    assert rows == [(0, o) for o in range(4, 31)] + [(1, o) for o in range(45)]


def test_answers_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(server.journal.batches[0])
    monkeypatch.setattr(reader_http, "FETCH_BYTES", 2 * size + 1)
    ranges = [OffsetRange(0, 0, 45)]
    coverage = Coverage(ranges, fail_on_data_loss=True)
    chunks = read_ranges([("127.0.0.1", server.port)], ranges, coverage)
    assert [chunk.records for chunk in chunks] == [6] * 7 + [3]


def test_removed_by_retention(server: Server) -> None:
    server.journal.first_offset[0] = 12
    with pytest.raises(DataLossError, match="offsets 3 to 12 of partition 0"):
        read(server, OffsetRange(0, 3, 20))
    rows = read(server, OffsetRange(0, 3, 20), OffsetRange(1, 0, 2), loss=True)
    assert rows == [(0, o) for o in range(12, 20)] + [(1, 0), (1, 1)]
    assert read(server, OffsetRange(0, 3, 9), OffsetRange(1, 0, 2), loss=True) == [(1, 0), (1, 1)]


def test_damaged_on_the_server(server: Server) -> None:
    lost = {2 * index for index in range(10, 15)}
    server.journal.batches = [b for i, b in enumerate(server.journal.batches) if i not in lost]
    with pytest.raises(DataLossError, match="offsets 30 to 45 of partition 0"):
        read(server, OffsetRange(0, 28, 45))
    rows = read(server, OffsetRange(0, 28, 45), OffsetRange(1, 44, 45), loss=True)
    assert rows == [(0, 28), (0, 29), (1, 44)]


def test_a_server_that_is_behind_is_not_taken_for_loss(server: Server) -> None:
    server.journal.next_offset[0] = 42
    with pytest.raises(AdminError, match="nothing for what was committed before, up to offset 48"):
        read(server, OffsetRange(0, 45, 48), loss=True)


def test_a_server_that_is_not_ready_is_asked_again(log: Servers, server: Server) -> None:
    server.fail_next = 3
    assert log.bounds()[0].end == 45
    assert server.requests == 4


def test_a_server_that_stays_down_is_given_up(log: Servers, server: Server) -> None:
    server.fail_next = 100
    with pytest.raises(AdminError, match=r"no answer from 127.0.0.1:\d+ for \d s.*503"):
        log.bounds()
    assert server.requests == servers.ROUNDS


def test_a_server_that_is_away_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock passes with the pauses: they grow to 10 s, and each later one is logged."""
    now = [0.0]
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        now[0] += pause_s

    monkeypatch.setattr(servers, "PAUSE_S", 0.2)
    monkeypatch.setattr("holdfast.client.log.reading.servers.time.monotonic", lambda: now[0])
    server.fail_next = 12
    log = Servers([("127.0.0.1", server.port)], wait_s=300.0, pause=sleep)
    assert log.bounds()[0].end == 45
    assert (len(pauses), max(pauses)) == (12, 10.0)
    assert len(caplog.messages) == 8
    assert "503" in caplog.messages[0]
    assert "It is tried again in 3 s, for 300 s" in caplog.messages[0]
    server.fail_next = 1000
    with pytest.raises(AdminError, match=r"no answer from .* for 3\d\d s"):
        log.bounds()


def test_the_next_server_is_tried(server: Server) -> None:
    log = Servers([("127.0.0.1", unused_port()), ("127.0.0.1", server.port)])
    assert log.bounds()[0].end == 45
    log.close()


def test_the_servers_that_a_refusal_names_are_read(server: Server, tmp_path: Path) -> None:
    with serving(Journal(tmp_path / "other", partitions=2)) as other:
        other.sends_to = [server.port]
        assert len(read(other, OffsetRange(0, 0, 45))) == 45
        # Of a list without an end, only some are asked.
        other.sends_to = list(range(1000, 1000 + 2 * servers.SERVERS_MAX))
        with pytest.raises(AdminError, match=r"store the log|nothing listens") as failure:
            read(other, OffsetRange(0, 0, 45))
        listed = str(failure.value).split(" for ")[0]
        assert listed.count("127.0.0.1:") == servers.SERVERS_MAX


def test_nobody_listens() -> None:
    with pytest.raises(AdminError, match="is the node running"):
        Servers([("127.0.0.1", unused_port())]).bounds()


def test_a_refusal_is_not_repeated(
    log: Servers, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "answer", lambda target, sent: (404, b"no such page", {}))
    with pytest.raises(AdminError, match="404 to /api/v1/log: no such page"):
        log.bounds()


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"ranges": 3}', b'{"ranges": [[1]]}'])
def test_an_answer_that_is_no_log(
    log: Servers, server: Server, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(server, "answer", lambda target, sent: (200, body, {}))
    with pytest.raises(AdminError):
        log.bounds()


TOLD = {"Holdfast-Log": json.dumps({"next": [[0, 3]], "passed": []})}


@pytest.mark.parametrize("status", [200, 410])
@pytest.mark.parametrize("body", [b"", b"x" * 100, json.dumps({"first_offset": 0}).encode()])
def test_an_answer_that_is_no_batch(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes
) -> None:
    monkeypatch.setattr(server, "answer", lambda target, sent: (status, body, TOLD))
    with pytest.raises((AdminError, DataLossError)):
        read(server, OffsetRange(0, 0, 3))


def test_a_cut_or_changed_answer_is_noticed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = server.journal.batches[0]
    other = server.journal.batches[2]
    changed = batch[:-9] + b"?" + batch[-8:]
    for body in (batch[:-8], changed, other):
        monkeypatch.setattr(server, "answer", lambda target, sent, body=body: (200, body, TOLD))
        with pytest.raises((AdminError, DataLossError)):
            read(server, OffsetRange(0, 0, 3))


class EndlessHandler(BaseHTTPRequestHandler):
    """Answers in chunks that never end, so that no header says how much is to come."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(chunk)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_answer_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers at an admin address decides nothing about this process's memory."""
    monkeypatch.setattr(admin_connection, "ANSWER_BYTES_MAX", 1 << 20)
    with ThreadingHTTPServer(("127.0.0.1", free_port()), EndlessHandler) as endless:
        threading.Thread(target=endless.serve_forever, daemon=True).start()
        try:
            server = ("127.0.0.1", endless.server_port)
            with pytest.raises(NoAnswer, match="an answer of more than 1048576 bytes"):
                AdminConnection(server).get("/", object)
            ranges = [OffsetRange(0, 0, 1)]
            with pytest.raises(AdminError, match="does not say how long it is"):
                list(read_ranges([server], ranges, Coverage(ranges, fail_on_data_loss=True)))
        finally:
            endless.shutdown()

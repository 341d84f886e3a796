"""The reports of a run to the servers of its log."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("pyspark.sql")

from holdfast.api.pipeline.reports import NAME, PipelineReport
from holdfast.client.log.lake.commits import CommitLog
from holdfast_lake.cli.status_reports import StatusReporter, pipeline_name
from holdfast_lake.lake.lake import Lake
from holdfast_lake.source.options import parse
from tests.support.ports import free_port
from tests.unit.lake.lake.test_commits import commit


class Received:
    """The requests to a server that replies with one status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.paths: list[str] = []
        self.reports: list[PipelineReport] = []
        self.arrived = threading.Event()


@contextmanager
def server(status: int = 200) -> Iterator[tuple[str, Received]]:
    received = Received(status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.paths.append(self.path)
            # The route refuses what is not of this type.
            received.reports.append(msgspec.json.decode(body, type=PipelineReport))
            self.send_response(received.status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
            received.arrived.set()

        def log_message(self, *arguments: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{http.server_port}", received
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def lake_of(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"), store="parquet")
    lake.remember({})
    first = commit(1, table="records", rows_total=7, offsets={"0": 9})
    CommitLog(tmp_path / "lake", "records").record(first)
    return lake


def test_a_run_reports_to_a_server_that_replies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = free_port()
    errors = {"readings": "a table that fails"}
    with server() as (address, received):
        source = parse({"servers": f"127.0.0.1:{dead},{address}"})
        with StatusReporter(lake_of(tmp_path), source, errors, trigger_s=0.5, every_s=0.01) as own:
            while len(received.reports) < 3:
                assert received.arrived.wait(20)
                received.arrived.clear()
            own.is_ok = True
    first, last = received.reports[0], received.reports[-1]
    assert [each.state for each in (first, last)] == ["running", "ended"]
    assert (first.trigger_s, first.every_s, first.offsets) == (0.5, 0.01, {"0": 9})
    bronze = next(each for each in first.tables if each.layer == "bronze")
    assert (bronze.name, bronze.rows) == ("records", 7)
    assert first.tables[0].error == "a table that fails"
    name = received.paths[0].partition("name=")[2]
    assert NAME.fullmatch(name)
    assert set(received.paths) == {received.paths[0]}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("status", [404, 403])
def test_a_server_that_takes_no_reports_costs_one_line(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(status) as (address, received):
        reporter = StatusReporter(lake_of(tmp_path), parse({"servers": address}), {}, every_s=0.01)
        with reporter:
            while len(received.reports) < 3:
                assert received.arrived.wait(20)
                received.arrived.clear()
    assert received.reports[-1].state == "failed"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_lake_alone_has_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = lake_of(tmp_path)
    for source in (parse({"lake": str(tmp_path)}), None):
        with StatusReporter(lake, source, {}):
            pass
    assert capsys.readouterr().err == ""


def test_lakes_at_two_places_have_two_names() -> None:
    names = {
        pipeline_name("/data/lake", "a"),
        pipeline_name("/data/lake", "b"),
        pipeline_name("/other/lake", "a"),
        pipeline_name("s3://bucket/lake", "a"),
    }
    assert len(names) == 4
    assert pipeline_name("s3://bucket/lake", "a") == pipeline_name("s3://bucket/lake", "b")
    assert all(NAME.fullmatch(each) for each in [*names, pipeline_name("/ü/" + "x" * 500, "h")])

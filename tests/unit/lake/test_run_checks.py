"""`holdfast pipeline run` finds what is wrong before it starts Spark, and says it in one line."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("pyspark.sql")

from holdfast.cli.main import main
from holdfast.client.log.reading import servers
from holdfast_lake.cli import run as command
from holdfast_lake.lake.engine import locked
from holdfast_lake.lake.lake import Lake
from tests.support.journal_files import Journal, record
from tests.support.ports import free_port
from tests.support.spark_free_lake import no_spark


class SparkStarted(Exception):
    """Raised in place of the start of Spark."""


@pytest.fixture(autouse=True)
def spark_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise SparkStarted

    monkeypatch.setattr(command, "spark_of", start)
    monkeypatch.setattr(servers, "PAUSE_S", 0.01)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a run that is refused."""
    assert main(["pipeline", "run", *words]) == 2
    told = capsys.readouterr().err
    (line,) = told.splitlines()
    return line


@pytest.mark.parametrize("how", [[], ["--continuous"]])
def test_a_source_that_is_no_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    lake = tmp_path / "lake"
    line = refusal(capsys, "--from", str(tmp_path / "none"), "--lake", str(lake), *how)
    assert "give host:adminport of the servers" in line
    line = refusal(capsys, "--from", "a:1", "--option", "x=1", "--lake", str(lake), *how)
    assert "x" in line
    assert not lake.exists()


def test_options_that_a_run_would_not_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = str(tmp_path / "lake")
    line = refusal(capsys, "--from", "127.0.0.1:1", "--lake", lake, "--trigger", "5")
    assert "--trigger is for --continuous" in line
    tables = str(tmp_path / "nothere.py")
    line = refusal(capsys, "--from", "127.0.0.1:1", "--lake", lake, "--tables", tables)
    assert "nothere.py is not there" in line


def test_a_lake_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "data")
    journal.append(0, [record("t", b"1")])
    (tmp_path / "file").touch()
    for place in (str(tmp_path / "file" / "lake"), "/proc/none/lake"):
        line = refusal(capsys, "--from", journal.address, "--lake", place)
        assert place.removesuffix("/lake") in line
        assert "directory" in line


def test_a_server_that_is_down_ends_one_run_and_a_continuous_one_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--from", f"127.0.0.1:{free_port()}", "--lake", str(tmp_path / "lake")]
    assert "nothing listens on 127.0.0.1" in refusal(capsys, *words)
    with pytest.raises(SparkStarted):
        main(["pipeline", "run", "--continuous", *words])


def test_another_run_of_the_lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "data", partitions=1)
    journal.append(0, [record("t", b"1")])
    lake = Lake(tmp_path / "lake", spark=no_spark())
    assert lake.run(["records"], source=journal.address).ok
    words = ["records", "--lake", str(lake.path)]
    with locked(lake.path, ["records"]):
        assert "stop that run first" in refusal(capsys, *words)
    assert main(["pipeline", "run", *words]) == 0  # nothing new
    journal.append(0, [record("t", b"2")])
    with pytest.raises(SparkStarted):
        main(["pipeline", "run", *words])


@pytest.mark.parametrize("how", [[], ["--continuous"]])
def test_another_run_whose_spark_is_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    how: list[str],
) -> None:  # fmt: skip
    journal = Journal(tmp_path / "data", partitions=1)
    journal.append(0, [record("t", b"1")])
    words = ["--from", journal.address, "--lake", str(tmp_path / "lake"), *how]

    def start(*_: Any) -> None:
        assert "stop that run first" in refusal(capsys, *words)
        raise SparkStarted

    monkeypatch.setattr(command, "spark_of", start)
    with pytest.raises(SparkStarted):
        main(["pipeline", "run", *words])


@pytest.mark.parametrize("how", [[], ["--continuous"]])
def test_a_server_that_wants_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("Content-Length", "12")
            self.end_headers()
            self.wfile.write(b"who are you?")

        def log_message(self, format: str, *_: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", free_port()), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["--from", f"127.0.0.1:{server.server_port}", "--lake", str(tmp_path / "lake")]
        line = refusal(capsys, *words, *how)
        server.shutdown()
    assert ": 401 to /api/v1/log" in line
    assert line.endswith("--token-file FILE, the option tokenFile, or the variable HOLDFAST_TOKEN")


def lake_of(journal: Journal, path: Path) -> list[str]:
    """A lake of a log; the words of its next run."""
    journal.publish("a", b"1")
    lake = Lake(path, spark=no_spark())
    assert lake.run(["records"], source=journal.address).errors == {}
    return ["records", "--lake", str(path)]


def test_a_log_that_is_no_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "data")
    words = lake_of(journal, tmp_path / "lake")
    manifest = journal.files.manifest
    journal.files.write_manifest(replace(manifest, created="other"))
    assert "was made from another log" in refusal(capsys, *words)
    # It was restored to its begin.
    former = ((0, (0,) * journal.partitions),)
    journal.files.write_manifest(replace(manifest, generation=3, former=former))
    assert "has messages that the log has lost, because it was restored" in refusal(capsys, *words)
    with pytest.raises(SparkStarted):
        main(["pipeline", "run", *words, "--option", "failOnDataLoss=false"])
    journal.files.write_manifest(manifest)
    journal.segment_bytes = 1
    for number in range(20):
        journal.publish(f"a/{number}", b"2")
    for _ in range(15):
        journal.remove_first_segment()
    assert "were asked for, the log has" in refusal(capsys, *words)

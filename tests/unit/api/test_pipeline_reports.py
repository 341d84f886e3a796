"""The reports of pipelines that a node keeps: bounds, restarts, damaged files."""

from pathlib import Path

import msgspec
import pytest

from holdfast.api.pipeline.reports import (
    FOLDER,
    PIPELINES_MAX,
    PipelineReport,
    PipelineReports,
    StoredReport,
    TableReport,
)
from holdfast.api.pipeline.routes import _lag


def stored(name: str, at_us: int) -> StoredReport:
    tables = [TableReport("records", "bronze", "the log", rows=at_us)]
    report = PipelineReport("/lake", "host", "running", 1, 10.0, tables=tables, offsets={"0": 5})
    return StoredReport(name, at_us, "token t", "n1", report)


def test_a_restart_keeps_the_newest_reports_and_no_more(tmp_path: Path) -> None:
    reports = PipelineReports(tmp_path)
    assert reports.all() == []
    for number in range(PIPELINES_MAX + 5):
        reports.keep(stored(f"lake-{number}", number))
    reports.keep(stored("lake-20", 1000))
    kept = PipelineReports(tmp_path).all()
    assert kept == reports.all()
    assert {each.name for each in kept} == {f"lake-{n}" for n in range(5, PIPELINES_MAX + 5)}
    assert max(each.at_us for each in kept) == 1000
    assert reports.forget("lake-20")
    assert not reports.forget("lake-20")
    assert len(PipelineReports(tmp_path).all()) == PIPELINES_MAX - 1


def test_a_damaged_file_costs_its_own_report_only(tmp_path: Path) -> None:
    PipelineReports(tmp_path).keep(stored("good", 1))
    folder = tmp_path / FOLDER
    (folder / "cut.json").write_bytes(b'{"name":"cut"')
    (folder / "other.json").write_bytes(msgspec.json.encode(stored("another", 1)))
    assert [each.name for each in PipelineReports(tmp_path).all()] == ["good"]


@pytest.mark.parametrize("partition", ["9" * 5000, "4", "-1", "00", "", "\u0663", "x"])
def test_offsets_of_another_log_have_no_lag(partition: str) -> None:
    """A job may report any text as a partition, and the list of all pipelines shows it."""
    assert _lag({"0": 5, partition: 1}, [7, 3, 0, 1]) is None
    assert _lag({"0": 5, "1": 3}, [7, 3, 0, 1]) == 3

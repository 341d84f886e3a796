"""The reports of pipelines that a node keeps: bounds, restarts, damaged files."""

from pathlib import Path

import msgspec

from holdfast.api.pipeline.reports import (
    FOLDER,
    PIPELINES_MAX,
    PipelineReport,
    PipelineReports,
    StoredReport,
    TableReport,
)


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

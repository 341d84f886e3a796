"""Delta tables of lakes that earlier versions wrote, as delta-rs reads them, without Spark."""

import tarfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("deltalake")

import deltalake
from deltalake.transaction import RemoveAction

from holdfast.client.log.lake.commits import Commit, CommitLog
from holdfast.client.log.lake.objects import LakePath, ObjectPath, location
from holdfast.client.log.lake.parquet import partition_in, partition_path
from holdfast_lake.lake.stores import delta
from holdfast_lake.lake.stores.delta import DeltaStore
from tests.support.format_samples import FOLDER
from tests.support.small_s3 import BUCKET, small_s3

ROWS = {
    "records": ("topic", "=", "plant/0"),
    "readings": ("device", "=", "plant/0"),
    "device_hours": ("metric", "=", "v"),
    "quarantine": ("topic", "=", "plant/1"),
}
"""The tables of the kept lake, each with a filter on a column of texts."""


@pytest.fixture(params=["directory", "S3"])
def lake(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LakePath]:
    """A lake of the first version with marks, in a directory and in an object store."""
    with tarfile.open(FOLDER / "0.1.0" / "delta.tar.gz") as kept:
        kept.extractall(tmp_path, filter="data")
    root = tmp_path / "lake"
    if request.param == "directory":
        yield root
        return
    with small_s3(monkeypatch) as s3:
        for path in filter(Path.is_file, root.rglob("*")):
            s3.objects[f"old/{path.relative_to(root).as_posix()}"] = path.read_bytes()
        yield location(f"s3://{BUCKET}/old")


def _table(lake: LakePath, name: str) -> Any:
    options = {"allow_http": "true"} if isinstance(lake, ObjectPath) else None
    return deltalake.DeltaTable(str(lake / name), storage_options=options)


def _count(lake: LakePath, name: str, *filters: tuple[str, str, object]) -> int:
    return int(_table(lake, name).to_pyarrow_table(filters=[*filters] or None).num_rows)


def _apply(lake: LakePath, name: str, store: DeltaStore | None = None) -> Commit:
    last = CommitLog(lake, name).last()
    assert last is not None
    before = None if last.version == 1 else CommitLog(lake, name).read(1)
    (store or DeltaStore(lake)).apply(last, before)
    return last


def test_a_filter_finds_the_rows_of_an_earlier_version(lake: LakePath) -> None:
    """The files had bounds of times alone, by which delta-rs skips all of them."""
    rows = {name: _count(lake, name) for name in ROWS}
    assert {name: _count(lake, name, each) for name, each in ROWS.items()} == dict.fromkeys(ROWS, 0)
    first: dict[str, int] = {}
    for _ in range(2):  # a second process changes nothing
        store = DeltaStore(lake)
        for name in ("records", "readings", "device_hours"):
            _apply(lake, name, store)
        versions = {name: _table(lake, name).version() for name in ROWS}
        assert {name: _count(lake, name) for name in ROWS} == rows
        found = {name: _count(lake, name, each) for name, each in ROWS.items()}
        assert 0 < found["records"] < rows["records"]
        assert 0 < found["readings"] < rows["readings"]
        assert 0 < found["device_hours"] <= rows["device_hours"]
        assert 0 < found["quarantine"] <= rows["quarantine"]
        first = first or versions
        assert versions == first
    assert _count(lake, "records", ("date", "=", date(2026, 9, 21))) == rows["records"]


@pytest.mark.parametrize("lake", ["S3"], indirect=True)
def test_files_that_another_driver_removes_meanwhile_stay_removed(
    lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two drivers run on one lake of an object store. The mend of one reads the table before the
    other merges its files, and writes after it."""
    with_bounds = delta._with_bounds
    removed: list[str] = []

    def while_another_removes(table: Any) -> Any:
        found = with_bounds(table)
        if not removed:
            removed.append(found[0].path)
            _remove(_table(lake, "records"), found[0], CommitLog(lake, "records").last())
        return found

    assert _count(lake, "records") > 0
    monkeypatch.setattr(delta, "_with_bounds", while_another_removes)
    _apply(lake, "records")
    assert len(removed) == 1
    assert pa.table(_table(lake, "records").get_add_actions(flatten=True)).num_rows == 0
    assert _count(lake, "records") == 0


def _remove(table: Any, add: Any, commit: Commit | None) -> None:
    """Removes a file as the next version of another driver does."""
    assert commit is not None
    gone = RemoveAction(
        path=add.path, data_change=True, deletion_timestamp=add.modification_time, size=add.size,
        partition_values=add.partition_values,
    )  # fmt: skip
    mark = deltalake.Transaction(commit.lineage, commit.version + 1)
    table.create_write_transaction(
        [gone], "append", table.schema(), table.metadata().partition_columns,
        commit_properties=deltalake.CommitProperties(app_transactions=[mark]),
    )  # fmt: skip


def test_the_values_of_partitions_are_those_of_the_paths(tmp_path: Path) -> None:
    """A declared partition column may have any text, and no value."""
    for value in ("a b", "50%", "x:y/z=1", "Zürich", "", None):
        partition = {"place": value, "hour": "7"}
        assert partition_in(f"{partition_path(partition)}00000001-0000.parquet") == partition

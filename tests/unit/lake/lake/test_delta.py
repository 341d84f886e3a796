"""Delta tables of lakes that earlier versions wrote, as delta-rs reads them, without Spark."""

import tarfile
from datetime import date
from pathlib import Path

import pytest

deltalake = pytest.importorskip("deltalake")


from holdfast.client.log.lake.commits import CommitLog  # noqa: E402
from holdfast.client.log.lake.parquet import partition_in, partition_path  # noqa: E402
from holdfast_lake.lake.stores.delta import DeltaStore  # noqa: E402
from tests.support.format_samples import FOLDER  # noqa: E402


def _count(lake: Path, name: str, *filters: tuple[str, str, object]) -> int:
    table = deltalake.DeltaTable(lake / name)
    return int(table.to_pyarrow_table(filters=[*filters] or None).num_rows)


def test_a_filter_finds_the_rows_of_an_earlier_version(tmp_path: Path) -> None:
    """The files had bounds of times alone, by which delta-rs skips all of them."""
    with tarfile.open(FOLDER / "0.1.0" / "delta.tar.gz") as kept:
        kept.extractall(tmp_path, filter="data")
    lake = tmp_path / "lake"
    filters = {
        "records": ("topic", "=", "plant/0"),
        "readings": ("device", "=", "plant/0"),
        "device_hours": ("metric", "=", "v"),
        "quarantine": ("topic", "=", "plant/1"),
    }
    rows = {name: _count(lake, name) for name in filters}
    assert {name: _count(lake, name, each) for name, each in filters.items()} == dict.fromkeys(
        filters, 0
    )
    first: dict[str, int] = {}
    for _ in range(2):  # a second process changes nothing
        store = DeltaStore(lake)
        for name in ("records", "readings", "device_hours"):
            last = CommitLog(lake, name).last()
            assert last is not None
            store.apply(last, None if last.version == 1 else CommitLog(lake, name).read(1))
        versions = {name: deltalake.DeltaTable(lake / name).version() for name in filters}
        assert {name: _count(lake, name) for name in filters} == rows
        found = {name: _count(lake, name, each) for name, each in filters.items()}
        assert 0 < found["records"] < rows["records"]
        assert 0 < found["readings"] < rows["readings"]
        assert 0 < found["device_hours"] <= rows["device_hours"]
        assert 0 < found["quarantine"] <= rows["quarantine"]
        first = first or versions
        assert versions == first
    assert _count(lake, "records", ("date", "=", date(2026, 9, 21))) == rows["records"]


def test_the_values_of_partitions_are_those_of_the_paths(tmp_path: Path) -> None:
    """A declared partition column may have any text, and no value."""
    for value in ("a b", "50%", "x:y/z=1", "Zürich", "", None):
        partition = {"place": value, "hour": "7"}
        assert partition_in(f"{partition_path(partition)}00000001-0000.parquet") == partition

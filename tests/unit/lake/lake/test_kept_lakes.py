"""Lakes that this and each earlier version wrote are read, without Spark."""

import tarfile
from pathlib import Path

import pytest

from holdfast.client.log.lake.commits import CommitLog
from holdfast_lake.lake.settings import read_settings
from tests.support.format_samples import FOLDER

ROWS = {"records": 80, "numbered": 72, "per_hour": 16}
"""The rows of two runs over 40 messages each, of which one in ten is no JSON."""


@pytest.mark.parametrize(
    "archive", sorted(FOLDER.glob("*/lake.tar.gz")), ids=lambda path: path.parent.name
)
def test_a_lake_of_each_version(archive: Path, tmp_path: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    with tarfile.open(archive) as kept:
        kept.extractall(tmp_path, filter="data")
    lake = tmp_path / "lake"
    settings = read_settings(lake)
    assert settings is not None
    assert settings.store == "parquet"
    for table, rows in ROWS.items():
        log = CommitLog(lake, table)
        last = log.last()
        assert last is not None
        assert (last.version, last.rows_total) == (2, rows)
        live = log.live(last.version)
        assert sum(file.rows for file in live) == rows
        found = dataset.dataset([str(lake / file.path) for file in live])
        assert found.count_rows() == rows
        columns = {name for name, _ in last.columns} - set(last.partition_by)
        assert columns <= set(found.schema.names)

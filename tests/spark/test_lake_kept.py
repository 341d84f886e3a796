"""A lake of each version goes on where that version left it."""

import tarfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.pipeline import Lake
from tests.support.format_samples import FOLDER
from tests.support.lake_tables import TABLES

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.mark.parametrize(
    "archive", sorted(FOLDER.glob("*/lake.tar.gz")), ids=lambda path: path.parent.name
)
def test_a_lake_goes_on(archive: Path, tmp_path: Path, spark: SparkSession) -> None:
    with tarfile.open(archive) as kept:
        kept.extractall(tmp_path, filter="data")
    lake = Lake(tmp_path / "lake", spark=spark, store="parquet", tables=TABLES)
    before = {name: lake.table(name).count() for name in ("records", "numbered", "per_hour")}
    assert before["records"] == 80
    # A log without anything new: the lake knows what it has read.
    source = {"path": str(tmp_path / "data")}
    lake.run("all", source=source)
    assert {name: lake.table(name).count() for name in before} == before

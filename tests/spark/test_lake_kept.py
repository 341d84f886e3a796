"""A lake of each version goes on where that version left it."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from holdfast.testing import Broker
from holdfast_lake import Lake
from holdfast_lake.tables import TABLES as BUILT_IN
from tests.support.format_samples import FOLDER
from tests.support.journal_files import TIME_US, Journal, record
from tests.support.lake_tables import TABLES
from tests.support.small_s3 import BUCKET, small_s3

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
    with Broker(data=tmp_path / "data", admin=True) as broker:
        source = {"servers": f"{broker.host}:{broker.admin_port}"}
        assert lake.run("all", source=source).errors == {}
    assert {name: lake.table(name).count() for name in before} == before


@pytest.fixture(params=["directory", "S3"])
def delta_lake(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A Delta lake of 0.1.0, in a directory and in an object store."""
    with tarfile.open(FOLDER / "0.1.0" / "delta.tar.gz") as kept:
        kept.extractall(tmp_path, filter="data")
    root = tmp_path / "lake"
    if request.param == "directory":
        yield str(root)
        return
    with small_s3(monkeypatch) as s3:
        for path in filter(Path.is_file, root.rglob("*")):
            s3.objects[f"old/{path.relative_to(root).as_posix()}"] = path.read_bytes()
        yield f"s3://{BUCKET}/old"


def test_a_delta_lake_gets_the_columns_of_this_version(
    delta_lake: str, tmp_path: Path, spark: SparkSession
) -> None:
    """It was made by the package's own tables, before `quality`, `code` and the offsets of clocks.
    Another program reads its tables with the old rows and the new ones."""
    deltalake = pytest.importorskip("deltalake")

    def rows(name: str, *filters: tuple[str, str, object]) -> list[dict[str, Any]]:
        options = {"allow_http": "true"} if "://" in delta_lake else None
        table = deltalake.DeltaTable(f"{delta_lake}/{name}", storage_options=options)
        return list(table.to_pyarrow_table(filters=[*filters] or None).to_pylist())

    names = [table.name for table in BUILT_IN]
    before = {name: rows(name) for name in (*names, "records", "quarantine")}
    assert all("quality" not in row for row in before["readings"])
    assert rows("readings", ("device", "=", "plant/0")) == [], "by its bounds of times alone"
    journal = Journal(tmp_path / "data", partitions=2)
    for number in range(40):  # those that the lake has read
        time_us = TIME_US + number * 1_000_000
        document = {"ts": time_us / 1e6 - number % 2, "seq": number // 2, "v": number}
        payload = b"{oops" if number % 20 == 7 else json.dumps(document).encode()
        journal.append(number % 2, [record(f"plant/{number % 2}", payload, timestamp_us=time_us)])
    bad = b'{"ts":%d,"T":{"Value":9,"StatusCode":2147483648}}' % (TIME_US // 1_000_000 + 60)
    for at_s, payload in ((60, bad), (61, b"21.5 C")):
        journal.append(0, [record("plant/ua", payload, timestamp_us=TIME_US + at_s * 1_000_000)])
    scaled = [record("plant/pv", b'{"A":523,"A_SF":-2}', timestamp_us=TIME_US + 62_000_000)]
    journal.append(0, scaled)
    lake = Lake(delta_lake, spark=spark)
    assert lake.run("all", source={"servers": journal.address}).errors == {}
    own = [row for row in rows("readings") if row["device"] == "plant/0"]
    assert len(rows("readings", ("device", "=", "plant/0"))) == len(own) > 0
    new = {"readings": "quality", "latency": "offset_min_ms", "quarantine": "code"}
    for name, old in before.items():
        found = rows(name)
        column = new.get(name)
        kept_rows = (
            [{key: value for key, value in row.items() if key in old[0]} for row in found]
            if old
            else []
        )
        if name in ("records", "readings", "gaps", "quarantine"):
            # Rows are only ever added. The old ones have nothing in a new column.
            assert all(row in kept_rows for row in old), name
            more = [row for row, part in zip(found, kept_rows, strict=True) if part not in old]
            assert len(more) == len(found) - len(old)
            if column is not None:
                assert [row[column] for row in found if row not in more] == [None] * len(old)
                assert {row[column] for row in more} == {"readings": {0, None},
                                                         "quarantine": {"bad"}}[name]  # fmt: skip
        elif column is not None:
            assert all(column in row for row in found)
    units = {row["device"]: row["unit"] for row in rows("readings") if row["unit"] is not None}
    assert units == {row["device"]: row["unit"] for row in rows("device_hours") if row["unit"]}
    assert units == {"plant/ua": "°C"}
    (last,) = [row for row in rows("readings") if row["quality"] == 0]
    assert (last["device"], last["metric"], last["value_double"]) == ("plant/ua", "T.Value", None)
    # Numbers and their scales are read as in the old rows, until all rows are made again.
    amperes = ("metric", "=", "A")
    assert [row["value_double"] for row in rows("readings", amperes)] == [523.0]
    (hint,) = [each for each in lake.status().hints if "plant/pv" in each]
    assert "A is not multiplied by 10 to the power of A_SF" in hint
    assert lake.rebuild("readings").errors == {}
    (row,) = rows("readings", amperes)
    assert (row["value_double"], row["value_string"]) == (5.23, "523e-2")
    assert not [each for each in Lake(delta_lake, spark=spark).status().hints if "plant/pv" in each]

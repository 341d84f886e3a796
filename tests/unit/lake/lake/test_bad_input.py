"""A lake whose store, files, log or tables are bad: one clear line, nothing lost, and the next run
goes on. Without Spark."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from holdfast.client.log.lake import objects
from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.errors import CredentialsError, LakeError
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import Manifest
from holdfast_lake.lake.lake import Lake
from holdfast_lake.lake.runner import error_text
from tests.support.journal_files import Journal
from tests.support.small_s3 import BUCKET, Refusal, SmallS3, small_s3
from tests.support.spark_free_lake import no_spark, rows

TABLES = ("records", "readings")
RULES = """
from holdfast_lake.tables import readings_table

TABLES = [readings_table()]
{more}
"""


@pytest.fixture
def spark() -> Any:
    return no_spark()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "data", partitions=2)
    publish(journal, 0)
    return journal


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallS3]:
    monkeypatch.setattr(objects, "RETRIES_MAX", 1)
    with small_s3(monkeypatch) as server:
        yield server


def publish(journal: Journal, first: int) -> None:
    for number in range(first, first + 5):
        journal.publish("t/a", json.dumps({"seq": number, "v": number}).encode())


def run(lake: Lake, journal: Journal) -> None:
    assert lake.run(TABLES, source=journal.address).errors == {}


def count(lake: Lake, name: str = "readings") -> int:
    return sum(rows(lake, name).values())


def test_a_token_that_expires_in_the_middle(spark: Any, journal: Journal, s3: SmallS3) -> None:
    """At any request of a run: one line, and a run with another token has each row once."""
    path = f"s3://{BUCKET}/lake"
    run(Lake(path, spark=spark), journal)
    s3.requests = 0
    publish(journal, 5)
    run(Lake(path, spark=spark), journal)
    expected, requests = 10, s3.requests
    for at in range(1, requests, requests // 4):
        publish(journal, expected)
        expected += 5
        end = s3.requests + at
        s3.refuse = lambda *_, end=end: (  # type: ignore[misc]
            Refusal(400, "ExpiredToken") if s3.requests >= end else None
        )
        try:
            errors = Lake(path, spark=spark).run(TABLES).errors
        except CredentialsError as error:
            errors = {"records": error}
        assert errors
        for error in errors.values():
            assert "(ExpiredToken). Renew them" in error_text(error)
            assert "\n" not in error_text(error)
        s3.refuse = lambda *_: None
        lake = Lake(path, spark=spark)
        run(lake, journal)
        assert (count(lake, "records"), count(lake)) == (expected, expected)


def test_a_store_that_forgets_a_commit(spark: Any, journal: Journal, s3: SmallS3) -> None:
    """A run whose commit vanishes stops, and nothing that was there before is lost."""
    path = f"s3://{BUCKET}/lake"
    lake = Lake(path, spark=spark)
    run(lake, journal)
    publish(journal, 5)
    s3.forgets = lambda key: "/_commits/00000002.json" in key
    report = Lake(path, spark=spark).run(TABLES)
    s3.forgets = lambda key: False
    assert "00000002.json was there and is gone" in error_text(report.errors["records"])
    lake = Lake(path, spark=spark)
    run(lake, journal)
    assert (count(lake, "records"), count(lake)) == (10, 10)


def no_file(path: Path) -> None:
    path.unlink()


def half_a_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [no_file, half_a_file])
def test_a_half_written_lake(
    spark: Any, journal: Journal, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Such as one that was copied while a run went on."""
    lake = Lake(tmp_path / "lake", spark=spark)
    assert lake.run(["records"], source=journal.address).ok
    (file,) = (tmp_path / "lake/records").rglob("*.parquet")
    whole = file.read_bytes()
    damage(file)
    try:
        error: BaseException = lake.run(TABLES).errors["readings"]
    except LakeError as missing:
        error = missing
    what = "missing" if damage is no_file else "damaged"
    assert error_text(error).startswith(f"{file} is {what}: ")
    assert "\n" not in error_text(error)
    assert count(lake) == 0
    file.write_bytes(whole)
    run(lake, journal)
    assert count(lake) == 5
    publish(journal, 5)
    assert lake.run(["records"]).ok
    commit = tmp_path / "lake/records/_commits/00000002.json"
    text = commit.read_bytes()
    commit.write_bytes(text[:100])
    with pytest.raises(LakeError, match=r"00000002\.json is damaged: "):
        Lake(tmp_path / "lake", spark=spark).run(TABLES)
    commit.write_bytes(text)
    run(lake, journal)
    assert count(lake) == 10


def test_a_lake_of_a_newer_version(spark: Any, journal: Journal, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake", spark=spark)
    run(lake, journal)
    commit = tmp_path / "lake/readings/_commits/00000001.json"
    text = commit.read_text()
    commit.write_text(text.replace('"format":1', '"format":2'))
    publish(journal, 5)
    with pytest.raises(LakeError, match="has format 2, this version reads 1: use a newer one"):
        Lake(tmp_path / "lake", spark=spark).run(TABLES)
    commit.write_text(text)
    run(lake, journal)
    assert count(lake) == 10


def test_a_log_of_another_broker(spark: Any, journal: Journal, tmp_path: Path) -> None:
    """Offsets of two logs are alike: its rows would follow those of the first one."""
    lake = Lake(tmp_path / "lake", spark=spark)
    run(lake, journal)
    other = Journal(tmp_path / "other", partitions=2)
    create(OsFileSystem(tmp_path / "new"), Manifest("n1", 2, "2026-11-23T10:00:00Z"))
    manifest = tmp_path / "new" / "manifest.json"
    (other.directory / "manifest.json").write_bytes(manifest.read_bytes())
    publish(other, 0)
    publish(other, 5)
    error = lake.run(TABLES, source=other.address).errors["records"]
    assert "was made from another log (" in error_text(error)
    assert f"than that of {other.address} (" in error_text(error)
    assert count(lake, "records") == 5
    # A refused source is forgotten, also by a lake that is opened again, and with equal offsets.
    assert Lake(lake.path, spark=spark).source() == {"servers": journal.address}
    status = Lake(lake.path, spark=spark).backlog(TABLES, {"servers": other.address})
    assert status == (None, "")
    publish(journal, 5)
    run(Lake(lake.path, spark=spark), journal)
    assert count(lake) == 10


def test_a_source_that_is_given_again_keeps_its_options(
    spark: Any, journal: Journal, tmp_path: Path
) -> None:
    lake = Lake(tmp_path / "lake", spark=spark)
    source = {"servers": journal.address, "topics": "other/#"}
    assert lake.run(TABLES, source=source).errors == {}
    assert lake.source_with(None) == source
    assert lake.source_with(journal.address) == source
    assert lake.source_with("127.0.0.1:18083") == {
        "servers": "127.0.0.1:18083", "topics": "other/#"
    }  # fmt: skip


def test_a_table_file_that_raises(spark: Any, journal: Journal, tmp_path: Path) -> None:
    """When it is read: nothing is done. When it makes rows: its table stops, and no other."""
    file = tmp_path / "my_tables.py"
    file.write_text(RULES.format(more="1 / 0"))
    with pytest.raises(LakeError.__bases__[0], match=r"my_tables.py:5: ZeroDivisionError"):
        Lake(tmp_path / "lake", spark=spark, tables=[file])
    assert not (tmp_path / "lake").exists()
    file.write_text(RULES.format(more="def broken(rows): raise ValueError('no\\nway')") + BROKEN)
    lake = Lake(tmp_path / "lake", spark=spark, tables=[file])
    report = lake.run([*TABLES, "broken"], source=journal.address)
    assert list(report.errors) == ["broken"]
    assert error_text(report.errors["broken"]).count("\n") == 0
    assert count(lake) == 5
    publish(journal, 5)
    run(Lake(tmp_path / "lake", spark=spark), journal)
    assert count(lake) == 10
    assert CommitLog(lake.path, "broken").last() is None


BROKEN = """
from holdfast_lake import Column, Table
TABLES.append(Table("broken", "silver", "records", broken, (Column("a", "int", "a"),), "it raises"))
"""


def test_a_table_that_has_read_more_than_there_is(
    spark: Any, journal: Journal, tmp_path: Path
) -> None:
    """Such as one whose source was restored from an older copy: new rows would be taken as read."""
    lake = Lake(tmp_path / "lake", spark=spark)
    run(lake, journal)
    publish(journal, 5)
    run(lake, journal)
    (tmp_path / "lake/records/_commits/00000002.json").unlink()
    error = Lake(tmp_path / "lake", spark=spark).run(["readings"]).errors["readings"]
    assert "has read version 2 of records, which has only 1" in error_text(error)

"""Tables of a lake in Iceberg catalogs (SQL, REST), read by name from programs that know no lake.

The tables are committed without Spark: their rows are made here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

pytest.importorskip("pyspark.sql")
pytest.importorskip("pyiceberg")

from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table as IcebergTable

from holdfast.client.log.lake.commits import ROWS
from holdfast.client.log.lake.files import LakeError
from holdfast.client.log.lake.objects import LakePath, location
from holdfast.client.log.lake.parquet import WriteSpec, write_files
from holdfast_lake.lake.catalog import Catalog
from holdfast_lake.lake.engine import LOCAL_TASK, Engine, Step
from holdfast_lake.lake.registration.iceberg_catalog import schema_of, store_properties
from holdfast_lake.lake.registration.registration import (
    CatalogUpdates,
    register,
    unregister,
)
from holdfast_lake.lake.schema import names_of
from holdfast_lake.lake.settings import (
    LakeSettings,
    Registration,
    read_settings,
    write_settings,
)
from holdfast_lake.lake.stores.store import ParquetStore
from holdfast_lake.lake.table import Column, Table
from tests.support.iceberg_rest import RestCatalogServer, rest_catalog
from tests.support.small_s3 import BUCKET, small_s3

COLUMNS = (
    Column("n", "bigint", "the number", "pieces"),
    Column("time", "timestamp", "when"),
    Column("date", "date", "the day"),
)
DAY = date(2026, 11, 20)
pytestmark = pytest.mark.filterwarnings("ignore:Iceberg scan planning")


def declared(*more: Column) -> Table:
    return Table(
        name="numbers",
        layer="silver",
        source="records",
        build=lambda rows: rows,
        columns=(*COLUMNS[:2], *more, COLUMNS[2]),
        description="Numbers, by the day.",
        keys=("n",),
        partition_by=("date",),
    )


class WrittenLake:
    """A lake with one table, whose commits are made without Spark."""

    def __init__(self, path: LakePath) -> None:
        self.path = path
        source = {"servers": "a:1", "tokenFile": "/secret"}
        write_settings(path, LakeSettings(1, "parquet", source, []))
        self.store = ParquetStore(path)
        self.table = declared()

    @property
    def catalog(self) -> Catalog:
        return Catalog([self.table])

    def commit(self, numbers: Sequence[int], *, day: int = 0, replaced: bool = False) -> None:
        engine = Engine(cast(Any, None), self.path, self.store)
        step = Step(engine, "numbers")
        names = [column.name for column in self.table.columns]
        values: dict[str, list[Any]] = {name: [None] * len(numbers) for name in names}
        values["n"] = list(numbers)
        values["time"] = [1_700_000_000_000_000 + n for n in numbers]
        values["date"] = [date.fromordinal(DAY.toordinal() + day)] * len(numbers)
        kinds = {"time": pa.timestamp("us", "UTC"), "date": pa.date32()}
        arrays = [pa.array(values[name], kinds.get(name, pa.int64())) for name in names]
        spec = WriteSpec(step.stage_directory(ROWS), ("date",), one_file_each=replaced)
        batch = pa.RecordBatch.from_arrays(arrays, names=names)
        texts = [t for b in write_files([batch], spec, LOCAL_TASK) for t in b.column(0).to_pylist()]
        step.staged(ROWS, texts, replaced=replaced)
        gone: list[str] = []
        if replaced and step.last is not None:
            own = engine.log("numbers").live(step.last.version)
            wanted = {str(file.partition) for file in step.files()}
            gone = [file.path for file in own if str(file.partition) in wanted]
            gone = [path for path in gone if path not in {f.path for f in step.files()}]
        columns = names_of(self.table.columns)
        change = "added more bigint" if step.last and len(step.last.columns) < len(names) else ""
        step.commit(revision=1, columns=columns, partition_by=("date",), removed=gone, rows_total=0,
                    change=change)  # fmt: skip

    def update(self) -> dict[str, BaseException]:
        return CatalogUpdates(self.path, self.catalog).update()


@contextmanager
def connection(kind: str, folder: Path) -> Iterator[tuple[Registration, RestCatalogServer | None]]:
    if kind == "sql":
        properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
        yield Registration("plant", "factory", properties), None
        return
    with rest_catalog(folder) as server:
        yield Registration("plant", "factory", {"type": "rest", "uri": server.uri}), server


def listed(registration: Registration) -> IcebergTable:
    catalog = load_catalog(registration.name, **registration.properties)
    return catalog.load_table((registration.namespace, "numbers"))


def numbers(registration: Registration) -> list[int]:
    return sorted(listed(registration).scan().to_arrow()["n"].to_pylist())


@pytest.mark.parametrize("kind", ["rest", "sql"])
def test_a_catalog_follows_the_commits(tmp_path: Path, kind: str) -> None:
    lake = WrittenLake(tmp_path / "lake")
    lake.commit([1, 2], replaced=True)
    with connection(kind, tmp_path) as (registration, _):
        assert dict(register(lake.path, lake.catalog, registration)) == {"numbers": 1}
        assert numbers(registration) == [1, 2]
        # The file of the day is replaced: in a parquet lake by one of the same name and size.
        lake.commit([7, 8], replaced=True)
        lake.commit([9], day=1)
        assert lake.update() == {}
        assert numbers(registration) == [7, 8, 9]
        assert listed(registration).scan("n >= 7").to_arrow().num_rows == 3  # the bounds are new
        assert len(listed(registration).metadata.snapshots) == 2
        assert lake.update() == {}
        assert len(listed(registration).metadata.snapshots) == 2

        lake.table = declared(Column("more", "bigint", "a column that came later"))
        lake.commit([10], day=1)
        assert lake.update() == {}
        table = listed(registration)
        assert table.schema().find_field("more").doc == "a column that came later"
        assert table.schema().find_field("n").doc == "the number [pieces]"
        assert numbers(registration) == [7, 8, 9, 10]
        told = table.properties
        assert (told["comment"], told["holdfast.unit.n"]) == ("Numbers, by the day.", "pieces")
        assert (told["holdfast.made-from"], told["holdfast.log"]) == ("records", "a:1")
        assert "/secret" not in str(table.metadata)
        check_readers(table)

        # A table that is built again has other files and another lineage.
        lake.store.forget("numbers")
        lake.commit([70, 80], replaced=True)
        assert lake.update() == {}
        assert numbers(registration) == [70, 80]

        other = WrittenLake(tmp_path / "other")
        other.commit([5])
        with pytest.raises(LakeError, match=r"is of the lake .*/lake, not of .*/other: choose"):
            list(register(other.path, other.catalog, registration))
        assert other.update() == {}  # the refused registration is not remembered
        found = dict(unregister(lake.path, lake.catalog, Registration("plant", "factory")))
        assert found == {"records": False, "numbers": True}
        settings = read_settings(lake.path)
        assert settings is not None
        assert settings.catalogs == []
    assert any((lake.path / "numbers").rglob("*.parquet"))


def check_readers(table: IcebergTable) -> None:
    """DuckDB, Polars and pandas read the same rows, partition columns too."""
    rows = {(row["n"], row["date"]) for row in table.scan().to_arrow().to_pylist()}
    pandas = table.scan(selected_fields=("n", "date")).to_pandas()
    assert set(zip(pandas["n"], pandas["date"], strict=True)) == rows
    polars, _ = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    assert set(polars.scan_iceberg(table).select("n", "date").collect().iter_rows()) == rows
    duck = table.scan().to_duckdb("numbers")
    assert set(duck.sql("SELECT n, date FROM numbers").fetchall()) == rows


def test_a_catalog_that_fails_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.catalog.rest import RestCatalog

    lake = WrittenLake(tmp_path / "lake")
    lake.commit([1])
    with connection("rest", tmp_path) as (registration, server):
        assert server is not None
        list(register(lake.path, lake.catalog, registration))
        lake.commit([2])
        server.fail_next = 100
        errors = lake.update()
        assert list(errors) == ["catalog plant"]
        assert str(errors["catalog plant"]).startswith("catalog plant: ")
        server.fail_next = 0

        # Another update commits between the look and the commit of this one.
        commit_table = RestCatalog.commit_table
        rivals = [lake.update]

        def late(self: RestCatalog, *words: Any) -> Any:
            if rivals:
                rivals.pop()()
            return commit_table(self, *words)

        monkeypatch.setattr(RestCatalog, "commit_table", late)
        assert lake.update() == {}
        assert not rivals
        assert numbers(registration) == [1, 2]


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    lake = WrittenLake(tmp_path / "lake")
    for properties in ({"token": "x"}, {"uri": "postgresql://u:secret@h/db"}):
        with pytest.raises(LakeError, match=r"has a secret.*PYICEBERG_CATALOG__PLANT__") as raised:
            list(register(lake.path, lake.catalog, Registration("plant", "f", properties)))
        assert "secret@" not in str(raised.value)
    with pytest.raises(LakeError, match="Give --property uri="):
        list(register(lake.path, lake.catalog, Registration("plant", "f")))


def test_types_are_read_without_spark() -> None:
    columns = [
        ("a", "struct<id: string, `odd ``name`: bigint, many: array<decimal(12,3)>>"),
        ("b", "MAP<string, array<timestamp_ntz>>"),
        ("c", "decimal"),
    ]
    a, b, c = (field["type"] for field in schema_of(columns)["fields"])
    assert [(field["name"], field["id"]) for field in a["fields"]] == [
        ("id", 2), ("odd `name", 3), ("many", 4)
    ]  # fmt: skip
    assert a["fields"][2]["type"]["element"] == "decimal(12, 3)"
    assert (b["key"], b["value"]["element"], c) == ("string", "timestamp", "decimal(10, 0)")
    for text in ("interval day", "struct<a: int", "array<>", "int)", "", "array<" * 99 + "int"):
        with pytest.raises(LakeError, match="column x has the type"):
            schema_of([("x", text)])


@pytest.mark.parametrize("kind", ["sql", "rest"])
def test_a_lake_in_an_object_store(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is read where the lake has it, by the name that the lake has."""
    with small_s3(monkeypatch) as s3, connection(kind, tmp_path) as (wanted, _):
        lake = WrittenLake(location(f"s3://{BUCKET}/plant"))
        lake.commit([1, 2])
        assert list(register(lake.path, lake.catalog, wanted)) == [("numbers", 1)]
        lake.commit([3], day=1)
        assert lake.update() == {}
        table = load_catalog(
            wanted.name, **store_properties(lake.path), **wanted.properties
        ).load_table((wanted.namespace, "numbers"))
        assert sorted(table.scan().to_arrow()["n"].to_pylist()) == [1, 2, 3]
        if find_spec("duckdb") is not None:
            found = table.scan().to_duckdb("numbers").sql("SELECT n FROM numbers ORDER BY n")
            assert found.fetchall() == [(1,), (2,), (3,)]
        files = {each.file.file_path for each in table.scan().plan_files()}
        assert files == {f"s3://{BUCKET}/{key}" for key in s3.objects if key.endswith(".parquet")}
        assert dict(unregister(lake.path, lake.catalog, wanted))["numbers"]
        assert any(key.endswith(".parquet") for key in s3.objects)

"""Declarations, catalogs and the command line of the pipeline: without Spark."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from holdfast.cli.main import build_parser
from holdfast.client.log.lake.commits import File
from holdfast.client.log.lake.files import LakeError
from holdfast_lake.cli.options import duration_s
from holdfast_lake.cli.run import stop_on_signals
from holdfast_lake.lake import lake as lakes
from holdfast_lake.lake.catalog import Catalog, load_catalog, load_tables
from holdfast_lake.lake.gold import AffectedGrains, _units_of_files
from holdfast_lake.lake.lake import Lake
from holdfast_lake.lake.settings import source_options
from holdfast_lake.lake.silver import next_files
from holdfast_lake.lake.table import Column, Grain, Table, TableError
from holdfast_lake.session import NEEDED, write_package

COLUMNS = (Column("a", "int", "a"), Column("window_start", "timestamp", "w"))


def silver(name: str = "s", source: str = "records", **fields: Any) -> Table:
    return Table(name, "silver", source, lambda rows: rows, COLUMNS, "d", **fields)


def gold(name: str = "g", source: str = "s", **fields: Any) -> Table:
    given = {"keys": ("a",), "grain": Grain.hours(), **fields}
    return Table(name, "gold", source, lambda rows: rows, COLUMNS, "d", **given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: silver("Readings"), "table name 'Readings'"),
        (lambda: silver("records"), "and not records or quarantine"),
        (lambda: replace(silver(), columns=()), "columns are missing"),
        (lambda: replace(silver(), columns=(*COLUMNS, Column("A", "int", ""))), "named twice"),
        (lambda: silver(keys=("b",)), r"keys has \['b'\], no such column"),
        (lambda: silver(partition_by=("b",)), "partition_by has"),
        (lambda: silver(partition_by=("a", "window_start")), "leaves no column"),
        (lambda: silver(grain=Grain.hours()), "grain is for gold"),
        (lambda: gold(grain=None), "needs a grain"),
        (lambda: gold(keys=()), "needs keys"),
        (lambda: gold(grain=Grain.hours("when")), r"the grain needs columns \['when'\]"),
        (lambda: gold(grain=Grain.by()), "the grain needs columns"),
        (lambda: gold(state=COLUMNS), "are for silver tables"),
        (
            lambda: replace(gold(), columns=(*COLUMNS, Column("hour", "int", ""))),
            "is made by the grain",
        ),
        (lambda: replace(silver(), layer="bronze"), "there are silver, gold"),  # type: ignore[arg-type]
        (lambda: replace(silver(), build=1), "build is no function"),  # type: ignore[arg-type]
    ],
)
def test_declarations_that_cannot_work(make: Callable[[], Table], said: str) -> None:
    with pytest.raises(TableError, match=said):
        make()


def test_order_and_choice() -> None:
    catalog = Catalog([gold("g2", "g"), gold(), silver(), silver("s2", "s")])
    assert catalog.names() == ["records", "s", "g", "s2", "g2"]
    assert catalog.chosen(["gold", "bronze"]) == ["records", "g", "g2"]
    assert catalog.chosen(["all"]) == catalog.names()
    assert catalog.chosen(["s2"]) == ["s2"]
    assert catalog.derived_from("g") == ["g", "g2"]
    with pytest.raises(TableError, match="'x' is neither a layer"):
        catalog.chosen(["x"])
    with pytest.raises(TableError, match="there is no table x; there are records, s"):
        catalog.table("x")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([silver(), silver()], "two tables with the name s"),
        ([gold()], "g is made from s, which there is not; there are records, g"),
        ([gold("a", "b"), gold("b", "a")], "a, b are made from one another"),
    ],
)
def test_tables_that_do_not_fit(tables: list[Table], said: str) -> None:
    with pytest.raises(TableError, match=said):
        Catalog(tables)


GOOD = """
from holdfast_lake import Column, Table
mine = Table("mine", "silver", "records", lambda rows: rows, (Column("a", "int", "a"),), "mine")
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (", r"tables.py:1: SyntaxError: '\(' was never closed"),
        ("a = 1\nb = a / 0\n", "tables.py:2: ZeroDivisionError: division by zero"),
        ("import nothing_like_this", "tables.py:1: ModuleNotFoundError: No module named"),
        (GOOD.replace("mine", "Mine"), "tables.py:3: table name 'Mine'"),
        ("a = 1", "makes no Table"),
        ("TABLES = 5", "TABLES is no list"),
        (
            GOOD + "other = Table('other', *(getattr(mine, n) for n in ('layer', 'source', "
            "'build', 'columns', 'description')))\nTABLES = [mine]",
            r"TABLES leaves out the table other \(variable other\). Add it to TABLES, or remove",
        ),
        ("TABLES = [1]", "has something that is no Table"),
    ],
)
def test_a_file_with_a_mistake(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tables.py"
    path.write_text(text)
    with pytest.raises(TableError, match=said):
        load_tables(path)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "tables.py"
    path.write_text(GOOD + "again = mine\n")
    assert [table.name for table in load_tables(path)] == ["mine"]
    with pytest.raises(TableError, match="is no Python file with tables"):
        load_tables(tmp_path)
    with pytest.raises(TableError, match=r"nothing\.py is not there"):
        load_tables(tmp_path / "nothing.py")
    path.write_text(GOOD.replace("mine", "readings"))
    catalog = load_catalog([path])
    assert catalog.table("readings").description == "readings"
    assert len(catalog.tables) == len(load_catalog().tables)


@pytest.mark.parametrize("given", ["ftp://bucket/lake", "kafka://bucket", "hdfs://host:1/lake"])
def test_a_lake_at_a_url_is_refused(given: str) -> None:
    scheme = given.partition(":")[0]
    for path in (given, Path(given), Path(given).absolute()):
        with pytest.raises(LakeError, match=f"the lake {scheme}://... is no directory"):
            Lake(path)
    with pytest.raises(LakeError, match=r"s3://... is no directory .* Give, as a text"):
        Lake(Path("s3://bucket/lake"))
    for source in ("kafka://127.0.0.1/topic", "/data/n1"):
        with pytest.raises(LakeError, match=f"the source is '{source}': give host:adminport"):
            source_options(source)


def test_packages() -> None:
    assert {table.name for table in load_tables("holdfast_lab")} == {
        table.name for table in load_catalog(["holdfast_lab"]).tables.values()
    } - set(load_catalog().tables)
    with pytest.raises(TableError, match="is no Python file or package: No module named"):
        load_catalog(["no_such_package"])
    with pytest.raises(TableError, match=r"holdfast_lab\.log makes no Table"):
        load_tables("holdfast_lab.log")


def test_tables_that_come_with_it() -> None:
    catalog = load_catalog(["holdfast_lab"])
    assert {"readings", "device_minutes", "availability"} <= set(catalog.tables)
    for table in catalog.tables.values():
        assert table.description
        assert all(column.description for column in table.columns), table.name


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("127.0.0.1:8080", {"servers": "127.0.0.1:8080"}),
        ("a:1, [::1]:2", {"servers": "a:1, [::1]:2"}),
    ],
)
def test_sources(text: str, options: dict[str, str]) -> None:
    assert source_options(text) == options


def test_lakes_that_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LakeError, match="there is no store 'x'"):
        Lake(tmp_path / "new", store="x")
    with pytest.raises(LakeError, match=r"has \* \{: choose another directory"):
        Lake(tmp_path / "a*{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(LakeError, match="is no lake: it has files"):
        Lake(tmp_path / "other")
    with pytest.raises(LakeError, match="is no directory"):
        Lake(tmp_path / "other/file")
    (tmp_path / "old").mkdir()
    settings = tmp_path / "old" / lakes.SETTINGS
    for text, said in (("{", "is damaged"), ('{"format": 9}', "another version")):
        settings.write_text(text)
        with pytest.raises(LakeError, match=said):
            Lake(tmp_path / "old")
    settings.write_text('{"format": 1, "store": "delta", "source": {}}')
    with pytest.raises(LakeError, match="is kept as delta, not parquet"):
        Lake(tmp_path / "old", store="parquet")
    assert Lake(tmp_path / "old").store_name == "delta"
    with pytest.raises(LakeError, match="records is not built again"):
        Lake(tmp_path / "old").rebuild("records")


def files(*versions: int, rows: int = 10) -> list[File]:
    return [
        File(path=f"{n}", rows=rows, bytes=1, version=version) for n, version in enumerate(versions)
    ]


def test_steps_take_whole_commits() -> None:
    live = files(1, 2, 2, 2, 3, 7)
    for after, rows_max, versions in (
        (0, 1, [1]),
        (1, 1, [2, 2, 2]),
        (0, 40, [1, 2, 2, 2]),
        (0, 41, [1, 2, 2, 2, 3]),
        (3, 1000, [7]),
        (7, 1000, []),
    ):
        taken, upto = next_files(live, after, rows_max)
        assert [file.version for file in taken] == versions
        assert upto == (versions[-1] if versions else after)


def test_files_of_touched_grains() -> None:
    def file(first: float, last: float) -> File:
        times = {"event_time": (int(first * 3.6e9), int(last * 3.6e9))}
        return File(path="", rows=1, bytes=1, version=1, times=times)

    touched = AffectedGrains(Grain.hours(before=1), [10, 20])
    assert touched.of_source().values == [9, 10, 19, 20]
    cases = {
        (10, 10.5): True,
        (0, 9.999): False,
        (11, 19.99): False,
        (5, 30): True,
        (20.9, 21): True,
    }
    for (first, last), expected in cases.items():
        assert touched.has_file(file(first, last)) is expected
    assert not touched.has_file(replace_times(file(1, 2)))
    by = AffectedGrains(Grain.by("run"), [("a",), (7,)])
    for partition, expected in (({"run": "a"}, True), ({"run": "7"}, True), ({"run": "b"}, False)):
        one = File(path="", rows=1, bytes=1, version=1, partition=dict(partition))
        assert by.has_file(one) is expected
    assert by.has_file(file(1, 2))


def test_grains_that_files_tell() -> None:
    def file(name: str, times: dict[str, tuple[int, int]]) -> File:
        return File(path=name, rows=1, bytes=1, version=1, times=times)

    hour = 3_600_000_000
    one = file("one", {"event_time": (7 * hour, 8 * hour - 1)})
    two = file("two", {"event_time": (7 * hour, 8 * hour)})
    before_1970 = file("old", {"event_time": (-1, -1)})
    without = file("null", {"store_time": (0, 0)})
    files = [one, two, before_1970, without]
    known, unknown = _units_of_files(Grain.hours(), files, 1)
    assert known == {7, -1}
    assert unknown == [two]
    known, unknown = _units_of_files(Grain.hours(), files, 2)
    assert known == {7, 8, -1}
    assert not unknown


def replace_times(file: File) -> File:
    return File(path=file.path, rows=1, bytes=1, version=1)


def test_package(tmp_path: Path) -> None:
    import tomllib
    import zipfile

    archive, script = write_package(tmp_path / "out")
    names = zipfile.ZipFile(archive).namelist()
    assert {"holdfast_lake/source/source.py", "pyspark_holdfast/__init__.py"} <= set(names)
    first = archive.read_bytes()
    assert write_package(tmp_path / "out")[0].read_bytes() == first
    compile(script.read_text(), str(script), "exec")
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    declared = " ".join([*project["dependencies"], *project["optional-dependencies"]["spark"]])
    assert all(name.partition("<")[0] in declared for name in NEEDED)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("1s", 1), ("2", 2), ("1.5m", 90), ("1h", 3600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


def test_signals_end_a_run_politely(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[None] = []
    monkeypatch.setattr("holdfast_lake.session.kill_java", lambda: killed.append(None))

    class Fake:
        stopping = False

        def stop(self) -> None:
            self.stopping = True

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    runner = Fake()
    try:
        stop_on_signals(runner)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGTERM)
        assert runner.stopping
        signal.raise_signal(signal.SIGTERM)  # once more changes nothing
        assert killed == []
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert killed == [None]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--trigger", "soon"],
        ["run", "--option", "x"],
        ["run", "--once", "--continuous"],
        ["run", "--max-records-per-trigger", "0"],
        ["rebuild"],
        ["nothing"],
    ],
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser(["pipeline"]).parse_args(["pipeline", *words])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err

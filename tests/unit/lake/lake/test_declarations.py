"""A lake keeps the declarations of its tables, and refuses others."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.files import LakeError
from holdfast_lake.lake.catalog import load_tables
from holdfast_lake.lake.lake import Lake
from tests.unit.lake.lake.test_commits import commit

FILE = """
from holdfast_lake import Column, Grain, Table
from holdfast_lake.tables import Rule, readings_table

LIMIT = 90

def helper(rows):
    return rows.where(f"value_double > {LIMIT}")

hot = Table("hot", "silver", "readings", lambda rows: helper(rows),
            (Column("a", "int", "a"),), "hot")
readings = readings_table((Rule("plant/+/+", device="level 2", units={"t": "kW"}),))
"""


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A lake whose tables readings and hot are stored, by FILE."""
    tables = tmp_path / "my_tables.py"
    tables.write_text(FILE)
    path = tmp_path / "lake"
    Lake(path, tables=[tables]).remember({"servers": "a:1"})
    for name in ("records", "readings", "hot"):
        CommitLog(path, name).record(commit(1, table=name, rows_total=1))
    return path


def given(lake: Path, text: str, name: str = "my_tables.py") -> Lake:
    file = lake.parent / name
    file.write_text(text)
    return Lake(lake, tables=[file])


def test_a_run_without_tables_has_those_of_the_lake(lake: Path) -> None:
    (lake.parent / "my_tables.py").unlink()
    kept = Lake(lake)
    assert "hot" in kept.catalog.tables
    assert kept.catalog.table("readings").build == Lake(lake).catalog.table("readings").build
    kept.check_tables()
    kept.remember({"servers": "b:1"})
    assert "hot" in Lake(lake).catalog.tables


@pytest.mark.parametrize(
    "text",
    [
        FILE,
        FILE.replace("LIMIT = 90", "# by the manual\n\nLIMIT = (90)"),
        FILE + '\nmore = Table("more", "silver", "hot", lambda rows: rows, hot.columns, "more")\n',
    ],
)
def test_declarations_that_make_the_same_rows_are_taken(lake: Path, text: str) -> None:
    same = given(lake, text)
    same.check_tables()
    same.remember({"servers": "a:1"})
    assert list(Lake(lake).catalog.tables) == list(same.catalog.tables)


@pytest.mark.parametrize("name", ["my_tables.py", "new_tables.py"])
@pytest.mark.parametrize(
    ("old", "new", "table", "told"),
    [
        ("LIMIT = 90", "LIMIT = 91", "hot",
         r"hot build: another function \| -LIMIT = 90 \| \+LIMIT = 91"),
        ("value_double >", "value_double <", "hot", "value_double <"),
        ("level 2", "level 3", "readings", r"readings plant/\+/\+ device: 'level 2' -> 'level 3'"),
        ('"kW"', '"MW"', "readings", r"plant/\+/\+ units: {'t': 'kW'} -> {'t': 'MW'}"),
        ('"a", "int"', '"b", "int"', "hot", r"hot columns a is gone \| hot columns b is new"),
        ("readings_table((", "readings_table((Rule('x'), Rule('plant/#'), ", "readings",
         r"Changed: readings x is new \| readings plant/# is new$"),
        ('device="level 2", ', "time=None, zone='Europe/Berlin', ", "readings",
         r"device: 'level 2' -> 'topic' \| .* zone: None -> 'Europe/Berlin' \| .* time: \('ts'"),
    ],
)  # fmt: skip
def test_other_declarations_are_refused_with_what_differs(
    lake: Path, old: str, new: str, table: str, told: str, name: str
) -> None:
    other = given(lake, FILE.replace(old, new), name)
    with pytest.raises(
        LakeError, match=f"^{table} of .* was made by my_tables.py.*{told}"
    ) as found:
        other.check_tables()
    assert f"`holdfast pipeline rebuild {table} --tables FILE`" in str(found.value)
    assert other.check_rebuild([table])[0] == table  # this is the way out
    other.remember({})
    Lake(lake).check_tables()
    given(lake, FILE.replace(old, new), name).check_tables()


def test_a_table_that_a_kept_file_declares_may_be_given_as_an_object(lake: Path) -> None:
    same = load_tables(lake.parent / "my_tables.py")
    opened = Lake(lake, tables=same)
    opened.check_tables()
    assert opened.catalog.table("hot") in same
    other = [replace(each, revision=each.revision + 1) for each in same]
    with pytest.raises(LakeError, match=r"by my_tables\.py, and the given Table declares"):
        Lake(lake, tables=other).check_tables()


def test_one_of_two_changed_tables_is_not_rebuilt_alone(lake: Path) -> None:
    other = given(lake, FILE.replace("level 2", "level 3").replace("90", "91"))
    with pytest.raises(LakeError, match=r"^readings of"):
        other.check_rebuild(["hot"])
    assert {"readings", "hot"} <= set(other.check_rebuild(["readings"]))


def test_rules_for_a_lake_that_was_made_without(tmp_path: Path) -> None:
    Lake(tmp_path / "lake").remember({"servers": "a:1"})
    CommitLog(tmp_path / "lake", "readings").record(commit(1, table="readings"))
    (tmp_path / "x.py").write_text(FILE)
    with pytest.raises(LakeError, match=r"readings of .* was made by the built-in declarations"):
        Lake(tmp_path / "lake", tables=[tmp_path / "x.py"]).check_tables()


def test_a_copy_that_is_missing(lake: Path) -> None:
    (lake / "_tables" / "my_tables.py").unlink()
    with pytest.raises(LakeError, match=r"my_tables\.py is missing: copy the file"):
        Lake(lake)


def test_tables_of_an_empty_log_may_be_declared_anew(tmp_path: Path) -> None:
    """A first run, before QoS 0 is stored, has nothing that other rules could not fit."""
    path = tmp_path / "lake"
    Lake(path).remember({"servers": "a:1"})
    for name in ("records", "readings"):
        CommitLog(path, name).record(commit(1, table=name, rows_total=0))
    tables = tmp_path / "my_tables.py"
    tables.write_text(FILE)
    Lake(path, tables=[tables]).check_tables()
    # Rows that all rules left out are rows all the same: the new rules would not see them.
    CommitLog(path, "records").record(commit(2, table="records", rows_total=1))
    with pytest.raises(LakeError, match="was made by the built-in declarations"):
        Lake(path, tables=[tables]).check_tables()

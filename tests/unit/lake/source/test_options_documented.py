"""Compares docs/source.md with the options and columns of the Spark source."""

import re
from pathlib import Path

import pytest

from holdfast_lake.source.options import COLUMNS, NAMES, TASKS_MAX, parse

PAGE = (Path(__file__).parents[4] / "docs" / "source.md").read_text()


def rows(title: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_option_is_documented() -> None:
    assert [row[0] for row in rows("Options")] == [f"`{name}`" for name in NAMES]
    assert all(len(row) == 4 and all(row) for row in rows("Options"))


def test_defaults_are_documented() -> None:
    defaults = {row[0].strip("`"): row[2] for row in rows("Options")}
    options = parse({"servers": "a:1"})
    assert defaults["failOnDataLoss"] == f"`{options.fail_on_data_loss}`".lower()
    assert defaults["pushFilters"] == f"`{options.push_filters}`".lower()
    assert defaults["columns"] == "all columns"
    assert options.columns == COLUMNS
    assert defaults["maxRecordsPerTrigger"] == "no limit"
    assert options.records_per_trigger_max is None


def test_bounds_are_documented() -> None:
    types = {row[0].strip("`"): row[1] for row in rows("Options")}
    assert types["tasks"] == f"number, 1 to {TASKS_MAX}"


def test_the_options_of_each_example_are_taken() -> None:
    """A misspelled option or a time of another form would cost a reader the start of a Java."""
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    reads = [dict(re.findall(r'\.option\("(\w+)", "([^"]*)"\)', each)) for each in examples]
    lakes = [parse(options).lake for options in reads if options]
    assert lakes == ["", "s3://bucket/plant"]


def test_every_column_is_documented() -> None:
    assert [row[0] for row in rows("Columns")] == [f"`{name}`" for name in COLUMNS]


def test_types_of_columns_are_documented() -> None:
    pytest.importorskip("pyspark.sql")
    from holdfast_lake.source.source import HoldfastSource

    schema = HoldfastSource({"servers": "a:1"}).schema()
    documented = ", ".join(f"{row[0].strip('`')} {row[1].strip('`')}" for row in rows("Columns"))
    assert documented == schema

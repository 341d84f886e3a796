"""docs/limits.md against the configuration and the code: every key of [limits] is there, with its
default, and every constant has the value that the page says."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.api.metrics.catalog import DROPPED, METRICS, REFUSED
from holdfast.config.schema import Config, Limits

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()


def rows() -> Iterator[tuple[str, str]]:
    """(key or constant, value) of each row that names one."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and (found := re.fullmatch(r"`([\w.]+)`", cells[2])):
            yield found[1], cells[3]


ROWS = list(rows())


def shown(value: object) -> str:
    """As TOML has it, digits not grouped."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(("name", "value"), ROWS, ids=[name for name, _ in ROWS])
def test_value(name: str, value: str) -> None:
    *path, last = name.split(".")
    found: object
    if last.isupper():
        top = [] if path[0].startswith("holdfast_") else ["holdfast"]
        found = getattr(importlib.import_module(".".join([*top, *path])), last)
    else:
        found = Config()
        for part in name.split("."):
            found = getattr(found, part)
    assert value.replace("_", "") == shown(found)


@pytest.mark.parametrize("key", [each.name for each in msgspec.structs.fields(Limits)])
def test_every_key_is_on_the_page(key: str) -> None:
    assert f"limits.{key}" in {name for name, _ in ROWS}


def test_metrics_are_there() -> None:
    for name, label in re.findall(r"`holdfast_(\w+?)(?:\{reason=\"(\w+)\"\})?`", PAGE):
        if label:
            assert label in (DROPPED if name == "deliveries_dropped" else REFUSED)
        else:
            assert name in METRICS, name

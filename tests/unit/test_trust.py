"""docs/internals/trust.md: each row names a root of the page, and tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/trust.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith("|---")
]
ROOTS = {row[0] for row in ROWS if len(row) == 2} - {"root"}
FOUND = [row for row in ROWS if len(row) == 3 and row[1] != "root"]


def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_the_page_has_its_tables() -> None:
    assert len(ROOTS) == 12
    assert len(FOUND) > 40
    assert {row[1] for row in FOUND} == ROOTS


@pytest.mark.parametrize("row", FOUND, ids=lambda row: row[0][:40])
def test_the_tests_of_a_row_exist(row: list[str]) -> None:
    path = ""
    names: list[str] = []
    for text in re.findall(r"`([^`]+)`", row[2]):
        if "/" in text:
            path = text
        else:
            assert text in functions_in(path), f"{path} has no {text}"
            names.append(text)
    assert names, "a row without a test"

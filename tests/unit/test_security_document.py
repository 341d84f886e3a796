"""SECURITY.md promises only what a test shows."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_test_that_is_named_is_there() -> None:
    named = NAMED.findall((ROOT / "SECURITY.md").read_text())
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"def {name}(" not in ((ROOT / path).read_text() if (ROOT / path).exists() else "")
    ]
    assert missing == []


def test_every_row_of_a_promise_names_a_test() -> None:
    rows = [
        line
        for line in (ROOT / "SECURITY.md").read_text().splitlines()
        if line.startswith("| ") and line.count("|") == 4
    ]
    heads = ("| attack |", "| what happens |", "| port |")
    bare = [
        row
        for row in rows
        if not row.startswith(heads)
        and not NAMED.search(row)
        and "loopback" not in row
        and not row.endswith("| off |")
    ]
    assert bare == []

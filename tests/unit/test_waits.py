"""Every wait with a time-out is in the list of docs/internals/cluster.md, with what its end
permits."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import source_tree

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
PACKAGES = ("node", *(f"holdfast_federation/{each}" for each in ("core", "manager", "sidecar")))
SECTION = "## Waits with a time-out\n"


@cache
def modules() -> list[tuple[str, ast.Module]]:
    return [
        (name, ast.parse(path.read_text()))
        for package in PACKAGES
        for name, path in source_tree.modules(package)
    ]


def durations(body: list[ast.stmt]) -> Iterator[str]:
    """The constants and the settings in seconds of a module or a class."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from durations(statement.body)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            if isinstance(statement.target, ast.Name):
                yield statement.target.id
        elif isinstance(statement, ast.Assign):
            yield from (each.id for each in statement.targets if isinstance(each, ast.Name))


def section() -> str:
    page = (ROOT / "docs" / "internals" / "cluster.md").read_text()
    return page.partition(SECTION)[2].partition("\n## ")[0]


def test_the_list_has_every_wait() -> None:
    found = {
        f"{name}:{each}"
        for name, module in modules()
        for each in durations(module.body)
        if each.lower().endswith("_s")
    }
    listed = re.findall(r"`([a-z0-9_/]+\.py:\w+)`", section())
    assert len(found) > 90
    assert sorted(listed) == sorted(found)
    assert all(len(row.split("|")) == 5 for row in section().splitlines() if row.startswith("|"))


def test_a_time_out_has_a_name() -> None:
    """A comparison of a time with a number has no entry in the list."""
    found = [
        f"{name}:{node.lineno}"
        for name, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Compare)
        for each in (node.left, *node.comparators)
        if isinstance(each, ast.BinOp)
        and {type(each.left), type(each.right)} == {ast.Attribute, ast.Constant}
        and any(
            isinstance(side, ast.Attribute) and side.attr == "now"
            for side in (each.left, each.right)
        )
    ]
    assert found == []


def test_a_barrier_passes_only_when_every_partition_is_reached() -> None:
    """No method that decides whether a barrier is passed knows the time."""
    path = SOURCE / "node" / "reads" / "read_barrier.py"
    methods = {
        node.name: {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    for name in ("begin", "has_passed", "_is_passed", "_is_reached", "_is_outdated", "advance"):
        assert not methods[name].intersection({"now", "deadline", "wall_us"}), name
    without = {
        name
        for name, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "lacking"
    }
    # The lease closes the connections of sessions of those partitions. A home of groups is opened
    # for QoS 1. A node that lags refuses clients.
    assert without == {
        "node/reads/read_barrier.py",
        "node/ownership/lease.py",
        "node/groups/homes.py",
    }

"""Imports point downwards only, and pure packages stay pure."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"

ALLOWED = {
    "mqtt": {"mqtt"},
    "topics": {"topics"},
    "log": {"log", "topics"},
    "session": {"session", "mqtt", "topics", "log"},
    "security": {"security", "topics"},
    "config": {"config", "topics"},
    "node": {"node", "session", "security", "mqtt", "topics", "log"},
    "websocket": {"websocket"},
    "web": {"web"},
    "federation": {"federation", "mqtt", "topics"},
    "lease": {"lease", "log"},
    "replication": {"replication", "log"},
    "cluster": {
        "cluster", "replication", "node", "session", "security", "mqtt", "topics", "log",
    },
    "sim": {
        "sim", "cluster", "replication", "node", "session", "security", "mqtt", "topics", "log",
        "drivers",
    },
    "drivers": {
        "drivers", "cluster", "replication", "node", "session", "security", "config", "mqtt",
        "topics", "log", "lease", "websocket",
    },
    "client": {"client", "mqtt", "topics", "security", "websocket"},
    "pipeline": {"pipeline", "log", "topics", "client", "mqtt"},
    "topology": {"topology", "client", "mqtt", "security", "config", "web"},
    "federator": {
        "federator", "federation", "topology", "client", "drivers", "node", "session", "security",
        "config", "mqtt", "topics", "log",
    },
    "api": {
        "api", "federator", "federation", "drivers", "cluster", "replication", "node", "session",
        "security", "config", "mqtt", "topics", "log", "lease", "web",
    },
    "cli": {
        "cli", "api", "federator", "federation", "drivers", "cluster", "replication", "client",
        "node", "session", "security", "config", "mqtt", "topics", "log", "lease", "pipeline",
        "topology",
    },
}  # fmt: skip
PURE = (
    "mqtt", "topics", "log", "session", "lease", "replication", "node", "cluster", "federation",
)  # fmt: skip
IMPURE_MODULES = {
    "asyncio", "os", "pathlib", "random", "secrets", "select", "signal", "socket", "ssl",
    "subprocess", "threading", "time", "logging",
}  # fmt: skip
FILE_MODULES = {"log/filesystem.py", "log/opening.py"}
"""The modules of `log` that touch files; what they import beyond the others."""
FILE_IMPORTS = {"os", "pathlib", "time"}
SIMULATOR_IMPORTS = {"random", "pathlib"}
"""Of the simulator: randomness from its seed, and names of directories that do not exist."""
SIMULATED_DRIVERS = {"disk", "older_copy", "raft_files", "storage"}
"""The drivers that work on any file system, and so on a simulated one."""
WRITING_SIDE = {
    "active_index", "journal", "recovery", "retention", "compaction", "segment_list", "snapshot",
}  # fmt: skip
"""What the pipeline, a reader of the log, has no business with."""

MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("module", [name for name in MODULES if "/" in name])
def test_imports_point_downwards(module: str) -> None:
    package = module.split("/")[0]
    for name in imported(SOURCE / module):
        parts = name.split(".")
        if parts[0] == "holdfast" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
            assert parts[1] in ALLOWED[package], f"{module} imports {name}"
            if package == "sim" and parts[1] == "drivers" and len(parts) > 2:
                assert parts[2] in SIMULATED_DRIVERS, f"{module} imports {name}"
            if package == "pipeline" and parts[1] == "log" and len(parts) > 2:
                assert parts[2] not in WRITING_SIDE, f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.split("/")[0] in PURE])
def test_pure_packages_touch_nothing_outside(module: str) -> None:
    forbidden = IMPURE_MODULES - FILE_IMPORTS if module in FILE_MODULES else IMPURE_MODULES
    found = {name.split(".")[0] for name in imported(SOURCE / module)} & forbidden
    assert not found, f"{module} imports {sorted(found)}"


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in MODULES
        if name.startswith("sim/") and name not in ("sim/__main__.py", "sim/running.py")
    ],
)
def test_the_simulator_has_its_own_clock(module: str) -> None:
    forbidden = IMPURE_MODULES - SIMULATOR_IMPORTS
    found = {name.split(".")[0] for name in imported(SOURCE / module)} & forbidden
    assert not found, f"{module} imports {sorted(found)}"


def test_every_package_has_a_rule() -> None:
    packages = {name.split("/")[0] for name in MODULES if "/" in name}
    assert packages == set(ALLOWED)

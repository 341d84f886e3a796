"""Imports point downwards only, and pure packages stay pure."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.source_tree import SATELLITES, SOURCE, modules, statements

LAB = SOURCE.parent / "holdfast_lab"
LAB_ROOMS = {"pipeline", "log_client", "client", "mqtt", "topics", "log"}
"""The rooms that the analysis of test runs may import."""

ROOMS = {
    "mqtt": ("protocol/mqtt",),
    "topics": ("protocol/topics",),
    "websocket": ("protocol/websocket",),
    "proxy": ("protocol/proxy",),
    "relay": ("protocol/relay",),
    "log": ("log",),
    "security": ("security", "hooks.py"),
    "config": ("config",),
    "sqlite": ("sqlite.py",),
    "lease": ("node/lease",),
    "replication": (
        "node/frame_kinds.py", "node/raft", "node/metadata", "node/replicate", "node/failure",
        "node/placement",
    ),
    "session": ("node/session",),
    "node": ("node",),
    "federation": ("holdfast_federation/core",),
    "drivers": ("io",),
    "client": ("client",),
    "log_client": ("client/log",),
    "decoders": ("holdfast_lake/decoders",),
    "pipeline": ("holdfast_lake",),
    "pipeline_commands": ("holdfast_lake/cli",),
    "manager": ("holdfast_federation/manager",),
    "sidecar": ("holdfast_federation/sidecar",),
    "member": ("holdfast_federation/sidecar/process.py", "holdfast_federation/cli"),
    "router": ("api/dispatch.py", "api/endpoints.py"),
    "api": ("api",),
    "process": ("process",),
    "cli": ("cli",),
    "testing": ("testing.py", "pytest_plugin.py"),
}  # fmt: skip
"""Room -> its folders and modules; the longest one that fits a module says whose it is."""

CORES = {"node", "replication", "session", "security", "mqtt", "topics", "log"}
DRIVEN = CORES | {"drivers", "config", "lease"}
BELOW = {
    "mqtt": set(),
    "topics": set(),
    "websocket": set(),
    "proxy": set(),
    "relay": set(),
    "sqlite": set(),
    "log": {"topics"},
    "security": {"topics"},
    "config": {"topics"},
    "lease": {"log"},
    "replication": {"log"},
    "session": {"mqtt", "topics", "log"},
    "node": CORES - {"node"},
    "federation": {"mqtt", "topics"},
    "drivers": DRIVEN - {"drivers"} | {"websocket", "proxy", "relay"},
    "client": {"mqtt", "topics", "security", "websocket", "sqlite"},
    "log_client": {"log", "topics", "client", "mqtt"},
    "decoders": set(),
    "pipeline": {"decoders", "log", "topics", "log_client", "client", "mqtt"},
    "router": {"security"},
    "manager": {"client", "mqtt", "security", "config", "sqlite", "router"},
    "sidecar": DRIVEN | {"federation", "manager", "client", "sqlite"},
    "api": DRIVEN | {"decoders", "sidecar", "federation", "router"},
    "process": DRIVEN | {"api", "sidecar", "federation"},
    "member": DRIVEN
    | {"process", "api", "router", "sidecar", "federation", "manager", "client", "cli"},
    "pipeline_commands": {"pipeline", "cli", "api", "log_client", "client", "log"},
    "cli": DRIVEN | {
        "process", "api", "sidecar", "federation", "client", "log_client",
    },
    "testing": {"process", "drivers", "security", "config"},
}  # fmt: skip
"""Room -> the rooms it may import."""

SIMULATOR = Path(__file__).parents[1] / "sim"
SIMULATOR_ROOMS = CORES | {"drivers"}
PURE = (
    "mqtt", "topics", "proxy", "relay", "log", "session", "lease", "replication", "node",
    "federation",
)  # fmt: skip
IMPURE_MODULES = {
    "asyncio", "os", "pathlib", "random", "secrets", "select", "signal", "socket", "ssl",
    "subprocess", "threading", "time", "logging",
}  # fmt: skip
FILE_MODULES = {"log/files/filesystem.py", "log/files/data_directory.py"}
"""The modules of `log` that touch files; what they import beyond the others."""
FILE_IMPORTS = {"os", "pathlib", "time"}
SIMULATOR_IMPORTS = {"random", "pathlib"}
"""Of the simulator: randomness from its seed, and names of directories that do not exist."""
SIMULATED_DRIVERS = {"journal_writer", "older_copy", "raft_files", "storage", "unsynced"}
"""The modules of `io.disk` that work on any file system, and so on a simulated one."""
WRITING_SIDE = {
    "active_index", "journal", "recovery", "retention", "compaction", "segment_list", "snapshot",
}  # fmt: skip
"""Modules of `log` that readers of the log must not import."""

NAME_SATELLITES = {
    "api/federation_routes.py", "api/log/one_record.py", "api/process.py",
    "cli/backup/restoration.py", "process/server.py",
}  # fmt: skip
"""The modules of `holdfast` that import a package beside it."""
CIRCLES = {frozenset({"node/session/connection.py", "node/session/session.py"})}
"""A connection and its session name each other, in annotations only."""

MODULES = dict(modules())


@cache
def room(module: str) -> str:
    """The room of a module's file; "" at the top of the package."""
    found = [
        (len(place), name)
        for name, places in ROOMS.items()
        for place in places
        if module == place or module.startswith(place + "/")
    ]
    return max(found)[1] if found else ""


def imported_modules(path: Path) -> set[str]:
    """Files of this project that a file imports; a package counts by its `__init__.py`."""
    found = set()
    for name in imported(path):
        base = name.removeprefix("holdfast.").replace(".", "/")
        if name.startswith(("holdfast.", *(f"{each}." for each in SATELLITES))):
            found.update(each for each in (base + ".py", base + "/__init__.py") if each in MODULES)
    return found


@cache
def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_imports_point_downwards() -> None:
    wrong = []
    for module in MODULES:
        if not room(module):
            continue
        for other in imported_modules(MODULES[module]):
            allowed = BELOW[room(module)] | {room(module), ""}
            writes = room(other) == "log" and Path(other).stem in WRITING_SIDE
            reads_only = room(module) in ("log_client", "pipeline")
            if room(other) not in allowed or (writes and reads_only):
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_the_product_does_not_import_the_lab() -> None:
    for module in MODULES:
        found = {name for name in imported(MODULES[module]) if name.startswith("holdfast_lab")}
        assert not found, f"{module} imports {sorted(found)}"


def test_the_broker_stands_without_the_packages_beside_it() -> None:
    """ARCHITECTURE.md says why these may."""
    found = {
        module
        for module, path in MODULES.items()
        if module.split("/")[0] not in SATELLITES
        for name in imported(path)
        if name.split(".")[0] in SATELLITES
    }
    assert found == NAME_SATELLITES


@pytest.mark.parametrize("path", sorted(LAB.glob("*.py")), ids=lambda path: path.name)
def test_the_lab_reads_what_the_pipeline_reads(path: Path) -> None:
    for other in imported_modules(path):
        assert room(other) in LAB_ROOMS | {""}, f"{path.name} imports {other}"
        assert room(other) != "log" or Path(other).stem not in WRITING_SIDE


def test_pure_packages_touch_nothing_outside() -> None:
    wrong = []
    for module in MODULES:
        if room(module) not in PURE:
            continue
        forbidden = IMPURE_MODULES - FILE_IMPORTS if module in FILE_MODULES else IMPURE_MODULES
        found = {name.split(".")[0] for name in imported(MODULES[module])} & forbidden
        wrong += [f"{module} imports {name}" for name in sorted(found)]
    assert not wrong


@pytest.mark.parametrize("path", sorted(SIMULATOR.glob("*.py")), ids=lambda path: path.name)
def test_the_simulator_has_its_own_clock(path: Path) -> None:
    for other in imported_modules(path):
        assert room(other) in SIMULATOR_ROOMS | {""}, f"{path.name} imports {other}"
        if room(other) == "drivers" and not other.endswith("/__init__.py"):
            assert Path(other).stem in SIMULATED_DRIVERS, f"{path.name} imports {other}"
    if path.name not in ("__main__.py", "running.py"):
        forbidden = IMPURE_MODULES - SIMULATOR_IMPORTS
        found = {name.split(".")[0] for name in imported(path)} & forbidden
        assert not found, f"{path.name} imports {sorted(found)}"


def test_every_module_has_a_room() -> None:
    top = {"__init__.py", "_interpreted.py", "_renamed.py", "addresses.py", "numbers.py"}
    packages = {"protocol/__init__.py", "holdfast_federation/__init__.py"}
    assert {name for name in MODULES if not room(name)} == top | packages


def test_rooms_have_an_order() -> None:
    """No room is above itself."""
    assert set(BELOW) == set(ROOMS)
    above = dict(BELOW)
    while above:
        lowest = {name for name, below in above.items() if not below & set(above)}
        assert lowest, f"a circle among {sorted(above)}"
        above = {name: below for name, below in above.items() if name not in lowest}


def test_modules_have_an_order() -> None:
    """No module imports itself through others, imports for type checkers included."""
    below = {module: imported_modules(MODULES[module]) - {module} for module in MODULES}
    assert find_circles(below) == CIRCLES


@pytest.mark.parametrize(
    ("below", "circles"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a", "c"}, "c": set()}, ["ab"]),
        ({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}, ["bcd"]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}}, ["ab", "cd"]),
    ],
)
def test_circles_are_found(below: dict[str, set[str]], circles: list[str]) -> None:
    assert find_circles(below) == {frozenset(each) for each in circles}


def find_circles(below: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules of which each reaches every other."""
    reached = {}
    for module in below:
        found: set[str] = set()
        ahead = [module]
        while ahead:
            new = below[ahead.pop()] - found
            found |= new
            ahead += new
        reached[module] = found
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in below
        if module in reached[module]
    }


def test_the_top_can_be_read() -> None:
    """At most twelve packages."""
    assert len({name.split("/")[0] for name in MODULES if "/" in name}) <= 12


def test_no_interpreted_class_derives_from_a_compiled_one() -> None:
    """It cannot when the modules are compiled, and nothing fails before that."""
    tree = ast.parse((SOURCE.parents[1] / "setup.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    compiled: set[str] = set()
    bases: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        for node in statements(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            may_be_derived = any(
                "allow_interpreted_subclasses" in ast.dump(each) for each in node.decorator_list
            )
            if name in texts and not may_be_derived:
                compiled.add(node.name)
            elif name not in texts:
                bases[f"{name}: {node.name}"] = {
                    ast.unparse(each).split("[")[0] for each in node.bases
                }
    assert len(compiled) > 100
    found = {place: derived & compiled for place, derived in bases.items() if derived & compiled}
    assert not found

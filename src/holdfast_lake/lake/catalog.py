"""Finds tables by name, the built-in ones and the user's, and describes them."""

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from holdfast_lake.lake.schema import (
    QUARANTINE_DESCRIPTION,
    RECORDS_COLUMNS,
    RECORDS_DESCRIPTION,
    quarantine_columns,
    stored_columns,
)
from holdfast_lake.lake.table import QUARANTINE, RECORDS, Column, Table, TableError

DECLARED_BY: Final = (
    "the file or package that declares them (tables of test runs: --tables holdfast_lab)"
)
LAYERS: Final = ("bronze", "silver", "gold")
_PACKAGE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Catalog:
    """Tables by name, ordered so that each follows its source."""

    def __init__(
        self, tables: Iterable[Table], report_parts: Sequence[Callable[..., None]] = ()
    ) -> None:
        by_name: dict[str, Table] = {}
        for table in tables:
            if table.name in by_name:
                raise TableError(f"there are two tables with the name {table.name}")
            by_name[table.name] = table
        self.tables = _ordered(by_name)
        self.report_parts = report_parts
        """The functions that add a package's own parts to a report (report/report.py)."""

    def unscaled(self) -> "Catalog":
        """Returns the tables as an earlier version made them (ReadingsFold.is_scaled)."""
        builds = [(each, getattr(each.build, "unscaled", None)) for each in self.tables.values()]
        tables = [each if build is None else replace(each, build=build()) for each, build in builds]
        return Catalog(tables, self.report_parts)

    def table(self, name: str) -> Table:
        """Returns a table by name. Raises TableError if there is none."""
        if name not in self.tables:
            raise TableError(
                f"there is no table {name}; there are {', '.join(self.names())}, and those of your "
                f"own with {DECLARED_BY}"
            )
        return self.tables[name]

    def names(self) -> list[str]:
        """Returns the names of all tables in order, `records` first."""
        return [RECORDS, *self.tables]

    def is_gold(self, name: str) -> bool:
        """Returns whether a table with this name is declared and gold."""
        return name in self.tables and self.tables[name].layer == "gold"

    def chosen(self, what: Sequence[str]) -> list[str]:
        """Returns the tables that layers, names and `all` select, in order. Raises TableError."""
        result = set()
        for word in what:
            if word == "all":
                result |= set(self.names())
            elif word == "bronze":
                result.add(RECORDS)
            elif word in LAYERS:
                result |= {name for name, table in self.tables.items() if table.layer == word}
            elif word in self.names():
                result.add(word)
            else:
                raise TableError(
                    f"{word!r} is neither a layer (all, {', '.join(LAYERS)}) nor a table "
                    f"({', '.join(self.names())})"
                )
        return [name for name in self.names() if name in result]

    def derived_from(self, name: str) -> list[str]:
        """Returns a table and all tables made from it, directly or not, in order."""
        found = {name}
        for table in self.tables.values():
            if table.source in found:
                found.add(table.name)
        return [each for each in self.names() if each in found]


def _ordered(tables: Mapping[str, Table]) -> dict[str, Table]:
    done: dict[str, Table] = {}
    waiting = dict(tables)
    while waiting:
        ready = [t for t in waiting.values() if t.source == RECORDS or t.source in done]
        if not ready:
            _explain(waiting, tables)
        for table in ready:
            done[table.name] = waiting.pop(table.name)
    return done


def _explain(waiting: Mapping[str, Table], tables: Mapping[str, Table]) -> None:
    for table in waiting.values():
        if table.source not in tables:
            raise TableError(
                f"table {table.name} is made from {table.source}, which there is not; there are "
                f"{', '.join([RECORDS, *tables])}"
            )
    raise TableError(f"tables {', '.join(waiting)} are made from one another in a circle")


def load_catalog(sources: Sequence[str | Path] = (), tables: Sequence[Table] = ()) -> Catalog:
    """Returns the catalogue of the user's tables and the built-in ones.

    `sources` are Python files and names of packages. A user's table replaces a built-in one of the
    same name, and one of `tables` replaces one of the sources. Raises TableError, which names the
    file and the line.
    """
    from holdfast_lake.tables import TABLES

    modules = [_load(str(source)) for source in sources]
    given = {table.name for table in tables}
    own = [
        table
        for source, module in zip(sources, modules, strict=True)
        for table in _declared(source, module)
        if table.name not in given
    ]
    own += tables
    names = {table.name for table in own}
    parts = [part for module in modules if (part := getattr(module, "add_to_report", None))]
    return Catalog([*(table for table in TABLES if table.name not in names), *own], parts)


def load_tables(source: str | Path) -> list[Table]:
    """Returns the tables that a Python file or a package declares.

    They are the tables of its list TABLES, or else every Table among its names. Raises TableError.
    """
    return _declared(source, _load(str(source)))


def _declared(source: str | Path, module: ModuleType) -> list[Table]:
    listed = getattr(module, "TABLES", None)
    found = list(vars(module).values()) if listed is None else listed
    try:
        tables = [each for each in found if isinstance(each, Table)]
    except TypeError:
        raise TableError(f"{source}: TABLES is no list") from None
    if listed is not None and len(tables) != len(listed):
        raise TableError(f"{source}: TABLES has something that is no Table")
    if not tables:
        raise TableError(f"{source} makes no Table")
    if listed is not None:
        _check_all_listed(source, module, tables)
    return list({id(table): table for table in tables}.values())


def _check_all_listed(source: str | Path, module: ModuleType, tables: Sequence[Table]) -> None:
    """Checks that TABLES has every Table that the file itself makes. Raises TableError."""
    names = {table.name for table in tables}
    for variable, found in vars(module).items():
        if isinstance(found, Table) and found.name not in names:
            raise TableError(
                f"{source}: TABLES leaves out the table {found.name} (variable {variable}). Add it "
                "to TABLES, or remove TABLES: then every Table of the file counts"
            )


class _TextLoader(SourceFileLoader):
    """A loader of the text alone. Bytecode that Python keeps counts while the time in seconds and
    the size are the same: after LIMIT = 90 became 91 within a second, the old rules would make rows
    under the new text."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _load(source: str) -> ModuleType:
    if _PACKAGE.fullmatch(source) and not source.endswith(".py") and not Path(source).is_file():
        try:
            return import_module(source)
        except ImportError as error:
            raise TableError(f"{source} is no Python file or package: {error}") from error
    path = Path(source)
    if not path.exists():
        raise TableError(f"{path} is not there: give a Python file with tables, or a package")
    name = f"holdfast_tables_{path.stem}"
    loader = _TextLoader(name, str(path)) if path.suffix == ".py" else None
    spec = spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None or not path.is_file():
        raise TableError(f"{path} is no Python file with tables")
    module = module_from_spec(spec)
    sys.modules[name] = module
    _send_by_value(module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TableError(f"{path}{_line(path, error)}: {_first_line(error)}") from error
    return module


def _send_by_value(module: object) -> None:
    """Makes Spark send the functions of this file to tasks as code, because the workers do not have
    the file."""
    from pyspark import cloudpickle

    register: Callable[[object], None] = cloudpickle.register_pickle_by_value
    register(module)


def _line(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == path
    ]
    return f":{lines[-1]}" if lines else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    name = "" if isinstance(error, TableError) else f"{type(error).__name__}: "
    return name + (text.splitlines()[0] if text else "no text")


def described(catalog: Catalog, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns the descriptions of all tables, or of some. Raises TableError for an unknown name."""
    everything = [
        _entry(RECORDS, "bronze", "the log", RECORDS_DESCRIPTION, RECORDS_COLUMNS, ("date",), ())
    ]
    for name, table in catalog.tables.items():
        everything.append(
            _entry(
                name,
                table.layer,
                table.source,
                table.description,
                stored_columns(table),
                table.partition_columns,
                table.keys,
            )
        )
    everything.append(
        _entry(
            QUARANTINE,
            "silver",
            "every silver table's source",
            QUARANTINE_DESCRIPTION,
            quarantine_columns(),
            ("table", "date"),
            (),
        )
    )
    for name in names:
        if name != QUARANTINE and name != RECORDS:
            catalog.table(name)
    return [entry for entry in everything if not names or entry["name"] in names]


def _entry(
    name: str,
    layer: str,
    source: str,
    description: str,
    columns: Sequence[Column],
    partition_by: Sequence[str],
    keys: Sequence[str],
) -> dict[str, Any]:
    return {
        "name": name,
        "layer": layer,
        "source": source,
        "description": description,
        "partition_by": list(partition_by),
        "keys": list(keys),
        "columns": [
            {"name": c.name, "type": c.type, "description": c.description} for c in columns
        ],
    }

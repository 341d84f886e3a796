"""A table of a lake as a catalog lists it: columns, files, and properties that tell its origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.pipeline.lake.catalog import Catalog
from holdfast.pipeline.lake.files.commits import Commit, CommitLog, File
from holdfast.pipeline.lake.files.objects import LakePath
from holdfast.pipeline.lake.schema import RECORDS_COLUMNS, RECORDS_DESCRIPTION, stored_columns
from holdfast.pipeline.lake.stores.store import is_applied
from holdfast.pipeline.lake.table import RECORDS, Column

PREFIX: Final = "holdfast."
"""The begin of all properties that a registration sets."""
VERSION: Final = f"{PREFIX}version"
LINEAGE: Final = f"{PREFIX}lineage"
_UNITS: Final = {"_s": "s", "_ms": "ms", "_us": "us"}
"""The units that the names of columns end with."""
_ORIGIN: Final = ("servers", "path")
"""The options of a source that name a log. Others may be secrets."""


@dataclass(frozen=True)
class ListedTable:
    """One table as of a commit."""

    name: str
    description: str
    columns: tuple[Column, ...]
    partition_by: tuple[str, ...]
    commit: Commit
    files: Sequence[File]
    properties: Mapping[str, str]
    """The properties of the table, each named PREFIX and more."""

    @property
    def lineage(self) -> str:
        """The identity of the table. A rebuilt table has another one."""
        return self.commit.lineage

    @property
    def version(self) -> int:
        """The number of the commit."""
        return self.commit.version


def unit_of(column: Column) -> str:
    """Returns the unit of a column: the declared one, or that of its name; empty if none."""
    found = [unit for ending, unit in _UNITS.items() if column.name.endswith(ending)]
    return column.unit or (found[-1] if found else "")


def comment_of(column: Column) -> str:
    """Returns the description of a column with its unit."""
    unit = unit_of(column)
    return f"{column.description} [{unit}]" if unit else column.description


def newest_commit(lake: LakePath, name: str) -> tuple[CommitLog, Commit | None]:
    """Returns the newest commit of a table whose files are all in their places."""
    log = CommitLog(lake, name)
    last = log.last()
    if last is None or is_applied(lake, last):
        return log, last
    return log, log.read(last.version - 1) if last.version > 1 else None


def listed(
    lake: LakePath, catalog: Catalog, source: Mapping[str, str], name: str
) -> ListedTable | None:
    """Returns a table as of its newest commit. None if it has never been written."""
    log, commit = newest_commit(lake, name)
    if commit is None:
        return None
    if name == RECORDS:
        description, layer, made_from = RECORDS_DESCRIPTION, "bronze", "the log"
        declared: tuple[Column, ...] = RECORDS_COLUMNS
        keys: tuple[str, ...] = ()
    else:
        table = catalog.table(name)
        description, layer, made_from = table.description, table.layer, table.source
        keys = table.keys
        declared = stored_columns(table)
    stored = dict(commit.columns)
    columns = tuple(each for each in declared if each.name in stored)
    origin = {f"{PREFIX}log": source[key] for key in _ORIGIN if key in source}
    properties = {
        "comment": description,
        f"{PREFIX}layer": layer,
        f"{PREFIX}made-from": made_from,
        f"{PREFIX}keys": ",".join(keys),
        f"{PREFIX}lake": str(lake),
        LINEAGE: commit.lineage,
        VERSION: str(commit.version),
        **origin,
        **{f"{PREFIX}unit.{each.name}": unit_of(each) for each in columns if unit_of(each)},
    }
    files = log.live(commit.version)
    return ListedTable(
        name, description, columns, tuple(commit.partition_by), commit, files, properties
    )

"""How the files of a lake's tables are kept for others to read.

    LAKE/lake.json                   what kind of lake it is, and where its records come from
         <table>/date=.../*.parquet  the rows
         <table>/_commits/           see commits.py
         quarantine/table=<table>/   what could not be used
         _state/<table>/             what silver tables remember
         _work/<table>/              files of the step that is being made
         _locks/<table>.lock         locked by the process that writes to the table

A step writes its files into `_work`, records its commit, then the store *applies* the commit: each
file is renamed to its place. So whoever lists a table's directory never sees half a file, nor rows
that are not committed, nor any twice; after a crash he may miss the last commit's until the next
run has applied it.
"""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from holdfast.pipeline.lake.files.commits import QUARANTINED, ROWS, STATE, Commit, CommitLog, File
from holdfast.pipeline.lake.files.exchange import replace_in
from holdfast.pipeline.lake.files.files import LakeError, move_all, remove_all, remove_tree
from holdfast.pipeline.lake.files.writer import partition_path
from holdfast.pipeline.lake.schema import names_of, quarantine_columns
from holdfast.pipeline.lake.table import QUARANTINE

STATES: Final = "_state"
WORK: Final = "_work"
QUARANTINE_PARTITIONS: Final = ("table", "date")
"""Of the table that has all tables' quarantine."""


class TableStore(Protocol):
    """What differs between kinds of lakes."""

    name: str

    def check(self) -> None:
        """Raises LakeError, which says what is missing, if it cannot write here."""
        ...

    def place(
        self, output: str, table: str, version: int, index: int, file: File, *, replaced: bool
    ) -> str:
        """The final path of a staged file, below the lake. `replaced`: a gold partition's only
        file."""
        ...

    def apply(self, commit: Commit, before: Commit | None) -> None:
        """Make the commit visible. May be done again, and is after a crash."""
        ...

    def forget(self, table: str) -> None:
        """Remove a table as if it had never been written."""
        ...


class ParquetStore:
    """Plain Parquet files in Hive's directories; gold partitions are replaced by a rename."""

    name = "parquet"

    def __init__(self, lake: Path) -> None:
        self.lake = lake

    def check(self) -> None:
        pass

    def place(
        self, output: str, table: str, version: int, index: int, file: File, *, replaced: bool
    ) -> str:
        if replaced and output == ROWS:
            return f"{table}/{partition_path(file.partition)}data.parquet"
        return numbered_place(output, table, version, index, file)

    def apply(self, commit: Commit, before: Commit | None) -> None:
        if commit.merges and commit.files:
            self._exchange(commit)
        move_staged(self.lake, commit)
        remove_all(self.lake / path for path in commit.removed)
        remove_old_state(self.lake, commit, before)

    def _exchange(self, commit: Commit) -> None:
        """Put merged files where those are that they are made of, at one moment. Where that cannot
        be done nothing happens: they are then moved there before the others are removed, and who
        lists the directory in between sees rows twice."""
        if is_applied(self.lake, commit):
            return
        place = (self.lake / commit.files[0].path).parent
        scratch = self.lake / WORK / commit.table / f"composed-{commit.version:08}"
        remove_tree(scratch)
        added = {Path(file.path).name: self.lake / file.staged for file in commit.files}
        if replace_in(place, added, {Path(path).name for path in commit.removed}, scratch):
            remove_all(added.values())

    def forget(self, table: str) -> None:
        forget_files(self.lake, table)


class StorePart(NamedTuple):
    """What a commit adds to one table, for stores that keep tables in another format."""

    name: str
    output: str
    columns: Sequence[tuple[str, str]]
    partition_by: Sequence[str]
    files: Sequence[File]


def parts_of(commit: Commit, before: Commit | None) -> Iterator[StorePart]:
    """One table has the quarantine of all."""
    if commit.quarantine:
        columns = names_of(quarantine_columns())
        yield StorePart(QUARANTINE, QUARANTINED, columns, QUARANTINE_PARTITIONS, commit.quarantine)
    if commit.files or commit.removed or before is None:
        yield StorePart(commit.table, ROWS, commit.columns, commit.partition_by, commit.files)


def partition_of(commit: Commit, output: str, file: File) -> dict[str, str | None]:
    """A file's place in a Part's partition columns."""
    partition = dict(file.partition)
    return {"table": commit.table, **partition} if output == QUARANTINED else partition


def removed_by(lake: Path, commit: Commit) -> list[File]:
    """The files of rows that a commit removes."""
    if not commit.removed:
        return []
    files = {file.path: file for file in CommitLog(lake, commit.table).live(commit.version - 1)}
    return [files[path] for path in commit.removed]


def forget_files(lake: Path, table: str) -> None:
    """Quarantine, rows, commits and state; the rows vanish at once."""
    remove_tree(lake / QUARANTINE / f"table={table}")
    if (lake / table).exists():
        grave = lake / WORK / table
        grave.mkdir(parents=True, exist_ok=True)
        os.replace(lake / table, grave / f"forgotten-{secrets.token_hex(4)}")
        remove_tree(grave)
    remove_tree(lake / STATES / table)


def numbered_place(output: str, table: str, version: int, index: int, file: File) -> str:
    """A name that no other file has, or had: the quarantine outlives its table, whose versions
    begin anew then."""
    root = {ROWS: table, QUARANTINED: f"{QUARANTINE}/table={table}", STATE: f"{STATES}/{table}"}
    unique = f"-{secrets.token_hex(4)}" if output == QUARANTINED else ""
    name = f"{version:08}-{index:04}{unique}.parquet"
    return f"{root[output]}/{partition_path(file.partition)}{name}"


def files_of(commit: Commit) -> list[File]:
    return [*commit.files, *commit.quarantine, *commit.state]


def move_staged(lake: Path, commit: Commit) -> None:
    move_all((lake / file.staged, lake / file.path) for file in files_of(commit) if file.staged)


def remove_old_state(lake: Path, commit: Commit, before: Commit | None) -> None:
    if before is not None:
        kept = {file.path for file in commit.state}
        remove_all(lake / file.path for file in before.state if file.path not in kept)


def is_applied(lake: Path, commit: Commit) -> bool:
    """Whether all files of a commit are in their places (removals may be left to do)."""
    if commit.merges:
        return all((lake / file.path).exists() for file in commit.files)
    return not any((lake / file.staged).exists() for file in files_of(commit) if file.staged)


def check_lake_path(lake: Path) -> None:
    """Raises LakeError for what Spark would take for a pattern."""
    bad = sorted(set(str(lake)) & set("*?[]{}\\,"))
    if bad:
        raise LakeError(f"the lake's path {lake} has {' '.join(bad)}: choose another directory")


def paths_of(lake: Path, files: Iterable[File]) -> list[str]:
    return [str(lake / file.path) for file in files]

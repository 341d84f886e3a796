"""Layout of a lake's files, and the stores that publish them to other programs.

    LAKE/lake.json                   the kind of the lake, and the source of its records
         <table>/date=.../*.parquet  the rows
         <table>/_commits/           see commits.py
         quarantine/table=<table>/   rows that the table's build could not use
         _state/<table>/             the state of silver tables
         _work/<table>/              the files of the step in progress
         _failed/<table>         the error of the last step of the table, if it failed
         _locks/<table>.lock         locked by the process that writes to the table

A step writes its files into `_work` and records its commit. Then the store *applies* the commit: it
renames each file to its place, or copies it in an object store. So a program that lists a table's
directory never sees half a file, a row that is not committed, or a row twice. After a crash it may
miss the rows of the last commit until the next run has applied it.

In an object store no name is ever written twice, because a copy may arrive late. Counter-example:
two drivers apply version 5, which replaces the file of an hour. One goes on to version 6, which
replaces it again, and then the other's copy arrives. So a rebuilt table continues the versions of
the one before it: a commit marked `forgotten` ends that one.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import msgspec

from holdfast.client.log.lake.commits import (
    QUARANTINED,
    ROWS,
    STATE,
    Commit,
    CommitLog,
    File,
    is_replacement,
)
from holdfast.client.log.lake.files import (
    LakeError,
    move_all,
    remove_all,
    remove_tree,
    replace_in,
)
from holdfast.client.log.lake.objects import LakePath, ObjectPath
from holdfast.client.log.lake.parquet import partition_path
from holdfast_lake.lake.schema import names_of, quarantine_columns
from holdfast_lake.lake.table import QUARANTINE

STATES: Final = "_state"
WORK: Final = "_work"
QUARANTINE_PARTITIONS: Final = ("table", "date")
"""The partition columns of the table that has the quarantine of all tables."""


class TableStore:
    """A store whose tables have a format of their own, which `publish` adds files to."""

    name = ""

    def __init__(self, lake: LakePath) -> None:
        self.lake = lake
        self.applied: dict[str, int] = {}
        """The version of each table that this process has applied last."""
        self.is_remade: Callable[[File], bool] = lambda _: False
        """Whether a missing file is no error, because a backfill makes its rows again."""

    def check(self) -> None:
        """Checks that the store can write here. Raises LakeError, which says what is missing."""

    def final_path(
        self, output: str, table: str, version: int, index: int, file: File, *, replaced: bool
    ) -> str:
        """Returns the final path of a staged file, below the lake.

        `replaced` means that it is the only file of a gold partition.
        """
        return numbered_path(output, table, version, index, file)

    def apply(self, commit: Commit, before: Commit | None) -> None:
        """Makes the commit visible. The call is idempotent, and is repeated after a crash."""
        self._move_staged(commit)
        self._publish_all(commit, before)
        remove_all(self.lake / file.path for file in commit.released)
        if commit.forgotten:
            remove_quarantine(self.lake, commit)
        remove_old_state(self.lake, commit, before)
        self.applied[commit.table] = commit.version

    def _publish_all(self, commit: Commit, before: Commit | None) -> None:
        for part in parts_of(commit, before):
            self.publish(part, commit)

    def _move_staged(self, commit: Commit) -> None:
        """Moves the staged files of a commit to their places. Raises LakeError."""
        lake = self.lake
        moves = [
            (lake / file.staged, lake / file.path)
            for file in files_of(commit)
            if file.staged and (not self.is_remade(file) or (lake / file.staged).exists())
        ]
        try:
            move_all(moves)
        except LakeError:
            # Without a lock another driver may have applied this commit, and made one after it that
            # removes the files.
            newest = CommitLog(lake, commit.table).newest()
            if newest is None or newest.version == commit.version:
                raise

    def publish(self, part: "StorePart", commit: Commit) -> None:
        """Adds one part of a commit to its table, unless the table has it already."""
        raise NotImplementedError

    def forget(self, table: str) -> None:
        """Removes a table and its quarantine, as if it had never been written.

        In an object store this is a commit. Raises RaceError.
        """
        if isinstance(self.lake, Path):
            forget_files(self.lake, table)
            return
        log = CommitLog(self.lake, table)
        last = log.last()
        if last is not None:
            commit = ending(log, last)
            log.record(commit)
            self.apply(commit, last)


class ParquetStore(TableStore):
    """A store of plain Parquet files in Hive's directories. A rename replaces a gold partition."""

    name = "parquet"

    def final_path(
        self, output: str, table: str, version: int, index: int, file: File, *, replaced: bool
    ) -> str:
        """Returns the final path of a staged file."""
        if replaced and output == ROWS and isinstance(self.lake, Path):
            return f"{table}/{partition_path(file.partition)}data.parquet"
        return numbered_path(output, table, version, index, file)

    def apply(self, commit: Commit, before: Commit | None) -> None:
        """Moves the files of a commit to their places and removes the replaced ones."""
        if (commit.merges or is_replacement(commit)) and isinstance(self.lake, Path):
            self._exchange(self.lake, commit)
        super().apply(commit, before)

    def _publish_all(self, commit: Commit, before: Commit | None) -> None:
        remove_all(self.lake / path for path in commit.removed)

    def _exchange(self, lake: Path, commit: Commit) -> None:
        """Replaces merged or replaced files, atomically in each directory, if the file system can.

        Otherwise this has no effect. The caller then moves the new files before it removes the
        others, and a program that lists the directory in between sees rows twice.
        """
        removed = {lake / path for path in commit.removed}
        places: dict[Path, list[File]] = {}
        for file in commit.files:
            places.setdefault((lake / file.path).parent, []).append(file)
        scratch = lake / WORK / commit.table / f"composed-{commit.version:08}"
        for place, files in places.items():
            gone = {path.name for path in removed if path.parent == place}
            if not gone or all((lake / file.path).exists() for file in files):
                continue
            remove_tree(scratch)
            added = {Path(file.path).name: lake / file.staged for file in files}
            if not replace_in(place, added, gone, scratch):
                return
            remove_all(added.values())


def newest_applied(store: TableStore, log: CommitLog) -> Commit | None:
    """Returns the newest commit of a table, and applies it if another driver has recorded it.

    A step calls this before it makes the next version. The other driver may have died between the
    two. Counter-example: version 5 is recorded and not applied, and this process makes version 6.
    Nothing would ever apply version 5, and a Delta table marked with 6 refuses it.
    """
    newest = log.newest()
    # A lock keeps other drivers away from a directory, and its first step follows `finish`.
    is_shared = isinstance(store.lake, ObjectPath)
    if newest is not None and is_shared and store.applied.get(log.table) != newest.version:
        store.apply(newest, log.read(newest.version - 1) if newest.version > 1 else None)
    return newest


class StorePart(NamedTuple):
    """The files that a commit adds to one table, for stores with another table format."""

    name: str
    output: str
    columns: Sequence[tuple[str, str]]
    partition_by: Sequence[str]
    files: Sequence[File]


def parts_of(commit: Commit, before: Commit | None) -> Iterator[StorePart]:
    """Yields the parts of a commit: one for the table, and one for the common quarantine table."""
    if commit.quarantine or commit.forgotten or commit.released:
        columns = names_of(quarantine_columns())
        yield StorePart(QUARANTINE, QUARANTINED, columns, QUARANTINE_PARTITIONS, commit.quarantine)
    if commit.files or commit.removed or before is None:
        yield StorePart(commit.table, ROWS, commit.columns, commit.partition_by, commit.files)


def partition_of(commit: Commit, output: str, file: File) -> dict[str, str | None]:
    """Returns a file's values of the partition columns of a StorePart."""
    partition = dict(file.partition)
    return {"table": commit.table, **partition} if output == QUARANTINED else partition


def removed_by(lake: LakePath, commit: Commit, output: str) -> list[File]:
    """Returns the files of rows or of the quarantine that a commit removes."""
    if output == QUARANTINED:
        return commit.released
    if not commit.removed:
        return []
    files = {file.path: file for file in CommitLog(lake, commit.table).live(commit.version - 1)}
    return [files[path] for path in commit.removed]


def forget_files(lake: Path, table: str) -> None:
    """Removes quarantine, rows, commits and state. The rows vanish at once, by a rename."""
    remove_tree(lake / QUARANTINE / f"table={table}")
    if (lake / table).exists():
        grave = lake / WORK / table
        grave.mkdir(parents=True, exist_ok=True)
        os.replace(lake / table, grave / f"forgotten-{secrets.token_hex(4)}")
        remove_tree(grave)
    remove_tree(lake / STATES / table)


def ending(log: CommitLog, last: Commit) -> Commit:
    """Returns the commit that ends a table in an object store."""
    return msgspec.structs.replace(
        last,
        version=last.version + 1,
        committed_at_us=time.time_ns() // 1000,
        took_s=0.0,
        rows=0,
        quarantined=0,
        files=[],
        quarantine=[],
        state=[],
        removed=[file.path for file in log.live(last.version)],
        released=[],
        merges=False,
        forgotten=True,
        counts={},
        change="",
    )


def remove_quarantine(lake: LakePath, commit: Commit) -> None:
    """Removes the quarantine files of a forgotten table, and none of the table that followed it."""
    if isinstance(lake, ObjectPath):
        found = (each.path for each in (lake / f"{QUARANTINE}/table={commit.table}").objects())
        remove_all(each for each in found if int(each.name.split("-")[0]) < commit.version)


def numbered_path(output: str, table: str, version: int, index: int, file: File) -> str:
    """Returns a path that no other file has or had.

    A quarantine file gets a random part, because the quarantine outlives its table: the versions of
    a rebuilt table begin again at 1.
    """
    root = {ROWS: table, QUARANTINED: f"{QUARANTINE}/table={table}", STATE: f"{STATES}/{table}"}
    unique = f"-{secrets.token_hex(4)}" if output == QUARANTINED else ""
    name = f"{version:08}-{index:04}{unique}.parquet"
    return f"{root[output]}/{partition_path(file.partition)}{name}"


def files_of(commit: Commit) -> list[File]:
    """Returns all files that a commit adds."""
    return [*commit.files, *commit.quarantine, *commit.state]


def remove_old_state(lake: LakePath, commit: Commit, before: Commit | None) -> None:
    """Removes the state files of the commit before."""
    if before is not None:
        kept = {file.path for file in commit.state}
        remove_all(lake / file.path for file in before.state if file.path not in kept)


def is_applied(lake: LakePath, commit: Commit) -> bool:
    """Returns whether all files of a commit are in their places. Removals may still be
    outstanding."""
    if commit.merges or (is_replacement(commit) and isinstance(lake, Path)):
        return all((lake / file.path).exists() for file in commit.files)
    if isinstance(lake, ObjectPath):
        staged = {file.staged for file in files_of(commit) if file.staged}
        folders = {PurePosixPath(path).parts[:3] for path in staged}
        there = (each.path for folder in folders for each in (lake / "/".join(folder)).objects())
        return staged.isdisjoint(str(path)[len(str(lake)) + 1 :] for path in there)
    return not any((lake / file.staged).exists() for file in files_of(commit) if file.staged)


def check_lake_path(lake: LakePath) -> None:
    """Checks the lake's path. Raises LakeError for characters that Spark takes for a pattern."""
    bad = sorted(set(str(lake)) & set("*?[]{}\\,"))
    if bad:
        raise LakeError(f"the lake's path {lake} has {' '.join(bad)}: choose another directory")


def paths_of(lake: LakePath, files: Iterable[File]) -> list[str]:
    """Returns the full paths of files."""
    return [str(lake / file.path) for file in files]

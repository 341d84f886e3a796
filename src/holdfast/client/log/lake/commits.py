"""Commits of one table: the consumed and the written rows, one JSON file per commit.

    LAKE/<table>/_commits/00000012.json   a commit; versions count from 1 without gaps
                          00000100.live   every file of the table as of that version

A commit is *recorded* when its file exists. One rename adds its rows to the table and consumes the
rows of the source, so no crash can do one without the other. A commit is *applied* when its files
are in their places (see store.py). The next process that finds it not applied applies it again. So
no row is written twice and none is lost, wherever a run ends.

    LAKE/_history/<table>.jsonl    when a table was made, got columns, or was built again

The history has one entry a line, oldest first. Commits have the same facts, but a lake keeps only
the last thousand of them, and a rebuild removes them all. An entry is written after its commit; a
run that finds it missing writes it again. So each change is told once, wherever a run ends.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import msgspec
from msgspec import Struct

from holdfast.client.log.lake.errors import RaceError
from holdfast.client.log.lake.files import LakeError, remove_all, write_atomically, write_new
from holdfast.client.log.lake.objects import LakePath, ObjectPath, at_once

COMMITS: Final = "_commits"
RECORDS: Final = "records"
"""The table of the log's messages, from which all others are made."""
FORMAT: Final = 1
LIVE_EVERY: Final = 100
"""The versions between two lists of all files. A reader then needs no commit before the last
list."""
COMMITS_KEPT: Final = 1000
"""The newest commits that are kept. Older ones are removed when the next list has been written."""

ROWS: Final = "rows"
QUARANTINED: Final = "quarantine"
STATE: Final = "state"
COUNTS: Final = "counts"
"""An output of counts: a name and a number, which the commit adds up."""

_COMMIT_NAME: Final = re.compile(r"(\d{8,})\.json")


class File(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A Parquet file of the lake."""

    path: str
    """The path below the lake's directory, with slashes."""
    rows: int
    bytes: int
    version: int
    """The commit that added the file. For a merged file it is the last one whose rows it has."""
    since: int = 0
    """The first commit whose rows a merged file has. 0 for a file that was not merged."""
    staged: str = ""
    """The path below the lake's directory at which the commit found the file."""
    partition: dict[str, str | None] = {}
    times: dict[str, tuple[int, int]] = {}
    """The least and greatest value of each timestamp column, in µs since 1970."""
    offsets: dict[int, tuple[int, int]] = {}
    """Per log partition the least offset, and the one after the greatest (records). Within a file
    the offsets of a partition ascend. Empty: not noted, as by an older version."""


class Consumed(Struct, frozen=True, kw_only=True):
    """The position of a commit in the table that it is made from."""

    table: str
    lineage: str
    upto: int
    """The version of the source up to which this table has everything."""
    rows: int
    """The rows of the source in all its versions up to `upto`."""
    seen: int = 0
    """The newest version of the source whose list of files the table has read. Its rows above
    `upto` are not consumed yet."""


class Replaced(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last replacement of rows of a table: a backfill, or its consequence in a table made from
    the replaced one.

    A table that has read the rows before must replace its own: it has not seen the replacement if
    `version` is above its `Consumed.seen`.
    """

    version: int
    """The commit that replaced the rows."""
    first: str = ""
    """The first replaced day. Empty: the whole table was replaced."""
    last: str = ""
    """The last replaced day, included."""
    context: int | None = None
    """The days before the first one that were read for the state. None: all."""
    rows_total: int
    """`Commit.rows_total` of that commit."""
    times: dict[str, tuple[int, int]] = {}
    """The least and greatest value of each timestamp column in the removed files, in µs."""


class Skipped(Struct, frozen=True, kw_only=True):
    """Offsets of a partition that bronze skipped, because retention had deleted them or they were
    damaged."""

    partition: int
    first: int
    end: int
    """The offset after the last one."""
    version: int
    """The commit that read past them."""
    at_us: int
    """The time of that commit, in µs since 1970."""


class LogRestore(Struct, frozen=True, kw_only=True):
    """A restore of the log, behind which bronze went on with other messages at offsets that the
    table has already. Rows of older commits from these offsets on are of an earlier generation."""

    version: int
    """The first commit of the later generation."""
    offsets: dict[str, int]


SKIPPED_KEPT: Final = 100
"""The most skipped ranges that a commit lists. The total is exact."""


class Commit(Struct, frozen=True, kw_only=True):
    """One version of a table: the files that it adds and removes, and the position in the
    source."""

    table: str
    lineage: str
    """The random identity of the table, made with its first commit. It differs from that of a table
    that replaced this one."""
    version: int
    revision: int
    columns: list[tuple[str, str]]
    """The names and types of all columns, partition columns included."""
    partition_by: list[str]
    committed_at_us: int
    took_s: float
    rows: int
    quarantined: int
    rows_total: int
    """The rows ever added (silver, bronze), or the current rows (gold)."""
    quarantined_total: int
    consumed: Consumed | None = None
    """The position in the source table. None for bronze."""
    offsets: dict[str, int] = {}
    """The offset per partition up to which the table has the log (bronze)."""
    log: str = ""
    """The identity of the log (bronze). Empty: not known."""
    begins: dict[str, int] = {}
    """The offset per partition at which the table began (bronze). Without one: 0."""
    restored: list[LogRestore] = []
    """The restores of the log that the table has gone over, oldest first (bronze)."""
    skipped: list[Skipped] = []
    """The last skipped ranges, of this commit and those before it, newest last (bronze)."""
    skipped_total: int = 0
    """The number of offsets ever skipped (bronze). Some of them are no messages."""
    files: list[File] = []
    quarantine: list[File] = []
    state: list[File] = []
    counts: dict[str, int] = {}
    """The step's counts besides rows, such as repetitions or rows that fail an expectation."""
    counts_total: dict[str, int] = {}
    """The same of this commit and all before it."""
    removed: list[str] = []
    """The paths of row files that the table does not have any more."""
    replaced: Replaced | None = None
    """The last replacement of rows, by this commit or an older one."""
    released: list[File] = []
    """The quarantine files that the commit removes, because it replaces the rows of their days."""
    merges: bool = False
    """True if the added files have exactly the rows of the removed ones (compaction.py)."""
    forgotten: bool = False
    """True if the commit ends the table: it removes all its files. The next commit begins another
    table, with another lineage (stores.objects)."""
    change: str = ""
    """The change of the columns with this commit, as text for people."""
    format: int = FORMAT


class CommitLog:
    """The commits in one table's directory. Not thread-safe."""

    def __init__(self, lake: LakePath, table: str) -> None:
        self.lake = lake
        self.table = table
        self.directory = lake / table / COMMITS
        self._last: Commit | None = None
        self._live: dict[str, File] = {}
        self._live_version = 0
        self._sorted: list[File] = []

    def last(self) -> Commit | None:
        """Returns the newest commit, or None for a table without one, also for a forgotten one. It
        looks at the disk each time."""
        newest = self.newest()
        return None if newest is None or newest.forgotten else newest

    def next_version(self) -> int:
        """Returns the version after those that `newest` has found."""
        return self._last.version + 1 if self._last is not None else 1

    def newest(self) -> Commit | None:
        """Returns the newest commit, even if it says that the table is forgotten."""
        version = self._last.version if self._last is not None else 0
        if version and not self._path(version).exists():
            if isinstance(self.lake, ObjectPath):
                raise LakeError(
                    f"{self._path(version)} was there and is gone: the object store forgets, or "
                    "somebody has removed it. Run again: the step is made again"
                )
            # The table was removed or rebuilt by another process.
            version, self._last = 0, None
        if version == 0:
            version = self._newest()
            if version:
                following = self._path(version + 1)
                calls: list[Callable[[], Any]] = [partial(self.read, version), following.exists]
                self._last, is_newer = at_once(self.lake, calls)
                if not is_newer:
                    return self._last
                version += 1
        while self._path(version + 1).exists():
            version += 1
        if version and (self._last is None or self._last.version != version):
            self._last = self.read(version)
        return self._last

    def read(self, version: int) -> Commit:
        """Reads a commit. Raises LakeError if it is missing or damaged."""
        path = self._path(version)
        try:
            commit = msgspec.json.decode(path.read_bytes(), type=Commit)
        except FileNotFoundError:
            raise LakeError(f"commit {version} of table {self.table} is missing: {path}") from None
        except msgspec.DecodeError as error:
            raise LakeError(f"{path} is damaged: {error}") from None
        if commit.format != FORMAT:
            raise LakeError(
                f"{path} has format {commit.format}, this version reads {FORMAT}: use a newer one"
            )
        return commit

    def _read_all(self, versions: Iterable[int]) -> Iterator[Commit]:
        """Yields commits in order."""
        last = self._last

        def read(version: int) -> Commit:
            """Reads a commit, unless it is the newest one."""
            return last if last is not None and last.version == version else self.read(version)

        return at_once(self.lake, [partial(read, each) for each in versions])

    def record(self, commit: Commit) -> None:
        """Records a commit: the commit point of a step.

        The table's lock keeps other processes away where the file system honours it. Elsewhere, as
        in an object store, the second process that records the same version fails here. Raises
        RaceError.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._path(commit.version)
        try:
            write_new(path, msgspec.json.encode(commit))
        except FileExistsError:
            raise RaceError(
                f"table {self.table}: another driver has made version {commit.version} at the same "
                "time. This step is thrown away, and nothing is lost"
            ) from None
        self._last = commit

    def live(self, upto: int) -> list[File]:
        """Returns every row file as of a version, ordered by commit and path. The caller must not
        change the list."""
        if upto < self._live_version:
            self._live, self._live_version, self._sorted = {}, 0, []
        if self._live_version == 0:
            self._load_live(upto)
        for commit in self._read_all(range(self._live_version + 1, upto + 1)):
            _apply(self._live, commit)
        if upto > self._live_version or not self._sorted:
            files = self._live.values()
            self._sorted = sorted(files, key=lambda file: (file.version, file.path))
        self._live_version = upto
        return self._sorted

    def save_live(self) -> None:
        """Writes the list of files at every LIVE_EVERY-th version, and removes old commits. Call it
        after a commit is applied."""
        last = self._last
        if last is None or last.version % LIVE_EVERY:
            return
        path = self.directory / f"{last.version:08}.live"
        write_atomically(path, msgspec.json.encode(self.live(last.version)))
        upto = last.version - COMMITS_KEPT
        old = range(max(1, upto - LIVE_EVERY), upto)
        remove_all(self._path(each) for each in old)
        remove_all(self.directory / f"{each:08}.live" for each in old)

    def _load_live(self, upto: int) -> None:
        version = upto - upto % LIVE_EVERY
        while version > 0:
            try:
                text = (self.directory / f"{version:08}.live").read_bytes()
            except FileNotFoundError:
                version -= LIVE_EVERY
                continue
            files = msgspec.json.decode(text, type=list[File])
            self._live = {file.path: file for file in files}
            self._live_version = version
            return

    def kept(self) -> list[int]:
        """Returns the versions whose commits are still there, oldest first."""
        try:
            names = [entry.name for entry in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(m.group(1)) for m in map(_COMMIT_NAME.fullmatch, names) if m)

    def _newest(self) -> int:
        return max(self.kept(), default=0)

    def _path(self, version: int) -> LakePath:
        return self.directory / f"{version:08}.json"


def _apply(live: dict[str, File], commit: Commit) -> None:
    for path in commit.removed:
        live.pop(path, None)
    for file in commit.files:
        live[file.path] = file


def changed(files: Iterable[File], after: int) -> list[File]:
    """Returns the files that were added after a version.

    Raises LakeError if one of them was merged with rows of that version or before: a reader would
    get those rows twice.
    """
    new = [file for file in files if file.version > after]
    for file in new:
        if file.since and file.since <= after:
            raise LakeError(
                f"{file.path} has the rows of commits {file.since} to {file.version}, of which "
                f"those up to {after} were read before: build the tables made from it again"
            )
    return new


def spans(files: Iterable[File]) -> list[list[File]]:
    """Divides files into the shortest lists that can be read one after the other, in commit order.

    No commit has rows in two of the lists. A reader may stop after any list, and its position is
    then one version.
    """
    ordered = sorted(files, key=lambda file: (file.version, file.path))
    first = list(accumulate((file.since or file.version for file in reversed(ordered)), min))[::-1]
    result: list[list[File]] = []
    for file, rest_begins in zip(ordered, first, strict=True):
        if not result or rest_begins > result[-1][-1].version:
            result.append([])
        result[-1].append(file)
    return result


def is_replacement(commit: Commit) -> bool:
    """Returns whether this commit itself replaces rows by others."""
    return commit.replaced is not None and commit.replaced.version == commit.version


def made_from(lake: LakePath, source: Commit) -> Iterator[Commit]:
    """Yields the newest commit of each table that is made from the table of a commit.

    It looks at every directory with commits below the lake, because no catalogue knows the tables
    of all users.
    """
    for directory in lake.iterdir():
        if not (directory / COMMITS).is_dir():
            continue
        commit = CommitLog(lake, directory.name).last()
        consumed = commit.consumed if commit is not None else None
        if commit is None or consumed is None:
            continue
        if (consumed.table, consumed.lineage) == (source.table, source.lineage):
            yield commit


def unseen_replacement(source: Commit, consumed: Consumed) -> Replaced | None:
    """Returns the replacement in a source after which a table must replace its own rows.

    A table that began after the replacement never read the old rows: then there is none.
    """
    replaced, seen = source.replaced, max(consumed.seen, consumed.upto)
    return replaced if replaced is not None and 0 < seen < replaced.version else None


def newly_skipped(commit: Commit) -> list[Skipped]:
    """Returns the ranges that this commit itself skipped. Of very many it returns the last."""
    return [each for each in commit.skipped if each.version == commit.version]


def rows_of(files: Sequence[File]) -> int:
    """Returns the number of rows in some files."""
    return sum(file.rows for file in files)


HISTORY: Final = "_history"


class TableChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the history."""

    table: str
    lineage: str
    version: int
    at_us: int
    """The time of the commit, in µs since 1970."""
    kind: str
    """`made`, `built again`, `backfill` or `columns`."""
    change: str = ""
    """The change, as text for people."""
    columns: list[tuple[str, str]] = []
    """All columns from then on, with their types."""


def note_change(lake: LakePath, commit: Commit) -> None:
    """Writes the entry of a commit, if it changes columns and has none yet."""
    if commit.version > 1 and not commit.change:
        return
    entries = _read(lake, commit.table)
    if any((each.lineage, each.version) == (commit.lineage, commit.version) for each in entries):
        return
    path = _path(lake, commit.table)
    path.parent.mkdir(exist_ok=True)
    lines = [msgspec.json.encode(each) for each in [*entries, _entry(commit, entries)]]
    write_atomically(path, b"\n".join(lines) + b"\n")


def history(lake: LakePath, table: str) -> list[TableChange]:
    """Returns the changes of a table, oldest first.

    Those of an older version of the pipeline are taken from the commits that are still there.
    """
    entries = _read(lake, table)
    log = CommitLog(lake, table)
    last = log.last()
    for version in log.kept() if last is not None else ():
        commit = log.read(version)
        known = {(each.lineage, each.version) for each in entries}
        if (version == 1 or commit.change) and (commit.lineage, version) not in known:
            older = [each for each in entries if each.at_us < commit.committed_at_us]
            entries.append(_entry(commit, older))
    return sorted(entries, key=lambda each: each.at_us)


def _entry(commit: Commit, before: list[TableChange]) -> TableChange:
    kind, change = "backfill" if is_replacement(commit) else "columns", commit.change
    if commit.version == 1:
        kind = "built again" if before else "made"
        change = _difference(before[-1].columns, commit.columns) if before else ""
    return TableChange(
        table=commit.table,
        lineage=commit.lineage,
        version=commit.version,
        at_us=commit.committed_at_us,
        kind=kind,
        change=change,
        columns=commit.columns,
    )


def _difference(before: list[tuple[str, str]], after: list[tuple[str, str]]) -> str:
    """Describes how columns differ; empty if they are the same."""
    old, new = dict(before), dict(after)
    parts = [f"added {name} {kind}" for name, kind in new.items() if name not in old]
    parts += [f"removed {name}" for name in old if name not in new]
    parts += [
        f"{name} {old[name]} became {kind}"
        for name, kind in new.items()
        if name in old and old[name] != kind
    ]
    return ", ".join(parts)


def _read(lake: LakePath, table: str) -> list[TableChange]:
    try:
        lines = _path(lake, table).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=TableChange) for line in lines if line]


def _path(lake: LakePath, table: str) -> LakePath:
    return lake / HISTORY / f"{table}.jsonl"

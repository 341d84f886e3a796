"""The commits of one table: what was read, what was written, one JSON file each.

    LAKE/<table>/_commits/00000012.json   a commit; versions count from 1 without gaps
                          00000100.live   every file of the table as of that version

A commit is *recorded* when its file is there: from then on its rows belong to the table, and their
source's rows are consumed, both by the same rename. It is *applied* when its files are in their
places (see store.py); that is done again by whoever finds it undone. So no row is written twice,
and none is lost, wherever a run ends.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.pipeline.lake.files.files import LakeError, write_new, write_whole

COMMITS: Final = "_commits"
FORMAT: Final = 1
LIVE_EVERY: Final = 100
"""Versions between two lists of all files, so that nobody reads every commit since the first."""
COMMITS_KEPT: Final = 1000
"""Commits older than these are removed when the next list has been written."""

ROWS: Final = "rows"
QUARANTINED: Final = "quarantine"
STATE: Final = "state"

_COMMIT_NAME: Final = re.compile(r"(\d{8,})\.json")


class File(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A Parquet file of the lake."""

    path: str
    """Below the lake's directory, with slashes."""
    rows: int
    bytes: int
    version: int
    """The commit that added it; of a merged file, the last one whose rows it has."""
    since: int = 0
    """Of a merged file: the first commit whose rows it has."""
    staged: str = ""
    """Below the lake's directory: where the commit found it."""
    partition: dict[str, str | None] = {}
    times: dict[str, tuple[int, int]] = {}
    """Least and greatest value of each timestamp column, µs since 1970."""


class Consumed(Struct, frozen=True, kw_only=True):
    """What a commit has taken from the table it is made from."""

    table: str
    lineage: str
    upto: int
    """The version of the source up to which everything is in this table."""
    rows: int
    """Rows of the source in all its versions up to then."""


class Skipped(Struct, frozen=True, kw_only=True):
    """Offsets of a log partition that bronze went on without: retention had removed them, or they
    were damaged."""

    partition: int
    first: int
    end: int
    """The offset behind the last one."""
    version: int
    """Of the commit that read what is behind them."""
    at_us: int
    """When that was."""


SKIPPED_KEPT: Final = 100
"""Ranges that a commit tells of; the total is exact."""


class Commit(Struct, frozen=True, kw_only=True):
    table: str
    lineage: str
    """Given to the table when its first commit was made: tells it from one that replaced it."""
    version: int
    revision: int
    columns: list[tuple[str, str]]
    """Names and types, partition columns included."""
    partition_by: list[str]
    committed_at_us: int
    took_s: float
    rows: int
    quarantined: int
    rows_total: int
    """Silver, bronze: rows ever added. Gold: rows there are."""
    quarantined_total: int
    consumed: Consumed | None = None
    """None for bronze."""
    offsets: dict[str, int] = {}
    """Bronze: the offset up to which each log partition is in the table."""
    skipped: list[Skipped] = []
    """Bronze: the last ones, of this commit and those before it; newest last."""
    skipped_total: int = 0
    """Bronze: offsets skipped, ever. Not each is a message."""
    files: list[File] = []
    quarantine: list[File] = []
    state: list[File] = []
    removed: list[str] = []
    """Paths of rows' files that are no more part of the table."""
    merges: bool = False
    """The files have the rows of the removed ones, and nothing else has changed (compacting.py)."""
    change: str = ""
    """What happened to the columns with this commit, for people."""
    format: int = FORMAT


class CommitLog:
    """The commits below one table's directory. Not safe for several threads."""

    def __init__(self, lake: Path, table: str) -> None:
        self.lake = lake
        self.table = table
        self.directory = lake / table / COMMITS
        self._last: Commit | None = None
        self._live: dict[str, File] = {}
        self._live_version = 0
        self._sorted: list[File] = []

    def last(self) -> Commit | None:
        """The newest commit; None for a table that has none. Looks at the disk each time."""
        version = self._last.version if self._last is not None else 0
        if version and not self._path(version).exists():
            # The table was removed, or built anew, under our feet.
            version, self._last = 0, None
        if version == 0:
            version = self._newest()
        while self._path(version + 1).exists():
            version += 1
        if version and (self._last is None or self._last.version != version):
            self._last = self.read(version)
        return self._last

    def read(self, version: int) -> Commit:
        """Raises LakeError."""
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

    def record(self, commit: Commit) -> None:
        """The commit point. The lock of the table keeps other processes away where the file system
        honours it; where it does not, the second of two that record one version fails here."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._path(commit.version)
        try:
            write_new(path, msgspec.json.encode(commit))
        except FileExistsError:
            raise LakeError(f"{path} exists: another process writes to this table") from None
        self._last = commit

    def live(self, upto: int) -> list[File]:
        """Every file of the rows as of a version, in the order of their commits and paths. Not to
        be changed by the caller."""
        if upto < self._live_version:
            self._live, self._live_version, self._sorted = {}, 0, []
        if self._live_version == 0:
            self._load_live(upto)
        for version in range(self._live_version + 1, upto + 1):
            _apply(self._live, self.read(version))
        if upto > self._live_version or not self._sorted:
            files = self._live.values()
            self._sorted = sorted(files, key=lambda file: (file.version, file.path))
        self._live_version = upto
        return self._sorted

    def save_live(self) -> None:
        """Called after a commit was applied: now and then writes the list, removes old commits."""
        last = self._last
        if last is None or last.version % LIVE_EVERY:
            return
        path = self.directory / f"{last.version:08}.live"
        write_whole(path, msgspec.json.encode(self.live(last.version)))
        for old in range(last.version - COMMITS_KEPT - LIVE_EVERY, last.version - COMMITS_KEPT):
            if old > 0:
                self._path(old).unlink(missing_ok=True)
                (self.directory / f"{old:08}.live").unlink(missing_ok=True)

    def _load_live(self, upto: int) -> None:
        version = upto - upto % LIVE_EVERY
        while version > 0:
            path = self.directory / f"{version:08}.live"
            if path.exists():
                files = msgspec.json.decode(path.read_bytes(), type=list[File])
                self._live = {file.path: file for file in files}
                self._live_version = version
                return
            version -= LIVE_EVERY

    def _newest(self) -> int:
        try:
            names = [entry.name for entry in self.directory.iterdir()]
        except FileNotFoundError:
            return 0
        return max((int(m.group(1)) for m in map(_COMMIT_NAME.fullmatch, names) if m), default=0)

    def _path(self, version: int) -> Path:
        return self.directory / f"{version:08}.json"


def _apply(live: dict[str, File], commit: Commit) -> None:
    for path in commit.removed:
        live.pop(path, None)
    for file in commit.files:
        live[file.path] = file


def changed(files: Iterable[File], after: int) -> list[File]:
    """The files that were added behind a version. Raises LakeError if one of them was merged with
    rows from before it."""
    new = [file for file in files if file.version > after]
    for file in new:
        if file.since and file.since <= after:
            raise LakeError(
                f"{file.path} has the rows of commits {file.since} to {file.version}, of which "
                f"those up to {after} were read before: build anew what is made from it"
            )
    return new


def spans(files: Iterable[File]) -> list[list[File]]:
    """The files in the order of their commits, in the shortest lists that can be read one after
    the other: no commit has rows in two of them."""
    ordered = sorted(files, key=lambda file: (file.version, file.path))
    first = list(accumulate((file.since or file.version for file in reversed(ordered)), min))[::-1]
    result: list[list[File]] = []
    for file, rest_begins in zip(ordered, first, strict=True):
        if not result or rest_begins > result[-1][-1].version:
            result.append([])
        result[-1].append(file)
    return result


def newly_skipped(commit: Commit) -> list[Skipped]:
    """Those of this commit itself; of very many the last."""
    return [each for each in commit.skipped if each.version == commit.version]


def rows_of(files: Sequence[File]) -> int:
    return sum(file.rows for file in files)

"""Selects the days of a backfill, the part of a table that a commit replaces, and the files that it
removes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from holdfast.client.log.lake.commits import (
    Commit,
    CommitLog,
    File,
    Replaced,
    is_replacement,
    made_from,
    rows_of,
    unseen_replacement,
)
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.objects import LakePath, ObjectPath
from holdfast.client.log.lake.parquet import offsets_of_rows, parquet_file
from holdfast_lake.lake.table import QUARANTINE

DAY_US = 86_400_000_000


@dataclass(frozen=True)
class Days:
    """Whole days in UTC, from `first` to `last`, both included. `last` None: without an end."""

    first: date
    last: date | None = None

    def __str__(self) -> str:
        return f"{self.first} to {self.last}" if self.last is not None else f"{self.first} on"

    def has(self, file: File) -> bool:
        """Returns whether the rows of a file are of these days, by its partition."""
        day = file.partition.get("date")
        return day is not None and str(self.first) <= day and not self.end_before(file)

    def end_before(self, file: File) -> bool:
        """Returns whether the rows of a file are of a later day."""
        day = file.partition.get("date")
        return self.last is not None and day is not None and day > str(self.last)

    def begin_after(self, file: File, context: int | None) -> bool:
        """Returns whether the rows of a file are more than `context` days before the first day."""
        if context is None:
            return False
        day = file.partition.get("date")
        return day is not None and day < str(self.first - timedelta(days=context))

    @property
    def start_us(self) -> int:
        """The begin of the first day, in microseconds since 1970."""
        return (self.first - date(1970, 1, 1)).days * DAY_US

    @property
    def end_us(self) -> int | None:
        """The end of the last day, in microseconds since 1970."""
        return None if self.last is None else ((self.last - date(1970, 1, 1)).days + 1) * DAY_US


def parse_day(text: str) -> date:
    """Returns the UTC day of `2026-11-20` or `2026-11-20T13:00+01:00`. Raises LakeError."""
    try:
        if len(text) == len("2026-11-20"):
            return date.fromisoformat(text)
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo is None else at.astimezone(UTC)).date()
    except (ValueError, OverflowError):
        raise LakeError(
            f"{text!r} is no day such as 2026-11-20, and no time such as 2026-11-20T13:00Z"
        ) from None


def parse_days(first: str, last: str | None) -> Days:
    """Returns the days from one to another, both included. Raises LakeError."""
    days = Days(parse_day(first), parse_day(last) if last is not None else None)
    if days.last is not None and days.last < days.first:
        raise LakeError(f"--to {days.last} is before --from {days.first}")
    return days


def days_of(files: Sequence[File]) -> list[str]:
    """Returns the days that files have rows of, in order."""
    return sorted({day for file in files if (day := file.partition.get("date")) is not None})


@dataclass(frozen=True)
class TablePart:
    """Some days of a table, or all of it."""

    days: Days | None = None
    """The days. None: the whole table."""
    context: int | None = None
    """The days of the source before the first one that are read for the state. None: all."""

    @classmethod
    def of(cls, replaced: Replaced) -> "TablePart":
        """Returns the part that a replacement has replaced."""
        if not replaced.first:
            return cls()
        last = parse_day(replaced.last) if replaced.last else None
        return cls(Days(parse_day(replaced.first), last), replaced.context)

    def __str__(self) -> str:
        return str(self.days) if self.days is not None else "the whole table"

    def has(self, file: File) -> bool:
        """Returns whether a file of the table is in this part."""
        return self.days is None or self.days.has(file)

    def needs(self, file: File) -> bool:
        """Returns whether the rows of this part may depend on a file of the source, whose days are
        those of the table."""
        days = self.days
        return days is None or not (days.end_before(file) or days.begin_after(file, self.context))

    def joined(self, other: "TablePart") -> "TablePart":
        """Returns the least part of days in a row that has both."""
        one, two = self.days, other.days
        if one is None or two is None:
            return TablePart()
        last = None if one.last is None or two.last is None else max(one.last, two.last)
        contexts = [self.context, other.context]
        context = None if None in contexts else max(each or 0 for each in contexts)
        return TablePart(Days(min(one.first, two.first), last), context)

    def replaced(
        self, lake: LakePath, last: Commit, rows: int, removed: Sequence[File]
    ) -> Replaced:
        """Returns the note of the commit after `last`, which replaces the removed files by `rows`.

        It includes the replacement before if a table has not followed that yet. Counter-example: a
        first backfill removes the rows of an hour and ends before the table of hours has seen it. A
        second one does not remove them, and the hour would stay.
        """
        part, times = self, _hull(file.times for file in removed)
        before = last.replaced
        if before is not None and any(
            commit.consumed is not None and unseen_replacement(last, commit.consumed)
            for commit in made_from(lake, last)
        ):
            part, times = self.joined(TablePart.of(before)), _hull([times, before.times])
        days = part.days
        return Replaced(
            version=last.version + 1,
            first=str(days.first) if days is not None else "",
            last=str(days.last) if days is not None and days.last is not None else "",
            context=part.context,
            rows_total=last.rows_total - rows_of(removed) + rows,
            times=times,
        )

    def told(self, removed: Sequence[File], rows: int, change: str = "") -> str:
        """Returns the replacement as text for people, with another change of the columns."""
        text = f"{self}, {rows_of(removed):,} rows became {rows:,}"
        return f"{text}; {change}" if change else text


Times = Mapping[str, tuple[int, int]]


def _hull(parts: Iterable[Times]) -> dict[str, tuple[int, int]]:
    """Returns the least and greatest value of each timestamp column."""
    found: dict[str, tuple[int, int]] = {}
    for part in parts:
        for name, (low, high) in part.items():
            before = found.get(name, (low, high))
            found[name] = (min(low, before[0]), max(high, before[1]))
    return found


Range = tuple[int, int]


def offsets_in(log: CommitLog, files: Iterable[File]) -> dict[int, Range]:
    """Returns per log partition the least offset in some files of records, and the one after the
    greatest.

    The commits tell it about a file that is damaged or missing: its offsets are among theirs.
    Raises LakeError if they do not.
    """
    found: dict[int, Range] = {}
    for file in files:
        try:
            own = file.offsets or offsets_of_rows(log.lake / file.path)
        except (LakeError, FileNotFoundError) as error:
            among = _offsets_of_commits(log, file)
            if among is None:
                raise LakeError(str(error)) from None
            own = among
        for partition, (least, greatest) in own.items():
            low, high = found.get(partition, (least, greatest))
            found[partition] = (min(low, least), max(high, greatest))
    return found


def _offsets_of_commits(log: CommitLog, file: File) -> dict[int, Range] | None:
    """Returns the offsets that the commits of a file have read. None: they are not known, because a
    commit was removed or is a replacement, which reads offsets of many commits before it."""
    first = (file.since or file.version) - 1
    there = set(log.kept())
    if not all(version in there for version in range(max(first, 1), file.version + 1)):
        return None
    commits = [log.read(version) for version in range(first + 1, file.version + 1)]
    if any(map(is_replacement, commits)):
        return None
    starts = log.read(first).offsets if first else {}
    if first and log.read(first).log != commits[-1].log:
        return None  # The log was restored meanwhile, and a commit has begun at lower offsets.
    ranges = {int(p): (starts.get(p, 0), end) for p, end in commits[-1].offsets.items()}
    return {p: (start, end) for p, (start, end) in ranges.items() if start < end}


def quarantined_files(lake: LakePath, table: str, part: TablePart) -> list[File]:
    """Returns the files of a part of a table's quarantine, with their numbers of rows."""
    root = lake / QUARANTINE / f"table={table}"
    if isinstance(root, ObjectPath):
        paths: list[LakePath] = [each.path for each in root.objects()]
    else:
        paths = [*root.rglob("*.parquet")]
    found = []
    for path in sorted(paths, key=str):
        place = str(path)[len(str(lake)) + 1 :]
        file = File(path=place, rows=0, bytes=0, version=0, partition=_partition(place))
        if not part.has(file):
            continue
        size = path.size() if isinstance(path, ObjectPath) else path.stat().st_size
        with parquet_file(path) as opened:
            rows = opened.metadata.num_rows
        found.append(File(path=place, rows=rows, bytes=size, version=0, partition=file.partition))
    return found


def _partition(place: str) -> dict[str, str | None]:
    """Returns the day of a path like quarantine/table=readings/date=2026-11-20/x.parquet."""
    day = place.split("/")[2].removeprefix("date=")
    return {"date": day}

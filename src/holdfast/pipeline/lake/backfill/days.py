"""Days of a backfill."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from holdfast.pipeline.lake.files.commits import File
from holdfast.pipeline.lake.files.errors import LakeError

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

"""Declares a table of the lake.

A pure function of DataFrames makes every table from one other table. The first one is `records`
(bronze: every message of the log). This module only declares; the engine reads it.

    from pyspark.sql import functions as F
    from holdfast_lake.lake.table import Column, Grain, Table

    alarms = Table(
        name="alarms_per_hour",
        layer="gold",
        source="readings",
        description="How often each device was above 90 degrees.",
        columns=(
            Column("device", "string", "the device"),
            Column("window_start", "timestamp", "begin of the hour"),
            Column("alarms", "bigint", "readings above 90"),
        ),
        keys=("window_start", "device"),
        grain=Grain.hours(),
        build=lambda readings: readings.where("metric = 'temperature' AND value_double > 90")
        .groupBy("device", F.date_trunc("hour", "event_time").alias("window_start"))
        .agg(F.count("*").alias("alarms")),
    )

The contract of a build function:

- *Silver* sees every row of its source exactly once, in steps of any size. It gets the new rows.
  If the table has state columns, it also gets its state as the last step left it, empty at first.
  Its results (rows, quarantine, state) are committed together. Rows are only ever added.
- *Gold* is recomputed by grain: an hour, a day, the values of columns, or everything. It gets all
  rows of the source that are in a touched grain, and the table's rows there are replaced.
- The result depends on the rows alone. It does not depend on their order, on their distribution
  over tasks or steps, on the clock or on chance. A build returns bad rows as quarantine and never
  raises an exception for them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from holdfast.client.log.lake.commits import RECORDS as RECORDS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

"""The name of the bronze table, which is built in."""
QUARANTINE: Final = "quarantine"
"""The name of the table with the source rows that no build of a table could use."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")


class TableError(ValueError):
    """A declaration cannot be used. The text names the table, the fault and what to do."""


@dataclass(frozen=True)
class Column:
    """A column with its Spark SQL type (`double`, `timestamp`, `array<string>`), its meaning and
    its unit."""

    name: str
    type: str
    description: str
    unit: str = ""
    """The unit of the values, such as `s` or `bytes`, for catalogs. A name that ends with `_s` or
    `_ms` needs none."""


QUARANTINE_COLUMNS: Final = (
    Column("reason", "string", "what was wrong, and where in the payload"),
    Column("topic", "string", "topic of the message"),
    Column("partition", "int", "log partition"),
    Column("offset", "bigint", "offset in the log partition"),
    Column("timestamp", "timestamp", "when the broker stored the message"),
    Column("payload", "binary", "the payload as it came"),
    Column("client_id", "string", "client id of the publisher; null if not known"),
    Column("code", "string", "the kind of error, see tables.md; null in rows of older versions"),
)
"""The columns of the quarantine that a silver build returns. The last two may be left out. The
stored table also has `table` (the table of that build) and `date`."""


@dataclass(frozen=True)
class Outputs:
    """The result of a silver build that returns more than rows. The frames are not yet computed.

    `shared` are frames from which several of the others are made. They stay in memory (or on disk)
    until the step is committed, so that they are computed once.
    """

    rows: "DataFrame"
    quarantine: "DataFrame | None" = None
    state: "DataFrame | None" = None
    shared: "tuple[DataFrame, ...]" = ()


@runtime_checkable
class Fold(Protocol):
    """A function of Arrow data that the tasks call for the rows of some streams.

    The tasks read the source's files and write the result, so a row never crosses to the JVM. The
    object is sent to the tasks.
    """

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the source that it needs."""
        ...

    def spread(self, rows: "pa.RecordBatch") -> "tuple[pa.RecordBatch, Any]":
        """Returns the rows that the fold needs, in any form, and a whole number for each.

        The numbers are a numpy array and are equal for all rows of a stream.
        """
        ...

    def fold(
        self, rows: "pa.Table", states: "pa.Table", oldest_us: int | None
    ) -> "Iterator[tuple[str, pa.RecordBatch]]":
        """Folds all rows of the step of some streams, with their states.

        The rows are as `spread` returned them, but in any order. Yields batches of the outputs
        (commits.ROWS, QUARANTINED, STATE) with the declared columns, or of COUNTS: a name and a
        number that the commit adds up. `oldest_us` is the least of
        the source's times in the step, in microseconds since 1970, or None if it has no times.
        """
        ...


@runtime_checkable
class StreamFold(Fold, Protocol):
    """A silver build that folds each stream, row by row, and keeps a state per stream.

    Its table must have state columns.
    """

    def spread_states(self, states: "pa.RecordBatch") -> "Any":
        """Returns the numbers of the streams of some rows of the state."""
        ...


@runtime_checkable
class GrainFold(Fold, Protocol):
    """A gold build that folds the rows of each stream to few, from which Spark makes the table.

    It has no states, and its only output is commits.ROWS.
    """

    @property
    def folded(self) -> "Sequence[tuple[str, str]]":
        """The names and Spark types of the columns of the folded rows."""
        ...

    def finish(self, folded: "DataFrame") -> "DataFrame":
        """Makes the table's rows from the folded rows of all streams.

        Some rows may be of grains that are not wanted. The engine leaves out what is made of them.
        """
        ...


@dataclass(frozen=True)
class Grain:
    """The unit in which a gold table is recomputed, and its partitions on disk: one file each.

    Rows without a value (a null time) or of a time outside the years 1 to 9999 are in no grain and
    are left out. Use `hours`, `days`, `by` and `whole` to make one.
    """

    unit: Literal["hour", "day", "value", "all"]
    time: str = "window_start"
    """The timestamp column of the table itself (hour, day)."""
    source_time: str = "event_time"
    """The timestamp column of the source (hour, day)."""
    columns: tuple[str, ...] = ()
    """The names of columns that both the table and its source have (value)."""
    before: int = 0
    """The units before each touched one whose rows the build also gets (hour, day). An outage may
    have begun there. A touched unit also touches as many units after it."""

    @classmethod
    def hours(
        cls, time: str = "window_start", source_time: str = "event_time", before: int = 0
    ) -> "Grain":
        """UTC hours, with partitions like date=2026-11-21/hour=7."""
        return cls("hour", time, source_time, (), before)

    @classmethod
    def days(
        cls, time: str = "window_start", source_time: str = "event_time", before: int = 0
    ) -> "Grain":
        """UTC days, with partitions like date=2026-11-21."""
        return cls("day", time, source_time, (), before)

    @classmethod
    def by(cls, *columns: str) -> "Grain":
        """The values of some columns, such as `Grain.by("run")`, with partitions like run=a1."""
        return cls("value", columns=columns)

    @classmethod
    def whole(cls) -> "Grain":
        """The whole table, recomputed whenever the source has changed. It is meant for small
        tables."""
        return cls("all")

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """The partition columns. The engine makes `date` and `hour`; the table does not declare
        them."""
        if self.unit == "hour":
            return ("date", "hour")
        return ("date",) if self.unit == "day" else self.columns


@dataclass(frozen=True)
class Expectation:
    """A condition that every row of a table should meet. Use `expect` to make one."""

    name: str
    condition: str
    """SQL over the columns of the table, such as `value_double < 100`. Null is no failure."""
    on_fail: Literal["warn", "quarantine", "stop"]


def expect(
    name: str, condition: str, on_fail: Literal["warn", "quarantine", "stop"] = "warn"
) -> Expectation:
    """Declares an expectation. Raises TableError.

    `warn` counts the rows that fail. `quarantine` also moves them there (silver). `stop` lets the
    table fail, and nothing is written.
    """
    if not _NAME.fullmatch(name):
        raise TableError(f"expectation {name!r}: small letters, digits and _, 64 at most")
    if on_fail not in ("warn", "quarantine", "stop"):
        raise TableError(
            f"expectation {name}: on_fail is {on_fail!r}; there are warn, quarantine, stop"
        )
    return Expectation(name, condition, on_fail)


@dataclass(frozen=True)
class Emptied:
    """The rows that an expectation does not move to the quarantine: they stay without values."""

    condition: str
    """SQL that is true for such rows."""
    values: tuple[tuple[str, str | None], ...]
    """The columns that are replaced, and their values then."""


SilverBuild: TypeAlias = "Callable[..., DataFrame | Outputs] | StreamFold"
GoldBuild: TypeAlias = "Callable[[DataFrame], DataFrame] | GrainFold"


@dataclass(frozen=True)
class Table:
    """The declaration of one table. Raises TableError for one that cannot work."""

    name: str
    """The name: small letters, digits and underscores. It is the table's directory in the lake."""
    layer: Literal["silver", "gold"]
    source: str
    """The name of the source table: `records`, or any other declared one."""
    build: "SilverBuild | GoldBuild"
    """The function that makes the rows. Its result's columns are taken by name.

    silver: build(rows) or, with `state`, build(rows, state) -> DataFrame or Outputs, or a
    StreamFold. gold: build(rows) -> DataFrame, or a GrainFold.
    """
    columns: tuple[Column, ...]
    """The columns in the order of the files. The result is cast to these types."""
    description: str
    keys: tuple[str, ...] = ()
    """The columns that identify a row. The rows of every file are sorted by them."""
    partition_by: tuple[str, ...] = ()
    """Declared columns with few values each, such as `date` (silver)."""
    state: tuple[Column, ...] = ()
    """The columns of the state between steps (silver). Every step writes all of it, so keep it
    small."""
    grain: Grain | None = field(default=None)
    """The grain, required for gold."""
    expectations: tuple[Expectation, ...] = ()
    """The conditions that every row should meet."""
    emptied: Emptied | None = None
    """The rows that no expectation removes (silver). None: it may remove any."""
    date_of_source: bool = False
    """True if the `date` by which the table is partitioned is that of the source row (silver). A
    backfill of some days then needs no later days, and replaces only those. It makes any other
    silver table again as a whole."""
    revision: int = 1
    """The revision of the meaning of `build`. Increase it when the meaning changes; the stored
    table must then be rebuilt."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in (RECORDS, QUARANTINE):
            raise TableError(
                f"table name {self.name!r}: a small letter, then small letters, digits and _ "
                f"(64 at most), and not {RECORDS} or {QUARANTINE}"
            )
        if self.layer not in ("silver", "gold"):
            raise TableError(f"table {self.name}: layer is {self.layer!r}; there are silver, gold")
        names = [column.name for column in self.columns]
        if not names or len({name.lower() for name in names}) != len(names):
            raise TableError(f"table {self.name}: columns are missing or named twice: {names}")
        if isinstance(self.build, StreamFold):
            if self.layer != "silver" or not self.state:
                raise TableError(
                    f"table {self.name}: a StreamFold is for silver tables with state columns"
                )
        elif isinstance(self.build, GrainFold):
            if self.layer != "gold":
                raise TableError(f"table {self.name}: a GrainFold is for gold tables")
        elif not callable(self.build):
            raise TableError(f"table {self.name}: build is no function")
        if self.layer == "gold":
            self._check_gold(names)
        elif self.grain is not None:
            raise TableError(f"table {self.name}: grain is for gold tables; use partition_by")
        for what, wanted in (("keys", self.keys), ("partition_by", self.partition_by)):
            unknown = [name for name in wanted if name not in names]
            if unknown:
                raise TableError(f"table {self.name}: {what} has {unknown}, no such column")
        checks = [each.name for each in self.expectations]
        if len(set(checks)) != len(checks):
            raise TableError(f"table {self.name}: two expectations have the same name: {checks}")
        if self.date_of_source and "date" not in self.partition_by:
            raise TableError(f"table {self.name}: date_of_source needs partition_by=('date',)")
        if len(self.partition_by) >= len(names):
            raise TableError(f"table {self.name}: partition_by leaves no column for the files")

    def _check_gold(self, names: list[str]) -> None:
        grain = self.grain
        if grain is None:
            raise TableError(
                f"table {self.name}: a gold table needs a grain, such as grain=Grain.hours()"
            )
        if any(each.on_fail == "quarantine" for each in self.expectations):
            raise TableError(
                f"table {self.name}: on_fail='quarantine' is for silver tables, because a gold "
                "table is computed again from all rows. Use warn or stop"
            )
        if self.state or self.partition_by:
            raise TableError(f"table {self.name}: state and partition_by are for silver tables")
        timed = grain.unit in ("hour", "day")
        needed = (grain.time,) if timed else grain.columns
        missing = [name for name in needed if name not in names]
        if missing or (grain.unit == "value" and not grain.columns):
            raise TableError(f"table {self.name}: the grain needs columns {missing or 'by name'}")
        taken = [name for name in grain.partition_columns if timed and name in names]
        if taken:
            raise TableError(f"table {self.name}: {taken} is made by the grain; rename the column")
        if not self.keys:
            raise TableError(f"table {self.name}: a gold table needs keys: its rows are sorted")

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """The columns whose values are directories, outermost first."""
        return self.grain.partition_columns if self.grain is not None else self.partition_by

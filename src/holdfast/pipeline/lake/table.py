"""How a table of the lake is declared.

Every table is made from one other by a pure function of DataFrames; the first one is `records`
(bronze: every message of the log). Nothing here does anything: the engine reads it.

    from pyspark.sql import functions as F
    from holdfast.pipeline.lake.table import Column, Grain, Table

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

What a function may rely on, and must keep to:

- *Silver* sees every row of its source exactly once, in steps of any size. It gets the new rows,
  and its own state as the last step left it (empty at first) if the table has state columns. What
  it returns (rows, quarantine, state) is committed together. Rows are only ever added.
- *Gold* is recomputed by grain (an hour, a day, the values of columns, or everything): it gets all
  rows of the source that are in a touched grain, and its rows there are replaced.
- The result is a function of the rows alone: not of their order, of how they are spread over tasks
  or steps, of the clock or of chance. Bad rows are returned as quarantine, never raised.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

RECORDS: Final = "records"
"""Name of the bronze table, which is built in."""
QUARANTINE: Final = "quarantine"
"""Name of the table with what could not be used of any table's source rows."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")


class TableError(ValueError):
    """A declaration cannot be used. The text names the table, what is wrong, and what to do."""


@dataclass(frozen=True)
class Column:
    """A column with its Spark SQL type (`double`, `timestamp`, `array<string>`) and what it means,
    with the unit."""

    name: str
    type: str
    description: str


QUARANTINE_COLUMNS: Final = (
    Column("reason", "string", "what was wrong, and where in the payload"),
    Column("topic", "string", "topic of the message"),
    Column("partition", "int", "log partition"),
    Column("offset", "bigint", "offset in the log partition"),
    Column("timestamp", "timestamp", "when the broker stored the message"),
    Column("payload", "binary", "the payload as it came"),
)
"""What a silver build returns as quarantine. The stored table has `table` (whose build it was) and
`date` beside them."""


@dataclass(frozen=True)
class Outputs:
    """What a silver build returns if rows are not all: frames, not yet computed.

    `shared` are frames that several of the others are made from; they are kept in memory (or on
    disk) until the step is committed, so that they are computed once.
    """

    rows: "DataFrame"
    quarantine: "DataFrame | None" = None
    state: "DataFrame | None" = None
    shared: "tuple[DataFrame, ...]" = ()


@runtime_checkable
class StreamFold(Protocol):
    """A silver build that goes through streams, one row after the other, and remembers something of
    each. It works on Arrow data inside the tasks, which read the source's files and write the
    table's: a row never crosses to the JVM. It is sent to the tasks, and must have state columns.
    """

    @property
    def columns(self) -> Sequence[str]:
        """Those of the source that it needs."""
        ...

    def spread(self, rows: "pa.RecordBatch") -> "tuple[pa.RecordBatch, Any]":
        """The rows it wants, in any form; and a whole number for each (an array of numpy) that is
        the same for all rows of a stream."""
        ...

    def spread_states(self, states: "pa.RecordBatch") -> "Any":
        """The numbers of the streams of some rows of the state."""
        ...

    def fold(
        self, rows: "pa.Table", states: "pa.Table", oldest_us: int | None
    ) -> "Iterator[tuple[str, pa.RecordBatch]]":
        """All rows of the step of some streams, as `spread` gave them but in any order, and their
        states. Returns batches of the outputs (commits.ROWS, QUARANTINED, STATE) with the declared
        columns. `oldest_us`: the least of the source's times in the step, microseconds; None if it
        has none."""
        ...


@dataclass(frozen=True)
class Grain:
    """The unit in which a gold table is recomputed, and its partitions on disk: one file each.

    Rows without a value (a null time) or of a time outside the years 1 to 9999 are in no grain and
    are left out. Made by `hours`, `days`,
    `by` and `whole`.
    """

    unit: Literal["hour", "day", "value", "all"]
    time: str = "window_start"
    """hour, day: the column of the table itself, a timestamp."""
    source_time: str = "event_time"
    """hour, day: the column of the source, a timestamp."""
    columns: tuple[str, ...] = ()
    """value: names that both the table and its source have."""
    before: int = 0
    """hour, day: build also gets the rows of so many units before each touched one (an outage may
    have begun there), and a touched one touches so many after it."""

    @classmethod
    def hours(
        cls, time: str = "window_start", source_time: str = "event_time", before: int = 0
    ) -> "Grain":
        """UTC hours; partitions date=2026-11-21/hour=7."""
        return cls("hour", time, source_time, (), before)

    @classmethod
    def days(
        cls, time: str = "window_start", source_time: str = "event_time", before: int = 0
    ) -> "Grain":
        """UTC days; partitions date=2026-11-21."""
        return cls("day", time, source_time, (), before)

    @classmethod
    def by(cls, *columns: str) -> "Grain":
        """The values of some columns, such as `Grain.by("run")`; partitions run=a1."""
        return cls("value", columns=columns)

    @classmethod
    def whole(cls) -> "Grain":
        """All of it whenever the source has changed: for small tables."""
        return cls("all")

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """`date` and `hour` are made by the engine; the table does not declare them."""
        if self.unit == "hour":
            return ("date", "hour")
        return ("date",) if self.unit == "day" else self.columns


SilverBuild: TypeAlias = "Callable[..., DataFrame | Outputs] | StreamFold"
GoldBuild: TypeAlias = "Callable[[DataFrame], DataFrame]"


@dataclass(frozen=True)
class Table:
    """One table. Raises TableError for what cannot work."""

    name: str
    """Small letters, digits, underscores; its directory in the lake."""
    layer: Literal["silver", "gold"]
    source: str
    """Name of the table it is made from: `records`, or any other that is declared."""
    build: "SilverBuild | GoldBuild"
    """silver: build(rows) or, with `state`, build(rows, state) -> DataFrame or Outputs, or a
    StreamFold; gold: build(rows) -> DataFrame. Columns of the result are taken by name."""
    columns: tuple[Column, ...]
    """In this order in the files. The result is cast to these types."""
    description: str
    keys: tuple[str, ...] = ()
    """Columns that tell rows apart; the rows of every file are sorted by them."""
    partition_by: tuple[str, ...] = ()
    """silver: declared columns that have few values each (`date`)."""
    state: tuple[Column, ...] = ()
    """silver: what is remembered from one step to the next. Kept small: it is written whole."""
    grain: Grain | None = field(default=None)
    """gold: required."""
    revision: int = 1
    """Raise it when `build` has changed its meaning: what is stored must then be built anew."""

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
        if len(self.partition_by) >= len(names):
            raise TableError(f"table {self.name}: partition_by leaves no column for the files")

    def _check_gold(self, names: list[str]) -> None:
        grain = self.grain
        if grain is None:
            raise TableError(
                f"table {self.name}: a gold table needs a grain, such as grain=Grain.hours()"
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

"""Gold: a table that is recomputed by grain, where its source has changed.

A step finds the grains (hours, days, values) that the source's new files have rows of. It reads all
rows of those grains and replaces the table's rows there. Each grain is one sorted file, whose bytes
depend only on the source's rows.

The commits of the source have the least and greatest times of each file. So a step reads only files
that may have rows of the grains.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, functions
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from holdfast.client.log.lake.commits import (
    ROWS,
    Commit,
    Consumed,
    File,
    Replaced,
    changed,
    rows_of,
    unseen_replacement,
)
from holdfast.client.log.lake.files import LakeError
from holdfast.client.log.lake.parquet import WriteSpec, partition_path, partition_text
from holdfast_lake.lake.backfill.parts import Days
from holdfast_lake.lake.engine import Engine, Step, usable
from holdfast_lake.lake.fold_tasks import Grains
from holdfast_lake.lake.folding import fold_grains
from holdfast_lake.lake.schema import check_declared, names_of, stored_columns
from holdfast_lake.lake.silver import cast_to, checked, consumed_by
from holdfast_lake.lake.table import Grain, GrainFold, StreamFold, Table, TableError

GRAINS_MAX: Final = 300_000
"""The most grains that one step may touch.

It is more than there are hours since 2000. No table accepts event times before that year, so a
wrong device clock does not stop a table. More grains mean that the grain is too fine.
"""
DAY_US: Final = 86_400_000_000
UNIT_US: Final = {"hour": 3_600_000_000, "day": DAY_US}
"""The length of each unit in microseconds."""
DAYS: Final = ((date.min - date(1970, 1, 1)).days, (date.max - date(1970, 1, 1)).days + 1)
"""The days since 1970 that Python's dates can express, the end excluded: the years 1 to 9999.
Spark's times go further; rows of such a time are in no grain."""
COMPRESSION_LEVEL: Final = 3
Span = tuple[int, int]
"""Two times in microseconds since 1970, both included."""
EVER: Final[Span] = (0, 0)
"""The span of grains that are no times."""
IN_LIST_MAX: Final = 500
"""The most grains that are compared one by one. More are joined."""


@dataclass(frozen=True)
class AffectedGrains:
    """The grains of a step, sorted: hours or days since 1970, or tuples of values. For a whole
    table it is empty."""

    grain: Grain
    values: list[Any]

    @property
    def is_whole_table(self) -> bool:
        """True if the grain is the whole table."""
        return self.grain.unit == "all"

    def of_source(self) -> "AffectedGrains":
        """Returns these grains and those before them that the build also reads."""
        before = self.grain.before
        if not before:
            return self
        wanted = {value - back for value in self.values for back in range(before + 1)}
        return AffectedGrains(self.grain, sorted(wanted))

    def of_fold(self) -> Grains | None:
        """Returns the grains as a fold receives them. None: all rows."""
        unit_us = UNIT_US.get(self.grain.unit)
        return None if unit_us is None else Grains(self.grain.source_time, unit_us, self.values)

    def has_file(self, file: File) -> bool:
        """Returns whether a source file may have rows of these grains."""
        unit_us = UNIT_US.get(self.grain.unit)
        times = file.times.get(self.grain.source_time)
        if unit_us is None:
            return self._has_partition(file)
        if times is None:
            return False  # only null times: in no grain
        first, last = times[0] // unit_us, times[1] // unit_us
        index = bisect_left(self.values, first)
        return index < len(self.values) and bool(self.values[index] <= last)

    def _has_partition(self, file: File) -> bool:
        if self.is_whole_table or not set(self.grain.columns) <= set(file.partition):
            return True
        own = tuple(file.partition[name] for name in self.grain.columns)
        return own in {tuple(map(partition_text, value)) for value in self.values}


def step_gold(engine: Engine, table: Table, days: Days | None = None) -> Commit | None:
    """Recomputes the touched grains of a table, and those of some days.

    Returns None if the source has nothing new. Raises LakeError, TableError and the errors of
    Spark.
    """
    step = Step(engine, table.name)
    change = check_declared(table, step.last)
    source = usable(engine, table.source)
    if source is None:
        return None
    before = consumed_by(engine, table, source)
    if before.upto >= source.version and days is None:
        return None
    live = engine.log(table.source).live(source.version)
    new = changed(live, before.upto)
    unseen = unseen_replacement(source, before)
    spans = _again(_grain(table), unseen, days)
    if not new and not spans and unseen is None and step.last is not None:
        return None  # commits without rows
    engine.reached(f"{table.name} began")
    removed: list[str] = []
    own = engine.log(table.name).live(step.version - 1)
    if new or spans:
        touched = _touched(engine, table, source, _sources(table, live, new, spans), own, spans)
        _build(engine, table, step, source, live, touched)
        removed = _replaced(table, own, touched, step, spans)
    left = rows_of([file for file in own if file.path not in removed])
    columns = names_of(stored_columns(table))
    return step.commit(
        revision=table.revision,
        columns=columns,
        partition_by=table.partition_columns,
        consumed=Consumed(
            table=table.source,
            lineage=source.lineage,
            upto=source.version,
            rows=source.rows_total,
        ),
        removed=[path for path in removed if path not in {f.path for f in step.files()}],
        rows_total=left + step.rows(),
        change=change,
    )


def _again(grain: Grain, unseen: Replaced | None, days: Days | None) -> list[Span]:
    """Returns the spans of time whose grains are made again, even if no new file touches them.

    A grain of removed rows is one. Counter-example: a backfill by other rules leaves no row in an
    hour, and so no new file either. Tables whose grains are no times have one span, for all.
    """
    timed = grain.unit in UNIT_US
    found = []
    if unseen is not None and (not timed or grain.source_time in unseen.times):
        found.append(unseen.times[grain.source_time] if timed else EVER)
    if days is not None:
        first, last = (day * DAY_US for day in DAYS)
        end_us = last if days.end_us is None else days.end_us
        found.append((max(first, days.start_us), end_us - 1) if timed else EVER)
    return found


def _sources(
    table: Table, live: Sequence[File], new: Sequence[File], spans: Sequence[Span]
) -> list[File]:
    """Returns the source files whose grains are made again: the new ones and those of the spans."""
    grain = _grain(table)
    if not spans or grain.unit not in UNIT_US:
        return list(live if spans else new)
    paths = {file.path for file in new}
    times = ((file, file.times.get(grain.source_time)) for file in live)
    return [
        file
        for file, of in times
        if file.path in paths or (of is not None and any(_overlap(of, span) for span in spans))
    ]


def _overlap(one: Span, other: Span) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _touched(
    engine: Engine,
    table: Table,
    source: Commit,
    files: Sequence[File],
    own: Sequence[File],
    spans: Sequence[Span],
) -> AffectedGrains:
    """Returns the grains that files of the source touch, and the table's own grains in spans."""
    grain = _grain(table)
    if grain.unit == "all":
        return AffectedGrains(grain, [])
    values: list[Any]
    if grain.unit == "value":
        found = _distinct(engine, table, source, files)
        values = [row for row in found if None not in row]
        values.sort(key=lambda value: tuple(map(str, value)))
    else:
        # No row of the table is made again in vain, so a first step need not read the times.
        hit, unknown = _units_of_files(grain, files, 1 if own else IN_LIST_MAX)
        hit |= {row[0] for row in _distinct(engine, table, source, unknown) if row[0] is not None}
        hit |= set(_own_units(grain, own, spans))
        reached = {value + more for value in hit for more in range(grain.before + 1)}
        first, last = (day * DAY_US // UNIT_US[grain.unit] for day in DAYS)
        values = sorted(value for value in reached if first <= value < last)
    if len(values) > GRAINS_MAX:
        raise LakeError(
            f"table {table.name}: one step touches more than {GRAINS_MAX} grains ({grain.unit}): "
            f"are the times of {table.source} right?"
        )
    return AffectedGrains(grain, values)


def _own_units(grain: Grain, own: Sequence[File], spans: Sequence[Span]) -> Iterator[int]:
    """Yields the hours or days since 1970 of the table's files that overlap spans."""
    unit_us = UNIT_US[grain.unit]
    for file in own if spans else ():
        day = date.fromisoformat(file.partition["date"] or "")
        number = (day - date(1970, 1, 1)).days
        if grain.unit == "hour":
            number = 24 * number + int(file.partition["hour"] or 0)
        # An outage of the day before may be told by the table's row of this day.
        begin = (number - grain.before) * unit_us
        if any(_overlap((begin, (number + 1) * unit_us - 1), span) for span in spans):
            yield number


def _units_of_files(grain: Grain, files: Sequence[File], most: int) -> tuple[set[int], list[File]]:
    """Returns the hours or days of files that span at most `most`, and the files that span more."""
    unit_us = UNIT_US[grain.unit]
    known, unknown = set[int](), list[File]()
    for file in files:
        times = file.times.get(grain.source_time)
        if times is None:
            continue  # only null times: in no grain
        units = range(times[0] // unit_us, times[1] // unit_us + 1)
        if len(units) <= most:
            known.update(units)
        else:
            unknown.append(file)
    return known, unknown


def _distinct(
    engine: Engine, table: Table, source: Commit, files: Sequence[File]
) -> list[tuple[Any, ...]]:
    rows = engine.frame(source.columns, files, table.source)
    keys = _source_keys(table, rows)
    if not files:
        return []
    found = rows.select(*keys).distinct().limit(GRAINS_MAX + 1).collect()
    return [tuple(row) for row in found]


def _build(
    engine: Engine,
    table: Table,
    step: Step,
    source: Commit,
    live: Sequence[File],
    touched: AffectedGrains,
) -> None:
    """Computes the touched grains and stages one file each."""
    grain = touched.grain
    wanted = touched.of_source()
    files = [file for file in live if wanted.has_file(file)]
    assert not isinstance(table.build, StreamFold)
    built: Any
    if isinstance(table.build, GrainFold):
        built = fold_grains(engine, table.build, step, source.columns, files, wanted.of_fold())
    else:
        rows = engine.frame(source.columns, files, table.source)
        built = table.build(_only(engine, rows, _source_keys(table, rows), wanted))
    if not isinstance(built, DataFrame):
        raise TableError(f"table {table.name}: a gold build returns a DataFrame, not {type(built)}")
    frame = cast_to(built, names_of(table.columns), table.name)
    frame = _only(engine, frame, _own_keys(grain), touched)
    if table.expectations:
        checked(frame, table, step)
    if grain.unit in UNIT_US:
        frame = frame.withColumn("date", functions.to_date(grain.time))
    if grain.unit == "hour":
        frame = frame.withColumn("hour", functions.hour(grain.time))
    partitions = table.partition_columns
    frame = frame.repartition(*partitions) if partitions else frame.coalesce(1)
    frame = frame.sortWithinPartitions(*partitions, *_order(table, frame))
    spec = WriteSpec(
        step.stage_directory(ROWS),
        partitions,
        one_file_each=True,
        compression_level=COMPRESSION_LEVEL,
    )
    step.stage(ROWS, frame, spec, rows_of(files), replaced=True)


def _order(table: Table, frame: DataFrame) -> list[str]:
    """Returns the keys, and then all other columns that have an order.

    Keys alone are not enough: two rows with equal keys could change places, and the file's bytes
    with them.
    """
    rest = [
        each.name
        for each in frame.schema.fields
        if each.name not in table.keys and each.name not in table.partition_columns
        if _has_order(each.dataType)
    ]
    return [*(key for key in table.keys if key not in table.partition_columns), *rest]


def _has_order(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_has_order(member.dataType) for member in kind.fields)
    if isinstance(kind, ArrayType):
        return _has_order(kind.elementType)
    return not isinstance(kind, MapType | VariantType)


def _replaced(
    table: Table, own: Sequence[File], touched: AffectedGrains, step: Step, spans: Sequence[Span]
) -> list[str]:
    """Returns the table's files in the touched grains."""
    if touched.is_whole_table or (spans and touched.grain.unit == "value"):
        return [file.path for file in own]
    wanted = {partition_path(_partition(touched.grain, value)) for value in touched.values}
    wanted |= {partition_path(file.partition) for file in step.files()}
    return [file.path for file in own if partition_path(file.partition) in wanted]


def _partition(grain: Grain, value: Any) -> dict[str, str | None]:
    """Returns the partition values of a grain, as the writer makes them."""
    if grain.unit == "value":
        return dict(zip(grain.columns, map(partition_text, value), strict=True))
    day, hour = divmod(value, 24) if grain.unit == "hour" else (value, None)
    result: dict[str, str | None] = {"date": str(date(1970, 1, 1) + timedelta(days=day))}
    if hour is not None:
        result["hour"] = str(hour)
    return result


def _grain(table: Table) -> Grain:
    assert table.grain is not None
    return table.grain


def _source_keys(table: Table, rows: DataFrame) -> list[SparkColumn]:
    grain = _grain(table)
    needed = [grain.source_time] if grain.unit in UNIT_US else list(grain.columns)
    missing = [name for name in needed if name not in rows.columns]
    if missing:
        raise TableError(
            f"table {table.name}: its grain needs {', '.join(missing)} of {table.source}, which "
            f"has {', '.join(rows.columns)}"
        )
    if grain.unit in UNIT_US:
        return [_grain_number(grain.source_time, grain.unit)]
    return [functions.col(name) for name in grain.columns]


def _own_keys(grain: Grain) -> list[SparkColumn]:
    if grain.unit in UNIT_US:
        return [_grain_number(grain.time, grain.unit)]
    return [functions.col(name) for name in grain.columns]


def _grain_number(column: str, unit: str) -> SparkColumn:
    """Returns the hours or days since 1970, rounded down, also before 1970.

    Integers are used because floats are not exact for far times.
    """
    micros = functions.unix_micros(functions.col(column))
    length = functions.lit(UNIT_US[unit])
    whole = micros - functions.pmod(micros, length)
    return functions.call_function("div", whole, length).alias("grain")


def _only(
    engine: Engine, frame: DataFrame, keys: Sequence[SparkColumn], touched: AffectedGrains
) -> DataFrame:
    """Returns the rows of a frame that are in some grains."""
    if touched.is_whole_table:
        return frame
    if len(keys) == 1 and len(touched.values) <= IN_LIST_MAX:
        values = [value[0] if isinstance(value, tuple) else value for value in touched.values]
        return frame.where(keys[0].isin(values))
    named = [key.alias(f"__grain_{index}") for index, key in enumerate(keys)]
    names = [f"__grain_{index}" for index in range(len(keys))]
    rows = [value if isinstance(value, tuple) else (value,) for value in touched.values]
    kinds = frame.select(*named).schema
    wanted = functions.broadcast(engine.spark.createDataFrame(rows, kinds))
    return frame.select("*", *named).join(wanted, names, "left_semi").drop(*names)

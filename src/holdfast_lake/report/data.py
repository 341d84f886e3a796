"""Reads a lake's tables for the report: without Spark, and only the rows and columns it shows.

The longer the span, the longer each step of the time axes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from holdfast.client.log.lake.commits import CommitLog, File
from holdfast.client.log.lake.files import LakeError, readable
from holdfast.client.log.lake.objects import LakePath
from holdfast.client.log.lake.parquet import hive_files
from holdfast_lake.lake.schema import RECORDS_COLUMNS
from holdfast_lake.lake.table import QUARANTINE, RECORDS, Table

STEPS_MAX: Final = 300
"""The most steps of a time axis."""
SECOND_US: Final = 1_000_000
MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86_400
_LENGTHS_S: Final = (
    1, 5, 15, MINUTE_S, 300, 900, 3600, 4 * 3600, 12 * 3600, DAY_S, 2 * DAY_S, 7 * DAY_S,
    30 * DAY_S,
)  # fmt: skip
"""Each is at most five times the one before. So a span of more than a minute, if there are steps of
seconds, has at least 60 of them."""
_NAMES: Final = {1: "second", MINUTE_S: "minute", 3600: "hour", DAY_S: "day"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TimeGrain:
    """The length of the steps of a time axis."""

    seconds: int

    @property
    def name(self) -> str:
        """The length in words: `second`, `15 minutes`, `day`."""
        for length, name in reversed(_NAMES.items()):
            if self.seconds % length == 0:
                number = self.seconds // length
                return name if number == 1 else f"{number} {name}s"
        raise AssertionError("a second divides every step")

    @property
    def us(self) -> int:
        """The length in microseconds."""
        return self.seconds * SECOND_US

    def steps(self, times: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
        """Returns the begin of the step of each time."""
        micros = times.cast(pyarrow.int64())
        begins = pc.multiply(pc.floor(pc.divide(micros.cast(pyarrow.float64()), self.us)), self.us)
        return begins.cast(pyarrow.int64()).cast(pyarrow.timestamp("us", tz="UTC"))


def grain_of(times: Sequence[datetime | None], least_s: int = MINUTE_S) -> TimeGrain:
    """Returns the shortest grain with which a span has at most STEPS_MAX steps. `least_s` is that
    of the table: most tables have a row for each minute."""
    known = [time for time in times if time is not None]
    span_s = (max(known) - min(known)).total_seconds() if known else 0.0
    lengths = [length for length in _LENGTHS_S if length >= least_s]
    fitting = (each for each in lengths if span_s / each < STEPS_MAX)
    longest = lengths[-1] * (int(span_s // (lengths[-1] * STEPS_MAX)) + 1)
    return TimeGrain(next(fitting, longest))


def time_of(us: int) -> datetime:
    """Returns a time that is given in microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=int(us))


def summed(
    rows: pyarrow.Table, time: str, measures: Sequence[str], grain: TimeGrain
) -> tuple[list[datetime], dict[str, list[int]]]:
    """Returns the steps from the first to the last time, and the sums of some columns in each.

    A step without rows has 0: nothing happened then.
    """
    stepped = rows.append_column("step", grain.steps(rows[time]))
    found = stepped.group_by("step").aggregate([(name, "sum") for name in measures])
    found = found.sort_by("step")
    begins = np.asarray(found["step"].cast(pyarrow.int64()).to_pylist(), np.int64)
    places = (begins - begins[0]) // grain.us
    count = int(places[-1]) + 1
    steps = pyarrow.array(begins[0] + np.arange(count) * grain.us)
    sums = {}
    for name in measures:
        values = np.zeros(count, np.int64)
        values[places] = [value or 0 for value in found[f"{name}_sum"].to_pylist()]
        sums[name] = values.tolist()
    return steps.cast(pyarrow.timestamp("us", tz="UTC")).to_pylist(), sums


ROWS_MAX: Final = 2_000_000
"""The most rows of one table, apart from those of its newest file. The report shows those of the
newest files and says that there are more."""
BYTES_MAX: Final = 1 << 29
"""The most bytes of the rows of one table in memory, in Arrow. A file with which there are more is
left out, also if it is the newest."""
ROWS_AT_ONCE: Final = 1024
"""The rows that have their texts as long as they are: at most 64 MiB of topics."""
TEXT_BYTES_MAX: Final = 256
"""The most bytes of a text in memory. A longer one gets a hash in place of its middle."""
TEXT_END_BYTES: Final = 96
"""The bytes of a longer text that stay at its begin, and at its end."""
HASH_CHARACTERS: Final = 32
"""The hexadecimal digits of the hash."""
WINDOW: Final = "window_start"
"""The column of gold tables with the time of a row."""
QUARANTINE_ROWS_MAX: Final = 200_000
"""The most rows of the quarantine that the report counts."""
DEVICES_SHOWN: Final = 10
"""The devices that an error names."""
POINTS_MAX: Final = 600
"""The most points of one line in a chart."""

Rows = list[dict[str, Any]]


@dataclass
class LeftOut:
    """The rows of one table that the report does not show, because the table is too large."""

    rows: int = 0
    until_us: int | None = None
    """The newest time of these rows. Nothing that is newer is left out. None: not known."""

    def __str__(self) -> str:
        until = self.until_us
        text = f"{self.rows:,} rows"
        return text if until is None else f"{text} up to {time_of(until):%Y-%m-%d %H:%M} UTC"


class Stored:
    """The stored tables of a lake."""

    def __init__(self, lake: LakePath, tables: Iterable[Table]) -> None:
        """Opens the lake. Raises LakeError."""
        if not lake.is_dir():
            raise LakeError(f"there is no lake in {lake}: run the pipeline first")
        self.lake = lake
        self.tables = {table.name: table for table in tables}
        self.devices: pyarrow.Array | None = None
        """The only devices that are read. None: all."""
        self.cut: dict[str, LeftOut] = {}
        """The rows that are not shown, per table that was too large."""

    def choose_devices(self, patterns: Sequence[str]) -> None:
        """Reads only the devices whose names match one of some patterns, such as `press-*`.

        Raises LakeError if there is none.
        """
        known: set[str] = set()
        schema = pyarrow.schema([("device", pyarrow.string())])
        for name, table in self.tables.items():
            if any(column.name == "device" for column in table.columns) and table.layer == "gold":
                for file in self._files(name, None):
                    for part in self._batches(file, schema):
                        known.update(part["device"].unique().drop_null().to_pylist())
        chosen = sorted(each for each in known if any(fnmatchcase(each, p) for p in patterns))
        if not chosen:
            shown = ", ".join(sorted(known)[:DEVICES_SHOWN]) or "none"
            more = f" and {len(known) - DEVICES_SHOWN:,} more" if len(known) > DEVICES_SHOWN else ""
            raise LakeError(f"no device matches {', '.join(patterns)}; there are {shown}{more}")
        self.devices = pyarrow.array(chosen, pyarrow.string())

    def has(self, name: str) -> bool:
        """Returns whether a table has been written."""
        return CommitLog(self.lake, name).last() is not None

    def read(self, name: str, columns: Sequence[str] = (), run: str | None = None) -> pyarrow.Table:
        """Returns the rows of a table, sorted by its keys. With `run`, only those of one test run.

        Of a table that is too large the newest rows are returned, and `cut` has the others. A
        column that no file has (declared since) is null. Raises LakeError.
        """
        table = self.tables[name]
        wanted = [
            (column.name, _arrow_type(column.type))
            for column in table.columns
            if not columns or column.name in columns
        ]
        schema = pyarrow.schema(wanted)
        joined = self._newest(name, self._files(name, run), schema, ROWS_MAX)
        keys = [(key, "ascending") for key in table.keys if key in schema.names]
        return joined.sort_by(keys) if keys else joined

    def _newest(
        self, name: str, files: Iterable[File], schema: pyarrow.Schema, rows_max: int
    ) -> pyarrow.Table:
        """Returns the rows of the first files, and counts those of the others as left out.

        A chart of a time of which only some files were read would be wrong. So the rows of that
        time are left out, too.
        """
        parts: list[pyarrow.Table] = []
        rows, size = 0, 0
        left_out = LeftOut()
        for file in files:
            expected = file.rows if self.devices is None else 0
            found = None
            if not left_out.rows and not (rows and rows + expected > rows_max):
                found = self._of_devices(file, schema, BYTES_MAX - size)
            if found is None:
                left_out.rows += file.rows
                newest = file.times.get(WINDOW, (0, 0))[1]
                left_out.until_us = max(left_out.until_us or 0, newest) or None
                continue
            rows += found.num_rows
            size += found.nbytes
            parts.append(found)
        joined = pyarrow.concat_tables(parts) if parts else schema.empty_table()
        if left_out.rows:
            self.cut[name] = left_out
            if left_out.until_us is not None and WINDOW in schema.names:
                since = pyarrow.scalar(left_out.until_us, _arrow_type("timestamp"))
                whole = joined.filter(pc.greater(joined[WINDOW], since))
                left_out.rows += joined.num_rows - whole.num_rows
                return whole
        return joined

    def rows_of(self, name: str) -> int:
        """Returns the number of the rows of a table, from the list of files."""
        return sum(file.rows for file in self._files(name, None))

    def is_too_large(self, name: str) -> bool:
        """Returns whether the report leaves out rows of a table if all devices are shown."""
        return self.devices is None and self.rows_of(name) > ROWS_MAX

    def span(self, name: str, column: str) -> tuple[int, int] | None:
        """Returns the least and the greatest time of a column in µs since 1970, from the list of
        files. None: there are no rows, or a file of an older version does not say it."""
        files = [file for file in self._files(name, None) if file.rows]
        times = [file.times[column] for file in files if column in file.times]
        if not times or len(times) < len(files):
            return None
        return min(least for least, _ in times), max(most for _, most in times)

    def rows(self, name: str, columns: Sequence[str], rows_max: int) -> pyarrow.Table | None:
        """Returns some columns of all rows of a silver or bronze table, in any order. None: there
        are more than `rows_max`, or than BYTES_MAX bytes. Raises LakeError."""
        files = self._files(name, None)
        if sum(file.rows for file in files) > rows_max:
            return None
        declared = RECORDS_COLUMNS if name == RECORDS else self.tables[name].columns
        types = {column.name: column.type for column in declared}
        schema = pyarrow.schema([(each, _arrow_type(types[each])) for each in columns])
        parts: list[pyarrow.Table] = []
        size = 0
        for file in files:
            found = self._of_devices(file, schema, BYTES_MAX - size)
            if found is None:
                return None
            size += found.nbytes
            parts.append(found)
        return pyarrow.concat_tables(parts) if parts else schema.empty_table()

    def _of_devices(
        self, file: File, schema: pyarrow.Schema, bytes_max: int
    ) -> pyarrow.Table | None:
        """Returns the rows of a file of the chosen devices. None: they have more than `bytes_max`
        bytes."""
        parts = []
        size = 0
        for part in self._batches(file, schema):
            if self.devices is not None and "device" in schema.names:
                part = part.filter(pc.is_in(part["device"], self.devices))
            size += part.nbytes
            if size > bytes_max:
                return None
            parts.append(part)
        # One piece, because a sort looks each row up in the pieces.
        return pyarrow.concat_tables(parts).combine_chunks() if parts else schema.empty_table()

    def read_quarantine(self) -> pyarrow.Table:
        """Returns the newest rows of the quarantine without the payloads. Raises LakeError."""
        texts = ("reason", "topic", "client_id", "code")
        schema = pyarrow.schema(
            [*((name, pyarrow.string()) for name in texts), ("timestamp", _arrow_type("timestamp"))]
        )
        files = hive_files(self.lake / QUARANTINE)
        files.sort(key=lambda file: file.partition["date"] or "", reverse=True)
        found = self._newest(QUARANTINE, files, schema, QUARANTINE_ROWS_MAX)
        return found.filter(pc.is_valid(found["timestamp"]))

    def _files(self, name: str, run: str | None) -> list[File]:
        """Returns the files of a table, newest first."""
        log = CommitLog(self.lake, name)
        commit = log.last()
        if commit is None:
            return []
        files = log.live(commit.version)
        return [
            file for file in reversed(files) if run is None or file.partition.get("run", run) == run
        ]

    def _batches(self, file: File, schema: pyarrow.Schema) -> Iterator[pyarrow.Table]:
        """Yields the rows of a file in parts."""
        path = self.lake / file.path
        try:
            # The file is not read as part of a data set, because names of directories would become
            # columns.
            with parquet.ParquetFile(readable(path)) as opened:
                present = [name for name in schema.names if name in opened.schema_arrow.names]
                for batch in opened.iter_batches(ROWS_AT_ONCE, columns=present):
                    yield _table(file, schema, batch)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise LakeError(f"{path} cannot be read: {error}. Run the pipeline again") from None


def _table(file: File, schema: pyarrow.Schema, batch: pyarrow.RecordBatch) -> pyarrow.Table:
    """Returns the rows of a batch with the columns of the partition, and those it does not have."""
    arrays = []
    for field in schema:
        if field.name in file.partition:
            value = pyarrow.scalar(file.partition[field.name]).cast(field.type)
            arrays.append(pyarrow.repeat(value, batch.num_rows))
        elif field.name in batch.schema.names:
            arrays.append(_bounded(batch[field.name].cast(field.type)))
        else:
            arrays.append(pyarrow.nulls(batch.num_rows, field.type))
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _bounded(column: pyarrow.Array) -> pyarrow.Array:
    """Returns a column without the middles of long texts. A hash keeps different texts apart."""
    if column.type != pyarrow.string():
        return column
    is_long = pc.fill_null(pc.greater(pc.binary_length(column), TEXT_BYTES_MAX), False)
    if not pc.any(is_long).as_py():
        return column
    texts = column.filter(is_long).to_pylist()
    return pc.replace_with_mask(column, is_long, pyarrow.array(map(_cut, texts), pyarrow.string()))


def _cut(text: str) -> str:
    raw = text.encode()
    begin, end = raw[:TEXT_END_BYTES], raw[-TEXT_END_BYTES:]
    middle = sha256(raw).hexdigest()[:HASH_CHARACTERS]
    return f"{begin.decode(errors='ignore')}…{middle}…{end.decode(errors='ignore')}"


def _arrow_type(text: str) -> pyarrow.DataType:
    simple = {
        "string": pyarrow.string(),
        "int": pyarrow.int32(),
        "bigint": pyarrow.int64(),
        "double": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
        "timestamp": pyarrow.timestamp("us", tz="UTC"),
        "date": pyarrow.date32(),
    }
    if text not in simple:
        raise LakeError(f"the report cannot show columns of type {text}")
    return simple[text]


def most(table: pyarrow.Table, by: Sequence[str], measure: str, count: int) -> Rows:
    """Returns the groups with the greatest sums, and those sums. Ties are ordered by name."""
    sums = table.group_by(list(by)).aggregate([(measure, "sum")])
    order = [(f"{measure}_sum", "descending"), *((name, "ascending") for name in by)]
    return list(sums.sort_by(order).slice(0, count).to_pylist())


def where(table: pyarrow.Table, **equal: Any) -> pyarrow.Table:
    """Returns the rows in which columns have some values."""
    for name, value in equal.items():
        table = table.filter(pc.equal(table[name], value))
    return table


def thinned(
    xs: Sequence[Any], ys: Sequence[float | None], points_max: int = POINTS_MAX
) -> tuple[list[Any], list[float | None]]:
    """Keeps the lowest and the highest point of each stretch, in order, so that no peak disappears.

    `xs` must be sorted. A line of at most `points_max` points stays as it is.
    """
    if len(xs) <= points_max:
        return list(xs), list(ys)
    stretch = -(-len(xs) * 2 // points_max)
    kept: list[int] = []
    for begin in range(0, len(xs), stretch):
        places = range(begin, min(begin + stretch, len(xs)))
        values = [(value, at) for at in places if (value := ys[at]) is not None]
        if values:
            kept += sorted({min(values)[1], max(values)[1]})
        else:
            kept.append(begin)
    return [xs[at] for at in kept], [ys[at] for at in kept]

"""Statistics of groups of rows, which depend on the rows alone and not on their order.

Adding doubles in another order changes the last digits. So the values of a group are sorted, and
added one by one from the least to the greatest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from holdfast.client.log.lake.commits import ROWS
from holdfast.client.log.lake.parquet import Integers, in_groups, ranks_of
from holdfast_lake.lake.schema import arrow_schema
from holdfast_lake.lake.table import Column
from holdfast_lake.tables.columns import TIME

UNIT_US: Final = {"minute": 60_000_000, "hour": 3_600_000_000}
"""The lengths of windows in microseconds."""
OBSERVED_MIN_S: Final = 10.0
"""The fewest observed seconds of a window that has a rate. Two readings a second apart would
otherwise make two a second."""

LISTED_MAX: Final = 4
"""The most texts of a group that are listed."""

Doubles = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]
ArrowColumns = Mapping[str, pa.Array | pa.ChunkedArray]


class GroupedRows:
    """The rows of a table, sorted, in groups with equal keys. Each result has a value per group."""

    def __init__(self, rows: pa.Table, keys: Sequence[str], order: Sequence[str] = ()) -> None:
        """`order` are the columns that sort the rows of a group."""
        self.rows, self.begins = in_groups(rows, keys, order)
        self.ends = np.append(self.begins[1:], self.rows.num_rows)

    def key(self, name: str) -> pa.ChunkedArray:
        """Returns the value that all rows of a group share."""
        return self.rows[name].take(pa.array(self.begins))

    def size(self) -> pa.Array:
        """Returns the number of rows."""
        return pa.array(self.ends - self.begins)

    def count(self, conditions: pa.ChunkedArray) -> pa.Array:
        """Returns the number of rows in which a condition is true."""
        return self._reduced(np.add, conditions.fill_null(False))

    def sum(self, name: str) -> pa.Array:
        """Returns the sum of whole numbers."""
        return self._reduced(np.add, self.rows[name])

    def least(self, name: str) -> pa.Array:
        """Returns the least number or time."""
        return self._reduced(np.minimum, self.rows[name])

    def greatest(self, name: str) -> pa.Array:
        """Returns the greatest number or time."""
        return self._reduced(np.maximum, self.rows[name])

    def _reduced(self, reduce: np.ufunc, values: pa.ChunkedArray) -> pa.Array:
        integers = values.cast(pa.int64()).to_numpy()
        return pa.array(reduce.reduceat(integers, self.begins))

    def distinct(self, name: str) -> pa.Array:
        """Returns the number of distinct values that are not null. The rows are sorted by it."""
        ranks = ranks_of(self.rows[name])
        is_new = np.append(True, ranks[1:] != ranks[:-1])
        is_new[self.begins] = True
        return pa.array(np.add.reduceat((is_new & (ranks >= 0)).astype(np.int64), self.begins))

    def listed(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Returns the distinct texts of each group, joined by commas, and where they are several.

        It is null without any. At most LISTED_MAX are listed.
        """
        texts = self.rows[name].cast(pa.string()).combine_chunks().dictionary_encode()
        known = texts.dictionary.to_pylist()
        rows = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
        group = np.searchsorted(self.begins, rows, "right") - 1
        codes = texts.indices.fill_null(0).to_numpy()[rows]
        names: dict[int, list[str]] = defaultdict(list)
        for pair in np.unique(group * len(known) + codes).tolist():
            names[pair // len(known)].append(known[pair % len(known)])
        listed = np.full(len(self.begins), None, object)
        is_several = np.zeros(len(self.begins), np.bool_)
        for at, some in names.items():
            listed[at] = ", ".join(sorted(some)[:LISTED_MAX])
            is_several[at] = len(some) > 1
        return pa.array(listed, pa.string()), pa.array(is_several)

    def present(self, name: str) -> "Present":
        """Returns the values of a column that are not null."""
        column = self.rows[name]
        before = np.append(0, np.cumsum(column.is_valid().to_numpy()))
        return Present(column.drop_null(), before[self.begins], before[self.ends])


@dataclass
class Present:
    """The values of the groups that are not null, in the order of the rows."""

    values: pa.ChunkedArray
    begins: Integers
    ends: Integers

    def size(self) -> pa.Array:
        """Returns the number of values."""
        return pa.array(self.ends - self.begins)

    def first(self) -> pa.ChunkedArray:
        """Returns the first value. It is null if there is none."""
        return self._at(self.begins)

    def last(self) -> pa.ChunkedArray:
        """Returns the last value. It is null if there is none."""
        return self._at(self.ends - 1)

    def _at(self, places: Integers) -> pa.ChunkedArray:
        return self.values.take(pa.array(places, mask=self.ends == self.begins))

    def sorted(self) -> Iterator[tuple[Integers, Numbers]]:
        """Yields the groups with equally many values, at least one, and their values: sorted, a row
        per group."""
        values = self.values.to_numpy() + 0  # -0.0 becomes 0.0
        counts = self.ends - self.begins
        for count in np.unique(counts[counts > 0]):
            groups = np.flatnonzero(counts == count)
            found = values[self.begins[groups, None] + np.arange(count)]
            found.sort(axis=1)
            yield groups, found


class Results:
    """Doubles of groups, which are null where nothing is added."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: dict[str, tuple[Doubles, npt.NDArray[np.bool_]]] = {}

    def put(self, name: str, groups: Integers, values: Numbers, known: Any = True) -> None:
        """Adds the values of some groups. Where `known` is false they stay null."""
        if name not in self._found:
            self._found[name] = np.empty(self._count), np.ones(self._count, np.bool_)
        found, is_null = self._found[name]
        found[groups] = values
        is_null[groups] = ~np.broadcast_to(known, len(groups))

    def array(self, name: str) -> pa.Array:
        """Returns the values of a name. All are null if none was added."""
        if name not in self._found:
            return pa.nulls(self._count, pa.float64())
        found, is_null = self._found[name]
        return pa.array(found, mask=is_null)


def percentile(values: Numbers, share: float) -> Doubles:
    """Returns a percentile of each row of sorted values, interpolated linearly (as numpy does)."""
    rank = (values.shape[1] - 1) * share
    below = int(rank)
    part = rank - below
    low: Doubles = values[:, below].astype(np.float64)
    if part:
        # Not low + (high - low) * part, because that difference may overflow a double.
        low = low * (1 - part) + values[:, below + 1].astype(np.float64) * part
    return low


def put_moments(results: Results, groups: Integers, values: Doubles) -> None:
    """Adds the `mean` and `stddev` of each row of sorted values.

    The mean is never outside the least and the greatest value. A sum of rounded doubles is not
    exact: 33 times 10.7 gives a mean of 10.699999999999994. The sum of what the values differ from
    that mean corrects it. The mean is null if the sum overflows a double. The standard deviation is
    that of a sample, and null for fewer than two values.
    """
    count = values.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        rough = _sums(values) / count
        rest = _sums(values - rough[:, None]) / count
        better = np.where(np.abs(rest) < np.inf, rough + rest, rough)
        mean = np.clip(better, values[:, 0], values[:, -1])
        has_mean = np.abs(rough) < np.inf
        results.put("mean", groups, mean, has_mean)
        if count > 1:
            away = values - mean[:, None]
            squares = _sums(away * away)
            deviation = np.sqrt(squares / (count - 1))
            results.put("stddev", groups, deviation, has_mean & (squares < np.inf))


def _sums(values: Doubles) -> Doubles:
    """Returns the sum of each row. numpy's own sum adds in an order that depends on the machine."""
    return np.add.accumulate(values, axis=1)[:, -1]


@dataclass(frozen=True)
class WindowFold:
    """A GrainFold (see lake/table.py) to a row for each window of time and each value of some keys.

    The grain of its table is an hour.
    """

    table: Sequence[Column]
    """The columns of the table."""
    columns: Sequence[str]
    """The columns of the source that the fold needs."""
    prepare: Callable[[pa.RecordBatch], pa.RecordBatch]
    """Return the rows that count, with the columns of `keys`, `time`, `order` and those that
    `aggregate` needs."""
    aggregate: Callable[[GroupedRows], ArrowColumns]
    """Return the columns of the table except the keys, the window and the rates."""
    keys: tuple[str, ...] = ("device",)
    time: str = "store_time"
    """The column of the source that chooses the window."""
    unit: str = "minute"
    order: tuple[str, ...] = ()
    """The columns that sort the rows of a group."""
    rates: Mapping[str, str] = field(default_factory=dict)
    """The columns of the table that are another column per second."""

    @property
    def folded(self) -> Sequence[tuple[str, str]]:
        """The columns of the table except the rates, and the first and the last time."""
        found = [(each.name, each.type) for each in self.table if each.name not in self.rates]
        return (*found, ("first_time", "timestamp"), ("last_time", "timestamp"))

    def spread(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Integers]:
        """Returns the rows that count, and a number for each that is equal within a group."""
        rows = self.prepare(rows)
        hours = rows[self.time].cast(pa.int64()).to_numpy() // UNIT_US["hour"]
        return rows, text_hashes(rows[self.keys[0]]) + hours

    def fold(
        self, rows: pa.Table, states: pa.Table, oldest_us: int | None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Folds the rows of some groups."""
        if not rows.num_rows:
            return
        times = rows[self.time].cast(pa.int64()).to_numpy()
        window = pa.array(times - times % UNIT_US[self.unit]).cast(TIME)
        groups = GroupedRows(
            rows.append_column("window_start", window), (*self.keys, "window_start"), self.order
        )
        found = {name: groups.key(name) for name in (*self.keys, "window_start")}
        found |= {"first_time": groups.least(self.time), "last_time": groups.greatest(self.time)}
        found |= self.aggregate(groups)
        table = pa.table({name: found[name] for name, _ in self.folded})
        for batch in table.cast(arrow_schema(self.folded)).to_batches():
            yield ROWS, batch

    def finish(self, folded: DataFrame) -> DataFrame:
        """Adds the rates."""
        for rate, count in self.rates.items():
            folded = folded.withColumn(rate, per_second(count, self.unit))
        return folded


def text_hashes(texts: pa.Array) -> Integers:
    """Returns a whole number for each text, which is the same in every process."""
    encoded = texts.dictionary_encode()
    hashes = [crc32(text.encode()) for text in encoded.dictionary.to_pylist()]
    found: Integers = np.array([*hashes, 0], np.int64)[encoded.indices.fill_null(-1).to_numpy()]
    return found


def per_second(count: str, unit: str) -> SparkColumn:
    """Returns a count divided by the observed seconds of its window.

    The frame has `window_start`, and `first_time` and `last_time` of each group. A minute that is
    not over is not divided by 60: what is observed of an hour begins with the first time of all its
    rows and ends with the last one. It is null below OBSERVED_MIN_S.
    """
    hour = Window.partitionBy(F.date_trunc("hour", "window_start"))
    start = F.unix_micros("window_start")
    end = start + UNIT_US[unit]
    begin = F.greatest(start, F.min(F.unix_micros("first_time")).over(hour))
    until = F.least(end, F.max(F.unix_micros("last_time")).over(hour))
    seconds = (until - begin) / 1_000_000.0
    return F.when(seconds >= OBSERVED_MIN_S, F.col(count) / seconds)

"""Opens, sorts and writes the lake's Parquet files, inside a task.

Spark's own Parquet writer is not used, for three reasons. Its file names are random. Its row groups
depend on the free memory of the executor, so the same rows would not give the same bytes on another
master. Half-written files are in the table's directory while it works.

Here each attempt of a task stages its files elsewhere under its own names, and the driver gives
them their final paths. The module imports no Spark, so that a task imports it quickly.

Python reads the files in an object store, in the driver or in tasks. So Spark needs no package for
the store, and all parts of a run use the same credentials.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.client.log.lake.commits import File, rows_of
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.files import complete, open_new, readable
from holdfast.client.log.lake.objects import LakePath, ObjectPath, location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def parquet_file(path: LakePath, size: int = 0, **options: Any) -> Iterator[pq.ParquetFile]:
    """Opens a Parquet file. `size`: its bytes, if they are known. Raises LakeError, also later, if
    its content is damaged."""
    try:
        with pq.ParquetFile(readable(path, size), **options) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        # The operating system's errors have a number and a name, and another attempt may succeed.
        is_content = isinstance(error, pa.ArrowException) or (
            type(error) is OSError and error.errno is None
        )
        if not is_content:
            raise
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise LakeError(
            f"{path} is damaged: {first}. Restore it, or build the table again"
        ) from None


Integers = npt.NDArray[np.int64]


def in_order(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Returns the rows sorted by some columns of texts, whole numbers, dates and times."""
    return in_groups(table, keys)[0]


def in_groups(
    table: pa.Table, keys: Sequence[str], order: Sequence[str] = ()
) -> tuple[pa.Table, Integers]:
    """Returns the rows sorted by keys and then by other columns, and the first row of each group
    with equal keys."""
    table = table.unify_dictionaries().combine_chunks()
    ranks = [ranks_of(table.column(name)) for name in (*keys, *order)]
    if ranks and not _are_sorted(ranks):
        places = np.lexsort(ranks[::-1])
        table = table.take(pa.array(places))
        ranks = [rank[places] for rank in ranks[: len(keys)]]
    begins = np.zeros(table.num_rows, np.bool_)
    begins[:1] = True
    for rank in ranks[: len(keys)]:
        begins[1:] |= rank[1:] != rank[:-1]
    return table, np.flatnonzero(begins)


def ranks_of(column: pa.ChunkedArray) -> Integers:
    """Returns whole numbers in the order of the values. That of a null is the least."""
    kind = column.type
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = array.chunk(0) if array.num_chunks else pa.array([], kind)
        encoded = array if pa.types.is_dictionary(kind) else array.dictionary_encode()
        order = pc.array_sort_indices(encoded.dictionary.cast(pa.binary())).to_numpy()
        # A name may be in a dictionary twice. The last rank is for null.
        names = encoded.dictionary.take(pa.array(order)).to_pylist()
        places = np.full(len(names) + 1, -1, np.int64)
        rank = -1
        for at, name in enumerate(names):
            rank += at == 0 or name != names[at - 1]
            places[order[at]] = rank
        ranks: Integers = places[encoded.indices.fill_null(-1).to_numpy()]
        return ranks
    whole = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
    whole = whole.cast(pa.int64())
    found: Any = whole.fill_null(np.iinfo(np.int64).min) if whole.null_count else whole
    integers: Integers = found.to_numpy()
    return integers


def _are_sorted(ranks: Sequence[Integers]) -> bool:
    """Returns whether no row is less than the one before it."""
    tied = np.ones(max(0, len(ranks[0]) - 1), np.bool_)
    for rank in ranks:
        if np.any(tied & (rank[1:] < rank[:-1])):
            return False
        tied &= rank[1:] == rank[:-1]
        if not tied.any():
            break
    return True


ROW_GROUP_ROWS: Final = 131_072
"""The rows of a row group. It is fixed, so that equal rows give equal files."""
ROW_GROUP_BYTES: Final = 64 << 20
"""The most bytes of unencoded Arrow data per row group. It bounds the memory of a task per open
file."""
OPEN_FILES_MAX: Final = 64
"""The most open files of a task. All are closed before another one is opened."""
NULL_PARTITION: Final = "__HIVE_DEFAULT_PARTITION__"
FILE_SCHEMA: Final = "file string"
"""The result rows of a writing task: one JSON text per file."""

_SPECIAL: Final = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
"""The characters that Hive and Spark escape in the names of partition directories."""


@dataclass(frozen=True)
class WriteSpec:
    """The parameters of one task's writing."""

    directory: str
    """The existing directory for staged files, or its URL in an object store."""
    partition_by: tuple[str, ...] = ()
    one_file_each: bool = False
    """True if the rows come sorted by the partition columns and one task gets all rows of a
    partition. Each partition is then one file, whose bytes depend only on its rows."""
    encodings: Mapping[str, str] = field(default_factory=dict)
    """The Parquet encoding per column. The other columns are dictionary-encoded where that pays."""
    compression_level: int = 1
    notes_offsets: bool = False
    """True for records, whose files have `File.offsets`."""


class PartitionFile:
    """One open file of a partition."""

    def __init__(self, path: LakePath, spec: WriteSpec, partition: dict[str, str | None]) -> None:
        self.path = path
        self.spec = spec
        self.partition = partition
        self.rows = 0
        self.times: dict[str, tuple[int, int]] = {}
        self.offsets: dict[int, tuple[int, int]] = {}
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._file: Any = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Appends rows."""
        while batch.num_rows:
            # The number of rows in a group does not depend on the sizes of the batches.
            part = batch.slice(0, ROW_GROUP_ROWS - self._waiting_rows)
            batch = batch.slice(part.num_rows)
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            self._waiting_bytes += part.nbytes
            full = self._waiting_bytes >= ROW_GROUP_BYTES and not self.spec.one_file_each
            if full or self._waiting_rows == ROW_GROUP_ROWS:
                self._write_group()

    def close(self) -> File:
        """Completes the file and makes it durable."""
        if self._waiting:
            self._write_group()
        assert self._writer is not None
        self._writer.close()
        size = complete(self._file, self.path)
        return File(
            path="",
            staged=self.path.name,
            rows=self.rows,
            bytes=size,
            version=0,
            partition=self.partition,
            times=self.times,
            offsets=self.offsets,
        )

    def abandon(self) -> None:
        """Closes the file without completing it. It has no effect after `close`."""
        if self._file is not None:
            self._file.close()

    def _write_group(self) -> None:
        # Each column becomes one chunk. Otherwise Parquet's pages would depend on the sizes of the
        # batches.
        table = pa.Table.from_batches(self._waiting).combine_chunks()
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        if self._writer is None:
            self._open(table.schema)
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        self.rows += table.num_rows
        self._note_times(table)
        if self.spec.notes_offsets:
            note_offsets(self.offsets, table)

    def _open(self, schema: pa.Schema) -> None:
        self._file = open_new(self.path)
        given = self.spec.encodings
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            compression="zstd",
            compression_level=self.spec.compression_level,
            # Readers need not know that a task had texts in dictionaries.
            store_schema=False,
            use_dictionary=[leaf for leaf in _leaves(schema) if leaf not in given],
            column_encoding={leaf: given[leaf] for leaf in _leaves(schema) if leaf in given},
        )

    def _note_times(self, table: pa.Table) -> None:
        for column in table.schema:
            if not pa.types.is_timestamp(column.type):
                continue
            extremes = pc.min_max(table.column(column.name).cast(pa.int64())).as_py()
            least, greatest = extremes["min"], extremes["max"]
            if least is None:
                continue
            before = self.times.get(column.name, (least, greatest))
            self.times[column.name] = (min(least, before[0]), max(greatest, before[1]))


def note_offsets(found: dict[int, tuple[int, int]], rows: pa.Table) -> None:
    """Widens the ranges of offsets by those of some rows."""
    keys = pa.table({"p": rows.column("partition"), "o": rows.column("offset")})
    for row in keys.group_by("p").aggregate([("o", "min_max")]).to_pylist():
        least, end = row["o_min_max"]["min"], row["o_min_max"]["max"] + 1
        low, high = found.get(row["p"], (least, end))
        found[row["p"]] = (min(low, least), max(high, end))


def offsets_of_rows(path: LakePath) -> dict[int, tuple[int, int]]:
    """Reads `File.offsets` of a file that an older version has written."""
    found: dict[int, tuple[int, int]] = {}
    with parquet_file(path) as file:
        for batch in file.iter_batches(columns=["partition", "offset"]):
            note_offsets(found, pa.Table.from_batches([batch]))
    return found


def _leaves(schema: pa.Schema) -> list[str]:
    """Returns the Parquet columns that get an encoding: plain columns, and members of structs."""
    result = []
    for column in schema:
        if pa.types.is_struct(column.type):
            result += [f"{column.name}.{member.name}" for member in column.type]
        elif not pa.types.is_nested(column.type):
            result.append(column.name)
    return result


class PartitionedWriter:
    """The files of one attempt of a task, at most OPEN_FILES_MAX of them open."""

    def __init__(self, spec: WriteSpec, prefix: str) -> None:
        self.spec = spec
        self.prefix = prefix
        self._open: dict[tuple[str | None, ...], PartitionFile] = {}
        self._done: list[File] = []
        self._names = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends rows to the files of their partitions."""
        if not batch.num_rows:
            return
        for values, part in split(batch, self.spec.partition_by):
            file = self._open.get(values)
            if file is None:
                self._make_room()
                file = self._open[values] = self._new(values)
            file.add(part)

    def close(self) -> list[File]:
        """Completes all open files, and returns all files so far."""
        for file in self._open.values():
            self._done.append(file.close())
        self._open.clear()
        return self._done

    def abandon(self) -> None:
        """Closes the open files without completing them."""
        for file in self._open.values():
            file.abandon()

    def _make_room(self) -> None:
        if self.spec.one_file_each or len(self._open) >= OPEN_FILES_MAX:
            self.close()

    def _new(self, values: tuple[str | None, ...]) -> PartitionFile:
        self._names += 1
        name = f"{self.prefix}-{self._names:05}.parquet"
        partition = dict(zip(self.spec.partition_by, values, strict=True))
        return PartitionFile(location(self.spec.directory) / name, self.spec, partition)


def write_files(
    batches: Iterable[pa.RecordBatch], spec: WriteSpec, prefix: str
) -> Iterator[pa.RecordBatch]:
    """Writes all batches inside a task, and yields the files as rows of FILE_SCHEMA."""
    writer = PartitionedWriter(spec, prefix)
    try:
        for batch in batches:
            writer.write(batch)
        files = writer.close()
    finally:
        writer.abandon()
    texts = [msgspec.json.encode(file).decode() for file in files]
    yield pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], names=["file"])


def split(
    batch: pa.RecordBatch, columns: tuple[str, ...]
) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """Yields the rows of each partition without the partition columns.

    Partitions come in the order of their first rows, and rows stay in order.
    """
    if not columns:
        yield (), batch
        return
    codes = np.zeros(batch.num_rows, np.int64)
    dictionaries = []
    for name in columns:
        encoded = batch.column(name).dictionary_encode(null_encoding="encode")
        # Arrow converts the values, because Python has no dates beyond the year 9999.
        texts = encoded.dictionary.cast(pa.string()).to_pylist()
        dictionaries.append([partition_text(value) for value in texts])
        codes = codes * (len(encoded.dictionary) + 1) + encoded.indices.to_numpy()
    rest = batch.drop_columns(list(columns))
    found, first = np.unique(codes, return_index=True)
    for index in np.argsort(first):
        code = int(found[index])
        values: list[str | None] = []
        for dictionary in reversed(dictionaries):
            code, place = divmod(code, len(dictionary) + 1)
            values.append(dictionary[place])
        rows = (
            rest if len(found) == 1 else rest.take(pa.array(np.flatnonzero(codes == found[index])))
        )
        yield tuple(reversed(values)), rows


def with_date(batch: pa.RecordBatch, time: str) -> pa.RecordBatch:
    """Appends the column `date`: the UTC day of a time column."""
    day = pc.cast(batch.column(time).view(pa.timestamp("us")), pa.date32())
    return batch.append_column("date", day)


def partition_text(value: object) -> str | None:
    """Returns a partition value as commits and paths (before escaping) have it."""
    if value is None or value == "":
        return None
    return str(value)


def partition_path(partition: Mapping[str, str | None]) -> str:
    """Returns a path like `date=2026-11-21/hour=7/`, escaped as Hive does. Empty without partition
    columns."""
    return "".join(
        f"{name}={NULL_PARTITION if value is None else escape(value)}/"
        for name, value in partition.items()
    )


def partition_in(path: str) -> dict[str, str | None]:
    """Returns the values of partition columns in the path of a file, see `partition_path`."""
    parts = (part.partition("=") for part in path.split("/")[:-1])
    return {name: None if value == NULL_PARTITION else unquote(value) for name, _, value in parts}


def escape(text: str) -> str:
    """Escapes a text for the name of a partition directory."""
    return _SPECIAL.sub(lambda match: f"%{ord(match.group()):02X}", text)


DRIVER_ROWS: Final = 20_000
"""The most rows that the driver reads itself. A Python process of Spark needs seconds to start."""
READ_ROWS: Final = 32_768
FILES_PER_TASK: Final = 8


def object_frame(
    spark: "SparkSession", lake: ObjectPath, schema: Any, files: Sequence[File]
) -> "DataFrame":
    """Returns the rows of some files. A column that a file lacks is null there."""
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow = to_arrow_schema(schema, timezone="UTC")
    if rows_of(files) <= DRIVER_ROWS:
        batches = [batch for file in files for batch in read_file(lake, file, arrow)]
        return spark.createDataFrame(pa.Table.from_batches(batches, arrow), schema)

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the files of one Spark task."""
        for batch in batches:
            for text in batch.column(0).to_pylist():
                yield from read_file(lake, msgspec.json.decode(text, type=File), arrow)

    texts = [(msgspec.json.encode(file).decode(),) for file in files]
    tasks = max(spark.sparkContext.defaultParallelism, -(-len(texts) // FILES_PER_TASK))
    named = spark.sparkContext.parallelize(texts, min(len(texts), tasks))
    return spark.createDataFrame(named, "file string").mapInArrow(read, schema)


def read_file(lake: ObjectPath, file: File, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file with all columns of a schema, those of its partition included."""
    with parquet_file(lake / file.path, pre_buffer=True) as opened:
        there = [name for name in schema.names if name in opened.schema_arrow.names]
        for batch in opened.iter_batches(READ_ROWS, columns=there, use_threads=False):
            arrays = []
            for field in schema:
                if field.name in file.partition:
                    value = pa.scalar(file.partition[field.name], pa.string()).cast(field.type)
                    arrays.append(pa.repeat(value, batch.num_rows))
                elif field.name in there:
                    arrays.append(batch.column(field.name).cast(field.type))
                else:
                    arrays.append(pa.nulls(batch.num_rows, field.type))
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def hive_files(place: LakePath) -> list[File]:
    """Returns the Parquet files of a directory of the lake with directories as Hive names them."""
    paths: Iterable[LakePath] = (
        (each.path for each in place.objects())
        if isinstance(place, ObjectPath)
        else place.glob("*=*/**/*.parquet")
    )
    found = []
    for path in paths:
        *inner, name = str(path)[len(str(place)) + 1 :].split("/")
        if not name.endswith(".parquet") or not all("=" in part for part in inner):
            continue
        found.append(
            File(
                path="/".join([place.name, *inner, name]),
                rows=pq.read_metadata(readable(path)).num_rows,
                bytes=0,
                version=0,
                partition=partition_in("/".join([*inner, name])),
            )
        )
    return found

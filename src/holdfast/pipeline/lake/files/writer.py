"""Arrow batches to Parquet files, inside a task.

Spark's own Parquet writer is not used, for three reasons: its file names are random, its row groups
depend on how much memory the executor has left (the same rows would not give the same bytes on
another master), and half-written files are in the table's directory while it works. Here the files
are staged elsewhere under names of their own for each attempt of a task; the driver gives them
their final ones. Knows no Spark, so that it is quick to import in a task.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.pipeline.lake.files.commits import File

ROW_GROUP_ROWS: Final = 131_072
ROW_GROUP_BYTES: Final = 64 << 20
"""Of unencoded Arrow data; bounds what a task holds per open file."""
OPEN_FILES_MAX: Final = 64
NULL_PARTITION: Final = "__HIVE_DEFAULT_PARTITION__"
FILE_SCHEMA: Final = "file string"
"""What a writing task returns: one JSON text per file."""

_SPECIAL: Final = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
"""What Hive, and Spark after it, escapes in the names of partition directories."""


@dataclass(frozen=True)
class WriteSpec:
    """How one task writes."""

    directory: str
    """Where files are staged; exists."""
    partition_by: tuple[str, ...] = ()
    one_file_each: bool = False
    """Rows come sorted by the partition columns, and all of a partition's rows come to one task:
    one file per partition, whose bytes depend on nothing but its rows."""
    encodings: Mapping[str, str] = field(default_factory=dict)
    """Parquet encoding by column; the others are dictionary-encoded where that pays."""
    compression_level: int = 1


class PartitionFile:
    """One file being written."""

    def __init__(self, path: Path, spec: WriteSpec, partition: dict[str, str | None]) -> None:
        self.path = path
        self.spec = spec
        self.partition = partition
        self.rows = 0
        self.times: dict[str, tuple[int, int]] = {}
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._file: Any = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        while batch.num_rows:
            # Groups have exactly as many rows, whatever the batches are cut into.
            part = batch.slice(0, ROW_GROUP_ROWS - self._waiting_rows)
            batch = batch.slice(part.num_rows)
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            self._waiting_bytes += part.nbytes
            full = self._waiting_bytes >= ROW_GROUP_BYTES and not self.spec.one_file_each
            if full or self._waiting_rows == ROW_GROUP_ROWS:
                self._write_group()

    def close(self) -> File:
        """The file is durable then."""
        if self._waiting:
            self._write_group()
        assert self._writer is not None
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        return File(
            path="",
            staged=self.path.name,
            rows=self.rows,
            bytes=size,
            version=0,
            partition=self.partition,
            times=self.times,
        )

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write_group(self) -> None:
        # One chunk a column: Parquet's pages must not depend on where the batches were cut.
        table = pa.Table.from_batches(self._waiting).combine_chunks()
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        if self._writer is None:
            self._open(table.schema)
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        self.rows += table.num_rows
        self._note_times(table)

    def _open(self, schema: pa.Schema) -> None:
        self._file = open(self.path, "wb")  # noqa: SIM115 - closed by close() or abandon()
        given = self.spec.encodings
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            compression="zstd",
            compression_level=self.spec.compression_level,
            # That a task had texts in dictionaries is nothing for readers.
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


def _leaves(schema: pa.Schema) -> list[str]:
    """The Parquet columns that are given an encoding: the plain ones, and members of structs."""
    result = []
    for column in schema:
        if pa.types.is_struct(column.type):
            result += [f"{column.name}.{member.name}" for member in column.type]
        elif not pa.types.is_nested(column.type):
            result.append(column.name)
    return result


class PartitionedWriter:
    """The files of one attempt of a task."""

    def __init__(self, spec: WriteSpec, prefix: str) -> None:
        self.spec = spec
        self.prefix = prefix
        self._open: dict[tuple[str | None, ...], PartitionFile] = {}
        self._done: list[File] = []
        self._names = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        for values, part in split(batch, self.spec.partition_by):
            file = self._open.get(values)
            if file is None:
                self._make_room()
                file = self._open[values] = self._new(values)
            file.add(part)

    def close(self) -> list[File]:
        for file in self._open.values():
            self._done.append(file.close())
        self._open.clear()
        return self._done

    def abandon(self) -> None:
        for file in self._open.values():
            file.abandon()

    def _make_room(self) -> None:
        if self.spec.one_file_each or len(self._open) >= OPEN_FILES_MAX:
            self.close()

    def _new(self, values: tuple[str | None, ...]) -> PartitionFile:
        self._names += 1
        name = f"{self.prefix}-{self._names:05}.parquet"
        partition = dict(zip(self.spec.partition_by, values, strict=True))
        return PartitionFile(Path(self.spec.directory) / name, self.spec, partition)


def write_files(
    batches: Iterable[pa.RecordBatch], spec: WriteSpec, prefix: str
) -> Iterator[pa.RecordBatch]:
    """Run in a task: all of the batches to files; what became of them as rows of FILE_SCHEMA."""
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
    """The rows of each partition without the partition columns; partitions in the order in which
    they come first, rows in theirs."""
    if not columns:
        yield (), batch
        return
    codes = np.zeros(batch.num_rows, np.int64)
    dictionaries = []
    for name in columns:
        encoded = batch.column(name).dictionary_encode(null_encoding="encode")
        # By Arrow: Python has no dates beyond the year 9999.
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
    """With the column `date`: the UTC day of one of its times."""
    day = pc.cast(batch.column(time).view(pa.timestamp("us")), pa.date32())
    return batch.append_column("date", day)


def partition_text(value: object) -> str | None:
    """A partition's value as it is written in paths (before escaping) and in commits."""
    if value is None or value == "":
        return None
    return str(value)


def partition_path(partition: Mapping[str, str | None]) -> str:
    """`date=2026-11-21/hour=7/`, escaped as Hive does it; empty without partition columns."""
    return "".join(
        f"{name}={NULL_PARTITION if value is None else escape(value)}/"
        for name, value in partition.items()
    )


def escape(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"%{ord(match.group()):02X}", text)

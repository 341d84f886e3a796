"""Runs a fold's tasks (see folding.py): they read files and write files.

The module imports no Spark, so that a task imports it quickly.
"""

import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.client.log.lake.commits import COUNTS, QUARANTINED, ROWS
from holdfast.client.log.lake.files import complete, open_new, readable
from holdfast.client.log.lake.objects import location
from holdfast.client.log.lake.parquet import (
    PartitionedWriter,
    WriteSpec,
    in_order,
    parquet_file,
    with_date,
)
from holdfast_lake.lake.table import Fold, StreamFold

READ_ROWS: Final = 32_768
"""The rows read at a time, never more than a row group."""
HELD_BYTES: Final = 128 << 20
"""The bytes of Arrow data that a task of a small step keeps in memory. The rest goes to a file."""
FILE_BYTES_MAX: Final = 512 << 20
"""The bytes of Arrow data that become one file, which is sorted in memory."""
SHARE: Final = "share"
"""A marker in place of an output: the text is a TaskShare."""

Pair = tuple[str, str]
"""The name of an output, and one of its files as JSON (commits.File)."""


class Unit(msgspec.Struct):
    """Some row groups of a file: each `step`-th, from `first` on."""

    path: str
    is_state: bool
    first: int
    step: int


class TaskShare(msgspec.Struct):
    """An exchange file, and the bucket of each of its batches."""

    path: str
    is_state: bool
    buckets: list[int]


@dataclass(frozen=True)
class Grains:
    """Some units of time: hours or days since 1970."""

    time: str
    """The column of the source that is in them."""
    unit_us: int
    numbers: Sequence[int]

    def rows_in(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the rows of these units."""
        times = rows[self.time].cast(pa.int64())
        numbers = times.fill_null(0).to_numpy() // self.unit_us
        wanted = np.isin(numbers, self.numbers) & times.is_valid().to_numpy(zero_copy_only=False)
        return rows if wanted.all() else rows.filter(pa.array(wanted))


@dataclass(frozen=True)
class FoldSpec:
    """The parameters of a fold, as tasks receive them."""

    fold: Fold
    rows_schema: pa.Schema
    """The schema of the source's rows."""
    state_schema: pa.Schema
    oldest_us: int | None
    keys: Sequence[str]
    outputs: dict[str, WriteSpec]
    exchange: str
    """The directory of the exchange files, or its URL in an object store."""
    file_rows: int
    """The rows after which a task begins another file. Each file is sorted separately."""
    grains: Grains | None = None
    """The grains whose rows are folded. None: all rows."""


def fold_units(spec: FoldSpec, units: Sequence[Unit], prefix: str) -> list[Pair]:
    """Folds a complete small step inside one task."""
    is_local = isinstance(location(spec.exchange), Path)
    rows = _Held(spec.exchange if is_local else tempfile.gettempdir(), prefix)
    states: list[pa.RecordBatch] = []
    try:
        for unit in units:
            for batch in _read(spec, unit):
                if unit.is_state:
                    states.append(batch)
                else:
                    rows.add(spec.fold.spread(batch)[0])
    finally:
        rows.close()
    return _fold(spec, rows.batches(), states, prefix)


class _Held:
    """Batches of one schema. They stay in memory up to HELD_BYTES, then go to a file.

    The bound counts Arrow bytes, because the files of steps are compressed: a small file may hold
    much data.
    """

    def __init__(self, directory: str, prefix: str) -> None:
        self._path = f"{directory}/{prefix}-{secrets.token_hex(4)}"
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes <= HELD_BYTES:
            return
        if self._writer is None:
            self._writer = pa.ipc.new_file(self._path, batch.schema)
        for each in self._batches:
            self._writer.write_batch(each)
        self._batches = []

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def batches(self) -> list[pa.RecordBatch]:
        """Returns the batches in the order in which they came. Call it after `close`."""
        if self._writer is None:
            return self._batches
        reader = pa.ipc.open_file(pa.memory_map(self._path))
        os.unlink(self._path)  # the map stays until the batches are released
        return [reader.get_batch(at) for at in range(reader.num_record_batches)]


def spread_units(spec: FoldSpec, units: Sequence[Unit], name: str, buckets: int) -> list[Pair]:
    """Divides some units into buckets inside a task, in the first round."""
    shares = []
    for is_state in (False, True):
        own = [unit for unit in units if unit.is_state == is_state]
        share = _spread(
            spec, own, TaskShare(f"{spec.exchange}/{name}-{is_state:d}", is_state, []), buckets
        )
        if share.buckets:
            shares.append((SHARE, msgspec.json.encode(share).decode()))
    return shares


def _spread(spec: FoldSpec, units: Sequence[Unit], share: TaskShare, buckets: int) -> TaskShare:
    """Divides the rows of some units into buckets, and writes them to one exchange file."""
    writer = None
    place = location(share.path)
    sink: Any = share.path if isinstance(place, Path) else open_new(place)
    try:
        for unit in units:
            for batch in _read(spec, unit):
                if unit.is_state:
                    assert isinstance(spec.fold, StreamFold)
                    numbers = spec.fold.spread_states(batch)
                else:
                    batch, numbers = spec.fold.spread(batch)
                for bucket, part in _parted(batch, numbers % buckets, buckets):
                    if writer is None:
                        writer = pa.ipc.new_file(sink, part.schema)
                    writer.write_batch(part)
                    share.buckets.append(bucket)
    finally:
        if writer is not None:
            writer.close()
    if share.buckets and not isinstance(place, Path):
        complete(sink, place)
    return share


def _parted(
    batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], buckets: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields the rows of each bucket."""
    batch = batch.take(pa.array(np.argsort(numbers, kind="stable")))
    ends = np.cumsum(np.bincount(numbers, minlength=buckets)).tolist()
    begin = 0
    for bucket, end in enumerate(ends):
        if end > begin:
            yield bucket, batch.slice(begin, end - begin)
        begin = end


def fold_bucket(
    spec: FoldSpec, shares: Sequence[TaskShare], bucket: int, prefix: str
) -> list[Pair]:
    """Folds one bucket inside a task, in the second round."""
    found: dict[bool, list[pa.RecordBatch]] = {False: [], True: []}
    for share in shares:
        if bucket in share.buckets:
            place = location(share.path)
            source = pa.memory_map(share.path) if isinstance(place, Path) else readable(place)
            reader = pa.ipc.open_file(source)
            found[share.is_state] += [
                reader.get_batch(at) for at, each in enumerate(share.buckets) if each == bucket
            ]
    return _fold(spec, found[False], found[True], prefix)


def _read(spec: FoldSpec, unit: Unit) -> Iterator[pa.RecordBatch]:
    schema = spec.state_schema if unit.is_state else spec.rows_schema
    with parquet_file(location(unit.path)) as file:
        groups = range(unit.first, file.num_row_groups, unit.step)
        if not groups:
            return
        there = [name for name in schema.names if name in file.schema_arrow.names]
        # One group is read at a time, because a batch of several may have more bytes than the
        # writer's bound.
        for group in groups:
            for batch in file.iter_batches(READ_ROWS, [group], there, use_threads=False):
                # A file may be older than a column, which is null there.
                arrays = [
                    batch.column(name).cast(kind) if name in there else pa.nulls(len(batch), kind)
                    for name, kind in zip(schema.names, schema.types, strict=True)
                ]
                rows = pa.RecordBatch.from_arrays(arrays, names=schema.names)
                yield rows if unit.is_state or spec.grains is None else spec.grains.rows_in(rows)


def _fold(
    spec: FoldSpec, rows: list[pa.RecordBatch], states: list[pa.RecordBatch], prefix: str
) -> list[Pair]:
    """Folds rows with their states, and writes the outputs.

    If the fold fails, the files stay incomplete and no commit names them.
    """
    written = _Outputs(spec, prefix)
    try:
        known = pa.Table.from_batches(states, None if states else spec.state_schema)
        every = pa.Table.from_batches(rows, None if rows else spec.rows_schema)
        for output, batch in spec.fold.fold(every, known, spec.oldest_us):
            written.add(output, batch)
        return written.close()
    finally:
        written.abandon()


@dataclass
class _Outputs:
    """The output files of one attempt of a task."""

    spec: FoldSpec
    prefix: str
    _rows: list[pa.RecordBatch] = field(default_factory=list)
    _count: int = 0
    _bytes: int = 0
    _counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._writers = {
            output: PartitionedWriter(spec, self.prefix)
            for output, spec in self.spec.outputs.items()
        }

    def add(self, output: str, batch: pa.RecordBatch) -> None:
        if output == COUNTS:
            self._counts.update(
                dict(zip(*(each.to_pylist() for each in batch.columns), strict=True))
            )
            return
        if output == QUARANTINED:
            batch = with_date(batch, "timestamp")
        if output != ROWS:
            self._writers[output].write(batch)
            return
        self._rows.append(batch)
        self._count += batch.num_rows
        self._bytes += batch.nbytes
        if self._count >= self.spec.file_rows or self._bytes >= FILE_BYTES_MAX:
            self._write_rows()

    def _write_rows(self) -> None:
        """Sorts the collected rows and writes them as one file, or as one per partition."""
        if self._rows:
            table = in_order(pa.Table.from_batches(self._rows), self.spec.keys)
            self._rows, self._count, self._bytes = [], 0, 0
            writer = self._writers[ROWS]
            for batch in table.to_batches():
                writer.write(batch)
            writer.close()

    def close(self) -> list[Pair]:
        self._write_rows()
        files = [
            (output, msgspec.json.encode(file).decode())
            for output, writer in self._writers.items()
            for file in writer.close()
        ]
        if self._counts:
            files.append((COUNTS, msgspec.json.encode(self._counts).decode()))
        return files

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abandon()

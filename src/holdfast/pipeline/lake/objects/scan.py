"""Reads the rows of files in an object store, for Spark.

Python reads the files, in the driver or in tasks. So Spark needs no package for the store, and all
parts of a run use the same credentials.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.lake.files.commits import File, rows_of
from holdfast.pipeline.lake.files.files import readable
from holdfast.pipeline.lake.files.parquet import NULL_PARTITION, parquet_file
from holdfast.pipeline.lake.objects.paths import LakePath, ObjectPath

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
                partition={
                    name: None if value == NULL_PARTITION else unquote(value)
                    for name, _, value in (part.partition("=") for part in inner)
                },
            )
        )
    return found

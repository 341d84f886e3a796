"""Reads the log and its lake with Spark's own reader for the files of the lake.

Each row of a Python data source crosses from Python to the JVM, which doubles its cost. Spark reads
the Parquet files of a lake in the JVM, and the source only what is behind them.

Invariant: the rows are those that `spark.read.format("holdfast")` has with the same options.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.client.log.lake.objects import ObjectPath
from holdfast.client.log.lake.records import LakePiece, LakeRecords
from holdfast.client.log.reading import offsets
from holdfast.client.log.reading.offsets import OffsetRange
from holdfast_lake.source.options import DDL_TYPES, SourceOptions, parse
from holdfast_lake.source.pushdown import PushedFilters
from holdfast_lake.source.source import LogAccess, batch_ranges

SCHEMA: Final = ", ".join(f"{name} {kind}" for name, kind in DDL_TYPES.items())
_POSITIONS: Final = ("startingoffsets", "endingoffsets", "startingtimestamp", "endingtimestamp")


def read_messages(spark: SparkSession, **options: object) -> DataFrame:
    """Returns the messages that `spark.read.format("holdfast")` returns with these options.

    Spark's own reader reads the files of the option `lake`, if that is a directory. The range is
    that of now: a later query of the same DataFrame has the same rows. It fails if a compaction or
    a backfill has replaced a file since. Raises OptionError, LakeError and the errors of the
    source.
    """
    given = {name: str(value) for name, value in options.items()}
    parsed = parse(given)
    access = LogAccess(parsed)
    try:
        parts = access.divide(batch_ranges(access, PushedFilters()))
        lake, generation = access.lake, access.log.generation().number
    finally:
        access.close()
    behind = {each.partition: each for each in parts.log}
    found = _lake_frames(spark, lake, parts.lake) if len(behind) == len(parts.log) else []
    if not found:
        return spark.read.format("holdfast").options(**given).load()
    frames = [each.where(_wanted_topics(parsed)) for each in found]
    if behind:
        start = offsets.to_json({p: each.start for p, each in behind.items()}, generation)
        end = offsets.to_json({p: each.end for p, each in behind.items()})
        tail = {name: value for name, value in given.items() if name.lower() not in _POSITIONS}
        tail |= {"startingOffsets": json.dumps(start), "endingOffsets": json.dumps(end)}
        frames.append(spark.read.format("holdfast").options(**tail).load())
    return reduce(DataFrame.unionAll, (each.select(*parsed.columns) for each in frames))


def _lake_frames(
    spark: SparkSession, lake: LakeRecords | None, ranges: Sequence[OffsetRange]
) -> list[DataFrame]:
    """Returns the rows of a lake in some ranges. Empty: there are none, or Spark's reader cannot
    read just these."""
    if lake is None or isinstance(lake.path, ObjectPath):
        return []
    pieces = lake.pieces(ranges)
    whole = [each for each in pieces if lake.is_whole(each)]
    cut = [each for each in pieces if not lake.is_whole(each)]
    # After a restore of the log, an older file may have other rows at offsets of the ranges.
    is_exact = not (cut and lake.commit.restored)
    # The files of a commit that was just recorded may not be in their places yet.
    if not is_exact or not all((lake.path / each.file.path).exists() for each in pieces):
        return []
    frames = [_frame(spark, lake, whole)] if whole else []
    if cut:
        frames.append(_frame(spark, lake, cut).where(_any_of(map(_is_in, ranges))))
    return frames


def _frame(spark: SparkSession, lake: LakeRecords, pieces: Iterable[LakePiece]) -> DataFrame:
    files = dict.fromkeys(str(lake.path / each.file.path) for each in pieces)
    return spark.read.schema(SCHEMA).parquet(*files)


def _is_in(item: OffsetRange) -> Column:
    at = F.col("offset")
    return (F.col("partition") == item.partition) & (at >= item.start) & (at < item.end)


def _wanted_topics(options: SourceOptions) -> Column:
    filters = [each for clause in options.topics.clauses for each in clause.filters]
    matching = (F.col("topic").rlike(topic_pattern(each)) for each in filters)
    return _any_of(matching) if filters else F.lit(True)


def _any_of(conditions: Iterable[Column]) -> Column:
    return reduce(Column.__or__, conditions)


def topic_pattern(topics: str) -> str:
    """Returns the regular expression, for Java, of the topics that match an MQTT filter."""
    *before, last = ("[^/]*" if each == "+" else re.escape(each) for each in topics.split("/"))
    text = "/".join([*before, last])
    if topics.endswith("#"):
        text = "/".join(before) + "(/.*)?" if before else ".*"
    # A wildcard as the first level matches no topic of the broker's own, such as $SYS.
    return r"(?s)\A" + (r"(?!\$)" if topics[0] in "+#" else "") + text + r"\z"

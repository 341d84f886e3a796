"""A lake whose steps are small enough for the driver alone, so that no Spark is started.

Only `records` and `readings` can be made this way. Spark is asked for its settings and for types.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import types

from holdfast.pipeline.lake import schema
from holdfast.pipeline.lake.files.commits import CommitLog
from holdfast.pipeline.lake.files.files import readable
from holdfast.pipeline.lake.lake import Lake

PRODUCER = types.StructType()
PRODUCER.add("id", types.StringType()).add("epoch", types.LongType())
PRODUCER.add("sequence", types.LongType())
TYPES: dict[str, types.DataType] = {
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "int": types.IntegerType(),
    "tinyint": types.ByteType(),
    "bigint": types.LongType(),
    "double": types.DoubleType(),
    "boolean": types.BooleanType(),
    "timestamp": types.TimestampType(),
    "date": types.DateType(),
    "struct<id: string, epoch: bigint, sequence: bigint>": PRODUCER,
}


def no_spark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What stands for a session of Spark."""
    monkeypatch.setattr(schema, "_parse", TYPES.__getitem__)
    context = SimpleNamespace(
        defaultParallelism=2, master="local[2]", setLocalProperty=lambda *_: None
    )
    return SimpleNamespace(conf=SimpleNamespace(get=lambda _: "UTC"), sparkContext=context)


def rows(lake: Lake, name: str, days: list[str] | None = None) -> Counter[Any]:
    """The rows of a table as of its newest commit, of some days."""
    log = CommitLog(lake.path, name)
    last = log.last()
    found: Counter[Any] = Counter()
    for file in log.live(last.version) if last is not None else ():
        if days is None or file.partition["date"] in days:
            table = pq.read_table(readable(lake.path / file.path), partitioning=None)
            found.update(
                (file.partition["date"], *map(str, row.values())) for row in table.to_pylist()
            )
    return found


def state(lake: Lake) -> dict[str, str]:
    """The state of `readings`, by stream."""
    last = CommitLog(lake.path, "readings").last()
    return {
        row["stream"]: row["state"]
        for file in (last.state if last is not None else ())
        for row in pq.read_table(readable(lake.path / file.path)).to_pylist()
    }

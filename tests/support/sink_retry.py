"""A Spark write whose tasks fail half-way: one raises, the process of another is killed. Spark
makes new attempts of them. `python -m tests.support.sink_retry SERVERS ROWS DIRECTORY`.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from holdfast_lake import spark_session

BATCH_ROWS = 500


def run(servers: str, rows: int, directory: Path) -> None:
    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        for number, batch in enumerate(batches):
            mark = directory / f"failed-{partition}"
            if number == 5 and not mark.exists():
                mark.touch()
                if partition == 0:
                    raise ZeroDivisionError("a row that cannot be computed")
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    # Four attempts; in local mode there is one otherwise.
    spark = spark_session(
        "sink-retry",
        "local[2,4]",
        **{
            "spark.sql.execution.arrow.maxRecordsPerBatch": BATCH_ROWS,
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.log.level": "OFF",
        },
    )
    try:
        table = spark.range(0, rows, numPartitions=2).selectExpr(
            "concat('plant/', id % 3) AS topic", "CAST(id AS string) AS payload"
        )
        failing = table.mapInArrow(fail_once, table.schema)
        failing.write.format("holdfast").mode("append").options(
            mqttServers=servers, exactlyOnce="require"
        ).save()
    finally:
        spark.stop()


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

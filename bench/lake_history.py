"""How fast Spark reads a year of messages from a lake, without a broker and without the log.

    python -m bench.lake_history [--json PATH] [--gigabytes 5] [--directory DIR]

A year of messages of 1,000 random bytes, from 500 devices, is written as a log, taken into a lake,
and the log is removed. Then all columns of the lake are read with `format("holdfast")` and with
`read_messages`, and one day of one device. Each read has to have the right number of rows and each
offset once. The peak is the resident memory of Java and all Python processes together.
Needs twice the bytes on the disk, and a quarter of an hour for 20 GB on two cores.
"""

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench.options import new_parser, write_json
from bench.process import rss_bytes
from bench.spark import (
    BATCH_RECORDS,
    DEVICES_OF,
    PARTITIONS,
    SEGMENT_BYTES,
    Figures,
    served,
    topic_of,
)
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import Manifest
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.record import MESSAGE, Record
from holdfast_lake import Lake, read_messages
from holdfast_lake.session import lake_session

PAYLOAD_BYTES: Final = 1000
YEAR_US: Final = 365 * 86_400 * 1_000_000
NOISE: Final = os.urandom(1 << 20)
SAMPLE_S: Final = 0.1


def write_year(directory: Path, records: int) -> None:
    """A log whose records are spread evenly over the last year."""
    files = create(OsFileSystem(directory), Manifest("n1", PARTITIONS, ""))
    offsets = [0] * PARTITIONS
    begin_us = time.time_ns() // 1000 - YEAR_US
    written = 0
    while written < records:
        index = ActiveIndex(written, offsets)
        with open(directory / "journal" / f"{written:020d}.log", "wb") as segment:
            while written < records and segment.tell() < SEGMENT_BYTES:
                partition = written // BATCH_RECORDS % PARTITIONS
                builder = BatchBuilder(partition, offsets[partition])
                for number in range(written, min(written + BATCH_RECORDS, records)):
                    devices = DEVICES_OF[partition]
                    at = number * 7919 % (len(NOISE) - PAYLOAD_BYTES)
                    record = Record(
                        partition,
                        MESSAGE,
                        flags=1,
                        timestamp_us=begin_us + number * YEAR_US // records,
                        topic=topic_of(devices[number % len(devices)]),
                        client_id=b"bench",
                        payload=NOISE[at : at + PAYLOAD_BYTES],
                    )
                    builder.add(record)
                data = builder.build(1)
                index.add_built(segment.tell(), len(data), builder)
                segment.write(data)
                offsets[partition] += builder.count
                written += builder.count
        if written < records:
            files.write_index(index.head.sequence, index.encode())


@contextmanager
def peak_memory(figures: Figures, name: str) -> Iterator[None]:
    """Samples the resident memory of this process and those below it."""
    over = threading.Event()
    peak = 0

    def sample() -> None:
        nonlocal peak
        while not over.wait(SAMPLE_S):
            peak = max(peak, rss_bytes(os.getpid()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        figures[f"{name}, peak MB"] = round(peak / 1e6)


def run(spark: SparkSession, folder: Path, records: int) -> Figures:
    log, lake = folder / "log", folder / "lake"
    write_year(log, records)
    figures: Figures = {"rows": records}

    def timed(name: str, work: Callable[[], None]) -> None:
        with peak_memory(figures, name):
            start = time.perf_counter()
            work()
            figures[f"{name}, s"] = round(time.perf_counter() - start, 1)

    def take() -> None:
        with served(log) as source:
            report = Lake(lake, spark=spark).run(["records"], source=source)
        if report.rows != {"records": records}:
            raise SystemExit(f"the lake has {report.rows} rows of {records}: {report.errors}")

    timed("into the lake", take)
    shutil.rmtree(log)
    figures["bytes of the lake"] = sum(f.stat().st_size for f in lake.rglob("*.parquet"))
    source = spark.read.format("holdfast").option("lake", str(lake))
    timed("format holdfast", lambda: check(source.load(), records))
    timed("read_messages", lambda: check(read_messages(spark, lake=str(lake)), records))
    topic = topic_of(DEVICES_OF[0][0]).decode()
    day = {"startingTimestamp": str(time.time_ns() // 1_000_000 - 200 * 86_400_000)}
    day["endingTimestamp"] = str(int(day["startingTimestamp"]) + 86_400_000)
    rows = source.options(topics=topic, **day).load()
    timed("a day of a device", lambda: figures.update({"rows of that day": rows.count()}))
    return figures


def check(rows: DataFrame, records: int) -> None:
    """Reads all columns, and compares the offsets of each partition with what was written."""
    columns = F.xxhash64(*rows.columns[:-1]).alias("hash")
    found = (
        rows.select("partition", "offset", F.length("payload").alias("size"), columns)
        .groupBy("partition")
        .agg(
            F.count("*").alias("rows"), F.sum("offset").alias("offsets"),
            F.sum("size").alias("size"), F.max("hash"),
        )
        .collect()
    )  # fmt: skip
    if sum(row.rows for row in found) != records:
        raise SystemExit(f"{sum(row.rows for row in found)} rows of {records}")
    for row in found:
        if (row.offsets, row.size) != (row.rows * (row.rows - 1) // 2, row.rows * PAYLOAD_BYTES):
            raise SystemExit(f"partition {row.partition} lacks rows, or has some twice: {row}")


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.lake_history", __doc__, "--directory")
    parser.add_argument("--gigabytes", type=float, default=5.0)
    arguments = parser.parse_args(argv)
    records = int(arguments.gigabytes * 1e9) // PAYLOAD_BYTES
    spark = lake_session("local[2]")
    try:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            figures = run(spark, Path(folder), records)
    finally:
        spark.stop()
    for name, value in figures.items():
        print(f"{name:24}{value:>16,.1f}")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast the pipeline's tables are made, and how old a row is when it is in bronze.

    python -m bench.pipeline [--json PATH] [--records 1000000] [--rounds 3] [--seconds 20]
        [--quick]

"bronze" and "silver" are messages a second into `records` and `readings`, from a broker to
Parquet files with their commits (a message here is four readings). "from_json" is Spark's own
parser over the same files of `records`, to Parquet with the same compression: a row a message, no
deduplication, no gaps, no times. "from_json to readings" then makes four rows of each, as silver
does. They take turns in each round, after one round that is not counted (Java is slow until it has
compiled). "latency" is from before the publish to bronze's commit, QoS 1 at 1,000 messages a second
over a running node, with a look at the log each 50 ms. "trigger" is how long a micro-batch of a
stream takes, to no sink. "run of" is `holdfast pipeline run` as a process, all tables, with its
start of Java, once. The others are in a Spark of `local[2]`. Best of the rounds; medians of
triggers.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench.options import new_parser, write_json
from bench.spark import Figures, node, served, write_log
from holdfast.client import Options
from holdfast.client.blocking import Client
from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.parquet import WriteSpec
from holdfast_lake import Lake
from holdfast_lake.session import lake_session

BATCH_RECORDS: Final = 200
RATE: Final = 1000
SMALL_RECORDS: Final = 3000
BURST_S: Final = 0.01
"""What is published within it goes out together: as a thousand devices would send it."""
WARM_UP_S: Final = 5.0
TRIGGER_S: Final = 0.05
FIELDS: Final = "device string, seq bigint, ts double, value double, unit string, ok boolean"
READINGS: Final = 4
"""Of a message: the fields that are no number and no time."""
ZSTD_LEVEL: Final = WriteSpec("").compression_level
TRIGGER_ROWS: Final = (40_000, 100)
TRIGGERS: Final = 15
"""Of which the first fifth is not counted."""
WAIT_S: Final = 120
QUICK: Final = ("--records", "300000", "--rounds", "2", "--seconds", "8")


def throughput(spark: SparkSession, folder: Path, records: int, rounds: int) -> Figures:
    log, parsed = folder / "log", str(folder / "parsed")
    write_log(log, records, BATCH_RECORDS)
    best: dict[str, float] = {}
    with served(log) as source:
        for number in range(1 + rounds):
            lake = Lake(folder / f"lake{number}", spark=spark)
            stages: dict[str, Callable[[], None]] = {
                "bronze": partial(_make, lake, "records", source, records),
                "silver": partial(_make, lake, "readings", source, READINGS * records),
                "from_json": lambda lake=lake: _write(_parsed(lake), parsed),  # type: ignore[misc]
                "from_json to readings": lambda lake=lake: _write(  # type: ignore[misc]
                    _each_reading(_parsed(lake)), parsed
                ),
            }
            for name, stage in stages.items():
                start = time.perf_counter()
                stage()
                seconds = time.perf_counter() - start
                if number:
                    best[name] = min(best.get(name, seconds), seconds)
            shutil.rmtree(lake.path)
    figures = {f"{name}, messages/s": records / seconds for name, seconds in best.items()}
    for name in ("from_json", "from_json to readings"):
        figures[f"silver of {name}"] = best[name] / best["silver"]
    return figures


def _make(lake: Lake, table: str, source: str, rows: int) -> None:
    done = lake.run(table, source=source)
    if done.errors:
        raise SystemExit(f"{table}: {done.errors[table]}")
    if done.rows[table] != rows:
        raise SystemExit(f"{table}: {done.rows[table]} rows of {rows}")


def _parsed(lake: Lake) -> DataFrame:
    fields = F.from_json(F.col("payload").cast("string"), FIELDS).alias("f")
    parsed = lake.table("records").select("topic", "timestamp", "partition", "offset", fields)
    return parsed.select("topic", "timestamp", "partition", "offset", "f.*")


def _each_reading(parsed: DataFrame) -> DataFrame:
    nothing = ("CAST(NULL AS double)", "CAST(NULL AS string)", "CAST(NULL AS boolean)")
    double, text, truth = nothing
    values = (
        f"'device', {double}, device, {truth}",
        f"'value', value, {text}, {truth}",
        f"'unit', {double}, unit, {truth}",
        f"'ok', {double}, {text}, ok",
    )
    stack = f"stack({READINGS}, {', '.join(values)})"
    return parsed.select(
        "topic", "timestamp", "partition", "offset", "seq", "ts",
        F.expr(f"{stack} AS (metric, value_double, value_string, value_boolean)"),
    )  # fmt: skip


def _write(rows: DataFrame, path: str) -> None:
    writer = rows.write.mode("overwrite").option("compression", "zstd")
    writer.option("parquet.compression.codec.zstd.level", ZSTD_LEVEL).parquet(path)


def publish(port: int, seconds: float) -> None:
    """In a process of its own: at a steady rate, whatever the acknowledgements do."""
    client = Client("127.0.0.1", port, options=Options(client_id="bench"))
    client.connect()
    burst = round(RATE * BURST_S)
    began = time.monotonic()
    count = 0
    while (passed := time.monotonic() - began) < seconds:
        due = int(passed / BURST_S) * burst
        while count < due:
            payload = b'{"sent": %.6f, "seq": %d}' % (time.time(), count)
            client.submit(f"bench/{count % 50}", payload, qos=1)
            count += 1
        time.sleep(BURST_S / 2)
    client.flush()
    client.close()


def latency(spark: SparkSession, folder: Path, seconds: float) -> Figures:
    data = folder / "data"
    data.mkdir()
    with node(data) as found:
        if found is None:
            return {}
        lake = Lake(folder / "live", spark=spark)
        runner = lake.runner("bronze", source=f"127.0.0.1:{found.admin_port}")
        thread = threading.Thread(target=runner.continuously, args=(TRIGGER_S,))
        thread.start()
        try:
            total_s = WARM_UP_S + seconds
            words = ["--publish", str(found.port), "--seconds", str(total_s)]
            subprocess.run([sys.executable, "-m", "bench.pipeline", *words], check=True)
            _wait_until_all_are_in(lake)
        finally:
            runner.stop()
            thread.join(WAIT_S)
        ages = _ages_ms(lake.path)
    cut = statistics.quantiles(ages, n=100)
    return {
        "publish to bronze, msg/s": round(len(ages) / seconds),
        "publish to bronze, p50 ms": round(cut[49]),
        "publish to bronze, p99 ms": round(cut[98]),
    }


def _wait_until_all_are_in(lake: Lake) -> None:
    deadline = time.monotonic() + WAIT_S
    while lake.status().tables[0].lag != 0:
        if time.monotonic() > deadline:
            raise SystemExit(f"bronze is not at the end of the log after {WAIT_S} s")
        time.sleep(0.2)


def _ages_ms(lake: Path) -> list[float]:
    """Of the messages published after the warm-up: commit less publish."""
    commits = CommitLog(lake, "records")
    last = commits.last()
    assert last is not None
    found = []
    for version in range(1, last.version + 1):
        commit = commits.read(version)
        for file in commit.files:
            payloads = pq.read_table(lake / file.path, columns=["payload"]).column(0)
            for payload in payloads.to_pylist():
                found.append((json.loads(payload)["sent"], commit.committed_at_us / 1e6))
    since_s = min(sent for sent, _ in found) + WARM_UP_S
    return [(stored - sent) * 1000 for sent, stored in found if sent >= since_s]


def triggers(spark: SparkSession, folder: Path) -> Figures:
    figures = {}
    for rows in TRIGGER_ROWS:
        log = folder / f"log-{rows}"
        write_log(log, rows * TRIGGERS, min(rows // 2, BATCH_RECORDS))
        with served(log) as source:
            stream = spark.readStream.format("holdfast").option("servers", source)
            stream = stream.option("startingOffsets", "earliest")
            query = (
                stream.option("maxRecordsPerTrigger", rows)
                .load()
                .writeStream.format("noop")
                .option("checkpointLocation", str(folder / f"checkpoint-{rows}"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination(WAIT_S)
            times = [p["durationMs"]["triggerExecution"] for p in query.recentProgress]
            figures[f"trigger of {rows} rows, ms"] = statistics.median(times[len(times) // 5 :])
            query.stop()
    return figures


def small_runs(folder: Path) -> Figures:
    """A run of the command over all tables with a cold Java: few messages, then none."""
    log, lake = folder / "small-log", folder / "small-lake"
    write_log(log, SMALL_RECORDS, 1)
    figures = {}
    with served(log) as source:
        words = ["pipeline", "run", "--from", source, "--lake", str(lake), "--quiet"]
        for name in (f"run of {SMALL_RECORDS} messages, s", "run of nothing new, s"):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "holdfast.cli.main", *words], check=True)
            figures[name] = time.perf_counter() - start
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.pipeline", __doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measured latency")
    parser.add_argument("--quick", action="store_true", help=f"as {' '.join(QUICK)}")
    parser.add_argument("--publish", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments = parser.parse_args(QUICK, arguments)
    if arguments.publish:
        publish(arguments.publish, arguments.seconds)
        return 0
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        folder = Path(directory)
        figures = small_runs(folder)
        spark = lake_session("local[2]")
        figures |= triggers(spark, folder)
        figures |= throughput(spark, folder, arguments.records, arguments.rounds)
        figures |= latency(spark, folder, arguments.seconds)
    spark.stop()
    for name, value in figures.items():
        print(f"{name:28} {value:>14,.2f}")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

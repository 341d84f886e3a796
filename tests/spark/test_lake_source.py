"""The option `lake` of the source: a broker whose retention has removed the head of the log."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from holdfast.client.log import LogClient
from holdfast.log.record import FLAG_PRODUCER, SESSION
from holdfast.protocol.topics.names import matches
from holdfast_lake import read_messages
from holdfast_lake.lake.lake import Lake
from tests.spark.test_source import Stream, batch, publish, wait_until
from tests.support.journal_files import TIME_US, Journal, record
from tests.support.small_s3 import BUCKET, small_s3

PAYLOAD = b"%08d" + b"x" * 400
PAGE = Path(__file__).parents[2] / "docs" / "source.md"
EXAMPLE_S = 300.0
PROGRAM = """
from holdfast_lake import Lake, spark_session
from tests.spark.test_source import publish

spark = spark_session("example")
assert Lake("s3://bucket/plant", spark=spark).run(["records"], source="127.0.0.1:18083").ok
publish({port}, [("site/c", b"3", 1, False)])
{example}
print(sorted((row.topic, bytes(row.payload)) for row in records.collect()))
spark.stop()
"""


def test_a_broker_that_keeps_minutes_and_a_lake_that_keeps_all(
    spark: SparkSession, start_holdfast: Callable[..., Any], tmp_path: Path
) -> None:
    broker = start_holdfast(
        {"log": {"segment_bytes": 65_536, "partitions": 4}, "log.retention": {"bytes": 200_000}}
    )
    servers = f"127.0.0.1:{broker.admin_port}"
    root = str(tmp_path / "lake")
    lake = Lake(root, spark=spark)
    sent: list[tuple[str, bytes, int, bool]] = []

    def send(count: int) -> None:
        start = len(sent)
        more = [(f"site/{n % 7}", PAYLOAD % n, 1, False) for n in range(start, start + count)]
        publish(broker.port, more)
        sent.extend(more)

    def begins() -> int:
        client = LogClient(servers)
        with client.read(on_gap=lambda _: None) as cursor:
            return sum(cursor.position.offsets.values())

    options = {"servers": servers, "lake": root, "tasks": "3"}
    stream = Stream(spark, options, tmp_path)
    for _ in range(3):
        send(300)
        assert lake.run(["records"], source=servers).errors == {}
    stream.run(startingOffsets="earliest")
    before = begins()
    send(900)
    wait_until(lambda: begins() > max(before, 400))
    with pytest.raises(PySparkException, match="were asked for, the log has"):
        batch(spark, {"servers": servers}, startingOffsets='{"0": 0}').count()
    # The lake has not read what retention removed meanwhile, or it has: both are told exactly.
    rows = batch(spark, options, failOnDataLoss="false").select("payload").collect()
    assert len(rows) == len({bytes(row.payload) for row in rows}) <= len(sent)
    assert lake.run(["records"], source={"servers": servers, "failOnDataLoss": "false"}).ok
    send(50)
    alone = {
        bytes(row.payload) for row in batch(spark, {"lake": root}, failOnDataLoss="false").collect()
    }
    both = [bytes(row.payload) for row in batch(spark, options, failOnDataLoss="false").collect()]
    assert len(both) == len(set(both)) == len(alone) + 50
    assert set(both) == alone | {payload for _, payload, _, _ in sent[-50:]}
    assert {payload for _, payload, _, _ in sent[:900]} <= alone
    stream.run(failOnDataLoss="false")
    table = spark.read.parquet(str(tmp_path / "out"))
    assert sorted(bytes(row.payload) for row in table.collect()) == sorted(both)


def test_sparks_own_reader_and_the_source_have_the_same_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    """By all columns, for ranges that cut a file of the lake, leave it out, or end in the log."""
    journal = Journal(tmp_path / "data", partitions=3, segment_bytes=4000)
    root = tmp_path / "lake"
    lake = Lake(root, spark=spark)
    names = ("a", "a/b", "a/b/c", "$own/a", "b c/(d)", "a.b/x\ny")

    def send(count: int) -> None:
        for n in range(len(journal.batches), len(journal.batches) + count):
            sent = [
                record(
                    names[n % len(names)],
                    b"%d" % n,
                    flags=1 | (FLAG_PRODUCER if n % 2 else 0),
                    producer="p" if n % 2 else "",
                    sequence=n,
                    timestamp_us=TIME_US + n * 1_000_000,
                ),
                record(kind=SESSION),
            ]
            journal.append(n % 3, sent)

    for _ in range(3):
        send(40)
        assert lake.run(["records"], source=journal.address).ok
    send(20)
    own = {"servers": journal.address, "lake": str(root), "tasks": "1"}

    rows = batch(spark, own).collect()
    assert len(rows) == 140
    middle = TIME_US + 55_000_000
    some = {"0": 12, "1": 61, "2": 200}
    ends = {"0": 0, "1": 61}
    frames: list[DataFrame] = []
    expected: list[set[tuple[int, int]]] = []

    def compare(wanted: Callable[[Row], bool], **options: str) -> None:
        frames.append(read_messages(spark, **options).select("partition", "offset"))
        expected.append({(row.partition, row.offset) for row in rows if wanted(row)})

    def time_us(row: Row) -> int:
        return TIME_US + int(row.payload) * 1_000_000

    compare(lambda row: int(row.payload) < 120, lake=str(root))
    compare(lambda row: True, servers=own["servers"])
    compare(lambda row: False, **own, endingOffsets="earliest")
    compare(lambda row: time_us(row) >= middle, **own, startingTimestamp=str(middle // 1000))
    compare(lambda row: time_us(row) < middle, **own, endingTimestamp=str(middle // 1000))
    compare(
        lambda row: row.offset < ends.get(str(row.partition), 0),
        **own,
        endingOffsets=json.dumps(ends),
    )
    is_behind = {"startingOffsets": json.dumps(some), "failOnDataLoss": "false"}
    compare(lambda row: row.offset >= some[str(row.partition)], **own, **is_behind)
    for topics in ("#", "+/#", "a/#", "a/+/c,a", "$own/+", "b c/(d)", "a.b/#", "none"):
        wanted = topics.split(",")
        compare(
            lambda row, wanted=wanted: any(matches(each, row.topic) for each in wanted),
            **own,
            topics=topics,
        )
    joined = reduce(
        DataFrame.unionAll, (each.withColumn("n", F.lit(n)) for n, each in enumerate(frames))
    ).collect()
    for n, keys in enumerate(expected):
        found = [(row.partition, row.offset) for row in joined if row.n == n]
        assert sorted(found) == sorted(keys), n
    both = read_messages(spark, **own)
    assert "parquet" in both._jdf.queryExecution().toString().lower()
    assert both.schema.simpleString() == batch(spark, own).schema.simpleString()
    assert sorted(map(str, both.collect())) == sorted(map(str, rows))
    few = read_messages(spark, **own, columns="offset,producer").collect()
    assert sorted(map(str, few)) == sorted(
        str(Row(offset=row.offset, producer=row.producer)) for row in rows
    )


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_example_with_a_lake_in_an_object_store(
    start_holdfast: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example runs as the page has it, with free ports. Spark's workers have the variables."""
    (example,) = re.findall(
        r"```python\n(records = .*?s3://bucket/plant.*?)```", PAGE.read_text(), re.S
    )
    broker = start_holdfast()
    publish(broker.port, [("site/a", b"1", 1, False), ("site/b", b"2", 1, False)])
    text = PROGRAM.format(port=broker.port, example=example)
    text = text.replace("18083", str(broker.admin_port)).replace("bucket/", f"{BUCKET}/")
    with small_s3(monkeypatch) as s3:
        done = subprocess.run(
            [sys.executable, "-c", text],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=EXAMPLE_S,
            check=False,
        )
        assert any(name.startswith("plant/records/") for name in s3.objects)
    found = [("site/a", b"1"), ("site/b", b"2"), ("site/c", b"3")]
    assert done.stdout.splitlines()[-1:] == [str(found)], done.stderr[-3000:]

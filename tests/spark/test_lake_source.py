"""The option `lake` of the source: a broker whose retention has removed the head of the log."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from holdfast.client.log import LogClient
from holdfast_lake.lake.lake import Lake
from tests.spark.test_source import Stream, batch, publish, wait_until

PAYLOAD = b"%08d" + b"x" * 400


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

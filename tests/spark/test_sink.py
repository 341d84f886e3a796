"""`df.write` and `df.writeStream` with `format("holdfast")`: what a real broker has afterwards."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from examples.alerts import start_alerts
from holdfast_lake import decode_properties
from tests.e2e import wire
from tests.e2e.brokers import SOURCE, Broker, Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.e2e.conftest import mosquitto as mosquitto

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    # What Spark's own modules warn of when pandas and others are newer than they are.
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
WAIT_S = 60
ROWS = 600
Stored = dict[str, list[int]]


@pytest.fixture
def broker(start_holdfast: StartHoldfast) -> Holdfast:
    return start_holdfast({"log": {"partitions": 4}})


def rows(spark: SparkSession, count: int = ROWS, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, numPartitions=partitions).selectExpr(
        "concat('plant/', id % 3) AS topic", "CAST(id AS string) AS payload"
    )


def servers(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port}"


def write(table: DataFrame, broker: Broker, **options: Any) -> None:
    writer = table.write.format("holdfast").mode("append")
    writer.options(mqttServers=servers(broker), **options).save()


def log(spark: SparkSession, broker: Holdfast, **options: Any) -> DataFrame:
    reader = spark.read.format("holdfast").option("servers", f"127.0.0.1:{broker.admin_port}")
    return reader.options(**options).load()


def stored(spark: SparkSession, broker: Holdfast, prefix: str = "plant/") -> Stored:
    """The numbers in the payloads, per topic in the order of the log."""
    found: Stored = {}
    table = log(spark, broker).where(F.col("topic").startswith(prefix))
    for row in sorted(table.collect(), key=lambda row: row.offset):
        found.setdefault(row.topic, []).append(int(row.payload))
    return found


def sorted_numbers(found: Stored) -> list[int]:
    return sorted(number for numbers in found.values() for number in numbers)


def by_task(numbers: list[int], partitions: int = 2) -> list[list[int]]:
    """A topic's numbers by the task that wrote them: rows of `rows` are divided in ranges."""
    size = ROWS // partitions
    return [[n for n in numbers if n // size == task] for task in range(partitions)]


def test_what_a_row_says(spark: SparkSession, broker: Holdfast) -> None:
    table = spark.createDataFrame(
        [
            (
                "a/1",
                bytearray(b"\x00\xff"),
                1,
                True,
                ("text/plain", [("unit", "K"), ("unit", "C")]),
            ),
            ("ä", None, 2, None, (None, [])),
            ("a/1", bytearray(b"x"), None, False, None),
        ],
        "topic string, payload binary, qos int, retain boolean, properties struct<content_type: "
        "string, user: array<struct<key: string, value: string>>>",
    ).coalesce(1)
    write(table, broker)
    found = log(spark, broker).withColumn("p", decode_properties("properties")).collect()
    first, second, third = sorted(found, key=lambda row: (row.topic, row.offset))[:3]
    assert (first.topic, bytes(first.payload), first.qos, first.retain) == (
        "a/1",
        b"\0\xff",
        1,
        True,
    )
    assert first.p.content_type == "text/plain"
    assert [(pair.key, pair.value) for pair in first.p.user][:2] == [("unit", "K"), ("unit", "C")]
    assert (bytes(second.payload), second.qos, second.retain) == (b"x", 1, False)
    assert second.producer.sequence == first.producer.sequence + 2
    assert (third.topic, bytes(third.payload), third.qos) == ("ä", b"", 2)
    assert third.producer is None
    with wire.Wire(broker.port) as reader:
        reader.connect("reader")
        reader.subscribe(("a/#", 1))
        assert reader.message().payload == b"\0\xff", "it is retained"


def test_a_write_again(spark: SparkSession, broker: Holdfast) -> None:
    table = rows(spark)
    once = list(range(ROWS))
    for _ in range(2):
        write(table, broker, writeId="import of March", exactlyOnce="require")
        found = stored(spark, broker)
        assert sorted_numbers(found) == once
    for numbers in found.values():
        for part in by_task(numbers):
            assert part == sorted(part), "the order of a topic's rows in a task is kept"
    write(table, broker, writeId="import of March", writeVersion=1)
    assert sorted_numbers(stored(spark, broker)) == sorted(once * 2)
    write(table.limit(10).coalesce(1), broker)
    write(table.limit(10).coalesce(1), broker)
    assert len(sorted_numbers(stored(spark, broker))) == 2 * ROWS + 20


def test_by_order(spark: SparkSession, broker: Holdfast) -> None:
    table = rows(spark).withColumn("at", F.expr("-CAST(payload AS int)")).repartition(2, "topic")
    for _ in range(2):
        write(table, broker, writeId="w", orderBy="at")
    found = stored(spark, broker)
    assert sorted_numbers(found) == list(range(ROWS))
    for numbers in found.values():
        assert numbers == sorted(numbers, reverse=True)


class Copy:
    """A stream from `in/...` of a broker to `plant/...` of another, one micro-batch at a time."""

    def __init__(
        self, spark: SparkSession, source: Holdfast, sink: Broker, folder: Path, *, origin: bool
    ) -> None:
        self.spark = spark
        self.source = source
        self.sink = sink
        self.checkpoint = folder / "checkpoint"
        self.origin = origin
        self.change: Callable[[DataFrame], DataFrame] = lambda table: table

    def start(self, tasks: int = 2, records_max: int = 200, /, **options: str) -> Any:
        reader = self.spark.readStream.format("holdfast").options(
            servers=f"127.0.0.1:{self.source.admin_port}",
            startingOffsets="earliest",
            maxRecordsPerTrigger=records_max,
            tasks=tasks,
        )
        names = ["topic", "payload", "properties"]
        names += ["partition", "offset"] if self.origin else []
        table = reader.load().where("topic LIKE 'in/%'").select(names)
        table = table.withColumn("topic", F.expr("replace(topic, 'in/', 'plant/')"))
        writer = self.change(table).writeStream.format("holdfast")
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        return (
            writer.options(mqttServers=servers(self.sink), **options)
            .trigger(availableNow=True)
            .start()
        )

    def run(self, tasks: int = 2, **options: str) -> list[int]:
        """The rows of each micro-batch."""
        query = self.start(tasks, **options)
        assert query.awaitTermination(WAIT_S)
        return [step.numInputRows for step in query.recentProgress if step.numInputRows]

    def forget_last_commit(self) -> None:
        """As after a crash before Spark noted that the sink was done."""
        commits = [name for name in os.listdir(self.checkpoint / "commits") if name.isdecimal()]
        last = max(commits, key=int)
        for name in (last, f".{last}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)


def fill(spark: SparkSession, broker: Holdfast, start: int = 0, count: int = ROWS) -> None:
    table = spark.range(start, start + count, numPartitions=1)
    write(
        table.selectExpr("concat('in/', id % 3) AS topic", "CAST(id AS string) AS payload"), broker
    )


def each_once(count: int) -> Stored:
    return {f"plant/{topic}": list(range(topic, count, 3)) for topic in range(3)}


@pytest.mark.parametrize("origin", [False, True])
def test_a_stream_is_exact_over_replays(
    spark: SparkSession, broker: Holdfast, tmp_path: Path, origin: bool
) -> None:
    fill(spark, broker)
    copy = Copy(spark, broker, broker, tmp_path, origin=origin)
    assert len(copy.run(exactlyOnce="require")) > 1
    assert stored(spark, broker) == each_once(ROWS)
    copy.forget_last_commit()
    fill(spark, broker, ROWS, 60)
    # Where rows tell their origin, another number of tasks makes no difference.
    assert copy.run(3 if origin else 2, exactlyOnce="require")
    assert stored(spark, broker) == each_once(ROWS + 60)
    producers = {
        row.producer.id for row in log(spark, broker).where("topic LIKE 'plant/%'").collect()
    }
    assert len(producers) <= 4
    # The copies have their own number, and not that of the message they are copies of.
    assert all(producer.startswith("spark-") for producer in producers)


def test_a_batch_that_fails_half_way(spark: SparkSession, broker: Holdfast, tmp_path: Path) -> None:
    fill(spark, broker)
    mark = tmp_path / "failed"

    def fail_once(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for start in range(0, batch.num_rows, 20):
                if start == 60 and not mark.exists():
                    mark.touch()
                    raise ZeroDivisionError("a row that cannot be computed")
                yield batch.slice(start, 20)

    copy = Copy(spark, broker, broker, tmp_path, origin=False)
    copy.change = lambda table: table.mapInArrow(fail_once, table.schema)
    query = copy.start()
    with pytest.raises(PySparkException, match="a row that cannot be computed"):
        query.awaitTermination(WAIT_S)
    copy.run()
    assert stored(spark, broker) == each_once(ROWS)


def test_kill_9_of_the_broker_under_a_stream(
    spark: SparkSession, broker: Holdfast, start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    fill(spark, broker)
    sink = start_holdfast({"log": {"partitions": 2}})
    copy = Copy(spark, broker, sink, tmp_path, origin=True)
    query = copy.start(2, 100)
    for _ in range(2):
        batch = -1 if query.lastProgress is None else query.lastProgress.batchId
        while query.lastProgress is None or query.lastProgress.batchId == batch:
            assert not query.awaitTermination(0.02), "there is no batch left to disturb"
        sink.kill()
        sink.start()
    assert query.awaitTermination(WAIT_S)
    assert stored(spark, sink) == each_once(ROWS)


@pytest.mark.timeout(240)
def test_tasks_that_spark_tries_again(
    spark: SparkSession, broker: Holdfast, tmp_path: Path
) -> None:
    paths = os.pathsep.join([str(SOURCE), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "tests.support.sink_retry", servers(broker), "10000"]
    subprocess.run(
        [*command, str(tmp_path)], env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=220
    )
    assert {path.name for path in tmp_path.glob("failed-*")} == {"failed-0", "failed-1"}
    found = stored(spark, broker)
    assert sorted_numbers(found) == list(range(10_000))
    for numbers in found.values():
        for task in (0, 1):
            part = [number for number in numbers if number // 5000 == task]
            assert part == sorted(part)


def test_origins_torn_apart_are_an_error(
    spark: SparkSession, broker: Holdfast, tmp_path: Path
) -> None:
    fill(spark, broker, count=100)
    copy = Copy(spark, broker, broker, tmp_path, origin=True)
    copy.change = lambda table: table.repartition(3)
    with pytest.raises(PySparkException, match=r"comes after|were in two tasks"):
        copy.run()


def test_the_example(spark: SparkSession, broker: Holdfast, tmp_path: Path) -> None:
    readings = [("plant/oven/temperature", "91.5"), ("plant/oven/temperature", "90")]
    readings += [("plant/door/temperature", "broken"), ("plant/oven/pressure", "99")]
    write(spark.createDataFrame(readings, "topic string, payload string").coalesce(1), broker)
    admin = f"127.0.0.1:{broker.admin_port}"
    for _ in range(2):
        query = start_alerts(spark, admin, servers(broker), str(tmp_path), 90, availableNow=True)
        assert query.awaitTermination(WAIT_S)
        (alert,) = log(spark, broker).where("topic LIKE 'alerts/%'").collect()
        assert alert.topic == "alerts/oven"
        assert json.loads(alert.payload)["reading"] == 91.5


def test_the_stream_of_the_page(spark: SparkSession, broker: Holdfast, tmp_path: Path) -> None:
    section = (ROOT / "docs" / "pipeline.md").read_text().partition("## Writing back")[2]
    program = section.partition("```python\n")[2].partition("```")[0]
    admin = f"127.0.0.1:{broker.admin_port}"
    for written, here in (("broker-a:18083,broker-b:18083", admin),
                          ("broker-a:1883,broker-b:1883", servers(broker)),
                          ("/data/checkpoints/alerts", str(tmp_path))):  # fmt: skip
        assert written in program
        program = program.replace(written, here)
    program = program.replace(".load()", ".option('startingOffsets', 'earliest').load()")
    readings = [("plant/oven/temperature", "91.5"), ("plant/oven/temperature", "broken")]
    readings += [("plant/door/temperature", "21.4")]
    write(spark.createDataFrame(readings, "topic string, payload string").coalesce(1), broker)
    exec(program, {"spark": spark})
    (query,) = spark.streams.active
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    (alert,) = log(spark, broker).where("topic LIKE 'alerts/%'").collect()
    assert (alert.topic, bytes(alert.payload)) == ("alerts/plant/oven/temperature", b"91.5")


def test_mosquitto_gets_everything_at_least_once(spark: SparkSession, mosquitto: Broker) -> None:
    with wire.Wire(mosquitto.port, timeout_s=WAIT_S) as reader:
        reader.connect("reader")
        reader.subscribe(("plant/#", 1))
        for _ in range(2):
            write(rows(spark, 90), mosquitto, writeId="w")
        found = Counter(int(reader.message().payload) for _ in range(180))
    assert found == Counter(dict.fromkeys(range(90), 2))
    with pytest.raises(PySparkException, match="does not say that it knows producer sequences"):
        write(rows(spark, 10), mosquitto, exactlyOnce="require")


@pytest.mark.parametrize(
    ("columns", "options", "text"),
    [
        (["topic", "payload", "id"], {}, "column 'id' is none that a message has"),
        (["topic", "payload"], {"servers": "a:1"}, "admin ports, and for reading"),
        (
            ["topic", "payload"],
            {"mqttServers": "127.0.0.1:1", "retryTimeout": "1"},
            "no connection",
        ),
    ],
)
def test_mistakes(
    spark: SparkSession, columns: list[str], options: dict[str, str], text: str
) -> None:
    table = rows(spark, 1).withColumn("id", F.lit(1)).select(columns)
    writer = table.write.format("holdfast").mode("append")
    with pytest.raises(PySparkException, match=text):
        writer.options(**{"mqttServers": "127.0.0.1:1", **options}).save()


def test_overwrite(spark: SparkSession) -> None:
    writer = rows(spark, 1).write.format("holdfast").option("mqttServers", "127.0.0.1:1")
    with pytest.raises(PySparkException, match=r"use mode\('append'\)"):
        writer.mode("overwrite").save()

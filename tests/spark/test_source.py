"""The data source in a real Spark session: over journals in real files, and over HTTP."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.support.journal_files import TIME_US, Journal, record, serving

pyspark_sql = pytest.importorskip("pyspark.sql")

from pyspark.errors import PySparkException  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402
from pyspark.sql.types import DataType  # noqa: E402

from examples.telemetry_report import report  # noqa: E402
from holdfast.log.partition import partition_of  # noqa: E402
from holdfast.log.record import FLAG_PRODUCER, FLAG_RETAIN, MESSAGE, SESSION  # noqa: E402
from holdfast_lake import decode_properties  # noqa: E402
from holdfast_lake.lake.schema import RECORDS_COLUMNS, spark_type  # noqa: E402

pytestmark = [
    pytest.mark.spark,
    # What Spark's own modules warn of when pandas and others are newer than they are.
    pytest.mark.filterwarnings("default"),
]

WAIT_S = 60
Key = tuple[int, int]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "data", partitions=4, segment_bytes=4000)


@pytest.fixture
def source(journal: Journal) -> dict[str, str]:
    """The options of a read of `journal`."""
    return {"servers": journal.address}


def fill(journal: Journal, batches: int) -> None:
    for _ in range(batches):
        number = len(journal.batches)
        records = [
            record(
                f"devices/{number % 7}",
                json.dumps({"n": number, "i": index}).encode(),
                timestamp_us=TIME_US + number * 1000 + index,
            )
            for index in range(1 + number % 3)
        ]
        journal.append(number % journal.partitions, records)


def keys(journal: Journal) -> list[Key]:
    return sorted((r.partition, r.offset) for r in journal.records() if r.kind == MESSAGE)


def found(table: DataFrame) -> list[Key]:
    return sorted((row[0], row[1]) for row in table.select("partition", "offset").collect())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def batch(spark: SparkSession, source: dict[str, str], **options: Any) -> DataFrame:
    return spark.read.format("holdfast").options(**source, **options).load()


class Stream:
    """A query that may be stopped and started again; its rows end in Parquet files."""

    def __init__(self, spark: SparkSession, source: dict[str, str], folder: Path) -> None:
        self.spark = spark
        self.source = source
        self.folder = folder

    def start(self, trigger: dict[str, Any], **options: Any) -> Any:
        table = self.spark.readStream.format("holdfast").options(**self.source, **options).load()
        writer = table.writeStream.format("parquet").option("path", str(self.folder / "out"))
        return (
            writer.option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(**trigger)
            .start()
        )

    def run(self, **options: Any) -> list[int]:
        """Everything available now; the rows of each micro-batch."""
        query = self.start({"availableNow": True}, **options)
        assert query.awaitTermination(WAIT_S)
        return [step.numInputRows for step in query.recentProgress if step.numInputRows]

    def found(self) -> list[Key]:
        return found(self.spark.read.parquet(str(self.folder / "out")))


def test_found_without_registration_and_every_column(
    spark: SparkSession, journal: Journal, source: dict[str, str]
) -> None:
    journal.append(
        2,
        [
            record("room/température", b"\x00\xff", flags=FLAG_RETAIN | 2, client_id="sensor 1"),
            record(kind=SESSION),
            record(
                "q",
                b"",
                flags=FLAG_PRODUCER,
                producer="p1",
                producer_epoch=3,
                sequence=9,
                properties=b"\x26\x00\x01k\x00\x01v",
                timestamp_us=TIME_US + 1,
            ),
        ],
    )
    table = batch(spark, source)
    rows = table.selectExpr("*", "unix_micros(timestamp) AS us").orderBy("offset").collect()
    assert [row.offset for row in rows] == [0, 2]
    first, second = (row.asDict(recursive=True) for row in rows)
    assert first["topic"] == "room/température"
    assert bytes(first["payload"]) == b"\x00\xff"
    assert (first["partition"], first["us"], second["us"]) == (2, TIME_US, TIME_US + 1)
    assert (first["qos"], first["retain"], first["client_id"]) == (2, True, "sensor 1")
    assert first["producer"] is None
    assert second["producer"] == {"id": "p1", "epoch": 3, "sequence": 9}
    decoded = table.select(decode_properties("properties").alias("p")).orderBy("p").collect()
    assert decoded[0].p is None
    assert [(pair.key, pair.value) for pair in decoded[1].p.user] == [("k", "v")]


def test_batch_reads_everything_once(
    spark: SparkSession, journal: Journal, source: dict[str, str]
) -> None:
    fill(journal, 200)
    table = batch(spark, source, tasks=3)
    assert table.rdd.getNumPartitions() == 3
    assert found(table) == keys(journal)


def test_types_read_without_spark_are_those_of_its_parser(spark: SparkSession) -> None:
    plain = ("string", "int", "bigint", "tinyint", "double", "boolean", "binary", "date")
    kinds = [*plain, "timestamp", "array<int>", *(column.type for column in RECORDS_COLUMNS)]
    for kind in kinds:
        assert spark_type(kind) == DataType.fromDDL(kind)


def test_batch_of_an_empty_log(
    spark: SparkSession, journal: Journal, source: dict[str, str]
) -> None:
    assert batch(spark, source).count() == 0


def test_exact_ranges_and_columns(
    spark: SparkSession, journal: Journal, source: dict[str, str]
) -> None:
    fill(journal, 100)
    options = {
        "startingOffsets": '{"0": 5, "1": 0, "2": 7, "3": 9}',
        "endingOffsets": '{"0": 6, "1": 20, "2": 7, "3": 30}',
        "columns": "offset, partition",
    }
    table = batch(spark, source, **options)
    assert table.columns == ["offset", "partition"]
    expected = [(0, 5)] + [(1, o) for o in range(20)] + [(3, o) for o in range(9, 30)]
    assert found(table) == expected


def test_times(spark: SparkSession, journal: Journal, source: dict[str, str]) -> None:
    fill(journal, 100)
    table = batch(
        spark,
        source,
        startingTimestamp="2026-09-21T14:13:20.010Z",
        endingTimestamp=str((TIME_US + 50_000) // 1000),
    )
    expected = [
        (r.partition, r.offset)
        for r in journal.records()
        if TIME_US + 10_000 <= r.timestamp_us < TIME_US + 50_000
    ]
    assert found(table) == sorted(expected)


def test_order_within_a_topic(
    spark: SparkSession, journal: Journal, source: dict[str, str]
) -> None:
    fill(journal, 100)
    seen: dict[tuple[int, str], int] = {}
    for row in batch(spark, source, tasks=2).collect():
        key = (row.partition, row.topic)
        assert row.offset > seen.get(key, -1)
        seen[key] = row.offset
    assert len(seen) == 4 * 7


def test_stream_is_exact_over_restarts(
    spark: SparkSession, journal: Journal, source: dict[str, str], tmp_path: Path
) -> None:
    stream = Stream(spark, source, tmp_path)
    fill(journal, 40)
    sizes = stream.run(startingOffsets="earliest", maxRecordsPerTrigger=30)
    assert sum(sizes) == len(keys(journal))
    assert max(sizes) <= 30
    assert len(sizes) > 1
    assert stream.run() == []
    fill(journal, 40)
    # Whatever a later start says, the checkpoint decides.
    assert sum(stream.run(startingOffsets="latest")) > 0
    assert stream.found() == keys(journal)


def test_a_lost_commit_is_replayed_with_the_same_rows(
    spark: SparkSession, journal: Journal, tmp_path: Path
) -> None:
    stream = Stream(spark, {"servers": journal.address}, tmp_path)
    fill(journal, 40)
    stream.run(startingOffsets="earliest")
    assert not [*(tmp_path / "checkpoint").rglob("*.crc")]
    # As after a crash between the sink's commit and Spark's own: the batch is planned, its range
    # is in the checkpoint, but the commit is not; new records came meanwhile.
    for name in os.listdir(tmp_path / "checkpoint" / "commits"):
        os.unlink(tmp_path / "checkpoint" / "commits" / name)
    fill(journal, 40)
    stream.run()
    assert stream.found() == keys(journal)


def test_continuous_stream_follows_a_live_log(
    spark: SparkSession, journal: Journal, tmp_path: Path
) -> None:
    source = {"servers": journal.address}
    stream = Stream(spark, source, tmp_path)
    fill(journal, 10)
    before = keys(journal)
    query = stream.start({"processingTime": "0 seconds"})
    # The first batch is planned when the query has fixed its start, which is the log's end.
    while not (query.lastProgress or query.exception()):
        query.awaitTermination(0.05)
    for _ in range(3):
        fill(journal, 10)
        query.processAllAvailable()
    assert query.lastProgress["sources"][0]["latestOffset"]
    query.stop()
    assert stream.found() == sorted(set(keys(journal)) - set(before))


def test_retention_gap(spark: SparkSession, journal: Journal, tmp_path: Path) -> None:
    source = {"servers": journal.address}
    stream = Stream(spark, source, tmp_path)
    fill(journal, 20)
    stream.run(startingOffsets="earliest")
    read = keys(journal)
    fill(journal, 200)
    while len(journal.segments()) > 1:
        journal.remove_first_segment()
    query = stream.start({"availableNow": True})
    with pytest.raises(PySparkException, match="were asked for, the log has"):
        query.awaitTermination(WAIT_S)
    stream.run(failOnDataLoss="false")
    assert stream.found() == sorted(read + keys(journal))
    with pytest.raises(PySparkException, match="were asked for, the log has"):
        batch(spark, source, startingOffsets='{"0": 0}').collect()


def test_a_log_that_lost_its_tail(spark: SparkSession, journal: Journal, tmp_path: Path) -> None:
    stream = Stream(spark, {"servers": journal.address}, tmp_path)
    fill(journal, 3)
    before = list(journal.next_offset)
    fill(journal, 3)
    stream.run(startingOffsets="earliest")
    journal.next_offset = before
    query = stream.start({"availableNow": True})
    with pytest.raises(PySparkException, match="it lost its tail or is another log"):
        query.awaitTermination(WAIT_S)


def test_a_log_that_was_restored(spark: SparkSession, journal: Journal, tmp_path: Path) -> None:
    """Generation 5 has the offsets of generation 0 up to `same`, and other messages behind."""
    stream = Stream(spark, {"servers": journal.address}, tmp_path)
    fill(journal, 6)
    same = tuple(offset // 2 for offset in journal.next_offset)
    stream.run(startingOffsets="earliest")
    read = keys(journal)
    manifest = journal.files.manifest
    journal.files.write_manifest(replace(manifest, generation=5, former=((0, same),)))
    query = stream.start({"availableNow": True})
    with pytest.raises(PySparkException, match="generation 0 of the log, which was restored"):
        query.awaitTermination(WAIT_S)
    stream.run(failOnDataLoss="false")
    again = [key for key in read if key[1] >= same[key[0]]]
    assert again
    assert stream.found() == sorted(read + again)
    # The checkpoint has the new generation.
    fill(journal, 1)
    stream.run()
    assert stream.found() == sorted(keys(journal) + again)


def test_damage_is_an_error_or_skipped(spark: SparkSession, journal: Journal) -> None:
    fill(journal, 60)
    expected = keys(journal)[1:]
    data = bytearray(journal.batches[0])
    data[100] ^= 1
    journal.batches[0] = bytes(data)
    source = {"servers": journal.address}
    with pytest.raises(PySparkException, match="offsets 0 to 1 of partition 0 are missing"):
        batch(spark, source).collect()
    assert found(batch(spark, source, failOnDataLoss="false")) == expected


FILTERS = [
    "topic = 'devices/3'",
    "topic IN ('devices/3', 'devices/5', 'none')",
    "topic LIKE 'devices/1%'",
    "topic LIKE 'dev%' AND topic = 'devices/2' AND offset > 3",
    "topic = 'devices/+'",
    "topic = 'devices/1' OR offset < 4",
    "NOT topic = 'devices/1'",
    "partition = 2",
    "partition IN (1, 3) AND offset >= 5 AND offset < 12",
    "partition = 1 AND partition = 2",
    "offset = 7 AND topic <=> 'devices/4'",
    "timestamp >= '2026-09-21T14:13:20.030Z'",
    "timestamp > '2026-09-21T14:13:20.030Z' AND timestamp < '2026-09-21T14:13:20.060Z'",
    "topic IS NULL",
]


def test_pushed_filters_give_the_same_rows(
    spark: SparkSession, journal: Journal, source: dict[str, str]
) -> None:
    publish_like_a_node(journal)
    setting = "spark.sql.python.filterPushdown.enabled"
    assert spark.conf.get(setting) == "true"
    table = batch(spark, source)
    rows = table.selectExpr("partition", "offset", *FILTERS).collect()
    assert found(table) == keys(journal)
    for number, condition in enumerate(FILTERS):
        expected = sorted((row[0], row[1]) for row in rows if row[2 + number])
        pushing = batch(spark, source, pushFilters="true")
        assert found(pushing.where(condition)) == expected, condition
        assert number % 4 or found(table.where(condition)) == expected, condition
    spark.conf.set(setting, "false")
    try:
        assert found(batch(spark, source, pushFilters="true").where(FILTERS[0]))
    finally:
        spark.conf.set(setting, "true")


def publish_like_a_node(journal: Journal) -> None:
    """A topic's messages in the partition of the topic, and a clock that steps back."""
    for number in range(150):
        step = number - 20 if number % 11 == 0 else number
        journal.publish(f"devices/{number % 13}", b"", timestamp_us=TIME_US + step * 1000)


def test_the_examples_of_the_page(spark: SparkSession, journal: Journal) -> None:
    fill(journal, 4)
    page = (Path(__file__).parents[2] / "docs" / "source.md").read_text()
    first, second, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    server = '.option("servers", "127.0.0.1:18083")'
    assert server in first
    first = first.replace(server, f'.option("servers", {journal.address!r})')
    names: dict[str, Any] = {}
    exec(first.replace("plant/+/temperature", "#") + second, names)
    rows = names["decoded"].select("topic", "p.content_type").collect()
    assert len(rows) == len(keys(journal))


def test_pushed_filters_read_less(spark: SparkSession, journal: Journal) -> None:
    publish_like_a_node(journal)
    with serving(journal) as server:
        source = {"servers": f"127.0.0.1:{server.port}", "pushFilters": "true"}
        asked: list[int] = []
        read = server._read

        def note(request: dict[str, Any]) -> Any:
            asked.extend(partition for partition, _, _ in request["ranges"])
            return read(request)

        server._read = note  # type: ignore[method-assign]
        assert batch(spark, source).where("topic = 'devices/3'").count() > 0
        assert set(asked) == {partition_of(b"devices/3", journal.partitions)}
        asked.clear()
        assert batch(spark, source).where("partition = 2").count() > 0
        assert set(asked) == {2}


def test_topics_in_a_stream(
    spark: SparkSession, journal: Journal, source: dict[str, str], tmp_path: Path
) -> None:
    publish_like_a_node(journal)
    stream = Stream(spark, source, tmp_path)
    stream.run(startingOffsets="earliest", topics="devices/1, devices/+/x", maxRecordsPerTrigger=40)
    publish_like_a_node(journal)
    stream.run(topics="devices/1,devices/+/x")
    wanted = [r for r in journal.records() if r.topic == b"devices/1"]
    assert stream.found() == sorted((r.partition, r.offset) for r in wanted)
    table = batch(spark, source, topics="devices/+").where("topic LIKE 'devices/1%'")
    assert table.count() == len([r for r in journal.records() if r.topic[:9] == b"devices/1"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": "a:1", "topics": "a/#/b"}, "topics is 'a/#/b'"),
        ({"path": "/data"}, "the log in /data is read from the broker that serves it"),
        ({"servers": "a:1", "startingOffset": "latest"}, "unknown option"),
        ({"servers": "a:1", "maxRecordsPerTrigger": "5"}, "is for streams"),
        ({}, "give option"),
    ],
)
def test_wrong_options(spark: SparkSession, options: dict[str, str], text: str) -> None:
    with pytest.raises(PySparkException, match=text):
        batch(spark, options).collect()


def test_schema_given_by_the_user(spark: SparkSession, journal: Journal) -> None:
    fill(journal, 5)
    reader = spark.read.format("holdfast").option("servers", journal.address)
    assert found(reader.schema("partition int, offset bigint").load()) == keys(journal)
    with pytest.raises(PySparkException, match="column 'key'"):
        reader.schema("key int").load().collect()


def test_telemetry_report(
    spark: SparkSession, journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    acknowledged = []
    for number in range(40):
        for name in ("host/cpu", "host/memory", "disk/used"):
            topic = f"telemetry/{name}"
            payload = {"device": name.split("/")[0], "seq": number, "ts": 0.0, "value": number / 2}
            if (name, number) != ("disk/used", 7):
                time_us = TIME_US + number * 1_000_000
                journal.publish(topic, json.dumps(payload).encode(), timestamp_us=time_us)
                acknowledged.append((topic, number))
    journal.publish("telemetry/disk/used", b"no json")
    journal.publish("other", b"{}")
    source = {"servers": journal.address}
    result = report(spark, source, acknowledged)
    assert result.ok
    assert (result.records, result.acknowledged, result.duplicates) == (119, 119, 0)
    disk, host = result.devices
    assert (disk.name, disk.records, disk.gaps) == ("disk", 39, 1)
    assert (host.records, host.gaps, host.mean) == (80, 0, 9.75)
    assert (host.last - host.first).total_seconds() == 39
    assert "of 119 acknowledged messages 0 lost" in capsys.readouterr().out

    # One sent again is no fault; one that is missing and one that comes too late are.
    journal.publish("telemetry/host/cpu", b'{"seq": 39, "value": 1}')
    journal.publish("telemetry/disk/used", b'{"seq": 7, "value": 1}')
    acknowledged.append(("telemetry/disk/used", 999))
    result = report(spark, source, acknowledged)
    assert not result.ok
    assert (result.duplicates, result.out_of_order, result.lost) == (1, 1, 1)
    assert result.lost_examples == [("telemetry/disk/used", 999)]


def publish(port: int, messages: list[tuple[str, bytes, int, bool]]) -> None:
    """Over MQTT 5 with a user property; returns when all are acknowledged."""
    properties = Properties(PacketTypes.PUBLISH)
    properties.UserProperty = ("unit", "celsius")
    publisher = Client(CallbackAPIVersion.VERSION2, "publisher", protocol=MQTTv5)
    publisher.connect("127.0.0.1", port)
    publisher.loop_start()
    try:
        for topic, payload, qos, retain in messages:
            publisher.publish(topic, payload, qos, retain, properties).wait_for_publish(WAIT_S)
    finally:
        publisher.disconnect()
        publisher.loop_stop()


def test_a_running_node(
    spark: SparkSession, start_holdfast: Callable[[], Any], tmp_path: Path
) -> None:
    broker = start_holdfast()
    servers = {"servers": f"127.0.0.1:{broker.admin_port}"}
    sent = [
        (f"node/{number % 3}", b"%d" % number, 1 + number % 2, number == 5) for number in range(30)
    ]
    publish(broker.port, sent[:20])
    rows = batch(spark, servers).orderBy("timestamp", "topic").collect()
    assert {(r.topic, bytes(r.payload), r.qos, r.retain) for r in rows} == set(sent[:20])
    assert {row.client_id for row in rows} == {"publisher"}
    pairs = batch(spark, servers).select(decode_properties("properties").user.alias("u"))
    assert {(row.u[0].key, row.u[0].value) for row in pairs.collect()} == {("unit", "celsius")}
    stream = Stream(spark, servers, tmp_path)
    stream.run(startingOffsets="earliest")
    broker.kill()
    broker.start()
    publish(broker.port, sent[20:])
    stream.run()
    table = spark.read.parquet(str(tmp_path / "out"))
    payloads = [bytes(row.payload) for row in table.collect()]
    assert sorted(payloads, key=int) == [b"%d" % number for number in range(30)]

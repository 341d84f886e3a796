"""Silver: records to readings in Spark, whatever the order and the partitions they come in."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support import sparkplug_wire as wire

pyspark_sql = pytest.importorskip("pyspark.sql")

from pyspark.sql import DataFrame, SparkSession  # noqa: E402
from pyspark.sql import functions as F  # noqa: E402

from holdfast.pipeline.decoders.decoded import PAYLOAD_BYTES_MAX  # noqa: E402
from holdfast.pipeline.jobs.table import QUARANTINE_COLUMNS, Outputs  # noqa: E402
from holdfast.pipeline.tables import Rule  # noqa: E402
from holdfast.pipeline.tables.columns import QUARANTINED_BYTES_MAX  # noqa: E402
from holdfast.pipeline.tables.readings import (  # noqa: E402
    COLUMNS,
    IDLE_DAYS_MAX,
    STATE_COLUMNS,
    build_readings,
)
from holdfast.pipeline.tables.rules import with_defaults  # noqa: E402

pytestmark = [
    pytest.mark.spark,
    # What Spark's own modules warn of when pandas and others are newer than they are.
    pytest.mark.filterwarnings("default"),
]

BEGIN = datetime(2026, 11, 21, 23, 59, tzinfo=UTC)
RECORDS = (
    "topic string, payload binary, partition int, offset bigint, timestamp timestamp, "
    "qos tinyint, retain boolean, properties binary, client_id string, "
    "producer struct<id: string, epoch: bigint, sequence: bigint>"
)
STATE = ", ".join(f"{column.name} {column.type}" for column in STATE_COLUMNS)
RULES = with_defaults(
    (
        Rule("cell/+/+", decode="json", device="level 2", sequence_per="device", time="ts"),
        Rule("csv/#", decode="csv", columns=("seq", "t", "_"), device="client"),
        Rule("field/+", device="field dev"),
        Rule("debug/#", decode="ignore"),
        Rule("$load/+", decode="number"),
        Rule("room/+/+", decode="number", device="levels 1-2", metric="level 3"),
    )
)


class Records:
    """Rows of the table `records`; a topic is always in one partition."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.offsets: dict[int, int] = {}

    def add(
        self, topic: str, payload: bytes, at_s: float, producer: Any = None, client: str = "c"
    ) -> None:
        partition = sum(topic.encode()) % 5
        offset = self.offsets.get(partition, 10)
        self.offsets[partition] = offset + 1
        moment = BEGIN + timedelta(seconds=at_s)
        self.rows.append(
            (topic, payload, partition, offset, moment, 1, False, b"", client, producer)
        )

    def frame(self, spark: SparkSession, rows: slice = slice(None)) -> DataFrame:
        return spark.createDataFrame(self.rows[rows], RECORDS)


def example() -> Records:
    records = Records()
    ts = int(BEGIN.timestamp())
    for at in range(0, 240, 2):
        number = at // 2
        if number % 17 != 5:
            payload = b'{"ts":%d,"seq":%d,"v":%d,"m":{"ok":true}}' % (ts + at, number, number % 7)
            topic = f"cell/{number % 3}/{'ab'[number % 2]}"
            records.add(topic, payload, at)
            if number % 11 == 0:
                records.add(topic, payload, at + 0.5)
        records.add(
            f"csv/{number % 2}", b"%d,%d.5,x" % (number, number), at, client=f"m{number % 2}"
        )
        producer = ("p", 1, number // 2)
        records.add("plain/a", b'{"x":%d}' % number, at, producer)
        records.add("room/1/temp", b"21.5" if number % 9 else b"broken", at)
    records.add("field/x", b'{"dev":"d7","v":1}', 1)
    records.add("field/x", b'{"v":1}', 2)
    records.add("debug/x", b'{"v":1}', 2)
    records.add("$SYS/x", b"1", 2)
    records.add("$load/x", b"1", 2)
    records.add("cell/9/a", b"", 3)
    records.add("short/status", b"offline", 4)
    birth = wire.payload(wire.metric(1.5, wire.DOUBLE, name="Flow", alias=7), seq=0)
    records.add("spBv1.0/G/NBIRTH/E", birth, 10)
    for number in (1, 2, 4):
        data = wire.payload(wire.metric(number, wire.DOUBLE, alias=7, typed=False), seq=number)
        kind = ("NDATA/E", "DDATA/E/D")[number % 2]
        records.add(f"spBv1.0/G/{kind}", data, 10 if number == 1 else 10 + number)
    return records


def build(spark: SparkSession, records: DataFrame, state: DataFrame | None = None) -> Outputs:
    known = spark.createDataFrame([], STATE) if state is None else state
    return build_readings(records, known, RULES)


def found(outputs: Outputs) -> tuple[list[Any], list[Any], list[Any]]:
    """Readings, quarantine and state, sorted."""
    shared = [frame.persist() for frame in outputs.shared]
    assert outputs.quarantine is not None
    assert outputs.state is not None
    names = [column.name for column in COLUMNS]
    bad = [column.name for column in QUARANTINE_COLUMNS]
    result = (
        [tuple(row) for row in outputs.rows.select(names).collect()],
        [tuple(row) for row in outputs.quarantine.select(bad).collect()],
        [tuple(row) for row in outputs.state.collect()],
    )
    for frame in shared:
        frame.unpersist()
    for rows in result:
        rows.sort(key=str)
    return result


@pytest.fixture(scope="module")
def whole(spark: SparkSession) -> tuple[list[Any], list[Any], list[Any]]:
    return found(build(spark, example().frame(spark).coalesce(1)))


def by_device(readings: list[Any], device: str) -> list[dict[str, Any]]:
    names = [column.name for column in COLUMNS]
    rows = [dict(zip(names, row, strict=True)) for row in readings]
    mine = [row for row in rows if row["device"] == device]
    return sorted(mine, key=lambda row: (row["store_time"], row["offset"], row["position"]))


def test_readings_of_every_kind(whole: tuple[list[Any], list[Any], list[Any]]) -> None:
    readings, quarantine, _ = whole
    devices = {row[0] for row in readings}
    assert devices == {
        "0", "1", "2", "m0", "m1", "plain/a", "room/1", "d7", "short", "G/E", "G/E/D", "$load/x",
    }  # fmt: skip
    assert {row[1] for row in readings if row[0] == "room/1"} == {"temp"}
    assert len([row for row in readings if row[0] == "plain/a"]) == 60
    assert [row["value_double"] for row in by_device(readings, "m1")][:3] == [1.5, 3.5, 5.5]
    assert by_device(readings, "short")[0]["value_boolean"] is False
    reasons = {(row[1], row[0]) for row in quarantine}
    assert ("field/x", "no device: dev is None") in reasons
    assert ("room/1/temp", "neither a number nor a boolean: 'broken'") in reasons
    assert len(quarantine) == 1 + 14


def test_numbers_of_a_device_over_several_topics(
    whole: tuple[list[Any], list[Any], list[Any]],
) -> None:
    mine = [row for row in by_device(whole[0], "1") if row["position"] == 0]
    assert {row["topic"] for row in mine} == {"cell/1/a", "cell/1/b"}
    assert [row["sequence"] for row in mine] == [
        n for n in range(120) if n % 3 == 1 and n % 17 != 5
    ]
    assert {row["stream"] for row in mine} == {"device 1"}
    assert {row["gap_before"] for row in mine[1:]} == {2, 5}
    assert {row["date"].day for row in mine} == {21, 22}


def test_an_edge_node_over_several_topics(
    whole: tuple[list[Any], list[Any], list[Any]],
) -> None:
    """The first data was stored in the same microsecond as the birth that explains it."""
    node = by_device(whole[0], "G/E") + by_device(whole[0], "G/E/D")
    values = sorted(
        (r["value_double"], r["metric"], r["gap_before"]) for r in node if r["value_double"]
    )
    assert values == [(1.0, "Flow", 0), (1.5, "Flow", 0), (2.0, "Flow", 0), (4.0, "Flow", 1)]
    assert {row["stream"] for row in node} == {"spBv1.0/G/E"}


@pytest.mark.parametrize(
    "spread",
    [
        lambda frame: frame.repartition(5),
        lambda frame: frame.orderBy(F.rand(3)).repartition(3, "partition"),
    ],
)
def test_order_and_partitions_of_the_input_change_nothing(
    spark: SparkSession,
    whole: tuple[list[Any], list[Any], list[Any]],
    spread: Callable[[DataFrame], DataFrame],
) -> None:
    spark.conf.set("spark.sql.shuffle.partitions", 3)
    try:
        assert found(build(spark, spread(example().frame(spark)))) == whole
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", 1)


def test_steps_change_nothing(
    spark: SparkSession, whole: tuple[list[Any], list[Any], list[Any]]
) -> None:
    records = example()
    records.rows.sort(key=lambda row: row[4])
    readings: list[Any] = []
    quarantine: list[Any] = []
    state: list[Any] = []
    for begin, end in ((0, 150), (150, 151), (151, None)):
        known = spark.createDataFrame(state, STATE)
        step = found(build(spark, records.frame(spark, slice(begin, end)), known))
        readings += step[0]
        quarantine += step[1]
        state = step[2]
    assert (sorted(readings, key=str), sorted(quarantine, key=str), state) == whole


def test_payloads_too_large_to_decode_are_quarantined(spark: SparkSession) -> None:
    size = PAYLOAD_BYTES_MAX + 1
    records = Records()
    records.add("big/x", b"1", 0)
    frame = records.frame(spark).withColumn(
        "payload", F.expr(f"cast(repeat('7', {size}) as binary)")
    )
    readings, quarantine, state = found(build(spark, frame))
    assert readings == state == []
    assert quarantine[0][0] == f"a payload of {size} bytes, {PAYLOAD_BYTES_MAX} are decoded at most"
    assert quarantine[0][5] == b"7" * QUARANTINED_BYTES_MAX


def test_no_records_give_nothing_and_keep_the_state(spark: SparkSession) -> None:
    known = spark.createDataFrame([("t", '{"run":4,"high":9}', BEGIN)], STATE)
    readings, quarantine, state = found(build(spark, Records().frame(spark), known))
    assert readings == quarantine == []
    assert [row[:2] for row in state] == [("t", '{"run":4,"high":9}')]


def test_streams_without_messages_for_a_week_are_forgotten(spark: SparkSession) -> None:
    records = Records()
    records.add("new", b'{"seq":1}', 0)
    ages = {"old": IDLE_DAYS_MAX + 1, "young": IDLE_DAYS_MAX - 1}
    rows = [(name, "{}x", BEGIN - timedelta(days=days)) for name, days in ages.items()]
    _, _, state = found(build(spark, records.frame(spark), spark.createDataFrame(rows, STATE)))
    assert [row[0] for row in state] == ["new", "young"]

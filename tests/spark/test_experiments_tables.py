"""The tables of experiments, over small runs whose figures are known; and the whole way: events in
a broker's log, the pipeline's tables, the verdict, the report."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import StartHoldfast
from tests.support.experiment_scripts import PLANTED, Script, right_run

pytest.importorskip("pyspark.sql")

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from holdfast.log.partition import partition_of
from holdfast_lab import fault_tables, quality_tables, run_tables
from holdfast_lab.judge import counts
from holdfast_lab.publication import publish_events
from holdfast_lab.stored_events import events_of_files, parse
from holdfast_lab.tables import EVENTS, RUNS, VIOLATIONS
from holdfast_lake.lake.lake import Lake
from tests.e2e.ledger import Interest
from tests.support.journal_files import Journal, record

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(240),
]

BASE_S = 100.0


def outage_run() -> Script:
    """One message every 0.1 s, confirmed after 10 ms and delivered after 20; a fault at 2 s, from
    which nothing is confirmed until 4 s; what was published meanwhile is confirmed then."""
    script = Script()
    script.connected("p", BASE_S, "n1")
    script.subscribe("s", [Interest("t/#", 1)])
    script.connected("s", BASE_S, "n1")
    script.subscribed("s", BASE_S + 0.05)
    for number in range(60):
        at_s = BASE_S + 0.1 + number * 0.1
        key = ("p", "t/0", number)
        script.send(key, 1, at_s)
        is_held = 20 <= number < 40
        served_s = BASE_S + 4.0 + number * 0.0001 if is_held else at_s
        script.acknowledge(key, served_s + 0.01)
        script.deliver("s", key, served_s + 0.02)
    script.fault("kill -9", BASE_S + 2.05, BASE_S + 5.0, ["n1"])
    return script


@pytest.fixture(scope="module")
def runs(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    folder = tmp_path_factory.mktemp("runs")
    outage, right = folder / "outage.jsonl", folder / "right.jsonl"
    outage_run().write(outage, "outage", partitions="8", clients="2")
    script = right_run()
    PLANTED["duplicate-1"][0](script)
    script.write(right, "right", clients="many")
    return events_of_files(spark, outage, right).localCheckpoint()


def only(frame: DataFrame, condition: str) -> Row:
    (row,) = frame.where(condition).collect()
    assert isinstance(row, Row)
    return row


def near(value: Any, expected: float) -> bool:
    return bool(abs(value - expected) < 1e-3)


def test_downtime_is_from_confirmation_to_confirmation(runs: DataFrame) -> None:
    rows = fault_tables.downtime(runs).where("run = 'outage'").collect()
    found = {(row["scope"], row["name"]): row for row in rows}
    partition = str(partition_of(b"t/0", 8))
    assert set(found) == {("client", "p"), ("partition", partition), ("all", "")}
    for row in rows:
        # The last one is number 19, published and confirmed at 2.01; number 20 at 4.012.
        assert near(row["downtime_s"], 2.002)
        assert near(row["service_after_s"], 1.962)
        assert near(row["broken_s"], 2.95)
        assert near(row["usual_s"], 0.1)


def test_availability(runs: DataFrame) -> None:
    row = only(fault_tables.availability(runs), "run = 'outage' AND scope = 'client'")
    assert (row["outages"], row["confirmed"]) == (1, 59)
    assert near(row["longest_s"], 2.002)
    assert near(row["observed_s"], 5.9)
    assert near(row["availability_percent"], 100 * (5.9 - 2.002) / 5.9)


def test_latency_is_exact(runs: DataFrame) -> None:
    rows = {
        row["measure"]: row
        for row in quality_tables.latency(runs).where("run = 'outage'").collect()
    }
    confirm = rows[quality_tables.CONFIRM]
    assert (confirm["messages"], confirm["qos"], confirm["clients"]) == (60, 1, 2)
    assert near(confirm["p50_ms"], 10.0)
    # Number 20, published at 2.1 and confirmed at 4.012.
    assert near(confirm["max_ms"], 1912.0)
    assert near(rows[quality_tables.DELIVER]["max_ms"], 1922.0)


def test_seconds(runs: DataFrame) -> None:
    rows = run_tables.seconds(runs).where("run = 'outage'").orderBy("second").collect()
    assert [row["second"] for row in rows] == list(range(len(rows)))
    of_second = {row["second"]: row for row in rows}
    assert [of_second[second]["faults"] for second in (1, 2, 4, 6)] == [0, 1, 1, 0]
    # What was held back was published then, and arrived later.
    assert (of_second[3]["published"], of_second[3]["confirmed"]) == (10, 10)
    assert (of_second[3]["confirmations"], of_second[3]["deliveries"]) == (0, 0)
    totals = {name: sum(row[name] for row in rows) for name in ("published", "delivered", "lost")}
    assert totals == {"published": 60, "delivered": 60, "lost": 0}


def test_conversations(runs: DataFrame) -> None:
    rows = {
        row["client"]: row for row in run_tables.traffic(runs).where("run = 'outage'").collect()
    }
    assert {row["node"] for row in rows.values()} == {"n1"}
    counts = ("connections", "publishes", "confirmations", "deliveries")
    assert [rows["p"][name] for name in counts] == [1, 60, 60, 0]
    assert [rows["s"][name] for name in counts] == [1, 0, 0, 60]


def test_timeline(runs: DataFrame) -> None:
    rows = fault_tables.timeline(runs).where("run = 'outage'").orderBy("after_s").collect()
    assert [row["what"] for row in rows] == [
        "fault_injected", "first confirmation", "fault_healed",
    ]  # fmt: skip
    assert near(rows[1]["after_s"], 1.962)
    assert rows[1]["partition"] == partition_of(b"t/0", 8)


def test_a_parameter_that_is_no_number_is_unknown(runs: DataFrame) -> None:
    row = only(run_tables.runs(runs), "run = 'right'")
    assert row["clients"] is None
    assert (row["published"], row["confirmed"], row["delivered"]) == (48, 48, 145)


def test_promises_by_qos(runs: DataFrame) -> None:
    rows = {row["qos"]: row for row in counts(runs).where("run = 'right'").collect()}
    assert [rows[qos]["published"] for qos in (1, 2)] == [24, 24]
    assert [rows[qos]["owed"] for qos in (1, 2)] == [72, 72]
    assert [rows[qos]["deliveries"] for qos in (1, 2)] == [73, 72]
    assert [rows[qos]["duplicates"] for qos in (1, 2)] == [1, 0]


def test_what_is_no_event_is_told_apart(spark: SparkSession) -> None:
    good = '"run":"r","writer":"w","n":1,"host":"h","at_us":5,"event":"run_ended"'
    payloads = {
        f'{{"v":1,{good}}}': None,
        f'{{"v":2,{good}}}': "version 2: only 1 is known",
        f"{{{good}}}": "lacks v, the version",
        '{"v":1,"run":"r","event":"run_ended"}': "lacks writer, n, host, at_us",
        f'{{"v":1,{good.replace("run_ended", "exploded")}}}': "unknown event",
        f'{{"v":1,{good.replace(chr(34) + "r" + chr(34), chr(34) + "../r" + chr(34))}}}': (
            "name of the run is malformed"
        ),
        f'{{"v":1,{good.replace("5", chr(34) + "x" + chr(34))}}}': "not the JSON of an event",
        f'{{"v":1,{good.replace("run_ended", "disconnected")}}}': "lacks client",
        f'{{"v":1,"qos":3,{good}}}': "qos is not 0, 1 or 2",
        "{": "not the JSON of an event",
        "": "not the JSON of an event",
    }
    rows = [("experiment/r/x", payload.encode()) for payload in payloads]
    rows.append(("other/topic", b"{"))
    records = spark.createDataFrame(rows, "topic string, payload binary")
    found = {
        bytes(row["payload"]).decode(): row["reason"]
        for row in parse(records).select("payload", "reason").collect()
    }
    assert found == payloads


def test_from_a_broker_to_the_verdict(
    spark: SparkSession, start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    """Published twice, as after a failure half-way: the log has each event once."""
    broker = start_holdfast()
    events = tmp_path / "lost.jsonl"
    script = right_run()
    PLANTED["lost"][0](script)
    script.write(events, "lost")
    server = [f"127.0.0.1:{broker.port}"]
    count = publish_events(events, server)
    assert publish_events(events, server) == count
    lake = Lake(tmp_path / "lake", spark=spark, tables=["holdfast_lab"])
    names = ["records", EVENTS.name, RUNS.name, VIOLATIONS.name]
    assert lake.run(names, source=f"127.0.0.1:{broker.admin_port}").ok
    assert lake.table("records").where(F.col("topic").startswith("experiment/")).count() == count
    broken = lake.table(VIOLATIONS.name).collect()
    assert [(row["kind"], row["who"], row["sequence"]) for row in broken] == [("lost", "one", 3)]


def test_a_run_without_the_tables_of_experiments_leaves_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A run of other tables does not touch them, and one that names them goes on. The lake has kept
    their declarations."""
    event = b'{"v":1,"run":"r","writer":"w","n":1,"host":"h","at_us":5,"event":"run_ended"}'
    journal = Journal(tmp_path / "data")
    source = {"servers": journal.address}
    names = [EVENTS.name, RUNS.name]
    path = tmp_path / "lake"

    def stored() -> dict[str, bytes]:
        files = [each for name in names for each in (path / name).rglob("*") if each.is_file()]
        return {str(each): each.read_bytes() for each in files}

    journal.append(0, [record("experiment/r/run_ended", event)])
    with_events = Lake(path, spark=spark, tables=["holdfast_lab"])
    assert with_events.run(["records", *names], source=source).ok
    before = stored()
    journal.append(0, [record("experiment/r/run_ended", event.replace(b'"n":1', b'"n":2'))])
    lake = Lake(path, spark=spark)
    assert set(lake.run(["records", "topics"]).commits) == {"records", "topics"}
    assert lake.rebuild("topics").ok
    # The table of events has not read the second commit.
    assert lake.compact()["records"] == 0
    assert stored() == before
    assert lake.status(ask_servers=False).undeclared == []
    assert with_events.run(names).ok
    assert [row["n"] for row in with_events.table(EVENTS.name).orderBy("n").collect()] == [1, 2]

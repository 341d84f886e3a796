"""The tables in a lake: a log read in one run and in several gives the same files."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support import sparkplug_wire as wire
from tests.support.journal_files import TIME_US, Journal, record

pyspark_sql = pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession  # noqa: E402

from holdfast.log.partition import partition_of  # noqa: E402
from holdfast_lake.lake import folding  # noqa: E402
from holdfast_lake.lake.lake import Lake  # noqa: E402
from holdfast_lake.tables import Rule, readings_table  # noqa: E402

pytestmark = [
    pytest.mark.spark,
    # What Spark's own modules warn of when pandas and others are newer than they are.
    pytest.mark.filterwarnings("default"),
]

BEGIN_US = TIME_US + (9 * 60 + 16) * 60_000_000
"""Half past eleven in the evening."""
TABLES = ("records", "readings", "gaps", "missing", "device_minutes")
RULES = (Rule("plant/+/data", decode="json", device="level 2", time="ts"),)


def messages() -> list[tuple[str, bytes, int]]:
    """Topic, payload and time, over a day's end; with losses, repetitions, deaths and rubbish."""
    chance = random.Random(7)
    birth = wire.payload(wire.metric(1.5, wire.DOUBLE, name="Flow", alias=7), seq=0)
    found = [("spBv1.0/G/NBIRTH/E", birth, BEGIN_US)]
    for number in range(120):
        at = BEGIN_US + number * 30_000_000 + chance.randrange(1000)
        device = f"d{number % 3}"
        value = chance.uniform(-1, 1) * 10 ** chance.randrange(20)
        ts = at // 1000 - chance.randrange(50, 500)
        text = f'{{"ts":{ts},"seq":{number // 3},"v":{value},"ok":{str(number % 5 == 0).lower()}}}'
        if chance.random() < 0.95:
            found += [(f"plant/{device}/data", text.encode(), at)] * chance.choice((1, 1, 1, 2))
        if chance.random() < 0.02:
            found.append((f"plant/{device}/status", b"offline", at + 10))
        if chance.random() < 0.05:
            found.append(("plant/x/data", b'{"ts":', at + 20))
        data = wire.payload(wire.metric(value, wire.DOUBLE, alias=7), seq=(number + 1) % 256)
        found.append(("spBv1.0/G/NDATA/E", data, at))
    return found


def append(journal: Journal, some: list[tuple[str, bytes, int]]) -> None:
    for topic, payload, at in some:
        partition = partition_of(topic.encode(), journal.partitions)
        journal.append(partition, [record(topic, payload, timestamp_us=at)])


def gold_files(lake: Lake) -> dict[str, bytes]:
    return {
        str(path.relative_to(lake.path)): path.read_bytes()
        for name in TABLES[3:]
        for path in (lake.path / name).rglob("*.parquet")
    }


@pytest.mark.long
@pytest.mark.timeout(400)  # three runs of five tables, each of some Spark jobs
def test_one_run_and_several_give_the_same_files(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "data", partitions=4, segment_bytes=1 << 20)
    everything = messages()
    once = Lake(tmp_path / "once", spark=spark, tables=[readings_table(RULES)])
    parts = Lake(tmp_path / "parts", spark=spark, tables=[readings_table(RULES)])
    half = len(everything) // 2
    append(journal, everything[:half])
    assert parts.run(TABLES, source=journal.address).errors == {}
    append(journal, everything[half:])
    assert parts.run(TABLES).errors == {}
    assert once.run(TABLES, source=journal.address).errors == {}
    expected = gold_files(once)
    assert {name.split("/")[0] for name in expected} == set(TABLES[3:])
    assert gold_files(parts) == expected
    numbers = [int(payload.split(b'"seq":')[1].split(b",")[0]) for topic, payload, _ in everything
               if topic == "plant/d0/data"]  # fmt: skip
    missing = once.table("missing").where("stream = 'plant/d0/data'").collect()
    lost = {number for row in missing for number in range(row["first"], row["last"] + 1)}
    assert lost == set(range(numbers[0], max(numbers) + 1)) - set(numbers)
    bad = once.table("quarantine").select("topic").distinct().collect()
    assert [row["topic"] for row in bad] == ["plant/x/data"]


def stored(lake: Lake, name: str) -> Counter[Any]:
    return Counter(tuple(row) for row in lake.table(name).drop("date").collect())


def states(lake: Lake) -> dict[str, str]:
    found = [
        row
        for path in sorted((lake.path / "_state" / "readings").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    assert len({row["stream"] for row in found}) == len(found)
    return {row["stream"]: row["state"] for row in found}


@pytest.mark.timeout(300)
def test_buckets_change_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in one task, and in two rounds of several with files between them."""
    journal = Journal(tmp_path / "data", partitions=4, segment_bytes=1 << 20)
    everything = messages()
    one = Lake(tmp_path / "one", spark=spark, tables=[readings_table(RULES)])
    many = Lake(tmp_path / "many", spark=spark, tables=[readings_table(RULES)])
    for part in (slice(0, 100), slice(100, None)):
        append(journal, everything[part])
        monkeypatch.setattr(folding, "ROWS_PER_BUCKET", 1 << 30)
        assert one.run(["records", "readings"], source=journal.address).errors == {}
        monkeypatch.setattr(folding, "ROWS_PER_BUCKET", 40)
        monkeypatch.setattr(folding, "FILE_ROWS", 30)
        assert many.run(["records", "readings"], source=journal.address).errors == {}
        monkeypatch.undo()
    for name in ("readings", "quarantine"):
        found = stored(many, name)
        assert found == stored(one, name)
        assert sum(found.values()) > 0
    assert states(many) == states(one)
    files = sorted((many.path / "readings").rglob("*.parquet"))
    assert len(files) > len(sorted((one.path / "readings").rglob("*.parquet"))) > 1
    keys = ("device", "metric", "event_time", "partition", "offset", "position")
    for path in files:
        rows = pq.read_table(path, columns=list(keys)).to_pylist()
        assert rows == sorted(rows, key=lambda row: tuple(row[key] for key in keys))
    assert [path for path in (many.path / "_work").rglob("*") if path.is_file()] == []

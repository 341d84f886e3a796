"""Every column of every table of a day of 200 devices, against plain Python that knows what the
messages mean and nothing of the pipeline."""

from datetime import UTC

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession

from holdfast.client.log.lake.objects import directory_of
from holdfast.log.partition import partition_of
from holdfast.log.record import FLAG_PRODUCER, FLAG_RETAIN
from holdfast_lake.decoders.decoded import CODES
from holdfast_lake.lake import folding
from holdfast_lake.lake.lake import Lake
from holdfast_lake.lake.table import RECORDS
from holdfast_lake.tables import TABLES, Rule, readings, readings_table
from tests.support.journal_files import Journal, record
from tests.support.plant_day import Day
from tests.support.plant_oracle import Expected, check_table

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(400),
    # What Spark's own modules warn of when pandas and others are newer than they are.
    pytest.mark.filterwarnings("default"),
]

RULES = (
    Rule("press/+/data", decode="json", device="levels 1-2", time="ts", sequence="seq"),
    Rule("csv/+", decode="csv", columns=("ts", "temperature", "ok", "_"), time="ts"),
    Rule("meter/+/+", decode="number", device="level 2", metric="level 3"),
    Rule("pair/+/+", device="level 2", sequence_per="device"),
    Rule("free/+/debug", decode="ignore"),
)
NAMES = [RECORDS, *(table.name for table in TABLES)]


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> tuple[Journal, Expected]:
    journal = Journal(tmp_path_factory.mktemp("day") / "data", partitions=5)
    messages = Day(1).messages
    for said in messages:
        said.partition = partition_of(said.topic.encode(), journal.partitions)
        said.offset = journal.next_offset[said.partition]
        name, epoch, sequence = said.producer or ("", 0, 0)
        flags = 1 | FLAG_RETAIN * said.retain | FLAG_PRODUCER * (said.producer is not None)
        item = record(
            said.topic, said.payload, flags=flags, timestamp_us=said.at_us,
            client_id=said.client, producer=name, producer_epoch=epoch, sequence=sequence,
        )  # fmt: skip
        journal.append(said.partition, [item])
    return journal, Expected(messages)


@pytest.fixture(scope="module")
def lake(
    spark: SparkSession, day: tuple[Journal, Expected], tmp_path_factory: pytest.TempPathFactory
) -> Lake:
    found = Lake(tmp_path_factory.mktemp("lake"), spark=spark, tables=[readings_table(RULES)])
    with pytest.MonkeyPatch.context() as patch:
        # Several tasks, slices and batches.
        patch.setattr(folding, "ROWS_PER_BUCKET", 9000)
        patch.setattr(readings, "SLICE_BYTES", 100_000)
        patch.setattr(readings, "BATCH_ROWS", 1000)
        report = found.run(NAMES, source=str(day[0].directory))
    assert report.errors == {}
    return found


def test_the_day_has_everything(day: tuple[Journal, Expected]) -> None:
    expected = day[1]
    rows = expected.readings
    assert len({row["device"] for row in rows}) >= 200
    assert len({(row["stream"], row["run"]) for row in rows}) > len(expected.streams)
    assert sum(row["is_late"] for row in rows) > 50
    assert sum(row["claimed_time"] is not None for row in rows) > 500
    assert any(row["is_historical"] for row in rows)
    assert max(row["sequence"] or 0 for row in rows if row["topic"].startswith("spB")) > 256
    assert {row["event"] for row in expected.gaps()} == {"missing", "filled"}
    outages, _ = expected.presence()
    assert {(row["cause"], row["is_open"]) for row in outages} == {
        (cause, is_open) for cause in ("silence", "offline") for is_open in (False, True)
    }
    assert len({row["date"] for row in rows}) == 2
    assert len(expected.messages) > len({(row["partition"], row["offset"]) for row in rows}) > 10**4


@pytest.mark.parametrize("name", NAMES)
def test_table(lake: Lake, day: tuple[Journal, Expected], name: str) -> None:
    check_table(directory_of(lake.path), name, day[1].tables()[name]())


def test_quarantine(lake: Lake, day: tuple[Journal, Expected]) -> None:
    expected = sorted(day[1].quarantine, key=lambda row: (row["partition"], row["offset"]))
    found = lake.table("quarantine").collect()
    found.sort(key=lambda row: (row["partition"], row["offset"]))
    assert len(found) == len(expected) > 100
    for row, wanted in zip(found, expected, strict=True):
        told = row.asDict()
        assert told.pop("reason").startswith(wanted.pop("reason"))
        assert told.pop("code") in CODES
        told["timestamp"] = told["timestamp"].astimezone(UTC)
        told["payload"] = bytes(told["payload"])
        assert told == wanted

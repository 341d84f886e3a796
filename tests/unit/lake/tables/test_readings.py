"""Silver: records to readings, whatever the order and the buckets they come in."""

import pickle
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support import sparkplug_wire as wire

pa = pytest.importorskip("pyarrow")

import numpy as np  # noqa: E402

from holdfast.client.log.lake.commits import COUNTS, QUARANTINED, ROWS  # noqa: E402
from holdfast.client.log.lake.commits import STATE as STATES  # noqa: E402
from holdfast.log.columns.decode import SCHEMA  # noqa: E402
from holdfast_lake.decoders.decoded import PAYLOAD_BYTES_MAX  # noqa: E402
from holdfast_lake.tables import Rule  # noqa: E402
from holdfast_lake.tables import columns as declared  # noqa: E402
from holdfast_lake.tables.columns import COLUMNS, QUARANTINED_BYTES_MAX  # noqa: E402
from holdfast_lake.tables.readings import ReadingsFold, _cuts  # noqa: E402
from holdfast_lake.tables.rules import with_defaults  # noqa: E402
from holdfast_lake.tables.stream import IDLE_DAYS_MAX  # noqa: E402

BEGIN = datetime(2026, 11, 21, 23, 59, tzinfo=UTC)
Found = tuple[list[Any], list[Any], list[Any]]
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
        names = ("id", "epoch", "sequence")
        struct = None if producer is None else dict(zip(names, producer, strict=True))
        self.rows.append((topic, payload, partition, offset, moment, 1, False, b"", client, struct))

    def batch(self, rows: slice = slice(None)) -> Any:
        """As it is in the table."""
        columns = zip(*self.rows[rows], strict=True) if self.rows[rows] else [[]] * len(SCHEMA)
        arrays = [pa.array(each, kind) for each, kind in zip(columns, SCHEMA.types, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=SCHEMA.names)


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


def build(
    batches: list[Any],
    states: list[Any] = [],  # noqa: B006
    buckets: int = 1,
    fold: ReadingsFold = ReadingsFold(RULES),  # noqa: B008
) -> Found:
    """Readings, quarantine and state, sorted: as a step makes them of some batches of records and
    the states before."""
    fold = pickle.loads(pickle.dumps(fold))  # as it comes to a task
    columns = zip(*states, strict=True) if states else [[]] * 3
    arrays = [
        pa.array(each, kind) for each, kind in zip(columns, declared.STATES.types, strict=True)
    ]
    known = pa.RecordBatch.from_arrays(arrays, schema=declared.STATES)
    known_numbers = fold.spread_states(known) % buckets
    spread = [fold.spread(batch.select(fold.columns)) for batch in batches]
    oldest = [low for batch in batches for low in batch["timestamp"].cast(pa.int64()).to_pylist()]
    found: dict[str, list[Any]] = {ROWS: [], QUARANTINED: [], STATES: []}
    for bucket in range(buckets):
        rows = [batch.filter(pa.array(numbers % buckets == bucket)) for batch, numbers in spread]
        mine = pa.Table.from_batches([known.filter(pa.array(known_numbers == bucket))])
        pieces = fold.fold(pa.Table.from_batches(rows), mine, min(oldest, default=None))
        for output, batch in pieces:
            if output == COUNTS:
                continue
            if output == ROWS:
                batch = batch.select([column.name for column in COLUMNS])
            found[output] += [tuple(row.values()) for row in batch.to_pylist()]
    return tuple(sorted(rows, key=str) for rows in found.values())  # type: ignore[return-value]


@pytest.fixture(scope="module")
def whole() -> Found:
    return build([example().batch()])


def by_device(readings: list[Any], device: str) -> list[dict[str, Any]]:
    names = [column.name for column in COLUMNS]
    rows = [dict(zip(names, row, strict=True)) for row in readings]
    mine = [row for row in rows if row["device"] == device and row["metric"] != "$repeated"]
    return sorted(mine, key=lambda row: (row["store_time"], row["offset"], row["position"]))


def test_readings_of_every_kind(whole: Found) -> None:
    readings, quarantine, _ = whole
    devices = {row[0] for row in readings}
    assert devices == {
        "0", "1", "2", "m0", "m1", "plain/a", "room/1", "d7", "short", "G/E", "G/E/D", "$load/x",
    }  # fmt: skip
    assert {row[1] for row in readings if row[0] == "room/1"} == {"temp"}
    assert len(by_device(readings, "plain/a")) == 60
    assert sum(row[:2] == ("plain/a", "$repeated") for row in readings) == 60
    assert [row["value_double"] for row in by_device(readings, "m1")][:3] == [1.5, 3.5, 5.5]
    assert by_device(readings, "short")[0]["value_boolean"] is False
    reasons = {(row[1], row[0]) for row in quarantine}
    assert ("field/x", "no device: dev is None") in reasons
    assert ("room/1/temp", "neither a number nor a boolean: 'broken'") in reasons
    assert len(quarantine) == 1 + 14


def test_numbers_of_a_device_over_several_topics(
    whole: Found,
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
    whole: Found,
) -> None:
    """The first data was stored in the same microsecond as the birth that explains it."""
    node = by_device(whole[0], "G/E") + by_device(whole[0], "G/E/D")
    values = sorted(
        (r["value_double"], r["metric"], r["gap_before"]) for r in node if r["value_double"]
    )
    assert values == [(1.0, "Flow", 0), (1.5, "Flow", 0), (2.0, "Flow", 0), (4.0, "Flow", 1)]
    assert {row["stream"] for row in node} == {"spBv1.0/G/E"}


@pytest.mark.parametrize("buckets", [1, 3, 7])
@pytest.mark.parametrize("parts", [1, 5])
def test_order_and_buckets_of_the_input_change_nothing(
    whole: Found, buckets: int, parts: int
) -> None:
    records = example()
    random.Random(buckets).shuffle(records.rows)
    batches = [records.batch(slice(at, None, parts)) for at in range(parts)]
    assert build(batches, [], buckets) == whole


def test_steps_change_nothing(whole: Found) -> None:
    records = example()
    records.rows.sort(key=lambda row: row[4])
    readings: list[Any] = []
    quarantine: list[Any] = []
    state: list[Any] = []
    for number, (begin, end) in enumerate(((0, 150), (150, 151), (151, None))):
        step = build([records.batch(slice(begin, end))], state, 1 + number)
        readings += step[0]
        quarantine += step[1]
        state = step[2]
    assert (sorted(readings, key=str), sorted(quarantine, key=str), state) == whole


def test_batches_end_between_streams(monkeypatch: pytest.MonkeyPatch, whole: Found) -> None:
    """And are small where payloads are long; neither changes anything."""
    monkeypatch.setattr("holdfast_lake.tables.readings.BATCH_ROWS", 40)
    assert build([example().batch()]) == whole
    monkeypatch.setattr("holdfast_lake.tables.readings.BATCH_BYTES", 20)
    assert build([example().batch()]) == whole


def test_cuts() -> None:
    streams = np.array([0] * 5 + [1] * 3 + [2] * 9000 + [3], np.int32)
    sizes = np.ones(len(streams), np.int64)
    assert list(_cuts(sizes, streams)) == [(0, 8), (8, 8200), (8200, 9009)]
    sizes[2] = sizes[6] = 1 << 40
    assert list(_cuts(sizes, streams))[:5] == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 7)]


def test_payloads_too_large_to_decode_are_quarantined() -> None:
    size = PAYLOAD_BYTES_MAX + 1
    records = Records()
    records.add("big/x", b"7" * size, 0)
    readings, quarantine, state = build([records.batch()])
    assert readings == []
    assert state[0][1] == '{"errors":{"limit":[20778,1]}}'
    assert quarantine[0][0] == f"a payload of {size} bytes, {PAYLOAD_BYTES_MAX} are decoded at most"
    assert quarantine[0][5] == b"7" * QUARANTINED_BYTES_MAX


def test_no_records_give_nothing_and_keep_the_state() -> None:
    known = [("t", '{"run":4,"high":9}', BEGIN)]
    readings, quarantine, state = build([Records().batch()], known, 2)
    assert readings == quarantine == []
    assert [row[:2] for row in state] == [("t", '{"run":4,"high":9}')]


def test_streams_without_messages_for_a_week_are_forgotten() -> None:
    records = Records()
    records.add("new", b'{"seq":1}', 0)
    ages = {"old": IDLE_DAYS_MAX + 1, "young": IDLE_DAYS_MAX - 1}
    known = [(name, "{}x", BEGIN - timedelta(days=days)) for name, days in ages.items()]
    _, _, state = build([records.batch()], known, 3)
    assert sorted(row[0] for row in state) == ["new", "young"]

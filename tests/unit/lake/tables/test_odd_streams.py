"""Streams that are not as one expects: over several partitions, silent for weeks, by a clock that
is put back, larger than memory. What comes out does not depend on the steps, the slices or the
way in which messages are read."""

import random
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_lake.tables import columns as declared
from holdfast_lake.tables.parse import GROUP_ROWS_MIN, PARSED_ROWS
from holdfast_lake.tables.readings import Folder, ReadingsFold, _copy_rows, _slices, _weights
from holdfast_lake.tables.rules import Rule, with_defaults
from holdfast_lake.tables.stream import IDLE_DAYS_MAX
from holdfast_lake.tables.topics import Topics, client_stream
from tests.support.fold_log import TIME_US, Log, batch, value
from tests.unit.lake.tables.test_alike import RULES, rows, stretch
from tests.unit.lake.tables.test_readings import BEGIN, Records, build, example

DAY_S = 86_400


def by_rules(*rules: Rule) -> Log:
    """With streams as the rules say."""

    class OfRules(Log):
        def add(self, topic: str, payload: bytes | None, **more: Any) -> None:
            client = more.get("client", "c")
            stream = Topics(self.rules)[topic].stream or client_stream(client)
            super().add(topic, payload, **{"stream": stream, **more})

    return OfRules(*rules)


# Rules


@pytest.mark.parametrize("rules", [
    (Rule("a/+", lateness_s=5), Rule("b/+", lateness_s=500)),
    (Rule("a/+", future_s=5), Rule("b/+", future_s=500)),
    (Rule("a/+", device="client"), Rule("b/+")),
])  # fmt: skip
def test_rules_that_read_the_same_are_still_two(rules: tuple[Rule, ...]) -> None:
    """A batch has nothing but messages that look alike, of topics of two rules."""
    log = Log(*rules)
    now_s = TIME_US // 1_000_000
    for number in range(PARSED_ROWS // 2):
        for topic in ("a/x", "b/x"):
            ts = now_s + (100 if number % 3 == 0 else 0 if number % 3 == 1 else -50)
            log.add(topic, b'{"ts":%d,"v":%d}' % (ts, number), client=f"c-{topic}", at_s=10)
    found = rows(log.read())
    assert found == rows(log.read(together=False))
    marks = {
        topic: {
            (row["is_late"], row["claimed_time"] is None, row["device"] == topic)
            for row in found[0]
            if row["topic"] == topic
        }
        for topic in ("a/x", "b/x")
    }
    assert marks["a/x"] != marks["b/x"]


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1, 1e11])
def test_times_of_rules_are_finite(seconds: float) -> None:
    for name in ("lateness_s", "future_s"):
        with pytest.raises(ValueError, match="are seconds, 0 to 10,000,000,000"):
            Rule("a", **{name: seconds})  # type: ignore[arg-type]


def test_the_longest_times_of_rules() -> None:
    log = Log(Rule("t", lateness_s=1e10, future_s=1e10))
    for number in range(2 * GROUP_ROWS_MIN):
        log.add("t", b'{"ts":%d,"v":1}' % (TIME_US // 1_000_000 + (-1) ** number * 5 * 10**8))
    found = rows(log.read())
    assert found == rows(log.read(together=False))
    assert not any(row["is_late"] or row["claimed_time"] for row in found[0])


# A byte order mark, as Windows programs begin texts with


@pytest.mark.parametrize(("decode", "payload", "expected"), [
    ("auto", b'{"v":1}', 1.0), ("json", b'{"v":1}', 1.0), ("auto", b"1.5", 1.5),
    ("number", b"2", 2.0), ("text", b"on", True), ("csv", b"v\n3", 3.0),
    ("status", b"online", True),
])  # fmt: skip
def test_a_byte_order_mark_is_no_character(decode: str, payload: bytes, expected: Any) -> None:
    log = Log(Rule("t", decode=decode))
    for _ in range(2 * GROUP_ROWS_MIN):
        log.add("t", b"\xef\xbb\xbf" + payload)
    found = log.read()
    assert found.reasons() == []
    assert {value(row) for row in found.readings} == {expected}
    assert {row["metric"] for row in found.readings} <= {"v", "value", "$online"}


# Silence


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("days", [IDLE_DAYS_MAX - 0.1, IDLE_DAYS_MAX + 0.1])
def test_what_was_before_a_long_silence_is_forgotten_in_whatever_steps(
    together: bool, days: float
) -> None:
    log = Log()
    times = [*range(30), *(days * DAY_S + 29 + number for number in range(30))]
    for number, at_s in enumerate(times):
        log.add("t", b'{"seq":%d,"v":1,"ts":%d}' % (2 * number, TIME_US // 10**6 + at_s), at_s=at_s)
    whole = rows(log.read(together=together))
    assert len({row["run"] for row in whole[0]}) == (1 if days < IDLE_DAYS_MAX else 2)
    assert rows(log.read([30], together=together)) == whole
    assert rows(log.read([10, 45], together=together)) == whole
    assert rows(log.read(together=not together)) == whole


def test_steps_that_forget_a_stream_and_one_that_has_all_of_it() -> None:
    """Another stream goes on, and takes the state of the silent one along or not."""
    records = Records()
    for day in range(3 * IDLE_DAYS_MAX):
        records.add("going", b'{"seq":%d,"v":1}' % day, day * DAY_S)
        if day % (IDLE_DAYS_MAX + 2) == 0:
            records.add("silent", b'{"seq":%d,"v":1}' % day, day * DAY_S)
    whole = build([records.batch()])
    readings: list[Any] = []
    state: list[Any] = []
    for at in range(len(records.rows)):
        step = build([records.batch(slice(at, at + 1))], state)
        readings += step[0]
        state = step[2]
    assert sorted(readings, key=str) == whole[0]
    run = declared.READINGS.names.index("run")
    runs = {row[run] for row in whole[0] if row[0] == "silent"}
    assert len(runs) == 3


# Several partitions


def test_a_producer_counts_for_itself_in_each_partition() -> None:
    """Its sequences grow over all its topics, but the nodes that store them have clocks of their
    own: in the order of these, sequences may go back between two partitions."""
    rule = Rule("m/+/#", device="level 2", sequence_per="device")
    records = Records()
    sent = []
    for number in range(60):
        topic = f"m/d/{'ab'[number % 2]}"
        skew_s = 0.25 if number % 2 else 0.0
        producer = ("p", 1, number + 1)
        sent.append(number)
        records.add(topic, b'{"v":%d}' % number, number * 0.1 + skew_s, producer)
        if number % 10 == 0:
            records.add(topic, b'{"v":%d}' % number, number * 0.1 + skew_s, producer)
    assert len({row[2] for row in records.rows}) == 2
    fold = ReadingsFold(with_defaults((rule,)))
    for together in (True, False):
        found = folded(fold, records, together=together)
        assert sorted(row["value_double"] for row in found) == sent


def folded(fold: ReadingsFold, records: Records, *, together: bool = True) -> list[dict[str, Any]]:
    spread, _ = fold.spread(records.batch().select(fold.columns))
    known = pa.Table.from_batches([], declared.STATES)
    with pytest.MonkeyPatch.context() as patch:
        if not together:
            patch.setattr(Folder, "_groups", lambda *_: [])
        pieces = list(fold.fold(pa.Table.from_batches([spread]), known, None))
    rows = [row for output, batch in pieces if output == "rows" for row in batch.to_pylist()]
    return [row for row in rows if row["metric"] != "$repeated"]


def test_producers_of_long_stretches_in_each_partition() -> None:
    """The node of one partition is so far behind that its messages come before all others."""
    rule = Rule("m/+/#", device="level 2", sequence_per="device")
    records = Records()
    for number in range(60):
        topic, late_s = ("m/d/a", 0.0) if number % 2 else ("m/d/b", 100.0)
        records.add(topic, b'{"v":%d}' % number, number * 0.1 + late_s, ("p", 1, number + 1))
    for number in (58, 59):  # again
        topic, late_s = ("m/d/a", 0.0) if number % 2 else ("m/d/b", 100.0)
        records.add(topic, b'{"v":%d}' % number, number * 0.1 + late_s, ("p", 1, number + 1))
    fold = ReadingsFold(with_defaults((rule,)))
    for together in (True, False):
        found = folded(fold, records, together=together)
        assert sorted(row["value_double"] for row in found) == list(range(60))


@pytest.mark.parametrize("topics", ["a", "ab"])
def test_a_clock_that_is_put_back_changes_no_order_within_a_partition(topics: str) -> None:
    rule = Rule("m/+/#", device="level 2", sequence_per="device")
    records = Records()
    at = [number if number < 20 else number - 15 for number in range(40)]
    for number, at_s in enumerate(at):
        name = topics[number % len(topics)]
        records.add(f"m/d/{name}", b'{"seq":%d,"v":1}' % number, at_s)
    found = folded(ReadingsFold(with_defaults((rule,))), records)
    stored = {row["sequence"]: row["store_time"] for row in found}
    assert stored == {number: BEGIN + timedelta(seconds=at_s) for number, at_s in enumerate(at)}
    assert len({row["run"] for row in found}) == 1
    if len(topics) == 1:
        assert sum(row["gap_before"] for row in found) == 0
    # What was missing at times, between two partitions, came.
    came = [row for row in found if row["gap_opened_at"] is not None and not row["gap_before"]]
    assert sum(row["gap_before"] for row in found) == len(came)


# Memory


@pytest.mark.parametrize("slice_bytes", [1, 500, 3000])
def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    whole = build([example().batch()])
    monkeypatch.setattr("holdfast_lake.tables.readings.BATCH_ROWS", 40)
    monkeypatch.setattr("holdfast_lake.tables.readings.SLICE_BYTES", slice_bytes)
    batches = [example().batch(slice(at, at + 37)) for at in range(0, len(example().rows), 37)]
    assert build(batches) == whole
    assert build(batches, [], 3) == whole


def test_slices_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_lake.tables.readings.SLICE_BYTES", 10)
    sizes = [4, 4, 4, 30, 1, 9, 0, 1]
    cuts = [(at, at + 1) for at in range(len(sizes))]
    found = list(_slices(cuts, np.array(sizes, np.int64)))
    assert [[sizes[begin] for begin, _ in each] for each in found] == [
        [4, 4], [4], [30], [1, 9, 0], [1],
    ]  # fmt: skip


def test_whatever_is_long_in_a_row_counts_for_the_slice() -> None:
    records = Records()
    records.add("t", b"12345", 0, client="c" * 1000)
    records.add("t", b"123", 0, ("p" * 500, 1, 1), client="")
    rows, _ = ReadingsFold(with_defaults(())).spread(
        records.batch().select(ReadingsFold(()).columns)
    )
    assert _weights(pa.Table.from_batches([rows])).tolist() == [1005, 503]


def test_taken_rows_are_those_asked_for_in_that_order() -> None:
    numbers = list(range(100))
    parts = [pa.record_batch({"n": numbers[at : at + 7]}) for at in range(0, 100, 7)]
    parts.insert(3, parts[0].slice(0, 0))
    table = pa.Table.from_batches(parts)
    for wanted in ([5], [99, 0, 50], numbers[::-1], numbers, list(range(20, 40))):
        assert _copy_rows(table, np.array(wanted)).column("n").to_pylist() == wanted


def test_large_payloads_read_alone_make_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has gathered of readings is bounded by bytes, too."""
    monkeypatch.setattr(declared, "BYTES_PER_BATCH", 5000)
    log = Log()
    for number in range(120):
        log.add("t", b'{"nested":{"text":"%d%s"}}' % (number, b"x" * 1000))
        log.add(f"state/{number}", b'{"seq":1,"msg_id":"%s"}' % (b"i" * 60))
    largest: dict[str, int] = {}
    count = 0
    data = batch(sorted(log.rows, key=lambda row: str(row[0])))
    for output, piece in Folder(log.rules).fold(iter([data]), {}):
        largest[output] = max(largest.get(output, 0), piece.nbytes)
        count += piece.num_rows if output == "rows" else 0
    assert count == 240
    assert largest["rows"] < 20_000
    assert largest["state"] < 12_000


# Everything at once


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_steps_buckets_slices_and_batches_change_nothing(seed: int) -> None:
    """What the tests of messages read together publish, as it comes to tasks."""
    chance = random.Random(seed)
    records = Records()
    for number in range(chance.randrange(2, 6)):
        for at, (topic, payload, client, producer) in enumerate(stretch(chance)):
            records.add(topic, payload, number * 1000 + at, producer, client)
    fold = ReadingsFold(with_defaults(RULES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "_groups", lambda *_: [])
        expected = build([records.batch()], fold=fold)
    count = len(records.rows)
    edges = sorted({0, count, *(chance.randrange(count) for _ in range(chance.randrange(3)))})
    readings: list[Any] = []
    quarantine: list[Any] = []
    state: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        module = "holdfast_lake.tables.readings"
        patch.setattr(f"{module}.BATCH_ROWS", chance.choice((5, 40, 1000)))
        patch.setattr(f"{module}.SLICE_BYTES", chance.choice((1, 300, 5000)))
        patch.setattr("holdfast_lake.tables.parse.PARSED_ROWS", chance.choice((10, 1000)))
        for begin, end in pairwise(edges):
            cuts = sorted({begin, end, chance.randrange(begin, end)})
            batches = [records.batch(slice(*cut)) for cut in pairwise(cuts)]
            chance.shuffle(batches)
            step = build(batches, state, chance.randrange(1, 4), fold=fold)
            readings += step[0]
            quarantine += step[1]
            state = step[2]
    found = (sorted(readings, key=str), sorted(quarantine, key=str), state)
    assert found == expected

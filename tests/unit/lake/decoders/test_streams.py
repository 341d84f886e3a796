"""Streams: repetitions, gaps, runs, lateness and Sparkplug's births, in steps of any size."""

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_lake.decoders.decoded import PAYLOAD_BYTES_MAX
from holdfast_lake.decoders.text_payload import ONLINE
from holdfast_lake.tables.readings import SEQUENCE
from holdfast_lake.tables.rules import Rule
from holdfast_lake.tables.stream import (
    DEVICES_MAX,
    GAPS_MAX,
    JUMP_MAX,
    PRODUCERS_MAX,
    REORDER_MAX,
    SEEN_MAX,
    StreamState,
    follow,
    is_late,
    is_repetition,
    note_content,
    was_seen,
)
from tests.support import sparkplug_wire as wire
from tests.support.fold_log import TIME_US, Found, Log, Producer, value


def numbered(*numbers: int) -> Found:
    log = Log()
    for at, number in enumerate(numbers):
        log.add("t", b'{"seq":%d,"v":%d}' % (number, at))
    return log.read()


def gaps(found: Found) -> list[int]:
    return [row["gap_before"] for row in found.readings]


# Numbers


def test_missing_numbers_are_counted_before_the_next() -> None:
    found = numbered(5, 6, 9, 10)
    assert gaps(found) == [0, 0, 2, 0]
    assert [row["gap_opened_at"] is not None for row in found.readings] == [0, 0, 1, 0]


def test_a_number_that_comes_late_fills_its_gap() -> None:
    found = numbered(1, 5, 3, 6, 2)
    assert gaps(found) == [0, 3, 0, 0, 0]
    opened = [row["gap_opened_at"] for row in found.readings]
    assert opened[2] == opened[4] == opened[1]
    assert opened[3] is None


def test_a_message_that_is_the_same_is_dropped_and_another_with_its_number_is_not() -> None:
    log = Log()
    for payload in (b'{"seq":1,"v":1}', b'{"seq":1,"v":1}', b'{"seq":1,"v":2}'):
        log.add("t", payload)
    found = log.read()
    assert [row["value_double"] for row in found.readings] == [1.0, 2.0]
    (repeated,) = found.repeated
    assert (repeated["device"], repeated["offset"], repeated["position"]) == ("t", 1, 0)
    assert repeated["value_double"] is repeated["sequence"] is repeated["sent_time"] is None


def test_a_repetition_is_noted_for_its_device_by_whatever_it_was_known() -> None:
    log = Log(
        Rule("f/+", decode="json", device="field dev", id="uid"), Rule("l/+/+", device="level 2")
    )
    for _ in range(2):
        log.add("f/1", b'{"dev":"a","uid":"x","v":1}')
        log.add("f/2", b'{"dev":"b","v":1}', producer=("p", 1, 5))
        log.add("l/c/x", b"5", producer=("p", 1, 7))
        log.add("spBv1.0/G/NDATA/E", b"", producer=("p", 1, 9), stream="spBv1.0/G/E")
        log.add("spBv1.0/G/NCMD/E", b"", producer=("q", 1, 9), stream="spBv1.0/G/E")
    found = log.read()
    assert sorted(row["device"] for row in found.repeated) == ["G/E", "a", "b", "c"]
    assert found.counts == {"repetitions": 4}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("together", [False, True])
def test_a_device_that_starts_again_repeats_nothing(first: int, together: bool) -> None:
    """The temperature of an empty room is the same before and after a new battery."""
    log = Log()
    for _ in range(3):
        for number in range(first, first + 40):
            log.add("t", b'{"seq":%d,"temp":21.5}' % number)
        log.add("t", b'{"seq":%d,"temp":21.5}' % (first + 39))
    for steps in ([], [1, 40, 41, 42, 43, 60, 121], range(1, 123)):
        found = log.read(steps, together=together)
        assert len(found.readings) == 120
        assert len(found.repeated) == 3
        assert len({row["run"] for row in found.readings}) == 3
        assert gaps(found) == [0] * 120


def test_a_message_that_comes_again_after_a_restart_is_a_repetition_by_its_time() -> None:
    log = Log()
    for at, number in enumerate((79, 80, 81, 0, 81, 1)):
        at = 2 if number == 81 else at
        log.add("t", b'{"seq":%d,"ts":%d}' % (number, TIME_US // 1_000_000 + at))
    for steps in ([], [3, 4], [1, 2, 3, 4, 5]):
        found = log.read(steps)
        assert [row["sequence"] for row in found.readings] == [79, 80, 81, 0, 1]
        assert gaps(found) == [0] * 5


def test_a_time_in_the_message_shows_that_a_zero_is_no_restart() -> None:
    log = Log()
    for number in (0, 1, 2, 0, 1, 3):
        log.add("t", b'{"seq":%d,"ts":%d}' % (number, TIME_US // 1_000_000 + number))
    found = log.read()
    assert [row["sequence"] for row in found.readings] == [0, 1, 2, 3]
    assert len(found.repeated) == 2


def test_a_device_that_starts_again_begins_a_run() -> None:
    found = numbered(100, 101, 0, 1, 3)
    assert gaps(found) == [0, 0, 0, 0, 1]
    assert [row["run"] for row in found.readings] == [0, 0, 2, 2, 2]
    far = numbered(10 + REORDER_MAX, 9, 10)
    assert [row["run"] for row in far.readings] == [0, 1, 1]
    jump = numbered(1, JUMP_MAX + 3, JUMP_MAX + 4)
    assert [(row["run"], row["gap_before"]) for row in jump.readings] == [(0, 0), (1, 0), (1, 0)]


def test_a_missing_zero_or_one_fills_its_gap_and_begins_no_run() -> None:
    log = Log()
    for number in (0, 3, 1):
        log.add("t", b'{"seq":%d}' % number)
    found = log.read()
    assert [row["run"] for row in found.readings] == [0, 0, 0]
    assert [row["metric"] for row in found.readings] == [SEQUENCE] * 3
    assert found.readings[2]["gap_opened_at"] == found.readings[1]["gap_opened_at"]


@given(st.lists(st.integers(0, 40), max_size=30))
def test_gaps_and_fills_are_what_is_missing(numbers: list[int]) -> None:
    """Without runs: what was reported missing and not filled is what lies between and is not
    there."""
    state = StreamState()
    missing: set[int] = set()
    for at, number in enumerate(numbers):
        place = follow(state, number, at, at, restarts=False)
        if place.gap_before:
            missing |= set(range(number - place.gap_before, number))
        elif place.gap_opened_us is not None:
            missing.discard(number)
    if numbers:
        between = set(range(numbers[0], max(numbers) + 1))
        assert missing == between - set(numbers)


def test_memory_has_bounds() -> None:
    state = StreamState()
    for number in range(0, 4 * GAPS_MAX, 2):
        follow(state, number, 0, 0)
    for number in range(3 * SEEN_MAX):
        was_seen(state, str(number), number)
        note_content(state, number, 0)
        is_repetition(state, f"p{number}", 0, 1)
    for number in range(2 * DEVICES_MAX):
        is_late(state, f"d{number}", number, 0)
    assert len(state.gaps) == GAPS_MAX
    assert len(state.seen) == len(state.contents) == SEEN_MAX
    assert len(state.producers) == PRODUCERS_MAX
    assert len(state.latest) == DEVICES_MAX


# Repetitions


def test_repetitions_of_a_producer_are_dropped() -> None:
    log = Log()
    for epoch, sequence in ((1, 5), (1, 5), (1, 9), (1, 7), (2, 1), (1, 10)):
        log.add("t", b"%d" % (epoch * 100 + sequence), producer=("p", epoch, sequence))
    assert [row["value_double"] for row in log.read().readings] == [105.0, 109.0, 201.0]


def test_producers_count_for_themselves_in_each_topic() -> None:
    log = Log()
    log.add("a", b"1", producer=("p", 1, 5))
    log.add("b", b"2", producer=("p", 1, 4))
    log.add("a", b"3", producer=("q", 1, 5))
    assert sorted(row["value_double"] for row in log.read().readings) == [1.0, 2.0, 3.0]


def test_repetitions_by_id_are_dropped() -> None:
    log = Log(Rule("t", id="uuid"))
    for payload in (b'{"uuid":"x","v":1}', b'{"uuid":"y","v":2}', b'{"uuid":"x","v":3}'):
        log.add("t", payload)
    found = log.read()
    assert [row["value_double"] for row in found.readings] == [1.0, 2.0]
    assert [row["message_id"] for row in found.readings] == ["x", "y"]


def test_long_ids_are_remembered_by_their_hash() -> None:
    log = Log()
    for end in ("a", "b", "a"):
        log.add("t", b'{"msg_id":"%s","v":1}' % ("x" * 500 + end).encode())
    found = log.read()
    assert len(found.readings) == 2
    assert len(found.states["t"][0]) < 200


def test_equal_messages_without_id_and_number_are_all_kept() -> None:
    log = Log()
    for _ in range(3):
        log.add("t", b'{"id":"pump","v":1}')
    assert len(log.read().readings) == 6


# Times


def test_event_times_late_and_not_believed() -> None:
    log = Log(Rule("t", lateness_s=10, future_s=60))
    second = TIME_US // 1_000_000
    for ts in (second, second - 9, second - 11, second + 63, second + 500, 5, second - 2):
        log.add("t", b'{"ts":%d,"v":1}' % ts)
    found = log.read().readings
    events = [row["event_time"].timestamp() - second for row in found]
    assert events == [0, -9, -11, 63, 4, 5, -2]
    assert [row["is_late"] for row in found] == [False, False, True, False, False, False, True]
    claimed = [row["claimed_time"] for row in found]
    assert [each is not None for each in claimed] == [False] * 4 + [True, True, False]
    assert claimed[4].timestamp() == second + 500
    assert [row["sent_time"] is not None for row in found] == [True] * 7


def test_readings_may_have_times_of_their_own() -> None:
    log = Log()
    second = TIME_US // 1_000_000
    log.add("t", b'[{"ts":%d,"v":1},{"ts":%d,"v":2},{"ts":5,"v":3}]' % (second - 5, second - 4))
    found = log.read().readings
    assert [row["event_time"].timestamp() - second for row in found] == [-5, -4, 0]
    assert [row["claimed_time"] is None for row in found] == [True, True, False]


# Quarantine


def test_bad_payloads_are_quarantined_with_their_place() -> None:
    log = Log(Rule("n", decode="number"), Rule("d/#", device="level 3"))
    log.add("n", b"abc")
    log.add("d/x", b"1")
    log.add("big", None)
    log.add("half", b'{"a":1e999,"b":2}')
    log.add("x", b"\x1f\x8b\x08" + b"\xff" * 10_000)
    found = log.read()
    rows = {row["topic"]: row for row in found.quarantine}
    assert "neither a number" in rows["n"]["reason"]
    assert "the topic has 2 levels" in rows["d/x"]["reason"]
    assert f"{PAYLOAD_BYTES_MAX} are decoded at most" in rows["big"]["reason"]
    assert rows["big"]["payload"] is None
    assert rows["half"]["reason"] == "a is inf, which is no number"
    assert "cannot be decompressed" in rows["x"]["reason"]
    assert [row["code"] for row in found.quarantine] == [
        "limit", "device", "value", "value", "format"
    ]  # fmt: skip
    assert len(rows["x"]["payload"]) == 4096
    assert [(row["partition"], row["offset"]) for row in found.quarantine] == [
        (0, 2), (0, 1), (0, 3), (0, 0), (0, 4)
    ]  # fmt: skip
    assert found.values() == [("half", "b", 2.0)]


def test_ignored_topics_are_not_looked_at() -> None:
    log = Log(Rule("debug/#", decode="ignore"))
    log.add("debug/x", b"{{{")
    found = log.read()
    assert not found.readings
    assert not found.quarantine


ODD_TEXTS = st.text(st.characters(codec=None), max_size=8)  # with halves of surrogate pairs
ODD_JSON = st.dictionaries(
    st.sampled_from(["ts", "seq", "msg_id", "dev", "sent", "x"]),
    st.one_of(ODD_TEXTS, st.floats(), st.integers(), st.lists(st.floats(), max_size=2), st.none()),
).map(lambda document: json.dumps(document).encode())
ODD_SPARKPLUG = st.builds(
    lambda content, kind, time_ms, seq: wire.payload(
        wire.metric(content, kind, name="n", time_ms=time_ms), seq=seq
    ),
    st.binary(max_size=12),
    st.integers(16, 40),
    st.integers(0, 2**64 - 1),
    st.none() | st.integers(0, 2**64 - 1),
)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["any", "j/x", "c/x", "n/x", "t/x", "f/x", "x/status", "spBv1.0/G/NBIRTH/E"]
            ),
            st.binary(max_size=30) | ODD_JSON | ODD_SPARKPLUG,
        ),
        max_size=6,
    )
)
def test_nothing_that_is_published_stops_the_fold(messages: list[tuple[str, bytes]]) -> None:
    log = Log(
        Rule("j/+", decode="json", time="ts", sequence="seq"),
        Rule("c/+", decode="csv"),
        Rule("n/+", decode="number"),
        Rule("t/+", decode="text"),
        Rule("f/+", device="field dev"),
    )
    for topic, payload in messages:
        log.add(topic, payload)
    found = log.read([len(messages) // 2])
    told = {row["offset"] for row in found.readings + found.quarantine}
    assert told <= set(range(len(messages)))


# Steps


PAYLOADS = st.one_of(
    st.integers(0, 30).map(lambda n: b'{"seq":%d,"v":%d}' % (n, n % 3)),
    st.integers(0, 5).map(lambda n: b'{"message_id":"%d","v":1}' % n),
    st.integers(-50, 400).map(lambda n: b'{"ts":%d,"v":1}' % (TIME_US // 1_000_000 + n)),
    st.sampled_from([b"{", b"5", b"\xff", b"[1,2]", b'{"seq":3}']),
)
MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        PAYLOADS,
        st.none() | st.tuples(st.just("p"), st.integers(0, 1), st.integers(1, 9)),
    ),
    max_size=25,
)


@settings(max_examples=150)
@given(MESSAGES, st.lists(st.integers(0, 25), max_size=4))
def test_steps_change_nothing(
    messages: list[tuple[str, bytes, Producer | None]], steps: list[int]
) -> None:
    log = Log()
    for topic, payload, producer in messages:
        log.add(topic, payload, producer=producer)
    whole = log.read()
    parts = log.read([min(step, len(messages)) for step in steps])

    def key(row: dict[str, Any]) -> tuple[int, int]:
        return row["offset"], row.get("position", 0)

    assert sorted(parts.readings, key=key) == sorted(whole.readings, key=key)
    assert sorted(parts.quarantine, key=key) == sorted(whole.quarantine, key=key)
    assert parts.states == whole.states


# Sparkplug B


class Edge(Log):
    """Edge node E of group G with the device D."""

    def say(self, kind: str, *metrics: bytes, seq: int | None = None, **more: Any) -> None:
        device = "/D" if kind[0] == "D" else ""
        topic = f"spBv1.0/G/{kind}/E{device}"
        self.add(topic, wire.payload(*metrics, seq=seq), stream="spBv1.0/G/E", **more)

    def birth(self, bd_sequence: int = 0, **more: Any) -> None:
        self.say(
            "NBIRTH",
            wire.metric(bd_sequence, wire.UINT64, name="bdSeq"),
            wire.metric(-1, wire.INT32, name="Level", alias=1),
            seq=0,
            **more,
        )


def test_aliases_are_named_by_the_births_before() -> None:
    edge = Edge()
    edge.birth()
    edge.say("DBIRTH", wire.metric(1.5, wire.DOUBLE, name="Flow", alias=2), seq=1)
    edge.say("NDATA", wire.metric(-7, wire.INT32, alias=1, typed=False), seq=2)
    edge.say("DDATA", wire.metric(2.5, wire.DOUBLE, alias=2, typed=False), seq=3)
    for steps in ([], [1], [1, 2, 3]):
        found = edge.read(steps)
        assert found.values() == [
            ("G/E", ONLINE, True), ("G/E", "bdSeq", 0.0), ("G/E", "Level", -1.0),
            ("G/E/D", ONLINE, True), ("G/E/D", "Flow", 1.5), ("G/E", "Level", -7.0),
            ("G/E/D", "Flow", 2.5),
        ]  # fmt: skip
        assert not found.quarantine
        assert all(row["gap_before"] == 0 for row in found.readings)


def test_types_are_remembered_for_metrics_with_names() -> None:
    edge = Edge()
    edge.say("NBIRTH", wire.metric(-1, wire.INT16, name="x"), seq=0)
    edge.say("NDATA", wire.metric(-2, wire.INT16, name="x", typed=False), seq=1)
    assert edge.read([1]).values()[-1] == ("G/E", "x", -2.0)


def test_aliases_without_a_birth_are_quarantined_and_the_rest_is_read() -> None:
    edge = Edge()
    edge.say(
        "NDATA",
        wire.metric(5, wire.INT32, alias=9, typed=False),
        wire.metric(6, wire.INT32, name="n"),
        wire.metric(6, wire.INT32),
        seq=4,
    )
    edge.say("NDATA", wire.metric(5, wire.INT32, alias=9, typed=False), seq=7)
    found = edge.read()
    assert found.reasons() == [
        "alias 9 is not known: no birth of this edge node before has it; "
        "a metric without name and alias",
        "alias 9 is not known: no birth of this edge node before has it",
    ]
    assert found.values() == [("G/E", "n", 6.0), ("G/E", SEQUENCE, 6.0 + 1)]
    assert gaps(found) == [0, 2]


def test_a_new_birth_ends_the_aliases_before_and_late_data_is_read_by_the_old_one() -> None:
    edge = Edge()
    edge.birth()
    edge.say("NBIRTH", wire.metric(1, wire.INT32, name="Other", alias=1), seq=0, at_s=10)
    edge.say("NDATA", wire.metric(3, wire.INT32, alias=1, typed=False), seq=1, at_s=11)
    edge.say("NDATA", wire.metric(2, wire.INT32, alias=1, typed=False), seq=1, at_s=5)
    found = edge.read([3])
    assert found.values()[-2:] == [("G/E", "Other", 3.0), ("G/E", "Level", 2.0)]
    assert [row["sequence"] for row in found.readings[-2:]] == [1, None]


@pytest.mark.parametrize("begun", [0, 253, 254, 255])
def test_births_stored_in_one_microsecond_miss_nothing(begun: int) -> None:
    """They are in several partitions, whose order says nothing."""
    for order in permutations(range(1, 4)):
        edge = Edge()
        edge.birth(at_s=0)
        for number in range(1, begun + 1):
            edge.say("NDATA", wire.metric(1, wire.INT32, name="n"), seq=number)
        for number in order:
            kind = "DDATA" if number == 2 else "DBIRTH"
            flow = wire.metric(1.5, wire.DOUBLE, name="Flow")
            edge.say(kind, flow, seq=(begun + number) % 256, at_s=begun + 1)
        found = edge.read()
        assert gaps(found) == [0] * len(found.readings)
        numbers = sorted({row["sequence"] for row in found.readings})
        assert numbers == list(range(begun + 4))


def test_numbers_go_on_beyond_255() -> None:
    edge = Edge()
    edge.birth()
    for number in [*range(1, 256), 0, 1, 4, 3]:
        edge.say("NDATA", wire.metric(1, wire.INT32, name="n"), seq=number)
    found = edge.read([100, 257])
    tail = [(row["sequence"], row["gap_before"]) for row in found.readings[-5:]]
    assert tail == [(255, 0), (256, 0), (257, 0), (260, 2), (259, 0)]
    assert found.readings[-1]["gap_opened_at"] == found.readings[-2]["gap_opened_at"]
    assert len({row["run"] for row in found.readings}) == 1


def test_a_birth_begins_a_run() -> None:
    edge = Edge()
    edge.birth()
    edge.say("NDATA", wire.metric(1, wire.INT32, name="n"), seq=1)
    edge.birth(1)
    edge.say("NDATA", wire.metric(1, wire.INT32, name="n"), seq=1)
    found = edge.read()
    assert all(row["gap_before"] == 0 for row in found.readings)
    assert len({row["run"] for row in found.readings}) == 2


def test_deaths_of_nodes_end_their_devices() -> None:
    edge = Edge()
    edge.birth(3)
    edge.say("DBIRTH", seq=1)
    edge.say("NDEATH", wire.metric(3, wire.UINT64, name="bdSeq"))
    found = edge.read([2])
    assert found.values()[-2:] == [("G/E", ONLINE, False), ("G/E/D", ONLINE, False)]
    assert [row["position"] for row in found.readings[-2:]] == [0, 1]


def test_the_will_of_a_session_before_the_last_birth_says_nothing() -> None:
    edge = Edge()
    edge.birth(4)
    edge.say("NDEATH", wire.metric(3, wire.UINT64, name="bdSeq"))
    assert (("G/E", ONLINE, False)) not in edge.read().values()


def test_device_deaths_and_historical_values() -> None:
    edge = Edge()
    edge.birth()
    past = TIME_US // 1000 - 3_600_000
    edge.say("DDATA", wire.metric(1, wire.INT32, name="n", time_ms=past, historical=True), seq=1)
    edge.say("DDEATH", seq=2)
    found = edge.read()
    old, death = found.readings[-2:]
    assert old["is_historical"]
    assert old["event_time"].timestamp() * 1000 == past
    assert (death["device"], value(death), death["sequence"]) == ("G/E/D", False, 2)


@pytest.mark.parametrize(
    ("topic", "reason"),
    [
        ("spBv1.0/G", "no topic of Sparkplug B"),
        ("spBv1.0/G/XDATA/E", "no topic of Sparkplug B"),
        ("spBv1.0/G/DDATA/E", "DDATA with 4 levels"),
        ("spBv1.0/G/NDATA/E/D", "NDATA with 5 levels"),
        ("spBv1.0/G/NDATA/E/D/X", "no topic of Sparkplug B"),
        ("spBv1.0/STATE/host/x", "no topic of Sparkplug B"),
    ],
)
def test_topics_that_are_none_of_sparkplug(topic: str, reason: str) -> None:
    log = Log()
    log.add(topic, wire.payload(seq=0))
    assert reason in log.read().reasons()[0]


def test_commands_are_no_readings_and_hosts_have_a_state() -> None:
    log = Log()
    log.add("spBv1.0/G/NCMD/E", wire.payload(wire.metric(True, wire.BOOLEAN, name="Rebirth")))
    log.add("spBv1.0/STATE/scada", b'{"online":true,"timestamp":1790000000000}')
    found = log.read()
    assert found.values() == [("STATE/scada", ONLINE, True)]
    assert not found.quarantine


def test_times_that_are_no_times_are_told() -> None:
    edge = Edge()
    topic = "spBv1.0/G/NDATA/E"
    bad = wire.metric(1, wire.INT32, name="n", time_ms=2**63)
    edge.add(topic, wire.payload(bad, seq=0, time_ms=2**64 - 1), stream="spBv1.0/G/E")
    found = edge.read()
    assert "is no time in milliseconds" in found.reasons()[0]
    assert found.values() == [("G/E", "n", 1.0)]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["NBIRTH", "DBIRTH", "NDATA", "DDATA", "NDEATH", "DDEATH"]),
            st.lists(st.integers(1, 3), max_size=2),
            st.none() | st.integers(0, 300),
            st.integers(-2, 2),
        ),
        max_size=14,
    ),
    st.lists(st.integers(0, 14), max_size=3),
)
def test_steps_change_nothing_of_an_edge_node(
    messages: list[tuple[str, list[int], int | None, int]], steps: list[int]
) -> None:
    """Also where a step brings what is older than the step before had."""
    edge = Edge()
    for at, (kind, aliases, seq, shift) in enumerate(messages):
        named = kind.endswith("BIRTH")
        metrics = [
            wire.metric(alias, wire.INT32, alias=alias, name=f"{kind}{at}" if named else None)
            for alias in aliases
        ]
        edge.say(kind, *metrics, seq=seq, at_s=at * 3 + shift * 0.1)
    whole = edge.read()
    parts = edge.read([min(step, len(messages)) for step in steps])
    assert parts.readings == whole.readings
    assert parts.quarantine == whole.quarantine
    assert parts.states == whole.states

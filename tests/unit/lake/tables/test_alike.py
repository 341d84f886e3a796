"""Messages read together and messages read one by one give the same rows."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast_lake.decoders import times
from holdfast_lake.decoders.decoded import DEPTH_MAX
from holdfast_lake.decoders.times import parse_time, parse_times
from holdfast_lake.tables import parse as flat
from holdfast_lake.tables.parse import GROUP_ROWS_MIN, NAMES_MAX, PARSED_ROWS
from holdfast_lake.tables.readings import Folder
from holdfast_lake.tables.rules import Rule
from holdfast_lake.tables.stream import GAPS_MAX, JUMP_MAX, REORDER_MAX, SEEN_MAX
from holdfast_lake.tables.topics import Topics, client_stream
from tests.support.fold_log import TIME_US, Found, Log, Producer

NOW_S = TIME_US // 1_000_000
RULES = (
    Rule("j/+", decode="json", time="ts", sequence="seq", id="uuid"),
    Rule("n/+", decode="number", metric="level 2"),
    Rule("f/+", device="field dev", sequence=("n", "seq")),
    Rule("c/+", device="client", lateness_s=2),
    Rule("l/+/+", device="level 2", metric="level 3", time=("when", "ts"), future_s=3),
    Rule("d/+/#", decode="json", device="level 2", sequence_per="device"),
    Rule("p/+", device="level 4"),
    Rule("s/+", lateness_s=0, future_s=0),
    Rule("v/+", columns=("ts", "v"), decode="csv"),
)
TOPICS = ("any", "j/x", "n/temp", "f/x", "c/x", "l/a/b", "l/b/b", "d/1/a", "d/1/b", "p/x", "s/x",
          "v/x", "lamp/status")  # fmt: skip

NUMBERS = ("0", "-0", "-0.0", "1", "1.5", "-2.5e-7", "1e5", "9007199254740991", "9007199254740992",
           "-9007199254740993", "9223372036854775807", "18446744073709551615",
           "18446744073709551616", "1e300", "1E999", "100000000000000000000000000")  # fmt: skip
ODD = ('"ON"', '"off "', '"21.5 °C"', '""', '"é"', '"a\\u0000b"', '"\\ud83d\\ude00"', '"\\ud800"',
       '"\xff"', "true", "false", "null", "[]", "[1,2]", "{}",
       '{"a":1,"b":[true]}', "NaN", "Infinity", "01", ".5", '"x')  # fmt: skip
TIMES = (
    *(str(NOW_S + seconds) for seconds in (-90, -3, 0, 2, 400)),
    *(f"{NOW_S}{fraction}" for fraction in (".5", ".123456", "000", "000000", "000000000", "123")),
    '"2026-09-21T14:13:20Z"', '"2026-09-21T14:13:20.25+02:00"', '"yesterday"', "-1", "5", "null",
    "1e20", "99999999999.9", "1e11", "true", '"1790000000"', "9223372036854775808",
)  # fmt: skip
IDS = ('"a"', '"b"', '""', "7", "-8", "18446744073709551616", '"' + "i" * 70 + '"', "null")
NAMES = ("v", "w", "ts", "when", "sent", "seq", "n", "msg_id", "uuid", "dev", "m.x", "", "é",
         "unit", "uom", "v_scale")  # fmt: skip
DEEP = DEPTH_MAX + 2
WHOLE = (
    b"", b"{", b" ", b" 5 ", b" {} ", b"\n", b'{"v":1}x', b"tru", b'\xef\xbb\xbf{"v":1}', b"[]",
    b"[{}]", b'[{"ts":1790000000,"v":1},{"v":-0.0}]', b"[" * 5000,
    b"{" + b'"n":{' * DEEP + b"}" * DEEP + b"}", b'{"v":1,"v":{"v":2},"v":3}', b"0x10", b"1_000",
    "\u0661\u0662".encode(), b"1" * 65, b"1" * 401, b"0." + b"1" * 4100, b"-" + b"9" * 30, b"1e400",
    b"-1e400", b"1E-400", b"nan", b"-inf", b'{"v":1,}', b'{"a":1e400,"b":2}', b'{"a":NaN}',
    b"\xff\xfe", b"\x00", b'"v"', b'{"\xff":1}', b'{"' + b"k" * 1025 + b'":1}', b'{"v":tRue}',
    b'{"v":"' + "\U0001f600".encode() * 5000 + b'"}', b'{"msg_id":"' + b"i" * 1025 + b'"}',
    b'{"seq":9223372036854775807}', b'{"seq":1.0}', b'{"seq":9223372036854775808,"v":1}', b"1,2",
    b"1;2", b"1790000000,5\n1790000001,\n", b"online", b'{"status":"1"}',
)  # fmt: skip
"""Payloads that are no objects, or not as the others."""
Said = tuple[str, bytes, str, Producer | None]
"""Topic, payload, client, producer."""


def a_value(chance: random.Random, name: str) -> str:
    """As JSON; mostly what the name promises."""
    if chance.random() < 0.03:
        return chance.choice((*NUMBERS, *ODD, *TIMES))
    if name in ("ts", "when", "sent"):
        return chance.choice(TIMES[:5])
    if name in ("msg_id", "uuid"):
        return chance.choice(IDS) if chance.random() < 0.1 else f'"{chance.randrange(10**6)}"'
    if name in ("unit", "uom"):
        return chance.choice(('"°C"', '"°C"', '"F"', '"frogs"'))
    if name == "v_scale":
        return chance.choice(("-2", "-2", "-1", "0", "3", "-32768"))
    if name == "dev":
        return chance.choice(('"d1"', '"d2"'))
    return chance.choice((*NUMBERS[:5], repr(chance.uniform(-1e6, 1e6))))


def stretch(chance: random.Random) -> list[Said]:
    """Messages of one topic, most of them alike."""
    topic = chance.choice(TOPICS)
    names = chance.sample(NAMES, chance.randrange(5))
    number, sequence = chance.randrange(40), chance.randrange(30)
    is_plain = chance.random() < 0.2
    producer = chance.choice((None, None, "p", "q"))
    steady = chance.random()
    found = []
    for at in range(chance.randrange(1, 5 * GROUP_ROWS_MIN)):
        disturbed = chance.random() > steady
        number += chance.choice((2, 0, -1, 5, -20)) if disturbed else 1
        sequence += chance.choice((0, 3)) if disturbed else 1
        if is_plain:
            payload = a_value(chance, "v")
        else:
            parts = [f'"{name}":{a_value(chance, name)}' for name in names]
            if chance.random() < 0.97:
                parts.append(f'"seq":{max(0, number)}')
            payload = "{" + ", ".join(parts) + "}"
        numbered = (producer, 1 + at // 20, max(0, sequence)) if producer else None
        raw = payload.encode("latin-1" if "\xff" in payload else "utf-8", "replace")
        if chance.random() < 0.05:
            raw = chance.choice(WHOLE)
        found.append((topic, raw, "ab"[at // 15 % 2], numbered))
    return found


def log_of(messages: Sequence[Said]) -> Log:
    log = Log(*RULES)
    topics = Topics(log.rules)
    for topic, payload, client, producer in messages:
        stream = topics[topic].stream or client_stream(client)
        log.add(topic, payload, stream=stream, client=client, producer=producer)
    return log


def rows(found: Found) -> tuple[list[Any], list[Any], dict[str, tuple[str, int]]]:
    """In an order that both have."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["offset"], row.get("device", ""), row.get("position", 0)

    return sorted(found.readings, key=key), sorted(found.quarantine, key=key), found.states


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_together_and_alone(seed: int) -> None:
    chance = random.Random(seed)
    messages = [each for _ in range(chance.randrange(1, 6)) for each in stretch(chance)]
    log = log_of(messages)
    steps = [chance.randrange(len(messages)) for _ in range(chance.randrange(3))]
    with pytest.MonkeyPatch.context() as patch:
        # So that some chunks have messages of several topics, and nothing else.
        patch.setattr(flat, "PARSED_ROWS", chance.choice((16, 64, PARSED_ROWS)))
        together, alone = log.read(steps), log.read(steps, together=False)
    assert rows(together) == rows(alone)


def test_every_odd_payload_among_others() -> None:
    log = Log(*RULES)
    for topic in TOPICS:
        stream = Topics(log.rules)[topic].stream or client_stream("c")
        for at, raw in enumerate(each for odd in WHOLE for each in (odd, None)):
            usual = b'{"seq":%d,"v":1,"ts":%d}' % (at, NOW_S)
            log.add(topic, usual if raw is None else raw, stream=stream)
    found = rows(log.read())
    assert found == rows(log.read(together=False))
    # Two of the topics never say which device it is.
    assert {row["topic"] for row in found[0]} == set(TOPICS) - {"f/x", "p/x"}
    assert len(found[1]) > len(WHOLE)


def alike(count: int, payload: str, topic: str = "any", **more: Any) -> Log:
    log = Log(*RULES)
    for number in range(count):
        log.add(topic, (payload % number).encode(), **more)
    return log


@pytest.mark.parametrize(
    "payload",
    [
        '{"seq":%d,"v":1.5,"on":true,"unit":"C","none":null}',
        '{"seq":%d , "v" : 1}',
        '{"v":%d}',
        '{"ts":179000%04d,"v":1}',
        '{"msg_id":"%d","v":1}',
        "%d",
        "%d.25",
    ],
)
def test_what_is_alike_is_read_together(payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = alike(1000, payload)
    expected = rows(log.read(together=False))
    # Nothing is left to the slow way: it would be seen here.
    monkeypatch.setattr(Folder, "_read_message", None)
    assert rows(log.read()) == expected
    assert len(expected[0]) >= 1000


def test_what_happens_among_many_is_found() -> None:
    numbers = [*range(100), 99, 98, *range(105, 300), 100, *range(300, 420), 0, 1, 2,
               *range(3, 600), *range(600 + JUMP_MAX + 5, 600 + JUMP_MAX + 90),
               *range(590, 700)]  # fmt: skip
    log = Log()
    for number in numbers:
        log.add("t", b'{"seq":%d,"v":%d}' % (number, number % 7))
    found = rows(log.read())
    assert found == rows(log.read(together=False))
    assert len({row["run"] for row in found[0]}) == 4
    assert sum(row["gap_before"] for row in found[0]) > 0


def test_the_widest_gap_and_one_wider() -> None:
    log = Log()
    for begin in (0, 50 + JUMP_MAX, 101 + 2 * JUMP_MAX):
        for number in range(begin, begin + 50):
            log.add("t", b'{"seq":%d,"v":1}' % number)
    found = rows(log.read())
    assert found == rows(log.read(together=False))
    assert {row["gap_before"] for row in found[0]} == {0, JUMP_MAX}
    assert len({row["run"] for row in found[0]}) == 2


def test_the_memory_of_a_stream_is_the_same() -> None:
    """More of everything than is remembered."""
    log = Log()
    for number in range(3 * SEEN_MAX):
        log.add("numbers", b'{"seq":%d,"v":1}' % number)
        log.add("gaps", b'{"seq":%d,"v":1}' % (number * 2))
        log.add("ids", b'{"msg_id":"%d","v":1}' % number)
        log.add("late", b'{"ts":%d,"v":1}' % (NOW_S - number % 300), at_s=0)
    log.add("gaps", b'{"seq":%d,"v":1}' % (6 * SEEN_MAX - 2 * GAPS_MAX - 1))
    found = rows(log.read([500, 1300]))
    assert found == rows(log.read([500, 1300], together=False))
    assert sum(row["is_late"] for row in found[0]) > 100


def test_messages_with_many_fields_are_read_alone() -> None:
    names = ", ".join(f'"n{number}": 1' for number in range(NAMES_MAX + 1))
    log = alike(20, "{" + names + ', "seq": %d}')
    assert rows(log.read()) == rows(log.read(together=False))


@pytest.mark.parametrize("name", ["$online", "$sequence", "$repeated"])
def test_a_payload_cannot_make_a_reserved_metric(name: str) -> None:
    """Else any payload could say that a device is down, or lose a value as a repetition."""
    log = alike(20, f'{{"{name}": false, "v": 1, "seq": %d}}')
    found = log.read()
    assert rows(found) == rows(log.read(together=False))
    assert Counter(metric for _, metric, _ in found.values()) == {f"${name}": 20, "v": 20}
    log = Log(Rule("csv", decode="csv", time=None))
    log.add("csv", f"{name},v\nfalse,2\n".encode())
    log.add("list", f'[{{"{name}": false, "ts": 1790000000}}]'.encode())
    assert {metric for _, metric, _ in log.read().values()} >= {f"${name}", "v"}
    assert name not in {metric for _, metric, _ in log.read().values()}


def test_what_is_far_back_begins_a_run() -> None:
    log = Log()
    for number in [*range(REORDER_MAX + 500, REORDER_MAX + 600), *range(100, 200)]:
        log.add("t", b'{"seq":%d,"v":1}' % number)
    found = rows(log.read())
    assert found == rows(log.read(together=False))
    assert len({row["run"] for row in found[0]}) == 2


NUMBERS_OF_TIMES = st.one_of(
    st.integers(20_000_100_000_000, 21_000_100_000_000), st.integers(-5, 2**64),
    st.integers(0, 10**12), st.integers(10**16, 10**18),
    st.floats(allow_nan=True), st.floats(0, 1e21), st.floats(0, 1e12), st.floats(1e13, 1e18),
)  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(st.integers(-5, 2**63 - 1), min_size=1)
    | st.lists(st.floats(0, 1e21) | st.floats(), min_size=1)
    | st.lists(NUMBERS_OF_TIMES | st.sampled_from(["2026-09-21T14:13:20Z", "x", None, True]))
)
@example([times._SECONDS_BELOW - 1, times._SECONDS_BELOW, times._MICROSECONDS_BELOW])
def test_times_together_are_times_one_by_one(given_times: list[Any]) -> None:
    found, there = parse_times(given_times)
    expected = [parse_time(value) for value in given_times]
    assert there.tolist() == [time is not None for time in expected]
    assert [int(time) for time in found[there]] == [time for time in expected if time is not None]


@settings(deadline=None)
@given(
    st.from_regex(rb"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,8})?", fullmatch=True)
)
@example(b"1e0000001")
@example(b"1e5")
def test_plain_numbers_are_the_same_as_json_and_as_text(text: bytes) -> None:
    log = Log()
    for _ in range(GROUP_ROWS_MIN):
        log.add("t", text)
    assert rows(log.read()) == rows(log.read(together=False))


def test_columns_are_what_the_table_declares() -> None:
    from holdfast_lake.tables.columns import COLUMNS, NAME, READINGS, STATE_COLUMNS, STATES

    sql = {pa.int32(): "int", pa.int64(): "bigint", pa.float64(): "double", pa.string(): "string",
           pa.bool_(): "boolean", pa.timestamp("us", tz="UTC"): "timestamp",
           NAME: "string"}  # fmt: skip
    for schema, columns in ((READINGS, COLUMNS[:-1]), (STATES, STATE_COLUMNS)):
        found = [(field.name, sql[field.type]) for field in schema]
        assert found == [(column.name, column.type) for column in columns]
    assert np.dtype(READINGS.field("value_double").type.to_pandas_dtype()) == np.float64

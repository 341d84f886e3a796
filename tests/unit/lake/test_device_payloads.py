"""Payloads of devices give the rows that their files list, by columns and one by one."""

import json
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast_lake.tables.parse import GROUP_ROWS_MIN
from holdfast_lake.tables.rules import Rule
from holdfast_lake.tables.stream import NOISE_MAX
from tests.support.device_payloads import Example, examples
from tests.support.fold_log import Log

FILES = sorted((Path(__file__).parents[2] / "data" / "devices").glob("*.toml"))
EXAMPLES = [example for path in FILES for example in examples(path)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.name} {example.about}")
def test_the_rows_are_those_of_the_file(example: Example) -> None:
    example.check(example.read())
    example.check(example.read(together=False))


def test_a_word_for_true_or_false_has_its_text_beside_it() -> None:
    log = Log()
    for word in ("heat", "off", "auto", "ON", "true", "5"):
        log.add("hvac/mode", word.encode())
    rows = [(row["value_string"], row["value_boolean"], row["value_double"])
            for row in log.read().readings]  # fmt: skip
    assert rows == [
        ("heat", None, None), ("off", False, None), ("auto", None, None), ("ON", True, None),
        (None, True, None), (None, None, 5.0),
    ]  # fmt: skip


@pytest.mark.parametrize("together", [False, True])
def test_a_word_in_json_is_what_it_is_alone(together: bool) -> None:
    """A plug says OFF on one topic and {"POWER": "OFF"} on another one: both are one metric."""
    log = Log()
    words = ("heat", "off", "auto", "ON", "true", None, 5, False) * GROUP_ROWS_MIN
    for word in words:
        log.add("hvac/state", json.dumps({"mode": word, "fan": "OFF", "on": "maybe"}).encode())
    found = log.read(together=together).readings
    rows = {name: [(row["value_string"], row["value_boolean"], row["value_double"])
                   for row in sorted(found, key=lambda row: row["offset"])
                   if row["metric"] == name] for name in ("mode", "fan", "on")}  # fmt: skip
    assert rows["mode"][:8] == [
        ("heat", None, None), ("off", False, None), ("auto", None, None), ("ON", True, None),
        ("true", True, None), (None, None, None), (None, None, 5.0), (None, False, None),
    ]  # fmt: skip
    assert rows["fan"] == [("OFF", False, None)] * len(words)
    assert rows["on"] == [("maybe", None, None)] * len(words)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("payload", "units"),
    [
        ({"temperature": 21.5, "unit": "°C"}, {"temperature": "°C"}),
        ({"temperature": 21.5, "unit": "°C", "name": "kitchen"}, {"temperature": "°C"}),
        ({"value": 21.5, "unit": "°C", "rpm": 12}, {"value": "°C"}),
        ({"value": None, "unit": "°C", "rpm": 12}, {}),
        ({"value": "21.5", "v": 3, "unit": "°C"}, {}),
        ({"temperature": 21.5, "unit": "°C", "rpm": 12}, {}),
        ({"temperature": 21.5, "unit": "°C", "rpm": "007"}, {}),
        ({"temperature": "21.5", "unit": "°C", "rssi": -70}, {}),
        ({"temperature": None, "unit": "°C", "rpm": 1200}, {}),
        ({"temperature": 21.5, "on": True, "unit": "°C"}, {"temperature": "°C"}),
        ({"temperature": 21.5, "on": None, "unit": "°C"}, {}),
        ({"temperature": 21.5, "on": "x", "unit": "°C"}, {}),
        ({"temperature": False, "unit": "°C", "rpm": 14}, {}),
        ({"temperature": 21.5, "Motion": False, "ok": True, "unit": "°C"}, {"temperature": "°C"}),
        ({"on": True, "unit": "°C"}, {}),
        ({"value": True, "unit": "°C", "rpm": 14}, {}),
    ],
)
def test_a_unit_is_of_one_field_whatever_the_values(
    payload: dict[str, object], units: dict[str, str], together: bool
) -> None:
    """Otherwise the speed of a fan is a temperature as long as the thermometer is broken."""
    log = Log()
    for number in range(2 * GROUP_ROWS_MIN):
        log.add("t", json.dumps(payload | {"seq": number}).encode())
    found = log.read(together=together).readings
    assert len(found) >= 2 * GROUP_ROWS_MIN
    assert {row["metric"]: row["unit"] for row in found if row["unit"] is not None} == units


@pytest.mark.parametrize("together", [False, True])
def test_a_number_with_its_unit_in_json_is_what_it_is_alone(together: bool) -> None:
    log = Log()
    texts = (
        "21.5 °C",
        " 45% ",
        "12F",
        "0012 W",
        "21.5",
        "9007199254740993 Wh",
        "x",
    ) * GROUP_ROWS_MIN
    for text in texts:
        log.add("t", json.dumps({"a": text, "b": 5}).encode())
    found = log.read(together=together).readings
    rows = [(row["value_string"], row["value_double"], row["unit"])
            for row in sorted(found, key=lambda row: row["offset"])
            if row["metric"] == "a"]  # fmt: skip
    assert rows[:7] == [
        ("21.5 °C", 21.5, "°C"), (" 45% ", 45.0, "%"), ("12F", None, None), ("0012 W", None, None),
        ("21.5", None, None), ("9007199254740993 Wh", 9007199254740992.0, "Wh"), ("x", None, None),
    ]  # fmt: skip
    assert len(rows) == len(texts)


def test_a_list_can_be_late_and_a_message_after_it() -> None:
    log = Log()
    live, hour = 1_790_000_000, 3600
    log.add("t", b'{"ts":%d,"v":1}' % live)
    log.add("t", b'[{"ts":%d,"v":2},{"ts":%d,"v":3}]' % (live - hour + 90, live - hour))
    log.add("t", b'[{"ts":%d,"v":4},{"ts":%d,"v":5}]' % (live + 200, live + 10))
    log.add("t", b'{"ts":%d,"v":6}' % (live + 100))
    found = {row["value_double"]: row["is_late"] for row in log.read().readings}
    assert found == {1: False, 2: True, 3: True, 4: False, 5: False, 6: True}


def test_noise_has_an_end_each_day_and_is_counted() -> None:
    log = Log()
    for number in range(3 * NOISE_MAX):
        log.add("camera/snapshot", b"\xff\xd8\xff" + bytes([number % 256]), at_s=number)
    log.add("camera/snapshot", b'{"a":1', at_s=3 * NOISE_MAX)
    log.add("camera/snapshot", b"\xff\xd8", at_s=86_400)
    for steps in ([], [50], [150, 151, 299]):
        found = log.read(steps)
        assert [row["code"] for row in found.quarantine] == [
            *["encoding"] * NOISE_MAX, "format", "encoding"
        ]  # fmt: skip
        assert found.counts == {"errors that are only counted": 2 * NOISE_MAX}
        assert "more of this code are only counted" in found.quarantine[NOISE_MAX - 1]["reason"]


@pytest.mark.parametrize("library", [None, SimpleNamespace(CBORDecoder=BytesIO)])
def test_cbor_without_its_package_is_told_and_nothing_else_stops(
    monkeypatch: pytest.MonkeyPatch, library: object
) -> None:
    """Without it, or with one that takes a key twice without a word, as before 6.1."""
    log = Log(Rule("c", decode="cbor"))
    log.add("c", b"\xa1\x61\x76\x01")
    log.add("other", b"7")
    monkeypatch.setitem(sys.modules, "cbor2", library)
    found = log.read()
    assert found.values() == [("other", "value", 7.0)]
    assert [row["code"] for row in found.quarantine] == ["package"]
    assert "pip install 'cbor2>=" in found.reasons()[0]


@pytest.mark.parametrize("together", [False, True])
def test_the_quality_of_a_status_code(together: bool) -> None:
    log = Log(Rule("with drop", drop=("Other",)))
    codes = {0: 192, 1 << 20: 192, 0x40000000: 64, 0x80000000: 0, 0xC0000000: 0, 200: None}
    for code in (*codes, 1 << 32, -1, True, None, "Bad"):
        for _ in range(20):  # enough to be read by columns
            log.add("ua", b'{"Value":5,"StatusCode":%s}' % json.dumps(code).encode())
    log.add("with drop", b'{"Other":1,"Value":2,"StatusCode":0}')
    read = log.read(together=together)
    values = [row for row in read.readings if row["metric"] == "Value"]
    assert [row["quality"] for row in values] == [
        *(quality for quality in codes.values() for _ in range(20)), *[None] * 100, 192
    ]  # fmt: skip
    assert all((row["value_double"] is None) == (row["quality"] == 0) for row in values)
    assert [row["code"] for row in read.quarantine] == ["bad"] * min(40, NOISE_MAX)
    assert {row["quality"] for row in read.readings if row["metric"] == "StatusCode"} == {None}

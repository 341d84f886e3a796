"""Numbers with a power of ten beside them are multiplied, or left out with a line."""

import json
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_lake.decoders.scales import SCALED_MAX
from holdfast_lake.tables.inference import infer
from holdfast_lake.tables.parse import GROUP_ROWS_MIN
from holdfast_lake.tables.readings import Folder
from holdfast_lake.tables.rules import Rule, RuleError, with_defaults
from tests.support.fold_log import TIME_US, Found, Log, batch, value

Numbers = dict[str, Any]


def read(*documents: Any, rules: tuple[Rule, ...] = (), together: bool = True) -> Found:
    log = Log(*rules)
    for document in documents:
        log.add("pv", document if type(document) is bytes else json.dumps(document).encode())
    return log.read(together=together)


def numbers_of(found: Found) -> Numbers:
    """The values of all metrics but the scales."""
    return {row["metric"]: value(row) for row in found.readings
            if not row["metric"].endswith(("_scale", "_sf", "_SF"))}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "numbers"),
    [
        ({"current": 523, "current_scale": -2}, {"current": 5.23}),
        ({"power": -690, "power_SF": 1}, {"power": -6900.0}),
        ({"v": 3, "v_sf": -1, "w": 7, "w_sf": 2}, {"v": 0.3, "w": 700.0}),
        ({"l1_current": 1, "current_scale": -1, "current": 3}, {"l1_current": 0.1, "current": 0.3}),
        ({"import_energy_active": 5, "energy_active_scale": -1}, {"import_energy_active": 0.5}),
        ({"power": 5, "power_scale": -1, "power_dc": 7, "power_dc_scale": -2},
         {"power": 0.5, "power_dc": 0.07}),
        ({"AphA": 174, "PhVphAB": 3965, "VAr": 7, "A_SF": -2, "V_SF": -1, "VAr_SF": 0},
         {"AphA": 1.74, "PhVphAB": 396.5, "VAr": 7.0}),
        ({"ph_vph_a": 2288, "v_sf": -1}, {"ph_vph_a": 228.8}),
        ({"A": 523, "A_SF": 65534}, {"A": 5.23}),
        ({"m": [{"A": 1}, {"A": 2, "A_SF": -2}], "A_SF": -1}, {"m.0.A": 0.1, "m.1.A": 0.02}),
        ({"A": 9007199254740993, "A_SF": -1}, {"A": 900719925474099.3}),
        ({"zoom": 5, "zoom_scale": 0, "on": True}, {"zoom": 5.0, "on": True}),
        ({"current": 5.23, "voltage": 230, "current_scale": -2, "voltage_scale": -1},
         {"current": 5.23, "voltage": 230.0}),
        ({"scale": -2, "_scale": -2, "x": 5}, {"scale": -2.0, "x": 5.0}),
        ({"current": "523", "current_scale": -2}, {"current": "523"}),
        ({"map_scale": 25000, "x": 3}, {"x": 3.0}),
        ({"fan_speed": 3, "speed_scale": 1}, {"fan_speed": 3.0}),
        ({"A": 0, "A_SF": -32768, "W": -32768, "W_SF": 0, "T": -32768, "T_SF": -2},
         {"A": None, "W": None, "T": None}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("together", [False, True])
def test_a_number_is_multiplied_by_the_scale_beside_it(
    document: Numbers, numbers: Numbers, together: bool
) -> None:
    found = read(*[document] * GROUP_ROWS_MIN, together=together)
    assert numbers_of(found) == numbers
    assert found.quarantine == []


@pytest.mark.parametrize(
    ("document", "numbers", "code"),
    [
        ({"zoom": 5, "zoom_scale": 2}, {"zoom": None}, "value"),
        ({"zoom": 5, "zoom_scale": 1.5}, {"zoom": None}, "value"),
        ({"A": 5, "A_SF": 11}, {"A": None}, "value"),
        ({"temp": 2150, "temp_scale": -2, "temp_count": 5}, {"temp": 21.5, "temp_count": None},
         "value"),
        ({"A": 5, "A_SF": -32768}, {"A": None}, "bad"),
        ({"A": 65535, "A_SF": -2, "WH": 65535, "WH_SF": 0}, {"A": None, "WH": 65535.0}, "bad"),
    ],
)  # fmt: skip
def test_a_number_whose_scale_is_not_certain_is_left_out_with_a_line(
    document: Numbers, numbers: Numbers, code: str
) -> None:
    found = read(document)
    assert numbers_of(found) == numbers
    assert [row["code"] for row in found.quarantine] == [code]


@given(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-10, -1))
def test_it_is_rounded_once(number: int, power: int) -> None:
    (row, _) = read({"A": number, "A_SF": power}).readings
    missing = number in (-32768, 32768, 65535, -(1 << 31), (1 << 32) - 1)
    assert missing or row["value_double"] == float(number * Fraction(10) ** power)
    assert missing or row["value_string"] == f"{number}e{power}"


def test_a_rule_says_what_the_names_do_not_show() -> None:
    scales = {"*.l1": "*.dc", "zoom": "", "pv": "pv_power"}
    rules = (Rule("pv", scales=scales),)
    document = {"i": {"l1": 523, "dc": -2}, "zoom": 5, "zoom_scale": 2, "pv": 7, "pv_power": 1}
    found = read(document, rules=rules)
    assert numbers_of(found) == {"i.l1": 5.23, "i.dc": -2.0, "zoom": 5.0, "pv": 70.0,
                                 "pv_power": 1.0}  # fmt: skip
    assert found.quarantine == []
    alone = read({"pv": 7}, rules=rules)
    assert (numbers_of(alone), alone.reasons()) == (
        {"pv": None}, ["pv is left out: pv_power, its scale, is no power of ten"]
    )  # fmt: skip
    with pytest.raises(RuleError, match="scales="):
        Rule("pv", scales={"a": 1})  # type: ignore[dict-item]


def test_numbers_in_texts_and_cells_have_scales_too() -> None:
    texts = {"current": "523", "current_scale": "-2"}
    assert numbers_of(read(texts, rules=(Rule("pv", numbers=("*",)),))) == {"current": 5.23}
    lines = Rule("pv", decode="csv")
    assert numbers_of(read(b"current,current_scale\n523,-2\n", rules=(lines,))) == {"current": 5.23}


def test_the_readings_of_a_list_have_their_own_scales() -> None:
    items = [{"ts": 1790000000 + at, "A": 3} | ({"A_SF": -at} if at else {}) for at in range(3)]
    found = read(items).readings
    assert [value(row) for row in found if row["metric"] == "A"] == [3.0, 0.3, 0.03]


def test_a_lake_of_an_earlier_version_goes_on_without_scales() -> None:
    log = Log()
    log.add("pv", b'{"current":523,"current_scale":-2,"zoom":5,"zoom_scale":2}')
    found = Found()
    found.add(Folder(with_defaults(()), is_scaled=False).fold(iter([batch(log.rows)]), {}))
    assert numbers_of(found) == {"current": 523.0, "zoom": 5.0}
    assert found.quarantine == []


def test_infer_says_what_is_multiplied_and_what_is_left_out() -> None:
    payload = b'{"current":523,"current_scale":-2,"zoom":5,"zoom_level":3,"zoom_scale":-1}'
    (proposal,) = infer([("pv", payload, TIME_US + at) for at in range(5)], zone="")
    assert "current, zoom: 2 in all are multiplied by 10 to the power" in proposal.reason
    assert 'zoom_level may be multiplied by the scale beside: left out until scales={"zoom_level"' \
        in proposal.reason  # fmt: skip


@pytest.mark.parametrize("is_nested", [False, True])
def test_many_scales_cost_no_more_than_many_numbers(is_nested: bool) -> None:
    """Each of 4,000 numbers was compared with each of 4,000 scales, with a pattern of its own."""
    document: Numbers = {f"a_b{at}_c": at for at in range(4000)}
    document |= {f"x_y{at}_{end}": -1 for at in range(2000) for end in ("sf", "SF")}
    if is_nested:
        document = {f"o{at}": {"x": at} for at in range(1500)} | document
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = read(document)
    finally:
        sys.setprofile(None)
    assert len(found.readings) == len(document)
    assert calls < 100 * len(document)


WITH = {"current": 523, "zoom": 5, "current_scale": -2, "zoom_scale": 0}
WITHOUT = {"current": 524, "zoom": 5}


@pytest.mark.parametrize("together", [False, True])
def test_a_number_without_the_scale_that_it_had_before_is_left_out(together: bool) -> None:
    """Else a device that sends its scale once an hour has 5.23 A, and then 524 A."""
    log = Log()
    documents = [WITHOUT] * 9 + [WITH] + [WITHOUT] * 20 + [{"current": 0}, {"current": 5.25}, WITH]
    for document in documents:
        log.add("pv", json.dumps(document).encode())
    for steps in ([], [3, 15]):
        found = log.read(steps, together=together)
        rows = sorted(found.readings, key=lambda row: row["offset"])
        currents = [row["value_double"] for row in rows if row["metric"] == "current"]
        assert currents == [524.0] * 9 + [5.23] + [None] * 20 + [0.0, 5.25, 5.23]
        assert {row["value_double"] for row in rows if row["metric"] == "zoom"} == {5.0}
        assert len(found.quarantine) == 20
        assert found.reasons()[0] == (
            "current is 524 without current_scale, by which it was multiplied before: it is left "
            'out, unless a rule has scales={"current": ""}'
        )


def test_scales_are_those_of_each_device_of_a_topic() -> None:
    rule = Rule("pv", device="field id")
    documents = [{"id": "a", **WITH}, {"id": "b", "current": 7}, {"id": "a", "current": 7}]
    found = read(*documents, rules=(rule,))
    currents = [(row["device"], row["value_double"]) for row in found.readings
                if row["metric"] == "current"]  # fmt: skip
    assert currents == [("a", 5.23), ("b", 7.0), ("a", None)]
    none = read(*documents, rules=(Rule("pv", device="field id", scales={"current": ""}),))
    assert none.quarantine == []


def test_the_scales_that_are_kept_are_bounded() -> None:
    log = Log()
    for number in range(2 * SCALED_MAX):
        log.add("pv", json.dumps({f"m{number}": 5, f"m{number}_scale": -1}).encode())
    log.add("pv", json.dumps({"m0": 5, f"m{SCALED_MAX}": 5}).encode())
    found = log.read()
    assert len(found.quarantine) == 1
    assert len(json.loads(found.states["pv"][0])["scaled"]) == SCALED_MAX

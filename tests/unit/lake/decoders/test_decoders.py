"""Payloads of JSON, CSV and text: what they mean, and that nothing in them does harm."""

import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_lake.decoders.decoded import (
    DEPTH_MAX,
    NAME_LENGTH_MAX,
    READINGS_MAX,
    Decoded,
    DecodeError,
)
from holdfast_lake.decoders.json_payload import Fields, decode_json
from holdfast_lake.decoders.text_payload import (
    LINES_MAX,
    ONLINE,
    TEXT_LENGTH_MAX,
    decode_any,
    decode_csv,
    decode_number,
    decode_status,
    decode_text,
)
from holdfast_lake.decoders.times import parse_time

NONE = Fields()
USUAL = Fields(time=("ts", "time"), sent=("sent",), sequence=("seq",), id=("id",))
STRICT = Fields(time=("ts",), sequence=("seq",), required=frozenset({"time", "sequence"}))
TIME_US = 1_790_000_000_123_456


def readings(decoded: Decoded) -> dict[str, Any]:
    assert len(decoded.names) == len(decoded.values)
    return dict(zip(decoded.names, decoded.values, strict=True))


def typed(found: dict[str, Any]) -> dict[str, tuple[type, Any]]:
    return {name: (type(value), value) for name, value in found.items()}


# JSON


def test_json_is_flattened_with_dots_and_indexes() -> None:
    text = b'{"t":21.5,"n":3,"ok":true,"s":"x","no":null,"m":{"a":{"b":1},"l":[1,[2,"y"]]}}'
    assert typed(readings(decode_json(text, NONE))) == typed(
        {"t": 21.5, "n": 3.0, "ok": True, "s": "x", "no": None, "m.a.b": 1.0, "m.l.0": 1.0,
         "m.l.1.0": 2.0, "m.l.1.1": "y"}
    )  # fmt: skip


def test_json_fields_with_a_meaning_are_no_readings() -> None:
    found = decode_json(b'{"ts":1790000000.123456,"sent":1790000001,"seq":7,"id":9,"v":1}', USUAL)
    assert readings(found) == {"v": 1.0}
    assert (found.time_us, found.sent_us) == (TIME_US, 1_790_000_001_000_000)
    assert (found.sequence, found.id) == (7, "9")


def test_json_fields_may_be_nested() -> None:
    fields = Fields(time=("meta.ts",), sequence=("meta.n",), device=("meta.dev",))
    found = decode_json(b'{"meta":{"ts":1790000000,"n":3,"dev":"d","x":1},"v":2}', fields)
    assert readings(found) == {"meta.x": 1.0, "v": 2.0}
    assert (found.time_us, found.sequence, found.device) == (1_790_000_000_000_000, 3, "d")
    assert decode_json(b'{"meta":5,"v":2}', Fields(time=("meta.ts",))).time_us is None


def test_json_field_that_is_no_time_or_number_is_a_reading_unless_asked_for() -> None:
    text = b'{"ts":"noon","seq":-1,"v":2}'
    found = decode_json(text, USUAL)
    assert readings(found) == {"ts": "noon", "seq": -1.0, "v": 2.0}
    assert found.reason() == (
        "ts is 'noon', no time: the broker's time is used, until a rule has its time_format"
    )
    strict = decode_json(text, STRICT)
    assert strict.reason() == "ts is 'noon', no time; seq is -1, no sequence number"
    assert readings(strict)["v"] == 2.0


def test_json_time_that_cannot_be_read_is_told_unless_another_field_has_one() -> None:
    assert decode_json(b'{"ts":"22/11/2026 18:00","v":2}', USUAL).reason() == (
        "ts is '22/11/2026 18:00', no time: the broker's time is used, until a rule has its "
        "time_format"
    )
    other = decode_json(b'{"ts":1790000000,"time":"noon","v":2}', Fields(time=("time", "ts")))
    assert (other.errors, other.time_us) == (None, 1_790_000_000_000_000)
    # An object, a boolean and null do not look like a time.
    for text in (b'{"ts":{"a":1}}', b'{"ts":true}', b'{"ts":null}'):
        assert decode_json(text, USUAL).errors is None


def test_json_nan_and_infinity_cost_their_field_only() -> None:
    # What json.dumps of Python writes by default.
    found = decode_json(json.dumps({"t": math.nan, "h": 33, "i": -math.inf}).encode(), NONE)
    assert readings(found) == {"h": 33.0}
    assert found.reason() == "t is nan, which is no number; i is -inf, which is no number"


def test_json_booleans_are_no_numbers() -> None:
    found = decode_json(b'{"ts":true,"seq":true,"id":true}', USUAL)
    assert typed(readings(found)) == typed({"ts": True, "seq": True, "id": True})
    assert (found.time_us, found.sequence, found.id) == (None, None, None)


def test_json_list_of_objects_with_times_is_a_list_of_readings() -> None:
    found = decode_json(b'[{"ts":1790000000,"v":1},{"ts":1790000001,"v":2,"w":3},{"v":4}]', USUAL)
    assert found.names == ["v", "v", "w", "2.v"]
    assert found.values == [1.0, 2.0, 3.0, 4.0]
    assert found.times == [
        1_790_000_000_000_000,
        1_790_000_001_000_000,
        1_790_000_001_000_000,
        None,
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"5", {"value": 5.0}),
        (b'"on"', {"value": "on"}),
        (b"null", {"value": None}),
        (b"[1,{}]", {"0": 1.0}),
        (b"{}", {}),
        (b"[]", {}),
        (b'{"a":{},"b":[]}', {}),
        (b'{"":1,"a":{"":2}}', {"": 1.0, "a.": 2.0}),
        (b' {"a" : 1 } ', {"a": 1.0}),
        (b'{"a":-0.0}', {"a": 0.0}),
    ],
)
def test_json_corners(text: bytes, expected: dict[str, Any]) -> None:
    found = readings(decode_json(text, NONE))
    assert found == expected
    assert all(math.copysign(1, value) > 0 for value in found.values() if type(value) is float)


def test_json_integers_a_double_cannot_hold_keep_their_digits() -> None:
    numbers = {"a": 2**53, "b": 2**53 + 1, "c": -(2**63), "d": 2**64 - 1, "e": 2**53 - 1}
    found = decode_json(json.dumps(numbers).encode(), NONE)
    assert readings(found) == {name: float(number) for name, number in numbers.items()}
    assert found.exact == {1: str(2**53 + 1), 2: str(-(2**63)), 3: str(2**64 - 1)}
    assert found.errors is None


def test_json_numbers_that_fit_nowhere_are_errors_of_their_own() -> None:
    text = f'{{"a":1e999,"b":{10**30},"c":-1e999,"d":4}}'.encode()
    found = decode_json(text, NONE)
    assert readings(found) == {"d": 4.0}
    reason = found.reason() or ""
    assert "a is inf" in reason
    assert "b is beyond 64 bits" in reason
    assert "c is -inf" in reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a":1', "truncated"),
        (b'{"a":NaN', "no JSON"),
        (b'{"a":NaNN}', "no JSON"),
        (b'{"a":-NaN}', "no JSON"),
        (b'{"a":1}x', "trailing characters (byte 8)"),
        (b'{"a":"\xff"}', "not UTF-8: invalid start byte at byte 6"),
        (b'\xff{"a":1}', "not UTF-8: invalid start byte at byte 0"),
        (b"\x28\xb5\x2f\xfd\x00", "zstd"),
        (b"   ", "white space"),
        (b"{'a':1}", "no JSON"),
        (b"[" * 100_000, "deep"),
        (b"[" * 200 + b"]" * 200, f"more than {DEPTH_MAX} levels"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, f"more than {DEPTH_MAX} levels"),
        (json.dumps([0] * (READINGS_MAX + 1)).encode(), f"more than {READINGS_MAX} values"),
        (json.dumps({"x" * 2000: 1}).encode(), "name of 2000 characters"),
        (b'{"a":1e999,' + b"[" * 5000, "no JSON"),
        (b'{"a":1e999,"b":"\\ud800"}', "no JSON"),
        (b'[{"a":' + b"9" * 5000 + b"}]", "beyond 64 bits|no JSON"),
    ],
)
def test_json_that_cannot_be_read(text: bytes, reason: str) -> None:
    try:
        found = decode_json(text, NONE).reason() or ""
    except DecodeError as error:
        found = str(error)
    assert any(part in found for part in reason.split("|")), found
    assert len(found) < 300


def test_fields_that_are_too_long_are_no_fields() -> None:
    long = b"9" * 4000
    found = decode_json(b'{"ts":%s,"seq":%s,"id":%s,"v":1}' % (long, long, long), STRICT)
    assert found.reason() == (
        "ts is an integer beyond 64 bits, no time; seq is an integer beyond 64 bits, no sequence "
        "number; ts is beyond 64 bits; seq is beyond 64 bits; id is beyond 64 bits"
    )
    assert readings(found) == {"v": 1.0}
    assert decode_json(b'{"id":%s}' % long, USUAL).id is None
    with pytest.raises(DecodeError, match="no device"):
        decode_json(b'{"d":"%s"}' % long, Fields(device=("d",)))


def test_every_prefix_of_a_json_object_is_refused() -> None:
    text = b'{"ts":1790000000,"a":{"b":[1,true,null,"\xc3\xa4"]},"c":-1.5e3}'
    for end in range(1, len(text)):
        with pytest.raises(DecodeError):
            decode_json(text[:end], USUAL)
    assert readings(decode_json(text, USUAL))["c"] == -1500.0


def test_device_must_be_in_the_payload() -> None:
    fields = Fields(device=("dev",))
    for text in (b'{"v":1}', b'{"dev":null}', b'{"dev":""}', b'{"dev":[1]}'):
        with pytest.raises(DecodeError, match="no device: dev is"):
            decode_json(text, fields)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in flat(f"{prefix}{key}.", item)]
    if isinstance(value, list):
        return [pair for key, item in enumerate(value) for pair in flat(f"{prefix}{key}.", item)]
    return [(prefix[:-1], value)]


@given(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=6))
def test_json_against_the_standard_library(document: dict[str, Any]) -> None:
    found = decode_json(json.dumps(document).encode(), NONE)
    expected = flat("", document)
    assert found.names == [name for name, _ in expected]
    for value, (_, wanted) in zip(found.values, expected, strict=True):
        if isinstance(wanted, bool) or wanted is None or isinstance(wanted, str):
            assert value is wanted or value == wanted
        else:
            assert value == float(wanted)
    assert set((found.exact or {}).values()) == {
        str(wanted) for _, wanted in expected if type(wanted) is int and abs(wanted) > 2**53
    }


@given(st.binary(max_size=200))
def test_garbage_is_read_or_refused_by_every_decoder(garbage: bytes) -> None:
    for decode in (
        lambda data: decode_json(data, USUAL),
        lambda data: decode_any(data, USUAL),
        lambda data: decode_csv(data, ("a", "b"), USUAL),
        lambda data: decode_csv(data, (), USUAL),
        lambda data: decode_status(data, USUAL),
        decode_number,
        decode_text,
    ):
        try:
            found = decode(garbage)
        except DecodeError:
            continue
        readings(found)
        assert all(type(value) in (float, str, bool, type(None)) for value in found.values)
        assert all(math.isfinite(value) for value in found.values if type(value) is float)


# CSV


def test_csv_has_the_columns_of_the_rule() -> None:
    found = decode_csv(b"1790000000, 21.5 ,true,abc,,7\n", ("ts", "t", "ok", "s", "no", "_"), USUAL)
    assert typed(readings(found)) == typed({"t": 21.5, "ok": True, "s": "abc", "no": None})
    assert found.time_us == 1_790_000_000_000_000


def test_csv_of_one_line_may_have_a_number_and_an_id() -> None:
    found = decode_csv(b"5,x,1", ("seq", "id", "v"), USUAL)
    assert (found.sequence, found.id, readings(found)) == (5, "x", {"v": 1.0})
    found = decode_csv(b"5,x,1\n6,y,2", ("seq", "id", "v"), USUAL)
    assert (found.sequence, found.id) == (None, None)
    assert found.values == [5.0, "x", 1.0, 6.0, "y", 2.0]


def test_csv_of_several_lines_has_several_times() -> None:
    found = decode_csv(b"1790000000,1\r\n\r\n1790000001,2\r\n", ("ts", "v"), USUAL)
    assert found.values == [1.0, 2.0]
    assert found.times == [1_790_000_000_000_000, 1_790_000_001_000_000]


def test_csv_with_names_in_its_first_line_and_quotes() -> None:
    found = decode_csv(b'a;"b c"\n1;"x;y"\n', (), NONE, ";")
    assert readings(found) == {"a": 1.0, "b c": "x;y"}


def test_csv_bad_lines_are_told_and_the_others_read() -> None:
    found = decode_csv(b"1,2\n3\n4,5,6\n7,8", ("a", "b"), NONE)
    assert found.values == [1.0, 2.0, 7.0, 8.0]
    assert found.reason() == "line 2 has 1 columns instead of 2; line 3 has 3 columns instead of 2"


@pytest.mark.parametrize(
    ("text", "columns", "reason"),
    [
        (b"1,2,3", ("a", "b"), "line 1 has 3 columns instead of 2"),
        (b"\n\n", ("a",), "no line with values"),
        (b'"1', ("a",), "no CSV"),
        (b"a,a\n1,2", (), "twice"),
        (b"a,\n1,2", (), "not at all"),
        (b"1\n" * (LINES_MAX + 1), ("a",), f"more than {LINES_MAX} lines"),
        (b"\xfe", ("a",), "not UTF-8"),
        (b'"' + b"x" * 200_000 + b'"', ("a",), "no CSV: field larger"),
    ],
)
def test_csv_that_cannot_be_read(text: bytes, columns: tuple[str, ...], reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode_csv(text, columns, NONE)


def test_errors_of_a_message_are_counted_beyond_some() -> None:
    found = decode_csv(b"1\n" + b"1,2\n" * 20, ("a",), NONE)
    assert found.values == [1.0]
    assert (found.reason() or "").endswith("and 12 more")


# Values as text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("21.5", 21.5), (" -3 \n", -3.0), ("+.5e-3", 0.0005), ("1.", 1.0), ("true", True),
        ("OFF", False), ("Yes", True), ("0", 0.0),
    ],
)  # fmt: skip
def test_numbers_and_booleans(text: str, value: Any) -> None:
    for decode in (decode_number, decode_text):
        assert typed(readings(decode(text.encode()))) == typed({"value": value})


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-Infinity", "0x10", "1_000", "1,5", "1e", "e5", "."]
)
def test_what_is_no_number_is_a_text(text: str) -> None:
    with pytest.raises(DecodeError, match="neither a number nor a boolean"):
        decode_number(text.encode())
    assert readings(decode_text(text.encode())) == {"value": text}


def test_a_number_beyond_double_is_an_error() -> None:
    assert decode_number(b"1e999").reason() == "value is inf, which is no number"
    assert decode_number(b"9" * 40).reason() == "value is beyond 64 bits"
    assert decode_number(b"18446744073709551615").exact == {0: "18446744073709551615"}
    with pytest.raises(DecodeError, match="1000000 characters"):
        decode_number(b"9" * 1_000_000)


def test_texts_are_printable_and_short() -> None:
    assert readings(decode_text("Grüße\tan\nalle".encode())) == {"value": "Grüße\tan\nalle"}
    with pytest.raises(DecodeError, match="control characters"):
        decode_text(b"a\x00b")
    with pytest.raises(DecodeError, match=f"the maximum is {TEXT_LENGTH_MAX}"):
        decode_text(b"a" * (TEXT_LENGTH_MAX + 1))


def test_without_a_rule_the_look_decides() -> None:
    assert readings(decode_any(b' {"a":1}', NONE)) == {"a": 1.0}
    assert readings(decode_any(b"[1]", NONE)) == {"0": 1.0}
    assert readings(decode_any(b"12", NONE, "level")) == {"level": 12.0}
    assert readings(decode_any(b"idle", NONE)) == {"value": "idle"}


@pytest.mark.parametrize(
    ("text", "online"),
    [
        (b"online", True), (b"OFFLINE\n", False), (b"1", True), (b"0", False), (b"true", True),
        (b'{"online":true}', True), (b'{"status":"offline","ts":1790000000}', False),
        (b'{"state":"lost"}', False),
    ],
)  # fmt: skip
def test_status_words(text: bytes, online: bool) -> None:
    assert readings(decode_status(text, USUAL)) == {ONLINE: online}


def test_status_topics_with_something_else_are_read_as_usual() -> None:
    assert readings(decode_status(b"charging", USUAL)) == {"value": "charging"}
    assert readings(decode_status(b"21.5", USUAL)) == {"value": 21.5}
    assert readings(decode_status(b'{"battery":80}', USUAL)) == {"battery": 80.0}


# Times


@pytest.mark.parametrize(
    ("value", "time_us"),
    [
        (1_790_000_000, 1_790_000_000_000_000),
        (1_790_000_000.123456, TIME_US),
        (1_790_000_000_123, 1_790_000_000_123_000),
        (TIME_US, TIME_US),
        (TIME_US * 1000 + 999, TIME_US),
        ("2026-09-21T14:13:20.123456Z", TIME_US),
        ("2026-09-21 14:13:20", 1_790_000_000_000_000),
        ("2026-09-21T16:13:20+02:00", 1_790_000_000_000_000),
        ("1790000000", 1_790_000_000_000_000),
        ("20260921141320", 1_790_000_000_000_000),
        (20260921141320, 1_790_000_000_000_000),
        (20261332141320, 20_261_332_141_320_000),
        ("20261332141320", 20_261_332_141_320_000),
        (" 1790000000.5 ", 1_790_000_000_500_000),
        (0, 0),
        (-1, None),
        (True, None),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (10**30, None),
        ("", None),
        ("2026", 2_026_000_000),
        ("2026-09-21", None),
        ("12:30", None),
        ("yesterday", None),
        ("9" * 39, None),
        ("0001-01-01T00:00:00", -62_135_596_800_000_000),
    ],
)
def test_times(value: Any, time_us: int | None) -> None:
    assert parse_time(value) == time_us


@given(st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_iso_times_come_back(moment: datetime) -> None:
    wanted = parse_time(moment.isoformat())
    assert wanted is not None
    assert datetime.fromtimestamp(wanted // 1_000_000, UTC) == moment.replace(microsecond=0)
    assert wanted % 1_000_000 == moment.microsecond


@given(st.text(max_size=45) | st.floats() | st.integers())
def test_anything_is_a_time_or_none(value: Any) -> None:
    found = parse_time(value)
    assert found is None or abs(found) < 1 << 62


def test_long_names_are_bounded() -> None:
    with pytest.raises(DecodeError, match="the maximum is"):
        Decoded().add("x" * (NAME_LENGTH_MAX + 1), 1.0)


def test_csv_lines_of_several_devices_are_not_mixed() -> None:
    fields = Fields(device=("dev",), time=("ts",))
    found = decode_csv(b"x\nd1,1\nd2,2\n,3\nd1,4", ("dev", "v"), fields)
    assert (found.device, found.values) == ("d1", [1.0, 4.0])
    assert found.reason() == (
        "line 1 has 1 columns instead of 2; line 3 is of d2, the lines before of d1; "
        "line 4: no device: dev is None"
    )
    assert found.times == [None, None]


@pytest.mark.parametrize("text", [rb'{"s":"\ud800"}', rb'["\udc00x"]', rb'{"\ud83dx":1}'])
def test_half_of_a_surrogate_pair_is_told(text: bytes) -> None:
    with pytest.raises(DecodeError, match="no JSON: a text has half of a surrogate pair"):
        decode_json(text, NONE)
    with pytest.raises(DecodeError, match=r"truncated|malformed"):
        decode_json(text[:-1], NONE)
    with pytest.raises(DecodeError, match="no JSON: JSON is malformed"):
        decode_json(text.decode().encode("utf-16-le"), NONE)

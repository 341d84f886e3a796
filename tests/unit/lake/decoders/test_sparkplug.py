"""Sparkplug B on the wire: every type, and every way in which bytes can be wrong."""

import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_lake.decoders.decoded import PAYLOAD_BYTES_MAX, Decoded, DecodeError
from holdfast_lake.decoders.sparkplug import Metric, add_metric, parse_payload
from tests.support import sparkplug_wire as wire
from tests.support.fold_log import Found, Log


def read(*metrics: bytes) -> dict[str, Any]:
    """Names and values of metrics that carry their names and types."""
    decoded = Decoded()
    for metric in parse_payload(wire.payload(*metrics)).metrics:
        add_metric(decoded, metric.name or "", metric, metric.datatype or 0)
    assert decoded.errors is None
    return dict(zip(decoded.names, decoded.values, strict=True))


def one(content: Any, datatype: int, **more: Any) -> Any:
    return read(wire.metric(content, datatype, name="m", **more))["m"]


def test_a_payload_written_by_the_protobuf_library() -> None:
    golden = bytes.fromhex(
        "08fbd8c1a28c3412120a05626453657118fbd8c1a28c3420085807121d0a0e54656d7065726174757220c2b043"
        "1001200a6900000000004035c0120c10022003280150fbffffff0f120a0a01662009650000003f120a0a026f6b"
        "200b30017000120a0a04676f6e65200c380112230a016420108a011b08021201611201621803180c220d0a0608"
        "ffffffff0f0a0332017818002201752a0101"
    )
    found = parse_payload(golden)
    assert (found.time_ms, found.sequence) == (1_790_000_000_123, 0)
    decoded = Decoded()
    for metric in found.metrics:
        add_metric(decoded, metric.name or f"alias {metric.alias}", metric, metric.datatype or 0)
    assert dict(zip(decoded.names, decoded.values, strict=True)) == {
        "bdSeq": 7.0,
        "Temperatur °C": -21.25,
        "alias 2": -5.0,
        "f": 0.5,
        "ok": False,
        "gone": None,
        "d": '{"columns":["a","b"],"rows":[[-1,"x"]]}',
    }
    assert [metric.is_historical for metric in found.metrics] == [False, False, True] + [False] * 4
    assert found.metrics[0].time_ms == 1_790_000_000_123


@pytest.mark.parametrize(
    ("datatype", "numbers"),
    [
        (wire.INT8, (-128, -1, 0, 127)),
        (wire.INT16, (-32768, -1, 32767)),
        (wire.INT32, (-(2**31), -1, 2**31 - 1)),
        (wire.INT64, (-(2**53), -1, 2**53)),
        (wire.UINT8, (0, 255)),
        (wire.UINT16, (0, 65535)),
        (wire.UINT32, (0, 2**32 - 1)),
        (wire.UINT64, (0, 2**53)),
        (wire.DATETIME, (1_790_000_000_123,)),
    ],
)
def test_integers_have_the_sign_of_their_type(datatype: int, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        assert one(number, datatype) == float(number)


def test_small_signed_integers_may_be_on_the_wire_in_their_own_width() -> None:
    assert one(0xFF, wire.INT8) == -1.0
    assert one(0x8000, wire.INT16) == -32768.0


def test_the_largest_integers_keep_their_digits() -> None:
    decoded = Decoded()
    payload = wire.payload(
        wire.metric(2**64 - 1, wire.UINT64, name="u"), wire.metric(-(2**63), wire.INT64, name="i")
    )
    for metric in parse_payload(payload).metrics:
        add_metric(decoded, metric.name or "", metric, metric.datatype or 0)
    assert decoded.exact == {0: "18446744073709551615", 1: "-9223372036854775808"}


def test_other_types() -> None:
    assert one(1.5, wire.FLOAT) == 1.5
    assert one(0.1, wire.DOUBLE) == 0.1
    assert one(True, wire.BOOLEAN) is True
    assert one(False, wire.BOOLEAN) is False
    assert one("Grüße", wire.STRING) == "Grüße"
    assert one("x", wire.UUID) == "x"
    assert one(b"\x00\xff", wire.BYTES) == "AP8="


def test_null_is_a_reading_without_a_value() -> None:
    assert one(None, wire.INT32, null=True) is None
    assert one(5, wire.INT32, null=True) is None
    assert one(None, wire.INT32) is None


def test_not_a_number_is_an_error() -> None:
    decoded = Decoded()
    payload = wire.payload(wire.metric(float("nan"), wire.DOUBLE, name="m"))
    add_metric(decoded, "m", parse_payload(payload).metrics[0], wire.DOUBLE)
    assert decoded.names == []
    assert decoded.reason() == "m is nan, which is no number"


def test_data_sets_are_json() -> None:
    content = wire.dataset(
        ["n", "x", "s", "b"],
        [wire.INT32, wire.DOUBLE, wire.STRING, wire.BOOLEAN],
        [[-1, 2.5, "a", True], [7, float("inf"), None, False]],
    )
    assert json.loads(one(content, wire.DATASET)) == {
        "columns": ["n", "x", "s", "b"],
        "rows": [[-1, 2.5, "a", True], [7, "inf", None, False]],
    }


def test_data_sets_with_rows_of_another_length_are_refused() -> None:
    content = wire.dataset(["a"], [wire.INT32], [[1]]) + wire.block(4, b"")
    with pytest.raises(DecodeError, match="row 1 of a data set has 0 of 1 columns"):
        one(content, wire.DATASET)


@pytest.mark.parametrize(
    ("datatype", "content", "expected"),
    [
        (22, b"\xff\x01", [-1, 1]),
        (24, struct.pack("<2i", -5, 6), [-5, 6]),
        (29, struct.pack("<Q", 2**64 - 1), [2**64 - 1]),
        (31, struct.pack("<2d", 0.1, float("nan")), [0.1, "nan"]),
        (32, struct.pack("<I", 10) + b"\xa0\x40", [True, False, True] + [False] * 6 + [True]),
        (33, b"ab\0\0c\0", ["ab", "", "c"]),
        (34, struct.pack("<q", 1_790_000_000_000), [1_790_000_000_000]),
    ],
)
def test_arrays_are_json(datatype: int, content: bytes, expected: list[Any]) -> None:
    assert json.loads(one(content, datatype)) == expected


@pytest.mark.parametrize(
    ("datatype", "content"), [(24, b"abc"), (32, b"\xff\xff\xff\xff\x01"), (99, b"abc")]
)
def test_arrays_of_another_size_are_refused(datatype: int, content: bytes) -> None:
    with pytest.raises(DecodeError, match=r"array|datatype"):
        one(content, datatype)


def test_templates_are_flattened() -> None:
    inner = wire.block(2, wire.metric(3, wire.INT32, name="z"))
    template = (
        wire.block(1, b"v1")
        + wire.block(2, wire.metric(1.5, wire.DOUBLE, name="x"))
        + wire.block(2, wire.metric(inner, wire.TEMPLATE, name="y"))
        + wire.block(3, wire.block(1, b"p") + wire.integer(2, wire.INT32) + wire.integer(3, 9))
    )
    found = read(wire.metric(template, wire.TEMPLATE, name="t"))
    assert found == {"t/x": 1.5, "t/y/z": 3.0, "t/p": 9.0}


def test_templates_in_templates_have_an_end() -> None:
    content = b""
    for _ in range(100):
        content = wire.block(2, wire.metric(content, wire.TEMPLATE, name="t"))
    with pytest.raises(DecodeError, match="nested more than"):
        one(content, wire.TEMPLATE)


EVERYTHING = wire.payload(
    wire.metric(-5, wire.INT32, name="a", alias=3, time_ms=1_790_000_000_000),
    wire.metric(1.5, wire.DOUBLE, alias=4, typed=False, historical=True),
    wire.metric("ä", wire.STRING, name="s"),
    wire.metric(wire.dataset(["c"], [wire.INT32], [[1]]), wire.DATASET, name="d"),
    wire.metric(wire.block(2, wire.metric(1, wire.INT32, name="m")), wire.TEMPLATE, name="t"),
    time_ms=1_790_000_000_000,
    seq=255,
)


def read_all(data: bytes) -> list[Metric]:
    found = parse_payload(data)
    for metric in found.metrics:
        add_metric(Decoded(), metric.name or "x", metric, metric.datatype or 0)
    return found.metrics


def test_every_prefix_is_refused_or_ends_between_two_fields() -> None:
    whole = read_all(EVERYTHING)
    assert len(whole) == 5
    refused = 0
    for end in range(len(EVERYTHING)):
        try:
            found = read_all(EVERYTHING[:end])
        except DecodeError:
            refused += 1
        else:
            assert found == whole[: len(found)]
    assert refused > len(EVERYTHING) * 0.9


@given(st.data())
def test_every_changed_byte_is_refused_or_read(data: st.DataObject) -> None:
    broken = bytearray(EVERYTHING)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_all(bytes(broken))
    except DecodeError:
        pass


@given(st.binary(max_size=100))
def test_garbage_is_refused_or_read(garbage: bytes) -> None:
    try:
        read_all(garbage)
    except DecodeError:
        pass


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x0b", "wire type 3 at byte 0"),
        (b"\x00\x00", "field 0 at byte 0"),
        (b"\x12\x05\x0a", "wants 5 bytes, 1 are left"),
        (b"\x08" + b"\xff" * 10, "too long at byte 1"),
        (b"\x0a\x00", "field 1 is of wire type 2"),
        (wire.block(2, b"\x0a\x02\xff\xfe"), "not UTF-8: invalid start byte at byte 4"),
        (wire.block(2, wire.varint(10 << 3 | 2) + b"\x00"), "a value of wire type 2 at byte"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        parse_payload(data)


def compressed(data: bytes, form: bytes = b"SPBV1.0_COMPRESSED") -> bytes:
    """A payload as Tahu compresses it."""
    algorithm = wire.metric("DEFLATE", wire.STRING, name="algorithm")
    body = wire.block(4, form) + wire.block(5, zlib.compress(data))
    return wire.payload(algorithm, seq=0) + body


def edge(*messages: tuple[str, bytes]) -> Found:
    log = Log()
    for kind, data in messages:
        log.add(f"spBv1.0/G/{kind}/E", data, stream="spBv1.0/G/E")
    return log.read()


def test_compressed_payloads_are_read() -> None:
    birth = wire.payload(wire.metric(1, wire.INT32, name="t", alias=7), seq=0)
    data = wire.payload(wire.metric(-5, wire.INT32, alias=7, typed=False), seq=1)
    found = edge(("NBIRTH", compressed(birth)), ("NDATA", compressed(data)))
    assert found.values() == [("G/E", "$online", True), ("G/E", "t", 1.0), ("G/E", "t", -5.0)]
    assert found.quarantine == []
    assert [row["sequence"] for row in found.readings] == [0, 0, 1]


def test_compressed_payloads_are_bounded_and_damage_is_told() -> None:
    bomb = wire.payload(wire.metric("0" * (PAYLOAD_BYTES_MAX + 1), wire.STRING, name="t"))
    for data, code in (
        (compressed(bomb), "limit"),
        (compressed(b"x")[:-3], "format"),
        (compressed(b"", b"other"), "format"),
    ):
        assert [row["code"] for row in edge(("NDATA", data)).quarantine] == [code]


def quality(code: int) -> bytes:
    """The properties of a metric."""
    value = wire.integer(1, wire.INT32) + wire.integer(3, code)
    return wire.block(9, wire.block(1, b"Unit") + wire.block(1, b"Quality")
                      + wire.block(2, wire.integer(1, wire.STRING) + wire.block(8, b"C"))
                      + wire.block(2, value))  # fmt: skip


def test_bad_and_stale_values_are_left_out_with_a_reason() -> None:
    metrics = [wire.metric(999.0, wire.DOUBLE, name=f"q{code}") + quality(code)
               for code in (0, 64, 192, 500)]  # fmt: skip
    found = edge(("NBIRTH", wire.payload(*metrics, wire.metric(1.0, wire.DOUBLE, name="v"), seq=0)))
    assert {row["metric"]: (row["value_double"], row["quality"]) for row in found.readings} == {
        "$online": (None, None), "q0": (None, 0), "q64": (999.0, 64), "q192": (999.0, 192),
        "q500": (None, 500), "v": (1.0, None),
    }  # fmt: skip
    (bad,) = found.quarantine
    assert bad["code"] == "bad"
    assert bad["reason"] == (
        "q0 is of quality 0, so its value is left out; q500 is of quality 500, so its value is "
        "left out"
    )


def test_the_unit_of_a_birth_is_that_of_the_data_behind_it() -> None:
    def metric(content: float, unit: str = "", **more: Any) -> bytes:
        made = wire.metric(content, wire.DOUBLE, **more)
        return made + wire.unit(unit) if unit else made

    log = Log()
    birth = [metric(1, "degC", name="t", alias=3), metric(2, "kPa", name="p"), metric(3, name="x")]
    data = [metric(4, alias=3, typed=False), metric(5, name="p"), metric(6, name="x"),
            metric(7, "psi", name="p")]  # fmt: skip
    sent = [("NBIRTH", birth), ("NDATA", data), ("NBIRTH", [metric(8, name="p")]),
            ("NDATA", [metric(9, name="p")])]  # fmt: skip
    for seq, (kind, metrics) in enumerate(sent):
        log.add(f"spBv1.0/G/{kind}/E", wire.payload(*metrics, seq=seq), stream="spBv1.0/G/E")
    for steps in ([], [1], [1, 2, 3]):
        read = log.read(steps).readings
        units = {row["value_double"]: row["unit"] for row in read if row["value_double"]}
        assert units == {1: "°C", 2: "kPa", 3: None, 4: "°C", 5: "kPa", 6: None, 7: "psi",
                         8: None, 9: None}  # fmt: skip


def test_the_definition_of_a_template_is_no_reading() -> None:
    member = wire.block(2, wire.metric(0.0, wire.DOUBLE, name="rpm"))
    types = wire.metric(member + wire.integer(5, 1), wire.TEMPLATE, name="_types_/Motor")
    motor = wire.metric(member + wire.integer(5, 0), wire.TEMPLATE, name="m1")
    assert read(types, motor) == {"m1/rpm": 0.0}


def test_an_integer_without_a_type_that_may_be_negative_is_refused() -> None:
    metrics = [wire.metric(content, kind, name=name, typed=False)
               for name, content, kind in (("a", -5, wire.INT32), ("b", 5, wire.INT32),
                                           ("c", -5, wire.INT64), ("d", 5, wire.INT64))
               ]  # fmt: skip
    found = edge(("NDATA", wire.payload(*metrics, seq=3)))
    assert found.values() == [("G/E", "b", 5.0), ("G/E", "d", 5.0)]
    assert [row["code"] for row in found.quarantine] == ["name"]
    assert "4294967291 may be negative" in found.reasons()[0]

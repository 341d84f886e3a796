"""Payloads that are made to cost much: what a task holds and does because of one message is
bounded, and the message is told in the quarantine."""

import pytest

from holdfast_lake.decoders import sparkplug, text_payload
from holdfast_lake.decoders.decoded import (
    ERRORS_MAX,
    NAME_LENGTH_MAX,
    READINGS_MAX,
    Decoded,
    DecodeError,
)
from holdfast_lake.decoders.json_payload import Fields, decode_json, flatten
from holdfast_lake.decoders.sparkplug import array_text
from holdfast_lake.decoders.text_payload import decode_csv
from holdfast_lake.tables.columns import REASON_LENGTH_MAX
from holdfast_lake.tables.rules import Rule
from tests.support import sparkplug_wire as wire
from tests.support.fold_log import Log

INT8_ARRAY, STRING_ARRAY, BOOLEAN_ARRAY = 22, 33, 32


def test_a_long_name_is_not_copied_for_each_of_what_is_below_it() -> None:
    """Copied for each of the empty lists, it would be a terabyte."""
    payload = b'{"' + b"k" * 2_000_000 + b'":[' + b"[]," * 500_000 + b"[]]}"
    with pytest.raises(DecodeError, match="a metric's name of 2000001 characters"):
        decode_json(payload, Fields())


@pytest.mark.parametrize("depth", [1, 2, 60])
def test_names_over_several_levels_have_the_same_bound(depth: int) -> None:
    name = "n" * (NAME_LENGTH_MAX // depth - 1)
    text = '{"' + f'{name}":{{"' * (depth - 1)
    fits = NAME_LENGTH_MAX - (len(name) + 1) * (depth - 1)
    for length, wrong in ((fits, False), (fits + 1, True)):
        document = (text + "m" * length + '":1}' + "}" * (depth - 1)).encode()
        if wrong:
            with pytest.raises(DecodeError, match="a metric's name of 1025 characters"):
                decode_json(document, Fields())
        else:
            assert [len(name) for name in decode_json(document, Fields()).names] == [
                NAME_LENGTH_MAX
            ]


def test_what_is_empty_has_no_name_that_is_too_long() -> None:
    decoded = decode_json(b'{"' + b"k" * 5000 + b'":{},"v":1}', Fields())
    assert (decoded.names, decoded.reason()) == (["v"], None)


@pytest.mark.parametrize("values", [list(range(READINGS_MAX + 1)),
                                    {str(n): n for n in range(READINGS_MAX + 1)}])  # fmt: skip
def test_many_values_are_refused_before_they_are_named(values: object) -> None:
    decoded = Decoded()
    with pytest.raises(DecodeError, match=f"more than {READINGS_MAX} values"):
        flatten("", values, decoded, 1)
    assert decoded.names == []


def test_what_is_empty_is_no_value() -> None:
    payload = b"[" + b"[],{}," * READINGS_MAX + b"1]"
    assert decode_json(payload, Fields()).values == [1.0]


def test_a_list_of_many_empty_objects() -> None:
    payload = b"[" + b"{}," * READINGS_MAX + b"{}]"
    with pytest.raises(DecodeError, match=f"a list of {READINGS_MAX + 1} objects"):
        decode_json(payload, Fields())


def test_many_errors_are_counted_and_some_told() -> None:
    decoded = decode_json(b"[" + b"1e400," * 5000 + b"1]", Fields())
    assert decoded.values == [1.0]
    assert len(decoded.errors or ()) == ERRORS_MAX
    assert (decoded.reason() or "").endswith(f"; and {5000 - ERRORS_MAX} more")


def test_csv_of_too_many_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_payload, "CELLS_MAX", 10)
    assert len(decode_csv(b"1," * 9 + b"1", tuple("abcdefghij"), Fields()).values) == 10
    with pytest.raises(DecodeError, match="more than 10 cells"):
        decode_csv(b"1," * 10 + b"1", (), Fields())


@pytest.mark.parametrize(("datatype", "data"), [
    (INT8_ARRAY, b"\1" * 101), (STRING_ARRAY, b"\0" * 101),
    (BOOLEAN_ARRAY, (101).to_bytes(4, "little") + b"\xff" * 13),
])  # fmt: skip
def test_arrays_of_too_many_values(
    datatype: int, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert array_text(data, datatype)
    monkeypatch.setattr(sparkplug, "CELLS_MAX", 100)
    with pytest.raises(DecodeError, match="an array of 101 values, the maximum is 100"):
        array_text(data, datatype)


def test_reasons_are_not_as_long_as_the_payload() -> None:
    log = Log(Rule("c", decode="csv"))
    header = b",".join([b"x" * 5000] * 20)
    log.add("c", header + b"\n1")
    metrics = [wire.metric(1, wire.INT32, name="n" * 100_000) for _ in range(3)]
    log.add("spBv1.0/G/NBIRTH/E", wire.payload(*metrics, seq=0))
    reasons = log.read().reasons()
    assert len(reasons) == 2
    assert max(map(len, reasons)) == REASON_LENGTH_MAX + len("...")
    assert reasons[0].startswith("the first line names columns twice")

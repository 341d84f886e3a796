"""CBOR payloads as the library cbor2 writes and reads them: the readings are those of the same
document in JSON. The examples are those of RFC 8949, appendix A."""

import base64
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_lake.decoders.decoded import DEPTH_MAX, Decoded, DecodeError
from holdfast_lake.decoders.documents import parse_cbor, parse_messagepack
from holdfast_lake.decoders.json_payload import Fields, decode_document, decode_json
from holdfast_lake.tables.rules import Rule
from tests.support.fold_log import Log

cbor2 = pytest.importorskip("cbor2")

FIELDS = Fields(time=("ts",), sequence=("seq",), id=("id",), device=())
PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=8)
NUMBERS = PLAIN | st.floats(allow_nan=False, allow_infinity=False)
DOCUMENTS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["ts", "seq", "id", "v", "a.b", "", "é"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def columns(decoded: Decoded) -> Any:
    return [getattr(decoded, name) for name in (
        "names", "values", "exact", "times", "time_us", "sequence", "id", "errors", "device"
    )]  # fmt: skip


@given(DOCUMENTS, st.booleans())
def test_a_document_is_read_as_in_json(document: Any, is_canonical: bool) -> None:
    payload = cbor2.dumps(document, canonical=is_canonical)
    if is_canonical:
        document = cbor2.loads(payload)  # its keys are sorted
    text = json.dumps(document).encode()
    assert columns(decode_document(parse_cbor(payload)[0], FIELDS)) == columns(
        decode_json(text, FIELDS)
    )


@pytest.mark.parametrize(
    ("hexadecimal", "value"),
    [
        ("00", 0), ("1bffffffffffffffff", (1 << 64) - 1), ("c249010000000000000000", 1 << 64),
        ("3bffffffffffffffff", -(1 << 64)), ("f98000", 0.0), ("f97bff", 65504.0),
        ("fb7e37e43c8800759c", 1e300), ("f5", True), ("f6", None), ("f7", None), ("f0", 16),
        ("c074323031332d30332d32315432303a30343a30305a", "2013-03-21T20:04:00+00:00"),
        ("c11a514b67b0", "2013-03-21T20:04:00+00:00"),
        ("d74401020304", "AQIDBA=="), ("d818456449455446", "ZElFVEY="),
        ("d82076687474703a2f2f7777772e6578616d706c652e636f6d", "http://www.example.com"),
        ("a201020304", {"1": 2, "3": 4}), ("5f42010243030405ff", "AQIDBAU="),
        ("bf61610161629f0203ffff", {"a": 1, "b": [2, 3]}), ("c48221196ab3", 273.15),
        ("d9d9f7a1617601", {"v": 1}), ("7f657374726561646d696e67ff", "streaming"),
    ],
)  # fmt: skip
def test_the_examples_of_the_specification(hexadecimal: str, value: Any) -> None:
    assert parse_cbor(bytes.fromhex(hexadecimal)) == (value, None)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"", "no CBOR"), (b"\xff", "no CBOR"), (b"\xa1", "no CBOR"), (b"\x1c", "no CBOR"),
        (b"\x62\xff\xff", "no CBOR"), (b"\xa1\x61v\x01\x02", "bytes behind the first document"),
        (b"\xc0\x63abc", "no CBOR"), (cbor2.dumps({1: 2, "1": 3}), "as the same key"),
        (b"\x81" * (DEPTH_MAX + 1) + b"\x01", "nested more than"), (b"\x81" * 100_000, "CBOR"),
        (b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff", "no CBOR"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused(payload: bytes, text: str) -> None:
    with pytest.raises(DecodeError, match=text):
        parse_cbor(payload)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    try:
        document, _ = parse_cbor(payload)
    except DecodeError:
        return
    json.dumps(document, ensure_ascii=False)


def test_a_rule_reads_cbor_behind_a_layer() -> None:
    log = Log(Rule("c/+", decode="base64+cbor", device="level 2", time="ts", sequence="seq"))
    for number in range(3):
        document = {"ts": 1_790_000_000 + number, "seq": number, "t": 21.5, "id": b"\x01"}
        log.add("c/x", base64.b64encode(cbor2.dumps(document)))
    read = log.read()
    assert read.quarantine == []
    assert read.values() == [("x", "t", 21.5), ("x", "id", "AQ==")] * 3


@pytest.mark.parametrize(
    "hexadecimal",
    [
        "a2616101616102",  # {"a": 1, "a": 2}
        "a1616ea2616101616102",  # one level deeper
        "81bf616101616102ff",  # in a map of indefinite length in a list
    ],
)
def test_a_key_that_is_there_twice_is_counted_and_the_last_one_counts(hexadecimal: str) -> None:
    log = Log(Rule("c", decode="cbor"))
    log.add("c", bytes.fromhex(hexadecimal))
    found = log.read()
    assert [row["value_double"] for row in found.readings] == [2.0]
    assert [row["code"] for row in found.quarantine] == ["key"]
    assert "'a': the last counts" in found.reasons()[0]


def test_a_key_of_senml_that_is_there_twice_is_counted() -> None:
    log = Log(Rule("s", decode="senml"))
    log.add("s", b'[{"n":"t","v":1,"v":2}]')
    log.add("s", bytes.fromhex("81a3616e617461760161760261"))  # cut
    log.add("s", bytes.fromhex("81a3616e6174617601617602"))
    found = log.read()
    assert found.values() == [("s", "t", 2.0)] * 2
    assert [row["code"] for row in found.quarantine] == ["key", "format", "key"]


def test_types_that_json_has_not() -> None:
    when = datetime(2026, 9, 21, 14, 0, tzinfo=UTC)
    log = Log(Rule("c", decode="cbor"))
    log.add("c", cbor2.dumps({"ts": when, 1: b"\x01", "v": Decimal("1.5")}))
    found = log.read()
    assert found.values() == [("c", "1", "AQ=="), ("c", "v", 1.5)]
    assert found.readings[0]["event_time"] == when


@given(DOCUMENTS)
def test_messagepack_has_each_key_once(document: Any) -> None:
    assert parse_messagepack(msgspec.msgpack.encode(document)) == (document, None)


@given(DOCUMENTS, st.text(max_size=40), st.integers(0, 70_000))
def test_a_key_of_messagepack_that_is_there_twice_is_counted(
    document: Any, key: str, length: int
) -> None:
    one = msgspec.msgpack.encode(key)
    values = [bytes(length), msgspec.msgpack.Ext(5, bytes(length % 300)), document, 2.5]
    pairs = b"".join(one + msgspec.msgpack.encode(value) for value in values)
    found, error = parse_messagepack(b"\x92\xde\x00\x04" + pairs + b"\x01")
    assert found == [{key: 2.5}, 1]
    assert error == "a key is there twice: the last counts"

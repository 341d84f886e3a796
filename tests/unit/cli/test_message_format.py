"""How `holdfast sub` prints a message where mosquitto_sub is no guide (see tests/interop)."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.pubsub.sub import FormatError, PayloadNotJson, Printer, compile_format
from holdfast.client.protocol.effects import Message
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import Properties

NOW_NS = 1_700_000_000_123_456_789


def message(payload: bytes = b"", properties: Properties | None = None) -> Message:
    return Message("a/b", payload, 1, True, False, 7, properties or {})


def printed(format: str, payload: bytes = b"", properties: Properties | None = None) -> bytes:
    printer = Printer(compile_format(format, False), False, False)
    return printer.render(message(payload, properties), NOW_NS)


def test_payload_bytes_are_kept() -> None:
    payload = bytes(range(256))
    assert printed("%p", payload) == payload
    assert Printer(None, True, True).render(message(payload), NOW_NS) == b"a/b " + payload + b"\n"
    assert Printer(None, False, True).render(message(b""), NOW_NS) == b""


def test_hexadecimal_is_padded_whole() -> None:
    assert printed("[%6x][%-6x][%06X]", b"\xab\x01") == b"[  ab01][ab01  ][00AB01]"


def test_time_parts() -> None:
    assert printed("%U") == b"1700000000.123456789"
    assert printed("@N @@ %%") == b"123456789 @ %"
    assert re.fullmatch(rb"2023-11-1\dT\d\d:\d\d:\d\d[+-]\d{4}", printed("%I"))
    assert printed("@s") == b"1700000000"


def test_subscription_identifier_and_alias() -> None:
    properties: Properties = {pr.SUBSCRIPTION_IDENTIFIER: [5, 6], pr.TOPIC_ALIAS: 3}
    assert printed("%S %A", properties=properties) == b"5 3"


@given(st.binary(max_size=40), st.booleans())
def test_json_is_always_json(payload: bytes, pretty: bool) -> None:
    properties: Properties = {
        pr.CORRELATION_DATA: b"\xff\0",
        pr.USER_PROPERTY: [("k", "1"), ("k", '"2')],
        pr.SUBSCRIPTION_IDENTIFIER: [1, 2],
    }
    printer = Printer(compile_format("%j", pretty), False, False)
    document = json.loads(printer.render(message(payload, properties), NOW_NS))
    assert document["payload"] == payload.decode("utf-8", "replace")
    assert document["payloadlen"] == len(payload)
    assert document["mid"] == 7
    assert document["properties"]["user-properties"] == {"k": '"2'}
    assert document["properties"]["subscription-identifier"] == [1, 2]


@pytest.mark.parametrize("payload", [b"", b"{", b"NaN", b"[Infinity]", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_said_to_be_none(payload: bytes) -> None:
    with pytest.raises(PayloadNotJson, match="on topic a/b"):
        printed("%J", payload)


def test_json_numbers() -> None:
    document = printed("%J", b"[1.50, 2.0, 1e3, -0.25, 12345678901234567890]")
    assert document.endswith(b'"payload":[1.5,2.0,1000.0,-0.25,12345678901234567890]}')


@pytest.mark.parametrize("format", ["%", "%5", "%-", "%z", "@", "\\", "\\q", "%99999t", "%5.t"])
def test_wrong_formats(format: str) -> None:
    with pytest.raises(FormatError):
        compile_format(format, False)


@given(st.text(alphabet="%@\\05.-tpxjJIUNqzn ", max_size=12))
def test_any_format_compiles_or_is_refused(format: str) -> None:
    try:
        parts = compile_format(format, False)
    except FormatError:
        return
    Printer(parts, False, True).render(message(b"{}"), NOW_NS)

"""One log line for each thing that happens to a client, with who and from where."""

import re
from pathlib import Path

import pytest

from holdfast.node.connections import client_notes
from holdfast.node.connections.repeats import KEYS_MAX, PAUSE_S, Repeats
from holdfast.node.effects import Note
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_rights import Bench, publication, subscribe

CLIENT_EVENTS = {
    "connected",
    "connection_refused",
    "disconnected",
    "session_taken_over",
    "protocol_error",
    "publish_denied",
    "read_denied",
}


def lines(bench: NodeBench) -> list[Note]:
    """The lines about clients since the last call."""
    found = [each for each in bench.notes if each.event in CLIENT_EVENTS]
    bench.notes.clear()
    for each in found:
        assert {"client", "user", "remote"} <= set(each.fields), each.event
        assert each.fields["remote"] in ("test:1", "")
    return found


def only(bench: NodeBench) -> Note:
    (line,) = lines(bench)
    return line


def test_a_connection_has_a_first_and_a_last_line() -> None:
    bench = Bench()
    peer = bench.login("alice")
    first = only(bench)
    assert (first.level, first.event) == ("info", "connected")
    assert (first.fields["client"], first.fields["user"]) == ("alice", "alice")
    assert first.fields["listener"] == "test"
    assert first.fields["version"] == 5
    peer.send(m.Disconnect(reasons.SUCCESS, {}))
    last = only(bench)
    assert (last.event, last.fields["reason"]) == ("disconnected", "Normal disconnection")
    assert last.fields["user"] == "alice"
    peer.lose()
    assert lines(bench) == []


def test_a_lost_connection_is_told_from_a_closed_one() -> None:
    bench = Bench()
    bench.login("alice").lose()
    assert [each.event for each in bench.notes] == ["connected", "disconnected"]
    assert lines(bench)[1].fields["reason"] == "Connection lost"


def test_silence_is_a_reason() -> None:
    bench = NodeBench()
    bench.connect("c", keep_alive_s=10)
    lines(bench)
    bench.advance(16)
    line = only(bench)
    assert (line.event, line.fields["reason"]) == ("disconnected", "Keep Alive timeout")


def test_a_takeover_is_one_line_about_the_old_connection() -> None:
    bench = Bench()
    bench.login("alice")
    lines(bench)
    bench.login("alice")
    old, new = lines(bench)
    assert (old.event, new.event) == ("session_taken_over", "connected")


def test_a_violation_is_one_line() -> None:
    bench = Bench()
    peer = bench.login("alice")
    lines(bench)
    peer.send_bytes(b"\xf0\x00\xf0\x00")
    peer.lose()
    line = only(bench)
    assert (line.event, line.fields["user"]) == ("protocol_error", "alice")
    assert line.fields["reason"]
    assert line.fields["error"]


@pytest.mark.parametrize("version", [4, 5])
def test_a_refusal_names_the_claimed_user(version: int) -> None:
    bench = Bench()
    peer = Peer(bench, version)
    peer.connection.listener.authentication = ("certificate",)
    peer.send(m.Connect(version, True, 60, "c1", None, "mallory", b"wrong", {}))
    line = only(bench)
    assert (line.level, line.event) == ("warning", "connection_refused")
    assert (line.fields["client"], line.fields["user"]) == ("c1", "mallory")
    assert "wrong" not in str({**line.fields, "error": ""})


def test_strangers_that_send_nothing_are_no_lines() -> None:
    """Port scans and health checks come and go all day."""
    bench = NodeBench()
    bench.peer().lose()
    assert lines(bench) == []


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("topic", ["secret/x", "$SYS/broker/fake"])
def test_a_denied_publish_is_one_line_a_minute(topic: str, qos: int) -> None:
    bench = Bench()
    writer = bench.login("mallory")
    lines(bench)
    for _ in range(5):
        writer.send(publication(topic, b"x", qos))
    line = only(bench)
    assert (line.level, line.event) == ("warning", "publish_denied")
    assert (line.fields["topic"], line.fields["count"]) == (topic, 1)
    bench.advance(PAUSE_S)
    writer.send(publication(topic, b"x", qos))
    assert [each.fields["count"] for each in lines(bench) if each.event == "publish_denied"] == [5]


def test_the_line_about_a_denied_publish_names_the_rule_that_denies_it() -> None:
    bench = Bench("user mallory\ntopic readwrite #\ntopic deny secret/#\n")
    writer = bench.login("mallory")
    lines(bench)
    writer.send(publication("secret/x", b"x", 1))
    assert str(only(bench).fields["reason"]).endswith(":3: topic deny secret/#")
    writer.send(publication("$SYS/broker/fake", b"x", 1))
    assert only(bench).fields["reason"] == "no rule allows it"


def test_a_message_that_a_subscriber_may_not_read_is_a_line_for_debugging() -> None:
    bench = Bench()
    reader = bench.login("mallory")
    subscribe(reader, "#")
    writer = bench.login("alice")
    lines(bench)
    writer.send(publication("secret/x", b"x", 1))
    bench.settle()
    line = only(bench)
    assert (line.level, line.event, line.fields["client"]) == ("debug", "read_denied", "mallory")


def test_repeats_are_bounded_and_lose_no_count() -> None:
    repeats = Repeats()
    told = 0
    for second in range(1000):
        told += repeats.count("one", float(second))
    assert told <= 1000
    assert told >= 1000 - PAUSE_S
    for number in range(3 * KEYS_MAX):
        assert repeats.count(f"key {number}", 2000.0) == 1
    assert len(repeats._noted) == KEYS_MAX


def test_the_documentation_lists_every_line_about_clients() -> None:
    text = (Path(__file__).parents[4] / "docs" / "logs.md").read_text()
    source = Path(client_notes.__file__).with_name("client_notes.py").read_text()
    events = set(re.findall(r'"([a-z]+_[a-z_]+)"', source)) | CLIENT_EVENTS
    fields = {"keep_alive_s", "session_expiry_s", "max_connections"}
    assert len(events - fields) >= 7
    assert [event for event in sorted(events - fields) if f"`{event}`" not in text] == []

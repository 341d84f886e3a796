"""Brokers with [federation], as processes, with paho and mosquitto clients: everything that a
message has crosses two links."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.e2e.brokers import SOURCE
from tests.e2e.conftest import StartHoldfast
from tests.e2e.federated import Member, line
from tests.e2e.pair import wait_until
from tests.interop.paho_client import Paho, publish_props

SESSION_S = 3600


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    with line(tmp_path_factory.mktemp("line")) as members:
        yield members


def test_every_member_knows_the_whole_graph(members: list[Member]) -> None:
    """The members are on a line, so the first one reaches the last one over the middle."""

    def knows_all(member: Member) -> bool:
        graph = json.loads(member.admin("/api/v1/federation/graph")[1])
        links = {frozenset((each["a"], each["b"])) for each in graph["links"] if each["mutual"]}
        known = {each["id"] for each in graph["members"]}
        return known == {a, b, c} and links == {frozenset((a, b)), frozenset((b, c))}

    a, b, c = [json.loads(each.admin("/api/v1/federation/graph")[1])["id"] for each in members]
    wait_until(lambda: all(map(knows_all, members)), "all know the two links")


# What crosses


@pytest.mark.parametrize("version", [4, 5])
def test_wildcards_and_qualities(members: list[Member], version: int) -> None:
    a, b, c = members
    with (
        Paho(a.port, "wild-p", version) as publisher,
        Paho(b.port, "wild-b", version) as middle,
        Paho(c.port, "wild-c", version) as far,
    ):
        middle.subscribe(f"wild{version}/+/t", 2)
        far.subscribe(f"wild{version}/#", 2)
        a.await_sending(f"wild{version}/+/t", f"wild{version}/#")
        for qos in range(3):
            publisher.publish(f"wild{version}/x/t", b"%d" % qos, qos)
            publisher.publish(f"wild{version}/x/other", b"other", qos)
        mine = [middle.message() for _ in range(3)]
        assert sorted((m.payload, m.qos) for m in mine) == [(b"0", 0), (b"1", 1), (b"2", 2)]
        theirs = [far.message() for _ in range(6)]
        assert sorted((m.topic[6:], m.qos) for m in theirs) == sorted(
            [("x/t", qos) for qos in range(3)] + [("x/other", qos) for qos in range(3)]
        )
        middle.assert_nothing_more()
        far.assert_nothing_more()


def test_properties_and_the_retained_flag(members: list[Member]) -> None:
    a, _, c = members
    properties = publish_props(
        ContentType="text/plain",
        ResponseTopic="answers/1",
        CorrelationData=b"\x00\x01",
        PayloadFormatIndicator=1,
        MessageExpiryInterval=100,
        UserProperty=[("a", "1"), ("b", "2"), ("a", "3")],
    )
    with Paho(a.port, "props-p") as publisher, Paho(c.port, "props-s") as subscriber:
        subscriber.subscribe("props/#", options=SubscribeOptions(qos=2, retainAsPublished=True))
        a.await_sending("props/#")
        for qos in range(3):
            publisher.publish("props/x", b"%d" % qos, qos, True, properties)
        for _ in range(3):
            message = subscriber.message()
            found = message.properties.json()
            assert 90 <= found.pop("MessageExpiryInterval") <= 100
            assert found == {
                "ContentType": "text/plain",
                "ResponseTopic": "answers/1",
                "CorrelationData": "0001",
                "PayloadFormatIndicator": 1,
                "UserProperty": [("a", "1"), ("b", "2"), ("a", "3")],
            }
            assert message.retain
    with Paho(c.port, "props-late") as late:
        late.subscribe("props/#", 1)
        assert late.message().payload in (b"0", b"1", b"2")


def test_what_was_retained_before_anybody_elsewhere_wanted_it(members: list[Member]) -> None:
    a, _, c = members
    with Paho(a.port, "kept-p") as publisher:
        publisher.publish("kept/1", b"old", 1, True)
        publisher.publish("kept/1", b"new", 2, True)
        publisher.publish("kept/gone", b"gone", 1, True)
        publisher.publish("kept/gone", b"", 1, True)
    with Paho(c.port, "kept-s") as subscriber:
        subscriber.subscribe("kept/#", 1)
        message = subscriber.message()
        assert (message.topic, message.payload, message.retain) == ("kept/1", b"new", True)
        subscriber.assert_nothing_more()
    with Paho(c.port, "kept-late") as late:
        late.subscribe("kept/#", 1)
        assert late.message().payload == b"new"
        late.assert_nothing_more()


def test_a_shared_group_gets_each_message_once(members: list[Member]) -> None:
    a, _, c = members
    with (
        Paho(a.port, "share-p") as publisher,
        Paho(c.port, "share-1") as one,
        Paho(c.port, "share-2") as two,
    ):
        one.subscribe("$share/g/share/#", 1)
        two.subscribe("$share/g/share/#", 1)
        a.await_sending("share/#")
        for number in range(40):
            publisher.publish("share/x", b"%d" % number, 1)
        wait_until(lambda: one.messages.qsize() + two.messages.qsize() == 40, "all arrive")
        ones, twos = one.payloads(one.messages.qsize()), two.payloads(two.messages.qsize())
        assert sorted(map(int, ones + twos)) == list(range(40))
        assert ones
        assert twos


def test_a_session_that_is_away_gets_what_was_published_meanwhile(members: list[Member]) -> None:
    a, _, c = members
    with Paho(c.port, "away", expiry_s=SESSION_S) as subscriber:
        subscriber.subscribe("away/#", 2)
        a.await_sending("away/#")
    with Paho(a.port, "away-p") as publisher:
        for number in range(50):
            publisher.publish(f"away/{number % 2}", b"%d" % number, 1 + number % 2)
    with Paho(c.port, "away", clean=False, expiry_s=SESSION_S) as subscriber:
        found = [subscriber.message() for _ in range(50)]
        for topic in range(2):
            numbers = [int(m.payload) for m in found if m.topic == f"away/{topic}"]
            assert numbers == list(range(topic, 50, 2))
        subscriber.assert_nothing_more()


def test_the_same_topic_everywhere_makes_no_loop(members: list[Member]) -> None:
    clients = [Paho(each.port, f"loop-{each.name}") for each in members]
    try:
        for client in clients:
            client.subscribe("loop/#", 2)
        for member in members:
            member.await_sending("loop/#")
            member.await_interest("loop/x", len(members))
        before = [member.count("exported") for member in members]
        for number in range(20):
            for client in clients:
                client.publish("loop/x", b"%d" % number, number % 3)
        for client in clients:
            found = sorted(int(payload) for payload in client.payloads(60))
            assert found == sorted(3 * list(range(20)))
            client.assert_nothing_more()
        after = [member.count("exported") for member in members]
        assert [late - early for early, late in zip(before, after, strict=True)] == [20, 20, 20]
    finally:
        for client in clients:
            client.close()


def test_control_topics_and_sys_stay_where_they_are(members: list[Member]) -> None:
    a, _, c = members
    with Paho(a.port, "control-p") as publisher, Paho(c.port, "control-s") as subscriber:
        subscriber.subscribe("federator/#", 1)
        subscriber.subscribe("+/core_ann/x", 1)
        subscriber.subscribe("$SYS/broker/federation/id", 1)
        subscriber.subscribe("control/end", 1)
        a.await_sending("control/end")
        publisher.publish("federator/core_ann/x", b'{"CoreId":0}', 1)
        publisher.publish("federator/topology_ann", b"\x00garbage", 2)
        publisher.publish("control/end", b"end", 1)
        found = {}
        while "control/end" not in found:
            message = subscriber.message()
            found[message.topic] = message.payload
        assert not [topic for topic in found if topic.startswith("federator")]
    with Paho(c.port, "control-sys") as subscriber:
        subscriber.subscribe("$SYS/broker/federation/id", 1)
        assert subscriber.message().payload.decode() == c.federation()["id"]


def test_mosquitto_clients(members: list[Member]) -> None:
    a, b, _ = members
    command = ["mosquitto_sub", "-p", str(b.port), "-t", "m/#", "-q", "2", "-C", "3", "-W", "30"]
    with subprocess.Popen([*command, "-F", "%t %q %p"], stdout=subprocess.PIPE) as subscriber:
        a.await_sending("m/#")
        for qos in range(3):
            subprocess.run(
                ["mosquitto_pub", "-p", str(a.port), "-t", "m/x", "-q", str(qos), "-m", "hello"],
                check=True,
                timeout=30,
            )
        out, _ = subscriber.communicate(timeout=40)
    assert sorted(out.decode().split("\n")[:3]) == [f"m/x {qos} hello" for qos in range(3)]


# To watch


def test_admin_port_metrics_and_command_line(members: list[Member]) -> None:
    a, b, c = members
    with Paho(c.port, "watch-s") as subscriber:
        subscriber.subscribe("watch/+", 1)
        a.await_sending("watch/+")
        ids = {each.name: each.federation()["id"] for each in members}
        mesh = a.federation("watch/x")["mesh"]
        assert mesh["root"] == ids["c"]
        assert mesh["members"] == [ids["c"]]
        assert a.federation("nobody/x")["mesh"]["root"] is None
        assert a.admin("/api/v1/federation?topic=a/%23")[0] == 400
        with Paho(b.port, "watch-p") as publisher:
            publisher.publish("watch/x", b"1", 1)
        assert subscriber.message().payload == b"1"
    code, metrics = b.admin("/metrics")
    assert code == 200
    values = dict(text.rsplit(" ", 1) for text in metrics.splitlines() if not text.startswith("#"))
    assert float(values["holdfast_federation_up"]) == 1
    assert float(values["holdfast_federation_links"]) == 2
    assert float(values["holdfast_federation_published_total"]) >= 1
    # The broker's own session is no client.
    assert float(values['holdfast_connections{node="n1"}']) == 0
    assert b.federation()["links"]
    status = _holdfast("federation", "status", "--admin", f"127.0.0.1:{b.admin_port}")
    assert ids["a"] in status
    assert ids["c"] in status
    text = _holdfast("federation", "status", "--json", "--admin", f"127.0.0.1:{b.admin_port}")
    assert json.loads(text)["id"] == ids["b"]
    shown = _holdfast("federation", "mesh", "watch/x", "--admin", f"127.0.0.1:{a.admin_port}")
    assert "watch/x" in shown


def _holdfast(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
    )
    return done.stdout


# Configuration


def test_a_port_that_is_taken_is_told_at_the_start(members: list[Member], tmp_path: Path) -> None:
    member = Member(tmp_path, "late")
    member.settings["federation"]["listen"] = f"127.0.0.1:{members[0].federation_port}"
    with pytest.raises(RuntimeError, match="federation"):
        member.start()


def test_without_the_table_there_is_no_federation(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast()
    code, body = broker.admin("/api/v1/federation")
    assert (code, "no federation" in body) == (404, True)
    assert "holdfast_federation" not in broker.admin("/metrics")[1]
    assert not (broker.data / "federation").exists()


def test_leaving_the_table_out_gives_up_what_waits(tmp_path: Path) -> None:
    with line(tmp_path, "ab") as members:
        a, b = members
        with Paho(b.port, "s") as subscriber:
            subscriber.subscribe("x", 1)
            a.await_sending("x")
            a.stop()
        table = a.settings.pop("federation")
        a.start()
        assert "federation_left" in a.log_text()
        a.stop()
        a.settings["federation"] = table
        a.start()

"""The log as JSON, the trace of a message and the reason why a client has it or not."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.brokers import Holdfast, one_process
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_admin_access import ask
from tests.e2e.wire import MAXIMUM_PACKET_SIZE, MESSAGE_EXPIRY, PUBLISH, Wire
from tests.support.api_client import Api, Refused

NO_LOCAL = 4
"""The bit of a filter's options byte."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses(directory, settings={"cluster": {"partitions": 4}}) as cluster:
        yield cluster


def pages(api: Api, **parameters: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = api.get("log/records", **parameters, **after)
        found += page["records"]
        if not page["next"]:
            return found
        after = {"after": page["next"]}


def places(records: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(each["partition"], each["offset"]) for each in records]


def statuses(trace: dict[str, Any]) -> dict[str, str]:
    return {each["client"]: each["status"] for each in trace["sessions"]}


def test_pages_have_every_record_once_in_both_orders(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    sizes = random.Random(1)
    with Wire(broker.port) as client:
        client.connect("p1")
        for number in range(120):
            size = 400_000 if number % 40 == 7 else sizes.randrange(100)
            client.publish(f"t/{number % 9}", b"x" * size, qos=1, retain=number % 10 == 0)
    with Wire(broker.port) as client:
        client.connect("s1", expiry_s=100)
        client.subscribe(("t/#", 1))

    def has_closed() -> bool:
        found = pages(api, client="s1", kind="session")
        return any('"op":"close"' in each["content"]["text"] for each in found)

    # It is appended after the client has gone, and both orders must have the same records.
    until(has_closed, "the record of the session's end")
    for limit in (7, 1000):
        oldest = pages(api, order="oldest", limit=limit)
        newest = pages(api, order="newest", limit=limit)
        assert len(set(places(oldest))) == len(oldest) >= 122
        assert sorted(places(newest)) == sorted(places(oldest))
        times = [each["at_us"] for each in api.get("log/records", limit=50)["records"]]
        assert times == sorted(times, reverse=True)
    assert len(pages(api, kind="message", limit=7)) == 120
    chosen = pages(api, filter="t/3", limit=7)
    assert {each["topic"] for each in chosen} == {"t/3"}
    assert len(chosen) == 13
    [opened, subscribed, *_] = pages(api, client="s1", kind="session", order="oldest")
    assert '"op":"open"' in opened["content"]["text"]
    assert '"op":"subscribe"' in subscribed["content"]["text"]

    one_topic = pages(api, filter="t/7", kind="message", limit=2)
    assert places(one_topic) == places(pages(api, filter="t/7", limit=50))
    assert len(pages(api, text="x" * 200)) == 3
    newest_one, before = one_topic[:2]
    place = {"partition": newest_one["partition"], "offset": newest_one["offset"]}
    detail = api.get("log/record", bytes=10, **place)
    assert detail["previous"] == {**before, "content": detail["previous"]["content"]}
    assert len(detail["record"]["content"]["text"]) <= 10
    first = one_topic[-1]
    detail = api.get("log/record", partition=first["partition"], offset=first["offset"])
    assert detail["previous"] is None
    assert detail["is_first"] is True
    [big, *_] = pages(api, text="x" * 200)
    path = f"/api/v1/log/payload?partition={big['partition']}&offset={big['offset']}"
    reply = ask(broker.admin_port, "GET", path)
    assert (reply.status, reply.body) == (200, b"x" * 400_000)
    assert reply.headers["Content-Disposition"].startswith("attachment")
    assert reply.headers["Content-Security-Policy"] == "sandbox"
    counts = api.get("log/counts", buckets=7)
    assert sum(counts["counts"]) == 120
    assert counts["complete_from_us"] == counts["from_us"]
    assert sum(api.get("log/counts", filter="t/3")["counts"]) == 13
    disks = api.get("storage")["nodes"]
    assert sum(disk["log_bytes"] for disk in disks) > 1_200_000
    assert all(disk["full_in_s"] is None or disk["full_in_s"] > 0 for disk in disks)
    assert "connected" in {each["event"] for each in api.get("notes")["notes"]}

    middle = oldest[60]
    from_then = pages(api, from_us=middle["at_us"], kind="message", order="oldest")
    until_then = pages(api, to_us=middle["at_us"], kind="message", order="oldest")
    assert len(from_then) + len(until_then) == 120
    assert not set(places(from_then)) & set(places(until_then))
    partition = oldest[0]["partition"]
    alone = pages(api, partition=partition, order="oldest", limit=5, start=2)
    assert [each["offset"] for each in alone] == list(range(2, 2 + len(alone)))
    for wrong in ({"after": "x"}, {"start": 3}, {"partition": 999}, {"filter": "a/#/b"}):
        with pytest.raises(Refused, match="400"):
            api.get("log/records", **wrong)


def test_a_trace_shows_what_became_of_a_message_for_each_session(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite in/#\ntopic readwrite secret/#\npattern read in/%c\n")
    broker = start_holdfast({"security": {"acl_file": str(acl), "allow_anonymous": True}})
    api = Api(broker.admin_port)

    def durable(client_id: str, *filters: tuple[str, int]) -> Wire:
        client = Wire(broker.port)
        client.connect(client_id, expiry_s=1000)
        client.subscribe(*filters)
        return client

    durable("away", ("in/#", 1)).socket.close()
    live = durable("live", ("in/+", 1))
    silent = durable("silent", ("in/1", 1))
    low = durable("low", ("in/#", 0))
    member = durable("member", ("$share/g/in/#", 1))
    elsewhere = durable("elsewhere", ("out", 1))
    until(lambda: not api.get("session", client="away")["session"]["connected"], "away is away")
    with Wire(broker.port) as publisher:
        publisher.connect("pub", expiry_s=1000)
        publisher.publish("in/1", b"the message", qos=2)
        publisher.publish("in/1", b"short-lived", qos=1, props=[(MESSAGE_EXPIRY, 1)])
    assert live.message().payload == b"the message"
    silent.expect(PUBLISH)
    member.message()
    member.message()
    late = durable("late", ("in/#", 1))
    first, second = pages(api, filter="in/#", order="oldest")

    def trace() -> dict[str, Any]:
        found: dict[str, Any] = api.get(
            "trace", partition=first["partition"], offset=first["offset"]
        )
        return found

    until(lambda: statuses(trace()).get("live") == "delivered", "live has acknowledged")
    group = {"group": "$share/g/in/#", "status": "finished"}
    until(lambda: trace()["groups"] == [group], "the group's progress is in the log")
    found = trace()
    assert statuses(found) | {"late": ""} == {
        "away": "waiting",
        "live": "delivered",
        "silent": "sent",
        "low": "qos0",
        "late": "",
    }
    assert found["record"]["content"]["text"] == "the message"
    steps = {each["step"]: each for each in found["steps"]}
    assert "client pub published it at QoS 2" in steps["publisher"]["text"]
    assert steps["acknowledge"]["known"]
    assert not steps["lake"]["known"]
    assert sum(found["counts"].values()) == len(found["sessions"])
    at_time = api.get("trace", topic="in/1", time_us=first["at_us"])
    assert places([at_time["record"]]) == places([first])

    until(lambda: time.time() * 1e6 > second["at_us"] + 1_000_000, "the message has expired")
    gone = api.get("trace", partition=second["partition"], offset=second["offset"])
    assert statuses(gone)["away"] == "expired"

    def why(client: str, topic: str = "in/1", time_us: int = first["at_us"]) -> tuple[str, str]:
        answer = api.get("trace/why", client=client, topic=topic, time_us=time_us)
        return answer["status"], answer["sentence"]

    assert why("live")[0] == "delivered"
    assert why("away")[0] == "waiting"
    assert "client is away" in why("away")[1]
    assert why("silent")[0] == "sent"
    assert why("late")[0] == "not_subscribed"
    assert "it subscribed to in/# at" in why("late")[1]
    assert why("elsewhere")[0] == "not_subscribed"
    assert why("nobody")[0] == "unknown"
    assert why("live", "never/published")[0] == "no_message"
    assert why("live", time_us=1)[0] == "no_message"
    with Wire(broker.port) as again:
        again.connect("away", clean=False, expiry_s=1000)
        assert again.message().payload == b"the message"
        until(lambda: why("away")[0] == "delivered", "the log has the cursor")
        until(lambda: why("away", time_us=second["at_us"])[0] == "expired", "it has expired")

    acl.write_text("topic write in/#\n")
    api.post("reload")
    until(lambda: why("live")[0] == "not_permitted", "the rules have changed")
    live.send(b"\xc0\x00")
    for client in (live, silent, low, member, elsewhere, late):
        client.socket.close()
    api.delete("session", client="away")
    assert why("away")[0] in ("delivered", "ended")
    with pytest.raises(Refused, match="404"):
        api.get("trace", topic="never")
    with pytest.raises(Refused, match="400"):
        api.get("trace", partition=1)
    with pytest.raises(Refused, match="404"):
        api.get("trace", partition=first["partition"], offset=1 << 40)


@one_process("the packet limit is known where the client is")
def test_a_session_that_is_past_a_message_need_not_have_received_it(
    start_holdfast: StartHoldfast,
) -> None:
    """No Local, Maximum Packet Size, a later subscription, a shared group, an operator's move."""
    broker = start_holdfast({})
    api = Api(broker.admin_port)

    def durable(client_id: str, filter: str, options: int = 1, *, most: int = 0) -> Wire:
        client = Wire(broker.port)
        client.connect(client_id, expiry_s=1000, props=[(MAXIMUM_PACKET_SIZE, most)] * (most > 0))
        client.subscribe((filter, options))
        return client

    own = durable("own", "in/1", 1 | NO_LOCAL)
    small = durable("small", "in/#", most=100)
    member = durable("member", "$share/g/in/#")
    durable("moved", "in/#").socket.close()
    until(lambda: not api.get("session", client="moved")["session"]["connected"], "it is away")
    own.publish("in/1", b"x" * 200, qos=1, retain=True)
    member.message()
    late = durable("late", "in/#")
    late.message()
    api.post("session/move", {"to": "end"}, client="moved")

    def why(client: str) -> tuple[str, str]:
        answer = api.get("trace/why", client=client, topic="in/1")
        return answer["status"], answer["sentence"]

    until(lambda: why("small")[0] == "too_large", "its cursor has passed the message")
    assert "the client takes at most 100" in why("small")[1]
    assert why("own")[0] == "not_subscribed"
    assert "No Local" in why("own")[1]
    assert why("moved")[0] == "moved"
    assert why("member")[0] == "shared"
    assert "a member of the shared group g" in why("member")[1]
    assert why("late")[0] == "not_subscribed"
    assert "the message is retained, so it may have been sent it then" in why("late")[1]
    assert statuses(api.get("trace", topic="in/1")) == {
        "own": "not_subscribed",
        "small": "too_large",
        "moved": "moved",
        "late": "not_subscribed",
    }
    api.post("session/move", {"to": "start"}, client="moved")
    assert why("moved")[0] == "waiting"
    with Wire(broker.port) as again:
        again.connect("moved", clean=False, expiry_s=1000)
        again.message()
        until(lambda: why("moved")[0] == "delivered", "it has received the message")
    for client in (own, small, member, late):
        client.socket.close()


def test_any_node_of_a_cluster_traces_a_message(cluster: ClusterProcesses) -> None:
    everywhere = {name: Api(node.admin_port) for name, node in cluster.nodes.items()}
    with Wire(cluster.nodes["n1"].port) as one, Wire(cluster.nodes["n2"].port) as two:
        one.connect("one", expiry_s=300)
        one.subscribe(("in/#", 1))
        two.connect("two", expiry_s=300)
        two.subscribe(("in/#", 1))
        with Wire(cluster.nodes["n3"].port) as publisher:
            publisher.connect("pub")
            publisher.publish("in/x", b"hello", qos=1)
        one.message()
        two.expect(PUBLISH)
        for api in everywhere.values():
            until(
                lambda api=api: statuses(api.get("trace", topic="in/x")).get("one") == "delivered",
                "every node knows the cursor",
            )
            found = api.get("trace", topic="in/x")
            steps = {each["step"]: each["text"] for each in found["steps"]}
            assert "n1" in steps["replicas"]
            assert "n3" in steps["replicas"]
            assert statuses(found)["two"] in ("sent", "waiting", "unknown")
            assert api.get("trace/why", client="one", topic="in/x")["status"] == "delivered"
            assert len(pages(api, filter="in/#")) == 1

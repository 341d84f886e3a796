"""Sessions and clients over the admin API, with real brokers and a cluster of three."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.conftest import StartHoldfast
from tests.e2e.wire import DISCONNECT, PUBLISH, RECEIVE_MAXIMUM, Closed, Will, Wire, read_publish
from tests.support.api_client import Api, Refused

ADMINISTRATIVE_ACTION = 0x98
BANNED = 0x8A


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses(directory, settings={"cluster": {"partitions": 4}}) as cluster:
        yield cluster


def apis(cluster: ClusterProcesses) -> dict[str, Api]:
    return {name: Api(node.admin_port) for name, node in cluster.nodes.items()}


def names(page: dict[str, list[dict[str, str]]]) -> list[str]:
    return [row["client"] for row in page["sessions"]]


def is_closed(client: Wire) -> bool:
    try:
        client.receive(0.05)
    except TimeoutError:
        return False
    except Closed:
        return True
    return False


def test_a_page_lists_filters_and_continues(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    with contextlib.ExitStack() as stack:
        for number in range(7):
            client = stack.enter_context(Wire(broker.port))
            client.connect(f"dev-{number}", expiry_s=100)
            for each in range(number):
                client.subscribe((f"a/{each}", 1))
        stack.enter_context(Wire(broker.port, version=4)).connect("Other")
        with Wire(broker.port) as away:
            away.connect("dev-away", expiry_s=100)
        until(lambda: api.get("sessions", state="away")["matched"] == 1, "the client to be away")

        found = api.get("clients", search="DEV-")
        assert names(found) == [f"dev-{number}" for number in range(7)]
        assert (found["matched"], found["next"], found["missing"]) == (7, "", [])
        assert found["sessions"][3]["subscriptions"] == 3
        assert names(api.get("sessions", search="dev-")) == [*names(found), "dev-away"]
        [row] = api.get("clients", search="other")["sessions"]
        assert (row["protocol"], row["connected"], row["expiry_s"]) == ("3.1.1", True, 0)
        assert row["address"].startswith("127.0.0.1:")

        pages, after = [], {}
        while True:
            page = api.get("sessions", limit=3, sort="subscriptions", descending=True, **after)
            pages += names(page)
            if not page["next"]:
                break
            after = {"after": page["next"]}
        assert pages[:6] == [f"dev-{number}" for number in range(6, 0, -1)]
        assert sorted(pages) == sorted([*names(found), "dev-away", "Other"])
        with pytest.raises(Refused, match="400"):
            api.get("sessions", after="!!")
        with pytest.raises(Refused, match="another order"):
            api.get("sessions", after=api.get("sessions", limit=1)["next"], sort="queued")


def test_one_session_is_shown_disconnected_and_ended(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    with Wire(broker.port) as watcher, Wire(broker.port) as client:
        watcher.connect("watcher")
        watcher.subscribe(("wills", 0))
        client.connect("c/1 ü", expiry_s=1000, will=Will("wills", b"left"))
        client.subscribe(("t/#", 1))
        detail = api.get("session", client="c/1 ü")
        assert detail["session"]["connected"]
        assert detail["needed_bytes"] == 0
        assert [each["filter"] for each in detail["subscriptions"]] == ["t/#"]
        assert detail["will_topic"] == "wills"

        done = api.post("session/disconnect", client="c/1 ü", reason="maintenance")
        assert done["node"] == detail["session"]["node"]
        assert client.expect(DISCONNECT).reason == ADMINISTRATIVE_ACTION
        assert watcher.message().payload == b"left"
        watcher.publish("t/1", b"kept", qos=1)
        with pytest.raises(Refused, match="not connected"):
            api.post("session/disconnect", client="c/1 ü")

        assert not api.get("session", client="c/1 ü")["session"]["connected"]
        api.delete("session", client="c/1 ü")
        with pytest.raises(Refused, match="404"):
            api.get("session", client="c/1 ü")
        assert names(api.get("sessions")) == ["watcher"]
        history = api.get("session/history", client="c/1 ü")
        # The port ends a session as a client of its own, which takes it over first.
        events = [each for each in history["events"] if each["fields"].get("remote") != "admin"]
        own = [each for each in history["events"] if each not in events]
        assert [each["fields"].get("reason") for each in own] == ["Normal disconnection", None]
        ended, left, by_operator, subscribed, connected = events
        assert [each["event"] for each in (connected, subscribed, by_operator, left, ended)] == [
            "connected", "subscribed", "client_disconnected_by_operator", "disconnected",
            "session_ended",
        ]  # fmt: skip
        assert (ended["source"], connected["source"], history["next"]) == ("log", "memory", 0)
        assert subscribed["fields"] == {"filters": ["t/#"], "count": 1}
        assert left["fields"]["reason"] == "Administrative action"
        assert connected["fields"]["remote"].startswith("127.0.0.1:")
        with Wire(broker.port) as again:
            assert not again.connect("c/1 ü", clean=False, expiry_s=10).session_present


def test_inflight_messages_have_an_age_and_the_log_keeps_the_history(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    broker = start_holdfast()
    api = Api(broker.admin_port)
    with Wire(broker.port) as client:
        client.connect("slow", expiry_s=1000)
        client.subscribe(("t/#", 2))
        for number in range(3):
            client.publish("t/1", b"%d" % number, qos=number and 2)
        client.publish("t/2", b"last", qos=1)
        until(lambda: api.get("session", client="slow")["session"]["inflight"] == 3, "inflight")
        inflight = api.get("session", client="slow")["inflight"]
        assert [each["qos"] for each in inflight] == [2, 2, 1]
        now_us = time.time() * 1e6
        assert all(now_us - 60e6 < each["at_us"] < now_us + 1e6 for each in inflight)
    until(lambda: not api.get("session", client="slow")["session"]["connected"], "away")
    assert api.get("session", client="slow")["needed_bytes"] > 0
    with Wire(broker.port) as other:
        other.connect("other")
        other.publish("a", b"its PUBACK comes when the close is on the disk", 1)
    broker.kill()
    broker.start()
    found = api.get("session/history", client="slow")
    # The memory is gone with the process. What the log has remains, page by page.
    assert [each["event"] for each in found["events"]][-3:] == [
        "session_closed", "subscribed", "session_opened"
    ]  # fmt: skip
    assert api.get("session/history", client="stranger")["events"] == []
    page = api.get("session/history", client="slow", before=0)
    assert (page["events"], page["next"]) == ([], 0)


def test_a_moved_session_skips_or_repeats(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    with Wire(broker.port) as client:
        client.connect("mover", expiry_s=1000)
        client.subscribe(("in/#", 1))
    with Wire(broker.port) as publisher:
        publisher.connect("p")
        for number in range(10):
            publisher.publish(f"in/{number % 3}", b"%d" % number, qos=1)
            publisher.publish("out", b"-", qos=1)
    plan = {"to": "end", "dry_run": True}
    assert api.post("session/move", plan, client="mover")["skipped"] == 10
    moved = api.post("session/move", {"to": "end"}, client="mover")
    assert (moved["skipped"], moved["repeated"], moved["exact"]) == (10, 0, True)
    # The move itself may be a record.
    assert api.get("session", client="mover")["session"]["log_lag"] <= 2
    plan = {"to": "offsets", "offsets": moved["before"]}
    back = api.post("session/move", plan, client="mover")
    assert (back["skipped"], back["repeated"]) == (0, 10)

    broker.kill()
    broker.start()
    with Wire(broker.port) as client:
        assert client.connect("mover", clean=False, expiry_s=1000).session_present
        received = sorted(int(client.message().payload) for _ in range(10))
        assert received == list(range(10))
        # A connected client is disconnected, and continues at the new position.
        api.post("session/move", {"to": "start"}, client="mover")
        assert client.expect(DISCONNECT).reason == ADMINISTRATIVE_ACTION
    with Wire(broker.port) as client:
        client.connect("mover", clean=False, expiry_s=1000)
        assert sorted(int(client.message().payload) for _ in range(10)) == received
    with pytest.raises(Refused, match="400"):
        api.post("session/move", {"to": "offsets", "offsets": [1]}, client="mover")


def test_a_session_is_moved_during_its_replay(broker: Holdfast) -> None:
    """Its count has only what the replay would still send: here the last 3 of each topic."""
    api = Api(broker.admin_port)
    with Wire(broker.port) as publisher:
        publisher.connect("p")
        for number in range(20):
            publisher.publish(f"in/{number % 2}", b"%d" % number, qos=1)
    with Wire(broker.port) as client:
        client.connect("mover", expiry_s=1000, props=[(RECEIVE_MAXIMUM, 2)])
        client.subscribe(("$stream/@last:3/in/#", 1))
        first = [int(read_publish(client.expect(PUBLISH), 5).payload) for _ in range(2)]
        assert min(first) >= 14
    until(lambda: not api.get("session", client="mover")["session"]["connected"], "away")
    plan = {"to": "start", "dry_run": True}
    assert api.post("session/move", plan, client="mover")["repeated"] == 2
    moved = api.post("session/move", {"to": "end"}, client="mover")
    assert (moved["skipped"], moved["repeated"], moved["exact"]) == (4, 0, True)
    with Wire(broker.port) as publisher:
        publisher.connect("p")
        publisher.publish("in/0", b"100", qos=1)
    broker.kill()
    broker.start()
    with Wire(broker.port) as client:
        client.connect("mover", clean=False, expiry_s=1000)
        # What the client had not acknowledged comes again.
        assert sorted(int(client.message().payload) for _ in range(3)) == [*sorted(first), 100]
    until(lambda: not api.get("session", client="mover")["session"]["connected"], "away")
    back = api.post("session/move", {"to": "start"}, client="mover")
    assert back["skipped"] == 0
    with Wire(broker.port) as client:
        client.connect("mover", clean=False, expiry_s=1000)
        again = []
        with contextlib.suppress(TimeoutError):
            while True:
                again.append(int(client.message(1.0).payload))
        assert len(again) == back["repeated"], (again, back)


def test_every_node_of_a_cluster_answers_for_all(cluster: ClusterProcesses) -> None:
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, node in cluster.nodes.items():
            clients[name] = stack.enter_context(Wire(node.port))
            clients[name].connect(f"at-{name}", expiry_s=300)
            clients[name].subscribe(("t/#", 1))
            with Wire(node.port) as away:
                away.connect(f"left-{name}", expiry_s=300)
                away.subscribe(("t/#", 1))
        everywhere = apis(cluster)
        wanted = sorted(f"{word}-{name}" for word in ("at", "left") for name in cluster.nodes)
        for api in everywhere.values():
            until(lambda api=api: names(api.get("sessions")) == wanted, "all sessions are listed")
            page = api.get("sessions", limit=4)
            rest = api.get("sessions", limit=4, after=page["next"])
            assert names(page) + names(rest) == wanted
            assert (page["matched"], page["missing"]) == (6, [])
            rows = {row["client"]: row for row in api.get("clients")["sessions"]}
            assert {row["node"] for row in rows.values()} == set(cluster.nodes)
            assert api.get("session", client="at-n2")["session"]["node"] == "n2"

        # An operation at one node reaches the client at another.
        everywhere["n1"].post("session/disconnect", client="at-n2")
        assert clients["n2"].expect(DISCONNECT).reason == ADMINISTRATIVE_ACTION
        everywhere["n2"].delete("session", client="at-n3")
        until(lambda: is_closed(clients["n3"]), "the client of the ended session is disconnected")
        everywhere["n3"].delete("session", client="left-n1")
        gone = sorted(set(wanted) - {"at-n3", "left-n1"})
        for api in everywhere.values():
            until(lambda api=api: names(api.get("sessions")) == gone, "the ended ones are gone")


def test_a_session_of_a_cluster_is_moved_at_any_node(cluster: ClusterProcesses) -> None:
    everywhere = apis(cluster)
    with Wire(cluster.nodes["n1"].port) as client, Wire(cluster.nodes["n2"].port) as publisher:
        client.connect("mover", expiry_s=300)
        client.subscribe(("in/#", 1))
        publisher.connect("p")
        for number in range(6):
            publisher.publish(f"in/{number}", b"%d" % number, qos=1)
            client.message()
        moved = everywhere["n3"].post("session/move", {"to": "start"}, client="mover")
        assert moved["repeated"] == 6
        assert client.expect(DISCONNECT).reason == ADMINISTRATIVE_ACTION
    with Wire(cluster.nodes["n2"].port) as client:
        assert client.connect("mover", clean=False, expiry_s=300).session_present
        assert sorted(client.message().payload for _ in range(6)) == [b"%d" % n for n in range(6)]


def test_a_ban_reaches_every_node_of_a_cluster(cluster: ClusterProcesses) -> None:
    everywhere = apis(cluster)

    def banned(api: Api) -> list[str]:
        try:
            return [row["name"] for row in api.get("bans", kind="ban")["bans"]]
        except Refused:
            # A node that has just started serves no clients yet.
            return []

    with Wire(cluster.nodes["n2"].port) as client:
        client.connect("loud")
        found = everywhere["n1"].get("may", client="loud", action="subscribe", topic="a/#")
        assert (found["verdict"], found["connected"], found["node"]) == ("allowed", True, "n2")
        wanted = {"client": "loud", "duration_s": 3600, "reason": "too loud"}
        everywhere["n1"].post("ban", wanted)
        assert client.expect(DISCONNECT).reason == ADMINISTRATIVE_ACTION
    cluster.kill9("n3")
    until(lambda: everywhere["n1"].get("bans")["missing"], "the node is down")
    everywhere["n2"].post("ban", {"address": "192.0.2.0/24"})
    cluster.restart("n3")
    for name, node in cluster.nodes.items():
        api = everywhere[name]
        until(lambda api=api: banned(api) == ["192.0.2.0/24", "loud"], "the bans are everywhere")
        with Wire(node.port) as client:
            assert client.connect("loud").reason == BANNED
    everywhere["n3"].delete("ban", client="loud")
    everywhere["n3"].delete("ban", address="192.0.2.0/24")
    until(lambda: not banned(everywhere["n1"]), "no ban is left")
    with Wire(cluster.nodes["n1"].port) as client:
        client.connect("loud")
    page = everywhere["n2"].get("audit")["entries"]
    changes = [each["method"] for each in page if each["path"] == "/api/v1/ban"]
    assert changes == ["DELETE", "DELETE", "POST", "POST"]


def test_the_report_of_a_pipeline_is_seen_at_every_node(cluster: ClusterProcesses) -> None:
    everywhere = apis(cluster)
    table = {"name": "records", "layer": "bronze", "source": "the log", "rows": 7, "quarantined": 2}
    report = {
        "lake": "/lake", "host": "h", "state": "running", "began_us": 1, "every_s": 60,
        "tables": [table], "offsets": {},
    }  # fmt: skip
    everywhere["n1"].post("pipeline", {**report, "state": "ended"}, name="lake-1")
    everywhere["n3"].post("pipeline", report, name="lake-1")
    with Wire(cluster.nodes["n1"].port) as client:
        client.connect("p")
        client.publish("t", b"x", qos=1)
    [found] = everywhere["n2"].get("pipeline")["pipelines"]
    assert (found["state"], found["node"], found["rows"]) == ("running", "n3", 7)
    assert found["quarantined"] == 2
    assert found["lag"] == sum(found["ends"].values()) > 0
    assert 0 <= found["lag_s"] < 60
    done = {**report, "offsets": found["ends"]}
    everywhere["n3"].post("pipeline", done, name="lake-1")
    [found] = everywhere["n1"].get("pipeline")["pipelines"]
    assert found["lag"] < 5
    everywhere["n3"].post("pipeline", {**report, "offsets": {"9": 1}}, name="lake-1")
    [found] = everywhere["n1"].get("pipeline")["pipelines"]
    assert (found["lag"], found["lag_s"]) == (None, None)
    everywhere["n2"].delete("pipeline", name="lake-1")
    assert everywhere["n1"].get("pipeline")["pipelines"] == []
    with pytest.raises(Refused, match="404"):
        everywhere["n1"].delete("pipeline", name="lake-1")


def test_a_node_that_does_not_answer_is_named(cluster: ClusterProcesses, tmp_path: Path) -> None:
    api = apis(cluster)["n1"]
    cluster.pause("n3")
    try:
        missing = api.get("clients")["missing"]
        assert [each["node"] for each in missing] == ["n3"]
        assert missing[0]["reason"]
    finally:
        cluster.resume("n3")
    until(lambda: not api.get("clients")["missing"], "the node answers again")

"""Events, limits, drops and settings over the admin API."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.conftest import StartHoldfast
from tests.e2e.wire import Wire
from tests.support.api_client import Api, Refused


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses(directory, settings={"cluster": {"partitions": 4}}) as cluster:
        yield cluster


class Stream:
    """The events of a node, read by a thread while the block runs."""

    def __init__(self, port: int, path: str = "/api/v1/events") -> None:
        self.events: list[dict[str, Any]] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._path = path

    def __enter__(self) -> "Stream":
        self._connection.request("GET", self._path)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        assert self._answer.getheader("Content-Type", "").startswith("text/event-stream")
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def _read(self) -> None:
        try:
            for line in self._answer:
                if line.startswith(b"data: "):
                    self.events.append(json.loads(line[6:]))
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            return

    def __exit__(self, *_: object) -> None:
        sock = self._connection.sock
        if sock is not None:
            sock.shutdown(2)
        self._thread.join(10)
        self._connection.close()

    def has(self, condition: Callable[[dict[str, Any]], bool]) -> bool:
        return any(condition(event) for event in list(self.events))


def named(event: dict[str, Any], word: str, client: str) -> bool:
    notes = event.get("clients", {}).get("notes", [])
    return any(each["event"] == word and each["fields"]["client"] == client for each in notes)


def test_the_stream_has_connects_rates_and_health(broker: Holdfast) -> None:
    with Stream(broker.admin_port) as stream:
        until(lambda: stream.has(lambda event: event.get("ready") is True), "the health")
        with Wire(broker.port) as client:
            client.connect("visitor")
            client.publish("t", b"x", qos=1)
            until(
                lambda: stream.has(lambda event: named(event, "connected", "visitor")), "connected"
            )
        until(lambda: stream.has(lambda event: named(event, "disconnected", "visitor")), "gone")
        until(
            lambda: stream.has(lambda event: event.get("rates", {}).get("publish_received", 0) > 0),
            "the rate",
        )
        numbers = [event["number"] for event in stream.events if event["node"] == "n1"]
        assert numbers == sorted(set(numbers))


def test_a_stream_at_one_node_has_the_events_of_all(cluster: ClusterProcesses) -> None:
    with Stream(cluster.nodes["n1"].admin_port) as stream:
        until(lambda: stream.has(lambda event: len(event.get("leaders", {})) == 4), "the leaders")
        until(
            lambda: {event["node"] for event in list(stream.events)} == {"n1", "n2", "n3"}, "nodes"
        )
        with Wire(cluster.nodes["n3"].port) as client:
            client.connect("far")
            until(
                lambda: stream.has(
                    lambda event: event["node"] == "n3" and named(event, "connected", "far")
                ),
                "the client of another node",
            )
        api = Api(cluster.nodes["n2"].admin_port)
        assert len(api.get("cluster")["nodes"]) == 3
        drops = api.get("drops")
        assert [each["node"] for each in drops["nodes"]] == ["n1", "n2", "n3"]


def test_the_plan_of_a_drain_is_what_the_drain_does(cluster: ClusterProcesses) -> None:
    api = Api(cluster.nodes["n1"].admin_port)
    with Wire(cluster.nodes["n1"].port) as client:
        client.connect("writer")
        client.publish("t", b"x", qos=1)

    def at_rest() -> bool:
        status = cluster.status()
        replicas = api.get("cluster/replicas")["partitions"]
        return not status["moving"] + status["not_preferred"] and all(
            len(each["lags"]) == 2 for each in replicas
        )

    until(at_rest, "every partition has its preferred leader and two followers")
    replicas = api.get("cluster/replicas")["partitions"]
    assert [each["partition"] for each in replicas] == [0, 1, 2, 3]
    assert sum(each["end_offset"] for each in replicas) > 0
    refused = api.get("cluster/plan", action="remove", node="n2")
    assert not refused["possible"]
    assert "drain it first" in refused["reason"]
    plan = api.get("cluster/plan", action="drain", node="n2")
    assert plan["possible"]
    assert plan["leaders"]["n2"] == 0
    before_us = api.get("timeline")["now_us"]
    cluster.nodes["n1"].admin("/cluster/drain?node=n2", "POST")

    def as_planned() -> bool:
        now = cluster.status()["partitions"]
        return all(
            (now[each["partition"]]["leader"], now[each["partition"]]["replicas"])
            == (each["next_leader"], each["next_replicas"])
            for each in plan["partitions"]
        )

    until(as_planned, "the plan is carried out")
    timeline = Api(cluster.nodes["n3"].admin_port).get("timeline", since_us=before_us)
    assert [each["node"] for each in timeline["nodes"]] == ["n1", "n2", "n3"]
    moved = {
        each["partition"]
        for step in timeline["steps"]
        for each in step["partitions"]
        if each["leader_before"] == "n2" != each["leader_after"]
    }
    assert moved == {each["partition"] for each in plan["partitions"] if each["leader"] == "n2"}
    everything = Api(cluster.nodes["n2"].admin_port).get("timeline")
    assert all(each["figures"]["at_us"] for each in everything["nodes"])
    cluster.nodes["n1"].admin("/cluster/undrain?node=n2", "POST")
    until(cluster.is_healthy, "healthy again")


def test_a_live_trace_follows_a_client_a_topic_and_an_address(cluster: ClusterProcesses) -> None:
    port = cluster.nodes["n1"].admin_port
    path = "/api/v1/trace/live?seconds=60&"

    def records(stream: Stream) -> list[dict[str, Any]]:
        return [each for event in list(stream.events) for each in event.get("records", [])]

    def notes(stream: Stream) -> list[tuple[str, str]]:
        found = [each for event in list(stream.events) for each in event.get("notes", [])]
        return [(each["event"], each["fields"].get("client", "")) for each in found]

    with (
        Stream(port, path + "client=traced") as of_client,
        Stream(port, path + "topic=in/%2B") as of_topic,
        Stream(port, path + "address=127.0.0.1") as of_address,
    ):
        with Wire(cluster.nodes["n2"].port) as client, Wire(cluster.nodes["n3"].port) as other:
            client.connect("traced", expiry_s=60)
            client.subscribe(("in/#", 1))
            other.connect("other")
            other.publish("in/1", b"by other", qos=1)
            client.publish("in/2/3", b"by traced", qos=1)
        for stream in (of_client, of_address):
            until(lambda stream=stream: ("connected", "traced") in notes(stream), "the connect")
        until(lambda: ("connected", "other") in notes(of_address), "the other's connect")
        until(
            lambda: any(each["content"].get("text") == "by traced" for each in records(of_client)),
            "the client's message",
        )
        until(lambda: bool(records(of_topic)), "the topic's message")
    assert {each["client"] for each in records(of_client)} == {"traced"}
    assert [each["content"]["text"] for each in records(of_topic)] == ["by other"]
    assert ("connected", "other") not in notes(of_client)
    with pytest.raises(Refused, match="one of client"):
        Api(port).get("trace/live")


def test_limits_drops_and_settings(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast(
        {"limits": {"retained_max": 77}, "security": {"allow_anonymous": False}}
    )
    api = Api(broker.admin_port)
    for node in api.get("limits")["nodes"]:
        assert {each["name"]: each["most"] for each in node["limits"]}["limits.retained_max"] == 77
    with Wire(broker.port) as client:
        assert client.connect("stranger").reason >= 0x80

    def refusals() -> list[dict[str, Any]]:
        return [each for each in api.get("drops")["nodes"] if each["cases"]]

    until(lambda: bool(refusals()), "the refusal is a case")
    [node] = refusals()
    assert node["refused"]["connections"] == 1
    assert node["cases"][0]["fields"]["client"] == "stranger"
    rows = {each["key"]: each for each in api.get("settings")["settings"]}
    assert rows["limits.retained_max"]["value"] == 77
    assert "holdfast.toml" in rows["limits.retained_max"]["origin"]
    assert rows["limits.outbox_bytes"]["is_default"]

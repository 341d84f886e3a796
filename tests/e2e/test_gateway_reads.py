"""A gateway stores no record of the log. Its clients resume and replay, and its admin port says
where the log is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.log import LogClient
from tests.e2e import wire
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.wire import Wire
from tests.support.api_client import Api, Refused

QUEUED = 10_000
PIECE = 500
EXPIRY_S = 600
WAIT_S = 60.0


class Gateway(ClusterNode):
    def command(self) -> list[str]:
        return [*super().command(), "--role", "gateway"]


class Site:
    """Three nodes with the log, and a gateway."""

    def __init__(self, cluster: ClusterProcesses, gateway: Gateway) -> None:
        self.cluster = cluster
        self.gateway = gateway

    @property
    def nodes(self) -> list[ClusterNode]:
        return list(self.cluster.nodes.values())


@contextmanager
def site_in(directory: Path, settings: dict[str, dict[str, Any]]) -> Iterator[Site]:
    with ClusterProcesses(directory, 3, settings) as cluster:
        gateway = Gateway(directory / "g1", "g1", cluster.secret_file, settings)
        gateway.join = [node.peer_address for node in cluster.nodes.values()]
        gateway.start()
        try:
            until(lambda: gateway.readiness() == 200, "the gateway is ready")
            yield Site(cluster, gateway)
        finally:
            gateway.kill()
            log = gateway.log_text()
        assert "Traceback" not in log, log[-6000:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_in(tmp_path_factory.mktemp("site"), {"cluster": {"partitions": 6}}) as found:
        yield found


def publish(port: int, topics: list[str], count: int, rest: bytes = b"") -> None:
    """QoS 1, many at a time. The payloads count from 0, with `rest` behind a blank."""
    with Wire(port, 5, WAIT_S) as one:
        one.connect("meter")
        for begin in range(0, count, PIECE):
            end = min(count, begin + PIECE)
            frames = [
                wire.publish(
                    topics[number % len(topics)], b"%d %b" % (number, rest), 1, number - begin + 1
                )
                for number in range(begin, end)
            ]
            one.send(b"".join(frames))
            for _ in frames:
                one.expect(wire.PUBACK)


def receive(one: Wire, count: int) -> list[int]:
    return [int(one.message(WAIT_S).payload.split(b" ")[0]) for _ in range(count)]


def ordered(numbers: list[int], topics: int) -> bool:
    """The messages of each topic came in their order."""
    return all(
        sorted(own) == own
        for own in ([n for n in numbers if n % topics == t] for t in range(topics))
    )


@pytest.mark.parametrize("qos", [1, 2])
def test_a_session_resumes_with_what_waited(site: Site, qos: int) -> None:
    """It was away, and comes back to the gateway. Halfway the node dies that leads most."""
    topics = [f"wait{qos}/{number}" for number in range(20)]
    client = f"sleeper{qos}"
    with Wire(site.gateway.port, 5, WAIT_S) as first:
        first.connect(client, False, EXPIRY_S)
        first.subscribe((f"wait{qos}/#", qos))
    count = QUEUED if qos == 1 else QUEUED // 5
    publish(site.nodes[0].port, topics, count)
    with Wire(site.gateway.port, 5, WAIT_S) as again:
        assert again.connect(client, False, EXPIRY_S).session_present
        numbers = receive(again, count // 2)
        victim = site.cluster.leader_of(0)
        site.cluster.kill9(victim)
        try:
            numbers += receive(again, count - count // 2)
        finally:
            site.cluster.restart(victim)
            site.cluster.wait_healthy()
    assert sorted(numbers) == list(range(count)), "once each"
    assert ordered(numbers, len(topics))


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("earliest", list(range(300))),
        ("last:3", list(range(294, 300))),
        ("-1h", list(range(300))),
    ],
)
def test_a_replay_goes_over_to_what_is_new(site: Site, start: str, expected: list[int]) -> None:
    name = start.replace(":", "-")
    publish(site.nodes[1].port, [f"past/{name}/a", f"past/{name}/b"], 300)
    with Wire(site.gateway.port, 5, WAIT_S) as one:
        one.connect("")
        assert one.subscribe((f"$stream/@{start}/past/{name}/#", 1)) == [1]
        assert sorted(receive(one, len(expected))) == expected
        for number, port in enumerate((site.nodes[2].port, site.gateway.port)):
            with Wire(port, 5, WAIT_S) as writer:
                writer.connect("")
                writer.publish(f"past/{name}/a", b"%d" % number, qos=1)
            assert receive(one, 1) == [number]


def test_the_admin_port_says_which_node_has_the_log(site: Site) -> None:
    """Small reads are done for the client. For large ones it has to go there."""
    publish(site.nodes[0].port, ["asked/x"], 10)
    api, node = Api(site.gateway.admin_port), Api(site.nodes[0].admin_port)
    until(lambda: api.get("log")["ranges"] == node.get("log")["ranges"], "equal ranges")
    found = api.get("log")
    ports = {each.admin_port for each in site.nodes}
    assert found["stored"] == []
    assert {int(each.rpartition(":")[2]) for each in found["servers"]} == ports
    assert (node.get("log")["stored"], node.get("log")["servers"]) == (list(range(6)), [])
    for path in ("log/offsets", "log/0/offset"):
        assert api.get(path, timestamp_us=0) == node.get(path, timestamp_us=0)
    with pytest.raises(Refused, match="this node does not store partition 1: ask n") as refused:
        api.post("log/read", {"ranges": [[1, 0, 5]]})
    assert refused.value.status == 421
    assert all(f":{port}" in refused.value.text for port in ports)


def test_the_console_of_a_gateway_shows_the_log(site: Site) -> None:
    """A node with the log replies in its place, also with its refusals."""
    publish(site.nodes[0].port, ["shown/x"], 30)
    with Wire(site.gateway.port, 5, WAIT_S) as one:
        one.connect("shown", False, EXPIRY_S)
    gateway, node = Api(site.gateway.admin_port), Api(site.nodes[1].admin_port)
    query: dict[str, object] = {"filter": "shown/#", "limit": 40}
    for each in (gateway, *(Api(other.admin_port) for other in site.nodes)):
        # A node may apply a record after its publisher has the PUBACK.
        until(lambda: len(each.get("log/records", **query)["records"]) == 30, "all is applied")  # noqa: B023
    page = gateway.get("log/records", **query)
    assert page["records"] == node.get("log/records", **query)["records"]
    place = {each: page["records"][0][each] for each in ("partition", "offset")}
    assert gateway.get("log/record", **place) == node.get("log/record", **place)
    assert gateway.get("topics", prefix="shown")["topics"]
    events = gateway.get("session/history", client="shown")["events"]
    assert {"log", "memory"} >= {each["source"] for each in events} != set()
    with pytest.raises(Refused) as refused:
        gateway.get("log/record", partition=0, offset=1 << 40)
    assert refused.value.status == 404
    with pytest.raises(Refused) as refused:
        gateway.get("log/records", limit=0)
    assert refused.value.status == 400


def test_a_program_that_knows_the_gateway_alone_reads_the_log(site: Site) -> None:
    publish(site.nodes[0].port, ["file/x"], 50)
    client = LogClient(f"127.0.0.1:{site.gateway.admin_port}")
    with client.read("file/#") as cursor:
        assert [int(each.payload.split()[0]) for each in cursor] == list(range(50))


def test_retention_waits_for_a_session_of_the_gateway(tmp_path: Path) -> None:
    """The nodes with the log know how far each session is, whoever serves it."""
    log = {"segment_bytes": 65_536, "snapshot_bytes": 65_536}
    settings = {
        "cluster": {"partitions": 2},
        "log": log,
        "log.retention": {"bytes": 131_072},
    }
    with site_in(tmp_path, settings) as site:
        topic = "meter/1"
        writer = site.nodes[0]
        partition = site.cluster.partition_of(topic)

        def first() -> int:
            """The start of the partition at the node that has removed most."""
            found = [Api(node.admin_port).get("log")["ranges"][partition][0] for node in site.nodes]
            return max(found)

        with Wire(site.gateway.port, 5, WAIT_S) as one:
            one.connect("late", False, EXPIRY_S)
            one.subscribe((topic, 1))
        publish(writer.port, [topic], 400, bytes(4000))
        behind = first()
        with Wire(site.gateway.port, 5, WAIT_S) as one:
            assert one.connect("late", False, EXPIRY_S).session_present
            assert receive(one, 400) == list(range(400))
            # Without the session, the log would have been shortened before.
            publish(writer.port, ["other"], 100, bytes(4000))
            until(lambda: first() > behind + 100, "retention goes on behind the session")
        assert behind <= 1

"""A Spark task's reading of a cluster's log, over the deaths of the nodes it reads from."""

from collections.abc import Callable, Iterator

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

pytest.importorskip("pyarrow")

import holdfast.client.admin_connection as admin_connection
import holdfast.client.log.reading.reader_http as reader_http
from holdfast.client.log.reading import offsets
from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.servers import Assignment, Servers
from holdfast.log.columns.decode import decode_rows
from tests.e2e.cluster_processes import ClusterProcesses, until

MESSAGES = 1200
TOPICS = 30
WAIT_S = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with ClusterProcesses(tmp_path_factory.mktemp("cluster")) as found:
        publish(found, range(MESSAGES))
        yield found


@pytest.fixture(autouse=True)
def _small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_http, "FETCH_BYTES", 4000)
    monkeypatch.setattr(admin_connection, "TIMEOUT_S", 2.0)


@pytest.fixture
def servers(cluster: ClusterProcesses) -> Iterator[Servers]:
    cluster.wait_healthy()
    found = Servers([("127.0.0.1", node.admin_port) for node in cluster.nodes.values()])
    yield found
    found.close()


def publish(cluster: ClusterProcesses, numbers: range) -> None:
    """At QoS 1; returns when all are acknowledged."""
    client = Client(CallbackAPIVersion.VERSION2)
    client.max_inflight_messages_set(200)
    client.connect("127.0.0.1", next(iter(cluster.ports.values())))
    client.loop_start()
    sent = [client.publish(f"t/{number % TOPICS}", b"%d" % number, 1) for number in numbers]
    for each in sent:
        each.wait_for_publish(WAIT_S)
        assert each.is_published()
    client.disconnect()
    client.loop_stop()


def read(
    assignment: Assignment, after_chunk: Callable[[int], None] = lambda number: None
) -> list[tuple[int, int, bytes]]:
    """Partition, offset and payload of each message."""
    coverage = Coverage(assignment.ranges, fail_on_data_loss=True)
    found = []
    chunks = reader_http.read_ranges(assignment.servers, assignment.ranges, coverage)
    for number, chunk in enumerate(chunks):
        for batch in decode_rows(chunk):
            found += [
                (row["partition"], row["offset"], row["payload"]) for row in batch.to_pylist()
            ]
        after_chunk(number)
    assert coverage.done
    return found


def check(found: list[tuple[int, int, bytes]]) -> None:
    """Every message once, in order within its partition."""
    places = [(partition, offset) for partition, offset, _ in found]
    assert len(set(places)) == len(places)
    assert sorted(places, key=lambda place: place[0]) == sorted(places)
    numbers = [int(payload) for _, _, payload in found if payload.isdigit()]
    assert sorted(numbers) == list(range(MESSAGES))


def everything(servers: Servers) -> list[OffsetRange]:
    bounds = servers.bounds()
    return offsets.ranges_to_read({}, {p: bound.end for p, bound in bounds.items()}, bounds)


def leaders_that_all_know(
    cluster: ClusterProcesses, servers: Servers, ranges: list[OffsetRange]
) -> dict[int, int]:
    """Partition -> admin port of its leader; {} unless each server has all ranges, and knows it."""
    everything(servers)
    status = cluster.status()["partitions"]
    ports = {name: node.admin_port for name, node in cluster.nodes.items()}
    leaders = {p: ports.get(status[p]["leader"], 0) for p in range(servers.partitions)}
    states = servers._states
    knows = {
        port: {p for p, leader in leaders.items() if leader == port} for port in ports.values()
    }
    if {state.server[1]: set(state.leads) for state in states} != knows:
        return {}
    return leaders if all(state.has(item) for state in states for item in ranges) else {}


def test_followers_are_read(cluster: ClusterProcesses, servers: Servers) -> None:
    ranges = everything(servers)
    # A busy machine lets a follower learn late what is committed, or a leader change. Until then
    # the range of a follower that lags is read from its leader.
    leaders: dict[int, int] = {}

    def all_know() -> bool:
        nonlocal leaders
        leaders = leaders_that_all_know(cluster, servers, ranges)
        return len(set(leaders.values())) > 1

    until(all_know, "each server has all records, and several lead")
    for whole in (False, True):
        work = servers.assign(ranges, 3, whole=whole)
        assert 1 < len(work) <= 3
        for each in work:
            assert len(each.servers) == 3
            assert all(leaders[item.partition] != each.servers[0][1] for item in each.ranges)
        check([row for each in work for row in read(each)])


@pytest.mark.parametrize("paused", [False, True], ids=["kill -9", "silent"])
def test_the_node_that_is_read_from_dies(
    cluster: ClusterProcesses, servers: Servers, paused: bool
) -> None:
    ranges = everything(servers)
    assignment = servers.assign(ranges, 1, whole=True)[0]
    names = {node.admin_port: name for name, node in cluster.nodes.items()}
    victim = names[assignment.servers[0][1]]

    harmed = False

    def harm(number: int) -> None:
        nonlocal harmed
        if number == 2:
            harmed = True
            if paused:
                cluster.pause(victim)
            else:
                cluster.kill9(victim)

    try:
        check(read(assignment, harm))
        assert harmed
        # The rest of the cluster goes on, and so does the driver.
        assert servers.bounds(offsets.Offsets((i.partition, i.end) for i in ranges))
    finally:
        if paused:
            cluster.resume(victim)
        else:
            cluster.restart(victim)


def test_a_node_that_has_just_started_is_no_loss(
    cluster: ClusterProcesses, servers: Servers
) -> None:
    ends = {item.partition: item.end for item in everything(servers)}
    # Nobody is up: each learns anew what is committed.
    cluster.kill9(*cluster.nodes)
    cluster.restart(*cluster.nodes)
    bounds = servers.bounds(ends)
    assert all(bounds[partition].end >= end for partition, end in ends.items())


def test_a_range_that_one_node_has_not_got(cluster: ClusterProcesses, servers: Servers) -> None:
    ranges = everything(servers)
    address = ("127.0.0.1", cluster.nodes["n1"].admin_port)
    beyond = [OffsetRange(i.partition, i.start, i.end + 10**6) for i in ranges[:1]]
    coverage = Coverage(beyond, fail_on_data_loss=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_http, "PATIENCE_S", 0.3)
        with pytest.raises(admin_connection.AdminError, match="committed before"):
            list(reader_http.read_ranges([address], beyond, coverage))
    assert coverage.next[ranges[0].partition] >= ranges[0].end

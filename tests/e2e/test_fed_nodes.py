"""Real nodes that store only the partitions of which they are replicas, and serve everything."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from holdfast.client.log import LogClient
from tests.e2e import wire
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses
from tests.e2e.wire import Wire
from tests.support import mqttjs
from tests.support.api_client import Api
from tests.support.waiting import until

WAIT_S = 90.0
EXPIRY_S = 600
USE_ANOTHER_SERVER = 0x9C
SERVER_REFERENCE = 0x1C
PIECE = 200
ROUNDS = 15


def stored(node: ClusterNode) -> set[int]:
    """The partitions in the log of a node."""
    return set(Api(node.admin_port).get("log")["stored"])


def is_settled(cluster: ClusterProcesses) -> bool:
    """Each partition is in the logs of its replicas, and in no other."""
    partitions = cluster.status().get("partitions") or []
    running = [node for node in cluster.running if node.has_data]
    for node in running:
        wanted = {each["partition"] for each in partitions if node.node_id in each["replicas"]}
        if any(each["adding"] for each in partitions) or stored(node) != wanted:
            return False
    return bool(partitions)


def settle(cluster: ClusterProcesses) -> None:
    cluster.wait_healthy()
    until(lambda: is_settled(cluster), "each node stores what it replicates", WAIT_S)


def without_log_of(cluster: ClusterProcesses, topic: str) -> list[ClusterNode]:
    """The nodes that do not store the partition of a topic."""
    partition = cluster.partition_of(topic)
    replicas = cluster.status()["partitions"][partition]["replicas"]
    return [node for name, node in cluster.nodes.items() if name not in replicas and node.runs]


def topic_fed_to(cluster: ClusterProcesses, name: str, prefix: str) -> str:
    """A topic whose partition is not in the log of a node."""
    for number in range(1000):
        topic = f"{prefix}/{number}"
        if any(node.node_id == name for node in without_log_of(cluster, topic)):
            return topic
    raise AssertionError(f"{name} stores everything")


def publish(port: int, name: str, topics: list[str], count: int, begin: int = 0) -> None:
    """QoS 1, many at a time. The payloads are numbers."""
    with Wire(port, 5, WAIT_S) as one:
        one.connect(name)
        for start in range(begin, begin + count, PIECE):
            end = min(begin + count, start + PIECE)
            one.send(
                b"".join(
                    wire.publish(topics[n % len(topics)], b"%d" % n, 1, n - start + 1)
                    for n in range(start, end)
                )
            )
            for _ in range(start, end):
                one.expect(wire.PUBACK)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    settings = {"cluster": {"partitions": 10}}
    with ClusterProcesses(tmp_path_factory.mktemp("five"), 5, settings) as processes:
        settle(processes)
        yield processes


def test_each_partition_is_in_the_logs_of_its_replicas(cluster: ClusterProcesses) -> None:
    settle(cluster)
    counts = [len(stored(node)) for node in cluster.nodes.values()]
    assert sum(counts) == 30
    assert max(counts) <= 7, counts


MQTTJS = """
const mqtt = require(process.argv[2]);
for (const port of process.argv.slice(3)) {
  const client = mqtt.connect(`mqtt://127.0.0.1:${port}`, { protocolVersion: 5 });
  client.on("error", (error) => { console.error(String(error)); process.exit(1); });
  client.on("connect", () => client.subscribe("all/#", { qos: 2 }));
  client.on("message", (topic, payload) => console.log(`${port} ${topic} ${payload}`));
}
"""


class Readers:
    """Subscribers of `all/#` at all nodes: paho, mosquitto_sub, and MQTT.js if npm has it."""

    def __init__(self, stack: ExitStack, ports: list[int], directory: Path) -> None:
        self._paho: dict[int, list[str]] = {}
        self._files: dict[tuple[str, int], Path] = {}
        self._names = [("paho", port) for port in ports]
        for port in ports:
            found = self._paho[port] = []
            client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
            client.on_message = lambda _client, _data, message, found=found: found.append(
                f"{message.topic} {message.payload.decode()}"
            )
            client.connect("127.0.0.1", port)
            client.subscribe("all/#", 2)
            client.loop_start()
            stack.callback(client.loop_stop)
            stack.callback(client.disconnect)
            command = ["mosquitto_sub", "-p", str(port), "-V", "5", "-q", "2", "-t", "all/#"]
            self._start(stack, "mosquitto_sub", port, [*command, "-F", "%t %p"], directory)
        if mqttjs.NODE and mqttjs.NPM and (library := mqttjs.find(directory / "npm")):
            script = directory / "readers.cjs"
            script.write_text(MQTTJS)
            command = [mqttjs.NODE, str(script), str(library), *map(str, ports)]
            self._start(stack, "MQTT.js", 0, command, directory)
            self._names += [("MQTT.js", port) for port in ports]

    def _start(
        self, stack: ExitStack, name: str, port: int, command: list[str], directory: Path
    ) -> None:
        path = self._files[name, port] = directory / f"{name}-{port}"
        process = stack.enter_context(subprocess.Popen(command, stdout=path.open("w")))
        stack.callback(process.terminate)
        if port:
            self._names.append((name, port))

    def received(self) -> dict[tuple[str, int], list[str]]:
        """By client and port the topic and payload of each message, in order."""
        texts = {key: path.read_text().splitlines() for key, path in self._files.items()}
        found = {key: texts[key] for key in texts if key[1]}
        found |= {("paho", port): list(each) for port, each in self._paho.items()}
        for line in texts.get(("MQTT.js", 0), []):
            port, _, text = line.partition(" ")
            found.setdefault(("MQTT.js", int(port)), []).append(text)
        return {key: found.get(key, []) for key in self._names}


def test_every_client_receives_everything_in_order(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    """Publishers and subscribers are at all nodes, so most of them are at one without the log."""
    settle(cluster)
    ports = [node.port for node in cluster.nodes.values()]
    with ExitStack() as stack:
        readers = Readers(stack, ports, tmp_path)
        writers = [stack.enter_context(Wire(port, 5, WAIT_S)) for port in ports]
        for number, writer in enumerate(writers):
            writer.connect(f"all-writer-{number}")

        def have_begun() -> bool:
            writers[0].publish("all/begin", b"0", 1)
            return all(readers.received().values())

        until(have_begun, "all readers have subscribed", WAIT_S)
        for number in range(ROUNDS):
            for place, writer in enumerate(writers):
                for qos in range(3):
                    writer.publish(f"all/{qos}/{place}", b"%d" % number, qos)
        for writer in writers:
            writer.publish("all/end", b"0", 1)
        count = ROUNDS * len(writers) * 3
        until(
            lambda: all(
                sum(not text.startswith("all/begin") for text in texts) >= count + len(writers)
                for texts in readers.received().values()
            ),
            "all messages",
            WAIT_S,
        )
        for client, texts in readers.received().items():
            found: dict[str, list[int]] = {}
            for text in texts:
                topic, _, payload = text.partition(" ")
                if topic.count("/") == 2:
                    found.setdefault(topic, []).append(int(payload))
            topics = [f"all/{qos}/{place}" for qos in range(3) for place in range(len(writers))]
            assert found == {topic: list(range(ROUNDS)) for topic in topics}, client


def test_what_was_stored_before_is_read_at_every_node(cluster: ClusterProcesses) -> None:
    """Retained messages, a session that was away, replays and the log for programs."""
    settle(cluster)
    name = "n2"
    topic = topic_fed_to(cluster, name, "past")
    port = cluster.ports[name]
    with Wire(port, 5, WAIT_S) as one:
        one.connect("away", True, EXPIRY_S)
        one.subscribe((topic, 1))
    publish(cluster.ports["n1"], "past-writer", [topic], 500)
    with Wire(cluster.ports["n3"], 5, WAIT_S) as one:
        one.connect("keeper")
        one.publish(topic, b"500", 1, retain=True)
    with resumed(port, "away") as one:
        assert [int(one.message().payload) for _ in range(501)] == list(range(501))
    for start, expected in (("earliest", range(501)), ("last:3", range(498, 501))):
        with Wire(port, 5, WAIT_S) as one:
            one.connect("")
            assert one.subscribe((f"$stream/@{start}/{topic}", 1)) == [1]
            assert [int(one.message().payload) for _ in expected] == list(expected)
    with Wire(port, 5, WAIT_S) as one:
        one.connect("")
        one.subscribe((topic, 1))
        assert one.message().payload == b"500"
    with LogClient(f"127.0.0.1:{cluster.nodes[name].admin_port}").read(topic) as cursor:
        assert [int(each.payload) for each in cursor] == list(range(501))
    query: dict[str, object] = {"filter": topic, "limit": 600}
    pages = [Api(node.admin_port).get("log/records", **query) for node in cluster.nodes.values()]
    assert [len(page["records"]) for page in pages] == [501] * 5
    place = {each: pages[0]["records"][0][each] for each in ("partition", "offset")}
    for node in cluster.nodes.values():
        api = Api(node.admin_port)
        assert api.get("log/record", **place)["record"]["topic"] == topic
        assert sum(api.get("log/counts", filter=topic)["counts"]) == 501
        assert api.get("trace", **place)["record"]["topic"] == topic


def test_a_group_shares_what_its_nodes_do_not_store(cluster: ClusterProcesses) -> None:
    settle(cluster)
    topics = [f"jobs/{number}" for number in range(20)]
    with ExitStack() as stack:
        members = [stack.enter_context(Wire(node.port, 5, 2.0)) for node in cluster.nodes.values()]
        for number, member in enumerate(members):
            member.connect(f"member-{number}", True, EXPIRY_S)
            member.subscribe(("$share/crew/jobs/#", 1))
        publish(cluster.ports["n5"], "work-writer", topics, 400)
        found: list[int] = []

        def take() -> bool:
            for member in members:
                while True:
                    try:
                        found.append(int(member.message(0.1).payload))
                    except TimeoutError:
                        break
            return len(found) >= 400

        until(take, "400 shared messages", WAIT_S)
        assert sorted(found) == list(range(400))


@contextmanager
def resumed(port: int, client_id: str) -> Iterator[Wire]:
    """A connection that has resumed its session. A node that lags refuses it and names another one,
    to which every client goes then."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with Wire(port, 5, WAIT_S) as one:
            connack = one.connect(client_id, False, EXPIRY_S)
            if connack.reason != USE_ANOTHER_SERVER:
                assert connack.session_present, connack
                yield one
                return
        assert time.monotonic() < deadline, connack
        servers = str(connack.value(SERVER_REFERENCE))
        port = int(servers.split()[0].rpartition(":")[2])


def piped(port: int, name: str, topic: str, qos: int) -> "subprocess.Popen[str]":
    """mosquitto_pub, which publishes each line of its input."""
    command = ["mosquitto_pub", "-p", str(port), "-V", "5", "-i", name, "-q", str(qos), "-l"]
    return subprocess.Popen([*command, "-t", topic], stdin=subprocess.PIPE, text=True)


@pytest.mark.parametrize("qos", [1, 2])
def test_the_leader_is_killed_and_then_the_node_of_the_reader(
    cluster: ClusterProcesses, qos: int
) -> None:
    settle(cluster)
    topic = topic_fed_to(cluster, "n1", f"killed{qos}")
    leader = cluster.leader_of(cluster.partition_of(topic))
    [other] = [node for node in without_log_of(cluster, topic) if node.node_id != "n1"]
    lines = [str(number) for number in range(1500)]
    with Wire(cluster.ports["n1"], 5, WAIT_S) as reader:
        reader.connect(f"reader-{qos}", True, EXPIRY_S)
        reader.subscribe((topic, 2))
        writer = piped(other.port, f"killed-writer-{qos}", topic, qos)
        assert writer.stdin is not None
        for number, line in enumerate(lines):
            writer.stdin.write(f"{line}\n")
            writer.stdin.flush()
            if number == 700:
                cluster.kill9(leader)
        writer.stdin.close()
        received = [reader.message().payload.decode() for _ in range(1000)]
        assert writer.wait(WAIT_S) == 0
    cluster.kill9("n1")
    with resumed(other.port, f"reader-{qos}") as reader:
        # Those that were sent to the killed node may come again, at QoS 1 only as duplicates.
        while not received or received[-1] != lines[-1]:
            received.append(reader.message().payload.decode())
    cluster.restart(leader, "n1")
    first: dict[str, None] = dict.fromkeys(received)
    assert list(first) == lines
    settle(cluster)


def test_one_node_joins_and_one_is_drained_under_load(cluster: ClusterProcesses) -> None:
    """Acknowledged messages arrive once and in order, at nodes whose logs change meanwhile."""
    settle(cluster)
    topics = [f"moves/{number}" for number in range(30)]
    publish(cluster.ports["n1"], "ballast", [f"ballast/{n}" for n in range(50)], 5000)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Wire(cluster.ports[name], 5, WAIT_S)) for name in ("n2", "n4")
        ]
        for number, reader in enumerate(readers):
            reader.connect(f"mover-{number}", True, EXPIRY_S)
            reader.subscribe(("moves/#", 1))
        sent = 0
        cluster.add_node()
        publish(cluster.ports["n1"], "moves-writer", topics, 600, sent)
        sent += 600
        settle(cluster)
        status, body = cluster.nodes["n1"].admin("/cluster/drain?node=n5", "POST")
        assert status == 200, body

        def is_drained() -> bool:
            partitions = cluster.status()["partitions"]
            return not any("n5" in (*each["replicas"], *each["adding"]) for each in partitions)

        publish(cluster.ports["n1"], "moves-writer", topics, 600, sent)
        sent += 600
        until(is_drained, "n5 is a replica of nothing", WAIT_S)
        until(lambda: not stored(cluster.nodes["n5"]), "n5 stores nothing", WAIT_S)
        publish(cluster.ports["n6"], "moves-writer", topics, 100, sent)
        sent += 100
        for reader in readers:
            numbers = [int(reader.message().payload) for _ in range(sent)]
            assert sorted(numbers) == list(range(sent))
            for place in range(len(topics)):
                own = [number for number in numbers if number % len(topics) == place]
                assert own == sorted(own)
    assert cluster.nodes["n1"].admin("/cluster/undrain?node=n5", "POST")[0] == 200
    settle(cluster)


@pytest.mark.parametrize("count", [2, 3])
def test_one_replica_of_each_partition(tmp_path: Path, count: int) -> None:
    """Each partition is in the log of one node. The others serve it as well."""
    settings = {"cluster": {"partitions": 6, "replication_factor": 1, "min_insync": 1}}
    with ClusterProcesses(tmp_path, count, settings) as cluster:
        settle(cluster)
        sets = [stored(node) for node in cluster.nodes.values()]
        assert sorted(partition for each in sets for partition in each) == list(range(6))
        topics = [f"one/{number}" for number in range(12)]
        port = cluster.ports["n2"]
        with Wire(port, 5, WAIT_S) as reader:
            reader.connect("one-reader", True, EXPIRY_S)
            reader.subscribe(("one/#", 2))
            publish(cluster.ports["n1"], "one-writer", topics, 600)
            assert sorted(int(reader.message().payload) for _ in range(600)) == list(range(600))
        publish(cluster.ports["n1"], "one-writer", topics, 100, 600)
        cluster.kill9("n1")
        cluster.restart("n1")
        settle(cluster)
        assert [stored(node) for node in cluster.nodes.values()] == sets
        publish(port, "one-writer", topics, 100, 700)
        with resumed(cluster.ports["n1"], "one-reader") as reader:
            numbers = [int(reader.message().payload) for _ in range(200)]
            assert sorted(numbers) == list(range(600, 800))
        with LogClient(f"127.0.0.1:{cluster.nodes['n1'].admin_port}").read("one/#") as cursor:
            assert sorted(int(each.payload) for each in cursor) == list(range(800))


def test_a_disk_has_its_share_and_a_join_moves_one(tmp_path: Path) -> None:
    """Five nodes with three replicas: each disk has 3/5 of the bytes. A sixth node gets 3/6 of
    them, and no partition moves between the others."""
    settings = {"cluster": {"partitions": 20}}
    with ClusterProcesses(tmp_path, 5, settings) as cluster:
        settle(cluster)
        # Before any message, so that no log is forgotten later.
        topics = [f"share/{number}" for number in range(400)]
        with Wire(cluster.ports["n1"], 5, WAIT_S) as one:
            one.connect("share")
            for start in range(0, 4000, PIECE):
                one.send(
                    b"".join(
                        wire.publish(topics[n % 400], bytes(2000), 1, n - start + 1)
                        for n in range(start, start + PIECE)
                    )
                )
                for _ in range(PIECE):
                    one.expect(wire.PUBACK)
        nodes = dict(cluster.nodes)
        sizes = {name: log_bytes(node) for name, node in nodes.items()}
        share = sum(sizes.values()) / 5
        assert share == pytest.approx(0.6 * 4000 * 2000, rel=0.2)
        assert all(size == pytest.approx(share, rel=0.25) for size in sizes.values()), sizes
        before = {name: stored(node) for name, node in nodes.items()}
        joined = cluster.add_node()
        cluster.wait_healthy()
        # A node stores everything until it knows that the others do not need it.
        until(lambda: is_replica_of(cluster, joined) >= 9, "the share of the sixth node", WAIT_S)
        settle(cluster)
        after = {name: stored(node) for name, node in nodes.items()}
        assert all(after[name] <= before[name] for name in nodes), "others moved as well"
        assert log_bytes(joined) == pytest.approx(0.5 * 4000 * 2000, rel=0.25)


def is_replica_of(cluster: ClusterProcesses, node: ClusterNode) -> int:
    """The number of partitions of which a node is a replica."""
    return sum(node.node_id in each["replicas"] for each in cluster.status()["partitions"])


def log_bytes(node: ClusterNode) -> float:
    """The bytes in the log of a node, without the room that its file has beyond them."""
    text = node.admin("/metrics")[1]
    [found] = [
        line
        for line in text.splitlines()
        if line.startswith(("holdfast_log_bytes ", "holdfast_log_bytes{"))
    ]
    return float(found.rpartition(" ")[2])

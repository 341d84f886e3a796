"""Sessions that belong to the cluster, as clients of its nodes see them."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e import wire
from tests.e2e.brokers import SOURCE
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.wire import Wire

EXPIRY_S = 600
WAIT_S = 20.0


@pytest.fixture(scope="module", params=((), ("n4",)), ids=("nodes", "gateway"))
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProcesses]:
    gateways: tuple[str, ...] = request.param
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses(directory, 3 + len(gateways), gateways=gateways) as processes:
        yield processes


@pytest.fixture
def nodes(cluster: ClusterProcesses) -> list[int]:
    """Three of the clients' ports of a healthy cluster; the first one is the gateway's, if any."""
    cluster.wait_healthy()
    ports = list(cluster.ports.values())
    return [ports[-1], ports[1], ports[2]] if len(ports) > 3 else ports


def connected(port: int, client_id: str, *, version: int = 5, clean: bool = False) -> Wire:
    one = Wire(port, version, WAIT_S)
    assert one.connect(client_id, clean, EXPIRY_S).reason == 0
    return one


def test_every_node_serves_every_topic(nodes: list[int]) -> None:
    """Of three QoS levels, whoever leads the partitions; and after SUBACK nothing is missed."""
    for number, port in enumerate(nodes):
        with connected(port, "reader", clean=True) as reader:
            reader.subscribe(("any/#", 2))
            sent = []
            for qos in (0, 1, 2):
                for at, other in enumerate(nodes):
                    with connected(other, f"writer-{at}", clean=True) as writer:
                        for topic in range(5):
                            payload = b"%d %d %d %d" % (number, qos, at, topic)
                            assert writer.publish(f"any/{topic}", payload, qos) < 0x80
                            sent.append(payload)
                        writer.ping()
            assert sorted(reader.message().payload for _ in sent) == sorted(sent)


def test_a_session_moves_with_its_client(nodes: list[int]) -> None:
    """Subscriptions, what came while it was away, and nothing that it has had already."""
    connected(nodes[0], "mover").subscribe(("moves", 2))
    expected = 0
    with connected(nodes[1], "moves-writer") as writer:
        for turn in range(6):
            writer.publish("moves", b"%d" % expected, 1 + turn % 2)
            port = nodes[(turn + 1) % len(nodes)]
            mover = Wire(port, 5, WAIT_S)
            assert mover.connect("mover", False, EXPIRY_S).session_present
            assert int(mover.message().payload) == expected
            expected += 1
            writer.publish("moves", b"%d" % expected, 2)
            assert int(mover.message().payload) == expected
            expected += 1
            mover.ping()
            if turn % 2:
                mover.abort()


def test_one_connection_per_client_id(nodes: list[int]) -> None:
    """[MQTT-3.1.4-3] on whichever nodes, and of sessions that the log does not know as well."""
    for expiry_s in (EXPIRY_S, 0):
        first = Wire(nodes[0], 5, WAIT_S)
        first.connect("twin", True, expiry_s)
        second = Wire(nodes[1], 5, WAIT_S)
        second.connect("twin", True, expiry_s)
        goodbye = first.wait_closed(WAIT_S)
        assert [frame.reason for frame in goodbye if frame.kind == wire.DISCONNECT] == [0x8E]
        third = Wire(nodes[2], 4, WAIT_S)
        third.connect("twin")
        assert second.wait_closed(WAIT_S)
        third.ping()


def test_a_clean_start_forgets_everywhere(nodes: list[int]) -> None:
    connected(nodes[0], "forgetful").subscribe(("forgotten", 1))
    again = Wire(nodes[1], 5, WAIT_S)
    assert not again.connect("forgetful", True, EXPIRY_S).session_present
    with connected(nodes[2], "forgotten-writer") as writer:
        writer.publish("forgotten", b"x", 1)
    back = Wire(nodes[2], 5, WAIT_S)
    assert back.connect("forgetful", False, EXPIRY_S).session_present
    with pytest.raises(TimeoutError):
        back.message(0.3)


def test_retained_messages_are_the_clusters(nodes: list[int]) -> None:
    with connected(nodes[0], "keeper", clean=True) as keeper:
        for topic, qos in (("kept/0", 0), ("kept/1", 1), ("kept/2", 2)):
            keeper.publish(topic, b"old", qos, retain=True)
            keeper.publish(topic, topic.encode(), qos, retain=True)
        keeper.publish("kept/3", b"gone", 1, retain=True)
        keeper.publish("kept/3", b"", 1, retain=True)

    def seen(port: int) -> list[bytes]:
        with connected(port, "looker", clean=True) as looker:
            looker.subscribe(("kept/#", 2))
            found: list[bytes] = []
            while True:
                try:
                    message = looker.message(0.3)
                except TimeoutError:
                    return sorted(found)
                assert message.retain
                found.append(message.payload)

    wanted = [b"kept/0", b"kept/1", b"kept/2"]
    for port in nodes:
        # QoS 0 is not acknowledged, so nobody can say when it has arrived.
        until(partial(lambda port: seen(port) == wanted, port), f"retained at {port}")


def test_qos_2_goes_on_at_another_node(nodes: list[int]) -> None:
    """The publisher between PUBREC and PUBREL, the subscriber between PUBREC and PUBCOMP."""
    subscriber = connected(nodes[0], "exact-reader")
    subscriber.subscribe(("exact", 2))
    publisher = connected(nodes[1], "exact-writer")
    publisher.send(wire.publish("exact", b"once", 2, 7, 5, False, False, ()))
    publisher.expect(wire.PUBREC)
    publisher.abort()
    publisher = Wire(nodes[2], 5, WAIT_S)
    assert publisher.connect("exact-writer", False, EXPIRY_S).session_present
    publisher.send(wire.publish("exact", b"once", 2, 7, 5, False, True, ()))
    assert publisher.expect(wire.PUBREC).reason == 0
    publisher.send(wire.ack(wire.PUBREL, 7))
    assert publisher.expect(wire.PUBCOMP).reason == 0
    # The id is free: this is another message.
    publisher.send(wire.publish("exact", b"next", 2, 7, 5, False, False, ()))
    assert publisher.expect(wire.PUBREC).reason == 0

    message = wire.read_publish(subscriber.expect(wire.PUBLISH), 5)
    assert message.payload == b"once"
    subscriber.send(wire.ack(wire.PUBREC, message.packet_id))
    subscriber.expect(wire.PUBREL)
    subscriber.abort()
    subscriber = Wire(nodes[1], 5, WAIT_S)
    assert subscriber.connect("exact-reader", False, EXPIRY_S).session_present
    assert subscriber.expect(wire.PUBREL).packet_id == message.packet_id
    subscriber.send(wire.ack(wire.PUBCOMP, message.packet_id))
    assert subscriber.message().payload == b"next"
    with pytest.raises(TimeoutError):
        subscriber.message(0.3)


def test_what_a_node_did_is_known_when_it_dies(cluster: ClusterProcesses, nodes: list[int]) -> None:
    """A session resumes elsewhere, a will comes once, a producer's sequence is stored once."""
    reader = connected(nodes[0], "orphan-reader")
    reader.subscribe(("orphan/#", 2))
    mourner = connected(nodes[1], "mourner", clean=True)
    mourner.subscribe(("wills/#", 1))
    for number, expiry_s in enumerate((0, EXPIRY_S)):
        Wire(nodes[0], 5, WAIT_S).connect(
            f"mortal-{number}", True, expiry_s, will=wire.Will(f"wills/{number}", b"gone", 1)
        )
    sequence = [(wire.USER_PROPERTY, ("hf-seq", "producer:0:1"))]
    with connected(nodes[0], "numbered") as writer:
        assert writer.publish("orphan/numbered", b"1", 1, props=sequence) == 0
    with connected(nodes[0], "orphan-writer") as writer:
        for number in range(20):
            assert writer.publish("orphan/exact", b"%d" % number, 2) < 0x80
    first = next(reversed(cluster.nodes)) if len(cluster.nodes) > 3 else "n1"
    cluster.kill9(first)
    with connected(nodes[1], "numbered") as writer:
        assert writer.publish("orphan/numbered", b"1", 1, props=sequence) == 0
        assert writer.publish("orphan/exact", b"20", 2) < 0x80
    again = Wire(nodes[2], 5, WAIT_S)
    assert again.connect("orphan-reader", False, EXPIRY_S).session_present
    found = [again.message().payload for _ in range(22)]
    assert found.count(b"1") == 2  # the numbered one, and the one of the others
    assert [int(each) for each in found if each != b"1"] == [0, *range(2, 21)]
    with pytest.raises(TimeoutError):
        again.message(0.3)
    assert sorted(mourner.message(WAIT_S).topic for _ in range(2)) == ["wills/0", "wills/1"]
    cluster.restart(first)
    cluster.wait_healthy()
    with pytest.raises(TimeoutError):
        mourner.message(0.3)


def test_draining_sends_clients_away(cluster: ClusterProcesses, nodes: list[int]) -> None:
    """MQTT 5 clients are told where to go, MQTT 3 clients are closed; sessions go with them."""
    new = connected(nodes[2], "told")
    old = connected(nodes[2], "closed", version=4, clean=True)
    assert cluster.nodes["n1"].admin("/cluster/drain?node=n3", "POST")[0] == 200
    goodbye = [frame for frame in new.wait_closed(WAIT_S) if frame.kind == wire.DISCONNECT]
    assert goodbye[0].reason == 0x9C
    assert b"127.0.0.1:%d" % nodes[0] in goodbye[0].body
    assert not [frame for frame in old.wait_closed(WAIT_S) if frame.kind == wire.DISCONNECT]
    refused = Wire(nodes[2], 5, WAIT_S)
    assert refused.connect("late").reason == 0x9C
    assert Wire(nodes[0], 5, WAIT_S).connect("told", False, EXPIRY_S).session_present
    until(
        lambda: not any(each["leader"] == "n3" for each in cluster.status()["partitions"]),
        "n3 leads nothing",
    )
    assert cluster.nodes["n2"].admin("/cluster/undrain?node=n3", "POST")[0] == 200
    cluster.wait_healthy()
    connected(nodes[2], "back").ping()


def test_debians_clients(tmp_path: Path, nodes: list[int]) -> None:
    """`holdfast sub` and `pub` know a list of servers."""
    command = [sys.executable, "-m", "holdfast.cli.main"]
    servers = [part for port in nodes for part in ("--server", f"mqtt://127.0.0.1:{port}")]
    environment = {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
    with connected(nodes[0], "tool") as session:
        session.subscribe(("tools", 1))
    subprocess.run(
        [*command, "pub", *servers, "-t", "tools", "-q", "1", "-m", "hello"],
        env=environment,
        check=True,
        timeout=60,
    )
    with Wire(nodes[1], 5, WAIT_S) as session:
        assert session.connect("tool", False, EXPIRY_S).session_present
        assert session.message().payload == b"hello"


def test_a_majority_that_is_gone_and_back(tmp_path: Path) -> None:
    """Nothing is promised without it, and everything goes on with it, by itself. What was under way
    is in doubt, and so not answered before."""
    with ClusterProcesses(tmp_path) as cluster:
        ports = list(cluster.ports.values())
        writers = [connected(ports[2], f"lonely-{number}") for number in range(50)]
        assert writers[0].publish("lonely", b"before", 1) < 0x80
        cluster.kill9("n1", "n2")
        asked = []

        def is_refused() -> bool:
            writer = writers.pop()
            asked.append(writer)
            packet_id = writer.next_packet_id()
            writer.send(wire.publish("lonely", b"x", 1 + len(writers) % 2, packet_id))
            try:
                return writer.receive(0.3).reason == 0x97
            except TimeoutError:
                return False

        until(is_refused, "publishes are refused")
        assert cluster.status("n3")["has_majority"] is False
        assert cluster.nodes["n3"].readiness() == 503
        cluster.restart("n1")
        for writer in asked[:-1]:
            # In doubt, and now decided.
            writer.receive(WAIT_S)
        writer = writers.pop()
        until(lambda: writer.publish("lonely", b"after", 1) < 0x80, "it goes on")
        cluster.restart("n2")
        cluster.wait_healthy()

"""A broker without `cluster.peer_bind` that serves as a cluster of one node."""

import logging
import os
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.io.disk.storage import StorageError
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.journal.segment import WriteGroup
from holdfast.node.metadata.commands import PutNode, PutUsers
from holdfast.node.metadata.model import USERS_BYTES_MAX, NodeInfo
from holdfast.process.cluster import check_may_share
from holdfast.protocol.mqtt.reasons import QUOTA_EXCEEDED
from holdfast.security.dynamic.agreed import pack
from holdfast.security.dynamic.document import SecurityDocument, SecurityUser
from holdfast.security.dynamic.file import write
from holdfast.security.passwords import hash_password
from holdfast.testing import Broker, BrokerFailed
from tests.e2e import wire
from tests.e2e.cluster_processes import until
from tests.support.agreed import agree
from tests.support.api_client import Api
from tests.support.stored_messages import stored_messages

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def listening() -> int:
    """The number of TCP ports on which this process listens."""
    own = set()
    for each in os.scandir("/proc/self/fd"):
        try:
            own.add(os.readlink(each.path))
        except FileNotFoundError:
            continue
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return sum(row[3] == LISTENS and f"socket:[{row[9]}]" in own for row in rows)


def test_an_empty_directory_becomes_a_cluster_of_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    before = listening()
    with Broker(data=data) as broker, wire.Wire(broker.port) as client:
        assert listening() == before + 1
        client.connect("c", expiry_s=60)
        client.subscribe(("a", 1))
        assert client.publish("a", b"1", 1) == 0
        client.abort()
        broker.kill()
        manifest = open_to_read(data).manifest
        assert manifest.is_replica
        assert manifest.cluster_id
    with Broker(data=data) as broker, wire.Wire(broker.port) as client:
        assert client.connect("c", clean=False, expiry_s=60).session_present
        assert client.message().payload == b"1"
    assert open_to_read(data).manifest.cluster_id == manifest.cluster_id


def test_a_node_with_others_does_not_serve_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Broker(data=data):
        pass
    agree(data, PutNode(NodeInfo("n2", "other", "localhost:1", "", ""), 0))
    for _ in range(2):  # The first refusal has released the directory.
        with pytest.raises(BrokerFailed, match="is a cluster node's, with n2: start it with"):
            Broker(data=data).start()
    with pytest.raises(StorageError, match="is a cluster node's, with n2: start it with"):
        check_may_share(data)


def document(*names: str) -> SecurityDocument:
    """Users whose password is "secret"."""
    found = SecurityDocument()
    for name in names:
        _, _, iterations, salt, password = hash_password("secret", iterations=1).split("$")
        found.users[name] = SecurityUser(
            name, iterations=int(iterations), salt=salt, password=password
        )
    return found


def test_users_that_nodes_agreed_on_stay_in_force(tmp_path: Path) -> None:
    """Their node has no others any more. Until then its users are those of its file."""
    data, file = tmp_path / "data", tmp_path / "users.json"
    write(file, document("bob", "carol"))
    settings = {"security.dynamic_security_file": str(file), "security.allow_anonymous": False}

    def users(broker: Broker) -> list[str]:
        found = []
        for name in ("alice", "bob", "carol"):
            with wire.Wire(broker.port) as client:
                client.send(wire.connect(name, username=name, password=b"secret"))
                if wire.read_connack(client.expect(wire.CONNACK), 5).reason == 0:
                    found.append(name)
        return found

    with Broker(data=data, settings=settings) as broker:
        assert users(broker) == ["bob", "carol"]
    agree(data, PutUsers(0, pack(document("alice", "carol"), USERS_BYTES_MAX)))
    with Broker(data=data, settings=settings) as broker:
        assert users(broker) == ["alice", "carol"]


def test_the_directory_soon_says_what_is_committed(tmp_path: Path) -> None:
    """Programs read it without a broker, also after a crash."""
    data = tmp_path / "data"
    with Broker(data=data) as broker, wire.Wire(broker.port) as client:
        client.connect("c")
        client.publish("a", b"1", 1)
        client.publish("a", b"2", 1)
        began_s = time.monotonic()

        def stored() -> int:
            return len(stored_messages(data))

        until(lambda: stored() == 2, "the directory has both")
        assert time.monotonic() < began_s + 3


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_session_is_moved_while_its_close_is_not_committed(
    monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    """Its client is away at once, and its position in the log is that of the close."""
    gate = threading.Event()
    write = GroupWriter.write

    def write_later(writer: GroupWriter, group: WriteGroup) -> None:
        assert gate.wait(10)
        write(writer, group)

    monkeypatch.setattr(GroupWriter, "write", write_later)
    gate.set()
    with Broker(admin=True) as broker:
        api = Api(broker.admin_port)
        with wire.Wire(broker.port) as client:
            client.connect("mover", expiry_s=1000)
            client.subscribe(("in/#", 1))
            client.publish("in/1", b"1", qos=1)
            client.message()
            client.ping()
            gate.clear()
        until(lambda: not api.get("session", client="mover")["session"]["connected"], "it is away")
        threading.Timer(0.2, gate.set).start()
        moved = api.post("session/move", {"to": "end", "dry_run": dry_run}, client="mover")
        assert (moved["skipped"], moved["repeated"]) == (0, 0)


FIGURES = ("sessions", "sessions_away", "subscriptions", "shared_groups", "failovers")


def figures(broker: Broker) -> dict[str, object]:
    """Return what the admin port and `$SYS` show of clients that are here, away and gone."""
    api = Api(broker.admin_port)
    with (
        wire.Wire(broker.port) as here,
        wire.Wire(broker.port) as clean,
        wire.Wire(broker.port) as away,
        wire.Wire(broker.port) as ended,
    ):
        here.connect("here", clean=False, expiry_s=1000)
        here.subscribe(("t/#", 1), ("u", 1), ("$share/g/t/#", 1))
        clean.connect("clean")
        clean.subscribe(("t/+", 0), ("$share/h/t/#", 1), ("$queue/jobs", 1))
        away.connect("away", clean=False, expiry_s=1000)
        away.subscribe(("a", 0), ("b", 1), ("$share/d/t", 1))
        away.disconnect()
        ended.connect("ended", clean=False, expiry_s=1000)
        ended.subscribe(("a", 0), ("c", 1), ("$share/e/t", 1))
        ended.disconnect(props=[(wire.SESSION_EXPIRY, 0)])
        here.ping()
        until(lambda: len(api.get("sessions")["sessions"]) == 3, "one session has ended")
        here.publish("t", b"x", 1)
        place = here.message()
        found: dict[str, object] = {place.topic: place.payload}

        def metrics() -> dict[str, float]:
            url = f"http://127.0.0.1:{broker.admin_port}/metrics"
            with urllib.request.urlopen(url) as reply:
                lines = [line.partition("{") for line in reply.read().decode().splitlines()]
            return {
                name.removeprefix("holdfast_"): float(rest.split()[-1])
                for name, _, rest in lines
                if rest
            }

        until(lambda: metrics()["sessions_away"] > 0, "a census was taken")
        found.update((name, metrics().get(name, 0.0)) for name in FIGURES)
        limits = api.get("limits")["nodes"][0]["limits"]
        found["limits"] = [
            (each["name"], each["used"]) for each in limits if "bytes" not in each["name"]
        ]
        here.subscribe(("$SYS/broker/clients/#", 0), ("$SYS/broker/+/count", 0))
        subscriptions = int(float(str(found["subscriptions"]))) + 2

        def is_counted() -> bool:
            here.ping()
            for frame in [each for each in here.inbox if each.kind == wire.PUBLISH]:
                message = wire.read_publish(frame, 5)
                found[message.topic] = message.payload
            return found.get("$SYS/broker/subscriptions/count") == b"%d" % subscriptions

        until(is_counted, "the two filters are counted")
    return found


def test_figures_count_what_is_connected_and_what_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast")
    with Broker(admin=True, settings={"sys.interval_s": 0.1}) as broker:
        found = figures(broker)
        assert "queue_created queue='$share/$queue/jobs' client='clean'" in caplog.text
        with wire.Wire(broker.port) as client:
            client.connect("connected at the end", expiry_s=1000)
            broker.kill()
        caplog.clear()
        broker.start()
        ready = next(each for each in caplog.messages if each.startswith("ready"))
        assert "sessions=3 " in ready
    assert found["sessions"] == 3
    assert found["sessions_away"] == 1


def test_connected_and_away_sessions_are_bounded_together() -> None:
    with (
        Broker(admin=True, settings={"limits.sessions": 3}) as broker,
        wire.Wire(broker.port) as clean,
        wire.Wire(broker.port) as durable,
        wire.Wire(broker.port) as away,
        wire.Wire(broker.port) as more,
        wire.Wire(broker.port) as back,
    ):
        assert clean.connect("clean").reason == 0
        assert durable.connect("durable", expiry_s=1000).reason == 0
        assert away.connect("away", expiry_s=1000).reason == 0
        away.disconnect()
        api = Api(broker.admin_port)
        until(lambda: len(api.get("sessions", state="away")["sessions"]) == 1, "it is away")
        assert more.connect("more").reason == QUOTA_EXCEEDED
        assert back.connect("away", clean=False, expiry_s=1000).session_present

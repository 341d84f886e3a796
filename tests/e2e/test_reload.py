"""Reloading settings and files of running brokers, by SIGHUP and over the admin port."""

import errno
import json
import os
import shutil
import signal
import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

import paho.mqtt.client as paho
import pytest
import trustme
from paho.mqtt.enums import CallbackAPIVersion
from prometheus_client.parser import text_string_to_metric_families

from holdfast.cli.main import main
from holdfast.protocol.mqtt import reasons
from holdfast.security.certificate_times import ends_of
from tests.e2e.brokers import Holdfast, broker_toml, one_process
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses
from tests.e2e.conftest import StartHoldfast
from tests.e2e.pair import pair
from tests.support.certificates import Authority, Certificate
from tests.support.ports import free_port
from tests.support.waiting import until

TIMEOUT_S = 20.0


class Client:
    """A paho client that notes what it received and why it was disconnected."""

    def __init__(self, port: int, user: str = "", context: ssl.SSLContext | None = None) -> None:
        self.client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        self.client.on_connect = lambda *arguments: self._connected(int(arguments[3].value))
        self.client.on_disconnect = lambda *arguments: self._left(int(arguments[3].value))
        self.client.on_message = lambda client, data, message: self.topics.append(message.topic)
        self.client.on_subscribe = lambda *arguments: self.subscribed.set()
        self.connected = threading.Event()
        self.left = threading.Event()
        self.subscribed = threading.Event()
        self.reason = self.leave_reason = -1
        self.topics: list[str] = []
        if user:
            self.client.username_pw_set(user, "secret")
        if context is not None:
            self.client.tls_set_context(context)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        assert self.connected.wait(TIMEOUT_S)

    def _connected(self, reason: int) -> None:
        self.reason = reason
        self.connected.set()

    def _left(self, reason: int) -> None:
        self.leave_reason = reason
        self.left.set()

    def subscribe(self, filter: str) -> None:
        self.client.subscribe(filter, 1)
        assert self.subscribed.wait(TIMEOUT_S)

    def publish(self, topic: str) -> None:
        self.client.publish(topic, b"x", 1).wait_for_publish(TIMEOUT_S)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def hang_up(broker: Holdfast, line: str = "reloaded settings") -> str:
    """Send SIGHUP, and wait for the lines that tell its end, one of each process."""
    before = broker.log_text().count(line)
    assert broker.process is not None
    broker.process.send_signal(signal.SIGHUP)
    count = max(1, len(broker.children()))
    until(lambda: broker.log_text().count(line) >= before + count, line)
    found = [each for each in broker.log_text().splitlines() if line in each]
    return "\n".join(found[-count:])


def post_reload(broker: Holdfast) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{broker.admin_port}/api/v1/reload", method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def write_settings(broker: Holdfast) -> None:
    (broker.directory / "holdfast.toml").write_text(broker_toml(broker.settings))


def passwords_of(path: Path, *users: str) -> None:
    path.unlink(missing_ok=True)
    for user in users:
        create = [] if path.exists() else ["-c"]
        assert main(["passwd", *create, "-b", str(path), user, "secret"]) == 0


def test_other_users_and_rights(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    passwords, acl = tmp_path / "passwords", tmp_path / "acl"
    passwords_of(passwords, "alice", "bob")
    acl.write_text("user alice\ntopic readwrite #\nuser bob\ntopic readwrite #\n")
    broker = start_holdfast({"security": {"password_file": str(passwords), "acl_file": str(acl)}})
    alice, bob = Client(broker.port, "alice"), Client(broker.port, "bob")
    alice.subscribe("#")
    alice.publish("secret/1")
    until(lambda: alice.topics == ["secret/1"], "the first message")

    passwords_of(passwords, "alice", "carol")
    acl.write_text(
        "user alice\ntopic readwrite #\ntopic deny secret/#\nuser carol\ntopic write #\n"
    )
    line = hang_up(broker)
    assert "disconnected=1" in line
    assert bob.left.wait(TIMEOUT_S)
    assert bob.leave_reason == reasons.NOT_AUTHORIZED
    # The rules apply to a subscription that was there, and to a remembered route.
    carol = Client(broker.port, "carol")
    assert carol.reason == reasons.SUCCESS
    carol.publish("secret/1")
    carol.publish("open/1")
    until(lambda: alice.topics == ["secret/1", "open/1"], "the open message")
    assert not alice.left.is_set()
    for client in (alice, bob, carol):
        client.close()


def test_a_file_that_cannot_be_used_changes_nothing(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    passwords, acl = tmp_path / "passwords", tmp_path / "acl"
    passwords_of(passwords, "alice")
    acl.write_text("user alice\ntopic readwrite #\n")
    broker = start_holdfast({"security": {"password_file": str(passwords), "acl_file": str(acl)}})
    alice = Client(broker.port, "alice")
    passwords_of(passwords, "bob")
    acl.write_text("user alice\ntopic reed #\n")
    line = hang_up(broker, "reload_failed")
    assert f"{acl}:2" in line
    assert "everything stays as it was" in line
    again = Client(broker.port, "alice")
    assert again.reason == reasons.SUCCESS
    assert not alice.left.is_set()
    status, body = post_reload(broker)
    assert status == 409
    assert f"{acl}:2" in str(body["error"])
    (broker.directory / "holdfast.toml").write_text("[limits]\nsesions = 3\n")
    status, body = post_reload(broker)
    assert status == 409
    assert "sesions" in str(body["error"])
    assert broker.metric("reloads_failed_total") >= 3
    alice.close()
    again.close()


@one_process("each process has its own limit")
def test_limits_change_and_what_cannot_change_is_named(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast({"limits": {"sessions": 1}, "log": {"segment_bytes": 1 << 20}})
    one = Client(broker.port)
    refused = Client(broker.port)
    assert refused.reason == reasons.QUOTA_EXCEEDED
    broker.settings = {"limits": {"sessions": 2, "qos_max": 1}, "log": {"segment_bytes": 1 << 21}}
    write_settings(broker)
    status, body = post_reload(broker)
    assert status == 200
    assert body == {
        "applied": ["limits.sessions"],
        "needs_restart": ["limits.qos_max", "log.segment_bytes"],
        "disconnected": 0,
    }
    two = Client(broker.port)
    assert two.reason == reasons.SUCCESS
    assert not one.left.is_set()
    # What is not in force yet is named again.
    assert post_reload(broker)[1]["needs_restart"] == ["limits.qos_max", "log.segment_bytes"]
    for client in (one, refused, two):
        client.close()


def test_anonymous_clients_leave_when_they_may_not_connect_any_more(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    broker = start_holdfast({"security": {"allow_anonymous": True}})
    stranger = Client(broker.port)
    passwords_of(tmp_path / "passwords", "alice")
    broker.settings = {"security": {"password_file": str(tmp_path / "passwords")}}
    write_settings(broker)
    hang_up(broker)
    assert stranger.left.wait(TIMEOUT_S)
    assert stranger.leave_reason == reasons.NOT_AUTHORIZED
    alice = Client(broker.port, "alice")
    assert alice.reason == reasons.SUCCESS
    stranger.close()
    alice.close()


def fingerprint(port: int, authority: trustme.CA) -> bytes:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.tls_set_context(context)
    client.connect("127.0.0.1", port)
    shown = client.socket().getpeercert(binary_form=True)  # type: ignore[union-attr]
    client.disconnect()
    assert shown
    return bytes(shown)


def write_certificate(directory: Path, authority: trustme.CA) -> None:
    made = authority.issue_cert("127.0.0.1", "localhost")
    made.private_key_pem.write_to_path(str(directory / "server.key"))
    for number, blob in enumerate(made.cert_chain_pems):
        blob.write_to_path(str(directory / "server.pem"), append=number > 0)


def test_another_certificate(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    authority = trustme.CA()
    write_certificate(tmp_path, authority)
    names = {"certificate": str(tmp_path / "server.pem"), "key": str(tmp_path / "server.key")}
    broker = start_holdfast({"[listeners]": names})
    context = ssl.create_default_context()
    authority.configure_trust(context)
    connected = Client(broker.port, context=context)
    first = fingerprint(broker.port, authority)
    write_certificate(tmp_path, authority)
    hang_up(broker)
    second = fingerprint(broker.port, authority)
    assert second != first
    # A key that does not belong to the certificate: the second pair stays.
    other = authority.issue_cert("127.0.0.1")
    other.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    hang_up(broker, "reload_failed")
    assert fingerprint(broker.port, authority) == second
    assert not connected.left.is_set()
    connected.publish("t")
    connected.close()


def test_listeners_come_and_go(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    """The clients of a listener that goes stay; nobody else can connect there."""
    directory = tmp_path / "own"
    directory.mkdir()
    broker = ListenersBroker(directory)
    broker.start()
    try:
        first = Client(broker.port)
        broker.listeners = [broker.port, broker.second]
        broker.write()
        assert post_reload(broker)[1]["applied"] == ["listeners"]
        second = Client(broker.second)
        broker.listeners = [broker.second]
        broker.write()
        assert post_reload(broker)[0] == 200
        with pytest.raises(ConnectionRefusedError):
            Client(broker.port)
        first.publish("still/here")
        again = Client(broker.second)
        for client in (first, second, again):
            assert not client.left.is_set()
            client.close()
    finally:
        assert broker.stop() == 0


class ListenersBroker(Holdfast):
    """A broker with its listeners in the file."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.second = free_port()
        self.listeners = [self.port]

    def write(self) -> None:
        text = f'[admin]\nport = {self.admin_port}\n[node]\ndata = "{self.data}"\n'
        for port in self.listeners:
            text += f"[[listeners]]\nport = {port}\n"
        (self.directory / "holdfast.toml").write_text(text)

    def command(self) -> list[str]:
        command = super().command()
        self.write()
        return command[: command.index("--bind")]


def test_a_port_that_is_taken_changes_nothing(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    broker, other = ListenersBroker(one), ListenersBroker(two)
    broker.start()
    other.start()
    try:
        broker.listeners = [broker.port, other.port]
        broker.write()
        status, body = post_reload(broker)
        assert status == 409
        assert str(other.port) in str(body["error"])
        Client(broker.port).close()
    finally:
        broker.stop()
        other.stop()


def test_many_reloads_lose_no_connection(start_holdfast: StartHoldfast) -> None:
    """Clients connect all the time while the listeners open again and again."""
    broker = start_holdfast()
    failures: list[str] = []
    stop = threading.Event()

    def connect() -> None:
        while not stop.is_set():
            try:
                client = Client(broker.port)
                if client.reason != reasons.SUCCESS:
                    failures.append(f"reason {client.reason}")
                client.close()
            except (OSError, AssertionError) as error:
                failures.append(repr(error))

    thread = threading.Thread(target=connect)
    thread.start()
    for _ in range(20):
        assert post_reload(broker)[0] == 200
    stop.set()
    thread.join(TIMEOUT_S)
    assert failures == []


def test_a_standby_takes_over_with_the_files_that_it_reloaded(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords_of(passwords, "alice")
    with pair(tmp_path, {"security": {"password_file": str(passwords)}}) as (holder, standby):
        until(standby.stands_by, "the other node stands by")
        passwords_of(passwords, "bob")
        hang_up(standby)
        holder.kill()
        until(standby.serves, "the standby serves")
        bob = Client(standby.port, "bob")
        assert bob.reason == reasons.SUCCESS
        bob.close()
        alice = Client(standby.port, "alice")
        assert alice.reason == reasons.BAD_USER_NAME_OR_PASSWORD
        alice.close()


def test_nodes_of_a_cluster_reload_each_its_own_files(tmp_path: Path) -> None:
    acl, passwords = tmp_path / "acl", tmp_path / "passwords"
    acl.write_text("user alice\ntopic readwrite #\n")
    passwords_of(passwords, "alice", "bob")
    files = {"security": {"password_file": str(passwords), "acl_file": str(acl)}}
    with ClusterProcesses(tmp_path, settings=files) as cluster:
        nodes = list(cluster.nodes.values())
        reader = Client(nodes[0].port, "alice")
        writer = Client(nodes[1].port, "alice")
        reader.subscribe("$share/g/#")
        writer.publish("secret/1")
        until(lambda: reader.topics == ["secret/1"], "the first message")
        acl.write_text(
            "user alice\ntopic readwrite #\ntopic deny secret/#\nuser bob\ntopic write #\n"
        )
        for node in nodes:
            hang_up(node)
        bob = Client(nodes[2].port, "bob")
        bob.publish("secret/1")
        bob.publish("open/1")
        until(lambda: reader.topics == ["secret/1", "open/1"], "the open message")
        for client in (reader, writer, bob):
            assert not client.left.is_set()
            client.close()


def test_other_signals_are_ignored(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    """Mosquitto's operators send them; a process ends by default."""
    passwords_of(tmp_path / "passwords", "alice")
    (tmp_path / "passwords").chmod(0o644)
    broker = start_holdfast({"security": {"password_file": str(tmp_path / "passwords")}})
    assert "readable_by_everyone" in broker.log_text()
    assert broker.process is not None
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        broker.process.send_signal(number)
        until(lambda number=number: number.name in broker.log_text(), "the line")  # type: ignore[misc]
    Client(broker.port, "alice").close()


def test_a_file_that_hangs_holds_nobody_up(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    """A named pipe gives nothing to its reader before somebody writes, like a directory that
    hangs."""
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite #\n")
    broker = start_holdfast({"security": {"acl_file": str(acl)}})
    client = Client(broker.port)
    acl.unlink()
    os.mkfifo(acl)
    assert broker.process is not None
    broker.process.send_signal(signal.SIGHUP)
    for number in range(5):
        client.publish(f"meanwhile/{number}")
    acl.write_text("topic readwrite #\n")
    until(lambda: "reloaded settings" in broker.log_text(), "the reload")
    client.publish("afterwards")
    client.close()


def test_a_file_that_hangs_does_not_keep_the_process(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite #\n")
    broker = start_holdfast({"security": {"acl_file": str(acl)}})
    acl.unlink()
    os.mkfifo(acl)
    assert broker.process is not None
    broker.process.send_signal(signal.SIGHUP)
    until(lambda: is_being_read(acl), "the reload opens the file")
    assert broker.stop() == 0


def is_being_read(pipe: Path) -> bool:
    """Whether a process waits for a writer of the pipe. Such a process goes on to wait for bytes,
    because this one keeps the pipe open."""
    try:
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def reload_node(node: ClusterNode) -> list[str]:
    """The settings that a reload applied."""
    status, body = node.admin("/api/v1/reload", "POST")
    assert status == 200, body
    assert json.loads(body)["needs_restart"] == []
    applied: list[str] = json.loads(body)["applied"]
    return applied


def certificate_end(node: ClusterNode) -> float:
    """The end of the certificate for other nodes, as the metric has it; 0: it has none."""
    for family in text_string_to_metric_families(node.admin("/metrics")[1]):
        for sample in family.samples:
            if sample.labels.get("door") == "peers" and sample.labels["file"] == "certificate":
                return float(sample.value)
    return 0.0


def presented(node: ClusterNode, peer: Certificate, ca: str) -> bytes:
    """The certificate that a node presents to another one."""
    context = ssl.create_default_context(cafile=ca)
    context.check_hostname = False
    context.load_cert_chain(peer.certificate, peer.key)
    with (
        socket.create_connection((node.host, node.peer_port), TIMEOUT_S) as plain,
        context.wrap_socket(plain) as wrapped,
    ):
        found = wrapped.getpeercert(binary_form=True)
    assert found is not None
    return found


def test_certificates_between_nodes_move_to_another_authority(tmp_path: Path) -> None:
    """First all nodes trust both, then each gets its new certificate, then the old one is trusted
    no more: without a restart, and without the loss of a link."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    ca = tmp_path / "trusted.pem"
    shutil.copy(old.ca, ca)
    cluster = ClusterProcesses(tmp_path)
    used: dict[str, Certificate] = {}
    for name, node in cluster.nodes.items():
        issued = old.issue(name, days=10)
        used[name] = Certificate(f"{tmp_path}/{name}.pem", f"{tmp_path}/{name}.key")
        shutil.copy(issued.certificate, used[name].certificate)
        shutil.copy(issued.key, used[name].key)
        section = {"certificate": used[name].certificate, "key": used[name].key, "ca": str(ca)}
        node.settings = {"cluster": section}
    with cluster:
        nodes = list(cluster.nodes.values())
        ca.write_bytes(Path(old.ca).read_bytes() + Path(new.ca).read_bytes())
        assert [reload_node(node) for node in nodes] == [["cluster.ca"]] * 3
        assert [reload_node(node) for node in nodes] == [[]] * 3
        for name, node in cluster.nodes.items():
            issued = new.issue(name, days=400)
            shutil.copy(issued.certificate, used[name].certificate)
            shutil.copy(issued.key, used[name].key)
            assert reload_node(node) == ["cluster.certificate", "cluster.key"]
            text = Path(issued.certificate).read_text()
            assert presented(node, used["n1"], str(ca)) == ssl.PEM_cert_to_DER_cert(text)
            end = min(ends_of(text.encode()))
            until(lambda node=node, end=end: certificate_end(node) == end, "the metric")
        shutil.copy(new.ca, ca)
        assert [reload_node(node) for node in nodes] == [["cluster.ca"]] * 3
        for node in nodes:
            assert "peer_lost" not in node.log_text()
            # They were loaded with ten days left.
            assert node.log_text().count("certificate_expires") == 3
        cluster.kill9("n3")
        cluster.restart("n3")
        cluster.wait_healthy()
        ca.write_text("nothing")
        status, body = nodes[0].admin("/api/v1/reload", "POST")
        assert (status, "no CA certificate in PEM format" in body) == (409, True)
        cluster.wait_healthy()


def test_an_expired_certificate_is_told_and_a_near_end_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check fails. A start serves nevertheless, because other listeners may do."""
    authority = Authority(tmp_path)
    broker = Holdfast(tmp_path)

    passwords_of(tmp_path / "passwords", "alice")

    def checked(one: Certificate, *more: int) -> tuple[int, str]:
        lines = []
        for port in (broker.port, *more):
            listener = {"port": port, "certificate": one.certificate, "key": one.key}
            listener["password_file"] = str(tmp_path / "passwords")
            lines += [
                "[[listeners]]",
                *(f"{key} = {json.dumps(listener[key])}" for key in listener),
            ]
        settings = tmp_path / "checked.toml"
        settings.write_text("\n".join([*lines, ""]))
        code = main(["config", "check", "-c", str(settings)])
        return code, capsys.readouterr().err

    assert checked(authority.issue("good")) == (0, "")
    near, ended = authority.issue("near", days=20), authority.issue("ended", days=-1)
    door = f"the certificate of 127.0.0.1:{broker.port}"
    code, text = checked(near)
    assert code == 0
    assert text.startswith(f"holdfast: warning: {near.certificate}: {door} ends at ")
    code, text = checked(ended)
    assert code == 2
    assert text.startswith(f"holdfast: {ended.certificate}: {door} ended at ")

    # A file of two listeners is told once.
    (tmp_path / "passwords").chmod(0o644)
    code, text = checked(near, 1)
    assert code == 0
    assert text.count(f"holdfast: warning: {near.certificate}: {door}, 127.0.0.1:1 ends at ") == 1
    assert text.count(f"holdfast: warning: {tmp_path}/passwords: every user of this machine") == 1
    assert len(text.splitlines()) == 2
    assert checked(ended, 1)[1].count(f"{door}, 127.0.0.1:1 ended at ") == 1

    peers = {"certificate": ended.certificate, "key": ended.key, "ca": authority.ca}
    broker.settings = {"cluster": {"peer_bind": "127.0.0.1", "peer_port": free_port(), **peers}}
    broker.launch()
    try:
        until(lambda: "certificate_expired" in broker.log_text(), "the line of the start")
        line = f"ERROR certificate_expired text='{ended.certificate}: the certificate of peers"
        assert line in broker.log_text()

        def told() -> list[str]:
            try:
                found: list[str] = json.loads(broker.admin("/readyz")[1])["certificates_expired"]
            except OSError:
                return []
            return found

        until(lambda: [each.split(":")[0] for each in told()] == [ended.certificate], "/readyz")
    finally:
        broker.kill()

"""Listeners behind a proxy that passes the client's address on, and Unix sockets."""

import json
import os
import shutil
import socket
import ssl
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.brokers import one_process
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses
from tests.e2e.listeners_broker import PUB, ListenersBroker, mosquitto_pub
from tests.e2e.test_reload import Client, post_reload, until
from tests.e2e.wire import DISCONNECT, Closed, Wire, connect, read_properties
from tests.support.certificates import Authority
from tests.support.ports import free_port

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
TIMEOUT_S = 20.0
USE_ANOTHER_SERVER = 0x9C
SERVER_REFERENCE = 0x1C
EXAMPLE = Path(__file__).parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


class Haproxy:
    """Debian's HAProxy with one frontend for each (port, server line)."""

    def __init__(self, directory: Path, ways: dict[int, str], certificate: str = "") -> None:
        text = "defaults\n mode tcp\n timeout connect 5s\n timeout client 1m\n timeout server 1m\n"
        for port, server in ways.items():
            secure = f" ssl crt {certificate}" if certificate and "terminated" in server else ""
            text += f"frontend f{port}\n bind 127.0.0.1:{port}{secure}\n default_backend b{port}\n"
            text += f"backend b{port}\n server {server}\n"
        path = directory / "haproxy.cfg"
        path.write_text(text)
        assert HAPROXY is not None
        self.process = subprocess.Popen([HAPROXY, "-f", str(path), "-db"])
        for port in ways:
            until(lambda port=port: accepts(port), "HAProxy listens")  # type: ignore[misc]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def exchange(port: int, *pieces: bytes) -> bytes:
    """What the broker replies to these bytes before it closes, or within a second of silence."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(0.02)
            client.settimeout(1)
            return client.recv(1000)
        except (TimeoutError, ConnectionError):
            return b""


def header_of(address: str, port: int) -> bytes:
    body = socket.inet_aton(address) + socket.inet_aton("10.9.9.9") + struct.pack(">HH", port, 1883)
    return SIGNATURE + b"\x21\x11" + struct.pack(">H", len(body)) + body


class Behind:
    """A broker with listeners behind a proxy: plain, TLS and WebSocket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plain, self.tls, self.closed = free_port(), free_port(), free_port()
        self.authority = Authority(directory)
        self.server = self.authority.issue()
        files = {"certificate": self.server.certificate, "key": self.server.key}
        self.broker = ListenersBroker(
            directory / "broker",
            [
                {"port": self.plain, "proxies": ["127.0.0.0/8"]},
                {"port": self.tls, "proxies": ["127.0.0.1"], **files},
                {"port": self.closed, "proxies": ["10.1.2.3"]},
            ],
            {
                "logging": {"level": "debug"},
                "limits": {"connect_timeout_s": 2.0, "pending_connects_per_address": 2},
            },
        )
        self.broker.start()

    def log_has(self, *texts: str) -> None:
        until(
            lambda: any(
                all(text in line for text in texts) for line in self.broker.log_text().splitlines()
            ),
            f"a line with {texts}",
        )


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    made = Behind(tmp_path_factory.mktemp("behind"))
    yield made
    assert made.broker.stop() == 0
    assert "Traceback" not in made.broker.log_text()


def test_the_address_in_the_header_is_the_client_s(behind: Behind) -> None:
    """In one piece, byte by byte, in both versions; what follows the header is MQTT."""
    text = b"PROXY TCP4 10.3.0.1 10.9.9.9 777 1883\r\n"
    packet = connect("c", 4)
    assert exchange(behind.plain, text + packet)[:1] == b"\x20"
    behind.log_has("10.3.0.1:777")
    binary = header_of("10.3.0.2", 778)
    pieces = [bytes((byte,)) for byte in binary]
    assert exchange(behind.plain, *pieces, packet)[:1] == b"\x20"
    behind.log_has("10.3.0.2:778")


@one_process("each process has its own limit")
def test_limits_of_an_address_are_those_of_the_client(behind: Behind) -> None:
    """Two connections of one address may wait for their CONNECT; the proxy has many."""
    waiting = []
    for number in range(6):
        client = socket.create_connection(("127.0.0.1", behind.plain), TIMEOUT_S)
        client.sendall(header_of(f"10.4.0.{number // 2}", 5000 + number))
        waiting.append(client)
    refused = exchange(behind.plain, header_of("10.4.0.1", 6000), connect("d", 4))
    assert refused == b""
    behind.log_has("address_full", "10.4.0.1:6000")
    assert exchange(behind.plain, header_of("10.4.0.9", 6001), connect("e", 4))[:1] == b"\x20"
    for client in waiting:
        client.close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (connect("c", 4), "begins with no header"),
        (b"PROXY TCP4 1.2.3.4 nonsense 1 2\r\n", "nonsense"),
        (SIGNATURE, "was not complete after 2 s"),
        (b"PROXY TCP4 ", "was not complete after 2 s"),
    ],
)
def test_connections_without_a_header_are_closed(behind: Behind, data: bytes, text: str) -> None:
    with socket.create_connection(("127.0.0.1", behind.plain), TIMEOUT_S) as client:
        client.sendall(data)
        with suppress(ConnectionResetError):
            assert client.recv(100) == b""
    behind.log_has("proxy_header_failed", text)
    assert Client(behind.broker.port).reason == 0


def test_a_health_check_that_sends_nothing_has_no_line(behind: Behind) -> None:
    """A garbled connection after it shows that the broker has seen both."""

    def failures() -> int:
        text = behind.broker.log_text()
        return text.count("proxy_header_failed") + text.count("tls_handshake_failed")

    header = header_of("10.3.0.9", 900)
    for port, before in ((behind.plain, b""), (behind.tls, b""), (behind.tls, header)):
        known = failures()
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as check:
            check.sendall(before)
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
            client.sendall(before + b"garbage")
            with suppress(ConnectionResetError):
                assert client.recv(100)[:1] in (b"", b"\x15")
        until(lambda known=known: failures() > known, "a line")
        assert failures() == known + 1


def test_only_the_configured_proxies_are_believed(behind: Behind) -> None:
    assert exchange(behind.closed, header_of("10.3.0.1", 1), connect("c", 4)) == b""
    behind.log_has("proxy_header_failed", "127.0.0.1", "is not in proxies")


@pytest.mark.skipif(HAPROXY is None or PUB is None, reason="haproxy is not installed")
def test_haproxy_with_both_versions_and_tls(behind: Behind) -> None:
    both = behind.directory / "both.pem"
    server = behind.server
    both.write_text(Path(server.certificate).read_text() + Path(server.key).read_text())
    version_1, version_2, passed, terminated = (free_port() for _ in range(4))
    proxy = Haproxy(
        behind.directory,
        {
            version_1: f"one 127.0.0.1:{behind.plain} send-proxy",
            version_2: f"two 127.0.0.1:{behind.plain} send-proxy-v2",
            passed: f"passed 127.0.0.1:{behind.tls} send-proxy-v2",
            terminated: f"terminated 127.0.0.1:{behind.plain} send-proxy-v2-ssl-cn",
        },
        str(both),
    )
    try:
        ca = ["--cafile", behind.authority.ca, "-h", "127.0.0.1"]
        for number, (port, options) in enumerate(
            ((version_1, []), (version_2, []), (passed, ca), (terminated, ca))
        ):
            name = f"client-{number}"
            done = mosquitto_pub("-p", str(port), "-i", name, "-V", "5", *options)
            assert done.returncode == 0, done.stderr
            # The proxy's own connection has another port than the client's.
            behind.log_has(name, "127.0.0.1:")
    finally:
        proxy.stop()


class ProxiedNode(ClusterNode):
    """A node with `listeners` besides its own one."""

    listeners: list[dict[str, Any]]

    def command(self) -> list[str]:
        command = super().command()
        with (self.directory / "holdfast.toml").open("a") as file:
            for table in [{}, *self.listeners]:
                file.write("[[listeners]]\n")
                file.write("".join(f"{key} = {json.dumps(each)}\n" for key, each in table.items()))
        return command


class ProxiedCluster(ClusterProcesses):
    node_class = ProxiedNode


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
def test_clients_of_a_balancer_are_sent_to_the_balancer(tmp_path: Path) -> None:
    """Never to an inside address. Two pools of the balancer: one is advertised, one is not."""
    authority = Authority(tmp_path)
    server = authority.issue()
    files = {"certificate": server.certificate, "key": server.key}
    advertised, silent = free_port(), free_port()
    settings = {"cluster": {"partitions": 4, "min_insync": 1}}
    cluster = ProxiedCluster(tmp_path / "cluster", 2, settings)
    behind: list[str] = []
    for name, node in cluster.nodes.items():
        assert isinstance(node, ProxiedNode)
        pooled, other, secure, secured = (free_port() for _ in range(4))
        node.listeners = [
            {"port": pooled, "proxies": ["127.0.0.1"], "advertise": f"127.0.0.1:{advertised}"},
            {"port": other, "proxies": ["127.0.0.1"], "mount": "m/"},
            {"port": secure, **files},
            {"port": secured, "proxies": ["127.0.0.1"], "advertise": "lb.example:8883", **files},
        ]
        behind.append(f"{name} 127.0.0.1:{pooled} send-proxy-v2")
        behind.append(f"{name} 127.0.0.1:{other} send-proxy-v2")
    context = ssl.create_default_context(cafile=authority.ca)
    proxy = None
    try:
        cluster.start()
        first, second = cluster.nodes.values()
        assert isinstance(first, ProxiedNode)
        assert isinstance(second, ProxiedNode)
        proxy = Haproxy(tmp_path, {advertised: behind[2], silent: behind[3]})
        ways = [
            Wire(advertised),
            Wire(silent),
            Wire(second.port),
            Wire(second.listeners[2]["port"]),
        ]
        ways[3].socket = context.wrap_socket(ways[3].socket, server_hostname="127.0.0.1")
        for number, way in enumerate(ways):
            assert way.connect(f"client-{number}").reason == 0
        assert first.admin("/cluster/drain?node=n2", "POST")[0] == 200
        references = []
        for way in ways:
            (goodbye,) = [each for each in way.wait_closed(TIMEOUT_S) if each.kind == DISCONNECT]
            assert goodbye.reason == USE_ANOTHER_SERVER
            found = dict(read_properties(goodbye.body, 1)[0])
            references.append(found.get(SERVER_REFERENCE, ""))
        assert references == [
            f"127.0.0.1:{advertised}",
            "",
            f"127.0.0.1:{first.port}",
            f"127.0.0.1:{first.listeners[2]['port']}",
        ]
        late = Wire(advertised).connect("late")
        assert (late.reason, late.value(SERVER_REFERENCE)) == (
            USE_ANOTHER_SERVER,
            f"127.0.0.1:{advertised}",
        )
    finally:
        if proxy is not None:
            proxy.stop()
        cluster.end()
    for node in cluster.nodes.values():
        assert "Traceback" not in node.log_text()


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
def test_the_example_in_front_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """deploy/haproxy with other addresses: a node that hangs loses its clients to the others, and
    receives some again when it is ready. HAProxy leaves the pace of a drain to the node."""
    monkeypatch.setenv("HOLDFAST_LISTENERS__0__PROXIES", "127.0.0.0/8")
    port = free_port()
    assert HAPROXY is not None
    with ClusterProcesses(tmp_path / "cluster", settings={"cluster": {"partitions": 4}}) as cluster:
        text = EXAMPLE.read_text().replace("bind :1883", f"bind 127.0.0.1:{port}")
        for number, node in enumerate(cluster.nodes.values(), 1):
            line = f"server n{number} 10.0.0.{number}:1884"
            assert line in text
            text = text.replace(
                line, f"server n{number} 127.0.0.1:{node.port} port {node.admin_port}"
            )
        (tmp_path / "haproxy.cfg").write_text(text.replace("maxconn 100000", "maxconn 100"))
        log = tmp_path / "haproxy.log"
        with log.open("w") as file:
            proxy = subprocess.Popen(
                [HAPROXY, "-f", str(tmp_path / "haproxy.cfg"), "-db"], stderr=file
            )
        try:
            until(lambda: accepts(port), "HAProxy listens")
            with Wire(port) as client:
                client.connect("c")
                assert client.publish("t", b"x", qos=1) < 0x80
                counts = {n.node_id: n.cluster()["sessions_here"] for n in cluster.running}
                assert sorted(counts.values()) == [0, 0, 1]
                name = max(counts, key=lambda node: int(counts[node]))
                cluster.pause(name)
                client.wait_closed(TIMEOUT_S)
            until(lambda: is_served(port), "another node serves")
            cluster.resume(name)
            cluster.wait_healthy()
            until(lambda: receives(cluster.nodes[name], port), "the node serves again")
            with ExitStack() as stack:
                clients = [stack.enter_context(Wire(port)) for _ in range(6)]
                for number, client in enumerate(clients):
                    client.connect(f"f{number}")
                drained = cluster.nodes[name]
                assert drained.cluster()["sessions_here"] > 1
                seen = len(log.read_text())
                for request in (
                    "api/v1/cluster/clients/pace?clients_per_s=0.01&",
                    "cluster/drain?",
                ):
                    assert drained.admin(f"/{request}node={name}", "POST")[0] == 200
                until(lambda: "Server holdfast/" in log.read_text()[seen:], "HAProxy has noticed")
                # The node sends the first one away at once, and the next one after 100 s.
                assert [is_open(client) for client in clients].count(False) <= 1
        finally:
            proxy.kill()
            proxy.wait()


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
def test_the_example_needs_two_descriptors_a_client(tmp_path: Path) -> None:
    """HAProxy refuses to start with fewer, so `LimitNOFILE` cannot be too small unnoticed."""
    text = EXAMPLE.read_text()
    assert "more than twice this number" in text
    port, config = free_port(), tmp_path / "haproxy.cfg"
    config.write_text(text.replace("bind :1883", f"bind 127.0.0.1:{port}").replace("100000", "100"))

    def start(descriptors: int) -> subprocess.Popen[str]:
        command = f"ulimit -n {descriptors}; exec {HAPROXY} -db -f {config}"
        return subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE, text=True)

    refused = start(2 * 100)
    _, log = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 1
    assert "Cannot raise FD limit" in log
    proxy = start(2 * 100 + 50)
    try:
        until(lambda: accepts(port), "HAProxy listens")
    finally:
        proxy.kill()
        proxy.communicate()


def receives(node: ClusterNode, port: int) -> bool:
    """Whether the node gets one of three new clients of the proxy."""
    with ExitStack() as clients:
        for number in range(3):
            clients.enter_context(Wire(port)).connect(f"e{number}")
        return bool(node.cluster()["sessions_here"])


def is_open(client: Wire) -> bool:
    """Whether the broker still serves the connection."""
    try:
        client.ping()
    except (OSError, Closed, AssertionError):
        return False
    return True


def is_served(port: int) -> bool:
    """Whether a new client of the proxy gets a publish acknowledged."""
    try:
        with Wire(port) as client:
            client.connect("d")
            return client.publish("t", b"x", qos=1) < 0x80
    except (OSError, AssertionError):
        return False


def test_unix_sockets(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    broker = ListenersBroker(
        tmp_path / "broker", [{"socket": str(path), "socket_mode": "0600"}], {}
    )
    broker.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"unix:{path}" in broker.log_text()
    if PUB is not None:
        assert mosquitto_pub("--unix", str(path)).returncode == 0
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(str(path))
        client.sendall(connect("u", 4))
        assert client.recv(4)[:1] == b"\x20"
        broker.listeners[0]["socket_mode"] = "0660"
        broker.write()
        assert post_reload(broker)[0] == 200
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    # A process that was killed leaves its socket behind; the next one replaces it.
    broker.kill()
    assert path.exists()
    broker.start()
    assert mosquitto_pub("--unix", str(path)).returncode == 0
    other = ListenersBroker(tmp_path / "other", [{"socket": str(path)}], {})
    with pytest.raises(RuntimeError, match="another process listens there"):
        other.start()
    assert broker.stop() == 0
    assert not path.exists()
    assert os.listdir(tmp_path / "broker")  # Its data stays.
    path.write_text("no socket")
    with pytest.raises(RuntimeError, match="there is a file that is no socket"):
        broker.start()
    assert path.read_text() == "no socket"

"""A broker whose clients' sockets are in other processes: what clients notice of it, and of their
end."""

import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.listeners_broker import PUB, ListenersBroker, mosquitto_pub
from tests.e2e.test_reload import Client, post_reload, until
from tests.e2e.wire import DISCONNECT, Closed, Will, Wire, publish
from tests.support.certificates import Authority
from tests.support.ports import free_port

pytestmark = pytest.mark.skipif(PUB is None, reason="mosquitto-clients is not installed")

WORKERS = 2
QOS0 = 20_000
SLOW = 200
COMEBACKS = 100
LARGE_BYTES = 1_500_000
"""More than the window of a connection."""
FLOODS = {"port": 30_000, "tls": 5_000}
"""The strangers of a flood by its door: more than two workers announce to a stopped broker."""
WAIT_S = 0.2


class Site:
    """A broker with two workers, a plain listener, one with TLS, and a WebSocket listener."""

    def __init__(self, directory: Path) -> None:
        self.tls, self.websocket = free_port(), free_port()
        self.authority = Authority(directory)
        self.server = self.authority.issue()
        self.broker = ListenersBroker(
            directory / "broker",
            [
                {
                    "port": self.tls,
                    "certificate": self.server.certificate,
                    "key": self.server.key,
                    "client_ca": self.authority.ca,
                },
                {"port": self.websocket, "transport": "websocket"},
            ],
            {"server": {"io_workers": WORKERS}},
        )
        self.broker.start()

    @property
    def port(self) -> int:
        return self.broker.port

    def workers(self) -> list[int]:
        """The process ids of the workers."""
        return self.broker.children()

    def worker_of(self, client: "Wire") -> int:
        """The worker that has the other end of a client's socket."""
        port = client.socket.getsockname()[1]
        for each in self.workers():
            inodes = _open_files(each)
            for line in Path(f"/proc/{each}/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                remote = int(fields[2].rpartition(":")[2], 16)
                if remote == port and f"socket:[{fields[9]}]" in inodes:
                    return each
        raise AssertionError(f"no worker has the connection from port {port}")


def connect(port: int, name: str) -> Wire:
    wire = Wire(port, timeout_s=30.0)
    wire.connect(name)
    return wire


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    if made.broker.process is not None:
        workers = made.workers()
        assert made.broker.stop() == 0
        until(lambda: not any(map(_runs, workers)), "the workers have ended")
    assert "Traceback" not in made.broker.log_text()


def _open_files(process_id: int) -> set[str]:
    found = set()
    for each in Path(f"/proc/{process_id}/fd").iterdir():
        # It may be closed meanwhile.
        with suppress(FileNotFoundError):
            found.add(os.readlink(each))
    return found


def _ignores_signals(process_id: int) -> bool:
    status = Path(f"/proc/{process_id}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return bool(ignored & 1 << signal.SIGINT - 1)


def _runs(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _is_refused(port: int) -> bool:
    """Whether a client that sends nothing is disconnected at once."""
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.settimeout(WAIT_S)
        try:
            return not silent.recv(1)
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True


def test_clients_of_every_listener_meet(site: Site) -> None:
    client = Client(site.port)
    client.subscribe("#")
    assert mosquitto_pub("-p", str(site.port)).returncode == 0
    tls = ("-h", "127.0.0.1", "-p", str(site.tls), "--cafile", site.authority.ca)
    assert mosquitto_pub(*tls).returncode == 0
    until(lambda: client.topics == ["t", "t"], "two messages")
    # A client's certificate proves its name, although the handshake is in another process.
    device = site.authority.issue("dev-1")
    run = mosquitto_pub(*tls, "--cert", device.certificate, "--key", device.key, "-d")
    assert run.returncode == 0
    until(lambda: "user='dev-1'" in site.broker.log_text(), "the certificate's name")
    # What is no TLS is counted and logged by the broker.
    with socket.create_connection(("127.0.0.1", site.tls)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert plain.recv(100) is not None
    until(lambda: "tls_handshake_failed" in site.broker.log_text(), "a line of the log")
    assert "holdfast_handshakes_failed_total{" in site.broker.admin("/metrics")[1]
    # A reload gives the workers another certificate; who is connected stays.
    other = site.authority.issue("renewed")
    os.replace(other.certificate, site.server.certificate)
    os.replace(other.key, site.server.key)
    assert post_reload(site.broker)[0] == 200
    context = ssl.create_default_context(cafile=site.authority.ca)

    def renewed() -> bool:
        address = ("127.0.0.1", site.tls)
        with (
            socket.create_connection(address) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
        ):
            return "renewed" in str(wrapped.getpeercert())

    until(renewed, "the other certificate")
    assert mosquitto_pub("-p", str(site.port)).returncode == 0
    until(lambda: len(client.topics) == 4, "the last message")
    client.close()


def test_what_a_client_sends_before_its_end_arrives(site: Site) -> None:
    """The node pauses the input of a client with many packets, and learns of the end after them."""
    receiver = connect(site.port, "receiver")
    receiver.subscribe(("flood", 0))
    sender = connect(site.port, "sender")
    sender.send(publish("flood", b"x" * 20) * QOS0)
    sender.disconnect()
    for _ in range(QOS0):
        assert receiver.message().payload == b"x" * 20
    receiver.disconnect()


def test_large_messages_pass_the_window(site: Site) -> None:
    receiver = connect(site.port, "receiver")
    receiver.subscribe(("large", 1))
    sender = connect(site.port, "sender")
    payload = os.urandom(LARGE_BYTES)
    assert sender.publish("large", payload, 1) == 0
    assert receiver.message().payload == payload
    for each in (sender, receiver):
        each.disconnect()


def test_a_client_that_does_not_read_hurts_nobody(site: Site) -> None:
    """Its deliveries wait in the log, in order, and others go on."""
    slow = connect(site.port, "slow")
    slow.subscribe(("load", 1))
    sender = connect(site.port, "sender")
    for number in range(SLOW):
        assert sender.publish("load", number.to_bytes(2, "big") + bytes(100_000), 1) == 0
    for number in range(SLOW):
        assert slow.message().payload[:2] == number.to_bytes(2, "big")
    for each in (slow, sender):
        each.disconnect()


def test_a_worker_takes_its_own_clients_along_and_is_replaced(site: Site) -> None:
    clients = [connect(site.port, f"c{number}") for number in range(20)]
    by_worker: dict[int, list[Wire]] = {}
    for each in clients:
        by_worker.setdefault(site.worker_of(each), []).append(each)
    victim = next(iter(by_worker))
    os.kill(victim, signal.SIGKILL)
    for each in by_worker.pop(victim):
        with pytest.raises(Closed):
            each.receive()
    for each in (one for others in by_worker.values() for one in others):
        each.ping()
    assert mosquitto_pub("-p", str(site.port)).returncode == 0
    until(lambda: len(site.workers()) == WORKERS and victim not in site.workers(), "another worker")
    counted = 'io_workers_replaced_total{node="n1"} 1.0'
    until(lambda: counted in site.broker.admin("/metrics")[1], "the metric")
    # All of them: the connections that arrive meanwhile wait for the next ones.
    for each in site.workers():
        os.kill(each, signal.SIGKILL)
    assert mosquitto_pub("-p", str(site.port)).returncode == 0


def test_a_broker_takes_its_workers_along(site: Site) -> None:
    client = connect(site.port, "c")
    workers = site.workers()
    assert len(workers) == WORKERS
    # A service manager sends them to all; the broker decides when they end.
    until(lambda: all(map(_ignores_signals, workers)), "workers that run")
    os.kill(workers[0], signal.SIGINT)
    os.kill(workers[1], signal.SIGTERM)
    client.ping()
    site.broker.kill()
    with pytest.raises(Closed):
        client.receive()
    until(lambda: not any(map(_runs, workers)), "the workers have ended")
    site.broker.start()
    connect(site.port, "c").disconnect()


def test_a_client_that_comes_back_overtakes_nothing(site: Site) -> None:
    """Its next connection may be in another worker, and its CONNECT be here before what it has sent
    on the one before: a message without acknowledgement, and the end without a will."""
    watcher = connect(site.port, "watcher")
    watcher.subscribe(("#", 0))
    for number in range(COMEBACKS):
        client = Wire(site.port, timeout_s=30.0)
        client.connect("again", clean=False, will=Will("gone", b""))
        client.send(publish("t", b"%d" % number))
        client.disconnect()
    got = [watcher.message() for _ in range(COMEBACKS)]
    assert [each.payload for each in got] == [b"%d" % each for each in range(COMEBACKS)]
    watcher.disconnect()


def test_a_takeover_waits_for_no_worker_that_is_stopped(site: Site) -> None:
    older = connect(site.port, "same")
    stopped = site.worker_of(older)
    os.kill(stopped, signal.SIGSTOP)
    try:
        # The other worker accepts it.
        newer = connect(site.port, "same")
        newer.ping()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert older.receive().kind == DISCONNECT
    with pytest.raises(Closed):
        older.receive()
    newer.disconnect()


def test_a_stopped_worker_leaves_the_port_when_the_broker_dies(site: Site) -> None:
    workers = site.workers()
    until(lambda: all(map(_ignores_signals, workers)), "workers that run")
    for each in workers:
        os.kill(each, signal.SIGSTOP)
    site.broker.kill()
    # The kernel ends them a moment after the broker. Until then it may give them a connection.
    until(lambda: not any(map(_runs, workers)), "the workers have ended")
    site.broker.start()
    connect(site.port, "c").disconnect()


def test_a_worker_that_starts_beside_a_damaged_certificate_tries_again(site: Site) -> None:
    certificate = Path(site.server.certificate)
    content = certificate.read_bytes()
    certificate.write_bytes(b"half of it")
    for each in site.workers():
        os.kill(each, signal.SIGKILL)
    event = "listener_not_opened"
    until(lambda: site.broker.log_text().count(event) >= WORKERS, "a line of each worker")
    certificate.write_bytes(content)
    tls = ("-h", "127.0.0.1", "-p", str(site.tls), "--cafile", site.authority.ca)
    assert mosquitto_pub(*tls).returncode == 0


@pytest.mark.parametrize("door", ["port", "tls"])
def test_a_flood_beside_a_stopped_broker_is_bounded(site: Site, door: str) -> None:
    """Each stranger adds lines and frames to what waits for the broker, whether it stays or not."""
    port = getattr(site, door)
    client = connect(site.port, "c")
    process = site.broker.process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert not _is_refused(port), "a stranger waits for the broker"
        for _ in range(FLOODS[door]):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                # No port of this machine is kept for what was sent.
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stranger.sendall(b"no TLS")
        until(lambda: _is_refused(port), "a worker that refuses connections")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    until(lambda: "io_worker_behind" in site.broker.log_text(), "a line of the log")
    client.ping()
    until(lambda: mosquitto_pub("-p", str(site.port)).returncode == 0, "a client that is let in")
    refused = re.search(
        r"connections_refused_total\{[^}]*\} (\S+)", site.broker.admin("/metrics")[1]
    )
    assert refused is not None
    assert float(refused[1]) > 0


@pytest.mark.long
def test_a_worker_that_hangs_is_replaced(site: Site) -> None:
    victim = site.workers()[0]
    os.kill(victim, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while victim in site.workers():
        assert time.monotonic() < deadline, site.broker.log_text()
        time.sleep(0.1)
    assert "io_worker_hangs" in site.broker.log_text()
    until(lambda: len(site.workers()) == WORKERS, "another worker")


def test_settings_that_no_worker_can_read_are_refused(tmp_path: Path) -> None:
    proxies = [f"10.{n >> 8}.{n & 255}.1" for n in range(12_000)]
    listener = {"port": free_port(), "proxies": proxies}
    broker = ListenersBroker(tmp_path, [listener], {"server": {"io_workers": 1}})
    run = subprocess.run(broker.command(), capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "bytes, and at most 131072 with I/O workers" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    broker = ListenersBroker(tmp_path, [], {"server": {"io_workers": 0}})
    command = [*broker.command(), "--io-workers", "many"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert run.stderr == "holdfast: --io-workers 'many': give a number, or auto\n"

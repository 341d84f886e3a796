"""TLS on the admin port: every route over it, a reload of the certificate, and silent clients."""

import http.client
import json
import os
import pickle
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from holdfast.client.admin_access import AdminAccess
from holdfast.client.admin_connection import AdminConnection, AdminError, NoAnswer
from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.client.log.reading.reader_http import read_ranges
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.servers import Servers
from holdfast.security.http.server import HANDSHAKES_MAX
from holdfast_lake.source.options import parse
from tests.e2e import wire
from tests.e2e.brokers import PROCESSES, SOURCE, Holdfast
from tests.e2e.test_admin_access import made_token
from tests.support.waiting import until


class SecureHoldfast(Holdfast):
    """A broker whose admin port has TLS."""

    def __init__(self, directory: Path) -> None:
        self.ca = trustme.CA()
        self.ca_file = directory / "ca.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.certificate, self.key = directory / "admin.pem", directory / "admin.key"
        self.issue()
        admin = {"certificate": str(self.certificate), "key": str(self.key)}
        super().__init__(directory, {"admin": admin})

    def issue(self) -> None:
        made = self.ca.issue_cert("127.0.0.1", "localhost")
        made.private_key_pem.write_to_path(str(self.key))
        made.cert_chain_pems[0].write_to_path(str(self.certificate))

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))

    def ask(
        self, method: str, path: str, token: str = "", body: object = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.admin_port, timeout=20, context=self.context()
        )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, headers)
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()
        finally:
            connection.close()

    def admin(self, path: str) -> tuple[int, str]:
        status, _, body = self.ask("GET", path)
        return status, body.decode()

    def serial(self) -> str:
        address = ("127.0.0.1", self.admin_port)
        with (
            socket.create_connection(address, timeout=20) as raw,
            self.context().wrap_socket(raw, server_hostname="127.0.0.1") as secured,
        ):
            found = secured.getpeercert()
            assert found is not None
            return str(found["serialNumber"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureHoldfast]:
    made = SecureHoldfast(tmp_path_factory.mktemp("tls"))
    made.start()
    with wire.Wire(made.port) as client:
        client.connect("c")
        for number in range(20):
            client.publish(f"t/{number}", bytes(1000), qos=1)
    yield made
    made.kill()
    assert "Traceback" not in made.log_text(), made.log_text()[-6000:]


def test_the_log_comes_over_tls(broker: SecureHoldfast) -> None:
    status, _, body = broker.ask("GET", "/api/v1/log")
    assert status == 200
    ranges = json.loads(body)["ranges"]
    wanted = [[number, first, end] for number, (first, end) in enumerate(ranges)]
    status, headers, data = broker.ask("POST", "/api/v1/log/read", body={"ranges": wanted})
    assert status == 200
    told = json.loads(headers["holdfast-log"])
    # Of several processes, this one stores its share of the partitions.
    reached = dict(told["next"])
    assert reached.items() <= {number: end for number, (_, end) in enumerate(ranges)}.items()
    assert len(reached) == len(ranges) // PROCESSES
    assert len(data) > 20_000 // PROCESSES**2
    status, _, text = broker.ask("POST", "/api/v1/log/read", body={"ranges": [[99, 0, 1]]})
    assert status == 400
    assert "partition 99" in json.loads(text)["error"]


def test_plain_http_gets_nothing(broker: SecureHoldfast) -> None:
    with pytest.raises(NoAnswer):
        AdminConnection(("127.0.0.1", broker.admin_port)).get("/api/v1/log", dict)
    # Its signer is not one that the system trusts.
    stranger = AdminConnection(("127.0.0.1", broker.admin_port), access=AdminAccess(is_https=True))
    with pytest.raises(NoAnswer, match="cannot reach"):
        stranger.get("/api/v1/log", dict)
    access = AdminAccess(is_https=True, ca_file=str(broker.ca_file))
    found = AdminConnection(("127.0.0.1", broker.admin_port), access=access)
    assert found.get("/api/v1/log", dict)["node"] == "n1"
    found.close()


def test_the_command_line_over_tls(broker: SecureHoldfast) -> None:
    environment = dict(os.environ, PYTHONPATH=str(SOURCE))
    words = ["access", "token", "list", "--admin", f"https://127.0.0.1:{broker.admin_port}"]
    command = [sys.executable, "-m", "holdfast.cli.main", *words]
    done = subprocess.run(
        [*command, "--ca-file", str(broker.ca_file)],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert refused.returncode == 1
    assert "certificate" in refused.stderr.lower()


def test_a_new_certificate_by_reload(broker: SecureHoldfast) -> None:
    before = broker.serial()
    kept = http.client.HTTPSConnection(
        "127.0.0.1", broker.admin_port, timeout=20, context=broker.context()
    )
    kept.request("GET", "/healthz")
    kept.getresponse().read()
    broker.issue()
    assert broker.serial() == before
    assert broker.process is not None
    broker.process.send_signal(signal.SIGHUP)
    until(lambda: broker.serial() != before, "the certificate is the old one")
    kept.request("GET", "/healthz")
    assert kept.getresponse().read() == b"ok\n"
    kept.close()
    # A broken file leaves the certificate in force, and the reply says so.
    serial = broker.serial()
    saved = broker.certificate.with_suffix(".saved")
    shutil.copy(broker.certificate, saved)
    broker.certificate.write_text("nonsense")
    status, _, text = broker.ask("POST", "/api/v1/reload")
    assert status == 409
    assert "admin.pem" in json.loads(text)["error"]
    assert broker.serial() == serial
    shutil.copy(saved, broker.certificate)


def test_silent_handshakes_keep_nobody_out(broker: SecureHoldfast) -> None:
    address = ("127.0.0.1", broker.admin_port)
    silent = [socket.create_connection(address, timeout=20) for _ in range(3 * HANDSHAKES_MAX)]
    silent[1].sendall(b"\x16\x03\x01")
    silent[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert broker.ask("GET", "/healthz")[0] == 200
    # The oldest made room.
    silent[0].settimeout(20)
    try:
        assert silent[0].recv(1) == b""
    except ConnectionResetError:
        pass
    for each in silent:
        each.close()
    assert broker.ask("GET", "/healthz")[0] == 200


def test_a_session_cookie_over_tls_is_secure(broker: SecureHoldfast) -> None:
    token = made_token(broker.data, "admin")
    until(lambda: broker.ask("GET", "/metrics")[0] == 401, "the token is not noticed")
    user = {"name": "ada", "role": "viewer", "password": "a right password"}
    assert broker.ask("POST", "/api/v1/users", token, user)[0] == 200
    login = {"user": "ada", "password": "a right password"}
    status, headers, _ = broker.ask("POST", "/api/v1/login", body=login)
    assert status == 200
    assert "Secure" in headers["set-cookie"]


def test_the_spark_source_reads_over_tls_with_a_token(
    broker: SecureHoldfast, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(made_token(broker.data, "reader") + "\n")
    # A viewer's token reads no payloads.
    wrong_file = tmp_path / "wrong"
    wrong_file.write_text(made_token(broker.data, "viewer"))
    given = {
        "servers": f"https://127.0.0.1:{broker.admin_port}",
        "tokenFile": str(token_file),
        "caFile": str(broker.ca_file),
    }
    options = parse(given)
    assert token_file.read_text().strip() not in repr(options)
    # Spark sends the options to the tasks.
    options = pickle.loads(pickle.dumps(options))
    until(lambda: broker.ask("GET", "/metrics")[0] == 401, "the tokens are not noticed")
    servers = Servers(options.servers, options.access)
    bounds = servers.bounds()
    servers.close()
    ranges = [OffsetRange(p, each.first, each.end) for p, each in bounds.items() if each.end]
    coverage = Coverage(ranges, fail_on_data_loss=True)
    ports = range(broker.admin_port, broker.admin_port + PROCESSES)
    chunks = read_ranges(
        [("127.0.0.1", port) for port in ports], ranges, coverage, access=options.access
    )
    assert sum(len(chunk.data) for chunk in chunks) > 20_000
    assert coverage.lost == []
    wrong = parse(given | {"tokenFile": str(wrong_file)})
    with pytest.raises(AdminError, match="needs the role reader"):
        Servers(wrong.servers, wrong.access).bounds()


def test_a_wrong_certificate_stops_the_start(tmp_path: Path) -> None:
    broker = SecureHoldfast(tmp_path)
    broker.key.write_text("nonsense")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"admin\.key"):
        broker.start()
    assert time.monotonic() - began < 50

"""What clients do wrong costs the operator's disk a bounded number of bounded lines."""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import FILTERS_MAX
from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import until
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_access import Attempt, write_certificates

LOGROTATE = shutil.which("logrotate", path=f"{os.environ['PATH']}:/usr/sbin")
LONG_ID = "i" * 60_000


class Silent(Holdfast):
    """A broker without standard streams."""

    def command(self) -> list[str]:
        return ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *super().command()]


def test_a_broker_without_standard_streams_serves(tmp_path: Path) -> None:
    broker = Silent(tmp_path)
    broker.start()
    try:
        with wire.Wire(broker.port) as client:
            client.connect("c")
            client.ping()
    finally:
        broker.kill()
    assert not broker.log_text()


def test_one_subscribe_is_one_line(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast({"limits": {"client_id_bytes": 65_535}})
    with wire.Wire(broker.port) as client:
        client.connect(LONG_ID)
        before = len(broker.log_text())
        codes = client.subscribe(*[("a#", 0)] * FILTERS_MAX)
        assert set(codes) == {0x8F}
        client.ping()
    text = broker.log_text()[before:]
    assert text.count("invalid_filter") == 1
    assert f"filters={FILTERS_MAX}" in text
    assert len(text) < 2000


def test_refused_connects_are_cut_and_counted(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    broker = start_holdfast({"security": {"allow_anonymous": False}})
    packet = wire.connect(LONG_ID)
    for _ in range(500):
        with socket.create_connection(("127.0.0.1", broker.port), timeout=10) as one:
            one.sendall(packet)
            assert one.recv(100)[:1] == b"\x20"
    lines = broker.admin("/metrics")[1].splitlines()
    counts = [float(line.rsplit(" ")[-1]) for line in lines if 'reason="Not authorized"' in line]
    assert sum(counts) == 500
    broker.stop()
    text = broker.log_text()
    assert len(text) < 150_000
    assert "connection_refused" in text
    # 30 MB of client ids arrived.
    assert "lines_suppressed event=connection_refused count=" in text


def events(broker: Holdfast, event: str) -> list[dict[str, object]]:
    """The lines of an event in a log of format "json"."""
    found = [json.loads(line) for line in broker.log_text().splitlines()]
    return [each for each in found if each["event"] == event]


def test_who_came_and_why_they_went(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    """A password, an ACL and a certificate: every line names client, user, address and reason."""
    acl = tmp_path / "acl"
    acl.write_text("user alice\ntopic readwrite a/#\n")
    passwords = tmp_path / "passwords"
    subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "passwd", "-b", "-c", passwords, "alice", "pw"],
        check=True,
    )
    authority, files = write_certificates(tmp_path)
    broker = start_holdfast(
        {
            "logging": {"format": "json"},
            "security": {
                "allow_anonymous": False,
                "password_file": str(passwords),
                "acl_file": str(acl),
            },
            "[listeners]": {**files, "require_certificate": True},
        }
    )
    own = authority.issue_cert("device-7", common_name="device-7")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "device.pem"))
    context = ssl.create_default_context(cafile=files["client_ca"])
    context.load_cert_chain(str(tmp_path / "device.pem"))

    def attempt(password: str) -> Attempt:
        made = Attempt(broker.port)
        made.client.tls_set_context(context)
        made.client.username_pw_set("alice", password)
        return made

    assert attempt("wrong").run() == reasons.BAD_USER_NAME_OR_PASSWORD
    good = attempt("pw")
    assert good.run() == reasons.SUCCESS
    good.client.publish("b/secret", b"x", 1).wait_for_publish(10)
    good.client.disconnect()
    stranger = ssl.create_default_context(cafile=files["client_ca"])
    with (
        socket.create_connection(("127.0.0.1", broker.port), timeout=10) as raw,
        suppress(OSError),
        stranger.wrap_socket(raw, server_hostname="127.0.0.1") as secured,
    ):
        assert not secured.recv(1)
    broker.stop()
    (refused,) = events(broker, "connection_refused")
    assert (refused["level"], refused["user"]) == ("warning", "alice")
    assert refused["reason"] == "Bad User Name or Password"
    (connected,) = events(broker, "connected")
    (denied,) = events(broker, "publish_denied")
    (disconnected,) = events(broker, "disconnected")
    for line in (connected, denied, disconnected):
        assert line["user"] == "alice"
        assert str(line["remote"]).startswith("127.0.0.1:")
        assert line["client"] == connected["client"]
    assert denied["topic"] == "b/secret"
    assert disconnected["reason"] == "Normal disconnection"
    # The first ones are of the harness, which waits for the port.
    failed = events(broker, "tls_handshake_failed")[-1]
    assert "certificate" in str(failed["error"]).lower()
    assert str(failed["remote"]).startswith("127.0.0.1:")


@pytest.mark.skipif(LOGROTATE is None, reason="logrotate is not installed")
def test_a_log_file_is_rotated_as_the_page_says(tmp_path: Path) -> None:
    """The shell has opened the file, so without `copytruncate` the broker writes to the old one."""
    page = (Path(__file__).parents[2] / "docs/logs.md").read_text()
    lines = re.findall(r"```text\n(/var/log/holdfast.log .*?)```", page, flags=re.DOTALL)
    assert len(lines) == 1
    (tmp_path / "broker").mkdir()
    broker = Holdfast(tmp_path / "broker")
    broker.start()
    try:
        log = broker.log
        old = log.with_name(log.name + ".1")

        def rotated(text: str) -> None:
            config = tmp_path / "logrotate.conf"
            config.write_text(text.replace("/var/log/holdfast.log", str(log)))
            config.chmod(0o644)
            command = [str(LOGROTATE), "-f", "-s", str(tmp_path / "state"), str(config)]
            subprocess.run(command, check=True, timeout=60)

        def noted(client_id: str) -> None:
            with wire.Wire(broker.port) as client:
                client.connect(client_id)
            until(lambda: client_id in log.read_text() + old.read_text(), "its line")

        rotated(lines[0])
        assert " ready " in old.read_text()
        noted("after-copytruncate")
        assert "after-copytruncate" in log.read_text()
        assert "after-copytruncate" not in old.read_text()
        rotated(lines[0].replace("copytruncate", "create\n"))
        noted("after-create")
        assert "after-create" in old.read_text()
    finally:
        broker.kill()

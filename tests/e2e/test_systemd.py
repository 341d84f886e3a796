"""A broker as a service of systemd: its notifications, and the unit file."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.brokers import PROCESSES, Holdfast, one_process
from tests.e2e.cluster_processes import until
from tests.e2e.wire import Wire

ANALYZE = shutil.which("systemd-analyze")
DEPLOY = Path(__file__).parents[2] / "deploy" / "systemd"
TIMEOUT_S = 30.0


class Manager:
    """The socket of a service manager."""

    def __init__(self, address: str, monkeypatch: pytest.MonkeyPatch, watchdog_s: float) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1) if address[0] == "@" else address)
        self.socket.settimeout(TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", str(int(watchdog_s * 1_000_000)))

    def until(self, text: str) -> str:
        """The first message that contains the text."""
        while True:
            message = self.socket.recv(4096).decode()
            if text in message:
                return message


@pytest.fixture(params=["file", "@holdfast-test-abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Manager]:
    address = f"{request.param}-{os.getpid()}"
    made = Manager(address if address[0] == "@" else str(tmp_path / address), monkeypatch, 0.4)
    yield made
    made.socket.close()


def test_ready_watchdog_and_reload(manager: Manager, tmp_path: Path) -> None:
    broker = Holdfast(tmp_path)
    broker.launch()
    try:
        assert manager.until("READY=1").startswith("READY=1\nSTATUS=running")
        broker.await_ready()
        for _ in range(3):
            assert manager.until("WATCHDOG=1") == "WATCHDOG=1"
        assert broker.process is not None
        broker.process.send_signal(signal.SIGHUP)
        began = manager.until("RELOADING=1")
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", began)
        manager.until("READY=1\nSTATUS=running")
        (tmp_path / "holdfast.toml").write_text("[limits]\nno_such = 1\n")
        broker.process.send_signal(signal.SIGHUP)
        manager.until("RELOADING=1")
        assert "the last reload failed: " in manager.until("READY=1")
        manager.until("WATCHDOG=1")
        assert broker.stop() == 0
    finally:
        broker.kill()
    assert "Traceback" not in broker.log_text()


def test_a_lame_duck_serves_and_is_not_ready(tmp_path: Path, manager: Manager) -> None:
    """Listeners stay open for `lame_duck_s`, or until a second SIGTERM."""
    broker = Holdfast(tmp_path, {"server": {"lame_duck_s": 200.0}})
    broker.start()
    try:
        assert broker.process is not None
        broker.process.send_signal(signal.SIGTERM)
        stopping = manager.until("STOPPING=1")
        assert stopping == "STOPPING=1\nEXTEND_TIMEOUT_USEC=290000000"
        until(lambda: broker.admin("/readyz")[0] == 503, "not ready")
        assert json.loads(broker.admin("/readyz")[1])["reasons"] == {
            "closing": "the node is stopping"
        }
        assert json.loads(broker.admin("/stopz")[1]) == {"may_stop": True, "reasons": {}}
        with Wire(broker.port) as client:
            client.connect("late")
            assert client.publish("t", b"x", 1) < 0x80
            assert broker.stop() == 0
    finally:
        broker.kill()


def test_a_manager_that_is_gone_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    broker = Holdfast(tmp_path)
    broker.start()
    assert broker.stop() == 0
    assert "service_manager_not_notified" in broker.log_text()


def test_another_process_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: Manager
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    broker = Holdfast(tmp_path)
    broker.start()
    assert broker.stop() == 0
    manager.until("READY=1")
    manager.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.until("WATCHDOG=1")


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed")
def test_the_unit_file(tmp_path: Path) -> None:
    """systemd accepts it, and finds it well protected: 10 is open to everything, 0 to nothing."""
    unit = tmp_path / "holdfast.service"
    text = (DEPLOY / "holdfast.service").read_text()
    # The command must exist for the check.
    program = Path(sys.executable).with_name("holdfast")
    unit.write_text(text.replace("/usr/local/bin/holdfast", str(program)))
    verified = subprocess.run(
        [str(ANALYZE), "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    security = [str(ANALYZE), "security", "--offline=true", "--threshold=20", str(unit)]
    subprocess.run(security, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd is not installed")
def test_the_user_of_the_unit(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    users = (DEPLOY / "holdfast.sysusers").read_bytes()
    command = ["systemd-sysusers", f"--root={tmp_path}", "-"]
    subprocess.run(command, input=users, check=True, capture_output=True)
    assert "holdfast:" in (tmp_path / "etc" / "passwd").read_text()


def test_lines_have_priorities_for_journald(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only while the log goes there: a redirected stream gets the variable, too."""
    broker = Holdfast(tmp_path)
    broker.log.touch()
    found = broker.log.stat()
    for stream, beginning in (
        (f"{found.st_dev}:{found.st_ino}", r"<[2-7]>"),
        (f"{found.st_dev}:{found.st_ino + 1}", r"20"),
    ):
        monkeypatch.setenv("JOURNAL_STREAM", stream)
        broker.start()
        assert broker.stop() == 0
        lines = broker.log_text().splitlines()
        assert len(lines) > 4
        assert [line for line in lines if not re.match(beginning, line)] == []
        os.truncate(broker.log, 0)


@pytest.mark.parametrize("door", ["admin", "cluster", "federation"])
def test_an_occupied_port_is_told_before_there_is_a_directory(door: str, tmp_path: Path) -> None:
    broker = Holdfast(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if door == "admin":
            broker.admin_port = port
        elif door == "cluster":
            broker.settings["cluster"] = {"peer_bind": "127.0.0.1", "peer_port": port}
        else:
            broker.settings["federation"] = {"name": "f", "listen": f"127.0.0.1:{port}"}
        with pytest.raises(RuntimeError) as bad:
            broker.start()
    table = "" if door == "admin" else f", {door}"
    assert f"error='cannot listen{table}: 127.0.0.1:{port}: Address already in use'" in str(
        bad.value
    )
    # Of several processes, the supervisor has made it.
    assert not broker.data.exists() or PROCESSES > 1


@one_process("the supervisor makes the directory")
def test_a_missing_certificate_of_the_admin_port_is_told_before_there_is_a_directory(
    tmp_path: Path,
) -> None:
    settings = {"admin": {"certificate": "no.pem", "key": "no.key"}}
    broker = Holdfast(tmp_path, settings)
    with pytest.raises(RuntimeError, match="cannot read the certificate file"):
        broker.start()
    assert not broker.data.exists()

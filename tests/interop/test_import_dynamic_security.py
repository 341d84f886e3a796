"""The import of the users and rights of a Mosquitto with its dynamic security plugin."""

import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.e2e.brokers import MOSQUITTO, Mosquitto
from tests.e2e.brokers import Holdfast as HoldfastBroker

PLUGIN = Path("/usr/lib/x86_64-linux-gnu/mosquitto_dynamic_security.so")
CONTROL = shutil.which("mosquitto_ctrl")
PASSWORD = "a long password"

pytestmark = pytest.mark.skipif(
    MOSQUITTO is None or CONTROL is None or not PLUGIN.exists(),
    reason="mosquitto or its dynamic security plugin is not installed",
)


def control(port: int, *arguments: str, answer: str = "") -> None:
    assert CONTROL is not None
    login = ["-h", "127.0.0.1", "-p", str(port), "-u", "admin", "-P", PASSWORD]
    command = [CONTROL, *(login if port else []), "dynsec", *arguments]
    done = subprocess.run(command, input=answer, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stdout + done.stderr


def sends(port: int, user: str, password: str, topic: str) -> int:
    """The exit code of a publish, which waits for the PUBACK."""
    login = ["-p", str(port), "-u", user, "-P", password]
    return main(["pub", *login, "-t", topic, "-m", "x", "-q", "1", "-V", "5"])


def test_users_and_rights_are_carried_over(tmp_path: Path) -> None:
    users = tmp_path / "dynamic-security.json"
    control(0, "init", str(users), "admin", PASSWORD)
    old = Mosquitto(
        tmp_path,
        f"per_listener_settings false\nplugin {PLUGIN}\nplugin_opt_config_file {users}",
    )
    old.start()
    try:
        control(old.port, "createRole", "devices")
        control(old.port, "addRoleACL", "devices", "publishClientSend", "site/#", "allow")
        control(old.port, "addRoleACL", "devices", "subscribePattern", "orders/#", "allow")
        control(old.port, "createClient", "alice", "-p", PASSWORD)
        control(old.port, "addClientRole", "alice", "devices")
        control(old.port, "createClient", "gone", "-p", PASSWORD)
        control(old.port, "disableClient", "gone")
        assert sends(old.port, "alice", PASSWORD, "site/1") == 0
    finally:
        old.stop()
    out = tmp_path / "out"
    assert main(["config", "import", str(tmp_path / "mosquitto.conf"), "--out", str(out)]) == 0
    directory = tmp_path / "new"
    directory.mkdir()
    files = {"password_file": str(out / "passwords"), "acl_file": str(out / "acl")}
    new = HoldfastBroker(directory, {"security": {**files, "allow_anonymous": False}})
    new.start()
    try:
        assert sends(new.port, "alice", PASSWORD, "site/1") == 0
        assert sends(new.port, "alice", "wrong", "site/1") != 0
        assert sends(new.port, "gone", PASSWORD, "site/1") != 0
        denied = 'holdfast_authorizations_denied_total{node="n1"}'
        assert f"{denied} 0.0" in new.admin("/metrics")[1]
        sends(new.port, "alice", PASSWORD, "other")
        assert f"{denied} 1.0" in new.admin("/metrics")[1]
    finally:
        assert new.stop() == 0

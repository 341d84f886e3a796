"""The users of a Mosquitto with its dynamic security plugin, taken over and changed at run time by
Mosquitto's own tool."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.e2e.brokers import MOSQUITTO, PROCESSES, Mosquitto
from tests.e2e.brokers import Holdfast as HoldfastBroker

PLUGIN = Path("/usr/lib/x86_64-linux-gnu/mosquitto_dynamic_security.so")
SUBSCRIBER = shutil.which("mosquitto_sub")
CONTROL = shutil.which("mosquitto_ctrl")
PASSWORD = "a long password"

pytestmark = pytest.mark.skipif(
    MOSQUITTO is None or CONTROL is None or not PLUGIN.exists(),
    reason="mosquitto or its dynamic security plugin is not installed",
)


def control(
    port: int,
    *arguments: str,
    answer: str = "",
    user: tuple[str, str] = ("admin", PASSWORD),
    code: int | None = 0,
) -> str:
    """The output of mosquitto_ctrl. `code`: the exit code that it must have; None: any."""
    assert CONTROL is not None
    login = ["-h", "127.0.0.1", "-p", str(port), "-u", user[0], "-P", user[1]]
    command = [CONTROL, *(login if port else []), "dynsec", *arguments]
    done = subprocess.run(command, input=answer, capture_output=True, text=True, timeout=20)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done.stdout + done.stderr


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
    file = out / "dynamic-security.json"
    security = {"dynamic_security_file": str(file), "allow_anonymous": False}
    new = HoldfastBroker(directory, {"security": security})
    new.start()
    try:
        assert sends(new.port, "alice", PASSWORD, "site/1") == 0
        assert sends(new.port, "alice", "wrong", "site/1") != 0
        assert sends(new.port, "gone", PASSWORD, "site/1") != 0
        change_at_run_time(new)
        # What was answered is kept, and only that.
        new.kill()
        new.start()
        assert sends(new.port, "bob", "another", "bobs/1") == 0
        assert sends(new.port, "alice", PASSWORD, "site/1") != 0
        assert "alice" in control(new.port, "listClients")
        check_audit(new)
    finally:
        assert new.stop() == 0
    if PROCESSES > 1:
        return  # They agree on the users, as a cluster does.
    # Mosquitto reads the file that Holdfast has written.
    old.extra = old.extra.replace(str(users), str(file))
    old.start()
    try:
        assert sends(old.port, "bob", "another", "bobs/1") == 0
        assert sends(old.port, "alice", PASSWORD, "site/1") != 0
    finally:
        old.stop()


def check_audit(broker: HoldfastBroker) -> None:
    """Each change is in the audit: who, from where, what, before and after, and no secret."""
    text = broker.admin("/api/v1/audit?limit=100")[1]
    entries = json.loads(text)["entries"]
    names = [each["path"].rpartition("/")[2] for each in reversed(entries)]
    assert " ".join(names) == (
        "createClient createRole addRoleACL addRoleACL createGroup addGroupRole addGroupClient "
        "setClientPassword disableClient"
    )
    assert all(each["who"].startswith("mqtt admin (") for each in entries)
    assert {each["remote"] for each in entries} == {"127.0.0.1"}
    disabled, changed, joined = entries[:3]
    assert disabled["parameters"] == "alice"
    assert disabled["after"]["disabled"]
    assert "disabled" not in disabled["before"]
    assert (changed["before"]["password"], changed["after"]["password"]) == ("set", "changed")
    assert (joined["before"].get("groups"), joined["after"]["groups"]) == (None, ["people"])
    assert not [word for word in ("first", "another", "salt", "iterations") if word in text]


def change_at_run_time(broker: HoldfastBroker) -> None:
    port = broker.port
    control(port, "createClient", "bob", "-p", "first")
    control(port, "createRole", "bobs")
    control(port, "addRoleACL", "bobs", "publishClientSend", "bobs/#", "allow", "3")
    control(port, "addRoleACL", "bobs", "subscribePattern", "site/#", "allow")
    control(port, "createGroup", "people")
    control(port, "addGroupRole", "people", "bobs")
    denied = "authorizations_denied_total"
    assert broker.metric(denied) == 0
    sends(port, "bob", "first", "bobs/1")
    assert broker.metric(denied) == 1
    control(port, "addGroupClient", "people", "bob")
    sends(port, "bob", "first", "bobs/1")
    assert broker.metric(denied) == 1
    assert SUBSCRIBER is not None
    login = ["-h", "127.0.0.1", "-p", str(port), "-u", "bob", "-P", "first"]
    with subprocess.Popen([SUBSCRIBER, *login, "-i", "reader", "-t", "site/#"]) as reader:
        deadline = time.monotonic() + 20
        while " connected client='reader' user='bob'" not in broker.log_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # It has to leave when its password changes.
        control(port, "setClientPassword", "bob", "another")
        assert reader.wait(20) != 0
    assert "people" in control(port, "getClient", "bob")
    control(port, "disableClient", "alice")
    # Only a client with the right to the topic may command.
    assert "Not authorized" in control(port, "listClients", user=("bob", "another"), code=None)

"""Listeners with pre-shared keys, on a Python that has them, with Mosquitto's clients."""

import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.security.psk import has_psk
from tests.e2e.listeners_broker import PUB, ListenersBroker, mosquitto_pub
from tests.e2e.test_reload import post_reload, until
from tests.support.ports import free_port

pytestmark = pytest.mark.skipif(
    PUB is None or not has_psk(), reason="needs mosquitto-clients, and Python 3.13"
)
KEY = "0a0b0c0d0e0f10111213141516171819"


def test_devices_with_keys(tmp_path: Path) -> None:
    port, keys, rights = free_port(), tmp_path / "psk", tmp_path / "acl"
    keys.write_text(f"dev-1:{KEY}\ndev-2:{KEY[::-1]}\n")
    keys.chmod(0o600)
    rights.write_text("user dev-1\ntopic write t\nuser dev-2\ntopic read t\n")
    table = {"port": port, "psk_file": str(keys), "psk_hint": "site", "acl_file": str(rights)}
    broker = ListenersBroker(tmp_path / "broker", [table])
    broker.start()

    def publish(identity: str, key: str, *more: str) -> int:
        secret = ["--psk-identity", identity, "--psk", key]
        return mosquitto_pub("-p", str(port), "-V", "5", *secret, *more).returncode

    denied = "authorizations_denied_total"
    subscribe = [str(shutil.which("mosquitto_sub")), "-p", str(port), "-t", "t", "-i", "reader"]
    subscribe += ["--psk-identity", "dev-2", "--psk", KEY[::-1]]
    reader = subprocess.Popen(subscribe, stdout=subprocess.PIPE)
    try:
        until(lambda: "connected client='reader' user='dev-2'" in broker.log_text(), "the reader")
        for version in ("tlsv1.2", "tlsv1.3"):
            assert publish("dev-1", KEY, "--tls-version", version) == 0
        assert broker.metric(denied) == 0
        publish("dev-2", KEY[::-1])
        assert broker.metric(denied) == 1
        for identity, key in (("dev-1", KEY[::-1]), ("dev-3", KEY)):
            assert publish(identity, key) != 0
        # The identity is the only name.
        assert publish("dev-1", KEY, "-u", "dev-1") == 0
        assert publish("dev-1", KEY, "-u", "dev-2") != 0
        assert mosquitto_pub("-p", str(port)).returncode != 0
        # A reload: a device has gone, and another has come.
        keys.write_text(f"dev-1:{KEY}\ndev-3:{KEY}\n")
        assert post_reload(broker)[1]["disconnected"] == 1
        assert reader.wait(20) is not None
        assert publish("dev-2", KEY[::-1]) != 0
        keys.write_text("dev-1:5ec2e7z\n")
        status, body = post_reload(broker)
        assert (status, "psk:1: the key has" in str(body["error"])) == (409, True)
        assert publish("dev-1", KEY) == 0
        assert "5ec2e7" not in broker.log_text()
        assert KEY not in broker.log_text()
    finally:
        reader.kill()
        reader.wait()
        assert broker.stop() == 0
    assert "Traceback" not in broker.log_text()

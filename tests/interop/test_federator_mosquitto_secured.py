"""The federator beside a Mosquitto that wants TLS and a user name."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.e2e.brokers import MOSQUITTO
from tests.interop.paho_client import Paho
from tests.support.ports import free_port
from tests.support.sidecars import Site, wait_until

MOSQUITTO_PASSWD = shutil.which("mosquitto_passwd")
pytestmark = [
    pytest.mark.skipif(None in (MOSQUITTO, MOSQUITTO_PASSWD), reason="mosquitto is not installed"),
    pytest.mark.timeout(120),
]
USER, PASSWORD = "federator", "right horse"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two brokers; that of the first has a second listener, with TLS and users."""
    found = Site(tmp_path, 2, ["--interest", "#"])
    broker, sidecar = found.brokers[0], found.sidecars[0]
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other-ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    assert MOSQUITTO_PASSWD is not None
    users = tmp_path / "users"
    subprocess.run([MOSQUITTO_PASSWD, "-c", "-b", str(users), USER, PASSWORD], check=True)
    port = free_port()
    # Whoever gives a name needs its password; the users of the tests give none.
    broker.extra = (
        f"password_file {users}\nlistener {port} 127.0.0.1\ncafile {tmp_path}/ca.pem\n"
        f"certfile {tmp_path}/cert.pem\nkeyfile {tmp_path}/key.pem\n"
    )
    sidecar.broker = f"mqtts://127.0.0.1:{port}"
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    sidecar.options += ["--username", USER, "--password-file", str(tmp_path / "password")]
    sidecar.options += ["--ca", str(tmp_path / "ca.pem")]
    yield found
    found.stop()


def test_messages_go_both_ways(site: Site) -> None:
    site.start()
    first, second = site.brokers
    with Paho(first.port, "a") as one, Paho(second.port, "b") as other:
        for client in (one, other):
            client.subscribe("t/#", 2)
        for number in range(20):
            one.publish("t/a", b"%d" % number, 2)
            other.publish("t/b", b"%d" % number, 1)
        for client in (one, other):
            found = [client.message() for _ in range(40)]
            for topic in ("t/a", "t/b"):
                payloads = [message.payload for message in found if message.topic == topic]
                assert payloads == [b"%d" % number for number in range(20)]
            client.assert_nothing_more()


@pytest.mark.parametrize(
    ("option", "file", "text"),
    [
        ("--ca", "other-ca.pem", "certificate verify failed"),
        ("--password-file", "ca.pem", "Not authorized"),
    ],
)
def test_what_is_wrong_is_said(
    site: Site, tmp_path: Path, option: str, file: str, text: str
) -> None:
    broker, sidecar = site.brokers[0], site.sidecars[0]
    broker.start()
    right = list(sidecar.options)
    sidecar.options[right.index(option) + 1] = str(tmp_path / file)
    sidecar.start()
    wait_until(lambda: text.lower() in sidecar.log_text().lower(), f"the federator says {text!r}")
    assert sidecar.get("/healthz") == "ok\n"
    assert sidecar.get("/readyz") is None
    assert sidecar.stop() == 0
    sidecar.options = right
    sidecar.start()
    wait_until(lambda: sidecar.get("/readyz"), "it is up with the right one")

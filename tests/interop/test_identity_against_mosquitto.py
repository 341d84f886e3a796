"""A `mosquitto.conf` with `use_identity_as_username` at Mosquitto, and its import at Holdfast: the
same clients are let in, as the same users."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.e2e.brokers import MOSQUITTO, Broker
from tests.e2e.listeners_broker import PUB
from tests.support.certificates import Authority, Certificate

pytestmark = pytest.mark.skipif(
    MOSQUITTO is None or PUB is None, reason="mosquitto is not installed"
)
RUN_S = 20
REFUSED = 0x87


class Configured(Broker):
    """Mosquitto with `mosquitto.conf` of the directory, or Holdfast with its import."""

    def __init__(self, directory: Path, kind: str) -> None:
        super().__init__(directory)
        self.kind = kind

    def command(self) -> list[str]:
        if self.kind == "mosquitto":
            return [str(MOSQUITTO), "-c", str(self.directory / "mosquitto.conf")]
        made = self.directory / "made"
        source = str(self.directory / "mosquitto.conf")
        if not made.exists():
            assert main(["config", "import", source, "--out", str(made)]) == 0
        return [
            *[sys.executable, "-m", "holdfast.cli.main", "serve", "--admin", "off"],
            *["-c", str(made / "holdfast.toml")],
        ]


class Site:
    """The authority, the certificate of a device, and a broker that asks for one."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.authority = Authority(directory)
        self.device = self.authority.issue("dev-1")
        self.nameless = self.authority.issue()
        server = self.authority.issue("server")
        users = directory / "users"
        assert main(["passwd", "-c", "-b", str(users), "alice", "secret"]) == 0
        rules = directory / "acl"
        rules.write_text("pattern readwrite users/%u/#\nuser alice\ntopic readwrite plant/#\n")
        for file in (users, rules):
            file.chmod(0o644)
        self.broker = Configured(directory, kind)
        (directory / "mosquitto.conf").write_text(
            f"allow_anonymous true\npassword_file {users}\nacl_file {rules}\nuser root\n"
            f"listener {self.broker.port} 127.0.0.1\ncafile {self.authority.ca}\n"
            f"certfile {server.certificate}\nkeyfile {server.key}\n"
            "require_certificate true\nuse_identity_as_username true\n"
        )

    def publish(self, topic: str, shown: Certificate, *credentials: str) -> str:
        """The result of a publish with a certificate and the credentials of CONNECT."""
        done = subprocess.run(
            [
                *[str(PUB), "-V", "5", "-h", "127.0.0.1", "-p", str(self.broker.port)],
                *["--cafile", self.authority.ca, "--cert", shown.certificate, "--key", shown.key],
                *["-t", topic, "-m", "x", "-q", "1", *credentials],
            ],
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        if "Not authorized" in done.stderr or "not authorised" in done.stderr:
            return "denied" if "Publish" in done.stderr else "refused"
        return "done" if done.returncode == 0 and not done.stderr else "refused"


@pytest.fixture(scope="module", params=["holdfast", "mosquitto"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp(request.param), request.param)
    made.broker.start()
    yield made
    made.broker.kill()


@pytest.mark.parametrize(
    "credentials",
    [
        (),
        ("-u", "dev-1"),
        ("-u", "dev-1", "-P", "wrong"),
        ("-u", "gateway"),
        ("-u", "gateway", "-P", "wrong"),
        ("-u", "alice", "-P", "secret"),
        ("-u", "alice", "-P", "wrong"),
    ],
)
def test_the_certificate_decides_whatever_connect_says(
    site: Site, credentials: tuple[str, ...]
) -> None:
    assert site.publish("users/dev-1/x", site.device, *credentials) == "done"
    assert site.publish("users/gateway/x", site.device, *credentials) == "denied"
    assert site.publish("plant/x", site.device, *credentials) == "denied"


def test_a_certificate_without_a_name_is_refused(site: Site) -> None:
    assert site.publish("t", site.nameless) == "refused"
    assert site.publish("plant/x", site.nameless, "-u", "alice", "-P", "secret") == "refused"

"""A manager that asks for certificates: none, of another authority, the right one, with a token;
asked over the wire by the federators' clients and by the command line."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.paper.federator import PaperManager
from bench.paper.settings import PaperSettings
from holdfast.io.peers.complaints import Complaints
from holdfast_federation.sidecar.manager_client.http import (
    ManagerHttp,
    ManagerRefuses,
    ManagerUnreachable,
)
from tests.support.certificates import Authority, Certificate
from tests.support.manager_process import ManagerProcess, command
from tests.support.ports import free_port

TOKEN = "operator-token-of-the-test"
TIMEOUT_S = 60.0


class Site:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory)
        self.server = self.authority.issue("", "127.0.0.1")
        self.root = self.authority.issue("root")
        self.stranger = Authority(directory, "other").issue("root")

    @contextmanager
    def manager(self, access: str, **more: str) -> Iterator[ManagerProcess]:
        process = ManagerProcess(
            self.directory,
            HOLDFAST_TOPOLOGY__CERTIFICATE=self.server.certificate,
            HOLDFAST_TOPOLOGY__KEY=self.server.key,
            HOLDFAST_TOPOLOGY__CLIENT_CA=self.authority.ca,
            HOLDFAST_TOPOLOGY__ACCESS=access,
            HOLDFAST_TOPOLOGY__OPERATORS="root",
            # Nobody's broker answers: as long as that goes for all, nobody is removed.
            HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S="60",
            **more,
        )
        process.start()
        try:
            yield process
        finally:
            process.kill()
        assert "Traceback" not in process.log_text(), process.log_text()[-6000:]

    def asking(self, url: str) -> Callable[..., Any]:
        def ask(
            who: Certificate | None, method: str, path: str, body: object = None, token: str = ""
        ) -> Any:
            """Raises ManagerUnreachable, ManagerRefuses."""
            files = (who.certificate, who.key) if who else ()
            http = ManagerHttp(url, self.authority.ca, *files)
            return asyncio.run(http.request(method, f"/api/v1{path}", body, token, TIMEOUT_S))

        return ask


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def body(number: int) -> dict[str, str]:
    return {"ip": f"tcp://127.0.0.1:{10_000 + number}", "uuid": f"uuid-{number:04}"}


def test_a_certificate_alone(site: Site) -> None:
    one, two = site.authority.issue("site-1"), site.authority.issue("site-2")
    with site.manager("certificate") as manager:
        ask = site.asking(manager.url)
        # The handshake's end may reach us as its word, or as the end of the connection.
        for who in (None, site.stranger):
            with pytest.raises(ManagerUnreachable, match=r"certificate|reset|closed|no HTTP"):
                ask(who, "GET", "/nodes")
        joined = ask(one, "POST", "/join", body(1))
        assert (joined["id"], "token" in joined) == (0, False)
        assert ask(two, "POST", "/join", body(2))["id"] == 1
        assert ask(one, "POST", "/nodes/0/report", {})["neighbors"][0]["id"] == 1
        for wrong in (
            lambda: ask(one, "POST", "/nodes/1/report", {}),
            lambda: ask(one, "DELETE", "/nodes/1"),
            lambda: ask(one, "POST", "/join", body(2)),
            lambda: ask(one, "POST", "/rebalance"),
            lambda: ask(one, "GET", "/audit"),
        ):
            with pytest.raises(ManagerRefuses) as refused:
                wrong()
            assert refused.value.status == 403
        manager.kill()
        manager.start()
        assert ask(one, "POST", "/join", body(1))["id"] == 0
        assert [node["certificate"] for node in ask(two, "GET", "/nodes")] == ["site-1", "site-2"]
        ask(two, "DELETE", "/nodes/1")
        actors = [line["actor"] for line in ask(site.root, "GET", "/audit")]
        assert actors[:2] == ["certificate site-2", "certificate site-1"]


def test_certificate_and_token(site: Site) -> None:
    one, two = site.authority.issue("site-1"), site.authority.issue("site-2")
    with site.manager("both", HOLDFAST_TOPOLOGY__TOKEN=TOKEN) as manager:
        ask = site.asking(manager.url)
        with pytest.raises(ManagerUnreachable):
            ask(None, "GET", "/nodes", token=TOKEN)
        for who, token, status in ((site.root, "", 401), (one, TOKEN, 403), (one, "wrong", 401)):
            with pytest.raises(ManagerRefuses) as refused:
                ask(who, "GET", "/nodes", token=token)
            assert refused.value.status == status
        made = ask(site.root, "POST", "/join-tokens", {}, TOKEN)["token"]
        mine = ask(one, "POST", "/join", body(1), made)["token"]
        ask(one, "POST", "/nodes/0/report", {}, mine)
        with pytest.raises(ManagerRefuses, match="has joined with the certificate 'site-1'"):
            ask(two, "POST", "/nodes/0/report", {}, mine)


def test_either(site: Site) -> None:
    one = site.authority.issue("site-1")
    with site.manager("either", HOLDFAST_TOPOLOGY__TOKEN=TOKEN) as manager:
        ask = site.asking(manager.url)
        with pytest.raises(ManagerRefuses, match="send a token"):
            ask(None, "GET", "/nodes")
        with pytest.raises(ManagerUnreachable, match=r"certificate|reset|closed|no HTTP"):
            ask(site.stranger, "GET", "/nodes", token=TOKEN)
        assert ask(one, "POST", "/join", body(1))["id"] == 0
        made = ask(None, "POST", "/join-tokens", {}, TOKEN)["token"]
        with pytest.raises(ManagerRefuses, match="member 0 already"):
            ask(None, "POST", "/join", body(1), made)
        assert ask(None, "POST", "/join", body(2), made)["token"]
        assert ask(site.root, "GET", "/audit")[0]["actor"].startswith("join token")


def test_the_command_line_and_a_published_member(site: Site) -> None:
    one = site.authority.issue("site-1")
    with site.manager("certificate") as manager:
        common = ("--url", manager.url, "--ca", site.authority.ca)
        root = ("--cert", site.root.certificate, "--key", site.root.key)
        shown = command("nodes", "--json", *common, *root)
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout) == []
        nobody = command("nodes", *common)
        assert nobody.returncode == 1
        assert nobody.stderr.count("\n") == 1
        half = command("nodes", *common, "--cert", site.root.certificate)
        assert "go together" in half.stderr
        settings = PaperSettings.from_environment(
            {
                "TOPOLOGY_MANAGER_URL": f"{manager.url}/api/v1/join",
                "ADVERTISED_LISTENER": f"tcp://127.0.0.1:{free_port()}",
                "HOLDFAST_FEDERATION__MANAGER_CA": site.authority.ca,
                "HOLDFAST_FEDERATION__MANAGER_CERTIFICATE": one.certificate,
                "HOLDFAST_FEDERATION__MANAGER_KEY": one.key,
            }
        )

        async def member() -> int:
            loop = asyncio.get_running_loop()
            client = PaperManager(settings, Complaints(loop.time, "federation:"))
            async with asyncio.timeout(TIMEOUT_S):
                first = await client.join()
                again = await client.join()
            assert first == again
            return first.id

        assert asyncio.run(member()) == 0
        left = command("leave", "0", *common, *root)
        assert left.stdout == "member 0 removed\n"


def test_files_that_are_wrong_are_named(site: Site) -> None:
    done = command(
        "serve", "--certificate", site.server.certificate, "--key", site.root.key,
        "--client-ca", site.authority.ca, "--operators", "root",
    )  # fmt: skip
    assert done.returncode == 2
    assert "does not belong to" in done.stderr
    assert done.stderr.count("\n") == 1

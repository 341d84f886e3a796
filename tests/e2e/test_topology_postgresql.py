"""The topology manager as a process on a PostgreSQL of its own, which is killed; and two managers
that want the same database."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.manager_process import WAIT_S, ManagerProcess, await_true, command
from tests.support.postgresql import PASSWORD, PostgresqlServer, missing, running_server

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is one")

MEMBERS = 24
KILLS = 2


@pytest.fixture
def server() -> Iterator[PostgresqlServer]:
    with running_server() as server:
        yield server


def manager_of(directory: Path, url: str) -> ManagerProcess:
    directory.mkdir()
    # Nobody's broker answers: as long as that goes for all, nobody is removed.
    return ManagerProcess(directory, DB_URL=url, HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S="60")


class Joining(threading.Thread):
    """One that joins until it is told that it has, and writes down what it was told meanwhile."""

    def __init__(self, manager: ManagerProcess, number: int) -> None:
        super().__init__()
        self.body = {"ip": f"tcp://127.0.0.1:{number + 1}", "uuid": f"uuid-{number:04}"}
        self.manager = manager
        self.answer: Any = None
        self.refusals: list[tuple[int, str]] = []

    def run(self) -> None:
        deadline = time.monotonic() + 2 * WAIT_S
        while time.monotonic() < deadline:
            try:
                self.answer = self.manager.ask("POST", "/join", self.body)
                return
            except urllib.error.HTTPError as error:
                self.refusals.append((error.code, json.load(error)["description"]))
                time.sleep(0.1)


def state_of(manager: ManagerProcess) -> Any:
    nodes = {node["uuid"]: node["id"] for node in manager.ask("GET", "/nodes")}
    return nodes, manager.links(), manager.ask("GET", "/health")["revision"]


def test_the_database_is_killed_while_members_join(
    server: PostgresqlServer, tmp_path: Path
) -> None:
    manager = manager_of(tmp_path / "manager", server.url(server.new_database()))
    manager.start()
    joining = [Joining(manager, number) for number in range(MEMBERS)]
    try:
        for kill in range(KILLS):
            part = joining[kill::KILLS]
            for each in part[: len(part) // 2]:
                each.start()
            await_true(lambda: state_of(manager)[2] > 0, "a member")
            server.kill()
            for each in part[len(part) // 2 :]:
                each.start()
            await_true(
                lambda: any("database is away" in text for text in health(manager)["problems"]),
                "the loss is known",
            )
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                manager.ask("GET", "/watch?since=0&timeout=0")
            assert PASSWORD not in refused.value.read().decode()
            assert manager.ready(), "the loop goes on"
            server.start()
            for each in part:
                each.join(2 * WAIT_S)
        assert all(each.answer is not None for each in joining), manager.log_text()[-6000:]
        assert {code for each in joining for code, _ in each.refusals} <= {503}
        nodes, links, revision = state_of(manager)
        assert nodes == {each.body["uuid"]: each.answer["id"] for each in joining}
        assert sorted(nodes.values()) == list(range(MEMBERS))
        assert all(each.answer["revision"] <= revision for each in joining)
        assert health(manager)["problems"] == []
        metrics = urllib.request.urlopen(f"{manager.url}/metrics", timeout=30).read().decode()
        assert f"holdfast_topology_database_losses_total {float(KILLS)}" in metrics
        manager.kill()
        manager.start()
        assert state_of(manager) == (nodes, links, revision)
        assert manager.stop() == 0
    finally:
        manager.kill()
    text = manager.log_text()
    assert "Traceback" not in text, text[-6000:]
    assert PASSWORD not in text


def health(manager: ManagerProcess) -> Any:
    return manager.ask("GET", "/health")


def test_a_second_manager_is_refused_until_the_first_is_dead(
    postgresql_server: PostgresqlServer, tmp_path: Path
) -> None:
    url = postgresql_server.url(postgresql_server.new_database())
    first = manager_of(tmp_path / "first", url)
    second = manager_of(tmp_path / "second", url)
    try:
        first.start()
        joined = first.ask("POST", "/join", {"ip": "tcp://127.0.0.1:1"})
        done = command("serve", "--db-url", url, "--port", str(second.port))
        assert done.returncode == 1
        assert "another manager uses this database (from 127.0.0.1" in done.stderr
        assert PASSWORD not in done.stderr
        first.kill()
        second.start()
        assert second.ask("POST", "/join", {"ip": "tcp://127.0.0.1:1"})["id"] == joined["id"]
    finally:
        first.kill()
        second.kill()

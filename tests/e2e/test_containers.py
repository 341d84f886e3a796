"""The image from `make image` as deploy/ runs it: docker-compose with Podman as its engine.

`make test-packages` runs these tests and installs both. Each test runs the commands at the top of
its compose file, so the secrets have the modes that the file says.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster_processes import until
from tests.e2e.test_packages import package
from tests.support.compose_files import COMPOSE, FEDERATION, PASSWORD, make_secrets, parse
from tests.support.podman import PROGRAMS, Engine, is_installed
from tests.support.ports import free_port

START_S = 120.0
USER = ["-u", "meter", "-P", PASSWORD]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif("HOLDFAST_PACKAGES" not in os.environ, reason="make test-packages"),
    pytest.mark.skipif(not is_installed(), reason=f"one of {PROGRAMS} is not installed"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(package("holdfast-*-image.tar")) as started:
        yield started


class Project:
    """A compose file with its secrets in a directory, and other ports and images if the test says
    so. docker-compose of Debian does not know `name` yet."""

    def __init__(self, engine: Engine, directory: Path, source: Path, **images: str) -> None:
        self.engine = engine
        make_secrets(source, directory)
        parsed = parse(source)
        del parsed["name"]
        self.ports: dict[str, int] = {}
        for name, service in list(parsed["services"].items()):
            is_left_out = bool(images) and service["image"] not in images
            if is_left_out or "profiles" in service:
                del parsed["services"][name]
                continue
            service["image"] = images.get(service["image"], service["image"])
            service.pop("build", None)
            service["depends_on"] = []
            for number, port in enumerate(service.get("ports", [])):
                self.ports[name] = free_port()
                service["ports"][number] = f"127.0.0.1:{self.ports[name]}:{port.rpartition(':')[2]}"
        self.services = list(parsed["services"])
        self.file = directory / source.name.replace("docker-compose", "federation")
        self.file.write_text(yaml.safe_dump(parsed))

    def container(self, service: str) -> str:
        return f"{self.file.stem}_{service}_1"

    def up(self) -> None:
        """Start what does not run, and wait until each service's own check passes."""
        self.engine.compose(self.file, "up", "-d")
        for service in self.services:
            until(
                lambda service=service: self.engine.is_healthy(self.container(service)),  # type: ignore[misc]
                f"{service} is healthy",
                START_S,
            )

    def down(self) -> None:
        """Stop all. The volumes stay."""
        self.engine.compose(self.file, "down")

    def lose(self, service: str, volume: str) -> None:
        """Kill a container, and delete its volume."""
        self.engine.run("kill", self.container(service))
        self.engine.run("rm", "-f", self.container(service))
        self.engine.run("volume", "rm", f"{self.file.stem}_{volume}")

    def holdfast(self, service: str, *arguments: str) -> str:
        """A command in a container."""
        return self.engine.compose(self.file, "exec", "-T", service, "holdfast", *arguments)


def client(command: str, port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", command, "-p", str(port), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def publish(port: int, *arguments: str) -> None:
    done = client("pub", port, "-q", "1", "-t", "t", *arguments)
    assert done.returncode == 0, done.stderr


def retained(port: int, *arguments: str) -> str:
    done = client("sub", port, "-t", "t", "-C", "1", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def project(engine: Engine, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    source, images = request.param
    made = Project(engine, tmp_path, source, **images)
    yield made
    engine.compose(made.file, "down", "-v")


def of(path: Path, **images: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("project", [(path, images)], indirect=True, ids=[path.stem])


@of(COMPOSE / "single.yml")
def test_a_broker(project: Project) -> None:
    project.up()
    publish(project.ports["broker"], "-m", "kept", "-r", *USER)
    assert client("pub", project.ports["broker"], "-t", "t", "-m", "x").returncode != 0
    project.down()
    project.up()
    assert "kept" in retained(project.ports["broker"], *USER)


@of(COMPOSE / "pair.yml")
def test_a_pair(project: Project) -> None:
    """Both are healthy, one serves; the other one takes over."""
    project.up()
    serves = {
        name: client("pub", port, "-t", "x", "-m", "x", *USER).returncode == 0
        for name, port in project.ports.items()
    }
    assert sorted(serves.values()) == [False, True], serves
    holder, standby = sorted(serves, key=lambda name: not serves[name])
    publish(project.ports[holder], "-m", "kept", "-r", *USER)
    project.engine.run("kill", project.container(holder))
    port = project.ports[standby]
    until(
        lambda: "kept" in client("sub", port, "-t", "t", "-C", "1", *USER).stdout,
        "the standby serves",
    )
    project.up()


@of(COMPOSE / "cluster.yml")
def test_a_cluster_and_a_lost_volume(project: Project) -> None:
    """The first node with a lost volume joins its cluster again, also when all start together."""
    project.up()
    publish(project.ports["node-b"], "-m", "kept", "-r", *USER)
    cluster_id = re.findall(
        r"cluster ([0-9a-f]{16})", project.holdfast("node-c", "cluster", "status")
    )
    project.lose("node-a", "a")
    project.up()
    project.down()
    project.engine.run("volume", "rm", f"{project.file.stem}_a")
    project.up()
    for service in project.services:
        status = project.holdfast(service, "cluster", "status")
        assert status.startswith("healthy: 3 nodes")
        assert re.findall(r"cluster ([0-9a-f]{16})", status) == cluster_id
        assert "kept" in retained(project.ports[service], *USER)


@of(FEDERATION, holdfast="holdfast:0.1.0")
def test_the_services_of_a_federation(project: Project) -> None:
    """The manager and the broker that is a member by itself; the federators need Mosquitto's image
    beside them, and wait for their brokers."""
    federators = [each for each in project.services if each.startswith("federator")]
    project.services = [each for each in project.services if each not in federators]
    project.up()
    publish(project.ports["holdfast-c"], "-m", "x")
    for name in federators:
        log = project.engine.logs(project.container(name))
        assert "Traceback" not in log
        assert "secret" not in log, log

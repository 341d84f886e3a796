"""deploy/compose: the settings of the containers exist and go together, and what they name is
there."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast import __version__
from holdfast.config.check import warnings
from holdfast.config.load import load
from holdfast.process.service_manager import CLOSING_S
from holdfast.security.peer_secret import read_secret
from tests.support.compose_files import COMPOSE, DEPLOY, FEDERATION, make_secrets, parse

FILES = sorted(COMPOSE.glob("*.yml"))
SETTINGS = DEPLOY / "packages" / "image.toml"
PROGRAM = shutil.which("docker-compose")


def services(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = parse(path)["services"]
    return found


def test_every_file_is_there() -> None:
    assert [path.stem for path in FILES] == ["cluster", "pair", "pipeline", "single"]
    names = ["node-a", "node-b", "node-c", "gateway-d", "gateway-e"]
    assert list(services(COMPOSE / "cluster.yml")) == names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_brokers_take_their_environment(path: Path, tmp_path: Path) -> None:
    (tmp_path / "passwords").touch()
    (tmp_path / "cluster").write_text("0123456789abcdef" * 4)
    ids = set()
    for name, service in services(path).items():
        if "command" in service:
            continue
        environment = {
            key: text.replace("/run/secrets", str(tmp_path))
            for key, text in service["environment"].items()
        }
        config = load(SETTINGS, environment, {})
        assert not warnings(config), name
        assert config.node.data == "/var/lib/holdfast"
        assert not config.security.allow_anonymous
        ids.add(config.node.id)
        if path.stem == "cluster":
            assert config.cluster.peer_address() == f"{name}:21883"
            assert config.cluster.join == [f"node-{each}:21883" for each in "abc"]
            assert not config.cluster.wait_for_init
            is_gateway = name.startswith("gateway")
            assert config.cluster.role == ("gateway" if is_gateway else "data")
            assert service.get("profiles", []) == ["gateways"] * is_gateway
            grace_s = float(service["stop_grace_period"].removesuffix("s"))
            assert config.cluster.stop_wait_s + CLOSING_S <= grace_s
    brokers = [each for each in services(path).values() if "command" not in each]
    assert len(ids) == len(brokers)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_named_is_there(path: Path) -> None:
    compose = parse(path)
    volumes = set()
    for service in compose["services"].values():
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        assert set(service.get("depends_on", [])) <= set(compose["services"])
        assert service["image"].endswith(f":{__version__}")
        volumes |= {volume.partition(":")[0] for volume in service["volumes"]}
        for build in [service["build"]] if "build" in service else []:
            dockerfile = (path.parent / build["context"] / build["dockerfile"]).resolve()
            assert f"ARG {next(iter(build['args']))}=" in dockerfile.read_text()
    assert volumes == set(compose["volumes"])


@pytest.mark.parametrize("path", [*FILES, FEDERATION], ids=lambda path: path.stem)
def test_every_service_is_watched_and_may_end_in_peace(path: Path) -> None:
    for name, service in services(path).items():
        assert service["restart"] == "unless-stopped"
        if name not in ("pipeline", "mosquitto-a", "mosquitto-b"):
            assert service["healthcheck"]["test"][:2] == ["CMD", "/usr/bin/holdfast-healthcheck"]
        if not name.startswith("mosquitto"):
            assert int(service["stop_grace_period"].removesuffix("s")) >= 60, name


@pytest.mark.skipif(os.geteuid() != 0, reason="the commands give files to another group: sudo")
@pytest.mark.parametrize("path", [*FILES, FEDERATION], ids=lambda path: path.stem)
def test_the_secrets_are_readable_for_the_broker_alone(path: Path, tmp_path: Path) -> None:
    """Compose mounts the file itself, so its mode here is the mode that the broker sees."""
    make_secrets(path, tmp_path)
    for name, secret in parse(path)["secrets"].items():
        file = tmp_path / secret["file"]
        found = file.stat()
        assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (10001, 0o640)
        if name != "passwords":
            assert len(read_secret(file)) == 64


def test_the_pipeline_has_a_command_that_exists() -> None:
    from holdfast.cli.main import build_parser

    command = services(COMPOSE / "pipeline.yml")["pipeline"]["command"]
    parsed = build_parser([command[0]]).parse_args(command)
    assert str(vars(parsed)["lake"]) == "/lake"


@pytest.mark.skipif(PROGRAM is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.long
def test_compose_accepts_it(path: Path, tmp_path: Path) -> None:
    assert PROGRAM is not None
    # Debian 12 has version 1.29, which does not know the project's name in the file yet.
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"^name: .*\n", "", path.read_text(), flags=re.MULTILINE))
    done = subprocess.run(
        [PROGRAM, "-f", str(copy), "config"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^services:", done.stdout, flags=re.MULTILINE)

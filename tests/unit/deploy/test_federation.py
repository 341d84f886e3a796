"""deploy/federation: what the containers are told must be settings that exist and go together."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.config import load as broker_configuration
from holdfast_federation.manager import settings as manager_settings
from holdfast_federation.sidecar import sidecar_settings
from tests.support.compose_files import DEPLOY, FEDERATION, parse

MEMBERS = ("federator-a", "federator-b", "holdfast-c")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return parse(FEDERATION)


@pytest.fixture
def environments(compose: dict[str, Any], tmp_path: Path) -> dict[str, dict[str, str]]:
    """Of each service, with the secrets and data where they can be read here."""
    for name in compose["secrets"]:
        (tmp_path / name).write_text("0123456789abcdef" * 4)
    return {
        name: {
            key: text.replace("/run/secrets", str(tmp_path)).replace(
                "/var/lib/holdfast", str(tmp_path)
            )
            for key, text in service.get("environment", {}).items()
        }
        for name, service in compose["services"].items()
    }


def test_what_is_named_is_there(compose: dict[str, Any]) -> None:
    volumes = set()
    for name, service in compose["services"].items():
        assert set(service.get("secrets", [])) <= set(compose["secrets"]), name
        assert set(service.get("depends_on", [])) <= set(compose["services"]), name
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / "federation" / source).exists()
            else:
                volumes.add(source)
    assert volumes == set(compose["volumes"])
    build = compose["services"]["topology-manager"]["build"]
    assert (DEPLOY / "federation" / build["context"] / build["dockerfile"]).resolve().exists()


def test_every_command_is_one(compose: dict[str, Any]) -> None:
    commands = {name: each.get("command") for name, each in compose["services"].items()}
    assert commands["topology-manager"] == ["federation", "manager", "serve"]
    assert commands["federator-a"] == commands["federator-b"] == ["federation", "sidecar"]
    assert commands["holdfast-c"] == ["serve"]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["/opt/holdfast/bin/holdfast"]' in dockerfile


def test_the_manager_takes_its_environment(environments: dict[str, dict[str, str]]) -> None:
    environment = environments["topology-manager"]
    settings = manager_settings.load(environment)
    assert settings.core_ann_interval_ns == settings.beacon_interval_ns == 2_000_000_000
    assert (settings.redundancy, settings.degree_max, settings.bind) == (2, 5, "0.0.0.0")
    assert all(name.startswith(manager_settings.PREFIX) for name in environment)


@pytest.mark.parametrize("site", ["a", "b"])
def test_a_federator_takes_its_environment(
    environments: dict[str, dict[str, str]], site: str
) -> None:
    settings = sidecar_settings.load(None, environments[f"federator-{site}"], {})
    federation = settings.federation
    assert federation.manager == "http://topology-manager:8080"
    assert federation.broker == f"tcp://mosquitto-{site}:1883"
    assert federation.address == f"federator-{site}:7883"
    assert settings.edge.servers == (f"mqtt://mosquitto-{site}:1883",)


@pytest.mark.parametrize("site", ["a", "b"])
def test_no_name_of_a_federator_is_passed_over(
    environments: dict[str, dict[str, str]], site: str
) -> None:
    """A name without the prefix would be passed over, a wrong one with it is refused."""
    environment = environments[f"federator-{site}"]
    for name in environment:
        assert name.startswith("HOLDFAST_")
        with pytest.raises(ValueError, match="no such key"):
            sidecar_settings.load(None, {**environment, f"{name}S": "x"}, {})


def test_the_broker_takes_its_environment(environments: dict[str, dict[str, str]]) -> None:
    config = broker_configuration.load(None, environments["holdfast-c"])
    assert config.federation is not None
    assert config.federation.manager == "http://topology-manager:8080"
    assert config.federation.advertise == "holdfast-c:7883"
    assert config.listeners[0].bind == "0.0.0.0"


def test_all_are_of_one_federation(environments: dict[str, dict[str, str]]) -> None:
    for name in ("HOLDFAST_FEDERATION__NAME", "HOLDFAST_FEDERATION__SECRET_FILE"):
        assert len({environments[member][name] for member in MEMBERS}) == 1

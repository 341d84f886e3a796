"""deploy/kubernetes: the nodes take their settings and meet, the probes get a reply, and what
`kubectl kustomize` makes of it goes together."""

import contextlib
import http.client
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import __version__
from holdfast.config.check import warnings
from holdfast.config.load import load
from holdfast.config.schema import Config
from holdfast.server.service_manager import CLOSING_S
from holdfast.testing import Broker

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes"
PACKAGES = BASE.parent / "packages"
SECRETS = "/run/secrets/holdfast/"
KUBECTL = shutil.which("kubectl")


def documents(text: str) -> dict[tuple[str, str], Any]:
    """The resources by kind and name."""
    found = yaml.safe_load_all(text)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@pytest.fixture(scope="module")
def resources() -> dict[tuple[str, str], Any]:
    files = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert {*files, "kustomization.yaml"} == {path.name for path in BASE.iterdir()}
    return documents("---\n".join((BASE / name).read_text() for name in files))


def get_status(port: int, path: str) -> int:
    """The status of a request without credentials."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def node_config(pod: dict[str, Any], name: str, tmp_path: Path) -> Config:
    """The settings of the pod with this name."""
    environment = {}
    for each in pod["containers"][0]["env"]:
        if "valueFrom" in each:
            assert each["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            value = name
        else:
            value = each["value"].replace("$(HOLDFAST_NODE__ID)", name)
        environment[each["name"]] = value.replace(SECRETS, f"{tmp_path}/")
    return load(PACKAGES / "image.toml", environment, {})


def test_nodes_take_their_settings(resources: dict[tuple[str, str], Any], tmp_path: Path) -> None:
    (tmp_path / "passwords").touch()
    (tmp_path / "cluster").write_text("0123456789abcdef" * 4)
    spec = resources["StatefulSet", "holdfast"]["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    names = [f"holdfast-{number}" for number in range(spec["replicas"])]
    peers = [f"{name}.{spec['serviceName']}:21883" for name in names]
    for name, address in zip(names, peers, strict=True):
        config = node_config(pod, name, tmp_path)
        assert config.node.id == name
        assert config.cluster.peer_address() == address
        assert config.cluster.join == peers
        assert config.cluster.wait_for_init
        assert not config.security.allow_anonymous
        assert [each for each in warnings(config) if "token of `holdfast access`" not in each] == []
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        (listener,) = config.listeners
        assert ports == {
            "mqtt": listener.port, "peers": config.cluster.peer_port, "admin": config.admin.port,
        }  # fmt: skip
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        assert mounted == {config.node.data, SECRETS.rstrip("/")}
        assert len(names) >= config.cluster.replication_factor > config.cluster.min_insync
        waits_s = config.cluster.stop_wait_s + config.server.lame_duck_s
        assert config.server.lame_duck_s > 0
        assert waits_s + CLOSING_S <= pod["terminationGracePeriodSeconds"]
    budget = resources["PodDisruptionBudget", "holdfast"]["spec"]
    assert len(names) - budget["maxUnavailable"] >= config.cluster.min_insync
    headless = resources["Service", spec["serviceName"]]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert {each["name"]: each["port"] for each in headless["ports"]} == ports


def test_pods_are_confined(resources: dict[tuple[str, str], Any]) -> None:
    pod = resources["StatefulSet", "holdfast"]["spec"]["template"]["spec"]
    user = pod["securityContext"]["runAsUser"]
    assert f"holdfast:x:{user}:{user}::" in (PACKAGES / "image.sh").read_text()
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_probes_are_answered_without_credentials(resources: dict[tuple[str, str], Any]) -> None:
    container = resources["StatefulSet", "holdfast"]["spec"]["template"]["spec"]["containers"][0]
    with Broker(admin=True) as broker:
        for probe in ("livenessProbe", "readinessProbe"):
            path = container[probe]["httpGet"]["path"]
            assert get_status(broker.admin_port, path) == 200
            assert get_status(broker.admin_port, f"{path}-other") == 404


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_what_kustomize_makes_of_it() -> None:
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(BASE)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    made = documents(done.stdout)
    spec = made["StatefulSet", "holdfast"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"]
    assert spec["template"]["spec"]["containers"][0]["image"] == f"holdfast:{__version__}"
    for kind, name in (("Service", "holdfast"), ("Service", "holdfast-nodes")):
        assert made[kind, name]["spec"]["selector"] == labels
    budget = made["PodDisruptionBudget", "holdfast"]["spec"]
    assert budget["selector"] == {"matchLabels": labels}

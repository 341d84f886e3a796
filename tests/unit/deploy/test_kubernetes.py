"""deploy/kubernetes and the Helm chart: the nodes take their settings and meet, the probes get a
reply, and what kustomize and helm make of it goes together."""

import contextlib
import http.client
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast import __version__
from holdfast.config.check import warnings
from holdfast.config.load import load
from holdfast.config.schema import Config
from holdfast.process.service_manager import CLOSING_S
from holdfast.testing import Broker
from tests.support.certificates import Authority
from tests.support.kubernetes import (
    BASE,
    CHART,
    HELM,
    KUBECTL,
    TOOLS,
    Resources,
    documents,
    environment_of,
    helm_template,
    kustomize,
    pod_of,
)

PACKAGES = BASE.parent / "packages"
SECRETS = "/run/secrets/"
COMPONENTS = ("load-balancer", "monitoring")
GATEWAYS = "gateways"
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed: make test-packages")


@pytest.fixture(scope="module")
def resources() -> Resources:
    files = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert {*files, "kustomization.yaml"} == {path.name for path in BASE.glob("*.yaml")}
    return documents("---\n".join((BASE / name).read_text() for name in files))


def get_status(port: int, path: str) -> int:
    """The status of a request without credentials."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def node_config(pod: dict[str, Any], name: str, directory: Path) -> Config:
    """The settings of the pod with this name, with its secrets in a directory."""
    mounted = {each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    environment = {}
    for key, value in environment_of(pod, name).items():
        if value.startswith("/"):
            assert value.rpartition("/")[0] in mounted, f"{key}: {value} is not mounted"
        environment[key] = value.replace(SECRETS, f"{directory}/")
    return load(PACKAGES / "image.toml", environment, {})


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A directory with the files of all secrets."""
    for name in ("holdfast", "tls", "peers"):
        (tmp_path / name).mkdir()
    (tmp_path / "holdfast" / "passwords").touch()
    (tmp_path / "holdfast" / "cluster").write_text("0123456789abcdef" * 4)
    authority = Authority(tmp_path)
    made = authority.issue()
    for name in ("tls", "peers"):
        (tmp_path / name / "tls.crt").write_bytes(Path(made.certificate).read_bytes())
        (tmp_path / name / "tls.key").write_bytes(Path(made.key).read_bytes())
        (tmp_path / name / "ca.crt").write_bytes(Path(authority.ca).read_bytes())
    return tmp_path


def test_nodes_take_their_settings(resources: Resources, secrets: Path) -> None:
    spec = resources["StatefulSet", "holdfast"]["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    names = [f"holdfast-{number}" for number in range(spec["replicas"])]
    peers = [f"{name}.{spec['serviceName']}:21883" for name in names]
    for name, address in zip(names, peers, strict=True):
        config = node_config(pod, name, secrets)
        assert config.node.id == name
        assert config.cluster.peer_address() == address
        assert config.cluster.join == peers
        assert not config.cluster.wait_for_init
        assert not config.security.allow_anonymous
        assert all(each.startswith("admin.bind = ") for each in warnings(config))
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        (listener,) = config.listeners
        assert ports == {
            "mqtt": listener.port, "peers": config.cluster.peer_port, "admin": config.admin.port,
        }  # fmt: skip
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        assert mounted == {config.node.data, SECRETS + "holdfast"}
        assert len(names) >= config.cluster.replication_factor > config.cluster.min_insync
        waits_s = config.cluster.stop_wait_s + config.server.lame_duck_s
        assert config.server.lame_duck_s > 0
        assert waits_s + CLOSING_S <= pod["terminationGracePeriodSeconds"]
    budget = resources["PodDisruptionBudget", "holdfast"]["spec"]
    assert len(names) - budget["maxUnavailable"] >= config.cluster.min_insync
    headless = resources["Service", spec["serviceName"]]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert {each["name"]: each["port"] for each in headless["ports"]} == ports


def test_pods_have_the_zone_of_their_machine(resources: Resources) -> None:
    pod = pod_of(resources)
    names = {"": "", "eu-west-1a": "eu-west-1a"}
    for label, zone in names.items():
        environment = environment_of(pod, "holdfast-0", label)
        found = {key: text for key, text in environment.items() if key.endswith("__ZONE")}
        assert load(None, found, {}).cluster.zone == zone


def size_of(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def test_the_volume_and_the_memory_are_enough(resources: Resources, secrets: Path) -> None:
    """By the figures of docs/sizing.md."""
    spec = resources["StatefulSet", "holdfast"]["spec"]
    pod = spec["template"]["spec"]
    config = node_config(pod, "holdfast-0", secrets)
    (claim,) = spec["volumeClaimTemplates"]
    volume = size_of(claim["spec"]["resources"]["requests"]["storage"])
    retention = config.log.retention
    assert 0 < retention.bytes + retention.session_bytes + 4 * config.log.segment_bytes < volume
    memory = pod["containers"][0]["resources"]
    assert memory["requests"]["memory"] == memory["limits"]["memory"]
    assert 56e6 + 20_000 * config.limits.connections < size_of(memory["limits"]["memory"]) / 2


def test_pods_are_confined(resources: Resources) -> None:
    pod = pod_of(resources)
    user = pod["securityContext"]["runAsUser"]
    assert f"holdfast:x:{user}:{user}::" in (PACKAGES / "image.sh").read_text()
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_probes_are_answered_without_credentials(resources: Resources) -> None:
    container = pod_of(resources)["containers"][0]
    with Broker(admin=True) as broker:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = container[probe]["httpGet"]["path"]
            assert get_status(broker.admin_port, path) == 200
            assert get_status(broker.admin_port, f"{path}-other") == 404


def check_selectors(made: Resources) -> None:
    """Each selector of pods selects these. A constraint without a selector would match none."""
    (name,) = [name for kind, name in made if kind == "StatefulSet"]
    spec = made["StatefulSet", name]["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= labels
    assert spec["template"]["spec"]["containers"][0]["image"] == f"holdfast:{__version__}"
    selectors = [
        *[each["labelSelector"] for each in spec["template"]["spec"]["topologySpreadConstraints"]],
        *[each["spec"]["selector"] for (kind, _), each in made.items() if kind != "StatefulSet"
          and "selector" in each.get("spec", {})],
        made["NetworkPolicy", name]["spec"]["podSelector"],
    ]  # fmt: skip
    assert len(selectors) >= 6
    for selector in selectors:
        wanted = selector.get("matchLabels", selector)
        assert wanted, "selects nothing"
        assert wanted.items() <= labels
    ports = {
        each["name"]: each["containerPort"]
        for each in spec["template"]["spec"]["containers"][0]["ports"]
    }
    clients, nodes, admins = made["NetworkPolicy", name]["spec"]["ingress"]
    assert "from" not in clients
    assert {each["port"] for each in clients["ports"]} >= {ports["mqtt"], ports.get("mqtts", 8883)}
    assert nodes["from"] == [{"podSelector": spec["selector"]}]
    assert {each["port"] for each in nodes["ports"]} == {ports["peers"], ports["admin"]}
    assert [each["port"] for each in admins["ports"]] == [ports["admin"]]


def check_schemas(text: str, file: Path) -> None:
    """Against the schemas of Kubernetes, strictly, if they are installed."""
    if not (TOOLS / "python").exists():
        return
    file.write_text(text)
    for version in ("1.27", "1.34"):
        done = subprocess.run(
            [*[sys.executable, "-m", "kubernetes_validate", "--strict", "--quiet", "-k", version],
             str(file)],
            env={**os.environ, "PYTHONPATH": str(TOOLS / "python")},
            capture_output=True,
            text=True,
            timeout=100,
        )  # fmt: skip
        unknown = [each for each in done.stderr.splitlines() if "PodMonitor" not in each]
        assert (done.returncode, unknown) == (0, []), done.stdout


@needs_kubectl
def test_what_kustomize_makes_of_it(tmp_path: Path) -> None:
    text = kustomize(BASE)
    check_selectors(documents(text))
    check_schemas(text, tmp_path / "made.yaml")


@needs_kubectl
def test_an_overlay_with_all_components(secrets: Path) -> None:
    """TLS at 8883 behind a load balancer, and a monitor."""
    folders = {path.name for path in BASE.iterdir() if path.is_dir()}
    assert folders == {*COMPONENTS, GATEWAYS}
    text = with_components(secrets / "overlay", *COMPONENTS)
    check_schemas(text, secrets / "made.yaml")
    made = documents(text)
    check_selectors(made)
    check_public(made, node_config(pod_of(made), "holdfast-1", secrets))


def with_components(overlay: Path, *names: str) -> str:
    """The base with these components."""
    overlay.mkdir()
    relative = os.path.relpath(BASE, overlay.resolve())
    components = [f"{relative}/{name}" for name in names]
    made = {"resources": [relative], "components": components}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return kustomize(overlay)


@needs_kubectl
def test_gateways_join_the_nodes_and_are_selected_apart(secrets: Path) -> None:
    text = with_components(secrets / "overlay", GATEWAYS)
    check_schemas(text, secrets / "made.yaml")
    made = documents(text)
    spec = made["StatefulSet", "holdfast-gateway"]["spec"]
    nodes = made["StatefulSet", "holdfast"]["spec"]
    pod = spec["template"]["spec"]
    config = node_config(pod, "holdfast-gateway-1", secrets)
    assert config.cluster.role == "gateway"
    address = f"holdfast-gateway-1.{spec['serviceName']}"
    assert config.cluster.peer_address() == f"{address}:21883"
    assert config.node.advertise == f"{address}:1883"
    one = node_config(nodes["template"]["spec"], "holdfast-0", secrets)
    assert config.cluster.join == one.cluster.join
    assert pod["containers"][0]["image"] == nodes["template"]["spec"]["containers"][0]["image"]
    assert pod["securityContext"] == nodes["template"]["spec"]["securityContext"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    assert not nodes["selector"]["matchLabels"].items() <= labels.items()
    for kind, name in (("Service", "holdfast-gateway"), ("Service", spec["serviceName"])):
        assert made[kind, name]["spec"]["selector"] == labels
    for name in ("holdfast", "holdfast-gateway"):
        sources = made["NetworkPolicy", name]["spec"]["ingress"][1]["from"]
        assert "holdfast-gateway" in str(sources), "it may reach the other nodes"


def check_public(made: Resources, config: Config) -> None:
    (name,) = [name for kind, name in made if kind == "StatefulSet"]
    assert [listener.port for listener in config.listeners] == [1883, 8883]
    assert config.listeners[1].certificate
    assert "metrics" in config.admin.open
    ports = {each["name"]: each["containerPort"] for each in pod_of(made)["containers"][0]["ports"]}
    (port,) = made["Service", f"{name}-public"]["spec"]["ports"]
    assert (port["port"], ports[port["targetPort"]]) == (8883, 8883)
    (endpoint,) = made["PodMonitor", name]["spec"]["podMetricsEndpoints"]
    assert ports[endpoint["port"]] == config.admin.port


def without_helm(value: Any) -> Any:
    """A resource without what helm adds and what is the same when it is left out."""
    if isinstance(value, dict):
        return {
            key: without_helm(each)
            for key, each in value.items()
            if key not in ("helm.sh/chart", "imagePullPolicy")
            and (not key.startswith("app.kubernetes.io/") or key.endswith("/name"))
        }
    return [without_helm(each) for each in value] if isinstance(value, list) else value


@needs_kubectl
@needs_helm
@pytest.mark.parametrize("gateways", [0, 2])
def test_the_chart_makes_the_same_as_kustomize(tmp_path: Path, gateways: int) -> None:
    chart = helm_template("holdfast", {"gateways": {"replicas": gateways}}, tmp_path)
    check_schemas(chart, tmp_path / "made.yaml")
    components = [GATEWAYS] if gateways else []
    made = documents(with_components(tmp_path / "overlay", *components))
    rendered = documents(chart)
    assert rendered.keys() == made.keys()
    for name, resource in made.items():
        assert without_helm(rendered[name]) == without_helm(resource), name


@needs_helm
def test_every_value_of_the_chart_arrives(secrets: Path) -> None:
    values = {
        "replicas": 5,
        "tlsSecret": "door",
        "peerTlsSecret": "nodes",
        "monitor": {"enabled": True},
        "publicService": {"enabled": True, "proxies": ["10.0.0.0/8", "10.1.0.0/16"]},
        "storage": {"className": "fast", "size": "20Gi"},
        "environment": {"HOLDFAST_LOGGING__LEVEL": "debug"},
        "config": '[node]\ndata = "/var/lib/holdfast"\n',
    }
    text = helm_template("mq", values, secrets)
    check_schemas(text, secrets / "made.yaml")
    made = documents(text)
    check_selectors(made)
    config = node_config(pod_of(made), "mq-holdfast-4", secrets)
    check_public(made, config)
    assert config.listeners[1].proxies == ["10.0.0.0/8", "10.1.0.0/16"]
    assert config.logging.level == "debug"
    assert len(config.cluster.join) == 3
    assert config.cluster.ca.endswith("/peers/ca.crt")
    assert made["ConfigMap", "mq-holdfast"]["data"]["holdfast.toml"] == values["config"]
    (claim,) = made["StatefulSet", "mq-holdfast"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"


@needs_helm
def test_clients_of_other_networks_go_to_the_gateways(secrets: Path) -> None:
    gateways: dict[str, Any] = {"replicas": 3, "storage": {"size": "5Gi"}}
    values: dict[str, Any] = {
        "gateways": gateways,
        "publicService": {"enabled": True, "gateways": True},
        "monitor": {"enabled": True},
    }
    text = helm_template("a-release-with-a-long-name", values, secrets)
    check_schemas(text, secrets / "made.yaml")
    made = documents(text)
    name = "a-release-with-a-lo-gateway"
    spec = made["StatefulSet", name]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    config = node_config(spec["template"]["spec"], f"{name}-2", secrets)
    assert (config.node.id, config.cluster.role) == (f"{name}-2", "gateway")
    assert made["Service", f"{name}-public"]["spec"]["selector"] == labels
    assert made["PodMonitor", name]["spec"]["selector"]["matchLabels"] == labels
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    gateways["replicas"] = 0
    with pytest.raises(AssertionError, match=r"set gateways\.replicas"):
        helm_template("mq", values, secrets)


@needs_helm
def test_wrong_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="replicas"):
        helm_template("mq", {"replicas": 2}, tmp_path)
    with pytest.raises(AssertionError, match="tlsSecrets"):
        helm_template("mq", {"tlsSecrets": "x"}, tmp_path)


def test_the_chart_has_the_version_of_the_broker() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)

"""The pods of deploy/kubernetes and of the Helm chart as containers: `make test-packages`.

There is no Kubernetes here. Each container has what the rendered StatefulSet gives to its pod, and
the test does what the controllers would do.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import until
from tests.e2e.test_packages import package
from tests.support.certificates import Authority
from tests.support.kubernetes import BASE, HELM, KUBECTL, Pods, documents, helm_template, kustomize
from tests.support.podman import Engine, is_installed

START_S = 120.0
PUBLISH = ["-u", "meter", "-P", "a password", "-t", "t"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif("HOLDFAST_PACKAGES" not in os.environ, reason="make test-packages"),
    pytest.mark.skipif(not is_installed(), reason="podman is not installed"),
]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(package("holdfast-*-image.tar")) as started:
        yield started


@pytest.fixture
def secret(tmp_path: Path) -> dict[str, bytes]:
    from holdfast.cli.main import main

    file = tmp_path / "passwords.txt"
    assert main(["passwd", "-c", "-b", str(file), "meter", "a password"]) == 0
    return {"cluster": b"0123456789abcdef" * 4, "passwords": file.read_bytes()}


def cluster_id(pods: Pods, count: int) -> str:
    """The cluster of `count` nodes, which all report as healthy."""
    found: set[str] = set()
    for ordinal in range(count):
        until(lambda ordinal=ordinal: pods.probe(ordinal), f"{ordinal} is ready", START_S)  # type: ignore[misc]

    def is_healthy() -> bool:
        return pods.execute(0, "cluster", "status").stdout.startswith(f"healthy: {count} nodes")

    until(is_healthy, f"{count} nodes are healthy", START_S)
    for ordinal in range(count):
        text = pods.execute(ordinal, "cluster", "status").stdout
        found |= set(re.findall(r"^cluster ([0-9a-f]{16})", text, flags=re.MULTILINE))
    (one,) = found
    return one


def publish(pods: Pods, ordinal: int) -> None:
    done = pods.execute(ordinal, "pub", *PUBLISH, "-q", "1", "-r", "-m", "kept")
    assert done.returncode == 0, done.stderr


def retained(pods: Pods, ordinal: int) -> str:
    done = pods.execute(ordinal, "sub", *PUBLISH, "-C", "1")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_a_lost_volume_and_the_scale(
    engine: Engine, tmp_path: Path, secret: dict[str, bytes]
) -> None:
    """Three pods create a cluster; one loses its volume; five, and three again by the commands of
    docs/install.md."""
    pods = Pods(engine, tmp_path, documents(kustomize(BASE)), {"holdfast": secret})
    pods.start(0, 1, 2)
    known = cluster_id(pods, 3)
    publish(pods, 1)
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert pods.probe(0, name)
    pods.lose(0)
    pods.start(0)
    assert cluster_id(pods, 3) == known
    assert "kept" in retained(pods, 0)
    pods.start(3, 4)
    assert cluster_id(pods, 5) == known
    for ordinal in (4, 3):
        for command in ("drain", "remove"):
            done = pods.execute(0, "cluster", command, f"holdfast-{ordinal}")
            assert done.returncode == 0, done.stdout + done.stderr
        # A removed pod serves nobody before the StatefulSet ends it.
        until(lambda ordinal=ordinal: not pods.probe(ordinal), "no client goes there")  # type: ignore[misc]
    pods.delete(4, 3)
    assert cluster_id(pods, 3) == known
    pods.delete_volume(3)
    pods.start(3)
    assert cluster_id(pods, 4) == known
    assert "kept" in retained(pods, 3)


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_the_chart_with_certificates(
    engine: Engine, tmp_path: Path, secret: dict[str, bytes]
) -> None:
    """TLS for clients and between the nodes, a configuration of its own, and another name. Then a
    rolling update: the next pod ends as soon as one is ready."""
    authority = Authority(tmp_path)
    names = [f"mq-holdfast-{ordinal}" for ordinal in range(3)]
    made = authority.issue("", "localhost", *names)
    tls = {
        "tls.crt": Path(made.certificate).read_bytes(),
        "tls.key": Path(made.key).read_bytes(),
        "ca.crt": Path(authority.ca).read_bytes(),
    }
    values = {
        "secretName": "s",
        "tlsSecret": "door",
        "peerTlsSecret": "nodes",
        "monitor": {"enabled": True},
        "environment": {"HOLDFAST_LOGGING__LEVEL": "debug"},
        "config": '[node]\ndata = "/var/lib/holdfast"\n[[listeners]]\nbind = "0.0.0.0"\n'
        "port = 1883\n[limits]\nretained_max = 1000\n",
    }
    resources = documents(helm_template("mq", values, tmp_path))
    pods = Pods(engine, tmp_path, resources, {"s": secret, "door": tls, "nodes": tls})
    pods.start(0, 1, 2)
    known = cluster_id(pods, 3)
    for ordinal in (2, 1, 0):
        pods.delete(ordinal)
        publish(pods, (ordinal + 1) % 3)
        pods.start(ordinal)
        until(lambda ordinal=ordinal: pods.probe(ordinal), f"{ordinal} is ready", START_S)  # type: ignore[misc]
        publish(pods, (ordinal + 1) % 3)
    assert cluster_id(pods, 3) == known
    done = pods.execute(
        2, "pub", *PUBLISH, "-p", "8883", "-h", "localhost", "--cafile", "/run/secrets/tls/ca.crt",
        "-q", "1", "-m", "x",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

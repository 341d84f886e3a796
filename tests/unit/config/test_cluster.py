"""The [cluster] table: what goes together, and the options of `holdfast serve` for it."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli.serve import EXIT_CONFIG, add_parser, run
from holdfast.config.check import warnings
from holdfast.config.load import load
from holdfast.config.problem import ConfigError
from holdfast.config.schema import Cluster, Config
from holdfast.io.settings.addresses import admin_address

LOCAL = {"cluster.peer_bind": "127.0.0.1"}
ANYWHERE = {"cluster.peer_bind": "10.0.0.1", "cluster.secret_file": "secret"}
TLS = {"cluster.certificate": "a.pem", "cluster.key": "a.key", "cluster.ca": "ca.pem"}


def problems(overrides: dict[str, object]) -> list[str]:
    try:
        load(None, {}, overrides)
    except ConfigError as error:
        return [line.removeprefix("command line: ") for line in error.problems]
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        LOCAL,
        ANYWHERE,
        {"cluster.peer_bind": "10.0.0.1", **TLS},
        {"cluster.peer_bind": "::1", "cluster.join": ["[::1]:21883", "host.name:1"]},
        {**ANYWHERE, "cluster.peer_bind": "0.0.0.0", "cluster.peer_advertise": "a.b:21883"},
        {**LOCAL, "cluster.witness": True, "cluster.join": ["a:1"]},
        {**LOCAL, "cluster.wait_for_init": False, "cluster.join": ["127.0.0.1:21883", "a:1"]},
        {**LOCAL, "node.id": "A-z_0" * 6},
        {"cluster.replication_factor": 1, "cluster.min_insync": 1},
    ],
)
def test_what_goes_together(overrides: dict[str, object]) -> None:
    assert problems(overrides) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            {"cluster.peer_bind": "10.0.0.1"},
            'cluster.peer_bind = "10.0.0.1": other machines reach it: set cluster.secret_file, or'
            " cluster.certificate, key and ca",
        ),
        (
            {**ANYWHERE, "cluster.peer_bind": "::"},
            'cluster.peer_bind = "::": stands for all addresses: set cluster.peer_advertise to the'
            " host:port at which the other nodes reach this one",
        ),
        (
            {**ANYWHERE, "cluster.peer_bind": "10.0.0.1:21883"},
            'cluster.peer_bind = "10.0.0.1:21883": must be an IP address or a host name; the port'
            " has a key of its own",
        ),
        (
            {**LOCAL, "cluster.peer_port": 1883},
            "cluster.peer_port = 1883: listeners[0] already listens there; each needs its own"
            " address",
        ),
        (
            {**LOCAL, "cluster.peer_port": 0},
            "cluster.peer_port = 0: must be a whole number from 1 to 65535",
        ),
        (
            {**LOCAL, "cluster.join": ["a:1", "b"]},
            'cluster.join[1] = "b": must be host:port',
        ),
        (
            {**LOCAL, "cluster.join": ["::1:5"]},
            'cluster.join[0] = "::1:5": must be host:port',
        ),
        (
            {**LOCAL, "cluster.join": ["a:65536"]},
            'cluster.join[0] = "a:65536": the port must be from 1 to 65535',
        ),
        (
            {**LOCAL, "cluster.peer_advertise": "a:0"},
            'cluster.peer_advertise = "a:0": the port must be from 1 to 65535',
        ),
        (
            {"cluster.join": ["a:1"]},
            "cluster.join = ['a:1']: other machines reach this node: set cluster.secret_file, or"
            " cluster.certificate, key and ca",
        ),
        (
            {"cluster.witness": True},
            "cluster.witness = true: needs cluster.peer_bind, the address on which other nodes"
            " reach this one",
        ),
        (
            {**LOCAL, "cluster.role": "gateway"},
            'cluster.role = "gateway": needs cluster.join, the other nodes',
        ),
        (
            {**LOCAL, "cluster.role": "gateway", "cluster.witness": True, "cluster.join": ["a:1"]},
            "cluster.witness = true: a gateway votes on nothing: choose one of the two",
        ),
        (
            {**LOCAL, "cluster.witness": True},
            "cluster.witness = true: needs cluster.join, the nodes it votes with",
        ),
        (
            {**LOCAL, "node.id": "a.b"},
            'node.id = "a.b": in a cluster (cluster.peer_bind) it must be 1 to 32 of A-Z a-z 0-9'
            " _ -",
        ),
        (
            {**LOCAL, "node.id": "a" * 33},
            f'node.id = "{"a" * 33}": in a cluster (cluster.peer_bind) it must be 1 to 32 of'
            " A-Z a-z 0-9 _ -",
        ),
        (
            {**LOCAL, "node.standby": True},
            "node.standby = true: the nodes of a cluster (cluster.peer_bind, join) share no data"
            " directory: choose one of the two",
        ),
        (
            {**LOCAL, "cluster.key": "k", "cluster.ca": "c"},
            'cluster.key = "k": needs cluster.certificate too: both ends of a link show a'
            " certificate and check the other's",
        ),
        (
            {"cluster.ca": "c"},
            'cluster.ca = "c": needs cluster.certificate and cluster.key too: both ends of a link'
            " show a certificate and check the other's",
        ),
        (
            {"cluster.replication_factor": 2, "cluster.min_insync": 3},
            "cluster.min_insync = 3: must be at most cluster.replication_factor = 2",
        ),
        (
            {"cluster.heartbeat_s": 0.2},
            "cluster.suspect_s = 0.5: must be at least three times cluster.heartbeat_s = 0.2",
        ),
        (
            {"cluster.suspect_s": 20.0},
            "cluster.replace_after_s = 10.0: must be at least cluster.suspect_s = 20.0",
        ),
        (
            {"cluster.replication_factor": 8},
            "cluster.replication_factor = 8: must be a whole number from 1 to 7",
        ),
    ],
)
def test_what_does_not(overrides: dict[str, object], expected: str) -> None:
    assert [line.removeprefix("configuration: ") for line in problems(overrides)] == [expected]


def test_a_cluster_that_asks_nobody_for_a_proof() -> None:
    assert any("cluster.secret_file" in line for line in warnings(load(None, {}, LOCAL)))
    for proof in ({"cluster.secret_file": "s"}, TLS):
        assert warnings(load(None, {}, {**LOCAL, **proof})) == []


@pytest.mark.parametrize(
    ("cluster", "address"),
    [
        (Cluster(peer_bind="10.0.0.1"), "10.0.0.1:21883"),
        (Cluster(peer_bind="::1", peer_port=5), "[::1]:5"),
        (Cluster(peer_bind="[::1]", peer_port=5), "[::1]:5"),
        (Cluster(peer_bind="0.0.0.0", peer_advertise="n1.site:7"), "n1.site:7"),
    ],
)
def test_where_peers_reach_a_node(cluster: Cluster, address: str) -> None:
    assert cluster.peer_address() == address


def serve(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, Config | None]:
    """Exit code of `holdfast serve`, and what it would have served."""
    served: list[Config] = []

    def note(config: Config, read: Callable[[], Config], settings: object, place: object) -> int:
        assert read() == config
        assert place is None
        served.append(config)
        return 0

    monkeypatch.setattr("holdfast.cli.serve.serve", note)
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return run(parser.parse_args(["serve", *arguments])), served[0] if served else None


def test_options_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text('[cluster]\npeer_bind = "10.0.0.1"\njoin = ["x:1"]\nreplication_factor = 5\n')
    code, config = serve(
        monkeypatch,
        *("-c", str(path), "--node-id", "n3", "--peer-bind", "[::1]:21000"),
        *("--join", "n1:21883, n2:21883,", "--witness", "--cluster-secret-file", "secret"),
    )
    assert code == 0
    assert config is not None
    assert config.node.id == "n3"
    assert config.cluster == Cluster(
        peer_bind="::1",
        peer_port=21000,
        join=["n1:21883", "n2:21883"],
        role="witness",
        secret_file="secret",
        replication_factor=5,
    )


def test_id_is_node_id(monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = serve(monkeypatch, "--id", "b")
    assert config is not None
    assert config.node.id == "b"
    assert config.cluster == Cluster()


def test_an_address_needs_a_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(monkeypatch, "--peer-bind", "10.0.0.1") == (EXIT_CONFIG, None)
    assert capsys.readouterr().err == "holdfast: --peer-bind '10.0.0.1': give ADDR:PORT\n"


@pytest.mark.parametrize(
    ("overrides", "address"),
    [
        ({"admin.bind": "127.0.0.1"}, "127.0.0.1:18083"),
        ({"admin.bind": "0.0.0.0", **LOCAL}, "127.0.0.1:18083"),
        (
            {
                "admin.bind": "::",
                "admin.port": 1,
                "cluster.peer_bind": "0.0.0.0",
                "cluster.peer_advertise": "n1.example:21883",
                "cluster.secret_file": "secret",
            },
            "n1.example:1",
        ),
        ({"admin.bind": "::", **ANYWHERE, "cluster.peer_bind": "fd00::1"}, "[fd00::1]:18083"),
        ({"admin.advertise": "gate.example:443", **LOCAL}, "gate.example:443"),
        ({"admin.enabled": False, **LOCAL}, ""),
    ],
)
def test_the_announced_address_of_the_admin_port(
    overrides: dict[str, object], address: str
) -> None:
    assert admin_address(load(None, {}, overrides)) == address


def test_an_announced_address_stands_for_one_machine() -> None:
    for wrong in ("0.0.0.0:18083", "[::]:18083", "n1:0", "n1:65536"):
        (problem,) = problems({"admin.advertise": wrong, **LOCAL})
        assert problem.startswith("admin.advertise")

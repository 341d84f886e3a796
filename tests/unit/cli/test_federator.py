"""How `holdfast federation sidecar` is configured, and what it says when it cannot be."""

from pathlib import Path

import pytest

from holdfast.cli.main import build_parser, main
from holdfast.config.problem import ConfigError
from holdfast_federation.cli import sidecar as command
from holdfast_federation.sidecar.sidecar_settings import SidecarSettings, load


def loaded(
    environ: dict[str, str] | None = None, path: Path | None = None, **overrides: object
) -> SidecarSettings:
    return load(path, environ or {}, {key.replace("__", "."): v for key, v in overrides.items()})


def test_defaults() -> None:
    settings = loaded()
    assert settings.federation.listen == "127.0.0.1:7883"
    assert settings.admin == "127.0.0.1:7884"
    edge = settings.edge
    assert edge.servers == ("mqtt://127.0.0.1:1883",)
    assert edge.level == 5
    assert edge.export_filters == edge.import_filters == ("#",)
    assert edge.interest == ()
    assert edge.sources.beacon_ttl_s == 30.0
    assert edge.directory == Path(settings.federation.data)


def test_the_later_wins(tmp_path: Path) -> None:
    file = tmp_path / "federator.toml"
    file.write_text(
        '[federation]\nname = "plant"\npeers = ["a:1"]\ndegree = 3\n'
        '[edge]\ninterest = ["x/#"]\nprotocol = "3.1.1"\nbeacon_interval_s = 5\n'
        '[admin]\naddress = ""\n'
    )
    environ = {
        "HOLDFAST_EDGE__BEACON_INTERVAL_S": "7",
        "HOLDFAST_FEDERATION__NAME": "other",
        "HOLDFAST_FEDERATION__DEGREE": "4",
        "HOLDFAST_EDGE__INTEREST": "a/#, b",
        "HOLDFAST_EDGE__BROKER": "mqtts://b1, mqtts://b2:9",
        "HOLDFAST_LOG__SOMETHING": "a broker's",
    }
    settings = loaded(environ, file, federation__name="third")
    assert settings.federation.name == "third"
    assert settings.federation.degree == 4
    assert settings.federation.peers == ["a:1"]
    edge = settings.edge
    assert edge.interest == ("a/#", "b")
    assert edge.servers == ("mqtts://b1:8883", "mqtts://b2:9")
    assert edge.tls is not None
    assert edge.level == 4
    assert edge.sources.beacon_ttl_s == 21.0
    assert settings.admin == ""


def test_the_manager_probes_the_broker_that_is_named() -> None:
    settings = loaded(edge__broker=["mqtts://b"], federation__manager="http://m:8080")
    assert settings.federation.broker == "ssl://b:8883"


@pytest.mark.parametrize(
    ("environ", "overrides", "text"),
    [
        ({}, {"edge__broker": ["http://x"]}, "unknown scheme"),
        ({}, {"edge__broker": []}, "name the broker"),
        ({}, {"edge__protocol": "4"}, "edge.protocol"),
        ({}, {"edge__interest": ["a/#/b"]}, "edge.interest"),
        ({}, {"edge__interest": "a"}, "edge.interest"),
        ({}, {"edge__sources": ["telepathy"]}, "edge.sources"),
        ({}, {"edge__password_file": "x"}, "edge.username"),
        ({}, {"edge__username": "u", "edge__password_file": "/nowhere"}, "/nowhere"),
        ({}, {"edge__ca": "ca.pem"}, "mqtts://"),
        ({}, {"edge__broker": ["mqtts://b"], "edge__ca": "/nowhere"}, "edge.ca"),
        ({}, {"edge__broker": ["mqtts://b"], "edge__key": "k"}, "go together"),
        ({}, {"edge__window_messages": 0}, "edge.window_messages"),
        ({}, {"federation__export_filters": ["#/a"]}, "federation.export_filters"),
        ({}, {"federation__listen": "0.0.0.0:7883"}, "federation.listen"),
        ({}, {"admin__address": "0.0.0.0:7884"}, "of this machine alone"),
        ({}, {"admin__address": "127.0.0.1:99999"}, "of this machine alone"),
        ({}, {"admin__address": "nonsense"}, "admin.address"),
        ({"HOLDFAST_EDGE__BEACON_INTERVAL_S": "soon"}, {}, "BEACON_INTERVAL_S"),
        ({"HOLDFAST_FEDERATION__HELLO_S": "-1"}, {}, "FEDERATION__HELLO_S"),
        ({"HOLDFAST_FEDERATION__REDUNDANCY": "many"}, {}, "FEDERATION__REDUNDANCY"),
        ({"HOLDFAST_FEDERATION__CAPACITY": "1"}, {}, "FEDERATION__CAPACITY"),
        ({"HOLDFAST_EDGE__BROKERS": "x"}, {}, "HOLDFAST_EDGE__BROKERS"),
        ({"HOLDFAST_EDGE__LOG_TTL_S": "long"}, {}, "edge.log_ttl_s"),
    ],
)
def test_errors_name_the_setting(
    environ: dict[str, str], overrides: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, environ, {key.replace("__", "."): one for key, one in overrides.items()})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[fedration]\n", "did you mean federation"),
        ("edge = 1\n", "must be a table"),
        ("[edge\n", "not valid TOML"),
        ("[edge]\nbrocker = 1\n", "edge.brocker"),
    ],
)
def test_a_wrong_file(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "f.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=text):
        loaded(path=file)
    with pytest.raises(ConfigError, match="cannot be read"):
        loaded(path=tmp_path / "nothing")


def test_every_option_is_a_setting() -> None:
    arguments = ["federation", "sidecar"]
    for name, (key, _, _) in command._OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        value = {"protocol": "3.1.1", "listen": "127.0.0.1:1", "advertise": "h:1"}.get(name, "x")
        arguments += [option, "" if name in ("admin", "ca", "password_file") else value]
        assert key
    for name in command._LISTS:
        arguments += [f"--{name}", "a:1", f"--{name}", "b:2"]
    args = build_parser(["federation"]).parse_args(arguments)
    given = command._overrides(args)
    assert given["edge.broker"] == ["a:1", "b:2"]
    given |= {key: "" for key in given if key.startswith("federation.manager")}
    settings = load(None, {}, given)
    assert settings.federation.export_filters == ["a:1", "b:2"]
    assert settings.edge.client_id == "x"


def test_wrong_usage_ends_with_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["federation", "sidecar", "--broker", "gopher://x"]) == 2
    assert "unknown scheme" in capsys.readouterr().err
    monkeypatch.setenv("HOLDFAST_EDGE__BEACON_INTERVAL_S", "soon")
    assert main(["federation", "sidecar"]) == 2
    assert "BEACON_INTERVAL" in capsys.readouterr().err


def test_a_taken_admin_port_ends_with_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--admin", address, "--data-dir", str(tmp_path), "--listen", ""]
        assert main(["federation", "sidecar", *arguments]) == 1
    assert "choose another one" in capsys.readouterr().err

"""The settings of the manager, from the environment and the command line."""

from pathlib import Path

import pytest

from holdfast.config.durations import duration_ns
from holdfast.config.problem import ConfigError
from holdfast_federation.manager.settings import PREFIX, load


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("10s", 10_000_000_000),
        ("1m30s", 90_000_000_000),
        ("1.5h", 5_400_000_000_000),
        ("300ms", 300_000_000),
        (".5s", 500_000_000),
        ("1.s", 1_000_000_000),
        ("7us", 7_000),
        ("7µs", 7_000),
        ("1h1ns", 3_600_000_000_001),
    ],
)
def test_durations_as_go_writes_them(text: str, nanoseconds: int) -> None:
    assert duration_ns(text) == nanoseconds


@pytest.mark.parametrize(
    "text", ["", "10", "s", "10 s", "-1s", "1d", "0s", "10s5", "1..5s", "1e3s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|out of range"):
        duration_ns(text)


def test_the_longest_duration() -> None:
    assert duration_ns("2562047h47m16s") < 1 << 63
    with pytest.raises(ValueError, match="out of range"):
        duration_ns("2562048h")


def test_the_environment() -> None:
    given = {
        "CORE_ANN_INTERVAL": "2s", "BEACON_INTERVAL": "1m30s", "REDUNDANCY": "3",
        "DEGREE_MAX": "6", "DB_URL": "sqlite:////var/lib/topology.db",
    }  # fmt: skip
    settings = load({f"{PREFIX}{name}": text for name, text in given.items()})
    assert settings.core_ann_interval_ns == 2_000_000_000
    assert settings.beacon_interval_ns == 90_000_000_000
    assert (settings.redundancy, settings.degree_max) == (3, 6)
    assert settings.db_url == "sqlite:////var/lib/topology.db"


def test_the_command_line_wins() -> None:
    environ = {"HOLDFAST_TOPOLOGY__DEGREE_MAX": "7"}
    assert load(environ).degree_max == 7
    assert load(environ, {"degree_max": "8"}).degree_max == 8


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"HOLDFAST_TOPOLOGY__DEGREE_MAX": "1"}, "from 2 to 64"),
        ({"HOLDFAST_TOPOLOGY__REDUNDANCY": "two"}, "TOPOLOGY__REDUNDANCY"),
        ({"HOLDFAST_TOPOLOGY__BEACON_INTERVAL": "10"}, "BEACON_INTERVAL.*no duration"),
        ({"HOLDFAST_TOPOLOGY__DB_URL": "mongodb://user:secret@h"}, "'mongodb': write sqlite:///"),
        ({"HOLDFAST_TOPOLOGY__DB_URL": "sqlite:///"}, "write sqlite:///"),
        (
            {"HOLDFAST_TOPOLOGY__DB_URL": "postgresql+psycopg://user:secret@h/d"},
            "'postgresql.psycopg': write",
        ),
        ({"HOLDFAST_TOPOLOGY__DB_URL": "topology.db"}, "'no URL': write sqlite:///"),
        ({"HOLDFAST_TOPOLOGY__PORTS": "1"}, "no such key"),
        ({"HOLDFAST_TOPOLOGY__PORT": "70000"}, "0 to 65535"),
        ({"HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S": "nan"}, "from 0.05 up to 3600"),
        ({"HOLDFAST_TOPOLOGY__TOKEN": "short"}, "fewer than 16"),
        ({"HOLDFAST_TOPOLOGY__TOKEN_FILE": "/no/such/file"}, "cannot be read"),
        ({"HOLDFAST_TOPOLOGY__BROKER_PASSWORD_FILE": "/f"}, "goes with broker_username"),
        ({"HOLDFAST_TOPOLOGY__CERTIFICATE": "a.pem"}, "go together"),
        ({"HOLDFAST_TOPOLOGY__BIND": "0.0.0.0"}, "anybody who reaches"),
        ({"HOLDFAST_TOPOLOGY__ALLOW_ANONYMOUS": "yes"}, "must be true or false"),
    ],
)
def test_wrong_settings_are_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(environ)


def test_a_secret_in_a_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        load({"HOLDFAST_TOPOLOGY__DB_URL": "mysql://user:secret@host"})
    assert "secret" not in str(raised.value)


def test_other_machines_are_served_with_a_token_or_on_purpose(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    settings = load(
        {"HOLDFAST_TOPOLOGY__BIND": "0.0.0.0", "HOLDFAST_TOPOLOGY__TOKEN_FILE": str(file)}
    )
    assert settings.token == "0123456789abcdef"
    assert settings.bind == "0.0.0.0"
    anybody = {"HOLDFAST_TOPOLOGY__BIND": "0.0.0.0", "HOLDFAST_TOPOLOGY__ALLOW_ANONYMOUS": "true"}
    assert load(anybody).allow_anonymous

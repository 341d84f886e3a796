"""[federation] in the configuration of a broker."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from holdfast.config.federation import Federation
from holdfast.config.load import load
from holdfast.config.problem import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "holdfast.toml"


def problems(directory: Path, text: str) -> list[str]:
    path = directory / "holdfast.toml"
    path.write_text(text)
    try:
        load(path)
    except ConfigError as error:
        return [problem.removeprefix(f"{path}: ") for problem in error.problems]
    return []


def test_there_is_none_without_the_table() -> None:
    assert load(None).federation is None


def test_the_example_shows_every_key_with_its_default() -> None:
    text = EXAMPLE.read_text("utf-8")
    table = text[text.index("# [federation]") : text.index("\n[log]")]
    shown = tomllib.loads(re.sub(r"^# (\[|[a-z_]+ = )", r"\1", table, flags=re.MULTILINE))
    assert shown == {"federation": msgspec.to_builtins(Federation())}


def test_every_key_can_be_set_in_the_environment() -> None:
    environ = {
        "HOLDFAST_FEDERATION__NAME": "plants",
        "HOLDFAST_FEDERATION__PEERS": '["10.0.0.1:7883"]',
        "HOLDFAST_FEDERATION__HELLO_S": "0.5",
    }
    federation = load(None, environ).federation
    assert federation is not None
    assert (federation.name, federation.peers, federation.hello_s) == (
        "plants",
        ["10.0.0.1:7883"],
        0.5,
    )


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("federation = 3", "federation", "a table"),
        ('[federation]\nnam = "x"', "federation.nam", "did you mean federation.name?"),
        ('[federation]\nlisten = "7883"', "federation.listen", "host:port"),
        ('[federation]\nlisten = "127.0.0.1:1883"', "federation.listen", "already listens there"),
        ('[federation]\nlisten = "0.0.0.0:7883"', "federation.listen", "set advertise"),
        ('[federation]\nexport_filters = ["a/#/b"]', "federation.export_filters", "#"),
        ('[federation]\ndata = "elsewhere"', "federation.data", "node.data"),
        ('[federation]\nmanager = "http://m:8080"', "federation.manager", "needs broker"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(
    tmp_path: Path, text: str, key: str, words: str
) -> None:
    found = problems(tmp_path, text)
    assert found
    assert found[0].startswith(key)
    assert words in found[0]

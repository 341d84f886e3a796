"""The examples as a user starts them: one line for what is wrong, and no traceback on Ctrl-C."""

import importlib
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing import Broker
from tests.e2e.wire import Wire

ROOT = Path(__file__).parents[3]
NEEDED = {
    "home_assistant": "holdfast",
    "log_to_delta": "deltalake",
    "log_to_polars": "polars",
    "log_to_postgresql": "psycopg",
    "log_to_sqlite": "sqlite3",
    "sparkplug": "google.protobuf",
}
"""By example, the library that it needs."""
WORK = ("run", "run_edge", "run_host", "last_hour")
"""The functions that do the work."""


def commands(name: str) -> list[list[str]]:
    """The arguments that the example itself and the documents say to type."""
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    texts.append((ROOT / "examples" / f"{name}.py").read_text())
    found = re.findall(rf"^ +python examples/{name}\.py (.+)$", "\n".join(texts), re.MULTILINE)
    return [shlex.split(each) for each in found]


@pytest.mark.parametrize("name", NEEDED)
def test_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(NEEDED[name])
    example = importlib.import_module(f"examples.{name}")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for function in WORK:
        monkeypatch.setattr(example, function, interrupted, raising=False)
    assert commands(name)
    for arguments in commands(name):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        assert example.main() == 130
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments[:-1]])
        with pytest.raises(SystemExit) as ended:
            example.main()
        assert ended.value.code == 2
        assert "the following arguments are required" in capsys.readouterr().err


def test_ctrl_c_switches_the_meter_off(tmp_path: Path) -> None:
    """The will is for cuts: a connection that ends in order has none."""
    with Broker(data=tmp_path / "data") as broker, Wire(broker.port) as client:
        client.connect("home-assistant")
        client.subscribe(("meter-1/available", 1))
        meter = subprocess.Popen(
            [sys.executable, ROOT / "examples/home_assistant.py", broker.url, "meter-1"],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert client.message().payload == b"online"
            meter.send_signal(signal.SIGINT)
            assert client.message().payload == b"offline"
            _, printed = meter.communicate(timeout=30)
        finally:
            meter.kill()
    assert (meter.returncode, printed) == (130, "")

"""The example of docs/hooks.md, installed as a package, in a real broker."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.protocol.mqtt import reasons
from tests.e2e import wire
from tests.e2e.brokers import SOURCE, Holdfast
from tests.e2e.conftest import StartHoldfast

EXAMPLE = Path(__file__).parents[2] / "examples" / "hooks"


def login(broker: Holdfast, user: str, password: str) -> tuple[wire.Wire, int]:
    client = wire.Wire(broker.port)
    body = wire.text("MQTT") + bytes([5, 0xC2, 0, 60, 0]) + wire.text(user)
    client.send(wire.packet(0x10, body + wire.text(user) + wire.text(password)))
    return client, wire.read_connack(client.expect(wire.CONNACK), 5).reason


def await_line(path: Path, line: str) -> None:
    deadline = time.monotonic() + 20.0
    while not path.exists() or line not in path.read_text().splitlines():
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "no file"
        time.sleep(0.05)


def test_the_example(
    start_holdfast: StartHoldfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As an installed package: its module, and the metadata with its entry point.
    site = tmp_path / "site"
    metadata = site / "plant_hooks-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "plant_hooks.py").write_bytes((EXAMPLE / "src" / "plant_hooks.py").read_bytes())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plant-hooks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[holdfast.hooks]\nplant = plant_hooks:PlantHooks\n")
    assert 'plant = "plant_hooks:PlantHooks"' in (EXAMPLE / "pyproject.toml").read_text()
    machines = {"machine-7": {"code": "4711", "line": "line-a"}}
    (tmp_path / "machines.json").write_text(json.dumps(machines))
    monkeypatch.setenv("PLANT_HOOKS", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_TEST_PATH", str(site))
    broker = start_holdfast({"hooks": {"enabled": ["plant"]}})
    events = tmp_path / "events.txt"
    client, reason = login(broker, "machine-7", "4711")
    with client:
        assert reason == 0
        await_line(events, "connected machine-7")
        assert client.publish("line-a/machine-7/x", b"", qos=1) in (0, 0x10)
        assert client.publish("line-b/x", b"", qos=1) == reasons.NOT_AUTHORIZED
        client.publish("alarms/machine-7", b"too hot", qos=1)
        await_line(events, "alarm alarms/machine-7 too hot")
    await_line(events, "disconnected machine-7 Connection lost")
    for user in ("machine-8", "machine-7"):
        client, reason = login(broker, user, "wrong")
        client.socket.close()
        assert reason == reasons.NOT_AUTHORIZED
    client, reason = login(broker, "somebody", "secret")
    client.socket.close()
    assert reason == reasons.NOT_AUTHORIZED
    assert "alarm line-a" not in events.read_text()


def test_an_unknown_hook_is_one_line(tmp_path: Path) -> None:
    settings = tmp_path / "holdfast.toml"
    settings.write_text(f'[node]\ndata = "{tmp_path}/data"\n[hooks]\nenabled = ["plan"]\n')
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", "-c", str(settings)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode != 0
    assert "the entry point 'plan' of the group 'holdfast.hooks'" in done.stderr
    assert "Traceback" not in done.stderr

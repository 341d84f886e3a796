"""`holdfast cluster` against nodes that run, and what a hand-over means for their clients."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from tests.e2e.brokers import SOURCE
from tests.e2e.pair import Node, pair, wait_until
from tests.e2e.wire import Closed, Wire


def cluster(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "cluster", *map(str, arguments)],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def status(data: Path) -> dict[str, Any]:
    result = cluster("status", "--json", "--data", data)
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == (0 if found["holder"] else 1)
    return found


def test_status_shows_who_does_what(tmp_path: Path) -> None:
    with pair(tmp_path) as (first, second):
        found = status(first.data)
        assert found["epoch"] == 1
        assert found["holder"]["node"] == "a"
        assert found["holder"]["address"] == f"127.0.0.1:{first.port}"
        assert found["renewing"]
        assert [node["node"] for node in found["standbys"]] == ["b"]
        text = cluster("status", "--data", first.data).stdout
        assert f"holder   a at 127.0.0.1:{first.port}, admin 127.0.0.1:{first.admin_port}" in text
        assert f"standby  b at 127.0.0.1:{second.port}" in text
        first.kill()
        wait_until(second.serves, "b serves")
        found = status(first.data)
        assert (found["epoch"], found["holder"]["node"], found["standbys"]) == (2, "b", [])
        assert "no node would take over" in cluster("status", "--data", first.data).stdout
        second.stop()
        found = status(first.data)
        assert (found["holder"], found["standbys"]) == (None, [])


def test_a_hand_over_loses_and_doubts_nothing(tmp_path: Path) -> None:
    """MQTT 5 clients are told where to go; what was sent is answered before."""
    with pair(tmp_path) as (first, second):
        acknowledged: list[int] = []
        goodbye: list[tuple[int, str]] = []
        gone = threading.Event()

        def on_disconnect(
            client: mqtt.Client,
            data: object,
            flags: object,
            code: ReasonCode,
            properties: Properties,
        ) -> None:
            goodbye.append((code.value, getattr(properties, "ServerReference", "")))
            gone.set()

        def publish(node: Node, start: int, until: threading.Event) -> int:
            client = mqtt.Client(CallbackAPIVersion.VERSION2, "publisher", protocol=mqtt.MQTTv5)
            client.on_disconnect = on_disconnect
            client.connect("127.0.0.1", node.port)
            client.loop_start()
            number = start
            while not until.is_set():
                sent = client.publish("t", str(number), qos=1)
                if sent.rc != mqtt.MQTT_ERR_SUCCESS:
                    break  # the connection is gone, and this was not sent
                # Only one is in doubt at a time.
                while not sent.is_published() and not until.wait(0.001):
                    continue
                if sent.is_published():
                    acknowledged.append(number)
                number += 1
                if number - start > 300 and node is second:
                    break
            client.disconnect()
            client.loop_stop()
            return number

        handing_over: list[subprocess.CompletedProcess[str]] = []
        thread = threading.Thread(
            target=lambda: handing_over.append(cluster("handover", "--data", first.data))
        )
        thread.start()
        number = publish(first, 0, gone)
        thread.join()
        assert goodbye[0] == (0x9C, f"127.0.0.1:{second.port}")
        assert handing_over[0].returncode == 0, handing_over[0].stderr
        assert "a handed over to b" in handing_over[0].stdout
        wait_until(second.serves, "b serves")
        gone.clear()
        publish(second, number, gone)
        # The old holder stands by again, under the same process id.
        wait_until(first.stands_by, "a stands by")
        assert status(first.data)["standbys"][0]["node"] == "a"
        # Not even the last one was left in doubt.
        wait_until(
            lambda: set(acknowledged) <= set(stored(first.data)), "the directory has all of it"
        )
        assert stored(first.data) == acknowledged


def stored(data: Path) -> list[int]:
    """The numbers in the log, in order."""
    dump = subprocess.run(
        [*cluster_command("log", "dump", "--kind", "message", "--json"), str(data)],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not dump.stderr
    return [int(json.loads(line)["payload"]) for line in dump.stdout.splitlines()]


def cluster_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli.main", *arguments]


def test_mqtt_3_clients_are_just_closed(tmp_path: Path) -> None:
    with pair(tmp_path) as (first, second), Wire(first.port, version=4) as wire:
        wire.connect("c")
        assert cluster("handover", "--data", first.data).returncode == 0
        with pytest.raises(Closed):
            wire.receive()
        wait_until(second.serves, "b serves")


def test_a_hand_over_back_and_forth(tmp_path: Path) -> None:
    with pair(tmp_path) as (first, second):
        for turn in range(4):
            holder, other = (first, second) if turn % 2 == 0 else (second, first)
            wait_until(holder.serves, f"{holder.node_id} serves")
            wait_until(other.stands_by, f"{other.node_id} stands by")
            result = cluster("handover", "--data", first.data)
            assert (result.returncode, result.stderr) == (0, "")
        assert status(first.data)["epoch"] == 5


@pytest.mark.parametrize("command", ["status", "handover"])
def test_directories_that_are_none(tmp_path: Path, command: str) -> None:
    result = cluster(command, "--data", tmp_path / "none")
    assert result.returncode == 2
    assert "is no Holdfast data directory" in result.stderr


def test_a_hand_over_needs_somebody(tmp_path: Path) -> None:
    with pair(tmp_path, names="a") as (only,):
        result = cluster("handover", "--data", only.data)
        assert result.returncode == 2
        assert "no standby would take over from a: start one first" in result.stderr
        assert only.serves()


def test_a_directory_that_is_not_shared(tmp_path: Path, start_holdfast: Any) -> None:
    broker = start_holdfast()
    result = cluster("status", "--data", broker.data)
    assert result.returncode == 2
    assert "is not shared: start its nodes with --standby" in result.stderr

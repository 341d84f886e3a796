"""`holdfast cluster local`: a whole cluster as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.brokers import SOURCE
from tests.e2e.cluster_processes import until
from tests.e2e.wire import Wire

READY_S = 90.0
PARTITIONS = 12


class Local:
    """A running `cluster local`, with what it said about its nodes."""

    def __init__(self, directory: Path, *options: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.temporary = directory / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._errors = directory / "errors"
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [
                    *[sys.executable, "-m", "holdfast.cli.main", "cluster", "local", "--json"],
                    *map(str, options),
                ],
                env=os.environ
                | {
                    "PYTHONPATH": str(SOURCE),
                    "TMPDIR": str(self.temporary),
                    "HOLDFAST_CLUSTER__PARTITIONS": str(PARTITIONS),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.nodes: list[dict[str, Any]] = []

    def read_nodes(self, count: int) -> None:
        assert self.process.stdout is not None
        # A line does not come if it fails to start, and then the pipe ends.
        timer = threading.Timer(READY_S, self.process.kill)
        timer.start()
        lines = [self.process.stdout.readline() for _ in range(count)]
        timer.cancel()
        assert all(lines), self.errors()
        self.nodes = [json.loads(line) for line in lines]

    def errors(self) -> str:
        return self._errors.read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        # Nothing was printed but the nodes.
        assert self.process.stdout.read() == ""
        return code


@contextmanager
def local(directory: Path, count: int, *options: object) -> Iterator[Local]:
    cluster = Local(directory, *options)
    try:
        cluster.read_nodes(count)
        yield cluster
    finally:
        # Its nodes end with it.
        cluster.process.kill()
        cluster.process.wait()
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()
        until(lambda: not any(runs(node["pid"]) for node in cluster.nodes), "no node runs")


def runs(pid: int) -> bool:
    """Not merely unburied."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "cluster", *map(str, arguments)],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_nodes_are_in_zones_by_turns(tmp_path: Path) -> None:
    with local(tmp_path, 3, "--zones", 2) as cluster:
        admin = f"127.0.0.1:{cluster.nodes[0]['admin']}"

        def zones() -> list[str]:
            nodes = json.loads(command("status", "--json", "--admin", admin).stdout)["nodes"]
            return [each["zone"] for each in nodes]

        until(lambda: zones() == ["zone-1", "zone-2", "zone-1"], "the zones are agreed")


def test_a_cluster_to_try(tmp_path: Path) -> None:
    with local(tmp_path, 3) as cluster:
        assert [set(node) for node in cluster.nodes] == [{"node", "port", "admin", "pid"}] * 3
        assert [node["node"] for node in cluster.nodes] == ["n1", "n2", "n3"]
        assert all(runs(node["pid"]) for node in cluster.nodes)
        first, second, third = cluster.nodes
        result = command("status", "--admin", f"127.0.0.1:{second['admin']}")
        assert result.stdout.splitlines()[0] == (
            f"healthy: 3 nodes, {PARTITIONS} partitions, all with 3 in sync"
        )
        assert (result.returncode, result.stderr) == (0, "")
        with Wire(third["port"]) as receiver, Wire(first["port"]) as sender:
            receiver.connect("receiver", clean=False, expiry_s=600)
            assert receiver.subscribe(("greetings/#", 1)) == [1]
            sender.connect("sender")
            for number in range(20):
                assert sender.publish(f"greetings/{number}", b"hello", 1) == 0
            topics = [receiver.message().topic for _ in range(20)]
            assert sorted(topics) == sorted(f"greetings/{number}" for number in range(20))
        os.kill(second["pid"], signal.SIGKILL)
        until(lambda: "n2 (pid" in cluster.errors(), "the end of n2 is told")
        assert "was killed by SIGKILL, 2 nodes left; to start it again:" in cluster.errors()

        def is_degraded() -> bool:
            result = command("status", "--admin", f"127.0.0.1:{first['admin']}")
            text = result.stdout.splitlines()[0]
            return result.returncode == 1 and text.startswith("degraded: n2 is down")

        until(is_degraded, "n2 is found dead")
        assert cluster.stop() == 0
        assert not any(runs(node["pid"]) for node in cluster.nodes)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with local(tmp_path / "first", 2, "--nodes", 2, "--data", data) as cluster:
        before = cluster.nodes
        with Wire(before[0]["port"]) as wire:
            wire.connect("c")
            assert wire.publish("kept", b"1", 1, retain=True) == 0
        assert cluster.stop() == 0
    with local(tmp_path / "second", 2, "--data", data) as cluster:
        assert [(node["port"], node["admin"]) for node in cluster.nodes] == [
            (node["port"], node["admin"]) for node in before
        ]
        with Wire(cluster.nodes[1]["port"]) as wire:
            wire.connect("c")
            wire.subscribe(("kept", 1))
            assert wire.message().payload == b"1"
        again = Local(tmp_path / "again", "--data", data)
        assert again.process.wait(60) == 1
        assert "is taken: does it run already?" in again.errors()
        assert again.process.stdout is not None
        again.process.stdout.close()


def test_a_node_that_does_not_start(tmp_path: Path) -> None:
    """It is told why, and the others are ended."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "n2").write_text("no directory\n")
    cluster = Local(tmp_path, "--data", data)
    assert cluster.process.wait(60) == 1
    assert "holdfast: n2 ended with exit code 1:" in cluster.errors()
    assert cluster.process.stdout is not None
    with cluster.process.stdout:
        assert cluster.process.stdout.read() == ""

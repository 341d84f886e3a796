"""A node has on its disk, as the kernel sees it, all that it promised: strace looks at every call.

The rules: a PUBACK leaves after the sync of its record; a segment is synced before the next one
begins; a file is synced before it gets its name, and its folder afterwards.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.brokers import Broker, Holdfast
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.traced_calls import OPTIONS, SYNCS, Call, SyncRules, parse
from tests.e2e.wire import Wire

COUNT: Final = 150
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "log": {"segment_bytes": 1 << 16, "snapshot_bytes": 1 << 16}
}


def missing() -> str:
    """Why no process can be traced here; "" when one can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], capture_output=True)
    return "" if done.returncode == 0 else f"nothing can be traced: {done.stderr.decode().strip()}"


pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


def traced(command: list[str], directory: Path) -> list[str]:
    return ["strace", *OPTIONS, "-o", str(directory / "calls"), *command]


class TracedHoldfast(Holdfast):
    def command(self) -> list[str]:
        return traced(super().command(), self.directory)


class TracedNode(ClusterNode):
    def command(self) -> list[str]:
        return traced(super().command(), self.directory)


def token(number: int) -> bytes:
    return b"token-%d;" % number


def publish(port: int) -> dict[int, bytes]:
    """One message after the other, so packet ids are those of the wire client: 1, 2, ..."""
    with Wire(port, timeout_s=60.0) as writer:
        writer.connect("writer")
        for number in range(1, COUNT + 1):
            payload = token(number) + b"x" * 3000
            assert writer.publish(f"t/{number % 5}", payload, 1) < 0x80
    return {number: token(number) for number in range(1, COUNT + 1)}


def stop(node: Broker) -> list[Call]:
    """The calls of the node until its end."""
    assert node.process is not None
    end = f"{node.process.pid} +++ exited"
    assert node.stop() == 0
    calls = node.directory / "calls"
    until(lambda: any(line.startswith(end) for line in lines(calls)), "the tracer has ended")
    return list(parse(lines(calls)))


def lines(calls: Path) -> list[str]:
    return calls.read_text().splitlines()


def judge(calls: list[Call], tokens: dict[int, bytes]) -> SyncRules:
    rules = SyncRules(tokens)
    rules.see_all(calls)
    return rules


def without(calls: list[Call], is_planted: Callable[[Call], bool]) -> list[Call]:
    return [call for call in calls if not is_planted(call)]


def is_sync_of(call: Call, end: str) -> bool:
    return call.name in SYNCS and call.paths[0].endswith(end)


def test_one_node(tmp_path: Path) -> None:
    node = TracedHoldfast(tmp_path, SETTINGS)
    node.start()
    try:
        tokens = publish(node.port)
        calls = stop(node)
    finally:
        node.kill()
    rules = judge(calls, tokens)
    assert rules.broken == []
    assert rules.acknowledged == list(tokens)
    assert rules.rotated > 3
    assert rules.renamed > 1
    # The rules see what is missing.
    for end, words in (
        (".log", "before its record was synced"),
        (".log", "was not synced"),
        ("/journal", "its name is not synced"),
        ("/snapshots", "was never synced"),
        (".snap.tmp", "its content was not synced"),
    ):
        broken = judge(without(calls, lambda call: is_sync_of(call, end)), tokens).broken  # noqa: B023
        assert any(words in text for text in broken), (end, words, broken[:5])


def test_the_only_node_of_a_cluster(tmp_path: Path) -> None:
    """The files of Raft and the watermarks, too."""

    class Cluster(ClusterProcesses):
        node_class = TracedNode

    alone = {"cluster": {"partitions": 4, "replication_factor": 1, "min_insync": 1}}
    with Cluster(tmp_path, 1, SETTINGS | alone) as cluster:
        node = cluster.nodes["n1"]
        tokens = publish(node.port)
        calls = stop(node)
    rules = judge(calls, tokens)
    assert rules.broken == []
    assert rules.acknowledged == list(tokens)
    assert rules.rotated > 3
    assert any(call.paths[-1].endswith("/watermarks") for call in calls if "rename" in call.name)
    broken = judge(without(calls, lambda call: is_sync_of(call, ".log")), tokens).broken
    assert any("before its record was synced" in text for text in broken)

"""Nodes on one directory that are held up at every point of the lease and of the way of a message,
under load: what was acknowledged stays, once and in order.

`HOLDFAST_STALLS` (default 8): how many; `make stalls` waits for 200.
"""

import os
import random
import re
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast.log.batch import Batch
from holdfast.log.files.data_directory import read_manifest
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.epoch_folders import epoch_folders, read_epoch
from holdfast.log.reading.segment_reader import SegmentReader
from tests.e2e.chaos import Crowd, shake
from tests.e2e.chaos_clients import Publisher, Subscriber
from tests.e2e.chaos_parties import on_loopback
from tests.e2e.ledger import Interest, Ledger
from tests.e2e.ledger_checks import check
from tests.e2e.pair import Node
from tests.e2e.test_kill9 import describe
from tests.e2e.test_shared_storage import verify

STALLS = int(os.environ.get("HOLDFAST_STALLS", "8"))
PER_ROUND_S = 0.6
SETTINGS: dict[str, dict[str, Any]] = {
    "lease": {"timeout_s": 0.4, "heartbeat_s": 0.1, "kill_stale_holder": False},
    "log": {"segment_bytes": 1 << 16, "snapshot_bytes": 1 << 16, "partitions": 4},
    "log.retention": {"bytes": 1 << 20, "per_topic_last": 500},
}


class StallingNode(Node):
    def command(self) -> list[str]:
        command = super().command()
        command[command.index("holdfast.cli.main")] = "tests.support.stalling_node"
        return command

    def stalls(self) -> Counter[str]:
        return Counter(re.findall(r"stalled at='([^']+)'", self.log_text()))

    def fenced(self) -> int:
        """How often a holder saw before a promise or a beat that it is none."""
        return len(re.findall(r"lease_lost error='epoch", self.log_text()))


def crowd(ports: list[int], ledger: Ledger) -> Crowd:
    servers = on_loopback(*ports)

    def subscriber(name: str, version: int, *filters: tuple[str, int]) -> Subscriber:
        interests = [Interest(filter_, qos) for filter_, qos in filters]
        return Subscriber(name, servers, version, ledger, interests)

    def publisher(name: str, version: int, topics: list[str], qos: int) -> Publisher:
        return Publisher(name, servers, version, ledger, topics, qos)

    return Crowd(
        [
            publisher("p1", 4, ["load/one/a", "load/one/b", "shared/1"], 1),
            publisher("p2", 5, ["load/two/a", "shared/1"], 2),
            publisher("p3", 5, ["load/three/a"], 1),
            subscriber("exact-1", 5, ("load/one/a", 1), ("shared/1", 1)),
            subscriber("all-2", 4, ("#", 2)),
        ]
    )


def beyond_seals(data: Path) -> int:
    """Records that a deposed holder wrote and nobody ever looks at: behind a seal, or in a segment
    of which only its own folder has the name."""
    root = OsFileSystem(data)
    manifest = read_manifest(root, data)
    epochs = [read_epoch(root, number) for number in epoch_folders(root)]
    found = set()
    for old, new in pairwise([epoch for epoch in epochs if epoch is not None]):
        whole = DataDirectory(old.files(root), manifest)
        for sequence in whole.segments():
            began_later = sequence > max(new.sealed, default=-1)
            if not began_later and sequence not in new.sealed:
                continue
            reader = SegmentReader(whole, sequence)
            for item in reader.read(newest=True):
                if isinstance(item, Batch) and reader.position > new.sealed.get(sequence, 0):
                    found.add((item.epoch, item.partition, item.base_offset, item.count))
    return sum(count for *_, count in found)


@pytest.mark.timeout(120 + 4 * STALLS)
def test_stalls_under_load(tmp_path: Path) -> None:
    data = tmp_path / "data"
    nodes = [StallingNode(tmp_path / name, name, data, SETTINGS) for name in "abc"]
    ledger = Ledger()
    group = crowd([node.port for node in nodes], ledger)
    deadline = time.monotonic() + 60 + 3 * STALLS

    def stalls() -> int:
        return sum(sum(node.stalls().values()) for node in nodes)

    def hurt() -> None:
        for node in nodes:
            assert node.process is not None
            if node.process.poll() is not None:
                node.process = None
                node.start()

    try:
        for node in nodes:
            node.start()
        shake(group, 1, random.Random(1), hurt, drain_s=30)
        while stalls() < STALLS and time.monotonic() < deadline:
            seed = stalls()
            shake(group, 8, random.Random(seed), hurt, (PER_ROUND_S, PER_ROUND_S), drain_s=5)
        (tmp_path / "calm").touch()
        shake(group, 1, random.Random(2), hurt, drain_s=60)
    finally:
        group.close()
        for node in nodes:
            node.kill()
    by_label = sum((node.stalls() for node in nodes), Counter[str]())
    fenced = sum(node.fenced() for node in nodes)
    print(
        f"\n{len(ledger.acknowledged)} acknowledged, {sum(by_label.values())} stalls,"
        f" {len(epoch_folders(OsFileSystem(data)))} epochs claimed, fenced {fenced} times,"
        f" {beyond_seals(data)} records beyond seals\n{dict(by_label)}",
        file=sys.stderr,
    )
    assert sum(by_label.values()) >= STALLS
    assert len(ledger.acknowledged) > 20 * STALLS
    assert not check(ledger), describe(ledger)
    verify(data)
    for node in nodes:
        assert "Traceback" not in node.log_text(), node.log_text()[-6000:]

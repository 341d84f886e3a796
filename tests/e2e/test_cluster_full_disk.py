"""A node of a cluster whose disk is full: the others go on, and it comes back with space."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast.protocol.mqtt.reasons import QUOTA_EXCEEDED
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.wire import DISCONNECT, Wire

DISK_BYTES = 24 << 20
RESERVE_BYTES = 6 << 20
PAYLOAD_BYTES = 32 << 10
PATIENCE_S = 60.0
SETTINGS = {
    "cluster": {"partitions": 6, "min_insync": 2},
    "log": {"reserve_bytes": RESERVE_BYTES, "segment_bytes": 1 << 20},
}


@contextmanager
def with_small_disk(tmp_path: Path) -> Iterator[tuple[ClusterProcesses, Path]]:
    """A cluster of which n1 has a small disk."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mounted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    cluster = ClusterProcesses(tmp_path / "cluster", 3, SETTINGS)
    cluster.nodes["n1"].data = mounted / "data"
    try:
        with cluster:
            yield cluster, mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def take_space(file: Path, leave_bytes: int) -> None:
    """By somebody else, so that no more than this is left."""
    stat = os.statvfs(file.parent)
    wanted = stat.f_bavail * stat.f_frsize - leave_bytes
    with file.open("ab", buffering=0) as taken:
        while wanted > 0:
            try:
                wanted -= taken.write(bytes(min(wanted, 1 << 16)))
            except OSError:
                return


def free_bytes(disk: Path) -> int:
    stat = os.statvfs(disk)
    return stat.f_bavail * stat.f_frsize


def node(cluster: ClusterProcesses, name: str) -> dict[str, object]:
    """As n2 sees it."""
    (found,) = (each for each in cluster.status("n2")["nodes"] if each["node"] == name)
    assert isinstance(found, dict)
    return found


def is_out(cluster: ClusterProcesses) -> bool:
    found = node(cluster, "n1")
    return found["state"] == "down" and found["in_sync"] == 0 and found["disk_full"] is True


def publish_all(writer: Wire, first: int, count: int) -> None:
    for number in range(first, first + count):
        payload = b"%08d" % number + bytes(PAYLOAD_BYTES)
        assert writer.publish(f"t/{number % 12}", payload, 1) == 0


def is_taken(writer: Wire, number: int) -> bool:
    """Published again until it is: a leader that has noticed its full disk refuses it, until
    another node leads."""
    payload = b"%08d" % number + bytes(PAYLOAD_BYTES)
    return writer.publish(f"t/{number % 12}", payload, 1) != QUOTA_EXCEEDED


def numbers(reader: Wire, count: int) -> set[int]:
    return {int(reader.message().payload[:8]) for _ in range(count)}


def test_the_others_go_on_and_it_comes_back(tmp_path: Path) -> None:
    with with_small_disk(tmp_path) as (cluster, disk):
        with (
            Wire(cluster.ports["n2"], timeout_s=PATIENCE_S) as writer,
            Wire(cluster.ports["n1"], timeout_s=PATIENCE_S) as guest,
            Wire(cluster.ports["n3"], timeout_s=PATIENCE_S) as reader,
        ):
            writer.connect("writer")
            guest.connect("guest", expiry_s=3600)
            guest.subscribe(("t/#", 1))
            reader.connect("reader", expiry_s=3600)
            reader.subscribe(("t/#", 1))
            publish_all(writer, 0, 20)
            assert numbers(reader, 20) == set(range(20))
            take_space(disk / "hog", RESERVE_BYTES // 2)
            until(lambda: is_out(cluster), "n1 has left all in-sync sets")
            assert json.loads(cluster.nodes["n1"].admin("/readyz")[1])["disk_full"] is True
            # More than it could ever store.
            publish_all(writer, 20, 2 * RESERVE_BYTES // PAYLOAD_BYTES)
            total = 20 + 2 * RESERVE_BYTES // PAYLOAD_BYTES
            assert numbers(reader, total - 20) == set(range(20, total))
            assert free_bytes(disk) > RESERVE_BYTES // 4, "it goes on storing"
            while guest.receive().kind != DISCONNECT:
                pass
        # Its client finds everything elsewhere.
        with Wire(cluster.ports["n2"], timeout_s=PATIENCE_S) as guest:
            assert guest.connect("guest", clean=False, expiry_s=3600).session_present
            seen: set[int] = set()
            while len(seen) < total:
                seen |= numbers(guest, 1)
        (disk / "hog").unlink()
        cluster.wait_healthy()
        assert cluster.nodes["n1"].process is not None


def test_a_node_starts_on_a_disk_without_a_free_byte(tmp_path: Path) -> None:
    with (
        with_small_disk(tmp_path) as (cluster, disk),
        Wire(cluster.ports["n2"], timeout_s=PATIENCE_S) as writer,
    ):
        writer.connect("writer")
        publish_all(writer, 0, 20)
        take_space(disk / "hog", 0)
        # Its writes may fail before it knows how little is left.
        for number in range(20, 40):
            until(partial(is_taken, writer, number), f"{number} is stored")
        until(lambda: is_out(cluster), "n1 has left all in-sync sets")
        until(lambda: cluster.status("n2")["metadata_leader"] in ("n2", "n3"), "another leader")
        cluster.kill9("n1")
        take_space(disk / "hog", 0)
        publish_all(writer, 40, 5)
        cluster.restart("n1")
        until(lambda: is_out(cluster), "n1 is there, and counts for nothing")
        publish_all(writer, 45, 5)
        (disk / "hog").unlink()
        cluster.wait_healthy()

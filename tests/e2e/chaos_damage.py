"""Faults of files: a disk that changes, cuts off or takes back what a minority of nodes had synced.

No acknowledged message may be lost, read twice or read with another content. The damaged node says
so in its log. It repairs itself from the others or refuses to start; then the harness does what its
message says: the node joins again with an empty directory. No other node sets data aside. Nothing
damaged is read from the damaged node, neither by a session nor from its log.
"""

import http.client
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.record import MESSAGE
from tests.e2e.chaos_faults import Fault, Scene, kill_nodes
from tests.e2e.cluster_processes import ClusterNode
from tests.e2e.paho_clients import payload_of
from tests.support.waiting import patience

FILES: Final = {
    "segment": "journal/*.log",
    "index": "journal/*.idx",
    "snapshot": "snapshots/*.snap",
    "watermarks": "watermarks",
    "raft": "raft/*",
    "manifest": "manifest.json",
}
"""The kinds of files in a data directory, but `access.json`, which the operator needs."""
CACHES: Final = ("index", "snapshot")
"""Files that a node without others can do without."""
TAIL_BYTES: Final = 4096
REPAIR_S: Final = 120.0
SAID: Final = (
    "journal_damaged",
    "journal_tail_truncated",
    "partitions_damaged",
    "snapshot_unreadable",
    "raft_log_torn",
    " is damaged",
    " is missing",
    "not understood",
    "older_copy",
    "manifest.json",
)
"""The words of which one is in the log of a node that has found damage."""
NO_PARTITION: Final = 400
READ_BYTES: Final = 64 << 20


def _end(data: bytes) -> int:
    """Segments are allocated in advance, so they end with zeros."""
    return len(data.rstrip(b"\0"))


def _place(rng: random.Random, end: int) -> int:
    """Draw a place as often in the last part of a file as anywhere in it."""
    return rng.randrange(max(0, end - TAIL_BYTES) if rng.random() < 0.5 else 0, end)


def flip(rng: random.Random, path: Path) -> str:
    """One bit, or some."""
    with path.open("r+b") as file:
        end = _end(file.read())
        if not end:
            return f"{path.name} is empty"
        places = sorted(_place(rng, end) for _ in range(rng.choice((1, 1, 1, 8))))
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes((byte ^ 1 << rng.randrange(8),)))
    return f"bits of {path.name} flipped at {places} of {end}"


def cut(rng: random.Random, path: Path) -> str:
    """Draw a few bytes as often as many."""
    end = _end(path.read_bytes())
    if not end:
        return f"{path.name} is empty"
    lost = math.ceil(math.exp(rng.uniform(0, math.log(end))))
    with path.open("r+b") as file:
        file.truncate(end - lost)
    return f"{path.name} of {end} bytes cut by {lost}"


@dataclass
class _Chunk:
    """Bytes that a file had earlier; beyond its former end, zeros."""

    path: Path
    position: int
    data: bytes

    @classmethod
    def of(cls, rng: random.Random, path: Path) -> "_Chunk":
        data = path.read_bytes()
        position = _place(rng, _end(data) + 1)
        length = math.ceil(math.exp(rng.uniform(0, math.log(1 << 16))))
        return cls(path, position, data[position : position + length].ljust(length, b"\0"))

    def put_back(self) -> str:
        if not self.path.exists():
            return f"{self.path.name} is gone"
        with self.path.open("r+b") as file:
            length = min(len(self.data), max(0, _end(file.read()) - self.position))
            file.seek(self.position)
            file.write(self.data[:length])
        return f"{length} former bytes of {self.path.name} put back at {self.position}"


def _choose(scene: Scene, node: ClusterNode, kinds: tuple[str, ...]) -> Path | None:
    """A file of one of these kinds, each kind as often as the others; None while there is none."""
    found = {kind: sorted(node.data.glob(FILES[kind])) for kind in kinds}
    chosen = [[path for path in files if path.suffix != ".tmp"] for files in found.values()]
    chosen = [files for files in chosen if files]
    return scene.rng.choice(scene.rng.choice(chosen)) if chosen else None


def _minority(scene: Scene) -> list[str]:
    """Or the only node."""
    return scene.rng.sample(scene.storing, max(1, (len(scene.storing) - 1) // 2))


def _kill_some(scene: Scene, damaged: list[str]) -> list[str]:
    """The damaged nodes, and as often all: then nobody remembers what was on a disk."""
    names = list(scene.nodes) if scene.rng.random() < 0.5 else damaged
    scene.notes.append(f"kill -9 {names}")
    kill_nodes(scene, *names)
    return names


Hurt = Callable[[random.Random, Path], str]


def _hurt(scene: Scene, damaged: list[str], hurt: Hurt, kinds: tuple[str, ...]) -> None:
    for name in damaged:
        path = _choose(scene, scene.hit(name), kinds)
        scene.notes.append(f"{name}: {hurt(scene.rng, path) if path else 'no such file yet'}")


def _damage(hurt: Hurt, kinds: tuple[str, ...]) -> Fault:
    def fault(scene: Scene) -> Iterator[float]:
        damaged = _minority(scene)
        before = log_ends(scene)
        # What is replaced every second is whole again after a second.
        is_served = scene.rng.random() < 0.5
        if is_served:
            _hurt(scene, damaged, hurt, kinds)
            yield scene.hold_s()
        killed = _kill_some(scene, damaged)
        if not is_served:
            _hurt(scene, damaged, hurt, kinds)
        yield scene.hold_s() / 3
        yield from come_back(scene, killed, damaged, before)

    return fault


def put_back_chunk(scene: Scene) -> Iterator[float]:
    """Bytes of a file are again what they were seconds ago, as after writes that a disk lost."""
    damaged = _minority(scene)
    before = log_ends(scene)
    kinds = tuple(kind for kind in FILES if kind != "manifest")
    chunks = [
        (name, _Chunk.of(scene.rng, path))
        for name in damaged
        for path in (_choose(scene, scene.hit(name), kinds) for _ in range(3))
        if path is not None
    ]
    yield scene.hold_s()
    killed = _kill_some(scene, damaged)
    for name, chunk in chunks:
        scene.notes.append(f"{name}: {chunk.put_back()}")
    yield scene.hold_s() / 3
    yield from come_back(scene, killed, damaged, before)


def damage_next_metadata_leader(scene: Scene) -> Iterator[float]:
    """The metadata of a node are damaged, and it is one of those that elect the next leader of
    them. A leader never deletes data because its own metadata do not know them."""
    leader = scene.site.metadata_leader() or scene.any_node()
    damaged = [scene.any_node(leader)]
    before = log_ends(scene)
    (name,) = damaged
    for path in sorted(scene.hit(name).data.glob(FILES["raft"])):
        if path.suffix != ".tmp":
            hurt = scene.rng.choice((flip, flip, cut))
            scene.notes.append(f"{name}: {hurt(scene.rng, path)}")
    yield scene.hold_s() / 3
    scene.notes.append(f"kill -9 {leader}")
    kill_nodes(scene, leader)
    # Now it may lead, with what it has in memory.
    yield scene.hold_s()
    kill_nodes(scene, name)
    yield from come_back(scene, [leader, name], damaged, before)


def log_ends(scene: Scene) -> dict[str, int]:
    return {name: len(node.log_text()) for name, node in scene.nodes.items()}


def come_back(
    scene: Scene, killed: list[str], damaged: list[str], before: dict[str, int]
) -> Iterator[float]:
    """Starts what was killed, and waits until the site is whole and the damaged nodes give nothing
    damaged away. Raises AssertionError."""

    def said(name: str) -> str:
        return scene.nodes[name].log_text()[before[name] :]

    for name in killed:
        scene.nodes[name].launch()
    for _ in patience(REPAIR_S, f"{damaged} cannot be read"):
        yield from _wait_repaired(scene, damaged, said)
        failed: list[str] = []
        for name in damaged:
            yield from _read_all(scene.nodes[name], len(scene.site.leaders()), failed)
        if not failed:
            break
        # Damage that only the read found, or a partition that moved meanwhile.
        scene.notes.append(f"{len(failed)} reads failed, first {failed[0]}")
        yield 1.0
    for name in scene.nodes:
        if name not in damaged:
            assert "begins_anew" not in said(name), f"{name} set its data aside"
    for name in damaged:
        words = [word for word in SAID if word in said(name)]
        repaired = " and began anew" if "begins_anew" in said(name) else ""
        scene.notes.append(f"{name} said {words}{repaired}")


def _wait_repaired(scene: Scene, damaged: list[str], said: Callable[[str], str]) -> Iterator[float]:
    began = time.monotonic()
    for _ in patience(REPAIR_S, f"{damaged} are not repaired"):
        if scene.site.whole_since(began):
            return
        for name in damaged:
            node = scene.nodes[name]
            if node.process is not None and node.process.poll() is not None:
                _replace_disk(scene, name, said(name))
                began = time.monotonic()
        yield 0.1


def _replace_disk(scene: Scene, name: str, said: str) -> None:
    """Do as an operator does with a node that refuses to start."""
    node = scene.nodes[name]
    lines = [line for line in said.splitlines()[-5:] if any(word in line for word in SAID)]
    assert lines, f"{name} ended without a word: {said[-2000:]}"
    assert len(scene.nodes) > 1, f"the only node refuses to start: {lines}"
    scene.notes.append(f"{name} refused: {lines[-1][-200:]}")
    node.process = None
    for path in node.data.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    node.launch()


def _read_all(node: ClusterNode, partitions: int, failed: list[str]) -> Iterator[float]:
    """Reads each partition, and adds the reads that failed. Raises AssertionError when one gives
    something damaged away."""
    wrong: list[str] = []

    def read() -> None:
        connection = http.client.HTTPConnection(node.host, node.admin_port, timeout=30)
        try:
            for partition in range(partitions):
                status, body = _read(connection, node, partition)
                if status == NO_PARTITION:
                    break
                if status != 200:
                    failed.append(f"{node.node_id}, partition {partition}: {status} {body[:200]!r}")
                else:
                    wrong.extend(f"{node.node_id}: {text}" for text in _wrong(body))
        except (OSError, http.client.HTTPException) as error:
            # It sets its data aside, and starts again.
            failed.append(f"{node.node_id}: {error!r}")
        finally:
            connection.close()

    thread = threading.Thread(target=read, name="reader of all")
    thread.start()
    while thread.is_alive():
        yield 0.05
    assert not wrong, wrong[:5]


def _read(
    connection: http.client.HTTPConnection, node: ClusterNode, partition: int
) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {node.token}"} if node.token else {}
    path = f"/api/v1/log/{partition}?start=0&bytes={READ_BYTES}"
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def _wrong(body: bytes) -> list[str]:
    """Batches that fit no checksum, messages of Paho publishers with another content."""
    found: list[str] = []
    at = 0
    while at < len(body):
        try:
            batch = Batch(body, at)
        except CorruptBatch as error:
            return [*found, f"a damaged batch was sent: {error}"]
        for record in batch.records():
            if record.kind == MESSAGE and record.topic.startswith(b"paho/"):
                publisher, number, _ = record.payload.split(b" ", 2)
                if record.payload != payload_of(publisher.decode(), int(number)):
                    found.append(f"{record.topic!r} {record.offset}: another content")
        at += batch.length
    return found


ALL: Final = tuple(FILES)
OF_ONE_NODE: Final[dict[str, Fault]] = {"damaged caches": _damage(flip, CACHES)}
OF_A_CLUSTER: Final[dict[str, Fault]] = {
    "bit flips": _damage(flip, ALL),
    "cut files": _damage(cut, ALL),
    "former bytes": put_back_chunk,
    "damaged metadata": damage_next_metadata_leader,
}

"""Backups of real processes under load: what is restored is a prefix of what was acknowledged."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from holdfast.cli.main import main
from holdfast.testing import Broker
from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.support.kept_data import begin, check, finish
from tests.support.kept_nodes import shared

SETTINGS = {"log": {"segment_bytes": 1 << 16, "snapshot_bytes": 1 << 16, "partitions": 4}}
PAYLOAD = b"x" * 400
START_S = 60.0


class Publisher:
    """Publishes numbers at QoS 1, and keeps the times of their acknowledgements."""

    def __init__(self, port: int, topic: str = "load/a") -> None:
        self.topic = topic
        self.begun: list[float] = []
        self.acknowledged: list[float] = []
        self._stop = threading.Event()
        self._wire = wire.Wire(port, timeout_s=30)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._wire.connect(f"load-{self.topic}")
        try:
            while not self._stop.is_set():
                self.begun.append(time.time())
                number = len(self.acknowledged)
                reason = self._wire.publish(self.topic, b"%d " % number + PAYLOAD, 1)
                assert reason in (0, 0x10)
                self.acknowledged.append(time.time())
        except (wire.Closed, OSError):
            pass  # killed

    def __enter__(self) -> "Publisher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._wire.socket.close()

    def wait(self, count: int) -> None:
        until(lambda: len(self.acknowledged) >= count, f"{count} are acknowledged")

    def check_prefix(self, found: list[int], first: float, last: float) -> None:
        """Everything acknowledged before the first moment, and nothing begun after the last."""
        assert found == list(range(len(found)))
        assert len(found) >= sum(at < first for at in self.acknowledged)
        assert len(found) <= sum(at <= last for at in self.begun)


def subscribe(port: int, *topics: str) -> None:
    with wire.Wire(port) as client:
        client.connect("ledger", expiry_s=3600)
        client.subscribe(*((topic, 1) for topic in topics))
        client.disconnect()


def ledger(port: int, *topics: str) -> dict[str, list[int]]:
    """The numbers that a session receives which was away."""
    found: dict[str, list[int]] = {topic: [] for topic in topics}
    with wire.Wire(port) as client:
        assert client.connect("ledger", clean=False, expiry_s=3600).session_present
        client.send(wire.publish("end", b"", 0))
        client.subscribe(("end", 0))
        client.ping()
        while True:
            try:
                message = client.message(timeout_s=1.0)
            except TimeoutError:
                return found
            found[message.topic].append(int(message.payload.split()[0]))


@contextmanager
def served(directory: Path, data: Path) -> Iterator[int]:
    directory.mkdir()
    broker = Holdfast(directory, SETTINGS, data)
    broker.start()
    try:
        yield broker.port
    finally:
        broker.kill()
    assert "journal_damaged" not in broker.log_text()


def text(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()


def test_a_backup_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = Holdfast(tmp_path, SETTINGS)
    node.start()
    backup, early = tmp_path / "backup", tmp_path / "early"
    try:
        begin(node.port)
        finish(node.port)
        subscribe(node.port, "load/a")
        with Publisher(node.port) as publisher:
            until(lambda: len(node.segments()) > 3, "several segments")
            cut = time.time()
            publisher.wait(len(publisher.acknowledged) + 100)
            before = time.time()
            assert main(["backup", str(node.data), str(backup)]) == 0
            after = time.time()
            publisher.wait(len(publisher.acknowledged) + 100)
            node.kill()
    finally:
        node.kill()
    assert " linked, " in capsys.readouterr().out
    assert main(["restore", str(backup), str(tmp_path / "whole")]) == 0
    assert main(["restore", str(backup), str(early), "--until", text(cut)]) == 0
    assert "records left out" in capsys.readouterr().out
    shutil.rmtree(node.data)
    with served(tmp_path / "one", tmp_path / "whole") as port:
        check(port)
        [found] = ledger(port, "load/a").values()
        publisher.check_prefix(found, before, after)
        with Publisher(port, "load/b") as more:
            more.wait(10)
    with served(tmp_path / "two", early) as port:
        check(port)
        [found] = ledger(port, "load/a").values()
        publisher.check_prefix(found, cut, cut)
    # The restored brokers have written, and the backup is as it was.
    assert main(["restore", str(backup), str(tmp_path / "again")]) == 0


@pytest.mark.long
@pytest.mark.parametrize("count", [3, 5])
def test_a_cluster_at_one_moment(tmp_path: Path, count: int) -> None:
    """Each of five nodes has three fifths of the log."""
    settings = SETTINGS | {"cluster": {"partitions": 4, "min_insync": 2}}
    topics = ("load/a", "load/b")
    with ClusterProcesses(tmp_path / "first", count, settings) as cluster:
        first = cluster.nodes["n1"]
        begin(first.port)
        finish(first.port)
        subscribe(first.port, *topics)
        with (
            Publisher(first.port, topics[0]) as one,
            Publisher(cluster.nodes["n2"].port, topics[1]) as two,
        ):
            for each in (one, two):
                each.wait(100)
            moment = time.time()
            for name, node in cluster.nodes.items():
                one.wait(len(one.acknowledged) + 30)
                assert main(["backup", str(node.data), str(tmp_path / name)]) == 0
            cluster.kill9(*cluster.nodes)
        for name, node in cluster.nodes.items():
            shutil.rmtree(node.data)
            arguments = [str(tmp_path / name), str(node.data), "--until", text(moment)]
            assert main(["restore", *arguments]) == 0
        cluster.restart(*cluster.nodes)
        cluster.wait_healthy()
        check(cluster.nodes["n3"].port)
        found = ledger(cluster.nodes["n2"].port, *topics)
        one.check_prefix(found["load/a"], moment, moment)
        two.check_prefix(found["load/b"], moment, moment)


@pytest.mark.long
def test_a_pair(tmp_path: Path) -> None:
    with shared(tmp_path / "first", tmp_path / "data") as node:
        begin(node.port)
        assert node.stop() == 0
    with shared(tmp_path / "second", tmp_path / "data") as node:
        finish(node.port)
        subscribe(node.port, "later")
        with Publisher(node.port, "later") as publisher:
            publisher.wait(50)
            moment = time.time()
            publisher.wait(100)
        assert main(["backup", str(tmp_path / "data"), str(tmp_path / "backup")]) == 0
    arguments = ["restore", str(tmp_path / "backup"), str(tmp_path / "restored")]
    assert main([*arguments, "--until", text(moment)]) == 0
    with shared(tmp_path / "third", tmp_path / "restored") as node:
        check(node.port)
        publisher.check_prefix(ledger(node.port, "later")["later"], moment, moment)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="one file system")
def test_another_file_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Broker(data=tmp_path / "data") as broker, TemporaryDirectory(dir="/dev/shm") as other:
        begin(broker.port)
        broker.stop()
        broker.start()
        finish(broker.port)
        broker.kill()
        assert main(["backup", str(broker.data), f"{other}/backup"]) == 0
        assert "no hard links here" in capsys.readouterr().out
        assert main(["restore", f"{other}/backup", str(tmp_path / "restored")]) == 0
        with Broker(data=tmp_path / "restored") as restored:
            check(restored.port)


def test_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Broker(data=tmp_path / "data") as broker:
        begin(broker.port)
    arguments = ["restore", str(tmp_path / "backup"), str(tmp_path / "restored")]
    assert main(["backup", str(tmp_path / "data"), str(tmp_path / "backup")]) == 0
    segment = tmp_path / "backup" / "journal" / f"{0:020d}.log"
    data = bytearray(segment.read_bytes())
    data[60] ^= 1
    segment.write_bytes(data)
    assert main(arguments) == 1
    assert f"is damaged: {segment.name} at 0" in capsys.readouterr().err
    os.truncate(segment, 100)
    assert main(arguments) == 1
    assert f"{segment} has 100 bytes, backup.json says {len(data)}" in capsys.readouterr().err
    segment.unlink()
    assert main(arguments) == 1
    assert "the backup is incomplete" in capsys.readouterr().err
    (tmp_path / "backup" / "backup.json").unlink()
    assert main(arguments) == 1
    assert "is no backup, or an incomplete one" in capsys.readouterr().err
    (tmp_path / "backup" / "lake.json").touch()
    assert main(arguments) == 1
    assert "is a lake: holdfast restore --from-lake" in capsys.readouterr().err
    assert not (tmp_path / "restored").exists()
    assert main(["backup", str(tmp_path / "data"), str(tmp_path / "backup")]) == 1
    assert "is not empty" in capsys.readouterr().err

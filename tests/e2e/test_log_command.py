"""`holdfast log` as a process of its own, on directories that are served, damaged or growing."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.log.batch import Batch
from holdfast.log.files.data_directory import create_or_open
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.recovery import open_journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.partition import partition_of
from holdfast.log.record import MESSAGE, Record
from holdfast.log.snapshot import SnapshotEncoder

SOURCE = Path(__file__).parents[2] / "src"
PARTITIONS = 4
ARRIVAL_TIMEOUT_S = 20.0
TIME_US = 1_790_000_000_000_000


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli.main", "log", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Serving:
    """The disk's side of a node: it holds the lock, writes groups, rolls segments, removes old
    ones. Opening it again after `crash` is what a restart does."""

    def __init__(self, path: Path, segment_bytes: int = 2000) -> None:
        self.path = path
        self.directory, self.lock = create_or_open(path, "n1", PARTITIONS, "2026-01-01T00:00:00Z")
        self.opened = open_journal(self.directory, segment_bytes)
        self.journal = self.opened.journal
        self.writer = GroupWriter(self.directory, durable=True)
        self.published: list[tuple[int, int, str]] = []
        """(partition, offset, payload) in journal order."""

    def publish(self, topic: str, *payloads: str) -> None:
        """One group: one batch."""
        group = self.take(topic, *payloads)
        self.writer.write(group)
        if group.sealed is not None:
            index = group.sealed.index
            assert isinstance(index, ActiveIndex)
            self.directory.write_index(group.sealed.sequence, index.encode())

    def take(self, topic: str, *payloads: str) -> WriteGroup:
        """The group, for a test that writes it in its own way."""
        partition = partition_of(topic.encode(), PARTITIONS)
        for payload in payloads:
            offset = self.journal.append(
                Record(
                    partition,
                    MESSAGE,
                    flags=1,
                    timestamp_us=TIME_US,
                    topic=topic.encode(),
                    client_id=b"client",
                    payload=payload.encode(),
                )
            )
            self.published.append((partition, offset, payload))
        group = self.journal.close_write_group()
        assert group is not None
        return group

    def newest_segment(self) -> Path:
        return self.segments()[-1]

    def segments(self) -> list[Path]:
        return sorted((self.path / "journal").glob("*.log"))

    def remove_oldest(self, count: int) -> None:
        """Retention, with the snapshot that it needs."""
        first = self.journal.segments[count]
        encoder = SnapshotEncoder(first.sequence, first.start_offsets(), TIME_US)
        self.directory.replace_file(f"snapshots/{first.sequence:020d}.snap", encoder.finish())
        removed = self.journal.remove_oldest(count)
        self.directory.write_start(first.sequence, first.start_offsets())
        for segment in removed:
            self.directory.remove_segment(segment.sequence)

    def stop(self) -> None:
        self.writer.close()
        self.lock.release()


@contextmanager
def serving(path: Path, segment_bytes: int = 2000) -> Iterator[Serving]:
    node = Serving(path, segment_bytes)
    try:
        yield node
    finally:
        node.stop()


class Following:
    """A running `tail -f`; its lines arrive in a queue."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            command("tail", "-f", "--json", *arguments),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def next(self, count: int) -> list[tuple[int, int, str]]:
        """The next records, however long they take."""
        records = [json.loads(self.lines.get(timeout=ARRIVAL_TIMEOUT_S)) for _ in range(count)]
        return [(each["partition"], each["offset"], each["payload"]) for each in records]

    def stop(self) -> tuple[int, str]:
        """Exit code and standard error after an interrupt."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(ARRIVAL_TIMEOUT_S)
        self.reader.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        errors = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return code, errors


@contextmanager
def following(*arguments: object) -> Iterator[Following]:
    tail = Following(*arguments)
    try:
        yield tail
    finally:
        if tail.process.poll() is None:
            tail.stop()


def test_tail_follows_over_segments_and_retention(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as node:
        node.publish("a", "before 1", "before 2", "before 3")
        with following("-n", "2", node.path) as tail:
            assert tail.next(2) == node.published[1:3]
            for number in range(60):
                node.publish(f"topic/{number % 7}", f"{number} first", f"{number} second")
            assert len(node.segments()) > 4
            assert tail.next(120) == node.published[3:]
            node.remove_oldest(len(node.segments()) - 2)
            for number in range(20):
                node.publish("after", str(number))
            assert tail.next(20) == node.published[123:]
            code, errors = tail.stop()
            assert (code, errors) == (130, "")
            assert tail.lines.empty()


def test_tail_begins_in_an_empty_journal(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as node, following(node.path) as tail:
        node.publish("a", "first")
        assert tail.next(1) == node.published


def test_tail_waits_for_a_write_to_finish(tmp_path: Path) -> None:
    """Neither half a batch nor one that the broker takes back is shown or called damage."""
    with serving(tmp_path / "data", segment_bytes=100_000) as node:
        node.publish("a", "1")
        with following(node.path) as tail:
            assert tail.next(1) == node.published
            segment = os.open(node.newest_segment(), os.O_RDWR)
            try:
                # A group that finds the disk full: half of it is there, then none, then all.
                group = node.take("a", "2", "x" * 5000)
                data = b"".join(group.data)
                os.pwrite(segment, data[:3000], group.position)
                os.ftruncate(segment, group.position)
                os.pwrite(segment, data, group.position)
                assert tail.next(2) == node.published[1:]
                # One that arrives in pieces, however long that takes.
                group = node.take("a", "3", "y" * 5000)
                data = b"".join(group.data)
                for start in range(0, len(data), 500):
                    os.pwrite(segment, data[start : start + 500], group.position + start)
                assert tail.next(2) == node.published[3:]
            finally:
                os.close(segment)
            code, errors = tail.stop()
            assert (code, errors) == (130, "")


def test_tail_tells_and_passes_damage(tmp_path: Path) -> None:
    with serving(tmp_path / "data", segment_bytes=100_000) as node:
        node.publish("a", "1")
        with following(node.path) as tail:
            assert tail.next(1) == node.published
            damaged = node.take("a", "2")
            later = node.take("a", "3")
            data = bytearray(damaged.data[0])
            data[60] ^= 1
            path = node.newest_segment()
            with path.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), bytes(data) + later.data[0], damaged.position)
            assert tail.next(1) == node.published[2:]
            code, errors = tail.stop()
            assert code == 130
            expected = f"{path.name} at {damaged.position}: {len(data)} bytes of damage: checksum"
            assert errors.startswith(f"holdfast: {expected}")


def test_tail_selects(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "data") as node,
        following("--topic", "wanted/+", node.path) as tail,
    ):
        for number in range(30):
            node.publish("other", str(number))
        node.publish("wanted/1", "yes")
        assert tail.next(1) == node.published[-1:]


def test_a_live_directory_is_never_called_damaged(tmp_path: Path) -> None:
    """Verified while it is written, rolled and shortened as fast as this machine can."""
    stop = threading.Event()
    failures: list[BaseException] = []
    with serving(tmp_path / "data", segment_bytes=20_000) as node:
        node.publish("a", "first")

        def write() -> None:
            number = 0
            try:
                while not stop.is_set():
                    number += 1
                    node.publish(f"topic/{number % 50}", *["x" * (number % 300)] * (number % 9 + 1))
                    if len(node.journal.segments) > 12:
                        node.remove_oldest(6)
                    node.published.clear()
            except BaseException as error:
                failures.append(error)
                raise

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for arguments in (["verify"], ["inspect", "--json"], ["dump", "--json"]) * 3:
                result = run(*arguments, node.path)
                assert (result.returncode, result.stderr) == (0, ""), result.stdout[-2000:]
                if arguments[0] == "verify":
                    assert "no damage in " in result.stdout
                elif arguments[0] == "inspect":
                    assert json.loads(result.stdout)["problems"] == []
                else:
                    check_order(result.stdout)
        finally:
            stop.set()
            writer.join()
        assert failures == []
        assert node.journal.segments[0].sequence > 0


def check_order(output: str) -> None:
    """Offsets of every partition go up; only where retention took a segment away while dump ran
    may some be missing."""
    last: dict[int, int] = {}
    for line in output.splitlines():
        record = json.loads(line)
        assert record["offset"] > last.get(record["partition"], -1)
        last[record["partition"]] = record["offset"]
    assert last


@pytest.fixture
def stopped(tmp_path: Path) -> Serving:
    with serving(tmp_path / "data") as node:
        for number in range(40):
            node.publish(f"topic/{number % 5}", f"{number} first", f"{number} second")
    return node


def test_damage_before_and_after_a_restart(stopped: Serving) -> None:
    """Recovery copies it to quarantine and goes on; it stays visible as missing offsets."""
    segment = stopped.segments()[1]
    data = bytearray(segment.read_bytes())
    length = Batch(bytes(data)).length
    data[length + 60] ^= 1
    segment.write_bytes(data)
    segment.with_suffix(".idx").unlink()
    verified = run("verify", stopped.path)
    assert verified.returncode == 1
    assert f"damage  {segment.name} at {length}: " in verified.stdout
    before = run("inspect", "--json", stopped.path)

    with serving(stopped.path) as node:
        node.publish("topic/0", "after the restart")
        inspected = json.loads(run("inspect", "--json", node.path).stdout)
        shown = run("inspect", node.path).stdout
        verified = run("verify", node.path)
    assert inspected["quarantine"] == [f"{segment.stem}-{length}.bad"]
    missing = [line for line in inspected["problems"] if "are missing" in line]
    assert len(missing) == 1
    assert missing[0].startswith(f"{segment.name}: offsets ")
    assert "2 records missing" in shown
    assert f"quarantine\n  {segment.stem}-{length}.bad" in shown
    assert verified.returncode == 1
    assert "index" not in "".join(inspected["problems"])
    records = sum(each["records"] for each in json.loads(before.stdout)["segments"])
    assert sum(each["records"] for each in inspected["segments"]) == records + 1 == 79

    dumped = run("dump", "--json", stopped.path)
    assert dumped.returncode == 1
    assert len(dumped.stdout.splitlines()) == 79
    assert dumped.stderr.startswith(f"holdfast: {segment.name} at {length}: ")


def test_a_torn_tail_before_and_after_a_restart(stopped: Serving) -> None:
    segment = stopped.newest_segment()
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[:77])
    verified = run("verify", stopped.path)
    assert verified.returncode == 0
    assert "note " in verified.stdout
    assert len(run("dump", stopped.path).stdout.splitlines()) == 80
    with serving(stopped.path) as node:
        node.publish("topic/0", "after the restart")
        verified = run("verify", node.path)
        assert verified.stdout.startswith("no damage in 81 records")
        assert len(run("dump", node.path).stdout.splitlines()) == 81


def test_a_damaged_index_is_mended_by_a_restart(stopped: Serving) -> None:
    first, second = (path.with_suffix(".idx") for path in stopped.segments()[:2])
    first.write_bytes(first.read_bytes()[:-3])
    second.unlink()
    verified = run("verify", stopped.path)
    assert verified.returncode == 1
    assert f"damage  {first.name}: an index of " in verified.stdout
    assert f"note    {second.with_suffix('.log').name}: no index" in verified.stdout
    with serving(stopped.path):
        assert run("verify", stopped.path).returncode == 0


def test_a_reader_that_goes_away(stopped: Serving) -> None:
    with subprocess.Popen(
        command("dump", stopped.path), env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(ARRIVAL_TIMEOUT_S) in (0, 141)
        assert process.stderr.read() == ""


def test_nothing_is_changed(stopped: Serving) -> None:
    """Not a byte, not a time stamp."""

    def state() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in stopped.path.rglob("*")
        }

    before = state()
    for arguments in (["inspect"], ["verify"], ["dump"], ["tail"]):
        assert run(*arguments, stopped.path).returncode == 0
    assert state() == before

"""A directory that version 0.1 shared between the nodes of a pair, at its first takeover by this
version."""

import tarfile
from pathlib import Path

import pytest

from holdfast.io.conversion.adoption import adopt_epoch
from holdfast.io.conversion.source import Source
from holdfast.io.disk.mastership import Mastership
from holdfast.io.disk.process_identity import machine_identity
from holdfast.io.disk.standby import Standby
from holdfast.io.disk.storage import Storage
from holdfast.log.files.data_directory import open_to_read, read_manifest
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import BEFORE_ADOPTION, FORMAT_SHARED
from holdfast.log.journal.epoch_folders import EPOCHS, newest_epoch
from holdfast.node.config import NodeConfig
from holdfast.node.lease.directory import HolderInfo, LeaseDirectory
from holdfast.node.lease.standby_watch import NOBODY, LeaseTimes
from holdfast.node.lease.tenure import LeaseLost
from holdfast.node.state.replicated import ReplicatedState
from tests.support.format_samples import FOLDER
from tests.unit.io.conversion.test_adoption import Countdown, Killed

PARTITIONS = 4


class Process(Mastership):
    """A process on the directory, without its thread: the test takes each step."""

    def __init__(self, root: Path, node_id: str = "b") -> None:
        files = OsFileSystem(root)
        self.held: list[tuple[ReplicatedState, Storage]] = []
        super().__init__(
            files,
            root,
            Standby(files, root, 1 << 16, NodeConfig(node_id="a", partitions=PARTITIONS)),
            HolderInfo(node_id),
            LeaseTimes(timeout_s=60.0),  # also where a beat is late
            file_system="",
            kills_stale_holder=False,
            adopt=adopt_epoch,
            call_soon=lambda callback, *arguments: callback(*arguments),
            on_holding=lambda images, storage: self.held.append((images, storage)),
            on_failed=lambda error: None,
            on_handover=lambda: None,
        )

    def take_over(self) -> bool:
        return self._take_over(NOBODY)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return unpacked(tmp_path / "data")


def unpacked(target: Path) -> Path:
    with tarfile.open(FOLDER / "0.1.0" / "pair.tar.gz") as archive:
        archive.extractall(target, filter="data")
    return target


def lasting(root: Path) -> object:
    return Source(root, open_to_read(root)).carried().lasting()


def test_the_first_takeover_adopts_the_directory(data: Path) -> None:
    before = lasting(data)
    process = Process(data)
    assert process.take_over()
    ((images, storage),) = process.held
    images.check()
    manifest = storage.directory.manifest
    assert (manifest.node_id, manifest.is_replica) == ("a", True)
    assert storage.lacking() == []
    assert lasting(data) == before
    assert newest_epoch(OsFileSystem(data)).node_id == "b"
    process.forget_old_epochs()
    assert (data / BEFORE_ADOPTION / "journal").exists()
    assert len(list((data / EPOCHS).iterdir())) == 1
    process.stop()
    # The next takeover links what is there.
    second = Process(data, "c")
    assert second.take_over()
    second.forget_old_epochs()
    assert second.held[0][1].directory.manifest == manifest
    assert sorted(second.held[0][0].snapshot()) == sorted(images.snapshot())
    second.stop()


@pytest.mark.parametrize("parity", [0, 1])
def test_a_kill_at_each_change_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parity: int
) -> None:
    """The next process finds the old content or the new one, and the same state."""
    countdown, kills = Countdown(monkeypatch), parity
    while True:
        data = unpacked(tmp_path / f"{kills}")
        before, process = lasting(data), Process(data)
        countdown.left = kills + 1
        try:
            done = process.take_over()
        except Killed:
            done = False
            if process.renewal is not None:
                process.renewal.stop()
        countdown.stop()
        assert lasting(data) == before
        if done:
            break
        again = Process(data, "c")
        assert again.take_over()
        assert lasting(data) == before
        assert open_to_read(data).manifest.is_replica
        again.forget_old_epochs()
        again.stop()
        kills += 2
    process.stop()
    assert kills > 40


def test_older_versions_neither_run_beside_it_nor_start_after_it(data: Path) -> None:
    """Version 0.1 would take the adopted log for that of a single broker. It does not write the
    mark of this version, and an earlier process's mark is none of its own."""
    lease = LeaseDirectory(OsFileSystem(data))
    info = HolderInfo("old", machine=machine_identity(), pid=1, process_start=2)
    lock = lease.lock_node("old")
    assert lock is not None
    lease.mark_form(HolderInfo("old", machine=machine_identity(), pid=1, process_start=1))
    lease.write_node(info)
    process = Process(data)
    assert lease.nodes_without_form() == ["old"]
    assert not process.take_over()
    assert lease.newest_claimed() == newest_epoch(OsFileSystem(data)).number
    lease.mark_form(info)
    assert process.take_over()
    assert read_manifest(OsFileSystem(data), data).format == FORMAT_SHARED
    process.stop()
    lock.release()


def test_another_process_that_claims_meanwhile_wins(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adopted content never counts, and is removed. The old one stays until another does."""
    before, process = lasting(data), Process(data)

    def adopt_late(root: Path, old: object, number: int) -> object:
        made = adopt_epoch(root, old, number)  # type: ignore[arg-type]
        lease = LeaseDirectory(OsFileSystem(data))
        lease.announce_epoch(number + 1)
        return made

    monkeypatch.setattr(process, "_adopt", adopt_late)
    assert not process.take_over()
    assert not open_to_read(data).manifest.is_replica
    assert lasting(data) == before
    second = Process(data, "c")
    assert second.take_over()
    second.forget_old_epochs()
    assert len(list((data / EPOCHS).iterdir())) == 1
    assert lasting(data) == before
    second.stop()


def test_damage_is_passed(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Write as version 0.1 did, in a segment whose index is whole."""
    segment = min((data / newest_epoch(OsFileSystem(data)).folder / "journal").glob("*.log"))
    content = bytearray(segment.read_bytes())
    content[60] ^= 1
    segment.write_bytes(content)
    process = Process(data)
    assert process.take_over()
    assert "records_lost count=" in caplog.text
    assert process.held[0][1].lacking() == []
    process.stop()


def test_a_deposed_process_promises_nothing_of_raft(data: Path) -> None:
    """Its votes and entries are in its own folder, and the next holder has copied what it had."""
    first = Process(data)
    assert first.take_over()
    renewal = first.renewal
    assert renewal is not None
    renewal.confirm()
    second = Process(data, "c")
    assert second.take_over()
    with pytest.raises(LeaseLost):
        renewal.confirm()
    log = (data / first.held[0][1].directory.epoch.folder / "raft" / "log").read_bytes()
    copied = data / second.held[0][1].directory.epoch.folder / "raft" / "log"
    assert copied.read_bytes() == log
    assert copied.stat().st_nlink == 1
    renewal.stop()
    second.stop()

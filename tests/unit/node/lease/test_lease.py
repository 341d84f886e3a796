"""The judgements about a lease, one by one; tests of the whole are those of the simulator."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.io.disk.filesystem_type import file_system_type, objection
from holdfast.io.disk.process_identity import kill_if_same, machine_identity, process_start
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.journal.epoch_folders import CLAIMED_NAME
from holdfast.node.lease.claim import Claim, claim, require_newest
from holdfast.node.lease.directory import RELEASED, HolderInfo, LeaseDirectory, write_beat
from holdfast.node.lease.standby_watch import (
    EXPIRED,
    NOBODY,
    UNLOCKED,
    WAIT,
    HolderWatch,
    LeaseTimes,
    Sight,
)
from holdfast.node.lease.standby_watch import RELEASED as WAS_RELEASED
from holdfast.node.lease.tenure import LeaseLost, Tenure

TIMES = LeaseTimes(timeout_s=1.0, heartbeat_s=0.1, poll_s=0.02)
ALIVE = Sight(epoch=3, counts=True, counter=5, is_locked=True, is_released=False)


@pytest.fixture
def directory(tmp_path: Path) -> LeaseDirectory:
    root = OsFileSystem(tmp_path)
    root.make_folder("lease")
    root.open_write(CLAIMED_NAME, create=True).close()
    return LeaseDirectory(root)


def taken(directory: LeaseDirectory, node_id: str = "a") -> Claim:
    found = claim(directory, HolderInfo(node_id))
    assert found is not None
    return found


# Watch


def test_silence_is_counted_from_the_last_change() -> None:
    watch = HolderWatch(TIMES)
    assert watch.judge(ALIVE, 10.0, 10.0) == WAIT
    assert watch.judge(ALIVE, 11.0, 11.0) == WAIT
    assert watch.judge(replace(ALIVE, counter=6), 11.5, 11.5) == WAIT
    assert watch.judge(replace(ALIVE, counter=6), 12.5, 12.5) == WAIT
    assert watch.judge(replace(ALIVE, counter=6), 12.51, 12.51) == EXPIRED


def test_a_new_epoch_starts_the_count_anew() -> None:
    watch = HolderWatch(TIMES)
    watch.judge(ALIVE, 10.0, 10.0)
    assert watch.judge(replace(ALIVE, epoch=4), 11.5, 11.5) == WAIT
    assert watch.judge(replace(ALIVE, epoch=4), 12.6, 12.6) == EXPIRED


def test_a_counter_that_goes_back_is_a_change() -> None:
    """Whatever it means, somebody wrote it."""
    watch = HolderWatch(TIMES)
    watch.judge(ALIVE, 10.0, 10.0)
    assert watch.judge(replace(ALIVE, counter=1), 11.5, 11.5) == WAIT


def test_a_free_lock_counts_only_of_an_epoch_that_counts() -> None:
    """Between its file and its lock a claimant has none."""
    claiming = replace(ALIVE, counts=False, is_locked=False)
    watch = HolderWatch(TIMES)
    assert watch.judge(claiming, 10.0, 10.0) == WAIT
    assert watch.judge(replace(claiming, counts=True), 10.1, 10.1) == UNLOCKED


def test_nobody_and_released() -> None:
    assert HolderWatch(TIMES).judge(Sight(0, True, 0, True, False), 1.0, 1.0) == NOBODY
    assert HolderWatch(TIMES).judge(replace(ALIVE, is_released=True), 1.0, 1.0) == WAS_RELEASED


# Claim and fence


def test_one_of_several_claimants_gets_the_number(directory: LeaseDirectory) -> None:
    first = taken(directory, "a")
    assert first.epoch == 1
    assert directory.begin_claim(1, HolderInfo("b")) is None
    second = taken(directory, "b")
    assert second.epoch == 2
    assert directory.newest_claimed() == 2
    info = directory.read_claim(2)
    assert info is not None
    assert info.node_id == "b"


def test_a_number_begun_and_never_announced_is_not_used_again(directory: LeaseDirectory) -> None:
    directory.begin_claim(1, HolderInfo("a"))
    assert directory.newest_claimed() == 0
    assert taken(directory, "b").epoch == 2


def test_an_announcement_fences_every_older_holder(directory: LeaseDirectory) -> None:
    old = Tenure(directory, taken(directory).epoch, TIMES, 0.0)
    old.check(0.1)
    new = Tenure(directory, taken(directory, "b").epoch, TIMES, 0.0)
    with pytest.raises(LeaseLost, match="epoch 2 was claimed, ours is 1"):
        old.check(0.1)
    new.check(0.1)
    # Late, out of order: neither the number nor anybody's place changes.
    directory.announce_epoch(1)
    new.check(0.1)
    with pytest.raises(LeaseLost):
        require_newest(directory, 1)


def test_lost_once_is_lost_for_good(directory: LeaseDirectory) -> None:
    tenure = Tenure(directory, taken(directory).epoch, TIMES, 0.0)
    with pytest.raises(LeaseLost, match=r"not renewed for 1\.001 s"):
        tenure.check(1.001)
    tenure.renewed(1.0)
    with pytest.raises(LeaseLost):
        tenure.check(1.0)


def test_half_a_lease_without_renewal_stops_promises(directory: LeaseDirectory) -> None:
    tenure = Tenure(directory, taken(directory).epoch, TIMES, 0.0)
    assert tenure.may_promise(0.5)
    assert not tenure.may_promise(0.51)
    tenure.check(0.51)
    tenure.renewed(0.4)
    assert tenure.may_promise(0.9)
    # One that began earlier and took longer does not shorten it.
    tenure.renewed(0.2)
    assert tenure.may_promise(0.9)


def test_a_file_of_claims_that_is_gone_or_cut_stops_the_holder(
    directory: LeaseDirectory, tmp_path: Path
) -> None:
    tenure = Tenure(directory, taken(directory).epoch, TIMES, 0.0)
    path = tmp_path / CLAIMED_NAME
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(OSError):
        tenure.check(0.1)
    path.write_bytes(whole)
    tenure.check(0.1)
    path.write_bytes(b"")
    with pytest.raises(LeaseLost):
        tenure.check(0.1)


def test_beats_and_locks(directory: LeaseDirectory) -> None:
    mine = taken(directory)
    assert directory.read_beat(1).counter == 0
    beat = directory.create_beat(1)
    assert directory.read_beat(1).counter == 0
    write_beat(beat, 7, 0)
    assert directory.read_beat(1).counter == 7
    assert not directory.read_beat(1).is_released
    write_beat(beat, 8, RELEASED)
    assert directory.read_beat(1).is_released
    assert directory.is_locked(1)
    mine.lock.release()
    assert not directory.is_locked(1)
    assert directory.is_locked(99)


def test_nodes_that_run(directory: LeaseDirectory) -> None:
    first = directory.lock_node("a")
    assert first is not None
    directory.write_node(HolderInfo("a", role="holder"))
    assert directory.lock_node("a") is None
    second = directory.lock_node("b")
    assert second is not None
    directory.write_node(HolderInfo("b", role="standby"))
    assert [node.node_id for node in directory.nodes()] == ["a", "b"]
    first.release()
    assert [node.node_id for node in directory.nodes()] == ["b"]
    assert directory.lock_node("a") is not None


def test_a_wish_to_hand_over_is_for_one_epoch(directory: LeaseDirectory) -> None:
    assert not directory.handover_requested(4)
    directory.request_handover(4)
    assert directory.handover_requested(4)
    assert not directory.handover_requested(5)


def test_old_claims_are_forgotten_and_their_numbers_are_not(directory: LeaseDirectory) -> None:
    for name in "abc":
        directory.create_beat(taken(directory, name).epoch)
    directory.forget_before(3)
    assert directory.root.list("lease") == ["0000000003.beat", "0000000003.claim", "epochs"]
    assert directory.next_epoch() == 4


# Processes and mounts


def test_only_the_very_process_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        info = HolderInfo(
            "a",
            machine=machine_identity(),
            pid=process.pid,
            process_start=process_start(process.pid),
        )
        assert not kill_if_same(replace(info, machine="elsewhere"))
        assert not kill_if_same(replace(info, process_start=info.process_start - 1))
        assert not kill_if_same(replace(info, pid=0))
        assert process.poll() is None
        os.kill(process.pid, signal.SIGSTOP)
        assert kill_if_same(info)
        assert process.wait(30) == -signal.SIGKILL
        assert not kill_if_same(info)
    finally:
        process.kill()
        process.communicate()


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:35 / /srv/a\\040b rw - nfs4 server:/x rw,vers=4.1
41 22 0:36 / /srv rw - nfs server:/y rw,vers=3
42 22 0:37 / /srv/b rw - tmpfs tmpfs rw
43 22 0:38 / /srv/b rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/data", "ext4"),
        ("/srvx/data", "ext4"),
        ("/srv/data", "nfs"),
        ("/srv/a b/data", "nfs4"),
        ("/srv/b", "xfs"),
    ],
)
def test_the_mount_that_covers_a_path(path: str, kind: str) -> None:
    assert file_system_type(Path(path), MOUNTS) == kind


def test_which_file_systems_are_refused() -> None:
    assert "vers=4.1" in objection("nfs")
    assert objection("ext4") == objection("tmpfs") == objection("") == ""
    assert file_system_type(Path("/proc")) == "proc"

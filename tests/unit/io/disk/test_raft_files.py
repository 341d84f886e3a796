"""The metadata's Raft on disk: what was reported is there after any crash, damage is told."""

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.io.disk.journal_writer import DiskFullError
from holdfast.io.disk.raft_files import LOG, SNAPSHOT, DamagedRaft, RaftFiles, RaftWriter
from holdfast.log.files.filesystem import OsFileSystem, read_file
from holdfast.node.raft.log import EntryKind, LogEntry, Membership, RaftSnapshot, RaftState
from holdfast.node.raft.state import Write
from tests.sim.disk import Crash, SimDisk
from tests.support.sim_raft import carry_out

MEMBER = "n1.abc"


def entry(index: int, term: int = 1, data: bytes = b"change") -> LogEntry:
    return LogEntry(index, term, EntryKind.COMMAND, data * index)


def write(term: int, vote: str, commit: int, *entries: LogEntry, must_sync: bool = True) -> Write:
    return Write(term, vote, commit, entries, must_sync)


MEMBERS = LogEntry(1, 1, EntryKind.MEMBERS, Membership(("n1.abc", "n2.def"), ("n3.x",)).encode())
COMPACTED = replace(
    write(3, "n2.def", 4, entry(4, 3), entry(5, 3)),
    snapshot=RaftSnapshot(4, 3, Membership(("n1.abc",)), b"state" * 100),
    base_index=3,
    base_term=2,
)
WRITES = (
    write(1, MEMBER, 0, MEMBERS),
    write(1, MEMBER, 1, entry(2), entry(3)),
    write(1, MEMBER, 3, must_sync=False),
    write(2, "", 3),
    # Others have led since: what follows 2 is another.
    write(3, "n2.def", 2, entry(3, 2), entry(4, 3), entry(5, 3)),
    COMPACTED,
    write(3, "n2.def", 5, entry(6, 3)),
    replace(
        COMPACTED,
        snapshot=RaftSnapshot(9, 4, Membership(), b""),
        entries=(),
        base_index=9,
        base_term=4,
    ),
)


def states() -> list[RaftState]:
    """After each of WRITES, the empty one first."""
    found = [RaftState()]
    for each in WRITES:
        found.append(carry_out(found[-1], each))
    return found


def between() -> list[RaftState]:
    """After a crash between a new snapshot and the log that goes with it."""
    found = []
    for each, state in zip(WRITES, states(), strict=False):
        snapshot = each.snapshot
        if snapshot is not None and snapshot.index <= state.base_index + len(state.entries):
            found.append(replace(state, snapshot=snapshot))
        elif snapshot is not None:
            found.append(
                replace(
                    state,
                    snapshot=snapshot,
                    base_index=snapshot.index,
                    base_term=snapshot.term,
                    entries=[],
                )
            )
    return found


def opened(disk: SimDisk) -> RaftState:
    return RaftFiles(disk, MEMBER, is_new=False).state


def flip(disk: SimDisk, name: str, at: int) -> None:
    """One bit of a file."""
    byte = disk.open_read(name).read(at, 1)[0]
    disk.open_write(name, create=False).write(at, [bytes((byte ^ 0x40,))])


def test_what_was_written_is_read() -> None:
    disk = SimDisk()
    files = RaftFiles(disk, MEMBER, is_new=True)
    assert files.state == RaftState()
    for each, state in zip(WRITES, states()[1:], strict=True):
        files.write(each)
        assert opened(disk) == state
    files.close()


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    for count, each in enumerate(WRITES):
        files = RaftFiles(OsFileSystem(tmp_path), MEMBER, is_new=count == 0)
        assert files.state == states()[count]
        files.write(each)
        files.close()


@pytest.mark.parametrize("survival", ["none", "all", "torn", "sectors"])
def test_any_crash_leaves_what_was_reported(survival: str) -> None:
    """At every step of the disk: the state is that before the write at hand, or after it."""
    known = states()
    step = 0
    while True:
        step += 1
        disk = SimDisk()
        done = synced = -1
        disk.crash_at = step
        try:
            files = RaftFiles(disk, MEMBER, is_new=True)
            done = synced = 0
            for each in WRITES:
                files.write(each)
                done += 1
                if each.must_sync:
                    synced = done
        except Crash:
            pass
        else:
            break
        after = disk.after_crash(survival, step)
        if synced < 0:
            continue
        found = opened(after)
        assert found in known[synced : done + 2] + between(), f"step {step}"
    assert step > 20


@pytest.mark.parametrize("survival", ["torn", "sectors"])
def test_a_power_cut_damages_nothing_that_was_not_synced(survival: str) -> None:
    """Several groups are in one sector of the file."""
    for seed in range(100):
        disk = SimDisk()
        files = RaftFiles(disk, MEMBER, is_new=True)
        for index in range(1, 9):
            files.write(write(1, "", 0, entry(index), must_sync=False))
        found = RaftFiles(disk.after_crash(survival, seed), MEMBER, is_new=False).state
        assert found.entries == [entry(index) for index in range(1, len(found.entries) + 1)]


def test_a_torn_end_is_cut_off_and_what_follows_is_kept() -> None:
    chance = random.Random(1)
    for _ in range(40):
        disk = SimDisk()
        files = RaftFiles(disk, MEMBER, is_new=True)
        files.write(WRITES[0])
        size = disk.open_read(LOG).size()
        files.write(WRITES[1])
        torn = chance.randrange(size, disk.open_read(LOG).size())
        disk.open_write(LOG, create=False).truncate(torn)
        again = RaftFiles(disk, MEMBER, is_new=False)
        assert again.state == states()[1]
        again.write(WRITES[1])
        assert opened(disk) == states()[2]


@pytest.mark.parametrize("missing", range(1, 20))
def test_a_group_whose_first_bytes_were_in_an_unwritten_sector_is_torn(missing: int) -> None:
    """The next sector has the rest, also the checksum."""
    filler = 0
    while True:
        disk = SimDisk()
        files = RaftFiles(disk, MEMBER, is_new=True)
        files.write(write(1, "", 0, entry(1), must_sync=False))
        files.write(
            write(1, "", 0, LogEntry(2, 1, EntryKind.COMMAND, b"x" * filler), must_sync=False)
        )
        at = disk.open_read(LOG).size()
        if -at % 512 == missing:
            break
        files.close()
        filler += 1
        assert filler < 600
    files.write(write(1, "", 0, entry(3), must_sync=False))
    disk.open_write(LOG, create=False).write(at, [bytes(missing)])
    found = RaftFiles(disk, MEMBER, is_new=False).state
    assert [each.index for each in found.entries] == [1, 2]


def test_a_damaged_middle_is_an_error_that_names_the_file() -> None:
    disk = SimDisk()
    files = RaftFiles(disk, MEMBER, is_new=True)
    for each in WRITES[:5]:
        files.write(each)
    last = read_file(disk, LOG).rfind(b"HFRG")
    for at in range(0, last, 3):
        flip(disk, LOG, at)
        with pytest.raises(DamagedRaft, match=r"raft/log .*cluster remove"):
            opened(disk)
        flip(disk, LOG, at)
    # So is the last group: it was complete, so its vote or its entries may be promised.
    for at in range(last, disk.open_read(LOG).size()):
        flip(disk, LOG, at)
        with pytest.raises(DamagedRaft, match=r"raft/log .*cluster remove"):
            opened(disk)
        flip(disk, LOG, at)


def test_a_damaged_snapshot_is_an_error() -> None:
    disk = SimDisk()
    files = RaftFiles(disk, MEMBER, is_new=True)
    for each in WRITES[:6]:
        files.write(each)
    for at in range(disk.open_read(SNAPSHOT).size()):
        flip(disk, SNAPSHOT, at)
        with pytest.raises(DamagedRaft, match="raft/snapshot"):
            opened(disk)
        flip(disk, SNAPSHOT, at)
    disk.remove(SNAPSHOT)
    with pytest.raises(DamagedRaft, match="raft/snapshot is missing"):
        opened(disk)


def test_a_node_that_lost_its_log_does_not_begin_anew_by_itself() -> None:
    with pytest.raises(DamagedRaft, match=r"missing.*join again"):
        opened(SimDisk())


def test_the_log_of_another_node_is_refused() -> None:
    disk = SimDisk()
    RaftFiles(disk, MEMBER, is_new=True).write(WRITES[0])
    with pytest.raises(DamagedRaft, match=r"belongs to n1\.abc, this is n1\.other"):
        RaftFiles(disk, "n1.other", is_new=False)


def test_a_full_disk_leaves_the_log_as_it_was() -> None:
    disk = SimDisk()
    files = RaftFiles(disk, MEMBER, is_new=True)
    files.write(WRITES[0])
    for each, number in ((WRITES[1], 2), (COMPACTED, None)):
        before = opened(disk)
        disk.capacity_bytes -= disk.free_bytes() - 10
        with pytest.raises(DiskFullError):
            files.write(each)
        assert opened(disk) == before
        disk.capacity_bytes += 1 << 20
        files.write(each)
        assert opened(disk) == (states()[number] if number else carry_out(before, each))


class Loop:
    """call_soon_threadsafe for a test: calls at once, in the writer's thread."""

    def __init__(self) -> None:
        self.written = 0
        self.failed: BaseException | None = None
        self.changed = threading.Condition()

    def call_soon(self, call: Callable[..., None], *args: object) -> None:
        with self.changed:
            call(*args)
            self.changed.notify_all()

    def on_written(self) -> None:
        self.written += 1

    def on_failed(self, error: BaseException) -> None:
        self.failed = error

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30)


def writer(disk: SimDisk | OsFileSystem, loop: Loop) -> RaftWriter:
    files = RaftFiles(disk, MEMBER, is_new=True)
    return RaftWriter(files, loop.call_soon, on_written=loop.on_written, on_failed=loop.on_failed)


def test_the_writer_reports_each_write(tmp_path: Path) -> None:
    loop = Loop()
    thread = writer(OsFileSystem(tmp_path), loop)
    for each in WRITES:
        thread.submit(each)
    thread.close()
    assert loop.written == len(WRITES)
    state = RaftFiles(OsFileSystem(tmp_path), MEMBER, is_new=False).state
    assert state == states()[-1]


def test_a_failed_sync_stops_the_writer_for_good() -> None:
    loop = Loop()
    disk = SimDisk()
    thread = writer(disk, loop)
    thread.submit(WRITES[0])
    loop.wait(lambda: loop.written == 1)
    disk.fail_sync = True
    thread.submit(WRITES[1])
    loop.wait(lambda: loop.failed is not None)
    disk.fail_sync = False
    thread.submit(WRITES[1])
    thread.close()
    assert isinstance(loop.failed, OSError)
    assert loop.written == 1


def test_a_write_waits_for_space() -> None:
    loop = Loop()
    disk = SimDisk()
    thread = writer(disk, loop)
    disk.capacity_bytes -= disk.free_bytes()
    thread.submit(WRITES[0])
    while not thread.is_full:
        assert loop.failed is None
    disk.capacity_bytes += 1 << 20
    loop.wait(lambda: loop.written == 1)
    disk.capacity_bytes -= disk.free_bytes()
    thread.submit(WRITES[1])
    thread.close()
    assert loop.failed is None
    assert opened(disk) == states()[1]

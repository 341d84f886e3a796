"""The simulator of the lease finds what it is there to find: each mistake, made in the production
code for the length of a test, breaks a promise within a bounded number of seeds."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from holdfast.io.disk import mastership, standby
from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.io.disk.mastership import Renewal
from holdfast.io.disk.storage import Storage
from holdfast.log.batch import Batch
from holdfast.log.files.filesystem import FileSystem, Lock, TemporaryFile
from holdfast.log.files.layout import DataDirectory, Manifest
from holdfast.log.journal.epoch_folders import EPOCH_FILE, Epoch, newest_epoch
from holdfast.log.journal.segment import Segment, WriteGroup
from holdfast.log.reading.segment_reader import CHUNK_BYTES, SegmentReader
from holdfast.node.lease.claim import Claim, claim, link_epoch, seal
from holdfast.node.lease.directory import HolderInfo, LeaseDirectory, claim_name
from holdfast.node.lease.standby_watch import HolderWatch
from tests.support.planted import Plant, Planted, changed
from tests.support.sim_node import SimNode
from tests.support.sim_world import Faults, Idle, World, Wrong

SLOW = (0.003,)
PAUSES = Faults(
    kinds={"pause": 2.0, "freeze": 5.0, "thread": 3.0, "hang": 1.0, "kill": 0.5},
    every_s=0.25,
    call_s=SLOW,
)
SYNCS_STALL = replace(PAUSES, stalls=0.1, stalled_calls=("sync",))
CLAIMS_STALL = replace(PAUSES, stalls=0.3, stalled_calls=("create", "lock"))
CUTS_STALL = replace(
    PAUSES,
    kinds={"squeeze": 1.0},
    every_s=0.6,
    clock_rates=(1.0, 1.8),
    stalls=0.7,
    stalled_calls=("truncate",),
)
RETAINS = replace(
    PAUSES,
    retention_bytes=(1500, 3000),
    segment_bytes=(600,),
    stalls=0.3,
    stalled_calls=("remove",),
)
POWER = Faults(kinds={"power": 3.0, "kill": 2.0, "handover": 1.0}, every_s=0.3, call_s=SLOW)
POWER_AFTER_KILL = replace(
    POWER, kinds={"power": 2.0, "kill": 3.0}, stalls=0.2, stalled_calls=("sync",)
)


def root_of(directory: DataDirectory) -> FileSystem:
    files: FileSystem = directory.files._files  # type: ignore[attr-defined]
    return files


def no_check_before_a_promise() -> AbstractContextManager[object]:
    return changed(Renewal, "confirm", lambda renewal: None)


@contextmanager
def check_before_sync() -> Iterator[None]:
    write = GroupWriter.write
    renewals: dict[object, Renewal] = {}

    def register(node: SimNode, renewal: Renewal) -> None:
        renewals[node.process] = renewal

    def check_and_write(writer: GroupWriter, group: WriteGroup) -> None:
        renewal = renewals.get(root_of(writer._directory))
        if renewal is not None:
            renewal.confirm()
        write(writer, group)

    with changed(SimNode, "_confirm", register), changed(GroupWriter, "write", check_and_write):
        yield


@contextmanager
def end_read_before_the_claim() -> Iterator[None]:
    ends: dict[int, dict[int, int]] = {}

    def read_end_and_claim(directory: LeaseDirectory, info: HolderInfo) -> Claim | None:
        old = newest_epoch(directory.root)
        folder = DataDirectory(old.files(directory.root), Manifest("", 3, ""), old)
        sizes = {number: folder.open_segment(number).size() for number in folder.segments()}
        taken = claim(directory, info)
        if taken is not None:
            ends[taken.epoch] = sizes
        return taken

    def link_that(root: FileSystem, manifest: Manifest, old: Epoch, number: int) -> DataDirectory:
        folder = link_epoch(root, manifest, old, number)
        sizes = ends[number]
        for sequence in folder.segments():
            if sequence not in sizes:
                folder.remove_segment(sequence)
            elif sequence == max(sizes):
                folder.sealed[sequence] = sizes[sequence]
        return folder

    with (
        changed(mastership, "claim", read_end_and_claim),
        changed(mastership, "link_epoch", link_that),
    ):
        yield


def no_seal() -> AbstractContextManager[object]:
    def without(
        directory: LeaseDirectory,
        taken: Claim,
        folder: DataDirectory,
        node_id: str,
        began: str,
        *end: Any,
    ) -> None:
        seal(directory, taken, folder, node_id, began, None, 0)

    return changed(mastership, "seal", without)


@contextmanager
def seal_not_durable() -> Iterator[None]:
    finish = TemporaryFile.finish

    def unsynced(file: TemporaryFile, *, sync: bool = True) -> None:
        finish(file, sync=sync and not file._name.endswith(EPOCH_FILE))

    with changed(TemporaryFile, "finish", unsynced):
        yield


@contextmanager
def end_not_durable() -> Iterator[None]:
    """The tail that the old holder had written and not synced."""

    def unsynced(
        directory: LeaseDirectory,
        taken: Claim,
        folder: DataDirectory,
        node_id: str,
        began: str,
        last_segment: int | None,
        end_bytes: int,
    ) -> None:
        if last_segment is not None:
            folder.sealed[last_segment] = end_bytes
        seal(directory, taken, folder, node_id, began, None, 0)

    with changed(mastership, "seal", unsynced), changed(standby, "write_again", lambda *_: 0):
        yield


@contextmanager
def claim_not_exclusive() -> Iterator[None]:
    begin_claim = LeaseDirectory.begin_claim

    class Unlocked:
        def release(self) -> None: ...

    def anyway(directory: LeaseDirectory, epoch: int, info: HolderInfo) -> Lock | None:
        return begin_claim(directory, epoch, info) or Unlocked()

    def open_beat(directory: LeaseDirectory, epoch: int) -> Any:
        name = claim_name(epoch).replace(".claim", ".beat")
        try:
            return directory.root.open_write(name, create=True)
        except FileExistsError:
            return directory.root.open_write(name, create=False)

    with (
        changed(LeaseDirectory, "begin_claim", anyway),
        changed(LeaseDirectory, "create_beat", open_beat),
    ):
        yield


@contextmanager
def one_time_for_a_look(*, after: bool) -> Iterator[None]:
    judge = HolderWatch.judge

    def judge_by_one(watch: HolderWatch, sight: Any, began_at: float, ended_at: float) -> str:
        now = ended_at if after else began_at
        return judge(watch, sight, now, now)

    with changed(HolderWatch, "judge", judge_by_one):
        yield


@contextmanager
def deposed_holder_cuts_a_sealed_group() -> Iterator[None]:
    """Harmless alone: a group that a full disk has left incomplete is behind the seal."""
    with deposed_holder_cuts_the_file(), seal_inside_a_group():
        yield


def seal_inside_a_group() -> AbstractContextManager[object]:
    batches = SegmentReader._batches

    def each_batch(
        reader: SegmentReader, size: int, chunk_bytes: int = CHUNK_BYTES, *, whole_groups: bool
    ) -> Iterator[Batch]:
        return batches(reader, size, chunk_bytes, whole_groups=False)

    return changed(SegmentReader, "_batches", each_batch)


def deposed_holder_cuts_the_file() -> AbstractContextManager[object]:
    begin = GroupWriter.__init__

    def begin_unshared(writer: GroupWriter, directory: DataDirectory, **named: Any) -> None:
        begin(writer, directory, **{**named, "shared": False})

    return changed(GroupWriter, "__init__", begin_unshared)


def one_folder_for_retention() -> AbstractContextManager[object]:
    def remove_from_newest(storage: Storage, removed: list[Segment]) -> None:
        oldest = storage.journal.segments[0]
        newest_folder(storage).write_start(oldest.sequence, oldest.start_offsets())
        for segment in removed:
            newest_folder(storage).remove_segment(segment.sequence)

    def newest_folder(storage: Storage) -> DataDirectory:
        root = root_of(storage.directory)
        newest = newest_epoch(root)
        return DataDirectory(newest.files(root), storage.directory.manifest, newest)

    return changed(Storage, "remove_segments", remove_from_newest)


BUGS: dict[str, tuple[Plant, Faults, int]] = {
    "no check before a promise": (no_check_before_a_promise, PAUSES, 0),
    "check before sync": (check_before_sync, SYNCS_STALL, 47),
    "end read before the claim": (end_read_before_the_claim, CLAIMS_STALL, 14),
    "no seal": (no_seal, PAUSES, 3),
    "seal not durable": (seal_not_durable, POWER, 3),
    "end not durable": (end_not_durable, POWER_AFTER_KILL, 123),
    "claim not exclusive": (claim_not_exclusive, PAUSES, 4),
    "time taken before a look alone": (partial(one_time_for_a_look, after=False), PAUSES, 17),
    "time taken after a look alone": (partial(one_time_for_a_look, after=True), PAUSES, 56),
    "deposed holder cuts a sealed group": (deposed_holder_cuts_a_sealed_group, CUTS_STALL, 158),
    "one folder for retention": (one_folder_for_retention, RETAINS, 38),
}


def play(faults: Faults, seed: int) -> None:
    with suppress(Idle):
        World(seed, faults).play()


PLANTED = {
    name: Planted(plant, partial(play, faults), seed=first, seeds=400, finds=(Wrong,))
    for name, (plant, faults, first) in BUGS.items()
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    PLANTED[name].check()

"""Restores a backup as a new data directory.

The directory gets its name when it is complete and checked. The backup stays as it is: files that
never change are linked, and every other file is a copy.

Numbers that left the process after the backup must not be given out again for something else.
Offsets are, so the log gets a new generation, under which they are others. The epochs of a
federation's member are not: its count of starts goes far beyond those that it may have used.

The log ends before the first write group with a record of that time or later. What was acknowledged
before that time lies in earlier groups, because a group is on the disk before its acknowledgement.

A replica has two exceptions. The clocks of nodes differ, so a record may have a time that is a
little later than that of a record behind it. And a replica that was behind in a partition has
fetched its records after newer ones of others. The cut leaves those out and reports their number.

A snapshot stays only if it was complete before that time. It may contain effects of records behind
its own position, up to the moment of its last write. Counter-example: a snapshot begins at 12:00:00
and ends at 12:00:05, and a retained message of 12:00:03 is in it. A log that is cut at 12:00:02
would have that message without its record.
"""

import os
import secrets
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from holdfast.cli.backup.backup import FIXED, Copied
from holdfast.cli.backup.manifest import (
    BackupError,
    BackupManifest,
    NewDirectory,
    NotEmpty,
    read_manifest,
)
from holdfast.cli.log.records import time_text
from holdfast.cli.log.report import examine
from holdfast.io.conversion.raft_metadata import read_metadata
from holdfast.io.disk.raft_files import FOLDER as RAFT
from holdfast.io.disk.raft_files import DamagedRaft, RaftFiles
from holdfast.log.batch import ATTRIBUTE_MORE, ATTRIBUTE_RESET
from holdfast.log.files.data_directory import open_to_read, present_processes
from holdfast.log.files.filesystem import TEMPORARY, OsFileSystem
from holdfast.log.files.layout import (
    FORMER_MAX,
    GENERATION_BITS,
    PROCESSES,
    DataDirectory,
    segment_name,
    snapshot_name,
)
from holdfast.log.journal.epoch_folders import FOLDERS, write_epoch
from holdfast.log.journal.recovery import OpenedJournal, open_journal
from holdfast.log.journal.segment import Segment
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.index import SegmentIndex
from holdfast.log.snapshot import CorruptSnapshot, Snapshot
from holdfast.node.metadata.state_machine import peer_id
from holdfast_federation.core.identity import RESTORED_STARTS, BadIdentity
from holdfast_federation.sidecar.store.identity import IDENTITY, skip_starts
from holdfast_federation.sidecar.store.identity import IN_A_BROKER as FEDERATION

MARGIN_US: Final = 1_000_000
"""The least time between the last write of a snapshot and the cut, as the clock of the file system
may differ from that of the node."""


CLOCKS_US: Final = 2_000_000
"""The difference between the clocks of two nodes of a cluster: each may be 1 s from the cluster's
(`node.failure.cluster_clock`)."""


class LogCut(Struct, frozen=True):
    """The place at which the log ends."""

    segment: int
    position: int
    ends: list[int]
    """Per partition the offset after the last record."""
    sequence: int
    """The number of records before the place."""


def cut_at(root: Path, until_us: int) -> str:
    """LogCut a directory that no process serves. Returns a line for people.

    Raises `BackupError` if the directory does not reach back to that time, and `OSError`.
    """
    directory = open_to_read(root)
    opened = open_journal(directory, writes=False)
    found = find_cut(opened, until_us)
    if found is None:
        return f"the log ends before {time_text(until_us)}: nothing is cut"
    journal = opened.journal
    # Of a partition that is not stored, the snapshot is ahead of the log, because it was fed.
    ends = [
        sys.maxsize if start == end else cut
        for start, end, cut in zip(
            journal.start_offsets, journal.next_offset, found.ends, strict=True
        )
    ]
    kept = _usable_snapshots(root, directory, replace(found, ends=ends), until_us)
    first = opened.journal.segments[0]
    if first.sequence > max(kept, default=0):
        raise BackupError(
            f"{root}: no snapshot is older than {time_text(until_us)}, and retention has removed"
            " the log before it: give a later --until, or an older backup"
        )
    older = _older_left_out(opened, found, until_us - CLOCKS_US)
    _apply(root, directory, found, kept)
    lost = opened.journal.sequence - found.sequence
    line = f"cut at {time_text(until_us)}: {lost} of {opened.journal.sequence} records left out"
    if older:
        line += (
            f"; {older} of them are from before that time. This node has fetched them from other"
            " nodes after newer ones, so restore the others as well"
        )
    return line


def find_cut(opened: OpenedJournal, until_us: int) -> LogCut | None:
    """The place of the first write group with a record of that time or later; None without one."""
    sequence = 0
    for segment in opened.journal.segments:
        sequence = segment.sequence
        if segment.head.last_timestamp_us < until_us:
            continue
        index = segment.index
        index = opened.store.load_index(segment) if index is None else index
        found = _find_in(segment, index, until_us, sequence)
        if found is not None:
            return found
    return None


def _find_in(segment: Segment, index: SegmentIndex, until_us: int, sequence: int) -> LogCut | None:
    ends = list(index.head.start_offsets)
    group = LogCut(segment.sequence, 0, list(ends), sequence)
    continues = False
    for number, position in enumerate(index.positions):
        if not continues:
            group = LogCut(segment.sequence, position, list(ends), sequence)
        if index.counts[number]:
            last_us = index.first_timestamps_us[number] + index.last_deltas_us[number]
            if last_us >= until_us:
                return group
        partition = index.partitions[number]
        attributes = index.attributes[number]
        if attributes & ATTRIBUTE_RESET:
            ends[partition] = index.base_offsets[number]
            sequence += 1
        else:
            ends[partition] = index.base_offsets[number] + index.counts[number]
            sequence += index.counts[number]
        continues = bool(attributes & ATTRIBUTE_MORE)
    return None


def _older_left_out(opened: OpenedJournal, cut: LogCut, before_us: int) -> int:
    """The number of records behind the cut that are from before this time."""
    count = 0
    for segment in opened.journal.segments:
        if segment.sequence < cut.segment or segment.head.first_timestamp_us >= before_us:
            continue
        index = segment.index
        index = opened.store.load_index(segment) if index is None else index
        for number, position in enumerate(index.positions):
            if segment.sequence == cut.segment and position < cut.position:
                continue
            last_us = index.first_timestamps_us[number] + index.last_deltas_us[number]
            if index.counts[number] and last_us < before_us:
                count += index.counts[number]
    return count


def _usable_snapshots(
    root: Path, directory: DataDirectory, cut: LogCut, until_us: int
) -> list[int]:
    """The sequences of the snapshots that were complete before the cut."""
    kept = []
    for sequence in directory.snapshots():
        file = directory.open_snapshot(sequence)
        try:
            snapshot = Snapshot(file.read, file.size())
        except CorruptSnapshot:
            continue
        path = root / directory.epoch.folder / snapshot_name(sequence)
        if path.stat().st_mtime_ns // 1000 + MARGIN_US > until_us:
            continue
        pairs = zip(snapshot.offsets, cut.ends, strict=True)
        if all(offset <= end for offset, end in pairs) and sequence <= cut.sequence:
            kept.append(sequence)
    return kept


def _apply(root: Path, directory: DataDirectory, cut: LogCut, kept: list[int]) -> None:
    """Removes what is behind the cut, the newest first, and syncs the rest."""
    for sequence in directory.snapshots():
        if sequence not in kept:
            directory.remove_snapshot(sequence)
    stays = cut.segment if cut.position else cut.segment - 1
    for sequence in reversed(directory.segments()):
        if sequence > stays:
            directory.remove_segment(sequence)
    left = directory.segments()
    if left:
        own_file(root / directory.epoch.folder / segment_name(left[-1]))
        directory.remove_index(left[-1])
        if left[-1] == cut.segment:
            file = directory.append_to_segment(cut.segment)
            file.truncate(cut.position)
            file.sync()
            file.close()
    if directory.epoch.number:
        seals = {segment: size for segment, size in directory.sealed.items() if segment in left}
        if cut.segment in seals:
            seals[cut.segment] = min(seals[cut.segment], cut.position)
        write_epoch(OsFileSystem(root), replace(directory.epoch, sealed=seals))
    if directory.manifest.is_replica:
        directory.write_watermarks(_checkpoint(directory.read_checkpoint(), cut))
    directory.sync_names()


def _checkpoint(before: Checkpoint, cut: LogCut) -> Checkpoint:
    offsets = [min(pair) for pair in zip(before.offsets, cut.ends, strict=True)]
    place = min((before.segment, before.position), (cut.segment, cut.position))
    return Checkpoint(offsets, *place)


def own_file(path: Path) -> None:
    """Gives a file content of its own. Under a second name, in the backup, it would change too."""
    if path.stat().st_nlink == 1:
        return
    copy = path.with_name(f"{path.name}{TEMPORARY}")
    shutil.copy2(path, copy)
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    copy.replace(path)


PROBLEMS_SHOWN: Final = 5
AGE_STARTS_MAX: Final = 2**23
"""The most starts that the age of a backup adds, one a second."""
PARTIAL: Final = ".restoring"
"""The end of the name of a directory that is not complete yet."""


def restore(backup: Path, target: Path, until_us: int | None) -> tuple[BackupManifest, list[str]]:
    """Restores a backup. Returns its manifest, and lines for people.

    Raises `BackupError`, which names what is damaged or missing, `DataDirectoryError` or `OSError`.
    """
    try:
        made = NewDirectory(target, PARTIAL)
    except NotEmpty as error:
        raise BackupError(str(error)) from None
    manifest = read_manifest(backup)
    if backup.resolve().is_relative_to(made.partial.resolve()):
        raise BackupError(
            f"{made.partial} is replaced by a restore: move the backup to another name"
        )
    places = [Path(PROCESSES, str(each)) for each in present_processes(backup)]
    others = {place: read_manifest(backup / place) for place in places}
    if others:
        until_us = _common_time(until_us, [manifest, *others.values()])
    with made as partial:
        lines = _fill(manifest, Copied(backup, partial), until_us)
        for place, other in others.items():
            lines += _fill(other, Copied(backup / place, partial / place), until_us)
    return manifest, lines


def _common_time(until_us: int | None, manifests: list[BackupManifest]) -> int:
    """The time up to which the backups of several processes are restored. The first one has
    everything before it began, and the others have records after that.

    Counter-example: a client has acknowledged a message of process 1 that came after the backup of
    process 0, where the session is. Its position would be behind the end of the log.
    """
    began = min(datetime.fromisoformat(each.began) for each in manifests)
    began_us = int(began.timestamp() * 1_000_000)
    return began_us if until_us is None else min(until_us, began_us)


def _fill(manifest: BackupManifest, copied: Copied, until_us: int | None) -> list[str]:
    root = copied.target
    root.mkdir(mode=0o750, parents=True)
    epoch = open_to_read(copied.source).epoch.folder
    for folder in FOLDERS:
        (root / epoch / folder).mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        inside = file.path.removeprefix(f"{epoch}/") if epoch else file.path
        if (copied.source / file.path).stat().st_size > file.bytes:
            copied.copy(file.path)
            os.truncate(root / file.path, file.bytes)
        elif inside.partition("/")[0] in FIXED:
            copied.link(file.path)
        else:
            copied.copy(file.path)
    _check_log(root, copied.source)
    directory = open_to_read(root)
    segments = directory.segments()
    if segments:
        own_file(root / directory.epoch.folder / segment_name(segments[-1]))
    lines = [] if until_us is None else [cut_at(root, until_us)]
    if directory.files.list(RAFT):
        member = peer_id(directory.manifest.node_id, directory.manifest.incarnation)
        try:
            RaftFiles(directory.files, member, is_new=False).close()
        except DamagedRaft as error:
            raise BackupError(f"{copied.source}: {error}") from None
    _begin_generation(root, directory)
    if (root / FEDERATION / IDENTITY).exists():
        try:
            skip_starts(root / FEDERATION, _restored_starts(manifest))
        except BadIdentity as error:
            raise BackupError(f"{copied.source}: {error}") from None
    copied.finish()
    return lines


def _restored_starts(manifest: BackupManifest) -> int:
    """The starts to add: more for a later restore of the same backup, because the member may have
    run after the one before."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(manifest.began)
    except (ValueError, TypeError):
        return RESTORED_STARTS
    return RESTORED_STARTS + min(max(int(age.total_seconds()), 0), AGE_STARTS_MAX)


def _begin_generation(root: Path, directory: DataDirectory) -> None:
    """Gives the log another generation than the one that goes on without this copy.

    A replica only gets a mark, because a cluster has one generation: its nodes agree on it when a
    majority of the voters was restored (`node.metadata.generation`). The only node of a cluster
    has the whole log, so it knows what is left of the generations before.
    """
    manifest = directory.manifest
    number = secrets.randbits(GENERATION_BITS) or 1
    if manifest.is_replica and not _is_only_node(root, directory):
        directory.write_manifest(replace(manifest, restored=number))
        return
    ends = tuple(open_journal(directory, writes=False).journal.next_offset)
    former = [(each, tuple(map(min, ends, kept))) for each, kept in manifest.former]
    former.append((manifest.generation, ends))
    begun = replace(manifest, former=tuple(former[-FORMER_MAX:]))
    if manifest.is_replica:
        directory.write_manifest(replace(begun, restored=number))
    else:
        directory.write_manifest(replace(begun, generation=number))


def _is_only_node(root: Path, directory: DataDirectory) -> bool:
    manifest = directory.manifest
    metadata = read_metadata(root / directory.epoch.folder, manifest)
    return metadata is not None and tuple(metadata.nodes) == (manifest.node_id,)


def _check_log(root: Path, backup: Path) -> None:
    """Reads every byte of the log and the snapshots in `root`. Raises `BackupError` at damage."""
    report = examine(open_to_read(root), root, deep=True)
    if report.problems:
        shown = "; ".join(report.problems[:PROBLEMS_SHOWN])
        more = len(report.problems) - PROBLEMS_SHOWN
        raise BackupError(
            f"{backup} is damaged: {shown}{f'; and {more} more' if more > 0 else ''}. Use an older"
            " backup. `holdfast log verify` lists everything; a copy of the directory can be served"
            " without the damaged records"
        )


def advice(manifest: BackupManifest, target: Path) -> list[str]:
    """The next step of the operator."""
    if manifest.kind == "pair":
        return [
            f"start the nodes of the pair on {target}: holdfast serve --standby --data {target}"
        ]
    if others := present_processes(target):
        count = len(others) + 1
        return [f"start the broker: holdfast serve --processes {count} --data {target}"]
    if manifest.kind == "node" or _is_only_node(target, open_to_read(target)):
        return [f"start the broker: holdfast serve --data {target}"]
    return [
        f"this is node {manifest.node_id} of the cluster {manifest.cluster_id}",
        "if the other nodes run: start it. They reject it as an older copy, and it joins again by"
        " itself when a majority has agreed",
        "to put back the whole cluster: stop all nodes, restore each one with the same --until, not"
        f" later than the earliest backup began ({manifest.began} here), and start all together",
    ]

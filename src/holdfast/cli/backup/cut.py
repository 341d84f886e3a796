"""Cuts a restored data directory at a time, as if the node had crashed then.

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
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.cli.backup.manifest import BackupError
from holdfast.cli.log.records import time_text
from holdfast.log.batch import ATTRIBUTE_MORE, ATTRIBUTE_RESET
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.files.filesystem import TEMPORARY, OsFileSystem
from holdfast.log.files.layout import DataDirectory, segment_name, snapshot_name
from holdfast.log.journal.epoch_folders import write_epoch
from holdfast.log.journal.recovery import OpenedJournal, open_journal
from holdfast.log.journal.segment import Segment
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.index import SegmentIndex
from holdfast.log.snapshot import CorruptSnapshot, Snapshot

MARGIN_US: Final = 1_000_000
"""The least time between the last write of a snapshot and the cut, as the clock of the file system
may differ from that of the node."""


CLOCKS_US: Final = 2_000_000
"""The difference between the clocks of two nodes of a cluster: each may be 1 s from the cluster's
(`node.failure.cluster_clock`)."""


@dataclass(frozen=True)
class LogCut:
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

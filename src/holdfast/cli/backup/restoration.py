"""Restores a backup as a new data directory.

The directory gets its name when it is complete and checked. The backup stays as it is: files that
never change are linked, and every other file is a copy.

Numbers that left the process after the backup must not be given out again for something else.
Offsets are, so the log gets a new generation, under which they are others. The epochs of a
federation's member are not: its count of starts goes far beyond those that it may have used.
"""

import os
import secrets
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from holdfast.cli.backup.backup import FIXED, Copied
from holdfast.cli.backup.cut import cut_at, own_file
from holdfast.cli.backup.manifest import (
    BackupError,
    BackupManifest,
    NewDirectory,
    NotEmpty,
    read_manifest,
)
from holdfast.cli.log.report import examine
from holdfast.federation.core.identity import RESTORED_STARTS, BadIdentity
from holdfast.federation.sidecar.store.identity import IDENTITY, skip_starts
from holdfast.federation.sidecar.store.identity import IN_A_BROKER as FEDERATION
from holdfast.io.conversion.raft_metadata import read_metadata
from holdfast.io.disk.raft_files import FOLDER as RAFT
from holdfast.io.disk.raft_files import DamagedRaft, RaftFiles
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.files.layout import (
    FORMER_MAX,
    GENERATION_BITS,
    PROCESSES,
    DataDirectory,
    segment_name,
)
from holdfast.log.journal.epoch_folders import FOLDERS
from holdfast.log.journal.recovery import open_journal
from holdfast.node.metadata.state_machine import peer_id
from holdfast.process.place import present_processes

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

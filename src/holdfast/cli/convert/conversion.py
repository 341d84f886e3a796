"""The conversion of a data directory between a single broker and a cluster's node.

Invariant: the new directory has every message of the old one, at the same offset, and a state that
recovery reads as the same (`CarriedState.lasting`). The old directory is only read. The command
checks both before the new directory gets its name.

The log does not say the same to both kinds of nodes. So its records of sessions are made void
(`batches`), and records at its end define the state again (`definitions`). A node that follows the
log therefore gets the state from it. A snapshot has the same state for the node itself, and what
records below the start of the log defined.
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from re import fullmatch
from typing import Final

import msgspec

from holdfast.broker.config import NodeConfig
from holdfast.broker.recorded_state import RecordedState
from holdfast.broker.recovery.recovery import Recovery
from holdfast.broker.recovery.session_records import GroupEntry, encode_session
from holdfast.broker.recovery.snapshot_entries import (
    SNAPSHOT_GROUP,
    SNAPSHOT_SESSION,
    session_entry,
)
from holdfast.broker.session.session import FEDERATION
from holdfast.cli.backup.backup import LEFT_OUT, Copied
from holdfast.cli.backup.new_directory import NewDirectory, NotEmpty
from holdfast.cli.convert.batches import PacketIds, rewrite
from holdfast.cli.convert.carried import CarriedSession, CarriedState, carry
from holdfast.cli.convert.definitions import FIRST_EPOCH, Definitions
from holdfast.cli.convert.new_log import NewLog
from holdfast.cli.convert.raft_metadata import found_cluster
from holdfast.cli.convert.source import ConversionError, Source, recover
from holdfast.cluster.metadata.model import AgreedUsers, ClusterMetadata
from holdfast.cluster.state.fields import InboundIds
from holdfast.cluster.state.packet_ids import NO_ID
from holdfast.cluster.state.replicated import SNAPSHOT_INBOUND, ReplicatedState
from holdfast.config.check_cluster import NODE_ID
from holdfast.config.schema import NODE_NAME
from holdfast.security.dynamic.agreed import unpack
from holdfast.security.dynamic.document import DynamicSecurityError, SecurityDocument
from holdfast.security.dynamic.file import write as write_users
from holdfast.server.disk.raft_files import FOLDER as RAFT
from holdfast.storage.files.data_directory import lock_root, open_to_read
from holdfast.storage.files.filesystem import TEMPORARY, OsFileSystem
from holdfast.storage.files.layout import (
    ASIDE,
    JOURNAL,
    MANIFEST,
    SNAPSHOTS,
    DataDirectory,
    Manifest,
)
from holdfast.storage.journal.epoch_folders import EPOCHS, LEASE
from holdfast.storage.journal.journal import SEGMENT_BYTES_DEFAULT
from holdfast.storage.journal.recovery import open_journal
from holdfast.storage.journal.watermarks import NAME as WATERMARKS
from holdfast.storage.record import Record

USERS_FILE: Final = "dynamic-security.json"
"""The file for the users that the nodes of a cluster have agreed on."""
PARTIAL: Final = ".converting"
"""The end of the name of a directory that is not complete yet."""
MADE_AGAIN: Final = frozenset({MANIFEST, WATERMARKS, JOURNAL, SNAPSHOTS, RAFT, ASIDE})
"""The files and folders that are not copied, because the other kind of node has others."""


@dataclass(frozen=True)
class ClusterPlan:
    """The cluster that a conversion founds."""

    replication_factor: int
    min_insync: int


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    manifest: Manifest
    records: int
    """The records of the log."""
    added: int
    """Those added at its end."""
    carried: CarriedState
    has_users: bool = False
    """Whether the cluster's users of dynamic security are in `USERS_FILE` of the new directory."""


def convert(
    source: Path,
    target: Path,
    plan: ClusterPlan | None,
    node_id: str = "",
    *,
    is_last: bool = False,
) -> Conversion:
    """Convert the directory of a single broker for the first node of a cluster; without a plan,
    that of a cluster's node for a single broker. `node_id`: the new name; "" for the same.

    Raises `ConversionError`, which says what to do, `DataDirectoryError` or `OSError`.
    """
    directory = open_to_read(source)
    _check_kind(source, directory, plan)
    _check_name(node_id or directory.manifest.node_id, plan)
    if target.absolute().resolve().is_relative_to(source.resolve()):
        raise ConversionError(f"{target} is inside {source}: give a directory outside of it")
    try:
        made = NewDirectory(target, PARTIAL)
    except NotEmpty as error:
        raise ConversionError(str(error)) from None
    lock = lock_root(source)
    try:
        opened = Source(source, directory)
        metadata: ClusterMetadata | None = None
        if plan is None:
            metadata = opened.check_alone(is_last=is_last)
        elif FEDERATION in opened.recovery.state.sessions:
            raise ConversionError(
                f"{source} is a member of a federation, and its log has messages for the others."
                " Wait until `holdfast federation status` shows none in custody, take [federation]"
                " out, and start and stop the broker once"
            )
        _check_space(opened, made.partial)
        with made as partial:
            partial.mkdir(mode=0o750, parents=True)
            made_of = _fill(opened, partial, plan, node_id)
            if metadata is None or metadata.users is None:
                return made_of
            write_users(partial / USERS_FILE, _users_of(metadata.users))
            return replace(made_of, has_users=True)
    finally:
        lock.release()


def _users_of(users: AgreedUsers) -> SecurityDocument:
    try:
        return unpack(users.data)
    except DynamicSecurityError as error:
        raise ConversionError(f"{error}: convert with the version of the cluster") from None


def _check_kind(source: Path, directory: DataDirectory, plan: ClusterPlan | None) -> None:
    if (source / LEASE).exists():
        raise ConversionError(f"{source} is the shared directory of a pair, which is not converted")
    is_replica = directory.manifest.is_replica
    if plan is not None and is_replica:
        raise ConversionError(
            f"{source} is a cluster's already: start it with cluster.peer_bind set, and join others"
        )
    if plan is None and not is_replica:
        raise ConversionError(f"{source} is a single broker's already")


def _check_name(node_id: str, plan: ClusterPlan | None) -> None:
    """Check that `node.id` may have this value."""
    pattern, characters = NODE_NAME, "1 to 64 of A-Z a-z 0-9 _ . -"
    if plan is not None:
        pattern, characters = NODE_ID, "1 to 32 of A-Z a-z 0-9 _ -"
    if not fullmatch(pattern, node_id):
        raise ConversionError(f"--node-id {node_id!r}: give {characters}")


def _check_space(source: Source, partial: Path) -> None:
    folder = next(each for each in partial.parents if each.exists())
    free_bytes, wanted = OsFileSystem(folder).free_bytes(), source.size_bytes
    if free_bytes < wanted:
        raise ConversionError(
            f"{folder} has {free_bytes} bytes free, and the new directory needs about {wanted}"
        )


def _fill(source: Source, root: Path, plan: ClusterPlan | None, node_id: str) -> Conversion:
    manifest = _manifest(source.manifest, plan, node_id)
    _copy_others(source.path, root)
    directory = DataDirectory(OsFileSystem(root), manifest)
    journal = source.journal
    segments = journal.segments
    sequence = segments[0].sequence if segments else journal.sequence
    sizes = [segment.size_bytes for segment in segments]
    segment_bytes = max(sizes) if len(sizes) > 1 else SEGMENT_BYTES_DEFAULT
    log = NewLog(directory, journal.start_offsets, sequence, segment_bytes)
    carried = source.carried()
    epoch = 0 if plan is None else FIRST_EPOCH
    in_use = _packet_ids(carried)
    log.copy(rewrite(batch, epoch, in_use) for batch in source.batches())
    records = sum(log.journal.next_offset) - sum(journal.start_offsets)
    owner = "" if plan is None else manifest.node_id
    definitions = Definitions(manifest.partitions, source.now_us, owner)
    added = log.append(definitions.records(carried))
    log.finish(_entries(log, carried, added, source.now_us), source.now_us)
    if plan is not None:
        found_cluster(directory.files, manifest, plan.replication_factor, plan.min_insync)
    directory.write_manifest(manifest)
    _check(root, source, carried)
    return Conversion(manifest, records, len(added), carried)


def _manifest(before: Manifest, plan: ClusterPlan | None, node_id: str) -> Manifest:
    name = node_id or before.node_id
    if plan is None:
        return replace(
            before,
            node_id=name,
            cluster_id="",
            incarnation="",
            generation=before.log_generation,
            restored=0,
        )
    # The new cluster agrees on the generation of its first node, as after a restore.
    return replace(
        before,
        node_id=name,
        cluster_id=secrets.token_hex(8),
        incarnation=secrets.token_hex(8),
        former=(),
        restored=before.generation,
    )


def _copy_others(source: Path, root: Path) -> None:
    """Copy what both kinds of nodes have: users, the index of the audit, quarantine, and files of a
    federation."""
    copied = Copied(source, root)
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        is_made_again = name.partition("/")[0] in (*MADE_AGAIN, LEASE, EPOCHS)
        if is_made_again or name in LEFT_OUT or name.endswith(TEMPORARY) or not path.is_file():
            continue
        if name.endswith(".db"):
            copied.copy_database(name)
        elif not name.endswith((".db-wal", ".db-shm", ".db-journal")):
            copied.copy(name)
    copied.finish()


def _packet_ids(carried: CarriedState) -> PacketIds:
    return {
        (session.client.encode(), partition, packet_id): session.epoch
        for session in carried.sessions
        for packet_id, partition in session.inbound.items()
    }


def _entries(
    log: NewLog, carried: CarriedState, added: Iterable[Record], now_us: int
) -> Iterator[tuple[int, bytes]]:
    """The entries of the new directory's snapshot, as the node that serves it would make them."""
    state = RecordedState(NodeConfig(partitions=log.journal.partitions), log.journal)
    state.wall_us = now_us
    if log.journal.replicated:
        replicated = ReplicatedState(state)
        for session in carried.sessions:
            replicated.apply_snapshot_entry(SNAPSHOT_INBOUND, _inbound_entry(session))
        for record in added:
            replicated.apply(record)
        yield from replicated.snapshot()
    else:
        recovery = Recovery(state)
        for record in added:
            recovery.apply(record)
        yield from _of_single(recovery, carried, log.directory.manifest.generation != 0)
    yield from carried.entries


def _inbound_entry(session: CarriedSession) -> bytes:
    """The packet ids as the messages of the converted log define them: see `batches`."""
    epoch = session.epoch
    ids = [(each, number, epoch) for number, each in session.inbound.items()]
    ids += [(each, NO_ID, epoch) for each in set(session.inbound.values())]
    return msgspec.json.encode(InboundIds(session.client, ids))


def _of_single(
    recovery: Recovery, carried: CarriedState, was_put_back: bool
) -> Iterator[tuple[int, bytes]]:
    """`was_put_back`: then all packet ids are doubtful, as in a new cluster, which has another
    generation."""
    inbound = {each.client: list(each.inbound.items()) for each in carried.sessions}
    for session in recovery.state.sessions.values():
        entry = session_entry(recovery.state, session)
        entry.open = session in recovery.open
        entry.inbound = inbound.get(session.client_id, [])
        if was_put_back:
            entry.doubtful = [packet_id for packet_id, _ in entry.inbound]
        yield SNAPSHOT_SESSION, encode_session(entry)
    for key, positions in recovery.group_positions.items():
        assigned = sorted(recovery.group_assigned.get(key, ()))
        yield SNAPSHOT_GROUP, encode_session(GroupEntry(key, positions, assigned))


def _check(root: Path, source: Source, carried: CarriedState) -> None:
    """Check that the new directory has the same state and offsets. Raises `ConversionError`."""
    directory = open_to_read(root)
    opened = open_journal(directory, writes=False)
    recovery = recover(directory, opened, source.now_us)
    again = carry(recovery, opened)
    begins = opened.journal.start_offsets == source.journal.start_offsets
    is_owned = any(session.owner for session in recovery.state.sessions.values())
    if not begins or is_owned or again.lasting() != carried.lasting():
        raise ConversionError(
            f"the new directory would not have the state of {source.path}: this is a mistake of"
            " this program, and nothing was changed. Please report it"
        )

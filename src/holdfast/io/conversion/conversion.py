"""The making of a data directory from that of the other kind of node: a single broker, or a node of
a cluster.

Invariant: the new directory has every message of the old one, at the same offset, and a state that
recovery reads as the same (`CarriedState.lasting`). The old directory is only read. `fill` checks
both at its end.

The log does not say the same to both kinds of nodes. So its records of sessions are made void
(`batches`), and records at its end define the state again (`definitions`). A node that follows the
log therefore gets the state from it. A snapshot has the same state for the node itself, and what
records below the start of the log defined.
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from holdfast.io.conversion.batches import PacketIds, rewrite
from holdfast.io.conversion.carried import CarriedSession, CarriedState, carry
from holdfast.io.conversion.definitions import FIRST_EPOCH, Definitions
from holdfast.io.conversion.new_log import NewLog
from holdfast.io.conversion.raft_metadata import found_cluster
from holdfast.io.conversion.source import ConversionError, Source, recover
from holdfast.io.disk.raft_files import FOLDER as RAFT
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import (
    ASIDE,
    JOURNAL,
    MANIFEST,
    SNAPSHOTS,
    DataDirectory,
    Manifest,
)
from holdfast.log.journal.journal import SEGMENT_BYTES_DEFAULT
from holdfast.log.journal.recovery import open_journal
from holdfast.log.journal.watermarks import NAME as WATERMARKS
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.state.fields import InboundIds
from holdfast.node.state.packet_ids import NO_ID
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.replicated import SNAPSHOT_INBOUND, ReplicatedState
from holdfast.node.state.session_records import GroupEntry, encode_session
from holdfast.node.state.snapshot_entries import (
    SNAPSHOT_GROUP,
    SNAPSHOT_SESSION,
    session_entry,
)

MADE_AGAIN: Final = frozenset({MANIFEST, WATERMARKS, JOURNAL, SNAPSHOTS, RAFT, ASIDE})
"""The files and folders that the other kind of node has in another form."""


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


def fill(source: Source, root: Path, plan: ClusterPlan | None, node_id: str = "") -> Conversion:
    """Make the directory `root` for the first node of a cluster; without a plan, for a single
    broker. `node_id`: the new name; "" for the same.

    Raises `ConversionError` and `OSError`.
    """
    manifest = _manifest(source.manifest, plan, node_id)
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
        restored=before.log_generation,
    )


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
    recovery = recover(directory, opened, source.now_us, is_strict=source.is_strict)
    again = carry(recovery, opened)
    begins = opened.journal.start_offsets == source.journal.start_offsets
    is_owned = any(session.owner for session in recovery.state.sessions.values())
    if not begins or is_owned or again.lasting() != carried.lasting():
        raise ConversionError(
            f"the new directory would not have the state of {source.path}: this is a mistake of"
            " this program, and nothing was changed. Please report it"
        )

"""Makes a data directory for the only node of a cluster from that of a single broker.

Invariant: the new directory has every message of the old one, at the same offset, and a state that
recovery reads as the same (`CarriedState.lasting`). The old directory is only read. `fill` checks
both at its end.

The log of a single broker does not say the same to a cluster. So its records of sessions are made
void (`batches`), and records at its end define the state again (`definitions`). A node that follows
the log therefore gets the state from it. A snapshot has the same state for the node itself, and
what records below the start of the log defined.
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
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
from holdfast.node.state.replicated import SNAPSHOT_INBOUND, ReplicatedState

MADE_AGAIN: Final = frozenset({MANIFEST, WATERMARKS, JOURNAL, SNAPSHOTS, RAFT, ASIDE})
"""The files and folders that a cluster's node has in another form."""


def fill(source: Source, root: Path) -> None:
    """Makes the directory `root` for the only node of a cluster. Raises `ConversionError` and
    `OSError`."""
    manifest = _manifest(source.manifest)
    directory = DataDirectory(OsFileSystem(root), manifest)
    journal = source.journal
    segments = journal.segments
    sequence = segments[0].sequence if segments else journal.sequence
    sizes = [segment.size_bytes for segment in segments]
    segment_bytes = max(sizes) if len(sizes) > 1 else SEGMENT_BYTES_DEFAULT
    log = NewLog(directory, journal.start_offsets, sequence, segment_bytes)
    carried = source.carried()
    in_use = _packet_ids(carried)
    log.copy(rewrite(batch, FIRST_EPOCH, in_use) for batch in source.batches())
    definitions = Definitions(manifest.partitions, source.now_us, manifest.node_id)
    added = log.append(definitions.records(carried))
    log.finish(_entries(log, carried, added, source.now_us), source.now_us)
    found_cluster(directory.files, manifest)
    directory.write_manifest(manifest)
    _check(root, source, carried)


def _manifest(before: Manifest) -> Manifest:
    # The new cluster agrees on the generation of its first node, as after a restore.
    return replace(
        before,
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
    replicated = ReplicatedState(state)
    for session in carried.sessions:
        replicated.apply_snapshot_entry(SNAPSHOT_INBOUND, _inbound_entry(session))
    for record in added:
        replicated.apply(record)
    yield from replicated.snapshot()
    yield from carried.entries


def _inbound_entry(session: CarriedSession) -> bytes:
    """The packet ids as the messages of the converted log define them: see `batches`."""
    epoch = session.epoch
    ids = [(each, number, epoch) for number, each in session.inbound.items()]
    ids += [(each, NO_ID, epoch) for each in set(session.inbound.values())]
    return msgspec.json.encode(InboundIds(session.client, ids))


def _check(root: Path, source: Source, carried: CarriedState) -> None:
    """Checks that the new directory has the same state and offsets. Raises `ConversionError`."""
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

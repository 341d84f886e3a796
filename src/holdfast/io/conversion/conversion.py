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
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec
from msgspec.structs import replace

from holdfast.io.conversion.carried import CarriedSession, CarriedState, carry
from holdfast.io.conversion.definitions import FIRST_EPOCH, Definitions
from holdfast.io.conversion.raft_metadata import found_cluster
from holdfast.io.conversion.source import ConversionError, Source, recover
from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.io.disk.raft_files import FOLDER as RAFT
from holdfast.log.batch import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    ATTRIBUTE_STATE,
    HEAD_BYTES,
    HEADER_BYTES,
    Batch,
)
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.files.filesystem import OsFileSystem, TemporaryFile
from holdfast.log.files.layout import (
    ASIDE,
    JOURNAL,
    MANIFEST,
    QUARANTINE,
    SNAPSHOTS,
    DataDirectory,
    Manifest,
    snapshot_name,
)
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.journal import SEGMENT_BYTES_DEFAULT, Journal
from holdfast.log.journal.recovery import open_journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.journal.watermarks import NAME as WATERMARKS
from holdfast.log.record import (
    CONTROL,
    CURSOR,
    FLAG_PACKET_ID,
    FLAG_WILL,
    MESSAGE,
    RELEASE,
    SESSION,
    STATE_FLAGS,
    WILL,
    Record,
)
from holdfast.log.snapshot import SnapshotEncoder
from holdfast.node.config import NodeConfig
from holdfast.node.state.fields import InboundIds
from holdfast.node.state.packet_ids import NO_ID
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import SNAPSHOT_INBOUND, ReplicatedState

GROUP_BYTES: Final = 8 << 20
"""The bytes that are written at a time. They bound the memory of a conversion, beside the state."""


class NewLog:
    """A new data directory without its manifest, which comes last."""

    def __init__(
        self, directory: DataDirectory, starts: list[int], sequence: int, segment_bytes: int
    ) -> None:
        """`starts`: the offset per partition at which the log begins. `sequence`: the number of
        records that were removed before."""
        self.directory = directory
        files = directory.files
        for folder in (JOURNAL, SNAPSHOTS, QUARANTINE):
            files.make_folder(folder)
        epochs = [(each, FIRST_EPOCH, start) for each, start in enumerate(starts) if start]
        self.journal = Journal(
            directory.manifest.partitions,
            segment_bytes,
            replicated=True,
            start_epochs=epochs,
        )
        self.journal.epochs = [FIRST_EPOCH] * directory.manifest.partitions
        if any(starts):
            self.journal.continue_at(starts, sequence)
            directory.write_start(sequence, starts, self.journal.start_epochs())
        self._group_bytes = min(GROUP_BYTES, segment_bytes // 4)
        self._writer = GroupWriter(directory, durable=False)

    def copy(self, batches: Iterable[Batch]) -> None:
        """Appends batches. Raises `ValueError` if records are missing between two of them."""
        for batch in batches:
            self.journal.append_batch(batch)
            self._write(self._group_bytes)
        self._write(0)

    def append(self, records: Iterable[Record]) -> list[Record]:
        """Appends records behind the log, and returns them with their offsets."""
        appended = []
        for record in records:
            self.journal.append(record)
            appended.append(record)
            self._write(self._group_bytes)
        self._write(0)
        return appended

    def finish(self, entries: Iterable[tuple[int, bytes]], now_us: int) -> None:
        """Writes a snapshot for everything, and makes all of it durable."""
        self._writer.close()
        journal, directory = self.journal, self.directory
        directory.sync_names()
        for partition, end in enumerate(journal.next_offset):
            journal.advance(partition, end)
        directory.write_watermarks(journal.checkpoint())
        encoder = SnapshotEncoder(journal.sequence, journal.next_offset, now_us)
        file = TemporaryFile(directory.files, snapshot_name(journal.sequence))
        for kind, data in entries:
            file.write(encoder.add(kind, data))
        file.write(encoder.finish())
        file.finish()

    def _write(self, bytes_min: int) -> None:
        """Writes what was appended, if it is as much."""
        if self.journal.pending_bytes < bytes_min:
            return
        group = self.journal.close_write_group()
        if group is not None:
            self._writer.write(group)
            self.journal.wrote(group)
            self.journal.commit(group)
            self._write_index(group)

    def _write_index(self, group: WriteGroup) -> None:
        """Writes the index of a segment that has ended, so the first start need not read it."""
        sealed = group.sealed
        if sealed is not None and isinstance(sealed.index, ActiveIndex):
            data = sealed.index.encode(lambda: None)
            self.directory.write_index(sealed.sequence, data)
            sealed.index = None


OF_SESSIONS: Final = frozenset({SESSION, CURSOR, RELEASE, WILL})
"""The kinds of records that define sessions and groups."""
_CHECKED: Final = 12
"""The position behind the checksum, where the bytes begin that it covers."""
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_CRC: Final = 8
_ATTRIBUTES: Final = 13
_EPOCH: Final = 24
_GROUP: Final = 44
_HEAD_KIND: Final = 10
_HEAD_FLAGS: Final = 11
_HEAD_EPOCH: Final = 24
_HEAD_SEQUENCE: Final = 32

PacketIds = Mapping[tuple[bytes, int, int], int]
"""The QoS 2 packet ids in use, by client id, partition and packet id, with the epoch of their
session."""


def rewrite(batch: Batch, epoch: int, in_use: PacketIds) -> Batch:
    """The batch under another epoch, without records of sessions.

    Invariant: the offset, the time and the content of each message stay, and so do positions and
    length of each batch. Only these change:

    - the epoch of the batch, and its place in a write group;
    - records of sessions and groups become CONTROL records, which recovery passes. The two kinds of
      nodes read them differently: a cluster's record of a group says what is finished, and a single
      broker's what a member has. Records at the end define the state again (`definitions`);
    - messages no longer name a session epoch, unless their QoS 2 packet id is still in use.

    Smallest counter-example for the last rule: a client's session with epoch 9 sent packet id 5,
    and ended. After the conversion the client begins again, with epoch 1. Recovery would find
    packet id 5 in use, and the client's next message with that id would be taken for a repetition.
    """
    content = bytearray(batch.content())
    attributes = batch.attributes & ~(ATTRIBUTE_STATE | ATTRIBUTE_GROUPED | ATTRIBUTE_MORE)
    if batch.attributes & ATTRIBUTE_STATE and _rewrite_heads(batch, content, in_use):
        attributes |= ATTRIBUTE_STATE
    content[_ATTRIBUTES] = attributes
    _U32.pack_into(content, _EPOCH, epoch)
    _U32.pack_into(content, _GROUP, 0)
    _U32.pack_into(content, _CRC, crc32(memoryview(content)[_CHECKED:]))
    return Batch(bytes(content), check=False)


def _rewrite_heads(batch: Batch, content: bytearray, in_use: PacketIds) -> bool:
    """Whether a record is left that recovery must apply."""
    has_state = False
    for index, (kind, flags, _) in enumerate(batch.heads()):
        head = HEADER_BYTES + index * HEAD_BYTES
        if kind in OF_SESSIONS:
            content[head + _HEAD_KIND] = CONTROL
            continue
        if kind == MESSAGE and flags & (FLAG_WILL | FLAG_PACKET_ID):
            flags = _rewrite_message(batch, index, content, head, in_use)
        has_state |= flags & STATE_FLAGS != 0 if kind == MESSAGE else kind != CONTROL
    return has_state


def _rewrite_message(
    batch: Batch, index: int, content: bytearray, head: int, in_use: PacketIds
) -> int:
    """The flags of the message at `head`, changed in `content`."""
    flags = content[head + _HEAD_FLAGS] & ~FLAG_WILL
    if flags & FLAG_PACKET_ID:
        (packet_id,) = _U64.unpack_from(content, head + _HEAD_SEQUENCE)
        epoch = in_use.get((batch.client_id(index), batch.partition, packet_id))
        if epoch is None:
            flags &= ~FLAG_PACKET_ID
        else:
            _U32.pack_into(content, head + _HEAD_EPOCH, epoch)
    content[head + _HEAD_FLAGS] = flags
    return flags


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
    complete(log, carried, (), source.now_us)
    _check(root, source, carried)


def complete(log: NewLog, carried: CarriedState, changes: Sequence[Record], now_us: int) -> None:
    """Defines a state at the end of a log, and completes the directory: the only node of a cluster.
    `changes`: the last records of the log, which define what `carried.entries` leaves out."""
    manifest = log.directory.manifest
    definitions = Definitions(manifest.partitions, now_us, manifest.node_id)
    added = [*changes, *log.append(definitions.records(carried))]
    log.finish(_entries(log, carried, added, now_us), now_us)
    found_cluster(log.directory.files, manifest)
    log.directory.write_manifest(manifest)


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

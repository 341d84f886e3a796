"""Reads the data directory that is converted. The directory stays as it is."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.io.conversion.carried import CarriedState, carry
from holdfast.io.disk.older_copy import APART
from holdfast.io.disk.older_copy import MARK as OLDER_COPY
from holdfast.io.disk.quarantine import MARK as BEGIN_ANEW
from holdfast.io.disk.storage import whole_snapshot
from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.recovery import OpenedJournal, open_journal, replay
from holdfast.log.journal.segment import Segment
from holdfast.log.snapshot import Snapshot
from holdfast.node.config import NodeConfig
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.replicated import ReplicatedState

UNFIT: Final = (BEGIN_ANEW, OLDER_COPY, APART)
"""The marks of a node whose directory cannot be trusted."""
VOID_RECORDS: Final = 10_000
"""The most records of a batch in place of damaged ones."""


class ConversionError(Exception):
    """A directory cannot be converted. The text says why and what to do."""


class Source:
    """A data directory whose node has ended, with its state after the last record."""

    def __init__(self, path: Path, directory: DataDirectory) -> None:
        """Reads the state. Raises `ConversionError` for a directory that cannot be trusted, and
        `OSError`. Damage, and records that are not understood, are passed, as a broker does."""
        self.path = path
        self.directory = directory
        self.manifest = directory.manifest
        self.opened = open_journal(directory, writes=False)
        self.journal = self.opened.journal
        self.now_us = time.time_ns() // 1000
        self.lost = 0
        """The records that damage has taken. `batches` has void ones in their place."""
        self._check()
        for partition, end in enumerate(self.journal.next_offset):
            self.journal.advance(partition, end)
        self.recovery = recover(directory, self.opened, self.now_us)

    @property
    def size_bytes(self) -> int:
        """The bytes of the log and the snapshots, approximately those of the new directory."""
        snapshots = self.directory.snapshots()
        return self.journal.size_bytes() + sum(
            self.directory.open_snapshot(each).size() for each in snapshots
        )

    def carried(self) -> CarriedState:
        """The state in a form that both kinds of nodes can have."""
        return carry(self.recovery, self.opened)

    def _check(self) -> None:
        for mark in UNFIT:
            if (self.path / mark).exists():
                raise ConversionError(
                    f"{self.path} cannot be trusted (it has the file {mark}): convert the directory"
                    " of another node"
                )

    def batches(self) -> Iterator[Batch]:
        """All batches, in the order of the log. In a replica's log, those that count."""
        ends = list(self.journal.start_offsets)
        at_us = self.now_us
        for segment in self.journal.segments:
            for batch in self._batches_of(segment):
                at_us = batch.base_timestamp_us
                yield from self._void(batch.partition, ends, batch.base_offset, at_us)
                yield batch
                ends[batch.partition] = batch.end_offset
        for partition, end in enumerate(self.journal.next_offset):
            yield from self._void(partition, ends, end, at_us)

    def _void(self, partition: int, ends: list[int], end: int, at_us: int) -> Iterator[Batch]:
        """Voids records for the offsets that damage has taken, which no other record may get."""
        self.lost += end - ends[partition]
        while ends[partition] < end:
            builder = BatchBuilder(partition, ends[partition])
            builder.add_void(min(end - ends[partition], VOID_RECORDS), at_us)
            ends[partition] += builder.count
            yield Batch(builder.build(0))

    def _batches_of(self, segment: Segment) -> Iterator[Batch]:
        index = segment.index
        index = self.opened.store.load_index(segment) if index is None else index
        file = self.opened.store.open_segment(segment.sequence)
        starts, ends = self.journal.start_offsets, segment.end_offsets()
        for number, position in enumerate(index.positions):
            partition = index.partitions[number]
            base = index.base_offsets[number]
            start = max(base, starts[partition])
            end = min(base + index.counts[number], ends[partition])
            if start < end:
                try:
                    batch = Batch(file.read(position, index.batch_end(number) - position))
                except CorruptBatch:
                    continue
                yield _part(batch, start, end)


def recover(
    directory: DataDirectory,
    opened: OpenedJournal,
    now_us: int,
    given: Snapshot | None = None,
) -> Recovery:
    """The state after the last record. `given`: a snapshot from elsewhere, in place of those of the
    directory. Raises `ConversionError` if the log does not define it."""
    config = NodeConfig(
        node_id=directory.manifest.node_id,
        partitions=directory.manifest.partitions,
    )
    state = RecordedState(config, opened.journal)
    state.wall_us = now_us
    recovery = ReplicatedState(state) if opened.journal.replicated else Recovery(state)
    offsets = [0] * config.partitions
    found = (whole_snapshot(directory, each) for each in reversed(directory.snapshots()))
    for snapshot in (given,) if given is not None else found:
        if snapshot is not None:
            offsets = snapshot.offsets
            for kind, data in snapshot.entries():
                recovery.apply_snapshot_entry(kind, data)
            break
    starts = opened.journal.start_offsets
    if given is None and any(known < start for known, start in zip(offsets, starts, strict=True)):
        raise ConversionError(
            "the log begins behind its newest snapshot, so some sessions and retained messages are"
            " not in it: convert a backup, or the directory of another node"
        )
    for record in replay(opened, offsets):
        recovery.apply(record)
    return recovery


def _part(batch: Batch, start: int, end: int) -> Batch:
    """The batch, or a batch of the part of it that counts."""
    if (start, end) == (batch.base_offset, batch.end_offset):
        return batch
    builder = BatchBuilder(batch.partition, start)
    for offset in range(start, end):
        builder.add(batch.record(offset - batch.base_offset))
    return Batch(builder.build(batch.epoch))


__all__ = ["ConversionError", "Source", "recover"]

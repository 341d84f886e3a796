"""A replica's journal that a test drives step by step, beside a list per partition that says what
it must hold."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.log.batch import ATTRIBUTE_RESET, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import create, read_manifest
from holdfast.log.files.filesystem import FileSystem
from holdfast.log.files.layout import DataDirectory, Manifest
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.compaction import ForgottenBatches, SegmentRewrite
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import OpenedJournal, open_journal, replay
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.journal.segment_list import forgotten
from holdfast.log.reading.cursor import LogReader
from holdfast.log.record import FLAG_RETAIN, MESSAGE, Record
from tests.support.journal_files import batches_of

TIME_US = 1_700_000_000_000_000
Content = tuple[int, bytes]
"""Epoch and payload."""


@dataclass
class PartitionModel:
    """What one partition holds."""

    start: int = 0
    contents: list[Content] = field(default_factory=list)
    bases: set[int] = field(default_factory=set)
    """Where batches begin."""
    watermark: int = 0
    removed_epoch: int = 0
    """Of the newest record that retention has removed."""
    is_stored: bool = True

    @property
    def end(self) -> int:
        return self.start + len(self.contents)

    @property
    def last_epoch(self) -> int:
        return self.contents[-1][0] if self.contents else self.removed_epoch

    def cut(self, offset: int) -> None:
        del self.contents[max(0, offset - self.start) :]
        self.bases = {base for base in self.bases if base < offset}

    def begin_at(self, offset: int) -> None:
        self.start = self.watermark = offset
        self.removed_epoch = 0
        self.contents = []
        self.bases = set()

    def begin_later(self, start: int) -> None:
        """Retention has removed what is before."""
        assert self.start <= start <= self.watermark
        if start > self.start:
            self.removed_epoch = self.contents[start - self.start - 1][0]
        del self.contents[: start - self.start]
        self.start = start
        self.bases = {base for base in self.bases if base >= start}

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        epochs = [self.removed_epoch, *(each[0] for each in self.contents)]
        found = max((each for each in epochs if each <= epoch), default=0)
        if not found:
            return 0, self.start
        return found, self.start + max(at for at, each in enumerate(epochs) if each == found)

    def between(self, start: int, end: int) -> list[Content]:
        return self.contents[max(0, start - self.start) : max(0, end - self.start)]


def build_batch(partition: int, base: int, epoch: int, payloads: list[bytes]) -> Batch:
    builder = BatchBuilder(partition, base)
    for payload in payloads:
        builder.add(
            Record(
                builder.partition,
                MESSAGE,
                flags=1 | (FLAG_RETAIN if len(payload) % 2 == 0 else 0),
                timestamp_us=TIME_US,
                topic=topic_of(payload),
                client_id=b"c",
                payload=payload,
            )
        )
    # As in a frame: other bytes around it.
    return Batch(b"frame..." + builder.build(epoch) + b"rest", 8)


def topic_of(payload: bytes) -> bytes:
    return b"t/%d" % (len(payload) % 5)


class ReplicaBench:
    """Opens (or creates) what is on `files`."""

    def __init__(self, files: FileSystem, partitions: int = 3, segment_bytes: int = 2048) -> None:
        if "manifest.json" not in files.list(""):
            create(files, Manifest("n1", partitions, "", "c", "0123"))
        self.directory = DataDirectory(files, read_manifest(files, Path("/data")))
        self.opened: OpenedJournal = open_journal(self.directory, segment_bytes)
        self.journal: Journal = self.opened.journal
        self.reader = LogReader(self.journal, self.opened.store)
        self.writer = GroupWriter(self.directory, durable=True, allocate_bytes=0)
        self.in_flight: WriteGroup | None = None
        self.writes_indexes = True

    def append(self, partition: int, payload: bytes) -> int:
        return self.journal.append(
            Record(
                partition,
                MESSAGE,
                flags=1 | (FLAG_RETAIN if len(payload) % 2 == 0 else 0),
                timestamp_us=TIME_US,
                topic=topic_of(payload),
                client_id=b"c",
                payload=payload,
            )
        )

    def write(self) -> bool:
        """Take a group and write it; `finish` reports it."""
        assert self.in_flight is None
        group = self.in_flight = self.journal.close_write_group()
        if group is not None:
            self.writer.write(group)
        return group is not None

    def finish(self) -> None:
        group, self.in_flight = self.in_flight, None
        if group is None:
            return
        self.journal.wrote(group)
        self.journal.commit(group)
        if group.sealed is not None and self.writes_indexes:
            index = group.sealed.index
            assert isinstance(index, ActiveIndex)
            data = index.encode(self.opened.store.pause)
            self.directory.write_index(group.sealed.sequence, data)
            group.sealed.index = None

    def flush(self) -> None:
        self.finish()
        self.write()
        self.finish()

    def contents(self, partition: int, start: int, end: int) -> list[Content]:
        """As a follower would be sent them; what is beyond the last batch's part is left out."""
        found: list[Content] = []
        expected = start
        while start < end:
            batches = self.reader.read_batches(partition, start, end, 300)
            if not batches:
                break
            for data in batches:
                batch = Batch(data)
                assert batch.partition == partition
                assert batch.base_offset <= expected < batch.end_offset
                for record in batch.records()[expected - batch.base_offset :]:
                    if record.offset < end:
                        found.append((batch.epoch, record.payload))
                expected = start = batch.end_offset
        return found

    def replayed(
        self, starts: list[int] | None = None, limits: list[int] | None = None
    ) -> list[list[bytes]]:
        """Payloads per partition, checked to be dense."""
        found: list[list[bytes]] = [[] for _ in range(self.journal.partitions)]
        expected = [
            max(pair)
            for pair in zip(
                self.journal.start_offsets, starts or self.journal.start_offsets, strict=True
            )
        ]
        for record in replay(self.opened, starts, limits=limits, state_only=False):
            assert record.offset == expected[record.partition]
            expected[record.partition] += 1
            found[record.partition].append(record.payload)
        return found


def model_of_files(directory: DataDirectory, partitions: int) -> list[PartitionModel]:
    """What a plain walk through all whole batches gives, and through the indexes as far as they
    know of more: the end that was cut off when a segment was begun."""
    models = [PartitionModel() for _ in range(partitions)]
    start = directory.read_start()
    if start is not None:
        for model, offset in zip(models, start[1], strict=True):
            model.begin_at(offset)
        for partition, epoch, _ in directory.read_start_epochs():
            models[partition].removed_epoch = epoch
    sequences = directory.segments()
    for sequence in sequences:
        file = directory.open_segment(sequence)
        data = file.read(0, file.size())
        head = directory.read_index_head(sequence)
        if head is not None and head.log_bytes == len(data) and sequence != sequences[-1]:
            first: dict[int, int] = {}
            for batch in batches_of(data):
                first.setdefault(batch.partition, batch.base_offset)
            for number, model in enumerate(models):
                offset = head.start_offsets[number]
                if first.get(number, offset) <= offset < model.end:
                    model.cut(offset)
                    model.start = min(model.start, offset)
        for batch in batches_of(data):
            model = models[batch.partition]
            if batch.attributes & ATTRIBUTE_RESET:
                model.begin_at(batch.base_offset)
            else:
                if not model.contents and batch.base_offset > model.end:
                    # What is void in the oldest segment; the journal began below it.
                    model.start = batch.base_offset
                assert batch.base_offset <= model.end
                model.cut(batch.base_offset)
                model.start = min(model.start, batch.base_offset)
                model.bases.add(batch.base_offset)
                model.contents += [(batch.epoch, each.payload) for each in batch.records()]
    return models


class RandomReplica:
    """Random steps on a bench and its models."""

    def __init__(self, bench: ReplicaBench, seed: int) -> None:
        self.bench = bench
        self.chance = random.Random(seed)
        self.models = [PartitionModel() for _ in range(bench.journal.partitions)]
        self.epoch = 0
        self.count = 0
        self.leads = [False] * bench.journal.partitions
        self.open_base: dict[int, int] = {}
        # Sequence and offsets of what would be the newest snapshot.
        self.snapshot: tuple[int, list[int]] | None = None
        # The partitions whose log began again since, perhaps below that.
        self.begun_again: set[int] = set()
        self.removed = 0
        self.forgets = 0.3
        self.reclaims = 0.3
        self.reclaimed_bytes = 0

    def step(self) -> None:
        chance = self.chance
        choice = chance.choices(
            [
                self.append,
                self.follow,
                self.truncate,
                self.reset,
                self.forget,
                self.place,
                self.advance,
                self.write,
                self.checkpoint,
                self.retain,
                self.reclaim,
            ],
            [6, 6, 2, 0.3, self.forgets, 2 * min(self.forgets, 1.0), 6, 6, 1, 2, self.reclaims],
        )[0]
        partition = chance.randrange(len(self.models))
        if not self.models[partition].is_stored:
            needs_log = choice in (self.append, self.follow, self.truncate, self.advance)
            choice = self.reset if choice == self.append else self.place if needs_log else choice
        choice(partition)

    def payload(self) -> bytes:
        self.count += 1
        return b"%d " % self.count + b"x" * self.chance.randint(0, 150)

    def lead(self, partition: int) -> None:
        self.epoch += 1
        self.bench.journal.lead(partition, self.epoch)
        self.leads[partition] = True
        self.open_base.pop(partition, None)

    def append(self, partition: int) -> None:
        model = self.models[partition]
        if not self.leads[partition] or self.chance.random() < 0.1:
            self.lead(partition)
        epoch = self.bench.journal.epochs[partition]
        for _ in range(self.chance.randint(1, 3)):
            payload = self.payload()
            assert self.bench.append(partition, payload) == model.end
            if partition not in self.open_base:
                self.open_base[partition] = model.end
                model.bases.add(model.end)
            model.contents.append((epoch, payload))

    def follow(self, partition: int) -> None:
        model = self.models[partition]
        if self.leads[partition] or self.chance.random() < 0.2:
            self.epoch += 1
            epoch = self.epoch
        else:
            epoch = max(1, model.last_epoch)
        self.leads[partition] = False
        payloads = [self.payload() for _ in range(self.chance.randint(1, 3))]
        self.bench.journal.append_batch(build_batch(partition, model.end, epoch, payloads))
        self.open_base.pop(partition, None)
        model.bases.add(model.end)
        model.contents += [(epoch, payload) for payload in payloads]

    def truncate(self, partition: int) -> None:
        model = self.models[partition]
        places = sorted(base for base in model.bases if base >= model.watermark)
        if places:
            offset = self.chance.choice(places)
            self.bench.journal.truncate(partition, offset)
            model.cut(offset)
            self.leads[partition] = False
            self.open_base.pop(partition, None)

    def reset(self, partition: int) -> None:
        model = self.models[partition]
        offset = model.watermark + self.chance.randint(0, 60)
        if not model.is_stored:
            # Its leader's log may begin anywhere.
            offset = self.chance.randint(0, offset)
            model.is_stored = True
        self.begun_again.add(partition)
        self.bench.journal.reset(partition, offset)
        model.begin_at(offset)
        self.leads[partition] = False
        self.open_base.pop(partition, None)

    def forget(self, partition: int) -> None:
        model = self.models[partition]
        self.bench.journal.forget(partition)
        if model.is_stored:
            model.begin_at(model.watermark)
            model.is_stored = False
        self.leads[partition] = False
        self.open_base.pop(partition, None)

    def place(self, partition: int) -> None:
        """Moves the positions of a partition that is not stored, down as after a restart or up."""
        model = self.models[partition]
        if not model.is_stored or not model.contents:
            offset = max(0, model.start + self.chance.randint(-40, 80))
            self.bench.journal.place(partition, offset)
            model.begin_at(offset)
            model.is_stored = False
            self.leads[partition] = False
            self.open_base.pop(partition, None)

    def advance(self, partition: int) -> None:
        model = self.models[partition]
        end = self.bench.journal.durable_offset[partition]
        if self.chance.random() < 0.1:
            # Nobody waits for a replica that is not in sync.
            end = model.end
        if end > model.watermark:
            model.watermark = self.chance.randint(model.watermark, end)
            self.bench.journal.advance(partition, model.watermark)

    def write(self, _: int) -> None:
        if self.bench.in_flight is not None:
            self.bench.finish()
        else:
            self.bench.write()
            self.open_base.clear()

    def retain(self, _: int) -> None:
        """Remember where a snapshot would begin, and remove what an earlier one has."""
        journal = self.bench.journal
        if self.snapshot is not None:
            sequence = self.snapshot[0]
            names = [segment.sequence for segment in journal.segments]
            removed = journal.remove_oldest(sum(name <= sequence for name in names[1:]))
            if removed:
                oldest = journal.segments[0]
                self.bench.directory.write_start(
                    oldest.sequence, oldest.head.start_offsets, journal.start_epochs()
                )
                for segment in removed:
                    self.bench.directory.remove_segment(segment.sequence)
                    self.bench.reader.forget_segment(segment.sequence)
                self.bench.directory.sync_journal()
                self.removed += len(removed)
                for model, start in zip(self.models, journal.start_offsets, strict=True):
                    model.begin_later(start)
        offsets = list(journal.high_watermark)
        if self.begun_again or not all(model.is_stored for model in self.models):
            # A snapshot waits until the marks are durable.
            self.bench.flush()
            self.open_base.clear()
        if journal.checkpoint().offsets == journal.logged(offsets):
            self.snapshot = journal.snapshot_sequence(offsets), offsets
            self.begun_again.clear()

    def reclaim(self, _: int) -> None:
        """Rewrites some segments without the batches of forgotten partitions."""
        bench = self.bench
        bench.flush()
        self.open_base.clear()
        self.checkpoint(0)
        marks = forgotten(bench.journal.segments)
        for old in bench.journal.segments[:-1]:
            old.note_forgotten(marks)
            if old.index is not None or self.chance.random() < 0.3:
                continue
            index = bench.opened.store.load_index(old)
            dead = ForgottenBatches(index, marks)
            if not dead.bytes_freed:
                continue
            made = SegmentRewrite(bench.directory, old, dead.rewrite)
            while made.step():
                pass
            if not made.is_complete:
                # Its missing offsets would be others: it stays as it is.
                assert made._index.head.missing != old.head.missing
                made.discard()
                continue
            new = made.finish()
            bench.reader.forget_segment(old.sequence)
            assert new.size_bytes == old.size_bytes - dead.bytes_freed
            again = ForgottenBatches(bench.opened.store.load_index(new), marks)
            assert not again.bytes_freed
            bench.journal.replace_segment(new)
            self.reclaimed_bytes += dead.bytes_freed

    def checkpoint(self, _: int) -> None:
        self.bench.directory.write_watermarks(self.bench.journal.checkpoint())

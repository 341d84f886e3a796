"""Makes a data directory from a lake: its messages, and a saved state of the broker.

The table `records` has the messages with their offsets. Other records have offsets, too. In their
places are void ones, and records at the end define sessions and groups again, as in a converted log
(`holdfast.io.conversion`). Retained messages and bans whose records are not messages are recorded
again there. So a node that follows the log gets the state that the snapshot has.

Invariant: a flag of a message that changes state (a producer's number, a delay) stays only where
the state still has its effect. Counter-example: a delayed message was published long ago. The
record of that does not say so in the table, so a node that follows the log would publish it again.
"""

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.cli.backup.manifest import BackupError, NewDirectory, NotEmpty
from holdfast.cli.backup.restoration import PARTIAL
from holdfast.cli.log.lake_reader import records_of
from holdfast.cli.log.records import time_text
from holdfast.cli.text import count_text
from holdfast.client.log.lake.files import readable
from holdfast.client.log.lake.records import LakeRecords, read_lake
from holdfast.client.log.lake.states import SavedState, saved_states, usable
from holdfast.client.log.reading.offsets import OffsetRange, generation_in
from holdfast.client.log.reading.seam import Seam
from holdfast.io.conversion.carried import CarriedState, carry
from holdfast.io.conversion.conversion import NewLog, complete
from holdfast.io.conversion.definitions import FIRST_EPOCH
from holdfast.io.conversion.source import recover
from holdfast.io.disk.storage import now_text
from holdfast.log.batch import DELTA_US_MAX, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.columns.decode import SCHEMA
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import GENERATION_BITS, DataDirectory, Manifest
from holdfast.log.journal.journal import SEGMENT_BYTES_DEFAULT, Journal
from holdfast.log.journal.recovery import open_journal
from holdfast.log.partition import partition_of
from holdfast.log.reading.topic_filter import TopicFilter
from holdfast.log.record import (
    BAN,
    CONTROL,
    FLAG_DELAYED,
    FLAG_PRODUCER,
    FLAG_RETAIN,
    PRODUCER,
    RETAINED,
    Record,
)
from holdfast.log.snapshot import CorruptSnapshot, Snapshot, SnapshotEncoder
from holdfast.node.config import NodeConfig
from holdfast.node.publish.delayed_table import DELAYED_PREFIX
from holdfast.node.publish.producers import decode_producer
from holdfast.node.state.ban_records import ban_key, decode_ban
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.retention_pins import needed_positions
from holdfast.node.state.snapshot_entries import (
    SNAPSHOT_BAN,
    SNAPSHOT_DELAYED,
    SNAPSHOT_MEMBER,
    SNAPSHOT_PRODUCER,
    SNAPSHOT_RETAINED,
)

BATCH_BYTES: Final = 256 << 10
"""The bytes of a batch of the new log."""
LINES_MAX: Final = 8
"""The most partitions whose offsets are printed."""


class LakeSource:
    """The part of a lake that becomes a log: messages up to some offsets, and a saved state."""

    def __init__(self, place: str, until_us: int | None, *, messages_only: bool) -> None:
        """Raises `BackupError` if there is no state for the messages, unless they are wanted
        alone, and `LakeError`."""
        self.lake = LakeRecords(place)
        self.place = place
        self.lake.refresh()
        bounds = self.lake.bounds
        self.ends = {p: bound.end for p, bound in bounds.items()}
        if until_us is not None:
            at = self.lake.offsets_at(until_us)
            self.ends = {p: min(end, at.get(p, end)) for p, end in self.ends.items()}
        self.torn: list[str] = []
        """Lines about newer states that are damaged."""
        self.partitions = max(bounds, default=0) + 1
        self.state: SavedState | None = None
        self.snapshot = _nothing(self.partitions) if messages_only else self._choose_state()
        """The replicated state. The messages behind its offsets are applied over it."""
        if self.partitions > len(self.snapshot.offsets):
            raise BackupError(f"{place}: the state is of another log than the messages")
        self.partitions = len(self.snapshot.offsets)
        self.starts = [bounds[p].first if p in bounds else 0 for p in range(self.partitions)]

    def _choose_state(self) -> Snapshot:
        """Opens the newest whole state that fits the messages."""
        states = saved_states(self.lake.path)
        for state in reversed(usable(states, self.lake.commit, self.ends)):
            try:
                snapshot = self._opened(state)
            except (CorruptSnapshot, FileNotFoundError) as error:
                why = error if isinstance(error, CorruptSnapshot) else "its file is missing"
                self.torn.append(f"the state of {time_text(state.taken_us)} is damaged: {why}")
                continue
            self.state = state
            return snapshot
        reason = (
            "; ".join(self.torn)
            or ("those there are later, or of another log" if states else "")
            or "`holdfast pipeline run` saves it every five minutes"
        )
        raise BackupError(
            f"{self.lake.path} has no state of the broker for these messages ({reason}). To restore"
            " the messages without sessions and queues, add --messages-only"
        )

    def _opened(self, state: SavedState) -> Snapshot:
        path = state.snapshot(self.lake.path)
        file = path.open("rb") if isinstance(path, Path) else readable(path)

        def read_at(position: int, length: int) -> bytes:
            file.seek(position)
            data: bytes = file.read(length)
            return data

        snapshot = Snapshot(read_at, state.bytes)
        snapshot.check()
        return snapshot


def _nothing(partitions: int) -> Snapshot:
    """The state before the first message."""
    data = b"".join(SnapshotEncoder(0, [0] * partitions, 0).finish())
    return Snapshot(lambda position, length: data[position : position + length], len(data))


@dataclass
class LakeMessages:
    """The messages of a lake as batches of a log, without gaps."""

    source: LakeSource
    count: int = 0
    later: int = 0
    """Those of them that are later than the saved state."""
    last_us: int = 0
    retained: dict[bytes, int] = field(default_factory=dict)
    """The offset of the last message of each topic that was to be retained."""
    delayed: set[tuple[int, int]] = field(default_factory=set)
    """The places of delayed messages."""

    def __post_init__(self) -> None:
        self._next = list(self.source.starts)
        # Records from these offsets on have their effect once more.
        self._known = self.source.snapshot.offsets
        self._open: dict[int, BatchBuilder] = {}
        self._waiting: set[tuple[int, int]] = set()
        self._producers: set[bytes] = set()
        for kind, data in self.source.snapshot.entries():
            if kind == SNAPSHOT_DELAYED:
                batch = Batch(data)
                self._waiting.add((batch.partition, batch.base_offset))
            elif kind == SNAPSHOT_PRODUCER:
                self._producers.add(decode_producer(data)[0])

    def batches(self) -> Iterator[Batch]:
        """Yields all batches. The offsets of a partition ascend without a gap."""
        source = self.source
        ends = source.ends
        wanted = [OffsetRange(p, self._next[p], end) for p, end in sorted(ends.items())]
        parts = Seam(source.lake.bounds, {}, source.lake.skipped).divide(
            each for each in wanted if each.start < each.end
        )
        pieces = source.lake.pieces(parts.lake)
        for rows in read_lake(source.place, pieces, SCHEMA, TopicFilter()):
            for record in records_of(rows.rows):
                yield from self._add_void(record.partition, record.offset, record.timestamp_us)
                yield from self._add(self._noted(record))
        for partition, end in sorted(ends.items()):
            yield from self._add_void(partition, end, self.last_us or time.time_ns() // 1000)
        yield from self._closed()

    def appended(self, records: Iterable[Record]) -> Iterator[Batch]:
        """Yields batches of further records, which get their offsets."""
        for record in records:
            yield from self._add(record)
        yield from self._closed()

    def _closed(self) -> Iterator[Batch]:
        for builder in self._open.values():
            yield Batch(builder.build(FIRST_EPOCH))
        self._open.clear()

    def _add_void(self, partition: int, end: int, at_us: int) -> Iterator[Batch]:
        """Fills the offsets of records that the lake does not have."""
        while self._next[partition] < end:
            yield from self._add(Record(partition, CONTROL, timestamp_us=at_us))

    def _add(self, record: Record) -> Iterator[Batch]:
        partition = record.partition
        builder = self._open.get(partition)
        if builder is not None:
            delta_us = record.timestamp_us - builder.base_timestamp_us
            # A batch changes the time of a record that is before its first one.
            if builder.size_bytes >= BATCH_BYTES or not 0 <= delta_us <= DELTA_US_MAX:
                yield Batch(builder.build(FIRST_EPOCH))
                builder = None
        if builder is None:
            builder = self._open[partition] = BatchBuilder(partition, self._next[partition])
        self._next[partition] = builder.add(record) + 1

    def _noted(self, record: Record) -> Record:
        """Notes a message. It changes state only where the saved state has the effect, or is
        older."""
        place, topic = (record.partition, record.offset), record.topic
        is_later = record.offset >= self._known[record.partition]
        if topic.startswith(DELAYED_PREFIX):
            if is_later or place in self._waiting:
                record.flags |= FLAG_DELAYED
                self.delayed.add(place)
        elif record.flags & FLAG_RETAIN:
            self.retained.pop(topic, None)
            if record.payload:
                self.retained[topic] = record.offset
        if not is_later and record.producer not in self._producers:
            record.flags &= ~FLAG_PRODUCER
            record.producer, record.producer_epoch, record.sequence = b"", 0, 0
        self.count += 1
        self.later += is_later
        self.last_us = max(self.last_us, record.timestamp_us)
        return record


def restore_from_lake(
    source: LakeSource, target: Path, node_id: str, since_us: int | None
) -> list[str]:
    """Makes the data directory of a node. Returns lines for people.

    Raises `BackupError`, `LakeError`, `ConversionError` or `OSError`.
    """
    try:
        made = NewDirectory(target, PARTIAL)
    except NotEmpty as error:
        raise BackupError(str(error)) from None
    if since_us is not None:
        _begin_later(source, since_us)
    with made as partial:
        return _fill(source, partial, node_id)


def _begin_later(source: LakeSource, since_us: int) -> None:
    """Lets the log begin at a time, or before, at what the state, a session or a group needs."""
    state = RecordedState(
        NodeConfig(partitions=source.partitions),
        Journal(source.partitions, SEGMENT_BYTES_DEFAULT, replicated=True),
    )
    replicated = ReplicatedState(state)
    for kind, data in source.snapshot.entries():
        replicated.apply_snapshot_entry(kind, data)
    at = source.lake.offsets_at(since_us)
    needed = [at.get(p, source.ends.get(p, 0)) for p in range(source.partitions)]
    if source.state is not None:
        sessions = state.sessions.values()
        needs = [needed_positions(state, each) for each in sessions if each.expiry_s]
        for each in (*needs, *replicated.group_positions.values(), source.snapshot.offsets):
            needed = list(map(min, needed, each))
    source.starts = list(map(max, source.starts, needed))


def _fill(source: LakeSource, root: Path, node_id: str) -> list[str]:
    root.mkdir(mode=0o750, parents=True)
    name, generation = generation_in(source.lake.identity())
    kind, _, cluster_id = name.partition(" ")
    manifest = Manifest(
        node_id,
        source.partitions,
        now_text(),
        cluster_id=cluster_id if kind == "cluster" else secrets.token_hex(8),
        incarnation=secrets.token_hex(8),
        generation=generation,
        former=((generation, tuple(source.ends.get(p, 0) for p in range(source.partitions))),),
        restored=secrets.randbits(GENERATION_BITS) or 1,
    )
    directory = DataDirectory(OsFileSystem(root), manifest)
    log = NewLog(directory, source.starts, sum(source.starts), SEGMENT_BYTES_DEFAULT)
    messages = LakeMessages(source)
    log.copy(messages.batches())
    opened = open_journal(directory, writes=False)
    ends = opened.journal.next_offset
    for partition, end in enumerate(ends):
        opened.journal.advance(partition, end)
    now_us = time.time_ns() // 1000
    recovery = recover(directory, opened, now_us, source.snapshot)
    for session in recovery.state.sessions.values():
        # Another message will get this offset.
        ahead = [n for n, each in session.inflight.items() if each.offset >= ends[each.partition]]
        for packet_id in ahead:
            del session.inflight[packet_id]
    carried = carry(recovery, opened)
    for each in carried.sessions:
        # The messages of the lake have no packet ids, so a node that follows the log would know
        # none of these. A client may have used one again since the state was saved. Its message
        # would be acknowledged as a repetition, and not stored.
        each.inbound = {}
    has_member = any(kind == SNAPSHOT_MEMBER for kind, _ in carried.entries)
    changes = list(_changes(carried, messages, source.partitions, now_us))
    log.copy(messages.appended(changes))
    complete(log, carried, changes, now_us)
    return [*_contents(source, messages, carried), *_missing(source, messages, has_member)]


def _changes(
    carried: CarriedState, messages: LakeMessages, partitions: int, now_us: int
) -> Iterator[Record]:
    """The records of what no message of the lake says. Those of retained messages, bans and delayed
    messages take the place of `carried.entries`."""
    entries, carried.entries = carried.entries, []
    in_log = dict(messages.retained)
    for kind, data in entries:
        if kind == SNAPSHOT_BAN:
            ban = decode_ban(data)
            key = ban_key(ban.scope, ban.name)
            home = partition_of(key, partitions)
            yield Record(home, BAN, timestamp_us=now_us, client_id=key, payload=data)
            continue
        if kind in (SNAPSHOT_RETAINED, SNAPSHOT_DELAYED):
            record = Batch(data).record(0)
            if kind == SNAPSHOT_RETAINED:
                is_same = in_log.pop(record.topic, -1) == record.offset and not record.audience
                record.kind = RETAINED
            else:
                is_same = (record.partition, record.offset) in messages.delayed
            if not is_same:
                yield record
                continue
        if kind == SNAPSHOT_PRODUCER:
            producer, places = decode_producer(data)
            for each in places.positions():
                if each.owner:
                    owner = each.owner.encode()
                    yield Record(
                        each.partition, PRODUCER, 0, now_us, client_id=owner, producer=producer
                    )
        if kind != SNAPSHOT_MEMBER:
            carried.entries.append((kind, data))
    for topic in in_log:
        yield Record(partition_of(topic, partitions), RETAINED, FLAG_RETAIN, now_us, topic)


def _contents(source: LakeSource, messages: LakeMessages, carried: CarriedState) -> Iterator[str]:
    """Says what the directory has."""
    until = f", the last one of {time_text(messages.last_us)}" if messages.count else ""
    yield f"{count_text(messages.count, 'message')}{until}"
    ends = [(p, end) for p, end in sorted(source.ends.items()) if end > source.starts[p]]
    for partition, end in ends[:LINES_MAX]:
        yield f"partition {partition}: messages until offset {end}"
    if len(ends) > LINES_MAX:
        yield f"and {count_text(len(ends) - LINES_MAX, 'partition')} more"
    if source.state is None:
        yield "no sessions, queues and bans; retained messages are those of the messages"
        return
    sessions = count_text(len(carried.sessions), "session")
    queues = count_text(len(carried.queues), "queue")
    as_of = time_text(source.snapshot.created_us)
    yield f"{sessions}, {queues} and retained messages as of {as_of}"


def _missing(source: LakeSource, messages: LakeMessages, has_member: bool) -> Iterator[str]:
    """Says what the directory lacks."""
    yield from source.torn
    if source.state is not None:
        yield "missing: sessions, subscriptions, bans and acknowledgements of a later time"
        later = count_text(messages.later, "later message")
        yield f"{later}: they come again to sessions that have acknowledged them"
    lost = sum(each.records for each in source.lake.skipped)
    if lost:
        yield f"missing: {count_text(lost, 'offset')} that the lake could not read in the log"
    topics = source.lake.own_topics()
    if topics:
        yield f"missing: messages of other topics than {', '.join(topics)}"
    if has_member:
        yield "missing: the member of a federation, with the messages that waited for others"
    yield "missing: users and tokens of the admin port, which no lake has"

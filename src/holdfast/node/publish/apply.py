"""Applies committed batches to the replicated state and delivers them to subscribers.

`ApplyingLog` is the journal as replication uses it. It keeps appended batches in memory until they
are committed, so that none is read back from the disk.

Invariant: `delivered[p]` is the first offset of partition p that is not applied. Every record below
it was applied once, in order. It never passes the high watermark, except while the partition is
copied (`ApplyingLog.fed`): its records are fed, and the log follows. Where that, or an invariant of
the state itself, does not hold, the node applies nothing more of the partition.
Counter-example: a record is applied before its commit, and truncated when the leader changes. A
client has received a message that the log does not have.

A commit may cover hundreds of thousands of records, because all of them waited for one replica. So
a turn applies a bounded number of them, and the rest is `Work`. Meanwhile `delivered` is behind the
high watermark. A decision on applied state compares with `delivered`. A later commit of the
partition only moves the end, so nothing passes the records that wait.

Replicated state that came from another node (`state.transfer`) may be ahead of it.
"""

from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.delivery.delivery import deliver, deliver_committed_qos0
from holdfast.node.delivery.log_replay import message_of
from holdfast.node.node_state import NodeState, Work
from holdfast.node.publish.delayed_table import is_waiting
from holdfast.node.routing.routing import find_route
from holdfast.node.state.replicated import ReplicatedState
from holdfast.protocol.topics.names import InvalidTopic

RECORDS_PER_TURN: Final = 1000
"""The most steps of records that one turn applies as they are committed, all partitions together.
Later records become `Work`. A message is one step."""
STATE_STEPS: Final = 5
"""The steps of a record that changes the replicated state."""
BACKLOG_SHARE: Final = 64
"""A slice applies at least this part of the records that wait, so that their number, and with it
their memory, is bounded by what the links bring in this many turns."""
SLICE_MAX: Final = 8000
"""The most steps of that part, some 16 ms. Beyond it the length of a turn comes before the memory:
a node that is late with its heartbeats counts as down, and more waits then."""


class ApplyingLog:
    """The journal as a `partitions.log.ReplicaLog`, with the uncommitted batches of each partition.

    Batches that this node builds as leader arrive through `built`, those of other leaders through
    `append_batch`.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.uncommitted: list[deque[Batch]] = [deque() for _ in range(journal.partitions)]
        # Partition -> the offset up to which its records were fed, while its log is copied. Records
        # below are stored and not applied again. Invariant: the batches in `uncommitted` are all of
        # the log with records from there on.
        self.fed: dict[int, int] = {}

    @property
    def next_offset(self) -> list[int]:
        return self._journal.next_offset

    @property
    def durable_offset(self) -> list[int]:
        return self._journal.durable_offset

    @property
    def high_watermark(self) -> list[int]:
        return self._journal.high_watermark

    @property
    def start_offsets(self) -> list[int]:
        return self._journal.start_offsets

    def lead(self, partition: int, epoch: int) -> None:
        self._journal.lead(partition, epoch)

    def append_batch(self, batch: Batch) -> None:
        self._journal.append_batch(batch)
        self.built(batch)

    def built(self, batch: Batch) -> None:
        """Adds a batch that this node has built as leader."""
        batches = self.uncommitted[batch.partition]
        assert not batches or batches[-1].end_offset <= batch.base_offset, "two batches overlap"
        if batch.end_offset > self.fed.get(batch.partition, 0):
            batches.append(batch)

    def note_fed(self, partition: int, offset: int) -> None:
        """Notes that the records of a partition below the offset were fed."""
        if partition not in self.fed:
            self._journal.place(partition, offset)
            return
        assert offset >= self.fed.get(partition, 0), "a mark falls"
        self.fed[partition] = offset
        batches = self.uncommitted[partition]
        while batches and batches[0].end_offset <= offset:
            batches.popleft()

    def truncate(self, partition: int, offset: int) -> None:
        self._journal.truncate(partition, offset)
        batches = self.uncommitted[partition]
        while batches and batches[-1].end_offset > offset:
            batches.pop()

    def reset(self, partition: int, offset: int) -> None:
        self._journal.reset(partition, offset)
        self.uncommitted[partition].clear()

    def forget(self, partition: int, offset: int) -> None:
        """Ends the log of a partition here. Its records from `offset` on are fed."""
        self._journal.forget(partition)
        self._journal.place(partition, offset)
        self.uncommitted[partition].clear()
        self.fed.pop(partition, None)

    def advance(self, partition: int, offset: int) -> None:
        self._journal.advance(partition, offset)

    def last_epoch(self, partition: int) -> int:
        return self._journal.last_epoch(partition)

    def epoch_end(self, partition: int, epoch: int) -> tuple[int, int]:
        return self._journal.epoch_end(partition, epoch)


class Applier(Work):
    """The step from a committed batch to the replicated state, to subscribers and to promises.

    Invariant: a record changes the replicated state before its promise is resolved. A client that
    has its PUBACK then finds what it has published.
    """

    def __init__(
        self,
        state: NodeState,
        replicated: ReplicatedState,
        log: ApplyingLog,
        pending: Mapping[int, object],
        settle: Callable[[int, int, bytes], None],
        on_session: Callable[[Record], None],
        on_retained: Callable[[Record], None],
    ) -> None:
        """`settle(ticket, partition, client id)`: a record with a ticket of `pending` was applied.
        `on_session`: a SESSION or CURSOR record or a will was applied. `on_retained`: a record that
        sets or clears a retained message was applied."""
        super().__init__()
        self._state = state
        self._replicated = replicated
        self.filters = replicated.filters
        self._log = log
        self._pending = pending
        self._settle = settle
        self.on_session = on_session
        self._on_retained = on_retained
        # Per partition: records below this offset are in the replicated state, although they were
        # not delivered here.
        self.starts: list[int] = [0] * len(state.delivered)
        # The partitions with messages of QoS 0 that follow a record, and the call that delivers
        # those that follow the applied ones. Qos0Routing sets both.
        self.followed: Container[int] = ()
        self.release_followers: Callable[[int], None] = lambda partition: None
        # Called with the partition after a slice of committed records. PartEffects sets it.
        self.on_applied: Callable[[int], None] = lambda partition: None
        # Called with a partition whose log has reached what was fed. It is applied from there on.
        self.on_copied: Callable[[int], None] = lambda partition: None
        # Called with a partition whose state is wrong. PartEffects sets it.
        self.on_broken: Callable[[int, AssertionError], None] = lambda partition, error: None
        # The partitions that are fed to other nodes, and the call with a batch and the offsets
        # [begin, end) of records that are applied now. Feeds sets both.
        self.fed: Container[int] = ()
        self.on_committed: Callable[[Batch, int, int], None] = lambda batch, begin, end: None
        # The partitions of which nothing more is applied.
        self._broken: set[int] = set()
        # Partition -> its high watermark, while it is not applied up to there. Invariant:
        # delivered <= high_watermark <= the end of the log.
        self._ends: dict[int, int] = {}
        self.records_per_turn = RECORDS_PER_TURN
        self._left = RECORDS_PER_TURN

    def end_turn(self) -> None:
        """Allows the next turn its number of records."""
        self._left = self.records_per_turn

    def apply_to(self, partition: int, high_watermark: int) -> None:
        """Applies the batches of a partition up to its high watermark, or begins to."""
        if partition in self._log.fed and not self._end_copy(partition, high_watermark):
            return
        if partition not in self._ends:
            self._left -= self._advance(partition, high_watermark, self._left)
        if self._is_behind(partition, high_watermark):
            self._ends[partition] = high_watermark
            self.has_more = True
            self._state.start_work(self)

    def copy(self, partition: int, offset: int) -> None:
        """Notes that the records of a partition below the offset were fed, and that its log, which
        is shorter, is copied from its leader."""
        assert partition not in self._ends, "committed records wait"
        self._state.delivered[partition] = offset
        self._log.fed[partition] = 0
        self._log.note_fed(partition, offset)
        self._end_copy(partition, self._log.high_watermark[partition])

    def begin_fed(self, partition: int, offset: int) -> None:
        """Goes on behind the state of a partition that is fed."""
        self._state.delivered[partition] = offset
        self._log.note_fed(partition, offset)

    def note_fed(self, partition: int, offset: int) -> None:
        """Notes that the records of a partition below the offset were fed."""
        self._log.note_fed(partition, offset)

    def store(self, partition: int) -> None:
        """Begins to store a partition that is fed. Its leader's log is copied from the start."""
        self._log.reset(partition, 0)
        self.copy(partition, self._state.delivered[partition])

    def begin_log(self, partition: int) -> None:
        """Begins the log of a partition that is fed behind its state, because no node has more."""
        self._log.reset(partition, self._state.delivered[partition])

    def log_begins(self, partition: int, offset: int) -> bool:
        """Handles a log that begins again at `offset`. Returns whether it is a copied one that was
        fed up to there, so that its state is complete. Otherwise it is not copied any more."""
        fed = self._log.fed.get(partition, -1)
        if fed >= offset:
            self._end_copy(partition, offset)
            return True
        if fed >= 0:
            del self._log.fed[partition]
            self.on_copied(partition)
        return False

    def begin_again(self, partition: int) -> None:
        """Leaves the state of a partition that is fed, and the log that is copied behind it."""
        self.starts[partition] = self._state.delivered[partition] = 0
        self._ends.pop(partition, None)
        self._log.forget(partition, 0)

    def pause(self, partition: int) -> None:
        """Applies nothing more of the log of a partition, until `apply_to`. Its records will be fed
        from the first one on that is not applied, also those that were committed and wait."""
        self._ends.pop(partition, None)

    def forget(self, partition: int) -> None:
        """Ends the log of a partition here, whose records are fed."""
        self._log.forget(partition, self._state.delivered[partition])

    def _end_copy(self, partition: int, high_watermark: int) -> bool:
        """Ends the copying once all that was fed is committed in the log here. Not before: the
        records up to there would have to be in the memory, and the end of the log could be cut off
        below what is applied."""
        if high_watermark < self._log.fed[partition]:
            return False
        assert self._log.fed[partition] == self._state.delivered[partition], "fed but not noted"
        del self._log.fed[partition]
        self.on_copied(partition)
        return True

    def step(self, state: NodeState, steps: int) -> int:
        """Applies some of the committed records that wait, of one partition after the other."""
        delivered = state.delivered
        waiting = sum(end - delivered[partition] for partition, end in self._ends.items())
        steps = max(steps, min(STATE_STEPS * waiting // BACKLOG_SHARE, SLICE_MAX))
        done = 0
        while self._ends and done < steps:
            partition, end = next(iter(self._ends.items()))
            # The log may have been reset meanwhile, to an offset below that commit.
            end = min(end, self._log.high_watermark[partition])
            done += max(1, self._advance(partition, end, steps - done))
            del self._ends[partition]
            if self._is_behind(partition, end):
                # It is the last one in the next slice.
                self._ends[partition] = end
            self.on_applied(partition)
        self.has_more = bool(self._ends)
        return done

    def _is_behind(self, partition: int, end: int) -> bool:
        batches = self._log.uncommitted[partition]
        return bool(batches) and self._state.delivered[partition] < end > batches[0].base_offset

    def _advance(self, partition: int, end: int, count_max: int) -> int:
        """Applies the next records of a partition below `end`. Returns their steps."""
        delivered = self._state.delivered
        batches = self._log.uncommitted[partition]
        left = count_max
        if partition in self._broken:
            batches.clear()
        try:
            assert end <= self._log.high_watermark[partition], "applied before the commit"
            while left > 0 and batches and batches[0].base_offset < end:
                batch = batches[0]
                begin = delivered[partition]
                left -= self._apply(partition, batch, end, left)
                if partition in self.fed:
                    self.on_committed(batch, begin, delivered[partition])
                if delivered[partition] < batch.end_offset:
                    break
                batches.popleft()
            assert delivered[partition] <= self._log.high_watermark[partition], "applied too much"
        except AssertionError as error:
            self._broken.add(partition)
            batches.clear()
            self.on_broken(partition, error)
        return count_max - left

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        log = self._log
        for partition, batches in enumerate(log.uncommitted):
            applied = self._state.delivered[partition]
            if partition in log.fed:
                assert applied == log.fed[partition], "fed but not noted"
                assert applied > log.high_watermark[partition], "copied, and still fed"
            else:
                assert applied <= log.high_watermark[partition], "delivered <= high_watermark"
            end = batches[0].base_offset if batches else 0
            for batch in batches:
                assert batch.base_offset >= end, "two batches overlap"
                end = batch.end_offset
            if batches:
                assert end <= log.next_offset[partition], "a batch beyond the end of the log"
                assert applied < batches[0].end_offset, "a batch that is applied waits"
        for partition, end in self._ends.items():
            assert end <= log.next_offset[partition], "a commit beyond the end of the log"

    def _apply(self, partition: int, batch: Batch, end: int, steps_max: int) -> int:
        """Applies the records of a batch below the offset `end`. Returns their steps, about
        `steps_max` at most."""
        state = self._state
        delivered = state.delivered
        first = max(0, delivered[partition] - batch.base_offset)
        last = min(batch.count, end - batch.base_offset)
        steps = 0
        pending = self._pending
        known = batch.known
        topics, _ = batch.topics()
        heads: list[tuple[int, int, int]] = []
        for index in range(first, last):
            if steps >= steps_max:
                break
            record = None if known is None else known[index]
            if record is None:
                if not heads:
                    heads = batch.heads()
                kind, flags, ticket = heads[index]
                if kind == log_record.MESSAGE and not flags & log_record.STATE_FLAGS:
                    steps += 1
                    offset = batch.base_offset + index
                    self.deliver_plain(topics[index], flags, batch, index, offset)
                    if ticket in pending:
                        self._settle(ticket, partition, batch.client_id(index))
                    if partition in self.followed:
                        self.release_followers(partition)
                    continue
                record = batch.record(index)
            steps += STATE_STEPS
            self.fold(record)
            if record.ticket in pending:
                self._settle(record.ticket, partition, record.client_id)
            if partition in self.followed:
                self.release_followers(partition)
        return steps

    def fold(self, record: Record) -> int:
        """Applies a committed record. Returns the number of its receivers here."""
        state = self._state
        receivers = 0
        kind = record.kind
        is_message = kind == log_record.MESSAGE
        is_delivered = is_message
        if not is_message or record.flags & log_record.STATE_FLAGS:
            flags = record.flags
            if flags & log_record.FLAG_DELAYED and is_waiting(record):
                is_delivered = False
                flags &= ~log_record.FLAG_RETAIN
            if record.offset >= self.starts[record.partition]:
                self._replicated.apply(record)
                if kind == log_record.RETAINED or flags & log_record.FLAG_RETAIN:
                    self._on_retained(record)
        if is_delivered and len(state.subscriptions) > 0:
            receivers = self._deliver(record.topic, record.flags, record, None, 0, 0)
        state.delivered[record.partition] = record.offset + 1
        is_will = is_message and record.flags & log_record.FLAG_WILL != 0
        if is_will or kind in (log_record.SESSION, log_record.CURSOR, log_record.WILL):
            self.on_session(record)
        return receivers

    def deliver_plain(
        self, topic: bytes, flags: int, batch: Batch, index: int, offset: int
    ) -> None:
        """Applies a message of a batch that changes nothing of the replicated state. Without
        receivers here nothing else of it is read."""
        if len(self._state.subscriptions) > 0:
            self._deliver(topic, flags, None, batch, index, offset)
        self._state.delivered[batch.partition] = offset + 1

    def _deliver(
        self,
        topic: bytes,
        flags: int,
        record: Record | None,
        batch: Batch | None,
        index: int,
        offset: int,
    ) -> int:
        """Delivers a message to the clients here: `record`, or that of the batch with its offset,
        which is read only for a receiver. Returns the number of receivers."""
        state = self._state
        try:
            route = find_route(state, topic)
        except InvalidTopic:
            return 0
        if flags & log_record.FLAG_QOS_MASK == 0:
            # Qos0Routing has brought it to all but these.
            if not route.reads_log:
                return 0
        elif not (route.targets or route.groups or route.denied):
            return 0
        if record is None:
            assert batch is not None
            record = batch.record(index, topic)
            record.offset = offset
        message = message_of(record)
        if flags & log_record.FLAG_QOS_MASK:
            return deliver(state, route, message)
        deliver_committed_qos0(state, route, message)
        return 0

    def tickets(self, partition: int) -> set[tuple[int, bytes]]:
        """Returns the ticket and client id of the records of a partition that are not applied."""
        applied = self._state.delivered[partition]
        return {
            (ticket, batch.client_id(index))
            for batch in self._log.uncommitted[partition]
            for index, (_, _, ticket) in enumerate(batch.heads())
            if ticket and batch.base_offset + index >= applied
        }

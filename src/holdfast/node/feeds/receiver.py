"""Applies the feeds of partitions that this node does not store.

The leader of each such partition sends the committed records that this node needs, and marks
(`feeds.server`). The mark is what `delivered[p]` is for a partition whose log is here: the
first offset that is not applied. So cursors, starts and read barriers have one meaning.

Invariants
- Everything of one link is applied in the order of its arrival. An acknowledgement of filters that
  is behind marks in this order is handled after them.
- Only parts of the newest request count. A new leader, epoch or link needs a new request.
- The mark never falls, and no record is applied twice, unless an operator has given up records. So
  a request names the epoch of the mark, and the leader compares both with its log, as those of a
  follower's log. Counter-example: records 5 to 24 were fed here and are given up. This node is away
  until the new leader's log ends at 30. It would go on from 25, without the new records 5 to 24.
- A pending record of this node is done only by the feed of the present leader and epoch. No record
  leaves for a leader that has not sent ALIGNED.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.node.context import ClusterContext
from holdfast.node.features import COMPARED_MARKS
from holdfast.node.feeds.frames import (
    ALIGNED,
    BEGINS,
    LACKS,
    RECORDS,
    FeedFrom,
    FeedPart,
    decode_feed,
    encode_feed_ack,
    encode_feed_from,
)
from holdfast.node.feeds.server import WINDOW_BYTES
from holdfast.node.frame_kinds import FEED_ACK, FEED_FROM
from holdfast.node.node_state import NodeState
from holdfast.node.publish.apply import STATE_STEPS, Applier
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.sweep import FunctionWork

ACK_BYTES: Final = WINDOW_BYTES // 8
"""The applied bytes after which a leader gets an acknowledgement: fewer use up no window."""


class FedPartition:
    """A partition that is fed to this node."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.leader = ""
        self.epoch = 0
        # The number of the newest request; 0: there is none.
        self.request = 0
        # The number of the filters that were announced before the request.
        self.filters = 0
        # Whether the leader has said which pending records it has.
        self.is_live = False
        # The epoch under which the mark was fed or logged, and the generation of the log then. 0,
        # None: it is not known.
        self.marked = 0
        self.generation: int | None = None
        # Whether it is of an earlier generation, and the leader cannot compare it with its log.
        self.is_outdated = False
        # When the feed was requested, or lost.
        self.since = 0.0


class FeedSource:
    """The link to a leader: what has arrived and is not applied."""

    def __init__(self) -> None:
        self.waiting: deque[FeedPart | Callable[[], None]] = deque()
        # The records of the first part that are applied.
        self.at = 0
        self.applied_bytes = 0
        self.acknowledged_bytes = 0


class FeedReceiver:
    """The feeds of all partitions to this node."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        applier: Applier,
        forwarding: RecordForwarder,
    ) -> None:
        self._work = FunctionWork(self.step)
        self._state = state
        self._context = context
        self._applier = applier
        self._forwarding = forwarding
        partitions = context.journal.partitions
        self.partitions = [FedPartition(number) for number in range(partitions)]
        # The partitions without a request.
        self._idle: set[int] = set(context.unstored)
        self._requests = 0
        self._requested: dict[int, FedPartition] = {}
        self._sources: dict[str, FeedSource] = {}
        # The partitions of which nothing more is applied.
        self._broken: set[int] = set()
        # The requests that end a feed, by leader.
        self._ended: dict[str, list[FeedFrom]] = {}
        self.on_accepted: Callable[[int, bool, float], None] = lambda partition, is_fed, now: None
        """Called before the first part of a feed is applied to a partition whose log is still here.
        False: the leader cannot feed it from the mark, and the log here goes on from there."""
        self.may_ask: Callable[[int], bool] = lambda partition: True
        """Whether the replicated state of a partition is complete."""
        self.is_announced: Callable[[str], bool] = lambda node: True
        """Whether all filters of this node have left for a node."""
        self.announced: Callable[[], int] = lambda: 0
        """The number of the last announced filter."""
        self.on_applied: Callable[[int], None] = lambda partition: None
        self.on_begins: Callable[[int, int], None] = lambda partition, offset: None
        """The leader's log begins at this offset, above the mark."""
        self.on_lacks: Callable[[int], None] = lambda partition: None
        """Records below the mark are not in the leader's log."""
        self.on_record: Callable[[int, int], None] | None = None
        """Is called with the partition and the offset of a record before it is applied."""

    # Requests

    def begin(self, generation: int) -> None:
        """Notes the generation of the log that all marks belong to when the process begins."""
        for fed in self.partitions:
            fed.generation = generation

    def is_of_generation(self) -> bool:
        """Whether all marks belong to the present generation of the log."""
        known = (None, self._context.generation)
        unstored = self._context.unstored
        return all(self.partitions[each].generation in known for each in unstored)

    def lose(self, partition: int) -> None:
        """Ends the feed of a partition: its leader, the epoch or the link has changed. The mark
        stays."""
        fed = self.partitions[partition]
        self._requested.pop(fed.request, None)
        fed.request = 0
        fed.is_live = False
        fed.since = self._state.now
        self._idle.add(partition)

    def end(self, partition: int) -> None:
        """Ends the feed of a partition that is stored here from now on."""
        fed = self.partitions[partition]
        if fed.request and fed.leader in self._sources:
            end = FeedFrom(partition, 0, fed.request, 0)
            self._ended.setdefault(fed.leader, []).append(end)
        self.lose(partition)
        self._idle.discard(partition)

    def connected(self, node: str) -> None:
        """Begins with an empty queue on a new link."""
        self.disconnected(node)
        self._sources[node] = FeedSource()

    def disconnected(self, node: str) -> None:
        """Drops what has arrived over a link that is lost. The next feed sends it again."""
        self._sources.pop(node, None)
        self._ended.pop(node, None)
        for fed in self.partitions:
            if fed.request and fed.leader == node:
                self.lose(fed.partition)

    def is_live(self, partition: int) -> bool:
        """True if the present leader feeds the partition."""
        fed = self.partitions[partition]
        return fed.is_live and fed.epoch == self._context.epoch(partition)

    def since(self, partition: int) -> float:
        """The time at which the feed of a partition was requested, or lost."""
        return self.partitions[partition].since

    @property
    def links(self) -> Iterable[str]:
        """The nodes with a link."""
        return self._sources

    def feeders(self, number: int) -> set[str]:
        """The nodes whose feeds were requested before the filters up to `number` had left."""
        return {fed.leader for fed in self._requested.values() if fed.filters < number}

    def leave(self, node: str) -> None:
        """Ends the feeds of a node, so that the next ones count with all filters."""
        for fed in self.partitions:
            if fed.request and fed.leader == node:
                self._break_off(fed.partition)

    def _break_off(self, partition: int) -> None:
        """Ends the feed of a partition under its present leader. No record leaves before the next
        one: this would not say that it is stored."""
        self._forwarding.stop(partition)
        self.lose(partition)

    def _ask(self) -> None:
        asked: dict[str, list[FeedFrom]] = {}
        for partition in list(self._idle):
            leader = self._context.leader(partition)
            if (
                partition in self._broken
                or leader not in self._sources
                or not self.may_ask(partition)
                or not self.is_announced(leader)
            ):
                continue
            self._idle.discard(partition)
            self._requests += 1
            fed = self.partitions[partition]
            fed.leader, fed.epoch = leader, self._context.epoch(partition)
            fed.request, fed.filters = self._requests, self.announced()
            marked = fed.marked if self._context.understands(leader, COMPARED_MARKS) else 0
            is_old = fed.generation not in (None, self._context.generation)
            fed.is_outdated = is_old and not marked
            self._requested[fed.request] = fed
            fed.since = self._state.now
            position = self._state.delivered[partition]
            tickets = self._forwarding.in_doubt(partition)
            request = FeedFrom(partition, fed.epoch, fed.request, position, tickets, marked)
            asked.setdefault(leader, []).append(request)
        for leader, requests in asked.items():
            self._context.send(leader, FEED_FROM, encode_feed_from(requests))

    # What arrives

    def handle_feed(self, node: str, payload: bytes) -> None:
        """Takes a FEED. Raises BadFrame when it is malformed."""
        parts = decode_feed(payload)
        source = self._sources.get(node)
        if source is not None:
            source.waiting.extend(parts)
            self._start()

    def after(self, node: str, do: Callable[[], None]) -> None:
        """Calls `do` once everything is applied that has arrived from a node."""
        source = self._sources.get(node)
        if source is None or not source.waiting:
            do()
        else:
            source.waiting.append(do)

    def _start(self) -> None:
        if not self._work.is_queued:
            self.step(self._state, self._state.steps_at_once)
            if self._work.has_more:
                self._state.start_work(self._work)

    def step(self, state: NodeState, steps: int) -> int:
        """Applies some of what has arrived, of one link after the other."""
        done = 0
        for node, source in list(self._sources.items()):
            while source.waiting and done < steps and self._sources.get(node) is source:
                part = source.waiting[0]
                if isinstance(part, FeedPart):
                    done += self._take(source, part, steps - done)
                else:
                    source.waiting.popleft()
                    done += 1
                    part()
        self._work.has_more = any(source.waiting for source in self._sources.values())
        return done

    def _take(self, source: FeedSource, part: FeedPart, steps: int) -> int:
        """Applies a part, or some of its records. Returns the steps."""
        fed = self._requested.get(part.request)
        done = 1
        if fed is not None:
            try:
                done += self._apply(source, fed, part, steps)
            except AssertionError as error:
                self._broken.add(fed.partition)
                self._break_off(fed.partition)
                self._applier.on_broken(fed.partition, error)
            if part.kind == RECORDS and part.request in self._requested:
                assert part.batch is not None
                if source.at < part.batch.count:
                    return done
        source.at = 0
        if source.waiting and source.waiting[0] is part:
            source.waiting.popleft()
        source.applied_bytes += part.size_bytes
        return done

    def _apply(self, source: FeedSource, fed: FedPartition, part: FeedPart, steps: int) -> int:
        partition = fed.partition
        if partition in self._context.leaving:
            kept = self._context.journal.high_watermark[partition]
            # The log here is of no use if it ends below that of the leader, which would begin it
            # again. Counter-example: it is empty, and asks from 0 for ever.
            is_fed = part.offset > kept if part.kind == BEGINS else part.kind != LACKS
            self.on_accepted(partition, is_fed, self._state.now)
            if fed.request != part.request:
                return 1
        if part.kind == LACKS or fed.is_outdated:
            self._break_off(partition)
            self.on_lacks(partition)
            return 1
        if part.kind == BEGINS:
            self._break_off(partition)
            self.on_begins(partition, part.offset)
            return 1
        fed.marked, fed.generation = fed.epoch, self._context.generation
        if part.kind == ALIGNED:
            fed.is_live = True
            self._forwarding.aligned(partition, fed.leader, fed.epoch, set(part.tickets))
            return len(part.tickets) + 1
        done = 0
        batch = part.batch
        if batch is not None:
            assert batch.partition == partition, "records of another partition"
            begin = source.at
            source.at = self._apply_records(part, batch, begin, steps)
            done = (source.at - begin) * STATE_STEPS
            if source.at < batch.count:
                return done
        self._advance(partition, part.offset)
        return done

    def _apply_records(self, part: FeedPart, batch: Batch, begin: int, steps_max: int) -> int:
        """Applies the records of a part from `begin` on, with `steps_max` steps. Returns the index
        of the first one that is left."""
        partition = batch.partition
        applier = self._applier
        forwarding = self._forwarding
        delivered = self._state.delivered
        heads = batch.heads()
        topics, _ = batch.topics()
        index = begin
        while index < batch.count and (index - begin) * STATE_STEPS < steps_max:
            kind, flags, ticket = heads[index]
            offset = part.offsets[index]
            assert offset >= delivered[partition], "a record is applied twice"
            if self.on_record is not None:
                self.on_record(partition, offset)
            # A mark between the records of one part: all that this node needs below were before it.
            applier.note_fed(partition, offset + 1)
            if kind == log_record.CONTROL:
                delivered[partition] = offset + 1
            elif kind == log_record.MESSAGE and not flags & log_record.STATE_FLAGS:
                applier.deliver_plain(topics[index], flags, batch, index, offset)
            else:
                record = batch.record(index)
                record.offset = offset
                applier.fold(record)
            if ticket in forwarding.pending:
                forwarding.settle(ticket, partition, batch.client_id(index))
            index += 1
        return index

    def _advance(self, partition: int, mark: int) -> None:
        """Takes the mark of a partition."""
        delivered = self._state.delivered
        assert mark >= delivered[partition], "a mark falls"
        self._applier.note_fed(partition, mark)
        delivered[partition] = mark
        if partition in self._applier.followed:
            self._applier.release_followers(partition)
        self.on_applied(partition)

    # Turns

    def flush(self) -> None:
        """Sends requests and acknowledgements, at the end of a turn."""
        for node, ended in self._ended.items():
            self._context.send(node, FEED_FROM, encode_feed_from(ended))
        self._ended.clear()
        if self._idle:
            self._ask()
        for node, source in self._sources.items():
            if source.applied_bytes >= source.acknowledged_bytes + ACK_BYTES:
                source.acknowledged_bytes = source.applied_bytes
                self._context.send(node, FEED_ACK, encode_feed_ack(source.applied_bytes))

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        journal = self._context.journal
        for fed in self.partitions:
            partition = fed.partition
            if self._context.is_stored(partition):
                continue
            assert bool(fed.request) == (partition not in self._idle), "the feeds without request"
            assert fed.request or not fed.is_live, "a feed is live without a request"
            if partition not in self._context.copied and partition not in self._context.leaving:
                assert journal.next_offset[partition] == self._state.delivered[partition], "mark"
            target = self._forwarding.target(partition)
            if self._context.leads(partition):
                continue
            assert not target or (fed.is_live and target == fed.leader), "records leave unaligned"

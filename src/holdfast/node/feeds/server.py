"""Feeds the nodes that do not store the partitions led here.

A feed is a cursor over the committed records of one partition, for one node. The leader applies a
record, and sends it in the same turn if the node needs it: because it changes the replicated state,
because it matches a filter of the node, or because the node waits for it. A record of the last kind
goes as a stub. A *mark* says that everything below it was sent.

Invariants
- A node that is fed does not count on its log: it is in no in-sync set, and is proposed for none.
- A feed begins only after everything is applied that its node had announced before the request. So
  each record from its position on is compared with all of those filters.
- A mark never falls, and never passes what is applied here, which is committed.
- ALIGNED names the node's pending records in the uncommitted log here, once every record that the
  node sent before its request is in a closed batch. Counter-example: the record of a FORWARD is in
  an open batch, and ALIGNED does not name it. The node sends it again, and it is stored twice.
- Without credit a feed is a position and nothing else. It goes on from the disk.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.feeds.frames import (
    BEGINS,
    LACKS,
    MARK,
    FeedFrom,
    Tickets,
    aligned_part,
    decode_feed_ack,
    decode_feed_from,
    offset_part,
    records_part,
)
from holdfast.node.frame_kinds import FEED, BadFrame
from holdfast.node.node_state import NodeState
from holdfast.node.publish.apply import ApplyingLog
from holdfast.node.replicate.effects import ReadBatches

MARKS_S: Final = 0.02
"""The least interval in seconds between marks without records."""
MARKS_WAIT_S: Final = 0.15
"""The longest interval in seconds between them. Before that they leave with other frames, as are
heartbeats, because nothing waits for them."""
WINDOW_BYTES: Final = 4 << 20
"""The bytes of feeds under way to one node. Beyond that its feeds go on from the disk."""
FRAME_BYTES: Final = 1 << 20
"""The size in bytes at which a FEED frame is closed. A larger batch has a frame of its own."""
READ_BYTES: Final = 256 << 10
"""The bytes that are read at a time for a feed that is behind."""
READ_AGAIN_S: Final = 0.1
"""The pause in seconds after a read that found nothing, because of damage."""

Wanted = Sequence[str] | None
"""The nodes that need a record; None: each node."""


class Feed:
    """The feed of one partition for one node."""

    def __init__(self, node: "FedNode", request: FeedFrom) -> None:
        self.node = node
        self.partition = request.partition
        self.request = request.request
        # Everything below was sent, or is not needed.
        self.position = request.position
        # The last mark that was sent.
        self.marked = request.position
        # The pending records of the node that a leader may have had at the request, by ticket.
        self.tickets = dict(request.tickets)
        # The offsets of records that the node has forwarded since: [begin, end) ranges, ascending.
        self.own: deque[tuple[int, int]] = deque()
        self.is_live = False
        self.is_aligned = False
        # No record of `tickets` is at or above this offset, once ALIGNED is sent.
        self.tail_end = 0

    def note_own(self, begin: int, end: int) -> None:
        own = self.own
        if own and own[-1][1] == begin:
            own[-1] = (own[-1][0], end)
        else:
            own.append((begin, end))

    def forget_own(self, offset: int) -> None:
        """Removes the noted ranges below an offset."""
        own = self.own
        while own and own[0][1] <= offset:
            own.popleft()

    def is_own(self, batch: Batch, index: int, ticket: int) -> bool:
        """True if the node waits for this record. Called with ascending offsets."""
        offset = batch.base_offset + index
        self.forget_own(offset)
        if self.own and self.own[0][0] <= offset:
            return True
        return ticket in self.tickets and self.tickets[ticket] == batch.client_id(index)


class FedNode:
    """A node that has requested feeds over its present link."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.feeds: dict[int, Feed] = {}
        # Requests that wait, with the end of the log at their arrival.
        self.asked: dict[int, tuple[FeedFrom, int]] = {}
        self.behind: deque[Feed] = deque()
        self.is_reading = False
        self.parts: list[bytes] = []
        self.size_bytes = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        # The feeds whose position is above the last mark.
        self.moved: dict[int, Feed] = {}
        self.marked_at = 0.0
        # Partition -> log end that the node waits for (a read barrier).
        self.hurried: dict[int, int] = {}

    def outstanding_bytes(self) -> int:
        return self.sent_bytes + self.size_bytes - self.received_bytes


class FeedServer:
    """The feeds of the partitions that this node leads."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        log: ApplyingLog,
        nodes_of: Callable[[str], Sequence[str]],
        is_applying: Callable[[str], bool],
    ) -> None:
        """`nodes_of` returns the nodes with a plain filter that matches a topic. `is_applying`: are
        filters of a node received that are not applied yet?"""
        self._state = state
        self._context = context
        self._log = log
        self._nodes_of = nodes_of
        self._is_applying = is_applying
        self._nodes: dict[str, FedNode] = {}
        self.live: dict[int, list[Feed]] = {}
        """The feeds by partition that get records as they are applied."""
        self._reads_due: list[ReadBatches] = []
        # The numbers are negative: those above 0 are of replication.
        self._requests = 0
        self._reads: dict[int, Feed] = {}
        self._read_again_at: dict[str, float] = {}
        self.release: Callable[[int, str], bool] = lambda partition, node: True
        """Lets a node forget its log of a partition. False: it may not yet."""
        self.void: Callable[[int, int], None] = lambda partition, offset: None
        """Makes the offsets of lost records void; see `OffsetVoider.reach`."""
        self.charge: Callable[[int], None] = lambda size_bytes: None
        """Counts the bytes that are read for feeds, so that followers that catch up read less."""

    # Links and leaderships

    def disconnected(self, node: str) -> None:
        """Ends the feeds of a node, whose link is lost or new."""
        fed = self._nodes.pop(node, None)
        if fed is not None:
            for feed in list(fed.feeds.values()):
                self._end(feed)

    def stop_leading(self, partition: int) -> None:
        """Ends the feeds of a partition: its next leader serves them. A request may be for the next
        epoch, which this node leads without knowing it yet."""
        for fed in self._nodes.values():
            asked = fed.asked.get(partition)
            if asked is not None:
                # What is in no closed batch is cut off.
                fed.asked[partition] = (asked[0], 0)
            feed = fed.feeds.get(partition)
            if feed is not None:
                self._end(feed)

    def _end(self, feed: Feed) -> None:
        partition = feed.partition
        del feed.node.feeds[partition]
        feed.node.moved.pop(partition, None)
        feed.node.hurried.pop(partition, None)
        if feed.is_live:
            self._leave_live(feed)

    def _leave_live(self, feed: Feed) -> None:
        feed.is_live = False
        live = self.live[feed.partition]
        live.remove(feed)
        if not live:
            del self.live[feed.partition]

    # Requests

    def handle_request(self, node: str, payload: bytes) -> None:
        """Takes a FEED_FROM. Raises BadFrame when it is malformed."""
        ends = self._context.journal.next_offset
        fed = self._nodes.get(node)
        if fed is None:
            fed = self._nodes[node] = FedNode(node)
        for request in decode_feed_from(payload):
            partition = request.partition
            if partition >= len(ends):
                raise BadFrame(f"FEED_FROM for partition {partition}, there are {len(ends)}")
            feed = fed.feeds.get(partition)
            if feed is not None:
                self._end(feed)
            fed.asked.pop(partition, None)
            if request.epoch:
                fed.asked[partition] = (request, ends[partition])

    def forwarded(self, node: str, partition: int, begin: int) -> None:
        """Notes that the records from the offset `begin` to the end of the log are of `node`."""
        fed = self._nodes.get(node)
        if fed is None:
            return
        feed = fed.feeds.get(partition)
        end = self._context.journal.next_offset[partition]
        if feed is not None and 0 <= begin < end:
            feed.note_own(begin, end)

    def _begin_asked(self, fed: FedNode) -> None:
        """Begins the feeds that can be served now."""
        for partition, (request, floor) in list(fed.asked.items()):
            epoch = self._context.leading[partition]
            if epoch > request.epoch:
                # The node learns of the next leader, and asks it.
                del fed.asked[partition]
            elif (
                epoch == request.epoch
                and self._closed_end(partition) >= floor
                and self.release(partition, fed.name)
            ):
                del fed.asked[partition]
                self._begin(fed, request)

    def _closed_end(self, partition: int) -> int:
        """The end of the batches that are closed."""
        batches = self._log.uncommitted[partition]
        applied = self._state.delivered[partition]
        return max(applied, batches[-1].end_offset) if batches else applied

    def _begin(self, fed: FedNode, request: FeedFrom) -> None:
        partition = request.partition
        end = self._context.journal.next_offset[partition]
        start = self._log.start_offsets[partition]
        common = self._log.epoch_end(partition, request.marked)[1] if request.marked else end
        if request.position > max(common, start):
            self._add(fed, offset_part(LACKS, request.request, common))
            # Clients of the node have received the records below.
            self.void(partition, request.position)
        elif request.position < start:
            self._add(fed, offset_part(BEGINS, request.request, start))
        else:
            feed = fed.feeds[partition] = Feed(fed, request)
            self._go_on(feed)

    def _go_on(self, feed: Feed) -> None:
        """Sends the next records of a feed that is not live, or lets it be live."""
        if feed.position >= self._state.delivered[feed.partition]:
            feed.is_live = True
            self.live.setdefault(feed.partition, []).append(feed)
            if not feed.tickets or feed.partition not in self._context.uncompared:
                self._align(feed)
        else:
            feed.node.behind.append(feed)

    def align(self, partition: int) -> None:
        """Lets the nodes with a feed of the partition send records: see `LeaderSync`."""
        for feed in self.live.get(partition, ()):
            self._align(feed)

    def _align(self, feed: Feed) -> None:
        if not feed.is_aligned:
            feed.is_aligned = True
            feed.tail_end = self._closed_end(feed.partition)
            self._mark(feed)
            self._add(feed.node, aligned_part(feed.request, self._uncommitted(feed)))

    def _uncommitted(self, feed: Feed) -> Tickets:
        """The pending records of the node that are in the log here and not applied."""
        if not feed.tickets:
            return []
        applied = self._state.delivered[feed.partition]
        return [
            (ticket, feed.tickets[ticket])
            for batch in self._log.uncommitted[feed.partition]
            for index, (_, _, ticket) in enumerate(batch.heads())
            if ticket in feed.tickets
            and batch.base_offset + index >= applied
            and batch.client_id(index) == feed.tickets[ticket]
        ]

    # Records

    def applied(self, batch: Batch, begin: int, end: int) -> None:
        """Sends the records [begin, end) of a batch, which are applied now, to the live feeds."""
        wanted: list[Wanted] | None = None
        for feed in list(self.live.get(batch.partition, ())):
            if end <= feed.position:
                continue
            if feed.node.outstanding_bytes() > WINDOW_BYTES:
                self._leave_live(feed)
                feed.node.behind.append(feed)
                continue
            assert feed.position >= begin, "a live feed has a gap"
            if wanted is None:
                wanted = self._wanted(batch, begin, end)
            self._send(feed, batch, begin, end, wanted)

    def _wanted(self, batch: Batch, begin: int, end: int) -> list[Wanted]:
        """The nodes that need each of the records [begin, end)."""
        found: list[Wanted] = []
        heads = batch.heads()
        topics, _ = batch.topics()
        # Most messages of a batch have the topic of the one before.
        topic: bytes | None = None
        nodes: Sequence[str] = ()
        for index in range(begin - batch.base_offset, end - batch.base_offset):
            kind, flags, _ = heads[index]
            if kind != log_record.MESSAGE or flags & log_record.STATE_FLAGS:
                found.append(None)
                continue
            if topics[index] != topic:
                topic = topics[index]
                nodes = self._nodes_of(topic.decode())
            found.append(nodes)
        return found

    def _send(
        self, feed: Feed, batch: Batch, begin: int, end: int, wanted: Sequence[Wanted]
    ) -> None:
        """Sends what the node needs of the records [begin, end). `wanted`: for each of them."""
        base = batch.base_offset
        name = feed.node.name
        waits = bool(feed.own or feed.tickets)
        heads = batch.heads() if waits else []
        picked: list[tuple[int, bool]] = []
        stubs = 0
        for index in range(max(begin, feed.position) - base, end - base):
            nodes = wanted[base + index - begin]
            if nodes is None or name in nodes:
                picked.append((index, False))
            elif waits and heads[index][2] and feed.is_own(batch, index, heads[index][2]):
                picked.append((index, True))
                stubs += 1
        feed.position = end
        feed.forget_own(end)
        if feed.is_aligned and end >= feed.tail_end:
            feed.tickets = {}
        if not picked:
            self._note_moved(feed)
        elif len(picked) == batch.count and not stubs:
            self._add(feed.node, records_part(feed.request, end, batch.content(), []))
            self._note_marked(feed)
        else:
            builder = BatchBuilder(batch.partition, 0)
            for index, is_stub in picked:
                builder.pick(batch, index, is_stub=is_stub)
            offsets = [base + index for index, _ in picked]
            data = builder.build(batch.epoch)
            self._add(feed.node, records_part(feed.request, end, data, offsets))
            self._note_marked(feed)

    def _note_moved(self, feed: Feed) -> None:
        feed.node.moved[feed.partition] = feed

    def _note_marked(self, feed: Feed) -> None:
        assert feed.position >= feed.marked, "a mark falls"
        feed.marked = feed.position
        feed.node.moved.pop(feed.partition, None)
        hurried = feed.node.hurried
        if hurried and hurried.get(feed.partition, feed.marked + 1) <= feed.marked:
            del hurried[feed.partition]

    def _mark(self, feed: Feed) -> None:
        applied = self._state.delivered[feed.partition]
        assert feed.position <= applied or not feed.is_aligned or feed.position == feed.marked
        if feed.position > feed.marked:
            self._add(feed.node, offset_part(MARK, feed.request, feed.position))
            self._note_marked(feed)

    def _add(self, fed: FedNode, part: bytes) -> None:
        if fed.size_bytes and fed.size_bytes + len(part) > FRAME_BYTES:
            self._flush(fed)
        fed.parts.append(part)
        fed.size_bytes += len(part)

    def _flush(self, fed: FedNode) -> None:
        payload = b"".join(fed.parts)
        fed.parts = []
        fed.size_bytes = 0
        fed.sent_bytes += len(payload)
        self._context.send(fed.name, FEED, payload)

    def send_marks(self, node: str) -> None:
        """Sends a node everything up to now, before an acknowledgement of its filters. Marks that
        arrive before it do not count the filters, and later ones do."""
        fed = self._nodes.get(node)
        if fed is not None:
            self._send_all(fed)

    def _send_all(self, fed: FedNode) -> None:
        fed.marked_at = self._state.now
        for feed in list(fed.moved.values()):
            self._mark(feed)
        if fed.parts:
            self._flush(fed)

    def hurry(self, node: str) -> None:
        """Sends the next marks at once, up to the present log ends: the node waits for them."""
        fed = self._nodes.get(node)
        if fed is not None:
            ends = self._context.journal.next_offset
            fed.hurried = {
                partition: ends[partition]
                for partition, feed in fed.feeds.items()
                if feed.marked < ends[partition]
            }

    # Feeds that are behind

    def handle_ack(self, node: str, payload: bytes) -> None:
        """Takes a FEED_ACK. Raises BadFrame when it is malformed."""
        received = decode_feed_ack(payload)
        fed = self._nodes.get(node)
        if fed is None:
            return
        if not fed.received_bytes <= received <= fed.sent_bytes:
            raise BadFrame(f"{received} bytes of feeds applied, of {fed.sent_bytes} sent")
        fed.received_bytes = received

    def _pump(self, fed: FedNode) -> None:
        """Reads for the first feed that is behind, if the node has credit."""
        while fed.behind and not fed.is_reading and fed.outstanding_bytes() < WINDOW_BYTES // 2:
            if self._read_again_at.get(fed.name, 0.0) > self._state.now:
                return
            feed = fed.behind.popleft()
            if fed.feeds.get(feed.partition) is not feed:
                continue
            if feed.position >= self._state.delivered[feed.partition]:
                self._go_on(feed)
                continue
            self._requests -= 1
            self._reads[self._requests] = feed
            fed.is_reading = True
            read = (self._requests, fed.name, feed.partition, feed.position, READ_BYTES)
            self._reads_due.append(ReadBatches(*read))

    def handle_batches(self, request: int, batches: list[bytes]) -> None:
        """Takes the result of a read."""
        feed = self._reads.pop(request)
        fed = feed.node
        fed.is_reading = False
        self.charge(sum(map(len, batches)))
        if fed.feeds.get(feed.partition) is not feed:
            return
        before = feed.position
        for data in batches:
            batch = Batch(data, check=False)
            end = min(batch.end_offset, self._state.delivered[feed.partition])
            # A gap means that the batch is damaged, or was deleted meanwhile.
            if batch.base_offset > feed.position or end <= feed.position:
                break
            begin = feed.position
            self._send(feed, batch, begin, end, self._wanted(batch, begin, end))
        if feed.position == before:
            start = self._log.start_offsets[feed.partition]
            if before < start:
                self._end(feed)
                self._add(fed, offset_part(BEGINS, feed.request, start))
                return
            self._read_again_at[fed.name] = self._state.now + READ_AGAIN_S
        self._go_on(feed)

    # Turns

    def flush(self) -> None:
        """Begins requested feeds, and sends what has gathered, at the end of a turn."""
        now = self._state.now
        for fed in self._nodes.values():
            if fed.asked and not self._is_applying(fed.name):
                self._begin_asked(fed)
            if fed.behind:
                self._pump(fed)
            if fed.moved and (fed.parts or fed.hurried or self._may_mark(fed, now)):
                self._send_all(fed)
            elif fed.parts:
                self._flush(fed)

    def _may_mark(self, fed: FedNode, now: float) -> bool:
        """Whether marks may leave alone, or with another frame to the node."""
        since_s = now - fed.marked_at
        return since_s >= MARKS_WAIT_S or (
            since_s >= MARKS_S and any(each[0] == fed.name for each in self._context.outgoing)
        )

    def pop_reads(self) -> list[ReadBatches]:
        """Returns the reads to begin."""
        reads, self._reads_due = self._reads_due, []
        return reads

    def timer(self) -> float:
        """Returns the time of the next marks or reads."""
        due = NEVER
        for fed in self._nodes.values():
            if fed.moved:
                due = min(due, fed.marked_at + MARKS_WAIT_S)
            if fed.behind and not fed.is_reading and fed.outstanding_bytes() < WINDOW_BYTES // 2:
                due = min(due, self._read_again_at.get(fed.name, 0.0))
        return due

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        for fed in self._nodes.values():
            assert fed.outstanding_bytes() >= 0, "received more than was sent"
            assert fed.size_bytes == sum(map(len, fed.parts)), "the bytes of the parts"
            for partition, feed in fed.feeds.items():
                assert self._context.leading[partition], "a feed of a partition not led here"
                assert feed.marked <= feed.position, "a mark above what was sent"
                assert feed.is_live == (feed in self.live.get(partition, ())), "the live feeds"
                applied = self._state.delivered[partition]
                assert not feed.is_live or feed.position >= applied, "a live feed is behind"

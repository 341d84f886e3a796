"""Position of a reader in the log, and the messages handed to it and not sent yet.

A reader is a session or a shared group. It is in one of two modes:

- tailing: the node hands it every committed record that matches, through `outbox`;
- behind: it reads the log from `positions` (per partition, the next offset to read).

Falling behind bounds memory: when the outbox overflows it is emptied and `positions` is set to the
first offset not sent. So no message is lost and none is sent twice. During a read the reader tails
as well (`reading` and `tailing`), so that it has caught up the moment the read ends. If the outbox
overflows meanwhile, it stays behind.

Invariant: every matching record below `resume_positions()` was sent (it is acknowledged or
inflight), and every one at or above it will be sent, unless its message overtook the read through
a `LiveLane`.
"""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from holdfast.node.session.additions import Additions
from holdfast.node.session.message import Message, queued_size
from holdfast.protocol.topics.names import matches

if TYPE_CHECKING:
    from mypy_extensions import i32


class Delivery:
    """One message for one reader, with the QoS, RETAIN and additions of its subscription."""

    def __init__(
        self,
        message: Message,
        qos: int,
        retain: bool,
        additions: Additions | None,
    ) -> None:
        self.message = message
        self.qos = qos
        self.retain = retain
        self.additions = additions


class Redelivery(Delivery):
    """An inflight message that the cursor has reached: see `Rarities.inflight_ahead`."""


LANE_FILTERS_MAX: Final = 20
"""The most filters of replays beside which live messages overtake: each such message is compared
with all of them."""


class LiveLane:
    """The live messages of a session that overtake its replay.

    Invariants
    - It exists from the SUBSCRIBE of the replay, or from a reconnect in its middle, until the
      outbox is empty at the tail.
    - If the cursor was not at the tail when it began, `positions` are set: it first reads the
      messages of its topics from the log, and the replay waits. So no older message of a topic
      outside of `filters` waits while a live one goes through the lane.
    - All messages of such a topic go through the lane until it closes, and none of a topic that a
      replayed filter matches. So each topic keeps its order. Smallest counter-example of a lane for
      all topics: a session that reads `a/#` live and `a/b` from the past gets today's message of
      `a/b` before yesterday's.
    - A record that went through the lane is in `queue`, inflight or in `Session.done`, so the
      replay passes it.
    """

    def __init__(self, filters: list[str]) -> None:
        self.filters = filters
        self.queue: deque[Delivery] = deque()
        self.queue_bytes = 0
        self.is_open = len(filters) <= LANE_FILTERS_MAX
        # Per partition, the next offset to read; None: it has caught up.
        self.positions: list[int] | None = None
        self.reading = False
        # The live deliveries during a read. They are dropped if the read does not reach the tail.
        self.tailed: list[Delivery] = []
        self.tailed_bytes = 0
        self.has_overflowed = False

    def takes(self, topic: str) -> bool:
        """Whether messages of the topic go through the lane."""
        if not self.is_open:
            return False
        return not any(matches(filter, topic) for filter in self.filters)

    def push(self, delivery: Delivery) -> None:
        """Queues a delivery for which there is no room yet."""
        self.queue_bytes += queued_size(delivery.message)
        self.queue.append(delivery)

    def pop(self) -> Delivery:
        """Removes and returns the oldest delivery."""
        delivery = self.queue.popleft()
        self.queue_bytes -= queued_size(delivery.message)
        assert self.queue_bytes >= 0, "fewer bytes in the lane than none"
        return delivery

    def check(self) -> None:
        """Raises `AssertionError` unless the counted bytes are the sums over the queues."""
        assert self.queue_bytes == _size_of(self.queue), "the bytes of the lane"
        assert self.tailed_bytes == _size_of(self.tailed), "the bytes tailed by the lane"
        assert not self.is_open or len(self.filters) <= LANE_FILTERS_MAX, "too many filters"

    def start_read(self) -> None:
        """Begins a read from `positions` on. Live deliveries come behind its records."""
        self.reading = True
        self.has_overflowed = False

    def tail(self, delivery: Delivery, has_room: bool) -> None:
        """Takes a live delivery while the lane is behind. The log has it, so it may be dropped."""
        if self.reading and has_room:
            self.tailed.append(delivery)
            self.tailed_bytes += queued_size(delivery.message)
        else:
            self.has_overflowed = True

    def finish_read(self, positions: list[int], done: bool) -> None:
        """Ends a read at `positions`, whose records are queued. `done`: it reached its limit."""
        self.reading = False
        tailed = self.tailed
        self.tailed = []
        self.tailed_bytes = 0
        self.positions = positions
        if done and not self.has_overflowed:
            self.positions = None
            for delivery in tailed:
                self.push(delivery)

    def close(self) -> None:
        """Lets all later messages wait behind the replay."""
        self.is_open = False
        self.positions = None
        self.reading = False
        self.tailed = []
        self.tailed_bytes = 0

    def add_filters(self, filters: list[str]) -> None:
        """Another replay begins. Messages that wait here are sent before it."""
        self.filters = self.filters + filters
        if len(self.filters) > LANE_FILTERS_MAX:
            self.close()


class WaitingQos0:
    """The live QoS 0 messages of a session that wait for its replay: the log does not have them.

    Each has a place in the log: behind all records of its topic's partition that the node had
    handed out when it arrived. Smallest counter-example of one that is sent at once: a valve that
    was closed today, by a message of QoS 0, is opened again by yesterday's of QoS 1.
    """

    def __init__(self) -> None:
        # By partition: the offset that each goes before, in order.
        self.by_partition: dict[int, deque[tuple[int, Delivery]]] = {}
        self.count = 0
        self.size_bytes = 0

    def push(self, partition: int, before: int, delivery: Delivery) -> None:
        """Queues a delivery that goes before this offset, and behind the earlier ones."""
        self.by_partition.setdefault(partition, deque()).append((before, delivery))
        self.count += 1
        self.size_bytes += queued_size(delivery.message)

    def precedes(self, positions: list[int]) -> bool:
        """Whether one goes before a record below these positions."""
        for partition, waiting in self.by_partition.items():
            if waiting[0][0] < positions[partition]:
                return True
        return False

    def pop_before(self, partition: int, offset: int) -> Delivery | None:
        """Removes and returns the next one that goes before this record; None: there is none."""
        waiting = self.by_partition.get(partition)
        if waiting is None or waiting[0][0] > offset:
            return None
        return self._pop(partition, waiting)

    def pop(self) -> Delivery:
        """Removes and returns the next one of any partition."""
        partition, waiting = next(iter(self.by_partition.items()))
        return self._pop(partition, waiting)

    def _pop(self, partition: int, waiting: deque[tuple[int, Delivery]]) -> Delivery:
        _, delivery = waiting.popleft()
        if not waiting:
            del self.by_partition[partition]
        self.count -= 1
        self.size_bytes -= queued_size(delivery.message)
        assert min(self.count, self.size_bytes) >= 0, "fewer messages wait than none"
        return delivery

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        waiting = [each for queue in self.by_partition.values() for each in queue]
        assert all(self.by_partition.values()), "an empty queue"
        assert self.count == len(waiting), "the number of waiting messages"
        assert self.size_bytes == _size_of(each for _, each in waiting), "their bytes"
        for queue in self.by_partition.values():
            offsets = [before for before, _ in queue]
            assert offsets == sorted(offsets), "the waiting messages are out of order"


class Cursor:
    """The position of one reader, and its outbox.

    Invariant: while the reader tails and no read is under way, `positions` is None. If nothing
    waits in its outbox, its lane or `waiting_qos0` then, `lane` is None, too.
    """

    def __init__(self) -> None:
        self.positions: list[int] | None = None
        self.outbox: deque[Delivery] | None = None
        # The sum over the outbox and `tailed_while_reading`.
        self.outbox_bytes = 0
        # Deliveries read from the log go before the ones tailed while the read was under way.
        self.tailed_while_reading: deque[Delivery] | None = None
        self.lane: LiveLane | None = None
        self.waiting_qos0: WaitingQos0 | None = None
        # Distinguishes a read from one that was cancelled.
        self.read_number: i32 = 0
        # The flags are side by side: see Connection.
        self.tailing = True
        self.reading = False
        self.read_overflow = False

    def push(self, delivery: Delivery) -> None:
        """Queues a delivery behind the others of its kind."""
        self.outbox_bytes += queued_size(delivery.message)
        if self.reading:
            if self.tailed_while_reading is None:
                self.tailed_while_reading = deque()
            self.tailed_while_reading.append(delivery)
            return
        if self.outbox is None:
            self.outbox = deque()
        self.outbox.append(delivery)

    def pop(self) -> Delivery:
        """Removes and returns the oldest delivery."""
        outbox = self.outbox
        assert outbox is not None
        delivery = outbox.popleft()
        self.outbox_bytes -= queued_size(delivery.message)
        assert self.outbox_bytes >= 0, "fewer bytes in the outbox than none"
        return delivery

    def outbox_count(self) -> int:
        """The number of queued deliveries, those tailed during a read included."""
        count = 0
        if self.outbox is not None:
            count = len(self.outbox)
        if self.tailed_while_reading is not None:
            count += len(self.tailed_while_reading)
        return count

    def resume_positions(self, delivered: list[int]) -> list[int]:
        """The first offset per partition not yet sent. `delivered`: the first offsets that the node
        has not handed out."""
        if self.positions is not None:
            positions = list(self.positions)
        else:
            positions = list(delivered)
        if self.outbox is not None:
            for delivery in self.outbox:
                message = delivery.message
                if message.offset < positions[message.partition]:
                    positions[message.partition] = message.offset
        if self.lane is not None:
            # Nothing of the outbox is sent before the lane is empty, so the reader has sent no
            # other record from here on, unless it overtook as well.
            for delivery in self.lane.queue:
                message = delivery.message
                if message.offset < positions[message.partition]:
                    positions[message.partition] = message.offset
        return positions

    def fall_behind(self, delivered: list[int]) -> None:
        """Drops the queue and continues from the log. `delivered` must not yet cover the record
        that the reader was about to receive, or that record is lost."""
        if self.reading:
            self.read_overflow = True
        else:
            self.positions = self.resume_positions(delivered)
            self.outbox = None
        self.tailed_while_reading = None
        # During a read the outbox keeps the records of the read before.
        self.recount()
        self.tailing = False

    def start_read(self) -> None:
        """Begins a read. From now on live records queue up behind those of the read. The caller
        passes the positions."""
        self.reading = True
        self.read_overflow = False
        self.tailing = True

    def finish_read(self, positions: list[int], done: bool) -> None:
        """Ends a read at `positions`. `done`: it reached its limit.

        The caller first appends the records of the read to the outbox.
        """
        self.reading = False
        tailed = self.tailed_while_reading
        self.tailed_while_reading = None
        if done and not self.read_overflow:
            self.positions = None
            self.tailing = True
            if tailed is not None:
                if self.outbox is None:
                    self.outbox = tailed
                else:
                    self.outbox.extend(tailed)
            return
        # The live records are dropped: the read stopped before the first of them, or they
        # overflowed. The log has them all, from these positions on.
        self.positions = positions
        self.tailing = False
        self.recount()

    def open_lane(self, filters: list[str]) -> None:
        """Lets live messages of topics outside of these filters overtake the read that begins now.
        The cursor is at the tail, and its outbox has only such messages afterwards that do not
        overtake."""
        lane = LiveLane(filters)
        self.lane = lane
        outbox = self.outbox
        if outbox is not None:
            self.outbox = deque()
            for delivery in outbox:
                if lane.takes(delivery.message.topic.decode()):
                    lane.push(delivery)
                else:
                    self.outbox.append(delivery)
            self.recount()

    def end_lane(self) -> None:
        """Lets the messages of the lane wait in the outbox. They have topics of their own there."""
        lane = self.lane
        self.lane = None
        if lane is None or not lane.queue:
            return
        if self.outbox is not None:
            lane.queue.extend(self.outbox)
        self.outbox = lane.queue
        self.outbox_bytes += lane.queue_bytes

    def cancel_read(self) -> None:
        """Abandons the read. Its result will be ignored, and the positions stay as before it."""
        self.read_number += 1
        self.reading = False
        self.tailing = False
        self.tailed_while_reading = None
        self.recount()

    def recount(self) -> None:
        """Counts `outbox_bytes` again from the outbox."""
        self.outbox_bytes = 0 if self.outbox is None else _size_of(self.outbox)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        waiting = [*(self.outbox or ()), *(self.tailed_while_reading or ())]
        assert self.outbox_bytes == _size_of(waiting), "the bytes of the outbox"
        assert self.reading or self.tailed_while_reading is None, "tailed without a read"
        if self.tailing and not self.reading:
            assert self.positions is None, "a reader at the end of the log has positions"
        if self.lane is not None:
            is_at_rest = self.tailing and not self.reading and not self.lane.queue
            is_needed = self.outbox or self.waiting_qos0 is not None
            assert is_needed or not is_at_rest, "a lane without a replay"
            self.lane.check()
        if self.waiting_qos0 is not None:
            self.waiting_qos0.check()


def _size_of(deliveries: Iterable[Delivery]) -> int:
    """The memory of the queued messages in bytes."""
    total = 0
    for delivery in deliveries:
        total += queued_size(delivery.message)
    return total

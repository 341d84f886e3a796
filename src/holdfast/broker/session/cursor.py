"""The position of a reader in the log, and the messages handed to it and not sent yet.

A reader is a session or a shared group. It is in one of two modes:

- tailing: the node hands it every committed record that matches, through `outbox`;
- behind: it reads the log from `positions` (per partition, the next offset to read).

Falling behind bounds memory: when the outbox overflows it is emptied and `positions` is set to the
first offset not sent. So no message is lost and none is sent twice. During a read the reader tails
as well (`reading` and `tailing`), so that it has caught up the moment the read ends. If the outbox
overflows meanwhile, it stays behind.

Invariant: every matching record below `resume_positions()` was sent (it is acknowledged or
inflight), and every one at or above it will be sent.
"""

from collections import deque

from holdfast.broker.session.additions import Additions
from holdfast.broker.session.message import Message


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


class Cursor:
    """The position of one reader, and its outbox.

    Invariant: while the reader tails and no read is under way, `positions` is None.
    """

    def __init__(self) -> None:
        self.tailing = True
        self.reading = False
        # Distinguishes a read from one that was cancelled.
        self.read_number = 0
        self.read_overflow = False
        self.positions: list[int] | None = None
        self.outbox: deque[Delivery] | None = None
        self.outbox_bytes = 0
        # Deliveries read from the log go before the ones tailed while the read was under way.
        self.tailed_while_reading: deque[Delivery] | None = None

    def push(self, delivery: Delivery) -> None:
        """Queue a delivery behind the others of its kind."""
        self.outbox_bytes += len(delivery.message.payload) + 200
        if self.reading:
            if self.tailed_while_reading is None:
                self.tailed_while_reading = deque()
            self.tailed_while_reading.append(delivery)
            return
        if self.outbox is None:
            self.outbox = deque()
        self.outbox.append(delivery)

    def pop(self) -> Delivery:
        """Remove and return the oldest delivery."""
        outbox = self.outbox
        assert outbox is not None
        delivery = outbox.popleft()
        self.outbox_bytes -= len(delivery.message.payload) + 200
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
        return positions

    def fall_behind(self, delivered: list[int]) -> None:
        """Drop the queue and continue from the log. `delivered` must not yet cover the record that
        the reader was about to receive, or that record is lost."""
        if self.reading:
            self.read_overflow = True
        else:
            self.positions = self.resume_positions(delivered)
            self.outbox = None
        if self.tailed_while_reading is not None:
            self.tailed_while_reading = None
        self.outbox_bytes = 0
        self.tailing = False

    def start_read(self) -> None:
        """Begin a read. From now on live records queue up behind those of the read. The caller
        passes the positions."""
        self.reading = True
        self.read_overflow = False
        self.tailing = True

    def finish_read(self, positions: list[int], done: bool) -> None:
        """End a read at `positions`. `done`: it reached its limit.

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

    def cancel_read(self) -> None:
        """Abandon the read. Its result will be ignored, and the positions stay as before it."""
        self.read_number += 1
        self.reading = False
        self.tailing = False
        self.tailed_while_reading = None
        self.recount()

    def recount(self) -> None:
        """Count `outbox_bytes` again from the outbox."""
        self.outbox_bytes = 0
        if self.outbox is not None:
            for delivery in self.outbox:
                self.outbox_bytes += len(delivery.message.payload) + 200

"""Where a reader of the log stands, and what it has been handed but not yet sent.

A reader is a session or a shared group. It is in one of two modes:

- tailing: the node hands it every committed record that matches, through `outbox`;
- behind: it reads the log from `positions` (per partition, the next offset to read).

Falling behind is what bounds memory: when the outbox overflows it is emptied and `positions` is
set to the first offset not sent, so nothing is lost and nothing is sent twice. While a read is
under way the reader tails as well (`reading` and `tailing`), so that it has caught up the moment
the read ends; if the outbox overflows meanwhile, it simply stays behind.

Invariant: every matching record below `resume_positions()` was sent (it is acknowledged or
inflight), and every one at or above it will be.
"""

from collections import deque

from holdfast.broker.session.message import Message


class Delivery:
    """One message on its way to one reader."""

    def __init__(
        self,
        message: Message,
        qos: int,
        retain: bool,
        subscription_ids: tuple[int, ...],
    ) -> None:
        self.message = message
        self.qos = qos
        self.retain = retain
        self.subscription_ids = subscription_ids


class Cursor:
    def __init__(self) -> None:
        self.tailing = True
        self.reading = False
        self.read_overflow = False
        self.positions: list[int] | None = None
        self.outbox: deque[Delivery] | None = None
        self.outbox_bytes = 0
        # Deliveries read from the log go before the ones tailed while the read was under way.
        self.tailed_while_reading: deque[Delivery] | None = None

    def push(self, delivery: Delivery) -> None:
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
        outbox = self.outbox
        assert outbox is not None
        delivery = outbox.popleft()
        self.outbox_bytes -= len(delivery.message.payload) + 200
        return delivery

    def outbox_count(self) -> int:
        count = 0
        if self.outbox is not None:
            count = len(self.outbox)
        if self.tailed_while_reading is not None:
            count += len(self.tailed_while_reading)
        return count

    def resume_positions(self, delivered: list[int]) -> list[int]:
        """First offset per partition not yet sent. `delivered`: what the node has handed out."""
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
        """Forget what is queued; go on from the log. `delivered` must not yet cover what the
        reader was about to be handed."""
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
        """From here on live records queue up behind the read's; caller passes the positions."""
        self.reading = True
        self.read_overflow = False
        self.tailing = True

    def finish_read(self, positions: list[int], done: bool) -> None:
        """`positions`: where the read ended; `done`: at the limit it was given.

        The caller appends what was read to the outbox first.
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
        self.positions = positions
        self.tailing = False
        self.recount()

    def cancel_read(self) -> None:
        """The read's result will be ignored; positions are as before it."""
        self.reading = False
        self.tailing = False
        self.tailed_while_reading = None
        self.recount()

    def recount(self) -> None:
        self.outbox_bytes = 0
        if self.outbox is not None:
            for delivery in self.outbox:
                self.outbox_bytes += len(delivery.message.payload) + 200

"""Reserves the epochs that a coordinator may give to sessions without a record.

An earlier leader of the home partition may have given such an epoch. A new leader knows it only
after the session's node has reported it, and that node may be cut off. So a leader first reserves
epochs, by a record of the home partition. Every later leader applies that record before it decides,
and gives only higher epochs.

Smallest counter-example: A leads the home of client c and gives c epoch 8 at n1, without a record.
B becomes the leader and gives c epoch 8 at n2. c publishes a QoS 2 message with packet id 5 at n1,
and then another message with packet id 5 at n2. The second message is taken for a repetition: it is
acknowledged and not stored.

The record is appended when a leader opens the first session without a record, and again when a
client has used up the range. One record is enough for all clients of a partition, because epochs
count per client. Records have 32 bits for an epoch, so a range is short.

A partition that commits nothing for `PATIENCE_S` reserves nothing. Its leader then gives epochs
from the range below the reserved ones, which later leaders leave out too. It does so only while it
reaches a majority. Otherwise another node may lead, for which the same holds. A client whose epoch
would be above that range waits for the commit.

Such an epoch is odd, and all others are even. Of the odd ones each leader gives every 16th, chosen
by its leader epoch. So neither clocks nor what a leader has heard can make two leaders give one
epoch, unless one is the 16th after the other and the partition has committed nothing in between.
Counter-example with even ones: A does not know yet that B leads. A node reports to A the epoch that
B has reserved and given. A gives the client the next one, and so does B. Counter-example if leaders
share the odd ones: A gives c epoch 9 at n1. B becomes the leader, commits no reservation, begins
with the same range, and gives c epoch 9 at n2.

The newest epoch is that of the partition, because every later leader has at least as much of its
log. Counter-example with that of all partitions: A knows epoch 387 from another partition, and
gives c 388 without a record. B, which does not know it yet, reserves 387 to 515 and gives c 388.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.requests import OpenedPromise
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import ReserveRecord, encode_session

EPOCH_ORIGIN_S: Final = 1_577_836_800
"""The start of 2020 in Unix seconds, from which the first epochs of a leader count.

They are not below the seconds since then, and above the newest epoch of any session. They therefore
lie above the epochs of an earlier life of the session, also of one without a record that an older
version gave.
"""
SECONDS_MAX: Final = 1 << 31
"""The highest epoch that comes from a clock, in seconds: clocks after 2088 count as this one.
Records have 32 bits for an epoch, and epochs only grow."""
RANGE: Final = 512
"""The number of epochs in one reservation, and of those below it for a partition that commits
nothing."""
LEADERS: Final = 16
"""The number of consecutive leaders of a partition that share the odd epochs."""
STEP: Final = 2
"""The distance between two epochs of a leader whose partition commits records."""
OWN_STEP: Final = STEP * LEADERS
"""The distance between two epochs of a leader whose partition commits nothing."""
PATIENCE_S: Final = 1.0
"""The longest time in seconds that a client waits for the commit of a reservation."""


class Reservation:
    """A reservation whose record is appended and not committed."""

    def __init__(self, newest: int, due_at: float) -> None:
        self.newest = newest
        self.due_at = due_at
        """The time in seconds after which no client waits for the commit."""
        self.clients: dict[str, None] = {}
        """The clients that wait for the commit, in order."""
        self.patient: dict[str, None] = {}
        """The clients that wait for it however long it takes, in order."""


class EpochReservations:
    """The epochs that this node may give in each home partition that it leads.

    Invariant: an epoch of a session without a record is not above the newest reserved one, except
    while the partition commits nothing.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        go_on: Callable[[str, bool], None],
    ) -> None:
        self._state = state
        self._context = context
        self._replicated = replicated
        # Called for each waiting client, with False if its request is to be dropped.
        self._go_on = go_on
        # Per partition: the lowest epoch to reserve, as of the first request; the lowest above
        # those of forgotten clients; the newest reserved one; and the reservation under way.
        self._first: dict[int, int] = {}
        self._unused: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        self._pending: dict[int, Reservation] = {}

    def reservable(self, partition: int, lowest: int) -> int:
        """Returns the first epoch from `lowest` on that this leader may give while the partition
        commits records."""
        epoch = max(lowest, self._first_of(partition), self._unused.get(partition, 0))
        return epoch + epoch % STEP

    def unreserved(self, partition: int, lowest: int) -> int:
        """Returns the first epoch from `lowest` on that this leader may give while the partition
        commits nothing, and that no other leader gives."""
        floor = max(self._first_of(partition) - RANGE, self._unused.get(partition, 0))
        epoch = max(lowest, floor)
        own = STEP * self._context.leading[partition] + 1
        return epoch + (own - epoch) % OWN_STEP

    def _first_of(self, partition: int) -> int:
        first = self._first.get(partition)
        if first is None:
            seconds = self._state.wall_us // 1_000_000 - EPOCH_ORIGIN_S
            newest = self._replicated.newest_epochs[partition]
            first = max(min(seconds, SECONDS_MAX), newest + 1) + RANGE
            self._first[partition] = first
        return first

    def raise_floor(self, partition: int, epoch: int) -> None:
        """Gives no epoch below `epoch` any more, reserved or not: the one before belongs to a
        forgotten session.

        A partition that is not led gets its floor when its log is applied, not before.
        """
        if partition in self._first:
            self._unused[partition] = max(epoch, self._unused.get(partition, 0))

    def is_reserved(self, partition: int, epoch: int) -> bool:
        return epoch <= self._newest.get(partition, 0)

    def reserve(self, partition: int, epoch: int, unreserved: int, client_id: str) -> bool:
        """Reserves epochs from `epoch` on. Returns True if the client is to wait for that, and
        False if the partition commits nothing, and no later leader will give `unreserved`."""
        pending = self._pending.get(partition)
        if pending is None:
            newest = max(epoch, self._replicated.newest_epochs[partition] + 1) + RANGE
            pending = Reservation(newest, self._state.now + PATIENCE_S)
            pending.clients[client_id] = None
            self._pending[partition] = pending
            self._append(partition, pending)
        elif not self._is_late(pending):
            pending.clients[client_id] = None
        elif unreserved < self._later_floor(partition):
            return False
        else:
            pending.patient[client_id] = None
        return True

    def _later_floor(self, partition: int) -> int:
        """Returns the lowest epoch that a later leader may give."""
        newest = self._replicated.newest_epochs[partition]
        return max(self._first_of(partition), newest + 1 + RANGE)

    def _is_late(self, pending: Reservation) -> bool:
        now = self._state.now
        return pending.due_at <= now and self._context.has_majority(now)

    def _append(self, partition: int, pending: Reservation) -> None:
        record = Record(
            partition,
            log_record.SESSION,
            timestamp_us=self._state.wall_us,
            sequence=pending.newest,
            payload=encode_session(ReserveRecord("", pending.newest)),
        )
        committed = partial(self._committed, partition, pending)
        refused = partial(self._refused, partition, pending)
        self._state.publish(record, OpenedPromise(committed, refused))

    def _committed(self, partition: int, pending: Reservation) -> None:
        if self._pending.get(partition) is pending:
            del self._pending[partition]
            self._newest[partition] = pending.newest
            self._release(pending.clients, True)
            self._release(pending.patient, True)

    def _refused(self, partition: int, pending: Reservation) -> None:
        if self._pending.get(partition) is pending:
            del self._pending[partition]
            self._drop(pending)

    def _drop(self, pending: Reservation) -> None:
        self._release(pending.clients, False)
        self._release(pending.patient, False)

    def _release(self, waiting: dict[str, None], goes_on: bool) -> None:
        clients = list(waiting)
        waiting.clear()
        for client_id in clients:
            self._go_on(client_id, goes_on)

    def forget(self, partition: int) -> None:
        """Drops everything of a partition that this node does not lead any more."""
        self._first.pop(partition, None)
        self._unused.pop(partition, None)
        self._newest.pop(partition, None)
        pending = self._pending.pop(partition, None)
        if pending is not None:
            self._drop(pending)

    def handle_timers(self) -> None:
        """Lets clients go on that have waited for too long."""
        for pending in list(self._pending.values()):
            if not pending.clients or pending.due_at > self._state.now:
                continue
            if self._is_late(pending):
                self._release(pending.clients, True)
            else:
                pending.due_at = self._state.now + PATIENCE_S

    def timer(self) -> float:
        """Returns the time at which the first client has waited for too long."""
        due = NEVER
        if not self._pending:
            return due
        for each in self._pending.values():
            if each.clients and each.due_at < due:
                due = each.due_at
        return due

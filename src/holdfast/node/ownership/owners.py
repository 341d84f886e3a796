"""Tracks owners of sessions that no committed record names, and the next owners' epochs.

The replicated state has the owner of every recorded session. This module adds the owners that no
record names, or not yet: those that nodes have reported and those that this leader has appointed.

A node that goes down, a report or a lost leadership may end hundreds of thousands of them. So such
an event only takes the next number. An owner counts while it is not older than the newest event
that concerns it, and a sweep removes the others later. A decision in between ignores them.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.node_state import CallbackPromise, NodeState
from holdfast.node.ownership.requests import SessionRequest
from holdfast.node.session.session import Session
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import ReserveRecord, encode_session
from holdfast.node.sweep import Sweep

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

    An earlier leader of the home partition may have given such an epoch. A new leader knows it only
    after the session's node has reported it, and that node may be cut off. So a leader first
    reserves epochs, by a record of the home partition. Every later leader applies that record
    before it decides, and gives only higher epochs.

    Smallest counter-example: A leads the home of client c and gives c epoch 8 at n1, without a
    record. B becomes the leader and gives c epoch 8 at n2. c publishes a QoS 2 message with packet
    id 5 at n1, and then another message with packet id 5 at n2. The second message is taken for a
    repetition: it is acknowledged and not stored.

    The record is appended when a leader opens the first session without a record, and again when a
    client has used up the range. One record is enough for all clients of a partition, because
    epochs count per client. Records have 32 bits for an epoch, so a range is short.

    A partition that commits nothing for `PATIENCE_S` reserves nothing. Its leader then gives epochs
    from the range below the reserved ones, which later leaders leave out too. It does so only while
    it reaches a majority. Otherwise another node may lead, for which the same holds. A client whose
    epoch would be above that range waits for the commit.

    Such an epoch is odd, and all others are even. Of the odd ones each leader gives every 16th,
    chosen by its leader epoch. So neither clocks nor what a leader has heard can make two leaders
    give one epoch, unless one is the 16th after the other and the partition has committed nothing
    in between. Counter-example with even ones: A does not know yet that B leads. A node reports to
    A the epoch that B has reserved and given. A gives the client the next one, and so does B.
    Counter-example if leaders share the odd ones: A gives c epoch 9 at n1. B becomes the leader,
    commits no reservation, begins with the same range, and gives c epoch 9 at n2.

    The newest epoch is that of the partition, because every later leader has at least as much of
    its log. Counter-example with that of all partitions: A knows epoch 387 from another partition,
    and gives c 388 without a record. B, which does not know it yet, reserves 387 to 515 and gives c
    388.
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
        appended = partial(self._appended, partition, pending)
        self._state.publish(record, CallbackPromise(appended))

    def _appended(self, partition: int, pending: Reservation, error: str) -> None:
        """Handles the commit of a reservation, or its end because this node leads no more."""
        if self._pending.get(partition) is not pending:
            return
        del self._pending[partition]
        if not error:
            self._newest[partition] = pending.newest
        self._release(pending.clients, not error)
        self._release(pending.patient, not error)

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
            self._release(pending.clients, False)
            self._release(pending.patient, False)

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


GIVEN_MAX: Final = 20_000
"""The most clients whose newest epoch is kept although no record contains it."""


class Owner:
    """The owner of one session and its epoch. `recorded`: a record of the log names, or will name,
    the owner."""

    def __init__(
        self, node: str, epoch: int, recorded: bool, request: int = 0, user: str = ""
    ) -> None:
        # The home partition of the session, and the newest event before this node was named.
        self.home = -1
        self.number = 0
        self.node = node
        self.epoch = epoch
        self.recorded = recorded
        # The number of the request that the node was made owner for.
        self.request = request
        # The user of the session; "" if no user owns it or none was reported.
        self.user = user


class Owners:
    """The unrecorded owners of the sessions whose home this node leads.

    Invariant: a given epoch is higher than every epoch of the session that this node knows.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        go_on: Callable[[str, bool], None],
    ) -> None:
        """`go_on`: see `EpochReservations`."""
        self._state = state
        self._node_id = context.node_id
        self._replicated = replicated
        self._owners: dict[str, Owner] = {}
        # The number of the newest event; per (node, home partition) that of the newest one that
        # ended the unrecorded sessions, per home partition that which ended all.
        self.number = 0
        self._forgotten: dict[tuple[str, int], int] = {}
        self._lost = [0] * state.config.partitions
        self._sweep: Sweep[str] = Sweep(state)
        # Whether an event has followed since the sweep began.
        self._is_swept_again = False
        # The newest epoch that this node gave each client.
        self._given: OrderedDict[str, int] = OrderedDict()
        self.epochs = EpochReservations(state, context, replicated, go_on)

    def _find(self, client_id: str) -> Owner | None:
        """Returns the owner by this table or, if it has none, this node for a session that is
        connected here and needs no record."""
        owner = self._owners.get(client_id)
        if owner is not None and self._counts(owner):
            return owner
        session = self._state.sessions.get(client_id)
        if session is None or session.connection is None or session.recorded:
            return None
        user = (session.username or "") if session.is_owned else ""
        owner = Owner(self._node_id, session.epoch, False, user=user)
        owner.home = self._replicated.home(client_id)
        owner.number = self.number
        return owner

    def _counts(self, owner: Owner) -> bool:
        """False for an owner that an event has ended, until the sweep removes it."""
        forgotten = 0 if owner.recorded else self._forgotten.get((owner.node, owner.home), 0)
        return owner.number >= max(forgotten, self._lost[owner.home])

    def _set(self, client_id: str, owner: Owner) -> None:
        owner.home = self._replicated.home(client_id)
        owner.number = self.number
        self._owners[client_id] = owner

    def next_number(self) -> int:
        """Returns the number of a new event."""
        self.number += 1
        return self.number

    def is_named_since(self, number: int, node: str, client_id: str) -> bool:
        """True if the node became owner of the client's session after this event."""
        owner = self._find(client_id)
        return owner is not None and owner.node == node and owner.number >= number

    def renew(self, node: str, client_id: str) -> None:
        """Keeps an owner beyond the events so far."""
        owner = self._find(client_id)
        if owner is not None and owner.node == node:
            owner.number = self.number

    def owner(self, client_id: str) -> Owner | None:
        """Returns the owner with the highest epoch, recorded or not; None if the session has
        none."""
        owner = self._find(client_id)
        image = self._replicated.state.sessions.get(client_id)
        if image is not None and image.owner and (owner is None or image.epoch >= owner.epoch):
            return Owner(image.owner, image.epoch, True)
        return owner

    def user(self, client_id: str) -> str:
        """Returns the user that the session belongs to, or "" if it belongs to none."""
        owner = self._find(client_id)
        image = self._replicated.state.sessions.get(client_id)
        if image is not None and (owner is None or image.epoch >= owner.epoch):
            return (image.username or "") if image.is_owned else ""
        return "" if owner is None else owner.user

    def unrecorded_epoch(self, client_id: str, request: int) -> int:
        """Returns the epoch given for this request to an unrecorded session, or -1 if there is
        none."""
        owner = self._find(client_id)
        if owner is None or owner.recorded or owner.request != request:
            return -1
        return owner.epoch

    def next_epoch(self, request: SessionRequest, image: Session | None) -> int:
        """Returns the epoch of the next owner, or 0 if the request waits until it is reserved."""
        client_id = request.client_id
        home = self._replicated.home(client_id)
        known = self._newest_epoch(client_id, image)
        epoch = self.epochs.reservable(home, known + 1)
        if image is not None or request.recorded or self.epochs.is_reserved(home, epoch):
            return epoch
        unreserved = self.epochs.unreserved(home, known + 1)
        if self.epochs.reserve(home, epoch, unreserved, client_id):
            return 0
        return unreserved

    def reserved_epoch(self, client_id: str, home: int) -> int:
        """Gives the next epoch of a session that begins here at once, or returns 0 if the epoch is
        not reserved. The session itself names its owner."""
        epoch = self.epochs.reservable(home, self._newest_epoch(client_id, None) + 1)
        if not self.epochs.is_reserved(home, epoch):
            return 0
        self._note_given(client_id, epoch)
        return epoch

    def _newest_epoch(self, client_id: str, image: Session | None) -> int:
        """Returns the newest epoch of the client that this node knows, or 0."""
        owner = self._find(client_id)
        return max(
            0 if image is None else image.epoch,
            0 if owner is None else owner.epoch,
            self._replicated.fired_epoch(client_id),
            self._replicated.ended[self._replicated.home(client_id)].epoch(client_id),
            # The session itself may be unrecorded. The epoch that another leader gave is then known
            # only from its QoS 2 packet ids.
            self._replicated.inbound_epoch(client_id),
            self._given.get(client_id, 0),
        )

    def give(self, request: SessionRequest, epoch: int) -> None:
        """Makes the node of `request` the owner with this epoch."""
        client_id = request.client_id
        self._note_given(client_id, epoch)
        user = request.user or ""
        self._set(client_id, Owner(request.node, epoch, request.recorded, request.number, user))

    def _note_given(self, client_id: str, epoch: int) -> None:
        assert epoch > self._given.get(client_id, 0), "an epoch of a session is given twice"
        self._given[client_id] = epoch
        self._given.move_to_end(client_id)
        if len(self._given) > GIVEN_MAX:
            forgotten, newest = self._given.popitem(last=False)
            self.epochs.raise_floor(self._replicated.home(forgotten), newest + 1)

    def told(self, node: str, client_id: str, epoch: int, user: str = "") -> tuple[str, int] | None:
        """Takes a node's report that it has a session.

        If another node has the session as well, returns the node that must release it, and its
        epoch: the one with the lower epoch. Epochs are equal if this leader gave its own before it
        received the report. Then the reported session is the older one and must be released. So is
        one with a higher epoch than a recorded session: this leader has applied all records of
        earlier leaders, and none names it.
        """
        known = self.owner(client_id)
        if known is not None and known.node != node and (known.recorded or known.epoch >= epoch):
            return node, epoch
        if known is not None and known.epoch >= epoch:
            self.renew(node, client_id)
            return None
        self._set(client_id, Owner(node, epoch, False, user=user))
        return None if known is None or known.node == node else (known.node, known.epoch)

    def closed(self, node: str, client_id: str, epoch: int) -> None:
        owner = self._owners.get(client_id)
        if owner is not None and owner.node == node and owner.epoch <= epoch:
            del self._owners[client_id]

    def forget(self, node: str, home: int, number: int) -> None:
        """Ends the unrecorded sessions of `node` with this home partition that were named before
        the event `number`."""
        self._forgotten[node, home] = max(number, self._forgotten.get((node, home), 0))
        self._clear()

    def forget_node(self, node: str) -> None:
        """Ends the unrecorded sessions of `node`. It reports them again when it is connected."""
        number = self.next_number()
        for home in range(len(self._lost)):
            self._forgotten[node, home] = number
        self._clear()

    def stop_leading(self, partition: int) -> None:
        """Ends all owners of the partition: the next leader rebuilds them from reports."""
        self.epochs.forget(partition)
        self._lost[partition] = self.next_number()
        self._clear()

    def _clear(self) -> None:
        """Begins to remove the owners that do not count."""
        if self._sweep.has_more:
            self._is_swept_again = True
        elif self._owners:
            self._is_swept_again = False
            self._sweep.begin(list(self._owners), self._remove, self._swept)

    def _remove(self, client_id: str) -> int:
        owner = self._owners.get(client_id)
        if owner is not None and not self._counts(owner):
            del self._owners[client_id]
        return 1

    def _swept(self) -> None:
        if self._is_swept_again:
            self._is_swept_again = False
            self._sweep.begin(list(self._owners), self._remove, self._swept)

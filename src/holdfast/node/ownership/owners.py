"""Tracks owners of sessions that no committed record names, and the next owners' epochs.

The replicated state has the owner of every recorded session. This module adds the owners that no
record names, or not yet: those that nodes have reported and those that this leader has appointed.

A node that goes down, a report or a lost leadership may end hundreds of thousands of them. So such
an event only takes the next number. An owner counts while it is not older than the newest event
that concerns it, and a sweep removes the others later. A decision in between ignores them.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from holdfast.node.context import ClusterContext
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.epochs import EpochReservations
from holdfast.node.ownership.requests import SessionRequest
from holdfast.node.session.session import Session
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.sweep import Sweep

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

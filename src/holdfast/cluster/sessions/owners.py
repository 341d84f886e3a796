"""Who owns the sessions whose home this node leads, and which epoch the next owner gets.

A session that the log knows has its owner in the images. Here are the owners that no record tells,
or not yet, as nodes tell them and as this one has given them.
"""

from collections import OrderedDict
from collections.abc import Container
from typing import Final

from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState
from holdfast.cluster.sessions.requests import SessionRequest
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.storage.partition import partition_of

EPOCH_ORIGIN_S: Final = 1_577_836_800
"""2020. Epochs of a session that nobody remembers begin with the seconds since then, or behind the
newest epoch of any session, so that they lie above those of an earlier life."""
SECONDS_MAX: Final = 1 << 31
"""A clock beyond 2088 counts as this one. Records have 32 bits for an epoch, and it only grows."""
GIVEN_MAX: Final = 20_000
"""Clients whose newest epoch is remembered though no record tells it."""


class Owner:
    """`recorded`: the log knows."""

    def __init__(
        self, node: str, epoch: int, recorded: bool, request: int = 0, user: str = ""
    ) -> None:
        self.node = node
        self.epoch = epoch
        self.recorded = recorded
        # With which it asked.
        self.request = request
        # Whose the session is, "" if it is no user's, or nobody has told.
        self.user = user


class Owners:
    def __init__(self, state: NodeState, images: ReplicatedState) -> None:
        self._state = state
        self._images = images
        self._owners: dict[str, Owner] = {}
        # The newest epoch that this node gave each client.
        self._given: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        """Clients with an owner that no record tells, or not yet."""
        return len(self._owners)

    def home(self, client_id: str) -> int:
        return partition_of(client_id.encode(), self._state.config.partitions)

    def owner(self, client_id: str) -> Owner | None:
        owner = self._owners.get(client_id)
        image = self._images.state.sessions.get(client_id)
        if image is not None and image.owner and (owner is None or image.epoch >= owner.epoch):
            return Owner(image.owner, image.epoch, True)
        return owner

    def user(self, client_id: str) -> str:
        """Whose the session is, "" if it is no user's."""
        owner = self._owners.get(client_id)
        image = self._images.state.sessions.get(client_id)
        if image is not None and (owner is None or image.epoch >= owner.epoch):
            return (image.username or "") if image.is_owned else ""
        return "" if owner is None else owner.user

    def unrecorded_epoch(self, client_id: str, request: int) -> int:
        """Given for this request, for a session that no record tells of; -1 if none was."""
        owner = self._owners.get(client_id)
        if owner is None or owner.recorded or owner.request != request:
            return -1
        return owner.epoch

    def give(self, request: SessionRequest, image: Session | None) -> int:
        """Make the asker the owner; its epoch, above all that there were."""
        client_id = request.client_id
        owner = self._owners.get(client_id)
        known = max(
            0 if image is None else image.epoch,
            0 if owner is None else owner.epoch,
            self._images.fired.get(client_id, 0),
            self._images.ended.get(client_id, 0),
            # No record may tell of the session itself, so another leader's is known by these.
            self._images.inbound_epoch(client_id),
            self._given.get(client_id, 0),
        )
        epoch = known + 1
        if not known:
            # Above what was forgotten of the client, also if the clock was set back since.
            seconds = self._state.wall_us // 1_000_000 - EPOCH_ORIGIN_S
            epoch = max(1, min(seconds, SECONDS_MAX), self._images.newest_epoch + 1)
        self._given[client_id] = epoch
        self._given.move_to_end(client_id)
        if len(self._given) > GIVEN_MAX:
            self._given.popitem(last=False)
        self._owners[client_id] = Owner(
            request.node, epoch, request.recorded, request.number, request.user or ""
        )
        return epoch

    def told(self, node: str, client_id: str, epoch: int, user: str = "") -> tuple[str, int] | None:
        """A node announces that it has a session. If another node has it as well, returns the node
        that must release it, and its epoch: the one with the lower epoch. Epochs are equal if this
        leader gave its own before it had heard of the other, of which no record tells; then the
        session that was announced is the older one."""
        known = self.owner(client_id)
        if known is not None and known.epoch >= epoch:
            return None if known.node == node else (node, epoch)
        self._owners[client_id] = Owner(node, epoch, False, user=user)
        if known is None or known.node == node or known.recorded:
            # A record that is on its way ends one that is recorded.
            return None
        return known.node, known.epoch

    def closed(self, node: str, client_id: str, epoch: int) -> None:
        owner = self._owners.get(client_id)
        if owner is not None and owner.node == node and owner.epoch <= epoch:
            del self._owners[client_id]

    def forget(self, node: str, homes: Container[int], but: Container[str]) -> None:
        """It has no session with these home partitions but those of the clients `but`."""
        for client_id, owner in list(self._owners.items()):
            if (
                owner.node == node
                and client_id not in but
                and not owner.recorded
                and self.home(client_id) in homes
            ):
                del self._owners[client_id]

    def forget_node(self, node: str) -> None:
        """It tells what it has when it is back."""
        for client_id, owner in list(self._owners.items()):
            if owner.node == node and not owner.recorded:
                del self._owners[client_id]

    def stop_leading(self, partition: int) -> None:
        for client_id in list(self._owners):
            if self.home(client_id) == partition:
                del self._owners[client_id]

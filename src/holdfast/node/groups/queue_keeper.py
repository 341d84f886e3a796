"""Keeps a queue's group with a durable session without a client.

A queue `$queue/filter` is the shared group `$share/$queue/filter`. A group exists while it has a
member, and its cursor outlives restarts and failovers while a member is durable. So a queue is a
group with one more member: its keeper, which never connects and is sent nothing. The log, the
snapshots and the replicated state have it like any other session.

The keeper's client id is the key of the group. So the records of both are in one home partition,
and the coordinator of the group knows the keeper before any member. Counter-example with another
partition: the only member leaves before the coordinator has applied the record of the keeper. The
coordinator ends the group, and the next one begins at the start of the queue again.
"""

from typing import Final

from holdfast.node.session.session import (
    NEVER_EXPIRES,
    GroupMember,
    Session,
    Subscription,
)
from holdfast.protocol.topics.names import is_queue, split_shared

KEEPER_EPOCH: Final = 1
"""The epoch of every keeper: no connection ever opens its session."""


class Keeper(Session):
    """A keeper. `is_past`: its queue began with messages from before its SUBSCRIBE, so each member
    needs the right `history`."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.is_past = False


def make_keeper(key: str, owner: str | None = None, is_past: bool = False) -> Keeper:
    """The keeper of the queue with this key, without its subscription. `owner`: the user in whose
    share of the queues it is."""
    keeper = Keeper(key)
    keeper.username = owner
    keeper.is_past = is_past
    keeper.epoch = KEEPER_EPOCH
    keeper.expiry_s = NEVER_EXPIRES
    keeper.recorded = True
    keeper.tailing = False
    return keeper


def check_queue(key: str, start: list[int], partitions: int) -> None:
    """Raises `ValueError` unless these are the key and the start of a queue."""
    split_shared(key)
    if not is_queue(key) or len(start) != partitions:
        raise ValueError(f"a queue {key[:100]!r} that starts at {len(start)} offsets")


def keeper_subscription(keeper: Session, start: list[int]) -> Subscription:
    """The keeper's membership, which begins where the queue does."""
    member = GroupMember(keeper, keeper.client_id, 2, False, False, 0, 0)
    member.start = list(start)
    return member

"""What a Raft leader knows of the other members: how far their logs agree with its own, and when it
heard of them. Decides what is committed and whether a majority is there."""

from dataclasses import dataclass
from typing import Final

from holdfast.cluster.raft.log import Membership

NEVER: Final = float("-inf")


@dataclass
class Follower:
    next: int
    """The next entry to send; those from there to `awaited` are under way."""
    contact: float
    """When it was last heard of."""
    match: int = 0
    commit_sent: int = 0
    awaited: int = 0
    """The last entry that is under way to it, or the index of a snapshot that is; 0: nothing. Until
    that is answered only heartbeats follow: so a dead follower costs little, and what comes
    meanwhile goes in one message."""
    retry_at: float = NEVER
    """From then on, what is under way is taken for lost if something else is answered."""
    is_due: bool = True
    """Something must be sent, if only a heartbeat."""

    def accepted(self, index: int, now: float) -> None:
        self.match = max(self.match, index)
        if self.match >= self.awaited or now >= self.retry_at:
            self.awaited = 0
        self.next = max(self.next, self.match + 1)

    def refused(self, index: int, agreeing: int, now: float) -> None:
        """`index`: the `prev` it does not have; `agreeing`: up to where it may agree."""
        if index != self.next - 1:
            # The answer to an earlier message.
            return
        if index == self.awaited and now < self.retry_at:
            # It has not got the snapshot yet.
            return
        self.next = max(self.match, agreeing) + 1
        self.awaited = 0
        self.is_due = True


class Followers:
    """By member id, oneself not included."""

    def __init__(self, member: str, membership: Membership, last_index: int, now: float) -> None:
        self.member = member
        self.membership = membership
        self.by_member: dict[str, Follower] = {}
        self.set_membership(membership, last_index, now)

    def set_membership(self, membership: Membership, last_index: int, now: float) -> None:
        self.membership = membership
        self.by_member = {
            member: self.by_member.get(member) or Follower(last_index + 1, now)
            for member in membership.members
            if member != self.member
        }

    def committed(self, durable_index: int) -> int:
        """What a majority of the voters has on disk."""
        matches = [
            durable_index if voter == self.member else self.by_member[voter].match
            for voter in self.membership.voters
        ]
        matches.sort(reverse=True)
        return matches[self.membership.majority - 1] if matches else 0

    def majority_contact(self, now: float) -> float:
        """Since when a majority, oneself included, was not heard of any more."""
        contacts = [
            now if voter == self.member else self.by_member[voter].contact
            for voter in self.membership.voters
        ]
        contacts.sort(reverse=True)
        return contacts[self.membership.majority - 1] if contacts else NEVER

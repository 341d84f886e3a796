"""A Raft leader's view of the other peers: how far their logs agree with its own, and when each
last replied. It computes the commit index and the contact with a majority.
"""

from typing import Final

from msgspec import Struct

from holdfast.node.raft.log import Membership

NEVER: Final = float("-inf")


class Follower(Struct):
    """The progress of one follower. Entries up to `match` are in its log, durably."""

    # Invariant: 0 <= match < next.
    next: int
    """The next entry to send. Those from there to `awaited` are under way."""
    contact: float
    """The time of its last reply."""
    match: int = 0
    commit_sent: int = 0
    awaited: int = 0
    """The last entry that is under way to it, or the index of a snapshot that is; 0: none. Until
    the follower replies, only heartbeats follow. So a dead follower costs little, and entries that
    arrive meanwhile go in one message."""
    retry_at: float = NEVER
    """The time from which a reply to something else means that the entries under way are lost."""
    is_due: bool = True
    """True if a message must be sent, at least a heartbeat."""

    def accepted(self, index: int, received: int, now: float) -> None:
        """Takes an acknowledgement: the logs agree up to `index`. Up to `received` its disk is
        still writing, so these entries are not lost."""
        self.match = max(self.match, index)
        if self.match >= self.awaited or (now >= self.retry_at and received < self.awaited):
            self.awaited = 0
        self.next = max(self.next, self.match + 1)
        assert 0 <= self.match < self.next, "match < next"

    def refused(self, index: int, agreeing: int, now: float) -> None:
        """Takes a refusal. `index` is the `prev` that the follower does not have. The logs may
        agree up to `agreeing`."""
        if index != self.next - 1:
            # This is the reply to an earlier message.
            return
        if index == self.awaited and now < self.retry_at:
            # The follower does not have the snapshot yet.
            return
        self.next = max(self.match, agreeing) + 1
        self.awaited = 0
        self.is_due = True


class Followers:
    """The progress of all other peers, by peer id."""

    def __init__(self, member: str, membership: Membership, last_index: int, now: float) -> None:
        self.peer = member
        self.membership = membership
        self.by_peer: dict[str, Follower] = {}
        self.set_membership(membership, last_index, now)

    def set_membership(self, membership: Membership, last_index: int, now: float) -> None:
        """Tracks exactly the peers of this membership."""
        self.membership = membership
        self.by_peer = {
            member: self.by_peer.get(member) or Follower(last_index + 1, now)
            for member in membership.members
            if member != self.peer
        }

    def committed(self, durable_index: int) -> int:
        """The last entry that a majority of the voters has on disk. This peer counts up to
        `durable_index`."""
        matches = [
            durable_index if voter == self.peer else self.by_peer[voter].match
            for voter in self.membership.voters
        ]
        matches.sort(reverse=True)
        return matches[self.membership.majority - 1] if matches else 0

    def majority_contact(self, now: float) -> float:
        """The time since which the replies, with this peer, no longer make a majority."""
        contacts = [
            now if voter == self.peer else self.by_peer[voter].contact
            for voter in self.membership.voters
        ]
        contacts.sort(reverse=True)
        return contacts[self.membership.majority - 1] if contacts else NEVER

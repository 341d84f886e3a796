"""One Raft peer without I/O: messages and time in, Readies out.

The driver's part, in this order:

1. Call an input, then `take_ready` until it returns None.
2. Send `Ready.messages`; apply `installed`, then `committed`.
3. Carry out `Ready.write` behind the writes of earlier Readies. One may be taken while others are
   still being written; the queue is first in, first out.
4. When a Ready and all before it are written (durably where `must_sync`), send its `messages_after`
   and call `persisted`. A Ready without a write is written when those before it are.

So no message that depends on a term, a vote or an entry leaves before that is durable. A leader's
appends may leave before its own disk has them (Raft thesis, section 10.2.1). Its own copy counts
when it is durable, like every other.

Peer ids are opaque. An id must never come back with another disk: it would vote a second time in a
term, or lack entries that were committed with its acknowledgement.
"""

from collections.abc import Callable
from typing import Final

from holdfast.node.raft.election import (
    handle_vote_reply,
    handle_vote_request,
    stand_soon,
    start_election,
    start_trial,
    vote_is_durable,
)
from holdfast.node.raft.follower import handle_append, handle_install
from holdfast.node.raft.leader import (
    advance_commit,
    append_membership,
    handle_append_reply,
    handle_leader_timers,
    may_change_members,
    send_appends,
    start_transfer,
)
from holdfast.node.raft.log import EntryKind, Membership, RaftSnapshot, RaftState
from holdfast.node.raft.messages import (
    Append,
    AppendReply,
    Install,
    Message,
    VoteReply,
    VoteRequest,
)
from holdfast.node.raft.state import LEADER, Raft, RaftFailure, RaftTiming, Ready, Write

UNCOMMITTED_MAX: Final = 1024
"""The most uncommitted entries of a leader; beyond it, it refuses proposals."""
KEEP_ENTRIES: Final = 128
"""The number of entries that stay although a snapshot covers them. A follower that lacks no more
needs no snapshot."""


class RaftNode:
    """One Raft peer. It does no I/O and reads no clock, so a driver or a simulation can run it."""

    def __init__(
        self,
        member: str,
        state: RaftState,
        random: Callable[[], float],
        now: float,
        timing: RaftTiming | None = None,
    ) -> None:
        """Starts with `state`, as loaded from the disk. `random` returns uniform values in [0,
        1)."""
        self._raft = Raft(member, state, timing or RaftTiming(), random)
        self._raft.arm_election(now)
        if self._raft.log.membership.voters == (member,):
            self._raft.election_at = now

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        self._raft.check()

    # What it is

    @property
    def peer(self) -> str:
        return self._raft.peer

    @property
    def term(self) -> int:
        return self._raft.term

    @property
    def is_leader(self) -> bool:
        return self._raft.role == LEADER

    @property
    def leader(self) -> str:
        """The leader's peer id; "" if it is not known."""
        return self._raft.leader

    @property
    def membership(self) -> Membership:
        """The membership in force, committed or not."""
        return self._raft.log.membership

    @property
    def commit(self) -> int:
        return self._raft.commit

    @property
    def last_index(self) -> int:
        return self._raft.log.last_index

    @property
    def durable(self) -> tuple[int, int]:
        """The term and the last committed entry on the disk. Neither ever falls there."""
        raft = self._raft
        return raft.durable_term, min(raft.durable_index, raft.commit)

    @property
    def log_end(self) -> tuple[int, int]:
        """The term and index of the last entry on the disk, committed or not."""
        index = self._raft.durable_index
        return self._raft.log.term_at(index), index

    @property
    def is_new(self) -> bool:
        """True if this peer has never belonged to a cluster."""
        return not (self._raft.term or self.last_index or self.membership.members)

    @property
    def may_change_members(self) -> bool:
        """True if this leader may change the membership now."""
        return may_change_members(self._raft)

    @property
    def is_transferring(self) -> bool:
        """True while this leader hands over to another voter."""
        return self._raft.transfer_to != ""

    def has_majority(self, now: float) -> bool:
        """A leader: it has heard from a majority lately. Any other peer: it has heard from a leader
        lately."""
        raft = self._raft
        if raft.followers is not None:
            return now - raft.followers.majority_contact(now) < raft.timing.election_max_s
        return raft.leader != "" and now - raft.leader_seen_at < raft.timing.election_max_s

    def is_caught_up(self, member: str, now: float) -> bool:
        """True if this is the leader and the peer has every committed entry and replies."""
        raft = self._raft
        if raft.followers is None:
            return False
        follower = raft.followers.by_peer.get(member)
        return (
            follower is not None
            and follower.match >= raft.commit
            and now - follower.contact < raft.timing.election_min_s
        )

    # Inputs

    def bootstrap(self, command: bytes, now: float) -> None:
        """Founds a cluster with this peer alone.

        Raises `ValueError` if the peer has ever been in a cluster.
        """
        if not self.is_new:
            raise ValueError("this node belongs to a cluster already")
        raft = self._raft
        raft.term = 1
        raft.append(EntryKind.COMMAND, command)
        raft.append(EntryKind.MEMBERS, Membership((raft.peer,)).encode())
        raft.election_at = now

    def handle_message(self, sender: str, message: Message, now: float) -> None:
        """Processes one message, unless it comes from a stranger while the leader is alive.

        Raises `RaftFailure` if it shows a state that Raft excludes.
        """
        raft = self._raft
        if raft.is_held or (raft.has_live_leader(now) and not raft.knows(sender)):
            return
        if isinstance(message, Append):
            handle_append(raft, sender, message, now)
        elif isinstance(message, AppendReply):
            if message.term > raft.term:
                raft.become_follower(message.term, "", now)
            else:
                handle_append_reply(raft, sender, message, now)
        elif isinstance(message, VoteRequest):
            handle_vote_request(raft, sender, message, now)
        elif isinstance(message, VoteReply):
            handle_vote_reply(raft, sender, message, now)
        elif isinstance(message, Install):
            handle_install(raft, sender, message, now)
        elif message.term == raft.term and sender == raft.leader:
            start_election(raft, now, is_transfer=True)

    def handle_timers(self, now: float, *, beats: bool = False) -> None:
        """`beats`: the heartbeats of a leader leave now."""
        raft = self._raft
        if beats:
            raft.heartbeat_at = min(raft.heartbeat_at, now)
        if raft.role == LEADER:
            handle_leader_timers(raft, now)
        elif now >= raft.election_at:
            start_trial(raft, now)

    def timer(self) -> float:
        """The time at which to call handle_timers."""
        raft = self._raft
        return raft.heartbeat_at if raft.role == LEADER else raft.election_at

    def propose(self, data: bytes, now: float) -> int | None:
        """Appends a command and returns the index of its entry. Returns None if this is not the
        leader, or it hands over, or too many entries are uncommitted. The entry is committed when
        it is handed out."""
        raft = self._raft
        if (
            raft.role != LEADER
            or not raft.is_voter
            or raft.transfer_to
            or raft.log.last_index - raft.commit >= UNCOMMITTED_MAX
        ):
            return None
        return raft.append(EntryKind.COMMAND, data).index

    def change_members(self, membership: Membership, now: float) -> int | None:
        """Adds or removes at most one voter, and any learners. Returns the index, or None if that
        is not allowed now. The leader cannot make itself a learner; it hands over first."""
        raft = self._raft
        if not may_change_members(raft) or raft.transfer_to:
            return None
        voters = set(membership.voters)
        if len(voters ^ set(raft.log.membership.voters)) > 1 or raft.peer not in voters:
            return None
        return append_membership(raft, membership, now)

    def transfer(self, member: str, now: float) -> bool:
        """Hands over to another voter. Returns False if that is not possible now."""
        raft = self._raft
        if raft.role != LEADER or raft.transfer_to or member == raft.peer:
            return False
        if member not in raft.log.membership.voters:
            return False
        start_transfer(raft, member, now)
        return True

    def set_may_lead(self, may_lead: bool) -> None:
        """Allows or forbid elections. A peer whose disk does not respond must not stand."""
        self._raft.may_lead = may_lead

    def resign(self, now: float) -> None:
        """Leads no longer, and never stands for election again."""
        raft = self._raft
        raft.has_resigned = True
        if raft.role == LEADER:
            raft.become_follower(raft.term, "", now)

    def hold(self) -> None:
        """Takes part in nothing until `release`. To be called before any input."""
        self._raft.is_held = True

    def release(self, term: int, floor: tuple[int, int], now: float) -> None:
        """Takes part, under a later term than `term`, and with no less than the log that ends at
        `floor`. This peer may have voted until that term, and confirmed entries of that log."""
        raft = self._raft
        assert raft.is_held, "released twice"
        raft.is_held = False
        raft.floor = floor
        raft.become_follower(max(term, raft.term) + 1, "", now)
        raft.arm_election(now)
        if raft.log.membership.voters == (raft.peer,):
            raft.election_at = now

    def leader_down(self, now: float) -> None:
        """Starts the election early, because the leader's process is known to be dead."""
        raft = self._raft
        if raft.role != LEADER and raft.leader:
            stand_soon(raft, now)

    def compact(self, data: bytes) -> None:
        """Takes a snapshot: `data` is the state that all entries handed out so far define."""
        raft = self._raft
        index = raft.handed
        snapshot = RaftSnapshot(index, raft.log.term_at(index), raft.log.membership_at(index), data)
        raft.log.compact(snapshot, KEEP_ENTRIES)
        raft.snapshot_to_write = snapshot

    def persisted(self, ready: Ready, now: float) -> None:
        """Notes that this Ready and all before it are written."""
        raft = self._raft
        write = ready.write
        if write is None:
            return
        was_voting = raft.is_voting
        raft.note_written(write)
        if was_voting and not raft.is_voting:
            vote_is_durable(raft, now)
        advance_commit(raft, now)

    # Outputs

    def take_ready(self, now: float) -> Ready | None:
        """The outputs since the last call; None if there are none."""
        raft = self._raft
        send_appends(raft, now)
        write = raft.take_write()
        installed, raft.installed = raft.installed, None
        committed = raft.take_committed()
        messages, raft.messages = tuple(raft.messages), []
        messages_after, raft.messages_after = tuple(raft.messages_after), []
        if not (write or installed or committed or messages or messages_after):
            return None
        return Ready(write, messages, messages_after, installed, committed)


__all__ = ["KEEP_ENTRIES", "RaftFailure", "RaftNode", "RaftTiming", "Ready", "Write"]

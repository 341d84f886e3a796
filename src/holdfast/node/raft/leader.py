"""Leads Raft: sends the log, counts durable copies, and steps down when it has not heard from a
majority.
"""

from typing import Final

from holdfast.node.raft.followers import Follower, Followers
from holdfast.node.raft.log import EntryKind, LogEntry, Membership
from holdfast.node.raft.messages import Append, AppendReply, Install, TimeoutNow
from holdfast.node.raft.state import LEADER, Raft

APPEND_BYTES_MAX: Final = 1 << 20
"""The most bytes of entries in one message; a single larger entry goes alone."""
APPEND_RETRY_S: Final = 0.1
"""The least time in seconds after which unacknowledged entries are sent again, if the follower
replies to heartbeats."""
INSTALL_RETRY_S: Final = 1.0
"""The same for a snapshot."""


def become_leader(raft: Raft, now: float) -> None:
    """Leads the current term."""
    assert raft.durable_term == raft.term, "the vote for itself is not durable"
    raft.role = LEADER
    raft.leader = raft.peer
    raft.granted = set()
    raft.votes = None
    raft.heartbeat_at = now
    raft.transfer_to = ""
    membership = raft.log.membership
    raft.followers = Followers(raft.peer, membership, raft.log.last_index, now)
    # Entries of earlier terms are committed with one of this term, never alone (Raft paper, section
    # 5.4.2). An entry of term 2 on a majority can still be overwritten by a leader of term 3 that
    # never had it.
    raft.append(EntryKind.NOTHING, b"")


def append_membership(raft: Raft, membership: Membership, now: float) -> int:
    """Appends a membership and returns its index. It is in force at once (Raft thesis, section
    4.1)."""
    assert raft.followers is not None
    entry = raft.append(EntryKind.MEMBERS, membership.encode())
    raft.followers.set_membership(membership, entry.index, now)
    return entry.index


def may_change_members(raft: Raft) -> bool:
    """True if a membership change may begin: no other is uncommitted, and an entry of this term is
    committed. Otherwise two majorities need not overlap. Smallest counter-example: of the voters A
    to D, leader A adds E, and only E has that entry. B, elected by C and D, removes D and commits
    that with C. Then A, D and E elect A."""
    return (
        raft.role == LEADER
        and raft.log.membership_index <= raft.commit
        and raft.log.term_at(raft.commit) == raft.term
    )


def advance_commit(raft: Raft, now: float) -> None:
    """Commits what a majority has on disk, if that is of this term. A leader that is no longer a
    voter tells the others that the change is committed, and steps down. Untold, they would learn
    that only from the next leader's own entry."""
    followers = raft.followers
    if followers is None:
        return
    index = followers.committed(raft.durable_index)
    if index <= raft.commit or raft.log.term_at(index) != raft.term:
        return
    raft.commit_to(index)
    if not raft.is_voter and raft.log.membership_index <= index:
        for follower in followers.by_peer.values():
            follower.is_due = True
        send_appends(raft, now)
        raft.become_follower(raft.term, "", now)


def handle_append_reply(raft: Raft, sender: str, reply: AppendReply, now: float) -> None:
    """Takes a follower's reply to entries, a heartbeat or a snapshot."""
    followers = raft.followers
    if followers is None or reply.term != raft.term:
        return
    follower = followers.by_peer.get(sender)
    if follower is None:
        return
    follower.contact = now
    if reply.is_accepted:
        has_received = raft.log.term_at(reply.hint_index) == reply.hint_term
        received = reply.hint_index if has_received else 0
        follower.accepted(min(reply.index, raft.log.last_index), received, now)
        advance_commit(raft, now)
        _finish_transfer(raft, sender, follower)
    elif reply.index > follower.match:
        agreeing = raft.log.agreeing(min(reply.hint_index, reply.index - 1), reply.hint_term)
        follower.refused(reply.index, agreeing, now)


def start_transfer(raft: Raft, target: str, now: float) -> None:
    """Begins to hand over. The leader accepts no proposals until that succeeds or times out."""
    assert raft.followers is not None
    raft.transfer_to = target
    raft.transfer_until = now + raft.timing.election_max_s
    follower = raft.followers.by_peer[target]
    follower.is_due = True
    _finish_transfer(raft, target, follower)


def _finish_transfer(raft: Raft, member: str, follower: Follower) -> None:
    if raft.transfer_to == member and follower.match == raft.log.last_index:
        raft.messages.append((member, TimeoutNow(raft.term)))


def handle_leader_timers(raft: Raft, now: float) -> None:
    """Steps down without a majority; sends the heartbeats that are due."""
    followers = raft.followers
    assert followers is not None
    if raft.transfer_to and now >= raft.transfer_until:
        raft.transfer_to = ""
    if now - followers.majority_contact(now) >= raft.timing.election_max_s:
        raft.become_follower(raft.term, "", now)
        return
    if now >= raft.heartbeat_at:
        raft.heartbeat_at = now + raft.timing.heartbeat_s
        for follower in followers.by_peer.values():
            follower.is_due = True


def send_appends(raft: Raft, now: float) -> None:
    """Sends entries, a new commit index or a heartbeat to every follower that needs one."""
    followers = raft.followers
    if followers is None:
        return
    for member, follower in followers.by_peer.items():
        has_news = follower.next <= raft.log.last_index or follower.commit_sent < raft.commit
        if follower.is_due or (has_news and not follower.awaited):
            _send_append(raft, member, follower, now)


def _send_append(raft: Raft, member: str, follower: Follower, now: float) -> None:
    log = raft.log
    follower.is_due = False
    follower.commit_sent = raft.commit
    if follower.next <= log.base_index:
        _send_install(raft, member, follower, now)
    prev_index = follower.next - 1
    entries: tuple[LogEntry, ...] = ()
    if not follower.awaited and follower.next <= log.last_index:
        entries = tuple(log.entries(follower.next, log.last_index + 1, APPEND_BYTES_MAX))
        follower.awaited = entries[-1].index
        follower.retry_at = now + APPEND_RETRY_S
    message = Append(raft.term, prev_index, log.term_at(prev_index), raft.commit, entries)
    raft.messages.append((member, message))


def _send_install(raft: Raft, member: str, follower: Follower, now: float) -> None:
    snapshot = raft.log.snapshot
    assert snapshot is not None
    # Until the snapshot is there, the follower refuses heartbeats. That does no harm.
    follower.next = snapshot.index + 1
    follower.awaited = snapshot.index
    follower.retry_at = now + INSTALL_RETRY_S
    raft.messages.append((member, Install(raft.term, snapshot)))

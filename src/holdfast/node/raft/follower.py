"""A Raft follower's handling of its leader's messages."""

from holdfast.node.raft.messages import Append, AppendReply, Install
from holdfast.node.raft.state import Raft, RaftFailure


def handle_append(raft: Raft, sender: str, message: Append, now: float) -> None:
    """Checks that the logs agree before the entries, appends the new ones, and replies."""
    if not _follow(raft, sender, message.term, now):
        return
    log = raft.log
    prev_index, entries = message.prev_index, message.entries
    # The logs agree up to here. The commit index would be wrong: it may be below that point.
    match = prev_index + len(entries)
    if prev_index <= raft.commit:
        # Committed entries are equal everywhere, unless a majority has lost them.
        raft.require_same(prev_index, message.prev_term)
        for entry in entries[: raft.commit - prev_index]:
            raft.require_same(entry.index, entry.term)
        entries = entries[raft.commit - prev_index :]
        prev_index = raft.commit
    elif log.term_at(prev_index) != message.prev_term:
        hint = log.agreeing(prev_index - 1, message.prev_term)
        hint = max(hint, raft.commit)
        reply = AppendReply(raft.term, False, prev_index, hint, log.term_at(hint))
        raft.messages_after.append((sender, reply))
        return
    for entry in entries:
        if entry.index <= log.last_index:
            if log.term_at(entry.index) == entry.term:
                # A message that was overtaken must not shorten the log: later entries may be
                # acknowledged.
                continue
            raft.truncate(entry.index)
        log.append(entry)
    raft.commit_to(max(raft.commit, min(message.commit, match)))
    if match <= raft.durable_index and raft.durable_term == raft.term:
        # All this is on the disk, whatever it is writing now. A reply behind that write would
        # depose the leader: it would be without a majority while the disks write.
        end = log.last_index if log.last_index > raft.durable_index else 0
        reply = AppendReply(raft.term, True, match, end, log.term_at(end) if end else 0)
        raft.messages.append((sender, reply))
    else:
        raft.messages_after.append((sender, AppendReply(raft.term, True, match)))


def handle_install(raft: Raft, sender: str, message: Install, now: float) -> None:
    """Takes over a snapshot, unless the log already has its last entry."""
    if not _follow(raft, sender, message.term, now):
        return
    snapshot = message.snapshot
    if snapshot.index > raft.commit:
        if raft.log.term_at(snapshot.index) == snapshot.term:
            raft.commit_to(snapshot.index)
        else:
            raft.restore(snapshot)
    raft.messages_after.append((sender, AppendReply(raft.term, True, snapshot.index)))


def _follow(raft: Raft, sender: str, term: int, now: float) -> bool:
    """Follows the sender. Returns False if it is deposed; it then receives the newer term.

    Raises `RaftFailure` if the term has another leader.
    """
    if term < raft.term:
        raft.messages_after.append((sender, AppendReply(raft.term, False, 0)))
        return False
    if raft.leader not in ("", sender) and term == raft.term:
        raise RaftFailure(f"term {term} has two leaders, {raft.leader} and {sender}")
    raft.become_follower(term, sender, now)
    raft.leader_seen_at = now
    raft.arm_election(now)
    return True

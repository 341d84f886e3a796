"""Elections of a Raft leader.

A peer first runs a *trial* (PreVote, Raft thesis section 9.6): it asks whether it would be elected,
and no term changes. So a peer that was cut off cannot depose a leader that the others hear. The
election follows. A peer's vote for itself counts when it is durable, like the votes of others.
"""

from holdfast.node.raft.followers import NEVER
from holdfast.node.raft.leader import become_leader
from holdfast.node.raft.messages import VoteReply, VoteRequest
from holdfast.node.raft.state import CANDIDATE, LEADER, TRIAL, Raft


def start_trial(raft: Raft, now: float) -> None:
    """Asks the voters whether they would elect this peer."""
    raft.arm_election(now)
    raft.leader = ""
    if not raft.may_stand or raft.is_voting:
        return
    raft.role = TRIAL
    raft.granted = set()
    _count_promise(raft, raft.peer, now)
    if raft.role != TRIAL:
        return
    _request_votes(
        raft, VoteRequest(raft.term + 1, raft.log.last_index, raft.log.last_term, is_trial=True)
    )


def start_election(raft: Raft, now: float, is_transfer: bool = False) -> None:
    """Stands for election in a new term, if this peer may."""
    if not raft.may_stand:
        return
    raft.arm_election(now)
    raft.role = CANDIDATE
    raft.leader = ""
    raft.term += 1
    raft.vote = raft.peer
    raft.votes = set()
    raft.is_transfer = is_transfer
    request = VoteRequest(
        raft.term, raft.log.last_index, raft.log.last_term, is_transfer=is_transfer
    )
    _request_votes(raft, request)


def _request_votes(raft: Raft, request: VoteRequest) -> None:
    messages = raft.messages if request.is_trial else raft.messages_after
    messages.extend((voter, request) for voter in raft.log.membership.voters if voter != raft.peer)


def stand_soon(raft: Raft, now: float) -> None:
    """Stands for election soon, because the leader is known to be down. The delay grows with the
    number of voters that come before this one."""
    timing = raft.timing
    others = [voter for voter in raft.log.membership.voters if voter != raft.leader]
    rank = others.index(raft.peer) if raft.peer in others else len(others)
    raft.leader = ""
    raft.leader_seen_at = NEVER
    delay_s = timing.election_step_s * (rank + 0.3 * raft.random() * (rank > 0))
    raft.election_at = min(raft.election_at, now + delay_s)


def handle_vote_request(raft: Raft, sender: str, request: VoteRequest, now: float) -> None:
    """Grants or denies a vote, or the promise of one."""
    if not request.is_transfer and raft.has_live_leader(now):
        # Its term is not adopted either: that would depose a working leader.
        if request.is_trial or request.term <= raft.term:
            _reply(raft, sender, VoteReply(raft.term, False, request.is_trial))
        return
    end = raft.log.end
    asked = (request.last_term, request.last_index)
    is_current = asked >= max(end, raft.floor)
    if sender in raft.log.membership.learners:
        is_current = is_current and asked > end
    if request.is_trial:
        is_granted = request.term > raft.term and is_current and not raft.is_voting
        term = request.term if is_granted else raft.term
        _reply(raft, sender, VoteReply(term, is_granted, is_trial=True))
        return
    if request.term > raft.term:
        raft.become_follower(request.term, "", now)
    is_granted = request.term == raft.term and is_current and raft.vote in ("", sender)
    if is_granted:
        assert raft.vote in ("", sender), "two votes in one term"
        raft.vote = sender
        raft.arm_election(now)
    _reply(raft, sender, VoteReply(raft.term, is_granted))


def _reply(raft: Raft, sender: str, reply: VoteReply) -> None:
    (raft.messages if reply.is_trial else raft.messages_after).append((sender, reply))


def handle_vote_reply(raft: Raft, sender: str, reply: VoteReply, now: float) -> None:
    """Counts a granted vote; adopts a higher term."""
    if not reply.is_granted:
        if reply.term > raft.term:
            raft.become_follower(reply.term, "", now)
        return
    if reply.is_trial:
        if raft.role == TRIAL and reply.term == raft.term + 1:
            _count_promise(raft, sender, now)
    elif reply.term == raft.term:
        _count_vote(raft, sender, now)


def vote_is_durable(raft: Raft, now: float) -> None:
    """Counts a candidate's vote for itself. Gives the election time from now on."""
    if raft.role != LEADER:
        raft.arm_election(now)
    if raft.vote == raft.peer:
        _count_vote(raft, raft.peer, now)


def _count_promise(raft: Raft, voter: str, now: float) -> None:
    raft.granted.add(voter)
    if _is_majority(raft, raft.granted):
        start_election(raft, now)


def _count_vote(raft: Raft, voter: str, now: float) -> None:
    if raft.votes is None:
        return
    raft.votes.add(voter)
    if _is_majority(raft, raft.votes):
        become_leader(raft, now)


def _is_majority(raft: Raft, voters: set[str]) -> bool:
    # The own vote must be durable. Smallest counter-example: A wins term 2 with B's vote and sends
    # entry 1, crashes before its vote is on disk, and forgets it. A can win term 2 again and put
    # another entry at place 1.
    membership = raft.log.membership
    votes = len(voters.intersection(membership.voters))
    return votes >= membership.majority and raft.peer in voters

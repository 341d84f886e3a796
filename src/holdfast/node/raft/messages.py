"""Messages between Raft peers. `term` is the sender's unless its description differs. The receiver
drops a message that is addressed to another peer: see `codec`.
"""

from msgspec import Struct

from holdfast.node.raft.log import LogEntry, RaftSnapshot


class VoteRequest(Struct, frozen=True):
    """A candidate's request for a vote, or for the promise of one."""

    term: int
    """The candidate's term; in a trial, the term that it would stand for."""
    last_index: int
    last_term: int
    is_trial: bool = False
    """PreVote: "would you vote for me?" No term changes."""
    is_transfer: bool = False
    """The leader asked for this election, so a live leader is no reason to refuse."""


class VoteReply(Struct, frozen=True):
    """The reply to a VoteRequest."""

    term: int
    """The requested term if the vote is granted, else the sender's."""
    is_granted: bool
    is_trial: bool = False


class Append(Struct, frozen=True):
    """Entries that follow `prev`, or none: a heartbeat."""

    term: int
    prev_index: int
    prev_term: int
    commit: int
    entries: tuple[LogEntry, ...] = ()


class AppendReply(Struct, frozen=True):
    """The reply to an Append or an Install."""

    term: int
    is_accepted: bool
    index: int
    """Accepted: the logs agree up to there, durably. Refused: the `prev` that the follower does not
    have."""
    hint_index: int = 0
    hint_term: int = 0
    """Refused: the logs may agree up to this index and term. Accepted: the end of the follower's
    log while its disk writes it, else 0. The reply to these entries follows the write."""


class Install(Struct, frozen=True):
    """A snapshot in place of entries that the leader no longer has. The follower replies with
    AppendReply."""

    term: int
    snapshot: RaftSnapshot


class TimeoutNow(Struct, frozen=True):
    """The leader's request to stand for election at once, because it hands over to the receiver."""

    term: int


Message = VoteRequest | VoteReply | Append | AppendReply | Install | TimeoutNow

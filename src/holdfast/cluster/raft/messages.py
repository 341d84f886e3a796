"""What the members of a Raft say to one another. `term` is the sender's, but where it is said
otherwise. The receiver drops what is not addressed to it: see `raft_wire`."""

from dataclasses import dataclass

from holdfast.cluster.raft.log import LogEntry, RaftSnapshot


@dataclass(frozen=True)
class VoteRequest:
    term: int
    """`is_trial`: the one it would stand for."""
    last_index: int
    last_term: int
    is_trial: bool = False
    """PreVote: would you vote for me? Nobody's term changes."""
    is_transfer: bool = False
    """The leader asked for it, so that it lives is no reason to refuse."""


@dataclass(frozen=True)
class VoteReply:
    term: int
    """The one that was asked for if it is granted, else the sender's."""
    is_granted: bool
    is_trial: bool = False


@dataclass(frozen=True)
class Append:
    """Entries that follow `prev`, or none: a heartbeat."""

    term: int
    prev_index: int
    prev_term: int
    commit: int
    entries: tuple[LogEntry, ...] = ()


@dataclass(frozen=True)
class AppendReply:
    term: int
    is_accepted: bool
    index: int
    """Accepted: the sender's log equals the leader's up to there, and durably. Else: the `prev`
    that it does not have."""
    hint_index: int = 0
    hint_term: int = 0
    """Not accepted: the logs may be equal up to there."""


@dataclass(frozen=True)
class Install:
    """A snapshot instead of entries that the leader does not have any more; answered by
    AppendReply."""

    term: int
    snapshot: RaftSnapshot


@dataclass(frozen=True)
class TimeoutNow:
    """Stand for election at once: the leader wants to be followed by the receiver."""

    term: int


Message = VoteRequest | VoteReply | Append | AppendReply | Install | TimeoutNow

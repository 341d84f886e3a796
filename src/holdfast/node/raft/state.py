"""State of one Raft peer, with the steps that all its parts need: to become a follower, to move the
commit index, to collect what must be written. `raft.node.RaftNode` is the public face. The modules
`election`, `follower` and `leader` are functions over this state.
"""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from holdfast.node.raft.followers import NEVER, Followers
from holdfast.node.raft.log import LogEntry, RaftLog, RaftSnapshot, RaftState
from holdfast.node.raft.messages import Message

FOLLOWER: Final = "follower"
TRIAL: Final = "trial"
"""The role of a peer that asks whether it would be elected (PreVote)."""
CANDIDATE: Final = "candidate"
LEADER: Final = "leader"

Addressed = tuple[str, Message]
"""A receiver's peer id and the message for it."""


class RaftFailure(Exception):
    """A state that Raft excludes: a damaged log, or two nodes under one name. The node must stop
    before it does harm; the text describes the finding."""


class RaftDiverged(RaftFailure):
    """The leader has another entry in the place of one that is committed here. So a majority of the
    voters lost entries, because disks were restored from older copies. They have continued without
    those entries, so this peer cannot."""


class RaftTiming(Struct, frozen=True):
    """The times of elections and heartbeats, in seconds."""

    heartbeat_s: float = 0.1
    """A node's leader sends them with the heartbeats of the node, if those are not rarer."""
    election_min_s: float = 0.3
    """A follower that received a message of its leader within this time elects no other."""
    election_max_s: float = 0.6
    """A leader steps down if it has not heard from a majority for this time."""
    election_step_s: float = 0.03
    """If the leader is known to be down, each voter waits this long for each voter before it. The
    steps keep the voters from splitting the vote."""


class Write(Struct, frozen=True):
    """A change for the disk. The driver carries it out completely and in order, and makes it
    durable before it reports it if `must_sync`.

    Without `snapshot`, `entries` follow the log, or replace it from the first entry's index on.
    With `snapshot`, the snapshot is made durable first, and `entries` are then all entries after
    the base.
    """

    term: int
    vote: str
    commit: int
    entries: tuple[LogEntry, ...]
    must_sync: bool
    snapshot: RaftSnapshot | None = None
    base_index: int = 0
    base_term: int = 0


class Ready(Struct, frozen=True):
    """The outputs since the last Ready; RaftNode describes the order in which they apply."""

    write: Write | None
    messages: tuple[Addressed, ...]
    """Messages that may leave at once."""
    messages_after: tuple[Addressed, ...]
    """Messages that may leave when this Ready and those before it are written."""
    installed: RaftSnapshot | None
    """The snapshot with which the state machine restarts, before `committed`."""
    committed: tuple[LogEntry, ...]
    """Entries to apply, in order. Each entry is handed out once."""


class Raft:
    """The state of one Raft peer: term, vote, role, log and pending outputs. The commit index never
    falls, and no entry at or below it is ever cut."""

    def __init__(
        self, member: str, state: RaftState, timing: RaftTiming, random: Callable[[], float]
    ) -> None:
        self.peer = member
        self.timing = timing
        self.random = random
        self.log = RaftLog(state)
        self.term = state.term
        self.vote = state.vote
        self.role = FOLLOWER
        self.leader = ""
        """The leader of this term, or "" while it is not known."""
        snapshot_index = state.snapshot.index if state.snapshot is not None else 0
        # Invariant: handed <= commit <= log.last_index; neither falls.
        self.commit = max(snapshot_index, min(state.commit, self.log.last_index))
        self.handed = snapshot_index
        """The last entry that was handed out to be applied."""
        # Invariant: durable_index <= written_index <= log.last_index.
        self.durable_index = self.log.last_index
        """The last entry of the log in memory that is on the disk."""
        self.durable_term = state.term
        self.durable_vote = state.vote

        self.leader_seen_at = NEVER
        """The time of the leader's last message."""
        self.election_at = NEVER
        """The time of the next election, unless a leader sends a message before."""
        self.may_lead = True
        """The disk responds, so this peer may lead."""
        self.has_resigned = False
        self.is_held = False
        """This peer may have lost votes and entries, and takes part in nothing yet."""
        self.floor = (0, 0)
        """The term and index of the last entry that this peer may have confirmed: see `attendance`.
        Until its log reaches that far, it neither stands nor votes for a peer with less."""
        self.granted: set[str] = set()
        """The voters that promised their votes in a trial."""
        self.votes: set[str] | None = None
        """The voters whose votes for this peer in this term count; None if it does not stand. They
        still count during a trial for the next term: a disk may write longer than an election."""
        self.is_transfer = False
        """The old leader asked for this election."""

        self.followers: Followers | None = None
        """The progress of the followers while this peer leads."""
        self.heartbeat_at = NEVER
        self.transfer_to = ""
        self.transfer_until = NEVER

        self.messages: list[Addressed] = []
        self.messages_after: list[Addressed] = []
        self.installed: RaftSnapshot | None = None
        # The values in the writes handed out so far.
        self.written_term = state.term
        self.written_vote = state.vote
        self.written_commit = state.commit
        self.written_index = self.log.last_index
        self.snapshot_to_write: RaftSnapshot | None = None

    @property
    def is_voter(self) -> bool:
        """True if this peer votes under the membership in force, committed or not."""
        return self.peer in self.log.membership.voters

    @property
    def may_stand(self) -> bool:
        """True if this peer may stand for election: it votes and its disk responds.

        A peer whose removal is not committed yet may stand too. Smallest counter-example: A and B
        vote. B leads, sends "A is no voter" to A, and crashes before its own disk has that entry.
        B's log is then older, so only A can win; and B needs A's vote.

        A learner may stand as well. It wins only if a majority of the voters lacks entries that it
        has, and leads until they have them. Smallest counter-example: A alone votes, and its disk
        is put back to entry 4. B is a learner and has the committed entry 5.
        """
        if not self.may_lead or self.has_resigned or self.is_held or self.log.end < self.floor:
            return False
        log = self.log
        return (
            self.peer in log.membership.members
            or self.peer in log.membership_at(self.commit).voters
        )

    @property
    def is_voting(self) -> bool:
        """True while this peer's vote in this term is not on its disk yet.

        Until then it begins no other election, and promises no vote. Smallest counter-example: the
        disks of A and B write for 0.7 s. A asks again after 0.6 s, in a new term. So each vote is
        one of a term that is over, and no peer ever leads.
        """
        return self.vote != "" and (self.term, self.vote) != (self.durable_term, self.durable_vote)

    def arm_election(self, now: float) -> None:
        timing = self.timing
        span = timing.election_max_s - timing.election_min_s
        self.election_at = now + timing.election_min_s + self.random() * span

    def become_follower(self, term: int, leader: str, now: float) -> None:
        """Follows `leader`; if it is empty, the leader is not known yet."""
        assert term >= self.term, "the term falls"
        if term > self.term:
            self.term = term
            self.vote = ""
        self.leader = leader
        if self.role != FOLLOWER:
            self.role = FOLLOWER
            self.followers = None
            self.transfer_to = ""
            self.granted = set()
            self.votes = None
            self.arm_election(now)

    def has_live_leader(self, now: float) -> bool:
        """True if this peer has no reason to elect another leader."""
        return self.leader != "" and (
            self.role == LEADER or now - self.leader_seen_at < self.timing.election_min_s
        )

    def knows(self, sender: str) -> bool:
        """True if the sender is the leader or a peer, by the membership in force or the committed
        one.

        While the leader is alive, the messages of all others are dropped, not only their vote
        requests (Raft thesis, section 4.2.3): each kind of message can contain a higher term and
        depose the leader. Without a live leader they count, because this peer may be behind.
        Smallest counter-example: of the voters A to D, D is down. A adds E, only E has that entry,
        and A stops. E needs the votes of B and C, which do not know E.

        A deposed leader that is still alive here does not delay its successor for long. Each
        majority of its peers contains one with a higher term, whose replies do not count for it, so
        it steps down within `election_max_s`.
        """
        if sender == self.leader or sender in self.log.membership.members:
            return True
        return sender in self.log.membership_at(self.commit).members

    def append(self, kind: int, data: bytes) -> LogEntry:
        assert self.role == LEADER or not self.commit, "only a leader makes entries"
        entry = LogEntry(self.log.last_index + 1, self.term, kind, data)
        self.log.append(entry)
        return entry

    def require_same(self, index: int, term: int) -> None:
        """Checks the leader's entry against the one that is committed here.

        Raises `RaftDiverged` if they differ.
        """
        if index >= self.log.base_index and self.log.term_at(index) != term:
            raise RaftDiverged(
                f"the others have another change {index} of the metadata than this node, where all"
                f" up to {self.commit} were agreed: their disks are older copies"
            )

    def truncate(self, index: int) -> None:
        """Cuts the log from the entry `index` on.

        Raises `RaftFailure` if that entry is committed.
        """
        if index <= self.commit:
            raise RaftFailure(f"entry {index} is committed, up to {self.commit}, and shall be cut")
        self.log.truncate(index)
        self.written_index = min(self.written_index, index - 1)
        self.durable_index = min(self.durable_index, index - 1)

    def commit_to(self, index: int) -> None:
        """Moves the commit index up to `index`.

        Raises `RaftFailure` if the log is shorter.
        """
        if index > self.log.last_index:
            raise RaftFailure(
                f"entry {index} is committed, and the log ends at {self.log.last_index}"
            )
        self.commit = max(self.commit, index)

    def restore(self, snapshot: RaftSnapshot) -> None:
        """Replaces log and state by the leader's snapshot."""
        assert snapshot.index > self.commit, "the snapshot ends before the commit index"
        self.log.restore(snapshot)
        self.commit = self.handed = snapshot.index
        self.durable_index = 0
        self.written_index = snapshot.index
        self.snapshot_to_write = self.installed = snapshot

    def take_write(self) -> Write | None:
        """The change for the disk since the last one, or None. A commit index alone needs no sync,
        because it is only a hint after a restart."""
        log = self.log
        snapshot = self.snapshot_to_write
        is_hard = (self.term, self.vote) != (self.written_term, self.written_vote)
        start = log.base_index if snapshot is not None else self.written_index
        must_sync = is_hard or snapshot is not None or start < log.last_index
        if not must_sync and self.commit == self.written_commit:
            return None
        write = Write(
            term=self.term,
            vote=self.vote,
            commit=self.commit,
            entries=tuple(log.entries(start + 1, log.last_index + 1)),
            must_sync=must_sync,
            snapshot=snapshot,
            base_index=log.base_index if snapshot is not None else 0,
            base_term=log.term_at(log.base_index) if snapshot is not None else 0,
        )
        self.written_term = self.term
        self.written_vote = self.vote
        self.written_commit = self.commit
        self.written_index = log.last_index
        self.snapshot_to_write = None
        return write

    def take_committed(self) -> tuple[LogEntry, ...]:
        """The committed entries that were not handed out yet."""
        entries = tuple(self.log.entries(self.handed + 1, self.commit + 1))
        assert len(entries) == self.commit - self.handed, "committed entries are missing"
        self.handed = self.commit
        return entries

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold."""
        log = self.log
        assert self.handed <= self.commit <= log.last_index, "handed <= commit <= last"
        assert self.durable_index <= self.written_index <= log.last_index, "durable <= written"
        assert self.durable_term <= self.written_term <= self.term, "a term is durable too early"
        assert log.base_index <= max(self.commit, 0), "uncommitted entries were dropped"
        assert (self.role == LEADER) == (self.followers is not None), "the leader's followers"
        if self.votes is not None:
            assert self.role in (CANDIDATE, TRIAL), "votes count for a peer that does not stand"
            assert self.vote == self.peer, "a candidate has another vote"
        if self.followers is not None:
            assert self.vote == self.peer, "a leader has another vote"
            assert self.durable_term == self.term, "a leader's vote is not durable"
            for follower in self.followers.by_peer.values():
                assert 0 <= follower.match < follower.next <= log.last_index + 1, "match < next"

    def note_written(self, write: Write) -> None:
        """Counts a finished write as durable. Its last entry may have been replaced in memory
        meanwhile, by an entry whose write comes later. So it counts only if the log still has the
        same term there."""
        assert write.term >= self.durable_term, "the durable term falls"
        self.durable_term = write.term
        self.durable_vote = write.vote
        if write.entries:
            last = write.entries[-1]
            index, term = last.index, last.term
        elif write.snapshot is not None:
            index, term = write.base_index, write.base_term
        else:
            return
        if self.log.term_at(index) == term:
            self.durable_index = max(self.durable_index, index)
        assert self.durable_index <= self.log.last_index, "more is durable than the log has"

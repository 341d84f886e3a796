"""Values of Raft, and its log in memory.

The log begins after its *base*. The base is at or below the snapshot's index, because some entries
that the snapshot covers stay. So a follower that is slightly behind needs no snapshot.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct, field, json

from holdfast.node.frame_kinds import BadFrame, decode_json

MEMBERS_MAX: Final = 4096
MEMBER_BYTES_MAX: Final = 128

_Members = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=MEMBER_BYTES_MAX)], ...],
    Meta(max_length=MEMBERS_MAX),
]
_MEMBERSHIP: Final = json.Decoder(tuple[_Members, _Members])


class EntryKind:
    """The kinds of log entries; the values are on the disk."""

    NOTHING: Final = 0
    """The no-op that a new leader appends. Its commit commits everything before it."""
    COMMAND: Final = 1
    """A command for the state machine."""
    MEMBERS: Final = 2
    """A Membership. It is in force from where it is appended, committed or not."""


class LogEntry(Struct, frozen=True):
    """One entry of the Raft log, named by its index and term."""

    index: int
    term: int
    kind: int
    data: bytes


class Membership(Struct, frozen=True):
    """The ids of all peers of the Raft. Learners receive the log and have no vote."""

    voters: tuple[str, ...] = ()
    learners: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        """All peers: voters, then learners."""
        return self.voters + self.learners

    @property
    def majority(self) -> int:
        """The number of votes that win."""
        return len(self.voters) // 2 + 1

    def with_learner(self, member: str) -> "Membership":
        """The membership with this peer as a learner, whether it joins or is demoted."""
        return Membership(_without(self.voters, member), _with(self.learners, member))

    def with_voter(self, member: str) -> "Membership":
        """The membership with this peer as a voter."""
        return Membership(_with(self.voters, member), _without(self.learners, member))

    def without(self, member: str) -> "Membership":
        """The membership without this peer."""
        return Membership(_without(self.voters, member), _without(self.learners, member))

    def encode(self) -> bytes:
        return json.encode((self.voters, self.learners))

    @classmethod
    def decode(cls, data: bytes) -> "Membership":
        """The membership in the data of an entry.

        Raises `BadFrame` if the data is invalid.
        """
        membership = cls(*decode_json(_MEMBERSHIP, data, "a membership"))
        if len(set(membership.members)) != len(membership.members):
            raise BadFrame("a membership that names a member twice")
        return membership


def _with(members: tuple[str, ...], member: str) -> tuple[str, ...]:
    return tuple(sorted({*members, member}))


def _without(members: tuple[str, ...], member: str) -> tuple[str, ...]:
    return tuple(other for other in members if other != member)


class RaftSnapshot(Struct, frozen=True):
    """The state that the entries up to `index` define."""

    index: int
    term: int
    membership: Membership
    data: bytes


class RaftState(Struct):
    """The state on the disk of one peer."""

    term: int = 0
    vote: str = ""
    commit: int = 0
    """A lower bound of the commit index; a hint that lets a restarted peer know its cluster."""
    snapshot: RaftSnapshot | None = None
    base_index: int = 0
    base_term: int = 0
    entries: list[LogEntry] = field(default_factory=list)


class RaftLog:
    """The log in memory, with the membership that each of its entries puts in force."""

    def __init__(self, state: RaftState) -> None:
        self.snapshot = state.snapshot
        self.base_index = state.base_index
        self._base_term = state.base_term
        self._entries: list[LogEntry] = []
        first = (0, Membership())
        if state.snapshot is not None:
            first = (state.snapshot.index, state.snapshot.membership)
        # (index, membership) in order, as far back as a truncation may reach.
        self._memberships = [first]
        for entry in state.entries:
            self.append(entry)

    @property
    def last_index(self) -> int:
        """The index of the last entry, or the base without entries."""
        return self.base_index + len(self._entries)

    @property
    def end(self) -> tuple[int, int]:
        """The term and index of the last entry. Of two logs with one history, the longer one has
        the larger end."""
        return self.last_term, self.last_index

    @property
    def last_term(self) -> int:
        """The term of the last entry, or of the base without entries."""
        return self._entries[-1].term if self._entries else self._base_term

    @property
    def membership(self) -> Membership:
        """The membership in force, committed or not."""
        return self._memberships[-1][1]

    @property
    def membership_index(self) -> int:
        """The index at which the membership in force was appended."""
        return self._memberships[-1][0]

    def membership_at(self, index: int) -> Membership:
        """The membership in force at an index that is not below the snapshot's."""
        for since, membership in reversed(self._memberships):
            if since <= index:
                return membership
        return self._memberships[0][1]

    def term_at(self, index: int) -> int:
        """The term of the entry `index`; -1 if the log does not have it, or no longer has it."""
        at = index - self.base_index
        if at == 0:
            return self._base_term
        if 0 < at <= len(self._entries):
            return self._entries[at - 1].term
        return -1

    def entries(self, start: int, end: int, bytes_max: int = 1 << 62) -> list[LogEntry]:
        """The entries [start, end), at most `bytes_max` bytes but at least one entry. All must be
        in the log."""
        found = self._entries[start - self.base_index - 1 : end - self.base_index - 1]
        size = 0
        for count, entry in enumerate(found):
            size += len(entry.data)
            if count and size > bytes_max:
                return found[:count]
        return found

    def append(self, entry: LogEntry) -> None:
        """Appends the entry; a membership is in force at once."""
        if entry.index != self.last_index + 1:
            raise ValueError(f"entry {entry.index} does not follow {self.last_index}")
        assert entry.term >= self.last_term, "terms fall along the log"
        # The snapshot has the membership of an entry that it covers, and that is still in the log.
        if entry.kind == EntryKind.MEMBERS and entry.index > self.membership_index:
            self._memberships.append((entry.index, Membership.decode(entry.data)))
        self._entries.append(entry)

    def truncate(self, index: int) -> None:
        """Drops that entry and those after it, and the memberships that they put in force."""
        del self._entries[index - self.base_index - 1 :]
        while self._memberships[-1][0] >= index:
            self._memberships.pop()

    def agreeing(self, index: int, term: int) -> int:
        """The last index at or below `index` whose term is not above `term`. No entry between the
        two can be equal in a log that has `term` at `index`, because terms never fall along a
        log."""
        index = min(index, self.last_index)
        while index > self.base_index and self.term_at(index) > term:
            index -= 1
        return index

    def restore(self, snapshot: RaftSnapshot) -> None:
        """Restarts the log after another peer's snapshot."""
        self.snapshot = snapshot
        self.base_index = snapshot.index
        self._base_term = snapshot.term
        self._entries = []
        self._memberships = [(snapshot.index, snapshot.membership)]

    def compact(self, snapshot: RaftSnapshot, keep: int) -> None:
        """Drops the entries that the snapshot covers, except the last `keep` of them."""
        assert snapshot.index <= self.last_index, "the snapshot covers more than the log"
        assert self.snapshot is None or self.snapshot.index <= snapshot.index, "an older snapshot"
        self.snapshot = snapshot
        base = max(self.base_index, snapshot.index - keep)
        self._base_term = self.term_at(base)
        del self._entries[: base - self.base_index]
        self.base_index = base
        self._memberships = [
            (snapshot.index, snapshot.membership),
            *(item for item in self._memberships if item[0] > snapshot.index),
        ]

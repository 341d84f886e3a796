"""The values of Raft, and its log in memory.

The log begins after its *base*. The base is at or below the snapshot's index: some entries that the
snapshot covers stay, so that a follower that is a little behind needs no snapshot.
"""

import json
from dataclasses import dataclass, field
from typing import Final

from holdfast.cluster.frame_kinds import BadFrame

MEMBERS_MAX: Final = 4096
MEMBER_BYTES_MAX: Final = 128


class EntryKind:
    NOTHING: Final = 0
    """What a new leader appends: with it, everything before it is committed."""
    COMMAND: Final = 1
    MEMBERS: Final = 2
    """A Membership; in force where it is appended, committed or not."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    index: int
    term: int
    kind: int
    data: bytes


@dataclass(frozen=True)
class Membership:
    """Ids of members. Learners get the log and have no vote."""

    voters: tuple[str, ...] = ()
    learners: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        return self.voters + self.learners

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1

    def with_learner(self, member: str) -> "Membership":
        """Joined anew, or demoted."""
        return Membership(_without(self.voters, member), _with(self.learners, member))

    def with_voter(self, member: str) -> "Membership":
        return Membership(_with(self.voters, member), _without(self.learners, member))

    def without(self, member: str) -> "Membership":
        return Membership(_without(self.voters, member), _without(self.learners, member))

    def encode(self) -> bytes:
        return json.dumps([self.voters, self.learners], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Membership":
        """Raises BadFrame."""
        try:
            content = json.loads(data)
        except ValueError:
            raise BadFrame("a membership that is no JSON") from None
        if not isinstance(content, list) or len(content) != 2:
            raise BadFrame("a membership that is not two lists")
        membership = cls(_names(content[0]), _names(content[1]))
        if len(set(membership.members)) != len(membership.members):
            raise BadFrame("a membership that names a member twice")
        return membership


def _with(members: tuple[str, ...], member: str) -> tuple[str, ...]:
    return tuple(sorted({*members, member}))


def _without(members: tuple[str, ...], member: str) -> tuple[str, ...]:
    return tuple(other for other in members if other != member)


def _names(content: object) -> tuple[str, ...]:
    if not isinstance(content, list) or len(content) > MEMBERS_MAX:
        raise BadFrame(f"a membership whose members are not at most {MEMBERS_MAX} names")
    for name in content:
        if not isinstance(name, str) or not 0 < len(name) <= MEMBER_BYTES_MAX:
            raise BadFrame(f"a member named {name!r:.200}")
    return tuple(content)


@dataclass(frozen=True)
class RaftSnapshot:
    """What the entries up to `index` have led to."""

    index: int
    term: int
    membership: Membership
    data: bytes


@dataclass
class RaftState:
    """What is on the disk of one member."""

    term: int = 0
    vote: str = ""
    commit: int = 0
    """At least so much is committed; a hint that lets a restarted member know its cluster."""
    snapshot: RaftSnapshot | None = None
    base_index: int = 0
    base_term: int = 0
    entries: list[LogEntry] = field(default_factory=list)


class RaftLog:
    def __init__(self, state: RaftState) -> None:
        self.snapshot = state.snapshot
        self.base_index = state.base_index
        self._base_term = state.base_term
        self._entries = list(state.entries)
        first = (0, Membership())
        if state.snapshot is not None:
            first = (state.snapshot.index, state.snapshot.membership)
        # (index, membership) as far back as a truncation may reach, in order.
        self._memberships = [first]
        for entry in self._entries:
            if entry.kind == EntryKind.MEMBERS and entry.index > first[0]:
                self._memberships.append((entry.index, Membership.decode(entry.data)))

    @property
    def last_index(self) -> int:
        return self.base_index + len(self._entries)

    @property
    def last_term(self) -> int:
        return self._entries[-1].term if self._entries else self._base_term

    @property
    def membership(self) -> Membership:
        return self._memberships[-1][1]

    @property
    def membership_index(self) -> int:
        """Where it was appended."""
        return self._memberships[-1][0]

    def membership_at(self, index: int) -> Membership:
        """The one in force for an index not below the snapshot's."""
        for since, membership in reversed(self._memberships):
            if since <= index:
                return membership
        return self._memberships[0][1]

    def term_at(self, index: int) -> int:
        """-1 if it is not here (any more)."""
        at = index - self.base_index
        if at == 0:
            return self._base_term
        if 0 < at <= len(self._entries):
            return self._entries[at - 1].term
        return -1

    def entries(self, start: int, end: int, bytes_max: int = 1 << 62) -> list[LogEntry]:
        """[start, end), of at most `bytes_max` but at least one; all must be here."""
        found = self._entries[start - self.base_index - 1 : end - self.base_index - 1]
        size = 0
        for count, entry in enumerate(found):
            size += len(entry.data)
            if count and size > bytes_max:
                return found[:count]
        return found

    def append(self, entry: LogEntry) -> None:
        if entry.index != self.last_index + 1:
            raise ValueError(f"entry {entry.index} does not follow {self.last_index}")
        if entry.kind == EntryKind.MEMBERS:
            self._memberships.append((entry.index, Membership.decode(entry.data)))
        self._entries.append(entry)

    def truncate(self, index: int) -> None:
        """Drop that entry and those after it."""
        del self._entries[index - self.base_index - 1 :]
        while self._memberships[-1][0] >= index:
            self._memberships.pop()

    def agreeing(self, index: int, term: int) -> int:
        """The last index at or below `index` whose term is not above `term`: nothing between the
        two can be the same in a log that has `term` at `index`."""
        index = min(index, self.last_index)
        while index > self.base_index and self.term_at(index) > term:
            index -= 1
        return index

    def restore(self, snapshot: RaftSnapshot) -> None:
        """Begin anew with what another member has."""
        self.snapshot = snapshot
        self.base_index = snapshot.index
        self._base_term = snapshot.term
        self._entries = []
        self._memberships = [(snapshot.index, snapshot.membership)]

    def compact(self, snapshot: RaftSnapshot, keep: int) -> None:
        """Drop what the snapshot covers, but for the last `keep` entries of it."""
        self.snapshot = snapshot
        base = max(self.base_index, snapshot.index - keep)
        self._base_term = self.term_at(base)
        del self._entries[: base - self.base_index]
        self.base_index = base
        self._memberships = [
            (snapshot.index, snapshot.membership),
            *(item for item in self._memberships if item[0] > snapshot.index),
        ]

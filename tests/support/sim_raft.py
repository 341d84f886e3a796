"""Members of a bare Raft in a world made for elections: leaders are cut off, deposed and crashed as
soon as they lead, votes split, voters crash when they have voted. Messages are objects and the disk
is a value, so a world takes milliseconds; `sim_meta` has the rest.

Checked: a term has one leader; it has what was ever committed; what is handed out is the same
everywhere; in the end one leads, and commits, also if writes take longer than elections.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from holdfast.node.raft import leader as raft_leading
from holdfast.node.raft import node as raft
from holdfast.node.raft.log import EntryKind, LogEntry, Membership, RaftState
from holdfast.node.raft.messages import Message, VoteReply, VoteRequest
from holdfast.node.raft.node import RaftNode
from holdfast.node.raft.state import RaftTiming, Ready, Write
from tests.sim.schedule import VirtualTime, Wrong

TROUBLE_S = 5.0


def carry_out(state: RaftState, write: Write) -> RaftState:
    """The disk after a write."""
    if write.snapshot is not None:
        return RaftState(
            write.term,
            write.vote,
            write.commit,
            write.snapshot,
            write.base_index,
            write.base_term,
            list(write.entries),
        )
    entries = state.entries
    if write.entries:
        entries = entries[: write.entries[0].index - state.base_index - 1] + list(write.entries)
    return RaftState(
        write.term,
        write.vote,
        write.commit,
        state.snapshot,
        state.base_index,
        state.base_term,
        entries,
    )


@dataclass
class Member:
    name: str
    disk: RaftState
    disk_s: float
    """How long a write takes, on average."""
    node: RaftNode | None = None
    life: int = 0
    timer_at: float = 0.0
    unwritten: list[Ready] = field(default_factory=list)
    is_writing: bool = False
    applied: int = 0
    state: tuple[bytes, ...] = ()
    """What it has applied: the last few."""


class ElectionWorld(VirtualTime):
    forgets_vote = False
    """A planted bug: the disk loses the vote."""
    mend_s = 10.0

    def __init__(self, seed: int, kind: str = "") -> None:
        """`kind`: "votes", "backlogs", "members" or "strangers" for more of that; by default the
        seed's."""
        self.kind = kind or ("mixed", "votes", "backlogs", "members", "strangers")[seed % 5]
        super().__init__()
        self.chance = random.Random(seed)
        chance = self.chance
        self.delay_s = chance.choice((0.002, 0.02, 0.06))
        self.loss = chance.choice((0.0, 0.0, 0.1))
        self.vote_crash = chance.choice((0.0, 0.1, 0.3))
        self.append_bytes = chance.choice((1, 20, 1 << 20))
        self.compact_entries = chance.choice((7, 1000))
        self.timing = RaftTiming(
            election_max_s=chance.choice((0.32, 0.6)), election_step_s=chance.choice((0.0, 0.03))
        )
        self.cut: set[tuple[str, str]] = set()
        self.is_mended = False
        self.trace: list[str] = []
        self.leaders: dict[int, str] = {}
        self.agreed: dict[int, LogEntry] = {}
        self.states: dict[int, tuple[bytes, ...]] = {}
        sizes = (3, 3, 3, 5) if self.kind == "backlogs" else (3, 3, 4, 5)
        names = [f"m{number}" for number in range(chance.choice(sizes))]
        self.propose_s = 0.06
        self.fault_s = 0.15
        disk_s = (0.001, 0.02, 0.08)
        self.leader_crash = chance.choice((0.0, 0.5))
        """How often a leader crashes within moments of its election."""
        self.leader_crash_s = 0.2
        self.commit_crash = 0.0
        """How often a leader crashes when it has committed something."""
        if self.kind == "votes":
            # Several stand in one term, and voters crash between their requests.
            self.delay_s = 0.02
            self.vote_crash = 0.3
            self.timing = RaftTiming(election_max_s=0.32, election_step_s=0.0)
            disk_s = (0.001,)
        elif self.kind in ("members", "strangers"):
            # Voters come and go under leaders that are cut off; strangers leave completely.
            self.fault_s = 0.06
        elif self.kind == "backlogs":
            # Leaders with entries of terms before, sent one by one, that crash meanwhile.
            self.append_bytes = 1
            self.delay_s = 0.02
            self.leader_crash = 0.6
            self.leader_crash_s = 0.06
            self.commit_crash = 0.5
            self.vote_crash = 0.0
            self.propose_s = 0.02
        first = LogEntry(1, 1, EntryKind.MEMBERS, Membership(tuple(names)).encode())
        self.members = {
            name: Member(name, RaftState(1, entries=[first]), chance.choice(disk_s))
            for name in names
        }

    def play(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(raft_leading, "APPEND_BYTES_MAX", self.append_bytes)
            patch.setattr(raft, "KEEP_ENTRIES", self.chance.choice((0, 3)))
            for member in self.members.values():
                self._start(member)
            self.after(0.3, self._fault)
            self.after(0.01, self._propose)
            self.advance_or(lambda: False, TROUBLE_S)
            self._mend()
            self.advance_or(self._is_settled, TROUBLE_S + self.mend_s)
            if not self._is_settled():
                raise Wrong("nobody leads and commits in the end")

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:8.4f} {text}")

    # Members

    def _start(self, member: Member) -> None:
        member.life += 1
        member.unwritten = []
        member.is_writing = False
        snapshot = member.disk.snapshot
        member.applied = snapshot.index if snapshot is not None else 0
        member.state = _unpack(snapshot.data) if snapshot is not None else ()
        member.node = RaftNode(member.name, member.disk, self.chance.random, self.now, self.timing)
        member.timer_at = float("inf")
        self.note(f"{member.name} starts in term {member.disk.term} voted {member.disk.vote!r}")
        self._drain(member)

    def _stop(self, member: Member) -> None:
        if member.node is not None:
            self.note(f"{member.name} ends")
        member.node = None
        member.life += 1

    def _restart_after(self, member: Member, delay_s: float) -> None:
        life = member.life

        def restart() -> None:
            if member.life == life and member.node is None:
                self._start(member)

        self.after(delay_s, restart)

    def _drain(self, member: Member) -> None:
        node = member.node
        assert node is not None
        while (ready := node.take_ready(self.now)) is not None:
            self._send(member, ready.messages)
            if ready.installed is not None:
                member.applied = ready.installed.index
                member.state = _unpack(ready.installed.data)
            for entry in ready.committed:
                self._apply(member, entry)
            member.unwritten.append(ready)
            if ready.committed and node.is_leader:
                self._maybe_crash_leader(member)
            if node.commit and len(ready.committed) and self._is_long(member, node):
                node.compact(_pack(member.state))
        if node.is_leader:
            self._check_leader(node)
        node.check()
        self._write(member)
        if node.timer() < member.timer_at:
            member.timer_at = node.timer()
            life = member.life
            when = member.timer_at
            self.after(max(0.0, when - self.now), lambda: self._timer(member, life, when))

    def _is_long(self, member: Member, node: RaftNode) -> bool:
        snapshot = node._raft.log.snapshot
        return member.applied - (snapshot.index if snapshot else 0) >= self.compact_entries

    def _timer(self, member: Member, life: int, when: float) -> None:
        if member.life == life and member.timer_at == when and member.node is not None:
            member.timer_at = float("inf")
            member.node.handle_timers(self.now)
            self._drain(member)

    def _write(self, member: Member) -> None:
        """One at a time; those without a write go when those before them are done."""
        while not member.is_writing and member.unwritten:
            ready = member.unwritten[0]
            if ready.write is None:
                member.unwritten.pop(0)
                self._send(member, ready.messages_after)
                continue
            member.is_writing = True
            write_s = self.chance.expovariate(1 / member.disk_s)
            self.after(write_s, partial(self._written, member, member.life))

    def _written(self, member: Member, life: int) -> None:
        if member.life != life or member.node is None:
            return
        ready = member.unwritten.pop(0)
        member.is_writing = False
        assert ready.write is not None
        member.disk = carry_out(member.disk, ready.write)
        if self.forgets_vote:
            member.disk.vote = ""
        self._send(member, ready.messages_after)
        member.node.persisted(ready, self.now)
        self._drain(member)

    def _send(self, member: Member, messages: tuple[tuple[str, Message], ...]) -> None:
        for receiver, message in messages:
            if not self.is_mended and self.chance.random() < self.loss:
                continue
            delay_s = self.delay_s * self.chance.random() * 2
            self.after(delay_s, self._delivery(member.name, receiver, message))
            has_voted = isinstance(message, VoteReply | VoteRequest) and not message.is_trial
            if has_voted and not self.is_mended and self.chance.random() < self.vote_crash:
                self.after(0.0, lambda: self._crash_briefly(member))

    def _delivery(self, sender: str, receiver: str, message: Message) -> Callable[[], None]:
        def deliver() -> None:
            node = self.members[receiver].node
            if node is not None and (sender, receiver) not in self.cut:
                node.handle_message(sender, message, self.now)
                self._drain(self.members[receiver])

        return deliver

    # Trouble

    def _maybe_crash_leader(self, member: Member) -> None:
        if not self.is_mended and self.chance.random() < self.commit_crash:
            self.after(0.0, lambda: self._replace(member))

    def _replace(self, member: Member) -> None:
        """One ends, and all others run."""
        self._stop(member)
        self._restart_after(member, 1.5)
        for other in self.members.values():
            if other is not member and other.node is None:
                self._start(other)
        self._tell_gone()

    def _crash_for_one_election(self, member: Member) -> None:
        self._stop(member)
        self._restart_after(member, 0.3 + self.chance.random())
        self._tell_gone()

    def _crash_briefly(self, member: Member) -> None:
        self._stop(member)
        self._restart_after(member, 0.003)

    def _fault(self) -> None:
        if self.is_mended:
            return
        chance = self.chance
        names = list(self.members)
        leaders = [each for each in self.members.values() if each.node and each.node.is_leader]
        kind = chance.randrange(6)
        if self.kind in ("members", "strangers") and chance.random() < 0.6:
            kind = 6
        if kind <= 1 and leaders:
            member = chance.choice(leaders)
            self._stop(member)
            self._restart_after(member, chance.choice((0.01, 0.2, 0.8)))
            if chance.random() < 0.7:
                self._tell_gone()
        elif kind == 2 and leaders:
            # Others follow somebody else, and it does not hear of it.
            name = chance.choice(leaders).name
            friends = set(chance.sample(names, chance.randint(0, len(names) // 2)))
            self.cut = {
                pair
                for other in names
                if other not in friends and other != name
                for pair in ((name, other), (other, name))
            }
            self._tell_gone()
        elif kind == 3:
            self.cut = set()
        elif kind == 4:
            member = self.members[chance.choice(names)]
            self._stop(member)
            self._restart_after(member, chance.choice((0.01, 0.2, 0.8)))
        elif leaders and kind == 5:
            node = chance.choice(leaders).node
            assert node is not None
            node.transfer(chance.choice(names), self.now)
        elif leaders:
            self._change_members(chance.choice(leaders))
        self.after(chance.expovariate(1 / self.fault_s), self._fault)

    def _change_members(self, leader: Member) -> None:
        node = leader.node
        assert node is not None
        name = self.chance.choice(list(self.members))
        membership = node.membership
        if name in membership.voters and self.kind == "strangers":
            node.change_members(membership.without(name), self.now)
        elif name in membership.voters:
            node.change_members(membership.with_learner(name), self.now)
        else:
            node.change_members(membership.with_voter(name), self.now)
        self._drain(leader)

    def _tell_gone(self) -> None:
        for member in self.members.values():
            if member.node is not None and self.chance.random() < 0.8:
                member.node.leader_down(self.now)
                self._drain(member)

    def _propose(self) -> None:
        for member in self.members.values():
            if member.node is not None and member.node.is_leader:
                member.node.propose(b"%d" % self.planned, self.now)
                self._drain(member)
        self.after(self.chance.expovariate(1 / self.propose_s), self._propose)

    def _mend(self) -> None:
        self.is_mended = True
        self.term_at_mend = max(self.leaders, default=0)
        self.cut = set()
        for member in self.members.values():
            if member.node is None:
                self._start(member)
        self._top_at_mend = max(self.agreed, default=0)

    def _is_settled(self) -> bool:
        nodes = [each.node for each in self.members.values() if each.node is not None]
        leaders = [node for node in nodes if node.is_leader]
        if len(leaders) != 1:
            return False
        # A peer that was removed is told nothing more.
        members = leaders[0].membership.members
        commits = [node.commit for node in nodes if node.peer in members]
        return min(commits) > self._top_at_mend

    # Checks

    def _apply(self, member: Member, entry: LogEntry) -> None:
        if entry.index != member.applied + 1:
            raise Wrong(f"{member.name} was handed {entry.index} after {member.applied}")
        member.applied = entry.index
        if self.agreed.setdefault(entry.index, entry) != entry:
            raise Wrong(f"{member.name} applies {entry}, not {self.agreed[entry.index]}")
        member.state = (*member.state, entry.data)[-4:]
        if self.states.setdefault(entry.index, member.state) != member.state:
            raise Wrong(f"{member.name} has another state at {entry.index}")

    def _check_leader(self, node: RaftNode) -> None:
        known = self.leaders.get(node.term)
        if known == node.peer:
            return
        if known is not None:
            raise Wrong(f"term {node.term} has two leaders, {known} and {node.peer}")
        self.note(f"{node.peer} leads term {node.term}")
        self.leaders[node.term] = node.peer
        if not self.is_mended and self.chance.random() < self.leader_crash:
            member = self.members[node.peer]
            self.after(
                self.chance.random() * self.leader_crash_s,
                lambda: self._crash_for_one_election(member),
            )
        log = node._raft.log
        for index, entry in self.agreed.items():
            if index > log.base_index and log.term_at(index) != entry.term:
                raise Wrong(f"leader {node.peer} of term {node.term} lacks entry {index}")


class SlowDisks(ElectionWorld):
    """Each disk takes about as long for a write as an election, or longer."""

    mend_s = 120.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for member in self.members.values():
            member.disk_s = self.chance.choice((0.3, 0.7, 1.5))


def _pack(state: tuple[bytes, ...]) -> bytes:
    return b"\n".join(state)


def _unpack(data: bytes) -> tuple[bytes, ...]:
    return tuple(data.split(b"\n"))

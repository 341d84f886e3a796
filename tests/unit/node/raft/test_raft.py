"""Raft, case by case; the simulations (tests/model/test_raft_simulation.py) do the rest."""

from collections.abc import Callable, Iterable

import pytest

from holdfast.node.frame_kinds import BadFrame
from holdfast.node.raft.codec import (
    decode_message,
    decode_snapshot,
    encode_message,
    encode_snapshot,
)
from holdfast.node.raft.leader import INSTALL_RETRY_S
from holdfast.node.raft.log import EntryKind, LogEntry, Membership, RaftSnapshot, RaftState
from holdfast.node.raft.messages import (
    Append,
    AppendReply,
    Install,
    Message,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from holdfast.node.raft.node import RaftFailure, RaftNode, Ready
from holdfast.node.raft.state import RaftDiverged
from tests.support.sim_raft import carry_out


class Group:
    """Members whose messages and writes take no time, unless a test holds them back."""

    def __init__(self, names: str, learners: str = "") -> None:
        membership = Membership(tuple(names), tuple(learners))
        first = LogEntry(1, 1, EntryKind.MEMBERS, membership.encode())
        self.now = 0.0
        self.cut: set[str] = set()
        """Members that hear nothing and are not heard."""
        self.stuck: set[str] = set()
        """Members whose disks do not finish."""
        self.write_s = 0.0
        self.done_at: dict[str, float] = {}
        """When the disk of a member is done with its oldest write."""
        self.sent: list[tuple[str, str, Message]] = []
        self.disks = {name: RaftState(1, entries=[first]) for name in names + learners}
        self.applied: dict[str, list[bytes]] = {name: [] for name in names + learners}
        self.nodes: dict[str, RaftNode] = {}
        self.waiting: dict[str, list[Ready]] = {}
        for name in self.disks:
            self.start(name)

    def start(self, name: str) -> None:
        # Different waits, so that the first by name stands first.
        wait = (ord(name) - ord("a")) / 10
        self.nodes[name] = RaftNode(name, self.disks[name], lambda: wait, self.now)
        self.waiting[name] = []
        self.applied[name] = []

    def settle(self) -> None:
        """Until nothing moves."""
        moved = True
        while moved:
            moved = False
            for name, node in list(self.nodes.items()):
                ready = node.take_ready(self.now)
                if ready is not None:
                    moved = True
                    self.deliver(name, ready.messages)
                    if ready.installed is not None:
                        self.applied[name] = [ready.installed.data]
                    self.applied[name] += [
                        entry.data for entry in ready.committed if entry.kind == EntryKind.COMMAND
                    ]
                    self.waiting[name].append(ready)
                while self.waiting[name] and name not in self.stuck and self.is_done(name):
                    moved = True
                    done = self.waiting[name].pop(0)
                    if done.write is not None:
                        self.disks[name] = carry_out(self.disks[name], done.write)
                    self.deliver(name, done.messages_after)
                    node.persisted(done, self.now)

    def is_done(self, name: str) -> bool:
        """Whether the disk is done with the oldest Ready; begins to write it."""
        if self.waiting[name][0].write is None:
            return True
        if self.now < self.done_at.setdefault(name, self.now + self.write_s) - 1e-9:
            return False
        del self.done_at[name]
        return True

    def deliver(self, sender: str, messages: Iterable[tuple[str, Message]]) -> None:
        for receiver, message in messages:
            self.sent.append((sender, receiver, message))
            if not self.cut & {sender, receiver} and receiver in self.nodes:
                self.nodes[receiver].handle_message(sender, message, self.now)

    def run(self, duration_s: float) -> None:
        self.settle()
        end = self.now + duration_s
        while self.now < end - 1e-9:
            self.now += 0.01
            for node in list(self.nodes.values()):
                if self.now >= node.timer():
                    node.handle_timers(self.now)
            self.settle()

    def leader(self) -> str:
        (name,) = (name for name, node in self.nodes.items() if node.is_leader)
        return name

    def propose(self, data: bytes) -> None:
        assert self.nodes[self.leader()].propose(data, self.now) is not None
        self.settle()


def elected(names: str = "abc", learners: str = "") -> Group:
    group = Group(names, learners)
    group.run(1.0)
    return group


def test_the_first_who_stands_leads_and_all_apply() -> None:
    group = elected()
    assert group.leader() == "a"
    group.propose(b"x")
    assert group.applied == {"a": [b"x"], "b": [b"x"], "c": [b"x"]}
    assert all(node.leader == "a" for node in group.nodes.values())


def test_one_voter_leads_at_once_but_not_before_its_vote_is_durable() -> None:
    group = Group("a")
    group.stuck = {"a"}
    group.run(0.02)
    assert not group.nodes["a"].is_leader
    group.stuck = set()
    group.settle()
    assert group.leader() == "a"
    group.propose(b"x")
    assert group.applied["a"] == [b"x"]


def test_nothing_is_committed_before_a_majority_has_it_on_disk() -> None:
    group = elected()
    group.stuck = {"b", "c"}
    group.propose(b"x")
    assert group.applied["a"] == []
    group.stuck = {"a", "c"}
    group.settle()
    # Its own disk had finished before.
    assert group.applied["a"] == [b"x"]
    group.propose(b"y")
    assert group.applied["a"] == [b"x"]
    group.stuck = {"a"}
    group.settle()
    assert group.applied["a"] == [b"x", b"y"]


def test_a_member_that_was_cut_off_does_not_depose_the_leader() -> None:
    group = elected()
    term = group.nodes["a"].term
    group.cut = {"c"}
    group.run(5.0)
    group.cut = set()
    group.run(1.0)
    assert group.leader() == "a"
    assert group.nodes["c"].term == term


STRANGER_TERM = 40


@pytest.mark.parametrize(
    "message",
    [
        VoteRequest(STRANGER_TERM, 1 << 20, STRANGER_TERM),
        VoteRequest(STRANGER_TERM, 1 << 20, STRANGER_TERM, is_trial=True),
        VoteRequest(STRANGER_TERM, 1 << 20, STRANGER_TERM, is_transfer=True),
        VoteReply(STRANGER_TERM, False),
        Append(STRANGER_TERM, 0, 0, 0),
        AppendReply(STRANGER_TERM, False, 0),
        Install(STRANGER_TERM, RaftSnapshot(1 << 20, STRANGER_TERM, Membership(("z",)), b"")),
        TimeoutNow(1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_no_stranger_deposes_a_live_leader(message: Message) -> None:
    group = elected("abc", "d")
    term = group.nodes["a"].term
    for receiver in "abcd":
        group.nodes[receiver].handle_message("z", message, group.now)
    group.run(2.0)
    assert {node.term for node in group.nodes.values()} == {term}
    assert group.leader() == "a"
    assert all(receiver != "z" for _, receiver, _ in group.sent)
    group.propose(b"x")
    assert all(applied == [b"x"] for applied in group.applied.values())


def test_a_removed_peer_that_was_not_told_deposes_nobody() -> None:
    group = elected("abcd")
    group.cut = {"d"}
    group.nodes["a"].change_members(Membership(("a", "b", "c")), group.now)
    group.settle()
    term = group.nodes["a"].term
    group.disks["d"].term = STRANGER_TERM
    group.start("d")
    group.run(2.0)
    group.cut = set()
    group.nodes["d"].handle_message("a", Append(STRANGER_TERM, 0, 0, 0), group.now)
    group.nodes["d"].handle_message("a", TimeoutNow(STRANGER_TERM), group.now)
    group.run(3.0)
    assert group.nodes["d"].term > STRANGER_TERM
    assert group.nodes["a"].is_leader
    assert {group.nodes[name].term for name in "abc"} == {term}


def with_voter_unknown_to(names: str, lagging: str) -> Group:
    """`a` of `names` leads and has added the voter `e`; these others have not received that."""
    group = elected(names)
    group.disks["e"] = RaftState()
    group.start("e")
    group.cut = set(lagging)
    leader = group.nodes["a"]
    assert leader.change_members(leader.membership.with_learner("e"), group.now) is not None
    group.settle()
    assert leader.may_change_members
    return group


def test_a_voter_that_a_majority_does_not_know_is_elected_by_it() -> None:
    """Of the voters `a` to `d`, `d` is dead. `a` adds `e`, which alone receives that, and stops."""
    group = with_voter_unknown_to("abcd", "d")
    del group.nodes["d"]
    group.cut = {"b", "c"}
    group.nodes["a"].change_members(Membership(tuple("abcde")), group.now)
    group.settle()
    assert group.nodes["e"].membership.voters == tuple("abcde")
    assert "e" not in group.nodes["b"].membership.voters
    del group.nodes["a"]
    group.cut = set()
    group.run(3.0)
    assert group.leader() == "e"
    assert {node.leader for node in group.nodes.values()} == {"e"}


def test_a_peer_that_lags_follows_a_leader_that_it_does_not_know() -> None:
    """`c` does not have the entry that adds `e`, and its leader hands over to `e`."""
    group = with_voter_unknown_to("abc", "c")
    group.nodes["a"].change_members(Membership(tuple("abce")), group.now)
    group.settle()
    group.now += 0.01
    group.cut = set()
    group.nodes["c"].handle_message("a", Append(group.nodes["a"].term, 0, 0, 0), group.now)
    assert group.nodes["a"].transfer("e", group.now)
    group.settle()
    assert group.nodes["e"].is_leader
    assert "e" not in group.nodes["c"].membership.members
    assert group.nodes["c"].leader == "a"
    group.run(1.0)
    assert group.leader() == "e"
    assert {node.leader for node in group.nodes.values()} == {"e"}
    assert group.nodes["c"].membership.voters == tuple("abce")


def test_a_leader_without_a_majority_is_none_any_more() -> None:
    group = elected("abcde")
    assert group.nodes["a"].has_majority(group.now)
    assert group.nodes["b"].has_majority(group.now)
    group.cut = {"a"}
    group.run(0.7)
    assert not group.nodes["a"].is_leader
    assert not group.nodes["a"].has_majority(group.now)
    group.run(1.0)
    assert group.leader() == "b"
    group.cut = {"c", "d", "e"}
    group.run(1.0)
    assert not any(node.is_leader for node in group.nodes.values())
    assert not any(node.has_majority(group.now) for node in group.nodes.values())


def test_a_leader_outlasts_a_write_of_its_majority() -> None:
    """A reply that needs nothing of the write is not behind it, so an Append arrives once."""
    group = elected("ab")
    term = group.nodes["a"].term
    group.sent.clear()
    for _ in range(2):
        group.stuck = {"b"}
        group.propose(b"x")
        group.run(2.0)
        assert group.nodes["a"].is_leader
        group.stuck = set()
        group.settle()
    assert group.nodes["a"].term == term
    assert group.applied["a"] == group.applied["b"] == [b"x", b"x"]
    assert sum(isinstance(each, Append) and bool(each.entries) for *_, each in group.sent) == 2


def test_entries_that_are_lost_are_sent_again_while_the_disk_writes() -> None:
    group = elected("abc")
    group.stuck = {"b"}
    group.propose(b"x")
    group.cut = {"b"}
    group.propose(b"y")
    # The replies of b to what it received are not there yet, and the next entries get lost.
    group.nodes["a"].handle_message("b", AppendReply(group.nodes["a"].term, True, 3), group.now)
    group.settle()
    group.cut = set()
    group.run(0.5)
    group.stuck = set()
    group.run(0.1)
    assert group.applied["b"] == [b"x", b"y"]


@pytest.mark.parametrize("write_s", [0.25, 0.5, 0.7, 1.5, 2.9])
def test_slow_disks_elect_a_leader_that_stays(write_s: float) -> None:
    """Also while one of three is down, and when all begin at once."""
    for names, dead in (("a", ""), ("ab", ""), ("abc", ""), ("abc", "a"), ("abcde", "ab")):
        group = Group(names)
        group.write_s = write_s
        group.cut = set(dead)
        for name in dead:
            del group.nodes[name]
        group.run(8 * write_s + 4)
        leader = group.leader()
        term = group.nodes[leader].term
        group.propose(b"x")
        group.run(4 * write_s)
        assert group.leader() == leader
        assert group.nodes[leader].term == term
        assert group.applied[leader] == [b"x"]


def test_a_disk_that_is_slower_than_the_candidate_still_elects_it() -> None:
    """The candidate counts a late vote, and asks for no other one meanwhile."""
    group = Group("abc")
    del group.nodes["c"]
    group.stuck = {"b"}
    group.run(5.0)
    term = group.nodes["a"].term
    assert not group.nodes["a"].is_leader
    group.stuck = set()
    group.settle()
    assert group.leader() == "a"
    assert group.nodes["a"].term == term


def test_a_dead_leader_is_replaced_without_waiting() -> None:
    group = elected()
    group.run(0.2)
    del group.nodes["a"]
    for node in group.nodes.values():
        node.leader_down(group.now)
    group.run(0.05)
    assert group.leader() == "b"


def test_who_alone_takes_the_leader_for_dead_is_not_elected() -> None:
    group = elected()
    group.run(0.2)
    term = group.nodes["a"].term
    group.nodes["b"].leader_down(group.now)
    group.run(0.2)
    assert group.leader() == "a"
    assert group.nodes["b"].term == term
    assert group.nodes["b"].leader == "a"


def test_a_leader_hands_over() -> None:
    group = elected()
    group.propose(b"x")
    assert group.nodes["a"].transfer("c", group.now)
    assert group.nodes["a"].propose(b"refused", group.now) is None
    group.run(0.02)
    assert group.leader() == "c"
    assert not group.nodes["a"].transfer("b", group.now)


def test_a_hand_over_to_a_dead_member_is_given_up() -> None:
    group = elected()
    group.cut = {"c"}
    group.nodes["a"].transfer("c", group.now)
    assert group.nodes["a"].propose(b"refused", group.now) is None
    group.run(0.8)
    assert group.leader() == "a"
    group.propose(b"x")
    assert group.applied["b"] == [b"x"]


def test_learners_apply_and_do_not_count() -> None:
    group = elected("a", "xy")
    group.propose(b"1")
    assert group.applied == {"a": [b"1"], "x": [b"1"], "y": [b"1"]}
    group.cut = {"x", "y"}
    group.propose(b"2")
    assert group.applied["a"] == [b"1", b"2"]
    del group.nodes["a"]
    group.cut = set()
    group.run(3.0)
    assert not any(node.is_leader for node in group.nodes.values())


def put_back() -> Group:
    """a alone votes, and its disk is put back to before the commands 2 and 3, which its learner b
    has as committed. It is held before anything happens."""
    group = elected("a", "b")
    group.propose(b"1")
    copied = RaftState(group.disks["a"].term, vote="a", entries=list(group.disks["a"].entries))
    group.propose(b"2")
    group.propose(b"3")
    group.run(0.2)
    assert group.applied["b"] == [b"1", b"2", b"3"]
    group.disks["a"] = copied
    group.start("a")
    group.nodes["a"].hold()
    return group


def test_a_held_peer_takes_part_in_nothing() -> None:
    """Any entry of its own would stand where b has another one that is committed."""
    group = put_back()
    before = group.disks["a"]
    group.run(5.0)
    assert not any(node.is_leader for node in group.nodes.values())
    assert group.disks["a"] == before


def test_a_learner_leads_until_the_voters_have_what_only_it_has() -> None:
    group = put_back()
    term, end = group.nodes["b"].term, group.nodes["b"].log_end
    group.nodes["a"].release(term, end, group.now)
    assert group.nodes["a"].term > term
    group.run(3.0)
    assert group.leader() == "a"
    assert group.applied["a"] == group.applied["b"] == [b"1", b"2", b"3"]
    group.propose(b"4")
    assert group.applied["b"][-1] == b"4"


def test_a_released_peer_elects_nobody_with_less_than_its_floor() -> None:
    """A third node has what a has lost, and is not there."""
    group = put_back()
    term, (last_term, last) = group.nodes["b"].term, group.nodes["b"].log_end
    group.nodes["a"].release(term, (last_term, last + 1), group.now)
    group.run(5.0)
    assert not any(node.is_leader for node in group.nodes.values())


def test_a_learner_without_more_than_the_voters_is_not_elected() -> None:
    """It would lead for a moment whenever the voters are slow to elect one of them."""
    group = elected("abc", "d")
    group.propose(b"1")
    group.run(0.2)
    term = group.nodes["d"].term
    for name in "abc":
        group.nodes[name].set_may_lead(False)
    group.cut.add("a")
    group.run(3.0)
    assert not group.nodes["d"].is_leader
    assert group.nodes["d"].term == term


def test_members_change_one_voter_at_a_time() -> None:
    group = elected("ab", "x")
    leader = group.nodes["a"]
    assert leader.change_members(Membership(("a", "b", "x", "y")), group.now) is None
    assert leader.change_members(Membership(("b",), ("a", "x")), group.now) is None
    group.cut = {"b", "x"}
    assert leader.change_members(Membership(("a", "b", "x")), group.now) is not None
    assert leader.change_members(Membership(("a", "b")), group.now) is None
    group.cut = set()
    group.run(0.3)
    assert group.nodes["x"].membership == Membership(("a", "b", "x"))
    assert leader.change_members(Membership(("a", "b"), ("x",)), group.now) is not None


def test_a_new_leader_changes_no_members_before_it_has_committed() -> None:
    first = LogEntry(1, 1, EntryKind.MEMBERS, Membership(("a",)).encode())
    node = RaftNode("a", RaftState(1, entries=[first]), lambda: 0.5, 0.0)
    node.handle_timers(0.0)
    vote = node.take_ready(0.0)
    assert vote is not None
    node.persisted(vote, 0.0)
    assert node.is_leader
    assert node.change_members(Membership(("a",), ("x",)), 0.0) is None
    entry = node.take_ready(0.0)
    assert entry is not None
    node.persisted(entry, 0.0)
    assert node.change_members(Membership(("a",), ("x",)), 0.0) is not None


def test_who_has_the_entry_that_takes_its_vote_may_still_be_needed() -> None:
    """The leader takes a vote away, tells only that voter, and loses the entry in a crash."""
    group = elected("ab")
    group.stuck = {"a"}
    assert group.nodes["a"].change_members(Membership(("a",), ("b",)), group.now) is not None
    group.settle()
    assert group.nodes["b"].membership == Membership(("a",), ("b",))
    group.stuck = set()
    group.start("a")
    group.run(3.0)
    assert group.leader() == "a"
    assert group.nodes["a"].membership == Membership(("a",), ("b",))


def test_a_leader_that_commits_its_removal_tells_the_others() -> None:
    """As above: b must lead, commits that it has no vote, and leads no more."""
    group = elected("ab")
    group.stuck = {"a"}
    removal = group.nodes["a"].change_members(Membership(("a",), ("b",)), group.now)
    assert removal is not None
    group.settle()
    group.stuck = set()
    group.start("a")
    while group.nodes["b"].commit < removal:
        assert group.now < 5.0
        group.run(0.01)
    assert not group.nodes["b"].is_leader
    assert group.nodes["a"].commit == group.nodes["b"].commit


def test_a_log_that_has_gone_astray_is_mended_in_a_few_messages() -> None:
    group = elected()
    group.cut = {"a"}
    for count in range(200):
        group.nodes["a"].propose(b"lost %d" % count, group.now)
    group.run(2.0)
    for count in range(200):
        group.propose(b"kept %d" % count)
    # Its leader believes at first that all have what it has.
    assert group.nodes["b"].transfer("c", group.now)
    group.run(0.1)
    group.sent = []
    group.cut = set()
    group.run(0.2)
    assert group.applied["a"] == group.applied["b"]
    assert len(group.applied["a"]) == 200
    refusals = [
        message
        for sender, _, message in group.sent
        if sender == "a" and isinstance(message, AppendReply) and not message.is_accepted
    ]
    assert 0 < len(refusals) < 8


def test_a_member_that_is_far_behind_gets_a_snapshot() -> None:
    group = elected()
    group.cut = {"c"}
    for count in range(300):
        group.propose(b"%d" % count)
    leader = group.nodes["a"]
    leader.compact(b"all so far")
    group.propose(b"after")
    group.cut = set()
    group.run(0.3)
    assert group.applied["c"] == [b"all so far", b"after"]
    assert group.disks["c"].snapshot == group.disks["a"].snapshot
    # It goes on from there after a restart.
    group.start("c")
    group.propose(b"more")
    group.run(0.3)
    assert group.applied["c"] == [b"after", b"more"]


def test_a_snapshot_that_got_lost_is_sent_again() -> None:
    group = elected()
    group.cut = {"c"}
    for count in range(300):
        group.propose(b"%d" % count)
    group.nodes["a"].compact(b"all so far")
    group.run(1.0)
    group.cut = set()
    deliver = group.deliver
    lost = []

    def lose_one(sender: str, messages: Iterable[tuple[str, Message]]) -> None:
        for receiver, message in messages:
            if isinstance(message, Install) and not lost:
                lost.append(message)
            else:
                deliver(sender, [(receiver, message)])

    group.deliver = lose_one  # type: ignore[method-assign]
    group.run(2 * INSTALL_RETRY_S + 0.5)
    assert lost
    assert group.applied["c"] == [b"all so far"]


def test_a_message_that_was_overtaken_does_not_shorten_the_log() -> None:
    group = elected()
    group.propose(b"x")
    old = [message for _, to, message in group.sent if to == "b" and isinstance(message, Append)]
    group.propose(b"y")
    last = group.nodes["b"].last_index
    for message in old:
        group.nodes["b"].handle_message("a", message, group.now)
    group.settle()
    assert group.nodes["b"].last_index == last


def test_two_leaders_of_one_term_stop_the_node() -> None:
    group = elected()
    with pytest.raises(RaftFailure, match="two leaders, a and c"):
        group.nodes["b"].handle_message("c", Append(group.nodes["b"].term, 1, 1, 1), group.now)


def test_another_entry_where_one_is_committed_stops_the_node() -> None:
    """Disks were put back from older copies, and a majority has gone on from there. Taking the
    message for known would leave the members with different states for good."""
    group = elected()
    group.propose(b"x")
    term = group.nodes["b"].term + 1
    commit = group.nodes["b"].commit
    for count in range(1, commit):
        entries = tuple(
            LogEntry(index, term, EntryKind.COMMAND, b"") for index in range(count + 1, 9)
        )
        with pytest.raises(RaftDiverged, match=f"all up to {commit} were agreed"):
            group.nodes["b"].handle_message("c", Append(term, count, 1, 1, entries), group.now)
    for prev in (commit - 1, commit):
        with pytest.raises(RaftDiverged):
            group.nodes["b"].handle_message("c", Append(term, prev, term, 1), group.now)
    group.settle()
    assert group.applied["b"] == [b"x"]


def test_a_full_leader_takes_no_more() -> None:
    group = elected()
    group.cut = {"b", "c"}
    taken = 0
    while group.nodes["a"].propose(b"x", group.now) is not None:
        taken += 1
    assert taken == 1024


def test_a_cluster_is_founded_once() -> None:
    node = RaftNode("a", RaftState(), lambda: 0.5, 0.0)
    node.handle_timers(10.0)
    assert not node.is_leader
    node.bootstrap(b"first", 10.0)
    with pytest.raises(ValueError, match="already"):
        node.bootstrap(b"second", 10.0)


# Bytes

SNAPSHOT = RaftSnapshot(7, 3, Membership(("a", "b"), ("c",)), b"state" * 1000)
MESSAGES: list[Message] = [
    VoteRequest(3, 9, 2, is_trial=True),
    VoteRequest(3, 9, 2, is_transfer=True),
    VoteReply(3, True),
    VoteReply(3, False, is_trial=True),
    Append(3, 9, 2, 8),
    Append(
        3,
        9,
        2,
        8,
        (
            LogEntry(10, 3, EntryKind.NOTHING, b""),
            LogEntry(11, 3, EntryKind.COMMAND, b"data"),
            LogEntry(12, 3, EntryKind.MEMBERS, Membership(("a",)).encode()),
        ),
    ),
    AppendReply(3, True, 9),
    AppendReply(3, False, 9, 5, 2),
    Install(3, SNAPSHOT),
    TimeoutNow(3),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_come_back_from_their_bytes(message: Message) -> None:
    payload = encode_message("n1.abc", "n2.def", message)
    assert decode_message(payload) == ("n1.abc", "n2.def", message)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_that_are_cut_short_or_damaged_are_refused(message: Message) -> None:
    payload = encode_message("n1.abc", "n2.def", message)
    whole_entries = []
    for end in range(len(payload)):
        try:
            whole_entries.append(decode_message(payload[:end]))
        except BadFrame:
            continue
    # Cut between two entries it is a message with fewer of them.
    assert len(whole_entries) <= len(getattr(message, "entries", ()))
    for at in range(len(payload)):
        for flip in (1, 0x80):
            damaged = bytearray(payload)
            damaged[at] ^= flip
            _decode_or_refuse(decode_message, bytes(damaged))
    if not isinstance(message, Append | Install):
        with pytest.raises(BadFrame):
            decode_message(payload + b"x")


def _decode_or_refuse(decode: Callable[[bytes], object], data: bytes) -> None:
    try:
        decode(data)
    except BadFrame:
        return


def test_snapshots_come_back_and_do_not_grow_beyond_what_they_say() -> None:
    encoded = encode_snapshot(SNAPSHOT)
    assert decode_snapshot(encoded) == SNAPSHOT
    assert len(encoded) < 200
    for end in range(len(encoded)):
        with pytest.raises(BadFrame):
            decode_snapshot(encoded[:end])
    bomb = encode_snapshot(RaftSnapshot(7, 3, Membership(), bytes(1 << 20)))
    at = bomb.index((1 << 20).to_bytes(4, "little"))
    small = bomb[:at] + (100).to_bytes(4, "little") + bomb[at + 4 :]
    with pytest.raises(BadFrame, match="another size"):
        decode_snapshot(small)
    with pytest.raises(BadFrame, match="maximum"):
        decode_snapshot(bomb[:at] + b"\xff\xff\xff\xff" + bomb[at + 4 :])


def test_who_has_more_than_the_leader_says_only_what_was_compared() -> None:
    """A leader that was put back from an older copy must find out that the logs differ behind."""
    group = elected()
    group.propose(b"x")
    group.propose(b"y")
    node = group.nodes["b"]
    assert node.commit > 2
    while node.take_ready(group.now) is not None:
        pass
    term = node._raft.log.term_at(2)
    node.handle_message("c", Append(node.term + 1, 2, term, 1), group.now)
    ready = node.take_ready(group.now)
    assert ready is not None
    (reply,) = [message for _, message in ready.messages_after if isinstance(message, AppendReply)]
    assert reply.is_accepted
    assert reply.index == 2

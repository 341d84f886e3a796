"""The metadata on whole nodes: founding, joining, proposing, leaving; and who votes."""

from collections.abc import Collection
from copy import deepcopy

import pytest

from holdfast.node.frame_kinds import PROPOSAL, PROPOSAL_RESULT, RAFT, REPLICATE, BadFrame
from holdfast.node.metadata.commands import ChangePartitions, PutNode
from holdfast.node.metadata.effects import (
    LeaderChanged,
    MetadataChanged,
    MetaEffect,
    Persist,
    ProposalDone,
    Send,
)
from holdfast.node.metadata.model import WITNESS, NodeInfo, NodePhase, PartitionInfo
from holdfast.node.metadata.requests import (
    PENDING_MAX,
    Accepted,
    Outcome,
    RequestRefused,
    Unknown,
)
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.metadata.store import UNWRITTEN_MAX, HandOver, MetaStore, plan
from holdfast.node.raft.log import Membership, RaftState
from tests.support.sim_raft import carry_out


def info(name: str, incarnation: str = "i", role: str = "data") -> NodeInfo:
    return NodeInfo(name, incarnation, f"{name}:7000", "", "", role)


class Nodes:
    """Connected by links and with disks that take no time."""

    def __init__(self, count: int) -> None:
        self.now = 100.0
        self.stores: dict[str, MetaStore] = {}
        self.disks: dict[str, RaftState] = {}
        self.cut: set[str] = set()
        self.drop_kinds: set[int] = set()
        self.seen: dict[str, list[MetaEffect]] = {}
        self.starts = 0
        for number in range(1, count + 1):
            self.start(f"n{number}")

    def start(self, name: str, incarnation: str = "i") -> MetaStore:
        self.starts += 1
        disk = self.disks.setdefault(name, RaftState())
        wait = int(name[1:]) / 10
        store = MetaStore(
            name,
            incarnation,
            disk,
            nonce=f"{self.starts}",
            random=lambda: wait,
            now=self.now,
        )
        self.stores[name] = store
        self.seen[name] = []
        return store

    def settle(self) -> None:
        moved = True
        while moved:
            moved = False
            for name, store in list(self.stores.items()):
                effects, store.effects = store.effects, []
                for effect in effects:
                    moved = True
                    self.seen[name].append(effect)
                    if isinstance(effect, Persist):
                        self.disks[name] = carry_out(self.disks[name], effect.write)
                        store.persisted(self.now)
                    elif isinstance(effect, Send) and not self.cut & {name, effect.node_id}:
                        receiver = self.stores.get(effect.node_id)
                        if receiver is not None and effect.kind not in self.drop_kinds:
                            receiver.handle_frame(name, effect.kind, effect.payload, self.now)

    def run(self, duration_s: float) -> None:
        self.settle()
        end = self.now + duration_s
        while self.now < end - 1e-9:
            self.now += 0.01
            for store in list(self.stores.values()):
                if self.now >= store.timer():
                    store.handle_timers(self.now)
            self.settle()

    def leader(self) -> MetaStore:
        (store,) = (store for store in self.stores.values() if store.is_leader)
        return store

    def outcome(self, name: str, request: int) -> Outcome | None:
        for effect in self.seen[name]:
            if isinstance(effect, ProposalDone) and effect.request == request:
                return effect.outcome
        return None

    def voters(self) -> tuple[str, ...]:
        metadata = self.leader().metadata
        assert metadata is not None
        return metadata.voters


def founded(count: int = 3) -> Nodes:
    nodes = Nodes(count)
    first = nodes.stores["n1"]
    request = first.create_cluster("c", 4, 3, 2, info("n1"), nodes.now)
    nodes.settle()
    assert isinstance(nodes.outcome("n1", request), Accepted)
    for number in range(2, count + 1):
        first.admit(info(f"n{number}"), nodes.now)
    nodes.run(1.0)
    return nodes


def bump(store: MetaStore, number: int = 0) -> ChangePartitions:
    """A change of a partition that is right as long as nobody else changes it."""
    assert store.metadata is not None
    old = store.metadata.partitions[number]
    new = PartitionInfo(old.replicas, (), old.leader, old.epoch + 1, old.in_sync)
    return ChangePartitions(((number, old.version, new),))


def test_a_cluster_is_founded_at_once_and_once() -> None:
    nodes = founded(1)
    store = nodes.stores["n1"]
    assert store.is_leader
    assert store.leader_id == "n1"
    assert store.metadata is not None
    assert store.metadata.cluster_id == "c"
    assert store.metadata.voters == ("n1",)
    with pytest.raises(ValueError, match="already"):
        store.create_cluster("d", 4, 3, 2, info("n1"), nodes.now)


def test_a_cluster_that_cannot_be_is_refused() -> None:
    nodes = Nodes(1)
    request = nodes.stores["n1"].create_cluster("c", 4, 2, 3, info("n1"), nodes.now)
    nodes.settle()
    outcome = nodes.outcome("n1", request)
    assert isinstance(outcome, RequestRefused)
    assert "min_insync" in outcome.text
    # It may be tried again, and only once it has succeeded not any more.
    request = nodes.stores["n1"].create_cluster("c", 4, 3, 3, info("n1"), nodes.now)
    nodes.settle()
    assert isinstance(nodes.outcome("n1", request), Accepted)


@pytest.mark.parametrize(("count", "voters"), [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (7, 5)])
def test_an_odd_number_of_nodes_vote(count: int, voters: int) -> None:
    nodes = founded(count)
    assert len(nodes.voters()) == voters
    for store in nodes.stores.values():
        assert store.metadata == nodes.leader().metadata
        assert store.leader_id == "n1"
        assert store.has_majority(nodes.now)


def test_every_node_proposes_and_is_told_after_it_has_seen_the_change() -> None:
    nodes = founded(4)
    for number, (name, store) in enumerate(nodes.stores.items()):
        request = store.propose(bump(store, number), nodes.now)
        nodes.settle()
        outcome = nodes.outcome(name, request)
        assert isinstance(outcome, Accepted)
        effects = nodes.seen[name]
        versions = [each.metadata.version for each in effects if isinstance(each, MetadataChanged)]
        told = [isinstance(each, ProposalDone) for each in effects]
        assert versions[-1] == outcome.version
        last_change = max(
            at for at, each in enumerate(effects) if isinstance(each, MetadataChanged)
        )
        assert told.index(True) > last_change or name == "n1"
        changed = [each for each in effects if isinstance(each, MetadataChanged)][-1]
        assert changed.changed_partitions == (number,)


def test_of_two_changes_of_one_version_one_is_refused() -> None:
    nodes = founded()
    two, three = nodes.stores["n2"], nodes.stores["n3"]
    requests = [
        ("n2", two.propose(bump(two), nodes.now)),
        ("n3", three.propose(bump(three), nodes.now)),
    ]
    nodes.settle()
    outcomes = [nodes.outcome(name, request) for name, request in requests]
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Accepted", "RequestRefused"]


def test_a_proposal_outlives_its_leader() -> None:
    nodes = founded()
    nodes.cut = {"n1"}
    two = nodes.stores["n2"]
    request = two.propose(bump(two), nodes.now)
    nodes.run(0.1)
    assert nodes.outcome("n2", request) is None
    for name in ("n2", "n3"):
        nodes.stores[name].leader_down("n1", nodes.now)
    nodes.run(0.2)
    assert isinstance(nodes.outcome("n2", request), Accepted)
    assert LeaderChanged("n2", True) in nodes.seen["n2"]
    assert LeaderChanged("n2", False) in nodes.seen["n3"]


def test_a_proposal_that_is_sent_again_is_carried_out_once() -> None:
    nodes = founded()
    two = nodes.stores["n2"]
    command = bump(two)
    two.propose(command, nodes.now)
    frames = [each for each in two.effects if isinstance(each, Send) and each.kind == PROPOSAL]
    for _ in range(3):
        nodes.leader().handle_frame("n2", PROPOSAL, frames[0].payload, nodes.now)
    nodes.settle()
    nodes.leader().handle_frame("n2", PROPOSAL, frames[0].payload, nodes.now)
    nodes.run(1.0)
    done = [each for each in nodes.seen["n2"] if isinstance(each, ProposalDone)]
    assert [type(each.outcome) for each in done] == [Accepted]


def test_without_a_majority_a_proposal_has_no_known_outcome() -> None:
    nodes = founded()
    nodes.cut = {"n2", "n3"}
    one = nodes.stores["n1"]
    request = one.propose(bump(one), nodes.now)
    nodes.run(6.0)
    assert isinstance(nodes.outcome("n1", request), Unknown)
    assert not one.has_majority(nodes.now)


def test_a_node_in_no_cluster_answers_too() -> None:
    nodes = Nodes(1)
    request = nodes.stores["n1"].propose(PutNode(info("n2"), 0), nodes.now)
    nodes.run(6.0)
    assert isinstance(nodes.outcome("n1", request), Unknown)
    assert nodes.stores["n1"].admit(info("n2"), nodes.now) is None


def test_too_many_proposals_are_refused_at_once() -> None:
    nodes = founded()
    nodes.cut = {"n2"}
    two = nodes.stores["n2"]
    requests = [two.propose(bump(two), nodes.now) for _ in range(PENDING_MAX + 1)]
    nodes.settle()
    assert nodes.outcome("n2", requests[0]) is None
    assert isinstance(nodes.outcome("n2", requests[-1]), RequestRefused)


def test_a_node_comes_back_with_what_it_knew() -> None:
    nodes = founded()
    before = nodes.leader().metadata
    for name in ("n1", "n2", "n3"):
        nodes.start(name)
    for store in nodes.stores.values():
        # All but what was committed last: it knows whom to look for.
        assert store.metadata is not None
        assert store.metadata.cluster_id == "c"
        assert set(store.metadata.nodes) == {"n1", "n2", "n3"}
    nodes.run(1.5)
    assert nodes.leader().metadata == before


def test_a_node_comes_back_from_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.node.metadata.store.COMPACT_ENTRIES", 10)
    nodes = founded()
    for _ in range(40):
        one = nodes.stores["n1"]
        one.propose(bump(one), nodes.now)
        nodes.settle()
    assert all(disk.snapshot is not None for disk in nodes.disks.values())
    before = nodes.leader().metadata
    nodes.start("n3")
    nodes.run(0.5)
    assert nodes.stores["n3"].metadata == before


def test_admitting_a_known_node_changes_its_addresses_only() -> None:
    nodes = founded()
    one = nodes.stores["n1"]
    assert one.admit(info("n2"), nodes.now) is None
    assert one.admit(info("n2", "another"), nodes.now) is None
    moved = NodeInfo("n2", "i", "elsewhere:7000", "", "", state=NodePhase.DRAINING)
    assert one.admit(moved, nodes.now) is not None
    nodes.settle()
    assert one.metadata is not None
    assert one.metadata.nodes["n2"].peer_address == "elsewhere:7000"
    assert one.metadata.nodes["n2"].state == NodePhase.UP


def test_a_voter_is_removed_after_it_has_stopped_voting() -> None:
    nodes = founded()
    two = nodes.stores["n2"]
    request = two.remove("n3", nodes.now)
    nodes.run(1.0)
    assert isinstance(nodes.outcome("n2", request), Accepted)
    assert nodes.voters() == ("n1",)
    assert peer_id("n3", "i") not in nodes.leader().membership.members


@pytest.mark.parametrize("steps", range(0, 20, 5))
def test_a_node_whose_removal_is_in_the_log_does_not_begin_to_vote(steps: int) -> None:
    """The leader took the second and third node up as voters while it waited for its disk. The
    removal was agreed on, the operator wiped the node, and the change of the voters, which needed
    it, was never committed: nothing was decided any more."""
    nodes = founded(2)
    one = nodes.stores["n1"]
    nodes.start("n3")
    one.admit(info("n3"), nodes.now)
    nodes.run(steps * 0.01)
    request = one.remove("n2", nodes.now)
    nodes.now = one.timer()
    one.handle_timers(nodes.now)
    while nodes.outcome("n1", request) is None:
        nodes.run(0.01)
    assert isinstance(nodes.outcome("n1", request), Accepted)
    assert peer_id("n2", "i") not in one.membership.voters
    del nodes.stores["n2"]
    later = one.propose(bump(one), nodes.now)
    nodes.run(1.0)
    assert isinstance(nodes.outcome("n1", later), Accepted)


def test_the_leader_is_removed_and_another_leads() -> None:
    nodes = founded(4)
    one = nodes.stores["n1"]
    metadata = one.metadata
    assert metadata is not None
    changes = tuple(
        (number, old.version, PartitionInfo(("n2",), (), "n2", 2, ("n2",)))
        for number, old in enumerate(metadata.partitions)
    )
    one.propose(ChangePartitions(changes, accept_loss=True), nodes.now)
    nodes.settle()
    four = nodes.stores["n4"]
    request = four.remove("n1", nodes.now)
    nodes.run(2.0)
    assert isinstance(nodes.outcome("n4", request), Accepted)
    assert nodes.voters() == ("n2", "n3", "n4")


def test_a_node_that_holds_data_is_not_removed() -> None:
    nodes = founded()
    request = nodes.stores["n2"].remove("n1", nodes.now)
    nodes.run(2.0)
    outcome = nodes.outcome("n2", request)
    assert isinstance(outcome, RequestRefused)
    assert "holds 4 partitions" in outcome.text


def test_a_leader_hands_over_before_it_stops() -> None:
    nodes = founded()
    assert nodes.stores["n1"].transfer_leadership(nodes.now)
    nodes.run(0.05)
    assert nodes.leader().node_id != "n1"
    assert not nodes.stores["n1"].transfer_leadership(nodes.now)


def test_a_leader_whose_disk_hangs_lets_another_one_lead() -> None:
    """Also if the first that it asks cannot, and it does not stand again before it is well."""
    nodes = founded()
    nodes.stores["n2"].set_stalled(True, nodes.now)
    nodes.stores["n1"].set_stalled(True, nodes.now)
    nodes.run(3.0)
    assert nodes.leader().node_id == "n3"
    nodes.cut.add("n3")
    nodes.run(3.0)
    assert not nodes.stores["n1"].is_leader
    assert not nodes.stores["n2"].is_leader
    nodes.stores["n2"].set_stalled(False, nodes.now)
    nodes.run(3.0)
    assert nodes.stores["n2"].is_leader


@pytest.mark.parametrize("count", [1, 3])
def test_a_leader_that_stands_apart_decides_nothing_more(count: int) -> None:
    """Its disk is an older copy. The only voter would agree with itself."""
    nodes = founded(count)
    one = nodes.leader()
    nodes.cut = {one.node_id}
    one.stand_apart(nodes.now)
    assert not one.is_leader
    request = one.propose(bump(one), nodes.now)
    one.set_stalled(False, nodes.now)
    nodes.run(6.0)
    assert not one.is_leader
    assert isinstance(nodes.outcome(one.node_id, request), Unknown)


def test_the_old_disk_of_a_node_is_no_member() -> None:
    """A voter that comes back with an empty disk neither votes nor acknowledges as it was."""
    nodes = founded()
    nodes.disks["n3"] = RaftState()
    wiped = nodes.start("n3", "other")
    nodes.run(2.0)
    assert wiped.metadata is None
    assert wiped.membership == Membership()
    one = nodes.stores["n1"]
    assert one.metadata is not None
    old = one.metadata.nodes["n3"]
    one.propose(PutNode(info("n3", "other"), old.version), nodes.now)
    nodes.run(1.0)
    assert wiped.metadata == one.metadata
    assert set(one.membership.voters) == {"n1.i", "n2.i", "n3.other"}
    assert "n3.i" not in one.membership.members


def test_nothing_is_agreed_with_a_node_that_the_others_went_on_without() -> None:
    """n1 and n2 agree on a change while n3 is down. n1 is put back to before it, and goes on with
    n3, which does not know of it either. n2 then follows n3, and hears it as any leader; but the
    two agree on nothing any more. So n2 must not tell n1 to begin anew because it hears a leader,
    only because a change that changes nothing has come back (`node.older_copies`)."""
    nodes = founded()
    leader = nodes.leader()
    assert leader.node_id == "n1"
    copy = deepcopy(nodes.disks["n1"])
    nodes.cut = {"n3"}
    request = leader.propose(bump(leader), nodes.now)
    nodes.run(0.1)
    assert isinstance(nodes.outcome("n1", request), Accepted)
    nodes.disks["n1"] = copy
    nodes.start("n1")
    nodes.cut = {"n2"}
    nodes.run(2.0)
    assert nodes.leader().has_majority(nodes.now)
    nodes.cut = {"n1"}
    nodes.run(2.0)
    n2 = nodes.stores["n2"]
    assert n2.leader_id == "n3"
    assert n2.has_majority(nodes.now)
    assert "another change" in n2.diverged
    request = n2.propose(ChangePartitions(()), nodes.now)
    nodes.run(6.0)
    assert isinstance(nodes.outcome("n2", request), Unknown)
    # With the one that was not told to begin anew there is a majority again.
    nodes.cut = {"n2"}
    nodes.run(2.0)
    leader = nodes.leader()
    request = leader.propose(bump(leader), nodes.now)
    nodes.run(0.1)
    assert isinstance(nodes.outcome(leader.node_id, request), Accepted)


def test_frames_that_are_none_are_refused() -> None:
    nodes = founded()
    one = nodes.stores["n1"]
    two = nodes.stores["n2"]
    two.leader_down("n1", nodes.now)
    nodes.now += 1.0
    two.handle_timers(nodes.now)
    frame = next(each for each in two.effects if isinstance(each, Send) and each.kind == RAFT)
    with pytest.raises(BadFrame, match=r"n2\.i from node n3"):
        one.handle_frame("n3", RAFT, frame.payload, nodes.now)
    for kind, payload in (
        (RAFT, b""),
        (RAFT, b"\x09"),
        (PROPOSAL, b""),
        (PROPOSAL, b"\x03abc{}"),
        (REPLICATE, b""),
    ):
        with pytest.raises(BadFrame):
            one.handle_frame("n2", kind, payload, nodes.now)
    one.handle_frame("n2", PROPOSAL_RESULT, b"\xff\xffnever asked", nodes.now)


def test_what_waits_for_a_stuck_disk_is_bounded() -> None:
    nodes = founded()
    two = nodes.stores["n2"]
    heartbeats: list[Send] = []
    for _ in range(UNWRITTEN_MAX * 2):
        nodes.now += 0.05
        one = nodes.stores["n1"]
        one.propose(bump(one), nodes.now)
        one.handle_timers(nodes.now)
        effects, one.effects = one.effects, []
        for effect in effects:
            if isinstance(effect, Persist):
                one.persisted(nodes.now)
            elif isinstance(effect, Send) and effect.node_id == "n2":
                # Its disk never finishes.
                two.handle_frame("n1", effect.kind, effect.payload, nodes.now)
                heartbeats.append(effect)
            elif isinstance(effect, Send):
                nodes.stores["n3"].handle_frame("n1", effect.kind, effect.payload, nodes.now)
        three = nodes.stores["n3"]
        answers, three.effects = three.effects, []
        for effect in answers:
            if isinstance(effect, Persist):
                three.persisted(nodes.now)
        answers += three.effects
        three.effects = []
        for effect in answers:
            if isinstance(effect, Send):
                one.handle_frame("n3", effect.kind, effect.payload, nodes.now)
    assert len(heartbeats) > UNWRITTEN_MAX
    assert len(two._unwritten) <= UNWRITTEN_MAX


# Who votes


def steps(
    voters: str,
    learners: str,
    *,
    down: str = "",
    draining: str = "",
    absent: str = "",
    leaving: Collection[str] = (),
    dead: str = "",
    witness: str = "",
) -> Membership | HandOver | None:
    """a leads; dead ones do not answer."""
    nodes = {}
    for name in set(voters + learners) - set(absent):
        state = NodePhase.DOWN if name in down else NodePhase.UP
        state = NodePhase.DRAINING if name in draining else state
        role = WITNESS if name in witness else "data"
        nodes[name] = NodeInfo(name, "i", "", "", "", role, state)
    membership = Membership(
        tuple(peer_id(name, "i") for name in voters),
        tuple(peer_id(name, "i") for name in learners),
    )
    dead_members = {peer_id(name, "i") for name in dead}
    return plan("a.i", membership, nodes, leaving, lambda member: member not in dead_members)


def names(step: Membership | HandOver | None) -> str:
    """Voters, a bar, learners."""
    if isinstance(step, HandOver):
        return f"> {step.peer[0]}"
    if step is None:
        return ""
    return "".join(m[0] for m in step.voters) + "|" + "".join(m[0] for m in step.learners)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (steps("a", ""), ""),
        (steps("a", "b"), ""),
        (steps("a", "bc"), "ab|c"),
        (steps("a", "bcw", witness="w"), "aw|bc"),
        (steps("ab", "c"), "abc|"),
        (steps("ab", ""), "a|b"),
        (steps("ab", "c", dead="c"), "a|bc"),
        (steps("a", "bc", dead="c"), ""),
        (steps("abc", "d"), ""),
        (steps("abc", "de"), "abcd|e"),
        (steps("abcde", "fg"), ""),
        # A voter is down: another takes its place, before it goes.
        (steps("abc", "d", down="c", dead="c"), "abcd|"),
        (steps("abcd", "", down="c", dead="c"), "abd|c"),
        (steps("abc", "", down="c", dead="c"), ""),
        (steps("abcde", "", down="de", dead="de"), "abce|d"),
        # One that is to leave goes in any case, if the rest can decide.
        (steps("abc", "", leaving={"c"}), "ab|c"),
        (steps("abc", "", leaving={"c"}, dead="b"), ""),
        (steps("abc", "", absent="c"), "ab|c"),
        (steps("a", "bc", absent="c"), "a|b"),
        (steps("abc", "d", draining="a"), "> b"),
        (steps("abc", "d", leaving={"a"}), "> b"),
        (steps("a", "b", draining="a"), "ab|"),
        (steps("ab", "", draining="a"), "> b"),
    ],
)
def test_the_next_step(step: Membership | HandOver | None, expected: str) -> None:
    assert names(step) == expected

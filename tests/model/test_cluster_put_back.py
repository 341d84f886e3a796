"""Nodes that begin anew although nobody has stopped them: disks of two of three nodes put back from
copies while the third one runs, in every order of coming back, and a disk that is damaged while its
node becomes a voter. Nobody begins anew who is needed, and everybody else does."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.io.disk import older_copy
from holdfast.node.effects import Note
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.metadata.store import MetaStore
from tests.sim.checks import Checks
from tests.sim.disk import SimDisk
from tests.sim.host import Host
from tests.sim.process import Process
from tests.sim.world import Settings, World

SETTINGS = Settings(duration_s=1.0)
GAPS_S = (0.0, 0.2, 3.0)
"""Between the two that come back; a majority is taken for there for 0.6 s after it has gone."""
LATER_S = 5.0
FAR_S = 20.0
LONG = pytest.mark.long
SEEDS = [1, *(pytest.param(seed, marks=LONG) for seed in (2, 3))]


class Story:
    """A cluster that has worked for a while, after copies were made of the disks of `copied`."""

    def __init__(
        self, seed: int, copied: tuple[str, ...] = (), settings: Settings = SETTINGS
    ) -> None:
        self.world = World(seed, settings)
        world = self.world
        for host in world.hosts.values():
            world.schedule.after(host.chance.random() * 0.3, host.start)
        world._wait(10.0, self._not_whole, "not ready")
        self.copies: dict[str, SimDisk] = {name: self.host(name).disk.copy() for name in copied}
        for party in world.parties:
            party.is_active = True
        world.owners_watch.begin()
        self.run(settings.duration_s)
        for party in world.parties:
            party.is_active = False
        self.settle()

    def _not_whole(self) -> str:
        metadata = self.world.newest_metadata()
        hosts = len(self.world.hosts)
        if metadata is None or len(metadata.nodes) < hosts:
            return "not all have joined"
        if len(metadata.voters) < (hosts - 1) // 2 * 2 + 1:
            return "not all vote"
        return self.world._not_ready()

    def host(self, name: str) -> Host:
        return self.world.hosts[name]

    def run(self, seconds: float) -> None:
        self.world.schedule.run(seconds)

    def settle(self) -> None:
        self.world._wait(FAR_S, self.world._not_settled, "not settled")

    def stop(self, *names: str, power: bool = False) -> None:
        for name in names:
            self.host(name).kill(power=power)

    def come(self, *names: str, gap_s: float = 0.0) -> None:
        for name in names:
            if name in self.copies:
                self.host(name).disk = self.copies.pop(name)
            self.host(name).start()
            self.run(gap_s)

    def leave(self, *names: str) -> None:
        """Stop nodes in good order, at the same time."""
        for name in names:
            process = self.host(name).process
            assert process is not None
            process.leave()
        self.run(LATER_S)
        self.stop(*names)

    def meta(self, name: str) -> MetaStore:
        process = self.host(name).process
        assert process is not None
        return process.cluster_node.meta

    def is_apart(self, name: str) -> bool:
        process = self.host(name).process
        return process is not None and process.is_isolated

    def check(self) -> None:
        """Nothing that was acknowledged is missing."""
        self.settle()
        self.world._be_quiet()
        self.world.checks.same_images()
        self.world.checks.same_sessions()
        for party in self.world.parties:
            party.check()


ORDERS = [
    pytest.param(order, gap_s, power, marks=() if power is (gap_s == GAPS_S[1]) else LONG)
    for order, power in ((("n2", "n3"), True), (("n3", "n2"), False))
    for gap_s in GAPS_S
]


@pytest.mark.parametrize(("order", "gap_s", "power"), ORDERS)
def test_two_copies_both_wait_for_the_one_that_runs(
    order: tuple[str, str], gap_s: float, power: bool
) -> None:
    """Told to begin anew, both members that n1 needs for a majority would be gone for ever."""
    story = Story(1, order)
    before = [story.host(name).incarnations for name in order]
    story.stop(*order, power=power)
    story.come(*order, gap_s=gap_s)
    story.run(LATER_S)
    assert all(map(story.is_apart, order))
    assert [story.host(name).incarnations for name in order] == before
    # An operator stops all of them: nobody remembers then, and n1 has everything. The copies still
    # stand apart, until the operator accepts one of them.
    story.leave("n1", *order)
    story.come("n1", order[0])
    story.run(LATER_S)
    assert story.is_apart(order[0])
    story.stop("n1", order[0])
    assert older_copy.accept(story.host(order[0]).disk, Path(), 7)
    with may_take_over():
        # It takes over what the others lead, and says so.
        story.come("n1", order[0])
        story.run(LATER_S)
        story.come(order[1])
        story.check()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", ["n1", "n2"])
def test_nodes_that_were_all_killed_know_the_copy_of_one(seed: int, late: str) -> None:
    """The disk of n3 is put back while nothing runs. It is a majority with the node that comes
    first, which may lack what n3 and the late one have acknowledged."""
    story = Story(seed, ("n3",))
    before = story.host("n3").incarnations
    story.stop("n1", "n2", "n3")
    first = "n2" if late == "n1" else "n1"
    story.come("n3", first)
    story.run(LATER_S)
    assert story.is_apart("n3")
    story.come(late)
    story.run(LATER_S)
    story.check()
    assert story.host("n3").incarnations == before + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_majority_of_copies_is_not_accepted_by_a_node_that_returns(seed: int) -> None:
    """Nobody runs meanwhile. An operator decides, not who starts first."""
    story = Story(seed, ("n2", "n3"))
    story.stop("n1", "n2", "n3")
    story.come("n1", "n2", "n3")
    story.run(LATER_S)
    assert story.is_apart("n2")
    assert story.is_apart("n3")
    assert not story.is_apart("n1")
    story.stop("n2")
    assert older_copy.accept(story.host("n2").disk, Path(), 7)
    with may_take_over():
        story.come("n2")
        story.run(LATER_S)
        story.check()


def may_take_over() -> AbstractContextManager[object]:
    """Let a node say that it takes over from a leader that lacks what is committed here."""
    noted = Checks.noted

    def other(checks: Checks, process: Process, note: Note) -> None:
        if note.fields.get("text") != "this node takes over":
            noted(checks, process, note)

    return patch.object(Checks, "noted", other)


@pytest.mark.parametrize("order", [("n2", "n3"), ("n3", "n2")])
def test_an_accepted_copy_is_let_in_by_a_node_that_remembers_its_disk(
    order: tuple[str, str],
) -> None:
    """The operator stops only the copies. n1 has everything, and knows that the disks had more."""
    story = Story(1, order)
    story.stop(*order)
    story.come(*order)
    story.run(LATER_S)
    assert all(map(story.is_apart, order))
    story.stop(order[0])
    assert older_copy.accept(story.host(order[0]).disk, Path(), 7)
    with may_take_over():
        story.come(order[0])
        story.run(LATER_S)
        story.check()
    # Another start does not announce that it was accepted: the others remember the disk as it is.
    story.stop(order[0])
    story.come(order[0])
    story.run(LATER_S)
    assert not any(map(story.is_apart, order))
    assert older_copy.nodes_given_up(story.host(order[0]).disk) is None


PAIR = replace(SETTINGS, nodes=2, replication_factor=2, min_insync=1)


def accepted_voter(seed: int, given_up: tuple[str, ...] = ()) -> Story:
    """The only voter of two nodes, n1, is put back. n2 has entries that it lacks. Both are stopped,
    and an operator accepts the copy."""
    story = Story(seed, ("n1",), PAIR)
    story.stop("n1")
    _, end = story.meta("n2").durable
    story.come("n1")
    story.run(LATER_S)
    assert story.is_apart("n1")
    # It was told before it decided anything: another entry in the place of one that n2 has would
    # make two histories.
    term, copied = story.meta("n1").log_end
    assert (term, copied) < story.meta("n2").log_end
    assert copied < end
    story.leave("n1", "n2")
    assert older_copy.accept(story.host("n1").disk, Path(), 7, given_up)
    return story


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", [("n1", "n2"), ("n2", "n1")])
@pytest.mark.parametrize("gap_s", [0.0, LATER_S])
def test_an_accepted_only_voter_takes_the_log_of_the_other(
    seed: int, order: tuple[str, str], gap_s: float
) -> None:
    """n2 does not vote. It leads until the voter has its entries."""
    story = accepted_voter(seed)
    with may_take_over():
        # n2 takes over the partitions of which it has more, and says so.
        story.come(*order, gap_s=gap_s)
        story.run(LATER_S)
        story.check()
    assert story.meta("n1").is_leader
    assert not any(story.meta(name).diverged for name in story.world.hosts)
    assert older_copy.nodes_given_up(story.host("n1").disk) is None


def test_an_accepted_only_voter_waits_for_every_node_that_is_not_given_up() -> None:
    story = accepted_voter(1)
    story.come("n1")
    # Longer than a start waits for a node that was up.
    story.run(4 * FAR_S)
    process = story.host("n1").process
    assert process is not None
    assert process.cluster_node.attendance.missing(process.state.now) == ["n2"]
    assert not process.is_ready


def test_an_accepted_only_voter_goes_on_without_a_node_that_is_given_up() -> None:
    story = accepted_voter(1, ("n2",))
    # Other records take the place of those that only n2 has.
    with patch.object(Checks, "fail", lambda *_: None):
        story.come("n1")
        story.run(LATER_S)
    assert story.meta("n1").is_leader


def test_the_only_voter_waits_at_its_start_for_a_node_that_was_up() -> None:
    """Both lose power, and n2 does not come back. Only n2 could report that the disk of n1 is an
    older copy."""
    story = Story(1, settings=PAIR)
    story.stop("n1", "n2", power=True)
    story.come("n1")
    story.run(50.0)
    assert not story.meta("n1").is_leader
    story.run(15.0)
    assert story.meta("n1").is_leader


def test_the_only_voter_waits_for_no_node_that_is_down() -> None:
    story = Story(1, settings=PAIR)
    story.stop("n2", power=True)
    story.run(LATER_S)
    story.stop("n1")
    story.come("n1")
    story.run(3.0)
    assert story.meta("n1").is_leader


def test_tickets_of_a_disk_that_was_put_back_are_others() -> None:
    """The log of the others has records of this node that its copy lacks. If its tickets began at
    the same number, such a record would settle a later one of the same client."""
    story = Story(4, ("n3",))

    def newest() -> int:
        process = story.host("n3").process
        assert process is not None
        return process.cluster_node.forwarding._ticket

    before = newest()
    story.stop("n3")
    story.come("n3")
    begun = newest()
    story.run(LATER_S)
    story.check()
    assert abs(begun - before) > 100_000


def test_restored_nodes_lead_nothing_before_the_generation_is_agreed() -> None:
    """They lead under later epochs than those of their start, so who follows them knows it."""
    story = Story(3)
    names = [*story.world.hosts]
    before = story.world.newest_metadata()
    assert before is not None
    story.stop(*names)
    story.come(*names)
    nodes = []
    for name in names:
        process = story.host(name).process
        assert process is not None
        nodes.append(process.cluster_node)
        nodes[-1].awaits_generation = True
    story.run(LATER_S)
    assert all(node.context.has_majority(node.state.now) for node in nodes)
    assert not any(any(node.context.leading) for node in nodes)
    for node in nodes:
        node.awaits_generation = False
    story.check()
    after = story.world.newest_metadata()
    assert after is not None
    for old, new in zip(before.partitions, after.partitions, strict=True):
        assert new.epoch > old.epoch


@pytest.mark.parametrize(("order", "gap_s", "power"), ORDERS)
def test_a_copy_begins_anew_when_a_whole_one_is_back(
    order: tuple[str, str], gap_s: float, power: bool
) -> None:
    """n3's disk is put back, n2's is as it was, and either comes first."""
    story = Story(2, ("n3",))
    before = story.host("n3").incarnations
    story.stop(*order, power=power)
    story.come(*order, gap_s=gap_s)
    story.run(LATER_S)
    assert story.host("n3").incarnations == before + 1
    assert not story.is_apart("n3")
    story.check()


def test_a_copy_is_told_by_nodes_that_do_not_remember_it() -> None:
    """They were started again meanwhile: it says itself that it stands apart."""
    story = Story(3, ("n3",))
    before = story.host("n3").incarnations
    story.stop("n2", "n3")
    story.come("n3")
    story.run(LATER_S)
    assert story.is_apart("n3")
    story.stop("n1")
    story.come("n1", "n2")
    story.run(LATER_S)
    assert story.host("n3").incarnations == before + 1
    story.check()


def lose_end(disk: SimDisk, *, is_zeroed: bool) -> None:
    """Cut the last bytes of the journal's last file off, or fill them with zeros."""
    names = sorted(each for each in disk.files if each.startswith("journal/") and ".log" in each)
    content = disk.files[names[-1]]
    size = len(content.now.rstrip(b"\0"))
    lost_bytes = min(1500, size // 2)
    size -= lost_bytes
    content.resize(size)
    content.sync()
    if is_zeroed:
        content.write(size, bytes(lost_bytes))
        content.sync()


ONE_INSYNC = replace(SETTINGS, min_insync=1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("settings", [SETTINGS, ONE_INSYNC])
@pytest.mark.parametrize("is_zeroed", [False, True])
def test_the_longest_log_leads_after_all_were_killed(
    seed: int, is_zeroed: bool, settings: Settings
) -> None:
    """n1 leads some partitions, and its journal has lost its end. Its last records were
    acknowledged, which no node has stored: the watermarks are a second old."""
    story = Story(seed, settings=settings)
    names = [*story.world.hosts]
    for party in story.world.parties:
        party.is_active = True
    story.run(0.8)
    story.stop(*names)
    for party in story.world.parties:
        party.is_active = False
    lose_end(story.host("n1").disk, is_zeroed=is_zeroed)
    with may_take_over():
        # A node that has stored a watermark above what n1 has left takes over, and says so.
        story.come(*names)
        story.run(LATER_S)
        story.check()


STARTS = [
    pytest.param(first, seed, marks=() if (first, seed) in {("n1", 1), ("n2", 2)} else LONG)
    for first in ("n1", "n2")
    for seed in (1, 2, 3)
]


@pytest.mark.parametrize(("first", "seed"), STARTS)
def test_a_start_is_no_failure_of_a_node_that_comes_late(first: str, seed: int) -> None:
    """One acknowledgement suffices, all were killed, and one disk has lost its end. Its node and a
    witness are a majority. The other node, which has everything, starts 10 s later."""
    late = "n2" if first == "n1" else "n1"
    settings = replace(SETTINGS, replication_factor=2, min_insync=1, has_witness=True)
    story = Story(seed, settings=settings)
    for party in story.world.parties:
        party.is_active = True
    story.run(0.8)
    story.stop(*story.world.hosts)
    for party in story.world.parties:
        party.is_active = False
    lose_end(story.host(first).disk, is_zeroed=False)
    story.come(first, "n3")
    story.run(10.0)
    story.come(late)
    story.check()


def test_a_node_that_does_not_come_is_given_up_later() -> None:
    settings = replace(SETTINGS, replication_factor=2, min_insync=1, has_witness=True)
    story = Story(1, settings=settings)
    story.stop(*story.world.hosts)
    story.come("n1", "n3")
    story.run(50.0)
    metadata = story.world.newest_metadata()
    assert metadata is not None
    assert all("n2" in info.in_sync for info in metadata.partitions)
    story.run(20.0)
    metadata = story.world.newest_metadata()
    assert metadata is not None
    assert all(info.leader == "n1" and info.in_sync == ("n1",) for info in metadata.partitions)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_node_that_becomes_a_voter_is_not_needed_for_ever(seed: int) -> None:
    """With it there are four voters for a moment, one of them with a disk that is gone. Had it
    begun anew then, the two that are left would never agree on anything again."""
    settings = replace(SETTINGS, duration_s=0.1, partitions=1, replication_factor=2)
    story = Story(seed, settings=settings)
    world = story.world
    metadata = world.newest_metadata()
    assert metadata is not None
    # In sync nowhere, so nothing but its vote can be missed.
    (name,) = world.hosts.keys() - set(metadata.partitions[0].replicas)
    story.stop(name, power=True)
    story.run(2.0)
    host = story.host(name)
    host.wipe()
    host.start()
    damaged = host.process
    assert damaged is not None
    leader = next(
        each.process
        for each in world.hosts.values()
        if each.process is not None and each.process.cluster_node.meta.is_leader
    )
    peer = peer_id(name, host.incarnation)

    def becomes_voter() -> bool:
        return peer in leader.cluster_node.meta.membership.voters

    def is_aware() -> bool:
        return peer in damaged.cluster_node.meta.membership.voters

    while not becomes_voter():
        story.run(0.0001)
    assert not is_aware()
    world.network.cut(leader.host.name, name)
    damaged._distrust_disk()
    story.run(0.05)
    # If its directory is marked by now, it is so after a crash too.
    story.stop(name)
    world.network.heal()
    story.run(0.5)
    story.come(name)
    story.run(LATER_S)
    assert not world._not_ready()

"""When a node may lose its disk, by what is agreed and whom it hears."""

from msgspec.structs import replace

from holdfast.node.failure.health import Health, Presence
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, NodePhase, PartitionInfo
from holdfast.node.placement.planning import is_dispensable
from holdfast.node.raft.log import Membership

VOTERS = Membership(("n1.a", "n2.a", "n3.old"), ("n3.a",))
"""n3 has a new disk, and its new peer does not vote yet."""


def metadata(in_sync: str = "", **states: str) -> ClusterMetadata:
    nodes = {name: NodeInfo(name, "a", f"{name}:1", "", "") for name in ("n1", "n2", "n3")}
    for name, state in states.items():
        nodes[name] = replace(nodes[name], state=state)
    members = ("n1", "n2", in_sync) if in_sync else ("n1", "n2")
    partition = PartitionInfo(("n1", "n2", "n3"), (), "n1", 1, members)
    return ClusterMetadata("c", 3, 2, nodes, (partition,), 1)


def health(*present: str, damaged: tuple[str, ...] = ("n3",)) -> Health:
    names = (*present, "n3")
    return Health({name: Presence("a", f"{name}:1") for name in names}, damaged=frozenset(damaged))


ALL = health("n1", "n2")
DOWN = metadata(n3=NodePhase.DOWN)


def test_the_others_are_a_majority_and_have_agreed_that_it_is_down() -> None:
    assert is_dispensable("n3", DOWN, VOTERS, ALL)
    assert is_dispensable("n3", metadata(n3=NodePhase.DRAINING), VOTERS, ALL)


def test_a_node_that_counts_as_up_may_be_made_a_voter_at_any_moment() -> None:
    assert not is_dispensable("n3", metadata(), VOTERS, ALL)
    # What is agreed is about its former disk.
    former = Health({**ALL.present, "n3": Presence("b", "n3:1")})
    assert not is_dispensable("n3", DOWN, VOTERS, former)


def test_a_vote_that_is_needed_stays() -> None:
    assert not is_dispensable("n3", DOWN, VOTERS.with_voter("n3.a"), ALL)
    assert is_dispensable("n3", DOWN, VOTERS.with_voter("n3.a").without("n3.old"), ALL)
    assert not is_dispensable("n3", DOWN, VOTERS, health("n1"))


def test_of_two_damaged_nodes_neither_counts_on_the_other() -> None:
    both = metadata(n2=NodePhase.DOWN, n3=NodePhase.DOWN)
    assert not is_dispensable("n3", both, VOTERS, ALL)
    assert not is_dispensable("n3", DOWN, VOTERS, health("n1", "n2", damaged=("n2", "n3")))


def test_a_node_in_sync_somewhere_has_what_others_may_lack() -> None:
    assert not is_dispensable("n3", metadata("n3", n3=NodePhase.DOWN), VOTERS, ALL)

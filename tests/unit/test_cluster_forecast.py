"""The forecast of a drain and of a rebalance, against what a controller does step by step."""

from holdfast.node.failure.health import Health, Presence
from holdfast.node.metadata import operations
from holdfast.node.metadata.commands import InitCluster, PutNode, apply
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo
from holdfast.node.placement.forecast import forecast

NAMES = ("n1", "n2", "n3", "n4")
HEALTH = Health({name: Presence("i" + name, name) for name in NAMES})


def node(name: str) -> NodeInfo:
    return NodeInfo(name, "i" + name, name, "", "")


def cluster(partitions: int = 12) -> ClusterMetadata:
    """Four nodes, of which n1 has everything."""
    metadata = apply(None, InitCluster("c", partitions, 3, 2, node("n1"))).metadata
    for name in NAMES[1:]:
        metadata = apply(metadata, PutNode(node(name), 0)).metadata
    assert metadata is not None
    return metadata


def at_rest(metadata: ClusterMetadata) -> ClusterMetadata:
    """The metadata with the forecast carried out."""
    partitions = list(metadata.partitions)
    for each in forecast(metadata, HEALTH, None):
        partitions[each.partition] = each.after
    return ClusterMetadata(
        metadata.cluster_id, 3, 2, metadata.nodes, tuple(partitions), metadata.version
    )


def test_new_nodes_get_their_share() -> None:
    placed = at_rest(cluster())
    assert {each.leader for each in placed.partitions} == set(NAMES)
    assert all(len(each.replicas) == 3 for each in placed.partitions)
    assert forecast(placed, HEALTH, None) == []


def test_a_drained_node_loses_everything_and_only_its_partitions_move() -> None:
    placed = at_rest(cluster())
    found = forecast(placed, HEALTH, operations.drain(placed, "n2"))
    touched = {number for number, each in enumerate(placed.partitions) if "n2" in each.replicas}
    assert {each.partition for each in found} == touched
    for each in found:
        assert "n2" not in each.after.members
        assert len(each.copies_to) == 1
        assert each.after.leader in each.after.in_sync


def test_a_rebalance_moves_leaders_and_copies_nothing() -> None:
    placed = at_rest(cluster())
    partitions = list(placed.partitions)
    first = partitions[0]
    other = first.replicas[1]
    partitions[0] = type(first)(first.replicas, (), other, first.epoch + 1, first.in_sync, 7)
    moved = ClusterMetadata("c", 3, 2, placed.nodes, tuple(partitions), placed.version)
    found = forecast(moved, HEALTH, operations.rebalance(moved))
    assert [(each.partition, each.after.leader) for each in found] == [(0, first.replicas[0])]
    assert found[0].copies_to == ()

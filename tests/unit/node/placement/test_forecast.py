"""The forecast of a drain and of a rebalance, against what a controller does step by step."""

from holdfast.node.failure.health import Health, Presence
from holdfast.node.metadata import operations
from holdfast.node.metadata.commands import InitCluster, PutNode, PutPlacement, apply
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, NodeTraits
from holdfast.node.metadata.status import Evenness, evenness, loss_effect
from holdfast.node.placement.forecast import Situation, forecast

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
    for each in forecast(Situation(metadata, HEALTH), None):
        partitions[each.partition] = each.after
    return ClusterMetadata(
        metadata.cluster_id, 3, 2, metadata.nodes, tuple(partitions), metadata.version
    )


def test_new_nodes_get_their_share() -> None:
    placed = at_rest(cluster())
    assert {each.leader for each in placed.partitions} == set(NAMES)
    assert all(len(each.replicas) == 3 for each in placed.partitions)
    assert forecast(Situation(placed, HEALTH), None) == []


def test_a_drained_node_loses_everything_and_only_its_partitions_move() -> None:
    placed = at_rest(cluster())
    found = forecast(Situation(placed, HEALTH), operations.drain(placed, "n2"))
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
    found = forecast(Situation(moved, HEALTH), operations.rebalance(moved))
    assert [(each.partition, each.after.leader) for each in found] == [(0, first.replicas[0])]
    assert found[0].copies_to == ()


def zoned(metadata: ClusterMetadata, zones: str) -> ClusterMetadata:
    traits = tuple(NodeTraits(name, zone) for name, zone in zip(NAMES, zones, strict=True))
    placed = apply(metadata, PutPlacement(0, traits, False)).metadata
    assert placed is not None
    return placed


def test_a_join_and_a_loss_are_planned_with_their_zones() -> None:
    placed = zoned(at_rest(zoned(cluster(), "aabc")), "aabc")
    found = forecast(Situation(placed, HEALTH).with_node(NodeTraits("new", "b")), None)
    copies = [each for each in found if each.copies_to]
    assert {each.copies_to for each in copies} == {("new",)}
    assert {node for each in copies for node in each.before.replicas} - {
        node for each in copies for node in each.after.replicas
    } <= {"n3"}, "only its own zone gives"
    assert len(copies) == 6
    lost = forecast(Situation(placed, HEALTH).without_node("n2"), None)
    assert all(each.copies_to in ((), ("n1",)) for each in lost)
    held = [number for number, each in enumerate(placed.partitions) if "n2" in each.replicas]
    assert sorted(each.partition for each in lost if each.copies_to) == held
    for each in lost:
        assert each.copied_from in each.before.in_sync
        assert each.copied_from not in ("n2", *each.copies_to)


def test_a_forecast_is_that_of_a_cluster_whose_moves_are_not_paused() -> None:
    placed = at_rest(cluster())
    paused = apply(placed, operations.pause(placed, True) or PutPlacement(0, (), True)).metadata
    assert paused is not None
    assert paused.is_paused
    assert operations.pause(paused, True) is None
    plans = [
        forecast(Situation(each, HEALTH), operations.drain(each, "n2")) for each in (placed, paused)
    ]
    assert [(each.partition, each.after.replicas) for each in plans[0]] == [
        (each.partition, each.after.replicas) for each in plans[1]
    ]


def test_the_loss_of_nodes_and_the_evenness_are_counted() -> None:
    placed = at_rest(cluster())
    effect = loss_effect(placed, ["n2"])
    led = sum(each.leader == "n2" for each in placed.partitions)
    assert (effect.leaders, effect.below_min_insync, effect.leaderless) == (led, 0, 0)
    both = sum({"n1", "n2"} <= {*each.in_sync} for each in placed.partitions)
    assert loss_effect(placed, ["n1", "n2"]).below_min_insync == both > 0
    alone = sum({*each.in_sync} <= {"n1", "n2", "n3"} for each in placed.partitions)
    assert loss_effect(placed, ["n1", "n2", "n3"]).leaderless == alone > 0
    assert evenness(placed) == Evenness(0, 0)
    assert evenness(cluster()) == Evenness(0, 3), "n1 has 12, its share is 9"
    crowded = sum({"n1", "n2"} <= {*each.replicas} for each in placed.partitions)
    assert evenness(zoned(placed, "aabc")).under_zoned == crowded

"""The history of the metadata at one node, and the merged timeline of several."""

from msgspec.structs import replace

from holdfast.api.cluster.figures import quantile_ms
from holdfast.api.cluster.timeline_routes import merged, step_of
from holdfast.node.durations import BOUNDS_S
from holdfast.node.metadata import history
from holdfast.node.metadata.history import ClusterHistory, NodeChange
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo


def metadata(version: int, leader: str, state: str = "up") -> ClusterMetadata:
    nodes = {name: NodeInfo(name, "i", "", "", "") for name in ("a", "b")}
    nodes["a"] = replace(nodes["a"], state=state)
    partition = PartitionInfo(("a", "b"), (), leader, version, ("a", "b"), version)
    return ClusterMetadata("c", 2, 1, nodes, (partition,), version)


def test_a_failover_is_one_step_with_both_states() -> None:
    kept = ClusterHistory()
    kept.is_current = True
    kept.add_change(metadata(1, "a"), metadata(2, "b", "down"), (0,), 500)
    [change] = kept.changes(0)
    assert change.nodes == (NodeChange("a", "up", "down"),)
    assert [(each.leader_before, each.leader_after) for each in change.partitions] == [("a", "b")]
    assert kept.changes(501) == []


def test_changes_before_the_node_is_current_are_not_kept() -> None:
    kept = ClusterHistory()
    kept.add_change(metadata(1, "a"), metadata(2, "b"), (0,), 500)
    assert kept.changes(0) == []


def test_a_removed_node_and_one_that_joins() -> None:
    kept = ClusterHistory()
    kept.is_current = True
    both, one = metadata(1, "b"), metadata(2, "b")
    without = replace(one, nodes={"b": one.nodes["b"]})
    kept.add_change(both, without, (), 1)
    kept.add_change(without, both, (), 2)
    assert [each.nodes for each in kept.changes(0)] == [
        (NodeChange("a", "up", "removed"),),
        (NodeChange("a", "", "up"),),
    ]


def test_the_history_is_bounded() -> None:
    kept = ClusterHistory()
    kept.is_current = True
    for version in range(2, history.CHANGES_MAX + 12):
        names = ("a", "b") if version % 2 else ("b", "a")
        kept.add_change(metadata(version - 1, names[0]), metadata(version, names[1]), (0,), version)
    versions = [each.version for each in kept.changes(0)]
    assert versions == list(range(12, history.CHANGES_MAX + 12))


def test_the_merged_timeline_has_each_version_once_at_its_first_time() -> None:
    kept = ClusterHistory()
    kept.is_current = True
    kept.add_change(metadata(1, "a"), metadata(2, "b"), (0,), 500)
    [change] = kept.changes(0)
    late = replace(step_of(change), at_us=700)
    other = replace(step_of(change), version=3, at_us=600)
    found = merged([late, other, step_of(change)])
    assert [(each.version, each.at_us) for each in found] == [(2, 500), (3, 600)]


def test_quantiles_are_inside_their_bucket() -> None:
    counts = [0] * (len(BOUNDS_S) + 1)
    assert quantile_ms(counts, 0.99) is None
    counts[3] = 100
    assert quantile_ms(counts, 0.99) == 0.99
    counts[3], counts[-1] = 0, 1
    assert quantile_ms(counts, 0.99) == 1000 * BOUNDS_S[-1]

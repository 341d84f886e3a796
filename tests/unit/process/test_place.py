"""The configuration of one of several processes, and the steps when their number changes."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.config.listener import Listener
from holdfast.config.problem import ConfigError
from holdfast.config.schema import Config, Limits, Node, Rates, ScopeRates
from holdfast.node.metadata.commands import InitCluster, PutNode, Resize, apply
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, NodePhase
from holdfast.process.place import ProcessPlace, index_of, is_supervised, node_name
from holdfast.process.siblings import next_step


def config_of(data: Path) -> Config:
    return Config(
        node=Node(data=str(data)),
        listeners=[
            Listener(port=1883, max_connections=10, messages_per_s=9.0),
            Listener(socket=str(data / "mqtt.sock")),
        ],
        limits=Limits(connections=11),
        rates=Rates(listener=ScopeRates(connects_per_s=30.0), user=ScopeRates(messages_per_s=5)),
    )


def test_limits_hold_over_all_processes(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    made = [ProcessPlace(index, 3, str(tmp_path)).applied(config) for index in range(3)]
    assert [each.limits.connections for each in made] == [4, 4, 3]
    assert [each.listeners[0].max_connections for each in made] == [4, 3, 3]
    assert sum(each.listeners[0].messages_per_s for each in made) == 9.0
    assert sum(each.rates.listener.connects_per_s for each in made) == 30.0
    # A user may have one connection only, so each process allows the whole rate.
    assert [each.rates.user.messages_per_s for each in made] == [5, 5, 5]
    # The limit of a Unix socket that all processes accept on is divided, too.
    assert [len(each.listeners) for each in made] == [2, 1, 1]
    unix = {str(tmp_path / "mqtt.sock"): 7}
    shared = [ProcessPlace(index, 3, "s", unix=unix).applied(config) for index in range(3)]
    assert [len(each.listeners) for each in shared] == [2, 2, 2]
    assert [each.server.processes for each in shared] == [1, 1, 1]
    assert [each.node.id for each in made] == ["n1", "n1-1", "n1-2"]
    assert [each.admin.port for each in made] == [18083, 18084, 18085]
    # Read again for a reload, it is the same.
    assert made == [ProcessPlace(index, 3, str(tmp_path)).applied(config) for index in range(3)]


def test_a_surplus_process_has_no_clients(tmp_path: Path) -> None:
    made = ProcessPlace(2, 1, str(tmp_path)).applied(config_of(tmp_path))
    assert made.listeners == []
    assert made.node.data == str(tmp_path / "processes" / "2")


@pytest.mark.parametrize("index", [0, 1, 63])
def test_names_are_read_back(index: int) -> None:
    assert index_of("n-1", node_name("n-1", index)) == index
    assert index_of("n", "m-1") is None


def test_the_processes_share_a_port_that_the_system_has_chosen(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path), listeners=[Listener(port=0), Listener(port=1)])
    place = ProcessPlace(1, 2, "s", ports=(4711,))
    assert [each.port for each in place.applied(config).listeners] == [4711, 1]
    further = replace(config, listeners=[Listener(port=0), Listener(port=0)])
    with pytest.raises(ConfigError, match="give its number, or restart"):
        place.applied(further)


def cluster(*nodes: str) -> ClusterMetadata:
    first, *others = (NodeInfo(each, f"i{each[-1]}", f"unix:{each}", "", "") for each in nodes)
    metadata = apply(None, InitCluster("c", 4, 1, 1, first)).metadata
    for info in others:
        metadata = apply(metadata, PutNode(info, 0)).metadata
    assert metadata is not None
    return metadata


def in_state(metadata: ClusterMetadata, node: str, state: str) -> ClusterMetadata:
    info = replace(metadata.nodes[node], state=state)
    return replace(metadata, nodes={**metadata.nodes, node: info})


def test_surplus_nodes_are_drained_and_removed_one_by_one() -> None:
    metadata = cluster("n1", "n1-1", "n1-2", "other")
    assert next_step(metadata, "n1", 3) is None
    assert next_step(metadata, "n1", 2) == ("drain", "n1-2")
    draining = in_state(metadata, "n1-2", NodePhase.DRAINING)
    assert next_step(draining, "n1", 2) == ("remove", "n1-2")
    # It still stores a partition.
    one = replace(draining.partitions[0], replicas=("n1-2",), in_sync=("n1-2",), leader="n1-2")
    holding = replace(draining, partitions=(one, *draining.partitions[1:]))
    assert next_step(holding, "n1", 2) is None
    # One that is down may be the only one with its records.
    assert next_step(in_state(metadata, "n1-2", NodePhase.DOWN), "n1", 2) is None


def test_one_replica_on_one_machine_and_automatic_when_alone() -> None:
    alone = cluster("n1")
    assert next_step(alone, "n1", 1) == ("automatic", "n1")
    automatic = apply(alone, Resize(0, True, 0, 0)).metadata
    assert automatic is not None
    assert next_step(automatic, "n1", 1) is None
    assert next_step(automatic, "n1", 2) == ("single", "n1")
    assert next_step(alone, "n1", 2) is None


def test_a_file_in_place_of_the_data_directory_has_no_processes(tmp_path: Path) -> None:
    """The start refuses it then, in one line."""
    (tmp_path / "file").write_text("")
    assert not is_supervised(replace(Config(), node=Node(data=str(tmp_path / "file"))))

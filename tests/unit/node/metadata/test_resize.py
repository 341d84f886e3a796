"""A change of the replication: what nodes agree on, what is refused, and which nodes know of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import __version__
from holdfast.config.schema import Cluster, Config, Log, Node
from holdfast.io.peers import questions
from holdfast.log.files.data_directory import create_or_open
from holdfast.node import attendance
from holdfast.node.features import (
    AGREED_ACCESS,
    AGREED_GENERATION,
    AGREED_REPLICATION,
    AGREED_USERS,
    GIVES_UP_RECORDS,
    MEMBER_TABLE,
    RECORD_FEATURES,
    WILL_OFFSETS,
)
from holdfast.node.metadata import generation, operations
from holdfast.node.metadata.codec import (
    decode_command,
    decode_metadata,
    encode_command,
    encode_metadata,
)
from holdfast.node.metadata.commands import (
    ChangePartitions,
    InitCluster,
    PutNode,
    PutPlacement,
    Resize,
    SetReplication,
    apply,
)
from holdfast.node.metadata.model import (
    AgreedGeneration,
    AgreedPlacement,
    AgreedUsers,
    ClusterMetadata,
    NodePhase,
    NodeTraits,
)
from holdfast.node.metadata.operations import OperationError
from holdfast.node.ownership import releases, reports
from holdfast.node.replicate import disk_position, incomplete
from holdfast.node.runtime.peer_check import PeerCheck
from holdfast.process.place import with_directory
from holdfast.security.peer_identity import (
    ANSWERS_APART,
    LEVELS,
    OF_LEVELS,
    PROGRAM,
    STANDS_APART,
    TEXT_CHARACTERS_MAX,
    PeerIdentity,
    Refusal,
    decode_identity,
    encode_identity,
    features_in,
    level_word,
)
from tests.unit.node.metadata.test_metadata import accepted, node, refused


def cluster(*names: str, factor: int = 1, least: int = 1) -> ClusterMetadata:
    """`n1` leads two partitions, and has all replicas."""
    metadata = accepted(apply(None, InitCluster("c", 2, factor, least, node("n1"))))
    for name in names:
        metadata = accepted(apply(metadata, PutNode(node(name), 0)))
    return metadata


def resized(metadata: ClusterMetadata, *numbers: int, auto: bool = False) -> ClusterMetadata:
    command = operations.resize(metadata, *numbers, is_automatic=auto)
    assert command is not None
    assert decode_command(encode_command(command)) == command
    return accepted(apply(metadata, command))


def test_a_resize_changes_what_is_wanted_and_not_what_is_in_force() -> None:
    metadata = resized(cluster("n2", "n3"), 3, 2)
    assert metadata.wanted_replication == (3, 2)
    assert (metadata.replication_factor, metadata.min_insync) == (1, 1)
    assert operations.resize(metadata, 3, 2) is None
    assert operations.resize(metadata, 0, 2) is None


@pytest.mark.parametrize(
    ("numbers", "auto", "text"),
    [
        ((4, 0), False, "needs as many data nodes, and the cluster has 3"),
        ((2, 3), False, "min_insync 3 is above the replication factor 2"),
        ((0, 2), False, "give another replication factor too"),
        ((0, 0), False, "give a replication factor, a min_insync, or auto"),
        ((2, 0), True, "auto takes no numbers"),
        ((8, 1), False, "at most 7 is possible"),
    ],
)
def test_a_resize_that_cannot_be_met_is_refused(
    numbers: tuple[int, int], auto: bool, text: str
) -> None:
    with pytest.raises(OperationError, match=text):
        operations.resize(cluster("n2", "n3"), *numbers, is_automatic=auto)


def test_a_late_resize_is_refused() -> None:
    """A node was drained, or another operator was faster, after it was decided."""
    metadata = cluster("n2")
    command = Resize(0, False, 2, 1)
    info = metadata.nodes["n2"]
    drained = ChangePartitions((), ((info.version, replace(info, state=NodePhase.DRAINING)),))
    assert "needs as many data nodes" in refused(accepted(apply(metadata, drained)), command)
    assert "at version" in refused(resized(metadata, auto=True), command)
    assert "1 to the replication factor" in refused(metadata, Resize(0, False, 1, 2))
    assert "16 are possible" in refused(metadata, Resize(0, False, 0, 0))


def test_a_step_is_refused_unless_it_is_met() -> None:
    metadata = accepted(apply(cluster("n2"), SetReplication((1, 1), (2, 1))))
    assert "2 partitions have fewer than 2" in refused(metadata, SetReplication((2, 1), (2, 2)))
    assert "the replication is (2, 1)" in refused(metadata, SetReplication((1, 1), (3, 1)))
    assert "1 to the replication factor" in refused(metadata, SetReplication((2, 1), (2, 3)))
    for number, info in enumerate(metadata.partitions):
        both = replace(info, replicas=("n1", "n2"), in_sync=("n1", "n2"))
        change = ChangePartitions(((number, info.version, both),))
        metadata = accepted(apply(metadata, change))
    step = SetReplication((2, 1), (2, 2))
    assert decode_command(encode_command(step)) == step
    assert accepted(apply(metadata, step)).min_insync == 2


def test_an_automatic_replication_follows_the_data_nodes() -> None:
    metadata = resized(cluster(), auto=True)
    found = []
    for name in ("n2", "n3", "n4"):
        metadata = accepted(apply(metadata, PutNode(node(name), 0)))
        found.append(metadata.wanted_replication)
    assert found == [(2, 1), (3, 2), (3, 2)]
    witness = accepted(apply(cluster(), PutNode(node("w", role="witness"), 0)))
    assert resized(witness, auto=True).wanted_replication == (1, 1)
    assert operations.resize(metadata, is_automatic=True) is None
    # An operator may decide again.
    assert resized(metadata, 2, 2).wanted_replication == (2, 2)


def test_a_snapshot_has_the_wanted_replication_and_older_ones_are_read() -> None:
    metadata = cluster("n2")
    assert decode_metadata(encode_metadata(metadata)) == metadata
    assert encode_metadata(metadata).count(b"\n") == 0
    users = AgreedUsers(1, b"x")
    for changed in (
        resized(metadata, auto=True),
        replace(resized(metadata, 2, 1), users=users, generation=AgreedGeneration(1, (2,))),
    ):
        assert decode_metadata(encode_metadata(changed)) == changed


# The feature


def test_all_features_fit_into_the_handshake() -> None:
    """With every conditional one. A later feature belongs to a higher level, and adds nothing."""
    names = [
        disk_position.FEATURE,
        ANSWERS_APART,
        questions.FEATURE,
        *(each for each in RECORD_FEATURES if each not in OF_LEVELS),
        WILL_OFFSETS,
        releases.FEATURE,
        reports.FEATURE,
        AGREED_USERS,
        f"{PROGRAM}{__version__}",
        AGREED_ACCESS,
        AGREED_GENERATION,
        GIVES_UP_RECORDS,
        level_word(),
        attendance.FEATURE,
        incomplete.FEATURE,
        attendance.RECOVERS,
        MEMBER_TABLE,
        generation.word_of(generation.ACCEPTED * 2 - 1),
        STANDS_APART,
    ]
    text = ",".join(names)
    assert len(text) <= TEXT_CHARACTERS_MAX
    assert features_in(text) == {*names, *OF_LEVELS}
    assert AGREED_REPLICATION in OF_LEVELS
    assert {*RECORD_FEATURES} <= features_in(text)


def test_a_level_stands_for_those_below_it() -> None:
    assert AGREED_REPLICATION in LEVELS[0]
    assert features_in("a,v1") == {"a", "v1", *LEVELS[0]}
    assert features_in("v999") >= OF_LEVELS
    assert features_in(level_word()) >= OF_LEVELS
    for text in ("", "v0", "v", "v1x", "will-offsets", "v1000"):
        assert not features_in(text) & {*LEVELS[0]}


def test_an_older_node_reads_and_sends_an_identity_without_partitions() -> None:
    newer = PeerIdentity("n1", "i1", "c", partitions="16")
    body = encode_identity(newer)
    assert decode_identity(body, 1) == newer
    assert b"partitions" not in encode_identity(PeerIdentity("n1", "i1"))
    assert decode_identity(encode_identity(PeerIdentity("n1", "i1")), 1).partitions == ""


def test_an_identity_has_its_zone_and_capacity_if_there_are_any() -> None:
    newer = PeerIdentity("n1", "i1", "c", zone="rack-1.b", capacity="200")
    assert decode_identity(encode_identity(newer), 1) == newer
    older = encode_identity(PeerIdentity("n1", "i1"))
    assert b"zone" not in older
    assert b"capacity" not in older
    for fields in ({"zone": "a b"}, {"zone": "z" * 65}, {"capacity": "0"}, {"capacity": "1e3"}):
        with pytest.raises(Refusal, match="sent the zone"):
            decode_identity(encode_identity(PeerIdentity("n1", "i1", **fields)), 1)


def test_the_placement_is_agreed_from_a_known_version() -> None:
    metadata = cluster("n2")
    traits = (NodeTraits("n1", "a"), NodeTraits("n2", "b", 200))
    command = PutPlacement(0, traits, False)
    assert decode_command(encode_command(command)) == command
    placed = accepted(apply(metadata, command))
    assert placed.placement == AgreedPlacement(placed.version, traits, False)
    assert decode_metadata(encode_metadata(placed)) == placed
    assert "at version" in refused(placed, command)
    assert "there is no node n9" in refused(metadata, PutPlacement(0, (NodeTraits("n9"),), False))
    twice = PutPlacement(0, (NodeTraits("n1"), NodeTraits("n1", "b")), False)
    assert "named twice" in refused(metadata, twice)


@pytest.mark.parametrize(
    ("zones", "wanted"),
    [("aab", (2, 1)), ("abc", (3, 2)), ("aaa", (3, 2)), ("a--", (3, 2)), ("---", (3, 2))],
)
def test_automatic_replication_counts_zones(zones: str, wanted: tuple[int, int]) -> None:
    metadata = resized(cluster("n2", "n3"), auto=True)
    traits = tuple(
        NodeTraits(f"n{number}", zone.strip("-")) for number, zone in enumerate(zones, 1)
    )
    placed = accepted(apply(metadata, PutPlacement(0, traits, False)))
    assert placed.wanted_replication == wanted


# A directory decides about settings that have their defaults


def test_settings_with_their_defaults_are_those_of_the_directory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    config = Config(node=Node(data=str(data)))
    assert with_directory(config) is config
    create_or_open(data, "first", 5, "2026-01-01T00:00:00Z", "i1")[1].release()
    found = with_directory(config)
    assert (found.node.id, found.log.partitions) == ("first", 5)
    assert found.cluster == config.cluster
    in_cluster = replace(config, cluster=Cluster(peer_bind="127.0.0.1"))
    found = with_directory(in_cluster)
    assert (found.node.id, found.cluster.partitions) == ("first", 5)
    assert found.log == config.log
    joining = replace(config, cluster=Cluster(join=["127.0.0.1:21883"]))
    assert with_directory(joining).cluster.partitions == 5
    given = replace(
        config,
        node=replace(config.node, id="n7"),
        log=Log(partitions=3),
        cluster=Cluster(partitions=4),
    )
    assert with_directory(given) == given
    # The nodes that share a directory have names of their own.
    shared = replace(config, node=replace(config.node, standby=True))
    assert with_directory(shared).node.id == config.node.id


def test_a_node_of_an_older_version_joins_until_the_cluster_resizes() -> None:
    def objection(metadata: ClusterMetadata, features: str) -> str:
        context = SimpleNamespace(metadata=metadata)
        runtime: Any = SimpleNamespace(
            cluster_node=SimpleNamespace(context=context),
            links=SimpleNamespace(relayed=SimpleNamespace()),
        )
        found = PeerCheck(runtime).objection(PeerIdentity("n9", "i1", features=features), {})
        return "" if found is None else found.reason

    older = "position,bans,gives-up-records"
    assert objection(cluster("n2"), older) == ""
    assert objection(resized(cluster("n2"), auto=True), older) == "older"
    assert objection(resized(cluster("n2"), auto=True), f"{older},{level_word()}") == ""
    placed = accepted(apply(cluster("n2"), PutPlacement(0, (NodeTraits("n1", "a"),), False)))
    assert objection(placed, f"{older},{level_word(4)}") == "older"
    assert objection(placed, f"{older},{level_word()}") == ""

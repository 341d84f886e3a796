"""Changes of the cluster metadata: what comes through, what is refused, and that it is cheap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.api.cluster_operations import awaited_in_sync
from holdfast.node.failure.health import Health, Presence
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.metadata.codec import (
    decode_command,
    decode_metadata,
    encode_command,
    encode_metadata,
)
from holdfast.node.metadata.commands import (
    Applied,
    ChangePartitions,
    Command,
    InitCluster,
    PutNode,
    PutUsers,
    RemoveNode,
    apply,
)
from holdfast.node.metadata.model import (
    EPOCH_MAX,
    GATEWAY,
    WITNESS,
    AgreedUsers,
    ClusterMetadata,
    NodeInfo,
    NodePhase,
    PartitionInfo,
)
from holdfast.node.metadata.status import StopEffect, lacks_voters, stop_effect


def node(name: str, incarnation: str = "i1", role: str = "data") -> NodeInfo:
    return NodeInfo(name, incarnation, f"{name}:7000", f"{name}:1883", "", role)


def accepted(applied: Applied) -> ClusterMetadata:
    assert applied.error == ""
    assert applied.metadata is not None
    return applied.metadata


def refused(metadata: ClusterMetadata | None, command: Command) -> str:
    applied = apply(metadata, command)
    assert applied.error
    assert applied.metadata is metadata
    assert applied.changed_partitions == ()
    return applied.error


def cluster(partitions: int = 3) -> ClusterMetadata:
    """Four data nodes and a witness; n1, n2 and n3 hold everything, n1 leads in epoch 1."""
    metadata = accepted(apply(None, InitCluster("c", partitions, 3, 2, node("n1"))))
    for name in ("n2", "n3", "n4"):
        metadata = accepted(apply(metadata, PutNode(node(name), 0)))
    metadata = accepted(apply(metadata, PutNode(node("w", role=WITNESS), 0)))
    for made in (
        PartitionInfo(("n1",), ("n2", "n3"), "n1", 1, ("n1",)),
        PartitionInfo(("n1",), ("n2", "n3"), "n1", 1, ("n1", "n2", "n3")),
        PartitionInfo(("n1", "n2", "n3"), (), "n1", 1, ("n1", "n2", "n3")),
    ):
        changes = tuple(
            (number, old.version, made) for number, old in enumerate(metadata.partitions)
        )
        metadata = accepted(apply(metadata, ChangePartitions(changes)))
    return metadata


def change(metadata: ClusterMetadata, **fields: object) -> ChangePartitions:
    """Of partition 0."""
    old = metadata.partitions[0]
    return ChangePartitions(((0, old.version, replace(old, **fields)),))  # type: ignore[arg-type]


def test_a_new_cluster_has_one_node_that_leads_everything() -> None:
    applied = apply(None, InitCluster("c", 4, 3, 2, node("n1")))
    metadata = accepted(applied)
    assert applied.changed_partitions == (0, 1, 2, 3)
    assert metadata.nodes["n1"] == replace(node("n1"), version=1)
    assert set(metadata.partitions) == {PartitionInfo(("n1",), (), "n1", 1, ("n1",), 1)}


@pytest.mark.parametrize(
    "command",
    [
        InitCluster("", 4, 3, 2, node("n1")),
        InitCluster("c", 0, 3, 2, node("n1")),
        InitCluster("c", 1 << 20, 3, 2, node("n1")),
        InitCluster("c", 4, 0, 0, node("n1")),
        InitCluster("c", 4, 2, 3, node("n1")),
        InitCluster("c", 4, 2, 0, node("n1")),
        InitCluster("c", 4, 3, 2, node("n1", role=WITNESS)),
        InitCluster("c", 4, 3, 2, node("n 1")),
        PutNode(node("n1"), 0),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(command: Command) -> None:
    refused(None, command)


def test_a_cluster_is_founded_once() -> None:
    assert "already" in refused(cluster(), InitCluster("d", 4, 3, 2, node("n1")))


def test_a_leader_fails_over_with_its_node() -> None:
    metadata = cluster()
    n1 = metadata.nodes["n1"]
    changes = tuple(
        (number, old.version, replace(old, leader="n2", epoch=2, in_sync=("n2", "n3")))
        for number, old in enumerate(metadata.partitions)
    )
    command = ChangePartitions(changes, ((n1.version, replace(n1, state=NodePhase.DOWN)),))
    applied = apply(metadata, command)
    after = accepted(applied)
    assert applied.changed_partitions == (0, 1, 2)
    assert after.nodes["n1"].state == NodePhase.DOWN
    assert all(each.leader == "n2" and each.epoch == 2 for each in after.partitions)
    assert all(each.version == after.version for each in after.partitions)
    # It was decided on what is not any more.
    assert "version" in refused(after, command)


def test_one_stale_version_refuses_all() -> None:
    metadata = cluster()
    first, second, _ = metadata.partitions
    command = ChangePartitions(
        (
            (0, first.version, replace(first, epoch=2)),
            (1, second.version - 1, replace(second, epoch=2)),
        )
    )
    assert "partition 1 is at version" in refused(metadata, command)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"replicas": (), "leader": "", "in_sync": ()}, "no replicas"),
        ({"replicas": ("n1", "n2", "n9")}, "n9 is no node"),
        ({"replicas": ("n1", "n2", "n3", "w")}, "w is a witness"),
        ({"replicas": ("n1", "n2", "n3", "n3")}, "twice"),
        ({"adding": ("n3",)}, "twice"),
        ({"in_sync": ("n1", "n1")}, "twice"),
        ({"in_sync": ("n1", "n4")}, "no replica"),
        ({"replicas": ("n1", "n2")}, "no replica"),
        ({"leader": "n4", "epoch": 2}, "n4 is not in sync"),
        ({"in_sync": ("n2", "n3")}, "n1 is not in sync"),
        ({"leader": "n2"}, "above 1"),
        ({"epoch": 0}, "epoch"),
        ({"epoch": EPOCH_MAX + 1}, "epoch"),
        ({"leader": "", "in_sync": ()}, "no other node has"),
        ({"replicas": ("n2", "n3"), "adding": ("n1",), "epoch": 2}, "still being added"),
    ],
)
def test_a_partition_that_must_not_be_is_refused(fields: dict[str, object], text: str) -> None:
    metadata = cluster()
    assert text in refused(metadata, change(metadata, **fields))


def test_there_is_no_such_partition() -> None:
    metadata = cluster()
    old = metadata.partitions[0]
    assert "no partition 3" in refused(metadata, ChangePartitions(((3, old.version, old),)))
    twice = ((0, old.version, old), (0, old.version, old))
    assert "twice" in refused(metadata, ChangePartitions(twice))
    assert "nothing" in refused(metadata, ChangePartitions(()))


def test_only_the_leader_adds_to_the_in_sync_set() -> None:
    metadata = accepted(apply(cluster(), change(cluster(), in_sync=("n1", "n2"))))
    back = {"in_sync": ("n1", "n2", "n3")}
    for fields in (
        {**back, "leader": "n2", "epoch": 2},
        {**back, "epoch": 2},
        {**back, "leader": "n3", "epoch": 2},
    ):
        assert "can say that n3" in refused(metadata, change(metadata, **fields))
    accepted(apply(metadata, change(metadata, **back)))
    without = accepted(apply(metadata, change(metadata, leader="", in_sync=("n2",))))
    assert "can say" in refused(without, change(without, in_sync=("n2", "n3")))


def test_a_replica_that_was_not_in_sync_leads_only_if_an_operator_says_so() -> None:
    metadata = accepted(apply(cluster(), change(cluster(), in_sync=("n1",))))
    command = change(metadata, leader="n2", epoch=2, in_sync=("n2",))
    refused(metadata, command)
    after = accepted(apply(metadata, replace(command, accept_loss=True)))
    assert after.partitions[0].leader == "n2"
    # Not everything is lifted.
    refused(metadata, replace(change(metadata, leader="n2", in_sync=("n2",)), accept_loss=True))


def test_a_wiped_node_leaves_every_in_sync_set() -> None:
    metadata = cluster()
    n3 = metadata.nodes["n3"]
    wiped = (n3.version, replace(n3, incarnation="i2"))
    assert "new disk" in refused(metadata, PutNode(wiped[1], n3.version))
    some = tuple(
        (number, old.version, replace(old, in_sync=("n1", "n2")))
        for number, old in enumerate(metadata.partitions)
    )
    assert "partition 2" in refused(metadata, ChangePartitions(some[:2], (wiped,)))
    after = accepted(apply(metadata, ChangePartitions(some, (wiped,))))
    assert after.nodes["n3"].incarnation == "i2"
    # What a leader found out about the old disk comes too late.
    late = [
        (number, old.version, replace(old, in_sync=("n1", "n2", "n3")))
        for number, old in enumerate(metadata.partitions)
    ]
    assert "version" in refused(after, ChangePartitions(tuple(late)))


def test_what_a_leader_said_of_the_old_disk_comes_too_late_even_if_it_was_out_of_sync() -> None:
    metadata = cluster(1)
    metadata = accepted(apply(metadata, change(metadata, in_sync=("n1", "n2"))))
    report = change(metadata, in_sync=("n1", "n2", "n3"))
    n3 = metadata.nodes["n3"]
    applied = apply(metadata, PutNode(replace(n3, incarnation="i2"), n3.version))
    assert applied.changed_partitions == (0,)
    refused(accepted(applied), report)


def test_the_last_in_sync_disk_may_be_lost_and_nobody_leads_then() -> None:
    metadata = accepted(apply(cluster(1), change(cluster(1), in_sync=("n1",))))
    n1 = metadata.nodes["n1"]
    old = metadata.partitions[0]
    command = ChangePartitions(
        ((0, old.version, replace(old, leader="", in_sync=())),),
        ((n1.version, replace(n1, incarnation="i2")),),
    )
    after = accepted(apply(metadata, command))
    refused(after, change(after, leader="n2", epoch=2, in_sync=("n2",)))
    operator = replace(change(after, leader="n2", epoch=2, in_sync=("n2",)), accept_loss=True)
    accepted(apply(after, operator))


def test_nodes_come_and_go() -> None:
    metadata = cluster()
    n4 = metadata.nodes["n4"]
    assert "no node n5" in refused(metadata, RemoveNode("n5", 1))
    assert "version" in refused(metadata, RemoveNode("n4", n4.version + 1))
    assert "holds 3" in refused(metadata, RemoveNode("n2", metadata.nodes["n2"].version))
    voting = metadata.with_voters(("n1", "n4"))
    assert "votes" in refused(voting, RemoveNode("n4", n4.version))
    after = accepted(apply(metadata, RemoveNode("n4", n4.version)))
    assert "n4" not in after.nodes
    assert after.removed == (("n4", "i1"),)
    assert "was removed" in refused(after, PutNode(node("n4"), 0))
    again = accepted(apply(after, PutNode(node("n4", "i2"), 0)))
    back = replace(node("n4"), version=again.nodes["n4"].version)
    assert "was removed" in refused(again, PutNode(back, back.version))
    # The version of the one before does not come again.
    assert again.nodes["n4"].version > n4.version
    refused(again, RemoveNode("n4", n4.version))
    assert "version" in refused(again, PutNode(node("n4", "i2"), 0))


@pytest.mark.parametrize(
    "info",
    [
        replace(node("n4"), role=WITNESS),
        replace(node("n4"), state="sleeping"),
        replace(node("n4"), incarnation=""),
        replace(node("n4"), incarnation="x" * 65),
        replace(node("n4"), incarnation="a.b"),
    ],
)
def test_a_node_that_must_not_be_is_refused(info: NodeInfo) -> None:
    metadata = cluster()
    refused(metadata, PutNode(info, metadata.nodes["n4"].version))


def test_users_are_changed_from_the_version_they_have() -> None:
    metadata = cluster()
    first = accepted(apply(metadata, PutUsers(0, b"one")))
    assert first.users == AgreedUsers(metadata.version + 1, b"one")
    assert (
        refused(first, PutUsers(0, b"late")) == f"the users are at version {first.version}, not 0"
    )
    # Their version is that of the metadata, which other changes raise, too.
    moved = accepted(apply(first, change(first, epoch=2)))
    assert moved.users is first.users
    second = accepted(apply(moved, PutUsers(first.version, b"two")))
    assert second.users == AgreedUsers(moved.version + 1, b"two")
    assert "the users are at version" in refused(second, PutUsers(first.version, b"late"))
    assert second.partitions is moved.partitions


def test_a_change_shares_what_it_leaves_alone() -> None:
    metadata = cluster()
    after = accepted(apply(metadata, change(metadata, epoch=2)))
    assert after.nodes is metadata.nodes
    assert all(a is b for a, b in zip(after.partitions[1:], metadata.partitions[1:], strict=True))


# Bytes

NAMES = st.text("abcXYZ019_-", max_size=8)
NODES = st.builds(
    NodeInfo, NAMES, NAMES, NAMES, NAMES, NAMES, NAMES, NAMES, st.integers(0, 1 << 40)
)
LISTS = st.lists(NAMES, max_size=4).map(tuple)
NUMBERS = st.integers(0, 1 << 40)
PARTITIONS = st.builds(
    PartitionInfo, LISTS, LISTS, NAMES, st.integers(0, EPOCH_MAX), LISTS, NUMBERS
)
COMMANDS = st.one_of(
    st.builds(InitCluster, NAMES, st.integers(0, 100), st.integers(0, 9), st.integers(0, 9), NODES),
    st.builds(PutNode, NODES, NUMBERS),
    st.builds(RemoveNode, NAMES, NUMBERS),
    st.builds(
        ChangePartitions,
        st.lists(st.tuples(st.integers(0, 99), NUMBERS, PARTITIONS), max_size=3).map(tuple),
        st.lists(st.tuples(NUMBERS, NODES), max_size=3).map(tuple),
        st.booleans(),
    ),
    st.builds(PutUsers, NUMBERS, st.binary(max_size=20)),
)


@given(COMMANDS)
@settings(max_examples=100)
def test_commands_come_back_from_their_bytes(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


@given(COMMANDS)
@settings(max_examples=100)
def test_apply_never_raises(command: Command) -> None:
    for metadata in (None, cluster()):
        applied = apply(metadata, command)
        assert applied.error or applied.metadata is not metadata


@given(COMMANDS, st.data())
@settings(max_examples=100)
def test_damaged_commands_are_refused_or_are_commands(
    command: Command, data: st.DataObject
) -> None:
    encoded = bytearray(encode_command(command))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] = data.draw(st.integers(0, 255))
    for piece in (bytes(encoded), bytes(encoded[:at])):
        try:
            apply(cluster(), decode_command(piece))
        except BadFrame:
            continue


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"[1]",
        b'["nothing"]',
        b'["remove","n1"]',
        b'["remove","n1",-1]',
        b'["remove","n1",true]',
        b'["remove","n1",1.5]',
        b'["remove","\\u00e9",1]',
        b'["change",[],[],1]',
        b'["change",[[0,1,[[],[],"",0,[]]]],[],false]',
        b"[" * 100_000,
    ],
)
def test_what_is_no_command_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_command(data)


NODE_1 = NodeInfo("n1", "abc123", "h1:1", "h1:2", "h1:3", "data", NodePhase.DRAINING, 7)
NODE_2 = NodeInfo("n2", "zzz", "[::1]:1", "", "", WITNESS, NodePhase.UP, 3)
PARTITION = PartitionInfo(("n1", "n3"), ("n4",), "n1", EPOCH_MAX, ("n1", "n4"), 9)
ROW_1 = b'["n1","abc123","h1:1","h1:2","h1:3","data","draining",7]'
ROW_2 = b'["n2","zzz","[::1]:1","","","witness","up",3]'
PARTITION_ROW = b'[["n1","n3"],["n4"],"n1",4294967295,["n1","n4"],9]'


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (
            InitCluster('c"1\\ \x1f', 64, 3, 2, NODE_1),
            b'["init","c\\"1\\\\ \\u001f",64,3,2,' + ROW_1 + b"]",
        ),
        (PutNode(NODE_2, 0), b'["put",' + ROW_2 + b",0]"),
        (RemoveNode("n1", (1 << 63) - 1), b'["remove","n1",9223372036854775807]'),
        (
            ChangePartitions(
                ((0, 5, PARTITION), (65535, 0, PartitionInfo(("n1",)))), ((7, NODE_1),), True
            ),
            b'["change",[[0,5,' + PARTITION_ROW + b'],[65535,0,[["n1"],[],"",0,[],0]]],[[7,'
            + ROW_1 + b"]],true]",
        ),
        (ChangePartitions(()), b'["change",[],[],false]'),
    ],
)  # fmt: skip
def test_commands_in_the_bytes_of_earlier_versions(command: Command, written: bytes) -> None:
    """The bytes are those of the encoder that commit 704ebb7 has."""
    assert encode_command(command) == written
    assert decode_command(written) == command


def test_metadata_in_the_bytes_of_earlier_versions() -> None:
    small = PartitionInfo(("n1",))
    metadata = ClusterMetadata(
        "cid", 3, 2, {"n2": NODE_2, "n1": NODE_1}, (PARTITION, small, PARTITION), 12,
        ("n1", "n2"), (("n9", "old"),),
    )  # fmt: skip
    written = (
        b'["cid",3,2,[' + ROW_1 + b"," + ROW_2 + b"],[" + PARTITION_ROW
        + b',[["n1"],[],"",0,[],0],' + PARTITION_ROW + b'],12,["n1","n2"],[["n9","old"]]]'
    )  # fmt: skip
    assert encode_metadata(metadata) == written
    found = decode_metadata(written)
    assert found == metadata
    first, _, last = found.partitions
    assert first.replicas is last.replicas


def test_metadata_comes_back_from_its_bytes() -> None:
    metadata = cluster().with_voters(("n1", "n2", "n3"))
    metadata = replace(metadata, removed=(("n5", "i1"), ("n5", "i2")))
    encoded = encode_metadata(metadata)
    assert decode_metadata(encoded) == metadata
    # A snapshot without users is one that older versions read, and the users follow it.
    users = replace(metadata, users=AgreedUsers(9, bytes(range(256))))
    assert encode_metadata(users).startswith(encoded + b"\n")
    assert decode_metadata(encode_metadata(users)) == users
    with pytest.raises(BadFrame):
        decode_metadata(encode_metadata(users)[:-1])
    for end in range(0, len(encoded), 7):
        with pytest.raises(BadFrame):
            decode_metadata(encoded[:end])


def test_whether_all_nodes_vote_that_will() -> None:
    """Of two nodes one votes; a third one makes it three, and until it does one is too few."""
    metadata = accepted(apply(None, InitCluster("c", 1, 3, 2, node("n1"))))
    assert not lacks_voters(metadata.with_voters(("n1",)))
    metadata = accepted(apply(metadata, PutNode(node("n2"), 0)))
    assert not lacks_voters(metadata.with_voters(("n1",)))
    metadata = accepted(apply(metadata, PutNode(node("n3"), 0)))
    assert lacks_voters(metadata.with_voters(("n1",)))
    assert lacks_voters(metadata.with_voters(("n1", "n2")))
    assert not lacks_voters(metadata.with_voters(("n1", "n2", "n3")))
    down = {**metadata.nodes, "n3": replace(metadata.nodes["n3"], state=NodePhase.DOWN)}
    assert not lacks_voters(replace(metadata.with_voters(("n1", "n2", "n3")), nodes=down))
    gateways = {name: replace(node(name), role=GATEWAY) for name in ("n4", "n5")}
    more = replace(metadata, nodes={**metadata.nodes, **gateways})
    assert not lacks_voters(more.with_voters(("n1", "n2", "n3")))


def in_sync(*nodes: str, adding: tuple[str, ...] = ()) -> ClusterMetadata:
    """A partition of three replicas, of which these are in sync."""
    one = PartitionInfo(("n1", "n2", "n3"), adding, nodes[0], 1, nodes)
    return replace(cluster(), partitions=(one,)).with_voters(("n1", "n2", "n3"))


def health(*present: str, **more: frozenset[str]) -> Health:
    return Health({each: Presence("i1", "") for each in present}, **more)


ALL = ("n1", "n2", "n3")
N3 = frozenset({"n3"})


@pytest.mark.parametrize(
    ("metadata", "nodes", "effect"),
    [
        pytest.param(in_sync(*ALL), health(*ALL), StopEffect(), id="all in sync"),
        pytest.param(in_sync("n1", "n2"), health(*ALL), StopEffect(1, False, True), id="behind"),
        pytest.param(
            in_sync("n1", "n2"), health("n1", "n2"), StopEffect(1, True, False), id="down"
        ),
        pytest.param(
            in_sync("n1", "n2"), health(*ALL, leaving=N3), StopEffect(1, True, True), id="leaves"
        ),
        pytest.param(
            in_sync(*ALL),
            health(*ALL, asking=frozenset({"n1", "n3"})),
            StopEffect(),
            id="the first of two that ask",
        ),
        pytest.param(
            in_sync(*ALL), health(*ALL, asking=N3), StopEffect(1, True, True), id="another one asks"
        ),
        pytest.param(
            in_sync(*ALL),
            health(*ALL, asking=frozenset({"n1", "n2"}), leaving=N3),
            StopEffect(1, True, False),
            id="all stop",
        ),
        pytest.param(
            in_sync("n1", "n2"), health(*ALL, stalled=N3), StopEffect(1, True, False), id="stalls"
        ),
        # n3 has been killed a moment ago, and is still in the set.
        pytest.param(in_sync(*ALL), health("n1", "n2"), StopEffect(1, True, False), id="lost"),
        pytest.param(in_sync("n2", "n3"), health(*ALL), StopEffect(), id="not in sync itself"),
        pytest.param(
            in_sync("n1", "n2", adding=("n4",)),
            health("n1", "n2", "n4"),
            StopEffect(1, True, True),
            id="a replica is added",
        ),
        # Two replicas with min_insync 2 lose one at any time.
        pytest.param(
            replace(
                in_sync("n1", "n2").with_voters(("n1",)),
                partitions=(PartitionInfo(("n1", "n2"), (), "n1", 1, ("n1", "n2")),),
            ),
            health("n1", "n2"),
            StopEffect(),
            id="no third node",
        ),
    ],
)
def test_the_effect_of_a_stop(metadata: ClusterMetadata, nodes: Health, effect: StopEffect) -> None:
    metadata = replace(metadata, nodes={**metadata.nodes, "n4": node("n4")})
    assert stop_effect(metadata, nodes, "n1") == effect


def test_nodes_that_a_partition_waits_for_after_a_start() -> None:
    """With two replicas left, or once the start is long ago, nobody is waited for."""
    alone, pair, late = in_sync("n1", "n2"), in_sync(*ALL), frozenset({"n2", "n3"})
    assert awaited_in_sync(alone, health("n1", suspected=late, unmet=late)) == ["n2"]
    assert awaited_in_sync(pair, health("n1", suspected=late, unmet=late)) == ["n2", "n3"]
    assert awaited_in_sync(pair, health("n1", suspected=late, unmet=N3)) == []
    assert awaited_in_sync(alone, health("n1", suspected=late)) == []
    # In the first two seconds it is nothing unusual.
    assert awaited_in_sync(alone, health("n1", unmet=late)) == []

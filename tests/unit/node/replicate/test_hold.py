"""Partitions of which a node lacks what was derived from records that are gone: it neither follows
nor leads them."""

import pytest
from msgspec.structs import replace

from holdfast.node.metadata.model import NodePhase
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.effects import (
    BecameLeader,
    GivenUp,
    LeadershipEnded,
    ProposeInSync,
    Restarted,
)
from tests.support.replica_cores import Cores

HOLDS = ReplicationConfig(suspends_restarted=True)


def resume(cores: Cores, name: str) -> None:
    cores[name].core.resume(0, cores.now)
    cores[name].collect()
    cores.settle()


def test_who_begins_anew_follows_when_it_is_told() -> None:
    cores = Cores(count=4, replicas=3, config=HOLDS)
    cores.cut("a", "d")
    for number in range(5):
        cores.write("a", number)
    cores["a"].log.retain(0, 3)
    cores.connect("ad")
    cores.settle()
    assert [effect.offset for effect in cores["d"].of(Restarted)] == [3]
    cores.write("a", 5)
    cores.cut("a", "d")
    cores.connect("ad")
    cores.settle()
    cores.wait(3.0)
    assert cores.numbers("d") == []
    assert cores["d"].core.followed_epoch(0) == 0
    resume(cores, "d")
    assert cores.numbers("d") == [3, 4, 5]
    assert cores["d"].core.followed_epoch(0) == 1


def test_a_log_that_has_moved_on_meanwhile_begins_anew_again() -> None:
    cores = Cores(count=4, replicas=3, config=HOLDS)
    cores.cut("a", "d")
    for number in range(6):
        cores.write("a", number)
    cores["a"].log.retain(0, 3)
    cores.connect("ad")
    cores["a"].log.retain(0, 5)
    resume(cores, "d")
    assert [effect.offset for effect in cores["d"].of(Restarted)] == [3, 5]
    assert cores.numbers("d") == []
    resume(cores, "d")
    assert cores.numbers("d") == [5]


def test_who_is_held_leaves_the_in_sync_set() -> None:
    cores = Cores(min_insync=1)
    cores.restart("c")
    cores["c"].core.suspend(0)
    cores["c"].core.handle_current(cores.now)
    cores.connect("ac", "bc")
    cores.append("a", 1)
    cores.settle()
    cores.wait(2.0)
    assert (0, ("a", "b")) in cores.proposed("a")
    cores.change(in_sync=("a", "b"))
    cores.tell()
    cores.settle()
    assert cores.watermark("a") == 1
    assert cores.proposed("a") == []
    resume(cores, "c")
    assert (0, ("a", "b", "c")) in cores.proposed("a")


@pytest.mark.parametrize(
    ("in_sync", "down", "leader", "kept"),
    [
        (("a", "b", "c"), "", "b", ("b", "c")),
        (("a", "b", "c"), "b", "c", ("b", "c")),
        (("a", "c"), "c", "", ("c",)),
    ],
)
def test_who_is_held_hands_its_leadership_on(
    in_sync: tuple[str, ...], down: str, leader: str, kept: tuple[str, ...]
) -> None:
    cores = Cores()
    cores.write("a", 1)
    cores.change(in_sync=in_sync)
    if down:
        nodes = dict(cores.metadata.nodes)
        nodes[down] = replace(nodes[down], state=NodePhase.DOWN)
        cores.metadata = replace(cores.metadata, nodes=nodes)
    cores.restart("a")
    core = cores["a"].core
    core.suspend(0)
    core.handle_current(cores.now)
    cores.wait(1.1)
    proposed = cores["a"].of(ProposeInSync)
    assert not cores["a"].of(BecameLeader)
    assert not cores["a"].of(GivenUp)
    assert {(each.info.leader, each.info.in_sync, each.info.epoch) for each in proposed} == {
        (leader, kept, 2)
    }


def test_the_only_one_in_sync_leads_with_what_it_has() -> None:
    cores = Cores()
    cores.write("a", 1)
    cores.change(in_sync=("a",))
    cores.restart("a")
    core = cores["a"].core
    core.suspend(0)
    core.handle_current(cores.now)
    cores["a"].collect()
    assert len(cores["a"].of(GivenUp)) == 1
    (proposed,) = cores["a"].of(ProposeInSync)
    assert (proposed.info.leader, proposed.info.epoch) == ("a", 2)
    cores.change(epoch=2)
    cores.tell()
    assert [effect.epoch for effect in cores["a"].of(BecameLeader)] == [2]


def test_a_leader_that_stands_apart_ends_its_leadership_itself() -> None:
    """Its disk is an older copy. Alone in sync it would commit what it appends."""
    cores = Cores()
    cores.write("a", 1)
    cores.change(in_sync=("a",))
    core = cores["a"].core
    core.set_unfit(stands_apart=True)
    cores["a"].collect()
    assert [effect.epoch for effect in cores["a"].of(LeadershipEnded)] == [1]
    cores.change(epoch=2)
    cores.tell()
    assert not [effect for effect in cores["a"].of(BecameLeader) if effect.epoch == 2]

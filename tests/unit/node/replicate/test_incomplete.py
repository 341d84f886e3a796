"""Replicas that may lack records that they have acknowledged, because their machine lost power."""

import msgspec
from msgspec.structs import replace

from holdfast.node.metadata.model import PartitionInfo
from holdfast.node.replicate.effects import ProposeInSync
from tests.support.replica_cores import Cores

COMPLETE: frozenset[int] = frozenset()
FIRST = frozenset({0})


def lose_power(cores: Cores, *names: str) -> None:
    """The nodes return with what was synced, and know all metadata."""
    cores.config = msgspec.structs.replace(cores.config, is_incomplete=True)
    for name in names:
        cores.restart(name)
        cores[name].core.handle_current(cores.now)
        cores[name].collect()


def review(cores: Cores, name: str, **reports: frozenset[int]) -> frozenset[int]:
    """The partitions that the node reports, after it has these reports, and its timers."""
    node = cores[name]
    node.core.review_incomplete(reports, cores.now)
    node.core.handle_timers(cores.now)
    node.collect()
    return node.core.review_incomplete(reports, cores.now)


def proposal(cores: Cores, name: str) -> PartitionInfo | None:
    """The last change that the node proposes, which is made."""
    found = cores[name].of(ProposeInSync)
    if not found:
        return None
    info = found[-1].info
    cores.change(leader=info.leader, epoch=info.epoch, in_sync=info.in_sync)
    cores.tell()
    return info


def with_three_records(*, unsynced: str) -> Cores:
    """All have acknowledged three records; these disks will lack the third one."""
    cores = Cores(min_insync=2)
    cores.write("a", 1, 2)
    cores.append("a", 3)
    cores.run()
    kept = {name: cores[name].disk.synced for name in unsynced}
    cores.sync()
    cores.run()
    for name, synced in kept.items():
        cores[name].disk.synced = synced
    assert cores.watermark("a") == 3
    return cores


def test_it_does_not_lead_while_another_one_is_complete() -> None:
    cores = with_three_records(unsynced="b")
    lose_power(cores, "b")
    assert cores.numbers("b") == [1, 2]
    cores.cut("a", "c")
    cores.change(leader="b", epoch=2)
    cores.tell()
    assert review(cores, "b", a=COMPLETE) == FIRST
    assert not cores["b"].core.leads(0)
    info = proposal(cores, "b")
    assert info is not None
    assert (info.leader, info.epoch, info.in_sync) == ("a", 3, ("a", "c"))
    assert review(cores, "b", a=COMPLETE) == COMPLETE, "it is not in the in-sync set"


def test_it_waits_for_one_that_may_be_complete() -> None:
    cores = with_three_records(unsynced="ab")
    lose_power(cores, "a", "b")
    for reports in ({"b": FIRST}, {}):
        assert review(cores, "a", **reports) == FIRST
        assert proposal(cores, "a") is None
        cores.wait(5.0)
        assert not cores["a"].core.leads(0)
    assert review(cores, "a", b=FIRST, c=COMPLETE) == FIRST
    info = proposal(cores, "a")
    assert info is not None
    assert (info.leader, info.in_sync) == ("c", ("b", "c"))


def test_the_only_one_in_sync_leads() -> None:
    cores = with_three_records(unsynced="a")
    cores.change(in_sync=("a",))
    cores.tell()
    lose_power(cores, "a")
    assert review(cores, "a") == COMPLETE
    assert proposal(cores, "a") is not None
    assert cores["a"].core.leads(0)


def test_it_follows_before_it_is_known_to_be_complete() -> None:
    cores = with_three_records(unsynced="b")
    lose_power(cores, "b")
    cores.connect("ab", "bc")
    cores.settle()
    assert cores.numbers("b") == [1, 2, 3]
    assert review(cores, "b", a=COMPLETE, c=COMPLETE) == FIRST


def test_it_cuts_what_a_leader_does_not_have() -> None:
    """Another node would take over, because it has all that is committed."""
    cores = Cores(min_insync=2)
    cores.write("a", 1, 2)
    cores.cut("a", "c")
    cores.append("a", 3)
    cores.run()
    cores.sync("b")
    cores.cut("a", "b")
    lose_power(cores, "b")
    cores.change(leader="c", epoch=2)
    cores.tell("b", "c")
    cores.append("c", 4)
    cores.connect("bc")
    cores.settle()
    assert proposal(cores, "b") is None
    assert cores.numbers("b") == [1, 2, 4]


def test_if_each_may_lack_records_the_leader_leads_and_reports_it() -> None:
    """The controller takes nobody out of the set while the logs are not compared."""
    cores = with_three_records(unsynced="abc")
    lose_power(cores, "a", "b", "c")
    assert review(cores, "b", a=FIRST, c=FIRST) == FIRST, "it is not named as the leader"
    assert review(cores, "a", b=FIRST, c=FIRST) == FIRST
    info = proposal(cores, "a")
    assert info is not None
    assert info.in_sync == ("a", "b", "c")
    assert cores["a"].core.leads(0)
    assert review(cores, "a", b=FIRST, c=FIRST) == FIRST
    cores.connect()
    cores.settle()
    assert review(cores, "a", b=FIRST, c=FIRST) == COMPLETE
    assert cores.numbers("c") == [1, 2]


def test_if_each_may_lack_records_the_one_with_the_most_leads_in_the_end() -> None:
    cores = with_three_records(unsynced="ac")
    cores.wait(1.0)
    lose_power(cores, "a", "b", "c")
    cores["b"].log.advance(0, 3)
    assert review(cores, "a", b=FIRST, c=FIRST) == FIRST
    assert proposal(cores, "a") is not None
    assert cores["a"].core.leads(0)
    cores.connect("ab")
    info = proposal(cores, "b")
    assert info is not None
    assert (info.leader, info.in_sync) == ("b", ("b", "c"))
    assert cores["b"].core.leads(0)
    cores.connect("bc", "ac")
    cores.settle()
    assert [cores.numbers(name) for name in "abc"] == [[1, 2, 3]] * 3


def test_a_set_that_changes_ends_the_report_of_a_leader() -> None:
    cores = with_three_records(unsynced="abc")
    lose_power(cores, "a", "b", "c")
    review(cores, "a", b=FIRST, c=FIRST)
    assert proposal(cores, "a") is not None
    cores.metadata = replace(cores.metadata, min_insync=1)
    cores.change(in_sync=("a", "b"))
    cores.tell()
    assert review(cores, "a", b=FIRST, c=FIRST) == COMPLETE
